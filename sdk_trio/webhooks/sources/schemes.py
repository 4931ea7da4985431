"""Schemes: whether a delivery of a source is authentic, and which event it is. Pure.

Two functions verify every sender. ``_verify_standard`` is the scheme of Standard Webhooks, whose
headers Svix names ``svix-``. ``_verify_hmac`` is an HMAC of a text that has the body; Stripe,
GitHub, Shopify and the settings of Scheme Hmac are its constants. The body is read only after its
signature is verified.

The cause and the detail of a rejection are for the operator; the sender gets the same opaque answer
for all of them.
"""

import hashlib
import hmac
import re
from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime
from hmac import compare_digest
from typing import Final

import msgspec

from ...base.http import Headers
from ...config.check_sources import DERIVATIONS
from ...config.fields import HmacAlgorithm, HmacEncoding, KeyDerivation, SourceScheme
from ...config.options.sources import SourceOptions
from ...config.secret import parse_secret
from ...events.decoding import MAX_TYPE_LENGTH
from ...events.values import is_json
from ...records.synthetic import is_synthetic
from ..signature import MAX_ENTRIES, MAX_ID_BYTES, Keyring, is_valid_id
from ..verdict import Accepted, Cause, Delivery, Rejected, outside_tolerance, verify_delivery
from .places import MAX_HEADER_BYTES, DeliveryPlace, entries_of, pointer_of

#: The longest subject, in characters; an event with a longer one has none.
MAX_SUBJECT_LENGTH: Final = 512

#: The most bytes of an id; see :func:`id_of`.
_MAX_SENT_ID_BYTES: Final = 1024

#: The headers of Standard Webhooks, as Svix names them.
_SVIX: Final = b"svix-"
_STANDARD: Final = b"webhook-"

_HASHES: Final = {
    HmacAlgorithm.SHA256: "sha256",
    HmacAlgorithm.SHA512: "sha512",
    HmacAlgorithm.SHA1: "sha1",
}

_split_content = re.compile(r"(\{body\}|\{id\}|\{timestamp\})").split
_is_seconds = re.compile(r"0|[1-9][0-9]{0,11}", re.ASCII).fullmatch
_is_milliseconds = re.compile(r"[1-9][0-9]{12}", re.ASCII).fullmatch
_read_moment = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.[0-9]{1,9})?"
    r"(Z|[+-][0-9]{2}:[0-9]{2})",
    re.ASCII,
).fullmatch


class Genuine(msgspec.Struct, frozen=True):
    """An authentic delivery: its id, the time of the attempt, its type and its subject.

    ``timestamp`` is in Unix seconds; None: the sender names none.
    """

    webhook_id: str
    timestamp: int | None
    type: str
    subject: str | None


class Layout(msgspec.Struct, frozen=True):
    """The places where a scheme's deliveries name their event; a class decodes ``data``."""

    type: DeliveryPlace
    subject: DeliveryPlace | None
    data: tuple[str, ...]


class HmacScheme(msgspec.Struct, frozen=True):
    """The constants of ``_verify_hmac``; see the settings of the same names.

    ``content`` are the pieces of the signed text. Without a place for the id, it is a digest of the
    body.
    """

    header: DeliveryPlace
    prefix: bytes = b""
    content: tuple[str, ...] = ("{body}",)
    algorithm: HmacAlgorithm = HmacAlgorithm.SHA256
    encoding: HmacEncoding = HmacEncoding.HEX
    id: DeliveryPlace | None = None
    timestamp: DeliveryPlace | None = None

    @property
    def signs_timestamp(self) -> bool:
        """Return whether the signature covers the time of the attempt."""
        place = self.timestamp
        return place is not None and (place.header is None or "{timestamp}" in self.content)

    @property
    def signs_id(self) -> bool:
        """Return whether the signature covers the id."""
        return self.id is None or self.id.header is None or "{id}" in self.content

    def signature(self, key: bytes, body: bytes, *, webhook_id: bytes, timestamp: bytes) -> bytes:
        """Return the signature of a delivery, as the sender writes it behind the prefix."""
        parts = {"{body}": body, "{id}": webhook_id, "{timestamp}": timestamp}
        text = b"".join(parts.get(piece, piece.encode()) for piece in self.content)
        digest = hmac.digest(key, text, _HASHES[self.algorithm])
        return digest.hex().encode() if self.encoding is HmacEncoding.HEX else b64encode(digest)


