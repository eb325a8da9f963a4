"""Puts hardware counters beside the kernels of a profile: another run's rows, matched by name and order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from profiler_core import counters
from profiler_core.attribute.call_order import match
from profiler_core.grouping import with_node_counters
from profiler_core.profiles import KERNEL_COLUMNS
from profiler_core.trace import SHAPE_COLUMNS

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from profiler_core.collect.provenance import LaunchId
    from profiler_core.counter_table import CounterTable
    from profiler_core.profiles import Profile

# Rows without names are matched by number alone, so their times must look like the kernels' own. Two runs of one
# kernel at the same clocks differ by a few per cent; at a tenth of all kernels something else may have happened.
_TIME_FACTOR, _TIME_SHARE, _TIMED_NS = 3.0, 0.9, 3_000


def with_counters(
    profile: Profile, tables: Sequence[CounterTable], chip: str, *, only: Collection[LaunchId] | None = None
) -> Profile:
    """The profile with a column per counter in ``kernels`` and ``nodes``, and a column ``counters`` that says
    "measured" or "" for each kernel.

    A table must hold the kernels of the whole window or of one call; in the second case every call of the window gets
    its values, for every call runs the same kernels. Where sequences differ, what cannot be matched without doubt
    stays without counters, and a note says what and how many. Copies and fills have no counters. ``chip`` is CUPTI's
    name of the GPU ("GH100"). ``only``: the tables hold the kernels of these launches alone.
    """
    import numpy as np
    import pandas as pd

    kernels = profile.kernels.copy()
    values = pd.DataFrame(np.nan, index=kernels.index, columns=list(counters.FULL), dtype="float64")
    notes: list[str] = []
    for table in tables:
        found = counters.from_metrics(table, chip)
        for process, rows in _processes(table):
            index, said = _match(kernels, table, rows, only)
            notes += [f"{table.source} counters{f' (process {process})' if process else ''}: {text}" for text in said]
            held = np.flatnonzero(index >= 0)
            if len(held):
                counted = int(((kernels["kind"] == "kernel") & (kernels["iteration"] >= 0)).sum())
                matched = f"{len(np.unique(index[held]))} of {len(rows)} rows matched"
                notes.append(f"{table.source} counters: {matched}, to {len(held)} of {counted} kernels")
            taken = found.iloc[index[held]].to_numpy()
            old = values.to_numpy()[held]
            values.iloc[held] = np.where(np.isnan(old), taken, old)
            twice = int((~np.isnan(old) & ~np.isnan(taken) & (old != taken)).any(axis=1).sum())
            if twice:
                notes.append(f"{twice} kernels have counters from more than one table or process: the first were kept")
        notes += [f"{table.source} counters: {text}" for text in (*table.notes, *table.partial)]
    measured = values[[c.key for c in counters.COUNTERS if not c.launch]].notna().any(axis=1).to_numpy()
    for counter in counters.COUNTERS:
        if not counter.launch:
            kernels[counter.key] = values[counter.key].to_numpy()
            continue
        # The launch record's own value stands; a trace without one takes what the counters' tool says.
        missing = kernels[counter.key].isna() & values[counter.key].notna()
        theirs = values.loc[missing, counter.key]
        if KERNEL_COLUMNS[counter.key] == "Int64":
            theirs = theirs.round().astype("Int64")  # given in Kbyte, bytes have fractions
        kernels.loc[missing, counter.key] = theirs
    # dtype=object must be said: pandas 3 would infer its own string type
    kernels["counters"] = pd.Series(np.where(measured, "measured", ""), kernels.index, dtype=object)
    joined = replace(profile, kernels=kernels, notes=(*profile.notes, *dict.fromkeys(notes)))
    return replace(joined, nodes=with_node_counters(joined))


def carried(profile: Profile, twins: Mapping[LaunchId, LaunchId]) -> Profile:
    """The profile with the counters of each launch in ``twins`` taken from the launch that it maps to, where it has
    none of its own; its kernels say "carried" in the column ``counters``.

    The n-th kernel of a launch takes the values of the n-th of its twin's in the same call, if both ran as many and
    of the same names. Durations are never carried: each kernel has its own.
    """
    kernels = profile.kernels.copy()
    keys = [c.key for c in counters.COUNTERS if not c.launch]
    window = kernels[(kernels["iteration"] >= 0) & (kernels["kind"] == "kernel")]
    rows: dict[tuple[int, str, str], list[int]] = {}
    for row, i, graph, launch in zip(window.index, window["iteration"], window["graph"], window["launch"], strict=True):
        rows.setdefault((i, graph, launch), []).append(row)
    target: list[int] = []
    source: list[int] = []
    refused: set[LaunchId] = set()
    unmeasured: set[LaunchId] = set()
    measured = kernels["counters"] == "measured"
    for (i, graph, launch), mine in rows.items():
        twin = twins.get((graph, launch))
        if twin is None or twin == (graph, launch) or measured[mine].any():
            continue
        theirs = rows.get((i, *twin), [])
        if list(kernels.loc[mine, "name"]) != list(kernels.loc[theirs, "name"]):
            refused.add((graph, launch))
            continue
        if not measured[theirs].all():
            unmeasured.add((graph, launch))
            continue
        target += mine
        source += theirs
    kernels.loc[target, keys] = kernels.loc[source, keys].to_numpy()
    kernels.loc[target, "counters"] = "carried"
    notes = []
    if target:
        notes.append(f"counters were carried to {len(target)} kernels from the same launch of an equal layer")
    if refused:
        notes.append(f"{len(refused)} launches ran other kernels than their twins, and nothing was carried to them")
    if unmeasured:
        notes.append(f"the twins of {len(unmeasured)} launches have no counters, and nothing was carried to them")
    joined = replace(profile, kernels=kernels, notes=(*profile.notes, *notes))
    return replace(joined, nodes=with_node_counters(joined))


def _processes(table: CounterTable) -> list[tuple[int, np.ndarray]]:
    """(process, its row positions) of a table: order means something only within a process."""
    import numpy as np

    process = table.rows["process"].to_numpy()
    return [(int(p), np.flatnonzero(process == p)) for p in dict.fromkeys(process.tolist())]


def _match(
    kernels: pd.DataFrame, table: CounterTable, rows: np.ndarray, only: Collection[LaunchId] | None
) -> tuple[np.ndarray, list[str]]:
    """Per kernel of the frame its row in the table or -1, and what could not be matched."""
    import numpy as np

    index = np.full(len(kernels), -1, dtype="int64")
    measured = ((kernels["kind"] == "kernel") & (kernels["iteration"] >= 0)).to_numpy(copy=True)
    if only is not None:
        chosen = set(only)
        measured &= [pair in chosen for pair in zip(kernels["graph"], kernels["launch"], strict=True)]
    eligible = np.flatnonzero(measured)
    launched = kernels["launch_ns"].iloc[eligible]
    if launched.notna().all():  # kernels of several streams may start in another order than that of their launches
        eligible = eligible[np.argsort(launched.to_numpy(dtype="int64"), kind="stable")]
    iteration = kernels["iteration"].to_numpy()[eligible]
    calls = [eligible[iteration == i] for i in dict.fromkeys(iteration.tolist())]
    if not len(eligible) or not len(rows):
        return index, [f"{len(rows)} rows against {len(eligible)} kernels: nothing to match"]
    named = bool((table.rows["name"].to_numpy()[rows] != "").all())
    aligned = _aligned if named else _by_number
    whole, note = aligned(kernels, table, eligible, rows)
    if (whole >= 0).all():
        index[eligible] = rows[whole]
        return index, note
    per_call = [aligned(kernels, table, call, rows) for call in calls]
    matched = sum(int((found >= 0).sum()) for found, _ in per_call)
    # A call's worth of rows stands for every call; a window's worth is matched as a whole.
    one_call = abs(len(rows) - len(calls[0])) < abs(len(rows) - len(eligible))
    if len(calls) > 1 and one_call and (matched or (whole < 0).all()):
        for call, (found, _) in zip(calls, per_call, strict=True):
            index[call[found >= 0]] = rows[found[found >= 0]]
        left = sorted({text for _, said in per_call for text in said})
        return index, left
    index[eligible[whole >= 0]] = rows[whole[whole >= 0]]
    return index, note


def _aligned(
    kernels: pd.DataFrame, table: CounterTable, members: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    import numpy as np

    chosen = kernels.iloc[members]
    shapes = np.array(
        [(*(g or (0, 0, 0)), *(b or (0, 0, 0))) for g, b in zip(chosen["grid"], chosen["block"], strict=True)]
    )
    there = table.rows.iloc[rows]
    found = match(
        chosen["name"].tolist(),
        there["name"].tolist(),
        kernel_shapes=shapes.reshape(-1, 6),
        counter_shapes=there[[*SHAPE_COLUMNS]].to_numpy(),
    )
    return found.index, list(found.notes)


def _by_number(
    kernels: pd.DataFrame, table: CounterTable, members: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Rows without names: the n-th is the n-th kernel if there are as many, and if their times look alike."""
    import numpy as np

    nothing = np.full(len(members), -1, dtype="int64")
    if len(rows) != len(members):
        return nothing, [f"{len(rows)} rows without names against {len(members)} kernels: nothing was matched"]
    key = "gpu__time_duration.sum"
    if key in table.rows:
        theirs = table.rows[key].to_numpy()[rows]
        ours = kernels["duration_ns"].to_numpy(dtype="float64")[members]
        timed = (ours > _TIMED_NS) & np.isfinite(theirs) & (theirs > 0)
        ratio = theirs[timed] / ours[timed]
        close = (ratio < _TIME_FACTOR) & (ratio > 1 / _TIME_FACTOR)
        if timed.any() and close.mean() < _TIME_SHARE:
            return nothing, [
                f"only {close.mean():.0%} of the rows without names take about as long as the kernel at their place: "
                "they are of another sequence of kernels, and nothing was matched"
            ]
    return np.arange(len(members), dtype="int64"), []
