"""The pipeline: the layers of a call in their order, and two small layers.

From the outside in: the call's deadline, the limiter with the gate that a 429 shuts, retry, hedge,
the breaker of the origin, the attempt's timeout, the transport. The order matters:

- the deadline is outermost, so that it bounds waits and retries as well;
- the retry layer is outside the attempt's timeout, so that each attempt gets its whole time;
- the breaker is inside retry and hedge, so that every attempt counts and may be refused;
- the limiter's gate is asked again before each attempt.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import attrs
import httpx
import trio

from ..base.logs import get_logger
from ..base.tracing import find_tracer
from .call import Call, deadline_of
from .errors import (
    ApiError,
    CallError,
    CircuitOpenError,
    ConnectionFailedError,
    DeadlineExceededError,
    api_error,
)
from .layers.admission import (
    AdmissionLayer,
    AttemptKind,
    AttemptLayer,
    CallAttempt,
    CallLayer,
    ClientCounters,
    Limiters,
    LimitPolicy,
    RateGate,
    RetryAfterObserver,
    retry_after_of,
)
from .layers.attempt import Attempter, is_acceptable, note_facts, request_id_of, unread
from .layers.breaker import (
    AttemptOutcome,
    BreakerPolicy,
    BreakerState,
    CircuitBreaker,
    CircuitRefusal,
)
from .layers.deadline import CallCut, CallsUnderWay
from .layers.hedge import Hedger
from .layers.retry import Retryer, outcome_unknown
from .retry import BudgetPolicy, FailureKind, RetryBudget, RetryPolicy

logger = get_logger("client")

AttemptHook = Callable[[CallAttempt], None]

REQUEST_TIMEOUT = 408
INTERNAL_SERVER_ERROR = 500

#: Failures that say nothing about the upstream's health, so the breaker does not count them.
_OUR_FAULTS = frozenset(
    {FailureKind.REFUSED, FailureKind.NO_CONNECTION_FREE, FailureKind.NOT_PROCESSED}
)


@attrs.frozen(kw_only=True)
class Policies:
    """The policies of the layers."""

    retry: RetryPolicy = attrs.field(factory=RetryPolicy)
    budget: BudgetPolicy = attrs.field(factory=BudgetPolicy)
    breaker: BreakerPolicy = attrs.field(factory=BreakerPolicy)
    limit: LimitPolicy = attrs.field(factory=LimitPolicy)


class DeadlineLayer:
    """The outermost layer: says when a call has to be over, and what it ends with when it is cut.

    Nothing of a call lasts beyond its deadline, or the client itself. Each wait inside keeps to
    both by itself, since a scope here as well would cost each call a twelfth more.

    Args:
        inner: brings the call to its end; raises ``CallCut`` when that cannot be waited for.
        under_way: knows whether the client is closed.
        clock: returns the current time in seconds.
    """

    def __init__(
        self, inner: CallLayer, *, under_way: CallsUnderWay, clock: Callable[[], float]
    ) -> None:
        self._inner = inner
        self._under_way = under_way
        self._clock = clock

    async def send(self, call: Call) -> httpx.Response:
        """Make the call and end it at its deadline.

        Raises:
            DeadlineExceededError: the deadline came first.
            ConnectionFailedError: the client was closed first.
            OutcomeUnknownError: one of both came while a write had been sent and not answered.
        """
        call.deadline = deadline_of(call.total_timeout, now=self._clock())
        try:
            return await self._inner.send(call)
        except CallCut:
            pass
        error: CallError
        if self._under_way.is_closed:
            said = "the client was closed"
            error = ConnectionFailedError(
                said, kind=FailureKind.REFUSED, method=call.method, path=call.path
            )
        else:
            said = f"the total time of {call.total_timeout:g} s is over"
            error = DeadlineExceededError(said, method=call.method, path=call.path)
        # The head of a success has come: the write was executed, and only its body is missing.
        if call.head is not None and call.head.is_success and not call.idempotent:
            raise unread(call.head, call, f"its body had not come when {said}")
        if call.is_unconfirmed:
            raise outcome_unknown(call) from error
        raise error


class BreakerLayer:
    """Asks the breaker of the call's origin before each attempt, and reports the outcome to it.

    Args:
        inner: makes the attempt.
        breakers: the breakers by origin.
    """

    def __init__(self, inner: AttemptLayer, breakers: "Breakers") -> None:
        self._inner = inner
        self._breakers = breakers

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Make the attempt if the circuit lets it through.

        Raises:
            CircuitOpenError: the circuit is open; nothing is sent.

        Cancelling counts neither for nor against the upstream, and frees a probe's place.
        """
        breaker = self._breakers.of(call.origin)
        permit = breaker.acquire()
        if isinstance(permit, CircuitRefusal):
            await trio.lowlevel.checkpoint()
            raise _circuit_open(call, permit)
        outcome, incident = AttemptOutcome.NEUTRAL, None
        try:
            response = await self._inner.send(call, kind)
            outcome = outcome_of_status(response.status_code)
        # Any other exception, Cancelled included, is neutral: it says nothing about the upstream.
        except ConnectionFailedError as error:
            if error.kind not in _OUR_FAULTS:
                outcome, incident = AttemptOutcome.FAILURE, error.incident
            raise
        finally:
            breaker.report(permit, outcome, incident)
        return response


