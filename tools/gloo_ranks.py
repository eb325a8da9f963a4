"""Several ranks of one job with `backend="profile_guided"`: what each scenario does on every rank, as JSON.

    python tools/gloo_ranks.py --ranks 4 --json results/cpu/gloo_ranks.json

Each scenario starts its ranks as processes of their own (gloo on the CPU by default; `--backend nccl` gives each rank a
GPU), and is over when they are. A rank that is still there after the scenario's deadline counts as hung, and is killed.
What has to hold is checked, and the exit code is 1 where it does not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import fxopt  # noqa: E402
from fxopt import measure, registry  # noqa: E402
from fxopt.report.model import GraphReport  # noqa: E402
from fxopt.testing.stand_ins import CEILINGS, TWICE_AS_FAST, DoubledNegation  # noqa: E402
from fxopt.warning import FxoptWarning  # noqa: E402
from profiler_core import roofline  # noqa: E402
from profiler_core.environment import environment  # noqa: E402
from profiler_core.files import write_atomically  # noqa: E402

aten = torch.ops.aten
#: seconds that ranks wait for one another where a scenario is about a rank that does not come (more on a busy machine)
PATIENCE = float(os.environ.get("RANKS_PATIENCE", "6"))
#: seconds after which a rank that has not ended counts as hung
DEADLINE = 600.0
OPTIONS: dict[str, Any] = {"pairs": 6, "iterations": 2, "warmup": 1, "verify_inputs": 1, "passes": ["doubled_negation"]}


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Rank:
    """What a scenario's function gets: who this is, and how to run a model."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def inputs(self, *shape: int) -> torch.Tensor:
        torch.manual_seed(self.rank)
        return torch.randn(shape, device=self.device)

    def run(self, model: nn.Module, x: torch.Tensor, **options: Any) -> dict[str, Any]:
        """One compiled call without gradients: whether it is right, and what was decided."""
        compiled = torch.compile(model, backend="profile_guided", options={**OPTIONS, **options})
        started = time.monotonic()
        with torch.no_grad():
            y = compiled(x)
        spent = time.monotonic() - started
        with torch.no_grad():
            error = float(((y - model(x)).norm() / y.norm()).item())
        return {"seconds": round(spent, 2), "error": error, **told(fxopt.last_report().graphs[0])}


def told(report: GraphReport) -> dict[str, Any]:
    agreed = report.agreement
    return {
        "source": report.source,
        "passes": report.passes,
        "measured": report.profile is not None,
        "plan": agreed.plan if agreed is not None else None,
        "reason": agreed.reason if agreed is not None else "",
    }


def always_kept() -> None:
    """Timing that finds every candidate faster, and labels that are there: nothing here is about how fast code is."""
    registry.register(DoubledNegation)
    mock.patch.object(measure, "compare", lambda *args, **kwargs: TWICE_AS_FAST).start()
    mock.patch.object(roofline, "ceilings", lambda device, store: CEILINGS).start()


# ---------------------------------------------------------------- scenarios: what each rank does


def one_plan(rank: Rank) -> Any:
    return rank.run(Net().to(rank.device).eval(), rank.inputs(8, 32))


def plan_found(rank: Rank) -> Any:
    """A later job: rank 0 has the plan, whatever the others have."""
    first = one_plan(rank)
    torch._dynamo.reset()
    from fxopt import distributed

    dist.barrier()
    if distributed._current is not None:  # as in a new process
        distributed._current[1].settled.clear()
        distributed._current[1]._keys.clear()
        distributed._current[1].store = dist.PrefixStore("again", distributed._current[1].store)
    return {"first": first, "second": one_plan(rank)}


def one_fails(rank: Rank) -> Any:
    if rank.rank == rank.size - 1:
        mock.patch("fxopt.build.Builder.build", side_effect=RuntimeError("this rank cannot")).start()
    return one_plan(rank)


def leader_fails(rank: Rank) -> Any:
    if rank.rank == 0:
        mock.patch("fxopt.tuning.profile_build", side_effect=OSError("this rank cannot")).start()
    return one_plan(rank)


def ddp_whole(rank: Rank) -> Any:
    """A training step under DDP whose graph is not split into buckets: forward and backward are measured by rank 0,
    while no collective is under way, and all ranks run one plan for both.
    """
    torch._dynamo.config.optimize_ddp = False
    try:
        return ddp_step(rank)
    finally:
        torch._dynamo.config.optimize_ddp = True


