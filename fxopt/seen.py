"""What this user's plans say of a pass: where it was tried, what came of it, and what it gained."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fxopt.plan import Plan, PlanStore, PlanStoreError

Outcome = Literal["kept", "rejected", "failed", "out of reach"]
#: numbers differ from graph to graph; a reason that differs in them alone is the same reason
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Sighting:
    """A pass in one plan.

    outcome: "kept" (part of the kept code), "rejected" (tried, and wrong or no faster), "failed" (could not be built),
        "out of reach" (answers a label, and could not be tried). reason: why, "" where it was kept.
    speedup, low, high: baseline over kept code, wall time, with the 95 % interval; None unless kept. The kept code is
        that of this pass together with those of `beside`.
    rewritten: candidates that it rewrote there. refused: reason -> candidates that it left alone for it.
    """

    key: str
    created: str
    device: str
    outcome: Outcome
    reason: str
    beside: tuple[str, ...]
    speedup: float | None
    low: float | None
    high: float | None
    rewritten: int
    refused: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sightings(store: PlanStore, name: str) -> tuple[list[Sighting], list[str]]:
    """Every plan of the store in which pass `name` was considered, newest first; and what could not be read."""
    found, problems = [], []
    for row in store.list():
        if row.problem:
            problems.append(f"{row.path}: {row.problem}")
            continue
        try:
            plan = store.read(row.key)
            seen = None if plan is None else sighting(plan, name)
        except PlanStoreError as error:
            problems.append(str(error))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problems.append(f"{row.path}: its reports are not what fxopt writes ({type(error).__name__}: {error})")
        else:
            found += [seen] if seen is not None else []
    return sorted(found, key=lambda seen: seen.created, reverse=True), problems


def sighting(plan: Plan, name: str) -> Sighting | None:
    """What `plan` says of pass `name`; None where it was not considered."""
    tried = [entry for entry in plan.reports if name in _list(entry, "passes")]
    kept = any(use.name == name for use in plan.passes)
    # Passes are added one at a time, so the smallest candidate with this one in it is the trial of it.
    own = min(tried, key=lambda entry: len(entry["passes"]), default=None)
    outcome: Outcome
    if kept:
        outcome, reason = "kept", ""
        own = tried[-1] if tried else None  # the kept candidate is listed last
    elif own is not None:
        outcome = "failed" if own.get("outcome") == "failed" else "rejected"
        reasons = [str(entry.get("reason", "")) for entry in tried if entry.get("outcome") != "kept"]
        reason = next(iter(reasons), "part of code that was not kept in the end")
    else:
        # "name: why; it would answer ..."
        why = (line.removeprefix(f"{name}: ") for line in plan.out_of_reach if line.startswith(f"{name}: "))
        first = next(why, None)
        if first is None:
            return None
        outcome, reason = "out of reach", first.partition("; it would answer")[0]
    timed = plan.paired if kept and plan.paired else {}
    report: Mapping[str, Any] = next((r for r in _list(own or {}, "reports") if r.get("name") == name), {})
    return Sighting(
        key=plan.key,
        created=plan.created,
        device=str(plan.environment.get("device_name") or plan.environment.get("device_type") or ""),
        outcome=outcome,
        reason=reason,
        beside=tuple(use.name for use in plan.passes if use.name != name) if kept else (),
        speedup=_number(timed.get("ratio")),
        low=_number(timed.get("low")),
        high=_number(timed.get("high")),
        rewritten=int(report.get("rewritten", 0)),
        refused=dict(Counter(str(why) for _, why in _list(report, "refused"))),
    )


def summary(found: Iterable[Sighting]) -> dict[str, Any]:
    """Counts of outcomes, the newest date, and the most frequent reasons, as JSON data.

    Reasons that differ in numbers alone count as one, in the words of the newest. A refusal is counted once a
    candidate.
    """
    found = sorted(found, key=lambda seen: seen.created, reverse=True)
    outcomes = Counter(seen.outcome for seen in found)
    refused = [(why, count) for seen in found for why, count in seen.refused.items()]
    return {
        "plans": len(found),
        **{name: outcomes[name] for name in ("kept", "rejected", "failed", "out of reach")},
        "newest": found[0].created if found else None,
        "reasons": _frequent((f"{seen.outcome}: {seen.reason}", 1) for seen in found if seen.reason),
        "refused": _frequent(refused),
    }


def _frequent(reasons: Iterable[tuple[str, int]], most: int = 5) -> list[dict[str, Any]]:
    words: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason, count in reasons:
        alike = _NUMBER.sub("#", reason)
        words.setdefault(alike, reason)
        counts[alike] += count
    return [{"reason": words[alike], "count": count} for alike, count in counts.most_common(most)]


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _list(entry: Mapping[str, Any], name: str) -> list[Any]:
    """A list of a candidate's report, empty where there is none: plans hold what older versions wrote."""
    value = entry.get(name)
    return value if isinstance(value, list) else []
