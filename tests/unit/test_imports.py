"""What fxopt costs a program in imports: counted in modules, for times say more about the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

APPLY = """
import json, sys
import torch, torch._dynamo, torch._inductor.compile_fx
before = set(sys.modules)
import fxopt
attend = torch.nn.functional.scaled_dot_product_attention
options = {"passes": ["causal_mask"], "fallback_by_default": True, "on_error": "raise", "plan_dir": sys.argv[1]}
model = torch.compile(
    lambda x: attend(x, x, x, attn_mask=torch.ones(8, 8, dtype=torch.bool).tril()),
    backend="profile_guided",
    options={**options, "mode": "apply"},
)
with torch.no_grad():
    model(torch.randn(1, 2, 8, 4))
graph = fxopt.last_report().graphs[0]
used = sorted(set(sys.modules) - before)
if graph.source != "plan":
    from fxopt import machine
    from fxopt.plan import PassUse, Plan, PlanStore

    uses, here = [PassUse(name="causal_mask", stage="joint")], [machine.machine(torch.device("cpu"))]
    PlanStore(sys.argv[1]).save(Plan(key=graph.key, decision="candidate", passes=uses, machines=here))
print(json.dumps([graph.source, used]))
"""
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
ONLY_TUNING = {
    *("fxopt.tuning", "fxopt.trials", "fxopt.search", "fxopt.measure", "fxopt.verify", "fxopt.reference"),
    *("fxopt.profiling", "fxopt.rules", "fxopt.dump", "fxopt.invariants", "profiler_core.clocks"),
}


def test_importing_fxopt_loads_nothing_and_the_backend_nothing_that_only_reports_need():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    alone, backend, known, looked_up = json.loads(run.stdout.splitlines()[-1])
    assert alone == ["fxopt"]
    assert HEAVY.isdisjoint(name.partition(".")[0] for name in backend)
    assert "fxopt.tuner" in backend and "passes.freeze_weights" in backend, "what was counted is the backend"
    assert {"split_precision_gemm", "split_precision_attention", "split_precision_conv", "rnn_redispatch"} <= set(known)
    assert looked_up == [], "operators are defined without a search through all modules for the source line of each"


def test_a_process_that_applies_a_plan_imports_neither_what_measures_nor_other_passes(tmp_path):
    """The first writes the plan, the second runs the pass, and the third has all from caches."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    for source in ("apply", "plan", "plan"):
        command = [sys.executable, "-c", APPLY, str(tmp_path / "plans")]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found, used = json.loads(run.stdout.splitlines()[-1])
        assert found == source
    assert "fxopt.build" in used and "passes.causal_mask" in used, "what was counted is a plan that was applied"
    assert HEAVY.isdisjoint(name.partition(".")[0] for name in used)
    assert {name for name in used if name.startswith("passes.")} == {"passes.causal_mask", "passes.views"}
    assert ONLY_TUNING.isdisjoint(used)
