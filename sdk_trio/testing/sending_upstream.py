"""An upstream in memory that sends webhooks as the real one does, for tests of an outage.

It has records, lists them, and sends their events. An event is attempted ten times. After ten
failed events in a row it disables the endpoint and marks its pending events as skipped. A change
while the endpoint is disabled leaves no delivery behind::

    upstream = SendingUpstream(secret=SECRET)
    runtime = sdk_trio.Runtime(settings, handlers, client=upstream.client())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(upstream.run)
        started = await nursery.start(runtime.run)
        upstream.organization.target = f"{started.webhook_url}/hooks/sdk"
        upstream.change("orders", sample("order.paid", now=datetime.now(UTC))["data"], "order.paid")

docs/reference/catch-up.md has a program of an outage.
"""

import json
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import parse_qs, unquote

import attrs
import httpx
import msgspec
import trio

from ..base.clock import wall
from ..client.client import Client
from ..client.pipeline import RequestSources
from ..config import Secret, Settings
from ..events.lifecycle import KINDS, seconds_of
from ..webhooks.signed_request import DeliveryFailedError, post, sign_body
from .simulation.sender import ATTEMPTS, FAILED_EVENTS, wait_after

#: Deliveries that are in progress at a time.
DELIVERING_AT_ONCE: Final = 8

BASE_PATH: Final = "/v1"

#: The token of the only organization, if none are named.
DEFAULT_ACCESS: Final = "a-token-for-tests"

_PATHS: Final = {f"/{kind.name.replace('_', '-')}/": kind.name for kind in KINDS}


@attrs.define(eq=False)
class SentEvent:
    """An event that the upstream has recorded, with the time and result of each attempt.

    ``succeeded`` is None until the first attempt. ``skipped``: the endpoint was disabled before it
    was delivered.
    """

    id: str
    type: str
    body: bytes = attrs.field(repr=False)
    created_at: float
    attempts: list[tuple[float, bool]] = attrs.Factory(list)
    succeeded: bool | None = None
    skipped: bool = False
    pending: bool = True


@attrs.define(eq=False)
class UpstreamAccount:
    """One organization of the upstream: its records by list and id, its endpoint, and its events.

    ``skipped_unrecorded`` counts events that happened while the endpoint was disabled.
    """

    id: str
    target: str | None = None
    secret: Secret | str = ""
    enabled: bool = True
    subscribed: tuple[str, ...] | None = None
    failed_in_a_row: int = 0
    skipped_unrecorded: int = 0
    records: dict[str, dict[str, dict[str, Any]]] = attrs.Factory(
        lambda: {kind.name: {} for kind in KINDS}
    )
    events: dict[str, SentEvent] = attrs.Factory(dict)

    @property
    def endpoint_id(self) -> str:
        """The id of its webhook endpoint."""
        return f"ep_{self.id}"


#: Posts an event, and returns whether the receiver acknowledged it.
Deliver = Callable[[UpstreamAccount, SentEvent], Awaitable[bool]]


