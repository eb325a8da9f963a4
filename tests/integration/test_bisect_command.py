"""`fxopt bisect` finds a rewrite with wrong numbers, which the check let through, by the command that fails of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxopt.bisect import read_log

REPOSITORY = Path(__file__).resolve().parents[2]

PASSES = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from fxopt.labels import Axis
from fxopt.registry import Candidate, GraphPass, Stage
from fxopt.verify import Precision

aten = torch.ops.aten


class Everywhere(GraphPass):
    answers: ClassVar[frozenset[Axis]] = frozenset(Axis)
    stage: ClassVar[Stage] = Stage.JOINT
    precision: ClassVar[Precision] = Precision.FP32

    def candidates(self, graph, context):
        return [Candidate(node.name) for node in graph.nodes if node.target is self.before_target]

    def rewrite(self, graph, node, context):
        with graph.inserting_before(node):
            new = graph.call_function(*self.after_call(node))
        node.replace_all_uses_with(new)
        graph.erase_node(node)


@dataclass(frozen=True)
class Right(Everywhere):
    """relu(x) -> clamp_min(x, 0)"""

    name: ClassVar[str] = "right"
    enables: ClassVar[tuple[str, ...]] = ("wrong",)
    before_target: ClassVar[object] = aten.relu.default

    def after_call(self, node):
        return aten.clamp_min.default, (node.args[0], 0)


@dataclass(frozen=True)
class Wrong(Everywhere):
    """x @ w -> 0 * x: of the right type and shape, much faster, and wrong."""

    name: ClassVar[str] = "wrong"
    after: ClassVar[tuple[str, ...]] = ("right",)
    before_target: ClassVar[object] = aten.mm.default

    def after_call(self, node):
        return aten.mul.Tensor, (node.args[0], 0.0)
'''

SCRIPT = """
import sys

import torch

from profiler_core import roofline

# A device whose memory is far slower than any: every graph is then memory-bound.
made = roofline.Ceilings("test", 1.0, {"float32": 1e12}, "2026-01-01T00:00:00+00:00", {})
roofline.ceilings = lambda device, store: made
torch.manual_seed(0)
x = torch.randn(256, 256)
w = torch.randn(256, 256) / 256**0.5
nothing = torch.zeros(256, 256)


def model(x):
    # Only the second product counts, and little enough of it for a budget of 0.1; 1e-4 is far from it all the same.
    return torch.relu(x) + x @ nothing + 0.05 * (x @ w) + x @ nothing


options = {"passes": ["right", "wrong"], "precision": 0.1, "pairs": 6, "iterations": 2, "warmup": 1, "verify_inputs": 1}
with torch.no_grad():
    expected = model(x)
    found = torch.compile(model, backend="profile_guided", options=options)(x)
error = ((found - expected).norm() / expected.norm()).item()
print(f"the error is {error:.1e}")
sys.exit(error > 1e-4)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script whose model an installed package of two passes rewrites."""
    site = tmp_path / "site"
    metadata = site / "rewrites-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "rewrites.py").write_text(PASSES)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rewrites\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[fxopt.passes]\nright = rewrites:Right\nwrong = rewrites:Wrong\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(REPOSITORY)]))
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def bisect(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fxopt.cli", "bisect", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_rewrite_that_makes_a_script_fail_is_named_with_its_remedy(script, tmp_path, monkeypatch):
    monkeypatch.delenv("FXOPT_PLAN_DIR")
    log = tmp_path / "rewrites.tsv"
    done = bisect("--log", str(log), "--", sys.executable, str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    listed = read_log(log)
    assert [rewrite.number for rewrite in listed] == [1, 2, 3, 4]
    assert [rewrite.pass_name for rewrite in listed] == ["right", "wrong", "wrong", "wrong"]
    found = done.stdout.splitlines()
    assert "no rewrite: succeeds (exit code 0" in done.stdout
    assert "the command fails from rewrite 3 on:" in found
    assert any(line.startswith(f"  3  wrong at {listed[2].target} ") for line in found)
    assert f"FXOPT_DISABLE=wrong {sys.executable} {script}" in done.stdout


@pytest.mark.slow
def test_plans_that_are_there_are_followed_and_left_as_they_are(script, plan_dir):
    assert subprocess.run([sys.executable, str(script)], capture_output=True, check=False).returncode == 1
    plans = {path: path.read_text() for path in (plan_dir / "plans").glob("*.json")}
    (plan,) = map(json.loads, plans.values())
    assert [use["name"] for use in plan["passes"]] == ["right", "wrong"]
    done = bisect(sys.executable, str(script))
    assert done.returncode == 0 and "  3  wrong at " in done.stdout
    assert {path: path.read_text() for path in (plan_dir / "plans").glob("*.json")} == plans
