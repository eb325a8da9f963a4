"""What the first call of a new process costs on GPT-2: torch.compile alone, and fxopt with a plan on disk.

    python -m case_studies.first_call [--layers N] [--seq N] [--runs N] [--device cpu|cuda] [--json FILE]  (--help)

For each variant one process fills the caches (fxopt's tunes, and writes its plan), and further new processes are
measured, the variants in turns. Measured is the wall time from before `torch.compile` or `fxopt.optimize` to the end of
the first call, with the device drained. Starting Python, imports and building the model are not part of it; all
variants import the same modules beforehand. Each variant has Inductor caches and plans of its own, in a temporary
folder. The processes do not ask the Hugging Face hub: weights come from its local cache or from a fixed seed.
"""

from __future__ import annotations

import hashlib
import json as json_format
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from case_studies import gpt2, show

VARIANTS = {
    "inductor": "torch.compile",
    "backend": "fxopt (backend)",
    "optimize": "fxopt (optimize)",
}
"""What is compared: Inductor, backend="profile_guided" (never frozen), and fxopt.optimize in fp32, which freezes the
weights where tuning showed that to be faster; the result says whether it did.
"""


@dataclass(frozen=True)
class Workload:
    """GPT-2's first `layers` layers on ids (batch, seq); `device` is "cpu" or "cuda"."""

    device: str
    layers: int
    batch: int
    seq: int


@dataclass(frozen=True)
class FirstCall:
    """What one process saw.

    seconds: wall time of compiling and the first call. graphs: of each graph that reached fxopt, where its code came
    from, what was decided and whether anything was measured; empty for plain torch.compile. digest: SHA-256 of the
    output's bytes.
    """

    seconds: float
    digest: str
    weights: str
    graphs: list[dict[str, Any]]


@dataclass
class Measured:
    """A variant's processes. warming: the one that filled the caches. runs: the ones after it."""

    variant: str
    warming: FirstCall
    runs: list[FirstCall] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median of the runs."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def frozen(self) -> bool:
        return any(graph["frozen"] for graph in self.warming.graphs)

    @property
    def code(self) -> str:
        """Whose code runs, in words."""
        graphs = self.warming.graphs
        passes = sorted({name for graph in graphs for name in graph["passes"]})
        return ", ".join(passes) if passes else "Inductor's own"

    def problems(self) -> list[str]:
        """In which way the new processes did not do what a plan promises."""
        name, found = VARIANTS[self.variant], []
        for number, run in enumerate(self.runs, 1):
            if run.digest != self.warming.digest:
                found.append(f"{name}, run {number}: its output is not that of the process that filled the caches")
            if self.variant == "inductor":
                continue
            if [graph["passes"] for graph in run.graphs] != [graph["passes"] for graph in self.warming.graphs]:
                found.append(f"{name}, run {number}: its passes are not those that tuning kept")
            if not run.graphs:
                found.append(f"{name}, run {number}: no graph reached fxopt")
            for graph in run.graphs:
                if graph["source"] != "plan":
                    why = "; ".join(graph["messages"])
                    found.append(f"{name}, run {number}: a graph came from {graph['source']!r}, not the plan: {why}")
                if graph["measured"]:
                    found.append(f"{name}, run {number}: a graph was measured although there was a plan")
        return found


# ---- in the process that is measured ----


def first_call(variant: str, workload: Workload) -> FirstCall:
    """Build the model, then time compiling it and the first call, in this process."""
    # All variants import the same, Dynamo and Inductor included, so that no import of torch's is timed.
    import fxopt.session

    device = torch.device(workload.device)
    model, weights = gpt2.load_model(workload.layers)
    study = gpt2.Study(device=device, batch=workload.batch, seq=workload.seq)
    net = gpt2.own_model(model.to(device), "first_call")
    ((ids,),) = gpt2.make_inputs(study, model.config.vocab_size, sets=1)
    _drain(device)
    graphs: Callable[[], Sequence[Any]] = tuple
    with torch.no_grad():
        start = time.perf_counter()
        if variant == "optimize":
            optimized = fxopt.session.optimize(net, (ids,), precision="fp32")  # makes the first call itself
            _drain(device)
            seconds = time.perf_counter() - start
            graphs = lambda: optimized.report.graphs  # noqa: E731
            output = optimized(ids)
        else:
            compiled = torch.compile(net, backend="profile_guided" if variant == "backend" else "inductor")
            output = compiled(ids)
            _drain(device)
            seconds = time.perf_counter() - start
            if variant == "backend":
                graphs = fxopt.recent_reports
    data = output.detach().cpu().contiguous().numpy().tobytes()
    return FirstCall(seconds, hashlib.sha256(data).hexdigest(), weights, [_story(graph) for graph in graphs()])


def _story(graph: Any) -> dict[str, Any]:
    """What matters here of a graph's report."""
    return {
        "source": graph.source,
        "decision": graph.decision,
        "passes": graph.passes,
        "frozen": graph.frozen,
        "measured": graph.profile is not None,
        "seconds": dict(graph.seconds),
        "messages": list(graph.messages),
    }


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- in the process that starts the others ----


