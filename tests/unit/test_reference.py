"""The fp64 reference leaves nothing below fp64, and the copies of inputs keep their form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxopt.reference import Float64Mode, clone_inputs, reference, storage_groups


def capture(fn, *args):
    """The Dynamo graph of ``fn`` and its flat inputs."""
    seen = []

    def backend(gm, inputs):
        # Copies: the graph runs once right away, and may write to its inputs.
        seen.append((gm, [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in inputs]))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend)(*args)
    assert len(seen) == 1
    return seen[0]


class Census(TorchDispatchMode):
    """Counts floating tensors by whether they reach fp64, independently of Float64Mode.

    Pushed below it (entered first), it sees each operator as Float64Mode leaves it.
    """

    def __init__(self):
        super().__init__()
        self.low, self.full = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                wide = leaf.dtype in (torch.float64, torch.complex128)
                self.full += wide
                if not wide:
                    self.low.append(str(func))
        return out


class NodeCensus(fx.Interpreter):
    """Counts the floating values that the graph's nodes hold."""

    def __init__(self, gm):
        super().__init__(gm)
        self.low, self.full = [], 0

    def run_node(self, n):
        out = super().run_node(n)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.full += leaf.dtype == torch.float64
                if leaf.dtype != torch.float64:
                    self.low.append(n.name)
        return out


