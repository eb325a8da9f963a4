"""The split attention kernel, interpreted on the CPU: its numbers, what it does with what cannot be split, and layouts.

TRITON_INTERPRET counts when Triton is imported, so a process of its own runs the kernels.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from triton_checks import agrees

import passes.split_precision_attention  # noqa: F401 (registers the operator)
from passes.split_products import joined, split

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, whose interpreter runs the kernels on the CPU"
)


def interpreted(q: Any, k: Any, v: Any, bias: Any, scale: float, causal: bool, tiles: Any, at_once: int) -> Any:
    """Runs in the other process. Arrays in and out. tiles "split": as planes and scales. at_once: up to how many keys
    are taken in one step.
    """
    import triton.runtime.interpreter as interpreter

    from passes.kernels import split_attention
    from passes.kernels.split_attention import Tiles, attend, attend_split

    split_attention.AT_ONCE = at_once

    if not hasattr(interpreter, "patched_by_this_test"):
        interpreter.patched_by_this_test = True
        patch = interpreter._patch_lang_tensor

        def patch_with_index(tensor: Any, scope: Any) -> None:
            """Triton 3.6's own makes an int of an array of one dimension, which numpy 2.4 no longer does."""
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = patch_with_index
    q, k, v, bias = (None if x is None else _tensor(*x) for x in (q, k, v, bias))
    if tiles == "split":
        return [part.numpy() for part in attend_split(q, k, v, bias, scale, causal)]
    out = attend(q, k, v, bias, scale, causal, None if tiles is None else Tiles(*tiles))
    return out.numpy(), out.stride()


def _tensor(storage: Any, shape: Any, stride: Any) -> torch.Tensor:
    return torch.from_numpy(storage).as_strided(shape, stride)


def _array(x: torch.Tensor) -> Any:
    whole = torch.empty(0).set_(x.untyped_storage())  # type: ignore[call-overload]
    assert x.storage_offset() == 0
    return whole.numpy(), tuple(x.shape), x.stride()


@pytest.fixture(scope="module", params=[128, 0], ids=["short ones at once", "in blocks"])
def kernel(request) -> Iterator[Any]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

        def attend(q, k, v, bias=None, scale=None, causal=False, tiles=None) -> Any:
            arrays = [None if x is None else _array(x) for x in (q, k, v, bias)]
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            found = pool.submit(interpreted, *arrays, scale, causal, tiles, request.param).result()
            if tiles == "split":
                return [torch.from_numpy(part) for part in found]
            out, stride = found
            result = torch.from_numpy(out)
            assert stride == q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2).stride()
            return result

        with pool:
            yield attend
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def plain(q, k, v, bias=None, scale=None, causal=False, dtype=torch.float64) -> torch.Tensor:
    """The definition; a row of which nothing is visible is 0, as torch's efficient attention has it."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias.to(dtype)
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    top = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - torch.where(top == -math.inf, 0.0, top))
    total = p.sum(-1, keepdim=True)
    return (p @ v.to(dtype)) / torch.where(total == 0, 1.0, total)


def rel(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


def qkv(batch: int, heads: int, q_len: int, kv_len: int, d: int, seed: int = 0) -> list[torch.Tensor]:
    """As a projection's result is viewed: heads beside one another in memory."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, n, heads, d, generator=generator).transpose(1, 2) for n in (q_len, kv_len, kv_len)
    ]  # fmt: skip


