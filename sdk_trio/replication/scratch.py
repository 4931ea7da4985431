"""Directories for unfinished files, removed at the end, with those that killed processes left."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

#: Name of the lock file that is locked while the directory is in use.
_LOCK_NAME = "in-use.lock"


@contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a directory in ``parent`` for this user alone, and remove it whole at the end.

    Directories of the same prefix whose process was killed are removed first, so that the files of
    crashes do not pile up.

    Raises:
        OSError: it cannot be made.
    """
    with suppress(OSError):
        for left in parent.glob(f"{prefix}*"):
            _remove_unused(left)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = filelock.FileLock(directory / _LOCK_NAME, thread_local=False)
    try:
        lock.acquire(timeout=0)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.release()


def _remove_unused(directory: Path) -> None:
    marker = directory / _LOCK_NAME
    # Without the lock file, another process has just made the directory and is about to lock it.
    if not marker.exists():
        return
    lock = filelock.FileLock(marker, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except (filelock.Timeout, OSError):
        return
    shutil.rmtree(directory, ignore_errors=True)
    lock.release()


def sync_to_disk(path: Path) -> None:
    """Make a file, or the names in a directory, survive a loss of power.

    Raises:
        OSError: the disk does not take it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
