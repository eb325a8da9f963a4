"""Paired timing: how much faster is a candidate than the baseline, and how sure is that?

Two loops timed one after the other differ by what the machine did meanwhile (clocks, heat, neighbours). So
blocks of the two alternate, a ratio is taken within each pair, and the answer is the median of the ratios
with a confidence interval that assumes no distribution.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

import torch

__all__ = ["PairedResult", "compare", "host_ns", "median_interval", "noise_floor", "paired"]

MIN_PAIRS = 6
"""With fewer pairs not even (smallest, largest) covers the median with 95 %: 1 - 2 * 2^-5 = 93.75 %."""
MIN_NOISE = 0.01
"""Differences below 1 % are never called faster: code and data placement alone moves timings by more
(Mytkowicz et al., "Producing wrong data without doing anything obviously wrong!", ASPLOS 2009)."""
LITTLE_NOISE = 0.015
"""A/A runs with a wider interval than this go on, for up to four times the pairs: what the noise floor hides, no
comparison finds."""
MORE_PAIRS = 4
"""What is still open goes on for up to so many times the pairs, looked at whenever their number has doubled."""
CLOCK_SPREAD = 0.02
"""A run during which the SM clock moved by more than this share of its maximum is marked."""
_MAX_CALLS = 10_000


@dataclass(frozen=True)
class PairedResult:
    """ratio: median of baseline time / candidate time over the pairs (above 1: the candidate is faster). low,
    high: 95 % confidence interval of that median.

    pairs: pairs measured. baseline_ns, candidate_ns: median wall time per call. noise: the ratio by which two
    runs of the same code differ, less 1. clocks: the GPU's clocks meanwhile (ClockMonitor.summary(); {} on a
    CPU). marked: what casts doubt on the run, such as a clock that moved.
    """

    ratio: float
    low: float
    high: float
    pairs: int
    baseline_ns: float
    candidate_ns: float
    noise: float
    clocks: dict[str, Any]
    marked: tuple[str, ...]

    @property
    def faster(self) -> bool:
        """Whether the candidate is faster beyond doubt: the whole interval lies above the noise."""
        return self.low > 1 + self.noise

    @property
    def slower(self) -> bool:
        """Whether the candidate is slower beyond doubt: the whole interval lies below the noise."""
        return self.high < 1 / (1 + self.noise)

    @property
    def equal(self) -> bool:
        """Whether they are as fast as each other beyond doubt: the whole interval lies within the noise."""
        return 1 / (1 + self.noise) <= self.low and self.high <= 1 + self.noise

    @property
    def spelled(self) -> str:
        return f"{self.ratio:.3f}x, interval {self.low:.3f} to {self.high:.3f}, noise {self.noise:.1%}"

    @property
    def decided(self) -> bool:
        return self.faster or self.slower or self.equal

    @property
    def as_fast(self) -> bool:
        """Whether the candidate is as fast as the baseline, as far as the noise lets that be told: it is not shown to
        be slower, and neither does the median say so."""
        return not self.slower and self.ratio >= 1 / (1 + self.noise)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Distribution-free confidence interval of the median of independent ``values``.

    The number of values below the median is binomial(n, 1/2), so the j-th smallest and j-th largest enclose
    the median with probability 1 - 2 P(B < j); j is the largest that keeps ``confidence`` (H. A. David, H. N.
    Nagaraja, Order Statistics, 3rd ed., chapter 7). ValueError where n is too small for any such pair (n <
    6 at 95 %).
    """
    size = len(values)
    ordered = sorted(values)
    tail, rank = 0.0, 0
    while rank < size:
        tail += math.comb(size, rank) / 2**size  # P(B <= rank)
        if 2 * tail > 1 - confidence:
            break
        rank += 1
    if rank == 0:
        raise ValueError(f"{size} values give no {confidence:.0%} interval of their median")
    return ordered[rank - 1], ordered[size - rank]


