"""`fxopt plans`: the decisions that are kept on disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fxopt.cli_output import CliError, WrongCommand, pairs, rows, spelled, taught

if TYPE_CHECKING:
    import typer

    from fxopt.plan import Plan, PlanRow, PlanStore

EVERY = 10**9  # more plans than a store holds
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
            "Deletes one plan, all, or old ones: the next tuning run measures again.",
            "fxopt plans remove 3f2a",
            "fxopt plans remove --older-than 30",
            then="fxopt optimize",
        ),
    )
    def plans_remove(
        key: str | None = typer.Argument(None, help="A plan's key, or the beginning of one.", metavar="KEY"),
        every: bool = typer.Option(False, "--all", help="Every plan, and what was set aside as broken."),
        older_than: float | None = typer.Option(
            None, "--older-than", help="Those that were decided so many days ago or earlier.", metavar="DAYS", min=0
        ),
        yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask whether several are to be deleted."),
        plan_dir: Path | None = plan_dir_option,
    ) -> None:
        if (key is not None) + every + (older_than is not None) != 1:
            raise WrongCommand("plans remove takes one of KEY, --all and --older-than DAYS")
        store = _store(plan_dir)
        if key is not None:
            full = _full_key(store, key)
            store.remove(full)
            print(f"removed {store.path(full)}")
            return
        _remove_several(store, older_than or 0.0, yes)

    return plans


def _remove_several(store: PlanStore, days: float, yes: bool) -> None:
    """Deletes the plans that are so many days old, and the files set aside of which that holds, after a question."""
    import time
    from contextlib import suppress

    import typer

    keys = [row.key for row in store.list(limit=EVERY) if row.age_days >= days]
    broken = [path for path in store.set_aside() if time.time() - path.stat().st_mtime >= days * 86400]
    if not keys and not broken:
        print(f"no plans to remove in {store.plans_dir}", file=sys.stderr)
        return
    what = f"{len(keys)} plan{'s' * (len(keys) != 1)}"
    what += f" and {len(broken)} set aside as broken" if broken else ""
    if not yes:
        if not sys.stdin.isatty():
            raise CliError(f"{what} in {store.plans_dir} would be deleted, and nobody can be asked here: give --yes")
        if not typer.confirm(f"Delete {what} in {store.plans_dir}?", err=True):
            raise CliError("nothing was removed")
    for key in keys:
        store.remove(key)
    for path in broken:
        with suppress(OSError):
            path.unlink()
    print(f"removed {what} in {store.plans_dir}")


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
            "of": row.of,
            "inputs": list(row.inputs),
            "device": row.device,
            "precision": row.precision,
            "decision": row.decision,
            "ratio": row.ratio,
            "frozen": row.freeze,
            "passes": list(row.passes),
            "bytes": row.bytes,
            "problem": row.problem,
        }
        for row in found
    ]


def _full_key(store: PlanStore, beginning: str) -> str:
    rows = store.list(limit=EVERY)
    keys = [row.key for row in rows if beginning and row.key.startswith(beginning)]
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise CliError(f"{len(keys)} plans in {store.plans_dir} begin with {beginning!r}: give more of the key")
    raise CliError(
        f"no plan in {store.plans_dir} begins with {beginning!r}; `fxopt plans list` shows the {len(rows)} there are"
    )
