"""Dataclasses from the JSON data that `fxopt.report.model.to_plain` makes of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class RestoreError(ValueError):
    """Data that do not fit their class; the message names the place, such as `graphs[0].ratio.low`."""


def restore_fields(kind: type[T], data: Any, place: str, names: Mapping[str, Any] | None = None) -> T:
    """The dataclass `kind` from an object with its fields. `names`: what its annotations call by a name that its module
    does not hold at run time.

    A field that is absent gets its default, one that is unknown is left out. Raises RestoreError.
    """
    _expect(data, dict, place)
    hints = get_type_hints(kind, localns=dict(names or {}))
    found = {}
    for item in dataclasses.fields(kind):  # type: ignore[arg-type]
        if item.name in data:
            found[item.name] = restore(hints[item.name], data[item.name], f"{place}.{item.name}".lstrip("."), names)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise RestoreError(f"{place}.{item.name}".lstrip(".") + ": is missing")
    return kind(**found)


def restore(kind: Any, value: Any, place: str, names: Mapping[str, Any] | None = None) -> Any:
    """`value` as an annotation says: containers and Optional of plain values, enums, classes with a `from_json` of
    their own, dataclasses. A float that JSON could not hold (null) is NaN. Raises RestoreError.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in args:
            return None
        return restore(next(arg for arg in args if arg is not NoneType), value, place, names)
    if origin is Literal:
        if value not in args:
            raise RestoreError(f"{place}: {value!r:.80} is none of {', '.join(map(repr, args))}")
        return value
    if origin is list or origin is tuple:
        _expect(list(value) if isinstance(value, tuple) else value, list, place)
        kinds = [args[0]] * len(value) if origin is list or args[1:] == (...,) else list(args)
        if len(kinds) != len(value):
            raise RestoreError(f"{place}: expected {len(kinds)} values, got {len(value)}")
        return origin(restore(kinds[i], item, f"{place}[{i}]", names) for i, item in enumerate(value))
    if origin is dict:
        _expect(value, dict, place)
        return {key: restore(args[1], item, f"{place}.{key}"[:200], names) for key, item in value.items()}
    if hasattr(kind, "from_json") or issubclass(kind, Enum):
        try:
            return kind(value) if issubclass(kind, Enum) else kind.from_json(value)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            text = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise RestoreError(f"{place}: {text}") from error
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return restore_fields(kind, value, place, names)
    if kind is float:
        return math.nan if value is None else _float(value, place)
    _expect(value, kind, place)
    return value


def _float(value: Any, place: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise RestoreError(f"{place}: expected a number, got {value!r:.80}")


def _expect(value: Any, kind: type, place: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {dict: "an object", list: "a list", str: "a text", int: "an integer", bool: "true or false"}
        expected = words.get(kind, kind.__name__)
        raise RestoreError(f"{place or 'the top level'}: expected {expected}, got {value!r:.80}")
