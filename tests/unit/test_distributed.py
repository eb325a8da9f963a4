"""How ranks come to one plan: threads stand for ranks, and a store in memory for the job's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fxopt import distributed
from fxopt.distributed import Group, NoAgreement, Session
from fxopt.plan import PassUse, Plan, plan_key
from fxopt.torch_api import graph_effects

KEY = plan_key(graph="a graph")
PLAN = Plan(key=KEY, decision="candidate", passes=[PassUse(name="p", stage="joint")])
SETTINGS = "one set of versions, passes and options"


def job(size: int, timeout: float = 5.0) -> list[Group]:
    store = dist.HashStore()
    return [Group(rank, size, store, timeout, 30.0) for rank in range(size)]


def in_parallel(groups: list[Group], run: Callable[[Group], Any]) -> list[Any]:
    """What `run` gives on each rank, an exception included."""
    found: list[Any] = [None] * len(groups)

    def one(place: int, group: Group) -> None:
        try:
            found[place] = run(group)
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=one, args=item) for item in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return found


def agree(group: Group, plan: Plan | None = PLAN, settings: str = SETTINGS) -> Any:
    session = group.session("graph", KEY)
    with session.alive():
        session.meet()
        if session.leads:
            session.publish(plan, settings, "rank 0 has none")
            return session.conclude(plan) if plan is not None else None
        return session.conclude(session.receive(settings))


def test_all_ranks_run_rank_zeros_plan():
    found = in_parallel(job(4), agree)
    assert [one.plan for one in found] == [PLAN.digest()] * 4
    assert [(one.rank, one.measured_by, one.reason) for one in found] == [(rank, 0, "") for rank in range(4)]


def test_where_rank_zero_has_no_plan_none_has_and_nothing_is_wrong():
    leader, *others = in_parallel(job(3), lambda group: agree(group, None))
    assert leader is None
    assert all(isinstance(one, NoAgreement) and one.usual and str(one) == "rank 0 has none" for one in others)


def test_one_refusal_is_everybodys():
    def run(group: Group) -> Any:
        session = group.session("graph", KEY)
        with session.alive():
            session.meet()
            if session.leads:
                session.publish(PLAN, SETTINGS)
            else:
                session.receive(SETTINGS)
            if group.rank == 2:
                session.give_up("RuntimeError: out of memory")
                return None
            return session.conclude(PLAN)

    found = in_parallel(job(4), run)
    assert [str(one) for one in found if one is not None] == ["rank 2: RuntimeError: out of memory"] * 3


def test_a_rank_that_fails_before_it_has_a_plan_to_give_is_told_to_all():
    def run(group: Group) -> Any:
        session = group.session("graph", KEY)
        with session.alive():
            session.meet()
            if session.leads:
                session.give_up("OSError: no profiler")
                return None
            return session.receive(SETTINGS)

    found = in_parallel(job(3), run)
    assert [str(one) for one in found[1:]] == ["rank 0: OSError: no profiler"] * 2


def test_ranks_with_other_versions_or_options_run_no_plan_of_rank_zero():
    found = in_parallel(job(2), lambda group: agree(group, settings=f"options of rank {group.rank}"))
    assert all("not those of rank 0" in str(one) for one in found)


def test_a_graph_that_not_all_ranks_reach_is_given_up_in_time_and_whoever_comes_later_does_not_wait():
    groups = job(3, timeout=0.3)
    early = in_parallel(groups[:2], agree)
    assert all("2 of 3 ranks reached this graph" in str(one) for one in early)
    started = time.monotonic()
    (late,) = in_parallel(groups[2:], agree)
    assert isinstance(late, NoAgreement) and time.monotonic() - started < 0.3


def test_ranks_that_meet_graphs_in_another_order_do_not_wait_for_ever():
    def run(group: Group) -> Any:
        met = {}
        for name in ("one", "other") if group.rank else ("other", "one"):
            try:
                group.session(name, KEY).meet()
                met[name] = True
            except NoAgreement as error:
                met[name] = False
                assert "of 2 ranks reached this graph" in str(error)
        return met

    first, second = in_parallel(job(2, timeout=0.3), run)
    assert first == second, "both see the same"
    assert not all(first.values())


def test_each_graph_that_others_miss_halves_the_wait_and_each_that_they_reach_doubles_it():
    alone, other = job(2, timeout=0.4)
    for name in "abc":
        with pytest.raises(NoAgreement):
            alone.session(name, KEY).meet()
    assert alone.missed == 3
    in_parallel([alone, other], lambda group: group.session("d", KEY).meet())
    assert alone.missed == 2


def test_a_rank_that_gives_no_sign_of_life_is_dead():
    def run(group: Group) -> Any:
        session = group.session("graph", KEY)
        session.meet()
        if group.rank == 1:
            return None  # ends without a word
        with session.alive():
            if session.leads:
                session.publish(PLAN, SETTINGS)
            else:
                session.receive(SETTINGS)
            return session.conclude(PLAN)

    found = in_parallel(job(3, timeout=0.5), run)
    assert {str(found[0]), str(found[2])} == {"rank 1 has given no sign of life for 0.5 s"}


def test_a_rank_at_work_for_longer_than_the_timeout_is_waited_for():
    def run(group: Group) -> Any:
        session = group.session("graph", KEY)
        with session.alive():
            session.meet()
            if session.leads:
                time.sleep(1.2)
                session.publish(PLAN, SETTINGS)
            else:
                session.receive(SETTINGS)
            return session.conclude(PLAN)

    assert all(one.plan for one in in_parallel(job(2, timeout=0.4), run))


def test_what_was_agreed_holds_for_the_same_graph_again():
    groups = job(2)
    in_parallel(groups, agree)
    again = groups[1].session("graph", KEY)
    assert again.settled and again.settled_plan() == PLAN
    assert not groups[1].session("graph", plan_key(graph="with other weights")).settled


def test_a_message_that_was_altered_is_not_used():
    groups = job(2)
    store = groups[0].store

    def run(group: Group) -> Any:
        session = group.session("graph", KEY)
        with session.alive():
            session.meet()
            if session.leads:
                session.publish(PLAN, SETTINGS)
                return session.conclude(PLAN)
            while not store.check(["graph/0/plan"]):
                time.sleep(0.01)
            store.set("graph/0/content/0", PLAN.content().decode().replace("candidate", "baseline "))
            return session.receive(SETTINGS)

    assert all("digest differs" in str(one) for one in in_parallel(groups, run))


def test_where_the_store_is_gone_there_is_no_agreement_and_no_second_warning(monkeypatch):
    (group,) = job(1)

    class Gone:
        def __getattr__(self, name: str) -> Any:
            def fails(*args: Any) -> Any:
                raise dist.DistNetworkError("Connection reset by peer\nframe #0")

            return fails

    group.store = Gone()
    session = group.session("graph", KEY)
    with pytest.raises(distributed.STORE_FAILED) as error, session.alive():
        session.meet()
    session.give_up("which nobody hears")
    first = session.lost(error.value)
    assert str(first).endswith("store is gone (DistNetworkError: Connection reset by peer)") and not first.usual
    with pytest.raises(NoAgreement, match="no store to agree through") as error, group.session("other", KEY).alive():
        group.session("other", KEY).meet()
    assert error.value.usual


def test_long_texts_go_in_pieces(monkeypatch):
    monkeypatch.setattr(distributed, "_PIECE", 7)
    store = dist.HashStore()
    distributed._put(store, "name", "a text of more than seven letters, ü included")
    assert distributed._take(store, "name") == "a text of more than seven letters, ü included"


def test_outside_of_a_job_there_is_no_group():
    assert distributed.current(1.0, 1.0) is None


def test_a_graph_that_communicates_is_known_by_its_operators():
    def graph_of(fn: Callable[..., Any]) -> list[str]:
        seen: list[list[str]] = []

        def backend(gm, inputs):
            seen.append(graph_effects.collectives(gm))
            return gm.forward

        torch._dynamo.reset()
        torch.compile(fn, backend=backend, fullgraph=True)(torch.ones(2))
        return seen[0]

    assert graph_of(lambda x: nn.functional.relu(x)) == []
    assert graph_of(lambda x: torch.ops._c10d_functional.wait_tensor(x * 2)) == ["wait_tensor"]


def test_session_names_do_not_depend_on_the_rank():
    first, second = job(2)
    assert first.session("graph", KEY).name == second.session("graph", plan_key(graph="its own weights")).name
    assert isinstance(first.session("graph", KEY), Session)
