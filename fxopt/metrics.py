"""What rules read: numbers about the graph, each fused group and each kernel outside of the graphs, with units and
where they come from; and facts that are no numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxopt.labels import Source
from fxopt.launch_records import LaunchRecords
from profiler_core import counters
from profiler_core.cost import is_matrix_product

if TYPE_CHECKING:

    from profiler_core.profiles import Profile
    from profiler_core.roofline import Ceilings

__all__ = ["DERIVED", "GraphTimes", "Metric", "Subject", "graph_metrics", "lacked", "subjects"]


@dataclass(frozen=True)
class Metric:
    """A number about a graph, a group or a kernel, with its unit and where it comes from."""

    value: float
    unit: str
    source: Source


Subject = tuple[dict[str, Metric], dict[str, Any]]
"""Metrics by name, where one that cannot be had is absent, and facts."""


@dataclass(frozen=True)
class GraphTimes:
    """The part of a profile that the graph's own labels need."""

    wall_ns: float
    kernel_ns: float
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Derived:
    """A metric made of others: ``compute`` gets the values of ``needs`` in their order."""

    name: str
    unit: str
    needs: tuple[str, ...]
    compute: Callable[..., float]


def _share_left(time: float, unit: float, *others: float) -> float:
    """Time saved if ``unit`` took no time: the next busiest one then limits."""
    return time * (1 - max(others) / unit) if unit > 0 else 0.0


def _grid_efficiency(blocks: float, sms: float, waves: float) -> float:
    """The share of the device that the grid keeps busy: SMs that have a block, or waves of the whole ones it takes."""
    return min(1.0, blocks / sms) if waves <= 1 else waves / math.ceil(waves - 1e-9)


