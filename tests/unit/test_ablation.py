"""The ablation: which sets are timed against which, and what is told of the passes that were not kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from fxopt.ablation import AblationRow, Timing, ablate, not_kept
from fxopt.measure import PairedResult
from fxopt.registry import GraphPass, Stage
from fxopt.report.model import CandidateReport


def make(name: str, stage: Stage = Stage.JOINT, **members: Any) -> Any:
    return dataclass(frozen=True)(type(name, (GraphPass,), {"name": name, "stage": stage, **members}))()


FREEZE = make("freeze", Stage.CONFIG)
PACK = make("pack", needs=("freeze",))
FUSE = make("fuse", needs=("pack",))
GRAPHS = make("graphs", Stage.RUNTIME)


def paired(before: float, after: float) -> PairedResult:
    ratio = before / after
    return PairedResult(ratio, 0.99 * ratio, 1.01 * ratio, 6, before, after, 0.01, {"samples": 3}, ("clocks moved",))


class Bench:
    """Wall and kernel time of a set of passes, in ns; each comparison is written down."""

    def __init__(self, **times: float) -> None:
        self.times, self.compared = {"": 100.0, **times}, []

    def __call__(self, before, after):
        sets = ["+".join(p.name for p in passes) for passes in (before, after)]
        self.compared.append(tuple(sets))
        if missing := [s for s in sets if s not in self.times]:
            return f"{missing[0]} cannot be built"
        wall = [self.times[s] for s in sets]
        return paired(*wall), paired(*(ns / 2 for ns in wall))


def test_each_pass_is_measured_over_the_baseline_and_by_taking_it_away_from_the_kept_set():
    bench = Bench(freeze=80.0, graphs=50.0, **{"freeze+graphs": 20.0})
    freeze, graphs = ablate([FREEZE, GRAPHS], bench)
    assert bench.compared == [
        ("", "freeze"),
        ("graphs", "freeze+graphs"),
        ("", "graphs"),
        ("freeze", "freeze+graphs"),
    ]
    assert (freeze.name, freeze.outcome, freeze.reason) == ("freeze", "kept", "")
    assert freeze.alone.wall.ratio == pytest.approx(1.25) and freeze.removed.wall.ratio == pytest.approx(2.5)
    assert freeze.alone.kernel_ns == 40.0, "with it alone"
    assert freeze.removed.kernel_ns == 25.0, "without it"
    assert graphs.removed.wall.ratio == pytest.approx(4.0), "gains do not add up: nothing is subtracted"


def test_a_pass_alone_has_what_it_needs_with_it_and_is_removed_with_what_needs_it():
    bench = Bench()
    ablate([FREEZE, PACK, FUSE, GRAPHS], bench)
    kept = "freeze+pack+fuse+graphs"
    assert bench.compared == [
        ("", "freeze"),
        ("graphs", kept),
        ("", "freeze+pack"),
        ("freeze+graphs", kept),
        ("", "freeze+pack+fuse"),
        ("freeze+pack+graphs", kept),
        ("", "graphs"),
        ("freeze+pack+fuse", kept),
    ]


def test_without_the_only_pass_there_is_the_baseline():
    bench = Bench(graphs=50.0)
    (row,) = ablate([GRAPHS], bench)
    assert bench.compared == [("", "graphs"), ("", "graphs")]
    assert row.alone.wall.ratio == row.removed.wall.ratio == 2.0


def test_a_set_that_cannot_be_measured_says_why():
    (freeze, graphs) = ablate([FREEZE, GRAPHS], Bench(graphs=50.0, **{"freeze+graphs": 20.0}))
    assert freeze.alone is None and freeze.removed is not None
    assert freeze.reason == "alone: freeze cannot be built"
    assert graphs.reason == "without it: freeze cannot be built"


def test_a_row_survives_json():
    rows = [
        AblationRow("a", {"size": 3}, alone=Timing(5.0, paired(10.0, 5.0), paired(20.0, 10.0))),
        AblationRow("b", outcome="rejected", removed=Timing(5.0, None, paired(3.0, 2.0)), reason="wrong"),
    ]
    assert [AblationRow.from_json(json.loads(json.dumps(row.to_json()))) for row in rows] == rows


# -- what was not kept ------------------------------------------------------------------------------------------------


def trial(subject, outcome, reason, step="add", **options):
    return CandidateReport(
        subject, [subject], outcome=outcome, reason=reason, step=step, subject=subject, subject_options=options
    )


def test_each_pass_that_was_not_kept_has_a_row_with_its_reason():
    candidates = [
        trial("freeze", "rejected", "not shown to be faster"),
        trial("pack", "failed", "KeyError: 'val'"),
        trial("graphs", "kept", "3.00x as fast as the best before it"),
    ]
    rows = not_kept(candidates, [GRAPHS], ["fuse: needs precision='bf16'; it would answer x"])
    assert [(row.name, row.outcome, row.reason) for row in rows] == [
        ("freeze", "rejected", "not shown to be faster"),
        ("pack", "failed", "KeyError: 'val'"),
        ("fuse", "out of reach", "needs precision='bf16'; it would answer x"),
    ]


def test_a_pass_that_was_dropped_again_says_why_it_was():
    candidates = [
        trial("freeze", "kept", "1.20x as fast as the best before it"),
        trial("graphs", "kept", "3.00x as fast as the best before it"),
        trial("freeze", "kept", "as fast without freeze: 1.000x", step="remove"),
    ]
    (row,) = not_kept(candidates, [GRAPHS], [])
    assert (row.name, row.outcome, row.reason) == ("freeze", "reverted", "as fast without freeze: 1.000x")


def test_a_pass_that_another_took_the_place_of_is_reverted():
    candidates = [trial("freeze", "kept", "1.20x as fast as the best before it"), trial("graphs", "kept", "2x")]
    (row,) = not_kept(candidates, [GRAPHS], [])
    assert row.outcome == "reverted" and row.reason.startswith("replaced by a later trial; it was 1.20x")


def test_a_pass_that_stays_because_it_is_of_use_is_not_listed_for_the_try():
    candidates = [trial("graphs", "kept", "3x"), trial("graphs", "rejected", "slower without graphs", step="remove")]
    assert not_kept(candidates, [GRAPHS], []) == []


def test_variants_that_lost_have_rows_of_their_own():
    @dataclass(frozen=True)
    class Tiled(GraphPass):
        name = "tiled"
        stage = Stage.JOINT
        size: int = 1

    candidates = [trial("tiled", "kept", "1.5x", size=2), trial("tiled", "rejected", "no faster", size=1)]
    (row,) = not_kept(candidates, [Tiled(2)], [])
    assert (row.name, row.options, row.reason) == ("tiled", {"size": 1}, "no faster")
