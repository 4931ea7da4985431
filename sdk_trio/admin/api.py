"""The API of events, ``/api/events``: what its queries ask for, listings, one event, and replay."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode

import attrs
import msgspec

from ..base.http import Send
from ..base.logs import get_logger
from ..errors import UnknownTenantError
from ..records.deliveries import DeliveryRecord, DeliveryState, listed, shown
from ..storage.ports import Inbox
from ..storage.replay import ambiguity, find_chosen, find_meant, find_named, put_back, replay_rows
from .status import RunningProgram

#: The most events of one listing, and their number without ``limit``.
LARGEST_LIMIT = 500
USUAL_LIMIT = 50

#: The most events that one call puts back; the answer says when there are more.
LARGEST_REPLAY = 1000

#: The most characters of a name in the log.
LONGEST_ACTOR = 100

#: The greatest sequence that a store has.
LARGEST_SEQUENCE = 2**63 - 1

#: The forms of a moment: Unix seconds, or RFC 3339 with its offset from UTC. An unescaped plus sign
#: in a query arrives as a space, so both are accepted.
MOMENT = (
    r"^([0-9]{1,11}(\.[0-9]{1,6})?"
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?"
    r"(Z|[+ -][0-9]{2}:[0-9]{2}))$"
)

#: The latest moment that can be written in seconds.
LATEST_MOMENT = 99_999_999_999.0

_MAX_PARAMETERS = 20


class BadQueryError(ValueError):
    """A query or body that is not understood; the message names the part and the valid values."""


# A page has the ``limit`` events nearest to the given cursor, in whichever order they are shown, so
# that the order stays the same when paging forth and back. Cursors are sequences, which never
# change: events that arrive meanwhile shift no page.


@attrs.frozen
class ListQuery:
    """The filter and the order of ``GET /api/events``.

    ``tenant`` is an identifier or an id; ``since`` and ``until`` are Unix seconds, the latter not
    included; ``after`` and ``before`` are sequences that are not included either.
    """

    type: str | None = None
    state: DeliveryState | None = None
    tenant: str | None = None
    subject: str | None = None
    since: float | None = None
    until: float | None = None
    limit: int = USUAL_LIMIT
    after: int | None = None
    before: int | None = None
    order: Literal["newest", "oldest"] = "newest"


@attrs.frozen
class ReplayOrder:
    """The order of ``POST /api/events/replay``: events by id, or those of a state.

    ``actor`` is who orders it, for the log.
    """

    ids: list[str] | None = None
    state: Literal["dead", "parked", "retrying"] | None = None
    type: str | None = None
    actor: str | None = None


def parse_list(query: bytes) -> ListQuery:
    """Return what a listing is asked for.

    Raises:
        BadQueryError: a parameter is unknown, given twice, or has a value that it does not take.
    """
    given = _parameters(query, tuple(field.name for field in attrs.fields(ListQuery)))
    state, order = given.get("state"), given.get("order")
    if state is not None and state not in set(DeliveryState):
        raise BadQueryError(f"state takes one of {', '.join(DeliveryState)}")
    if order not in (None, "newest", "oldest"):
        raise BadQueryError("order takes newest or oldest")
    after = _number(given, "after", None, 0, LARGEST_SEQUENCE)
    before = _number(given, "before", None, 0, LARGEST_SEQUENCE)
    # A caller with ``after`` alone follows the inbox, and wants events in the order of arrival.
    usual = "newest" if after is None or before is not None else "oldest"
    return ListQuery(
        type=given.get("type"),
        state=None if state is None else DeliveryState(state),
        tenant=given.get("tenant"),
        subject=given.get("subject"),
        since=_moment(given, "since"),
        until=_moment(given, "until"),
        limit=_number(given, "limit", USUAL_LIMIT, 1, LARGEST_LIMIT) or USUAL_LIMIT,
        after=after,
        before=before,
        order="oldest" if (order or usual) == "oldest" else "newest",
    )


def parse_show(query: bytes) -> bool:
    """Return whether the body of an event is asked for.

    Raises:
        BadQueryError: a parameter is unknown or has a value that it does not take.
    """
    body = _parameters(query, ("body",)).get("body", "0")
    if body not in ("0", "1"):
        raise BadQueryError("body takes 0 or 1")
    return body == "1"


def parse_replay(body: bytes) -> ReplayOrder:
    """Return what is to be put back.

    Raises:
        BadQueryError: it is no JSON object of that form.
    """
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
        # A misspelt field would otherwise choose every event of a state.
        if unknown := given.keys() - {"ids", "state", "type", "actor"}:
            raise BadQueryError(
                f"the body takes ids, or state and type, and actor; not {min(unknown)}"
            )
        if None in given.values():
            raise BadQueryError("the body takes no null: leave the field out")
        order = msgspec.convert(given, ReplayOrder)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadQueryError(f"the body is not understood: {error}") from None
    if order.actor is not None and not 1 <= len(order.actor) <= LONGEST_ACTOR:
        raise BadQueryError(f"actor takes 1 to {LONGEST_ACTOR} characters")
    if (order.ids is None) == (order.state is None):
        raise BadQueryError("give ids, or a state (dead, parked or retrying); not both")
    if order.ids is not None and order.type is not None:
        raise BadQueryError("type chooses among a state; leave it out with ids")
    if order.ids is not None and not 1 <= len(order.ids) <= LARGEST_REPLAY:
        raise BadQueryError(f"ids takes 1 to {LARGEST_REPLAY} ids")
    return order


def _parameters(query: bytes, known: tuple[str, ...]) -> Mapping[str, str]:
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_PARAMETERS,
        )
    except ValueError:
        raise BadQueryError("the query is not understood") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            raise BadQueryError(f"the query takes {', '.join(known)}")
        if name in found:
            raise BadQueryError(f"{name} is given twice")
        found[name] = value
    return found


def _number(
    given: Mapping[str, str], name: str, usual: int | None, least: int, greatest: int
) -> int | None:
    text = given.get(name)
    if text is None:
        return usual
    if text.isascii() and text.isdigit() and len(text) <= len(str(greatest)):
        value = int(text)
        if least <= value <= greatest:
            return value
    raise BadQueryError(f"{name} takes a number from {least} to {greatest}")


def _moment(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name)
    if text is None:
        return None
    if re.fullmatch(MOMENT, text):
        try:
            given_at = (
                datetime.fromisoformat(text.replace(" ", "+")).timestamp()
                if "T" in text
                else float(text)
            )
        except (ValueError, OverflowError):
            pass
        else:
            # No event arrived outside of these bounds, and links cannot express other moments.
            return min(max(given_at, 0.0), LATEST_MOMENT)
    raise BadQueryError(
        f"{name} takes Unix seconds or a time such as 2026-01-31T12:00:00Z, with Z or its offset"
    )


@attrs.frozen
class PageOfEvents:
    """Some events in the order that was asked for; ``links`` are queries by their relation."""

    records: Sequence[DeliveryRecord]
    links: dict[str, str]


def reads_oldest_first(query: ListQuery) -> bool:
    """Return whether the store is to be read by rising sequence to find the page.

    It is read from the only cursor there is; without one, and between two, as it is shown.
    """
    if (query.after is None) == (query.before is None):
        return query.order == "oldest"
    return query.before is None


def page_of(query: ListQuery, found: Sequence[DeliveryRecord]) -> PageOfEvents:
    """Return the page of ``query``.

    Args:
        query: what was asked for.
        found: what the store holds of it, in the order of :func:`reads_oldest_first`; one event
            more than the limit, if there is one.
    """
    more = len(found) > query.limit
    records = list(found[: query.limit])
    reads_as_shown = reads_oldest_first(query) == (query.order == "oldest")
    if not reads_as_shown:
        records.reverse()
    if not records:
        return PageOfEvents(records, {})
    between = query.after is not None and query.before is not None
    # Sequences begin at 1, so there is nothing before a cursor of 0.
    came_from_elsewhere = bool(query.after) if query.before is None else query.after is None
    has_next = more if reads_as_shown else True
    # With two cursors, events before the first page are outside of the requested range.
    has_previous = came_from_elsewhere if reads_as_shown else more
    first, last = records[0].sequence, records[-1].sequence
    below, above = ("before", "after") if query.order == "newest" else ("after", "before")
    links = {}
    if has_next:
        kept = {above: getattr(query, above)} if between else {}
        links["next"] = _query(query, {**kept, below: last})
    if has_previous:
        links["prev"] = _query(query, {above: first})
    return PageOfEvents(records, links)


def link_header(path: str, links: dict[str, str]) -> str:
    """Return the ``Link`` header (RFC 8288) for queries of ``path``; empty without any."""
    return ", ".join(f'<{path}?{query}>; rel="{relation}"' for relation, query in links.items())


def _query(query: ListQuery, cursors: dict[str, int]) -> str:
    given = attrs.asdict(query) | {"after": None, "before": None} | cursors
    return urlencode({name: _text(value) for name, value in given.items() if value is not None})


def _text(value: object) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


#: Headers of every answer: a browser may not store it, guess its type, or run it.
_ALWAYS = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)

_log = get_logger("admin")

EVENTS = "/api/events"

#: The actor of a request that names none: the token is the same for all who hold it.
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
            # One more than is shown: it says whether there is a further page.
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
