"""How a value is split, and the operators on the CPU: error bounds, bits that are kept, and what Inductor makes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxopt.torch_api.tracing import fake_mode
from passes import split_products
from passes.split_products import joined, rounded_once, split, split_parts

UNIT = 2.0**-22
WHOLE = (64, 64, 32, 1, 4, 2)
THREE_SHARES = (64, 64, 32, 3, 4, 2)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def within(found: torch.Tensor, true: torch.Tensor, unit: float) -> bool:
    return bool(((found.double() - true.double()).abs() <= true.double().abs() * unit).all())


def rows_of_every_kind() -> torch.Tensor:
    x = values(16, 256)
    x[1] = 0
    x[2, 5], x[3, 6], x[4, 7] = math.inf, math.nan, -math.inf
    x[5] *= 1e-42
    x[6] *= 1e30
    x[7] *= 1e-30
    x[8, 0], x[9, 3], x[10, 4] = 1e12, 1e-20, 0.0
    return x


# ---------------------------------------------------------------- three products


@pytest.mark.parametrize("block", [0, 64])
@pytest.mark.parametrize("power", [-42, -20, 0, 30, 74])
def test_two_planes_hold_every_element_to_two_to_the_minus_22(block, power):
    x = values(20, 256) / 16 * 2.0**power  # below 4 in 16, so that the largest is within the range
    x = torch.where(x.abs() < 2.0 ** (power - 20), 2.0 ** (power - 5), x)
    hi, lo, scale = split(x, block)
    assert (scale > 0).all()
    assert within(joined(hi, lo, scale).view(20, 256), x, UNIT)
    assert hi.dtype == lo.dtype == torch.int16 and scale.shape == ((20, 256 // block, 1) if block else (20, 1))
    assert lo.count_nonzero() > 0.9 * lo.numel()


def test_the_largest_of_a_row_becomes_a_number_just_below_fp16s_largest():
    x = values(50, 100) * torch.logspace(-11, 20, 50)[:, None]
    scaled = x.abs().amax(1, keepdim=True) * split(x)[2]
    assert ((scaled >= 2.0**14) & (scaled < 2.0**15)).all()


def test_the_planes_are_an_element_rounded_to_fp16_and_2048_times_what_is_left():
    """The kernel reads them so, and takes its sums over the low plane times 2^-11."""
    x = values(20, 100)
    hi, lo, scale = split(x)
    scaled = x.double() * scale.double()
    assert within(hi.view(torch.float16), scaled, 2.0**-11)
    left = (scaled - hi.view(torch.float16).double()) * 2048
    assert within(lo.view(torch.float16), left, 2.0**-11)


def test_a_scale_is_a_power_of_two():
    scale = split(values(50, 8) * torch.logspace(-11, 20, 50)[:, None])[2]
    assert ((bits(scale) & 0x7FFFFF) == 0).all()


@pytest.mark.parametrize(
    "row",
    [
        [1.0, math.inf],
        [math.nan, 1.0],
        [-math.inf, math.inf],
        [1.0, 2.0**-28 * 0.99],
        [2.0**-46 * 0.99, 0.0],
        [2.0**75, 2.0**74],
        [1e-42, 1e-45],
        [3.4e38, -1.0],
        [1.0, 1e-45],
    ],
    ids=str,
)
def test_a_row_that_planes_cannot_hold_keeps_every_bit(row):
    x = torch.tensor([row, [1.0, 2.0]])
    hi, lo, scale = split(x)
    assert scale.flatten().tolist() == [0.0, 2.0**13]
    assert torch.equal(bits(joined(hi, lo, scale)), bits(x))


@pytest.mark.parametrize("row", [[1.0, 2.0**-28], [2.0**-46, 0.0], [2.0**75 * (1 - 2.0**-24), 2.0**74]], ids=str)
def test_what_lies_at_the_bounds_is_held(row):
    x = torch.tensor([row])
    hi, lo, scale = split(x)
    assert scale.item() > 0 and within(joined(hi, lo, scale), x, UNIT)


def test_a_few_small_elements_are_held_to_a_part_of_the_largest():
    """One in 64 may be below 2^-28 of it; so that a single tiny weight does not make its tiles slow."""
    x = values(3, 128).clamp(0.1, 1.0)
    x[0, 5], x[0, 6] = 2.0**-35, -1e-30
    x[1, 5], x[1, 6], x[1, 7] = 2.0**-35, 1e-30, 1e-41
    hi, lo, scale = split(x)
    assert scale.ne(0).flatten().tolist() == [True, False, True]
    found = joined(hi, lo, scale)
    assert torch.equal(bits(found[1]), bits(x[1]))
    off = (found[0].double() - x[0].double()).abs()
    small = x[0].abs() < 2.0**-28
    assert small.sum() == 2 and (off[small] <= 2.0**-49).all() and (found[0][small] != 0).all()
    assert within(found[0, ~small], x[0, ~small], UNIT)


@pytest.mark.parametrize("length", [16, 40, 64, 1000, 20000])
def test_a_whole_row_with_few_elements_that_are_not_zero_keeps_every_bit(length):
    least = min(16, length // 4)
    for count, held in ((1, False), (least - 1, False), (least, True), (length, True)):
        row = torch.zeros(1, length)
        row[0, torch.randperm(length)[:count]] = torch.rand(count) + 1.0
        hi, lo, scale = split(row)
        assert (scale.item() != 0) == held, count
        if not held:
            assert torch.equal(joined(hi, lo, scale), row)
    blocks = torch.zeros(1, 256)
    blocks[0, 0] = 1.0
    assert (split(blocks, 128)[2] != 0).all(), "a block is a part of a sum"


def test_few_small_elements_among_zeros_do_not_count_as_many():
    row = torch.zeros(1, 4096)
    row[0, :512] = 1.0
    row[0, 512:575] = 2.0**-40
    assert split(row)[2].item() != 0, "63 of 4096 are fewer than one in 64"
    row[0, 575:577] = 2.0**-40
    assert split(row)[2].item() == 0


def test_the_payload_and_sign_of_a_nan_are_kept():
    x = torch.tensor([[0x7FC00001, 0x7F800001, -0x3FFFFF, 0x7FFFFFFF]], dtype=torch.int32).view(torch.float32)
    assert x.isnan().all()
    assert torch.equal(bits(joined(*split(x))), bits(x))


def test_zeros_are_zeros_of_scale_one():
    x = torch.tensor([[0.0, -0.0, 0.0], [0.0, -3.0, 0.0]])
    hi, lo, scale = split(x)
    assert scale.flatten().tolist() == [1.0, 2.0**13]
    assert torch.equal(joined(hi, lo, scale), x)


def test_a_block_that_is_not_held_leaves_its_neighbours_alone():
    x = values(4, 256)
    x[2, 70] = math.inf
    scale = split(x, 64)[2]
    assert (scale == 0).nonzero().tolist() == [[2, 1, 0]]
    assert torch.equal(joined(*split(x, 64))[2, 1], x[2, 64:128])
    assert split(x, 0)[2].eq(0).flatten().tolist() == [False, False, True, False]


def test_blocks_and_batches_are_split_as_rows_of_their_own():
    x = values(3, 5, 128) * torch.logspace(-8, 8, 3)[:, None, None]
    hi, lo, scale = split(x, 32)
    alone = split(x.reshape(60, 32))
    assert torch.equal(hi.reshape(60, 32), alone[0]) and torch.equal(lo.reshape(60, 32), alone[1])
    assert torch.equal(scale.reshape(60, 1), alone[2])
    assert torch.equal(joined(hi, lo, scale).reshape(60, 32), joined(*alone))


PATTERNS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4)
#: bit patterns whose exponents lie close together, as a row that is held has them
CLOSE = st.integers(60, 220).flatmap(
    lambda low: st.lists(
        st.builds(
            lambda sign, exponent, mantissa: (exponent << 23 | mantissa) - sign * 2**31,
            st.integers(0, 1),
            st.integers(low, low + 28),
            st.integers(0, 2**23 - 1),
        ),
        min_size=4,
        max_size=4,
    )
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.one_of(PATTERNS, CLOSE), min_size=8, max_size=8))
def test_any_bits_are_kept_or_held(rows):
    x = torch.tensor(rows, dtype=torch.int32).view(torch.float32)
    hi, lo, scale = split(x)
    found = joined(hi, lo, scale)
    raw = (scale == 0).squeeze(1)
    assert torch.equal(bits(found[raw]), bits(x[raw]))
    assert within(found[~raw], x[~raw], UNIT)
    magnitude = x.double().abs()
    largest = magnitude.amax(1)
    least = torch.where(magnitude == 0, math.inf, magnitude).amin(1)
    fits = (largest >= 2.0**-46) & (largest < 2.0**75) & (least >= largest * 2.0**-28)
    assert torch.equal(~raw, fits | (largest == 0))


# ---------------------------------------------------------------- one product


def test_one_rounding_keeps_eleven_bits():
    x = values(30, 200) * torch.logspace(-12, 20, 30)[:, None]
    found, scale = rounded_once(x)
    assert found.dtype == torch.float16
    normal = x.abs() >= x.abs().amax(1, keepdim=True) * 2.0**-28
    assert within((found.float() / scale)[normal], x[normal], 2.0**-11)


def test_infinities_and_nan_stay_and_do_not_touch_the_scale_of_their_neighbours():
    x = values(3, 64) * 1e-6
    x[0, 3], x[1, 4], x[2, 5] = math.inf, math.nan, -math.inf
    found, scale = rounded_once(x)
    back = found.float() / scale
    assert torch.equal(back.isnan(), x.isnan()) and torch.equal(back == math.inf, x == math.inf)
    assert torch.equal(back == -math.inf, x == -math.inf)
    finite = x.isfinite() & (x.abs() > 1e-12)
    assert within(back[finite], x[finite], 2.0**-11)


def test_rows_of_nothing_finite_and_of_zeros_stay_what_they_are():
    x = torch.tensor([[math.inf, math.nan], [0.0, -0.0]])
    found, scale = rounded_once(x)
    assert scale.isfinite().all()
    assert torch.equal(found[1].float(), x[1]) and found[0, 0] == math.inf and found[0, 1].isnan()


@pytest.mark.parametrize("size", [2.0**-79, 1e-20, 1e23, 2.0**79])
def test_rows_far_from_one_are_scaled_all_the_same(size):
    x = values(4, 64) * size
    found, scale = rounded_once(x)
    assert within((found.double() / scale.double()).float(), x, 2.0**-11 * 1.01)


# ---------------------------------------------------------------- bf16 parts


def parts_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b^T over a K three times as long, in fp32, as cuBLAS does it with fp32 sums."""
    return split_parts(a, 0).float() @ split_parts(b, 1).float().mT


