"""The feed, ``/feed``: every change, live, over WebSocket; a client resumes where it stopped.

No code in the path of a delivery depends on it. While a listener is connected, one task polls the
store a few times a second; otherwise nothing runs. Each listener reads deliveries after its own
position from the store, page by page, at its own pace. So a slow listener misses none, and no
buffer grows. A position is a sequence of the store. A returning client sends it as ``after`` with
the name of the store: in another store it means nothing.

Other changes have no position: a changed state of an event already sent, a rejected request, a
transition of a tenant. They wait in a buffer per listener. A full buffer is emptied, and the
listener gets the number of missed changes; the current state is in the store.
"""

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from ..base.bell import Flag
from ..base.clock import wall
from ..base.http import ProtocolUpgrade
from ..base.logs import get_logger
from ..base.throttle import TokenBucket
from ..errors import NotRunningError, SdkError, StoreUnavailableError
from ..records.deliveries import (
    DeliveryRecord,
    DeliveryState,
    body_fields,
    listed,
)
from ..storage.ports import Inbox
from ..storage.sql.schema import DAY_BITS
from .access import FEED_PROTOCOL
from .console import ConsoleSource, MissingPartError
from .query import LARGEST_SEQUENCE, BadQueryError, parameters, parse_number
from .status import RunningProgram

if TYPE_CHECKING:
    from trio_websocket import WebSocketConnection

_log = get_logger("admin")

#: Polling intervals in seconds: after activity of this process, and otherwise, for changes by other
#: processes. People do not notice a tenth of a second.
BUSY_SECONDS = 0.1
QUIET_SECONDS = 1.0

#: The most deliveries in one read of a listener.
PAGE = 200

#: Changes that wait for one listener.
BUFFERED = 1000

#: Concurrent listeners: each costs a query of the store at every change.
MOST_LISTENERS = 32

#: A listener gets a message at least this often, and must answer a ping within the same time.
HEARTBEAT_SECONDS = 15.0
PONG_SECONDS = 20.0

#: Seconds to wait for the answer to a closing frame.
CLOSE_SECONDS = 0.25

#: Bytes of a listener's message: it has nothing to send.
LISTENER_BYTES = 1024

#: Bytes that a listener may send at once, and a second in the long run: pongs have six each.
HEARD_BYTES = 4096
HEARD_BYTES_PER_SECOND = 256.0

#: Events whose state is polled, the newest of all that were sent, and how many per poll: the newest
#: ones, and some of the others in rotation.
WATCHED = 2000
LOOKED_AT = 150

#: Sequences with no more than this between them are read in one query.
_REACH = 32

#: Seconds to wait for missing sequences: an uncommitted transaction may have taken one. The store
#: answers a delivery within 8 seconds, or refuses it.
HOLE_SECONDS = 10.0

#: The checkpoint with the name of the store, by which a listener recognizes it.
STORE_NAME = "feed.store"

KINDS = ("delivery", "changed", "rejected", "tenant")


class TooManyListenersError(SdkError):
    """The maximum number of listeners is connected."""


@attrs.frozen
class FeedQuery:
    """The subscription of one listener.

    ``after`` is the last sequence that it has seen; None: only new deliveries. ``store`` is the
    name of that sequence's store; None: unknown. ``types`` are patterns in which ``*`` matches any
    text; empty: every type. ``relay`` adds body and headers for a local receiver. ``most`` limits
    the deliveries per second: the oldest ones above it are omitted, and reported as lagged.
    """

    after: int | None = None
    store: str | None = None
    kinds: tuple[str, ...] = KINDS
    types: tuple[str, ...] = ()
    state: DeliveryState | None = None
    tenant: str | None = None
    source: str | None = None
    body: bool = False
    relay: bool = False
    most: int | None = None

    def wants(self, record: DeliveryRecord, tenant_id: str | None) -> bool:
        """Return whether the subscription includes this event in its current state."""
        return (
            self.state in (None, record.state)
            and (tenant_id is None or record.tenant_id == tenant_id)
            and (self.source is None or record.source == self.source)
            and (not self.types or any(fnmatchcase(record.type, each) for each in self.types))
        )


