"""The `fxopt` command: options, passes, rules, ceilings, plans, and the search for a rewrite that breaks something.

Exit codes: 0 done, 1 it could not be done (the reason is on stderr), 2 the command line is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fxopt.cli_output import CliError, pairs, rows

if TYPE_CHECKING:
    import typer

    from fxopt.plan import PlanStore


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

    from fxopt import cli_bisect, cli_passes, cli_rules

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
    plans = typer.Typer(
        help="The decisions that are kept on disk.", no_args_is_help=True, rich_markup_mode=markup
    )
    app.add_typer(cli_passes.commands(markup), name="passes")
    app.add_typer(plans, name="plans")
    cli_rules.add_commands(app)
    cli_bisect.add_commands(app)

    as_json_option = typer.Option(False, "--json", help="Print JSON.")
    plan_dir_option = typer.Option(
        None,
        "--plan-dir",
        help="Where the plans are; else FXOPT_PLAN_DIR, else the user's cache.",
        metavar="DIR",
    )
    key_argument = typer.Argument(..., help="A plan's key, or the beginning of one.", metavar="KEY")

    @app.command("version", help="The versions of fxopt, torch and Python.")
    def version(as_json: bool = as_json_option) -> None:
        pairs(_versions(), as_json)

    @app.command("options", help="Every option: default, environment variable, meaning.")
    def options(as_json: bool = as_json_option) -> None:
        from fxopt.options import describe_options

        rows([row._asdict() for row in describe_options()], as_json, "no options")

    @plans.command("list", help="The plans, newest first.")
    def plans_list(plan_dir: Path | None = plan_dir_option, as_json: bool = as_json_option) -> None:
        store = _store(plan_dir)
        rows(_plans(store), as_json, f"no plans in {store.plans_dir}")

    @plans.command("show", help="One plan, with its evidence.")
    def plans_show(
        key: str = key_argument, plan_dir: Path | None = plan_dir_option, as_json: bool = as_json_option
    ) -> None:
        store = _store(plan_dir)
        plan = store.load(_full_key(store, key))
        if plan is None:
            raise CliError(f"the plan {key} has just been removed")
        pairs(plan.model_dump(), as_json)

    @plans.command("remove", help="Deletes one plan: the next tuning run measures again.")
    def plans_remove(key: str = key_argument, plan_dir: Path | None = plan_dir_option) -> None:
        store = _store(plan_dir)
        full = _full_key(store, key)
        store.remove(full)
        print(f"removed {store.path(full)}")

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


def _store(plan_dir: Path | None) -> PlanStore:
    from fxopt.options import resolve_options
    from fxopt.plan import PlanStore

    return PlanStore(resolve_options({} if plan_dir is None else {"plan_dir": plan_dir}).plan_root)


def _plans(store: PlanStore) -> list[dict[str, Any]]:
    return [
        {
            "key": row.key[:12],
            "created": row.created,
            "decision": row.decision,
            "frozen": row.freeze,
            "passes": list(row.passes),
            "bytes": row.bytes,
            "problem": row.problem,
        }
        for row in store.list()
    ]


def _full_key(store: PlanStore, beginning: str) -> str:
    rows = store.list()
    keys = [row.key for row in rows if beginning and row.key.startswith(beginning)]
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise CliError(
            f"{len(keys)} plans in {store.plans_dir} begin with {beginning!r}: give more of the key"
        )
    raise CliError(
        f"no plan in {store.plans_dir} begins with {beginning!r}; "
        f"`fxopt plans list` shows the {len(rows)} there are"
    )


if __name__ == "__main__":
    main()
