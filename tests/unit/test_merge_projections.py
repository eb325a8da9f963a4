"""merge_projections: products of one input become one, what they return stays as it was, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from random_graph_helpers import for_all, projections
from torch import nn

from fxopt import testing
from fxopt.build import Builder
from fxopt.labels import Axis, Evidence, Label
from fxopt.torch_api import dynamo
from passes.freeze_weights import FreezeWeights
from passes.merge_projections import MergeProjections

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
X = torch.randn(2, 6, 16)


class Qkv(nn.Module):
    """Attention with projections of their own for query, key and value, with as many heads as given."""

    def __init__(self, biases=(True, True, True), kv_heads=4):
        super().__init__()
        self.kv_heads = kv_heads
        widths = (16, 4 * kv_heads, 4 * kv_heads)
        self.q, self.k, self.v = (nn.Linear(16, n, bias=b) for n, b in zip(widths, biases, strict=True))

    def forward(self, x):
        q = self.q(x).view(2, 6, 4, 4).transpose(1, 2)
        k, v = (p(x).view(2, 6, self.kv_heads, 4).transpose(1, 2) for p in (self.k, self.v))
        k, v = (t.repeat_interleave(4 // self.kv_heads, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 16)


class GateUp(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.gate, self.up = nn.Linear(16, 24, bias=bias), nn.Linear(16, 24, bias=bias)

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


class Returned(nn.Module):
    """One result returned as it is, one as a view, one only after arithmetic."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 8) for _ in range(3))

    def forward(self, x):
        return self.a(x), self.b(x).transpose(1, 2), self.c(x).relu()


def products(module):
    return [node for node in module.graph.nodes if node.target in PRODUCTS]


def merged(model, *inputs, **kwargs):
    result = testing.run(MergeProjections(), testing.capture(model, *inputs, freeze=True), **kwargs)
    assert not result.report.error, result
    return result


def numbers(model, *inputs, **kwargs):
    kwargs = {"layouts": ("contiguous",), "dynamic": (False,), "freeze": True} | kwargs
    return testing.check(MergeProjections(), model, *inputs, **kwargs)


# ---------------------------------------------------------------- what is merged


def test_gate_and_up_before_and_after():
    result = merged(GateUp(), X)
    assert result.after.splitlines()[3:] == [
        "view: f32[12, 16] = aten.view.default(x, [12, 16])",
        "cat_default: f32[48, 16] = aten.cat.default([p_gate_weight, p_up_weight], 0)",
        "permute_default: f32[16, 48][1, 16] = aten.permute.default(cat_default, [1, 0])",
        "mm_default: f32[12, 48] = aten.mm.default(view, permute_default)",
        "slice_tensor: f32[12, 24][48, 1] = aten.slice.Tensor(mm_default, 1, 0, 24)",
        "slice_tensor_1: f32[12, 24][48, 1] = aten.slice.Tensor(mm_default, 1, 24, 48)",
        "view_1: f32[2, 6, 24][288, 48, 1] = aten.view.default(slice_tensor, [2, 6, 24])",
        *(line for line in result.before.splitlines() if line.split(":")[0] in ("neg", "exp", "add", "div", "sigmoid")),
        *(line for line in result.after.splitlines() if line.split(":")[0] == "mul" and "sigmoid" in line),
        "view_3: f32[2, 6, 24][288, 48, 1] = aten.view.default(slice_tensor_1, [2, 6, 24])",
        *result.before.splitlines()[-2:],
    ]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "biases", [(True, True, True), (False, False, False), (True, False, True)], ids=["biases", "none", "one missing"]
)
def test_query_key_and_value_become_one_product(biases, kv_heads):
    model = Qkv(biases, kv_heads)
    result = merged(model, X)
    (product,) = products(result.module)
    assert product.target is (aten.addmm.default if any(biases) else aten.mm.default)
    assert product.meta["val"].shape == (12, 16 + 8 * kv_heads)
    assert aten.clone.default not in {user.target for part in product.users for user in part.users}
    assert (result.report.matched, result.report.rewritten) == (1, 1)
    numbers(model, X)


