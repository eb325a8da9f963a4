"""Two rounds of tools/kill_rounds.py; fifty are in results/cpu/kill_rounds.json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_process_killed_while_another_tunes_leaves_a_whole_plan_and_right_outputs(tmp_path):
    file = tmp_path / "rounds.json"
    command = [sys.executable, str(ROOT / "tools" / "kill_rounds.py"), "--rounds", "2", "--json", str(file)]
    done = subprocess.run(command, env={**os.environ, "KINETO_LOG_LEVEL": "99"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert (found["rounds"], found["corrupt_plans"], found["wrong_outputs"], found["failed"]) == (2, 0, 0, [])
    assert [one["plans"] for one in found["each"]] == [1, 1]
