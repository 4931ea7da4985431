"""The admin address as an ASGI application: routes, rights, limits, and the probes' answers.

``/livez`` only shows that the event loop runs. ``/readyz`` is for load balancers: one failed check
is enough. ``/healthz`` is for people: it also names degraded parts, which still work. None of them
checks the upstream, whose faults a restart would not fix.
"""

import platform
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
import trio

from ..base.clock import wall
from ..base.http import PASSED_ON, UPGRADE, Receive, Scope, Send
from ..base.logs import Throttle, get_logger
from ..base.public_addresses import host_name, is_loopback
from ..base.telemetry import Check, CheckSource, Sample
from ..base.throttle import TokenBucket
from ..errors import (
    InvalidTenantError,
    NotRunningError,
    StoreUnavailableError,
    TenantsDisabledError,
    UnknownTenantError,
)
from .access import PROOF, Access, Concurrency, Pacer, Refusal, header_map
from .api import (
    EVENTS,
    Actions,
    EventAnswerer,
    Reply,
    document,
    problem,
)
from .console import (
    DOCTOR_SECONDS,
    ConsoleAnswerer,
    ConsoleSource,
    MissingPartError,
    SecretsStayHereError,
)
from .console_page import console_file, is_of_console
from .metrics import CONTENT_TYPE, UnknownMetricError, expose, metric_of
from .pauses import PauseAnswerer
from .query import BadQueryError, parameters, parse_list, parse_replay, parse_show
from .series import STEP_SECONDS, Series
from .status import RunningProgram, StatusProviders, StoreObserver

if TYPE_CHECKING:
    from .feed import Feed

_log = get_logger("admin")

#: The largest body of a request, in bytes; an order to replay 1000 long ids fits.
MAX_BODY_BYTES = 256 * 1024

#: Wrong tokens that are answered per second, after the first few, to slow guessing. A correct token
#: never waits. Blocking by address would let anyone behind a shared address, or on loopback, lock
#: out the operator.
GUESSES_PER_SECOND = 5.0
GUESS_BURST = 10

#: The most of these answers that wait at the same time; further ones get 429 at once, so that
#: guessing cannot use up the connections.
MOST_GUESSES_WAITING = 16

#: Timeout of a call to the store, in seconds.
CALL_SECONDS = 10.0

#: Requests served per second: scrapers and people stay far below, and a flood takes little of the
#: time that deliveries need. Probes have their own limit. Above it other requests wait, but probes
#: are answered at once and their connections closed: a waiting connection holds a slot, and the
#: next probe would find none.
REQUESTS_PER_SECOND = 200.0
BURST = 50

#: The most probes that wait for a check of the store, in total and per source. Others get the
#: result of the last check: otherwise they would use all slots while the store hangs.
MOST_PROBES_WAITING = 32
MOST_PROBES_OF_ONE = 16

#: Refusals are logged once in this time, in seconds: strangers decide how many there are.
REFUSAL_LOG_SECONDS = 10.0

#: Failing parts and unknown metric names that are logged at most, each once.
MOST_REPORTED = 100

_CLOSES = (b"connection", b"close")

TOO_LARGE = Refusal(413, f"a body must not exceed {MAX_BODY_BYTES} bytes")

LIVE = "/livez"
PROBES = (LIVE, "/readyz")
#: Paths that are answered even during a flood: they have their own rate limit and connection slots.
HEALTH = (*PROBES, "/healthz")
REPLAY = f"{EVENTS}/replay"
TRIGGER = f"{EVENTS}/trigger"
RETRY = "/api/notifications/retry"
RELAY_SECRET = "/api/relay/secret"
TENANTS = "/api/tenants"
FEED = "/feed"


def is_ready(checks: Iterable[Check]) -> bool:
    """Return whether deliveries should be sent here."""
    return all(check.ok for check in checks)


def status_of(checks: Iterable[Check]) -> str:
    """Return ``failing``, ``degraded`` or ``ok``: the worst of the checks."""
    checks = tuple(checks)
    if not is_ready(checks):
        return "failing"
    return "degraded" if any(check.degraded for check in checks) else "ok"


