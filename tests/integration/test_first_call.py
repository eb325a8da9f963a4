"""The first-call case study, run on one layer of GPT-2: new processes use the plan and measure nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the case studies need transformers: pip install 'fxopt[case-studies]'")

from case_studies import first_call
from case_studies.first_call import FirstCall, Measured

REPOSITORY = Path(__file__).resolve().parents[2]


def seen(digest: str = "a", **graph: object) -> FirstCall:
    story = {"source": "plan", "decision": "baseline", "passes": [], "frozen": False, "measured": False, "messages": []}
    return FirstCall(1.0, digest, "", [{**story, **graph}])


def test_a_process_that_used_the_plan_has_no_problems():
    assert Measured("backend", seen(source="tuned", measured=True), [seen(), seen()]).problems() == []


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (seen(digest="b"), "its output is not"),
        (seen(source="tuned", messages=["no plan"]), "came from 'tuned'"),
        (seen(measured=True), "was measured although"),
        (seen(passes=["freeze_weights"]), "its passes are not"),
    ],
)
def test_a_process_that_broke_a_promise_of_the_plan_is_named(run, problem):
    (found,) = Measured("optimize", seen(source="tuned", measured=True), [seen(), run]).problems()
    assert problem in found and "run 2" in found


def test_a_process_whose_graphs_never_reached_fxopt_is_named():
    nothing = FirstCall(1.0, "a", "", [])
    assert "no graph reached fxopt" in Measured("backend", nothing, [nothing]).problems()[0]


@pytest.mark.slow
def test_new_processes_use_the_plan_and_measure_nothing(tmp_path):
    out = tmp_path / "first_call.json"
    command = [sys.executable, "-m", "case_studies.first_call", "--device", "cpu", "--layers", "1", "--seq", "16",
               "--runs", "1", "--json", str(out)]  # fmt: skip
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert document["case"] == "first_call" and document["problems"] == []
    assert document["environment"]["device_type"] == "cpu" and document["workload"]["layers"] == 1
    rows = {row["variant"]: row for row in document["rows"]}
    assert list(rows) == list(first_call.VARIANTS)
    for variant, row in rows.items():
        (run,) = row["runs"]
        assert 0 < row["seconds"] == run["seconds"]
        assert run["digest"] == row["warming"]["digest"]
        if variant == "inductor":
            assert run["graphs"] == []
            continue
        assert [graph["source"] for graph in row["warming"]["graphs"]] == ["tuned"]
        assert [(graph["source"], graph["measured"]) for graph in run["graphs"]] == [("plan", False)]
        assert run["graphs"][0]["passes"] == row["warming"]["graphs"][0]["passes"]
        assert run["graphs"][0]["frozen"] is row["frozen"]
        assert row["name"] in done.stdout
    assert not rows["backend"]["frozen"]
