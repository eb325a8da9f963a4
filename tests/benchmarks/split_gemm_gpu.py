"""Times split matrix products in every tile on this GPU beside cuBLAS, with errors against fp64.

    python tests/benchmarks/split_gemm_gpu.py                      # the products of the case studies
    python tests/benchmarks/split_gemm_gpu.py --products 0 2 --json tiles.json

Times are microseconds a call, back to back in a CUDA graph, with a right operand that L2 does not hold; errors are
relative L2, of the first 512 rows. `library` is cuBLAS on bf16 parts, three times as long; `exact` a product all of
whose tiles are computed in IEEE fp32, for its rows hold raw bits.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from passes.kernels import launch, tiling
from passes.kernels.tiling import Product
from passes.split_products import rounded_once, split

#: M, N, K
PRODUCTS = [
    (512, 2304, 768),
    (512, 768, 768),
    (512, 3072, 768),
    (512, 768, 3072),
    (4096, 1536, 512),
    (4096, 512, 512),
    (256, 2048, 512),
    (256, 2048, 2048),
    (8192, 2048, 512),
    (8192, 512, 2048),
    (8192, 32000, 512),
    (2048, 4096, 4096),
]
DEVICE = torch.device("cuda", 0)


def measure(m: int, n: int, k: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    a, b = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE) / math.sqrt(k)
    copies = [b, *(b.clone() for _ in range(min(7, int(2e8 / (b.numel() * 4)))))]
    exact = a[:512].double() @ b.double().T

    def row(kind: str, took: float, out: torch.Tensor | None = None, **more: Any) -> dict[str, Any]:
        error = None if out is None else ((out[:512] - exact).norm() / exact.norm()).item()
        rate = 2 * m * n * k / took / 1e6
        return {"m": m, "n": n, "k": k, "kind": kind, "us": took, "fp32_tflops": rate, "error": error, **more}

    found = [row("cublas fp32", tiling._time(lambda i: torch.mm(a, copies[i % len(copies)].T)), torch.mm(a, b.T))]
    found.append(row("library", tiling.measure_library(Product(m, n, k), DEVICE)))
    for terms in (3, 1):
        for block in (0, 128) if terms == 3 and k > 1024 else (0,):
            left = split(a, block) if terms == 3 else rounded_once(a)
            right = split(b) if terms == 3 else rounded_once(b)
            operands = [(one[0], one[1], one[2]) if terms == 3 else (one[0], None, one[1]) for one in (left, right)]
            turns = [tuple(None if part is None else part.clone() for part in operands[1]) for _ in copies]
            product = Product(m, n, k, terms=terms, block=block)
            for tile in tiling.options(product, launch.multiprocessors(DEVICE), launch.has_hopper(DEVICE)):
                took = time(operands[0], turns, torch.empty(tile[3], m, n, device=DEVICE), tile)
                if took is not None:
                    out = torch.empty(tile[3], m, n, device=DEVICE)
                    launch.gemm(operands[0], operands[1], None, out, tile)
                    found.append(row(f"{terms} terms", took, out.sum(0), tile=list(tile), block=block))
    raw = (operands_of_raw(a), operands_of_raw(b))
    tile = tiling.options(Product(m, n, k), launch.multiprocessors(DEVICE), launch.has_hopper(DEVICE))[0]
    out = torch.empty(tile[3], m, n, device=DEVICE)
    if m * n * k < 2e10:
        took = tiling._time(lambda i: launch.gemm(*raw, None, out, tile), calls=2)
        found.append(row("exact", took, out.sum(0), tile=list(tile)))
    return found


def time(left: Any, turns: list[Any], out: torch.Tensor, tile: launch.Tile) -> float | None:
    """Microseconds a call on the right operands in turn; None, and a line that says why, where it does not run."""
    try:
        return tiling._time(lambda i: launch.gemm(left, turns[i % len(turns)], None, out, tile))
    except Exception as error:
        print(f"  {tile}: {type(error).__name__}: {str(error)[:80]}")
        return None


def operands_of_raw(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bits = x.view(torch.int32)
    return (bits >> 16).to(torch.int16), bits.to(torch.int16), torch.zeros(len(x), 1, device=x.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", type=int, nargs="*", default=list(range(len(PRODUCTS))), help="rows of PRODUCTS")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from profiler_core.environment import environment

    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for number in options.products:
        found = measure(*PRODUCTS[number])
        rows += found
        print(PRODUCTS[number])
        for one in sorted(found, key=lambda row: row["us"]):
            what = f"{one['kind']} {one.get('tile', '')} {'block' if one.get('block') else ''}"
            error = f"{one['error']:.1e}" if one["error"] is not None else ""
            print(f"  {one['us']:9.1f} us  {one['fp32_tflops']:7.1f} TFLOP/s  {error:8} {what}")
        if options.json is not None:
            document = {"environment": environment(DEVICE), "products": rows}
            options.json.write_text(json.dumps(document, indent=1, default=str))


if __name__ == "__main__":
    main()
