"""The API of events, ``/api/events``: what its queries ask for, listings, one event, and replay.

A replay of a whole state is the one call that can do much harm by a filter that is wider than
meant. So a dry run counts what the filter meets and signs it: the token that it returns fits the
same filter alone, and leaves out what has come since.
"""

import hmac
import json
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode

import msgspec
import trio

from ..base.http import Send
from ..base.logs import get_logger
from ..errors import UnknownTenantError
from ..records.deliveries import DeliveryRecord, DeliveryState, listed, shown
from ..storage.ports import Inbox
from ..storage.replay import (
    ReplayCandidate,
    ambiguity,
    find_meant,
    find_named,
    put_back,
    replay_rows,
)
from .status import RunningProgram

#: The most events of one listing, and their number without ``limit``.
LARGEST_LIMIT = 500
USUAL_LIMIT = 50

#: The most events that one call puts back; the answer says when there are more.
LARGEST_REPLAY = 1000

#: The most events that a dry run counts, and that one call looks at: reading them takes a second.
LARGEST_COUNT = 10_000

#: The events that a dry run shows.
SAMPLE = 20

#: Rows that are read from the store at once.
_PAGE = 500

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

_log = get_logger("admin")


class BadQueryError(ValueError):
    """A query or body that is not understood; the message names the part and the valid values."""


# A page has the ``limit`` events nearest to the given cursor, in whichever order they are shown, so
# that the order stays the same when paging forth and back. Cursors are sequences, which never
# change: events that arrive meanwhile shift no page.


class ListQuery(msgspec.Struct, frozen=True):
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


class ReplayOrder(msgspec.Struct, frozen=True):
    """The order of ``POST /api/events/replay``: events by id, or those of a state.

    ``error`` is a group of :func:`error_group`; ``after`` is where the last answer stopped;
    ``confirm`` is the token of a dry run of the same filter. ``actor`` is who orders it, for the
    log.
    """

    ids: list[str] | None = None
    state: Literal["dead", "parked", "retrying"] | None = None
    type: str | None = None
    tenant: str | None = None
    error: str | None = None
    since: str | None = None
    until: str | None = None
    after: int | None = None
    confirm: str | None = None
    dry_run: bool | None = None
    actor: str | None = None


#: The parts that differ between errors of one cause: UUIDs, long words that have digits or are of
#: hexadecimal digits alone, and numbers.
_IDS = re.compile(
    r"\b(?:[0-9a-fA-F]+-){4}[0-9a-fA-F]+\b"
    r"|\b(?=\w*[0-9])\w{8,}\b|\b[0-9a-fA-F]{8,}\b|0x[0-9a-fA-F]+|[0-9]+"
)

#: Fields that choose among the events of a state, in the order in which a token signs them.
FILTER = ("state", "type", "tenant", "error", "since", "until")


def error_group(text: str | None) -> str:
    """Return the group of an error: its first line without the numbers and ids in it."""
    first = (text or "").partition("\n")[0][:_GROUP_CHARACTERS]
    return _IDS.sub("#", first)


_GROUP_CHARACTERS = 200


def parse_list(query: bytes) -> ListQuery:
    """Return what a listing is asked for.

    Raises:
        BadQueryError: a parameter is unknown, given twice, or has a value that it does not take.
    """
    given = parameters(query, ListQuery.__struct_fields__)
    state, order = given.get("state"), given.get("order")
    if state is not None and state not in set(DeliveryState):
        raise BadQueryError(f"state takes one of {', '.join(DeliveryState)}")
    if order not in (None, "newest", "oldest"):
        raise BadQueryError("order takes newest or oldest")
    after = parse_number(given, "after", None, 0, LARGEST_SEQUENCE)
    before = parse_number(given, "before", None, 0, LARGEST_SEQUENCE)
    # A caller with ``after`` alone follows the inbox, and wants events in the order of arrival.
    usual = "newest" if after is None or before is not None else "oldest"
    return ListQuery(
        type=given.get("type"),
        state=None if state is None else DeliveryState(state),
        tenant=given.get("tenant"),
        subject=given.get("subject"),
        since=parse_moment(given, "since"),
        until=parse_moment(given, "until"),
        limit=parse_number(given, "limit", USUAL_LIMIT, 1, LARGEST_LIMIT) or USUAL_LIMIT,
        after=after,
        before=before,
        order="oldest" if (order or usual) == "oldest" else "newest",
    )


def parse_show(query: bytes) -> bool:
    """Return whether the body of an event is asked for.

    Raises:
        BadQueryError: a parameter is unknown or has a value that it does not take.
    """
    body = parameters(query, ("body",)).get("body", "0")
    if body not in ("0", "1"):
        raise BadQueryError("body takes 0 or 1")
    return body == "1"


