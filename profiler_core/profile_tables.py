"""Builds the frames of a :class:`profiler_core.profiles.Profile` from what attribution found, column by column."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_core.aggregate import node_rows
from profiler_core.families import classify, opaque_operator
from profiler_core.profiles import KERNEL_COLUMNS, NODE_COLUMNS, frame
from profiler_core.range_names import is_generated, line_of, module_of

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from profiler_core.attribute.eager_models import NodeModel
    from profiler_core.attribute.engine import _Attributed
    from profiler_core.attribute.rows import Rows
    from profiler_core.collect.provenance import Provenance
    from profiler_core.trace import Trace


def kernel_frame(
    trace: Trace,
    rows: Rows,
    iteration: np.ndarray,
    found: _Attributed,
    provenances: Sequence[Provenance],
    environment: Mapping[str, Any],
    places: dict[str, Place],
) -> pd.DataFrame:
    """The frame ``Profile.kernels``. Into ``places`` goes where each node outside of the graphs was called."""
    import numpy as np
    import pandas as pd

    kernels, ranges = rows.kernels, rows.ranges
    operator = ranges.name(ranges.at(ranges.operator, rows.range))
    top = ranges.name(ranges.at(ranges.top_operator, rows.range))
    # A replay has no operator of its own: its launch stands for all of it, and is named once.
    bare = rows.replay & (operator == "") & (rows.call >= 0)
    # nsys adds the version of the API: cudaGraphLaunch_v10000
    operator[bare] = [re.sub(r"_v\d+$", "", name) for name in trace.calls["name"].to_numpy()[rows.call[bare]]]
    if trace.device_type == "cpu":  # generated code has no operator around it but is one
        generated = np.array([is_generated(name) for name in kernels["name"]], dtype=bool) & (operator == "")
        operator[generated] = kernels["name"].to_numpy()[generated]
        bare |= generated
    top[bare] = operator[bare]
    top = np.where(top == "", operator, top)  # an operator around a graph's call, in which there is none
    codes, names = pd.factorize(kernels["name"])
    family = [classify(name) for name in names]

    def of_family(attribute: str, dtype: Any) -> np.ndarray:
        return np.array([getattr(item, attribute) for item in family], dtype=dtype)[codes]

    shared = kernels["shared_static"].to_numpy(), kernels["shared_dynamic"].to_numpy()
    data: dict[str, Any] = {
        "name": kernels["name"].to_numpy(),
        "kind": kernels["kind"].to_numpy(),
        "process": kernels["process"].to_numpy(),
        "device": _devices(trace, kernels),
        "stream": _nullable(kernels["stream"], -1),
        "start_ns": kernels["start_ns"].to_numpy(),
        "duration_ns": kernels["duration_ns"].to_numpy(),
        "thread": _nullable(rows.thread, -1),
        "launch_ns": _nullable(rows.launch_ns, -1),
        "grid": _triples(kernels, "grid"),
        "block": _triples(kernels, "block"),
        "registers": _nullable(kernels["registers"], -1),
        "shared_memory": _nullable(np.where(shared[1] < 0, shared[0], shared[1] + np.maximum(shared[0], 0)), -1),
        "correlation": _nullable(kernels["correlation"], 0),
        "iteration": iteration,
        "operator": operator,
        "top_operator": top,
        "operator_method": np.where(operator == "", "none", np.where(bare & rows.replay, "correlation", rows.method)),
        "graph": np.array([*(p.graph for p in provenances), ""], dtype=object)[found.graph],
        "launch": found.launch,
        "nodes": _nodes(found, _eager_names(rows, top, found, places), provenances),
        "method": found.method,
        "confidence": found.confidence,
        "reason": found.reason,
        "evidence": found.evidence,
        "family": of_family("family", object),
        "precision": of_family("precision", object),
        "opaque": of_family("opaque", bool),
    }
    if trace.device_type == "cpu":
        # An operator is the kernel, and a library's may be called anywhere inside it.
        hides = np.array([bool(opaque_operator(name)) for name in ranges.names], dtype=bool)
        hidden = ranges.top_operator[hides[ranges.codes]] if len(hides) else np.empty(0, dtype="int64")
        data["opaque"] = np.isin(ranges.at(ranges.top_operator, rows.range), hidden[hidden >= 0])
    data["spans"] = _spans(trace, rows)
    data |= _occupancy(kernels, data["shared_memory"], environment)
    typed = {name: pd.Series(data[name], dtype=dtype) for name, dtype in KERNEL_COLUMNS.items()}
    return pd.DataFrame(typed)


def _occupancy(kernels: pd.DataFrame, shared_memory: Any, environment: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Occupancy from the launch record, where the device's limits are known."""
    import numpy as np

    from profiler_core import occupancy

    count = len(kernels)
    unknown = {
        "theoretical_occupancy": np.full(count, np.nan),
        "occupancy_limiter": np.full(count, "", dtype=object),
        "waves_per_sm": np.full(count, np.nan),
    }
    capability, sms = environment.get("capability"), environment.get("sm_count")
    if not capability or not sms or not count:
        return unknown
    try:
        limits = occupancy.sm_limits((int(capability[0]), int(capability[1])))
    except occupancy.UnknownCapability:
        return unknown

    def product(name: str) -> np.ndarray:
        return np.prod([kernels[f"{name}_{axis}"].to_numpy(dtype="float64") for axis in "xyz"], axis=0)

    registers = kernels["registers"].to_numpy()
    found = occupancy.theoretical_occupancy(
        registers, shared_memory.to_numpy(dtype="float64", na_value=-1), product("block"), limits
    )
    return {
        "theoretical_occupancy": found.percent,
        "occupancy_limiter": found.limiter,
        "waves_per_sm": occupancy.waves_per_sm(product("grid"), found.blocks_per_sm, int(sms)),
    }


