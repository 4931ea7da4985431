"""The copy of the single-tenant database for the default tenant; the old files are unchanged.

SQLite's backup API reads through the database, so the copy includes the content of its ``-wal``
file. The old database is neither checkpointed nor closed cleanly: its ``-wal`` stays. During the
copy, a write lock excludes writers and admits readers.

Plain functions for a thread; ``pause`` is called often and may raise to stop.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw
import attrs

from ..base.opener import open_database, open_file, sync_path
from ..errors import SourceDatabaseError, UpgradeError
from .databases import SIDE_FILES

#: Pages that are copied between two checks of the clock and of cancellation: some milliseconds
#: of work.
PAGES_PER_TURN = 512

#: Instructions of SQLite's virtual machine between two such checks while the copy is
#: examined.
_INSTRUCTIONS_PER_TURN = 100_000

#: Time to wait for a lock of another process, in seconds.
_BUSY_SECONDS = 2.0

#: Findings of the integrity check that are shown.
_FINDINGS = 3

Pause = Callable[[], None]
CopyProgress = Callable[[int, int], None]


@attrs.frozen
class SourceCounts:
    """The numbers of tables and rows in a database."""

    tables: int
    rows: int
    bytes: int


def count_source(source: Path, pause: Pause) -> SourceCounts:
    """Count tables and rows of the single-tenant database, changing nothing.

    Raises:
        SourceDatabaseError: it cannot be read.
    """
    with _translated(source), _opened(source) as connection, _interruptible(connection, pause):
        names = [
            name
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' "
                "AND coalesce(sql, '') NOT LIKE 'CREATE VIRTUAL%'"
            )
        ]
        rows = 0
        for name in names:
            quoted = str(name).replace('"', '""')
            rows += connection.execute(f'SELECT count(*) FROM "{quoted}"').get
        pages = connection.pragma("page_count") * connection.pragma("page_size")
        return SourceCounts(len(names), rows, pages)


def is_open_elsewhere(source: Path) -> bool:
    """Return whether another process has a database open, or is writing to it.

    Without a write-ahead log, only a transaction in progress is detected. An unreadable database is
    not open; its copy will report the fault.
    """
    try:
        with _opened(source) as connection:
            # SQLite enters this mode on a write-ahead log only while no other connection is open.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("ROLLBACK")
    except apsw.BusyError:
        return True
    except (apsw.Error, OSError):
        return False
    return False


def copy_database(source: Path, partial: Path, pause: Pause, progress: CopyProgress) -> int:
    """Copy ``source`` to ``partial``, check the copy, sync it to disk, and return its pages.

    ``partial`` is replaced if it exists, and removed again if this fails.

    Raises:
        SourceDatabaseError: the source cannot be read, is damaged, or is being written.
        UpgradeError: the copy cannot be written.
    """
    remove_database(partial)
    try:
        with (
            _translated(source),
            _opened(source) as reading,
            # A backup restarts after every write of another connection, and would never end during
            # constant writes.
            _writers_kept_out(source),
            _created(partial) as copy,
        ):
            pages = _back_up(reading, copy, partial, pause, progress)
            _check(source, copy, pause)
        sync_path(partial)
        # The directory, too: after a power cut a file that was synced may have no name.
        sync_path(partial.parent)
    except BaseException:
        remove_database(partial)
        raise
    return pages


def install(partial: Path, target: Path) -> None:
    """Give the verified copy its name; a second call, after a crash, does nothing.

    Raises:
        UpgradeError: the tenant has a database already, or parts of one.
    """
    if not partial.exists():
        return
    refuse_existing(target)
    partial.rename(target)
    sync_path(target.parent)


def refuse_existing(target: Path) -> None:
    """Raise if ``target`` or one of its side files exists, because no file is ever overwritten.

    Raises:
        UpgradeError: a file exists; the message names it.
    """
    for suffix in ("", *SIDE_FILES):
        found = target.with_name(target.name + suffix)
        if found.exists():
            raise UpgradeError(
                f"the default tenant has a database already: {found} exists and is not "
                "overwritten; move it away, or choose another default tenant"
            )


def remove_database(file: Path) -> int:
    """Remove a database with its side files and return how many bytes they had.

    The database goes first: a log without its database is not data, but a database without its log
    would look complete and lack its last changes.
    """
    freed = 0
    for suffix in ("", *SIDE_FILES):
        found = file.with_name(file.name + suffix)
        with suppress(FileNotFoundError):
            size = found.lstat().st_size
            found.unlink()
            freed += size
    return freed


# -- the two databases ---------------------------------------------------------------------------


@contextmanager
def _translated(source: Path) -> Iterator[None]:
    try:
        yield
    except apsw.BusyError as error:
        raise SourceDatabaseError(
            f"the single-tenant database {source} is being written by another process; stop that "
            "process, then start the upgrade again; nothing was changed"
        ) from error
    except apsw.Error as error:
        raise SourceDatabaseError(
            f"the single-tenant database {source} cannot be copied: {error}; check that it is a "
            "SQLite database that this user can read ('PRAGMA integrity_check'), or restore a "
            "backup; nothing was changed"
        ) from error
    except OSError as error:
        raise SourceDatabaseError(
            f"the single-tenant database {source} cannot be read ({error.strerror}); make it "
            "readable for this user, or correct Sdk:MultiTenant:SingleTenantUpgrade:SourceDatabase;"
            " nothing was changed"
        ) from error


@contextmanager
def _opened(source: Path) -> Iterator[apsw.Connection]:
    # Opened without SQLite first: SQLite has one message for every file that it cannot open, and
    # the operating system names the cause.
    with open(source, "rb", opener=open_file):
        pass
    log = source.with_name(f"{source.name}-wal")
    keeps_log = log.exists()
    # Opened for writing, because the journal of a killed process must be rolled back before the
    # database can be read.
    connection = open_database(source, flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.set_busy_timeout(int(_BUSY_SECONDS * 1000))
        # The old files stay unchanged. A checkpoint at closing would change the database that the
        # operator may return to.
        if keeps_log:
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        yield connection
    finally:
        connection.close()


@contextmanager
def _writers_kept_out(source: Path) -> Iterator[None]:
    """Hold the write lock on a separate connection, since the backup cannot read through it."""
    with _opened(source) as guard:
        try:
            guard.execute("BEGIN IMMEDIATE")
        except apsw.ReadOnlyError:
            yield  # no process on this file system can write to it
            return
        try:
            yield
        finally:
            guard.execute("ROLLBACK")


@contextmanager
def _created(partial: Path) -> Iterator[apsw.Connection]:
    try:
        os.close(open_file(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise UpgradeError(
            f"the copy {partial} cannot be written ({error.strerror}); make its directory writable "
            "for this user; nothing was changed"
        ) from error
    connection = open_database(partial, flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        # Without journal and syncs the copy is fast. That is safe: an incomplete copy is deleted,
        # and a complete one is synced before it is used.
        for statement in ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF"):
            connection.execute(statement)
        yield connection
    finally:
        connection.close()


def _back_up(
    source: apsw.Connection,
    copy: apsw.Connection,
    partial: Path,
    pause: Pause,
    progress: CopyProgress,
) -> int:
    try:
        with copy.backup("main", source, "main") as backup:
            while not backup.done:
                backup.step(PAGES_PER_TURN)
                progress(backup.page_count - backup.remaining, backup.page_count)
                pause()
            pages = backup.page_count
        # The copied header selects a write-ahead log if the old one did. The copy must be complete
        # in one file, because it is renamed.
        copy.execute("PRAGMA journal_mode = DELETE")
    except apsw.FullError as error:
        raise UpgradeError(
            f"the copy {partial} cannot be written: {error}; free some space (it needs as much as "
            "the database has); nothing was changed"
        ) from error
    return pages


def _check(source: Path, copy: apsw.Connection, pause: Pause) -> None:
    with _interruptible(copy, pause):
        findings = [str(text) for (text,) in copy.execute("PRAGMA integrity_check(20)")]
    if findings != ["ok"]:
        shown = "; ".join(" ".join(finding.split()) for finding in findings[:_FINDINGS])
        raise SourceDatabaseError(
            f"the single-tenant database {source} is damaged: {shown}; restore a backup or repair "
            "it ('.recover' of the sqlite3 shell); nothing was changed"
        )


@contextmanager
def _interruptible(connection: apsw.Connection, pause: Pause) -> Iterator[None]:
    """Call ``pause`` while a long statement runs; its exception ends the statement."""
    raised: list[BaseException] = []

    def look() -> bool:
        try:
            pause()
        except BaseException as error:  # noqa: ASYNC103 - raised again below, outside of SQLite
            raised.append(error)
        return bool(raised)

    connection.set_progress_handler(look, _INSTRUCTIONS_PER_TURN)
    try:
        yield
    except apsw.InterruptError:
        if raised:
            raise raised[0] from None
        raise
    finally:
        connection.set_progress_handler(None)
