"""Which modules Dynamo leaves to eager, and what time they take: seen from outside, without a hook.

A hook on a module is something that Dynamo guards on, so that installing one would compile the model anew. Instead the
interpreter says which functions run (`sys.setprofile`): where Dynamo compiled a module's `forward`, the function that
runs has code of Dynamo's own, and where it left it to eager, the class's.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxopt.report.model import EagerModule


class _Watch:
    """A profile function that times the outermost eager modules of `model`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._names = {id(module): name for name, module in model.named_modules() if name}
        self._device = device
        self._inside: FrameType | None = None
        self._started, self._name = 0.0, ""
        self.seconds: dict[str, float] = {}

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and frame is self._inside:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + self.now() - self._started
            self._inside = None
        elif event == "call" and self._inside is None and frame.f_code.co_name == "forward":
            module = frame.f_locals.get("self")
            if id(module) in self._names and frame.f_code is _code(module):
                # Kept now: the frame's `self` may be another by the time that it returns.
                self._inside, self._name, self._started = frame, self._names[id(module)], self.now()


def _code(module: Any) -> Any:
    """The code of the module's own `forward`, without what decorators put around it."""
    return getattr(inspect.unwrap(getattr(module, "forward", None)), "__code__", None)  # type: ignore[arg-type]


def timed(model: nn.Module, call: Callable[[], Any], inputs: Any) -> tuple[Any, list[EagerModule]]:
    """What `call` gives, which calls the compiled `model` on `inputs`; and the outermost modules of the model that ran
    in eager, the slowest first.

    The model itself, where all of it is left to eager, is not listed: its parts are. Nobody else's profile function is
    in place (`sys.getprofile`).
    """
    tensors = [*model.parameters(), *model.buffers(), *(a for a in tree_leaves(inputs) if isinstance(a, torch.Tensor))]
    device = next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))
    watch = _Watch(model, device)
    started = watch.now()
    sys.setprofile(watch)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    total = watch.now() - started
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    slowest = sorted(watch.seconds.items(), key=lambda item: -item[1])
    return result, [EagerModule(name, types[name], seconds * 1e9, seconds / total) for name, seconds in slowest]
