"""Small models of many kinds, run eagerly and through fxopt: whatever a caller can see has to be the same.

    python tools/zoo.py list
    nice -n 10 python tools/zoo.py run --json results/cpu/zoo.json            # all; goes on where it was stopped
    python tools/zoo.py run bert kv_cache --again                             # some of them, anew
    python tools/zoo.py show --json results/cpu/zoo.json                      # the table

Each model is called several times in a row, under each of its settings, in four ways:

- tuned: `torch.compile(backend="profile_guided")`. Labels are put on every kernel, so that whatever pass can be tried
  is; one more pass, a rewrite that changes at most the rounding, is offered beside fxopt's own.
- planned: the same in `mode="apply"` from the plans of the first, changed so that each graph gets the largest set of
  passes that was found right, faster or not.
- session: `fxopt.optimize`, for models that are marked; and session planned, as above.
- eager, and where something differs from it, plain Inductor, by which a difference may be explained.

Outputs (values, types, strides, memory shared with inputs), gradients, parameters after a step, buffers, inputs
afterwards, the random state and Python numbers on modules are compared after every call. One process a model, with a
deadline; a crash or a hang is a row as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "results" / "cpu" / "zoo.json"
#: quick rather than sure: what is asked is whether the code is right, not whether it is faster
QUICK: dict[str, Any] = {"pairs": 6, "warmup": 1, "iterations": 1, "verify_inputs": 1, "time_limit": 240.0}
#: threads that spin and compilers beside each other would take most of the time; set before torch is imported
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
#: Inductor's autotuning takes most of a minute a graph: for the models that ask for it
LONG = {"disable": ("inductor_options",)}
#: from the best to the worst
STATUSES = ("same", "explained", "different", "failed", "timeout")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help=(__doc__ or "").partition("\n\n")[0],
)


def worst(statuses: Iterator[str] | list[str]) -> str:
    return max(statuses, key=STATUSES.index, default="same")


# ---------------------------------------------------------------- one model


def check(name: str, plans: Path) -> dict[str, Any]:
    """The row of one model. plans: a folder of its own for its plans."""
    from zoo_models import MODELS

    model = MODELS[name]
    started = time.perf_counter()
    runs = [run for under in model.under for run in check_under(model, under, plans / under)]
    return {
        "name": name,
        "about": model.about,
        "status": worst([run["status"] for run in runs]),
        "runs": runs,
        "seconds": round(time.perf_counter() - started, 1),
    }


def check_under(model: Any, under: str, plans: Path) -> Iterator[dict[str, Any]]:
    """What was found of a model under one setting, one way of running it after another."""
    import torch
    import zoo_observe
    from zoo_passes import LABELS_EVERYWHERE

    import fxopt

    options = {**QUICK, **({} if model.autotuned else LONG), "thresholds": LABELS_EVERYWHERE, **model.inductor}
    right: dict[bool, list[Any]] = {}
    plain: dict[bool, list[Any]] = {}

    def compiled(mode: str) -> Callable[..., Any]:
        given = {**options, "plan_dir": str(plans / "backend"), "mode": mode}
        return lambda fn, call: torch.compile(fn, backend="profile_guided", dynamic=model.dynamic, options=given)

    def inductor(fn: Any, call: Any) -> Any:
        return torch.compile(fn, dynamic=model.dynamic, options=dict(model.inductor))

    def optimized(mode: str) -> Callable[..., Any]:
        given = {**options, "plan_dir": str(plans / "session")}
        return lambda fn, call: fxopt.optimize(fn, *_first(call), mode=mode, **given)

    def called_once(make: Callable[..., Any]) -> Callable[..., Any]:
        """What `fxopt.optimize` is compared with, which calls the model once."""

        def called(fn: Any, call: Any) -> Any:
            run = make(fn, call)
            (inputs,) = _first(call)
            with torch.no_grad():
                run(**inputs) if isinstance(inputs, dict) else run(*inputs)
            return run

        return called

    def judge(variant: str, run: Callable[..., Any]) -> dict[str, Any]:
        session = variant.startswith("session")
        around = called_once if session else lambda make: make
        if session not in right:
            right[session] = zoo_observe.observe(model, under, around(lambda fn, call: fn))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with fxopt.collect_reports() as graphs:
                seen = zoo_observe.observe(model, under, run)
        warned = dict.fromkeys(str(w.message) for w in caught if w.category.__name__ == "FxoptWarning")
        mine, largest = zoo_observe.differences(right[session], seen, model.tolerance)
        rows: list[dict[str, Any]] = []
        if mine:
            if session not in plain:
                plain[session] = zoo_observe.observe(model, under, around(inductor))
            theirs, _ = zoo_observe.differences(right[session], plain[session], model.tolerance)
            apart, _ = zoo_observe.differences(plain[session], seen, model.tolerance)
            rows = zoo_observe.explain(mine, theirs, apart)
        bad = warned or any(not row["why"] for row in rows)
        return {
            "under": under,
            "variant": variant,
            "status": "different" if bad else "explained" if rows else "same",
            "calls": len(seen),
            "largest_difference": largest,
            "differences": rows,
            "warnings": list(warned),
            "graphs": [_brief(graph) for graph in graphs],
        }

    for variant, make in (("tuned", compiled), ("session", optimized)):
        if variant == "session" and not (model.session and under == "no_grad"):
            continue
        store = plans / ("session" if variant == "session" else "backend")
        store.mkdir(parents=True, exist_ok=True)
        _share_ceilings(store, plans)
        tuned = judge(variant, make("tune"))
        yield tuned
        measured = sum(graph["source"] == "tuned" for graph in tuned["graphs"])
        if not measured:
            continue
        keep_largest(store)
        planned = judge("session planned" if variant == "session" else "planned", make("apply"))
        lost = sum(graph["source"] == "apply" for graph in planned["graphs"])
        if lost:
            planned["warnings"].append(f"{lost} graphs had no plan the second time")
            planned["status"] = "different"
        yield planned


def _first(call: Any) -> tuple[Any]:
    """A copy of a call's arguments, as `fxopt.optimize` takes them."""
    import copy

    return (copy.deepcopy(dict(call.kwargs) or tuple(call.args)),)


