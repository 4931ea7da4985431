"""Sign a delivery as the sender of a source does, for ``events trigger`` and tests."""

import json
import uuid
from collections.abc import Mapping
from typing import Any

import attrs

from ...config import Secret
from ...config.check_sources import DERIVATIONS
from ...config.fields import KeyDerivation
from ...config.options.sources import SourceOptions
from ...config.secret import first_signing, parse_secret
from ..signed_request import sign_body
from .places import DeliveryPlace, with_member
from .schemes import HmacScheme, Layout, Scheme, digest_of, id_of, layout_of


@attrs.frozen
class SourceDelivery:
    """A delivery of a source as sent; ``webhook_id`` is the id under which it is stored."""

    webhook_id: str
    headers: Mapping[str, str]
    body: bytes


def make_body(
    options: SourceOptions, event_type: str, data: Any, *, webhook_id: str, timestamp: int
) -> bytes:
    """Return a body in the envelope of a source, with ``data`` where its scheme has it.

    Args:
        options: the source.
        event_type: written where the scheme has the type, if that is in the body.
        data: any JSON value.
        webhook_id: written where the scheme has the id, if that is in the body.
        timestamp: likewise, Unix seconds.
    """
    document = with_member({}, layout_of(options).data, data)
    return add_names(options, event_type, document, webhook_id=webhook_id, timestamp=timestamp)


def add_names(
    options: SourceOptions, event_type: str, document: Any, *, webhook_id: str, timestamp: int
) -> bytes:
    """Return a document as a body, with its id, type and time where the scheme has them in it."""
    scheme = Scheme.of(options)
    constants = scheme.hmac
    places = [(scheme.layout.type, event_type)]
    if constants is not None:
        places += [(constants.id, webhook_id)] if constants.id else []
        if constants.timestamp is not None and constants.timestamp.header is None:
            document = with_member(document, constants.timestamp.pointer, timestamp)
    for place, value in places:
        if place.header is None:
            document = with_member(document, place.pointer, value)
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def sign_as(
    options: SourceOptions,
    event_type: str,
    body: bytes,
    *,
    webhook_id: str | None = None,
    timestamp: int,
    secret: Secret | None = None,
) -> SourceDelivery:
    """Sign a body as the source's sender does.

    Args:
        options: the source.
        event_type: sent in the header of the type, if the scheme has one.
        body: the exact bytes.
        webhook_id: the sender's id, for schemes that have it in a header; None: a new one.
        timestamp: of the attempt, in Unix seconds.
        secret: signs; None: the first one of the source that can.

    Raises:
        ValueError: the source has no secret, or nothing can be signed with it.
    """
    chosen = secret or first_signing(options.secrets)
    if chosen is None:
        raise ValueError(f"source {options.name} has no secret that can sign")
    scheme = Scheme.of(options)
    identifier = new_id() if webhook_id is None else webhook_id
    headers = {"content-type": "application/json", **_type_header(scheme.layout, event_type)}
    if scheme.hmac is None:
        signed = sign_body(
            body,
            secret=chosen,
            webhook_id=identifier,
            timestamp=timestamp,
            derivation=DERIVATIONS[options.scheme],
        )
        prefix = "svix-" if scheme.svix else "webhook-"
        own = {name.replace("webhook-", prefix): text for name, text in signed.headers.items()}
        return SourceDelivery(identifier, headers | own, body)
    return _signed_by_hmac(scheme.hmac, headers, body, identifier, timestamp, chosen)


def new_id() -> str:
    """Return a new id for a delivery."""
    return f"evt_{uuid.uuid4().hex}"


def _signed_by_hmac(
    scheme: HmacScheme,
    headers: dict[str, str],
    body: bytes,
    identifier: str,
    timestamp: int,
    secret: Secret,
) -> SourceDelivery:
    ((_, key),) = parse_secret(secret.reveal(), KeyDerivation.UTF8).hmac_keys
    signature = scheme.signature(
        key, body, webhook_id=identifier.encode(), timestamp=str(timestamp).encode()
    )
    entries = [(scheme.header, f"{scheme.prefix.decode()}{signature.decode()}")]
    if scheme.timestamp is not None and scheme.timestamp.header is not None:
        entries.insert(0, (scheme.timestamp, _entry(scheme.timestamp, str(timestamp))))
    if scheme.id is not None and scheme.id.header is not None:
        entries.append((scheme.id, _entry(scheme.id, identifier)))
    for place, text in entries:
        name = (place.header or b"").decode()
        # Such as t=1614265330,v1=...
        headers[name] = f"{headers[name]},{text}" if name in headers else text
    stored = digest_of(body) if scheme.id is None else None
    if scheme.id is not None and scheme.id.header is None:
        stored = id_of(scheme.id.read((), body) or "")
    return SourceDelivery(stored or id_of(identifier) or identifier, headers, body)


def _type_header(layout: Layout, event_type: str) -> dict[str, str]:
    if layout.type.header is None:
        return {}
    return {layout.type.header.decode(): _entry(layout.type, event_type)}


def _entry(place: DeliveryPlace, text: str) -> str:
    return text if place.part is None else f"{place.part.decode()}={text}"
