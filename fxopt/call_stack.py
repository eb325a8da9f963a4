"""Calls of Python that find their part of the interpreter's stack in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

#: bytes that the calls beneath `with_room` find; of memory that they do not reach, nothing is used
ROOM = 1 << 19


def with_room(fn: Callable[..., T], *args: Any) -> T:
    """`fn(*args)`, and all that it calls to some thousand calls deep, on one piece of the interpreter's stack.

    From 3.11 on, CPython keeps the frames of calls in chunks of 16 KiB, maps one when a call no longer fits, and unmaps
    it when that call returns: some 10 us. A loop that happens to be so deep that each of its calls crosses the boundary
    pays that each time. In a process that compiles a GPT of 12 layers with warm caches that is 19,000 times with
    `torch.compile` alone; the few frames that fxopt adds made it 33,000, and 44,000 with a pass in the plan.
    """
    return fn(*args)


# A call gets a chunk of its own where it needs more than one, of the next power of two: this one needs little more than
# half of such a chunk, and what it calls has the rest.
with_room.__code__ = with_room.__code__.replace(co_stacksize=ROOM // 8)