def parse_feed(query: bytes) -> FeedQuery:
    """Return the subscription in a query.

    Raises:
        BadQueryError: a parameter is unknown, given twice, or has an invalid value.
    """
    names = tuple(field.name for field in attrs.fields(FeedQuery))
    given = parameters(query, names)
    kinds = _words(given.get("kinds")) or KINDS
    if unknown := set(kinds) - set(KINDS):
        raise BadQueryError(f"kinds takes {', '.join(KINDS)}, with commas; not {min(unknown)}")
    state = given.get("state")
    if state is not None and state not in set(DeliveryState):
        raise BadQueryError(f"state takes one of {', '.join(DeliveryState)}")
    for name in ("body", "relay"):
        if given.get(name, "0") not in ("0", "1"):
            raise BadQueryError(f"{name} takes 0 or 1")
    return FeedQuery(
        after=parse_number(given, "after", None, 0, LARGEST_SEQUENCE),
        store=given.get("store"),
        kinds=kinds,
        types=_words(given.get("types")),
        state=None if state is None else DeliveryState(state),
        tenant=given.get("tenant"),
        source=given.get("source"),
        body=given.get("body") == "1",
        relay=given.get("relay") == "1",
        most=parse_number(given, "most", None, 1, 1000),
    )


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word for word in map(str.strip, (text or "").split(",")) if word)


