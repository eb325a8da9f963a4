"""The fake values of a graph, recomputed after a rewrite without adding a guard of its own.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import _should_save_eager_input_vals, snapshot_fake
from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings, rebind_unbacked, statically_known_true

__all__ = ["CannotEvaluate", "equal", "equal_metadata", "fake_mode", "fill", "recompute"]

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class CannotEvaluate(RuntimeError):
    """An operator does not accept the fake values of its arguments. `node` is the node that calls it."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(why)
        self.node = node


def fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode of the graph's fake values, None for a graph without."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return None


def fill(graph: fx.Graph, new: Iterable[fx.Node]) -> None:
    """Give `meta["val"]` to nodes that a pass has just made, in the graph's order, for its next rewrite to see.

    One that cannot be evaluated, as yet, goes without. Does nothing for a graph without fake values.
    """
    mode = fake_mode(graph)
    if mode is None:
        return
    for node in new:
        with contextlib.suppress(CannotEvaluate, AttributeError):
            if node.op == "get_attr":
                _attribute(node, None, mode)
            else:
                known = {source: _known(source) for source in node.all_input_nodes}
                _evaluate(node, known, mode)
                _demand_strides(node, known)


def _demand_strides(node: fx.Node, known: dict[fx.Node, Any]) -> None:
    """Make Inductor hand `node`'s operator its arguments in the strides that they have in the graph.

    Tracing notes them for each operator that needs exact strides, which is every custom one that says nothing else.
    Where the note is missing, Inductor lays the arguments out as suits it (a convolution's neighbours in channels-last,
    say), and an operator that takes them for contiguous computes nonsense.
    """
    if "eager_input_vals" not in node.meta and _should_save_eager_input_vals(node.target):
        node.meta["eager_input_vals"] = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)


def _known(node: fx.Node) -> Any:
    """A node's value, or the module that it stands for."""
    if node.op == "get_attr" and "val" not in node.meta and node.graph.owning_module is not None:
        return operator.attrgetter(str(node.target))(node.graph.owning_module)
    return node.meta.get("val")


def recompute(before: fx.Graph, after: fx.Graph) -> None:
    """Set `meta["val"]` throughout `after`, a rewritten copy of `before`, whatever a pass has put there.

    Nodes of `before` whose call and whose arguments' values are as they were keep the value they had; so an operator
    that cannot be evaluated by itself is none of a pass's business that does not touch it. The others are evaluated on
    fake tensors. Does nothing for a graph without fake values. Raises CannotEvaluate.
    """
    mode = fake_mode(before)
    if mode is None:
        return
    old = {node.name: node for node in before.nodes}
    kept: set[fx.Node] = set()  # nodes with the value that they had
    values: dict[fx.Node, Any] = {}
    for node in after.nodes:
        twin = old.get(node.name)
        if node.op == "output":
            continue
        if node.op == "get_attr":
            values[node] = _attribute(node, twin, mode)
        elif twin is not None and _same_call(node, twin) and all(n in kept for n in node.all_input_nodes):
            values[node] = twin.meta.get("val")
            _set(node, {key: twin.meta[key] for key in ("val", "tensor_meta", "unbacked_bindings") if key in twin.meta})
        else:
            values[node] = _evaluate(node, values, mode)
        if twin is not None and equal_metadata(values[node], twin.meta.get("val", values[node])):
            kept.add(node)


def _same_call(node: fx.Node, twin: fx.Node) -> bool:
    def spelled(n: fx.Node) -> str:
        return str(fx.node.map_arg((n.args, n.kwargs), lambda argument: f"%{argument.name}"))

    return node.op == twin.op and node.target == twin.target and spelled(node) == spelled(twin)


def _attribute(node: fx.Node, twin: fx.Node | None, mode: FakeTensorMode) -> Any:
    given = (node if twin is None or twin.target != node.target else twin).meta.get("val")
    module = node.graph.owning_module
    held = given if module is None else operator.attrgetter(str(node.target))(module)
    if not isinstance(held, torch.Tensor):
        return held  # the body of a higher-order operator
    # A packed tensor is opaque: only the value that it was given says what it stands for.
    known = isinstance(held, FakeTensor) or held.is_mkldnn
    known = known or (isinstance(given, FakeTensor) and equal_metadata(given, held))
    value = given if known else mode.from_tensor(held, static_shapes=True)
    if value is not None:
        node.meta["val"] = value
    return value


def _evaluate(node: fx.Node, values: dict[fx.Node, Any], mode: FakeTensorMode) -> Any:
    writes = getattr(getattr(node.target, "_schema", None), "is_mutable", False)

    def argument(source: fx.Node) -> Any:
        def fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                value = mode.from_tensor(value, static_shapes=True)
            # What an operator does to the shape of a tensor in place must not reach the graph's own value.
            return snapshot_fake(value) if writes and isinstance(value, FakeTensor) else value

        return pytree.tree_map(fake, values[source])

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), argument)
    env = mode.shape_env
    pending = list(env.pending_fresh_unbacked_symbols) if env is not None else []
    try:
        with mode, enable_python_dispatcher():
            result = _call(node, args, kwargs)
        if env is not None:
            rebind_unbacked(env, node, result)
            bindings = compute_unbacked_bindings(env, result)
    except Exception as error:
        if env is not None:
            env.pending_fresh_unbacked_symbols[:] = pending
        raise CannotEvaluate(node, f"{type(error).__name__}: {error}") from error
    found: dict[str, Any] = {}
    if result is not None:
        found["val"] = pytree.tree_map_only(FakeTensor, snapshot_fake, result)
    if env is not None and (bindings or "unbacked_bindings" in node.meta):
        found["unbacked_bindings"] = bindings or node.meta["unbacked_bindings"]
    _set(node, found)
    return result


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_function":
        target: Any = node.target
        return target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_module" and node.graph.owning_module is not None:
        return node.graph.owning_module.get_submodule(str(node.target))(*args, **kwargs)
    raise RuntimeError(f"a new {node.op} has no value")


def _set(node: fx.Node, found: dict[str, Any]) -> None:
    for key in ("val", "tensor_meta", "unbacked_bindings"):
        node.meta.pop(key, None)
    node.meta.update(found)


def equal(a: Any, b: Any) -> bool:
    """Whether two sizes or numbers are known to be equal; symbols are compared without a guard."""
    if isinstance(a, _SYMBOLS) or isinstance(b, _SYMBOLS):
        return isinstance(b, (*_SYMBOLS, int, float, bool)) and statically_known_true(a == b)
    return type(a) is type(b) and a == b


def equal_metadata(a: Any, b: Any) -> bool:
    """Whether two values have the same type, and tensors among them shape, strides, offset, dtype and device."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.device, a.layout, a.dim()) != (b.dtype, b.device, b.layout, b.dim()):
            return False
        if not all(map(equal, a.shape, b.shape)):
            return False
        strided = a.layout == torch.strided and not a.is_mkldnn
        return not strided or all(map(equal, (*a.stride(), a.storage_offset()), (*b.stride(), b.storage_offset())))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal_metadata, a, b))
    return equal(a, b)
