"""Open sockets and the files of the data directory; no other module of the runtime opens them.

A simulation replaces the :class:`Opener` with :func:`use`: its network is in memory, and its disk
loses unsynced writes. Modules that read an operator's files, such as settings and secrets, open
them directly and never write them.

Trio and apsw are imported on use: commands that do not need them start faster.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import apsw
    import trio

#: Seconds before the next address of a host is tried in parallel (RFC 8305).
NEXT_ADDRESS_SECONDS = 0.25


class Opener:
    """Opens the sockets and files of this machine.

    The functions of this module call its methods.
    """

    def file(self, path: str | os.PathLike[str], flags: int, mode: int) -> int:
        """See :func:`open_file`."""
        return os.open(path, flags, mode)

    def sync(self, descriptor: int) -> None:
        """See :func:`sync_file`."""
        os.fsync(descriptor)

    def write(self, descriptor: int, content: bytes, offset: int) -> None:
        """See :func:`write_file`."""
        left = memoryview(content)
        while left:
            written = os.pwrite(descriptor, left, offset)
            left = left[written:]
            offset += written

    def lock(self, descriptor: int) -> None:
        """See :func:`lock_file`."""
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)

    def database(self, path: str, flags: int) -> "apsw.Connection":
        """See :func:`open_database`."""
        import apsw

        return apsw.Connection(path, flags=flags)

    def socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        """See :func:`open_socket`."""
        return socket.socket(family, kind, protocol)

    async def resolve(self, host: str, port: int, kind: int) -> list[tuple[Any, ...]]:
        """See :func:`resolve`."""
        import trio

        return list(await trio.socket.getaddrinfo(host, port, type=kind))

    async def dial_tcp(self, host: str, port: int, next_address: float) -> "trio.SocketStream":
        """See :func:`dial_tcp`."""
        import trio

        return await trio.open_tcp_stream(host, port, happy_eyeballs_delay=next_address)

    async def dial_unix(self, path: str) -> "trio.SocketStream":
        """See :func:`dial_unix`."""
        import trio

        return await trio.open_unix_socket(path)


_current = Opener()


@contextmanager
def use(opener: Opener) -> Iterator[None]:
    """Replace the opener of the whole process during the block."""
    global _current
    before, _current = _current, opener
    try:
        yield
    finally:
        _current = before


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """Open a file or directory of the data directory and return its descriptor.

    Usable as the ``opener`` of the built-in ``open``: ``open(path, "rb", opener=open_file)``.

    Args:
        flags: as for ``os.open``. Child processes do not inherit the descriptor.
        mode: permissions of a created file, before the umask.

    Raises:
        OSError: it cannot be opened.
    """
    return _current.file(path, flags, mode)


def sync_file(descriptor: int) -> None:
    """Wait until the file or directory would survive a power cut (``os.fsync``). Blocks.

    Raises:
        OSError: the disk failed. Writes since the last sync may be lost, even if a later sync
            succeeds.
    """
    _current.sync(descriptor)


def sync_path(path: str | os.PathLike[str]) -> None:
    """Make a file, or the entries of a directory, survive a power cut; see :func:`sync_file`.

    Raises:
        OSError: it cannot be opened, or the disk failed.
    """
    descriptor = open_file(path, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def write_file(descriptor: int, content: bytes, offset: int) -> None:
    """Write all of ``content`` at an offset of a file that :func:`open_file` has opened.

    Not available on Windows.

    Raises:
        OSError: the disk failed, or is full.
    """
    _current.write(descriptor, content, offset)


def lock_file(descriptor: int) -> None:
    """Wait for the lock of a file (``flock``). Blocks.

    Not available on Windows.

    Raises:
        OSError: the file system has no locks.
    """
    _current.lock(descriptor)


def open_database(path: str | os.PathLike[str], *, flags: int) -> "apsw.Connection":
    """Open a SQLite database and return the connection.

    Args:
        flags: SQLite's open flags, such as ``apsw.SQLITE_OPEN_READONLY``.

    Raises:
        apsw.Error: it cannot be opened.
    """
    return _current.database(os.fspath(path), flags)


def open_socket(family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
    """Return a new blocking socket for listening or datagrams; the arguments are as in socket(2).

    Raises:
        OSError: the system cannot open another socket.
    """
    return _current.socket(family, kind, protocol)


async def resolve(host: str, port: int, *, kind: int = socket.SOCK_STREAM) -> list[tuple[Any, ...]]:
    """Return the addresses of a host, as ``socket.getaddrinfo`` does.

    Raises:
        OSError: the name cannot be resolved.
    """
    return await _current.resolve(host, port, kind)


async def dial_tcp(
    host: str, port: int, *, next_address: float = NEXT_ADDRESS_SECONDS
) -> "trio.SocketStream":
    """Connect by TCP to the first address of a host that answers.

    Args:
        next_address: seconds before the next address is tried in parallel.

    Raises:
        OSError: the host cannot be resolved, or none of its addresses answers.
    """
    return await _current.dial_tcp(host, port, next_address)


async def dial_unix(path: str) -> "trio.SocketStream":
    """Connect to the unix socket at ``path``.

    Raises:
        OSError: nothing listens there.
    """
    return await _current.dial_unix(path)
