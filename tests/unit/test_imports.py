"""What importing fxopt costs a program: counted in modules, for times say more about the machine."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import inspect, json, sys
import torch
before = set(sys.modules)
import fxopt
fxopt.__version__
alone = set(sys.modules) - before
import torch._dynamo, torch._inductor.compile_fx
before = set(sys.modules)
looked_up = []
inspect.getframeinfo = lambda frame, context=1: looked_up.append(frame.f_code.co_filename)
import fxopt.backend
from fxopt import registry
known = registry.discover()
print(json.dumps([sorted(alone), sorted(set(sys.modules) - before), sorted(known), looked_up]))
"""
#: what only a report, a command or a measurement needs
HEAVY = {"pandas", "plotly", "typer", "click", "rich", "transformers", "matplotlib", "jinja2", "pygments", "pyarrow"}


def test_importing_fxopt_loads_nothing_and_the_backend_nothing_that_only_reports_need():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    alone, backend, known, looked_up = json.loads(run.stdout.splitlines()[-1])
    assert alone == ["fxopt"]
    assert HEAVY.isdisjoint(name.partition(".")[0] for name in backend)
    assert "fxopt.tuner" in backend and "passes.freeze_weights" in backend, "what was counted is the backend"
    assert {"split_precision_gemm", "split_precision_attention", "split_precision_conv", "rnn_redispatch"} <= set(known)
    assert looked_up == [], "operators are defined without a search through all modules for the source line of each"
