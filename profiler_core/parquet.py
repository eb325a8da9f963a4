"""Writes a profile as Parquet, for whoever reads tables, and reads it back."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_core.collect.provenance import Launch
from profiler_core.counters import COUNTERS
from profiler_core.export import replacing
from profiler_core.files import plain
from profiler_core.profiles import (
    KERNEL_COLUMNS,
    NODE_COLUMNS,
    SCHEMA_VERSION,
    Profile,
    ProfileFormatError,
    header_of,
)
from profiler_core.source_text import restored

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_UNITS = {
    **{counter.key: counter.unit for counter in COUNTERS},
    "start_ns": "ns", "duration_ns": "ns", "launch_ns": "ns", "time_ns": "ns per call", "group_time_ns": "ns per call",
    "window_ns": "ns", "registers": "per thread", "shared_memory": "byte per block", "flops": "FLOP per call",
    "bytes": "byte per call", "share": "1", "grid": "blocks", "block": "threads", "theoretical_occupancy": "%",
}  # fmt: skip
_INTEGERS = ("grid", "block", "shape")  # columns of tuples of integers; the other tuples hold names


class MissingDependency(ImportError):
    """A library that only one export needs is not installed; the message says how to get it."""


def to_parquet(profile: Profile, folder: str | os.PathLike[str]) -> None:
    """Write ``kernels.parquet``, ``nodes.parquet`` and ``profile.json`` (environment, notes, launches, source lines)
    into ``folder``, which is made.

    Tuples become lists, what was not measured null. Every column's metadata hold its pandas dtype and, where it has
    one, its unit; the schema's hold the version. The three files carry one stamp, so that a mixture of two exports is
    noticed; an earlier export stays where this one fails. Raises MissingDependency without pyarrow, ValueError for a
    column that Parquet cannot hold, and OSError.
    """
    _, parquet = _pyarrow()
    where, stamp = Path(folder), uuid.uuid4().hex
    marks = {"fxopt": json.dumps({"schema_version": SCHEMA_VERSION, "stamp": stamp})}
    kernels = _arrow_table(profile.kernels, marks, "kernels")
    nodes = _arrow_table(profile.nodes, marks, "nodes")
    header = {
        "schema_version": SCHEMA_VERSION,
        "stamp": stamp,
        "iterations": profile.iterations,
        "wall_ns": profile.wall_ns,
        "environment": profile.environment,
        "notes": list(profile.notes),
        "launches": [asdict(launch) for launch in profile.launches],
        "sources": profile.source_lines(),
    }
    text = json.dumps(plain(header), allow_nan=False)
    # All three are written before the first takes the place of an earlier one.
    with (
        replacing(where / "kernels.parquet") as kernels_file,
        replacing(where / "nodes.parquet") as nodes_file,
        replacing(where / "profile.json") as header_file,
    ):
        parquet.write_table(kernels, kernels_file, compression="zstd")
        parquet.write_table(nodes, nodes_file, compression="zstd")
        header_file.write(text.encode())


def from_parquet(folder: str | os.PathLike[str]) -> Profile:
    """Read what :func:`to_parquet` wrote.

    Raises MissingDependency without pyarrow, and ProfileFormatError, which names the file and the remedy, where the
    folder is not one whole export of this version.
    """
    pyarrow, parquet = _pyarrow()
    where = Path(folder)
    remedy = "; export the profile again"
    path = where / "profile.json"
    try:
        header = _checked(json.loads(path.read_text(encoding="utf-8")))
        frames = {}
        for name, columns in (("kernels", KERNEL_COLUMNS), ("nodes", NODE_COLUMNS)):
            path = where / f"{name}.parquet"
            table = parquet.read_table(path)
            marks = _checked(json.loads((table.schema.metadata or {}).get(b"fxopt", b"{}")))
            if marks["stamp"] != header["stamp"]:
                raise ValueError("it is from another export than profile.json beside it")
            missing = [column for column in columns if column not in table.column_names]
            if missing:
                raise ValueError(f"it lacks the column {missing[0]!r}")
            frames[name] = _pandas_frame(table)
        path = where / "profile.json"
        launches = tuple(Launch(**{**launch, "nodes": tuple(launch["nodes"])}) for launch in header["launches"])
        environment, iterations, wall, notes = header_of(header)
        sources = restored(header.get("sources"))
        return Profile(frames["kernels"], frames["nodes"], environment, iterations, wall, launches, notes, sources)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        pyarrow.ArrowException,
    ) as error:
        raise ProfileFormatError(f"{path}: {type(error).__name__}: {error}{remedy}") from error


def _checked(marks: Any) -> Any:
    version = marks.get("schema_version") if isinstance(marks, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version: expected {SCHEMA_VERSION}, got {version!r}")
    return marks


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("Parquet needs pyarrow: pip install 'fxopt[parquet]'") from error
    return pyarrow, pyarrow.parquet


def _arrow_table(data: pd.DataFrame, metadata: dict[str, str], name: str) -> pa.Table:
    import pyarrow as pa

    arrays, fields = [], []
    for column in data.columns:
        series = data[column]
        try:
            array = _arrow_array(series, column)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise ValueError(f"{name}: column {column!r} does not fit Parquet ({error}); leave it out") from error
        arrays.append(array)
        marks = {"dtype": str(series.dtype), "unit": _UNITS.get(column, "")}
        fields.append(pa.field(str(column), array.type, metadata=marks))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))


def _arrow_array(series: pd.Series, column: str) -> pa.Array:
    """One column; a value that comes again and again, such as a name of 5,000 characters, is held once."""
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    if series.dtype.kind in "iufb" or str(series.dtype) in ("Int64", "boolean", "Float64"):
        return pa.Array.from_pandas(series)
    data = series.to_numpy(dtype=object)
    try:
        codes, distinct = pd.factorize(data)
    except TypeError:  # lists or sets
        codes, distinct = np.arange(len(data)), data
    values = [plain(value) for value in distinct]
    text = all(isinstance(value, str) for value in values)
    kind = pa.string() if text else None
    if column in KERNEL_COLUMNS or column in NODE_COLUMNS:
        lists = any(isinstance(value, list) for value in values)
        kind = pa.list_(pa.int64() if column in _INTEGERS else pa.string()) if lists else kind
    indices = pa.array(codes, type=pa.int32(), mask=codes < 0)
    held = pa.array(values, type=kind)
    return pa.DictionaryArray.from_arrays(indices, held) if text else held.take(indices)


def _pandas_frame(table: pa.Table) -> pd.DataFrame:
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    columns = {}
    for position, field in enumerate(table.schema):
        column = table.column(position).combine_chunks()
        dtype = field.metadata[b"dtype"].decode()
        if dtype == "object":
            if pa.types.is_dictionary(column.type):
                held = [*column.dictionary.to_pylist(), None]
                places = column.indices.fill_null(len(held) - 1).to_numpy(zero_copy_only=False)
            else:
                held, places = [_tuples(value) for value in column.to_pylist()], slice(None)
            values = np.empty(len(held), dtype=object)
            values[:] = held
            columns[field.name] = pd.Series(values[places], dtype=object)
        elif dtype in ("Int64", "boolean", "Float64"):
            columns[field.name] = pd.Series(column.to_pylist(), dtype=dtype)
        else:
            columns[field.name] = pd.Series(column.to_pandas().to_numpy(), dtype=dtype)
    return pd.DataFrame(columns, columns=table.column_names)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