def clusters(sequences: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last of ascending sequences that are close to each other."""
    first = last = None
    for sequence in sequences:
        if first is None or last is None:
            first = sequence
        elif sequence - last > _REACH:
            yield first, last
            first = sequence
        last = sequence
    if first is not None and last is not None:
        yield first, last


def without_holes(position: int, records: Sequence[DeliveryRecord], now: float) -> int:
    """Return the sequence up to which no new row can appear.

    Args:
        position: the result of the last poll.
        records: the next ones above it, ascending.
        now: Unix seconds.
    """
    for record in records:
        # A number that is missing below an older row was never used, or its row was removed.
        if record.sequence != position + 1 and now - record.received_at < HOLE_SECONDS:
            return position
        position = record.sequence
    return position


_Progress = tuple[object, ...]


def _progress(record: DeliveryRecord) -> _Progress:
    return record.state, record.attempts, record.finished_at, record.next_attempt_at


class _Listener:
    """One listener: its subscription, its position, and the changes that wait for it."""

    def __init__(
        self, query: FeedQuery, tenant_id: str | None, position: int, is_local: bool
    ) -> None:
        self.query = query
        self.tenant_id = tenant_id
        self.position = position
        self.is_local = is_local
        #: Its position was of another store, so it starts with the first delivery of this one.
        self.replaced = False
        self.flag = Flag()
        self.dropped = 0
        self._waiting: deque[dict[str, Any]] = deque()

    def offer(self, message: dict[str, Any]) -> None:
        """Queue a change for it; a full buffer is emptied first."""
        if len(self._waiting) >= BUFFERED:
            self.dropped += len(self._waiting)
            self._waiting.clear()
        self._waiting.append(message)
        self.flag.set()

    def take(self) -> list[dict[str, Any]]:
        """Return the changes that wait, and forget them."""
        found = list(self._waiting)
        self._waiting.clear()
        return found


class _QuietStream(trio.abc.Stream):
    """A listener's connection, which breaks if it receives more than pongs need.

    The library answers pings and accepts pongs by itself. Without this limit, thirty listeners that
    sent pings nonstop left the receiver two deliveries a second of four hundred.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._heard: TokenBucket | None = None

    def limit(self) -> None:
        """Count received bytes from now on; the opening handshake has its own limit."""
        self._heard = TokenBucket(per_second=HEARD_BYTES_PER_SECOND, burst=HEARD_BYTES)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data = bytes(await self._stream.receive_some(max_bytes))
        if self._heard is not None:
            now = trio.current_time()
            self._heard.take(now, len(data))
            if self._heard.missing(now) > HEARD_BYTES:
                raise trio.BrokenResourceError("the listener sends too much")
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()


class Feed:
    """The feed of one running program.

    Args:
        observed: the program.
        source: its parts.
        version: of this package.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        observed: RunningProgram,
        source: ConsoleSource,
        version: str,
        *,
        clock: Callable[[], float] = wall,
    ) -> None:
        self._observed = observed
        self._source = source
        self._version = version
        self._clock = clock
        self._listeners: set[_Listener] = set()
        self._wanted = Flag()
        self._beginning = trio.Lock()
        self._store: str | None = None
        #: No new row can appear up to this sequence.
        self._position = 0
        #: The events that may change, by sequence, and their state at the last poll.
        self._watched: dict[int, _Progress] = {}
        self._turn = 0
        self._rejected = 0
        self._transition: int | None = None

    async def serve(
        self,
        upgrade: ProtocolUpgrade,
        query: FeedQuery,
        *,
        tenant_id: str | None,
        address: str | None,
        is_local: bool,
    ) -> None:
        """Upgrade a connection and send its subscription until it ends.

        Raises:
            TooManyListenersError: the maximum is reached.
            NotRunningError: the store is not open.
            StoreUnavailableError: the store is unavailable.
        """
        async with self._beginning:
            # Checked under the lock: otherwise many simultaneous requests would all be below the
            # limit.
            if len(self._listeners) >= MOST_LISTENERS:
                raise TooManyListenersError(f"{MOST_LISTENERS} listeners are already connected")
            if not self._listeners:
                await self._begin()
            replaced = await self._is_of_another_store(query)
        position = self._position if query.after is None else query.after
        listener = _Listener(query, tenant_id, 0 if replaced else position, is_local)
        listener.replaced = replaced
        self._listeners.add(listener)
        self._wanted.set()
        _log.info("admin.feed_opened", address=address, after=query.after, relay=query.relay)
        try:
            await self._converse(upgrade, listener)
        finally:
            self._listeners.discard(listener)
            _log.info("admin.feed_closed", address=address, at=listener.position)

    async def _is_of_another_store(self, query: FeedQuery) -> bool:
        """Return whether a position was given by another store, or before this one was set back."""
        inbox = self._inbox
        self._store = await inbox.read_checkpoint(STORE_NAME)
        if self._store is None:
            # Even with a full disk the feed must work: it then has no store name.
            with suppress(StoreUnavailableError):
                await inbox.write_checkpoint(STORE_NAME, str(uuid.uuid4()), once=True)
            self._store = await inbox.read_checkpoint(STORE_NAME)
        if query.after is None:
            return False
        known = self._store is None or query.store in (None, self._store)
        return not known or query.after > await inbox.last_sequence()

    async def _converse(self, upgrade: ProtocolUpgrade, listener: _Listener) -> None:
        # Imported here: 20 ms that a receiver without listeners does not pay.
        from trio_websocket import ConnectionClosed, HandshakeError, wrap_server_stream

        stream = _QuietStream(upgrade.take_over())
        try:
            async with trio.open_nursery() as nursery:
                wrap = partial(wrap_server_stream, max_message_size=LISTENER_BYTES)
                with trio.fail_after(PONG_SECONDS):
                    request = await wrap(nursery, stream)
                    asks = FEED_PROTOCOL in request.proposed_subprotocols
                    socket = await request.accept(subprotocol=FEED_PROTOCOL if asks else None)
                stream.limit()
                try:
                    await self._talk(socket, listener)
                finally:
                    # The listener may not answer the closing frame, and the server may be stopping.
                    with trio.move_on_after(CLOSE_SECONDS, shield=True):
                        await socket.aclose(1001, "the receiver is stopping")
                    nursery.cancel_scope.cancel()
        except* (ConnectionClosed, HandshakeError, trio.BrokenResourceError):
            pass  # it has disconnected
        except* (trio.ClosedResourceError, trio.TooSlowError):
            pass  # it has disconnected, or does not answer pings
        finally:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await stream.aclose()

    async def _talk(self, socket: "WebSocketConnection", listener: _Listener) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._reject_messages, socket, nursery.cancel_scope)
            nursery.start_soon(_ping, socket)
            await self._send_changes(socket, listener)
            nursery.cancel_scope.cancel()

    async def _reject_messages(
        self, socket: "WebSocketConnection", scope: trio.CancelScope
    ) -> None:
        """End the conversation if the listener sends a message: it has nothing to send.

        A client that sends frames without end would take the time that deliveries need.
        """
        await socket.get_message()
        await _close(socket, 1008, "this feed takes no messages")
        scope.cancel()

    # -- messages to one listener --------------------------------------------------------------

    async def _send_changes(self, socket: "WebSocketConnection", listener: _Listener) -> None:
        hello = {
            "newest": self._position,
            "store": self._store,
            "replaced": listener.replaced,
            # The listener must query the changes that happened while it was disconnected.
            "resumed": ["delivery"] if listener.query.after is not None else [],
            "version": self._version,
        }
        await _send(socket, [self._message(listener, "hello", hello)])
        try:
            await self._keep_sending(socket, listener)
        except (NotRunningError, StoreUnavailableError):
            # The listener reconnects with its position, and misses nothing.
            await _close(socket, 1012, "the store cannot be read now")

    async def _keep_sending(self, socket: "WebSocketConnection", listener: _Listener) -> None:
        while True:
            more = await self._send_deliveries(socket, listener)
            changes = listener.take()
            if listener.dropped:
                fields = self._message(listener, "lagged", {"dropped": listener.dropped})
                listener.dropped = 0
                changes.insert(0, fields)
            # A change of an event that is not sent yet is omitted: the event is sent in its current
            # state.
            changes = [each for each in changes if _sequence(each) <= listener.position]
            if changes:
                await _send(socket, [{**each, "seq": listener.position} for each in changes])
            if more:
                continue
            with trio.move_on_after(HEARTBEAT_SECONDS) as scope:
                await listener.flag.wait()
            if scope.cancelled_caught:
                await _send(socket, [self._message(listener, "heartbeat", {})])

    async def _send_deliveries(self, socket: "WebSocketConnection", listener: _Listener) -> bool:
        """Send the next deliveries after its position; return whether there may be more."""
        # The current position of the feed: it advances while the page is read.
        until = self._position
        if listener.position >= until:
            return False
        if "delivery" not in listener.query.kinds:
            listener.position = until
            return False
        records = await self._next_of(listener, until)
        reached = until if len(records) < PAGE else records[-1].sequence
        messages = []
        for record in records:
            listener.position = record.sequence
            if listener.query.wants(record, listener.tenant_id):
                # A poll since then may know a later state, and has sent it.
                if record.sequence not in self._watched:
                    self._watch(record)
                event = await self._event(record, listener)
                fields = {"seq": record.sequence, "kind": "delivery", "at": record.received_at}
                messages.append({**fields, "event": event})
                # Bodies are sent one by one: two hundred of a megabyte would be in memory together.
                if listener.query.body or listener.query.relay:
                    await _send(socket, messages)
                    messages = []
        await _send(socket, messages)
        listener.position = max(listener.position, reached)
        return listener.position < self._position

    async def _next_of(self, listener: _Listener, until: int) -> Sequence[DeliveryRecord]:
        """Return the next deliveries of a listener, up to a sequence: a page, or fewer."""
        query = listener.query
        exact = query.types[0] if len(query.types) == 1 and "*" not in query.types[0] else None
        inbox = self._inbox
        find = partial(
            inbox.find,
            type=exact,
            state=query.state,
            tenant_id=listener.tenant_id,
            source=query.source,
            before_sequence=until + 1,
        )
        if query.most is None:
            return await find(after_sequence=listener.position, oldest_first=True, limit=PAGE)
        # The newest ones that fit into the time since the last poll.
        most = max(1, int(query.most * BUSY_SECONDS))
        newest = await find(after_sequence=listener.position, oldest_first=False, limit=most)
        if len(newest) == most and newest[-1].sequence > listener.position + 1:
            # On PostgreSQL each day's sequences begin at a new number; compare with the last number
            # then.
            begin = max(listener.position, newest[-1].sequence >> DAY_BITS << DAY_BITS)
            listener.dropped += newest[-1].sequence - begin - 1
        return newest[::-1]

    async def _event(self, record: DeliveryRecord, listener: _Listener) -> dict[str, Any]:
        query = listener.query
        event = listed(record)
        if query.body or query.relay:
            whole = await self._inbox.get(record.key)
            event |= body_fields(None if whole is None else whole.raw)
            if query.relay and whole is not None:
                event["headers"] = await self._source.sign(whole, listener.is_local)
        return event

    def _message(self, listener: _Listener, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"seq": listener.position, "kind": kind, "at": self._clock(), **fields}

    # -- polling -----------------------------------------------------------------------------

    @property
    def _inbox(self) -> Inbox:
        return self._observed.stores()[0]

    async def _begin(self) -> None:
        """Read the current state, from which changes are reported."""
        if self._inbox.in_order:
            self._position = await self._inbox.last_sequence()
        else:
            newest = await self._inbox.find(limit=PAGE)
            lowest = newest[-1].sequence - 1 if newest else 0
            self._position = without_holes(lowest, newest[::-1], self._clock())
        # With a full disk nothing can be synced, and the feed must work.
        with suppress(StoreUnavailableError):
            await self._inbox.sync()
        self._watched.clear()
        for state in DeliveryState:
            if state is not DeliveryState.DONE:
                for record in (await self._inbox.find(state=state, limit=PAGE))[::-1]:
                    self._watch(record)
        self._rejected = self._source.rejected.total
        self._transition = None
        await self._poll_tenants()

    async def run(self) -> None:
        """Poll the store while a listener is connected, until cancelled."""
        activity = -1
        polled_at = 0.0
        while True:
            if not self._listeners:
                await self._wanted.wait()
            await trio.sleep(BUSY_SECONDS)
            now = trio.current_time()
            before, activity = activity, self._source.activity
            if activity == before and now < polled_at + QUIET_SECONDS:
                continue
            polled_at = now
            try:
                await self._poll()
            except (NotRunningError, StoreUnavailableError):
                await trio.sleep(QUIET_SECONDS)
            except Exception:
                # A listener may wait; the receiver must not end for it.
                _log.exception("admin.feed_failed")
                await trio.sleep(QUIET_SECONDS)

    async def _poll(self) -> None:
        failure: StoreUnavailableError | None = None
        reached = await self._reach()
        if reached > self._position:
            # After a power cut, another delivery could get the position of one that was sent. While
            # nothing can be synced, all but new deliveries is still reported.
            try:
                await self._inbox.sync()
            except StoreUnavailableError as error:
                failure = error
            else:
                self._position = reached
                for listener in self._listeners:
                    listener.flag.set()
        for record in await self._changed():
            message = {"kind": "changed", "at": self._clock(), "event": listed(record)}
            for listener in self._listeners:
                if "changed" in listener.query.kinds and listener.query.wants(
                    record, listener.tenant_id
                ):
                    listener.offer(message)
        self._poll_rejected()
        await self._poll_tenants()
        if failure is not None:
            raise failure

    async def _reach(self) -> int:
        """Return the sequence up to which no new row can appear."""
        inbox = self._inbox
        if inbox.in_order:
            return await inbox.last_sequence()
        position = self._position
        while True:
            page = await inbox.find(after_sequence=position, oldest_first=True, limit=PAGE)
            reached = without_holes(position, page, self._clock())
            if reached == position or len(page) < PAGE:
                return reached
            position = reached

    def _watch(self, record: DeliveryRecord) -> None:
        if record.state is DeliveryState.DONE:
            self._watched.pop(record.sequence, None)
            return
        self._watched[record.sequence] = _progress(record)
        if len(self._watched) > WATCHED:
            # The oldest one: those that wait longest change least.
            del self._watched[next(iter(self._watched))]

    async def _changed(self) -> list[DeliveryRecord]:
        """Return the watched events that have changed since the last poll."""
        sequences = sorted(self._watched)
        chosen, others = sequences[-LOOKED_AT:], sequences[:-LOOKED_AT]
        if others:
            self._turn = (self._turn + LOOKED_AT) % len(others)
            chosen = sorted({*others[self._turn : self._turn + LOOKED_AT], *chosen})
        changed = []
        for first, last in clusters(chosen):
            found = await self._inbox.find(
                after_sequence=first - 1,
                before_sequence=last + 1,
                oldest_first=True,
                limit=last - first + 1,
            )
            for record in found:
                known = self._watched.get(record.sequence)
                if known is not None and known != _progress(record):
                    changed.append(record)
                    self._watch(record)
        return changed

    def _poll_rejected(self) -> None:
        ring = self._source.rejected
        before, self._rejected = self._rejected, ring.total
        fresh = ring.total - before
        # A rejected request has no tenant: a listener for one tenant must not see others' requests.
        listeners = [
            listener
            for listener in self._listeners
            if "rejected" in listener.query.kinds and listener.tenant_id is None
        ]
        if not (fresh and listeners):
            return
        rows = [
            row for row in ring.newest(cause=None, before=None, limit=fresh) if row["seq"] > before
        ]
        for listener in listeners:
            # Those evicted from the ring since the last poll.
            listener.dropped += fresh - len(rows)
            for row in reversed(rows):
                if listener.query.source not in (None, row.get("source")):
                    continue
                listener.offer({"kind": "rejected", "at": row["at"], "rejection": row})

    async def _poll_tenants(self) -> None:
        try:
            service = self._source.tenants()
        except MissingPartError:
            return
        if self._transition is None:
            self._transition = await service.newest_transition()
        for row in await service.transitions(after=self._transition, limit=PAGE):
            self._transition = row.sequence
            fields = {name: getattr(row, name) for name in _TRANSITION_FIELDS}
            message = {"kind": "tenant", "at": row.occurred_at, "transition": fields}
            for listener in self._listeners:
                if "tenant" in listener.query.kinds and listener.tenant_id in (None, row.tenant_id):
                    listener.offer(message)


_TRANSITION_FIELDS = (
    "sequence",
    "delivery_id",
    "tenant_id",
    "tenant_identifier",
    "tenant_name",
    "transition",
    "previous_status",
    "new_status",
    "reason",
    "actor",
    "occurred_at",
)


def _sequence(message: Mapping[str, Any]) -> int:
    return message["event"]["sequence"] if message["kind"] == "changed" else 0


async def _send(socket: "WebSocketConnection", messages: Sequence[Mapping[str, Any]]) -> None:
    """Send messages in one frame, a line each; nothing without any."""
    if messages:
        await socket.send_message(b"\n".join(map(msgspec.json.encode, messages)).decode())


async def _close(socket: "WebSocketConnection", code: int, reason: str) -> None:
    with trio.move_on_after(CLOSE_SECONDS):
        await socket.aclose(code, reason)


async def _ping(socket: "WebSocketConnection") -> None:
    """Raise TooSlowError when a listener does not answer a ping in time."""
    while True:
        await trio.sleep(HEARTBEAT_SECONDS)
        with trio.fail_after(PONG_SECONDS):
            await socket.ping()
