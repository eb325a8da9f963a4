"""Kernels with a known answer: each case says what must limit its kernel, and what must not, by arithmetic.

The development set is what thresholds may be chosen on. The holdout set is written by somebody who does not see how
they are chosen, after they are frozen, and is only ever measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from fxopt.labels import Axis

SETS = ("development", "holdout")


@dataclass(frozen=True)
class Case:
    """One kernel, or one function where the whole graph is in question.

    Args:
        name: unique over both sets.
        axis: what it is made to show; None for a negative, which is made not to show what is ``forbidden``.
        build: from a CUDA device, a function without arguments that does the same at every call. What it needs
            (tensors, compiled kernels) is made by ``build``; a function of ``torch.compile`` is compiled later, by the
            profiler.
        expected: axes that must be among the labels.
        forbidden: axes that must not.
        note: why, with the arithmetic.
        kernel: regular expression for the name of the kernel in question; of those that match, the one with the
            largest time. "" takes the largest of all.
        scope: "kernel", or "graph" where the labels of the whole function are in question.
        tf32: float32 matrix products and convolutions in TF32.
        set: which set it is of; the registry fills it in.
    """

    name: str
    axis: Axis | None
    build: Callable[[torch.device], Callable[[], Any]]
    expected: frozenset[Axis]
    forbidden: frozenset[Axis]
    note: str
    kernel: str = ""
    scope: Literal["kernel", "graph"] = "kernel"
    tf32: bool = False
    set: str = "development"


def cases(which: str = "all") -> tuple[Case, ...]:
    """The cases of a set ("development", "holdout" or "all"). Raises ValueError for another, and where two have one
    name.
    """
    from case_studies import label_kernels_dev, label_kernels_holdout

    if which not in (*SETS, "all"):
        raise ValueError(f"no set {which!r}; there are {', '.join((*SETS, 'all'))}")
    found = [replace(case, set="development") for case in label_kernels_dev.CASES]
    found += [replace(case, set="holdout") for case in label_kernels_holdout.CASES]
    names = [case.name for case in found]
    for name in {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two cases are called {name!r}: rename one")
    return tuple(case for case in found if which in (case.set, "all"))


def axes(*members: Axis) -> frozenset[Axis]:
    """``axes(Axis.MEMORY_BOUND, ...)`` reads better than a frozenset of a tuple."""
    return frozenset(members)


# --- what cases are built of ------------------------------------------------------------------------------------------


def floats(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values in [-0.5, 0.5), the same each time; the global random state is left alone."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(shape, generator=generator, device=device).sub_(0.5).to(dtype)


def indices(device: torch.device, count: int, below: int, seed: int = 0) -> torch.Tensor:
    """int64 values in [0, below), with repetitions."""
    return torch.randint(below, (count,), generator=torch.Generator(device).manual_seed(seed), device=device)


def cycle(device: torch.device, length: int, seed: int = 0) -> torch.Tensor:
    """int32 indices of the next element, in one cycle through all of them in random order."""
    order = torch.randperm(length, generator=torch.Generator(device).manual_seed(seed), device=device)
    following = torch.empty(length, dtype=torch.int32, device=device)
    following[order] = order.roll(-1).to(torch.int32)
    return following


def compiled(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """``function(*args)`` through Inductor, which compiles it when the profiler first calls it."""
    return partial(torch.compile(function, dynamic=False), *args)
