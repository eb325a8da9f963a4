"""What every source of timings is read into: kernels, API calls and ranges as columns, in integer nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

ITERATION_PREFIX = "fxopt::iteration#"
RANGE_PREFIX = "fxopt::"
LONGEST_NS = 2**53  # 104 days: anything longer is damage, and a thousand of them overflow a total
COMPILED_GRAPH_PREFIX = "## Call CompiledFxGraph"  # the annotation that Inductor puts around a compiled graph

# Sizes of a launch, 0 where not known.
SHAPE_COLUMNS: dict[str, tuple[str, Any]] = {
    f"{part}_{axis}": ("int32", 0) for part in ("grid", "block") for axis in "xyz"
}
# Column -> (dtype, what stands there where the source does not say). -1 and 0 are used rather than NaN so that a
# million rows stay integers; 0 is no correlation id, no external id and no graph node in every tool read here.
KERNEL_COLUMNS: dict[str, tuple[str, Any]] = {
    "name": ("object", ""),  # as the tool spells it
    "kind": ("object", "kernel"),  # kernel | memcpy | memset
    "process": ("int64", 0),
    "device": ("int64", -1),
    "stream": ("int64", -1),
    "start_ns": ("int64", 0),
    "duration_ns": ("int64", 0),
    "correlation": ("int64", 0),
    "external_id": ("int64", 0),
    "graph": ("int64", 0),  # id of the (executable) CUDA graph that launched it
    "graph_node": ("int64", 0),
    **SHAPE_COLUMNS,
    "registers": ("int32", -1),  # per thread
    "shared_static": ("int64", -1),  # bytes per block
    "shared_dynamic": ("int64", -1),  # bytes per block; where only the sum is known, the sum
    "local_per_thread": ("int64", -1),  # bytes
    "bytes": ("int64", -1),  # moved by a memcpy or memset
}
CALL_COLUMNS: dict[str, tuple[str, Any]] = {
    "name": ("object", ""),
    "process": ("int64", 0),
    "thread": ("int64", -1),
    "start_ns": ("int64", 0),
    "end_ns": ("int64", 0),
    "correlation": ("int64", 0),
    "external_id": ("int64", 0),
}
RANGE_COLUMNS: dict[str, tuple[str, Any]] = {
    "name": ("object", ""),
    # op: an operator or another event of the framework's (properly nested on its thread); annotation:
    # record_function or NVTX push/pop by the user; span: NVTX start/end, which may overlap anything and end on
    # another thread; device: an annotation projected onto a device's stream (`thread` is -1)
    "category": ("object", "op"),
    "process": ("int64", 0),
    "thread": ("int64", -1),
    "start_ns": ("int64", 0),
    "end_ns": ("int64", 0),
    "external_id": ("int64", 0),
    "sequence": ("int64", -1),  # autograd's sequence number, which a backward operator shares with its forward
    "device": ("int64", -1),
    "stream": ("int64", -1),
    "inputs": ("int64", -1),  # the number of what the operator was given in ``Trace.inputs``, where it was recorded
}
# Where a kernel node of a CUDA graph was recorded: `process`, `thread` and `time_ns` of the capture.
CAPTURE_COLUMNS: dict[str, tuple[str, Any]] = {
    "process": ("int64", 0),
    "thread": ("int64", -1),
    "time_ns": ("int64", 0),
    "graph": ("int64", 0),
    "graph_node": ("int64", 0),
    "original_graph": ("int64", 0),  # 0 where the node was not cloned
    "original_node": ("int64", 0),
}


class TraceError(ValueError):
    """A file cannot be read as a trace; the message names the file, the place and the remedy."""


@dataclass(frozen=True)
class OperatorInputs:
    """What an operator was given, argument by argument in the order of its schema, as ``record_shapes`` writes it.

    types: "float", "c10::BFloat16", ... of a tensor, "Scalar", "ScalarList", "TensorList", "" for None and all else.
    dims and strides: of a tensor; () for anything else, and for a tensor without dimensions. values: of a scalar or a
    list of them, as text; "" elsewhere.
    """

    types: tuple[str, ...]
    dims: tuple[tuple[Any, ...], ...]
    strides: tuple[tuple[Any, ...], ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class Op:
    """One CPU event, for building a trace by hand. ``category`` is "cpu_op", "user_annotation", "cuda_runtime" or
    "cuda_driver".
    """

    name: str
    thread: int
    start_ns: int
    end_ns: int
    correlation: int | None = None
    category: str = "cpu_op"
    external_id: int = 0


@dataclass(frozen=True)
class Kernel:
    """One piece of device activity, for building a trace by hand. ``shared_memory`` is bytes per block."""

    name: str
    device: int
    stream: int
    start_ns: int
    duration_ns: int
    correlation: int | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = None
    shared_memory: int | None = None
    external_id: int = 0


@dataclass
class Trace:
    """One window of execution as a tool saw it.

    The frames have the columns of this module's ``*_COLUMNS``, in order of start, with a fresh index 0..n-1.
    Times are ns on one clock. ``device_type`` says whose activity counts as kernels: "cuda" (AMD's too, as in
    torch) or "cpu", where operators are the kernels. ``wall_ns`` holds one value per iteration, taken without the
    profiler. ``meta`` holds what is known of the run: "source" (kineto, nsys), "path", "tool", "devices" (index ->
    name, capability, sm_count and other limits), "rank", "world_size". ``partial`` is non-empty where a part of the
    file was lost, and says which. ``inputs`` holds what operators were given, each kind of call once.
    """

    kernels: pd.DataFrame
    calls: pd.DataFrame
    ranges: pd.DataFrame
    captures: pd.DataFrame
    iterations: int = 0
    wall_ns: tuple[float, ...] = ()
    device_type: str = "cuda"
    meta: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    inputs: tuple[OperatorInputs, ...] = ()

    @classmethod
    def build(
        cls,
        *,
        kernels: Mapping[str, Any] | None = None,
        calls: Mapping[str, Any] | None = None,
        ranges: Mapping[str, Any] | None = None,
        captures: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> Trace:
        """A trace from columns (arrays or lists, all of one table of one length); columns left out get their
        default, rows are put in order of start.
        """
        return cls(
            kernels=table(kernels or {}, KERNEL_COLUMNS, "start_ns"),
            calls=table(calls or {}, CALL_COLUMNS, "start_ns"),
            ranges=table(ranges or {}, RANGE_COLUMNS, "start_ns"),
            captures=table(captures or {}, CAPTURE_COLUMNS, "time_ns"),
            **rest,
        )

    @classmethod
    def of(cls, ops: Iterable[Op], kernels: Iterable[Kernel], **rest: Any) -> Trace:
        """A trace from single events."""
        events = list(ops)
        apis = [op for op in events if op.category in ("cuda_runtime", "cuda_driver")]
        rows = [op for op in events if op.category not in ("cuda_runtime", "cuda_driver")]
        activity = list(kernels)
        return cls.build(
            kernels={
                "name": [k.name for k in activity],
                "device": [k.device for k in activity],
                "stream": [k.stream for k in activity],
                "start_ns": [k.start_ns for k in activity],
                "duration_ns": [k.duration_ns for k in activity],
                "correlation": [k.correlation or 0 for k in activity],
                "external_id": [k.external_id for k in activity],
                **{f"grid_{axis}": [(k.grid or (0, 0, 0))[i] for k in activity] for i, axis in enumerate("xyz")},
                **{f"block_{axis}": [(k.block or (0, 0, 0))[i] for k in activity] for i, axis in enumerate("xyz")},
                "registers": [-1 if k.registers is None else k.registers for k in activity],
                "shared_dynamic": [-1 if k.shared_memory is None else k.shared_memory for k in activity],
            },
            calls={
                "name": [op.name for op in apis],
                "thread": [op.thread for op in apis],
                "start_ns": [op.start_ns for op in apis],
                "end_ns": [op.end_ns for op in apis],
                "correlation": [op.correlation or 0 for op in apis],
                "external_id": [op.external_id for op in apis],
            },
            ranges={
                "name": [op.name for op in rows],
                "category": ["annotation" if op.category == "user_annotation" else "op" for op in rows],
                "thread": [op.thread for op in rows],
                "start_ns": [op.start_ns for op in rows],
                "end_ns": [op.end_ns for op in rows],
                "external_id": [op.external_id for op in rows],
            },
            **rest,
        )


def table(columns: Mapping[str, Any], schema: Mapping[str, tuple[str, Any]], order: str) -> pd.DataFrame:
    """A frame with exactly the columns of ``schema``, sorted (stably) by ``order``. Raises KeyError for a column
    that the schema does not have and ValueError where lengths differ.
    """
    import numpy as np
    import pandas as pd

    unknown = set(columns) - set(schema)
    if unknown:
        raise KeyError(f"unknown column {sorted(unknown)[0]!r}; the table has {', '.join(schema)}")
    lengths = {len(values) for values in columns.values()}
    if len(lengths) > 1:
        raise ValueError(f"columns of different length: { {name: len(v) for name, v in columns.items()} }")
    length = lengths.pop() if lengths else 0
    data: dict[str, Any] = {}
    for name, (dtype, default) in schema.items():
        if name in columns:
            values = columns[name]
            data[name] = np.asarray(values, dtype=dtype) if dtype != "object" else _objects(values)
        else:
            data[name] = np.full(length, default, dtype=dtype)
    # dtype=object must be said: pandas 3 would infer its own string type, which is slower here and prints apart.
    frame = pd.DataFrame({name: pd.Series(values, dtype=values.dtype) for name, values in data.items()})
    if length and not frame[order].is_monotonic_increasing:
        frame = frame.sort_values(order, kind="stable", ignore_index=True)
    return frame


def _objects(values: Sequence[Any]) -> Any:
    import numpy as np

    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
