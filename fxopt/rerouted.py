"""Has a program's models run on the backend profile_guided, without a change of the program."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fxopt.backend import Backend

if TYPE_CHECKING:
    from profiler_core.collect.module_calls import Call

BACKEND = "profile_guided"


@dataclass
class Rerouted:
    """What became of the program's models: the calls of torch.compile that go to the backend, the modules that are
    compiled because the program does not, and what was left alone, with a reason.
    """

    options: Mapping[str, Any]
    compile: Callable[..., Any]  # torch's own
    compiled: int = 0
    modules: list[torch.nn.Module] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    calls: int = 0
    idle: bool = False
    before: Callable[[], None] | None = None  # what is to be asked before a call that no other one makes
    _depth: Any = field(default_factory=threading.local)

    def called(self, call: Call) -> Any:
        """Compiles a module before the first of its calls that no other module makes."""
        depth = self._depth.__dict__.get("value", 0)
        if depth == 0 and self.before is not None:
            self.before()
        if depth == 0 and isinstance(call.subject, torch.nn.Module):
            self.calls += 1
            if not self.compiled:
                self._compile(call.subject)
        self._depth.value = depth + 1
        try:
            return call()
        finally:
            self._depth.value = depth

    def _compile(self, module: torch.nn.Module) -> None:
        if any(module is known for known in self.modules) or module._compiled_call_impl is not None:
            return
        owner = type(module).__module__
        if owner.startswith("torch.") and (owner.endswith(".loss") or not owner.startswith("torch.nn.modules.")):
            return  # a loss, or what torch makes of a model: there is nothing to gain in a graph of its own
        from profiler_core.collect.module_calls import call_of

        self.modules.append(module)
        module._compiled_call_impl = self.compile(call_of(module), backend=BACKEND, options=dict(self.options))

    def let_go(self) -> None:
        """Modules run as the program has them again."""
        for module in self.modules:
            module.__dict__.pop("_compiled_call_impl", None)


@contextmanager
def rerouted(options: Mapping[str, Any], before: Callable[[], None] | None = None) -> Iterator[Rerouted]:
    """Inside, torch.compile compiles with profile_guided under ``options``, whatever mode and options of Inductor's it
    is given besides; and where the program has not called it, the outermost modules that are called are compiled in
    place. All of it is undone on leaving.

    A backend that is neither Inductor nor this one was chosen for what it does, and is left alone. before: is called
    before each call that no other one makes, and may raise.
    """
    from profiler_core.collect.module_calls import watching

    original = torch.compile
    state = Rerouted(dict(options), original, before=before)

    @functools.wraps(original)
    def compile(model: Any = None, **given: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **given)
        return original(model, **_settings(given, state))

    torch.compile = compile
    try:
        with watching(state):
            yield state
    finally:
        torch.compile = original
        state.let_go()


def _settings(given: Mapping[str, Any], state: Rerouted) -> dict[str, Any]:
    backend = given.get("backend", "inductor")
    if given.get("disable") or isinstance(backend, Backend):
        return dict(given)
    if backend not in ("inductor", BACKEND):
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
        state.left.append(f"torch.compile(backend={name!r}) was left as it is")
        return dict(given)
    state.compiled += 1
    state.let_go()  # it has called modules before, and now says itself what is to be compiled
    settings = {name: value for name, value in given.items() if name not in ("backend", "mode", "options")}
    options = dict(given.get("options") or {})
    if given.get("mode") is not None:
        options["mode"] = given["mode"]
    return {**settings, "backend": BACKEND, "options": {**options, **state.options}}