def compare(
    baseline: Callable[..., Any],
    candidate: Callable[..., Any],
    input_sets: Sequence[Sequence[Any]],
    *,
    device: torch.device | str,
    pairs: int = 30,
    most_pairs: int | None = None,
    min_block_ns: int = 2_000_000,
    time_limit_s: float | None = None,
    noise: float | None = None,
    warmup: int = 3,
    timer: Callable[[], int] = time.perf_counter_ns,
) -> PairedResult:
    """Time ``candidate`` against ``baseline``, both called as fn(*inputs).

    A block is as many calls as last ``min_block_ns`` (ns), on one set of inputs; the sets take turns. Each
    side has its own number of calls, so that a much faster candidate does not make the baseline's blocks long;
    what is compared is time per call. A pair
    is a block of each, on the same set, in the order A B, then B A, so that steady drift cancels. Blocks are
    timed by the host's clock with the device synchronised at both ends: this is wall time per call, launches
    and host work included, as a caller sees it, and calls within a block overlap as they do in a loop. Inputs
    are handed over as they are: a callable that writes to them must stand being called again.

    pairs: rounded up to an even number, so that both orders occur equally often. most_pairs: go on to as many
    where it is open after ``pairs`` whether either is faster (None: ``pairs``). time_limit_s: stop after the
    pair of pairs that passes it, but not before MIN_PAIRS. noise: from ``noise_floor``; None measures it
    first, within a third of the time limit. ``timer``: clock in ns. Garbage collection is off while timing.
    ValueError for fewer than MIN_PAIRS pairs or no inputs.
    """
    device = torch.device(device)
    _check(input_sets, pairs)
    started = timer()
    if noise is None:
        share = None if time_limit_s is None else time_limit_s / 3
        noise = noise_floor(
            baseline,
            input_sets,
            device=device,
            pairs=pairs,
            min_block_ns=min_block_ns,
            time_limit_s=share,
            warmup=warmup,
            timer=timer,
        )
    return _timed(
        baseline,
        candidate,
        input_sets,
        device,
        lambda found: found.decided,
        pairs=pairs,
        most_pairs=most_pairs or pairs,
        min_block_ns=min_block_ns,
        deadline=math.inf if time_limit_s is None else started + time_limit_s * 1e9,
        noise=noise,
        warmup=warmup,
        timer=timer,
    )


def _timed(
    baseline: Callable[..., Any],
    candidate: Callable[..., Any],
    input_sets: Sequence[Sequence[Any]],
    device: torch.device,
    enough: Callable[[PairedResult], bool],
    *,
    pairs: int,
    most_pairs: int,
    min_block_ns: int,
    deadline: float,
    noise: float,
    warmup: int,
    timer: Callable[[], int],
) -> PairedResult:
    """`pairs` pairs; then as many as there are again, while `enough` says no and `most_pairs` and the deadline allow.

    Every look gives chance a turn, so there are few; and a difference has to exceed the noise, of which chance is a
    part, at each of them.
    """
    with _clock_monitor(device) as monitor:
        times: list[tuple[float, float]] = []
        blocks = _pairs_of_blocks(baseline, candidate, input_sets, device, min_block_ns, warmup, timer)
        with _garbage_collection_off(), closing(blocks):
            # Only whole A B, B A sequences: after an odd number of pairs drift would favour one side.
            wanted = pairs + pairs % 2
            for pair in blocks:
                times.append(pair)
                if monitor is not None:
                    monitor.sample()
                if len(times) % 2 == 0 and len(times) >= MIN_PAIRS and timer() >= deadline:
                    break
                if len(times) == wanted:
                    if len(times) >= most_pairs or enough(paired(times, noise)):
                        break
                    wanted = min(2 * wanted, most_pairs + most_pairs % 2)
        clocks: dict[str, Any] = monitor.summary() if monitor is not None else {}
    return paired(times, noise, clocks=clocks, marked=_marks(clocks, pairs, len(times)))


def paired(
    times: Sequence[tuple[float, float]],
    noise: float,
    *,
    clocks: dict[str, Any] | None = None,
    marked: tuple[str, ...] = (),
) -> PairedResult:
    """The result of pairs (baseline, candidate) of times per call in ns, wall or any other.

    ValueError for fewer than MIN_PAIRS pairs.
    """
    ratios = [before / after for before, after in times]
    low, high = median_interval(ratios)
    return PairedResult(
        ratio=float(median(ratios)),
        low=float(low),
        high=float(high),
        pairs=len(times),
        baseline_ns=float(median(before for before, _ in times)),
        candidate_ns=float(median(after for _, after in times)),
        noise=float(noise),
        clocks=clocks or {},
        marked=marked,
    )


