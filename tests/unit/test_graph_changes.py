"""Graphs before and after a pass, to read: short ones whole, long ones around the changes, equal ones once."""

from __future__ import annotations

import dataclasses
import json
import operator
import re
from pathlib import Path

import made_reports
import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxopt import graph_text
from fxopt.manager import run_pass
from fxopt.registry import Candidate, GraphPass, PassContext, Stage
from fxopt.report import sources
from fxopt.report.explain import explain
from fxopt.report.model import TRIED_LINES, Report, to_plain
from fxopt.verify import parse_precision

aten = torch.ops.aten


@pytest.fixture
def graph() -> fx.Graph:
    """relu(x.t() @ w), and the maximum of each row."""
    made = fx.Graph()
    with FakeTensorMode():
        x, w = torch.empty(4, 3), torch.empty(4, 5)
        a, b = made.placeholder("x"), made.placeholder("w")
        a.meta["val"], b.meta["val"] = x, w
        turned = made.call_function(aten.permute.default, (a, [1, 0]))
        turned.meta["val"] = x.t()
        product = made.call_function(aten.mm.default, (turned, b))
        product.meta["val"] = x.t() @ w
        most = made.call_function(aten.max.dim, (product, 1))
        most.meta["val"] = tuple(torch.max(x.t() @ w, 1))
        first = made.call_function(operator.getitem, (most, 0))
        first.meta["val"] = most.meta["val"][0]
        positive = made.call_function(aten.relu.default, (product,))
        positive.meta["val"] = product.meta["val"]
    made.output((positive, first))
    fx.GraphModule(torch.nn.Module(), made)
    return made


BEFORE = """\
x: float32[4, 3]
w: float32[4, 5]
permute_default: float32[3, 4] strides [1, 3] = aten.permute.default(x, [1, 0])
mm_default: float32[3, 5] = aten.mm.default(permute_default, w)
max_dim: (float32[3], int64[3]) = aten.max.dim(mm_default, 1)
getitem: float32[3] = operator.getitem(max_dim, 0)
relu_default: float32[3, 5] = aten.relu.default(mm_default)
return (relu_default, getitem)"""


def test_a_line_tells_a_node_what_it_holds_and_what_it_reads(graph: fx.Graph) -> None:
    assert "\n".join(graph_text.lines(graph)) == BEFORE


def test_a_symbolic_size_is_named_and_gets_no_guard() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(lambda x: x.t() * 2, tracing_mode="symbolic")(torch.empty(6, 4))
    env = next(node.meta["val"] for node in traced.graph.nodes).shape[0].node.shape_env
    guards = len(env.guards)
    first, *_ = graph_text.lines(traced.graph)
    assert re.fullmatch(r"x_1: float32\[s\d+, s\d+\]", first) and len(env.guards) == guards


@dataclasses.dataclass(frozen=True)
class Clamped(GraphPass):
    """relu(y) becomes clamp_min(y, 0)."""

    name = "clamped"
    stage = Stage.POST_GRAD

    def candidates(self, graph: fx.Graph, context: PassContext) -> list[Candidate]:
        return [Candidate(node.name) for node in graph.nodes if node.target is aten.relu.default]

    def rewrite(self, graph: fx.Graph, node: fx.Node, context: PassContext) -> None:
        with graph.inserting_before(node):
            made = graph.call_function(aten.clamp_min.default, (node.args[0], 0))
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)


def test_a_pass_that_changes_a_graph_reports_both_of_them(graph: fx.Graph) -> None:
    context = PassContext(torch.device("cpu"), parse_precision("fp32"))
    report = run_pass(Clamped(), graph, context)
    assert report.changed and not report.error
    before, after = graph_text.sides(report.change)
    assert before[0] == after[0] == "@@ -1,8 +1,8 @@"
    assert "\n".join(before[1:]) == BEFORE and after[1:] == graph_text.lines(graph)
    assert graph_text.names(report.change) == (
        {"relu_default", "return (relu_default, getitem)"},
        {"clamp_min_default", "return (clamp_min_default, getitem)"},
    )
    unchanged = run_pass(Clamped(), graph, context)
    assert unchanged.change == "" and not unchanged.changed


