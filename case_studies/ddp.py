"""GPT-2 trained on several ranks: DDP with Inductor, and DDP with fxopt, whose ranks agree on one plan.

    torchrun --nproc-per-node 2 -m case_studies.ddp [--device cuda|cpu] [--small] [--json FILE] ...  (--help)

A step is forward, backward and AdamW; the batch is split over the ranks, seeds are fixed. In one run: loss and
gradients of each column against fp64 and against plain DDP + Inductor, step times in turns, the plan of every rank, and
the profile of a step on all ranks as one, with its collectives and how much of them the other kernels cover.

DDP hides its collectives behind the backward only where Dynamo splits the graph into DDP's buckets
(`torch._dynamo.config.optimize_ddp`, the default). fxopt measures whole graphs, so its columns are not split, and plain
Inductor has a column for either.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from case_studies import runner, show, workloads
from case_studies.columns import own

PLAIN = "inductor"
INPUT_SETS = 4


@dataclass(frozen=True)
class Job:
    """This rank, and what all of them do. batch: of each rank. tuning_limit: seconds for each of fxopt's columns."""

    rank: int
    size: int
    device: torch.device
    small: bool
    batch: int
    length: int
    rounds: int
    steps: int
    tuning_limit: float
    plan_dir: Path | None


@dataclass
class Column:
    """One way to train: its name, the precision class of its code, and whether Dynamo splits the graph into buckets."""

    name: str
    precision: str
    split: bool
    step: Step | None = None
    compile_seconds: float = 0.0
    reports: list[Any] = field(default_factory=list)
    round_ns: list[float] = field(default_factory=list)


