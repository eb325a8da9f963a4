"""channels_last: the graph after, that copies between two convolutions cancel, and what it leaves to Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config

from fxopt import testing
from fxopt.manager import SlotPass
from fxopt.registry import Stage
from fxopt.torch_api import inductor
from passes.channels_last import ChannelsLast

aten = torch.ops.aten
#: a graph for which Inductor does not decide for channels-last order
CHANNELS_FIRST = {"layout_optimization": False}


@pytest.fixture
def channels_first():
    with config.patch(CHANNELS_FIRST):
        yield


def conv(x, w, b=None):
    return F.conv2d(x, w, b, padding=1)


def stack(x, a, b):
    return torch.relu(conv(torch.relu(conv(x, a)), b)).flatten(1)


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(2, 8, 10, 10), torch.randn(16, 8, 3, 3), torch.randn(8, 16, 3, 3)


def test_operands_are_copied_and_the_result_keeps_its_strides(channels_first):
    x, w, _ = inputs()
    result = testing.run(ChannelsLast(), testing.capture(conv, x, w))
    assert result.after.splitlines()[2:] == [
        "clone_default: f32[2, 8, 10, 10][800, 1, 80, 8] = aten.clone.default(x, memory_format=channels_last)",
        "clone_default_1: f32[16, 8, 3, 3][72, 1, 24, 8] = aten.clone.default(w, memory_format=channels_last)",
        "convolution_default: f32[2, 16, 10, 10][1600, 1, 160, 16] = "
        "aten.convolution.default(clone_default, clone_default_1, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)",
        "clone_default_2: f32[2, 16, 10, 10] = "
        "aten.clone.default(convolution_default, memory_format=contiguous_format)",
        "return clone_default_2",
    ], result.after


def test_the_numbers_and_the_strides_stay(channels_first):
    x, a, b = inputs()
    result = testing.run(ChannelsLast(), testing.capture(stack, x, a, b))
    assert result.report.rewritten == 2, str(result)
    (out,) = result.fn(x, a, b)
    torch.testing.assert_close(out, stack(x, a, b), rtol=1e-5, atol=1e-4)
    assert out.stride() == stack(x, a, b).stride()


def test_a_value_that_two_convolutions_read_is_copied_once(channels_first):
    x, a, _ = inputs()
    result = testing.run(ChannelsLast(), testing.capture(lambda x, a, b: conv(x, a) + conv(x, b), x, a, a + 1))
    one, two = (n for n in result.module.graph.nodes if n.target is aten.convolution.default)
    assert one.args[0] is two.args[0] and one.args[1] is not two.args[1]


def kernels(fn, args: tuple[torch.Tensor, ...], passes: list[Any]) -> int:
    """Kernels that Inductor makes of the graph, its convolutions not counted."""
    gm = testing.capture(fn, *args)
    nodes = [n.name for n in gm.graph.nodes if n.target is aten.convolution.default]
    context = testing.context(ChannelsLast(), labels=testing.labels(gm, "memory_bound", nodes=nodes))
    slots: Any = {"joint": SlotPass(passes, context, Stage.JOINT)} if passes else {}
    with torch.no_grad():
        compiled = inductor.compile_graph(gm, list(args), patches=CHANNELS_FIRST, slots=slots, caches=False)
        result, expected = compiled.flat()(*args), fn(*args)
    torch.testing.assert_close(result[0], expected, rtol=1e-5, atol=1e-4)
    if passes:
        assert slots["joint"].reports[0].rewritten == len(nodes), slots["joint"].reports
    return sum(line.startswith(("cpp_fused", "    cpp_fused")) for line in compiled.graph.source_code.splitlines())


def test_copies_between_two_convolutions_cancel():
    args = inputs()
    before, after = kernels(stack, args, []), kernels(stack, args, [ChannelsLast()])
    # One more, for the input and a weight that is not frozen; the other weight's copy goes with the first relu.
    assert (before, after) == (2, 3)


def test_inductor_decides_for_the_whole_graph_on_the_cpu():
    x, a, _ = inputs()
    assert inductor.lays_out(testing.capture(conv, x, a).graph)
    testing.refuses(ChannelsLast(), conv, x, a, because="Inductor puts the whole graph")


@pytest.mark.parametrize(
    ("fn", "shapes", "because"),
    [
        (lambda x, w: F.conv1d(x, w), ((2, 8, 9), (4, 8, 3)), "for 2-d convolutions"),
        (lambda x, w: F.conv2d(x, w), ((2, 1, 9, 9), (4, 1, 3, 3)), "both orders are the same"),
        (
            lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w),
            ((2, 8, 9, 9), (4, 8, 3, 3)),
            "is in channels-last order",
        ),
    ],
)
def test_what_is_left_alone(channels_first, fn, shapes, because):
    testing.refuses(ChannelsLast(), fn, *(torch.randn(shape) for shape in shapes), because=because)


def test_a_convolution_without_a_label_is_left_alone(channels_first):
    x, w, _ = inputs()
    testing.refuses(ChannelsLast(), conv, x, w, because="not labelled", labels=())


def test_symbolic_sizes_are_refused():
    x, w, _ = inputs()
    context = testing.context(ChannelsLast(), dynamic=True)
    testing.refuses(ChannelsLast(), conv, x, w, because="symbolic", context=context)
