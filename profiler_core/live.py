"""Profiles a function of this process: times by torch.profiler, FX nodes from Inductor, counters from CUPTI."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from profiler_core.counting import Asked, counter_keys, with_cupti
from profiler_core.profiles import Profile

if TYPE_CHECKING:
    import torch

    from profiler_core.collect.compile_capture import Captured
    from profiler_core.trace import Trace

NO_LINES = "no source lines outside of compiled graphs: a debugger or a coverage tool is at work"
REPLAYS = ("auto", "application", "kernel")
_running = Lock()


@contextmanager
def _alone() -> Iterator[None]:
    """Inductor is patched and the profilers are of the process, so one profile() at a time."""
    from profiler_core.collect.conflicts import ProfilerError

    if not _running.acquire(blocking=False):
        raise ProfilerError("another profile() is running in this process: wait for it to end")
    try:
        yield
    finally:
        _running.release()


@_alone()
def profile(
    fn: Callable[..., Any],
    *args: Any,
    iterations: int = 5,
    warmup: int = 3,
    counters: str | Sequence[str] | None = None,
    replay: str = "auto",
    deduplicate: bool | None = None,
    primed: bool = False,
    clocks: str = "monitor",
    device: str | torch.device | None = None,
    store: Path | None = None,
    lines: bool = True,
    own: Sequence[str] = (),
    **kwargs: Any,
) -> Profile:
    """Call ``fn(*args, **kwargs)`` under a profiler and attribute every kernel that it runs.

    Args:
        fn: any callable, eager or compiled; a ``torch.compile`` of Inductor's is compiled inside, with provenance.
        iterations: measured calls.
        warmup: calls before them; compilation happens in the first.
        counters: "quick" (two passes; the default on a GPU), "none", "full" (all twenty) or keys of
            :data:`profiler_core.counters.COUNTERS`; on a GPU of NVIDIA's alone. Where they cannot be had, the profile
            has times only and a note says why.
        replay: "auto", "application" or "kernel": see :mod:`profiler_core.collect.cupti.session`.
        deduplicate: take counters of one launch of each class of equal layers and carry them to its twins. By default
            where each kernel has to be replayed, which is slow, and (nearly) all of them are in compiled graphs.
        primed: under application replay, call twice a pass and count the second call, whose caches are as a call leaves
            them.
        clocks: "monitor", "lock" (asked for, because it changes the machine; always undone) or "off".
        device: whose kernels are measured; by default that of the tensors among the arguments, in a module, and among
            the variables that a function uses: an accelerator, if any is on one.
        store: a folder for Inductor's provenance, so that a later run may be served from Inductor's cache; by default
            the user's cache folder.
        lines: find the source line of operators outside of compiled graphs. Costs a few microseconds a line in the
            calls that are recorded, which is no part of a kernel's time and not of ``wall_ns``.
        own: folders whose code is not the user's, such as those of a tool that calls this.

    On the CPU, operators count on whatever thread they run during the measured calls. Everything that ``fn`` raises
    passes through. Raises :class:`TypeError` where ``fn`` cannot be called; :class:`ValueError` for an option that is
    none, for a device that is neither a CPU nor a GPU of CUDA's, and where a call returns a generator or coroutine,
    which has done nothing yet;
    :class:`~profiler_core.collect.conflicts.ProfilerError` where another profiler, or another profile(), is at work.
    """
    import torch

    from profiler_core import clocks as clock_policy
    from profiler_core.attribute.engine import attribute
    from profiler_core.collect.call_places import CallPlaces
    from profiler_core.collect.module_calls import watching
    from profiler_core.environment import environment
    from profiler_core.layer_classes import with_layer_classes

    if not callable(fn):
        what = "a module or a function, followed by what it is called with"
        raise TypeError(f"fn is a {type(fn).__name__}: expected {what}")
    keys = counter_keys("none" if counters is None else counters)
    if iterations < 1 or warmup < 0:
        raise ValueError(f"iterations={iterations}, warmup={warmup}: expected at least 1 and 0")
    if replay not in REPLAYS:
        raise ValueError(f"replay={replay!r}: expected one of {', '.join(REPLAYS)}")
    where = torch.device(device) if device is not None else _device_of((fn, args, kwargs))
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(where)!r}: expected cpu or cuda, whose kernels alone can be measured")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(where)!r}: torch finds no GPU (torch.cuda.is_available() is False)")
    if counters is None and where.type == "cuda":
        keys = counter_keys("quick")
    notes: list[str] = []
    places = CallPlaces(lines=lines, own=own)

    def call() -> Any:
        return places.call(partial(fn, *args, **kwargs))

    with watching(places.modules), clock_policy.under(clocks, where) as monitor:
        trace, captured = _measure(call, iterations, warmup, where, store or default_store(), notes)
    found = environment(where)
    found["clocks"] = monitor.summary()
    provenances = captured.called(*_called(trace))
    result = attribute(trace, provenances, found, eager_nodes=True)
    if found["clocks"].get("drifted"):
        notes.append("clocks drifted while the times were taken: compare them within this profile only")
    notes += [f"no provenance for a compiled graph: {why}" for why in captured.missing]
    if hasattr(fn, "_torchdynamo_orig_callable") and not _called(trace)[0]:
        notes.append("Inductor compiled no graph of it: everything is attributed to operators")
    if result.window.empty:
        used = any(isinstance(value, Iterator) for value in (*args, *kwargs.values()))
        why = "; an argument is an iterator, which the calls before may have used up: give a list" if used else ""
        notes.append(f"no kernels: the function ran none during the measured calls{why}")
    if places.refused and (result.nodes["kind"] == "operator").any():
        notes.append(NO_LINES)
    notes += _on_other_threads(trace, result)
    result = with_layer_classes(result, provenances)
    if keys and where.type != "cuda":
        notes.append(f"no hardware counters: they are read on GPUs of NVIDIA, and this ran on {where.type}")
    elif keys:
        state = tuple(_tensors((fn, args, kwargs)))
        graphs = [(graph, p) for graph, p in captured.graphs if any(p is q for q in provenances)]
        asked = Asked(keys, replay, deduplicate, primed)
        with watching(places.modules):
            result = with_cupti(result, call, asked, where, state, graphs, notes)
    return replace(result, notes=(*result.notes, *notes))


def default_store() -> Path:
    """Where Inductor's provenance is kept unless the caller says otherwise."""
    from platformdirs import user_cache_path

    return user_cache_path("fxopt") / "provenance"


