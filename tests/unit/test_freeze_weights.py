"""freeze_weights: batch normalisation is gone from code whose weights are held constant, at fp32's accuracy.

Inductor folds it into the layer before while it compiles frozen code, into a linear layer only where it is told to.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import config

from fxopt import testing
from fxopt.precision import FP32_FLOOR
from fxopt.torch_api import inductor
from passes.freeze_weights import FreezeWeights

aten = torch.ops.aten
#: what batch normalisation in evaluation mode is made of
ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsqrt.default}

LAYERS: dict[str, Any] = {
    "convolution": lambda: (nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)),
    "convolution with a bias": lambda: (nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32)),
    "depthwise convolution": lambda: (nn.Conv2d(16, 16, 3, groups=16, bias=False), nn.BatchNorm2d(16)),
    "1-d convolution": lambda: (nn.Conv1d(16, 32, 3), nn.BatchNorm1d(32)),
    "linear layer": lambda: (nn.Linear(16, 32), nn.BatchNorm1d(32)),
    "linear layer without a bias": lambda: (nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32)),
}
INPUTS = {"linear": (4, 16), "1-d": (2, 16, 9), "conv": (2, 16, 8, 8), "dept": (2, 16, 8, 8)}


def normalised(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """A layer and batch normalisation whose statistics, scale and shift are no identity, and an input."""
    torch.manual_seed(0)
    model = nn.Sequential(*LAYERS[kind](), nn.ReLU()).eval()
    norm: Any = model[1]
    for tensor in (norm.running_mean, norm.bias.data):
        tensor.normal_()
    for tensor in (norm.running_var, norm.weight.data):
        tensor.uniform_(0.5, 2)
    return model, torch.randn(next(shape for start, shape in INPUTS.items() if kind.startswith(start)))


def patches() -> dict[str, Any]:
    """The Inductor options that the pass asks for."""
    model, x = normalised("linear layer")
    result = testing.run(FreezeWeights(), testing.capture(model, x))
    assert result.configuration is not None and len(result.configuration.freeze) == 6, str(result)
    return dict(result.configuration.patches)


def arithmetic(graph: fx.GraphModule) -> int:
    return sum(node.target in ARITHMETIC for node in graph.graph.nodes)


@pytest.mark.parametrize("kind", LAYERS)
def test_batch_normalisation_is_folded_into_the_layer_before_it(kind):
    model, x = normalised(kind)
    assert arithmetic(testing.capture(model, x, stage="post_grad")) >= 4, "without frozen weights it is there"
    with config.patch(patches()):
        folded = testing.capture(model, x, stage="post_grad", freeze=True)
    assert arithmetic(folded) == 0, testing.text(folded)
    with torch.no_grad():
        (out,), own = folded(x), model(x)
        exact = model.double()(x.double())
    error, before = (((y.double() - exact).norm() / exact.norm()).item() for y in (out, own))
    assert error <= max(4 * before, FP32_FLOOR)


def test_a_linear_layer_needs_the_option_that_the_pass_sets():
    model, x = normalised("linear layer")
    assert set(patches()) <= inductor.config_keys()
    assert arithmetic(testing.capture(model, x, stage="post_grad", freeze=True)) > 0


def test_statistics_that_the_graph_updates_are_not_frozen():
    model, x = normalised("convolution")
    model.train()
    with torch.no_grad():
        result = testing.run(FreezeWeights(), testing.capture(model, x))
    written = {target for target, why in result.report.refused if why == "the graph writes to it"}
    assert any("running_mean" in name for name in written) and any("running_var" in name for name in written)


def test_weights_in_the_memory_of_a_written_input_are_not_frozen():
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(4, 4)[:2])
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            slot.add_(1)
            return self.layer(x) + (x @ self.keys.t()).mean()

    model = Pool()
    for slot, refused in ((torch.zeros(4), 0), (model.keys.as_strided((4,), (1,), 12), 1)):
        with torch.no_grad():
            result = testing.run(FreezeWeights(), testing.capture(model, torch.zeros(3, 4), slot))
        because = [why for _, why in result.report.refused if why.startswith("it shares memory with an input")]
        assert len(because) == refused, str(result)


@pytest.mark.parametrize(
    ("fields", "because"), [({"grad": True}, "gradients are on"), ({"session": False}, "may change between calls")]
)
def test_graphs_that_it_does_not_apply_to(fields, because):
    context = testing.context(FreezeWeights(), **fields)
    testing.refuses(FreezeWeights(), *normalised("convolution"), because=because, context=context)


def test_a_weight_without_elements_is_not_frozen():
    result = testing.run(FreezeWeights(), testing.capture(nn.Linear(0, 4).eval(), torch.ones(2, 0)))
    assert [why for _, why in result.report.refused] == ["it has no elements"]
    assert result.configuration is not None and len(result.configuration.freeze) == 1, "the bias"
