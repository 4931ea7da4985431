"""Asks a server of this machine one thing over HTTP/1.1, on a connection of its own.

The replicator answers on a unix socket and on a loopback port, a few times a minute: a pool of
connections, redirects and the like would only be in the way, and load httpx at every start.
"""

from collections.abc import Awaitable, Callable

import attrs
import h11
import trio

from ..errors import ReplicatorError

#: Largest piece that is read at once, in bytes.
_PIECE_BYTES = 65_536


@attrs.frozen
class LocalAnswer:
    """A whole answer: its status, and its body."""

    status: int
    body: bytes


async def ask_local(
    connect: Callable[[], Awaitable[trio.abc.Stream]],
    target: str,
    *,
    body: bytes | None = None,
    seconds: float,
    max_bytes: int,
    where: str,
) -> LocalAnswer:
    """Ask for ``target`` and return the answer, whatever its status.

    Args:
        connect: opens the connection.
        target: the path of the request.
        body: JSON to post; None: the request is a GET.
        seconds: how long all of it may take.
        max_bytes: how long the answer's body may be.
        where: the server's address, for messages.

    Raises:
        ReplicatorError: nobody listens there, no whole answer came in time, or it is too long.

    Cancelled, it closes the connection.
    """
    try:
        with trio.fail_after(seconds):
            return await _ask(await connect(), target, body, max_bytes)
    except trio.TooSlowError:
        reason = f"no answer within {seconds:g} s"
    except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError, _TooLongError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    raise ReplicatorError(f"the replicator at {where} cannot be asked: {reason}")


class _TooLongError(Exception):
    """The body goes on after its bound."""


async def _ask(
    stream: trio.abc.Stream, target: str, body: bytes | None, max_bytes: int
) -> LocalAnswer:
    connection = h11.Connection(h11.CLIENT)
    headers = [("host", "localhost"), ("connection", "close")]
    if body is not None:
        headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
    request = h11.Request(method="GET" if body is None else "POST", target=target, headers=headers)
    async with stream:
        parts = [connection.send(request)]
        if body is not None:
            parts.append(connection.send(h11.Data(data=body)))
        parts.append(connection.send(h11.EndOfMessage()))
        await stream.send_all(b"".join(part or b"" for part in parts))
        status, found = 0, bytearray()
        while True:  # noqa: ASYNC913 - each round reads, or uses up what was read
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await stream.receive_some(_PIECE_BYTES)))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                found += event.data
                if len(found) > max_bytes:
                    raise _TooLongError(f"its answer is longer than {max_bytes} bytes")
            elif isinstance(event, h11.EndOfMessage):
                return LocalAnswer(status, bytes(found))
            elif isinstance(event, h11.ConnectionClosed):
                raise h11.RemoteProtocolError("the connection ended before the answer")