# Later rows may use earlier ones.
DERIVED: tuple[Derived, ...] = (
    Derived("launch_gap", "1", ("wall_ns", "kernel_ns"), lambda w, k: 1 - k / w),
    # -- modelled work against measured ceilings: the roofline
    Derived("bandwidth", "byte/s", ("bytes", "time_ns"), lambda b, t: b / t * 1e9),
    Derived("flop_rate", "FLOP/s", ("flops", "time_ns"), lambda f, t: f / t * 1e9),
    Derived("bandwidth_fraction", "1", ("bandwidth", "copy_ceiling"), lambda b, c: b / c),
    Derived("flop_fraction", "1", ("flop_rate", "flop_ceiling"), lambda f, c: f / c),
    Derived("intensity", "FLOP/byte", ("flops", "bytes"), lambda f, b: f / b),
    Derived("ridge", "FLOP/byte", ("flop_ceiling", "copy_ceiling"), lambda f, c: f / c),
    Derived("memory_floor_ns", "ns", ("bytes", "copy_ceiling"), lambda b, c: b / c * 1e9),
    Derived("compute_floor_ns", "ns", ("flops", "flop_ceiling"), lambda f, c: f / c * 1e9),
    Derived("roofline_ns", "ns", ("memory_floor_ns", "compute_floor_ns"), max),
    Derived("roofline_fraction", "1", ("roofline_ns", "time_ns"), lambda r, t: r / t),
    Derived(
        "narrow_floor_ns",
        "ns",
        ("memory_floor_ns", "flops", "narrow_ceiling"),
        lambda m, f, c: max(m, f / c * 1e9),
    ),
    Derived(  # of a product without work there is none
        "time_over_floor",
        "1",
        ("time_ns", "narrow_floor_ns", "flops"),
        lambda t, m, f: t / m if f else math.nan,
    ),
    Derived("rate_ratio", "1", ("narrow_ceiling", "flop_ceiling"), lambda n, f: n / f),
    # -- counters: how busy each unit of the device is
    Derived("arithmetic", "%", ("sm_throughput", "tensor_active"), max),
    Derived("busiest", "%", ("dram_throughput", "l2_throughput", "arithmetic"), max),
    Derived("dram_bytes", "byte", ("dram_read_bytes", "dram_write_bytes"), lambda r, w: r + w),
    Derived("excess_bytes", "byte", ("dram_bytes", "bytes"), lambda d, b: d - b),
    Derived("traffic_ratio", "1", ("dram_bytes", "bytes"), lambda d, b: d / b),
    # A load from local memory by a whole warp is 32 threads times 4 bytes; wider ones make the share an underestimate.
    Derived("spill_share", "1", ("local_load_bytes", "instructions"), lambda b, n: b / 128 / n if n else 0.0),
    # Instructions issued per cycle that elapsed, over those per cycle in which an SM had warps: the share of SMs at
    # work. An upper bound, for another pipe than the issue slots may be the busiest.
    Derived("sm_active", "1", ("sm_throughput", "issue_active"), lambda s, i: min(1.0, s / i) if i else math.nan),
    # -- the launch
    Derived("grid_efficiency", "1", ("blocks", "sm_count", "waves_per_sm"), _grid_efficiency),
    Derived(
        "occupancy_reached",
        "1",
        ("achieved_occupancy", "theoretical_occupancy"),
        lambda a, t: a / t if t else 1.0,
    ),
    # -- what removing a limit could save at most
    Derived("save_launch_ns", "ns", ("wall_ns", "kernel_ns"), lambda w, k: w - k),
    Derived("save_memory_ns", "ns", ("time_ns", "dram_throughput", "l2_throughput", "arithmetic"), _share_left),
    Derived("save_l2_ns", "ns", ("time_ns", "l2_throughput", "dram_throughput", "arithmetic"), _share_left),
    Derived("save_compute_ns", "ns", ("time_ns", "arithmetic", "dram_throughput", "l2_throughput"), _share_left),
    Derived("save_memory_modelled_ns", "ns", ("time_ns", "compute_floor_ns"), lambda t, c: t - c),
    Derived("save_compute_modelled_ns", "ns", ("time_ns", "memory_floor_ns"), lambda t, m: t - m),
    Derived("save_narrow_ns", "ns", ("time_ns", "narrow_floor_ns"), lambda t, f: t - f),
    Derived("save_narrow_unmodelled_ns", "ns", ("time_ns", "rate_ratio"), lambda t, r: t * (1 - 1 / r)),
    Derived("save_latency_ns", "ns", ("time_ns", "busiest"), lambda t, b: t * (1 - b / 100)),
    Derived("save_latency_modelled_ns", "ns", ("time_ns", "roofline_ns"), lambda t, r: t - r),
    Derived(
        "save_occupancy_ns",
        "ns",
        ("time_ns", "busiest", "theoretical_occupancy"),
        lambda t, b, o: t * (1 - max(b, o) / 100),
    ),
    Derived(
        "save_occupancy_modelled_ns",
        "ns",
        ("time_ns", "roofline_ns", "theoretical_occupancy"),
        lambda t, r, o: t - max(r, t * o / 100),
    ),
    Derived("save_idle_sms_ns", "ns", ("time_ns", "sm_active"), lambda t, a: t * (1 - a)),
    Derived("save_waves_ns", "ns", ("time_ns", "grid_efficiency"), lambda t, e: t * (1 - e)),
    # For each load there was a store, of which no counter is read.
    Derived("save_spill_ns", "ns", ("time_ns", "spill_share"), lambda t, s: t * min(1.0, 2 * s)),
    Derived("save_divergence_ns", "ns", ("time_ns", "threads_per_instruction"), lambda t, n: t * (1 - n / 32)),
    Derived(
        "save_excess_ns",
        "ns",
        ("time_ns", "excess_bytes", "copy_ceiling"),
        lambda t, e, c: min(t, e / c * 1e9),
    ),
    Derived("excess_share", "1", ("save_excess_ns", "time_ns"), lambda s, t: s / t),
)

_CERTAINTY: tuple[Source, ...] = ("modelled", "ceiling", "measured")  # the least certain first
_COUNTER_UNITS = {counter.key: counter.unit for counter in counters.COUNTERS}


def graph_metrics(profile: Profile | GraphTimes) -> Subject:
    """Metrics (wall_ns, kernel_ns, launch_gap) and facts of the graph."""
    device = _device_type(profile)
    metrics = {
        name: Metric(float(value), "ns", "measured")
        for name, value in (("wall_ns", profile.wall_ns), ("kernel_ns", profile.kernel_ns))
        if _known(value) and value > 0
    }
    _derive(metrics)
    gap_is = (
        "the device waits for the next launch"
        if device == "cuda"
        else "is framework overhead, for on a CPU the thread that launches a kernel also runs it"
    )
    return metrics, {"scope": "graph", "device": device, "nodes": (), "launch": "", "gap_is": gap_is}


class _NoCeilings:
    """Of a device of which no ceilings are known: what rests on them is missing."""

    copy_bytes_per_s: None = None
    flops_per_s: Mapping[str, float] = {}
    environment: Mapping[str, Any] = {}


