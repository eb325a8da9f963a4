"""remove_redundant_casts_and_copies: casts and copies whose result is there already, where Inductor keeps them.

Answers cast_traffic, layout_conversion, memory_bound and excess_traffic. Every rewrite is exact, bit by bit:

- a second cast or copy of one value, through whatever equal views, becomes the first (outside of frozen graphs
  Inductor merges no equal nodes, and two that feed library calls are both written to memory);
- a cast to a wider type and back, views in between or not, becomes the value itself, seen through the same views:
  bf16 -> fp32 -> bf16; never fp32 -> bf16 -> fp32, which rounds;
- a cast of a cast that lost nothing casts the narrow value: bf16 -> fp32 -> fp16 reads bf16;
- a copy into another layout and back becomes the value itself.

before                                                    after
    wide = fp32(x16);  y16 = bf16(permute(wide))              y16 = permute(x16)

Inductor itself removes a cast to the same type, a copy with equal strides, pairs of views or permutations, and a chain
of two floating-point casts of which the first has no other use: these are left to it, and so are views, which cost
nothing. Refuses a value whose memory is written to, one that would make an output a view of an input or of another
output, and symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxopt import effects
from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import Candidate, GraphPass, PassContext, Stage
from passes.views import VIEWS

aten = torch.ops.aten
CAST: Any = torch.ops.prims.convert_element_type.default
COPY: Any = aten.clone.default
_FLOATS = {torch.float32, torch.float64}
#: types that hold every value of a type
_HOLDS: dict[torch.dtype, set[torch.dtype]] = {
    torch.bool: {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
    | _FLOATS,
    torch.uint8: {torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16} | _FLOATS,
    torch.int8: {torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16} | _FLOATS,
    torch.int16: {torch.int32, torch.int64} | _FLOATS,
    torch.int32: {torch.int64, torch.float64},
    torch.float16: _FLOATS,
    torch.bfloat16: _FLOATS,
    torch.float32: {torch.float64},
}


@dataclass(frozen=True)
class _Plan:
    """What a node becomes: `source`, seen through the operators of `steps`, cast to `dtype` unless that is None."""

    source: fx.Node
    steps: tuple[fx.Node, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the result has memory of its own."""
        return self.dtype is not None or any(step.target is COPY for step in self.steps)

    def value(self) -> Any:
        """The fake value of the result; raises what an operator raises that cannot look at `source` in this way."""
        value = self.source.meta["val"]
        for step in self.steps:
            value = step.target(value, *step.args[1:], **step.kwargs)  # type: ignore[operator]
        return value if self.dtype is None else CAST(value, self.dtype)

    def build(self, graph: fx.Graph) -> fx.Node:
        node = self.source
        for step in self.steps:
            node = graph.call_function(step.target, (node, *step.args[1:]), dict(step.kwargs))  # type: ignore[arg-type]
        return node if self.dtype is None else graph.call_function(CAST, (node, self.dtype))


@dataclass(frozen=True)
class RemoveRedundantCastsAndCopies(GraphPass):
    """Casts and copies whose result is there already become that result, bit by bit the same."""

    name: ClassVar[str] = "remove_redundant_casts_and_copies"
    answers: ClassVar[frozenset[Axis]] = frozenset(
        {Axis.CAST_TRAFFIC, Axis.LAYOUT_CONVERSION, Axis.MEMORY_BOUND, Axis.EXCESS_TRAFFIC}
    )
    stage: ClassVar[Stage] = Stage.POST_GRAD
    precision: ClassVar[Precision] = Precision.FP32
    gradients: ClassVar[bool] = True

    def candidates(self, graph: fx.Graph, context: PassContext) -> Iterable[Candidate]:
        first = _first_of_each(graph)
        where = effects.memory(graph)
        for node in graph.nodes:
            if node.target is not CAST and node.target is not COPY:
                continue
            plan = _plan(node, first)
            if plan is None:
                continue
            if not context.answers(node, self.answers):
                yield Candidate(node.name, "not labelled with traffic of casts, copies or memory")
            elif _is_symbolic(node) or _is_symbolic(plan.source):
                yield Candidate(node.name, "its sizes are symbolic")
            elif not _same_form(node, plan):
                yield Candidate(node.name, "what is there has other strides")
            elif _touches_written(graph, where, node, plan):
                yield Candidate(node.name, "its memory is written to")
            elif _shares_outputs(graph, where, node, plan):
                yield Candidate(node.name, "an output would come to share memory with an input or another output")
            else:
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        # Planned anew, for an earlier rewrite may have taken a step of the way, or made an output of the source.
        plan = _plan(node, _first_of_each(graph))
        where = effects.memory(graph)
        if plan is None or not _same_form(node, plan) or _shares_outputs(graph, where, node, plan):
            return
        with graph.inserting_before(node):
            node.replace_all_uses_with(plan.build(graph))
        graph.erase_node(node)


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _plan(node: fx.Node, first: Mapping[fx.Node, fx.Node]) -> _Plan | None:
    """What the cast or copy `node` could become; None where its result is nowhere else."""
    earlier = first[node]
    if earlier is not node:
        return _Plan(earlier)
    return _cast_of_a_cast(node) if node.target is CAST else _there_and_back(node)


