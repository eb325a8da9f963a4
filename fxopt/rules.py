"""The rules that turn a profile into labels: conditions over durations, modelled work and measured ceilings.

A rule is data, and reads the metrics of ``fxopt.metrics``; one that lacks a metric does not fire, and the
report says which it lacked. The model is the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009),
with ceilings measured on the device instead of taken from its datasheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fxopt.labels import Axis, Confidence, Evidence, Label, Scope
from fxopt.metrics import GraphTimes, Metric, graph_metrics, group_metrics

if TYPE_CHECKING:
    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings

__all__ = ["RULES", "LabelReport", "Rule", "UnknownThreshold", "label", "thresholds"]

_ROOFLINE = "Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009"


class UnknownThreshold(ValueError):
    """A threshold's name that no rule has; the message lists the known ones."""


Numbers = Mapping[str, float]  # metric -> value
Facts = Mapping[str, Any]  # what is known besides numbers: device, dtype, names


@dataclass(frozen=True)
class Rule:
    """One way in which a graph or a group can be limited.

    Args:
        name: of the rule; a threshold is "<rule>.<threshold>".
        axis: label that it gives.
        scope: what it looks at.
        requires: metrics without which it does not fire.
        applies: whether it concerns this graph or group at all, from facts; if not, nothing is missing.
        condition: of metrics and thresholds.
        headroom: ns per call that removing the limit could save at most.
        evidence: metrics that go into the label, each with the threshold that it was held against, or None.
        confidence: from metrics and facts.
        why: one sentence; fields in braces are metrics (numbers) and facts.
        reference: source of the rule and of its thresholds.
        thresholds: name -> default.
        nodes: fact that names the nodes concerned.
        excuse: fact that, when not "", keeps the rule from firing and is told in the report.
    """

    name: str
    axis: Axis
    scope: Scope
    requires: tuple[str, ...]
    condition: Callable[[Numbers, Numbers], bool]
    headroom: Callable[[Numbers], float]
    evidence: tuple[tuple[str, str | None], ...]
    confidence: Callable[[Numbers, Facts], Confidence]
    why: str
    reference: str
    thresholds: Mapping[str, float]
    applies: Callable[[Facts], bool] = lambda facts: True
    nodes: str = "nodes"
    excuse: str = ""


@dataclass(frozen=True)
class LabelReport:
    """Labels by headroom, the largest first; and what kept rules from being asked.

    Args:
        labels: sorted by ``headroom_ns``, descending.
        missing: sentences "rule X did not fire ...: lacks metric Y" (or why else it stood back), one per rule
            and metric.
    """

    labels: tuple[Label, ...]
    missing: tuple[str, ...] = field(default=())


def _launch_confidence(m: Numbers, facts: Facts) -> Confidence:
    return "high" if facts["device"] == "cuda" else "low"


def _memory_confidence(m: Numbers, facts: Facts) -> Confidence:
    """Data that fit in the last-level cache may never reach memory, whose rate is then not what limits."""
    if m["bytes"] <= m.get("last_level_cache_bytes", 0) or m["bandwidth_fraction"] > 1:
        return "low"
    return "high" if m["bandwidth_fraction"] >= 0.8 else "medium"


def _compute_confidence(m: Numbers, facts: Facts) -> Confidence:
    """A rate above the ceiling shows that the ceiling was measured on a busier device."""
    if m["flop_fraction"] > 1:
        return "low"
    return "high" if m["flop_fraction"] >= 0.7 else "medium"


