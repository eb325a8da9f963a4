"""Two ranks with gloo: one plan, falling back together, nobody who waits for ever. More is in tools/gloo_ranks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ("one_plan", "one_fails", "ddp_step", "ddp_whole", "ddp_whole_fails", "dies_applying")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("ranks") / "found.json"
    command = [sys.executable, str(ROOT / "tools" / "gloo_ranks.py"), "--ranks", "2", "--json", str(file)]
    environ = {**os.environ, "KINETO_LOG_LEVEL": "99", "RANKS_PATIENCE": "6"}
    done = subprocess.run(
        [*command, "--scenarios", ",".join(SCENARIOS)], env=environ, capture_output=True, text=True, check=False
    )
    assert file.exists(), done.stderr
    return json.loads(file.read_text())["scenarios"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_has_to_hold_does(found, name):
    assert found[name]["failed"] == ""


def test_both_ranks_name_the_same_plan_and_one_has_measured(found):
    first, second = found["one_plan"]["found"]
    assert len(first["plan"]) == 64 and first["plan"] == second["plan"]
    assert (first["measured"], second["measured"]) == (True, False)
    assert (first["source"], second["source"]) == ("tuned", "plan")


def test_under_ddp_forward_and_backward_have_one_plan_that_rank_0_measured(found):
    first, second = (rank["graphs"][-1] for rank in found["ddp_whole"]["found"])
    assert len(first["plan"]) == 64 and first["plan"] == second["plan"]
    assert first["passes"] == second["passes"] == ["doubled_negation"]
    assert (first["measured"], second["measured"]) == (True, False)


def test_where_one_rank_cannot_the_other_says_which(found):
    first, second = found["one_fails"]["found"]
    assert first["reason"].startswith("rank 1: ") and "this rank cannot" in first["reason"]
    assert "this rank cannot" in second["said"][0]


def test_a_rank_that_died_is_named(found):
    (survivor,) = found["dies_applying"]["found"]
    assert survivor["reason"] == "rank 1 has given no sign of life for 6 s"
    assert found["dies_applying"]["exit_codes"] == [0, 9]
