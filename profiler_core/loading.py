"""Profiles from files that other runs left behind: traces, counters and Inductor's provenance, joined."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_core.profiles import Profile, ProfileFormatError
from profiler_core.quantities import duration
from profiler_core.trace import Trace, TraceError

if TYPE_CHECKING:
    import pandas as pd

    from profiler_core.collect.provenance import Provenance
    from profiler_core.counter_table import CounterTable

_GLOG = re.compile(r"^[VIWEF]\d{4} \d\d:\d\d:\d\d")  # the head of a record in a TORCH_TRACE log
_HEAD = 4096
_KINDS = {".sqlite": "nsys", ".nsys-rep": "nsys", ".ncu-rep": "counters", ".csv": "counters"}


def load(*paths: str | os.PathLike[str], calls: int | None = None, chip: str | None = None) -> Profile:
    """One profile from the files of one workload.

    Takes torch.profiler's Chrome traces (.json, .json.gz), nsys exports (.sqlite, .nsys-rep), ncu's counters (.csv,
    .ncu-rep), Inductor's provenance (TORCH_TRACE logs or the folder that they are in, TORCH_COMPILE_DEBUG folders), and
    profiles that :meth:`Profile.save` or :meth:`Profile.to_parquet` wrote. What a file is, its contents say. The
    folder of a :func:`profiler_core.record` stands for the files that it left.

    The first trace gives the kernels and their times; further ones are compared with it kernel by kernel, in launch
    order, and a note says how far they agree. Counters are matched by name and order. ``calls`` is how many measured
    calls the trace holds where it does not mark them (as ``fxopt::iteration#N``, or ``ProfilerStep#N``), for all of it
    would count as one. ``chip`` is CUPTI's name of the GPU ("GH100") for counters without a trace that names the
    device. Raises :class:`TraceError`, ``CounterError`` or ``ProvenanceFormatError``, naming the file, the place and
    the remedy.
    """
    from profiler_core import counters as known
    from profiler_core.attribute.counter_join import with_counters
    from profiler_core.layer_classes import with_layer_classes

    if not paths:
        raise TraceError("no files were given: give a trace of torch.profiler or nsys, and what belongs to it")
    traces: list[Trace] = []
    tables: list[CounterTable] = []
    provenances: list[Provenance] = []
    saved: list[Profile] = []
    notes: list[str] = []
    if not all(isinstance(given, (str, os.PathLike)) for given in paths):
        raise TypeError("load() takes each file as an argument of its own: load(*files)")
    if chip is not None:
        try:
            known.family(chip)
        except known.UnknownChip as error:
            raise TraceError(f"chip={chip!r}: {error}") from error
    for path, kind in [found for given in paths for found in _sorted(given)]:
        if kind == "profile":
            saved.append(Profile.from_parquet(path) if path.is_dir() else Profile.load(path))
        elif kind == "counters":
            from profiler_core.collect import ncu

            tables.append(ncu.read(path))
        elif kind == "provenance":
            found = _provenances(path)
            provenances += found
            notes += [f"{path.name}: {note}" for item in found for note in getattr(item, "notes", ())]
        else:
            traces.append(_trace(path, kind))
    if len(saved) + bool(traces) > 1:
        raise TraceError("a saved profile has kernels of its own: load it alone, or with counters")
    if not traces and not saved:
        raise TraceError(
            f"none of {', '.join(str(path) for path in paths)} holds kernels with times: add the trace of "
            "torch.profiler or nsys that belongs to them"
        )
    if saved:
        profile = saved[0]
    else:
        each = [_attributed(t, provenances, calls) for t in traces]
        profile, *others = (with_layer_classes(p, provenances) for p in each)
        for trace, other in zip(traces[1:], others, strict=True):
            label = Path(str(trace.meta.get("path", ""))).name or "the other trace"
            notes.append(_said(profile, other, label))
            notes += [f"{label}: {note}" for note in other.notes if note.startswith("partial: ")]
    profile = replace(profile, notes=(*profile.notes, *notes))
    if tables:
        if not (profile.kernels["device"] != "cpu").any():
            raise TraceError(f"{tables[0].path}: the trace has no kernels of a GPU that these counters could belong to")
        profile = with_counters(profile, tables, chip or _chip_of(profile, tables[0]))
    return profile


def _attributed(trace: Trace, provenances: Sequence[Provenance], calls: int | None) -> Profile:
    from profiler_core.attribute import windows
    from profiler_core.attribute.engine import attribute

    path = trace.meta.get("path", "")
    try:
        profile = attribute(trace, provenances, environment_of(trace), eager_nodes=True, calls=calls)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from error
    notes = []
    if profile.iterations == 1 and len(windows.find(trace).number) <= 1 and len(profile.kernels) and calls is None:
        notes.append(
            "the trace does not mark its calls, so all of its window counts as one; calls=N tells how many there are"
        )
    outside = profile.kernels[profile.kernels["iteration"] < 0]
    if len(outside):
        notes.append(
            f"{len(outside)} kernels and copies ({duration(profile.outside_ns)}) lie outside of the window"
        )
    return replace(profile, notes=(*profile.notes, *notes))


def _sorted(given: str | os.PathLike[str]) -> list[tuple[Path, str]]:
    """The files that a path stands for, each with what it holds."""
    if not os.fspath(given):
        raise TraceError("an empty path was given: give the name of a file or a folder")
    try:
        return [(path, sort_of(path)) for path in _expanded(Path(given))]
    except OSError as error:  # too long a name, no permission
        raise TraceError(f"{given!s}: cannot be read ({error.strerror}): check the path") from error


def _expanded(path: Path) -> list[Path]:
    """The files for which a folder stands that :func:`profiler_core.record` left; any other path itself."""
    times = path / "times.sqlite"
    if not times.is_file():
        return [path]
    return [times, *sorted((path / "torch_trace").glob("*.log")), *path.glob("counters.csv")]


def _chip_of(profile: Profile, table: CounterTable) -> str:
    from profiler_core import counters

    capability = profile.environment.get("capability")
    if not capability:
        raise TraceError(f"{table.path}: the trace does not say which GPU this is: give chip=, such as 'GH100'")
    try:
        return counters.chip_of((int(capability[0]), int(capability[1])))
    except counters.UnknownChip as error:
        raise TraceError(f"{table.path}: {error}: load the trace without it, or give chip= of a related GPU") from error


def sort_of(path: Path) -> str:
    """What a file holds: "kineto", "nsys", "counters", "provenance" or "profile". Raises :class:`TraceError`."""
    if path.is_dir():
        return "profile" if (path / "kernels.parquet").exists() else "provenance"
    if not path.exists():
        raise TraceError(f"{path}: there is no such file")
    head = _head(path)
    if head.startswith(b"SQLite format 3\0"):
        return "nsys"
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if text.startswith(("{", "[")):
        return "profile" if '"schema_version"' in text[:200] and '"traceEvents"' not in text else "kineto"
    if _GLOG.match(text):
        return "provenance"
    if text.startswith(("==", '"ID"')):
        return "counters"
    if path.suffix in _KINDS:  # reports, whose format is their maker's business, and files with something before
        return _KINDS[path.suffix]
    raise TraceError(
        f"{path}: not a file that is known here (it begins with {text[:40]!r}): a Chrome trace, an nsys export, ncu's "
        "CSV or report, a TORCH_TRACE log, a TORCH_COMPILE_DEBUG folder or a saved profile"
    )


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head:
        raise TraceError(f"{path}: the file is empty; record it again")
    if head[:2] != b"\x1f\x8b":
        return head
    with suppress(zlib.error):
        head = zlib.decompressobj(wbits=31).decompress(head, _HEAD)
    # Of a damaged archive nothing may come out: its reader says what is lost, and most archives are traces.
    return head if head[:2] != b"\x1f\x8b" and head else b"{"


def _trace(path: Path, kind: str) -> Trace:
    if kind == "nsys":
        from profiler_core.collect import nsys

        return nsys.read(path)
    from profiler_core.collect import chrome_trace

    return chrome_trace.read(path)


def _provenances(path: Path) -> Sequence[Provenance]:
    from profiler_core.collect import debug_folder, torch_trace

    try:
        if not path.is_dir():
            return torch_trace.read(path)
        logs = sorted(path.glob("dedicated_log_torch_trace_*.log"))
        return [found for log in logs for found in torch_trace.read(log)] if logs else debug_folder.read(path)
    except OSError as error:  # a folder inside that may not be listed, or that went meanwhile
        raise TraceError(f"{error.filename or path}: cannot be read ({error.strerror}): check the path") from error


def environment_of(trace: Trace) -> dict[str, Any]:
    """What a trace says of the machine: the device of most of its kernels, and the tool."""
    found: dict[str, Any] = {"device_type": trace.device_type, "source": trace.meta.get("source", "")}
    for name in ("tool", "rank", "world_size"):
        if trace.meta.get(name) is not None:
            found[name] = trace.meta[name]
    devices = trace.meta.get("devices") or {}
    if len(trace.kernels):
        busiest = int(trace.kernels["device"].mode().iloc[0])
        device = devices.get(busiest) or (next(iter(devices.values())) if len(devices) == 1 else {})
        found["device_name"] = device.get("name")
        if device.get("capability"):
            found["capability"] = list(device["capability"])
        if device.get("sm_count"):
            found["sm_count"] = device["sm_count"]
    return found


def compare(first: Profile, other: Profile) -> pd.DataFrame:
    """Two profiles of the same work, kernel by kernel in launch order: a row per kernel of ``first``'s window, with
    ``name``, ``duration_ns``, ``operator``, ``launch`` and ``nodes`` of both (the other's with the suffix "_other", NA
    where its kernel is not known).
    """
    from profiler_core.attribute.call_order import match

    columns = ["name", "duration_ns", "operator", "graph", "launch", "nodes"]

    def launched(p: Profile) -> pd.DataFrame:
        rows = p.window[p.window["kind"] == "kernel"]
        order = rows["launch_ns"].fillna(rows["start_ns"]).argsort(kind="stable")  # streams may overtake each other
        return rows.iloc[order][columns].reset_index(drop=True)

    mine, theirs = launched(first), launched(other)
    index = match(mine["name"].tolist(), theirs["name"].tolist()).index
    return mine.join(theirs.reindex(index).set_axis(mine.index).add_suffix("_other"))


def _said(first: Profile, other: Profile, label: str) -> str:
    """How far another tool's profile agrees with the first."""
    both = compare(first, other)
    known = both[both["name_other"].notna()]
    same = int((known["operator"] == known["operator_other"]).sum())
    inside = known[(known["launch"] != "") & (known["launch_other"] != "")]  # others have their operator for a node
    pairs = [(set(a), set(b)) for a, b in zip(inside["nodes"], inside["nodes_other"], strict=True)]
    nodes = f", {sum(a == b for a, b in pairs)} of {len(pairs)} with the same nodes" if pairs else ""
    return (
        f"{label}: {len(known)} of {len(both)} kernels found in the same order, {same} of them with the same operator"
        f"{nodes}"
    )


__all__ = ["ProfileFormatError", "compare", "environment_of", "load", "sort_of"]
