"""The files of a simulated host's data directory, and its connections.

Hosts listen on unix sockets in the temporary directory, which the kernel serves at once and in
order. The world's senders simulate the delays and interruptions of a network.
"""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import apsw
import filelock
import trio

from ...base import opener
from .disk import Disk, HostDownError, LockHeldError


class Machine:
    """The open files and connections of one incarnation of a host; a crash ends them.

    Args:
        name: ``host#number``.
        crash_in: the number of changes to the disk after which it crashes; None: it does not.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        #: The host has crashed: its tasks no longer have any effect.
        self.down = False
        #: Its tasks may end, because the simulation is over.
        self.discarded = trio.Event()
        #: The incarnation has ended, by a crash or otherwise.
        self.gone = trio.Event()
        self.crash_in: int | None = None
        #: Called at the moment of such a crash.
        self.on_crash: Callable[[], None] = lambda: None
        self.connections: list[apsw.Connection] = []
        self.locks: list[Any] = []
        self.descriptors: dict[int, tuple[int, int]] = {}
        #: Connections of senders with this host.
        self.links: dict[trio.CancelScope, None] = {}

    def __repr__(self) -> str:
        return self.name

    def touch(self, what: str) -> None:
        """Count a change to the disk; crash if ``crash_in`` is reached.

        Raises:
            HostDownError: the host has crashed.
        """
        if not self.down and self.crash_in is not None and what != "read":
            self.crash_in -= 1
            if self.crash_in <= 0:
                self.crash_in = None
                self.on_crash()
        if self.down:
            raise HostDownError(self.name)

    def release(self) -> None:
        """Close the connections and release the locks, as the kernel does for a process that ends.

        Its descriptors stay open, because code of the crashed host still uses their numbers.
        """
        for scope in self.links:
            scope.cancel()
        for connection in self.connections:
            with suppress(apsw.Error, HostDownError):
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            with suppress(apsw.Error, HostDownError):
                connection.close(True)
        for descriptor, identity in self.descriptors.items():
            with suppress(OSError):
                found = os.fstat(descriptor)
                if (found.st_dev, found.st_ino) == identity:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
        for lock in self.locks:
            lock.release(force=True)


class _Connection(apsw.Connection):
    """A connection that lets other tasks run before a commit."""

    commits: Callable[[], None]

    def execute(self, statements: str, *arguments: Any, **named: Any) -> apsw.Cursor:
        if statements == "COMMIT":
            self.commits()
        return super().execute(statements, *arguments, **named)


class SimulatedOpener(opener.Opener):
    """Opens files on the simulated disk; refuses everything outside of the world.

    Args:
        disk: the disk.
        machine: returns the current host's machine; None: code of the world.
        commits: called by a database connection between the work of a transaction and its commit.
    """

    def __init__(
        self,
        disk: Disk,
        machine: Callable[[], Machine | None],
        commits: Callable[[], None],
    ) -> None:
        self._disk = disk
        self._machine = machine
        self._commits = commits
        self._paths: dict[int, str] = {}

    def _touch(self, what: str) -> Machine | None:
        machine = self._machine()
        if machine is not None:
            machine.touch(what)
        return machine

    def file(self, path: str | os.PathLike[str], flags: int, mode: int) -> int:
        """See :func:`sdk_trio.base.opener.open_file`."""
        machine = self._touch("read")
        descriptor = super().file(path, flags, mode)
        found = os.fstat(descriptor)
        if machine is not None:
            machine.descriptors[descriptor] = found.st_dev, found.st_ino
        name = os.fspath(path)
        self._paths[descriptor] = name
        written = flags & (os.O_WRONLY | os.O_RDWR)
        # SQLite's own files are written through the VFS.
        if written and self._disk.holds(name) and not name.endswith((".db", "-wal")):
            self._disk.unsynced[name] = None
        return descriptor

    def sync(self, descriptor: int) -> None:
        """See :func:`sdk_trio.base.opener.sync_file`."""
        self._touch("sync")
        path = self._paths[descriptor]
        if self._disk.holds(path) and os.path.isfile(path):
            self._disk.sync(path, os.path.getsize(path))

    def write(self, descriptor: int, content: bytes, offset: int) -> None:
        """See :func:`sdk_trio.base.opener.write_file`."""
        self._touch("write")
        path = self._paths[descriptor]
        if self._disk.holds(path):
            self._disk.will_write(
                path,
                offset,
                len(content),
                os.fstat(descriptor).st_size,
                lambda size, start: os.pread(descriptor, size, start),
            )
        super().write(descriptor, content, offset)

    def lock(self, descriptor: int) -> None:
        """See :func:`sdk_trio.base.opener.lock_file`; it does not wait, the executor does."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LockHeldError from error

    def database(self, path: str, flags: int) -> apsw.Connection:
        """See :func:`sdk_trio.base.opener.open_database`."""
        machine = self._touch("read")
        if machine is None:
            return super().database(path, flags)
        connection = _Connection(path, flags=flags)
        connection.commits = self._commits
        machine.connections.append(connection)
        return connection

    async def resolve(self, host: str, port: int, kind: int) -> list[tuple[Any, ...]]:
        """See :func:`sdk_trio.base.opener.resolve`."""
        await trio.lowlevel.checkpoint()
        raise socket.gaierror(socket.EAI_NONAME, f"a simulation has no host {host}")

    async def dial_tcp(self, host: str, port: int, next_address: float) -> trio.SocketStream:
        """See :func:`sdk_trio.base.opener.dial_tcp`."""
        await self.resolve(host, port, socket.SOCK_STREAM)
        raise AssertionError("resolve raises")

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use this opener for the block, and record which host takes file locks."""
        make = filelock.FileLock

        def lock(*arguments: Any, **named: Any) -> Any:
            made = make(*arguments, **named)
            if (machine := self._machine()) is not None:
                machine.locks.append(made)
            return made

        with ExitStack() as stack:
            stack.enter_context(opener.use(self))
            stack.enter_context(patch.object(filelock, "FileLock", lock))
            yield
