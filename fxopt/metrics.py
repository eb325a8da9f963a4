"""What rules read: numbers about the graph and each fused group, with units and where they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxopt.labels import Source
from profiler_core.cost import is_matrix_product

if TYPE_CHECKING:
    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings

__all__ = ["Metric", "graph_metrics", "group_metrics"]


@dataclass(frozen=True)
class Metric:
    """A number about a graph or a group, with its unit and where it comes from."""

    value: float
    unit: str
    source: Source


@dataclass(frozen=True)
class GraphTimes:
    """The part of a profile that the graph's own labels need."""

    wall_ns: float
    kernel_ns: float
    environment: Mapping[str, Any]


def _device_type(profile: Profile | GraphTimes) -> str:
    return str(profile.environment.get("device_type") or "cpu").split(":")[0]


def _known(value: Any) -> bool:
    return value is not None and isinstance(value, (int, float)) and math.isfinite(value)


def graph_metrics(profile: Profile | GraphTimes) -> tuple[dict[str, Metric], dict[str, Any]]:
    """Metrics (wall_ns, kernel_ns, launch_gap) and facts of the graph; one that cannot be had is absent."""
    device = _device_type(profile)
    metrics = {
        name: Metric(float(value), "ns", "measured")
        for name, value in (("wall_ns", profile.wall_ns), ("kernel_ns", profile.kernel_ns))
        if _known(value) and value > 0
    }
    if len(metrics) == 2:
        gap = 1 - metrics["kernel_ns"].value / metrics["wall_ns"].value
        metrics["launch_gap"] = Metric(gap, "1", "measured")
    gap_is = (
        "the device waits for the next launch"
        if device == "cuda"
        else "is framework overhead, for on a CPU the thread that launches a kernel also runs it"
    )
    return metrics, {"scope": "graph", "device": device, "nodes": (), "launch": "", "gap_is": gap_is}


def group_metrics(
    row: Mapping[Any, Any], profile: Profile, ceilings: Ceilings
) -> tuple[dict[str, Metric], dict[str, Any]]:
    """Metrics and facts of one row of ``Profile.groups()``; a metric that cannot be had is absent."""
    facts = _group_facts(row, profile, ceilings)
    given: list[tuple[str, Any, str, Source]] = [
        ("time_ns", row["time_ns"], "ns", "measured"),
        ("flops", row["flops"], "FLOP", "modelled"),
        ("bytes", row["bytes"], "byte", "modelled"),
        ("copy_ceiling", ceilings.copy_bytes_per_s, "byte/s", "ceiling"),
        ("flop_ceiling", ceilings.flops_per_s.get(facts["compute_dtype"]), "FLOP/s", "ceiling"),
        ("narrow_ceiling", ceilings.flops_per_s.get("bfloat16"), "FLOP/s", "ceiling"),
        ("last_level_cache_bytes", ceilings.environment.get("last_level_cache_bytes"), "byte", "ceiling"),
        ("dtype_bits", _BITS.get(facts["compute_dtype"]), "bit", "modelled"),
    ]
    metrics = {name: Metric(float(v), unit, source) for name, v, unit, source in given if _known(v)}
    # A launch that never ran in the window, or that moves nothing, has no rates.
    for name in ("time_ns", "bytes", "copy_ceiling"):
        if name in metrics and metrics[name].value <= 0:
            del metrics[name]
    facts["cached"] = ""
    value = {name: metric.value for name, metric in metrics.items()}
    if value.get("bytes", math.inf) <= value.get("last_level_cache_bytes", 0):
        facts["cached"] = ", though they fit in the last-level cache and need not come from memory"
    derived: dict[str, tuple[Callable[[], float], str, tuple[str, ...]]] = {
        "bandwidth": (lambda: value["bytes"] / value["time_ns"] * 1e9, "byte/s", ("bytes", "time_ns")),
        "flop_rate": (lambda: value["flops"] / value["time_ns"] * 1e9, "FLOP/s", ("flops", "time_ns")),
        "bandwidth_fraction": (
            lambda: value["bandwidth"] / value["copy_ceiling"],
            "1",
            ("bandwidth", "copy_ceiling"),
        ),
        "flop_fraction": (
            lambda: value["flop_rate"] / value["flop_ceiling"],
            "1",
            ("flop_rate", "flop_ceiling"),
        ),
        "intensity": (lambda: value["flops"] / value["bytes"], "FLOP/byte", ("flops", "bytes")),
        "ridge": (
            lambda: value["flop_ceiling"] / value["copy_ceiling"],
            "FLOP/byte",
            ("flop_ceiling", "copy_ceiling"),
        ),
        "memory_floor_ns": (
            lambda: value["bytes"] / value["copy_ceiling"] * 1e9,
            "ns",
            ("bytes", "copy_ceiling"),
        ),
        "roofline_ns": (
            lambda: max(value["memory_floor_ns"], value["flops"] / value["flop_ceiling"] * 1e9),
            "ns",
            ("memory_floor_ns", "flops", "flop_ceiling"),
        ),
        "narrow_floor_ns": (
            lambda: max(value["memory_floor_ns"], value["flops"] / value["narrow_ceiling"] * 1e9),
            "ns",
            ("memory_floor_ns", "flops", "narrow_ceiling"),
        ),
        "time_over_floor": (
            lambda: value["time_ns"] / value["narrow_floor_ns"],
            "1",
            ("time_ns", "narrow_floor_ns"),
        ),
        "rate_ratio": (
            lambda: value["narrow_ceiling"] / value["flop_ceiling"],
            "1",
            ("narrow_ceiling", "flop_ceiling"),
        ),
    }
    for name, (compute, unit, needs) in derived.items():
        if all(need in value for need in needs):
            value[name] = compute()
            sources = {metrics[need].source for need in needs}
            source: Source = "modelled" if "modelled" in sources else "ceiling"
            metrics[name] = Metric(value[name], unit, source)
    return metrics, facts


