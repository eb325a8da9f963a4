"""What reports are made of, whether it came as a Report or as a bare Profile: a part for each profile or graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxopt.report.model import Report

if TYPE_CHECKING:
    from fxopt.labels import Label
    from fxopt.report.model import GraphReport
    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings

__all__ = ["Part", "labelled", "parts"]


@dataclass(frozen=True)
class Part:
    """A profile with its labels, and the graph's story where fxopt tuned it.

    name: "graph 2 of 3"; "" where there is one. profile: None where nothing was measured. missing: which rules could
    not be asked, and what they lacked. ceilings: None where those of the device are not known.
    """

    name: str
    profile: Profile | None
    labels: tuple[Label, ...]
    missing: tuple[str, ...]
    ceilings: Ceilings | None
    graph: GraphReport | None = None


def parts(subject: Report | Profile, ceilings: Ceilings | None = None) -> list[Part]:
    """The parts of a report or a profile; a profile is labelled now, with `ceilings` or those of its device that are
    kept on this machine.
    """
    if isinstance(subject, Report):
        several = len(subject.graphs) > 1
        return [
            Part(
                f"graph {number} of {len(subject.graphs)}" if several else "",
                graph.profile,
                tuple(graph.labels),
                tuple(graph.missing),
                graph.ceilings,
                graph,
            )
            for number, graph in enumerate(subject.graphs, 1)
        ]
    return [labelled(subject, ceilings)]


def labelled(profile: Profile, ceilings: Ceilings | None = None, labels: Sequence[Label] | None = None) -> Part:
    """A profile with `labels`, or those that the rules give for `ceilings`, else for the ceilings of its device that
    are kept on this machine, else without: the rules that need one do not fire then, and `missing` says so.
    """
    if labels is not None:
        return Part("", profile, tuple(labels), (), ceilings)
    from fxopt import rules

    if ceilings is None:
        ceilings = kept_ceilings(profile)
    found = rules.label(profile, ceilings)
    unknown = (
        f"no ceilings of {profile.environment.get('device_name') or 'the device'} are kept on this machine "
        "(`fxopt ceilings` measures those of this one)"
    )
    return Part("", profile, found.labels, found.missing if ceilings else (unknown, *found.missing), ceilings)


def kept_ceilings(profile: Profile) -> Ceilings | None:
    """Ceilings of the profile's device that were measured on this machine: under the same torch and thread count if
    there are such, else the latest. Measures nothing.
    """
    import json

    from fxopt.options import OptionError, resolve_options
    from fxopt.plan import PlanStore
    from profiler_core.roofline import Ceilings

    found = []
    try:
        files = list(PlanStore(resolve_options({}).plan_root).ceilings_dir.glob("*.json"))
    except (OSError, OptionError):
        return None
    known = {name: profile.environment.get(name) for name in ("torch", "threads")}
    for file in files:
        try:
            item = Ceilings.from_json(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
        if item.device == profile.environment.get("device_name"):
            found.append((all(item.environment.get(n) == v for n, v in known.items()), item.measured, item))
    return max(found, key=lambda one: one[:2])[2] if found else None