def _measure(
    call: Callable[[], Any], iterations: int, warmup: int, device: torch.device, store: Path, notes: list[str]
) -> tuple[Trace, Captured]:
    """Times of ``call``, and the graphs that it is made of.

    Code that was compiled before is of no use, since nobody knows what its kernels compute. Then, and where Inductor's
    cache serves a graph of which no provenance was kept, everything is compiled once more.
    """
    from profiler_core.collect import compile_capture

    caches = True
    for last in (False, True):
        with compile_capture.capturing(store, caches=caches) as captured:
            for _ in range(max(warmup, 1)):
                _refuse_unstarted(call())
            said, compiled, trace = _instrumented(call, captured, iterations, device)
        unknown = len(_called(trace)[0] - {p.cache_key for p in captured.provenances})
        if last or not (unknown or captured.missing):
            break
        what = "1 graph" if unknown == 1 else f"{unknown} graphs"
        notes += [f"{what} had been compiled without provenance, and everything was compiled again"] if unknown else []
        caches = not captured.missing
        compile_capture.forget_compiled_code()
    called = {p.graph for p in captured.called(*_called(trace))}
    if compiled:
        what = "1 graph was" if compiled == 1 else f"{compiled} graphs were"
        notes.append(f"{what} compiled during the measured calls; their compilation counts as work")
    notes += [f"graph {graph}: {note}" for graph, note in said.items() if note and graph in called]
    return trace, captured


