"""The connection pool of a client: assignment, dialling and ageing of connections.

Every decision is synchronous and takes constant time in the number of requests and HTTP/1.1
connections. Dials run in tasks of the pool, not of the requests: a cancelled request leaves the
connection to the next one. A slot is taken when a dial starts and freed when the connection closes,
in one place each.

A slow dial is raced by another one, like "Happy Eyeballs" over addresses (RFC 8305): a lost SYN, or
a server that accepts and stays silent, delays no request. docs/adr/0028-network-incidents.md has
the measurements behind the times.
"""

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from ssl import SSLCertVerificationError, SSLContext

import trio

from ..base import opener
from ..base.logs import get_logger
from ..config.options.client import ConnectionOptions
from .http1 import Http1Connection
from .http2 import PING_SECONDS, Http2Connection
from .messages import (
    Abandoned,
    ClosedError,
    ConnectFailedError,
    ConnectTimedOutError,
    Incident,
    NetworkError,
    Origin,
    PoolTimedOutError,
    Timeouts,
)
from .origin import ConnectionAttempt, OriginConnections, OriginServer, PoolStatistics, Waiter
from .socket import Dial, open_wire

#: The limit in seconds of connecting, TLS and the first settings, if the request sets none. Without
#: it, a dial that no request waits for would hold its slot for the kernel's two minutes.
CONNECT_SECONDS = 10.0
#: A connection whose PING is unanswered for this time, in seconds, gets no new requests.
SUSPECT_SECONDS = 1.0
#: Pause after a failed attempt to add an HTTP/2 connection, in seconds, while others are open.
REDIAL_SECONDS = 1.0
#: The first dial is overdue after ``RACE_SECONDS``, the delay that RFC 8305 (5) recommends, or
#: after twice the time of the last successful dial. Each further dial may take twice as long as its
#: predecessor, up to ``LONGEST_RACE_SECONDS``: ten seconds of silence see eight dials.
RACE_SECONDS = 0.25
LONGEST_RACE_SECONDS = 2.0
#: After this many seconds, an overdue dial gives its slot to a new one if no other is free.
GIVE_UP_SECONDS = 1.0
#: The shortest and longest pause, in seconds, between two passes of the reaper. The longest one
#: bounds how long a connection closed by the server keeps its slot.
REAP_SECONDS = (0.02, 15.0)

_log = get_logger("client")


