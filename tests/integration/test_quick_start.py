"""docs/quick_start.md, followed: the script written, profiled and optimised, and the pages that come of it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quick_start.md"
#: Less tuning than a decision deserves: what is tested is that every step works.
QUICK = {"FXOPT_TIME_LIMIT": "1", "FXOPT_PAIRS": "6", "FXOPT_ITERATIONS": "2", "FXOPT_VERIFY_INPUTS": "0"}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["profile", "whole"])
def test_every_step_works(whole: bool, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("quick_start_steps", ROOT / "tools" / "tutorial.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool  # dataclasses look their module up
    spec.loader.exec_module(tool)

    outputs = {
        step.text.strip(): output
        for step, output in tool.follow(tmp_path, QUICK, page=PAGE, quick=not whole)
        if step.kind == "run"
    }
    profiled = outputs["fxopt profile slow.py --html profile.html"]
    assert "10 requests answered" in profiled
    assert "slow.py:" in profiled  # a source line
    written = (tmp_path / "profile.html").read_text(encoding="utf-8")
    assert written.lower().startswith("<!doctype html>") and written.rstrip().endswith("</html>")
    if whole:
        assert re.search(
            r"^Graph 1 of 1, key \w+: kept ", outputs["fxopt optimize slow:classifier --html tuned.html"], re.M
        )
        assert (tmp_path / "tuned.html").exists()
        assert "torch.Size([4, 10])" in outputs["python use.py"]