def _share_ceilings(store: Path, plans: Path) -> None:
    """The device's ceilings, which take seconds to measure, are measured once for all models."""
    shared = plans.parent.parent / "ceilings"
    shared.mkdir(parents=True, exist_ok=True)
    if not (store / "ceilings").exists():
        (store / "ceilings").symlink_to(shared, target_is_directory=True)


def keep_largest(root: Path) -> None:
    """Change each plan to use the largest set of passes that was found right, faster or not."""
    from fxopt import registry
    from fxopt.plan import PassUse, PlanStore

    store, known = PlanStore(root), registry.discover()
    for row in store.list():
        plan = store.load(row.key)
        right = [c for c in (plan.reports if plan else []) if c["verdict"] and c["verdict"]["ok"]]
        if plan is None or not right:
            continue
        best = max(right, key=lambda candidate: len(candidate["passes"]))
        uses = [PassUse(name=n, options=best["options"][n], stage=known[n].stage.value) for n in best["passes"]]
        store.save(plan.model_copy(update={"decision": "candidate", "passes": uses}))


def _brief(graph: Any) -> dict[str, Any]:
    """What fxopt did with a graph."""
    right = [c.passes for c in graph.candidates if c.verdict is not None and c.verdict.ok]
    return {
        "key": graph.key,
        "source": graph.source,
        "decision": graph.decision,
        "passes": graph.passes,
        "tried": len(graph.candidates),
        "right": right,
        "wrong": [f"{c.name}: {c.reason}" for c in graph.candidates if c.reason.startswith("wrong")],
        "failed": [f"{c.name}: {c.reason}" for c in graph.candidates if c.outcome == "failed"],
        "messages": graph.messages,
        "seconds": {name: round(spent, 2) for name, spent in graph.seconds.items()},
    }


# ---------------------------------------------------------------- all of them


@app.command("list")
def list_models() -> None:
    """What is in the zoo."""
    from zoo_models import MODELS

    for name, model in MODELS.items():
        print(f"{name:24} {', '.join(model.under):24} {model.about}")


@app.command()
def one(name: str, out: Path = typer.Option(..., help="a file for the row"), plans: Path = typer.Option(...)) -> None:
    """Check one model in this process."""
    row = check(name, plans)
    out.write_text(json.dumps(row), encoding="utf-8")


