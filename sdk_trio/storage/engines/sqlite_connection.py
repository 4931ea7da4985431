"""Connections to SQLite files: their settings, statements on them, and their errors.

Only apsw opens the store's file. A second copy of SQLite in the same process (the standard
library's ``sqlite3``) would drop the POSIX locks of the first when it closes the file, and a
committed write could vanish. Other processes are fine.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import apsw
import msgspec

from ...base import clock
from ...base.opener import open_database, open_file
from ...base.text import storable
from ...errors import StoreUnavailableError
from ..sql.dialect import ROWS_AT_ONCE, Dialect, Insert, Row, Version
from ..sql.schema import MARK_AS_WIPED, WIPED

#: Time that a statement waits for another process's write to end, in seconds. Writes of this
#: package take milliseconds, so this outlasts a daemon under load; every delivery waits meanwhile.
BUSY_SECONDS = 3.0

#: Page size of a new database, in bytes; a database keeps the one that it was made with. A body of
#: 2 KB shares no page of 4 KB with another one, and three of them fit into 8 KB: a third less goes
#: through the log and into the database, and half as many writes. Larger pages gain no more, and a
#: lone delivery writes three whole pages (docs/adr/0070-one-store-core.md).
PAGE_BYTES = 8192

#: The translation of statements for SQLite.
SQLITE = Dialect("sqlite")

_WRITER = (
    # macOS needs fullfsync for a sync that survives a power cut; it has no effect elsewhere.
    "PRAGMA synchronous = FULL",
    "PRAGMA fullfsync = ON",
    # A burst makes the log long once. Above this size it is truncated when it restarts; otherwise
    # it would never shrink.
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA cache_size = -32768",
    # Deleted rows are overwritten, because bodies are personal data; FAST would not overwrite whole
    # pages that become free. It costs an ordinary delivery no page; only the removal of bodies
    # writes more.
    "PRAGMA secure_delete = ON",
    # Each list parameter and each RETURNING makes a temporary table. In a file, they cost the end
    # of a lone run 50 us.
    "PRAGMA temp_store = MEMORY",
)


class SqliteTransaction:
    """Statements on a connection; the caller begins and ends the transaction.

    Args:
        connection: handlers and migrations may use it as well.
        number: how many connections the engine had opened, including this one.
    """

    __slots__ = (
        "_committed",
        "_content",
        "_inserts",
        "connection",
        "dialect",
        "last_sequence",
        "version",
    )

    def __init__(self, connection: apsw.Connection, number: int = 0) -> None:
        self.connection: apsw.Connection = connection
        self.dialect: Dialect = SQLITE
        self.version: Version = number, 0
        # SQLite's number of the content at the end of the last transaction. It only grows.
        self._content = -1
        #: The highest sequence of an arrival, None if it is not known; _committed: as of the end of
        #: the last transaction.
        self.last_sequence: int | None = None
        self._committed: int | None = None
        self._inserts: dict[tuple[Insert, int], str] = {}

    def note_other_writes(self) -> None:
        """Change the version if others have written; call it when a transaction has begun."""
        # Not PRAGMA data_version, which SQLite compiles each time: 8 us instead of 0.2. This number
        # counts the commits of this connection, too, so it is compared with that of the last one.
        if self.connection.data_version() != self._content:
            self.version = self.version[0], self.version[1] + 1
            self._committed = None
        self.last_sequence = self._committed

    def note_commit(self) -> None:
        """Note that the transaction was committed."""
        self._content = self.connection.data_version()
        self._committed = self.last_sequence

    def _execute(self, statement: str, values: Mapping[str, Any]) -> apsw.Cursor:
        text, lists, _ = SQLITE.translate(statement)
        if lists:
            try:
                encoded = {name: msgspec.json.encode(values[name]).decode() for name in lists}
            except UnicodeEncodeError:
                return self._execute(statement, storable(values))
            values = {**values, **encoded}
        return self._run(text, values)

    def _run(self, text: str, values: Any) -> apsw.Cursor:
        try:
            return self.connection.execute(text, values)
        except UnicodeEncodeError:  # nothing was executed
            return self.connection.execute(text, storable(values))

    def all(self, statement: str, /, **values: Any) -> list[Row]:
        return self._execute(statement, values).fetchall()

    def one(self, statement: str, /, **values: Any) -> Row | None:
        return cast("Row | None", self._execute(statement, values).fetchone())

    def run(self, statement: str, /, **values: Any) -> int:
        self._execute(statement, values)
        return self.connection.changes()

    def each(self, statement: str, values: Iterable[Mapping[str, Any]], /) -> list[Row | None]:
        return [cast("Row | None", self._execute(statement, one).fetchone()) for one in values]

    run_whole_unit = all

    def insert(
        self, insert: Insert, rows: Sequence[Sequence[Any]], /, *, whole_unit: bool = False
    ) -> list[Row]:
        if len(rows) == 1:
            return self._insert_at_once(insert, 1, rows[0])
        returned: list[Row] = []
        begin = 0
        for size in ROWS_AT_ONCE:
            while len(rows) - begin >= size:
                values = [value for row in rows[begin : begin + size] for value in row]
                returned += self._insert_at_once(insert, size, values)
                begin += size
        return returned

    def _insert_at_once(self, insert: Insert, size: int, values: Sequence[Any]) -> list[Row]:
        text = self._inserts.get((insert, size))
        if text is None:
            text = self._inserts[insert, size] = SQLITE.insert_text(insert, size)
        return self._run(text, values).fetchall()

    def note_change(self, *, done: int = 0) -> None:
        """Do nothing: SQLite's ``data_version`` shows other processes the change."""


