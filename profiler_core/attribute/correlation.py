"""Joins kernels to their launches by correlation, and launches to the ranges around them by thread and
time.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from profiler_core.collect.kineto import COMPILED_GRAPH_PREFIX, ITERATION_PREFIX, Kernel, Op, RawTrace
from profiler_core.collect.wrapper_source import RANGE_PREFIX

_DISPATCHED = re.compile(r"[A-Za-z_]\w*::\w")
_GENERATED = re.compile(r"(graph_\d+_)?(cpp|triton)_\w+$")
_RUNTIME = {"cuda_runtime", "runtime", "cuda_driver", "driver"}


class Nesting:
    """The tree of CPU events on each thread: an event's parent is the shortest event that was open when it
    began.

    Built by one sweep over the sorted events, so it takes n log n time. Ids in the trace are not used: in
    some traces they come from another id space than the kernels'.
    """

    def __init__(self, ops: tuple[Op, ...]):
        self.ops = ops
        self.parent: list[int] = [-1] * len(ops)
        order = sorted(range(len(ops)), key=lambda i: (str(ops[i].thread), ops[i].start_ns, -ops[i].end_ns, i))
        self.order = order
        stack: list[int] = []
        thread: object = None
        for i in order:
            op = ops[i]
            if op.thread != thread:
                stack, thread = [], op.thread
            while stack and ops[stack[-1]].end_ns <= op.start_ns:
                stack.pop()
            self.parent[i] = stack[-1] if stack else -1
            stack.append(i)

    def around(self, index: int) -> Iterator[int]:
        """The events around this one, innermost first."""
        index = self.parent[index]
        while index >= 0:
            yield index
            index = self.parent[index]


@dataclass(frozen=True)
class KernelRow:
    """A kernel in the measured window with what the trace says about its launch.

    ``operator`` is the outermost operator around the launch and ``operator_index`` its place among the
    trace's ops ("" and -1 where none); ``launch`` is the key of the launch range around it ("" where none).
    ``iteration`` is -1 outside of all.
    """

    kernel: Kernel
    iteration: int
    thread: int | str | None
    launch_ns: int | None
    operator: str
    operator_index: int
    launch: str
    reason: str = ""


def is_operator(op: Op) -> bool:
    """Whether a CPU event is an operator (``aten::mm``) or a generated kernel, as against a range of the
    framework's.
    """
    if op.category in _RUNTIME or op.category == "user_annotation" or op.name.startswith(RANGE_PREFIX):
        return False
    return bool(_DISPATCHED.match(op.name) or _GENERATED.match(op.name))


def launch_key(op: Op) -> str:
    """The ``kernel:handle`` of a launch range, "" for any other event."""
    if op.name.startswith(RANGE_PREFIX) and not op.name.startswith(ITERATION_PREFIX):
        return op.name[len(RANGE_PREFIX) :]
    return ""


def kernel_rows(trace: RawTrace, *, whole_graphs: bool = False) -> list[KernelRow]:
    """One row per kernel of the measured window, in order of start time.

    ``whole_graphs``: on the CPU, a compiled graph without launch ranges is one kernel.
    """
    nesting = Nesting(trace.ops)
    rows = _device_rows(trace, nesting) if trace.device != "cpu" else _cpu_rows(trace, nesting, whole_graphs)
    return sorted(rows, key=lambda row: row.kernel.start_ns)


def _device_rows(trace: RawTrace, nesting: Nesting) -> Iterator[KernelRow]:
    launches = {
        op.correlation: i for i, op in enumerate(trace.ops) if op.category in _RUNTIME and op.correlation is not None
    }
    ranges = trace.iteration_ranges
    starts = [op.start_ns for _, op in ranges]

    def iteration_at(time_ns: int) -> int:
        # Iterations are separated by a synchronisation: what starts after one began and before the next is
        # its own.
        position = bisect_right(starts, time_ns) - 1
        return ranges[position][0] if position >= 0 else -1

    for kernel in trace.kernels:
        index = launches.get(kernel.correlation) if kernel.correlation else None
        if index is None:
            reason = "no launch with its correlation id is in the trace"
            yield KernelRow(kernel, iteration_at(kernel.start_ns), None, None, "", -1, "", reason)
            continue
        launch = trace.ops[index]
        operator, operator_index, key = _surroundings(trace, nesting, index)
        yield KernelRow(
            kernel,
            iteration_at(launch.start_ns),
            launch.thread,
            launch.start_ns,
            operator,
            operator_index,
            key,
        )


def _surroundings(trace: RawTrace, nesting: Nesting, index: int) -> tuple[str, int, str]:
    """Outermost operator (name, index) and innermost launch range around an event."""
    operator, operator_index, key = "", -1, ""
    for i in nesting.around(index):
        op = trace.ops[i]
        if is_operator(op):
            operator, operator_index = op.name, i
        elif not key:
            key = launch_key(op)
    return operator, operator_index, key


def _cpu_rows(trace: RawTrace, nesting: Nesting, whole_graphs: bool) -> Iterator[KernelRow]:
    """On the CPU the kernels are top-level operators and generated kernels, within iterations on the
    calling thread.

    A launch range of a library call stands for the operators directly in it; one of a generated kernel, or
    with no operator in it, is the kernel itself and includes about a microsecond of binding. Time outside
    of any of these is not kernel time.
    """
    graphs = _opaque_graphs(trace, nesting) if whole_graphs else set()
    iteration: dict[int, int] = {}
    holder: dict[int, int] = {}  # event -> the range, graph or operator at or around it that takes the time inside it
    filled: set[int] = set()  # launch ranges with an operator directly inside
    chosen: list[int] = []
    for i in nesting.order:
        op, parent = trace.ops[i], nesting.parent[i]
        if op.name.startswith(ITERATION_PREFIX):
            iteration[i] = int(op.name[len(ITERATION_PREFIX) :])
            continue
        if parent in iteration:
            iteration[i] = iteration[parent]
        if i not in iteration:
            continue
        outer = holder.get(parent, -1)
        if not (launch_key(op) or is_operator(op) or i in graphs):
            if outer >= 0:
                holder[i] = outer
            continue
        holder[i] = i
        if outer < 0:
            chosen.append(i)
        elif launch_key(trace.ops[outer]) and not launch_key(op) and not _is_generated_range(trace.ops[outer]):
            filled.add(outer)
            chosen.append(i)
    for i in chosen:
        if i in filled:
            continue
        op = trace.ops[i]
        key = launch_key(op) or next((k for j in nesting.around(i) if (k := launch_key(trace.ops[j]))), "")
        name = launch_key(op).rpartition(":")[0] or op.name
        kernel = Kernel(name, "cpu", None, op.start_ns, op.end_ns - op.start_ns)
        operator = op.name if is_operator(op) else ""
        yield KernelRow(kernel, iteration[i], op.thread, op.start_ns, operator, i if operator else -1, key)


def _opaque_graphs(trace: RawTrace, nesting: Nesting) -> set[int]:
    """Compiled graphs without a launch range inside."""
    graphs = {i for i, op in enumerate(trace.ops) if op.name.startswith(COMPILED_GRAPH_PREFIX)}
    for i, op in enumerate(trace.ops):
        if launch_key(op) or _GENERATED.match(op.name):
            graphs -= set(nesting.around(i))
    return graphs


def _is_generated_range(op: Op) -> bool:
    return bool(_GENERATED.match(launch_key(op).rpartition(":")[0]))
