"""causal_mask: drop a materialised mask that is proved to say what the attention kernel knows without it.

Answers whatever limits a fused attention node that takes a mask, or the kernels that build the mask: a causal kernel
reads no mask and skips half of the scores. Models that are traced always build their mask (Hugging Face's transformers
do, even for plain causal decoding), so that `is_causal` is lost on the way to the kernel.

before                                                   after
    mask = where(iota <= iota', 0, -inf)
    y = attention(q, k, v, attn_mask=mask)                   y = attention(q, k, v, is_causal=True)

The proof is by evaluation. Where everything that the mask is made of stands in the graph (counters, constants, views,
comparisons, exact arithmetic) and none of it is an input, its value is the same in every call: it is computed once,
while compiling, and compared element by element. A mask that hides nothing is dropped as well. Hidden means -inf or the
dtype's least number, seen means 0; every row of a causal mask sees its own position, so that no row is empty and the
softmax is the same for both.

Refuses what depends on an input (padding), q_len != kv_len, windows, biases, and whatever is not evaluated exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, PassContext, Stage
from fxopt.torch_api import dynamo
from passes.views import VIEWS

aten = torch.ops.aten
prims = torch.ops.prims

#: fused attention that takes a mask, and the name of the argument
MASK: dict[Any, str] = {
    aten._scaled_dot_product_efficient_attention.default: "attn_bias",
    aten._scaled_dot_product_cudnn_attention.default: "attn_bias",
    aten._scaled_dot_product_flash_attention_for_cpu.default: "attn_mask",
}
#: operators that only look at memory in another way: evaluating them costs nothing
_VIEWS: frozenset[Any] = VIEWS | {aten.detach.default, aten.diagonal.default, aten.squeeze.default}
#: operators whose result is the same, to the bit, on every device and in compiled code
_EXACT: frozenset[Any] = _VIEWS | {
    prims.iota.default,
    prims.convert_element_type.default,
    aten.abs.default,
    aten.arange.start_step,
    aten.bitwise_and.Tensor,
    aten.bitwise_not.default,
    aten.bitwise_or.Tensor,
    aten.cat.default,
    aten.clamp_max.default,
    aten.clamp_min.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.eq.Scalar,
    aten.eq.Tensor,
    aten.full.default,
    aten.ge.Scalar,
    aten.ge.Tensor,
    aten.gt.Scalar,
    aten.gt.Tensor,
    aten.index.Tensor,
    aten.le.Scalar,
    aten.le.Tensor,
    aten.lift_fresh_copy.default,
    aten.logical_and.default,
    aten.logical_not.default,
    aten.logical_or.default,
    aten.lt.Scalar,
    aten.lt.Tensor,
    aten.maximum.default,
    aten.minimum.default,
    aten.ne.Scalar,
    aten.ne.Tensor,
    aten.neg.default,
    aten.reshape.default,
    aten.scalar_tensor.default,
    aten.where.self,
    aten._unsafe_view.default,
}
#: of integers as exact as those; a floating-point result has to be one that needed no rounding
_ARITHMETIC: frozenset[Any] = frozenset(
    {
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.rsub.Scalar,
        aten.sub.Tensor,
    }
)
#: in floating point these depend on an order, or on the device
_OF_INTEGERS: frozenset[Any] = frozenset(
    {
        aten.any.default,
        aten.any.dim,
        aten.cumsum.default,
        aten.remainder.Scalar,
        aten.remainder.Tensor,
        aten.sum.default,
        aten.sum.dim_IntList,
    }
)

#: what was proved of each attention of a graph, for `rewrite`: a large mask is not evaluated twice
_proved: WeakKeyDictionary[fx.Graph, dict[str, dict[str, bool]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class CausalMask(GraphPass):
    """Drop a mask that is proved to be causal, or to hide nothing, and tell the attention kernel instead."""

    name: ClassVar[str] = "causal_mask"
    answers: ClassVar[frozenset[Axis]] = frozenset(
        {
            Axis.COMPUTE_BOUND,
            Axis.EXCESS_TRAFFIC,
            Axis.L2_BOUND,
            Axis.LATENCY_BOUND,
            Axis.LAUNCH_BOUND,
            Axis.MEMORY_BOUND,
            Axis.OCCUPANCY_LIMITED,
            Axis.TENSOR_CORE_IDLE,
        }
    )
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32
    before: ClassVar[tuple[str, ...]] = ("attention_backend", "promote_matmul_precision", "split_precision_attention")
    enables: ClassVar[tuple[str, ...]] = ("attention_backend", "promote_matmul_precision", "split_precision_attention")

    max_bytes: int = 2**30  # the most that may be computed to find out what one mask holds

    def applicable(self, context: PassContext) -> str:
        if context.grad:
            return "gradients are on: the backward would still read the mask"
        return ""

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        constants = _Constants()
        proved = _proved[graph] = {}
        for node in graph.nodes:
            if node.target not in MASK or _arguments(node)[MASK[node.target]] is None:
                continue
            given = _arguments(node)
            mask = given[MASK[node.target]]
            sizes = (given["query"].meta["val"].shape[-2], given["key"].meta["val"].shape[-2])
            if not _labelled(node, constants.origins(mask), context, self.answers):
                yield Candidate(node.name, "no label that this pass answers, on it or on what its mask is made of")
            elif given["is_causal"]:
                yield Candidate(node.name, "it is causal and takes a mask as well")
            elif given["dropout_p"]:
                yield Candidate(node.name, "it draws random numbers, to drop out")
            elif any(isinstance(size, torch.SymInt) for size in (*sizes, *mask.meta["val"].shape)):
                yield Candidate(node.name, "sizes of the mask are symbolic, and a proof holds for one size")
            elif (source := constants.blocked(mask)) is not None and source.op == "placeholder":
                yield Candidate(node.name, f"the mask depends on the input {source.name}")
            elif source is not None:
                yield Candidate(node.name, f"the mask is made by {source.target}, which is not evaluated exactly")
            elif (size := constants.size(mask)) > self.max_bytes:
                yield Candidate(node.name, f"evaluating the mask takes {size} bytes, more than max_bytes")
            elif (seen := constants.seen(mask, *sizes)) is None:
                yield Candidate(node.name, "the mask rests on floating-point arithmetic that rounds")
            elif seen.bias is not None:
                yield Candidate(node.name, f"the mask is no pure mask: it adds {seen.bias}")
            elif seen.everything:
                proved[node.name] = {"is_causal": False}
                yield Candidate(node.name)
            elif sizes[0] != sizes[1]:
                yield Candidate(node.name, f"q_len {sizes[0]} is not kv_len {sizes[1]}")
            elif seen.hides is not None:
                row, column = seen.hides
                yield Candidate(node.name, f"the mask hides position {column} from {row}: padding or a window")
            elif seen.shows is not None:
                row, column = seen.shows
                yield Candidate(node.name, f"the mask shows the later position {column} to {row}")
            else:
                proved[node.name] = {"is_causal": True}
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        given = _arguments(node) | {MASK[node.target]: None} | _proved[graph][node.name]
        schema = node.target._schema  # type: ignore[union-attr]
        node.args = tuple(given[a.name] for a in schema.arguments if not a.kwarg_only)
        node.kwargs = {a.name: given[a.name] for a in schema.arguments if a.kwarg_only and given[a.name] is not None}


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = {a.name: node.kwargs.get(a.name, a.default_value) for a in schema.arguments}
    return given | {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)}


def _labelled(node: fx.Node, mask: Iterable[fx.Node], context: PassContext, axes: frozenset[Axis]) -> bool:
    """Whether the attention, something that the mask is made of, or the graph as a whole bears one of `axes`."""
    if any(label.scope == "graph" and label.axis in axes for label in context.labels):
        return True
    return any(context.answers(n, axes) for n in (node, *mask))


class _Seen:
    """What each query sees, by a mask's value that is broadcast to [..., q_len, kv_len].

    bias: a number that is neither 0 nor as good as -inf, None if there is none. everything: nothing is hidden.
    hides, shows: the first (row, column) that is hidden or shown where a causal mask does not.
    """

    def __init__(self, mask: torch.Tensor, q_len: int, kv_len: int) -> None:
        for dim in range(mask.dim() - 2):  # heads and batch that were only expanded hold the same again
            if mask.stride(dim) == 0:
                mask = mask.narrow(dim, 0, 1)
        if mask.dtype == torch.bool:
            seen, hidden = mask, ~mask
        else:
            seen, hidden = mask == 0, mask == -math.inf
            if mask.dtype in (torch.float32, torch.float64, torch.bfloat16):  # fp16's -65504 is no more than a score
                hidden |= mask == torch.finfo(mask.dtype).min
        odd = ~(seen | hidden)
        self.bias: float | None = float(mask[odd][0]) if bool(odd.any()) else None
        self.everything = bool(seen.all())
        seen = seen.expand(*seen.shape[:-2], q_len, kv_len)
        causal = torch.ones(q_len, kv_len, dtype=torch.bool).tril()
        self.hides = _first(causal & ~seen)
        self.shows = _first(seen & ~causal)


def _first(where: torch.Tensor) -> tuple[int, int] | None:
    found = where.nonzero()
    return (int(found[0, -2]), int(found[0, -1])) if len(found) else None


class _Constants:
    """Values that do not depend on a graph's inputs. Nodes that compute the same, as each layer's mask, share one."""

    def __init__(self) -> None:
        self._numbers: dict[fx.Node, int] = {}
        self._known: dict[Any, int] = {}
        self._values: dict[int, torch.Tensor | None] = {}
        self._origins: dict[fx.Node, list[fx.Node]] = {}

    def origins(self, node: fx.Node) -> list[fx.Node]:
        """All that `node` is made of, itself included, each after what it is made of itself."""
        if node not in self._origins:
            found: set[fx.Node] = set()
            left = [node]
            while left:
                one = left.pop()
                if one not in found:
                    found.add(one)
                    left += one.all_input_nodes
            self._origins[node] = sorted(found)
        return self._origins[node]

    def blocked(self, node: fx.Node) -> fx.Node | None:
        """What keeps `node` from being evaluated: an input if there is one, else an operator that is not exact."""
        found = [n for n in self.origins(node) if not _is_exact(n)]
        return next((n for n in found if n.op == "placeholder"), found[0] if found else None)

    def size(self, node: fx.Node) -> int:
        """Bytes of all that has to be computed for `node`."""
        return sum(
            n.meta["val"].numel() * n.meta["val"].itemsize
            for n in self.origins(node)
            if n.op == "call_function" and n.target not in _VIEWS
        )

    def seen(self, mask: fx.Node, q_len: int, kv_len: int) -> _Seen | None:
        """What `mask`, which nothing blocks, lets be seen in every call; None where a sum or product was rounded."""
        with dynamo.outside_tracing(), torch.no_grad():  # while compiling, new tensors would be fake
            for node in self.origins(mask):
                number = self._number(node)
                if number not in self._values:
                    self._values[number] = self._evaluate(node)
            value = self._values[self._numbers[mask]]
            return None if value is None else _Seen(value, q_len, kv_len)

    def _number(self, node: fx.Node) -> int:
        """One number for all nodes that compute the same."""
        if node not in self._numbers:
            call = str(fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{self._numbers[n]}"))
            self._numbers[node] = self._known.setdefault((node.op, node.target, call), len(self._known))
        return self._numbers[node]

    def _evaluate(self, node: fx.Node) -> torch.Tensor | None:
        if node.op == "get_attr":
            return _attribute(node).detach().cpu()
        values = {n: self._values[self._numbers[n]] for n in node.all_input_nodes}
        if any(value is None for value in values.values()):
            return None
        args: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if "device" in kwargs:  # what is exact is the same on every device
            kwargs = {**kwargs, "device": torch.device("cpu")}
        function: Any = node.target
        result = function(*args, **kwargs)
        if node.target is prims.convert_element_type.default and args[0].is_floating_point():
            # Inductor leaves out a cast there and back; a type's least number that becomes -inf hides either way.
            exact = (result.double() == args[0].double()) | result.isinf()
            return result if result.dtype == torch.bool or bool(exact.all()) else None
        if node.target in _ARITHMETIC and result.is_floating_point():
            wide = function(*tree_map_only(torch.Tensor, lambda x: x.double(), args), **kwargs)
            return result if torch.equal(wide, result.double()) else None
        return result


def _attribute(node: fx.Node) -> Any:
    held: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        held = getattr(held, name)
    return held


def _is_exact(node: fx.Node) -> bool:
    if node.op == "get_attr":
        written = any(getattr(getattr(user.target, "_schema", None), "is_mutable", False) for user in node.users)
        # Not a subclass: neither a packed tensor nor a fake one tells what it holds.
        return type(_attribute(node)) in (torch.Tensor, torch.nn.Parameter) and not written
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if node.target in _OF_INTEGERS:
        return all(not n.meta["val"].is_floating_point() for n in (node, *node.all_input_nodes))
    return node.target in _EXACT or node.target in _ARITHMETIC
