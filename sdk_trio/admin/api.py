"""The API of events, ``/api/events``: listings, one event, and replay."""

import json
from collections.abc import Sequence
from typing import Any

import attrs

from ..base.http import Send
from ..base.logs import get_logger
from ..errors import UnknownTenantError
from ..records.deliveries import DeliveryState, listed, shown
from ..storage.ports import Inbox
from ..storage.replay import ambiguity, find_chosen, find_meant, find_named, put_back, replay_rows
from .queries import (
    LARGEST_REPLAY,
    BadQueryError,
    ListQuery,
    ReplayOrder,
    link_header,
    page_of,
    reads_oldest_first,
)
from .status import RunningProgram

#: Headers of every answer: a browser may not store it, guess its type, or run it.
_ALWAYS = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)

_log = get_logger("admin")

EVENTS = "/api/events"

#: The actor of orders that name none: all holders of the token look the same.
USUAL_ACTOR = "admin token"


@attrs.frozen
class Reply:
    """One answer: its status, its body and its type."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    extra: Sequence[tuple[bytes, bytes]] = ()

    async def send(self, send: Send) -> None:
        """Send it as ASGI messages."""
        headers = [
            (b"content-type", self.content_type),
            (b"content-length", str(len(self.body)).encode()),
            *_ALWAYS,
            *self.extra,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def document(status: int, value: Any, *extra: tuple[bytes, bytes]) -> Reply:
    """Return a JSON answer."""
    return Reply(status, json.dumps(value).encode() + b"\n", extra=extra)


def problem(status: int, reason: str, *extra: tuple[bytes, bytes]) -> Reply:
    """Return a JSON answer with the error and its remedy."""
    return document(status, {"error": reason}, *extra)


class EventAnswerer:
    """The calls of the events API: it reads the inbox and puts events back into the queue."""

    def __init__(self, observed: RunningProgram) -> None:
        self._observed = observed

    async def list(self, query: ListQuery) -> Reply:
        """Return an array of events without bodies, with the fields of ``events list``.

        The ``Link`` header leads to the pages beside it.

        Raises:
            BadQueryError: there is no such tenant.
        """
        tenant_id = None
        if query.tenant is not None:
            try:
                tenant_id = await self._observed.tenant_id(query.tenant)
            except UnknownTenantError as error:
                raise BadQueryError(f"tenant: {error}") from None
        found = await self._inbox.find(
            type=query.type,
            state=query.state,
            since=query.since,
            until=query.until,
            after_sequence=query.after,
            before_sequence=query.before,
            subject=query.subject,
            tenant_id=tenant_id,
            oldest_first=reads_oldest_first(query),
            limit=query.limit + 1,
        )
        page = page_of(query, found)
        extra = ((b"link", link_header(EVENTS, page.links).encode("ascii")),) if page.links else ()
        return document(200, [listed(record) for record in page.records], *extra)

    async def show(self, webhook_id: str, *, body: bool) -> Reply:
        """Return one event with its failed runs, as ``events show``; 404 without one.

        409 where several senders use the id; the answer names their keys.
        """
        inbox = self._inbox
        found = await find_meant(inbox, webhook_id)
        if not found:
            return problem(404, "there is no such event in the inbox")
        if len(found) > 1:
            return problem(409, ambiguity(found))
        (record,) = found
        attempts, evidence = await inbox.attempts(record.key), await inbox.evidence(record.key)
        return document(200, shown(record, attempts, evidence, body=body))

    async def replay(self, order: ReplayOrder, *, address: str | None) -> Reply:
        """Put events back and wake the workers; if it is cancelled, finished transactions stay.

        The log has the ids, the caller's ``address``, and the ``actor`` that the caller names.
        There is one token, so nothing proves that name.
        """
        inbox = self._inbox
        more = False
        if order.state is None:
            candidates = await find_named(inbox, order.ids or ())
        else:
            state = DeliveryState(order.state)
            candidates = await find_chosen(inbox, state, type=order.type, limit=LARGEST_REPLAY + 1)
            more = len(candidates) > LARGEST_REPLAY
            candidates = candidates[:LARGEST_REPLAY]
        possible = [candidate.key for candidate in candidates if candidate.reason is None]
        actor = order.actor or USUAL_ACTOR
        try:
            replayed = await put_back(inbox, possible)
        except BaseException:
            # Some of them may have been put back.
            _log.warning(
                "admin.replay_interrupted", actor=actor, address=address, webhook_ids=possible
            )
            raise
        finally:
            # The workers notice changes of other processes only, and this one made these.
            self._observed.wake()
        done = [key for key in possible if key in replayed]
        _log.info(
            "admin.replayed", actor=actor, address=address, events=len(done), webhook_ids=done
        )
        rows = replay_rows(candidates, replayed)
        return document(200, {"events": rows, "replayed": len(replayed), "more": more})

    @property
    def _inbox(self) -> Inbox:
        return self._observed.stores()[0]