STRIPE: Final = HmacScheme(
    header=DeliveryPlace.of("stripe-signature"),
    prefix=b"v1=",
    content=("{timestamp}", ".", "{body}"),
    id=DeliveryPlace.of("/id"),
    timestamp=DeliveryPlace.of("stripe-signature:t"),
)
GITHUB: Final = HmacScheme(
    header=DeliveryPlace.of("x-hub-signature-256"),
    prefix=b"sha256=",
    id=DeliveryPlace.of("x-github-delivery"),
)
# X-Shopify-Event-Id is that of a merchant's action, which may cause deliveries of several topics:
# they would count as duplicates. A retry repeats X-Shopify-Webhook-Id.
SHOPIFY: Final = HmacScheme(
    header=DeliveryPlace.of("x-shopify-hmac-sha256"),
    encoding=HmacEncoding.BASE64,
    id=DeliveryPlace.of("x-shopify-webhook-id"),
)

_HMACS: Final = {
    SourceScheme.STRIPE: STRIPE,
    SourceScheme.GITHUB: GITHUB,
    SourceScheme.SHOPIFY: SHOPIFY,
}

_ENVELOPE: Final = Layout(
    DeliveryPlace.of("/type"), DeliveryPlace.of("/data/id"), pointer_of("/data")
)
_LAYOUTS: Final = {
    SourceScheme.STANDARD_WEBHOOKS: _ENVELOPE,
    SourceScheme.SVIX: _ENVELOPE,
    SourceScheme.STRIPE: Layout(
        DeliveryPlace.of("/type"), DeliveryPlace.of("/data/object/id"), pointer_of("/data/object")
    ),
    # An event of GitHub is about any object of a repository: no single place has its id.
    SourceScheme.GITHUB: Layout(DeliveryPlace.of("x-github-event"), None, ()),
    SourceScheme.SHOPIFY: Layout(DeliveryPlace.of("x-shopify-topic"), DeliveryPlace.of("/id"), ()),
    SourceScheme.HMAC: Layout(DeliveryPlace.of("/type"), None, ()),
}


def hmac_scheme_of(source: SourceOptions) -> HmacScheme | None:
    """Return the constants of a source's HMAC; None: it signs by Standard Webhooks."""
    if source.scheme is not SourceScheme.HMAC:
        return _HMACS.get(source.scheme)
    return HmacScheme(
        header=DeliveryPlace.of(source.header or ""),
        prefix=(source.prefix or "").encode(),
        content=tuple(filter(None, _split_content(source.signed_content or "{body}"))),
        algorithm=source.algorithm or HmacAlgorithm.SHA256,
        encoding=source.encoding or HmacEncoding.HEX,
        id=None if source.id is None else DeliveryPlace.of(source.id),
        timestamp=None if source.timestamp is None else DeliveryPlace.of(source.timestamp),
    )


def layout_of(source: SourceOptions) -> Layout:
    """Return where a source's deliveries name their event: its settings, or its scheme's places."""
    usual = _LAYOUTS[source.scheme]
    return Layout(
        usual.type if source.type is None else DeliveryPlace.of(source.type),
        usual.subject if source.subject is None else DeliveryPlace.of(source.subject),
        usual.data if source.data is None else pointer_of(source.data),
    )


class Keys(msgspec.Struct, frozen=True):
    """The keys of a source's secrets: a keyring for Standard Webhooks, or those of an HMAC."""

    keyring: Keyring | None = None
    hmac: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, source: SourceOptions) -> "Keys":
        """Prepare the keys of checked settings.

        Raises:
            OptionsValidationError: a key needs a package that is not installed.
        """
        derivation = DERIVATIONS.get(source.scheme)
        if derivation is not None:
            return cls(keyring=Keyring.from_secrets(source.secrets, derivation))
        texts = [secret.reveal() for secret in source.secrets]
        parsed = [parse_secret(text, KeyDerivation.UTF8) for text in texts]
        return cls(hmac=tuple(key for each in parsed for _, key in each.hmac_keys))


