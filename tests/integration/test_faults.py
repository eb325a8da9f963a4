"""A fault at any stage of tuning: what the user sees of it, and that nothing is left of it.

Whatever fails, the output is right, one warning names the stage and the cause, and the model, the process's flags and
random state, the plan directory and memory are as they would be without fxopt. Ctrl-C ends the call as it ends any
other, and leaves as little.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from forced_passes import TORCHS_KERNELS, given_ceilings, last, warned
from torch import nn

import fxopt
from fxopt import measure, profiling, registry, rules, verify
from fxopt.build import Build, Builder
from fxopt.measure import PairedResult
from fxopt.options import Options
from fxopt.plan import PlanStore
from fxopt.testing.stand_ins import TWICE_AS_FAST, DoubledNegation
from fxopt.torch_api import inductor
from fxopt.tuner import FxoptWarning, Tuner
from profiler_core import roofline
from profiler_core.attribute import engine
from profiler_core.collect import kineto
from profiler_core.collect.conflicts import ProfilerError

aten = torch.ops.aten
PASS = DoubledNegation.name
QUICK = {"pairs": 6, "iterations": 1, "warmup": 1, "verify_inputs": 1, "passes": [PASS], **TORCHS_KERNELS}


class Counting(nn.Module):
    """Writes to a buffer and to its argument, so that every call too many shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("count", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        x.mul_(2)
        return self.down(nn.functional.gelu(self.up(x))) + self.count


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    """What is there by now is not looked at each time that garbage is collected, which makes half of these tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _tuning(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every label is drawn, and every candidate that is right is faster."""
    given_ceilings(monkeypatch)
    monkeypatch.setattr(measure, "noise_floor", lambda *a, **k: 0.01)

    def compare(first: Any, second: Any, sets: Any, **options: Any) -> PairedResult:
        for inputs in sets:
            first(*inputs), second(*inputs)
        return TWICE_AS_FAST

    monkeypatch.setattr(measure, "compare", compare)
    torch.manual_seed(0)
    registry.register(DoubledNegation)
    yield
    registry.unregister(PASS)


# -- what must be as before -------------------------------------------------------------------------------------------


def flags() -> dict[str, Any]:
    """What a program may set in torch and in Python, as it is now."""
    return {
        "inductor": torch._inductor.config.get_config_copy(),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "functorch": torch._functorch.config.get_config_copy(),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "default": torch.get_default_dtype(),
        "random": torch.get_rng_state().tolist(),
        "profiler": torch.autograd.profiler._is_profiler_enabled,
        "tracing": torch._guards.TracingContext.try_get(),
        "fake": torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE),
        "collecting": gc.isenabled(),
        "interrupt": signal.getsignal(signal.SIGINT),
        "environment": dict(os.environ),
        "filters": list(warnings.filters),
    }


