"""The data directory: made for its owner alone, and locked by the one runtime that uses it.

Only the runtime takes the lock. Commands open the database beside a running daemon without it;
SQLite's own locks keep their writes apart.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import StoreLockedError, StoreUnavailableError

#: The file whose lock is held; what it contains means nothing.
LOCK_NAME = "runtime.lock"

#: Holds the process id of the lock's holder, for the message of whoever finds it locked.
PID_NAME = "runtime.pid"


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
        raise StoreLockedError(
            f"the data directory {directory} is in use by {_holder(pid_file)}; stop that process, "
            "or set Sdk:Storage:Path to another directory"
        ) from None
    except OSError as error:
        raise StoreUnavailableError(
            f"the data directory {directory} cannot be locked ({error.strerror}); make it writable "
            "for this user, or set Sdk:Storage:Path to a directory that is"
        ) from error
    try:
        with suppress(OSError):
            pid_file.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield directory
    finally:
        with suppress(OSError):
            pid_file.unlink()
        lock.release()


def _holder(pid_file: Path) -> str:
    try:
        return f"process {int(pid_file.read_text(encoding='ascii'))}"
    except (OSError, ValueError):
        return "another process"
