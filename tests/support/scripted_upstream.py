"""An upstream on loopback that tests script: orders, webhook endpoints, deliveries, redelivery.

Its webhook routes behave like the real ones: a delivery for each attempt, newest first; a time
filter that excludes both ends; the event's id as ``webhook-id``; redeliveries that are scheduled;
events to a disabled endpoint that are skipped. ``sdk_trio.testing.SendingUpstream`` retries, and
disables an endpoint, as the real one does.
"""

import json
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import attrs
import trio

from sdk_trio.config import Settings
from sdk_trio.testing import sign_delivery
from support.deliveries import SECRET
from support.upstreams import Upstream, http1_answer, serving
from support.wire import Wire

TOKEN = "polar_oat_not-a-real-token"


@attrs.define
class Sent:
    """One event of the upstream and the times of the attempts to deliver it."""

    id: str
    type: str = "order.paid"
    endpoint: str = "ep_here"
    succeeded: bool | None = None
    archived: bool = False
    skipped: bool = False
    attempts: list = attrs.Factory(list)

    def deliveries(self):
        for number, (at, succeeded) in enumerate(self.attempts):
            event = {"id": self.id, "type": self.type, "succeeded": self.succeeded}
            event["skipped"] = self.skipped
            yield {
                "id": f"{self.id}-{number}",
                "created_at": _iso(at),
                "succeeded": succeeded,
                "webhook_event": {**event, "is_archived": self.archived, "payload": None},
            }


class ScriptedUpstream(Upstream):
    """An upstream; ``fails(method, path)`` may return an error status."""

    def __init__(self):
        super().__init__()
        self.target = ""
        self.sent = {}
        self.endpoints = [{"id": "ep_here", "url": "https://shop.example/hooks/sdk"}]
        self.orders = [{"id": f"ord_{n}", "status": "paid", "amount": n} for n in range(1, 8)]
        self.export = b"email\r\nada@shop.example\r\n"
        self.asked = []
        self.calls = []
        self.fails = lambda method, path: None
        self.redelivers = True
        self.redelivering = 0
        self.nursery = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def missed(self, *ids, ago=60.0, succeeded=None, **fields):
        """Add events that were sent ``ago`` seconds ago, a second apart, without a response."""
        for offset, name in enumerate(ids):
            at = time.time() - ago + offset
            self.sent[name] = Sent(name, succeeded=succeeded, **fields)
            self.sent[name].attempts.append((at, bool(succeeded)))

    async def deliver(self, name, **fields):
        """Send an event now; return the receiver's status, None without one."""
        sent = self.sent.setdefault(name, Sent(name, **fields))
        if any(e["id"] == sent.endpoint and e.get("enabled") is False for e in self.endpoints):
            sent.skipped = True
            return None
        signed = sign_delivery(sent.type, {"id": name}, secret=SECRET, webhook_id=name)
        try:
            with await Wire.connect(self.target) as wire:
                status = (await wire.post(signed)).status
        except OSError:
            status = None
        sent.succeeded = status == 200 or sent.succeeded
        sent.attempts.append((time.time(), status == 200))
        return status

    async def handle(self, stream):
        await answer_requests(stream, self.answer)

    def answer(self, method, target, headers, body):
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        path = parts.path.removeprefix("/v1")
        self.calls.append((method, path, query))
        self.requests += 1
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Unauthorized", "detail": "who are you?"}
        if status := self.fails(method, path):
            return status, {"error": "Scripted", "detail": "scripted to fail"}
        match method, path.split("/")[1:]:
            case "GET", ["orders", ""]:
                return 200, _page(self.orders, query)
            case "GET", ["orders", "export"]:
                return 200, self.export
            case "GET", ["orders", name]:
                found = [order for order in self.orders if order["id"] == name]
                return (200, found[0]) if found else (404, {"error": "ResourceNotFound"})
            case "POST", ["customers", ""]:
                return 201, {"id": "cus_1", **json.loads(body)}
            case "GET", ["webhooks", "endpoints"]:
                return 200, _page(self.endpoints, query)
            case "GET", ["webhooks", "deliveries"]:
                return 200, _page(self.listed(query), query)
            case "POST", ["webhooks", "events", name, "redeliver"]:
                return self.redeliver(name)
        return 404, {"detail": "Not Found"}

    def listed(self, query):
        rows = []
        for sent in self.sent.values():
            if sent.endpoint in query["endpoint_id"]:
                rows += sent.deliveries()
        start, end = query["start_timestamp"][0], query["end_timestamp"][0]
        rows = [row for row in rows if _seconds(start) < _seconds(row["created_at"])]
        rows = [row for row in rows if _seconds(row["created_at"]) < _seconds(end)]
        return sorted(rows, key=lambda row: row["created_at"], reverse=True)

    def redeliver(self, name):
        self.asked.append(name)
        if name not in self.sent:
            return 404, {"error": "ResourceNotFound"}
        if self.redelivers:
            self.redelivering += 1
            self.nursery.start_soon(self._redeliver, name)
        return 202, None

    async def _redeliver(self, name):
        while not self.target:
            await trio.sleep(0.005)
        await self.deliver(name)
        self.redelivering -= 1


async def answer_requests(stream, answer):
    """Answer HTTP/1.1 requests by ``answer(method, target, headers, body)``: status and document.

    The document is sent as JSON, bytes as CSV.
    """
    buffer = b""
    while True:
        while b"\r\n\r\n" not in buffer:
            received = await stream.receive_some(65_536)
            if not received:
                return
            buffer += received
        head, _, buffer = buffer.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}
        size = int(headers.get("content-length", 0))
        while len(buffer) < size:
            buffer += await stream.receive_some(65_536)
        body, buffer = buffer[:size], buffer[size:]
        method, target, _ = lines[0].split(" ")
        status, document = answer(method, target, headers, body)
        media, raw = b"text/csv", document
        if not isinstance(document, bytes):
            media = b"application/json"
            raw = b"" if document is None else json.dumps(document).encode()
        extra = b"content-type: %b\r\nx-request-id: req_7\r\n" % media
        await stream.send_all(http1_answer(raw, status=b"%d Some" % status, extra=extra))


@asynccontextmanager
async def scripted_upstream():
    """Serve an upstream for the length of the block."""
    upstream = ScriptedUpstream()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            upstream.nursery = nursery
            async with serving(upstream, upstream.handle):
                yield upstream
            nursery.cancel_scope.cancel()


def full_stack(upstream, **keys):
    """Return settings of a full stack with this upstream; keys as ``Webhooks__Path="/x"``."""
    mapping = {
        "Environment": "Development",
        "Mode": "Custom",
        "CustomBaseUrl": upstream.url,
        "AccessToken": TOKEN,
        "MaxRetries": 0,
        "Server:Bind": ["127.0.0.1:0"],
        "Admin:Enabled": False,
        "Storage:Backend": "Memory",
        "Webhooks:RequireHttps": False,
        "Webhooks:Secret": SECRET,
    }
    return Settings.from_mapping(mapping | {k.replace("__", ":"): v for k, v in keys.items()})


def _page(rows, query):
    limit, page = int(query.get("limit", ["10"])[0]), int(query.get("page", ["1"])[0])
    last = -(-len(rows) // limit)
    items = rows[(page - 1) * limit : page * limit]
    return {"items": items, "pagination": {"total_count": len(rows), "max_page": last}}


def _iso(seconds):
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _seconds(text):
    return datetime.fromisoformat(text).timestamp()
