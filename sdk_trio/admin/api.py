"""The API of events, ``/api/events``: listings, one event, groups of dead letters, and replay.

Replaying a whole state can do much harm if its filter is wider than intended. A dry run therefore
counts the matching events and records them. It returns a token that is valid only for the same
filter, and that stands for exactly the counted events.
"""

import json
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import trio

from ..base.clock import wall
from ..base.http import Send
from ..base.logs import get_logger
from ..records.deliveries import DeliveryRecord, DeliveryState, listed, shown
from ..storage.ports import Inbox
from .query import (
    FILTER,
    LARGEST_REPLAY,
    ListQuery,
    ReplayRequest,
    link_header,
    page_of,
    parse_moment,
    reads_oldest_first,
)
from .replay import (
    ReplayCandidate,
    ambiguity,
    error_group,
    find_meant,
    find_named,
    replay_all,
    replay_rows,
)
from .status import RunningProgram

#: The most events counted by a dry run, and read by one call: reading them takes a second.
LARGEST_COUNT = 10_000

#: The events that a dry run shows.
SAMPLE = 20

#: The number of dry runs whose events are kept, newest first: each of 10 000 takes a megabyte.
KEPT_TRIALS = 8

#: Rows that are read from the store at once.
_PAGE = 500

_log = get_logger("admin")


#: Headers of every answer: a browser must not store it, guess its type, or run it.
_ALWAYS = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)

EVENTS = "/api/events"

#: The actor of a request that names none: all users share the token.
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
    """One action requested through the API: its name, actor, source address and objects."""

    at: float
    action: str
    actor: str
    address: str | None
    count: int
    ids: Sequence[str]


#: Actions kept for ``GET /api/actions``, and the ids that each of them names there. The log has all
#: actions and all ids.
KEPT_ACTIONS = 200
KEPT_IDS = 20


class Actions:
    """The last actions; each is logged as ``admin.acted`` or by its own event."""

    def __init__(self, clock: Callable[[], float] = wall) -> None:
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
        """Record an action, and log it unless the caller has done that."""
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
    """The events selected by a request, within one call; ``after`` is where to continue."""

    candidates: Sequence[ReplayCandidate]
    sequences: Sequence[int] = ()
    more: bool = False
    after: int | None = None


class _Trial(msgspec.Struct, frozen=True):
    """A dry run: its filter, and the sequences that it counted.

    A limit by sequence or time would not do: an event that arrived earlier may become a dead letter
    later, and clocks are set back.
    """

    filter: Sequence[str | None]
    counted: frozenset[int]


