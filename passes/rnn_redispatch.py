"""rnn_redispatch: recurrent layers on the library's kernels (cuDNN, oneDNN), in the precision that the class allows.

Answers every label of what AOTAutograd unrolls a recurrent layer into, and opaque_library and launch_bound on the
library's own kernels. With `torch._dynamo.config.allow_rnn`, Dynamo's graph holds one call of `torch.lstm` (gru,
rnn_tanh, rnn_relu), which is unrolled into products for every step: launches without end. Sent back, it is one call
again, `fxopt::rnn`, inside one graph, which `cuda_graphs` can then capture. Under `fxopt.optimize` every recurrent
layer is that operator from the start (eager cuDNN is the baseline there), and what is left to choose is its precision:
TF32 in this call alone, or fp16 or bf16 with the weights cast, and laid out as cuDNN wants them, once. An LSTM can
leave the library, too: `compute="split"` multiplies in split fp32, in one kernel for all steps (`passes.split_rnn`).

before                                   after
    y = lstm(x, hx, weights)                 y = fxopt.rnn(x, hx, weights, None, "lstm", ..., "tf32")

Runs before AOTAutograd, in Inductor's slot for that. Refuses layers in training mode, packed sequences, gradients and
autocast, and other dtypes than fp32 where the precision is to change.
"""

from __future__ import annotations

import importlib.util
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt import rnn
from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, ConfigPass, Configuration, Pass, PassContext, Stage
from fxopt.torch_api.rnn import BeforeAutograd
from passes import split_rnn

#: the class that each way to compute needs: fp16's error is TF32's, but not its range
CLASSES = {
    "": Precision.FP32, "split": Precision.FP32, "tf32": Precision.TF32, "fp16": Precision.BF16, "bf16": Precision.BF16
}  # fmt: skip


#: Relative L2 error below which a way of computing need not be tried: a quarter of what two layers of 512 were off by
#: on an H200 (7.5e-5, 9.0e-5, 1.0e-3).
_ERROR = {"": 0.0, "split": 0.0, "tf32": 2e-5, "fp16": 2e-5, "bf16": 2.5e-4}


