"""The numerics gate: what passes, and that every kind of wrong candidate fails."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx, nn

from fxopt.fresh import fresh_inputs
from fxopt.precision import FP32_FLOOR, Budget, Precision, parse_precision
from fxopt.reference import clone_inputs, storage_groups
from fxopt.verify import verify

FP32, TF32, BF16 = map(parse_precision, ("fp32", "tf32", "bf16"))


class Model(nn.Module):
    """x, weight -> activations (with an Inf where log meets 0), indices, a view of x."""

    def forward(self, x, weight):
        return torch.tanh(x @ weight).t(), torch.log(x.relu()), x.argmax(-1), x.view(-1)


def setup(model=None, *args):
    """Graph, inputs and the baseline: the graph itself in fp32."""
    gm = fx.symbolic_trace(model or Model())
    if not args:
        torch.manual_seed(0)
        args = (torch.randn(16, 32), torch.randn(32, 24))
    return gm, list(args), gm.forward


def check(candidate, budget=FP32, sets=None, model=None, args=(), static=(1,), **options):
    gm, inputs, baseline = setup(model, *args)
    wrapped = candidate if callable(candidate) else baseline
    return verify(wrapped, baseline, gm, sets or [inputs], set(static), budget, **options)


def changed(index, change):
    """A candidate whose output ``index`` is changed."""

    def run(x, weight):
        outs = list(Model()(x, weight))
        outs[index] = change(outs[index])
        return tuple(outs)

    return run


# ---------------------------------------------------------------- what passes


def test_the_baseline_itself_passes_and_the_numbers_say_how_close_it_is():
    verdict = check(Model())
    assert verdict.ok and verdict.reason == ""
    assert 0 < verdict.rel_l2 == verdict.baseline_rel_l2 < 1e-6
    assert verdict.limit >= FP32_FLOOR
    assert 0 < verdict.max_abs < 1e-5
    assert verdict.nan_agree and verdict.top1 is None and verdict.checked == 1


def test_another_order_of_summation_passes_in_fp32():
    def reordered(x, weight):
        outs = list(Model()(x, weight))
        outs[0] = torch.tanh(x[:, :16] @ weight[:16] + x[:, 16:] @ weight[16:]).t()
        return tuple(outs)

    assert check(reordered).ok


def test_every_set_of_inputs_is_checked():
    gm, inputs, baseline = setup()
    sets = [inputs, fresh_inputs(inputs, {1}, 1), fresh_inputs(inputs, {1}, 2)]
    assert verify(Model(), baseline, gm, sets, {1}, FP32).checked == 3


# ---------------------------------------------------------------- mutants


def bf16_matmul(x, weight):
    outs = list(Model()(x, weight))
    outs[0] = torch.tanh((x.bfloat16() @ weight.bfloat16()).float()).t()
    return tuple(outs)


def elided_split(x, weight):
    """A split into bf16 parts whose second part is zero: what a compiler makes of it that elides casts."""
    high = weight.bfloat16().float()
    outs = list(Model()(x, weight))
    outs[0] = torch.tanh(x @ high + x @ ((weight - high) * 0)).t()
    return tuple(outs)


def one_element(out):
    out = out.clone(memory_format=torch.preserve_format)
    out[3, 2] += 2e-4
    return out


def a_nan(out):
    out = out.clone(memory_format=torch.preserve_format)
    out[3, 2] = math.nan
    return out


def writes_x(x, weight):
    outs = Model()(x, weight)
    x[0, 0] += 1
    return outs


def raises(x, weight):
    raise RuntimeError("no kernel image")


MUTANTS = {
    "wrong numbers": (changed(0, lambda out: out * 1.001), "output 0: relative L2 error"),
    "silent bf16": (bf16_matmul, "output 0: relative L2 error"),
    "elided split": (elided_split, "output 0: relative L2 error"),
    "a NaN": (changed(0, a_nan), "output 0: NaN or Inf in other places"),
    "a clipped Inf": (changed(1, lambda out: out.clamp(min=-1e30)), "output 1: NaN or Inf in other places"),
    "an Inf of the other sign": (changed(1, lambda o: torch.where(o.isinf(), -o, o)), "output 1: NaN or Inf"),
    "strides": (changed(0, torch.Tensor.contiguous), "output 0: strides (16, 1), baseline (1, 24)"),
    "shape": (changed(0, lambda out: out[:-1]), "output 0: shape (23, 16), baseline (24, 16)"),
    "dtype": (changed(0, torch.Tensor.double), "output 0: dtype torch.float64, baseline torch.float32"),
    "device": (changed(0, lambda out: out.to("meta")), "output 0: device meta, baseline cpu"),
    "an index": (changed(2, lambda out: out.roll(1)), "output 2: "),
    "a copy in place of a view": (
        changed(3, torch.Tensor.clone),
        "output 3: aliases no input, in the baseline it",
    ),
    "a number in place of a tensor": (
        changed(2, lambda out: 3),
        "output 2: 3 (int), baseline a tensor (16,)",
    ),
    "an output less": (lambda x, weight: Model()(x, weight)[:3], "3 outputs, baseline 4"),
    "a written input": (writes_x, "input 0 is written, the baseline leaves it alone"),
    "an error": (raises, "the candidate raised RuntimeError: no kernel image"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_candidate_fails_and_the_reason_names_the_place(name):
    candidate, reason = MUTANTS[name]
    verdict = check(candidate)
    assert not verdict.ok
    assert reason in verdict.reason
    assert verdict.reason.startswith("input set 0: ")


def test_a_new_view_of_an_input_fails():
    class Copies(nn.Module):
        def forward(self, x, weight):
            return (x.clone(),)

    verdict = check(lambda x, weight: (x,), model=Copies())
    assert (
        not verdict.ok
        and "aliases input 0 at offset 0, in the baseline it aliases no input" in verdict.reason
    )


def test_the_strides_that_the_graph_gives_are_right_where_the_baseline_returns_a_slice_of_padding():
    class Product(nn.Module):
        def forward(self, x, weight):
            return (x @ weight,)

    torch.manual_seed(0)
    gm, inputs, _ = setup(Product(), torch.randn(24, 8), torch.randn(8, 10))

    def padded(columns):
        return lambda x, weight: (nn.functional.pad(x @ weight, (0, columns))[:, :10],)

    def against_padding(candidate):
        return verify(candidate, padded(2), gm, [inputs], {1}, FP32)

    assert against_padding(padded(0)).ok, "strides (10, 1)"
    assert against_padding(padded(2)).ok
    assert "strides (16, 1), baseline (12, 1)" in against_padding(padded(6)).reason


def test_one_wrong_element_in_a_large_output_fails_though_the_l2_norm_hides_it():
    class Wide(nn.Module):
        def forward(self, x, weight):
            return (x @ weight,)

    torch.manual_seed(0)
    args = (torch.randn(1000, 8), torch.randn(8, 1000))

    def candidate(x, weight):
        out = x @ weight
        out[500, 500] += 2e-3
        return (out,)

    verdict = check(candidate, model=Wide(), args=args, logits=False)
    assert verdict.rel_l2 <= verdict.limit
    assert not verdict.ok and "an element is off by 0.002" in verdict.reason


def test_a_candidate_that_is_right_only_for_the_callers_inputs_fails():
    gm, inputs, baseline = setup()
    memorised = [out.clone() for out in Model()(*inputs)[:3]]
    memorised[0] = memorised[0].t().contiguous().t()

    def constant(x, weight):
        return *(out.clone(memory_format=torch.preserve_format) for out in memorised), x.view(-1)

    assert verify(constant, baseline, gm, [inputs], {1}, FP32).ok
    verdict = verify(constant, baseline, gm, [inputs, fresh_inputs(inputs, {1}, 3)], {1}, FP32)
    assert not verdict.ok and verdict.reason.startswith("input set 1: output 0")


def test_a_scribbled_parameter_is_put_back_and_the_candidate_fails():
    gm, inputs, baseline = setup()
    weight = inputs[1].clone()

    def scribbles(x, weight):
        outs = Model()(x, weight)
        weight.mul_(2)
        return outs

    verdict = verify(scribbles, baseline, gm, [inputs], {1}, FP32)
    assert not verdict.ok and "input 1 (a parameter) is written" in verdict.reason
    assert torch.equal(inputs[1], weight)


# ---------------------------------------------------------------- writes to inputs


class Counts(nn.Module):
    """Running statistics: writes a parameter-like buffer and an input."""

    def forward(self, x, state):
        state.mul_(0.9).add_(x.mean(0))
        x.add_(1)
        return (x * 2,)


def counts(state_factor=1.0, write_x=True):
    def run(x, state):
        state.mul_(0.9).add_(x.mean(0) * state_factor)
        if write_x:
            x.add_(1)
            return (x * 2,)
        return ((x + 1) * 2,)

    return run


@pytest.mark.parametrize("static", [(), (1,)])
def test_what_is_written_to_inputs_is_compared_and_the_callers_stay_as_they_were(static):
    torch.manual_seed(0)
    args = (torch.randn(6, 4), torch.randn(4))
    before = [arg.clone() for arg in args]
    assert check(counts(), model=Counts(), args=args, static=static).ok
    wrong = check(counts(state_factor=1.01), model=Counts(), args=args, static=static)
    assert not wrong.ok and "input 1 after the call: relative L2 error" in wrong.reason
    lacking = check(counts(write_x=False), model=Counts(), args=args, static=static)
    assert not lacking.ok and "input 0 is left alone, the baseline writes it" in lacking.reason
    assert all(map(torch.equal, args, before))


class Remembers(nn.Module):
    """Writes to a cache as a decoding step does: called again with the same inputs it changes nothing."""

    def forward(self, x, cache):
        cache.select(0, 1).copy_(x @ x.T)
        return (cache * 2,)


def remembers(factor: float = 1.0, at: int = 1):
    def run(x, cache):
        cache[at] = ((x.double() @ x.double().T) * factor).float()  # rounds otherwise than the baseline
        return (cache * 2,)

    return run


def test_what_the_baseline_writes_again_a_candidate_may_write_as_it_rounds():
    torch.manual_seed(0)
    x, cache = torch.randn(40, 40), torch.randn(3, 40, 40)
    gm = setup(Remembers(), x, cache)[0]
    written = cache.clone()
    gm(x, written)
    again = written.clone()
    remembers()(x, again)
    assert not torch.equal(again, written)
    sets = [[x, cache], [x, written]]
    assert verify(remembers(), gm, gm, sets, (), FP32).ok
    wrong = verify(remembers(1.001), gm, gm, sets[1:], (), FP32)
    assert not wrong.ok and "input 1 after the call: relative L2 error" in wrong.reason
    elsewhere = verify(remembers(at=0), gm, gm, sets[1:], (), FP32)
    assert not elsewhere.ok and "input 1 after the call: relative L2 error" in elsewhere.reason


# ---------------------------------------------------------------- budgets


def test_classes_are_ordered():
    assert Precision.FP32.allows(Precision.FP32) and not Precision.FP32.allows(Precision.TF32)
    assert Precision.TF32.allows(Precision.TF32) and not Precision.TF32.allows(Precision.BF16)
    assert all(Precision.BF16.allows(other) for other in Precision)
    assert not FP32.allows(Precision.TF32) and TF32.allows(Precision.FP32)
    assert all(parse_precision(1e-6).allows(other) for other in Precision)


@pytest.mark.parametrize(
    ("value", "budget"),
    [
        ("fp32", Budget(Precision.FP32)),
        ("TF32", Budget(Precision.TF32)),
        (Precision.BF16, Budget(Precision.BF16)),
        (1e-3, Budget(Precision.BF16, 1e-3)),
        ("1e-3", Budget(Precision.BF16, 1e-3)),
    ],
)
def test_precision_is_a_class_or_an_error(value, budget):
    assert parse_precision(value) == budget


@pytest.mark.parametrize("value", ["fp8", "", 0, 1, 1.5, -0.1, math.nan, True, None, [0.1]])
def test_anything_else_is_refused_with_the_choices(value):
    with pytest.raises(ValueError, match=r"'fp32', 'tf32', 'bf16'.*between 0 and 1"):
        parse_precision(value)


def test_the_class_is_what_bounds_the_error():
    # bf16 operands: about 3e-3 here, over 8 * 2^-11 / 2, under 8 * 2^-8
    assert not check(bf16_matmul, FP32).ok
    assert check(bf16_matmul, BF16).ok
    half_of_tf32 = changed(0, lambda out: out * (1 + 4 * 2.0**-11))
    assert check(half_of_tf32, TF32).ok and not check(half_of_tf32, FP32).ok
    twice_tf32 = changed(0, lambda out: out * (1 + 16 * 2.0**-11))
    assert not check(twice_tf32, TF32).ok and check(twice_tf32, BF16).ok
    assert not check(changed(0, lambda out: out * 1.05), BF16).ok


def test_a_numeric_budget_is_the_limit_itself():
    off = changed(0, lambda out: out * 1.001)
    assert check(off, parse_precision(2e-3)).ok
    verdict = check(off, parse_precision(5e-4))
    assert not verdict.ok and verdict.limit == 5e-4


def test_a_bf16_model_is_held_to_its_own_error():
    torch.manual_seed(0)
    args = (torch.randn(16, 32).bfloat16(), torch.randn(32, 24).bfloat16())

    class Mlp(nn.Module):
        def forward(self, x, weight):
            return (torch.tanh(x @ weight),)

    same = check(lambda x, w: (torch.tanh((x.float() @ w.float()).bfloat16()),), model=Mlp(), args=args)
    assert same.ok and same.baseline_rel_l2 > 1e-4
    worse = check(lambda x, w: (torch.tanh(x @ w) * 1.03,), model=Mlp(), args=args)
    assert not worse.ok


def test_fp32_arithmetic_in_an_fp64_model_fails():
    class Double(nn.Module):
        def forward(self, x, weight):
            return (x @ weight,)

    args = (torch.randn(8, 8).double(), torch.randn(8, 8).double())
    assert check(lambda x, w: (x @ w,), model=Double(), args=args).ok
    assert not check(lambda x, w: ((x.float() @ w.float()).double(),), model=Double(), args=args).ok


def test_an_all_zero_reference_is_compared_absolutely():
    class Zero(nn.Module):
        def forward(self, x, weight):
            return (x * 0,)

    assert check(lambda x, w: (x * 0,), model=Zero()).ok
    verdict = check(lambda x, w: (x * 0 + 1e-3,), model=Zero())
    assert not verdict.ok and verdict.max_abs == pytest.approx(1e-3)


# ---------------------------------------------------------------- logits


class Head(nn.Module):
    """Logits on a large common offset: the relative error cannot see which one is largest."""

    def forward(self, x, weight):
        return (x @ weight + 100.0,)


def head_args():
    torch.manual_seed(0)
    return torch.randn(64, 16) / 4, torch.randn(16, 1000)


def test_shuffled_logits_fail_on_top1_though_their_l2_error_is_small():
    def shuffled(x, weight):
        return ((x @ weight).roll(1, -1) + 100.0,)

    verdict = check(shuffled, BF16, model=Head(), args=head_args())
    assert verdict.rel_l2 < verdict.limit
    assert not verdict.ok and "top-1 differs from the reference in" in verdict.reason
    assert verdict.top1 is not None and verdict.top1 < 0.1
    ignored = check(shuffled, BF16, model=Head(), args=head_args(), logits=False)
    assert ignored.ok and ignored.top1 is None


def test_right_logits_agree():
    verdict = check(lambda x, w: (x @ w + 100.0,), model=Head(), args=head_args())
    assert verdict.ok and verdict.top1 == 1.0


def test_narrow_outputs_are_logits_when_the_user_says_so():
    torch.manual_seed(0)
    args = (torch.randn(64, 16) / 4, torch.randn(16, 10))
    right = lambda x, w: (x @ w + 100.0,)  # noqa: E731
    assert check(right, model=Head(), args=args).top1 is None
    assert check(right, model=Head(), args=args, logits=True).top1 == 1.0


# ---------------------------------------------------------------- no usable reference


def test_random_models_are_compared_with_the_baseline_under_one_seed():
    class Drop(nn.Module):
        def forward(self, x, weight):
            return (torch.nn.functional.dropout(x @ weight, 0.5, training=True),)

    gm, inputs, baseline = setup(Drop())
    state = torch.get_rng_state()
    verdict = verify(Drop(), baseline, gm, [inputs], {1}, FP32)
    assert verdict.ok and "random operators" in verdict.reason
    assert torch.equal(torch.get_rng_state(), state)
    wrong = check(lambda x, w: (torch.nn.functional.dropout(x @ w, 0.4, training=True),), model=Drop())
    assert not wrong.ok
    order = check(lambda x, w: (torch.rand(1), torch.nn.functional.dropout(x @ w, 0.5))[1:], model=Drop())
    assert not order.ok


def test_where_the_reference_parts_from_the_baseline_the_candidate_is_held_to_the_baseline():
    class Chaos(nn.Module):
        def forward(self, x, weight):
            x = x.abs().clamp(0.01, 0.99)
            for _ in range(60):  # the logistic map: rounding errors double at every step
                x = 3.99 * x * (1 - x)
            return (x,)

    verdict = check(Chaos().forward, model=Chaos())
    assert verdict.ok and "compared with the baseline" in verdict.reason
    assert not check(lambda x, w: (Chaos()(x, w)[0] * 1.01,), model=Chaos()).ok


def test_bit_level_models_are_compared_with_an_eager_run():
    class Bits(nn.Module):
        def forward(self, x, weight):
            return ((x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32) * 2,)

    verdict = check(lambda x, w: (x.abs() * 2,), model=Bits())
    assert verdict.ok and "no fp64 reference" in verdict.reason
    assert not check(lambda x, w: (x * 2,), model=Bits()).ok


def test_no_inputs_and_a_broken_baseline_are_errors():
    gm, inputs, baseline = setup()
    with pytest.raises(ValueError, match="at least one set"):
        verify(baseline, baseline, gm, [], {1}, FP32)
    with pytest.raises(RuntimeError, match="no kernel image"):
        verify(baseline, raises, gm, [inputs], {1}, FP32)


# ---------------------------------------------------------------- fresh inputs


def same_form(old, new):
    return (old.shape, old.stride(), old.storage_offset(), old.dtype, old.device) == (
        new.shape,
        new.stride(),
        new.storage_offset(),
        new.dtype,
        new.device,
    )


def test_fresh_inputs_have_the_same_form_and_other_values():
    base = torch.randn(40)
    inputs = [
        torch.randn(4, 6).t(),
        torch.randint(0, 100, (5, 7)),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        base[3:11],
        torch.randn(3, 8).bfloat16(),
        torch.randn(6, dtype=torch.complex64),
        torch.randn(5, 1).expand(5, 4),
    ]
    before = clone_inputs(inputs, set())
    fresh = fresh_inputs(inputs, set(), 0)
    for old, new in zip(inputs, fresh, strict=True):
        assert same_form(old, new)
        assert not torch.equal(old, new)
    assert all(map(torch.equal, inputs, before))
    assert torch.equal(fresh[1].flatten().sort().values, inputs[1].flatten().sort().values)
    for index in (0, 2, 3, 4):
        assert inputs[index].min() <= fresh[index].min() and fresh[index].max() <= inputs[index].max()
    assert torch.equal(fresh[6][:, :1].expand(5, 4), fresh[6])


def test_fresh_inputs_depend_on_the_seed_alone():
    inputs = [torch.randn(10), torch.arange(10)]
    state = torch.get_rng_state()
    first, again, other = (fresh_inputs(inputs, set(), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])


def test_parameters_and_plain_values_are_handed_on():
    weight = nn.Parameter(torch.randn(3))
    x = torch.randn(3)
    fresh = fresh_inputs([weight, 5, x, None], {0}, 0)
    assert fresh[0] is weight and fresh[1] == 5 and fresh[3] is None
    assert not torch.equal(fresh[2], x)


def test_aliasing_is_kept_and_values_stay_with_the_tensors_that_hold_them():
    packed = torch.cat([torch.randint(1000, 2000, (20,)), torch.randint(0, 10, (20,))])
    tokens, positions = packed[:20], packed[20:]
    fresh = fresh_inputs([tokens, positions], set(), 0)
    assert storage_groups(fresh) == [[0, 1]]
    assert int(fresh[0].min()) >= 1000 and int(fresh[1].max()) < 10
    assert not torch.equal(fresh[0], tokens)

    base = torch.randn(12)
    whole, part = fresh_inputs([base, base[4:8]], set(), 0)
    assert torch.equal(whole[4:8], part)
    assert not torch.equal(part, base[4:8])


def test_overlapping_windows_stay_windows():
    windows = torch.randn(10).unfold(0, 4, 1)
    (fresh,) = fresh_inputs([windows], set(), 0)
    assert same_form(windows, fresh)
    assert torch.equal(fresh[1:, :-1], fresh[:-1, 1:]) and not torch.equal(fresh, windows)


def test_constant_tensors_are_scaled_if_they_are_floats():
    ones, three, zeros = torch.ones(50), torch.full((4,), 3), torch.zeros(3)
    fresh = fresh_inputs([ones, three, zeros, torch.full((2,), torch.finfo(torch.float32).max)], set(), 0)
    assert fresh[0].unique().numel() > 10 and fresh[0].min() >= 0.5 and fresh[0].max() <= 1.5
    assert torch.equal(fresh[1], three) and torch.equal(fresh[2], zeros)
    assert fresh[3].isfinite().all()


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(8, 8).tril().bool(),
        torch.ones(8, 8).tril().long(),
        torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf),
        torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), torch.finfo(torch.float32).min),
    ],
)
def test_masks_keep_their_two_values_and_no_row_becomes_empty(mask):
    (fresh,) = fresh_inputs([mask[None, None].expand(2, 1, 8, 8)], set(), 0)
    assert torch.equal(fresh[0], fresh[1])
    assert set(fresh.flatten().tolist()) == set(mask.flatten().tolist())
    assert not torch.equal(fresh[0, 0], mask)
    value = mask[0, 0]
    before, after = (m == value for m in (mask, fresh[0, 0]))
    assert sorted(before.sum(-1).tolist()) == sorted(after.sum(-1).tolist())


def test_offsets_into_memory_stay_and_position_numbers_move():
    offsets, positions = torch.tensor([0, 5, 5, 12]), torch.arange(12)
    fresh = fresh_inputs([offsets, positions, torch.tensor([0, 9])], set(), 0)
    assert torch.equal(fresh[0], offsets) and torch.equal(fresh[2], torch.tensor([0, 9]))
    assert not torch.equal(fresh[1], positions) and torch.equal(fresh[1].sort().values, positions)


def test_infinities_and_zeros_survive():
    x = torch.tensor([0.0, math.inf, -math.inf, 1.0, 2.0, math.nan, -3.0, 0.0])
    (fresh,) = fresh_inputs([x], set(), 0)
    assert int((fresh == 0).sum()) == 2 and int(fresh.isinf().sum()) == 2 and int(fresh.isnan().sum()) == 1
    finite = fresh[fresh.isfinite()]
    assert finite.min() >= -3.0 and finite.max() <= 2.0
