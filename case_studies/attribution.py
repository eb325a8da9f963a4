"""How much of a model's kernel time is attributed, by which tool, at what cost, and whether the tools agree.

    python -m case_studies.attribution [WORKLOAD ...] [--tools torch,cupti,nsys] [--json FILE]   (--help)

"torch" is torch.profiler in this process, "cupti" hardware counters in this process, "nsys" a run of the same program
under nsys and, for counters, under ncu. With several, they are compared kernel by kernel.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from case_studies import show
from case_studies.workloads import WORKLOADS, build

if TYPE_CHECKING:
    from profiler_core.profiles import Profile

TOOLS = ("torch", "cupti", "nsys")
PROGRAM_CALLS = 2
REPLAYED_AT_MOST = 200  # kernels: replaying each of them takes a tenth of a second
LONG_NS = 20_000  # kernels above it are compared one by one: of shorter ones, start-up is a large part


def program(name: str, device: torch.device, small: bool) -> None:
    """What runs under nsys and ncu: warm-up, then the marked calls."""
    from profiler_core import measured

    model, x = build(name, device, small=small)
    compiled = torch.compile(model)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        for _ in measured(PROGRAM_CALLS):
            compiled(x)


def study(name: str, device: torch.device, small: bool, tools: Sequence[str], folder: Path) -> dict[str, Any]:
    """One workload with the tools asked for, as a JSON-able document."""
    from profiler_core import profile

    torch.compiler.reset()
    model, x = build(name, device, small=small)
    compiled = torch.compile(model)
    document: dict[str, Any] = {"workload": WORKLOADS[name].what if not small else f"{name}, small"}
    with torch.no_grad():
        mine = profile(compiled, x, counters="none", store=folder / "provenance")
        document["torch"] = summary(mine)
        if "cupti" in tools and device.type == "cuda":
            document["cupti"] = counter_cost(compiled, x, mine)
            # Primed, because the program's two calls under ncu follow each other too.
            mine = profile(compiled, x, counters="full", primed=True, store=folder / "provenance")
            document["cupti"]["notes"] = list(mine.notes)
            document["cupti"]["kernels"] = _counted(mine)
            if _kernels(mine) <= REPLAYED_AT_MOST:
                document["deduplication"] = deduplication(compiled, x, folder / "provenance")
    if "nsys" in tools and device.type == "cuda":
        document["nsys"] = outside(name, small, mine, folder / name)
    return document


def deduplication(compiled: Any, x: torch.Tensor, store: Path) -> dict[str, Any]:
    """Kernel replay of every kernel against one launch of each class of equal layers, carried to its twins."""
    from profiler_core import profile

    found: dict[str, Any] = {}
    taken = {}
    for label, wanted in (("every kernel", False), ("one of each class", True)):
        start = time.perf_counter()
        taken[label] = profile(compiled, x, counters="quick", replay="kernel", deduplicate=wanted, store=store)
        counted = taken[label].window["counters"].value_counts().to_dict()
        notes = [note for note in taken[label].notes if "counters" in note or "layers" in note]
        found[label] = {"seconds": time.perf_counter() - start, "kernels": counted, "notes": notes}
    every, carried = (p.window.reset_index(drop=True) for p in taken.values())
    found["median_difference"] = {
        key: float((carried[key] / every[key] - 1).abs().median())
        for key in ("instructions", "dram_read_bytes", "l2_hit_rate", "achieved_occupancy", "warp_latency")
    }
    return found


def _kernels(p: Profile) -> int:
    return round((p.window["kind"] == "kernel").sum() / p.iterations)


def summary(p: Profile) -> dict[str, Any]:
    """Shares and times of a profile; times in ns per call."""
    nodes = p.nodes[p.nodes["kind"] == "node"] if len(p.nodes) else p.nodes
    fx = int(nodes["window_ns"].sum()) if len(nodes) else 0
    return {
        "kernels_per_call": len(p.window) / p.iterations,
        "kernel_ns": p.kernel_ns,
        "wall_ns": p.wall_ns,
        "share_of_fx_nodes": fx / p.total_ns if p.total_ns else None,
        "share_attributed": p.attributed_share,
        "share_of_operators": p.operator_share,
        "share_opaque": p.opaque_share,
        "total_ns": p.total_ns,
        "attributed_ns": p.attributed_ns,
        "unattributed_ns": p.unattributed_ns,
        "methods": p.window.groupby(["method", "confidence"]).size().rename("kernels").reset_index().to_dict("records"),
        "operators": p.by("operator").head(8)[["operator", "time_ns", "share"]].to_dict("records"),
        "unattributed": p.unattributed().head(5).to_dict("records"),
        "notes": list(p.notes),
    }


def counter_cost(compiled: Any, x: torch.Tensor, mine: Profile) -> dict[str, Any]:
    """What counters cost after warm-up: both sets three times, by application replay, and kernel replay once."""
    from profiler_core import counters
    from profiler_core.collect.cupti import session

    chip = counters.chip_of(torch.cuda.get_device_capability(x.device))
    kernels = _kernels(mine)
    runs = []
    plan: tuple[tuple[str, tuple[str, ...], session.Replay, int], ...] = (
        ("quick", counters.QUICK, "application", 3),
        ("full", counters.FULL, "application", 3),
        ("quick", counters.QUICK, "kernel", 1 if kernels <= REPLAYED_AT_MOST else 0),
    )
    for label, keys, replay, times in plan:
        for _ in range(times):
            start = time.perf_counter()
            got = session.collect(
                lambda: compiled(x), counters.metric_names(chip, keys), replay=replay, kernels=kernels, warmup=1
            )
            runs.append(
                {
                    "set": label,
                    "counters": len(keys),
                    "replay": replay,
                    "seconds": time.perf_counter() - start,
                    "passes": got.passes,
                    "setup_seconds": got.setup_seconds,
                    "pass_seconds": got.pass_seconds,
                    "call_seconds": got.call_seconds,
                    "decode_seconds": got.decode_seconds,
                    "evaluate_seconds": got.evaluate_seconds,
                    "kernels": len(got.table.rows),
                    "notes": got.table.notes,
                }
            )
    return {"chip": chip, "runs": runs}


def outside(name: str, small: bool, mine: Profile, folder: Path) -> dict[str, Any]:
    """The same workload under nsys and ncu, against the profile of this process."""
    from profiler_core import counters, record
    from profiler_core.loading import compare

    argv = [sys.executable, "-m", "case_studies.attribution", name, "--program", *(["--small"] if small else [])]
    chip = counters.chip_of(torch.cuda.get_device_capability())
    library_path = os.environ.get("NSYS_LIBRARY_PATH")
    start = time.perf_counter()
    theirs = record(argv, folder, counters="full", chip=chip, library_path=library_path, timeout=400)
    seconds = time.perf_counter() - start
    document = {"seconds": seconds, **summary(theirs), "kernels": _counted(theirs)}
    first = mine.window["iteration"].min()
    # The last of their calls: what it finds in the caches is what a call left, as with the counters taken here.
    one, other = _one_call(mine, first), _one_call(theirs, theirs.window["iteration"].max())
    both = compare(one, other)
    known = both[both["name_other"].notna()]
    same = known["nodes"].map(set) == known["nodes_other"].map(set)
    document["agreement"] = {
        "kernels_of_a_call": len(both),
        "matched": len(known),
        "same_nodes": int(same.sum()),
        "same_launch": int((known["launch"] == known["launch_other"]).sum()),
        "same_operator": int((known["operator"] == known["operator_other"]).sum()),
        "time_ratio": float(known["duration_ns_other"].sum() / known["duration_ns"].sum()),
        "differences": known[~same].head(5).to_dict("records"),
    }
    document["counters_against_ncu"] = against(one, other)
    return document


def against(one: Profile, other: Profile) -> dict[str, Any]:
    """CUPTI's counters over ncu's: the total, and the farthest of the kernels above 20 us."""
    import numpy as np

    mine, theirs = (p.window[p.window["kind"] == "kernel"].reset_index(drop=True) for p in (one, other))
    if len(mine) != len(theirs) or "gpu_time" not in mine or "gpu_time" not in theirs:
        return {"compared": False, "kernels": [len(mine), len(theirs)]}
    found: dict[str, Any] = {"compared": True, "kernels": len(mine)}
    long = (mine["duration_ns"] > LONG_NS).to_numpy()
    found["kernels_above_20us"] = int(long.sum())
    mine, theirs = mine.assign(dram_bytes=_dram(mine)), theirs.assign(dram_bytes=_dram(theirs))
    for key in ("instructions", "gpu_time", "dram_bytes", "dram_read_bytes", "dram_write_bytes"):
        a, b = (frame[key].to_numpy(dtype="float64") for frame in (mine, theirs))
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = a / b
        found[key] = {
            "total_ratio": float(np.nansum(a) / np.nansum(b)),
            "total_ratio_above_20us": float(np.nansum(a[long]) / np.nansum(b[long])) if long.any() else None,
            "within_10_percent_above_20us": int((np.abs(ratio[long] - 1) <= 0.1).sum()),
            "worst_above_20us": float(np.nanmax(np.abs(ratio[long] - 1))) if long.any() else None,
            "worst_of_all": float(np.nanmax(np.abs(ratio[np.isfinite(ratio)] - 1))),
        }
    return found


def _dram(frame: Any) -> Any:
    return frame["dram_read_bytes"] + frame["dram_write_bytes"]


def _one_call(p: Profile, iteration: int) -> Profile:
    from dataclasses import replace

    return replace(p, kernels=p.kernels[p.kernels["iteration"] == iteration].reset_index(drop=True), iterations=1)


def _counted(p: Profile) -> list[dict[str, Any]]:
    """The kernels of the first call with their counters."""
    from profiler_core import counters

    rows = p.window[p.window["iteration"] == p.window["iteration"].min()]
    keys = [key for key in counters.FULL if key in rows]
    names = rows["name"].str.slice(0, 80)
    return rows[["duration_ns", "launch", *keys]].assign(name=names).to_dict("records")


def _print(screen: Any, name: str, document: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{name}: {document['workload']}", title_justify="left")
    columns = ("tool", "kernels a call", "kernel time", "to FX nodes", "attributed", "operator known", "opaque")
    for column in columns:
        table.add_column(column, justify="left" if column == "tool" else "right")
    for tool in ("torch", "nsys"):
        if tool in document:
            found = document[tool]
            shares = ("share_of_fx_nodes", "share_attributed", "share_of_operators", "share_opaque")
            values = [f"{found[key]:.2%}" if found[key] is not None else "-" for key in shares]
            table.add_row(tool, f"{found['kernels_per_call']:g}", f"{found['kernel_ns'] / 1e3:,.1f} us", *values)
    screen.print(table)
    for run in document.get("cupti", {}).get("runs", ()):
        calls = ", ".join(f"{seconds:.2f}" for seconds in run["pass_seconds"])
        screen.print(
            f"  {run['set']} set, {run['replay']} replay: {run['seconds']:.2f} s, {run['passes']} passes "
            f"({calls} s), {run['kernels']} kernels"
        )
    for key in ("agreement", "counters_against_ncu"):
        if key in document.get("nsys", {}):
            screen.print(f"  {key}: {document['nsys'][key]}")


def main() -> None:
    import typer

    def run(
        workloads: list[str] = typer.Argument(None, help="Of gpt2, sdpa and lstm; all by default."),
        tools: str = typer.Option("torch,cupti", help="Of torch, cupti and nsys, with commas."),
        device: str = typer.Option("", help="cuda or cpu; by default a GPU where there is one."),
        small: bool = typer.Option(False, help="The same structures, much smaller."),
        json: Path = typer.Option(None, help="Write the result here."),
        folder: Path = typer.Option(None, help="Keep the tools' files here."),
        as_program: bool = typer.Option(False, "--program", help="Only run the workload, as nsys and ncu see it."),
    ) -> None:
        from profiler_core.clocks import ClockMonitor
        from profiler_core.environment import environment

        chosen = workloads or list(WORKLOADS)
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        for names, known, what in ((chosen, WORKLOADS, "workload"), (tools.split(","), TOOLS, "tool")):
            for unknown in (name for name in names if name not in known):
                raise typer.BadParameter(f"{unknown!r} is no {what}; there are {', '.join(known)}")
        if as_program:
            program(chosen[0], where, small)
            return
        screen = show.console()
        documents: dict[str, Any] = {}
        result = {"command": show.command_line("case_studies.attribution"), "environment": environment(where)}
        with tempfile.TemporaryDirectory() as temporary, ClockMonitor(where) as monitor:
            for name in chosen:
                monitor.sample()
                documents[name] = study(name, where, small, tools.split(","), folder or Path(temporary))
                monitor.sample()
                _print(screen, name, documents[name])
                if json is not None:  # after each, so that what is done is not lost
                    show.write_json(json, {**result, "clocks": monitor.summary(), "workloads": documents})

    typer.run(run)


if __name__ == "__main__":
    main()
