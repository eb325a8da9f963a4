"""Passes forced on: every graph has a plan that uses them, and every node the labels that they answer.

A plan is not verified again where it is applied, so a pass has to be right by itself, and no timing decides.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxopt
from fxopt import machine, measure, registry
from fxopt.plan import PassUse, Plan, PlanStore
from fxopt.registry import PassContext
from fxopt.report.model import GraphReport, to_plain
from fxopt.testing import stand_ins
from fxopt.warning import FxoptWarning
from profiler_core import roofline

#: all that rewrite on the CPU without giving up accuracy
EXACT = ("causal_mask", "merge_projections", "channels_last", "remove_redundant_casts_and_copies")
#: and those that hold weights constant, which `fxopt.optimize` alone may
FOLDING = ("freeze_weights", *EXACT) + (("onednn_linear",) if torch.backends.mkl.is_available() else ())

#: Inductor's option to call torch's own kernels, for tests of what the graph becomes: no C++ has to be compiled
TORCHS_KERNELS = {"fallback_by_default": True}


def force(monkeypatch: pytest.MonkeyPatch, *names: str, device: str = "cpu") -> None:
    """Every graph is compiled with the passes `names`, in the order that the registry gives them."""
    known = registry.discover()
    uses = [PassUse(name=n, options=to_plain(known[n]().options()), stage=known[n].stage.value) for n in names]
    here = [machine.machine(torch.device(device))]  # or the plan would be verified before it is used
    made = {"decision": "candidate", "passes": uses, "machines": here}
    monkeypatch.setattr(PlanStore, "load", lambda self, key: Plan(key=key, **made))
    monkeypatch.setattr(PassContext, "answers", lambda self, node, axes: True)


def given_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's ceilings are not measured: labels do not depend on how busy the machine is."""
    monkeypatch.setattr(roofline, "ceilings", lambda device, store: stand_ins.CEILINGS)


def always_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed, and every candidate that is right is faster than what it is compared with."""
    monkeypatch.setattr(measure, "noise_floor", lambda *args, **kwargs: 0.01)
    monkeypatch.setattr(measure, "compare", lambda *args, **kwargs: stand_ins.TWICE_AS_FAST)


def compiled(model: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    return torch.compile(model, backend="profile_guided", options={"on_error": "raise", **(options or {})}, **kwargs)


def optimized(model: torch.nn.Module, inputs: Any, **options: Any) -> Any:
    return fxopt.optimize(model, inputs, on_error="raise", **options)


def rewritten(report: GraphReport) -> dict[str, int]:
    """What each forced pass did in the graph."""
    assert report.source == "plan", report.messages
    return {r.name: r.rewritten for r in report.candidates[0].reports}


def last() -> GraphReport:
    return fxopt.last_report().graphs[0]


def warned(caught: Any) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, FxoptWarning)]


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()
