"""Reads a printed FX graph back into an ``fx.Graph``, as far as the text goes.

Inductor prints its graphs into TORCH_TRACE logs (with strides and devices) and debug folders (without either):

    # File: model.py:12 in forward, code: return self.lin(x)
    mm: "f32[512, 768][768, 1]cuda:0" = torch.ops.aten.mm.default(view, permute);  view = permute = None

The nodes get the location of the comment above them, the operator if this torch has it, and ``meta["val"]`` on the
``meta`` device, so that ``profiler_core.cost`` models them as it models the live graph. Nothing in the text is
executed. Module paths are not printed.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from profiler_core.collect.assemble import DESCRIPTION, Description
from profiler_core.shapes import packet_name, target_name

_FILE = re.compile(r"#.* File: (?P<file>.+?):(?P<line>\d+) in (?P<function>.+?), code: (?P<code>.*)$")
_NO_FILE = re.compile(r"#.* No stacktrace found for following nodes\s*$")
_TENSOR = re.compile(
    r"(?P<dtype>[a-z]\w*)\[(?P<shape>[^\]]*)\](?:\[(?P<stride>[^\]]*)\])?(?P<device>[a-z]\w*(?::\d+)?)?"
)
_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.MatMult: operator.matmul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Printed:
    """The graph of a text, without an output node. ``unread`` holds the 1-based lines that are not understood: their
    nodes are missing.
    """

    graph: fx.Graph
    unread: tuple[int, ...]


def parse(text: str) -> Printed:
    """The first graph in ``text``; an empty one where there is no ``def forward``."""
    reader = _Reader()
    unread = []
    for number, statement in _statements(text):
        if statement.startswith("#"):
            reader.comment(statement)
        elif not reader.read(statement):
            unread.append(number)
    reader.complete()
    return Printed(reader.graph, tuple(unread))


def add_unknown(graph: fx.Graph, names: Iterable[str]) -> None:
    """Append a node of which only the name is known for each of ``names`` that ``graph`` lacks."""
    present = {node.name for node in graph.nodes}
    for name in names:
        if name not in present:
            present.add(name)
            _named(graph.create_node("call_function", _Unknown(), name=name), name)


class _Unknown:
    """An operator of which not even the name is known: its target reads ""."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("an operator of another process")

    def __str__(self) -> str:
        return ""


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of the ``def`` of the first forward, then of the statements and comments in its body."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if re.match(r"\s*def forward\(", line)), len(lines))
    depth = -1
    i = begin
    while i < len(lines):
        line, end = lines[i].strip(), i + 1
        if line and not line.startswith("#"):
            indent = len(lines[i]) - len(lines[i].lstrip())
            if depth < 0:
                line, end = _whole_definition(lines, i)
                depth = indent
            elif indent <= depth or line.startswith("return"):
                return
        if line:
            yield i + 1, line
        i = end


def _whole_definition(lines: list[str], begin: int) -> tuple[str, int]:
    """The ``def`` that begins at ``begin``, which may take a line per argument, and where its body begins."""
    for end in range(begin + 1, len(lines) + 1):
        definition = textwrap.dedent("\n".join(lines[begin:end]))
        if _parsed(definition + " pass") is not None:
            return definition + " pass", end
    return lines[begin].strip(), begin + 1


def _parsed(text: str) -> ast.stmt | None:
    try:
        return ast.parse(text).body[0]
    except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError):
        return None


