"""All workloads against everything a user could pick instead, in one command.

    python -m case_studies.compare [WORKLOAD ...] [--device cuda] [--json results/h200/comparison.json]   (--help)

One process a workload, with all its columns inside, so that they are timed in turns. Beside the JSON, a list of rows,
lie comparison_environment.json and a folder comparison_evidence with fxopt's reports, a file a workload.
`python -m case_studies.tables` makes the tables from them.
"""

from __future__ import annotations

import hashlib
import json as json_format
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from case_studies import columns, show
from case_studies.comparison import LATE, How, compare_workload, tune_column
from case_studies.workloads import COMPARED
from profiler_core.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("fxopt", "passes", "profiler_core")
"""Packages whose code a row depends on, besides this study's own files."""
OWN = ("workloads", "gpt2", "runner", "columns", "comparison", "floor")
Row = dict[str, Any]


# ---- what was measured at which commit ----


def source(commit: str = "") -> dict[str, str]:
    """commit: the one given, else of the repository, "+changes" where the measured code differs from it, "unknown"
    without git. tree: a digest of the measured code.
    """
    files = [path for package in MEASURED for path in sorted((ROOT / package).rglob("*.py"))]
    files += [ROOT / "case_studies" / f"{name}.py" for name in OWN]
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    if not commit and (commit := _git("rev-parse", "HEAD")):
        commit += "+changes" if _git("status", "--porcelain", "--", *(str(path) for path in files)) else ""
    return {"commit": commit or "unknown", "tree": digest.hexdigest()[:16]}


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@dataclass
class Store:
    """The files of one comparison; written after each workload, so that what is done is not lost."""

    path: Path
    stamp: Row

    def __post_init__(self) -> None:
        self.rows: list[Row] = json_format.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else []
        self._lock = threading.Lock()

    def evidence(self, workload: str) -> Path:
        return self.path.parent / f"{self.path.stem}_evidence" / f"{workload}.json"

    def finished(self, workload: str, wanted: Iterable[tuple[str, str]]) -> bool:
        """Whether all its rows are there, of this commit, and there was time for each."""
        mine = [row for row in self.rows if row["workload"] == workload and row["status"] != LATE]
        same = (row for row in mine if self.stamp.items() <= row.items())
        return self.evidence(workload).exists() and set(wanted) <= {(row["precision"], row["column"]) for row in same}

    def put(self, workload: str, rows: Sequence[Row], evidence: Row | None) -> None:
        """Replace a workload's rows. Without evidence its process did not end well."""
        with self._lock:
            date = show.now()
            stamped = [{**row, **self.stamp, "date": date} for row in rows]
            self.rows = [row for row in self.rows if row["workload"] != workload] + stamped
            order = list(COMPARED)
            self.rows.sort(key=lambda row: order.index(row["workload"]) if row["workload"] in order else len(order))
            path = self.evidence(workload)
            if evidence is None:
                path.unlink(missing_ok=True)
            else:
                show.write_json(path, {**evidence, **self.stamp})
            write_rows(self.path, self.rows)
            self._write_environment()

    def _write_environment(self) -> None:
        found: dict[str, Row] = {}
        for workload in dict.fromkeys(row["workload"] for row in self.rows):
            path = self.evidence(workload)
            if path.exists():
                found[workload] = json_format.loads(path.read_text(encoding="utf-8"))
        clocks = [one["clocks"] for one in found.values() if one["clocks"].get("samples")]
        keep = (
            "what",
            "input_sets",
            "environment",
            "clocks",
            "seconds",
            "total_seconds",
            "work",
            "commit",
            "tree",
            "date",
        )
        document = {
            "command": show.command_line("case_studies.compare"),
            **self.stamp,
            "environment": next(iter(found.values()))["environment"] if found else None,
            "sm_mhz_min": min((one["sm_mhz_min"] for one in clocks), default=None),
            "sm_mhz_max": max((one["sm_mhz_max"] for one in clocks), default=None),
            "workloads": {name: {key: one.get(key) for key in keep} for name, one in found.items()},
        }
        show.write_json(self.path.parent / f"{self.path.stem}_environment.json", document)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """A JSON list with a row a line. Replaced as a whole: a run that is stopped leaves the old file or the new one."""
    text = "[\n" + ",\n".join(json_format.dumps(row, allow_nan=False) for row in rows) + "\n]\n"
    write_atomically(path, text)


