"""Dumps: numbered files that read as Python, the graph before and after each pass, with what it was told and did."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt import dump
from fxopt.dump import Dumper
from fxopt.labels import Axis, Label
from fxopt.manager import run_pass
from fxopt.registry import Candidate, Configuration, GraphPass, PassContext, PassReport, Stage
from fxopt.verify import Precision, parse_precision

aten = torch.ops.aten
LABEL = Label(Axis.MEMORY_BOUND, "group", ("relu",), "k:1", (), "high", 12_300.0, "It moves\ntoo much.")
OTHER = replace(LABEL, axis=Axis.COMPUTE_BOUND, why="Of no interest to the pass.")
CONTEXT = PassContext(device=torch.device("cpu"), budget=parse_precision("fp32"), labels=(LABEL, OTHER))


@dataclass(frozen=True)
class Relu(GraphPass):
    name: ClassVar[str] = "relu_pass"
    answers: ClassVar[frozenset[Axis]] = frozenset({Axis.MEMORY_BOUND})
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32

    target: Any = aten.clamp_min.default

    def candidates(self, graph, context):
        yield Candidate("relu")
        yield Candidate("tanh", "not a relu")

    def rewrite(self, graph, node, context):
        with graph.inserting_before(node):
            new = graph.call_function(self.target, (node.args[0], 0))
        node.replace_all_uses_with(new)
        graph.erase_node(node)


@pytest.fixture
def graph():
    return make_fx(lambda x: torch.tanh(torch.relu(x.t())), tracing_mode="fake")(torch.randn(4, 8)).graph


def files(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.iterdir())}


def test_the_graph_before_and_after_reads_as_python_with_types_shapes_and_strides(graph, tmp_path):
    report = run_pass(Relu(), graph, CONTEXT, Dumper(tmp_path, "0_0-abc"))
    found = files(tmp_path)
    assert list(found) == ["0001.0_0-abc.joint.relu_pass.after.py", "0001.0_0-abc.joint.relu_pass.before.py"]
    after, before = found.values()
    for text in (before, after):
        (forward,) = ast.parse(text).body
        assert isinstance(forward, ast.FunctionDef) and forward.args.args[-1].arg == "x_1"
        assert '"f32[8, 4][1, 8]cpu"' in text
        assert "# pass relu_pass(target=" in text and "stage joint, on cpu" in text
        assert "# label memory_bound on relu, headroom 12.3 us: It moves\n# too much.\n" in text
        assert "Of no interest" not in text
    assert "aten.relu.default" in before and "aten.clamp_min.default" not in before
    assert "aten.clamp_min.default" in after and "aten.relu.default" not in after
    assert "# 1 matched, 1 rewritten, 1 nodes created, 1 erased, " in after
    assert "# refused tanh: not a relu\n" in after and "refused" not in before
    assert report.error == ""


def test_an_undone_pass_leaves_its_error_and_what_it_had_made(graph, tmp_path):
    report = run_pass(Relu(aten.sum.dim_IntList), graph, CONTEXT, Dumper(tmp_path))
    found = files(tmp_path)
    assert list(found) == ["0001.graph.joint.relu_pass.before.py", "0001.graph.joint.relu_pass.undone.py"]
    undone = found["0001.graph.joint.relu_pass.undone.py"]
    assert undone.startswith(f"# UNDONE: {report.error.splitlines()[0]}\n") and "outputs: " in report.error
    assert "aten.sum.dim_IntList" in undone
    ast.parse(undone)


def test_the_bodies_of_higher_order_operators_are_shown(tmp_path):
    def fn(x):
        return torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,)) + torch.relu(x)

    gm = make_fx(fn, tracing_mode="fake")(torch.randn(4))
    run_pass(Relu(), gm.graph, CONTEXT, Dumper(tmp_path))
    before = (tmp_path / "0001.graph.joint.relu_pass.before.py").read_text()
    assert "# self.true_graph_0\n" in before and "aten.sin.default" in before and "aten.cos.default" in before


def test_a_pass_that_changes_no_graph_leaves_a_note(tmp_path):
    report = PassReport("relu_pass", "config", 2, 2, (("w", "unused"),), True)
    Dumper(tmp_path, "g").note(Relu(), CONTEXT, report, Configuration({"max_autotune": True}, frozenset({2, 1})))
    (text,) = files(tmp_path).values()
    assert "# 2 matched, 2 rewritten" in text and "# refused w: unused" in text
    assert "# Inductor options: {'max_autotune': True}" in text and "# inputs held constant: [1, 2]" in text


def test_numbers_count_over_graphs_and_go_on_after_an_earlier_run(graph, tmp_path, monkeypatch):
    (tmp_path / "0041.old.joint.p.before.py").touch()
    (tmp_path / "notes.txt").touch()
    for name in ("a", "b/c d"):
        run_pass(Relu(), graph, CONTEXT, Dumper(tmp_path, name))
    numbered = sorted(name for name in files(tmp_path) if name[0] == "0")
    assert [name.split(".joint")[0] for name in numbered] == [
        "0041.old",
        "0042.a",
        "0042.a",
        "0043.b_c_d",
        "0043.b_c_d",
    ]


def test_processes_that_share_a_directory_do_not_overwrite_each_other(tmp_path):
    script = (
        "import sys, time\n"
        "sys.path[:0] = sys.argv[2:]\n"
        "from test_dump import *\n"
        "for _ in range(40): Dumper(Path(sys.argv[1])).note(Relu(), CONTEXT, PassReport('relu_pass', 'joint'))\n"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", script, str(tmp_path / "dumps"), str(here), str(here.parents[1])]
    running = [subprocess.Popen(command, env={**os.environ, "KINETO_LOG_LEVEL": "99"}) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert len(files(tmp_path / "dumps")) == 120


def test_a_directory_that_cannot_be_written_costs_one_warning_and_nothing_else(graph, tmp_path):
    file = tmp_path / "a file"
    file.touch()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            report = run_pass(Relu(), graph, CONTEXT, Dumper(file / "dumps"))
            graph = make_fx(lambda x: torch.tanh(torch.relu(x)), tracing_mode="fake")(torch.randn(4, 8)).graph
            assert (report.rewritten, report.error) == (1, "")
    assert [str(one.message) for one in said if "no dumps in" in str(one.message)] == [
        f"fxopt: no dumps in {file / 'dumps'}: Not a directory"
    ]


def test_a_graph_that_cannot_be_shown_as_code_is_shown_as_text(graph, tmp_path, monkeypatch):
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no code")

    monkeypatch.setattr(torch.fx.Graph, "python_code", fails)
    shown = dump._code(graph)
    assert "cannot be shown as code: no code" in shown and "#     %relu" in shown
    ast.parse(shown)
