"""Provenance of a graph compiled by Inductor, and ranges around its launches.

All that touches private attributes of ``torch._inductor.output_code.CompiledFxGraph`` is in this module.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import fx

from profiler_core.collect.assemble import assemble, launched, locations, user_frame
from profiler_core.collect.kineto import profiler_range
from profiler_core.collect.module_spelling import module_path
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
    "tracked",
    "user_frame",
]


def from_compiled(compiled_graph: Any, gm: fx.GraphModule | None, store: Path | None) -> Provenance:
    """Provenance of ``compiled_graph``, a ``CompiledFxGraph`` compiled with
    ``trace.provenance_tracking_level=1``.

    ``gm`` is the graph that was handed to ``inner_compile``. After a fresh compile it *is* the post-grad
    graph; after a hit in Inductor's FX graph cache it is not, and the nodes come from the record that the
    fresh compile left at ``store/<fx cache key>.json``, with the user's locations taken from ``gm``.

    Its ``graph`` is the id of the compile that is under way ("0/0", "0/0 backward"), "" where there is none.

    Raises :class:`ProvenanceMissing` where neither can be had; recompile with Inductor's caches off then, and a
    backward graph inside :func:`tracked`.
    """
    made = _provenance(compiled_graph, gm, store)
    key = getattr(compiled_graph, "_fx_graph_cache_key", None)
    return replace(made, graph=_compile_id(compiled_graph), cache_key=key or "")


@contextmanager
def tracked() -> Iterator[None]:
    """Makes Inductor keep the provenance of a graph that is compiled inside.

    A backward graph is compiled after ``compile_fx`` has returned, and Inductor then writes an empty mapping: it
    asks for the id of a pre-grad graph, which it forgets on return, and the lists of several backward graphs run
    into each other. Around ``compile_fx_inner`` of any other graph this changes nothing.
    """
    from torch._inductor import debug

    if getattr(debug, "_pre_grad_graph_id", 0) is not None or not hasattr(debug, "reset_provenance_globals"):
        yield
        return
    with debug.reset_provenance_globals():  # which also sets an id that is not None
        yield


def _compile_id(compiled_graph: Any) -> str:
    current = torch._guards.CompileContext.current_compile_id()
    if current is None:
        return ""
    return f"{current} backward" if _is_backward(compiled_graph) else str(current)


def _is_backward(compiled_graph: Any) -> bool:
    return bool((getattr(compiled_graph, "fx_kwargs", None) or {}).get("is_backward"))


def _provenance(compiled_graph: Any, gm: fx.GraphModule | None, store: Path | None) -> Provenance:
    source = getattr(compiled_graph, "source_code", None) or ""
    mapping = _mapping(compiled_graph)
    key = getattr(compiled_graph, "_fx_graph_cache_key", None)
    sidecar = store / f"{key}.json" if store is not None and key else None
    stored = _read_sidecar(sidecar, source)
    if stored is not None:
        return relocate(stored, {} if gm is None else locations(gm.graph, {}))
    if mapping is None:
        raise ProvenanceMissing(
            "the compiled graph carries no provenance mapping: compile it with "
            "config_patches={'trace.provenance_tracking_level': 1} and Inductor's caches off, and a backward graph "
            "inside profiler_core.collect.inductor.tracked()"
        )
    if source and _is_backward(compiled_graph) and not launch_sites(source):
        # Of nothing but views, as of a sum. All that the mapping lists is the forward's, compiled just before.
        mapping = {**mapping, "cppCodeToPost": {}}
    wanted = {name for names in launched(mapping, source).values() for name in names}
    graph = None if gm is None else _whole_graph(gm)
    present = set() if graph is None else {node.name for node in graph.nodes}
    if gm is None or graph is None or not wanted <= present:
        missing = sorted(wanted - present)[:3]
        where = "no store of records was given" if store is None else "the graph has no key to look a record up by"
        where = f"there is no record at {sidecar}" if sidecar is not None else where
        raise ProvenanceMissing(
            f"the graph at hand is not the post-grad graph (it lacks {', '.join(missing)}), which happens after "
            f"a hit in Inductor's cache, and {where}: recompile with force_disable_caches=True"
        )
    provenance = assemble(mapping, graph, source, static=_static_names(compiled_graph, gm))
    if sidecar is not None:
        with suppress(OSError):  # the record spares a later recompile; without it there is just that one
            write_atomically(sidecar, json.dumps(provenance.to_json()))
    return provenance


def _whole_graph(gm: fx.GraphModule) -> Any:
    """The graph with the bodies of its ``cond`` and ``while_loop``, which Inductor compiles into the same code.

    Inductor's mapping has bare names of nodes. One that stands in several bodies is taken from the outermost.
    """
    nodes = {node.name: node for node in gm.graph.nodes}
    for name, module in gm.named_modules():
        if name and isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function":
                    nodes.setdefault(node.name, node)
    return SimpleNamespace(nodes=list(nodes.values()))


def _mapping(compiled_graph: Any) -> dict[str, Any] | None:
    text = getattr(compiled_graph, "inductor_provenance_mapping_str", None)
    if not text:
        return None
    try:
        mapping = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProvenanceMissing(f"Inductor's provenance mapping is not JSON: {error}") from error
    return mapping if isinstance(mapping, dict) and "cppCodeToPost" in mapping else None


def _static_names(compiled_graph: Any, gm: fx.GraphModule) -> set[str]:
    indices = set((getattr(compiled_graph, "fx_kwargs", None) or {}).get("static_input_idxs") or ())
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return {node.name for i, node in enumerate(placeholders) if i in indices}


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
def instrumented(
    compiled_graph: Any, provenance: Provenance, *, tag: str = "", ranges: Callable[[str], Any] | None = None
) -> Iterator[str | None]:
    """While active, every launch of ``compiled_graph`` runs inside a profiler range
    ``fxopt::<kernel>:<handle>``, or ``fxopt::<kernel>:<handle>@<tag>``: several graphs measured together have
    launches of the same name, and ``tag`` (the provenance's ``graph``) tells them apart. ``ranges`` makes the context
    manager around each launch from that name, where it is to be another than a profiler's range.

    The generated function gets a new code object, so the ranges appear whoever holds the function
    (AOTAutograd's wrappers, Inductor's input realignment, ``current_callable``), and no kernel is loaded
    again. The code is always put back. Yields None, or a note that says why some launches have no range.
    """
    source = provenance.source_code
    functions, note = _live_functions(compiled_graph, source, tag)
    missing = {launch.key for launch in provenance.launches} - {key for r, _ in functions for key in r.wrapped}
    if missing and note is None:
        some = ", ".join(sorted(missing)[:3])
        note = f"{len(missing)} of {len(provenance.launches)} launches have no range: {some}"
    with _swap_lock:
        before = [(function, function.__code__, function.__globals__.get(RANGE_GLOBAL)) for _, function in functions]
        for rewritten, function in functions:
            function.__globals__[RANGE_GLOBAL] = ranges or profiler_range
            function.__code__ = rewritten.code
    try:
        yield note
    finally:
        with _swap_lock:
            for function, code, outer in reversed(before):
                function.__code__ = code
                if outer is None:
                    function.__globals__.pop(RANGE_GLOBAL, None)
                else:
                    function.__globals__[RANGE_GLOBAL] = outer


def _live_functions(
    compiled_graph: Any, source: str, tag: str
) -> tuple[list[tuple[Rewritten, FunctionType]], str | None]:
    """The functions of the loaded wrapper module that launch kernels, each with its rewritten form."""
    call = _wrapper_call(compiled_graph)
    if call is None:
        return [], "the graph's generated Python function was not found (it may run through a C++ wrapper)"
    namespace = call.__globals__
    try:
        rewritten = with_ranges(source, call.__code__.co_filename, tag)
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
            if item.__name__ == "call" and in_wrapper_module(item.__globals__):
                return item
            for cell in item.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    queue.append(cell.cell_contents)
            queue.append(getattr(item, "__wrapped__", None))
        elif callable(item):
            queue += [getattr(item, name, None) for name in ("func", "fn", "current_callable", "__call__")]
    return None


def in_wrapper_module(namespace: Mapping[str, Any]) -> bool:
    """Whether these are the globals of code that Inductor wrote."""
    return {"AsyncCompile", "extern_kernels"} <= namespace.keys()
