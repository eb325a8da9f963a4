"""The search: which trials are made, what stays under later passes, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxopt.labels import Axis, Label
from fxopt.measure import PairedResult
from fxopt.registry import GraphPass, Stage
from fxopt.report.model import CandidateReport
from fxopt.search import Trial, search

LAUNCH = Label(Axis.LAUNCH_BOUND, "graph", (), "", (), "high", 1.0, "why")


def make(name: str, stage: Stage, enables: tuple[str, ...] = (), needs: tuple[str, ...] = ()) -> Any:
    members = {"name": name, "stage": stage, "enables": enables, "needs": needs, "__module__": __name__}
    return dataclass(frozen=True)(type(name, (GraphPass,), members))()


FREEZE = make("freeze", Stage.CONFIG, enables=("narrow",))
NARROW = make("narrow", Stage.JOINT)
PACK = make("pack", Stage.POST_GRAD, needs=("freeze",))
GRAPHS = make("graphs", Stage.RUNTIME)
BASELINE = (10.0, 10.0)


def run(walls, proposals, later=(), out_of_time=()):
    """Search over a world where `walls` maps a set of passes to (wall, kernel time) or None for a broken build."""
    tried: list[str] = []

    def evaluate(passes, best):
        key = "+".join(p.name for p in passes)
        tried.append(key)
        if walls[key] is None:
            return None
        wall, kernels = walls[key]
        before = walls["+".join(p.name for p in best.passes)][0] if best is not None else BASELINE[0]
        ratio = before / wall
        entry = CandidateReport(key, [p.name for p in passes])
        entry.paired = PairedResult(ratio, ratio * 0.99, ratio * 1.01, 6, before, wall, 0.01, {}, ())
        entry.kernel_ns = kernels
        entry.labels = [LAUNCH] if kernels < 0.8 * wall else []
        return Trial(list(passes), key, entry)

    def less(entry, before):
        return entry.kernel_ns < (before.kernel_ns if before is not None else BASELINE[1]) * 0.99

    considered: list[Any] = []

    def propose(labels):
        new = [p for p in later if labels and p not in considered]
        considered.extend(new)
        return new

    best = search(
        proposals,
        evaluate=evaluate,
        propose=propose,
        faster=lambda entry, before: entry.paired.faster,
        less_kernel_time=less,
        expired=lambda p: p.name in out_of_time,
        needs=lambda p: [q for q in (FREEZE, NARROW, PACK, GRAPHS) if q.name in p.needs],
    )
    return (best.build if best is not None else None), tried


def test_a_faster_pass_is_kept_and_a_slower_one_is_not():
    assert run({"narrow": (5.0, 5.0)}, [NARROW]) == ("narrow", ["narrow"])
    assert run({"narrow": (11.0, 11.0)}, [NARROW]) == (None, ["narrow"])


def test_an_enabling_pass_stays_although_it_is_no_faster():
    walls = {"freeze": (10.3, 10.3), "freeze+narrow": (4.0, 4.0)}
    assert run(walls, [FREEZE, NARROW]) == ("freeze+narrow", ["freeze", "freeze+narrow"])


def test_an_enabling_pass_alone_is_not_kept_where_nothing_comes_of_it():
    walls = {"freeze": (10.0, 10.0), "freeze+narrow": (10.1, 10.1)}
    assert run(walls, [FREEZE, NARROW])[0] is None


def test_shorter_kernels_stay_while_the_device_waits_for_launches():
    """The wall gains nothing from shorter kernels until the waiting is gone."""
    walls = {"narrow": (10.4, 2.0), "narrow+graphs": (2.1, 2.0)}
    assert run(walls, [NARROW], later=[GRAPHS]) == ("narrow+graphs", ["narrow", "narrow+graphs"])


def test_a_kept_candidate_is_labelled_again():
    walls = {"narrow": (6.0, 2.0), "narrow+graphs": (2.1, 2.0)}
    assert run(walls, [NARROW], later=[GRAPHS])[0] == "narrow+graphs"


def test_a_broken_or_slower_addition_leaves_the_best_as_it_was():
    walls = {"narrow": (6.0, 2.0), "narrow+graphs": None}
    assert run(walls, [NARROW], later=[GRAPHS])[0] == "narrow"
    walls["narrow+graphs"] = (7.0, 2.0)
    assert run(walls, [NARROW], later=[GRAPHS])[0] == "narrow"


def test_what_a_pass_needs_joins_its_trial():
    walls = {"freeze": (12.0, 12.0), "freeze+pack": (6.0, 6.0)}
    assert run(walls, [FREEZE, PACK]) == ("freeze+pack", ["freeze", "freeze+pack"])
    assert run(walls, [PACK])[1] == ["freeze+pack"]


def test_passes_without_time_are_not_tried():
    assert run({"narrow": (5.0, 5.0)}, [NARROW, GRAPHS], out_of_time=("graphs",)) == ("narrow", ["narrow"])
