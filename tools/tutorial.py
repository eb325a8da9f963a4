"""Follows docs/tutorial.md: writes its files, runs its commands, and checks what they print. With --json FILE it also
measures the model with and without the pass, in processes of their own, and keeps the reports.

    python tools/tutorial.py                                         # in a folder that is thrown away
    python tools/tutorial.py --folder DIR --json results/cpu/tutorial.json --runs 5

Comments in the page say what a block is: `<!-- file: NAME -->`, `<!-- run -->` (`<!-- run, fails -->` where the
command must fail, `<!-- run, long -->` where a quick look may leave it out), and `<!-- printed -->` after a command for
what it must print, three dots standing for anything.
Everything stays in the folder: pip installs into a part of it, without the network, and plans are kept there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
PASS = "gather_one_hot"
PACKAGE = "fxopt-gather-one-hot"

_BLOCK = re.compile(r"^<!-- (file|run|printed)(?:[:,] ([\w./-]+))? -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class TutorialError(Exception):
    """The page does not hold: the message has the line, and what happened instead."""


@dataclass(frozen=True)
class Step:
    """A marked block of the page: `kind` is file, run or printed, `detail` what follows it in the mark."""

    kind: str
    detail: str
    text: str
    line: int


def steps(page: Path = PAGE) -> list[Step]:
    """The marked blocks, in order."""
    text = page.read_text(encoding="utf-8")
    return [Step(m[1], m[2] or "", m[3], text.count("\n", 0, m.start(3)) + 1) for m in _BLOCK.finditer(text)]


def prints(block: str, output: str) -> bool:
    """Whether the lines of `block` follow one another in `output`, but for spaces at their ends."""
    lines = [re.escape(line.rstrip()).replace(r"\.\.\.", "[^\n]*") for line in block.rstrip("\n").split("\n")]
    return re.search("^" + "[ \t]*\n".join(lines) + "[ \t]*$", output, re.MULTILINE) is not None


def surroundings(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Variables under which `python`, `fxopt` and `pip install -e` mean this interpreter, this tree and `folder`."""
    commands = folder / ".bin"
    commands.mkdir(parents=True, exist_ok=True)
    site = folder / ".site"
    python = shlex.quote(sys.executable)
    # An editable installation needs an environment of its own; into a folder pip copies.
    pip = "install --quiet --disable-pip-version-check --no-deps --no-index --no-build-isolation"
    scripts = {
        "python": f'if [ "$1 $2 $3" = "-m pip install" ]; then\n'
        f'  exec {python} -m pip {pip} --target {shlex.quote(str(site))} "./$5"\nfi\nexec {python} "$@"',
        "fxopt": f'exec {python} -m fxopt.cli "$@"',
    }
    for name, script in scripts.items():
        path = commands / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FXOPT_")}
    return {
        **environment,
        "PATH": f"{commands}{os.pathsep}{environment.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "FXOPT_PLAN_DIR": str(folder / ".plans"),
        "COLUMNS": "100",
        **variables,
    }


def follow(
    folder: Path,
    variables: Mapping[str, str] | None = None,
    *,
    page: Path = PAGE,
    quick: bool = False,
    told: Callable[[str], None] = lambda line: None,
) -> Iterator[tuple[Step, str]]:
    """Take every step of `page` in `folder`; yields each with the output of the last command.

    variables: environment variables over those of this process. quick: leave out what is marked long. told: gets one
    line a step. Raises TutorialError.
    """
    environment = surroundings(folder, variables or {})
    output, skipped = "", False
    for step in steps(page):
        skipped = quick and (step.detail == "long" if step.kind == "run" else skipped and step.kind == "printed")
        if skipped:
            continue
        if step.kind == "file":
            told(f"line {step.line}: {step.detail}")
            path = folder / step.detail
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text, encoding="utf-8")
        elif step.kind == "run":
            told(f"line {step.line}: {step.text.strip()}")
            run = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", step.text],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            output = run.stdout
            if (run.returncode != 0) != (step.detail == "fails"):
                raise TutorialError(f"line {step.line}: exit code {run.returncode} of\n{step.text}\n{output}")
        elif not prints(step.text, output):
            raise TutorialError(f"line {step.line}: the page shows\n{step.text}\nand this was printed:\n{output}")
        yield step, output


def measure(folder: Path, runs: int, told: Callable[[str], None]) -> list[dict[str, Any]]:
    """The reports of `runs` tuning runs of the model with the pass, each in a process and with plans of its own."""
    reports = []
    for number in range(runs):
        report, plans = folder / f"measured-{number}.json", folder / f".plans-{number}"
        environment = surroundings(folder, {"FXOPT_PLAN_DIR": str(plans), "FXOPT_REPORT": str(report)})
        subprocess.run([sys.executable, "tune.py"], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        reports.append(json.loads(report.read_text(encoding="utf-8")))
        told(f"run {number + 1} of {runs}: {summary(reports[-1])}")
    return reports


def graph_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """The newest graph of a report, which is that graph itself where the option `report` wrote it."""
    return report.get("graphs", [report])[-1]


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """What one run says of the pass."""
    graph = graph_of(report)
    (trial,) = (candidate for candidate in graph["candidates"] if candidate["passes"] == [PASS])
    return {
        "outcome": trial["outcome"],
        "reason": trial["reason"],
        "ratio": graph["ratio"] or trial["paired"],
        "verdict": trial["verdict"],
        "baseline_kernel_ns": graph["baseline_kernel_ns"],
        "kernel_ns": trial["kernel_ns"],
        "seconds": graph["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, help="where the files go, and stay; else a folder that is thrown away")
    parser.add_argument("--json", type=Path, metavar="FILE", help="measure, and write this")
    parser.add_argument("--runs", type=int, default=5, help="processes that measure (default 5)")
    arguments = parser.parse_args()

    def told(line: str) -> None:
        print(line, flush=True)

    with tempfile.TemporaryDirectory(prefix="fxopt-tutorial-") as thrown_away:
        folder = (arguments.folder or Path(thrown_away)).resolve()
        try:
            for _ in follow(folder, told=told):
                pass
        except TutorialError as error:
            sys.exit(f"the tutorial does not hold: {error}")
        if arguments.json is None:
            return
        sys.path.insert(0, str(ROOT))
        import torch

        from profiler_core.environment import environment

        reports = measure(folder, arguments.runs, told)
        result = {
            "schema_version": 1,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": f"python tools/tutorial.py --json {arguments.json} --runs {arguments.runs}",
            "case": "tutorial",
            "environment": environment(torch.device("cpu")),
            "runs": [summary(report) for report in reports],
            "report": reports[0],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