def noise_floor(
    fn: Callable[..., Any],
    input_sets: Sequence[Sequence[Any]],
    *,
    device: torch.device | str,
    pairs: int = 30,
    min_block_ns: int = 2_000_000,
    time_limit_s: float | None = None,
    warmup: int = 3,
    timer: Callable[[], int] = time.perf_counter_ns,
) -> float:
    """Ratio, less 1, that this machine reports between ``fn`` and itself: half the width of the 95 % interval
    of an A/A run, or how far that interval reaches from 1 where it lies to one side, at least MIN_NOISE.
    Arguments as for ``compare``; where that is more than LITTLE_NOISE, up to MORE_PAIRS times the pairs."""
    device = torch.device(device)
    _check(input_sets, pairs)
    same = _timed(
        fn,
        fn,
        input_sets,
        device,
        lambda found: _floor(found) <= LITTLE_NOISE,
        pairs=pairs,
        most_pairs=MORE_PAIRS * pairs,
        min_block_ns=min_block_ns,
        deadline=math.inf if time_limit_s is None else timer() + time_limit_s * 1e9,
        noise=0.0,
        warmup=warmup,
        timer=timer,
    )
    return _floor(same)


def _floor(same: PairedResult) -> float:
    bias = max(same.low - 1, 1 - same.high)
    return max(MIN_NOISE, (same.high - same.low) / 2, bias)


def host_ns(fn: Callable[..., Any], inputs: Sequence[Any], *, device: torch.device | str, calls: int = 11) -> float:
    """How long a call of ``fn`` keeps the CPU busy, ns: until it returns, with nothing queued before it. The median."""
    device = torch.device(device)
    taken = []
    for _ in range(calls):
        _synchronize(device)
        begin = time.perf_counter_ns()
        fn(*inputs)
        taken.append(time.perf_counter_ns() - begin)
    _synchronize(device)
    return float(median(taken))


def _check(input_sets: Sequence[Sequence[Any]], pairs: int) -> None:
    if not input_sets:
        raise ValueError("timing needs at least one set of inputs")
    if pairs < MIN_PAIRS:
        raise ValueError(f"pairs={pairs}: a 95 % interval of a median needs at least {MIN_PAIRS}")


def _pairs_of_blocks(
    baseline: Callable[..., Any],
    candidate: Callable[..., Any],
    input_sets: Sequence[Sequence[Any]],
    device: torch.device,
    min_block_ns: int,
    warmup: int,
    timer: Callable[[], int],
) -> Generator[tuple[float, float]]:
    """(baseline, candidate) time per call of each pair of blocks, in ns, for ever."""

    def block(fn: Callable[..., Any], inputs: Sequence[Any], calls: int) -> int:
        _synchronize(device)
        begin = timer()
        for _ in range(calls):
            fn(*inputs)
        _synchronize(device)
        return timer() - begin

    for inputs in input_sets:
        for fn in (baseline, candidate):
            block(fn, inputs, warmup)
    sides = [
        (fn, _calls_to_fill(min_block_ns, lambda n, fn=fn: block(fn, input_sets[0], n)))  # type: ignore[misc]
        for fn in (baseline, candidate)
    ]
    for pair in count():
        # By twos, so that each set is measured in both orders whatever their number.
        inputs = input_sets[pair // 2 % len(input_sets)]
        turn = sides if pair % 2 == 0 else sides[::-1]
        taken = [max(block(fn, inputs, calls), 1) / calls for fn, calls in turn]
        before, after = taken if pair % 2 == 0 else taken[::-1]
        yield before, after


def _calls_to_fill(min_block_ns: int, block: Callable[[int], int]) -> int:
    """Calls that last at least ``min_block_ns`` together, found by growing the block."""
    calls = 1
    while calls < _MAX_CALLS:
        taken = block(calls)
        if taken >= min_block_ns:
            break
        grown = math.ceil(1.1 * calls * min_block_ns / max(taken, 1))
        calls = min(_MAX_CALLS, max(calls + 1, min(grown, 10 * calls)))
    return calls


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _clock_monitor(device: torch.device) -> Iterator[Any]:
    """A ClockMonitor on CUDA devices, None elsewhere."""
    if device.type != "cuda":
        yield None
        return
    from profiler_core.clocks import ClockMonitor

    with ClockMonitor(device) as monitor:
        monitor.sample()
        yield monitor


def _marks(clocks: dict[str, Any], asked: int, measured: int) -> tuple[str, ...]:
    marks = []
    if clocks.get("spread", 0.0) > CLOCK_SPREAD:
        marks.append(
            f"the SM clock moved between {clocks.get('sm_mhz_min')} and {clocks.get('sm_mhz_max')} MHz"
        )
    if clocks.get("throttled"):
        marks.append(f"throttled: {', '.join(clocks['throttled'])}")
    if busy := clocks.get("busy_processes"):
        marks.append(f"{busy} other process{'es' * (busy > 1)} used the GPU meanwhile")
    if measured < asked:
        marks.append(f"stopped by the time limit after {measured} of {asked} pairs")
    return tuple(marks)
