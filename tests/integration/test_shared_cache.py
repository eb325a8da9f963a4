"""Processes that share Inductor's cache: whatever decides what a pass does makes new code, and nothing else does.

Each run is a process of its own, forked from one that has imported torch and fxopt. It compiles `relu(x) + sin(x)` with
a pass from an installed package, which turns relu(x) into x * FACTOR + (the headroom of its labels): so the numbers say
which code ran.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
X = [1.0, 2.0, 3.0, 4.0]

PASS = """
import os
from dataclasses import dataclass

import torch

from fxopt.labels import Axis
from fxopt.registry import Candidate, ConfigPass, Configuration, GraphPass, RuntimePass, Stage
from fxopt.verify import Precision
from rewrites import numbers

aten = torch.ops.aten


@dataclass(frozen=True)
class Scale(GraphPass):
    name = "scale"
    answers = frozenset({Axis.LAUNCH_BOUND})
    stage = Stage.JOINT
    precision = Precision.FP32

    def candidates(self, graph, context):
        with open(os.environ["RAN"], "a") as file:
            file.write("ran\\n")
        for node in graph.nodes:
            if node.target is aten.relu.default:
                yield Candidate(node.name, "" if context.labels else "not labelled launch_bound")
            elif node.target is aten.add.Tensor:
                yield Candidate(node.name, "not a relu")

    def rewrite(self, graph, node, context):
        headroom = sum(label.headroom_ns for label in context.labels)
        with graph.inserting_before(node):
            scaled = graph.call_function(aten.mul.Tensor, (node.args[0], numbers.FACTOR))
            new = graph.call_function(aten.add.Tensor, (scaled, headroom))
        node.replace_all_uses_with(new)
        graph.erase_node(node)


@dataclass(frozen=True)
class Unrolled(ConfigPass):
    name = "unrolled"
    stage = Stage.CONFIG
    precision = Precision.FP32

    def candidates(self, gm, inputs, context):
        yield 0, Candidate("input")

    def configure(self, accepted, context):
        return Configuration(patches={"unroll_reductions_threshold": 4})

    def took_effect(self, compiled, accepted, context):
        return len(accepted)


@dataclass(frozen=True)
class Shift(RuntimePass):
    name = "shift"
    stage = Stage.RUNTIME
    precision = Precision.FP32

    def wrap(self, fn, inputs, compiled, context):
        return lambda *args: [out + 1000.0 for out in fn(*args)]
"""

RUN = """
import json, os, sys, traceback
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fxopt import bisect, identity, rules
from fxopt.build import Builder
from fxopt.dump import Dumper
from fxopt.options import resolve_options
from fxopt.plan import plan_key
from fxopt.registry import PassContext
from fxopt.verify import parse_precision


class Users(CustomGraphPass):
    def __init__(self, name):
        self.name = name

    def __call__(self, graph):
        for node in graph.nodes:
            if node.target is torch.ops.aten.sin.default:
                node.target = getattr(torch.ops.aten, self.name).default

    def uuid(self):
        return "the user's " + self.name


def found_by(given):
    from rewrites.scale import Scale, Shift, Unrolled

    options = resolve_options({"thresholds": given["thresholds"]})
    thresholds = dict(options.thresholds)
    labels = rules.label_graph(1000.0, given["kernel_ns"], {"device_type": "cpu"}, thresholds=thresholds)
    found = {}

    def backend(gm, inputs):
        patches = {"fallback_by_default": True}  # torch's own kernels: no C++ has to be compiled
        if given["user"]:
            patches["joint_custom_pre_pass"] = Users(given["user"])
        device = torch.device("cpu")
        context = PassContext(device=device, budget=parse_precision("fp32"), labels=tuple(labels))
        passes = [Unrolled(), Scale(), Shift()] if given["every_kind"] else [Scale()]
        parts = identity.key_parts(
            gm,
            inputs,
            device=device,
            deciding=options.deciding(),
            patches=patches,
            passes=[(p.name, p.fingerprint()) for p in passes],
            session=False,
            weights="",
        )
        dumper = Dumper(Path(given["dump"]), "g") if given["dump"] else None
        bisection = bisect.of_process(given["bisect"], "g")
        reports = Path(given["reports"])
        build = Builder(gm, inputs, patches, context, reports, dumper=dumper, bisection=bisection).build(passes)
        found["errors"], found["effective"] = build.errors, build.effective
        found["key"], found["reports"] = plan_key(**parts), [report.to_json() for report in build.reports]
        return build.fn

    with torch.no_grad():
        y = torch.compile(lambda x: torch.relu(x) + torch.sin(x), backend=backend)(torch.tensor(given["x"]))
    found["y"] = y.tolist()
    found["served"] = sum(
        counters[group][name]
        for group, name in (("inductor", "fxgraph_cache_hit"), ("aot_autograd", "autograd_cache_hit"))
    )
    return found


