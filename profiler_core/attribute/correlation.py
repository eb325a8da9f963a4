"""Joins kernels to their launches by correlation id, and launches to the ranges around them by id and by time.

Two paths lead from a kernel to the range that it ran for. Its External id names a range, where the tool wrote the ids
of ranges there; some wrote correlation ids instead, so whether to believe them is decided from the data. And its
launch, found by (process, correlation id), lies in the range by thread and time. Where both speak, ids decide if they
are trusted, nesting if they are not, and what the other path claims is kept. The nearest range is never taken.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from profiler_core.attribute.enclosure import enclosing, nearest, outermost, sweep
from profiler_core.range_names import is_generated
from profiler_core.trace import RANGE_PREFIX

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from profiler_core.trace import Trace

    Integers = NDArray[np.int64]
    Booleans = NDArray[np.bool_]

_DISPATCHED = re.compile(r"[A-Za-z_]\w*::\w")
# Autograd's own ranges carry a namespace as operators do, but only hold the operators of a backward node.
_FRAMEWORK = (RANGE_PREFIX, "autograd::engine::", "torch::autograd::")
# cudaLaunchKernel, cuLaunchKernelEx, hipModuleLaunchKernel, cudaGraphLaunch, cudaMemcpyAsync, cudaMemset2DAsync, ...
_LAUNCH_API = re.compile(r"launch|memcpy|memset", re.IGNORECASE)

# In the traces of 2022-23 whose External ids are correlation ids, all of the kernels' ids are equal to them; in sound
# traces it happens to single kernels whose two ids coincide (1 of 12 in the worst one seen).
EQUAL_SHARE = 0.9
# Sound ids name a range around the launch without exception in every trace seen; a tenth allows for clipped windows.
CONTRADICTED_SHARE = 0.1

NO_ID = "it carries no correlation id"
NO_LAUNCH = "no launch with its correlation id is in the trace"
SEVERAL_LAUNCHES = "several launches carry its correlation id, and the order in time does not tell which was its own"
LAUNCHED_LATER = "several launches carry its correlation id, and none of them began before it"
OUTSIDE = "its launch lies outside of every range"


@dataclass(frozen=True)
class Links:
    """What each kernel ran for. Arrays have a value per row of ``trace.kernels``, ``parent`` one per row of
    ``trace.ranges``; rows of either table are positions, -1 is none.

    - ``call``: the row in ``trace.calls`` of the launch.
    - ``range``: the row in ``trace.ranges`` of the innermost operator or annotation around the launch.
    - ``method``: how ``range`` was found: "correlation" (an External id names it), "enclosure" (the launch lies in it)
      or "none".
    - ``agrees``: 1 where ids and nesting lead to the same range, 0 where they differ, -1 where only one could speak.
    - ``other``: the range that the losing path claims where they differ.
    - ``reason``: why there is no range, "" where there is one.
    - ``external_ids``: "trusted", "absent", "equal correlation ids", "name no range" or "contradicted by nesting".
    - ``parent``: the range around each range on its thread; -1 for roots and for spans and device ranges.
    """

    call: Integers
    range: Integers
    method: NDArray[np.object_]
    agrees: NDArray[np.int8]
    other: Integers
    reason: NDArray[np.object_]
    external_ids: str
    parent: Integers
    notes: tuple[str, ...] = ()


def link(trace: Trace) -> Links:
    """Finds the launch and the range of every kernel of the trace (see :class:`Links`); n log n in rows."""
    import numpy as np

    kernels, calls = trace.kernels, trace.calls
    notes: list[str] = []
    call, reason = _launches(trace)
    launched = np.flatnonzero(call >= 0)
    used, back = np.unique(call[launched], return_inverse=True)  # one launch of a graph covers many kernels
    parent, around_call = _nesting(trace, used)
    nested = np.full(len(kernels), -1, np.int64)
    nested[launched] = around_call[back]

    identifier = kernels["external_id"].to_numpy(np.int64).copy()
    from_call = launched[identifier[launched] == 0]
    identifier[from_call] = calls["external_id"].to_numpy()[call[from_call]]
    named = _ranges_by_id(trace, identifier, notes)
    confirmed = _lies_in(nested, named, parent)
    verdict = _verdict(trace, identifier, named, confirmed, call >= 0, notes)

    # An id names the operator; the annotations in it, and an operator in an annotation, are nesting's to tell.
    same = confirmed & _same_operator(trace, nested, named, parent)
    by_id = np.where(same, nested, named) if verdict == "trusted" else np.full(len(kernels), -1, np.int64)
    chosen = np.where(by_id >= 0, by_id, nested)
    both = (named >= 0) & (nested >= 0)
    agrees = np.where(both, same.astype(np.int8), np.int8(-1)).astype(np.int8)
    other = np.where(agrees == 0, np.where(by_id >= 0, nested, named), -1)
    method = np.full(len(kernels), "none", dtype=object)
    method[chosen >= 0] = "enclosure"
    method[by_id >= 0] = "correlation"
    reason[(call >= 0) & (chosen < 0)] = OUTSIDE
    reason[chosen >= 0] = ""

    early = int((kernels["start_ns"].to_numpy()[launched] < calls["start_ns"].to_numpy()[call[launched]]).sum())
    if early:
        notes.append(f"{early} of {len(launched)} launched kernels start before their launch began: clocks disagree")
    unlaunched = len(kernels) - len(launched)
    if unlaunched:
        notes.append(f"{unlaunched} of {len(kernels)} kernels have no launch in the trace")
    differ = int((agrees == 0).sum())
    if differ:
        notes.append(f"External id and nesting name different ranges for {differ} of {int(both.sum())} kernels")
    return Links(call, chosen, method, agrees, other, reason, verdict, parent, tuple(notes))


def device_annotation(trace: Trace) -> Integers:
    """For each kernel the row in ``trace.ranges`` of the innermost device range that is open on its device and stream
    when it starts, -1 where none is.
    """
    import numpy as np

    rows = np.flatnonzero((trace.ranges["category"] == "device").to_numpy(bool))
    ranges, kernels = trace.ranges.iloc[rows], trace.kernels
    place = ["process", "device", "stream"]
    group, at_group = _codes(*([frame[name].to_numpy(np.int64) for name in place] for frame in (ranges, kernels)))
    start, end = ranges["start_ns"].to_numpy(np.int64), ranges["end_ns"].to_numpy(np.int64)
    found = enclosing(start, end, group, kernels["start_ns"].to_numpy(np.int64), at_group)
    return np.append(rows, -1)[found]


def is_operator(name: str, category: str) -> bool:
    """Whether a range is an operator (``aten::mm``) or a generated kernel (``triton_poi_fused_add_0``), as against a
    range of the framework's or an annotation.
    """
    if category != "op" or name.startswith(_FRAMEWORK):
        return False
    return bool(_DISPATCHED.match(name)) or is_generated(name)


def operator_ranges(trace: Trace) -> Booleans:
    """Which rows of ``trace.ranges`` are operators in the sense of :func:`is_operator`."""
    import pandas as pd

    codes, names = pd.factorize(trace.ranges["name"].to_numpy(object))
    matches = _matches(names, lambda name: is_operator(name, "op"))
    return matches[codes] & (trace.ranges["category"] == "op").to_numpy(bool)


def operators(trace: Trace, links: Links) -> tuple[Integers, Integers]:
    """(innermost, outermost) operator at or around the range of each kernel, as rows of ``trace.ranges``; -1: none."""
    import numpy as np

    flag = operator_ranges(trace)
    inner = np.append(nearest(links.parent, flag), -1)
    outer = np.append(outermost(links.parent, flag), -1)
    return inner[links.range], outer[links.range]


def _nesting(trace: Trace, asked: Integers) -> tuple[Integers, Integers]:
    """(parent of each range, innermost range around each of the calls ``asked``)."""
    import numpy as np

    rows = np.flatnonzero(_on_a_thread(trace))
    ranges, calls = trace.ranges, trace.calls
    place = ("process", "thread")
    group, at_group = _codes(
        [ranges[name].to_numpy(np.int64)[rows] for name in place],
        [calls[name].to_numpy(np.int64)[asked] for name in place],
    )
    start, end = ranges["start_ns"].to_numpy(np.int64)[rows], ranges["end_ns"].to_numpy(np.int64)[rows]
    around, inside = sweep(start, end, group, calls["start_ns"].to_numpy(np.int64)[asked], at_group)
    names = np.append(rows, -1)
    parent = np.full(len(ranges), -1, np.int64)
    parent[rows] = names[around]
    return parent, names[inside]


def _on_a_thread(trace: Trace) -> Booleans:
    """Operators and annotations: what is stacked on a thread, as against spans and device ranges."""
    return trace.ranges["category"].isin(("op", "annotation")).to_numpy(bool)


def _ranges_by_id(trace: Trace, identifier: Integers, notes: list[str]) -> Integers:
    """The range on a thread that carries the id, in the kernel's process; -1 where none or more than one does."""
    import numpy as np

    ids = trace.ranges["external_id"].to_numpy(np.int64)
    rows = np.flatnonzero(_on_a_thread(trace) & (ids != 0))
    process = trace.ranges["process"].to_numpy(np.int64)[rows]
    key, wanted = _codes([process, ids[rows]], [trace.kernels["process"].to_numpy(np.int64), identifier])
    order = np.argsort(key, kind="stable")
    key = key[order]
    low, high = np.searchsorted(key, wanted, "left"), np.searchsorted(key, wanted, "right")
    usable = identifier != 0
    shared = int((usable & (high - low > 1)).sum())
    if shared:
        notes.append(f"the External ids of {shared} kernels are each carried by several ranges and were not used")
    found = np.full(len(identifier), -1, np.int64)
    one = usable & (high - low == 1)
    found[one] = rows[order[low[one]]]
    return found


