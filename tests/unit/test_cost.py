"""What a node computes and moves, by hand against the model."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from profiler_core.cost import Cost, group_bytes, is_matrix_product, node_cost, target_name

aten = torch.ops.aten


def trace(fn: Callable[..., Any], *args: Any, mode: str = "fake") -> fx.Graph:
    return make_fx(fn, tracing_mode=mode)(*args).graph


def only(graph: fx.Graph, target: Any) -> fx.Node:
    (node,) = (n for n in graph.nodes if n.target == target)
    return node


def named(graph: fx.Graph, *names: str) -> list[fx.Node]:
    found = [n for n in graph.nodes if n.name in names]
    assert len(found) == len(names), [n.name for n in graph.nodes]
    return found


def build(target: Any, args: list[Any], out: Any, kwargs: dict[str, Any] | None = None) -> fx.Node:
    """A call of ``target`` on placeholders for the tensors among ``args`` (and for the tensors in lists)."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:

        def place(arg: Any) -> Any:
            if isinstance(arg, list) and arg and isinstance(arg[0], torch.Tensor):
                return [place(item) for item in arg]
            if not isinstance(arg, torch.Tensor):
                return arg
            node = graph.placeholder(f"p{len(graph.nodes)}")
            node.meta["val"] = mode.from_tensor(arg)
            return node

        placed = [place(arg) for arg in args]
        node = graph.call_function(target, tuple(placed), kwargs or {})
        node.meta["val"] = (
            [mode.from_tensor(o) for o in out] if isinstance(out, list) else mode.from_tensor(out)
        )
    return node


def test_a_matrix_product_counts_a_multiply_and_an_add_and_moves_three_matrices() -> None:
    node = only(trace(torch.mm, torch.randn(8, 16), torch.randn(16, 32)), aten.mm.default)
    assert node_cost(node) == Cost(2 * 8 * 16 * 32, (8 * 16 + 16 * 32) * 4, 8 * 32 * 4)


def test_a_grouped_convolution_counts_only_the_channels_of_its_group() -> None:
    graph = trace(lambda x, w: F.conv2d(x, w, groups=8), torch.randn(2, 8, 16, 16), torch.randn(8, 1, 3, 3))
    assert node_cost(only(graph, aten.convolution.default)).flops == 2 * (2 * 8 * 14 * 14) * 9


def test_a_product_with_an_output_dtype_counts_as_the_plain_one() -> None:
    a, b = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    out = torch.randn(8, 32)
    assert node_cost(build(aten.mm.dtype, [a, b, torch.float32], out)).flops == 2 * 8 * 16 * 32
    bias = torch.randn(8, 32, dtype=torch.bfloat16)
    assert node_cost(build(aten.addmm.dtype, [bias, a, b, torch.float32], out)).flops == 2 * 8 * 16 * 32


def test_cpu_flash_attention_counts_two_products_over_query_heads() -> None:
    q, kv = torch.randn(2, 8, 16, 32), torch.randn(2, 2, 24, 32)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    node = build(op, [q, kv, kv, 0.0, True], [q, torch.randn(2, 8, 16)])
    cost = node_cost(node)
    assert cost.flops == 2 * (2 * 8 * 16 * 24) * (32 + 32)
    assert cost.bytes_written == q.numel() * 4 + 2 * 8 * 16 * 4
    assert cost.bytes_read == (q.numel() + 2 * kv.numel()) * 4


def test_a_product_with_its_activation_counts_like_the_product() -> None:
    args = [torch.randn(64), torch.randn(16, 32), torch.randn(32, 64)]
    cost, plain = (
        node_cost(build(op, args, torch.randn(16, 64)))
        for op in (torch.ops.aten._addmm_activation.default, torch.ops.aten.addmm.default)
    )
    assert cost == plain and cost.flops == 2 * 16 * 32 * 64
    assert is_matrix_product("aten._addmm_activation.default")


def opaque(*shape: int) -> torch.Tensor:
    """A packed weight as Inductor records it: plain shape, strides (1, 0, ...) that mean nothing."""
    return torch.empty_strided(shape, (1, *(0,) * (len(shape) - 1)))


def test_a_packed_linear_is_read_in_full_and_counts_by_its_input_and_output() -> None:
    args = [torch.randn(2, 8, 32), opaque(64, 32), torch.randn(64), "none", [], ""]
    cost = node_cost(build(torch.ops.mkldnn._linear_pointwise.default, args, torch.randn(2, 8, 64)))
    assert cost == Cost(2 * 16 * 32 * 64, (512 + 64 * 32 + 64) * 4, 1024 * 4)


