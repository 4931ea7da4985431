"""The pipeline: the shared state of a client's calls, and the layers that each passes.

From the outside in: the call's deadline, the rate limiter with its pause after a 429, retry, hedge,
the breaker of the origin, the attempt timeout, the transport. Only :meth:`Pipeline.layers` defines
this order. :class:`ClientConfig` is the settings as the client uses them, computed by pure
functions.
"""

import platform
import random
import re
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Self
from urllib.parse import urlencode, urlsplit

import attrs
import httpx
import trio

from .._version import __version__
from ..base.breaker import BreakerPolicy, BreakerState
from ..base.clock import wall
from ..base.http import DEFAULT_PORTS
from ..base.logs import get_logger
from ..base.telemetry import find_tracer
from ..config import Mode, Settings, bundled_api_version
from ..errors import NotRunningError, OptionsValidationError, Problem
from .answers import ResponseStream, is_acceptable, refused, request_id_of
from .call import (
    METHODS_WITH_BODY,
    Call,
    HeaderList,
    Unset,
    chosen,
    credentials_in,
    encode_json,
    idempotency_key,
    join_url,
    may_execute_twice,
    merge_headers,
)
from .errors import ApiError, CallError, without_frames
from .layers import (
    AttemptHook,
    AttemptKind,
    CallLayer,
    CallsInProgress,
    ClientCounters,
    DeadlineLayer,
    chained,
)
from .layers.admission import AdmissionLayer, Limiters, LimitPolicy, RateGate
from .layers.attempt import AttemptLayer
from .layers.breaker import BreakerLayer, Breakers
from .layers.retry import BudgetPolicy, HedgeLayer, RetryBudget, RetryLayer, RetryPolicy

MILLISECONDS = 1000.0

#: The least total time of a call, in seconds, if none is configured. It equals the longest wait for
#: our own rate limit: a shorter one would end calls that wait their regular time.
LEAST_TOTAL_SECONDS = 120.0

#: Words in an access token that name its environment.
_SANDBOX_WORDS = frozenset({"sandbox", "test", "testing"})
_PRODUCTION_WORDS = frozenset({"production", "prod", "live"})


@attrs.frozen(kw_only=True)
class ClientConfig:
    """The settings in the form that the client uses. Times are in seconds, None for no limit.

    ``base_url`` includes the base path, without a trailing slash; ``origin`` is its scheme, host
    and port. ``upstream_honours_keys``: a write with an idempotency key may be repeated.
    """

    mode: str
    base_url: str
    origin: str
    access_token: str = attrs.field(repr=False)
    version_header: str
    api_version: str
    attempt_timeout: float
    total_timeout: float | None
    hedge_after: float | None
    retry: RetryPolicy
    breaker: BreakerPolicy
    limit: LimitPolicy = attrs.field(factory=LimitPolicy)
    max_answer_bytes: int | None = None
    upstream_honours_keys: bool = False
    idempotency_header: str = "Idempotency-Key"
    organization_header: str = "Polar-Organization"

    @property
    def host(self) -> str:
        """Return the name or address of the upstream."""
        return urlsplit(self.base_url).hostname or ""

    def headers(self, *, user_agent: str) -> HeaderList:
        """Return the headers of every request except the token's, ``Host`` first."""
        # Host includes a non-default port, but never user and password (RFC 9110, 7.2).
        host = urlsplit(self.base_url).netloc.rpartition("@")[2]
        return HeaderList(
            [
                (b"Host", host.encode("idna") if not host.isascii() else host.encode("ascii")),
                (b"Accept", b"application/json"),
                (b"Accept-Encoding", b"gzip, deflate"),
                (b"User-Agent", user_agent.encode("ascii")),
                (self.version_header.encode("ascii"), self.api_version.encode("ascii")),
            ]
        )

    def total_timeout_of(self, *, attempt_timeout: float, max_retries: int) -> float:
        """Return the total time in seconds of a call without a configured one.

        It is two minutes, or the time that all attempts need if each takes its whole timeout and
        each wait is the longest. So it cuts no attempt short, and the rest is for waits requested
        by the upstream.
        """
        attempts = attempt_timeout * (max_retries + 1) + self.retry.cap_seconds * max_retries
        return max(LEAST_TOTAL_SECONDS, attempts)

    def summary(self) -> dict[str, object]:
        """Return the fields of the startup log line; it contains no secret."""
        return {
            "mode": self.mode,
            "base_url": self.base_url,
            "version": f"{self.version_header}: {self.api_version}",
            "attempt_timeout": self.attempt_timeout,
            "total_timeout": self.total_timeout
            or self.total_timeout_of(
                attempt_timeout=self.attempt_timeout, max_retries=self.retry.max_retries
            ),
            "max_retries": self.retry.max_retries,
            "hedge_after": self.hedge_after,
            "breaker": (
                f"{self.breaker.failure_threshold} failures in {self.breaker.sampling_seconds:g} s,"
                f" open for {self.breaker.break_seconds:g} s"
            ),
            "requests_per_minute": self.limit.per_minute,
            "upstream_honours_keys": self.upstream_honours_keys,
        }


