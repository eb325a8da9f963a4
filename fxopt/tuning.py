"""The part of a graph's life that measures: profile, label, propose, recompile, verify, compare, keep or revert."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fxopt import ablation, floor, machine, measure, training, verify
from fxopt.build import Build, Builder
from fxopt.calls import Calls
from fxopt.decided import decided
from fxopt.labels import Axis, Label
from fxopt.plan import MAX_MACHINES, Plan, PlanMoved, PlanStoreError
from fxopt.profiling import labels_of, profile_build
from fxopt.proposals import Proposals, to_come
from fxopt.registry import spelled
from fxopt.report.model import phase, to_plain
from fxopt.search import Proposal, Search, Step, Trial
from fxopt.torch_api import dynamo, inductor
from fxopt.trials import Trials
from fxopt.tuner import writes_to_its_own
from profiler_core import exclusive
from profiler_core.quantities import duration

if TYPE_CHECKING:
    from fxopt.tuner import Tuner
    from profiler_core.profiles import Profile

NOISY = 0.5
"""A noise floor above this is told: hardly a pass is worth as much, so that nothing can have been found."""


class Tuning:
    """One graph on this machine.

    tuner: what it is and how it is to be tuned. calls: how its code is called, once that is known. written: the plan of
    what was decided, whether it could be stored or not.
    """

    def __init__(self, tuner: Tuner) -> None:
        self.tuner, self.report, self.options, self.device = tuner, tuner.report, tuner.options, tuner.device
        self.written: Plan | None = None
        self._waited_before = exclusive.waited()
        self._expected: list[Label] = []

    def run(self) -> Callable[..., Any]:
        from profiler_core import layers

        report = self.report
        context = self.tuner.context([])
        builder = self.tuner.builder(context)
        with phase(report, "compile baseline"):
            baseline = builder.baseline()
        self._say("baseline compiled")
        mutated = baseline.compiled.mutated or frozenset()
        own = baseline.compiled.written  # also where Dynamo saw none: through `.data`
        if why := writes_to_its_own(own) if own else self._untrained(mutated):
            report.source = "skipped"
            report.messages.append(f"{why}: Inductor's code is kept")
            return self.tuner.inductors_own()

        self._calls_of(baseline, mutated)
        with phase(report, "measure baseline"):
            profile = self._profile(baseline)
        report.profile = profile
        report.baseline_kernel_ns = report.kept_kernel_ns = profile.kernel_ns
        report.baseline_wall_ns = report.kept_wall_ns = profile.wall_ns
        with phase(report, "label"):
            found, report.ceilings = labels_of(profile, self.device, self.options, self.tuner.store.root / "ceilings")
        report.labels, report.missing = list(found.labels), list(found.missing)
        backward = baseline.compiled.backward
        graphs = [baseline.compiled.post_grad, backward.post_grad if backward is not None else None]
        floor.tell(report, graphs, report.ceilings, self.tuner.budget, on_error=self.options.on_error)
        self._say(f"measured: kernels {duration(profile.kernel_ns)}, wall {duration(profile.wall_ns)} a call")
        context = self.tuner.context(report.labels, origins=self._origins(), mutated=mutated)
        builder = replace(builder, context=context)
        callers_own = self._timed_baseline(baseline)
        classes: dict[str, str] = {}
        for number, provenance in enumerate(self._provenances):
            found_classes = layers.find(provenance).node_class
            # What the backward computes anew has the name that it has in the forward, and its class.
            classes = {name: f"backward {of}" if number else of for name, of in found_classes.items()} | classes
        proposals = Proposals(self.tuner.passes, self.options, report, context, classes)
        best: Trial | None = None
        if first := proposals.answering(context.labels):
            trials = self._trials(builder, callers_own, profile.environment)
            first += proposals.answering(self._to_come(trials))
            best = self._search(trials, proposals, first)
            if self.options.ablate:
                passes = best.passes if best is not None else []
                report.ablation = trials.ablate(passes)
                report.ablation += ablation.not_kept(report.candidates, passes, report.out_of_reach)
            if trials.noise > NOISY:
                report.messages.append(
                    f"the same code took up to {trials.noise:.0%} longer or shorter from one measurement to the next: "
                    "what is worth less was not found. Where nothing else runs: "
                    f"`fxopt plans remove {report.key[:12]}`, and once more"
                )
        kept = best.build if best is not None else baseline
        if best is None and not report.candidates and not report.out_of_reach:
            report.messages.append("no pass answers a label of this graph")
        report.frozen = bool(kept.compiled.frozen)
        report.memory_bytes = best.entry.memory_bytes if best is not None else 0
        if self._waited_s >= 1:
            report.messages.append(f"tuning waited {self._waited_s:.0f} s for others that measured on this device")
        report.output_copies = getattr(best.build.fn if best is not None else None, "output_copies", None)
        if best is None and self.tuner.wants_graphs():
            kept = replace(baseline, fn=callers_own)
        with phase(report, "write plan"):
            self._write_plan(best)
        if best is None and self.tuner.wanted:
            return self.tuner.inductors_own()
        kept.compiled.scope.adopt()
        return kept.fn

    def _profile(self, build: Build) -> Profile:
        """Measured before any CUDA graph is captured, on copies of the inputs, with the random state put back."""

        def again() -> inductor.Compiled:
            patches = self.tuner.measured_patches()
            return inductor.compile_graph(
                self.tuner.gm, self.tuner.inputs, patches=patches, capture=True, caches=False, keep_guards=True
            )

        profile, self._provenances = profile_build(
            build,
            again,
            self.calls.steady,
            verify.clone_inputs(self.calls.arguments, self.calls.held),
            device=self.device,
            options=self.options,
            store=self.tuner.store.root / "provenance",
            running=self.calls.running,
        )
        return profile

    def _untrained(self, mutated: frozenset[int]) -> str:
        """Why a graph with gradients is left as it is, "" for any other."""
        if not self.tuner.wanted:
            return ""
        return training.refusal(self.tuner.real, mutated, self.tuner.wants_graphs())

    def _calls_of(self, baseline: Build, mutated: frozenset[int]) -> Calls:
        """How the graph's code is called from now on. The baseline's outputs say what has a gradient."""
        self.calls = Calls(
            self.tuner.gm,
            self.tuner.real,
            static=self.tuner.static,
            mutated=mutated,
            wanted=self.tuner.wanted,
            device=self.device,
            count=self.options.verify_inputs,
        )
        with phase(self.report, "draw cotangents") if self.tuner.wanted else contextlib.nullcontext():
            said = self.calls.with_backward(baseline.fn)
        self.report.messages += [said] if said else []
        return self.calls

    def _origins(self) -> dict[str, tuple[str, ...]]:
        """By post-grad node, forward's before the backward's, the pre-grad nodes that it comes from."""
        known = [p.nodes for p in reversed(self._provenances)]
        return {name: info.pre_grad for nodes in known for name, info in nodes.items()}

    def _search(self, trials: Trials, proposals: Proposals, first: Sequence[Proposal]) -> Trial | None:
        """The best trial, compared with the baseline once more; None where the baseline stays."""
        report = self.report
        best = Search(
            evaluate=trials.evaluate,
            propose=proposals.answering,
            faster=trials.faster,
            less_kernel_time=trials.less_kernel_time,
            as_fast=trials.as_fast,
            expired=lambda step: self._expired(step, trials.compiles(step)),
            needs=proposals.needs,
        ).run(first)
        kept = {p.name for p in best.passes} if best is not None else set()
        report.out_of_reach += [
            f"{name}: found nothing to do: {why}" for name, why in trials.idle.items() if name not in kept
        ]
        if best is not None and not trials.confirm(best):
            # What was dropped may have cost the little by which the whole set is faster.
            best = best.whole if best.whole is not None and trials.confirm(best.whole) else None
        if best is None:
            return None
        best.entry.outcome = "kept"
        report.decision = "candidate"
        report.verdict = best.entry.verdict
        # The kept candidate is the last one listed, whatever was tried after it.
        report.candidates.remove(best.entry)
        report.candidates.append(best.entry)
        return best

    def _to_come(self, trials: Trials) -> list[Label]:
        """What will limit the graph once its labels are answered (`proposals.to_come`); the report lists it, too."""
        if self.device.type != "cuda" or any(label.axis is Axis.LAUNCH_BOUND for label in self.report.labels):
            return []
        with self.calls.running():
            host_ns = measure.host_ns(trials.steady_baseline, trials.input_sets[0], device=self.device)
        found = to_come(
            self.report.labels,
            kernel_ns=trials.baseline_kernel_ns,
            host_ns=host_ns,
            floor_ns=self.report.floor_ns or 0.0,
            environment=trials.environment,
            thresholds=dict(self.options.thresholds),
        )
        return self._expect(found)

    def _expect(self, found: list[Label]) -> list[Label]:
        """Labels to propose passes by, and to report; no part of the context: passes see what was measured, where they
        are tried as where the plan is applied.
        """
        self.report.labels += found
        self._expected = found
        return found

    def _expired(self, step: Step, compiles: bool = True) -> bool:
        # What needs no compiling may take half the time again: a candidate is worth little without its CUDA graph.
        if self._spent_s <= self.options.time_limit * (1 if compiles else 1.5):
            return False
        limit = f"the time limit of {self.options.time_limit:g} s is spent"
        if step.removal:
            self.report.messages.append(f"{limit}: whether {step.subject.name} is still of use was not tried")
        else:
            self.report.out_of_reach.append(f"{spelled(step.subject)}: not tried, {limit}")
        return True

    @property
    def _waited_s(self) -> float:
        """What tuning has waited for others that measure on the device: of the time limit, up to as much again."""
        return min(exclusive.waited() - self._waited_before, self.options.time_limit)

    @property
    def _spent_s(self) -> float:
        """What of the time limit is spent. Two processes that share a GPU tune it as well as one, later."""
        return time.perf_counter() - self.tuner.started - self._waited_s

    def _say(self, what: str) -> None:
        """One line of progress on stderr, where it was asked for."""
        if self.options.verbose:
            spent = f"{self._spent_s:6.1f} of {self.options.time_limit:g} s"
            print(f"fxopt [{spent}] {what}", file=sys.stderr, flush=True)

    def _trials(self, builder: Builder, baseline: Callable[..., Any], environment: Mapping[str, Any]) -> Trials:
        return Trials(
            self.tuner.inputs,
            replace(builder, record=True),
            baseline,
            self.calls,
            self.options,
            self.report,
            environment,
            self._say,
        )

    def verify_moved(self, plan: Plan, builder: Builder, build: Build) -> None:
        """Verifies the code of a plan that another machine made, once for this machine. Raises PlanMoved."""
        name, report = f"the plan {plan.key[:12]} was made on another machine", self.report
        with phase(report, "verify a plan from elsewhere"):
            baseline = builder.baseline()
            mutated = baseline.compiled.mutated or frozenset()
            if mutated != frozenset(plan.mutated):
                raise PlanMoved(f"{name}, and says that the graph writes to other inputs than it does")
            if why := self._untrained(mutated):
                raise PlanMoved(f"{name}: {why}")
            calls = self._calls_of(baseline, mutated)
            with calls.running():
                verdict = verify.verify(
                    calls.whole(build.fn),
                    calls.whole(baseline.fn),
                    dynamo.copy_graph(self.tuner.gm),
                    calls.input_sets(baseline.fn),
                    calls.held,
                    self.tuner.budget,
                    logits=self.options.logits,
                    gradients=calls.gradients,
                    constants=build.constants,
                )
        report.verdict = verdict
        if not verdict.ok:
            raise PlanMoved(f"{name}, and is wrong here: {verdict.reason}")
        report.messages.append(f"{name}; it was verified here, and is kept")
        if plan.key == report.key:
            machines = [*plan.machines, machine.machine(self.device)][-MAX_MACHINES:]
            try:
                self.tuner.store.save(plan.model_copy(update={"machines": machines}))
            except PlanStoreError as error:
                self.tuner.store_failed(error)

    def ablate_plan(self, plan: Plan, builder: Builder, kept: Build) -> None:
        """Measures the ablation that the tuning run was not asked for, and adds it to the plan."""
        with phase(self.report, "compile baseline"):
            own = builder.baseline()
            baseline = self._timed_baseline(own)
        self._calls_of(own, frozenset(plan.mutated))
        trials = self._trials(builder, baseline, plan.environment)
        trials.hold(kept)
        rows = trials.ablate(kept.passes) + ablation.not_kept([], kept.passes, plan.out_of_reach)
        self.report.ablation = rows
        try:
            self.tuner.store.save(plan.model_copy(update={"ablation": to_plain(rows)}))
        except PlanStoreError as error:
            self.tuner.store_failed(error)

    def _timed_baseline(self, baseline: Build) -> Callable[..., Any]:
        """What the caller would have without fxopt: the measured code, CUDA-graphed if they asked for that."""
        if not self.tuner.wants_graphs():
            return baseline.fn
        with phase(self.report, "compile baseline"):
            tuner = self.tuner
            return inductor.compile_graph(tuner.gm, tuner.inputs, patches=tuner.patches, keep_guards=True).flat()

    def _write_plan(self, best: Trial | None) -> None:
        self.written = decided(
            self.report,
            best.passes if best is not None else [],
            patches=self.tuner.patches,
            origins=self._origins(),
            mutated=self.calls.mutated,
            device=self.device,
            seconds=time.perf_counter() - self.tuner.started,
            parts=self.tuner.parts,
            graph=self.tuner.in_words,
            to_come=self._expected,
            resting=best.build.resting if best is not None else (),
        )
        try:
            self.tuner.store.save(self.written)
        except PlanStoreError as error:
            self.tuner.store_failed(error)
