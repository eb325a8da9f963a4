"""Labels: what limits a graph or a fused group, the evidence, and the time that it could give back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, cast, get_args

__all__ = ["Axis", "Confidence", "Evidence", "Label", "LabelError", "Scope", "Source"]

Scope = Literal["graph", "group", "kernel"]
Confidence = Literal["high", "medium", "low"]
Source = Literal["measured", "modelled", "ceiling"]


class LabelError(ValueError):
    """A label from JSON that lacks a field or holds one of the wrong kind; the message names it."""


class Axis(str, Enum):
    """What can limit a graph, a group of fused nodes, or a kernel outside of every compiled graph."""

    LAUNCH_BOUND = "launch_bound"  # the device waits for launches
    MEMORY_BOUND = "memory_bound"  # device memory's bandwidth
    L2_BOUND = "l2_bound"  # L2's bandwidth
    COMPUTE_BOUND = "compute_bound"  # arithmetic units or tensor cores
    TENSOR_CORE_IDLE = "tensor_core_idle"  # a matrix product that tensor cores could run, and do not
    LATENCY_BOUND = "latency_bound"  # warps wait, and no unit is busy
    OCCUPANCY_LIMITED = "occupancy_limited"  # too few warps fit on an SM; the sentence says for want of what
    WAVE_STARVED = "wave_starved"  # too few blocks for the SMs, or a last wave that leaves most of them idle
    REGISTER_SPILL = "register_spill"  # traffic to local memory
    DIVERGENT = "divergent"  # threads of a warp go different ways
    LAYOUT_CONVERSION = "layout_conversion"  # data only change their places
    CAST_TRAFFIC = "cast_traffic"  # data only change their type
    EXCESS_TRAFFIC = "excess_traffic"  # more bytes than the operators have to move
    OPAQUE_LIBRARY = "opaque_library"  # a library's black box


# A plan holds hundreds of labels and pieces of evidence, each of which is looked at when it is read.
_AXES = tuple(axis.value for axis in Axis)
_SCOPES, _CONFIDENCES, _SOURCES = get_args(Scope), get_args(Confidence), get_args(Source)


@dataclass(frozen=True)
class Evidence:
    """One number that a label rests on.

    Args:
        metric: its name.
        value: finite, in ``unit``.
        threshold: what the value was compared with, None where it only informs.
        unit: for example "ns", "byte/s", "FLOP/byte", "1".
        source: "measured" (a clock), "modelled" (from shapes) or "ceiling" (measured on the device
            beforehand); a number made of several is modelled if any part is, else a ceiling.
    """

    metric: str
    value: float
    threshold: float | None
    unit: str
    source: Source

    def __post_init__(self) -> None:
        for name, number in (("value", self.value), ("threshold", self.threshold)):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"evidence {self.metric!r}: {name} is {number}, not a finite number")

    def to_json(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "value": self.value,
            "threshold": self.threshold,
            "unit": self.unit,
            "source": self.source,
        }

    @classmethod
    def from_json(cls, data: Any, where: str = "evidence") -> Evidence:
        """Raises LabelError naming the field under ``where``."""
        threshold = (
            None
            if _field(data, "threshold", (int, float, type(None)), where) is None
            else _number(data, "threshold", where)
        )
        return cls(
            metric=_field(data, "metric", (str,), where),
            value=_number(data, "value", where),
            threshold=threshold,
            unit=_field(data, "unit", (str,), where),
            source=cast(Source, _choice(data, "source", _SOURCES, where)),
        )


@dataclass(frozen=True)
class Label:
    """One limit found.

    Args:
        axis: what limits.
        scope: the whole graph, one launch's group of nodes, or a kernel outside of every compiled graph.
        nodes: FX nodes concerned; empty for a graph.
        launch: key "kernel:handle" of the launch, the name of a kernel outside, "" for a graph.
        evidence: what it rests on.
        confidence: how far to trust it.
        headroom_ns: time per call that removing the limit could save at most, never negative.
        why: one sentence.
        reference: source of the rule that gave it.
        backward: whether it is about the backward of a graph with gradients.
    """

    axis: Axis
    scope: Scope
    nodes: tuple[str, ...]
    launch: str
    evidence: tuple[Evidence, ...]
    confidence: Confidence
    headroom_ns: float
    why: str
    reference: str = ""
    backward: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.headroom_ns) and self.headroom_ns >= 0):
            raise ValueError(f"label {self.axis.value}: headroom_ns is {self.headroom_ns}, not a finite time")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; ``from_json`` gives back an equal label."""
        return {
            "axis": self.axis.value,
            "scope": self.scope,
            "nodes": list(self.nodes),
            "launch": self.launch,
            "evidence": [item.to_json() for item in self.evidence],
            "confidence": self.confidence,
            "headroom_ns": self.headroom_ns,
            "why": self.why,
            "reference": self.reference,
            "backward": self.backward,
        }

    @classmethod
    def from_json(cls, data: Any) -> Label:
        """Raises LabelError naming the field that is missing, of the wrong kind or of an unknown value."""
        nodes = _field(data, "nodes", (list, tuple), "label")
        if not all(isinstance(name, str) for name in nodes):
            raise LabelError("label: field 'nodes' holds something other than names")
        evidence = _field(data, "evidence", (list, tuple), "label")
        try:
            return cls(
                axis=Axis(_choice(data, "axis", _AXES, "label")),
                scope=cast(Scope, _choice(data, "scope", _SCOPES, "label")),
                nodes=tuple(nodes),
                launch=_field(data, "launch", (str,), "label"),
                evidence=tuple(
                    Evidence.from_json(item, f"label: evidence[{index}]")
                    for index, item in enumerate(evidence)
                ),
                confidence=cast(Confidence, _choice(data, "confidence", _CONFIDENCES, "label")),
                headroom_ns=_number(data, "headroom_ns", "label"),
                why=_field(data, "why", (str,), "label"),
                reference=_field(data, "reference", (str,), "label") if "reference" in data else "",
                backward=_field(data, "backward", (bool,), "label") if "backward" in data else False,
            )
        except LabelError:
            raise
        except ValueError as error:
            raise LabelError(str(error)) from error


def _field(data: Any, name: str, kinds: tuple[type, ...], where: str) -> Any:
    if not isinstance(data, Mapping):
        raise LabelError(f"{where}: expected an object, found {type(data).__name__}")
    if name not in data:
        raise LabelError(f"{where}: field '{name}' is missing")
    value = data[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise LabelError(f"{where}: field '{name}' is {value!r}, expected {expected}")
    return value


def _number(data: Any, name: str, where: str) -> float:
    return float(_field(data, name, (int, float), where))


def _choice(data: Any, name: str, choices: Any, where: str) -> str:
    value = _field(data, name, (str,), where)
    if value not in choices:
        raise LabelError(f"{where}: field '{name}' is {value!r}, expected one of {', '.join(choices)}")
    return value