def _first_of_each(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the first one that computes the same by casts, copies and views; other nodes are only themselves.

    What comes before a write to memory and what comes after it are never the same.
    """
    first: dict[fx.Node, fx.Node] = {}
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        first[node] = node
        if effects.writes_to(node):
            known.clear()
        if node.op != "call_function" or (node.target not in VIEWS and node.target not in (CAST, COPY)):
            continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: first[n])
        key = (node.target, _hashable(args), _hashable(kwargs))
        first[node] = known.setdefault(key, node)
    return first


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((k, _hashable(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return type(value), value  # 1, 1.0 and True are equal, and not the same


def _cast_of_a_cast(node: fx.Node) -> _Plan | None:
    """A cast, seen through views, of a cast to a type that holds every value of the one before it."""
    dtype = node.args[1]
    steps: list[fx.Node] = []
    at: Any = node.args[0]
    while isinstance(at, fx.Node) and (at.target in VIEWS or at.target is COPY):
        steps.insert(0, at)
        at = at.args[0]
    if not isinstance(at, fx.Node) or at.target is not CAST or not isinstance(at.args[0], fx.Node):
        return None
    source, wide = at.args[0], at.args[1]
    narrow = _dtype(source)
    if narrow is None or wide not in _HOLDS.get(narrow, ()):
        return None
    return _Plan(source, tuple(steps), None if dtype == narrow else dtype)  # type: ignore[arg-type]


def _there_and_back(node: fx.Node) -> _Plan | None:
    """A copy of a permuted copy of a value, permuted as that value is."""
    if not isinstance(_value(node), torch.Tensor):
        return None
    order = list(range(_value(node).dim()))  # dimension i of the result is dimension order[i] of `at`
    at: Any = node
    copies = 0
    while isinstance(at, fx.Node):
        if at.target is COPY:
            copies += 1
        elif at.target is aten.permute.default:
            dims: Any = at.args[1]
            order = [dims[i] % len(dims) for i in order]
        else:
            break
        at = at.args[0]
    identical = isinstance(at, fx.Node) and isinstance(_value(at), torch.Tensor) and order == list(range(len(order)))
    return _Plan(at) if identical and copies > 1 else None


def _value(node: Any) -> Any:
    return node.meta.get("val")


def _is_symbolic(node: fx.Node) -> bool:
    value = _value(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return True
    return not all(isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))


def _form(value: torch.Tensor) -> tuple[Any, ...]:
    return value.dtype, value.device, value.shape, value.stride()


def _same_form(node: fx.Node, plan: _Plan) -> bool:
    try:
        return _form(plan.value()) == _form(_value(node))
    except (RuntimeError, ValueError):  # a view that these strides do not allow
        return False


def _touches_written(graph: fx.Graph, where: effects.Memory, node: fx.Node, plan: _Plan) -> bool:
    written = frozenset().union(*(where[source] for n in graph.nodes for source in effects.writes_to(n)))
    return bool(written & (where[node] | where[plan.source]))


def _shares_outputs(graph: fx.Graph, where: effects.Memory, node: fx.Node, plan: _Plan) -> bool:
    """Whether what the graph returns of `node` would be a view of an input, a constant or another output."""
    returned = [where[leaf] for leaf in effects.outputs(graph) if isinstance(leaf, fx.Node)]
    if plan.is_fresh or not any(where[node] & places for places in returned):
        return False
    given = {n.name if n.op == "placeholder" else f"self.{n.target}" for n in graph.nodes if n.op in _GIVEN}
    return bool(where[plan.source] & given.union(*returned))


_GIVEN = ("placeholder", "get_attr")
