"""From kernels to launches to FX nodes: how the time of a fused kernel is shared among its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from profiler_core.collect.provenance import NodeInfo, Provenance


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Split an integer into integers proportional to ``weights`` that sum to it exactly (largest remainder
    first).

    Where the weights sum to zero the parts are equal. Raises ValueError where there is nothing to give the
    total to.
    """
    if not weights:
        raise ValueError("apportion needs at least one weight")
    whole = sum(weights)
    exact = [total * (w / whole) for w in weights] if whole > 0 else [total / len(weights)] * len(weights)
    parts = [int(value) for value in exact]
    order = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    left = total - sum(parts)
    step = 1 if left > 0 else -1
    for n in range(abs(left)):
        parts[order[n % len(order)]] += step
    return parts


def weights(nodes: Sequence[NodeInfo]) -> list[float]:
    """Weights by which a kernel's time is shared among its nodes: the bytes that each would move on its own.

    Views move nothing and get nothing. Where a node's bytes are unknown, all nodes but those known to move
    nothing count the same, because a known and an unknown amount cannot be compared.
    """
    if any(node.bytes is None for node in nodes):
        return [0.0 if node.bytes == 0 else 1.0 for node in nodes]
    return [float(node.bytes or 0.0) for node in nodes]


def node_rows(
    provenance: Provenance, launch_ns: Mapping[str, int], launch_kernels: Mapping[str, int], iterations: int
) -> list[dict[str, Any]]:
    """One row per operator of the post-grad graph.

    ``launch_ns`` and ``launch_kernels`` hold the time (ns) and the number of kernels of each launch over
    the whole window. The column ``window_ns`` is integer: over the nodes of one launch its shares sum to
    the launch's time exactly, and over all rows to the attributed time. ``time_ns`` is the same per call.
    """
    share: dict[str, int] = {}
    group: dict[str, int] = {}
    kernels: dict[str, int] = {}
    keys: dict[str, list[str]] = {}
    fused: dict[str, dict[str, None]] = {}
    for launch in provenance.launches:
        # An input that is listed with them has no row, and so gets no share.
        members = [
            provenance.nodes[name]
            for name in launch.nodes
            if name in provenance.nodes and provenance.nodes[name].op == "call_function"
        ]
        if not members:
            continue
        weight = weights(members)
        working = [node.name for node, w in zip(members, weight, strict=True) if w > 0] or [n.name for n in members]
        time = launch_ns.get(launch.key, 0)
        for node, part in zip(members, apportion(time, weight), strict=True):
            share[node.name] = share.get(node.name, 0) + part
            group[node.name] = group.get(node.name, 0) + time
            kernels[node.name] = kernels.get(node.name, 0) + launch_kernels.get(launch.key, 0)
            keys.setdefault(node.name, []).append(launch.key)
            fused.setdefault(node.name, {}).update(dict.fromkeys(n for n in working if n != node.name))
    rows = []
    for node in provenance.nodes.values():
        if node.op != "call_function":
            continue
        name = node.name
        rows.append(
            {
                "node": name,
                "target": node.target,
                "shape": node.shape,
                "dtype": node.dtype,
                "module_path": node.module_path,
                "module_class": node.module_class,
                "file": node.file,
                "line": node.line,
                "source": node.source,
                "pre_grad": node.pre_grad,
                "kernels": round(kernels.get(name, 0) / iterations),
                "time_ns": share.get(name, 0) / iterations,
                "group_time_ns": group.get(name, 0) / iterations,
                "window_ns": share.get(name, 0),
                "estimate": bool(fused.get(name)),
                "fused_with": tuple(fused.get(name, ())),
                "flops": node.flops,
                "bytes": node.bytes,
                "launches": tuple(keys.get(name, ())),
            }
        )
    return rows


def leading_node(nodes: Sequence[NodeInfo]) -> NodeInfo | None:
    """The node that speaks for a fused group: most FLOPs in a library call or a reduction, then most bytes,
    then the last.
    """
    if not nodes:
        return None
    return max(enumerate(nodes), key=lambda item: (item[1].flops or 0.0, item[1].bytes or 0.0, item[0]))[1]
