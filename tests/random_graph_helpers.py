"""What the tests over random graphs share, on the CPU and on a card."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from fxopt import registry


def for_all(strategy: Any, count: int, test: Callable[[Any], None], *, shrink: bool = True) -> None:
    """Run `test` on `count` graphs, always the same ones."""
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(strategy)
    def run(graph: Any) -> None:
        test(graph)

    run()


def built_in() -> list[str]:
    """Names of the passes that fxopt itself registers."""
    points = importlib.metadata.entry_points(group=registry.ENTRY_POINT_GROUP)
    return sorted(point.name for point in points if point.dist is not None and point.dist.name == "fxopt")
