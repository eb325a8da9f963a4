"""Profiles of several ranks as one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from made_profiles import build, kernel, node

import profiler_core
from profiler_core.ranks import times


def rank(scale: int, *more: dict, calls: int = 2):
    """Two calls of one product that takes `scale` us."""
    rows = [kernel("gemm", 10_000_000 * i, 1000 * scale, iteration=i, nodes=("mm",)) for i in range(calls)]
    spent = calls * 1000 * scale
    nodes = [node("mm", time_ns=spent / calls, group_time_ns=spent / calls, window_ns=spent, share=1.0)]
    return replace(build([*rows, *more], nodes), iterations=calls, wall_ns=2000.0 * scale)


def test_nothing_is_lost_and_each_rank_keeps_its_part():
    merged = profiler_core.merge({0: rank(10), 3: rank(30)})
    assert merged.total_ns == 2 * 10_000 + 2 * 30_000 == merged.attributed_ns + merged.unattributed_ns
    assert merged.iterations == 4 and merged.kernel_ns == 20_000
    parts = merged.by("rank").set_index("rank")["share"].to_dict()
    assert parts == {3: pytest.approx(0.75), 0: pytest.approx(0.25)}
    (row,) = merged.nodes.to_dict("records")
    assert row["window_ns"] == merged.total_ns and row["time_ns"] == 20_000 and row["share"] == 1.0
    assert row["kernels"] == 1 and merged.groups()["time_ns"].tolist() == [20_000]


def test_the_slowest_rank_is_named_and_sets_the_wall_time():
    merged = profiler_core.merge([rank(10), rank(30), rank(20)])
    assert merged.notes[0].startswith(
        "rank 1 is the slowest of 3: 30.0 us of kernel time a call (rank 0 10.0 us; rank 2 20.0 us"
    )
    assert merged.wall_ns == 60_000
    assert "rank 2: a note" in merged.notes
    assert [one["rank"] for one in merged.environment["ranks"]] == [0, 1, 2]


def moving(start: int, duration: int, call: int = 0) -> dict:
    return kernel(
        "ncclDevKernel_AllReduce_Sum_f32", start, duration, iteration=call, family="collective", launch="", nodes=()
    )


def test_the_rank_that_the_others_wait_for_is_slow_however_long_their_collectives_take():
    waiting = rank(10, moving(10_000, 100_000), moving(10_010_000, 100_000, 1))
    working = rank(90, moving(90_000, 20_000), moving(10_090_000, 20_000, 1))
    assert waiting.kernel_ns == working.kernel_ns == 110_000
    note = profiler_core.merge([waiting, working]).notes[0]
    assert note.startswith("rank 1 is the slowest of 2: 90.0 us and 20.0 us of collectives (20.0 us not overlapped)")


def test_the_part_of_collectives_that_no_kernel_overlaps():
    #: the product runs from 0 to 10 us, the collective from 6 to 20
    found = times(0, rank(10, moving(6_000, 14_000), moving(10_006_000, 14_000, 1)))
    assert (found.collective_ns, found.exposed_ns, found.own_ns) == (14_000, 10_000, 10_000)


def test_ranks_come_from_the_files_where_they_are_named():
    first, second = rank(10), rank(30)
    named = [replace(first, environment={"rank": 5}), replace(second, environment={"rank": 2})]
    assert set(profiler_core.merge(named).kernels["rank"]) == {2, 5}
    with pytest.raises(ValueError, match="two of these profiles have one rank"):
        profiler_core.merge([named[0], named[0]])
    with pytest.raises(ValueError, match="no profile to merge"):
        profiler_core.merge([])


def test_a_merged_profile_is_saved_and_read(tmp_path):
    merged = profiler_core.merge([rank(10), rank(30)])
    merged.save(tmp_path / "p.json")
    read = profiler_core.Profile.load(tmp_path / "p.json")
    assert read.by("rank").equals(merged.by("rank")) and read.notes == merged.notes


def test_ranks_without_wall_times_have_none():
    assert math.isnan(profiler_core.merge([replace(rank(10), wall_ns=math.nan)]).wall_ns)
