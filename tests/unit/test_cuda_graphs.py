"""cuda_graphs on the CPU, where a stand-in captures and replays: what is written, what moves, what is refused."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_random_graphs import GraphsOnCpu, stand_in_for_cuda

import passes.cuda_graphs
from fxopt import testing
from passes.cuda_graphs import GraphReplay

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_cuda(monkeypatch)


class RecordedStream:
    """waited: the addresses of the streams that it was told to wait for, 0 where they have none."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.waited: list[int] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(getattr(other, "address", 0))


@pytest.fixture
def two_streams(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, RecordedStream], list[int]]:
    """Streams by address, 1 and 2, and the address of the current one, which a test may change."""
    streams, current = {address: RecordedStream(address) for address in (1, 2)}, [1]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[current[0]])
    monkeypatch.setattr(passes.cuda_graphs, "current_stream_address", lambda index: current[0])
    return streams, current


class Counting:
    """A callable that counts the calls that are neither warm-up nor replay."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.calls = fn, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.fn(*args)


def decode(cache: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Puts x into the cache at a position that it counts itself, and sums the cache."""
    cache.index_copy_(0, position, x)
    position.add_(1)
    return [cache.sum(0)]


def replay_of(fn: Callable[..., Any], written: set[int], static: set[int] = frozenset(), **options: Any) -> GraphReplay:
    options = {"warmup": 2, **options}
    return GraphReplay(fn, static=frozenset(static), written=frozenset(written), device=CPU, **options)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def state(length: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(length, 3), torch.zeros(1, dtype=torch.int64)


def test_a_static_cache_is_written_once_a_call_however_often_the_code_was_warmed_up():
    """Four steps fill a cache of four rows; a fifth, which a warm-up would make, is out of its range."""
    cache, position = state()
    expected, at = state()
    step = replay_of(decode, {0, 1}, warmup=3)
    for n in range(4):
        x = torch.full((1, 3), n + 1.0)
        assert torch.equal(step(cache, position, x)[0], decode(expected, at, x)[0])
        assert torch.equal(cache, expected) and torch.equal(position, at)
    assert step.captures == 1


def test_autograd_is_told_of_what_a_replay_writes():
    cache, position = state()
    step = replay_of(decode, {0, 1})
    step(cache, position, torch.ones(1, 3))
    version = cache._version
    step(cache, position, torch.ones(1, 3))
    assert cache._version > version


def test_a_cache_that_moved_is_captured_anew_and_one_that_comes_back_is_not():
    step = replay_of(decode, {0, 1})
    first, second = state(), state()
    for cache, position in (first, second, first, second):
        step(cache, position, torch.ones(1, 3))
    assert step.captures == 2
    assert first[0].sum() == second[0].sum() == 6 and first[1] == second[1] == 2


def test_memory_that_moves_on_every_call_ends_in_plain_calls():
    counted = Counting(decode)
    step = replay_of(counted, {0, 1}, warmup=1, captures=2)
    held = [state() for _ in range(6)]
    for cache, position in held:
        assert torch.equal(step(cache, position, torch.ones(1, 3))[0], torch.ones(3))
        assert position == 1 and cache.sum() == 3
    assert step.captures == 2
    assert counted.calls == 2 * 2 + 4  # two captures with their warm-up, and four plain calls
    step(*held[0], torch.ones(1, 3))
    assert counted.calls == 8, "what was captured is still replayed"


def test_after_a_hundred_calls_moved_memory_is_captured_again():
    step = replay_of(decode, {0, 1}, warmup=1, captures=1)
    first, second = state(200), state(200)
    for _ in range(99):
        step(*first, torch.ones(1, 3))
    step(*second, torch.ones(1, 3))
    assert step.captures == 2
    assert second[1] == 1 and second[0].sum() == 3


def test_a_parameter_whose_storage_is_swapped_is_read_where_it_is_now():
    weight = torch.nn.Parameter(torch.ones(3))
    scaled = replay_of(lambda w, x: [w * x], set(), {0})
    with torch.no_grad():
        assert torch.equal(scaled(weight, torch.ones(3))[0], torch.ones(3))
        old = weight.data
        weight.data = torch.full((3,), 2.0)  # the same Parameter, and no version tells
        assert torch.equal(scaled(weight, torch.ones(3))[0], torch.full((3,), 2.0))
        weight.data = old
        assert torch.equal(scaled(weight, torch.ones(3))[0], torch.ones(3))
    assert scaled.captures == 2


@pytest.mark.parametrize(
    ("fn", "written"),
    [
        (lambda cache, x: [cache.add_(x).sum()], True),
        (lambda cache, x: [cache.add_(x)], True),
        (lambda cache, x: [cache.add_(x), cache[1:], x * 2], True),
        (lambda cache, x: [cache.add_(x).view(torch.int32)[:, 1]], True),
        (lambda cache, x: [cache, cache[1:], x + 1], False),
    ],
    ids=["a sum", "itself", "views", "another type", "only read"],
)
def test_a_capture_does_not_keep_the_callers_memory(fn, written):
    memory = np.zeros((4, 3), dtype=np.float32)  # whose end tells that of the tensor's memory, not of the tensor alone
    held, cache = weakref.ref(memory), torch.from_numpy(memory)
    del memory
    step = replay_of(fn, {0} if written else set(), set() if written else {0})
    for n in range(3):
        out = step(cache, torch.ones(3))
        copy = torch.full((4, 3), float(n if written else 0))
        expected = fn(copy, torch.ones(3))
        assert all(map(torch.equal, out, expected))
        inside = [k for k, value in enumerate(expected) if same_memory(value, copy)]
        assert [k for k, value in enumerate(out) if same_memory(value, cache)] == inside
    for captured in (*step._captured, step._twin):
        if captured is not None:
            captured.graph.calls.clear()  # the stand-in's record of tensors, where a CUDA graph has addresses
    del cache, out
    gc.collect()
    assert held() is None


def test_a_conjugate_of_a_written_input_stays_one():
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.mul_(2).conj()]

    x, y = (torch.tensor([1 + 2j, 3 - 1j]) for _ in range(2))
    replay = replay_of(fn, {0})
    for _ in range(3):
        assert torch.equal(replay(x)[0].resolve_conj(), fn(y)[0].resolve_conj())


