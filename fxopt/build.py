"""From a set of passes to compiled code, with a report from each pass of what it really did."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx

from fxopt.manager import SlotPass
from fxopt.registry import ConfigPass, GraphPass, Pass, PassContext, PassReport, RuntimePass, Stage
from fxopt.torch_api import inductor


@dataclass
class Build:
    """Compiled code and how it came about. `fn` takes all of Dynamo's inputs."""

    passes: list[Pass]
    fn: Callable[..., Any]
    compiled: inductor.Compiled
    reports: list[PassReport] = field(default_factory=list)

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
        if self.compiled.new_guards > 0 and self.passes:
            found.append(f"it specialises a dynamic size ({self.compiled.new_guards} new shape guards)")
        return found

    @property
    def effective(self) -> bool:
        """Whether every pass did something."""
        return all(report.rewritten for report in self.reports)

    @property
    def memory_bytes(self) -> int:
        """Memory of the constants that the code holds, some of which may be the model's own parameters."""
        sizes: dict[int, int] = {}
        for tensor in self.compiled.constants.values():
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
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    patches: Mapping[str, Any]
    context: PassContext
    reports: Path | None = None
    check_weights: bool = True

    def baseline(self) -> Build:
        """Inductor's own code, with its graph captured; its shape guards are the trace's own."""
        compiled = inductor.compile_graph(self.gm, self.inputs, patches=self.patches, capture=True, keep_guards=True)
        return Build([], compiled.flat(), compiled)

    def build(self, passes: Sequence[Pass], *, keep_guards: bool = False) -> Build:
        """Compile with `passes`, which must be in order. Raises what Inductor raises; a pass's failure is a report."""
        patches = dict(self.patches)
        freeze: frozenset[int] = frozenset()
        reports: dict[str, PassReport] = {}
        configured: list[tuple[ConfigPass, list[int]]] = []
        for p in passes:
            if isinstance(p, ConfigPass):
                accepted, report = self._configure(p)
                reports[p.name] = report
                if report.error or not accepted:
                    continue
                configuration = p.configure(accepted, self.context)
                patches.update(configuration.patches)
                freeze |= configuration.freeze
                configured.append((p, accepted))
        slots = self._slots(passes)
        compiled = self._compile(patches, slots, freeze, keep_guards)
        for p, accepted in configured:
            count = p.took_effect(compiled, accepted, self.context)
            error = "" if count else f"asked for {len(accepted)}, not in effect in the compiled graph"
            reports[p.name] = replace(reports[p.name], rewritten=count, changed=count > 0, error=error)
        for slot in slots.values():
            reports.update({report.name: report for report in slot.reports})
        fn = self._runtime([p for p in passes if isinstance(p, RuntimePass)], compiled, reports)
        return Build(list(passes), fn, compiled, [reports[p.name] for p in passes])

    def _configure(self, p: ConfigPass) -> tuple[list[int], PassReport]:
        report = PassReport(p.name, p.stage.value)
        try:
            found = list(p.candidates(self.gm, self.inputs, self.context))
        except Exception as error:
            return [], replace(report, error=f"{type(error).__name__}: {error}")
        accepted = [position for position, candidate in found if not candidate.refused]
        refused = tuple((c.target, c.refused) for _, c in found if c.refused)
        return accepted, replace(report, matched=len(accepted), refused=refused)

    def _slots(self, passes: Sequence[Pass]) -> dict[str, SlotPass]:
        slots = {}
        for stage in (Stage.JOINT, Stage.POST_GRAD):
            mine = [p for p in passes if isinstance(p, GraphPass) and p.stage is stage]
            if mine:
                installed = inductor.installed_pass(stage.value, self.patches)
                slots[stage.value] = SlotPass(mine, self.context, stage, installed)
        return slots

    def _compile(
        self, patches: Mapping[str, Any], slots: Mapping[str, SlotPass], freeze: frozenset[int], keep_guards: bool
    ) -> inductor.Compiled:
        kept = self._report_file(slots, freeze)

        def compile_once(caches: bool) -> inductor.Compiled:
            return inductor.compile_graph(
                self.gm,
                self.inputs,
                patches=patches,
                slots=slots,
                freeze=freeze,
                caches=caches,
                keep_guards=keep_guards,
            )

        compiled = compile_once(caches=True)
        if slots and not all(slot.ran for slot in slots.values()):
            # A cache served the code. What the passes did then was written down, or has to be found out again.
            if not _read_reports(kept, slots):
                compiled = compile_once(caches=False)
        elif slots:
            _write_reports(kept, slots)
        return compiled

    def _report_file(self, slots: Mapping[str, SlotPass], freeze: frozenset[int]) -> Path | None:
        if self.reports is None or not slots:
            return None
        from fxopt.identity import describe_input, graph_text

        digest = hashlib.sha256(graph_text(self.gm).encode())
        digest.update(json.dumps([describe_input(value) for value in self.inputs], default=str).encode())
        digest.update(json.dumps([[name, str(slot.uuid())] for name, slot in sorted(slots.items())]).encode())
        digest.update(repr(sorted(freeze)).encode())
        return self.reports / f"{digest.hexdigest()[:40]}.json"

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
            report = PassReport(p.name, p.stage.value)
            try:
                reason = p.refuse(compiled, own, context)
                if reason:
                    report = replace(report, refused=(("graph", reason),))
                else:
                    wrapped = p.wrap(fn, own, compiled, context)
                    changed = wrapped is not fn
                    fn = wrapped
                    report = replace(report, matched=1, rewritten=int(changed), changed=changed)
            except Exception as error:
                report = replace(report, error=f"{type(error).__name__}: {error}")
            reports[p.name] = report
        return replace(compiled, fn=fn).flat(self.inputs, self.check_weights)


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps({name: [r.to_json() for r in slot.reports] for name, slot in slots.items()}))
        os.replace(draft, path)
    except OSError:
        pass  # the reports are a convenience of later tuning runs; without them the passes run again