class EventAnswerer:
    """The calls of the events API: it reads the inbox and replays events.

    Args:
        observed: the program.
        actions: records the requested actions.
        sign: returns the headers with which to send a delivery again; its second argument is
            whether the caller is on this machine.
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
        #: By their tokens; after a restart, a new dry run is needed.
        self._trials: dict[str, _Trial] = {}

    async def list(self, query: ListQuery) -> Reply:
        """Return an array of events without bodies, with the fields of ``events list``.

        The ``Link`` header has the previous and next page.

        Raises:
            UnknownTenantError: there is no such tenant.
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
            source=query.source,
            oldest_first=reads_oldest_first(query),
            # One more than shown, to know whether there is a next page.
            limit=query.limit + 1,
        )
        page = page_of(query, found)
        extra = ((b"link", link_header(EVENTS, page.links).encode("ascii")),) if page.links else ()
        return document(200, [listed(record) for record in page.records], *extra)

    async def show(self, webhook_id: str, *, body: bool, is_local: bool) -> Reply:
        """Return one event with its failed runs and its neighbours; 404 without one.

        409 if several senders use the id; the answer names their keys. Neighbours are the events
        before and after it of the same subject and tenant.
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
        details["headers"] = [list(header) for header in await self._sign(record, is_local)]
        details["previous_key"] = await self._neighbour(record, newer=False)
        details["next_key"] = await self._neighbour(record, newer=True)
        return document(200, details)

    async def _neighbour(self, record: DeliveryRecord, *, newer: bool) -> str | None:
        if record.subject is None:
            await trio.lowlevel.checkpoint()
            return None
        # Without a tenant, it may be between events of tenants: check a few.
        found = await self._inbox.find(
            subject=record.subject,
            tenant_id=record.tenant_id,
            source=record.source,
            oldest_first=newer,
            after_sequence=record.sequence if newer else None,
            before_sequence=None if newer else record.sequence,
            limit=_NEIGHBOURS,
        )
        owner = record.tenant_id, record.source
        return next((each.key for each in found if (each.tenant_id, each.source) == owner), None)

    async def dead_groups(
        self, *, type: str | None, tenant: str | None, source: str | None = None
    ) -> Reply:
        """Return the newest dead letters in groups of the same type and error, largest first."""
        tenant_id = await self.tenant_id(tenant)
        groups: dict[tuple[str, str, str], dict[str, Any]] = {}
        counted, before, more = 0, None, True
        while more and counted < GROUPED:
            page = await self._inbox.find(
                type=type,
                state=DeliveryState.DEAD,
                tenant_id=tenant_id,
                source=source,
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

    async def replay(self, order: ReplayRequest, *, address: str | None) -> Reply:
        """Replay events and wake the workers; on cancellation, finished transactions stay.

        The log has the ids, the caller's ``address``, and the ``actor`` that the caller names.
        There is one token, so nothing proves that name.

        Raises:
            UnknownTenantError: there is no such tenant.
        """
        await trio.lowlevel.checkpoint()
        trial = None
        if order.confirm is not None:
            trial = self._trials.get(order.confirm)
            if trial is None or trial.filter != _filter(order):
                return problem(
                    409,
                    "confirm is too old, or belongs to another filter or to an earlier start: "
                    "repeat the dry run",
                )
        chosen = await self._choose(order, trial)
        candidates = chosen.candidates
        possible = [candidate.key for candidate in candidates if candidate.reason is None]
        answer = {"count": len(possible), "more": chosen.more, "after": chosen.after}
        if order.dry_run:
            confirm = None if order.state is None else self._remember(order, chosen)
            rows = replay_rows(
                candidates[:SAMPLE] if order.state else candidates, set(), dry_run=True
            )
            summary = {"events": rows, "replayed": 0, "dry_run": True, "confirm": confirm}
            return document(200, {**answer, **summary})
        replayed = await self._replay_all(possible, order.actor or USUAL_ACTOR, address)
        summary = {"replayed": len(replayed), "dry_run": False, "confirm": order.confirm}
        return document(200, {"events": replay_rows(candidates, replayed), **answer, **summary})

    async def _replay_all(
        self, possible: Sequence[str], actor: str, address: str | None
    ) -> set[str]:
        try:
            replayed = await replay_all(self._inbox, possible)
        except BaseException:
            # Some of them may have been replayed.
            _log.warning(
                "admin.replay_interrupted", actor=actor, address=address, webhook_ids=possible
            )
            raise
        finally:
            # The workers notice only changes by other processes, and this process made these.
            self._observed.wake()
        done = [key for key in possible if key in replayed]
        _log.info(
            "admin.replayed", actor=actor, address=address, events=len(done), webhook_ids=done
        )
        self._actions.note("replay", actor=actor, address=address, ids=done, logged=True)
        return replayed

    async def _choose(self, order: ReplayRequest, trial: _Trial | None) -> _Chosen:
        """Return the events of a request: at most :data:`LARGEST_REPLAY`, or all for a dry run."""
        if order.state is None:
            return _Chosen(await find_named(self._inbox, order.ids or ()))
        given = msgspec.structs.asdict(order)
        largest = LARGEST_COUNT if order.dry_run else LARGEST_REPLAY
        tenant_id = await self.tenant_id(order.tenant)
        found: list[ReplayCandidate] = []
        sequences: list[int] = []
        through = None if trial is None else max(trial.counted, default=0)
        after, looked = order.after or 0, 0
        while looked < LARGEST_COUNT:
            page = await self._inbox.find(
                type=order.type,
                state=DeliveryState(order.state),
                since=parse_moment(given, "since"),
                until=parse_moment(given, "until"),
                tenant_id=tenant_id,
                source=order.source,
                after_sequence=after,
                before_sequence=None if through is None else through + 1,
                oldest_first=True,
                limit=_PAGE,
            )
            for record in page:
                if len(found) == largest:
                    return _Chosen(found, sequences, True, after)
                after, looked = record.sequence, looked + 1
                if trial is not None and record.sequence not in trial.counted:
                    continue
                if order.error in (None, error_group(record.last_error)):
                    state = str(record.state)
                    found.append(ReplayCandidate(record.key, record.webhook_id, record.type, state))
                    sequences.append(record.sequence)
            if len(page) < _PAGE:
                return _Chosen(found, sequences)
        return _Chosen(found, sequences, True, after)

    def _remember(self, order: ReplayRequest, chosen: _Chosen) -> str:
        """Store the events of a dry run, and return their token."""
        if len(self._trials) >= KEPT_TRIALS:
            del self._trials[next(iter(self._trials))]
        token = secrets.token_urlsafe(16)
        self._trials[token] = _Trial(_filter(order), frozenset(chosen.sequences))
        return token

    async def tenant_id(self, name: str | None) -> str | None:
        """Return the id of a tenant that a query names by identifier or id; None for None.

        Raises:
            UnknownTenantError: there is no such tenant.
        """
        if name is None:
            await trio.lowlevel.checkpoint()
            return None
        return await self._observed.tenant_id(name)

    @property
    def _inbox(self) -> Inbox:
        return self._observed.stores()[0]


def _filter(order: ReplayRequest) -> tuple[str | None, ...]:
    return tuple(getattr(order, name) for name in FILTER)


#: The number of dead letters that are grouped, newest first: reading them takes 0.25 s.
GROUPED = 5000

#: Events of a subject that are read to find the neighbour of one.
_NEIGHBOURS = 20


def _group(groups: dict[tuple[str, str, str], dict[str, Any]], record: DeliveryRecord) -> None:
    """Count a dead letter in its group; they come newest first."""
    name = (record.type, error_group(record.last_error), record.source or "")
    source = {} if record.source is None else {"source": record.source}
    row = groups.setdefault(
        name,
        {
            "type": record.type,
            **source,
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
