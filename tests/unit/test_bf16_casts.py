"""Where promote_matmul_precision puts its casts: before a pool stores fp32, and never on a weight in frozen code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from fxopt import testing
from fxopt.manager import SlotPass
from fxopt.registry import Stage
from fxopt.torch_api import dynamo, inductor
from passes.promote_matmul_precision import PromoteMatmulPrecision

CAST = torch.ops.prims.convert_element_type.default
P = PromoteMatmulPrecision()


def pools(result):
    return [n for n in result.module.graph.nodes if "max_pool" in str(n.target)]


def promoted(fn, *args):
    result = testing.run(P, testing.capture(fn, *args))
    assert result.report.error == "" and result.report.rewritten > 0, str(result)
    return result


def conv_pool_conv(x, w, u):
    return F.conv2d(F.max_pool2d(torch.relu(F.conv2d(x, w, padding=1)), 2), u, padding=1)


IMAGE = torch.randn(2, 4, 16, 16), torch.randn(8, 4, 3, 3), torch.randn(4, 8, 3, 3)


def test_a_pool_between_convolutions_reads_and_gives_bf16():
    result = promoted(conv_pool_conv, *IMAGE)
    (pool,) = pools(result)
    assert pool.args[0].target is CAST and pool.args[0].meta["val"].dtype == torch.bfloat16
    assert pool.meta["val"][0].dtype == torch.bfloat16


def test_to_round_before_a_pool_changes_no_bit():
    """The largest of the rounded is the largest, rounded; NaN and infinities go through both."""
    result = promoted(conv_pool_conv, *IMAGE)
    x, w, u = (value.clone() for value in IMAGE)
    x[0, 0, 3, 3], x[1, 1, 5, 5], x[1, 2, 9, 9] = torch.nan, torch.inf, -torch.inf

    def by_hand(x, w, u):
        x, w, u = x.bfloat16(), w.bfloat16(), u.bfloat16()
        between = torch.relu(F.conv2d(x, w, padding=1).float())
        return F.conv2d(F.max_pool2d(between, 2).bfloat16(), u, padding=1).float()

    exact = by_hand(x, w, u)
    assert exact.isnan().any() and not exact.isnan().all()
    (got,) = tree_leaves(result.module(x, w, u))
    torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)


def test_a_pool_whose_result_goes_through_views_to_a_product_is_bf16():
    def fn(x, w, u):
        return F.max_pool2d(torch.relu(F.conv2d(x, w, padding=1)), 2).flatten(1) @ u

    (pool,) = pools(promoted(fn, *IMAGE[:2], torch.randn(8 * 64, 10)))
    assert pool.meta["val"][0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, u: (p := F.max_pool2d(torch.relu(F.conv2d(x, w)), 2)) is not None and (F.conv2d(p, u), p),
        lambda x, w, u: F.conv2d(torch.sigmoid(F.max_pool2d(F.conv2d(x, w), 2)), u),
    ],
    ids=["returned", "computed with"],
)
def test_a_pool_whose_result_is_wanted_in_fp32_stays_fp32(fn):
    (pool,) = pools(promoted(fn, *IMAGE))
    assert pool.meta["val"][0].dtype == torch.float32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stop(BaseException):
    pass


class Keep(inductor.InferenceAwareGraphPass):
    """Keeps the graph that Inductor would lower, and compiles nothing."""

    def __call__(self, graph, is_inference=None):
        self.graph = graph
        raise Stop

    def uuid(self):
        return None


def lowered(model, x, *, freeze):
    """The post-grad graph of a model whose products were promoted at the joint stage."""
    kept = Keep()

    def backend(gm, inputs):
        static = dynamo.static_inputs(gm, inputs)
        promote = SlotPass([P], testing.context(P, labels=labelled), Stage.JOINT)
        slots = {"joint": promote, "post_grad": kept}
        inductor.compile_graph(
            gm, inputs, patches={}, slots=slots, freeze=static if freeze else frozenset(), caches=False
        )

    labelled = testing.labels(testing.capture(model, x), "tensor_core_idle")
    with torch.no_grad(), pytest.raises(Stop):
        torch.compile(model, backend=backend)(x)
    return kept.graph


def weights_cast(graph):
    """Casts of what is a weight, seen through views."""

    def origin(node):
        while node.op == "call_function" and node.all_input_nodes and "permute" in str(node.target):
            node = node.all_input_nodes[0]
        return node

    casts = [n for n in graph.nodes if n.target is CAST and n.args[1] == torch.bfloat16]
    # A frozen weight is an attribute; the one input that is none is the activation.
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    return [n for n in casts if origin(n.args[0]).op == "get_attr" or origin(n.args[0]) in inputs]


def test_frozen_weights_are_cast_once_and_not_on_every_call(fresh_dynamo):
    model, x = Net().eval(), torch.randn(16, 32)
    per_call, frozen = (lowered(model, x, freeze=freeze) for freeze in (False, True))
    assert len(weights_cast(per_call)) == 4, "two weights and two biases"
    assert weights_cast(frozen) == []
    products = [n for n in frozen.nodes if str(n.target) in ("aten.addmm.default", "mkldnn._linear_pointwise.default")]
    assert len(products) == 2
    assert {n.meta["val"].dtype for n in products} == {torch.bfloat16}


def test_a_cast_is_shared_by_a_value_and_its_transpose():
    """As in a backward, where a gradient is an operand of one product and, transposed, of the other."""
    result = promoted(lambda d, w, x: (d @ w, d.t() @ x), torch.randn(6, 8), torch.randn(8, 4), torch.randn(6, 5))
    casts = [n for n in result.module.graph.nodes if n.target is CAST and n.args[1] == torch.bfloat16]
    assert sorted(n.args[0].op for n in casts) == ["placeholder"] * 3, str(result)