def _lies_in(inner: Integers, outer: Integers, parent: Integers) -> Booleans:
    """Whether ``outer`` is ``inner`` or one of the ranges around it; False where either is -1."""
    import numpy as np

    found = np.zeros(len(inner), bool)
    left = np.flatnonzero((inner >= 0) & (outer >= 0))
    at = inner[left]
    while len(left):  # as many rounds as ranges lie between, over ever fewer kernels
        same = at == outer[left]
        found[left[same]] = True
        left, at = left[~same], parent[at[~same]]
        left, at = left[at >= 0], at[at >= 0]
    return found


def _same_operator(trace: Trace, nested: Integers, named: Integers, parent: Integers) -> Booleans:
    """Whether no operator but ``named`` itself lies between the launch and ``named``, or ``named`` is an annotation."""
    import numpy as np

    op = (trace.ranges["category"] == "op").to_numpy(bool)
    closest = np.append(nearest(parent, op), -1)[nested]
    return (closest == named) | ~np.append(op, False)[named]


def _verdict(
    trace: Trace, identifier: Integers, named: Integers, confirmed: Booleans, launched: Booleans, notes: list[str]
) -> str:
    """Whether the External ids are to be believed, with the numbers added to ``notes``."""
    given = identifier != 0
    count = int(given.sum())
    if not count:
        return "absent"
    equal = int((given & (identifier == trace.kernels["correlation"].to_numpy())).sum())
    names, sound = int((named >= 0).sum()), int(confirmed.sum())
    checked = int(((named >= 0) & launched).sum())
    if equal >= EQUAL_SHARE * count and sound < EQUAL_SHARE * count:
        verdict = "equal correlation ids"
    elif not names:
        verdict = "name no range"
    elif checked - sound > CONTRADICTED_SHARE * checked:
        verdict = "contradicted by nesting"
    else:
        verdict = "trusted"
    notes.append(
        f"External ids ({verdict}): {count} of {len(identifier)} kernels have one, {equal} equal to the correlation id,"
        f" {names} name a range, and it lies around the launch for {sound} of the {checked} that have a launch"
    )
    return verdict


