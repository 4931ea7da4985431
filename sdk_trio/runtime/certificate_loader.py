"""The TLS context of the receiver, from ``Server:CertFile`` and ``Server:KeyFile``."""

import ssl

from ..errors import OptionsValidationError, Problem

#: The cipher suites of TLS 1.2 with forward secrecy: a key that is stolen later does not open the
#: traffic of before. All suites of TLS 1.3 have it.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def load_certificate(cert_file: str, key_file: str | None) -> ssl.SSLContext:
    """Return a context for servers of HTTP/1.1, TLS 1.2 or newer.

    Args:
        cert_file: PEM file with the certificate and those that lead to its authority.
        key_file: PEM file with its key, without a passphrase.

    Raises:
        OptionsValidationError: they cannot be used; the message names both settings.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    # With renegotiation a send could have to wait for a read, which the connection's code does not
    # expect; TLS 1.3 has none. Compression leaks the content of what it compresses (CRIME).
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        # A key with a passphrase is refused, or OpenSSL would ask for it on the terminal.
        context.load_cert_chain(cert_file, key_file, password=b"")
    except OSError as error:  # SSLError is one
        raise OptionsValidationError(
            [
                Problem(
                    "Sdk:Server:CertFile",
                    f"{cert_file} with Sdk:Server:KeyFile {key_file} cannot be used: "
                    f"{error.strerror or error}; both must be PEM, and the key must be the "
                    "certificate's",
                )
            ]
        ) from error
    return context
