"""Training through the backend: forward and backward measured, labelled, rewritten and verified together."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from forced_passes import TORCHS_KERNELS, always_faster, given_ceilings, last, relative
from rich.console import Console
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import fxopt
from fxopt import registry
from fxopt.labels import Axis
from fxopt.registry import Candidate, PassContext, RuntimePass, Stage
from fxopt.report import terminal
from fxopt.report.model import Report
from fxopt.testing.stand_ins import DoubledNegation
from fxopt.verify import Precision
from passes.split_precision_gemm import SplitPrecisionGemm
from profiler_core import roofline
from profiler_core.collect import kineto

aten = torch.ops.aten
QUICK: dict[str, Any] = {"pairs": 6, "iterations": 2, "warmup": 1, "verify_inputs": 1, "on_error": "raise"}


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings and timing that are given: no test here is about how fast anything is. Every candidate is faster."""
    given_ceilings(monkeypatch)
    always_faster(monkeypatch)
    monkeypatch.setattr(roofline, "matrix_units", lambda device: {"bfloat16"})


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Normalised(nn.Module):
    """A convolution, whose bias has no gradient but roundoff, before a batch normalisation in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.convolution(x)))


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x + F.dropout(self.out(mixed), self.dropout, self.training)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (Perceptron, (16, 32)),
    "normalised": (Normalised, (4, 3, 8, 8)),
    "attention": (Attention, (2, 16, 32)),
}


def backend(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="profile_guided", options={**QUICK, **options})


def gradients(model: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients, of parameters and input, of one step whose loss weighs each element otherwise."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = run(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    (y * weights).sum().backward()
    assert x.grad is not None
    found = {"output": y.detach(), "input": x.grad}
    return found | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def exact(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    wide = copy.deepcopy(model).double()
    return gradients(wide, wide, x.double())


@dataclass(frozen=True)
class WrongGradient(DoubledNegation):
    """Right in the forward, and wrong in the backward alone: gradients are a thousandth too large."""

    name: ClassVar[str] = "wrong_gradient"

    def candidates(self, graph: fx.Graph, context: PassContext) -> Any:
        for node in graph.nodes:
            if node.op == "placeholder" and node.name.startswith("tangents"):
                yield Candidate(node.name)

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        users = list(node.users)
        with graph.inserting_before(users[0]):
            larger = graph.call_function(aten.mul.Tensor, (node, 1.001))
        for user in users:
            user.replace_input_with(node, larger)


@pytest.fixture
def negated() -> Any:
    """Options under which a pass is kept that changes nothing."""
    registry.register(DoubledNegation)
    yield {"passes": ["doubled_negation"], **TORCHS_KERNELS}
    registry.unregister("doubled_negation")


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_bf16_products_in_forward_and_backward_are_kept_and_right(case):
    make, shape = CASES[case]
    model, x = make(), torch.randn(shape)
    before = copy.deepcopy(model)
    kernels = {} if case == "perceptron" else TORCHS_KERNELS  # Inductor's own take seconds to compile
    fast = backend(model, precision="bf16", passes=["promote_matmul_precision"], **kernels)
    state = torch.get_rng_state()
    got = gradients(model, fast, x)
    graph = last()
    assert graph.passes == ["promote_matmul_precision"], [c.reason for c in graph.candidates]
    assert torch.equal(torch.get_rng_state(), state)
    true, plain = exact(before, x), gradients(before, torch.compile(before), x)
    assert got.keys() == true.keys() == plain.keys()
    for name, value in got.items():
        if name == "convolution.bias":
            assert value.abs().max() < 1e-2 * got["convolution.weight"].abs().max()
            continue
        assert relative(value, true[name]) < 3e-2, name
        assert value.dtype == torch.float32 and value.stride() == plain[name].stride()
    assert max(relative(value, plain[name]) for name, value in got.items()) > 1e-4, "nothing was computed in bf16"
    for (name, mine), theirs in zip(model.named_buffers(), before.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2, msg=name)


@dataclass(frozen=True)
class SplitOnCpu(SplitPrecisionGemm):
    """With the operators' arithmetic in torch, for the kernel needs a GPU."""

    name: ClassVar[str] = "split_on_cpu"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)


