"""The attributed profile of a compiled graph, as data frames."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from profiler_core.aggregate import leading_node
from profiler_core.collect.provenance import Launch, NodeInfo
from profiler_core.files import plain, write_atomically
from profiler_core.quantities import duration
from profiler_core.source_text import SourceLines, restored, source_lines

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 2

# Column -> pandas dtype. "Int64" is the nullable integer: a value that was not measured is missing, not zero.
# A profile with counters has a float64 column more for each of them (:mod:`profiler_core.counters`).
KERNEL_COLUMNS = {
    "name": "object",
    "kind": "object",  # kernel | memcpy | memset
    "process": "int64",
    "device": "object",
    "stream": "Int64",
    "start_ns": "int64",
    "duration_ns": "int64",
    "thread": "Int64",  # that launched it
    "launch_ns": "Int64",
    "grid": "object",
    "block": "object",
    "registers": "Int64",  # per thread
    "shared_memory": "Int64",  # bytes per block, static and dynamic
    "correlation": "Int64",
    "iteration": "int64",  # -1: outside of the measured calls
    "operator": "object",  # innermost around the launch
    "top_operator": "object",  # outermost
    "operator_method": "object",  # correlation | enclosure | none
    "graph": "object",  # the compile, "" where the profile holds one graph
    "launch": "object",  # kernel:handle
    "nodes": "object",  # tuple of names
    "method": "object",  # how the nodes were found: correlation | enclosure | fusion_map | none
    "confidence": "object",  # high | medium | none
    "reason": "object",
    "evidence": "object",  # tuple of sentences: claims that lost
    "spans": "object",  # tuple of names: NVTX start/end ranges open at the launch, innermost first
    "family": "object",
    "precision": "object",
    "opaque": "bool",  # a black box to the FX graph: a library's or a custom kernel
    "theoretical_occupancy": "float64",  # %, of the warps that an SM holds; NaN where the device is not known
    "occupancy_limiter": "object",  # warps | blocks | registers | shared memory
    "waves_per_sm": "float64",
}
NODE_COLUMNS = {
    "graph": "object",
    "node": "object",
    "kind": "object",  # node: of an FX graph | operator: outside of every graph
    "target": "object",
    "shape": "object",
    "dtype": "object",
    "module_path": "object",
    "module_class": "object",
    "file": "object",
    "line": "int64",
    "source": "object",
    "pre_grad": "object",
    "kernels": "int64",
    "time_ns": "float64",
    "group_time_ns": "float64",
    "window_ns": "int64",
    "share": "float64",
    "estimate": "bool",
    "fused_with": "object",
    "flops": "float64",
    "bytes": "float64",
    "launches": "object",
    "opaque": "bool",
}
_GROUP_COLUMNS = {
    "graph": "object",
    "launch": "object",
    "kernel": "object",
    "nodes": "object",
    "time_ns": "float64",
    "share": "float64",
    "kernels": "int64",
    "flops": "float64",
    "bytes": "float64",
    "dtype": "object",
    "extern": "bool",
    "file": "object",
    "line": "int64",
    "module_path": "object",
}


class ProfileFormatError(ValueError):
    """A profile file cannot be read; the message names the file, the place and the remedy."""


def frame(records: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> pd.DataFrame:
    """A data frame of these columns and dtypes, also where there are no records."""
    import pandas as pd

    data = {name: pd.Series([record[name] for record in records], dtype=dtype) for name, dtype in columns.items()}
    return pd.DataFrame(data, columns=list(columns))


@dataclass
class Profile:
    """What ran in ``iterations`` calls of a function, for which operators and FX nodes.

    ``kernels`` has a row per kernel launch (columns: :data:`KERNEL_COLUMNS`; times in ns; a column per counter where
    counters were taken), ``nodes`` a row per operator of each post-grad graph and, with kind "operator", per operator
    that ran outside of all graphs (:data:`NODE_COLUMNS`; ``time_ns`` and ``group_time_ns`` per call, the mean over the
    window). The time of a fused kernel belongs to the group: a node's ``time_ns`` is then a share by the bytes that
    each node would move on its own, equal where those are unknown, and ``estimate`` is True. ``wall_ns`` is the median
    wall time of a call, taken without the profiler. FLOPs and bytes are modelled, times and counters are measured; NaN
    means not modelled or not measured.

    The window is the kernels with an iteration, 0 or more. Others (warm-up, a call that lost kernels) stay in
    ``kernels`` and count in :attr:`outside_ns` alone. ``sources`` holds the text of the nodes' source lines where it
    came with a file; :meth:`source_lines` has it in any case.
    """

    kernels: pd.DataFrame
    nodes: pd.DataFrame
    environment: dict[str, Any]
    iterations: int
    wall_ns: float
    launches: tuple[Launch, ...] = ()
    notes: tuple[str, ...] = field(default=())
    sources: SourceLines | None = None

    def __repr__(self) -> str:
        kernel, wall = duration(self.kernel_ns), duration(self.wall_ns)
        head = f"Profile: {len(self.window)} kernels in {self.iterations} calls; {kernel} of kernel time"
        lines = [f"{head} a call" if math.isnan(self.wall_ns) else f"{head}, {wall} of wall time a call"]
        if self.total_ns:
            elsewhere = self.attributed_share - self.graph_share
            lines.append(
                f"  attributed {self.attributed_share:.1%}: to FX nodes {self.graph_share:.1%}, to operators "
                f"{elsewhere:.1%}; opaque {self.opaque_share:.1%}"
            )
            top = self.by("operator").head(5)
            for name, time, share in zip(top["operator"], top["time_ns"], top["share"], strict=True):
                lines.append(f"  {duration(time):>12}  {share:6.1%}  {name or '(no operator)'}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        from profiler_core.notebook import profile_html

        return profile_html(self)

    @property
    def window(self) -> pd.DataFrame:
        """The kernels of the measured calls."""
        return self.kernels[self.kernels["iteration"] >= 0]

    @property
    def total_ns(self) -> int:
        """Time of all kernels in the window, ns; always ``attributed_ns + unattributed_ns``."""
        return int(self.window["duration_ns"].sum())

    @property
    def outside_ns(self) -> int:
        """Time of the kernels outside of the window, ns."""
        return int(self.kernels.loc[self.kernels["iteration"] < 0, "duration_ns"].sum())

    @property
    def attributed_ns(self) -> int:
        """Time of the kernels in the window whose nodes are known, ns."""
        rows = self.window
        return int(rows.loc[rows["method"] != "none", "duration_ns"].sum())

    @property
    def unattributed_ns(self) -> int:
        """Time of the kernels in the window whose nodes are not known, ns."""
        rows = self.window
        return int(rows.loc[rows["method"] == "none", "duration_ns"].sum())

    @property
    def attributed_share(self) -> float:
        """Attributed part of the kernel time, 0 to 1; NaN where no kernel took any time."""
        return self._share(self.attributed_ns)

    @property
    def graph_share(self) -> float:
        """Part of the kernel time in FX nodes of compiled graphs, 0 to 1; the rest of what is attributed went to
        operators outside of graphs. NaN where no kernel took any time.
        """
        rows = self.window
        return self._share(int(rows.loc[(rows["method"] != "none") & (rows["launch"] != ""), "duration_ns"].sum()))

    @property
    def operator_share(self) -> float:
        """Part of the kernel time whose operator is known, 0 to 1; NaN where no kernel ran."""
        rows = self.window
        return self._share(int(rows.loc[rows["operator_method"] != "none", "duration_ns"].sum()))

    @property
    def opaque_share(self) -> float:
        """Part of the kernel time in kernels that are black boxes to the graph (cuBLAS, cuDNN, NCCL, custom)."""
        rows = self.window
        return self._share(int(rows.loc[rows["opaque"], "duration_ns"].sum()))

    def _share(self, part: int) -> float:
        total = self.total_ns
        return part / total if total else math.nan

    @property
    def kernel_ns(self) -> float:
        """Kernel time of one call: the median over the iterations, ns."""
        per_call = self.window.groupby("iteration")["duration_ns"].sum().tolist()
        # An iteration in which no kernel ran has no group but counts as zero.
        per_call += [0] * (self.iterations - len(per_call))
        return float(median(per_call))

    def unattributed(self) -> pd.DataFrame:
        """The kernels of the window whose nodes are not known, by name and reason, longest first: name, reason,
        kernels, time_ns (window).
        """
        rows = self.window
        rows = rows[rows["method"] == "none"]
        # Not by groupby: its index cannot hold every name (a lone surrogate).
        sums: dict[tuple[str, str], dict[str, Any]] = {}
        for name, reason, time in zip(rows["name"], rows["reason"], rows["duration_ns"].tolist(), strict=True):
            group = sums.setdefault((name, reason), {"name": name, "reason": reason, "kernels": 0, "time_ns": 0})
            group["kernels"] += 1
            group["time_ns"] += time
        table = frame(
            list(sums.values()), {"name": "object", "reason": "object", "kernels": "int64", "time_ns": "int64"}
        )
        return table.sort_values("time_ns", ascending=False, kind="stable").reset_index(drop=True)

    def groups(self) -> pd.DataFrame:
        """One row per launch of the wrapper code, in its order: time and kernels per call, modelled FLOPs and bytes,
        and the counters where they were taken.

        ``share`` is of all kernel time. ``dtype``, ``file``, ``line`` and ``module_path`` are those of the
        group's leading node: the one with most FLOPs, then most bytes.
        """
        rows = self.window
        # Not by groupby: its index cannot hold every name (a lone surrogate).
        time: dict[tuple[str, str], int] = {}
        count: dict[tuple[str, str], int] = {}
        for graph, key, taken in zip(rows["graph"], rows["launch"], rows["duration_ns"].tolist(), strict=True):
            time[graph, key] = time.get((graph, key), 0) + taken
            count[graph, key] = count.get((graph, key), 0) + 1
        total = self.total_ns
        info = {(str(row["graph"]), str(row["node"])): _info(row) for row in self.nodes.to_dict("records")}
        records = []
        for launch in self.launches:
            graph = launch.graph
            lead = leading_node([info[graph, name] for name in launch.nodes if (graph, name) in info])
            window_ns = int(time.get((graph, launch.key), 0))
            records.append(
                {
                    "graph": graph,
                    "launch": launch.key,
                    "kernel": launch.kernel,
                    "nodes": launch.nodes,
                    "time_ns": window_ns / self.iterations,
                    "share": window_ns / total if total else 0.0,
                    "kernels": round(count.get((graph, launch.key), 0) / self.iterations),
                    "flops": launch.flops,
                    "bytes": launch.bytes,
                    "dtype": lead.dtype if lead else None,
                    "extern": launch.extern,
                    "file": lead.file if lead else "",
                    "line": lead.line if lead else 0,
                    "module_path": lead.module_path if lead else "",
                }
            )
        table = frame(records, _GROUP_COLUMNS)
        if "counters" not in self.kernels:
            return table
        from profiler_core.grouping import launch_counters

        counted = launch_counters(self).drop(columns=["time_ns", "share", "kernels"])
        index = list(zip(table["graph"], table["launch"], strict=True))
        return table.join(counted.reindex(index).set_axis(table.index))

    def source_lines(self) -> SourceLines:
        """File -> line number -> text of the lines that nodes came from and three around each, bounded: as written with
        the profile, else of the files as they are now, where these are still what ran.
        """
        if self.sources is not None:
            return self.sources
        columns = (self.nodes[name].tolist() for name in ("file", "line", "source"))
        return source_lines(zip(*columns, strict=True))

    def by(self, column: str) -> pd.DataFrame:
        """Time, kernels and counters by the values of a column: see :func:`profiler_core.grouping.by`."""
        from profiler_core.grouping import by

        return by(self, column)

    def to_chrome_trace(self, path: str | os.PathLike[str], columns: Sequence[str] = ()) -> None:
        """Write a trace for Perfetto or chrome://tracing: see :func:`profiler_core.export.to_chrome_trace`."""
        from profiler_core.export import to_chrome_trace

        to_chrome_trace(self, path, columns=columns)

    def to_folded(self, path: str | os.PathLike[str]) -> None:
        """Write the stacks of a flame graph: see :func:`profiler_core.export.to_folded`."""
        from profiler_core.export import to_folded

        to_folded(self, path)

    def to_parquet(self, folder: str | os.PathLike[str]) -> None:
        """Write the frames as Parquet files: see :func:`profiler_core.parquet.to_parquet`."""
        from profiler_core.parquet import to_parquet

        to_parquet(self, folder)

    @classmethod
    def from_parquet(cls, folder: str | os.PathLike[str]) -> Profile:
        """Read what :meth:`to_parquet` wrote: see :func:`profiler_core.parquet.from_parquet`."""
        from profiler_core.parquet import from_parquet

        return from_parquet(folder)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` atomically."""
        write_atomically(Path(path), json.dumps(self.to_json(), allow_nan=False))

    def to_json(self) -> dict[str, Any]:
        """The profile as JSON data. What JSON cannot hold is written as :func:`profiler_core.files.plain` says:
        infinities are null, lone surrogates U+FFFD, sets lists, paths and dates text.
        """
        header = {
            "schema_version": SCHEMA_VERSION,
            "iterations": self.iterations,
            "wall_ns": self.wall_ns,
            "environment": self.environment,
            "notes": list(self.notes),
            "launches": [asdict(launch) for launch in self.launches],
            "sources": self.source_lines(),
        }
        return {**plain(header), "kernels": _table(self.kernels), "nodes": _table(self.nodes)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what :meth:`save` wrote, also gzipped. Raises :class:`ProfileFormatError`, naming the file, the place
        and the remedy.
        """
        remedy = "; profile again, or read it with the version that wrote it"
        try:
            raw = Path(path).read_bytes()
            data = json.loads((gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode())
        except (ValueError, RecursionError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ProfileFormatError(f"{path}: not JSON ({error}){remedy}") from error
        try:
            return cls.from_json(data)
        except ProfileFormatError as error:
            raise ProfileFormatError(f"{path}: {error}{remedy}") from error

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """The profile that :meth:`to_json` gave. Raises :class:`ProfileFormatError`, naming the place."""
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            found = data.get("schema_version") if isinstance(data, dict) else None
            raise ProfileFormatError(f"schema_version: expected {SCHEMA_VERSION}, got {found!r}")
        try:
            place = "launches"
            launches = tuple(Launch(**{**item, "nodes": tuple(item["nodes"])}) for item in data["launches"])
            place = "kernels"
            kernels = _frame_of(data["kernels"], KERNEL_COLUMNS)
            if (kernels["duration_ns"] < 0).any():
                raise ValueError(f"row {(kernels['duration_ns'] < 0).argmax()}: duration_ns is negative")
            place = "nodes"
            nodes = _frame_of(data["nodes"], NODE_COLUMNS)
            place = "header"
            environment, iterations, wall, notes = header_of(data)
            sources = restored(data.get("sources"))
            return cls(kernels, nodes, environment, iterations, wall, launches, notes, sources)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ProfileFormatError(f"{place}: {type(error).__name__}: {error}") from error


def _info(row: Mapping[Any, Any]) -> NodeInfo:
    def known(value: float) -> float | None:
        return None if math.isnan(value) else value

    return NodeInfo(
        name=row["node"],
        op="call_function",
        target=row["target"],
        dtype=row["dtype"],
        module_path=row["module_path"],
        file=row["file"],
        line=int(row["line"]),
        flops=known(row["flops"]),
        bytes=known(row["bytes"]),
    )


def header_of(data: Mapping[str, Any]) -> tuple[dict[str, Any], int, float, tuple[str, ...]]:
    """(environment, iterations, wall_ns, notes) of a file's header. Raises KeyError, TypeError, ValueError or
    OverflowError where one is absent or nonsense.
    """
    environment, iterations, notes = data["environment"], data["iterations"], data["notes"]
    if not isinstance(environment, dict):
        raise TypeError(f"environment: expected an object, got {environment!r:.80}")
    if type(iterations) is not int or iterations < 1:
        raise ValueError(f"iterations: expected an integer of 1 or more, got {iterations!r:.80}")
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise TypeError(f"notes: expected a list of texts, got {notes!r:.80}")
    wall = math.nan if data["wall_ns"] is None else float(data["wall_ns"])
    return environment, iterations, wall, tuple(notes)


def _table(data: pd.DataFrame) -> dict[str, Any]:
    rows = [[plain(value) for value in row] for row in data.astype(object).itertuples(index=False, name=None)]
    return {"columns": plain(list(data.columns)), "dtypes": [str(dtype) for dtype in data.dtypes], "rows": rows}


def _frame_of(table: Mapping[str, Any], columns: Mapping[str, str]) -> pd.DataFrame:
    missing = set(columns) - set(table["columns"])
    if missing:
        raise KeyError(f"column {sorted(missing)[0]!r}")
    records = [dict(zip(table["columns"], _tuples(row), strict=True)) for row in table["rows"]]
    known = dict(zip(table["columns"], table["dtypes"], strict=True)) if "dtypes" in table else {}
    extra = {
        name: _restored(known[name]) if known else "float64" if _numeric(records, name) else "object"
        for name in table["columns"]
        if name not in columns
    }
    return frame(records, {**columns, **extra})


def _restored(dtype: str) -> str:
    """The dtype of a column that a caller added: that of numbers, truths and texts, else what JSON gives."""
    return dtype if re.fullmatch(r"bool(ean)?|[uU]?[iI]nt\d+|[fF]loat\d+|str(ing)?", dtype) else "object"


def _numeric(records: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = [record[name] for record in records]
    return all(value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)) for value in values)


def _tuples(row: Iterable[Any]) -> list[Any]:
    return [tuple(value) if isinstance(value, list) else value for value in row]
