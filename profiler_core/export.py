"""Writes a profile for other tools: a Chrome trace (chrome://tracing, Perfetto), folded stacks. Parquet is in
:mod:`profiler_core.parquet`.

All text that goes out is valid Unicode: a lone surrogate, which no encoding can hold, becomes U+FFFD. Traces and
stacks, which are made to be passed on, name the home directory in a path "~". Files appear whole or not at all.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from profiler_core.aggregate import leading_node
from profiler_core.collect.provenance import NodeInfo
from profiler_core.counters import COUNTERS
from profiler_core.files import plain, write_atomically
from profiler_core.profiles import SCHEMA_VERSION, Profile
from profiler_core.trace import ITERATION_PREFIX

if TYPE_CHECKING:
    import pandas as pd

# --- Chrome trace ------------------------------------------------------------------------------------------------

_ARGS = (
    "operator", "top_operator", "operator_method", "graph", "launch", "method", "confidence", "reason", "evidence",
    "family", "precision", "opaque", "iteration", "counters", "counter_coverage", "theoretical_occupancy",
    "occupancy_limiter", "waves_per_sm", *(counter.key for counter in COUNTERS if not counter.launch),
)  # fmt: skip
_CATEGORIES = {"memcpy": "gpu_memcpy", "memset": "gpu_memset"}
_UNATTRIBUTED_COLOUR = "terrible"  # red, in Chrome's own palette; Perfetto has no colours of events
# Ids that no process or thread of an operating system has (Linux: up to 2^22), for what is not known.
_UNKNOWN_PROCESS, _UNKNOWN_DEVICE, _UNKNOWN_STREAM, _CALLS_TRACK = 1 << 23, (1 << 23) + 1, 1 << 24, (1 << 24) + 1
_BATCH = 1 << 16  # rows turned into Python objects at a time


def to_chrome_trace(profile: Profile, path: str | os.PathLike[str], *, columns: Sequence[str] = ()) -> None:
    """Write a Chrome trace, gzipped where ``path`` ends in ".gz".

    Each kernel is an event on the track of its device and stream (on a CPU, of its thread), with operator, nodes,
    module path, source line, method, confidence, the counters that were measured, and ``columns``: further columns of
    ``profile.kernels`` (or the name of one), such as labels, which become arguments of the same name. Kernels without
    an FX node are red. Launches are joined to their kernels by arrows; only their start is known, so they are 1 ns
    long. A call of the measured function is a range over its launches on the thread, and one over its kernels on a
    track of its own.

    Times are microseconds with three decimals, so whole ns are kept. Categories and arguments are Kineto's, and
    :func:`profiler_core.collect.chrome_trace.read` reads the same kernels. Raises ValueError for unknown columns, and
    for those whose name another argument has.
    """
    columns = (columns,) if isinstance(columns, str) else columns
    absent = [column for column in columns if column not in profile.kernels]
    if absent:
        raise ValueError(f"no column {absent[0]!r} in profile.kernels; it has {', '.join(map(str, profile.kernels))}")
    taken = [column for column in columns if column in _TAKEN]
    if taken:
        raise ValueError(
            f"{', '.join(map(repr, taken))}: the trace has arguments of that name already; leave them out, or "
            "rename columns of your own"
        )
    where = Path(path)
    with replacing(where) as raw:
        # Neither the name of the file nor the time goes into the archive: equal profiles give equal files.
        file = gzip.GzipFile("", "wb", 6, fileobj=raw, mtime=0) if where.name.endswith(".gz") else raw
        head = {"schemaVersion": 1, "displayTimeUnit": "ns", "profileSchemaVersion": SCHEMA_VERSION}
        file.write(json.dumps(head)[:-1].encode() + b', "traceEvents": [\n')
        separator = b""
        for event in _events(profile, columns):
            file.write(separator + event.encode())
            separator = b",\n"
        file.write(b"\n]}\n")
        if file is not raw:
            file.close()


def _events(profile: Profile, columns: Sequence[str]) -> Iterator[str]:
    places, json_of = _Places(profile), _Encoder()
    shown = {**{key: key for key in (*_ARGS, *columns) if key in profile.kernels}, **_KINETO_ARGS}
    keys = [(key, json.dumps(theirs)) for key, theirs in shown.items()]
    launched: set[tuple[int, int, int]] = set()
    for row in _rows(profile.kernels):
        pid, tid, device = _track(row)
        args = [f"{theirs}: {json_of(row[key])}" for key, theirs in keys if not _void(row[key])]
        place = places.of(row["graph"], row["nodes"])
        args += [f"{json_of(key)}: {json_of(value)}" for key, value in place.items()]
        on_cpu = row["device"] == "cpu"
        category = "cpu_op" if on_cpu else _CATEGORIES.get(row["kind"], "kernel")
        colour = f', "cname": "{_UNATTRIBUTED_COLOUR}"' if row["method"] == "none" else ""
        span = _span(row["start_ns"], row["duration_ns"])
        yield (
            f'{{"ph": "X", "cat": "{category}", "name": {json_of(row["name"])}, "pid": {pid}, "tid": {tid}, '
            f'{span}{colour}, "args": {{"device": {device}, {", ".join(args)}}}}}'
        )
        if on_cpu or row["launch_ns"] is None or row["thread"] is None:
            continue
        flow = f'"cat": "ac2g", "name": "ac2g", "id": {row["row"] + 1}'
        host = f'"pid": {_process(row)}, "tid": {row["thread"]}'
        if (_process(row), row["thread"], row["launch_ns"]) not in launched:
            launched.add((_process(row), row["thread"], row["launch_ns"]))
            identity = f'"correlation": {row["correlation"] or 0}'
            yield (
                f'{{"ph": "X", "cat": "cuda_runtime", "name": "launch", {host}, {_span(row["launch_ns"], 1)}, '
                f'"args": {{{identity}}}}}'
            )
        yield f'{{"ph": "s", {flow}, {host}, "ts": {_us(row["launch_ns"])}}}'
        yield f'{{"ph": "f", "bp": "e", {flow}, "pid": {pid}, "tid": {tid}, "ts": {_us(row["start_ns"])}}}'
    yield from _iteration_events(profile)
    yield from _track_names(profile)


_KINETO_ARGS = {
    "stream": "stream",
    "correlation": "correlation",
    "grid": "grid",
    "block": "block",
    "registers": "registers per thread",
    "shared_memory": "shared memory",
}
# Arguments of every kernel, and ``row``, which is its number here.
_TAKEN = {"device", "nodes", "module", "source", "row", *_KINETO_ARGS.values()} - set(_KINETO_ARGS)


class _Encoder:
    """Values as JSON, each that comes again encoded once: text and tuples are most of a trace."""

    def __init__(self) -> None:
        self._known: dict[Hashable, str] = {}
        self._encode = json.JSONEncoder(allow_nan=False).encode

    def __call__(self, value: Any) -> str:
        if type(value) is int or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if not isinstance(value, (str, tuple)):
            return self._encode(plain(value))
        try:
            return self._known[value]
        except KeyError:
            return self._known.setdefault(value, self._encode(plain(value)))
        except TypeError:  # a tuple that holds a list
            return self._encode(plain(value))


def _rows(data: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The rows as plain dicts, NA as None; ``row`` is the position."""
    names = [str(name) for name in data.columns]
    for begin in range(0, len(data), _BATCH):
        part = data.iloc[begin : begin + _BATCH]
        lists = []
        for name in data.columns:
            values, missing = part[name].tolist(), part[name].isna()
            if missing.any():
                values = [None if gone else value for value, gone in zip(values, missing.tolist(), strict=True)]
            lists.append(values)
        for offset, row in enumerate(zip(*lists, strict=True)):
            yield {**dict(zip(names, row, strict=True)), "row": begin + offset}


