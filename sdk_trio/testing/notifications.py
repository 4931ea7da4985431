"""The verification of notification webhooks, for their receivers and for the receivers' tests."""

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

    Both signatures are checked: ``X-Sdk-Signature`` over the body, and the Standard Webhooks one,
    which covers the time as well, so that an old request cannot be sent again later. Within the
    tolerance it can: remember each ``deliveryId`` that was handled.

    Args:
        headers: of the request; names count without regard to case.
        body: the exact bytes.
        secret: the secret in the sender's variable ``SigningSecretEnvVar``.
        tolerance_seconds: how far the sender's clock may be off, either way.
        now: Unix seconds; default the present time.

    Raises:
        VerificationError: it is not authentic, or too old; ``cause`` says why in one word.
        OptionsValidationError: the secret cannot be used.
    """
    text = secret.reveal() if isinstance(secret, Secret) else secret
    received_at = wall() if now is None else now
    # Frameworks hand headers over in every case.
    lowered = {name.lower(): value for name, value in headers.items()}
    pairs = [(n.encode("latin-1"), v.encode("latin-1", "replace")) for n, v in lowered.items()]
    # Auto, as the sender signs with the decoded key where the secret has one.
    keyring = Keyring.from_secrets([Secret(text)], KeyDerivation.AUTO)
    verdict = verify_delivery(
        Delivery(pairs, body, received_at), keyring, tolerance_seconds=tolerance_seconds
    )
    if isinstance(verdict, Rejected):
        raise VerificationError(str(verdict.cause), verdict.detail)
    # After the Standard Webhooks signature, which alone proves the time.
    given = lowered.get(SIGNATURE_HEADER)
    if given is None:
        raise VerificationError("missing_header", f"{SIGNATURE_HEADER} missing.")
    # Constant time: how far a forged signature agrees must not be told.
    if not hmac.compare_digest(given.encode(), body_signature(text, body).encode()):
        raise VerificationError("no_match", f"{SIGNATURE_HEADER} was made with another secret.")
    document: dict[str, Any] = json.loads(body)
    return document
