"""Tables and claims made from the comparison's rows, and the pages that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from case_studies import must_show, tables

ROOT = Path(__file__).parents[2]


def row(column: str, precision: str, kernel: float, wall: float, error: float = 1e-6, **more: Any) -> dict[str, Any]:
    """A measured row of gpt2: times in microseconds, the same in every round but for a thousandth."""
    samples = {
        f"{metric}_samples_us": [us * (1 + 0.001 * (i % 2)) for i in range(8)]
        for metric, us in (("kernel", kernel), ("wall", wall))
    }
    ours = column.startswith("fxopt")
    values: dict[str, Any] = {
        "workload": "gpt2", "precision": precision, "column": column, "status": "measured", "kernel_us": kernel,
        "wall_us": wall, "kernel_interval": [kernel, kernel], "wall_interval": [wall, wall], "rel_l2_error": error,
        "kernel_ratio": 1.0, "kernel_ratio_interval": [1.0, 1.0], "wall_ratio": 1.0, "wall_ratio_interval": None,
        "objective": ("kernel" if column == "fxopt_kernel" else "wall") if ours else None,
        "passes": ["freeze_weights"] if ours else None, "decision": "candidate" if ours else None, "why": "",
        "compile_seconds": 12.0, "floor_us": 100.0, "commit": "a", "tree": "t", **samples,
    }  # fmt: skip
    return {**values, **more}


ROWS = [
    row("inductor_fp32", "fp32", 2880, 5000),
    row("reduce_overhead_fp32", "fp32", 2890, 2900),
    row("inductor_tf32", "tf32", 1140, 3600, 7e-4),
    row("inductor_bf16", "bf16", 550, 6000, 8e-3),
    row("reduce_overhead_bf16", "bf16", 555, 654, 8e-3),
    row("fxopt_kernel", "fp32", 1000, 3000, 3e-6),
    row("fxopt", "fp32", 1100, 1200, 3e-6),
    row("fxopt", "bf16", 500, 600, 7e-3),
    row("max_autotune_bf16", "bf16", 0, 0, 0, kernel_us=None, wall_us=None, rel_l2_error=None, status="skipped"),
]


def names(rows: list[dict[str, Any]]) -> set[str]:
    return {one["column"] for one in rows}


def test_a_class_competes_with_every_measured_column_that_is_at_least_as_accurate() -> None:
    fp32 = {"inductor_fp32", "reduce_overhead_fp32"}
    assert names(tables.competitors(ROWS, "gpt2", "fp32")) == fp32
    assert names(tables.competitors(ROWS, "gpt2", "1.5e-5")) == fp32
    assert names(tables.competitors(ROWS, "gpt2", "1e-3")) == names(tables.competitors(ROWS, "gpt2", "tf32"))
    assert names(tables.competitors(ROWS, "gpt2", "tf32")) == fp32 | {"inductor_tf32"}
    assert names(tables.competitors(ROWS, "gpt2", "bf16")) == fp32 | {
        "inductor_tf32", "inductor_bf16", "reduce_overhead_bf16"
    }  # fmt: skip


def test_the_best_column_and_fxopts_row_depend_on_the_metric() -> None:
    best = {metric: tables.best(ROWS, "gpt2", "bf16", metric)["column"] for metric in tables.METRICS}
    assert best == {"kernel": "inductor_bf16", "wall": "reduce_overhead_bf16"}
    ours = {metric: tables.ours(ROWS, "gpt2", "fp32", metric)["column"] for metric in tables.METRICS}
    assert ours == {"kernel": "fxopt_kernel", "wall": "fxopt"}
    assert tables.ours(ROWS, "gpt2", "bf16", "kernel")["column"] == "fxopt", "no other was measured"
    assert tables.ours(ROWS, "gpt2", "tf32", "wall") is None


def test_the_summary_has_both_metrics_with_ratio_interval_and_error() -> None:
    text = tables.summary(ROWS)
    assert "| gpt2 | fp32 | inductor_fp32 2,880 us | 1,000 us | 2.88 (2.88-2.88) |" in text
    assert "| reduce_overhead_bf16 654 us | 600 us | 1.09 (1.09-1.09) | 7.0e-03 | 3.1e-02 |" in text


def test_the_gap_is_the_time_over_the_floor_before_and_after() -> None:
    assert "| gpt2 | fp32 | 100 us | 2,880 us, 28.8x | 1,000 us, 10.0x |" in tables.gaps(ROWS)


def test_every_column_is_listed_with_what_it_keeps_or_why_it_is_missing() -> None:
    rows = [row("eager_fp32", "fp32", 1, 1, status="failed", why="no | memory", kernel_us=None, wall_us=None), *ROWS]
    text = tables.columns(rows)
    assert text.count("\n") == 2 + len(rows)
    assert "candidate: freeze_weights" in text or "| freeze_weights |" in text
    assert "no \\| memory" in text


def test_the_ablation_lists_each_pass_with_what_it_adds_and_each_refused_one_with_its_reason(tmp_path: Path) -> None:
    timed = {"ratio": 1.5, "low": 1.4, "high": 1.6}
    kept = {
        "name": "freeze_weights", "outcome": "kept", "alone": {"kernel": timed, "wall": None}, "removed": None,
        "reason": "",
    }  # fmt: skip
    trial = {"name": "cuda_graphs", "outcome": "rejected", "reason": "no faster"}
    reports = {
        "fxopt fp32": {"graphs": [{"decision": "candidate", "ablation": [kept]}]},
        "fxopt_kernel fp32": {"graphs": [{"ablation": [], "candidates": [trial], "out_of_reach": ["p: no CUDA"]}]},
    }
    evidence = tmp_path / "comparison_evidence" / "gpt2.json"
    evidence.parent.mkdir()
    evidence.write_text(json.dumps({"reports": reports}))
    text = tables.ablation(ROWS, tmp_path)
    assert "| gpt2 | fxopt fp32 | freeze_weights | kept | 1.50 (1.40-1.60) | - | - | - |  |" in text
    assert "| cuda_graphs | rejected | - | - | - | - | no faster |" in text
    assert "| p | out of reach | - | - | - | - | no CUDA |" in text


# ---- pages ----


def test_a_page_is_filled_between_its_markers_and_nowhere_else(tmp_path: Path) -> None:
    marker, end = "<!-- table: results/h200/comparison.json gaps -->\n", "<!-- end of table -->"
    page = f"before\n{marker}old\n{end}\nafter {end}\n"
    assert tables.filled(page, tmp_path) == f"before\n{marker}Not measured yet.\n{end}\nafter {end}\n"
    (tmp_path / "results" / "h200").mkdir(parents=True)
    (tmp_path / "results" / "h200" / "comparison.json").write_text(json.dumps(ROWS))
    once = tables.filled(page, tmp_path)
    assert tables.gaps(ROWS) in once and "old" not in once and tables.filled(once, tmp_path) == once
    (tmp_path / "README.md").write_text(page)
    assert tables.stale(tmp_path) == ["README.md"]


def test_the_pages_are_what_the_results_say() -> None:
    assert tables.stale() == [], "run python -m case_studies.tables"


# ---- claims ----


def claims(rows: list[dict[str, Any]], folder: Path) -> dict[str, must_show.Claim]:
    path = folder / "h200" / "comparison.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows))
    return {claim.what: claim for claim in must_show.claims(folder)}


def test_a_claim_passes_or_fails_by_the_rows_and_what_was_not_measured_does_neither(tmp_path: Path) -> None:
    found = claims(ROWS, tmp_path)
    assert found["gpt2 fp32, kernel against inductor_fp32 at least 2.4x"].passed is True
    assert found["gpt2 fp32, wall against inductor_fp32 at least 3.5x"].passed is True
    assert found["gpt2 bf16, wall at most 620 us"].passed is True
    assert found["gpt2 1.5e-5, kernel against inductor_fp32 at least 2.3x"].passed is None
    assert found["every workload was measured"].passed is False
    assert str(found["gpt2 bf16, wall at most 620 us"]) == "PASS  gpt2 bf16, wall at most 620 us: 600 us"


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (row("fxopt", "bf16", 500, 640, 7e-3), "gpt2 bf16, wall at most 620 us"),
        (row("fxopt", "bf16", 600, 600, 7e-3), "gpt2 bf16, kernel no worse than the best other column"),
        (row("fxopt", "bf16", 500, 600, 5e-2), "gpt2 fxopt bf16, error within its class"),
        (row("fxopt", "bf16", 500, 600, 7e-3, rel_l2_error=None), "gpt2 fxopt bf16, error within its class"),
        (row("fxopt", "bf16", 500, 5200, 7e-3), "gpt2 bf16, wall not slower than Inductor when tuned for it"),
        (row("fxopt", "bf16", 500, 600, 7e-3, commit="b"), "all rows at one commit"),
    ],
)
def test_a_row_that_breaks_a_claim_fails_it(changed: dict[str, Any], what: str, tmp_path: Path) -> None:
    kept = [one for one in ROWS if (one["column"], one["precision"]) != ("fxopt", "bf16")]
    assert claims(ROWS, tmp_path)[what].passed is True
    assert claims([*kept, changed], tmp_path)[what].passed is False


def test_within_the_noise_is_not_slower() -> None:
    assert must_show.no_slower([0.95, 0.995], 0.97) and must_show.no_slower(None, 0.991)
    assert not must_show.no_slower([0.95, 0.98], 0.97) and not must_show.no_slower(None, 0.98)


def test_the_sweep_fails_where_one_case_is_off_or_misplaces_a_nan(tmp_path: Path) -> None:
    def case(error: float, placed: bool) -> dict[str, Any]:
        own = {"max_error": 1e-6, "placed": True}
        return {"kind": "normal", "k": 64, "cublas_fp32": own, "split": {"max_error": error, "placed": placed}}

    path = tmp_path / "sweep.json"
    for rows, passed in (([case(3e-6, True)], True), ([case(5e-6, True)], False), ([case(1e-6, False)], False)):
        path.write_text(json.dumps(rows))
        assert must_show._sweep(path).passed is passed
