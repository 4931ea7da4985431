"""Connections to public addresses only, for URLs that a customer may have chosen.

Otherwise a webhook URL could make this process send requests inside the operator's network (SSRF).
"""

import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence

import trio

from ..config.public_addresses import is_public

#: Time for one address while others are left to try, in seconds.
PATIENCE_SECONDS = 3.0

#: Resolves a host and port to addresses; raises ``OSError`` when it cannot.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class NoPublicAddressError(OSError):
    """A host has no public address."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host in the resolver's order, each once."""
    found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def dial_public(
    host: str,
    port: int,
    *,
    resolve: Resolve = resolve,
    connect: Callable[[str, int], Awaitable[trio.SocketStream]] = trio.open_tcp_stream,
) -> trio.SocketStream:
    """Connect to the first public address of a host that answers.

    The name is resolved once, and the very address that was checked is connected to: a name server
    that gives another address the second time (DNS rebinding) gains nothing. Addresses that are not
    public are skipped, however they are written (``2130706433``, ``::ffff:127.0.0.1``).

    Args:
        resolve: looks names up.
        connect: connects to an address.

    Raises:
        NoPublicAddressError: the host has no public address; nothing was connected to.
        OSError: it cannot be resolved, or no public address answers.
    """
    addresses = await resolve(host, port)
    public = [address for address in addresses if is_public(address)]
    if not public:
        raise NoPublicAddressError(
            f"{host!r} has no address of the public internet"
            if addresses
            else f"{host!r} has no address"
        )
    for address in public[:-1]:
        with trio.move_on_after(PATIENCE_SECONDS), contextlib.suppress(OSError):
            return await connect(address, port)
    return await connect(public[-1], port)
