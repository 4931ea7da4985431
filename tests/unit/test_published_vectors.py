"""The cases of the Standard Webhooks, Svix, Polar and Stripe libraries against our verdict.

Each row names the file and the test that it comes from. Standard Webhooks is
standard-webhooks/standard-webhooks, Svix svix/svix-webhooks (headers renamed), Polar
polarsource/polar, Stripe stripe/stripe-python (the cases that do not depend on its own header). A
row that those libraries judge differently has the reason.
"""

import base64
import hashlib
import hmac
from collections.abc import Mapping

import attrs
import pytest

from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.errors import OptionsValidationError
from sdk_trio.webhooks.signature import Keyring, sign
from sdk_trio.webhooks.verdict import Accepted, Delivery, verify_delivery

ID, PAYLOAD, SECRET = (
    "msg_p5jXN8AQM9LWM0D4loKWxJek",
    '{"test": 2432232314}',
    "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
)
#: The time of their vector for the function that signs, and the signature that it must give.
NOW, SIGNATURE = 1614265330, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
WRONG = "Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc="
PYTHON = "standard-webhooks libraries/python/tests/test_webhooks.py"
SCRIPT = "standard-webhooks libraries/javascript/src/webhook.test.ts"
GO = "svix go/webhook_test.go"
POLAR = "polar sdk/python/tests/test_webhooks.py"
STRIPE = "stripe-python tests/test_webhook.py"


def signed_with(key: bytes, timestamp: int, body: str = PAYLOAD) -> str:
    """Sign without any code of this project."""
    digest = hmac.digest(key, f"{ID}.{timestamp}.{body}".encode(), hashlib.sha256)
    return "v1," + base64.b64encode(digest).decode()


@attrs.frozen
class Row:
    """A delivery that differs from a right one, and whether it is accepted."""

    origin: str
    accepted: bool
    headers: Mapping[str, str | None] = {}
    secret: str = SECRET
    at: int = 0
    body: str = PAYLOAD


def at(seconds: int) -> dict[str, str | None]:
    """Headers of a delivery that was signed that many seconds away from now."""
    signature = signed_with(base64.b64decode(SECRET), NOW + seconds)
    return {"webhook-timestamp": str(NOW + seconds), "webhook-signature": signature}


def padded(secret: str) -> dict[str, str | None]:
    key = base64.b64decode(secret + "=" * (-len(secret) % 4))
    return {"webhook-signature": signed_with(key, NOW)}


ONE_PAD, TWO_PADS = SECRET[:-1], SECRET + "Br"
SIGNATURES = {"webhook-signature": f"v1,{WRONG} v2,{WRONG} {SIGNATURE} v1,{WRONG}"}
TEXT_SECRET = "test-secret of Polar, a text"
TEXT = {"webhook-signature": signed_with(TEXT_SECRET.encode(), NOW)}
EMPTY = {"webhook-signature": signed_with(base64.b64decode(SECRET), NOW, "")}

ROWS = [
    Row(f"{PYTHON} test_valid_signature_is_valid_and_returns_json", True),
    Row(f"{PYTHON} test_missing_id_raises_error", False, {"webhook-id": None}),
    Row(f"{PYTHON} test_timestamp_raises_error", False, {"webhook-timestamp": None}),
    Row(f"{PYTHON} test_invalid_timestamp_raises_error", False, {"webhook-timestamp": "hello"}),
    Row(f"{PYTHON} test_missing_signature_raises_error", False, {"webhook-signature": None}),
    Row(
        f"{PYTHON} test_invalid_signature_raises_error",
        False,
        {"webhook-signature": SIGNATURE.replace("1OE=", "1OA=")},
    ),
    Row(f"{PYTHON} test_old_timestamp_fails", False, at(-301)),
    Row(f"{PYTHON} test_new_timestamp_fails", False, at(301)),
    Row(f"{PYTHON} test_multi_sig_payload_is_valid", True, SIGNATURES),
    Row(
        f"{PYTHON} test_signature_verification_with_and_without_prefix", True, {}, f"whsec_{SECRET}"
    ),
    Row(f"{PYTHON} ..._with_unpadded_secret: one", True, padded(ONE_PAD), ONE_PAD),
    Row(f"{PYTHON} ..._with_unpadded_secret: two", True, padded(TWO_PADS), TWO_PADS),
    Row(f"{PYTHON} ..._with_unpadded_secret: prefix", True, padded(TWO_PADS), f"whsec_{TWO_PADS}"),
    Row(f"{SCRIPT} empty payload returns undefined", True, EMPTY, body=""),
    Row(f"{GO} partial signature is invalid", False, {"webhook-signature": "v1,"}),
    Row(
        f"{GO} invalid timestamp fails when ignoring tolerance",
        False,
        {"webhook-timestamp": "946684800"},
    ),
    Row(f"{POLAR} test_validate_event", True, TEXT, TEXT_SECRET),
    Row(
        f"{POLAR} test_validate_event: capitals",
        True,
        {
            "webhook-id": None,
            "webhook-timestamp": None,
            "webhook-signature": None,
            "Webhook-Id": ID,
            "Webhook-Timestamp": str(NOW),
            "Webhook-Signature": SIGNATURE,
        },
    ),
    Row(f"{POLAR} test_validate_event_rejects_invalid_signature", False, body="{}"),
    Row(
        f"{POLAR} test_validate_event_rejects_missing_headers",
        False,
        {"webhook-id": None, "webhook-timestamp": None, "webhook-signature": None},
    ),
    Row(f"{POLAR} test_validate_event_rejects_stale_timestamp", False, at(-360)),
    Row(f"{STRIPE} test_raise_on_malformed_header", False, {"webhook-signature": "not even one"}),
    Row(
        f"{STRIPE} test_raise_on_no_signatures_with_expected_scheme",
        False,
        {"webhook-signature": SIGNATURE.replace("v1,", "v0,")},
    ),
    Row(
        f"{STRIPE} test_header_contains_valid_signature",
        True,
        {"webhook-signature": f"{SIGNATURE} v1,bad_signature"},
    ),
    # Stripe accepts it where no tolerance is given; here there always is one.
    Row(f"{STRIPE} test_timestamp_off_but_no_tolerance", False, at(12345 - NOW)),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.origin)
def test_a_published_case_has_its_verdict(row: Row) -> None:
    headers: dict[str, str | None] = {
        "webhook-id": ID,
        "webhook-timestamp": str(NOW),
        "webhook-signature": SIGNATURE,
    }
    sent = {
        name: value for name, value in (headers | dict(row.headers)).items() if value is not None
    }
    ring = Keyring.from_secrets([Secret(row.secret)], KeyDerivation.AUTO)
    pairs = [(name.encode(), value.encode()) for name, value in sent.items()]
    delivery = Delivery(pairs, row.body.encode(), NOW)
    judged = verify_delivery(delivery, ring, tolerance_seconds=300)
    assert isinstance(judged, Accepted) == row.accepted


def test_the_published_signature_is_ours() -> None:
    """Origin: test_sign_function of Standard Webhooks and Svix, in every language."""
    assert sign(f"whsec_{SECRET}", ID, NOW, PAYLOAD.encode()) == SIGNATURE


@pytest.mark.parametrize("secret", ["", "whsec_"])
def test_an_empty_secret_is_refused(secret: str) -> None:
    """Origin: Standard Webhooks test_empty_secret_raises_error, Svix TestWebhookNoEmptySecrets."""
    with pytest.raises(OptionsValidationError):
        Keyring.from_secrets([Secret(secret)], KeyDerivation.AUTO)
