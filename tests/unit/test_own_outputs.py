"""Outputs that are constants of the code, and equal ones in one memory, are copied; code without any runs as it is."""

from __future__ import annotations

import torch

from fxopt.own_outputs import OwnOutputs

HELD = torch.randn(4, 6)


def run(*outputs: torch.Tensor, own: dict[int, int]) -> tuple[OwnOutputs, list[torch.Tensor]]:
    code = OwnOutputs(lambda: list(outputs), own, [HELD, torch.ones(2)])
    code()
    return code, list(code())


def test_code_without_such_outputs_runs_as_it_is():
    x = torch.randn(3)
    fn = lambda: [x, x[1:], 3, None, torch.zeros(0)]  # noqa: E731
    code = OwnOutputs(fn, {0: 1, 1: 1, 4: 2}, [HELD])
    code()
    assert code.settled is fn


def test_only_elements_in_common_count_in_memory_that_the_code_allocates():
    both = torch.randn(2, 6)
    _, (first, second, third) = run(both[:, :3], both[:, 3:], both[:1], own={0: 1, 1: 2, 2: 3})
    assert first.data_ptr() == both.data_ptr() and second.data_ptr() == both[0, 3:].data_ptr()
    assert third.untyped_storage().data_ptr() != both.untyped_storage().data_ptr() and torch.equal(third, both[:1])


def test_what_lies_in_one_memory_of_the_graph_is_copied_into_one():
    views = HELD[1:], HELD.t(), HELD[::2, ::3], HELD[:1].expand(5, 6)
    _, copies = run(*views, HELD, own={0: 1, 1: 1, 2: 1, 3: 1, 4: 2})
    for view, copied in zip(views, copies, strict=False):
        assert torch.equal(view, copied) and view.stride() == copied.stride()
    assert len({copied.untyped_storage().data_ptr() for copied in (HELD, *copies)}) == 3
    copies[1].zero_()
    assert not copies[0].any() and not copies[2].any() and not copies[3].any() and HELD.any() and copies[4].any()


def test_what_the_caller_gave_stays_the_callers():
    _, (out,) = run(HELD, own={})
    assert out is HELD


def test_a_conjugate_is_copied_by_its_values():
    value = torch.randn(3, dtype=torch.complex64)
    code = OwnOutputs(lambda: [value.conj()], {0: 1}, [value])
    (out,) = code()
    out.add_(0)
    assert torch.equal(out, value.conj()) and out.data_ptr() != value.data_ptr()
