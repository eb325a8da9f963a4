"""On a CPU the kernels are operators and generated code: which events of a trace stand for work, each once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from profiler_core.attribute import windows
from profiler_core.attribute.correlation import is_operator
from profiler_core.range_names import is_generated, iteration_of, kernel_of, launch_of
from profiler_core.trace import COMPILED_GRAPH_PREFIX, ITERATION_PREFIX, Trace, table

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

COLUMNS: dict[str, tuple[str, object]] = {
    "name": ("object", ""),
    "iteration": ("int64", -1),
    "start_ns": ("int64", 0),
    "duration_ns": ("int64", 0),
    "process": ("int64", 0),
    "thread": ("int64", -1),
    "range": ("int64", -1),
    "launch": ("object", ""),
}


def cpu_kernels(trace: Trace, *, parent: np.ndarray | None = None, whole_graphs: bool = False) -> pd.DataFrame:
    """A row per CPU kernel in order of start: name, iteration, start_ns, duration_ns, process, thread, range (its row
    in ``trace.ranges``) and launch (``kernel:handle``; "" outside of launch ranges).

    Kernels are the top-level operators and generated kernels within an iteration, on the thread that called it, and
    on every other that began one meanwhile where the trace was taken of all on purpose (``trace.meta["all_threads"]``);
    without iterations, on every thread. A launch range of a library call stands for the operators directly in it;
    one of a generated kernel, or with no operator in it, is the kernel itself and includes about a microsecond of
    binding. Time outside of any of these is not kernel time. ``parent`` is the nesting of ``trace.ranges``, which is
    found where it is not given. ``whole_graphs``: a compiled graph without launch ranges is one kernel.
    """
    import numpy as np

    from profiler_core.attribute.correlation import link

    nesting = link(trace).parent if parent is None else parent
    names = trace.ranges["name"].tolist()
    categories = trace.ranges["category"].tolist()
    starts = trace.ranges["start_ns"].tolist()
    ends = trace.ranges["end_ns"].tolist()
    above = nesting.tolist()
    keys = [launch_of(name)[0] for name in names]
    graphs = _opaque_graphs(names, above, keys) if whole_graphs else set()
    windowed = any(name.startswith(ITERATION_PREFIX) and iteration_of(name) >= 0 for name in set(names))
    elsewhere = [-1] * len(names)
    if windowed and trace.meta.get("all_threads"):
        elsewhere = windows.find(trace).of(np.full(len(names), -1), trace.ranges["start_ns"].to_numpy()).tolist()
    iteration: dict[int, int] = {}
    holder: dict[int, int] = {}  # event -> the range, graph or operator at or around it that takes the time inside it
    filled: set[int] = set()  # launch ranges with an operator directly inside
    chosen: list[int] = []
    # Rows are in order of start, but of two that begin together the outer one need not come first.
    for i in sorted(range(len(names)), key=lambda i: (starts[i], -ends[i], i)):
        if categories[i] in ("span", "device"):
            continue
        if names[i].startswith(ITERATION_PREFIX) and iteration_of(names[i]) >= 0:
            iteration[i] = iteration.get(above[i], iteration_of(names[i]))  # one inside another is the user's own
            continue
        if not windowed:
            iteration[i] = 0
        elif elsewhere[i] >= 0:  # first, for a range of the user's may have begun in an earlier call
            iteration[i] = elsewhere[i]
        elif above[i] in iteration:
            iteration[i] = iteration[above[i]]
        if i not in iteration:
            continue
        outer = holder.get(above[i], -1)
        if not (keys[i] or i in graphs or is_operator(names[i], categories[i])):
            if outer >= 0:
                holder[i] = outer
            continue
        holder[i] = i
        if outer < 0:
            chosen.append(i)
        elif keys[outer] and not keys[i] and not is_generated(kernel_of(keys[outer])):
            filled.add(outer)
            chosen.append(i)
    kept = [i for i in chosen if i not in filled]
    return table(
        {
            "name": [kernel_of(keys[i]) or names[i] for i in kept],
            "iteration": [iteration[i] for i in kept],
            "start_ns": [starts[i] for i in kept],
            "duration_ns": [ends[i] - starts[i] for i in kept],
            "process": trace.ranges["process"].to_numpy()[kept] if kept else [],
            "thread": trace.ranges["thread"].to_numpy()[kept] if kept else [],
            "range": kept,
            "launch": [keys[i] or next((keys[j] for j in _around(above, i) if keys[j]), "") for i in kept],
        },
        COLUMNS,
        "start_ns",
    )


def _around(parent: list[int], index: int) -> Iterator[int]:
    """The events around this one, innermost first."""
    index = parent[index]
    while index >= 0:
        yield index
        index = parent[index]


def _opaque_graphs(names: list[str], parent: list[int], keys: list[str]) -> set[int]:
    """Compiled graphs without a launch range inside."""
    graphs = {i for i, name in enumerate(names) if name.startswith(COMPILED_GRAPH_PREFIX)}
    for i, name in enumerate(names):
        if keys[i] or is_generated(name):
            graphs -= set(_around(parent, i))
    return graphs
