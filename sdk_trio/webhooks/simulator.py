"""The test simulator: posts signed samples to this application's own endpoint (spec 4.3)."""

import json
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import msgspec

from ..config import Settings
from ..logs import get_logger
from .answers import METHOD_NOT_ALLOWED, NOT_FOUND, TOO_LARGE, Answer
from .receiver import Receive, Scope, Send, send_early
from .sender import DeliveryFailedError, own_url, post, sign_body

_log = get_logger("webhooks")

PREFIX = "/test/webhook/simulate/"


class Simulator:
    """Answers ``POST /test/webhook/simulate/{eventType}``; mapped in Development only.

    An optional JSON object as the request's body is merged into the sample's ``data``. The answer
    says what was sent and what came back: ``{eventType, webhookId, timestamp, signature,
    targetUrl, status, body}``. ``address`` is the started address of the receiver.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self._clock = clock
        self.address = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI ``http`` request below the simulator's path."""
        answer = await self._answer(scope, receive)
        if answer is TOO_LARGE:
            await send_early(answer, receive, send)
        else:
            await answer.send(send)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        # Imported here: every start imports this module, and hardly any asks for a sample.
        from ..events.samples import UnknownEventTypeError

        body = await self._read(receive)
        event_type = unquote(scope["path"].removeprefix(PREFIX))
        if scope["method"] != "POST":
            return METHOD_NOT_ALLOWED
        if not event_type:
            return NOT_FOUND
        if body is None:
            return TOO_LARGE
        try:
            # Stricter than json: what could not be sent again, such as NaN, is refused here.
            overrides = msgspec.json.decode(body) if body.strip() else {}
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return _json(400, {"error": f"the body is no JSON: {error}"})
        if not isinstance(overrides, dict):
            return _json(400, {"error": "the body must be a JSON object: it is merged into data"})
        try:
            return await self._simulate(event_type, overrides)
        except UnknownEventTypeError as error:
            return _json(404, {"error": str(error)})
        except RecursionError:
            return _json(400, {"error": "the body is nested too deeply to be merged"})
        except DeliveryFailedError as error:
            return _json(502, {"error": str(error)})

    async def _read(self, receive: Receive) -> bytes | None:
        body: bytes = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self.settings.webhooks.max_payload_bytes:
                return None
            if not message.get("more_body", False):
                return body

    async def _simulate(self, event_type: str, overrides: dict[str, Any]) -> Answer:
        from ..events.samples import sample_body

        webhooks = self.settings.webhooks
        now = self._clock()
        webhook_id = f"msg_{uuid.uuid4().hex}"
        signed = sign_body(
            sample_body(
                event_type,
                now=datetime.fromtimestamp(now, UTC),
                overrides=overrides,
                seed=webhook_id,
            ),
            secret=webhooks.all_secrets[0],
            webhook_id=webhook_id,
            timestamp=int(now),
            derivation=webhooks.key_derivation,
        )
        url = own_url(self.address, webhooks.path)
        posted = await post(url, signed, ca_file=self.settings.server.cert_file)
        _log.info("webhook.simulated", type=event_type, webhook_id=webhook_id, status=posted.status)
        return _json(
            200,
            {
                "eventType": event_type,
                "webhookId": webhook_id,
                "timestamp": signed.timestamp,
                "signature": signed.signature,
                "targetUrl": url,
                "status": posted.status,
                "body": posted.body.decode("utf-8", "replace"),
            },
        )


def _json(status: int, document: dict[str, object]) -> Answer:
    return Answer.of(status, json.dumps(document).encode())
