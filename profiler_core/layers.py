"""Repeated layers of a compiled graph: structural classes, and which launches of a class do the same work.

A model of N equal layers runs the same kernels N times. Hardware counters, which cost passes, are then taken for one
launch of a class and carried to its twins; durations are cheap and are measured for every launch.

Layers are found by module path: the nodes below each path that ends in a number ("h.0", "h.1", "blocks.3.mlp.0") are
compared as graphs. Outer layers go first; those that have no equal are searched for layers inside. A module that is
called several times gives a layer per call. In graphs whose operators have no numbered path (traces from files,
backward graphs) repeats of the sequence of launches are searched instead.

Compared are targets, shapes, strides, dtypes, devices, paths below the layer, the wiring inside, the shapes of what
comes in from outside and whether it is a parameter, and which inner values are used outside. Arguments that are no
tensors (a dilation, a constant, the index of a getitem) are not in the provenance and are not compared between layers.
Between launches they are: a generated kernel of the same name has the same source, and a library call's arguments stand
in the wrapper code.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from profiler_core.collect.wrapper_source import launch_sites

if TYPE_CHECKING:
    import pandas as pd

    from profiler_core.collect.provenance import Launch, NodeInfo, Provenance

UNEVEN = 1.25
"""Twins whose durations differ by more than this factor see different caches or clocks, and what is carried between
them has medium confidence. On an H200 the twins of two transformer blocks (1.6 to 12 us long) were within 6 %."""


@dataclass(frozen=True)
class LayerClass:
    """Layers of the same structure. ``members`` are module paths ("h.0", "h.0 call 2" for a module that is called
    several times) or ranges of launches ("launches 3-12"), in order. ``nodes`` holds the node names of each; where
    the class was found by module path, the k-th names of all members correspond.
    """

    id: str
    members: tuple[str, ...]
    nodes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Layers:
    """The repeated layers of one compiled graph.

    ``launch_representative`` maps the key of every launch, in launch order, to the first launch that does the same
    work at the same place of an equal layer; a launch without twins, and the first of its twins, map to themselves.
    ``node_class`` has the class of each node that is in a repeated layer. ``found_by`` is "module path", "launches" or
    "" (no repeated layers); ``notes`` say what was refused.
    """

    classes: tuple[LayerClass, ...] = ()
    launch_representative: dict[str, str] = field(default_factory=dict)
    node_class: dict[str, str] = field(default_factory=dict)
    found_by: str = ""
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many layers have an equal."""
        return sum(len(item.members) for item in self.classes)

    @property
    def representatives(self) -> tuple[str, ...]:
        """Keys of the launches to measure, in launch order."""
        return tuple(key for key, representative in self.launch_representative.items() if key == representative)

    def describe(self) -> str:
        """A few words, such as "12 layers of 1 class: 24 of 126 launches stand for all"."""
        if not self.classes:
            return f"no repeated layers: all {len(self.launch_representative)} launches differ"
        classes = "1 class" if len(self.classes) == 1 else f"{len(self.classes)} classes"
        measured, launches = len(self.representatives), len(self.launch_representative)
        return f"{self.count} layers of {classes}: {measured} of {launches} launches stand for all"


@dataclass(frozen=True)
class Saving:
    """What measuring representatives alone saves. ``share``: their part of the kernel time, 0..1; ``factor``: the
    estimated time to measure all launches over that for the representatives.
    """

    layers: int
    classes: int
    launches: int
    representatives: int
    share: float
    factor: float


