"""What to do about a limit that a rule found in a profile: which passes answer it, and how to have them tried."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxopt.labels import Label
    from profiler_core.profiles import Profile

__all__ = ["next_step", "passes_for"]

_FUSED_AWAY = ("launch_bound", "memory_bound", "latency_bound", "layout_conversion", "cast_traffic")


def passes_for(axes: Collection[str], device: str) -> dict[str, str]:
    """Passes that answer any of these axes on a device ("cpu", "cuda"), by name: the precision that each needs."""
    from fxopt.registry import discover

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a package of passes that does not load is told of where passes are chosen
        found = sorted(discover().items())
    return {
        name: p.precision.value
        for name, p in found
        if device in p.devices and any(axis.value in axes for axis in p.answers)
    }


def next_step(label: Label, profile: Profile) -> str:
    """One or two sentences on a label of a profile, equal for all of one axis and scope."""
    from fxopt.report.page.words import AXES

    axis = label.axis.value
    eager = label.scope == "kernel" or not profile.launches
    found = passes_for({axis}, str(profile.environment.get("device_type") or "cpu"))
    if not found:
        return f"No pass of fxopt's answers it; what does: {AXES[axis][1]}."
    exact = [name for name, precision in found.items() if precision == "fp32"]
    groups = [", ".join(exact)] if exact else []
    for precision in sorted(set(found.values()) - {"fp32"}):
        names = ", ".join(name for name, needs in found.items() if needs == precision)
        groups.append(f"with --precision {precision} {'also ' if groups else ''}{names}")
    fused = " Compiled, operators are also fused with their neighbours." if eager and axis in _FUSED_AWAY else ""
    return (
        'fxopt optimize, or torch.compile(model, backend="profile_guided") in the program, tries the passes that '
        f"answer it: {'; '.join(groups)}.{fused}"
    )