class Scheme(msgspec.Struct, frozen=True):
    """The scheme of one source: the constants of one of the two functions, and its layout.

    ``hmac`` is None for Standard Webhooks; ``svix``: its headers begin with ``svix-``.
    """

    layout: Layout
    hmac: HmacScheme | None = None
    svix: bool = False

    @classmethod
    def of(cls, source: SourceOptions) -> "Scheme":
        """Return the scheme of checked settings."""
        return cls(layout_of(source), hmac_scheme_of(source), source.scheme is SourceScheme.SVIX)

    @property
    def signs_timestamp(self) -> bool:
        """Return whether the signature covers the time of the attempt."""
        return self.hmac is None or self.hmac.signs_timestamp

    @property
    def signs_id(self) -> bool:
        """Return whether the signature covers the id."""
        return self.hmac is None or self.hmac.signs_id

    def verify(
        self, headers: Headers, body: bytes, *, now: float, keys: Keys, tolerance: int
    ) -> Genuine | Rejected:
        """Decide whether a delivery is authentic and recent; never raises.

        Args:
            headers: as ASGI gives them, repeated ones included.
            body: the exact bytes.
            now: Unix seconds.
            keys: of the source's secrets.
            tolerance: the most seconds between the signed time and ``now``, either way.
        """
        if self.hmac is None:
            return self._verify_standard(headers, body, now, keys, tolerance)
        return self._verify_hmac(self.hmac, headers, body, now, keys, tolerance)

    def _verify_standard(
        self, headers: Headers, body: bytes, now: float, keys: Keys, tolerance: int
    ) -> Genuine | Rejected:
        if self.svix:
            own = [pair for pair in headers if pair[0][: len(_SVIX)].lower() == _SVIX]
            headers = [(_STANDARD + name[len(_SVIX) :], value) for name, value in own]
        keyring = keys.keyring or Keyring(())
        verdict = verify_delivery(
            Delivery(headers, body, now), keyring, tolerance_seconds=tolerance
        )
        if isinstance(verdict, Accepted):
            if not is_json(body):
                return _NOT_JSON
            return self._named(headers, body, verdict.webhook_id, verdict.timestamp)
        if self.svix:
            return Rejected(verdict.cause, verdict.detail.replace("webhook-", "svix-"))
        return verdict

    def _verify_hmac(
        self,
        scheme: HmacScheme,
        headers: Headers,
        body: bytes,
        now: float,
        keys: Keys,
        tolerance: int,
    ) -> Genuine | Rejected:
        sent = scheme.header.in_headers(headers)
        if sent is None:
            return _missing(scheme.header, headers)
        offered = [
            entry[len(scheme.prefix) :]
            for entry in entries_of(sent)
            if entry.startswith(scheme.prefix)
        ]
        if not offered or len(offered) > MAX_ENTRIES:
            return _BAD_HEADER
        webhook_id, at = b"", b""
        if scheme.id is not None and scheme.id.header is not None:
            found = scheme.id.in_headers(headers)
            if found is None:
                return _missing(scheme.id, headers)
            webhook_id = found
        seconds: int | None = None
        if scheme.timestamp is not None and scheme.timestamp.header is not None:
            found = scheme.timestamp.in_headers(headers)
            if found is None:
                return _missing(scheme.timestamp, headers)
            at = found
            moment = _recent(at.decode("latin-1"), now, tolerance)
            if isinstance(moment, Rejected):
                return moment
            seconds = moment
        if not _matches(scheme, keys, body, offered, webhook_id, at):
            return _NO_MATCH
        # From here on the body is the sender's. Handlers read it as JSON, also if all places are
        # headers.
        if not is_json(body):
            return _NOT_JSON
        if scheme.timestamp is not None and scheme.timestamp.header is None:
            moment = _recent(scheme.timestamp.read(headers, body), now, tolerance)
            if isinstance(moment, Rejected):
                return moment
            seconds = moment
        identifier = (
            digest_of(body) if scheme.id is None else id_of(scheme.id.read(headers, body) or "")
        )
        if identifier is None:
            return _BAD_ID
        return self._named(headers, body, identifier, seconds)

    def _named(
        self, headers: Headers, body: bytes, webhook_id: str, seconds: int | None
    ) -> Genuine | Rejected:
        event_type = self.layout.type.read(headers, body)
        if event_type is None or not (
            0 < len(event_type) <= MAX_TYPE_LENGTH and event_type.isprintable()
        ):
            return _NO_TYPE
        place = self.layout.subject
        subject = None if place is None else place.read(headers, body)
        if subject is not None and not (
            0 < len(subject) <= MAX_SUBJECT_LENGTH and subject.isprintable()
        ):
            subject = None
        # Only catch-up makes such ids, of the upstream's records.
        if is_synthetic(webhook_id):
            webhook_id = digest_of(webhook_id.encode())
        return Genuine(webhook_id, seconds, event_type, subject)


