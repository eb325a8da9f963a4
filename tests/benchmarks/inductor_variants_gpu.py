"""The variants of Inductor's kernels: as Inductor times them, as fxopt does, and what they take in a CUDA graph.

    python tests/benchmarks/inductor_variants_gpu.py --json results/h200/inductor_variants.json

For each kernel that comes in several block sizes: microseconds of each, median of ROUNDS rounds by the first two ways,
and of one launch among LAUNCHES in a CUDA graph, which launches without the CPU. `kept` is the variant that a way would
keep; `lost` how much longer it takes in the graph than the fastest there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F

ROUNDS, LAUNCHES = 3, 40


def cases() -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    """What leaves a product in GPT-2 small and in an MLP, and is split for the next; layer norms; plain sums."""
    from passes.split_products import split

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    def gelu(x: torch.Tensor, bias: torch.Tensor) -> Any:
        return split(F.gelu(x + bias, approximate="tanh"), 128)

    def relu(x: torch.Tensor, bias: torch.Tensor) -> Any:
        return split(torch.relu(x + bias), 128)

    def norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        both = x + y
        return both, *split(F.layer_norm(both, (both.shape[-1],), weight, bias), 128)

    def plain_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        return F.layer_norm(x, (x.shape[-1],), weight, bias)

    return {
        "gelu+split 512x3072": (gelu, (random(512, 3072), random(3072))),
        "relu+split 256x2048": (relu, (random(256, 2048), random(2048))),
        "relu+split 8192x2048": (relu, (random(8192, 2048), random(2048))),
        "norm+split 512x768": (norm, (random(512, 768), random(512, 768), random(768), random(768))),
        "norm 512x768": (plain_norm, (random(512, 768), random(768), random(768))),
        "norm 8192x1024": (plain_norm, (random(8192, 1024), random(1024), random(1024))),
        "sum 512x768": (lambda x: x.sum(0), (random(512, 768),)),
    }


def in_a_graph(launcher: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launcher(*args, **kwargs, stream=torch.cuda.current_stream().cuda_stream)
    for _ in range(12):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / LAUNCHES)
    return statistics.median(times)


def measure(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """One kernel's variants, each by the three ways."""
    from fxopt.torch_api import variants

    def queued(*args: Any, **kwargs: Any) -> float:
        variants._marked.add(kernel)
        try:
            return float(kernel.bench(*args, **kwargs))
        finally:
            variants._marked.discard(kernel)

    variants._watch()
    ways: dict[str, Callable[..., float]] = {
        "inductor": kernel.bench,
        "fxopt": queued,
        "graph": lambda launcher, *args, **kwargs: in_a_graph(launcher, args, kwargs),
    }
    found: dict[str, dict[str, float]] = {}
    for launcher in kernel.launchers:
        of = found[str(launcher.config)] = {}
        for name, way in ways.items():
            of[name] = statistics.median(way(launcher, *args, **kwargs) for _ in range(ROUNDS)) * 1e3
    fastest = min(of["graph"] for of in found.values())
    kept = {name: min(found, key=lambda config: found[config][name]) for name in ways}
    rounded = {config: {name: round(us, 2) for name, us in of.items()} for config, of in found.items()}
    lost = {name: round(found[config]["graph"] / fastest, 3) for name, config in kept.items()}
    return {"kernel": kernel.fn.__name__, "variants_us": rounded, "kept": kept, "lost": lost}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the variants of Inductor's kernels in three ways.")
    parser.add_argument("--json", type=Path, help="file for the results")
    path: Path | None = parser.parse_args().json
    if not torch.cuda.is_available():
        parser.error("needs a GPU: Inductor's kernels for CPUs have no variants")
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from profiler_core.environment import environment

    rows: dict[str, list[dict[str, Any]]] = {}
    whole = CachingAutotuner.benchmark_all_configs
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # where no variant was chosen before
        for name, (function, inputs) in cases().items():

            def seen(self: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
                rows.setdefault(name, []).append(measure(self, args, kwargs))
                return whole(self, *args, **kwargs)

            with mock.patch.object(CachingAutotuner, "benchmark_all_configs", seen):
                torch.compile(function)(*inputs)
            for row in rows.get(name, []):
                print(f"{name:22s} {len(row['variants_us'])} variants, lost: {row['lost']}", flush=True)
    if path is not None:
        data = {"environment": environment(torch.device("cuda", 0)), "command": " ".join(sys.argv), "rows": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
