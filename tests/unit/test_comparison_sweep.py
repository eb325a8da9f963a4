"""The error sweep of split products, with products whose error is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from case_studies import split_sweep, tables

CPU = torch.device("cpu")


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In fp64, rounded once. NaN and Inf come out as in fp32 where nothing overflows."""
    return (a.double() @ b.double()).float()


def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a.bfloat16().float(), b.bfloat16().float())


def careless(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A split by subtraction, which makes NaN of Inf."""
    rest = a - a.bfloat16().float()
    return torch.mm(a.bfloat16().float(), b) + torch.mm(rest, b)


def swept(product: Any) -> dict[str, Any]:
    return {row["kind"]: row for row in split_sweep.sweep(product, CPU, [64], 32, 32)}


def test_a_product_rounded_once_is_within_rounding_on_every_kind_of_input() -> None:
    rows = swept(exact)
    assert len(rows) == 13
    for kind, row in rows.items():
        # Denormal results carry fewer bits; none of these inputs makes one.
        assert row["split"]["max_error"] <= 2.0**-24 and row["split"]["placed"], kind
        assert row["split"]["mean_error"] <= row["cublas_fp32"]["mean_error"] * 1.01 + 1e-12, kind


def test_16_bit_rounding_shows_as_an_error_of_16_bits() -> None:
    rows = swept(rounded)
    assert 1e-4 < rows["normal"]["split"]["max_error"] < 1e-2
    assert 1e-4 < rows["12 orders of magnitude"]["split"]["frobenius"] < 1e-1


def test_inf_that_became_nan_is_not_placed_as_in_fp32() -> None:
    rows = swept(careless)
    assert not rows["with Inf"]["split"]["placed"] and rows["normal"]["split"]["placed"]
    assert rows["with Inf"]["cublas_fp32"]["placed"] and rows["with NaN"]["cublas_fp32"]["placed"]


def test_elements_without_any_product_must_be_zero() -> None:
    a, b = torch.zeros(2, 4), torch.ones(4, 2)
    zero, bound = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    assert split_sweep.error(a @ b, a @ b, zero, bound)["max_error"] == 0.0
    assert split_sweep.error(a @ b + 1e-30, a @ b, zero, bound)["max_error"] is None, "infinitely wrong"


def test_the_table_has_the_largest_error_over_all_sizes() -> None:
    rows = split_sweep.sweep(exact, CPU, [16, 64], 8, 8)
    worst = max(row["cublas_fp32"]["max_error"] for row in rows if row["kind"] == "normal")
    line = next(text for text in tables.sweep(rows).splitlines() if text.startswith("| normal "))
    assert f"| 16 to 64 | {worst:.1e} |" in line and "as in fp32" in line


@pytest.mark.parametrize("kind", ["with Inf", "with NaN", "denormals", "nine tenths zeros"])
def test_a_kind_of_input_is_what_it_is_called(kind: str) -> None:
    pairs = dict(split_sweep.kinds(32, 64, 32, torch.Generator().manual_seed(0), CPU))
    a, b = pairs[kind]
    tiny = torch.finfo(torch.float32).tiny
    found = {
        "with Inf": a.isinf().any() and b.isinf().any(),
        "with NaN": a.isnan().any() and b.isnan().any(),
        "denormals": bool(((a != 0) & (a.abs() < tiny)).all()),
        "nine tenths zeros": bool((a == 0).float().mean() > 0.8),
    }
    assert found[kind]
