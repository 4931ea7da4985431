"""From bytes to an event: first the envelope, then ``data`` by the class of its type.

Pure. Two compiled steps read the document once. A payload that does not fit its class is read again
field by field; JSON that a strict decoder refuses is repaired first. A verified body that is not an
event raises only DeliveryDecodingError. An event whose payload does not fit is *drift*: it is
reported, and dispatched anyway.

The organization of an event is read from its data, or guessed from an unverified body.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec

from ..errors import DeliveryDecodingError
from .catalog import DEFAULT_CATALOG, Catalog, EventType
from .event import Event, Payload, Time, UnknownEvent, keep_document, keep_raw, make_event
from .values import UNFIT, NotJsonError, decoder_for, fit, identifier_in, legible, members_of

#: Maximum length of a type: the upstream's have up to 30 characters, and each is stored, counted
#: and logged.
MAX_TYPE_LENGTH = 256

#: Reports per event; otherwise a hostile list could cause one per element.
MAX_DRIFTS = 32

_TypeName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TYPE_LENGTH)]


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """The members common to all deliveries. A Struct, since each delivery creates one.

    ``timestamp`` is None if absent or not an RFC 3339 time with an offset, ``api_version`` if
    absent or not text. ``data_raw`` is the undecoded ``data``, empty if absent.
    """

    type: _TypeName
    timestamp: Time | None = None
    api_version: str | None = None
    data_raw: msgspec.Raw = msgspec.field(name="data", default_factory=msgspec.Raw)


class LegibleEnvelope(Envelope, frozen=True, gc=False):
    """The envelope of a body that had to be repaired; ``changes`` lists how.

    ``data_raw`` is part of the repaired text.
    """

    changes: tuple[str, ...] = ()


class _Identified(msgspec.Struct, frozen=True, gc=False):
    id: str = ""


class Outline(msgspec.Struct, frozen=True, gc=False):
    """The members that decide how an event is routed, of a body in plain, valid JSON.

    Reading it takes as long as an :class:`Envelope`, and gives the subject; ``data`` itself is read
    later from the body. In a *document* (see :class:`Documents`), ``data`` is the typed payload.
    """

    type: _TypeName
    timestamp: Time | None = None
    api_version: str | None = None
    data: Any = msgspec.UNSET


class _PlainOutline(Outline, frozen=True, gc=False, kw_only=True):
    data: _Identified


def _build_document_decoder(data_class: type[Any]) -> msgspec.json.Decoder[Any]:
    document = msgspec.defstruct(
        "Document",
        [("data", data_class)],
        bases=(Outline,),
        frozen=True,
        gc=False,
        kw_only=True,
    )
    return msgspec.json.Decoder(document)


#: Returns the compiled decoder of a whole body whose ``data`` has the given class.
_document_decoder_for: Callable[[Any], msgspec.json.Decoder[Any]] = functools.cache(
    _build_document_decoder
)

#: Finds the type where nearly all senders put it: at the start, without escapes.
_opening_type = re.compile(rb'\s*+\{\s*+"type"\s*+:\s*+"([^"\\]{1,256})"').match


class Documents:
    """Decoders of whole bodies, for types whose payload is needed at once.

    Outline and typed payload are then read in one pass instead of two.

    Args:
        rows: their rows of the catalogue. Rows whose class changes ``data.id`` are skipped, because
            the subject is read from it.
    """

    def __init__(self, rows: Iterable[EventType]) -> None:
        self._decoders = {
            row.wire_type.encode(): (row.wire_type, _document_decoder_for(row.data_class))
            for row in rows
            if _reads_id_as_sent(row.data_class)
        }

    def decode(self, raw: bytes) -> Outline | None:
        """Return the document of a UTF-8 body; None if its type or payload does not match."""
        opening = _opening_type(raw)
        wanted = None if opening is None else self._decoders.get(opening[1])
        if wanted is None:
            return None
        try:
            document: Outline = wanted[1].decode(raw)
        except Exception:  # a type of the application may raise anything
            return None
        # If a member is repeated, the last one counts.
        return document if document.type == wanted[0] else None


def _reads_id_as_sent(data_class: type[Any]) -> bool:
    if not issubclass(data_class, Payload) or hasattr(data_class, "__post_init__"):
        return False
    fields = {field.name: field for field in msgspec.structs.fields(data_class)}
    return fields["id"].encode_name == "id" and fields["id"].type is str


class Drift(msgspec.Struct, frozen=True):
    """One value that does not fit the class of its event's data.

    ``type`` is the wire type, ``path`` the location of the value (``data.items[2].amount``),
    ``message`` the fault, without content of the body.
    """

    type: str
    path: str
    message: str


def plain_envelope(raw: bytes) -> Envelope | None:
    """Return the envelope of a body in plain, valid JSON; None if it needs a closer check.

    Takes about a millisecond per megabyte. If it returns None, :func:`decode_envelope` may still
    find an envelope, which takes up to half a second per megabyte.
    """
    try:
        # isascii takes a few microseconds; nearly all bodies are ASCII and need no second check.
        if not raw.isascii():
            raw.decode()  # the decoder skips the text of other members
        envelope: Envelope = decoder_for(Envelope).decode(raw)
    except Exception:
        # Any exception: a sender's bytes must never cause an answer that reveals which check
        # failed.
        return None
    return envelope


def plain_outline(raw: bytes, documents: Documents | None = None) -> Outline | None:
    """Return the outline of a body in plain, valid JSON; None if it needs a closer check.

    ``documents`` are decoders of payloads needed at once. If it returns None, the body may still be
    an event. The result agrees with :func:`plain_envelope` and :func:`subject_of`.
    """
    try:
        if not raw.isascii():
            raw.decode()  # the decoder skips the text of other members
        document = None if documents is None else documents.decode(raw)
        outline: Outline = document or decoder_for(_PlainOutline).decode(raw)
    except Exception:
        # Any exception: a sender's bytes must never cause an answer that reveals which check
        # failed.
        return None
    return outline


def decode_envelope(raw: bytes) -> Envelope:
    """Return the envelope of a verified body.

    Args:
        raw: the exact body; any bytes at all.

    Raises:
        DeliveryDecodingError: the body is not a JSON object in UTF-8, or has no ``type`` that is a
            string of 1 to 256 characters. The message is for the local log. No other exception is
            raised.
    """
    # The tolerant reading is hundreds of times slower, so it runs only if the decoder refuses.
    return plain_envelope(raw) or _decode_tolerantly(raw)


def _decode_tolerantly(raw: bytes) -> Envelope:
    try:
        text, changes = legible(raw)
    except NotJsonError as error:
        raise DeliveryDecodingError(f"the body is not an event: {error}") from None
    members = members_of(text)
    if members is None:
        raise DeliveryDecodingError("the body is not an event: not a JSON object")
    try:
        # Only the type is required: without it the handler is unknown. All other members may be
        # missing.
        event_type = decoder_for(_TypeName).decode(members.get("type", b"null"))
    except UNFIT:
        raise DeliveryDecodingError(
            f"the body is not an event: no type that is a string of 1 to {MAX_TYPE_LENGTH} "
            "characters"
        ) from None
    timestamp: datetime | None = None
    with suppress(*UNFIT):
        timestamp = decoder_for(Time).decode(members.get("timestamp", b"null"))
    api_version: str | None = None
    with suppress(*UNFIT):
        api_version = decoder_for(str).decode(members.get("api_version", b"null"))
    data_raw = members.get("data", msgspec.Raw())
    # The usual class if nothing was changed: readers of `data` need not know how it was read.
    if not changes:
        return Envelope(event_type, timestamp, api_version, data_raw)
    return LegibleEnvelope(event_type, timestamp, api_version, data_raw, changes)


def decode_event(
    envelope: Envelope | Outline,
    *,
    webhook_id: str,
    raw: bytes,
    header_timestamp: float,
    received_at: float,
    attempt: int = 1,
    catalog: Catalog = DEFAULT_CATALOG,
    on_drift: Callable[[Drift], None] | None = None,
    tenant: Any = None,
    key: str | None = None,
    generation: int = 0,
) -> Event[Any]:
    """Return the typed event; never raises because of a sender's input.

    Args:
        envelope: of :func:`decode_envelope` or :func:`plain_outline` for the same ``raw``.
        webhook_id: the ``webhook-id`` header.
        raw: the exact body, stored unchanged.
        header_timestamp: the signed header, in Unix seconds; replaces an invalid ``timestamp``.
        received_at: in Unix seconds.
        attempt: from 1.
        catalog: the classes of types; any other type becomes an :class:`UnknownEvent`.
        on_drift: called at most 32 times, once for each value that does not fit.
        tenant: the tenant that the event belongs to, or None.
        key: the delivery's key; None: ``webhook_id``, as for the host's deliveries.
        generation: how often it was replayed after it was done.
    """
    drifts = 0

    def report(path: str, message: str) -> None:
        nonlocal drifts
        drifts += 1
        if on_drift is not None and drifts <= MAX_DRIFTS:
            on_drift(Drift(envelope.type, path, message))

    if isinstance(envelope, LegibleEnvelope):
        for change in envelope.changes:
            report("", f"JSON that strict decoders refuse: {change}; raw has the original")
    row = catalog.by_type(envelope.type)
    # A type that is new at the upstream is not an error: a fallback handles it, or it is parked.
    event_class: type[Event[Any]] = UnknownEvent if row is None else row.event_class
    data_class = Payload if row is None else row.data_class
    if isinstance(envelope, Outline):
        data = _payload_of(envelope, data_class, raw, report)
    else:
        data = _decode_data(data_class, envelope.data_raw, report)
    timestamp = envelope.timestamp
    if timestamp is None:
        report(
            "timestamp", "absent, or not an RFC 3339 time with an offset; the header's time is used"
        )
        timestamp = moment(header_timestamp)
    return make_event(
        event_class,
        webhook_id,
        envelope.type,
        timestamp,
        data,
        raw,
        attempt,
        moment(received_at),
        tenant,
        envelope.api_version,
        key or webhook_id,
        generation,
    )


def _payload_of(
    outline: Outline, data_class: type[Any], raw: bytes, report: Callable[[str, str], None]
) -> Any:
    data = outline.data
    if isinstance(data, _Identified):
        try:
            data = _document_decoder_for(data_class).decode(raw).data
        except Exception:  # a type of the application may raise anything
            return _decode_data(data_class, decode_envelope(raw).data_raw, report)
    if isinstance(data, Payload):
        keep_document(data, raw)
        if not data.id:
            report("data.id", "absent or empty")
    return data


def _decode_data(
    data_class: type[Any], data_raw: msgspec.Raw, report: Callable[[str, str], None]
) -> Any:
    try:
        data = decoder_for(data_class).decode(data_raw)
    except Exception:  # a type of the application may raise anything
        # Only here: fitting is many times slower than decoding, and rarely needed.
        data = fit(data_class, data_raw, "data", report)
        if data is None:
            data = Payload()
        fits = False
    else:
        fits = True
    if isinstance(data, Payload):
        # The bytes are part of the stored body; fields without an attribute are read from them on
        # demand.
        keep_raw(data, data_raw)
        if fits and not data.id:
            report("data.id", "absent or empty")
    return data


def moment(seconds: float) -> datetime:
    """Return Unix seconds as an aware time; clamped to the calendar's range."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        # An event is not refused for its time: the signature's timestamp was checked before.
        return datetime.max.replace(tzinfo=UTC)


