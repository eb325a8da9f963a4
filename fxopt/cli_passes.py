"""`fxopt passes`: what is registered, all that is known of one pass, and the files of a new one."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import sys
import textwrap
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fxopt.cli_output import CliError, did_you_mean, pairs, rows, taught

if TYPE_CHECKING:
    import typer

    from fxopt.registry import Pass
    from fxopt.seen import Sighting

SHOWN_SIGHTINGS = 10


def commands(markup: Literal["rich"] | None) -> typer.Typer:
    import typer

    app = typer.Typer(
        help=taught(
            "The rewrites that are registered.",
            "fxopt passes list",
            "fxopt passes show freeze_weights",
            "fxopt passes new fuse_gelu",
            then="docs/passes/README.md, and docs/authoring_a_pass.md for one of your own.",
        ),
        short_help="The rewrites that are registered.",
        no_args_is_help=True,
        rich_markup_mode=markup,
    )
    as_json_option = typer.Option(False, "--json", help="Print JSON.")

    @app.command(
        "list",
        help=taught("Every registered pass, one a line.", "fxopt passes list --json", then="fxopt passes show NAME"),
    )
    def passes_list(as_json: bool = as_json_option) -> None:
        found = discovered()
        origins = distributions()
        listed = [
            {
                "name": name,
                "stage": cls.stage.value,
                "answers": sorted(axis.value for axis in cls.answers),
                "precision": cls.precision.value,
                "devices": list(cls.devices),
                "does": first_line(cls),
                "from": origins.get(name, cls.__module__),
            }
            for name, cls in sorted(found.items())
        ]
        rows(listed, as_json, "no passes are registered")

    @app.command(
        "show",
        help=taught(
            "All of one pass. Options, order, documentation, and the results in this user's plans.",
            "fxopt passes show freeze_weights",
            then="the page that it names, with graphs before and after.",
        ),
    )
    def passes_show(
        name: str = typer.Argument(..., help="A pass's name.", metavar="NAME"),
        plan_dir: Path | None = typer.Option(
            None, "--plan-dir", help="Where the plans are; else FXOPT_PLAN_DIR, else the user's cache.", metavar="DIR"
        ),
        as_json: bool = as_json_option,
    ) -> None:
        found = discovered()
        if name not in found:
            near = did_you_mean(name, found) or f"; there are {', '.join(sorted(found)) or 'none'}"
            raise CliError(f"no pass is named {name!r}{near}")
        described = describe(found[name])
        seen, results, problems = _results(name, plan_dir)
        for problem in problems:
            print(f"fxopt: warning: {problem}", file=sys.stderr)
        if as_json:
            plans = [item.to_json() for item in seen]
            print(json.dumps({**described, "results": {**results, "in": plans}}, indent=2))
        else:
            _print_pass(described, seen, results)

    @app.command(
        "new",
        help=taught(
            "Writes a package of one new pass. Module, test, documentation, pyproject.toml; all of it works.",
            "fxopt passes new fuse_gelu --answers memory_bound",
            then="docs/tutorial.md",
        ),
    )
    def passes_new(
        name: str = typer.Argument(..., help="The pass's name, such as fuse_gelu.", metavar="NAME"),
        directory: Path | None = typer.Option(
            None, "--dir", help="Where the files go; else a folder NAME. Nothing there is overwritten.", metavar="DIR"
        ),
        stage: str = typer.Option("joint", "--stage", help="joint or post_grad.", metavar="STAGE"),
        answers: str = typer.Option(
            "memory_bound", "--answers", help="The labels that it answers, with commas.", metavar="AXIS[,AXIS]"
        ),
    ) -> None:
        from fxopt.scaffold import ScaffoldError, new_pass

        try:
            print(new_pass(name, directory, stage=stage, answers=answers.split(","), known=discovered()))
        except ScaffoldError as error:
            raise CliError(str(error)) from None

    return app


def discovered() -> dict[str, type[Pass]]:
    """The registered passes; one that cannot be loaded is a warning on stderr, and the others are there."""
    import warnings

    from fxopt.registry import discover

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)  # not torch's deprecations, which loading the passes sets off
        found = discover()
    for warning in caught:
        print(f"fxopt: warning: {warning.message}", file=sys.stderr)
    return found


def distributions() -> dict[str, str]:
    """Pass name -> "distribution version" of the package whose entry point it is."""
    import importlib.metadata

    from fxopt.registry import ENTRY_POINT_GROUP

    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {point.name: f"{point.dist.name} {point.dist.version}" for point in points if point.dist is not None}


def first_line(cls: type[Pass]) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]


def describe(cls: type[Pass]) -> dict[str, Any]:
    """Everything that the class itself says of a pass, as JSON data."""
    try:
        file: Path | None = Path(inspect.getsourcefile(cls) or "")
        line = inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):  # defined in a REPL
        file, line = None, 0
    page = file and documentation(file, cls.name)
    module = sys.modules.get(cls.__module__)
    return {
        "name": cls.name,
        "does": first_line(cls),
        "stage": cls.stage.value,
        "answers": sorted(axis.value for axis in cls.answers),
        "precision": cls.precision.value,
        "devices": list(cls.devices),
        **{name: list(getattr(cls, name)) for name in ("after", "before", "needs", "enables", "conflicts")},
        "from": distributions().get(cls.name, cls.__module__),
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "source": f"{file}:{line}" if file else None,
        "documentation": str(page) if page else None,
        "docstring": inspect.cleandoc((module and module.__doc__) or cls.__doc__ or ""),
        "options": options(cls),
    }


def documentation(file: Path, name: str) -> Path | None:
    """The pass's page: beside its module, or in docs/passes/ of the tree that the module is in."""
    places = [file.parent / f"{name}.md", *(parent / "docs" / "passes" / f"{name}.md" for parent in file.parents[:4])]
    return next((place for place in places if place.is_file()), None)


