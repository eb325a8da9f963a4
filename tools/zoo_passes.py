"""What gives every graph something to try: a rewrite that nearly any graph allows, and labels on every kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.registry import Candidate, GraphPass, PassContext, Stage, register
from fxopt.verify import Precision

aten = torch.ops.aten


@register
@dataclass(frozen=True)
class Rearrange(GraphPass):
    """a + b becomes b + a, a * b becomes b * a (the same bits), and addmm a product and a sum."""

    name: ClassVar[str] = "rearrange"
    answers: ClassVar[frozenset[Axis]] = frozenset(Axis)
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        for node in graph.nodes:
            if node.target not in (aten.add.Tensor, aten.mul.Tensor, aten.addmm.default) or node.kwargs:
                continue
            values: list[Any] = [
                one.meta.get("val") if isinstance(one, fx.Node) else None for one in (*node.args, node)
            ]
            tensors = all(isinstance(v, torch.Tensor) and v.dtype == values[-1].dtype for v in values)
            # In other layouts the result could take that of its first operand.
            alike = tensors and (all(map(_plain, values)) or len(set(map(_form, values))) == 1)
            if node.target is aten.addmm.default:
                alike = tensors and _plain(values[-1])
            different = alike and node.args[0] is not node.args[1]
            yield Candidate(node.name, "" if different else "not tensors of one dtype and layout")

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        target: Any = node.target
        first, *others = node.args
        with graph.inserting_before(node):
            if node.target is aten.addmm.default:
                new = graph.call_function(aten.add.Tensor, (graph.call_function(aten.mm.default, tuple(others)), first))
            else:
                new = graph.call_function(target, (*others, first))
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _plain(value: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in value.shape) and value.is_contiguous()


def _form(value: torch.Tensor) -> str:
    """Sizes and strides in writing: comparing symbolic ones would add guards."""
    return f"{value.shape} {value.stride()}"


#: thresholds under which every rule that needs no counters fires on every kernel
LABELS_EVERYWHERE = {
    "launch_bound.launch_gap": 0.0,
    "memory_bound_modelled.bandwidth_fraction": 0.0,
    "compute_bound_modelled.flop_fraction": 0.0,
    "tensor_core_idle_modelled.rate_ratio": 0.0,
    "tensor_core_idle_modelled.time_over_floor": 0.0,
    "latency_bound_modelled.roofline_fraction": 1e9,
    "layout_conversion.layout_share": 0.0,
    "cast_traffic.cast_share": 0.0,
    "opaque_library.opaque_share": 0.0,
}