def find(provenance: Provenance) -> Layers:
    """The repeated layers of a compiled graph and the twins among its launches (see the module's text)."""
    order = {name: i for i, name in enumerate(provenance.nodes)}
    # The node whose value a launch writes last tells its place: a kernel that adds to the residual stream also lists
    # (and recomputes) the sums of earlier layers.
    anchors = [
        max((n for n in launch.nodes if n in order), key=order.__getitem__, default="")
        for launch in provenance.launches
    ]
    classes = _by_module_path(provenance)
    notes: list[str] = []
    places: list[Hashable] = [None] * len(anchors)
    found_by = "module path" if classes else ""
    if classes:
        known = {n: (item.id, k) for item in classes for names in item.nodes for k, n in enumerate(names)}
        places = [known.get(anchor) for anchor in anchors]
    elif not any(_numbered(node.module_path) for node in provenance.nodes.values()):
        classes, places, notes = _by_launches(provenance, anchors)
        found_by = "launches" if classes else ""
    texts = _call_texts(provenance.source_code)
    first: dict[Hashable, str] = {}
    representative: dict[str, str] = {}
    for launch, place in zip(provenance.launches, places, strict=True):
        work = None if place is None else _work(launch, provenance.nodes, texts)
        representative[launch.key] = launch.key if work is None else first.setdefault((place, work), launch.key)
    node_class: dict[str, str] = {}
    for item in classes:
        for names in item.nodes:
            for name in names:
                node_class.setdefault(name, item.id)
    return Layers(tuple(classes), representative, node_class, found_by, tuple(notes))


def saving(layers: Layers, durations_ns: Mapping[str, float], *, overhead_ns: float = 0.0) -> Saving:
    """What it saves to measure the representatives only. ``durations_ns`` are by launch key; ``overhead_ns`` is what
    measuring a launch costs beside running it (saving and restoring memory, setting up passes).

    Raises ValueError where a launch has no duration.
    """
    keys, chosen = list(layers.launch_representative), layers.representatives
    missing = [key for key in keys if key not in durations_ns]
    if missing:
        raise ValueError(f"no duration for {len(missing)} of {len(keys)} launches, among them {missing[0]}")
    total, measured = (sum(durations_ns[key] for key in group) for group in (keys, chosen))
    cost, chosen_cost = total + overhead_ns * len(keys), measured + overhead_ns * len(chosen)
    return Saving(
        layers=layers.count,
        classes=len(layers.classes),
        launches=len(keys),
        representatives=len(chosen),
        share=measured / total if total else 1.0,
        factor=cost / chosen_cost if chosen_cost else 1.0,
    )


def uneven(layers: Layers, durations_ns: Mapping[str, float], factor: float = UNEVEN) -> dict[str, float]:
    """Twins whose duration differs from their representative's by more than ``factor``, with the ratio of the two
    (twin over representative; inf where the representative took no time).
    """
    found = {}
    for key, other in layers.launch_representative.items():
        if key != other and key in durations_ns and other in durations_ns:
            mine, theirs = durations_ns[key], durations_ns[other]
            ratio = mine / theirs if theirs else float("inf") if mine else 1.0
            if not 1 / factor <= ratio <= factor:
                found[key] = ratio
    return found


def carry(
    counters: pd.DataFrame,
    layers: Layers,
    durations_ns: Mapping[str, float] | None = None,
    *,
    own: Collection[str] = ("duration_ns", "gpu_time"),
) -> pd.DataFrame:
    """``counters`` (a row a measured launch, indexed by its key) with a row for every launch of ``layers``.

    A launch without values of its own takes all those of its representative: sums and rates alike are of one launch.
    Columns in ``own`` are never carried, because each launch has its own measured value. Added columns: ``counters``
    is "measured", "carried" or "" (neither); ``counters_confidence`` is "high" for measured values, and for carried
    ones "medium" where ``durations_ns`` of the twins differ by more than :data:`UNEVEN` or are not known, else
    "high". Rows that are no launch of ``layers`` stay as they are.

    Raises ValueError where a launch has several rows.
    """
    if not counters.index.is_unique:
        twice = counters.index[counters.index.duplicated()][0]
        raise ValueError(f"{twice} has several rows of counters: aggregate them to one a launch first")
    ours = set(layers.launch_representative)
    others = [key for key in counters.index if key not in ours]
    frame = counters.reindex([*layers.launch_representative, *others])
    values = [name for name in counters.columns if name not in (*own, "counters", "counters_confidence")]
    filled = frame[values].notna().any(axis=1).to_dict()
    doubtful = set() if durations_ns is None else set(uneven(layers, durations_ns))
    state: dict[str, tuple[str, str]] = {}
    sources: dict[str, str] = {}
    for key in frame.index:
        source = layers.launch_representative.get(key, key)
        if filled[key]:
            state[key] = ("measured", "high")
        elif source != key and filled[source]:
            sources[key] = source
            compared = durations_ns is not None and key in durations_ns and source in durations_ns
            state[key] = ("carried", "high" if compared and key not in doubtful else "medium")
        else:
            state[key] = ("", "")
    if sources:
        frame.loc[list(sources), values] = frame.loc[list(sources.values()), values].to_numpy()
    frame["counters"] = [state[key][0] for key in frame.index]
    frame["counters_confidence"] = [state[key][1] for key in frame.index]
    return frame