class _Reader:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.stack_trace = ""

    def comment(self, text: str) -> None:
        match = _FILE.match(text)
        if match:
            self.stack_trace = '  File "{file}", line {line}, in {function}\n    {code}\n'.format(**match.groupdict())
        elif _NO_FILE.match(text):
            self.stack_trace = ""

    def read(self, text: str) -> bool:
        """Add the node that the statement makes; False where it is not understood."""
        statement = _parsed(text)
        if isinstance(statement, ast.FunctionDef):
            for argument in statement.args.args[1:]:
                self._add(argument.arg, self.graph.placeholder(argument.arg), argument.annotation)
            return True
        target: ast.expr
        annotation: ast.expr | None
        value: ast.expr | None
        if isinstance(statement, ast.AnnAssign):
            target, annotation, value = statement.target, statement.annotation, statement.value
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, annotation, value = statement.targets[0], None, statement.value
        else:
            return False
        if not isinstance(target, ast.Name) or value is None:
            return False
        if isinstance(value, ast.Name) and value.id in self.nodes:  # `l_x_ = L_x_`: what the argument is called
            node = self.nodes[target.id] = self.nodes[value.id]
            _named(node, target.id)
            return True
        made = self._node(value)
        if made is None:
            return False
        if self.stack_trace:
            made.meta["stack_trace"] = self.stack_trace
        self._add(target.id, made, annotation)
        return True

    def _add(self, name: str, node: fx.Node, annotation: ast.expr | None) -> None:
        self.nodes[name] = _named(node, name)
        if not isinstance(annotation, ast.Constant) or not isinstance(annotation.value, str):
            return
        if annotation.value.startswith("Sym("):
            size = annotation.value[4:-1]
            node.meta["val"] = _size(size) if _size(size) >= 0 else None
            return
        described = _described(annotation.value)
        if described is not None:
            node.meta[DESCRIPTION] = described
            value = _value(node, described)
            if value is not None:
                node.meta["val"] = value

    def _node(self, value: ast.expr) -> fx.Node | None:
        """The node that an expression makes."""
        graph = self.graph
        if isinstance(value, ast.Subscript):
            return graph.call_function(operator.getitem, (self._argument(value.value), self._argument(value.slice)))
        if isinstance(value, ast.BinOp):
            return graph.call_function(
                _OPERATORS[type(value.op)], (self._argument(value.left), self._argument(value.right))
            )
        if isinstance(value, ast.UnaryOp) and type(value.op) in _OPERATORS:
            return graph.call_function(_OPERATORS[type(value.op)], (self._argument(value.operand),))
        if isinstance(value, ast.Compare) and len(value.ops) == 1 and type(value.ops[0]) in _OPERATORS:
            arguments = (self._argument(value.left), self._argument(value.comparators[0]))
            return graph.call_function(_OPERATORS[type(value.ops[0])], arguments)
        attribute = _own_attribute(value)
        if attribute is not None:
            return graph.create_node("get_attr", attribute)
        if not isinstance(value, ast.Call):
            return None
        args = tuple(self._argument(item) for item in value.args)
        kwargs = {item.arg: self._argument(item.value) for item in value.keywords if item.arg}
        module = _own_attribute(value.func)
        if module is not None:
            return graph.create_node("call_module", module, args, kwargs)
        base = value.func.value if isinstance(value.func, ast.Attribute) else None
        if isinstance(value.func, ast.Attribute) and isinstance(base, ast.Name) and base.id in self.nodes:
            return graph.call_method(value.func.attr, (self.nodes[base.id], *args), kwargs)
        return graph.call_function(_function(ast.unparse(value.func)), args, kwargs)

    def _argument(self, item: ast.expr | None) -> Any:
        """An argument as fx holds it; what is neither a node nor plain data stays as its text."""
        if isinstance(item, ast.Name):
            if item.id in self.nodes:
                return self.nodes[item.id]
            return {"inf": math.inf, "nan": math.nan}.get(item.id, item.id)
        if isinstance(item, ast.Constant) or item is None:
            return None if item is None or item.value is Ellipsis else item.value
        if isinstance(item, ast.Tuple):
            return tuple(self._argument(part) for part in item.elts)
        if isinstance(item, ast.List):
            return [self._argument(part) for part in item.elts]
        if isinstance(item, ast.Dict):
            keys = [self._argument(key) for key in item.keys]
            return dict(zip(keys, [self._argument(part) for part in item.values], strict=True))
        if isinstance(item, ast.UnaryOp) and isinstance(item.op, ast.USub) and isinstance(item.operand, ast.Constant):
            return -item.operand.value  # type: ignore[operator]
        text = ast.unparse(item)
        if isinstance(item, ast.Call) and text.startswith("slice("):
            return slice(*(self._argument(part) for part in item.args))
        if isinstance(item, ast.Attribute) and text.startswith("torch."):
            value = getattr(torch, text.removeprefix("torch."), None)
            if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
                return value
        return text

    def complete(self) -> None:
        """Give operators of several outputs the value that their ``getitem`` nodes show."""
        for node in self.graph.nodes:
            items = [user for user in node.users if user.target is operator.getitem and isinstance(user.args[1], int)]
            if items and "val" not in node.meta and len(items) == len(node.users):
                values = {item.args[1]: item.meta.get("val") for item in items}
                node.meta["val"] = tuple(values.get(i) for i in range(max(values) + 1))
                first = next((item for item in items if item.args[1] == 0), None)
                node.meta[DESCRIPTION] = first.meta.get(DESCRIPTION) if first is not None else None


