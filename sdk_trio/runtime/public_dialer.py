"""Connects to hosts of the public internet alone, decided on the address that is connected to."""

import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence

import trio

from ..config.public_addresses import is_public

#: How long one address may take while others are left, in seconds.
PATIENCE_SECONDS = 3.0

#: Resolves a host and port to addresses; raises ``OSError`` when it cannot.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class NoPublicAddressError(OSError):
    """A host has addresses, and none of them is of the public internet."""


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

    The name is resolved once and what was checked is connected to, so that a name server which
    gives another address the second time gains nothing. Addresses that are not public are passed
    over, in whatever way they are written (``2130706433``, ``::ffff:127.0.0.1``).

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
