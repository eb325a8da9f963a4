"""Reading the largest trace at hand (54 MB of JSON, 216,092 events) beside json.load of the same file.

The time is CPU time, best of interleaved rounds: a busy neighbour only ever adds to it. Memory is the
growth of the peak resident size in a process of its own, without that of importing pandas. Both stand in the
benchmark's ``extra_info`` and are printed; what is asserted is memory, which does not depend on the machine's load.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from profiler_core.collect import chrome_trace

pytestmark = [pytest.mark.benchmark(group="read trace"), pytest.mark.slow]
ROUNDS = 5
LOAD = "import gzip, json\nwith gzip.open(path) as file:\n    json.load(file)"
READ = "from profiler_core.collect import chrome_trace\nchrome_trace.read(path)"
PEAK = """
import sys, numpy, pandas
from profiler_core import trace
path = sys.argv[1]
def peak():  # not getrusage's, which begins with what the parent process had
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
before = peak()
{}
print(peak() - before)
"""


def load(path: Path) -> Any:
    with gzip.open(path) as file:
        return json.load(file)


def peak_mb(body: str, path: Path) -> float:
    command = [sys.executable, "-c", PEAK.format(body), str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(result.stdout) / 1024


def test_reading_beside_json_load(shared: Path, benchmark: Any) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux's /proc for the peak of a process's memory")
    path = shared / "corpus" / "kineto" / "hta_v100_19370_kernels_54MB.json.gz"
    best = {load: float("inf"), chrome_trace.read: float("inf")}
    for _ in range(ROUNDS):
        for function in best:
            start = time.process_time()
            function(path)
            best[function] = min(best[function], time.process_time() - start)
    load_mb, read_mb = peak_mb(LOAD, path), peak_mb(READ, path)
    benchmark.extra_info.update(
        json_load_s=best[load],
        read_s=best[chrome_trace.read],
        time_ratio=best[chrome_trace.read] / best[load],
        json_load_mb=load_mb,
        read_mb=read_mb,
    )
    print(
        f"\nread {best[chrome_trace.read]:.2f} s, {read_mb:.0f} MB; json.load {best[load]:.2f} s, {load_mb:.0f} MB "
        f"({best[chrome_trace.read] / best[load]:.2f} times the time)"
    )
    trace = benchmark.pedantic(chrome_trace.read, args=(path,), rounds=1)
    assert (trace.kernels["kind"] == "kernel").sum() == 19370
    assert read_mb < load_mb
