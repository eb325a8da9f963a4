"""Which sets of passes are tried, in which order, and which of them is best. No compiling and no timing in here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fxopt import registry
from fxopt.labels import Label
from fxopt.registry import Pass
from fxopt.report.model import CandidateReport


@dataclass(frozen=True)
class Proposal:
    """One pass to try: its variants, the best guess first.

    headroom_ns: what its labels say it could save a call at most, by_class: the same by class of repeated layer ("":
    outside of any).
    """

    variants: tuple[Pass, ...]
    headroom_ns: float = 0.0
    by_class: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        return self.variants[0].name


@dataclass(frozen=True)
class Step:
    """One trial to make: `passes`, in order, by which `subject` is added, or dropped where `removal` is true; or, where
    `together` is true, all the best guesses at once. instead: of those, what conflicts with another one and comes after
    it, each with what it needs: for where that other one is of no use.
    """

    passes: tuple[Pass, ...]
    subject: Pass
    removal: bool = False
    proposal: Proposal | None = None
    together: bool = False
    instead: tuple[tuple[Pass, ...], ...] = ()

    def joining(self, left: Sequence[Pass], known: Collection[Pass]) -> list[Pass]:
        """`left` with those of `instead` that it leaves room for, but for what is `known` not to be of use."""
        stack = list(left)
        for group in self.instead:
            names = {q.name for q in stack}
            new = [p for p in group if p.name not in names]
            clash = any(registry.in_conflict(q, p) for p in new for q in stack)
            if new and not clash and not any(p in known for p in new):
                stack = registry.order([*stack, *new])
        return stack


@dataclass
class Trial:
    """One candidate that was built, found right and timed. `kernel_ns` in `entry` is known.

    idle: passes of its step that found nothing to do. whole: the trial that this one is a reduction of, as fast as it
    by what can be told.
    """

    passes: list[Pass]
    build: Any
    entry: CandidateReport
    idle: frozenset[str] = frozenset()
    whole: Trial | None = None


Compare = Callable[[CandidateReport, CandidateReport | None], bool]


@dataclass(frozen=True)
class Search:
    """Tries the best guesses together, adds what is left one at a time, and drops what turned out to be of no use.

    evaluate(step, best): builds, verifies and times one candidate against `best` (None: the baseline); None where it
        cannot be used. Of a step that tries passes together it may leave some out; the trial says which are in it.
    propose(labels): passes not considered yet that answer the labels of a trial as measured again.
    faster, less_kernel_time, as_fast: compare a trial with another (None: the baseline) by the objective, by its
        kernels alone, and by whether nothing is lost with it.
    expired(step): whether there is no time left for it. needs(pass): the passes it cannot do without.
    together: whether the best guesses are tried at once before anything else.
    """

    evaluate: Callable[[Step, Trial | None], Trial | None]
    propose: Callable[[Sequence[Label]], Sequence[Proposal]]
    faster: Compare
    less_kernel_time: Compare
    as_fast: Compare
    expired: Callable[[Step], bool]
    needs: Callable[[Pass], Sequence[Pass]]
    together: bool = True
    tried: set[frozenset[str]] = field(default_factory=set)

    def run(self, proposals: Sequence[Proposal]) -> Trial | None:
        """The best trial, or None where nothing beats the baseline.

        The first trial takes the best guess of every proposal, for most passes get along and compiling is what takes
        time; if it does not win, they are added one at a time instead.

        A trial that is right but no faster stays under the next one where its pass says that it enables a later one
        (frozen weights cost nothing to cast), or where its kernels are shorter: a device that waits for launches does
        not gain from shorter kernels until the waiting is gone.
        """
        waiting = by_headroom(proposals)
        best: Trial | None = None
        under: Trial | None = None  # what the next pass is added to: the best, or one that stays for a later pass
        added: dict[str, None] = {}
        if self.together and (first := self._together(waiting)) is not None:
            won, shorter = self._judge(first, None, None)
            if won or shorter:
                names = [p.name for p in first.passes]
                under = first
                added = {item.name: None for item in waiting if item.name in names} | dict.fromkeys(names)
                left = [item for item in waiting if item.name not in first.idle]
                waiting = by_headroom([*left, *self.propose(first.entry.labels)])
            if won:
                best = first
            elif shorter:
                first.entry.reason = _stays_because(first)
            del first
        while waiting:
            proposal = waiting.pop(0)
            for p in proposal.variants:
                stack = under.passes if under is not None else []
                step = Step(tuple(added_to(stack, p, self.needs(p))), p, proposal=proposal)
                if _key(step.passes) in self.tried:
                    continue
                if self.expired(step):
                    break
                self.tried.add(_key(step.passes))
                trial = self.evaluate(step, best)
                if trial is None:
                    continue
                won, shorter = self._judge(trial, best, under)
                if won or shorter:
                    # What limits it may have changed with its kernels.
                    waiting = by_headroom([*waiting, *self.propose(trial.entry.labels)])
                if won:
                    best = trial
                if won or self._stays(trial, p, stack, shorter, waiting):
                    under = trial
                    added |= dict.fromkeys(q.name for q in step.passes)
                del trial  # what lost must not hold its memory while the next one is built
        return best if best is None else self._reduced(best, list(added))

    def _together(self, waiting: Sequence[Proposal]) -> Trial | None:
        """The trial of all best guesses at once, where it can be used; of two in conflict, the first."""
        stack: list[Pass] = []
        instead: list[tuple[Pass, ...]] = []
        for proposal in waiting:
            p = proposal.variants[0]
            joining = (*self.needs(p), p)
            if p.last:
                continue
            if any(registry.in_conflict(q, j) for q in stack for j in joining):
                instead.append(joining)
            else:
                stack = added_to(stack, p, self.needs(p))
        if len(stack) < 2:
            return None
        step = Step(tuple(stack), stack[-1], together=True, instead=tuple(instead))
        if self.expired(step):
            return None
        self.tried.add(_key(step.passes))
        trial = self.evaluate(step, None)
        if trial is not None:
            self.tried.add(_key(trial.passes))
        return trial

    def _judge(self, trial: Trial, best: Trial | None, under: Trial | None) -> tuple[bool, bool]:
        """Whether the trial is the new best, and whether its kernels are the shortest so far; `entry` says so."""
        entry, timed = trial.entry, trial.entry.paired
        assert timed is not None
        won = self.faster(entry, best.entry if best is not None else None)
        shorter = self.less_kernel_time(entry, best.entry if best is not None else None)
        if under is not None and under is not best:
            shorter = shorter and self.less_kernel_time(entry, under.entry)
        if won:
            entry.outcome = "kept"
            entry.reason = f"{timed.ratio:.2f}x as fast as the best before it"
        else:
            entry.outcome = "rejected"
            entry.reason = f"not shown to be faster: {timed.spelled}"
        return won, shorter

    def _stays(self, trial: Trial, p: Pass, stack: Sequence[Pass], shorter: bool, waiting: Sequence[Proposal]) -> bool:
        enabling = set(p.enables) & {q.name for q in waiting} and p.name not in {q.name for q in stack}
        if not (enabling or (shorter and waiting)):
            return False
        trial.entry.reason = _stays_because(trial)
        return True

    def _reduced(self, full: Trial, added: Sequence[str]) -> Trial:
        """`full` without the passes that it is as fast without, each dropped once in the order in which they came; but
        first those that only wrap code, for which nothing is compiled, so that it is known of them even where no time
        is left for the others.

        Every set is compared with `full`, so that small losses do not add up. One that others need stays, and a set
        that was tried before is not tried again: it lost to `full`, or to what `full` beat.
        """
        best = full
        left = [p for name in added for p in full.passes if p.name == name]
        left.sort(key=lambda p: not registry.only_wraps(p))
        while True:
            p = next((p for p in left if not any(p.name in q.needs for q in best.passes)), None)
            if p is None or len(best.passes) == 1:
                return best
            left.remove(p)
            step = Step(tuple(q for q in best.passes if q.name != p.name), p, removal=True)
            if _key(step.passes) in self.tried:
                continue
            if self.expired(step):
                return best
            self.tried.add(_key(step.passes))
            trial = self.evaluate(step, full)
            if trial is None:
                continue
            entry, timed = trial.entry, trial.entry.paired
            assert timed is not None
            loses_nothing = self.as_fast(entry, full.entry)
            entry.outcome = "kept" if loses_nothing else "rejected"
            entry.reason = (
                f"{'as fast without' if loses_nothing else 'slower without'} {p.name}: {timed.ratio:.3f}x, interval "
                f"{timed.low:.3f} to {timed.high:.3f}, noise {timed.noise:.1%}"
            )
            if loses_nothing:
                best = replace(trial, whole=full)
            del trial


def by_headroom(proposals: Sequence[Proposal]) -> list[Proposal]:
    """The largest headroom first, and what compiles long last; but what enables another pass, or is needed by it, comes
    before that one.
    """
    largest = sorted(proposals, key=lambda item: (item.variants[0].last, -item.headroom_ns))
    done: list[Proposal] = []
    seen: set[str] = set()

    def place(item: Proposal) -> None:
        if item.name in seen:
            return
        seen.add(item.name)
        for other in largest:
            if item.name in other.variants[0].enables or other.name in item.variants[0].needs:
                place(other)
        done.append(item)

    for item in largest:
        place(item)
    return done


def added_to(stack: Sequence[Pass], p: Pass, needed: Sequence[Pass]) -> list[Pass]:
    """`stack` with `p` and what it needs, in the order in which passes run.

    Another variant of `p` leaves, and so does what conflicts with `p` or with what it needs, and what cannot do without
    one that left. A needed pass that is there already stays as it is.
    """
    joining = [*(q for q in needed if q.name not in {s.name for s in stack}), p]
    staying = [q for q in stack if q.name != p.name and not any(registry.in_conflict(q, j) for j in joining)]
    gone = {q.name for q in stack if q.name != p.name} - {q.name for q in staying}
    while lost := [q for q in staying if gone & set(q.needs)]:
        gone |= {q.name for q in lost}
        staying = [q for q in staying if q not in lost]
    return registry.order([*staying, *joining])


def _key(passes: Sequence[Pass]) -> frozenset[str]:
    return frozenset(f"{p.name} {p.fingerprint()}" for p in passes)


def _stays_because(trial: Trial) -> str:
    assert trial.entry.paired is not None
    return f"not shown to be faster by itself ({trial.entry.paired.spelled}); stays under later passes"
