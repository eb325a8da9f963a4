"""Provenance from its parts: Inductor's mapping, the post-grad graph and the wrapper code.

The graph is the live one, or one read back from its printed text (``profiler_core.collect.graph_text``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from profiler_core import cost
from profiler_core.collect.module_spelling import module_path
from profiler_core.collect.ownership import GraphView, Listed, operator_base, own
from profiler_core.collect.provenance import Launch, NodeInfo, Provenance
from profiler_core.collect.wrapper_source import generated_kernels, launch_sites

_OWN = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("fxopt", "profiler_core"))
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)

Location = tuple[str, str, str, int, str]


def user_frame(stack_trace: str | None) -> tuple[str, int, str]:
    """File, line and source text of the innermost frame of a node's stack trace; ("", 0, "") where there is
    none. Frames of this project, which called the model, are nobody's source: of a model made of torch's own modules
    they may be all there are.
    """
    matches = [match for match in _FRAME.finditer(stack_trace or "") if not match["file"].startswith(_OWN)]
    if not matches:
        return "", 0, ""
    last = matches[-1]
    rest = (stack_trace or "")[last.end() :].splitlines()[1:]
    source = rest[0].strip() if rest else ""
    return last["file"], int(last["line"]), source


DESCRIPTION = "fxopt_description"  # key in ``node.meta`` of what a printed graph says of the node's value


@dataclass(frozen=True)
class Description:
    """What is known of a tensor. Symbolic sizes are given by their hint, -1 where that is not known; ``stride`` and
    ``device`` are None where a printed graph leaves them out.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: str
    device: str | None


def assemble(mapping: Mapping[str, Any], graph: fx.Graph, source: str, *, static: Collection[str] = ()) -> Provenance:
    """Provenance of a compiled graph from Inductor's ``mapping`` (either form), its post-grad ``graph`` and the
    wrapper code ``source`` ("" where only the mapping is known: the launches are then in the mapping's order).

    ``static`` names the placeholders that hold parameters.
    """
    pre_grad = {name: tuple(sorted(names)) for name, names in mapping.get("postToPre", {}).items()}
    by_name = {node.name: node for node in graph.nodes}
    places = locations(graph, pre_grad)
    nodes = {
        name: _node_info(node, places.get(name, ("", "", "", 0, "")), pre_grad.get(name, ()), static)
        for name, node in by_name.items()
        if node.op != "output"
    }
    kernels: Mapping[str, Sequence[str]] = mapping["cppCodeToPost"]
    # A debug folder's mapping lacks the version whatever its form.
    per_site = bool(kernels) and all(re.search(r":\d+$", key) for key in kernels)
    version = str(mapping.get("version") or ("2.0" if per_site else "1"))
    ours = generated_kernels(source)
    operators = {name: node for name, node in by_name.items() if node.op == "call_function"}
    sites = _call_sites(kernels, source, {name: nodes[name].target for name in operators})
    # The version-less form is keyed by kernel name: every site of a kernel then has the nodes of all of them.
    listed = [
        Listed(
            kernel,
            _is_extern(kernel, ours),
            tuple(kernels.get(f"{kernel}:{handle}", kernels.get(kernel, []))),
        )
        for kernel, handle in sites
    ]
    view = GraphView(
        targets={name: nodes[name].target for name in operators},
        inputs={name: nodes[name].inputs for name in operators},
        aliases={name for name in operators if nodes[name].bytes == 0},
    )
    launches = []
    for (kernel, handle), launch, owned in zip(sites, listed, own(listed, view, per_site=version != "1"), strict=True):
        flops = moved = None
        if owned.nodes and not owned.partial:
            flops, moved = _group_cost([nodes[n] for n in owned.nodes], [by_name[n] for n in owned.nodes])
        launches.append(Launch(kernel, handle, owned.nodes, launch.extern, flops, moved))
    return Provenance(version, tuple(launches), nodes, source)


def launched(mapping: Mapping[str, Any], source: str) -> dict[str, list[str]]:
    """The nodes that ``mapping`` lists for the launches in ``source``, by its own keys; all of them where the source
    names no launch. The mapping of a backward graph may hold the launches of the forward graph too.
    """
    kernels: Mapping[str, list[str]] = mapping.get("cppCodeToPost") or {}
    sites = launch_sites(source)
    keys = {site.key for site in sites} | {site.kernel for site in sites}
    return {key: names for key, names in kernels.items() if not sites or key in keys}


def _call_sites(kernels: Mapping[str, Sequence[str]], source: str, targets: Mapping[str, str]) -> list[tuple[str, int]]:
    """(kernel, handle) of every launch. Where the source names none, they are those of the mapping's keys; a key
    without a handle stands for as many calls of a library as its nodes have operators of that library's name.
    """
    sites = [(site.kernel, site.handle) for site in launch_sites(source)]
    if sites:
        return sites
    for key, names in kernels.items():
        kernel, _, handle = key.rpartition(":")
        if kernel and handle.isdigit():
            sites.append((kernel, int(handle)))
            continue
        calls = sum(operator_base(targets.get(name, "")) == operator_base(key) for name in names)
        sites += [(key, len(sites) + 1 + i) for i in range(max(1, calls))]
    return sites


