"""From what a plan says to passes: looked up by name, checked, and made from plain values alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from fxopt import registry
from fxopt.plan import PassUse, Plan, PlanStoreError
from fxopt.registry import GraphPass, Pass, PassContext


class PlanRefused(PlanStoreError):
    """A plan that this process would never have made. The message names it, the place and the remedy."""


def passes_of(plan: Plan, allowed: Sequence[Pass], context: PassContext) -> list[Pass]:
    """The plan's passes in order, each one of `allowed`, with the plan's options.

    A plan is a file that anybody may have written: it can choose among what the caller's options allow, and no more.
    Raises PlanRefused for another pass, stage or option, for a value of another type than the option's default, and for
    a pass that the precision asked for does not allow.
    """
    return _made(plan, "passes", plan.passes, allowed, context)


def resting_of(plan: Plan, allowed: Sequence[Pass], context: PassContext) -> list[Pass]:
    """Graph passes that found nothing to do beside the plan's, none where one of them may not run here: they are for
    Inductor's caches alone.
    """
    used = {use.name for use in plan.passes}
    try:
        made = _made(plan, "resting", plan.resting, allowed, context)
    except PlanRefused:
        return []
    return made if all(isinstance(p, GraphPass) and p.name not in used for p in made) else []


def _made(
    plan: Plan, field: str, uses: Sequence[PassUse], allowed: Sequence[Pass], context: PassContext
) -> list[Pass]:
    known = {p.name: type(p) for p in allowed}
    made = []
    for index, use in enumerate(uses):
        place = f"{field}[{index}]: {use.name}"
        if use.name not in known:
            raise _refused(plan, f"{field}[{index}]: {use.name!r} is not a pass that may run here")
        cls = known.pop(use.name)
        if use.stage != cls.stage.value:
            raise _refused(plan, f"{place} has the stage {cls.stage.value}, not {use.stage!r}")
        if not context.budget.allows(cls.precision):
            raise _refused(plan, f"{place} needs precision={cls.precision.value!r}")
        try:
            made.append(cls(**_options(cls, use)))
        except (TypeError, ValueError) as error:
            raise _refused(plan, f"{place}: {error}") from error
    return registry.order(made)


def _options(cls: type[Pass], use: PassUse) -> dict[str, Any]:
    usual: Mapping[str, Any] = cls().options()
    if unknown := sorted(set(use.options) - set(usual)):
        raise TypeError(f"no option is named {unknown[0]!r}; there are {', '.join(usual) or 'none'}")
    fields = {f.name for f in dataclasses.fields(cls) if f.init}
    return {name: _as(value, usual[name], name) for name, value in use.options.items() if name in fields}


def _as(value: Any, usual: Any, name: str) -> Any:
    """`value`, as JSON gave it, in the type of the option's default."""
    if isinstance(usual, Enum):
        return type(usual)(value)
    if isinstance(value, list) and (usual is None or isinstance(usual, (tuple, list))):
        return _tuples(value)
    if usual is None or value is None or isinstance(value, dict):
        alike = usual is None and not isinstance(value, dict)
    elif isinstance(usual, float):
        alike = type(value) in (int, float)
    else:
        alike = type(value) is type(usual)
    if not alike:
        raise TypeError(f"the option {name!r} is {value!r:.80}, and {usual!r:.80} is its default")
    return value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _refused(plan: Plan, reason: str) -> PlanRefused:
    return PlanRefused(
        f"the plan {plan.key[:12]} is refused: {reason}. Nothing of it was used; "
        f"`fxopt plans remove {plan.key[:12]}` deletes it, and the next tuning run makes a new one"
    )
