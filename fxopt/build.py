"""From a set of passes to compiled code, with a report from each pass of what it really did."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxopt import bisect
from fxopt.bisect import Bisection
from fxopt.fingerprints import canonical
from fxopt.manager import SlotPass, consider, no_candidates
from fxopt.registry import (
    ConfigPass,
    Configuration,
    GraphPass,
    Pass,
    PassContext,
    PassReport,
    RuntimePass,
    Stage,
    order,
)
from fxopt.torch_api import dynamo, inductor
from profiler_core.files import write_atomically

if TYPE_CHECKING:
    from fxopt.dump import Dumper


def at_work(report: PassReport) -> bool:
    """Whether a pass did something, or would have but for a bisection's limit."""
    return bool(report.rewritten) or any(bisect.is_limit(reason) for _, reason in report.refused)


def why_idle(report: PassReport) -> str:
    return report.refused[0][1] if report.refused else "no candidate"


@dataclass
class Build:
    """Compiled code and how it came about. `fn` takes all of Dynamo's inputs.

    entered: by stage, the graph as each of its passes found it, by name, and under "" as the last one left it; nothing
    for a stage whose passes did not run, or ran on several graphs. held_bytes: what it was seen to keep allocated on
    its device, what it was put around included. resting: graph passes that ran as well and found nothing to do.
    """

    passes: list[Pass]
    fn: Callable[..., Any]
    compiled: inductor.Compiled
    reports: list[PassReport] = field(default_factory=list)
    entered: dict[Stage, dict[str, fx.Graph]] = field(default_factory=dict)
    held_bytes: int = 0
    resting: list[Pass] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.compiled.seconds

    @property
    def errors(self) -> list[str]:
        """Why this code must not be used: a pass that failed, or one that claims what cannot be seen."""
        found = [f"{r.name}: {r.error}" for r in self.reports if r.error]
        for report in self.reports:
            if not report.error and report.matched and not report.changed:
                found.append(f"{report.name}: matched {report.matched}, but nothing changed")
        if self.compiled.new_guards > 0 and any(report.changed for report in self.reports):
            found.append(f"it specialises a dynamic size ({self.compiled.new_guards} new shape guards)")
        return found

    @property
    def effective(self) -> bool:
        """Whether every pass did something, or would have but for a bisection's limit."""
        return all(map(at_work, self.reports))

    def without(self, resting: Sequence[Pass]) -> Build:
        """The same code, of passes that had nothing to do with it."""
        names = {p.name for p in resting}
        return replace(
            self,
            passes=[p for p in self.passes if p.name not in names],
            reports=[r for r in self.reports if r.name not in names],
            resting=[p for p in self.passes if p.name in names and isinstance(p, GraphPass)],
        )

    @property
    def constants(self) -> list[torch.Tensor]:
        """The tensors that the code holds, some of which may be the model's own parameters."""
        return list(self.compiled.constants.values())

    @property
    def memory_bytes(self) -> int:
        """Memory of the constants."""
        sizes: dict[int, int] = {}
        for tensor in self.constants:
            # A oneDNN-packed tensor is opaque: it has no storage to look at, only a size.
            opaque = tensor.is_mkldnn
            key = id(tensor) if opaque else tensor.untyped_storage().data_ptr()
            sizes[key] = tensor.numel() * tensor.element_size() if opaque else tensor.untyped_storage().nbytes()
        return sum(sizes.values())


