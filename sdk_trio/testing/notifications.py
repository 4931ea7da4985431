"""Verify notification webhooks, for their receivers and for the receivers' tests."""

import hmac
import json
from collections.abc import Mapping
from typing import Any

from ..base.clock import wall
from ..config import KeyDerivation, Secret
from ..errors import VerificationError
from ..notifications.channels.webhook import SIGNATURE_HEADER, body_signature
from ..webhooks.signature import Keyring
from ..webhooks.verdict import Delivery, Rejected, verify_delivery


def verify_notification(
    headers: Mapping[str, str],
    body: bytes,
    secret: Secret | str,
    *,
    tolerance_seconds: int = 300,
    now: float | None = None,
) -> dict[str, Any]:
    """Return the payload of an authentic and recent notification webhook.

    Both signatures are checked: ``X-Sdk-Signature`` over the body, and the Standard Webhooks
    signature. The latter covers the timestamp, so an old request cannot be replayed. It can be
    replayed within the tolerance, so store each ``deliveryId`` that was handled.

    Args:
        headers: those of the request; names are case-insensitive.
        body: the exact bytes.
        secret: the secret in the sender's variable ``SigningSecretEnvVar``.
        tolerance_seconds: the most that the sender's clock may differ, in either direction.
        now: Unix seconds; default: the current time.

    Raises:
        VerificationError: it is not authentic, or too old; ``cause`` is the reason in one word.
        OptionsValidationError: the secret cannot be used.
    """
    text = secret.reveal() if isinstance(secret, Secret) else secret
    received_at = wall() if now is None else now
    # Frameworks differ in the case of header names.
    lowered = {name.lower(): value for name, value in headers.items()}
    pairs = [(n.encode("latin-1"), v.encode("latin-1", "replace")) for n, v in lowered.items()]
    # Auto: the sender signs with the decoded key if the secret has one.
    keyring = Keyring.from_secrets([Secret(text)], KeyDerivation.AUTO)
    verdict = verify_delivery(
        Delivery(pairs, body, received_at), keyring, tolerance_seconds=tolerance_seconds
    )
    if isinstance(verdict, Rejected):
        raise VerificationError(str(verdict.cause), verdict.detail)
    # After the Standard Webhooks signature, because only that one proves the time.
    given = lowered.get(SIGNATURE_HEADER)
    if given is None:
        raise VerificationError("missing_header", f"{SIGNATURE_HEADER} missing.")
    # In constant time, so that the duration does not reveal how much of a forgery is right.
    if not hmac.compare_digest(given.encode(), body_signature(text, body).encode()):
        raise VerificationError("no_match", f"{SIGNATURE_HEADER} was made with another secret.")
    document: dict[str, Any] = json.loads(body)
    return document