def _matches(
    scheme: HmacScheme,
    keys: Keys,
    body: bytes,
    offered: Sequence[bytes],
    webhook_id: bytes,
    timestamp: bytes,
) -> bool:
    """Return whether a key made one of the signatures; every pair is compared, in constant time."""
    found = False
    for key in keys.hmac:
        expected = scheme.signature(key, body, webhook_id=webhook_id, timestamp=timestamp)
        for value in offered:
            found |= compare_digest(expected, value)
    return found


def _recent(text: str | None, now: float, tolerance: int) -> int | Rejected:
    """Return the time of the attempt in Unix seconds, or why it is refused."""
    seconds = None if text is None else _seconds_of(text)
    if seconds is None:
        return _BAD_TIMESTAMP
    # As in verdict.py: a difference of exactly the tolerance passes, and NaN does not.
    age = now // 1 - seconds
    if not -tolerance <= age <= tolerance:
        rejected = outside_tolerance(age, tolerance)
        return Rejected(rejected.cause, rejected.detail.removeprefix("webhook-"))
    return seconds


def _seconds_of(text: str) -> int | None:
    if _is_seconds(text):
        return int(text)
    if _is_milliseconds(text):
        return int(text) // 1000
    moment = _read_moment(text)
    if moment is None:
        return None
    try:
        return int(datetime.fromisoformat(moment[1] + moment[2].replace("Z", "+00:00")).timestamp())
    except (ValueError, OverflowError):
        return None


def id_of(sent: str) -> str | None:
    """Return the webhook id of an event; None without one.

    Other senders' ids may have dots, blanks or other characters that an id here cannot have: such
    an id is its digest.
    """
    text = sent.encode()
    if not 0 < len(text) <= _MAX_SENT_ID_BYTES:
        return None
    return sent if len(text) <= MAX_ID_BYTES and is_valid_id(text) else digest_of(text)


def digest_of(text: bytes) -> str:
    """Return the webhook id that stands for an id or a body that cannot be one."""
    return f"sha256-{hashlib.sha256(text).hexdigest()}"


def _missing(place: DeliveryPlace, headers: Headers) -> Rejected:
    name = (place.header or b"").decode()
    sent = sum(each.lower() == place.header for each, _ in headers)
    if sent > 1:
        detail = f"{name} was sent more than once: a proxy that adds headers, or an attempt to "
        return Rejected(Cause.REPEATED_HEADER, f"{detail}confuse.")
    if not sent:
        detail = f"{name} missing: not a delivery of this sender, or a proxy drops the header."
        return Rejected(Cause.MISSING_HEADER, detail)
    part = "" if place.part is None else f", or has not one entry {place.part.decode()}="
    detail = f"{name} is longer than {MAX_HEADER_BYTES} bytes{part}."
    return Rejected(Cause.BAD_SIGNATURE_HEADER, detail)


_BAD_HEADER: Final = Rejected(
    Cause.BAD_SIGNATURE_HEADER,
    f"the signature's header holds no signature with the scheme's prefix, or over {MAX_ENTRIES}.",
)
_BAD_TIMESTAMP: Final = Rejected(
    Cause.BAD_TIMESTAMP,
    "the timestamp must be Unix seconds, 13 digits of milliseconds, or an RFC 3339 time.",
)
_BAD_ID: Final = Rejected(
    Cause.BAD_ID, f"the id of the event must be text of 1 to {_MAX_SENT_ID_BYTES} bytes."
)
_NOT_JSON: Final = Rejected(
    Cause.NOT_AN_EVENT, "the body is not JSON in UTF-8: have the sender send JSON."
)
_NO_TYPE: Final = Rejected(
    Cause.NOT_AN_EVENT,
    f"the delivery names no event type of 1 to {MAX_TYPE_LENGTH} printable characters: compare the "
    "setting Type of the source with a delivery.",
)
_NO_MATCH: Final = Rejected(
    Cause.NO_MATCH,
    "signature made with another secret, or the body was changed in transit: a proxy that "
    "re-encodes JSON does that.",
)
