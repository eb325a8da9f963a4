"""Reads what Nsight Compute wrote: CSV of the raw and of the details page, and reports (.ncu-rep).

Numbers are printed in the locale of the machine that ran ncu, and the file does not say which. A value proves a
locale if it is well formed in it and not in the other: ``2.33``, ``0.125``, ``1,205.00`` and ``1,205,000`` are only
English, ``65,77``, ``0,125``, ``1.205,00`` and ``27.595.520`` only European, while ``117.344`` can be either. One
proof decides for the whole file; proofs of both are an error; with none the file is read as English, and a note says
so if that made a difference.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_core.collect.ncu_text import DESCRIPTIONS, MISSING, base_unit, locale_of, metric_name, number, remedy
from profiler_core.counter_table import ROW_COLUMNS, CounterError, CounterTable
from profiler_core.trace import LONGEST_NS

if TYPE_CHECKING:
    import numpy as np

_LOG = re.compile(r"==(\w+)== ?(.*)")
_ROW_START = re.compile(r'"\d[\d.,]*","')
_FIXED = {
    "ID": "id",
    "Process ID": "process",
    "Kernel Name": "name",
    "Context": "context",
    "Stream": "stream",
    "Block Size": "block",
    "Grid Size": "grid",
    "Device": "device",
}
_UNREAD = {"Process Name", "Host Name", "CC", "Kernel Time"}  # nothing that a match or a counter needs
# Columns that can hold lists such as "0,1" (CPUs of a NUMA node, ports): no evidence for a decimal comma.
_LISTS = ("numa__", "nvlink__", "device__")
_DURATION = "gpu__time_duration"
_BYTES = re.compile(r"__bytes(?:_\w+)?\.(?:sum|avg|min|max)$")
_SHOWN = 5
_FLUSH = 1000  # rows, so that their text is not all in memory at once


def read(path: str | Path) -> CounterTable:
    """Counters of an ``ncu --csv`` file (``--page raw`` or ``details``, logs and program output in between are
    skipped) or of a report. Rows are in the order of the file, which is that of the launches of each process.

    A row of the details page is found under its PerfWorks name where that is known, else as "section: metric". A
    file without a kernel is an error that quotes ncu's own; a damaged one is read as far as it goes, and
    ``partial`` says what is missing. Raises CounterError (and OSError where the file cannot be opened).
    """
    path = Path(path)
    if path.suffix in (".ncu-rep", ".ncu-repz"):
        from profiler_core.collect.ncu_rep import read_report

        return read_report(path)
    data = path.read_bytes()
    # PowerShell's redirection writes UTF-16.
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return parse(data.decode(encoding, errors="replace"), str(path))


def parse(text: str, path: str = "") -> CounterTable:
    """:func:`read` for CSV that is in memory; ``path`` is only quoted."""
    found = _Found(path)
    table: _Raw | _Details | None = None
    for line, row in _lines(text, found):
        if row[0] == "ID":
            if table is not None:
                table.flush()
            row = found.header(line, row)
            table = _Details(row, found) if "Metric Name" in row else _Raw(row, found)
        elif table is None:
            found.other_lines += 1
        else:
            table.add(line, row)
    if table is not None:
        table.flush()
    return found.table()


class _Column:
    """A metric's cells as printed, per launch: codes of what is distinct, since most columns repeat few values."""

    def __init__(self) -> None:
        self.codes = array("l")  # per launch; -1 where it has no cell
        self.distinct: dict[tuple[str, str], int] = {}  # (text, unit)
        self.first_line: list[int] = []
        self.disagreeing = 0

    def put(self, launch: int, text: str, unit: str, line: int) -> None:
        code = self._code(text, unit, line)
        if launch < len(self.codes):  # the details page repeats a metric that several sections show
            self.disagreeing += code != self.codes[launch]
        else:
            self._pad(launch)
            self.codes.append(code)

    def extend(self, launch: int, texts: Sequence[str], unit: str, lines: Sequence[int]) -> None:
        """Cells of consecutive launches from ``launch`` on, none of which has one."""
        self._pad(launch)
        known: dict[str, int] = {}
        for text, line in zip(texts, lines, strict=True):
            if text not in known:
                known[text] = self._code(text, unit, line)
        self.codes.extend(map(known.__getitem__, texts))

    def _code(self, text: str, unit: str, line: int) -> int:
        code = self.distinct.setdefault((text, unit), len(self.first_line))
        if code == len(self.first_line):
            self.first_line.append(line)
        return code

    def _pad(self, launch: int) -> None:
        self.codes.extend([-1] * (launch - len(self.codes)))


