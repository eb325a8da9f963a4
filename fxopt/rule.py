"""What a rule is: comparisons of metrics as data, and what the label says that it gives."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from fxopt.labels import Axis

__all__ = ["Facts", "Numbers", "Rule", "Test"]

Numbers = Mapping[str, float]  # metric -> value
Facts = Mapping[str, Any]  # what is known besides numbers: device, type, names
Sign = Literal[">", ">=", "<", "<="]
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@dataclass(frozen=True)
class Test:
    """``metric sign against``: against a number, which is the default of a threshold, or against another metric."""

    __test__ = False  # not a test of pytest's

    metric: str
    sign: Sign
    against: float | str

    def limit(self, metrics: Numbers, limits: Numbers) -> float:
        return metrics[self.against] if isinstance(self.against, str) else limits.get(self.metric, self.against)

    def holds(self, metrics: Numbers, limits: Numbers) -> bool:
        return bool(_COMPARE[self.sign](metrics[self.metric], self.limit(metrics, limits)))

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.metric, self.against) if isinstance(self.against, str) else (self.metric,)

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.against if isinstance(self.against, str) else f'{self.against:g}'}"


@dataclass(frozen=True)
class Rule:
    """One way in which a graph, a fused group or a kernel can be limited.

    Args:
        name: of the rule; a threshold is "<rule>.<metric>".
        axis: label that it gives.
        scope: "graph", or "group" for launches of compiled code and kernels outside of it.
        tests: all must hold.
        headroom: metric, in ns per call, of what removing the limit could save at most.
        why: one sentence; fields in braces are facts and metrics: times, bytes, FLOPs and their rates come with their
            unit (``{time_ns}``: "12.3 us"), others are numbers (``{launch_gap:.0%}``).
        reference: source of the rule and of its thresholds.
        evidence: further metrics that the label carries where they are known.
        high: comparisons that make the confidence "high" if they all hold, and low ones that make it "low" if any does
            (by numbers that are no thresholds); else it is "medium". One whose metric is missing does not hold.
        devices: where it can hold; elsewhere nothing is missing.
        facts: names of facts without which it does not concern a group.
        nodes: fact that names the nodes concerned.
        excuse: fact that, when not "", keeps the rule from firing and is told in the report.
        stands_in: name of the rule for which this one is asked where that one lacks a metric or the device.
    """

    name: str
    axis: Axis
    scope: Literal["graph", "group"]
    tests: tuple[Test, ...]
    headroom: str
    why: str
    reference: str
    evidence: tuple[str, ...] = ()
    high: tuple[Test, ...] = ()
    low: tuple[Test, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    facts: tuple[str, ...] = ()
    nodes: str = "nodes"
    excuse: str = ""
    stands_in: str = ""

    @cached_property
    def thresholds(self) -> dict[str, float]:
        """metric -> default."""
        return {test.metric: test.against for test in self.tests if not isinstance(test.against, str)}

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """Metrics without which it does not fire."""
        return tuple(dict.fromkeys([need for test in self.tests for need in test.needs] + [self.headroom]))

    def concerns(self, facts: Facts) -> bool:
        scope = "graph" if facts["scope"] == "graph" else "group"
        return scope == self.scope and facts["device"] in self.devices and all(facts[name] for name in self.facts)