for line in sys.stdin:
    child = os.fork()  # a process that has imported torch and fxopt, and nothing of the package's
    if child == 0:
        given = json.loads(line)
        os.environ.update(given["environ"])
        try:
            answer = found_by(given)
        except BaseException:
            answer = {"raised": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(json.dumps({"raised": f"the process ended with status {status}"}), flush=True)
"""


class Processes:
    """Runs that share a cache directory, and the package whose files they read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = root / "site" / "rewrites"
        self.package.mkdir(parents=True)
        (self.package / "__init__.py").touch()
        (self.package / "numbers.py").write_text("FACTOR = 2.0\n")
        (self.package / "scale.py").write_text(PASS)
        (root / "run.py").write_text(RUN)
        self.start()

    def start(self) -> None:
        """A new parent of the runs that follow: strings have other hashes in it."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.root / "site"), str(REPOSITORY)]),
            "PYTHONDONTWRITEBYTECODE": "1",  # a file written twice within a second has one time of change
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no threads, and so no harm in a fork
            "RAN": str(self.root / "ran"),
        }
        pipe = subprocess.PIPE
        self.parent = subprocess.Popen(
            [sys.executable, str(self.root / "run.py")], env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def end(self) -> None:
        self.parent.communicate()

    def run(self, *, log: Path | None = None, **asked: Any) -> dict[str, Any]:
        ran = self.root / "ran"
        ran.unlink(missing_ok=True)
        given = {
            "x": X,
            "reports": str(self.root / "reports"),
            "kernel_ns": 600.0,
            "thresholds": {},
            "user": "",
            "every_kind": False,
            "dump": None,
            "bisect": None,
            "environ": {"FXOPT_BISECT_LOG": str(log)} if log is not None else {},
            **asked,
        }
        self.parent.stdin.write(json.dumps(given) + "\n")
        self.parent.stdin.flush()
        found: dict[str, Any] = json.loads(self.parent.stdout.readline())
        assert "raised" not in found, found["raised"]
        assert found["errors"] == []
        found["ran"] = ran.exists()
        return found

    @contextlib.contextmanager
    def edited(self, name: str, old: str, new: str) -> Iterator[None]:
        path = self.package / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        try:
            yield
        finally:
            path.write_text(text)


def numbers(factor: float = 2.0, headroom: float = 400.0, other: Any = math.sin) -> list[float]:
    return pytest.approx([factor * x + headroom + other(x) for x in X], rel=1e-5)


PLAIN = pytest.approx([x + math.sin(x) for x in X])


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    made = Processes(tmp_path_factory.mktemp("shared"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def first(processes):
    """The first process, with a cold cache. Those after it are no children of its parent."""
    found = processes.run()
    processes.end()
    processes.start()
    return found


def test_the_first_process_runs_the_pass(first):
    assert first["ran"] and not first["served"]
    assert first["y"] == numbers()
    (report,) = first["reports"]
    assert (report["matched"], report["rewritten"], report["error"]) == (1, 1, "")


def test_where_nothing_changed_the_cache_serves_the_code_and_the_report_is_complete(processes, first):
    second = processes.run()
    assert second["served"] and not second["ran"]
    assert second == {**first, "served": second["served"], "ran": False}
    (report,) = second["reports"]
    assert [list(pair) for pair in report["refused"]] == [["add", "not a relu"]]
    assert (report["created"], report["erased"], report["changed"]) == (2, 1, True) and report["seconds"] > 0


def new_code(first: dict[str, Any], found: dict[str, Any]) -> bool:
    return found["ran"] and found["y"] != first["y"]


def test_an_edited_pass_runs(processes, first):
    with processes.edited("scale.py", "(scaled, headroom)", "(scaled, -headroom)"):
        found = processes.run()
    assert new_code(first, found) and found["key"] != first["key"]
    assert found["y"] == numbers(headroom=-400.0)


def test_an_edited_helper_module_of_the_pass_runs(processes, first):
    with processes.edited("numbers.py", "2.0", "3.0"):
        found = processes.run()
    assert new_code(first, found) and found["key"] != first["key"]
    assert found["y"] == numbers(factor=3.0)


def test_another_label_makes_new_code(processes, first):
    found = processes.run(kernel_ns=500.0)
    assert new_code(first, found)
    assert found["y"] == numbers(headroom=500.0)


def test_another_threshold_makes_other_labels_another_plan_and_new_code(processes, first):
    found = processes.run(thresholds={"launch_bound.launch_gap": 0.5})
    assert found["ran"] and found["key"] != first["key"]
    assert found["y"] == PLAIN
    assert ["relu", "not labelled launch_bound"] in found["reports"][0]["refused"]


def test_a_users_own_pass_in_the_slot_still_runs_and_its_uuid_counts(processes, first):
    cosine, tangent = (processes.run(user=name) for name in ("cos", "tan"))
    assert new_code(first, cosine) and cosine["y"] == numbers(other=math.cos)
    assert new_code(cosine, tangent) and tangent["y"] == numbers(other=math.tan)
    assert len({first["key"], cosine["key"], tangent["key"]}) == 3
    assert cosine["reports"][0]["rewritten"] == 1


# -- where passes must run, whatever a cache holds --------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(processes, first):
    """A process that makes two rewrites of three, lists them, and dumps the graphs."""
    log, dumps = processes.root / "rewrites.tsv", processes.root / "dumps"
    return processes.run(bisect=2, every_kind=True, log=log, dump=str(dumps)), log, dumps


def test_dumps_show_every_pass_although_a_cache_could_serve_the_code(limited):
    found, _, dumps = limited
    assert found["ran"] and not found["served"]
    assert sorted(path.name for path in dumps.iterdir()) == [
        "0001.g.joint.scale.after.py",
        "0001.g.joint.scale.before.py",
        "0002.g.config.unrolled.txt",
        "0003.g.runtime.shift.txt",
    ]
    assert "{'unroll_reductions_threshold': 4}" in (dumps / "0002.g.config.unrolled.txt").read_text()
    assert "refused graph: bisect limit 2" in (dumps / "0003.g.runtime.shift.txt").read_text()


def test_a_bisection_makes_the_first_rewrites_of_a_process_alone(limited):
    found, log, _ = limited
    assert found["y"] == numbers()  # and no shift
    assert log.read_text().splitlines() == [
        "1\tunrolled\tgraph\tg\ttaken",
        "2\tscale\trelu\tg\ttaken",
        "3\tshift\tgraph\tg\tdenied",
    ]
    assert [report["rewritten"] for report in found["reports"]] == [1, 1, 0]
    assert ["graph", "bisect limit 2"] in found["reports"][2]["refused"]


def test_a_pass_that_a_limit_leaves_out_has_not_failed(processes, first):
    none = processes.run(bisect=0, every_kind=True)
    assert none["y"] == PLAIN and none["errors"] == [] and none["effective"]
    for report in none["reports"]:
        assert (report["rewritten"], report["changed"], report["error"]) == (0, False, "")
        assert "bisect limit 0" in [why for _, why in report["refused"]]