class _Subject(msgspec.Struct, frozen=True, gc=False):
    id: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


def subject_of(envelope: Envelope | Outline) -> str | None:
    """Return ``data.id`` without decoding the rest; a number as text, None if absent."""
    if isinstance(envelope, Outline):
        return envelope.data.id or None
    try:
        subject: _Subject = decoder_for(_Subject).decode(envelope.data_raw)
    except UNFIT:
        return None
    return identifier_in(subject.id) or None


# -- the organization of an event --------------------------------------------------------

#: Paths at which the upstream's records name the organization, in order of preference.
ORGANIZATION_PATHS: Final = (
    ("organization_id",),
    ("customer", "organization_id"),
    ("product", "organization_id"),
    ("benefit", "organization_id"),
    ("subscription", "customer", "organization_id"),
    ("order", "customer", "organization_id"),
)
#: The type whose ``data`` is the organization.
ORGANIZATION_TYPE: Final = "organization.updated"

#: Bytes of an unverified body that are scanned: real ones have the organization in the first few
#: kilobytes.
SCANNED_BYTES: Final = 64 * 1024
#: Strings and brackets that are scanned, in about a millisecond. Anyone can send such a body:
#: scanning all of 1 MiB once took 2 s of CPU.
SCANNED_TOKENS: Final = 2048