@contextlib.contextmanager
def nothing_left(plan_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flags and random state are as before; no copy of the inputs, and no candidate, outlives the call; every file in
    the plan directory is whole.
    """
    made: list[weakref.ref[Any]] = []

    def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if isinstance(result, Build):
                made.append(weakref.ref(result))
            else:
                given = {id(value) for value in args[0]}
                made.extend(weakref.ref(v) for v in result if isinstance(v, torch.Tensor) and id(v) not in given)
            return result

        return wrapped

    before = flags()
    with monkeypatch.context() as patch:
        patch.setattr(verify, "clone_inputs", remembered(verify.clone_inputs))
        patch.setattr(Builder, "build", remembered(Builder.build))
        yield
    after = flags()
    assert {name: value for name, value in after.items() if value != before[name]} == {}
    gc.collect()
    assert [ref() for ref in made if ref() is not None] == []
    for path in filter(Path.is_file, plan_dir.rglob("*")):
        assert path.suffix in (".json", ".lock") or path.name == ".lock" or ".corrupt." in path.name, path
        if path.suffix == ".json":
            json.loads(path.read_text())


def call(model: Counting, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, list[str]]:
    """The output of one compiled call, and fxopt's warnings."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        result = torch.compile(model, backend="profile_guided", options={**QUICK, **options})(x)
    return result, warned(caught)


def expected(model: Counting, x: torch.Tensor, calls: int) -> torch.Tensor:
    """What call number `calls` gives of an `x` that nothing has been written to yet."""
    return (model.down(nn.functional.gelu(model.up(x * 2))) + calls).detach()


def works(model: Counting, calls: int, tuning: bool = True) -> None:
    """A later call, compiled anew, is right, and tunes if it may."""
    torch._dynamo.reset()
    x = torch.randn(8, 32)
    given = x.clone()
    result, said = call(model, given, mode="tune" if tuning else "apply")
    torch.testing.assert_close(result, expected(model, x, calls + 1))
    assert torch.equal(given, x * 2) and torch.equal(model.count, torch.full((32,), float(calls + 1)))
    if last().source == "apply":  # a fault that ended the tuning left no plan
        assert len(said) == 1 and "no plan for this graph" in said[0]
    else:
        assert said == []
    if tuning:
        assert (last().source, last().decision) == ("tuned", "candidate"), last().messages
        assert PlanStore(Path(last().plan_path).parents[1]).load(last().key).decision == "candidate"


# -- faults -----------------------------------------------------------------------------------------------------------


def raising(error: Callable[[], BaseException]) -> Callable[..., Any]:
    def fault(*args: Any, **kwargs: Any) -> Any:
        raise error()

    return fault


def interrupted(*args: Any, **kwargs: Any) -> Any:
    """Ctrl-C, as a terminal sends it."""
    signal.raise_signal(signal.SIGINT)
    pytest.fail("the signal did not arrive")


def plain_error() -> BaseException:
    return RuntimeError("injected")


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def disk_full() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def in_compile(fault: Callable[..., Any], candidate: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """The fault inside Inductor, once it has begun: in a candidate's compilation, or in the baseline's."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        from torch._inductor.graph import GraphLowering

        compile_graph, lower = inductor.compile_graph, GraphLowering.run
        depth: list[int] = []

        def compiling(*args: Any, **kwargs: Any) -> Any:
            if bool(kwargs.get("slots")) is not candidate:
                return compile_graph(*args, **kwargs)
            depth.append(1)
            try:
                return compile_graph(*args, **{**kwargs, "caches": False})
            finally:
                depth.pop()

        patch.setattr(inductor, "compile_graph", compiling)
        patch.setattr(GraphLowering, "run", lambda *a, **k: fault() if depth else lower(*a, **k))

    return inject


def in_call(fault: Callable[..., Any], candidate: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """The fault in the middle of a call of compiled code, of the candidate or of the baseline."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        name = "build" if candidate else "baseline"
        original = getattr(Builder, name)

        def made(*args: Any, **kwargs: Any) -> Build:
            build: Build = original(*args, **kwargs)
            fn = build.fn

            def failing(*inputs: Any) -> Any:
                fn(*inputs)  # everything is written that is going to be
                return fault()

            return replace(build, fn=failing)

        patch.setattr(Builder, name, made)

    return inject


def at(owner: Any, name: str, fault: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, fault)


def in_pass(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return at(DoubledNegation, name, raising(lambda: ZeroDivisionError("injected")))


def writing(name: str, fault: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """The fault in the last step of every write into the plan directory, when the temporary file is there."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        original = getattr(os, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            whole = isinstance(args[0], int) or "fxopt-plans" in str(args[-1])
            return fault() if whole else original(*args, **kwargs)

        patch.setattr(os, name, failing)

    return inject


FALLBACKS = {
    "profile": (at(kineto, "measure", raising(lambda: ProfilerError("injected"))), "the stage 'profile' failed"),
    "profiled call": (in_call(raising(plain_error), candidate=False), "the stage 'profile' failed"),
    "profile, out of memory": (in_call(raising(out_of_memory), candidate=False), "the stage 'profile' failed"),
    "attribute": (at(engine, "attribute", raising(plain_error)), "the stage 'attribute' failed"),
    "a rule": (at(rules, "_apply", raising(plain_error)), "the stage 'label' failed"),
    "ceilings": (at(roofline, "ceilings", raising(plain_error)), "the stage 'label' failed"),
    "noise floor": (at(measure, "noise_floor", raising(plain_error)), "the stage 'noise floor' failed"),
    "copies, out of memory": (at(verify, "fresh_inputs", raising(out_of_memory)), "failed"),
}
DROPPED = {
    "candidates": (in_pass("candidates"), f"a candidate was dropped: {PASS}: ZeroDivisionError: injected"),
    "rewrite": (in_pass("rewrite"), f"a candidate was dropped: {PASS}: ZeroDivisionError: injected"),
    "compile": (in_compile(raising(plain_error), candidate=True), f"the candidate {PASS} failed and was dropped"),
    "compile, out of memory": (in_compile(raising(out_of_memory), candidate=True), f"the candidate {PASS} failed"),
    "verify": (at(verify, "verify", raising(plain_error)), f"the candidate {PASS} failed and was dropped"),
    "compare": (at(measure, "compare", raising(plain_error)), f"the candidate {PASS} failed and was dropped"),
    "compare, out of memory": (at(measure, "compare", raising(out_of_memory)), f"the candidate {PASS} failed"),
}
INTERRUPTS = {
    "baseline's compilation": in_compile(interrupted, candidate=False),
    "profiled call": in_call(interrupted, candidate=False),
    "attribution": at(engine, "attribute", interrupted),
    "pass": at(DoubledNegation, "rewrite", interrupted),
    "candidate's compilation": in_compile(interrupted, candidate=True),
    "candidate's call": in_call(interrupted, candidate=True),
    "noise floor": at(measure, "noise_floor", interrupted),
    "comparison": at(measure, "compare", interrupted),
    "writing": writing("replace", interrupted),
    "flushing": writing("fsync", interrupted),
}


def parametrised(table: dict[str, Any], *names: str, slow: Sequence[str]) -> Any:
    """`slow`: the cases that take the same way as another one."""
    cases = []
    for name, case in table.items():
        values = case if isinstance(case, tuple) else (case,)
        cases.append(pytest.param(*values, id=name, marks=[pytest.mark.slow] if name in slow else []))
    return pytest.mark.parametrize(names, cases)


@pytest.fixture
def model() -> Counting:
    return Counting().eval()


@parametrised(FALLBACKS, "inject", "words", slow=["profile", "ceilings", "copies, out of memory"])
def test_a_fault_that_ends_the_tuning_leaves_plain_inductor(model, plan_dir, monkeypatch, inject, words):
    x = torch.randn(8, 32)
    given = x.clone()
    with nothing_left(plan_dir, monkeypatch), monkeypatch.context() as patch:
        inject(patch)
        result, said = call(model, given)
    torch.testing.assert_close(result, expected(model, x, 1))
    assert torch.equal(given, x * 2) and torch.equal(model.count, torch.ones(32))
    (warning,) = said
    assert words in warning and "plain Inductor" in warning and "injected" in warning
    assert last().source == "fallback" and last().messages == [warning.removeprefix("fxopt: ")]
    works(model, 1, tuning="out of memory" in warning)


@parametrised(DROPPED, "inject", "words", slow=["candidates", "compile, out of memory", "compare"])
def test_a_fault_of_a_candidate_drops_it(model, plan_dir, monkeypatch, inject, words):
    x = torch.randn(8, 32)
    with nothing_left(plan_dir, monkeypatch), monkeypatch.context() as patch:
        inject(patch)
        result, said = call(model, x.clone())
    torch.testing.assert_close(result, expected(model, x, 1))
    assert torch.equal(model.count, torch.ones(32))
    (warning,) = said
    assert words in warning and "injected" in warning
    assert last().source == "tuned" and [c.outcome for c in last().candidates] == ["failed"]
    works(model, 1, tuning=False)


def test_a_candidate_that_raises_is_wrong(model, plan_dir, monkeypatch):
    x = torch.randn(8, 32)
    with nothing_left(plan_dir, monkeypatch), monkeypatch.context() as patch:
        in_call(raising(out_of_memory), candidate=True)(patch)
        result, _ = call(model, x.clone())
    torch.testing.assert_close(result, expected(model, x, 1))
    (candidate,) = last().candidates
    assert candidate.outcome == "rejected" and "the candidate raised OutOfMemoryError" in candidate.reason


@parametrised(INTERRUPTS, "inject", slow=["attribution", "noise floor", "flushing"])
def test_ctrl_c_ends_the_call_and_leaves_nothing(model, plan_dir, monkeypatch, inject):
    x = torch.randn(8, 32)
    given = x.clone()
    with nothing_left(plan_dir, monkeypatch):
        ended = False
        with monkeypatch.context() as patch:
            inject(patch)
            try:
                call(model, given)
            except KeyboardInterrupt:
                ended = True  # without its traceback, which holds every frame
        assert ended, "the program must end as it always does"
    assert torch.equal(given, x) and torch.equal(model.count, torch.zeros(32)), "nothing has been called"
    works(model, 0)


def test_ctrl_c_of_a_session_leaves_the_model_to_be_optimised_again(plan_dir, monkeypatch):
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval(), torch.randn(8, 32)
    options = {**QUICK, "passes": ["freeze_weights", PASS]}
    with monkeypatch.context() as patch:
        patch.setattr(measure, "compare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fxopt.optimize(model, x, **options)
    with torch.no_grad():
        torch.testing.assert_close(fxopt.optimize(model, x, **options)(x), model(x))
    assert all(parameter.requires_grad for parameter in model.parameters())


# -- the plan store ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_full_disk_costs_nothing_but_the_plan(model, plan_dir, monkeypatch, step):
    x = torch.randn(8, 32)
    with nothing_left(plan_dir, monkeypatch), monkeypatch.context() as patch:
        writing(step, raising(disk_full))(patch)
        result, said = call(model, x.clone())
    torch.testing.assert_close(result, expected(model, x, 1))
    (warning,) = said
    assert "the plan is not kept" in warning and "No space left on device" in warning and "plan_dir" in warning
    assert last().decision == "candidate", "what was found holds for this process"
    works(model, 1)


def test_a_directory_that_cannot_be_written_costs_nothing_but_the_plan(model, plan_dir, monkeypatch):
    x = torch.randn(8, 32)
    with nothing_left(plan_dir, monkeypatch):
        result, said = call(model, x.clone(), plan_dir="/proc/fxopt")  # which root cannot write to either
    torch.testing.assert_close(result, expected(model, x, 1))
    (warning,) = said
    assert "the plan is not kept" in warning and "/proc/fxopt" in warning
    assert last().decision == "candidate"


@pytest.mark.parametrize("content", [b"", b'{"schema_version": 1}'], ids=["empty", "fields"])
def test_a_broken_plan_is_set_aside(model, plan_dir, monkeypatch, content):
    call(model, torch.randn(8, 32))
    path = Path(last().plan_path)
    path.write_bytes(content)
    torch._dynamo.reset()
    x = torch.randn(8, 32)
    with nothing_left(plan_dir, monkeypatch):
        result, said = call(model, x.clone())
    torch.testing.assert_close(result, expected(model, x, 2))
    (warning,) = said
    assert path.name in warning and "broken" in warning
    assert path.with_name(f"{path.name}.corrupt.1").read_bytes() == content
    assert PlanStore(plan_dir).load(last().key).decision == "candidate", "made anew"


def test_a_plan_that_does_not_apply_leaves_plain_inductor(model, plan_dir, monkeypatch):
    call(model, torch.randn(8, 32))
    torch._dynamo.reset()
    x = torch.randn(8, 32)
    with nothing_left(plan_dir, monkeypatch), monkeypatch.context() as patch:
        patch.setattr("fxopt.tuner.passes_of", raising(plain_error))
        result, said = call(model, x.clone())
    torch.testing.assert_close(result, expected(model, x, 2))
    (warning,) = said
    assert "the stage 'apply plan' failed" in warning and "plain Inductor" in warning and "injected" in warning


@pytest.mark.parametrize("of_the_device", [False, True])
def test_a_call_that_fails_by_itself_is_told_as_the_callers(plan_dir, of_the_device, monkeypatch):
    """But not where everything on the device fails from then on, whoever broke it."""
    table = torch.nn.Embedding(8, 4)
    call = torch.compile(table, backend="profile_guided", options=QUICK)
    if of_the_device:
        lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        monkeypatch.setattr("fxopt.reference.clone_inputs", mock.Mock(side_effect=lost))
    with pytest.warns(FxoptWarning) as said, pytest.raises(IndexError, match="out of range"):
        call(torch.tensor([1, 9]))
    (warning,) = map(str, (one.message for one in said))
    assert ("the model's own call fails, with fxopt and without (IndexError" in warning) is not of_the_device
    assert ("the stage 'draw cotangents' failed" in warning) is of_the_device


def test_a_report_that_cannot_be_written_is_one_warning(model, plan_dir, monkeypatch, tmp_path):
    x = torch.randn(8, 32)
    with nothing_left(plan_dir, monkeypatch):
        result, said = call(model, x.clone(), report="/proc/fxopt/report.json")
    torch.testing.assert_close(result, expected(model, x, 1))
    (warning,) = said
    assert "the report was not written" in warning


# -- counters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "warnings_given"),
    [
        (ProfilerError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES (injected)"), 0),  # foreseen: a note says it
        (OSError("libcupti.so.13: cannot open shared object file (injected)"), 1),
        (out_of_memory(), 1),
    ],
    ids=["refused", "unforeseen", "out of memory"],
)
def test_without_counters_labels_rest_on_times(model, monkeypatch, error, warnings_given):
    from profiler_core.collect.cupti import session

    call(model, torch.randn(8, 32))
    profile = last().profile
    profile = replace(profile, environment={**profile.environment, "capability": (9, 0)})
    monkeypatch.setattr(session, "repeatable", lambda *a: (True, "every launch is the same"))
    monkeypatch.setattr(session, "collect", raising(lambda: error))
    monkeypatch.setattr("profiler_core.counting._on", lambda device: contextlib.nullcontext())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = profiling._counted(profile, lambda: None, (), (), torch.device("cuda"), Options())
    assert found.window.equals(profile.window)
    (note,) = found.notes[len(profile.notes) :]
    assert note.startswith("no hardware counters: ") and "injected" in note
    assert len(warned(caught)) == warnings_given


# -- the tuning that fails is not tried again and again ---------------------------------------------------------------


def test_every_graph_of_a_process_gets_its_own_warning(model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Tuner, "run", raising(plain_error))
        _, first = call(model, torch.randn(8, 32))
        _, second = call(model, torch.randn(9, 32))
    assert len(first) == len(second) == 1


def test_the_interpreter_keeps_no_traceback(model, monkeypatch):
    """Where one stays (an interactive session has `sys.last_value`), it must be the caller's doing, not fxopt's."""
    with monkeypatch.context() as patch:
        patch.setattr(kineto, "measure", raising(plain_error))
        call(model, torch.randn(8, 32))
    assert sys.exc_info() == (None, None, None)
