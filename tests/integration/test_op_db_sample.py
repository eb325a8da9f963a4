"""torch's operator database through the backend, passes forced on: sixty operators spread over it.

tools/op_db.py runs all of them; results/cpu/op_db.json has what came of that.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COUNT = 60
SHARDS = 2


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """One row an operator: every eleventh of the database, whichever that is in this torch."""
    folder = tmp_path_factory.mktemp("op_db")
    kept = folder / "rows.jsonl"
    command = [sys.executable, str(ROOT / "tools" / "op_db.py"), "--sample", str(COUNT), "--way", "profile_guided"]
    shards = [
        subprocess.Popen(
            [*command, "--rows", str(kept), "--shard", f"{number}/{SHARDS}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(1, SHARDS + 1)
    ]
    printed = [shard.communicate()[0] for shard in shards]
    missing = re.search(r"^(?:ModuleNotFound|Import)Error: .*", printed[0], re.MULTILINE)
    if missing is not None and not kept.exists():
        pytest.skip(f"torch's own tests cannot be imported: {missing[0]}")
    assert all(shard.returncode in (0, 1) for shard in shards), printed  # 1: operators with problems
    return [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]


def test_operators_give_what_they_give_under_plain_inductor(rows):
    assert len({row["op"] for row in rows}) == COUNT
    assert {row["op"]: row["problems"] for row in rows if row["problems"]} == {}


def test_they_are_compiled_and_rewritten(rows):
    """Or the test above would compare plain Inductor with itself."""
    compiled = [row["ways"]["profile_guided"] for row in rows if row["ways"]["inductor"]["graphs"]]
    assert len(compiled) > 0.8 * COUNT
    assert sum(bool(way["changed"]) for way in compiled) > 0.8 * len(compiled)
    assert [way["left"] for way in compiled if way["left"]] == []
