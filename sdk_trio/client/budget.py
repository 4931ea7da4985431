"""The retry budget: how many attempts a client may send beyond first ones. Pure.

When an upstream is down, retries multiply its load exactly when it can bear the least. Retries and
hedges share one budget that first attempts fill, so the extra load stays a fixed share of the
normal one, plus a floor that lets a quiet client retry at all.

One dropped connection can end a hundred calls at once, and is no sign of an upstream that is down.
So the retries after one *incident* cost as much as one, but not those after the next incident if
that follows soon: see docs/adr/0039-an-incident-is-paid-for-once.md.
"""

from collections.abc import Callable

import attrs


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