def _named(node: fx.Node, name: str) -> fx.Node:
    if node.name != name:  # the names of a printed graph are unique; fx would make others of some
        node.name = name
    return node


def _own_attribute(value: ast.expr) -> str | None:
    """``a.b`` of ``self.a.b`` and of ``getattr(self.a, "b")``; None for anything else."""
    if isinstance(value, ast.Attribute):
        base, name = value.value, value.attr
    elif isinstance(value, ast.Call) and ast.unparse(value.func) == "getattr" and len(value.args) == 2:
        base, name = value.args[0], str(getattr(value.args[1], "value", ""))
    else:
        return None
    if isinstance(base, ast.Name) and base.id == "self":
        return name
    inner = _own_attribute(base)
    return None if inner is None else f"{inner}.{name}"


def _function(spelling: str) -> Any:
    """The operator of this name; where this torch has none (a custom operator), a function that only has the name."""
    parts = spelling.split(".")
    if parts[:2] == ["torch", "ops"]:
        found: Any = torch.ops
        try:
            for part in parts[2:]:
                found = getattr(found, part)
        except (AttributeError, RuntimeError):
            found = None
        kinds = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
        return found if isinstance(found, kinds) else _stand_in(".".join(parts[2:]))
    return _stand_in(parts[-1])


def _stand_in(name: str) -> Any:
    def operator_of_another_process(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name} is known by name only")

    operator_of_another_process.__name__ = name
    return operator_of_another_process


def _described(annotation: str) -> Description | None:
    """``f32[8, s0][s0, 1]cuda:0``, also inside the name of a tensor subclass."""
    match = _TENSOR.search(annotation)
    if match is None:
        return None
    dtype = _dtypes().get(match["dtype"])
    if dtype is None:
        return None
    stride = None if match["stride"] is None else _sizes(match["stride"])
    return Description(_sizes(match["shape"]), stride, str(dtype).removeprefix("torch."), match["device"])


def _sizes(text: str) -> tuple[int, ...]:
    # Symbolic expressions may hold commas of their own: Max(1, s0).
    parts = re.split(r",\s*(?![^()]*\))", text) if text.strip() else []
    return tuple(map(_size, parts))


def _size(text: str) -> int:
    """-1 for a symbolic size, and for one of more than 18 digits, which no tensor has."""
    return int(text) if re.fullmatch(r"\s*\d{1,18}\s*", text) else -1


def _dtypes() -> dict[str, torch.dtype]:
    from torch.utils._dtype_abbrs import dtype_abbrs

    return {abbreviation: dtype for dtype, abbreviation in dtype_abbrs.items()}


def _value(node: fx.Node, described: Description) -> torch.Tensor | None:
    """A tensor without data for a node; None for symbolic and impossible sizes. Where no strides are printed, a view
    has those that its operator gives it and anything else is taken to be contiguous.
    """
    if -1 in described.shape or -1 in (described.stride or ()):
        return None
    dtype = getattr(torch, described.dtype)
    try:
        if described.stride is not None:
            return torch.empty_strided(described.shape, described.stride, dtype=dtype, device="meta")
        contiguous = torch.empty(described.shape, dtype=dtype, device="meta")
    except (RuntimeError, TypeError, ValueError, OverflowError):  # more bytes than 64 bits count
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and (
        target.is_view or packet_name(target_name(node)) == "aten.reshape"
    ):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
        try:
            view = target(*args, **kwargs)
        except Exception:  # an argument that the text does not show in full
            view = None
        if isinstance(view, torch.Tensor) and tuple(view.shape) == described.shape:
            return view
    return contiguous