@dataclass(frozen=True)
class RnnRedispatch(ConfigPass):
    """Recurrent layers on the library's kernels (cuDNN, oneDNN), in the precision that the class allows."""

    name: ClassVar[str] = "rnn_redispatch"
    answers: ClassVar[frozenset[Axis]] = frozenset(
        {
            Axis.COMPUTE_BOUND,
            Axis.L2_BOUND,
            Axis.LATENCY_BOUND,
            Axis.LAUNCH_BOUND,
            Axis.MEMORY_BOUND,
            Axis.OCCUPANCY_LIMITED,
            Axis.OPAQUE_LIBRARY,
            Axis.TENSOR_CORE_IDLE,
            Axis.WAVE_STARVED,
        }
    )
    stage: ClassVar[Stage] = Stage.CONFIG
    precision: ClassVar[Precision] = Precision.FP32
    before: ClassVar[tuple[str, ...]] = ("cuda_graphs",)
    enables: ClassVar[tuple[str, ...]] = ("cuda_graphs",)

    #: what the layers compute in: as eager does (""), "tf32", "fp16", "bf16", or "split"
    compute: str = ""

    def __post_init__(self) -> None:
        if self.compute not in CLASSES:
            raise ValueError(f"compute={self.compute!r}: give one of {', '.join(map(repr, CLASSES))}")

    def variants(self, context: PassContext) -> Sequence[Pass]:
        # On a CPU, a session has nothing to send back: oneDNN takes weights as they lie.
        ways: tuple[str, ...] = ("bf16",) if context.session else ("bf16", "")
        if context.device.type == "cuda":
            ways = ("split", "tf32", "fp16", "bf16", "")
        found = [RnnRedispatch(way) for way in ways]
        return [p for p in found if not p.applicable(context)] or (self,)

    def concerns(self, context: PassContext) -> bool:
        sources = {re.sub(r"_\d+$", "", name) for names in context.origins.values() for name in names}
        return not context.origins or bool(sources.intersection(rnn.FUNCTIONS.values()))

    def applicable(self, context: PassContext) -> str:
        if context.session and context.device.type != "cuda" and not context.budget.allows(Precision.BF16):
            return "recurrent layers are on the library's kernels already, in the precision asked for"
        if context.grad:
            return "gradients are on: the library's inference call has no backward"
        if not context.budget.allows(CLASSES[self.compute]):
            return f"{self.compute} needs precision={CLASSES[self.compute].value!r}"
        if context.budget.max_rel_l2 is not None and context.budget.max_rel_l2 < _ERROR[self.compute]:
            return f"products in {self.compute} are off by more than the error asked for"
        if self.compute == "split":
            if "float16" not in context.matrix_units:
                return f"{context.device} has no fp16 matrix units"
            if importlib.util.find_spec("triton") is None:
                return "Triton is not installed, and the kernels are written in it"
        if self.compute in ("tf32", "fp16") and context.device.type != "cuda":
            return f"{self.compute} is cuDNN's, and this graph is on {context.device}"
        if self.compute == "bf16" and "bfloat16" not in context.matrix_units:
            return f"{context.device} has no bf16 matrix units"
        return ""

    def candidates(
        self, gm: fx.GraphModule, inputs: Sequence[Any], context: PassContext
    ) -> Iterable[tuple[int, Candidate]]:
        real = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        for number, node in enumerate(rnn.nodes(gm.graph)):
            why = rnn.refusal(node)
            if why:
                yield 0, Candidate(node.name, f"{why}")
                continue
            if not self._labelled(node, context):
                yield 0, Candidate(node.name, "no label on what it became")
                continue
            args = rnn.arguments(node)
            weights = [real.get(weight) for weight in args[2]]
            if self.compute and any(not isinstance(w, torch.Tensor) or w.dtype != torch.float32 for w in weights):
                yield 0, Candidate(node.name, "its weights are not float32 inputs of the graph")
                continue
            if any(user.target is not operator.getitem for user in node.users):
                yield 0, Candidate(node.name, "its outputs are used as a whole")
                continue
            projects = rnn.projects(args)
            pack = context.device.type == "cuda" and _scattered(weights) and not projects
            if self.compute == "split":
                why = split_rnn.refusal(args)
                yield 2 * number, Candidate(node.name, f"{why}")
            elif projects and self.compute in ("fp16", "bf16"):
                yield 0, Candidate(node.name, "it projects its hidden state: its weights cannot be laid out for cuDNN")
            elif rnn.on_library(node) and not self.compute and not pack:
                yield 0, Candidate(node.name, "it is on the library's kernels already, in the precision asked for")
            else:
                yield 2 * number + pack, Candidate(node.name)

    def _labelled(self, node: fx.Node, context: PassContext) -> bool:
        """Whether a label is on what `node` became in the measured graph, or on the graph as a whole.

        The operator needs none: nothing sees into it.
        """
        if rnn.is_rnn(node) or any(label.scope == "graph" and label.axis in self.answers for label in context.labels):
            return True
        return any(node.name in context.origins.get(name, (name,)) for name in context.labelled(self.answers))

    def configure(self, accepted: Sequence[int], context: PassContext) -> Configuration:
        # A candidate's number says which layer it is, and whether its weights have to be brought together.
        layers = [(number // 2, bool(number % 2)) for number in accepted]
        return Configuration(patches={BeforeAutograd.OPTION: _Rewrite(layers, self, context)})

    def took_effect(self, compiled: Any, accepted: Sequence[int], context: PassContext) -> int:
        if compiled.post_grad is None:  # there was nothing to compile
            return 0
        graph = compiled.post_grad.graph
        if self.compute == "split":
            return min(len(graph.find_nodes(op="call_function", target=split_rnn.STEPS)), len(accepted))
        found = [n for n in rnn.nodes(graph) if n.args[-1] == self.compute]
        return min(len(found), len(accepted))


class _Rewrite(BeforeAutograd):
    """layers: which to rewrite, by number, and whether to lay out their weights."""

    def __init__(self, layers: Sequence[tuple[int, bool]], p: RnnRedispatch, context: PassContext) -> None:
        super().__init__()
        self.layers, self.compute, self._fingerprint = tuple(layers), p.compute, p.fingerprint()
        self._cache, self._session = context.cache, context.session

    def rewrite(self, graph: fx.Graph) -> None:
        found = rnn.nodes(graph)
        for number, pack in self.layers:
            if self.compute == "split":
                split_rnn.rewrite(found[number], self._cache, constant=self._session)
            else:
                rnn.rewrite(found[number], self.compute, pack)

    def key(self) -> str:
        return f"{self.layers} {self._fingerprint}"


def _scattered(weights: Sequence[Any]) -> bool:
    """Whether cuDNN would have to bring the weights together on every call."""
    return len({w.untyped_storage().data_ptr() for w in weights if isinstance(w, torch.Tensor)}) > 1
