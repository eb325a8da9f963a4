"""docs/tutorial.md, followed: files written, commands run, the package installed and found, the promise kept."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
RESULT = ROOT / "results" / "cpu" / "tutorial.json"
#: Fewer pairs and calls than a decision deserves: what is tested is that there is one, on a machine that may be busy.
QUICK = {"FXOPT_PAIRS": "6", "FXOPT_ITERATIONS": "2", "FXOPT_WARMUP": "1", "FXOPT_VERIFY_INPUTS": "1"}
#: On a busy machine a product may be too slow to count as compute-bound; then nothing would be proposed.
THRESHOLDS = "[compute_bound_modelled]\nflop_fraction = 0.0\n"


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tutorial", ROOT / "tools" / "tutorial.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tutorial"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tool = _tool()


@dataclass
class Followed:
    """What came of following the page: the folder, each command's output, and the report that `tune.py` left."""

    folder: Path
    outputs: dict[str, str]
    report: dict[str, Any]

    def after(self, command: str) -> str:
        return next(output for text, output in self.outputs.items() if command in text)


@pytest.fixture(scope="module")
def follow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Followed]:
    done: dict[bool, Followed] = {}

    def followed(quick: bool) -> Followed:
        if quick in done:
            return done[quick]
        folder = tmp_path_factory.mktemp("tutorial")
        (folder / "thresholds.toml").write_text(THRESHOLDS)
        variables = {
            **QUICK,
            "FXOPT_THRESHOLDS": str(folder / "thresholds.toml"),
            "FXOPT_REPORT": str(folder / "report.json"),
        }
        outputs = {}
        for step, output in tool.follow(folder, variables, quick=quick):
            if step.kind == "run":
                outputs[step.text] = output
            if "FXOPT_DUMP" in step.text:
                shutil.copy(folder / "report.json", folder / "tuned.json")
        done[quick] = Followed(folder, outputs, json.loads((folder / "tuned.json").read_text()))
        return done[quick]

    return followed


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["quick", "whole"])
def followed(request: pytest.FixtureRequest, follow: Callable[[bool], Followed]) -> Followed:
    """The page followed to its end; every command ran, and printed what the page shows."""
    return follow(request.param)


def test_the_pass_is_found_by_the_entry_point_of_its_own_package(followed: Followed) -> None:
    lines = followed.after("fxopt passes list").splitlines()
    (row,) = (line for line in lines if line.startswith("gather_one_hot"))
    assert row.endswith("fxopt-gather-one-hot 0.1.0")
    assert (followed.folder / ".site" / "gather_one_hot.py").is_file()


def test_it_rewrites_the_product_and_the_result_is_verified_and_compared(followed: Followed) -> None:
    (trial,) = (
        trial for trial in tool.graph_of(followed.report)["candidates"] if trial["passes"] == ["gather_one_hot"]
    )
    (report,) = trial["reports"]
    assert (report["name"], report["matched"], report["rewritten"], report["error"]) == ("gather_one_hot", 1, 1, "")
    assert trial["verdict"]["ok"] and trial["verdict"]["rel_l2"] <= trial["verdict"]["limit"]
    assert 0 < trial["paired"]["low"] <= trial["paired"]["ratio"] <= trial["paired"]["high"]
    # Kept, or not shown to be faster beside whatever else this machine is doing; never wrong, never failed.
    assert trial["outcome"] == "kept" or "faster" in trial["reason"]


def test_the_pass_without_a_refusal_fails_its_tests_and_the_gate(followed: Followed) -> None:
    told = followed.after("pytest -q wrong")
    assert "2 failed, 10 passed" in told
    assert "gather_one_hot changes what this graph computes" in told
    assert "gather_one_hot rejected, wrong" in followed.after("halves.py")


@pytest.mark.slow
def test_the_gather_alone_is_so_much_faster_that_it_is_kept_on_any_machine(follow: Callable[[bool], Followed]) -> None:
    # The search finds a rewrite to blame only if the tuning run has kept it.
    assert "gather_one_hot at mm" in follow(False).after("fxopt bisect")


def test_what_the_page_promises_is_what_was_measured() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    runs = result["runs"]
    ratios = sorted(run["ratio"]["ratio"] for run in runs)
    assert all(run["outcome"] == "kept" and run["verdict"]["ok"] for run in runs)
    text = PAGE.read_text(encoding="utf-8")
    assert f"between {ratios[0]:.2f} and {ratios[-1]:.2f} times" in " ".join(text.split())
    low, high = promised(text)
    assert low <= ratios[0] and ratios[-1] <= high


def promised(text: str) -> tuple[float, float]:
    """The range in the page's first paragraph."""
    import re

    found = re.search(r"makes the model (\d\.\d) to (\d\.\d) times as fast", " ".join(text.split()))
    assert found is not None, "the page promises no range"
    return float(found[1]), float(found[2])
