"""Attribution of large traces: seconds, growth with size, peak memory.

The traces are made up (`synthetic.py`): twice as many ranges as kernels, nested six deep, some overlapping, on eight
threads; kernels on six streams, a tenth of them launched by graphs. Making them is not part of what is timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from synthetic import LOST_FROM, make_trace

from profiler_core.attribute.correlation import link, operators
from profiler_core.attribute.enclosure import all_enclosing
from profiler_core.attribute.engine import attribute
from profiler_core.trace import Trace

MILLION = 10**6
MEMORY_LIMIT = 3 * 2**30
"""Bytes that attributing a million kernels in two million ranges may take, the trace included."""


def _link(trace: Trace) -> int:
    links = link(trace)
    innermost, _ = operators(trace, links)
    return int((innermost >= 0).sum())


def _attribute(trace: Trace) -> int:
    profile = attribute(trace, eager_nodes=True)
    return int((profile.kernels["operator"] != "").sum())


# What is timed, by name. Each takes a trace and gives the number of kernels for which it found an operator.
ATTRIBUTIONS: dict[str, Callable[[Trace], int]] = {"link": _link, "engine": _attribute}

sizes = pytest.mark.parametrize("kernels", [10**4, 10**5, pytest.param(MILLION, marks=pytest.mark.slow)])
attributions = pytest.mark.parametrize("attribution", list(ATTRIBUTIONS))


@pytest.mark.benchmark(group="bulk attribution")
@sizes
@attributions
def test_attributing(benchmark: BenchmarkFixture, attribution: str, kernels: int) -> None:
    trace = make_trace(kernels, 2 * kernels)
    found = benchmark.pedantic(ATTRIBUTIONS[attribution], args=(trace,), rounds=3)
    benchmark.extra_info["us_per_kernel"] = benchmark.stats["min"] / kernels * 1e6 if benchmark.stats else None
    assert 0.9 * kernels < found < kernels  # all but those without a launch and under no operator


@pytest.mark.slow
@attributions
def test_time_grows_with_size_and_not_with_its_square(attribution: str, capsys: pytest.CaptureFixture[str]) -> None:
    best = {}
    for kernels in (10**4, 10**5, MILLION):
        trace = make_trace(kernels, 2 * kernels)
        best[kernels] = min(_seconds(ATTRIBUTIONS[attribution], trace) for _ in range(3))
    with capsys.disabled():
        print(f"\n{attribution}: kernels + ranges, seconds, us a kernel, growth for ten times the size")
        for kernels, seconds in best.items():
            growth = f"{seconds / best[kernels // 10]:.1f}" if kernels // 10 in best else "-"
            print(f"{kernels:>9,} + {2 * kernels:>9,}  {seconds:8.3f}  {seconds / kernels * 1e6:6.2f}  {growth:>5}")
    # Linear is 10 (and log n on top), quadratic 100; a busy machine does not make one of the other.
    assert best[MILLION] < 30 * best[10**5]


def _seconds(attribution: Callable[[Trace], int], trace: Trace) -> float:
    begin = time.perf_counter()
    attribution(trace)
    return time.perf_counter() - begin


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@attributions
def test_a_million_kernels_fit_into_memory(attribution: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, whose peak is reset once the trace is made."""
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[2]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-c", f"import test_attribution_bulk as bulk; bulk.report_peak({attribution!r})"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True, check=True
    )
    before, peak = (int(number) for number in done.stdout.split())
    with capsys.disabled():
        print(f"\n{attribution}: trace {before / 2**20:.0f} MiB, peak while attributing {peak / 2**20:.0f} MiB")
    assert peak < MEMORY_LIMIT


def report_peak(attribution: str) -> None:
    """Prints the resident bytes with the trace made, and the peak while it is attributed (Linux)."""
    trace = make_trace(MILLION, 2 * MILLION)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present size; see proc(5)
    before = _status("VmRSS")
    ATTRIBUTIONS[attribution](trace)
    print(before, _status("VmHWM"))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def test_what_is_timed_is_right() -> None:
    """On a small trace: every launched kernel has the range that the interval tree finds, every other one none."""
    trace = make_trace(2_000, 4_000, external_ids=False)
    links = link(trace)
    assert (links.call < 0).sum() == (trace.kernels["correlation"] >= LOST_FROM).sum() > 0
    on_thread = np.flatnonzero(trace.ranges["category"].isin(["op", "annotation"]))
    ranges = trace.ranges.iloc[on_thread]
    launched = np.flatnonzero(links.call >= 0)
    launches = trace.calls.iloc[links.call[launched]]
    around = all_enclosing(
        *(ranges[name].to_numpy() for name in ("start_ns", "end_ns", "thread")),
        launches["start_ns"].to_numpy(),
        launches["thread"].to_numpy(),
    )
    assert links.range[launched].tolist() == [int(on_thread[found[0]]) for found in around]
    assert (links.range[links.call < 0] == -1).all()
    assert max(len(found) for found in around) >= 6  # nested as deep as promised
    start, end, parent = (ranges["start_ns"].to_numpy(), ranges["end_ns"].to_numpy(), links.parent[on_thread])
    inner = np.flatnonzero(parent >= 0)
    assert (end[inner] > trace.ranges["end_ns"].to_numpy()[parent[inner]]).any()  # and some overlap
    assert (start[inner] >= trace.ranges["start_ns"].to_numpy()[parent[inner]]).all()


def test_ids_lead_to_the_range_that_the_launch_was_put_into() -> None:
    trace = make_trace(2_000, 4_000)
    links = link(trace)
    assert links.external_ids == "trusted"
    launched = links.call >= 0
    assert set(links.method[launched]) == {"correlation"}
    assert set(links.method[~launched]) == {"none"}
    assert (links.agrees[launched] == 1).mean() > 0.98  # overrunning ranges cover some launches of others
    assert max(np.unique(links.call[launched], return_counts=True)[1]) > 100  # graph launches