RULES: tuple[Rule, ...] = (
    Rule(
        name="launch_bound",
        axis=Axis.LAUNCH_BOUND,
        scope="graph",
        requires=("wall_ns", "kernel_ns"),
        condition=lambda m, t: m["launch_gap"] > t["launch_gap"],
        headroom=lambda m: m["wall_ns"] - m["kernel_ns"],
        evidence=(("launch_gap", "launch_gap"), ("wall_ns", None), ("kernel_ns", None)),
        confidence=_launch_confidence,
        why="Kernels run for {kernel_ns:.0f} ns of the {wall_ns:.0f} ns that a call takes: the other "
        "{launch_gap:.0%} {gap_is}.",
        reference="this project's choice: well above what a launch queue kept full leaves between kernels",
        thresholds={"launch_gap": 0.15},
    ),
    Rule(
        name="memory_bound",
        axis=Axis.MEMORY_BOUND,
        scope="group",
        requires=("time_ns", "bytes", "flops", "copy_ceiling", "flop_ceiling"),
        condition=lambda m, t: (
            m["intensity"] < m["ridge"] and m["bandwidth_fraction"] >= t["bandwidth_fraction"]
        ),
        headroom=lambda m: m["time_ns"] - m["memory_floor_ns"],
        evidence=(
            ("bandwidth_fraction", "bandwidth_fraction"),
            ("intensity", "ridge"),
            ("bandwidth", None),
            ("copy_ceiling", None),
            ("bytes", None),
            ("last_level_cache_bytes", None),
            ("time_ns", None),
        ),
        confidence=_memory_confidence,
        why="It moves {bytes:.3g} modelled bytes at {bandwidth_fraction:.0%} of the device's copy rate, and "
        "its {intensity:.3g} FLOP/byte lie below the ridge of {ridge:.3g}{cached}.",
        reference=_ROOFLINE + "; 0.6 of a measured copy is this project's choice",
        thresholds={"bandwidth_fraction": 0.6},
    ),
    Rule(
        name="compute_bound",
        axis=Axis.COMPUTE_BOUND,
        scope="group",
        requires=("time_ns", "bytes", "flops", "copy_ceiling", "flop_ceiling"),
        condition=lambda m, t: m["intensity"] >= m["ridge"] and m["flop_fraction"] >= t["flop_fraction"],
        headroom=lambda m: m["time_ns"] - m["roofline_ns"],
        evidence=(
            ("flop_fraction", "flop_fraction"),
            ("intensity", "ridge"),
            ("flop_rate", None),
            ("flop_ceiling", None),
            ("flops", None),
            ("time_ns", None),
        ),
        confidence=_compute_confidence,
        why="It runs at {flop_fraction:.0%} of the {compute_dtype} matrix-product rate of this device, "
        "and its {intensity:.3g} FLOP/byte lie above the ridge of {ridge:.3g}.",
        reference=_ROOFLINE
        + "; 0.4 is this project's choice: few shapes fill a device like a large square product",
        thresholds={"flop_fraction": 0.4},
    ),
    Rule(
        name="tensor_core_idle",
        axis=Axis.TENSOR_CORE_IDLE,
        scope="group",
        requires=("time_ns", "flops", "bytes", "copy_ceiling", "flop_ceiling"),
        applies=lambda facts: bool(facts["float32_products"]) and facts["narrow_units"],
        condition=lambda m, t: (
            m["flops"] > 0
            and m["narrow_ceiling"] > t["rate_ratio"] * m["flop_ceiling"]
            and m["time_ns"] > t["time_over_floor"] * m["narrow_floor_ns"]
        ),
        headroom=lambda m: m["time_ns"] - m["narrow_floor_ns"],
        evidence=(
            ("rate_ratio", "rate_ratio"),
            ("time_over_floor", "time_over_floor"),
            ("dtype_bits", None),
            ("flops", None),
            ("flop_rate", None),
            ("flop_ceiling", None),
            ("narrow_ceiling", None),
            ("time_ns", None),
        ),
        confidence=lambda m, facts: "high" if m["time_over_floor"] >= 2 else "medium",
        why="A {compute_dtype} matrix product ({flops:.3g} FLOP) takes {time_over_floor:.1f} times what the "
        "device's bfloat16 units need for the same work.",
        reference=_ROOFLINE
        + "; the ratio of 1.1 keeps the noise of two measured ceilings from counting as hardware",
        thresholds={"rate_ratio": 1.1, "time_over_floor": 1.0},
        nodes="float32_products",
        excuse="tf32_on",
    ),
)


