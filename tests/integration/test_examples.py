"""examples/: each script runs, and prints what it says that fxopt finds."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxopt.report import model as reports

FOLDER = Path(__file__).resolve().parents[2] / "examples"
#: Fewer pairs and calls than a decision deserves: what is tested is what is found, on a machine that may be busy.
QUICK = {"FXOPT_PAIRS": "6", "FXOPT_ITERATIONS": "3", "FXOPT_WARMUP": "1", "FXOPT_VERIFY_INPUTS": "0"}
#: On a busy machine a product may be too slow to count as bound by anything, and then no pass would be proposed.
THRESHOLDS = "[compute_bound_modelled]\nflop_fraction = 0.0\n[memory_bound_modelled]\nbandwidth_fraction = 0.0\n"

#: What each example prints, as regular expressions.
FOUND = {
    "launch_bound": (r"launch_bound: the graph", r"freeze_weights: 64 matched, 64 rewritten"),
    "causal_mask": (r"causal_mask: 2 matched, 2 rewritten",),
    "batch_norm": (r"freeze_weights: 18 matched, 18 rewritten",),
    "separate_projections": (r"merge_projections: 1 matched, 1 rewritten",),
    "idle_matrix_units": (r"onednn_linear: ", r"promote_matmul_precision: ", r"(?m)^error against fp64: "),
    "repeated_casts": (
        r"cast_traffic: convert_element_type",
        r"remove_redundant_casts_and_copies: 2 matched, 2 rewritten",
    ),
    "layout_copies": (r"layout_conversion: permute, clone", r"us  across = self\.across\(x\.transpose\(1, 2\)\)"),
    "lstm": (r"torch\.compile: 0 graphs", r"fxopt\.optimize: 1 graph", r"structural fix: 1 recurrent module"),
    "graph_break": (r"2 graphs of one model",),
    "dynamic_shapes": (r"3 sizes, 2 graphs", r"merge_projections: found nothing to do: its sizes are symbolic"),
    "training_step": (r"a call is forward and backward", r"%  0/\d backward", r"%  outside of graphs"),
    "profile_only": (r"100% of .* is attributed", r"%  layers\.1", r"profile_only\.py:\d+", r"profile\.json"),
}
#: Those that compile for longest.
SLOW = ("launch_bound", "batch_norm", "idle_matrix_units", "dynamic_shapes")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One plan directory for all, so that the ceilings are measured once."""
    return tmp_path_factory.mktemp("plans")


@pytest.fixture
def output(
    name: str, plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[str]:
    """What the example printed, run in this process on one thread."""
    thresholds = tmp_path / "thresholds.toml"
    thresholds.write_text(THRESHOLDS)
    for variable, value in {**QUICK, "FXOPT_PLAN_DIR": str(plans), "FXOPT_THRESHOLDS": str(thresholds)}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(reports, "_recent", reports.deque(maxlen=reports.MOST_REMEMBERED))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    try:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        yield capsys.readouterr().out
    finally:
        sys.modules.pop("finding", None)
        torch.set_num_threads(threads)
        torch._dynamo.reset()


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"finding"}
    assert scripts == set(FOUND)
    listed = re.findall(
        r"^## \[(\w+)\.py\]\(\1\.py\)$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(scripts)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FOUND])
def test_the_example_prints_its_finding(name: str, output: str) -> None:
    for pattern in FOUND[name]:
        assert re.search(pattern, output), f"{name} does not print {pattern!r}:\n{output}"
