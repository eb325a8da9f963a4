"""The least time that a graph can take on a device, by the roofline model, and so how far a result is from it.

    floor = max( sum over nodes of FLOPs / rate of the node's unit,
                 bytes that the graph reads once and writes once / copy bandwidth )

FLOPs and bytes are modelled (`profiler_core.cost`): of Inductor's own graph, each input counts once, by the part that
is read, each output once, and nothing in between. Rates and bandwidth are the device's measured ceilings
(`profiler_core.roofline`). Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52(4), 2009.

The unit of a node is the fastest one that its operands and the precision asked for admit. A graph can come out below
its floor: causal attention is counted in full, inputs that stay in a cache are read faster than memory, and weights
kept in a narrower type are fewer bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from fxopt.precision import Budget, Precision

if TYPE_CHECKING:
    from fxopt.report.model import GraphReport
    from profiler_core.roofline import Ceilings

PRODUCTS = 3
"""16-bit products that one of fp32 accuracy takes: of high and low parts, without that of the two low ones."""
ROUNDOFF = {Precision.TF32: 2.0**-11, Precision.BF16: 2.0**-8}
"""Unit roundoff of the formats; a budget for the error admits those that round no coarser."""


@dataclass(frozen=True)
class Floor:
    """ns: the floor of one call. flops, bytes: of the whole graph, modelled."""

    ns: float
    flops: float
    bytes: float


def floor(graph: fx.Graph, ceilings: Ceilings, budget: Budget) -> Floor:
    """The floor of a graph at the ATen level, whose nodes hold their values in `meta["val"]`. A node without a formula,
    or without a size, counts nothing."""
    from profiler_core.cost import group_bytes, node_cost

    nodes = [node for node in graph.nodes if node.op == "call_function"]
    flops = compute = 0.0
    for node in nodes:
        if count := node_cost(node).flops:
            flops += count
            compute += count / unit_rate(_dtype(node), ceilings, budget)
    moved = group_bytes(nodes)
    return Floor(1e9 * max(compute, moved / ceilings.copy_bytes_per_s), flops, moved)


def tell(
    report: GraphReport, graphs: Sequence[fx.GraphModule | None], ceilings: Ceilings, budget: Budget, *, on_error: str
) -> None:
    """Writes the floor of `graphs` together into the report: a number for the reader, which no decision rests on.

    Where the model fails on one of them the report says so instead; with on_error="raise" the error is raised.
    """
    try:
        found = [floor(graph.graph, ceilings, budget) for graph in graphs if graph is not None]
    except Exception as error:
        if on_error == "raise":
            raise
        report.messages.append(f"no floor: its model fails on this graph: {type(error).__name__}: {error}")
    else:
        if found:
            report.floor_ns, report.floor_flops, report.floor_bytes = (
                sum(getattr(one, name) for one in found) for name in ("ns", "flops", "bytes")
            )


def unit_rate(dtype: str, ceilings: Ceilings, budget: Budget) -> float:
    """FLOP/s of the fastest unit for operands of `dtype`: float32 may run on any whose rounding `budget` admits, and on
    16-bit units by several products. Types that were not measured count as the fastest that was."""
    rates = ceilings.flops_per_s
    if dtype != "float32":
        return rates.get(dtype, max(rates.values()))
    units = [rates.get("float32", 0.0), rates.get("float16", 0.0) / PRODUCTS]
    units += [rates.get(name, 0.0) for name, needed in _NARROWER.items() if budget.allows(needed, ROUNDOFF[needed])]
    return max(units) or max(rates.values())


_NARROWER = {"tf32": Precision.TF32, "bfloat16": Precision.BF16}


def _dtype(node: fx.Node) -> str:
    """The type of its first tensor operand, or of its value where it has none."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    first = next((value for value in (*values, node.meta.get("val")) if isinstance(value, torch.Tensor)), None)
    return str(first.dtype).removeprefix("torch.") if first is not None else "float32"
