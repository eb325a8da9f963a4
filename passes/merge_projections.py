"""merge_projections: matrix products that share their input become one product, with the weights side by side.

Answers wave_starved, latency_bound and launch_bound, and, where the blocks of one product leave multiprocessors
without work, memory_bound and tensor_core_idle. Query, key and value, or gate and up, are three or two products of one
activation: each is too small for the device, and reads the activation again.

before                                        after
    q = addmm(bq, x, wq.T)                        y = addmm(cat(bq, bk, bv), x, cat(wq, wk, wv).T)
    k = addmm(bk, x, wk.T)                        q, k, v = y[:, :n], y[:, n:m], y[:, m:]
    v = addmm(bv, x, wv.T)

The slices are views, unless what is computed from one would then have other strides where the graph returns it: that
one is copied. A bias that is missing is zero.

Weights must be held constant (`freeze_weights`), so that Inductor concatenates them once, while compiling; where they
are inputs, that would be a copy on every call, and the pass refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, PassContext, Stage
from fxopt.torch_api import dynamo, values
from passes.views import VIEWS

aten = torch.ops.aten

#: what fewer and larger products are an answer to, whatever the size of each
_STARVED = frozenset({Axis.WAVE_STARVED, Axis.LATENCY_BOUND, Axis.LAUNCH_BOUND})
#: bytes that a kernel on a GPU reads at once, for which a row has to begin at a multiple of them
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Product:
    """bias + x @ weight, or its weight's transpose; weight and bias are constants."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    transposed: bool
    bias: fx.Node | None

    @property
    def columns(self) -> int:
        return int(self.node.meta["val"].shape[1])

    @property
    def key(self) -> Any:
        """Equal for products that may be merged."""
        return _viewed(self.x), self.transposed, self.node.meta["val"].dtype


