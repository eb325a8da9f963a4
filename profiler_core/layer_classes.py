"""Marks the nodes of a profile with the class of the repeated layer that they are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from profiler_core import layers
from profiler_core.quantities import duration

if TYPE_CHECKING:
    from profiler_core.collect.provenance import LaunchId, Provenance
    from profiler_core.profiles import Profile


def with_layer_classes(profile: Profile, provenances: Sequence[Provenance]) -> Profile:
    """The profile with a column ``layer_class`` in ``nodes`` ("" outside of repeated layers), and a note per graph that
    counts layers and classes.
    """
    import pandas as pd

    classes: dict[tuple[str, str], str] = {}
    notes = []
    for provenance in provenances:
        found = layers.find(provenance)
        classes |= {(provenance.graph, node): name for node, name in found.node_class.items()}
        if found.classes:
            notes.append(f"graph {provenance.graph}: {found.describe()}")
    keys = zip(profile.nodes["graph"], profile.nodes["node"], strict=True)
    # dtype said: pandas 3 would infer its own string type, and a profile would differ after save and load.
    column = pd.Series([classes.get(key, "") for key in keys], dtype=object, index=profile.nodes.index)
    nodes = profile.nodes.assign(layer_class=column)
    return replace(profile, nodes=nodes, notes=(*profile.notes, *notes))


def twins(provenances: Sequence[Provenance]) -> dict[LaunchId, LaunchId]:
    """Every launch of the graphs, with the launch whose counters stand for it."""
    return {
        (p.graph, key): (p.graph, first)
        for p in provenances
        for key, first in layers.find(p).launch_representative.items()
    }


def saved(profile: Profile, provenances: Sequence[Provenance]) -> str:
    """What measuring one launch of each class saves, in a sentence; and how even the twins are."""
    groups = profile.groups()
    time = dict(zip(zip(groups["graph"], groups["launch"], strict=True), groups["time_ns"].tolist(), strict=True))
    total = measured = 0.0
    layers_, classes, launches, chosen, uneven = 0, 0, 0, 0, 0
    for p in provenances:
        found = layers.find(p)
        durations = {launch.key: float(time.get((p.graph, launch.key), 0.0)) for launch in p.launches}
        saving = layers.saving(found, durations)
        total += sum(durations.values())
        measured += saving.share * sum(durations.values())
        layers_, classes = layers_ + saving.layers, classes + saving.classes
        launches, chosen = launches + saving.launches, chosen + saving.representatives
        uneven += len(layers.uneven(found, durations))
    text = (
        f"counters were taken of {chosen} of {launches} launches, one of each class of equal layers ({layers_} layers, "
        f"{classes} {'class' if classes == 1 else 'classes'}), "
        f"which are {duration(measured)} of {duration(total)} of kernel time"
    )
    if uneven:
        text += f"; {uneven} of the others take more than {layers.UNEVEN} times as long or as short as their twin"
    return text
