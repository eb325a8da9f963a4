"""Sees every call of an ``nn.Module``, and of a function that torch.compile returned, while a program runs.

Not by torch's global hooks: torch.compile traces those into its graphs, and warns of them. ``nn.Module.__call__`` is
replaced instead, by a function that torch.compile looks at as if it were not there. All that touches private
attributes of ``torch._dynamo`` for it is in this module. Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Protocol

import torch

from profiler_core.collect.kineto import profiler_range
from profiler_core.range_names import module_name


@dataclass(frozen=True)
class Call:
    """A call that is about to be made, of a module or of a compiled function; calling this makes it."""

    subject: Any
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)


class Watcher(Protocol):
    """Is asked to make each call that is seen, while it is not ``idle``: calls cost next to nothing then."""

    idle: bool

    def called(self, call: Call) -> Any:
        """Returns ``call()``."""


_watchers: list[Watcher] = []
_module_call: Callable[..., Any] = torch.nn.Module.__call__


def _seen(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    # The question comes first: torch.compile knows the answer, and traces nothing of the rest.
    if torch.compiler.is_compiling() or not _watchers or _watchers[-1].idle:
        return _module_call(self, *args, **kwargs)
    return _watchers[-1].called(Call(self, partial(_module_call, self), args, kwargs))


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """While active, ``watcher`` makes the calls of modules (the innermost of several watchers alone), on every thread.

    A subclass with a ``__call__`` of its own is seen where that calls nn.Module's.
    """
    # `_seen` as well: a graph that began there would have other names of its inputs than the program's own has.
    unseen_by_dynamo(_seen, watcher.called, Call.__init__, Call.__call__)
    before, compiler = torch.nn.Module.__call__, torch.compile
    torch.nn.Module.__call__ = _seen  # type: ignore[method-assign]
    torch.compile = _compile(compiler)
    original = _dynamos_own(_seen)
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
        torch.nn.Module.__call__ = before  # type: ignore[method-assign]
        torch.compile = compiler
        _dynamos_own(original)


def _dynamos_own(call: Any) -> Any:
    """Have Dynamo take ``call`` for nn.Module's own ``__call__``; returns what it took for it before.

    It then goes straight to ``forward``, as it does without a watcher; else the frames of this module would be the
    innermost ones that are not torch's, and every node's source line with them.
    """
    import torch._dynamo.utils
    import torch._dynamo.variables.nn_module

    before = getattr(torch._dynamo.utils, "unpatched_nn_module_call", None)
    modules: tuple[Any, ...] = (torch._dynamo.utils, torch._dynamo.variables.nn_module)
    for module in modules:
        if hasattr(module, "unpatched_nn_module_call"):
            module.unpatched_nn_module_call = call
    return before


def unseen_by_dynamo(*functions: Callable[..., Any]) -> None:
    """Have Dynamo leave the frames of these functions alone, which may run while it looks at every frame; what they
    call is its business as before.
    """
    from torch._dynamo.eval_frame import skip_code

    for function in functions:
        skip_code(getattr(function, "__func__", function).__code__)


def call_of(module: torch.nn.Module) -> Callable[..., Any]:
    """What to compile for a module: its ``_call_impl``, in a frame of its own where its ``forward`` is torch's code.

    Dynamo skips such a ``forward``, as nn.Sequential's, and would begin anew in each module that it calls.
    torch.compile puts the same frame around such a module.
    """
    from torch._dynamo.external_utils import wrap_inline

    call = module._call_impl
    code = getattr(type(module).forward, "__code__", None)
    own = code is None or code.co_filename.startswith(torch_folder())
    wrapped: Callable[..., Any] = wrap_inline(call) if own else call
    return wrapped


def _compile(original: Any) -> Any:
    """torch.compile, whose functions are seen when they are called; modules are seen in any case."""

    @wraps(original)
    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if model is None:  # @torch.compile(...)
            return lambda function: compile(function, *args, **kwargs)
        compiled = original(model, *args, **kwargs)
        if isinstance(model, torch.nn.Module) or not callable(compiled) or _of_a_module(model):
            return compiled

        @wraps(compiled)
        def seen(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not _watchers or _watchers[-1].idle:
                return compiled(*args, **kwargs)
            return _watchers[-1].called(Call(compiled, compiled, args, kwargs))

        return seen

    return compile


def _of_a_module(function: Any) -> bool:
    """Whether this is a module's own method, as ``nn.Module.compile()`` hands it over."""
    return isinstance(getattr(function, "__self__", None), torch.nn.Module)


class ModulePaths:
    """The path of each module below the outermost one that was called ("h.0.attn"; "" for that one itself)."""

    def __init__(self) -> None:
        self._paths: dict[int, dict[int, str]] = {}
        self._held: list[torch.nn.Module] = []  # so that no other module gets its id

    def path(self, module: torch.nn.Module, root: torch.nn.Module) -> str:
        known = self._paths.get(id(root))
        if known is None or id(module) not in known:  # new, or a module that was added since
            known = {}
            for name, child in root.named_modules():
                # What torch.compile puts around a model is no part of its names.
                parts = [part for part in name.split(".") if part != "_orig_mod"]
                known.setdefault(id(child), ".".join(parts))
            known.setdefault(id(module), type(module).__name__)  # called, though it is no child
            self._paths[id(root)] = known
            self._held += [root, module]
        return known[id(module)]


class ModuleRanges:
    """A watcher that puts a range around every call of a module: its path below the outermost one that is running on
    the thread, and its class.
    """

    def __init__(self) -> None:
        self.idle = False
        self._paths = ModulePaths()
        self._running = threading.local()
        unseen_by_dynamo(self.called, profiler_range, module_name, ModulePaths.path)

    def called(self, call: Call) -> Any:
        if not isinstance(call.subject, torch.nn.Module):
            return call()
        stack: list[torch.nn.Module] = self._running.__dict__.setdefault("modules", [])
        stack.append(call.subject)
        try:
            path = self._paths.path(call.subject, stack[0])
            with profiler_range(module_name(path, type(call.subject).__name__)):
                return call()
        finally:
            stack.pop()


def torch_folder() -> str:
    return str(sys.modules["torch"].__file__).removesuffix("__init__.py")
