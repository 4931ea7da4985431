"""The data directory: made for its owner alone, and locked by the one runtime that uses it.

Only the runtime takes the lock. Commands open the database beside a running daemon without it;
SQLite's own locks keep their writes apart.

The lock is held twice. That of ``runtime.lock`` works everywhere, and ends with the file: who
deletes that lets a second runtime in. That of the directory in which the database and its log
stand has no file of its own to delete, and is the same through every link and mount. It is not on
the database itself: closing a descriptor of that would drop the locks that SQLite holds of it.
"""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import StoreLockedError, StoreUnavailableError
from .schema import DATABASE_NAME

#: The file whose lock is held; what it contains means nothing.
LOCK_NAME = "runtime.lock"

#: Holds the process id of the lock's holder, for the message of whoever finds it locked.
PID_NAME = "runtime.pid"

#: How long another lock of the directory is waited for, in seconds: systemd-tmpfiles takes one
#: while it looks at a directory (and leaves alone what we have locked).
CLEANER_SECONDS = 1.0


def create_data_directory(path: str | os.PathLike[str]) -> Path:
    """Create ``path`` if it does not exist, for this user alone (mode 0700), and return it.

    An existing directory keeps its mode.

    Raises:
        StoreUnavailableError: it cannot be created, or is no directory.
    """
    directory = Path(path)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Not in one call with its parents: mkdir gives those the mode of the umask.
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreUnavailableError(
            f"the data directory {directory} cannot be created ({error.strerror}); create it for "
            "this user, or set Sdk:Storage:Path to a directory that is writable"
        ) from error
    return directory


@contextmanager
def lock_data_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Hold the exclusive lock of the data directory ``path``, which is created if it is missing.

    The lock ends with the process, however that ends.

    Raises:
        StoreLockedError: another process, or another runtime in this one, holds it.
        StoreUnavailableError: the directory cannot be created or written.
    """
    import filelock  # a store in memory has nothing to lock

    directory = create_data_directory(path)
    pid_file = directory / PID_NAME
    lock = filelock.FileLock(directory / LOCK_NAME, thread_local=False)
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
        with _lock_database_directory(directory, pid_file):
            yield from _announce_holder(directory, pid_file)
    finally:
        lock.release()


def _announce_holder(directory: Path, pid_file: Path) -> Iterator[Path]:
    try:
        with suppress(OSError):
            pid_file.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield directory
    finally:
        with suppress(OSError):
            pid_file.unlink()


@contextmanager
def _lock_database_directory(directory: Path, pid_file: Path) -> Iterator[None]:
    """Hold the lock of the directory of the database, where the system has such a lock."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    # The log stands beside what a link leads to, so whoever shares it shares that directory.
    place = os.path.dirname(os.path.realpath(directory / DATABASE_NAME))
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield  # one that cannot be read cannot be locked
        return
    try:
        deadline = time.monotonic() + CLEANER_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    break  # some network file systems lock no directory
                if time.monotonic() >= deadline:
                    raise StoreLockedError(
                        _in_use(directory, _holder(pid_file, descriptor))
                    ) from None
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _in_use(directory: Path, holder: str) -> str:
    return (
        f"the data directory {directory} is in use by {holder}; stop that process, or set "
        "Sdk:Storage:Path to another directory"
    )


def _holder(pid_file: Path, locked: int | None = None) -> str:
    """Name who holds the lock, by what it has written, or by the lock of descriptor ``locked``."""
    with suppress(OSError, ValueError):
        return f"process {int(pid_file.read_text(encoding='ascii'))}"
    with suppress(OSError, ValueError):
        if locked is not None:
            found = os.fstat(locked)
            device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
            # Linux: "1: FLOCK  ADVISORY  WRITE 4711 fe:00:131 0 EOF"
            for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
                _, kind, _, _, pid, file, *_ = line.split()
                if kind == "FLOCK" and file == device and int(pid) > 0:
                    return f"process {pid}"
    return "another process"
