"""Puts a profiler range around every source line of the user's that runs, by Python's own trace function.

A line's range holds the operators that it calls, directly or through torch's own Python code. Nothing of torch is
replaced for it, so the program runs as it does without.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from profiler_core.collect.inductor import in_wrapper_module
from profiler_core.collect.kineto import profiler_range
from profiler_core.collect.module_calls import torch_folder, unseen_by_dynamo
from profiler_core.range_names import line_name

_OWN = str(Path(__file__).resolve().parents[1])


class _Frame:
    """What is open for one running function: the range of its current line."""

    def __init__(self, owner: LineRanges, file: str) -> None:
        self.owner, self.file = owner, file
        self.range: Any = None

    def open(self, line: int) -> None:
        self.range = profiler_range(line_name(self.file, line))
        self.range.__enter__()
        self.owner.active.append(self)

    def close(self) -> None:
        if self.range is not None:
            self.owner.active.remove(self)
            self.range.__exit__(None, None, None)
            self.range = None

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.close()
            if self.owner.on:
                self.open(frame.f_lineno)
        elif event == "return":
            self.close()
        return self.trace


class LineRanges:
    """Ranges around the lines of the calling thread, from :meth:`start` to :meth:`stop`."""

    def __init__(self, skip: Sequence[str] = ()) -> None:
        """``skip``: folders whose code is not the user's either."""
        self.on = False
        self.active: list[_Frame] = []
        self._traced: list[FrameType] = []
        self._followed: dict[CodeType, str] = {}
        unseen_by_dynamo(self._trace, self._file, _Frame.__init__, _Frame.trace, _Frame.open, _Frame.close)
        unseen_by_dynamo(line_name, profiler_range)
        paths = sysconfig.get_paths()
        self._tools = tuple(skip)
        self._skipped = (torch_folder(), _OWN, *skip)
        self._libraries = (paths["purelib"], paths["platlib"])
        self._python = (paths["stdlib"], paths["platstdlib"])

    def start(self) -> bool:
        """False, and nothing is traced, where a debugger or another tool traces already."""
        if sys.gettrace() is not None:
            return False
        self.on = True
        frames: list[FrameType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            own = frame.f_code.co_filename.startswith(_OWN)
            if frame.f_code.co_filename.startswith(self._tools) or (own and frames):  # what runs the program
                break
            frames += [] if own else [frame]
            frame = frame.f_back
        sys.settrace(self._trace)
        # Functions that are running already are not asked by Python: theirs are set, the outermost first, so that the
        # ranges of their current lines lie inside one another.
        for frame in reversed(frames):
            if self._file(frame) and frame.f_trace is None:
                found = _Frame(self, self._file(frame))
                found.open(frame.f_lineno)
                frame.f_trace = found.trace
                self._traced.append(frame)
        return True

    def stop(self) -> None:
        if not self.on:
            return
        self.on = False
        sys.settrace(None)
        for found in reversed(list(self.active)):
            found.close()
        for frame in self._traced:
            frame.f_trace = None
        self._traced.clear()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = self._file(frame)
        return _Frame(self, file).trace if file else None

    def _file(self, frame: FrameType) -> str:
        """The file of code that is the user's or a library's, "" for torch's, Python's and this project's own, and for
        what Inductor wrote, whose launches are kernels: a line's range in one would be counted as its time.
        """
        code = frame.f_code
        if code not in self._followed:
            file = code.co_filename
            python = file.startswith(self._python) and not file.startswith(self._libraries)
            other = python or file.startswith(("<", *self._skipped)) or in_wrapper_module(frame.f_globals)
            self._followed[code] = "" if other else file
        return self._followed[code]
