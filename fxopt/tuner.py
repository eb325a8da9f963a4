"""Measure, label, propose, recompile, verify, compare, keep or revert, remember: the life of one graph."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxopt import ablation, bisect, distributed, floor, identity, machine, measure, registry, training, verify
from fxopt.ablation import AblationRow
from fxopt.build import Build, Builder
from fxopt.dump import Dumper
from fxopt.labels import Axis, Label
from fxopt.options import Options
from fxopt.plan import MAX_MACHINES, PassUse, Plan, PlanCorrupt, PlanStore, PlanStoreError, plan_key
from fxopt.plan_passes import passes_of
from fxopt.profiling import labels_of, profile_build
from fxopt.proposals import Proposals, to_come
from fxopt.registry import PassContext
from fxopt.report.model import CandidateReport, GraphReport, phase, to_plain
from fxopt.search import Proposal, Search, Step, Trial
from fxopt.together import decide_together
from fxopt.torch_api import dynamo, inductor
from fxopt.training import Gradients
from fxopt.trials import Trials, spelled
from fxopt.warning import FxoptWarning, warn
from profiler_core import exclusive

if TYPE_CHECKING:
    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings

__all__ = ["FxoptWarning", "Tuner", "graph_device", "unsupported", "warn"]

log = logging.getLogger("fxopt")


class PlanMoved(PlanStoreError):
    """A plan that another machine made, and that is not right on this one."""


@dataclass
class Tuner:
    """One graph from Dynamo to the code that is kept.

    gm and inputs are Dynamo's; patches are the caller's Inductor options; session is true under fxopt.optimize.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    options: Options
    patches: dict[str, Any]
    session: bool = False
    may_measure: bool = True
    check_weights: bool = True
    report: GraphReport = field(default_factory=GraphReport)

    def __post_init__(self) -> None:
        self.device = graph_device(self.inputs)
        self.real = dynamo.concrete(self.inputs)
        self.wanted = training.needed(self.inputs)
        self.budget = verify.parse_precision(self.options.precision)
        self.static = dynamo.static_inputs(self.gm, self.inputs)
        self.store = PlanStore(self.options.plan_root, max_bytes=self.options.plan_limit)
        self.passes = registry.select(self.options.passes, self.options.disable)
        self.started = time.perf_counter()
        self.report.compile_id = dynamo.current_compile_id()
        self._written: Plan | None = None
        self._sets: list[list[Any]] = []
        self._gradients: Gradients | None = None

    # -- the way through ------------------------------------------------------------------------------------------

    def run(self) -> Callable[..., Any]:
        """The code to keep. Raises only what the fallback, plain Inductor, would have to answer for."""
        reason = unsupported(self.inputs, self.device)
        if reason:
            return self.plain(reason, source="skipped")
        if communicating := dynamo.collectives(self.gm):
            # A rank that measured it alone would wait for the others for ever.
            return self.plain(f"the graph communicates with other ranks ({communicating[0]})", source="skipped")
        if self.wanted:
            with dynamo.outside_tracing():
                self.real = training.aliases(self.real)
        parts = identity.key_parts(
            self.gm,
            self.inputs,
            device=self.device,
            deciding=self.options.deciding(),
            patches=self.patches,
            passes=self.passes,
            session=self.session,
            weights=self._weights(),
        )
        self.report.key = plan_key(**parts)
        self.report.plan_path = str(self.store.path(self.report.key))
        ranks = None
        if self.options.distributed == "auto":
            ranks = distributed.current(self.options.distributed_timeout, self.options.time_limit)
        if ranks is None:
            return self.decide(lambda plan: None)
        return decide_together(self, ranks, parts)

    def decide(self, tell: Callable[[Plan | None], None]) -> Callable[..., Any]:
        """The code that this process decides on. `tell` is called as soon as it is known by which plan, if by any."""
        plan = self.load_plan()
        if plan is not None:
            self.report.source = "plan"
            trusted = self._verified_here(plan)
            if trusted:
                tell(plan)
            try:
                with phase(self.report, "apply plan"):
                    kept = self.apply(plan)
            except PlanMoved as error:
                report = self.report
                report.decision, report.verdict, report.labels, report.out_of_reach = "baseline", None, [], []
                report.ablation = []
                report.messages.append(str(error))
                warn(str(error))
            else:
                if not trusted:
                    tell(plan)
                return kept
        if not self.may_measure:
            tell(None)
            return self.plain("no plan for this graph, and mode 'apply' never measures", source="apply")
        self.report.source = "tuned"
        kept = self._tune()
        tell(self._written)
        if bisect.of_process(self.options.bisect) is None:
            return kept
        # The limit is on what was decided, never on the deciding.
        plan = self.load_plan()
        return kept if plan is None else self.apply(plan)

    def _weights(self) -> str:
        """The weights in the plan's key: nothing where no accuracy is given up, else which ones were verified. Nothing
        either where they are trained: they differ from step to step whatever was verified.
        """
        if self.wanted or (self.budget.precision is verify.Precision.FP32 and self.budget.max_rel_l2 is None):
            return ""
        with dynamo.outside_tracing():
            return identity.weights_digest([self.inputs[position] for position in sorted(self.static)])

    def plain(self, reason: str, source: str) -> Callable[..., Any]:
        self.report.source = source
        self.report.messages.append(reason)
        log.info("plain Inductor: %s", reason)
        return inductor.compile_plain(self.gm, self.inputs, self.patches)

    def load_plan(self) -> Plan | None:
        try:
            return self.store.load(self.report.key)
        except PlanCorrupt as error:
            self.report.messages.append(str(error))
            warn(f"{error}")
            return None
        except PlanStoreError as error:
            self._store_failed(error)
            return None

    def _store_failed(self, error: PlanStoreError) -> None:
        """Say once that plans cannot be read or kept; tuning goes on for this process alone."""
        if not self.report.plan_path:
            return
        self.report.plan_path = ""
        self.report.messages.append(str(error))
        warn(f"the plan is not kept: {error}")

    # -- a plan that was found ------------------------------------------------------------------------------------

    def _verified_here(self, plan: Plan) -> bool:
        """Whether nothing of the plan needs to be verified before it is used: it was on this machine, or is Inductor's
        own code."""
        same = plan.key == self.report.key and machine.known(machine.machine(self.device), plan.machines)
        return same or plan.decision == "baseline"

    def apply(self, plan: Plan, trusted: bool = False) -> Callable[..., Any]:
        """The plan's code. trusted: it was verified on this machine, whatever the plan says."""
        labels = [Label.from_json(item) for item in plan.labels]
        origins = {name: tuple(pre) for name, pre in plan.origins.items()}
        context = self._context(labels, origins=origins, mutated=frozenset(plan.mutated))
        self.report.labels = labels
        self.report.decision = plan.decision
        self.report.out_of_reach = list(plan.out_of_reach)
        self.report.ablation = [AblationRow.from_json(row) for row in plan.ablation]
        limited = bisect.of_process(self.options.bisect, self._name)
        builder = replace(self._builder(context), bisection=limited)
        if plan.decision == "baseline":
            return self._inductors_own()
        passes = passes_of(plan, self.passes, context)
        if context.dynamic:
            # Which guards Inductor itself needs shows beside its own code alone. What the passes add is taken back.
            inductor.compile_graph(self.gm, self.inputs, patches=builder.patches, keep_guards=True)
        build = builder.build(passes, keep_guards=not context.dynamic)
        if build.errors:
            raise RuntimeError(f"the plan {self.report.key[:12]} does not apply: {'; '.join(build.errors)}")
        if not trusted and not self._verified_here(plan):
            self._verify_moved(plan, builder, build)
        self.report.frozen = bool(build.compiled.frozen)
        self.report.candidates = [
            CandidateReport(
                name="+".join(map(spelled, passes)),
                passes=[p.name for p in passes],
                reports=build.reports,
                outcome="kept",
                reason="plan",
                compile_seconds=build.seconds,
                options={p.name: to_plain(p.options()) for p in passes},
            )
        ]
        if self.options.ablate and self.may_measure and limited is None and not plan.ablation:
            self._ablate_plan(plan, builder, build)
        build.compiled.scope.adopt()
        return build.fn

    def _inductors_own(self) -> Callable[..., Any]:
        """What torch.compile would run without fxopt: the backward is compiled when it is first run."""
        compiled = inductor.compile_graph(self.gm, self.inputs, patches=self.patches, keep_guards=True)
        compiled.scope.adopt()
        return compiled.flat()

    def _verify_moved(self, plan: Plan, builder: Builder, build: Build) -> None:
        """Verifies the code of a plan that another machine made, once for this machine. Raises PlanMoved."""
        name, report = f"the plan {plan.key[:12]} was made on another machine", self.report
        with phase(report, "verify a plan from elsewhere"):
            baseline = builder.baseline()
            mutated = baseline.compiled.mutated or frozenset()
            if mutated != frozenset(plan.mutated):
                raise PlanMoved(f"{name}, and says that the graph writes to other inputs than it does")
            if why := self._untrained(mutated):
                raise PlanMoved(f"{name}: {why}")
            self._share(mutated)
            self._with_backward(baseline)
            with self._running():
                verdict = verify.verify(
                    self._call(build.fn),
                    self._call(baseline.fn),
                    dynamo.copy_graph(self.gm),
                    self._input_sets(),
                    self._held,
                    self.budget,
                    logits=self.options.logits,
                    gradients=self._gradients,
                )
        report.verdict = verdict
        if not verdict.ok:
            raise PlanMoved(f"{name}, and is wrong here: {verdict.reason}")
        report.messages.append(f"{name}; it was verified here, and is kept")
        if plan.key == report.key:
            machines = [*plan.machines, machine.machine(self.device)][-MAX_MACHINES:]
            try:
                self.store.save(plan.model_copy(update={"machines": machines}))
            except PlanStoreError as error:
                self._store_failed(error)

    def _ablate_plan(self, plan: Plan, builder: Builder, kept: Build) -> None:
        """Measures the ablation that the tuning run was not asked for, and adds it to the plan."""
        self._share(frozenset(plan.mutated))
        with phase(self.report, "compile baseline"):
            own = builder.baseline()
            baseline = self._timed_baseline(own)
        self._with_backward(own)
        trials = self._trials(builder, self._steady(baseline), plan.environment)
        trials.hold(kept)
        rows = trials.ablate(kept.passes) + ablation.not_kept([], kept.passes, plan.out_of_reach)
        self.report.ablation = rows
        try:
            self.store.save(plan.model_copy(update={"ablation": to_plain(rows)}))
        except PlanStoreError as error:
            self._store_failed(error)

    # -- tuning ---------------------------------------------------------------------------------------------------

    def _tune(self) -> Callable[..., Any]:
        from profiler_core import layers

        report = self.report
        context = self._context([])
        builder = self._builder(context)
        with phase(report, "compile baseline"):
            baseline = builder.baseline()
        self._say("baseline compiled")
        mutated = baseline.compiled.mutated or frozenset()
        if why := self._untrained(mutated):
            report.source = "skipped"
            report.messages.append(f"{why}: Inductor's code is kept")
            return self._inductors_own()

        self._share(mutated)
        self._with_backward(baseline)
        with phase(report, "measure baseline"):
            profile = self._profile(baseline)
        report.profile = profile
        report.baseline_kernel_ns = report.kept_kernel_ns = profile.kernel_ns
        report.baseline_wall_ns = report.kept_wall_ns = profile.wall_ns
        with phase(report, "label"):
            found, report.ceilings = labels_of(profile, self.device, self.options, self.store.root / "ceilings")
        report.labels, report.missing = list(found.labels), list(found.missing)
        self._find_floor(baseline, report.ceilings)
        self._say(f"measured: kernels {profile.kernel_ns / 1e3:.0f} us, wall {profile.wall_ns / 1e3:.0f} us a call")
        context = self._context(
            report.labels,
            origins=self._origins(),
            mutated=mutated,
        )
        builder = replace(builder, context=context)
        callers_own = self._timed_baseline(baseline)
        timed_baseline = self._steady(callers_own)
        classes: dict[str, str] = {}
        for number, provenance in enumerate(self._provenances):
            found_classes = layers.find(provenance).node_class
            # What the backward computes anew has the name that it has in the forward, and its class.
            classes = {name: f"backward {of}" if number else of for name, of in found_classes.items()} | classes
        proposals = Proposals(self.passes, self.options, report, context, classes)
        best: Trial | None = None
        if first := proposals.answering(context.labels):
            trials = self._trials(builder, timed_baseline, profile.environment)
            first += proposals.answering(self._to_come(timed_baseline, trials))
            best = self._search(trials, proposals, first)
            if self.options.ablate:
                passes = best.passes if best is not None else []
                report.ablation = trials.ablate(passes)
                report.ablation += ablation.not_kept(report.candidates, passes, report.out_of_reach)
        kept = best.build if best is not None else baseline
        if best is None and not report.candidates and not report.out_of_reach:
            report.messages.append("no pass answers a label of this graph")
        report.frozen = bool(kept.compiled.frozen)
        report.memory_bytes = best.entry.memory_bytes if best is not None else 0
        report.output_copies = getattr(best.build.fn if best is not None else None, "output_copies", None)
        if best is None and self._wants_graphs():
            kept = replace(baseline, fn=callers_own)
        with phase(report, "write plan"):
            self._write_plan(best)
        if best is None and self.wanted:
            return self._inductors_own()
        kept.compiled.scope.adopt()
        return kept.fn

    def _share(self, mutated: frozenset[int]) -> None:
        """Parameters and buffers are shared by every measured call, except those that a call would change."""
        self._held, self._mutated = self.static - mutated, mutated
        self._arguments = self.real  # of a measured call
        self._before = verify.clone_inputs(self.real, self._held) if mutated else []

    def _find_floor(self, baseline: Build, ceilings: Ceilings) -> None:
        report, backward = self.report, baseline.compiled.backward
        graphs = [baseline.compiled.post_grad, backward.post_grad if backward is not None else None]
        try:
            found = [floor.floor(graph.graph, ceilings, self.budget) for graph in graphs if graph is not None]
        except Exception as error:  # a number for the reader, which no decision rests on
            if self.options.on_error == "raise":
                raise
            report.messages.append(f"no floor: its model fails on this graph: {type(error).__name__}: {error}")
        else:
            if found:
                report.floor_ns, report.floor_flops, report.floor_bytes = (
                    sum(getattr(one, name) for one in found) for name in ("ns", "flops", "bytes")
                )

    def _profile(self, build: Build) -> Profile:
        """Measured before any CUDA graph is captured, on copies of the inputs, with the random state put back."""

        def again() -> inductor.Compiled:
            return inductor.compile_graph(
                self.gm, self.inputs, patches=self._measured_patches(), capture=True, caches=False, keep_guards=True
            )

        profile, self._provenances = profile_build(
            build,
            again,
            self._steady,
            verify.clone_inputs(self._arguments, self._held),
            device=self.device,
            options=self.options,
            store=self.store.root / "provenance",
            running=self._running,
        )
        return profile

    def _steady(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` with the inputs that it writes to put back before each call, so that every measured call does the same.

        A counter that indexes a cache would otherwise run past its end. Of a graph with gradients a call is forward and
        backward.
        """
        call = self._call(fn)
        if not self._mutated:
            return call

        def restored(*args: Any) -> Any:
            self._put_back(args)
            return call(*args)

        return restored

    def _call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn if self._gradients is None else self._gradients.of(fn)

    def _untrained(self, mutated: frozenset[int]) -> str:
        """Why a graph with gradients is left as it is, "" for any other."""
        if not self.wanted:
            return ""
        return training.refusal(self.real, mutated, self._wants_graphs())

    def _with_backward(self, baseline: Build) -> None:
        """From now on a measured call of a graph with gradients runs its backward, from fixed cotangents."""
        if not self.wanted:
            return
        with phase(self.report, "draw cotangents"), self._running(), torch.enable_grad():
            outputs = list(baseline.fn(*verify.clone_inputs(self.real, self._held)))
            leading = training.differentiable(outputs)
            drawn = training.cotangents([outputs[position] for position in leading])
        self._gradients = Gradients(self.wanted, leading, len(self.inputs))
        self._arguments = [*self.real, *drawn]
        self.report.messages.append(f"a call is forward and backward: {self._gradients.describe()}")

    def _origins(self) -> dict[str, tuple[str, ...]]:
        """By post-grad node, forward's before the backward's, the pre-grad nodes that it comes from."""
        known = [p.nodes for p in reversed(self._provenances)]
        return {name: info.pre_grad for nodes in known for name, info in nodes.items()}

    def _put_back(self, args: Sequence[Any]) -> None:
        """Give the inputs that the graph writes to the values that they had before anything was measured."""
        for position in sorted(self._mutated):
            value = self._before[position]
            if isinstance(value, torch.Tensor):
                args[position].copy_(value)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        devices = [self.device] if self.device.type == "cuda" else []
        # What is measured waits for what others measure on the device, and holds it against them.
        with exclusive.measuring(self.device), dynamo.outside_tracing(), torch.random.fork_rng(devices=devices):
            for inputs in self._sets:  # a candidate must start from what the baseline starts from
                self._put_back(inputs)
            yield

    def _search(self, trials: Trials, proposals: Proposals, first: Sequence[Proposal]) -> Trial | None:
        """The best trial, compared with the baseline once more; None where the baseline stays."""
        report = self.report
        best = Search(
            evaluate=trials.evaluate,
            propose=proposals.answering,
            faster=trials.faster,
            less_kernel_time=trials.less_kernel_time,
            as_fast=trials.as_fast,
            expired=lambda step: self._expired(step, trials.compiles(step)),
            needs=proposals.needs,
        ).run(first)
        kept = {p.name for p in best.passes} if best is not None else set()
        report.out_of_reach += [
            f"{name}: found nothing to do: {why}" for name, why in trials.idle.items() if name not in kept
        ]
        if best is not None and not trials.confirm(best):
            # What was dropped may have cost the little by which the whole set is faster.
            best = best.whole if best.whole is not None and trials.confirm(best.whole) else None
        if best is None:
            return None
        best.entry.outcome = "kept"
        report.decision = "candidate"
        report.verdict = best.entry.verdict
        # The kept candidate is the last one listed, whatever was tried after it.
        report.candidates.remove(best.entry)
        report.candidates.append(best.entry)
        return best

    def _to_come(self, baseline: Callable[..., Any], trials: Trials) -> list[Label]:
        """What will limit the graph once its labels are answered (`proposals.to_come`); the report lists it, too."""
        if self.device.type != "cuda" or any(label.axis is Axis.LAUNCH_BOUND for label in self.report.labels):
            return []
        with self._running():
            host_ns = measure.host_ns(baseline, trials.input_sets[0], device=self.device)
        found = to_come(
            self.report.labels,
            kernel_ns=trials.baseline_kernel_ns,
            host_ns=host_ns,
            floor_ns=self.report.floor_ns or 0.0,
            environment=trials.environment,
            thresholds=dict(self.options.thresholds),
        )
        self.report.labels += found
        return found

    def _expired(self, step: Step, compiles: bool = True) -> bool:
        # What needs no compiling may take half the time again: a candidate is worth little without its CUDA graph.
        if time.perf_counter() - self.started <= self.options.time_limit * (1 if compiles else 1.5):
            return False
        limit = f"the time limit of {self.options.time_limit:g} s is spent"
        if step.removal:
            self.report.messages.append(f"{limit}: whether {step.subject.name} is still of use was not tried")
        else:
            self.report.out_of_reach.append(f"{spelled(step.subject)}: not tried, {limit}")
        return True

    def _say(self, what: str) -> None:
        """One line of progress on stderr, where it was asked for."""
        if self.options.verbose:
            spent = f"{time.perf_counter() - self.started:6.1f} of {self.options.time_limit:g} s"
            print(f"fxopt [{spent}] {what}", file=sys.stderr, flush=True)

    def _trials(self, builder: Builder, baseline: Callable[..., Any], environment: Mapping[str, Any]) -> Trials:
        return Trials(
            self.gm,
            self.inputs,
            replace(builder, record=True),
            baseline,
            self._input_sets(),
            self._held,
            self.options,
            self.device,
            self.report,
            environment,
            self._steady,
            self._running,
            self._say,
            gradients=self._gradients,
        )

    def _input_sets(self) -> list[list[Any]]:
        """The caller's inputs and fresh ones like them; all copies, for a graph may write to them."""
        # An index must stay in its table: integers are only moved around where any of them may stand anywhere.
        kept = self._held | dynamo.fixed_integers(self.gm, self.real)
        sets = [verify.clone_inputs(self._arguments, self._held) for _ in range(self.options.verify_inputs + 1)]
        self._sets = [sets[0], *(verify.fresh_inputs(own, kept, seed) for seed, own in enumerate(sets[1:], 1))]
        return self._sets

    # -- configuration --------------------------------------------------------------------------------------------

    def _builder(self, context: PassContext) -> Builder:
        patches, reports = self._measured_patches(), self.store.root / "reports"
        dumper = Dumper(self.options.dump, self._name) if self.options.dump is not None else None
        return Builder(self.gm, self.inputs, patches, context, reports, self.check_weights, dumper)

    @property
    def _name(self) -> str:
        """The graph's name in dumps and in bisection: Dynamo's id of the compilation, and the plan's key."""
        return "-".join(filter(None, (self.report.compile_id.replace("/", "_"), self.report.key[:8])))

    def _wants_graphs(self) -> bool:
        return bool(self.patches.get("triton.cudagraphs"))

    def _measured_patches(self) -> dict[str, Any]:
        """The caller's options without CUDA graphs: a replay hides which launch a kernel belongs to."""
        patches = dict(self.patches)
        if self._wants_graphs():
            patches["triton.cudagraphs"] = False
        return patches

    def _timed_baseline(self, baseline: Build) -> Callable[..., Any]:
        """What the caller would have without fxopt: the measured code, CUDA-graphed if they asked for that."""
        if not self._wants_graphs():
            return baseline.fn
        with phase(self.report, "compile baseline"):
            compiled = inductor.compile_graph(self.gm, self.inputs, patches=self.patches, keep_guards=True)
            return compiled.flat()

    def _context(
        self,
        labels: Sequence[Label],
        origins: dict[str, tuple[str, ...]] | None = None,
        mutated: frozenset[int] = frozenset(),
    ) -> PassContext:
        from profiler_core import roofline

        return PassContext(
            device=self.device,
            budget=self.budget,
            labels=tuple(labels),
            origins=origins or {},
            matrix_units=frozenset(roofline.matrix_units(self.device)),
            static=self.static,
            mutated=mutated,
            random=tuple(dynamo.random_operations(self.gm)),
            dynamic=dynamo.symbolic(self.inputs, self.gm),
            session=self.session,
            cache=self.store.root / "measured",
            grad=bool(self.wanted),
        )

    # -- remembering ----------------------------------------------------------------------------------------------

    def _write_plan(self, best: Trial | None) -> None:
        from datetime import datetime, timezone

        report = self.report
        spent = time.perf_counter() - self.started
        gain = (report.baseline_wall_ns or 0.0) - (report.kept_wall_ns or 0.0)
        report.calls_to_pay = spent * 1e9 / gain if best is not None and gain > 0 else None
        profile = report.profile
        assert profile is not None
        plan = Plan(
            key=report.key,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            decision="candidate" if best is not None else "baseline",
            freeze=report.frozen,
            passes=[
                PassUse(name=p.name, options=to_plain(p.options()), stage=p.stage.value)
                for p in (best.passes if best is not None else [])
            ],
            inductor={key: identity._spell(value) for key, value in self.patches.items()},
            reports=[to_plain(entry) for entry in report.candidates],
            verdict=to_plain(report.verdict),
            paired=to_plain(report.ratio),
            labels=[label.to_json() for label in report.labels],
            origins={name: list(pre_grad) for name, pre_grad in self._origins().items()},
            mutated=sorted(self._mutated),
            profile={
                "kernel_ns": profile.kernel_ns,
                "wall_ns": profile.wall_ns,
                "attributed_share": profile.attributed_share,
                "kept_kernel_ns": report.kept_kernel_ns,
                "kept_wall_ns": report.kept_wall_ns,
                "floor_ns": report.floor_ns,
                "floor_flops": report.floor_flops,
                "floor_bytes": report.floor_bytes,
            },
            environment=to_plain(profile.environment),
            out_of_reach=list(report.out_of_reach),
            tuning_seconds=spent,
            calls_to_pay=report.calls_to_pay,
            memory_bytes=report.memory_bytes,
            ablation=to_plain(report.ablation),
            machines=[machine.machine(self.device)],
        )
        self._written = plan
        try:
            self.store.save(plan)
        except PlanStoreError as error:
            self._store_failed(error)


def graph_device(inputs: Sequence[Any]) -> torch.device:
    """The device that a graph is measured on: the first accelerator among its inputs, else the CPU."""
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def unsupported(inputs: Sequence[Any], device: torch.device) -> str:
    """Why fxopt leaves a graph to plain Inductor, "" if it does not."""
    if device.type not in ("cpu", "cuda"):
        return f"fxopt measures on CPU and CUDA; this graph runs on {device.type}"
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor) and value.device.type == "cuda"}
    if len(devices) > 1:
        return f"the graph uses several devices: {', '.join(sorted(map(str, devices)))}"
    if any(dynamo.is_fake(value) for value in inputs):
        return (
            "the inputs have no values, as where Dynamo splits a graph into DDP's buckets: with "
            "torch._dynamo.config.optimize_ddp = False it stays whole"
        )
    for value in inputs:
        if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return f"an input is a tensor subclass ({type(value).__name__})"
    return ""