class Hard(nn.Module):
    """Everything that lowers a dtype inside a model."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.arange(4.0))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.linear(x)
        h = self.norm(h.float())
        position = torch.arange(4)
        causal = position[:, None] >= position[None, :]
        mask = torch.full((4, 4), torch.finfo(torch.float32).min).masked_fill(causal, 0.0) + torch.zeros(4, 4)
        h = F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=mask)
        h = h + torch.tensor([0.1]) + torch.linspace(0, 1, 8) + (position / 3)[:, None] + self.scale[:, None]
        h = h + torch.arange(0, 4, 0.5) + torch.ones(8, dtype=torch.float16) + (position * 0.1)[:, None]
        h = (
            h
            + torch.sqrt(position)[:, None]
            + torch.empty(8).fill_(2.0)
            + torch.where(causal[0, :1], 1.0, 0.0)
        )
        h = F.dropout(h, 0.1, training=False)
        return (
            h.half() @ h.half().mT,
            F.softmax(h.half(), -1, dtype=torch.float32),
            h.sum(dtype=torch.float32),
            h.to(torch.float16),
        )


def test_no_float_node_of_a_hard_model_stays_below_fp64():
    torch.manual_seed(0)
    gm, inputs = capture(Hard().eval(), torch.randn(4, 8))
    result = reference(gm, inputs)
    assert result.note == ""
    assert (result.dtype, result.below_fp64, result.random) == ("float64", 0, ())
    assert [out.dtype for out in result.outputs] == [torch.float64] * 4

    wide = [value.double() if value.is_floating_point() else value for value in inputs]
    nodes = NodeCensus(gm)
    with torch.no_grad(), Float64Mode() as mode:
        nodes.run(*wide)
    assert nodes.low == [] and nodes.full > 40
    assert mode.below_fp64 == 0
    # The census does count: without the mode most of this model's nodes are below fp64.
    without = NodeCensus(gm)
    with torch.no_grad():
        without.run(*inputs)
    assert len(without.low) > 40


def test_a_gemm_with_its_own_output_dtype_is_a_plain_one_in_fp64():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output((graph.call_function(torch.mm, (a, b), {"out_dtype": torch.float32}),))
    a, b = torch.randn(3, 4).bfloat16(), torch.randn(4, 2).bfloat16()
    result = reference(fx.GraphModule({}, graph), [a, b])  # eager has it on CUDA only
    assert (result.dtype, result.below_fp64) == ("float64", 0), result.note
    assert torch.equal(result.outputs[0], a.double() @ b.double())


@pytest.mark.parametrize("checkpointed", [True, False])
def test_subgraphs_of_higher_order_operators_run_in_fp64_too(checkpointed):
    def block(x):
        return torch.sin(x).float() + torch.ones(4)

    region = torch.compiler.nested_compile_region(block)

    def model(x):
        if checkpointed:
            return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return region(region(x))

    x = torch.randn(4)
    gm, inputs = capture(model, x)
    assert any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in gm.graph.nodes)
    result = reference(gm, inputs)
    assert (result.dtype, result.below_fp64, result.note) == ("float64", 0, "")
    expected = torch.sin(x.double()) + 1
    expected = expected if checkpointed else torch.sin(expected) + 1
    torch.testing.assert_close(result.outputs[0], expected, rtol=1e-15, atol=0)


def test_below_the_mode_only_results_that_it_then_raises_are_low():
    census = Census()
    x = torch.randn(4, 8, dtype=torch.float64)
    with census, Float64Mode() as mode:
        outs = [x.half(), torch.zeros(3), torch.arange(3) / 7, torch.softmax(x, -1, dtype=torch.float32)]
    assert all(out.dtype == torch.float64 for out in outs)
    assert mode.below_fp64 == 0 and census.full >= 4
    # An integer division happens in fp32 first, is seen to be low, and is done again.
    assert set(census.low) <= {"aten.zeros.default", "aten.div.Tensor"}
    assert torch.equal(outs[2], torch.arange(3, dtype=torch.float64) / 7)


def test_the_values_are_those_of_a_model_in_fp64():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    x = torch.randn(5, 8)
    gm, inputs = capture(model, x)
    (out,) = reference(gm, inputs).outputs
    with torch.no_grad():
        torch.testing.assert_close(out, model.double()(x.double()), rtol=1e-14, atol=1e-14)


def test_autocast_regions_do_not_lower_the_reference():
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 64).eval(), torch.randn(8, 64)

    def model(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear(x)

    gm, inputs = capture(model, x)
    assert any("autocast" in str(node.target) for node in gm.graph.nodes)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # nor does the caller's own
        (out,) = reference(gm, inputs).outputs
    with torch.no_grad():
        torch.testing.assert_close(out, linear.double()(x.double()), rtol=1e-13, atol=1e-13)


def test_autocast_itself_leaves_doubles_alone():
    x = torch.randn(4, 4, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(x, x).dtype == torch.float64


def test_integer_inputs_and_complex_inputs_keep_their_kind():
    def model(index, table, z):
        return table[index] * 2, index + 1, z * z

    gm, inputs = capture(
        model, torch.tensor([2, 0]), torch.randn(3, 2), torch.randn(3, dtype=torch.complex64)
    )
    floats, integers, complexes = reference(gm, inputs).outputs
    assert (floats.dtype, integers.dtype, complexes.dtype) == (torch.float64, torch.int64, torch.complex128)


def test_constants_in_the_graph_are_raised_and_not_changed():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("c", torch.full((3,), 0.1))
            self.inner = nn.BatchNorm1d(3)

    graph = fx.Graph()
    x = graph.placeholder("x")
    c = graph.get_attr("c")
    added = graph.call_method("add_", (c, 1.0))
    normed = graph.call_module("inner", (x,))
    graph.output((graph.call_function(torch.add, (normed, added)), c))
    gm = fx.GraphModule(Root(), graph)
    result = reference(gm, [torch.randn(5, 3)])
    assert result.dtype == "float64" and result.below_fp64 == 0, result.note
    assert all(out.dtype == torch.float64 for out in result.outputs)
    assert torch.equal(gm.c, torch.full((3,), 0.1))
    assert gm.inner.num_batches_tracked == 0 and torch.equal(gm.inner.running_mean, torch.zeros(3))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: x + torch.rand(4),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    ],
)
def test_random_operators_are_named(fn):
    gm, inputs = capture(fn, torch.randn(4, 4))
    result = reference(gm, inputs)
    assert result.random and result.random[0] in result.note


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: F.rrelu(x, training=False),
    ],
)
def test_random_operators_that_are_switched_off_are_not(fn):
    gm, inputs = capture(fn, torch.randn(4, 4))
    result = reference(gm, inputs)
    assert (result.random, result.note, result.dtype) == ((), "", "float64")


def test_reading_the_bits_of_a_float_falls_back_to_the_graphs_own_dtypes():
    def model(x):
        return (x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32)

    x = torch.randn(4)
    gm, inputs = capture(model, x)
    result = reference(gm, inputs)
    assert result.dtype == "float32" and result.below_fp64 == 1
    assert "view" in result.note
    assert torch.equal(result.outputs[0], x.abs())


def test_an_operator_without_an_fp64_form_is_named():
    def model(x):
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize() * 2

    graph = fx.Graph()
    x = graph.placeholder("x")
    quantized = graph.call_function(torch.quantize_per_tensor, (x, 0.1, 0, torch.qint8))
    graph.output((graph.call_method("dequantize", (quantized,)),))
    value = torch.randn(4)
    result = reference(fx.GraphModule({}, graph), [value])
    assert result.dtype == "float32" and "quantize_per_tensor" in result.note
    assert torch.equal(result.outputs[0] * 2, model(value))


def test_an_error_of_the_graph_itself_propagates():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_method("reshape", (x, 5)),))
    with pytest.raises(RuntimeError, match="shape"):
        reference(fx.GraphModule({}, graph), [torch.randn(4)])


def test_the_callers_inputs_are_untouched_and_the_written_ones_named():
    def model(a, b):
        a.add_(1)
        return a * b

    a, b = torch.zeros(3), torch.ones(3)
    gm, inputs = capture(model, a, b)
    before = [value.clone() for value in inputs]
    result = reference(gm, inputs)
    assert all(map(torch.equal, inputs, before))
    (written,) = result.mutated
    torch.testing.assert_close(result.inputs[written], before[written].double() + 1)


def test_inputs_that_view_one_storage_view_one_fp64_storage():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.call_method("mul_", (a, 2))
    graph.output((graph.call_method("clone", (b,)),))
    base = torch.arange(6.0)
    result = reference(fx.GraphModule({}, graph), [base[1:5], base.view(2, 3).t()])
    assert result.mutated == {0, 1}
    assert torch.equal(result.outputs[0], torch.tensor([[0, 6], [2, 8], [4, 5]], dtype=torch.float64))


def test_views_of_one_storage_in_two_dtypes_have_no_fp64_form():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output((graph.call_function(torch.add, (a, b)),))
    base = torch.ones(4)
    result = reference(fx.GraphModule({}, graph), [base, base.view(torch.int32)])
    assert result.dtype == "float32" and "one storage" in result.note


def test_a_cast_to_the_same_dtype_aliases_as_in_the_model():
    def same(x):
        y = x.float()  # returns x
        y.add_(1)
        return x * 2

    def other(x):
        y = x.double()  # a copy
        y.add_(1)
        return x * 2

    for fn, value in ((same, 4.0), (other, 2.0)):
        gm, inputs = capture(fn, torch.ones(3))
        assert torch.equal(reference(gm, inputs).outputs[0], torch.full((3,), value, dtype=torch.float64))


# ---------------------------------------------------------------- clone_inputs


def test_copies_keep_strides_offsets_and_aliasing():
    base = torch.arange(24.0)
    inputs = [base[4:16].view(3, 4).t(), base[10:], torch.ones(3, 1).expand(3, 5), 7, None, torch.zeros(0, 3)]
    copies = clone_inputs(inputs, set())
    for old, new in zip(inputs, copies, strict=True):
        if isinstance(old, torch.Tensor):
            assert torch.equal(old, new) and old.stride() == new.stride()
            assert old.storage_offset() == new.storage_offset() and old.dtype == new.dtype
            assert old.numel() == 0 or old.data_ptr() != new.data_ptr()
        else:
            assert old is new
    assert storage_groups(copies) == storage_groups(inputs) == [[0, 1], [2], [5]]
    copies[1][0] = -1.0
    assert copies[0][2, 1] == -1.0 and inputs[0][2, 1] == 10.0


def test_static_inputs_and_their_aliases_are_shared():
    weight, x = nn.Parameter(torch.randn(4)), torch.randn(4)
    inputs = [weight, x, weight.detach()[1:]]
    copies = clone_inputs(inputs, {0})
    assert copies[0] is weight and copies[2] is inputs[2]
    assert copies[1] is not x


def test_one_tensor_given_twice_stays_one_storage():
    x = torch.randn(4)
    left, right = clone_inputs([x, x], set())
    assert left.data_ptr() == right.data_ptr() != x.data_ptr()


def test_copies_of_leaves_still_require_grad():
    leaf = torch.randn(3, requires_grad=True)
    copies = clone_inputs([leaf, leaf * 2], set())
    assert [value.requires_grad for value in copies] == [True, False]


def test_views_of_one_storage_in_two_dtypes_are_copied_together():
    base = torch.ones(4)
    left, right = clone_inputs([base, base.view(torch.int32)], set())
    left.zero_()
    assert torch.equal(right, torch.zeros(4, dtype=torch.int32)) and base.sum() == 4
