"""From bytes to an event: the envelope first, then ``data`` by its type's class (spec 4.1, 6).

Pure. The sender's document is read once, in two compiled steps; whatever does not fit its class
is read again field by field. A verified body that is no event raises DeliveryDecodingError and
nothing else; an event whose payload does not fit is *drift*, which is reported and dispatched all
the same (contracts 3).
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import attrs
import msgspec

from ..errors import DeliveryDecodingError
from .catalog import DEFAULT_CATALOG, Catalog
from .event import Event, UnknownEvent
from .fitting import fit, identifier_in
from .payloads import Payload, Time, keep_raw
from .values import UNFIT, decoder_for

#: Arrays and objects within each other. Real payloads nest 6 deep; the interpreter's own limit
#: depends on its version and on how deep the caller stands.
MAX_DEPTH = 256

#: Characters of one number. CPython refuses to make an integer out of more digits.
MAX_NUMBER_LENGTH = 4300

#: Reports of one event; a hostile list could otherwise make one per element.
MAX_DRIFTS = 32

_DIGIT_BLOCK = 2048
_LONG_NUMBER = re.compile(rb"[-+.eE0-9]{%d}" % (MAX_NUMBER_LENGTH + 1))
_BRACKETS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_NOT_OPENING = bytes(set(range(256)) - set(b"[{"))


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """What every delivery has in common. A Struct, since it is made once a delivery.

    ``timestamp`` is None when it is absent or no RFC 3339 time with an offset. ``data_raw`` is
    the undecoded ``data``, empty when absent.
    """

    type: str
    timestamp: Time | None = None
    data_raw: msgspec.Raw = msgspec.field(name="data", default_factory=msgspec.Raw)


class _EnvelopeOfAnyTime(msgspec.Struct, frozen=True, gc=False):
    """The envelope of a document whose ``timestamp`` does not fit."""

    type: str
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


@attrs.frozen
class Drift:
    """One value that does not fit the class of its event's data.

    ``type`` is the wire type, ``path`` where the value stands (``data.items[2].amount``),
    ``message`` what is wrong with it, without content of the body.
    """

    type: str
    path: str
    message: str


def decode_envelope(raw: bytes) -> Envelope:
    """Return the envelope of a verified body.

    Args:
        raw: the exact body; any bytes at all.

    Raises:
        DeliveryDecodingError: the body is no UTF-8 JSON object with a string ``type``, nests
            deeper than 256, or holds a number of more than 4300 characters. The message is for
            the local log; no other exception is raised.
    """
    try:
        if not raw.isascii():
            raw.decode()  # the decoder skips over the text of members it was not asked for
        _check_limits(raw)
        try:
            envelope: Envelope = decoder_for(Envelope).decode(raw)
        except msgspec.ValidationError:
            lenient = decoder_for(_EnvelopeOfAnyTime).decode(raw)
            envelope = Envelope(lenient.type, None, lenient.data)
    except DeliveryDecodingError:
        raise
    except Exception as error:
        # Any kind: bytes of a sender must never end in an answer that tells checks apart. The
        # cause is dropped because some exceptions hold the body.
        raise DeliveryDecodingError(f"the body is no event: {error}") from None
    return envelope


def _check_limits(raw: bytes) -> None:
    """Refuse what could not be decoded later on; two cheap looks clear an ordinary body."""
    # One pass for both, where count() needs two.
    may_nest = len(raw.translate(None, _NOT_OPENING)) > MAX_DEPTH
    # A run of n digits covers at least one whole block when n >= 2 * block - 1.
    may_be_long = len(raw) > MAX_NUMBER_LENGTH and any(
        raw[start : start + _DIGIT_BLOCK].isdigit() for start in range(0, len(raw), _DIGIT_BLOCK)
    )
    if not (may_nest or may_be_long):
        return
    syntax = _outside_strings(raw)
    if _LONG_NUMBER.search(syntax):
        raise DeliveryDecodingError(
            f"the body is no event: a number of more than {MAX_NUMBER_LENGTH} characters"
        )
    depth = 0
    for bracket in syntax.translate(None, _NO_BRACKETS):
        depth += _BRACKETS[bracket]
        if depth > MAX_DEPTH:
            raise DeliveryDecodingError(f"the body is no event: nested deeper than {MAX_DEPTH}")


def _outside_strings(raw: bytes) -> bytes:
    """Return ``raw`` without its strings. In JSON a backslash stands in strings only."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b" ".join(unescaped.split(b'"')[::2])


