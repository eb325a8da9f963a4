"""What the notes beside the recorded files say of each nsys export, against what the reader makes of it."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from profiler_core.attribute.correlation import link
from profiler_core.attribute.enclosure import enclosing
from profiler_core.collect import nsys
from profiler_core.trace import Trace

WSL = "corpus/nsys/nsys2026.1_schema3.24.14_rtx3080_wsl.sqlite"
TWO_GPUS = "corpus/nsys/nsys2026.2_schema3.25.0_h100x2_mfu_after.sqlite"
SYNTHETIC = "corpus/nsys/synthetic_minimal_schema3.24.14.sqlite"
SDPA = "captures/h200_sdpa/nsys.sqlite"
NODE_LEVEL = "captures/h200_graph/nsys_node.sqlite"
GRAPH_LEVEL = "captures/h200_graph/nsys_graph_level.sqlite"


@cache
def read(path: Path) -> Trace:
    return nsys.read(path)


def kernels_of(trace: Trace) -> pd.DataFrame:
    return trace.kernels[trace.kernels["kind"] == "kernel"]


def launched(trace: Trace) -> pd.DataFrame:
    """Kernels with the call of the same process and correlation id: ``*_call`` columns."""
    return kernels_of(trace).merge(trace.calls, on=["process", "correlation"], suffixes=("", "_call"))


def innermost(trace: Trace) -> np.ndarray[Any, Any]:
    """Row in ``trace.ranges`` around the launch of each launched kernel, -1 where there is none."""
    ranges, launches = trace.ranges, launched(trace)
    on, at = ((frame["process"].to_numpy() << 24) | frame["thread"].to_numpy() for frame in (ranges, launches))
    times = (ranges["start_ns"].to_numpy(), ranges["end_ns"].to_numpy())
    return enclosing(*times, on, launches["start_ns_call"].to_numpy(), at)


def first_kernel(trace: Trace) -> dict[str, Any]:
    row = kernels_of(trace).iloc[0]
    return {
        "name": row["name"][:60],
        "dur_ns": row["duration_ns"],
        "dev": row["device"],
        "stream": row["stream"],
        "corr": row["correlation"],
        "grid": [row[f"grid_{axis}"] for axis in "xyz"],
        "block": [row[f"block_{axis}"] for axis in "xyz"],
    }


def longest_kernel(trace: Trace) -> list[Any]:
    groups = kernels_of(trace).groupby("name")["duration_ns"].agg(["count", "sum"])
    groups = groups.sort_values("sum", ascending=False, kind="stable")  # of equal ones, the first by name
    return [groups.index[0][:60], *groups.iloc[0].tolist()]


def streams_of(trace: Trace) -> Counter[tuple[int, int]]:
    kernels = kernels_of(trace)
    return Counter(zip(kernels["device"], kernels["stream"], strict=True))


def ambiguous(trace: Trace) -> int:
    """Kernels whose correlation id, taken alone, is that of several calls."""
    return int((kernels_of(trace)["correlation"].map(Counter(trace.calls["correlation"])) > 1).sum())


GOT: Mapping[str, Callable[[Trace], Any]] = {
    "tool": lambda trace: trace.meta["tool"],
    "schema": lambda trace: trace.meta["schema"],
    "gpus": lambda trace: [[index, device["name"]] for index, device in trace.meta["devices"].items()],
    "kernels": lambda trace: len(kernels_of(trace)),
    "total_ns": lambda trace: int(kernels_of(trace)["duration_ns"].sum()),
    "names": lambda trace: kernels_of(trace)["name"].nunique(),
    "streams": lambda trace: [[device, stream, count] for (device, stream), count in sorted(streams_of(trace).items())],
    "processes": lambda trace: kernels_of(trace)["process"].nunique(),
    "graph_kernels": lambda trace: int((kernels_of(trace)["graph"] != 0).sum()),
    "copies": lambda trace: int((trace.kernels["kind"] == "memcpy").sum()),
    "first": first_kernel,
    "longest": longest_kernel,
    "calls": lambda trace: len(trace.calls),
    "matched_by_correlation": lambda trace: int(
        kernels_of(trace)["correlation"].isin(trace.calls["correlation"]).sum()
    ),
    "matched": lambda trace: len(launched(trace)),
    "ambiguous": ambiguous,
    "launches": lambda trace: dict(
        Counter(name for name in trace.calls["name"] if name.startswith(("cudaLaunchK", "cuLaunchK")))
    ),
    "ranges": lambda trace: Counter(trace.ranges["category"].replace({"op": "push/pop", "annotation": "push/pop"})),
    "outside_ranges": lambda trace: len(kernels_of(trace)) - int((innermost(trace) >= 0).sum()),
    "captures": lambda trace: len(trace.captures),
    "partial": lambda trace: [text.partition(": ")[2].partition(" were")[0] for text in trace.partial],
}
EXPECTED: dict[str, dict[str, Any]] = {
    WSL: {
        "tool": "nsys 2026.1.1.204",
        "schema": "3.24.14",
        "gpus": [[0, "NVIDIA GeForce RTX 3080"]],
        "kernels": 2,
        "total_ns": 4129,
        "names": 2,
        "streams": [[0, 7, 2]],
        "processes": 1,
        "graph_kernels": 0,
        "copies": 1,
        "first": {
            "name": "void at::native::vectorized_elementwise_kernel<(int)4, at::n",
            **{"dur_ns": 1440, "dev": 0, "stream": 7, "corr": 143, "grid": [1, 1, 1], "block": [128, 1, 1]},
        },
        "longest": ["void at::native::reduce_kernel<(int)512, (int)1, at::native:", 1, 2689],
        "calls": 9,
        "matched_by_correlation": 2,
        "matched": 2,
        "ambiguous": 0,
        "launches": {"cudaLaunchKernel_v7000": 2},
        "ranges": {},
        "outside_ranges": 2,
        "captures": 0,
        "partial": [],
    },
    TWO_GPUS: {
        "tool": "nsys 2026.2.1.210",
        "schema": "3.25.0",
        "gpus": [],
        "kernels": 3587,
        "total_ns": 488835406,
        "names": 27,
        "streams": [[0, 7, 1793], [1, 15, 1794]],
        "processes": 2,
        "graph_kernels": 0,
        "copies": 904,
        "first": {
            "name": "void at::native::elementwise_kernel<(int)128, (int)4, void a",
            **{"dur_ns": 65120, "dev": 1, "stream": 15, "corr": 2630890, "grid": [46800, 1, 1], "block": [128, 1, 1]},
        },
        "longest": ["void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<(int)12", 60, 240755667],
        "calls": 6682,
        "matched_by_correlation": 3579,
        "matched": 3577,
        "ambiguous": 285,
        "launches": {"cuLaunchKernelEx": 360, "cudaLaunchKernel_v7000": 3220},
        "ranges": {"push/pop": 17113},
        "outside_ranges": 10,
        "captures": 0,
        "partial": [],
    },
    SYNTHETIC: {
        "tool": "nsys 2026.1.1.204",
        "schema": "3.24.14",
        "gpus": [[0, "NVIDIA H100 80GB HBM3"]],
        "kernels": 20,
        "total_ns": 4_000_000_000,
        "names": 2,
        "streams": [[0, 7, 20]],
        "copies": 0,
        "first": {
            "name": "void at::native::elementwise_add<float>(float*, float*)",
            **{"dur_ns": 200000000, "dev": 0, "stream": 7, "corr": 100, "grid": [128, 1, 1], "block": [256, 1, 1]},
        },
        "longest": ["void at::native::elementwise_add<float>(float*, float*)", 10, 2_000_000_000],
        "calls": 20,
        "matched_by_correlation": 20,
        "launches": {"cudaLaunchKernel": 20},
        "ranges": {},
        "partial": [],
    },
    SDPA: {
        "schema": "3.20.3",
        "gpus": [[0, "NVIDIA H200"]],
        "kernels": 56,
        "total_ns": 1_930_967,
        "matched": 56,
        "outside_ranges": 34,
        "graph_kernels": 0,
        "partial": [],
    },
    NODE_LEVEL: {
        "gpus": [[0, "NVIDIA H200"]],
        "kernels": 136,
        "total_ns": 811_263,
        "graph_kernels": 105,
        "matched": 136,
        # 64 events: 21 nodes captured, 22 instantiated, of which 21 are clones, written twice
        "captures": 43,
        "partial": [],
    },
    GRAPH_LEVEL: {
        "gpus": [[0, "NVIDIA H200"]],
        "kernels": 31,
        "total_ns": 175_360,
        "graph_kernels": 0,
        "captures": 0,
        "partial": ["5 replays of CUDA graphs"],
    },
}


@pytest.mark.parametrize(
    ("file", "what", "expected"),
    [(file, what, value) for file, values in EXPECTED.items() for what, value in values.items()],
    ids=[f"{Path(file).parent.name}-{Path(file).stem}-{what}" for file, values in EXPECTED.items() for what in values],
)
def test_the_recorded_files_hold_what_their_notes_say(shared: Path, file: str, what: str, expected: Any) -> None:
    assert GOT[what](read(shared / file)) == expected


@pytest.mark.parametrize("file", [file for file, values in EXPECTED.items() if "matched" in values])
def test_linking_finds_the_launches_that_the_notes_count(shared: Path, file: str) -> None:
    trace = read(shared / file)
    kernel = (trace.kernels["kind"] == "kernel").to_numpy()
    links = link(trace)
    assert (links.call[kernel] >= 0).sum() == EXPECTED[file]["matched"]
    if "outside_ranges" in EXPECTED[file]:
        assert (links.range[kernel] < 0).sum() == EXPECTED[file]["outside_ranges"]


def test_the_innermost_ranges_of_the_two_gpu_file_are_those_of_its_notes(shared: Path) -> None:
    trace = read(shared / TWO_GPUS)
    with sqlite3.connect(f"file:{shared / TWO_GPUS}?mode=ro&immutable=1", uri=True) as connection:
        rows = connection.execute(
            "SELECT (globalTid >> 24) & 0xFFFFFF, start, COALESCE(text, value) FROM NVTX_EVENTS "
            "LEFT JOIN StringIds ON id = textId"
        )
        text = {(process, start): whole for process, start, whole in rows}
    ranges = trace.ranges.iloc[[row for row in innermost(trace) if row >= 0]]
    counts = Counter(text[key] for key in zip(ranges["process"], ranges["start_ns"], strict=True))
    assert counts.most_common(1) == [("ncclGroupEnd", 60)]
    for number in (994117, 994142, 994222):
        assert counts[f"aten::copy_, op_id = {number}"] == 2
    for number in (994236, 993864):
        assert counts[f"aten::cat, op_id = {number}"] == 2
    assert max(count for name, count in counts.items() if name != "ncclGroupEnd") == 2


def test_the_measured_calls_of_the_sdpa_capture_are_eleven_kernels_each_in_their_operators(shared: Path) -> None:
    trace = read(shared / SDPA)
    inside = innermost(trace)
    kernels = launched(trace)[inside >= 0]
    assert kernels["duration_ns"].sum() == 1_930_967 - 1_165_243
    one_call = (
        ["triton_per_fused_native_layer_norm_0"]
        + ["aten::mm"] * 6
        + ["aten::_efficient_attention_forward"]
        + ["aten::mm"] * 2
        + ["triton_per_fused__unsafe_view_add_native_layer_norm_1"]
    )
    assert list(trace.ranges["name"].to_numpy()[inside[inside >= 0]]) == one_call * 2


def test_replays_are_five_launches_of_the_same_twenty_one_nodes(shared: Path) -> None:
    trace = read(shared / NODE_LEVEL)
    kernels = kernels_of(trace)
    replays = kernels[kernels["graph"] != 0].groupby("correlation")["graph_node"].apply(list)
    assert replays.tolist() == [list(range(21))] * 5
    captures = trace.captures
    graph = kernels.loc[kernels["graph"] != 0, "graph"].unique().tolist()
    clones = captures[captures["graph"].isin(graph) & (captures["original_graph"] != 0)]
    originals = set(zip(clones["original_graph"], clones["original_node"], strict=True))
    recorded = captures[captures["original_graph"] == 0]
    assert sorted(clones["graph_node"]) == list(range(21))
    assert originals <= set(zip(recorded["graph"], recorded["graph_node"], strict=True))


def test_the_graph_level_capture_says_how_much_it_hides_and_how_to_record_it(shared: Path) -> None:
    (lost,) = read(shared / GRAPH_LEVEL).partial
    assert "611 us" in lost
    assert "--cuda-graph-trace=node" in lost