def parse_replay(body: bytes) -> ReplayOrder:
    """Return what is to be put back.

    Raises:
        BadQueryError: it is no JSON object of that form.
    """
    order: ReplayOrder = parse_order(body, ReplayOrder)
    given = {
        name: value for name, value in msgspec.structs.asdict(order).items() if value is not None
    }
    if (order.ids is None) == (order.state is None):
        raise BadQueryError("give ids, or a state (dead, parked or retrying); not both")
    chosen = [name for name in (*FILTER[1:], "after", "confirm") if name in given]
    if order.ids is not None and chosen:
        raise BadQueryError(f"{chosen[0]} chooses among a state; leave it out with ids")
    if order.ids is not None and not 1 <= len(order.ids) <= LARGEST_REPLAY:
        raise BadQueryError(f"ids takes 1 to {LARGEST_REPLAY} ids")
    if order.after is not None and not 0 <= order.after <= LARGEST_SEQUENCE:
        raise BadQueryError(f"after takes a number from 0 to {LARGEST_SEQUENCE}")
    for name in ("since", "until"):
        parse_moment(given, name)
    return order


def check_actor(actor: str | None) -> None:
    """Raise :class:`BadQueryError` for a name that is no line of a log."""
    if actor is not None and not (1 <= len(actor) <= LONGEST_ACTOR and actor.isprintable()):
        raise BadQueryError(f"actor takes 1 to {LONGEST_ACTOR} printable characters")


def parse_order(body: bytes, kind: type[Any]) -> Any:
    """Return the order of a changing call: a JSON object with the fields of ``kind``.

    Raises:
        BadQueryError: it is none, or has another field.
    """
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
        names = kind.__struct_fields__
        # A misspelt field would otherwise choose every event of a state.
        if unknown := given.keys() - set(names):
            raise BadQueryError(f"the body takes {', '.join(names)}; not {min(unknown)}")
        if None in given.values():
            raise BadQueryError("the body takes no null: leave the field out")
        order = msgspec.convert(given, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadQueryError(f"the body is not understood: {error}") from None
    check_actor(order.actor)
    return order


def parameters(query: bytes, known: tuple[str, ...]) -> Mapping[str, str]:
    """Return the parameters of a query, each known and given once.

    Raises:
        BadQueryError: one is not, or the query is no query.
    """
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


def parse_number(
    given: Mapping[str, str], name: str, usual: int | None, least: int, greatest: int
) -> int | None:
    """Return the number of a parameter, ``usual`` if it is not given.

    Raises:
        BadQueryError: it is no number within the bounds.
    """
    text = given.get(name)
    if text is None:
        return usual
    if text.isascii() and text.isdigit() and len(text) <= len(str(greatest)):
        value = int(text)
        if least <= value <= greatest:
            return value
    raise BadQueryError(f"{name} takes a number from {least} to {greatest}")


def parse_moment(given: Mapping[str, str], name: str) -> float | None:
    """Return the moment of a parameter in Unix seconds, None if it is not given.

    Raises:
        BadQueryError: it has not the form of :data:`MOMENT`.
    """
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


class PageOfEvents(msgspec.Struct, frozen=True):
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
    given = msgspec.structs.asdict(query) | {"after": None, "before": None} | cursors
    return urlencode({name: _text(value) for name, value in given.items() if value is not None})


def _text(value: object) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


#: Headers of every answer: a browser may not store it, guess its type, or run it.
_ALWAYS = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)

EVENTS = "/api/events"

#: The actor of a request that names none: the token is the same for all who hold it.
USUAL_ACTOR = "admin token"


class Reply(msgspec.Struct, frozen=True):
    """One answer: its status, its body and its type."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    extra: Sequence[tuple[bytes, bytes]] = ()

    async def send(self, send: Send) -> None:
        """Send it as ASGI messages."""
        given = {name for name, _ in self.extra}
        headers = [
            (b"content-type", self.content_type),
            (b"content-length", str(len(self.body)).encode()),
            *(header for header in _ALWAYS if header[0] not in given),
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


class OrderedAction(msgspec.Struct, frozen=True):
    """One action that somebody ordered here: what, by whom, from where, and of what."""

    at: float
    action: str
    actor: str
    address: str | None
    count: int
    ids: Sequence[str]


#: Actions that are kept for ``GET /api/actions``, and the ids that each of them names there. The
#: log has all of both.
KEPT_ACTIONS = 200
KEPT_IDS = 20


class Actions:
    """The last actions; each is logged as ``admin.acted`` or by an event of its own."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: deque[OrderedAction] = deque(maxlen=KEPT_ACTIONS)

    def note(
        self,
        action: str,
        *,
        actor: str,
        address: str | None,
        ids: Sequence[str] = (),
        logged: bool = False,
    ) -> None:
        """Keep an action, and log it unless the caller has done that."""
        now = self._clock()
        self._kept.append(
            OrderedAction(now, action, actor, address, len(ids), tuple(ids[:KEPT_IDS]))
        )
        if not logged:
            _log.info("admin.acted", action=action, actor=actor, address=address, ids=list(ids))

    def listed(self) -> list[dict[str, Any]]:
        """Return the last actions as JSON, newest first."""
        return [msgspec.structs.asdict(action) for action in reversed(self._kept)]