def decode_event(
    envelope: Envelope,
    *,
    webhook_id: str,
    raw: bytes,
    header_timestamp: float,
    received_at: float,
    attempt: int = 1,
    catalog: Catalog = DEFAULT_CATALOG,
    on_drift: Callable[[Drift], None] | None = None,
    tenant: Any = None,
) -> Event[Any]:
    """Return the typed event; never raises for what a sender can send (contracts 3, 4).

    Args:
        envelope: of :func:`decode_envelope` for the same ``raw``.
        webhook_id: the ``webhook-id`` header.
        raw: the exact body, kept as it is.
        header_timestamp: the signed header, in Unix seconds; stands in for an unfit ``timestamp``.
        received_at: in Unix seconds.
        attempt: from 1.
        catalog: the classes of types; a type that is not in it becomes an :class:`UnknownEvent`.
        on_drift: called at most 32 times, once for each value that does not fit.
        tenant: whom the event belongs to, or None.
    """
    drifts = 0

    def report(path: str, message: str) -> None:
        nonlocal drifts
        drifts += 1
        if on_drift is not None and drifts <= MAX_DRIFTS:
            on_drift(Drift(envelope.type, path, message))

    row = catalog.by_type(envelope.type)
    if row is None:
        event_class: type[Event[Any]] = UnknownEvent
        data = _decode_data(Payload, envelope.data_raw, report)
    else:
        event_class = row.event_class
        data = _decode_data(row.data_class, envelope.data_raw, report)
    timestamp = envelope.timestamp
    if timestamp is None:
        report("timestamp", "absent, or no RFC 3339 time with an offset; the header's is used")
        timestamp = _moment(header_timestamp)
    return event_class(
        webhook_id=webhook_id,
        type=envelope.type,
        timestamp=timestamp,
        data=data,
        raw=raw,
        attempt=attempt,
        received_at=_moment(received_at),
        tenant=tenant,
    )


def _decode_data(
    data_class: type[Any], data_raw: msgspec.Raw, report: Callable[[str, str], None]
) -> Any:
    try:
        data = decoder_for(data_class).decode(data_raw)
    except Exception:  # a type of the application may raise anything
        data = fit(data_class, data_raw, "data", report)
        if data is None:
            data = Payload()
        fits = False
    else:
        fits = True
    if isinstance(data, Payload):
        keep_raw(data, data_raw)
        if fits and not data.id:
            report("data.id", "absent or empty")
    return data


def _moment(seconds: float) -> datetime:
    """Return Unix seconds as an aware time; a number beyond the calendar becomes its end."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.max.replace(tzinfo=UTC)


class _Organization(msgspec.Struct, frozen=True, gc=False):
    organization_id: str | None = None


def organization_of(envelope: Envelope) -> str | None:
    """Return ``data.organization_id`` without decoding the rest; None when it is no text.

    Safe for a body that is not verified yet: the envelope has bounded its depth and its numbers.
    """
    try:
        found: _Organization = decoder_for(_Organization).decode(envelope.data_raw)
    except UNFIT:
        return None
    return found.organization_id


class _Subject(msgspec.Struct, frozen=True, gc=False):
    id: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


def subject_of(envelope: Envelope) -> str | None:
    """Return ``data.id`` without decoding the rest; a number as text, None when there is none."""
    try:
        subject: _Subject = decoder_for(_Subject).decode(envelope.data_raw)
    except UNFIT:
        return None
    return identifier_in(subject.id) or None
