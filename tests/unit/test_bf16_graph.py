"""bf16_graph: what runs in bf16, what goes in and comes out, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import dynamo_graph
from torch import nn

import fxopt
from fxopt import rnn, testing
from fxopt.build import Builder
from fxopt.registry import order
from fxopt.testing import stand_ins
from fxopt.torch_api import casts, dynamo
from passes.bf16_graph import Bf16Graph
from passes.freeze_weights import FreezeWeights
from profiler_core import roofline

LARGEST = torch.finfo(torch.bfloat16).max


class Block(nn.Module):
    """A norm, a product and an activation, and what the model itself wants in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y, (y + mask).to(torch.float32).softmax(-1).sum()


ALONE = (Bf16Graph(),)


def built(fn, *inputs: Any, passes=ALONE, mutated: frozenset[int] = frozenset()) -> tuple[Any, list[Any]]:
    torch._dynamo.reset()
    gm, arguments = dynamo_graph(fn, *inputs)
    with torch.no_grad():
        context = testing.context(Bf16Graph(), static=dynamo.static_inputs(gm, arguments), mutated=mutated)
        return Builder(gm, arguments, {}, context).build(order(passes)), arguments


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("passes", [ALONE, (FreezeWeights(), Bf16Graph())], ids=["alone", "frozen"])
def test_a_graph_runs_in_bf16_between_fp32_inputs_and_outputs(passes, fresh_dynamo):
    torch.manual_seed(0)
    model, x, mask = Block().eval(), torch.randn(8, 32), torch.zeros(8, 32)
    build, arguments = built(model, x, mask, passes=passes)
    assert build.effective and not build.errors
    with torch.no_grad():
        out, total = build.fn(*arguments)
        expected, _ = model(x, mask)
    assert out.dtype == total.dtype == torch.float32
    assert 1e-4 < error(out, expected) < 2e-2, "rounded, and no more than bf16 rounds"
    products = [
        node.meta["val"].dtype
        for node in build.compiled.post_grad.graph.nodes
        if node.op == "call_function" and ("mm" in str(node.target) or "linear" in str(node.target))
    ]
    assert products and set(products) == {torch.bfloat16}


