"""tools/gpu_results.sh: which commands its parts are, with a stand-in for Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_results.sh"


def run(folder: Path, *parts: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    stand_in = folder / "python"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/calls"\n[ "$1" = -c ] && echo 2\nexit {code}\n')
    stand_in.chmod(0o755)
    given = {**os.environ, "PYTHON": str(stand_in), "COMMIT": "abc", **environment}
    command = ["sh", str(SCRIPT), str(folder / "out"), *parts]
    return subprocess.run(command, capture_output=True, text=True, env=given, cwd=folder)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_all_parts_run_and_what_they_name_is_there(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    made = calls(tmp_path)
    modules = [line.split()[1] for line in made if line.startswith("-m")]
    assert modules == ["pytest", "case_studies.split_sweep", "case_studies.compare", "torch.distributed.run"]
    assert "case_studies.ddp" in made[-1] and "--nproc-per-node 2" in made[-1]
    assert "--fail-rank 1" in made[-1]
    scripts = [line.split()[0] for line in made if line.startswith(("tools/", "tests/"))]
    assert scripts == [
        "tests/benchmarks/launch_overhead_gpu.py",
        "tests/benchmarks/split_lstm_gpu.py",
        "tools/gpu_memory.py",
        "tools/aa_rounds.py",
    ]
    assert all((ROOT / name).exists() for name in scripts)
    assert all((ROOT / f"{name.replace('.', '/')}.py").exists() for name in modules if name.startswith("case_studies"))


def test_chosen_workloads_and_options_reach_the_comparison(tmp_path):
    done = run(tmp_path, "compare", COMPARE="gpt2 sdpa", COMPARE_ARGS="--precisions bf16", TUNE_JOBS="4")
    (call,) = calls(tmp_path)
    assert done.returncode == 0 and call.startswith("-m case_studies.compare gpt2 sdpa ")
    assert "--resume" in call and "--commit abc" in call and "--tune-jobs 4" in call
    assert call.endswith("--precisions bf16") and f"{tmp_path}/out/comparison.json" in call


def test_a_commit_is_told_only_where_it_was_given(tmp_path):
    """Else the commands ask the repository, and say where the code was changed."""
    run(tmp_path, "sweep", "compare", COMMIT="")
    assert not any("--commit" in call for call in calls(tmp_path))


def test_a_part_that_fails_is_named_and_the_others_run(tmp_path):
    done = run(tmp_path, "sweep", "memory", code=3)
    assert done.returncode == 1 and len(calls(tmp_path)) == 2
    assert "sweep ended with exit code 3" in done.stdout and "failed: sweep memory" in done.stdout


@pytest.mark.parametrize("parts", [["everything"], ["sweep", "everything"]])
def test_a_part_that_there_is_not_is_refused(tmp_path, parts):
    done = run(tmp_path, *parts)
    assert done.returncode == 2 and "no part is called everything" in done.stdout
    assert not (tmp_path / "calls").exists(), "nothing was begun"


def test_without_a_folder_it_says_how_it_is_called():
    done = subprocess.run(["sh", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2 and "sh tools/gpu_results.sh FOLDER [PART ...]" in done.stdout


def test_the_options_that_it_gives_are_known():
    """The options of the commands that are not run here."""
    text = SCRIPT.read_text()
    for name, source in {
        "case_studies.split_sweep": "case_studies/split_sweep.py",
        "tools/gpu_memory.py": "tools/gpu_memory.py",
        "tools/aa_rounds.py": "tools/aa_rounds.py",
        "tests/benchmarks/launch_overhead_gpu.py": "tests/benchmarks/launch_overhead_gpu.py",
        "tests/benchmarks/split_lstm_gpu.py": "tests/benchmarks/split_lstm_gpu.py",
        "case_studies.compare": "case_studies/compare.py",
        "case_studies.ddp": "case_studies/ddp.py",
    }.items():
        line = next(one for one in text.replace("\\\n", " ").splitlines() if f" {name} " in one and "part " in one)
        options = {word.lstrip("-").replace("-", "_") for word in line.split(name)[1].split() if word.startswith("--")}
        known = (ROOT / source).read_text().replace("-", "_")
        assert options and all(option in known for option in options), (name, options)
