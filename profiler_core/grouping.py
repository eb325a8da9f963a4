"""A profile summed up by operator, node, source line, module, layer class or any other column."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from profiler_core import aggregate, counters
from profiler_core.collect.provenance import NodeInfo

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from profiler_core.profiles import Profile

# What is asked of a node; everything else is a column of the kernels.
_OF_NODES = ("node", "target", "module_path", "module_class", "file", "line", "layer_class")
_RESULTS = ("time_ns", "share", "kernels")


def by(profile: Profile, column: str) -> pd.DataFrame:
    """Time, kernels and counters of the window by the values of ``column``, longest first.

    ``column`` is one of ``profile.kernels`` (operator, top_operator, name, family, stream, ...) or, of the nodes,
    "node", "target", "module_path", "module_class", "file", "line" (``file:line``) or "layer_class"; where there are
    several graphs, a node is named with its own: "mm (0/1)". Columns: the value, ``time_ns`` (per call), ``share`` (of
    all kernel time), ``kernels`` (per call, a part of one for each node of a fused kernel), then the counters and
    ``counter_coverage``. Time of a fused kernel is shared among its nodes by the bytes that each would move; counters
    that are sums are shared in the same way, rates are weighted by it. Kernels without nodes are "" there, and a value
    that is missing is one of its own, so that the times always sum to the total; a list counts as the tuple. Raises
    KeyError, naming the columns there are, TypeError for more than one column, and ValueError for one of sets, dicts or
    arrays, or with the name of a column of the result.
    """
    import pandas as pd

    window = profile.window
    kernel, group, part = _by_column(profile, window, column)
    table = _summed(profile, window, kernel, group, part).drop(columns=column, errors="ignore")
    values = pd.Series(table.index.to_numpy(), index=table.index, dtype=object)
    if not any(isinstance(value, str) for value in table.index):  # pandas' own text cannot hold a lone surrogate
        values = values.infer_objects()
    table.insert(0, column, values)
    return table.sort_values("time_ns", ascending=False, ignore_index=True)


def per_call(profile: Profile, column: str) -> pd.DataFrame:
    """Time of each measured call, ns, by the values of ``column`` as :func:`by` has them: a row a value, which is the
    index, and a column for each of the ``iterations``. Raises what :func:`by` does.
    """
    import numpy as np
    import pandas as pd

    window = profile.window
    kernel, group, part = _by_column(profile, window, column)
    codes, keys = pd.factorize(group, use_na_sentinel=False)
    time = window["duration_ns"].to_numpy(dtype="float64")[kernel] * part
    numbers, call = np.unique(window["iteration"].to_numpy(dtype="int64"), return_inverse=True)
    # A call in which no kernel ran has no number, but counts.
    sums = np.zeros((len(keys), max(profile.iterations, len(numbers))))
    np.add.at(sums, (codes, call[kernel]), time)
    return pd.DataFrame(sums, index=pd.Index(list(keys), dtype=object, tupleize_cols=False))


def _by_column(profile: Profile, window: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(kernel, value of ``column``, part of the kernel), as :func:`_node_parts` has them."""
    import numpy as np

    if not isinstance(column, Hashable):
        raise TypeError(f"by() takes the name of one column, not a {type(column).__name__}: call it once for each")
    of_nodes = [name for name in _OF_NODES if name in profile.nodes]
    if column in of_nodes:
        return _node_parts(profile, window, column)
    if column in window.columns:
        if column in _RESULTS:
            raise ValueError(f"column {column!r} has the name of a column of the result: rename it, then group by that")
        group = np.empty(len(window), dtype=object)
        group[:] = [_key(value, column) for value in window[column].to_numpy(dtype=object)]
        return np.arange(len(window)), group, np.ones(len(window))
    raise KeyError(f"no column {column!r}; there are {', '.join((*of_nodes, *window.columns))}")


