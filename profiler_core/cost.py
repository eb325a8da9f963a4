"""A model of what one FX node computes and moves: floating-point operations and bytes.

Everything here is *modelled* from shapes, never measured; callers must say so where they show it. The rules:

FLOPs
    - matrix products, convolutions and attention: the formulas of ``torch.utils.flop_counter`` (a multiply
      and an add are two operations; causal attention counts in full, as there), and the same formulas for
      the forms that Inductor adds on the CPU (``mkldnn._linear_pointwise``, ``mkl._mkl_linear``,
      ``mkldnn._convolution_pointwise``);
    - pointwise: 1 per output element; reductions, scans, normalisations and pooling: 1 per input element (a
      lower bound);
    - copies, gathers, fills: 0; views, ``getitem``, inputs and outputs: 0;
    - anything else (sort, top-k, recurrent cells, user kernels): ``None``, not modelled.

Bytes
    - each tensor input is read once, by the storage that it touches: an expanded dimension counts once, a
      slice only its part;
    - each output is written once; views move nothing, unless a reshape has to copy;
    - embedding, index and gather read the rows that they fetch, not the whole table;
    - in-place scatters (``index_put_`` and its kin) write as much as their source holds.
    Caches are not modelled: a value that a kernel reads twice counts once.

Symbolic sizes count by their hint, read without adding a guard; an unbacked size has none, and the node is
then not modelled.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from profiler_core.flops import GATHERS, SCATTERS_IN_PLACE, flops, is_matrix_product
from profiler_core.shapes import (
    MISSING,
    SizeUnknown,
    Spec,
    has_tensor,
    hint,
    name_of,
    operator_of,
    packet_name,
    spec_of,
    target_name,
)

__all__ = ["Cost", "group_bytes", "is_matrix_product", "node_cost", "target_name"]


@dataclass(frozen=True)
class Cost:
    """Modelled cost of one call of a node.

    Args:
        flops: floating-point operations, ``None`` where there is no formula.
        bytes_read: bytes of the inputs, each counted once; 0.0 where not modelled.
        bytes_written: bytes of the outputs; 0.0 where not modelled.
        modelled: False when a shape was missing (no ``meta["val"]``, an unbacked size): the byte counts mean
            nothing then.
    """

    flops: float | None
    bytes_read: float
    bytes_written: float
    modelled: bool = True

    @property
    def bytes(self) -> float | None:
        """Bytes read and written, ``None`` where not modelled."""
        return self.bytes_read + self.bytes_written if self.modelled else None


@dataclass(frozen=True)
class _Region:
    """Part of a buffer that a node touches: equal keys mean the same elements."""

    key: tuple[Any, ...]
    bytes: int


_NOTHING = {
    "aten.empty",
    "aten.empty_like",
    "aten.empty_permuted",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten._reshape_alias",
    "aten._unsafe_view",
}
# What they change in place is written, not read.
_OVERWRITE = {"aten.copy_", "aten.fill_", "aten.zero_", "aten.normal_", "aten.uniform_", "aten.bernoulli_"}


def node_cost(node: fx.Node) -> Cost:
    """Modelled cost of one call of ``node``, from its ``meta["val"]`` and those of its inputs."""
    if node.op != "call_function" or _is_alias(node) or not has_tensor(node.meta.get("val", MISSING)):
        return Cost(0.0, 0.0, 0.0)
    if "val" not in node.meta:
        return Cost(None, 0.0, 0.0, modelled=False)
    try:
        # A root read through two views counts once, and never for more than it holds.
        read = _sum_reads(_reads(node))
        return Cost(flops(node), float(read), float(_written(node)))
    except SizeUnknown:
        return Cost(None, 0.0, 0.0, modelled=False)


def group_bytes(nodes: Sequence[fx.Node]) -> float:
    """Modelled bytes that one kernel running ``nodes`` moves.

    Each buffer from outside is read once, by the part that the group touches; each value that something
    outside the group uses (through views or not) is written once, and so is every buffer that the group
    changes in place. What stays inside the group counts nothing. Nodes without a modelled size count
    nothing.
    """
    group = set(nodes)
    reads: list[tuple[fx.Node, _Region]] = []
    written = 0
    for node in group:
        if node.op != "call_function" or _is_alias(node) or not has_tensor(node.meta.get("val")):
            continue
        try:
            reads += [(root, region) for root, region in _reads(node) if not _made_by(root, group)]
            if _mutates(node):
                written += _written(node)
            elif isinstance(node.meta["val"], torch.Tensor):
                written += _written(node) if _escapes(node, group) else 0
            else:
                written += sum(
                    _whole(item.meta.get("val")).bytes
                    for item in node.users
                    if item.target is operator.getitem and _escapes(item, group)
                )
        except SizeUnknown:
            continue
    return float(_sum_reads(reads) + written)


# --- bytes -------------------------------------------------------------------------------------------------


def _reads(node: fx.Node) -> Iterator[tuple[fx.Node, _Region]]:
    """(buffer, part) pairs that the node reads, the buffer being what lies under any views."""
    name = packet_name(target_name(node))
    gathered = node.args[0] if name in GATHERS and node.args else None
    skipped: set[Any] = set()
    if name in SCATTERS_IN_PLACE or name in _OVERWRITE:
        skipped.add(node.args[0])  # written, not read
    if name == "mkl._mkl_linear":
        skipped.add(node.args[1])  # the packed weight: opaque, and as large as the plain one that follows it
    opaque = name.split(".")[0] in ("mkldnn", "mkl", "onednn")
    for source in node.all_input_nodes:
        value = source.meta.get("val", MISSING)
        if source in skipped or not has_tensor(value) or (value is MISSING and source.op == "get_attr"):
            continue  # a get_attr without a value is a subgraph
        if value is MISSING:
            raise SizeUnknown
        root = _root(source)
        if source is gathered:
            out, table = _whole(node.meta["val"]), _whole(value)
            yield root, _Region(("gather", node.name), min(out.bytes, table.bytes))
        elif isinstance(value, torch.Tensor):
            # Packed weights carry strides of no meaning (1, 0, ...): they are read in full.
            yield root, (_whole(value) if opaque else _region(spec_of(value)))
        else:
            yield root, _whole(value)


def _sum_reads(reads: Iterable[tuple[fx.Node, _Region]]) -> int:
    """Bytes of distinct parts, summed per buffer and bounded by what the buffer holds."""
    parts: dict[fx.Node, dict[tuple[Any, ...], int]] = {}
    for root, region in reads:
        parts.setdefault(root, {})[region.key] = region.bytes
    total = 0
    for root, regions in parts.items():
        touched = sum(regions.values())
        if len(regions) > 1:
            touched = min(touched, max(_whole(root.meta.get("val")).bytes, max(regions.values())))
        total += touched
    return total


def _written(node: fx.Node) -> int:
    source = SCATTERS_IN_PLACE.get(packet_name(target_name(node)))
    whole = _whole(node.meta["val"]).bytes
    if source is None or source >= len(node.args):
        return whole
    value = node.args[source]
    if not isinstance(value, fx.Node):
        return whole
    return min(whole, _whole(value.meta.get("val")).bytes)


def _whole(value: Any) -> _Region:
    """All elements of a value, tuples summed."""
    if isinstance(value, (tuple, list)):
        return _Region(("whole",), sum(_whole(item).bytes for item in value))
    if not isinstance(value, torch.Tensor):
        return _Region(("whole",), 0)
    shape = tuple(hint(size) for size in value.shape)
    return _Region(("whole",), prod(shape) * value.dtype.itemsize)


def _region(spec: Spec) -> _Region:
    """The elements that a view touches; dimensions merge, so that reshapes and permutations agree."""
    if spec.numel == 0:
        return _Region((), 0)
    dims = sorted(
        (st, size) for size, st in zip(spec.shape, spec.stride, strict=True) if size > 1 and st != 0
    )
    merged: list[tuple[int, int]] = []
    for st, size in dims:
        if merged and st == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((st, size))
    span = 1 + sum(st * (size - 1) for st, size in merged)
    touched = min(prod(size for _, size in merged), span)  # overlapping windows touch no more than their span
    return _Region((spec.offset, *merged), touched * spec.itemsize)


# --- aliases -----------------------------------------------------------------------------------------------


def _is_alias(node: fx.Node) -> bool:
    """Whether the node's value is another name for an input's memory, so that it runs no kernel."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    name = packet_name(name_of(node.target))
    if name in _NOTHING:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if name == "aten.reshape":
        return _views(node)
    if name == "prims.inductor_force_stride_order":
        return _same_strides(node)
    # squeeze_ and its kin change sizes and strides in place, and no element.
    return node.target.is_view or torch.Tag.inplace_view in node.target.tags


