"""Locks: the databases' directory has one replicator at a time, and ``replication run`` a pid file.

Two replicators of one database raise no error and spoil its replica. The lock belongs to an open
file that the child inherits, so it is held as long as the supervisor or its child lives: after a
supervisor was killed, the next one waits until the child has ended, too.

The pid file is whole from the first moment, locked while it is true, and gone at the end.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import trio

from ..errors import ReplicatorError, StoreLockedError

try:
    import fcntl
except ImportError:  # Windows, for which there is no replicator
    fcntl = None  # type: ignore[assignment]

#: Name of the lock file; it holds the process id of its taker.
LOCK_NAME: Final = "replicator.lock"

#: Pause between two attempts to take the lock, in seconds.
_POLL_SECONDS: Final = 0.1


@contextmanager
def lock_databases(directory: str | os.PathLike[str]) -> Iterator[int]:
    """Hold the lock for a block, which gets the file descriptor that the child has to inherit.

    Raises:
        StoreLockedError: another process holds it.
        ReplicatorError: the file cannot be made, or this system has no such locks.
    """
    if fcntl is None:
        raise ReplicatorError("a replicator cannot be supervised on this system: there is none")
    path = Path(directory) / LOCK_NAME
    try:
        # Not truncated here: until the lock is ours, the file names its holder.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ReplicatorError(
            f"the replicator's lock {path} cannot be made ({error.strerror}): make the directory "
            "writable for this user"
        ) from error
    # Closed and never unlocked: unlocking would take the lock from a child that lives on.
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreLockedError(
                f"the databases in {path.parent} are replicated by {_holder(descriptor)} already: "
                "stop that process first"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


async def lock_patiently(
    stack: ExitStack, directory: str | os.PathLike[str], *, seconds: float
) -> int:
    """Take the lock for as long as ``stack`` is open, and return its file descriptor.

    Args:
        stack: gives the lock back.
        directory: of the databases.
        seconds: time to wait for another holder.

    Raises:
        StoreLockedError: another process holds it still.
        ReplicatorError: as of :func:`lock_databases`.
    """
    await trio.lowlevel.checkpoint()
    deadline = trio.current_time() + seconds
    while trio.current_time() < deadline:
        with suppress(StoreLockedError):
            return stack.enter_context(lock_databases(directory))
        await trio.sleep(_POLL_SECONDS)
    return stack.enter_context(lock_databases(directory))


def _holder(descriptor: int) -> str:
    try:
        return f"process {int(os.pread(descriptor, 32, 0))} or its child"
    except (OSError, ValueError):
        return "another process"


@contextmanager
def hold_pid_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep this process's id in the file ``path`` for the length of a block.

    A reader sees a whole number or no file. The file is locked, and the lock ends with the process:
    the file of a killed process is replaced, that of a living one is not. No link is followed, as
    others may be able to write in the directory.

    Raises:
        StoreLockedError: another process holds the file.
        ReplicatorError: it cannot be written, or this system has no such locks.
    """
    if fcntl is None:
        raise ReplicatorError("a replicator cannot be supervised on this system: there is none")
    file = Path(path).absolute()
    partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ReplicatorError(
            f"the pid file {file} cannot be written ({error.strerror}): make its directory "
            "writable for this user, or choose another place with --pid-file"
        ) from error
    try:
        os.fchmod(descriptor, 0o644)  # no secret; other users' programs read it to send signals
        os.write(descriptor, f"{os.getpid()}\n".encode())
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _put_in_place(partial, file)
        try:
            yield
        finally:
            with suppress(OSError):
                if os.path.samestat(os.lstat(file), os.fstat(descriptor)):
                    file.unlink()
    finally:
        with suppress(OSError):
            partial.unlink()
        os.close(descriptor)


def _put_in_place(partial: Path, file: Path) -> None:
    """Give ``partial`` the name ``file``, unless a living process has a file there."""
    while True:
        try:
            os.link(partial, file)  # fails where there is a file, so only one can succeed
        except FileExistsError:
            _remove_abandoned(file)
        except OSError as error:
            raise ReplicatorError(f"{file} cannot be written: {error.strerror}") from error
        else:
            return


def _remove_abandoned(file: Path) -> None:
    try:
        # Not blocking: a pipe in its place would never open.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError as error:
        what = "is a symbolic link" if file.is_symlink() else f"cannot be read: {error.strerror}"
        raise ReplicatorError(
            f"the pid file {file} {what}; remove it, or choose another place with --pid-file"
        ) from error
    try:
        if os.fstat(descriptor).st_uid not in (os.geteuid(), 0):
            raise ReplicatorError(
                f"the pid file {file} belongs to another user: remove it, or choose another place "
                "with --pid-file"
            )
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # We have its lock and it is still in place, so its process has ended.
        if os.path.samestat(os.lstat(file), os.fstat(descriptor)):
            file.unlink()
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        raise StoreLockedError(
            f"the pid file {file} belongs to process {holder}, which runs: stop it first, or "
            "choose another file with --pid-file"
        ) from error
    except FileNotFoundError:
        return
    finally:
        os.close(descriptor)