def _key(value: object, column: str) -> Hashable:
    """A value to group by: lists as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(_key(item, column) for item in value)
    try:
        hash(value)
    except TypeError:
        kind = type(value).__name__
        raise ValueError(f"column {column!r}: cannot group by a {kind}: make it a text or a tuple") from None
    return value


def with_node_counters(profile: Profile) -> pd.DataFrame:
    """``profile.nodes`` with the counters of each node's kernels: a fused kernel's sums are shared as its time is."""
    window = profile.window
    kernel, group, part = _node_parts(profile, window, "node", qualified=True)
    table = _summed(profile, window, kernel, group, part)
    index = list(zip(profile.nodes["graph"], profile.nodes["node"], strict=True))
    added = table.drop(columns=["time_ns", "share", "kernels"]).reindex(index)
    nodes = profile.nodes.drop(columns=[name for name in added.columns if name in profile.nodes])
    return nodes.join(added.set_axis(nodes.index))


def launch_counters(profile: Profile) -> pd.DataFrame:
    """The counters of each launch, indexed by (graph, launch key), per call."""
    import numpy as np

    window = profile.window
    inside = window[window["launch"] != ""]
    group = np.empty(len(inside), dtype=object)
    group[:] = list(zip(inside["graph"], inside["launch"], strict=True))
    return _summed(profile, inside, np.arange(len(inside)), group, np.ones(len(inside)))


def _summed(
    profile: Profile, window: pd.DataFrame, kernel: np.ndarray, group: np.ndarray, part: np.ndarray
) -> pd.DataFrame:
    """Time, share, kernels and counters per group, indexed by it in order of first appearance."""
    import pandas as pd

    time = window["duration_ns"].to_numpy(dtype="float64")[kernel] * part
    codes, keys = pd.factorize(group, use_na_sentinel=False)
    count, total = len(keys), profile.total_ns

    def summed(values: np.ndarray) -> np.ndarray:
        import numpy as np

        return np.bincount(codes, weights=values, minlength=count)

    index = pd.Index(list(keys), dtype=object, tupleize_cols=False)
    of_group = summed(time)
    table = pd.DataFrame(
        {
            "time_ns": of_group / profile.iterations,
            "share": of_group / total if total else of_group,
            "kernels": summed(part) / profile.iterations,
        },
        index=index,
    )
    values = _counters(window)
    if values is None:
        return table
    values = values.iloc[kernel].reset_index(drop=True)
    sums = [c.key for c in counters.COUNTERS if c.aggregation == "sum" and c.key in values]
    values[sums] = values[sums].mul(part, axis=0)
    of_code = counters.aggregate(values, time, codes.tolist()).reindex(range(count))
    table = table.join(of_code.set_axis(index))
    table[sums] /= profile.iterations
    return table


def _counters(window: pd.DataFrame) -> pd.DataFrame | None:
    if "counters" not in window:
        return None
    present = [counter.key for counter in counters.COUNTERS if counter.key in window]
    return window[present].astype("float64")


def _node_parts(
    profile: Profile, window: pd.DataFrame, column: str, *, qualified: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(kernel, value of ``column``, part of the kernel): one entry per kernel and node of it; parts of a kernel sum
    to 1. ``qualified``: values are (graph, value).
    """
    import numpy as np

    info = {(row["graph"], row["node"]): row for row in profile.nodes.to_dict("records")}
    several = not qualified and len({graph for graph, _ in info} - {""}) > 1
    cache: dict[tuple[str, tuple[str, ...]], list[tuple[object, float]]] = {}

    def parts(graph: str, nodes: tuple[str, ...]) -> list[tuple[object, float]]:
        rows = [info[graph, name] for name in nodes if (graph, name) in info]
        if not rows:
            return [((graph, "") if qualified else "", 1.0)]
        models = [NodeInfo(row["node"], "", "", bytes=None if np.isnan(row["bytes"]) else row["bytes"]) for row in rows]
        weights = np.array(aggregate.weights(models))
        weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(rows), 1 / len(rows))
        found: dict[object, float] = {}
        for row, weight in zip(rows, weights.tolist(), strict=True):
            value = f"{row['file']}:{row['line']}" if column == "line" and row["file"] else row[column]
            if column == "node" and several and row["graph"]:  # each graph has its own "mm"
                value = f"{row['node']} ({row['graph']})"
            value = "" if column == "line" and not row["file"] else value
            value = (row["graph"], value) if qualified else _key(value, column)
            found[value] = found.get(value, 0.0) + weight
        return [(value, weight) for value, weight in found.items() if weight > 0]

    kernel, group, part = [], [], []
    graphs, node_lists = window["graph"].tolist(), window["nodes"].tolist()
    for i, key in enumerate(zip(graphs, node_lists, strict=True)):
        if key not in cache:
            cache[key] = parts(*key)
        for value, weight in cache[key]:
            kernel.append(i)
            group.append(value)
            part.append(weight)
    groups = np.empty(len(group), dtype=object)
    groups[:] = group
    return np.array(kernel, dtype="int64"), groups, np.array(part)
