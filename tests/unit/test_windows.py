"""Measured calls: which ranges say so, which kernels are of which call, and which calls are whole."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler_core.attribute.cpu_kernels import cpu_kernels
from profiler_core.attribute.engine import attribute
from profiler_core.attribute.windows import OUTSIDE, find, short_calls
from profiler_core.trace import Kernel, Op, Trace


def of(trace: Trace, launch_ns: list[int], start_ns: list[int] | None = None) -> list[int]:
    starts = launch_ns if start_ns is None else start_ns
    return find(trace).of(np.array(launch_ns), np.array(starts)).tolist()


def steps(*bounds: tuple[str, int, int], category: str = "user_annotation", **rest) -> Trace:
    return Trace.of([Op(name, 1, start, end, category=category) for name, start, end in bounds], (), **rest)


def test_our_own_ranges_are_the_calls_and_the_profilers_steps_where_there_are_none() -> None:
    both = (("ProfilerStep#7", 0, 100), ("fxopt::iteration#0", 10, 40), ("fxopt::iteration#1", 50, 90))
    assert find(steps(*both)).number.tolist() == [0, 1]
    assert find(steps(*both[:1])).number.tolist() == [7]
    assert of(steps(*both), [5, 10, 39, 40, 60, 95]) == [OUTSIDE, 0, 0, OUTSIDE, 1, OUTSIDE]


def test_a_trace_without_such_ranges_is_one_call() -> None:
    trace = steps(("fxopt::iteration#", 0, 10), ("fxopt::iteration#²", 0, 10), ("ProfilerStep#", 0, 10))
    assert find(trace).count == 1 and len(find(trace).number) == 0
    assert of(trace, [-1, 5, 500], [7, 5, 500]) == [0, 0, 0]


def test_a_kernel_is_of_the_call_that_launched_it_however_late_it_runs() -> None:
    trace = steps(("fxopt::iteration#0", 0, 10), ("fxopt::iteration#1", 20, 30))
    assert of(trace, [5, 25, 15], [1000, 40, 16]) == [0, 1, OUTSIDE]


def test_a_kernel_without_a_launch_is_of_the_call_that_had_begun_when_it_started() -> None:
    trace = steps(("fxopt::iteration#0", 10, 20), ("fxopt::iteration#1", 30, 40))
    assert of(trace, [-1] * 5, [5, 15, 25, 35, 900]) == [OUTSIDE, 0, 0, 1, 1]


def test_what_several_threads_or_processes_mark_as_one_call_is_one() -> None:
    ranges = {
        "name": [f"ProfilerStep#{i}" for i in (3, 3, 4, 4)],
        "category": ["annotation"] * 4,
        "process": [1, 2, 1, 2],
        "start_ns": [0, 10, 100, 105],
        "end_ns": [90, 95, 190, 195],
    }
    trace = Trace.build(ranges=ranges)
    windows = find(trace)
    assert (windows.count, windows.number.tolist()) == (2, [3, 4])
    assert of(trace, [5, 92, 104, 192]) == [3, 3, 4, 4]


def test_calls_that_are_numbered_again_are_further_calls() -> None:
    """Two measurements in one recording."""
    again = [(f"fxopt::iteration#{i}", 100 * n, 100 * n + 50) for n, i in enumerate((0, 1, 0, 1))]
    windows = find(steps(*again))
    assert (windows.count, windows.number.tolist()) == (4, [0, 1, 2, 3])
    assert of(steps(*again), [110, 210]) == [1, 2]
    kernels = [Kernel("k", 0, 7, 100 * n + 20, 5) for n in range(4)]
    trace = Trace.of([Op(name, 1, start, end) for name, start, end in again], kernels)
    assert attribute(trace).iterations == 4 and attribute(trace).kernel_ns == 5.0


def test_of_what_nsys_recorded_the_time_in_which_operators_were_emitted_is_measured() -> None:
    trace = steps(("aten::mm", 100, 110), ("aten::add", 120, 150), category="cpu_op", meta={"source": "nsys"})
    assert of(trace, [50, 100, 115, 149, 150]) == [OUTSIDE, 0, 0, 0, OUTSIDE]


def test_a_malformed_iteration_range_is_an_ordinary_one_on_the_cpu_too() -> None:
    ops = [Op("fxopt::iteration#later", 1, 0, 100), Op("aten::mm", 1, 10, 30)]
    kernels = cpu_kernels(Trace.of(ops, (), device_type="cpu"))
    assert [(row.name, row.iteration) for row in kernels.itertuples()] == [("aten::mm", 0)]


# --- short calls -------------------------------------------------------------------------------------------


def short(*calls: list[str]) -> dict[int, str]:
    names = np.array([name for ran in calls for name in ran], dtype=object)
    iteration = np.array([i for i, ran in enumerate(calls) for _ in ran])
    return short_calls(names, iteration, list(range(len(calls))))


def test_the_call_that_lacks_what_most_ran_is_short_and_says_of_what() -> None:
    found = short(["a", "b"], ["a", "b", "b", "c"], ["a", "b", "b", "c"])
    assert list(found) == [0]
    assert "2 of the 4 kernels" in found[0] and "'b' (1 of 2)" in found[0]


@pytest.mark.parametrize(
    "calls",
    [
        (["a"], ["a", "b"]),  # two: which is whole?
        (["a", "c"], ["a", "b"], ["a", "b"]),  # another branch
        (["a", "b", "c"], ["a", "b"], ["a", "b"]),  # one that ran more
        (["a"], ["a", "b"], ["a", "b", "c"]),  # no two alike
        (["a"], ["a"], ["a", "b"], ["a", "b"]),  # no majority
    ],
)
def test_where_most_calls_do_not_agree_or_nothing_is_missing_no_call_is_short(calls: tuple[list[str], ...]) -> None:
    assert short(*calls) == {}


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
    st.lists(st.lists(st.sampled_from("abc"), max_size=6), max_size=2),
)
def test_the_calls_that_remain_of_a_majority_are_never_short(whole: list[str], others: list[list[str]]) -> None:
    found = short(whole, whole, whole, *others)
    assert not set(found) & {0, 1, 2}
    for i in found:
        assert not Counter(others[i - 3]) - Counter(whole)
