"""Provenance of a graph compiled by Inductor, and ranges around its launches.

All that touches private attributes of ``torch._inductor.output_code.CompiledFxGraph`` is in this module.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx

from profiler_core import cost
from profiler_core.collect.ownership import GraphView, Listed, own
from profiler_core.collect.provenance import (
    Launch,
    NodeInfo,
    Provenance,
    ProvenanceFormatError,
    ProvenanceMissing,
    relocate,
)
from profiler_core.collect.wrapper_source import (
    RANGE_GLOBAL,
    Rewritten,
    generated_kernels,
    launch_sites,
    with_ranges,
)
from profiler_core.files import write_atomically

__all__ = [
    "Launch",
    "NodeInfo",
    "Provenance",
    "ProvenanceFormatError",
    "ProvenanceMissing",
    "from_compiled",
    "instrumented",
    "module_path",
    "user_frame",
]

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_GETATTR = re.compile(r"getattr\((?P<base>[^()]*), ['\"](?P<name>[^'\"]+)['\"]\)")
_STEP = re.compile(r"\.(?P<attr>\w+)|\[(?P<quote>['\"]?)(?P<item>[^\]'\"]+)(?P=quote)\]")
_NOT_MODULES = {"_modules", "__closure__", "cell_contents", "_orig_mod", "__self__", "__func__", "__dict__"}

Location = tuple[str, str, str, int, str]


def module_path(spelling: str) -> str:
    """Dynamo's spelling of a module as the dotted name under its root.

    >>> module_path("L['self']._modules['h']._modules['0'].attn")
    'h.0.attn'
    """
    while True:
        spelling, replaced = _GETATTR.subn(r"\g<base>.\g<name>", spelling)
        if not replaced:
            break
    # The root is a local or global (`L['self']`, `G['net']`) or, outside Dynamo, a plain name.
    tail = re.sub(r"^(?:[LG]\[['\"][^'\"]+['\"]\]|\w+)", "", spelling.strip(), count=1)
    steps: list[str] = []
    after_closure = False
    for match in _STEP.finditer(tail):
        step = match["attr"] or match["item"]
        if not (step in _NOT_MODULES or (after_closure and step.isdigit())):
            steps.append(step)
        after_closure = step == "__closure__"
    return ".".join(steps)


def user_frame(stack_trace: str | None) -> tuple[str, int, str]:
    """File, line and source text of the innermost frame of a node's stack trace; ("", 0, "") where there is
    none.
    """
    matches = list(_FRAME.finditer(stack_trace or ""))
    if not matches:
        return "", 0, ""
    last = matches[-1]
    rest = (stack_trace or "")[last.end() :].splitlines()[1:]
    source = rest[0].strip() if rest else ""
    return last["file"], int(last["line"]), source


def from_compiled(compiled_graph: Any, gm: fx.GraphModule | None, store: Path | None) -> Provenance:
    """Provenance of ``compiled_graph``, a ``CompiledFxGraph`` compiled with
    ``trace.provenance_tracking_level=1``.

    ``gm`` is the graph that was handed to ``inner_compile``. After a fresh compile it *is* the post-grad
    graph; after a hit in Inductor's FX graph cache it is not, and the nodes come from the record that the
    fresh compile left at ``store/<fx cache key>.json``, with the user's locations taken from ``gm``.

    Raises :class:`ProvenanceMissing` where neither can be had; recompile with Inductor's caches off then.
    """
    source = getattr(compiled_graph, "source_code", None) or ""
    mapping = _mapping(compiled_graph)
    key = getattr(compiled_graph, "_fx_graph_cache_key", None)
    sidecar = store / f"{key}.json" if store is not None and key else None
    stored = _read_sidecar(sidecar, source)
    if stored is not None:
        return relocate(stored, {} if gm is None else _locations(gm, {}))
    if mapping is None:
        raise ProvenanceMissing(
            "the compiled graph carries no provenance mapping: compile it with "
            "config_patches={'trace.provenance_tracking_level': 1} and Inductor's caches off"
        )
    wanted = {name for names in mapping["cppCodeToPost"].values() for name in names}
    present = set() if gm is None else {node.name for node in gm.graph.nodes}
    if gm is None or not wanted <= present:
        missing = sorted(wanted - present)[:3]
        where = f"no record at {sidecar}" if sidecar is not None else "no store of records was given"
        raise ProvenanceMissing(
            f"the graph at hand is not the post-grad graph (it lacks {', '.join(missing)}), which happens after "
            f"a hit in Inductor's cache, and there is {where}: recompile with force_disable_caches=True"
        )
    provenance = _build(mapping, gm, source, _static_names(compiled_graph, gm))
    if sidecar is not None:
        with suppress(OSError):  # the record spares a later recompile; without it there is just that one
            write_atomically(sidecar, json.dumps(provenance.to_json()))
    return provenance


def _mapping(compiled_graph: Any) -> dict[str, Any] | None:
    text = getattr(compiled_graph, "inductor_provenance_mapping_str", None)
    if not text:
        return None
    try:
        mapping = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProvenanceMissing(f"Inductor's provenance mapping is not JSON: {error}") from error
    return mapping if isinstance(mapping, dict) and "cppCodeToPost" in mapping else None


def _build(mapping: dict[str, Any], gm: fx.GraphModule, source: str, static: set[str]) -> Provenance:
    pre_grad = {name: tuple(sorted(names)) for name, names in mapping.get("postToPre", {}).items()}
    by_name = {node.name: node for node in gm.graph.nodes}
    locations = _locations(gm, pre_grad)
    nodes = {
        name: _node_info(node, locations.get(name, ("", "", "", 0, "")), pre_grad.get(name, ()), static)
        for name, node in by_name.items()
        if node.op != "output"
    }
    kernels: dict[str, list[str]] = mapping["cppCodeToPost"]
    version = str(mapping.get("version", "1"))
    ours = generated_kernels(source)
    sites = _call_sites(kernels, source)
    # The version-less form is keyed by kernel name: every site of a kernel then has the nodes of all of them.
    listed = [
        Listed(
            kernel,
            _is_extern(kernel, ours),
            tuple(kernels.get(f"{kernel}:{handle}", kernels.get(kernel, []))),
        )
        for kernel, handle in sites
    ]
    operators = {name: node for name, node in by_name.items() if node.op == "call_function"}
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


def _call_sites(kernels: dict[str, list[str]], source: str) -> list[tuple[str, int]]:
    sites = [(site.kernel, site.handle) for site in launch_sites(source)]
    if sites:
        return sites
    named = []
    for position, key in enumerate(kernels, start=1):
        kernel, _, handle = key.rpartition(":")
        named.append((kernel, int(handle)) if kernel and handle.isdigit() else (key, position))
    return named


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


def _node_info(node: fx.Node, location: Location, pre_grad: tuple[str, ...], static: set[str]) -> NodeInfo:
    value = _first_tensor(node.meta.get("val"))
    strided = value is not None and value.layout == torch.strided
    modelled = cost.node_cost(node) if node.op == "call_function" else None
    info = NodeInfo(
        name=node.name,
        op=node.op,
        target=cost.target_name(node),
        shape=None if value is None else tuple(_hint(size) for size in value.shape),
        stride=tuple(_hint(step) for step in value.stride()) if value is not None and strided else None,
        dtype=None if value is None else str(value.dtype).removeprefix("torch."),
        device=None if value is None else str(value.device),
        inputs=tuple(n.name for n in node.all_input_nodes),
        pre_grad=pre_grad,
        flops=modelled.flops if modelled else None,
        bytes=modelled.bytes if modelled else None,
        static=node.op == "get_attr" or node.name in static,
    )
    return info.at(location)


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


def _static_names(compiled_graph: Any, gm: fx.GraphModule) -> set[str]:
    indices = set((getattr(compiled_graph, "fx_kwargs", None) or {}).get("static_input_idxs") or ())
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return {node.name for i, node in enumerate(placeholders) if i in indices}


def _own_location(node: fx.Node) -> Location:
    path = cls = ""
    stack = node.meta.get("nn_module_stack")
    if stack:
        spelling, module = list(stack.values())[-1]
        path = module_path(str(spelling))
        cls = module.__name__ if isinstance(module, type) else str(module).rsplit(".", 1)[-1]
    return (path, cls, *user_frame(node.meta.get("stack_trace")))


def _origin(node: fx.Node, pre_grad: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Names of the pre-grad nodes that this node came from."""
    if node.name in pre_grad:
        return pre_grad[node.name]
    names = []
    for source in node.meta.get("from_node") or ():
        name = getattr(source, "name", None)
        if isinstance(name, str):
            names.append(name)
    return tuple(sorted(set(names)))


