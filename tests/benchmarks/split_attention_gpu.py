"""Times the split attention's tiles on this GPU beside torch's efficient attention, with errors against fp64.

    python tests/benchmarks/split_attention_gpu.py                 # shapes of the case studies, every tile
    python tests/benchmarks/split_attention_gpu.py --shapes 0 2 --causal --json tiles.json

Times are medians of Triton's do_bench_cudagraph in microseconds: both kernels of a call, split and attention, without
launches; `split` is the first of them alone. Errors are relative L2.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench_cudagraph

from passes.kernels.split_attention import AT_ONCE, MOST_TILES, TILES, Tiles, attend
from passes.kernels.split_attention_kernels import split_keys_and_values

#: batch, heads, length, head dimension
SHAPES = [(8, 8, 512, 64), (4, 12, 128, 64), (2, 16, 2048, 64), (4, 16, 1024, 128), (8, 8, 512, 32)]
CANDIDATES = [
    Tiles(m, n, warps, stages)
    for (m, warps), n, stages in itertools.product([(64, 4), (128, 8), (128, 4)], (32, 64, 128), (1, 2, 3))
]


def efficient(q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
    op: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    result: torch.Tensor = op(q, k, v, None, False, 0.0, causal)[0]
    return result


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -1e300)
    return torch.softmax(scores, -1) @ v.double()


def rel(y: torch.Tensor, true: torch.Tensor) -> float:
    return ((y.double() - true).norm() / true.norm()).item()


def microseconds(fn: Any) -> float:
    return 1e3 * float(do_bench_cudagraph(fn, rep=100, return_mode="median"))


def split_alone(k: torch.Tensor, v: torch.Tensor, n: int) -> float:
    b, h, length, d = k.shape
    padded, blocks = max(16, triton.next_power_of_2(d)), triton.cdiv(length, n)
    planes = k.new_empty((4, b * h, blocks * n, padded), dtype=torch.float16)
    bound, k_inverse = k.new_empty((2, b * h, blocks))
    v_inverse = k.new_empty((b * h, blocks, padded))

    def call() -> None:
        split_keys_and_values[(b * h * blocks,)](
            k, v, planes, bound, k_inverse, v_inverse, h, length, d, blocks, planes.stride(0),
            *k.stride(), *v.stride(), N=n, D=padded, num_warps=4,
        )  # fmt: skip

    return microseconds(call)


def rows(shape: tuple[int, ...], causal: bool) -> list[dict[str, Any]]:
    b, h, length, d = shape
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, length, h, d, device="cuda").transpose(1, 2) for _ in range(3))
    true = exact(q, k, v, causal)
    scale = d**-0.5
    base = {"shape": shape, "causal": causal}
    found: list[dict[str, Any]] = [
        {
            **base,
            "what": "efficient fp32",
            "us": microseconds(lambda: efficient(q, k, v, causal)),
            "error": rel(efficient(q, k, v, causal), true),
        }
    ]
    if length <= min(AT_ONCE, MOST_TILES * 64) and d <= 64:
        found.append(
            {
                **base,
                "what": "split at once, without a kernel for keys and values",
                "us": microseconds(lambda: attend(q, k, v, None, scale, causal)),
                "error": rel(attend(q, k, v, None, scale, causal), true),
            }
        )
    for tiles in CANDIDATES:
        label = f"split m={tiles.m} n={tiles.n} warps={tiles.warps} stages={tiles.stages}"
        if tiles == TILES[max(16, triton.next_power_of_2(d)), causal]:
            label += " (table)"
        try:
            error = rel(attend(q, k, v, None, scale, causal, tiles), true)
            us = microseconds(lambda tiles=tiles: attend(q, k, v, None, scale, causal, tiles))
        except Exception as failure:  # too much shared memory for one tile is no reason to stop
            found.append({**base, "what": f"{label}: {type(failure).__name__}", "us": None, "error": None})
            continue
        found.append({**base, "what": label, "us": us, "split_us": split_alone(k, v, tiles.n), "error": error})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", type=int, help="positions in SHAPES; all by default")
    parser.add_argument("--causal", action="store_true", help="causal attention instead of full")
    parser.add_argument("--json", type=Path, help="write every row there too")
    options = parser.parse_args()
    every = []
    for position in options.shapes if options.shapes is not None else range(len(SHAPES)):
        found = rows(SHAPES[position], options.causal)
        every += found
        reference = found[0]
        print(f"\n{SHAPES[position]}{' causal' if options.causal else ''}")
        for row in sorted(found, key=lambda row: row["us"] or float("inf")):
            if row["us"] is None:
                print(f"{'-':>9}  {row['what']}")
                continue
            ratio, times = reference["us"] / row["us"], row["error"] / reference["error"]
            alone = f", split {row['split_us']:.1f}" if "split_us" in row else ""
            print(f"{row['us']:9.1f}  {ratio:5.2f}x  {row['error']:.2e} ({times:.2f} of fp32's)  {row['what']}{alone}")
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": every}, indent=1))


if __name__ == "__main__":
    main()
