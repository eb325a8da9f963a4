"""From the start of a process to its first result: plain torch.compile, and fxopt with a plan, all caches warm.

    python tools/warm_start.py --runs 7 --json results/cpu/warm_start.json

A small GPT (with a mask, so that a pass has something to do) is compiled in new processes, the variants in turns:

    inductor    torch.compile alone
    baseline    backend="profile_guided", and a plan that keeps Inductor's code
    passes      the same with a plan that keeps passes; nothing is frozen
    frozen      fxopt.optimize, and a plan that freezes the weights

For each a first process fills the caches; fxopt's tunes there, and takes every candidate that is right for faster, so
that it is known what is in the plan. Python's bytecode is one of these caches, in a folder of its own, for torch and
fxopt alike: pip writes it for what it installs, and a clone has none where PYTHONDONTWRITEBYTECODE is set. Measured is
the time from before the interpreter is started to the first result (`seconds`), and how much of it full garbage
collections took: one takes 0.2 s, and comes when a quarter of all objects are new, which some sizes of the model reach
before their first result and others just after (`--layers` shows it), with fxopt or without. `relative` compares what
is left without them. Processes that do nothing else say what `import fxopt` and the backend's own modules add to
`import torch`, by the least of each. The exit code is 1 where a variant that freezes nothing takes more than 5 % longer
than plain torch.compile, where an import of fxopt takes 100 ms or more, or where a process measured something or gave
another result.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VARIANTS = ("inductor", "baseline", "passes", "frozen")
#: what each variant's plan may keep
PASSES: dict[str, list[str]] = {"baseline": [], "passes": ["causal_mask"], "frozen": ["freeze_weights", "causal_mask"]}
IMPORTS = {
    "torch": "import torch",
    "fxopt": "import torch, fxopt",
    "inductor": "import torch, torch._inductor.compile_fx, torch._dynamo",
    "backend": "import torch, torch._inductor.compile_fx, torch._dynamo, fxopt.backend",
}
ALLOWED, IMPORT_MS = 1.05, 100.0


# -- in the process that is measured -----------------------------------------------------------------------------------


def first_result(variant: str, layers: int, tuning: bool) -> dict[str, Any]:
    """The variant's first result: when it was there (time.perf_counter, one clock for all processes), and its digest.

    tuning: whether every candidate that is right counts as faster, as in the process that fills the caches.
    """
    import hashlib

    collections = _timed_full_collections()
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.heads = heads

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Model(nn.Module):
        def __init__(self, width: int = 256, heads: int = 4, vocabulary: int = 1000) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
            self.head = nn.Linear(width, vocabulary)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x, length = self.embed(ids), ids.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            for block in self.blocks:
                x = block(x, mask)
            return self.head(x)

    torch.manual_seed(0)
    model, ids = Model().eval(), torch.randint(0, 1000, (1, 64))
    if tuning and variant != "inductor":
        _every_candidate_is_faster()
    options: dict[str, Any] = {"passes": PASSES.get(variant, []), "pairs": 6}
    with torch.no_grad():
        if variant == "frozen":
            import fxopt

            optimized = fxopt.optimize(model, ids, **options)
            there, collections = time.perf_counter(), list(collections)
            y, graphs = optimized(ids), optimized.report.graphs
        else:
            chosen: dict[str, Any] = {"backend": "profile_guided", "options": options} if variant != "inductor" else {}
            y = torch.compile(model, **chosen)(ids)
            there, collections = time.perf_counter(), list(collections)
            graphs = []
            if variant != "inductor":
                import fxopt

                graphs = fxopt.recent_reports()
    story = [
        {"source": g.source, "passes": g.passes, "frozen": g.frozen, "measured": g.profile is not None, **_time(g)}
        for g in graphs
    ]
    digest = hashlib.sha256(y.contiguous().numpy().tobytes()).hexdigest()
    return {"there": there, "digest": digest, "graphs": story, "collections": collections}


def _timed_full_collections() -> list[float]:
    """The seconds of each full garbage collection from now on, as they happen."""
    import gc

    took: list[float] = []
    begun = 0.0

    def watch(phase: str, info: dict[str, Any]) -> None:
        nonlocal begun
        if info["generation"] == 2:
            now = time.perf_counter()
            if phase == "stop":
                took.append(now - begun)
            begun = now

    gc.callbacks.append(watch)
    return took


def _time(graph: Any) -> dict[str, Any]:
    return {"seconds": {name: round(value, 3) for name, value in graph.seconds.items()}}


def _every_candidate_is_faster() -> None:
    from fxopt import measure
    from fxopt.measure import PairedResult
    from fxopt.trials import Trials

    faster = PairedResult(2.0, 1.9, 2.1, 6, 2e6, 1e6, 0.01, {}, ())
    measure.noise_floor = lambda *args, **options: 0.01
    measure.compare = lambda *args, **options: faster
    Trials.as_fast = lambda *args: False  # type: ignore[method-assign]  # so that none is dropped again


# -- in the process that starts the others -----------------------------------------------------------------------------


def in_new_process(variant: str, layers: int, folder: Path, tuning: bool) -> dict[str, Any]:
    environment = _environment(folder.parent)
    environment |= {"FXOPT_PLAN_DIR": str(folder / "plans"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    answer = folder / "answer.json"
    command = [sys.executable, __file__, "--only", variant, "--layers", str(layers), "--json", str(answer)]
    before, started = _cpu_seconds(), time.perf_counter()
    subprocess.run(
        [*command, *(["--tuning"] if tuning else [])], env=environment, check=True, stderr=subprocess.DEVNULL
    )
    found: dict[str, Any] = json.loads(answer.read_text())
    there = found.pop("there")
    seconds = there - started
    outside = seconds - sum(found["collections"])
    return {**found, "seconds": seconds, "outside_seconds": outside, "cpu_seconds": _cpu_seconds() - before}


def _environment(folder: Path) -> dict[str, str]:
    """The environment without fxopt's options, and with a place for bytecode under `folder`."""
    left = {name: value for name, value in os.environ.items() if not name.startswith("FXOPT_")}
    left.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**left, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def import_seconds(code: str, folder: Path) -> tuple[float, float]:
    """Wall and CPU time of a process that only runs `code`."""
    before, started = _cpu_seconds(), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=_environment(folder), check=True, cwd=ROOT)
    return time.perf_counter() - started, _cpu_seconds() - before


