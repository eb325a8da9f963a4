"""How exact split matrix products are, over K and over inputs of every kind, beside cuBLAS in fp32 and in TF32.

    python -m case_studies.split_sweep [--device cuda] [--json results/h200/split_sweep.json]   (--help)

The error of an element is |C - C64| / (|A| |B|): what a backward stable product bounds, whatever cancels. C64 is the
product in fp64. Elements that meet an Inf or a NaN have no error; there it counts whether NaN and Inf are where
torch.mm puts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from case_studies import compare, runner, show, tables

SEED = 0
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


def kinds(m: int, k: int, n: int, generator: torch.Generator, device: torch.device) -> Iterator[tuple[str, Pair]]:
    """(name, (a [m, k], b [k, n])), fp32."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    def orders(*shape: int) -> torch.Tensor:
        """Powers of ten over 12 orders of magnitude."""
        return 10.0 ** (12 * uniform(*shape) - 6)

    def some(x: torch.Tensor, *values: float) -> torch.Tensor:
        """`x` with the values at a few places, each in a row and a column of its own."""
        x = x.clone()
        for number, value in enumerate(values):
            x[number * 7 % x.shape[0], number * 11 % x.shape[1]] = value
        return x

    yield "normal", (normal(m, k), normal(k, n))
    yield "uniform in [0, 1)", (uniform(m, k), uniform(k, n))
    yield "12 orders of magnitude", (normal(m, k).sign() * orders(m, k), normal(k, n).sign() * orders(k, n))
    yield "rows of mixed scale", (normal(m, k) * orders(m, 1), normal(k, n))
    yield "columns of mixed scale", (normal(m, k), normal(k, n) * orders(1, n))
    scale = orders(1, k)
    yield "mixed within rows, the inverse in b", (normal(m, k) * scale, normal(k, n) / scale.T)
    yield "nine tenths zeros", (normal(m, k) * (uniform(m, k) < 0.1), normal(k, n) * (uniform(k, n) < 0.1))
    places = torch.randint(k, (m, 1), generator=generator, device=device)
    yield "one-hot rows", (torch.zeros(m, k, device=device).scatter(1, places, 1.0), normal(k, n))
    yield "denormals", (normal(m, k) * 1e-40, normal(k, n) * 1e10)
    yield "huge, 1e30", (normal(m, k) * 1e30, normal(k, n))
    yield "with Inf", (some(normal(m, k), math.inf, -math.inf), some(normal(k, n), math.inf))
    yield "with NaN", (some(normal(m, k), math.nan), some(normal(k, n), 0.0, math.nan))
    yield "with Inf, 1e30 and denormals", (some(normal(m, k), math.inf, 1e30, 1e-40), normal(k, n))


def error(c: torch.Tensor, fp32: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> dict[str, Any]:
    """max_error and mean_error over the elements, frobenius relative to the exact product's norm; None where that is
    not finite. placed: NaN and Inf are where `fp32`, torch.mm's product, has them.
    """
    counted = bound.isfinite() & exact.isfinite()
    difference = (c.double() - exact).abs()[counted]
    relative = torch.where(difference == 0, 0.0, difference / bound[counted])
    norm = exact[counted].norm()
    values = {"max_error": relative.max(), "mean_error": relative.mean(), "frobenius": difference.norm() / norm}
    same = torch.equal(c.isnan(), fp32.isnan()) and torch.equal(c.isposinf(), fp32.isposinf())
    found: dict[str, Any] = {name: value.item() if value.isfinite() else None for name, value in values.items()}
    return {**found, "placed": same and torch.equal(c.isneginf(), fp32.isneginf())}


def sweep(split_mm: Product, device: torch.device, sizes: Sequence[int], m: int, n: int) -> list[dict[str, Any]]:
    """A row for each K of `sizes` and each kind of input."""
    rows = []
    for k in sizes:
        generator = torch.Generator(device=device).manual_seed(SEED + k)
        for kind, (a, b) in kinds(m, k, n, generator, device):
            exact, bound = a.double() @ b.double(), a.double().abs() @ b.double().abs()
            with runner.fp32_matmuls(tf32=False):
                fp32 = torch.mm(a, b)
                split = split_mm(a, b)
            with runner.fp32_matmuls(tf32=True):
                tf32 = torch.mm(a, b)
            products = {"cublas_fp32": fp32, "split": split, "tf32": tf32}
            row: dict[str, Any] = {"kind": kind, "m": m, "k": k, "n": n}
            rows.append(row | {name: error(c, fp32, exact, bound) for name, c in products.items()})
    return rows


def main() -> None:
    import typer

    def run(
        device: str = typer.Option("cuda", help="cuda or cpu."),
        terms: int = typer.Option(3, help="16-bit products that make one of fp32."),
        least: int = typer.Option(64, help="The smallest K; K doubles."),
        most: int = typer.Option(16384, help="The largest K."),
        m: int = typer.Option(256, help="Rows of A."),
        n: int = typer.Option(256, help="Columns of B."),
        json: Path = typer.Option(None, help="The list of rows."),
        commit: str = typer.Option("", help="The commit, where there is no repository to ask."),
    ) -> None:
        """Sweep the error of split matrix products, and print the largest of each kind of input."""
        from passes.split_products import split_mm

        where = torch.device(device)
        sizes = [2**i for i in range(32) if least <= 2**i <= most]
        with torch.no_grad():
            rows = sweep(lambda a, b: split_mm(a, b, terms=terms), where, sizes, m, n)
        if json is not None:
            stamp = {**compare.source(commit), "date": show.now()}
            compare.write_rows(json, [{**row, **stamp} for row in rows])
        print(tables.sweep(rows))

    typer.run(run)


if __name__ == "__main__":
    main()
