"""The engine that turns a profile into labels, and what a rule is.

A rule is data: comparisons of metrics (``fxopt.metrics``) with thresholds or with each other, all of which must hold.
One that lacks a metric does not fire, and the report says which it lacked; a rule for durations alone may stand in for
one that needs counters. The rules themselves are in ``fxopt.rule_table``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fxopt.labels import Confidence, Evidence, Label
from fxopt.metrics import GraphTimes, Metric, graph_metrics, lacked, subjects
from fxopt.report.terminal import shorten
from fxopt.rule import Facts, Numbers, Rule, Test
from fxopt.rule_table import RULES
from profiler_core.quantities import quantity

if TYPE_CHECKING:
    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings

__all__ = [
    "RULES",
    "LabelReport",
    "Rule",
    "Test",
    "UnknownThreshold",
    "describe",
    "label",
    "label_graph",
    "thresholds",
]


class UnknownThreshold(ValueError):
    """A threshold's name that no rule has; the message lists those like it."""


@dataclass(frozen=True)
class LabelReport:
    """Labels by headroom, the largest first; and what kept rules from being asked.

    Args:
        labels: sorted by ``headroom_ns``, descending.
        missing: sentences "rule X did not fire ...: lacks Y" (or why else it stood back), one a rule and reason.
    """

    labels: tuple[Label, ...]
    missing: tuple[str, ...] = field(default=())


def thresholds(overrides: Mapping[str, float] | None = None, rules: tuple[Rule, ...] | None = None) -> dict[str, float]:
    """Every threshold as "<rule>.<metric>", defaults overridden.

    Raises:
        UnknownThreshold: a name that no rule has; the message lists those like it.
        ValueError: a value that is not a finite number, or beyond what the metric can be.
    """
    table = RULES if rules is None else rules
    known = {f"{rule.name}.{name}": value for rule in table for name, value in rule.thresholds.items()}
    for name, value in (overrides or {}).items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 3, 0.5) or sorted(known)
            raise UnknownThreshold(
                f"no threshold is named {name!r}; there are {', '.join(near)} (`fxopt rules` lists all {len(known)})"
            )
        known[name] = _possible(name, value)
    return known


#: What a metric can be at most: thresholds beyond are a slip of the unit, such as 15 for a share of 0.15. None is below
#: zero. A fraction of a rate that was measured may be above 1, and has no bound.
_MOST = {
    **dict.fromkeys(("arithmetic", "busiest", "dram_throughput", "l2_throughput", "sm_throughput"), (100, "per cent")),
    **dict.fromkeys(("tensor_active", "theoretical_occupancy"), (100, "per cent")),
    **dict.fromkeys(("cast_share", "excess_share", "layout_share", "opaque_share", "spill_share"), (1, "a share")),
    **dict.fromkeys(("grid_efficiency", "launch_gap", "occupancy_reached", "sm_active"), (1, "a share")),
    "threads_per_instruction": (32, "threads of a warp"),
}


def _possible(name: str, value: Any) -> float:
    number = _finite(name, value)
    most, unit = _MOST.get(name.rpartition(".")[2], (None, ""))
    if most is not None and not 0 <= number <= most:
        raise ValueError(f"threshold {name!r} is {number:g}, expected {unit} from 0 to {most}")
    if number < 0:
        raise ValueError(f"threshold {name!r} is {number:g}, expected 0 or more")
    return number


