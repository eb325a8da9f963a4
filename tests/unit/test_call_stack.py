"""Room on the interpreter's stack: seen in the pages that the kernel maps for calls."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fxopt.call_stack import with_room

DEPTH, CALLS = 300, 200

pytestmark = pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="pages are counted as Linux does")


def leaf() -> None:
    pass


def calls_at_every_depth(left: int) -> int:
    for _ in range(CALLS):
        leaf()
    return calls_at_every_depth(left - 1) + 1 if left else 0


def pages_mapped(fn: Callable[..., Any], *args: Any) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    assert fn(*args) == DEPTH
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_no_loop_maps_memory_at_each_of_its_calls_whatever_its_depth():
    assert pages_mapped(with_room, calls_at_every_depth, DEPTH) < CALLS / 2


@pytest.mark.skipif(not (3, 11) <= sys.version_info < (3, 14), reason="no such chunks, or not measured")
def test_without_room_one_of_them_does():
    assert pages_mapped(calls_at_every_depth, DEPTH) >= CALLS


def test_results_arguments_and_errors_pass_through():
    assert with_room(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        with_room(divmod, 7, 0)
