"""What the commands share that run programs or show reports: where output goes, and how it is asked for."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxopt.cli_output import CliError

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
stdout_is_taken = False  # whether a program ran whose output must not be mixed with the result on stdout


@dataclass(frozen=True)
class Wanted:
    """The forms of the result that were asked for; without any, the terminal's."""

    html: Annotated[
        Path | None, typer.Option("--html", help="Write one self-contained HTML page.", metavar="OUT")
    ] = None
    save: Path | None = None
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no report on the terminal.")] = False

    def check(self) -> None:
        """Before anything runs. Raises CliError for files that cannot be written, and for two forms at once."""
        if self.markdown and self.as_json:
            raise CliError("--json and --markdown both print on stdout: give one of them")
        if self.html is not None and self.save is not None and self.html.absolute() == self.save.absolute():
            raise CliError(f"--html and --save both write {self.html}: give each a file of its own")
        for name, path in (("--html", self.html), ("--save", self.save)):
            if path is not None:
                check_file(name, path)

    @property
    def to_stdout(self) -> bool:
        """Whether stdout belongs to a program that reads the result."""
        return self.as_json or self.markdown

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        if not self.quiet:
            print(f"fxopt: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Savable(Wanted):
    """The same of a command whose result can be saved."""

    save: Annotated[
        Path | None, typer.Option("--save", help="Write it as JSON, which `fxopt report` shows again.", metavar="OUT")
    ] = None


def check_file(name: str, path: Path) -> None:
    """Raises CliError for a file that cannot be written; `name` is what names it on the command line."""
    from profiler_core.files import why_not_written

    if os.path.isdir(path):
        raise CliError(f"{name} {path}: this is a folder; give the name of a file in it")
    if not os.path.isdir(path.absolute().parent):
        raise CliError(f"{name} {path}: there is no folder {path.absolute().parent}; make it first")
    if why := why_not_written(path):
        raise CliError(f"{name} {path} cannot be written: {why}; give another place")


def check_folder(name: str, path: Path) -> None:
    """The same of a folder for files, which is made where it is missing."""
    from profiler_core.files import why_no_folder

    if why := why_no_folder(path):
        raise CliError(f"{name} {path}: no file can be made there: {why}; give another place")


def warn(text: str) -> None:
    print(f"fxopt: warning: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def busy(wanted: Wanted, text: str) -> Iterator[None]:
    """Says what takes a while: with a sign of life on a terminal, as one line elsewhere."""
    if wanted.quiet:
        yield
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(f"fxopt: {text}"):
            yield
    else:
        wanted.say(text)
        yield


def console() -> Console:
    """For stdout: as wide as the terminal, 80 columns elsewhere, and no control codes where no terminal reads."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console()
    return Console(file=sys.stdout, width=WIDTH, color_system=None, force_terminal=False)


def present(subject: Any, wanted: Wanted, **known: Any) -> None:
    """A Report, a Profile or a Diff in the forms that were asked for. Files are written whole or not at all.

    ``known`` goes to the page of a bare profile: its ceilings.
    """
    with files_of(subject, wanted, **known):
        if wanted.as_json:
            print(json.dumps(subject.to_json(), allow_nan=False))
        elif wanted.markdown:
            from fxopt.report import markdown

            print(markdown.render(subject))
        elif not wanted.quiet:
            _terminal(subject)


@contextlib.contextmanager
def files_of(subject: Any, wanted: Wanted, **known: Any) -> Iterator[None]:
    """Writes those of the forms that are files. Raises CliError where one could not be written, but only on leaving:
    what took minutes to measure is shown all the same.
    """
    failed = []
    for write, path in ((_write_saved, wanted.save), (_write_page, wanted.html)):
        if path is None:
            continue
        try:
            write(subject, path, wanted, **known)
        except OSError as error:
            failed.append(f"{path} cannot be written: {error.strerror or error}")
    yield
    if failed:
        raise CliError(f"{'; '.join(failed)}; give another place")


def _write_saved(subject: Any, path: Path, wanted: Wanted, **_known: Any) -> None:
    from profiler_core.profiles import Profile

    if isinstance(subject, Profile):
        subject.save(path)
    else:
        from fxopt.report import sources

        sources.write(subject, path)
    wanted.say(f"saved {path}; fxopt report {path} shows it again")


def _write_page(subject: Any, path: Path, wanted: Wanted, **known: Any) -> None:
    from fxopt.report import html

    html.write(subject, path, **known)
    wanted.say(f"wrote {path}: one page, readable without a network")


def _terminal(subject: Any) -> None:
    from fxopt.report import terminal
    from fxopt.report.model import Report
    from profiler_core.profiles import Profile

    if isinstance(subject, Report):
        terminal.render(subject, console())
    elif isinstance(subject, Profile):
        terminal.render_profile(subject, console())
    else:
        terminal.render_diff(subject, console())


@contextlib.contextmanager
def stdout_kept_for_the_result(wanted: Wanted) -> Iterator[None]:
    """Where the result goes to stdout, what a program prints meanwhile goes to stderr, its children's too."""
    global stdout_is_taken
    stdout_is_taken = wanted.to_stdout
    if not wanted.to_stdout:
        yield
        return
    sys.stdout.flush()
    kept = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stdout.fileno() == 1:
            kept = os.dup(1)
            os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def ceilings_here(profile: Any, wanted: Wanted) -> Any:
    """The ceilings of the device that a profile of this machine is of; measured now where none are kept, None where
    that fails.
    """
    import torch

    from fxopt.cli_rules import kept_ceilings
    from fxopt.options import resolve_options
    from profiler_core import roofline

    device = torch.device(str(profile.environment.get("device_type") or "cpu"))
    try:
        if roofline.kept_at(device, resolve_options({}).plan_root / "ceilings").exists():
            return kept_ceilings(device, False)[0]
        with busy(wanted, "measuring what this machine can reach, once; labels are drawn against it"):
            return roofline.ceilings(device, resolve_options({}).plan_root / "ceilings")
    except Exception as error:  # for the labels alone, some of which need none
        warn(f"what this machine can reach was not measured: {type(error).__name__}: {error}")
        return None


def program_command() -> Any:
    """The class of a command that runs a program: a wrong option is told how the program's own are given."""
    from typer.core import TyperCommand

    class ProgramCommand(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            given = list(args)
            try:
                return super().parse_args(ctx, args)
            except Exception as error:
                option = getattr(error, "option_name", None)
                if option is None or "--" in given or not hasattr(error, "message"):
                    raise
                place = next((i for i, word in enumerate(given) if word.split("=")[0] == option), len(given))
                line = " ".join(["fxopt", ctx.info_name or "", *given[:place], "--", *given[place:]])
                error.message += f". The program's own arguments come after --: {line}"
                raise

    return ProgramCommand


def option_values(given: Sequence[str], **direct: Any) -> dict[str, Any]:
    """fxopt's options from ``key=value`` texts and from those that have a flag of their own."""
    from fxopt.options import OptionError

    found = {name: value for name, value in direct.items() if value is not None}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionError(f"--option {text}: expected key=value, such as pairs=10; `fxopt options` lists them")
        found[name] = _literal(value)
    return found


def _literal(text: str) -> Any:
    """A number or a truth where the text is one: Inductor's options need the type."""
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        if isinstance(value, (int, float)):
            return value
    return {"True": True, "False": False}.get(text, text)


def shown_options(options: Mapping[str, Any]) -> str:
    """The options as Python spells them inside a call."""
    return "{" + ", ".join(f'"{name}": {spelt(value)}' for name, value in options.items()) + "}"


def spelt(value: Any) -> str:
    """A value as Python source, in this project's quotes."""
    return json.dumps(value) if isinstance(value, str) else repr(value)
