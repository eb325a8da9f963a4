"""One operator of torch's database: called by eager, by plain Inductor and by fxopt, and what came of it."""

from __future__ import annotations

import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from op_db_passes import COPIES, Forced
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fxopt import backend, registry
from profiler_core.environment import environment

PLAIN = "inductor"
FXOPT = ("profile_guided", "frozen")
NOTHING_TO_FREEZE = "no other tensor"
SEED = 0


def operators() -> dict[str, Any]:
    """torch's operators that have float32 on the CPU, by full name, in the database's order. ImportError says what is
    missing where torch's tests cannot be imported.
    """
    from torch.testing._internal import common_methods_invocations as database

    # Random operators come wrapped in what sets the seed, which Dynamo leaves to eager; here the seed is set outside.
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    op_db = database.op_db
    return {op.full_name: op for op in op_db if torch.float32 in op.supported_dtypes("cpu")}


def sample(op: Any) -> tuple[list[Any], Any]:
    """The first sample input as leaves (tensors and other values) and their tree (input, args, kwargs): new and the
    same at each call.
    """
    _seed()
    first = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=False)))
    return tree_flatten((first.input, tuple(first.args), dict(first.kwargs)))


def _seed(number: int = SEED) -> None:
    import numpy

    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def tolerances(op: Any) -> tuple[float, float]:
    """(rtol, atol) for float32: torch's own, or the widest that the operator's tests on the CPU are given."""
    rtol, atol = 1.3e-6, 1e-5
    for decorator in op.decorators:
        if getattr(decorator, "device_type", "") not in (None, "cpu"):
            continue
        for one in decorator.decorators:
            override = getattr(one, "d", {}).get(torch.float32)  # a precisionOverride has a number, which is no pair
            if hasattr(override, "rtol"):
                rtol, atol = max(rtol, override.rtol), max(atol, override.atol)
    return rtol, atol


@dataclass
class Outcome:
    """What a call came to: its results, then its inputs as it left them; or the error that it raised."""

    leaves: list[Any]
    tree: Any
    state: torch.Tensor
    error: BaseException | None = None

    @property
    def raised(self) -> str:
        """The type of the error at the root of what torch.compile raised, and its message's first line."""
        error = self.error
        while error is not None and (inner := getattr(error, "inner_exception", None) or error.__cause__):
            error = inner
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


def call(fn: Callable[..., Any], op: Any, seed: int = SEED) -> Outcome:
    leaves, tree = sample(op)
    _seed(seed)
    try:
        given, args, kwargs = tree_unflatten(leaves, tree)
        result = fn(given, *args, **kwargs)
        found, shape = tree_flatten((result, leaves))
        return Outcome(found, shape, torch.get_rng_state())
    except Exception as error:
        return Outcome([], None, torch.get_rng_state(), error)


def differences(one: Outcome, other: Outcome, rtol: float, atol: float, form_only: bool = False) -> str:
    """The first difference between two calls that returned, "" if there is none. form_only: shapes and types count."""
    if one.tree != other.tree:
        return f"{one.tree} and {other.tree}"
    for index, (a, b) in enumerate(zip(one.leaves, other.leaves, strict=True)):
        try:
            if form_only and isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                a, b = (torch.empty_like(x, device="meta") for x in (a, b))
                assert (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout), f"{a} and {b}"
            elif isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
            elif a != b and not (a != a and b != b):
                return f"value {index}: {a!r} and {b!r}"
        except AssertionError as error:
            return f"value {index}: " + " ".join(str(error).split())[:300]
    return ""


