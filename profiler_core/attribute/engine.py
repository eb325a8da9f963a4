"""Attributes every kernel of a trace to the launch and the FX nodes that it ran for."""

from __future__ import annotations

from typing import Any

from profiler_core.aggregate import node_rows
from profiler_core.attribute.correlation import KernelRow, kernel_rows
from profiler_core.attribute.fusion_map import Claim, claims_by_kernel_name, claims_by_operator
from profiler_core.collect.kineto import RawTrace
from profiler_core.collect.provenance import Provenance
from profiler_core.profile import KERNEL_COLUMNS, NODE_COLUMNS, Profile, frame


def attribute(trace: RawTrace, provenance: Provenance, environment: dict[str, Any]) -> Profile:
    """One row per kernel, each with the FX nodes it ran for or the reason why they are not known.

    In order of rank:

    - its launch lies in a range ``fxopt::kernel:handle`` on the same thread: "correlation" (on the CPU,
      where kernel and launch are one, "enclosure"), confidence "high";
    - names and order agree with the wrapper code (:mod:`profiler_core.attribute.fusion_map`): "fusion_map",
      "medium";
    - otherwise "none", with a reason. The nearest operator is never taken.

    Attributed and unattributed time sum to the total in integer nanoseconds.
    """
    rows = kernel_rows(trace)
    launches = {launch.key: launch for launch in provenance.launches}
    claims: dict[int, Claim] = {}
    if any(not row.launch for row in rows):
        claims = {**claims_by_kernel_name(rows, provenance), **claims_by_operator(rows, trace, provenance)}
    records = []
    launch_ns: dict[str, int] = {}
    launch_kernels: dict[str, int] = {}
    direct = "enclosure" if trace.device == "cpu" else "correlation"
    ranged = any(row.launch for row in rows)
    for i, row in enumerate(rows):
        if row.launch:
            key, method, confidence, reason = row.launch, direct, "high", ""
        else:
            # Where launch ranges are at work, a kernel outside of them is known not to be a launch of this
            # graph.
            claim = Claim("", _no_range(row)) if ranged else claims.get(i, Claim("", _no_range(row)))
            key, method, confidence, reason = claim.launch, "fusion_map", "medium", claim.reason
        launch = launches.get(key)
        if key and launch is None:
            key, reason = "", f"launch {key} is not in this graph's provenance"
        elif launch is not None and not launch.nodes:
            key, reason = "", f"Inductor's mapping names no FX node for {launch.key}"
        if not key:
            launch, method, confidence = None, "none", "none"
        records.append(_record(row, key, launch.nodes if launch else (), method, confidence, reason))
        if key:
            launch_ns[key] = launch_ns.get(key, 0) + row.kernel.duration_ns
            launch_kernels[key] = launch_kernels.get(key, 0) + 1
    iterations = max(trace.iterations, 1)
    return Profile(
        kernels=frame(records, KERNEL_COLUMNS),
        nodes=frame(node_rows(provenance, launch_ns, launch_kernels, iterations), NODE_COLUMNS),
        environment=dict(environment),
        iterations=iterations,
        wall_ns=_median(trace.wall_ns),
        launches=provenance.launches,
        notes=trace.notes,
    )


def _median(values: tuple[float, ...]) -> float:
    from statistics import median

    return float(median(values)) if values else float("nan")


def _no_range(row: KernelRow) -> str:
    if row.reason:
        return row.reason
    if row.operator:
        return f"{row.operator} ran outside of every launch of the compiled graph"
    return "launched outside of every operator and launch range"


def _record(
    row: KernelRow, key: str, nodes: tuple[str, ...], method: str, confidence: str, reason: str
) -> dict[str, Any]:
    kernel = row.kernel
    return {
        "name": kernel.name,
        "device": kernel.device,
        "stream": kernel.stream,
        "start_ns": kernel.start_ns,
        "duration_ns": kernel.duration_ns,
        "thread": row.thread,
        "launch_ns": row.launch_ns,
        "grid": kernel.grid,
        "block": kernel.block,
        "registers": kernel.registers,
        "shared_memory": kernel.shared_memory,
        "correlation": kernel.correlation,
        "iteration": row.iteration,
        "operator": row.operator,
        "launch": key,
        "nodes": nodes,
        "method": method,
        "confidence": confidence,
        "reason": reason,
    }
