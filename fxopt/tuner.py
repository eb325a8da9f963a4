"""The life of one graph: its plan is found and applied, or it is measured and tuned (fxopt/tuning.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxopt import bisect, fingerprints, identity, machine, registry, training
from fxopt.labels import Label
from fxopt.options import Options
from fxopt.plan import Plan, PlanCorrupt, PlanMoved, PlanStore, PlanStoreError, plan_key
from fxopt.plan_passes import passes_of, resting_of
from fxopt.precision import Precision, parse_precision
from fxopt.registry import PassContext, spelled
from fxopt.report.model import CandidateReport, GraphReport, phase, to_plain
from fxopt.torch_api import distributed as job
from fxopt.torch_api import dynamo, graph_effects, inductor
from fxopt.warning import FxoptWarning, warn

if TYPE_CHECKING:
    from fxopt.build import Build, Builder
    from fxopt.registry import Pass
    from fxopt.tuning import Tuning

__all__ = ["FxoptWarning", "Tuner", "graph_device", "unsupported", "warn"]

log = logging.getLogger("fxopt")


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
        self.unknown = dynamo.without_value(self.inputs)
        self.real = [] if self.unknown else dynamo.concrete(self.inputs)
        self.wanted = training.needed(self.inputs)
        self.budget = parse_precision(self.options.precision)
        self.static = dynamo.static_inputs(self.gm, self.inputs)
        self.store = PlanStore(self.options.plan_root, max_bytes=self.options.plan_limit)
        with fingerprints.once():
            self.passes = registry.select(self.options.passes, self.options.disable)
            self.fingerprints = [(p.name, p.fingerprint()) for p in self.passes]
        self.started = time.perf_counter()
        self.report.compile_id = dynamo.current_compile_id()
        # Now, for Dynamo knows what it is tracing while it traces.
        self.in_words = identity.in_words(self.gm, self.inputs, self.static, self.options.precision)
        self._written: Plan | None = None

    # -- the way through ------------------------------------------------------------------------------------------

    def run(self) -> Callable[..., Any]:
        """The code to keep. Raises only what the fallback, plain Inductor, would have to answer for."""
        reason = self.unknown or unsupported(self.inputs, self.device)
        if reason:
            return self.plain(reason, source="skipped")
        if communicating := graph_effects.collectives(self.gm):
            # A rank that measured it alone would wait for the others for ever.
            return self.plain(f"the graph communicates with other ranks ({communicating[0]})", source="skipped")
        if written := dynamo.written_attributes(self.gm):
            return self.plain(writes_to_its_own(written), source="skipped")
        if effects := graph_effects.effectful(self.gm):
            why = f"the graph has effects beside its outputs ({effects[0]}), which measuring would repeat"
            return self.plain(why, source="skipped")
        if self.wanted:
            with dynamo.outside_tracing():
                self.real = training.aliases(self.real)
        parts = identity.key_parts(
            self.gm,
            self.inputs,
            device=self.device,
            deciding=self.options.deciding(),
            patches=self.patches,
            passes=self.fingerprints,
            session=self.session,
            weights=self._weights(),
        )
        self.parts = parts
        self.report.key = plan_key(**parts)
        self.report.plan_path = str(self.store.path(self.report.key))
        ranks = None
        if self.options.distributed == "auto" and job.default_group() is not None:
            from fxopt import distributed

            ranks = distributed.current(self.options.distributed_timeout, self.options.time_limit)
        if ranks is None:
            return self.decide(lambda plan: None)
        from fxopt.together import decide_together

        return decide_together(self, ranks, parts)

    def decide(self, tell: Callable[[Plan | None], None]) -> Callable[..., Any]:
        """The code that this process decides on. `tell` is called as soon as it is known by which plan, if by any."""
        before = len(self.report.messages)
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
            if len(self.report.messages) > before:  # there is one, and it has been told why it is not used
                return self.plain("mode 'apply' never measures: the graph runs as Inductor compiles it", source="apply")
            from fxopt import nearest

            why = nearest.explain(self.store, self.parts)
            reason = f"no plan for this graph, and mode 'apply' never measures: {why}"
            compiled = self.plain(reason, source="apply")
            # Not before: Dynamo may begin the frame anew meanwhile, and of the next graph there may be a plan.
            warn(f"{reason}. The graph runs as Inductor compiles it")
            return compiled
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
        if self.wanted or (self.budget.precision is Precision.FP32 and self.budget.max_rel_l2 is None):
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
            self.store_failed(error)
            return None

    def store_failed(self, error: PlanStoreError) -> None:
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
        context = self.context(labels, origins=origins, mutated=frozenset(plan.mutated))
        self.report.labels = [*labels, *map(Label.from_json, plan.to_come)]
        self.report.decision = plan.decision
        self.report.out_of_reach = list(plan.out_of_reach)
        if plan.ablation:
            from fxopt.ablation import AblationRow

            self.report.ablation = [AblationRow.from_json(row) for row in plan.ablation]
        if plan.decision == "baseline":
            return self.inductors_own()
        limited = bisect.of_process(self.options.bisect, self.name)
        builder = replace(self.builder(context), bisection=limited)
        passes = passes_of(plan, self.passes, context)
        if context.dynamic:
            # Which guards Inductor itself needs shows beside its own code alone. What the passes add is taken back.
            inductor.compile_graph(self.gm, self.inputs, patches=builder.patches, keep_guards=True)
        build = self._build_of(plan, builder, passes)
        if build.errors:
            raise RuntimeError(f"the plan {self.report.key[:12]} does not apply: {'; '.join(build.errors)}")
        if not trusted and not self._verified_here(plan):
            self._tuning().verify_moved(plan, builder, build)
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
            self._tuning().ablate_plan(plan, builder, build)
        build.compiled.scope.adopt()
        return build.fn

    def _build_of(self, plan: Plan, builder: Builder, passes: Sequence[Pass]) -> Build:
        """With the passes that rested where it was tuned, as which Inductor's caches on this machine know the code.
        Should one of them do something after all, nobody has verified that: without them.
        """
        from fxopt.build import at_work  # there by now

        keep_guards = not builder.context.dynamic
        cached = builder.dumper is None and builder.bisection is None and self._verified_here(plan)
        resting = resting_of(plan, self.passes, builder.context) if cached else []
        if resting:
            names = {p.name for p in resting}
            try:
                build = builder.build(registry.order([*passes, *resting]), keep_guards=keep_guards)
            except Exception as error:
                log.debug("with the passes that rested the plan %s fails: %s", plan.key[:12], error)
            else:
                if not any(at_work(report) or report.error for report in build.reports if report.name in names):
                    return build.without(resting)
                del build  # it may hold the weights
        return builder.build(passes, keep_guards=keep_guards)

    def inductors_own(self) -> Callable[..., Any]:
        """What torch.compile would run without fxopt: the backward is compiled when it is first run."""
        compiled = inductor.compile_graph(self.gm, self.inputs, patches=self.patches, keep_guards=True)
        compiled.scope.adopt()
        return compiled.flat()

    def _tune(self) -> Callable[..., Any]:
        tuning = self._tuning()
        kept = tuning.run()
        self._written = tuning.written
        return kept

    def _tuning(self) -> Tuning:
        from fxopt.tuning import Tuning  # what measures takes long to import, and a plan needs none of it

        return Tuning(self)

    # -- configuration --------------------------------------------------------------------------------------------

    def builder(self, context: PassContext) -> Builder:
        from fxopt.build import Builder

        patches, reports, dumper = self.measured_patches(), self.store.root / "reports", None
        if self.options.dump is not None:
            from fxopt.dump import Dumper

            dumper = Dumper(self.options.dump, self.name)
        return Builder(self.gm, self.inputs, patches, context, reports, self.check_weights, dumper)

    @property
    def name(self) -> str:
        """The graph's name in dumps and in bisection: Dynamo's id of the compilation, and the plan's key."""
        return "-".join(filter(None, (self.report.compile_id.replace("/", "_"), self.report.key[:8])))

    def wants_graphs(self) -> bool:
        return bool(self.patches.get("triton.cudagraphs"))

    def measured_patches(self) -> dict[str, Any]:
        """The caller's options without CUDA graphs: a replay hides which launch a kernel belongs to."""
        patches = dict(self.patches)
        if self.wants_graphs():
            patches["triton.cudagraphs"] = False
        return patches

    def context(
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
            random=tuple(graph_effects.random_operations(self.gm)),
            dynamic=dynamo.symbolic(self.inputs, self.gm),
            session=self.session,
            cache=self.store.root / "measured",
            grad=bool(self.wanted),
        )


def writes_to_its_own(written: Sequence[str]) -> str:
    """Why a graph is left alone that writes to tensors which are no inputs of its, and so cannot be copies."""
    return (
        f"the graph writes to tensors of its own ({', '.join(written[:3])}), as an optimizer's step does: every "
        "measured call would write to them, so it is left to plain Inductor"
    )


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
