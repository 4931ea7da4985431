"""Writes the replicator's configuration whole or not at all (contracts 7)."""

import glob
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from ..errors import ReplicationError

#: Only its owner reads it: it names hosts, accounts and tenants.
MODE = 0o600

#: A partial file as old as that is a killed process's, in seconds; no write takes as long.
_ABANDONED_SECONDS = 3600.0


class ManifestWriter:
    """Keeps one file at the text that it is given.

    Args:
        path: the file; a link is followed, so that the file it leads to is what is replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def is_current(self, text: str) -> bool:
        """Return whether the file holds exactly ``text`` and only its owner can read it."""
        try:
            with open(self.path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode & 0o777
                # One byte more than expected is read, never a large file that is not ours.
                expected = text.encode()
                return mode == MODE and file.read(len(expected) + 1) == expected
        except OSError:
            return False

    def write(self, text: str) -> bool:
        """Replace the file unless it is current; return whether it was replaced.

        A reader sees the old text or the new one, whole, also after a loss of power. Whatever
        fails, the old text stays.

        Raises:
            ReplicationError: it cannot be written; the message says why.
        """
        if self.is_current(text):
            return False
        target = Path(os.path.realpath(self.path))
        partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
        try:
            try:
                _write_durably(partial, text.encode())
                os.replace(partial, target)
            except BaseException:
                with suppress(OSError):
                    partial.unlink()
                raise
            _sync_directory(target.parent)
            _sweep(target)
        except OSError as error:
            raise ReplicationError(
                f"the replicator's configuration {self.path} cannot be written "
                f"({error.strerror}): make its directory writable for this user, with space left, "
                "or set Sdk:MultiTenant:FileDb:Replication:ConfigOutputPath to another path"
            ) from error
        return True


def _write_durably(file: Path, content: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    with open(descriptor, "wb") as stream:
        # The umask takes bits away from the mode that open() was given.
        os.chmod(file, MODE)
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(target: Path) -> None:
    """Remove what killed processes have left beside the file."""
    for partial in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with suppress(OSError):
            if partial.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                partial.unlink()
