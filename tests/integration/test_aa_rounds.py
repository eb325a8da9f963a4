"""The tool that counts how often a comparison errs: it counts right, and its rounds are those of a tuning run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import aa_rounds


def made(same: str, slower: str) -> dict[str, Any]:
    return {"noise": 0.01, "same": {"said": same}, "slower": {"said": slower}}


def found(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    return aa_rounds.summary([{"true_ratio": 1.05, "load_before": 0.1, "load_after": 0.2, "rounds": rounds}])


@pytest.mark.parametrize(
    ("same", "slower", "failed"),
    [
        (["faster"] * 5 + ["equal"] * 95, ["slower"] * 95 + ["equal"] * 5, 0),
        (["faster"] * 3 + ["slower"] * 3 + ["equal"] * 94, ["slower"] * 100, 1),
        (["equal"] * 100, ["slower"] * 94 + ["faster"] * 6, 1),
        (["faster"] * 100, ["equal"] * 100, 2),
    ],
)
def test_both_errors_are_counted_on_either_side(same, slower, failed):
    counts = found([made(*pair) for pair in zip(same, slower, strict=True)])
    assert len(counts["failed"]) == failed
    assert counts["same_declared_different"] == 100 - same.count("equal")
    assert counts["slower_detected"] == slower.count("slower")


def test_a_stopped_run_goes_on_and_only_with_the_same_settings(monkeypatch, tmp_path, capsys):
    asked = []

    def new_process(arguments: Any, rounds: int) -> dict[str, Any]:
        asked.append(rounds)
        if len(asked) == 2:
            raise KeyboardInterrupt
        rows = [made("equal", "slower")] * rounds
        return {"true_ratio": 1.05, "load_before": 0.0, "load_after": 0.0, "rounds": rows}

    monkeypatch.setattr(aa_rounds, "in_new_process", new_process)
    command = ["aa_rounds.py", "--rounds", "7", "--batch", "3", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(KeyboardInterrupt):
        aa_rounds.main()
    assert aa_rounds.main() == 0
    assert asked == [3, 3, 3, 1]
    assert json.loads((tmp_path / "found.json").read_text())["rounds"] == 7
    monkeypatch.setattr(sys, "argv", [*command, "--rows", "10"])
    with pytest.raises(SystemExit):
        aa_rounds.main()
    assert "other settings" in capsys.readouterr().err


def test_a_round_compares_by_the_tuners_own_code(fresh_dynamo):
    """With a wait that any machine can tell: three times the computation's own time, on one thread, which others on
    the machine can slow down, but not make wait for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        answer = aa_rounds.batch("cpu", 1, rows=400, slowdown=4.0)
    finally:
        torch.set_num_threads(threads)
    (one,) = answer["rounds"]
    assert one["slower"]["ratio"] < 0.7 and one["slower"]["pairs"] >= 6
    assert answer["true_ratio"] > 2
    assert one["noise"] >= 0.01 and one["same"]["low"] <= one["same"]["ratio"] <= one["same"]["high"]
    assert torch.is_grad_enabled()