def test_several_inputs_and_outputs_of_mixed_types_are_copied():
    def fn(a: torch.Tensor, b: torch.Tensor, i: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
        return [a + b, a - c, i + 1, (a > 0).to(torch.int64)]

    replay = replay_of(fn, set())
    for seed in range(3):
        torch.manual_seed(seed)
        args = torch.randn(4), torch.randn(4), torch.arange(4) * seed, torch.randn(8)[::2]
        found, expected = replay(*args), fn(*args)
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(found, expected, strict=True))
    kept = [value.clone() for value in found]
    replay(*(value * 0 for value in args))
    assert all(torch.equal(x, y) for x, y in zip(found, kept, strict=True)), "an output was overwritten"
    assert replay.captures == 1 and replay.output_copies == 0, "what nobody holds is handed out where it lies"


def plus_one(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + 1]


def place(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def test_an_output_that_nobody_holds_is_handed_out_where_it_lies():
    replay = replay_of(plus_one, set())
    places = {place(replay(torch.full((3,), float(n)))[0]) for n in range(5)}
    assert places == {place(replay._captured[0].outputs[0])}
    assert replay.captures == 1 and replay._twin is None


@pytest.mark.parametrize("held", ["the output", "a view", "its storage", "numpy's", "DLPack's"])
def test_an_output_stays_what_it_was_while_anything_of_its_memory_is_held(held):
    hold: dict[str, Callable[[torch.Tensor], Any]] = {
        "the output": lambda out: out,
        "a view": lambda out: out[1:].view(2, 1),
        "its storage": torch.Tensor.untyped_storage,
        "numpy's": torch.Tensor.numpy,
        "DLPack's": lambda out: torch.from_dlpack(out),
    }
    replay = replay_of(plus_one, set())
    kept = hold[held](replay(torch.zeros(3))[0])
    others = [replay(torch.full((3,), float(n)))[0] for n in (1, 2, 3)]
    for n, other in enumerate(others, 1):
        assert torch.equal(other, torch.full((3,), n + 1.0))
    there = torch.empty(0).set_(kept) if held == "its storage" else torch.as_tensor(kept)
    assert there.unique().tolist() == [1.0]
    mine = place(replay._captured[0].outputs[0])
    assert mine not in map(place, others)
    del kept, there
    assert place(replay(torch.zeros(3))[0]) == mine, "it is free again"


def test_an_output_given_back_as_an_input_is_read_before_it_is_written():
    replay = replay_of(plus_one, set())
    x = torch.zeros(3)
    for n in range(6):
        x = replay(x)[0]
        assert torch.equal(x, torch.full((3,), n + 1.0))


def test_outputs_of_one_memory_are_handed_out_together_and_kept_together():
    def halves(x: torch.Tensor) -> list[torch.Tensor]:
        whole = x + 1
        return [whole[:2], whole[2:]]

    replay = replay_of(halves, set())
    first, second = replay(torch.zeros(4))
    assert place(first) == place(second)
    del first
    replay(torch.full((4,), 8.0))
    assert torch.equal(second, torch.ones(2)), "half of it is held"


def test_a_constant_of_the_code_is_never_handed_out():
    constant = torch.ones(3)
    replay = replay_of(lambda x: [x + 1, constant], set())
    for _ in range(3):
        replay(torch.zeros(3))[1].zero_()
    assert torch.equal(constant, torch.ones(3)) and replay.output_copies == 1


def test_an_output_that_was_resized_is_not_written_to_again():
    replay = replay_of(plus_one, set())
    out = replay(torch.zeros(3))[0]
    out.resize_(1000).fill_(7.0)
    del out
    for n in range(3):
        assert torch.equal(replay(torch.full((3,), float(n)))[0], torch.full((3,), n + 1.0))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_conjugated_and_negated_outputs_stay_what_they_are(mode):
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = torch.complex(x, 2 * x)
        return [y.conj(), y.conj().imag, y, torch.fft.rfft(x).conj()]

    replay = replay_of(fn, set())
    kept = []
    with mode():
        for n in range(3):
            x = torch.full((4,), n + 1.0)
            kept.append((replay(x), fn(x)))
        for found, expected in kept:
            assert all(torch.equal(a.resolve_conj(), b.resolve_conj()) for a, b in zip(found, expected, strict=True))
            assert len({place(out) for out in found[:3]}) == 1, "they lie in one memory"


def test_a_second_capture_is_rehearsed_with_the_inputs_of_its_call():
    """Those of the call before may be none that go with what is in the state now: here an index would be too large."""
    table = torch.arange(4.0)

    def fn(counter: torch.Tensor, offset: torch.Tensor) -> list[torch.Tensor]:
        found = table.index_select(0, counter + offset)
        counter.add_(1)
        return [found]

    replay, counter = replay_of(fn, {0}), torch.zeros(1, dtype=torch.int64)
    first = replay(counter, torch.tensor([3]))
    second = replay(counter, torch.tensor([2]))
    assert replay._twin is not None and first[0] == second[0] == 3 and counter == 2


def test_an_output_that_is_there_twice_is_one_tensor():
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = x + 1
        return [y, x * 2, y]

    replay = replay_of(fn, set())
    for _ in range(2):
        first, _, again = replay(torch.ones(3))
        assert first is again


def test_a_written_input_seen_as_another_type_is_not_handed_out():
    replay = replay_of(lambda x: [x.add_(1).view(torch.int32)], {0})
    x = torch.zeros(3)
    assert same_memory(replay(x)[0], x)
    assert replay._captured[0].lent == []
    held = weakref.ref(x)
    replay._captured[0].graph.calls.clear()  # the stand-in's record of tensors
    del x
    gc.collect()
    assert held() is None


def test_what_held_outputs_need_is_dropped_with_the_capture_that_hands_them_out():
    replay = replay_of(lambda x, n: [x * n], set(), captures=2)
    held = [replay(torch.ones(3), 2) for _ in range(2)]
    assert replay._twin is not None
    for _ in range(300):
        replay(torch.ones(3), 3)
    for n in (4, 5):
        held.append(replay(torch.ones(3), n))
    assert not any(one.lent for one in replay._captured) and replay._twin is None


def test_outputs_are_handed_out_again_after_what_their_own_stream_still_does(two_streams):
    streams, current = two_streams
    replay = replay_of(plus_one, set())
    first = replay(torch.zeros(3))[0]
    current[0] = 2
    second = replay(torch.zeros(3))[0]
    for stream in streams.values():
        stream.waited.clear()
    # Here stream 1 reads `first` once more, and the caller lets go of it.
    mine = place(first)
    del first
    third = replay(torch.zeros(3))[0]
    assert place(third) == mine and streams[2].waited == [1]
    del third, second
    replay(torch.zeros(3))
    assert streams[2].waited == [1], "its own stream need not wait"


def test_only_the_first_of_several_captures_hands_its_outputs_out():
    """They share memory: what a later one writes last, the first may write on its way."""
    replay = replay_of(lambda x, n: [x * n], set())
    for n in (2, 3, 4):
        replay(torch.ones(3), n)
    lent = {captured.constants[0][1]: len(captured.lent) for captured in replay._captured}
    assert lent == {2: 1, 3: 0, 4: 0}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("CUDA error: out of memory")], ids=str)
