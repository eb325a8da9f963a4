"""Kernels of a CUDA graph's replay: one launch for all of them, so each is told by what was recorded, or by order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from profiler_core.attribute.fusion_map import DIFFERENT, EQUAL, Claim, aligned
from profiler_core.families import classify

if TYPE_CHECKING:
    import numpy as np

    from profiler_core.collect.provenance import Launch, Provenance
    from profiler_core.trace import Trace

_GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch")

# Kernel families that one kind of library call runs, by what its name holds. Others are told apart by no name.
_FAMILY_OF_CALL = (
    (re.compile(r"attention|sdpa|flash"), "attention"),
    (re.compile(r"convolution|conv\d?d"), "convolution"),
    (re.compile(r"mm\b|matmul|linear"), "gemm"),
)


def is_graph_launch(api: str) -> bool:
    """Whether a runtime or driver call launches a whole graph."""
    return bool(_GRAPH_LAUNCH.match(api))


def captured_at(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(process, thread, time in ns) at which each kernel's graph node was recorded; thread -1 where not known.

    A replay runs a clone of the recorded graph, so a node is followed through its clones to the first.
    """
    import numpy as np

    kernels, captures = trace.kernels, trace.captures
    count = len(kernels)
    process, thread = np.zeros(count, dtype="int64"), np.full(count, -1, dtype="int64")
    time = np.full(count, -1, dtype="int64")
    nodes = kernels["graph_node"].to_numpy()
    graphs = kernels["graph"].to_numpy()
    in_graph = np.flatnonzero((graphs != 0) | (nodes != 0))
    if not len(captures) or not len(in_graph):
        return process, thread, time
    recorded: dict[tuple[int, int, int], tuple[int, int]] = {}
    origin: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    columns = ("process", "graph", "graph_node", "original_graph", "original_node", "thread", "time_ns")
    for of, graph, number, first_graph, first_number, by, at in zip(
        *(captures[name].tolist() for name in columns), strict=True
    ):
        if first_graph:
            origin[of, graph, number] = (of, first_graph, first_number)
        else:
            recorded.setdefault((of, graph, number), (by, at))
    processes = kernels["process"].to_numpy()
    for i in in_graph.tolist():
        node = (int(processes[i]), int(graphs[i]), int(nodes[i]))
        seen = set()
        while node in origin and node not in seen:
            seen.add(node)
            node = origin[node]
        if node in recorded:
            process[i] = node[0]
            thread[i], time[i] = recorded[node]
    return process, thread, time


def claims_by_order(names: Sequence[str], provenance: Provenance) -> list[Claim]:
    """One claim for each kernel of one replay on one stream, given by name in order of start.

    The generated kernels are aligned with the wrapper's: where both are the same sequence, the n-th is the n-th launch.
    The library kernels between two of them belong to the library calls between these two in the wrapper: to the only
    one; or, where calls and kernels of recognisable families alternate in the same way, run by run, if a run has one
    call or as many kernels as calls (each call runs at least one). Everything else stays unclaimed.
    """
    launches = provenance.launches
    generated = {launch.kernel for launch in launches if not launch.extern}
    anchors = [i for i, launch in enumerate(launches) if not launch.extern]
    found = [n for n, name in enumerate(names) if name in generated]
    ran, expected = [names[n] for n in found], [launches[a].kernel for a in anchors]
    pairs = [(found[i], anchors[j]) for i, j in aligned(ran, expected).items()]
    if not pairs:
        return [Claim("", "the replayed kernels are not the wrapper's sequence")] * len(names)
    claims = [Claim("", "the sequences differ, and no launch is certain to be this one")] * len(names)
    for n, anchor in pairs:
        claims[n] = Claim(launches[anchor].key, EQUAL if ran == expected else DIFFERENT)
    if 2 * len(pairs) < max(len(ran), len(expected)):
        return claims  # mostly other code: what lies between the few that are known may be anything
    for (row_from, launch_from), (row_to, launch_to) in pairwise([(-1, -1), *pairs, (len(names), len(launches))]):
        rows = [n for n in range(row_from + 1, row_to) if names[n] not in generated]
        calls = [launch for launch in launches[launch_from + 1 : launch_to] if launch.extern]
        for n, claim in zip(rows, _between([names[n] for n in rows], calls), strict=True):
            claims[n] = claim
    return claims


def _between(names: Sequence[str], calls: Sequence[Launch]) -> list[Claim]:
    """Claims for the library kernels between two generated ones, of which ``calls`` are the library calls there."""
    if len(calls) == 1:
        return [Claim(calls[0].key, "the only library call between two generated kernels")] * len(names)
    unknown = [Claim("", f"one of {len(calls)} library calls between two generated kernels")] * len(names)
    kernel_runs = [
        (family, list(run)) for family, run in groupby(range(len(names)), lambda n: classify(names[n]).family)
    ]
    call_runs = [(family, list(run)) for family, run in groupby(calls, _family)]
    if [family for family, _ in kernel_runs] != [family for family, _ in call_runs] or "" in {f for f, _ in call_runs}:
        return unknown
    claims = unknown
    for (family, rows), (_, run) in zip(kernel_runs, call_runs, strict=True):
        if len(run) not in (1, len(rows)):
            continue
        for place, n in enumerate(rows):
            call = run[0] if len(run) == 1 else run[place]
            claims[n] = Claim(call.key, f"in order among the {family} kernels between two generated kernels")
    return claims


def _family(launch: Launch) -> str:
    return next((family for pattern, family in _FAMILY_OF_CALL if pattern.search(launch.kernel)), "")