class _Chosen(msgspec.Struct, frozen=True):
    """The events that an order means, as far as one call goes; ``after`` is where to go on."""

    candidates: Sequence[ReplayCandidate]
    more: bool = False
    after: int | None = None


class EventAnswerer:
    """The calls of the events API: it reads the inbox and puts events back into the queue.

    Args:
        observed: the program.
        actions: keeps what was ordered.
        sign: returns the headers of a delivery as they are sent anew, for a caller on this machine
            or elsewhere.
    """

    def __init__(
        self,
        observed: RunningProgram,
        actions: Actions,
        sign: Callable[[DeliveryRecord, bool], Awaitable[Sequence[tuple[str, str]]]],
    ) -> None:
        self._observed = observed
        self._actions = actions
        self._sign = sign
        # Tokens of dry runs count for this process alone: after a restart another dry run is due.
        self._key = secrets.token_bytes(32)

    async def list(self, query: ListQuery) -> Reply:
        """Return an array of events without bodies, with the fields of ``events list``.

        The ``Link`` header leads to the pages beside it.

        Raises:
            BadQueryError: there is no such tenant.
        """
        tenant_id = await self.tenant_id(query.tenant)
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

    async def show(self, webhook_id: str, *, body: bool, here: bool) -> Reply:
        """Return one event with its failed runs and its neighbours; 404 without one.

        409 where several senders use the id; the answer names their keys. Neighbours are the
        events before and after it of the same subject and tenant.
        """
        inbox = self._inbox
        found = await find_meant(inbox, webhook_id)
        if not found:
            return problem(404, "there is no such event in the inbox")
        if len(found) > 1:
            return problem(409, ambiguity(found))
        (record,) = found
        attempts, evidence = await inbox.attempts(record.key), await inbox.evidence(record.key)
        details = shown(record, attempts, evidence, body=body)
        details["headers"] = [list(header) for header in await self._sign(record, here)]
        details["previous_key"] = await self._neighbour(record, newer=False)
        details["next_key"] = await self._neighbour(record, newer=True)
        return document(200, details)

    async def _neighbour(self, record: DeliveryRecord, *, newer: bool) -> str | None:
        if record.subject is None:
            await trio.lowlevel.checkpoint()
            return None
        # Without a tenant of its own it may stand between events of tenants: a few are looked at.
        found = await self._inbox.find(
            subject=record.subject,
            tenant_id=record.tenant_id,
            oldest_first=newer,
            after_sequence=record.sequence if newer else None,
            before_sequence=None if newer else record.sequence,
            limit=_NEIGHBOURS,
        )
        return next((each.key for each in found if each.tenant_id == record.tenant_id), None)

    async def dead_groups(self, *, type: str | None, tenant: str | None) -> Reply:
        """Return the newest dead letters in groups of the same type and error, largest first."""
        tenant_id = await self.tenant_id(tenant)
        groups: dict[tuple[str, str], dict[str, Any]] = {}
        counted, before, more = 0, None, True
        while more and counted < GROUPED:
            page = await self._inbox.find(
                type=type,
                state=DeliveryState.DEAD,
                tenant_id=tenant_id,
                before_sequence=before,
                limit=_PAGE,
            )
            more = len(page) == _PAGE
            for record in page:
                counted += 1
                before = record.sequence
                _group(groups, record)
        rows = sorted(groups.values(), key=lambda row: (-row["count"], row["type"], row["error"]))
        return document(200, {"groups": rows, "counted": counted, "more": more})

    async def replay(self, order: ReplayOrder, *, address: str | None) -> Reply:
        """Put events back and wake the workers; if it is cancelled, finished transactions stay.

        The log has the ids, the caller's ``address``, and the ``actor`` that the caller names.
        There is one token, so nothing proves that name.

        Raises:
            BadQueryError: there is no such tenant.
        """
        await trio.lowlevel.checkpoint()
        through = None
        if order.confirm is not None:
            through = self._confirmed(order)
            if through is None:
                return problem(409, "confirm is of another filter or start: make a dry run again")
        chosen = await self._choose(order, through)
        candidates = chosen.candidates
        possible = [candidate.key for candidate in candidates if candidate.reason is None]
        answer = {"count": len(possible), "more": chosen.more, "after": chosen.after}
        if order.dry_run:
            confirm = None if order.state is None else await self._confirmation(order)
            rows = replay_rows(
                candidates[:SAMPLE] if order.state else candidates, set(), dry_run=True
            )
            told = {"events": rows, "replayed": 0, "dry_run": True, "confirm": confirm}
            return document(200, {**answer, **told})
        replayed = await self._put_back(possible, order.actor or USUAL_ACTOR, address)
        told = {"replayed": len(replayed), "dry_run": False, "confirm": order.confirm}
        return document(200, {"events": replay_rows(candidates, replayed), **answer, **told})

    async def _put_back(self, possible: Sequence[str], actor: str, address: str | None) -> set[str]:
        try:
            replayed = await put_back(self._inbox, possible)
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
        self._actions.note("replay", actor=actor, address=address, ids=done, logged=True)
        return replayed

    async def _choose(self, order: ReplayOrder, through: int | None) -> _Chosen:
        """Return the events of an order: at most :data:`LARGEST_REPLAY`, of a dry run all."""
        if order.state is None:
            return _Chosen(await find_named(self._inbox, order.ids or ()))
        given = msgspec.structs.asdict(order)
        largest = LARGEST_COUNT if order.dry_run else LARGEST_REPLAY
        tenant_id = await self.tenant_id(order.tenant)
        found: list[ReplayCandidate] = []
        after, looked = order.after or 0, 0
        while looked < LARGEST_COUNT:
            page = await self._inbox.find(
                type=order.type,
                state=DeliveryState(order.state),
                since=parse_moment(given, "since"),
                until=parse_moment(given, "until"),
                tenant_id=tenant_id,
                after_sequence=after,
                before_sequence=None if through is None else through + 1,
                oldest_first=True,
                limit=_PAGE,
            )
            for record in page:
                if len(found) == largest:
                    return _Chosen(found, True, after)
                after, looked = record.sequence, looked + 1
                if order.error in (None, error_group(record.last_error)):
                    state = str(record.state)
                    found.append(ReplayCandidate(record.key, record.webhook_id, record.type, state))
            if len(page) < _PAGE:
                return _Chosen(found)
        return _Chosen(found, True, after)

    async def _confirmation(self, order: ReplayOrder) -> str:
        newest = await self._inbox.find(limit=1)
        through = newest[0].sequence if newest else 0
        return f"{through}.{self._signature(order, through)}"

    def _confirmed(self, order: ReplayOrder) -> int | None:
        """Return up to which sequence a token confirms the filter; None: it does not."""
        text, _, signature = (order.confirm or "").partition(".")
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST_SEQUENCE))):
            return None
        through = int(text)
        expected = self._signature(order, through)
        return through if hmac.compare_digest(signature.encode(), expected.encode()) else None

    def _signature(self, order: ReplayOrder, through: int) -> str:
        text = json.dumps([through, *(getattr(order, name) for name in FILTER)])
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()

    async def tenant_id(self, name: str | None) -> str | None:
        """Return the id of a tenant that a query names by identifier or id; None of None.

        Raises:
            BadQueryError: there is no such tenant.
        """
        if name is None:
            await trio.lowlevel.checkpoint()
            return None
        try:
            return await self._observed.tenant_id(name)
        except UnknownTenantError as error:
            raise BadQueryError(f"tenant: {error}") from None

    @property
    def _inbox(self) -> Inbox:
        return self._observed.stores()[0]


#: Dead letters that are grouped, the newest ones: reading them takes a quarter of a second.
GROUPED = 5000

#: Events of a subject that are looked at to find the neighbour of one.
_NEIGHBOURS = 20


def _group(groups: dict[tuple[str, str], dict[str, Any]], record: DeliveryRecord) -> None:
    """Count a dead letter in its group; they come newest first."""
    name = (record.type, error_group(record.last_error))
    row = groups.setdefault(
        name,
        {
            "type": record.type,
            "error": name[1],
            "count": 0,
            "oldest_at": record.received_at,
            "newest_at": record.received_at,
            "sample_key": record.key,
        },
    )
    row["count"] += 1
    row["oldest_at"] = min(row["oldest_at"], record.received_at)
    row["newest_at"] = max(row["newest_at"], record.received_at)