def _views(node: fx.Node) -> bool:
    """Whether a reshape can be a view of its input. Inductor spells every view as a reshape late in its
    passes.
    """
    source = node.args[0]
    try:
        spec = spec_of(source.meta.get("val"))  # type: ignore[union-attr]
        shape = tuple(hint(size) for size in node.meta["val"].shape)
    except (SizeUnknown, AttributeError, KeyError):
        return True
    try:
        torch.empty_strided(spec.shape, spec.stride, device="meta").view(shape)
    except RuntimeError:
        return False
    return True


def _same_strides(node: fx.Node) -> bool:
    source = node.args[0]
    try:
        before, after = spec_of(source.meta["val"]), spec_of(node.meta["val"])  # type: ignore[union-attr]
        return _steps(before) == _steps(after)
    except (SizeUnknown, AttributeError, KeyError):
        return True


def _steps(spec: Spec) -> list[tuple[int, int]]:
    return [(size, step) for size, step in zip(spec.shape, spec.stride, strict=True) if size > 1]


def _root(node: fx.Node) -> fx.Node:
    """The node that made the memory under any chain of views; of a multi-output operator, its ``getitem``."""
    while _is_alias(node) and node.args and isinstance(node.args[0], fx.Node):
        if node.target is operator.getitem and not _is_alias(node.args[0]):
            return node
        node = node.args[0]
    return node


def _made_by(root: fx.Node, group: set[fx.Node]) -> bool:
    return (root.args[0] if root.target is operator.getitem else root) in group


def _escapes(node: fx.Node, group: set[fx.Node]) -> bool:
    """Whether anything outside the group computes with the node's memory, directly or through views."""
    pending, seen = list(node.users), set()
    while pending:
        user = pending.pop()
        if user in seen:
            continue
        seen.add(user)
        if _is_alias(user):
            pending.extend(user.users)
        elif user not in group:
            return True
    return False


def _mutates(node: fx.Node) -> bool:
    target = operator_of(node.target)[0]
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
