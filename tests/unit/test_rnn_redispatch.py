"""rnn_redispatch and the operator that it puts in the place of torch's recurrent functions."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxopt import rnn, testing
from fxopt.labels import Axis
from fxopt.manager import consider
from fxopt.torch_api.rnn import BeforeAutograd, traced
from passes.rnn_redispatch import RnnRedispatch

KINDS = (nn.LSTM, nn.GRU, nn.RNN)


class Tagger(nn.Module):
    """A recurrent layer whose output and last states are all returned."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, ...]:
        out, last = self.layer(x, state)
        return (out, *last) if isinstance(last, tuple) else (out, last)


def graph_of(model: nn.Module, *inputs: Any, grad: bool = False) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph of `model`, and its inputs."""
    seen: list[Any] = []

    def backend(gm: fx.GraphModule, real: list[Any]) -> Callable[..., Any]:
        seen.append((gm, list(real)))
        return gm.forward

    torch._dynamo.reset()
    with traced(), torch.set_grad_enabled(grad):
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    torch._dynamo.reset()
    return seen[0]


def same(got: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "batch_first", "bidirectional", "bias"), list(itertools.product(KINDS, *[(False, True)] * 3))
)
def test_the_operator_gives_what_eager_gives_bit_for_bit(kind, batch_first, bidirectional, bias):
    options = {"bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}
    layer = kind(8, 16, 2, dropout=0.5, **options)  # dropout is off in evaluation mode
    model, x = Tagger(layer).eval(), torch.randn(3, 5, 8)
    state = torch.randn(4 if bidirectional else 2, 3 if batch_first else 5, 16)
    given = (state, torch.randn_like(state)) if kind is nn.LSTM else state
    for inputs in ((x,), (x[0],), (x, given)):
        gm, real = graph_of(model, *inputs)
        (node,) = rnn.nodes(gm.graph)
        assert rnn.refusal(node) in ("", "gradients are on")
        with torch.no_grad():
            assert not rnn.refusal(node)
            rnn.rewrite(node)
            gm.recompile()
            gm.graph.lint()
            assert same(gm(*real), model(*inputs))
    assert [n.name for n in rnn.nodes(gm.graph) if rnn.is_rnn(n)]


def test_projected_hidden_states_and_packed_weights_are_the_same_bits():
    model, x = Tagger(nn.LSTM(8, 16, proj_size=4)).eval(), torch.randn(5, 3, 8)
    with torch.no_grad():
        gm, real = graph_of(model, x)
        assert rnn.to_operators(gm) == (1, [])
        assert same(gm(*real), model(x))
        model = Tagger(nn.GRU(8, 16, 2)).eval()
        gm, real = graph_of(model, x)
        rnn.rewrite(rnn.nodes(gm.graph)[0], pack=True)
        gm.recompile()
        assert same(gm(*real), model(x))


def test_the_fake_operator_tells_the_truth():
    layer, x = nn.LSTM(8, 16, 2, bidirectional=True).eval(), torch.randn(5, 3, 8)
    weights = [w.detach() for w in layer._flat_weights]
    states = [torch.randn(4, 3, 16)] * 2
    flat = rnn.PACK(weights, torch.float32, "lstm", True, 2, True)
    tests = ("test_schema", "test_faketensor")
    for args in ((x, False), (x.transpose(0, 1), True)):
        call = (args[0], states, weights, flat, "lstm", True, 2, True, args[1], "")
        torch.library.opcheck(rnn.RNN, call, test_utils=tests)
    torch.library.opcheck(rnn.PACK, (weights, torch.float16, "lstm", True, 2, True), test_utils=tests)


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_tf32_is_allowed_within_one_call_alone(before):
    settings: Any = torch.backends.cudnn
    old = settings.rnn.fp32_precision
    try:
        settings.rnn.fp32_precision = before
        with rnn._tf32():
            assert settings.rnn.fp32_precision == "tf32"
        assert settings.rnn.fp32_precision == before
        with pytest.raises(KeyError), rnn._tf32():
            raise KeyError
        assert settings.rnn.fp32_precision == before
    finally:
        settings.rnn.fp32_precision = old


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_half_precision_keeps_fp32_outside_and_rounds_inside(compute):
    model, x = Tagger(nn.GRU(8, 16, 2)).eval(), torch.randn(5, 3, 8)
    gm, real = graph_of(model, x)
    (node,) = rnn.nodes(gm.graph)
    with torch.no_grad():
        rnn.rewrite(node, compute)
        gm.recompile()
        got, expected = gm(*real), model(x)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float32
        assert 0 < (a - b).norm() / b.norm() < 3e-2


def test_what_is_finite_stays_finite_in_fp16():
    model, x = Tagger(nn.GRU(8, 16)).eval(), torch.full((5, 3, 8), 1e5)
    gm, real = graph_of(model, x)
    with torch.no_grad():
        rnn.rewrite(rnn.nodes(gm.graph)[0], "fp16")
        gm.recompile()
        assert all(out.isfinite().all() for out in gm(*real))


def considered(p: RnnRedispatch, model: nn.Module, *inputs: Any, grad: bool = False, **fields: Any) -> Any:
    gm, real = graph_of(model, *inputs, grad=grad)
    labels = fields.pop("labels", testing.labels(gm, Axis.LAUNCH_BOUND))
    context = testing.context(p, labels=labels, precision="bf16", **fields)
    with torch.set_grad_enabled(grad):
        return gm, context, *consider(p, gm, real, context)


def test_an_unrolled_layer_is_found_by_the_labels_of_its_steps():
    model, x = Tagger(nn.GRU(8, 16)).eval(), torch.randn(5, 3, 8)
    gm, _ = graph_of(model, x)
    steps = testing.labels(gm, Axis.MEMORY_BOUND, nodes=["gru"])
    for source, matched in (("gru", 1), ("linear", 0)):
        origins = {"gru": (source,)}
        *_, report = considered(RnnRedispatch(), model, x, labels=steps, origins=origins)
        assert report.matched == matched
    assert report.refused == (("gru", "no label on what it became"),)


def test_the_rewrite_runs_in_inductors_slot_after_what_a_user_has_put_there():
    ran: list[Any] = []
    p = RnnRedispatch()
    gm, context, accepted, _ = considered(p, Tagger(nn.GRU(8, 16)).eval(), torch.randn(5, 3, 8))

    def custom(p: RnnRedispatch) -> Any:
        return p.configure(accepted, context).patches[BeforeAutograd.OPTION]

    assert len({custom(RnnRedispatch(compute)).uuid() for compute in ("", "bf16")}) == 2
    with torch._inductor.config.patch({BeforeAutograd.OPTION: ran.append}):
        both = custom(p)
    both(gm.graph)
    assert ran == [gm.graph] and all(map(rnn.is_rnn, rnn.nodes(gm.graph)))
    assert both.uuid() is None, "what the user's pass does is not known"


@pytest.mark.parametrize(
    ("because", "compute", "make"),
    [
        ("it is in training mode", "", lambda: nn.GRU(8, 16).train()),
        ("its weights are not float32 inputs of the graph", "bf16", lambda: nn.GRU(8, 16).double().eval()),
        ("it projects its hidden state: its weights", "bf16", lambda: nn.LSTM(8, 16, proj_size=4).eval()),
        ("it is on the library's kernels already", "", lambda: nn.LSTM(8, 16).eval()),
    ],
)
def test_what_is_left_alone(because, compute, make):
    layer = make()
    x = torch.randn(5, 3, 8, dtype=next(layer.parameters()).dtype)
    model = Tagger(layer)
    *_, accepted, report = considered(RnnRedispatch(compute), model, x)
    assert not accepted and because in report.refused[0][1]


def test_gradients_and_autocast_are_refused():
    model, x = Tagger(nn.GRU(8, 16)).eval(), torch.randn(5, 3, 8)
    *_, report = considered(RnnRedispatch(), model, x, grad=True)
    assert report.refused[0][1] == "gradients are on"
    with torch.autocast("cpu", torch.bfloat16):
        *_, report = considered(RnnRedispatch(), model, x)
    assert report.refused[0][1] == "autocast is on"


def test_weights_that_lie_in_another_order_are_packed_by_their_values():
    """One that a model has transposed is not contiguous; in one piece of memory it is."""
    layer, x, h = nn.GRU(8, 4).eval(), torch.randn(3, 2, 8), torch.zeros(1, 2, 4)
    held = [w.detach() for w in layer.all_weights[0]]
    turned = [held[0].t().contiguous().t(), *held[1:]]
    given = ("gru", True, 1, False)
    flat = rnn.PACK(turned, torch.float32, *given)
    with torch.no_grad():
        got, expected = rnn.RNN(x, [h], turned, flat, *given, False, ""), layer(x, h)
    assert not turned[0].is_contiguous() and all(map(torch.equal, got, expected))


def test_a_packed_sequence_is_refused():
    graph = fx.Graph()
    data, sizes, state, weight = map(graph.placeholder, ("data", "sizes", "state", "weight"))
    with torch.no_grad():
        node = graph.call_function(torch.gru, (data, sizes, state, [weight] * 4, True, 1, 0.0, False, False))
        assert rnn.refusal(node) == "its input is a packed sequence"


@pytest.mark.parametrize(
    ("precision", "device", "tried"),
    [
        ("fp32", "cuda", ["split", ""]),
        ("tf32", "cuda", ["split", "tf32", ""]),
        ("bf16", "cuda", ["split", "tf32", "fp16", "bf16", ""]),
        (1e-4, "cuda", ["split", "tf32", "fp16", ""]),
        (1e-3, "cuda", ["split", "tf32", "fp16", "bf16", ""]),
        (1.5e-5, "cuda", ["split", ""]),
        ("tf32", "cpu", [""]),
        ("bf16", "cpu", ["bf16", ""]),
    ],
)
def test_the_class_says_what_is_tried(precision, device, tried, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())  # as if Triton were there
    context = testing.context(RnnRedispatch(), precision=precision, device=device, session=False)
    assert [p.compute for p in RnnRedispatch().variants(context)] == tried


def test_a_session_on_a_cpu_has_only_the_precision_to_choose():
    context = testing.context(RnnRedispatch(), precision="bf16", session=True)
    assert not RnnRedispatch().applicable(context), "one of its variants is for this graph"
    assert [p.compute for p in RnnRedispatch().variants(context)] == ["bf16"]


def test_a_graph_without_recurrent_layers_does_not_concern_it():
    p = RnnRedispatch()
    assert not p.concerns(testing.context(p, origins={"mm": ("linear",)}))
    assert p.concerns(testing.context(p, origins={"mm": ("linear",), "tanh": ("lstm_1",)}))
    assert p.concerns(testing.context(p)), "nothing is known of where the nodes come from"


def test_graphs_where_it_has_no_business_are_told_so_before_anything_is_compiled():
    p = RnnRedispatch()
    for fields, because in (
        ({"grad": True}, "gradients are on"),
        ({"session": True, "precision": "fp32"}, "on the library's kernels already"),
    ):
        assert because in p.applicable(testing.context(p, **{"session": False, **fields}))
    assert "needs precision='bf16'" in RnnRedispatch("fp16").applicable(testing.context(p, device="cuda"))
    assert "cuDNN's" in RnnRedispatch("tf32").applicable(testing.context(p, precision="bf16"))
    plain = testing.context(p, precision="bf16", matrix_units=frozenset())
    assert "no bf16 matrix units" in RnnRedispatch("bf16").applicable(plain)
    with pytest.raises(ValueError, match="compute='fp8'"):
        RnnRedispatch("fp8")


@pytest.mark.parametrize("compute", ["", "bf16"])
def test_compiled_code_calls_the_operator_and_gives_the_same_numbers(compute):
    from fxopt.torch_api import inductor

    model, x = Tagger(nn.GRU(8, 16, 2)).eval(), torch.randn(5, 3, 8)
    p = RnnRedispatch(compute)
    gm, real = graph_of(model, x)
    context = testing.context(p, labels=testing.labels(gm, Axis.LAUNCH_BOUND), precision="bf16")
    with torch.no_grad():
        accepted, _ = consider(p, gm, real, context)
        patches = p.configure(accepted, context).patches
        freeze = frozenset(i for i, value in enumerate(real) if isinstance(value, nn.Parameter))
        compiled = inductor.compile_graph(gm, real, patches=patches, freeze=freeze, capture=True)
        got, expected = compiled.flat(real)(*real), model(x)
    assert p.took_effect(compiled, accepted, context) == 1
    assert RnnRedispatch("bf16" if not compute else "").took_effect(compiled, accepted, context) == 0
    assert same(got, expected) if not compute else torch.allclose(got[0], expected[0], atol=2e-2)
    called = {node.target for node in compiled.post_grad.graph.nodes}
    assert rnn.RNN in called
    assert rnn.PACK not in called, "frozen weights are laid out once"


# ---------------------------------------------------------------- split products


def split_context(gm: Any) -> Any:
    labels = testing.labels(gm, Axis.LAUNCH_BOUND)
    return testing.context(RnnRedispatch("split"), labels=labels, matrix_units=frozenset({"float16"}))


@pytest.mark.parametrize(("batch_first", "bias", "layers"), [(True, True, 2), (False, False, 1), (False, False, 3)])
def test_an_lstm_in_split_products_is_as_accurate_as_eager(batch_first, bias, layers):
    from fxopt.torch_api import inductor
    from passes.split_rnn import STEPS

    model = Tagger(nn.LSTM(24, 32, layers, batch_first=batch_first, bias=bias)).eval()
    x, p = torch.randn(5, 3, 24), RnnRedispatch("split")
    gm, real = graph_of(model, x)
    context = split_context(gm)
    with torch.no_grad():
        accepted, report = consider(p, gm, real, context)
        assert len(accepted) == 1, report
        patches = p.configure(accepted, context).patches
        freeze = frozenset(i for i, value in enumerate(real) if isinstance(value, nn.Parameter))
        compiled = inductor.compile_graph(gm, real, patches=patches, freeze=freeze, capture=True)
        got, own, exact = compiled.flat(real)(*real), model(x), model.double()(x.double())
    assert p.took_effect(compiled, accepted, context) == 1
    assert len(compiled.post_grad.graph.find_nodes(op="call_function", target=STEPS)) == 1
    assert not any(rnn.is_rnn(node) for node in compiled.post_grad.graph.nodes)
    for mine, theirs, right in zip(got, own, exact, strict=True):
        assert mine.stride() == theirs.stride()
        error, reference = ((t.double() - right).norm() / right.norm() for t in (mine, theirs))
        assert error <= max(4 * reference, 2.0**-20)


@pytest.mark.parametrize(
    ("because", "make"),
    [
        ("it is no LSTM (gru)", lambda: nn.GRU(16, 32)),
        ("it is bidirectional", lambda: nn.LSTM(16, 32, bidirectional=True)),
        ("it projects its hidden state", lambda: nn.LSTM(16, 32, proj_size=16)),
        ("it projects its hidden state", lambda: nn.LSTM(16, 32, 2, bias=False, proj_size=16)),
        ("it projects its hidden state", lambda: nn.LSTM(16, 32, 4, proj_size=16)),
        ("40 units and 16 inputs do not fill", lambda: nn.LSTM(16, 40)),
        ("32 units and 8 inputs do not fill", lambda: nn.LSTM(8, 32)),
    ],
)
def test_what_has_no_split_form_is_left_alone(because, make):
    layer = make().eval()
    gm, real = graph_of(Tagger(layer).eval(), torch.randn(5, 3, layer.input_size))
    with torch.no_grad():
        accepted, report = consider(RnnRedispatch("split"), gm, real, split_context(gm))
    assert not accepted and because in report.refused[0][1]


def test_split_products_need_fp16_units_and_triton(monkeypatch):
    p = RnnRedispatch("split")
    assert "no fp16 matrix units" in p.applicable(testing.context(p, device="cuda", matrix_units=frozenset()))
    units = testing.context(p, device="cuda", matrix_units=frozenset({"float16"}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in p.applicable(units)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert p.applicable(units) == ""
