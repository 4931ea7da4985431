"""Looks at a directory of databases again and again, as cheaply as that can be had.

A file that comes, goes or takes another one's place changes the times of its directory. While they
stand still, so does the answer, and a look is one question to the kernel instead of 5000.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from .database_finder import database_files

#: A directory's number, and its times: of its content, which whoever copies directories (``rsync
#: -a``, ``tar``) sets back to what it was, and of any change, which nobody can set.
_State = tuple[int, int, int]

#: A directory's time has steps of some milliseconds: only what is older than that stands still.
_SETTLED_SECONDS = 1.0

#: When a directory is read in any case: not every file system keeps its time.
_READ_AGAIN_SECONDS = 30.0


class DirectoryScanner:
    """Knows the databases in one directory.

    Args:
        directory: of the tenants' databases.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: Mapping[str, str] = {}
        self._state: _State | None = None
        self._read_at = float("-inf")

    def scan(self) -> Mapping[str, str]:
        """Return what :func:`~.database_finder.database_files` does; blocks.

        Raises:
            ReplicationError: the directory cannot be read.
        """
        state, now_ns = self._look(), time.time_ns()
        fresh = time.monotonic() - self._read_at < _READ_AGAIN_SECONDS
        if fresh and state is not None and state == self._state:
            return self._found
        # Asked for before it is read: a change meanwhile has the next look read it again.
        self._read_at = time.monotonic()
        self._state = None
        self._found = database_files(self._directory)
        if state is not None and now_ns - max(state[1:]) > _SETTLED_SECONDS * 1_000_000_000:
            self._state = state
        return self._found

    def _look(self) -> _State | None:
        try:
            found = os.stat(self._directory)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns
