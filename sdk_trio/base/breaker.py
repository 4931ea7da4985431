"""A circuit breaker: closed, open, or probing one attempt at a time. Pure.

Every admitted attempt holds a permit of the breaker's *generation*. Each state change starts a new
generation, and reports of older ones are ignored: an attempt sent before an outage cannot close or
reopen the circuit after it.

A failure may name its *incident*: the failure of a connection or dial that carried several
attempts. It counts once, however many attempts report it. Otherwise twenty calls on one HTTP/2
connection would open the circuit at its first reset (docs/adr/0028-network-incidents.md).
"""

import enum
from collections import deque
from collections.abc import Callable
from weakref import WeakSet

import attrs

#: The ``retry_after`` of a refusal while a probe is in progress, in seconds. The probe's duration
#: is unknown; it usually takes seconds.
PROBE_HINT_SECONDS = 1.0


class BreakerState(enum.StrEnum):
    """The states of a breaker, named by how it treats the next attempt."""

    CLOSED = "closed"
    """Attempts pass."""
    OPEN = "open"
    """Attempts are refused until the break ends."""
    PROBING = "probing"
    """One attempt passes at a time; its outcome decides."""
    ISOLATED = "isolated"
    """Opened manually: attempts are refused until ``close``."""


class AttemptOutcome(enum.Enum):
    """The evidence of an attempt about the server's health."""

    SUCCESS = enum.auto()
    """The server answered as a healthy server does, including 404 or 429."""
    FAILURE = enum.auto()
    """No connection, no answer in time, or an answer that reports a fault of the server."""
    NEUTRAL = enum.auto()
    """No evidence: the caller cancelled, the fault was ours, or the server refused the request."""


@attrs.frozen
class BreakerPolicy:
    """The conditions under which a circuit opens, and for how long.

    ``failure_threshold`` consecutive failures (at least 1) within ``sampling_seconds``, measured
    from the first of them to the last, open it for ``break_seconds``.
    """

    failure_threshold: int = 5
    sampling_seconds: float = 30.0
    break_seconds: float = 15.0


@attrs.frozen
class Permit:
    """A permit for one attempt; give it back with :meth:`CircuitBreaker.report` exactly once."""

    generation: int
    is_probe: bool


@attrs.frozen
class CircuitRefusal:
    """A refusal: try again in ``retry_after`` seconds; None when only ``close`` can help."""

    retry_after: float | None


class CircuitBreaker:
    """The breaker of one origin.

    Args:
        policy: thresholds and times.
        clock: returns the current time in seconds; it must never go back.
        on_change: called with the new state after each change, inside the call that caused it. The
            end of a break is not a call, so the change from ``OPEN`` to ``PROBING`` is reported
            when the first probe is admitted.
    """

    def __init__(
        self,
        policy: BreakerPolicy,
        *,
        clock: Callable[[], float],
        on_change: Callable[[BreakerState], None] | None = None,
    ) -> None:
        self.policy = policy
        self._clock = clock
        self._on_change = on_change
        self._state = BreakerState.CLOSED
        self._generation = 0
        self._probe_is_out = False
        self._opens_until = 0.0
        self._failures: deque[float] = deque(maxlen=policy.failure_threshold)
        # Weak references suffice: an incident that no error refers to cannot be reported again. The
        # set stays as small as the number of live errors.
        self._counted: WeakSet[object] = WeakSet()

    @property
    def state(self) -> BreakerState:
        """Return the current state: an open circuit whose break has ended is ``PROBING``."""
        if self._state is BreakerState.OPEN and self._clock() >= self._opens_until:
            return BreakerState.PROBING
        return self._state

    @property
    def probe_is_out(self) -> bool:
        """Return whether a probe was admitted and its outcome is still unknown."""
        return self._probe_is_out

    def acquire(self) -> Permit | CircuitRefusal:
        """Return a permit to make one attempt now, or a refusal."""
        if self._state is BreakerState.CLOSED:
            return Permit(self._generation, is_probe=False)
        # Opened manually, so no passing of time closes it.
        if self._state is BreakerState.ISOLATED:
            return CircuitRefusal(retry_after=None)
        if self._state is BreakerState.OPEN:
            wait = self._opens_until - self._clock()
            if wait > 0:
                return CircuitRefusal(retry_after=wait)
        # One probe at a time: a recovering server must not get all waiting attempts at once.
        elif self._probe_is_out:
            return CircuitRefusal(retry_after=PROBE_HINT_SECONDS)
        # Each probe has its own generation: a late report of an abandoned probe cannot decide for
        # the current one.
        self._become(BreakerState.PROBING)
        self._probe_is_out = True
        return Permit(self._generation, is_probe=True)

    def report(
        self, permit: Permit, outcome: AttemptOutcome, incident: object | None = None
    ) -> None:
        """Report how the attempt of ``permit`` ended; reports of older generations are ignored.

        ``incident`` is the cause shared with other attempts, or None. It is compared by identity;
        its second failure is ``NEUTRAL``.
        """
        # The attempt began before the last state change: it is no evidence about the server now.
        if permit.generation != self._generation:
            return
        if outcome is AttemptOutcome.FAILURE and incident is not None:
            if incident in self._counted:
                outcome = AttemptOutcome.NEUTRAL
            self._counted.add(incident)
        if permit.is_probe:
            self._decide_probe(outcome)
        # Only consecutive failures count: a server that answers in between is not down.
        elif outcome is AttemptOutcome.SUCCESS:
            self._failures.clear()
        elif outcome is AttemptOutcome.FAILURE:
            self._count_failure()

    def isolate(self) -> None:
        """Open the circuit manually; it stays open until :meth:`close`."""
        self._become(BreakerState.ISOLATED)

    def close(self) -> None:
        """Close the circuit manually and forget earlier failures."""
        self._become(BreakerState.CLOSED)

    def _decide_probe(self, outcome: AttemptOutcome) -> None:
        if outcome is AttemptOutcome.SUCCESS:
            self._become(BreakerState.CLOSED)
        elif outcome is AttemptOutcome.FAILURE:
            self._open()
        # A probe that was cancelled, or never sent, proves nothing: the next attempt is the probe.
        else:
            self._become(BreakerState.PROBING)

    def _count_failure(self) -> None:
        now = self._clock()
        self._failures.append(now)
        # The deque holds the last N of consecutive failures, so its length counts them up to N.
        full = len(self._failures) == self.policy.failure_threshold
        if full and now - self._failures[0] <= self.policy.sampling_seconds:
            self._open()

    def _open(self) -> None:
        self._opens_until = self._clock() + self.policy.break_seconds
        self._become(BreakerState.OPEN)

    def _become(self, state: BreakerState) -> None:
        changed = state is not self._state
        self._state = state
        # Permits issued before this moment report about another state.
        self._generation += 1
        self._probe_is_out = False
        self._failures.clear()
        if changed and self._on_change is not None:
            self._on_change(state)