def _is_extern(kernel: str, generated: set[str]) -> bool:
    return kernel not in generated and not re.match(r"(triton|cpp|multi_kernel)_\w+$", kernel)


def _group_cost(infos: Sequence[NodeInfo], nodes: Sequence[fx.Node]) -> tuple[float | None, float | None]:
    # One part without a model leaves the whole unknown: a partial sum would read as a low intensity.
    flops = [info.flops for info in infos if info.flops is not None]
    modelled = all(info.bytes is not None for info in infos)
    return (
        float(sum(flops)) if len(flops) == len(infos) else None,
        cost.group_bytes(nodes) if modelled else None,
    )


def _node_info(node: fx.Node, location: Location, pre_grad: tuple[str, ...], static: Collection[str]) -> NodeInfo:
    described = DESCRIPTION in node.meta
    value = node.meta[DESCRIPTION] if described else _describe(_first_tensor(node.meta.get("val")))
    modelled = cost.node_cost(node) if node.op == "call_function" else None
    info = NodeInfo(
        name=node.name,
        op=node.op,
        target=cost.target_name(node),
        shape=None if value is None else value.shape,
        stride=None if value is None else value.stride,
        dtype=None if value is None else value.dtype,
        device=None if value is None else value.device,
        inputs=tuple(n.name for n in node.all_input_nodes),
        pre_grad=pre_grad,
        flops=modelled.flops if modelled else None,
        bytes=modelled.bytes if modelled else None,
        static=node.op == "get_attr" or node.name in static,
    )
    return info.at(location)


def _describe(value: torch.Tensor | None) -> Description | None:
    if value is None:
        return None
    return Description(
        shape=tuple(_hint(size) for size in value.shape),
        stride=tuple(_hint(step) for step in value.stride()) if value.layout == torch.strided else None,
        dtype=str(value.dtype).removeprefix("torch."),
        device=str(value.device),
    )


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return next((tensor for item in value if (tensor := _first_tensor(item)) is not None), None)
    return None


def _hint(size: Any) -> int:
    """A size as an int; a symbolic one by its hint, -1 where it has none (data-dependent)."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return -1 if hint is None else int(hint)


_TRACED = frozenset({"nn_module_stack", "source_fn_stack", "seq_nr", "fwd_nn_module_stack", "fwd_source_fn_stack"})


def _own_location(node: fx.Node) -> Location:
    path = cls = ""
    # A backward node carries the modules of the forward node that it is the gradient of.
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if stack:
        spelling, module = list(stack.values())[-1]
        path = module_path(str(spelling))
        cls = module.__name__ if isinstance(module, type) else str(module).rsplit(".", 1)[-1]
    # A pattern of Inductor's is traced while it compiles, and its nodes hold whatever frame named `forward` called the
    # compiled code then; what Dynamo or AOTAutograd traced says where else it comes from.
    replaced = "from_node" in node.meta and _TRACED.isdisjoint(node.meta)
    return (path, cls, *user_frame(None if replaced else node.meta.get("stack_trace")))


def _origin(node: fx.Node, pre_grad: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Names of the pre-grad nodes that this node came from."""
    if node.name in pre_grad:
        return pre_grad[node.name]
    names = []
    for source in node.meta.get("from_node") or ():
        name = getattr(source, "name", None)
        if isinstance(name, str):
            names.append(name)
    return tuple(sorted(set(names)))


def locations(graph: fx.Graph, pre_grad: Mapping[str, tuple[str, ...]]) -> dict[str, Location]:
    """Where the user wrote each operator of ``graph``; nodes of which this is not certain are left out.

    A node that a pass of Inductor made may have no trace of its own. It then gets the location of the nodes
    with the same pre-grad origin, or else the one on which all of its neighbours among the operators agree.
    """
    operators = [node for node in graph.nodes if node.op == "call_function"]
    known = {n.name: loc for n in operators if (loc := _own_location(n))[2] or loc[0]}
    by_origin: dict[tuple[str, ...], set[Location]] = {}
    for node in operators:
        origin = _origin(node, pre_grad)
        if node.name in known and origin:
            by_origin.setdefault(origin, set()).add(known[node.name])
    recovered: dict[str, Location] = {}
    for node in operators:
        if node.name in known:
            continue
        candidates = by_origin.get(_origin(node, pre_grad), set())
        if len(candidates) != 1:
            around = [*node.all_input_nodes, *node.users]
            candidates = {known[n.name] for n in around if n.name in known}
        if len(candidates) == 1:
            recovered[node.name] = next(iter(candidates))
    return {**known, **recovered}