def test_without_memory_for_a_second_capture_the_code_runs_plainly(error, monkeypatch: pytest.MonkeyPatch):
    counted = Counting(plus_one)
    replay = replay_of(counted, set())
    first = replay(torch.zeros(3))[0]
    calls = counted.calls

    tried = []

    def none_left(*args: Any, **options: Any) -> Any:
        tried.append(None)
        raise error

    monkeypatch.setattr(passes.cuda_graphs, "_Captured", none_left)
    assert torch.equal(replay(torch.ones(3))[0], torch.full((3,), 2.0)) and torch.equal(first, torch.ones(3))
    replay(torch.ones(3))
    assert counted.calls == calls + 2 and tried == [None], "it is not tried again"


def test_what_was_captured_in_inference_mode_is_of_use_outside_of_it():
    replay = replay_of(plus_one, set())
    with torch.inference_mode():
        replay(torch.zeros(3))
    out = replay(torch.zeros(3))[0]
    assert not out.is_inference()
    assert torch.equal(torch.ones(3, requires_grad=True) * out, torch.ones(3))


def test_a_shape_changed_in_place_is_never_captured():
    counted = Counting(torch.Tensor.t_)
    replay = replay_of(counted, {0})
    x = torch.zeros(2, 3)
    replay(x)
    assert x.shape == (3, 2)
    replay(x)
    assert x.shape == (2, 3) and replay.captures == 0 and counted.calls == 3  # one of them on a copy