def outcome_of_status(status: int) -> AttemptOutcome:
    """Return the evidence of an answer about the upstream: only 408 and 5xx admit a fault."""
    if status == REQUEST_TIMEOUT or status >= INTERNAL_SERVER_ERROR:
        return AttemptOutcome.FAILURE
    return AttemptOutcome.SUCCESS


def _circuit_open(call: Call, refusal: CircuitRefusal) -> CircuitOpenError:
    if refusal.retry_after is None:
        said = "the circuit was opened by hand"
    else:
        said = f"the upstream has been failing; it is tried again in {refusal.retry_after:.1f} s"
    return CircuitOpenError(
        f"not sent: {said}",
        method=call.method,
        path=call.path,
        retry_after=refusal.retry_after,
    )


def _answered(response: httpx.Response, call: Call, now: float) -> ApiError:
    """Return the error for an answer that is no success; ``now`` is Unix time."""
    return api_error(
        status=response.status_code,
        content=response.content,
        method=call.method,
        path=call.path,
        attempts=call.attempts,
        request_id=request_id_of(response, call),
        retry_after=retry_after_of(response, now=now),
        secrets=call.secrets,
    )


def _complete(error: CallError, call: Call, now: float) -> None:
    """Add the last answer of ``call`` to the error that ends it; ``now`` is Unix time.

    A refusal of the breaker or the deadline must not stand in place of the 500 that explains the
    failure: the error carries that answer's status, request id and body, and the refusal becomes
    its cause and a note.
    """
    error.attempts = call.attempts
    if call.refusal is not None:
        error.add_note(f"no further attempt was made: {call.refusal.message}")
        error.retry_after = error.retry_after or call.refusal.retry_after
    met = _answered(call.last, call, now) if isinstance(call.last, httpx.Response) else call.last
    if error.__cause__ is None and met is not error:
        error.__cause__ = call.refusal if isinstance(error, ApiError) else met
    if error.status is None and met is not None:
        error.status, error.request_id, error.body = met.status, met.request_id, met.body
        error.retry_after = error.retry_after or met.retry_after
    if error.status is None and call.head is not None:
        error.status = call.head.status_code
        error.request_id = request_id_of(call.head, call)