def _locations(gm: fx.GraphModule, pre_grad: dict[str, tuple[str, ...]]) -> dict[str, Location]:
    """Where the user wrote each operator of ``gm``; nodes of which this is not certain are left out.

    A node that a pass of Inductor made may have no trace of its own. It then gets the location of the nodes
    with the same pre-grad origin, or else the one on which all of its neighbours among the operators agree.
    """
    operators = [node for node in gm.graph.nodes if node.op == "call_function"]
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


def _read_sidecar(path: Path | None, source: str) -> Provenance | None:
    if path is None or not path.is_file():
        return None
    try:
        stored = Provenance.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None  # an unreadable or older record is re-made from a fresh compile
    same = [(s.kernel, s.handle) for s in launch_sites(source)] == [(x.kernel, x.handle) for x in stored.launches]
    return stored if same or not source else None


_swap_lock = threading.RLock()


@contextmanager
def instrumented(compiled_graph: Any, provenance: Provenance) -> Iterator[str | None]:
    """While active, every launch of ``compiled_graph`` runs inside a profiler range
    ``fxopt::<kernel>:<handle>``.

    The generated function gets a new code object, so the ranges appear whoever holds the function
    (AOTAutograd's wrappers, Inductor's input realignment, ``current_callable``), and no kernel is loaded
    again. The code is always put back. Yields None, or a note that says why some launches have no range.
    """
    source = provenance.source_code
    functions, note = _live_functions(compiled_graph, source)
    missing = {launch.key for launch in provenance.launches} - {key for r, _ in functions for key in r.wrapped}
    if missing and note is None:
        some = ", ".join(sorted(missing)[:3])
        note = f"{len(missing)} of {len(provenance.launches)} launches have no range: {some}"
    with _swap_lock:
        before = [(function, function.__code__, RANGE_GLOBAL in function.__globals__) for _, function in functions]
        for rewritten, function in functions:
            function.__globals__[RANGE_GLOBAL] = _range
            function.__code__ = rewritten.code
    try:
        yield note
    finally:
        with _swap_lock:
            for function, code, nested in reversed(before):
                function.__code__ = code
                if not nested:
                    function.__globals__.pop(RANGE_GLOBAL, None)


