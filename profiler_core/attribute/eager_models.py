"""What each node outside of the compiled graphs computes and moves, from the inputs that the trace recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from profiler_core.attribute.rows import Rows
    from profiler_core.call_cost import CallCost
    from profiler_core.trace import Trace


@dataclass(frozen=True)
class NodeModel:
    """Modelled work of a node in a call of the program; None where that of any of its operators' calls is not known.
    ``dtype`` ("float32") and ``shape`` are of the first result, where all calls agree.
    """

    flops: float | None
    bytes: float | None
    dtype: str | None
    shape: tuple[int, ...] | None


def eager_models(trace: Trace, rows: Rows, kernels: pd.DataFrame, iterations: int) -> dict[str, NodeModel]:
    """By node, of those in ``kernels`` that are outside of every graph; none where the trace has no inputs."""
    import numpy as np

    if not trace.inputs:
        return {}
    inside = (kernels["method"] != "none") & (kernels["iteration"] >= 0) & (kernels["launch"] == "")
    asked = np.flatnonzero(inside.to_numpy(dtype=bool))
    top = rows.ranges.at(rows.ranges.top_operator, rows.range[asked])
    calls: dict[str, dict[int, None]] = {}  # an operator may launch several kernels: each call counts once
    for node, row in zip(kernels["nodes"].to_numpy()[asked], top.tolist(), strict=True):
        calls.setdefault(str(node[0]), {})[row] = None
    costs = _Costs(trace, rows)
    return {node: _summed([costs.of(row) for row in found], iterations) for node, found in calls.items()}


def _summed(costs: list[CallCost | None], iterations: int) -> NodeModel:
    known = [cost for cost in costs if cost is not None]

    def total(values: list[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        return sum(numbers) / iterations if len(numbers) == len(costs) else None

    dtypes, shapes = {cost.dtype for cost in known}, {cost.shape for cost in known}
    agreed = len(known) == len(costs)
    dtype = dtypes.pop() if agreed and len(dtypes) == 1 else None
    return NodeModel(
        total([cost.flops for cost in known]),
        total([cost.bytes for cost in known]),
        str(dtype).removeprefix("torch.") if dtype is not None else None,
        shapes.pop() if agreed and len(shapes) == 1 else None,
    )


class _Costs:
    """The cost of each call of an operator in the trace, modelled once for each kind of call."""

    def __init__(self, trace: Trace, rows: Rows) -> None:
        self._ranges = rows.ranges
        self._inputs = trace.ranges["inputs"].to_numpy()
        self._given = trace.inputs
        self._known: dict[tuple[str, int], CallCost | None] = {}
        self._below: dict[int, list[int]] | None = None

    def of(self, row: int) -> CallCost | None:
        from profiler_core import call_cost

        number = int(self._inputs[row])
        name = str(self._ranges.names[self._ranges.codes[row]])
        if number < 0:
            return None
        key = name, number
        if key not in self._known:
            self._known[key] = call_cost.call_cost(name, self._given[number])
        found = self._known[key]
        if found is None and call_cost.composite(name, self._given[number]):
            return self._of_parts([self.of(part) for part in self._parts(row)])
        return found

    @staticmethod
    def _of_parts(parts: list[CallCost | None]) -> CallCost | None:
        """Of an operator that is nothing but those it calls: what is between them is written and read as well."""
        from profiler_core.call_cost import CallCost

        if any(part is None for part in parts):
            return None
        known = [part for part in parts if part is not None]
        last = known[-1] if known else CallCost(0.0, 0.0)
        flops, moved = ([getattr(part, name) for part in known] for name in ("flops", "bytes"))
        return CallCost(
            None if None in flops else float(sum(flops)),
            None if None in moved else float(sum(moved)),
            last.dtype,
            last.shape,
        )

    def _parts(self, row: int) -> Iterator[int]:
        """The operators that the one in ``row`` calls, in order."""
        if self._below is None:
            self._below = {}
            for part, above in self._nested():
                self._below.setdefault(above, []).append(part)
        yield from self._below.get(row, ())

    def _nested(self) -> Iterator[tuple[int, int]]:
        import numpy as np

        ranges = self._ranges
        count = np.arange(len(ranges.parent))
        around = ranges.at(ranges.operator, ranges.parent)
        operators = np.flatnonzero((ranges.operator == count) & (around >= 0))
        yield from zip(operators.tolist(), around[operators].tolist(), strict=True)
