"""Every built-in pass for CUDA leaves random graphs equivalent on a real card, CUDA graphs among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from random_graph_helpers import (
    activated_product,
    built_in,
    cast_twice,
    copied_back,
    for_all,
    masked_attention,
    odd_product,
    plane_convolution,
    projections,
    recurrent,
    wide_convolution,
    wide_product,
)

from fxopt import registry, testing
from passes.attention_backend import AttentionBackend
from passes.pad_matmul import PadMatmul

pytestmark = pytest.mark.gpu

#: what makes a pass rewrite something, and in which share of the graphs it must
GRAPHS: dict[str, tuple[Callable[[], Any], float]] = {
    "causal_mask": (
        lambda: testing.graphs([masked_attention], dynamic=False, max_nodes=8, device="cuda"),
        0.3,
    ),
    "merge_projections": (
        lambda: testing.graphs([projections], dynamic=False, max_nodes=8, device="cuda"),
        0.3,
    ),
    "freeze_weights": (lambda: testing.graphs(device="cuda"), 0.5),
    "promote_matmul_precision": (
        lambda: testing.graphs(["matmul", "convolution", "attention"], device="cuda"),
        0.6,
    ),
    "split_precision_gemm": (
        lambda: testing.graphs([wide_product], dynamic=False, max_nodes=8, device="cuda"),
        0.5,
    ),
    "cuda_graphs": (lambda: testing.graphs(exclude=("random",), device="cuda"), 0.5),
    "tf32_matmul": (lambda: testing.graphs(["matmul"], device="cuda"), 0.5),
    "split_precision_attention": (
        lambda: testing.graphs(["attention", masked_attention], dtypes=[torch.float32], dynamic=False, device="cuda"),
        0.5,
    ),
    "attention_backend": (
        # Of contiguous operands flash gives another layout than the decomposition does, and leaves them alone.
        lambda: testing.graphs(["attention"], dtypes=[torch.bfloat16], dynamic=False, device="cuda"),
        0.15,
    ),
    "cudnn_algorithm": (
        lambda: testing.graphs(["convolution"], dynamic=False, max_nodes=8, device="cuda"),
        0.5,
    ),
    "channels_last": (
        lambda: testing.graphs([plane_convolution], dynamic=False, max_nodes=8, device="cuda"),
        0.5,
    ),
    "split_precision_conv": (
        lambda: testing.graphs([wide_convolution], dynamic=False, max_nodes=8, device="cuda"),
        0.5,
    ),
    "rnn_redispatch": (
        lambda: testing.graphs([recurrent], dynamic=False, max_nodes=8, device="cuda"),
        0.5,
    ),
    "inductor_options": (lambda: testing.graphs(device="cuda"), 0.9),
    "pad_matmul": (lambda: testing.graphs([odd_product], dynamic=False, device="cuda"), 0.5),
    "gemm_epilogue": (
        # cuBLASLt has the activation of one kind, and graphs that use the product elsewhere keep it.
        lambda: testing.graphs([activated_product], dynamic=False, max_nodes=8, device="cuda"),
        0.2,
    ),
    # Every value is rounded, so nothing may be decided by one.
    "bf16_graph": (
        lambda: testing.graphs(
            ["matmul"],
            dynamic=False,
            exclude=("comparison", "where", "indexing", "cast", "unary", "random", "write"),
            dtypes=[torch.float32],
            device="cuda",
        ),
        0.2,
    ),
    "remove_redundant_casts_and_copies": (
        lambda: testing.graphs([cast_twice, copied_back], dynamic=False, dtypes=[torch.float32], device="cuda"),
        0.6,
    ),
}
#: passes with other options than their own, for graphs as small as these
MAKE: dict[str, Callable[[], Any]] = {
    "attention_backend": lambda: AttentionBackend("flash"),
    "pad_matmul": lambda: PadMatmul(least=2),
}


def for_cuda() -> list[str]:
    known = registry.discover()
    return [name for name in built_in() if "cuda" in known[name].devices]


def test_the_passes_for_cuda_are_found():
    assert set(for_cuda()) == set(GRAPHS), "say in GRAPHS what makes a new pass rewrite something"


@pytest.mark.parametrize("name", for_cuda())
def test_a_built_in_pass_leaves_100_random_graphs_equivalent_on_a_card(name, monkeypatch):
    strategy, share = GRAPHS[name]
    p = MAKE.get(name, registry.discover()[name])()
    seen: Counter[bool] = Counter()

    refused: Counter[str] = Counter()

    def look(graph: testing.RandomGraph) -> None:
        result = testing.equivalent(p, graph)
        seen[result.changed] += 1
        refused.update(why for _, why in result.report.refused)

    # Another layout may bring cuDNN to another algorithm, and those in TF32 are cuDNN's choice by default.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with torch._inductor.config.patch(layout_optimization=False):  # or channels_last leaves all to Inductor
        for_all(strategy(), 100, look)
    assert seen[True] >= share * seen.total(), (seen, refused.most_common(5))


def test_a_replay_that_is_used_again_and_again_gives_what_the_graph_gives():
    """Three calls with other numbers, and once with a parameter that has moved."""
    p = registry.discover()["cuda_graphs"]()
    compared = 0

    def look(graph: testing.RandomGraph) -> None:
        nonlocal compared
        result = testing.run(p, graph.module, inputs=graph.inputs())
        if not result.changed:
            return
        with torch.no_grad():
            for seed in (0, 2, 4, 6):
                inputs = graph.inputs(seed)
                if seed == 6:
                    inputs = [x.clone() if i in graph.static else x for i, x in enumerate(inputs)]
                for got, expected in zip(result.fn(*inputs), graph.module(*inputs), strict=True):
                    torch.testing.assert_close(got, expected, equal_nan=True)
        compared += 1

    for_all(testing.graphs(exclude=("random", "write"), dynamic=False, device="cuda"), 50, look)
    assert compared >= 40


def test_random_numbers_of_the_card_are_compared():
    def once_more(fn: Callable[..., Any], *args: Any) -> Any:
        outputs = fn(*args)
        torch.rand(1, device="cuda")
        return outputs

    graph = testing.capture(lambda x: x * torch.rand(4, device="cuda"), torch.randn(4, device="cuda"))
    inputs = [graph.meta["example_inputs"]]
    budget = testing.context(device="cuda").budget
    assert testing.difference(graph, graph, inputs, budget=budget) == ""
    found = testing.difference(graph, lambda *args: once_more(graph, *args), inputs, budget=budget)
    assert found == "the random generators are in another state after the call"