def _instrumented(
    call: Callable[[], Any], captured: Captured, iterations: int, device: torch.device
) -> tuple[dict[str, str | None], int, Trace]:
    """What is to be said of launches without ranges, by graph, how many graphs the calls in the trace compiled, and the
    trace.
    """
    from profiler_core.collect import inductor, kineto

    said = {}
    before: list[tuple[int, int]] = []

    def counted() -> Any:
        before.append(_compiled(captured))
        return call()

    with ExitStack() as stack:
        for graph, provenance in captured.graphs:
            ranges = inductor.instrumented(graph, provenance, tag=provenance.graph)
            said[provenance.graph] = stack.enter_context(ranges)
        trace = kineto.measure(counted, iterations=iterations, warmup=1, device=device, shapes=True)
    first = before[-iterations]  # the calls in the trace come last
    return said, max(now - then for now, then in zip(_compiled(captured), first, strict=True)), trace


def _compiled(captured: Captured) -> tuple[int, int]:
    """How many graphs Inductor and Dynamo, which may have others compile them, have compiled so far."""
    from torch._dynamo.utils import counters

    return len(captured.graphs) + len(captured.missing), counters["stats"]["unique_graphs"]


def _refuse_unstarted(returned: Any) -> None:
    """Raises ValueError where this is what a generator function or ``async def`` returns."""
    if inspect.iscoroutine(returned):
        returned.close()  # or Python warns that it was never awaited
    elif not (inspect.isgenerator(returned) or inspect.isasyncgen(returned)):
        return
    raise ValueError(f"the function returned a {type(returned).__name__}: call it through a function that runs it")


def _on_other_threads(trace: Trace, result: Profile) -> list[str]:
    """A note where operators on the CPU were counted that the calling thread did not run."""
    from profiler_core.range_names import iteration_of

    if trace.device_type != "cpu":
        return []
    callers = trace.ranges.loc[[iteration_of(name) >= 0 for name in trace.ranges["name"]], "thread"]
    others = int((~result.window["thread"].isin(callers)).sum())
    if not others:
        return []
    return [
        f"{others} of {len(result.window)} kernels ran on other threads than the caller's: all that ran there "
        "during the measured calls counts"
    ]


def _called(trace: Trace) -> tuple[set[str], set[str]]:
    """Inductor's keys of the compiled graphs that were called, and the graphs in whose name launches have ranges."""
    from profiler_core.range_names import graph_call_of, launch_of

    names = set(trace.ranges["name"])
    keys = {key for name in names if (key := graph_call_of(name)) is not None}
    return keys, {launch_of(name)[1] for name in names} - {""}


def _device_of(values: Any) -> torch.device:
    import torch

    otherwise = "cuda" if torch.cuda.is_initialized() else "cpu"
    return next((tensor.device for tensor in _tensors(values)), torch.device(otherwise))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors in arguments, however nested, in modules, and in variables of functions; an accelerator's first."""
    import torch

    found: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}  # held, so that no other object gets its id

    def search(value: Any) -> None:
        if id(value) in seen:
            return
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif isinstance(value, torch.nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                search(tensor)
        elif isinstance(value, Mapping):
            items: tuple[Any, ...] = ()
            with suppress(Exception):  # a mapping of the user's may do anything
                items = tuple(value.values())
            for item in items:
                search(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                search(item)
        elif isinstance(value, partial):
            search((value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            owner = value.__self__
            search(owner if isinstance(owner, torch.nn.Module) else getattr(owner, "__dict__", {}))
        elif isinstance(value, FunctionType):
            search(_used_by(value))

    search(values)
    yield from sorted(found.values(), key=lambda tensor: tensor.device.type == "cpu")


def _used_by(function: FunctionType) -> Any:
    """The function that torch.compile was given, or the variables of a user's function."""
    compiled = getattr(function, "_torchdynamo_orig_callable", None)
    if compiled is not None:
        return compiled
    if str(function.__module__).partition(".")[0] == "torch":
        return ()
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable without a value yet
        return ()
    return variables.nonlocals, variables.globals
