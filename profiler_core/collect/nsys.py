"""Reads what Nsight Systems recorded: a .nsys-rep, or the SQLite that nsys exports, of any schema.

Tables and columns are made by nsys as they are needed and differ between versions, so each column is asked for, and
one that is not there gets its default. Of the file's texts only those are read that name a kernel, an API call, a
range or a GPU: the export also holds the environment of the profiled machine, tokens included, in META_DATA_CAPTURE,
TARGET_INFO_SYSTEM_ENV, PROCESSES and StringIds.

The layout is that of NVIDIA's "SQLite Export Schema Reference". A globalTid is hardware, VM, process (24 bits) and
thread (24 bits), from high to low, and a globalPid the same with thread 0; a graphNodeId is the id of the executable
graph in the upper and that of the node in the lower 32 bits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from profiler_core.collect import nsys_command
from profiler_core.collect.nsys_sqlite import EXPORT_AGAIN, STRINGS, Columns, Tables, opened
from profiler_core.quantities import duration
from profiler_core.range_names import iteration_of
from profiler_core.trace import COMPILED_GRAPH_PREFIX, KERNEL_COLUMNS, LONGEST_NS, RANGE_PREFIX, Trace, TraceError

_KERNEL, _CALL, _RANGE = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_COPY, _SET = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPH, _NODE = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "CUDA_GRAPH_NODE_EVENTS"
_GPU, _DEVICE = "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE"
_EXPORT_INFO = ("META_DATA_EXPORT", "EXPORT_META_DATA")  # the latter before schema 3.4
_CONTENTS = {_CALL: "CUDA API calls", _RANGE: "NVTX ranges", _COPY: "memory copies", _SET: "memory sets"}

_NAMES = ("demangledName", "mangledName", "shortName")  # of a kernel, the first that there is
# CUpti_ActivityMemcpyKind in the spelling of torch.profiler; 11 to 13 are nsys's own, for unified memory.
_COPIES = (
    *("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    *("HtoD (unified)", "DtoH (unified)", "DtoD (unified)"),
)
# TARGET_INFO_GPU's columns -> keys of a device in Trace.meta
_DEVICE_COLUMNS = {
    "name": "name",
    "chipName": "chip",
    "totalMemory": "memory_bytes",
    "smCount": "sm_count",
    "threadsPerWarp": "warp_size",
    "maxThreadsPerBlock": "max_threads_per_block",
    "maxBlocksPerSm": "max_blocks_per_sm",
    "maxRegistersPerBlock": "regs_per_block",
    "maxRegistersPerSm": "regs_per_sm",
    "maxShmemPerBlock": "shared_per_block",
    "maxShmemPerBlockOptin": "shared_per_block_optin",
    "maxShmemPerSm": "shared_per_sm",
}
_RECORD = "nsys profile -s none --cpuctxsw=none -t cuda,nvtx --cuda-graph-trace=node"


def read(path: str | Path) -> Trace:
    """The trace in an SQLite export of nsys (any schema), or in a .nsys-rep, which ``nsys export`` turns into one
    first, in a temporary folder.

    Kernels, copies and sets are in ``kernels``; runtime and driver calls, in nsys's spelling
    ("cudaLaunchKernel_v7000"), in ``calls``. NVTX push/pop ranges are "op" where their text is one of torch's
    ``emit_nvtx`` (what it appends, "``, seq = 5, op_id = 7``", is cut off, seq goes to ``sequence``), but
    "annotation" where they are the user's, this package's or Inductor's own record_function; start/end ranges are
    "span". ``captures`` has one row a node: of the two events that nsys writes when it clones a graph, the one that
    names the original. Rows of processes are told apart by ``process``, the pid.

    ``partial`` says what a capture of whole CUDA graphs hides. Raises TraceError for a file that is not such an
    export, is damaged, locked or incomplete, or holds no kernels because nothing recorded them.
    """
    path = Path(path)
    if path.suffix in (".nsys-rep", ".qdrep"):
        if not path.is_file():
            raise TraceError(f"{path}: there is no such file.")
        with tempfile.TemporaryDirectory(prefix="nsys-export-") as folder:
            try:
                exported = nsys_command.export(path, Path(folder) / "report.sqlite")
            except nsys_command.NsysError as error:
                raise TraceError(
                    f"{path}: cannot be exported to SQLite: {error}\nOr export it where the nsys is that recorded it: "
                    f"nsys export --type sqlite -o {path.stem}.sqlite {path.name}"
                ) from error
            with opened(exported, path) as tables:
                return _Reader(tables).trace()
    with opened(path, path) as tables:
        return _Reader(tables).trace()


class _Reader:
    """What each table of an export means; notes and losses are gathered on the way."""

    def __init__(self, tables: Tables) -> None:
        self.tables, self.path = tables, tables.path
        self.notes: list[str] = []
        self.partial: list[str] = []

    def trace(self) -> Trace:
        import numpy as np

        calls = self._calls()
        parts = [self._kernels(), self._memory(_COPY, "memcpy"), self._memory(_SET, "memset")]
        activity = {
            name: np.concatenate(
                [part[name] if name in part else np.full(len(part["start_ns"]), default) for part in parts]
            )
            for name, (_, default) in KERNEL_COLUMNS.items()
        }
        owners = np.unique(calls["process"])
        if self.tables.has(_KERNEL) and not self.tables.has(_KERNEL, "globalPid") and len(owners) == 1:
            activity["process"][:] = owners[0]
        hidden = self._hidden_graphs(activity, calls)
        if not self.tables.has(_KERNEL) and not hidden:
            there = [text for table, text in _CONTENTS.items() if self.tables.has(table)]
            raise TraceError(
                f"{self.path}: no kernels were recorded: there is no table {_KERNEL}, only "
                f"{', '.join(there) or 'nothing of CUDA or NVTX'}. Record with {_RECORD}, and let the program "
                "run work on the GPU."
            )
        if not (activity["kind"] == "kernel").any():
            self.notes.append(f"{self.path}: holds no kernels.")
        processes = np.unique(activity["process"])
        if len(processes) > 1:
            self.notes.append(f"{self.path}: work of {len(processes)} processes, kept apart by their pid.")
        ends = (activity["start_ns"] + activity["duration_ns"], calls["end_ns"])
        latest = max(int(times.max(initial=0)) for times in ends)
        trace = Trace.build(
            kernels=activity,
            calls=calls,
            ranges=self._ranges(latest),
            captures=self._captures(),
            meta={"source": "nsys", "path": str(self.path), **self._tool(), "devices": self._devices()},
        )
        annotations = trace.ranges.loc[trace.ranges["category"] != "op", "name"].unique()
        trace.iterations = len({number for name in annotations if (number := iteration_of(name)) >= 0})
        trace.notes, trace.partial = tuple(self.notes), tuple(self.partial)
        return trace

    def _kernels(self) -> Columns:
        import numpy as np

        rows = self.tables.read(
            _KERNEL,
            {
                **self._activity(_KERNEL),
                **{f"{shape}_{axis}": self.tables.value(_KERNEL, shape + axis.upper(), 0)
                   for shape in ("grid", "block") for axis in "xyz"},
                "registers": self.tables.value(_KERNEL, "registersPerThread", -1),
                "shared_static": self.tables.value(_KERNEL, "staticSharedMemory", -1),
                "shared_dynamic": self.tables.value(_KERNEL, "dynamicSharedMemory", -1),
                "local_per_thread": self.tables.value(_KERNEL, "localMemoryPerThread", -1),
                **{name: self.tables.value(_KERNEL, name, -1) for name in _NAMES},
            },
            required=("start", "end"),
        )  # fmt: skip
        names = [self.tables.texts(_KERNEL, name, rows.pop(name)) for name in _NAMES]
        rows["name"] = np.where(names[0] != "", names[0], np.where(names[1] != "", names[1], names[2]))
        rows["kind"] = np.full(len(rows["name"]), "kernel", dtype=object)
        nameless = int((rows["name"] == "").sum())
        if nameless:
            self.partial.append(f"{self.path}: {_KERNEL}: {nameless} kernels have no name in {STRINGS}.")
        return self._finished(_KERNEL, rows)

    def _memory(self, table: str, kind: str) -> Columns:
        """Copies and sets."""
        import numpy as np

        rows = self.tables.read(
            table,
            {
                **self._activity(table),
                "bytes": self.tables.value(table, "bytes", -1),
                "name": self.tables.value(table, "copyKind", 0),
            },
            required=("start", "end"),
        )
        texts = np.array([f"Memcpy {name}" for name in _COPIES] if kind == "memcpy" else ["Memset"], dtype=object)
        known = (rows["name"] >= 0) & (rows["name"] < len(texts))
        rows["name"] = texts[np.where(known, rows["name"], 0)]
        rows["kind"] = np.full(len(known), kind, dtype=object)
        return self._finished(table, rows)

    def _activity(self, table: str) -> dict[str, str]:
        """Where the columns that all device activity shares are found in ``table``."""
        node = self.tables.has(table, "graphNodeId")
        return {
            "process": self.tables.process(table, "globalPid"),
            "device": self.tables.value(table, "deviceId", -1),
            "stream": self.tables.value(table, "streamId", -1),
            "start_ns": 'COALESCE("start", 0)',
            "duration_ns": 'COALESCE("end" - "start", -1)',
            "correlation": self.tables.value(table, "correlationId", 0),
            "graph": 'COALESCE("graphNodeId" >> 32, 0)' if node else "0",
            "graph_node": 'COALESCE("graphNodeId" & 0xFFFFFFFF, 0)' if node else "0",
        }

    def _finished(self, table: str, rows: Columns) -> Columns:
        """``rows`` with the time 0 where the start or the end is not known, which is said."""
        lost = rows["duration_ns"] < 0
        if lost.any():
            rows["duration_ns"][lost] = 0
            self.partial.append(f"{self.path}: {table}: {int(lost.sum())} rows have no end and count as 0 ns.")
        return self._plausible(table, rows, rows["start_ns"] + rows["duration_ns"])

    def _plausible(self, table: str, rows: Columns, end: Any) -> Columns:
        """``rows`` without those that last longer than LONGEST_NS, which is said."""
        too_long = end.astype(float) - rows["start_ns"] > LONGEST_NS
        if too_long.any():
            rows = {name: values[~too_long] for name, values in rows.items()}
            self.partial.append(
                f"{self.path}: {table}: {int(too_long.sum())} rows last over 2**53 ns (104 days) and were dropped. "
                f"{EXPORT_AGAIN}"
            )
        return rows

    def _calls(self) -> Columns:
        rows = self.tables.read(
            _CALL,
            {
                "process": self.tables.process(_CALL, "globalTid"),
                "thread": self.tables.thread(_CALL, "globalTid"),
                "start_ns": self.tables.value(_CALL, "start", 0),
                "end_ns": 'COALESCE("end", "start", 0)',
                "correlation": self.tables.value(_CALL, "correlationId", 0),
                "name": self.tables.value(_CALL, "nameId", -1),
            },
            required=("start", "end"),
        )
        rows["name"] = self.tables.texts(_CALL, "nameId", rows["name"])
        return self._plausible(_CALL, rows, rows["end_ns"])

    def _ranges(self, latest: int) -> Columns:
        """NVTX ranges; one that is still open ends at the last thing in the trace, ``latest`` or later."""
        import numpy as np

        # SQLite takes the texts apart: two million of them would take Python longer than all the rest. GLOB's "[[]"
        # is a "[". emit_nvtx writes: name[, seq = N][, op_id = N][, sizes = [..]][, input_op_ids = [..]]
        suffixes = {", seq = ": "*, seq = [0-9]*", ", op_id = ": "*, op_id = [0-9]*", ", sizes = ": "*, sizes = [[]*"}
        cut = " ".join(f"WHEN full GLOB '{glob}' THEN instr(full, '{text}')" for text, glob in suffixes.items())
        inline = '"text"' if self.tables.has(_RANGE, "text") else "NULL"
        stored = f"(SELECT value FROM {STRINGS} WHERE id = textId)" if self.tables.has(_RANGE, "textId") else "NULL"
        # 59 push/pop, 60 start/end; 70 and 71 the same, imported from another format. The other types are marks and
        # the names of domains, categories, threads and devices.
        full = f"SELECT *, COALESCE({inline}, {stored}, '') AS full FROM {_RANGE} WHERE eventType IN (59, 60, 70, 71)"
        rows = self.tables.read(
            _RANGE,
            {
                "process": self.tables.process(_RANGE, "globalTid"),
                "thread": self.tables.thread(_RANGE, "globalTid"),
                "start_ns": self.tables.value(_RANGE, "start", 0),
                "end_ns": self.tables.value(_RANGE, "end", 0),
                "open": '"end" IS NULL',
                "name": "CASE WHEN cut THEN substr(full, 1, cut - 1) ELSE full END",
                "sequence": "CASE substr(full, cut, 8) WHEN ', seq = ' THEN CAST(substr(full, cut + 8) AS INTEGER) "
                "ELSE -1 END",
                "category": f"CASE WHEN eventType IN (60, 71) THEN 2 WHEN full GLOB '{RANGE_PREFIX}*' OR "
                f"full GLOB '{COMPILED_GRAPH_PREFIX}*' THEN 1 WHEN cut OR full GLOB 'aten::*' THEN 0 ELSE 1 END",
            },
            required=("start", "end", "eventType"),
            # An OFFSET keeps SQLite from working the same text out anew for each column.
            source=f"(SELECT *, CASE {cut} ELSE 0 END AS cut FROM ({full} LIMIT -1 OFFSET 0) LIMIT -1 OFFSET 0)",
            texts=("name",),
        )
        rows["category"] = np.array(["op", "annotation", "span"], dtype=object)[rows["category"]]
        still_open = rows.pop("open").astype(bool)
        if still_open.any():
            latest = max(latest, int(rows["start_ns"].max()), int(rows["end_ns"].max()))
            rows["end_ns"][still_open] = latest
            self.notes.append(
                f"{self.path}: {int(still_open.sum())} NVTX ranges have no end; they are taken to last to the end of "
                "the trace."
            )
        return self._plausible(_RANGE, rows, rows["end_ns"])

    def _captures(self) -> Columns:
        import pandas as pd

        node = '"graphNodeId"' if self.tables.has(_NODE, "graphNodeId") else "0"
        original = self.tables.value(_NODE, "originalGraphNodeId", 0)
        rows = self.tables.read(
            _NODE,
            {
                "process": self.tables.process(_NODE, "globalTid"),
                "thread": self.tables.thread(_NODE, "globalTid"),
                "time_ns": self.tables.value(_NODE, "start", 0),
                "graph": f"{node} >> 32",
                "graph_node": f"{node} & 0xFFFFFFFF",
                "original_graph": f"{original} >> 32",
                "original_node": f"{original} & 0xFFFFFFFF",
            },
            required=("start", "graphNodeId"),
        )
        # Instantiating makes two events for a node, its creation and its cloning: the latter says all.
        clone = pd.Series(rows["original_graph"] != 0)
        cloned = clone.groupby([rows[name] for name in ("process", "graph", "graph_node")]).transform("any")
        keep = (clone | ~cloned.astype(bool)).to_numpy()
        return {name: values[keep] for name, values in rows.items()}

    def _hidden_graphs(self, activity: Columns, calls: Columns) -> bool:
        """Whether replays of CUDA graphs hide their kernels, which is said in ``partial``."""
        import numpy as np
        import pandas as pd

        whole = self.tables.read(
            _GRAPH,
            {
                "process": self.tables.process(_GRAPH, "globalPid"),
                "correlation": self.tables.value(_GRAPH, "correlationId", 0),
                "time": 'COALESCE("end" - "start", 0)',
            },
            required=("start", "end"),
        )
        launches = pd.Series(calls["name"], dtype=object).str.startswith(("cudaGraphLaunch", "cuGraphLaunch"))
        seen = np.concatenate([rows["process"] << 40 | rows["correlation"] for rows in (activity, whole)])
        keys = (calls["process"] << 40 | calls["correlation"])[launches.to_numpy(dtype=bool)]
        silent = int((~np.isin(keys, seen)).sum())
        said = []
        if len(whole["time"]):
            number, time = len(whole["time"]), duration(sum(whole["time"].tolist()))
            said.append(f"{number} replays of CUDA graphs were recorded as a whole, {time} of GPU time")
        if silent:
            said.append(f"{silent} launches of CUDA graphs show nothing of what ran in them")
        if said:
            self.partial.append(
                f"{self.path}: {' and '.join(said)}: the kernels inside are not in the trace. Record with "
                f"--cuda-graph-trace=node ({_RECORD})."
            )
        return bool(said)

    def _tool(self) -> dict[str, str]:
        """Versions of nsys and of the schema. Other rows of the same table name the machine and its user."""
        found: dict[str, str] = {}
        for table in _EXPORT_INFO:
            if self.tables.has(table, "name", "value"):
                wanted = "('EXPORT_PRODUCT_VERSION', 'EXPORT_SCHEMA_VERSION')"
                found |= dict(self.tables.rows(table, f"SELECT name, value FROM {table} WHERE name IN {wanted}"))
        version = found.get("EXPORT_PRODUCT_VERSION", "")
        return {"tool": f"nsys {version}".strip(), "schema": found.get("EXPORT_SCHEMA_VERSION", "")}

    def _devices(self) -> dict[int, dict[str, Any]]:
        """The GPUs by the index that kernels carry: the program's own (TARGET_INFO_CUDA_DEVICE says which GPU that
        is), else nsys's. Of processes that number the GPUs differently, the lowest pid's numbers.
        """
        if not self.tables.has(_GPU, "id"):
            return {}
        more = ("id", "computeMajor", "computeMinor", "maxWarpsPerSm")
        chosen = [name for name in (*more, *_DEVICE_COLUMNS) if self.tables.has(_GPU, name)]
        gpus: dict[int, dict[str, Any]] = {}
        for row in self.tables.rows(_GPU, f"SELECT {', '.join(chosen)} FROM {_GPU} ORDER BY id"):
            # 0 is "not known", and what is no number, where one is due, is not known either
            texts = ("name", "chipName")
            pairs = zip(chosen, row, strict=True)
            said: dict[str, Any] = {k: v for k, v in pairs if v and isinstance(v, str if k in texts else int)}
            gpu = {key: said[column] for column, key in _DEVICE_COLUMNS.items() if column in said}
            if "computeMajor" in said:
                gpu["capability"] = (said["computeMajor"], said.get("computeMinor", 0))
            if {"maxWarpsPerSm", "threadsPerWarp"} <= set(said):
                gpu["max_threads_per_sm"] = said["maxWarpsPerSm"] * said["threadsPerWarp"]
            gpus[said.get("id", 0)] = gpu
        if not self.tables.has(_DEVICE, "gpuId", "cudaId"):
            return gpus
        order = " ORDER BY pid DESC" if self.tables.has(_DEVICE, "pid") else ""
        numbers = self.tables.rows(_DEVICE, f"SELECT cudaId, gpuId FROM {_DEVICE}{order}")
        return {cuda: gpus[gpu] for cuda, gpu in numbers if gpu in gpus} or gpus
