"""A database that is to be replaced, locked against everybody else.

With a write-ahead log every connection holds a shared lock as long as it is open, also an idle one
of another process and the replicator's. So an exclusive lock proves that nobody has the database
open, and keeps everybody out while it is replaced. To change the journal mode under that lock
brings the log into the database: from then on one rename replaces all of it, and a process that is
killed at any moment leaves the old database whole, or the new one. To remove the old files before
the rename would lose the newest transactions, which are in the log, if it was killed in between.

A process that opened the old file and waited for the lock gets SQLITE_READONLY_DBMOVED.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import apsw
import attrs

from ..errors import RestoreError
from ..tenants.databases import SIDE_FILES
from .scratch import sync_to_disk
from .verifier import Content, Pause, read_content

try:
    import fcntl
except ImportError:  # Windows, for which there is no replicator
    fcntl = None  # type: ignore[assignment]

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

#: The bytes of a database's file that SQLite locks (``PENDING_BYTE`` and those after it).
_LOCK_AT: Final = 0x40000000
_LOCK_BYTES: Final = 512


@attrs.define(eq=False)
class HeldDatabase:
    """A database that nobody else can open; every method blocks.

    Attributes:
        file: its path.
        connection: holds the lock; None: there is no file, or it is so damaged that SQLite cannot
            open it.
        descriptor: holds the same lock of a damaged file.
    """

    file: Path
    connection: apsw.Connection | None = None
    descriptor: int | None = None

    @classmethod
    def take(cls, file: Path) -> "HeldDatabase | None":
        """Lock the database at ``file`` and return it; None: somebody has it open.

        Raises:
            RestoreError: it cannot be opened, or its disk is full.
        """
        if not file.exists():
            return cls(file)
        try:
            connection = apsw.Connection(os.fspath(file), flags=apsw.SQLITE_OPEN_READWRITE)
            try:
                # The caller tries again and says for whom it waits; SQLite would wait in silence.
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
    def _take_damaged(cls, file: Path) -> "HeldDatabase | None":
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
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
    def taken(cls, file: Path) -> Iterator["HeldDatabase | None"]:
        """Hold the database at ``file`` for a block, as :meth:`take` does."""
        held = cls.take(file)
        try:
            yield held
        finally:
            if held is not None:
                held.release()

    def read(self, pause: Pause) -> Content | None:
        """Return all that it holds; None: it is damaged, or there is no file.

        Raises:
            RestoreError: it is there, and cannot be read for another reason.
        """
        if self.connection is None:
            return None
        try:
            return read_content(self.connection, pause)
        except _DAMAGED:
            return None
        except apsw.Error as error:
            raise RestoreError(
                f"{self.file} cannot be compared with its replica: {error}; see to that, or say "
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
            os.close(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            raise RestoreError(
                f"{target} cannot be made ({error.strerror}): name a file that does not exist, in "
                "a directory that is writable for this user"
            ) from error
        try:
            self._copy(target)
            sync_to_disk(target)
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
        copy = apsw.Connection(os.fspath(target), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            # The copy is synced once, as a whole, when it is complete.
            copy.execute("PRAGMA synchronous = OFF")
            with copy.backup("main", self.connection, "main") as backup:
                backup.step()
        finally:
            copy.close()

    def replace_by(self, restored: Path) -> None:
        """Replace the file by ``restored``, on the same disk; a crash leaves one of them whole.

        Raises:
            OSError: the directory cannot be written.
        """
        for suffix in SIDE_FILES:
            # The log is in the database by now. Side files that a crash left would be taken for
            # those of the new database.
            Path(f"{self.file}{suffix}").unlink(missing_ok=True)
        restored.replace(self.file)
        sync_to_disk(self.file.parent)

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