def _void(value: Any) -> bool:
    """Whether there is nothing to say: not measured, or empty."""
    return value is None or (type(value) in (str, tuple) and not value)


def _process(row: dict[str, Any]) -> int:
    return row["process"] or _UNKNOWN_PROCESS


def _track(row: dict[str, Any]) -> tuple[int, int, int]:
    """(pid, tid, device): as Kineto has it, a device is a process and a stream a thread."""
    if row["device"] == "cpu":
        return _process(row), row["thread"] if row["thread"] is not None else 0, -1
    index = row["device"].rpartition(":")[2]
    device = int(index) if index.isdigit() else -1
    stream = row["stream"]
    return device if device >= 0 else _UNKNOWN_DEVICE, _UNKNOWN_STREAM if stream is None else stream, device


def _us(ns: int) -> str:
    whole, rest = divmod(abs(ns), 1000)
    return f"{'-' if ns < 0 else ''}{whole}.{rest:03d}"


def _span(start_ns: int, duration_ns: int) -> str:
    return f'"ts": {_us(start_ns)}, "dur": {_us(duration_ns)}'


def _iteration_events(profile: Profile) -> Iterator[str]:
    """A range per call over its launches and, per device, one over its kernels.

    The second may reach into the next call's, where launches run ahead: on one track ranges must not overlap, so it
    ends where the next one begins.
    """
    rows = profile.window
    on_cpu = rows["device"] == "cpu"
    start = rows["start_ns"].astype("Int64")
    begin = start.where(on_cpu, rows["launch_ns"])
    end = (start + rows["duration_ns"]).where(on_cpu, rows["launch_ns"] + 1)
    held = rows.assign(begin=begin, end=end).dropna(subset=["begin", "end", "thread"])
    # A call belongs to the thread that launched most of it; a backward's thread launches within the same time.
    spans = held.groupby("iteration").agg(begin=("begin", "min"), end=("end", "max"))
    owner = held.groupby(["iteration", "process", "thread"]).size().sort_values(kind="stable")
    on = {int(iteration): (process, thread) for iteration, process, thread in owner.index}
    for iteration, first, last in spans.itertuples():
        process, thread = on[iteration]
        where = {"pid": int(process) or _UNKNOWN_PROCESS, "tid": int(thread)}
        yield _range("user_annotation", f"{ITERATION_PREFIX}{iteration}", where, int(first), int(last))
    on_device = rows[~on_cpu].assign(end=rows["start_ns"] + rows["duration_ns"])
    for device, part in on_device.groupby("device", sort=False):
        pid = _track({"device": device, "stream": None})[0]
        span = part.groupby("iteration").agg(begin=("start_ns", "min"), end=("end", "max")).sort_values("begin")
        follow = [*span["begin"].tolist()[1:], None]
        for (iteration, first, last), limit in zip(span.itertuples(), follow, strict=True):
            last = last if limit is None else min(last, limit)
            where = {"pid": pid, "tid": _CALLS_TRACK}
            yield _range("gpu_user_annotation", f"{ITERATION_PREFIX}{iteration}", where, int(first), int(last))


