"""Counters of one run beside the kernels of another: by name and order, and never beside the wrong kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from test_attribution import capture, h200_provenance

from profiler_core import counters
from profiler_core.attribute.counter_join import carried, with_counters
from profiler_core.attribute.engine import attribute
from profiler_core.collect import ncu
from profiler_core.collect.provenance import Launch, NodeInfo, Provenance
from profiler_core.counter_table import ROW_COLUMNS, CounterTable
from profiler_core.names import same_kernel
from profiler_core.profiles import Profile
from profiler_core.trace import Kernel, Op, Trace

INSTRUCTIONS, TIME = "smsp__inst_executed.sum", "gpu__time_duration.sum"
CHIP = "GH100"

# Two equal layers of a product (two kernels) and a generated kernel, then a copy and a kernel of no graph.
GRAPH = Provenance(
    "2.0",
    (
        Launch("extern_kernels.mm", 1, ("mm",), True),
        Launch("triton_poi_add_exp", 2, ("add", "exp"), False),
        Launch("extern_kernels.mm", 3, ("mm_1",), True),
        Launch("triton_poi_add_exp", 4, ("add_1", "exp_1"), False),
    ),
    {
        name: NodeInfo(name, "call_function", "t", bytes=float(size))
        for name, size in (("mm", 8), ("add", 3), ("exp", 1), ("mm_1", 8), ("add_1", 3), ("exp_1", 1))
    },
    "",
    graph="0/0",
)
PER_CALL = ["gemm", "splitK", "triton_poi_add_exp", "gemm", "splitK", "triton_poi_add_exp", "Memcpy DtoD", "eager"]
OWNERS = ["extern_kernels.mm:1"] * 2 + ["triton_poi_add_exp:2"] + ["extern_kernels.mm:3"] * 2
OWNERS += ["triton_poi_add_exp:4", "", ""]
MEASURED = [name for name in PER_CALL if "Memcpy" not in name]


def profile_of(calls: int = 2, names: Sequence[str] = PER_CALL, owners: Sequence[str] = OWNERS, **rest: Any) -> Profile:
    ops, kernels = [], []
    for call in range(calls):
        t = 100_000 * call
        ops.append(Op(f"fxopt::iteration#{call}", 1, t, t + 9_000))
        for i, (name, owner) in enumerate(zip(names, owners, strict=True)):
            at = t + 100 * i
            ops.append(Op(f"fxopt::{owner}@0/0" if owner else "aten::other", 1, at, at + 60))
            ops.append(Op("cudaLaunchKernel", 1, at + 10, at + 12, at + 1, "cuda_runtime"))
            kernels.append(Kernel(name, 0, 7, t + 20_000 + 5_000 * i, 4_000 + 100 * i, at + 1, (i + 1, 1, 1)))
    trace = Trace.of(ops, kernels, iterations=calls)
    trace.kernels.loc[trace.kernels["name"].str.startswith("Memcpy"), "kind"] = "memcpy"
    return replace(attribute(trace, GRAPH), **rest)


def table_of(names: Sequence[str], *, process: Sequence[int] | int = 0, first: int = 100, **rest: Any) -> CounterTable:
    """A row per name; the n-th has executed first + n instructions and taken 4 us."""
    rows = pd.DataFrame({name: [default] * len(names) for name, (_, default) in ROW_COLUMNS.items()})
    rows["name"], rows["process"] = list(names), process
    rows[INSTRUCTIONS] = np.arange(first, first + len(names), dtype="float64")
    rows[TIME] = 4_000.0
    return CounterTable(rows, **rest)


def instructions(profile: Profile) -> list[float | None]:
    return [None if np.isnan(value) else value for value in profile.kernels["instructions"]]


def noted(profile: Profile, text: str) -> bool:
    return any(text in note for note in profile.notes)


# --- whole tables ------------------------------------------------------------------------------------------


def test_the_rows_of_the_whole_window_are_its_kernels_in_order_without_the_copies() -> None:
    joined = with_counters(profile_of(), [table_of(MEASURED * 2)], CHIP)
    one, two = list(range(100, 107)), list(range(107, 114))
    assert instructions(joined) == [*one[:6], None, one[6], *two[:6], None, two[6]]
    assert list(joined.kernels["counters"]) == [*["measured"] * 6, "", "measured"] * 2
    assert set(joined.kernels.loc[joined.kernels["kind"] == "memcpy", "counters"]) == {""}
    assert [note for note in joined.notes if "counters:" in note] == [
        "ncu counters: 14 of 14 rows matched, to 14 of 14 kernels"
    ]


def test_the_rows_of_one_call_are_those_of_every_call() -> None:
    joined = with_counters(profile_of(3), [table_of(MEASURED)], CHIP)
    assert instructions(joined) == [*range(100, 106), None, 106] * 3


def test_kernels_outside_of_the_window_get_no_counters() -> None:
    profile = profile_of(2)
    profile.kernels.loc[profile.kernels["launch_ns"] < 100_000, "iteration"] = -1
    joined = with_counters(replace(profile, iterations=1), [table_of(MEASURED)], CHIP)
    assert instructions(joined) == [None] * 8 + [*range(100, 106), None, 106]


def test_a_profile_in_one_call_and_rows_of_two_cannot_be_told_apart() -> None:
    joined = with_counters(profile_of(1), [table_of(MEASURED * 2)], CHIP)
    assert instructions(joined) == [None] * 8 and noted(joined, "more than one place")


def test_kernels_of_two_streams_are_matched_in_the_order_of_their_launches() -> None:
    """Replay runs them one by one as they were launched; in the trace the second one started first."""
    ops = [
        Op("aten::one", 1, 0, 50),
        Op("cudaLaunchKernel", 1, 10, 12, 1, "cuda_runtime"),
        Op("aten::two", 1, 60, 99),
        Op("cudaLaunchKernel", 1, 70, 72, 2, "cuda_runtime"),
    ]
    kernels = [Kernel("first", 0, 7, 500, 10, 1), Kernel("second", 0, 20, 100, 10, 2)]
    joined = with_counters(attribute(Trace.of(ops, kernels)), [table_of(["first", "second"])], CHIP)
    assert joined.kernels.set_index("name")["instructions"].to_dict() == {"first": 100.0, "second": 101.0}


def test_nothing_to_match_is_said() -> None:
    empty = with_counters(attribute(Trace.build()), [table_of(["gemm"])], CHIP)
    assert len(empty.kernels) == 0 and noted(empty, "1 rows against 0 kernels")
    joined = with_counters(profile_of(), [table_of([])], CHIP)
    assert instructions(joined) == [None] * 16 and set(joined.kernels["counters"]) == {""}
    other = with_counters(profile_of(), [table_of(["unrelated"] * 14)], CHIP)
    assert instructions(other) == [None] * 16 and noted(other, "have no counter row")


# --- rows missing, or of other processes -------------------------------------------------------------------


@pytest.mark.parametrize("at", range(len(MEASURED) * 2))
def test_a_row_that_is_missing_costs_its_own_kernel_its_counters_and_no_other(at: int) -> None:
    table = table_of(MEASURED * 2)
    table.rows = table.rows.drop(index=at).reset_index(drop=True)
    whole, partial = (instructions(with_counters(profile_of(), [t], CHIP)) for t in (table_of(MEASURED * 2), table))
    place = [i for i, value in enumerate(whole) if value is not None][at]
    assert partial == [*whole[:place], None, *whole[place + 1 :]]
    assert noted(with_counters(profile_of(), [table], CHIP), "1 of 14 kernels have no counter row of their own")


def test_a_row_missing_of_the_only_call_that_was_profiled_is_missing_in_every_call() -> None:
    table = table_of(MEASURED)
    table.rows = table.rows.drop(index=2).reset_index(drop=True)
    joined = with_counters(profile_of(2), [table], CHIP)
    assert instructions(joined) == [100, 101, None, 103, 104, 105, None, 106] * 2
    assert noted(joined, "1 of 7 kernels have no counter row")


def test_each_process_of_a_table_is_matched_by_itself() -> None:
    names = ["helper", *MEASURED[:3], "helper", *MEASURED[3:]]  # the rows of two processes interleaved
    process = [1 if name == "helper" else 2 for name in names]
    joined = with_counters(profile_of(1), [table_of(names, process=process)], CHIP)
    assert instructions(joined) == [101, 102, 103, 105, 106, 107, None, 108]
    assert noted(joined, "(process 1)") and not noted(joined, "(process 2)")


def test_of_two_processes_that_ran_the_same_the_first_counts_and_it_is_said() -> None:
    joined = with_counters(profile_of(1), [table_of(MEASURED * 2, process=[1] * 7 + [2] * 7)], CHIP)
    assert instructions(joined) == [*range(100, 106), None, 106]
    assert noted(joined, "7 kernels have counters from more than one table or process")


def test_tables_of_different_metrics_complete_each_other() -> None:
    first, second = table_of(MEASURED), table_of(MEASURED)
    second.rows = second.rows.drop(columns=INSTRUCTIONS).assign(**{"dram__bytes_read.sum": 7.0})
    joined = with_counters(profile_of(1), [first, second], CHIP)
    assert instructions(joined) == [*range(100, 106), None, 106]
    assert joined.kernels["dram_read_bytes"].dropna().tolist() == [7.0] * 7
    assert not noted(joined, "more than one table")


def test_what_a_table_says_of_itself_is_kept() -> None:
    joined = with_counters(profile_of(1), [table_of(MEASURED, notes=("left out",), partial=("cut off",))], CHIP)
    assert noted(joined, "ncu counters: left out") and noted(joined, "ncu counters: cut off")


# --- rows without names ------------------------------------------------------------------------------------


def unnamed(count: int, times: Sequence[float] | None = None) -> CounterTable:
    table = table_of([""] * count, source="cupti")
    if times is not None:
        table.rows[TIME] = list(times)
    return table


def test_rows_without_names_are_matched_by_number() -> None:
    assert instructions(with_counters(profile_of(), [unnamed(7)], CHIP)) == [*range(100, 106), None, 106] * 2
    assert instructions(with_counters(profile_of(), [unnamed(14)], CHIP))[8:] == [*range(107, 113), None, 113]


def test_rows_without_names_of_another_number_match_nothing() -> None:
    joined = with_counters(profile_of(), [unnamed(6)], CHIP)
    assert instructions(joined) == [None] * 16 and noted(joined, "6 rows without names against")


def test_rows_without_names_that_take_other_times_are_of_another_sequence() -> None:
    times = [4_000.0] * 5 + [90_000.0, 4_000.0]  # one of seven: more than a tenth
    joined = with_counters(profile_of(), [unnamed(7, times)], CHIP)
    assert instructions(joined) == [None] * 16
    assert noted(joined, "only 86% of the rows") and noted(joined, "nothing was matched")


# --- one row or kernel of a capture perturbed --------------------------------------------------------------


@pytest.fixture(scope="module")
def block(shared: Path) -> tuple[Profile, CounterTable]:
    profile = attribute(capture(shared, "h200_block"), h200_provenance(shared))
    table = ncu.read(shared / "captures" / "h200_block" / "ncu_raw_base_units.csv")
    # A value that tells the rows apart; the metrics as they were recorded stay beside it.
    rows = table.rows[[*ROW_COLUMNS, TIME]].assign(**{INSTRUCTIONS: np.arange(42.0)})
    return profile, replace(table, rows=rows)


def perturbed(names: list[str], change: str) -> list[tuple[set[int], list[int]]]:
    """(positions concerned, new order) for every position at which ``change`` can be made."""
    order, found = list(range(len(names))), []
    for at in order:
        if change == "dropped":
            found.append(({at}, order[:at] + order[at + 1 :]))
        elif change == "duplicated":
            found.append(({at}, order[: at + 1] + order[at:]))
        elif at + 1 < len(order) and not same_kernel(names[at], names[at + 1]):
            found.append(({at, at + 1}, [*order[:at], at + 1, at, *order[at + 2 :]]))
    return found


@pytest.mark.parametrize("change", ["dropped", "duplicated", "swapped"])
def test_perturbing_one_row_changes_the_counters_of_its_kernel_alone(
    block: tuple[Profile, CounterTable], change: str
) -> None:
    profile, table = block
    assert instructions(with_counters(profile, [table], CHIP)) == list(range(42))
    for concerned, order in perturbed(table.rows["name"].tolist(), change):
        rows = table.rows.iloc[order].reset_index(drop=True)
        for kernel, value in enumerate(instructions(with_counters(profile, [replace(table, rows=rows)], CHIP))):
            assert value == kernel if kernel not in concerned else value in (kernel, None)


@pytest.mark.parametrize("change", ["dropped", "duplicated", "swapped"])
def test_perturbing_one_kernel_changes_its_own_counters_alone(block: tuple[Profile, CounterTable], change: str) -> None:
    profile, table = block
    for concerned, order in perturbed(profile.kernels["name"].tolist(), change):
        kernels = profile.kernels.iloc[order].reset_index(drop=True)
        kernels["launch_ns"] = np.arange(len(kernels))
        found = instructions(with_counters(replace(profile, kernels=kernels), [table], CHIP))
        for kernel, value in zip(order, found, strict=True):
            assert value == kernel if kernel not in concerned else value in (kernel, None)


# --- parts, and what is carried ----------------------------------------------------------------------------

TWINS = {("0/0", f"{name}:{at}"): ("0/0", f"{name}:{first}") for name, at, first in (
    ("extern_kernels.mm", 1, 1), ("extern_kernels.mm", 3, 1), ("triton_poi_add_exp", 2, 2), ("triton_poi_add_exp", 4, 2)
)}  # fmt: skip
CHOSEN = set(TWINS.values())


def test_a_table_of_some_launches_alone_is_matched_to_their_kernels() -> None:
    joined = with_counters(profile_of(), [unnamed(3)], CHIP, only=CHOSEN)
    assert instructions(joined) == [100, 101, 102, *[None] * 5] * 2


def test_counters_are_carried_to_the_twins_and_say_so() -> None:
    profile = with_counters(profile_of(), [unnamed(3)], CHIP, only=CHOSEN)
    whole = carried(profile, TWINS)
    assert instructions(whole) == [100, 101, 102, 100, 101, 102, None, None] * 2
    assert list(whole.kernels["counters"]) == [*["measured"] * 3, *["carried"] * 3, "", ""] * 2
    assert list(whole.kernels["duration_ns"]) == list(profile.kernels["duration_ns"])  # each has its own
    assert list(whole.kernels["grid"]) == list(profile.kernels["grid"])
    assert noted(whole, "carried to 6 kernels")
    nodes = whole.nodes.set_index("node")["instructions"]
    assert nodes["mm_1"] == nodes["mm"] == 201 and nodes["add_1"] == nodes["add"] == 102 * 0.75


def test_a_twin_that_ran_other_kernels_gets_nothing() -> None:
    names = [*PER_CALL[:3], "gemm", "other", *PER_CALL[5:]]
    profile = with_counters(profile_of(names=names), [unnamed(3)], CHIP, only=CHOSEN)
    whole = carried(profile, TWINS)
    assert instructions(whole) == [100, 101, 102, None, None, 102, None, None] * 2
    assert noted(whole, "1 launches ran other kernels than their twins")


def test_a_launch_with_counters_of_its_own_keeps_them() -> None:
    profile = with_counters(profile_of(), [table_of(MEASURED)], CHIP)
    assert instructions(carried(profile, TWINS)) == instructions(profile)
    assert "carried" not in set(carried(profile, TWINS).kernels["counters"])


def test_where_the_representative_was_not_measured_nothing_is_carried_and_it_is_said() -> None:
    profile = with_counters(profile_of(), [table_of(["unrelated"] * 7)], CHIP)
    whole = carried(profile, TWINS)
    assert instructions(whole) == [None] * 16
    assert noted(whole, "the twins of 2 launches have no counters")


def test_a_copy_in_a_launch_does_not_keep_its_kernels_from_their_twins() -> None:
    """A product that clears its workspace first."""
    names = ["Memcpy DtoD", "gemm", "Memcpy DtoD", "gemm"]
    owners = ["extern_kernels.mm:1"] * 2 + ["extern_kernels.mm:3"] * 2
    profile = profile_of(1, names, owners)
    joined = carried(with_counters(profile, [unnamed(1)], CHIP, only=CHOSEN), TWINS)
    assert instructions(joined) == [None, 100, None, 100]


# --- values ------------------------------------------------------------------------------------------------


def test_sums_are_conserved_from_kernels_to_nodes() -> None:
    joined = with_counters(profile_of(), [table_of(MEASURED * 2)], CHIP)
    owned = joined.kernels["launch"] != ""
    per_call = joined.kernels.loc[owned, "instructions"].sum() / joined.iterations
    assert joined.nodes["instructions"].sum() == pytest.approx(per_call)
    by_node = joined.by("node").set_index("node")["instructions"]
    assert by_node.drop("").sum() == pytest.approx(per_call)
    assert np.isnan(by_node[""])  # a copy among them was not counted, and a sum of the rest would be too small


def test_counters_of_a_capture_are_conserved(block: tuple[Profile, CounterTable]) -> None:
    profile, table = block
    joined = with_counters(profile, [table], CHIP)
    assert joined.nodes["instructions"].sum() == pytest.approx(sum(range(42)) / 2)
    assert set(joined.nodes["counter_coverage"].dropna()) == {1.0}


def test_the_launch_record_stands_and_what_it_lacks_is_taken_from_the_table() -> None:
    profile = profile_of(1)
    profile.kernels.loc[0, "registers"] = 99
    table = table_of(MEASURED)
    table.rows["launch__registers_per_thread"] = 40.0
    table.rows["launch__shared_mem_per_block_static"] = 0.0
    table.rows["launch__shared_mem_per_block_dynamic"] = 16_383.99999  # 16.38 Kbyte
    kernels = with_counters(profile, [table], CHIP).kernels
    assert list(kernels["registers"].dropna()) == [99, 40, 40, 40, 40, 40, 40]
    assert set(kernels["shared_memory"].dropna()) == {16_384} and str(kernels["shared_memory"].dtype) == "Int64"


def test_every_counter_has_its_column_and_what_was_not_measured_is_missing() -> None:
    kernels = with_counters(profile_of(1), [table_of(MEASURED)], CHIP).kernels
    measured = {"instructions", "gpu_time"}
    for counter in counters.COUNTERS:
        assert counter.key in kernels
        if not counter.launch:
            assert kernels[counter.key].notna().any() == (counter.key in measured)
    assert "gpu_time" in counters.FULL


def test_a_profile_with_counters_is_summed_up_by_any_of_its_columns() -> None:
    joined = with_counters(profile_of(), [table_of(MEASURED)], CHIP)
    for column in joined.kernels.columns:
        table = joined.by(column)
        assert table["time_ns"].sum() * joined.iterations == pytest.approx(joined.total_ns)
        assert list(table.columns).count(column) == 1
    by_name = joined.by("name").set_index("name")
    assert by_name.loc["gemm", "instructions"] == 100 + 103 and by_name.loc["gemm", "counter_coverage"] == 1.0
    assert np.isnan(by_name.loc["Memcpy DtoD", "instructions"])


def test_a_profile_with_counters_survives_its_file(tmp_path: Path) -> None:
    joined = carried(with_counters(profile_of(), [unnamed(3)], CHIP, only=CHOSEN), TWINS)
    joined.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    pd.testing.assert_frame_equal(loaded.kernels, joined.kernels)
    pd.testing.assert_frame_equal(loaded.nodes, joined.nodes)
    again = with_counters(Profile.load(tmp_path / "p.json"), [table_of(MEASURED * 2)], CHIP)
    assert instructions(again)[:3] == [100, 101, 102] and set(again.kernels["counters"]) == {"measured", ""}
