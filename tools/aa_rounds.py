"""How often a tuning run takes the same code for different, and how often it misses a true slowdown of 5 %.

    python tools/aa_rounds.py --rounds 100 --json results/cpu/aa_rounds.json
    python tools/aa_rounds.py --device cuda --rounds 100 --batch 100 --json results/h200/aa_rounds.json

A round is what a tuning run does with one candidate, by its own code and default settings: the noise floor of the
baseline, and then the comparison with a candidate. Two candidates take turns: the same graph compiled a second time
(A/A), and the baseline's own code with a wait of 5 % of its time after it (on a GPU in its stream). More work would not
do for the second: code that does 5 % more takes between 1 % less and 10 % longer, by where its memory happens to lie.
What the wait adds is measured once more by torch.utils.benchmark, and written down as `true_ratio`. Each batch of
rounds is a process of its own, in which everything is compiled anew and lies at other addresses.

A comparison declares a difference where its whole interval lies outside of the noise, on either side. The exit code is
1 where more than 5 in 100 of the A/A rounds do, or fewer than 95 in 100 of the slower ones. A run that was stopped goes
on where it was: give the same --json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WIDTH = 1024
#: rows of the baseline: some milliseconds of work on two cores, and many waves of blocks on a GPU
ROWS = {"cpu": 2000, "cuda": 40_000}
SLOWDOWN = 1.05
ALLOWED, WANTED = 0.05, 0.95


def compiled(x: Any) -> Callable[..., Any]:
    """Inductor's code for a computation on a tensor like `x`, as a tuning run compiles it.

    A module of its own, although the same source was compiled before.
    """
    import torch
    from torch._inductor.codecache import PyCodeCache

    from fxopt.torch_api import inductor

    made: list[Callable[..., Any]] = []

    def backend(gm: Any, inputs: Any) -> Callable[..., Any]:
        made.append(inductor.compile_graph(gm, inputs, patches={}, keep_guards=True).flat())
        return made[-1]

    def normalised(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.gelu(x), dim=-1)

    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    with torch.no_grad():
        torch.compile(normalised, backend=backend, dynamic=False)(x)
    return made[-1]


def seconds_of(*fns: Callable[..., Any], x: Any, seconds: float) -> list[float]:
    """The time of a call of each, in turns: the least of five medians of torch.utils.benchmark."""
    from torch.utils.benchmark import Timer

    least = [float("inf")] * len(fns)
    for _ in range(5):
        for number, fn in enumerate(fns):
            timer = Timer("fn(x)", globals={"fn": fn, "x": x}, num_threads=_threads())
            least[number] = min(least[number], timer.blocked_autorange(min_run_time=seconds / 10).median)
    return least


def slowed(fn: Callable[..., Any], x: Any, slowdown: float) -> Callable[..., Any]:
    """`fn` with a wait after it, so that a call takes `slowdown` times as long."""
    import torch

    wait = seconds_of(fn, x=x, seconds=2.0)[0] * (slowdown - 1)
    if x.is_cuda:
        (second,) = seconds_of(lambda x: torch.cuda._sleep(10**7), x=x, seconds=1.0)
        cycles = round(wait / second * 10**7)

        def waits(x: Any) -> Any:
            out = fn(x)
            torch.cuda._sleep(cycles)
            return out

        return waits

    def spins(x: Any) -> Any:
        out = fn(x)
        end = time.perf_counter() + wait
        while time.perf_counter() < end:
            pass
        return out

    return spins


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def batch(device_name: str, rounds: int, rows: int, slowdown: float) -> dict[str, Any]:
    """`rounds` rounds in this process."""
    import torch

    from fxopt import measure
    from fxopt.options import Options
    from fxopt.trials import Trials
    from profiler_core import exclusive

    device, options = torch.device(device_name), Options()
    sets = [[torch.randn(rows, WIDTH, device=device)] for _ in range(options.verify_inputs + 1)]
    (x,) = sets[0]
    with torch.no_grad(), exclusive.measuring(device):
        baseline, again = compiled(x), compiled(x)
        for fn in (baseline, again):
            fn(x)
        slower = slowed(baseline, x, slowdown)
        least, longer = seconds_of(baseline, slower, x=x, seconds=2.0)
        found = {"true_ratio": longer / least, "load_before": os.getloadavg()[0]}
        each = []
        for number in range(rounds):
            share = options.time_limit / 8
            noise = measure.noise_floor(baseline, sets, device=device, time_limit_s=share)
            # The tuner's own comparison, of which only these are needed.
            calls = SimpleNamespace(device=device)
            trials = SimpleNamespace(input_sets=sets, calls=calls, options=options, noise=noise, _share_s=share)
            turn = [("same", again), ("slower", slower)]
            one: dict[str, Any] = {"noise": noise}
            for kind, fn in turn if number % 2 == 0 else turn[::-1]:
                result = Trials.compare(cast(Any, trials), baseline, fn)
                said = "faster" if result.faster else "slower" if result.slower else "equal"
                one[kind] = {
                    "said": said,
                    "ratio": result.ratio,
                    "low": result.low,
                    "high": result.high,
                    "pairs": result.pairs,
                    "marked": list(result.marked),
                }
            each.append(one)
    return {**found, "load_after": os.getloadavg()[0], "rounds": each}


def in_new_process(arguments: argparse.Namespace, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fxopt-aa-") as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, __file__, "--device", arguments.device, "--only", str(rounds), "--json", str(answer)]
        command += ["--rows", str(arguments.rows), "--slowdown", str(arguments.slowdown)]
        subprocess.run(command, check=True)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def summary(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all rounds, and what does not hold."""
    rounds = [one for found in batches for one in found["rounds"]]
    same = [one["same"]["said"] for one in rounds]
    slower = [one["slower"]["said"] for one in rounds]
    different, detected = len(same) - same.count("equal"), slower.count("slower")
    failed = []
    if different > ALLOWED * len(rounds):
        failed.append(f"the same code was declared different in {different} of {len(rounds)} rounds")
    if detected < WANTED * len(rounds):
        failed.append(f"the slower code was declared slower in {detected} of {len(rounds)} rounds")
    return {
        "rounds": len(rounds),
        "same_declared_different": different,
        "same_declared_faster": same.count("faster"),
        "slower_detected": detected,
        "slower_declared_faster": slower.count("faster"),
        "true_ratio": statistics.median(found["true_ratio"] for found in batches),
        "noise_median": statistics.median(one["noise"] for one in rounds),
        "load": [max(found["load_before"], found["load_after"]) for found in batches],
        "failed": failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(ROWS), default="cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--batch", type=int, default=10, help="rounds in one process")
    parser.add_argument("--rows", type=int, default=0, help=f"of the baseline (default: {ROWS})")
    parser.add_argument("--slowdown", type=float, default=SLOWDOWN)
    parser.add_argument("--json", type=Path, help="where the result is written, and an earlier one is gone on with")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.rows = arguments.rows or ROWS[arguments.device]
    if arguments.only:
        arguments.json.write_text(
            json.dumps(batch(arguments.device, arguments.only, arguments.rows, arguments.slowdown))
        )
        return 0
    from profiler_core.environment import environment
    from profiler_core.files import write_atomically

    settings = {name: getattr(arguments, name) for name in ("device", "rows", "slowdown")}
    settings["width"] = WIDTH
    batches: list[dict[str, Any]] = []
    if arguments.json is not None and arguments.json.exists():
        before = json.loads(arguments.json.read_text())
        if before["settings"] != settings:
            parser.error(f"{arguments.json} was made with other settings: {before['settings']}")
        batches = before["batches"]
    while (left := arguments.rounds - sum(len(found["rounds"]) for found in batches)) > 0:
        batches.append(in_new_process(arguments, min(left, arguments.batch)))
        counts = summary(batches)
        print(json.dumps(counts), flush=True)
        if arguments.json is not None:
            result = {"environment": environment(arguments.device), "settings": settings, **counts, "batches": batches}
            write_atomically(arguments.json, json.dumps(result, indent=1) + "\n")
    return int(bool(summary(batches)["failed"]))


if __name__ == "__main__":
    sys.exit(main())