def _launches(trace: Trace) -> tuple[Integers, NDArray[np.object_]]:
    """(row of the launch in ``trace.calls`` or -1, reason where -1) for each kernel, by (process, correlation)."""
    import numpy as np

    kernels, calls = trace.kernels, trace.calls
    correlation = kernels["correlation"].to_numpy(np.int64)
    rows = np.flatnonzero(calls["correlation"].to_numpy() != 0)
    pair = ("process", "correlation")
    key, wanted = _codes(
        [calls[name].to_numpy(np.int64)[rows] for name in pair], [kernels[name].to_numpy(np.int64) for name in pair]
    )
    start, end = (calls[name].to_numpy(np.int64)[rows] for name in ("start_ns", "end_ns"))
    order = np.lexsort((-end, start, key))
    order = order[_candidates(trace, key[order], rows[order])]
    key = key[order]
    low, high = np.searchsorted(key, wanted, "left"), np.searchsorted(key, wanted, "right")
    low[correlation == 0] = high[correlation == 0] = 0
    found = np.full(len(kernels), -1, np.int64)
    one = high - low == 1
    found[one] = rows[order[low[one]]]
    reason = np.full(len(kernels), "", dtype=object)
    reason[high == low] = NO_LAUNCH
    reason[correlation == 0] = NO_ID
    several = np.flatnonzero(high - low > 1)
    if len(several):
        choice, why = _by_time(
            start[order], low[several], high[several], kernels["start_ns"].to_numpy(np.int64)[several]
        )
        found[several] = np.append(rows[order], -1)[choice]
        reason[several] = why
    return found, reason