def test_weights_that_are_not_transposed_are_put_side_by_side():
    class Conv1d(nn.Module):  # as GPT-2 of Hugging Face has them
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16, 12))
            self.bias = nn.Parameter(torch.randn(8))

        def forward(self, x):
            rows = x.view(-1, 16)
            return torch.addmm(self.bias, rows, self.a).relu(), torch.mm(rows, self.b).relu()

    result = merged(Conv1d(), X)
    assert "aten.cat.default([p_a, p_b], 1)" in result.after
    numbers(Conv1d(), X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_numbers_are_right_in_every_type(dtype):
    for model in (GateUp(True), Qkv(), Returned()):
        numbers(model, X, dtypes=(dtype,), precision="bf16" if dtype is torch.bfloat16 else None)


def test_a_matrix_of_any_layout_may_be_the_input():
    numbers(GateUp(), torch.randn(6, 16), layouts=("contiguous", "transposed", "sliced"))


def test_each_layer_gets_a_product_of_its_own():
    result = merged(nn.Sequential(Qkv(), GateUp(), nn.Linear(24, 16), Qkv()), X)
    assert result.report.rewritten == 3
    assert len(products(result.module)) == 4
    numbers(nn.Sequential(Qkv(), GateUp(), nn.Linear(24, 16), Qkv()), X)


def test_what_the_graph_returns_keeps_strides_and_memory_of_its_own():
    result = merged(Returned(), X)
    (product,) = products(result.module)
    copied = [[user.target for user in part.users] for part in product.users]
    assert [aten.clone.default in targets for targets in copied] == [True, True, False]
    numbers(Returned(), X)


def test_a_view_that_slices_do_not_allow_is_of_a_copy():
    class Flat(GateUp):
        def forward(self, x):
            return self.gate(x).view(-1).relu(), self.up(x).relu()

    (product,) = products(merged(Flat(), X).module)
    copied = [[user.target for user in part.users] for part in product.users]
    assert [aten.clone.default in targets for targets in copied] == [True, False]
    numbers(Flat(), X)


def test_one_row_whose_strides_mean_nothing_is_not_returned_as_a_view():
    class Row(GateUp):
        def forward(self, x):
            return self.gate(x), self.up(x)

    numbers(Row(), torch.randn(1, 16))


# ---------------------------------------------------------------- compiled


def test_frozen_weights_are_concatenated_once_while_compiling(fresh_dynamo):
    """No concatenation is left in the code, nor the zeros of a missing bias, nor a transposition."""
    model = Qkv((True, False, True)).eval()
    builds = []

    def backend(gm, inputs):
        context = testing.context(
            labels=testing.labels(testing.capture(model, X, freeze=True), "memory_bound"),
            static=dynamo.static_inputs(gm, inputs),
        )
        everything = Label(Axis.LAUNCH_BOUND, "graph", (), "", (), "high", 1.0, "why")
        context = testing.context(labels=(*context.labels, everything), static=context.static)
        builder = Builder(gm, inputs, {"force_disable_caches": True}, context, check_weights=False)
        builds.append(builder.build([FreezeWeights(), MergeProjections()]))
        return builds[0].fn

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(X), model(X))
    (build,) = builds
    assert not build.errors and [r.rewritten for r in build.reports] == [5, 1]
    left = {str(node.target) for node in build.compiled.post_grad.graph.nodes if node.op == "call_function"}
    assert not {t for t in left if "cat" in t or "full" in t}, left
    assert sum("mm" in t or "linear" in t for t in left) == 1, left


# ---------------------------------------------------------------- what is refused


def refuses(model, because, *inputs, **kwargs):
    return testing.refuses(MergeProjections(), model, *(inputs or (X,)), because=because, **{"freeze": True} | kwargs)


