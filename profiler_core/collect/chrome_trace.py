"""Reads the Chrome traces that torch.profiler writes (Kineto's, of any age and vendor) into a
:class:`profiler_core.trace.Trace`.

Events are decoded one by one and only their columns are kept, which takes the time of ``json.load`` and a fraction of
its memory, and leaves every complete event of a file that breaks off.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_core.collect.json_events import EventStream, other_json, run_meta
from profiler_core.range_names import iteration_of
from profiler_core.trace import (
    CALL_COLUMNS,
    ITERATION_PREFIX,
    KERNEL_COLUMNS,
    LONGEST_NS,
    RANGE_COLUMNS,
    OperatorInputs,
    Trace,
    TraceError,
)

if TYPE_CHECKING:
    import numpy as np

# What a category holds, in lower case: traces of 2021 say `Kernel`, `Operator`, `Runtime`, `Memcpy`. AMD's traces use
# the names of CUDA's.
_KINDS = {
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "annotation",
    "gpu_user_annotation": "device",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "hip_runtime": "call",
    "hip_driver": "call",
    "runtime": "call",
    "driver": "call",
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
}
# torch.autograd's own export, before and beside Kineto: a bare list without categories, told apart by these.
_LEGACY_KINDS = {"CPU functions": "op", "CUDA functions": "kernel"}

_KERNEL_FIELDS = [name for name in KERNEL_COLUMNS if name not in ("name", "kind", "shared_static", "local_per_thread")]
_CALL_FIELDS = [name for name in CALL_COLUMNS if name != "name"]
_RANGE_FIELDS = [name for name in RANGE_COLUMNS if name not in ("name", "category")]

_ZEROS = (0, 0, 0)
_INT64 = 2**63 - 1
_SHOWN = 3  # places named in a message; the rest is a count


def read(path: str | Path) -> Trace:
    """Read a trace from a file, plain or gzipped (told by its first bytes, not by its name).

    Raises TraceError where the file is no trace of torch.profiler or nothing of it can be recovered, and OSError
    where it cannot be opened. See :func:`parse`.
    """
    return parse(Path(path).read_bytes(), path=str(path))


def parse(
    trace: str | bytes | Mapping[str, Any] | list[Any], *, wall_ns: Iterable[float] = (), path: str = ""
) -> Trace:
    """Read a trace from its JSON text (gzipped bytes too) or from the parsed JSON.

    The file's times are microseconds, as integers or with decimals; from text they become integer ns without passing
    through a float, which at 1.7e15 us would be good to 0.25 us only. They stay on the file's own clock:
    ``meta["base_ns"]`` is what to add for the time of day.

    A file is one process's: kernels get the process that launched them (Kineto writes the device there).
    ``iterations`` counts the ranges "fxopt::iteration#N" or, where there are none, "ProfilerStep#N".
    ``device_type`` is "cpu" where the trace has no activity of a device, and a note says so.

    A text that breaks off or is damaged yields the events that are whole, and ``partial`` says where the damage is.
    An event without a usable time is dropped and counted there too. Raises TraceError where neither a kernel nor an
    operator is left.
    """
    where = path or "the trace"
    header: dict[str, Any]
    if isinstance(trace, (str, bytes)):
        source = EventStream(where)
        events = source.events(trace)
        del trace  # lets the file's bytes go once they are decoded
        columns, header, partial = _collect(events), source.header, source.damage
    else:
        header = dict(trace) if isinstance(trace, Mapping) else {"traceEvents": trace}
        listed = header.get("traceEvents")
        columns, partial = _collect(listed if isinstance(listed, list) else []), []
    lost = bool(partial or columns.dropped.count)
    kernels = columns.kernel_columns()
    partial += columns.dropped.messages()
    if not (columns.kernel_names or columns.call_names or columns.range_names):
        if partial:
            raise TraceError(f"{where}: no event could be read. {' '.join(partial)}")
        raise TraceError(f"{where} is not a trace of torch.profiler: {other_json(header, columns.left_out)}")
    if lost and not columns.kernel_names and "op" not in columns.range_categories:
        raise TraceError(f"{where}: neither a kernel nor an operator is left of it. {' '.join(partial)}")
    notes = columns.notes(lost)
    meta = run_meta(header, path, columns.threads, notes)
    return Trace.build(
        kernels=kernels,
        calls={"name": columns.call_names, **_named(columns.calls, _CALL_FIELDS)},
        ranges={
            "name": columns.range_names,
            "category": columns.range_categories,
            **_named(columns.ranges, _RANGE_FIELDS),
        },
        iterations=columns.iterations(),
        wall_ns=tuple(wall_ns),
        device_type="cuda" if columns.kernel_names else "cpu",
        meta=meta,
        notes=tuple(notes),
        partial=tuple(partial),
        inputs=tuple(columns.inputs),
    )


@dataclass
class _Dropped:
    """What could not be taken as it stood in the file."""

    events: list[str] = field(default_factory=list)
    count: int = 0
    clamped: list[str] = field(default_factory=list)
    clamps: int = 0

    def drop(self, index: int, name: object, reason: str) -> None:
        self.count += 1
        if self.count <= _SHOWN:
            self.events.append(f"event {index} ({str(name)[:60]!r}): {reason}")

    def clamp(self, place: str, value: object) -> None:
        self.clamps += 1
        if self.clamps <= _SHOWN:
            self.clamped.append(f"{place} ({str(value)[:40]!r})")

    def messages(self) -> list[str]:
        found = []
        if self.count:
            more = f"; and {self.count - _SHOWN} more" if self.count > _SHOWN else ""
            found.append(f"{self.count} events dropped: {'; '.join(self.events)}{more}. Export the trace again.")
        if self.clamps:
            more = f" and {self.clamps - _SHOWN} more" if self.clamps > _SHOWN else ""
            places = ", ".join(self.clamped) + more
            found.append(f"{self.clamps} values that do not fit their column are set to unknown: {places}")
        return found


@dataclass
class _Columns:
    """The columns as they fill: integers of a row lie one after the other in one array a table."""

    kernels: array[int] = field(default_factory=lambda: array("q"))
    kernel_names: list[str] = field(default_factory=list)
    kernel_kinds: list[str] = field(default_factory=list)
    calls: array[int] = field(default_factory=lambda: array("q"))
    call_names: list[str] = field(default_factory=list)
    ranges: array[int] = field(default_factory=lambda: array("q"))
    range_names: list[str] = field(default_factory=list)
    range_categories: list[str] = field(default_factory=list)
    dropped: _Dropped = field(default_factory=_Dropped)
    left_out: Counter[str] = field(default_factory=Counter)
    threads: dict[int, str] = field(default_factory=dict)
    inputs: list[OperatorInputs] = field(default_factory=list)  # each once
    numbers: dict[str, int] = field(default_factory=dict)  # their places there, by their text

    def iterations(self) -> int:
        names = {n for n, c in zip(self.range_names, self.range_categories, strict=True) if c != "device"}
        marked = {name for name in names if iteration_of(name) >= 0}
        return len({name for name in marked if name.startswith(ITERATION_PREFIX)} or marked)

    def kernel_columns(self) -> dict[str, Any]:
        import numpy as np

        named = _named(self.kernels, _KERNEL_FIELDS)
        for column, (dtype, default) in KERNEL_COLUMNS.items():
            if dtype == "int32" and column in named:
                wide = np.abs(named[column]) > 2**31 - 1
                if wide.any():
                    for row in np.flatnonzero(wide):
                        self.dropped.clamp(f"{column} of kernel {row}", named[column][row])
                    named[column] = np.where(wide, default, named[column])
        named["process"] = self._processes(named["correlation"])
        return {"name": self.kernel_names, "kind": self.kernel_kinds, **named}

    def _processes(self, correlation: np.ndarray) -> np.ndarray:
        """The launching process of each kernel; 0 where a merged file has several that could be it."""
        import numpy as np

        calls = _named(self.calls, _CALL_FIELDS)
        on_cpu = {int(p) for p in np.unique(calls["process"])}
        if not on_cpu:
            ranges = _named(self.ranges, _RANGE_FIELDS)
            on_cpu = {int(p) for p in np.unique(ranges["process"][ranges["device"] < 0])}
        if len(on_cpu) <= 1:
            return np.full(len(correlation), on_cpu.pop() if on_cpu else 0, dtype=np.int64)
        owner: dict[int, int] = {}
        for key, process in zip(calls["correlation"].tolist(), calls["process"].tolist(), strict=True):
            owner[key] = process if owner.get(key, process) == process else 0
        owner[0] = 0
        return np.array([owner.get(key, 0) for key in correlation.tolist()], dtype=np.int64)

    def notes(self, lost: bool) -> list[str]:
        """What is to be said of the file; ``lost``: a part of it could not be read."""
        found = []
        ranged = self.left_out.get("cuda_profiler_range", 0)
        if ranged:
            found.append(
                f"{ranged} cuda_profiler_range events are hardware counters that CUPTI's range profiler took instead "
                "of kernels; they are not read: profile once more without profiler_metrics for the kernels"
            )
        if not self.kernel_names:
            found.append(
                f"no kernels, though {len(self.call_names)} calls of the GPU's API: another profiler may have held the "
                "GPU; the times here are the CPU's"
                if self.call_names
                else f"no activity of a GPU{' in what is left of the file' if lost else ''}: the operators on the CPU "
                "count as kernels"
            )
        said = ("cuda_profiler_range", "Trace")  # "Trace" is the frame around the whole
        rest = {name: count for name, count in self.left_out.most_common() if name not in said}
        if rest:
            listed = ", ".join(f"{count} {name or 'uncategorised'}" for name, count in rest.items())
            found.append(f"events that are not read: {listed}")
        return found


def _collect(events: Iterable[Any]) -> _Columns:
    """One pass over the events. B/E pairs count from the B to its E on the same thread."""
    out = _Columns()
    names: dict[str, str] = {}  # one object a name: they are long and come again and again
    kinds: dict[Any, str | None] = {}
    opened: dict[tuple[Any, Any], list[tuple[int, dict[str, Any]]]] = {}
    for index, event in enumerate(events):
        if type(event) is not dict:
            out.dropped.drop(index, event, "it is no object")
            continue
        phase = event.get("ph")
        if phase == "B":
            opened.setdefault(_track(event), []).append((index, event))
            continue
        if phase == "E":
            stack = opened.get(_track(event))
            if not stack:
                out.dropped.drop(index, event.get("name", ""), "it ends what never began")
                continue
            event = _joined(stack.pop()[1], event)
        elif phase != "X":
            continue
        category = event.get("cat")
        try:
            kind = kinds[category]
        except (KeyError, TypeError):
            category = str(category or "")
            kind = _KINDS.get(category.lower())
            if category:
                kinds[category] = kind
            else:
                kind = _LEGACY_KINDS.get(str(event.get("pid")))
        if kind is None:
            out.left_out[str(category)] += 1
            continue
        name = event.get("name", "")
        if type(name) is not str:
            name = str(name)
        name = names.setdefault(name, name)
        try:
            ts, dur = event["ts"], event["dur"]
            start = ts * 1000 if type(ts) is int else _ns(ts)
            duration = dur * 1000 if type(dur) is int else _ns(dur)
            if duration < 0:
                raise ValueError("its duration is negative")
            if duration > LONGEST_NS:
                raise ValueError("its duration is over 2**53 ns (104 days)")
            if not -_INT64 <= start <= _INT64 - duration:
                raise ValueError("its time is beyond 64 bits")
        except KeyError as missing:
            out.dropped.drop(index, name, f"it has no {missing}")
            continue
        except ValueError as error:
            out.dropped.drop(index, name, str(error))
            continue
        args = event.get("args")
        if type(args) is not dict:
            args = {}
        process, thread = event.get("pid", 0), event.get("tid", -1)
        correlation = args.get("correlation") or 0
        external = args.get("External id") or args.get("external id") or 0
        row: tuple[Any, ...]
        if kind == "op" or kind == "annotation" or kind == "device":
            out.range_names.append(name)
            out.range_categories.append(kind)
            on = (thread, -1) if kind != "device" else (-1, process)
            stream = -1 if kind != "device" else thread
            row = (process, on[0], start, start + duration, external, args.get("Sequence number", -1), on[1], stream)
            row = (*row, _inputs(out, args) if "Input Dims" in args else -1)
            _append(out, out.ranges, row, _RANGE_FIELDS, RANGE_COLUMNS, index)
        elif kind == "call":
            out.call_names.append(name)
            row = (process, thread, start, start + duration, correlation, external)
            _append(out, out.calls, row, _CALL_FIELDS, CALL_COLUMNS, index)
        else:
            out.kernel_names.append(name)
            out.kernel_kinds.append(kind)
            grid, block = args.get("grid"), args.get("block")
            row = (
                0,
                args.get("device", -1) if category else thread,  # the export without categories has it there
                args.get("stream", -1),
                start,
                duration,
                correlation,
                external,
                args.get("graph id") or 0,
                args.get("graph node id") or 0,
                *(grid if type(grid) is list and len(grid) == 3 else _ZEROS),
                *(block if type(block) is list and len(block) == 3 else _ZEROS),
                args.get("registers per thread", -1),
                args.get("shared memory", -1),  # static and dynamic in one
                args.get("bytes", -1),
            )
            _append(out, out.kernels, row, _KERNEL_FIELDS, KERNEL_COLUMNS, index)
    for stack in opened.values():
        for index, event in stack:
            out.dropped.drop(index, event.get("name", ""), "it begins and never ends")
    return out


def _inputs(out: _Columns, args: Mapping[str, Any]) -> int:
    """The number of what an operator was given, -1 where that is not to be read."""
    parts: list[Any] = [args.get(name) for name in ("Input type", "Input Dims", "Input Strides", "Concrete Inputs")]
    if any(type(part) is not list for part in parts) or len({len(part) for part in parts}) != 1:
        return -1
    key = repr(parts)
    if key not in out.numbers:
        types, dims, strides, values = parts
        found = (tuple(map(str, types)), tuple(map(_tuple, dims)), tuple(map(_tuple, strides)), tuple(map(str, values)))
        out.numbers[key] = len(out.inputs)
        out.inputs.append(OperatorInputs(*found))
    return out.numbers[key]


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(_tuple(item) if type(item) is list else item for item in value) if type(value) is list else ()


def _append(
    out: _Columns,
    table: array[int],
    row: tuple[Any, ...],
    fields: list[str],
    schema: Mapping[str, tuple[str, Any]],
    index: int,
) -> None:
    length = len(table)
    try:
        table.extend(row)
    except (TypeError, OverflowError):
        del table[length:]
        for column, value in zip(fields, row, strict=True):
            table.append(_whole(out, column, value, schema[column][1], index))


def _whole(out: _Columns, column: str, value: Any, default: int, index: int) -> int:
    """``value`` as a 64-bit integer: numbers may be strings, threads may have names."""
    if value is None:
        return default
    try:
        number = int(value) if not isinstance(value, str) or value.strip().lstrip("-").isdigit() else None
        if number is None and column not in ("thread", "process"):
            number = int(Decimal(value)) if Decimal(value).adjusted() < 19 else _INT64 + 1
    except (TypeError, ValueError, ArithmeticError):
        number = None
    if number is not None and -_INT64 - 1 <= number <= _INT64:
        return number
    if column in ("thread", "process"):
        # Beyond any thread id of an operating system, and the same in every file.
        number = (1 << 40) | zlib.crc32(str(value).encode("utf-8", "replace"))
        out.threads[number] = str(value)
        return number
    out.dropped.clamp(f"{column} of event {index}", value)
    return default


def _track(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("pid")), str(event.get("tid"))


def _joined(begin: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
    both = {**end, **begin, "args": {**_args(begin), **_args(end)}}
    try:
        both["dur"] = str(Decimal(_ns(end["ts"]) - _ns(begin["ts"])) / 1000)
    except (KeyError, ValueError):
        both.pop("dur", None)
    return both


def _args(event: Mapping[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _ns(microseconds: Any) -> int:
    """Integer ns of a time in us, exactly; further decimals are rounded. Raises ValueError."""
    if type(microseconds) is str and microseconds[-4:-3] == ".":
        digits = microseconds[:-4] + microseconds[-3:]
        if digits.isdigit():
            return int(digits)
    try:
        number = Decimal(str(microseconds))
    except ArithmeticError:
        number = Decimal("NaN")
    if not number.is_finite():
        raise ValueError(f"its time {str(microseconds)[:40]!r} is no number")
    if number.adjusted() > 18:
        raise ValueError(f"its time {str(microseconds)[:40]} is beyond 64 bits")
    return int((number * 1000).to_integral_value())


def _named(flat: array[int], fields: list[str]) -> dict[str, np.ndarray]:
    import numpy as np

    rows = np.array(flat, dtype=np.int64).reshape(-1, len(fields))
    return {name: rows[:, i] for i, name in enumerate(fields)}
