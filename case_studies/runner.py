"""Shared by the case studies: build the variants of a model and measure them side by side.

A case study lists its `Variant`s (eager, Inductor, ..., fxopt) and its inputs with fp64 reference outputs;
`measure_variants` gives one `Row` a variant. All variants live at once and are timed in turns, so that a
clock that drifts or a busy neighbour touches all of them alike.

Each variant must have a code object of its own (`with_own_forward`): TorchDynamo keys what it compiled on
the code object of ``forward``, so variants that shared one would count as recompiles of each other, and
every call would first walk the guards of the others.
"""

from __future__ import annotations

import math
import re
import statistics
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

BASE = "Inductor"
"""The row that speedups are relative to."""

Module = TypeVar("Module", bound=torch.nn.Module)


# ---- what is measured ----


@dataclass(frozen=True)
class Variant:
    """One way to run the model.

    `build()` returns the callable that is measured; building and its first call are timed as compile
    seconds, when `compiles`. `context()` is in force around building, compiling and every call: a flag that
    code reads at run time, such as TF32's, belongs there. `available=False` keeps the variant as a row that
    says `why`.
    """

    name: str
    build: Callable[[], Callable[..., Any]]
    available: bool = True
    why: str = ""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiles: bool = True


@dataclass(frozen=True)
class Row:
    """What was measured of one variant; None where it was not, and `why` says why.

    kernel_ns: device time a call, summed over kernels (on a CPU, over top-level operators), median,
    nanoseconds. wall_ns: time a call with the device drained, median over rounds. rel_l2, max_abs: against
    the fp64 reference over all input sets. *_speedup: base time / this time, so above 1 is faster; for wall
    the median of the rounds' ratios, with a 95 % interval. compile_seconds: build and first call, in the
    state in which the compile caches were. kernels: launches a call. kernel_note: how the kernel
    numbers were had, where that needs saying.
    """

    name: str
    status: str  # "measured" | "skipped" | "out of time" | "failed"
    why: str = ""
    kernel_ns: float | None = None
    wall_ns: float | None = None
    rel_l2: float | None = None
    max_abs: float | None = None
    kernel_speedup: float | None = None
    wall_speedup: float | None = None
    wall_speedup_low: float | None = None
    wall_speedup_high: float | None = None
    compile_seconds: float | None = None
    kernels: int | None = None
    kernel_note: str = ""
    rounds: int = 0
    calls_per_round: int = 0


ROW_FIELDS = tuple(f.name for f in fields(Row))


@dataclass
class Built:
    """A variant that is ready to be measured: compiled, run once on each input set, its error known."""

    variant: Variant
    row: Row
    call: Callable[..., Any] | None = None
    walls_ns: list[float] = field(default_factory=list)


class Stopwatch:
    """Seconds by phase, for the compile budget. Phases entered twice add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start


# ---- global settings, held only while a variant runs ----


@contextmanager
def fp32_matmuls(*, tf32: bool) -> Iterator[None]:
    """CUDA matmuls and convolutions of fp32 tensors in TF32, or in plain fp32; restored afterwards.

    The legacy switches are set, since they keep torch's newer per-operator settings in step; setting only
    the newer ones makes every later read of the legacy ones raise. Restoring takes both, as the legacy
    setter turns the newer setting's "none" into "ieee".
    """
    backends: Any = torch.backends  # torch's annotations lack the newer settings
    legacy = torch.get_float32_matmul_precision()
    newer = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
    before = [setting.fp32_precision for setting in newer]
    cudnn = backends.cudnn.allow_tf32
    try:
        backends.cuda.matmul.allow_tf32 = tf32
        backends.cudnn.allow_tf32 = tf32
        yield
    finally:
        torch.set_float32_matmul_precision(legacy)
        backends.cudnn.allow_tf32 = cudnn
        for setting, value in zip(newer, before, strict=True):
            if setting.fp32_precision != value:
                setting.fp32_precision = value


def with_own_forward(module_class: type[Module], name: str) -> type[Module]:
    """A subclass of `module_class` whose ``forward`` is the same code in a code object of its own.

    The copy is renamed, since TorchDynamo keeps some state (which sizes it takes as dynamic) by file, line
    and name.
    """
    slug = re.sub(r"\W+", "_", name).strip("_") or "variant"
    forward = module_class.forward
    code = forward.__code__.replace(co_name=f"forward_{slug}")
    own = types.FunctionType(code, forward.__globals__, code.co_name, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return type(f"{module_class.__name__}_{slug}", (module_class,), {"forward": own, "__module__": __name__})


def kernel_events(device: torch.device) -> dict[str, Any]:
    """Inductor options for variants on this device, so that the kernel column holds all of their kernels.

    On a CPU the generated C++ kernels are events of torch.profiler only when compiled to be; a kernel that no
    profiler listens to pays some ten nanoseconds for it. Give them to every compiled variant alike.
    """
    return {"cpp.enable_kernel_profile": True} if device.type == "cpu" else {}


def bf16_units(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices in hardware; elsewhere bf16 rows measure an emulation."""
    from profiler_core.roofline import matrix_units

    return "bfloat16" in matrix_units(device)