def test_parts_hold_sixteen_bits():
    x = values(20, 100) * torch.logspace(-20, 30, 20)[:, None]
    lo, hi, last = split_parts(x, 0).double().split(100, 1)
    assert torch.equal(hi, last)
    assert within(hi + lo, x, 2.0**-16)
    other = split_parts(x, 1).double().split(100, 1)
    assert all(torch.equal(one, two) for one, two in zip(other, (hi, lo, hi), strict=True))


def test_what_rounds_past_bf16s_largest_number_stays_finite():
    x = torch.tensor([[torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max]])
    assert split_parts(x, 0).isfinite().all()
    assert within(split_parts(x, 0).double()[:, :2] + split_parts(x, 0).double()[:, 2:4], x, 2.0**-16)


def test_a_product_of_parts_errs_by_less_than_one_in_a_hundred_thousand():
    a, b = values(64, 96), values(48, 96, seed=1)
    exact = a.double() @ b.double().mT
    assert 1e-7 < ((parts_product(a, b) - exact).norm() / exact.norm()).item() < 1e-5


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, 3.4e38, 2.0**-133])
@pytest.mark.parametrize("other", [math.inf, -math.inf, math.nan, 0.0, 1.0, 1e-38])
def test_nan_and_infinity_are_where_fp32_has_them(value, other):
    a, b = values(16, 32), values(16, 32, seed=1) / 64
    a[5, 6], b[7, 6] = value, other
    a[9, 3], a[9, 4] = math.inf, -math.inf
    found, fp32 = parts_product(a, b), a @ b.mT
    assert torch.equal(found.isnan(), fp32.isnan())
    assert torch.equal(found == math.inf, fp32 == math.inf) and torch.equal(found == -math.inf, fp32 == -math.inf)


