"""docs/labels.md lists the axes and rules that there are, with their conditions."""

from __future__ import annotations

from pathlib import Path

from test_docs import table

from fxopt.labels import Axis
from fxopt.rules import describe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "labels.md"


def test_every_axis_is_explained() -> None:
    assert [row[0] for row in table("## Axes", PAGE)] != []
    assert {row[0] for row in table("## Axes", PAGE)} == {f"`{axis.value}`" for axis in Axis}


def test_the_table_of_rules_is_the_codes() -> None:
    expected = [
        [f"`{row['name']}`", f"`{row['axis']}`", row["condition"], ", ".join(row["devices"])] for row in describe()
    ]
    assert table("## Rules", PAGE) == expected
