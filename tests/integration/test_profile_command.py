"""`fxopt profile` on programs that were not written for it, which run as they do under python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxopt.cli import run
from fxopt.report.subject import labelled
from fxopt.script import Target, run_profiled
from profiler_core import roofline
from profiler_core.environment import environment
from profiler_core.profiles import Profile
from profiler_core.roofline import Ceilings

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "fixtures" / "scripts"


def profiled(tmp_path: Path, *arguments: str) -> Profile:
    file = tmp_path / "profile.json"
    options = [*arguments[: arguments.index("--")]] if "--" in arguments else [*arguments]
    assert run(["profile", *options, "--quiet", "--save", str(file), *arguments[len(options) :]]) == 0
    return Profile.load(file)


def line_of(file: str, text: str) -> int:
    lines = (SCRIPTS / file).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def process(folder: Path, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
        "FXOPT_PLAN_DIR": str(folder.parent / f"{folder.name}-plans"),
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=SCRIPTS, env=environment, capture_output=True, text=True, **options)


def test_a_pipeline_of_transformers_has_its_time_by_module_and_line(tmp_path, in_scripts, capsys):
    pytest.importorskip("transformers")
    profile = profiled(tmp_path, "generate_text.py")
    assert capsys.readouterr().out == "generated 12 tokens\n"
    assert profile.iterations == 5 and profile.attributed_share == 1.0
    attention = profile.nodes[profile.nodes["target"] == "aten::scaled_dot_product_attention"]
    assert sorted(attention["module_path"]) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert (attention["module_class"] == "GPT2Attention").all()
    assert {Path(file).name for file in attention["file"]} == {"sdpa_attention.py"}
    # what generate() does between two calls of the model counts as well
    assert "aten::argmax" in set(profile.nodes["target"])
    assert any("profiled: 5 calls of its model, after 3 of warm-up, of 12" in note for note in profile.notes)


def test_a_training_loop_is_measured_by_its_steps(tmp_path, in_scripts, capsys):
    profile = profiled(tmp_path, "train.py", "--", "--width", "8")
    assert "trained 12 steps of width 8" in capsys.readouterr().out
    nodes = profile.nodes.set_index("node")
    line = line_of("train.py", "self.hidden(x)")
    linear = nodes.loc[f"aten::linear@hidden:{line}"]
    assert linear["source"] == "return self.out(F.silu(self.hidden(x)))" and linear["kernels"] == 1
    assert nodes.loc[f"aten::silu@train.py:{line}", "module_class"] == "Classifier"
    # a step of the backward pass belongs to the module and line of its forward operator
    backward = nodes.loc[f"aten::mm@hidden:{line} backward"]
    assert (backward["module_path"], backward["line"]) == ("hidden", line)
    lines = {row["source"] for row in profile.nodes.to_dict("records")}
    assert {"optimizer.step()", "loss = criterion(run(x), y)"} <= lines
    assert profile.iterations == 5
    assert any("5 steps of its optimiser, after 3 of warm-up, of 12" in note for note in profile.notes)
    assert profile.wall_ns > 0


def test_a_compiled_training_loop_has_fx_nodes_of_both_directions(tmp_path, in_scripts):
    profile = profiled(tmp_path, "train.py", "--", "--width", "8", "--compile")
    inside = profile.nodes[profile.nodes["kind"] == "node"]
    assert {graph.partition(" ")[2] for graph in inside["graph"]} == {"", "backward"}
    assert {"hidden", "out"} <= set(inside["module_path"])
    assert (inside.loc[inside["time_ns"] > 0, "source"] == "return self.out(F.silu(self.hidden(x)))").all()
    assert 0 < profile.graph_share < 1 and profile.attributed_share == 1.0
    # the watcher is no part of what Dynamo traces: one graph, as without it
    assert len({graph.partition(" ")[0] for graph in inside["graph"]}) == 1


def test_a_module_is_run_as_by_python_m(tmp_path, in_scripts, capsys):
    profile = profiled(tmp_path, "-m", "package", "--", "9", "more")
    assert capsys.readouterr().out == "package ran ['9', 'more']\n"
    assert {"layers.0", "layers.1"} <= set(profile.nodes["module_path"])


def test_a_function_may_return_a_model_and_its_inputs(tmp_path, in_scripts):
    profile = profiled(tmp_path, "package.model:encoder_and_inputs", "--calls", "2", "--skip", "1")
    assert profile.iterations == 2
    assert set(profile.nodes["node"]) == {
        "aten::linear@layers.0:12",
        "aten::linear@layers.1:12",
        "aten::relu@model.py:12",
    }


@pytest.mark.parametrize("calls, which", [(1, "first"), (2, "second"), (3, "second")])
def test_a_program_of_few_calls_is_profiled_all_the_same(in_scripts, capsys, calls, which):
    profile, outcome = run_profiled(Target.of("package", [str(calls)], module=True))
    assert outcome.code == 0 and profile.iterations == 1
    assert (profile.window["name"] == "aten::linear").sum() == 2  # one for each layer
    [note] = [note for note in profile.notes if note.startswith("the program made")]
    assert f"made {calls} call" in note and f"the {which} was profiled" in note


def test_all_of_a_program_can_be_profiled_as_one_call(in_scripts, capsys):
    profile, _ = run_profiled(Target.of("package", ["4"], module=True), whole=True)
    counts = profile.by("node").set_index("node")["kernels"]
    assert profile.iterations == 1 and counts["aten::linear@layers.1:12"] == 4
    assert any(node.startswith("aten::uniform_@model.py:") for node in counts.index)  # the weights are made


def test_nothing_of_torch_stays_changed(in_scripts, capsys):
    before = torch.nn.Module.__call__, torch.compile, sys.gettrace(), list(sys.argv), list(sys.path)
    run_profiled(Target.of("package", ["5"], module=True))
    assert before == (torch.nn.Module.__call__, torch.compile, sys.gettrace(), list(sys.argv), list(sys.path))
    from torch._dynamo.variables import nn_module

    assert nn_module.unpatched_nn_module_call is torch.nn.Module.__call__


def test_a_program_without_a_model_is_told_what_to_do(tmp_path, monkeypatch, capsys):
    (tmp_path / "plain.py").write_text("import torch\nprint((torch.ones(2) * 2).sum())\n")
    assert run(["profile", str(tmp_path / "plain.py"), "--quiet"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "tensor(4.)\n"
    assert "called no nn.Module" in captured.err and "--whole" in captured.err


def test_a_compiled_function_counts_as_a_model(tmp_path, fresh_dynamo, capsys):
    script = tmp_path / "function.py"
    script.write_text(
        "import torch\n\n@torch.compile(backend='eager')\ndef double(x):\n    return x * 2\n\n"
        "for _ in range(9):\n    double(torch.ones(4))\n"
    )
    profile, _ = run_profiled(Target.of(str(script)))
    assert set(profile.nodes["target"]) == {"aten::ones", "aten::mul"}


def test_a_failing_program_fails_as_under_python_and_keeps_what_was_seen(tmp_path):
    arguments = ["train.py", "--width", "8", "--fail-at", "9"]
    folder = tmp_path / "temporary"
    folder.mkdir()
    ours = process(folder, "-m", "fxopt.cli", "profile", arguments[0], "--json", "--", *arguments[1:])
    python = process(folder, *arguments)
    assert ours.returncode == python.returncode == 1
    assert "Traceback (most recent call last):" in python.stderr and python.stderr in ours.stderr
    # stdout has the result alone: the program's own output, at its exit too, is on stderr
    assert Profile.from_json(json.loads(ours.stdout)).iterations == 5
    assert python.stdout == "at exit\n" and ours.stderr.endswith(python.stdout)
    assert "exit code 1" in ours.stderr and "\x1b" not in ours.stdout + ours.stderr
    assert list(folder.iterdir()) == []


def test_a_program_that_exits_passes_its_code_on(in_scripts, capsys):
    assert run(["profile", "train.py", "--quiet", "--", "--width", "8", "--code", "3"]) == 3
    assert run(["profile", "train.py", "--quiet", "--", "--width", "x"]) == 2
    captured = capsys.readouterr()
    assert "argument --width: invalid int value" in captured.err
    assert "ended before anything could be profiled (the program ended with exit code 2)" in captured.err


def test_ctrl_c_ends_it_with_130_and_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    script = tmp_path / "endless.py"
    script.write_text(
        "import os, signal, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "for step in range(10**4):\n"  # and no more, should the signal be ignored
        "    model(torch.ones(4))\n"
        "    if step == 6:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
    )
    page = tmp_path / "page.json"
    done = process(folder, "-m", "fxopt.cli", "profile", str(script), "--save", str(page), timeout=300)
    assert done.returncode == 130
    assert "KeyboardInterrupt" in done.stderr and "fxopt/script.py" not in done.stderr
    assert done.stderr.splitlines()[-1] == f"fxopt: interrupted; what was profiled before is kept in {page}"
    assert Profile.load(page).iterations == 4
    assert list(folder.iterdir()) == []


def test_an_eager_script_is_told_why_it_is_slow_and_what_to_do_next(tmp_path, in_scripts, monkeypatch, capsys):
    monkeypatch.setenv("FXOPT_PLAN_DIR", str(tmp_path))
    device = torch.device("cpu")
    # A device that could be far faster than this one: what is labelled does not depend on what else runs here.
    rates = {"float32": 1e17, "bfloat16": 2e17}
    known = Ceilings(str(environment(device)["device_name"]), 1e12, rates, "2026-01-01T00:00:00+00:00")
    file = roofline.kept_at(device, tmp_path / "ceilings")
    file.parent.mkdir()
    file.write_text(json.dumps(known.to_json()))
    saved, page = tmp_path / "profile.json", tmp_path / "page.html"
    assert run(["profile", "one_product.py", "--save", str(saved), "--html", str(page)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    line = line_of("one_product.py", "return self.wide(x)")
    limits = told[told.index("What limits it") :]
    assert "tensor_core_idle: 1 kernel(s), could save up to" in limits
    assert f"- aten::linear@wide:{line}, " in limits and "A float32 matrix product (33.6 MFLOP)" in limits
    assert "Next: fxopt optimize, or torch.compile(model" in limits
    assert "with --precision bf16 also bf16_graph" in limits
    linear = Profile.load(saved).nodes.set_index("node").loc[f"aten::linear@wide:{line}"]
    assert linear["flops"] == 2 * 64 * 512 * 512 and linear["bytes"] == 4 * (2 * 64 * 512 + 512 * 512 + 512)
    assert (linear["dtype"], tuple(linear["shape"])) == ("float32", (64, 512))
    label, *_ = (x for x in labelled(Profile.load(saved), known).labels if x.axis.value == "tensor_core_idle")
    assert label.nodes == (f"aten::linear@wide:{line}",)
    assert page.stat().st_size > 100_000


def test_no_ceilings_measures_none(tmp_path, in_scripts, monkeypatch, capsys):
    monkeypatch.setenv("FXOPT_PLAN_DIR", str(tmp_path / "plans"))
    assert run(["profile", "one_product.py", "--no-ceilings"]) == 0
    assert "no ceilings of" in capsys.readouterr().out
    assert not (tmp_path / "plans" / "ceilings").exists()