def plan_of(settings: Settings) -> ClientConfig:
    """Return the plan for ``settings``.

    Raises:
        OptionsValidationError: they have no usable access token, or no base address. Settings
            validated for the client have both.
    """
    token = "" if settings.access_token is None else settings.access_token.reveal()
    problems = []
    if problem := token_problem(token):
        problems.append(Problem("Sdk:AccessToken", problem))
    if not settings.base_url:
        problems.append(Problem("Sdk:CustomBaseUrl", "is missing: Mode Custom needs it"))
    if problems:
        raise OptionsValidationError(problems)
    resilience = settings.resilience
    return ClientConfig(
        mode=str(settings.mode),
        base_url=join_base(settings.base_url, settings.base_path),
        origin=origin_of(settings.base_url),
        access_token=token,
        version_header=settings.upstream.version_header,
        api_version=settings.api_version or bundled_api_version(settings.upstream.version_header),
        attempt_timeout=settings.timeout_ms / MILLISECONDS,
        total_timeout=_seconds(settings.total_timeout_ms),
        hedge_after=_seconds(resilience.hedge_after_ms),
        retry=RetryPolicy(max_retries=settings.max_retries),
        breaker=BreakerPolicy(
            failure_threshold=resilience.circuit_breaker_failure_threshold,
            sampling_seconds=resilience.circuit_breaker_sampling_seconds,
            break_seconds=resilience.circuit_breaker_break_seconds,
        ),
        limit=LimitPolicy(per_minute=settings.upstream.requests_per_minute),
        max_answer_bytes=settings.connection.max_answer_bytes,
        upstream_honours_keys=settings.upstream.honours_idempotency_keys,
        organization_header=settings.upstream.organization_header,
    )


def join_base(base_url: str, base_path: str) -> str:
    """Return the address that paths are appended to, without a trailing slash."""
    path = base_path.strip("/")
    return f"{base_url.rstrip('/')}/{path}" if path else base_url.rstrip("/")


