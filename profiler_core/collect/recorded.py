"""Provenance of a compile of another process, from the texts that it left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from profiler_core.collect.assemble import assemble, launched, user_frame
from profiler_core.collect.graph_text import add_unknown, parse
from profiler_core.collect.ownership import operator_base
from profiler_core.collect.provenance import Provenance, ProvenanceFormatError
from profiler_core.collect.wrapper_source import described_nodes, generated_kernels, launch_sites, source_nodes
from profiler_core.shapes import target_name

REMEDY = "run it again with INDUCTOR_PROVENANCE=1 in the environment and Inductor's caches off or empty"


@dataclass(frozen=True)
class Recorded(Provenance):
    """Provenance that was read from files. ``path`` names the file or folder, and ``notes`` what was missing there, a
    sentence each.
    """

    path: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Texts:
    """What a compile left: ``mapping`` and ``stack_traces`` are JSON objects, ``graph`` is the printed post-grad graph
    (or, where ``is_post_grad`` is False, the AOT graph that it was made from), ``source`` the wrapper code; empty
    where they are missing.
    """

    source: str = ""
    graph: str = ""
    mapping: Mapping[str, Any] | None = None
    stack_traces: Mapping[str, Any] | None = None
    is_post_grad: bool = True

    @property
    def backward(self) -> bool:
        """Whether the wrapper code says that it is that of a backward graph."""
        return self.source.startswith("# AOT ID: ['") and "_backward']" in self.source.partition("\n")[0]

    @property
    def tracked(self) -> bool:
        """Whether the compile ran with provenance tracking."""
        return bool((self.mapping or {}).get("cppCodeToPost")) or bool(launch_sites(self.source))


def record(
    texts: Texts, *, graph: str = "", cache_key: str = "", path: str = "", notes: Sequence[str] = ()
) -> Recorded:
    """The provenance that ``texts`` hold, with a note for each thing that they lack."""
    notes = [*notes]
    printed = parse(texts.graph)
    if texts.graph and printed.unread:
        lines = ", ".join(map(str, printed.unread[:3]))
        notes.append(f"{len(printed.unread)} lines of the printed graph were not understood (line {lines})")
    if not texts.graph:
        notes.append("there is no printed post-grad graph: of the nodes only the names are known")
    elif not texts.is_post_grad:
        notes.append("there is no printed post-grad graph: the nodes are those of the AOT graph with the same names")
    mapping = _checked(texts.mapping, path)
    if not mapping.get("cppCodeToPost"):
        mapping, missing = _from_comments(texts, printed.graph)
        notes += missing
    names = {name for listed in launched(mapping, texts.source).values() for name in listed}
    unknown = names - {node.name for node in printed.graph.nodes}
    if unknown and texts.graph:
        some = ", ".join(sorted(unknown)[:3])
        notes.append(f"{len(unknown)} nodes of the mapping are not in the printed graph, such as {some}")
    add_unknown(printed.graph, sorted(unknown))
    if not texts.source:
        notes.append("there is no output code: the launches are those of the mapping, in its order")
    made = assemble(mapping, printed.graph, texts.source)
    made = _located(made, texts.stack_traces or {})
    return Recorded(
        made.version, made.launches, made.nodes, made.source_code, graph, cache_key, path, tuple(dict.fromkeys(notes))
    )


def _checked(mapping: Mapping[str, Any] | None, path: str) -> dict[str, Any]:
    """The mapping, with lists of names where lists of names belong."""
    for field in ("cppCodeToPost", "postToPre"):
        part = (mapping or {}).get(field, {})
        if not isinstance(part, Mapping) or not all(
            isinstance(names, list) and all(isinstance(name, str) for name in names) for names in part.values()
        ):
            raise ProvenanceFormatError(f"{path}: {field} of the node mapping is not an object of lists of names")
    return dict(mapping or {})


def _from_comments(texts: Texts, graph: fx.Graph) -> tuple[dict[str, Any], list[str]]:
    """A mapping by what the comments of the wrapper code decide, and what is to be said about it.

    Inductor writes an empty mapping for a backward graph. Its comments list the nodes of each Triton kernel, and for
    each library call nodes among or before what it computes.
    """
    sites = launch_sites(texts.source)
    if not sites:
        return {"cppCodeToPost": {}}, [f"the code was compiled without provenance: {REMEDY}"]
    fragments, ours = described_nodes(texts.source), generated_kernels(texts.source)
    near = source_nodes(texts.source)
    uses = Counter(site.kernel for site in sites)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    lists: dict[str, list[str]] = {}
    for site in sites:
        if site.kernel in ours:
            lists[site.key] = fragments.get(site.kernel, []) if uses[site.kernel] == 1 else []
        else:
            frames = _frames(texts.stack_traces or {}, site.key)
            fitting = [n for n in calls if operator_base(target_name(n)) == operator_base(site.kernel)]
            fitting = [n for n in fitting if not frames or _frame(n) in frames]
            alone = len(fitting) == uses[site.kernel] == 1
            lists[site.key] = [fitting[0].name] if alone else _only(fitting, near[site.key])
    # What two library calls claim is certain for neither.
    claims = Counter(name for site in sites if site.kernel not in ours for name in lists[site.key])
    for site in sites:
        if site.kernel not in ours and any(claims[name] > 1 for name in lists[site.key]):
            lists[site.key] = []
    undecided = [key for key, names in lists.items() if not names]
    notes = ["there is no node mapping (Inductor writes none for a backward graph): taken from the code's comments"]
    if undecided:
        notes.append(f"the comments do not decide what {len(undecided)} launches compute: {', '.join(undecided[:3])}")
    return {"cppCodeToPost": lists, "version": "comments"}, notes


def _only(fitting: list[fx.Node], near: list[str]) -> list[str]:
    """The one operator that a comment can mean: listed itself, or fed by a node that is; none where several are."""
    named = [node for node in fitting if node.name in near]
    fed = [node for node in fitting if any(source.name in near for source in node.all_input_nodes)]
    found = named or fed
    return [found[0].name] if len(found) == 1 else []


def _frame(node: fx.Node) -> tuple[str, int, str]:
    return user_frame(node.meta.get("stack_trace"))


def _frames(stack_traces: Mapping[str, Any], *keys: str) -> set[tuple[str, int, str]]:
    """The innermost frames that Inductor recorded for a launch."""
    traces: list[Any] = next((stack_traces[key] for key in keys if isinstance(stack_traces.get(key), list)), [])
    return {user_frame(trace) for trace in traces if isinstance(trace, str)} - {user_frame(None)}


def _located(made: Provenance, stack_traces: Mapping[str, Any]) -> Provenance:
    """Nodes without a location get that of their launch, where Inductor recorded just one for it."""
    nodes = dict(made.nodes)
    for launch in made.launches:
        frames = _frames(stack_traces, launch.key, launch.kernel)
        if len(frames) == 1:
            place = next(iter(frames))
            for name in launch.nodes:
                if not nodes[name].file:
                    nodes[name] = nodes[name].at(("", "", *place))
    return replace(made, nodes=nodes)
