"""cudnn_algorithm: the flag is on in the first call alone, in a thread of its own, and what it refuses. On the CPU."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from fxopt import testing
from fxopt.registry import order
from fxopt.warning import FxoptWarning
from passes.cuda_graphs import CudaGraphs
from passes.cudnn_algorithm import RUNS, CudnnAlgorithm, Searched, agree

CPU = torch.device("cpu")


@dataclass(frozen=True)
class OnCpu(CudnnAlgorithm):
    devices: ClassVar[tuple[str, ...]] = ("cpu",)


def conv(x, w):
    return F.conv2d(x, w)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)


def test_the_flag_is_on_in_the_first_calls_search_alone_and_put_back_after_it():
    seen = []
    fn = Searched(lambda: seen.append(torch.backends.cudnn.benchmark), CPU)
    for _ in range(3):
        fn()
        assert torch.backends.cudnn.benchmark is False
    assert seen == [False, True, *[False] * (RUNS - 1), False, False]


def test_a_search_that_fails_puts_the_flag_back_and_the_code_runs_as_it_was():
    def once() -> int:
        if torch.backends.cudnn.benchmark:
            raise ValueError("no")
        return threading.get_ident()

    fn = Searched(once, CPU)
    with pytest.warns(FxoptWarning, match="search failed: ValueError: no"):
        assert fn() == threading.get_ident()
    assert torch.backends.cudnn.benchmark is False
    assert fn() == threading.get_ident()


def test_a_kernel_that_is_wrong_now_and_then_is_not_used():
    calls = []

    def flaky(x: torch.Tensor) -> torch.Tensor:
        calls.append(threading.get_ident())
        return x * 1.06 if len(calls) == RUNS else x

    fn, x = Searched(flaky, CPU), torch.randn(50)
    with pytest.warns(FxoptWarning, match="gives other results"):
        fn(x)
    fn(x)
    assert calls[-1] == threading.get_ident()


def test_every_later_call_runs_in_one_thread_that_is_not_the_callers():
    fn = Searched(threading.get_ident, CPU)
    assert fn() == threading.get_ident(), "the first result is the code's own"
    found = {fn(), fn()}
    other: list[int] = []
    thread = threading.Thread(target=lambda: other.append(fn()))
    thread.start()
    thread.join()
    assert found == set(other) and threading.get_ident() not in found


def test_what_a_search_finds_is_not_used_where_it_gives_other_results():
    calls = []

    def biased(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        calls.append(threading.get_ident())
        return (x * 1.06 if torch.backends.cudnn.benchmark else x), 3

    fn, x = Searched(biased, CPU), torch.randn(50)
    with pytest.warns(FxoptWarning, match="gives other results"):
        assert torch.equal(fn(x)[0], x)
    assert torch.equal(fn(x)[0], x)
    assert calls[-1] == threading.get_ident(), "not in the thread that remembers what was found"


def test_two_results_agree_up_to_the_roundings_of_their_type(monkeypatch):
    x = torch.randn(1000)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert agree((x * (1 + 1e-6), 1), (x, 1)) and not agree((x * (1 + 1e-4), 1), (x, 1))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert agree((x * (1 + 1e-4), 1), (x, 1)) and not agree((x * 1.01, 1), (x, 1))
    assert agree([x.bfloat16() * 1.01], [x.bfloat16()]) and not agree([x.double() * (1 + 1e-6)], [x.double()])
    assert not agree(torch.where(x > 2, torch.nan, x), x)
    both = torch.where(x > 2, torch.inf, x)
    assert agree(both, both.clone())
    assert agree(torch.zeros(3), torch.zeros(3)) and not agree(torch.ones(3), torch.zeros(3))


def test_the_callers_gradient_modes_hold_in_that_thread():
    fn = Searched(lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()), CPU)
    fn()
    assert fn() == (True, False)
    with torch.no_grad():
        assert fn() == (False, False)
    with torch.inference_mode():
        assert fn() == (False, True)


def test_results_are_the_codes_own():
    x, w = inputs()
    result = testing.run(OnCpu(), testing.capture(conv, x, w))
    assert result.changed
    (out,) = result.fn(x, w)
    assert torch.equal(out, conv(x, w))


def test_it_is_inside_of_a_cuda_graph():
    assert [p.name for p in order([CudaGraphs(), CudnnAlgorithm()])] == ["cudnn_algorithm", "cuda_graphs"]


def test_code_that_may_not_run_twice_is_left_alone():
    def counting(x, w, seen):
        seen.add_(1)
        return F.conv2d(x, w)

    testing.refuses(OnCpu(), counting, *inputs(), torch.zeros(1), because="the first call runs twice")


def test_a_graph_without_a_convolution_is_left_alone():
    testing.refuses(OnCpu(), torch.mm, torch.randn(3, 4), torch.randn(4, 5), because="no convolution")


@pytest.mark.parametrize(("fields", "because"), [({"grad": True}, "gradients"), ({"dynamic": True}, "symbolic")])
def test_graphs_that_it_does_not_apply_to(fields, because):
    testing.refuses(OnCpu(), conv, *inputs(), because=because, context=testing.context(OnCpu(), **fields))


@pytest.mark.parametrize(
    ("flag", "value", "because"),
    [("enabled", False, "switched off"), ("deterministic", True, "deterministic"), ("benchmark", True, "on already")],
)
def test_what_the_process_asks_for_is_kept(monkeypatch, flag, value, because):
    monkeypatch.setattr(torch.backends.cudnn, flag, value)
    testing.refuses(OnCpu(), conv, *inputs(), because=because)
