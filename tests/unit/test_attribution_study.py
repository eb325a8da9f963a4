"""The study of attribution, small and on the CPU, from the command line to its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from case_studies import attribution, workloads

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "case_studies.attribution", *args],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1"},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    path = tmp_path_factory.mktemp("study") / "out.json"
    done = run("sdpa", "lstm", "--small", "--device", "cpu", "--json", str(path))
    assert done.returncode == 0, done.stderr[-2000:]
    return done, json.loads(path.read_text())


def test_all_kernel_time_is_attributed(finished) -> None:
    _, document = finished
    assert document["workloads"].keys() == {"sdpa", "lstm"}
    for name, found in document["workloads"].items():
        times = found["torch"]
        assert times["share_attributed"] == times["share_of_operators"] == 1.0, name
        assert times["attributed_ns"] + times["unattributed_ns"] == times["total_ns"] > 0
        assert times["unattributed"] == [] and times["kernels_per_call"] > 0 and times["wall_ns"] > 0
        assert "small" in found["workload"] and "cupti" not in found and "nsys" not in found
    assert document["workloads"]["sdpa"]["torch"]["share_of_fx_nodes"] == 1.0


def test_an_lstm_is_its_operator(finished) -> None:
    _, document = finished
    found = document["workloads"]["lstm"]["torch"]
    assert found["share_of_fx_nodes"] == 0.0
    assert any("lstm" in row["operator"] and row["share"] > 0 for row in found["operators"])
    assert "Inductor compiled no graph of it: everything is attributed to operators" in found["notes"]


def test_the_document_says_what_it_was_made_with_and_the_screen_shows_it(finished) -> None:
    done, document = finished
    assert "case_studies.attribution" in document["command"]
    assert document["environment"]["device_type"] == "cpu" and "clocks" in document
    assert "sdpa: sdpa, small" in done.stdout and "100.00%" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("resnet",), "'resnet' is no workload; there are gpt2, sdpa, lstm"),
        (("sdpa", "--tools", "torch,perf"), "'perf' is no tool; there are torch, cupti, nsys"),
        (("cupti",), "'cupti' is no workload"),
        (("sdpa", "--tools", "sdpa"), "'sdpa' is no tool"),
    ],
)
def test_an_unknown_workload_or_tool_is_refused_by_name(args: tuple[str, ...], says: str) -> None:
    done = run(*args, "--small")
    assert done.returncode == 2 and says in " ".join(done.stderr.replace("│", " ").split())


def test_a_workload_is_the_same_in_every_process_and_leaves_the_random_state() -> None:
    device, state = torch.device("cpu"), torch.get_rng_state()
    (model, x), (again, y) = (workloads.build("sdpa", device, small=True) for _ in range(2))
    assert torch.equal(x, y) and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not model.training
    with torch.no_grad():
        assert model(x).shape == x.shape


def test_the_program_marks_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nsys and ncu run: warm-up, then the marked calls and nothing else."""
    import profiler_core

    order: list[str] = []

    def measured(calls: int):
        for number in range(calls):
            order.append(f"mark {number}")
            yield number

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order.append("call")
            return x

    monkeypatch.setattr(profiler_core, "measured", measured, raising=False)
    monkeypatch.setattr(attribution, "build", lambda *args, **kwargs: (Model(), torch.ones(1)))
    monkeypatch.setattr(torch, "compile", lambda model: model)
    attribution.program("sdpa", torch.device("cpu"), True)
    assert order == ["call"] * 3 + ["mark 0", "call", "mark 1", "call"]
