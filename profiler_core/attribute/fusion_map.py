"""Attribution by names and order: what ran in one call of a compiled graph against the launches of its wrapper code.

Nothing here looks at which operator is near. A launch is claimed where the names leave one possibility.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler_core.range_names import is_generated

if TYPE_CHECKING:
    from profiler_core.collect.provenance import Launch, Provenance

# Of two sequences that differ, at least this part of each must be matched before any match is believed: the few
# names that two unrelated sequences share by chance must not attribute anything.
_LEAST_MATCHED = 0.5


NOT_NAMED = "no launch of this graph is named"
EQUAL = "the sequence of names equals that of the launches"
DIFFERENT = "the sequences differ, but every best alignment has it so"


@dataclass(frozen=True)
class Claim:
    """``launch`` is the key claimed, "" where the names decide nothing; ``reason`` says why."""

    launch: str
    reason: str


def operator_name(launch: Launch) -> str:
    """The name of the CPU event that torch.profiler shows around this launch.

    A generated kernel runs in a range of its own name, a library call in its operator: ``extern_kernels.addmm`` in
    ``aten::addmm``, ``torch.ops.aten.convolution.default`` in ``aten::convolution``.
    """
    if not launch.extern:
        return launch.kernel
    match = re.fullmatch(r"(?:extern_kernels|aten)\.(\w+)", launch.kernel)
    if match:
        return f"aten::{match[1]}"
    match = re.fullmatch(r"torch\.ops\.(\w+)\.(\w+)(?:\.\w+)?", launch.kernel)
    return f"{match[1]}::{match[2]}" if match else launch.kernel


def claims_by_operator(names: Sequence[str], provenance: Provenance) -> list[Claim]:
    """One claim for each of the outermost operators of a call, given by name in order of time.

    Operators that bear no launch's name are no launches. If the rest is the wrapper's sequence, once or several
    times over, the n-th operator is the n-th launch. If not, the sequences are aligned, and what every best
    alignment agrees on is claimed.
    """
    launches = provenance.launches
    expected = [operator_name(launch) for launch in launches]
    known = set(expected)
    claims = [Claim("", f"{NOT_NAMED} {name}") for name in names]
    at = [i for i, name in enumerate(names) if name in known]
    actual = [names[i] for i in at]
    if not actual:
        return claims
    expected *= max(round(len(actual) / len(expected)), 1)
    pairs = aligned(actual, expected)
    for n, i in enumerate(at):
        j = pairs.get(n)
        if j is None:
            claims[i] = Claim("", f"the sequences differ, and no launch is certain to be this {actual[n]}")
        else:
            claims[i] = Claim(launches[j % len(launches)].key, EQUAL if actual == expected else DIFFERENT)
    return claims


def aligned(actual: Sequence[str], expected: Sequence[str]) -> dict[int, int]:
    """Which of ``expected`` each of ``actual`` is, by position, where every best alignment of the two agrees."""
    if list(actual) == list(expected):
        return {i: i for i in range(len(actual))}
    from profiler_core.attribute.call_order import match

    index = match(list(actual), list(expected)).index
    pairs = {i: int(j) for i, j in enumerate(index) if j >= 0}
    if len(pairs) < _LEAST_MATCHED * max(len(actual), len(expected)):
        # A generated kernel's name is made for this graph, so where it is unique it needs no neighbours.
        seen, there = Counter(actual), Counter(expected)
        pairs = {i: j for i, j in pairs.items() if is_generated(actual[i]) and seen[actual[i]] == there[actual[i]] == 1}
    return pairs


def identify(names: Sequence[str], provenances: Sequence[Provenance]) -> int | None:
    """The number of the one graph that all the generated kernels among ``names`` are of; None if there is no one."""
    generated = {name for name in names if is_generated(name)}
    if not generated:
        return None
    fitting = [n for n, p in enumerate(provenances) if generated <= {launch.kernel for launch in p.launches}]
    if len(fitting) > 1:  # of several, the ones that would run nothing else
        exact = [n for n in fitting if generated == {x.kernel for x in provenances[n].launches if not x.extern}]
        fitting = exact or fitting
    return fitting[0] if len(fitting) == 1 else None
