"""bf16_graph: the whole graph in bf16, between fp32 inputs and fp32 outputs.

Answers tensor_core_idle, compute_bound and memory_bound. Every fp32 input and weight is cast to bf16 before the graph
is traced, and every fp32 output back, so that each operator runs as it would in a model converted by
`model.bfloat16()`: products on the tensor cores, half the memory traffic in all that lies between, normalisation and
softmax in fp32 inside their kernels, as torch has them for bf16. A frozen weight is cast once. What the model itself
asks to be fp32 stays so.
`promote_matmul_precision` rounds less (everything but the products stays fp32); which is faster is measured.

before                                   after
    y = graph(x, w)                          y = fp32(graph(bf16(x), bf16(w)))

A number beyond bf16's largest becomes that, and not Inf, so that a mask of float32's least number stays finite.
Refuses anything but precision "bf16" (or a numeric error budget), gradients, random numbers, graphs that write to an
fp32 input or return one, graphs that make fp32 values of their own to multiply with, and devices without bf16 matrix
units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, ConfigPass, Configuration, PassContext, Stage
from fxopt.torch_api.casts import uncastable
from fxopt.torch_api.dynamo import placeholders, storage_of


@dataclass(frozen=True)
class Bf16Graph(ConfigPass):
    """The whole graph in bf16, between fp32 inputs and fp32 outputs."""

    name: ClassVar[str] = "bf16_graph"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.TENSOR_CORE_IDLE, Axis.COMPUTE_BOUND, Axis.MEMORY_BOUND})
    stage: ClassVar[Stage] = Stage.CONFIG
    precision: ClassVar[Precision] = Precision.BF16
    after: ClassVar[tuple[str, ...]] = ("freeze_weights",)
    enables: ClassVar[tuple[str, ...]] = ("gemm_epilogue",)
    conflicts: ClassVar[tuple[str, ...]] = (
        "promote_matmul_precision",
        "split_precision_gemm",
        "split_precision_attention",
        "split_precision_conv",
        "tf32_matmul",
        "rnn_redispatch",
    )

    def applicable(self, context: PassContext) -> str:
        if "bfloat16" not in context.matrix_units:
            return f"{context.device} has no bf16 matrix units"
        if context.budget.max_rel_l2 is not None and context.budget.max_rel_l2 < 1e-3:
            return "a graph in bf16 is off by more than the error asked for"
        if context.grad:
            return "gradients are on: this pass is for inference graphs only"
        if context.random:
            return "it draws random numbers, of which bf16 would draw others"
        return ""

    def candidates(
        self, gm: fx.GraphModule, inputs: Sequence[Any], context: PassContext
    ) -> Iterable[tuple[int, Candidate]]:
        nodes = placeholders(gm)
        wide = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.dtype == torch.float32]
        written = sorted(context.mutated.intersection(wide))
        returned = {storage for node in gm.graph.output_node().all_input_nodes if (storage := storage_of(node))}
        shared = [i for i in wide if storage_of(nodes[i]) in returned]
        mixed = "" if written or shared else uncastable(gm, dict.fromkeys(wide, torch.bfloat16))
        for position in wide:
            name = nodes[position].name
            if written:
                yield position, Candidate(name, f"the graph writes to input {written[0]}, which would be its cast's")
            elif shared:
                yield position, Candidate(name, f"the graph returns input {shared[0]} itself, or a view of it")
            elif mixed:
                yield position, Candidate(name, f"the graph makes fp32 values that do not go with bf16: {mixed}")
            else:
                yield position, Candidate(name)

    def configure(self, accepted: Sequence[int], context: PassContext) -> Configuration:
        return Configuration(compute={position: torch.bfloat16 for position in accepted})

    def took_effect(self, compiled: Any, accepted: Sequence[int], context: PassContext) -> int:
        if compiled.post_grad is None:  # a cache served the code, which was compiled from the graph with its casts
            return len(accepted)
        values = (node.meta.get("val") for node in compiled.post_grad.graph.nodes)
        in_bf16 = sum(isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 for value in values)
        return len(accepted) if in_bf16 else 0
