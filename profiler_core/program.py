"""Profiles a program while it runs: some calls of its model, or all of it, whatever else it does."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_core.live import NO_LINES, default_store
from profiler_core.profiles import Profile

if TYPE_CHECKING:
    from profiler_core.collect.compile_capture import Captured
    from profiler_core.collect.kineto_window import Window
    from profiler_core.collect.module_calls import Call

_FIRST_CALLS = 2  # recorded one by one, for programs that make no more calls than are skipped
_WALL_CALLS = 50  # timed without the profiler


class NothingRecorded(RuntimeError):
    """A program gave nothing to profile; the message says why and what to do."""


class ProgramRecorder:
    """Follows a program's calls, and has the profiler on during some of them. Made by :func:`recording`.

    A *call* begins when the program calls its model: an ``nn.Module``, or a function that torch.compile returned, that
    is not called by another one; of several, the one called most often. It lasts until the next begins, so that what is
    done with the result is a part of it. In a program that steps an optimiser, a call is a step: it begins with the
    first call of a module after the step before.
    """

    def __init__(self, skip: int, calls: int, whole: bool, lines: bool, captured: Captured, own: Sequence[str]) -> None:
        from profiler_core.collect.module_calls import ModuleRanges
        from profiler_core.collect.source_lines import LineRanges

        self.skip, self.calls, self.whole = skip, calls, whole
        self.seen = 0  # calls that have begun, until the profiler is done
        self.made = 0  # steps of an optimiser
        self.steps = False  # whether a call is a step of an optimiser
        self._captured = captured
        self._lines = LineRanges(own) if lines else None
        self._marks = ModuleRanges()
        self._thread: int | None = threading.get_ident() if whole else None
        self._depth = 0
        self.idle = False
        self._times: Counter[int] = Counter()
        self._model: Any = None
        self._held: list[Any] = []
        self._stepped = False
        self._window: Window | None = None
        self._of_first_calls = False
        self._kept: Window | None = None
        self._warm = False  # whether what is kept is what was asked for, and not one of the first calls
        self._ranges = ExitStack()
        self._done = False
        self._began_ns: int | None = None
        self._wall: list[int] = []
        self.notes: list[str] = []
        self._compiled = 0

    # ---- what the program does

    def called(self, call: Call) -> Any:
        """Makes a call of a module or of a compiled function, inside a range that names it."""
        if self._thread is None:
            self._thread = threading.get_ident()
        if threading.get_ident() != self._thread:
            return call()
        outermost = self._depth == 0
        if outermost:
            self._outermost(call.subject)
        self._depth += 1
        self.idle = self._window is None  # no call inside of this one is of interest
        try:
            return call() if self.idle else self._marks.called(call)
        finally:
            self.idle = False
            self._depth -= 1
            if outermost and self._window is not None and not self.steps:
                self._window.returned()

    def stepped(self, *_: Any) -> None:
        """An optimiser has made a step."""
        if threading.get_ident() != self._thread or self.whole:
            return
        if not self.steps:  # calls were counted otherwise until now
            self.steps = True
            self._anew()
        self.made += 1
        self._stepped = True
        if self._window is not None:
            self._window.returned()

    def _outermost(self, subject: Any) -> None:
        self._times[id(subject)] += 1
        if self._times[id(subject)] == 1:
            self._held.append(subject)  # so that no other object gets its id
        if self.whole or (self._done and len(self._wall) >= _WALL_CALLS):
            return
        if self.steps:
            begins = self._stepped
        else:
            if self._model is None:
                self._model = subject
            elif self._times[id(subject)] > self._times[id(self._model)]:
                self._model = subject
                self._anew()
            begins = subject is self._model
        self._stepped = False
        if begins:
            self._begins()

    def _anew(self) -> None:
        """Another thing counts as a call from here on, and one of them has been."""
        if not self._done:
            self.seen = 1
            if self._window is not None:
                self._stop(complete=True, keep=self._of_first_calls)
        self._wall.clear()
        self._began_ns = None

    def _begins(self) -> None:
        """A call begins here."""
        window, number = self._window, self.seen
        now = time.perf_counter_ns()
        if window is None and self._began_ns is not None and number > min(self.skip, _FIRST_CALLS):
            self._wall.append(now - self._began_ns)
        self.seen += 1
        if window is not None and window.calls >= (1 if self._of_first_calls else self.calls):
            self._stop(complete=True)
            window = None
        if window is None and not self._done and (number >= self.skip or number < _FIRST_CALLS):
            window = self._start(first=number < self.skip)
        if window is not None:
            window.begin()
        self._began_ns = time.perf_counter_ns() if window is None else None

    # ---- the profiler

    def _start(self, first: bool) -> Window | None:
        from profiler_core.collect import inductor
        from profiler_core.collect.conflicts import ProfilerError
        from profiler_core.collect.kineto_window import Window

        for graph, provenance in self._captured.graphs:
            self._ranges.enter_context(inductor.instrumented(graph, provenance, tag=provenance.graph))
        try:
            self._window = Window(early=self.whole)
        except ProfilerError as error:
            self._ranges.close()
            self._done = True
            self.notes.append(f"not profiled: {error}")
            return None
        self._of_first_calls = first
        self._compiled = len(self._captured.graphs) + len(self._captured.missing)
        if self._lines is not None and not self._lines.start():
            self._say(NO_LINES)
        return self._window

    def _stop(self, *, complete: bool, keep: bool = True) -> None:
        if self._lines is not None:
            self._lines.stop()
        window, self._window = self._window, None
        if window is not None:
            window.stop(complete=complete)
            if keep and (window.usable or self._kept is None):
                self._kept, self._warm = window, not self._of_first_calls
            self._done = keep and not self._of_first_calls
        self._ranges.close()

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def begin_whole(self) -> None:
        window = self._start(first=False)
        if window is not None:
            window.begin()

    def end(self) -> None:
        """The program has ended."""
        if self._window is None:
            return
        # What was recorded of the first calls stays where this one has not been completed.
        self._stop(complete=self.whole, keep=self.whole or self._window.completed > 0)

    # ---- the result

    def profile(self) -> Profile:
        """The profile of the calls that were recorded. Raises :class:`NothingRecorded`."""
        from profiler_core.attribute.engine import attribute
        from profiler_core.collect.conflicts import ProfilerError
        from profiler_core.environment import environment
        from profiler_core.layer_classes import with_layer_classes
        from profiler_core.live import _called

        if self._kept is None:
            raise NothingRecorded(self._why_nothing())
        try:
            trace = self._kept.trace()
        except ProfilerError as error:
            raise NothingRecorded(f"nothing could be read of what was recorded: {error}") from error
        wall = () if self.whole else tuple(float(ns) for ns in self._wall[-_WALL_CALLS:])
        trace = replace(trace, wall_ns=wall)
        provenances = self._captured.called(*_called(trace))
        found = environment(trace.device_type)
        result = attribute(trace, provenances, found, eager_nodes=True)
        return replace(
            with_layer_classes(result, provenances), notes=(*result.notes, *self._notes(result, trace.iterations))
        )

    def _notes(self, result: Profile, iterations: int) -> Iterator[str]:
        yield from self.notes
        unit = "step of its optimiser" if self.steps else "call of its model"
        made = self.made if self.steps else self._times[id(self._model)]
        if self.whole:
            yield "the whole program was profiled, from its first line to its last, as one call"
        elif not self._warm:
            yield (
                f"the program made {_counted(made, unit)}; where there are more, {self.skip} are left out as warm-up: "
                f"the {'first' if made == 1 else 'second'} was profiled, with what happens only once in it"
            )
        else:
            yield f"profiled: {_counted(iterations, unit)}, after {self.skip} of warm-up, of {made}"
        if self._warm and not self._wall and not self.whole:
            yield "wall time is not known: no call of the program ran without the profiler, after the first ones"
        compiled = len(self._captured.graphs) + len(self._captured.missing) - self._compiled
        if compiled > 0 and not self._warm:
            yield "graphs were compiled while the profiler was on; their compilation counts as work"
        yield from (f"no provenance for a compiled graph: {why}" for why in self._captured.missing)
        if result.window.empty:
            yield "no kernels: no operator ran in what was profiled"

    def _why_nothing(self) -> str:
        if self.notes:
            return "; ".join(self.notes)
        if not self.seen:
            return (
                "nothing was recorded: the program called no nn.Module and no compiled function in this process "
                "(processes that it starts are not seen). Profile all of it (--whole), or one function of it "
                "(package.module:function)"
            )
        return "nothing was recorded: the program's model was called, and no call of it was completed"


@contextmanager
def recording(
    *,
    skip: int = 3,
    calls: int = 5,
    whole: bool = False,
    lines: bool = True,
    store: Path | None = None,
    own: Sequence[str] = (),
) -> Iterator[ProgramRecorder]:
    """Follow what runs inside the block, which may be any program that uses torch.

    Args:
        skip: calls of the program's model (see :class:`ProgramRecorder`) that are left out as warm-up. The first two of
            them are recorded as well, and stand in where the program makes no more.
        calls: calls that are profiled after them. The profiler is off for the rest of the program.
        whole: profile everything, as one call; meant for short programs, for the trace is kept in memory.
        lines: find the source line of operators outside of compiled graphs. Costs a few microseconds a line while the
            profiler is on, which is no part of a kernel's time.
        store: as for :func:`profiler_core.profile`.
        own: folders whose code is not the program's, such as those of a tool that runs it.

    What Inductor compiles is compiled with provenance, so that its kernels are attributed to FX nodes; everything else
    to operators, modules and source lines. Hardware counters are not read: that takes calls that can be repeated.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from profiler_core.collect import compile_capture
    from profiler_core.collect.module_calls import watching

    if skip < 0 or calls < 1:
        raise ValueError(f"skip={skip}, calls={calls}: expected at least 0 and 1")
    with compile_capture.capturing(store or default_store()) as captured:
        recorder = ProgramRecorder(skip, calls, whole, lines, captured, own)
        hook = register_optimizer_step_post_hook(recorder.stepped)
        try:
            with watching(recorder):
                if whole:
                    recorder.begin_whole()
                yield recorder
        finally:
            hook.remove()
            recorder.end()


def _counted(number: int, unit: str) -> str:
    noun, _, rest = unit.partition(" ")
    return f"{number} {noun}{'' if number == 1 else 's'} {rest}"