_NO_UNITS = ("int", "uint", "bool", "bfloat16", "float16", "float8")
_BITS = {"float32": 32, "tf32": 19, "bfloat16": 16, "float16": 16, "float64": 64}


def _group_facts(row: Mapping[Any, Any], profile: Profile, ceilings: Ceilings) -> dict[str, Any]:
    members = profile.nodes[profile.nodes["node"].isin(list(row["nodes"]))]
    products = [
        (str(node), str(target), str(dtype))
        for node, target, dtype in zip(members["node"], members["target"], members["dtype"], strict=True)
        if is_matrix_product(str(target))
    ]
    # aten.mm.dtype and its kin take 16-bit inputs and give float32: the product's type is not the output's.
    widening = any(target.endswith(".dtype") for _, target, _ in products)
    wide = tuple(
        name for name, target, dtype in products if dtype == "float32" and not target.endswith(".dtype")
    )
    tf32 = _tf32(profile, [target for name, target, _ in products if name in wide])
    dtype = "bfloat16" if widening else str(row["dtype"])
    if tf32 and "tf32" in ceilings.flops_per_s:
        dtype = "tf32"
    elif dtype not in ceilings.flops_per_s and dtype.startswith(_NO_UNITS):
        dtype = "float32"  # the rate that types without units of their own reach at best
    return {
        "scope": "group",
        "device": _device_type(profile),
        "launch": row["launch"],
        "nodes": tuple(row["nodes"]),
        "compute_dtype": dtype,
        "float32_products": wide,
        "narrow_units": "bfloat16" in ceilings.flops_per_s,
        "tf32_on": "TF32 is on for matrix products, so tensor cores already run them" if tf32 else "",
    }


def _tf32(profile: Profile, targets: list[str]) -> bool:
    """Whether all of these float32 products ran in TF32, from the settings that the profile recorded."""
    if not targets or _device_type(profile) != "cuda":
        return False
    settings = profile.environment
    return all(
        bool(settings.get("cudnn_allow_tf32" if "conv" in target else "allow_tf32")) for target in targets
    )
