"""Which of the nodes that Inductor lists for a launch the launch computes.

Inductor's list is the union of the origins of the code it wrote, and origins accumulate: a library call
also lists the operators that made its input, and a copy made for a convolution lists the convolution. Taken
as it is, one matrix product would be in the lists of many launches. The rules here:

1. A library operator is computed by exactly one launch: the library call of its name that lists it and
   comes first.
2. A library call computes that operator and the views around it, nothing else.
3. A generated kernel computes no operator that a library call owns, and nothing that it could only reach
   through one: that value was in memory already. Pointwise operators stay in each kernel that lists and
   reaches them, because Inductor recomputes those.
4. A launch to which nothing new is left (a layout copy for a convolution, a bias added to a product, the
   second step of a reduction) belongs to the last operators in its list, and a copy of a constant to the
   operators that use it. It is marked as doing only part of their work, so that their modelled cost is not
   counted twice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Listed:
    """A launch with the nodes that Inductor lists for it."""

    kernel: str
    extern: bool
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class GraphView:
    """What the rules need of the graph: targets and inputs by node name, in topological order, and which
    nodes only alias.
    """

    targets: Mapping[str, str]
    inputs: Mapping[str, tuple[str, ...]]
    aliases: Collection[str]


@dataclass(frozen=True)
class Owned:
    """Nodes that a launch computes, in topological order. ``partial``: it does only a part of their work
    (rule 4).
    """

    nodes: tuple[str, ...]
    partial: bool


def own(launches: Sequence[Listed], graph: GraphView, *, per_site: bool = True) -> list[Owned]:
    """Apply the rules above to the launches of a graph, given in wrapper order.

    ``per_site`` is False for the version-less mapping, whose lists are per kernel name: the n-th call of a
    library kernel is then taken to compute the n-th of the operators listed.
    """
    order = {name: i for i, name in enumerate(graph.targets)}
    listed = [sorted({n for n in launch.nodes if n in order}, key=order.__getitem__) for launch in launches]
    owner: dict[str, int] = {}
    for i, launch in enumerate(launches):
        if launch.extern:
            for name in _operators(launch.kernel, [n for n in listed[i] if n not in owner], graph, per_site):
                owner[name] = i
    result: list[Owned] = []
    claimed: set[str] = set()
    for i, launch in enumerate(launches):
        names = listed[i]
        if not names:
            # Only inputs or constants are listed: a copy of them, for the operators that use them.
            users = tuple(n for n in order if not {*graph.inputs[n]}.isdisjoint(launch.nodes))
            result.append(Owned(users, partial=True))
            continue
        if launch.extern:
            mine = {name for name, launch_index in owner.items() if launch_index == i}
            kept = _with_views(mine, names, graph)
        else:
            base = [name for name in names if name not in owner]
            mine = {name for name in base if name not in claimed and name not in graph.aliases}
            kept = _reached(mine, base, graph)
            claimed |= kept
        kept = kept or _last(names, graph) or set(names)
        result.append(Owned(tuple(sorted(kept, key=order.__getitem__)), partial=not mine))
    return result


def _operators(kernel: str, names: list[str], graph: GraphView, per_site: bool) -> list[str]:
    """The operators among ``names`` that a call of a library kernel computes."""
    work = [name for name in names if name not in graph.aliases]
    base = operator_base(kernel)
    for fits in (lambda target: operator_base(target) == base, lambda target: base in operator_base(target)):
        matching = [name for name in work if fits(graph.targets[name])]
        if matching:
            # Those upstream have had their own call before, so what is left over is the last; without lists
            # per site, the first.
            return [matching[-1] if per_site else matching[0]]
    return work


def operator_base(name: str) -> str:
    """``addmm`` of ``extern_kernels.addmm``, ``aten.addmm.default`` and ``torch.ops.aten.addmm.default``."""
    match = re.fullmatch(r"torch\.ops\.\w+\.(\w+)(?:\.\w+)?", name) or re.fullmatch(r"extern_kernels\.(\w+)", name)
    if match:
        return match[1]
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name


def _with_views(seeds: set[str], names: list[str], graph: GraphView) -> set[str]:
    """``seeds`` and the listed aliases that lead to them, or take items out of them."""
    kept = set(seeds)
    for name in reversed(names):  # towards the inputs
        if name in kept:
            kept |= {source for source in graph.inputs[name] if source in graph.aliases and source in names}
    for name in names:
        if name in graph.aliases and any(source in seeds for source in graph.inputs[name]):
            kept.add(name)
    return kept


def _reached(seeds: set[str], names: list[str], graph: GraphView) -> set[str]:
    """``seeds`` and the nodes among ``names`` from which they are reached inside ``names``, through listed
    or unlisted aliases.
    """
    allowed, seen, pending = {*names, *graph.aliases}, set(seeds), list(seeds)
    while pending:
        for source in graph.inputs[pending.pop()]:
            if source in allowed and source not in seen:
                seen.add(source)
                pending.append(source)
    return seen & {*names, *seeds}


def _last(names: list[str], graph: GraphView) -> set[str]:
    """The operators among ``names`` that no other of them is made from."""
    work = {name for name in names if name not in graph.aliases}
    everything = list(graph.targets)
    upstream: set[str] = set()
    for name in reversed(names):
        if name in work and name not in upstream:
            upstream |= _reached({name}, everything, graph) - {name}
    return work - upstream
