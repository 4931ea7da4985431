"""The test simulator: post signed samples to this application's own endpoint.

It signs for every caller, so it answers only this machine. It never signs with a secret that
another installation may verify with, because a returned signature could be used there.
"""

import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import msgspec
import trio

from ..base.clock import wall
from ..base.http import PASSED_ON, DirectRequest, Receive
from ..base.logs import get_logger
from ..base.public_addresses import host_name, is_loopback
from ..config import Settings
from ..events.samples import UnknownEventTypeError, sample_body
from .answers import METHOD_NOT_ALLOWED, NOT_FOUND, TOO_LARGE, UNSUPPORTED_MEDIA, Answer
from .signed_request import (
    SIMULATION_HEADER,
    DeliveryFailedError,
    own_url,
    post,
    sign_body,
    simulation_mark,
    simulation_secret,
)

_log = get_logger("webhooks")

PREFIX = "/test/webhook/simulate/"

_UNABLE = (
    "the simulator has no secret of its own, and must not sign with one that another installation "
    "may verify with: name a variable in Sdk:Simulator:SecretEnvVar"
)


def refusal(request: DirectRequest) -> str | None:
    """Return why the simulator must not answer a request, or None. Pure.

    A page of another site can make a browser on this machine send requests, and can point its own
    host name to a loopback address (DNS rebinding): Origin and Host reveal both.
    """
    if not _is_here(request.client):
        return "it comes from another machine"
    headers: dict[bytes, bytes] = dict(request.headers)
    if not PASSED_ON.isdisjoint(headers):
        return "a proxy has forwarded it"
    host = headers.get(b"host", b"").decode("latin-1")
    if not is_loopback(host_name(host)):
        return "its Host is not a name of this machine: use localhost or 127.0.0.1"
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
        return "its Origin is another site"
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return "a page of another site sent it"
    return None


class Simulator:
    """Answers ``POST /test/webhook/simulate/{eventType}``; mapped in Development only.

    An optional JSON object as the request's body is merged into the sample's ``data``. The answer
    holds the delivery and the receiver's answer to it: ``{eventType, webhookId, timestamp,
    signature, targetUrl, status, body}``. ``address`` is the started address of the receiver.

    Requests of other machines and other sites' pages are refused, and so is signing with a secret
    that was not made for tests.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = wall) -> None:
        self.settings = settings
        self._clock = clock
        self.address = ""

    def serves(self, path: str) -> bool:
        """Return whether a request for this path is for the simulator."""
        return path.startswith(PREFIX)

    async def respond(self, request: DirectRequest) -> Answer:
        """Return the answer to one request below the simulator's path."""
        refused = _refuse(request)
        if refused is not None:
            await trio.lowlevel.checkpoint()
            return refused
        body = await self._read(request.receive)
        event_type = unquote(request.path.removeprefix(PREFIX))
        if request.method != "POST":
            return METHOD_NOT_ALLOWED
        if not event_type:
            return NOT_FOUND
        if body is None:
            return TOO_LARGE
        try:
            # msgspec is stricter than json: it refuses values that no JSON can hold, such as NaN,
            # before they are merged and sent.
            overrides = msgspec.json.decode(body) if body.strip() else {}
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            return _json(400, {"error": f"the body is not JSON: {error}"})
        if not isinstance(overrides, dict):
            return _json(400, {"error": "the body must be a JSON object: it is merged into data"})
        try:
            return await self.simulate(event_type, overrides)
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

    async def simulate(self, event_type: str, overrides: dict[str, Any]) -> Answer:
        """Post one signed sample to the receiver and return the answer for the caller.

        Args:
            event_type: the type of the sample.
            overrides: merged into its ``data``.

        Raises:
            UnknownEventTypeError: there is no sample of the type.
            RecursionError: ``overrides`` is nested too deeply.
            DeliveryFailedError: the receiver gave no answer.
        """
        webhooks = self.settings.webhooks
        now = self._clock()
        webhook_id = f"msg_{uuid.uuid4().hex}"
        body = sample_body(
            event_type, now=datetime.fromtimestamp(now, UTC), overrides=overrides, seed=webhook_id
        )
        secret, mark = simulation_secret(self.settings), simulation_mark(self.settings)
        if secret is None or mark is None:
            await trio.lowlevel.checkpoint()
            return _json(409, {"error": _UNABLE})
        signed = sign_body(
            body,
            secret=secret,
            webhook_id=webhook_id,
            timestamp=int(now),
            derivation=webhooks.key_derivation,
        )
        url = own_url(self.address, webhooks.path)
        # The mark makes it count as a delivery over HTTPS from an allowed address, although it may
        # be neither: TLS may end at a proxy.
        posted = await post(
            url,
            signed,
            ca_file=self.settings.server.cert_file,
            headers={SIMULATION_HEADER: mark.decode()},
        )
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


def _refuse(request: DirectRequest) -> Answer | None:
    reason = refusal(request)
    if reason is not None:
        client = request.client
        _log.warning(
            "webhook.simulation_refused", reason=reason, address=client[0] if client else None
        )
        # Other machines get the answer of a path that does not exist.
        return _json(403, {"error": f"refused: {reason}"}) if _is_here(client) else NOT_FOUND
    for name, value in request.headers:
        media = value.partition(b";")[0].strip().lower()
        if name == b"content-type" and media and not _is_json(media):
            # The media types of HTML forms are refused, because any site's page may send these
            # without asking the browser first (CORS).
            return UNSUPPORTED_MEDIA
    return None


def _is_here(client: tuple[str, int] | None) -> bool:
    return not client or not client[0] or is_loopback(client[0])


def _is_json(media: bytes) -> bool:
    return media == b"application/json" or media.endswith(b"+json")


def _json(status: int, document: dict[str, object]) -> Answer:
    return Answer.of(status, json.dumps(document).encode())
