"""What the tests of the page in a browser look at: reports made by hand, and the page's own signs of being ready."""

from __future__ import annotations

import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import made_profiles
import made_reports
import numpy as np

from fxopt.labels import Axis
from fxopt.report.model import GraphReport, Report
from profiler_core.collect.provenance import Launch
from profiler_core.profiles import Profile

FILE = "/home/alice/net/model.py"
LAYERS = 12
CALLS = 2


def layered() -> Profile:
    """Twelve layers of a product and a fused pair, two calls on two streams, with counters; one kernel of no node."""
    kernels, nodes, launches = [], [], []
    for i in range(LAYERS):
        mm, add, mul = f"mm_{i}", f"add_{i}", f"mul_{i}"
        product, fused = f"extern_kernels.mm:{2 * i}", f"triton_poi_fused_add_mul_{i}:{2 * i + 1}"
        launches += [
            Launch("extern_kernels.mm", 2 * i, (mm,), True, 2e9, 4e6, "0/0"),
            Launch(f"triton_poi_fused_add_mul_{i}", 2 * i + 1, (add, mul), False, 1e6, 8e6, "0/0"),
        ]
        for call in range(CALLS):
            start = made_profiles.T + 1_000_000 * call + 60_000 * i
            own = {"iteration": call, "operator": "aten::mm"}
            kernels += [
                made_profiles.kernel(f"sm80_gemm_{i % 3}", start, 30_000 + i, nodes=(mm,), launch=product, **own),
                made_profiles.kernel(
                    f"triton_poi_fused_add_mul_{i}", start + 40_000, 8_000, nodes=(add, mul), launch=fused,
                    family="pointwise", opaque=False, stream=9, **own,
                ),
            ]  # fmt: skip
        shared = {"module_path": f"h.{i}.mlp", "module_class": "MLP", "file": FILE}
        times = {"time_ns": 30_000.0 + i, "group_time_ns": 30_000.0 + i, "share": 0.06}
        nodes.append(
            made_profiles.node(mm, line=12, source="x = x @ self.w", launches=(product,), flops=2e9, **shared, **times)
        )
        times = {"time_ns": 4_000.0, "group_time_ns": 8_000.0, "share": 0.01, "estimate": True, "bytes": 4e6}
        for name, other in ((add, mul), (mul, add)):
            line = {"line": 13, "source": "return (x + 1) * 2", "launches": (fused,), "fused_with": (other,)}
            nodes.append(made_profiles.node(name, opaque=False, **line, **shared, **times))
    lost = {"nodes": (), "method": "none", "confidence": "none", "launch": "", "reason": "no launch in the trace"}
    kernels.append(made_profiles.kernel("Memcpy HtoD", made_profiles.T + 900_000, 2_000, kind="memcpy", **lost))
    made = made_profiles.build(kernels, nodes)
    counters = {"dram_read_bytes": 3e6, "dram_write_bytes": 1e6, "dram_throughput": 71.5, "l1_hit_rate": np.nan}
    table = made.kernels.assign(**counters, counters="measured")
    sources = {FILE: {10: "def forward(self, x):", 11: "    # a comment", 12: "    x = x @ self.w"}}
    sources[FILE][13] = "    return (x + 1) * 2"
    return dataclasses.replace(
        made, kernels=table, launches=tuple(launches), wall_ns=1.2e6, sources=sources, environment=_environment()
    )


def _environment() -> dict[str, Any]:
    return {"device_name": "NVIDIA H200", "device_type": "cuda", "sm_count": 132, "clocks": {"sm_mhz": 1980}}


CHANGE = "\n".join([*(f" view_{i} = aten.view(x)" for i in range(20)), "-mm: before", "+mm: after", " return (mm,)"])


