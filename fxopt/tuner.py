"""Measure, label, propose, recompile, verify, compare, keep or revert, remember: the life of one graph."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxopt import bisect, identity, measure, registry, rules, verify
from fxopt.build import Build, Builder
from fxopt.dump import Dumper
from fxopt.labels import Label
from fxopt.options import Options
from fxopt.plan import PassUse, Plan, PlanCorrupt, PlanStore, PlanStoreError, plan_key
from fxopt.profiling import labels_of, profile_build
from fxopt.registry import Pass, PassContext
from fxopt.report.model import CandidateReport, GraphReport, phase, to_plain
from fxopt.search import Trial, search
from fxopt.torch_api import dynamo, inductor

if TYPE_CHECKING:
    from profiler_core.profiles import Profile

log = logging.getLogger("fxopt")


class FxoptWarning(UserWarning):
    """Something went wrong inside fxopt; the model runs all the same."""


def warn(message: str) -> None:
    warnings.warn(f"fxopt: {message}", FxoptWarning, stacklevel=2)


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
        self.budget = verify.parse_precision(self.options.precision)
        self.static = dynamo.static_inputs(self.gm, self.inputs)
        self.store = PlanStore(self.options.plan_root)
        self.passes = registry.select(self.options.passes, self.options.disable)
        self.started = time.perf_counter()
        self._considered: set[str] = set()
        self.report.compile_id = dynamo.current_compile_id()

    # -- the way through ------------------------------------------------------------------------------------------

    def run(self) -> Callable[..., Any]:
        """The code to keep. Raises only what the fallback, plain Inductor, would have to answer for."""
        reason = unsupported(self.inputs, self.device)
        if reason:
            return self._plain(reason, source="skipped")
        self.report.key = plan_key(
            **identity.key_parts(
                self.gm,
                self.inputs,
                device=self.device,
                deciding=self.options.deciding(),
                patches=self.patches,
                passes=self.passes,
                session=self.session,
                weights=self._weights(),
            )
        )
        self.report.plan_path = str(self.store.path(self.report.key))
        plan = self._load_plan()
        if plan is not None:
            self.report.source = "plan"
            with phase(self.report, "apply plan"):
                return self._apply(plan)
        if not self.may_measure:
            self.report.source = "apply"
            return self._plain("no plan for this graph, and mode 'apply' never measures", source="apply")
        self.report.source = "tuned"
        kept = self._tune()
        if bisect.of_process(self.options.bisect) is None:
            return kept
        # The limit is on what was decided, never on the deciding.
        plan = self._load_plan()
        return kept if plan is None else self._apply(plan)

    def _weights(self) -> str:
        """The weights in the plan's key: nothing where no accuracy is given up, else which ones were verified."""
        if self.budget.precision is verify.Precision.FP32 and self.budget.max_rel_l2 is None:
            return ""
        with dynamo.outside_tracing():
            return identity.weights_digest([self.inputs[position] for position in sorted(self.static)])

    def _plain(self, reason: str, source: str) -> Callable[..., Any]:
        self.report.source = source
        self.report.messages.append(reason)
        log.info("plain Inductor: %s", reason)
        return inductor.compile_plain(self.gm, self.inputs, self.patches)

    def _load_plan(self) -> Plan | None:
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

    def _apply(self, plan: Plan) -> Callable[..., Any]:
        labels = [Label.from_json(item) for item in plan.labels]
        origins = {name: tuple(pre) for name, pre in plan.origins.items()}
        context = self._context(labels, origins=origins, mutated=frozenset(plan.mutated))
        self.report.labels = labels
        self.report.decision = plan.decision
        self.report.out_of_reach = list(plan.out_of_reach)
        limited = bisect.of_process(self.options.bisect, self._name)
        builder = replace(self._builder(context), bisection=limited)
        if plan.decision == "baseline":
            compiled = inductor.compile_graph(self.gm, self.inputs, patches=self.patches, keep_guards=True)
            compiled.scope.adopt()
            return compiled.flat()
        known = registry.discover()
        passes = registry.order([known[use.name](**use.options) for use in plan.passes])
        build = builder.build(passes, keep_guards=True)
        if build.errors:
            raise RuntimeError(f"the plan {self.report.key[:12]} does not apply: {'; '.join(build.errors)}")
        self.report.frozen = bool(build.compiled.frozen)
        self.report.candidates = [
            CandidateReport(
                name="+".join(p.name for p in passes),
                passes=[p.name for p in passes],
                reports=build.reports,
                outcome="kept",
                reason="plan",
                compile_seconds=build.seconds,
            )
        ]
        build.compiled.scope.adopt()
        return build.fn

    # -- tuning ---------------------------------------------------------------------------------------------------

    def _tune(self) -> Callable[..., Any]:
        report = self.report
        context = self._context([])
        builder = self._builder(context)
        with phase(report, "compile baseline"):
            baseline = builder.baseline()
        self._say("baseline compiled")
        if context.grad:
            report.source = "skipped"
            why = {p.name: registry.inapplicable(p, context) or "gradients are on" for p in self.passes}
            report.out_of_reach = [f"{name}: {reason}" for name, reason in why.items()]
            report.messages.append("gradients are on, so Inductor's code is kept; run under torch.no_grad() to tune")
            baseline.compiled.scope.adopt()
            return baseline.fn

        mutated = baseline.compiled.mutated or frozenset()
        # Parameters and buffers are shared by every measured call, except those that a call would change.
        self._held, self._mutated = self.static - mutated, mutated
        self._before = verify.clone_inputs(self.real, self._held) if mutated else []
        with phase(report, "measure baseline"):
            profile = self._profile(baseline)
        report.profile = profile
        report.baseline_kernel_ns = report.kept_kernel_ns = profile.kernel_ns
        report.baseline_wall_ns = report.kept_wall_ns = profile.wall_ns
        with phase(report, "label"):
            found, report.ceilings = labels_of(profile, self.device, self.options, self.store.root / "ceilings")
        report.labels, report.missing = list(found.labels), list(found.missing)
        self._say(f"measured: kernels {profile.kernel_ns / 1e3:.0f} us, wall {profile.wall_ns / 1e3:.0f} us a call")
        context = self._context(
            report.labels,
            origins={name: info.pre_grad for name, info in self._provenance.nodes.items()},
            mutated=mutated,
        )
        builder = replace(builder, context=context)
        callers_own = self._timed_baseline(baseline)
        timed_baseline = self._steady(callers_own)
        proposals = self._propose(context, context.labels)
        best = self._search(builder, timed_baseline, proposals) if proposals else None
        kept = best if best is not None else baseline
        if best is None and not report.candidates and not report.out_of_reach:
            report.messages.append("no pass answers a label of this graph")
        report.frozen = bool(kept.compiled.frozen)
        report.memory_bytes = kept.memory_bytes if best is not None else 0
        report.output_copies = getattr(best.fn if best else None, "output_copies", None)
        if best is None and self._wants_graphs():
            kept = replace(baseline, fn=callers_own)
        kept.compiled.scope.adopt()
        self._write_plan(best)
        return kept.fn

    def _profile(self, build: Build) -> Profile:
        """Measured before any CUDA graph is captured, on copies of the inputs, with the random state put back."""

        def again() -> inductor.Compiled:
            return inductor.compile_graph(
                self.gm, self.inputs, patches=self._measured_patches(), capture=True, caches=False, keep_guards=True
            )

        profile, self._provenance = profile_build(
            build,
            again,
            self._steady,
            verify.clone_inputs(self.real, self._held),
            device=self.device,
            options=self.options,
            store=self.store.root / "provenance",
            running=self._running,
        )
        return profile

    def _steady(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` with the inputs that it writes to put back before each call, so that every measured call does the same.

        A counter that indexes a cache would otherwise run past its end.
        """
        if not self._mutated:
            return fn
        pristine = {i: self._before[i] for i in sorted(self._mutated)}

        def restored(*args: Any) -> Any:
            for position, value in pristine.items():
                if isinstance(value, torch.Tensor):
                    args[position].copy_(value)
            return fn(*args)

        return restored

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        devices = [self.device] if self.device.type == "cuda" else []
        with dynamo.outside_tracing(), torch.random.fork_rng(devices=devices):
            yield

    def _propose(self, context: PassContext, labels: Sequence[Label]) -> list[Pass]:
        """Passes that answer one of `labels`, each considered once; the report says why others are out of reach."""
        proposals = []
        for p in self.passes:
            mine = [label for label in labels if label.axis in p.answers]
            if not mine or p.name in self._considered or self.device.type not in p.devices:
                continue
            self._considered.add(p.name)
            # A kernel may carry several labels; what it could save at most is the largest of them.
            most: dict[str, float] = {}
            for label in mine:
                most[label.launch] = max(most.get(label.launch, 0.0), label.headroom_ns)
            headroom = sum(most.values()) / 1e3
            axes = ", ".join(sorted({label.axis.value for label in mine}))
            nodes = len({name for label in mine for name in label.nodes}) or 1
            what = f"it would answer {axes} on {nodes} nodes (headroom {headroom:.0f} us)"
            reason = registry.inapplicable(p, context)
            if not reason and not self.budget.allows(p.precision):
                reason = f"needs precision={p.precision.value!r}, and {self.options.precision!r} was asked for"
            if reason:
                self.report.out_of_reach.append(f"{p.name}: {reason}; {what}")
            else:
                proposals.append(p)
        return proposals

    def _search(self, builder: Builder, baseline: Callable[..., Any], proposals: Sequence[Pass]) -> Build | None:
        """The best build, compared with the baseline once more; None where the baseline stays."""
        report = self.report
        input_sets = self._input_sets()
        with phase(report, "noise floor"), self._running():
            noise = measure.noise_floor(baseline, input_sets, device=self.device)

        def evaluate(passes: list[Pass], best: Trial | None) -> Trial | None:
            entry = CandidateReport("+".join(p.name for p in passes), [p.name for p in passes])
            report.candidates.append(entry)
            current = self._steady(best.build.fn) if best is not None else baseline
            build = self._try(builder, passes, entry, baseline, current, input_sets, noise)
            self._say(f"{entry.name}: {entry.reason or 'right and timed'}")
            return Trial(passes, build, entry) if build is not None and entry.paired is not None else None

        best = search(
            proposals,
            evaluate=evaluate,
            propose=lambda labels: self._propose(builder.context, labels),
            faster=self._is_faster,
            less_kernel_time=lambda entry, before: self._less_kernel_time(entry, before, noise),
            expired=self._expired,
            needs=lambda p: [q for q in self.passes if q.name in p.needs],
        )
        if best is None:
            return None
        with phase(report, "compare"), self._running():
            report.ratio = self._compare(baseline, self._steady(best.build.fn), input_sets, noise)
        if self.options.objective == "wall" and not report.ratio.faster:
            best.entry.outcome = "rejected"
            best.entry.reason = f"not faster than the baseline in the last comparison: {report.ratio.ratio:.3f}x"
            return None
        report.decision = "candidate"
        report.verdict = best.entry.verdict
        report.kept_wall_ns, report.baseline_wall_ns = report.ratio.candidate_ns, report.ratio.baseline_ns
        report.kept_kernel_ns = best.entry.kernel_ns
        # The kept candidate is the last one listed, whatever was tried after it.
        report.candidates.remove(best.entry)
        report.candidates.append(best.entry)
        return best.build

    def _expired(self, p: Pass) -> bool:
        if time.perf_counter() - self.started <= self.options.time_limit:
            return False
        limit = f"the time limit of {self.options.time_limit:g} s is spent"
        self.report.out_of_reach.append(f"{p.name}: not tried, {limit}")
        return True

    def _say(self, what: str) -> None:
        """One line of progress on stderr, where it was asked for."""
        if self.options.verbose:
            print(f"fxopt [{time.perf_counter() - self.started:6.1f} s] {what}", file=sys.stderr, flush=True)

    def _is_faster(self, entry: CandidateReport, best: CandidateReport | None) -> bool:
        assert entry.paired is not None
        if self.options.objective == "wall":
            return entry.paired.faster
        return self._less_kernel_time(entry, best, entry.paired.noise)

    def _less_kernel_time(self, entry: CandidateReport, best: CandidateReport | None, noise: float) -> bool:
        before = best.kernel_ns if best is not None else self.report.baseline_kernel_ns
        return entry.kernel_ns is not None and before is not None and entry.kernel_ns < before * (1 - noise)

    def _try(
        self,
        builder: Builder,
        trial: Sequence[Pass],
        entry: CandidateReport,
        baseline: Callable[..., Any],
        current: Callable[..., Any],
        input_sets: Sequence[Sequence[Any]],
        noise: float,
    ) -> Build | None:
        """Build, verify and time one candidate; None (with the reason in `entry`) where it cannot be used."""
        report = self.report
        try:
            with phase(report, "compile candidates"):
                build = builder.build(trial)
            entry.reports, entry.compile_seconds = build.reports, build.seconds
            if build.errors:
                entry.reason = "; ".join(build.errors)
                warn(f"a candidate was dropped: {entry.reason}")
                return None
            if not build.effective:
                entry.outcome = "rejected"
                idle = next(r for r in build.reports if not r.rewritten)
                entry.reason = f"{idle.name} found nothing to do: {_first_refusal(idle)}"
                return None
            with phase(report, "verify"), self._running():
                entry.verdict = verify.verify(
                    build.fn,
                    baseline,
                    dynamo.copy_graph(self.gm),
                    input_sets,
                    self._held,
                    self.budget,
                    logits=self.options.logits,
                )
            if not entry.verdict.ok:
                entry.outcome, entry.reason = "rejected", f"wrong: {entry.verdict.reason}"
                return None
            with phase(report, "compare"), self._running():
                steady = self._steady(build.fn)
                entry.paired = self._compare(current, steady, input_sets, noise)
                entry.kernel_ns = self._kernel_ns(steady, input_sets[0])
            assert report.profile is not None
            entry.labels = rules.label_graph(
                entry.paired.candidate_ns,
                entry.kernel_ns,
                report.profile.environment,
                thresholds=dict(self.options.thresholds),
            )
            return build
        except Exception as error:
            if self.options.on_error == "raise":
                raise
            entry.outcome, entry.reason = "failed", f"{type(error).__name__}: {error}"
            warn(f"the candidate {entry.name} failed and was dropped: {entry.reason}")
            return None

    def _compare(
        self, first: Callable[..., Any], second: Callable[..., Any], input_sets: Sequence[Sequence[Any]], noise: float
    ) -> measure.PairedResult:
        """Paired timing; where only the median says faster, once more with four times the pairs."""
        pairs = self.options.pairs
        found = measure.compare(first, second, input_sets, device=self.device, pairs=pairs, noise=noise)
        if found.ratio > 1 + noise and not found.faster:
            found = measure.compare(first, second, input_sets, device=self.device, pairs=4 * pairs, noise=noise)
        return found

    def _kernel_ns(self, fn: Callable[..., Any], arguments: Sequence[Any]) -> float:
        from profiler_core.collect import kineto

        return float(
            kineto.kernel_time(
                lambda: fn(*arguments), iterations=self.options.iterations, warmup=1, device=self.device
            ).kernel_ns
        )

    def _input_sets(self) -> list[list[Any]]:
        """The caller's inputs and fresh ones like them; all copies, for a graph may write to them."""
        # An index must stay in its table: integers are only moved around where any of them may stand anywhere.
        kept = self._held | dynamo.fixed_integers(self.gm, self.real)
        sets = [verify.clone_inputs(self.real, self._held)]
        sets += [verify.fresh_inputs(self.real, kept, seed) for seed in range(1, self.options.verify_inputs + 1)]
        return sets

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
            grad=torch.is_grad_enabled()
            and any(isinstance(value, torch.Tensor) and value.requires_grad for value in self.inputs),
        )

    # -- remembering ----------------------------------------------------------------------------------------------

    def _write_plan(self, best: Build | None) -> None:
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
            origins={name: list(info.pre_grad) for name, info in self._provenance.nodes.items()},
            mutated=sorted(self._mutated),
            profile={
                "kernel_ns": profile.kernel_ns,
                "wall_ns": profile.wall_ns,
                "attributed_share": profile.attributed_share,
                "kept_kernel_ns": report.kept_kernel_ns,
                "kept_wall_ns": report.kept_wall_ns,
            },
            environment=to_plain(profile.environment),
            out_of_reach=list(report.out_of_reach),
            tuning_seconds=spent,
            calls_to_pay=report.calls_to_pay,
            memory_bytes=report.memory_bytes,
        )
        try:
            self.store.save(plan)
        except PlanStoreError as error:
            self._store_failed(error)


def _first_refusal(report: Any) -> str:
    return report.refused[0][1] if report.refused else "no candidate"


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
    for value in inputs:
        if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return f"an input is a tensor subclass ({type(value).__name__})"
    return ""
