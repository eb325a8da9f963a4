"""What each pass is worth: each kept one alone and taken away, re-measured; and why each other one was not kept.

Gains do not add up, so nothing here is computed by subtracting one result from another: the code with a pass alone runs
beside the baseline, and the code without it beside the kept code, in the same pairs of blocks that decide a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fxopt.measure import PairedResult
from fxopt.registry import Pass
from fxopt.report.model import CandidateReport, to_plain
from fxopt.report.restore import restore_fields

__all__ = ["AblationRow", "Timing", "ablate", "not_kept"]


@dataclass(frozen=True)
class Timing:
    """One set of passes timed against another: ratios above 1 speak for the larger set.

    kernel_ns: sum of the kernel times a call, in ns, of the code that the row is about: with the pass alone, or without
    it. wall, kernel: the ratios with their intervals; None where they could not be measured.
    """

    kernel_ns: float | None = None
    kernel: PairedResult | None = None
    wall: PairedResult | None = None


@dataclass(frozen=True)
class AblationRow:
    """One pass of an ablation.

    name, options: of the pass. outcome: "kept"; "reverted" (kept for a while), "rejected", "failed" (see
    `CandidateReport`), "out of reach" (never tried). alone: the pass, with what it needs, over the baseline. removed:
    the kept set over the kept set without it and without what needs it, so what it adds there. reason: why it was not
    kept; for a kept one, what could not be measured.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    outcome: str = "kept"
    alone: Timing | None = None
    removed: Timing | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {name: to_plain(getattr(self, name)) for name in self.__dataclass_fields__}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> AblationRow:
        """Reads what `to_json` gave. ValueError, naming the place, for anything else."""
        return restore_fields(AblationRow, data, "ablation")


def ablate(
    kept: Sequence[Pass], time: Callable[[Sequence[Pass], Sequence[Pass]], tuple[PairedResult, PairedResult] | str]
) -> list[AblationRow]:
    """A row for each pass of `kept`, in its order.

    time(before, after): wall and kernel times of the code with the passes `after` against that with `before` (none: the
    baseline), or the reason why there is no such code.
    """
    by_name = {p.name: p for p in kept}
    rows = []
    for p in kept:
        with_needs = [q for q in kept if q.name in _closure(p.name, {name: q.needs for name, q in by_name.items()})]
        users = {name: [q.name for q in kept if name in q.needs] for name in by_name}
        without = [q for q in kept if q.name not in _closure(p.name, users)]
        alone, removed = time([], with_needs), time(without, kept)
        reasons = [f"alone: {alone}"] if isinstance(alone, str) else []
        reasons += [f"without it: {removed}"] if isinstance(removed, str) else []
        rows.append(
            AblationRow(
                p.name,
                to_plain(p.options()),
                alone=None if isinstance(alone, str) else Timing(alone[1].candidate_ns, alone[1], alone[0]),
                removed=None if isinstance(removed, str) else Timing(removed[1].baseline_ns, removed[1], removed[0]),
                reason="; ".join(reasons),
            )
        )
    return rows


def _closure(start: str, edges: Mapping[str, Collection[str]]) -> set[str]:
    """`start` and every known name that can be reached from it."""
    found, pending = set(), [start]
    while pending:
        name = pending.pop()
        if name in edges and name not in found:
            found.add(name)
            pending.extend(edges[name])
    return found


def not_kept(
    candidates: Sequence[CandidateReport], kept: Sequence[Pass], out_of_reach: Sequence[str]
) -> list[AblationRow]:
    """A row for each pass (with its options) that was tried and is not in `kept`, and each that was out of reach."""
    in_use = {(p.name, str(to_plain(p.options()))) for p in kept}
    rows: dict[tuple[str, str], AblationRow] = {}
    for entry in candidates:
        key = (entry.subject, str(entry.subject_options))
        if not entry.subject or key in in_use:
            continue
        outcome, reason = entry.outcome, entry.reason
        if outcome == "kept":
            outcome = "reverted"
            reason = reason if entry.step == "remove" else f"replaced by a later trial; it was {reason}"
        elif entry.step == "remove":
            continue
        rows[key] = AblationRow(entry.subject, dict(entry.subject_options), outcome, reason=reason)
    refused = [line.partition(": ") for line in out_of_reach]
    return [*rows.values(), *(AblationRow(name, outcome="out of reach", reason=why) for name, _, why in refused)]
