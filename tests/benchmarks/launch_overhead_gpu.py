"""What a call of this project's kernels costs on the CPU: launched through Triton, and again without its binding.

    python tests/benchmarks/launch_overhead_gpu.py --json results/h200/launch_overhead.json

Each operator is called as compiled code calls it, CALLS times without waiting for the GPU, in both ways in turns:
microseconds a call, the median of ROUNDS, and the ratio of the same rounds. Beside them, what one launch of a kernel by
Inductor's own code costs: a pointwise sum of small tensors, compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

ROUNDS, CALLS = 25, 40  # fewer calls than the driver queues before it makes the CPU wait


def operators() -> dict[str, Callable[[], Any]]:
    """GPT-2's product of 512 x 768 x 2304 with bias and its attention, batch 4; a 3x3 convolution of 64 channels."""
    from passes.kernels import launch, tiling
    from passes.split_products import split

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    from passes import split_precision_attention, split_precision_conv  # noqa: F401 - they define operators

    ops = torch.ops.fxopt
    a, b, bias = split(random(512, 768)), split(random(2304, 768)), random(2304)
    hopper = launch.has_hopper(torch.device("cuda", torch.cuda.current_device()))
    tile = list(tiling.HOPPER_TILES[0] if hopper else tiling.TILES[0])
    q, k, v = random(4, 128, 3, 12, 64).permute(2, 0, 3, 1, 4)
    x, w = split(random(16, 32, 32, 64)), split(random(64, 9 * 64))
    return {
        "split_gemm": lambda: ops.split_gemm(*a, *b, bias, tile),
        "split_attention_split": lambda: ops.split_attention_split(q, k, v, None, 0.125, True),
        "split_conv": lambda: ops.split_conv(*x, *w, None, [3, 3], [1, 1], [1, 1], [1, 1]),
    }


def microseconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / CALLS * 1e6


def compare(call: Callable[[], Any]) -> dict[str, float]:
    from passes.kernels import direct

    found: dict[str, list[float]] = {"through_triton_us": [], "again_us": []}
    for _ in range(3):
        call()
    for _ in range(ROUNDS):
        with mock.patch.object(direct, "known", lambda key: None):
            found["through_triton_us"].append(microseconds(call))
        found["again_us"].append(microseconds(call))
    ratio = statistics.median(a / b for a, b in zip(*found.values(), strict=True))
    return {name: round(statistics.median(values), 2) for name, values in found.items()} | {"ratio": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--json", type=Path, help="file for the results")
    path: Path | None = parser.parse_args().json
    if not torch.cuda.is_available():
        parser.error("needs a GPU: it launches kernels written in Triton")
    from profiler_core.environment import environment

    rows = {}
    with torch.no_grad():
        for name, call in operators().items():
            rows[name] = compare(call)
            print(f"{name:24s} {rows[name]}")
        small = [torch.randn(1024, device="cuda") for _ in range(2)]
        added = torch.compile(lambda: small[0] + small[1] * 2)
        added()
        times = [microseconds(added) for _ in range(ROUNDS)]
    print(f"{'one kernel by Inductor':24s} {statistics.median(times):.2f} us, with the guards of its call")
    if path is not None:
        data = {"environment": environment(torch.device("cuda", 0)), "command": " ".join(sys.argv), "rows": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**data, "inductor_us": round(statistics.median(times), 2)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
