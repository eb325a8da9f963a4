"""Profiles a program from outside: nsys for times and ranges, ncu for counters, Inductor's log for FX nodes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from profiler_core.marks import ACTIVE

if TYPE_CHECKING:
    from profiler_core.profiles import Profile


def record(
    argv: Sequence[str],
    folder: str | Path,
    *,
    counters: str | Sequence[str] = "quick",
    replay: Literal["kernel", "application"] = "application",
    chip: str | None = None,
    marked: bool = True,
    library_path: str | None = None,
    timeout: float | None = None,
) -> Profile:
    """Run a program under nsys and, unless ``counters`` is "none", once more under ncu, and join what they saw.

    Args:
        argv: the command, such as ``["python", "train.py", "--steps", "3"]``; it runs twice or more, and must launch
            the same kernels each time.
        folder: where the files go that the tools write: ``times.sqlite``, ``counters.csv`` and Inductor's logs in
            ``torch_trace``, over those of an earlier recording. :func:`profiler_core.load` reads them again.
        counters: as for :func:`profiler_core.profile`.
        replay: ncu's; "application" runs the program once a pass, "kernel" restores memory and runs each kernel again.
        chip: CUPTI's name of the GPU ("GH100"), where nsys does not say which it is.
        marked: the program marks its calls with :func:`profiler_core.measured`; counters are then taken of these
            alone. Otherwise the whole program is measured, warm-up and all.
        library_path: see :func:`profiler_core.collect.nsys_command.record`.
        timeout: seconds for each run of the program.

    Operators and the calls of compiled graphs are known where the program emits NVTX (``measured`` does it). Neither
    tool touches the clocks. Where counters cannot be had, the profile has times only and a note says why. Raises
    :class:`~profiler_core.collect.nsys_command.NsysError`, with the tool's last lines and the remedy.
    """
    from profiler_core import counters as known
    from profiler_core.attribute.counter_join import with_counters
    from profiler_core.collect import ncu_command, nsys_command, torch_trace
    from profiler_core.collect.provenance import ProvenanceFormatError
    from profiler_core.counter_table import CounterError
    from profiler_core.counting import counter_keys
    from profiler_core.loading import load

    keys = counter_keys(counters)
    if not argv:
        raise ValueError("argv is empty: give the program to run")
    if chip is not None:
        known.metric_names(chip, keys)  # of no known chip: raises before anything runs
    nsys = nsys_command.find()
    if nsys is None:  # known before anything of an earlier recording goes
        raise nsys_command.NsysError(nsys_command.MISSING + ".")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    logs, cache, table = folder / "torch_trace", folder / "inductor_cache", folder / "counters.csv"
    # What an earlier recording left would be taken for this one's, and its cache serves code without saying what it
    # computes, as any cache that was filled earlier does.
    for old in (logs, cache):
        shutil.rmtree(old, ignore_errors=True)
    table.unlink(missing_ok=True)
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache.resolve()),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "INDUCTOR_PROVENANCE": "1",
    }
    files, notes = [], []
    traced = {**settings, "TORCH_TRACE": str(logs.resolve()), ACTIVE: "ranges"}
    command = _with(argv, traced)
    files.append(nsys_command.record(command, folder / "times", nsys=nsys, library_path=library_path, timeout=timeout))
    for log in sorted(logs.glob("*.log")):
        try:
            torch_trace.read(log)
        except ProvenanceFormatError as error:  # a program that compiles nothing with Inductor
            notes.append(f"no provenance: {error}")
        else:
            files.append(log)
    profile = load(*files, chip=chip)
    if keys:
        try:
            name = chip or _chip(profile)
            if metrics := known.metric_names(name, keys):  # none: nsys has the launch's own
                command = _with(argv, {**settings, ACTIVE: "kernels"})
                counted = ncu_command.run(
                    command, metrics, table, replay=replay, profile_from_start=not marked, timeout=timeout
                )
                profile = with_counters(profile, [counted], name)
        except (CounterError, known.UnknownChip) as error:
            notes.append(f"no hardware counters: {error}")
    return replace(profile, notes=(*profile.notes, *notes))


def _chip(profile: Profile) -> str:
    from profiler_core import counters

    capability = profile.environment.get("capability")
    if not capability:
        raise counters.UnknownChip("nsys does not say which GPU this is; give chip='GH100' or so")
    return counters.chip_of((int(capability[0]), int(capability[1])))


def _with(argv: Sequence[str], settings: dict[str, str]) -> list[str]:
    """The command with further environment variables."""
    program = [sys.executable if argv[0] == "python" and not shutil.which("python") else argv[0], *argv[1:]]
    return ["env", *(f"{name}={value}" for name, value in settings.items()), *program]
