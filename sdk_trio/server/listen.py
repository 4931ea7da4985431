"""Listening sockets of a server: TCP, unix sockets, and inherited ones.

Either all addresses are opened or none. If one fails, the others are closed again, and the error
names the one that failed.
"""

import errno
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

from ..base import opener
from ..config.fields import split_unix
from ..errors import EXIT_UNAVAILABLE, SdkError

#: Connections that the kernel queues while the loop is busy.
BACKLOG = 1024

#: The soft limit of descriptors that a process sets for itself, if the hard limit allows it. The
#: connections of :class:`~sdk_trio.server.limits.Limits` need 10 000. It is not the hard limit,
#: which may be 2**30: a program that a handler starts might close every number up to its limit.
WANTED_DESCRIPTORS = 65_536


class BindError(SdkError):
    """An address cannot be listened on; the message names the key and the address."""

    exit_code = EXIT_UNAVAILABLE


def listen(addresses: Sequence[str], *, key: str) -> list[socket.socket]:
    """Return a listening socket for each address; the caller closes them.

    Args:
        addresses: ``HOST:PORT``, ``[v6]:PORT``, ``unix:PATH`` (mode 0600), ``unix:PATH?mode=0660``
            or ``fd:N``; port 0 picks a free one.
        key: the setting that the addresses came from, for messages.

    Raises:
        BindError: an address is in use, not ours, or not permitted.
    """
    sockets: list[socket.socket] = []
    for address in addresses:
        try:
            sockets.append(_open(address))
        except OSError as error:
            for sock in sockets:
                sock.close()
            raise BindError(
                f"{key}: cannot listen on {address}: {error.strerror or error}. {_advice(error)}"
            ) from error
    return sockets


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.EADDRNOTAVAIL:
            return (
                "No interface of this machine has that address. List them with 'ip address', or "
                "use 0.0.0.0 or [::] for all."
            )
        case errno.EACCES | errno.EPERM:
            return "Permission denied: use a port from 1024 on, or let systemd open the socket."
        case errno.EADDRINUSE:
            return (
                "Stop the program that uses it, or choose another address (port 0: any free port)."
            )
    return "Choose another address."


def descriptor_limit() -> int:
    """Return the number of descriptors that this process may have open."""
    if resource is None:
        return sys.maxsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def reachable_descriptor_limit() -> int:
    """Return the limit that :func:`raise_descriptor_limit` would lead to."""
    if resource is None:
        return sys.maxsize
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    return max(descriptor_limit(), most)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors as far as the hard one allows, for a daemon's start.

    Service managers set 1024 because of programs that call ``select``, and expect others to raise
    it. Programs that handlers start inherit the limit.
    """
    if resource is None:
        return
    if reachable_descriptor_limit() <= descriptor_limit():
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS has a further limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable_descriptor_limit(), hard))


def _open(address: str) -> socket.socket:
    if address.startswith("fd:"):
        number = address.removeprefix("fd:")
        if not number.isdigit():
            raise OSError("the service manager passed no socket with that name")
        return _listening(socket.socket(fileno=int(number)), None)
    if address.startswith("unix:"):
        path, mode = split_unix(address)
        _remove_stale_socket(path)
        return _unix_socket(path, int(mode, 8))
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    sock = opener.open_socket(family)
    if os.name == "posix":  # elsewhere the option lets two programs share one port
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _listening(sock, (host.strip("[]"), int(port)))


def _unix_socket(path: str, mode: int) -> socket.socket:
    """Return a listening socket at ``path``, never more open than ``mode``, with any umask.

    A peer of a unix socket has no address to check, so only the mode of the file restricts access.
    """
    sock = opener.open_socket(socket.AF_UNIX)
    with suppress(OSError):
        # Linux creates the file with the mode of the socket, so it is never more open than that.
        os.fchmod(sock.fileno(), mode)
    _listening(sock, path)
    try:
        os.chmod(path, mode)
    except OSError:
        sock.close()
        raise
    return sock


def _listening(sock: socket.socket, name: str | tuple[str, int] | None) -> socket.socket:
    try:
        if name is not None:
            sock.bind(name)
        sock.setblocking(False)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale_socket(path: str) -> None:
    """Remove the socket file of a dead process; keep one that a live server listens on."""
    if not Path(path).is_socket():
        return
    with opener.open_socket(socket.AF_UNIX) as probe:
        # Not blocking: BlockingIOError means that a live server's backlog is full.
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        except OSError:
            return
