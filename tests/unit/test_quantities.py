"""Numbers with units as people read them."""

from __future__ import annotations

import pytest

from fxopt.cli_output import spelled
from profiler_core.quantities import duration, glued, quantity


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0.0, "0 ns"),
        (812.0, "812 ns"),
        (999.6, "1.00 us"),
        (3_421.0, "3.42 us"),
        (34_210.0, "34.2 us"),
        (342_100.0, "342 us"),
        (999_600.0, "1.00 ms"),
        (115_400_000.0, "115 ms"),
        (2_500_000_000.0, "2.50 s"),
        (-2.5e9, "-2.50 s"),
        (119.4e9, "119 s"),
        (119.6e9, "2 min 0 s"),
        (200e9, "3 min 20 s"),
    ],
)
def test_a_duration_has_three_digits_and_the_unit_that_suits_it(ns: float | None, text: str) -> None:
    assert duration(ns) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (12_345, "ns", "12.3 us"),
        (1.5e6, "byte", "1.50 MB"),
        (12, "byte", "12 B"),
        (999.6e9, "FLOP/s", "1.00 TFLOP/s"),
        (0.1815, "1", "0.181"),
        (71.52, "%", "71.5 %"),
        (24.31, "FLOP/byte", "24.3 FLOP/byte"),
    ],
)
def test_a_quantity_has_its_unit(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_a_number_is_held_to_its_unit_and_to_nothing_else() -> None:
    assert glued("97 % of 12.3 us, 1.5 MB and 2 GFLOP/s", "~") == "97~% of 12.3~us, 1.5~MB and 2~GFLOP/s"
    assert glued("3 min 20 s", "~") == "3~min 20~s"
    for text in ("2 steps", "layer 1 sum", "5 user kernels", "x = 3 %y", "mm_1 s/t"):
        assert glued(text, "~") == text


def test_what_the_command_prints_of_a_plan_has_no_raw_ns() -> None:
    evidence = {"metric": "time_ns", "value": 269_000.0, "threshold": None, "unit": "ns", "source": "measured"}
    plan = {"profile": {"kernel_ns": 544_000.0, "wall_ns": None, "share": 0.5}, "labels": [{"evidence": [evidence]}]}
    assert spelled(plan) == {
        "profile": {"kernel": "544 us", "wall": None, "share": 0.5},
        "labels": [{"evidence": [{"metric": "time_ns", "value": "269 us", "threshold": None, "source": "measured"}]}],
    }
    assert spelled(1e6, "profile.kernel_ns") == "1.00 ms" and spelled(True, "a_ns") is True
