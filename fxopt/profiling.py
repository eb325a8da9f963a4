"""The measured profile of compiled code, with hardware counters where there are any, and the labels drawn from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxopt import rules
from fxopt.build import Build
from fxopt.options import Options
from fxopt.torch_api import inductor

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
) -> tuple[Profile, Provenance]:
    """Times, attribution and counters of `build`, measured on `arguments`; and what its launches compute.

    again: compiles once more past the caches, for code that a cache served and nobody wrote down what it computes; it
    then takes the place of `build`'s. steady: makes every call do the same. store: where provenance is kept.
    """
    from profiler_core.attribute.engine import attribute
    from profiler_core.collect import inductor as provenance_source
    from profiler_core.collect import kineto
    from profiler_core.environment import environment

    try:
        provenance = provenance_source.from_compiled(build.compiled.graph, build.compiled.post_grad, store)
    except provenance_source.ProvenanceMissing:
        build.compiled = again()
        build.fn = build.compiled.flat()
        provenance = provenance_source.from_compiled(build.compiled.graph, build.compiled.post_grad, store)
    graph, fn = build.compiled.graph, steady(build.fn)
    with running(), provenance_source.instrumented(graph, provenance):
        trace = kineto.measure(
            lambda: fn(*arguments), iterations=options.iterations, warmup=options.warmup, device=device
        )
    profile = attribute(trace, provenance, environment(device))
    with running():
        return _counted(profile, lambda: fn(*arguments), graph, provenance, arguments, device, options), provenance


def _counted(
    profile: Profile,
    call: Callable[[], Any],
    graph: Any,
    provenance: Provenance,
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
    found = with_cupti(profile, call, asked, device, state, [(graph, provenance)], notes)
    return replace(found, notes=(*found.notes, *notes))


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