@pytest.mark.parametrize("case", ["perceptron", "attention"])
def test_products_of_forward_and_backward_are_split_and_as_accurate_as_fp32(case, monkeypatch):
    monkeypatch.setattr(roofline, "matrix_units", lambda device: {"float16"})
    registry.register(SplitOnCpu)
    try:
        make, shape = CASES[case]
        model, x = make(), torch.randn(shape)
        before = copy.deepcopy(model)
        fast = backend(model, passes=["split_on_cpu"], **TORCHS_KERNELS)
        got = gradients(model, fast, x)
    finally:
        registry.unregister("split_on_cpu")
    graph = last()
    assert graph.passes == ["split_on_cpu"], [c.reason for c in graph.candidates]
    (candidate,) = graph.candidates
    assert [report.rewritten for report in candidate.reports] == [6], "two forward, and two for each of them backward"
    true, plain = exact(before, x), gradients(before, torch.compile(before), x)
    for name, value in got.items():
        assert relative(value, true[name]) <= 4 * relative(plain[name], true[name]), name
    assert any(not torch.equal(value, plain[name]) for name, value in got.items()), "nothing was split"


def test_the_report_has_forward_and_backward_and_says_which_is_which():
    """The gradients of a product belong to the line and the module that it was written in."""
    model, x = Perceptron(), torch.randn(16, 32)
    gradients(model, backend(model, passes=["freeze_weights", "merge_projections", "onednn_linear"]), x)
    graph = last()
    assert graph.source == "tuned" and graph.decision == "baseline"
    profile = graph.profile
    assert profile is not None and profile.attributed_share > 0.95
    assert profile.attributed_ns + profile.unattributed_ns == profile.total_ns
    forward, backward = (profile.nodes[profile.nodes["graph"].str.contains("backward") == b] for b in (False, True))
    assert list(forward.loc[forward["target"].str.startswith("aten.addmm"), "module_path"]) == ["up", "down"]
    products = backward[backward["target"].str.startswith("aten.mm")]
    assert sorted(products["module_path"]) == ["down", "down", "up", "up"]
    assert set(products["source"]) == {"return self.down(F.gelu(self.up(x)))"} and (products["time_ns"] > 0).all()
    labelled = {(label.backward, name) for label in graph.labels for name in label.nodes}
    assert {(False, "addmm"), (True, "mm")} <= labelled
    assert any("forward and backward: gradients of 5 inputs" in message for message in graph.messages)
    refused = {line.partition(":")[0] for line in graph.out_of_reach}
    assert refused == {"freeze_weights", "merge_projections", "onednn_linear"}, "what folds weights"
    assert Report.from_json(Report([graph]).to_json()).graphs[0].labels == graph.labels
    text = io.StringIO()
    terminal.render(Report([graph]), Console(file=text, width=100))
    assert all(part in text.getvalue() for part in ("forward ", "backward ", "backward of up", "(backward),"))


def test_a_pass_that_breaks_a_gradient_alone_is_caught():
    registry.register(WrongGradient)
    try:
        model, x = Perceptron(), torch.randn(16, 32)
        got = gradients(model, backend(model, passes=["wrong_gradient"], **TORCHS_KERNELS), x)
    finally:
        registry.unregister("wrong_gradient")
    (candidate,) = last().candidates
    assert last().decision == "baseline" and candidate.outcome == "rejected"
    assert candidate.reason.startswith("wrong: input set 0: gradient of input 0: relative L2 error 0.001 over the")
    same(got, gradients(model, model, x))


@dataclass(frozen=True)
class Counting(RuntimePass):
    """Counts the calls of what was compiled, forward and backward."""

    name: ClassVar[str] = "counting"
    answers: ClassVar[frozenset[Axis]] = frozenset(Axis)
    stage: ClassVar[Stage] = Stage.RUNTIME
    precision: ClassVar[Precision] = Precision.FP32
    gradients: ClassVar[bool] = True
    seen: ClassVar[list[str]] = []

    def wrap(self, fn: Any, inputs: Any, compiled: Any, context: PassContext) -> Any:
        return lambda *args: (self.seen.append("forward"), fn(*args))[1]

    def wrap_backward(self, fn: Any) -> Any:
        return lambda args: (self.seen.append("backward"), fn(args))[1]


def test_a_runtime_pass_is_around_forward_and_backward():
    registry.register(Counting)
    try:
        model, x = Perceptron(), torch.randn(16, 32)
        fast = backend(model, passes=["counting"], **TORCHS_KERNELS)
        first = gradients(model, fast, x)
        assert last().passes == ["counting"], [c.reason for c in last().candidates]
        Counting.seen.clear()
        same(gradients(model, fast, x), first)
        assert Counting.seen == ["forward", "backward"]
        torch._dynamo.reset()
        Counting.seen.clear()
        same(gradients(model, fast, x), first)
        assert last().source == "plan" and Counting.seen == ["forward", "backward"]
    finally:
        registry.unregister("counting")


