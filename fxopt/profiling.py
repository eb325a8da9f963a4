"""The measured profile of compiled code, with hardware counters where there are any, and the labels drawn from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxopt import rules
from fxopt.build import Build
from fxopt.options import Options
from fxopt.stage import stage
from fxopt.torch_api import inductor
from fxopt.warning import warn

if TYPE_CHECKING:
    from profiler_core.collect.provenance import Provenance
    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings


def profile_build(
    build: Build,
    again: Callable[[], inductor.Compiled],
    steady: Callable[[Callable[..., Any]], Callable[..., Any]],
    arguments: Sequence[Any],
    *,
    device: torch.device,
    options: Options,
    store: Path,
    running: Callable[[], AbstractContextManager[None]],
) -> tuple[Profile, list[Provenance]]:
    """Times, attribution and counters of `build`, measured on `arguments`; and what its launches compute, of the graph
    and then of its backward, where it has one.

    again: compiles once more past the caches, for code that a cache served and nobody wrote down what it computes; it
    then takes the place of `build`'s. steady: makes every call do the same. store: where provenance is kept.
    """
    from profiler_core.attribute.engine import attribute
    from profiler_core.collect import inductor as provenance_source
    from profiler_core.collect import kineto
    from profiler_core.environment import environment

    try:
        graphs = _graphs(build.compiled, store)
    except provenance_source.ProvenanceMissing:
        build.compiled = again()
        build.fn = build.compiled.flat()
        graphs = _graphs(build.compiled, store)
    fn, provenances = steady(build.fn), [provenance for _, provenance in graphs]
    with stage("profile"), running(), contextlib.ExitStack() as stack:
        for graph, provenance in graphs:
            tag = provenance.graph if len(graphs) > 1 else ""
            stack.enter_context(provenance_source.instrumented(graph, provenance, tag=tag))
        trace = kineto.measure(
            lambda: fn(*arguments), iterations=options.iterations, warmup=options.warmup, device=device
        )
    with stage("attribute"):
        profile = attribute(trace, provenances, environment(device))
    with running():
        return _counted(profile, lambda: fn(*arguments), graphs, arguments, device, options), provenances


def _graphs(compiled: inductor.Compiled, store: Path) -> list[tuple[Any, Provenance]]:
    """What was compiled, with what its launches compute: the graph, and its backward. Raises ProvenanceMissing."""
    from profiler_core.collect.inductor import from_compiled

    backward = compiled.backward
    if backward is None or backward.graph is None:
        return [(compiled.graph, from_compiled(compiled.graph, compiled.post_grad, store))]
    of_backward = from_compiled(backward.graph, backward.post_grad, store)
    found = [(backward.graph, replace(of_backward, graph=of_backward.graph or "backward"))]
    if compiled.graph is not None:  # a forward of nothing but views is not compiled
        found.insert(0, (compiled.graph, from_compiled(compiled.graph, compiled.post_grad, store)))
    return found


def _counted(
    profile: Profile,
    call: Callable[[], Any],
    graphs: Sequence[tuple[Any, Provenance]],
    arguments: Sequence[Any],
    device: torch.device,
    options: Options,
) -> Profile:
    if device.type != "cuda" or options.counters == "none":
        return profile
    from profiler_core.counting import Asked, counter_keys, with_cupti

    notes: list[str] = []
    asked = Asked(counter_keys("full" if options.counters == "auto" else options.counters))
    state = [value for value in arguments if isinstance(value, torch.Tensor)]
    try:
        profile = with_cupti(profile, call, asked, device, state, graphs, notes)
    except Exception as error:  # what it does not foresee: times are enough to go on with
        if options.on_error == "raise":
            raise
        notes.append(f"no hardware counters: {type(error).__name__}: {error}")
        warn(f"the stage 'counters' failed, and labels rest on times: {type(error).__name__}: {error}")
    return replace(profile, notes=(*profile.notes, *notes))


def labels_of(
    profile: Profile, device: torch.device, options: Options, store: Path
) -> tuple[rules.LabelReport, Ceilings]:
    """Labels, and the measured ceilings that they were drawn from (kept in `store`)."""
    from profiler_core import roofline

    ceilings = roofline.ceilings(device, store)
    if beaten(profile, ceilings):
        ceilings = roofline.raised(device, store, ceilings)
    found = rules.label(profile, ceilings, thresholds=dict(options.thresholds))
    refused = tuple(note for note in profile.notes if note.startswith("no hardware counters"))
    return replace(found, missing=(*refused, *found.missing)), ceilings


def beaten(profile: Profile, ceilings: Ceilings) -> bool:
    """Whether some kernel runs at more than 1.1 times the arithmetic ceiling of its type, which cannot be."""
    groups = profile.groups()
    for flops, time_ns, dtype in zip(groups["flops"], groups["time_ns"], groups["dtype"], strict=True):
        ceiling = ceilings.flops_per_s.get("tf32" if dtype == "float32" else dtype, 0.0)
        ceiling = max(ceiling, ceilings.flops_per_s.get(str(dtype), 0.0))
        # `flops == flops`: a group that is not modelled holds NaN
        if ceiling and flops == flops and time_ns > 0 and flops / time_ns * 1e9 > 1.1 * ceiling:
            return True
    return False
