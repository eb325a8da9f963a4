"""A made-up profile of any size, with everything that a profile can hold: what a page or an export has to cope with."""

from __future__ import annotations

import numpy as np
import pandas as pd

from profiler_core.collect.provenance import Launch
from profiler_core.counters import COUNTERS
from profiler_core.profiles import KERNEL_COLUMNS, NODE_COLUMNS, Profile, frame

CALLS = 10
LAUNCHES = 20  # a layer
NODES = 3  # a launch
FAMILIES = ("gemm", "pointwise", "reduction", "attention")
NAME = (
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_{width}x128_32x3_tn_align8>"
    "(cutlass::gemm::kernel::GemmUniversal<int, float, {width}>::Params, std::array<char*, 4ul>, layer_{kind})"
)


def large_profile(kernels: int = 10_000, seed: int = 0) -> Profile:
    """``kernels`` launches over ten calls, of layers of 20 launches and 60 nodes; every kernel has every counter."""
    random = np.random.default_rng(seed)
    launches = max(LAUNCHES, kernels // CALLS)
    made, nodes = [], []
    for i in range(launches):
        layer, place = divmod(i, LAUNCHES)
        names = tuple(f"{'mm' if place % 4 == 0 else 'add'}_{i * NODES + j}" for j in range(NODES))
        flops, moved = float(random.integers(10**6, 10**10)), float(random.integers(10**5, 10**8))
        made.append(Launch(f"triton_poi_fused_add_mul_{place}", i, names, place % 4 == 0, flops, moved, "0/0"))
        nodes += [_node(name, layer, place, made[-1], flops / NODES, moved / NODES) for name in names]
    table = _kernels(random, made, kernels)
    profile = Profile(table, frame(nodes, NODE_COLUMNS), _ENVIRONMENT, CALLS, 0.0, tuple(made), ("made up",))
    profile.wall_ns = float(1.1 * profile.kernel_ns)
    _add_times(profile)
    return profile


_ENVIRONMENT = {"device_type": "cuda", "device_name": "a made-up GPU", "sm_count": 132, "torch": "2.13.0"}


def _node(name: str, layer: int, place: int, launch: Launch, flops: float, moved: float) -> dict[str, object]:
    return {
        "graph": "0/0",
        "node": name,
        "kind": "node",
        "target": f"aten.{name.split('_')[0]}.Tensor",
        "shape": (8, 128, 768),
        "dtype": "bfloat16",
        "module_path": f"model.layers.{layer}.part{place % 5}",
        "module_class": "Linear",
        "file": "/home/somebody/project/model.py",
        "line": 100 + place,
        "source": f"x = self.part{place % 5}(x) + x",
        "pre_grad": (f"linear_{layer}",),
        "kernels": 1,
        "time_ns": 0.0,
        "group_time_ns": 0.0,
        "window_ns": 0,
        "share": 0.0,
        "estimate": True,
        "fused_with": tuple(other for other in launch.nodes if other != name),
        "flops": flops,
        "bytes": moved,
        "launches": (launch.key,),
        "opaque": False,
    }


def _kernels(random: np.random.Generator, launches: list[Launch], count: int) -> pd.DataFrame:
    which = np.arange(count) % len(launches)
    duration = random.gamma(2.0, 5_000.0, count).astype("int64") + 800
    start = 1_700_000_000_000_000_000 + np.cumsum(duration + random.integers(200, 3_000, count)) - duration
    listed = [launches[i] for i in which]
    columns = {
        "name": [NAME.format(width=64 << i % 3, kind=i % 37) for i in which],
        "kind": "kernel",
        "process": 1,
        "device": "cuda:0",
        "stream": 7 + which % 3,
        "start_ns": start,
        "duration_ns": duration,
        "thread": 11,
        "launch_ns": start - random.integers(4_000, 90_000, count),
        "grid": [(int(i % 97) + 1, 8, 1) for i in which],
        "block": [(128, 1, 1)] * count,
        "registers": 32 + which % 200,
        "shared_memory": 1024 * (which % 90),
        "correlation": np.arange(count),
        "iteration": np.arange(count) // len(launches),
        "operator": "aten::mm",
        "top_operator": "aten::linear",
        "operator_method": "correlation",
        "graph": "0/0",
        "launch": [x.key for x in listed],
        "nodes": [x.nodes for x in listed],
        "method": "correlation",
        "confidence": "high",
        "reason": "",
        "evidence": [()] * count,
        "spans": [()] * count,
        "family": [FAMILIES[i % 4] for i in which],
        "precision": "bf16",
        "opaque": which % 4 == 0,
        "theoretical_occupancy": 50.0,
        "occupancy_limiter": "registers",
        "waves_per_sm": 1.5,
    }
    table = pd.DataFrame({name: columns[name] for name in KERNEL_COLUMNS}).astype(KERNEL_COLUMNS)
    for counter in COUNTERS:
        if counter.key not in table:
            table[counter.key] = random.gamma(2.0, 20.0, count) * (1.0 if counter.unit == "%" else 1e4)
    table["counters"] = "measured"
    return table


def _add_times(profile: Profile) -> None:
    times = profile.window.groupby("launch")["duration_ns"].sum()
    window = profile.nodes["launches"].map(lambda keys: int(times.get(keys[0], 0)))
    profile.nodes["window_ns"] = (window // NODES).astype("int64")
    profile.nodes["group_time_ns"] = window / CALLS
    profile.nodes["time_ns"] = window / NODES / CALLS
    profile.nodes["share"] = window / NODES / profile.total_ns
