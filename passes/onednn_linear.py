"""onednn_linear: fp32 linear layers with frozen weights on oneDNN's packed kernels instead of MKL's.

Answers compute_bound and tensor_core_idle on the CPU. Inductor's freezing packs an fp32 weight for MKL wherever
torch was built with MKL, and for oneDNN only in narrower types. Which of the two is faster depends on the processor:
on AMD's Zen 4 oneDNN's AVX-512 kernels took 0.65 of MKL's time at GPT-2's shapes. The arithmetic is fp32 either way.

before                                                    after
    y = mkl._mkl_linear(x, packed, w, bias, rows)             y = mkldnn._linear_pointwise(x, packed', bias, "none")

The weight is packed once, here. Refuses what is not an fp32 constant on the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, PassContext, Stage


def _mkl_linear() -> tuple[Any, ...]:
    """MKL's packed linear operator, as Inductor spells it and in full; empty in a torch built without MKL."""
    packet = getattr(torch.ops.mkl, "_mkl_linear", None)
    return () if packet is None else (packet, packet.default)


@dataclass(frozen=True)
class OnednnLinear(GraphPass):
    """fp32 linear layers with frozen weights on oneDNN's packed kernels instead of MKL's."""

    name: ClassVar[str] = "onednn_linear"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.COMPUTE_BOUND, Axis.TENSOR_CORE_IDLE})
    stage: ClassVar[Stage] = Stage.POST_GRAD
    precision: ClassVar[Precision] = Precision.FP32
    after: ClassVar[tuple[str, ...]] = ("freeze_weights",)
    needs: ClassVar[tuple[str, ...]] = ("freeze_weights",)
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def applicable(self, context: PassContext) -> str:
        if not torch.backends.mkldnn.is_available() or not _mkl_linear():
            return "this torch was built without oneDNN or without MKL"
        if not context.session:
            return "packed weights must be constant: use fxopt.optimize(model, inputs)"
        if context.grad:
            return "gradients are on: packed weights have no backward"
        return ""

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        for node in graph.nodes:
            if node.op != "call_function" or node.target not in _mkl_linear():
                continue
            weight = _constant(graph, node.args[2])
            if not context.answers(node, self.answers):
                yield Candidate(node.name, "not labelled compute_bound or tensor_core_idle")
            elif weight is None:
                yield Candidate(node.name, "its weight is not a constant")
            elif weight.dtype != torch.float32 or weight.dim() != 2:
                yield Candidate(node.name, f"its weight is {weight.dim()}-d {weight.dtype}, not a float32 matrix")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        x, _, weight, bias, rows = node.args
        dense = _constant(graph, weight)
        assert dense is not None and graph.owning_module is not None
        packed = torch.ops.mkldnn._reorder_linear_weight(dense.detach().contiguous(), rows)
        name = f"_fxopt_onednn_{node.name}"
        graph.owning_module.register_buffer(name, packed)
        with graph.inserting_before(node):
            held = graph.get_attr(name)
            # Its shape is the dense weight's; the packed layout is oneDNN's own.
            held.meta.update({key: weight.meta[key] for key in ("val", "tensor_meta") if key in weight.meta})  # type: ignore[union-attr]
            linear: Any = torch.ops.mkldnn._linear_pointwise.default
            new = graph.call_function(linear, (x, held, bias, "none", [], ""))
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _constant(graph: fx.Graph, value: Any) -> torch.Tensor | None:
    """The tensor that an attribute node stands for; None for any other node."""
    if not isinstance(value, fx.Node) or value.op != "get_attr" or graph.owning_module is None:
        return None
    found = operator.attrgetter(str(value.target))(graph.owning_module)
    return found if isinstance(found, torch.Tensor) and not found.is_mkldnn else None
