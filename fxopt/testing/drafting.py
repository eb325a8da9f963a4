"""A random graph under construction: what the builders of operators work on."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import fx

from fxopt.torch_api import tracing

__all__ = ["Draft", "Inapplicable", "Value"]

T = TypeVar("T")
aten: Any = torch.ops.aten

LIMIT = 64.0  # a floating-point result that may exceed this is scaled down, so that no graph blows up
INTEGER_LIMIT = 2.0**24
DIMS = (2, 3, 4, 1, 5, 8)
HINTS = (6, 7)  # sizes of symbolic dimensions, none of which is a static one
LARGEST = 1024  # elements of a value


class Inapplicable(Exception):
    """This operator cannot be put here; what its builder has added is taken back."""


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of the graph.

    bound: no element is larger in magnitude. exact: nothing on the way from the inputs rounds, so that what is decided
    by its value (a comparison, an index) does not depend on the precision. high: exclusive upper bound of integers that
    are not negative. base: the input that it is a view of.
    """

    node: fx.Node
    val: torch.Tensor
    bound: float
    exact: bool = False
    high: int | None = None
    base: fx.Node | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.val.dtype

    @property
    def floating(self) -> bool:
        return self.val.dtype.is_floating_point

    @property
    def dim(self) -> int:
        return self.val.dim()

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Sizes that may be compared: a symbolic one is its expression's text, so that no guard arises."""
        return tuple(size if isinstance(size, int) else str(size) for size in self.val.shape)

    @property
    def static(self) -> bool:
        return all(isinstance(size, int) for size in self.val.shape)


@lru_cache(maxsize=256)
def _below(count: int) -> st.SearchStrategy[int]:
    return st.integers(0, count - 1)


