"""External mode: tells an operator's replicator of a new manifest by SIGHUP (contracts 7).

A signal is sent only to a process that is known to survive it: a pid file may be old, and its
number may belong to somebody else by now.
"""

import os
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import trio

from ..base.logs import get_logger
from .manifest import TenantDatabaseFile
from .process_inspector import Harm, find_harm

_log = get_logger("replication")

_KEY: Final = "Sdk:MultiTenant:FileDb:Replication:ReplicatorPidFilePath"

#: A pid file holds a number and a line end; what is longer is another kind of file.
_PID_FILE_BYTES: Final = 64

#: The kernel knows no greater process id on any platform.
_GREATEST_PID: Final = 2**31 - 1

#: Not :data:`signal.SIGHUP`, which does not exist on Windows.
_SIGHUP: Final = 1


@attrs.frozen
class Signalled:
    """The process that was sent SIGHUP."""

    pid: int


class Signaler:
    """Sends SIGHUP to the process in ``ReplicatorPidFilePath``; a :class:`~.ports.Reloader`.

    Args:
        pid_file: written by the replicator.
        platform: as of ``sys.platform``; Windows has no SIGHUP.
    """

    def __init__(self, pid_file: Path, *, platform: str = sys.platform) -> None:
        self._pid_file = pid_file
        self._platform = platform
        self._last: tuple[Sequence[TenantDatabaseFile], Harm] | None = None

    async def reload(self, databases: Sequence[TenantDatabaseFile]) -> bool:
        """Send SIGHUP if that is safe; else log a Warning that says why not, and send nothing.

        Of the same databases the same Warning is logged once.
        """
        outcome = await trio.to_thread.run_sync(self._signal)
        if isinstance(outcome, Signalled):
            self._last = None
            _log.info("replication.reloaded", pid=outcome.pid, databases=len(databases))
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

    def _signal(self) -> Signalled | Harm:
        if self._platform == "win32":
            return Harm(
                "windows",
                "there is no SIGHUP on Windows: restart the replicator, so that it reads the "
                "configuration",
            )
        return send_hangup(self._pid_file)


def send_hangup(pid_file: Path) -> Signalled | Harm:
    """Send SIGHUP to the process in a pid file, if that is safe; blocks."""
    pid = read_pid(pid_file)
    if isinstance(pid, Harm):
        return pid
    try:
        return _send_held(pid) if hasattr(signal, "pidfd_send_signal") else _send(pid)
    except ProcessLookupError:
        return Harm("stale", f"there is no process {pid}: the replicator has ended")
    except PermissionError:
        return Harm("not_permitted", f"this user may not signal process {pid}, which is another's")
    except OSError as error:
        return Harm("failed", f"process {pid} cannot be signalled ({error.strerror})")


def _send_held(pid: int) -> Signalled | Harm:
    """Send through a descriptor: a process that takes over the number meanwhile gets nothing."""
    descriptor = os.pidfd_open(pid)
    try:
        harm = _harm(pid)
        if harm is not None:
            return harm
        signal.pidfd_send_signal(descriptor, _SIGHUP)
    finally:
        os.close(descriptor)
    return Signalled(pid)


def _send(pid: int) -> Signalled | Harm:
    os.kill(pid, 0)
    harm = _harm(pid)
    if harm is not None:
        return harm
    os.kill(pid, _SIGHUP)
    return Signalled(pid)


def _harm(pid: int) -> Harm | None:
    harm = find_harm(pid)
    return None if harm is None else attrs.evolve(harm, detail=f"process {pid}: {harm.detail}")


def read_pid(pid_file: Path) -> int | Harm:
    """Return the process id in a file, or what is wrong with it; blocks."""
    try:
        # Not blocking: at the path may be a pipe.
        descriptor = os.open(pid_file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Harm(
            "missing", f"there is no pid file: start the replicator with one, or set {_KEY}"
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        return Harm("unreadable", f"the pid file cannot be read ({reason})")
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return Harm("unreadable", "the pid file is no regular file")
        if status.st_mode & stat.S_IWOTH:
            return Harm("unsafe", "every user can write the pid file: take that right away")
        content = os.read(descriptor, _PID_FILE_BYTES + 1)
    except OSError as error:
        return Harm("unreadable", f"the pid file cannot be read ({error.strerror})")
    finally:
        os.close(descriptor)
    return parse_pid(content)


def parse_pid(content: bytes) -> int | Harm:
    """Return the process id that a pid file's content stands for, or what is wrong with it."""
    text = content.strip()
    if not text:
        return Harm("empty", "the pid file is empty")
    digits = text.removeprefix(b"-")
    if len(content) > _PID_FILE_BYTES or not digits.isdigit():
        return Harm("garbage", "the pid file holds no number")
    pid = int(text)
    if pid <= 0:
        # 0 and less stand for groups of processes.
        return Harm("not_positive", f"the pid file holds {pid}, which is no process")
    if pid == 1 or pid == os.getpid():
        whose = "the system's first process" if pid == 1 else "this program itself"
        return Harm("own", f"the pid file holds {pid}, which is {whose}")
    if pid > _GREATEST_PID:
        return Harm("stale", f"there is no process {pid}")
    return pid
