"""Large made-up traces: nested and overlapping ranges on several threads, launches in them, kernels on streams."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profiler_core.trace import Trace

PROCESS = 4711
THREADS = 8
STREAMS = 6
# The share of the ranges at each depth: an operator tree is widest in the middle.
LEVELS = (0.08, 0.16, 0.24, 0.24, 0.18, 0.10)
SPAN_SHARE = 0.02  # NVTX start/end ranges, which overlap anything
OVERRUN_SHARE = 0.02  # ranges that end after the range they began in
NO_LAUNCH_SHARE = 0.02
GRAPH_SHARE = 0.10  # kernels that graph launches account for
GRAPH_SIZE = 200
LOST_FROM = 2 * 10**9  # correlation ids from here on belong to kernels without a launch
SLOT_NS = 20_000  # of a range at depth 0


def make_trace(kernels: int, ranges: int, seed: int = 0, *, external_ids: bool = True) -> Trace:
    """A trace of ``kernels`` kernels and ``ranges`` ranges, made in whole-array steps.

    Every launch lies in a range, mostly one that holds no other. ``external_ids``: kernels carry the id of that range.
    """
    random = np.random.default_rng(seed)
    spans = int(ranges * SPAN_SHARE)
    table, leaves = _nested(random, ranges - spans)
    horizon = int(table["end_ns"].max())
    begins = random.integers(0, horizon, spans)
    spans_table = {
        "name": np.full(spans, "phase", dtype=object),
        "category": np.full(spans, "span", dtype=object),
        "thread": random.integers(0, THREADS, spans),
        "start_ns": begins,
        "end_ns": begins + random.integers(0, horizon // 100 + 2, spans),
        "external_id": np.zeros(spans, np.int64),
    }
    calls, activity = _launches(random, kernels, table, leaves, external_ids)
    both = {name: np.concatenate([table[name], spans_table[name]]) for name in table}
    both["process"] = np.full(ranges, PROCESS)
    return Trace.build(kernels=activity, calls=calls, ranges=both)


def _nested(random: np.random.Generator, count: int) -> tuple[dict[str, NDArray], NDArray]:
    """Ranges nested to the depth of LEVELS, and the rows of those that hold no other."""
    sizes = [max(1, int(count * share)) for share in LEVELS]
    sizes[2] += count - sum(sizes)
    row = np.arange(sizes[0])
    thread = row % THREADS
    start = row // THREADS * SLOT_NS + random.integers(0, SLOT_NS // 10, sizes[0])
    end = start + random.integers(SLOT_NS // 2, SLOT_NS * 8 // 10, sizes[0])
    threads, starts, ends = [thread], [start], [end]
    holds = [np.zeros(size, bool) for size in sizes]
    for depth, size in enumerate(sizes[1:], 1):
        parent = np.sort(random.integers(0, sizes[depth - 1], size))
        holds[depth - 1][parent] = True
        children = np.bincount(parent, minlength=sizes[depth - 1])
        place = np.arange(size) - np.concatenate([[0], np.cumsum(children)])[parent]
        width = (ends[-1] - starts[-1])[parent] // (children[parent] + 1)
        start = starts[-1][parent] + place * width + width // 4
        threads.append(threads[-1][parent])
        starts.append(start)
        ends.append(start + width * 3 // 4)
    start, end, thread = np.concatenate(starts), np.concatenate(ends), np.concatenate(threads)
    overrun = random.random(count) < OVERRUN_SHARE
    end = np.where(overrun, end + SLOT_NS // 3, end)
    depth = np.repeat(np.arange(len(LEVELS)), sizes)
    names = np.array(["Torch-Compiled Region: 0/0", "aten::linear", "aten::addmm", "step", "aten::mm", "triton_poi_0"])
    table = {
        "name": names.astype(object)[depth],
        "category": np.where(depth == 3, "annotation", "op").astype(object),
        "thread": thread,
        "start_ns": start,
        "end_ns": end,
        "external_id": 1 + random.permutation(count),
    }
    return table, np.flatnonzero(~np.concatenate(holds))


def _launches(
    random: np.random.Generator, kernels: int, table: dict[str, NDArray], leaves: NDArray, external_ids: bool
) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
    graph_launches = int(kernels * GRAPH_SHARE) // GRAPH_SIZE
    launches = kernels - graph_launches * (GRAPH_SIZE - 1)
    inside = random.choice(leaves, launches)
    length = (table["end_ns"] - table["start_ns"])[inside]
    begins = table["start_ns"][inside] + (random.random(launches) * length).astype(np.int64)
    correlation = 10**9 + random.permutation(launches)
    call = np.repeat(np.arange(launches), np.where(np.arange(launches) < graph_launches, GRAPH_SIZE, 1))
    calls = {
        "name": np.where(np.arange(launches) < graph_launches, "cudaGraphLaunch", "cudaLaunchKernel").astype(object),
        "process": np.full(launches, PROCESS),
        "thread": table["thread"][inside],
        "start_ns": begins,
        "end_ns": begins + 3,
        "correlation": correlation,
    }
    lost = random.random(kernels) < NO_LAUNCH_SHARE
    ids = table["external_id"][inside][call] if external_ids else np.zeros(kernels, np.int64)
    activity = {
        "name": np.array([f"kernel_{i}" for i in range(50)], dtype=object)[random.integers(0, 50, kernels)],
        "process": np.full(kernels, PROCESS),
        "device": np.zeros(kernels, np.int64),
        "stream": random.integers(0, STREAMS, kernels),
        "start_ns": begins[call] + random.integers(5, 10**6, kernels),
        "duration_ns": random.integers(500, 50_000, kernels),
        "correlation": np.where(lost, LOST_FROM + np.arange(kernels), correlation[call]),
        "external_id": np.where(lost, 0, ids),
    }
    return calls, activity