def ddp_whole_fails(rank: Rank) -> Any:
    """The same, and one rank cannot apply the plan."""
    if rank.rank == rank.size - 1:
        mock.patch("fxopt.build.Builder.build", side_effect=RuntimeError("this rank cannot")).start()
    return ddp_whole(rank)


def ddp_step(rank: Rank) -> Any:
    """A training step under DDP beside the same step with plain Inductor: loss and gradients."""
    from torch.nn.parallel import DistributedDataParallel

    def step(backend: str, options: dict[str, Any] | None) -> tuple[float, list[torch.Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = DistributedDataParallel(Net().to(rank.device))
        compiled = torch.compile(model, backend=backend, options=options)
        loss = compiled(rank.inputs(8, 32)).square().mean()
        loss.backward()
        return float(loss.item()), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain, plain_grads = step("inductor", None)
    mine, grads = step("profile_guided", OPTIONS)
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(grads, plain_grads, strict=True))
    reports = [{**told(r), "messages": list(r.messages)} for r in fxopt.recent_reports()]
    return {"error": max(abs(mine - plain) / abs(plain), worst), "gradients": len(grads), "graphs": reports}


def other_order(rank: Rank) -> Any:
    """Two graphs that each rank compiles in an order of its own."""
    models = [Net().to(rank.device).eval(), nn.Sequential(nn.Linear(32, 8), nn.ReLU()).to(rank.device).eval()]
    found = [rank.run(model, rank.inputs(8, 32)) for model in (models if rank.rank % 2 else models[::-1])]
    return found if rank.rank % 2 else found[::-1]


def own_graph(rank: Rank) -> Any:
    """A graph that one rank alone has, while the others wait for it in a collective; then one that all have."""
    found = {}
    if rank.rank == rank.size - 1:
        found["own"] = rank.run(nn.Sequential(nn.Linear(16, 8), nn.ReLU()).to(rank.device).eval(), rank.inputs(4, 16))
    dist.barrier()
    torch._dynamo.reset()
    return {**found, "shared": one_plan(rank)}


def killed(when: str) -> Callable[[Rank], Any]:
    def scenario(rank: Rank) -> Any:
        if rank.rank == rank.size - 1:
            target = "fxopt.tuner.passes_of" if when == "applying" else "fxopt.distributed.Session.meet"
            mock.patch(target, side_effect=lambda *args, **kwargs: os._exit(9)).start()
        return one_plan(rank)

    return scenario


def turned_off(rank: Rank) -> Any:
    return rank.run(Net().to(rank.device).eval(), rank.inputs(8, 32), distributed="off")


def communicates(rank: Rank) -> Any:
    """A graph with a collective in it, which no rank may run alone."""
    from torch.distributed import _functional_collectives as collectives

    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            everyone: Any = dist.group.WORLD
            return torch.relu(collectives.all_reduce(x * 2, "sum", everyone))

    return rank.run(Sums(), rank.inputs(8, 32))


def merged_profile(rank: Rank) -> Any:
    """Each rank profiles its own model, the last one a larger one; the profiles become one."""
    import profiler_core
    from fxopt.distributed import gather_profiles

    width = 512 if rank.rank == rank.size - 1 else 64
    compiled = torch.compile(Net(width).to(rank.device).eval())
    with torch.no_grad():
        own = profiler_core.profile(compiled, rank.inputs(256, width))
    merged = gather_profiles(own)
    if merged is None:
        return {"kernel_ns": own.kernel_ns}
    return {
        "kernel_ns": own.kernel_ns,
        "merged_total_ns": merged.total_ns,
        "merged_parts_ns": merged.attributed_ns + merged.unattributed_ns,
        "by_rank": merged.by("rank").to_dict("records"),
        "notes": list(merged.notes),
    }


# ---------------------------------------------------------------- scenarios: what has to hold


Found = Sequence[Any]


def _agreed(found: Found) -> str:
    """ "" where all ranks run one plan that one of them measured, and are right."""
    if len({rank["plan"] for rank in found}) != 1 or not found[0]["plan"]:
        return "not one plan"
    if any(rank["passes"] != ["doubled_negation"] for rank in found):
        return "not the plan's passes on all ranks"
    if [rank["measured"] for rank in found[1:]] != [False] * (len(found) - 1):
        return "more than rank 0 has measured"
    return _right(found)


def _fell_back(found: Found, why: str) -> str:
    """ "" where no rank runs a plan, each says why, and all are right."""
    if any(rank["plan"] or rank["passes"] for rank in found):
        return "a rank runs a plan"
    if other := [rank["reason"] for rank in found if why not in rank["reason"]]:
        return f"another reason than {why!r}: {other}"
    return _right(found)


def _right(found: Found) -> str:
    wrong = [rank["error"] for rank in found if not rank["error"] < 1e-5]
    return f"wrong outputs: {wrong}" if wrong else ""


def _warned_once(found: Found) -> str:
    return "" if all(len(rank["said"]) == 1 for rank in found) else "not one warning on every rank"


def _one_fails(found: Found) -> str:
    """The rank that failed says so itself, and the others name it."""
    failing = [rank for rank in found if not rank["reason"]]
    others = [rank for rank in found if rank["reason"]]
    if len(failing) != 1 or "this rank cannot" not in failing[0]["said"][0]:
        return "not one rank that says that it failed"
    return _fell_back(others, "this rank cannot") or _warned_once(found) or _right(found)


def _plan_found(found: Found) -> str:
    first, second = ([rank[name] for rank in found] for name in ("first", "second"))
    if any(rank["measured"] for rank in second):
        return "measured although there is a plan"
    return _agreed(first) or _agreed(second)


def _ddp(found: Found) -> str:
    if len({graph["plan"] for rank in found for graph in rank["graphs"]}) != 1:
        return "the ranks differ"
    return _right(found) or ("" if all(rank["gradients"] == 4 for rank in found) else "gradients are missing")


def _ddp_whole(found: Found) -> str:
    trained = [{**rank, **rank["graphs"][-1]} for rank in found]
    return _ddp(found) or _agreed(trained)


def _ddp_whole_fails(found: Found) -> str:
    trained = [{**rank, **rank["graphs"][-1]} for rank in found]
    return _one_fails(trained) or ("" if all(rank["gradients"] == 4 for rank in found) else "gradients are missing")


def _other_order(found: Found) -> str:
    """Of each graph all ranks say the same; one of the two may have been met in the end, never both."""
    graphs = [[rank["results"][i] for rank in found] for i in (0, 1)]
    met = [graph for graph in graphs if graph[0]["plan"]]
    alone = [graph for graph in graphs if not graph[0]["plan"]]
    if len(met) > 1:
        return "the ranks met both graphs, although each began with another one"
    ways = [*map(_agreed, met), *(_fell_back(graph, "ranks reached this graph") for graph in alone)]
    return next(filter(None, ways), "") or _warned_once(found)


def _own_graph(found: Found) -> str:
    return _fell_back([found[-1]["own"]], "ranks reached this graph") or _agreed([rank["shared"] for rank in found])


def _turned_off(found: Found) -> str:
    alone = all(rank["measured"] and rank["plan"] is None for rank in found)
    return _right(found) or ("" if alone else "not every rank for itself")


def _communicates(found: Found) -> str:
    ended = all(rank["source"] == "skipped" and not rank["measured"] for rank in found)
    return "" if ended else "a rank measured a graph that communicates"


def _merged(found: Found) -> str:
    merged, slowest = found[0], len(found) - 1
    if merged["merged_parts_ns"] != merged["merged_total_ns"]:
        return "time was lost or made"
    if len(merged["by_rank"]) != len(found):
        return "not every rank is in the merged profile"
    return (
        "" if any(f"rank {slowest} is the slowest" in note for note in merged["notes"]) else "the slowest is not named"
    )


@dataclass(frozen=True)
class Scenario:
    """What each rank does, what has to hold of those that lived, and which ranks are to die."""

    run: Callable[[Rank], Any]
    holds: Callable[[Found], str]
    dies: int = 0  # ranks, the last ones
    timeout: float = 60.0
    one_plan_dir: bool = True


SCENARIOS = {
    "one_plan": Scenario(one_plan, _agreed),
    "one_fails": Scenario(one_fails, _one_fails),
    "ddp_step": Scenario(ddp_step, _ddp),
    "ddp_whole": Scenario(ddp_whole, _ddp_whole),
    "ddp_whole_fails": Scenario(ddp_whole_fails, _ddp_whole_fails),
    "dies_applying": Scenario(killed("applying"), lambda f: _fell_back(f, "no sign of life"), dies=1, timeout=PATIENCE),
    "dies_before": Scenario(
        killed("meeting"), lambda f: _fell_back(f, "ranks reached this graph"), dies=1, timeout=PATIENCE
    ),
    "merged_profile": Scenario(merged_profile, _merged),
    "plan_found": Scenario(plan_found, _plan_found),
    "communicates": Scenario(communicates, _communicates),
    "other_order": Scenario(other_order, _other_order, timeout=PATIENCE),
    "own_graph": Scenario(own_graph, _own_graph, timeout=3 * PATIENCE),
    "leader_fails": Scenario(leader_fails, _one_fails),
    "one_plan_other_stores": Scenario(one_plan, _agreed, one_plan_dir=False),
    "turned_off": Scenario(turned_off, _turned_off, one_plan_dir=False),
}


# ---------------------------------------------------------------- processes


def work(name: str, backend: str, rank: int, ranks: int, port: int, folder: Path) -> None:
    """One rank, in a process of its own."""
    import datetime
    import warnings

    scenario = SCENARIOS[name]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        FXOPT_PLAN_DIR=str(folder / "plans" if scenario.one_plan_dir else folder / f"plans{rank}"),
        FXOPT_DISTRIBUTED_TIMEOUT=str(scenario.timeout),
    )
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    found: dict[str, Any]
    try:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=DEADLINE))
        always_kept()
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = scenario.run(Rank(device))
        said = [str(w.message) for w in caught if issubclass(w.category, FxoptWarning)]
        found = {**(result if isinstance(result, dict) else {"results": result}), "said": said}
    except BaseException:
        found = {"crashed": traceback.format_exc()[-3000:]}
    write_atomically(folder / f"{rank}.json", json.dumps(found))
    # The store lives in rank 0, and is gone with it. A barrier would wait for those that died.
    survivors = [folder / f"{one}.json" for one in range(ranks - scenario.dies)]
    ends = time.monotonic() + DEADLINE
    while rank == 0 and not all(file.exists() for file in survivors) and time.monotonic() < ends:
        time.sleep(0.05)
    os._exit(0)


