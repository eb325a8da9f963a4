"""What this project claims of the comparison, each claim checked against the rows: `case_studies.tables --check`.

The kernel figure is that of fxopt tuned for kernel time, the wall figure that of fxopt tuned for latency.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from case_studies import tables
from case_studies.columns import BASE
from case_studies.tables import Row
from fxopt.measure import MIN_NOISE

SEVEN = ("gpt2", "sdpa", "lstm", "conv_block", "depthwise", "mlp", "embedding")
ALL = (*SEVEN, "gpt2_decode_128", "gpt2_decode_1024", "gpt2_train")
BUDGET = "1.5e-5"
KERNEL_FP32 = {"gpt2": 2.4, "embedding": 3.0, "sdpa": 1.6, "mlp": 1.3, "conv_block": 1.3}
KERNEL_BUDGET = {"gpt2": 2.3, "embedding": 4.0, "mlp": 2.5, "sdpa": 1.65}
CLEARLY_BETTER, OF_SEVEN = 1.1, 4
SWEEP_MULTIPLE = 4.0


@dataclass(frozen=True)
class Claim:
    """passed: None where nothing was measured that could tell."""

    what: str
    passed: bool | None
    figures: str

    def __str__(self) -> str:
        verdict = {True: "PASS", False: "FAIL", None: "NOT MEASURED"}[self.passed]
        return f"{verdict}  {self.what}: {self.figures}"


def claims(results: Path) -> list[Claim]:
    """All of them, for the folder `results`."""
    found: list[Claim] = []
    path = results / "h200" / "comparison.json"
    rows = tables.load(path) if path.exists() else []
    found += _complete(rows)
    found += [_at_least(rows, name, "fp32", "kernel", BASE, times) for name, times in KERNEL_FP32.items()]
    found.append(_at_least(rows, "gpt2", "fp32", "wall", BASE, 3.5))
    found.append(_at_least(rows, "gpt2", "fp32", "wall", "reduce_overhead_fp32", 2.3))
    found += [_at_least(rows, name, BUDGET, "kernel", BASE, times) for name, times in KERNEL_BUDGET.items()]
    found.append(_at_least(rows, "lstm", "fp32", "wall", "eager_fp32", 1.9))
    found.append(_at_least(rows, "lstm", "tf32", "wall", "eager_fp32", 5.0))
    for precision in ("tf32", "bf16"):
        for metric in tables.METRICS:
            found += _against_the_best(rows, precision, metric)
    found.append(_gpt2_bf16(rows))
    found += _errors(rows)
    found += _never_slower(rows)
    found.append(_ablated(rows, path.parent))
    found.append(_sweep(results / "h200" / "split_sweep.json"))
    found.append(_cpu(results / "cpu" / "comparison.json"))
    return found


def _complete(rows: Sequence[Row]) -> Iterator[Claim]:
    there = {row["workload"] for row in rows}
    missing = [name for name in ALL if name not in there]
    yield Claim(
        "every workload was measured", not missing if rows else None, f"missing: {', '.join(missing) or 'none'}"
    )
    versions = sorted({f"{row['commit']} (tree {row['tree']})" for row in rows})
    yield Claim("all rows at one commit", len(versions) == 1 if rows else None, ", ".join(versions) or "no rows")
    bad = [f"{r['workload']}/{r['column']}/{r['precision']}: {r['why']}" for r in rows if r["status"] != "measured"]
    ours = [text for text in bad if "/fxopt" in text]
    yield Claim("every fxopt row was measured", not ours if rows else None, "; ".join(bad) or "all columns were")


def _at_least(rows: Sequence[Row], workload: str, precision: str, metric: str, column: str, times: float) -> Claim:
    what = f"{workload} {precision}, {metric} against {column} at least {times:g}x"
    row, base = tables.ours(rows, workload, precision, metric), tables.find(rows, workload, "fp32", column)
    value, interval = tables.ratio(base, row, metric) if row and base else (None, None)
    if value is None or row is None:
        return Claim(what, None, "not measured")
    return Claim(
        what, value >= times, f"{tables.speedup(value, interval)}, error {tables.scientific(row['rel_l2_error'])}"
    )


def no_slower(interval: Sequence[float] | None, value: float) -> bool:
    """Whether a ratio is not below 1 beyond the noise: its interval reaches 1, and itself it is above 0.9."""
    return (interval[1] if interval else value) >= 1 - MIN_NOISE and value >= 0.9


def _against_the_best(rows: Sequence[Row], precision: str, metric: str) -> Iterator[Claim]:
    better, told = [], []
    for workload in SEVEN:
        row, other = tables.ours(rows, workload, precision, metric), tables.best(rows, workload, precision, metric)
        value, interval = tables.ratio(other, row, metric) if row and other else (None, None)
        what = f"{workload} {precision}, {metric} no worse than the best other column"
        if value is None or other is None:
            yield Claim(what, None, "not measured")
            continue
        told.append(f"{workload} {value:.2f}")
        better += [workload] if value >= CLEARLY_BETTER else []
        yield Claim(what, no_slower(interval, value), f"{tables.speedup(value, interval)} against {other['column']}")
    what = f"{precision}, {metric} at least 10% better than the best other column on {OF_SEVEN} of {len(SEVEN)}"
    passed = len(better) >= OF_SEVEN if len(told) == len(SEVEN) else None
    yield Claim(what, passed, f"{len(better)}: {', '.join(told) or 'not measured'}")


def _gpt2_bf16(rows: Sequence[Row]) -> Claim:
    row = tables.ours(rows, "gpt2", "bf16", "wall")
    passed = None if row is None else row["wall_us"] <= 620.0
    return Claim(
        "gpt2 bf16, wall at most 620 us", passed, "not measured" if row is None else tables.time(row["wall_us"])
    )


def _errors(rows: Sequence[Row]) -> Iterator[Claim]:
    for row in rows:
        if not row["column"].startswith("fxopt") or row["wall_us"] is None:
            continue
        limit = tables.error_limit(rows, row["workload"], row["precision"])
        error = row["rel_l2_error"]
        passed = None if limit is None else error is not None and error <= limit
        what = f"{row['workload']} {row['column']} {row['precision']}, error within its class"
        yield Claim(what, passed, f"{tables.scientific(error)}, allowed {tables.scientific(limit)}")


def _never_slower(rows: Sequence[Row]) -> Iterator[Claim]:
    for row in rows:
        metric = row.get("objective")
        base = tables.find(rows, row["workload"], "fp32", BASE)
        if metric is None or base is None or row[f"{metric}_us"] is None:
            continue
        value, interval = tables.ratio(base, row, metric)
        passed = None if value is None else no_slower(interval, value)
        what = f"{row['workload']} {row['precision']}, {metric} not slower than Inductor when tuned for it"
        yield Claim(
            what, passed, f"{tables.speedup(value, interval)}, {row['decision']}: {', '.join(row['passes']) or '-'}"
        )


def _ablated(rows: Sequence[Row], folder: Path) -> Claim:
    """Of the class fp32, tuned for latency: what `compare` ablates unless told otherwise."""
    what = "the passes kept at fp32 were ablated, on every workload"
    graphs = {name: graph for name, column, graph in tables.graphs(rows, folder) if column == "fxopt fp32"}
    if not graphs:
        return Claim(what, None, "not measured")
    lacking = [name for name, graph in graphs.items() if graph["decision"] == "candidate" and not graph.get("ablation")]
    lacking += [name for name in SEVEN if name not in graphs]
    return Claim(what, not lacking, f"without: {', '.join(lacking) or 'none'}")


def _sweep(path: Path) -> Claim:
    what = f"split products: error at most {SWEEP_MULTIPLE:g} times cuBLAS fp32's, NaN and Inf placed alike"
    if not path.exists():
        return Claim(what, None, "not measured")
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    bad, worst = [], 0.0
    for row in rows:
        mine, theirs = row["split"]["max_error"], row["cublas_fp32"]["max_error"]
        if mine is not None and theirs:
            worst = max(worst, mine / theirs)
        if not row["split"]["placed"] or (mine is not None and mine > SWEEP_MULTIPLE * max(theirs or 0.0, 2.0**-24)):
            bad.append(f"{row['kind']} K={row['k']}")
    return Claim(
        what, not bad, f"{len(rows)} cases, at worst {worst:.2f} times" + (f"; {', '.join(bad)}" if bad else "")
    )


def _cpu(path: Path) -> Claim:
    wanted = [(name, precision) for name in ("gpt2", "mlp", "conv_block") for precision in ("fp32", "bf16")]
    rows = tables.load(path) if path.exists() else []
    missing = [f"{n} {p}" for n, p in wanted if tables.ours(rows, n, p, "wall") is None]
    return Claim(
        "CPU: gpt2, mlp, conv_block at fp32 and bf16", not missing if rows else None, f"missing: {', '.join(missing)}"
    )
