"""Forward and backward as one function, its fp64 reference, and how gradients are judged."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxopt import training
from fxopt.reference import reference
from fxopt.training import Gradients
from fxopt.verify import parse_precision, verify


def graph(fn) -> fx.GraphModule:
    return fx.symbolic_trace(fn)


def product(x, w):
    return (torch.tanh(x @ w), x.sum())


GRAPH = graph(product)
BOTH = Gradients(inputs=(0, 1), outputs=(0, 1), arguments=2)


@pytest.fixture
def given() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    return [x, w, *training.cotangents([torch.empty(5, 3), torch.empty(())])]


def test_gradients_follow_the_outputs(given):
    x, w, g, h = given
    *outputs, dx, dw = BOTH.of(GRAPH)(*given)
    torch.autograd.backward(product(x, w), (g, h))
    assert torch.equal(dx, x.grad) and torch.equal(dw, w.grad)
    for got, expected in zip(outputs, product(x, w), strict=True):
        assert torch.equal(got, expected)


def test_nothing_is_accumulated_and_no_hook_of_a_parameter_runs(given):
    called = []
    given[1].register_post_accumulate_grad_hook(lambda p: called.append("accumulated"))
    given[1].register_hook(lambda gradient: called.append("gradient"))
    BOTH.of(GRAPH)(*training.aliases(given))
    assert given[1].grad is None and not called
    alias = training.aliases(given)[1]
    assert alias.data_ptr() == given[1].data_ptr() and alias.is_leaf and alias.requires_grad


def test_an_input_that_no_output_depends_on_has_no_gradient():
    unused = Gradients((0, 1), (0,), 2)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert unused.of(lambda x, y: (x * 2,))(x, y, torch.ones(2))[2] is None


def test_cotangents_are_fixed_and_of_norm_one_whatever_the_size():
    state = torch.get_rng_state()
    outputs = [torch.empty(1000, 40), torch.empty((), dtype=torch.bfloat16), torch.empty(8, dtype=torch.complex64)]
    first, again = training.cotangents(outputs), training.cotangents(outputs)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert first[0].norm() == pytest.approx(1, rel=0.05) and abs(first[1]) >= 0.5
    assert [c.dtype for c in first] == [output.dtype for output in outputs]
    assert not torch.equal(first[0], training.cotangents(outputs, seed=1)[0])


def test_the_reference_of_a_gradient_is_fp64(given):
    truth = reference(GRAPH, given, BOTH)
    assert truth.note == "" and [value.dtype for value in truth.outputs] == [torch.float64] * 4
    wide = [value.detach().double() for value in given]
    x, w = (value.requires_grad_() for value in wide[:2])
    torch.autograd.backward(product(x, w), wide[2:])
    torch.testing.assert_close(truth.outputs[2:], [x.grad, w.grad], rtol=1e-14, atol=1e-15)
    assert given[0].grad is None


def judged(candidate, baseline, given, gradients, precision="fp32"):
    gm = graph(baseline)
    sets = [given]
    wrapped = gradients.of(candidate), gradients.of(baseline)
    return verify(*wrapped, gm, sets, (), parse_precision(precision), gradients=gradients)


class Off(torch.autograd.Function):
    """The identity, whose gradient is off by a factor."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


@pytest.mark.parametrize(("precision", "ok"), [("fp32", False), ("bf16", True), (1e-3, False)])
def test_a_wrong_gradient_fails_although_the_outputs_are_equal(given, precision, ok):
    verdict = judged(lambda x, w: product(x, Off.apply(w)), product, given, BOTH, precision)
    assert verdict.ok is ok
    if not ok:
        assert verdict.reason.startswith("input set 0: gradient of input 1: relative L2 error 0.01 over the limit")


def test_a_gradient_that_is_missing_fails(given):
    verdict = judged(lambda x, w: product(x, w.detach()), product, given, BOTH)
    assert not verdict.ok and "gradient of input 1: None" in verdict.reason


class Transposed(torch.autograd.Function):
    """The identity, whose gradient lies in memory the other way."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.t().contiguous().t()


def test_strides_of_a_gradient_are_nobodys_business(given):
    def candidate(x, w):
        return product(x, Transposed.apply(w))

    assert BOTH.of(candidate)(*given)[-1].stride() == (1, 4) != BOTH.of(product)(*given)[-1].stride()
    assert judged(candidate, product, given, BOTH).ok


def cancelling(x, b):
    """The bias has no gradient: the mean is taken off again."""
    y = x * 3.7 + b
    return (torch.tanh(y - y.mean(0)),)


@pytest.mark.parametrize(("noise", "ok"), [(1e-7, True), (1e-2, False)])
def test_a_gradient_that_cancels_is_judged_by_the_roundoff_of_the_baseline(noise, ok):
    torch.manual_seed(0)
    x, b = torch.randn(64, 8), torch.randn(8, requires_grad=True)
    given = [x, b, *training.cotangents([torch.empty(64, 8)])]
    only = Gradients((1,), (0,), 2)
    true, got = reference(graph(cancelling), given, only).outputs[-1], only.of(cancelling)(*given)[-1]
    assert true.norm() < 1e-3 * got.norm(), "what the baseline gives is noise"

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient + noise * torch.linspace(-1, 1, 8)

    verdict = judged(lambda x, b: cancelling(x, Noisy.apply(b)), cancelling, given, only, "bf16")
    assert verdict.ok is ok, verdict.reason
    assert "it cancels" in verdict.reason


@pytest.mark.parametrize(
    ("inputs", "mutated", "graphs", "why"),
    [
        ([torch.ones(2, requires_grad=True)], {0}, False, "writes to input 0"),
        ([torch.ones(2, requires_grad=True)], set(), True, "CUDA graphs were asked for"),
        ([torch.ones(2, requires_grad=True), torch.eye(2).to_sparse()], set(), False, "an input is sparse"),
        ([torch.ones(2, requires_grad=True), torch.ones(2)], {1}, False, ""),
    ],
)
def test_what_is_not_measured(inputs, mutated, graphs, why):
    assert why in training.refusal(inputs, mutated, graphs) and bool(why) == bool(
        training.refusal(inputs, mutated, graphs)
    )


def test_without_grad_mode_no_gradient_is_needed():
    x = torch.ones(2, requires_grad=True)
    assert training.needed([1, x, torch.ones(2)]) == (1,)
    with torch.no_grad():
        assert training.needed([x]) == ()