def test_calls_from_several_threads_each_count_once():
    cache, position = state(64)
    step = replay_of(decode, {0, 1})
    step(cache, position, torch.ones(1, 3))

    def work() -> None:
        for _ in range(15):
            step(cache, position, torch.ones(1, 3))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert position == 61 and cache.sum() == 3 * 61


def test_an_input_that_shares_memory_with_a_written_one_is_refused():
    def write(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.add_(1) + b

    graph = testing.capture(write, torch.zeros(2), torch.zeros(2))
    base = torch.zeros(4)
    result = testing.run(GraphsOnCpu(), graph, inputs=[base[:2], base[2:]])
    assert result.report.refused == (("graph", "input 1 shares memory with input 0, which the code writes to"),)
    assert testing.run(GraphsOnCpu(), graph, inputs=[torch.zeros(2), torch.zeros(2)]).changed


def test_an_expanded_input_is_refused():
    fixed, expanded = torch.ones(3, 4), torch.ones(4).expand(3, 4)
    graph, p = SimpleNamespace(mutated=frozenset()), GraphsOnCpu()
    assert p.refuse(graph, [fixed, fixed], testing.context(p)) == ""
    assert "several places" in p.refuse(graph, [fixed, expanded], testing.context(p))
    assert p.refuse(graph, [fixed, expanded], testing.context(p, static=frozenset({1}))) == "", "it is used where it is"


def test_random_numbers_and_other_kinds_of_inputs_are_refused():
    testing.refuses(GraphsOnCpu(), lambda x: x + torch.rand_like(x), torch.zeros(2), because="draws random numbers")
    graph = testing.capture(torch.relu, torch.zeros(2))
    result = testing.run(GraphsOnCpu(), graph, inputs=["text"])
    assert result.report.refused == (("graph", "input 0 is a str"),)


def test_a_call_on_another_stream_waits_for_the_one_before(two_streams):
    streams, current = two_streams
    replay = replay_of(lambda x: [x + 1], set())
    replay(torch.ones(3))
    for stream in streams.values():
        stream.waited.clear()  # the capture's own
    for address in (1, 2, 2, 1):
        current[0] = address
        assert torch.equal(replay(torch.ones(3))[0], torch.full((3,), 2.0))
    assert streams[2].waited == [1] and streams[1].waited == [2]


def test_numbers_choose_the_capture():
    replay = replay_of(lambda x, n: [x * n], set())
    for n in (2, 3, 2, 3, 2):
        assert torch.equal(replay(torch.ones(3), n)[0], torch.full((3,), float(n)))
    assert replay.captures == 2


def test_the_memory_that_a_graph_holds_is_that_of_its_copied_inputs_and_outputs():
    from fxopt import memory
    from fxopt.frozen import FrozenCode

    weight = torch.ones(8, 8)
    replay = replay_of(lambda x, w: [x @ w, x + 1], set(), {1})
    assert replay.held_bytes == 0, "nothing is captured yet"
    replay(torch.ones(4, 8), weight)
    assert replay.held_bytes == 3 * 4 * 8 * 4, "an input and two outputs; the parameter is the caller's"
    code = FrozenCode(replay, [0, 1], {1: weight})
    assert code.held_bytes == replay.held_bytes
    build = SimpleNamespace(fn=code, memory_bytes=100, compiled=SimpleNamespace(constants={}))
    assert memory.extra_bytes(build, []) == 100 + replay.held_bytes