def origin_of(url: str) -> str:
    """Return scheme, host and port of ``url``, always including the port."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    # With the port, so that https://host and https://host:443 share a breaker and a limiter.
    port = DEFAULT_PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def token_problem(token: str) -> str | None:
    """Return why ``token`` cannot be sent, None if it can; the token is not quoted."""
    if not token:
        return "is missing: the client needs an organization access token"
    # A line break at the end, from the file that the token was copied from, would end the header.
    if not (token.isascii() and token.isprintable()) or " " in token:
        return "has a space, line break or other invalid character: copy it again"
    return None


def token_warning(token: str, mode: Mode) -> str | None:
    """Return a warning if ``token`` looks like the other environment's, otherwise None.

    A guess from the words in its prefix; the warning quotes no part of the token.
    """
    # The last part is random and may contain any letters.
    words = set(re.split(r"[_\-.]", token.lower())[:-1])
    if mode is Mode.LIVE and words & _SANDBOX_WORDS:
        return "Sdk:AccessToken looks like a sandbox token, and Sdk:Mode is Live"
    if mode is Mode.TEST and words & _PRODUCTION_WORDS:
        return "Sdk:AccessToken looks like a production token, and Sdk:Mode is Test"
    return None


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / MILLISECONDS


logger = get_logger("client")

JSON_TYPE = "application/json"
FORM_TYPE = "application/x-www-form-urlencoded"

_NOT_OPEN = "the client is not open: use it inside 'async with Client(...)'"


@attrs.frozen(kw_only=True)
class RequestSources:
    """The clock, randomness and keys of a client; replaceable in tests.

    ``clock`` must be Trio's. ``random`` returns 0 to 1, ``new_key`` a unique text.
    """

    clock: Callable[[], float] = trio.current_time
    wall_clock: Callable[[], float] = wall
    random: Callable[[], float] = random.random
    new_key: Callable[[], str] = lambda: str(uuid.uuid4())


class Pipeline:
    """Sends calls: one pipeline for a client and all of its views.

    An async context manager: it opens and closes its transport, and can be opened once.

    Args:
        plan: the settings as the client uses them.
        transport: sends requests; entered and exited with the pipeline.
        budget: how fast the retry budget fills.
        sources: clock, randomness and keys.

    ``counters``, ``breakers``, ``budget`` and ``limiters`` are readable, even after closing.
    ``hooks`` are called with the record of every attempt, in the task of the call.
    """

    def __init__(
        self,
        plan: ClientConfig,
        transport: httpx.AsyncBaseTransport,
        *,
        budget: BudgetPolicy | None = None,
        sources: RequestSources | None = None,
    ) -> None:
        self.plan = plan
        self.hooks: list[AttemptHook] = []
        self._transport = transport
        self._sources = sources or RequestSources()
        clock = self._sources.clock
        self.counters: ClientCounters = ClientCounters()
        self.budget: RetryBudget = RetryBudget(budget or BudgetPolicy(), clock=clock)
        self.breakers: Breakers = Breakers(
            plan.breaker, clock=clock, on_change=self._circuit_changed
        )
        self.limiters: Limiters = Limiters(plan.limit, clock=clock)
        self._under_way = CallsInProgress()
        self._outermost: CallLayer | None = None
        self._is_open = False
        # Lets the upstream's operators identify a faulty client and its Python version in their
        # logs.
        agent = f"sdk-trio/{__version__} python/{platform.python_version()}"
        self._headers = plan.headers(user_agent=agent)
        self._authorized = self._with_token(plan.access_token)
        self._secrets: tuple[str, ...] = (plan.access_token,)

    def prepare_reload(self, wanted: ClientConfig) -> Callable[[], None]:
        """Check ``wanted`` and return a function that applies its reloadable part.

        That is the rate, also for waiting calls; and token, timeouts, retries and hedging for every
        later call.

        Raises:
            ValueError: the token cannot be sent.
        """
        # Without addresses and connection settings, because open connections and breakers depend on
        # them. Changes of those need a restart.
        plan = attrs.evolve(
            self.plan,
            access_token=wanted.access_token,
            attempt_timeout=wanted.attempt_timeout,
            total_timeout=wanted.total_timeout,
            hedge_after=wanted.hedge_after,
            retry=wanted.retry,
            limit=wanted.limit,
        )
        authorized = self._with_token(plan.access_token)

        def commit() -> None:
            self.plan, self._authorized = plan, authorized
            self._secrets = (plan.access_token,)
            self.limiters.change(plan.limit)

        return commit

    async def __aenter__(self) -> Self:
        # Counters, breakers and budget stay readable after closing. Opening again would mix them
        # with those of another run.
        if self._outermost is not None:
            raise RuntimeError("a client can be opened only once: create another one")
        await self._transport.__aenter__()
        self._outermost = chained(self.layers())
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # End the calls first: those waiting between attempts must not find a closed transport.
        self._is_open = False
        self._under_way.close()
        await self._transport.__aexit__(kind, error, traceback)  # noqa: ASYNC102 - it bounds it itself

    @property
    def opened(self) -> Self:
        """Return the pipeline, if it is or was open.

        Raises:
            NotRunningError: it was never opened.
        """
        if self._outermost is None:
            raise NotRunningError(_NOT_OPEN)
        return self

    def layers(self) -> list[CallLayer]:
        """Create the layers of a call, from the outermost to the attempt. The order matters."""
        clock, budget, counters = self._sources.clock, self.budget, self.counters
        gate = RateGate(
            self.limiters,
            in_progress=self._under_way,
            clock=clock,
            wall_clock=self._sources.wall_clock,
            longest_wait=self.plan.retry.longest_wait_seconds,
        )
        tracing: list[CallLayer] = []
        tracer = find_tracer()
        if tracer is not None:
            # Imported here, because it needs an optional package.
            from .layers.tracing import TracingLayer

            tracing = [TracingLayer(tracer)]
        return [
            # Outermost, so that it also limits waits and retries.
            DeadlineLayer(self._under_way, clock=clock),
            # Outside of retries: a call keeps its rate slot; each retry asks for another one
            # itself.
            AdmissionLayer(gate),
            # Outside of the attempt's timeout, so that each attempt gets its whole time.
            RetryLayer(
                self.plan.retry,
                budget,
                gate,
                clock=clock,
                random=self._sources.random,
                counters=counters,
            ),
            # Inside of retries, so that a retry is hedged too, and both attempts count as one
            # failure.
            HedgeLayer(budget, gate, clock=clock, counters=counters),
            # Inside of retry and hedge, so that every attempt counts and can be refused.
            BreakerLayer(self.breakers),
            # Inside of the breaker: only sent requests have a span.
            *tracing,
            AttemptLayer(
                self._transport,
                in_progress=self._under_way,
                clock=clock,
                gate=gate,
                budget=budget,
                counters=counters,
                hooks=self.hooks,
            ),
        ]

    async def send(self, call: Call) -> httpx.Response:
        """Send ``call`` and return its answer: a success, unless the call accepts any status.

        Raises:
            NotRunningError: the client is not open.
            CallError: there is no such answer; ``attempts`` counts the requests sent.
            TypeError, ValueError: a part of the call is invalid; nothing was sent.

        Cancellation abandons the requests in flight, is not counted as a failure, and takes effect
        at once.
        """
        if not call.url:
            self.address(call)
        if self._outermost is None or not self._is_open:
            raise NotRunningError(_NOT_OPEN)
        outcome = "cancelled"
        try:
            response = await self._outermost.send(call, AttemptKind.FIRST)
            if not is_acceptable(response, call):
                raise refused(response, call, self._sources.wall_clock())
            # A streamed answer refers to its call, so the call must not refer to it: that would be
            # a cycle per call for the garbage collector.
            call.head = call.last = None
            outcome = "ok"
        except CallError as error:
            _complete(error, call, self._sources.wall_clock())
            outcome = error.outcome
            raise
        except Exception:
            # A bug of ours or of a transport. Counted, so that metrics show it without a log.
            outcome = "unexpected"
            raise
        finally:
            self.counters.requests[call.method, outcome] += 1
            self.counters.attempts_per_call[call.attempts] += 1
        return response

    def stream(self, call: Call) -> ResponseStream:
        """Send ``call`` as :meth:`send` does on entering the context; the body is unread.

        Raises:
            TypeError, ValueError: a part of the call is invalid.
        """
        call.is_stream = True
        self.address(call)
        return ResponseStream(call, self.send)

    def address(self, call: Call) -> None:
        """Fill in the address of ``call`` by the current plan; its deadline starts when it is sent.

        The caller limits the body of a stream: the settings' limit is for bodies read into memory.

        Raises:
            TypeError, ValueError: a part of the call is invalid.
        """
        try:
            self._address(call)
        except (TypeError, ValueError) as error:
            # Error reports include the variables of frames: none may hold a body.
            raise without_frames(error)  # noqa: B904 - it is the error itself

    def _address(self, call: Call) -> None:
        plan, options = self.plan, call.options
        token, headers, secrets = plan.access_token, self._authorized, self._secrets
        if not isinstance(options.access_token, Unset):
            token = options.access_token
            # A tenant's token or a portal session's: mask both it and the client's own.
            headers = self._with_token(token)
            secrets = (token, *secrets)
        added: dict[str, str | None] = {}
        key = idempotency_key(call.method, options, new_key=self._sources.new_key)
        if key is not None:
            # One key for all attempts of a call, so that the upstream recognizes repetitions.
            added[plan.idempotency_header] = key
        if not isinstance(options.organization_id, Unset):
            added[plan.organization_header] = options.organization_id
        if not isinstance(call.json, Unset):
            call.content, added["Content-Type"] = encode_json(call.json), JSON_TYPE
        elif call.form is not None:
            call.content, added["Content-Type"] = urlencode(call.form).encode("ascii"), FORM_TYPE
        # A request of these methods has a length even without a body (RFC 9110, 8.6).
        if call.content is not None or call.method in METHODS_WITH_BODY:
            added["Content-Length"] = str(len(call.content or b""))
        if options.headers:
            added.update(options.headers)
            secrets = (*secrets, *credentials_in(options.headers))
        call.attempt_timeout = chosen(options.attempt_timeout, plan.attempt_timeout)
        call.max_retries = chosen(options.max_retries, plan.retry.max_retries)
        # Computed per call: its own timeout and retries change the time it needs.
        total_timeout = plan.total_timeout or plan.total_timeout_of(
            attempt_timeout=call.attempt_timeout, max_retries=call.max_retries
        )
        call.total_timeout = chosen(options.total_timeout, total_timeout)
        call.hedge_after = chosen(options.hedge_after, plan.hedge_after)
        call.accepts_any_status = chosen(options.accepts_any_status, False)
        call.max_answer_bytes = chosen(
            options.max_answer_bytes, None if call.is_stream else plan.max_answer_bytes
        )
        call.idempotent = may_execute_twice(
            call.method, options, upstream_honours_keys=plan.upstream_honours_keys
        )
        call.headers = merge_headers(headers, added) if added else headers
        call.token, call.secrets, call.origin = token, secrets, plan.origin
        call.url = join_url(plan.base_url, call.path, urlencode(call.query) if call.query else "")

    def _with_token(self, token: str) -> HeaderList:
        if problem := token_problem(token):
            raise ValueError(f"the access token {problem}")
        bearer = (b"Authorization", f"Bearer {token}".encode("ascii"))
        return HeaderList([*self._headers, bearer])

    def _circuit_changed(self, origin: str, state: BreakerState) -> None:
        if state is BreakerState.OPEN or state is BreakerState.ISOLATED:
            self.counters.circuits_opened += 1
            logger.warning("client.circuit_opened", origin=origin, state=str(state))
        elif state is BreakerState.CLOSED:
            logger.info("client.circuit_closed", origin=origin)


def _complete(error: CallError, call: Call, now: float) -> None:
    """Add the last answer of ``call`` to the error that ends it; ``now`` is Unix time.

    A refusal by the breaker or the deadline must not hide the 500 that explains the failure. The
    error has that answer's status, request id and body, and the refusal becomes its cause and a
    note.
    """
    error.attempts = call.attempts
    if call.refusal is not None:
        error.add_note(f"no further attempt was made: {call.refusal.message}")
        error.retry_after = error.retry_after or call.refusal.retry_after
    met = refused(call.last, call, now) if isinstance(call.last, httpx.Response) else call.last
    if error.__cause__ is None and met is not error:
        error.__cause__ = call.refusal if isinstance(error, ApiError) else met
    if error.status is None and met is not None:
        error.status, error.request_id, error.body = met.status, met.request_id, met.body
        error.retry_after = error.retry_after or met.retry_after
    if error.status is None and call.head is not None:
        error.status = call.head.status_code
        error.request_id = request_id_of(call.head, call)