def thresholds(
    overrides: Mapping[str, float] | None = None, rules: tuple[Rule, ...] = RULES
) -> dict[str, float]:
    """Every threshold as "<rule>.<threshold>", defaults overridden.

    Raises:
        UnknownThreshold: a name that no rule has; the message lists the known ones.
        ValueError: a value that is not a finite number.
    """
    known = {f"{rule.name}.{name}": value for rule in rules for name, value in rule.thresholds.items()}
    for name, value in (overrides or {}).items():
        if name not in known:
            raise UnknownThreshold(f"unknown threshold {name!r}; known: {', '.join(sorted(known))}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"threshold {name!r} is {value!r}, expected a finite number")
        known[name] = float(value)
    return known


def label(
    profile: Profile,
    ceilings: Ceilings,
    *,
    thresholds: Mapping[str, float] | None = None,
    rules: tuple[Rule, ...] = RULES,
) -> LabelReport:
    """Labels of a profile.

    Args:
        profile: ``groups()``, ``nodes``, ``wall_ns``, ``kernel_ns`` and ``environment`` are read.
        ceilings: of the device that the profile was taken on.
        thresholds: by name, over the defaults.
        rules: the table.

    Raises:
        UnknownThreshold: a name that no rule has.
    """
    limits = _thresholds(thresholds, rules)
    labels: list[Label] = []
    lacking: dict[tuple[str, str], list[str]] = {}
    subjects = [graph_metrics(profile)] + [
        group_metrics(row, profile, ceilings) for row in profile.groups().to_dict("records")
    ]
    for metrics, facts in subjects:
        for rule in rules:
            if rule.scope != facts["scope"] or not rule.applies(facts):
                continue
            absent = [name for name in rule.requires if name not in metrics]
            if rule.excuse and facts.get(rule.excuse):
                absent = [""]  # an excuse, told in the facts
            for name in absent:
                what = f"lacks metric {name}" if name else str(facts[rule.excuse])
                lacking.setdefault((rule.name, what), []).append(facts["launch"])
            if not absent:
                found = _apply(rule, metrics, facts, limits)
                labels += [found] if found else []
    order = sorted(labels, key=lambda item: (-item.headroom_ns, item.axis.value, item.launch))
    return LabelReport(tuple(order), tuple(_sentence(*key, where) for key, where in lacking.items()))


def label_graph(
    wall_ns: float,
    kernel_ns: float,
    environment: Mapping[str, Any],
    *,
    thresholds: Mapping[str, float] | None = None,
    rules: tuple[Rule, ...] = RULES,
) -> list[Label]:
    """Labels of a whole graph from its two times per call alone, for code that was measured but not attributed.

    environment: of the profile; its ``device_type`` is read.
    """
    limits = _thresholds(thresholds, rules)
    metrics, facts = graph_metrics(GraphTimes(wall_ns, kernel_ns, environment))
    graph_rules = [rule for rule in rules if rule.scope == "graph" and rule.applies(facts)]
    able = [rule for rule in graph_rules if all(name in metrics for name in rule.requires)]
    return [found for rule in able if (found := _apply(rule, metrics, facts, limits)) is not None]


_thresholds = thresholds  # ``label`` has a parameter of that name


def _apply(rule: Rule, metrics: Mapping[str, Metric], facts: Facts, limits: Numbers) -> Label | None:
    numbers = {name: metric.value for name, metric in metrics.items()}
    own = {name: limits[f"{rule.name}.{name}"] for name in rule.thresholds}
    if not rule.condition(numbers, own):
        return None
    evidence = tuple(
        Evidence(
            name,
            metrics[name].value,
            None if against is None else own.get(against, numbers.get(against)),
            metrics[name].unit,
            metrics[name].source,
        )
        for name, against in rule.evidence
        if name in metrics
    )
    return Label(
        axis=rule.axis,
        scope=rule.scope,
        nodes=tuple(facts[rule.nodes]),
        launch=facts["launch"],
        evidence=evidence,
        confidence=rule.confidence(numbers, facts),
        headroom_ns=max(0.0, float(rule.headroom(numbers))),
        why=rule.why.format(**{**facts, **numbers}),
    )


def _sentence(rule: str, what: str, where: list[str]) -> str:
    places = [place for place in where if place]
    shown = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
    on = f" on {len(places)} group{'s' * (len(places) > 1)} ({shown})" if places else ""
    return f"rule {rule} did not fire{on}: {what}"