@dataclass(frozen=True)
class MergeProjections(GraphPass):
    """Matrix products that share their input become one, where a single one does not fill the device."""

    name: ClassVar[str] = "merge_projections"
    answers: ClassVar[frozenset[Axis]] = _STARVED | {Axis.MEMORY_BOUND, Axis.TENSOR_CORE_IDLE}
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32
    after: ClassVar[tuple[str, ...]] = ("freeze_weights",)
    before: ClassVar[tuple[str, ...]] = ("promote_matmul_precision", "split_precision_gemm")
    needs: ClassVar[tuple[str, ...]] = ("freeze_weights",)

    tile: int = 128  # rows and columns of the output that one block of a matrix product computes (cuBLAS's usual)

    def applicable(self, context: PassContext) -> str:
        if not context.session:
            return "weights are inputs: concatenating them would cost a copy on every call; use fxopt.optimize"
        if context.grad:
            return "gradients are on: concatenated weights would not be trained"
        return ""

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        units = _multiprocessors(context)
        found: dict[Any, list[_Product]] = {}
        for node in graph.nodes:
            if node.target not in (aten.mm.default, aten.addmm.default):
                continue
            product = _product(node)
            tiles = math.prod(-(-size // self.tile) for size in _sizes(node))
            starved = _labelled(node, context, _STARVED)
            if not starved and not context.answers(node, self.answers):
                yield Candidate(node.name, "no label that this pass answers")
            elif not _sizes(node):
                yield Candidate(node.name, "its sizes are symbolic")
            elif product is None:
                yield Candidate(node.name, "it is not bias + x @ weight of floating-point matrices and a vector")
            elif not _constant(product.weight) or (product.bias is not None and not _constant(product.bias)):
                yield Candidate(node.name, "its weight or bias is no constant: concatenating would be a copy per call")
            elif units and product.columns * node.meta["val"].itemsize % _ALIGNMENT:
                yield Candidate(node.name, f"its {product.columns} columns would leave its neighbour unaligned")
            elif units and tiles >= units and not starved:
                yield Candidate(node.name, f"its {tiles} tiles fill the {units} multiprocessors")
            else:
                found.setdefault(product.key, []).append(product)
        for group in found.values():
            if len(group) == 1:
                yield Candidate(group[0].node.name, "no other such product takes the same input")
            else:
                yield Candidate(group[0].node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        group = self._group(graph, node, context)
        first = group[0]
        copied = _to_copy(graph, group)
        for constant in (c for p in group for c in (p.weight, p.bias) if c is not None and c.op == "get_attr"):
            if first.node < constant:
                first.node.prepend(constant)
        with graph.inserting_before(first.node):
            weight = graph.call_function(aten.cat.default, ([p.weight for p in group], 0 if first.transposed else 1))
            if first.transposed:
                weight = graph.call_function(aten.permute.default, (weight, [1, 0]))
            given = next((p.bias for p in group if p.bias is not None), None)
            if given is not None:
                biases = [p.bias if p.bias is not None else _zeros(graph, given, p.columns) for p in group]
                bias = graph.call_function(aten.cat.default, (biases, 0))
                merged = graph.call_function(aten.addmm.default, (bias, first.x, weight))
            else:
                merged = graph.call_function(aten.mm.default, (first.x, weight))
            begin = 0
            for p in group:
                part = graph.call_function(aten.slice.Tensor, (merged, 1, begin, begin + p.columns))
                if p.node in copied:
                    dense: Any = {"memory_format": torch.contiguous_format}
                    part = graph.call_function(aten.clone.default, (part,), dense)
                p.node.replace_all_uses_with(part)
                begin += p.columns
        for p in group:
            graph.erase_node(p.node)

    def _group(self, graph: fx.Graph, first: fx.Node, context: PassContext) -> list[_Product]:
        """What `candidates` put together with `first`, in order."""
        refused = {c.target for c in self.candidates(graph, context) if c.refused}
        wanted = _product(first)
        assert wanted is not None
        found = [_product(n) for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
        return [p for p in found if p is not None and p.key == wanted.key and p.node.name not in refused]


def _labelled(node: fx.Node, context: PassContext, axes: frozenset[Axis]) -> bool:
    """Whether `node`, or the graph as a whole, bears one of `axes`."""
    return context.answers(node, axes) or any(x.scope == "graph" and x.axis in axes for x in context.labels)


def _multiprocessors(context: PassContext) -> int:
    """How many blocks of a product run at once at least, 0 on the CPU, where there are no waves."""
    if context.device.type != "cuda":
        return 0
    counts = [e.value for label in context.labels for e in label.evidence if e.metric == "sm_count"]
    return int(counts[0]) if counts else torch.cuda.get_device_properties(context.device).multi_processor_count


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """Rows and columns of a product; nothing where one of them is symbolic or not known."""
    shape = getattr(node.meta.get("val"), "shape", ())
    return tuple(shape) if all(isinstance(size, int) for size in shape) else ()


def _product(node: fx.Node) -> _Product | None:
    """`node`, mm or addmm, as a product of this form; None where it has another."""
    bias, x, weight = node.args if node.target is aten.addmm.default else (None, *node.args)
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or not _sizes(node) or node.kwargs:
        return None  # addmm's factors, alpha and beta, are keyword arguments
    if bias is not None and not (isinstance(bias, fx.Node) and bias.meta["val"].shape == node.meta["val"].shape[1:]):
        return None
    if not node.meta["val"].is_floating_point():
        return None
    transposed = _is_transpose(weight)
    source: Any = weight.args[0] if transposed else weight
    return _Product(node, x, source, transposed, bias)


def _is_transpose(node: fx.Node) -> bool:
    if node.target is aten.permute.default:
        return [dim % 2 for dim in node.args[1]] == [1, 0]  # type: ignore[union-attr, operator]
    return node.target is aten.t.default or (node.target is aten.transpose.int and node.args[1] != node.args[2])


def _constant(node: fx.Node) -> bool:
    """Whether Inductor holds `node` constant: an attribute, or an input that it is about to freeze."""
    return node.op == "get_attr" or dynamo.is_frozen(node)


def _viewed(node: fx.Node) -> Any:
    """What a value is a view of, and how: equal for two views that are the same."""
    if node.target not in VIEWS:
        return node
    source: Any = node.args[0]
    return node.target, str(node.args[1:]), str(node.kwargs), _viewed(source)


def _zeros(graph: fx.Graph, bias: fx.Node, columns: int) -> fx.Node:
    """Zeros like `bias`. Cropped to nothing and padded, for Inductor folds no constant that is not made of another."""
    return graph.call_function(aten.constant_pad_nd.default, (bias, [-bias.meta["val"].shape[0], columns], 0.0))


def _to_copy(graph: fx.Graph, group: list[_Product]) -> set[fx.Node]:
    """Which products may not become views of the merged one: a view or another layout of it would be returned."""
    mode = values.fake_mode(graph)
    if mode is None:
        return {p.node for p in group}
    with mode:
        value = group[0].node.meta["val"]
        merged = value.new_empty((value.shape[0], sum(p.columns for p in group)))
        parts = dict(zip((p.node for p in group), merged.split([p.columns for p in group], 1), strict=True))
        alone = {node for node, part in parts.items() if not _outputs_stay(graph, {node: part})}
        together = {node: part for node, part in parts.items() if node not in alone}
        return alone if _outputs_stay(graph, together) else set(parts)


def _outputs_stay(graph: fx.Graph, parts: Mapping[fx.Node, torch.Tensor]) -> bool:
    """Whether the graph's outputs keep their layout and memory of their own if nodes had the fake values `parts`."""
    changed: dict[fx.Node, Any] = dict(parts)
    memory = {part.untyped_storage()._cdata for part in parts.values()}
    for node in graph.nodes:
        if node in parts or not any(source in changed for source in node.all_input_nodes):
            continue
        if node.op == "output":
            return False
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            continue  # writes what the values are, whatever their layout
        try:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: changed.get(n, n.meta.get("val")))
            result = node.target(*args, **kwargs)
        except Exception:  # a view that there is not in this layout
            return False
        views = any(isinstance(x, torch.Tensor) and x.untyped_storage()._cdata in memory for x in tree_leaves(result))
        if views or not values.equal_metadata(result, node.meta.get("val")):
            changed[node] = result
    return True