# -- connecting ------------------------------------------------------------------------------------


def connect_writer(file: str, prepare: Callable[[apsw.Connection], None]) -> apsw.Connection:
    """Open ``file`` for writing, create it if need be, and return the connection.

    Raises:
        apsw.Error: SQLite could not open it.
        Exception: raised by ``prepare``.
    """
    # Bodies are personal data, so a new file is private; SQLite gives its other files the same
    # mode. If this fails, SQLite's own open reports why. O_EXCL: a file that exists must not be
    # opened, as closing it would drop the locks that other connections of this process hold.
    with suppress(OSError):
        os.close(open_file(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    connection = open_database(file, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
    try:
        configure(connection)
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        prepare(connection)
        _use_log(connection)
        for statement in _WRITER:
            connection.execute(statement)
        # If nothing can be written, this fails at the start and not at the first delivery.
        connection.execute("BEGIN IMMEDIATE; COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(file: str) -> apsw.Connection:
    """Open the existing ``file`` for reading only and return the connection.

    Raises:
        apsw.Error: SQLite could not open it.
    """
    connection = open_database(file, flags=apsw.SQLITE_OPEN_READONLY)
    configure(connection)
    return connection


@contextmanager
def connected(file: str, flags: int = apsw.SQLITE_OPEN_READONLY) -> Iterator[apsw.Connection]:
    """Connect to the existing ``file`` for the block.

    Raises:
        StoreUnavailableError: SQLite or the disk failed, here or in the block.
    """
    try:
        connection = open_database(file, flags=flags)
        try:
            configure(connection)
            yield connection
        finally:
            connection.close()
    except apsw.Error as error:
        raise describe_failure(error, file) from error


def configure(connection: apsw.Connection) -> None:
    """Configure a connection for reading or writing."""
    connection.set_busy_timeout(int(BUSY_SECONDS * 1000))
    # Plans must not depend on bound values. Otherwise each new value of a LIMIT compiles its
    # statement again, which was most of the cost of a poll.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)


def _use_log(connection: apsw.Connection) -> None:
    """Switch to the write-ahead log, in which readers do not block the writer.

    The busy timeout does not apply to this statement, so it is retried here.
    """
    deadline = clock.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except apsw.BusyError:
            if clock.monotonic() >= deadline:
                raise
            clock.sleep(0.01)
        else:
            return


def sync_log(connection: apsw.Connection) -> None:
    """Write without changing anything; the commit syncs all earlier ones.

    SQLite writes the page of this value even if the value is unchanged.
    """
    connection.execute(f"PRAGMA user_version = {connection.pragma('user_version')}")


def clear_log(connection: apsw.Connection, seconds: float) -> bool:
    """Copy the write-ahead log into the database and truncate it; False while a reader needs it."""
    connection.set_busy_timeout(int(seconds * 1000))
    try:
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.BusyError:
        return False
    finally:
        connection.set_busy_timeout(int(BUSY_SECONDS * 1000))
    return True


_IS_WIPED = f"SELECT count(*) FROM checkpoint WHERE name = '{WIPED}'"


def overwrite_remnants(connection: apsw.Connection) -> None:
    """Rewrite the database if it may hold deleted data that was not overwritten.

    Every other write waits meanwhile. It happens after the purge of a tenant.
    """
    if not connection.execute(_IS_WIPED).get:
        # It copies the whole database, which must not be in memory.
        connection.execute("PRAGMA temp_store = FILE")
        try:
            connection.execute("VACUUM")
        finally:
            connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(MARK_AS_WIPED)


# -- errors ----------------------------------------------------------------------------------------

_FULL = "the disk or its quota is full; free some space, it continues by itself"
_DAMAGED = "it is damaged; stop, and restore a backup ('storage restore')"
_READ_ONLY = "it or its directory is read-only; make both writable for this user"

#: Remedies by SQLite's extended result code, where it is more exact than the class of the error.
_REMEDIES_BY_CODE: dict[int, str] = {
    # SQLite extends the index by writing its last byte, and does not report why that failed.
    apsw.SQLITE_IOERR_SHMSIZE: "the disk or its quota is full: its index (-shm) cannot become "
    "larger; free some space, then restart",
    apsw.SQLITE_IOERR_SHMMAP: "its index (-shm) cannot be mapped; give the process more memory, "
    "and keep the store off network disks",
    apsw.SQLITE_IOERR_SHMOPEN: "its index (-shm) cannot be opened or made: the disk or its "
    "quota is full, or another user owns it; free some space, or check owner and mode",
    apsw.SQLITE_IOERR_NOMEM: "memory is exhausted; give the process more",
    apsw.SQLITE_IOERR_LOCK: "its file system does not lock; move it to a local disk",
    apsw.SQLITE_IOERR_SHORT_READ: _DAMAGED,
    apsw.SQLITE_IOERR_DATA: _DAMAGED,
    apsw.SQLITE_IOERR_CORRUPTFS: "its file system is damaged; check it (fsck), restore a backup",
    apsw.SQLITE_READONLY_DBMOVED: "it was moved or replaced while it was open; restart",
    apsw.SQLITE_READONLY_DIRECTORY: "its directory is read-only; make it writable for this user",
    apsw.SQLITE_CANTOPEN_ISDIR: "it is a directory; move that away",
    apsw.SQLITE_CANTOPEN_SYMLINK: "it is a symbolic link, which is refused; name the file itself",
    apsw.SQLITE_BUSY_RECOVERY: "another process recovers it after a crash; try again in a moment",
}

_REMEDIES: tuple[tuple[type[apsw.Error], str], ...] = (
    (apsw.FullError, _FULL),
    (apsw.NotADBError, "it is not a SQLite database; restore a backup or move it away"),
    (apsw.CorruptError, _DAMAGED),
    (apsw.BusyError, "another process holds its write lock; end that process or try again"),
    (apsw.LockedError, "another connection holds its lock; try again"),
    (apsw.ReadOnlyError, _READ_ONLY),
    (apsw.CantOpenError, "it cannot be opened; check that the directory exists and is writable"),
    (apsw.PermissionsError, "access was refused; check its owner and mode"),
    (apsw.IOError, "the disk reported an error; check it (dmesg) and free space, then restart"),
    (apsw.NoMemError, "memory is exhausted; give the process more"),
)

#: With less free space than this, in bytes, an I/O error is reported as a full disk.
_FULL_BELOW_BYTES = 65_536


def describe_failure(error: apsw.Error, file: str) -> StoreUnavailableError:
    """Return the exception that callers get for ``error``: it names the file and the remedy."""
    unavailable = StoreUnavailableError(
        f"the store {file} failed: {_remedy(error, file)} ({error})"
    )
    unavailable.__cause__ = error
    return unavailable


def _remedy(error: apsw.Error, file: str) -> str:
    # SQLite has several codes for a full disk, some of which name an unrelated cause; the file
    # system itself knows.
    if isinstance(error, apsw.IOError | apsw.CantOpenError) and _is_full(file):
        return _FULL
    code = getattr(error, "extendedresult", None)
    if code in _REMEDIES_BY_CODE:
        return _REMEDIES_BY_CODE[code]
    return next((text for kind, text in _REMEDIES if isinstance(error, kind)), "this is unexpected")


def _is_full(file: str) -> bool:
    if sys.platform == "win32":
        return False
    try:
        found = os.statvfs(os.path.dirname(os.path.abspath(file)))
    except OSError:
        return False
    # Some file systems have no fixed number of inodes and report 0 of 0.
    no_inodes = found.f_files > 0 and found.f_favail == 0
    return found.f_bavail * found.f_frsize < _FULL_BELOW_BYTES or no_inodes
