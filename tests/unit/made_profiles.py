"""Profiles made by hand, for the tests of what is written from them."""

from __future__ import annotations

import math
from typing import Any

from profiler_core.collect.provenance import Launch
from profiler_core.profiles import KERNEL_COLUMNS, NODE_COLUMNS, Profile, frame

HOSTILE = {
    "long": "x" * 5000,
    "quotes": "k\"'`\\",
    "script": "</script><script>alert(1)</script>",
    "lines": "a\nb\r\nc\u2028d\x1ee",
    "semicolons": "a;b;c 12",
    "right to left": "\u202eשלום\u202c 3",
    "lone surrogate": "k\ud800l",
    "control": "a\x00b\x07",
    "percent": "50%3B",
}


def empty(columns: dict[str, str]) -> dict[str, Any]:
    nothing = {"object": "", "Int64": None, "int64": 0, "float64": math.nan, "bool": False}
    return {name: nothing[dtype] for name, dtype in columns.items()}


def kernel(name: str, start: int, duration: int, **fields: Any) -> dict[str, Any]:
    launched = {"thread": 77, "launch_ns": start - 5_000, "correlation": start % 1000 + 1, "process": 4242}
    defaults = empty(KERNEL_COLUMNS) | {
        "kind": "kernel", "device": "cuda:0", "stream": 7, "grid": (2, 1, 1), "block": (128, 1, 1), "registers": 32,
        "shared_memory": 1024, "iteration": 0, "operator": "aten::mm", "top_operator": "aten::matmul", "graph": "0/0",
        "launch": "extern_kernels.mm:1", "nodes": ("mm",), "method": "correlation", "confidence": "high",
        "operator_method": "correlation", "evidence": (), "family": "gemm", "precision": "fp32", "opaque": True,
    }  # fmt: skip
    return {**defaults, **launched, "name": name, "start_ns": start, "duration_ns": duration, **fields}


def node(name: str, **fields: Any) -> dict[str, Any]:
    defaults = empty(NODE_COLUMNS) | {
        "graph": "0/0", "kind": "node", "target": f"aten.{name}.default", "shape": (2, 3), "dtype": "float32",
        "file": "/home/alice/net/model.py", "line": 12, "module_path": "h.0.attn", "pre_grad": (f"pre_{name}",),
        "kernels": 1, "time_ns": 1.5, "group_time_ns": 1.5, "window_ns": 3, "share": 0.5, "estimate": False,
        "fused_with": (), "flops": 24.0, "bytes": None, "launches": ("extern_kernels.mm:1",), "opaque": True,
    }  # fmt: skip
    return {**defaults, "node": name, **fields}


def build(kernels: list[dict[str, Any]], nodes: list[dict[str, Any]] | None = None) -> Profile:
    launches = (Launch("extern_kernels.mm", 1, ("mm",), True, 24.0, None, "0/0"),)
    listed = [node("mm"), node("add", flops=None, bytes=7.0)] if nodes is None else nodes
    return Profile(
        frame(kernels, KERNEL_COLUMNS),
        frame(listed, NODE_COLUMNS),
        {"device_name": "NVIDIA H200", "clocks": {"sm": 1980}, "driver": None},
        2,
        math.nan,
        launches,
        ("a note",),
    )


T = 1_700_000_000_123_456_789  # ns since 1970: past what a float holds


def two_calls() -> Profile:
    """Two calls of a product and a fused kernel on another stream, a copy of which nothing is known, one warm-up."""
    rows = [
        kernel("gemm_warm_up", T, 1_001, iteration=-1),
        kernel("gemm", T + 10_000, 1_001),
        kernel("fused", T + 20_000, 2_003, stream=9, nodes=("mm", "add"), operator="", registers=None, grid=None),
        kernel("gemm", T + 30_000, 1_007, iteration=1, process=4242),
        kernel(
            "Memcpy HtoD", T + 40_000, 5, kind="memcpy", nodes=(), method="none", confidence="none", iteration=1,
            reason="no launch in the trace", launch="", operator="", launch_ns=None, thread=None, correlation=None,
        ),
    ]  # fmt: skip
    made = build(rows)
    made.kernels["dram_read_bytes"] = [math.nan, 1.5e6, math.nan, math.inf, math.nan]
    made.kernels["theoretical_occupancy"] = [0.5, 0.5, math.nan, 0.5, math.nan]
    made.kernels["labels"] = [(), ("memory_bound", "l2_bound"), (), (), ()]
    return made
