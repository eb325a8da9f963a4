"""What a pass says of itself is checked when it is registered, with the remedy in the message."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any

from fxopt.labels import Axis
from fxopt.precision import Precision
from fxopt.registry import ConfigPass, GraphPass, Pass, RegistryError, RuntimePass, Stage

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_DEVICES = ("cpu", "cuda")
#: the stages that passes of each kind work at
_STAGES: dict[type[Pass], tuple[Stage, ...]] = {
    GraphPass: (Stage.JOINT, Stage.POST_GRAD),
    ConfigPass: (Stage.CONFIG,),
    RuntimePass: (Stage.RUNTIME,),
}


def check(cls: Any) -> None:
    """RegistryError for what would otherwise go wrong while somebody's model is tuned."""
    where = getattr(cls, "__qualname__", repr(cls))
    stages = next((stages for kind, stages in _STAGES.items() if isinstance(cls, type) and issubclass(cls, kind)), None)
    if stages is None:
        raise RegistryError(f"{where}: a pass is a class derived from GraphPass, ConfigPass or RuntimePass")
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise RegistryError(f"{where}: a pass must be a frozen dataclass; put @dataclass(frozen=True) on it")
    if not cls.name:
        raise RegistryError(f"{where}: a pass needs a class attribute `name`")
    if not isinstance(cls.name, str) or not _NAME.fullmatch(cls.name) or cls.name == "all":
        raise RegistryError(
            f"{where}: `name` is {cls.name!r}; write a string of letters, digits, '_', '.' and '-' that begins with a "
            "letter or '_' and is not 'all'"
        )
    stage = getattr(cls, "stage", None)
    if not isinstance(stage, Stage) or stage not in stages:
        raise RegistryError(
            f"{where}: `stage` must be one of {', '.join(map(str, stages))} for this kind of pass, not {stage!r}"
        )
    _check_precision(where, getattr(cls, "precision", None))
    _check_answers(where, cls.answers)
    _check_names(where, cls)
    for option in dataclasses.fields(cls):
        if option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING:
            raise RegistryError(f"{where}: the option `{option.name}` needs a default")


def _check_precision(where: str, precision: Any) -> None:
    if not isinstance(precision, Precision):
        raise RegistryError(
            f"{where}: `precision` must say what it needs, one of {', '.join(map(str, Precision))}, not {precision!r}"
        )


def _check_answers(where: str, answers: Any) -> None:
    if isinstance(answers, Axis):
        raise RegistryError(f"{where}: `answers` is the axis {answers} alone; write frozenset({{{answers}}})")
    if not isinstance(answers, (set, frozenset, tuple, list)):
        raise RegistryError(f"{where}: `answers` is {answers!r}; write a frozenset of axes, such as Axis.MEMORY_BOUND")
    for one in answers:
        if not isinstance(one, Axis):
            near = difflib.get_close_matches(str(one).lower().removeprefix("axis."), [axis.value for axis in Axis], n=1)
            meant = Axis(near[0]) if near else f"one of {', '.join(map(str, Axis))}"
            raise RegistryError(f"{where}: `answers` holds {one!r}, which is no Axis; write {meant}")


def _check_names(where: str, cls: type[Pass]) -> None:
    for attribute in ("after", "before", "enables", "needs", "conflicts", "devices"):
        value = getattr(cls, attribute)
        if isinstance(value, str):
            raise RegistryError(f"{where}: `{attribute}` is the string {value!r}; write the tuple ({value!r},)")
        if not isinstance(value, (tuple, list, set, frozenset)):
            raise RegistryError(f"{where}: `{attribute}` is {value!r}; write a tuple of strings")
        for one in value:
            if not isinstance(one, str):
                raise RegistryError(f"{where}: `{attribute}` holds {one!r}; write a tuple of strings")
            if attribute == "devices" and one not in _DEVICES:
                raise RegistryError(f"{where}: `devices` holds {one!r}; the devices are {', '.join(_DEVICES)}")
            if attribute in ("after", "before", "conflicts") and one == cls.name:
                raise RegistryError(f"{where}: `{attribute}` holds the pass's own name, {one!r}; take it out")
            if attribute == "conflicts" and one in cls.needs:
                raise RegistryError(f"{where}: {one!r} is in `needs` and in `conflicts`; take it out of one of them")


def make(cls: type[Pass]) -> None:
    """Makes one, whose fingerprint remembers the text that was loaded before anybody edits the file."""
    try:
        p = cls()
    except Exception as error:
        raise RegistryError(
            f"{cls.__qualname__}: {cls.__name__}() raised {type(error).__name__}: {error}; a pass must be made without "
            "arguments: let the defaults of its options be ones that it accepts"
        ) from error
    p.fingerprint()
