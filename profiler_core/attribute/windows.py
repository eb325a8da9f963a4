"""Which measured call a kernel belongs to, and which of the calls are whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler_core.range_names import iteration_of
from profiler_core.trace import ITERATION_PREFIX

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from profiler_core.trace import Trace

OUTSIDE = -1


@dataclass(frozen=True)
class Windows:
    """The measured calls of a trace in order of time: bounds in ns and their numbers; none where it has no ranges
    that say so, and is then one call as a whole.
    """

    start: np.ndarray
    end: np.ndarray
    number: np.ndarray

    @property
    def count(self) -> int:
        return max(len(self.number), 1)

    def of(self, launch_ns: np.ndarray, start_ns: np.ndarray) -> np.ndarray:
        """The call in which each kernel was launched (int64, :data:`OUTSIDE` where in none), on whatever thread: a
        backward pass is launched from autograd's.

        A kernel without a launch (``launch_ns`` -1) is of the call that had begun when it started (``start_ns``) and
        not yet been followed by the next.
        """
        import numpy as np

        if not len(self.number):
            return np.zeros(len(launch_ns), dtype="int64")
        time = np.where(launch_ns >= 0, launch_ns, start_ns)
        position = np.searchsorted(self.start, time, side="right") - 1
        at = np.maximum(position, 0)
        # A kernel may run on after the range has closed; its launch may not.
        inside = (position >= 0) & ((launch_ns < 0) | (time < self.end[at]))
        return np.where(inside, self.number[at], OUTSIDE).astype("int64")


def find(trace: Trace) -> Windows:
    """The ranges ``fxopt::iteration#N`` of a trace, or else its ``ProfilerStep#N``.

    nsys records from a program's start, warm-up and all, and ranges of operators only while they are emitted
    (``emit_nvtx``). In such a trace without numbered ranges, one call from the first operator to the last is measured.
    """
    import numpy as np
    import pandas as pd

    ranges = trace.ranges
    codes, names = pd.factorize(ranges["name"])  # few names, many ranges
    number = np.array([iteration_of(name) for name in names], dtype="int64")
    ours = np.array([name.startswith(ITERATION_PREFIX) for name in names], dtype=bool)
    rows = np.flatnonzero((number[codes] >= 0) & (ranges["category"] != "device").to_numpy()) if len(codes) else codes
    if len(rows) and ours[codes[rows]].any():
        rows = rows[ours[codes[rows]]]
    if not len(rows) and trace.meta.get("source") == "nsys":
        emitted = ranges[ranges["category"] == "op"]
        if len(emitted):
            bounds = emitted["start_ns"].min(), emitted["end_ns"].max()
            return Windows(np.array(bounds[:1]), np.array(bounds[1:]), np.zeros(1, dtype="int64"))
    rows = _outermost(ranges, rows)
    start, end = (ranges[name].to_numpy()[rows].tolist() for name in ("start_ns", "end_ns"))
    return _merged(start, end, number[codes[rows]].tolist() if len(rows) else [])


def _outermost(ranges: pd.DataFrame, rows: np.ndarray) -> np.ndarray:
    """These rows in order of start, without those inside another of them on their thread: a function may have ranges of
    such a name of its own.
    """
    import numpy as np

    found = ranges.iloc[rows].assign(row=rows)
    found = found.sort_values(["start_ns", "end_ns"], ascending=[True, False], kind="stable")
    until = found.groupby(["process", "thread"])["end_ns"].cummax().groupby([found["process"], found["thread"]]).shift()
    return found["row"].to_numpy(np.int64)[~(found["end_ns"] <= until).to_numpy(bool)]


def _merged(starts: list[int], ends: list[int], numbers: list[int]) -> Windows:
    """Ranges in order of start as calls. The ranges that several threads or processes have for one call are one; where
    the numbers begin again, the calls are numbered anew in order of time.
    """
    import numpy as np

    calls: list[list[int]] = []
    latest: dict[int, list[int]] = {}
    for start, end, number in zip(starts, ends, numbers, strict=True):
        open_call = latest.get(number)
        if open_call is not None and start < open_call[1]:
            open_call[1] = max(open_call[1], end)
        else:
            latest[number] = [start, end, number]
            calls.append(latest[number])
    bounds = np.array(calls, dtype="int64").reshape(-1, 3)
    again = len(latest) < len(calls)
    return Windows(bounds[:, 0], bounds[:, 1], np.arange(len(calls)) if again else bounds[:, 2])


def equal_calls(names: Sequence[str], calls: int) -> np.ndarray | None:
    """The call of each kernel, given by name in launch order, where they are ``calls`` times the same sequence; None
    where they are not.
    """
    import numpy as np

    length, rest = divmod(len(names), calls)
    if (
        rest
        or not length
        or any(list(names[i : i + length]) != list(names[:length]) for i in range(0, len(names), length))
    ):
        return None
    return np.repeat(np.arange(calls), length)


def short_calls(names: np.ndarray, iteration: np.ndarray, numbers: list[int]) -> dict[int, str]:
    """Calls that lack kernels which all the others ran, each with a sentence that says so.

    The first call of a profile can lose kernels while the profiler starts up. A call is short if most of the calls
    ran the same kernels, in number and by name, and it ran a part of them: one that ran other kernels (a
    recompilation, another branch) is no short one and stays.
    """
    if len(numbers) < 3:
        return {}
    ran = {i: Counter(names[iteration == i].tolist()) for i in numbers}
    common, times = Counter(tuple(sorted(kernels.items())) for kernels in ran.values()).most_common(1)[0]
    whole = Counter(dict(common))
    if times <= len(numbers) // 2:
        return {}
    short: dict[int, str] = {}
    for i, kernels in ran.items():
        missing = whole - kernels
        if missing and not kernels - whole:
            name, lost = missing.most_common(1)[0]
            short[i] = (
                f"call {i} is left out of the window: {missing.total()} of the {whole.total()} kernels that the other "
                f"calls ran are not in its trace, among them {name!r} ({lost} of {whole[name]})"
            )
    return short
