"""The `fxopt` command: profile, optimise and compare programs; read reports; passes, rules, plans and options.

Exit codes: 0 done, 1 it could not be done (the reason is on stderr), 2 the command line is wrong, 130 interrupted. A
program that fails passes its own on.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from fxopt.cli_output import CliError, Interrupted, pairs, rows, taught

if TYPE_CHECKING:
    import typer


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line (of this process, where none is given) and exits with its code."""
    from fxopt import cli_show

    code = run(sys.argv[1:] if arguments is None else arguments)
    if cli_show.stdout_is_taken:  # by a result for another program: what runs at exit must not add to it
        sys.stdout.flush()
        sys.stdout = sys.stderr
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs a command line; returns its exit code. Errors go to stderr, without a traceback."""
    from fxopt.options import OptionError
    from fxopt.plan import PlanStoreError

    try:
        result = _command()(list(arguments), prog_name="fxopt", standalone_mode=True)
    except SystemExit as exit_:
        if isinstance(exit_.__context__, BrokenPipeError):  # typer's exit 1: its reader has seen enough
            return 0
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except (CliError, PlanStoreError) as error:
        print(f"fxopt: error: {error}", file=sys.stderr)
        return error.code if isinstance(error, CliError) else 1
    except OptionError as error:  # a value on the command line, or in a variable that stands for one
        print(f"fxopt: error: {error}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as error:
        kept = str(error) or "files are written whole or not at all, and nothing temporary is left"
        print(f"fxopt: interrupted; {kept}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0


def _command() -> Any:
    """The application, for one command line. typer answers Ctrl-C by itself, each version in another way: what it does
    not know passes through.
    """
    import typer

    command = typer.main.get_command(build_app())
    invoke = command.invoke

    def guarded(context: Any) -> Any:
        try:
            return invoke(context)
        except KeyboardInterrupt:
            raise Interrupted from None

    command.invoke = guarded  # type: ignore[assignment]
    return command


def build_app() -> typer.Typer:
    """The application. typer is imported here, so that importing fxopt does not pay for it."""
    import typer

    from fxopt import cli_bisect, cli_doctor, cli_passes, cli_plans, cli_report, cli_rules, cli_run

    # Boxes and colours are for a person's terminal; a file or a pipe gets plain text.
    markup: Literal["rich"] | None = "rich" if sys.stdout.isatty() else None
    app = typer.Typer(
        name="fxopt",
        help="Why a PyTorch program is slow, and what can be done about it. Start with `fxopt doctor`, then "
        "`fxopt profile SCRIPT`.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=markup,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            pairs(_versions(), False)
            raise typer.Exit()

    @app.callback()
    def top(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="The versions of fxopt, torch and Python."
        ),
    ) -> None:
        pass

    cli_doctor.add_commands(app)
    cli_run.add_commands(app)
    cli_report.add_commands(app)
    app.add_typer(cli_passes.commands(markup), name="passes")
    app.add_typer(cli_plans.commands(markup), name="plans")
    cli_rules.add_commands(app)
    cli_bisect.add_commands(app)

    as_json_option = typer.Option(False, "--json", help="Print JSON.")

    @app.command(
        "version",
        help=taught(
            "The versions of fxopt, torch and Python.",
            "fxopt version --json",
            then="fxopt doctor, for the rest of the machine.",
        ),
        short_help="The versions of fxopt, torch and Python.",
    )
    def version(as_json: bool = as_json_option) -> None:
        pairs(_versions(), as_json)

    @app.command(
        "options",
        help=taught(
            "Every option: default, environment variable, meaning.\n\nThey are given to torch.compile as "
            "options={...}, to fxopt.optimize by name, and to `fxopt optimize` as -o key=value.",
            "fxopt options --json",
            then="docs/options.md",
        ),
        short_help="Every option: default, environment variable, meaning.",
    )
    def options(as_json: bool = as_json_option) -> None:
        from fxopt.options import describe_options

        rows([row._asdict() for row in describe_options()], as_json, "no options")

    for command in app.registered_commands:
        if command.help is None and command.callback is not None:
            # Lines of a docstring are as long as the source allows; a paragraph is as wide as the terminal.
            paragraphs = inspect.cleandoc(command.callback.__doc__ or "").split("\n\n")
            command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return app


def _versions() -> dict[str, str]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("fxopt", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "python": platform.python_version()}


if __name__ == "__main__":
    main()
