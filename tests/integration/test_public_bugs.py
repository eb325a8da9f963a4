"""Faults that were publicly reported of torch and its backends, each with the outcome that is right.

Passes are forced on (`forced_passes`), so that each case meets the rewrites that could bring the fault back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from forced_passes import EXACT, FOLDING, TORCHS_KERNELS, compiled, force, last, optimized, relative, rewritten
from torch import nn

import fxopt
from fxopt import registry
from fxopt.labels import Axis
from fxopt.registry import Candidate, GraphPass, Stage
from fxopt.verify import Precision
from fxopt.warning import FxoptWarning

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


# -- attention --------------------------------------------------------------------------------------------------------


def test_keys_that_reach_the_product_through_a_permutation(monkeypatch):
    """A rewrite to fused attention took a key that came as permute(0, 2, 3, 1) for one that came as transpose(-2, -1),
    and ran, where sizes are equal, with dimensions mixed up. Right: eager's result.
    """
    force(monkeypatch, *EXACT, "promote_matmul_precision")

    def attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ w).view(8, 8, 3, 8, 8).unbind(2)  # [batch, length, heads, width], all 8
        scores = q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) / math.sqrt(8)
        return (scores.softmax(-1) @ v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3).reshape(8, 8, 64)

    x, w = torch.randn(8, 8, 64), torch.randn(64, 192) / 8
    with torch.no_grad():
        assert relative(compiled(attention, {"precision": "bf16", **TORCHS_KERNELS})(x, w), attention(x, w)) < 2e-2
    assert rewritten(last())["promote_matmul_precision"] == 3


def test_causal_attention_of_one_or_two_queries_and_five_keys(monkeypatch):
    """`is_causal` was aligned to the last key by some kernels and to the first by others, and a mask that equals tril()
    was taken for it. Right: torch's own definition, tril() from the upper left; only a square mask becomes `is_causal`.
    """
    force(monkeypatch, *EXACT)
    k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    queries = [torch.randn(2, 4, length, 8) for length in (1, 2, 5)]

    def attention(*queries: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for q in queries:
            mask = torch.ones(q.shape[-2], 5, dtype=torch.bool).tril()
            found.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            found.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return found

    with torch.no_grad():
        for got, expected in zip(compiled(attention, TORCHS_KERNELS)(*queries), attention(*queries), strict=True):
            torch.testing.assert_close(got, expected)
    assert rewritten(last())["causal_mask"] == 1
    (report,) = [r for r in last().candidates[0].reports if r.name == "causal_mask"]
    assert [reason for _, reason in report.refused] == ["q_len 1 is not kv_len 5", "q_len 2 is not kv_len 5"]


def test_masked_attention_of_lengths_that_no_kernel_likes(monkeypatch):
    """Kernels that want a mask aligned to 8 or 16 elements read past it, or were handed a padded one, for kv_len 1, 7
    and 129. Right: the written-out softmax's result, whether the mask is an input or hides nothing and is dropped.
    """
    force(monkeypatch, *EXACT)
    lengths = (1, 7, 8, 129)
    q = torch.randn(2, 4, 3, 8)
    keys = [torch.randn(2, 2, 4, length, 8) for length in lengths]
    masks = [torch.rand(2, 1, 3, length) > 0.5 for length in lengths]
    for mask in masks:
        mask[..., -1] = True  # a row that sees nothing is NaN by definition

    def attention(q: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for (k, v), mask in zip(rest[:4], rest[4:], strict=True):
            found.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
            everything = torch.ones(3, k.shape[-2], dtype=torch.bool)
            found.append(F.scaled_dot_product_attention(q, k, v, attn_mask=everything))
        return found

    with torch.no_grad():
        got = compiled(attention, TORCHS_KERNELS)(q, *keys, *masks)
    for (k, v), mask, (masked, unmasked) in zip(keys, masks, zip(got[::2], got[1::2], strict=True), strict=True):
        scores = q @ k.transpose(-2, -1) / math.sqrt(8)
        torch.testing.assert_close(masked, scores.masked_fill(~mask, -math.inf).softmax(-1) @ v)
        torch.testing.assert_close(unmasked, scores.softmax(-1) @ v)
    assert rewritten(last())["causal_mask"] == len(lengths)


# -- writes to memory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tidy(GraphPass):
    """a * 2 becomes a + a, and then everything that nothing reads is removed."""

    name: ClassVar[str] = "tidy"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.MEMORY_BOUND})
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32

    def candidates(self, graph, context):
        yield from (Candidate(n.name) for n in graph.nodes if n.target is aten.mul.Tensor and n.args[1] == 2)

    def rewrite(self, graph, node, context):
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(aten.add.Tensor, (node.args[0], node.args[0])))

    def finish(self, graph, context):
        graph.eliminate_dead_code()


@dataclass(frozen=True)
class TidyLate(Tidy):
    name: ClassVar[str] = "tidy_late"
    stage: ClassVar[Stage] = Stage.POST_GRAD


@pytest.fixture
def registered() -> Iterator[Any]:
    known: list[str] = []

    def register(*classes: type[GraphPass]) -> None:
        known.extend(registry.register(cls).name for cls in classes)

    yield register
    for name in known:
        registry.unregister(name)


def test_a_write_through_a_diagonal_survives_passes_that_clean_up(monkeypatch, registered):
    """Nothing reads the result of `a.diagonal().add_(1)`, so passes that removed dead code removed the write.
    Right: the input, and what was computed on the way, are written.
    """
    registered(Tidy, TidyLate)

    def write(a: torch.Tensor) -> torch.Tensor:
        b = a * 2
        b.diagonal().add_(1)
        a.diagonal().add_(1)
        a[1:, 0] *= 2
        return b

    a = torch.randn(4, 4)
    mine, theirs = a.clone(), a.clone()
    force(monkeypatch, *EXACT, "tidy", "tidy_late")
    with torch.no_grad():
        assert torch.equal(compiled(write)(mine), write(theirs))
    assert torch.equal(mine, theirs) and not torch.equal(mine, a)
    assert rewritten(last())["tidy"] == 2


def test_inputs_that_come_to_overlap_while_one_is_written(monkeypatch):
    """Code compiled for tensors apart from each other ran for two that overlap as well, and what is compiled for
    overlapping ones loses the write, in plain Inductor to this day. Right: eager's result and memory, every time.
    """
    force(monkeypatch, *EXACT)

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b * 2

    calls = {
        "apart": lambda s: (s[:4], torch.ones(4)),
        "side by side": lambda s: (s[:4], s[4:]),
        "the same memory": lambda s: (s[:4], s[:4]),
        "overlapping": lambda s: (s[:4], s[2:6]),
        "one tensor": lambda s: (s,) * 2,
    }
    for order in (list(calls), list(calls)[::-1]):
        torch._dynamo.reset()
        run = compiled(step)
        for name in (*order, *order):
            mine, theirs = torch.arange(8.0), torch.arange(8.0)
            with torch.no_grad():
                assert torch.equal(run(*calls[name](mine)), step(*calls[name](theirs))), (order, name)
            assert torch.equal(mine, theirs), (order, name)
    assert any("overlaps with another one" in line for report in fxopt.recent_reports() for line in report.messages)


def test_strides_that_a_pass_padded_do_not_reach_an_output(monkeypatch, registered):
    """Products padded to aligned sizes were sliced and returned with the padded rows' strides, so that a later view()
    raised. Right: the strides of eager; a pass that leaks its own is refused, and Inductor's padding stays inside.
    """

    @dataclass(frozen=True)
    class Leaking(Tidy):
        name: ClassVar[str] = "leaking"

        def candidates(self, graph, context):
            yield from (Candidate(n.name) for n in graph.nodes if n.target is aten.mm.default)

        def rewrite(self, graph, node, context):
            a, b = node.args
            with graph.inserting_before(node):
                wide = graph.call_function(aten.constant_pad_nd.default, (b, [0, 3], 0.0))
                product = graph.call_function(aten.mm.default, (a, wide))
                node.replace_all_uses_with(graph.call_function(aten.slice.Tensor, (product, 1, 0, 5)))

    registered(Leaking)
    a, b = torch.randn(4, 8), torch.randn(8, 5)

    def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a @ b, (a + 1).t()

    force(monkeypatch, "leaking")
    # What Inductor pads on a GPU alone, and then from 1024 elements on, it is made to pad here.
    padding = {"comprehensive_padding": True, "disable_padding_cpu": False, "padding_stride_threshold": 0}
    with torch.no_grad(), pytest.warns(FxoptWarning, match=r"leaking.*output 0.*stride"):
        got = compiled(product, {"on_error": "fallback", **padding})(a, b)
    for mine, theirs in zip(got, product(a, b), strict=True):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()
    assert last().source == "fallback"


# -- everything else --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_an_output_of_a_cuda_graph_is_kept_across_calls(monkeypatch):
    """A replay wrote into the memory of the result before it, which the caller still held. Right: each result stays."""
    force(monkeypatch, "cuda_graphs", device="cuda")
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda().eval()
    inputs = [torch.randn(8, 64, device="cuda") for _ in range(4)]
    run = compiled(model)
    with torch.no_grad():
        results = [run(x) for x in inputs]
        assert rewritten(last()) == {"cuda_graphs": 1}
        for x, result in zip(inputs, results, strict=True):
            torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("seeds_of", "source"), [("eager", "plan"), ("inductor", "plan"), ("inductor", "tuned")])
def test_dropout_under_a_seed(monkeypatch, seeds_of, source):
    """A backend that measured drew from the generator, so that a seeded run was another one with it than without.
    Right: plain Inductor's numbers under the same seed (eager's with `fallback_random`), and the same state afterwards.
    """
    if source == "plan":
        force(monkeypatch, *EXACT)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.1)), torch.randn(4, 16)
    options = {"fallback_random": seeds_of == "eager"}
    quick = {"pairs": 6, "iterations": 2, "warmup": 1, "passes": []} if source == "tuned" else {}

    def seeded(run: Any) -> list[torch.Tensor]:
        torch.manual_seed(5)
        with torch.no_grad():
            return [run(x), run(x), torch.rand(3)]

    expected = seeded(model if seeds_of == "eager" else torch.compile(model, options=options))
    torch._dynamo.reset()
    got = seeded(compiled(model, {**options, **quick}))
    assert last().source == source
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not torch.equal(got[0], got[1])


@torch.library.custom_op("fxopt_public_bugs::uncompilable", mutates_args=())
def uncompilable(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


@uncompilable.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True)
class LateFailure(Tidy):
    """What the backward of sin(x) computes becomes an operator that Inductor fails on."""

    name: ClassVar[str] = "late_failure"
    stage: ClassVar[Stage] = Stage.POST_GRAD

    def candidates(self, graph, context):
        yield from (Candidate(n.name) for n in graph.nodes if n.target is aten.cos.default)

    def rewrite(self, graph, node, context):
        with graph.inserting_before(node):
            new = graph.call_function(torch.ops.fxopt_public_bugs.uncompilable.default, node.args)
        node.replace_all_uses_with(new)


def test_a_backward_that_compiles_lazily_and_fails(monkeypatch, registered):
    """A backward is compiled when it is first run, outside of whatever would have fallen back for the forward: the
    user's `backward()` raised for the sake of a rewrite. Right: it is noticed at the first call, with one warning, and
    output and gradient are plain Inductor's.
    """
    from torch._inductor import lowering

    def fails(*args: Any) -> Any:
        raise RuntimeError("no code for this backward")

    registered(LateFailure)
    force(monkeypatch, "late_failure")
    monkeypatch.setitem(lowering.lowerings, torch.ops.fxopt_public_bugs.uncompilable.default, fails)
    x = torch.randn(8, requires_grad=True)
    with pytest.warns(FxoptWarning, match="no code for this backward") as caught:
        y = compiled(torch.sin, {"on_error": "fallback"})(x)
    assert len([w for w in caught if issubclass(w.category, FxoptWarning)]) == 1
    y.sum().backward()
    torch.testing.assert_close(y, x.sin())
    torch.testing.assert_close(x.grad, x.cos())
    assert last().source == "fallback"


def test_a_recurrent_layer_in_the_middle(monkeypatch):
    """Dynamo leaves a model with an nn.LSTM to eager as a whole, or unrolls the layer into a product a step. Right:
    through torch.compile eager's result; through fxopt.optimize one graph, with the layer one call of the library.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.layer, self.after = nn.Linear(8, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.layer(F.relu(self.before(x)))[0])

    model, x = Model().eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(compiled(model, {"mode": "apply"})(x), expected)
        force(monkeypatch, *FOLDING)
        torch._dynamo.reset()
        fast = optimized(model, (x,), **TORCHS_KERNELS)
        torch.testing.assert_close(fast(x), expected)
    (graph,) = fast.report.graphs
    assert rewritten(graph)["freeze_weights"] == 8
    assert any("1 recurrent module(s)" in line for line in graph.messages) and not fast.report.eager_modules
