"""Times tiles of the split convolution on this GPU, beside cuDNN, with errors against fp64.

    python tests/benchmarks/split_conv_gpu.py                # every shape: the best tiles, the choice, and cuDNN
    python tests/benchmarks/split_conv_gpu.py --shapes 0 3 --all

Times are medians of Triton's do_bench in microseconds, of the product alone, its operands split beforehand. `split` is
the activation's split, compiled by Inductor alone, from either order, and timed in a CUDA graph: it is one kernel, over
sooner than the host has called it. Errors are relative L2.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import torch
import torch.nn.functional as F
from triton.testing import do_bench, do_bench_cudagraph

from passes.kernels.split_conv import Config, choose, launch
from passes.split_precision_conv import split_rows

#: batch, input channels, height and width, output channels, window, padding
SHAPES = [
    (16, 64, 64, 64, 3, 1),
    (16, 64, 32, 128, 3, 1),
    (16, 128, 32, 128, 3, 1),
    (16, 128, 16, 256, 3, 1),
    (16, 256, 16, 256, 3, 1),
    (16, 32, 56, 64, 1, 0),
    (16, 64, 56, 128, 1, 0),
    (16, 128, 56, 256, 1, 0),
]
TILES = [
    Config(bm, bn, bk, warps, stages)
    for (bm, bn, warps), bk, stages in itertools.product(
        [
            (64, 64, 4),
            (128, 64, 4),
            (128, 64, 8),
            (64, 128, 4),
            (64, 128, 8),
            (128, 128, 8),
            (128, 32, 4),
            (64, 256, 8),
        ],
        (32, 64, 128),
        (2, 3, 4),
    )
]


def microseconds(fn: Any, *args: Any, **kwargs: Any) -> float:
    return float(do_bench(lambda: fn(*args, **kwargs), warmup=10, rep=40, return_mode="median")) * 1e3


def split_microseconds(x: torch.Tensor, terms: int) -> float:
    torch._dynamo.reset()  # sizes seen before would make these symbolic
    split = torch.compile(lambda x: split_rows(x.permute(0, 2, 3, 1), terms))
    split(x)
    return float(do_bench_cudagraph(lambda: split(x), rep=40, return_mode="median")) * 1e3


def relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def cudnn(x: torch.Tensor, w: torch.Tensor, padding: int, exact: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Time and error of torch's own convolution in each precision and order, its algorithm searched for."""
    rows = {}
    for order, dtype, tf32 in itertools.product(
        (torch.contiguous_format, torch.channels_last), (torch.float32, torch.float16, torch.bfloat16), (False, True)
    ):
        if tf32 and dtype is not torch.float32:
            continue
        a, b = (t.to(dtype).contiguous(memory_format=order) for t in (x, w))
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32):
            name = f"{'tf32' if tf32 else str(dtype)[6:]} {'nhwc' if order is torch.channels_last else 'nchw'}"
            out = F.conv2d(a, b, padding=padding)
            rows[name] = (microseconds(F.conv2d, a, b, padding=padding), relative(out, exact))
    return rows


def measure(shape: tuple[int, ...], everything: bool) -> None:
    batch, channels, side, outputs, window, padding = shape
    torch.manual_seed(0)
    x = torch.randn(batch, channels, side, side, device="cuda").relu()
    w = torch.randn(outputs, channels, window, window, device="cuda") / (channels * window * window) ** 0.5
    exact = F.conv2d(x.double(), w.double(), padding=padding)
    out_side = exact.shape[-1]
    pixels = batch * out_side * out_side
    flops = 2 * exact.numel() * channels * window * window
    print(f"\n{batch}x{channels}x{side}x{side} -> {outputs}, {window}x{window}; {flops / 1e9:.2f} GFLOP")
    for name, (time, error) in sorted(cudnn(x, w, padding, exact).items(), key=lambda row: row[1]):
        print(f"  cuDNN {name:14s} {time:8.1f} us {flops / time / 1e6:7.1f} TFLOP/s  {error:.1e}")
    for terms in (3, 1):
        last = x.contiguous(memory_format=torch.channels_last)
        xs = split_rows(last.permute(0, 2, 3, 1), terms)
        for order, value in (("nchw", x), ("nhwc", last)):
            print(f"  split of {order}, {terms} terms {split_microseconds(value, terms):8.1f} us")
        ws = split_rows(w.permute(0, 2, 3, 1).reshape(outputs, -1), terms)
        out = torch.empty(batch, out_side, out_side, outputs, device="cuda")
        geometry = ((window, window), (1, 1), (padding, padding), (1, 1))
        rows = []
        for tile in TILES:
            if channels % tile.channels or tile.outputs >= 2 * outputs:
                continue
            try:
                made = launch(xs, ws, None, out, *geometry, tile)
                torch.cuda.synchronize()
                error = relative(out.permute(0, 3, 1, 2), exact)
                time = microseconds(launch, xs, ws, None, out, *geometry, tile)
            except Exception as failure:  # a tile that does not fit this device is no result
                print(f"    {tile}: {type(failure).__name__}: {str(failure)[:80]}")
                continue
            rows.append((time, error, tile, made.n_regs, made.n_spills))
        rows.sort(key=lambda row: row[0])
        chosen = choose(pixels, outputs, channels, terms)
        for time, error, tile, registers, spills in rows:
            if everything or tile == chosen or time <= rows[min(4, len(rows) - 1)][0]:
                mark = "<- chosen" if tile == chosen else ""
                print(
                    f"  {terms} terms {tile.pixels:4d}x{tile.outputs:<3d} step {tile.channels:3d}, {tile.warps} warps, "
                    f"{tile.stages} stages {time:8.1f} us {flops / time / 1e6:7.1f} TFLOP/s  {error:.1e}  "
                    f"{registers} registers, {spills} spilled {mark}"
                )
        best = {"shape": shape, "terms": terms, "tile": vars(rows[0][2]), "us": rows[0][0], "error": rows[0][1]}
        print("  " + json.dumps(best))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="*", default=list(range(len(SHAPES))), help="rows of SHAPES")
    parser.add_argument("--all", action="store_true", help="print every tile")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    with torch.no_grad():
        for index in arguments.shapes:
            measure(SHAPES[index], arguments.all)


if __name__ == "__main__":
    main()
