"""Eager, Inductor and fxopt on the same work, in turns, in one process."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch

from fxopt import measure as timing
from fxopt.report.comparison import Comparison
from fxopt.script import Outcome, Target, Work, WrongFunction, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fxopt.report.model import Report
    from profiler_core.collect.module_calls import Call


class NothingToMeasure(Exception):
    """There is no model, or none that can be measured; the message says why and what to do."""


def measure(work: Work, options: Mapping[str, Any], *, pairs: int = 30) -> Report:
    """Times the work in its three forms, and at precision "bf16" under autocast as well; in the report's `comparison`.
    Raises NothingToMeasure for a model in training mode.
    """
    import fxopt
    from fxopt.report.model import Report, collect_reports

    if work.model is not None and work.model.training:
        raise NothingToMeasure(
            "the model is in training mode, and fxopt is for inference: call model.eval() before it is called"
        )
    notes: list[str] = []
    forms: dict[str, Callable[[], Any]] = {"eager": work.call}
    with torch.no_grad() if work.model is not None else contextlib.nullcontext():
        if work.model is not None:
            compiled = torch.compile(work.model)
            fast = fxopt.optimize(work.model, work.kwargs or work.args, **options)
            forms["Inductor"] = lambda: compiled(*work.args, **work.kwargs)
            forms["fxopt"] = lambda: fast(*work.args, **work.kwargs)
            graphs = fast.report.graphs
        else:
            forms["Inductor"] = torch.compile(work.call)
            forms["fxopt"] = torch.compile(work.call, backend="profile_guided", options=dict(options))
            with collect_reports() as graphs:
                forms["fxopt"]()
        expected = _tensors(forms["eager"]())
        if work.model is None and not graphs and not expected:
            raise WrongFunction(work.refusal.format("no graph of it reached the compiler"))
        error = _distance(expected, _tensors(forms["fxopt"]()))
        device = next((tensor.device for tensor in expected), _device())
        if options.get("precision") == "bf16" and work.model is not None:
            fxopts = forms.pop("fxopt")
            forms |= {"autocast": _autocast(work, device), "fxopt": fxopts}
        forms["Inductor"]()
        noise = timing.noise_floor(forms["Inductor"], [()], device=device, pairs=max(6, pairs // 3))
        results = {
            (a, b): timing.compare(forms[a], forms[b], [()], device=device, pairs=pairs, noise=noise)
            for a, b in combinations(forms, 2)
        }
    if not graphs:
        notes.append("no graph of it reached the compiler: Inductor and fxopt run it as eager does")
    times = {name: results[name, "fxopt"].baseline_ns for name in forms if name != "fxopt"}
    times["fxopt"] = results["Inductor", "fxopt"].candidate_ns
    for (a, b), result in results.items():
        notes += [f"{a} against {b}: {mark}" for mark in result.marked]
    passes = list(dict.fromkeys(name for graph in graphs for name in graph.passes))
    found = Comparison(times, results, passes, str(device), error, notes)
    found.notes += [found.doubt] if found.doubt else []
    return Report(graphs=list(graphs), comparison=found)


def _autocast(work: Work, device: torch.device) -> Callable[[], Any]:
    """The model as Inductor compiles it under autocast to bfloat16, which is torch's own way to that precision."""
    compiled = torch.compile(work.model)

    def call() -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return compiled(*work.args, **work.kwargs)

    return call


def work_of_program(target: Target, before: Callable[[], None] | None = None) -> tuple[Work, Outcome]:
    """The model that a program calls most often, with the inputs of its first call. Runs the program to its end.
    before: is called before each call that no other one makes, and may raise.

    Raises NothingToMeasure where it calls none, or fails before it does.
    """
    from profiler_core.collect.module_calls import watching

    seen = _FirstCalls(before)
    with watching(seen):
        outcome = run(target)
    if outcome.interrupted:
        raise KeyboardInterrupt
    if not seen.calls:
        ended = f" (the program ended with exit code {outcome.code})" if outcome.code else ""
        raise NothingToMeasure(
            f"the program called no nn.Module in this process{ended}; give a function: package.module:function"
        )
    key = max(seen.calls, key=lambda one: (seen.times[one], seen.size(one)))
    model, args, kwargs, training = seen.calls[key]
    if training:
        raise NothingToMeasure(
            f"the program trains: {type(model).__name__} was first called in training mode, and fxopt is for "
            "inference. Give a script that calls model.eval(), or a function that returns (model, inputs)"
        )
    return Work(_call(model, args, kwargs), model, args, kwargs), outcome


def _call(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return model(*args, **kwargs)

    return call


class _FirstCalls:
    """The first call of every outermost module of a program's, and how often each is called."""

    idle = False

    def __init__(self, before: Callable[[], None] | None = None) -> None:
        self.before = before
        self.calls: dict[int, tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], bool]] = {}
        self.times: Counter[int] = Counter()
        self._depth = 0

    def size(self, key: int) -> int:
        return sum(parameter.numel() for parameter in self.calls[key][0].parameters())

    def called(self, call: Call) -> Any:
        if self._depth == 0 and self.before is not None:
            self.before()
        if self._depth == 0 and isinstance(call.subject, torch.nn.Module):
            model = getattr(call.subject, "_orig_mod", call.subject)  # what torch.compile put around it
            self.times[id(model)] += 1
            if id(model) not in self.calls:
                self.calls[id(model)] = (model, *_copied(call.args, call.kwargs), model.training)
        self._depth += 1
        try:
            return call()
        finally:
            self._depth -= 1


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As they were before the call, which may write to them."""
    with torch.no_grad():
        try:
            return copy.deepcopy((args, kwargs))
        except Exception:  # a tensor of a graph of autograd's, a handle: taken as it is
            return args, kwargs


def _tensors(value: Any) -> list[torch.Tensor]:
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _distance(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float | None:
    pairs = [(a, b) for a, b in zip(expected, found, strict=False) if a.is_floating_point() and a.shape == b.shape]
    if not pairs or len(expected) != len(found):
        return None
    square = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    norm = sum(float(a.double().square().sum()) for a, _ in pairs)
    return (square / norm) ** 0.5 if norm else None


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")
