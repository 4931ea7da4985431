"""Senders of which the package knows nothing, described by settings from their documentation.

Their deliveries are made here by the documented formulas, without the package's code.
"""

import base64
import hashlib
import hmac
import json
import tomllib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import attrs
import pytest

from sdk_trio.config import Settings
from sdk_trio.webhooks.sources.schemes import Genuine, Keys, Scheme
from sdk_trio.webhooks.verdict import Rejected

NOW = 1_700_000_000
SECRET = hashlib.sha256(b"a stranger").hexdigest()[:40]

Headers = list[tuple[bytes, bytes]]


@attrs.frozen
class Stranger:
    """A sender: its settings, a body of its documentation, and how it signs one."""

    settings: str
    body: bytes
    sign: Callable[[bytes], Headers]
    expected: Genuine


def digest(text: bytes) -> bytes:
    return hmac.new(SECRET.encode(), text, hashlib.sha256).digest()


def zendesk(body: bytes) -> Headers:
    # developer.zendesk.com/documentation/webhooks/verifying: base64(HMACSHA256(TIMESTAMP + BODY))
    at = datetime.fromtimestamp(NOW, UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()
    return [
        (b"x-zendesk-webhook-signature", base64.b64encode(digest(at + body))),
        (b"x-zendesk-webhook-signature-timestamp", at),
    ]


def podium(body: bytes) -> Headers:
    # docs.podium.com/docs/verifying-webhook-signatures: hex, over TIMESTAMP.BODY, in milliseconds
    at = b"%d663" % NOW
    return [
        (b"podium-timestamp", at),
        (b"podium-signature", digest(at + b"." + body).hex().encode()),
    ]


ZENDESK_BODY = json.dumps(
    {
        "type": "zen:event-type:user.active_changed",
        "account_id": 12514403,
        "id": "2b24ef10-19d4-4740-93cf-8f98ec4776c0",
        "time": "2099-07-04T05:33:18Z",
        "subject": "zen:user:6596848315901",
        "detail": {"id": "6596848315901", "role": "end-user"},
    }
).encode()
PODIUM_BODY = (
    b'{"data":{"bar":"apples","foo":"1"},'
    b'"metadata":{"event_type":"test.event","version":"2021.04.01"}}'
)

STRANGERS = {
    "zendesk": Stranger(
        """
        Name = "zendesk"
        Scheme = "Hmac"
        Header = "X-Zendesk-Webhook-Signature"
        Encoding = "Base64"
        SignedContent = "{timestamp}{body}"
        Timestamp = "X-Zendesk-Webhook-Signature-Timestamp"
        Id = "/id"
        Subject = "/subject"
        Data = "/detail"
        """,
        ZENDESK_BODY,
        zendesk,
        Genuine(
            "2b24ef10-19d4-4740-93cf-8f98ec4776c0",
            NOW,
            "zen:event-type:user.active_changed",
            "zen:user:6596848315901",
        ),
    ),
    "podium": Stranger(
        """
        Name = "podium"
        Scheme = "Hmac"
        Header = "Podium-Signature"
        SignedContent = "{timestamp}.{body}"
        Timestamp = "Podium-Timestamp"
        Type = "/metadata/event_type"
        Data = "/data"
        """,
        PODIUM_BODY,
        podium,
        Genuine(f"sha256-{hashlib.sha256(PODIUM_BODY).hexdigest()}", NOW, "test.event", None),
    ),
}


Verify = Callable[[Headers, bytes, float], Genuine | Rejected]


def verifier(stranger: Stranger) -> Verify:
    """Return what a receiver with the stranger's settings decides at a time."""
    source = {**tomllib.loads(stranger.settings), "Secrets": [SECRET]}
    mapping = {"Webhooks:Secret": "whsec_" + base64.b64encode(digest(b"other")).decode()}
    (options,) = Settings.from_mapping({**mapping, "Sources": [source]}, standalone=True).sources
    scheme, keys = Scheme.of(options), Keys.of(options)

    def verify(headers: Headers, body: bytes, now: float) -> Genuine | Rejected:
        return scheme.verify(headers, body, now=now, keys=keys, tolerance=options.tolerance_seconds)

    return verify


def flipped(text: bytes) -> Iterator[bytes]:
    """Yield ``text`` with each of its bits changed."""
    for position in range(len(text) * 8):
        changed = bytearray(text)
        changed[position // 8] ^= 1 << position % 8
        yield bytes(changed)


@pytest.mark.parametrize("name", STRANGERS)
def test_settings_from_its_documentation_verify_what_a_sender_signs(name: str) -> None:
    stranger = STRANGERS[name]

    verify = verifier(stranger)

    assert len(stranger.settings.strip().splitlines()) < 20
    for late in (0, 300, -300):
        found = verify(stranger.sign(stranger.body), stranger.body, NOW + late)
        assert found == stranger.expected


@pytest.mark.parametrize("name", STRANGERS)
def test_nothing_that_was_changed_passes(name: str) -> None:
    stranger = STRANGERS[name]
    headers, body = stranger.sign(stranger.body), stranger.body
    verify = verifier(stranger)
    assert isinstance(verify(headers, body, NOW), Genuine)

    tried = 0
    for index, (field, value) in enumerate(headers):
        for changed in flipped(value):
            sent = [*headers[:index], (field, changed), *headers[index + 1 :]]
            assert isinstance(verify(sent, body, NOW), Rejected), (field, changed)
            tried += 1
    for changed in flipped(body):
        assert isinstance(verify(headers, changed, NOW), Rejected), changed
        tried += 1
    for now in (NOW + 302, NOW - 302):
        assert isinstance(verify(headers, body, now), Rejected)
    assert tried > 200