def test_an_mkl_linear_reads_its_weight_once_although_it_is_handed_both_packings() -> None:
    args = [torch.randn(16, 32), torch.empty(1459233, 1), torch.randn(64, 32), torch.randn(64), 16]
    cost = node_cost(build(torch.ops.mkl._mkl_linear, args, torch.randn(16, 64)))
    assert cost == Cost(2 * 16 * 32 * 64, (16 * 32 + 64 * 32 + 64) * 4, 16 * 64 * 4)


def test_packed_convolutions_count_like_the_plain_one_wherever_their_arguments_sit() -> None:
    x, w, y = torch.randn(2, 8, 16, 16), opaque(12, 4, 3, 3), torch.randn(2, 12, 14, 14)
    shape = [[0, 0], [1, 1], [1, 1], 2]
    expected = 2 * y.numel() * 4 * 9
    ops = torch.ops.mkldnn
    plain = build(ops._convolution_pointwise.default, [x, w, None, *shape, "none", [], ""], y)
    binary = build(ops._convolution_pointwise.binary, [x, y, w, None, *shape, "add", None, None, [], None], y)
    in_place = build(
        ops._convolution_pointwise_.binary, [y, x, w, None, *shape, "add", None, None, [], None], y
    )
    assert [node_cost(n).flops for n in (plain, binary, in_place)] == [expected] * 3


def test_a_fused_linear_hidden_in_a_partial_is_named_and_counted_by_its_operator() -> None:
    computation_op = torch.ops.mkldnn._linear_pointwise.default

    def lower(match: Any, *args: Any, **kwargs: Any) -> Any:  # as Inductor's pattern matcher leaves it
        return computation_op(*args)

    args = [torch.randn(16, 32), opaque(64, 32), None, "none", [], ""]
    fused = functools.partial(lower, object())
    fused.__name__ = "fn"  # type: ignore[attr-defined]
    node = build(fused, args, torch.randn(16, 64))
    assert target_name(node) == "mkldnn._linear_pointwise.default"
    assert is_matrix_product(target_name(node))
    assert node_cost(node).flops == 2 * 16 * 32 * 64


def test_pointwise_counts_its_output_and_a_reduction_its_input() -> None:
    graph = trace(lambda x: (torch.relu(x), x.sum(-1)), torch.randn(8, 16))
    assert node_cost(only(graph, aten.relu.default)).flops == 128
    assert node_cost(only(graph, aten.sum.dim_IntList)) == Cost(128.0, 512.0, 32.0)


def test_an_expanded_input_is_read_once_and_a_slice_only_in_part() -> None:
    graph = trace(lambda x, b: x[:2] + b.expand(2, 16), torch.randn(8, 16), torch.randn(16))
    assert node_cost(only(graph, aten.add.Tensor)) == Cost(32.0, (32 + 16) * 4.0, 32 * 4.0)


def test_an_expanded_input_with_gaps_is_read_without_its_gaps() -> None:
    graph = trace(lambda x, b: x + b[::2].expand(2, 16), torch.randn(2, 16), torch.randn(32))
    assert node_cost(only(graph, aten.add.Tensor)).bytes_read == (32 + 16) * 4


def test_one_tensor_used_twice_is_read_once() -> None:
    graph = trace(lambda x: x * x.view(8, 16), torch.randn(8, 16))
    assert node_cost(only(graph, aten.mul.Tensor)).bytes_read == 512


def test_an_embedding_reads_its_rows_and_not_its_table() -> None:
    graph = trace(lambda i, w: F.embedding(i, w), torch.zeros(2, 3, dtype=torch.int64), torch.randn(1000, 64))
    assert node_cost(only(graph, aten.embedding.default)) == Cost(0.0, 6 * 64 * 4 + 6 * 8, 6 * 64 * 4)
    graph = trace(lambda x, i: x[i], torch.randn(1000, 64), torch.zeros(5, dtype=torch.int64))
    assert node_cost(only(graph, aten.index.Tensor)).bytes_read == 5 * 64 * 4 + 5 * 8


def test_an_in_place_scatter_into_a_cache_writes_what_it_is_given() -> None:
    cache, rows = torch.randn(1000, 64), torch.randn(5, 64)
    node = build(aten.index_put_.default, [cache, [torch.zeros(5, dtype=torch.int64)], rows], cache)
    assert node_cost(node) == Cost(0.0, rows.numel() * 4 + 5 * 8, rows.numel() * 4)


def test_views_inputs_and_getitem_cost_nothing() -> None:
    graph = trace(lambda x: x.view(2, 64).unsqueeze(0), torch.randn(8, 16))
    assert {node_cost(n) for n in graph.nodes} == {Cost(0.0, 0.0, 0.0)}
    graph = trace(lambda x: x.split(4)[0] + 1, torch.randn(8, 16))
    parts = [n for n in graph.nodes if n.target in (operator.getitem, aten.split.Tensor)]
    assert len(parts) >= 2
    assert {node_cost(n).bytes for n in parts} == {0.0}


