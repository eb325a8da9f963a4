"""Precision classes, and what error each of them accepts."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from enum import Enum

__all__ = ["FP32_FLOOR", "FP64_FLOOR", "Budget", "Precision", "parse_precision"]

FP32_FLOOR = 16 * 2.0**-24
"""Relative error that is never held against an fp32 candidate: 16 unit roundoffs (u = 2^-24). Without it a
baseline that happens to be exact would fail every candidate that rounds once."""
FP64_FLOOR = 16 * 2.0**-53
"""The same for an output in fp64, where 16 fp32 roundoffs would let fp32 arithmetic through."""


class Precision(str, Enum):
    """Precision classes, most accurate first."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"

    def allows(self, other: Precision) -> bool:
        """Whether a pass that needs class ``other`` may run under this class."""
        order = list(Precision)
        return order.index(other) <= order.index(self)


_CEILING = {Precision.FP32: 0.0, Precision.TF32: 8 * 2.0**-11, Precision.BF16: 8 * 2.0**-8}
"""Largest relative L2 error of an output by class, as 8u. u is the unit roundoff of the operand format (TF32
has 11 significant bits, bf16 8: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores",
PeerJ CS 2021). Roundings of random sign partly cancel, so a whole model lands at a few u: 12-layer
GPT-2 on an H200 measured 7.2e-4 in TF32 (1.5u) and 8.5e-3 in bf16 (2.2u). 8u leaves room for deeper models,
and none for a result that lost its meaning. fp32 has no ceiling of its own: only the multiple of the
baseline's error counts."""


@dataclass(frozen=True)
class Budget:
    """What error a user accepts.

    precision: class of the passes that may run. max_rel_l2: limit on the relative L2 error of every output,
    in place of the class's (None: the class's). multiple: how many times the baseline's own error is always
    allowed under a class.
    """

    precision: Precision
    max_rel_l2: float | None = None
    multiple: float = 4.0

    def allows(self, needed: Precision, error: float = 0.0) -> bool:
        """Whether a pass of class ``needed`` may run. With a numeric budget every pass may, for the measured
        error decides, but one that is known to be off by ``error`` or more, where that is too much."""
        return self.precision.allows(needed) if self.max_rel_l2 is None else error <= self.max_rel_l2

    def limit(self, baseline_error: float, floor: float = FP32_FLOOR) -> float:
        """Relative L2 error allowed for an output that the baseline computes with ``baseline_error``."""
        if self.max_rel_l2 is not None:
            return self.max_rel_l2
        return max(self.multiple * baseline_error, _CEILING[self.precision], floor)


def parse_precision(value: str | float) -> Budget:
    """Budget for the option ``precision``: "fp32", "tf32", "bf16", or a relative L2 error between 0 and 1
    (number or its spelling)."""
    if isinstance(value, str) and not isinstance(value, Precision):
        with contextlib.suppress(ValueError):
            return Budget(Precision(value.strip().lower()))
    elif isinstance(value, Precision):
        return Budget(value)
    if not isinstance(value, bool):
        with contextlib.suppress(ValueError, TypeError):
            number = float(value)
            if 0.0 < number < 1.0:
                return Budget(Precision.BF16, max_rel_l2=number)
    raise ValueError(
        f"precision={value!r}: give one of {', '.join(repr(p.value) for p in Precision)}, "
        "or a relative L2 error between 0 and 1, such as 1e-4"
    )
