"""`fxopt optimize` and `fxopt bench` on a program and on a function; tuning itself is tested elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fxopt.cli import run
from fxopt.report.model import Report

pytestmark = pytest.mark.usefixtures("in_scripts")


def test_a_program_that_compiles_nothing_runs_on_the_backend(tmp_path, capsys):
    saved = tmp_path / "report.json"
    arguments = ["optimize", "-m", "package", "-o", "mode=apply", "--json", "--save", str(saved), "--", "3"]
    assert run(arguments) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert [graph["source"] for graph in report["graphs"]] == ["apply"]
    assert "package ran ['3']" in captured.err  # its own output makes way for the JSON
    assert "to have it in the program" not in captured.err  # for nothing was kept
    assert Report.from_json(json.loads(saved.read_text())).graphs[0].source == "apply"


def test_of_a_function_the_model_is_optimised_with_its_weights_held_constant(capsys):
    assert run(["optimize", "package.model:encoder_and_inputs", "-o", "mode=apply", "--json"]) == 0
    captured = capsys.readouterr()
    assert [graph["source"] for graph in json.loads(captured.out)["graphs"]] == ["apply"]
    assert "to have it in the program" not in captured.err


COMPILES = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).relu())

def step(x):
    return model(x) + 1

model, torchs = Two().eval(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
compiled = [torch.compile(f, backend="profile_guided") for f in (Two().eval(), torchs, step)]
with torch.no_grad():
    for one in compiled:
        one(torch.ones(4, 8))
"""


def test_graphs_of_a_program_that_calls_torch_compile_have_the_keys_that_they_have_without_fxopt(tmp_path, capsys):
    """So that the program finds the plans itself."""
    script = tmp_path / "compiles.py"
    script.write_text(COMPILES)
    assert run(["optimize", str(script), "-o", "mode=apply", "--json"]) == 0
    seen = [graph["key"] for graph in json.loads(capsys.readouterr().out)["graphs"]]
    own = "import fxopt; print('keys', *(graph.key for graph in fxopt.last_report().graphs))"
    script.write_text(COMPILES.replace("one(torch.ones(4, 8))", f"one(torch.ones(4, 8))\n        {own}"))
    environ = os.environ | {"FXOPT_MODE": "apply"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environ)
    keys = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("keys")]
    assert len(set(seen)) == 3 and keys == [[key] for key in seen]


def test_a_program_without_a_model_is_told(tmp_path, capsys):
    script = tmp_path / "plain.py"
    script.write_text("import torch\nprint(torch.ones(2))\n")
    assert run(["optimize", str(script)]) == 1
    assert "called no nn.Module and no torch.compile" in capsys.readouterr().err


@pytest.mark.parametrize("wrong, said", [("pairs=2", "pairs"), ("paris=6", "paris"), ("pairs", "key=value")])
def test_a_wrong_option_is_told_before_the_program_runs(capsys, wrong, said):
    assert run(["optimize", "-m", "package", "-o", wrong, "--", "3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err


def test_three_forms_are_measured_side_by_side_and_shown_again(tmp_path, capsys):
    saved, page = tmp_path / "bench.json", tmp_path / "page.html"
    options = ["-o", "mode=apply", "--pairs", "6", "--json", "--save", str(saved)]
    assert run(["bench", "-m", "package", *options, "--", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["times_ns"]) == ["eager", "Inductor", "fxopt"] and min(found["times_ns"].values()) > 0
    assert [(row["before"], row["after"]) for row in found["results"]] == [
        ("eager", "Inductor"),
        ("eager", "fxopt"),
        ("Inductor", "fxopt"),
    ]
    assert all(row["low"] <= row["ratio"] <= row["high"] and row["pairs"] == 6 for row in found["results"])
    assert found["rel_l2_to_eager"] < 1e-5
    comparison = Report.from_json(json.loads(saved.read_text())).comparison
    assert comparison is not None and json.loads(json.dumps(comparison.to_json())) == found
    for form in ([], ["--markdown"], ["--html", str(page), "--quiet"]):
        assert run(["report", str(saved), *form]) == 0
        text = capsys.readouterr().out
        assert "--html" in form or all(comparison.ratio("eager", name) in text for name in ("Inductor", "fxopt"))
    assert "</html>" in page.read_text()


def test_a_program_that_trains_is_not_benchmarked(capsys):
    assert run(["bench", "train.py", "--", "--width", "8", "--steps", "1"]) == 1
    assert "the program trains: Classifier" in capsys.readouterr().err