def _finite(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer beyond what a float holds
            if math.isfinite(number := float(value)):
                return number
    raise ValueError(f"threshold {name!r} is {str(value)[:40]!r}, expected a finite number")


def label(
    profile: Profile,
    ceilings: Ceilings | None,
    *,
    thresholds: Mapping[str, float] | None = None,
    rules: tuple[Rule, ...] | None = None,
) -> LabelReport:
    """Labels of a profile: of the whole, of each launch of compiled code, and of each kernel outside of it.

    Args:
        profile: of the measured code; with counters the labels rest on what was measured.
        ceilings: of the device that the profile was taken on; None where they are not known, and then the rules that
            need one do not fire.
        thresholds: by name, over the defaults.
        rules: the table; by default ``RULES``.

    Raises:
        UnknownThreshold: a name that no rule has.
        ValueError: a threshold that is not a finite number.
    """
    table = RULES if rules is None else rules
    limits = _thresholds(thresholds, table)
    labels: list[Label] = []
    lacking: dict[tuple[str, str], list[str]] = {}
    for metrics, facts in (graph_metrics(profile), *subjects(profile, ceilings)):
        numbers = {name: metric.value for name, metric in metrics.items()}
        absent = {rule.name: [n for n in rule.needs if n not in numbers] for rule in table if rule.concerns(facts)}
        for rule in table:
            excuse = str(facts.get(rule.excuse, "")) if rule.excuse else ""
            # A stand-in is asked where the rule that it stands in for cannot be.
            if rule.name not in absent or (rule.stands_in in absent and (excuse or not absent[rule.stands_in])):
                continue
            if excuse:
                what = excuse
            elif absent[rule.name]:
                what = f"lacks {', '.join(lacked(absent[rule.name], numbers))}"
            else:
                found = _apply(rule, metrics, numbers, facts, limits)
                labels += [found] if found else []
                continue
            lacking.setdefault((rule.name, what), []).append(facts["launch"])
    order = sorted(labels, key=lambda item: (-item.headroom_ns, item.axis.value, item.launch))
    return LabelReport(tuple(order), tuple(_sentence(*key, where) for key, where in lacking.items()))


def label_graph(
    wall_ns: float,
    kernel_ns: float,
    environment: Mapping[str, Any],
    *,
    thresholds: Mapping[str, float] | None = None,
) -> list[Label]:
    """Labels of a whole graph from its two times per call alone, for code that was measured but not attributed.

    environment: of the profile; its ``device_type`` is read.
    """
    limits = _thresholds(thresholds)
    metrics, facts = graph_metrics(GraphTimes(wall_ns, kernel_ns, environment))
    numbers = {name: metric.value for name, metric in metrics.items()}
    able = [rule for rule in RULES if rule.concerns(facts) and all(name in numbers for name in rule.needs)]
    return [found for rule in able if (found := _apply(rule, metrics, numbers, facts, limits)) is not None]


def describe(overrides: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
    """One row a rule, as plain data: what it gives, when, with which thresholds (overridden ones as they are then)."""
    limits = thresholds(overrides)
    return [
        {
            "name": rule.name,
            "axis": rule.axis.value,
            "scope": rule.scope,
            "condition": " and ".join(_spell(test, rule, limits) for test in rule.tests),
            "thresholds": {f"{rule.name}.{metric}": limits[f"{rule.name}.{metric}"] for metric in rule.thresholds},
            "needs": list(rule.needs),
            "devices": list(rule.devices),
            "headroom": rule.headroom,
            "why": rule.why,
            "reference": rule.reference,
            "stands_in": rule.stands_in,
        }
        for rule in RULES
    ]


_thresholds = thresholds  # ``label`` has a parameter of that name


def _spell(test: Test, rule: Rule, limits: Numbers) -> str:
    if isinstance(test.against, str):
        return str(test)
    return f"{test.metric} {test.sign} {limits[f'{rule.name}.{test.metric}']:g}"


def _apply(
    rule: Rule, metrics: Mapping[str, Metric], numbers: Numbers, facts: Facts, limits: Numbers
) -> Label | None:
    own = {name: limits[f"{rule.name}.{name}"] for name in rule.thresholds}
    if not all(test.holds(numbers, own) for test in rule.tests):
        return None
    compared: dict[str, float] = {}
    for test in rule.tests:
        compared.setdefault(test.metric, test.limit(numbers, own))
    shown = dict.fromkeys([*compared, *rule.evidence])
    return Label(
        axis=rule.axis,
        scope=facts["scope"],
        nodes=tuple(facts[rule.nodes]),
        launch=facts["launch"],
        evidence=tuple(
            Evidence(name, metrics[name].value, compared.get(name), metrics[name].unit, metrics[name].source)
            for name in shown
            if name in metrics
        ),
        confidence=_confidence(rule, numbers),
        headroom_ns=max(0.0, numbers[rule.headroom]),
        why=rule.why.format(**{**facts, **{name: _spoken(metric) for name, metric in metrics.items()}}),
        reference=rule.reference,
        backward=bool(facts.get("backward")),
    )


def _spoken(metric: Metric) -> float | str:
    """As a sentence has it: with its unit, but for shares and counts, whose sentences say what they are."""
    return quantity(metric.value, metric.unit) if metric.unit in _SPELLED else metric.value


_SPELLED = ("ns", "byte", "byte/s", "FLOP", "FLOP/s")


def _confidence(rule: Rule, numbers: Numbers) -> Confidence:
    def holds(test: Test) -> bool:
        return all(need in numbers for need in test.needs) and test.holds(numbers, {})

    if any(map(holds, rule.low)):
        return "low"
    return "high" if rule.high and all(map(holds, rule.high)) else "medium"


def _sentence(rule: str, what: str, where: list[str]) -> str:
    places = [place for place in where if place]
    # A kernel's name may run to thousands of characters.
    shown = ", ".join(shorten(place, 48) for place in places[:3]) + (", ..." if len(places) > 3 else "")
    on = f" on {len(places)} group{'s' * (len(places) > 1)} ({shown})" if places else ""
    return f"rule {rule} did not fire{on}: {what}"
