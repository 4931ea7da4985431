"""The verdict on a delivery: authentic, or rejected with a cause. Pure.

The cause and the detail of a rejection are for the operator's log and for the ``verify`` command;
the sender gets the same opaque answer for all of them.
"""

import enum
from collections.abc import Sequence
from typing import Final

import msgspec

from ..base.http import Headers
from ..config import KeyDerivation
from ..errors import VerificationError
from .signature import (
    MAX_ID_BYTES,
    MAX_TIMESTAMP_DIGITS,
    Keyring,
    SignatureEntry,
    is_valid_id,
    is_valid_timestamp,
    parse_signature_header,
)

ID_HEADER: Final = b"webhook-id"
TIMESTAMP_HEADER: Final = b"webhook-timestamp"
SIGNATURE_HEADER: Final = b"webhook-signature"
_REQUIRED: Final = frozenset({ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER})
_REQUIRED_LENGTHS: Final = frozenset(map(len, _REQUIRED))


class Cause(enum.StrEnum):
    """The causes of a rejection: one word each for logs and metrics, a closed set."""

    MISSING_HEADER = "missing_header"
    REPEATED_HEADER = "repeated_header"
    BAD_ID = "bad_id"
    BAD_TIMESTAMP = "bad_timestamp"
    TOO_OLD = "too_old"
    TOO_NEW = "too_new"
    BAD_SIGNATURE_HEADER = "bad_signature_header"
    NO_MATCH = "no_match"
    NOT_AN_EVENT = "not_an_event"


# msgspec Structs, because each is created for every delivery and they are cheap to create.
class Delivery(msgspec.Struct, frozen=True, gc=False):
    """A delivery as it arrived: the headers as ASGI gives them, the exact body, and the time.

    ``headers`` are pairs of name and value in the order of arrival, repeated ones included.
    ``received_at`` is in Unix seconds, by the same clock as the senders' timestamps. ``signed`` are
    the values of the three signed headers if each was certainly sent once; None: they are read from
    ``headers``.
    """

    headers: Headers
    raw: bytes
    received_at: float
    signed: tuple[bytes, bytes, bytes] | None = None

    def __repr__(self) -> str:
        return f"Delivery(received_at={self.received_at!r})"


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """An authentic delivery.

    ``timestamp`` is the signed one, in Unix seconds. ``secret_index`` is the position, in the
    configured order, of the secret that matched; ``derivation`` says how it became the key (None
    for ed25519).
    """

    webhook_id: str
    timestamp: int
    secret_index: int
    derivation: KeyDerivation | None


class Rejected(msgspec.Struct, frozen=True, gc=False):
    """A delivery that must not be trusted.

    ``detail`` is a sentence for the operator; it quotes nothing from the delivery, so that
    strangers cannot write into logs.
    """

    cause: Cause
    detail: str


def verify_delivery(
    delivery: Delivery, keyring: Keyring, *, tolerance_seconds: int
) -> Accepted | Rejected:
    """Decide whether a delivery is authentic and recent.

    The cheap checks come first: the headers are read, the timestamp is checked, then the signature
    is compared. Header names are case-insensitive; ``svix-id``, ``webhook_id`` and the like are
    other headers and change nothing. It never raises, whatever the headers and the body contain.

    Args:
        delivery: the delivery as it arrived.
        keyring: the keys of the configured secrets.
        tolerance_seconds: ``Sdk:Webhooks:ToleranceSeconds``; a difference of exactly that many
            whole seconds, either way, still passes.
    """
    found = _signed_headers(delivery.headers) if delivery.signed is None else delivery.signed
    if isinstance(found, Rejected):
        return found
    webhook_id, timestamp, signature = found
    if not is_valid_id(webhook_id):
        return _BAD_ID
    if not is_valid_timestamp(timestamp):
        return _bad_timestamp(timestamp)
    seconds = int(timestamp)
    # Both sides are whole seconds, as timestamps have no fraction: a difference of exactly the
    # tolerance passes. The chained comparison is false for NaN, so such a clock rejects.
    age = delivery.received_at // 1 - seconds
    if not -tolerance_seconds <= age <= tolerance_seconds:
        return outside_tolerance(age, tolerance_seconds)
    try:
        entries = parse_signature_header(signature)
    except VerificationError as error:
        return Rejected(Cause.BAD_SIGNATURE_HEADER, f"{error.detail}.")
    match = keyring.match(webhook_id, timestamp, delivery.raw, entries)
    if match is None:
        return _no_match(entries, keyring)
    return Accepted(webhook_id.decode("ascii"), seconds, match.index, match.derivation)