def in_process(name: str, plans: Path, deadline: float) -> dict[str, Any]:
    """The row of one model, checked in a process of its own; one that crashes or hangs is a row that says so."""
    out = plans / f"{name}.json"
    plans.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "one", name, "--out", str(out), "--plans", str(plans / name)]
    started = time.perf_counter()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | ONE_THREAD,
        start_new_session=True,
    )
    try:
        told, _ = child.communicate(timeout=deadline)
        status, why = "failed", f"exit code {child.returncode}: {told[-2000:]}"
    except subprocess.TimeoutExpired:
        status, why = "timeout", f"not done after {deadline:g} s"
    finally:
        # Inductor's compile workers are of the same group.
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    if status == "failed" and child.returncode == 0 and out.exists():
        return dict(json.loads(out.read_text(encoding="utf-8")))
    seconds = round(time.perf_counter() - started, 1)
    return {"name": name, "about": "", "status": status, "why": why, "runs": [], "seconds": seconds}


@app.command()
def run(
    names: list[str] = typer.Argument(None, help="models; all if none is given"),
    json_file: Path = typer.Option(RESULT, "--json", help="the result, which is added to"),
    deadline: float = typer.Option(1200.0, help="seconds that one model may take"),
    jobs: int = typer.Option(1, help="models at a time"),
    again: bool = typer.Option(False, help="also those that are in the result already"),
) -> None:
    """Check models, one process each, and write the result after each of them."""
    import torch
    from zoo_models import MODELS

    from case_studies.show import write_json
    from profiler_core.environment import environment

    unknown = sorted(set(names or ()) - set(MODELS))
    if unknown:
        raise typer.BadParameter(f"no model is named {', '.join(unknown)}; `list` shows them")
    rows: dict[str, Any] = {}
    if json_file.exists():
        rows = {row["name"]: row for row in json.loads(json_file.read_text(encoding="utf-8"))["rows"]}
    wanted = [name for name in names or MODELS if again or name not in rows]
    with tempfile.TemporaryDirectory(prefix="fxopt-zoo-") as folder, ThreadPoolExecutor(jobs) as pool:
        begun = [pool.submit(in_process, name, Path(folder), deadline) for name in wanted]
        for number, future in enumerate(as_completed(begun), 1):
            row = future.result()
            rows[row["name"]] = labelled(row)
            ordered = [rows[name] for name in MODELS if name in rows]
            write_json(
                json_file,
                {
                    "command": "python tools/zoo.py run",
                    "case": "zoo",
                    "environment": environment(torch.device("cpu")),
                    "options": QUICK,
                    "variables": ONE_THREAD,
                    "models": len(ordered),
                    "summary": {status: sum(row["status"] == status for row in ordered) for status in STATUSES},
                    "rows": ordered,
                },
            )
            print(f"{number} of {len(wanted)}: {line(rows[row['name']])}", flush=True)
    if any(STATUSES.index(row["status"]) > STATUSES.index("explained") for row in rows.values()):
        raise typer.Exit(1)


def labelled(row: dict[str, Any]) -> dict[str, Any]:
    """The row with what the zoo knows of its model: what it is, and why plain Inductor differs from eager."""
    from zoo_models import MODELS

    model = MODELS[row["name"]]
    return {**row, "about": model.about, "reason": model.reason if row["status"] == "explained" else ""}


def line(row: dict[str, Any]) -> str:
    """A row in one line."""
    graphs = [graph for one_run in row["runs"] for graph in one_run["graphs"]]
    right = sum(len(graph["right"]) for graph in graphs)
    planned = sum(graph["source"] == "plan" and graph["decision"] == "candidate" for graph in graphs)
    why = dict.fromkeys(d["why"] or f"{d['name']}: {d['what']}" for r in row["runs"] for d in r["differences"])
    notes = [
        *why,
        *filter(None, [row.get("reason")]),
        *dict.fromkeys(w for r in row["runs"] for w in r["warnings"]),
        *filter(None, [row.get("why")]),
    ]
    text = (
        f"{row['name']:24} {row['status']:10} {len(graphs):3} graphs, {right:3} candidates right, {planned:2} applied"
    )
    return f"{text}, {row['seconds']:5.0f} s" + "".join(f"\n    {note[-300:]}" for note in notes[:6])


@app.command()
def show(json_file: Path = typer.Option(RESULT, "--json", help="the result of a run")) -> None:
    """The table of a result."""
    data = json.loads(json_file.read_text(encoding="utf-8"))
    for row in data["rows"]:
        print(line(row))
    print(", ".join(f"{count} {status}" for status, count in data["summary"].items()))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    app()