@dataclass
class _Found:
    """Launches and cells as they are met, as text."""

    path: str
    launches: list[dict[str, Any]] = field(default_factory=list)
    cells: dict[str, _Column] = field(default_factory=lambda: defaultdict(_Column))
    log: list[tuple[str, str]] = field(default_factory=list)  # (PROF | WARNING | ERROR, text)
    other_lines: int = 0
    headers: int = 0
    left_out: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)

    def header(self, line: int, row: list[str]) -> list[str]:
        """The columns of a table; one that stands there again has no name, and is not read."""
        self.headers += 1
        first: dict[str, int] = {}
        again = [column for i, column in enumerate(row) if first.setdefault(column, i) != i and column]
        if again:
            self.notes.append(
                f"Line {line}: columns that stand there twice, of which the first is read: {some(again)}."
            )
        return [column if first[column] == i else "" for i, column in enumerate(row)]

    def launch(self, line: int, cell: dict[str, str]) -> None:
        """A launch with what its cells say; a number beyond its column is left at the default, and said."""
        launch: dict[str, Any] = {"process": 0, "name": cell.get("Kernel Name", "")}
        for column, name in _FIXED.items():
            digits = re.findall(r"\d+", cell.get(column, ""))
            if name in ("grid", "block"):
                numbers = dict(zip([f"{name}_{axis}" for axis in "xyz"], digits, strict=False))
            else:
                numbers = {name: "".join(digits)} if digits and name != "name" else {}  # "1,024"
            for place, text in numbers.items():
                largest = 2**31 - 1 if ROW_COLUMNS[place][0] == "int32" else 2**63 - 1
                if len(text) < 20 and int(text) <= largest:
                    launch[place] = int(text)
                else:
                    self.partial.append(
                        f"Line {line}: {column} {cell[column][:40]!r} is beyond {largest} and was left out."
                    )
        self.launches.append(launch)

    def table(self) -> CounterTable:
        self._refuse_empty()
        european = self._european()
        units: dict[str, str] = {}
        columns: dict[str, np.ndarray] = {}
        text_only: list[str] = []
        for metric, column in self.cells.items():
            texts = [t for t, _ in column.distinct if t not in MISSING and number(t, european) is None]
            if texts and len(texts) == sum(t not in MISSING for t, _ in column.distinct):
                text_only.append(metric)
                continue
            if texts:
                self.notes.append(f"{metric}: values that are no numbers are left out ({some(map(repr, texts))}).")
            if column.disagreeing:
                self.notes.append(f"{metric}: shown twice with different values for {column.disagreeing} rows; the "
                                  "first was kept.")  # fmt: skip
            columns[metric], units[metric] = self._values(metric, column, european)
        asked = [name for name in text_only if not name.startswith(DESCRIPTIONS)]
        if asked:
            self.notes.append(f"Left out, since they hold text: {some(asked)}.")
        if self.left_out:
            self.notes.append(f"Columns without counters, not read: {some(self.left_out)}.")
        self._note_log()
        passes = columns.get("profiler__replayer_passes")
        return CounterTable(
            rows=frame(self.launches, columns),
            units=units,
            passes=largest(passes) if passes is not None else self._passes_in_log(),
            path=self.path,
            notes=tuple(self.notes),
            partial=tuple(self.partial),
        )

    def _values(self, metric: str, column: _Column, european: bool) -> tuple[np.ndarray, str]:
        """Values per launch in base units, NaN where there is none, and the unit."""
        import numpy as np

        bases = [base_unit(unit)[0] for _, unit in column.distinct]
        is_duration = metric.startswith(_DURATION)
        # What is measured fixes the unit of some: a number in one that is not known here could be any number of those.
        unit = "ns" if is_duration else "byte" if _BYTES.search(metric) else next(filter(None, bases), "")
        values = []
        for (text, printed_unit), base, line in zip(column.distinct, bases, column.first_line, strict=True):
            value = None if text in MISSING else number(text, european)
            if value is not None and base and base != unit:
                self.partial.append(
                    f"{metric}: values in {base} (line {line}), not in {unit}, are left out. Print the file again with "
                    "--print-units base."
                )
                value = None
            if value is not None:
                value *= base_unit(printed_unit)[1]
                wrong = (
                    "is beyond a float" if not np.isfinite(value)
                    else "is a negative time" if unit == "ns" and value < 0
                    else "is over 2**53 ns (104 days)" if is_duration and value > LONGEST_NS
                    else "is beyond any launch" if metric.startswith("launch__") and abs(value) > 2**53
                    else ""
                )  # fmt: skip
                if wrong:
                    self.partial.append(f"{metric}: {text[:40]!r} (line {line}) {wrong} and was left out.")
                    value = None
            values.append(np.nan if value is None else value)
        codes = np.full(len(self.launches), -1, dtype=np.int64)
        codes[: len(column.codes)] = column.codes
        return np.asarray([*values, np.nan])[codes], unit  # code -1 is the last

    def _european(self) -> bool:
        proofs: dict[str, list[tuple[str, str]]] = {"english": [], "european": [], "either": [], "": []}
        for metric, column in self.cells.items():
            if not metric.startswith(_LISTS):
                for (text, _), line in zip(column.distinct, column.first_line, strict=True):
                    proofs[locale_of(text)].append((text, f"line {line}, {metric}"))
        english, european, either = proofs["english"], proofs["european"], proofs["either"]
        if english and european:
            raise CounterError(
                f"{self.path}: numbers of two locales, {english[0][0]!r} ({english[0][1]}) and {european[0][0]!r} "
                f"({european[0][1]}), so that others could mean two things. Print the file again with LC_ALL=C in "
                "ncu's environment."
            )
        if either and not european and not english:
            self.notes.append(
                f"Nothing in the file tells a decimal point from a thousands separator; {len(either)} values such as "
                f"{either[0][0]!r} ({either[0][1]}) were read as English."
            )
        return bool(european)

    def _refuse_empty(self) -> None:
        if self.launches:
            self.partial += [f"ncu reported: {text}" for kind, text in self.log if kind == "ERROR"]
            return
        errors = [text for kind, text in self.log if kind == "ERROR"]
        warnings = [text for kind, text in self.log if kind == "WARNING"]
        if errors:
            problem = "ncu profiled nothing: " + " / ".join(errors[:_SHOWN])
        elif self.headers:
            problem = "the table has no row" + (f" ({self.partial[0].rstrip('.')})" if self.partial else "")
        elif warnings:
            problem = "ncu profiled nothing: " + " / ".join(warnings[:_SHOWN])
        else:
            problem = 'no table of ncu (its header begins with "ID",)' if self.other_lines else "the file is empty"
        advice = remedy(text for _, text in self.log)
        if not advice and not errors:
            advice = "Write the file with `ncu --csv --page raw --print-units base --log-file FILE ...`."
        raise CounterError(f"{self.path}: {problem.rstrip('.')}." + (f"\n{advice}" if advice else ""))

    def _note_log(self) -> None:
        self.notes += [f"ncu warned: {text}" for kind, text in self.log if kind == "WARNING"]
        processes = {launch["process"] for launch in self.launches}
        if len(processes) > 1:
            self.notes.append(
                f"Rows of {len(processes)} processes ({some(map(str, sorted(processes)))}), each in its own order."
            )

    def _passes_in_log(self) -> int | None:
        passes = [int(m[1]) for kind, text in self.log if (m := re.search(r"- (\d+) pass(?:es)?$", text))]
        return max(passes, default=None)


