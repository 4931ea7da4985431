"""TLS of the server: the context from a certificate, and a non-blocking socket that uses it.

The socket has the interface of a plain one. OpenSSL works on the descriptor itself, without buffers
in between, so TLS costs a request only the encryption. A read or write that needs more TLS data,
such as the rest of a record, raises BlockingIOError.
"""

import socket
import ssl
from contextlib import suppress
from typing import Any, Final

import trio

from ..base.times import readable
from ..errors import OptionsValidationError, Problem

#: Time for the handshake, in seconds; an idle connection may not keep its slot longer.
HANDSHAKE_SECONDS = 10.0

#: X509_V_FLAG_NO_CHECK_TIME of OpenSSL, for which the standard library has no name.
_NO_CHECK_TIME = 0x200000

#: More rounds of messages than any handshake needs.
_ROUNDS = 10

#: The cipher suites of TLS 1.2 with forward secrecy: a stolen key does not decrypt earlier traffic.
#: All suites of TLS 1.3 have it.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


class TlsSocket:
    """The server's side of one connection; see :class:`Http1ServerConnection` for its use.

    Args:
        sock: an accepted, non-blocking socket, which belongs to this object from then on.
        context: a server's context that refuses renegotiation, in which a send may have to wait for
            a read.

    Raises:
        OSError: the client has left already; ``sock`` is closed.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        try:
            # Of a connection that was reset, `wrap_socket` of Python 3.11 leaves its own socket
            # open, until the error is collected.
            sock.getpeername()
        except OSError:
            sock.close()
            raise
        self._tls = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def fileno(self) -> int:
        """Return the descriptor to wait for, -1 when it is closed."""
        return self._tls.fileno()

    async def handshake(self) -> None:
        """Agree on keys, within :data:`HANDSHAKE_SECONDS`.

        Raises:
            OSError: the client speaks no TLS or no accepted version of it, or has left.
            trio.TooSlowError: it took too long.
            trio.ClosedResourceError: the server stops.
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
        """The protocol that the handshake agreed on, by its ALPN name; None: none."""
        return self._tls.selected_alpn_protocol()

    def pending(self) -> int:
        """Return how many bytes can be received although the descriptor may not be readable."""
        return self._tls.pending()

    def recv(self, size: int) -> bytes:
        """Return at most ``size`` bytes; none at the end of the stream, with or without an alert.

        A missing closing alert is not an error: HTTP itself detects a truncated body.

        Raises:
            BlockingIOError: a whole record has not arrived.
            OSError: the connection is broken.
        """
        try:
            return self._tls.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: bytes | memoryview) -> int:
        """Send as many bytes as fit and return their number; after an error, send the same bytes.

        Raises:
            BlockingIOError: nothing fits now.
            OSError: the connection is broken.
        """
        try:
            return self._tls.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def getsockname(self) -> Any:
        """Return the socket's own address."""
        return self._tls.getsockname()

    def shutdown(self, how: int) -> None:
        """Send the closing alert and half-close; later bytes are read undecrypted and discarded."""
        self._send_closing_alert()
        self._tls.shutdown(how)

    def close(self) -> None:
        """Send the closing alert if that does not block, and close."""
        self._send_closing_alert()
        self._tls.close()

    def _send_closing_alert(self) -> None:
        # unwrap() sends the alert and then raises because the client's has not arrived. RFC 8446,
        # 6.1, lets us close without it.
        with suppress(OSError, ValueError):
            self._tls.unwrap()


def load_certificate(cert_file: str, key_file: str | None) -> ssl.SSLContext:
    """Return a context for servers of HTTP/1.1, TLS 1.2 or newer.

    Args:
        cert_file: PEM file with the certificate and its intermediate certificates.
        key_file: PEM file with its key, without a passphrase.

    Raises:
        OptionsValidationError: the files cannot be used; the message names both settings.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    # In a renegotiation a send may have to wait for a read, which the connection's code does not
    # expect. TLS 1.3 has none. Compression leaks the content of the plain text (CRIME).
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        # The empty password: otherwise OpenSSL would ask for a passphrase on the terminal.
        context.load_cert_chain(cert_file, key_file, password=b"")
    except OSError as error:  # SSLError is one
        raise OptionsValidationError(
            [
                Problem(
                    "Sdk:Server:CertFile",
                    f"{cert_file} with Sdk:Server:KeyFile {key_file} cannot be used: "
                    f"{error.strerror or error}; both must be PEM, and the key must match the "
                    "certificate",
                )
            ]
        ) from error
    return context


#: A certificate that expires within so many seconds causes a warning: seven days.
URGENT_EXPIRY_SECONDS: Final = 7 * 86_400.0

#: The advice about a certificate that expires.
RENEW: Final = "renew it and replace the file; the receiver reloads it automatically"


def validity_fault(dates: tuple[float, float] | None, now: float) -> str | None:
    """Return the problem of a certificate and the advice; None if it is valid long enough. Pure.

    Args:
        dates: the result of :func:`validity`.
        now: Unix seconds.
    """
    if dates is None:
        return None
    begin, end = dates
    if now < begin:
        return f"is not valid before {readable(begin)}, so no sender delivers: check the clock"
    if now > end:
        return f"has expired ({readable(end)}), so no sender delivers: {RENEW}"
    if end - now < URGENT_EXPIRY_SECONDS:
        return f"expires at {readable(end)}: {RENEW}"
    return None


def validity(context: ssl.SSLContext, cert_file: str) -> tuple[float, float] | None:
    """Return the validity period of a server's certificate, in Unix seconds; None: unknown.

    The dates come from a handshake in memory with a client that trusts this certificate. The
    standard library shows them only to such a client, and no dependency reads certificates.

    Args:
        context: the result of :func:`load_certificate` for ``cert_file``.
        cert_file: PEM file with the certificate.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    # The certificate itself is the trust anchor, because its issuer is unknown here. An expired
    # certificate has dates as well.
    flags = ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    client.verify_flags = ssl.VerifyFlags(flags)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_side = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        client.load_verify_locations(cert_file)
        client_side = client.wrap_bio(to_client, to_server)
        for _ in range(_ROUNDS):
            # The sides read each other's messages alternately until the handshake is complete.
            for side in (client_side, server_side):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        found = client_side.getpeercert()
    except (OSError, ValueError):  # SSLError is an OSError; ValueError: the handshake failed
        return None
    if not found:
        return None
    begin, end = str(found["notBefore"]), str(found["notAfter"])
    return ssl.cert_time_to_seconds(begin), ssl.cert_time_to_seconds(end)
