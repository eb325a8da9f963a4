"""Adds hardware counters, read by CUPTI in this process, to a profile of the same code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from profiler_core.collect.provenance import LaunchId, Provenance
    from profiler_core.profiles import Profile

COUNTER_SETS = ("none", "quick", "full")
# Counters of one layer stand for its twins only where kernels outside of the compiled graphs, which have none then,
# are of no account.
COVERED = 0.99


def counter_keys(wanted: str | Sequence[str]) -> tuple[str, ...]:
    """The counters of a set, or those listed. Raises ValueError, naming what there is."""
    from profiler_core import counters

    if isinstance(wanted, str):
        sets = {"none": (), "quick": counters.QUICK, "full": counters.FULL}
        if wanted not in sets:
            raise ValueError(f"counters={wanted!r}: expected one of {', '.join(COUNTER_SETS)}, or a list of counters")
        return sets[wanted]
    unknown = [key for key in wanted if key not in counters.FULL]
    if unknown:
        raise ValueError(f"counters: no {', '.join(map(repr, unknown))}; there are {', '.join(counters.FULL)}")
    return tuple(wanted)


@dataclass(frozen=True)
class Asked:
    """The options of :func:`profile` that say how counters are taken."""

    keys: Sequence[str]
    replay: Any = "auto"
    deduplicate: bool | None = None
    primed: bool = False


def with_cupti(
    result: Profile,
    call: Callable[[], Any],
    asked: Asked,
    device: torch.device,
    state: Sequence[torch.Tensor],
    graphs: Sequence[tuple[Any, Provenance]],
    notes: list[str],
) -> Profile:
    from profiler_core import counters, layer_classes
    from profiler_core.attribute.counter_join import carried, with_counters
    from profiler_core.collect.conflicts import ProfilerError
    from profiler_core.collect.cupti import session

    provenances = [p for _, p in graphs]
    window = result.window
    launched, ranged = window["launch"] != "", window["method"].isin(("correlation", "enclosure"))
    covered = window.loc[launched, "duration_ns"].sum() >= COVERED * result.total_ns
    # A replayed CUDA graph runs past the ranges that tell one launch from another.
    replayed = bool((launched & ~ranged).any())
    if asked.deduplicate and replayed:
        notes.append("not deduplicated: the launches in a replayed CUDA graph cannot be measured one by one")
    try:
        chip = counters.chip_of(tuple(result.environment["capability"]))
        names = counters.metric_names(chip, asked.keys)
        if not names:  # those of the launch record alone, which the profile has
            return result
        replay, reason = asked.replay, "asked for"
        if replay == "auto":
            with _on(device):
                same, reason = session.repeatable(call, state)
            replay = "application" if same else "kernel"
        wanted = asked.deduplicate or (asked.deduplicate is None and replay == "kernel" and covered)
        twins = layer_classes.twins(provenances) if wanted and not replayed else {}
        chosen = set(twins.values())
        partly = len(chosen) < len(twins)
        ours = _of_one_call(result, chosen if partly else None)
        gate = None
        with ExitStack() as stack:
            if partly:
                gate = session.Gate(_wanted(chosen))
                for graph, p in graphs:
                    stack.enter_context(inductor_ranges(graph, p, gate))
            collection = session.collect(
                call,
                names,
                replay=replay,
                state=state,
                device=device.index,
                kernels=ours,
                gate=gate,
                primed=asked.primed,
            )
    except (ProfilerError, counters.UnknownChip) as error:
        notes.append(f"no hardware counters: {error}")
        return result
    why = collection.reason if partly else reason
    notes.append(f"counters: {collection.cost()}; {collection.replay} replay: {why}")
    table = replace(collection.table, notes=collection.table.notes[1:])  # the first says what this one does
    if not partly:
        return with_counters(result, [table], chip)
    notes.append(layer_classes.saved(result, provenances))
    return carried(with_counters(result, [table], chip, only=chosen), twins)


def inductor_ranges(graph: Any, provenance: Provenance, gate: Any) -> Any:
    """The launches of a graph, each inside the gate's range."""
    from profiler_core.collect import inductor

    return inductor.instrumented(graph, provenance, tag=provenance.graph, ranges=gate.range)


def _wanted(chosen: Collection[LaunchId]) -> Callable[[str], bool]:
    from profiler_core.range_names import launch_of

    return lambda name: launch_of(name)[::-1] in chosen


def _of_one_call(result: Profile, chosen: Collection[LaunchId] | None) -> int:
    """How many kernels the first measured call ran: all, or those of some launches."""
    rows = result.window
    rows = rows[(rows["kind"] == "kernel") & (rows["iteration"] == rows["iteration"].min())]
    if chosen is None:
        return len(rows)
    return sum(pair in chosen for pair in zip(rows["graph"], rows["launch"], strict=True))


def _on(device: torch.device) -> Any:
    import torch

    return torch.cuda.device(device)
