"""Times of one piece of work in several forms (eager, Inductor, autocast, fxopt), as `fxopt bench` measures them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from profiler_core.quantities import duration

if TYPE_CHECKING:
    from fxopt.measure import PairedResult

__all__ = ["Comparison", "text"]


@dataclass
class Comparison:
    """Times of a call in ns, medians; each result compares the first name with the second in pairs (ratio above 1: the
    second is faster). ``passes``: what fxopt keeps. ``error``: relative L2 distance of fxopt's output from eager's.
    """

    times: dict[str, float]
    results: dict[tuple[str, str], PairedResult]
    passes: list[str]
    device: str
    error: float | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        results = [{"before": a, "after": b, **asdict(result)} for (a, b), result in self.results.items()]
        return {
            "device": self.device,
            "times_ns": self.times,
            "results": results,
            "passes": self.passes,
            "rel_l2_to_eager": self.error,
            "notes": self.notes,
        }

    @classmethod
    def from_json(cls, data: Any) -> Comparison:
        """Raises ValueError for what `to_json` did not write."""
        from fxopt.measure import PairedResult
        from fxopt.report.restore import restore

        rows = restore(list[dict[str, Any]], data["results"], "results")
        return cls(
            times=restore(dict[str, float], data["times_ns"], "times_ns"),
            results={(str(row["before"]), str(row["after"])): restore(PairedResult, row, "results") for row in rows},
            passes=restore(list[str], data["passes"], "passes"),
            device=str(data["device"]),
            error=restore(float | None, data["rel_l2_to_eager"], "rel_l2_to_eager"),
            notes=restore(list[str], data["notes"], "notes"),
        )

    def ratio(self, before: str, after: str) -> str:
        """``1.29x (1.20 to 1.40)``; "" where the two were not compared."""
        found = self.results.get((before, after))
        return "" if found is None else f"{found.ratio:.2f}x ({found.low:.2f} to {found.high:.2f})"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Name, time of a call, and the ratios to eager and to Inductor."""
        return [
            (name, duration(time), self.ratio("eager", name), self.ratio("Inductor", name))
            for name, time in self.times.items()
        ]

    @property
    def doubt(self) -> str:
        """One sentence where a ratio and the two times beside it, which other pairs may have given, do not fit."""
        for (a, b), pair in self.results.items():
            ratio, slack = self.times[a] / self.times[b], 1 + pair.noise
            if not pair.low / slack <= ratio <= pair.high * slack:
                return (
                    f"{a} and {b} took {duration(self.times[a])} and {duration(self.times[b])} in other pairs than "
                    f"those of their ratio ({self.ratio(a, b)}), which differ by more than the noise of "
                    f"{100 * pair.noise:.1f} %: the machine was not as busy each time, so repeat it on a quiet one."
                )
        return ""

    @property
    def verdict(self) -> str:
        pair = self.results["Inductor", "fxopt"]
        told = "faster" if pair.faster else "slower" if pair.slower else "not told apart by these pairs"
        how = f"95 % intervals from {pair.pairs} pairs, noise {100 * pair.noise:.1f} %"
        return f"fxopt against Inductor: {told} ({how})"

    @property
    def kept(self) -> str:
        return ", ".join(self.passes) if self.passes else "none; it runs Inductor's code"


def text(found: Comparison) -> str:
    """For a terminal and for a pipe alike."""
    lines = [f"{'':<10}{'a call':>12}   {'against eager':<26}against Inductor"]
    for name, time, eager, inductor in found.rows():
        lines.append(f"{name:<10}{time:>12}   {eager:<26}{inductor}".rstrip())
    lines.append(f"on {found.device}; passes kept: {found.kept}")
    if found.error is not None:
        lines.append(f"relative L2 distance of fxopt's output from eager's: {found.error:.1e}")
    return "\n".join([*lines, found.verdict])
