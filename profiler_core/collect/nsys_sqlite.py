"""An SQLite export of nsys as tables of columns, whichever of them its schema has."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_core.trace import TraceError

if TYPE_CHECKING:
    import numpy as np

STRINGS = "StringIds"
EXPORT_AGAIN = "Export it again: nsys export --type sqlite --force-overwrite true -o OUT.sqlite REPORT.nsys-rep"
# Fetched at a time: a million rows as Python objects would take gigabytes, and the garbage collector most of the time.
ROWS = 2_000

Columns = dict[str, "np.ndarray[Any, Any]"]


@contextmanager
def opened(file: Path, path: Path) -> Iterator[Tables]:
    """The tables of ``file``, which messages call ``path``. Raises TraceError where it is no whole SQLite file."""
    _check(file, path)
    # The lock is honoured: an export that is still being written has part of the rows.
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as connection:
        yield Tables(connection, path)


def _check(file: Path, path: Path) -> None:
    """Raises where the header already says that the file is no whole SQLite file."""
    try:
        with file.open("rb") as stream:
            header = stream.read(100)
        size = file.stat().st_size
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}.") from error
    if not header:
        raise TraceError(f"{path}: the file is empty: its export did not finish. {EXPORT_AGAIN}")
    if not header.startswith(b"SQLite format 3\0"):
        raise TraceError(
            f"{path}: not an SQLite file (offset 0). Give the .nsys-rep itself or its export; a .qdstrm goes through "
            "QdstrmImporter -i X.qdstrm -o X.nsys-rep first."
        )
    # sqlite.org/fileformat.html: page size at 16, pages at 28, which hold where 92 equals the change counter at 24
    page = int.from_bytes(header[16:18], "big")
    whole = (65536 if page == 1 else page) * int.from_bytes(header[28:32], "big")
    if len(header) < 100 or (header[24:28] == header[92:96] and size < whole):
        raise TraceError(f"{path}: truncated at offset {size} of {whole}. {EXPORT_AGAIN}")


class Tables:
    """One open export. ``columns`` has the columns of each of its tables; ``path`` is what messages call it. Every
    method raises TraceError where the file is damaged or locked.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        # NVTX texts are whatever bytes the program passed.
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        self.connection, self.path = connection, path
        names = [row[0] for row in self.rows("sqlite_master", "SELECT name FROM sqlite_master WHERE type = 'table'")]
        self.columns = {name: {row[1] for row in self.rows(name, f'PRAGMA table_info("{name}")')} for name in names}
        if STRINGS not in self.columns:
            raise TraceError(f"{path}: an SQLite file, but not an export of nsys: it has no {STRINGS}. {EXPORT_AGAIN}")

    def has(self, table: str, *columns: str) -> bool:
        """Whether there is such a table, with all of these columns."""
        return table in self.columns and self.columns[table].issuperset(columns)

    def value(self, table: str, column: str, default: int) -> str:
        """The SQL of a column, or of ``default`` where it is NULL or not in this schema."""
        return f'COALESCE("{column}", {default})' if self.has(table, column) else str(default)

    def process(self, table: str, column: str) -> str:
        """The SQL of the pid in a globalPid or globalTid."""
        return f"({self.value(table, column, 0)} >> 24) & 0xFFFFFF"

    def thread(self, table: str, column: str) -> str:
        """The SQL of the thread in a globalTid, -1 where it is NULL or not in this schema."""
        return f'COALESCE("{column}" & 0xFFFFFF, -1)' if self.has(table, column) else "-1"

    def rows(self, table: str, sql: str) -> list[tuple[Any, ...]]:
        """All rows of a short query; ``table`` is what an error names."""
        try:
            return self.connection.execute(sql).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter of SQLite's message that quotes the file
            raise self._unreadable(table, error) from error

    def read(
        self,
        table: str,
        columns: Mapping[str, str],
        *,
        required: tuple[str, ...],
        source: str = "",
        texts: tuple[str, ...] = (),
    ) -> Columns:
        """``columns`` (name -> SQL) of ``table`` as int64 arrays (object for ``texts``), empty ones where it does
        not exist. ``source`` stands in for the table.
        """
        import numpy as np

        types = [object if name in texts else np.int64 for name in columns]
        chunks = [[np.empty(0, dtype=dtype) for dtype in types]]
        if table in self.columns:
            missing = [name for name in required if name not in self.columns[table]]
            if missing:
                raise TraceError(f"{self.path}: {table} has no column {missing[0]!r}. {EXPORT_AGAIN}")
            known: dict[str, str] = {}  # equal texts are kept once
            try:
                cursor = self.connection.execute(f"SELECT {', '.join(columns.values())} FROM {source or table}")
                while rows := cursor.fetchmany(ROWS):
                    chunk = []
                    for name, dtype, values in zip(columns, types, zip(*rows, strict=True), strict=True):
                        try:
                            if dtype is object:
                                values = tuple(known.setdefault(text, text) for text in map(_text, values))
                            chunk.append(np.fromiter(values, dtype=dtype, count=len(rows)))
                        except (ValueError, TypeError, OverflowError) as error:  # the value itself is not shown
                            row = ROWS * (len(chunks) - 1)
                            place = f"{table}, rows {row} to {row + len(rows) - 1}, {name}"
                            raise TraceError(f"{self.path}: {place}: not a number. {EXPORT_AGAIN}") from error
                    chunks.append(chunk)
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise self._unreadable(table, error) from error
        return {name: np.concatenate(parts) for name, parts in zip(columns, zip(*chunks, strict=True), strict=True)}

    def texts(self, table: str, column: str, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The texts of ``ids``, values of ``column``; "" for one that StringIds does not have."""
        import numpy as np

        if not self.has(table, column):
            return np.full(len(ids), "", dtype=object)
        sql = f'SELECT id, value FROM {STRINGS} WHERE id IN (SELECT "{column}" FROM {table})'
        texts = {number: _text(value) for number, value in self.rows(STRINGS, sql)}
        distinct, inverse = np.unique(ids, return_inverse=True)
        table_of_texts = np.empty(len(distinct), dtype=object)
        table_of_texts[:] = [texts.get(int(i), "") for i in distinct]
        return table_of_texts[inverse]

    def _unreadable(self, table: str, error: sqlite3.Error | UnicodeDecodeError) -> TraceError:
        if isinstance(error, UnicodeDecodeError):
            return TraceError(f"{self.path}: {table}: a name in the schema is no UTF-8. {EXPORT_AGAIN}")
        if "locked" in str(error):
            return TraceError(f"{self.path}: {error}: another process is writing it. Wait until its export is done.")
        return TraceError(f"{self.path}: {table}: {error}. {EXPORT_AGAIN}")


def _text(value: Any) -> str:
    """SQLite keeps what it is given, whatever the column's type: a text may be NULL, bytes or a number."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return "" if value is None else str(value)
