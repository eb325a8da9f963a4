"""channels_last: single convolutions in channels-last order, where Inductor leaves a graph in channels-first.

Answers layout_conversion, memory_bound, compute_bound and tensor_core_idle on convolutions: cuDNN's kernels for matrix
units want the channels of a pixel side by side, and transpose before and after where they are not. Inductor decides for
a whole graph, by a rule about its convolutions; where it says yes, there is nothing to do. Here the labels say which.

before                            after
    y = convolution(x, w, ...)        y = clone(convolution(channels_last(x), channels_last(w), ...)), in y's strides

Copies to and fro between two convolutions cancel: each is a pointwise operator, which Inductor fuses into its producer
and its consumer. The weight's copy is folded where it is frozen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, PassContext, Stage

aten = torch.ops.aten


@dataclass(frozen=True)
class ChannelsLast(GraphPass):
    """Single convolutions in channels-last order, where Inductor leaves a graph in channels-first."""

    name: ClassVar[str] = "channels_last"
    answers: ClassVar[frozenset[Axis]] = frozenset(
        {Axis.LAYOUT_CONVERSION, Axis.MEMORY_BOUND, Axis.COMPUTE_BOUND, Axis.TENSOR_CORE_IDLE}
    )
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32
    after: ClassVar[tuple[str, ...]] = ("freeze_weights",)
    gradients: ClassVar[bool] = True

    def applicable(self, context: PassContext) -> str:
        if context.dynamic:
            return "sizes are symbolic: which order is faster depends on them"
        return ""

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        from fxopt.torch_api import inductor  # heavy

        covered = None
        for node in graph.nodes:
            if node.target is not aten.convolution.default:
                continue
            x, w = (operand.meta.get("val") for operand in node.args[:2])
            out = node.meta.get("val")
            if covered is None:
                covered = inductor.lays_out(graph, is_inference=not context.grad)
            if not context.answers(node, self.answers):
                yield Candidate(node.name, "not labelled with what a layout could change")
            elif not all(isinstance(v, torch.Tensor) and v.layout is torch.strided for v in (x, w, out)):
                yield Candidate(node.name, "an operand is no plain tensor")
            elif covered:
                yield Candidate(node.name, "Inductor puts the whole graph in channels-last order itself")
            elif out.dim() != 4:
                yield Candidate(node.name, "channels-last order is for 2-d convolutions with a batch")
            elif _first(out.shape) or _first(x.shape):
                yield Candidate(node.name, "its images are single values or have one channel: both orders are the same")
            elif any(v.is_contiguous(memory_format=torch.channels_last) for v in (x, w)) and not _first(w.shape):
                yield Candidate(node.name, "an operand is in channels-last order, so that its result is as well")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        x, w, *rest = node.args
        with graph.inserting_before(node):
            operands = [_channels_last(graph, operand) for operand in (x, w)]
            convolution = graph.call_function(aten.convolution.default, (*operands, *rest))
            # The graph's next nodes were traced with these strides; Inductor makes no copy of it.
            ordered = graph.call_function(
                aten.clone.default, (convolution,), {"memory_format": torch.contiguous_format}
            )
        node.replace_all_uses_with(ordered)
        graph.erase_node(node)


def _first(shape: Any) -> bool:
    """Whether channels-first and channels-last order of such a tensor are one and the same."""
    return shape[1] == 1 or (shape[2] == 1 and shape[3] == 1)


def _channels_last(graph: fx.Graph, value: Any) -> fx.Node:
    """A copy of `value` in channels-last order: the one that is there already for another convolution, if any."""
    for user in value.users:
        if user.target is aten.clone.default and user.kwargs.get("memory_format") is torch.channels_last:
            return user
    return graph.call_function(aten.clone.default, (value,), {"memory_format": torch.channels_last})