def test_what_bf16_has_no_number_for_is_zero_to_an_infinity():
    """The limit of this form: fp32 has Inf where an Inf meets a number below 2^-134, and the parts have NaN."""
    a, b = torch.full((16, 16), math.inf), torch.full((16, 16), 2.0**-136)
    assert (a @ b == math.inf).all() and parts_product(a, b).isnan().all()


# ---------------------------------------------------------------- what Inductor makes of it


@pytest.mark.parametrize("block", [0, 64])
def test_planes_that_inductor_makes_are_those_made_eagerly(block, fresh_dynamo):
    x = rows_of_every_kind()

    def fused(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return split(torch.relu(x) * 2 - x, block)

    for made, eager in zip(torch.compile(fused)(x), fused(x), strict=True):
        assert torch.equal(made, eager)


def test_one_rounding_and_parts_by_inductor_are_those_made_eagerly(fresh_dynamo):
    x = rows_of_every_kind()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*rounded_once(x), split_parts(x, 0), split_parts(x, 1))

    for made, eager in zip(torch.compile(both)(x), both(x), strict=True):
        torch.testing.assert_close(made, eager, rtol=0, atol=0, equal_nan=True)


def test_inductor_drops_the_low_part_of_a_split_by_casts(fresh_dynamo):
    """Why `split` rounds in integer arithmetic: the cast to fp16 and back is taken for the identity."""

    def by_casts(x: torch.Tensor) -> torch.Tensor:
        return x - x.to(torch.float16).float()

    x = values(16, 64)
    assert by_casts(x).count_nonzero() > 900
    assert torch.compile(by_casts)(x).count_nonzero() == 0


