"""Reads the whole content of a database, to compare it with another one (contracts 7).

Compared are the schema, the number of rows of each table, and a checksum over all of their values;
the replicator's own tables are left out. Plain functions for a thread; ``pause`` is called often
and may raise to stop.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import attrs

#: How long a lock of another process is waited for, in seconds.
_BUSY_SECONDS = 5.0

#: Rows between two looks at cancellation: some milliseconds of work.
_ROWS_PER_TURN = 2000

#: Its tables are named so; it writes to them as it goes.
_REPLICATORS_TABLES = "_litestream_"

_SUM_BITS = 128

Pause = Callable[[], None]


@attrs.frozen
class TableContent:
    """How many rows a table has, and the sum of their checksums, whatever their order."""

    rows: int
    checksum: int


@attrs.frozen
class Content:
    """All that a database holds: the statements of its schema, and its tables."""

    schema: tuple[tuple[str, ...], ...]
    tables: dict[str, TableContent]

    def difference(self, other: "Content") -> str | None:
        """Return what differs in ``other``, None if both hold the same."""
        if self.schema != other.schema:
            return "the schema"
        for name, table in self.tables.items():
            found = other.tables[name]
            if table.rows != found.rows:
                return f"table {name} ({found.rows} rows instead of {table.rows})"
            if table.checksum != found.checksum:
                return f"the content of table {name}"
        return None


class Snapshot:
    """A database as it was at one moment, whatever is written to it meanwhile.

    ``settled`` says that it holds whatever was in the write-ahead log's file before. A commit is in
    the file first, brought to the disk then, and visible last: for milliseconds the replicator
    can have what nobody else sees yet.
    """

    def __init__(self, file: Path) -> None:
        """Open ``file`` and hold on to what it holds now.

        Raises:
            apsw.Error: it cannot be read.
        """
        # Not read-only: SQLite could then not make the index of a write-ahead log.
        self._connection = apsw.Connection(os.fspath(file), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            self._connection.set_busy_timeout(int(_BUSY_SECONDS * 1000))
            # The log is the replicator's to copy into the database, also one that a writer
            # begins while we look: then the last to close is us.
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            self.settled = self._let_commits_end()
            self._connection.execute("BEGIN")
            # A transaction begins with its first look.
            self._connection.execute("SELECT count(*) FROM sqlite_schema").get  # noqa: B018
        except BaseException:
            self._connection.close()
            raise

    def _let_commits_end(self) -> bool:
        """Wait for a commit that is under way; False if the lock cannot be had for that."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except (apsw.BusyError, apsw.ReadOnlyError):
            return False
        self._connection.execute("ROLLBACK")
        return True

    def close(self) -> None:
        """Let go of the moment; a second call does nothing."""
        self._connection.close()

    def read(self, pause: Pause) -> Content:
        """Return all that it holds.

        Raises:
            apsw.Error: it cannot be read.
        """
        schema = tuple(
            sorted(
                tuple(str(part) for part in row)
                for row in self._connection.execute(
                    "SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema"
                )
                if not str(row[2]).startswith(_REPLICATORS_TABLES)
            )
        )
        names = [
            name
            for kind, name, _, sql in schema
            # What a virtual table holds is in tables of its own.
            if kind == "table" and not sql.upper().startswith("CREATE VIRTUAL")
        ]
        return Content(schema, {name: self._sum(name, pause) for name in names})

    def _sum(self, name: str, pause: Pause) -> TableContent:
        quoted = _quoted(name)
        columns = [
            _quoted(str(column))
            for (column,) in self._connection.execute(
                "SELECT name FROM pragma_table_info(?)", (name,)
            )
        ]
        # Texts as bytes: what a program has written need not be UTF-8.
        values = ", ".join(
            f"typeof({column}), iif(typeof({column}) = 'text', CAST({column} AS BLOB), {column})"
            for column in columns
        )
        rows = total = 0
        for row in self._connection.execute(f"SELECT {values} FROM {quoted}"):
            digest = hashlib.blake2b(repr(row).encode(), digest_size=_SUM_BITS // 8)
            total += int.from_bytes(digest.digest(), "big")
            rows += 1
            if rows % _ROWS_PER_TURN == 0:
                pause()
        pause()
        return TableContent(rows, total % (1 << _SUM_BITS))


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


@contextmanager
def opened_snapshot(file: Path) -> Iterator[Snapshot]:
    """Open a :class:`Snapshot` for a block."""
    snapshot = Snapshot(file)
    try:
        yield snapshot
    finally:
        snapshot.close()
