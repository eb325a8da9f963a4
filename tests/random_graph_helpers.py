"""What the tests over random graphs share, on the CPU and on a card."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings

from fxopt import registry, rnn, testing

aten: Any = torch.ops.aten


def for_all(strategy: Any, count: int, test: Callable[[Any], None], *, shrink: bool = True) -> None:
    """Run `test` on `count` graphs, always the same ones."""
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(strategy)
    def run(graph: Any) -> None:
        test(graph)

    run()


def built_in() -> list[str]:
    """Names of the passes that fxopt itself registers."""
    points = importlib.metadata.entry_points(group=registry.ENTRY_POINT_GROUP)
    return sorted(point.name for point in points if point.dist is not None and point.dist.name == "fxopt")


def masked_attention(d: testing.Draft) -> testing.Value:
    """Attention with a constant mask: causal, all-visible, a window, a bias, or an input."""
    cuda = d.device.type == "cuda"
    length = d.choice((8, 16) if cuda else (2, 4, 5))  # on a GPU a row of a mask has to be aligned
    shape = [d.choice((1, 2)), d.choice((1, 2)), length, 8]
    q, k, v = (d.operand(shape, torch.float32) for _ in range(3))
    rows = [
        d.call(aten.clone.default, x, memory_format=torch.contiguous_format, bound=x.bound, exact=True)
        for x in (q, k, v)
    ]
    kind = d.number(5)
    values = torch.zeros(length, length)
    if kind in (0, 2):
        values = values.masked_fill(torch.ones(length, length).triu(1) > 0, -math.inf)
    if kind == 2:
        values = values.masked_fill(torch.ones(length, length).tril(-2) > 0, -math.inf)
    if kind == 3:
        values = torch.arange(length).expand(length, length) / 4
    mask = d.operand([length, length], torch.float32) if kind == 4 else d.constant(values.to(d.device), bound=1)
    if cuda:
        mask = d.call(aten.clone.default, mask, memory_format=torch.contiguous_format, bound=1, exact=True)
        bias = d.call(aten.expand.default, mask, [*shape[:3], length], bound=1, exact=True)
        target = aten._scaled_dot_product_efficient_attention.default
        output, *_ = d.calls(target, *rows, bias, False, bounds=(v.bound, 64, 64, 64))
    else:
        target = aten._scaled_dot_product_flash_attention_for_cpu.default
        output, *_ = d.calls(target, *rows, attn_mask=mask, bounds=(v.bound, 64))
    return output


def wide_product(d: testing.Draft) -> testing.Value:
    """An fp32 product with sides from 15 on, of operands that other products may have too."""
    m, k, n = (d.choice((16, 17, 24, 15) if side else (16, 17)) for side in range(3))
    batch = [2] if d.number(2) else []
    a, b = d.operand([*batch, m, k], torch.float32), d.operand([*batch, k, n], torch.float32)
    if d.number(3) == 2 and m == k:
        b = d.call(aten.permute.default, a, [*range(len(batch)), len(batch) + 1, len(batch)], bound=a.bound, exact=True)
        n = m
    bound = k * a.bound * b.bound
    if d.number(2) == 0:
        return d.call(aten.bmm.default if batch else aten.mm.default, a, b, bound=bound)
    added = d.operand(d.choice(([n], [*batch, m, n], [1])), torch.float32)
    target = aten.baddbmm.default if batch else aten.addmm.default
    return d.call(target, added, a, b, bound=bound + added.bound)


def wide_convolution(d: testing.Draft) -> testing.Value:
    """An fp32 convolution over one or two dimensions, mostly with a multiple of 16 channels."""
    rank, channels, out = 1 + d.number(2), d.choice((16, 32, 16, 15)), d.choice((2, 3, 16))
    x = d.operand([d.choice((1, 2)), channels, *(d.choice((3, 4, 5)) for _ in range(rank))], torch.float32)
    window = [1 + d.number(3) for _ in range(rank)]
    weight = d.operand([out, channels, *window], torch.float32)
    bias = d.operand([out], torch.float32) if d.number(2) else None
    fixed = ([1 + d.number(2)] * rank, [d.number(2)] * rank, [1 + d.number(2)] * rank, False, [0] * rank, 1)
    bound = channels * math.prod(window) * x.bound * weight.bound + (bias.bound if bias else 0)
    result = d.call(aten.convolution.default, x, weight, bias, *fixed, bound=bound)
    d.need(result.val.is_contiguous())  # or fake and real convolutions may choose differently
    return result


def projections(d: testing.Draft) -> list[testing.Value]:
    """Two or three linear layers with constant weights, mostly of one input."""
    rows, features = d.choice((1, 2, 3, 5)), d.choice((4, 8))
    x = d.operand([rows, features], torch.float32)
    made = []
    for _ in range(2 + d.number(2)):
        columns, source = d.choice((4, 8, 3) if d.device.type == "cuda" else (2, 3, 8)), x
        if d.number(8) == 7:
            source = d.operand([rows, features], torch.float32)
        dense = torch.rand(columns, features, generator=torch.Generator().manual_seed(d.number(100))) * 2 - 1
        weight = d.constant((dense if d.number(3) else dense.t().contiguous()).to(d.device), bound=1)
        if weight.val.shape[0] != features or (columns == features and d.number(2)):
            weight = d.call(aten.permute.default, weight, [1, 0], bound=1, exact=True)
        bound = features * source.bound
        columns = int(weight.val.shape[1])
        if d.number(2):
            bias = d.constant(torch.linspace(-1, 1, columns, device=d.device), bound=1)
            made.append(d.call(aten.addmm.default, bias, source, weight, bound=bound + 1))
        else:
            made.append(d.call(aten.mm.default, source, weight, bound=bound))
    return made


def cast_twice(d: testing.Draft) -> list[testing.Value]:
    """Two equal casts, or a cast to a wider type and back around a view."""
    cast = torch.ops.prims.convert_element_type.default
    x = d.operand(d.shape(2, 2), torch.float32)
    narrow = [d.call(cast, x, torch.bfloat16, bound=x.bound) for _ in range(2)]
    wide = d.call(cast, narrow[1], torch.float32, bound=x.bound, exact=True)
    seen = d.call(aten.permute.default, wide, [1, 0], bound=x.bound, exact=True)
    return _used(d, [*narrow, d.call(cast, seen, torch.bfloat16, bound=x.bound, exact=True)])


def copied_back(d: testing.Draft) -> list[testing.Value]:
    """A copy into another layout, and one of that into what may be the first."""
    x = d.operand(d.shape(2, 3), torch.float32)
    for _ in range(2):
        order = [*range(x.dim - 2), x.dim - 1, x.dim - 2]
        turned = d.call(aten.permute.default, x, order, bound=x.bound, exact=True)
        x = d.call(aten.clone.default, turned, bound=x.bound, exact=True, memory_format=torch.contiguous_format)
    return _used(d, [x])


def _used(d: testing.Draft, values: list[testing.Value]) -> list[testing.Value]:
    """What is computed from the values; now and then they themselves, which the graph may return."""
    if d.number(4) == 3:
        return values
    return [d.call(aten.neg.default, value, bound=value.bound, exact=True) for value in values]


def odd_product(d: testing.Draft) -> testing.Value:
    """A product in bf16 whose K or N is no multiple of eight."""
    m, k, n = d.choice((2, 3)), d.choice((3, 8, 9)), d.choice((5, 8))
    a, b = (d.operand(shape, torch.bfloat16) for shape in ([m, k], [k, n]))
    return d.call(aten.mm.default, a, b, bound=k * a.bound * b.bound)


def activated_product(d: testing.Draft) -> list[testing.Value]:
    """A 16-bit product with a bias and a relu or GELU, of which now and then the sum is read elsewhere too."""
    dtype, cast = d.choice((torch.bfloat16, torch.float16)), torch.ops.prims.convert_element_type.default
    m, k, n = (d.choice((2, 3, 8)) for _ in range(3))
    x, w, bias = d.operand([m, k], dtype), d.operand([k, n], dtype), d.operand([n], dtype)
    bound = k * x.bound * w.bound
    if d.number(3) == 2:
        y = d.call(aten.mm.default, x, w, bound=bound)
        y = d.call(aten.add.Tensor, y, bias, bound=bound + bias.bound)
    else:
        y = d.call(aten.addmm.default, bias, x, w, bound=bound + bias.bound)
    z = y if d.number(2) else d.call(aten.permute.default, y, [1, 0], bound=y.bound)
    if d.number(2):
        z = d.call(aten.relu.default, z, bound=y.bound)
    else:  # as the decomposition writes the form that the device's library computes
        z = d.call(cast, z, torch.float32, bound=z.bound)
        half = d.call(aten.mul.Tensor, z, 0.5, bound=z.bound)
        if d.device.type == "cuda":
            cube = d.call(aten.mul.Tensor, d.call(aten.mul.Tensor, z, z, bound=z.bound**2), z, bound=z.bound**3)
            sloped = d.call(aten.add.Tensor, z, d.call(aten.mul.Tensor, cube, 0.044715, bound=z.bound**3), bound=1e9)
            inner = d.call(aten.mul.Tensor, sloped, math.sqrt(2 / math.pi), bound=1e9)
            gate = d.call(aten.tanh.default, inner, bound=1)
        else:
            gate = d.call(aten.erf.default, d.call(aten.mul.Tensor, z, math.sqrt(0.5), bound=z.bound), bound=1)
        z = d.call(aten.mul.Tensor, half, d.call(aten.add.Tensor, gate, 1, bound=2), bound=z.bound)
        z = d.call(cast, z, dtype, bound=z.bound)
    return [z] if d.number(5) else [z, y]


def plane_convolution(d: testing.Draft) -> testing.Value:
    """A 2-d convolution of several channels, whose layout is a choice."""
    channels, out = d.choice((2, 3, 4, 1)), d.choice((2, 3, 1))
    x = d.operand([d.choice((1, 2)), channels, d.choice((3, 4, 5)), d.choice((3, 4, 1))], torch.float32)
    window = [1 + d.number(2), 1 + d.number(min(2, int(x.val.shape[3])))]
    weight = d.operand([out, channels, *window], torch.float32)
    bias = d.operand([out], torch.float32) if d.number(2) else None
    fixed = ([1 + d.number(2)] * 2, [d.number(2)] * 2, [1, 1], False, [0, 0], 1)
    bound = channels * window[0] * window[1] * x.bound * weight.bound + (bias.bound if bias else 0)
    result = d.call(aten.convolution.default, x, weight, bias, *fixed, bound=bound)
    d.need(result.val.is_contiguous())
    return result


def _weight(d: testing.Draft, shape: list[int]) -> testing.Value:
    """An input, contiguous where cuDNN refuses others."""
    found = d.input(shape, torch.float32)
    for _ in range(3):
        if d.device.type != "cuda" or found.val.is_contiguous():
            return found
        found = d.input(shape, torch.float32)
    d.need(found.val.is_contiguous())
    return found


def recurrent(d: testing.Draft) -> list[testing.Value]:
    """A recurrent layer, as the operator that keeps it on the library's kernels."""
    mode = d.choice(("lstm", "gru", "rnn_tanh"))
    gates, hidden = {"lstm": 4, "gru": 3, "rnn_tanh": 1}[mode], d.choice((4, 8))
    length, batch, features = d.choice((2, 3, 1)), d.choice((2, 1)), d.choice((8, 4))
    first = d.number(2) == 1
    x = d.operand([batch, length, features] if first else [length, batch, features], torch.float32)
    states = [d.operand([1, batch, hidden], torch.float32) for _ in range(2 if mode == "lstm" else 1)]
    if d.device.type == "cuda":  # cuDNN refuses states that are not contiguous
        same = {"memory_format": torch.contiguous_format, "exact": True}
        states = [d.call(aten.clone.default, state, bound=state.bound, **same) for state in states]
    shapes = [[gates * hidden, features], [gates * hidden, hidden], [gates * hidden], [gates * hidden]]
    weights = [_weight(d, shape) for shape in (shapes if d.number(2) else shapes[:2])]
    given = (x, states, weights, None, mode, len(weights) == 4, 1, False, first, "")
    return d.calls(rnn.RNN, *given, bounds=[1, *(64 if n else 1 for n in range(len(states)))])
