"""`fxopt load`, `report`, `explain` and `diff`: what files hold, for reading and for passing on."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fxopt.cli_output import CliError
from fxopt.cli_parameters import grouped
from fxopt.cli_show import Savable, Wanted, busy, console, present

if TYPE_CHECKING:
    from fxopt.report.model import Report
    from profiler_core.profiles import Profile


def add_commands(app: typer.Typer) -> None:
    @app.command("load", short_help="A profile from files of torch.profiler, nsys and ncu.")
    @grouped
    def load_(
        files: list[Path] = typer.Argument(..., help="Files of one workload, in any order.", metavar="FILES"),
        calls: int | None = typer.Option(
            None, "--calls", help="How many calls the trace holds, where it does not mark them.", metavar="N"
        ),
        chip: str | None = typer.Option(
            None, "--chip", help="The GPU, such as GH100, for counters without a trace that names it.", metavar="CHIP"
        ),
        *,
        wanted: Savable,
    ) -> None:
        """A profile from files that other tools wrote: torch.profiler, nsys, ncu, Inductor's log, saved profiles.

        Give everything that belongs to one workload: a trace for the times, ncu's counters and a TORCH_TRACE log for
        the FX nodes if there are such. What a file is, its contents say.

        Example: fxopt load trace.json.gz

        Example: fxopt load report.sqlite counters.csv torch_trace.log --html page.html

        Next: fxopt explain NODE FILE. docs/profiling.md says which files and versions are read.
        """
        wanted.check()
        profile = loaded(files, wanted, calls, chip)
        present(profile, wanted)

    @app.command("report", short_help="Show a report or a profile that was written earlier.")
    @grouped
    def report(
        file: Path = typer.Argument(..., help="A report, a saved profile, a plan, or a trace.", metavar="FILE"),
        *,
        wanted: Wanted,
    ) -> None:
        """Shows a report or a profile that was written earlier: on the terminal, as a page, as Markdown.

        Reports are written by `fxopt optimize --save` and `fxopt bench --save`, and by the option `report` of the
        backend; profiles by `--save` of `profile` and `load`.

        Example: fxopt report run.json --html run.html

        Next: fxopt explain NODE FILE, for all that is known of one node.
        """
        wanted.check()
        present(read(file), wanted)

    @app.command("explain", short_help="All that is known of one node.")
    def explain(
        node: str = typer.Argument(..., help="A node as the report names it, such as addmm_1.", metavar="NODE"),
        file: Path | None = typer.Argument(
            None, help="A report or a saved profile; else the one saved last in this folder.", metavar="FILE"
        ),
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    ) -> None:
        """All that is known of one node: source line, module, kernels, counters, labels and what passes did about it.

        Example: fxopt explain addmm_1 run.json

        A node outside of compiled graphs is named by operator, module and line: 'aten::linear@encoder.0.up:12'. Quote
        it. A name that is not there is answered with the nearest ones.

        Next: docs/labels.md on what each label means, and fxopt passes show NAME on a pass.
        """
        subject = read(file or _latest())
        from fxopt.report import explain as explaining

        try:
            found = explaining.explain(subject, node)
        except explaining.UnknownNode as error:
            raise CliError(str(error.args[0] if error.args else error)) from None
        if as_json:
            print(json.dumps(found.to_json(), allow_nan=False))
            return
        from fxopt.report import terminal

        terminal.render_explanation(found, console())

    @app.command("diff", short_help="What changed between two profiles or reports.")
    @grouped
    def diff(
        before: Path = typer.Argument(..., help="A report, a saved profile or a trace.", metavar="BEFORE"),
        after: Path = typer.Argument(..., help="The other one.", metavar="AFTER"),
        *,
        wanted: Wanted,
    ) -> None:
        """What changed between two profiles or reports: time of nodes, groups and kernels; labels gone and new.

        Compare like with like: the same inputs and device, and a machine that was as busy. What differs in the
        environment is listed.

        Example: fxopt diff before.json after.json --markdown

        Next: fxopt bench, which times eager, Inductor and fxopt in turns, each ratio with an interval.
        """
        wanted.check()
        from fxopt.report.diff import diff as compare

        present(compare(read(before), read(after)), wanted)


def loaded(files: list[Path], wanted: Wanted, calls: int | None = None, chip: str | None = None) -> Profile:
    """Raises CliError with what the reader says: file, place and remedy."""
    import profiler_core

    try:
        with busy(wanted, f"reading {', '.join(path.name for path in files)}"):
            return profiler_core.load(*files, calls=calls, chip=chip)
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from None


def read(file: Path) -> Report | Profile:
    """A report, a profile or a plan; of another tool's trace, a profile. Raises CliError."""
    import profiler_core
    from fxopt.report import sources

    try:
        return sources.read(file)
    except (ValueError, OSError) as error:
        with suppress(ValueError, OSError):
            return profiler_core.load(file)
        raise CliError(str(error)) from None


def _latest() -> Path:
    """The newest report or profile in the current folder."""
    found = [path for path in Path.cwd().glob("*.json") if _is_report(path)]
    if not found:
        raise CliError(
            "no FILE was given, and no report or profile lies in this folder: fxopt profile SCRIPT --save profile.json "
            "writes one"
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def _is_report(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b'"schema_version"' in file.read(200)
    except OSError:
        return False