class Last(nn.Module):
    """Parts of logits, as a model of language returns them; the second is written to after it was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z = self.head(x), self.head(x.flip(0))
        part = z.transpose(0, 1)[1:, :, ::2]
        z += 1
        w = self.head(x * 2)
        return y[:, -1], part, y[0, :1].expand(3, -1), y.mT, w, w.transpose(0, 1)


def test_parts_of_a_result_have_the_strides_that_the_graph_gives_them(fresh_dynamo):
    torch.manual_seed(0)
    model, x = Last().eval(), torch.randn(2, 8, 32)
    build, arguments = built(model, x)
    assert build.effective and not build.errors
    with torch.no_grad():
        outputs, right = build.fn(*arguments), model(x)
    for found, expected in zip(outputs, right, strict=True):
        assert found.dtype == torch.float32 and found.stride() == expected.stride()
        assert 1e-4 < error(found, expected) < 2e-2
    assert [outputs[i].data_ptr() == outputs[j].data_ptr() for i, j in ((4, 5), (0, 4))] == [True, False]
    assert outputs[0].untyped_storage().data_ptr() == outputs[3].untyped_storage().data_ptr(), "parts of one, as before"


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ x, self.table


def test_what_the_graph_holds_in_fp32_is_returned_as_it_is():
    x = torch.ones(2, 2)
    gm = torch.fx.symbolic_trace(Holds())
    for node, value in zip(gm.graph.nodes, (x, x @ x, gm.table), strict=False):
        node.meta["val"] = value
    casts.cast_inputs(gm, {0: torch.bfloat16})
    product, table = gm(x)
    assert product.dtype == torch.float32 and table is gm.table


def test_a_mask_of_float32s_least_number_stays_finite_and_infinity_infinite(fresh_dynamo):
    def largest(mask: torch.Tensor) -> torch.Tensor:
        return mask * 1.0

    mask = torch.tensor([torch.finfo(torch.float32).min, -torch.inf, torch.inf, torch.nan, 1.0])
    build, arguments = built(largest, mask)
    (out,) = build.fn(*arguments)
    assert out[:3].tolist() == [-LARGEST, -torch.inf, torch.inf] and out[3].isnan() and out[4] == 1


def test_integers_and_wider_numbers_are_left_alone(fresh_dynamo):
    def pick(table: torch.Tensor, ids: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        return table[ids] + wide

    table, ids, wide = torch.randn(5, 4), torch.tensor([1, 3]), torch.randn(2, 4, dtype=torch.float64)
    build, arguments = built(pick, table, ids, wide)
    (out,) = build.fn(*arguments)
    assert out.dtype == torch.float64
    assert error(out, table[ids] + wide) < 1e-2


def test_a_graph_that_writes_to_an_fp32_input_is_left_alone(fresh_dynamo):
    def count(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        return x * 2

    build, _ = built(count, torch.randn(4), torch.zeros(4), mutated=frozenset({1}))
    assert [reason for _, reason in build.reports[0].refused] == [
        "the graph writes to input 1, which would be its cast's"
    ] * 2


def test_a_graph_whose_own_fp32_values_do_not_go_with_bf16_is_left_alone(fresh_dynamo):
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.full((4, 4), 2.0, dtype=torch.float32) @ x

    x = torch.randn(4, 4)
    build, _ = built(scaled, x)
    ((_, reason),) = build.reports[0].refused
    assert reason == "the graph makes fp32 values that do not go with bf16: mm of bfloat16 and float32"
    (out,) = build.fn(x)
    assert torch.equal(out, scaled(x))
    build, _ = built(lambda x: torch.full_like(x, 2.0) @ x, x)
    assert not build.reports[0].refused, "what is made like an input has its type"


def test_a_recurrent_layer_with_a_state_of_the_graphs_own_is_left_alone(fresh_dynamo):
    layer = nn.LSTM(16, 16, batch_first=True).eval()
    weights = [w.detach() for w in layer._flat_weights]

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(1, 2, 16)
        return rnn.RNN(x, [state, state], list(weights), None, "lstm", True, 1, False, True, "")[0]

    build, _ = built(run, torch.randn(2, 3, 16), *weights)
    refused = {reason for report in build.reports for _, reason in report.refused}
    assert not build.errors and any("do not go with bf16: rnn of bfloat16 and float32" in r for r in refused), refused


def test_a_graph_that_returns_a_view_of_an_input_is_left_alone(fresh_dynamo):
    build, _ = built(lambda x, y: (x.view(2, 2), x + y), torch.randn(4), torch.randn(4))
    assert {reason for _, reason in build.reports[0].refused} == {
        "the graph returns input 0 itself, or a view of it"
    }


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"matrix_units": frozenset()}, "cpu has no bf16 matrix units"),
        ({"precision": 1e-4}, "a graph in bf16 is off by more than the error asked for"),
        ({"grad": True}, "gradients are on: this pass is for inference graphs only"),
        ({"random": ("bernoulli",)}, "it draws random numbers, of which bf16 would draw others"),
    ],
)
def test_it_is_not_applicable(fields, reason):
    assert Bf16Graph().applicable(testing.context(Bf16Graph(), **fields)) == reason


def test_a_user_gets_it_where_the_class_allows_it(tmp_path, monkeypatch):
    # Measured ones, and so the labels and what is considered, depend on how busy the machine is.
    monkeypatch.setattr(roofline, "ceilings", lambda device, store: stand_ins.CEILINGS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    x = torch.randn(32, 64)
    options = {"passes": ["bf16_graph"], "plan_dir": str(tmp_path), "time_limit": 60}
    optimized = fxopt.optimize(model, x, precision="bf16", **options)
    considered = [c.name for g in optimized.report.graphs for c in g.candidates]
    unreachable = [text for g in optimized.report.graphs for text in g.out_of_reach]
    assert considered == ["bf16_graph"] or any(text.startswith("bf16_graph: cpu has no bf16") for text in unreachable)
    with torch.no_grad():
        assert error(optimized(x), model(x)) < 3.1e-2