class _Raw:
    """A table of the raw page: a row a launch, a column a metric, units in the first row."""

    def __init__(self, header: list[str], found: _Found) -> None:
        self.header, self.found = header, found
        self.units = [""] * len(header)
        # Columns of NVTX ranges (--nvtx) have a colon in their name; no metric has.
        self.metrics = [i for i, c in enumerate(header) if c and c not in _FIXED and c not in _UNREAD and ":" not in c]
        self.fixed = [i for i, c in enumerate(header) if c in _FIXED]
        found.left_out.update(dict.fromkeys(c for c in header if ":" in c))
        self.rows: list[list[str]] = []
        self.lines: list[int] = []

    def add(self, line: int, row: list[str]) -> None:
        if len(row) != len(self.header):
            self.found.partial.append(_ragged(line, row, len(self.header)))
        elif row[0] == "":
            self.flush()
            self.units = row
        else:
            self.rows.append(row)
            self.lines.append(line)
            if len(self.rows) == _FLUSH:
                self.flush()

    def flush(self) -> None:
        """Column by column, which is several times faster than cell by cell."""
        if not self.rows:
            return
        first = len(self.found.launches)
        for line, row in zip(self.lines, self.rows, strict=True):
            self.found.launch(line, {self.header[i]: row[i] for i in self.fixed})
        columns = list(zip(*self.rows, strict=True))
        for i in self.metrics:
            self.found.cells[self.header[i]].extend(first, columns[i], self.units[i], self.lines)
        self.rows, self.lines = [], []


