"""The private torch APIs that fxopt stands on do what fxopt takes them to do, on this version of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxopt.torch_api import calls, dynamo, inductor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.register_buffer("scale", torch.full((32,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(self.first(x))) * self.scale


@pytest.fixture(autouse=True)
def _reset(fresh_dynamo: None) -> None:
    return None


def in_backend(model: nn.Module, *args: torch.Tensor, body: Callable, dynamic: bool | None = None, grad: bool = False):
    """Run `body(gm, inputs)` inside a backend call and return what it returned."""
    results = []

    def backend(gm, inputs):
        results.append(body(gm, list(inputs)))
        return gm.forward

    with contextlib.nullcontext() if grad else torch.no_grad():
        torch.compile(model, backend=backend, dynamic=dynamic)(*args)
    return results[0]


def test_a_copied_graph_keeps_its_static_inputs_and_shares_no_node():
    def body(gm, inputs):
        copied = dynamo.copy_graph(gm)
        assert not set(copied.graph.nodes) & set(gm.graph.nodes)
        # AOTAutograd says what is static only where it traces the graph itself, not where its cache serves the code.
        with dynamo.isolated(keep_guards=False) as scope, inductor._autograd(cache=False, whole=False):
            inductor.compile_fx(copied, inputs)
        return scope.context.fw_metadata.static_input_indices, dynamo.static_inputs(gm, inputs)

    indices, static = in_backend(Net().eval(), torch.randn(4, 16), body=body)
    assert set(indices) == static
    assert len(static) == 5


def test_a_copied_graphs_code_is_generated_when_it_is_called_and_not_before():
    def body(gm, inputs):
        copied, made = dynamo.copy_graph(gm), []
        again = copied.graph.python_code
        copied.graph.python_code = lambda *args, **options: (made.append(1), again(*args, **options))[1]
        copied.recompile()
        assert made == []
        (mine,), (its,) = copied(*inputs), gm(*inputs)
        torch.testing.assert_close(mine, its)
        return made

    assert in_backend(Net().eval(), torch.randn(4, 16), body=body) == [1]


def test_deepcopy_alone_would_lose_them():
    """The fact that copy_graph exists for; if this fails, torch keeps them by itself now."""
    import copy

    def body(gm, inputs):
        copied = copy.deepcopy(gm)
        with (
            dynamo.isolated(keep_guards=False) as scope,
            inductor._autograd(cache=False, whole=False),
            contextlib.suppress(AssertionError),
        ):
            inductor.compile_fx(copied, inputs)
            return scope.context.fw_metadata.static_input_indices
        return []

    assert in_backend(Net().eval(), torch.randn(4, 16), body=body) == []


def test_compiling_leaves_dynamos_graph_and_the_context_alone():
    def body(gm, inputs):
        before, context = str(gm.graph), torch._guards.TracingContext.try_get()
        metadata = context.fw_metadata
        inductor.compile_graph(gm, inputs, patches={}, freeze=dynamo.static_inputs(gm, inputs))
        return (
            str(gm.graph) == before,
            torch._guards.TracingContext.try_get() is context,
            context.fw_metadata is metadata,
        )

    assert in_backend(Net().eval(), torch.randn(4, 16), body=body) == (True, True, True)


def test_frozen_code_takes_the_other_inputs_and_gives_the_same_numbers():
    model, x = Net().eval(), torch.randn(4, 16)

    def body(gm, inputs):
        compiled = inductor.compile_graph(gm, inputs, patches={}, freeze=dynamo.static_inputs(gm, inputs), capture=True)
        with dynamo.outside_tracing():
            held = sorted(tuple(value.shape) for value in compiled.constants.values())
            return compiled.placeholders, compiled.kept, compiled.flat(inputs)(*inputs)[0], len(inputs), held

    placeholders, kept, output, count, held = in_backend(model, x, body=body)
    assert {(32, 16), (16, 32)} & set(held), "the weights that it holds are seen, packed ones beside them"
    assert placeholders == len(kept) == 1
    assert count == 6
    torch.testing.assert_close(output, model(x).detach())


def test_the_graph_is_captured_even_where_a_cache_serves_the_code():
    def body(gm, inputs):
        first = inductor.compile_graph(gm, inputs, patches={}, capture=True)
        second = inductor.compile_graph(gm, inputs, patches={}, capture=True)
        return first, second

    first, second = in_backend(Net().eval(), torch.randn(4, 16), body=body)
    assert first.graph.source_code == second.graph.source_code
    assert first.graph is not None and second.graph is not None


def test_a_mutated_buffer_is_seen():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(x)
            return self.count * 2

    def body(gm, inputs):
        compiled = inductor.compile_graph(gm, inputs, patches={}, capture=True)
        again = inductor.compile_graph(gm, inputs, patches={}, capture=True)  # now served by a cache
        position = next(iter(dynamo.static_inputs(gm, inputs)))
        return compiled.mutated == frozenset({position}), again.mutated == frozenset({position})

    assert in_backend(Counter(), torch.ones(4), body=body) == (True, True)


def test_a_candidate_that_specialises_a_size_leaves_no_guard():
    class Specialise(inductor.CustomGraphPass):
        def __call__(self, graph):
            for node in graph.nodes:
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor) and isinstance(value.shape[0], torch.SymInt):
                    int(value.shape[0])  # a guard on this size
                    return

        def uuid(self):
            return "specialise"

    seen = []

    def backend(gm, inputs):
        shape_env = torch._guards.TracingContext.get().fake_mode.shape_env
        baseline = inductor.compile_graph(gm, inputs, patches={}, keep_guards=True)
        guards, replacements = len(shape_env.guards), dict(shape_env.replacements)
        candidate = inductor.compile_graph(gm, inputs, patches={}, slots={"joint": Specialise()}, caches=False)
        seen.append((candidate.new_guards, len(shape_env.guards) - guards, shape_env.replacements == replacements))
        return baseline.fn

    fn = torch.compile(lambda x: torch.relu(x) + x.shape[0], backend=backend, dynamic=True)
    with torch.no_grad():
        for size in (8, 12, 20):
            assert torch.equal(fn(torch.ones(size, 3)), torch.ones(size, 3) + size)
    assert len(seen) == 1, "a guard left behind forced a recompile"
    new, left, same = seen[0]
    assert new > 0
    assert (left, same) == (0, True)


def test_a_size_that_data_decide_is_not_taken_for_a_specialised_one():
    seen = []

    def backend(gm, inputs):
        compiled = inductor.compile_graph(gm, inputs, patches={}, caches=False, keep_guards=True)
        seen.append(compiled.new_guards)
        return compiled.fn

    fn = torch.compile(lambda x: torch.nonzero(x) + 1, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        assert fn(torch.eye(3)).tolist() == [[1, 1], [2, 2], [3, 3]]
    assert seen == [0]


def test_config_patches_end_with_the_compilation():
    import torch._inductor.config as config

    before = config.get_config_copy()
    in_backend(
        Net().eval(),
        torch.randn(4, 16),
        body=lambda gm, inputs: inductor.compile_graph(gm, inputs, patches={"max_fusion_size": 3}),
    )
    assert config.get_config_copy() == before


def test_the_gradient_mode_is_set_as_torchs_own_function_sets_it():
    for mode in (False, True):
        calls.set_grad_enabled(mode)
        assert torch.is_grad_enabled() is mode


def test_the_callable_of_a_compiled_model_runs_its_compiled_code():
    ran = []
    model = Net().eval()
    compiled = torch.compile(model, backend=lambda gm, inputs: lambda *args: ran.append(1) or gm.forward(*args))
    call, x = calls.callable_of(compiled), torch.randn(4, 16)
    assert torch.equal(call(x), model(x)) and ran == [1]
    assert call is not compiled, "the module around it is left out"
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, result: None)
    try:
        assert calls.callable_of(compiled) is compiled
    finally:
        hook.remove()
