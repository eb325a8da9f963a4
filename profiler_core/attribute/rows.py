"""One row per kernel, whatever the device: its launch, and the ranges around that launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler_core.attribute import enclosure
from profiler_core.attribute.correlation import link, operator_ranges
from profiler_core.attribute.cpu_kernels import cpu_kernels
from profiler_core.attribute.graph_replay import captured_at, is_graph_launch
from profiler_core.range_names import graph_call_of, launch_of, line_of, module_of
from profiler_core.trace import KERNEL_COLUMNS, Trace, table

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from profiler_core.attribute.correlation import Links

_BACKWARD = "autograd::engine::evaluate_function"  # the range that autograd's engine puts around a step


@dataclass
class Ranges:
    """What the names of a trace's ranges say, row by row; all arrays are int64 rows of the trace's ranges or -1.

    ``operator``: the innermost operator at or around a range; ``top_operator``: the outermost one inside the same
    call of a compiled graph (or outside of all); ``launch``: the innermost launch range; ``call``: the innermost call
    of a compiled graph; ``module`` and ``line``: the innermost range of a module's call and of a source line, those of
    the forward operator where the range is of its backward pass (``backward``). ``codes`` and ``names`` are the
    factorised names.
    """

    parent: np.ndarray
    codes: np.ndarray
    names: np.ndarray
    operator: np.ndarray
    top_operator: np.ndarray
    launch: np.ndarray
    call: np.ndarray
    module: np.ndarray
    line: np.ndarray
    backward: np.ndarray

    @classmethod
    def of(cls, trace: Trace, parent: np.ndarray) -> Ranges:
        import numpy as np
        import pandas as pd

        codes, found = pd.factorize(trace.ranges["name"])
        names = np.asarray(found, dtype=object)
        on_cpu = trace.ranges["category"].isin(["op", "annotation"]).to_numpy(dtype=bool)

        def flag(says: list[bool]) -> np.ndarray:
            return np.array(says, dtype=bool)[codes] & on_cpu if len(codes) else np.zeros(0, dtype=bool)

        is_op = operator_ranges(trace)
        is_launch = flag([bool(launch_of(name)[0]) for name in names])
        is_call = flag([graph_call_of(name) is not None for name in names])
        is_module = flag([bool(module_of(name)[1]) for name in names])
        is_line = flag([bool(line_of(name)[0]) for name in names])
        module, line = enclosure.nearest(parent, is_module), enclosure.nearest(parent, is_line)
        backward = np.zeros(len(parent), dtype=bool)
        if len(names) and (is_module.any() or is_line.any()):
            is_backward = flag([name.startswith(_BACKWARD) for name in names])
            forward = _forward_of(trace, parent, is_op, is_backward)
            backward = forward >= 0
            module, line = (np.where(backward, cls.at(found, forward), found) for found in (module, line))
        below_call = parent.copy()
        inside = parent >= 0
        below_call[inside & is_call[parent]] = -1  # autograd's own ranges lie around a backward graph's call
        return cls(
            parent,
            codes,
            names,
            enclosure.nearest(parent, is_op),
            enclosure.outermost(below_call, is_op),
            enclosure.nearest(parent, is_launch),
            enclosure.nearest(parent, is_call),
            module,
            line,
            backward,
        )

    def name(self, rows: np.ndarray) -> np.ndarray:
        """Names (object) of rows, "" for -1."""
        import numpy as np

        codes = np.where(rows >= 0, self.codes[rows], len(self.names)) if len(self.codes) else np.zeros_like(rows)
        return np.append(self.names, "")[codes]

    @staticmethod
    def at(column: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """``column[rows]``, -1 where the row is -1."""
        import numpy as np

        return np.where(rows >= 0, np.append(column, -1)[rows], -1)


def _forward_of(trace: Trace, parent: np.ndarray, is_op: np.ndarray, is_backward: np.ndarray) -> np.ndarray:
    """For each range inside a step of a backward pass the forward operator that it is of, by autograd's sequence
    number; -1 elsewhere. The number is that of the next step to be recorded, so that several operators carry it: the
    last of them is the one that recorded the step.
    """
    import numpy as np

    sequence = trace.ranges["sequence"].to_numpy()
    step = enclosure.nearest(parent, is_backward)
    candidates = np.flatnonzero(is_op & (sequence >= 0) & (step < 0))
    numbers, rows = sequence[candidates], candidates
    order = np.lexsort((rows, numbers))
    numbers, rows = numbers[order], rows[order]
    wanted = Ranges.at(sequence, step)
    place = np.searchsorted(numbers, wanted, side="right") - 1
    found = (wanted >= 0) & (place >= 0)
    at = np.where(found, place, 0)
    if not len(numbers):
        return np.full(len(parent), -1, dtype="int64")
    found &= numbers[at] == wanted
    return np.where(found, rows[at], -1)


@dataclass
class Rows:
    """The kernels of a trace with what is known of their launch, as parallel arrays over ``kernels``.

    ``range`` is the innermost CPU range around the launch; ``method`` and ``reason`` say how it was found, ``other``
    what a lower-ranked path claims instead. ``call`` is the API call that launched it, ``replay`` whether that call
    launched a whole graph.
    """

    kernels: pd.DataFrame
    call: np.ndarray
    thread: np.ndarray
    launch_ns: np.ndarray
    range: np.ndarray
    method: np.ndarray
    reason: np.ndarray
    other: np.ndarray
    replay: np.ndarray
    notes: tuple[str, ...]
    ranges: Ranges

    def __len__(self) -> int:
        return len(self.kernels)


def rows_of(trace: Trace) -> Rows:
    """The kernels of ``trace``: device activity, or on a CPU the operators that stand for work."""
    links = link(trace)
    ranges = Ranges.of(trace, links.parent)
    return _cpu(trace, links, ranges) if trace.device_type == "cpu" else _device(trace, links, ranges)


def _device(trace: Trace, links: Links, ranges: Ranges) -> Rows:
    import numpy as np
    import pandas as pd

    call = links.call
    known = call >= 0
    calls = trace.calls
    thread = np.where(known, np.append(calls["thread"].to_numpy(), -1)[call], -1)
    launch_ns = np.where(known, np.append(calls["start_ns"].to_numpy(), -1)[call], -1)
    position, apis = pd.factorize(calls["name"])
    launches_graph = np.array([is_graph_launch(api) for api in apis], dtype=bool)
    # A call without a name has the position -1, also where there are no names at all.
    replay = np.append(np.append(launches_graph, False)[position], False)[call]
    replay = (replay & known) | (trace.kernels["graph_node"].to_numpy() != 0)
    around, method, reason = links.range.copy(), links.method.copy(), links.reason.copy()
    if len(trace.captures):
        # The recording is what tells the kernels of a replay apart: it lay in the ranges of the code that ran then.
        process, at_thread, time = captured_at(trace)
        group, at_group = _thread_codes(trace, process, at_thread)
        rows = np.flatnonzero(trace.ranges["category"].isin(["op", "annotation"]).to_numpy())
        start, end = (trace.ranges[name].to_numpy()[rows] for name in ("start_ns", "end_ns"))
        asked = np.flatnonzero(time >= 0)
        found = enclosure.enclosing(start, end, group[rows], time[asked], at_group[asked])
        hit = asked[found >= 0]
        around[hit], method[hit], reason[hit] = rows[found[found >= 0]], "correlation", ""
    return Rows(
        trace.kernels, call, thread, launch_ns, around, method, reason, links.other, replay, links.notes, ranges
    )


def _thread_codes(trace: Trace, process: np.ndarray, thread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One integer per (process, thread), for the ranges and for the given pairs."""
    import numpy as np
    import pandas as pd

    pairs = pd.MultiIndex.from_arrays(
        [
            np.concatenate([trace.ranges["process"].to_numpy(), process]),
            np.concatenate([trace.ranges["thread"].to_numpy(), thread]),
        ]
    )
    codes = pd.factorize(pairs)[0].astype("int64")
    return codes[: len(trace.ranges)], codes[len(trace.ranges) :]


def _cpu(trace: Trace, links: Links, ranges: Ranges) -> Rows:
    import numpy as np

    found = cpu_kernels(trace, parent=links.parent)
    count = len(found)
    kernels = table(
        {name: found[name].to_numpy() for name in ("name", "start_ns", "duration_ns", "process")},
        KERNEL_COLUMNS,
        "start_ns",
    )
    return Rows(
        kernels=kernels,
        call=np.full(count, -1, dtype="int64"),
        thread=found["thread"].to_numpy(),
        launch_ns=found["start_ns"].to_numpy(),
        range=found["range"].to_numpy(),
        method=np.full(count, "enclosure", dtype=object),
        reason=np.full(count, "", dtype=object),
        other=np.full(count, -1, dtype="int64"),
        replay=np.zeros(count, dtype=bool),
        notes=(),
        ranges=ranges,
    )
