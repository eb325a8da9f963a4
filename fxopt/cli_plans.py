"""`fxopt plans`: the decisions that are kept on disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fxopt.cli_output import CliError, pairs, rows, spelled, taught

if TYPE_CHECKING:
    import typer

    from fxopt.plan import Plan, PlanRow, PlanStore

#: differs between any two plans, and says nothing of why they do
_OWN = ("key", "created", "machines", "tuning_seconds")


def commands(markup: Literal["rich"] | None) -> typer.Typer:
    import typer

    plans = typer.Typer(
        help=taught(
            "The decisions that are kept on disk.\n\nA plan says which passes a graph runs with on this machine, and "
            "why; with one, nothing is measured.",
            "fxopt plans list",
            "fxopt plans show 3f2a",
            then="docs/plans.md, for what a plan's key covers.",
        ),
        short_help="The decisions that are kept on disk.",
        no_args_is_help=True,
        rich_markup_mode=markup,
    )
    as_json_option = typer.Option(False, "--json", help="Print JSON.")
    plan_dir_option = typer.Option(
        None,
        "--plan-dir",
        help="Where the plans are; else FXOPT_PLAN_DIR, else the user's cache.",
        metavar="DIR",
    )
    key_argument = typer.Argument(..., help="A plan's key, or the beginning of one.", metavar="KEY")
    other_argument = typer.Argument(..., help="The other plan's.", metavar="OTHER")

    @plans.command("list", help=taught("The plans, newest first.", "fxopt plans list", then="fxopt plans show KEY"))
    def plans_list(plan_dir: Path | None = plan_dir_option, as_json: bool = as_json_option) -> None:
        store = _store(plan_dir)
        found = store.list()
        rows(_plans(found), as_json, f"no plans in {store.plans_dir}")
        for row in found:
            if row.broken:
                remedy = f"`fxopt plans remove {row.key[:12]}` deletes it"
                print(f"fxopt: warning: {row.path} is broken at {row.problem}; {remedy}", file=sys.stderr)

    @plans.command(
        "show",
        help=taught(
            "One plan, with its evidence.", "fxopt plans show 3f2a", then="fxopt report FILE, for the same to be read."
        ),
    )
    def plans_show(
        key: str = key_argument, plan_dir: Path | None = plan_dir_option, as_json: bool = as_json_option
    ) -> None:
        pairs(_load(_store(plan_dir), key).model_dump(), as_json)

    @plans.command(
        "diff",
        help=taught(
            "What two plans differ in: a line for each value.", "fxopt plans diff 3f2a 90bc", then="docs/plans.md"
        ),
    )
    def plans_diff(
        key: str = key_argument,
        other: str = other_argument,
        plan_dir: Path | None = plan_dir_option,
        as_json: bool = as_json_option,
    ) -> None:
        store = _store(plan_dir)
        found = differences(_load(store, key), _load(store, other))
        if not as_json:
            sides = ("first", "second")
            found = [row | {side: spelled(row[side], row["value"]) for side in sides} for row in found]
        rows(found, as_json, "the two plans say the same")

    @plans.command(
        "remove",
        help=taught(
            "Deletes one plan: the next tuning run measures again.", "fxopt plans remove 3f2a", then="fxopt optimize"
        ),
    )
    def plans_remove(key: str = key_argument, plan_dir: Path | None = plan_dir_option) -> None:
        store = _store(plan_dir)
        full = _full_key(store, key)
        store.remove(full)
        print(f"removed {store.path(full)}")

    return plans


def differences(one: Plan, other: Plan) -> list[dict[str, Any]]:
    """A row for each value that the plans differ in: its place, and what each has there (None where it has nothing)."""
    first, second = dict(_leaves(one.model_dump(exclude=set(_OWN)))), dict(_leaves(other.model_dump(exclude=set(_OWN))))
    places = [*first, *(place for place in second if place not in first)]
    return [
        {"value": place, "first": first.get(place), "second": second.get(place)}
        for place in places
        if first.get(place) != second.get(place)
    ]


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every plain value with its place, such as `passes[0].options.limit`."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{place}.{name}" if place else str(name))
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{place}[{index}]")
    else:
        yield place, value


def _store(plan_dir: Path | None) -> PlanStore:
    from fxopt.options import resolve_options
    from fxopt.plan import PlanStore

    return PlanStore(resolve_options({} if plan_dir is None else {"plan_dir": plan_dir}).plan_root)


def _load(store: PlanStore, key: str) -> Plan:
    plan = store.read(_full_key(store, key))
    if plan is None:
        raise CliError(f"the plan {key} has just been removed")
    return plan


def _plans(found: Sequence[PlanRow]) -> list[dict[str, Any]]:
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
        for row in found
    ]


def _full_key(store: PlanStore, beginning: str) -> str:
    rows = store.list()
    keys = [row.key for row in rows if beginning and row.key.startswith(beginning)]
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise CliError(f"{len(keys)} plans in {store.plans_dir} begin with {beginning!r}: give more of the key")
    raise CliError(
        f"no plan in {store.plans_dir} begins with {beginning!r}; `fxopt plans list` shows the {len(rows)} there are"
    )
