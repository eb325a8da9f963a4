"""Checks of Triton kernels without a GPU: their numbers in Triton's interpreter, and that they compile for an H200."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

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
    """Fails unless the code `check`, with nothing imported, prints "agrees", and it alone. It runs in a process of its
    own, for Triton decides while it is imported whether to interpret.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", _BEFORE + check], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "agrees", run.stderr[-2000:]


def compiled_for_h200(
    kernel: Any,
    fixed: Mapping[str, Any],
    kinds: Mapping[str, str],
    aligned: Iterable[str],
    of: Any = None,
    **options: int,
) -> Any:
    """What Triton compiles of `kernel` for compute capability 9.0.

    fixed: constants by parameter. kinds: types of the others, i32 where not given. aligned: those that 16 divides. of:
    what sources are made of, if it is not Triton's own language.
    """
    triton = pytest.importorskip("triton")
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        pytest.skip("this Triton has no backend for NVIDIA's GPUs")
    from triton.backends.compiler import GPUTarget

    if not isinstance(kernel, triton.JITFunction):
        pytest.skip("Triton interprets in this process")
    names = kernel.arg_names
    source = (of or triton.compiler.ASTSource)(
        fn=kernel,
        signature={name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