class _Details:
    """A table of the details page: a row a launch and metric, and rows of rules, which have no metric. Rows of
    metrics end after their last field or one comma later, those of rules fill the header.
    """

    def __init__(self, header: list[str], found: _Found) -> None:
        self.header, self.found = header, found
        self.place = {name: i for i, name in enumerate(header)}
        self.needed = self.place.get("Metric Value", len(header)) + 1
        self.current: tuple[str, ...] = ()

    def add(self, line: int, row: list[str]) -> None:
        if len(row) < self.needed or len(row) > len(self.header) + 1:
            self.found.partial.append(_ragged(line, row, self.needed))
            return
        cell = dict(zip(self.header, row, strict=False))
        launch = (cell.get("Process ID", ""), cell["ID"], cell.get("Kernel Name", ""))
        if launch != self.current:
            self.current = launch
            self.found.launch(line, cell)
        metric = cell["Metric Name"]
        if metric:
            name = metric_name(cell.get("Section Name", ""), metric, cell.get("Body Item Label", ""))
            launch_number = len(self.found.launches) - 1
            self.found.cells[name].put(launch_number, cell["Metric Value"], cell.get("Metric Unit", ""), line)

    def flush(self) -> None:
        """Nothing is held back."""


def _lines(text: str, found: _Found) -> Iterable[tuple[int, list[str]]]:
    """(line number, fields) of what can be rows. The log and what the program printed go to ``found``."""
    pending, begun = "", 0
    for here, line in enumerate(text.split("\n"), 1):
        line = line.rstrip("\r")
        if pending and not _ROW_START.match(line):
            line, here = f"{pending}\n{line}", begun  # a description of a rule that goes over several lines
        elif pending:
            found.partial.append(f"Line {begun} ends within quotes and was left out.")
        pending = ""
        log = _LOG.match(line)
        if log:
            found.log.append((log[1], log[2].strip()))
        elif not line.startswith('"'):
            found.other_lines += bool(line.strip())
        elif line.count('"') % 2:
            pending, begun = line, here
        else:
            try:
                row = next(csv.reader([line]))
            except csv.Error as error:  # a carriage return outside quotes
                found.partial.append(f"Line {here} is no CSV ({error}) and was left out. Print the file again.")
                continue
            yield here, row
    if pending:
        found.partial.append(f"Line {begun}, the last one, ends within quotes and was left out: the file is cut off.")


def frame(launches: list[dict[str, Any]], columns: dict[str, np.ndarray]) -> Any:
    """``CounterTable.rows`` of ``launches`` (values of ROW_COLUMNS by name) and the metrics' columns."""
    import numpy as np
    import pandas as pd

    fixed: dict[str, Any] = {}
    for name, (dtype, default) in ROW_COLUMNS.items():
        values = [launch.get(name, default) for launch in launches]
        if dtype == "object":
            array = np.empty(len(values), dtype=object)
            array[:] = values
            fixed[name] = pd.Series(array, dtype=object)
        else:
            fixed[name] = pd.Series(np.asarray(values, dtype=dtype))
    return pd.DataFrame({**fixed, **columns})


def _ragged(line: int, row: list[str], wanted: int) -> str:
    return f"Line {line} has {len(row)} fields where {wanted} are due and was left out (it begins {row[0]!r})."


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def largest(values: np.ndarray) -> int | None:
    """The largest value; None where all are NaN."""
    import numpy as np

    return None if np.isnan(values).all() else int(np.nanmax(values))