# ---- one process a workload ----


def run_worker(job_file: Path) -> None:
    """In the workload's own process: measure, and leave the result beside the job."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    job = json_format.loads(job_file.read_text(encoding="utf-8"))
    wanted = [(precision, column) for precision, column in job["wanted"]]
    workload, how, plan_dir = job["workload"], How(**job["how"]), Path(job["plan_dir"])
    if job["tune"]:
        result = tune_column(workload, wanted[0], how, plan_dir)
    else:
        rows, evidence = compare_workload(workload, wanted, how, plan_dir)
        result = {"rows": rows, "evidence": evidence}
    show.write_json(job_file.with_suffix(".result"), result)


def _end_with_parent(parent: int) -> None:
    """Where the command was killed, its workloads must not go on using the device."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def in_process(
    workload: str,
    wanted: Sequence[tuple[str, str]],
    how: How,
    plan_dir: Path,
    gpu: str | None,
    *,
    tune: bool = False,
    limit: float,
) -> tuple[Row | None, str]:
    """What `run_worker` finds in a process of its own, or why there is nothing: it died, or took `limit` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        asked = {"workload": workload, "wanted": list(wanted), "how": asdict(how), "plan_dir": str(plan_dir)}
        job.write_text(json_format.dumps({**asked, "tune": tune}), encoding="utf-8")
        environ = {"KINETO_LOG_LEVEL": "99", **os.environ}
        if gpu is not None:
            environ["CUDA_VISIBLE_DEVICES"] = gpu
        command = [sys.executable, "-m", "case_studies.compare", "--worker", str(job)]
        # In a session of its own, so that compile workers end with it.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        lines: list[str] = []
        reader = threading.Thread(target=_pass_on, args=(process.stderr, lines), daemon=True)
        reader.start()
        try:
            code = process.wait(limit)
            why = f"its process ended with exit code {code}: {lines[-1] if lines else ''}"
        except subprocess.TimeoutExpired:
            why = f"its process did not end within {limit:.0f} s"
        finally:
            _end(process)
            reader.join(5)
        result = job.with_suffix(".result")
        if result.exists():
            return json_format.loads(result.read_text(encoding="utf-8")), ""
    return None, why


def run_workload(
    workload: str, wanted: Sequence[tuple[str, str]], how: How, plan_dir: Path, gpu: str | None
) -> tuple[list[Row], Row | None]:
    """Rows and evidence from a process of its own; where that dies or hangs, rows that say so and no evidence."""
    found, why = in_process(workload, wanted, how, plan_dir, gpu, limit=1.5 * how.time_limit + 60)
    if found is not None:
        return found["rows"], found["evidence"]
    print(f"{workload}: {why}", file=sys.stderr, flush=True)
    empty = {"workload": workload, "status": "failed", "why": why[:300], "kernel_us": None, "wall_us": None}
    empty |= {"kernel_interval": None, "wall_interval": None, "rel_l2_error": None}
    return [{**empty, "precision": precision, "column": column} for precision, column in wanted], None


def tune(
    workloads: Sequence[str],
    wanted: Sequence[tuple[str, str]],
    how: How,
    plan_dir: Path,
    gpus: Sequence[str],
    *,
    jobs: int,
    stamp: Row,
    resume: bool,
) -> dict[str, Row]:
    """Tunes fxopt's columns of all workloads into the plan store, `jobs` at a time: they compile beside each other, and
    take turns to measure. What a run finds is the same as in the workload's own process, which then applies the plans.

    Their reports, by workload and column: of the run that tuned, which is kept beside the plans, for one that finds a
    plan tries nothing. A column whose process ends badly has none, and is tuned later. With `resume` what was tuned of
    the same code in the same way is not tuned again.
    """
    tuned: dict[str, Row] = {name: {} for name in workloads}
    free = _places(jobs, gpus)
    limit = 3 * how.tuning_limit + 120
    ablated = {(precision, columns.fxopt_name(columns.DEFAULT_OBJECTIVE)) for precision in how.ablated}

    def one(workload: str, column: tuple[str, str]) -> None:
        name = f"{column[1]} {column[0]}"
        kept = plan_dir / "tuned" / f"{workload} {name}.json"
        asked: Row = {**stamp, "device": how.device, "tuning_limit": how.tuning_limit, "ablated": column in ablated}
        before = json_format.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
        if resume and before is not None and before.get("asked") == asked:
            tuned[workload][name] = before
            return
        gpu = free.get()
        try:
            found, why = in_process(workload, [column], how, plan_dir, gpu, tune=True, limit=limit)
        finally:
            free.put(gpu)
        if found is None:
            print(f"{workload}, {name}: not tuned, {why}", file=sys.stderr, flush=True)
            return
        if before is not None and all(graph["source"] == "plan" for graph in found["report"]["graphs"]):
            found = before
        else:
            found["asked"] = asked
            show.write_json(kept, found)
        tuned[workload][name] = found

    # Those that are ablated take longest. The workloads in turns, for some compile most of the time and some measure.
    ours = [column for column in wanted if column[1].startswith("fxopt")]
    ours.sort(key=lambda column: column not in ablated)
    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(one, name, column) for column in ours for name in workloads]:
            done.result()
    return tuned


def _places(jobs: int, gpus: Sequence[str]) -> queue.Queue[str | None]:
    """A GPU for each of `jobs` processes at once, or None where there is none."""
    free: queue.Queue[str | None] = queue.Queue()
    for number in range(jobs):
        free.put(gpus[number % len(gpus)] if gpus else None)
    return free


def _pass_on(stream: Any, lines: list[str]) -> None:
    """The process's stderr to ours; the last lines are kept, for the row of one that dies."""
    for line in stream:
        sys.stderr.write(line)
        sys.stderr.flush()
        if line.strip():
            lines[:] = [*lines[-4:], line.strip()]


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def visible_gpus() -> list[str]:
    """Their names for CUDA_VISIBLE_DEVICES."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    count = torch.cuda.device_count()
    return [name.strip() for name in given.split(",")][:count] if given else [str(i) for i in range(count)]


def compare(
    workloads: Sequence[str],
    wanted: Sequence[tuple[str, str]],
    how: How,
    store: Store,
    *,
    jobs: int,
    gpus: Sequence[str],
    resume: bool,
    plan_dir: Path,
    tune_jobs: int = 0,
) -> None:
    """Measure those workloads that `resume` does not find finished, in `jobs` processes at a time. More than there are
    GPUs share them: they compile beside each other, and take turns to measure.

    tune_jobs: tune the columns of all of them before the first is measured, so many at a time (0: in the workload's own
    process, one after the other). With one job a workload is then measured while nothing else runs.
    """
    left = [name for name in workloads if not (resume and store.finished(name, wanted))]
    for name in workloads:
        if name not in left:
            print(f"{name}: finished at this commit", file=sys.stderr, flush=True)
    left.sort(key=lambda name: not name.startswith("gpt2"))  # what takes longest goes first
    tuned: dict[str, Row] = {}
    if tune_jobs:
        tuned = tune(left, wanted, how, plan_dir, gpus, jobs=tune_jobs, stamp=store.stamp, resume=resume)
    free = _places(jobs, gpus)

    def one(name: str) -> None:
        gpu = free.get()
        try:
            rows, evidence = run_workload(name, wanted, how, plan_dir, gpu)
        finally:
            free.put(gpu)
        if evidence is not None and tuned.get(name):
            evidence["tuned"] = tuned[name]
        store.put(name, rows, evidence)

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(one, name) for name in left]:
            done.result()


def main() -> None:
    import typer

    def run(
        workloads: list[str] = typer.Argument(None, help="By default all."),
        device: str = typer.Option("", help="cuda or cpu; by default a GPU where there is one."),
        precisions: str = typer.Option("fp32,1.5e-5,tf32,bf16", help="fxopt's classes or error budgets, with commas."),
        objectives: str = typer.Option("kernel,wall", help="fxopt's objectives, with commas."),
        json: Path = typer.Option(None, help="The list of rows. Rows of other workloads in it are kept."),
        jobs: int = typer.Option(1, min=1, help="Processes at once; on one GPU they take turns to measure."),
        tune_jobs: int = typer.Option(
            0, min=0, help="Tune all columns before the first workload is measured, so many processes at once."
        ),
        resume: bool = typer.Option(False, "--resume", help="Leave workloads alone that are finished at this commit."),
        columns_: str = typer.Option(
            "", "--columns", help="Only these columns, with commas; -NAME leaves one out, NAME@PRECISION is one row."
        ),
        time_limit: float = typer.Option(300.0, help="Seconds for a workload."),
        column_limit: float = typer.Option(120.0, help="Seconds for building one column."),
        tuning_limit: float = typer.Option(60.0, help="fxopt's time limit, seconds."),
        ablate: str = typer.Option("fp32", help="Precisions whose kept passes are ablated, with commas."),
        rounds: int = typer.Option(15, min=6, help="Rounds of the wall-time comparison."),
        windows: int = typer.Option(6, min=1, help="Profiled windows; an interval needs 6."),
        iterations: int = typer.Option(3, min=1, help="Calls in a profiled window."),
        block_ms: float = typer.Option(10.0, min=0.01, help="Least duration of a timed block."),
        plan_dir: Path = typer.Option(None, help="Keep plans and ceilings here; by default tune anew."),
        commit: str = typer.Option("", help="The commit, where there is no repository to ask."),
        small: bool = typer.Option(False, help="The same structures, much smaller."),
        worker: Path = typer.Option(None, hidden=True),
    ) -> None:
        """Measure workloads under eager mode, Inductor's variants and fxopt, in turns, and write the rows."""
        if worker is not None:
            run_worker(worker)
            return
        import torch

        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        chosen = workloads or list(COMPARED)
        for unknown in (name for name in chosen if name not in COMPARED):
            raise typer.BadParameter(f"{unknown!r} is no workload; there are {', '.join(COMPARED)}")
        wanted = choose(precisions, objectives, columns_, typer.BadParameter)
        block_ns = block_ms * 1e6
        how = How(
            where, small, rounds, windows, iterations, block_ns, time_limit, column_limit, tuning_limit, ablate
        )
        stamp: Row = {**source(commit), "small": small}
        with tempfile.TemporaryDirectory() as temporary:
            store = Store(json or Path(temporary) / "rows" / "comparison.json", stamp)
            gpus = visible_gpus() if where == "cuda" else []
            compare(
                chosen,
                wanted,
                how,
                store,
                jobs=jobs,
                gpus=gpus,
                resume=resume,
                plan_dir=plan_dir or Path(temporary),
                tune_jobs=tune_jobs,
            )
            from case_studies import tables

            print(tables.markdown([row for row in store.rows if row["workload"] in chosen]))
        failed = [row for row in store.rows if row["workload"] in chosen and row["status"] == "failed"]
        for row in failed:
            print(f"{row['workload']}, {row['column']} {row['precision']}: {row['why']}", file=sys.stderr)
        print(time.strftime("%H:%M:%S finished"), file=sys.stderr)

    typer.run(run)