# ---------------------------------------------------------------- operators


def error(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """Largest error of an element, against the sum of the magnitudes that it is a sum of."""
    return ((found.double() - exact).abs() / bound).max().item()


def summed(found: torch.Tensor, tile: tuple[int, ...]) -> torch.Tensor:
    return found.sum(-3) if tile[3] > 1 else found


@pytest.mark.parametrize("tile", [WHOLE, THREE_SHARES], ids=["whole", "three shares"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(24, 100, 40), (3, 17, 256, 20)], ids=str)
def test_the_operators_are_as_accurate_as_they_say(shape, biased, tile):
    *lead, m, k, n = shape
    a, b = values(*lead, m, k), values(*lead, n, k, seed=1)
    bias = values(n, seed=2) if biased else None
    added = bias.double() if bias is not None else 0.0
    exact = a.double() @ b.double().mT + added
    bound = a.double().abs() @ b.double().abs().mT
    own = error(a @ b.mT + (0 if bias is None else bias), exact, bound)
    operators: Any = torch.ops.fxopt
    block = 64 if k % 64 == 0 else 0
    three = operators.split_gemm(*split(a, block), *split(b), bias, tile)
    assert error(summed(three, tile), exact, bound) <= 4 * max(own, 2.0**-24)
    one = operators.scaled_gemm(*rounded_once(a), *rounded_once(b), bias, tile)
    assert 1e-6 < error(summed(one, tile), exact, bound) < 2.0**-10


def test_shares_are_sums_over_parts_of_k_and_the_bias_is_in_the_first():
    a, b, bias = values(16, 80), values(20, 80, seed=1), values(20, seed=2)
    shares = torch.ops.fxopt.split_gemm(*split(a), *split(b), bias, (64, 64, 16, 2, 4, 2))
    ranges = [(0, 48), (48, 80)]  # five steps of 16: three and two
    expected = torch.stack([a[:, i:j].double() @ b[:, i:j].double().mT for i, j in ranges])
    expected[0] += bias.double()
    torch.testing.assert_close(shares.double(), expected, rtol=0, atol=1e-5)


def test_more_shares_than_steps_are_zeros():
    a, b = values(16, 32), values(16, 32, seed=1)
    shares = torch.ops.fxopt.split_gemm(*split(a), *split(b), None, (64, 64, 32, 4, 4, 2))
    assert shares.shape == (4, 16, 16) and shares[1:].count_nonzero() == 0 and shares[0].count_nonzero() > 200


def test_what_an_operand_cannot_hold_in_planes_is_in_the_product():
    a, b = rows_of_every_kind(), values(20, 256, seed=1)
    b[3] *= 1e-41
    found = torch.ops.fxopt.split_gemm(*split(a), *split(b), None, WHOLE)
    fp32 = a @ b.mT
    assert torch.equal(found.isnan(), fp32.isnan()) and torch.equal(found.isinf(), fp32.isinf())
    finite = fp32.isfinite()
    bound = a.double().abs() @ b.double().abs().mT
    assert ((found.double() - fp32.double()).abs()[finite] <= 2.0**-20 * bound[finite] + 2.0**-140).all()


@pytest.mark.parametrize("tile", [WHOLE, THREE_SHARES], ids=["whole", "three shares"])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["matrices", "batches"])
def test_fake_results_have_the_form_of_real_ones(lead, tile):
    a, b, bias = values(*lead, 17, 64), values(*lead, 20, 64, seed=1), values(20, seed=2)
    operators: Any = torch.ops.fxopt
    calls = [
        (operators.split_gemm, (*split(a, 32), *split(b), bias, tile)),
        (operators.scaled_gemm, (*rounded_once(a), *rounded_once(b), bias, tile)),
    ]
    mode = fake_mode(symbolic=False)
    for operator, arguments in calls:
        real = operator(*arguments)
        with mode:
            fake = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments))
        form = (fake.shape, fake.stride(), fake.dtype, fake.device)
        assert form == (real.shape, real.stride(), real.dtype, real.device)


@pytest.mark.parametrize("terms", [3, 1])
def test_a_product_run_at_once_is_close_to_the_exact_one(terms):
    a, b = values(40, 300), values(300, 24, seed=1)
    exact = a.double() @ b.double()
    found = split_products.split_mm(a, b, terms)
    assert found.shape == (40, 24)
    assert ((found - exact).norm() / exact.norm()).item() < (1e-6 if terms == 3 else 5e-4)
