"""Passes forced on: every graph has a plan that uses all that may run, and two passes that rewrite any graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt import effects, machine, registry
from fxopt.labels import Axis, Label
from fxopt.plan import PassUse, Plan
from fxopt.registry import Candidate, GraphPass, Pass, PassContext, Stage
from fxopt.report.model import GraphReport, to_plain
from fxopt.tuner import Tuner
from fxopt.verify import Precision

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class _Copies(GraphPass):
    """Every result with memory of its own is written once more: floating-point numbers times one, others as a copy."""

    precision: ClassVar[Precision] = Precision.FP32
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.MEMORY_BOUND})

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        memory = effects.memory(graph)
        seen = frozenset[str]().union(*(memory[node] for node in graph.nodes if node.op in ("placeholder", "get_attr")))
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                continue
            if memory[node] and not memory[node] & seen and not effects.is_token(node):
                yield Candidate(node.name)
            seen |= memory[node]

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        with graph.inserting_after(node):
            if node.meta["val"].is_floating_point():
                again = graph.call_function(aten.mul.Tensor, (node, 1.0))
            else:
                again = graph.call_function(aten.clone.default, (node,))
        node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


@dataclass(frozen=True)
class CopiesBefore(_Copies):
    """Before Inductor's joint passes."""

    name: ClassVar[str] = "copies_before"
    stage: ClassVar[Stage] = Stage.JOINT
    after: ClassVar[tuple[str, ...]] = ("causal_mask", "channels_last", "merge_projections")


@dataclass(frozen=True)
class CopiesAfter(_Copies):
    """After them."""

    name: ClassVar[str] = "copies_after"
    stage: ClassVar[Stage] = Stage.POST_GRAD
    after: ClassVar[tuple[str, ...]] = ("onednn_linear", "remove_redundant_casts_and_copies")


COPIES = (CopiesBefore, CopiesAfter)


class Forced(Tuner):
    """A graph for which the store always has a plan: every pass that may run, whether it pays or not."""

    reports: ClassVar[list[GraphReport]] = []

    def load_plan(self) -> Plan | None:
        self.reports.append(self.report)
        if not self.store.path(self.report.key).exists():
            self.store.save(self._forced())
        return super().load_plan()

    def _forced(self) -> Plan:
        # A label on the whole graph for each axis, or passes would find nothing to answer.
        labels = [Label(axis, "graph", (), "", (), "high", 1.0, "given: every pass is to run") for axis in Axis]
        mutated = self.builder(self.context(labels)).baseline().compiled.mutated or frozenset()
        context = self.context(labels, mutated=mutated)
        chosen: list[Pass] = []
        for p in self.passes:
            allowed = self.device.type in p.devices and self.budget.allows(p.precision)
            if allowed and registry.concerned(p, context) and not registry.inapplicable(p, context):
                best = registry.variants(p, context)[0]
                if not any(registry.in_conflict(best, other) for other in chosen):
                    chosen.append(best)
        return Plan(
            key=self.report.key,
            decision="candidate",
            passes=[PassUse(name=p.name, options=to_plain(p.options()), stage=p.stage.value) for p in chosen],
            labels=to_plain(labels),
            mutated=sorted(mutated),
            machines=[machine.machine(self.device)],  # or it would be verified before it is used
            tuning_seconds=0.0,
            calls_to_pay=None,
        )