def subjects(profile: Profile, ceilings: Ceilings | None) -> Iterator[Subject]:
    """What group rules look at: each launch of compiled code, then what is outside of it: each node whose work is
    modelled, with all its kernels, and each other kernel by operator and name.
    """
    rates = ceilings if ceilings is not None else _NoCeilings()
    records = LaunchRecords(profile)
    columns = (profile.nodes[name] for name in ("graph", "node", "target", "dtype"))
    nodes = {(graph, node): (str(target), str(dtype)) for graph, node, target, dtype in zip(*columns, strict=True)}
    for row in profile.groups().to_dict("records"):
        members = [(name, *nodes.get((row["graph"], name), ("", ""))) for name in row["nodes"]]
        yield _subject(row, records.launch(row["graph"], row["launch"]), members, profile, rates)
    for outside in records.outside():
        if outside.get("flops") == 0 and outside.get("bytes") == 0:
            continue  # views, and copies that were not needed: there is nothing to limit
        target, dtype = str(outside.get("target") or ""), str(outside.get("dtype") or "")
        members = [(name, (target or name).replace("::", "."), dtype) for name in outside["nodes"]]
        yield _subject(outside, outside, members, profile, rates)


_Member = tuple[str, str, str]  # a node's name, its target, its type


def _subject(
    row: Mapping[Any, Any],
    record: Mapping[str, Any],
    members: Sequence[_Member],
    profile: Profile,
    ceilings: Ceilings | _NoCeilings,
) -> Subject:
    facts = _facts(row, record, members, profile, ceilings)
    given: list[tuple[str, Any, str, Source]] = [
        ("time_ns", row["time_ns"], "ns", "measured"),
        ("flops", row.get("flops"), "FLOP", "modelled"),
        ("bytes", row.get("bytes"), "byte", "modelled"),
        ("copy_ceiling", ceilings.copy_bytes_per_s, "byte/s", "ceiling"),
        ("flop_ceiling", ceilings.flops_per_s.get(facts["compute_dtype"]), "FLOP/s", "ceiling"),
        ("narrow_ceiling", ceilings.flops_per_s.get("bfloat16"), "FLOP/s", "ceiling"),
        ("last_level_cache_bytes", ceilings.environment.get("last_level_cache_bytes"), "byte", "ceiling"),
        ("dtype_bits", _BITS.get(facts["compute_dtype"]), "bit", "modelled"),
        # Of the launch record: they are what was launched, or follow from it by the rules of the hardware.
        ("theoretical_occupancy", record.get("theoretical_occupancy"), "%", "modelled"),
        ("waves_per_sm", record.get("waves_per_sm"), "wave", "modelled"),
        ("registers", record.get("registers"), "register", "measured"),
        ("shared_memory", record.get("shared_memory"), "byte", "measured"),
        ("blocks", record.get("blocks"), "block", "measured"),
        ("threads_per_block", record.get("threads_per_block"), "thread", "measured"),
        ("sm_count", profile.environment.get("sm_count"), "SM", "measured"),
        ("opaque_share", record.get("opaque_share"), "1", "measured"),
        ("layout_share", _layout_share(facts, record), "1", "modelled"),
        ("cast_share", facts["casts"], "1", "modelled"),
    ]
    named = {name for name, *_ in given}
    given += [(key, row.get(key), unit, "measured") for key, unit in _COUNTER_UNITS.items() if key not in named]
    metrics = {name: Metric(float(v), unit, source) for name, v, unit, source in given if _known(v)}
    # A launch that never ran in the window, or that moves nothing, has no rates.
    for name in ("time_ns", "bytes", "copy_ceiling", "flop_ceiling", "narrow_ceiling"):
        if name in metrics and metrics[name].value <= 0:
            del metrics[name]
    _derive(metrics)
    size, cache = metrics.get("bytes"), metrics.get("last_level_cache_bytes")
    fits = size is not None and cache is not None and size.value <= cache.value
    facts["cached"] = ", though they fit in the last-level cache and need not come from memory" if fits else ""
    return metrics, facts


def _derive(metrics: dict[str, Metric]) -> None:
    """Adds what can be computed; its source is the least certain of what it is made of."""
    for item in DERIVED:
        if item.name in metrics or not all(need in metrics for need in item.needs):
            continue
        value = float(item.compute(*(metrics[need].value for need in item.needs)))
        if math.isfinite(value):
            source = min((metrics[need].source for need in item.needs), key=_CERTAINTY.index)
            metrics[item.name] = Metric(value, item.unit, source)


def lacked(names: Sequence[str], known: Container[str]) -> list[str]:
    """What has to be measured or modelled for the metrics ``names``, of which all are missing: none of it is derived
    (or it is, and cannot be computed for these values).
    """
    needs = {item.name: item.needs for item in DERIVED}
    found: dict[str, None] = {}
    for name in names:
        below = [need for need in needs.get(name, ()) if need not in known]
        found.update(dict.fromkeys(lacked(below, known) if below else [name]))
    return list(found)