def signed_positions(headers: Headers) -> tuple[int, int, int] | None:
    """Return the positions of id, timestamp and signature; None unless each was sent exactly once.

    Names are in lower case.
    """
    names = [name for name, _ in headers]
    if any(names.count(name) != 1 for name in _REQUIRED):
        return None
    return names.index(ID_HEADER), names.index(TIMESTAMP_HEADER), names.index(SIGNATURE_HEADER)


def _signed_headers(headers: Headers) -> tuple[bytes, bytes, bytes] | Rejected:
    """Return the values of id, timestamp and signature."""
    webhook_id: bytes | None = None
    timestamp: bytes | None = None
    signature: bytes | None = None
    more_signatures: list[bytes] = []
    for name, value in headers:
        # The length is compared first, so that most headers need no lower-case copy of their name.
        if len(name) not in _REQUIRED_LENGTHS or (name := name.lower()) not in _REQUIRED:
            continue
        # A repeated signature header is a longer list of entries. A repeated id or timestamp is
        # refused: another program in between might use the other one.
        if name == SIGNATURE_HEADER:
            if signature is None:
                signature = value
            else:
                more_signatures.append(value)
        elif name == ID_HEADER:
            if webhook_id is not None:
                return _REPEATED_ID
            webhook_id = value
        else:
            if timestamp is not None:
                return _REPEATED_TIMESTAMP
            timestamp = value
    if webhook_id is None or timestamp is None or signature is None:
        return _missing_header(headers)
    if more_signatures:
        signature = b" ".join((signature, *more_signatures))
    return webhook_id, timestamp, signature


_REPEATED_ID: Final = Rejected(
    Cause.REPEATED_HEADER,
    "webhook-id was sent more than once: a proxy that adds headers, or an attempt to confuse.",
)
_REPEATED_TIMESTAMP: Final = Rejected(
    Cause.REPEATED_HEADER,
    "webhook-timestamp was sent more than once: a proxy that adds headers, or an attempt to "
    "confuse.",
)
_BAD_ID: Final = Rejected(
    Cause.BAD_ID,
    f"webhook-id must be 1 to {MAX_ID_BYTES} visible ASCII characters without a dot.",
)


def _missing_header(headers: Headers) -> Rejected:
    names = {name.lower() for name, _ in headers}
    missing = [
        name for name in (ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER) if name not in names
    ]
    detail = f"{b', '.join(missing).decode('ascii')} missing"
    if any(name.replace(b"webhook-", b"svix-") in names for name in missing):
        detail += ": svix-* headers are not read, have the sender use webhook-* ones"
    elif any(name.replace(b"-", b"_") in names for name in missing):
        detail += (
            ": it was sent with an underscore, which is another name; find the program that "
            "renames it"
        )
    else:
        detail += ": not a signed webhook, or a proxy drops the header"
    return Rejected(Cause.MISSING_HEADER, f"{detail}.")


def _bad_timestamp(timestamp: bytes) -> Rejected:
    detail = f"webhook-timestamp must be Unix seconds: 1 to {MAX_TIMESTAMP_DIGITS} digits"
    if timestamp.isdigit() and len(timestamp) == MAX_TIMESTAMP_DIGITS + 1:
        detail += "; it looks like milliseconds"
    return Rejected(Cause.BAD_TIMESTAMP, f"{detail}.")


def outside_tolerance(age: float, tolerance_seconds: int) -> Rejected:
    """Return the rejection of a timestamp of this age, in seconds; negative: it is ahead."""
    # An age that is not a number counts as old.
    cause, side, reason = (
        (Cause.TOO_NEW, "ahead of", "one of the two clocks is wrong")
        if age < 0
        else (Cause.TOO_OLD, "behind", "it was delayed, replayed, or a clock is wrong")
    )
    return Rejected(
        cause,
        f"webhook-timestamp is {abs(age):.0f} s {side} this machine's clock, and "
        f"{tolerance_seconds} s are tolerated: {reason}.",
    )


def _no_match(entries: Sequence[SignatureEntry], keyring: Keyring) -> Rejected:
    if not entries:
        return Rejected(
            Cause.BAD_SIGNATURE_HEADER,
            "webhook-signature holds no well-formed v1 or v1a entry "
            "(v1, a comma, base64 of 32 bytes).",
        )
    offered = {entry.version for entry in entries}
    if not offered & keyring.versions:
        kind, prefix = ("ed25519 (v1a)", "whpk_") if b"v1a" in offered else ("HMAC (v1)", "whsec_")
        return Rejected(
            Cause.NO_MATCH,
            f"the signature is an {kind} one, and no {prefix} secret is configured.",
        )
    return Rejected(
        Cause.NO_MATCH,
        "signature made with another secret, or the body was changed in transit: a proxy that "
        "re-encodes JSON does that.",
    )