def test_a_reshape_moves_bytes_only_when_it_cannot_be_a_view() -> None:
    x = torch.randn(8, 16)
    free = build(aten.reshape.default, [x, [4, 32]], x.reshape(4, 32))
    copying = build(aten.reshape.default, [x.t(), [128]], torch.randn(128))
    assert node_cost(free).bytes == 0
    assert node_cost(copying) == Cost(0.0, 512.0, 512.0)


def test_an_operator_without_a_formula_is_not_given_one() -> None:
    graph = trace(lambda x: x.sort()[0], torch.randn(8, 16))
    cost = node_cost(only(graph, aten.sort.default))
    assert cost.flops is None
    assert cost.bytes_read == 512


def test_a_node_without_a_value_is_not_modelled() -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    assert node_cost(node) == Cost(None, 0.0, 0.0, modelled=False)
    assert node_cost(node).bytes is None


def test_symbolic_sizes_count_by_their_hint_and_stay_symbolic() -> None:
    gm = make_fx(lambda x, w: torch.relu(x @ w), tracing_mode="symbolic")(
        torch.randn(6, 16), torch.randn(16, 32)
    )
    node = only(gm.graph, aten.mm.default)
    env = node.meta["val"].shape[0].node.shape_env
    guards = len(env.guards)
    assert node_cost(node).flops == 2 * 6 * 16 * 32
    assert group_bytes([node, only(gm.graph, aten.relu.default)]) == (6 * 16 + 16 * 32 + 6 * 32) * 4
    assert len(env.guards) == guards
    assert isinstance(node.meta["val"].shape[0], torch.SymInt)


def test_an_unbacked_size_is_not_modelled() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    node = build(aten.relu.default, [torch.randn(4)], torch.randn(4))
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        node.meta["val"] = torch.empty(env.create_unbacked_symint())
    assert node_cost(node).bytes is None


def test_bytes_follow_the_dtype() -> None:
    graph = trace(lambda x: x.to(torch.float32), torch.randn(8, dtype=torch.bfloat16))
    cost = node_cost(only(graph, aten._to_copy.default))
    assert (cost.bytes_read, cost.bytes_written, cost.flops) == (16.0, 32.0, 8.0)


# --- fused groups


def test_what_stays_inside_a_group_moves_no_bytes() -> None:
    graph = trace(lambda x, y: torch.relu(x + y) * 2, torch.randn(8, 16), torch.randn(8, 16))
    assert group_bytes(named(graph, "add", "relu", "mul")) == 3 * 512
    assert group_bytes(named(graph, "add", "relu")) == 3 * 512
    assert group_bytes(named(graph, "mul")) == 2 * 512


def test_a_value_used_inside_and_outside_is_written_once() -> None:
    graph = trace(_relu_and_exp, torch.randn(8, 16))
    assert group_bytes(named(graph, "relu", "exp")) == 3 * 512


def _relu_and_exp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.relu(x)
    return y, y.exp()


def test_an_input_reached_through_two_views_is_read_once_and_disjoint_slices_add_up() -> None:
    graph = trace(lambda x: (x[:2] + x[2:4], x.t().relu().t() + x), torch.randn(8, 16))
    assert group_bytes(named(graph, "add")) == 3 * 2 * 16 * 4
    assert group_bytes(named(graph, "relu", "add_1")) == 2 * 512


def test_only_the_outputs_of_a_fused_reduction_that_leave_are_written() -> None:
    graph = trace(lambda x: torch.var_mean(x, -1)[1], torch.randn(8, 16))
    assert group_bytes(named(graph, "var_mean")) == 512 + 8 * 4


def test_a_view_outside_the_group_does_not_make_an_inner_value_external() -> None:
    graph = trace(lambda x: torch.relu(x).view(4, 32).exp(), torch.randn(8, 16))
    assert group_bytes(named(graph, "relu", "exp")) == 2 * 512


def test_a_buffer_changed_in_place_is_written_although_nobody_reads_the_result() -> None:
    node = build(aten.copy_.default, [torch.randn(8), torch.randn(8)], torch.randn(8))
    assert group_bytes([node]) == 64


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("aten.mm.default", True),
        ("aten.mm.dtype", True),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", True),
        ("mkl._mkl_linear", True),
        ("aten.mul.Tensor", False),
        ("aten.sum.dim_IntList", False),
    ],
)
def test_matrix_products_are_known_by_name(target: str, expected: bool) -> None:
    assert is_matrix_product(target) is expected
