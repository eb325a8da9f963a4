"""freeze_weights: hold parameters constant, so that Inductor folds and pre-packs them.

Answers compute_bound, memory_bound and tensor_core_idle on nodes that read a parameter, and layout_conversion and
cast_traffic, where a weight is transposed or cast on every call. Weights are folded into the compiled code: a
transposed, cast or packed copy is made once instead of on every call (on the CPU, Inductor's linear packing for oneDNN
needs it). Batch normalisation in evaluation mode is folded into the convolution or linear layer before it, in fp32: the
first Inductor does by itself, the second it is asked for. Only `fxopt.optimize` may do this: `torch.compile` promises
that a parameter changed between calls is seen. An output that is left a constant is copied in each call
(`fxopt.own_outputs`): the caller may write to it.
Refuses buffers and parameters that the graph writes to or beside, in one memory, and graphs with gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, ConfigPass, Configuration, PassContext, Stage
from fxopt.torch_api.dynamo import beside, storage_of

#: Inductor's option to fold arithmetic with constants into a linear layer, as it does for convolutions anyway
_FOLD_INTO_LINEAR = {"enable_linear_binary_folding": True}


@dataclass(frozen=True)
class FreezeWeights(ConfigPass):
    """Hold parameters constant, so that Inductor folds and pre-packs them."""

    name: ClassVar[str] = "freeze_weights"
    answers: ClassVar[frozenset[Axis]] = frozenset(
        {Axis.COMPUTE_BOUND, Axis.MEMORY_BOUND, Axis.TENSOR_CORE_IDLE, Axis.LAYOUT_CONVERSION, Axis.CAST_TRAFFIC}
    )
    stage: ClassVar[Stage] = Stage.CONFIG
    precision: ClassVar[Precision] = Precision.FP32
    enables: ClassVar[tuple[str, ...]] = (
        "promote_matmul_precision",
        "onednn_linear",
        "split_precision_gemm",
        "split_precision_conv",
        "channels_last",
        "bf16_graph",
    )

    def applicable(self, context: PassContext) -> str:
        if not context.session:
            return "weights may change between calls under torch.compile: use fxopt.optimize(model, inputs)"
        if context.grad:
            return "gradients are on: frozen weights would not be trained; run under torch.no_grad()"
        return ""

    def candidates(
        self, gm: fx.GraphModule, inputs: Sequence[Any], context: PassContext
    ) -> Iterable[tuple[int, Candidate]]:
        nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
        returned = {storage for node in gm.graph.output_node().all_input_nodes if (storage := storage_of(node))}
        written = beside(inputs, context.mutated)
        for position in sorted(context.static):
            name = nodes[position].name
            if position in context.mutated:
                yield position, Candidate(name, "the graph writes to it")
            elif position in written:
                yield position, Candidate(name, "it shares memory with an input that the graph writes to")
            elif inputs[position].is_inference():
                yield position, Candidate(name, "an inference tensor: torch does not count what is written to it")
            elif storage_of(nodes[position]) in returned:
                yield position, Candidate(name, "the graph returns it, or a view of it")
            elif not inputs[position].numel():  # MKL refuses to pack it, on stderr
                yield position, Candidate(name, "it has no elements")
            elif not nodes[position].users:
                yield position, Candidate(name, "unused")
            else:
                yield position, Candidate(name)

    def configure(self, accepted: Sequence[int], context: PassContext) -> Configuration:
        return Configuration(_FOLD_INTO_LINEAR, frozenset(accepted))

    def took_effect(self, compiled: Any, accepted: Sequence[int], context: PassContext) -> int:
        # Inductor may fold several weights into one constant, so what counts is which inputs are gone.
        if compiled.placeholders is None:
            return len(compiled.frozen)
        left_over = compiled.placeholders - (len(compiled.kept) if compiled.kept is not None else 0)
        return max(0, len(compiled.frozen) - max(0, left_over))