# --- facts -------------------------------------------------------------------------------------------------

_NO_UNITS = ("int", "uint", "bool", "bfloat16", "float16", "float8")
_BITS = {"float32": 32, "tf32": 19, "bfloat16": 16, "float16": 16, "float64": 64}
_PRECISIONS = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
_VIEWS = frozenset(
    {"view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice"}
    | {"select", "alias", "split", "split_with_sizes", "unbind", "chunk", "detach", "as_strided", "getitem"}
)
_COPIES = frozenset(
    {"clone", "copy", "copy_", "contiguous", "flip", "rev", "view_copy", "permute_copy", "transpose_copy"}
)
_CASTS = frozenset({"convert_element_type", "_to_copy", "to"})


def _facts(
    row: Mapping[Any, Any],
    record: Mapping[str, Any],
    members: Sequence[_Member],
    profile: Profile,
    ceilings: Ceilings | _NoCeilings,
) -> dict[str, Any]:
    products = [member for member in members if is_matrix_product(member[1])]
    # aten.mm.dtype and its kin take 16-bit inputs and give float32: the product's type is not the output's.
    widening = any(target.endswith(".dtype") for _, target, _ in products)
    wide = tuple(
        name for name, target, dtype in products if dtype == "float32" and not target.endswith(".dtype")
    )
    outside = row.get("scope") == "kernel"
    named = outside and record["family"] in ("gemm", "gemv", "convolution") and record["precision"] in ("fp32", "")
    if named and "dtype" not in row:
        wide = tuple(row["nodes"])  # of a kernel whose operator's inputs are not known only its name tells the type
    elif outside and record["precision"] not in ("fp32", ""):
        wide = ()  # the kernel's name says that it runs on narrower units
    tf32 = _tf32(profile, [target for name, target, _ in members if name in wide])
    dtype = "bfloat16" if widening else str(row.get("dtype"))
    if outside and (record["precision"] or not row.get("dtype")):
        dtype = _PRECISIONS.get(record["precision"], "float32")
    elif tf32 and "tf32" in ceilings.flops_per_s:
        dtype = "tf32"
    elif dtype not in ceilings.flops_per_s and dtype.startswith(_NO_UNITS):
        dtype = "float32"  # the rate that types without units of their own reach at best
    work = [_operator(target) for _, target, _ in members if _operator(target) not in _VIEWS]
    limiter = record.get("occupancy_limiter")
    casts = bool(work) and set(work) <= _CASTS | _COPIES and bool(set(work) & _CASTS)
    return {
        "scope": "kernel" if outside else "group",
        "device": _device_type(profile),
        "launch": row["launch"],
        "backward": "backward" in str(row.get("graph", "")),
        "nodes": tuple(row["nodes"]),
        "compute_dtype": dtype,
        "float32_products": wide,
        "narrow_units": "bfloat16" in ceilings.flops_per_s or isinstance(ceilings, _NoCeilings),
        "tf32_on": "TF32 is on for matrix products, so tensor cores already run them" if tf32 else "",
        "limiter": limiter if isinstance(limiter, str) and limiter else "resources",
        "copies": bool(work) and set(work) <= _COPIES,
        "casts": float(casts),
        "library": record.get("family") or "unknown",
        "black_box": bool(record.get("black_box")) and not _known(row.get("flops")),
        "product": bool(wide) or (named and "dtype" not in row),
    }


def _operator(target: str) -> str:
    """ "clone" of "aten.clone.default", "getitem" of "_operator.getitem"."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 and parts[0] in ("aten", "prims", "_operator") else target


def _layout_share(facts: Mapping[str, Any], record: Mapping[str, Any]) -> float:
    """1 where the nodes only copy, else the time of the library's kernels that change layouts."""
    return 1.0 if facts["copies"] else float(record.get("layout_share") or 0.0)


def _tf32(profile: Profile, targets: Sequence[str]) -> bool:
    """Whether all of these float32 products ran in TF32, from the settings that the profile recorded."""
    if not targets or _device_type(profile) != "cuda":
        return False
    settings = profile.environment
    return all(
        bool(settings.get("cudnn_allow_tf32" if "conv" in target else "allow_tf32")) for target in targets
    )


def _device_type(profile: Profile | GraphTimes) -> str:
    return str(profile.environment.get("device_type") or "cpu").split(":")[0]


def _known(value: Any) -> bool:
    return value is not None and isinstance(value, (int, float)) and math.isfinite(value)
