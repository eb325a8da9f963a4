"""Trials: what is recorded of each, what decides, and that no code is built twice or held longer than needed."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from fxopt import measure, memory, trials, verify
from fxopt.calls import Calls
from fxopt.measure import PairedResult
from fxopt.options import resolve_options
from fxopt.registry import GraphPass, PassReport, RuntimePass, Stage, spelled
from fxopt.report.model import GraphReport, to_plain
from fxopt.search import Proposal, Step
from fxopt.trials import Trials
from fxopt.verify import parse_precision


@dataclass(frozen=True)
class Tile(GraphPass):
    name: ClassVar[str] = "tile"
    stage: ClassVar[Stage] = Stage.JOINT
    size: int = 1


@dataclass(frozen=True)
class Fuse(GraphPass):
    name: ClassVar[str] = "fuse"
    stage: ClassVar[Stage] = Stage.JOINT


class Code:
    """Compiled code that takes known times."""

    errors: ClassVar[list[str]] = []
    constants: ClassVar[list[torch.Tensor]] = []
    effective = True
    seconds = 1.5
    held_bytes = 0

    def __init__(self, passes, wall, kernels, extra):
        self.passes, self.extra = list(passes), extra
        self.fn = lambda *inputs: None
        self.fn.times = (wall, kernels)
        self.reports = [PassReport(p.name, "joint", 1, 1, changed=True) for p in passes]


class Bench:
    """`times` maps names of passes to (wall, kernel time) of their code; `extra` to its memory."""

    def __init__(self, monkeypatch, times, extra=None, **options):
        self.times, self.extra, self.built = times, extra or {}, []
        monkeypatch.setattr(measure, "noise_floor", lambda *a, **k: 0.01)
        monkeypatch.setattr(measure, "compare", self.compare)
        monkeypatch.setattr(Trials, "kernel_ns", lambda self, fn: fn.times[1])
        monkeypatch.setattr(memory, "extra_bytes", lambda build, inputs: build.extra)
        monkeypatch.setattr(trials.dynamo, "copy_graph", lambda gm: gm)
        self.verdict = SimpleNamespace(ok=True, reason="")
        monkeypatch.setattr(verify, "verify", lambda *a, **k: self.verdict)
        baseline = lambda *inputs: None  # noqa: E731
        baseline.times = (100.0, 100.0)
        self.report = GraphReport()
        gm = torch.fx.symbolic_trace(lambda: 0)
        plain = {"static": frozenset(), "mutated": frozenset(), "wanted": ()}
        self.trials = Trials(
            [],
            SimpleNamespace(context=SimpleNamespace(budget=parse_precision("fp32")), build=self.build),
            baseline,
            Calls(gm, [], **plain, device=torch.device("cpu"), count=0),
            resolve_options(options, environ={}),
            self.report,
            {"device_type": "cpu"},
            lambda what: None,
        )

    def build(self, passes):
        key = "+".join(map(spelled, passes))
        self.built.append(key)
        return Code(passes, *self.times[key], self.extra.get(key, 0))

    @staticmethod
    def compare(first, second, sets, **options):
        ratio = first.times[0] / second.times[0]
        return PairedResult(ratio, 0.995 * ratio, 1.005 * ratio, 6, first.times[0], second.times[0], 0.01, {}, ())

    def trial(self, *passes, best=None, removal=False, proposal=None):
        return self.trials.evaluate(Step(passes, passes[-1], removal, proposal), best)


def test_a_trial_is_recorded_with_its_evidence(monkeypatch):
    bench = Bench(monkeypatch, {"fuse+tile[size=4]": (50.0, 40.0)}, extra={"fuse+tile[size=4]": 1000})
    bench.trial(Fuse(), Tile(4), proposal=Proposal((Tile(4),), 7.0, {"A": 7.0}))
    (entry,) = bench.report.candidates
    assert entry.name == "fuse+tile[size=4]" and entry.passes == ["fuse", "tile"]
    assert (entry.step, entry.subject, entry.subject_options) == ("add", "tile", {"size": 4})
    assert entry.options == {"fuse": {}, "tile": {"size": 4}}
    assert (entry.headroom_ns, entry.headroom_by_class) == (7.0, {"A": 7.0})
    assert entry.paired.ratio == 2.0 and entry.paired.low < 2.0 < entry.paired.high
    assert (entry.kernel_ns, entry.compile_seconds, entry.memory_bytes, entry.peak_bytes) == (40.0, 1.5, 1000, None)
    assert entry.verdict is bench.verdict and entry.reports[0].name == "fuse"
    assert to_plain(entry)["options"]["tile"] == {"size": 4}


def test_one_set_is_built_once_while_anybody_holds_it_and_not_held_by_the_trials(monkeypatch):
    bench = Bench(monkeypatch, {"fuse": (50.0, 50.0), "tile": (40.0, 40.0)})
    fuse = bench.trial(Fuse())
    assert bench.trials.build([Fuse()]) is fuse.build and bench.built == ["fuse"]
    lost = weakref.ref(fuse.build)
    bench.report.candidates.clear()
    del fuse
    gc.collect()
    assert lost() is None, "its memory is free for the next candidate"
    assert spelled(Tile()) == "tile" and spelled(Tile(2)) == "tile[size=2]"


def test_an_ablation_reuses_what_was_built_for_it(monkeypatch):
    times = {"fuse": (80.0, 80.0), "tile": (50.0, 50.0), "fuse+tile": (40.0, 40.0)}
    bench = Bench(monkeypatch, times, ablate=True)
    fuse = bench.trial(Fuse())
    best = bench.trial(Fuse(), Tile(), best=fuse)
    bench.trials.evaluate(Step((Tile(),), Fuse(), removal=True), best)
    del fuse
    gc.collect()
    rows = bench.trials.ablate(best.passes)
    assert bench.built == ["fuse", "fuse+tile", "tile"], "nothing more for the ablation"
    assert [(row.name, row.alone.wall.ratio, row.removed.wall.ratio) for row in rows] == [
        ("fuse", 1.25, 1.25),
        ("tile", 2.0, 2.0),
    ]
    assert rows[0].removed.kernel_ns == 50.0 and rows[0].removed.kernel.ratio == 1.25
    gc.collect()
    assert list(bench.trials._alive.values()) == [best.build], "and then lets go of it"


def test_a_set_that_fails_in_the_ablation_is_a_reason(monkeypatch):
    bench = Bench(monkeypatch, {"fuse+tile": (40.0, 40.0), "tile": (50.0, 50.0)})
    best = bench.trial(Fuse(), Tile())
    fuse, tile = bench.trials.ablate(best.passes)
    assert fuse.alone is None and fuse.reason == "alone: KeyError: 'fuse'" and fuse.removed.wall.ratio == 1.25
    assert tile.alone.wall.ratio == 2.0


@pytest.mark.parametrize(("limit", "kept"), [(None, True), (2 << 20, True), ((2 << 20) - 1, False), ("0%", False)])
def test_memory_is_a_limit(monkeypatch, limit, kept):
    bench = Bench(monkeypatch, {"fuse": (50.0, 50.0)}, extra={"fuse": 2 << 20}, memory_limit=limit)
    assert (bench.trial(Fuse()) is not None) is kept
    (entry,) = bench.report.candidates
    assert entry.memory_bytes == 2 << 20, "reported either way"
    if not kept:
        assert entry.outcome == "rejected" and "it takes 2.00 MiB more memory than the baseline" in entry.reason


def test_what_code_keeps_allocated_is_told_by_every_trial_of_it(monkeypatch):
    bench = Bench(monkeypatch, {"fuse": (50.0, 50.0), "fuse+tile": (40.0, 40.0)})
    on_device = 100
    monkeypatch.setattr(memory, "allocated", lambda device: on_device)

    def build(passes, real=bench.build):
        nonlocal on_device
        on_device += 30
        return real(passes)

    monkeypatch.setattr(bench.trials.builder, "build", build)
    fuse = bench.trial(Fuse())
    both = bench.trial(Fuse(), Tile(), best=fuse)
    again = bench.trial(Fuse(), best=both, removal=True)
    assert again.build is fuse.build
    assert [entry.memory_bytes for entry in bench.report.candidates] == [30, 30, 30]


def test_what_a_call_takes_at_its_peak_counts_beyond_the_baselines(monkeypatch):
    bench = Bench(monkeypatch, {"fuse": (50.0, 50.0)}, memory_limit=1 << 20)
    peaks = {"now": 3 << 20}
    monkeypatch.setattr(memory, "peak_bytes", lambda call, device: peaks["now"])
    bench.report.baseline_peak_bytes = 2 << 20
    assert bench.trial(Fuse()) is not None
    peaks["now"] += 1
    assert bench.trial(Fuse()) is None
    assert "and 1.00 MiB during a call" in bench.report.candidates[-1].reason


def test_memory_that_the_caller_holds_anyway_is_not_counted():
    weight, packed = torch.zeros(10), torch.zeros(5)
    constants = {"w": weight.view(2, 5), "p": packed}
    build = SimpleNamespace(memory_bytes=60, compiled=SimpleNamespace(constants=constants), fn=None)
    assert memory.extra_bytes(build, [weight, 3]) == 20
    assert memory.extra_bytes(build, []) == 60


def test_a_share_of_memory_is_one_of_the_devices():
    device = torch.device("cpu")
    assert memory.limit_bytes(None, device) is None and memory.limit_bytes(7, device) == 7
    assert 0 < memory.limit_bytes("10%", device) * 5 <= memory.limit_bytes("50%", device) + 5


def test_a_wrong_result_is_no_candidate_whatever_its_speed(monkeypatch):
    bench = Bench(monkeypatch, {"fuse": (1.0, 1.0)})
    bench.verdict = SimpleNamespace(ok=False, reason="error above the limit")
    assert bench.trial(Fuse()) is None
    assert bench.report.candidates[0].reason == "wrong: error above the limit"


# -- what decides -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "wall", "kernels", "wins"),
    [
        ("wall", 90.0, 120.0, True),
        ("wall", 99.5, 50.0, False),
        ("kernel", 110.0, 90.0, True),
        ("kernel", 90.0, 100.5, True),  # a tie of the kernels, so the faster call
        ("kernel", 50.0, 102.0, False),
        ("kernel", 100.0, 99.5, False),
    ],
)
def test_the_objective_decides_and_the_wall_breaks_ties_of_the_kernels(monkeypatch, objective, wall, kernels, wins):
    bench = Bench(monkeypatch, {"fuse": (wall, kernels)}, objective=objective)
    trial = bench.trial(Fuse())
    assert bench.trials.faster(trial.entry, None) is wins
    assert bench.trials.confirm(trial) is wins, "the last comparison asks the same"


@pytest.mark.parametrize(
    ("objective", "wall", "kernels", "as_fast"),
    [
        ("wall", 100.5, 200.0, True),
        ("wall", 102.0, 50.0, False),
        ("kernel", 100.0, 100.5, True),
        ("kernel", 100.0, 102.0, False),
        ("kernel", 150.0, 100.0, False),
        ("kernel", 150.0, 90.0, True),
    ],
)
def test_a_pass_is_dropped_only_where_nothing_is_lost_by_the_objective(monkeypatch, objective, wall, kernels, as_fast):
    bench = Bench(monkeypatch, {"fuse": (wall, kernels)}, objective=objective)
    assert bench.trials.as_fast(bench.trial(Fuse()).entry, None) is as_fast


def test_shorter_kernels_with_a_slower_call_are_kept_for_the_kernel_objective_and_the_report_says_so(monkeypatch):
    bench = Bench(monkeypatch, {"fuse": (150.0, 50.0)}, objective="kernel")
    assert bench.trials.confirm(bench.trial(Fuse()))
    (message,) = bench.report.messages
    assert "kernels are 2.00x as fast" in message and "a call is slower: 0.67x its speed" in message
    assert (bench.report.baseline_kernel_ns, bench.report.kept_kernel_ns) == (100.0, 50.0)
    assert bench.report.kernel_ratio.ratio == 2.0 and bench.report.kernel_ratio.pairs == measure.MIN_PAIRS


def test_a_result_that_the_last_comparison_does_not_confirm_is_not_kept(monkeypatch):
    bench = Bench(monkeypatch, {"fuse": (100.0, 50.0)}, objective="kernel")
    best = bench.trial(Fuse())
    best.build.fn.times = (100.0, 100.0)
    assert not bench.trials.confirm(best)
    assert best.entry.outcome == "rejected"
    assert "not shown to be faster than the baseline in the last" in best.entry.reason
    assert "interval" in best.entry.reason and "noise" in best.entry.reason
    assert bench.report.kept_kernel_ns is None


def test_kernels_are_measured_in_turns(monkeypatch):
    bench = Bench(monkeypatch, {})
    order: list[str] = []
    monkeypatch.setattr(bench.trials, "kernel_ns", lambda fn: order.append(fn) or {"a": 2.0, "b": 1.0}[fn])
    found: Any = bench.trials.compare_kernels("a", "b")
    assert "".join(order) == "abba" * (measure.MIN_PAIRS // 2)
    assert (found.ratio, found.baseline_ns, found.candidate_ns) == (2.0, 2.0, 1.0)


@dataclass(frozen=True)
class Wrap(RuntimePass):
    name: ClassVar[str] = "wrap"
    stage: ClassVar[Stage] = Stage.RUNTIME


def test_an_idle_pass_and_a_wrapping_one_cost_no_compilation(monkeypatch):
    bench = Bench(monkeypatch, {"tile": (50.0, 50.0)})
    builder = bench.trials.builder
    builder.idle = lambda p, build: "no such node" if p.name == "fuse" else ""
    builder.rewrapped = lambda build, passes: Code(passes, 25.0, 50.0, 0)
    tiled = bench.trials.evaluate(Step((Tile(),), Tile()), None)
    idle = Fuse()
    assert bench.trials.evaluate(Step((Tile(), idle), idle), tiled) is None
    assert bench.report.candidates[-1].reason == "fuse found nothing to do: no such node"
    wrap = Wrap()
    both = bench.trials.evaluate(Step((Tile(), wrap), wrap), tiled)
    assert both is not None and both.entry.paired.ratio == 2.0
    assert bench.built == ["tile"]


def test_a_pass_that_finds_nothing_to_do_beside_another_variant_leaves(monkeypatch):
    """A variant of one pass may take what another one worked on; that is no reason against the variant."""

    def build(self, passes):
        code = Code(passes, *self.times["+".join(map(spelled, passes))], 0)
        if Tile(2) in passes and Fuse() in passes:
            idle = PassReport("fuse", "joint", 1, 0, refused=(("mm", "no product is left"),))
            code.reports, code.effective = [code.reports[0], idle], False
        return code

    monkeypatch.setattr(Bench, "build", build)
    times = {"tile+fuse": (50.0, 50.0), "tile[size=2]+fuse": (25.0, 25.0), "tile[size=2]": (20.0, 20.0)}
    bench = Bench(monkeypatch, times)
    bench.trials.builder.idle = lambda p, build: ""
    first = bench.trials.evaluate(Step((Tile(), Fuse()), Fuse()), None)
    other = bench.trials.evaluate(Step((Tile(2), Fuse()), Tile(2)), first)
    assert other is not None and other.passes == [Tile(2)] and other.entry.paired.ratio == 2.5
    assert bench.report.candidates[-1].passes == ["tile"]
    assert bench.trials.idle == {"fuse": "no product is left"}
    # The subject itself is told of, as ever.
    assert bench.trials.evaluate(Step((Tile(2), Fuse()), Fuse()), first) is None
    assert bench.report.candidates[-1].reason == "fuse found nothing to do: no product is left"


def test_what_had_no_room_beside_an_idle_pass_takes_its_place_in_the_trial_of_all(monkeypatch):
    """bf16 for the whole graph leaves a graph alone that writes to its inputs; bf16 products then have their turn."""

    def build(self, passes):
        code = Code(passes, *self.times["+".join(map(spelled, passes))], 0)
        idle = PassReport("fuse", "joint", 0, 0, refused=(("", "it writes to an input"),))
        code.reports = [idle if report.name == "fuse" else report for report in code.reports]
        code.without = lambda gone: code
        self.built.append("+".join(map(spelled, passes)))
        return code

    monkeypatch.setattr(Bench, "build", build)
    bench = Bench(monkeypatch, {"fuse+wrap": (90.0, 90.0), "tile+wrap": (25.0, 25.0)})
    step = Step((Fuse(), Wrap()), Wrap(), together=True, instead=((Tile(),),))
    trial = bench.trials.evaluate(step, None)
    assert trial is not None, bench.report.candidates[-1].reason
    assert [p.name for p in trial.passes] == ["tile", "wrap"]
    assert trial.idle == {"fuse"} and bench.trials.idle == {"fuse": "it writes to an input"}
    assert bench.built == ["fuse+wrap", "tile+wrap"]
    assert trial.entry.paired is not None and trial.entry.paired.ratio == 4.0


def resting(monkeypatch, idle, broken=()):
    """Benches build code in which passes of these names rest, or that cannot be built."""

    def build(self, passes):
        self.built.append("+".join(map(spelled, passes)))
        if any(p.name in broken for p in passes):
            raise RuntimeError("no kernel image")
        code = Code(passes, *self.times.get(self.built[-1], (50.0, 50.0)), 0)
        rests = {name: PassReport(name, "joint", 0, 0, refused=(("", "no such node"),)) for name in idle}
        code.reports = [rests.get(report.name, report) for report in code.reports]
        code.without = lambda gone: code
        return code

    monkeypatch.setattr(Bench, "build", build)


def test_where_what_joins_is_idle_too_the_trial_of_all_ends(monkeypatch):
    resting(monkeypatch, idle=("fuse", "wrap", "tile"))
    bench = Bench(monkeypatch, {})
    step = Step((Fuse(), Wrap()), Wrap(), together=True, instead=((Tile(),),))
    assert bench.trials.evaluate(step, None) is None
    assert bench.built == ["fuse+wrap", "tile"]
    assert "none of its passes is of use" in bench.report.candidates[-1].reason


def test_what_joins_and_cannot_be_compiled_leaves_the_others(monkeypatch):
    resting(monkeypatch, idle=("fuse",), broken=("tile",))
    bench = Bench(monkeypatch, {})
    step = Step((Fuse(), Wrap()), Wrap(), together=True, instead=((Tile(),),))
    trial = bench.trials.evaluate(step, None)
    assert trial is not None and [p.name for p in trial.passes] == ["wrap"] and trial.idle == {"fuse"}
    assert bench.built == ["fuse+wrap", "tile+wrap", "wrap"]


def test_what_only_wraps_code_that_is_held_needs_no_compiling(monkeypatch):
    trials = Bench(monkeypatch, {"tile": (50.0, 50.0)}).trials
    assert trials.compiles(Step((Tile(), Wrap()), Wrap()))
    held = trials.evaluate(Step((Tile(),), Tile()), None)
    assert held is not None
    assert not trials.compiles(Step((Tile(), Wrap()), Wrap()))
    assert trials.compiles(Step((Fuse(), Wrap()), Wrap()))


def test_no_comparison_takes_more_than_an_eighth_of_the_time_that_tuning_has(monkeypatch):
    given = []
    bench = Bench(monkeypatch, {"tile": (50.0, 50.0)}, time_limit=40)
    monkeypatch.setattr(
        measure, "compare", lambda *a, **options: given.append(options["time_limit_s"]) or bench.compare(*a)
    )
    bench.trials.evaluate(Step((Tile(),), Tile()), None)
    assert given == [5.0]


def test_waiting_for_the_device_spends_none_of_the_time_limit_up_to_as_much_again(monkeypatch: pytest.MonkeyPatch):
    from fxopt import tuning

    now = {"time": 100.0, "waited": 7.0}
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now["time"])
    monkeypatch.setattr(tuning.exclusive, "waited", lambda: now["waited"])
    options = resolve_options({"time_limit": 40}, environ={})
    report = GraphReport()
    tuner: Any = SimpleNamespace(report=report, options=options, device=torch.device("cpu"), started=100.0)
    one = tuning.Tuning(tuner)
    step = Step((Tile(),), Tile())
    now |= {"time": 170.0, "waited": 7.0 + 35.0}
    assert one._spent_s == 35.0 and not one._expired(step), "35 of 70 s were waiting"
    now |= {"time": 190.0, "waited": 7.0 + 49.0}
    assert one._spent_s == 50.0 and one._expired(step), "40 of 90 s count as waiting"
    assert report.out_of_reach == ["tile: not tried, the time limit of 40 s is spent"]
