"""How the ranks of one job decide on the code of a graph: rank 0 as it would alone, the others by its plan, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fxopt import distributed, identity
from fxopt.plan import Plan
from fxopt.report.model import phase
from fxopt.warning import warn

if TYPE_CHECKING:
    from fxopt.tuner import Tuner


def decide_together(tuner: Tuner, ranks: distributed.Group, parts: dict[str, Any]) -> Callable[..., Any]:
    """The code that all ranks decide on (see `fxopt.distributed`)."""
    graph, settings = identity.between_ranks(parts)
    session = ranks.session(graph, tuner.report.key)
    kept: Callable[..., Any] | None = None
    try:
        if session.settled:
            # The same graph again: the other ranks need not be at it.
            tuner.report.source = "plan"
            with phase(tuner.report, "apply plan"):
                return tuner.apply(session.settled_plan(), trusted=True)
        with session.alive():
            with phase(tuner.report, "meet the other ranks"):
                session.meet()
            if session.leads:
                why = "rank 0 keeps Inductor's code, without a plan"
                published: list[Plan] = []

                def tell(plan: Plan | None) -> None:
                    published.extend([plan] if plan is not None else [])
                    session.publish(plan, settings, why)

                kept = tuner.decide(tell)
                plan = published[0] if published else None
            else:
                with phase(tuner.report, "wait for the plan"):
                    plan = session.receive(settings)
                own = tuner.load_plan()
                if own is not None and own.digest() == plan.digest():
                    plan = own  # which knows where it was verified
                tuner.report.source = "plan"
                with phase(tuner.report, "apply plan"):
                    kept = tuner.apply(plan)
            if plan is None:
                tuner.report.agreement = session.disagreement(distributed.NoAgreement(why))
                return kept
            with phase(tuner.report, "agree with the other ranks"):
                tuner.report.agreement = session.conclude(plan)
    except distributed.NoAgreement as error:
        return _disagree(tuner, session, error)
    except distributed.STORE_FAILED as error:
        return _disagree(tuner, session, session.lost(error))
    except BaseException as error:
        session.give_up(f"{type(error).__name__}: {error}")
        raise
    digest = tuner.report.agreement.plan[:12]
    tuner.report.messages.append(f"{ranks.size} ranks run one plan ({digest}), which rank 0 measured")
    return kept


def _disagree(
    tuner: Tuner, session: distributed.Session, error: distributed.NoAgreement
) -> Callable[..., Any]:
    tuner.report.agreement = session.disagreement(error)
    tuner.report.decision, tuner.report.frozen, tuner.report.verdict = "baseline", False, None
    for entry in tuner.report.candidates:
        if entry.outcome == "kept":
            entry.outcome, entry.reason = "rejected", str(error)
    if not error.usual:
        warn(f"the model runs on plain Inductor, for the ranks run no plan together: {error}")
    return tuner.plain(f"the ranks run no plan together: {error}", source="skipped" if error.usual else "fallback")
