"""The breaker layer: checks the circuit breaker of the call's origin before each attempt."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import httpx
import trio

from ...base.breaker import (
    AttemptOutcome,
    BreakerPolicy,
    BreakerState,
    CircuitBreaker,
    CircuitRefusal,
)
from ..call import Call
from ..errors import CircuitOpenError, ConnectionFailedError, FailureKind
from . import AttemptKind, CallLayer

REQUEST_TIMEOUT = 408
INTERNAL_SERVER_ERROR = 500

#: Failures that are no evidence about the upstream's health; the breaker ignores them.
_OUR_FAULTS = frozenset(
    {FailureKind.REFUSED, FailureKind.NO_CONNECTION_FREE, FailureKind.NOT_PROCESSED}
)


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
        """Return the breaker of ``origin``, created at the first call."""
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


class BreakerLayer(CallLayer):
    """Checks the breaker of the call's origin before each attempt, and reports the outcome.

    Args:
        breakers: the breakers by origin.
    """

    def __init__(self, breakers: Breakers) -> None:
        self._breakers = breakers

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Make the attempt if the circuit allows it.

        Raises:
            CircuitOpenError: the circuit is open; nothing is sent.

        Cancellation counts neither for nor against the upstream, and ends a probe.
        """
        breaker = self._breakers.of(call.origin)
        permit = breaker.acquire()
        if isinstance(permit, CircuitRefusal):
            await trio.lowlevel.checkpoint()
            raise _circuit_open(call, permit)
        outcome, incident = AttemptOutcome.NEUTRAL, None
        try:
            response = await self.next.send(call, kind)
            outcome = outcome_of_status(response.status_code)
        # Any other exception, including Cancelled, is neutral: no evidence about the upstream.
        except ConnectionFailedError as error:
            if error.kind not in _OUR_FAULTS:
                outcome, incident = AttemptOutcome.FAILURE, error.incident
            raise
        finally:
            breaker.report(permit, outcome, incident)
        return response


def outcome_of_status(status: int) -> AttemptOutcome:
    """Return an answer's evidence about the upstream: only 408 and 5xx are failures."""
    # A healthy server sends 429 to protect itself; the limiter applies it, and an open circuit
    # would only add delay.
    if status == REQUEST_TIMEOUT or status >= INTERNAL_SERVER_ERROR:
        return AttemptOutcome.FAILURE
    return AttemptOutcome.SUCCESS


def _circuit_open(call: Call, refusal: CircuitRefusal) -> CircuitOpenError:
    if refusal.retry_after is None:
        said = "the circuit was opened manually"
    else:
        said = f"the upstream has been failing; next attempt in {refusal.retry_after:.1f} s"
    return CircuitOpenError(
        f"not sent: {said}",
        method=call.method,
        path=call.shown_path,
        retry_after=refusal.retry_after,
    )
