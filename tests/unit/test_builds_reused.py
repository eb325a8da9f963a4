"""What compiling need not be done for: a pass that finds nothing to do, and one that only wraps what was compiled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from compiled_graphs import dynamo_graph
from torch import fx

from fxopt import testing
from fxopt.build import Builder
from fxopt.registry import Candidate, GraphPass, RuntimePass, Stage
from fxopt.torch_api import inductor
from fxopt.verify import Precision

aten = torch.ops.aten


class Rewriting(GraphPass):
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32
    seeks: ClassVar[Any] = None
    gives: ClassVar[Any] = None

    def candidates(self, graph: fx.Graph, context: Any) -> Iterable[Candidate]:
        for node in graph.nodes:
            if node.target is self.seeks:
                yield Candidate(node.name)
            elif node.target is aten.add.Tensor:
                yield Candidate(node.name, "an addition")

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: Any) -> None:
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(self.gives, (node.args[0], *self.gives_also())))
        graph.erase_node(node)

    def gives_also(self) -> tuple[Any, ...]:
        return ()


@dataclass(frozen=True)
class ReluToClamp(Rewriting):
    name: ClassVar[str] = "relu_to_clamp"
    seeks: ClassVar[Any] = aten.relu.default
    gives: ClassVar[Any] = aten.clamp_min.default

    def gives_also(self) -> tuple[Any, ...]:
        return (0.0,)


@dataclass(frozen=True)
class ClampToRelu(Rewriting):
    name: ClassVar[str] = "clamp_to_relu"
    after: ClassVar[tuple[str, ...]] = ("relu_to_clamp",)
    seeks: ClassVar[Any] = aten.clamp_min.default
    gives: ClassVar[Any] = aten.relu.default


@dataclass(frozen=True)
class ClampSooner(ClampToRelu):
    name: ClassVar[str] = "clamp_sooner"
    after: ClassVar[tuple[str, ...]] = ()
    before: ClassVar[tuple[str, ...]] = ("relu_to_clamp",)


@dataclass(frozen=True)
class Doubling(RuntimePass):
    name: ClassVar[str] = "doubling"
    stage: ClassVar[Stage] = Stage.RUNTIME
    precision: ClassVar[Precision] = Precision.FP32

    def wrap(self, fn: Any, inputs: Any, compiled: Any, context: Any) -> Any:
        return lambda *args: [2 * out for out in fn(*args)]


@pytest.fixture
def builder(fresh_dynamo) -> Builder:
    gm, inputs = dynamo_graph(lambda x: torch.relu(x) + 1, torch.randn(4))
    return Builder(gm, inputs, {}, testing.context(ReluToClamp()), record=True)


def test_a_pass_with_no_candidate_is_known_to_be_idle_without_compiling(builder, monkeypatch):
    with torch.no_grad():
        build = builder.build([ReluToClamp()])
    monkeypatch.setattr(inductor, "compile_graph", lambda *a, **k: pytest.fail("compiled"))
    assert builder.idle(ClampSooner(), build) == "an addition", "it runs before there is a clamp"


def test_what_an_earlier_pass_makes_counts(builder):
    with torch.no_grad():
        build = builder.build([ReluToClamp()])
    assert builder.idle(ClampToRelu(), build) == ""


def test_a_baseline_does_not_tell(builder):
    with torch.no_grad():
        assert builder.idle(ClampToRelu(), builder.baseline()) == ""


def test_a_wrapping_pass_is_put_around_the_code_that_is_there(builder, monkeypatch):
    x = torch.randn(4)
    with torch.no_grad():
        build = builder.build([ReluToClamp()])
        monkeypatch.setattr(inductor, "compile_graph", lambda *a, **k: pytest.fail("compiled"))
        wrapped = builder.rewrapped(build, [ReluToClamp(), Doubling()])
        plain = builder.rewrapped(wrapped, [ReluToClamp()])
        assert torch.equal(wrapped.fn(x)[0], 2 * (torch.relu(x) + 1))
        assert torch.equal(plain.fn(x)[0], torch.relu(x) + 1)
    assert [r.name for r in wrapped.reports] == ["relu_to_clamp", "doubling"]
    assert wrapped.effective and not wrapped.errors
    assert [r.name for r in plain.reports] == ["relu_to_clamp"]


def test_the_gpu_is_awake_before_the_first_call_of_code_that_a_trial_compiled(builder, monkeypatch):
    """Inductor times its kernels' variants in that call, and keeps the fastest on disk."""
    from fxopt import build as module

    order = []
    real = inductor.compile_graph
    monkeypatch.setattr(inductor, "compile_graph", lambda *a, **k: (order.append("compiled"), real(*a, **k))[1])
    monkeypatch.setattr(module, "wake", lambda device: order.append(f"awake: {device}"))
    with torch.no_grad():
        builder.baseline()
        builder.build([])
        assert order == ["compiled", "awake: cpu"] * 2
        replace(builder, record=False).build([])  # a plan's code: what its tuning kept is on disk
    assert order[4:] == ["compiled"]