#: The next string, with a colon if it is a name, or bracket. Everything in between is skipped.
_next_token = re.compile(
    rb'[^"\[\]{}]*+(?:"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*+:)?+|([\[{])|[\]}])'
).match
_DEEPEST: Final = 1 + max(map(len, ORGANIZATION_PATHS))
_RANKS: Final = {
    tuple(part.encode() for part in ("data", *path)): rank
    for rank, path in enumerate(ORGANIZATION_PATHS)
}
_OWN_ID: Final = (b"data", b"id")


def organization_of(event_type: str, data_raw: bytes | msgspec.Raw) -> str | None:
    """Return the organization of a verified delivery, or None.

    It is the first of :data:`ORGANIZATION_PATHS` within ``data`` that is text; for
    ``organization.updated`` ``data.id`` comes last.

    Args:
        event_type: the type of the delivery.
        data_raw: its undecoded ``data``.
    """
    data = members_of(data_raw)
    if data is None:
        return None
    # Last, because data.id of any other type identifies something else.
    own = (("id",),) if event_type == ORGANIZATION_TYPE else ()
    return next(
        (found for path in (*ORGANIZATION_PATHS, *own) if (found := _text_at(data, path))), None
    )


def _text_at(members: dict[str, msgspec.Raw], path: Sequence[str]) -> str | None:
    # Member by member: decoding all of data for one text would cost as much as decoding the event.
    *parents, name = path
    for parent in parents:
        inner = members_of(members[parent]) if parent in members else None
        if inner is None:
            return None
        members = inner
    if name not in members:
        return None
    try:
        found: str = decoder_for(str).decode(members[name])
    except UNFIT:
        return None
    return found


