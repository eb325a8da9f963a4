"""Builds, verifies and times candidates beside the baseline, each set of passes once, and judges what was measured."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxopt import ablation, measure, memory, rules, verify
from fxopt.build import Build, Builder, at_work, why_idle
from fxopt.calls import Calls
from fxopt.measure import PairedResult
from fxopt.options import Options
from fxopt.registry import ConfigPass, Pass, RuntimePass, only_wraps, spelled
from fxopt.report.model import CandidateReport, GraphReport, phase, to_plain
from fxopt.report.terminal import size
from fxopt.search import Step, Trial
from fxopt.stage import stage_of
from fxopt.torch_api import dynamo
from fxopt.warning import warn


@dataclass
class Trials:
    """The candidates of one graph.

    inputs are Dynamo's. baseline: code that they are compared with, taking all inputs. calls: how code is called, on
    `input_sets`. say: progress. environment: the profile's. idle: passes that found nothing to do beside the
    others, and why.
    """

    inputs: Sequence[Any]
    builder: Builder
    baseline: Callable[..., Any]
    calls: Calls
    options: Options
    report: GraphReport
    environment: Mapping[str, Any]
    say: Callable[[str], None]
    noise: float = 0.0
    baseline_kernel_ns: float = 0.0
    idle: dict[str, str] = field(default_factory=dict)
    input_sets: Sequence[Sequence[Any]] = field(init=False)
    _alive: weakref.WeakValueDictionary[tuple[str, ...], Build] = field(default_factory=weakref.WeakValueDictionary)
    _alive_code: weakref.WeakValueDictionary[tuple[str, ...], Build] = field(
        default_factory=weakref.WeakValueDictionary
    )
    _for_ablation: list[Build] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Measures what belongs to the baseline: noise, kernel time, memory."""
        self.input_sets = self.calls.input_sets(self.baseline)
        self.budget = self.builder.context.budget
        self.steady_baseline = self.calls.steady(self.baseline)
        with phase(self.report, "noise floor"), self.calls.running():
            self.noise = measure.noise_floor(
                self.steady_baseline, self.input_sets, device=self.calls.device, time_limit_s=self._share_s
            )
            self.baseline_kernel_ns = self.kernel_ns(self.steady_baseline)
            self.report.baseline_peak_bytes = self._peak(self.steady_baseline)

    # -- one candidate --------------------------------------------------------------------------------------------

    def evaluate(self, step: Step, best: Trial | None) -> Trial | None:
        """The trial of `step`, compared with the best so far; None, with the reason in its report, if it is no use."""
        gc.collect()  # what lost is full of cycles, and may hold a copy of the weights
        before = memory.allocated(self.calls.device)
        idle: frozenset[str] = frozenset()
        failure, nothing_to_do = "", ""
        if step.together:
            step, idle, failure, _held = self._of_use(step)  # builds live only while somebody holds them
        elif not step.removal:
            nothing_to_do = self._idle_on_sight(step)
        entry = CandidateReport(
            "+".join(map(spelled, step.passes)),
            [p.name for p in step.passes],
            step="remove" if step.removal else "together" if step.together else "add",
            subject="" if step.together else step.subject.name,
            subject_options={} if step.together else to_plain(step.subject.options()),
            options={p.name: to_plain(p.options()) for p in step.passes},
        )
        if step.proposal is not None:
            entry.headroom_ns, entry.headroom_by_class = step.proposal.headroom_ns, dict(step.proposal.by_class)
        self.report.candidates.append(entry)
        if nothing_to_do:
            entry.outcome, entry.reason = "rejected", f"{step.subject.name} found nothing to do: {nothing_to_do}"
            self.say(f"{entry.name}: {entry.reason}")
            return None
        if failure:
            entry.outcome, entry.reason = "failed", f"{failure}; its passes are tried one at a time"
            self.say(f"{entry.name}: {entry.reason}")
            return None
        current = self.steady_baseline if best is None else self.calls.steady(best.build.fn)
        build = self._try(step, entry, current, before)
        if build is None and (less := self._others_at_work(step, entry)) is not None:
            self.idle |= {r.name: why_idle(r) for r in entry.reports if not at_work(r)}
            self.report.candidates.remove(entry)
            return self.evaluate(less, best)
        what = f"without {step.subject.name}: " if step.removal else ""
        timed = f"{entry.paired.ratio:.2f}x the best so far" if entry.paired is not None else ""
        self.say(f"{what}{entry.name}: {entry.reason or timed}")
        if build is None:
            return None
        if self.options.ablate and self._ablation_asks_for(step):
            self._for_ablation.append(build)
        return Trial(list(step.passes), build, entry, idle)

    def _of_use(self, step: Step) -> tuple[Step, frozenset[str], str, Build | None]:
        """`step` without the passes that fail or find nothing to do, and with what had no room beside them; their names
        that find nothing to do, and the code of what is left; or why it cannot be compiled. Which of them it was shows
        when they are tried one at a time.
        """
        passes = list(step.passes)
        idle: dict[str, str] = {}
        tried = list(passes)
        without: list[Pass] | None = None  # what joined in the last round
        try:
            with phase(self.report, "compile candidates"):
                while True:
                    try:
                        build = self.build(passes)
                    except Exception:
                        if not without or self.options.on_error == "raise":
                            raise
                        passes, without = without, None  # what joined cannot be compiled: it is tried by itself later
                        continue
                    failed = {r.name for r in build.reports if r.error or (r.matched and not r.changed)}
                    resting = {r.name: r for r in build.reports if not at_work(r) and r.name not in failed}
                    idle |= {name: why_idle(r) for name, r in resting.items()}
                    gone = failed | resting.keys()
                    left = [p for p in passes if p.name not in gone and not failed & set(p.needs)]
                    if gone and len(joined := step.joining(left, tried)) > len(left):
                        passes, without = joined, left
                        tried += [p for p in joined if p not in tried]
                        continue
                    without = None
                    if not left:
                        return step, frozenset(), f"none of its passes is of use: {', '.join(sorted(gone))}", None
                    if not failed and all(_left_no_trace(p) for p in passes if p.name in resting):
                        break
                    passes = left
        except Exception as error:
            if self.options.on_error == "raise":
                raise
            self.idle |= idle
            return step, frozenset(), f"{type(error).__name__}: {error}", None
        self.idle |= idle
        if resting:
            build = self.hold(build.without([p for p in passes if p.name in resting]))
        return replace(step, passes=tuple(left), subject=left[-1]), frozenset(idle), "", build

    @staticmethod
    def _others_at_work(step: Step, entry: CandidateReport) -> Step | None:
        """`step` without passes that found nothing to do beside its subject; None where that is no way out.

        A pass that was at work under another variant of the subject may not be under this one: where a recurrent layer
        in TF32 leaves no fp32 product, there is none to set to TF32. That is no fault of the subject's.
        """
        idle = {r.name for r in entry.reports if not at_work(r)}
        if step.together or step.removal or not idle or step.subject.name in idle:
            return None
        left = tuple(p for p in step.passes if p.name not in idle and not idle & set(p.needs))
        return replace(step, passes=left) if step.subject in left and not any(r.error for r in entry.reports) else None

    def _idle_on_sight(self, step: Step) -> str:
        """Why the pass to be added finds nothing to do; "" where it does, or where compiling has to show it."""
        build = self._alive.get(_key([p for p in step.passes if p is not step.subject]))
        if build is None:
            return ""
        try:
            return self.builder.idle(step.subject, build)
        except Exception:  # compiling will say what is wrong with it
            return ""

    def build(self, passes: Sequence[Pass]) -> Build:
        """Code with `passes`, in order: the one that is there already, if anybody still holds it. Passes that wrap what
        was compiled are put around code that is there.
        """
        build = self._alive.get(_key(passes))
        if build is not None:
            return build
        same = self._alive_code.get(_key([p for p in passes if not only_wraps(p)]))
        if self.calls.gradients is not None:
            same = None  # its backward is wrapped where autograd finds it, once for all
        if same is None:
            return self.hold(self.builder.build(passes))
        around = self.builder.rewrapped(same, passes)
        around.held_bytes = same.held_bytes
        return self.hold(around)

    def compiles(self, step: Step) -> bool:
        """Whether the trial needs code that nobody holds yet."""
        return self._alive_code.get(_key([p for p in step.passes if not only_wraps(p)])) is None

    def hold(self, build: Build) -> Build:
        """Makes a build known, for as long as the caller keeps it."""
        self._alive[_key(build.passes)] = build
        self._alive_code.setdefault(_key([p for p in build.passes if not only_wraps(p)]), build)
        return build

    def _try(self, step: Step, entry: CandidateReport, current: Callable[..., Any], before: int) -> Build | None:
        report = self.report
        try:
            with phase(report, "compile candidates"):
                build = self.build(step.passes)
            entry.reports, entry.compile_seconds = build.reports, build.seconds
            if build.errors:
                entry.reason = "; ".join(build.errors)
                warn(f"a candidate was dropped: {entry.reason}")
                return None
            if not build.effective:
                entry.outcome, entry.reason = "rejected", _idle(build)
                return None
            steady = self.calls.steady(build.fn)
            if self.calls.device.type == "cuda":
                # Kernels are compiled and variants of them timed; of a CUDA graph, it is captured.
                with phase(report, "first call"), self.calls.running():
                    steady(*self.input_sets[0])
                    torch.cuda.synchronize(self.calls.device)
            with phase(report, "measure memory"), self.calls.running():
                entry.peak_bytes = self._peak(steady)
                # Nothing more for code that an earlier trial left: it was allocated before this one.
                build.held_bytes += max(0, memory.allocated(self.calls.device) - before)
                entry.memory_bytes = max(memory.extra_bytes(build, self.inputs), build.held_bytes)
            if reason := self._too_large(entry):
                entry.outcome, entry.reason = "rejected", reason
                return None
            with phase(report, "verify"), self.calls.running():
                entry.verdict = verify.verify(
                    self.calls.whole(build.fn),
                    self.calls.whole(self.baseline),  # without putting back, which hides what other values lead to
                    dynamo.copy_graph(self.calls.gm),
                    self.input_sets,
                    self.calls.held,
                    self.budget,
                    logits=self.options.logits,
                    gradients=self.calls.gradients,
                    constants=build.constants,
                )
            if not entry.verdict.ok:
                entry.outcome, entry.reason = "rejected", f"wrong: {entry.verdict.reason}"
                return None
            with phase(report, "compare"), self.calls.running():
                entry.kernel_ns = self.kernel_ns(steady)
                entry.paired = self.compare(current, steady)
            entry.labels = rules.label_graph(
                entry.paired.candidate_ns, entry.kernel_ns, self.environment, thresholds=dict(self.options.thresholds)
            )
            return build
        except Exception as error:
            if self.options.on_error == "raise":
                raise
            entry.outcome, entry.reason = "failed", f"{type(error).__name__}: {error}"
            where = f" ({stage_of(error)})" if stage_of(error) else ""
            warn(f"the candidate {entry.name} failed and was dropped{where}: {entry.reason}")
            return None

    def _peak(self, fn: Callable[..., Any]) -> int | None:
        return memory.peak_bytes(lambda: fn(*self.input_sets[0]), self.calls.device)

    def _too_large(self, entry: CandidateReport) -> str:
        limit = memory.limit_bytes(self.options.memory_limit, self.calls.device)
        call = max(0, (entry.peak_bytes or 0) - (self.report.baseline_peak_bytes or 0))
        if limit is None or (entry.memory_bytes or 0) + call <= limit:
            return ""
        during = f" and {size(call)} during a call" if call else ""
        more = f"{size(entry.memory_bytes or 0)}{during} more memory than the baseline"
        return f"it takes {more}, and the limit is {size(limit)}"

    # -- timing ---------------------------------------------------------------------------------------------------

    def compare(self, first: Callable[..., Any], second: Callable[..., Any]) -> PairedResult:
        """Paired timing, longer where the first pairs leave it open which is faster."""
        return measure.compare(
            first,
            second,
            self.input_sets,
            device=self.calls.device,
            pairs=self.options.pairs,
            most_pairs=measure.MORE_PAIRS * self.options.pairs,
            noise=self.noise,
            time_limit_s=self._share_s,
        )

    @property
    def _share_s(self) -> float:
        """Of a model whose calls take a second, all pairs would take the time that tuning has: an eighth of it each."""
        return self.options.time_limit / 8

    def compare_kernels(self, first: Callable[..., Any], second: Callable[..., Any]) -> PairedResult:
        """Kernel times of the two, measured in turns as in `measure.compare`."""
        times: list[tuple[float, float]] = []
        for pair in range(measure.MIN_PAIRS):
            turn = (first, second) if pair % 2 == 0 else (second, first)
            taken = [max(self.kernel_ns(fn), 1.0) for fn in turn]
            before, after = taken if pair % 2 == 0 else taken[::-1]
            times.append((before, after))
        return measure.paired(times, self.noise)

    def kernel_ns(self, fn: Callable[..., Any]) -> float:
        from profiler_core.collect import kineto

        call = lambda: fn(*self.input_sets[0])  # noqa: E731
        iterations, device = self.options.iterations, self.calls.device
        return kineto.kernel_time(call, iterations=iterations, warmup=1, device=device).kernel_ns

    # -- judging --------------------------------------------------------------------------------------------------

    def faster(self, entry: CandidateReport, best: CandidateReport | None) -> bool:
        """By the objective. Of two whose kernels take as long, the faster call wins."""
        assert entry.paired is not None
        if self.options.objective == "wall":
            return entry.paired.faster
        return self.less_kernel_time(entry, best) or (self._kernels_as_fast(entry, best) and entry.paired.faster)

    def as_fast(self, entry: CandidateReport, best: CandidateReport | None) -> bool:
        """Whether nothing is lost by the objective. Under "kernel" the wall breaks ties, so there it counts as well."""
        assert entry.paired is not None
        if self.options.objective == "wall":
            return entry.paired.as_fast
        return self.less_kernel_time(entry, best) or (self._kernels_as_fast(entry, best) and entry.paired.as_fast)

    def less_kernel_time(self, entry: CandidateReport, best: CandidateReport | None) -> bool:
        return entry.kernel_ns is not None and entry.kernel_ns < self._kernels_of(best) / (1 + self.noise)

    def _kernels_as_fast(self, entry: CandidateReport, best: CandidateReport | None) -> bool:
        return entry.kernel_ns is not None and entry.kernel_ns <= self._kernels_of(best) * (1 + self.noise)

    def _kernels_of(self, best: CandidateReport | None) -> float:
        return self.baseline_kernel_ns if best is None or best.kernel_ns is None else best.kernel_ns

    def confirm(self, best: Trial) -> bool:
        """Compares the best with the baseline once more, by the objective; what was found is in the report."""
        report, fn, entry = self.report, self.calls.steady(best.build.fn), best.entry
        by_kernels = self.options.objective == "kernel"
        with phase(report, "compare"), self.calls.running():
            wall = report.ratio = self.compare(self.steady_baseline, fn)
            kernels = report.kernel_ratio = self.compare_kernels(self.steady_baseline, fn) if by_kernels else None
        tied = kernels is None or kernels.as_fast  # then the wall decides
        if not (kernels is not None and kernels.faster) and not (tied and wall.faster):
            entry.outcome = "rejected"
            found = (kernels or wall).spelled
            entry.reason = f"not shown to be faster than the baseline in the last comparison: {found}"
            return False
        if kernels is not None and wall.slower:
            report.messages.append(
                f"the kernels are {kernels.ratio:.2f}x as fast as the baseline's, as objective='kernel' asks, but "
                f"a call is slower: {wall.ratio:.2f}x its speed (interval {wall.low:.2f} to {wall.high:.2f}); "
                "objective='wall' would not keep this"
            )
        report.kept_wall_ns, report.baseline_wall_ns = wall.candidate_ns, wall.baseline_ns
        # Both by the same way of measuring, side by side where they decide.
        report.kept_kernel_ns = kernels.candidate_ns if kernels is not None else entry.kernel_ns
        report.baseline_kernel_ns = kernels.baseline_ns if kernels is not None else self.baseline_kernel_ns
        return True

    # -- ablation -------------------------------------------------------------------------------------------------

    def ablate(self, kept: Sequence[Pass]) -> list[ablation.AblationRow]:
        """Each of the kept passes alone and taken away (see `fxopt.ablation`)."""
        with phase(self.report, "ablation"):
            rows = ablation.ablate(kept, self._time_sets)
        self._for_ablation.clear()
        return rows

    def _time_sets(self, before: Sequence[Pass], after: Sequence[Pass]) -> tuple[PairedResult, PairedResult] | str:
        code = []
        for passes in (before, after):
            if not passes:
                code.append(self.steady_baseline)
                continue
            try:
                build = self.build(passes)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            if build.errors or not build.effective:
                return "; ".join(build.errors) or _idle(build)
            code.append(self.calls.steady(build.fn))
        with self.calls.running():
            found = self.compare(code[0], code[1]), self.compare_kernels(code[0], code[1])
        self.say(f"ablation: {'+'.join(map(spelled, after))}: {found[0].ratio:.2f}x of {len(before)} passes")
        return found

    @staticmethod
    def _ablation_asks_for(step: Step) -> bool:
        """Whether these are likely the passes that an ablation builds: one alone, or the kept ones without one."""
        return step.removal or {p.name for p in step.passes} == {step.subject.name, *step.subject.needs}


def _key(passes: Sequence[Pass]) -> tuple[str, ...]:
    return tuple(f"{p.name} {p.fingerprint()}" for p in passes)


def _left_no_trace(p: Pass) -> bool:
    """Whether the code is what it would be without `p`, which found nothing to do.

    An option that took no effect that can be counted may still have changed the code, and a context in which it was
    compiled may have, too.
    """
    return only_wraps(p) or not isinstance(p, (ConfigPass, RuntimePass))


def _idle(build: Build) -> str:
    idle = next(r for r in build.reports if not at_work(r))
    return f"{idle.name} found nothing to do: {why_idle(idle)}"