# ---- errors ----


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors of an output (a tensor, or nested lists, tuples or mappings), in order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in tensors_of(value)]
    if isinstance(output, (list, tuple)):
        return [tensor for value in output for tensor in tensors_of(value)]
    return []


def errors(outputs: Sequence[Any], reference: Sequence[Any]) -> tuple[float, float]:
    """(relative L2 error, largest absolute error) over all tensors of all input sets: ||o - r|| / ||r|| in
    fp64.

    ValueError if the outputs do not have the reference's tensors and shapes.
    """
    difference, norm, largest = 0.0, 0.0, 0.0
    for output, expected in zip(outputs, reference, strict=True):
        have, want = tensors_of(output), tensors_of(expected)
        if [t.shape for t in have] != [t.shape for t in want]:
            shapes = [[tuple(t.shape) for t in side] for side in (have, want)]
            raise ValueError(f"outputs have shapes {shapes[0]}, the reference {shapes[1]}")
        for mine, right in zip(have, want, strict=True):
            delta = mine.detach().to(torch.float64) - right.to(torch.float64)
            difference += delta.square().sum().item()
            norm += right.to(torch.float64).square().sum().item()
            # max() of Python drops a NaN that comes second; a NaN must show.
            peak = delta.abs().max().item() if delta.numel() else 0.0
            largest = peak if math.isnan(peak) or peak > largest else largest
    if norm == 0.0:
        return (0.0 if difference == 0.0 else math.inf), largest
    return math.sqrt(difference / norm), largest


# ---- measuring ----


def build_variant(
    variant: Variant, inputs: Sequence[Sequence[Any]], reference_outputs: Sequence[Any], device: torch.device
) -> Built:
    """Build, compile and check one variant. One that fails becomes a row that says how; nothing is raised.

    What is checked is the output of a call, or of the callable's `check` where it has one: a training step gives its
    gradients there without taking the step.
    """
    row = Row(variant.name, "skipped", variant.why)
    if not variant.available:
        return Built(variant, row)
    start = time.perf_counter()
    try:
        with variant.context(), torch.no_grad():
            call = variant.build()
            check = getattr(call, "check", call)
            first = _copied(check(*inputs[0]))
            _drain(device)
            took = time.perf_counter() - start
            outputs = [first] + [_copied(check(*args)) for args in inputs[1:]]
        rel_l2, max_abs = errors(outputs, reference_outputs)
    except Exception as error:  # a baseline that does not build must not end the study; the table says it
        return Built(variant, replace(row, status="failed", why=_one_line(error)))
    row = replace(row, status="measured", rel_l2=rel_l2, max_abs=max_abs)
    return Built(variant, replace(row, compile_seconds=took if variant.compiles else None), call)


def measure_built(
    built: Sequence[Built],
    inputs: Sequence[Sequence[Any]],
    device: torch.device,
    *,
    rounds: int = 15,
    iterations: int = 5,
    min_block_ns: float = 1e7,
    base: str = BASE,
    monitor: Any = None,
) -> list[Row]:
    """Rows of variants that `build_variant` gave: `time_in_turns`, then kernel time of `iterations` profiled calls."""
    running = [b for b in built if b.call is not None]
    calls = time_in_turns(built, inputs, device, rounds=rounds, min_block_ns=min_block_ns, monitor=monitor)
    rows = [_with_times(b, inputs, device, rounds, calls, iterations) if b.call is not None else b.row for b in built]
    of_base = next((b for b in running if b.variant.name == base), None)
    if of_base is None:
        return rows
    base_kernel = next(row.kernel_ns for row in rows if row.name == base)
    walls = {b.variant.name: b.walls_ns for b in running}
    return [_with_speedups(row, walls.get(row.name), of_base.walls_ns, base_kernel) for row in rows]


