"""What operators outside of compiled graphs compute and move, from the inputs that a trace recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fxopt import metrics, rules
from fxopt.labels import Axis
from profiler_core.attribute.engine import attribute
from profiler_core.call_cost import call_cost
from profiler_core.collect import chrome_trace
from profiler_core.profiles import Profile
from profiler_core.roofline import Ceilings
from profiler_core.trace import OperatorInputs

F32 = 4


def trace_of(fn: Callable[[], Any], tmp_path, shapes: bool = True) -> dict[str, Any]:
    fn()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=shapes, acc_events=True
    ) as profiler:
        for number in range(2):
            with torch.profiler.record_function(f"fxopt::iteration#{number}"):
                fn()
    file = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(file))
    return json.loads(file.read_text())


def profiled(fn: Callable[[], Any], tmp_path, shapes: bool = True) -> Profile:
    return attribute(chrome_trace.parse(trace_of(fn, tmp_path, shapes)), (), {"device_type": "cpu"}, eager_nodes=True)


def work(profile: Profile) -> dict[str, tuple[float, float]]:
    nodes = profile.nodes[["node", "flops", "bytes"]].itertuples(index=False)
    return {node: (flops, moved) for node, flops, moved in nodes}


def test_linear_layers_norms_and_pointwise_operators_by_call(tmp_path):
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Softmax(-1)).eval()
    x = torch.randn(4, 16, 64)

    def call() -> None:
        with torch.no_grad():
            model(x)
            functional.linear(x, model[1].weight)

    found = work(profiled(call, tmp_path))
    wide, narrow = 4 * 16 * 128, 4 * 16 * 64
    # Both calls of the operator in an iteration are its node's, and the second has no bias to read.
    assert found["aten::linear"] == (2 * 2 * wide * 64, F32 * (2 * narrow + 2 * 64 * 128 + 128 + 2 * wide))
    assert found["aten::layer_norm"] == (narrow, F32 * (2 * narrow + 2 * 64))
    assert found["aten::gelu"] == (wide, F32 * 2 * wide)
    assert found["aten::softmax"] == (wide, F32 * 2 * wide)


def test_products_convolutions_and_attention(tmp_path):
    a, b = torch.randn(3, 8, 16), torch.randn(3, 16, 32)
    image, kernel = torch.randn(2, 6, 16, 16), torch.randn(8, 3, 3, 3)
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 24, 8)

    def call() -> None:
        torch.bmm(a, b)
        functional.conv2d(image, kernel, stride=2, padding=1, groups=2)
        functional.scaled_dot_product_attention(q, k, k)

    found = work(profiled(call, tmp_path))
    assert found["aten::bmm"] == (2 * 3 * 8 * 16 * 32, F32 * 3 * (8 * 16 + 16 * 32 + 8 * 32))
    out = 2 * 8 * 8 * 8
    assert found["aten::conv2d"] == (2 * out * 3 * 9, F32 * (image.numel() + kernel.numel() + out))
    scores = 2 * 4 * 16 * 24
    assert found["aten::scaled_dot_product_attention"] == (2 * 2 * scores * 8, F32 * 2 * (q.numel() + k.numel()))


def test_a_backward_pass_has_the_work_of_its_own_operators(tmp_path):
    layer, conv = nn.Linear(64, 32), nn.Conv2d(3, 8, 3, padding=1)
    norm = nn.LayerNorm(64)
    x, image = torch.randn(16, 64, requires_grad=True), torch.randn(2, 3, 16, 16)
    q = torch.randn(2, 4, 16, 8, requires_grad=True)

    def call() -> None:
        layer(norm(x)).sum().backward()
        conv(image).sum().backward()
        functional.scaled_dot_product_attention(q, q, q).sum().backward()

    found = work(profiled(call, tmp_path))
    # The gradients of the input and of the weight are a product each, both of 16 x 64 x 32.
    assert found["aten::mm"][0] == 2 * (2 * 16 * 64 * 32)
    out = 2 * 8 * 16 * 16
    assert found["aten::convolution_backward"][0] == 2 * out * 3 * 9  # of the weight alone: the image has no gradient
    attention = found["aten::_scaled_dot_product_flash_attention_for_cpu_backward"]
    assert attention[0] == 5 * (2 * 2 * 4 * 16 * 16 * 8)
    assert found["aten::native_layer_norm_backward"][0] == 16 * 64


def test_a_view_moves_nothing_and_a_copy_what_it_copies(tmp_path):
    x = torch.randn(8, 16, 32)

    def call() -> None:
        x.transpose(0, 1)
        x.transpose(0, 1).flatten(1)  # cannot be a view
        x.reshape(128, 32)  # can
        x.to(torch.float32)  # is it already
        x[0].to(torch.bfloat16)

    found = work(profiled(call, tmp_path))
    assert found["aten::transpose"] == found["aten::reshape"] == (0, 0)
    assert found["aten::flatten"] == (0, F32 * 2 * x.numel())
    assert found["aten::to"] == (0, (F32 + 2) * x[0].numel())


def test_what_the_trace_does_not_tell_is_missing(tmp_path):
    x = torch.randn(8, 16)

    def call() -> None:
        torch.cat([x, x])  # the types of the tensors in a list are not recorded
        x[x > 0]  # as large as the data say
        torch.einsum("ij,kj->ik", x, x)  # is nothing but the operators that it calls

    found = work(profiled(call, tmp_path))
    assert all(math.isnan(value) for name in ("aten::cat", "aten::index") for value in found[name])
    assert found["aten::einsum"][0] == 2 * 8 * 8 * 16
    without = profiled(call, tmp_path, shapes=False).nodes
    assert without["flops"].isna().all() and without["bytes"].isna().all()


def inputs(*arguments: tuple[str, list[int], list[int], str]) -> OperatorInputs:
    types, dims, strides, values = zip(*arguments, strict=True)
    return OperatorInputs(types, tuple(map(tuple, dims)), tuple(map(tuple, strides)), values)


def test_types_decide_the_bytes_and_a_damaged_record_is_missing():
    half = ("c10::Half", [8, 16], [16, 1], ""), ("c10::Half", [16, 4], [4, 1], "")
    found = call_cost("aten::mm", inputs(*half))
    assert found is not None and found.dtype == torch.float16 and found.shape == (8, 4)
    assert (found.flops, found.bytes) == (2 * 8 * 16 * 4, 2 * (8 * 16 + 16 * 4 + 8 * 4))
    assert call_cost("aten::mm", inputs(half[0])) is None
    assert call_cost("aten::mm", inputs(half[0], half[0])) is None  # 8x16 by 8x16 is no product
    assert call_cost("aten::mm", inputs(half[0], ("quint4", [16, 4], [4, 1], ""))) is None
    assert call_cost("mine::mm", inputs(*half)) is None
    assert call_cost("aten::no_such_operator", inputs(*half)) is None
    # A tensor without dimensions may be a number of Python's, which promotes integers to another type.
    assert call_cost("aten::mul", inputs(("long int", [8], [1], ""), ("double", [], [], ""))) is None


def test_the_work_of_sparse_tensors_is_missing(tmp_path):
    sparse, x = torch.eye(8).to_sparse(), torch.ones(8, 4)
    profile = profiled(lambda: torch.sparse.mm(sparse, x).relu(), tmp_path)
    nodes = profile.nodes.set_index("node")
    product = next(node for node in nodes.index if "mm" in node)
    assert math.isnan(nodes.loc[product, "flops"]) and nodes.loc["aten::relu", "bytes"] == 2 * 8 * 4 * F32
    assert profile.attributed_ns == profile.total_ns == nodes["window_ns"].sum()


@pytest.mark.parametrize("broken", ["Input Dims", "Input type", "Concrete Inputs"])
def test_inputs_that_cannot_be_read_leave_the_operator_in_place(tmp_path, broken):
    x = torch.randn(8, 8)
    trace = trace_of(lambda: x @ x, tmp_path)
    for event in trace["traceEvents"]:
        if broken in event.get("args", {}):
            event["args"][broken] = "[[8, 8]"
    profile = attribute(chrome_trace.parse(trace), (), {"device_type": "cpu"}, eager_nodes=True)
    assert profile.nodes["node"].tolist() == ["aten::matmul"] and profile.nodes["flops"].isna().all()


def test_rules_are_asked_of_each_node_outside_of_the_graphs(tmp_path):
    x, wide = torch.randn(64, 64), torch.randn(256, 256)
    narrow = wide.bfloat16()

    def call() -> None:
        with torch.profiler.record_function("nn.Module: Small small"):
            x @ x
        with torch.profiler.record_function("nn.Module: Wide wide"):
            wide @ wide
        with torch.profiler.record_function("nn.Module: Narrow narrow"):
            narrow @ narrow
        x.t()

    profile = profiled(call, tmp_path)
    # So fast a device that every product takes longer than it has to.
    ceilings = Ceilings("a device", 1e18, {"float32": 1e18, "bfloat16": 2e18}, "2026-01-01")
    found = rules.label(profile, ceilings)
    idle = {label.nodes: label for label in found.labels if label.axis is Axis.TENSOR_CORE_IDLE}
    assert set(idle) == {("aten::matmul@small",), ("aten::matmul@wide",)}
    evidence = {item.metric: item for item in idle["aten::matmul@wide",].evidence}
    assert evidence["flops"].value == 2 * 256**3 and evidence["flops"].source == "modelled"
    assert evidence["time_ns"].source == "measured" and evidence["narrow_ceiling"].source == "ceiling"
    assert not any("aten::t" in label.nodes for label in found.labels)  # a view has nothing that could limit it
    assert not [line for line in found.missing if "flops" in line]
    assert not [label for label in rules.label(profile, None).labels if label.axis is Axis.TENSOR_CORE_IDLE]


def test_on_a_gpu_the_work_of_an_operator_is_that_of_all_its_kernels_once():
    def event(category: str, name: str, start: int, length: int, **args: Any) -> dict[str, Any]:
        device = category == "kernel"
        at = {"pid": 0, "tid": 7} if device else {"pid": 1, "tid": 1}
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": args, **at}

    given = {"Input type": ["float"] * 2, "Input Dims": [[64, 512], [512, 32]]}
    given |= {"Input Strides": [[512, 1], [32, 1]], "Concrete Inputs": ["", ""]}
    launched = {"device": 0, "stream": 7, "grid": [4, 1, 1], "block": [128, 1, 1]}
    profile = attribute(
        chrome_trace.parse(
            [
                event("user_annotation", "fxopt::iteration#0", 0, 100),
                event("user_annotation", "nn.Module: Linear up", 1, 50),
                event("cpu_op", "aten::mm", 2, 40, **given),
                event("cuda_runtime", "cudaLaunchKernel", 4, 2, correlation=1),
                event("cuda_runtime", "cudaLaunchKernel", 8, 2, correlation=2),
                event("kernel", "ampere_sgemm_64x64_splitK_nn", 10, 20, correlation=1, **launched),
                event("kernel", "splitKreduce_kernel", 30, 10, correlation=2, **launched),
            ]
        ),
        (),
        {"device_type": "cuda"},
        eager_nodes=True,
    )
    assert work(profile) == {"aten::mm@up": (2 * 64 * 512 * 32, F32 * (64 * 512 + 512 * 32 + 64 * 32))}
    (found,) = (values for values, facts in metrics.subjects(profile, None) if facts["scope"] == "kernel")
    assert found["time_ns"].value == 30_000 and found["flops"].value == 2 * 64 * 512 * 32
    ceilings = Ceilings("a GPU", 1e18, {"float32": 1e18, "bfloat16": 2e18}, "2026-01-01")
    idle = [label for label in rules.label(profile, ceilings).labels if label.axis is Axis.TENSOR_CORE_IDLE]
    assert [label.nodes for label in idle] == [("aten::mm@up",)]