class Step:
    """Forward, backward and AdamW step of a model that gives its loss, under DDP."""

    def __init__(self, model: nn.Module, device: torch.device, **how: Any) -> None:
        self.model = model
        compiled: Any = torch.compile(model, **how)
        self.ddp = nn.parallel.DistributedDataParallel(
            compiled, device_ids=[device.index] if device.type == "cuda" else None
        )
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def __call__(self, ids: torch.Tensor) -> None:
        self.ddp(ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def check(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss, the mean of all ranks, and gradients; the parameters stay as they are."""
        loss = self.ddp(ids)
        loss.backward()
        found = {"loss": loss.detach().clone()}
        dist.all_reduce(found["loss"])
        found["loss"] /= dist.get_world_size()
        found |= {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        return found


# ---- what is compared ----


def batches(job: Job, model: nn.Module) -> list[torch.Tensor]:
    """Ids of all ranks, the same on each, (ranks * batch, length)."""
    vocabulary = next(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    generator = torch.Generator().manual_seed(workloads.SEED + 1)
    shape = (job.size * job.batch, job.length)
    return [torch.randint(vocabulary, shape, generator=generator).to(job.device) for _ in range(INPUT_SETS)]


def mine(job: Job, ids: torch.Tensor) -> torch.Tensor:
    return ids[job.rank * job.batch : (job.rank + 1) * job.batch]


def exact(job: Job, model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss and gradients in fp64, in eager mode on this rank alone: the mean over the ranks' parts."""
    wide = copy.deepcopy(model).double()
    total = torch.zeros((), dtype=torch.float64, device=job.device)
    for part in ids.split(job.batch):
        loss = wide(part) / job.size
        loss.backward()
        total += loss.detach()
    return {"loss": total} | {name: p.grad for name, p in wide.named_parameters() if p.grad is not None}


def build(job: Job, column: Column, model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compiles a column, which tunes where it is fxopt's; its loss and gradients."""
    import fxopt

    started = time.perf_counter()
    how: dict[str, Any] = {"options": runner.kernel_events(job.device)}
    if column.name.startswith("fxopt"):
        options = {"precision": column.precision, "time_limit": job.tuning_limit, **runner.kernel_events(job.device)}
        if job.plan_dir is not None:
            options["plan_dir"] = str(job.plan_dir)
        how = {"backend": "profile_guided", "options": options}
    with bucketed(column.split), fxopt.collect_reports() as column.reports:
        column.step = Step(own(model, column.name), job.device, **how)
        found = column.step.check(mine(job, ids))
    column.compile_seconds = time.perf_counter() - started
    return found


@contextmanager
def bucketed(split: bool) -> Iterator[None]:
    """Whether graphs that are compiled inside are split into DDP's buckets."""
    config: Any = torch._dynamo.config
    with config.patch(optimize_ddp=split):
        yield


def errors(
    column: Column, found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], true: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Relative L2 errors of loss and gradients; `over_limit` names what is off by more than the class allows."""
    from fxopt.verify import parse_precision

    def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
        return float((got.double() - expected.double()).norm() / expected.double().norm())

    budget = parse_precision(column.precision)
    off = {name: relative(found[name], true[name]) for name in found}
    limits = {name: budget.limit(relative(plain[name], true[name])) for name in found}
    closest = max(off, key=lambda name: off[name] / limits[name])
    gradients = [name for name in found if name != "loss"]
    return {
        "loss": float(found["loss"]),
        "loss_error": off["loss"],
        "gradients": len(gradients),
        "largest_gradient_error": max(off[name] for name in gradients),
        "largest_difference_from_plain": max(relative(found[name], plain[name]) for name in gradients),
        "closest_to_its_limit": {"name": closest, "error": off[closest], "limit": limits[closest]},
        "over_limit": sorted(name for name in found if not off[name] <= limits[name]),
    }


# ---- step times ----


def measure(job: Job, columns: Sequence[Column], inputs: Sequence[torch.Tensor]) -> None:
    """Steps of all columns in turns, each round on another batch and in another order; a round's time is a step's."""
    for column in columns:  # optimizer states are made in the first step
        run(column, inputs[0])
    for number in range(job.rounds):
        at = number % len(columns)
        for column in [*columns[at:], *columns[:at]]:
            synchronize(job.device)
            dist.barrier()
            started = time.perf_counter_ns()
            for _ in range(job.steps):
                run(column, inputs[number % len(inputs)])
            synchronize(job.device)
            column.round_ns.append((time.perf_counter_ns() - started) / job.steps)


def run(column: Column, ids: torch.Tensor) -> None:
    assert column.step is not None
    column.step(ids)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timing(rounds: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """A step's time, and how many times as fast as the base it is, by round: medians with 95 % intervals."""
    from fxopt.measure import median_interval

    ratios = [before / after for before, after in zip(base, rounds, strict=True)]
    return {
        "step_ns": median(rounds),
        "step_ns_interval": median_interval(rounds),
        "speedup": median(ratios),
        "speedup_interval": median_interval(ratios),
    }


# ---- the profile of all ranks ----


def profiled(job: Job, column: Column, ids: torch.Tensor, iterations: int) -> dict[str, Any] | None:
    """A step on all ranks as one profile, on rank 0; None on the others. Every rank takes the same number of steps."""
    from fxopt.distributed import gather_profiles
    from profiler_core.attribute.engine import attribute
    from profiler_core.collect import kineto
    from profiler_core.environment import environment
    from profiler_core.ranks import times

    trace = kineto.measure(lambda: run(column, ids), iterations=iterations, warmup=1, device=job.device)
    found = {**environment(job.device), "rank": job.rank}
    profile = attribute(trace, environment=found, eager_nodes=True)
    own_times = times(job.rank, profile)
    of_ranks = gathered({**vars(own_times), "own_ns": own_times.own_ns})
    collectives = gathered(collective_kernels(profile))
    merged = gather_profiles(profile)
    if merged is None:
        return None
    for one in of_ranks:
        hidden = one["collective_ns"] - one["exposed_ns"]
        one["overlapped_share"] = hidden / one["collective_ns"] if one["collective_ns"] else None
    return {
        "column": column.name,
        "slowest": merged.notes[0],
        "ranks": of_ranks,
        "collectives": collectives,
        "by_rank": merged.by("rank").to_dict("records"),
        "by_family": merged.by("family").to_dict("records"),
        "notes": list(merged.notes),
    }


def collective_kernels(profile: Any) -> list[dict[str, Any]]:
    """The kernels of a rank that move data between ranks, each with the collective that it belongs to."""
    from profiler_core.families import collective, is_collective

    window = profile.window
    window = window[window["name"].map(is_collective).astype(bool)]
    rows = []
    for (name, operator, opaque), kernels in window.groupby(["name", "operator", "opaque"], sort=False):
        rows.append(
            {
                "name": name,
                "collective": collective(str(name)) or str(operator or name).rpartition(":")[2].rstrip("_"),
                "operator": operator,
                "opaque": bool(opaque),
                "method": sorted(set(kernels["method"])),
                "a_step": len(kernels) / profile.iterations,
                "time_ns": float(kernels["duration_ns"].sum() / profile.iterations),
            }
        )
    return rows


def gathered(value: Any) -> list[Any]:
    """`value` of every rank, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# ---- a rank that cannot ----


def failing(job: Job, rank: int) -> list[dict[str, Any]]:
    """A small model of which `rank` cannot apply the plan (of rank 0: cannot make one): what each rank says, how long
    it took, and whether its gradients are eager's.
    """
    import fxopt
    import fxopt.warning

    model, _ = workloads.build("gpt2_train", job.device, small=True)
    eager = copy.deepcopy(model)
    # Of another length than any column's: a graph on which the ranks have not agreed yet.
    ids = mine(job, torch.arange(job.size * job.batch * 24, device=job.device).view(-1, 24) % 512)
    options = {"pairs": 6, "iterations": 2, "passes": ["remove_redundant_casts_and_copies"]}
    options |= runner.kernel_events(job.device)
    started = time.perf_counter()
    made_to = RuntimeError("this rank was made to fail")
    broken = [mock.patch(f"fxopt.tuner.Tuner.{name}", side_effect=made_to) for name in ("apply", "_tune")]
    for patch in broken if job.rank == rank else ():
        patch.start()
    try:
        with bucketed(False), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step = Step(own(model, "failing"), job.device, backend="profile_guided", options=options)
            found = step.check(ids)
    finally:
        for patch in broken if job.rank == rank else ():
            patch.stop()
    spent = time.perf_counter() - started
    loss = eager(ids)
    loss.backward()
    worst = 0.0
    for name, parameter in eager.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        expected = parameter.grad / job.size
        worst = max(worst, float((found[name] - expected).norm() / expected.norm()))
    report = fxopt.recent_reports()[-1]
    warned = [str(w.message) for w in caught if issubclass(w.category, fxopt.warning.FxoptWarning)]
    said = {"source": report.source, "decision": report.decision, "messages": report.messages, "warned": warned}
    return gathered({"rank": job.rank, "seconds": spent, "largest_gradient_error": worst, **said})


# ---- the study ----


def study(
    job: Job, precisions: Sequence[str], iterations: int, fail_rank: int | None, say: Callable[[str], None]
) -> Any:
    """Everything, on every rank; the document on rank 0, None elsewhere."""
    from profiler_core.environment import environment

    model, _ = workloads.build("gpt2_train", job.device, small=job.small)
    inputs = batches(job, model)
    say("loss and gradients in fp64")
    true = exact(job, model, inputs[0])
    columns = [Column(PLAIN, "fp32", split=True), Column(f"{PLAIN}_whole", "fp32", split=False)]
    columns += [Column(f"fxopt_{precision}", precision, split=False) for precision in precisions]
    found: dict[str, Any] = {}
    plain: dict[str, torch.Tensor] = {}
    for column in columns:
        say(f"compiling {column.name}")
        values = build(job, column, model, inputs[0])
        plain = plain or values
        found[column.name] = {"precision": column.precision, "split": column.split}
        found[column.name] |= errors(column, values, plain, true)
        found[column.name]["plans"] = gathered(agreed(column))
        found[column.name]["compile_seconds"] = gathered(column.compile_seconds)
        del values
    say("step times, in turns")
    measure(job, columns, [mine(job, ids) for ids in inputs])
    for column in columns:
        found[column.name]["rounds_ns"] = [max(times) for times in zip(*gathered(column.round_ns), strict=True)]
    for entry in found.values():
        entry |= timing(entry["rounds_ns"], found[PLAIN]["rounds_ns"])
        entry["speedup_over_whole"] = timing(entry["rounds_ns"], found[f"{PLAIN}_whole"]["rounds_ns"])["speedup"]
    profiles = []
    for column in (columns[0], columns[-1]):
        say(f"profiling a step of {column.name} on all ranks")
        profiles.append(profiled(job, column, mine(job, inputs[0]), iterations))
    failed = None
    if fail_rank is not None:
        say(f"rank {fail_rank} is made to fail")
        failed = failing(job, fail_rank)
    environments = gathered(environment(job.device))
    if job.rank:
        return None
    workload = {"model": "gpt2", "small": job.small, "ranks": job.size, "batch_a_rank": job.batch, "length": job.length}
    how = {"rounds": job.rounds, "steps_a_round": job.steps, "tuning_limit_s": job.tuning_limit}
    return {
        "case": "ddp",
        "environment": environments,
        "backend": dist.get_backend(),
        "workload": workload | how,
        "columns": found,
        "fxopt": {c.name: [report.to_json() for report in c.reports] for c in columns if c.reports},
        "profiles": profiles,
        "failing_rank": failed,
        "problems": problems(found, failed),
    }


def agreed(column: Column) -> list[dict[str, Any]]:
    """Of each graph of the column on this rank: what was decided, by which plan."""
    return [
        {
            "source": report.source,
            "decision": report.decision,
            "passes": report.passes,
            "measured": report.profile is not None,
            "plan": report.agreement.plan if report.agreement is not None else "",
            "reason": report.agreement.reason if report.agreement is not None else "; ".join(report.messages),
        }
        for report in column.reports
    ]


def problems(columns: dict[str, Any], failed: list[dict[str, Any]] | None) -> list[str]:
    """What has to hold and does not."""
    wrong = [f"{name}: over its limit: {', '.join(c['over_limit'])}" for name, c in columns.items() if c["over_limit"]]
    for name, column in columns.items():
        plans = [tuple(graph["plan"] for graph in rank) for rank in column["plans"]]
        if name.startswith("fxopt") and (len(set(plans)) != 1 or not all(plans[0]) or not plans[0]):
            wrong.append(f"{name}: the ranks do not run one plan: {plans}")
    for rank in failed or []:
        if rank["source"] not in ("fallback", "skipped") or rank["decision"] != "baseline":
            wrong.append(f"rank {rank['rank']} did not fall back with the one that failed")
        if not rank["largest_gradient_error"] < 1e-4:
            wrong.append(
                f"rank {rank['rank']}: wrong gradients after falling back: {rank['largest_gradient_error']:.1e}"
            )
    return wrong


def main() -> None:
    import typer

    def ddp(
        device: str = typer.Option("auto", help="cpu (gloo), cuda (NCCL), or auto: cuda where there is one."),
        small: bool = typer.Option(False, "--small", help="Two layers of width 64, for a test."),
        precisions: str = typer.Option("fp32,bf16", help="fxopt's columns: fp32, tf32, bf16, with commas."),
        batch: int = typer.Option(0, min=0, help="Of each rank. 0: 2 if small, else 8."),
        length: int = typer.Option(0, min=0, max=1024, help="Sequence length. 0: 16 if small, else 512."),
        rounds: int = typer.Option(12, min=6, help="Rounds of the comparison of step times."),
        steps: int = typer.Option(3, min=1, help="Steps of each column in a round."),
        iterations: int = typer.Option(3, min=1, help="Profiled steps."),
        tuning_limit: float = typer.Option(60.0, min=1.0, help="Seconds for tuning each of fxopt's columns."),
        fail_rank: int = typer.Option(-1, help="This rank is made to fail at the end; -1: none."),
        timeout: int = typer.Option(600, min=10, help="Seconds after which a rank that hangs is ended."),
        plan_dir: Path = typer.Option(None, help="Where plans are kept (default: the user's cache directory)."),
        json: Path = typer.Option(None, help="Write everything measured to this file."),
    ) -> None:
        """Train GPT-2 under DDP with Inductor and with fxopt; run by torchrun."""
        if "RANK" not in os.environ:
            raise typer.BadParameter("run it by torchrun: torchrun --nproc-per-node 2 -m case_studies.ddp ...")
        faulthandler.dump_traceback_later(timeout, exit=True)
        rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
        place = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(place)
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout))
        batch, length = batch or (2 if small else 8), length or (16 if small else 512)
        job = Job(rank, size, place, small, batch, length, rounds, steps, tuning_limit, plan_dir)
        started = time.perf_counter()

        def say(text: str) -> None:
            if rank == 0:
                print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)

        failing_rank = None if fail_rank < 0 else fail_rank
        result = study(job, [p for p in precisions.split(",") if p], iterations, failing_rank, say)
        if result is not None:
            print_table(result)
            if json is not None:
                command = show.command_line("case_studies.ddp")
                seconds = {"total_seconds": time.perf_counter() - started}
                show.write_json(json, {"command": command, **result, **seconds})
        dist.barrier()
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        if result is not None and result["problems"]:
            raise typer.Exit(1)

    typer.run(ddp)


def print_table(result: dict[str, Any]) -> None:
    print(f"{'column':16} {'step':>10} {'speedup (95 % interval)':>26} {'of whole':>9} {'gradients off by':>17}  plan")
    for name, column in result["columns"].items():
        low, high = column["speedup_interval"]
        plans = {graph["plan"][:12] for rank in column["plans"] for graph in rank}
        interval = f"{column['speedup']:.2f}x ({low:.2f} to {high:.2f})"
        print(
            f"{name:16} {column['step_ns'] / 1e6:7.2f} ms {interval:>26} {column['speedup_over_whole']:8.2f}x "
            f"{column['largest_gradient_error']:17.1e}  {', '.join(sorted(plans))}"
        )
    for profile in result["profiles"]:
        print(f"{profile['column']}: {profile['slowest']}")
    for rank in result["failing_rank"] or []:
        print(f"rank {rank['rank']} {rank['source']} after {rank['seconds']:.1f} s: {'; '.join(rank['messages'][-1:])}")
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}")


if __name__ == "__main__":
    main()