def time_in_turns(
    built: Sequence[Built],
    inputs: Sequence[Sequence[Any]],
    device: torch.device,
    *,
    rounds: int,
    min_block_ns: float = 1e7,
    monitor: Any = None,
) -> dict[str, int]:
    """Fill `walls_ns` of those that run, a value a round; the calls in a block by name.

    In each round every variant runs one block of calls, on rotating inputs, the order rotated from round to
    round; a block lasts at least `min_block_ns` and ends with the device drained. `monitor` (a
    ClockMonitor) is sampled between blocks.
    """
    running = [b for b in built if b.call is not None]
    calls = {b.variant.name: _calls_per_block(b, inputs, device, min_block_ns) for b in running}
    for number in range(rounds):
        shift = number % max(len(running), 1)
        for b in running[shift:] + running[:shift]:
            with b.variant.context(), torch.no_grad():
                # One untimed call: the previous variant's weights are still in the caches.
                _block(b.call, inputs, number, 1, device)
                b.walls_ns.append(_block(b.call, inputs, number, calls[b.variant.name], device))
            if monitor is not None:
                monitor.sample()
    return calls


def measure_variants(
    variants: Sequence[Variant],
    inputs: Sequence[Sequence[Any]],
    reference_outputs: Sequence[Any],
    device: torch.device,
    **how: Any,
) -> list[Row]:
    """Build all variants, then measure them side by side: one `Row` a variant, in order. `how`:
    `measure_built`.
    """
    return measure_built([build_variant(v, inputs, reference_outputs, device) for v in variants], inputs, device, **how)


def _calls_per_block(built: Built, inputs: Sequence[Sequence[Any]], device: torch.device, block_ns: float) -> int:
    """Warm up (CUDA graphs capture on the second or third call) and size the block from the fastest call."""
    with built.variant.context(), torch.no_grad():
        fastest = min(_block(built.call, inputs, i, 1, device) for i in range(4))
    return max(1, min(500, math.ceil(block_ns / max(fastest, 1.0))))


def _block(call: Any, inputs: Sequence[Sequence[Any]], first: int, calls: int, device: torch.device) -> float:
    """Nanoseconds a call over `calls` calls."""
    _drain(device)
    start = time.perf_counter_ns()
    for index in range(first, first + calls):
        call(*inputs[index % len(inputs)])
    _drain(device)
    return (time.perf_counter_ns() - start) / calls


def _with_times(
    built: Built,
    inputs: Sequence[Sequence[Any]],
    device: torch.device,
    rounds: int,
    calls: Mapping[str, int],
    iterations: int,
) -> Row:
    from profiler_core.collect.kineto import kernel_time

    call = built.call
    assert call is not None
    row = built.row
    try:
        with built.variant.context(), torch.no_grad():
            kernels = kernel_time(lambda: call(*inputs[0]), iterations=iterations, warmup=2, device=device)
        row = replace(
            row,
            kernel_ns=kernels.kernel_ns,
            kernels=kernels.kernels,
            kernel_note=getattr(kernels, "note", ""),
        )
    except Exception as error:  # a profiler that is refused costs a column, not the study
        row = replace(row, why=f"no kernel time, {_one_line(error)}")
    return replace(
        row,
        wall_ns=statistics.median(built.walls_ns) if built.walls_ns else None,
        rounds=rounds,
        calls_per_round=calls[built.variant.name],
    )


def _with_speedups(row: Row, walls: list[float] | None, base: list[float], base_kernel: float | None) -> Row:
    if row.kernel_ns and base_kernel:
        row = replace(row, kernel_speedup=base_kernel / row.kernel_ns)
    if not walls or not base:
        return row
    ratios = sorted(theirs / mine for theirs, mine in zip(base, walls, strict=True))
    # Ranks of a 95 % interval of a median, n/2 -+ 1.96 sqrt(n)/2: Conover, Practical Nonparametric
    # Statistics, section 3.2. Below 6 rounds even the extremes cover less.
    low = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    return replace(
        row,
        wall_speedup=statistics.median(ratios),
        wall_speedup_low=ratios[low],
        wall_speedup_high=ratios[-1 - low],
    )


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copied(output: Any) -> list[torch.Tensor]:
    """Copies, since a CUDA graph's next call overwrites its outputs."""
    return [tensor.detach().clone() for tensor in tensors_of(output)]


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
