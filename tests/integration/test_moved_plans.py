"""Plans that this process did not make: from another machine, or from somebody who means harm."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forced_passes import always_faster, given_ceilings
from torch import nn

import fxopt
from fxopt import machine, registry, verify
from fxopt.report.model import GraphReport
from fxopt.testing.stand_ins import DoubledNegation
from fxopt.warning import FxoptWarning

aten = torch.ops.aten
ELSEWHERE = {"host": "0123456789abcdef", "gpus": []}


Run = Callable[..., tuple[GraphReport, list[str]]]


@pytest.fixture
def run(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Compiles and calls a small model; its report and fxopt's warnings. Every candidate counts as faster."""
    given_ceilings(monkeypatch)
    always_faster(monkeypatch)
    registry.register(DoubledNegation)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).eval(), torch.randn(4, 16)

    def call(**options: Any) -> tuple[GraphReport, list[str]]:
        torch._dynamo.reset()
        quick = {"pairs": 6, "iterations": 1, "warmup": 1, "verify_inputs": 1, "passes": ["doubled_negation"]}
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            y = torch.compile(model, backend="profile_guided", options={**quick, **options})(x)
            assert torch.allclose(y, model(x), atol=1e-6)
        said = [str(w.message) for w in caught if issubclass(w.category, FxoptWarning)]
        return fxopt.last_report().graphs[0], said

    yield call
    registry.unregister("doubled_negation")


def edit(report: GraphReport, **changes: Any) -> Path:
    path = Path(report.plan_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_a_plan_of_another_machine_is_verified_once_and_then_trusted(run, monkeypatch):
    report, _ = run()
    assert (report.source, report.decision) == ("tuned", "candidate")
    path = edit(report, machines=[ELSEWHERE])
    moved, said = run(mode="apply")
    assert (moved.source, moved.passes, said) == ("plan", ["doubled_negation"], [])
    assert moved.verdict is not None and moved.verdict.ok
    assert any("was made on another machine; it was verified here" in message for message in moved.messages)
    here = machine.machine(torch.device("cpu")).model_dump()
    assert json.loads(path.read_text())["machines"] == [ELSEWHERE, here]
    monkeypatch.setattr(verify, "verify", lambda *args, **kwargs: pytest.fail("verified again"))
    again, said = run(mode="apply")
    assert (again.source, again.messages, said) == ("plan", [], [])


def test_a_plan_that_is_wrong_here_is_not_used_and_tuning_makes_another(run, monkeypatch):
    report, _ = run()
    edit(report, machines=[ELSEWHERE])
    with monkeypatch.context() as patch:
        wrong = verify.Verdict(False, "output 0: relative L2 error 0.5", math.nan)
        patch.setattr(verify, "verify", lambda *args, **kwargs: wrong)
        kept, said = run(mode="apply")
    assert (kept.source, kept.decision) == ("apply", "baseline")
    assert len(said) == 1 and "made on another machine, and is wrong here: output 0" in said[0]
    assert "never measures" in kept.messages[-1] and "no plan" not in kept.messages[-1]
    edit(report, mutated=[1])
    tuned, said = run()
    assert (tuned.source, tuned.passes) == ("tuned", ["doubled_negation"])
    assert len(said) == 1 and "writes to other inputs than it does" in said[0]
    assert run()[0].source == "plan"


def test_apply_says_once_why_the_plan_of_a_newer_fxopt_is_not_used(run):
    report, _ = run()
    edit(report, schema_version=2)
    kept, said = run(mode="apply")
    assert (kept.source, kept.decision) == ("apply", "baseline")
    assert len(said) == 1 and "upgrade fxopt" in said[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"passes": [{"name": "os.system", "options": {}, "stage": "joint"}]}, "'os.system' is not a pass"),
        ({"passes": [{"name": "freeze_weights", "options": {}, "stage": "config"}]}, "is not a pass that may run here"),
        (
            {
                "passes": [
                    {"name": "doubled_negation", "options": {"__reduce__": ["os.system", "false"]}, "stage": "joint"}
                ]
            },
            "no option is named '__reduce__'",
        ),
    ],
    ids=["a call", "a pass that the caller did not allow", "a pickle's word"],
)
def test_a_plan_that_asks_for_more_than_it_may_is_refused_and_the_model_runs(run, changes, told):
    report, _ = run()
    edit(report, **changes)
    refused, said = run()
    assert (refused.source, refused.decision, refused.passes) == ("fallback", "baseline", [])
    assert len(said) == 1 and told in said[0] and "Nothing of it was used" in said[0]
    assert "fxopt plans remove" in said[0]
