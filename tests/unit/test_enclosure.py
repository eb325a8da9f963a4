from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from profiler_core.attribute.enclosure import (
    all_enclosing,
    enclosing,
    enclosing_by_tree,
    nearest,
    outermost,
    parents,
)

Range = tuple[int, int, int]  # start, end, group


def columns(rows: Sequence[tuple[int, ...]], width: int) -> list[NDArray[np.int64]]:
    return list(np.array(rows, np.int64).reshape(-1, width).T)


def parents_of(*ranges: tuple[int, int]) -> list[int]:
    return parents(*columns([(*bounds, 0) for bounds in ranges], 3)).tolist()


def innermost_at(moment: int, *ranges: tuple[int, int]) -> int:
    arguments = (*columns([(*bounds, 0) for bounds in ranges], 3), np.array([moment]), np.array([0]))
    found = enclosing(*arguments)
    assert found.tolist() == enclosing_by_tree(*arguments).tolist()
    return int(found[0])


def test_a_range_holds_the_moment_it_starts_at_and_not_the_one_it_ends_at() -> None:
    assert [innermost_at(moment, (10, 20)) for moment in (9, 10, 19, 20)] == [-1, 0, 0, -1]


def test_the_innermost_range_is_the_one_that_began_last() -> None:
    assert innermost_at(15, (0, 100), (10, 20), (30, 40)) == 1
    assert innermost_at(25, (0, 100), (10, 20), (30, 40)) == 0


def test_overlapping_ranges_give_the_latest_start_that_is_still_open() -> None:
    overlapping = ((0, 10), (5, 15), (7, 8))
    assert [innermost_at(moment, *overlapping) for moment in (6, 7, 9, 12, 15)] == [1, 2, 1, 1, -1]
    assert innermost_at(12, (0, 20), (5, 10), (6, 11)) == 0


def test_of_ranges_that_begin_together_the_longer_is_outside() -> None:
    assert innermost_at(3, (0, 5), (0, 9)) == 0
    assert parents_of((0, 5), (0, 9)) == [1, -1]


def test_of_equal_ranges_the_first_listed_is_outside() -> None:
    assert innermost_at(3, (0, 9), (0, 9), (0, 9)) == 2
    assert parents_of((0, 9), (0, 9), (0, 9)) == [-1, 0, 1]


def test_a_range_of_no_length_has_a_parent_and_encloses_nothing() -> None:
    assert parents_of((0, 9), (4, 4), (5, 6)) == [-1, 0, 0]
    assert parents_of((4, 4), (4, 6)) == [1, -1]
    assert parents_of((4, 4), (4, 4)) == [-1, -1]
    assert innermost_at(4, (4, 4)) == -1


def test_a_range_that_begins_where_another_ends_is_its_sibling() -> None:
    assert parents_of((0, 9), (1, 4), (4, 8)) == [-1, 0, 0]


def test_a_parent_may_end_before_its_child() -> None:
    assert parents_of((0, 10), (5, 15), (12, 14)) == [-1, 0, 1]


def test_a_range_that_ends_before_it_starts_takes_no_part() -> None:
    assert parents_of((0, 9), (6, 3), (5, 7)) == [-1, -1, 0]
    assert innermost_at(6, (6, 3)) == -1


def test_groups_do_not_enclose_each_other() -> None:
    start, end, group = columns([(0, 9, 7), (1, 8, -3), (2, 5, 7)], 3)
    assert parents(start, end, group).tolist() == [-1, -1, 0]
    at, at_group = np.array([3, 3, 3]), np.array([7, -3, 0])
    assert enclosing(start, end, group, at, at_group).tolist() == [2, 1, -1]


def test_no_ranges_and_no_moments_are_answered() -> None:
    nothing = np.zeros(0, np.int64)
    assert parents(nothing, nothing, nothing).tolist() == []
    assert enclosing(nothing, nothing, nothing, np.array([1]), np.array([0])).tolist() == [-1]
    assert enclosing(np.array([0]), np.array([5]), np.array([0]), nothing, nothing).tolist() == []


