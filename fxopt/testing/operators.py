"""Builders of operators, by family, as they appear in the graphs that Inductor hands to a pass.

Inductor has decomposed by then: softmax, dropout and normalisation appear as what they consist of. Whatever depends on
a comparison, an index or a rounding to integers takes exact values only (see `drafting.Value`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxopt.testing.drafting import DIMS, Draft, Value
from fxopt.testing.printing import is_contiguous

__all__ = ["FAMILIES", "Builder"]

Builder = Callable[[Draft], "Value | Sequence[Value] | None"]

aten: Any = torch.ops.aten
_CAST: Any = torch.ops.prims.convert_element_type.default
_IOTA: Any = torch.ops.prims.iota.default
_SYMBOLIC = 16  # no symbolic size is larger in the inputs that a graph is run on
_SCALARS = (1, 2, 0.5, -1, -0.25, 1.5)  # all of them exact in every dtype


def _extent(value: Value, dims: Sequence[int]) -> int:
    count = 1
    for dim in dims:
        size = value.val.shape[dim]
        count *= size if isinstance(size, int) else _SYMBOLIC
    return max(count, 1)


def _numeric(value: Value) -> bool:
    return value.dtype != torch.bool


def _broadcasts(a: Value, b: Value) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(x == y or x == 1 or y == 1 for x, y in pairs)


def _second(d: Draft, a: Value, suits: Callable[[Value], bool]) -> Value:
    """An operand that broadcasts with `a`: a value that is there, or an input with some of its dimensions."""
    if d.number(3) < 2:
        return d.pick(lambda b: suits(b) and _broadcasts(a, b))
    kept = a.val.shape[d.number(a.dim + 1) :]
    return d.input([size if d.number(4) else 1 for size in kept], a.dtype if a.floating else d.dtype())


# ---------------------------------------------------------------- pointwise

_UNARY: tuple[tuple[Any, float, bool], ...] = (  # operator, bound (0: the operand's own), exact
    (aten.neg.default, 0, True),
    (aten.relu.default, 0, True),
    (aten.tanh.default, 1, False),
    (aten.abs.default, 0, True),
    (aten.sigmoid.default, 1, False),
    (aten.erf.default, 1, False),
    (aten.sin.default, 1, False),
    (aten.cos.default, 1, False),
)


def unary(d: Draft) -> Value:
    kind = d.number(len(_UNARY) + 3)
    if kind < len(_UNARY):
        target, bound, exact = _UNARY[kind]
        value = d.floating()
        return d.call(target, value, bound=bound or value.bound, exact=exact)
    if kind == len(_UNARY):
        value = d.floating(lambda v: v.bound <= 4)
        return d.call(aten.exp.default, value, bound=2.72**value.bound)
    if kind == len(_UNARY) + 1:
        value = d.floating()
        squared = d.call(aten.mul.Tensor, value, value, bound=value.bound**2)
        return d.call(aten.rsqrt.default, d.call(aten.add.Tensor, squared, 1, bound=squared.bound + 1), bound=1)
    value = d.pick(lambda v: not v.floating)
    target = aten.logical_not.default if value.dtype == torch.bool else aten.neg.default
    return d.call(target, value, bound=value.bound, exact=True)


def binary(d: Draft) -> Value:
    target = d.choice((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default, aten.div.Tensor))
    a = d.pick(_numeric)
    extreme = target in (aten.maximum.default,)
    if d.number(3) == 1 and not extreme:
        scalar = d.choice(_SCALARS)
        d.need(a.floating or isinstance(scalar, int) or target is aten.div.Tensor)
        bound = a.bound + abs(scalar) if target in (aten.add.Tensor, aten.sub.Tensor) else a.bound * abs(scalar)
        if target is aten.div.Tensor:
            bound = a.bound / abs(scalar)
        # Multiplying by 1.5 rounds; int64 + int is exact.
        return d.call(target, a, scalar, bound=bound, exact=not a.floating and target is not aten.div.Tensor)
    b = _second(d, a, _numeric)
    if target is aten.div.Tensor:
        d.need(b.floating)
        squared = d.call(aten.mul.Tensor, b, b, bound=b.bound**2)
        b = d.call(aten.add.Tensor, squared, 1, bound=squared.bound + 1)
        return d.call(target, a, b, bound=a.bound)
    if extreme:
        d.need(a.dtype == b.dtype)
        target = d.choice((target, aten.minimum.default))
        return d.call(target, a, b, bound=max(a.bound, b.bound), exact=True)
    integers = not (a.floating or b.floating)
    if target is aten.mul.Tensor:
        return d.call(target, a, b, bound=a.bound * b.bound, exact=integers)
    if d.number(4) == 3:
        return d.call(target, a, b, alpha=2, bound=a.bound + 2 * b.bound, exact=integers)
    return d.call(target, a, b, bound=a.bound + b.bound, exact=integers)


def comparison(d: Draft) -> Value:
    if d.number(4) == 3:
        a = d.pick(lambda v: v.dtype == torch.bool)
        b = d.pick(lambda v: v.dtype == torch.bool and _broadcasts(a, v))
        return d.call(d.choice((aten.bitwise_and.Tensor, aten.bitwise_or.Tensor)), a, b, bound=1, exact=True)
    a = d.pick(lambda v: v.exact and _numeric(v))
    if d.number(2):
        b = d.pick(lambda v: v.exact and v.dtype == a.dtype and _broadcasts(a, v))
        return d.call(d.choice((aten.lt.Tensor, aten.ge.Tensor, aten.eq.Tensor)), a, b, bound=1, exact=True)
    scalar = d.choice((0, 0.5, -0.25) if a.floating else (0, 1, 3))
    return d.call(d.choice((aten.gt.Scalar, aten.le.Scalar, aten.ne.Scalar)), a, scalar, bound=1, exact=True)


def _full(d: Draft, shape: Sequence[Any], number: float, dtype: torch.dtype) -> Value:
    fixed: dict[str, Any] = {"layout": torch.strided, "device": d.device, "pin_memory": False}
    return d.call(aten.full.default, list(shape), number, dtype=dtype, bound=abs(number), exact=True, **fixed)


def where(d: Draft) -> Value:
    a = d.floating()
    if d.number(3) == 2:
        bound = d.choice((0, -0.5, 1))
        target = d.choice((aten.clamp_min.default, aten.clamp_max.default))
        return d.call(target, a, bound, bound=max(a.bound, abs(bound)), exact=True)
    mask = d.operand(a.val.shape, torch.bool)
    if d.number(2):
        b = d.pick(lambda v: v.dtype == a.dtype and _broadcasts(a, v))
    else:
        b = _full(d, [], d.choice((0.0, 1.0, -0.5)), a.dtype)
    args = (mask, a, b) if d.number(2) == 0 else (mask, b, a)
    return d.call(aten.where.self, *args, bound=max(a.bound, b.bound), exact=True)


# ---------------------------------------------------------------- reductions


def reduction(d: Draft) -> Value:
    value = d.pick(lambda v: v.dim >= 1)
    dims = [d.number(value.dim)] if d.number(4) < 3 else list(range(value.dim))
    keep, count = d.number(2) == 0, _extent(value, dims)
    if value.dtype == torch.bool:
        if d.number(2):
            return d.call(aten.any.dim, value, dims[0], keep, bound=1, exact=True)
        return d.call(aten.sum.dim_IntList, value, dims, keep, bound=count, exact=True, high=count + 1)
    kind = d.number(6)
    if kind == 0:
        return d.call(aten.sum.dim_IntList, value, dims, keep, bound=value.bound * count, exact=not value.floating)
    if kind == 1 and value.floating:
        return d.call(aten.mean.dim, value, dims, keep, bound=value.bound)
    if kind == 2 and value.floating:
        variance, mean = d.calls(
            aten.var_mean.correction, value, dims, correction=0, keepdim=keep, bounds=(value.bound**2, value.bound)
        )
        return d.call(aten.add.Tensor, variance, mean, bound=variance.bound + mean.bound)
    if kind == 3 and value.exact and len(dims) == 1 and isinstance(value.val.shape[dims[0]], int):
        high = int(value.val.shape[dims[0]])
        return d.call(aten.argmax.default, value, dims[0], keep, bound=high, exact=True, high=high)
    if kind == 4 and value.floating:
        return d.call(aten.cumsum.default, value, dims[0], bound=value.bound * _extent(value, dims[:1]))
    target = d.choice((aten.amax.default, aten.amin.default))
    return d.call(target, value, dims, keep, bound=value.bound, exact=True)


def normalisation(d: Draft) -> Value:
    """softmax, or layer normalisation, over the last dimension."""
    value = d.floating(lambda v: v.dim >= 1)
    dims, count = [value.dim - 1], _extent(value, [value.dim - 1])
    if d.number(2) == 0:
        largest = d.call(aten.amax.default, value, dims, True, bound=value.bound, exact=True)
        below = d.call(aten.sub.Tensor, value, largest, bound=min(2 * value.bound, 64))
        exponent = d.call(aten.exp.default, below, bound=1)
        total = d.call(aten.sum.dim_IntList, exponent, dims, True, bound=count)
        return d.call(aten.div.Tensor, exponent, total, bound=1)
    variance, mean = d.calls(
        aten.var_mean.correction, value, dims, correction=0, keepdim=True, bounds=(value.bound**2, value.bound)
    )
    # Were it 1e-5, rows of nearly equal values would amplify rounding errors three hundred times.
    steady = d.call(aten.add.Tensor, variance, 0.0625, bound=64)
    scale = d.call(aten.rsqrt.default, steady, bound=4)
    centred = d.call(aten.sub.Tensor, value, mean, bound=min(2 * value.bound, 64))
    return d.call(aten.mul.Tensor, centred, scale, bound=min(float(count) ** 0.5, 8 * value.bound))


# ---------------------------------------------------------------- products


def _transposed(d: Draft, value: Value) -> Value:
    order = [*range(value.dim - 2), value.dim - 1, value.dim - 2]
    return d.call(aten.permute.default, value, order, bound=value.bound, exact=True)


def _matrix(d: Draft, shape: Sequence[Any], dtype: torch.dtype) -> Value:
    """An operand of that shape, now and then the transpose of one."""
    if d.number(3) == 2:
        return _transposed(d, d.operand([*shape[:-2], shape[-1], shape[-2]], dtype))
    return d.operand(shape, dtype)


def matmul(d: Draft) -> Value:
    rank = 2 + d.number(2)
    fitting = [v for v in reversed(d.values) if v.floating and v.dim == rank]
    index = d.number(len(fitting) + 1)
    a = fitting[index] if index < len(fitting) else d.input(d.shape(rank, rank), d.dtype())
    *batch, m, k = a.val.shape
    n = d.choice(DIMS)
    b = _matrix(d, [*batch, k, n], a.dtype)
    bound = _extent(a, [a.dim - 1]) * a.bound * b.bound
    if d.number(2) == 0:
        return d.call(aten.mm.default if rank == 2 else aten.bmm.default, a, b, bound=bound)
    if rank == 2:
        bias, target = d.operand([n] if d.number(3) < 2 else [m, n], a.dtype), aten.addmm.default
    else:
        bias, target = d.operand([*batch, m, n], a.dtype), aten.baddbmm.default
    if d.number(4) == 3:
        return d.call(target, bias, a, b, beta=0.5, alpha=2, bound=2 * bound + bias.bound)
    return d.call(target, bias, a, b, bound=bound + bias.bound)


def convolution(d: Draft) -> Value:
    rank = 1 + d.number(2)
    suits = lambda v: v.floating and v.dim == rank + 2 and v.static  # noqa: E731
    fitting = [v for v in reversed(d.values) if suits(v)]
    index = d.number(len(fitting) + 1)
    x = fitting[index] if index < len(fitting) else d.input([d.choice(DIMS[:4]) for _ in range(rank + 2)], d.dtype())
    channels, *sizes = (int(size) for size in x.val.shape[1:])
    groups = channels if d.number(3) == 2 else 1
    out = groups * d.choice((1, 2))
    kernel = [1 + d.number(min(3, size)) for size in sizes]
    weight = d.operand([out, channels // groups, *kernel], x.dtype)
    bias = d.operand([out], x.dtype) if d.number(2) else None
    stride, padding = [1 + d.number(2)] * rank, [d.number(2)] * rank
    bound = channels // groups * torch.Size(kernel).numel() * x.bound * weight.bound + (bias.bound if bias else 0)
    fixed = ([1] * rank, False, [0] * rank, groups)
    result = d.call(aten.convolution.default, x, weight, bias, stride, padding, *fixed, bound=bound)
    # Where a size of 1 makes two layouts the same, fake and real convolutions choose differently.
    d.need(is_contiguous(result.val))
    return result


def _rows_together(d: Draft, value: Value) -> Value:
    """Fused attention reads the last dimension as if its elements were neighbours, and does not check; on a GPU each
    row has to be aligned, too, which new memory is.
    """
    if value.val.stride(-1) == 1 and d.device.type != "cuda":
        return value
    return d.call(aten.clone.default, value, memory_format=torch.contiguous_format, bound=value.bound, exact=True)


def attention(d: Draft) -> Value:
    """The fused attention that torch picks on the device at hand."""
    shape = [d.choice((1, 2)), d.choice((1, 2)), d.choice((2, 4, 5)), 8]
    dtype = d.dtype()
    d.need(dtype != torch.float64)
    q, k, v = (_rows_together(d, d.operand(shape, dtype)) for _ in range(3))
    causal = d.number(2) == 1
    if d.device.type == "cuda":
        target = aten._scaled_dot_product_efficient_attention.default
        output, *_ = d.calls(target, q, k, v, None, False, 0.0, causal, bounds=(v.bound, 64, 64, 64))
    else:
        target = aten._scaled_dot_product_flash_attention_for_cpu.default
        output, *_ = d.calls(target, q, k, v, 0.0, causal, bounds=(v.bound, 64))
    return output


# ---------------------------------------------------------------- shapes and layouts


def view(d: Draft) -> Value | Sequence[Value]:
    value = d.pick(lambda v: v.dim >= 1)
    keep: dict[str, Any] = {"bound": value.bound, "exact": True, "high": value.high}
    sizes, dim = value.val.shape, d.number(value.dim)
    size = sizes[dim]
    kind = d.number(8)
    if kind == 0:
        order = list(d.draw(_permutations(value.dim)))
        return d.call(aten.permute.default, value, order, **keep)
    if kind == 1:
        return d.call(aten.unsqueeze.default, value, d.number(value.dim + 1), **keep)
    if kind == 2:
        d.need(is_contiguous(value.val))
        return d.call(aten.view.default, value, [-1], **keep)
    if kind == 3:
        leading = [d.choice((2, 3))] if d.number(2) else []
        shape = [d.size(value, i) if s != 1 else d.choice((1, 2, 4)) for i, s in enumerate(value.shape)]
        return d.call(aten.expand.default, value, [*leading, *shape], **keep)
    d.need(isinstance(size, int))
    if kind == 4:
        return d.call(aten.select.int, value, dim, d.number(size), **keep)
    if kind == 5:
        start = d.number(size)
        end, step = start + 1 + d.number(size - start), 1 + d.number(2)
        return d.call(aten.slice.Tensor, value, dim, start, end, *([step] if step > 1 else []), **keep)
    if kind == 6:
        if size == 1:
            return d.call(aten.squeeze.dim, value, dim, **keep)
        d.need(size % 2 == 0 and is_contiguous(value.val))
        shape = [d.size(value, i) for i in range(value.dim)]
        return d.call(aten.view.default, value, [*shape[:dim], size // 2, 2, *shape[dim + 1 :]], **keep)
    d.need(size > 1)
    first = 1 + d.number(size - 1)
    return d.calls(
        aten.split_with_sizes.default, value, [first, size - first], dim, bounds=(value.bound,) * 2, exact=True
    )


def _permutations(dim: int) -> Any:
    from hypothesis import strategies as st

    return st.permutations(list(reversed(range(dim))))


def join(d: Draft) -> Value:
    value = d.floating(lambda v: v.dim >= 1)
    dim = d.number(value.dim)
    size = value.val.shape[dim]
    kind = d.number(4)
    if kind < 2:
        others = [d.operand(value.val.shape, value.dtype) for _ in range(1 + d.number(2))]
        bound = max(v.bound for v in (value, *others))
        return d.call(aten.cat.default, [value, *others], *([dim] if dim else []), bound=bound, exact=True)
    if kind == 2:
        d.need(value.static)
        padding = [d.number(2), d.number(3)]
        number = d.choice((0.0, 1.0))
        return d.call(aten.constant_pad_nd.default, value, padding, number, bound=max(value.bound, number), exact=True)
    d.need(isinstance(size, int) and size > 1)
    end = 1 + d.number(size - 1)
    source = d.operand([end if i == dim else s for i, s in enumerate(value.val.shape)], value.dtype)
    bound = max(value.bound, source.bound)
    return d.call(aten.slice_scatter.default, value, source, dim, 0, end, bound=bound, exact=True)


def copy(d: Draft) -> Value:
    value = d.pick()
    formats = [torch.contiguous_format, torch.preserve_format, *([torch.channels_last] if value.dim == 4 else [])]
    chosen = d.choice(formats)
    return d.call(aten.clone.default, value, memory_format=chosen, bound=value.bound, exact=True, high=value.high)


def cast(d: Draft) -> Value:
    value = d.pick()
    targets: list[torch.dtype] = [torch.bfloat16, torch.float32, torch.float64]
    if value.exact and value.dtype != torch.bool:
        targets.append(torch.int64)
    dtype = d.choice([target for target in targets if target != value.dtype])
    if not dtype.is_floating_point:
        return d.call(_CAST, value, dtype, bound=value.bound, exact=True)
    digits = 1 / torch.finfo(dtype).eps
    narrower = value.floating and torch.finfo(dtype).eps > torch.finfo(value.dtype).eps
    exact = not narrower and (value.floating or value.bound <= digits)
    return d.call(_CAST, value, dtype, bound=value.bound, exact=exact)


# ---------------------------------------------------------------- indices


def indexing(d: Draft) -> Value:
    kind = d.number(4)
    if kind == 0:
        table = d.floating(lambda v: v.dim == 2 and isinstance(v.val.shape[0], int))
        index = d.index(int(table.val.shape[0]), d.shape(1, 2))
        return d.call(aten.embedding.default, table, index, bound=table.bound, exact=True)
    value = d.floating(lambda v: v.dim >= 1)
    dim = d.number(value.dim)
    size = value.val.shape[dim]
    d.need(isinstance(size, int))
    if kind == 1:
        index = d.index(size, d.shape(1, 1))
        where_ = [*([None] * dim), index]
        return d.call(aten.index.Tensor, value, where_, bound=value.bound, exact=True)
    index = d.index(size, value.val.shape)
    if kind == 2:
        return d.call(aten.gather.default, value, dim, index, bound=value.bound, exact=True)
    if d.number(2):
        number = d.choice((0.0, 1.0))
        return d.call(aten.scatter.value, value, dim, index, number, bound=max(value.bound, number), exact=True)
    source = d.operand(value.val.shape, value.dtype)
    return d.call(aten.scatter_add.default, value, dim, index, source, bound=value.bound + size * source.bound)


# ---------------------------------------------------------------- random numbers, factories


def random(d: Draft) -> Value:
    fixed: dict[str, Any] = {"device": d.device, "pin_memory": False}
    kind = d.number(4)
    if kind < 2:  # dropout
        value = d.floating()
        shape = [d.size(value, i) for i in range(value.dim)]
        drawn = d.call(aten.rand.default, shape, dtype=value.dtype, bound=1, exact=True, **fixed)
        kept = d.call(aten.gt.Scalar, drawn, 0.5, bound=1, exact=True)
        masked = d.call(aten.mul.Tensor, kept, value, bound=value.bound, exact=True)
        return d.call(aten.mul.Tensor, masked, 2.0, bound=2 * value.bound, exact=True)
    shape = d.spelt(d.shape(1, 3))
    if kind == 2:
        return d.call(aten.randn.default, shape, dtype=torch.float32, bound=6, exact=True, **fixed)
    return d.call(aten.randint.low, 0, 5, shape, dtype=torch.int64, bound=5, exact=True, high=5, **fixed)


def factory(d: Draft) -> Value:
    if d.number(2):
        count = d.choice(DIMS)
        fixed = {"start": 0, "step": 1, "dtype": torch.int64, "device": d.device, "requires_grad": False}
        return d.call(_IOTA, count, bound=count, exact=True, high=count, **fixed)
    return _full(d, d.spelt(d.shape()), d.choice((0.0, 1.0, 0.5)), d.dtype())


def constant(d: Draft) -> Value:
    shape = [d.choice(DIMS) for _ in range(d.number(3))]
    generator = torch.Generator().manual_seed(d.number(100))
    values = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    return d.constant(values.to(d.device, d.dtype()), bound=1)


FAMILIES: dict[str, Builder] = {
    "unary": unary,
    "binary": binary,
    "comparison": comparison,
    "where": where,
    "reduction": reduction,
    "normalisation": normalisation,
    "matmul": matmul,
    "convolution": convolution,
    "attention": attention,
    "view": view,
    "join": join,
    "copy": copy,
    "cast": cast,
    "indexing": indexing,
    "random": random,
    "factory": factory,
    "constant": constant,
}
"""Families of operators by name, the simplest first."""
