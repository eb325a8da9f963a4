"""Hardware counters as a tool reported them: a row per profiled kernel, before they are matched to a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from profiler_core.trace import SHAPE_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

# Column -> (dtype, what stands there where the source does not say). Metric columns follow, all float64.
ROW_COLUMNS: dict[str, tuple[str, Any]] = {
    "name": ("object", ""),  # as the tool spells it
    "process": ("int64", 0),
    "id": ("int64", -1),  # the tool's own number of the row, which restarts per file or process
    "device": ("int64", -1),
    "stream": ("int64", -1),
    "context": ("int64", -1),
    **SHAPE_COLUMNS,
}


class CounterError(ValueError):
    """A file of counters cannot be read; the message names the file, the place and the remedy."""


@dataclass
class CounterTable:
    """``rows`` holds :data:`ROW_COLUMNS`, then a float64 column per metric under its PerfWorks name, in launch order
    within a process. Values are in base units (ns, byte, %, plain counts), NaN where the tool has none.

    ``source`` is "ncu" or "cupti"; ``replay`` "kernel", "application" or "" where the file does not say; ``passes``
    how often each kernel ran for it (None: unknown). ``partial`` says what was lost of a damaged file.
    """

    rows: pd.DataFrame
    units: dict[str, str] = field(default_factory=dict)
    source: str = "ncu"
    replay: str = ""
    passes: int | None = None
    path: str = ""
    notes: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()

    @property
    def metrics(self) -> list[str]:
        """Names of the metric columns."""
        return [str(name) for name in self.rows.columns if name not in ROW_COLUMNS]