class Breakers:
    """The breakers, one for each origin (scheme, host and port).

    Args:
        policy: the policy of each breaker.
        clock: returns the current time in seconds.
        on_change: called with the origin and the new state.
    """

    def __init__(
        self,
        policy: BreakerPolicy,
        *,
        clock: Callable[[], float],
        on_change: Callable[[str, BreakerState], None],
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._on_change = on_change
        self._by_origin: dict[str, CircuitBreaker] = {}

    def of(self, origin: str) -> CircuitBreaker:
        """Return the breaker of ``origin``, made at the first call."""
        found = self._by_origin.get(origin)
        if found is None:
            found = self._by_origin[origin] = CircuitBreaker(
                self._policy,
                clock=self._clock,
                on_change=lambda state: self._on_change(origin, state),
            )
        return found

    @property
    def all(self) -> Mapping[str, CircuitBreaker]:
        """Return the breakers so far by origin, as a view."""
        return MappingProxyType(self._by_origin)


class Pipeline:
    """All layers over one transport, with the state that calls share.

    Args:
        transport: sends requests.
        policies: the policies of the layers.
        clock: returns the time that Trio's deadlines are on, in seconds.
        wall_clock: returns Unix time, to read dates of answers by.
        random: returns a number from 0 to 1.
        hooks: called with the record of every attempt, in the task of the call.

    Others may read ``counters``, ``breakers``, ``budget`` and ``limiters``.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        policies: Policies,
        *,
        clock: Callable[[], float] = trio.current_time,
        wall_clock: Callable[[], float] = time.time,
        random: Callable[[], float] = random.random,
        hooks: Sequence[AttemptHook] = (),
    ) -> None:
        self._wall_clock = wall_clock
        self.counters: ClientCounters = ClientCounters()
        self._hooks = hooks
        self.budget: RetryBudget = RetryBudget(policies.budget, clock=clock)
        self.breakers: Breakers = Breakers(
            policies.breaker, clock=clock, on_change=self._circuit_changed
        )
        self.limiters: Limiters = Limiters(policies.limit, clock=clock)
        self._under_way = CallsUnderWay()
        admitter = RateGate(
            self.limiters,
            under_way=self._under_way,
            clock=clock,
            longest_wait=policies.retry.longest_wait_seconds,
        )
        gatekeeper = RetryAfterObserver(self.limiters, clock=clock, wall_clock=wall_clock)
        attempter: AttemptLayer = Attempter(
            transport,
            under_way=self._under_way,
            clock=clock,
            observer=self,
            on_head=gatekeeper.note,
        )
        tracer = find_tracer()
        if tracer is not None:
            # Imported here, because it needs an optional package that may not be installed.
            from .layers.tracing import AttemptTracer

            attempter = AttemptTracer(attempter, tracer)
        hedger = Hedger(
            BreakerLayer(attempter, self.breakers),
            budget=self.budget,
            admitter=admitter,
            clock=clock,
            counters=self.counters,
        )
        retryer = Retryer(
            hedger,
            policy=policies.retry,
            budget=self.budget,
            admitter=admitter,
            clock=clock,
            random=random,
            counters=self.counters,
        )
        self._outermost = DeadlineLayer(
            AdmissionLayer(retryer, admitter), under_way=self._under_way, clock=clock
        )

    async def send(self, call: Call) -> httpx.Response:
        """Make ``call`` and return its answer, a success unless the call accepts any status.

        Raises:
            CallError: there is no such answer; ``attempts`` says how many requests were sent.

        Cancelling abandons the requests in flight, counts for nothing, and takes effect at once.
        """
        outcome = "cancelled"
        try:
            response = await self._outermost.send(call)
            if not is_acceptable(response, call):
                raise _answered(response, call, self._wall_clock())
            note_facts(response, call)
            # Each names the other now: a cycle for each call, which only the collector would end.
            call.head = call.last = None
            outcome = "ok"
        except CallError as error:
            _complete(error, call, self._wall_clock())
            outcome = error.outcome
            raise
        except Exception:
            outcome = "unexpected"
            raise
        finally:
            self.counters.requests[call.method, outcome] += 1
            self.counters.attempts_per_call[call.attempts] += 1
        return response

    def close(self) -> None:
        """End every call that is under way, with the error of a client that was closed."""
        self._under_way.close()

    @property
    def wants_records(self) -> bool:
        """Return whether there are hooks."""
        return bool(self._hooks)

    def attempt_started(self, kind: AttemptKind) -> None:
        """Count the attempt; a first one fills the budget."""
        self.counters.attempts[kind] += 1
        if kind is AttemptKind.FIRST:
            self.budget.deposit()

    def attempt_ended(self, record: CallAttempt) -> None:
        """Hand the record to the hooks; one that raises is logged and changes nothing."""
        for hook in self._hooks:
            try:
                hook(record)
            except Exception as error:
                logger.warning("client.hook_failed", error=type(error).__name__, exc_info=error)

    def _circuit_changed(self, origin: str, state: BreakerState) -> None:
        if state is BreakerState.OPEN or state is BreakerState.ISOLATED:
            self.counters.circuits_opened += 1
            logger.warning("client.circuit_opened", origin=origin, state=str(state))
        elif state is BreakerState.CLOSED:
            logger.info("client.circuit_closed", origin=origin)
