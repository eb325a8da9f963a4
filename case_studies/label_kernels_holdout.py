"""The holdout set: written after the thresholds were frozen, without sight of how they were chosen."""

from __future__ import annotations

from case_studies.label_kernels import Case

CASES: tuple[Case, ...] = ()