def _range(category: str, name: str, where: dict[str, int], begin: int, end: int) -> str:
    head = json.dumps({"ph": "X", "cat": category, "name": name, **where})
    return f"{head[:-1]}, {_span(begin, end - begin)}}}"


def _track_names(profile: Profile) -> Iterator[str]:
    names: dict[tuple[str, int, int], str] = {}
    for row in _rows(profile.kernels[["process", "device", "stream", "thread"]].drop_duplicates()):
        pid, tid, _ = _track(row)
        known = _process(row) != _UNKNOWN_PROCESS
        host = f"process {_process(row)}" if known else "process"
        names["process_name", _process(row), 0] = host
        if row["device"] != "cpu":
            names["process_name", pid, 0] = row["device"]
            names["thread_name", pid, tid] = f"stream {row['stream']}" if tid != _UNKNOWN_STREAM else "unknown stream"
            names["thread_name", pid, _CALLS_TRACK] = "calls"
        if row["thread"] is not None:
            names["thread_name", _process(row), row["thread"]] = f"thread {row['thread']}"
    for (kind, pid, tid), name in names.items():
        yield json.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})


# --- Folded stacks -----------------------------------------------------------------------------------------------

UNATTRIBUTED = "[unattributed]"


def to_folded(profile: Profile, path: str | os.PathLike[str], *, value: str = "duration_ns") -> None:
    """Write folded stacks (flamegraph.pl, inferno, speedscope) of the kernels in the measured calls.

    A line is ``module;...;module;file:line;operator;nodes;kernel value``, without the frames that are not known, and
    starts with the frame ``[unattributed]`` and the reason where no FX node is known. The values are ``value`` summed
    over the kernels; in ns they sum to ``profile.total_ns`` exactly. Semicolons, percent signs and control characters
    in names are written as in a URL ("%3B"). Raises ValueError where ``value`` is no numeric column; kernels for which
    it was not measured are left out.
    """
    import pandas as pd

    rows = profile.window
    if value not in rows or rows[value].dtype.kind not in "iuf":
        raise ValueError(f"no numeric column {value!r} in profile.kernels")
    keys = ["graph", "nodes", "operator", "name", "method", "reason"]
    coded = {key: pd.factorize(rows[key].to_numpy(dtype=object), use_na_sentinel=False) for key in keys}
    table = pd.DataFrame({key: codes for key, (codes, _) in coded.items()}).assign(value=rows[value].to_numpy())
    sums = table.dropna().groupby(keys, sort=False)["value"].sum()
    places = _Places(profile)
    merged: dict[str, Any] = {}
    for codes, total in zip(sums.index, sums.tolist(), strict=True):
        graph, nodes, operator, name, method, reason = (
            coded[key][1][code] for key, code in zip(keys, codes, strict=True)
        )
        if method == "none":
            frames = [UNATTRIBUTED, reason, operator, name]
        else:
            place = places.of(graph, nodes)
            frames = [*place.get("module", "").split("."), place.get("source", ""), operator, "+".join(nodes), name]
        stack = ";".join(_frame_text(frame) for frame in frames if frame)
        merged[stack] = merged.get(stack, 0) + total
    write_atomically(Path(path), "".join(f"{stack} {total}\n" for stack, total in sorted(merged.items())))


