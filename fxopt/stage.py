"""In which stage an error arose, for the one message that names stage and cause."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_ATTRIBUTE = "_fxopt_stage"


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """An exception that leaves the block is marked with `name`, unless a stage inside this one has marked it."""
    try:
        yield
    except BaseException as error:
        if not stage_of(error):
            with contextlib.suppress(AttributeError, TypeError):  # one of a class with slots
                setattr(error, _ATTRIBUTE, name)
        raise


def stage_of(error: BaseException) -> str:
    """The innermost stage that the error left, "" where it left none."""
    return str(getattr(error, _ATTRIBUTE, ""))
