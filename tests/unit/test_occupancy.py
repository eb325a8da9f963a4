"""Occupancy, its limiter and waves, against ncu's own columns and torch.profiler's estimate."""

from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from profiler_core.counters import CHIPS
from profiler_core.occupancy import UnknownCapability, sm_limits, theoretical_occupancy, waves_per_sm

HOPPER = sm_limits((9, 0))


def test_every_chip_with_counters_has_limits_and_others_are_refused() -> None:
    for capability in CHIPS.values():
        assert sm_limits(divmod(capability, 10)).warps in (48, 64)
    with pytest.raises(UnknownCapability, match=r"7\.5.*8\.0"):
        sm_limits((7, 5))


def test_ncu_computes_the_same_for_every_kernel_of_a_capture(shared: Path) -> None:
    raw = pd.read_csv(shared / "captures/h200_block/ncu_raw_base_units.csv", skiprows=[1], thousands=",")
    assert len(raw) == 42
    shared_memory = raw["launch__shared_mem_per_block_static"] + raw["launch__shared_mem_per_block_dynamic"]
    arguments = (raw["launch__registers_per_thread"], shared_memory, raw["launch__block_size"], HOPPER)
    found = theoretical_occupancy(*arguments, configured=raw["launch__shared_mem_config_size"])
    for resource, column in (
        ("warps", "launch__occupancy_limit_warps"),
        ("blocks", "launch__occupancy_limit_blocks"),
        ("registers", "launch__occupancy_limit_registers"),
        ("shared memory", "launch__occupancy_limit_shared_mem"),
    ):
        np.testing.assert_array_equal(found.limits[resource], raw[column], err_msg=resource)
    np.testing.assert_allclose(found.percent, raw["sm__maximum_warps_per_active_cycle_pct"])
    waves = waves_per_sm(raw["launch__grid_size"], found.blocks_per_sm, 132)
    np.testing.assert_allclose(waves, raw["launch__waves_per_multiprocessor"], atol=0.005)
    # Without the configured size, as from an activity record, the driver is taken to have configured enough.
    without = theoretical_occupancy(*arguments)
    np.testing.assert_allclose(without.percent, found.percent)


def test_ncu_computes_the_same_limits_on_compute_capability_12(shared: Path) -> None:
    rows = [r for r in csv.reader((shared / "corpus/ncu/rtx5090_dsocr_k3_details.csv").open()) if len(r) > 15]
    names = rows[0]
    told = {r[names.index("Metric Name")]: r[names.index("Metric Value")] for r in rows[1:]}
    # 96 registers make 5 blocks of 128 threads; the report has no register count of its own
    found = theoretical_occupancy(96, 40 << 10, 128, sm_limits((12, 0)))
    assert found.limits["warps"] == float(told["Block Limit Warps"])
    assert found.limits["blocks"] == float(told["Block Limit SM"])
    assert found.limits["registers"] == float(told["Block Limit Registers"])
    assert found.limits["shared memory"] == float(told["Block Limit Shared Mem"])
    assert found.percent == pytest.approx(float(told["Theoretical Occupancy"]), abs=0.005)


@pytest.mark.parametrize(
    ("trace", "capability", "sms", "kernels"),
    [
        ("hta_a100_alexnet_extid_is_correlation.json.gz", (8, 0), 108, 79),
        ("tl_h100_bert.json.gz", (9, 0), 132, 60),
        ("tl_h100_qwen_kernels_without_launch.json.gz", (9, 0), 132, 1465),
        ("tl_b300_moe.json.gz", (10, 3), 148, 36),
    ],
)
def test_torch_profiler_estimates_from_the_same_occupancy(
    shared: Path, trace: str, capability: tuple[int, int], sms: int, kernels: int
) -> None:
    """Its "est. achieved occupancy" is the share of warps of the blocks that there are or that fit; it says 0 where a
    block opted in to more than 48 KiB of shared memory, which it takes to be too much.
    """
    with gzip.open(shared / "corpus/kineto" / trace) as file:
        events = [e["args"] for e in json.load(file)["traceEvents"] if str(e.get("cat")).lower() == "kernel"]
    assert len(events) == kernels
    limits = sm_limits(capability)
    block = np.array([math.prod(e["block"]) for e in events])
    found = theoretical_occupancy(
        [e["registers per thread"] for e in events], [e["shared memory"] for e in events], block, limits
    )
    present = np.array([math.prod(e["grid"]) for e in events]) / sms
    estimate = 100 * np.minimum(present, found.blocks_per_sm) * np.ceil(block / 32) / limits.warps
    told = np.array([e["est. achieved occupancy %"] for e in events])
    opted_in = np.array([e["shared memory"] > 48 << 10 for e in events])
    np.testing.assert_allclose(estimate[~opted_in], told[~opted_in], atol=1)
    assert (told[opted_in] == 0).all() and (estimate[opted_in] > 0).all()


def test_the_limiter_is_what_runs_out_first() -> None:
    found = theoretical_occupancy([16, 16, 255, 16], [0, 0, 0, 100 << 10], [1024, 32, 256, 128], HOPPER)
    assert found.limiter.tolist() == ["warps", "blocks", "registers", "shared memory"]
    assert found.blocks_per_sm.tolist() == [2, 32, 1, 2]
    assert found.percent.tolist() == [100, 50, 12.5, 12.5]


def test_what_cannot_fit_has_no_occupancy_and_what_is_not_known_none_either() -> None:
    too_large = theoretical_occupancy(255, 300 << 10, 1024, HOPPER)
    assert too_large.percent == 0 and too_large.limiter == "registers"
    unknown = theoretical_occupancy([-1, 32, 32], [0, -1, 0], [128, 128, 0], HOPPER)
    assert np.isnan(unknown.percent).all() and np.isnan(unknown.limits["warps"]).all()
    assert unknown.limiter.tolist() == ["", "", ""]
    assert np.isnan(waves_per_sm([0, 132], [1, np.nan], 132)).all()


def test_a_full_wave_is_one() -> None:
    assert waves_per_sm([132, 264, 133], [1, 1, 1], 132).tolist() == [1, 2, 133 / 132]