def _range(name: str) -> Any:
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return torch.profiler.record_function(name) if fast is None else fast(name)


def _live_functions(compiled_graph: Any, source: str) -> tuple[list[tuple[Rewritten, FunctionType]], str | None]:
    """The functions of the loaded wrapper module that launch kernels, each with its rewritten form."""
    call = _wrapper_call(compiled_graph)
    if call is None:
        return [], "the graph's generated Python function was not found (it may run through a C++ wrapper)"
    namespace = call.__globals__
    try:
        rewritten = with_ranges(source, call.__code__.co_filename)
    except (SyntaxError, LookupError) as error:
        return [], f"the wrapper code could not be rewritten: {error}"
    if not rewritten:
        return [], "the wrapper code has no provenance comments"
    pairs = []
    for item in rewritten:
        holder = namespace.get(item.owner) if item.owner else None
        function = vars(holder).get(item.name) if isinstance(holder, type) else namespace.get(item.name)
        if isinstance(function, FunctionType) and function.__code__.co_firstlineno == item.line:
            pairs.append((item, function))
    return pairs, None if pairs else "the loaded wrapper module does not match the graph's source code"


def _wrapper_call(compiled_graph: Any) -> FunctionType | None:
    """The function ``call`` that Inductor generated, through whatever wraps it."""
    runner = getattr(compiled_graph, "compiled_fn_runner", None)
    starts: list[Any] = [
        getattr(type(runner), "call", None),
        getattr(compiled_graph, "current_callable", None),
    ]
    seen: set[int] = set()
    queue = [start for start in starts if start is not None]
    while queue:
        item = queue.pop(0)
        if id(item) in seen or len(seen) > 200:
            continue
        seen.add(id(item))
        if isinstance(item, MethodType):
            item = item.__func__
        if isinstance(item, FunctionType):
            if item.__name__ == "call" and _in_wrapper_module(item):
                return item
            for cell in item.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    queue.append(cell.cell_contents)
            queue.append(getattr(item, "__wrapped__", None))
        elif callable(item):
            queue += [getattr(item, name, None) for name in ("func", "fn", "current_callable", "__call__")]
    return None


def _in_wrapper_module(function: FunctionType) -> bool:
    return {"AsyncCompile", "extern_kernels"} <= function.__globals__.keys()
