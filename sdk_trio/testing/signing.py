"""Signed deliveries for tests of any receiver, this package's or another one."""

import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ..config import KeyDerivation, Secret
from ..events.samples import sample, sample_body, sample_types
from ..webhooks.signed_request import SignedDelivery, sign_body

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

    Args:
        event: an event type, whose realistic sample becomes the body; or the exact body's bytes.
        data: merged into the sample's ``data`` (RFC 7396: null removes a field).
        secret: the receiver's ``whsec_`` secret, or the ``whsk_`` half of its ``whpk_`` key.
        webhook_id: default a new one; repeat one to test your handler's idempotency.
        timestamp: Unix seconds of the signature; default now.
        derivation: how the secret becomes the key.

    Raises:
        UnknownEventTypeError: there is no sample of that type.
        ValueError: the id, the timestamp or the secret is one that a receiver would refuse.
    """
    now = time.time() if timestamp is None else float(timestamp)
    # A new id for each, because a receiver answers a known one without running the handler.
    identifier = f"msg_{uuid.uuid4().hex}" if webhook_id is None else webhook_id
    if isinstance(event, bytes):
        if data is not None:
            raise ValueError("data is merged into a sample: give an event type, not a body")
        body = event
    else:
        # The event happens when it is signed, and the id is its seed: equal arguments make equal
        # bodies.
        happened = datetime.fromtimestamp(now, UTC)
        body = sample_body(event, now=happened, overrides=data, seed=identifier)
    return sign_body(
        body, secret=secret, webhook_id=identifier, timestamp=int(now), derivation=derivation
    )
