"""Paired timing, on a clock that only the timed functions advance."""

from __future__ import annotations

import gc
import random
import sys
import types
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from fxopt import measure
from fxopt.measure import compare, median_interval, noise_floor

MICROSECOND = 1_000


class Machine:
    """A clock, and functions that take known times on it."""

    def __init__(self) -> None:
        self.now = 0
        self.calls: list[tuple[str, object]] = []

    def timer(self) -> int:
        return self.now

    def function(self, name: str, cost: Callable[[], float]) -> Callable[..., None]:
        def run(*inputs: object) -> None:
            self.calls.append((name, inputs[0] if inputs else None))
            self.now += round(cost())

        return run


def noisy(microseconds: float, spread: float, seed: int) -> Callable[[], float]:
    source = random.Random(seed)
    return lambda: microseconds * MICROSECOND * source.uniform(1 - spread, 1 + spread)


def run(machine, baseline, candidate, sets=((1,), (2,)), **options):
    options.setdefault("min_block_ns", 200 * MICROSECOND)
    return compare(baseline, candidate, sets, device="cpu", timer=machine.timer, **options)


def test_the_same_code_is_never_faster_than_itself():
    machine = Machine()
    for seed in range(8):
        left = machine.function("a", noisy(50, 0.05, 2 * seed))
        right = machine.function("b", noisy(50, 0.05, 2 * seed + 1))
        assert not run(machine, left, right).faster


def test_five_percent_with_little_noise_is_found():
    machine = Machine()
    result = run(
        machine,
        machine.function("a", noisy(105, 0.01, 1)),
        machine.function("b", noisy(100, 0.01, 2)),
        noise=0.01,
    )
    assert result.faster
    assert result.low <= result.ratio <= result.high
    assert result.ratio == pytest.approx(1.05, rel=0.01)
    assert result.baseline_ns == pytest.approx(105_000, rel=0.01)
    assert result.candidate_ns == pytest.approx(100_000, rel=0.01)
    assert result.pairs == 30 and result.marked == () and result.clocks == {}


def test_a_gain_within_the_noise_is_not_faster():
    machine = Machine()
    a, b = machine.function("a", noisy(102, 0.001, 1)), machine.function("b", noisy(100, 0.001, 2))
    assert run(machine, a, b, noise=0.01).faster
    assert not run(machine, a, b, noise=0.03).faster


def test_a_slower_candidate_is_not_faster():
    machine = Machine()
    result = run(
        machine, machine.function("a", noisy(100, 0.01, 1)), machine.function("b", noisy(105, 0.01, 2))
    )
    assert not result.faster and result.high < 1


@pytest.mark.parametrize("fresh", [1, 2, 3])
def test_a_candidate_that_is_faster_on_the_tuning_inputs_alone_is_not_faster(fresh):
    machine = Machine()
    source = random.Random(fresh)

    def run_on(cost: Callable[[object], float]) -> Callable[..., None]:
        def fn(values: object) -> None:
            machine.now += round(cost(values) * MICROSECOND * source.uniform(0.98, 1.02))

        return fn

    baseline, special = run_on(lambda values: 60), run_on(lambda values: 20 if values == "tuning" else 60)
    sets = [("tuning",), *((f"fresh {number}",) for number in range(fresh))]
    assert not run(machine, baseline, special, sets=sets, noise=0.01).faster
    assert run(machine, baseline, special, sets=sets[:1], noise=0.01).faster, "which is why there are fresh ones"


def test_drift_that_slows_both_down_favours_neither():
    machine = Machine()
    # Both slow down with time: over the run, a block gets about three times slower.
    cost = lambda: 50 * MICROSECOND * (1 + machine.now / 20e6)  # noqa: E731
    result = run(machine, machine.function("a", cost), machine.function("b", cost), noise=0.01)
    assert machine.now > 20e6
    assert result.ratio == pytest.approx(1.0, abs=0.003)
    assert not result.faster


def test_outliers_do_not_flip_the_answer():
    machine = Machine()
    steady = noisy(100, 0.002, 1)
    count = iter(range(10**9))
    hiccup = lambda: 95 * MICROSECOND + (50_000 * MICROSECOND if next(count) % 40 == 39 else 0)  # noqa: E731
    result = run(machine, machine.function("a", steady), machine.function("b", hiccup), noise=0.01)
    assert result.faster and result.ratio == pytest.approx(100 / 95, rel=0.01)


