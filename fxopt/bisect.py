"""Rewrites counted over a whole process, so that the one that breaks a model can be found by halving.

`FXOPT_BISECT=N` applies the first N rewrites and leaves the others out; `FXOPT_BISECT_LOG=FILE` lists them all. One
rewrite is one accepted candidate of a graph pass, or one config or runtime pass on one graph. What is applied is a
plan, so that the rewrites, and their order, are the same from run to run; `fxopt bisect` does the halving.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["LOG_VARIABLE", "Bisection", "Rewrite", "is_limit", "of_process", "read_log"]

LOG_VARIABLE = "FXOPT_BISECT_LOG"

_REASON = "bisect limit "


@dataclass(frozen=True)
class Rewrite:
    """One line of a log: `number` counts from 1 over the process, `taken` is false beyond the limit."""

    number: int
    pass_name: str
    target: str
    graph: str = ""
    taken: bool = True


@dataclass
class _Count:
    value: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Bisection:
    """Counts the rewrites of one graph, in one count with others, and says which are within the limit (None: all).

    log: a file to which a line is added for each rewrite; None for no log. graph: its name in the log. May be used by
    several threads.
    """

    def __init__(
        self, limit: int | None, log: Path | None = None, *, graph: str = "", count: _Count | None = None
    ) -> None:
        self.limit = limit
        self.log = log
        self.graph = graph
        self._count = count if count is not None else _Count()

    @property
    def count(self) -> int:
        """Rewrites asked for so far."""
        return self._count.value

    @property
    def reason(self) -> str:
        """Why a rewrite that `take` denies is left out, for a report."""
        return f"{_REASON}{self.limit}"

    def take(self, pass_name: str, target: str) -> bool:
        """Count one rewrite; whether it is to be made."""
        with self._count.lock:
            self._count.value += 1
            number = self._count.value
            taken = self.limit is None or number <= self.limit
            if self.log is not None:
                line = "\t".join([str(number), pass_name, target, self.graph, "taken" if taken else "denied"])
                try:
                    with self.log.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")
                except OSError as error:
                    warnings.warn(f"fxopt: the rewrites cannot be listed in {self.log}: {error.strerror}", stacklevel=2)
                    self.log = None
        return taken


def of_process(limit: int | None, graph: str = "") -> Bisection | None:
    """A part, for one graph, of this process's count under `limit`; None where nobody asked for a limit or a log."""
    log = os.environ.get(LOG_VARIABLE, "").strip()
    if limit is None and not log:
        return None
    return Bisection(limit, Path(log) if log else None, graph=graph, count=_count(limit, log))


@functools.cache
def _count(limit: int | None, log: str) -> _Count:
    return _Count()


def is_limit(reason: str) -> bool:
    """Whether a refusal's reason is that the limit was reached."""
    return reason.startswith(_REASON)


def read_log(path: Path) -> list[Rewrite]:
    """The rewrites that a process has listed, in order. ValueError names a line that is not one of them."""
    rewrites = []
    for place, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        parts = line.split("\t")
        if len(parts) != 5 or not parts[0].isdigit() or parts[4] not in ("taken", "denied"):
            raise ValueError(f"{path}, line {place}: not a line of {LOG_VARIABLE}: {line!r}")
        rewrites.append(Rewrite(int(parts[0]), parts[1], parts[2], parts[3], parts[4] == "taken"))
    return rewrites
