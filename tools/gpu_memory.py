"""What a GPU holds after tuning, beside what it holds after plain torch.compile; and whether state is as it was.

    python tools/gpu_memory.py --time-limit 25 --json results/h200/memory.json

Six layers of 2048 x 2048 with GELU, 512 rows, fp32; a process for each row: plain torch.compile ("inductor"), and at
each precision fxopt tuning ("tuned"), fxopt with the plan of that run, which measures nothing ("planned"), and the
first without CUDA graphs ("eager launches"). `allocated` is torch's count of live bytes after the first call, its
result dropped and cuBLAS's workspaces cleared: what is more in "tuned" than in "planned" was left behind by tuning,
what is more in "planned" than in "inductor" is what the kept code holds for good (a CUDA graph's fixed inputs and
outputs, folded weights), which is in `memory_bytes`. Random state and parameters are compared with what they were
before, bit for bit. The exit code is 1 where tuning leaves more than 2 % behind or changes any of them.
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


KINDS = ("tuned", "planned", "eager launches")
ALLOWED = 1.02


def measured(kind: str, precision: str, time_limit: float, plans: str) -> dict[str, Any]:
    """One row, in this process."""
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
        options: dict[str, Any] = {"precision": precision, "time_limit": time_limit, "plan_dir": plans}
        if kind == "eager launches":
            options["disable"] = ["cuda_graphs"]
        compiled = torch.compile(model, backend="profile_guided", options=options)
    with torch.no_grad():
        compiled(x)
    torch.cuda.synchronize()
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    row = {
        "kind": kind,
        "precision": precision,
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "rng_same": bool(torch.equal(state, torch.cuda.get_rng_state())),
        "parameters_same": all(torch.equal(a, b.cpu()) for a, b in zip(before, model.parameters(), strict=True)),
    }
    if kind != "inductor":
        import fxopt

        graph = fxopt.last_report().graphs[0]
        row |= {name: getattr(graph, name) for name in ("source", "decision", "passes", "memory_bytes")}
    return row


def problems(rows: list[dict[str, Any]]) -> list[str]:
    """What does not hold."""
    found = []
    for row in rows:
        name = f"{row['kind']} {row['precision']}"
        if not row["rng_same"] or not row["parameters_same"]:
            found.append(f"{name}: random state or parameters are not what they were")
        if row["kind"] != "tuned":
            continue
        planned = next((r for r in rows if (r["kind"], r["precision"]) == ("planned", row["precision"])), None)
        if planned is None:  # a run that was stopped
            continue
        if (planned["source"], planned["passes"]) != ("plan", row["passes"]):
            found.append(f"planned {row['precision']}: not as planned: {planned['source']}, {planned['passes']}")
        if row["allocated"] > ALLOWED * planned["allocated"]:
            found.append(f"{name}: {row['allocated'] - planned['allocated']} bytes more than the plan's process")
    return found


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """What there is so far, so that a run that is stopped leaves its rows."""
    import torch

    from profiler_core.environment import environment
    from profiler_core.files import write_atomically

    data = {"environment": environment(torch.device("cuda", 0)), "command": " ".join(sys.argv)}
    write_atomically(path, json.dumps({**data, "failed": problems(rows), "rows": rows}, indent=1, default=str) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--time-limit", type=float, default=25.0, help="fxopt's, seconds")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        kind, precision, plans = given.only
        print(json.dumps(measured(kind, precision, given.time_limit, plans)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory(prefix="fxopt-memory-") as plans:
        asked = [(kind, precision) for precision in given.precisions.split(",") for kind in KINDS]
        for kind, precision in [("inductor", "fp32"), *asked]:
            command = [sys.executable, __file__, "--only", kind, precision, plans]
            command += ["--time-limit", str(given.time_limit)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
            if given.json:
                _write(given.json, rows)
    failed = problems(rows)
    print("\n".join(failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