def test_blocks_last_long_enough_and_alternate_on_rotating_inputs():
    machine = Machine()
    a, b = machine.function("a", lambda: 60 * MICROSECOND), machine.function("b", lambda: 50 * MICROSECOND)
    run(machine, a, b, sets=(("x",), ("y",)), pairs=8, noise=0.0, warmup=0)
    calls = {"a": 4, "b": 5}  # 200 us of 60 us and of 50 us each, with a tenth to spare
    measured = machine.calls[-8 * sum(calls.values()) :]
    blocks = []
    while measured:
        blocks.append(measured[0])
        assert measured[: calls[measured[0][0]]] == [measured[0]] * calls[measured[0][0]]
        measured = measured[calls[measured[0][0]] :]
    order = [("a", "b"), ("b", "a")]
    expected = [(name, "xy"[pair // 2 % 2]) for pair in range(8) for name in order[pair % 2]]
    assert blocks == expected


def test_a_much_faster_candidate_does_not_make_the_baselines_blocks_long():
    machine = Machine()
    slow = machine.function("slow", lambda: 2_000 * MICROSECOND)
    fast = machine.function("fast", lambda: 2 * MICROSECOND)
    result = run(machine, slow, fast, pairs=6, noise=0.01, warmup=0)
    assert (result.ratio, result.baseline_ns, result.candidate_ns) == pytest.approx((1000, 2e6, 2e3))
    assert [name for name, _ in machine.calls].count("slow") == 1 + 6, "one call fills a block"


def test_as_fast_means_not_shown_to_be_slower_and_a_median_within_the_noise():
    def result(*ratios):
        return measure.paired([(ratio, 1.0) for ratio in ratios], noise=0.02)

    assert result(*[0.995] * 6).as_fast and not result(*[0.995] * 6).slower
    sure, unsure = result(*[0.9] * 6), result(0.9, 0.9, 0.9, 0.9, 1.1, 1.1)
    assert sure.slower and not sure.as_fast
    assert not unsure.slower and not unsure.as_fast, "the interval reaches above 1, but the median lies below the noise"
    assert result(*[1.2] * 6).as_fast


def test_the_noise_is_measured_when_it_is_not_given():
    machine = Machine()
    a = machine.function("a", noisy(100, 0.2, 1))
    assert run(machine, a, a, min_block_ns=1).noise > measure.MIN_NOISE
    assert noise_floor(machine.function("a", lambda: 1000), [(1,)], device="cpu", timer=machine.timer) == 0.01


def test_the_noise_counts_a_one_sided_difference_between_a_function_and_itself():
    machine = Machine()
    turn = iter(range(10**9))
    # Every second half of an A B pair and first half of a B A pair is slow, so the interval lies beside 1.
    cost = lambda: 100 * MICROSECOND * (1.3 if next(turn) % 4 in (0, 3) else 1.0)  # noqa: E731
    floor = noise_floor(
        machine.function("a", cost),
        [(1,)],
        device="cpu",
        timer=machine.timer,
        warmup=0,
        min_block_ns=1,
        pairs=8,
    )
    assert floor > 0.2


def test_the_time_limit_ends_the_run_after_enough_pairs_and_says_so():
    machine = Machine()
    slow = machine.function("a", lambda: 1e9)
    result = run(machine, slow, slow, pairs=30, time_limit_s=1.0, noise=0.01)
    assert result.pairs == measure.MIN_PAIRS
    assert result.marked == ("stopped by the time limit after 6 of 30 pairs",)
    later = run(machine, slow, slow, pairs=30, time_limit_s=29.0, noise=0.01)
    assert measure.MIN_PAIRS < later.pairs < 30 and later.pairs % 2 == 0


def test_what_the_first_pairs_leave_open_is_measured_longer_and_what_they_decide_is_not():
    machine = Machine()
    close = machine.function("a", noisy(100, 0.1, 3)), machine.function("b", noisy(103, 0.1, 4))
    short, long = (run(machine, *close, noise=0.015, pairs=10, most_pairs=most) for most in (None, 1000))
    assert short.pairs == 10 and not short.decided
    assert long.decided and long.slower and 10 < long.pairs < 1000
    far = machine.function("a", noisy(100, 0.1, 5)), machine.function("b", noisy(200, 0.1, 6))
    assert run(machine, *far, noise=0.015, pairs=10, most_pairs=1000).pairs == 10
    same = machine.function("a", noisy(100, 0.001, 7)), machine.function("b", noisy(100, 0.001, 8))
    result = run(machine, *same, noise=0.015, pairs=10, most_pairs=1000)
    assert result.equal and result.pairs == 10
    open_still = run(machine, *close, noise=0.03, pairs=10, most_pairs=25)
    assert open_still.pairs == 26, "an even number"
    assert not open_still.marked


def test_the_time_limit_also_ends_what_is_measured_longer():
    machine = Machine()
    close = machine.function("a", noisy(100, 0.1, 3)), machine.function("b", noisy(103, 0.1, 4))
    result = run(machine, *close, noise=0.03, pairs=10, most_pairs=1000, time_limit_s=0.05)
    assert 10 < result.pairs < 1000 and not result.marked, "the pairs that were asked for were measured"


def test_a_noisy_floor_is_measured_longer_and_comes_out_lower():
    machine = Machine()
    pairs: list[int] = []

    def floor(spread: float) -> float:
        before = len(machine.calls)
        fn = machine.function("a", noisy(100, spread, 1))
        found = noise_floor(fn, [(1,)], device="cpu", timer=machine.timer, warmup=0, min_block_ns=1, pairs=30)
        pairs.append((len(machine.calls) - before - 2) // 2)
        return found

    assert floor(0.005) == measure.MIN_NOISE and pairs[-1] == 30
    assert measure.MIN_NOISE <= floor(0.05) <= measure.LITTLE_NOISE and pairs[-1] in (60, 120)
    assert floor(0.5) > measure.LITTLE_NOISE and pairs[-1] == 120


def test_garbage_collection_is_off_while_timing_and_restored():
    machine = Machine()
    seen = []
    fn = machine.function("a", lambda: seen.append(gc.isenabled()) or 1000)
    assert gc.isenabled()
    run(machine, fn, fn, warmup=0, noise=0.0, pairs=6)
    assert seen and not any(seen)
    assert gc.isenabled()

    def fails(*_):
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(machine, fn, fails, warmup=0, noise=0.0)
    assert gc.isenabled()
    gc.disable()
    try:
        run(machine, fn, fn, warmup=0, noise=0.0)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("count", "ranks"),  # from tables of the binomial with p = 1/2
    [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (12, (3, 10)), (15, (4, 12)), (20, (6, 15)), (30, (10, 21))],
)
def test_the_interval_of_the_median_takes_the_tabulated_ranks(count, ranks):
    values = [float(v) for v in range(1, count + 1)]
    random.Random(0).shuffle(values)
    assert median_interval(values) == ranks


def test_the_interval_covers_the_median_as_often_as_it_says():
    source = random.Random(7)
    hits = 0
    for _ in range(2000):
        low, high = median_interval([source.expovariate(1.0) for _ in range(20)])
        hits += low <= 0.6931471805599453 <= high
    assert 0.945 < hits / 2000 < 0.985  # exact: 95.9 %


def test_too_few_pairs_or_no_inputs_are_refused():
    machine = Machine()
    fn = machine.function("a", lambda: 1000)
    with pytest.raises(ValueError, match=r"pairs=5.*at least 6"):
        run(machine, fn, fn, pairs=5)
    with pytest.raises(ValueError, match="input"):
        run(machine, fn, fn, sets=())
    with pytest.raises(ValueError, match="interval"):
        median_interval([1.0] * 5)


class FakeMonitor:
    summary_value: ClassVar[dict] = {}
    samples = 0

    def __init__(self, device):
        assert device.type == "cuda"

    def __enter__(self):
        type(self).samples = 0
        return self

    def __exit__(self, *_):
        return None

    def sample(self):
        type(self).samples += 1

    def summary(self):
        return self.summary_value


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        (
            {"samples": 7, "spread": 0.1, "sm_mhz_min": 1782, "sm_mhz_max": 1980, "throttled": []},
            ["1782", "1980"],
        ),
        ({"samples": 7, "spread": 0.0, "throttled": ["sw_power_cap"]}, ["sw_power_cap"]),
        ({"samples": 7, "busy_processes": 2, "other_processes": 3}, ["2 other processes used the GPU"]),
        ({"samples": 7, "busy_processes": 0, "other_processes": 3}, []),
        ({"samples": 7, "spread": 0.02, "sm_mhz_min": 1941, "sm_mhz_max": 1980, "throttled": []}, []),
        ({"samples": 0, "unavailable": "NVML cannot be loaded"}, []),
    ],
)
def test_a_run_on_a_gpu_whose_clocks_moved_is_marked(monkeypatch, summary, words):
    module = types.ModuleType("profiler_core.clocks")
    module.ClockMonitor = FakeMonitor
    monkeypatch.setitem(sys.modules, "profiler_core.clocks", module)
    monkeypatch.setattr(FakeMonitor, "summary_value", summary)
    waits = []
    monkeypatch.setattr(measure, "_synchronize", lambda device: waits.append(device))
    machine = Machine()
    fn = machine.function("a", lambda: 1000)
    result = compare(fn, fn, [(1,)], device="cuda", timer=machine.timer, pairs=6, noise=0.01, min_block_ns=1)
    assert result.clocks == summary
    assert bool(result.marked) == bool(words)
    assert all(word in result.marked[0] for word in words)
    assert FakeMonitor.samples == 7  # before the first pair and after each
    assert waits == [torch.device("cuda")] * len(waits) and len(waits) >= 2 * 2 * 6
