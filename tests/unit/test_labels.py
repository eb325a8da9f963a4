"""Labels survive JSON exactly, and bad ones are refused by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fxopt.labels import Axis, Evidence, Label, LabelError

LABEL = Label(
    axis=Axis.MEMORY_BOUND,
    scope="group",
    nodes=("mul", "add"),
    launch="triton_poi_fused_0:3",
    evidence=(
        Evidence("bandwidth_fraction", 0.1 + 0.2, 0.6, "1", "modelled"),
        Evidence("time_ns", 1e6 / 3, None, "ns", "measured"),
    ),
    confidence="medium",
    headroom_ns=2**0.5 * 1e3,
    why="It moves 1e+06 bytes.",
)


def test_a_label_comes_back_from_json_equal_to_the_last_bit() -> None:
    assert Label.from_json(json.loads(json.dumps(LABEL.to_json()))) == LABEL


@pytest.mark.parametrize("axis", list(Axis))
def test_every_axis_survives_json(axis: Axis) -> None:
    label = Label(axis, "graph", (), "", (), "high", 0.0, "")
    assert Label.from_json(json.loads(json.dumps(label.to_json()))) == label


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("axis", "cosmic_rays"),
        ("scope", "model"),
        ("confidence", "certain"),
        ("headroom_ns", "12"),
        ("headroom_ns", True),
        ("headroom_ns", -1.0),
        ("headroom_ns", float("nan")),
        ("nodes", [1]),
        ("launch", None),
        ("evidence", {}),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(field: str, value: Any) -> None:
    with pytest.raises(LabelError, match=field):
        Label.from_json({**LABEL.to_json(), field: value})


@pytest.mark.parametrize(
    "field", ["axis", "scope", "nodes", "launch", "evidence", "confidence", "headroom_ns", "why"]
)
def test_a_missing_field_is_named(field: str) -> None:
    data = LABEL.to_json()
    del data[field]
    with pytest.raises(LabelError, match=f"'{field}' is missing"):
        Label.from_json(data)


def test_bad_evidence_is_named_by_its_place() -> None:
    data = LABEL.to_json()
    data["evidence"][1]["source"] = "guessed"
    with pytest.raises(LabelError, match=r"evidence\[1\].*source.*measured"):
        Label.from_json(data)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_evidence_is_finite(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Evidence("ratio", value, None, "1", "measured")


def test_what_is_not_an_object_is_refused() -> None:
    with pytest.raises(LabelError, match="object"):
        Label.from_json([])