def in_new_process(variant: str, workload: Workload, folder: Path) -> FirstCall:
    """`first_call` in a new process, whose caches and plans lie in `folder`.

    Raises RuntimeError with the end of the process's output where it fails.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FXOPT_")}
    environment |= {
        "FXOPT_PLAN_DIR": str(folder / "plans"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "HF_HUB_OFFLINE": "1",
    }
    folder.mkdir(parents=True, exist_ok=True)
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "case_studies.first_call", "--device", workload.device]
    for name in ("layers", "batch", "seq"):
        command += [f"--{name}", str(getattr(workload, name))]
    command += ["--only", variant, "--json", str(answer)]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode or not answer.exists():
        text = (done.stdout + done.stderr).strip()[-2000:]
        raise RuntimeError(f"the process for {VARIANTS[variant]!r} ended with {done.returncode}:\n{text}")
    return FirstCall(**json_format.loads(answer.read_text(encoding="utf-8")))


def run(workload: Workload, runs: int, screen: Any) -> dict[str, Any]:
    """Fill the caches, measure `runs` new processes of each variant in turns, print the table.

    The result is a JSON-able document; `problems` in it is empty where every check held.
    """
    from rich.text import Text

    from profiler_core.environment import environment

    surroundings = environment(workload.device)
    screen.print(Text(f"First call on GPT-2: {_size(workload)}", style="bold"))
    screen.print(Text(show.environment_line(surroundings)))
    with tempfile.TemporaryDirectory(prefix="fxopt-first-call-") as name:
        folders = {variant: Path(name) / variant for variant in VARIANTS}
        measured = {}
        for variant, folder in folders.items():
            what = "filling the caches" if variant == "inductor" else "tuning"
            screen.print(Text(f"... {VARIANTS[variant]}: {what}"))
            measured[variant] = Measured(variant, in_new_process(variant, workload, folder))
        for number in range(runs):
            screen.print(Text(f"... new processes, {number + 1} of {runs}"))
            for variant, folder in folders.items():
                measured[variant].runs.append(in_new_process(variant, workload, folder))
    problems = [problem for m in measured.values() for problem in m.problems()]
    screen.print()
    screen.print(_table(list(measured.values())))
    checks = (
        "Every new fxopt process used the plan, measured nothing and gave the tuning process's output, bit for bit."
    )
    screen.print(Text("\n".join(problems) or checks, style="bold"))
    base = measured["inductor"].seconds
    return {
        "case": "first_call",
        "environment": surroundings,
        "workload": {**asdict(workload), "dtype": "float32", "weights": measured["inductor"].warming.weights},
        "rows": [
            {
                "name": VARIANTS[m.variant],
                "variant": m.variant,
                "code": m.code,
                "frozen": m.frozen,
                "seconds": m.seconds,
                "relative": m.seconds / base,
                "warming": asdict(m.warming),
                "runs": [asdict(run) for run in m.runs],
            }
            for m in measured.values()
        ],
        "problems": problems,
    }


def _size(workload: Workload) -> str:
    layers = f"{workload.layers} layer{'s' * (workload.layers != 1)}"
    return f"{layers}, batch {workload.batch}, sequence {workload.seq}, fp32"


def _table(measured: Sequence[Measured]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    notes = [
        "backend never freezes weights; optimize does where tuning shows that to be faster, and here it "
        + ("did." if any(m.frozen for m in measured) else "did not."),
        "median, lowest, highest: compiling and the first call in a new process, imports and model apart.",
        "caches: the same in the process that filled them; fxopt's also measured and tuned.",
    ]
    table = Table(
        title="First call of a new process",
        caption=Text("\n".join(notes)),
        caption_justify="left",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("variant", no_wrap=True)
    table.add_column("code kept", min_width=16)
    for column in ("median", "lowest", "highest", "x plain", "caches"):
        table.add_column(column, justify="right", no_wrap=True)
    base = measured[0].seconds
    for m in measured:
        every = [run.seconds for run in m.runs]
        times = [m.seconds, min(every), max(every)]
        cells = [f"{value:.2f} s" for value in times]
        table.add_row(
            VARIANTS[m.variant], Text(m.code), *cells, f"{m.seconds / base:.2f}", f"{m.warming.seconds:.1f} s"
        )
    return table


# ---- command line ----


def main() -> None:
    import typer

    def command(
        device: str = typer.Option("auto", help="cpu, cuda, or auto: cuda where there is one."),
        layers: int = typer.Option(12, min=1, max=12, help="Keep the first layers only, for a quick run."),
        batch: int = typer.Option(0, min=0, help="0: 1 on the CPU, 4 on CUDA."),
        seq: int = typer.Option(0, min=0, max=1024, help="Sequence length. 0: 64 on the CPU, 128 on CUDA."),
        runs: int = typer.Option(3, min=1, help="New processes to measure, of each variant."),
        json: Path = typer.Option(None, help="Write everything measured to this file."),
        only: str = typer.Option("", hidden=True, help="The variant that this process is to measure."),
    ) -> None:
        """Measure what the first call of a new process costs on GPT-2, with and without a plan of fxopt's."""
        place = gpt2._device(device, typer.BadParameter).type
        cuda = place == "cuda"
        workload = Workload(place, layers, batch or (4 if cuda else 1), seq or (128 if cuda else 64))
        try:
            if only:
                found = first_call(only, workload)
                json.write_text(json_format.dumps(asdict(found)), encoding="utf-8")
                return
            result = run(workload, runs, screen := show.console())
        except (gpt2.MissingDependency, RuntimeError) as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error
        if json is not None:
            show.write_json(json, {"command": show.command_line("case_studies.first_call"), **result})
            screen.print(f"written: {json}", markup=False)
        if result["problems"]:
            raise typer.Exit(1)

    typer.run(command)


if __name__ == "__main__":
    main()