def test_clock_times_of_this_century_in_nanoseconds_fit() -> None:
    now = 1_775_078_550_000_000_000
    assert innermost_at(now + 2, (now, now + 9), (now + 1, now + 3)) == 1


def test_all_enclosing_lists_the_innermost_first() -> None:
    start, end, group = columns([(0, 100, 0), (10, 20, 0), (10, 50, 0), (11, 13, 0), (12, 12, 0)], 3)
    assert all_enclosing(start, end, group, np.array([12, 60, 100]), np.array([0, 0, 0])) == [(3, 1, 2, 0), (0,), ()]


def test_ten_thousand_deep_nesting_and_what_follows_it_stay_cheap() -> None:
    """Each range is pushed and popped once; a climb from every moment would take 10^9 steps here."""
    depth, followers = 10_000, 100_000
    start = np.concatenate([np.arange(depth), np.arange(followers) + 3 * depth])
    end = np.concatenate([2 * depth - np.arange(depth), np.arange(followers) + 3 * depth + 1])
    start, end = np.insert(start, 0, -1), np.insert(end, 0, 10**9)
    group = np.zeros_like(start)
    found = parents(start, end, group)
    assert found[: depth + 1].tolist() == list(range(-1, depth))
    assert (found[depth + 1 :] == 0).all()


# Few moments, so that ranges often begin together, touch, coincide or have no length or a negative one.
moments = st.integers(0, 12)
ranges = st.lists(st.tuples(moments, moments, st.integers(0, 2)), max_size=25)


@settings(max_examples=300, deadline=None)
@given(ranges=ranges, points=st.lists(st.tuples(moments, st.integers(0, 3)), max_size=12))
def test_the_sweep_equals_the_interval_tree(ranges: list[Range], points: list[tuple[int, int]]) -> None:
    arguments = (*columns(ranges, 3), *columns(points, 2))
    assert enclosing(*arguments).tolist() == enclosing_by_tree(*arguments).tolist()


@settings(max_examples=300, deadline=None)
@given(ranges=ranges)
def test_a_parent_is_the_innermost_range_that_was_open_before_its_child(ranges: list[Range]) -> None:
    start, end, group = columns(ranges, 3)
    found = parents(start, end, group)
    open_then = all_enclosing(start, end, group, start, group)

    def outside(other: int, row: int) -> bool:
        return (start[other], -end[other], other) < (start[row], -end[row], row)

    for row, others in enumerate(open_then):
        candidates = [other for other in others if outside(other, row)] if end[row] >= start[row] else []
        assert found[row] == (candidates[0] if candidates else -1)


@settings(max_examples=200, deadline=None)
@given(ranges=ranges, seed=st.integers(0, 2**32 - 1))
def test_nearest_and_outermost_equal_a_walk_up_the_forest(ranges: list[Range], seed: int) -> None:
    parent = parents(*columns(ranges, 3))
    flag = np.random.default_rng(seed).random(len(parent)) < 0.4

    def flagged_above(row: int) -> list[int]:
        found = []
        while row >= 0:
            found += [row] if flag[row] else []
            row = int(parent[row])
        return found

    walks = [flagged_above(row) for row in range(len(parent))]
    assert nearest(parent, flag).tolist() == [walk[0] if walk else -1 for walk in walks]
    assert outermost(parent, flag).tolist() == [walk[-1] if walk else -1 for walk in walks]


@pytest.mark.parametrize("depth", [1, 2, 3, 64, 1000])
def test_the_flagged_root_of_a_chain_is_found_from_its_end(depth: int) -> None:
    parent = np.arange(-1, depth - 1)
    root = np.arange(depth) == 0
    assert (nearest(parent, root) == 0).all()
    assert (outermost(parent, np.ones(depth, bool)) == 0).all()