# -- layers by module path --------------------------------------------------------------------------------------------


def _numbered(path: str) -> list[str]:
    """The prefixes of a module path that end in a number, outer first: "h.0.mlp.2.act" gives "h.0", "h.0.mlp.2"."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def _by_module_path(provenance: Provenance) -> list[LayerClass]:
    nodes = provenance.nodes
    users: dict[str, set[str]] = defaultdict(set)
    for node in nodes.values():
        for name in node.inputs:
            users[name].add(node.name)
    paths = {name: found for name, node in nodes.items() if (found := _numbered(node.module_path))}
    found_classes: list[LayerClass] = []
    ids: dict[Hashable, int] = {}
    depth = 0
    while paths:
        below: dict[str, list[str]] = defaultdict(list)
        for name, prefixes in paths.items():
            below[prefixes[depth]].append(name)
        groups: dict[Hashable, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
        for prefix, names in below.items():
            calls = _calls([nodes[name] for name in names])
            for i, call in enumerate(calls, start=1):
                form, ordered = _form(call, prefix, nodes, users, ids)
                groups[form].append((prefix if len(calls) == 1 else f"{prefix} call {i}", ordered))
        taken: set[str] = set()
        for members in groups.values():
            if len(members) > 1:
                labels, ordered_names = zip(*members, strict=True)
                found_classes.append(LayerClass(f"layer{len(found_classes)}", labels, ordered_names))
                taken.update(name for names in ordered_names for name in names)
        depth += 1
        paths = {name: found for name, found in paths.items() if name not in taken and len(found) > depth}
    return found_classes


def _calls(layer: Sequence[NodeInfo]) -> list[list[NodeInfo]]:
    """The nodes of a module, split into its calls: one call unless its whole sequence of operators, with the places
    in the source that they come from, repeats.
    """
    marks = [(n.target, n.shape, n.stride, n.dtype, n.module_path, n.file, n.line) for n in layer]
    size = len(marks)
    for period in range(1, size // 2 + 1):
        if size % period == 0 and marks[period:] == marks[:-period]:
            return [list(layer[start : start + period]) for start in range(0, size, period)]
    return [list(layer)]


def _form(
    layer: Sequence[NodeInfo],
    prefix: str,
    nodes: Mapping[str, NodeInfo],
    users: Mapping[str, set[str]],
    ids: dict[Hashable, int],
) -> tuple[Hashable, tuple[str, ...]]:
    """The layer's graph without names, equal only for equal graphs, and its nodes in the order of that form.

    ``ids`` numbers what was seen so far and is shared by all layers that are compared.
    """
    inside = {node.name for node in layer}
    rank: dict[str, int] = {}
    for node in layer:  # inputs stand before users
        below = node.module_path.removeprefix(prefix)
        sources = tuple(rank[i] if i in rank else ("outside", _tensor(nodes.get(i))) for i in node.inputs)
        rank[node.name] = ids.setdefault((node.target, _tensor(node), below, sources), len(ids))
    # Nodes of equal rank keep their order. Should that pair them wrongly, the wiring below differs and the layers
    # count as different: an equal layer may be missed, none is made up.
    ordered = sorted(rank, key=rank.__getitem__)
    index = {name: i for i, name in enumerate(ordered)}
    ports: dict[str, int] = {}
    form = tuple(
        (
            rank[name],
            tuple(index[i] if i in index else ("port", ports.setdefault(i, len(ports))) for i in nodes[name].inputs),
            bool(users[name] & inside) and not users[name] <= inside,
        )
        for name in ordered
    )
    return form, tuple(ordered)


def _tensor(node: NodeInfo | None) -> Hashable:
    return None if node is None else (node.shape, node.stride, node.dtype, node.device, node.static)


# -- layers by repeats of the launches --------------------------------------------------------------------------------


def _by_launches(provenance: Provenance, anchors: Sequence[str]) -> tuple[list[LayerClass], list[Hashable], list[str]]:
    launches, nodes = provenance.launches, provenance.nodes
    roles: dict[Hashable, int] = {}
    sequence = []
    for launch, anchor in zip(launches, anchors, strict=True):
        node = nodes.get(anchor)
        # The number at a generated kernel's end tells kernels of the same operators apart, as the fused layer norms of
        # a residual stream; they hold the same place in their layers.
        kernel = launch.kernel if launch.extern else re.sub(r"_\d+$", "", launch.kernel)
        inputs = tuple(_tensor(nodes.get(i)) for i in node.inputs) if node and launch.extern else ()
        sequence.append(roles.setdefault((kernel, _tensor(node), inputs), len(roles)))
    classes: list[LayerClass] = []
    places: list[Hashable] = [None] * len(sequence)
    notes: list[str] = []
    for start, period, length in _repeats(sequence, notes.append):
        name = f"layer{len(classes)}"
        stop = start + length
        for i in range(start, stop):
            places[i] = (name, (i - start) % period)
        parts = [(i, min(i + period, stop)) for i in range(start, start + _covered(length, period), period)]
        members = tuple(f"launches {first + 1}-{last}" for first, last in parts)
        names = tuple(tuple(n for launch in launches[first:last] for n in launch.nodes) for first, last in parts)
        classes.append(LayerClass(name, members, tuple(tuple(dict.fromkeys(group)) for group in names)))
    return classes, places, notes


def _repeats(sequence: Sequence[int], refuse: Callable[[str], None], offset: int = 0) -> list[tuple[int, int, int]]:
    """Runs of a repeated part, in order: (start, length of the part, length of the run). The longest run is taken
    first, then those left and right of it.

    Refused are a run of one launch over and over (three projections in a row are no three layers), and parts of
    different lengths that cover as much of the same launches.
    """
    import numpy as np

    values = np.asarray(sequence)
    runs: list[tuple[int, int, int]] = []  # whole repeats covered, period, start
    lengths: dict[tuple[int, int], int] = {}
    for period in range(2, len(values) // 2 + 1):
        same = np.concatenate(([False], values[:-period] == values[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            length = stop - start + period
            covered = _covered(length, period)
            if covered > period and len(set(sequence[start : start + period])) > 1:
                runs.append((covered, period, start))
                lengths[period, start] = length
    if not runs:
        return []
    most, period, start = min(runs, key=lambda run: (-run[0], run[1], run[2]))
    length = lengths[period, start]
    rivals = {p for c, p, s in runs if c == most and p % period and s < start + length and start < s + lengths[p, s]}
    taken = []
    if rivals:
        refuse(
            f"launches {offset + start + 1}-{offset + start + length} repeat in parts of {period} and, as well, of "
            f"{', '.join(map(str, sorted(rivals)))} launches: no layers taken there"
        )
    else:
        taken = [(offset + start, period, length)]
    left = _repeats(sequence[:start], refuse, offset)
    right = _repeats(sequence[start + length :], refuse, offset + start + length)
    return [*left, *taken, *right]


def _covered(length: int, period: int) -> int:
    """How many launches of a run are in layers. A last part of four or more launches may lack one at its end: the last
    layer's last kernel has no next layer to fuse with.
    """
    left = length % period
    return length if period >= 4 and left == period - 1 else length - left


# -- what a launch does -----------------------------------------------------------------------------------------------

# Shape, strides and offset as the wrapper code spells them, "" where unknown. Dtypes are not in it: those of library
# calls are the nodes', those of a generated kernel stand in its source.
Layout = tuple[str, str, str]
_UNKNOWN: Layout = ("", "", "")


def _work(launch: Launch, nodes: Mapping[str, NodeInfo], texts: Mapping[str, str]) -> Hashable | None:
    """Equal for launches that do the same work on tensors of the same layout; None where that cannot be known.

    The arguments of a library call stand only in the wrapper code: without it, two convolutions that differ in their
    dilation would pass for one.
    """
    text = texts.get(launch.key)
    if text is None and launch.extern:
        return None
    if text is not None and not launch.extern:
        return (launch.kernel, text)
    operators = tuple(
        (node.target, _tensor(node), tuple(_tensor(nodes.get(i)) for i in node.inputs))
        for node in (nodes[name] for name in launch.nodes if name in nodes)
    )
    return (launch.kernel, text, operators)


def _call_texts(source: str) -> dict[str, str]:
    """By launch key, the call in the wrapper code with each buffer replaced by its number within the call and its
    layout; a launch whose call is not found, and all of a wrapper that is not Python, are left out.
    """
    sites = launch_sites(source)
    try:
        tree = ast.parse(source) if sites else ast.Module([], [])
    except SyntaxError:
        return {}
    announced = iter(sites)
    site = next(announced, None)
    texts: dict[str, str] = {}
    layouts: dict[str, Layout] = {}
    statements = [s for s in ast.walk(tree) if isinstance(s, (ast.Assign, ast.Expr)) and isinstance(s.value, ast.expr)]
    pending = None
    for statement in sorted(statements, key=lambda s: s.lineno):
        while site is not None and site.line < statement.lineno:
            pending, site = site, next(announced, None)
        if pending is not None:
            call = next(_launching(statement.value, pending.kernel), None)
            if call is not None:
                texts[pending.key] = _normal(call, layouts)
                pending = None
        _note_layout(statement, layouts)
    return texts


def _launching(expression: ast.expr, kernel: str) -> Iterator[ast.Call]:
    names = {kernel, f"{kernel}.run"}
    return (n for n in ast.walk(expression) if isinstance(n, ast.Call) and ast.unparse(n.func) in names)


def _note_layout(statement: ast.Assign | ast.Expr, layouts: dict[str, Layout]) -> None:
    """Learn the layout of a buffer from the statement that makes, reuses or checks it."""
    value = statement.value
    function = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
    arguments = [ast.unparse(a) for a in value.args] if isinstance(value, ast.Call) else []
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        layout = _UNKNOWN  # a result of a library call: the check that follows it tells
        if isinstance(value, ast.BinOp):
            layout = (ast.unparse(value), "", "")  # the number of elements under dynamic shapes
        elif isinstance(value, ast.Name):
            layout = layouts.get(value.id, _UNKNOWN)
        elif function.startswith("empty_strided") and len(arguments) >= 2:
            layout = (arguments[0], arguments[1], "0")
        elif function == "reinterpret_tensor" and len(arguments) >= 4:
            layout = (arguments[1], arguments[2], arguments[3])
        layouts[statement.targets[0].id] = layout
    elif function == "assert_size_stride" and len(arguments) >= 3 and not layouts.get(arguments[0], _UNKNOWN)[0]:
        layouts[arguments[0]] = (arguments[1], arguments[2], "0")


def _normal(call: ast.Call, layouts: Mapping[str, Layout]) -> str:
    calls = [n for n in ast.walk(call) if isinstance(n, ast.Call)]
    kept = {id(n) for c in calls for n in ast.walk(c.func)}
    kept |= {id(n.value) for n in ast.walk(call) if isinstance(n, ast.Attribute)}  # torch of torch.float32
    # The layout of a buffer that the call itself reinterprets does not matter.
    viewed = {id(c.args[0]) for c in calls if c.args and ast.unparse(c.func) == "reinterpret_tensor"}
    numbers: dict[str, int] = {}
    found: dict[str, None] = {}
    for node in ast.walk(call):
        # Sizes that are symbols (s77, u0) stay: launches of different sizes differ in them.
        if isinstance(node, ast.Name) and id(node) not in kept and not re.fullmatch(r"[suz]\d+", node.id):
            number = numbers.setdefault(node.id, len(numbers))
            if id(node) not in viewed:
                found[f"#{number}: {', '.join(layouts.get(node.id, _UNKNOWN))}"] = None
    renamed = ast.parse(ast.unparse(call), mode="eval").body
    for node in ast.walk(renamed):
        if isinstance(node, ast.Name) and node.id in numbers:
            node.id = f"#{numbers[node.id]}"
    return f"{ast.unparse(renamed)} [{'; '.join(found)}]"
