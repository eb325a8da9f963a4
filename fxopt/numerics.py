"""How far the values of a tensor are from those of another, whatever its size and layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["CHUNK", "Errors", "compare", "same"]

CHUNK = 1 << 26  # elements compared at once: 512 MB for each fp64 temporary


@dataclass(frozen=True)
class Errors:
    candidate: float  # relative L2 error
    baseline: float
    candidate_abs: float  # largest absolute error of an element
    baseline_abs: float
    largest: float  # largest absolute value of the reference
    misplaced: int  # elements whose NaN or Inf is not the baseline's


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Equal stretches of tensors of one shape, in fp64 (complex numbers as pairs), at most CHUNK elements at
    a time."""
    flat = [
        (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value).reshape(-1)
        for value in map(_dense, tensors)
    ]
    for start in range(0, flat[0].numel(), CHUNK):
        yield tuple(value[start : start + CHUNK].to(flat[0].device, torch.float64) for value in flat)


def _dense(value: torch.Tensor) -> torch.Tensor:
    return value.detach() if value.layout == torch.strided else value.detach().to_dense()


def compare(true: torch.Tensor, right: torch.Tensor, tried: torch.Tensor) -> Errors:
    """Errors over the elements that are finite in all three; an all-zero reference gives absolute errors in
    place of relative ones."""
    sums = torch.zeros(3, dtype=torch.float64, device=true.device)
    tops = torch.zeros(3, dtype=torch.float64, device=true.device)
    misplaced = torch.zeros((), dtype=torch.int64, device=true.device)
    zero = sums.new_zeros(())
    for t, r, c in _chunks(true, right, tried):
        misplaced += (_kind(c) != _kind(r)).sum()
        finite = t.isfinite() & r.isfinite() & c.isfinite()
        for slot, values in enumerate((t, r - t, c - t)):
            values = torch.where(finite, values, zero).abs()
            sums[slot] += values.square().sum()
            tops[slot] = torch.maximum(tops[slot], values.max())
    norm, baseline, candidate = sums.sqrt().tolist()
    largest, baseline_abs, candidate_abs = tops.tolist()
    scale = norm or 1.0
    return Errors(candidate / scale, baseline / scale, candidate_abs, baseline_abs, largest, int(misplaced))


def _kind(values: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 NaN, 2 +Inf, 3 -Inf."""
    return values.isnan().to(torch.int8) + 2 * (values == math.inf) + 3 * (values == -math.inf)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal values, NaN equal to NaN; dtypes may differ."""
    if left.shape != right.shape:
        return False
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(_dense(left), _dense(right))
    return all(bool(((a == b) | (a.isnan() & b.isnan())).all()) for a, b in _chunks(left, right))