def claimed_organization(body: bytes) -> str | None:
    """Return the organization that an unverified body claims, or None.

    Reads at most :data:`SCANNED_BYTES` and :data:`SCANNED_TOKENS`, and decodes nothing. The result
    only selects the keys to try; nothing else may depend on it. It agrees with
    :func:`organization_of` for real senders; names and values with escapes are not found.
    """
    scanned = body[:SCANNED_BYTES]
    best: tuple[int, bytes] | None = None
    own_id: bytes | None = None
    event_type: bytes | None = None
    names: list[bytes | None] = []  # of the enclosing objects and arrays
    name: bytes | None = None
    at = 0
    for _ in range(SCANNED_TOKENS):
        token = _next_token(scanned, at)
        if token is None:
            break
        at = token.end()
        text, is_name, opening = token.groups()
        if text is not None:
            if is_name:
                name = text
                continue
            # Deeper strings are not at any of the paths.
            if name is not None and len(names) <= _DEEPEST:
                path = (*names[1:], name)
                rank = _RANKS.get(path)  # type: ignore[arg-type]  # a None among them is not a key
                # The last one of equal rank, as decoders use the last of repeated names.
                if text and rank is not None and (best is None or rank <= best[0]):
                    best = (rank, text)
                elif path == (b"type",):
                    event_type = text
                elif path == _OWN_ID:
                    own_id = text
            name = None
        elif opening is not None:
            names.append(name)
            name = None
        elif not names:
            break
        else:
            names.pop()
            name = None
    found = best[1] if best is not None else None
    if found is None and event_type == ORGANIZATION_TYPE.encode():
        found = own_id or None
    # Ids are ASCII; other text would be looked up in vain.
    return found.decode("ascii") if found is not None and found.isascii() else None