def options(cls: type[Pass]) -> list[dict[str, Any]]:
    """The pass's options: its dataclass fields, with the comment that stands above each (`#:`) or behind it."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is not object and dataclasses.is_dataclass(base):
            meanings.update(comments(base))
    return [
        {
            "name": f.name,
            "type": f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type)),
            "default": repr(_default(f)),
            "meaning": meanings.get(f.name, ""),
        }
        for f in dataclasses.fields(cls)
    ]


def comments(cls: type) -> dict[str, str]:
    """Comment of each annotated field in the class's source; nothing where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
        found = tokenize.generate_tokens(io.StringIO(source).readline)
        lines = {token.start[0]: token.string for token in found if token.type == tokenize.COMMENT}
        body = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, tokenize.TokenError, IndexError):
        return {}
    meanings = {}
    for node in body.body if isinstance(body, ast.ClassDef) else ():
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above: list[str] = []
        line = node.lineno - 1
        while lines.get(line, "").startswith("#:"):
            above.insert(0, lines[line])
            line -= 1
        end = node.end_lineno or node.lineno
        behind = [lines[number] for number in range(node.lineno, end + 1) if number in lines]
        meanings[node.target.id] = " ".join(text.lstrip("#:").strip() for text in above or behind)
    return meanings


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _results(name: str, plan_dir: Path | None) -> tuple[list[Sighting], dict[str, Any], list[str]]:
    from fxopt.options import resolve_options
    from fxopt.plan import PlanStore
    from fxopt.seen import sightings, summary

    store = PlanStore(resolve_options({} if plan_dir is None else {"plan_dir": plan_dir}).plan_root)
    seen, problems = sightings(store, name)
    return seen, {"directory": str(store.plans_dir), **summary(seen)}, problems


def _print_pass(described: Mapping[str, Any], seen: list[Sighting], results: Mapping[str, Any]) -> None:
    apart = ("options", "documentation", "docstring")
    pairs({key: ", ".join(v) if isinstance(v, list) else v for key, v in described.items() if key not in apart}, False)
    name = described["name"]
    print(f"\nswitch it off: options={{'disable': ['{name}']}}, or FXOPT_DISABLE={name}")
    print(f"run it alone:  options={{'passes': ['{name}']}}, or FXOPT_PASSES={name}")
    print("\noptions")
    for option in described["options"]:
        print(f"  {option['name']}: {option['type']} = {option['default']}  {option['meaning']}".rstrip())
    if not described["options"]:
        print("  none")
    page = described["documentation"]
    words = Path(page).read_text(encoding="utf-8", errors="replace") if page else described["docstring"]
    print(f"\ndocumentation{f': {page}' if page else ''}")
    print(textwrap.indent(words.strip() or "none", "  "))
    print(f"\nresults seen in {results['directory']}")
    if not seen:
        print("  none: no plan there has tried it")
        return
    counts = ", ".join(f"{results[outcome]} {outcome}" for outcome in ("kept", "rejected", "failed", "out of reach"))
    print(f"  {results['plans']} plan{'s' * (results['plans'] > 1)}: {counts}; the newest of {results['newest']}")
    for item in seen[:SHOWN_SIGHTINGS]:
        print(f"  {item.created[:10]}  {item.key[:12]}  {item.device or '?'}  {_outcome(item)}")
    if len(seen) > SHOWN_SIGHTINGS:
        print(f"  ... and {len(seen) - SHOWN_SIGHTINGS} older (--json has all)")
    for title, key in (("most frequent reasons", "reasons"), ("most frequent refusals of a candidate", "refused")):
        if results[key]:
            print(f"  {title}:")
            for reason in results[key]:
                print(f"    {reason['count']} x {reason['reason']}")


def _outcome(item: Sighting) -> str:
    if item.outcome != "kept":
        return item.outcome
    together = f" with {', '.join(item.beside)}" if item.beside else ""
    if item.speedup is None or item.low is None or item.high is None:
        return f"kept{together}, {item.rewritten} rewritten"
    return f"kept{together}, {item.rewritten} rewritten: {item.speedup:.2f}x ({item.low:.2f}-{item.high:.2f})"