def checks_document(checks: Sequence[Check], *, details: bool) -> list[dict[str, Any]]:
    """Return the checks as JSON; ``details`` adds the reasons, which strangers must not see."""
    return [
        {
            "name": check.name,
            "ok": check.ok,
            "degraded": check.degraded,
            **({"detail": check.detail} if details else {}),
        }
        for check in checks
    ]


class _Request(msgspec.Struct, frozen=True):
    """The parts of a request that routes use."""

    method: str
    path: str
    query: bytes
    headers: dict[str, str]
    body: bytes
    address: str | None = None
    is_local: bool = False


class _Route(msgspec.Struct, frozen=True):
    """A route: its handler, its time limit, and whether it changes something."""

    answer: Callable[[], Awaitable[Reply]]
    changes: bool = False
    seconds: float = CALL_SECONDS


class AdminApp:
    """Probes, metrics, the API and the feed of one running program.

    Args:
        observed: the program.
        sources: the checks and samples of the parts; may grow while it runs.
        access: the rights; :meth:`listen_at` gives it the real addresses.
        console: the parts that the console shows.
        version: of this package.
        concurrency: limits the requests in progress, except probes.
        source_of: maps a client's address to the source that its requests count for.
        directory: the data directory; None: nothing is stored in files.
        clock: returns Unix seconds.
        started_at: when the process started, in Unix seconds.
        tolerance: returns the most seconds by which a signature's time may be off.

    :meth:`run` must run concurrently: it polls the store for all requests.
    """

    def __init__(
        self,
        observed: RunningProgram,
        sources: StatusProviders,
        access: Access,
        console: ConsoleSource,
        *,
        version: str,
        concurrency: Concurrency,
        source_of: Callable[[str | None], Hashable],
        directory: Path | None = None,
        clock: Callable[[], float] = wall,
        started_at: float | None = None,
        tolerance: Callable[[], float] = lambda: 300.0,
    ) -> None:
        self._tolerance = tolerance
        self._observed = observed
        self._sources = sources
        self._access = access
        self._version = version
        self._clock = clock
        self._started_at = clock() if started_at is None else started_at
        #: The observations of the store.
        self.observer: StoreObserver = StoreObserver(
            observed.stores, directory=directory, clock=clock
        )
        self._source = console
        self._actions = Actions(clock)
        self._events = EventAnswerer(observed, self._actions, console.sign)
        self._console = ConsoleAnswerer(console, self._actions)
        self._pauses = PauseAnswerer(observed, self._actions, clock=clock)
        self._series = Series()
        self._feed: Feed | None = None
        self._nursery: trio.Nursery | None = None
        self._concurrency = concurrency
        self._source_of = source_of
        self._pacer = Pacer(per_second=REQUESTS_PER_SECOND, burst=BURST)
        self._probes = TokenBucket(per_second=REQUESTS_PER_SECOND, burst=BURST)
        self._probes_waiting = Concurrency(most=MOST_PROBES_WAITING, most_of_one=MOST_PROBES_OF_ONE)
        self._refusals = Throttle(lines=1, seconds=REFUSAL_LOG_SECONDS, clock=trio.current_time)
        self._guesses = Pacer(per_second=GUESSES_PER_SECOND, burst=GUESS_BURST)
        self._token_refusals = {"missing": 0, "wrong": 0}
        self._reported: set[object] = set()

    def listen_at(self, addresses: tuple[str, ...]) -> None:
        """Set the real addresses, which decide about Host headers and open routes."""
        self._access = attrs.evolve(self._access, addresses=addresses)

    def restrict(self, *, allowed_hosts: tuple[str, ...], read_only: bool) -> None:
        """Change the rights, from the next request on."""
        self._access = attrs.evolve(self._access, allowed_hosts=allowed_hosts, read_only=read_only)

    async def run(self) -> None:
        """Poll the store for all requests, and record the charts, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.observer.run)
            self._nursery = nursery
            try:
                while True:
                    self._series.note(self._part_samples(), self._clock())
                    await trio.sleep(STEP_SECONDS)
            finally:
                self._nursery = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI ``http`` request."""
        if scope["type"] != "http":
            raise NotRunningError(f"the admin address serves no {scope['type']} connections")
        if scope["path"] in HEALTH:
            hurried = self._probes.admit(trio.current_time()) > 0
            await self._serve(scope, receive, send, closes=hurried)
            return
        with self._concurrency.request(self._source_of(_address_of(scope))) as admitted:
            if admitted:
                await self._pacer.wait_for_slot()
                await self._serve(scope, receive, send)
        if not admitted:
            # Pipelined requests would keep the connection busy, so it could never be closed as
            # idle.
            extra = ((b"retry-after", b"1"), _CLOSES)
            await problem(503, "too many requests are in progress", *extra).send(send)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, *, closes: bool = False
    ) -> None:
        request = _Request(
            scope["method"],
            scope["path"],
            scope["query_string"],
            header_map(scope["headers"]),
            b"",
            _address_of(scope),
            _is_here(scope),
        )
        if closes:
            # Nothing slows these down, so none may reveal whether a token is correct.
            request.headers.pop("authorization", None)
        if request.path == FEED:
            await self._serve_feed(request, scope, send)
            return
        refusal = self._refusal(request)
        # Only a changing call has a body, read only after all checks of its head: anyone else's
        # unfinished body would hold a connection slot.
        if refusal is None and self._takes_body(request):
            body = await _read_body(receive)
            if body is None:
                return
            if len(body) > MAX_BODY_BYTES:
                refusal = TOO_LARGE
            request = msgspec.structs.replace(request, body=body)
        if refusal is None:
            reply = await self._answer(request)
        else:
            reply = await self._refuse(refusal, request.address)
        if closes:
            reply = msgspec.structs.replace(reply, extra=(*reply.extra, _CLOSES))
        await reply.send(send)

    def _takes_body(self, request: _Request) -> bool:
        route = self._find(request)
        return request.method == "POST" and route is not None and route.changes

    async def _serve_feed(self, request: _Request, scope: Scope, send: Send) -> None:
        """Upgrade the connection to WebSocket, or answer why not."""
        refusal = self._access.check_host(request.headers)
        refusal = refusal or self._access.check_feed(request.headers)
        reply: Reply | None
        if refusal is not None:
            reply = await self._refuse(refusal, request.address)
        elif request.method != "GET":
            reply = problem(405, "this path is read", (b"allow", b"GET"))
        else:
            reply = await self._upgrade(request, scope)
        if reply is not None:
            await reply.send(send)

    async def _upgrade(self, request: _Request, scope: Scope) -> Reply | None:
        # Loaded for the first listener: most receivers never have one.
        from .feed import Feed, TooManyListenersError, parse_feed

        try:
            if self._nursery is None:
                raise NotRunningError("the admin address is starting or stopping")
            if self._feed is None:
                self._feed = Feed(self._observed, self._source, self._version, clock=self._clock)
                self._nursery.start_soon(self._feed.run)
            query = parse_feed(request.query)
            tenant_id = await self._events.tenant_id(query.tenant)
            upgrade = scope["extensions"].get(UPGRADE)
            if query.relay:
                self._source.relay(request.is_local)
            if upgrade is None or upgrade.protocol != b"websocket":
                return problem(426, "this address speaks WebSocket", (b"upgrade", b"websocket"))
            await self._feed.serve(
                upgrade,
                query,
                tenant_id=tenant_id,
                address=request.address,
                is_local=request.is_local,
            )
        except TooManyListenersError as error:
            return problem(503, str(error), (b"retry-after", b"5"))
        except Exception as error:  # _failure re-raises unknown errors
            return self._failure(error, CALL_SECONDS)
        return None

    # -- access ---------------------------------------------------------------------

    async def _refuse(self, refusal: Refusal, address: str | None) -> Reply:
        suppressed = self._refusals.admit("admin.refused")
        if suppressed is not None:
            _log.warning(
                "admin.refused",
                status=refusal.status,
                reason=refusal.reason,
                address=address,
                suppressed=suppressed,
                wrong_tokens=self._token_refusals["wrong"],
            )
        if refusal.status == 401:
            self._token_refusals["wrong" if refusal.guessed else "missing"] += 1
        if refusal.guessed:
            if self._guesses.waiting >= MOST_GUESSES_WAITING:
                return problem(429, "too many wrong tokens", (b"retry-after", b"5"))
            # A wrong token waits for a rate slot, a missing one does not: only guessing gains by
            # speed.
            await self._guesses.wait_for_slot()
        extra = ((b"www-authenticate", b'Bearer realm="sdk_trio"'),) * (refusal.status == 401)
        return problem(refusal.status, refusal.reason, *extra)

    def _refusal(self, request: _Request) -> Refusal | None:
        if int(request.headers.get("content-length", "0")) > MAX_BODY_BYTES:
            return TOO_LARGE
        if request.path in PROBES:
            return self._refusal_of_probe(request)
        refusal = self._access.check_host(request.headers)
        if refusal is None and request.path == PROOF:
            refusal = self._access.check_proof(request.headers)
        elif refusal is None and self._needs_token(request.path):
            refusal = self._access.check_token(request.headers)
        if refusal is None and request.method == "POST":
            route = self._find(request)
            if route is not None and route.changes:
                # A dry run of a replay also counts as a changing call here: its answer would show
                # the store's content to another site's page.
                refusal = self._access.check_change(request.headers)
        return refusal

    def _refusal_of_probe(self, request: _Request) -> Refusal | None:
        """Refuse a wrong token where the answer would show whether it is right."""
        headers = request.headers
        if "authorization" not in headers or request.path == LIVE or self._shows_details(request):
            return None
        return self._access.check_token(headers)

    def _needs_token(self, path: str) -> bool:
        # Scrapers on this machine expect open metrics; elsewhere they would show strangers the
        # volume of business.
        if is_of_console(path):
            return False
        return not self._access.is_local or path == "/api" or path.startswith("/api/")

    def _shows_details(self, request: _Request) -> bool:
        if self._access.has_token(request.headers):
            return True
        return self._access.is_local and self._access.check_host(request.headers) is None

    # -- answers --------------------------------------------------------------------

    async def _answer(self, request: _Request) -> Reply:
        route = self._find(request)
        if route is None:
            return problem(404, "nothing is served at this path")
        if route.changes and request.method != "POST":
            return problem(405, "this path changes", (b"allow", b"POST"))
        if not route.changes and request.method not in ("GET", "HEAD"):
            return problem(405, "this path is read", (b"allow", b"GET, HEAD"))
        try:
            with trio.fail_after(route.seconds):
                return await route.answer()
        except Exception as error:  # _failure re-raises unknown errors
            return self._failure(error, route.seconds)

    def _failure(self, error: Exception, seconds: float) -> Reply:
        """Return the answer for a known error; re-raise any other."""
        match error:
            case BadQueryError() | InvalidTenantError():
                return problem(400, str(error))
            case MissingPartError() | UnknownTenantError() | TenantsDisabledError():
                return problem(404, str(error))
            case SecretsStayHereError():
                return problem(403, str(error))
            case NotRunningError() | StoreUnavailableError():
                return problem(503, str(error), (b"retry-after", b"5"))
            case trio.TooSlowError():
                reason = f"the store took longer than {seconds:g} s"
                return problem(503, reason, (b"retry-after", b"5"))
        raise error

    def _find(self, request: _Request) -> _Route | None:
        path = request.path
        if is_of_console(path):
            return _Route(lambda: self._page(request))
        if path in PROBES or path == "/healthz":
            return _Route(lambda: self._probe(request))
        if path == "/metrics":
            return _Route(self._metrics)
        body, address = request.body, request.address
        if path in (REPLAY, TRIGGER) and request.method in ("GET", "HEAD"):
            # An event may have this word as its id, because its sender chose it.
            return self._find_event(request)
        if path == REPLAY:
            return _Route(
                lambda: self._events.replay(parse_replay(body), address=address), changes=True
            )
        return self._find_console(request) or self._find_event(request)

    def _find_event(self, request: _Request) -> _Route | None:
        path, query = request.path, request.query
        if path == EVENTS:
            return _Route(lambda: self._events.list(parse_list(query)))
        if path.startswith(f"{EVENTS}/") and path != f"{EVENTS}/":
            webhook_id = path.removeprefix(f"{EVENTS}/")
            return _Route(
                lambda: self._events.show(
                    webhook_id, body=parse_show(query), is_local=request.is_local
                )
            )
        return None

    def _find_console(self, request: _Request) -> _Route | None:
        console, query = self._console, request.query
        body, address = request.body, request.address
        routes: dict[str, _Route] = {
            PROOF: _Route(lambda: self._prove(request)),
            "/api/status": _Route(self._status),
            "/api/overview": _Route(self._overview),
            "/api/dead": _Route(lambda: self._dead(query)),
            "/api/rejections": _Route(lambda: console.rejections(query)),
            "/api/settings": _Route(console.settings),
            "/api/replication": _Route(console.replication),
            "/api/alerts": _Route(console.alerts),
            "/api/types": _Route(console.types),
            "/api/actions": _Route(console.actions),
            "/api/doctor": _Route(console.doctor, seconds=DOCTOR_SECONDS),
            "/api/relay": _Route(lambda: console.relay(request.is_local, self._newest)),
            "/api/notifications": _Route(lambda: console.messages(query)),
            "/api/notifications/preview": _Route(lambda: console.preview(query)),
            "/api/pauses": _Route(self._pauses.active),
            "/api/pause": _Route(lambda: self._pauses.pause(body, address), changes=True),
            "/api/resume": _Route(lambda: self._pauses.resume(body, address), changes=True),
            TENANTS: _Route(lambda: console.tenants(query)),
            TRIGGER: _Route(lambda: console.trigger(body, address), changes=True),
            RETRY: _Route(lambda: console.retry_messages(body, address), changes=True),
            RELAY_SECRET: _Route(
                lambda: console.relay_secret(body, address, is_local=request.is_local), changes=True
            ),
        }
        if (found := routes.get(request.path)) is not None:
            return found
        name, slash, rest = request.path.removeprefix(f"{TENANTS}/").partition("/")
        if not request.path.startswith(f"{TENANTS}/") or not name:
            return None
        if not slash:
            return _Route(lambda: console.tenant(name))
        if rest == "audit":
            return _Route(lambda: console.audit(name, query))
        if rest == "transition":
            return _Route(lambda: console.change_tenant(name, body, address), changes=True)
        return None

    async def _prove(self, request: _Request) -> Reply:
        return document(200, {"proof": self._access.prove(request.headers)})

    async def _page(self, request: _Request) -> Reply:
        return console_file(request.path, request.headers)

    async def _probe(self, request: _Request) -> Reply:
        # Liveness checks only the event loop: a restart would not fix other faults
        # (docs/adr/0018-admin-address.md).
        if request.path == LIVE:
            return document(200, {"alive": True})
        with self._probes_waiting.request(self._source_of(request.address)) as admitted:
            if admitted:
                await self.observer.wait_for_check()
        checks = self._checks()
        shown = checks_document(checks, details=self._shows_details(request))
        ready = is_ready(checks)
        if request.path == "/readyz":
            return document(200 if ready else 503, {"ready": ready, "checks": shown})
        summary = {
            "status": status_of(checks),
            "state": self._observed.state,
            "version": self._version,
            "uptime_seconds": self._uptime(),
            "checks": shown,
        }
        return document(200 if ready else 503, summary)

    async def _metrics(self) -> Reply:
        await self.observer.wait_for_figures()
        await self._observed.refresh()
        return Reply(200, expose(self._samples()), CONTENT_TYPE)

    async def _status(self) -> Reply:
        await self.observer.wait_for_figures()
        await self._observed.refresh()
        figures = self.observer.figures
        events = figures and {str(state): count for state, count in figures.events.items()}
        tenants = figures and figures.tenants
        checks = self._checks()
        return document(
            200,
            {
                "version": self._version,
                "state": self._observed.state,
                "status": status_of(checks),
                "started_at": self._started_at,
                "uptime_seconds": self._uptime(),
                "read_only": self._access.read_only,
                **self._observed.status(),
                "oldest_seconds": self.observer.oldest_seconds(),
                "events": events,
                "tenants": tenants and {str(status): count for status, count in tenants.items()},
                "checks": checks_document(checks, details=True),
            },
        )

    async def _overview(self) -> Reply:
        await self.observer.wait_for_figures()
        figures, source = self.observer.figures, self._source
        events = figures and {str(state): count for state, count in figures.events.items()}
        tenants = figures and figures.tenants
        checks, program = self._checks(), self._observed.status()
        lag = [
            sample.value
            for sample in self._part_samples()
            if sample.name == "sdk_replication_lag_seconds"
        ]
        return document(
            200,
            {
                "at": self._clock(),
                "version": self._version,
                "state": self._observed.state,
                "status": status_of(checks),
                "started_at": self._started_at,
                "uptime_seconds": self._uptime(),
                "development": source.development,
                "read_only": self._access.read_only,
                "features": list(source.features),
                "queue": {
                    "depth": program["queue_depth"],
                    "capacity": program["queue_capacity"],
                    "oldest_seconds": self.observer.oldest_seconds(),
                },
                "events": events,
                "tenants": tenants and {str(status): count for status, count in tenants.items()},
                "circuit": source.circuit,
                # Infinite if a replica never caught up, which JSON cannot express.
                "replication_lag_seconds": lag[0] if lag and lag[0] < inf else None,
                "series": {"step_seconds": STEP_SECONDS, "points": self._series.steps},
                "checks": checks_document(checks, details=True),
            },
        )

    async def _dead(self, query: bytes) -> Reply:
        given = parameters(query, ("type", "tenant", "source"))
        type_, tenant, source = map(given.get, ("type", "tenant", "source"))
        return await self._events.dead_groups(type=type_, tenant=tenant, source=source)

    async def _newest(self) -> int:
        return await self._observed.stores()[0].last_sequence()

    def _checks(self) -> list[Check]:
        clock = self.observer.clock_check(self._tolerance())
        own = [self.observer.check(), self.observer.check_leases()]
        if clock is not None:
            own.append(clock)
        return [*own, *map(self._ask, self._sources.checks)]

    def _ask(self, source: CheckSource) -> Check:
        """Return the check of a part; a check that raises is a failed one."""
        try:
            return source()
        except Exception as error:  # a fault of one part must not silence a probe
            self._report_once(source, error)
            return Check(getattr(source, "__name__", "part"), False, "the check itself failed")

    def _samples(self) -> Iterator[Sample]:
        python = platform.python_version()
        yield Sample("sdk_build_info", (("version", self._version), ("python", python)), 1)
        yield Sample("process_start_time_seconds", (), self._started_at)
        yield Sample("sdk_draining", (), self._observed.state == "draining")
        for check in self._checks():
            yield Sample("sdk_check_ok", (("check", check.name),), check.ok)
        for reason, count in self._token_refusals.items():
            yield Sample("sdk_admin_token_refusals_total", (("reason", reason),), count)
        yield from self.observer.samples()
        yield from self._part_samples()

    def _part_samples(self) -> Iterator[Sample]:
        for source in self._sources.samples:
            try:
                yield from filter(self._is_known, source())
            except Exception as error:  # it must not hide the metrics of all the others
                self._report_once(source, error)

    def _is_known(self, sample: Sample) -> bool:
        known = metric_of(sample.name) is not None
        if not known:
            self._report_once(sample.name, UnknownMetricError(sample.name))
        return known

    def _report_once(self, part: object, error: Exception) -> None:
        # Bounded, because a faulty part may make up a new name for every sample.
        if part not in self._reported and len(self._reported) < MOST_REPORTED:
            self._reported.add(part)
            # The error's text may contain secrets; its type and the part are enough to find it.
            name = part if isinstance(part, str) else getattr(part, "__qualname__", repr(part))
            _log.error("admin.source_failed", part=name, error=type(error).__name__)

    def _uptime(self) -> float:
        return round(max(0.0, self._clock() - self._started_at), 3)


def _is_here(scope: Any) -> bool:
    """Return whether a request comes from this machine, as far as known."""
    address = _address_of(scope)
    if any(name in PASSED_ON for name, _ in scope["headers"]):
        return False
    if address is None:
        return True
    # A proxy that adds no header usually keeps the name that the client requested.
    host = host_name(header_map(scope["headers"]).get("host", ""))
    return is_loopback(address) and is_loopback(host)


def _address_of(scope: Any) -> str | None:
    client = scope.get("client")
    return (client[0] or None) if client else None


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body, or more than :data:`MAX_BODY_BYTES` of a larger one.

    None: it is incomplete. Then the server answers, if the client is still connected.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES or not message.get("more_body", False):
            return bytes(body)