class SendingUpstream(httpx.AsyncBaseTransport):
    """An upstream with records, lists and a sender of webhooks.

    Needs :meth:`run` in a separate task.

    Args:
        secret: signs the deliveries of the first organization.
        organizations: their ids by access token; default: one.
        pace: multiplies every wait of the sender; 0.001 makes an hour 3.6 seconds.
        clock: returns Unix seconds.
        deliver: delivers an event instead of a post to the organization's ``target``.
        seed: of the jitter.
    """

    def __init__(
        self,
        *,
        secret: Secret | str = "",
        organizations: Mapping[str, str] | None = None,
        pace: float = 1.0,
        clock: Callable[[], float] = wall,
        deliver: Deliver | None = None,
        seed: int = 0,
    ) -> None:
        named = {DEFAULT_ACCESS: "org_1"} if organizations is None else organizations
        self.organizations: dict[str, UpstreamAccount] = {
            token: UpstreamAccount(id, secret=secret) for token, id in named.items()
        }
        self._pace = pace
        self._clock = clock
        self._deliver = deliver or self._post
        self._dice = random.Random(seed)
        self._limit = trio.CapacityLimiter(DELIVERING_AT_ONCE)
        self._send, self._receive = trio.open_memory_channel[
            tuple[UpstreamAccount, SentEvent, bool]
        ](100_000)
        #: All calls as method and path, in order.
        self.calls: list[tuple[str, str]] = []

    @property
    def organization(self) -> UpstreamAccount:
        """The first organization."""
        return next(iter(self.organizations.values()))

    def client(self, overrides: Mapping[str, Any] | None = None) -> Client:
        """Return a client of the first organization; ``overrides`` are settings."""
        settings = Settings.from_mapping(
            {
                "Mode": "Custom",
                "CustomBaseUrl": "https://upstream.example",
                "BasePath": BASE_PATH,
                "AccessToken": next(iter(self.organizations)),
                **(overrides or {}),
            },
            receiver=False,
        )
        return self.client_for(settings)

    def client_for(self, settings: Settings) -> Client:
        """Return a client with the token of ``settings``; a runtime's ``client_factory``."""
        # Closed with each client, which must not close the upstream.
        transport = _Borrowed(self)
        return Client(settings, transport, sources=RequestSources(random=lambda: 0.0))

    # -- events at the upstream --------------------------------------------------------------

    def change(
        self,
        kind: str,
        record: Mapping[str, Any],
        *types: str,
        organization: UpstreamAccount | None = None,
    ) -> None:
        """Store the new state of a record, and send an event of each type.

        Args:
            kind: the list, such as ``orders``.
            record: with ``id``, ``created_at`` and ``modified_at``.
            types: of the events.
            organization: default: the first one.
        """
        owner = self.organization if organization is None else organization
        owner.records[kind][str(record["id"])] = dict(record)
        now = self._clock()
        for event_type in types:
            if owner.subscribed is not None and event_type not in owner.subscribed:
                continue
            if not owner.enabled:
                owner.skipped_unrecorded += 1
                continue
            body = msgspec.json.encode({"type": event_type, "timestamp": _iso(now), "data": record})
            event = SentEvent(str(uuid.uuid4()), event_type, body, now)
            owner.events[event.id] = event
            self._send.send_nowait((owner, event, False))

    def enable(self, organization: UpstreamAccount | None = None) -> None:
        """Enable the endpoint; nothing that was skipped is sent."""
        owner = self.organization if organization is None else organization
        owner.enabled, owner.failed_in_a_row = True, 0

    def set_pace(self, pace: float) -> None:
        """Multiply the sender's later waits by ``pace``."""
        self._pace = pace

    # -- the sender --------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send events until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            with self._receive.clone() as events:
                async for owner, event, once in events:
                    nursery.start_soon(self._send_event, owner, event, once)

    async def _send_event(self, owner: UpstreamAccount, event: SentEvent, once: bool) -> None:
        """Attempt an event until it is delivered, given up or skipped; ``once``: redelivery."""
        await trio.lowlevel.checkpoint()
        for attempt in range(1, 2 if once else ATTEMPTS + 1):
            if event.skipped and not once:
                return  # the endpoint may be enabled again by now
            if not owner.enabled:
                event.skipped, event.pending = True, False
                return
            async with self._limit:
                succeeded = await self._deliver(owner, event)
            event.attempts.append((self._clock(), succeeded))
            event.succeeded = succeeded or bool(event.succeeded)
            if succeeded:
                owner.failed_in_a_row, event.pending = 0, False
                return
            if attempt < ATTEMPTS and not once:
                await trio.sleep(wait_after(attempt, self._dice) * self._pace)
        if event.skipped and not once:
            return
        event.pending = False
        owner.failed_in_a_row += 1
        if owner.failed_in_a_row >= FAILED_EVENTS:
            self._disable(owner)

    def _disable(self, owner: UpstreamAccount) -> None:
        owner.enabled = False
        for event in owner.events.values():
            if event.pending:
                event.skipped, event.pending = True, False

    async def _post(self, owner: UpstreamAccount, event: SentEvent) -> bool:
        await trio.lowlevel.checkpoint()
        if owner.target is None:
            return False
        signed = sign_body(
            event.body, secret=owner.secret, webhook_id=event.id, timestamp=int(self._clock())
        )
        try:
            return 200 <= (await post(owner.target, signed)).status < 300
        except DeliveryFailedError:
            return False

    # -- the API -----------------------------------------------------------------------------

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request of a client."""
        await trio.lowlevel.checkpoint()
        body = await request.aread()
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        target = request.url.raw_path.decode("ascii")
        status, document = self.answer(request.method, target, token, body)
        return httpx.Response(status, json=document)

    def answer(self, method: str, target: str, token: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON of an answer.

        Args:
            method: of the request.
            target: path and query.
            token: the access token.
            body: of the request.
        """
        path, _, text = target.partition("?")
        path, query = unquote(path).removeprefix(BASE_PATH), parse_qs(text)
        self.calls.append((method, path))
        owner = self.organizations.get(token)
        if owner is None:
            return 401, {"error": "Unauthorized", "detail": "unknown token"}
        if method == "GET" and path in _PATHS:
            return 200, _page(self._sorted(owner, _PATHS[path], query), query)
        match method, path.strip("/").split("/"):
            case "GET", ["webhooks", "endpoints"]:
                return 200, _page([self._endpoint(owner)], query)
            case "PATCH", ["webhooks", "endpoints", owner.endpoint_id]:
                if json.loads(body).get("enabled") is True:
                    self.enable(owner)
                return 200, self._endpoint(owner)
            case "GET", ["webhooks", "deliveries"]:
                return 200, _page(list(_deliveries(owner, query)), query)
            case "POST", ["webhooks", "events", name, "redeliver"] if name in owner.events:
                self._send.send_nowait((owner, owner.events[name], True))
                return 202, None
        return 404, {"error": "ResourceNotFound", "detail": "Not found"}

    def _sorted(
        self, owner: UpstreamAccount, kind: str, query: Mapping[str, Sequence[str]]
    ) -> list[Mapping[str, Any]]:
        sorting = query.get("sorting", ["-created_at"])[0]
        field, is_falling = sorting.removeprefix("-"), sorting.startswith("-")
        rows = list(owner.records[kind].values())
        # Records without a value come last, in either direction.
        rows.sort(key=lambda row: str(row.get(field) or ""), reverse=is_falling)
        return [row for row in rows if row.get(field)] + [row for row in rows if not row.get(field)]

    def _endpoint(self, owner: UpstreamAccount) -> dict[str, Any]:
        events = owner.subscribed or [name for kind in KINDS for name in kind.types]
        return {
            "id": owner.endpoint_id,
            "url": owner.target or "https://receiver.example/hooks/sdk",
            "enabled": owner.enabled,
            "events": list(events),
        }


