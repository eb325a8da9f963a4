"""Attribution by name, for a trace without launch ranges: kernels of one iteration against the launches in
wrapper order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from profiler_core.attribute.correlation import KernelRow, Nesting, is_operator
from profiler_core.collect.kineto import RawTrace
from profiler_core.collect.provenance import Launch, Provenance


@dataclass(frozen=True)
class Claim:
    """``launch`` is the key claimed for a kernel, "" where the names decide nothing; ``reason`` says why."""

    launch: str
    reason: str


def operator_name(launch: Launch) -> str:
    """The name of the CPU event that torch.profiler shows around this launch.

    A generated kernel runs in a range of its own name, a library call in its operator:
    ``extern_kernels.addmm`` in ``aten::addmm``, ``torch.ops.aten.convolution.default`` in
    ``aten::convolution``.
    """
    if not launch.extern:
        return launch.kernel
    match = re.fullmatch(r"(?:extern_kernels|aten)\.(\w+)", launch.kernel)
    if match:
        return f"aten::{match[1]}"
    match = re.fullmatch(r"torch\.ops\.(\w+)\.(\w+)(?:\.\w+)?", launch.kernel)
    return f"{match[1]}::{match[2]}" if match else launch.kernel


def claims_by_operator(rows: Sequence[KernelRow], trace: RawTrace, provenance: Provenance) -> dict[int, Claim]:
    """Claims for rows whose launch lies in an operator, by the index of the row in ``rows``.

    Within one iteration, the outermost operators whose name is that of some launch are compared with the
    launches in wrapper order. Where both sequences are equal, the n-th operator is the n-th launch. Where
    they are not, an operator is claimed only if its name occurs once on both sides. The rest stays
    unclaimed: the nearest operator is no evidence.
    """
    expected = [operator_name(launch) for launch in provenance.launches]
    known = set(expected)
    wrapper_count = Counter(expected)
    position = {name: i for i, name in enumerate(expected)}
    nesting = Nesting(trace.ops)
    claims: dict[int, Claim] = {}
    for iteration, members in _by_iteration(rows).items():
        actual = _operators(trace, nesting, {rows[r].thread for r in members}, iteration, known)
        names = [trace.ops[i].name for i in actual]
        seen = Counter(names)
        launch_of: dict[int, Launch] = {}
        if names == expected:
            launch_of = dict(zip(actual, provenance.launches, strict=True))
        else:
            for i, name in zip(actual, names, strict=True):
                if seen[name] == 1 and wrapper_count[name] == 1:
                    launch_of[i] = provenance.launches[position[name]]
        exact = names == expected
        for r in members:
            row = rows[r]
            if row.operator_index < 0:
                continue
            found = launch_of.get(row.operator_index)
            if found is not None:
                how = (
                    "the sequence of operators equals that of the launches"
                    if exact
                    else "its operator's name is unique"
                )
                claims[r] = Claim(found.key, how)
            elif row.operator in known:
                claims[r] = Claim("", f"several launches are named {row.operator} and the sequences differ")
            else:
                claims[r] = Claim("", f"no launch of this graph is named {row.operator}")
    return claims


def claims_by_kernel_name(rows: Sequence[KernelRow], provenance: Provenance) -> dict[int, Claim]:
    """Claims for rows with no operator around their launch, such as the kernels of a CUDA graph's replay.

    The rows must be in order of start. Those of one launch (one correlation id) are taken if they ran on
    one stream and the generated kernels among them are exactly the wrapper's, in its order: each is then
    its launch, and the library kernels between two of them belong to the library call between these two in
    the wrapper, if there is exactly one.
    """
    generated = {launch.kernel for launch in provenance.launches if not launch.extern}
    launches = provenance.launches
    anchors = [i for i, launch in enumerate(launches) if not launch.extern]
    claims: dict[int, Claim] = {}
    groups: dict[object, list[int]] = {}
    for i, row in enumerate(rows):
        if row.operator_index < 0 and row.launch_ns is not None:
            groups.setdefault((row.iteration, row.kernel.correlation), []).append(i)
    for members in groups.values():
        if len({(rows[i].kernel.device, rows[i].kernel.stream) for i in members}) != 1:
            continue
        found = [n for n, i in enumerate(members) if rows[i].kernel.name in generated]
        if not found or [rows[members[n]].kernel.name for n in found] != [launches[a].kernel for a in anchors]:
            continue
        edges = [(-1, -1), *zip(found, anchors, strict=True), (len(members), len(launches))]
        for (row_from, launch_from), (row_to, launch_to) in pairwise(edges):
            between = launches[launch_from + 1 : launch_to]
            for n in range(row_from + 1, row_to):
                if len(between) == 1:
                    claims[members[n]] = Claim(between[0].key, "the only library call between two generated kernels")
                else:
                    claims[members[n]] = Claim("", f"one of {len(between)} library calls between two generated kernels")
            if row_to < len(members):
                claims[members[row_to]] = Claim(
                    launches[launch_to].key, "the sequence of generated kernels equals the wrapper's"
                )
    return claims


def _by_iteration(rows: Iterable[KernelRow]) -> dict[int, list[int]]:
    grouped: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        grouped.setdefault(row.iteration, []).append(i)
    return grouped


def _operators(
    trace: RawTrace, nesting: Nesting, threads: set[int | str | None], iteration: int, known: set[str]
) -> list[int]:
    """Indices of the outermost operators of one iteration that bear a launch's name, in order of time."""
    window = next((op for number, op in trace.iteration_ranges if number == iteration), None)
    found = []
    for i, op in enumerate(trace.ops):
        if op.name not in known or op.thread not in threads or not is_operator(op):
            continue
        if window is not None and not window.start_ns <= op.start_ns < window.end_ns:
            continue
        if not any(is_operator(trace.ops[j]) for j in nesting.around(i)):
            found.append(i)
    return sorted(found, key=lambda i: trace.ops[i].start_ns)
