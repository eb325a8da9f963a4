"""Counters to kernels by (name, order): which row of a counter table belongs to which kernel of a trace.

Two tools that watched two runs of the same program have no identifier in common, only the order of launches. Where
both saw the same sequence, row i is kernel i. Where they did not, the rules are:

1. The explanation that needs the fewest missing kernels and surplus rows is the right one (a longest common
   subsequence), and of several, the one in which more neighbours merely changed places.
2. A pair is returned only if *every* such explanation contains it. One of ten equal kernels in a row without a
   counter row leaves all ten unmatched, since any of them may be the one; the kernels around them keep their rows.

So a row that was dropped never shifts the rows after it, and a row that could be that of either of two kernels
goes to neither. Rule 1 can only be wrong where two faults look like one smaller one; where rows are merely missing,
or merely repeated, the truth is among the explanations and each pair returned is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING, Any

from profiler_core.names import canonical, same_kernel, short_name

if TYPE_CHECKING:
    import numpy as np

# Kernels times rows. The alignment costs about kernels * rows / 64 machine words of work (10^5 by 10^5: seconds).
# Beyond it only sequences that agree as they are get matched.
MAX_CELLS = 4 * 10**10
# Of a stretch that no common subsequence decides; larger ones stay unmatched without a look for changed places.
MAX_STRETCH_CELLS = 250_000
_NOTES = 8  # stretches described one by one
_FIT_COMPARISONS = 1_000_000  # for a note only


@dataclass(frozen=True)
class Match:
    """``index``: int64, per kernel its row in the counters, or -1. ``exact``: the sequences agree one to one.
    ``unmatched_kernels`` and ``unmatched_counters`` are the positions left over, ascending. ``notes`` says in
    sentences what could not be matched, and why.
    """

    index: np.ndarray
    exact: bool
    unmatched_kernels: tuple[int, ...]
    unmatched_counters: tuple[int, ...]
    notes: tuple[str, ...]


def match(
    kernel_names: Sequence[str],
    counter_names: Sequence[str],
    *,
    kernel_shapes: Any = None,
    counter_shapes: Any = None,
) -> Match:
    """Match rows to kernels, both in launch order.

    Names need not be spelt alike (:func:`profiler_core.names.same_kernel`). Shapes are (n, 6) integers: grid x, y,
    z and block x, y, z, 0 where unknown; two launches of different known grids or blocks never match. Give the
    kernels of the window that was profiled, and the rows of one process: a second iteration of the same kernels
    would make every row ambiguous.
    """
    import numpy as np

    kernels = _tokens(kernel_names, kernel_shapes, "kernel_shapes")
    rows = _tokens(counter_names, counter_shapes, "counter_shapes")
    index = np.full(len(kernels), -1, dtype=np.int64)
    exact = len(kernels) == len(rows) and all(map(_alike, kernels, rows))
    notes: list[str] = []
    if exact:
        index[:] = np.arange(len(kernels))
    elif kernels and rows:
        if len(kernels) * len(rows) > MAX_CELLS:
            notes.append(
                f"{len(kernels)} kernels and {len(rows)} rows differ and are too many to align; nothing was matched. "
                "Match window by window, or process by process."
            )
        else:
            for i, j in _forced_pairs(kernels, rows):
                index[i] = j
            notes += _explain(index, kernels, rows)
    left_rows = np.ones(len(rows), dtype=bool)
    left_rows[index[index >= 0]] = False
    unmatched_kernels, unmatched_rows = np.flatnonzero(index < 0), np.flatnonzero(left_rows)
    if not exact:
        notes.insert(
            0,
            f"{len(unmatched_kernels)} of {len(kernels)} kernels have no counter row of their own, "
            f"{len(unmatched_rows)} of {len(rows)} rows no kernel.",
        )
    return Match(index, exact, tuple(unmatched_kernels.tolist()), tuple(unmatched_rows.tolist()), tuple(notes))


# A launch: its name, grid and block; () where unknown.
_Token = tuple[str, tuple[int, ...], tuple[int, ...]]


def _tokens(names: Sequence[str], shapes: Any, parameter: str) -> list[_Token]:
    import numpy as np

    if shapes is None:
        return [(name, (), ()) for name in names]
    array = np.asarray(shapes, dtype=np.int64).reshape(-1, 6) if len(names) else np.zeros((0, 6), dtype=np.int64)
    if len(array) != len(names):
        raise ValueError(f"{parameter} has {len(array)} rows for {len(names)} names")
    return [
        (name, grid if all(grid) else (), block if all(block) else ())
        for name, row in zip(names, array.tolist(), strict=True)
        for grid, block in [(tuple(row[:3]), tuple(row[3:]))]
    ]


@lru_cache(maxsize=1 << 16)
def _alike(a: _Token, b: _Token) -> bool:
    return all(not x or not y or x == y for x, y in zip(a[1:], b[1:], strict=True)) and same_kernel(a[0], b[0])


def _forced_pairs(kernels: Sequence[_Token], rows: Sequence[_Token]) -> list[tuple[int, int]]:
    """Pairs that every best explanation contains, ascending."""
    one = _extreme_alignment(kernels, rows)
    other = {(i, j) for j, i in _extreme_alignment(rows, kernels)}
    # Best alignments are paths between the corners of a grid, and these two are the outermost of them. A step that
    # both take is taken by all that lie between.
    anchors = [pair for pair in one if pair in other]
    pairs: list[tuple[int, int]] = []
    i0 = j0 = 0
    for i, j in [*anchors, (len(kernels), len(rows))]:
        pairs += [(i0 + a, j0 + b) for a, b in _with_changed_places(kernels[i0:i], rows[j0:j])]
        pairs.append((i, j))
        i0, j0 = i + 1, j + 1
    return pairs[:-1]


def _extreme_alignment(a: Sequence[_Token], b: Sequence[_Token]) -> list[tuple[int, int]]:
    """The longest common subsequence of ``a`` and ``b`` that keeps to the late positions of ``a`` and the early ones
    of ``b``, as pairs of positions, ascending.

    Bit-parallel (Hyyrö, "Bit-parallel LCS-length computation revisited", 2004): bit j of the row that belongs to
    a[:i] is 0 where b[j] makes the common subsequence of a[:i] and b[: j + 1] longer than that of a[:i] and b[:j].
    Every sqrt(n)-th row is kept and those between are made again on the way back, so that memory stays
    O(sqrt(len(a)) * len(b)) bits.
    """
    masks = _Masks(a, b)
    everything = (1 << len(b)) - 1
    step = isqrt(len(a)) + 1

    def following(row: int, i: int) -> int:
        hit = row & masks(a[i])
        return ((row + hit) | (row ^ hit)) & everything

    kept = [everything]
    row = everything
    for i in range(len(a)):
        row = following(row, i)
        if (i + 1) % step == 0:
            kept.append(row)
    pairs: list[tuple[int, int]] = []
    j = len(b)
    for block in range(len(a) // step, -1, -1):
        rows = [kept[block]]
        for i in range(block * step, min((block + 1) * step, len(a))):
            rows.append(following(rows[-1], i))
        for i in range(block * step + len(rows) - 1, block * step, -1):
            # Back from (i, j): leave out elements of b for as long as nothing is lost by it, then pair if the two
            # are alike, else leave out a[i - 1].
            j = _last_zero(rows[i - block * step], j) + 1
            if j and masks(a[i - 1]) >> (j - 1) & 1:
                pairs.append((i - 1, j - 1))
                j -= 1
    return pairs[::-1]


def _last_zero(bits: int, end: int) -> int:
    """Position of the last 0 among the lowest ``end`` bits, or -1. Looks at words, since the next is mostly near."""
    while end > 0:
        start = max(0, end - 64)
        zeros = ~(bits >> start) & ((1 << (end - start)) - 1)
        if zeros:
            return start + zeros.bit_length() - 1
        end = start
    return -1


class _Masks:
    """Per launch of ``a`` the positions of ``b`` that it can be, as the bits of an integer."""

    def __init__(self, a: Sequence[_Token], b: Sequence[_Token]) -> None:
        self._length = len(b)
        places: dict[_Token, list[int]] = defaultdict(list)
        for j, token in enumerate(b):
            places[token].append(j)
        by_short_name: dict[str, list[_Token]] = defaultdict(list)
        for token in places:
            by_short_name[short_name(token[0])].append(token)
        self._places = {
            token: [j for other in by_short_name[short_name(token[0])] if _alike(token, other) for j in places[other]]
            for token in dict.fromkeys(a)
        }
        # Bounded: where every launch is another one, all masks together would be len(a) * len(b) bits.
        self._cached = lru_cache(maxsize=4096)(self._mask)

    def __call__(self, token: _Token) -> int:
        return self._cached(token)

    def _mask(self, token: _Token) -> int:
        bits = bytearray((self._length + 7) // 8)
        for j in self._places[token]:
            bits[j // 8] |= 1 << j % 8
        return int.from_bytes(bits, "little")


def _with_changed_places(kernels: Sequence[_Token], rows: Sequence[_Token]) -> list[tuple[int, int]]:
    """Pairs within a stretch of kernels and rows that are the same in all explanations that have the fewest
    omissions and, among those, the most neighbours that changed places. Those that did are not paired themselves:
    which of the two was profiled when is not known.
    """
    n, m = len(kernels), len(rows)
    if not n or not m or n * m > MAX_STRETCH_CELLS:
        return []
    omission = 2 * min(n, m) + 2
    exchange = 2 * omission - 1  # one omitted and one surplus, but for the bonus
    same = [[_alike(kernel, row) for row in rows] for kernel in kernels]

    def exchanged(i: int, j: int) -> bool:
        return i + 1 < n and j + 1 < m and same[i][j + 1] and same[i + 1][j] and not (same[i][j] or same[i + 1][j + 1])

    def steps(i: int, j: int) -> list[tuple[int, int, int]]:
        found = []
        if i < n:
            found.append((1, 0, omission))
        if j < m:
            found.append((0, 1, omission))
        if i < n and j < m and same[i][j]:
            found.append((1, 1, 0))
        if exchanged(i, j):
            found.append((2, 2, exchange))
        return found

    unreached = omission * (n + m) + 1
    to_end = [[unreached] * (m + 1) for _ in range(n + 1)]
    to_end[n][m] = 0
    for i in range(n, -1, -1):
        for j in range(m, -1, -1):
            for di, dj, cost in steps(i, j):
                to_end[i][j] = min(to_end[i][j], to_end[i + di][j + dj] + cost)
    # Forward over the best paths alone, collecting every way in which each kernel is used up.
    ways: list[set[int]] = [set() for _ in range(n)]
    on_best = [[False] * (m + 1) for _ in range(n + 1)]
    on_best[0][0] = True
    for i in range(n + 1):
        for j in range(m + 1):
            if not on_best[i][j]:
                continue
            for di, dj, cost in steps(i, j):
                if to_end[i][j] == cost + to_end[i + di][j + dj]:
                    on_best[i + di][j + dj] = True
                    for used in range(i, i + di):
                        ways[used].add(j if (di, dj) == (1, 1) else -1)
    return [(i, min(way)) for i, way in enumerate(ways) if len(way) == 1 and -1 not in way]


def _explain(index: np.ndarray, kernels: Sequence[_Token], rows: Sequence[_Token]) -> list[str]:
    """A sentence per stretch between matched pairs."""
    notes: list[str] = []
    for whole, part, names in ((kernels, rows, ("rows", "kernels")), (rows, kernels, ("kernels", "rows"))):
        if len(whole) > len(part) and _fits_twice(whole, part):
            notes.append(
                f"The {names[0]} fit the {names[1]} at more than one place (several iterations?), so that it cannot be "
                f"told which they belong to; give the {names[1]} of what both tools recorded."
            )
    stretches = []
    i0 = j0 = 0
    for i in range(len(kernels) + 1):
        j = int(index[i]) if i < len(kernels) else len(rows)
        if j < 0:
            continue
        if i > i0 or j > j0:
            stretches.append((i0, i, j0, j))
        i0, j0 = i + 1, j + 1
    for i0, i, j0, j in stretches[:_NOTES]:
        if i == i0:
            where = f"before kernel {i}" if i < len(kernels) else "after the last kernel"
            notes.append(f"No kernel for {_counted(j0, j, rows, 'row')}, {where}.")
        elif j == j0:
            notes.append(f"No row for {_counted(i0, i, kernels, 'kernel')}.")
        else:
            notes.append(
                f"No unambiguous pairing of {_counted(i0, i, kernels, 'kernel')} with {_counted(j0, j, rows, 'row')}; "
                "none was paired."
            )
    if len(stretches) > _NOTES:
        notes.append(f"{len(stretches) - _NOTES} further places are not matched.")
    return notes


def _fits_twice(whole: Sequence[_Token], part: Sequence[_Token]) -> bool:
    """``part`` is found in ``whole``, uninterrupted, at two places or more."""
    budget = _FIT_COMPARISONS
    places = 0
    for start in range(len(whole) - len(part) + 1):
        same = 0
        while same < len(part) and _alike(whole[start + same], part[same]):
            same += 1
        places += same == len(part)
        budget -= same + 1
        if places == 2 or budget < 0:
            break
    return places == 2


def _counted(start: int, end: int, tokens: Sequence[_Token], word: str) -> str:
    names = list(dict.fromkeys(canonical(token[0]) for token in tokens[start:end]))
    shown = ", ".join(name if len(name) <= 60 else name[:57] + "..." for name in names[:3])
    more = f" and {len(names) - 3} more names" if len(names) > 3 else ""
    places = f"{word} {start}" if end == start + 1 else f"{word}s {start} to {end - 1}"
    return f"{places} ({shown}{more})"
