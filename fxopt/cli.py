"""The `fxopt` command: options, passes, rules, ceilings, plans, and the search for a rewrite that breaks something.

Exit codes: 0 done, 1 it could not be done (the reason is on stderr), 2 the command line is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fxopt.cli_output import CliError, pairs, rows

if TYPE_CHECKING:
    import typer


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line (of this process, where none is given) and exits with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Runs a command line; returns its exit code. Errors go to stderr, without a traceback."""
    from fxopt.options import OptionError
    from fxopt.plan import PlanStoreError

    try:
        result = build_app()(list(arguments), prog_name="fxopt", standalone_mode=True)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except (CliError, OptionError, PlanStoreError) as error:
        print(f"fxopt: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0


def build_app() -> typer.Typer:
    """The application. typer is imported here, so that importing fxopt does not pay for it."""
    import typer

    from fxopt import cli_bisect, cli_passes, cli_plans, cli_rules

    # Boxes and colours are for a person's terminal; a file or a pipe gets plain text.
    markup: Literal["rich"] | None = "rich" if sys.stdout.isatty() else None
    app = typer.Typer(
        name="fxopt",
        help="Profile-guided torch.compile: what it can do, and what it has decided.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=markup,
    )
    app.add_typer(cli_passes.commands(markup), name="passes")
    app.add_typer(cli_plans.commands(markup), name="plans")
    cli_rules.add_commands(app)
    cli_bisect.add_commands(app)

    as_json_option = typer.Option(False, "--json", help="Print JSON.")

    @app.command("version", help="The versions of fxopt, torch and Python.")
    def version(as_json: bool = as_json_option) -> None:
        pairs(_versions(), as_json)

    @app.command("options", help="Every option: default, environment variable, meaning.")
    def options(as_json: bool = as_json_option) -> None:
        from fxopt.options import describe_options

        rows([row._asdict() for row in describe_options()], as_json, "no options")

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