# What str.splitlines or a reader of stacks would take for an end, and the escape itself.
_RESERVED = re.compile("[;%\x00-\x1f\x7f\x85\u2028\u2029]")


def _frame_text(frame: str) -> str:
    return _RESERVED.sub(lambda match: "".join(f"%{byte:02X}" for byte in match.group().encode()), plain(frame))


# --- Shared ------------------------------------------------------------------------------------------------------


class _Places:
    """Where the user wrote the nodes of a kernel: those of the leading one, with most FLOPs, then most bytes."""

    def __init__(self, profile: Profile) -> None:
        rows = profile.nodes.to_dict("records")
        self._nodes = {(row["graph"], row["node"]): row for row in rows}
        self._found: dict[Hashable, dict[str, Any]] = {}

    def of(self, graph: str, nodes: tuple[str, ...] | None) -> dict[str, Any]:
        """{"nodes", "module", "source"}, without what is not known."""
        key = (graph, nodes)
        if key not in self._found:
            self._found[key] = self._find(graph, nodes or ())
        return self._found[key]

    def _find(self, graph: str, nodes: tuple[str, ...]) -> dict[str, Any]:
        rows = [self._nodes[graph, node] for node in nodes if (graph, node) in self._nodes]
        lead = leading_node([_info(row) for row in rows])
        found = {
            "nodes": nodes,
            "module": lead.module_path if lead else "",
            "source": f"{_without_home(lead.file)}:{lead.line}" if lead and lead.file else "",
        }
        return {key: value for key, value in found.items() if not _void(value)}


def _info(row: dict[Hashable, Any]) -> NodeInfo:
    flops, moved = (None if math.isnan(row[key]) else row[key] for key in ("flops", "bytes"))
    place = {key: row[key] for key in ("module_path", "file", "line")}
    return NodeInfo(row["node"], "call_function", row["target"], flops=flops, bytes=moved, **place)


_HOME = re.compile(r"^(/home/[^/]+|/Users/[^/]+|/root|[A-Za-z]:[\\/]Users[\\/][^\\/]+)(?=[\\/])")


def _without_home(path: str) -> str:
    """A path that does not say who the user is."""
    home = os.path.expanduser("~").rstrip("/\\")
    if home not in ("", "~") and path.startswith((home + "/", home + "\\")):
        return "~" + path[len(home) :]
    return _HOME.sub("~", path)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` once it is written; what was there stays where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