_SPANS_IN_FULL = 2_000  # above it only the innermost is kept: thousands may be open at once, around a million kernels


def _spans(trace: Trace, rows: Rows) -> np.ndarray:
    """Names of the NVTX start/end ranges that were open in the process when each kernel was launched, innermost first.

    They overlap as they like, which is a question for an interval tree. It is asked once for each stretch of time
    between two of their ends or starts, and not for each kernel.
    """
    import numpy as np

    from profiler_core.attribute import enclosure

    spans = np.empty(len(rows), dtype=object)
    spans[:] = [()] * len(rows)
    ranges = trace.ranges[trace.ranges["category"] == "span"]
    process = rows.kernels["process"].to_numpy()
    names = ranges["name"].to_numpy()
    for number in np.unique(ranges["process"]).tolist():
        mine = (ranges["process"] == number).to_numpy()
        start, end = (ranges[name].to_numpy()[mine] for name in ("start_ns", "end_ns"))
        cuts = np.unique(np.concatenate([start, end]))
        asked = np.flatnonzero((process == number) & (rows.launch_ns >= cuts[0]))
        if not len(asked):
            continue
        stretch = np.searchsorted(cuts, rows.launch_ns[asked], side="right") - 1
        one = np.zeros(len(start), dtype="int64"), np.zeros(len(cuts), dtype="int64")
        if len(start) <= _SPANS_IN_FULL:
            found = enclosure.all_enclosing(start, end, one[0], cuts, one[1])
        else:
            innermost = enclosure.enclosing(start, end, one[0], cuts, one[1])
            found = [(row,) if row >= 0 else () for row in innermost.tolist()]
        open_then = np.empty(len(cuts), dtype=object)
        own = names[mine].tolist()
        open_then[:] = [tuple(own[row] for row in open_rows) for open_rows in found]
        spans[asked] = open_then[stretch]
    return spans


@dataclass(frozen=True)
class Place:
    """Where an operator outside of the graphs was called, as far as the trace has ranges that say so."""

    operator: str
    module_path: str = ""
    module_class: str = ""
    file: str = ""
    line: int = 0
    backward: bool = False

    @property
    def node(self) -> str:
        """A name of its own: "aten::linear", or "aten::linear@h.0.mlp:12 backward"."""
        where = self.module_path or (Path(self.file).name if self.file else self.module_class)
        text = self.operator + (f"@{where}" if where else "") + (f":{self.line}" if self.line else "")
        return f"{text} backward" if self.backward else text


def _eager_names(rows: Rows, top: np.ndarray, found: _Attributed, places: dict[str, Place]) -> np.ndarray:
    """The node of each kernel outside of the graphs: its outermost operator, apart for each module and source line."""
    import numpy as np

    ranges, around = rows.ranges, rows.range
    module, line = ranges.at(ranges.module, around), ranges.at(ranges.line, around)
    known = np.flatnonzero(found.eager & ((module >= 0) | (line >= 0)))
    if not len(known):
        return top
    names = top.copy()
    keys = zip(
        top[known].tolist(),
        ranges.name(module[known]).tolist(),
        ranges.name(line[known]).tolist(),
        ranges.backward[around[known]].tolist(),
        strict=True,
    )
    made: dict[tuple[str, str, str, bool], str] = {}
    for i, key in zip(known.tolist(), keys, strict=True):
        if key not in made:
            operator, of_module, of_line, backward = key
            place = Place(operator, *module_of(of_module), *line_of(of_line), backward)
            name, number = place.node, 1
            while places.get(name, place) != place:  # two files of one name, say
                number += 1
                name = f"{place.node} #{number}"
            places[name] = place
            made[key] = name
        names[i] = made[key]
    return names


