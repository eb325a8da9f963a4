"""What a GPU holds after tuning, beside what it holds after plain torch.compile; and whether state is as it was.

    python tools/gpu_memory.py --time-limit 25 --json results/h200/memory.json

Six layers of 2048 x 2048 with GELU, 512 rows, fp32; a process for each row. `allocated` is torch's count of live bytes
after the first call, its result dropped and cuBLAS's workspaces cleared. What kept code holds for good (a CUDA graph's
fixed inputs and outputs, folded weights) is in `memory_bytes`. Random state and parameters are compared with what they
were before, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PRECISIONS = ("fp32", "bf16")


def measured(kind: str, time_limit: float) -> dict[str, Any]:
    """One row, in this process: "inductor", or fxopt at a precision."""
    import torch
    from torch import nn

    device = torch.device("cuda")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(6)]
    model, x = nn.Sequential(*layers).to(device).eval(), torch.randn(512, 2048, device=device)
    state, before = torch.cuda.get_rng_state(), [p.clone().cpu() for p in model.parameters()]
    if kind == "inductor":
        compiled: Any = torch.compile(model)
    else:
        options = {"precision": kind, "time_limit": time_limit, "plan_dir": tempfile.mkdtemp()}
        compiled = torch.compile(model, backend="profile_guided", options=options)
    with torch.no_grad():
        compiled(x)
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    row = {
        "kind": kind,
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "rng_same": bool(torch.equal(state, torch.cuda.get_rng_state())),
        "parameters_same": all(torch.equal(a, b.cpu()) for a, b in zip(before, model.parameters(), strict=True)),
    }
    if kind != "inductor":
        import fxopt

        graph = fxopt.last_report().graphs[0]
        row |= {"decision": graph.decision, "passes": graph.passes, "memory_bytes": graph.memory_bytes}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--time-limit", type=float, default=25.0, help="fxopt's, seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measured(given.only, given.time_limit)))
        return
    rows = []
    for kind in ("inductor", *PRECISIONS):
        command = [sys.executable, __file__, "--only", kind, "--time-limit", str(given.time_limit)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    if given.json:
        import torch

        from profiler_core.environment import environment
        from profiler_core.files import write_atomically

        data = {"environment": environment(torch.device("cuda", 0)), "command": " ".join(sys.argv), "rows": rows}
        write_atomically(given.json, json.dumps(data, indent=1, default=str))


if __name__ == "__main__":
    main()
