"""Catches every graph that Inductor compiles for a user's own torch.compile, with its provenance.

All that touches ``torch._inductor.compile_fx`` is in this module. Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from profiler_core.collect.inductor import ProvenanceMissing, from_compiled, tracked
from profiler_core.collect.provenance import Provenance
from profiler_core.files import write_atomically

# Graphs that were captured and still live, because Dynamo does not compile them again for the next profile.
_alive: list[tuple[weakref.ref[Any], Provenance]] = []


@dataclass
class Captured:
    """The graphs known so far: ``graphs`` holds (Inductor's compiled graph, its provenance), those of earlier captures
    that still live first, then in the order of compilation, each provenance with a ``graph`` of its own. ``missing``
    says for which graphs there is none, and why.
    """

    graphs: list[tuple[Any, Provenance]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def provenances(self) -> list[Provenance]:
        return [provenance for _, provenance in self.graphs]

    def add(self, compiled: Any, provenance: Provenance) -> Provenance:
        """Keep a graph, under a name of its own."""
        name = provenance.graph or f"graph {len(self.graphs)}"
        taken = {p.graph for p in self.provenances}
        number = 1
        while (unique := name if number == 1 else f"{name} #{number}") in taken:
            number += 1
        named = replace(provenance, graph=unique)
        self.graphs.append((compiled, named))
        return named

    def called(self, keys: Collection[str], tags: Collection[str]) -> list[Provenance]:
        """The provenance of the graphs with these of Inductor's keys.

        Graphs of the same code have the same key: of these the ones whose launches have ranges with their name
        (``tags``) were called, or, where none has, the last one stands for all.
        """
        found = [p for p in self.provenances if p.cache_key in keys]
        tagged = {p.cache_key for p in found if p.graph in tags}
        last = {p.cache_key: p.graph for p in found}
        return [p for p in found if p.graph in (tags if p.cache_key in tagged else {last[p.cache_key]})]


@contextmanager
def capturing(store: Path | None, *, caches: bool = True) -> Iterator[Captured]:
    """While active, Inductor tracks provenance, and what it compiles is kept, on whatever thread.

    AOTAutograd's cache, which would serve code without asking Inductor, is passed by. ``store`` keeps provenance for
    later hits in Inductor's own cache, which serves only what was put there with the same store: the level of tracking
    is no part of its keys in torch 2.11. With ``caches`` False it serves nothing.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as inductor_config
    import torch.compiler

    compiler_config: Any = torch.compiler.config
    captured = Captured()
    _alive[:] = [(reference, provenance) for reference, provenance in _alive if reference() is not None]
    for reference, provenance in _alive:
        captured.add(reference(), provenance)
    inner: Any = compile_fx._compile_fx_inner
    patches: dict[str, Any] = {"trace.provenance_tracking_level": 1}
    tag = f"{compiler_config.cache_key_tag} provenance {_identity(store) if caches else uuid4().hex}".lstrip()

    def keeping(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        # Once more, for settings are of a thread since torch 2.12, and autograd's compiles the backward graph. The tag
        # holds here alone: Dynamo, too, has its records of what is dynamic by it.
        with tracked(), inductor_config.patch(patches), compiler_config.patch(cache_key_tag=tag):
            compiled = inner(gm, example_inputs, **kwargs)
        if not hasattr(compiled, "source_code"):  # a graph without work
            return compiled
        try:
            provenance = from_compiled(compiled, gm, store)
        except ProvenanceMissing as error:
            captured.missing.append(str(error))
            return compiled
        if not provenance.cache_key:
            # Not cached (frozen weights, or caches are off): its calls are told from others by this name.
            compiled._fx_graph_cache_key = f"uncached-{uuid4().hex}"
            provenance = replace(provenance, cache_key=compiled._fx_graph_cache_key)
        _alive.append((weakref.ref(compiled), captured.add(compiled, provenance)))
        return compiled

    compile_fx._compile_fx_inner = keeping  # type: ignore[assignment]
    try:
        with inductor_config.patch(patches), functorch_config.patch(enable_autograd_cache=False):
            yield captured
    finally:
        compile_fx._compile_fx_inner = inner


def _identity(store: Path | None) -> str:
    """A name of the store that another in its place, emptied since, does not have."""
    made = uuid4().hex
    if store is None:
        return made
    path = store / "id"
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii")
    with suppress(OSError):  # where nothing can be kept, nothing may be served
        write_atomically(path, made)
    return made


def forget_compiled_code() -> None:
    """Have Dynamo compile every function anew when it is next called."""
    import torch

    _alive.clear()
    torch._dynamo.reset()
