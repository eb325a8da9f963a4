"""Rewrites are counted over the process, in order, and those beyond the limit are denied."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxopt import bisect
from fxopt.bisect import LOG_VARIABLE, Bisection, Rewrite, is_limit, of_process, read_log


@pytest.mark.parametrize(("limit", "taken"), [(0, 0), (2, 2), (5, 5), (9, 5), (None, 5)])
def test_the_first_rewrites_are_taken_and_the_others_denied(limit, taken):
    bisection = Bisection(limit)
    answers = [bisection.take("fuse", f"mm_{i}") for i in range(5)]
    assert answers == [True] * taken + [False] * (5 - taken)
    assert bisection.count == 5


def test_a_denial_has_a_reason_that_is_told_from_any_other():
    assert Bisection(3).reason == "bisect limit 3"
    assert is_limit(Bisection(3).reason) and not is_limit("not labelled memory_bound")


def test_the_log_lists_each_rewrite_with_its_number_and_its_fate(tmp_path):
    log = tmp_path / "rewrites.tsv"
    bisection = Bisection(1, log, graph="0_0-abc")
    bisection.take("fuse", "mm")
    bisection.take("cast", "mm_1")
    assert log.read_text() == "1\tfuse\tmm\t0_0-abc\ttaken\n2\tcast\tmm_1\t0_0-abc\tdenied\n"
    assert read_log(log) == [Rewrite(1, "fuse", "mm", "0_0-abc", True), Rewrite(2, "cast", "mm_1", "0_0-abc", False)]


def test_a_log_that_is_none_is_named_with_the_line(tmp_path):
    log = tmp_path / "rewrites.tsv"
    log.write_text("1\tfuse\tmm\tg\ttaken\nnonsense\n")
    with pytest.raises(ValueError, match=r"rewrites\.tsv, line 2: .*FXOPT_BISECT_LOG.*nonsense"):
        read_log(log)


def test_a_log_that_cannot_be_written_costs_one_warning(tmp_path):
    bisection = Bisection(None, tmp_path)
    with pytest.warns(UserWarning, match="cannot be listed in") as said:
        assert bisection.take("fuse", "mm") and bisection.take("fuse", "mm_1")
    assert len(said) == 1


def test_graphs_of_one_process_share_one_count(tmp_path, monkeypatch):
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "log"))
    first, second = of_process(3, "a"), of_process(3, "b")
    assert first is not None and second is not None
    assert [first.take("p", "x"), second.take("p", "x"), first.take("p", "y"), second.take("p", "y")] == [
        True,
        True,
        True,
        False,
    ]
    assert [(r.number, r.graph) for r in read_log(tmp_path / "log")] == [(1, "a"), (2, "b"), (3, "a"), (4, "b")]
    other = of_process(4, "a")
    assert other is not None and other.count == 0


def test_nobody_bisects_who_has_not_asked(monkeypatch, tmp_path):
    monkeypatch.delenv(LOG_VARIABLE, raising=False)
    assert of_process(None) is None
    limited = of_process(0)
    assert limited is not None and not limited.take("p", "x")
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "log"))
    counted = of_process(None)
    assert counted is not None and counted.limit is None and counted.take("p", "x")


@pytest.fixture(autouse=True)
def fresh_count():
    bisect._count.cache_clear()
    yield
    bisect._count.cache_clear()


def test_threads_count_together(tmp_path: Path):
    from concurrent.futures import ThreadPoolExecutor

    bisection = Bisection(50, tmp_path / "log")
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda i: bisection.take("p", str(i)), range(100)))
    assert sum(taken) == 50
    assert [r.number for r in read_log(tmp_path / "log")] == list(range(1, 101))


@pytest.mark.parametrize(
    ("limit", "plans", "steps"),
    [
        (None, [None], ["tune"]),
        (3, [None, "plan"], ["tune", "apply plan under 3"]),
        (3, ["plan"], ["apply plan under 3"]),
        (3, [None, None], ["tune"]),
    ],
    ids=["no limit", "no plan yet", "a plan", "plans cannot be kept"],
)
def test_a_graph_is_decided_without_the_limit_and_what_was_decided_applied_under_it(monkeypatch, limit, plans, steps):
    import torch

    from fxopt.options import resolve_options
    from fxopt.tuner import Tuner

    done = []
    found = iter(plans)
    monkeypatch.setattr(Tuner, "_tune", lambda self: done.append("tune"))
    monkeypatch.setattr(Tuner, "load_plan", lambda self: next(found))
    monkeypatch.setattr(Tuner, "_verified_here", lambda self, plan: True)
    monkeypatch.setattr(Tuner, "apply", lambda self, plan: done.append(f"apply {plan} under {self.options.bisect}"))
    given = {} if limit is None else {"bisect": limit}
    gm = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    Tuner(gm, [torch.randn(4)], resolve_options(given), {}).run()
    assert done == steps
