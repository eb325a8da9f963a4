"""Labels of kernels that were measured on an H200 once: profiles with all counters of both sets of label kernels.

Measured with the thresholds as they were frozen before the holdout was written (results/h200/labels.json).
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from case_studies.label_kernels import cases
from case_studies.labels import Outcome, judge, summary, without_counters
from fxopt.labels import Axis
from profiler_core.profiles import Profile
from profiler_core.roofline import Ceilings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles")
    with tarfile.open(ROOT / "tests" / "fixtures" / "label_profiles.tar.xz") as archive:
        archive.extractall(path, filter="data")
    return path


def outcomes(folder: Path, counted: bool = True) -> list[Outcome]:
    ceilings = Ceilings.from_json(json.loads((folder / "ceilings.json").read_text()))
    found = []
    for case in cases():
        profile = Profile.load(folder / f"{case.name}.json")
        found.append(judge(case, profile if counted else without_counters(profile), ceilings))
    return found


@pytest.fixture(scope="module")
def judged(folder: Path) -> list[Outcome]:
    return outcomes(folder)


def test_nine_in_ten_of_each_set_are_labelled_right_and_every_axis_has_three_kernels(judged: list[Outcome]) -> None:
    found = summary(judged)
    assert found["development"]["all"]["share"] >= 0.9
    assert found["holdout"]["all"]["share"] >= 0.9
    for rows in found.values():
        assert all(rows[axis.value]["cases"] >= 3 for axis in Axis)


def test_no_copy_is_compute_bound_and_no_product_memory_bound(judged: list[Outcome]) -> None:
    """A matrix times a vector, or a thin matrix, does limit memory: those say so by expecting it."""
    forbidding = [o for o in judged if {Axis.COMPUTE_BOUND, Axis.MEMORY_BOUND} & o.case.forbidden]
    assert len(forbidding) > 20
    for outcome in forbidding:
        assert not outcome.case.forbidden & outcome.found & {Axis.COMPUTE_BOUND, Axis.MEMORY_BOUND}, outcome.case.name


def test_no_kernel_has_a_label_that_it_must_not_have(judged: list[Outcome]) -> None:
    assert [o.case.name for o in judged if o.case.forbidden & o.found] == []


def test_the_recorded_result_is_what_was_measured_with_the_frozen_thresholds() -> None:
    """Rules may have become better since; they must not have become worse."""
    recorded = json.loads((ROOT / "results" / "h200" / "labels.json").read_text())
    assert recorded["environment"]["device_name"] == "NVIDIA H200" and not recorded["thresholds"]
    assert recorded["summary"]["holdout"]["all"]["right"] == 79
    assert recorded["summary"]["holdout"]["all"]["cases"] == len(cases("holdout")) == 82


def test_rules_have_not_become_worse(judged: list[Outcome]) -> None:
    recorded = json.loads((ROOT / "results" / "h200" / "labels.json").read_text())["cases"]
    right = {name for name, case in recorded.items() if case["right"]}
    assert right <= {outcome.case.name for outcome in judged if outcome.right}


def test_without_counters_fewer_labels_are_found_and_a_wrong_one_says_that_it_is_unsure(folder: Path) -> None:
    judged = outcomes(folder, counted=False)
    right = sum(outcome.right for outcome in judged)
    assert 0.4 * len(judged) < right < 0.6 * len(judged)
    wrong = [(label.axis, label.confidence) for o in judged for label in o.labels if label.axis in o.case.forbidden]
    # error functions compute more than the model knows
    assert wrong == [(Axis.LATENCY_BOUND, "low")]
