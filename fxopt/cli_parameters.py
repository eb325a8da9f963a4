"""Arguments and options that several commands have, each spelled once: a dataclass is a group of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from fxopt.cli_show import check_file, check_folder, option_values

if TYPE_CHECKING:
    from fxopt.script import Target


@dataclass(frozen=True)
class Program:
    """The program that a command runs."""

    program: Annotated[
        str | None,
        typer.Argument(
            help="A script, or package.module:function; with -m, the program's first argument.", metavar="PROGRAM"
        ),
    ] = None
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The program's arguments, after --.", metavar="ARGS")
    ] = None
    module: Annotated[str | None, typer.Option("-m", help="Run a module, as python -m does.", metavar="MODULE")] = None

    def target(self) -> Target:
        """Raises CliError where there is no such program."""
        from fxopt.cli_output import CliError
        from fxopt.script import Target, TargetError

        rest = list(self.arguments or ())
        if self.module is not None:
            return Target.of(self.module, [*([self.program] if self.program is not None else []), *rest], module=True)
        if self.program is None:
            raise typer.BadParameter("no program was given: a script, -m MODULE, or package.module:function")
        try:
            return Target.of(self.program, rest)
        except TargetError as error:
            raise CliError(str(error)) from None


@dataclass(frozen=True)
class Tuning:
    """The options of fxopt that have a flag of their own, and all others as key=value."""

    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            help="What a rewrite may cost: fp32 (default), tf32, bf16, or a number, the largest relative L2 error.",
            metavar="CLASS",
        ),
    ] = None
    objective: Annotated[
        str | None,
        typer.Option("--objective", help="What decides: wall (default) or kernel time.", metavar="TIME"),
    ] = None
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", help="Seconds of tuning a graph, 600 by default.", metavar="SECONDS"),
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            help="Another option of fxopt's (`fxopt options` lists them) or of Inductor's.",
            metavar="KEY=VALUE",
        ),
    ] = None

    def options(self) -> dict[str, Any]:
        """Checked now: a backend that is handed a bad option runs plain Inductor. Raises OptionError."""
        from fxopt.cli_run import quiet_kineto

        direct = {"precision": self.precision, "objective": self.objective, "time_limit": self.time_limit}
        chosen = option_values(self.option or (), **direct)
        quiet_kineto()
        from fxopt.options import split_options
        from fxopt.torch_api import inductor

        resolved, _, patches = split_options(None, chosen, inductor.config_keys(), inductor.list_modes())
        inductor.check_values(patches)
        if (report := resolved.report) is not None:  # whose folder is made
            is_there = report.absolute().parent.is_dir()
            (check_file if is_there else check_folder)("option 'report':", report if is_there else report.parent)
        if resolved.dump is not None:
            check_folder("option 'dump':", resolved.dump)
        return chosen


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: in place of a parameter that is a dataclass, the dataclass's options, which are
    its fields with an Annotated type.
    """
    hints = get_type_hints(command, include_extras=True)
    flat: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not is_dataclass(kind):
            flat.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(kind, include_extras=True)
        held = [field for field in fields(kind) if hasattr(types[field.name], "__metadata__")]
        groups[name] = (kind, [field.name for field in held])  # type: ignore[assignment]
        flat += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
            )
            for field in held
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, (kind, members) in groups.items():
            given[name] = kind(**{member: given.pop(member) for member in members})
        command(**given)

    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run
