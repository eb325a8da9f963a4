"""What stands for a pass, or for a measurement, in a test that is about neither."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt import measure
from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, PassContext, Stage
from profiler_core.roofline import Ceilings

__all__ = ["CEILINGS", "TWICE_AS_FAST", "DoubledNegation"]

aten = torch.ops.aten

#: ceilings far above any rate: labels then do not depend on how busy the machine is, and matrix units look idle
CEILINGS = Ceilings("given", 1e12, {"float32": 1e12, "bfloat16": 4e12}, "2026-01-01T00:00:00+00:00", {})
#: what a comparison with a candidate finds that takes half the time, without any doubt
TWICE_AS_FAST = measure.paired([(2e6, 1e6)] * 6, 0.01)


@dataclass(frozen=True)
class DoubledNegation(GraphPass):
    """Negates results of matrix products twice: right to the last bit, and of no use, as a pass is that is kept because
    a test says so. A subclass names other operators (`targets`), or makes something else of their results (`twin`).
    """

    name: ClassVar[str] = "doubled_negation"
    answers: ClassVar[frozenset[Axis]] = frozenset(Axis)
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32
    gradients: ClassVar[bool] = True
    targets: ClassVar[tuple[Any, ...]] = (aten.addmm.default, aten.mm.default)

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        return [Candidate(node.name) for node in graph.nodes if node.target in self.targets]

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        users = list(node.users)
        with graph.inserting_before(node.next):
            new = self.twin(graph, node)
        for user in users:
            user.replace_input_with(node, new)

    def twin(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """What the users of `node` get in its place."""
        return graph.call_function(aten.neg.default, (graph.call_function(aten.neg.default, (node,)),))
