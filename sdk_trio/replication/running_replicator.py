"""The running replicator: the lock that makes it the only one, its pid file, and SIGHUP.

Two replicators of one database raise no error and corrupt its replica, so the databases' directory
has one lock. The lock belongs to an open file that the child inherits, so it is held as long as the
supervisor or its child lives. After a supervisor was killed, the next one also waits for the
child's end. The pid file of ``replication run`` is always complete, locked while valid, and removed
at the end.
"""

import os
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import attrs
import trio

from ..base.executor import run_in_thread
from ..base.logs import get_logger
from ..base.opener import open_file
from ..errors import ReplicatorError, StoreLockedError
from .manifest import TenantDatabaseFile

try:
    import fcntl
except ImportError:  # Windows, where the replicator does not run
    fcntl = None  # type: ignore[assignment]

_log = get_logger("replication")

#: Name of the lock file; it contains the process id of the lock's holder.
LOCK_NAME: Final = "replicator.lock"

#: Pause between two attempts to take the lock, in seconds.
_POLL_SECONDS: Final = 0.1


@contextmanager
def lock_databases(directory: str | os.PathLike[str]) -> Iterator[int]:
    """Hold the lock for a block, which gets the file descriptor that the child must inherit.

    Raises:
        StoreLockedError: another process holds it.
        ReplicatorError: the file cannot be created, or this system has no such locks.
    """
    if fcntl is None:
        raise ReplicatorError("a replicator cannot be supervised on this system: there is none")
    path = Path(directory) / LOCK_NAME
    try:
        # Not truncated here: until the lock is ours, the file names its holder.
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ReplicatorError(
            f"the replicator's lock {path} cannot be created ({error.strerror}): make the "
            "directory writable for this user"
        ) from error
    # Closed and never unlocked: unlocking would release the lock of a child that still runs.
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreLockedError(
                f"the databases in {path.parent} are replicated by {_holder(descriptor)}: stop "
                "that process first"
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
        stack: releases the lock.
        directory: the directory of the databases.
        seconds: time to wait for another holder.

    Raises:
        StoreLockedError: another process still holds it.
        ReplicatorError: as for :func:`lock_databases`.
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
    """Keep this process's id in the file ``path`` during a block.

    A reader sees a complete number or no file. The file is locked, and the lock ends with the
    process: the file of a killed process is replaced, that of a living one is not. Links are not
    followed, as others may be able to write in the directory.

    Raises:
        StoreLockedError: another process holds the file.
        ReplicatorError: it cannot be written, or this system has no such locks.
    """
    if fcntl is None:
        raise ReplicatorError("a replicator cannot be supervised on this system: there is none")
    file = Path(path).absolute()
    partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        descriptor = open_file(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ReplicatorError(
            f"the pid file {file} cannot be written ({error.strerror}): make its directory "
            "writable for this user, or choose another path with --pid-file"
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
            os.link(partial, file)  # fails if the file exists, so only one process can succeed
        except FileExistsError:
            _remove_abandoned(file)
        except OSError as error:
            raise ReplicatorError(f"{file} cannot be written: {error.strerror}") from error
        else:
            return


def _remove_abandoned(file: Path) -> None:
    try:
        # Non-blocking: opening a pipe would never return.
        descriptor = open_file(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError as error:
        what = "is a symbolic link" if file.is_symlink() else f"cannot be read: {error.strerror}"
        raise ReplicatorError(
            f"the pid file {file} {what}; remove it, or choose another path with --pid-file"
        ) from error
    try:
        if os.fstat(descriptor).st_uid not in (os.geteuid(), 0):
            raise ReplicatorError(
                f"the pid file {file} belongs to another user: remove it, or choose another path "
                "with --pid-file"
            )
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # We have its lock and it is unchanged, so its process has ended.
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


#: SIGHUP ends the replicator itself: it cannot reload.
BARE_REPLICATOR: Final = "litestream"

#: SIGHUP, signal 1, in the masks of /proc/PID/status.
_HUP_BIT: Final = 1

_PS_SECONDS: Final = 5.0


_KEY: Final = "Sdk:MultiTenant:FileDb:Replication:ReplicatorPidFilePath"

#: The longest pid file, in bytes; a longer file is not one.
_PID_FILE_BYTES: Final = 64

#: The kernel knows no greater process id on any platform.
_GREATEST_PID: Final = 2**31 - 1

#: Not :data:`signal.SIGHUP`, which does not exist on Windows.
_SIGHUP: Final = 1


@attrs.frozen
class SignalRefusal:
    """The reason not to send SIGHUP to a process: ``reason`` is one word, ``detail`` a sentence."""

    reason: str
    detail: str


def refusal_to_signal(pid: int, *, proc: Path = Path("/proc")) -> SignalRefusal | None:
    """Return the reason not to send SIGHUP to a process; None: it may be sent.

    It would end the replicator's own binary, and every process that has set no handler.

    Args:
        pid: the id of a process that exists, or existed a moment ago.
        proc: where the kernel lists processes; if it does not, ``ps`` is run.
    """
    if not (proc / "self").exists():
        return _by_name(_name_by_ps(pid))
    try:
        name = (proc / str(pid) / "comm").read_text(errors="replace").strip()
        status = (proc / str(pid) / "status").read_text(errors="replace")
        command = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except FileNotFoundError:
        return SignalRefusal("stale", "there is no such process")
    except OSError as error:
        return SignalRefusal("unknown", f"its program is unknown ({error.strerror})")
    return _by_name(name) or _by_command(command) or _by_program(pid, proc) or _by_status(status)


def _by_name(name: str) -> SignalRefusal | None:
    if os.path.basename(name) != BARE_REPLICATOR:
        return None
    return SignalRefusal(
        "bare",
        "it is the replicator itself, which SIGHUP would end; run it under "
        "'replication run --pid-file FILE', which reloads",
    )


def _by_command(command: list[str]) -> SignalRefusal | None:
    # A copy of the binary under another name is still called with the same arguments.
    called = command[0] if command[1:2] != ["replicate"] else BARE_REPLICATOR
    return _by_name(called)


def _by_program(pid: int, proc: Path) -> SignalRefusal | None:
    try:
        return _by_name(os.readlink(proc / str(pid) / "exe").removesuffix(" (deleted)"))
    except OSError:
        return None  # another user's process; its name and command were checked before


def _by_status(status: str) -> SignalRefusal | None:
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if fields.get("State", "").strip().startswith(("Z", "X")):
        return SignalRefusal("stale", "it has ended")
    if _has_hup(fields, "SigIgn"):
        return SignalRefusal("deaf", "it ignores SIGHUP")
    # A program may block the signal and read it from a descriptor instead of handling it.
    if not (_has_hup(fields, "SigCgt") or _has_hup(fields, "SigBlk")):
        return SignalRefusal("unprepared", "it does not handle SIGHUP, which would end it")
    return None


def _has_hup(fields: dict[str, str], mask: str) -> bool:
    return bool(int(fields.get(mask, "0").strip() or "0", 16) & _HUP_BIT)


def _name_by_ps(pid: int) -> str:
    try:
        found = subprocess.run(
            ["/bin/ps", "-o", "comm=", "-p", str(pid)],
            capture_output=True,
            timeout=_PS_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.decode(errors="replace").strip()


class Signaler:
    """Sends SIGHUP to the process in ``ReplicatorPidFilePath``; a :class:`Reloader`.

    Args:
        pid_file: written by the replicator.
        platform: as ``sys.platform``; Windows has no SIGHUP.
    """

    def __init__(self, pid_file: Path, *, platform: str = sys.platform) -> None:
        self._pid_file = pid_file
        self._platform = platform
        self._last: tuple[Sequence[TenantDatabaseFile], SignalRefusal] | None = None

    async def reload(self, databases: Sequence[TenantDatabaseFile]) -> bool:
        """Send SIGHUP if that is safe; otherwise log a warning with the reason.

        The same warning is logged once while the databases stay the same.
        """
        outcome = await run_in_thread(self._signal)
        if isinstance(outcome, int):
            self._last = None
            _log.info("replication.reloaded", pid=outcome, databases=len(databases))
            return True
        if self._last != (databases, outcome):
            self._last = (databases, outcome)
            _log.warning(
                "replication.not_signalled",
                pid_file=str(self._pid_file),
                reason=outcome.reason,
                detail=outcome.detail,
            )
        # On Windows it will not be different later.
        return self._platform == "win32"

    def _signal(self) -> int | SignalRefusal:
        if self._platform == "win32":
            return SignalRefusal(
                "windows",
                "there is no SIGHUP on Windows: restart the replicator, to read the configuration",
            )
        return send_hangup(self._pid_file)


def send_hangup(pid_file: Path) -> int | SignalRefusal:
    """Send SIGHUP to the process in a pid file, if that is safe, and return its id; blocks."""
    pid = read_pid(pid_file)
    if isinstance(pid, SignalRefusal):
        return pid
    try:
        return _send_by_descriptor(pid) if hasattr(signal, "pidfd_send_signal") else _send(pid)
    except ProcessLookupError:
        return SignalRefusal("stale", f"there is no process {pid}: the replicator has ended")
    except PermissionError:
        return SignalRefusal(
            "not_permitted",
            f"this user may not signal process {pid}, which belongs to another user",
        )
    except OSError as error:
        return SignalRefusal("failed", f"process {pid} cannot be signalled ({error.strerror})")


def _send_by_descriptor(pid: int) -> int | SignalRefusal:
    """Send through a descriptor: a new process with the same number gets nothing."""
    # The descriptor refers to the process, not to its number, which the kernel reuses.
    descriptor = os.pidfd_open(pid)
    try:
        harm = _harm(pid)
        if harm is not None:
            return harm
        signal.pidfd_send_signal(descriptor, _SIGHUP)
    finally:
        os.close(descriptor)
    return pid


def _send(pid: int) -> int | SignalRefusal:
    os.kill(pid, 0)
    harm = _harm(pid)
    if harm is not None:
        return harm
    os.kill(pid, _SIGHUP)
    return pid


def _harm(pid: int) -> SignalRefusal | None:
    harm = refusal_to_signal(pid)
    return None if harm is None else attrs.evolve(harm, detail=f"process {pid}: {harm.detail}")


def read_pid(pid_file: Path) -> int | SignalRefusal:
    """Return the process id in a file, or the reason not to use it; blocks."""
    try:
        # Not blocking: the open of a named pipe would wait for a writer.
        descriptor = open_file(pid_file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return SignalRefusal(
            "missing", f"there is no pid file: start the replicator with one, or set {_KEY}"
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        return SignalRefusal("unreadable", f"the pid file cannot be read ({reason})")
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return SignalRefusal("unreadable", "the pid file is not a regular file")
        if status.st_mode & stat.S_IWOTH:
            return SignalRefusal(
                "unsafe", "every user can write the pid file: remove that permission"
            )
        content = os.read(descriptor, _PID_FILE_BYTES + 1)
    except OSError as error:
        return SignalRefusal("unreadable", f"the pid file cannot be read ({error.strerror})")
    finally:
        os.close(descriptor)
    return parse_pid(content)


def parse_pid(content: bytes) -> int | SignalRefusal:
    """Return the process id in a pid file's content, or the reason not to use it."""
    text = content.strip()
    if not text:
        return SignalRefusal("empty", "the pid file is empty")
    digits = text.removeprefix(b"-")
    if len(content) > _PID_FILE_BYTES or not digits.isdigit():
        return SignalRefusal("garbage", "the pid file does not contain a number")
    pid = int(text)
    if pid <= 0:
        # kill() takes 0 and negative numbers for groups of processes.
        return SignalRefusal("not_positive", f"the pid file holds {pid}, which is not a process id")
    if pid == 1 or pid == os.getpid():
        whose = "the system's first process" if pid == 1 else "this program itself"
        return SignalRefusal("own", f"the pid file holds {pid}, which is {whose}")
    if pid > _GREATEST_PID:
        return SignalRefusal("stale", f"there is no process {pid}")
    return pid
