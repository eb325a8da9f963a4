"""attention_backend: 16-bit attention on the backend that is fastest on this device.

Answers compute_bound, memory_bound and tensor_core_idle. torch has three fused attention kernels for 16-bit tensors on
CUDA, cuDNN's, flash attention and memory-efficient attention, and picks among them by a fixed order. Which is fastest
depends on the device and the shape, so each is a variant that the tuner measures.

before                                          after
    (o, ...) = flash_attention(q, k, v)             (o, ...) = cudnn_attention(q, k, v, None)

Legal where torch says that the other backend takes the call, only the result is used, without dropout and bias, and the
result has the same strides. A bias may mask a row altogether, for which the backends have no result in common. fp32
attention is not this pass's: its only fused kernel is the efficient one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, Pass, PassContext, Stage
from fxopt.torch_api import attention
from fxopt.torch_api.attention import BACKENDS
from passes.views import strided_alike

_NAMES = {target: name for name, target in BACKENDS.items()}


@dataclass(frozen=True)
class AttentionBackend(GraphPass):
    """16-bit attention on cuDNN's, the flash or the efficient kernel, whichever is fastest on this device."""

    name: ClassVar[str] = "attention_backend"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.COMPUTE_BOUND, Axis.MEMORY_BOUND, Axis.TENSOR_CORE_IDLE})
    stage: ClassVar[Stage] = Stage.JOINT
    # The three differ in the order of their sums, in 16 bits all of them.
    precision: ClassVar[Precision] = Precision.FP32
    # Attention may be 16-bit only since the one, and without a mask only since the other.
    after: ClassVar[tuple[str, ...]] = ("promote_matmul_precision", "causal_mask")
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    #: kernel to call: "cudnn", "flash" or "efficient"
    backend: str = "cudnn"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}, not one of {', '.join(BACKENDS)}")

    def variants(self, context: PassContext) -> Sequence[Pass]:
        return [AttentionBackend(backend=name) for name in BACKENDS]

    def applicable(self, context: PassContext) -> str:
        if context.grad:
            return "gradients are on: the backward reads what its own backend's forward has left"
        return ""

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        for node in graph.nodes:
            if node.target not in _NAMES:
                continue
            given = attention.arguments(node)
            operands, causal, scale = _operands(given)
            q, k, v = (operand.meta["val"] for operand in operands)
            sizes = [size for x in (q, k, v) for size in x.shape]
            if not context.answers(node, self.answers):
                yield Candidate(node.name, "not labelled compute_bound, memory_bound or tensor_core_idle")
            elif q.dtype == torch.float32:
                yield Candidate(
                    node.name, "operands are float32, for split_precision_attention or promote_matmul_precision"
                )
            elif q.device.type != "cuda":
                yield Candidate(node.name, "it is not on CUDA")
            elif _NAMES[node.target] == self.backend:
                yield Candidate(node.name, f"it is on {self.backend} already")
            elif not attention.only_result_used(node):
                yield Candidate(node.name, "its log-sum-exp is used, or the state of its dropout")
            elif given["dropout_p"]:
                yield Candidate(node.name, "it has dropout")
            elif given.get("attn_bias") is not None:
                yield Candidate(
                    node.name, "it has a bias, and the backends need not agree on a row that is masked altogether"
                )
            elif not all(isinstance(size, int) for size in sizes) or not isinstance(scale, (int, float, type(None))):
                yield Candidate(node.name, "sizes are symbolic")
            elif not attention.usable(self.backend, q, k, v, causal):
                yield Candidate(node.name, f"torch's {self.backend} attention does not take it")
            elif not strided_alike(
                result := attention.result(self.backend, q, k, v, causal, scale), node.meta["val"][0]
            ):
                strides, old = result.stride(), node.meta["val"][0].stride()
                yield Candidate(node.name, f"{self.backend} gives its result the strides {strides}, not {old}")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        (q, k, v), causal, scale = _operands(attention.arguments(node))
        target, args, kwargs = attention.call(self.backend, q, k, v, causal, scale)
        with graph.inserting_before(node):
            called = graph.call_function(target, args, kwargs)
            result = graph.call_function(operator.getitem, (called, 0))
        for user in list(node.users):
            user.replace_all_uses_with(result)
            graph.erase_node(user)
        graph.erase_node(node)


def _operands(given: dict[str, Any]) -> tuple[list[Any], bool, Any]:
    operands = [given[name] for name in ("query", "key", "value")]
    return operands, bool(given["is_causal"]), given["scale"]
