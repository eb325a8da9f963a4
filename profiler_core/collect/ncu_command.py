"""Finds Nsight Compute and measures counters with it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from profiler_core.collect import processes
from profiler_core.collect.ncu import read
from profiler_core.collect.ncu_text import remedy
from profiler_core.counter_table import CounterError, CounterTable

# Where NVIDIA's installers put it.
PLACES = (
    "/usr/local/cuda*/bin/ncu",
    "/opt/nvidia/nsight-compute/*/ncu",
    "/usr/local/NVIDIA-Nsight-Compute*/ncu",
)
MISSING = (
    "Nsight Compute (ncu) was not found on PATH or where its installers put it. Install it from "
    "https://developer.nvidia.com/nsight-compute (package nsight-compute of NVIDIA's repositories), or put ncu on PATH."
)
_TAIL = 15  # lines of a tool's output that an error shows


def find(places: Sequence[str] = PLACES) -> Path | None:
    """ncu: the one on PATH, else the newest version in ``places`` (absolute glob patterns), else None."""
    on_path = shutil.which("ncu")
    if on_path:
        return Path(on_path)
    found = [path for pattern in places for path in Path("/").glob(pattern.lstrip("/")) if os.access(path, os.X_OK)]
    return max(found, key=lambda path: [int(part) for part in re.findall(r"\d+", str(path))], default=None)


def command(
    ncu: Path | str,
    argv: Sequence[str],
    metrics: Sequence[str],
    output: Path | str,
    *,
    replay: Literal["kernel", "application"] = "kernel",
    cache_control: Literal["none", "all"] = "none",
    clock_control: Literal["none", "base"] = "none",
    nvtx_include: str | None = None,
    profile_from_start: bool = True,
    target_processes: Literal["all", "application-only"] = "all",
) -> list[str]:
    """The command that runs ``argv`` under ncu and leaves a report (``output`` ends in .ncu-rep) or a CSV file.

    Neither caches nor clocks are touched by default, so that a kernel is measured as it runs in the program;
    ``cache_control="all"`` flushes before each kernel and pass, ``clock_control="base"`` locks the clocks to base.
    ``replay="application"`` runs the whole program once a pass, and must find it launch the same kernels.
    ``profile_from_start=False`` measures only between cudaProfilerStart and cudaProfilerStop, ``nvtx_include`` only
    in the ranges that ncu's expression names.
    """
    if not metrics:
        raise ValueError("no metrics to measure")
    if str(output).endswith(".ncu-rep"):
        written = ["--export", str(output), "--force-overwrite"]
    else:
        written = ["--csv", "--page", "raw", "--log-file", str(output)]
    return [
        str(ncu),
        *("--metrics", ",".join(metrics)),
        *("--replay-mode", replay, "--cache-control", cache_control, "--clock-control", clock_control),
        *("--target-processes", target_processes, "--profile-from-start", "on" if profile_from_start else "off"),
        *(("--nvtx", "--nvtx-include", nvtx_include) if nvtx_include else ()),
        # Names as every other tool has them, and no rounding to Mbyte.
        *("--rename-kernels", "off", "--print-units", "base"),
        *written,
        *argv,
    ]


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` (default: this process's environment) for a program under ncu: Inductor compiles in the process
    itself, because ncu would attach to its workers, and numbers are printed in English.
    """
    return {
        **(os.environ if base is None else base),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "LC_ALL": "C.UTF-8",
    }


def run(
    argv: Sequence[str],
    metrics: Sequence[str],
    output: Path | str,
    *,
    ncu: Path | str | None = None,
    timeout: float | None = None,
    replay: Literal["kernel", "application"] = "kernel",
    cache_control: Literal["none", "all"] = "none",
    clock_control: Literal["none", "base"] = "none",
    nvtx_include: str | None = None,
    profile_from_start: bool = True,
    target_processes: Literal["all", "application-only"] = "all",
) -> CounterTable:
    """Run ``argv`` under ncu with the options of :func:`command` and read what it leaves at ``output``, which is
    overwritten.

    ``timeout`` is in seconds; the program's whole process group is then ended. A program that fails after it was
    measured gives a partial table. Raises CounterError with ncu's last lines and the remedy, also where ncu is
    not found.
    """
    ncu = ncu or find()
    if ncu is None:
        raise CounterError(MISSING)
    line = command(
        ncu,
        argv,
        metrics,
        output,
        replay=replay,
        cache_control=cache_control,
        clock_control=clock_control,
        nvtx_include=nvtx_include,
        profile_from_start=profile_from_start,
        target_processes=target_processes,
    )
    Path(output).unlink(missing_ok=True)  # what an earlier run left must not pass for this one's
    status, said = _run(line, timeout)
    problem = f"ncu, or the program in it, ended with status {status}" if status else "ncu wrote no counters"
    try:
        table = read(output)
    except OSError:
        raise _failure(problem, said, "") from None
    except CounterError as error:
        # The log is in the file, so the reader's message quotes it and has the remedy.
        raise _failure(f"{problem}: {error}", said, "") from error
    partial = (f"{problem}; kernels may be missing at the end.",) if status else ()
    return replace(table, replay=replay, partial=(*table.partial, *partial))


def _run(line: Sequence[str], timeout: float | None) -> tuple[int, str]:
    """Exit status and the last of what was printed."""
    try:
        ended = processes.run(line, environment=environment(), timeout=timeout)
    except OSError as error:
        raise CounterError(f"{line[0]} cannot be run: {error.strerror}. {MISSING}") from error
    if ended.late:
        raise _failure(
            f"ncu did not end within {timeout:g} s and was ended",
            ended.said,
            "Measure fewer metrics (each pass runs every kernel again) or fewer kernels (profile_from_start=False).",
        )
    return ended.status, ended.said


def _failure(what: str, said: str, advice: str) -> CounterError:
    lines = said.splitlines()
    advice = advice or ("" if remedy([what]) else remedy(lines))
    tail = "\n".join(lines[-_TAIL:]) or "(nothing)"
    return CounterError("\n".join(part for part in (what, advice, f"Last lines printed:\n{tail}") if part))
