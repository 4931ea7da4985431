"""The end of a certificate's validity, found by a TLS handshake in memory.

The standard library shows a certificate's dates only to a client that has verified it, and the
package has no dependency that reads certificates.
"""

import ssl
from contextlib import suppress

from ..runtime.certificate_loader import load_certificate

#: OpenSSL's error codes for a certificate outside of its time (X509_V_ERR_...).
_NOT_YET_VALID = 9
_EXPIRED = 10

#: The most rounds of messages in a handshake, with room to spare.
_ROUNDS = 10


class OutsideItsTimeError(Exception):
    """The certificate has expired, or is not valid yet; the message says which."""


def valid_until(cert_file: str, key_file: str) -> float | None:
    """Return when the certificate of a receiver ends, in Unix seconds; None if it cannot be told.

    The function is both server and client of the handshake; the client trusts this certificate.

    Raises:
        OptionsValidationError: the certificate or its key cannot be used.
        OutsideItsTimeError: it is not valid now.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_side = load_certificate(cert_file, key_file).wrap_bio(
        to_server, to_client, server_side=True
    )
    try:
        client.load_verify_locations(cert_file)
        client_side = client.wrap_bio(to_client, to_server)
        for _ in range(_ROUNDS):
            for side in (client_side, server_side):
                _go_on(side)
        found = client_side.getpeercert()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
            raise OutsideItsTimeError(error.verify_message) from error
        return None
    except (OSError, ValueError):  # SSLError is an OSError; no handshake came about: ValueError
        return None
    return ssl.cert_time_to_seconds(str(found["notAfter"])) if found else None


def _go_on(side: ssl.SSLObject) -> None:
    with suppress(ssl.SSLWantReadError):
        side.do_handshake()