def start(name: str, ranks: int, backend: str) -> dict[str, Any]:
    """Runs a scenario; its result says what every rank found, and in `failed` what does not hold ("" if all does)."""
    scenario = SCENARIOS[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="fxopt-ranks-") as text:
        folder, started = Path(text), time.monotonic()
        processes = [
            context.Process(target=work, args=(name, backend, rank, ranks, port, folder)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        hung = []
        for rank, process in enumerate(processes):
            process.join(max(0.1, DEADLINE - (time.monotonic() - started)))
            if process.is_alive():
                hung.append(rank)
                process.kill()
                process.join()
        spent = time.monotonic() - started
        files = [folder / f"{rank}.json" for rank in range(ranks - scenario.dies)]
        found = [json.loads(file.read_text()) if file.exists() else {"crashed": "it left nothing"} for file in files]
    crashed = [f"rank {rank}: {one['crashed']}" for rank, one in enumerate(found) if "crashed" in one]
    failed = f"ranks {hung} hung" if hung else "; ".join(crashed) or scenario.holds(found)
    codes = [process.exitcode for process in processes]
    return {"ranks": ranks, "seconds": round(spent, 1), "exit_codes": codes, "failed": failed, "found": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="names, with commas (default: all)")
    parser.add_argument("--json", type=Path, help="where the result is written")
    arguments = parser.parse_args()
    # Ranks are forked from a server that has imported everything, which takes longer than most scenarios.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch._inductor.compile_fx", "torch._dynamo", "torch.distributed", "fxopt.backend", "pandas"]
    )
    device = torch.device("cuda" if arguments.backend == "nccl" else "cpu")
    result: dict[str, Any] = {"environment": environment(device), "backend": arguments.backend, "scenarios": {}}
    for name in arguments.scenarios.split(","):
        result["scenarios"][name] = found = start(name, arguments.ranks, arguments.backend)
        print(f"{name}: {found['failed'] or 'holds'} ({found['seconds']} s)", flush=True)
        if arguments.json is not None:
            write_atomically(arguments.json, json.dumps(result, indent=1) + "\n")
    return int(any(found["failed"] for found in result["scenarios"].values()))


if __name__ == "__main__":
    sys.exit(main())
