"""The twenty counters: names and passes on every chip, as CUPTI's own evaluator has them, and how they aggregate."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from profiler_core.collect.cupti import host
from profiler_core.collect.cupti.library import CountersUnavailable
from profiler_core.counter_table import ROW_COLUMNS, CounterTable
from profiler_core.counters import (
    CHIPS,
    COUNTERS,
    COVERAGE,
    FULL,
    FULL_PASSES,
    QUICK,
    QUICK_PASSES,
    UnknownChip,
    aggregate,
    chip_of,
    family,
    from_metrics,
    metric_names,
    metrics,
)

GH100 = metrics("GH100")


@pytest.fixture(scope="module")
def known_chips() -> list[str]:
    try:
        return host.chips()
    except CountersUnavailable as error:
        pytest.skip(f"needs nvidia-cuda-cupti: {error}")


def test_there_are_twenty_and_they_cover_what_limits_a_kernel() -> None:
    assert len(COUNTERS) == len(set(FULL)) == 20
    assert {counter.axis for counter in COUNTERS} == {
        "latency", "memory bandwidth", "L1", "L2", "compute", "tensor cores", "occupancy", "issue efficiency",
        "divergence", "register pressure", "spills", "shared memory",
    }  # fmt: skip
    assert {c.key for c in COUNTERS if c.launch} == {"registers", "shared_memory", "waves_per_sm"}
    assert set(QUICK) < set(FULL)


@pytest.mark.parametrize("chip", CHIPS)
def test_every_name_exists_on_the_chip(chip: str, known_chips: list[str]) -> None:
    assert chip in known_chips
    assert host.unknown(chip, metric_names(chip)) == []
    assert set(metrics(chip)) == {c.key for c in COUNTERS if not c.launch}, "no chip lacks a counter altogether"


@pytest.mark.parametrize("chip", CHIPS)
def test_the_quick_and_the_full_set_take_the_passes_that_they_say(chip: str, known_chips: list[str]) -> None:
    assert host.passes(chip, metric_names(chip, QUICK)) == QUICK_PASSES
    assert host.passes(chip, metric_names(chip, FULL)) == FULL_PASSES


@pytest.mark.parametrize("chip", CHIPS)
def test_the_whole_units_in_place_of_their_parts_would_take_seven_to_nine_passes(
    chip: str, known_chips: list[str]
) -> None:
    whole = {c.key: c.aliases for c in COUNTERS if c.key in ("sm_throughput", "l2_throughput")}
    names = [name for parts in {**metrics(chip), **whole}.values() for name in parts]
    assert 7 <= host.passes(chip, names) <= 9


def test_a_counter_says_what_it_costs_alone(known_chips: list[str]) -> None:
    measured = {c.key: max(host.passes(chip, c.names[chip]) for chip in c.names) for c in COUNTERS if not c.launch}
    assert measured == {c.key: c.passes for c in COUNTERS if not c.launch}


def test_relatives_of_a_chip_have_its_counters_or_lack_whole_counters(known_chips: list[str]) -> None:
    integrated = {"GA10B", "GB10B", "GB20B"}  # their memory is the host's, and dram__ is absent
    for chip in known_chips:
        try:
            names = metric_names(chip)
        except UnknownChip:
            continue
        missing = host.unknown(chip, names)
        assert all(name.startswith("dram__") for name in missing) if chip in integrated else not missing, chip


def test_a_chip_is_found_by_its_own_name_and_by_compute_capability() -> None:
    assert {family(chip) for chip in CHIPS} == set(CHIPS)
    assert [family(c) for c in ("GA104", "AD107", "GB102", "GB205")] == ["GA102", "AD102", "GB100", "GB202"]
    assert {chip_of(divmod(capability, 10)) for capability in CHIPS.values()} == set(CHIPS)
    assert chip_of((8, 7)) == "GA102" and chip_of((10, 3)) == "GB100"
    with pytest.raises(UnknownChip, match="TU102"):
        family("TU102")
    with pytest.raises(UnknownChip, match=r"7\.5"):
        chip_of((7, 5))


def test_an_unknown_key_is_refused_with_the_list_of_counters() -> None:
    with pytest.raises(ValueError, match=r"'ipc'.*gpu_time"):
        metrics("GH100", ["ipc"])


# --- from metrics to counters ------------------------------------------------------------------------------


def table(**columns: list[float]) -> CounterTable:
    n = len(next(iter(columns.values())))
    rows = {name: np.full(n, default, dtype=dtype) for name, (dtype, default) in ROW_COLUMNS.items()}
    return CounterTable(pd.DataFrame({**rows, **columns}))


def test_metrics_become_counters_by_the_names_of_the_chip() -> None:
    read = from_metrics(table(**{"dram__bytes_op_read.sum": [32.0, math.nan]}), "GB205")
    assert list(read.columns) == list(FULL)
    assert read["dram_read_bytes"].tolist()[0] == 32 and math.isnan(read["dram_read_bytes"][1])
    assert read.drop(columns="dram_read_bytes").isna().all(axis=None)
    assert from_metrics(table(**{"dram__bytes_op_read.sum": [32.0]}), "GH100").isna().all(axis=None)


def test_the_busiest_part_counts_and_one_missing_part_makes_the_counter_missing() -> None:
    parts = {name: [10.0 * (i + 1), 5.0] for i, name in enumerate(GH100["sm_throughput"])}
    parts[GH100["sm_throughput"][2]][1] = math.nan
    read = from_metrics(table(**parts), "GH100")["sm_throughput"]
    assert read[0] == 50.0 and math.isnan(read[1])
    del parts[GH100["sm_throughput"][0]]
    assert from_metrics(table(**parts), "GH100")["sm_throughput"].isna().all()


def test_a_report_that_holds_the_metric_of_the_whole_unit_is_read_by_that() -> None:
    parts = {name: [1.0, 2.0] for name in GH100["l2_throughput"]}
    whole = {"lts__throughput.avg.pct_of_peak_sustained_elapsed": [40.0, math.nan]}
    assert from_metrics(table(**parts, **whole), "GH100")["l2_throughput"].tolist() == [40.0, 2.0]


def test_a_recorded_ncu_report_gives_the_launch_counters(shared) -> None:
    path = shared / "captures" / "h200_block" / "ncu_raw_base_units.csv"
    raw = pd.read_csv(path, skiprows=[1], thousands=",")
    names = [c for c in raw.columns if "__" in c and raw[c].dtype.kind in "if"]
    read = from_metrics(table(**{name: raw[name].tolist() for name in names}), "GH100")
    assert len(read) == 42
    given = ["gpu_time", "dram_read_bytes", "achieved_occupancy", "l2_hit_rate", "registers", "shared_memory"]
    assert read[[*given, "waves_per_sm"]].notna().all(axis=None)
    assert read["sm_throughput"].isna().all()
    block = raw["launch__shared_mem_per_block"] - raw["launch__shared_mem_per_block_driver"]
    assert (read["shared_memory"] == block).all()


# --- aggregation -------------------------------------------------------------------------------------------


def test_sums_add_up_rates_are_weighted_by_duration_and_constants_take_the_largest() -> None:
    values = pd.DataFrame({"instructions": [1.0, 2.0, 4.0], "l2_hit_rate": [10.0, 50.0, 7.0], "registers": [32, 64, 8]})
    result = aggregate(values, [100, 300, 5], ["a", "a", "b"])
    assert result.loc["a"].to_dict() == {"instructions": 3, "l2_hit_rate": 40, "registers": 64, COVERAGE: 1}
    assert result.loc["b"].to_dict() == {"instructions": 4, "l2_hit_rate": 7, "registers": 8, COVERAGE: 1}


def test_a_sum_that_lacks_a_part_is_missing_and_a_rate_says_how_much_of_the_time_it_stands_for() -> None:
    values = pd.DataFrame({"instructions": [1.0, math.nan], "l2_hit_rate": [10.0, math.nan], "registers": [32.0, 64.0]})
    result = aggregate(values, [100, 300], ["a", "a"]).loc["a"]
    assert math.isnan(result["instructions"])
    assert (result["l2_hit_rate"], result["registers"], result[COVERAGE]) == (10, 64, 0.25)


def test_an_undefined_rate_does_not_make_a_kernel_unmeasured() -> None:
    values = pd.DataFrame({"instructions": [1.0, 2.0], "l1_hit_rate": [math.nan, 80.0]})
    result = aggregate(values, [900, 100], ["a", "a"]).loc["a"]
    assert result.to_dict() == {"instructions": 3, "l1_hit_rate": 80, COVERAGE: 1}


def test_groups_without_any_counter_or_without_time_are_told_apart() -> None:
    values = pd.DataFrame({"l2_hit_rate": [math.nan, 5.0], "instructions": [math.nan, 5.0]})
    result = aggregate(values, [10, 0], [("node", 1), ("node", 2)])
    assert list(result.index) == [("node", 1), ("node", 2)] and not isinstance(result.index, pd.MultiIndex)
    assert result[COVERAGE].tolist() == [0, 1]
    assert result["instructions"].tolist()[1] == 5 and result["l2_hit_rate"].isna().all()  # no time, no weight


def test_nothing_aggregates_to_nothing_and_unequal_lengths_are_refused() -> None:
    assert aggregate(pd.DataFrame({"instructions": []}), [], []).empty
    with pytest.raises(ValueError, match="1 rows of counters, 2 durations and 1 groups"):
        aggregate(pd.DataFrame({"instructions": [1.0]}), [1, 2], ["a"])