def test_a_plan_is_used_without_measuring(negated, monkeypatch):
    model, x = Perceptron(), torch.randn(16, 32)
    first = gradients(model, backend(model, **negated), x)
    assert last().source == "tuned" and last().passes == ["doubled_negation"]
    monkeypatch.setattr(kineto, "measure", lambda *args, **kwargs: pytest.fail("measured although there is a plan"))
    for mode in ("tune", "apply"):
        torch._dynamo.reset()
        with torch.no_grad():
            model.up.weight.add_(0)  # training goes on: other weights, and the same plan
        same(gradients(model, backend(model, mode=mode, **negated), x), first)
        assert last().source == "plan" and last().candidates[0].reports[0].rewritten == 6
    loss = backend(model, mode="apply", **negated)(x).sum()
    loss.backward(retain_graph=True)  # by code that AOTAutograd's cache served, too
    loss.backward()
    with torch.no_grad():
        backend(model, mode="apply", **negated)(x)
    assert last().source == "apply", "without gradients it is another graph"


def test_measuring_touches_nothing_of_the_users(negated):
    """Buffers, gradients, hooks and random numbers are as after one plain call."""
    model, x = nn.Sequential(Normalised(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(512, 4)), torch.randn(4, 3, 8, 8)
    plain = copy.deepcopy(model)
    called = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: called.append("gradient"))
        parameter.register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated"))
    run, expected = backend(model, **negated), torch.compile(plain, options=TORCHS_KERNELS)
    torch.manual_seed(3)
    y = run(x)
    state = torch.get_rng_state()
    assert last().passes == ["doubled_negation"] and not called
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.manual_seed(3)
    torch.testing.assert_close(y, expected(x))
    assert torch.equal(state, torch.get_rng_state())
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    y.sum().backward()
    assert sorted(called) == ["accumulated"] * 6 + ["gradient"] * 6


def test_a_training_loop_is_eagers(negated):
    """AdamW steps, accumulated gradients, evaluation between them, graphs kept for a second backward (which plain
    Inductor refuses where its caches hold code for a single one).
    """

    def train(model: nn.Module, run: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            for half in range(2):
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + half))
                loss = run(x).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                run(x)
        return [p.detach() for p in model.parameters()]

    model = Perceptron()
    plain = copy.deepcopy(model)
    mine = train(model, backend(model, **negated))
    sources = [graph.source for graph in fxopt.recent_reports()[-2:]]
    assert sources == ["tuned", "tuned"], "one graph with gradients, one without"
    for a, b in zip(mine, train(plain, plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_checkpointed_layers(negated):
    class Checkpointed(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(checkpoint(lambda x: F.gelu(self.up(x)), x, use_reentrant=False))

    model, x = Checkpointed(), torch.randn(16, 32)
    got = gradients(model, backend(model, **negated), x)
    assert last().passes == ["doubled_negation"]
    same(got, gradients(model, model, x))


def test_a_second_derivative_fails_as_it_does_with_plain_inductor(negated):
    model, x = Perceptron(), torch.randn(16, 32, requires_grad=True)
    for run in (backend(model, **negated), torch.compile(model, options=TORCHS_KERNELS)):
        (gradient,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            gradient.sum().backward()


def test_symbolic_sizes_compile_once(negated):
    model = Perceptron()
    run = backend(model, **negated)
    torch._dynamo.mark_dynamic(x := torch.randn(16, 32), 0)
    with fxopt.collect_reports() as graphs:
        same(gradients(model, lambda y: run(torch._dynamo.mark_dynamic(y, 0) or y), x), gradients(model, model, x))
        assert last().passes == ["doubled_negation"], last().messages
        other = torch.randn(24, 32)
        same(gradients(model, run, other), gradients(model, model, other))
    assert len(graphs) == 1


def test_a_graph_that_writes_to_what_it_differentiates_is_left_alone(negated):
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin()

    leaf = torch.randn(8, requires_grad=True)
    torch.compile(doubled, backend="profile_guided", options={**QUICK, **negated})(leaf * 1).sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * (2 * leaf).cos().detach())
    assert last().source == "skipped" and "the graph writes to input 0" in last().messages[0]


@pytest.mark.parametrize("reduce", [lambda y: y.sum(), lambda y: y.sum(0)], ids=["sum", "of rows"])
def test_a_backward_of_nothing_but_views_is_measured_as_one_that_launches_nothing(reduce):
    y = torch.randn(5, 8, requires_grad=True)
    backend(reduce, passes=["channels_last"])(y).sum().backward()
    assert torch.equal(y.grad, torch.ones(5, 8))
    profile = last().profile
    assert last().source == "tuned" and set(profile.kernels["nodes"].explode()) == {"sum_1"}
