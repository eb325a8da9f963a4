"""Which sets of passes are tried, in which order, and which of them is best. No compiling and no timing in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fxopt import registry
from fxopt.labels import Label
from fxopt.registry import Pass
from fxopt.report.model import CandidateReport


@dataclass
class Trial:
    """One candidate that was built, found right and timed. `kernel_ns` in `entry` is known."""

    passes: list[Pass]
    build: Any
    entry: CandidateReport


def search(
    proposals: Sequence[Pass],
    *,
    evaluate: Callable[[list[Pass], Trial | None], Trial | None],
    propose: Callable[[Sequence[Label]], Sequence[Pass]],
    faster: Callable[[CandidateReport, CandidateReport | None], bool],
    less_kernel_time: Callable[[CandidateReport, CandidateReport | None], bool],
    expired: Callable[[Pass], bool],
    needs: Callable[[Pass], Sequence[Pass]],
) -> Trial | None:
    """Add passes one at a time; return the best trial, or None where nothing beats the baseline.

    evaluate(passes, best): builds, verifies and times one candidate against the best so far (None: the baseline);
        None where it cannot be used.
    propose(labels): passes not considered yet that answer the labels of a trial as measured again.
    faster, less_kernel_time: compare a trial with the best so far by the objective, and by its kernels alone.
    expired(pass): whether there is no time left to try it. needs(pass): the passes it cannot do without.

    A trial that is right but no faster stays under the next one where its pass says that it enables a later one
    (frozen weights cost nothing to cast), or where its kernels are shorter: a device that waits for launches does not
    gain from shorter kernels until the waiting is gone.
    """
    stack: list[Pass] = []
    best: Trial | None = None
    waiting = list(proposals)
    while waiting:
        p = waiting.pop(0)
        if expired(p):
            continue
        passes = registry.order(list({q.name: q for q in (*stack, *needs(p), p)}.values()))
        trial = evaluate(passes, best)
        if trial is None:
            continue
        entry = trial.entry
        before = best.entry if best is not None else None
        wins, shorter = faster(entry, before), less_kernel_time(entry, before)
        if wins or shorter:
            # What limits it may have changed with its kernels.
            waiting = registry.order([*waiting, *propose(entry.labels)])
        timed = entry.paired
        assert timed is not None
        if wins:
            best, stack = trial, passes
            entry.outcome, entry.reason = "kept", f"{timed.ratio:.2f}x as fast as the best before it"
        elif set(p.enables) & {q.name for q in waiting} or (shorter and waiting):
            stack = passes
            entry.outcome, entry.reason = "rejected", "no faster by itself; stays under later passes"
        else:
            entry.outcome = "rejected"
            entry.reason = (
                f"not shown to be faster: {timed.ratio:.3f}x, interval {timed.low:.3f} to {timed.high:.3f}, "
                f"noise {timed.noise:.3f}"
            )
    return best