def test_of_a_long_graph_the_lines_around_the_changes_are_kept() -> None:
    before = [f"n{i}: float32[2] = aten.relu.default(n{i - 1})" for i in range(1000)]
    after = [line.replace("relu", "gelu") if i in (300, 700) else line for i, line in enumerate(before)]
    held = graph_text.difference(before, after).split("\n")
    assert [line for line in held if line.startswith("@@")] == ["@@ -295,13 +295,13 @@", "@@ -695,13 +695,13 @@"]
    assert len(held) == 2 * (1 + 2 * graph_text.CONTEXT + 2)
    assert graph_text.difference(before, before) == ""


def test_a_difference_is_bounded_and_counts_what_it_leaves_out() -> None:
    held = graph_text.difference([f"a{i}" for i in range(5000)], [f"b{i}" for i in range(5000)]).split("\n")
    assert (
        len(held) == graph_text.MOST_LINES + 1 and held[-1] == f"@@ and {10_001 - graph_text.MOST_LINES} more lines @@"
    )


def test_a_graph_that_cannot_be_shown_costs_nothing(graph: fx.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(graph: fx.Graph) -> list[str]:
        raise RuntimeError("no text")

    monkeypatch.setattr(graph_text, "lines", fails)
    assert graph_text.change(graph, graph) == ""


def changed_report() -> Report:
    report = made_reports.full()
    tried, kept = report.graphs[0].candidates
    long = graph_text.difference([f"a{i}" for i in range(500)], [f"b{i}" for i in range(500)])
    (one,), (other,) = tried.reports, kept.reports
    again = dataclasses.replace(one, change="+same")
    tried.reports = [dataclasses.replace(one, change=long), again, again]
    kept.reports = [dataclasses.replace(other, change="+same"), dataclasses.replace(other, change="-mm: x\n+made: y")]
    return report


def test_a_report_holds_equal_changes_once_and_of_what_was_not_kept_the_beginning(tmp_path: Path) -> None:
    report = changed_report()
    sources.write(report, tmp_path / "r.json")
    (data,) = json.loads((tmp_path / "r.json").read_text())["graphs"]
    assert list(data["changes"].values()).count("+same") == 1 and len(data["changes"]) == 3
    again = sources.read(tmp_path / "r.json")
    tried, kept = again.graphs[0].candidates  # type: ignore[union-attr]
    assert [held.change for held in kept.reports] == ["+same", "-mm: x\n+made: y"]
    assert [held.change.count("\n") for held in tried.reports] == [TRIED_LINES, 0, 0]
    assert tried.reports[0].change.endswith("more lines @@")
    assert again.to_json() == report.to_json()


def test_a_plan_holds_no_graphs() -> None:
    (tried, _) = changed_report().graphs[0].candidates
    assert [held["change"] for held in to_plain(tried)["reports"]] == ["", "", ""]


def test_a_damaged_table_of_changes_loses_them_and_nothing_else() -> None:
    for changes in (None, [], {"1": 3}, {}):
        data = json.loads(json.dumps(changed_report().to_json()))
        data["graphs"][0]["changes"] = changes
        if changes == {"1": 3}:
            with pytest.raises(ValueError, match="change: expected a text, got 3"):
                Report.from_json(data)
        else:
            assert Report.from_json(data).graphs[0].passes == ["tf32_matmul"]


def test_an_explanation_says_which_passes_rewrote_the_node() -> None:
    found = explain(changed_report(), "mm").tried
    assert ("tf32_matmul", "rewrote", "kept") in [(t.pass_name, t.did, t.outcome) for t in found]