def tuned() -> Report:
    """Two graphs: one that was changed, and one that was left as it was."""
    changed, left = made_reports.graph(layered()), made_reports.graph(layered())
    product = made_reports.label(Axis.TENSOR_CORE_IDLE, 2e4, ("mm_0",))
    changed.labels = [dataclasses.replace(product, launch="extern_kernels.mm:0"), made_reports.label(nodes=())]
    kept = changed.candidates[-1]
    kept.reports = [dataclasses.replace(report, change=CHANGE) for report in kept.reports]
    left.decision, left.ratio, left.verdict, left.candidates = "baseline", None, None, left.candidates[:1]
    left.ablation, left.kept_wall_ns = [], left.baseline_wall_ns
    return Report([changed, left, GraphReport(source="fallback", messages=["it failed"])], ["a message"])


def slower(profile: Profile) -> Profile:
    made = copy.deepcopy(profile)
    made.kernels["duration_ns"] = (made.kernels["duration_ns"] * 2).astype("int64")
    return made


HOSTILE_NAMES = {
    **made_profiles.HOSTILE,
    "image": '<img src=x onerror="window.fxoptHit = 1">',
    "plain script": "<script>window.fxoptHit = 2</script>",
    "comment": "<!-- <script>",
    "attribute": '" onmouseover="window.fxoptHit = 3" x=\'',
    "template": "@DATA@ @SCRIPT@ ${window.fxoptHit = 4} {{fxoptHit = 5}}",
    "link": '<a href="javascript:window.fxoptHit = 6">x</a>',
    "override": "\u202e" + "gnirts desrever",
    "svg": "<svg/onload=window.fxoptHit=7>",
    "proto": "__proto__",
    "constructor": "constructor",
}
"""Names as nobody but an attacker gives them; whatever of them runs leaves `window.fxoptHit`."""


def hostile() -> Report:
    """Every text of a report is such a name."""
    names = list(HOSTILE_NAMES.values())
    kernels, nodes, launches = [], [], []
    for i, name in enumerate(names):
        place = {"launch": f"{name}:{i}", "nodes": (name, f"n{i}"), "operator": name, "stream": i % 3}
        kernels.append(made_profiles.kernel(name, made_profiles.T + 9_000 * i, 4_000 + 100 * i, family="", **place))
        lost = {"method": "none", "reason": name, "nodes": (), "launch": "", "device": name}
        kernels.append(made_profiles.kernel(name, made_profiles.T + 9_000 * i, 50, operator=name, **lost))
        text = dict.fromkeys(("target", "module_path", "module_class", "file", "source", "dtype"), name)
        times = {"time_ns": 1_000.0 + i, "share": 0.02, "launches": (f"{name}:{i}",), "fused_with": (name,)}
        nodes += [made_profiles.node(name, line=i + 1, pre_grad=(name,), **text, **times)]
        launches.append(Launch(name, i, (name, f"n{i}"), True, 1e9 + i, 1e6, "0/0"))
    made = made_profiles.build(kernels, nodes)
    environment = {"device_name": names[7], **{name: name for name in names}}
    made = dataclasses.replace(made, launches=tuple(launches), environment=environment, notes=tuple(names), wall_ns=2e6)
    report = made_reports.hostile()
    (only,) = report.graphs
    kept = only.candidates[-1]
    kept.reports = [
        dataclasses.replace(one, change="\n".join("-+ "[i % 3] + n for i, n in enumerate(names)))
        for one in kept.reports
    ]
    only.profile = made
    only.labels = [
        dataclasses.replace(made_reports.label(), nodes=(name,), launch=f"{name}:{i}", why=name, reference=name)
        for i, name in enumerate(names)
    ]
    return Report([only, made_reports.graph(made)], names, report.eager_modules)


def wait(driver: Any, sign: str, seconds: float = 60.0) -> None:
    """Until the page says so: "rendered" when it can be read, "ready" when plots can be drawn, "drawn" when all stand.
    The limit is for a hang.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if driver.execute_script(f"return document.documentElement.dataset.{sign} === 'true'"):
            return
        time.sleep(0.02)
    raise TimeoutError(f"the page was not {sign} within {seconds} s: {driver.get_log('browser')}")


def open_page(driver: Any, path: Path, sign: str = "rendered") -> None:
    driver.get("about:blank")
    for log in ("browser", "performance"):
        driver.get_log(log)  # what came before is not this page's
    driver.get(path.as_uri())
    wait(driver, sign)
