"""Which range is open at a moment, and which range lies around which: a sorted sweep for bulk, an interval tree for
single questions and as the reference that the sweep is tested equal to.

All times are int64 in one unit (ns in a trace), intervals are half open: a range holds the moment at which it starts
and not the one at which it ends. ``group`` is an integer code of what the ranges are stacked on: a thread, or a device
and a stream. Ranges of different groups never enclose each other. A range that ends before it starts encloses nothing
and has nothing around it; one of no length encloses nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Booleans = NDArray[np.bool_]


def parents(start: Integers, end: Integers, group: Integers) -> Integers:
    """For each range the row of the innermost range of its group that was open when it began, -1 where none was.

    Of ranges that begin together, the longer lies outside; of equal ones, the one listed first. The ranges need not be
    nested: of several that were open, the one that began last is taken, and it may end before its child does.
    """
    import numpy as np

    nowhere = np.zeros(0, np.int64)
    return sweep(start, end, group, nowhere, nowhere)[0]


def enclosing(start: Integers, end: Integers, group: Integers, at: Integers, at_group: Integers) -> Integers:
    """For each moment ``at`` the row of the innermost range of ``at_group`` that is open then, -1 where none is.

    Innermost is the latest start, then the earliest end, then the last listed. A moment at which a range ends lies
    outside of it.
    """
    return sweep(start, end, group, at, at_group)[1]


def sweep(
    start: Integers, end: Integers, group: Integers, at: Integers, at_group: Integers
) -> tuple[Integers, Integers]:
    """``(parents(...), enclosing(...))`` in one pass; n log n for sorting, then linear whatever the nesting.

    A stack holds the ranges in order of start. What has ended is taken off only once it is on top: whatever lies
    buried began earlier than the top, so the first range from the top that is still open began last of all that are
    open, also where ranges overlap without nesting.
    """
    import numpy as np

    start, end, group = (np.asarray(values, np.int64) for values in (start, end, group))
    at, at_group = np.asarray(at, np.int64), np.asarray(at_group, np.int64)
    around = np.full(len(start), -1, np.int64)
    inside = np.full(len(at), -1, np.int64)
    valid = np.flatnonzero(end >= start)
    rows = valid[np.lexsort((-end[valid], start[valid], group[valid]))]  # lexsort is stable: equal ranges keep order
    points = np.lexsort((at, at_group))
    codes, first, count = np.unique(group[rows], return_index=True, return_counts=True)
    low = np.searchsorted(at_group[points], codes, side="left")
    high = np.searchsorted(at_group[points], codes, side="right")
    for begin, length, left, right in zip(
        first.tolist(), count.tolist(), low.tolist(), high.tolist(), strict=True
    ):  # by group, so that only one group's numbers are Python objects at a time
        members, asked = rows[begin : begin + length], points[left:right]
        around[members], inside[asked] = _sweep_group(start[members], end[members], members, at[asked])
    return around, inside


def _sweep_group(start: Integers, end: Integers, members: Integers, at: Integers) -> tuple[Integers, Integers]:
    """The sweep over sorted ranges and sorted moments of one group; answers are of ``members``."""
    import numpy as np

    starts, ends = start.tolist(), end.tolist()
    # How many ranges have begun at each moment, those that begin at it included; and one moment after all of them.
    begun = [*np.searchsorted(start, at, side="right").tolist(), len(starts)]
    moments = [*at.tolist(), max(ends)]
    around = [-1] * len(starts)
    inside = [-1] * len(moments)
    open_ranges: list[int] = []
    position = 0
    for row, (moment, count) in enumerate(zip(moments, begun, strict=True)):
        while position < count:
            begins = starts[position]
            while open_ranges and ends[open_ranges[-1]] <= begins:
                open_ranges.pop()
            if open_ranges:
                around[position] = open_ranges[-1]
            open_ranges.append(position)
            position += 1
        while open_ranges and ends[open_ranges[-1]] <= moment:
            open_ranges.pop()
        if open_ranges:
            inside[row] = open_ranges[-1]
    names = np.append(members, -1)  # position -1 is none
    return names[np.array(around, np.int64)], names[np.array(inside[:-1], np.int64)]


def nearest(parent: Integers, flag: Booleans) -> Integers:
    """For each range the nearest flagged one at or above it in the forest ``parent``; -1 where none is flagged.

    By pointer doubling: as many passes over the rows as the depth has binary digits.
    """
    import numpy as np

    rows = len(parent)
    step = np.append(np.where(flag, np.arange(rows), np.where(parent < 0, rows, parent)), rows)
    while True:
        further = step[step]
        if np.array_equal(further, step):
            return np.where(step[:-1] == rows, -1, step[:-1])
        step = further


def outermost(parent: Integers, flag: Booleans) -> Integers:
    """For each range the farthest flagged one at or above it in the forest ``parent``; -1 where none is flagged."""
    import numpy as np

    near = np.append(nearest(parent, flag), -1)  # the slot at the end answers for "no range"
    above = near[parent]
    step = np.where(above < 0, np.arange(len(parent)), above)
    while not np.array_equal(further := step[step], step):
        step = further
    step = np.append(step, -1)
    return step[near[:-1]]


def enclosing_by_tree(start: Integers, end: Integers, group: Integers, at: Integers, at_group: Integers) -> Integers:
    """What :func:`enclosing` gives, by interval trees: the reference, and for a few questions to many ranges."""
    import numpy as np

    candidates = all_enclosing(start, end, group, at, at_group)
    return np.array([found[0] if found else -1 for found in candidates], np.int64)


def all_enclosing(
    start: Integers, end: Integers, group: Integers, at: Integers, at_group: Integers
) -> list[tuple[int, ...]]:
    """For each moment the rows of all ranges of its group that are open then, innermost first.

    Building takes some 25 us a range and n log n.
    """
    from intervaltree import IntervalTree

    trees: dict[int, IntervalTree] = {}
    for row, (begins, ends, code) in enumerate(zip(start.tolist(), end.tolist(), group.tolist(), strict=True)):
        if begins < ends:  # the tree refuses ranges of no length, which hold no moment anyway
            trees.setdefault(code, IntervalTree()).addi(begins, ends, row)
    found = []
    for moment, code in zip(at.tolist(), at_group.tolist(), strict=True):
        hits = trees[code].at(moment) if code in trees else ()
        hits = sorted(hits, key=lambda hit: (-hit.begin, hit.end, -hit.data))
        found.append(tuple(hit.data for hit in hits))
    return found
