"""A circuit breaker: closed, open, probing with one probe. Pure.

Every admitted attempt holds a permit of the breaker's *generation*. Each change of state begins a
new generation, and a report under an older one changes nothing, so an attempt that was sent before
an outage cannot close or reopen the circuit after it.

An attempt's failure may name its *incident*: the failure of a connection or a dial that carried
several attempts. However many of them report it, it is one failure: twenty calls on one HTTP/2
connection would else open the circuit at its first reset
(docs/adr/0028-network-incidents.md).
"""

import enum
from collections import deque
from collections.abc import Callable
from weakref import WeakSet

import attrs

#: The ``retry_after`` of a refusal while a probe is out, in seconds. How long the probe takes is
#: not known, and it usually decides within seconds.
PROBE_HINT_SECONDS = 1.0


class BreakerState(enum.StrEnum):
    """The states of a breaker, named by what it does with the next attempt."""

    CLOSED = "closed"
    """Attempts pass."""
    OPEN = "open"
    """Attempts are refused until the break is over."""
    PROBING = "probing"
    """One attempt at a time passes; its outcome decides."""
    ISOLATED = "isolated"
    """Opened by hand: attempts are refused until ``close``."""


class AttemptOutcome(enum.Enum):
    """The evidence of an attempt about the health of the server."""

    SUCCESS = enum.auto()
    """The server answered as a healthy one does; a 404 or a 429 is such an answer."""
    FAILURE = enum.auto()
    """No connection, no answer in time, or an answer that admits a fault."""
    NEUTRAL = enum.auto()
    """Nothing is known: the caller cancelled, the fault was ours, or the server said "not here"."""


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
        on_change: called with the new state after each change, inside the call that caused it.
            The passing of a break is no call, so ``OPEN`` to ``PROBING`` is told when the first
            probe is admitted.
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
        # Weak references suffice: an incident that no error holds any longer cannot be reported
        # again, and the set stays as small as the number of errors in flight.
        self._counted: WeakSet[object] = WeakSet()

    @property
    def state(self) -> BreakerState:
        """Return the state now: an open circuit whose break is over is ``PROBING``."""
        if self._state is BreakerState.OPEN and self._clock() >= self._opens_until:
            return BreakerState.PROBING
        return self._state

    @property
    def probe_is_out(self) -> bool:
        """Return whether a probe was admitted whose outcome is not known yet."""
        return self._probe_is_out

    def acquire(self) -> Permit | CircuitRefusal:
        """Return a permit to make one attempt now, or a refusal."""
        if self._state is BreakerState.CLOSED:
            return Permit(self._generation, is_probe=False)
        # A person opened it, so no passing of time closes it.
        if self._state is BreakerState.ISOLATED:
            return CircuitRefusal(retry_after=None)
        if self._state is BreakerState.OPEN:
            wait = self._opens_until - self._clock()
            if wait > 0:
                return CircuitRefusal(retry_after=wait)
        # One at a time: a server that has just come back is not met by everything that has waited
        # for it.
        elif self._probe_is_out:
            return CircuitRefusal(retry_after=PROBE_HINT_SECONDS)
        # Each probe has a generation of its own, so that the late report of an abandoned probe
        # cannot decide for the present one.
        self._become(BreakerState.PROBING)
        self._probe_is_out = True
        return Permit(self._generation, is_probe=True)

    def report(
        self, permit: Permit, outcome: AttemptOutcome, incident: object | None = None
    ) -> None:
        """Say how the attempt of ``permit`` ended; an older generation's report is ignored.

        ``incident`` is the cause that the attempt shares with others, None when it failed by
        itself. It is known by its identity, and a second failure of it is ``NEUTRAL``.
        """
        # The attempt began before the last change of state, so it says nothing about the server
        # now.
        if permit.generation != self._generation:
            return
        if outcome is AttemptOutcome.FAILURE and incident is not None:
            if incident in self._counted:
                outcome = AttemptOutcome.NEUTRAL
            self._counted.add(incident)
        if permit.is_probe:
            self._decide_probe(outcome)
        # Failures count while they are consecutive: a server that answers in between is not down.
        elif outcome is AttemptOutcome.SUCCESS:
            self._failures.clear()
        elif outcome is AttemptOutcome.FAILURE:
            self._count_failure()

    def isolate(self) -> None:
        """Open the circuit by hand; it stays so until :meth:`close`."""
        self._become(BreakerState.ISOLATED)

    def close(self) -> None:
        """Close the circuit by hand and forget the failures so far."""
        self._become(BreakerState.CLOSED)

    def _decide_probe(self, outcome: AttemptOutcome) -> None:
        if outcome is AttemptOutcome.SUCCESS:
            self._become(BreakerState.CLOSED)
        elif outcome is AttemptOutcome.FAILURE:
            self._open()
        # A probe that was cancelled, or never left, proves nothing: the next attempt is the probe.
        else:
            self._become(BreakerState.PROBING)

    def _count_failure(self) -> None:
        now = self._clock()
        self._failures.append(now)
        # The deque holds the last N of an unbroken run, so its length is the run's up to N.
        full = len(self._failures) == self.policy.failure_threshold
        if full and now - self._failures[0] <= self.policy.sampling_seconds:
            self._open()

    def _open(self) -> None:
        self._opens_until = self._clock() + self.policy.break_seconds
        self._become(BreakerState.OPEN)

    def _become(self, state: BreakerState) -> None:
        changed = state is not self._state
        self._state = state
        # Whatever was permitted before this moment reports about another state.
        self._generation += 1
        self._probe_is_out = False
        self._failures.clear()
        if changed and self._on_change is not None:
            self._on_change(state)
