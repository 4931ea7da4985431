"""Six senders other than the upstream; they sign without the package's own code.

Standard Webhooks, Svix and Stripe sign with their own libraries. GitHub and Shopify publish no
library for Python: their documented formulas are written out here. Paddle is the sender of which
the package knows nothing: the settings of Scheme Hmac describe it.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import attrs
from standardwebhooks import Webhook as StandardWebhook
from svix.webhooks import Webhook as SvixWebhook

from sdk_trio.config.fields import HmacAlgorithm, HmacEncoding, SourceScheme
from sdk_trio.config.options.sources import SourceOptions
from sdk_trio.config.secret import Secret

Headers = dict[str, str]
Sign = Callable[[str, str, int, str, bytes], Headers]

WHSEC = "whsec_" + base64.b64encode(hashlib.sha256(b"standard").digest()).decode()
SVIX = "whsec_" + base64.b64encode(hashlib.sha256(b"svix").digest()).decode()
STRIPE = "whsec_" + hashlib.sha256(b"stripe").hexdigest()
GITHUB = hashlib.sha256(b"github").hexdigest()
SHOPIFY = "shpss_" + hashlib.sha256(b"shopify").hexdigest()[:32]
PADDLE = "pdl_ntfset_" + hashlib.sha256(b"paddle").hexdigest()


def _standard(secret: str, webhook_id: str, at: int, event_type: str, body: bytes) -> Headers:
    moment = datetime.fromtimestamp(at, UTC)
    signature = StandardWebhook(secret).sign(webhook_id, moment, body.decode())
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(at),
        "webhook-signature": signature,
    }


def _svix(secret: str, webhook_id: str, at: int, event_type: str, body: bytes) -> Headers:
    moment = datetime.fromtimestamp(at, UTC)
    signature = SvixWebhook(secret).sign(webhook_id, moment, body.decode())
    return {"svix-id": webhook_id, "svix-timestamp": str(at), "svix-signature": signature}


def _stripe(secret: str, webhook_id: str, at: int, event_type: str, body: bytes) -> Headers:
    # Imported here: it takes half a second.
    from stripe import WebhookSignature

    header = WebhookSignature.generate_signature_header(body.decode(), secret, timestamp=at)
    return {"Stripe-Signature": header}


def _github(secret: str, webhook_id: str, at: int, event_type: str, body: bytes) -> Headers:
    signature = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    return {
        "X-GitHub-Event": event_type,
        "X-GitHub-Delivery": webhook_id,
        "X-Hub-Signature-256": f"sha256={signature}",
    }


def _shopify(secret: str, webhook_id: str, at: int, event_type: str, body: bytes) -> Headers:
    digest = hmac.new(secret.encode(), body, hashlib.sha256).digest()
    return {
        "X-Shopify-Topic": event_type,
        "X-Shopify-Webhook-Id": webhook_id,
        "X-Shopify-Hmac-Sha256": base64.b64encode(digest).decode(),
    }


def _paddle(secret: str, webhook_id: str, at: int, event_type: str, body: bytes) -> Headers:
    content = f"{at}:{body.decode()}".encode()
    signature = hmac.new(secret.encode(), content, hashlib.sha256).hexdigest()
    return {"Paddle-Signature": f"ts={at};h1={signature}"}


@attrs.frozen
class Sender:
    """One sender: the source that receives it, and how it makes a delivery."""

    options: SourceOptions
    sign: Sign
    type: str
    envelope: Callable[[str, str, int], dict[str, Any]]
    signs_timestamp: bool = True

    @property
    def name(self) -> str:
        """The name of the source."""
        return self.options.name

    @property
    def secret(self) -> str:
        """The first secret of the source."""
        return self.options.secrets[0].reveal()

    def body(self, webhook_id: str, number: int = 0) -> bytes:
        """Return a body of the sender."""
        return json.dumps(self.envelope(webhook_id, self.type, number)).encode()

    def headers(self, webhook_id: str, at: int, body: bytes, secret: str | None = None) -> Headers:
        """Return the headers of a delivery, signed now or with another secret."""
        signed = self.sign(secret or self.secret, webhook_id, at, self.type, body)
        return {"content-type": "application/json", **signed}


def as_asgi(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as a server passes them on."""
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def _of(name: str, scheme: SourceScheme, secret: str, **settings: Any) -> SourceOptions:
    return SourceOptions(name=name, scheme=scheme, secrets=(Secret(secret),), **settings)


SENDERS = (
    Sender(
        _of("ai", SourceScheme.STANDARD_WEBHOOKS, WHSEC),
        _standard,
        "response.completed",
        lambda _, kind, number: {"type": kind, "data": {"id": f"resp_{number}"}},
    ),
    Sender(
        _of("mail", SourceScheme.SVIX, SVIX),
        _svix,
        "email.delivered",
        lambda _, kind, number: {"type": kind, "data": {"id": f"mail_{number}"}},
    ),
    Sender(
        _of("stripe", SourceScheme.STRIPE, STRIPE),
        _stripe,
        "invoice.paid",
        lambda webhook_id, kind, number: {
            "id": webhook_id,
            "type": kind,
            "data": {"object": {"id": f"in_{number}", "amount_paid": number}},
        },
    ),
    Sender(
        _of("github", SourceScheme.GITHUB, GITHUB),
        _github,
        "push",
        lambda _, kind, number: {"ref": "refs/heads/main", "number": number},
        signs_timestamp=False,
    ),
    Sender(
        _of("shop", SourceScheme.SHOPIFY, SHOPIFY),
        _shopify,
        "orders/create",
        lambda _, kind, number: {"id": 1000 + number, "email": "a@example.com"},
        signs_timestamp=False,
    ),
    Sender(
        _of(
            "paddle",
            SourceScheme.HMAC,
            PADDLE,
            header="Paddle-Signature",
            prefix="h1=",
            signed_content="{timestamp}:{body}",
            timestamp="Paddle-Signature:ts",
            id="/event_id",
            type="/event_type",
            subject="/data/id",
            data="/data",
            algorithm=HmacAlgorithm.SHA256,
            encoding=HmacEncoding.HEX,
        ),
        _paddle,
        "transaction.completed",
        lambda webhook_id, kind, number: {
            "event_id": webhook_id,
            "event_type": kind,
            "data": {"id": f"txn_{number}"},
        },
    ),
)

BY_NAME = {sender.name: sender for sender in SENDERS}


def settings_of(senders: tuple[Sender, ...] = SENDERS) -> list[dict[str, Any]]:
    """Return the settings of the sources of these senders, as a file has them."""
    return [
        {
            key: value
            for key, value in {
                "Name": each.name,
                "Scheme": each.options.scheme.value,
                "Secrets": [each.secret],
                "Header": each.options.header,
                "Prefix": each.options.prefix,
                "SignedContent": each.options.signed_content,
                "Timestamp": each.options.timestamp,
                "Id": each.options.id,
                "Type": each.options.type,
                "Subject": each.options.subject,
                "Data": each.options.data,
            }.items()
            if value is not None
        }
        for each in senders
    ]
