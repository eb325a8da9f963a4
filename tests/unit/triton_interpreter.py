"""Runs checks of Triton kernels in Triton's interpreter on the CPU.

In a process of its own, for Triton decides while it is imported whether to interpret.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_BEFORE = """
import triton.runtime.interpreter as interpreter

patch = interpreter._patch_lang_tensor

def patch_with_index(tensor, scope):
    # Triton 3.6's own makes an int of an array of one dimension, which numpy 2.4 no longer does.
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

interpreter._patch_lang_tensor = patch_with_index
"""


def agrees(check: str) -> None:
    """Fails unless the code `check`, with nothing imported, ends in printing "agrees"."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", _BEFORE + check], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "agrees", run.stderr[-2000:]
