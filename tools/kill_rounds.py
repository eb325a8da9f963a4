"""Two processes tune the same model at once in one plan directory, and one of them is killed at a random moment.

    python tools/kill_rounds.py --rounds 50 --json results/cpu/kill_rounds.json

After every round: the process that lived gave the right outputs and left no warning of a broken plan; every plan that
is there can be read and is whole; the lock is free; and no temporary file is left once somebody has written again.
Of each --fresh rounds the first begins with an empty plan directory, and the others with what the one before left.
The exit code is 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

OPTIONS: dict[str, Any] = {
    "pairs": 6,
    "iterations": 1,
    "warmup": 1,
    "verify_inputs": 1,
    "passes": [],
    "on_error": "raise",
}
#: seconds after which a process that neither ended nor was killed counts as hung
DEADLINE = 1200.0


def tune(plan_dir: str, ends: Connection) -> None:
    """One process: a model is tuned, and its outputs are compared with eager's. Sends what it saw."""
    import warnings

    import torch
    from torch import nn

    import fxopt
    from fxopt.testing.stand_ins import CEILINGS
    from profiler_core import roofline

    os.environ["FXOPT_PLAN_DIR"] = plan_dir
    torch.set_num_threads(1)
    roofline.ceilings = lambda *args, **kwargs: CEILINGS  # measuring them takes seconds, and is not what is looked at
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).eval(), torch.randn(4, 16)
    ends.send({"started": time.time()})
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        y = torch.compile(model, backend="profile_guided", options=OPTIONS)(x)
        error = float(((y - model(x)).norm() / y.norm()).item())
    source = fxopt.last_report().graphs[0].source
    said = [str(w.message) for w in caught if str(w.message).startswith("fxopt: ")]
    ends.send({"ended": time.time(), "source": source, "error": error, "said": said})


def round_of(plan_dir: Path, context: Any, delay: float, victim: int) -> dict[str, Any]:
    """Starts two processes, and kills `victim` (0 or 1) `delay` seconds after both have begun. What was seen."""
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [context.Process(target=tune, args=(str(plan_dir), send)) for _, send in pipes]
    for process, (_, send) in zip(processes, pipes, strict=True):
        process.start()
        send.close()
    begun = [_next(receive) for receive, _ in pipes]
    time.sleep(delay)
    killed = processes[victim].is_alive()
    if killed:
        os.kill(processes[victim].pid, signal.SIGKILL)
    left = [_next(receive) for receive, _ in pipes]
    for process in processes:
        process.join(DEADLINE)
        if process.is_alive():
            process.kill()
            process.join()
            left[processes.index(process)] = {"hung": True}
    survivor, start = left[1 - victim], begun[1 - victim]
    seen: dict[str, Any] = {"delay": round(delay, 3), "killed": killed, "survivor": survivor}
    if survivor is not None and "ended" in survivor and start is not None:
        survivor["seconds"] = round(survivor.pop("ended") - start["started"], 3)
    return {**seen, **check(plan_dir, survivor)}


def _next(receive: Connection) -> dict[str, Any] | None:
    """What the process sends next; None where it died instead."""
    try:
        return receive.recv() if receive.poll(DEADLINE) else None
    except EOFError:
        return None


def check(plan_dir: Path, survivor: dict[str, Any] | None) -> dict[str, Any]:
    """What a round left: "failed" says what does not hold, and is "" where all does."""
    from fxopt.plan import PlanStore

    store = PlanStore(plan_dir, lock_timeout=1)
    rows = list(store.list())
    broken = [row.problem for row in rows if row.problem]
    aside = [path.name for path in store.plans_dir.glob("*.corrupt.*")] if store.plans_dir.exists() else []
    temporary = [path.name for path in store.plans_dir.glob(".*.tmp")] if store.plans_dir.exists() else []
    failed = ""
    if survivor is None or "error" not in survivor:
        failed = "the process that was not killed died or hung"
    elif not survivor["error"] < 1e-5:
        failed = f"wrong outputs: {survivor['error']}"
    elif survivor["said"]:
        failed = f"warned: {survivor['said']}"
    elif broken or aside:
        failed = f"a broken plan: {broken or aside}"
    elif len(rows) != 1:
        failed = f"{len(rows)} plans where one was expected"
    else:
        plan = store.load(rows[0].key)
        assert plan is not None
        store.save(plan)  # takes the lock, and clears what a dead writer left
        if any(store.plans_dir.glob(".*.tmp")):
            failed = "a temporary file stays"
    return {"plans": len(rows), "temporary_files": len(temporary), "failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", type=int, default=2, help="rounds after which the plan directory is a new one")
    parser.add_argument("--jobs", type=int, default=1, help="rounds at once, each in a plan directory of its own")
    parser.add_argument("--json", type=Path, help="where the result is written")
    arguments = parser.parse_args()
    # Children are forked from a server that has imported everything: an import of torch takes longer than the tuning.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._inductor.compile_fx", "torch._dynamo", "fxopt.backend", "pandas"])
    spent = [3.0]  # seconds that a process took, as far as is known: the kill falls at any moment within them

    def rounds_from(first: int) -> list[dict[str, Any]]:
        """The rounds that share one plan directory."""
        found = []
        with tempfile.TemporaryDirectory(prefix="fxopt-kill-") as folder:
            for number in range(first, min(first + arguments.fresh, arguments.rounds)):
                rng = random.Random(f"{arguments.seed} {number}")
                usual = sorted(spent)[len(spent) // 2]
                one = {"round": number, **round_of(Path(folder), context, rng.uniform(0, usual), rng.randrange(2))}
                spent.append((one["survivor"] or {}).get("seconds", usual))
                print(f"round {number}: {one['failed'] or 'holds'} (delay {one['delay']} s)", flush=True)
                found.append(one)
        return found

    with ThreadPoolExecutor(arguments.jobs) as pool:
        chains = pool.map(rounds_from, range(0, arguments.rounds, arguments.fresh))
        rounds = [one for chain in chains for one in chain]
    from profiler_core.environment import environment
    from profiler_core.files import write_atomically

    summary = {
        "rounds": len(rounds),
        "killed": sum(r["killed"] for r in rounds),
        "killed_while_writing": sum(bool(r["temporary_files"]) for r in rounds),
        "corrupt_plans": sum("broken plan" in r["failed"] for r in rounds),
        "wrong_outputs": sum("wrong outputs" in r["failed"] for r in rounds),
        "failed": [r["round"] for r in rounds if r["failed"]],
    }
    print(json.dumps(summary))
    if arguments.json is not None:
        result = {"environment": environment("cpu"), "seed": arguments.seed, **summary, "each": rounds}
        write_atomically(arguments.json, json.dumps(result, indent=1) + "\n")
    return int(bool(summary["failed"]))


if __name__ == "__main__":
    sys.exit(main())
