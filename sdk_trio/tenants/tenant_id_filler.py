"""A ready-made upgrade step: it fills the empty tenant ids in a table of the host's own."""

import os
from pathlib import Path

import apsw
import trio

from ..errors import UpgradeError
from ..storage.tenant_records import Tenant
from .upgrade import StepBatch

#: How many rows one transaction looks at: some milliseconds, so that the host's own processes never
#: wait for long.
BATCH_ROWS = 5000

_BUSY_SECONDS = 3.0


class SqliteTenantIds:
    """An :class:`~.upgrade.UpgradeStep` over one table of a SQLite file.

    Args:
        file: the database; it exists.
        table: a table with row ids (not ``WITHOUT ROWID``).
        column: its column for the tenant's id; only rows where it is NULL are changed.
        batch_rows: how many rows one transaction looks at; 1 or more.

    No other copy of SQLite (the standard library's ``sqlite3``) may have the file open in this
    process. Cancelled, a batch is finished first.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        table: str,
        *,
        column: str = "tenant_id",
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        self.name: str = f"{Path(file).stem}.{table}.{column}"
        self._file = Path(file)
        self._table = _quoted(table)
        self._column = _quoted(column)
        self._batch_rows = batch_rows

    async def count(self) -> int:
        """Return how many rows have no tenant."""
        return await trio.to_thread.run_sync(self._count)

    async def run_batch(self, tenant: Tenant, position: str | None) -> StepBatch:
        """Fill the next rows; ``position`` is the last row id that was looked at.

        Raises:
            UpgradeError: the file cannot be written, or has no such table or column.
        """
        return await trio.to_thread.run_sync(self._fill, tenant.id, position)

    def _count(self) -> int:
        # S608: both names are quoted above.
        # The column is written with its table's name: SQLite takes a quoted name that is no column
        # for a text, which is never NULL, and a misspelt column would count as finished.
        column = f"{self._table}.{self._column}"
        query = f"SELECT count(*) FROM {self._table} WHERE {column} IS NULL"
        with _Opened(self._file) as connection:
            return int(connection.execute(query).get)

    def _fill(self, tenant_id: str, position: str | None) -> StepBatch:
        end_of_batch = (
            f"SELECT max(rowid), count(*) FROM (SELECT rowid FROM {self._table} "
            "WHERE rowid > ? ORDER BY rowid LIMIT ?)"
        )
        fill = (
            f"UPDATE {self._table} SET {self._column} = ? "
            f"WHERE rowid > ? AND rowid <= ? AND {self._column} IS NULL"
        )
        after = -(2**63) if position is None else int(position)
        with _Opened(self._file) as connection:
            connection.execute("BEGIN IMMEDIATE")
            end, looked_at = connection.execute(end_of_batch, (after, self._batch_rows)).get
            if end is None:
                return StepBatch(0, position, last=True)
            connection.execute(fill, (tenant_id, after, end))
            changed = connection.changes()
            connection.execute("COMMIT")
            return StepBatch(changed, str(end), last=looked_at < self._batch_rows)


class _Opened:
    """A connection for one batch; closing it rolls back an uncommitted batch."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._connection: apsw.Connection | None = None

    def __enter__(self) -> apsw.Connection:
        try:
            connection = apsw.Connection(os.fspath(self._file), flags=apsw.SQLITE_OPEN_READWRITE)
        except apsw.Error as error:
            raise self._error(error) from error
        connection.set_busy_timeout(int(_BUSY_SECONDS * 1000))
        self._connection = connection
        return connection

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if self._connection is not None:
            self._connection.close()
        if isinstance(error, apsw.Error):
            raise self._error(error) from error

    def _error(self, error: apsw.Error) -> UpgradeError:
        return UpgradeError(f"the tenant ids in {self._file} cannot be filled: {error}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
