"""SQLite connections of the store: how they are opened, and what their errors mean to an operator.

Only apsw opens the store's file. A second copy of SQLite in the same process (the standard
library's ``sqlite3``) would drop the POSIX locks of the first when it closes the file, and a
committed write could vanish. Other processes are fine.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import apsw

from ...base.logs import get_logger
from ...errors import StoreUnavailableError
from .migration import move_deliveries
from .schema import DELIVERIES_MOVED, VERSION, plan_migration

#: Time that a statement waits for another process's write to end, in seconds. Writes of this
#: package take milliseconds, so this outlasts a daemon under load; every delivery waits meanwhile.
BUSY_SECONDS = 3.0

#: Time for another process to migrate the store, in seconds: a million deliveries of an early
#: version took 4, and 12 on a busy machine.
MIGRATION_SECONDS = 120.0

_log = get_logger("storage")

#: Page size of a new database, in bytes; a database keeps the one that it was made with. A body of
#: 2 KB shares no page of 4 KB with another one, and three of them fit into 8 KB: a third less goes
#: through the log and into the database, and half as many writes. Larger pages gain no more, and a
#: lone delivery writes three whole pages (docs/adr/0055-many-deliveries-by-one-statement.md).
PAGE_BYTES = 8192

_WRITER = (
    # FULL syncs the log in every commit: an answer 200 means that the event survives a power cut.
    # With NORMAL the last commits would be lost. macOS needs fullfsync for that; it has no effect
    # elsewhere.
    "PRAGMA synchronous = FULL",
    "PRAGMA fullfsync = ON",
    # A burst makes the log long once. Above this size it is cut at its next beginning, or it would
    # keep the disk's space for ever.
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA cache_size = -32768",
    # Deleted rows are overwritten, also where whole pages become free, which FAST leaves as they
    # are. Bodies are personal data. It costs an ordinary delivery no page; only the removal of
    # bodies writes more.
    "PRAGMA secure_delete = ON",
)

_FULL = "the disk or its quota is full; free some space, it continues by itself"
_DAMAGED = "it is damaged; stop, and restore a backup"
_READ_ONLY = "it or its directory is read-only; make both writable for this user"

#: Remedies by SQLite's extended result code, where that says more than the class of the error.
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
    (apsw.NotADBError, "it is no SQLite database; restore a backup or move it away"),
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
_NO_ROOM = 65_536


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
    return found.f_bavail * found.f_frsize < _NO_ROOM or no_inodes


def connect_writer(
    file: str, before_migration: Callable[[], None] | None = None
) -> apsw.Connection:
    """Open ``file`` for writing, create or migrate its tables, and return the connection.

    Args:
        file: the database.
        before_migration: called before a store of an earlier version is changed; an error of it
            leaves that as it is.

    Raises:
        StoreVersionError: the file is of another program or of a newer version.
        apsw.Error: SQLite could not open it.
    """
    # Bodies are personal data, so a new file is private; SQLite gives its other files the same
    # mode. If this fails, SQLite's own open reports why. O_EXCL: a file that exists must not be
    # opened, as closing it would drop the locks that other connections of this process hold.
    with suppress(OSError):
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    connection = apsw.Connection(file)
    try:
        connection.set_busy_timeout(int(BUSY_SECONDS * 1000))
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        _migrate(connection, file, before_migration)
        _use_log(connection)
        for statement in _WRITER:
            connection.execute(statement)
        # Fails here, at the start, and not at the first delivery, if nothing can be written.
        connection.execute("BEGIN IMMEDIATE; COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_log(connection: apsw.Connection) -> None:
    """Switch to the write-ahead log, in which readers do not block the writer.

    The busy timeout does not apply to this statement, so it is retried here.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except apsw.BusyError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
        else:
            return


def connect_reader(file: str) -> apsw.Connection:
    """Open the existing ``file`` for reading only and return the connection.

    Raises:
        apsw.Error: SQLite could not open it.
    """
    connection = apsw.Connection(file, flags=apsw.SQLITE_OPEN_READONLY)
    connection.set_busy_timeout(int(BUSY_SECONDS * 1000))
    return connection


#: Marks a store in which nothing was ever deleted without being overwritten.
MARK_AS_WIPED = "INSERT OR REPLACE INTO checkpoint VALUES ('storage.wiped', '1')"

#: Makes the next wipe rewrite the database. ``secure_delete`` overwrites a deleted row where it was
#: last, but when SQLite splits a page, the old page may keep a copy of rows that moved (0 to 5 of
#: 1200 deleted rows could still be read). A purge must leave nothing, so it removes the mark.
MARK_AS_UNWIPED = "DELETE FROM checkpoint WHERE name = 'storage.wiped'"

_IS_WIPED = "SELECT count(*) FROM checkpoint WHERE name = 'storage.wiped'"


def overwrite_remnants(connection: apsw.Connection) -> None:
    """Remove data from the database that was deleted without being overwritten.

    Rewrites the database, which holds up every other write: once in the life of a database of
    an earlier version, and after the purge of a tenant.
    """
    if not connection.execute(_IS_WIPED).get:
        connection.execute("VACUUM")
        connection.execute(MARK_AS_WIPED)


def clear_log(connection: apsw.Connection, seconds: float) -> bool:
    """Copy the write-ahead log into the database and cut it; False while a reader needs it."""
    connection.set_busy_timeout(int(seconds * 1000))
    try:
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.BusyError:
        return False
    finally:
        connection.set_busy_timeout(int(BUSY_SECONDS * 1000))
    return True


def _migrate(
    connection: apsw.Connection, file: str, before_migration: Callable[[], None] | None
) -> None:
    # Nearly every start ends here, without asking for the write lock.
    if not _plan(connection, file):
        return
    # Rows that a migration removes are overwritten like all others.
    connection.execute("PRAGMA secure_delete = ON").fetchall()
    # Two processes may open a file at once: the second waits until the first has brought it up to
    # date, and finds it done within its own lock.
    connection.set_busy_timeout(int(MIGRATION_SECONDS * 1000))
    begun = time.monotonic()
    connection.execute("BEGIN IMMEDIATE")
    try:
        before = connection.pragma("user_version")
        is_new = connection.execute("SELECT count(*) = 0 FROM sqlite_schema").get
        told = {"file": file, "before": before, "after": VERSION}
        statements = _plan(connection, file)
        # Not before the lock: another process may have been about to bring it up to date.
        if statements and not is_new and before_migration is not None:
            before_migration()
        if statements and not is_new:
            # It may take a while, in which nothing else is said.
            _log.info("store.migrating", **told, bytes=os.path.getsize(file))
        for statement in statements:
            connection.execute(statement)
        if statements and before < DELIVERIES_MOVED:
            move_deliveries(connection, file)
        if is_new:
            connection.execute(MARK_AS_WIPED)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    if statements and not is_new:
        _log.info("store.migrated", **told, seconds=round(time.monotonic() - begun, 3))
    connection.set_busy_timeout(int(BUSY_SECONDS * 1000))


# One statement reads all three at one moment: another process may be creating the tables.
_STATE_OF_FILE = """
SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
FROM pragma_application_id, pragma_user_version
"""


def _plan(connection: apsw.Connection, file: str) -> tuple[str, ...]:
    application_id, user_version, tables = cast(
        "Any", connection.execute(_STATE_OF_FILE).fetchone()
    )
    statements = plan_migration(
        application_id=application_id,
        user_version=user_version,
        empty=tables == 0,
        file=file,
    )
    return tuple(statements)