class _Other(nn.Module):
    """An operator whose tensors, but for its first argument, are buffers of a module."""

    def __init__(self, op: Callable[..., Any], leaves: Sequence[Any], tree: Any) -> None:
        super().__init__()
        self.op, self.tree, self.given = op, tree, list(leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self.register_buffer(f"leaf_{index}", leaf)
                self.given[index] = None

    def forward(self, given: Any) -> Any:
        leaves = [getattr(self, f"leaf_{i}", leaf) for i, leaf in enumerate(self.given)]
        args, kwargs = tree_unflatten(leaves, self.tree)
        return self.op(given, *args, **kwargs)


def compiled(op: Any, way: str, plans: Path) -> Callable[..., Any]:
    """The operator as `way` compiles it: plain Inductor, or one of fxopt's two."""

    # A function, not the operator itself, which Dynamo would take for one of its own.
    def plain(*args: Any, **kwargs: Any) -> Any:
        return op.op(*args, **kwargs)

    if way == PLAIN:
        return torch.compile(plain, backend="inductor")
    options: dict[str, Any] = {"mode": "apply", "on_error": "raise", "plan_dir": plans}
    if way == "profile_guided":
        return torch.compile(plain, backend="profile_guided", options=options)

    def frozen(given: Any, *args: Any, **kwargs: Any) -> Any:
        module = _Other(op.op, *tree_flatten((args, kwargs))).eval()
        disable = [p.name for p in COPIES]
        session = backend.Backend(None, {**options, "disable": disable, "freeze": True}, session=True)
        with torch.no_grad():
            return torch.compile(module, backend=session)(given)

    return frozen


class Reference:
    """What eager makes of an operator, and whether that is the same twice and under another seed."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.rtol, self.atol = tolerances(op)
        _, args, kwargs = tree_unflatten(*sample(op))
        self.others = any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten((args, kwargs))[0])
        self.eager, again, other = call(op.op, op), call(op.op, op), call(op.op, op, SEED + 1)
        self.plain: Outcome | None = None
        self.form_only = self.random = False
        if self.eager.error is None:
            self.form_only = "empty" in op.name or bool(differences(self.eager, again, 0, 0))
            self.random = not self.form_only and bool(differences(self.eager, other, 0, 0))

    def row(self) -> dict[str, Any]:
        error = self.eager.raised if self.eager.error is not None else ""
        values = "form" if self.form_only else "random" if self.random else "fixed"
        return {"eager": error or "returns", "values": values, "rtol": self.rtol, "atol": self.atol}

    def judge(self, way: str, plans: Path) -> dict[str, Any]:
        """Verdict of one way: its error or difference, the passes that changed something, graphs that it compiled."""
        if way == "frozen" and not self.others:
            return {"verdict": NOTHING_TO_FREEZE, "why": "", "graphs": 0}
        torch._dynamo.reset()
        Forced.reports.clear()
        counts = torch._dynamo.utils.counters
        counts.clear()
        found = call(compiled(self.op, way, plans), self.op)
        row: dict[str, Any] = {"verdict": "same", "why": ""}
        if found.error is not None:
            row["verdict"], row["why"] = f"raises {found.raised.partition(':')[0]}", found.raised
        elif self.eager.error is not None:
            row["verdict"] = "returns"
        elif why := differences(found, self.eager, self.rtol, self.atol, self.form_only):
            row["verdict"], row["why"] = "different", why
        row["graphs"] = counts["stats"]["unique_graphs"]
        if way == PLAIN:
            self.plain = found
            return row
        reports = [report for graph in Forced.reports for candidate in graph.candidates for report in candidate.reports]
        row["changed"] = dict(Counter(report.name for report in reports if report.changed))
        row["left"] = sorted({m for graph in Forced.reports if graph.decision != "candidate" for m in graph.messages})
        if self.plain is not None and found.error is None and self.plain.error is None:
            near = (self.rtol, self.atol, self.form_only)
            row["as_plain"] = differences(found, self.plain, *near)
            row["same_bits"] = not differences(found, self.plain, 0, 0, self.form_only)
            row["same_state"] = torch.equal(found.state, self.plain.state)
        return row


def serve(connection: Connection) -> None:
    """A worker: (operator, ways) come in; its description, and then each way's row, go out. None ends it."""
    warnings.simplefilter("ignore")
    import torch._dynamo.config as dynamo_config
    import torch._inductor.config as inductor_config

    inductor_config.compile_threads = 1  # the sweep has its own processes
    # Dynamo would leave operators to eager whose results' sizes, or numbers, are known by then only.
    dynamo_config.capture_dynamic_output_shape_ops = dynamo_config.capture_scalar_outputs = True
    torch.set_num_threads(1)
    for p in COPIES:
        registry.register(p)
    known = operators()
    connection.send((list(known), environment("cpu")))
    with tempfile.TemporaryDirectory(prefix="fxopt-op-db-") as plans, mock.patch.object(backend, "Tuner", Forced):
        while (job := connection.recv()) is not None:
            name, ways = job
            reference = Reference(known[name])
            connection.send(reference.row())
            for way in ways:
                started = time.perf_counter()
                row = reference.judge(way, Path(plans))
                connection.send({**row, "seconds": round(time.perf_counter() - started, 2)})