@dataclass(frozen=True)
class Builder:
    """Compiles one Dynamo graph under different sets of passes.

    patches: the Inductor options common to all. reports: where reports are kept for compilations that a cache serves
    (no pass body runs then), or None. check_weights: whether frozen code looks at the contents of its weights.
    dumper: where each graph is written before and after each pass. bisection: counts the rewrites, and may deny some.
    With either of them the caches are passed by, for the passes must run. record: whether builds remember the graphs
    that passes met, for `idle`; trials ask for it.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    patches: Mapping[str, Any]
    context: PassContext
    reports: Path | None = None
    check_weights: bool = True
    dumper: Dumper | None = None
    bisection: Bisection | None = None
    record: bool = False

    def baseline(self) -> Build:
        """Inductor's own code, with its graph captured; its shape guards are the trace's own."""
        compiled = inductor.compile_graph(self.gm, self.inputs, patches=self.patches, capture=True, keep_guards=True)
        wake(self.context.device)
        return Build([], compiled.flat(), compiled)

    def build(self, passes: Sequence[Pass], *, keep_guards: bool = False) -> Build:
        """Compile with `passes`, which must be in order. Raises what Inductor raises; a pass's failure is a report."""
        asked: dict[str, Any] = {}
        freeze: frozenset[int] = frozenset()
        compute: dict[int, torch.dtype] = {}
        reports: dict[str, PassReport] = {}
        configured: list[tuple[ConfigPass, list[int], Configuration]] = []
        for p in passes:
            if isinstance(p, ConfigPass):
                reports[p.name], accepted, configuration = self._configure(p)
                if configuration is None:
                    self._dump(p, reports[p.name])
                    continue
                asked.update(configuration.patches)
                freeze |= configuration.freeze
                compute.update(configuration.compute)
                configured.append((p, accepted, configuration))
        slots = self._slots(passes)
        runtime = [p for p in passes if isinstance(p, RuntimePass)]
        with contextlib.ExitStack() as stack:
            for wrapping in runtime:
                stack.enter_context(wrapping.compiling())
            # What the caller asked for stands, whatever a pass would rather have.
            patches = {**asked, **self.patches}
            # What a runtime pass wraps, and what shows what a config pass did, is the backward as well.
            capture = bool(configured) or (bool(runtime) and self.context.grad)
            compiled = self._compile(patches, slots, freeze, compute, keep_guards, capture=capture)
            if self.record:
                wake(self.context.device)
        for p, accepted, configuration in configured:
            reports[p.name] = self._took_effect(p, reports[p.name], compiled, accepted)
            self._dump(p, reports[p.name], configuration)
        for slot in slots.values():
            unseen = (("graph", f"Inductor did not run the stage {slot.stage.value} on this graph"),)
            reports.update({p.name: PassReport(p.name, p.stage.value, refused=unseen) for p in slot.passes})
            reports.update({report.name: report for report in slot.reports})
        fn = self._runtime(runtime, compiled, reports)
        entered = {slot.stage: slot.entered for slot in slots.values() if slot.entered}
        return Build(list(passes), fn, compiled, [reports[p.name] for p in passes], entered)

    def rewrapped(self, build: Build, passes: Sequence[Pass]) -> Build:
        """`build`'s code under `passes`, which differ from its own by passes that only wrap what was compiled."""
        reports = {report.name: report for report in build.reports}
        fn = self._runtime([p for p in passes if isinstance(p, RuntimePass)], build.compiled, reports)
        return replace(build, passes=list(passes), fn=fn, reports=[reports[p.name] for p in passes])

    def idle(self, p: Pass, build: Build) -> str:
        """Why `p`, added to the passes of `build`, finds nothing to do; "" where it does, or only compiling can tell.

        The passes before it do what they did, so that its candidates are those in the graph as they left it.
        """
        if isinstance(p, ConfigPass):
            accepted, report = consider(p, self.gm, self.inputs, self.context)
            return "" if accepted else why_idle(report)
        if not isinstance(p, GraphPass) or not build.entered.get(p.stage):
            return ""
        names = [q.name for q in order([*build.passes, p]) if q.stage is p.stage]
        following = [*names, ""][names.index(p.name) + 1]
        return no_candidates(p, build.entered[p.stage][following], self.context)

    def _configure(self, p: ConfigPass) -> tuple[PassReport, list[int], Configuration | None]:
        """What the pass asks for, None where it fails, accepts nothing or is denied; and the positions accepted."""
        started = time.perf_counter()
        report = PassReport(p.name, p.stage.value)
        try:
            accepted, report = consider(p, self.gm, self.inputs, self.context)
            if accepted and self.bisection is not None and not self.bisection.take(p.name, "graph"):
                report = replace(report, matched=0, refused=(*report.refused, ("graph", self.bisection.reason)))
                accepted = []
            configuration = p.configure(accepted, self.context) if accepted else None
        except Exception as error:
            return replace(report, error=f"{type(error).__name__}: {error}"), [], None
        return replace(report, seconds=time.perf_counter() - started), accepted, configuration

    def _took_effect(
        self, p: ConfigPass, report: PassReport, compiled: inductor.Compiled, accepted: Sequence[int]
    ) -> PassReport:
        try:
            count = p.took_effect(compiled, accepted, self.context)
        except Exception as error:
            return replace(report, error=f"{type(error).__name__}: {error}")
        if count:
            return replace(report, rewritten=count, changed=True)
        # Inductor's choice, as when it times what was asked for and finds it slower: nobody's mistake.
        idle = ("graph", f"asked for {len(accepted)}, not in effect in the compiled graph")
        return replace(report, matched=0, refused=(idle, *report.refused))

    def _dump(self, p: Pass, report: PassReport, configuration: Configuration | None = None) -> None:
        if self.dumper is not None:
            self.dumper.note(p, self.context, report, configuration)

    def _slots(self, passes: Sequence[Pass]) -> dict[str, SlotPass]:
        slots = {}
        for stage in (Stage.JOINT, Stage.POST_GRAD):
            mine = [p for p in passes if isinstance(p, GraphPass) and p.stage is stage]
            if mine:
                installed = inductor.installed_pass(stage.value, self.patches)
                slots[stage.value] = SlotPass(
                    mine,
                    self.context,
                    stage,
                    installed,
                    dumper=self.dumper,
                    bisection=self.bisection,
                    record=self.record,
                )
        return slots

    def _compile(
        self,
        patches: Mapping[str, Any],
        slots: Mapping[str, SlotPass],
        freeze: frozenset[int],
        compute: Mapping[int, torch.dtype],
        keep_guards: bool,
        capture: bool,
    ) -> inductor.Compiled:
        """capture: with the graph and the code, in which a config pass counts what it did."""
        kept = self._report_file(patches, slots, freeze, compute)

        def compile_once(caches: bool) -> inductor.Compiled:
            for slot in slots.values():
                slot.reports = []
            return inductor.compile_graph(
                self.gm,
                self.inputs,
                patches=patches,
                slots=slots,
                freeze=freeze,
                compute=compute,
                capture=capture,
                caches=caches,
                keep_guards=keep_guards,
                back_to_back=True,
            )

        if self.dumper is not None or self.bisection is not None:
            return compile_once(caches=False)
        compiled = compile_once(caches=True)
        if slots and not all(slot.ran for slot in slots.values()):
            # A cache served the code. What the passes did then was written down, or has to be found out again.
            if not _read_reports(kept, slots):
                compiled = compile_once(caches=False)
        elif slots and not any(report.error for slot in slots.values() for report in slot.reports):
            _write_reports(kept, slots)
        return compiled

    def _report_file(
        self,
        patches: Mapping[str, Any],
        slots: Mapping[str, SlotPass],
        freeze: frozenset[int],
        compute: Mapping[int, torch.dtype],
    ) -> Path | None:
        """Where the reports of this very compilation are kept; None where no cache will ever serve it."""
        uuids = {name: slot.uuid() for name, slot in slots.items()}
        if self.reports is None or not slots or None in uuids.values():
            return None
        from fxopt import identity

        parts = {
            "graph": identity.graph_text(self.gm),
            # Hundreds of them, which json writes in a tenth of the time that `canonical` takes.
            "inputs": json.dumps([identity.describe_input(value) for value in self.inputs]),
            "passes": uuids,
            "freeze": freeze,
            "compute": {str(position): str(dtype) for position, dtype in compute.items()},
            "inductor": {key: identity._spell(value) for key, value in patches.items()},
            "inductor_config": inductor.config_fingerprint(),
            "versions": identity.versions(),
            "flags": identity.torch_flags(),
        }
        return self.reports / f"{hashlib.sha256(canonical(parts).encode()).hexdigest()[:40]}.json"

    def _runtime(
        self, passes: Sequence[RuntimePass], compiled: inductor.Compiled, reports: dict[str, PassReport]
    ) -> Callable[..., Any]:
        if not passes:
            return compiled.flat(self.inputs, self.check_weights)
        kept = compiled.kept if compiled.kept is not None else list(range(len(self.inputs)))
        own = [self.inputs[i] for i in kept]
        mutated = frozenset(k for k, i in enumerate(kept) if i in self.context.mutated)
        static = frozenset(k for k, i in enumerate(kept) if i in self.context.static)
        context = replace(self.context, static=static, mutated=mutated)
        compiled = replace(compiled, mutated=mutated)
        fn = compiled.fn
        for p in passes:
            started = time.perf_counter()
            report = PassReport(p.name, p.stage.value)
            try:
                reason = p.refuse(compiled, own, context)
                if not reason and self.bisection is not None and not self.bisection.take(p.name, "graph"):
                    reason = self.bisection.reason
                if reason:
                    report = replace(report, refused=(("graph", reason),))
                else:
                    wrapped = p.wrap(fn, own, compiled, context)
                    if compiled.backward is not None:
                        compiled.backward.wrap(p.wrap_backward)
                    changed = wrapped is not fn
                    fn = wrapped
                    report = replace(report, matched=1, rewritten=int(changed), changed=changed)
            except Exception as error:
                report = replace(report, error=f"{type(error).__name__}: {error}")
            reports[p.name] = replace(report, seconds=time.perf_counter() - started)
            self._dump(p, reports[p.name])
        return replace(compiled, fn=fn).flat(self.inputs, self.check_weights)


def wake(device: torch.device) -> None:
    """Before something is timed and the choice kept on disk, as in a first call of Inductor's code: with the GPU's
    clocks up. By work that is done, also where a pass asks for it, while tensors are fake.
    """
    from profiler_core import wake as clocks

    with torch.no_grad(), dynamo.outside_tracing():
        clocks.wake(device)


def _read_reports(path: Path | None, slots: Mapping[str, SlotPass]) -> bool:
    if path is None or not path.exists():
        return False
    try:
        data = json.loads(path.read_text())
        found = {name: [PassReport.from_json(item) for item in data[name]] for name in slots}
    except (ValueError, KeyError, TypeError):
        return False  # unreadable: the passes run again and it is written anew
    for name, slot in slots.items():
        slot.reports = found[name]
    return True


def _write_reports(path: Path | None, slots: Mapping[str, SlotPass]) -> None:
    if path is None:
        return
    with contextlib.suppress(OSError):  # a convenience of later tuning runs; without it the passes run again
        write_atomically(path, json.dumps({name: [r.to_json() for r in slot.reports] for name, slot in slots.items()}))
