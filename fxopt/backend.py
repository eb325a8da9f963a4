"""`torch.compile(model, backend="profile_guided")`: the backend, and what happens when something goes wrong in it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxopt.call_stack import with_room
from fxopt.options import Mode, OptionError, split_options
from fxopt.overlap import OverlapWatch
from fxopt.report.model import GraphReport, remember
from fxopt.stage import stage_of
from fxopt.torch_api import dynamo, graph_effects, inductor
from fxopt.tuner import FxoptWarning, Tuner, graph_device, warn

__all__ = ["Backend", "FxoptWarning", "profile_guided"]


class Backend:
    """A torch.compile backend with its options. Callable as Dynamo calls one: `backend(gm, example_inputs)`.

    on_report, if given, receives each graph's GraphReport.
    """

    def __init__(
        self,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        session: bool = False,
        on_report: Callable[[GraphReport], None] | None = None,
        check_weights: bool = True,
    ) -> None:
        self.options, self.mode, self.patches = split_options(
            mode, options, inductor.config_keys(), inductor.list_modes(), session=session
        )
        inductor.check_values(self.patches)
        self.session = session and self.options.freeze
        self.on_report = on_report
        self.check_weights = check_weights
        self.calls = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return with_room(self._compile, gm, example_inputs)

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.calls += 1
        report = GraphReport()
        watch: OverlapWatch | None = None
        failed = ""
        if self.patches.get("freezing", inductor.config_value("freezing")):
            report.messages.append(_freezing(dynamo.static_inputs(gm, example_inputs)))
        try:
            watch = OverlapWatch.of(gm, example_inputs)
            if watch is not None and watch.overlap(example_inputs):
                report.source = "skipped"
                report.messages.append(
                    "the graph writes to an input that overlaps with another one in memory, which torch compiles "
                    "wrongly: it runs as it was captured, uncompiled"
                )
                fn: Callable[..., Any] = watch.captured
            else:
                # Inductor takes its graph apart: the original is kept whole for the fallback.
                fn = self._run(gm, example_inputs, report)
        except dynamo.CONTROL_FLOW:
            raise
        except Exception as error:
            if self.options.on_error == "raise":
                raise
            failed = f"{_where(error)} failed, so the model runs on plain Inductor: {type(error).__name__}: {error}"
        if failed:
            # Outside of the handler, which holds all that was measured, memory of the device included.
            if theirs := _fails_by_itself(gm, example_inputs):
                failed = (
                    f"the model's own call fails, with fxopt and without ({theirs}): nothing was measured, and it runs "
                    "on plain Inductor"
                )
            warn(failed)
            report.source, report.decision, report.frozen = "fallback", "baseline", False
            report.messages.append(failed)
            gc.collect()  # compiled code is full of cycles
            fn = inductor.compile_plain(gm, example_inputs, self.patches)
        if watch is not None and fn is not watch.captured:
            fn = watch.wrap(fn)
        remember(report)
        if self.options.report is not None:
            _write_report(self.options.report, report)
        if self.on_report is not None:
            self.on_report(report)
        return fn

    def _run(self, gm: fx.GraphModule, inputs: Sequence[Any], report: GraphReport) -> Callable[..., Any]:
        return Tuner(
            dynamo.copy_graph(gm),
            inputs,
            self.options,
            self.patches,
            session=self.session,
            may_measure=self.mode is Mode.TUNE,
            check_weights=self.check_weights,
            report=report,
        ).run()


def _freezing(static: Collection[int]) -> str:
    """What came of Inductor's own option, by whether parameters are still among the graph's inputs."""
    if static:
        return (
            "Inductor's option freezing is not in effect: torch.compile hands a backend the parameters as inputs, of "
            f"which {len(static)} are left; fxopt.optimize(model, inputs) holds weights constant"
        )
    return (
        "torch._inductor.config.freezing is on: if the graph has weights, torch holds them constant, and a change of "
        "them is not seen"
    )


def _where(error: Exception) -> str:
    """The stage in which an error arose."""
    name = stage_of(error)
    return f"the stage {name!r}" if name else "deciding what to do"


def _fails_by_itself(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """The error of the graph as Dynamo captured it, run once more on copies of its inputs and of its own
    tensors; "" where it runs.

    What is wrong with the caller's own call (an index out of range, types that do not fit) is no failure of fxopt's.
    """
    # Other ranks would not take part, and effects would come once too often.
    if graph_effects.collectives(gm) or graph_effects.effectful(gm):
        return ""
    from fxopt.reference import clone_inputs

    own = dynamo.attributes(gm)
    try:
        real, device = dynamo.concrete(inputs), graph_device(inputs)
        devices = [device] if device.type == "cuda" else []
        quiet = contextlib.redirect_stderr(io.StringIO())  # FX prints where in its code an error arose
        with quiet, dynamo.outside_tracing(), torch.no_grad(), torch.random.fork_rng(devices=devices):
            copies = clone_inputs([*real, *own.values()], frozenset())
            given, held = copies[: len(real)], dict(zip(own, copies[len(real) :], strict=True))
            torch.func.functional_call(dynamo.copy_graph(gm), held, tuple(given))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # Perhaps the copies were too much; and once a kernel has gone astray, everything on that device fails.
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


#: what was written to each file of the option `report`: one report over all graphs of the process that name it
_in_files: dict[Any, deque[GraphReport]] = {}


def _write_report(path: Any, report: GraphReport) -> None:
    import json

    from fxopt.report.model import MOST_REMEMBERED, Report
    from profiler_core.files import write_atomically

    graphs = _in_files.setdefault(path.absolute(), deque(maxlen=MOST_REMEMBERED))
    graphs.append(report)
    try:
        write_atomically(path, json.dumps(Report(graphs=list(graphs)).to_json(), indent=1))
    except OSError as error:
        warn(f"the report was not written to {path}: {error}; give another path with the option 'report'")


_graphs_seen = 0


def profile_guided(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that torch.compile finds by name.

    mode: "tune" (default), "apply" (use plans, never measure), or one of Inductor's modes.
    options: fxopt's options (see `fxopt options`) and Inductor's, which go to baseline and candidates alike.
    A bad option is refused with the list of known ones, and the model runs on plain Inductor.
    """
    global _graphs_seen
    _graphs_seen += 1
    try:
        backend = Backend(mode, options)
    except OptionError as error:
        if (options or {}).get("on_error") == "raise":
            raise
        warn(f"{error}. The model runs on plain Inductor.")
        remember(GraphReport(messages=[str(error)]))
        return inductor.compile_plain(gm, example_inputs, {})
    return backend(gm, example_inputs)


def no_graph_reached() -> None:
    """What a process hears at its end that asked for the backend and never reached it."""
    if _graphs_seen == 0 and _asked_for_by_name():
        import sys

        print(
            "fxopt: backend='profile_guided' was asked for, but no graph reached it: the model was never called, or "
            "Dynamo left it to eager (an nn.LSTM does that). TORCH_LOGS=graph_breaks says where.",
            file=sys.stderr,
        )


def _asked_for_by_name() -> bool:
    return dynamo.backend_loaded("profile_guided")


# Only torch.compile loads this module by name, and only a process that did so hears about it at its end.
atexit.register(no_graph_reached)
