"""Counters read in-process on an NVIDIA GPU: plausible values, one row a kernel, the same twice, nothing left on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import pytest
import torch

from profiler_core.collect.cupti import host
from profiler_core.collect.cupti.library import CountersNotPermitted
from profiler_core.collect.cupti.session import Collection, Replay, collect
from profiler_core.counters import (
    COUNTERS,
    FULL,
    FULL_PASSES,
    QUICK,
    QUICK_PASSES,
    UnknownChip,
    chip_of,
    from_metrics,
    metric_names,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
GIB = 1 << 30


@pytest.fixture(scope="module")
def chip() -> str:
    try:
        return chip_of(torch.cuda.get_device_capability(DEVICE))
    except UnknownChip as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", autouse=True)
def permitted(chip: str) -> None:
    x = torch.ones(8, device=DEVICE)
    try:
        collect(lambda: x + 1, metric_names(chip, ["gpu_time"]), replay="application")
    except CountersNotPermitted as error:
        pytest.skip(str(error))


def counters(
    fn: Callable[[], object], chip: str, keys: Sequence[str] = FULL, replay: Replay = "application", **options
) -> tuple[pd.DataFrame, Collection]:
    with torch.no_grad():
        collected = collect(fn, metric_names(chip, keys), replay=replay, **options)
    print(collected.cost())
    return from_metrics(collected.table, chip), collected


def matmul(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    a, b = torch.randn(2048, 2048, device=DEVICE, dtype=dtype), torch.randn(2048, 2048, device=DEVICE, dtype=dtype)
    return lambda: a @ b


def test_a_copy_of_a_gib_reads_one_and_writes_one(chip: str) -> None:
    source = torch.empty(GIB // 4, device=DEVICE)
    target = torch.empty_like(source)
    values, collected = counters(lambda: torch.add(source, 1, out=target), chip)
    assert len(values) == 1 and collected.passes == FULL_PASSES
    kernel = values.iloc[0]
    assert kernel["dram_read_bytes"] + kernel["dram_write_bytes"] == pytest.approx(2 * GIB, rel=0.1)
    assert kernel["dram_throughput"] > 50
    assert kernel["tensor_active"] < 1 and kernel["local_load_bytes"] == 0
    assert kernel["threads_per_instruction"] == pytest.approx(32, rel=0.05)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.add(source, 1, out=target)
    end.record()
    torch.cuda.synchronize()
    assert kernel["gpu_time"] == pytest.approx(begin.elapsed_time(end) * 1e6, rel=0.25)


def test_every_measured_counter_of_a_product_has_a_value_in_its_range(chip: str) -> None:
    values, _ = counters(matmul(torch.float32), chip)
    measured = [c for c in COUNTERS if not c.launch]
    assert values[[c.key for c in measured if c.key != "l1_hit_rate"]].notna().all(axis=None)
    for counter in measured:
        column = values[counter.key].dropna()
        assert (column >= 0).all(), counter.key
        if counter.unit == "%":
            assert (column <= 110).all(), counter.key  # a count and its cycles may come from different passes
    assert (values["threads_per_instruction"] <= 32).all()


def test_tensor_cores_work_for_bf16_and_not_for_fp32(chip: str) -> None:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        fp32, _ = counters(matmul(torch.float32), chip, ["tensor_active", "sm_throughput"])
        bf16, _ = counters(matmul(torch.bfloat16), chip, ["tensor_active", "sm_throughput"])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    assert bf16["tensor_active"].max() > 10
    assert fp32["tensor_active"].max() < 1  # not 0: see the counter's meaning
    assert fp32["sm_throughput"].max() > 50


def test_instruction_counts_agree_between_runs_and_between_replays(chip: str) -> None:
    fn = matmul(torch.float32)
    first, _ = counters(fn, chip, ["instructions"])
    again, _ = counters(fn, chip, ["instructions"])
    kernel, collected = counters(fn, chip, ["instructions"], replay="kernel")
    assert collected.replay == "kernel"
    for other in (again, kernel):
        np.testing.assert_allclose(other["instructions"], first["instructions"], rtol=0.01)


def test_the_quick_set_takes_two_passes_on_the_device_itself(chip: str) -> None:
    calls = []
    fn = matmul(torch.bfloat16)
    _, collected = counters(lambda: (calls.append(1), fn()), chip, QUICK, warmup=1)
    assert collected.passes == QUICK_PASSES == len(calls) - 1
    assert host.passes(chip, metric_names(chip, QUICK)) == QUICK_PASSES


def test_ranges_are_kernels_in_launch_order(chip: str) -> None:
    sizes = [1 << n for n in (20, 24, 21, 26, 22)]
    tensors = [torch.ones(n, device=DEVICE) for n in sizes]
    values, collected = counters(lambda: [t.add_(1) for t in tensors], chip, ["instructions"], kernels=5)
    assert np.argsort(values["instructions"]).tolist() == np.argsort(sizes).tolist()
    assert len(collected.table.notes) == 1


def test_more_kernels_than_expected_are_all_collected(chip: str) -> None:
    x = torch.ones(64, device=DEVICE)
    values, collected = counters(lambda: [x.add_(1) for _ in range(700)], chip, ["instructions"])
    assert len(values) == 700 and not collected.table.partial
    assert values["instructions"].nunique() == 1


def test_training_is_collected_by_kernel_replay_and_its_result_is_that_of_two_steps(chip: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256, device=DEVICE)
    x = torch.randn(64, 256, device=DEVICE)

    def step() -> None:
        model(x).square().sum().backward()

    collected = collect(step, metric_names(chip, ["instructions"]), state=list(model.parameters()), warmup=0)
    assert collected.replay == "kernel" and "gradient" in collected.reason
    counted = model.weight.grad.clone()
    model.zero_grad()
    step(), step()
    torch.testing.assert_close(counted, model.weight.grad)
    forward_only, _ = counters(lambda: model(x), chip, ["instructions"])
    assert len(collected.table.rows) > len(forward_only), "the kernels of the backward, launched from another thread"


def test_inference_is_collected_by_application_replay(chip: str) -> None:
    model, x = torch.nn.Linear(256, 256, device=DEVICE).eval(), torch.randn(64, 256, device=DEVICE)
    with torch.no_grad():
        collected = collect(lambda: model(x), metric_names(chip, QUICK), state=[*model.parameters(), x])
    assert collected.replay == "application" and len(collected.pass_seconds) == QUICK_PASSES


def test_a_failing_function_leaves_the_counters_free_and_torch_profiler_working(chip: str) -> None:
    x = torch.ones(64, device=DEVICE)

    def fails() -> None:
        x.add_(1)
        raise KeyError("in the model")

    with pytest.raises(KeyError, match="in the model"):
        collect(fails, metric_names(chip, ["instructions"]), replay="application", warmup=0)
    values, _ = counters(lambda: x.add_(1), chip, ["instructions"])
    assert len(values) == 1
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        x.add_(1)
        torch.cuda.synchronize()
    assert any("elementwise" in event.key for event in profiler.key_averages())
    values, _ = counters(lambda: x.add_(1), chip, ["instructions"])
    assert len(values) == 1, "and counters work after torch.profiler"
