"""fp32 matrix products on 16-bit tensor cores: how a value is split, and the operators that multiply split values.

`split(x)` writes each row of an fp32 tensor as two planes of 16 bits and a scale: with s the power of two for which the
row's largest |x * s| lies in [2^14, 2^15), hi = fp16(x * s) and lo = fp16((x * s - hi) * 2^11). Together they hold
every element to 2^-22 of itself, and one below 2^-28 of the row's largest to 2^-49 of that. A row that cannot be held
so gets s = 0, and its planes hold the upper and lower halves of the fp32 bits: nothing is lost, and the product
computes the tiles that meet it in IEEE fp32. These are rows with a non-finite element, with a largest outside
[2^-46, 2^75), rows of mixed scale: more than one in 64 of their elements is below 2^-28 of the largest (of normally
distributed numbers one in 10^8 is; were a single one enough, each large weight would have slow tiles); and rows scaled
as a whole with less than 16 elements that are not zero, for the errors of so few products do not cancel.

The method is Ootomo and Yokota's, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32
theoretical peak performance" (2022); scaling by rows, the encoding of rows that do not fit and the choice on the device
are ours. fp16(x * s) is rounded in fp32, because Inductor takes fp32 -> fp16 -> fp32 for the identity, also where the
bits are looked at in between, and would make every lo zero.

`split_parts(x)` is the cheaper form for a looser error budget: two bf16 parts beside each other along K, so that one
product of the library, three times as long, gives a_lo b_hi + a_hi b_lo + a_hi b_hi.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxopt.torch_api.dynamo import is_frozen
from fxopt.torch_api.tracing import graph_of
from passes.kernels.launch import Tile, gemm
from passes.views import VIEWS

LOW = 2.0**11  #: what the remainder is multiplied by
_MOST, _LEAST = 2.0**75, 2.0**-46  # the range of a row's largest element
_SPREAD = 2.0**-28  # the part of a row's largest from which on an element is held to 2^-22 of itself
_FEW = 64  # one in so many elements of a row may be below that
_FEWEST = 16  # elements of a whole row that are not zero; a quarter of a row shorter than 64
_COUNTED = 2.0**15  # rows shorter than this are asked for them
#: rows up to this length are scaled as a whole, for their largest element comes with a normalisation over the row;
#: longer ones by blocks, which a pointwise producer can be split in without reading it twice
_WHOLE_ROW, _BLOCK = 1024, 128
_ONE = 0x3F800000  # the bits of 1.0
_BF16_MOST = 0x7F7F0000  # the bits of bf16's largest number


def split(x: torch.Tensor, block: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hi, lo, scale) of an fp32 tensor [..., K]: two int16 tensors [..., K] that hold fp16 bits, and fp32 [..., 1].

    block: elements along K that share a scale, K's divisor; 0: the whole row. With it everything has one dimension
    more: planes [..., K / block, block], scales [..., K / block, 1]. (Were they given back in x's shape, Inductor would
    not fuse what writes them into the kernel that finds the scales.)
    """
    if block:
        x = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    magnitude = x.abs()
    largest = magnitude.amax(-1, keepdim=True)
    there = magnitude != 0
    small = ((magnitude < largest * _SPREAD) & there).to(torch.float32)
    length = x.shape[-1]
    if counted := not block and length < _COUNTED:
        # Two counts in one reduction: small elements in the integers, those that are not zero in the fraction. Exact up
        # to 2^9 of the former, and less than that decide.
        small = small + there.to(torch.float32) * (1 / _COUNTED)
    counts = small.sum(-1, keepdim=True)
    # NaN compares false, so that a row with one is not held. Masks are integers, for a `where` with a number in it
    # makes a constant that keeps Inductor from folding the split of a frozen weight.
    fits = (largest >= _LEAST) & (largest < _MOST) & (counts.floor() * _FEW <= length)
    if counted:
        fits = fits & ((counts - counts.floor()) * _COUNTED >= min(_FEWEST, length // 4))
    held = fits.to(torch.int32)
    empty = (largest == 0).to(torch.int32)
    scale = (_rebased(largest) * held + empty * _ONE).view(torch.float32)
    y = x * scale
    # fp16(y): ten bits of mantissa; below 2^-14 a multiple of 2^-24, which is the last bit of sums from 1/2 to 1.
    rounded = ((y.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    value = torch.where(y.abs() < 2.0**-14, (y + 0.75) - 0.75, rounded)
    high = value.to(torch.float16).view(torch.int16)
    low = ((y - value) * LOW).to(torch.float16).view(torch.int16)
    raw = x.view(torch.int32)
    upper = (raw >> 16).to(torch.int16)
    # What is not zero must not become it: Inf times it is Inf.
    vanished = (((high | low) & 0x7FFF) == 0) & there
    low = torch.where(vanished, (upper & -0x8000) | 1, low)
    fits = scale != 0
    return torch.where(fits, high, upper), torch.where(fits, low, raw.to(torch.int16)), scale


def block_of(k: int) -> int:
    """How many elements of an activation's row share a scale, as `split` takes it: a block, or 0, the whole row."""
    return _BLOCK if k > _WHOLE_ROW and k % _BLOCK == 0 else 0


def _rebased(largest: torch.Tensor) -> torch.Tensor:
    """The bits of the power of two that brings a number to [2^14, 2^15): exponent 268 less its own, within int32."""
    return ((134 << 23) - (largest.view(torch.int32) & 0x7F800000)) + (134 << 23)


def joined(hi: torch.Tensor, lo: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The fp32 values that `split` wrote, in the planes' shape."""
    raw = (hi.to(torch.int32) << 16) | (lo.to(torch.int32) & 0xFFFF)
    held = hi.view(torch.float16).float() + lo.view(torch.float16).float() / LOW
    return torch.where(scale == 0, raw.view(torch.float32), held / torch.where(scale == 0, 1.0, scale))


def rounded_once(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scale) of an fp32 tensor [..., K] for one product with TF32's eleven bits: fp16 [..., K], fp32 [..., 1].

    The scale looks at finite elements alone; Inf and NaN stay what they are. An element below 2^-29 of its row's
    largest becomes a subnormal, with fewer bits, and one below 2^-40 of it zero. Rows whose largest is beyond 2^80 or
    below 2^-80 are scaled as for these, and so may overflow or vanish.
    """
    magnitude = x.abs().view(torch.int32)
    finite = (magnitude < 0x7F800000).to(torch.int32)
    # The exponent of the row's largest, within what the product's own scaling has room for.
    exponent = ((magnitude * finite).view(torch.float32).amax(-1, keepdim=True).view(torch.int32) >> 23)
    scale = ((268 - exponent.clamp_min(127 - 80).clamp_max(127 + 80)) << 23).view(torch.float32)
    return (x * scale).to(torch.float16), scale


def split_parts(x: torch.Tensor, last: int) -> torch.Tensor:
    """An fp32 tensor [..., K] as bf16 parts [..., 3K]: lo, hi, hi for the left side (`last` 0), else hi, lo, hi.

    Together the parts hold 16 bits. Only the last third carries Inf and NaN, so that they meet each other once.
    """
    bits = x.view(torch.int32)
    up = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000  # to the nearest bf16 number, ties to even
    finite = ((bits & 0x7F800000) != 0x7F800000).to(torch.int32)
    # What rounds past bf16's largest number would become Inf.
    up = torch.where((up & 0x7FFFFFFF) > _BF16_MOST, (bits & -0x80000000) | _BF16_MOST, up)
    hi = (up * finite).view(torch.float32)
    lo = ((x - hi).view(torch.int32) * finite).view(torch.float32)
    parts = [lo, hi] if last == 0 else [hi, lo]
    return torch.cat([*parts, torch.where(finite != 0, hi, x)], -1).to(torch.bfloat16)


def _traced(how: str, split: Callable[..., Sequence[torch.Tensor | None]], value: torch.Tensor) -> fx.Graph:
    """The graph of `split`, traced once for all layers of a model whose values look alike. To be copied."""
    mode = getattr(value, "fake_mode", None)
    look = (how, tuple(value.shape), value.stride(), value.dtype, value.device)
    if mode is None or not all(isinstance(size, int) for size in (*look[1], *look[2])):
        return graph_of(split, value)
    # Kept by the mode, which the graph's values refer to, and so no longer than it.
    known: dict[Any, fx.Graph] = vars(mode).setdefault("fxopt_traces", {})
    if look not in known:
        known[look] = graph_of(split, value)
    return known[look]


def parts_of(
    graph: fx.Graph, value: fx.Node, how: str, split: Callable[..., Sequence[torch.Tensor | None]] | None = None
) -> list[fx.Node | None]:
    """The parts of a node's value, computed right after it, or those that an earlier call with this `how` had computed:
    several products may read one value. A constant's are one operator's, which is run when the graph is folded, and an
    activation's are one operator's, which Inductor lowers as what `split` says: written out, they are most of a model's
    graph, and of the time that it takes to compile. split: may be left out for what ROWS and WEIGHTS name.
    """
    # A dict of this graph's own, for a copied node shares its meta's values with the one that it was copied from.
    known = value.meta["fxopt_split"] = dict(value.meta.get("fxopt_split", {}))
    names: dict[str | None, fx.Node | None] = {None: None} | {node.name: node for node in graph.nodes}
    if how in known and all(name in names for name in known[how]):
        return [names[name] for name in known[how]]
    before = value.next
    while before.op == "placeholder":
        before = before.next
    found: list[fx.Node | None]
    one: tuple[Any, int] | None = None
    if how in WEIGHTS and is_constant(value):
        one = torch.ops.fxopt.split_weight.default, WEIGHTS[how][1]
    elif how in ROWS:
        _lower_rows()
        one = torch.ops.fxopt.split_rows.default, ROWS[how][1]
    with graph.inserting_before(before):
        if one is not None:
            whole = graph.call_function(one[0], (value, how))
            found = [graph.call_function(operator.getitem, (whole, i)) for i in range(one[1])]
        else:
            traced = _traced(how, split or WEIGHTS[how][0], value.meta["val"])
            inputs = traced.find_nodes(op="placeholder")
            parts: Any = graph.graph_copy(traced, dict(zip(inputs, [value], strict=True)))
            found = list(parts)
    known[how] = [part.name if isinstance(part, fx.Node) else None for part in found]
    return found


def is_constant(node: fx.Node) -> bool:
    """Whether Inductor holds a value constant: an attribute, an input that it is about to freeze, or a view of one."""
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "get_attr" or is_frozen(node)


#: how the right operand of a product, [.., K, N], is split, and in how many parts
WEIGHTS: dict[str, tuple[Callable[[torch.Tensor], Sequence[torch.Tensor]], int]] = {
    "columns": (lambda x: split(x.mT.contiguous()), 3),
    "columns once": (lambda x: rounded_once(x.mT.contiguous()), 2),
    "columns parts": (lambda x: (split_parts(x.mT.contiguous(), 1),), 1),
}
#: how the left operand of a product, [.., M, K], is split, and in how many parts
ROWS: dict[str, tuple[Callable[[torch.Tensor], Sequence[torch.Tensor]], int]] = {
    "rows0": (lambda x: split(x.contiguous()), 3),
    f"rows{_BLOCK}": (lambda x: split(x.contiguous(), _BLOCK), 3),
    "once": (lambda x: rounded_once(x.contiguous()), 2),
    "parts": (lambda x: (split_parts(x.contiguous(), 0),), 1),
}


# ---- operators ----

torch.library.define("fxopt::split_weight", "(Tensor weight, str how) -> Tensor[]")
torch.library.define("fxopt::split_rows", "(Tensor x, str how) -> Tensor[]")


def _split_weight(weight: torch.Tensor, how: str) -> list[torch.Tensor]:
    return list(WEIGHTS[how][0](weight))


# FakeTensor asks what is registered for Meta; `register_fake` looks through all modules, for its messages.
torch.library.impl("fxopt::split_weight", ("CPU", "CUDA", "Meta"), _split_weight)


def _split_rows(x: torch.Tensor, how: str) -> list[torch.Tensor]:
    return list(ROWS[how][0](x))


def _fake_rows(x: torch.Tensor, how: str) -> list[torch.Tensor]:
    """What `split_rows` gives, but for the numbers."""
    *lead, k = x.shape
    if how == "parts":
        return [x.new_empty([*lead, 3 * k], dtype=torch.bfloat16)]
    if how == "once":
        return [x.new_empty([*lead, k], dtype=torch.float16), x.new_empty([*lead, 1])]
    block = int(how.removeprefix("rows"))
    shape = [*lead, k // block, block] if block else [*lead, k]
    return [*(x.new_empty(shape, dtype=torch.int16) for _ in range(2)), x.new_empty([*shape[:-1], 1])]


torch.library.impl("fxopt::split_rows", ("CPU", "CUDA"), _split_rows)
torch.library.impl("fxopt::split_rows", "Meta", _fake_rows)


@functools.cache
def _lower_rows() -> None:
    """Once Inductor is there: it takes as long to import as the rest of torch."""
    from fxopt.torch_api.lowering import lowers_as

    lowers_as(torch.ops.fxopt.split_rows.default, lambda value, how: _traced(how, ROWS[how][0], value))


torch.library.define(
    "fxopt::split_gemm",
    "(Tensor a_hi, Tensor a_lo, Tensor a_scale, Tensor b_hi, Tensor b_lo, Tensor b_scale, Tensor? bias, int[] tile,"
    " Tensor? counts=None, int first=0) -> Tensor",
)
#: int32 zeros for the programs of `split_gemm` to count in; they are zero again after it, so that others can go on with
#: them. Takes a tensor of the graph, for Inductor would fold what depends on nothing, and calls at the same time must
#: not share them.
torch.library.define("fxopt::zero_counts", "(Tensor like, int size) -> Tensor")
torch.library.define(
    "fxopt::scaled_gemm", "(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, int[] tile) -> Tensor"
)


def _rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A plane of the left operand as [.., M, K], where it is split in blocks along K."""
    return a.flatten(-2) if a.dim() > b.dim() else a


def _shape(a: torch.Tensor, b: torch.Tensor, tile: Sequence[int]) -> list[Any]:
    """[batch,] [shares,] M, N: fp32 sums over shares are the caller's, who can fuse them into what comes next."""
    *lead, m = a.shape[: -2 if a.dim() > b.dim() else -1]
    return [*lead, *([tile[3]] if tile[3] > 1 else []), m, b.shape[-2]]


@torch.library.impl("fxopt::split_gemm", "Meta")
def _(
    a_hi: Any, a_lo: Any, a_scale: Any, b_hi: Any, b_lo: Any, b_scale: Any, bias: Any, tile: Any, counts: Any = None,
    first: int = 0,
) -> torch.Tensor:  # fmt: skip
    return a_hi.new_empty(_shape(a_hi, b_hi, tile), dtype=torch.float32)


@torch.library.impl("fxopt::scaled_gemm", "Meta")
def _(a: Any, a_scale: Any, b: Any, b_scale: Any, bias: Any, tile: Any) -> torch.Tensor:
    return a.new_empty(_shape(a, b, tile), dtype=torch.float32)


def _reference(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, tile: Sequence[int]) -> torch.Tensor:
    """What the operators give, from values in fp32: [.., M, K] @ [.., N, K]^T, in shares along K."""
    shares, step = max(tile[3], 1), tile[2]
    steps = math.ceil(a.shape[-1] / step)
    length = math.ceil(steps / shares) * step
    parts = [a[..., i * length : (i + 1) * length] @ b[..., i * length : (i + 1) * length].mT for i in range(shares)]
    if bias is not None:
        parts[0] = parts[0] + bias
    return parts[0] if shares == 1 else torch.stack(parts, -3)


def _zero_counts(like: torch.Tensor, size: int) -> torch.Tensor:
    return like.new_zeros(size, dtype=torch.int32)


torch.library.impl("fxopt::zero_counts", ("CPU", "CUDA", "Meta"), _zero_counts)


@torch.library.impl("fxopt::split_gemm", "CPU")
def _(
    a_hi: Any, a_lo: Any, a_scale: Any, b_hi: Any, b_lo: Any, b_scale: Any, bias: Any, tile: Any, counts: Any = None,
    first: int = 0,
) -> torch.Tensor:  # fmt: skip
    return _reference(_rows(joined(a_hi, a_lo, a_scale), b_hi), joined(b_hi, b_lo, b_scale), bias, tile)


@torch.library.impl("fxopt::scaled_gemm", "CPU")
def _(a: Any, a_scale: Any, b: Any, b_scale: Any, bias: Any, tile: Any) -> torch.Tensor:
    return _reference(a.float() / a_scale, b.float() / b_scale, bias, tile)


@torch.library.impl("fxopt::split_gemm", "CUDA")
def _(
    a_hi: Any, a_lo: Any, a_scale: Any, b_hi: Any, b_lo: Any, b_scale: Any, bias: Any, tile: Any, counts: Any = None,
    first: int = 0,
) -> torch.Tensor:  # fmt: skip
    out = a_hi.new_empty(_shape(a_hi, b_hi, tile), dtype=torch.float32)
    mine = None if counts is None else counts[first:]
    gemm((a_hi, a_lo, a_scale), (b_hi, b_lo, b_scale), bias, out, tuple(tile), mine)
    return out


@torch.library.impl("fxopt::scaled_gemm", "CUDA")
def _(a: Any, a_scale: Any, b: Any, b_scale: Any, bias: Any, tile: Any) -> torch.Tensor:
    out = a.new_empty(_shape(a, b, tile), dtype=torch.float32)
    gemm((a, None, a_scale), (b, None, b_scale), bias, out, tuple(tile))
    return out


def split_mm(a: torch.Tensor, b: torch.Tensor, terms: int = 3, tile: Tile | None = None) -> torch.Tensor:
    """a [M, K] @ b [K, N] in fp32 by the method of this module (terms 3), or with TF32's bits (1), run at once."""
    from passes.kernels import tiling

    m, k, n = *a.shape, b.shape[1]
    tile = tile or tiling.choices(None).tile(tiling.Product(m, n, k, terms=terms), a.device)[0]
    if terms == 3:
        out = torch.ops.fxopt.split_gemm(*split(a), *split(b.mT.contiguous()), None, tile)
    else:
        out = torch.ops.fxopt.scaled_gemm(*rounded_once(a), *rounded_once(b.mT.contiguous()), None, tile)
    return out.sum(0) if tile[3] > 1 else out