def choose(precisions: str, objectives: str, only: str, bad: Any) -> list[tuple[str, str]]:
    """(precision, column) of the rows asked for on the command line."""
    from fxopt.verify import parse_precision

    classes = [text.strip() for text in precisions.split(",") if text.strip()]
    for text in classes:
        try:
            parse_precision(text)
        except ValueError as error:
            raise bad(f"--precisions: {error}") from error
    goals = [text.strip() for text in objectives.split(",") if text.strip()]
    for text in goals:
        if text not in columns.OBJECTIVES:
            raise bad(f"--objectives: {text!r} is none of {', '.join(columns.OBJECTIVES)}")
    every = columns.names(classes, goals)
    named = [text.strip() for text in only.split(",") if text.strip()]
    known = {column for _, column in every} | {f"{column}@{precision}" for precision, column in every}
    for text in named:
        if text.removeprefix("-") not in known:
            raise bad(f"--columns: {text!r} is none of {', '.join(sorted(known))}")
    left_out = {text[1:] for text in named if text.startswith("-")}
    kept = {text for text in named if not text.startswith("-")}
    spelled = [((p, c), {c, f"{c}@{p}"}) for p, c in every]
    return [row for row, names in spelled if not names & left_out and (not kept or names & kept)]


if __name__ == "__main__":
    main()