class _Borrowed(httpx.AsyncBaseTransport):
    """The upstream as a transport that a client may close."""

    def __init__(self, upstream: SendingUpstream) -> None:
        self._upstream = upstream

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._upstream.handle_async_request(request)


def _deliveries(
    owner: UpstreamAccount, query: Mapping[str, Sequence[str]]
) -> Iterable[dict[str, Any]]:
    """Yield a delivery for each attempt, the newest first; the time filter excludes both ends."""
    start = seconds_of(query["start_timestamp"][0]) if "start_timestamp" in query else None
    end = seconds_of(query["end_timestamp"][0]) if "end_timestamp" in query else None
    rows = [(at, ok, event) for event in owner.events.values() for at, ok in event.attempts]
    for at, succeeded, event in sorted(rows, key=lambda row: row[0], reverse=True):
        if (start is None or start < at) and (end is None or at < end):
            yield {
                "id": f"{event.id}-{at}",
                "created_at": _iso(at),
                "succeeded": succeeded,
                "webhook_event": {
                    "id": event.id,
                    "type": event.type,
                    "succeeded": event.succeeded,
                    "skipped": event.skipped,
                    "is_archived": False,
                },
            }


def _page(rows: Sequence[Any], query: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    limit, number = int(query.get("limit", ["10"])[0]), int(query.get("page", ["1"])[0])
    return {
        "items": rows[(number - 1) * limit : number * limit],
        "pagination": {"total_count": len(rows), "max_page": -(-len(rows) // limit)},
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
