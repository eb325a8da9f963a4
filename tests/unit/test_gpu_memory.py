"""What tools/gpu_memory.py makes of its rows; what is in them is measured on a GPU alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import gpu_memory

KEPT = ["split_precision_gemm", "cuda_graphs"]


def row(kind: str, allocated: int, **other: Any) -> dict[str, Any]:
    same = {"rng_same": True, "parameters_same": True, "source": "plan" if kind == "planned" else "tuned"}
    return {"kind": kind, "precision": "fp32", "allocated": allocated, "passes": KEPT, **same, **other}


@pytest.mark.parametrize(
    ("tuned", "planned", "said"),
    [
        (row("tuned", 1019), row("planned", 1000), []),
        (row("tuned", 1021), row("planned", 1000), ["tuned fp32: 21 bytes more than the plan's process"]),
        (row("tuned", 1000, rng_same=False), row("planned", 1000), ["tuned fp32: random state or parameters"]),
        (row("tuned", 1000), row("planned", 1000, parameters_same=False), ["planned fp32: random state or parameters"]),
        (row("tuned", 1000), row("planned", 1000, source="tuned"), ["planned fp32: not as planned: tuned"]),
        (row("tuned", 1000), row("planned", 1000, passes=[]), ["planned fp32: not as planned: plan, []"]),
    ],
)
def test_what_does_not_hold_is_said(tuned, planned, said):
    found = gpu_memory.problems([row("inductor", 900, passes=None), tuned, planned])
    assert len(found) == len(said)
    assert all(one.startswith(start) for one, start in zip(found, said, strict=True)), found
