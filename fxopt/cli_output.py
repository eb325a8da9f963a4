"""How the command prints: rows and pairs, as text for a person, tab-separated for a pipe, JSON for a program."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from profiler_core.quantities import duration, quantity


class CliError(Exception):
    """What the user has to read instead of a result."""

    code = 1


class WrongCommand(CliError):
    """The command line names what cannot be run, though nothing about its form says so."""

    code = 2


class Interrupted(Exception):
    """Ctrl-C; its text says what was kept."""


def taught(what: str, *examples: str, then: str) -> str:
    """The help of a command: what it is for, examples, and what to read next."""
    return "\n\n".join([what, *(f"Example: {example}" for example in examples), f"Next: {then}"])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x' or 'y'?` of the known names nearest to `name`; "" where none is near."""
    near = difflib.get_close_matches(name, list(known), 3, 0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def spelled(value: Any, name: str = "") -> Any:
    """As people read it: times, which JSON has in ns under a name that says so, and numbers beside their unit."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and name.endswith("_ns"):
        return duration(value)
    if isinstance(value, Mapping):
        unit = value.get("unit")
        if isinstance(unit, str):
            numbers = {key: value.get(key) for key in ("value", "threshold")}
            told = {key: quantity(item, unit) for key, item in numbers.items() if isinstance(item, (int, float))}
            value = {key: told.get(key, item) for key, item in value.items() if key != "unit"}
        return {str(key).removesuffix("_ns"): spelled(item, str(key)) for key, item in value.items()}
    return [spelled(item) for item in value] if isinstance(value, (list, tuple)) else value


def rows(found: Sequence[Mapping[str, Any]], as_json: bool, nothing: str) -> None:
    """One line a row: a table on a terminal; tab-separated, with a header, where another program reads."""
    if as_json:
        print(json.dumps(found, indent=2))
    elif not found:
        print(nothing, file=sys.stderr)
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in found[0]:
            table.add_column(name, overflow="fold")
        for row in found:
            table.add_row(*(Text(cell(value)) for value in row.values()))
        Console().print(table)
    else:
        print("\t".join(found[0]))
        for row in found:
            print("\t".join(" ".join(cell(value).split()) for value in row.values()))


def pairs(values: Mapping[str, Any], as_json: bool) -> None:
    """One value a line after its name; what is nested follows as indented JSON."""
    if as_json:
        print(json.dumps(values, indent=2))
        return
    values = spelled(values)
    width = max(map(len, values))
    for name, value in values.items():
        nested = isinstance(value, (dict, list)) and value
        text = json.dumps(value, indent=2).replace("\n", "\n" + " " * (width + 2)) if nested else cell(value)
        print(f"{name:<{width}}  {text}".rstrip())
