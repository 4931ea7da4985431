"""A tenant's live database, next to its replica: read as of one moment, or locked exclusively.

A verification reads it in a :class:`Snapshot` while writers continue. A restore and an erasure take
it as a :class:`LockedDatabase`, which no other process can open.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import apsw
import attrs
import trio

from ..base.executor import run_in_thread
from ..base.opener import open_database, open_file, sync_path
from ..errors import RestoreError
from ..tenants.databases import SIDE_FILES

#: Time to wait for a lock of another process, in seconds.
_BUSY_SECONDS = 5.0

#: Rows between two checks for cancellation: some milliseconds of work.
_ROWS_PER_TURN = 2000

#: The prefix of the replicator's own tables, whose content is not a tenant's.
_REPLICATORS_TABLES = "_litestream_"

#: Bits of the sum of the rows' hashes, by which the contents of two tables are compared.
_SUM_BITS = 128

Pause = Callable[[], None]


@attrs.frozen
class TableContent:
    """The number of a table's rows and the sum of their checksums, independent of their order."""

    rows: int
    checksum: int


@attrs.frozen
class Content:
    """The whole content of a database: the statements of its schema, and its tables."""

    schema: tuple[tuple[str, ...], ...]
    tables: dict[str, TableContent]

    def difference(self, other: "Content") -> str | None:
        """Return the differences of ``other``, or None if the contents are equal."""
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
    """A database as of one moment, regardless of later writes.

    ``settled``: it includes everything that was in the write-ahead log's file before. A commit is
    written to the file first, then synced, and visible to readers last. So for milliseconds the
    replicator can have a transaction that readers do not see yet.
    """

    def __init__(self, file: Path) -> None:
        """Open ``file`` and take a snapshot of its content.

        Raises:
            apsw.Error: it cannot be read.
        """
        # Not read-only: SQLite could then not create the index of a write-ahead log.
        self._connection = open_database(file, flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            self._connection.set_busy_timeout(int(_BUSY_SECONDS * 1000))
            # Only the replicator may copy the log into the database. We might be the last
            # connection to close, which would checkpoint.
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            self.settled: bool = self._let_commits_end()
            self._connection.execute("BEGIN")
            # SQLite's transaction begins with its first read.
            self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except BaseException:
            self._connection.close()
            raise

    def _let_commits_end(self) -> bool:
        """Wait for a commit in progress; return False if the lock is not available in time."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except (apsw.BusyError, apsw.ReadOnlyError):
            return False
        self._connection.execute("ROLLBACK")
        return True

    def close(self) -> None:
        """Close the snapshot; a second call does nothing."""
        self._connection.close()

    def read(self, pause: Pause) -> Content:
        """Return its whole content, as :func:`read_content` does."""
        return read_content(self._connection, pause)


def read_content(connection: apsw.Connection, pause: Pause) -> Content:
    """Return the whole content of a database that no one writes to.

    Raises:
        apsw.Error: it cannot be read.
    """
    schema = tuple(
        sorted(
            tuple(str(part) for part in row)
            for row in connection.execute(
                "SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema"
            )
            if not str(row[2]).startswith(_REPLICATORS_TABLES)
        )
    )
    names = [
        name
        for kind, name, _, sql in schema
        # The content of a virtual table is in other tables.
        if kind == "table" and not sql.upper().startswith("CREATE VIRTUAL")
    ]
    return Content(schema, {name: _sum(connection, name, pause) for name in names})


def read_file(file: Path, pause: Pause) -> Content:
    """Return the whole content of the database ``file``, as :func:`read_content` does."""
    with opened_snapshot(file) as snapshot:
        return snapshot.read(pause)


def _sum(connection: apsw.Connection, name: str, pause: Pause) -> TableContent:
    quoted = _quoted(name)
    columns = [
        _quoted(str(column))
        for (column,) in connection.execute("SELECT name FROM pragma_table_info(?)", (name,))
    ]
    # Texts are compared as bytes: programs may have written other encodings than UTF-8.
    values = ", ".join(
        f"typeof({column}), iif(typeof({column}) = 'text', CAST({column} AS BLOB), {column})"
        for column in columns
    )
    rows = total = 0
    for row in connection.execute(f"SELECT {values} FROM {quoted}"):
        digest = hashlib.blake2b(repr(row).encode(), digest_size=_SUM_BITS // 8)
        # A sum, because rows have no defined order and sorting a large table would cost memory.
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


try:
    import fcntl
except ImportError:  # Windows, where the replicator does not run
    fcntl = None  # type: ignore[assignment]

# With a write-ahead log every open connection holds a shared lock, even an idle one of another
# process or the replicator's. So an exclusive lock proves that no one has the database open, and
# keeps it closed while it is replaced. Changing the journal mode under that lock merges the log
# into the database. From then on one rename replaces all of it: a process killed at any moment
# leaves the complete old or new database. Removing the old files before the rename could lose the
# newest transactions, which are in the log. A process that opened the old file and waited for the
# lock gets SQLITE_READONLY_DBMOVED.

_TAKE: Final = (
    # Before the first read, so that SQLite uses the log without its shared index.
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA journal_mode = DELETE",
    "BEGIN EXCLUSIVE",
    # The exclusive locking mode keeps the lock after the commit.
    "COMMIT",
)

_IN_USE = (apsw.BusyError, apsw.LockedError)
_DAMAGED = (apsw.NotADBError, apsw.CorruptError, apsw.IOError)

#: Between two attempts to take a database, in seconds.
_TAKE_SECONDS: Final = 0.2

#: The bytes of a database's file that SQLite locks (``PENDING_BYTE`` and those after it).
_LOCK_AT: Final = 0x40000000
_LOCK_BYTES: Final = 512


@attrs.define(eq=False)
class LockedDatabase:
    """A database that no other process can open; every method blocks.

    Attributes:
        file: its path.
        connection: holds the lock; None if there is no file, or it is too damaged for SQLite to
            open.
        descriptor: holds the same lock of a damaged file.
    """

    file: Path
    connection: apsw.Connection | None = None
    descriptor: int | None = None

    @classmethod
    def take(cls, file: Path) -> "LockedDatabase | None":
        """Lock the database at ``file`` and return it; None if another process has it open.

        Raises:
            RestoreError: it cannot be opened, or its disk is full.
        """
        if not file.exists():
            return cls(file)
        try:
            connection = open_database(file, flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                # The caller retries and reports what it waits for; SQLite would wait silently.
                connection.set_busy_timeout(0)
                for statement in _TAKE:
                    connection.execute(statement).fetchall()
            except BaseException:
                connection.close()
                raise
        except _IN_USE:
            return None
        except _DAMAGED:
            return cls._take_damaged(file)
        except apsw.Error as error:
            raise RestoreError(
                f"{file} cannot be replaced: {error}; free some space if its disk is full, and "
                "make it and its directory writable for this user"
            ) from error
        return cls(file, connection)

    @classmethod
    def _take_damaged(cls, file: Path) -> "LockedDatabase | None":
        descriptor = open_file(file, os.O_RDWR)
        try:
            if fcntl is not None:
                # A file that SQLite cannot read can still be locked by the bytes that SQLite would
                # lock.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, _LOCK_BYTES, _LOCK_AT)
        except OSError:
            os.close(descriptor)
            return None
        return cls(file, descriptor=descriptor)

    @classmethod
    @contextmanager
    def taken(cls, file: Path) -> Iterator["LockedDatabase | None"]:
        """Hold the database at ``file`` for a block, as :meth:`take` does."""
        held = cls.take(file)
        try:
            yield held
        finally:
            if held is not None:
                held.release()

    def read(self, pause: Pause) -> Content | None:
        """Return its whole content; None if it is damaged or missing.

        Raises:
            RestoreError: it exists, and cannot be read for another reason.
        """
        if self.connection is None:
            return None
        try:
            return read_content(self.connection, pause)
        except _DAMAGED:
            return None
        except apsw.Error as error:
            raise RestoreError(
                f"{self.file} cannot be compared with its replica: {error}; fix that, or use "
                "--discard-newer, and nothing is compared"
            ) from error

    def copy_to(self, target: Path) -> bool:
        """Copy the database into the new file ``target``; return False if there is none.

        Raises:
            RestoreError: ``target`` exists or cannot be written, or the database is damaged.
        """
        if self.connection is None and self.descriptor is None:
            return False
        try:
            os.close(open_file(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            raise RestoreError(
                f"{target} cannot be created ({error.strerror}): name a file that does not exist, "
                "in a directory that is writable for this user"
            ) from error
        try:
            self._copy(target)
            sync_path(target)
        except (apsw.Error, OSError) as error:
            with suppress(OSError):
                target.unlink()
            raise RestoreError(
                f"{self.file} cannot be copied to {target}: {error}; free some space, or name "
                "another file"
            ) from error
        return True

    def _copy(self, target: Path) -> None:
        if self.connection is None:
            raise RestoreError(
                f"{self.file} is so damaged that it cannot be copied as a database: copy all files "
                "of that name yourself, then restore without --keep"
            )
        copy = open_database(target, flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            # The copy is synced once, as a whole, when it is complete.
            copy.execute("PRAGMA synchronous = OFF")
            with copy.backup("main", self.connection, "main") as backup:
                backup.step()
        finally:
            copy.close()

    def replace_by(self, restored: Path) -> None:
        """Replace the file by ``restored``, on the same disk; a crash leaves one of them complete.

        Raises:
            OSError: the directory cannot be written.
        """
        for suffix in SIDE_FILES:
            # The log is already in the database. Files left by a crash would be mistaken for the
            # new database's.
            Path(f"{self.file}{suffix}").unlink(missing_ok=True)
        restored.replace(self.file)
        sync_path(self.file.parent)

    def release(self) -> None:
        """Unlock the database, so that others can open the file at the path."""
        if self.connection is not None:
            self.connection.close()
        if self.descriptor is not None:
            os.close(self.descriptor)


def name_holders(file: Path) -> str:
    """Name the processes that have ``file`` open, as far as this user may see them (Linux)."""
    wanted = os.path.realpath(file)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(each) == wanted for each in (process / "fd").iterdir()):
                name = (process / "comm").read_text().strip()
                found.append(f"process {process.name} ({name})")
    return ", ".join(sorted(found)) or "another process"


async def take_in_time(
    file: Path, seconds: float, notice: Callable[[str], None] = lambda _holders: None
) -> LockedDatabase | str:
    """Lock a database as soon as no other process has it open, and return it.

    Args:
        file: its path.
        seconds: the longest wait.
        notice: called with the names of the processes that are waited for, at each change.

    Returns:
        The database; or the names of the processes that had it open until the end.

    Raises:
        RestoreError: as for :meth:`LockedDatabase.take`.
    """
    deadline = trio.current_time() + seconds
    reported = ""
    while True:
        # SQLite's own lock proves that no process has the database open (ADR 34).
        held = await run_in_thread(LockedDatabase.take, file)
        if held is not None:
            return held
        holders = await run_in_thread(name_holders, file)
        if trio.current_time() >= deadline:
            return holders
        if holders != reported:
            reported = holders
            notice(holders)
        # There is no notification when another process closes a file.
        await trio.sleep(_TAKE_SECONDS)