def node_frame(
    kernels: pd.DataFrame,
    provenances: Sequence[Provenance],
    iterations: int,
    places: Mapping[str, Place],
    models: Mapping[str, NodeModel],
) -> pd.DataFrame:
    """The frame ``Profile.nodes``: the operators of every graph, then the operators outside of all graphs, of which
    ``models`` has the work.
    """
    inside = kernels[(kernels["method"] != "none") & (kernels["iteration"] >= 0)]
    of_graph = inside[inside["launch"] != ""]
    grouped = of_graph.groupby(["graph", "launch"], sort=False)
    time, count = grouped["duration_ns"].sum().to_dict(), grouped["duration_ns"].count().to_dict()
    opaque = grouped["opaque"].any().to_dict()
    total = int(kernels.loc[kernels["iteration"] >= 0, "duration_ns"].sum())
    records: list[dict[str, Any]] = []
    for provenance in provenances:
        mine = {launch: ns for (graph, launch), ns in time.items() if graph == provenance.graph}
        ran = {launch: n for (graph, launch), n in count.items() if graph == provenance.graph}
        hidden = {launch for (graph, launch), flag in opaque.items() if graph == provenance.graph and flag}
        for record in node_rows(provenance, mine, ran, iterations):
            share = record["window_ns"] / total if total else 0.0
            is_opaque = record["window_ns"] > 0 and any(key in hidden for key in record["launches"])
            records.append({**record, "graph": provenance.graph, "kind": "node", "share": share, "opaque": is_opaque})
    eager = inside[inside["launch"] == ""]
    if len(eager):
        records += _eager_nodes(eager, total, iterations, places, models)
    return frame(records, NODE_COLUMNS)


def _eager_nodes(
    eager: pd.DataFrame, total: int, iterations: int, places: Mapping[str, Place], models: Mapping[str, NodeModel]
) -> list[dict[str, Any]]:
    """One node per operator outside of every graph, and place where it is called, with the full time of its kernels."""
    records = []
    for node, rows in eager.groupby(eager["nodes"].str[0], sort=False):
        place = places.get(str(node)) or Place(str(node))
        operator = place.operator
        model = models.get(str(node))
        time = int(rows["duration_ns"].sum())
        called = {str(name) for name in rows["operator"]} | {operator}
        records.append(
            {
                "graph": "",
                "node": node,
                "kind": "operator",
                "target": operator,
                "shape": model.shape if model else None,
                "dtype": model.dtype if model else None,
                "module_path": place.module_path,
                "module_class": place.module_class,
                "file": place.file,
                "line": place.line,
                "source": linecache.getline(place.file, place.line).strip() if place.file else "",
                "pre_grad": (),
                "kernels": round(len(rows) / iterations),
                "time_ns": time / iterations,
                "group_time_ns": time / iterations,
                "window_ns": time,
                "share": time / total if total else 0.0,
                "estimate": False,
                "fused_with": (),
                "flops": model.flops if model else None,
                "bytes": model.bytes if model else None,
                "launches": (),
                "opaque": any(opaque_operator(name) for name in called) or bool(rows["opaque"].any()),
            }
        )
    return records


def _nodes(found: _Attributed, top: np.ndarray, provenances: Sequence[Provenance]) -> np.ndarray:
    import numpy as np
    import pandas as pd

    nodes = np.full(len(top), None, dtype=object)
    table: dict[tuple[int, str], tuple[str, ...]] = {
        (number, launch.key): launch.nodes for number, p in enumerate(provenances) for launch in p.launches
    }
    held = np.flatnonzero(found.graph >= 0)
    for i, graph, key in zip(held.tolist(), found.graph[held].tolist(), found.launch[held].tolist(), strict=True):
        nodes[i] = table[graph, key]
    codes, names = pd.factorize(top)
    alone = np.full(len(names) + 1, None, dtype=object)
    for code, name in enumerate(names):
        alone[code] = (name,)
    alone[-1] = ()
    empty = np.array([value is None for value in nodes], dtype=bool)
    nodes[empty] = alone[np.where(found.eager[empty], codes[empty], -1)]
    return nodes


def _devices(trace: Trace, kernels: pd.DataFrame) -> np.ndarray:
    import numpy as np

    if trace.device_type == "cpu":
        return np.full(len(kernels), "cpu", dtype=object)
    index, codes = np.unique(kernels["device"].to_numpy(), return_inverse=True)
    names = np.array([f"{trace.device_type}:{i}" if i >= 0 else trace.device_type for i in index], dtype=object)
    return names[codes] if len(names) else np.empty(0, dtype=object)


def _nullable(values: Any, missing: int) -> Any:
    """A nullable integer array in which ``missing`` is NA."""
    import numpy as np
    import pandas as pd

    array = np.asarray(values, dtype="int64")
    return pd.arrays.IntegerArray(array.copy(), array == missing)


def _triples(kernels: pd.DataFrame, name: str) -> np.ndarray:
    """(x, y, z) tuples, None where x is 0; equal ones are one object."""
    import numpy as np
    import pandas as pd

    axes = [pd.factorize(kernels[f"{name}_{axis}"]) for axis in "xyz"]
    packed = np.zeros(len(kernels), dtype="int64")
    for axis_codes, values in axes:
        packed = packed * max(len(values), 1) + axis_codes
    index, representative, inverse = np.unique(packed, return_index=True, return_inverse=True)
    shapes = np.empty(len(index), dtype=object)
    for place, row in enumerate(representative.tolist()):
        shape = tuple(int(values[axis_codes[row]]) for axis_codes, values in axes)
        shapes[place] = shape if shape[0] else None
    return shapes[inverse]