def _candidates(trace: Trace, key: Integers, rows: Integers) -> Booleans:
    """Of calls sorted by (key, start, longest first): those that may be the launch. Where a key has several, what is
    no launch API goes if any is, and so does a call around the next one (cudaLaunchKernel around cuLaunchKernel).
    """
    import numpy as np
    import pandas as pd

    keep = np.ones(len(key), bool)
    if not len(key) or not (key[1:] == key[:-1]).any():
        return keep
    calls = trace.calls.iloc[rows]
    codes, names = pd.factorize(calls["name"].to_numpy(object))
    launches = _matches(names, lambda name: bool(_LAUNCH_API.search(name)))[codes]
    has_launch = np.zeros(int(key.max()) + 1, bool)
    has_launch[key[launches]] = True
    keep = launches | ~has_launch[key]
    left = np.flatnonzero(keep)
    thread, end = calls["thread"].to_numpy()[left], calls["end_ns"].to_numpy()[left]
    around = (key[left][1:] == key[left][:-1]) & (thread[1:] == thread[:-1]) & (end[1:] <= end[:-1])
    keep[left[:-1][around]] = False
    return keep


def _by_time(start: Integers, low: Integers, high: Integers, at: Integers) -> tuple[Integers, Sequence[str]]:
    """For kernels whose id several launches carry (positions low..high, in order of start): the position of the last
    one that began before the kernel, if every earlier one has had a kernel before the next began; otherwise -1.
    """
    import numpy as np

    choice, reason = np.full(len(at), -1, np.int64), [LAUNCHED_LATER] * len(at)
    # Launches that have had a kernel -> whether everything before them with the same id had one by then.
    usable: dict[int, bool] = {}
    for i in np.lexsort((at, low)).tolist():
        first = int(low[i])
        begun = int(np.searchsorted(start[first : int(high[i])], at[i], side="right"))
        if not begun:
            continue
        last = first + begun - 1
        if last not in usable:
            usable[last] = last == first or usable.get(last - 1, False)
        choice[i], reason[i] = (last, "") if usable[last] else (-1, SEVERAL_LAUNCHES)
    return choice, reason


def _codes(left: list[Integers], right: list[Integers]) -> tuple[Integers, Integers]:
    """One integer for each combination of column values, the same on both sides."""
    import numpy as np
    import pandas as pd

    size = len(left[0])
    code = np.zeros(size + len(right[0]), np.int64)
    for a, b in zip(left, right, strict=True):
        values, unique = pd.factorize(np.concatenate([a, b]))
        code, _ = pd.factorize(code * len(unique) + values)  # below rows squared, so it cannot overflow
    return code[:size].astype(np.int64), code[size:].astype(np.int64)


def _matches(names: Any, test: Any) -> Booleans:
    import numpy as np

    return np.fromiter((test(name) for name in names), bool, len(names))