class Draft:
    """The graph so far, and the choices that Hypothesis makes.

    A builder is a function of a draft that adds one operator (or a few) by `call` and returns the result, which then
    is a value for later operators and outputs. It takes operands by `pick` and `operand`, adds inputs by `input`, and
    raises Inapplicable (or calls `need`) where it cannot be used.
    """

    def __init__(
        self, draw: Callable[[st.SearchStrategy[Any]], Any], *, device: str, dtypes: Sequence[torch.dtype], symbols: int
    ) -> None:
        self.draw = draw
        self.device = torch.device(device)
        self.dtypes = tuple(dtypes)
        self.mode = tracing.fake_mode(symbolic=symbols > 0)
        self.graph = fx.Graph()
        self.module = torch.nn.Module()
        self.values: list[Value] = []
        self.inputs: list[Value] = []
        self.static: set[fx.Node] = set()
        self.families: list[str] = []
        self.symbols: dict[str, tuple[fx.Node, Any]] = {}
        for index in range(symbols):
            name = f"n{index}"
            size = tracing.new_symbol(self.mode, name, HINTS[index])
            node = self.graph.placeholder(name)
            node.meta["val"] = size
            self.symbols[str(size)] = (node, size)
        self._sizes: dict[tuple[fx.Node, int], fx.Node] = {}

    # -- choices ----------------------------------------------------------------------------------------------------

    def number(self, count: int) -> int:
        """An integer from 0 to count - 1; shrinks towards 0."""
        return self.draw(_below(count)) if count > 1 else 0

    def choice(self, options: Sequence[T]) -> T:
        """One of the options; shrinks towards the first."""
        return options[self.number(len(options))]

    def need(self, condition: bool) -> None:
        """Raise Inapplicable unless the condition holds."""
        if not condition:
            raise Inapplicable

    # -- operands ---------------------------------------------------------------------------------------------------

    def pick(self, suits: Callable[[Value], bool] = lambda value: True) -> Value:
        """A value that suits; the newest is the simplest choice."""
        found = [value for value in reversed(self.values) if suits(value)]
        self.need(bool(found))
        return self.choice(found)

    def floating(self, suits: Callable[[Value], bool] = lambda value: True) -> Value:
        """A floating-point value that suits."""
        return self.pick(lambda value: value.floating and suits(value))

    def operand(self, shape: Sequence[Any], dtype: torch.dtype) -> Value:
        """A value of that shape (numbers or symbolic sizes) and dtype: one that is there, or a new input."""
        key = tuple(size if isinstance(size, int) else str(size) for size in shape)
        found = [value for value in reversed(self.values) if value.shape == key and value.dtype == dtype]
        index = self.number(len(found) + 1)
        return found[index] if index < len(found) else self.input(shape, dtype)

    def shape(self, least: int = 0, most: int = 3) -> tuple[Any, ...]:
        """A small shape; with symbolic sizes in it where the graph has any."""
        sizes: list[Any] = [*DIMS, *(size for _, size in self.symbols.values())]
        shape = tuple(self.choice(sizes) for _ in range(least + self.number(most - least + 1)))
        return shape

    def dtype(self) -> torch.dtype:
        return self.choice(self.dtypes)

    def input(
        self, shape: Sequence[Any], dtype: torch.dtype, *, high: int | None = None, static: bool | None = None
    ) -> Value:
        """A new input, contiguous or not. Integers are drawn from 0 to high - 1.

        static: whether it is a parameter; None is either way for floats.
        """
        layout = self.choice(("contiguous", "contiguous", "transposed", "sliced"))
        rows = [*shape[:-1], shape[-1] + 3] if layout == "sliced" and len(shape) > 0 else list(shape)
        order = list(range(len(shape)))
        if layout == "transposed" and len(shape) > 1:
            order[-2:] = reversed(order[-2:])
        stride, step = [1] * len(shape), 1
        for dim in reversed(order):
            stride[dim], step = step, step * rows[dim]
        with self.mode:
            val = torch.empty_strided(tuple(rows), stride, dtype=dtype, device=self.device)
            if rows != list(shape):  # part of a buffer, and not at its beginning
                val = val.as_strided(tuple(shape), stride, 2)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        after = self.graph.inserting_after(placeholders[-1]) if placeholders else contextlib.nullcontext()
        with after:
            node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["val"] = val
        may_be = dtype.is_floating_point and all(isinstance(size, int) for size in shape)
        if (may_be and self.number(2) == 1) if static is None else static:
            self.static.add(node)
        integer = not dtype.is_floating_point and dtype != torch.bool
        high = (high or 8) if integer else None
        value = Value(node, val, float(high or 1), exact=True, high=high, base=node)
        self.inputs.append(value)
        return value

    def index(self, high: int, shape: Sequence[Any]) -> Value:
        """Integers from 0 to high - 1."""
        key = tuple(size if isinstance(size, int) else str(size) for size in shape)
        found = [
            v
            for v in reversed(self.values)
            if v.shape == key and v.high is not None and v.high <= high and v.dtype == torch.int64
        ]
        index = self.number(len(found) + 1)
        return found[index] if index < len(found) else self.input(shape, torch.int64, high=high)

    def size(self, value: Value, dim: int) -> int | fx.Node:
        """A size as an argument: a number, the input that a symbol is, or aten.sym_size."""
        size: Any = value.val.shape[dim]
        if isinstance(size, int):
            return size
        if str(size) in self.symbols:
            return self.symbols[str(size)][0]
        known = self._sizes.get((value.node, dim))
        if known is None:
            known = self._node(aten.sym_size.int, (value.node, dim), {})
            known.meta["val"] = size
            self._sizes[value.node, dim] = known
        return known

    def spelt(self, shape: Sequence[Any]) -> list[int | fx.Node]:
        """A shape as made by `shape()` as an argument."""
        return [size if isinstance(size, int) else self.symbols[str(size)][0] for size in shape]

    # -- operators --------------------------------------------------------------------------------------------------

    def call(
        self, target: Any, *args: Any, bound: float, exact: bool = False, high: int | None = None, **kwargs: Any
    ) -> Value:
        """Add one call with one result, and say how large it may get. Operands are Values, nodes or constants.

        exact: whether the operator does not round; the result then is exact if every operand is. A result that may get
        too large for comparisons to mean much is scaled down by a power of two, which is a second operator.
        """
        (value,) = self._added(target, args, kwargs, bound, exact, high)
        if value.floating and value.bound > LIMIT:
            factor = 2.0 ** -math.ceil(math.log2(value.bound / 4))
            return self.call(aten.mul.Tensor, value, factor, bound=value.bound * factor, exact=True)
        return value

    def calls(
        self, target: Any, *args: Any, bounds: Sequence[float], exact: bool = False, **kwargs: Any
    ) -> list[Value]:
        """Add one call with several results, each by an operator.getitem of its own."""
        return self._added(target, args, kwargs, bounds, exact, None)

    def _node(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        schema = getattr(target, "_schema", None)  # named as AOTAutograd names it, without the overload
        name = schema.name.split("::")[-1] if schema is not None else None
        return self.graph.create_node("call_function", target, args, kwargs, name=name)

    def _added(self, target: Any, args: Any, kwargs: Any, bounds: Any, exact: bool, high: int | None) -> list[Value]:
        operands = [value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, Value)]
        as_nodes = lambda v: v.node if isinstance(v, Value) else v  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map_only(Value, as_nodes, (args, kwargs))
        node = self._node(target, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        try:
            with self.mode:
                result = target(*fake_args, **fake_kwargs)
        except Exception as error:
            raise Inapplicable(f"{target}: {error}") from error
        node.meta["val"] = result
        if tracing.specialised(self.mode):  # the symbol is a number from here on, everywhere
            reject()
        rounds_nothing = exact and all(operand.exact for operand in operands)
        base = operands[0].base if operands and _is_view(target) else None
        if isinstance(result, torch.Tensor):
            return [self._new(node, result, bounds, rounds_nothing, high, base)]
        found = []
        for index, (val, bound) in enumerate(zip(result, bounds, strict=True)):
            part = self.graph.call_function(operator.getitem, (node, index))
            part.meta["val"] = val
            found.append(self._new(part, val, bound, rounds_nothing, high, base))
        return found

    def _new(self, node: fx.Node, val: torch.Tensor, bound: float, exact: bool, high: int | None, base: Any) -> Value:
        self.need(val.numel() <= LARGEST if all(isinstance(n, int) for n in val.shape) else val.dim() <= 4)
        self.need(val.dtype.is_floating_point or bound <= INTEGER_LIMIT)
        return Value(node, val, bound, exact, high, base)

    def write(self, target: Value, source: Value) -> None:
        """Copy a value into an input, as the graph's last act but others like it."""
        self._node(aten.copy_.default, (target.node, source.node), {}).meta["val"] = target.val

    def constant(self, tensor: torch.Tensor, bound: float) -> Value:
        """A tensor that the graph holds (get_attr)."""
        name = f"_tensor_constant{len(dict(self.module.named_buffers()))}"
        self.module.register_buffer(name, tensor)
        node = self.graph.create_node("get_attr", name)
        with self.mode:
            # A tensor in oneDNN's own layout has no strides; Inductor gives it a value of its size as well.
            stride = torch.empty(tensor.shape, device="meta").stride() if tensor.is_mkldnn else tensor.stride()
            node.meta["val"] = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        return Value(node, node.meta["val"], bound, exact=True)

    def add(self, family: str, builder: Callable[[Draft], Value | Sequence[Value] | None]) -> bool:
        """Let a builder add its operator, or take back what it began."""
        before, inputs = set(self.graph.nodes), len(self.inputs)
        try:
            result = builder(self)
        except Inapplicable:
            result = None
        if result is None:
            for node in reversed(list(self.graph.nodes)):
                if node not in before:
                    self.graph.erase_node(node)
                    self.static.discard(node)
            del self.inputs[inputs:]
            self._sizes = {key: node for key, node in self._sizes.items() if node in before and key[0] in before}
            return False
        self.values += self.inputs[inputs:]
        self.values += [result] if isinstance(result, Value) else list(result)
        self.families.append(family)
        return True

    def count(self) -> int:
        """Operators so far."""
        return sum(node.op == "call_function" for node in self.graph.nodes)


def _is_view(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
