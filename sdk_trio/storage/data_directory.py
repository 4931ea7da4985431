"""The lock of the data directory, held by the one process that has the store for itself.

The runtime takes it, and so do the commands that must be alone: migrate, restore and upgrade. Other
commands open the database without it while a daemon runs; SQLite's own locks keep their writes
apart.

There are two locks. The lock of the file ``runtime.lock`` works on every system. But if the file is
deleted, a second runtime can start, take over the leases of the first and run its events twice. The
lock of the directory that holds the database has no file to delete, and is the same through every
link and mount. The database itself is not locked: closing a descriptor of it would drop the POSIX
locks that SQLite holds (docs/adr/0024-store-files.md).
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..base import clock
from ..base.file_locks import lock_holder
from ..base.logs import get_logger
from ..base.opener import open_file
from ..base.private_files import create_data_directory, read_private, visibility, write_private
from ..errors import StoreLockedError, StoreUnavailableError

_log = get_logger("storage")

#: Name of the database.
DATABASE_NAME = "inbox.db"

#: Name of the lock file; its content is irrelevant.
LOCK_NAME = "runtime.lock"

#: Name of the file with the process id of the lock's holder, for the error of a second process.
PID_NAME = "runtime.pid"

#: Name of the file with the owner of the leases that the runtime of this directory takes.
OWNER_NAME = "runtime.owner"

#: Changes with each start of the machine; Linux alone has it.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

#: Time to wait for another holder of the directory's lock, in seconds. systemd-tmpfiles takes it
#: for a moment while it cleans, and skips directories that are locked.
CLEANER_SECONDS = 1.0


class HeldDirectory(NamedTuple):
    """A data directory whose lock this process holds.

    ``descriptor`` is that of the locked directory of the database; None: this system locks none.
    """

    path: Path
    descriptor: int | None

    def replace_owner(self, owner: str) -> str | None:
        """Write the owner of this runtime's leases; return that of the previous runtime, if any.

        That runtime is certainly dead: it held the lock of this very directory since the last boot.
        None is returned for a copy of the directory, or if the directory was used by another
        machine: the runtime there may be alive. None is also returned if this system has no such
        lock.
        """
        file, before = self.path / OWNER_NAME, None
        try:
            boot = _BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            return None
        if self.descriptor is None:
            return None
        held = os.fstat(self.descriptor)
        # While a process has it open, no other directory can have these numbers.
        directory = f"{boot} {held.st_dev} {held.st_ino}"
        with suppress(OSError, ValueError):
            noted, _, known = read_private(file).strip().rpartition(" ")
            before = known if noted == directory else None
        # If it cannot be written, an older owner stays in the file, which is dead as well.
        with suppress(OSError):
            write_private(file, f"{directory} {owner}\n")
        return before


@contextmanager
def lock_data_directory(path: str | os.PathLike[str]) -> Iterator[HeldDirectory]:
    """Hold the exclusive lock of the data directory ``path``, and create it if it is missing.

    The kernel releases the lock with the process, even after ``kill -9``.

    Raises:
        StoreLockedError: another process, or another runtime in this one, holds it.
        StoreUnavailableError: the directory cannot be created or written.
    """
    import filelock  # a store in memory has nothing to lock

    directory = create_data_directory(path)
    if visible := visibility(directory):
        _log.warning("store.directory_visible", detail=f"the data directory {directory} {visible}")
    pid_file = directory / PID_NAME
    # Not thread-local: it may be released in another thread.
    lock = filelock.FileLock(directory / LOCK_NAME, mode=0o600, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise StoreLockedError(_in_use(directory, _holder(pid_file))) from None
    except OSError as error:
        raise StoreUnavailableError(
            f"the data directory {directory} cannot be locked ({error.strerror}); make it writable "
            "for this user, or set Sdk:Storage:Path to a directory that is"
        ) from error
    try:
        with _lock_database_directory(directory, pid_file) as descriptor:
            yield from _announce_holder(HeldDirectory(directory, descriptor), pid_file)
    finally:
        lock.release()


def _announce_holder(held: HeldDirectory, pid_file: Path) -> Iterator[HeldDirectory]:
    try:
        with suppress(OSError):
            write_private(pid_file, f"{os.getpid()}\n")
        yield held
    finally:
        with suppress(OSError):
            pid_file.unlink()


@contextmanager
def _lock_database_directory(directory: Path, pid_file: Path) -> Iterator[int | None]:
    """Hold the lock of the directory of the database, where the system has such a lock.

    Yields the descriptor that holds it.
    """
    if sys.platform == "win32":
        yield None
        return
    import fcntl

    try:
        descriptor = _open_database_directory(directory)
    except OSError:
        yield None  # one that cannot be read cannot be locked
        return
    locked = False
    try:
        deadline = clock.monotonic() + CLEANER_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    break  # some network file systems lock no directory
                if clock.monotonic() >= deadline:
                    raise StoreLockedError(
                        _in_use(directory, _holder(pid_file, descriptor))
                    ) from None
            clock.sleep(0.05)
        yield descriptor if locked else None
    finally:
        os.close(descriptor)


def _open_database_directory(directory: Path) -> int:
    # Links are resolved: the write-ahead log is next to the real file, so two processes that
    # share a database share that directory.
    real = os.path.dirname(os.path.realpath(directory / DATABASE_NAME))
    return open_file(real, os.O_RDONLY)


def _in_use(directory: Path, holder: str) -> str:
    return (
        f"the data directory {directory} is in use by {holder}; stop that process, or set "
        "Sdk:Storage:Path to another directory"
    )


def _holder(pid_file: Path, locked: int | None = None) -> str:
    """Return the holder of the lock, from the pid file or from the lock of ``locked``."""
    with suppress(OSError, ValueError):
        return f"process {int(pid_file.read_text(encoding='ascii'))}"
    pid = None if locked is None else lock_holder(os.fstat(locked).st_ino)
    return "another process" if pid is None else f"process {pid}"
