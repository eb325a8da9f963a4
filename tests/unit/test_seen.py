"""What plans say of a pass: kept, rejected, failed or out of reach, with what it gained and why it was not wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fxopt.plan import PassUse, Plan, PlanStore, plan_key
from fxopt.seen import sighting, sightings, summary

PAIRED = {"ratio": 1.5, "low": 1.4, "high": 1.6, "pairs": 30, "noise": 0.01}


def candidate(*passes: str, outcome: str = "rejected", reason: str = "", **reports: Any) -> dict[str, Any]:
    """One entry of a plan's `reports`, as the tuner writes it; reports: fields of a pass's own report, by its name."""
    own = [{"name": name, "stage": "joint", "rewritten": 1, "refused": [], **reports.get(name, {})} for name in passes]
    return {"name": "+".join(passes), "passes": list(passes), "reports": own, "outcome": outcome, "reason": reason}


def plan(number: int, *kept: str, **fields: Any) -> Plan:
    return Plan(
        key=plan_key(n=number),
        created=f"2026-01-{number:02}T00:00:00+00:00",
        decision="candidate" if kept else "baseline",
        passes=[PassUse(name=name, stage="joint") for name in kept],
        paired=PAIRED if kept else None,
        environment={"device_name": "NVIDIA H200", "device_type": "cuda"},
        **fields,
    )


def test_a_kept_pass_has_the_plans_speedup_and_names_those_beside_it():
    tried = [
        candidate("folds", outcome="kept", folds={"rewritten": 2}),
        candidate("folds", "fuses", outcome="kept", fuses={"rewritten": 3, "refused": [["mm", "too small"]] * 2}),
    ]
    seen = sighting(plan(1, "folds", "fuses", reports=tried), "fuses")
    assert seen is not None
    assert (seen.outcome, seen.reason, seen.beside, seen.device) == ("kept", "", ("folds",), "NVIDIA H200")
    assert (seen.speedup, seen.low, seen.high) == (1.5, 1.4, 1.6)
    assert (seen.rewritten, dict(seen.refused)) == (3, {"too small": 2})


@pytest.mark.parametrize("outcome", ["rejected", "failed"])
def test_a_pass_that_was_not_kept_has_its_own_trials_reason_and_no_speedup(outcome):
    tried = [
        candidate("fuses", outcome=outcome, reason="of its own trial"),
        candidate("folds", "fuses", outcome="rejected", reason="of a later trial of another pass"),
        candidate("folds", outcome="kept"),
    ]
    seen = sighting(plan(1, "folds", reports=tried), "fuses")
    assert seen is not None
    assert (seen.outcome, seen.reason, seen.speedup, seen.beside) == (outcome, "of its own trial", None, ())


def test_a_trial_that_won_and_was_taken_back_in_the_last_comparison_is_rejected():
    last = "not faster than the baseline in the last comparison: 1.001x"
    tried = [candidate("folds", outcome="kept"), candidate("folds", "fuses", outcome="rejected", reason=last)]
    for name in ("folds", "fuses"):
        seen = sighting(plan(1, reports=tried), name)
        assert seen is not None and (seen.outcome, seen.reason) == ("rejected", last)


def test_a_pass_that_could_not_be_tried_is_out_of_reach_with_the_reason_alone():
    line = "fuses: needs precision='bf16', and 'fp32' was asked for; it would answer tensor_core_idle on 3 nodes"
    seen = sighting(plan(1, out_of_reach=["fuses_more: another", line]), "fuses")
    assert seen is not None
    assert (seen.outcome, seen.reason) == ("out of reach", "needs precision='bf16', and 'fp32' was asked for")


def test_a_plan_that_does_not_mention_the_pass_is_no_sighting():
    assert sighting(plan(1, "folds", reports=[candidate("folds", outcome="kept")]), "fuses") is None


def test_the_store_is_read_newest_plan_first(tmp_path: Path):
    store = PlanStore(tmp_path)
    for number in (2, 3, 1):
        store.save(plan(number, "fuses"))
    store.save(plan(4))
    found, problems = sightings(store, "fuses")
    assert [seen.created[:10] for seen in found] == ["2026-01-03", "2026-01-02", "2026-01-01"]
    assert problems == []


def test_a_broken_file_is_a_problem_is_left_in_place_and_hides_no_other(tmp_path: Path):
    store = PlanStore(tmp_path)
    good = plan(1, "fuses")
    store.save(good)
    broken, odd = store.path(plan_key(n=98)), store.path(plan_key(n=99))
    broken.write_text("{")
    odd.write_text(json.dumps({**plan(99).model_dump(), "reports": [{"passes": ["fuses"], "reports": ["text"]}]}))
    found, problems = sightings(store, "fuses")
    assert [seen.key for seen in found] == [good.key]
    assert len(problems) == 2
    assert any(str(broken) in line and "line 1" in line for line in problems)
    assert any(str(odd) in line and "not what fxopt writes" in line for line in problems)
    assert broken.exists()


def test_a_store_that_is_not_there_holds_nothing(tmp_path: Path):
    assert sightings(PlanStore(tmp_path / "none"), "fuses") == ([], [])


def test_the_summary_counts_outcomes_and_reasons_that_differ_in_numbers_alone_as_one():
    slow = [
        plan(n, reports=[candidate("fuses", reason=f"not faster: {n}.5x", fuses={"refused": [["mm", "small"]]})])
        for n in (1, 2)
    ]
    plans = [*slow, plan(3, "fuses"), plan(4, out_of_reach=["fuses: no units; it would answer x"])]
    told = summary(seen for p in plans if (seen := sighting(p, "fuses")) is not None)
    assert {name: told[name] for name in ("plans", "kept", "rejected", "failed", "out of reach")} == {
        "plans": 4, "kept": 1, "rejected": 2, "failed": 0, "out of reach": 1,
    }  # fmt: skip
    assert told["newest"].startswith("2026-01-04")
    assert told["reasons"] == [
        {"reason": "rejected: not faster: 2.5x", "count": 2},
        {"reason": "out of reach: no units", "count": 1},
    ]
    assert told["refused"] == [{"reason": "small", "count": 2}]


def test_the_summary_of_nothing_is_zeros():
    assert summary([]) == {
        "plans": 0, "kept": 0, "rejected": 0, "failed": 0, "out of reach": 0, "newest": None, "reasons": [],
        "refused": [],
    }  # fmt: skip