class ConnectionPool:
    """Connections by origin, bounded by host.

    Args:
        limits: the settings, read on each use.
        tls: called at the first ``https`` connection for the context of all of them.
        nursery: runs dials, HTTP/2 connections and the reaper; cancelling it ends all of them.
        dial: makes TCP connections; None: Trio, and a dial that races another one picks an address
            that no other tries.
    """

    def __init__(
        self,
        limits: ConnectionOptions,
        *,
        tls: Callable[[], SSLContext],
        nursery: trio.Nursery,
        dial: Dial | None = None,
    ) -> None:
        self._limits = limits
        self._dial_tcp = dial
        self._tls = tls
        self._nursery = nursery
        self._servers: dict[str, OriginServer] = {}
        self._closed = False

    def statistics(self) -> PoolStatistics:
        """Count connections, attempts and waiting requests at this moment."""
        lanes = [lane for server in self._servers.values() for lane in server.lanes.values()]
        multiplexed = [connection for lane in lanes for connection in lane.multiplexed]
        idle = sum(len(lane.idle) for lane in lanes)
        active = sum(len(lane.active) for lane in lanes)
        return PoolStatistics(
            connections=idle + active + len(multiplexed),
            idle=idle + sum(connection.in_use == 0 for connection in multiplexed),
            connecting=sum(len(lane.attempts) for lane in lanes),
            waiting=sum(len(lane.waiters) for lane in lanes),
            exchanges=active + sum(connection.in_use for connection in multiplexed),
        )

    async def acquire(
        self, origin: Origin, timeouts: Timeouts, abandoned: Abandoned | None = None
    ) -> Http1Connection | Http2Connection:
        """Return a connection on which one exchange with ``origin`` may start, in FIFO order.

        It does not checkpoint if a connection is free; the exchange does. Cancellation returns a
        connection that was assigned in the meantime, and calls ``abandoned`` with the incident that
        the request waited for.

        Raises:
            ConnectFailedError: the server cannot be reached.
            ClosedError: the pool was closed.
            PoolTimedOutError: none became free within the timeouts.
        """
        if self._closed:
            await trio.lowlevel.checkpoint()
            raise ClosedError("the client was closed")
        lane = self._lane(origin)
        # Waiting requests go first, even if a connection is free now.
        if not lane.waiters:
            connection = self._take(lane)
            if connection is not None:
                return connection
        waiter = Waiter(timeouts)
        if not lane.waiters:
            self._begin_race(lane, waiter.began)
        lane.waiters[waiter] = None
        self._dial_where_needed(lane.server)
        limit = float("inf")
        if timeouts.pool is not None:
            limit = timeouts.pool + (timeouts.connect or 0)
        try:
            with trio.move_on_after(limit):
                await waiter.arrival.wait()
        except BaseException:
            lane.waiters.pop(waiter, None)
            if waiter.connection is not None:
                self._give_back(waiter.connection)
            # Report what the request waited for: a hanging dial is evidence about the upstream, a
            # full pool is not.
            if abandoned is not None:
                abandoned(_awaited_incident(lane, waiter), False)
            raise
        if waiter.connection is not None:
            return waiter.connection
        if waiter.error is not None:
            raise waiter.error
        lane.waiters.pop(waiter, None)
        raise PoolTimedOutError(f"no connection to {origin} was free within {limit:g} s")

    def forget_idle(self, origin: Origin) -> None:
        """Close the unused connections to ``origin``, since one of them was dead."""
        lane = self._lane(origin)
        for connection in lane.idle:
            self._close(lane, connection)
        lane.idle.clear()

    def close(self) -> None:
        """Close everything at once; waiting requests fail. The pool is then unusable."""
        self._closed = True
        for server in self._servers.values():
            for lane in server.lanes.values():
                for connection in lane.idle:
                    self._close(lane, connection)
                lane.idle.clear()
                for active in list(lane.active):
                    active.close()
                for multiplexed in list(lane.multiplexed):
                    multiplexed.close()
                for attempt in list(lane.attempts):
                    self._give_up(lane, attempt)
                self._fail_waiters(lane, ClosedError("the client was closed"))

    async def reap(self) -> None:
        """Close idle and old connections until cancelled.

        Otherwise they would be noticed only at the next request, and an idle client would keep its
        connections indefinitely.
        """
        while True:
            lanes = [lane for server in self._servers.values() for lane in server.lanes.values()]
            unused = [(it.idle_since, it.created) for lane in lanes for it in lane.unused]
            await trio.sleep(reaper_pause(self._limits, unused, trio.current_time()))
            for name, server in list(self._servers.items()):
                for lane in server.lanes.values():
                    self._reap_lane(lane)
                self._dial_where_needed(server)
                # A client that calls many hosts over time must not keep a record of each.
                if not server.slots_taken and not any(
                    lane.waiters for lane in server.lanes.values()
                ):
                    del self._servers[name]

    # -- taking a connection

    def _lane(self, origin: Origin) -> OriginConnections:
        server = self._servers.get(origin.host)
        if server is None:
            server = self._servers[origin.host] = OriginServer()
        lane = server.lanes.get(origin)
        if lane is None:
            lane = server.lanes[origin] = OriginConnections(origin, server)
            # Without TLS, ALPN cannot negotiate HTTP/2, so each waiting request needs a connection.
            if origin.scheme == "http" or not self._limits.enable_http2:
                lane.http2 = False
        return lane

    def _take(self, lane: OriginConnections) -> Http1Connection | Http2Connection | None:
        now = trio.current_time()
        for multiplexed in lane.multiplexed:
            if multiplexed.is_suspect(now, SUSPECT_SECONDS):
                # Closing may change the list being iterated, so start over.
                if multiplexed.is_suspect(now, PING_SECONDS):
                    multiplexed.close()
                    return self._take(lane)
            elif multiplexed.has_free_stream:
                if not self._is_old(multiplexed, now):
                    multiplexed.in_use += 1
                    return multiplexed
                multiplexed.is_draining = True
                if not multiplexed.in_use:
                    multiplexed.close()
                    return self._take(lane)
        # Most recently used first: the others become idle and are closed, so few connections remain
        # after a burst.
        while lane.idle:
            connection = lane.idle.pop()
            if self._is_worn(connection, now):
                self._close(lane, connection)
            else:
                lane.active.add(connection)
                return connection
        return None

    def _is_old(self, connection: Http1Connection | Http2Connection, now: float) -> bool:
        return now - connection.created >= 60 * self._limits.pooled_connection_lifetime_minutes

    def _is_spent(self, connection: Http1Connection | Http2Connection, now: float) -> bool:
        idle = 60 * self._limits.pooled_connection_idle_timeout_minutes
        return now - connection.idle_since >= idle

    def _is_worn(self, connection: Http1Connection, now: float) -> bool:
        return (
            self._is_old(connection, now)
            or self._is_spent(connection, now)
            or not connection.is_quiet()
        )

    # -- giving a connection back

    def _give_back(self, connection: Http1Connection | Http2Connection) -> None:
        """Undo an unused assignment."""
        if isinstance(connection, Http2Connection):
            connection.in_use -= 1
        connection.released()

    def _http1_released(self, lane: OriginConnections, connection: Http1Connection) -> None:
        lane.active.discard(connection)
        now = trio.current_time()
        # Checked here too: under constant load a connection goes directly to the next waiting
        # request, without ``_take``.
        if connection.is_closed or self._is_old(connection, now) or self._closed:
            self._close(lane, connection)
            self._dial_where_needed(lane.server)
        elif lane.waiters:
            lane.active.add(connection)
            self._assign(lane, connection)
        else:
            connection.idle_since = now
            lane.idle.append(connection)
            if len(lane.server.lanes) > 1:
                self._dial_where_needed(lane.server)  # another origin may want its slot

    def _http2_released(self, lane: OriginConnections, connection: Http2Connection) -> None:
        if connection.is_closed:
            if connection in lane.multiplexed:
                lane.multiplexed.remove(connection)
                lane.server.slots_taken -= 1
        else:
            if self._is_old(connection, trio.current_time()):
                connection.is_draining = True
            if connection.is_draining and not connection.in_use:
                connection.close()  # which calls this method again
                return
            while lane.waiters and connection.has_free_stream:
                connection.in_use += 1
                self._assign(lane, connection)
        if lane.waiters:
            self._dial_where_needed(lane.server)

    def _assign(
        self, lane: OriginConnections, connection: Http1Connection | Http2Connection
    ) -> None:
        waiter, _ = lane.waiters.popitem(last=False)
        waiter.connection = connection
        waiter.arrival.set()

    def _close(self, lane: OriginConnections, connection: Http1Connection) -> None:
        connection.close()
        lane.server.slots_taken -= 1

    def _fail_waiters(self, lane: OriginConnections, error: NetworkError) -> None:
        while lane.waiters:
            self._fail_waiter(lane, error)

    def _fail_waiter(self, lane: OriginConnections, error: NetworkError) -> None:
        waiter, _ = lane.waiters.popitem(last=False)
        waiter.error = error.again()
        waiter.arrival.set()

    # -- connecting

    def _begin_race(self, lane: OriginConnections, now: float) -> None:
        """Mark attempts that already hang as overdue, for the first waiting request.

        Otherwise it would wait until each becomes overdue, although they were slow before it came.
        """
        usual = 2 * lane.connect_seconds
        lane.patience = min(max(RACE_SECONDS, usual), LONGEST_RACE_SECONDS)
        for attempt in lane.attempts:
            if now - attempt.began >= lane.patience:
                self._note_overdue(lane, attempt)

    def _note_overdue(self, lane: OriginConnections, attempt: ConnectionAttempt) -> None:
        if not attempt.is_overdue:
            attempt.is_overdue = True
            lane.promising -= 1

    def _dial_where_needed(self, server: OriginServer) -> None:
        for lane in server.lanes.values():
            if not lane.waiters:
                continue
            while lane.promising < self._dials_wanted(lane):
                if server.slots_taken >= self._limits.max_connections_per_server and not (
                    self._evict_for(lane)
                ):
                    return
                self._begin_dial(lane)

    def _dials_wanted(self, lane: OriginConnections) -> int:
        """Return how many attempts of the origin should not be overdue."""
        if self._closed or not lane.waiters:
            return 0
        has_live_http2 = lane.http2 is not False and self._has_live_http2(lane)
        if (has_live_http2 or lane.attempts) and trio.current_time() < lane.dial_after:
            return 0
        if lane.http2 is False:
            return len(lane.waiters)
        if has_live_http2 and not self._limits.enable_multiple_http2_connections:
            return 0
        if has_live_http2 and lane.multiplexed[-1].takes_none:
            return 0  # the server would give another connection the same limit
        # One at a time: the number of streams that it can carry decides whether more are needed.
        return 1

    def _has_live_http2(self, lane: OriginConnections) -> bool:
        now = trio.current_time()
        return any(
            not connection.is_draining and not connection.is_suspect(now, SUSPECT_SECONDS)
            for connection in lane.multiplexed
        )

    def _evict_for(self, lane: OriginConnections) -> bool:
        """Free a slot of an unused connection to another origin of the host, or of an old dial."""
        now = trio.current_time()
        for other in lane.server.lanes.values():
            if other is not lane and other.idle:
                self._close(other, other.idle.pop(0))
                return True
            for connection in other.multiplexed:
                if other is not lane and not connection.in_use:
                    connection.close()
                    return True
            if (other is lane or not other.waiters) and other.attempts:
                oldest = other.attempts[0]
                if oldest.is_overdue and now - oldest.began >= GIVE_UP_SECONDS:
                    self._give_up(other, oldest)
                    lane.given_up = oldest if other is lane else None
                    return True
        return False

    def _begin_dial(self, lane: OriginConnections, *, is_second: bool = False) -> None:
        first = next(iter(lane.waiters))
        connect = first.timeouts.connect
        limit = CONNECT_SECONDS if connect is None else connect
        attempt = ConnectionAttempt(patience=lane.patience, limit=limit)
        attempt.is_second = is_second
        predecessor, lane.given_up = lane.given_up, None
        if predecessor is not None and predecessor.since >= first.began:
            # The attempt continues the one whose slot it took, so the request's connect time runs
            # from that one's start.
            attempt.since = predecessor.since
            attempt.scope.deadline = predecessor.scope.deadline
        lane.attempts.append(attempt)
        lane.promising += 1
        lane.server.slots_taken += 1
        self._nursery.start_soon(self._dial, lane, attempt, limit)
        self._nursery.start_soon(self._watch, lane, attempt)

    async def _watch(self, lane: OriginConnections, attempt: ConnectionAttempt) -> None:
        """Start another attempt when ``attempt`` is overdue, and allow giving it up later."""
        with attempt.watch:
            await trio.sleep(attempt.patience)
            self._note_overdue(lane, attempt)
            lane.patience = min(max(lane.patience, 2 * attempt.patience), LONGEST_RACE_SECONDS)
            self._dial_where_needed(lane.server)
            await trio.sleep(max(0.0, GIVE_UP_SECONDS - attempt.patience))
            self._dial_where_needed(lane.server)

    async def _dial_later(self, server: OriginServer, seconds: float) -> None:
        await trio.sleep(seconds)
        self._dial_where_needed(server)

    def _end_attempt(self, lane: OriginConnections, attempt: ConnectionAttempt) -> None:
        """Remove ``attempt``; the caller frees its slot."""
        if attempt in lane.attempts:
            lane.attempts.remove(attempt)
            self._note_overdue(lane, attempt)
            attempt.watch.cancel()

    def _give_up(self, lane: OriginConnections, attempt: ConnectionAttempt) -> None:
        """Cancel ``attempt`` at once and free its slot."""
        attempt.is_given_up = True
        lane.server.slots_taken -= 1
        self._end_attempt(lane, attempt)
        attempt.scope.cancel()

    async def _dial(
        self, lane: OriginConnections, attempt: ConnectionAttempt, limit: float
    ) -> None:
        try:
            await self._connect(lane, attempt, limit)
        except NetworkError as error:
            failure: NetworkError = error
        except Exception as error:  # a fault here must not end the whole client
            _log.error("client.connection_failed", origin=str(lane.origin), exc_info=error)
            failure = ConnectFailedError(f"cannot connect: {error!r}")
        else:
            return
        if not attempt.is_given_up:
            # All requests waiting for this attempt fail by one incident, which the breaker counts
            # once (ADR 28).
            failure.incident = attempt.incident
            self._dial_failed(lane, attempt, failure)

    async def _connect(
        self, lane: OriginConnections, attempt: ConnectionAttempt, limit: float
    ) -> None:
        connection: Http1Connection | Http2Connection | None = None
        try:
            with attempt.scope:
                protocols = ["http/1.1"]
                if self._limits.enable_http2:
                    protocols.insert(0, "h2")
                secure = lane.origin.scheme == "https"
                wire = await open_wire(
                    lane.origin,
                    context=self._tls() if secure else None,
                    protocols=protocols,
                    limit=limit,
                    dial=self._dial_tcp or partial(self._open_tcp, lane, attempt),
                )
                if wire.protocol == "h2":
                    multiplexed = Http2Connection(
                        wire,
                        released=lambda it: self._http2_released(lane, it),
                        created=trio.current_time(),
                    )
                    await self._nursery.start(multiplexed.run)
                    connection = multiplexed
                else:
                    connection = Http1Connection(
                        wire,
                        released=lambda it: self._http1_released(lane, it),
                        created=trio.current_time(),
                    )
            if connection is None:
                raise ConnectTimedOutError(f"{lane.origin} did not answer within {limit:g} s")
            ended = connection.is_closed
            if isinstance(connection, Http2Connection) and connection.is_draining:
                # A server that sends GOAWAY in its first frames accepts no requests. Counted as a
                # connection, it would be dialled again and again while a request waits.
                ended = True
            if attempt.is_given_up or ended:
                connection.close()
                connection = None
                raise ConnectFailedError(f"{lane.origin} closed the connection at once")
        finally:
            self._end_attempt(lane, attempt)
            if connection is None and not attempt.is_given_up:
                lane.server.slots_taken -= 1
        self._connected(lane, attempt, connection)

    async def _open_tcp(
        self, lane: OriginConnections, attempt: ConnectionAttempt, host: str, port: int
    ) -> trio.SocketStream:
        """Connect to ``host``, if possible at an address that no other attempt uses."""
        # A second attempt at the same address would mostly find the same silence.
        taken = {rival.address for rival in lane.attempts if rival is not attempt} - {None}
        if taken:
            for *_, address in await opener.resolve(host, port):
                if address[0] not in taken:
                    attempt.address = str(address[0])
                    with contextlib.suppress(OSError):
                        return await opener.dial_tcp(attempt.address, port)
        stream = await opener.dial_tcp(host, port)
        attempt.address = stream.socket.getpeername()[0]
        return stream

    def _connected(
        self,
        lane: OriginConnections,
        attempt: ConnectionAttempt,
        connection: Http1Connection | Http2Connection,
    ) -> None:
        # The next race waits for twice this time: a distant server must not look like a hanging
        # one.
        lane.connect_seconds = connection.created - attempt.began
        lane.dial_after = 0.0
        if isinstance(connection, Http2Connection):
            lane.http2 = True
            lane.multiplexed.append(connection)
            self._http2_released(lane, connection)
        else:
            lane.http2 = False
            self._http1_released(lane, connection)
        # With HTTP/2 one connection is enough, so all other attempts are given up; with HTTP/1.1
        # only hanging ones.
        if not lane.waiters:  # the race is over
            for rival in list(lane.attempts):
                if rival.is_overdue or lane.http2:
                    self._give_up(lane, rival)
        self._dial_where_needed(lane.server)

    def _dial_failed(
        self, lane: OriginConnections, attempt: ConnectionAttempt, error: NetworkError
    ) -> None:
        """Fail the requests that waited for this attempt; later ones keep waiting."""
        now = trio.current_time()
        if isinstance(error, ConnectTimedOutError):
            # Only requests that waited for the whole time fail.
            while lane.waiters and next(iter(lane.waiters)).began <= attempt.since:
                self._fail_waiter(lane, error)
                if lane.http2 is False:
                    break
        elif lane.http2 is False and len(lane.waiters) > len(lane.attempts):
            self._fail_waiter(lane, error)
        elif lane.http2 is not False and self._has_live_http2(lane):
            lane.dial_after = now + REDIAL_SECONDS
        elif not lane.attempts:
            # One connection would have carried all of these requests. A second dial costs one
            # handshake; retries would cost an attempt each and the whole retry budget. A refused
            # certificate would be refused again.
            certified = not isinstance(error.__cause__, SSLCertVerificationError)
            if len(lane.waiters) > 1 and certified and not attempt.is_second:
                self._begin_dial(lane, is_second=True)
            else:
                self._fail_waiters(lane, error)
        elif lane.waiters:
            # Other attempts are in progress and may succeed, so the next one starts after a pause.
            lane.dial_after = now + lane.patience
            self._nursery.start_soon(self._dial_later, lane.server, lane.patience)
            lane.patience = min(2 * lane.patience, LONGEST_RACE_SECONDS)
        self._dial_where_needed(lane.server)

    # -- ageing

    def _reap_lane(self, lane: OriginConnections) -> None:
        now = trio.current_time()
        kept = []
        for connection in lane.idle:
            if self._is_worn(connection, now):
                self._close(lane, connection)
            else:
                kept.append(connection)
        lane.idle = kept
        for multiplexed in list(lane.multiplexed):
            if self._is_old(multiplexed, now):
                multiplexed.is_draining = True
            unused = not multiplexed.in_use
            if multiplexed.is_suspect(now, PING_SECONDS) or (
                unused and (multiplexed.is_draining or self._is_spent(multiplexed, now))
            ):
                multiplexed.close()


def reaper_pause(
    limits: ConnectionOptions, unused: Iterable[tuple[float, float]], now: float
) -> float:
    """Return the seconds until the first unused connection reaches a limit.

    ``unused`` has the idle and open times of each. A connection that becomes unused during the
    pause reaches its idle limit after it, so no connection is closed late.
    """
    idle = 60 * limits.pooled_connection_idle_timeout_minutes
    lifetime = 60 * limits.pooled_connection_lifetime_minutes
    shortest, longest = REAP_SECONDS
    ends = (min(since + idle, created + lifetime) for since, created in unused)
    return max(shortest, min(min(ends, default=inf) - now, idle, lifetime, longest))


def _awaited_incident(lane: OriginConnections, waiter: Waiter) -> Incident | None:
    """Return the incident of the attempt that ``waiter`` waited for, None without one.

    Without an attempt it waited for a free slot, which is no evidence about the upstream.
    """
    if not lane.attempts:
        return None
    seen = (attempt for attempt in lane.attempts if attempt.began >= waiter.began)
    return next(seen, lane.attempts[-1]).incident
