"""A connected socket, plain or TLS, that tries first and waits only if necessary.

Trio's streams run the scheduler on every send and receive. A request on a kept connection needs
only one wait, for the answer, because its send goes into the socket's buffer. So the socket is used
directly, non-blocking, and Trio only waits until it is ready.
"""

import socket
import ssl
from collections.abc import Awaitable, Callable

import trio

from ..base import opener
from .messages import (
    ConnectFailedError,
    ConnectTimedOutError,
    Origin,
    ReadFailedError,
    ReadTimedOutError,
    WriteFailedError,
    WriteTimedOutError,
)

#: The most bytes of one TLS write: OpenSSL requires that a write that had to wait is repeated with
#: the same bytes.
MAX_SEND_BYTES = 64 * 1024

#: A function that connects to a host and port, or raises ``OSError``.
Dial = Callable[[str, int], Awaitable[trio.SocketStream]]

_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class BufferedSocket:
    """A connected, non-blocking socket; one task may receive while another sends.

    Nothing here is shielded: a cancelled send may have sent a part, and the socket must then be
    closed.
    """

    __slots__ = ("_sock", "_tls")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None

    @property
    def protocol(self) -> str | None:
        """Return the protocol that TLS negotiated: ``h2``, ``http/1.1``, or None."""
        return None if self._tls is None else self._tls.selected_alpn_protocol()

    def send_now(self, data: bytes | memoryview) -> int:
        """Send as much as possible without waiting; return the number of bytes, maybe 0.

        Raises:
            WriteFailedError: the connection has ended.
        """
        try:
            return self._sock.send(data)
        except _NOT_YET:
            return 0
        except OSError as error:
            raise WriteFailedError(_text(error)) from error

    async def send_all(self, data: bytes, limit: float | None = None) -> None:
        """Send all of ``data`` within ``limit`` seconds; checkpoints only if it has to wait.

        Raises:
            WriteFailedError: the connection has ended.
            WriteTimedOutError: the peer took too long.
        """
        if limit is not None:
            with trio.move_on_after(limit) as scope:
                await self.send_all(data)
            if scope.cancelled_caught:
                raise WriteTimedOutError(f"the server took no bytes for {limit:g} s")
            return
        view = memoryview(data)
        while view:
            sent = self.send_now(view[:MAX_SEND_BYTES])
            view = view[sent:]
            if not sent:
                try:
                    await trio.lowlevel.wait_writable(self._sock)
                except trio.ClosedResourceError as error:
                    raise WriteFailedError("the connection was closed") from error

    async def receive(self, max_bytes: int, limit: float | None = None) -> bytes:
        """Return the next bytes, ``b""`` if the server closed; always a checkpoint.

        Raises:
            ReadFailedError: the connection has ended otherwise.
            ReadTimedOutError: nothing arrived for ``limit`` seconds.
        """
        # The client's calls have the attempt's deadline and no limit here, so the common case
        # creates no scope; httpx users who set ``timeout`` get one.
        if limit is not None:
            with trio.move_on_after(limit):
                return await self.receive(max_bytes)
            raise ReadTimedOutError(f"the server sent nothing for {limit:g} s")
        # Bytes that OpenSSL has already decrypted do not make the socket readable.
        if self._tls is not None and self._tls.pending():
            await trio.lowlevel.checkpoint()
            return self._tls.recv(max_bytes)
        while True:
            try:
                await trio.lowlevel.wait_readable(self._sock)
                return self._sock.recv(max_bytes)
            except _NOT_YET:
                continue  # a TLS record without data, such as a session ticket
            except trio.ClosedResourceError as error:
                raise ReadFailedError("the connection was closed") from error
            except OSError as error:
                raise ReadFailedError(_text(error)) from error

    def is_quiet(self) -> bool:
        """Return whether the connection is open with nothing to read, as an unused one must be.

        Bytes without a request are a close notice (408, a TLS alert) or belong to another exchange.
        """
        try:
            self._sock.recv(1)
        except _NOT_YET:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close at once, without TLS's close_notify; idempotent.

        HTTP marks the end of a message itself, so close_notify would only cost another wait.
        """
        if self._sock.fileno() >= 0:
            # Wakes tasks waiting for the socket with ClosedResourceError; the kernel would leave
            # them waiting.
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()


async def open_wire(
    origin: Origin,
    *,
    context: ssl.SSLContext | None,
    protocols: list[str],
    limit: float,
    dial: Dial = opener.dial_tcp,
) -> BufferedSocket:
    """Connect to ``origin`` and, if there is a ``context``, do the TLS handshake.

    Args:
        origin: the server.
        context: the TLS context; None for a plain connection.
        protocols: offered by ALPN, most preferred first. Set on ``context`` each time, so
            transports can share a context.
        limit: seconds for connecting and the handshake.
        dial: makes the TCP connection; it may choose among the addresses of a name.

    Raises:
        ConnectFailedError: no address answered, or TLS failed; nothing was sent.
        ConnectTimedOutError: it took longer than ``limit``.

    Cancellation closes everything opened so far.
    """
    try:
        with trio.fail_after(limit):
            stream = await dial(origin.host, origin.port)
            # Trio connects, racing the addresses; from here on the socket is used directly.
            sock = socket.socket(fileno=stream.socket.detach())
            try:
                sock.setblocking(False)
                if context is not None:
                    # Of a connection that was reset, `wrap_socket` of Python 3.11 leaves its own
                    # socket open, until the error is collected.
                    sock.getpeername()
                    context.set_alpn_protocols(protocols)
                    sock = context.wrap_socket(
                        sock,
                        # certificates hold no zone of an IPv6 address
                        server_hostname=origin.host.partition("%")[0],
                        do_handshake_on_connect=False,
                    )
                    await _shake_hands(sock)
            except BaseException:
                BufferedSocket(sock).close()
                raise
            return BufferedSocket(sock)
    except trio.TooSlowError as error:
        raise ConnectTimedOutError(f"{origin} did not answer within {limit:g} s") from error
    except (OSError, ValueError) as error:  # ValueError: an invalid host name (idna)
        raise ConnectFailedError(f"cannot connect to {origin}: {_text(error)}") from error


async def _shake_hands(sock: ssl.SSLSocket) -> None:
    while True:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            await trio.lowlevel.wait_readable(sock)
        except ssl.SSLWantWriteError:
            await trio.lowlevel.wait_writable(sock)
        else:
            return


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