def test_weights_that_are_inputs_are_refused():
    refuses(GateUp(), "its weight or bias is no constant: concatenating would be a copy per call", freeze=False)
    why = MergeProjections().applicable(testing.context(session=False))
    assert why.startswith("weights are inputs: concatenating them would cost a copy on every call")


def test_gradients_are_refused():
    assert "gradients are on" in MergeProjections().applicable(testing.context(grad=True))


def test_a_weight_that_is_computed_is_refused():
    class Scaled(GateUp):
        def forward(self, x):
            return F.linear(x, self.gate.weight * x.sum()) + self.up(x)

    report = refuses(Scaled(), "no constant")
    assert [reason for _, reason in report.refused][1:] == ["no other such product takes the same input"]


def test_other_inputs_are_refused():
    class Chain(GateUp):
        def forward(self, x):
            return self.gate(x) + self.up(x + 1)

    report = refuses(Chain(), "no other such product takes the same input")
    assert len(report.refused) == 2


def test_other_views_of_one_input_are_not_the_same_input():
    class Halves(GateUp):
        def forward(self, x):
            return self.gate(x[:, :16]) + self.up(x[:, 16:])

    refuses(Halves(), "no other such product", torch.randn(6, 32))


def test_a_product_with_a_factor_or_a_bias_of_another_shape_is_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(6, 8))

        def forward(self, x):
            return torch.addmm(self.bias[0], x, self.w, alpha=0.5), torch.addmm(self.bias, x, self.w)

    report = refuses(Odd(), "it is not bias", torch.randn(6, 16))
    assert len(report.refused) == 2


def test_symbolic_sizes_are_refused():
    refuses(GateUp(), "symbolic", torch.randn(6, 16), dynamic=True)


def test_what_has_no_label_is_refused():
    refuses(GateUp(), "no label that this pass answers", labels={})


def test_one_labelled_product_alone_is_refused():
    refuses(GateUp(), "no other such product", labels={"mm": "wave_starved"})


def on_gpu(model, x, axis, sms):
    """The reasons on a GPU of so many multiprocessors, where every product has this label."""
    graph = testing.capture(model, x, freeze=True)
    (given,) = testing.labels(graph, axis)
    evidence = (Evidence("sm_count", sms, None, "SM", "measured"),)
    label = Label(given.axis, given.scope, given.nodes, "k:0", evidence, "high", 1.0, "why")
    context = testing.context(device="cuda", labels=(label,))
    return [c.refused for c in MergeProjections().candidates(graph.graph, context)]


def test_a_product_whose_tiles_fill_the_multiprocessors_is_left_alone():
    """300 x 512 makes 3 x 4 tiles of 128 x 128."""
    model, x = nn.ModuleList([nn.Linear(16, 512), nn.Linear(16, 512)]), torch.randn(300, 16)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return self.layers[0](x) + self.layers[1](x)

    assert on_gpu(Both(), x, "tensor_core_idle", 13) == [""]
    assert on_gpu(Both(), x, "memory_bound", 12) == ["its 12 tiles fill the 12 multiprocessors"] * 2
    for axis in ("wave_starved", "latency_bound", "launch_bound"):  # measured, so that no estimate is needed
        assert on_gpu(Both(), x, axis, 12) == [""]


def test_columns_that_would_leave_the_next_ones_unaligned_are_refused_on_a_gpu():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 6), nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x):
            return self.a(x).relu(), self.b(x).relu(), self.c(x).relu()

    unaligned = "its 6 columns would leave its neighbour unaligned"
    assert on_gpu(Narrow(), X, "wave_starved", 132) == [unaligned, ""]
    assert merged(Narrow(), X).report.rewritten == 1


# ---------------------------------------------------------------- random graphs


def test_random_graphs_stay_equivalent():
    seen: Counter[bool] = Counter()
    strategy = testing.graphs([projections], dynamic=False, max_nodes=8)
    for_all(strategy, 150, lambda graph: seen.update([testing.equivalent(MergeProjections(), graph).changed]))
    assert seen[True] >= 60, seen
