"""Where operators outside of compiled graphs are called from, while a function is profiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from profiler_core.collect.module_calls import ModuleRanges
from profiler_core.collect.source_lines import LineRanges


class CallPlaces:
    """Puts ranges around modules and source lines while torch's profiler is on, and next to nothing otherwise.

    ``modules`` is to be watching (:func:`profiler_core.collect.module_calls.watching`) wherever :meth:`call` is used.
    """

    def __init__(self, *, lines: bool, own: Sequence[str]) -> None:
        """``own``: folders whose code is not the user's."""
        self.modules = ModuleRanges()
        self.modules.idle = True
        self.refused = False  # whether lines were asked for and could not be traced
        self._lines = LineRanges(own) if lines else None

    def call(self, fn: Callable[[], Any]) -> Any:
        """``fn()``, of whose calls the places are told."""
        if not torch.autograd.profiler._is_profiler_enabled:
            return fn()
        lines = self._lines if self._lines is not None and self._lines.start() else None
        self.refused = lines is not self._lines
        self.modules.idle = False
        try:
            return fn()
        finally:
            self.modules.idle = True
            if lines is not None:
                lines.stop()
