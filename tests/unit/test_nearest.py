"""Why no plan was found: what differs from the nearest plan of the same graph."""

from __future__ import annotations

import json

import pytest

from fxopt import nearest
from fxopt.plan import Plan, PlanStore, plan_key

PARTS = {
    "graph": "add", "inputs": [[4]], "shared": [], "device": {"threads": 2}, "versions": {"torch": "2"}, "flags": {},
    "options": {}, "inductor": {}, "inductor_config": "c", "passes": [["a", "1"]], "rules": "r", "session": False,
    "weights": "",
}  # fmt: skip


@pytest.fixture
def store(tmp_path) -> PlanStore:
    return PlanStore(tmp_path)


def keep(store, environment=None, **changed):
    parts = {**PARTS, **changed}
    environment = {nearest.FIELD: nearest.digests(parts)} if environment is None else environment
    key = plan_key(**parts)
    store.save(Plan(key=key, decision="baseline", environment=environment, tuning_seconds=0, calls_to_pay=None))
    return key


def test_without_plans_it_says_where_they_would_be(store):
    assert nearest.explain(store, PARTS) == f"there are no plans in {store.plans_dir}"


def test_the_nearest_plan_of_the_graph_is_named_with_what_differs(store):
    keep(store, inputs=[[8]], versions={"torch": "3"})
    key = keep(store, device={"threads": 1})
    keep(store, graph="mul")
    found = nearest.explain(store, PARTS)
    assert found == f"the plan {key[:12]} is of this graph, but differs in {nearest.SPELLED['device']}"


def test_several_differences_are_all_named(store):
    keep(store, inputs=[[8]], session=True)
    found = nearest.explain(store, PARTS)
    assert nearest.SPELLED["inputs"] in found and nearest.SPELLED["session"] in found
    assert nearest.SPELLED["device"] not in found


def test_plans_of_other_graphs_old_ones_and_broken_ones_are_no_neighbours(store):
    keep(store, graph="mul")
    keep(store, environment={}, inputs=[[9]])
    broken = store.path(keep(store, inputs=[[7]]))
    broken.write_text("{")
    assert "none of the 3 plans" in nearest.explain(store, PARTS)
    broken.write_text(json.dumps([]))
    assert "none of the 3 plans" in nearest.explain(store, PARTS)
