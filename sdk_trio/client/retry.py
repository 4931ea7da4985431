"""The retry policy: which attempts may be repeated, and when. Pure."""

import enum
from collections.abc import Callable

import attrs

from ..base.http_grammar import IDEMPOTENT_METHODS

#: Server errors that a second attempt would get again: not implemented, HTTP version not supported,
#: circular negotiation, endless loop, missing extension, and the login page of a network.
_LASTING = frozenset({501, 505, 506, 508, 510, 511})

#: Answers after which the same request may well succeed. All other server errors are included, also
#: those that no registry lists: proxies and content delivery networks answer 520 to 530 when the
#: upstream is away.
RETRYABLE_STATUSES = frozenset({408, 429, *range(500, 600)}) - _LASTING

TOO_MANY_REQUESTS = 429


class FailureKind(enum.Enum):
    """The kinds of attempts without an acceptable answer, by what the upstream may have done."""

    NOT_SENT = enum.auto()
    """No byte of the request left: any method can be tried again."""
    NO_CONNECTION_FREE = enum.auto()
    """Not sent either, but for want of a connection of ours: no fault of the upstream."""
    NOT_PROCESSED = enum.auto()
    """The upstream promised not to have acted on it (GOAWAY, REFUSED_STREAM): no fault either."""
    UNCONFIRMED = enum.auto()
    """The request left, at least perhaps, and no whole answer came."""
    REFUSED = enum.auto()
    """Another attempt would fail in the same way: an invalid request, an open circuit."""


@attrs.frozen
class RetryPolicy:
    """The number of retries and the waits before them.

    ``max_retries`` (0 to 10) come after the first attempt. Before the n-th one the wait is drawn
    from ``U(0, min(cap_seconds, base_seconds * 2**(n-1)))`` (full jitter). When the upstream asks
    for a longer wait than ``longest_wait_seconds``, there is no further attempt.
    """

    max_retries: int = 3
    base_seconds: float = 0.5
    cap_seconds: float = 8.0
    longest_wait_seconds: float = 120.0


def is_idempotent(method: str, *, declared: bool | None) -> bool:
    """Return whether ``method`` (upper case) may be executed twice; ``declared`` wins if given."""
    return method in IDEMPOTENT_METHODS if declared is None else declared


def may_retry_status(status: int, *, idempotent: bool) -> bool:
    """Return whether an answer of ``status`` may be followed by another attempt.

    After a 429 every request may be repeated, because the upstream says that it did not execute it.
    """
    return status in RETRYABLE_STATUSES and (idempotent or status == TOO_MANY_REQUESTS)


def may_retry_failure(kind: FailureKind, *, idempotent: bool) -> bool:
    """Return whether a failure without answer may be followed by another attempt."""
    if kind is FailureKind.UNCONFIRMED:
        return idempotent
    return kind is not FailureKind.REFUSED


@attrs.frozen
class BudgetPolicy:
    """The rates at which the budget fills.

    ``deposit_per_call`` is added by each first attempt; ``floor_per_second`` by time, up to
    ``floor_seconds`` worth of it, which is also the balance at the start. ``maximum`` bounds what
    a busy period can save up. One retry or hedge costs 1; all retries after one incident together
    cost 1 as well, if there was no other such incident within ``incident_seconds``.
    """

    deposit_per_call: float = 0.2
    floor_per_second: float = 2.0
    floor_seconds: float = 10.0
    maximum: float = 100.0
    incident_seconds: float = 10.0

    @property
    def reserve(self) -> float:
        """Return the balance that time alone can fill up to."""
        return min(self.maximum, self.floor_per_second * self.floor_seconds)


class RetryBudget:
    """The balance of one client.

    Args:
        policy: how it fills.
        clock: returns the current time in seconds; it must never go back.
    """

    def __init__(self, policy: BudgetPolicy, *, clock: Callable[[], float]) -> None:
        self.policy = policy
        self._clock = clock
        self._balance = policy.reserve
        self._updated_at = clock()
        self._incident: object | None = None
        self._next_incident_at = self._updated_at

    @property
    def balance(self) -> float:
        """Return the present balance."""
        self._accrue()
        return self._balance

    def deposit(self) -> None:
        """Fill the budget for one first attempt."""
        self._accrue()
        self._balance = min(self.policy.maximum, self._balance + self.policy.deposit_per_call)

    def withdraw(self, incident: object | None = None) -> float | None:
        """Pay for one retry or hedge.

        Args:
            incident: what the attempt before shares with others, known by its identity; None when
                it failed by itself.

        Returns:
            What was paid, 0 when the incident has been paid for; None when the budget is empty.
        """
        if incident is not None and incident is self._incident:
            return 0.0
        self._accrue()
        if self._balance < 1.0:
            # No debts: an upstream that is down meets a fixed share of the normal load, not a
            # queue of retries that were promised earlier.
            return None
        self._balance -= 1.0
        if incident is not None and self._updated_at >= self._next_incident_at:
            self._incident = incident
            self._next_incident_at = self._updated_at + self.policy.incident_seconds
        return 1.0

    def refund(self, paid: float = 1.0) -> None:
        """Give back what was paid for an attempt that was never sent."""
        self._accrue()
        self._balance = min(self.policy.maximum, self._balance + paid)

    def _accrue(self) -> None:
        now = self._clock()
        # Time fills the budget up to the reserve only. Deposits of calls may go beyond it, up to
        # the maximum, so a quiet client does not save up a storm.
        if self._balance < self.policy.reserve:
            earned = (now - self._updated_at) * self.policy.floor_per_second
            self._balance = min(self.policy.reserve, self._balance + earned)
        self._updated_at = now
