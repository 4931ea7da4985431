"""Signed deliveries for tests of this package's receiver or any other."""

import difflib
import sys
import uuid
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from ..base.clock import wall
from ..config import KeyDerivation, Secret
from ..events import DEFAULT_CATALOG
from ..events.samples import sample, sample_body, sample_types
from ..events.values import alternatives, fields_of
from ..webhooks.signed_request import SignedDelivery, sign_body

#: The minimum similarity of a misspelt name: "idd" is similar to "id", "currency_code" is not
#: similar to "currency".
_CLOSE = 0.78

__all__ = ["SignedDelivery", "sample", "sample_body", "sample_types", "sign_delivery"]


def sign_delivery(
    event: str | bytes,
    data: Mapping[str, Any] | None = None,
    *,
    secret: Secret | str,
    webhook_id: str | None = None,
    timestamp: int | None = None,
    derivation: KeyDerivation = KeyDerivation.STANDARD,
) -> SignedDelivery:
    """Make a delivery as the upstream would send it; ``headers`` and ``body`` are ready to post.

    A field of ``data`` that looks like a misspelt field of the event causes a ``UserWarning``.
    Other unknown fields are sent: a receiver must accept them.

    Args:
        event: an event type, whose realistic sample becomes the body, or the exact bytes of a body.
        data: merged into the sample's ``data`` (RFC 7396: null removes a field).
        secret: the receiver's ``whsec_`` secret, or the ``whsk_`` half of its ``whpk_`` key.
        webhook_id: default: a new one; repeat one to test your handler's idempotency.
        timestamp: Unix seconds of the signature; default: now.
        derivation: how the key is derived from the secret.

    Raises:
        UnknownEventTypeError: there is no sample of that type.
        ValueError: a receiver would refuse the id, the timestamp or the secret.
    """
    now = wall() if timestamp is None else float(timestamp)
    # A new id for each: a receiver does not run the handler for a known id.
    identifier = f"msg_{uuid.uuid4().hex}" if webhook_id is None else webhook_id
    if isinstance(event, bytes):
        if data is not None:
            raise ValueError("data is merged into a sample; pass an event type instead of a body")
        body = event
    else:
        # The time of the event is that of the signature, and the id is the seed. So equal arguments
        # make equal bodies.
        happened = datetime.fromtimestamp(now, UTC)
        body = sample_body(event, now=happened, overrides=data, seed=identifier)
        row = DEFAULT_CATALOG.by_type(event)
        if data is not None and row is not None:
            _warn_of_misspelt(event, "data", data, row.data_class)
    return sign_body(
        body, secret=secret, webhook_id=identifier, timestamp=int(now), derivation=derivation
    )


def _warn_of_misspelt(event: str, path: str, data: Mapping[str, Any], data_class: Any) -> None:
    """Warn, at the test's line, of each unknown field that resembles a known one."""
    known = {field.wire_name: field for field in fields_of(data_class) or ()}
    for name, value in data.items():
        field = known.get(name)
        if field is None:
            near = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
            if near:
                warnings.warn(
                    f"{event} has no field {path}.{name}; did you mean {near[0]!r}?",
                    stacklevel=_depth_of_caller(),
                )
        elif isinstance(value, Mapping):
            for kind in alternatives(field.kind):
                if fields_of(kind) is not None:
                    _warn_of_misspelt(event, f"{path}.{name}", value, kind)


def _depth_of_caller() -> int:
    """Return the ``stacklevel``, for the caller, of the first frame outside this package."""
    depth = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("sdk_trio."):
        depth, frame = depth + 1, frame.f_back
    return depth
