"""docs/reading_a_report.md explains every axis, in the code's order, and every column that a report's nodes have."""

from __future__ import annotations

import re
from pathlib import Path

from fxopt.labels import Axis
from fxopt.report.notebook import LABEL_COLUMNS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reading_a_report.md").read_text(encoding="utf-8")


def test_every_axis_has_its_line_and_a_link() -> None:
    told = re.findall(r"^\| \[`(\w+)`\]\(labels\.md#axes\) \| \S.* \|$", PAGE, re.MULTILINE)
    assert sorted(told) == sorted(axis.value for axis in Axis)


def test_every_column_of_the_labelled_nodes_is_told() -> None:
    assert re.findall(r"^\| `(\w+)` \| ", PAGE, re.MULTILINE) == [*LABEL_COLUMNS, "part"]