def _cpu_seconds() -> float:
    """CPU time of the processes that have ended. Other load on the machine changes it much less than the wall time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rotated(names: Sequence[str], by: int) -> list[str]:
    at = by % len(names)
    return [*names[at:], *names[:at]]


def medians(runs: dict[str, list[Any]], name: Any) -> dict[str, float]:
    return {what: statistics.median(run[name] for run in found) for what, found in runs.items()}


def problems(variant: str, first: dict[str, Any], runs: list[dict[str, Any]]) -> list[str]:
    """In which way the new processes did not do what a plan promises."""
    found = []
    for number, run in enumerate(runs, 1):
        name = f"{variant}, run {number}"
        if run["digest"] != first["digest"]:
            found.append(f"{name}: its output is not that of the process that filled the caches")
        if variant == "inductor":
            continue
        kept = PASSES[variant]
        for graph in run["graphs"]:
            if graph["source"] != "plan" or graph["measured"] or graph["passes"] != kept:
                found.append(f"{name}: not as planned: {graph}")
        if not run["graphs"]:
            found.append(f"{name}: no graph reached fxopt")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="new processes of each variant")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--tuning", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        arguments.json.write_text(json.dumps(first_result(arguments.only, arguments.layers, arguments.tuning)))
        return 0
    from profiler_core.environment import environment
    from profiler_core.files import write_atomically

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fxopt-warm-") as name:
        folders = {variant: Path(name, variant) for variant in VARIANTS}
        first: dict[str, Any] = {}
        runs: dict[str, list[Any]] = {variant: [] for variant in VARIANTS}
        for variant, folder in folders.items():
            folder.mkdir()
            first[variant] = in_new_process(variant, arguments.layers, folder, tuning=True)
            in_new_process(variant, arguments.layers, folder, tuning=False)  # what only a new process writes to a cache
        imports: dict[str, list[Any]] = {name: [] for name in IMPORTS}
        for number in range(arguments.runs):
            # Each comes first now and then: what ran before it leaves the machine warmer or colder.
            for variant in rotated(VARIANTS, number):
                runs[variant].append(in_new_process(variant, arguments.layers, folders[variant], tuning=False))
            for what in rotated(tuple(IMPORTS), number):
                imports[what].append(import_seconds(IMPORTS[what], Path(name)))
            print(f"run {number + 1} of {arguments.runs}", file=sys.stderr, flush=True)
    failed = [problem for variant in VARIANTS for problem in problems(variant, first[variant], runs[variant])]
    seconds, outside = medians(runs, "seconds"), medians(runs, "outside_seconds")
    took = {what: min(wall for wall, _ in found) for what, found in imports.items()}
    relative = {variant: outside[variant] / outside["inductor"] for variant in VARIANTS}
    failed += [f"{v}: {relative[v]:.3f} x plain" for v in ("baseline", "passes") if relative[v] > ALLOWED]
    added = {"fxopt": (took["fxopt"] - took["torch"]) * 1e3, "backend": (took["backend"] - took["inductor"]) * 1e3}
    if added["fxopt"] >= IMPORT_MS:
        failed.append(f"import fxopt adds {added['fxopt']:.0f} ms")
    result = {
        "seconds": seconds,
        "outside_seconds": outside,
        "full_collections": {v: statistics.median(len(run["collections"]) for run in runs[v]) for v in VARIANTS},
        "relative": relative,
        "cpu_seconds": medians(runs, "cpu_seconds"),
        "import_seconds": took,
        "import_cpu_seconds": {what: min(cpu for _, cpu in found) for what, found in imports.items()},
        "import_added_ms": added,
        "load": [load, os.getloadavg()[0]],
        "failed": failed,
    }
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        whole = {"environment": environment("cpu"), "layers": arguments.layers, **result, "first": first, "runs": runs}
        write_atomically(arguments.json, json.dumps({**whole, "imports": imports}, indent=1) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