SHAPES = {
    "whole blocks": dict(shape=(2, 2, 64, 128, 64)),
    "parts of blocks": dict(shape=(1, 1, 70, 90, 64)),
    "causal": dict(shape=(1, 2, 130, 130, 32), causal=True),
    "causal, more keys than queries": dict(shape=(1, 1, 40, 150, 16), causal=True),
    "causal, fewer keys than queries": dict(shape=(1, 1, 150, 40, 16), causal=True),
    "head dimension 48": dict(shape=(1, 1, 33, 65, 48)),
    "head dimension 128": dict(shape=(1, 1, 65, 70, 128)),
    "head dimension 20": dict(shape=(1, 2, 20, 20, 20)),
    "one query": dict(shape=(1, 2, 1, 100, 64)),
    "causal, as many as are taken at once": dict(shape=(1, 2, 128, 128, 64), causal=True),
    "more tiles of queries than split keys themselves": dict(shape=(1, 1, 300, 20, 16)),
    "another scale": dict(shape=(1, 1, 64, 64, 64), scale=0.7),
    "long": dict(shape=(1, 1, 64, 2000, 16)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_as_accurate_as_fp32(kernel, name):
    options = dict(SHAPES[name])
    q, k, v = qkv(*options.pop("shape"))
    exact = plain(q, k, v, **options)
    limit = 4 * rel(plain(q, k, v, **options, dtype=torch.float32), exact)
    assert rel(kernel(q, k, v, **options), exact) <= limit


def test_other_tiles_give_the_same_result(kernel):
    q, k, v = qkv(1, 2, 100, 150, 32)
    exact = plain(q, k, v, causal=True)
    for tiles in ((32, 32, 4, 2), (64, 32, 4, 2), (128, 64, 8, 2)):
        assert rel(kernel(q, k, v, causal=True, tiles=tiles), exact) < 5e-7


def test_written_split_it_is_what_split_makes_of_the_result(kernel):
    q, k, v = qkv(2, 2, 70, 90, 64)
    v[0, 0, :, :30] *= 2.0**-40  # a row of mixed scale is not held
    v[0, 1, 3, 5], v[1, 0], v[1, 1, :, 7] = math.nan, 0.0, 0.0
    expected = split(kernel(q, k, v).transpose(1, 2).contiguous())
    found = kernel(q, k, v, tiles="split")
    assert expected[2].eq(0).any() and expected[2].ne(0).any()
    assert torch.equal(found[2], expected[2])
    held, wanted = joined(*found), joined(*expected)
    assert torch.equal(held.isnan(), wanted.isnan())
    # What lies halfway between two fp16 numbers may go to either: then the low planes differ, and their rounding.
    assert torch.allclose(held, wanted, rtol=2.0**-22, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_on_the_cpu_is_the_same_arithmetic(kernel, causal):
    q, k, v = qkv(1, 2, 80, 80, 64)
    on_cpu = torch.ops.fxopt.split_attention(q, k, v, None, 0.125, causal)
    result = kernel(q, k, v, causal=causal)
    assert on_cpu.stride() == (80 * 128, 64, 128, 1)
    exact = plain(q, k, v, causal=causal)
    limit = 4 * rel(plain(q, k, v, causal=causal, dtype=torch.float32), exact)
    assert rel(result, on_cpu.double()) < 3e-7 and rel(on_cpu, exact) <= limit


@pytest.mark.parametrize(
    "make",
    [
        lambda b: b,
        lambda b: b[:1, :1].expand(b.shape),
        lambda b: b[:, :, :1].expand(b.shape),
        lambda b: b.transpose(-1, -2).contiguous().transpose(-1, -2),
    ],
    ids=["dense", "one for all heads", "one for all queries", "transposed"],
)
def test_a_bias_of_any_strides_is_added(kernel, make):
    q, k, v = qkv(2, 2, 50, 70, 16)
    bias = make(torch.randn(2, 2, 50, 70, generator=torch.Generator().manual_seed(1)))
    exact = plain(q, k, v, bias)
    assert rel(kernel(q, k, v, bias), exact) <= 4 * rel(plain(q, k, v, bias, dtype=torch.float32), exact)
    assert rel(kernel(q, k, v), exact) > 0.1, "without it the result is another"


def test_masked_keys_have_no_weight_and_a_row_without_keys_is_zero(kernel):
    q, k, v = qkv(1, 1, 40, 140, 16)
    bias = torch.zeros(1, 1, 40, 140)
    bias[:, :, :, 100:] = -math.inf
    bias[:, :, 3] = -math.inf
    bias[:, :, 4, :80] = -math.inf  # the first block alone is masked
    result = kernel(q, k, v, bias)
    assert (result[:, :, 3] == 0).all()
    assert rel(result, plain(q, k, v, bias)) < 5e-7


@pytest.mark.parametrize("layout", ["contiguous", "heads innermost", "last dimension strided"])
def test_any_layout_of_the_operands_is_read(kernel, layout):
    q, k, v = qkv(2, 3, 20, 24, 16)
    exact = plain(q, k, v)
    if layout == "contiguous":
        q, k, v = (x.contiguous() for x in (q, k, v))
    elif layout == "heads innermost":
        q, k, v = (x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in (q, k, v))
    else:
        k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (k, v))
    assert rel(kernel(q, k, v), exact) < 5e-7


SPECIAL = {
    "Inf in q": ("q", (0, 0, 5, 3), math.inf),
    "NaN in q": ("q", (0, 1, 5, 3), math.nan),
    "-Inf in k": ("k", (0, 0, 70, 3), -math.inf),
    "NaN in k": ("k", (0, 0, 70, 3), math.nan),
    "Inf in v": ("v", (0, 1, 70, 3), math.inf),
    "NaN in v": ("v", (0, 1, 2, 3), math.nan),
    "huge k": ("k", (0, 0, 70, 3), 3e38),
    "huge v": ("v", (0, 0, 70, 3), 3e38),
    "tiny v": ("v", (0, 0, 70, 3), 1e-40),
    "small v": ("v", (0, 0, 70, 3), 1e-15),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_values_that_cannot_be_split_give_what_fp32_gives(kernel, name):
    which, where, value = SPECIAL[name]
    operands = dict(zip("qkv", qkv(1, 2, 40, 100, 16), strict=True))
    operands[which][where] = value
    result, fp32 = kernel(**operands), plain(**operands, dtype=torch.float32)
    assert torch.equal(result.isnan(), fp32.isnan())
    assert torch.equal(result == math.inf, fp32 == math.inf) and torch.equal(result == -math.inf, fp32 == -math.inf)
    finite = fp32.isfinite()
    torch.testing.assert_close(result[finite], fp32[finite], rtol=5e-6, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_no_query_of_a_tile_sees_does_not_reach_it(kernel, value):
    q, k, v = qkv(1, 1, 128, 128, 16)
    expected = kernel(q, k, v, causal=True)
    k[0, 0, 90], v[0, 0, 100, 3] = value, value
    found = kernel(q, k, v, causal=True)
    assert torch.equal(found[:, :, :64], expected[:, :, :64]) and not found[:, :, 100:].isfinite().all()


@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
def test_rows_of_mixed_magnitude_stay_as_accurate(kernel, which):
    """Over twelve orders of magnitude; the error of each output is compared, not their norm."""
    generator = torch.Generator().manual_seed(2)
    operands = dict(zip("qkv", qkv(1, 2, 70, 130, 32), strict=True))
    for name in operands if which == "all" else which:
        rows = operands[name].shape[2]
        operands[name] *= 10.0 ** (12 * torch.rand(1, 1, rows, 1, generator=generator) - 9)
    exact = plain(**operands)
    most = operands["v"].double().abs().amax(-2, keepdim=True)

    def worst(result: torch.Tensor) -> float:
        return ((result.double() - exact).abs() / most).max().item()

    assert worst(kernel(**operands)) <= 4 * worst(plain(**operands, dtype=torch.float32)) + 2.0**-24


def test_a_column_of_values_keeps_its_own_scale(kernel):
    q, k, v = qkv(1, 1, 30, 100, 16)
    v *= torch.logspace(-20, 20, 16)
    exact = plain(q, k, v)
    error = (kernel(q, k, v).double() - exact).norm(dim=-2) / exact.norm(dim=-2)
    assert error.max() < 1e-6


def test_weights_that_are_far_below_one_keep_their_digits(kernel):
    """One key takes nearly everything, and has a zero value: the output is what the others' small weights make it."""
    q, k, v = qkv(1, 1, 16, 64, 16)
    k[:, :, 0] = 4 * q[:, :, :1].mean(-2)
    q[:] = q[:, :, :1]
    v[:, :, 0] = 0
    exact = plain(q, k, v, scale=1.0)
    limit = 4 * rel(plain(q, k, v, scale=1.0, dtype=torch.float32), exact)
    assert rel(kernel(q, k, v, scale=1.0), exact) <= limit
    assert rel(torch.ops.fxopt.split_attention(q, k, v, None, 1.0, False), exact) <= limit


def test_zeros_and_denormals(kernel):
    q, k, v = qkv(1, 1, 20, 70, 16)
    assert rel(kernel(q * 0, k, v), v.double().mean(-2, keepdim=True).expand(1, 1, 20, 16)) < 5e-7
    assert (kernel(q, k, v * 0) == 0).all()
    tiny = v * 1e-42
    exact = plain(q, k, tiny)
    assert (kernel(q, k, tiny).double() - exact).abs().max() <= 2 * (
        plain(q, k, tiny, dtype=torch.float32).double() - exact
    ).abs().max() + 2.0**-148


@pytest.mark.parametrize("exact", [False, True], ids=["planes", "in fp32"])
def test_rows_may_lie_further_apart_than_32_bits_count(exact):
    """Memory that nobody touches takes no room."""
    agrees(f"""
import torch
from passes.kernels.split_attention import attend
torch.manual_seed(0)
q, given, bias = torch.randn(1, 1, 16, 16), [torch.randn(1, 1, 20, 16) for _ in range(2)], torch.randn(1, 1, 16, 20)
if {exact}:
    q[0, 0, 3, 3] = 2.0**60
step = 2**31 // 18
k, v = (torch.empty(20 * step).as_strided(x.shape, (0, 0, step, 1)).copy_(x) for x in given)
apart = torch.empty(20 * step).as_strided(bias.shape, (0, 0, 1, step)).copy_(bias)
wide = [x.double() for x in (q, *given, bias)]
own = torch.nn.functional.scaled_dot_product_attention(*wide, scale=0.25)
found = attend(q, k, v, apart, 0.25, False)
assert (found - own).abs().max() <= 1e-6 * own.abs().max(), (found - own).abs().max()
print("agrees")
""")
