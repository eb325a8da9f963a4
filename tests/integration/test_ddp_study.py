"""The case study of training on several ranks, on two CPU processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_two_ranks_train_by_one_plan_and_fall_back_together(tmp_path):
    pytest.importorskip("transformers")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = tmp_path / "ddp.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    command += ["-m", "case_studies.ddp", "--device", "cpu", "--small", "--precisions", "fp32", "--rounds", "6"]
    command += ["--tuning-limit", "1", "--fail-rank", "1", "--plan-dir", str(tmp_path / "plans"), "--json", str(file)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(file.read_text())
    assert found["problems"] == [] and len(found["environment"]) == 2
    first, second = found["columns"]["fxopt_fp32"]["plans"]
    assert first[0]["plan"] == second[0]["plan"] and len(first[0]["plan"]) == 64
    assert (first[0]["measured"], second[0]["measured"]) == (True, False)
    for column in found["columns"].values():
        assert column["over_limit"] == [] and column["gradients"] == 28
        assert len(column["rounds_ns"]) == 6 and column["step_ns"] > 0
    for profile in found["profiles"]:
        assert "is the slowest of 2" in profile["slowest"]
        for kernels in profile["collectives"]:
            assert {(k["collective"], k["opaque"]) for k in kernels} == {("allreduce", True)}
    assert [rank["source"] for rank in found["failing_rank"]] == ["fallback", "fallback"]
    assert all("this rank was made to fail" in rank["warned"][0] for rank in found["failing_rank"])
