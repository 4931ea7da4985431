"""A TLS connection with the surface of a plain, non-blocking socket.

OpenSSL works on the descriptor itself, so a request costs what it costs without TLS, and the
cipher. What TLS wants for itself, such as the rest of a record, is told as "not now".
"""

import socket
import ssl
from contextlib import suppress

import trio

#: How long a client may take for the handshake, in seconds.
HANDSHAKE_SECONDS = 10.0


class TlsSocket:
    """The server's side of one connection; see :class:`~.fast_path.Connection` for its use.

    Args:
        sock: an accepted, non-blocking socket, which belongs to this object from then on.
        context: a server's context that refuses renegotiation: otherwise sending could wait for
            reading.

    Raises:
        OSError: the client has gone already; ``sock`` is closed.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._tls = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def fileno(self) -> int:
        """Return the descriptor to wait for, -1 when it is closed."""
        return self._tls.fileno()

    async def handshake(self) -> None:
        """Agree on keys, within :data:`HANDSHAKE_SECONDS`.

        Raises:
            OSError: the client speaks no TLS, none that we accept, or has left.
            trio.TooSlowError: it took too long.
            trio.ClosedResourceError: the server ends.
        """
        with trio.fail_after(HANDSHAKE_SECONDS):
            await trio.lowlevel.checkpoint()
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await trio.lowlevel.wait_readable(self._tls)
                except ssl.SSLWantWriteError:
                    await trio.lowlevel.wait_writable(self._tls)
                else:
                    return

    @property
    def protocol(self) -> str | None:
        """What the handshake has agreed on, as ALPN names it; None: nothing."""
        return self._tls.selected_alpn_protocol()

    def pending(self) -> int:
        """Return how many bytes can be received although the descriptor may not be readable."""
        return self._tls.pending()

    def recv(self, size: int) -> bytes:
        """Return at most ``size`` bytes; none at the end, announced or not.

        HTTP has its own ends: a body that is cut short is noticed there.

        Raises:
            BlockingIOError: a whole record has not arrived.
            OSError: the connection is broken.
        """
        try:
            return self._tls.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: bytes | memoryview) -> int:
        """Send what fits and return its size; the same bytes must follow after an error.

        Raises:
            BlockingIOError: nothing fits at present.
            OSError: the connection is broken.
        """
        try:
            return self._tls.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        """Announce the end; what arrives after that is received as it is, to be thrown away."""
        self._say_goodbye()
        self._tls.shutdown(how)

    def close(self) -> None:
        """Announce the end if that is possible without waiting, and close."""
        self._say_goodbye()
        self._tls.close()

    def _say_goodbye(self) -> None:
        # It sends our alert and then wants to wait for the client's, for which there is no need.
        with suppress(OSError, ValueError):
            self._tls.unwrap()
