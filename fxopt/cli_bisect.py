"""`fxopt bisect COMMAND`: the first rewrite with which a command fails, in the manner of git bisect run.

Two processes make the same rewrites in the same order only if they have decided alike. So the first run decides, with
a plan store of its own, and the others follow its plans.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fxopt.cli_output import CliError, taught

if TYPE_CHECKING:
    import typer

    from fxopt.bisect import Rewrite

CANNOT_TELL = 125  # as for git bisect run


def add_commands(app: typer.Typer) -> None:
    import typer

    @app.command(
        "bisect",
        help=taught(
            "Finds the first rewrite that makes a command fail. It fails if it exits with anything but 0; with 125 it "
            "cannot tell.\n\nFor a model that is wrong or crashes with fxopt and not without. The command runs several "
            "times: first to decide, then with fewer and fewer rewrites.",
            "fxopt bisect -- python test_model.py",
            then="FXOPT_DISABLE=PASS runs without the pass that it names; docs/troubleshooting.md has more.",
        ),
        short_help="The first rewrite that makes a command fail.",
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    def bisect(
        command: list[str] = typer.Argument(
            ..., help="A command and its arguments, after -- if in doubt.", metavar="COMMAND"
        ),
        log: Path | None = typer.Option(None, "--log", help="Where the list of all rewrites is kept.", metavar="FILE"),
    ) -> None:
        with tempfile.TemporaryDirectory(prefix="fxopt-bisect-") as folder:
            run_bisect(command, Path(folder), log)


@dataclass
class Runner:
    """Runs the command under a limit, and prints what came of it.

    The command's own output goes to stderr, so that stdout holds the search alone.
    """

    command: Sequence[str]
    folder: Path
    environment: dict[str, str]

    def __call__(self, what: str, limit: int | None, log: Path | None = None) -> bool | None:
        """Whether the command fails with the first `limit` rewrites (None: all of them); None: it cannot tell."""
        environment = dict(self.environment)
        if limit is not None:
            environment["FXOPT_BISECT"] = str(limit)
        if log is not None:
            log.unlink(missing_ok=True)
            environment["FXOPT_BISECT_LOG"] = str(log)
        print(f"{what}: ", end="", flush=True)
        started = time.monotonic()
        try:
            code = subprocess.run(self.command, env=environment, stdout=2, check=False).returncode
        except OSError as error:
            print("not run")
            raise CliError(f"{self.command[0]} cannot be run: {error.strerror}") from None
        seconds = time.monotonic() - started
        told = "cannot tell" if code == CANNOT_TELL else "fails" if code else "succeeds"
        print(f"{told} (exit code {code}, {seconds:.1f} s)", flush=True)
        return None if code == CANNOT_TELL else code != 0


def run_bisect(command: Sequence[str], folder: Path, log: Path | None) -> None:
    """The whole search; prints each step and the result. Raises CliError where there is nothing to find."""
    if log is not None:
        try:  # said before the command runs for nothing
            log.open("a").close()
        except OSError as error:
            raise CliError(f"--log {log} cannot be written: {error.strerror}") from None
    environment = base_environment(os.environ, folder / "plans")
    decide = Runner(command, folder, environment)
    if decide("every rewrite, as decided now", None) is not True:
        raise CliError("the command does not fail with every rewrite: there is nothing to find")
    # From here on plans are followed, and a graph without one is left to Inductor.
    run = Runner(command, folder, following(environment))
    listed = folder / "rewrites.tsv"
    failed = run("every rewrite, as planned", None, listed)
    rewrites = listed_rewrites(listed)
    if log is not None and listed.exists():
        log.write_bytes(listed.read_bytes())
    if failed is not True:
        raise CliError(
            "the command fails only in the run that tunes, and not in one that follows its plans: "
            "FXOPT_VERBOSE=1 says how far tuning comes, FXOPT_DUMP=DIR keeps the graphs of every candidate"
        )
    if run("no rewrite", 0) is not False:
        raise CliError("the command fails without any rewrite, too: not fxopt's doing")
    if not rewrites:
        raise CliError("the command fails, and then again does not, although fxopt rewrote nothing")

    def fails(limit: int) -> bool | None:
        return run(f"the first {limit} of {len(rewrites)} rewrites", limit)

    good, bad = first_failing(len(rewrites), fails)
    report(rewrites, good, bad, command, environment)


def listed_rewrites(log: Path) -> list[Rewrite]:
    """The rewrites of the one process that lists them. Raises CliError where several did."""
    from fxopt.bisect import read_log

    try:
        rewrites = read_log(log) if log.exists() else []
    except ValueError as error:
        raise CliError(str(error)) from None
    if [rewrite.number for rewrite in rewrites] != list(range(1, len(rewrites) + 1)):
        raise CliError("several processes of the command make rewrites: give a command in which one does")
    return rewrites


def base_environment(environ: Mapping[str, str], plans: Path) -> dict[str, str]:
    """The command's environment: the user's, a plan store where they have chosen none, and no limit of their own."""
    environment = {name: value for name, value in environ.items() if name not in ("FXOPT_BISECT", "FXOPT_BISECT_LOG")}
    if not environment.get("FXOPT_PLAN_DIR", "").strip():
        environment["FXOPT_PLAN_DIR"] = str(plans)
    return environment


def following(environment: Mapping[str, str]) -> dict[str, str]:
    """The same, where plans are followed and nothing is measured; a mode of Inductor's is part of a plan, and stays."""
    mode = environment.get("FXOPT_MODE", "").strip().lower()
    return {**environment, "FXOPT_MODE": "apply"} if mode in ("", "tune") else dict(environment)


def first_failing(count: int, fails: Callable[[int], bool | None]) -> tuple[int, int]:
    """(good, bad): with the first `good` rewrites the command succeeds, with the first `bad` it fails.

    fails(n) is asked for 0 < n < count only: 0 is known to be good, `count` to be bad. None means that n tells
    nothing, and a neighbour is asked. bad is good + 1 unless all between them tell nothing.
    """
    good, bad = 0, count
    untold: set[int] = set()
    while open_ := [n for n in range(good + 1, bad) if n not in untold]:
        middle = min(open_, key=lambda n: abs(2 * n - good - bad))
        failed = fails(middle)
        if failed is None:
            untold.add(middle)
        elif failed:
            bad = middle
        else:
            good = middle
    return good, bad


def report(
    rewrites: Sequence[Rewrite], good: int, bad: int, command: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Print the rewrite that was found, or those among which it is, and what can be done about it."""
    suspects = rewrites[good:bad]
    if len(suspects) == 1:
        print(f"the command fails from rewrite {bad} on:")
    else:
        print(f"the command fails from one of the rewrites {good + 1} to {bad} on; those between told nothing:")
    for rewrite in suspects:
        print(f"  {rewrite.number}  {rewrite.pass_name} at {rewrite.target} in graph {rewrite.graph}")
    words = shlex.join(command)
    disabled = [name for name in environment.get("FXOPT_DISABLE", "").split(",") if name.strip()]
    names = ",".join(dict.fromkeys([*disabled, *(rewrite.pass_name for rewrite in suspects)]))
    print(f"without it:               FXOPT_DISABLE={shlex.quote(names)} {words}")
    print(f"graphs before and after:  FXOPT_DUMP=dumps {words}")
