"""From labels to proposals: which passes answer one, what it may save, and why the others are out of reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fxopt import registry, rules
from fxopt.labels import Label
from fxopt.options import Options
from fxopt.registry import Pass, PassContext
from fxopt.report.model import GraphReport
from fxopt.search import Proposal
from profiler_core.quantities import duration


@dataclass
class Proposals:
    """The passes of one graph. layer_classes: the class of repeated layer of each node that is in one. What is out of
    reach goes to the report.
    """

    passes: Sequence[Pass]
    options: Options
    report: GraphReport
    context: PassContext
    layer_classes: Mapping[str, str] = field(default_factory=dict)
    _considered: set[str] = field(default_factory=set)

    def answering(self, labels: Sequence[Label]) -> list[Proposal]:
        """Proposals of passes that answer one of `labels`, each pass considered once."""
        proposals = []
        for p in self.passes:
            mine = [label for label in labels if label.axis in p.answers]
            if not mine or p.name in self._considered or self.context.device.type not in p.devices:
                continue
            if not registry.concerned(p, self.context):
                continue
            self._considered.add(p.name)
            by_class = headroom(mine, self.layer_classes)
            reason, variants = self._variants(p)
            if variants:
                proposals.append(Proposal(tuple(variants), sum(by_class.values()), by_class))
                continue
            axes = ", ".join(sorted({label.axis.value for label in mine}))
            nodes = len({name for label in mine for name in label.nodes}) or 1
            self.report.out_of_reach.append(
                f"{p.name}: {reason}; it would answer {axes} on {nodes} nodes "
                f"(headroom {duration(sum(by_class.values()))})"
            )
        return proposals

    def _variants(self, p: Pass) -> tuple[str, list[Pass]]:
        """What to try, or the reason why nothing can be."""
        reason = registry.inapplicable(p, self.context)
        if not reason and not self.context.budget.allows(p.precision):
            reason = f"needs precision={p.precision.value!r}, and {self.options.precision!r} was asked for"
        if reason:
            return reason, []
        try:
            return "", registry.variants(p, self.context)
        except Exception as error:
            return f"its variants() raised {type(error).__name__}: {error}", []

    def needs(self, p: Pass) -> list[Pass]:
        """What `p` cannot do without, and what these cannot."""
        known = {q.name: q for q in self.passes if q.name != p.name}
        found: dict[str, Pass] = {}
        pending = list(p.needs)
        while pending:
            name = pending.pop()
            if name in known and name not in found:
                found[name] = known[name]
                pending.extend(known[name].needs)
        return list(found.values())


def to_come(
    labels: Sequence[Label],
    *,
    kernel_ns: float,
    host_ns: float,
    floor_ns: float,
    environment: Mapping[str, Any],
    thresholds: Mapping[str, float],
) -> list[Label]:
    """What will limit the graph once `labels` are answered: launches, where a call keeps the CPU busy for `host_ns` and
    the kernels then take less. A candidate whose kernels are much shorter gains little without an answer to that.

    kernel_ns: of a call; of it the labels' headroom is taken, down to the floor at most. All in ns.
    """
    left = max(kernel_ns - sum(headroom(labels, {}).values()), floor_ns, 1.0)
    expected = rules.label_graph(max(host_ns, left), left, environment, thresholds=thresholds)
    return [
        replace(
            label,
            confidence="low",
            evidence=tuple(replace(item, source="modelled") for item in label.evidence),
            why=f"Once the other labels are answered: {label.why[0].lower()}{label.why[1:]}",
        )
        for label in expected
    ]


def headroom(labels: Sequence[Label], layer_classes: Mapping[str, str]) -> dict[str, float]:
    """What answering `labels` could save a call at most, in ns, by class of repeated layer ("": outside of any).

    A kernel may carry several labels; what it could save at most is the largest of them.
    """
    most: dict[tuple[str, bool], Label] = {}
    for label in labels:
        kernel = label.launch, label.backward
        if kernel not in most or label.headroom_ns > most[kernel].headroom_ns:
            most[kernel] = label
    by_class: dict[str, float] = {}
    for label in most.values():
        of = next((layer_classes[name] for name in label.nodes if name in layer_classes), "")
        by_class[of] = by_class.get(of, 0.0) + label.headroom_ns
    return by_class
