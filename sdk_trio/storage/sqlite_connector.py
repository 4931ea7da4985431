"""Opens SQLite connections the one way the store uses them, and words their errors.

Only apsw opens the store's file. A second copy of SQLite in the same process (the standard
library's ``sqlite3``) would drop the POSIX locks of the first when it closes the file, and a
committed write could vanish. Other processes are fine.
"""

import os
import time
from contextlib import suppress
from typing import Any, cast

import apsw

from ..errors import StoreUnavailableError
from .schema import plan_migration

#: How long a statement waits for another process's write to end, in seconds. Ours take
#: milliseconds, so this outlasts a daemon under load; every delivery waits meanwhile.
BUSY_SECONDS = 3.0

#: Pages in the write-ahead log before they are copied into the database. Events come in bursts; a
#: log of 16 MB copies each page of an index once for many commits.
CHECKPOINT_PAGES = 4000

_WRITER = (
    # FULL syncs the log in every commit (answer 200 means kept); fullfsync is what that takes on
    # macOS, and nothing elsewhere.
    "PRAGMA synchronous = FULL",
    "PRAGMA fullfsync = ON",
    f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}",
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA cache_size = -32768",
)

_REMEDIES: tuple[tuple[type[apsw.Error], str], ...] = (
    (apsw.FullError, "the disk or its quota is full; free some space, it continues by itself"),
    (apsw.NotADBError, "it is no SQLite database; restore a backup or move it away"),
    (apsw.CorruptError, "it is damaged; stop, and restore a backup"),
    (apsw.BusyError, "another process holds its write lock; end that process or try again"),
    (apsw.LockedError, "another connection holds its lock; try again"),
    (apsw.ReadOnlyError, "it or its directory is read-only; make both writable for this user"),
    (apsw.CantOpenError, "it cannot be opened; check that the directory exists and is writable"),
    (apsw.PermissionsError, "access was refused; check its owner and mode"),
    (apsw.IOError, "the disk reported an error; check it (dmesg) and free space, then restart"),
    (apsw.NoMemError, "memory is exhausted; give the process more"),
)


def describe_failure(error: apsw.Error, file: str) -> StoreUnavailableError:
    """Return the exception that callers get for ``error`` at ``file``: what, where, what to do."""
    remedy = next(
        (text for kind, text in _REMEDIES if isinstance(error, kind)), "this is unexpected"
    )
    unavailable = StoreUnavailableError(f"the store {file} failed: {remedy} ({error})")
    unavailable.__cause__ = error
    return unavailable


def connect_writer(file: str) -> apsw.Connection:
    """Open ``file`` for writing, create or migrate its tables, and return the connection.

    Raises:
        StoreVersionError: the file is of another program or of a newer version.
        apsw.Error: SQLite could not open it.
    """
    # Bodies are personal data, and SQLite gives its other files the mode of this one. Where this
    # fails, SQLite says why in a moment.
    with suppress(OSError):
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    connection = apsw.Connection(file)
    try:
        connection.set_busy_timeout(int(BUSY_SECONDS * 1000))
        _migrate(connection, file)
        _use_log(connection)
        for statement in _WRITER:
            connection.execute(statement)
        # A first write finds out here, rather than at a delivery, that nothing can be written.
        connection.execute("BEGIN IMMEDIATE; COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_log(connection: apsw.Connection) -> None:
    """Keep readers and the writer apart (WAL); SQLite waits for nobody when it changes to that."""
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


def _migrate(connection: apsw.Connection, file: str) -> None:
    if not _plan(connection, file):
        return
    # Two processes may open a new file at once: the second finds it done within its own lock.
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in _plan(connection, file):
            connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


# One statement, so that all three are of one moment: another process may be making the tables.
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
