"""The search: which trials are made, what stays under later passes, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fxopt.labels import Axis, Label
from fxopt.measure import PairedResult
from fxopt.registry import GraphPass, RuntimePass, Stage
from fxopt.report.model import CandidateReport
from fxopt.search import Proposal, Search, Step, Trial, added_to, by_headroom

LAUNCH = Label(Axis.LAUNCH_BOUND, "graph", (), "", (), "high", 1.0, "why")


def make(name: str, stage: Stage, **members: Any) -> Any:
    return dataclass(frozen=True)(type(name, (GraphPass,), {"name": name, "stage": stage, **members}))()


@dataclass(frozen=True)
class Tiled(GraphPass):
    name: ClassVar[str] = "tiled"
    stage: ClassVar[Stage] = Stage.JOINT
    conflicts: ClassVar[tuple[str, ...]] = ("narrow",)
    size: int = 1


FREEZE = make("freeze", Stage.CONFIG, enables=("narrow",))
NARROW = make("narrow", Stage.JOINT)
PACK = make("pack", Stage.POST_GRAD, needs=("freeze",))
GRAPHS = make("graphs", Stage.RUNTIME)
BASELINE = (10.0, 10.0)


def spell(passes):
    return "+".join(p.name + (str(p.size) if isinstance(p, Tiled) else "") for p in passes)


class World:
    """A search where `walls` maps a set of passes to (wall, kernel time), or None for a broken build."""

    def __init__(self, walls, later=(), out_of_time=(), together=False, idle=()):
        self.walls, self.later, self.out_of_time = walls, list(later), out_of_time
        self.together, self.idle = together, idle
        self.tried: list[str] = []
        self.entries: dict[str, CandidateReport] = {}
        self.against: dict[str, str] = {}

    def evaluate(self, step, best):
        self.tried.append(("all " if step.together else "") + spell(step.passes))
        if step.together:
            left = [p for p in step.passes if p.name not in self.idle]
            step = replace(step, passes=tuple(step.joining(left, step.passes)))
        key = spell(step.passes)
        self.against[key] = best.build if best is not None else "baseline"
        if self.walls[key] is None:
            return None
        wall, kernels = self.walls[key]
        before = self.walls[best.build][0] if best is not None else BASELINE[0]
        ratio = before / wall
        entry = self.entries[key] = CandidateReport(key, [p.name for p in step.passes])
        entry.paired = PairedResult(ratio, ratio * 0.99, ratio * 1.01, 6, before, wall, 0.01, {}, ())
        entry.kernel_ns = kernels
        entry.labels = [LAUNCH] if kernels < 0.8 * wall else []
        return Trial(list(step.passes), key, entry, frozenset(self.idle) if step.together else frozenset())

    def propose(self, labels):
        new, self.later = (self.later, []) if labels else ([], self.later)
        return [proposal(p) for p in new]

    def run(self, proposals):
        best = Search(
            evaluate=self.evaluate,
            propose=self.propose,
            faster=lambda entry, before: entry.paired.faster,
            less_kernel_time=lambda entry, old: entry.kernel_ns < 0.99 * (old.kernel_ns if old else BASELINE[1]),
            as_fast=lambda entry, before: entry.paired.as_fast,
            expired=lambda step: ("-" if step.removal else "") + step.subject.name in self.out_of_time,
            needs=lambda p: [q for q in (FREEZE, NARROW, PACK, GRAPHS) if q.name in p.needs],
            together=self.together,
        ).run(proposals)
        return best.build if best is not None else None


def proposal(p, headroom=1.0):
    return p if isinstance(p, Proposal) else Proposal((p,), headroom)


def run(walls, proposals, **more):
    """What is kept, and the sets that were tried in order."""
    world = World(walls, **more)
    return world.run([proposal(p) for p in proposals]), world.tried


def test_a_faster_pass_is_kept_and_a_slower_one_is_not():
    assert run({"narrow": (5.0, 5.0)}, [NARROW]) == ("narrow", ["narrow"])
    assert run({"narrow": (11.0, 11.0)}, [NARROW]) == (None, ["narrow"])


def test_an_enabling_pass_stays_although_it_is_no_faster():
    walls = {"freeze": (10.3, 10.3), "freeze+narrow": (4.0, 4.0), "narrow": (5.0, 5.0)}
    assert run(walls, [FREEZE, NARROW]) == ("freeze+narrow", ["freeze", "freeze+narrow", "narrow"])


def test_an_enabling_pass_alone_is_not_kept_where_nothing_comes_of_it():
    walls = {"freeze": (10.0, 10.0), "freeze+narrow": (10.1, 10.1)}
    assert run(walls, [FREEZE, NARROW])[0] is None


def test_shorter_kernels_stay_while_the_device_waits_for_launches():
    """The wall gains nothing from shorter kernels until the waiting is gone."""
    walls = {"narrow": (10.4, 2.0), "narrow+graphs": (2.1, 2.0), "graphs": (9.0, 9.0)}
    assert run(walls, [NARROW], later=[GRAPHS]) == ("narrow+graphs", ["narrow", "narrow+graphs", "graphs"])


def test_a_kept_candidate_is_labelled_again():
    walls = {"narrow": (6.0, 2.0), "narrow+graphs": (2.1, 2.0), "graphs": (9.0, 9.0)}
    assert run(walls, [NARROW], later=[GRAPHS])[0] == "narrow+graphs"


def test_a_broken_or_slower_addition_leaves_the_best_as_it_was():
    walls = {"narrow": (6.0, 2.0), "narrow+graphs": None}
    assert run(walls, [NARROW], later=[GRAPHS])[0] == "narrow"
    walls["narrow+graphs"] = (7.0, 2.0)
    assert run(walls, [NARROW], later=[GRAPHS])[0] == "narrow"


def test_what_a_pass_needs_joins_its_trial():
    walls = {"freeze": (12.0, 12.0), "freeze+pack": (6.0, 6.0)}
    assert run(walls, [FREEZE, PACK]) == ("freeze+pack", ["freeze", "freeze+pack"])
    assert run(walls, [PACK]) == ("freeze+pack", ["freeze+pack", "freeze"]), "and is then tried without it"


def test_passes_without_time_are_not_tried():
    assert run({"narrow": (5.0, 5.0)}, [NARROW, GRAPHS], out_of_time=("graphs",)) == ("narrow", ["narrow"])


# -- order ------------------------------------------------------------------------------------------------------------


def names(proposals):
    return [p.name for p in proposals]


def test_the_largest_headroom_is_tried_first_whatever_order_the_passes_run_in():
    walls = {"graphs": (3.0, 3.0), "narrow+graphs": (2.0, 2.0), "narrow": (6.0, 6.0)}
    tried = run(walls, [proposal(NARROW, 5.0), proposal(GRAPHS, 9.0)])[1]
    assert tried[:2] == ["graphs", "narrow+graphs"], "tried by headroom, run by stage"


def test_what_enables_a_pass_or_is_needed_by_it_is_tried_before_it():
    assert names(by_headroom([proposal(NARROW, 9.0), proposal(GRAPHS, 5.0), proposal(FREEZE, 1.0)])) == [
        "freeze",
        "narrow",
        "graphs",
    ]
    assert names(by_headroom([proposal(PACK, 2.0), proposal(FREEZE, 1.0)])) == ["freeze", "pack"]


def test_of_equal_headroom_the_order_given_stays():
    assert names(by_headroom([proposal(PACK), proposal(NARROW)])) == ["pack", "narrow"]


def test_what_is_proposed_later_takes_its_place_by_headroom():
    walls = {
        "narrow": (6.0, 2.0),
        "narrow+graphs": (2.5, 2.0),
        "narrow+pack": (5.5, 1.9),
        "freeze+narrow+pack": (5.5, 1.9),
        "freeze+narrow+pack+graphs": (2.0, 1.9),
        "freeze+pack+graphs": (4.0, 3.0),
        "graphs": (9.0, 9.0),
        "freeze+narrow+graphs": (2.4, 2.0),
    }
    given = [proposal(NARROW, 9.0), proposal(PACK, 1.0)]
    tried = run(walls, given, later=[proposal(GRAPHS, 5.0)])[1]
    assert tried[:3] == ["narrow", "narrow+graphs", "freeze+narrow+pack+graphs"]


# -- conflicts and variants -------------------------------------------------------------------------------------------


def test_a_pass_takes_those_it_conflicts_with_out_of_its_trial_and_has_to_beat_them():
    world = World({"narrow": (5.0, 5.0), "tiled1": (4.0, 4.0)})
    assert world.run([proposal(NARROW, 2.0), proposal(Tiled())]) == "tiled1"
    assert world.against["tiled1"] == "narrow"
    slower = World({"narrow": (5.0, 5.0), "tiled1": (6.0, 6.0)})
    assert slower.run([proposal(NARROW, 2.0), proposal(Tiled())]) == "narrow"


def test_a_conflict_holds_whichever_of_the_two_declares_it():
    world = World({"tiled1": (4.0, 4.0), "narrow": (5.0, 5.0)})
    assert world.run([proposal(Tiled(), 2.0), proposal(NARROW)]) == "tiled1"
    assert world.tried == ["tiled1", "narrow"]


def test_after_a_lost_conflict_later_passes_are_added_to_what_won():
    walls = {"narrow": (5.0, 5.0), "tiled1": (6.0, 6.0), "narrow+graphs": (3.0, 5.0), "graphs": (8.0, 9.0)}
    assert run(walls, [proposal(NARROW, 9.0), proposal(Tiled(), 5.0), proposal(GRAPHS, 1.0)])[0] == "narrow+graphs"


def test_what_needs_a_pass_leaves_with_it():
    unfreeze = make("unfreeze", Stage.CONFIG, conflicts=("freeze",))
    assert [p.name for p in added_to([FREEZE, NARROW, PACK], unfreeze, [])] == ["unfreeze", "narrow"]


def test_each_variant_is_a_trial_and_at_most_one_is_in_use():
    walls = {"tiled1": (6.0, 6.0), "tiled2": (4.0, 4.0), "tiled3": (5.0, 5.0)}
    variants = Proposal((Tiled(1), Tiled(2), Tiled(3)))
    world = World(walls)
    assert world.run([variants]) == "tiled2"
    assert world.tried == ["tiled1", "tiled2", "tiled3"]
    assert [world.against[key] for key in world.tried] == ["baseline", "tiled1", "tiled2"]


def test_a_needed_pass_that_is_in_use_keeps_its_options():
    needy = make("needy", Stage.POST_GRAD, needs=("tiled",))
    assert added_to([Tiled(3)], needy, [Tiled(1)]) == [Tiled(3), needy]


def test_no_set_is_tried_twice():
    walls = {"tiled1": (6.0, 6.0), "narrow": (5.0, 5.0)}
    tried = run(walls, [Proposal((Tiled(1), Tiled(1)), 2.0), NARROW])[1]
    assert tried == ["tiled1", "narrow"]


# -- removal ----------------------------------------------------------------------------------------------------------


def test_a_pass_that_later_ones_made_useless_is_dropped():
    world = World({"narrow": (8.0, 8.0), "narrow+graphs": (3.0, 8.0), "graphs": (3.01, 9.0)})
    assert world.run([proposal(NARROW, 2.0), proposal(GRAPHS)]) == "graphs"
    assert world.entries["graphs"].outcome == "kept" and "as fast without narrow" in world.entries["graphs"].reason


def test_a_pass_that_is_still_of_use_stays_and_the_reason_is_told():
    world = World({"narrow": (8.0, 8.0), "narrow+graphs": (3.0, 8.0), "graphs": (4.0, 9.0)})
    assert world.run([proposal(NARROW, 2.0), proposal(GRAPHS)]) == "narrow+graphs"
    assert world.entries["graphs"].outcome == "rejected" and "slower without narrow" in world.entries["graphs"].reason


def test_the_last_pass_added_is_not_dropped_for_that_set_was_tried():
    world = World({"narrow": (8.0, 8.0), "narrow+graphs": (3.0, 8.0), "graphs": None})
    world.run([proposal(NARROW, 2.0), proposal(GRAPHS)])
    assert world.tried == ["narrow", "narrow+graphs", "graphs"]


def test_a_pass_that_others_need_stays_until_they_are_gone():
    walls = {"freeze": (10.0, 10.0), "freeze+pack": (6.0, 6.0), "freeze+pack+graphs": (2.0, 6.0)}
    walls |= {"freeze+graphs": (2.0, 7.0), "graphs": (2.0, 7.0)}
    given = [proposal(FREEZE, 9.0), proposal(PACK, 8.0), proposal(GRAPHS, 7.0)]
    kept, tried = run(walls, given)
    assert tried[3:] == ["freeze+graphs", "graphs"], "freeze goes once pack is gone"
    assert kept == "graphs"
    walls["freeze+graphs"] = (3.0, 7.0)
    assert run(walls, given)[0] == "freeze+pack+graphs"


def test_every_removal_is_compared_with_the_whole_set_so_that_losses_do_not_add_up():
    a, b, c = (make(name, Stage.JOINT) for name in "abc")
    walls = {"a": (9.0, 9.0), "a+b": (8.0, 8.0), "a+b+c": (1.0, 1.0), "b+c": (1.009, 1.0), "c": (1.018, 1.0)}
    walls["b"] = (9.5, 9.5)
    world = World(walls)
    assert world.run([proposal(p) for p in (a, b, c)]) == "b+c"
    assert world.against["b+c"] == world.against["c"] == "a+b+c"


def test_what_only_wraps_is_taken_away_first_for_that_compiles_nothing():
    """A wrapper that came with all best guesses, and copies results at a greater cost than that of what it saves."""
    wrap = dataclass(frozen=True)(type("wrap", (RuntimePass,), {"name": "wrap", "stage": Stage.RUNTIME}))()
    walls = {"narrow+wrap": (6.0, 8.0), "narrow": (5.0, 5.0), "wrap": (9.0, 12.0)}
    given = [proposal(NARROW, 2.0), proposal(wrap)]
    kept, tried = run(walls, given, together=True, out_of_time=("-narrow",))
    assert tried == ["all narrow+wrap", "narrow"] and kept == "narrow"


def test_without_time_for_removals_the_whole_set_is_kept():
    walls = {"narrow": (8.0, 8.0), "narrow+graphs": (3.0, 8.0)}
    given = [proposal(NARROW, 2.0), proposal(GRAPHS)]
    assert run(walls, given, out_of_time=("-narrow",)) == ("narrow+graphs", ["narrow", "narrow+graphs"])


def test_what_lost_is_let_go_before_the_next_one_is_built():
    """It may hold a copy of all weights."""
    import gc
    import weakref

    class Code:
        pass

    held: list[Any] = []
    world = World({"narrow": (12.0, 12.0), "tiled1": (5.0, 5.0), "tiled1+graphs": (9.0, 9.0)})
    plain = world.evaluate

    def evaluate(step, best):
        gc.collect()
        assert [ref for ref in held if ref() is not None] == ([] if best is None else [weakref.ref(best.entry.code)])
        trial = plain(step, best)
        trial.entry.code = Code()
        held.append(weakref.ref(trial.entry.code))
        return trial

    world.evaluate = evaluate
    world.entries = weakref.WeakValueDictionary()
    assert world.run([proposal(NARROW, 3.0), proposal(Tiled(), 2.0), proposal(GRAPHS)]) == "tiled1"
    assert len(held) == 3


SLOW = make("slow", Stage.CONFIG, last=True)


def test_the_best_guesses_are_tried_together_first():
    walls = {"freeze+narrow+graphs": (2.0, 2.0), "freeze+narrow": (4.0, 2.0), "narrow+graphs": (2.5, 2.0)}
    walls |= {"freeze+graphs": (9.0, 9.0)}
    kept, tried = run(walls, [FREEZE, NARROW, GRAPHS], together=True)
    assert kept == "freeze+narrow+graphs"
    assert tried[0] == "all freeze+narrow+graphs"
    assert sorted(tried[1:]) == ["freeze+graphs", "freeze+narrow", "narrow+graphs"], "each is dropped once, none added"


def test_where_they_do_not_get_along_they_are_added_one_at_a_time():
    walls = {"narrow+graphs": None, "narrow": (5.0, 5.0), "graphs": (6.0, 5.0)}
    kept, tried = run(walls, [NARROW, GRAPHS], together=True)
    assert (kept, tried) == ("narrow", ["all narrow+graphs", "narrow"])


def test_of_two_in_conflict_the_one_with_more_headroom_is_in_and_the_other_is_tried_after():
    walls = {"tiled1+graphs": (4.0, 4.0), "narrow+graphs": (3.0, 3.0), "tiled1": (5.0, 4.0), "narrow": (8.0, 3.0)}
    walls |= {"graphs": (9.0, 9.0)}
    kept, tried = run(walls, [proposal(Tiled(), 9.0), proposal(NARROW, 5.0), GRAPHS], together=True)
    assert tried[:2] == ["all tiled1+graphs", "narrow+graphs"]
    assert kept == "narrow+graphs"


def test_other_variants_replace_the_first_one_where_they_are_faster():
    walls = {"tiled1+graphs": (4.0, 4.0), "tiled2+graphs": (3.0, 3.0), "tiled2": (5.0, 3.0), "graphs": (9.0, 9.0)}
    kept, tried = run(walls, [Proposal((Tiled(1), Tiled(2)), 9.0), GRAPHS], together=True)
    assert tried[:2] == ["all tiled1+graphs", "tiled2+graphs"]
    assert kept == "tiled2+graphs"


def test_a_pass_that_finds_nothing_to_do_is_left_out_of_what_was_tried_together():
    walls = {"narrow+graphs": (4.0, 4.0), "narrow": (8.0, 4.0), "graphs": (8.0, 8.0)}
    kept, tried = run(walls, [FREEZE, NARROW, GRAPHS], together=True, idle=("freeze",))
    assert kept == "narrow+graphs"
    assert tried == ["all freeze+narrow+graphs", "graphs", "narrow"], "and it is not tried again by itself"


def test_what_conflicts_with_a_pass_that_finds_nothing_to_do_is_tried_together_in_its_place():
    walls = {"narrow+graphs": (4.0, 4.0), "narrow": (8.0, 4.0), "graphs": (8.0, 8.0)}
    kept, tried = run(walls, [proposal(Tiled(), 9.0), proposal(NARROW, 5.0), GRAPHS], together=True, idle=("tiled",))
    assert kept == "narrow+graphs"
    assert tried == ["all tiled1+graphs", "graphs", "narrow"], "neither is tried again by itself"


def test_what_joins_brings_what_it_needs_and_has_no_conflict_with_who_is_there():
    needy = make("needy", Stage.POST_GRAD, needs=("freeze",), conflicts=("tiled",))
    other = make("other", Stage.POST_GRAD, conflicts=("needy",))
    step = Step((Tiled(), GRAPHS), GRAPHS, together=True, instead=((FREEZE, needy), (other,), (NARROW,)))
    assert spell(step.joining([GRAPHS], step.passes)) == "freeze+narrow+needy+graphs"
    assert spell(step.joining([Tiled(), GRAPHS], step.passes)) == "tiled1+other+graphs"
    assert spell(step.joining([GRAPHS], [needy])) == "narrow+other+graphs", "what is known to be of no use stays out"
    assert step.joining([], [*step.passes, FREEZE, needy, other, NARROW]) == [], "also where nothing else is left"


def test_what_compiles_long_is_tried_last_and_not_together():
    walls = {"narrow+graphs": (4.0, 4.0), "slow+narrow+graphs": (3.0, 3.0), "narrow": (8.0, 4.0)}
    walls |= {"graphs": (8.0, 8.0), "slow+graphs": (8.0, 8.0), "slow+narrow": (8.0, 8.0)}
    kept, tried = run(walls, [proposal(SLOW, 99.0), NARROW, GRAPHS], together=True)
    assert tried[:2] == ["all narrow+graphs", "slow+narrow+graphs"]
    assert kept == "slow+narrow+graphs"


def test_a_set_that_is_right_but_no_faster_does_not_stop_the_search():
    walls = {"narrow+graphs": (10.1, 10.1), "narrow": (5.0, 5.0)}
    kept, tried = run(walls, [NARROW, GRAPHS], together=True)
    assert (kept, tried) == ("narrow", ["all narrow+graphs", "narrow"])


def test_shorter_kernels_of_the_set_stay_for_what_their_new_labels_ask_for():
    walls = {"freeze+narrow": (20.0, 2.0), "freeze+narrow+graphs": (2.1, 2.0), "narrow+graphs": (2.2, 2.0)}
    walls |= {"freeze+graphs": (9.0, 9.0), "graphs": (9.0, 9.0)}
    kept, tried = run(walls, [FREEZE, NARROW], later=[GRAPHS], together=True)
    assert tried[:2] == ["all freeze+narrow", "freeze+narrow+graphs"]
    assert kept == "freeze+narrow+graphs"
