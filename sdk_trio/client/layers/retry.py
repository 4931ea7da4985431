"""The layers of further attempts: the retry after a failure, and the hedge for a slow attempt.

One :class:`RetryBudget` pays for both, so that a slow upstream does not get a multiple of the load.
"""

import math
from collections.abc import Callable, Coroutine
from typing import Any

import attrs
import httpx
import trio

from ...base.logs import get_logger
from ...base.throttle import jittered_wait
from ..answers import RETRYABLE_STATUSES, TOO_MANY_REQUESTS, outcome_unknown
from ..call import Call
from ..errors import CircuitOpenError, ConnectionFailedError, FailureKind
from . import AttemptKind, CallLayer, ClientCounters
from .admission import RateGate, WaitTooLong

logger = get_logger("client")


@attrs.frozen
class RetryPolicy:
    """The number of retries and the waits before them.

    ``max_retries`` (0 to 10) follow the first attempt. The wait before the n-th is drawn from
    ``U(0, min(cap_seconds, base_seconds * 2**(n-1)))`` (full jitter). If the upstream requests a
    wait above ``longest_wait_seconds``, there is no further attempt.
    """

    max_retries: int = 3
    base_seconds: float = 0.5
    cap_seconds: float = 8.0
    longest_wait_seconds: float = 120.0


def may_retry_status(status: int, *, idempotent: bool) -> bool:
    """Return whether an answer of ``status`` may be followed by another attempt.

    After a 429 every request may be repeated: the upstream states that it did not execute it.
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

    Each first attempt adds ``deposit_per_call``. Time adds ``floor_per_second``, up to
    ``floor_seconds`` worth of it, which is also the initial balance. ``maximum`` limits the savings
    of a busy period. One retry or hedge costs 1. All retries after one incident together cost 1 as
    well, if there was no other such incident within ``incident_seconds``.
    """

    deposit_per_call: float = 0.2
    floor_per_second: float = 2.0
    floor_seconds: float = 10.0
    maximum: float = 100.0
    incident_seconds: float = 10.0

    @property
    def reserve(self) -> float:
        """Return the balance up to which time fills the budget."""
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
        # The clock is not called here, because Trio's has no time before the program runs. A full
        # reserve does not grow, so its age does not matter.
        self._balance = policy.reserve
        self._updated_at = -math.inf
        self._incident: object | None = None
        self._next_incident_at = -math.inf

    @property
    def balance(self) -> float:
        """Return the current balance."""
        self._accrue()
        return self._balance

    def deposit(self) -> None:
        """Add the deposit of one first attempt."""
        self._accrue()
        self._balance = min(self.policy.maximum, self._balance + self.policy.deposit_per_call)

    def withdraw(self, incident: object | None = None) -> float | None:
        """Pay for one retry or hedge.

        Args:
            incident: the failure that the previous attempt shares with others, compared by
                identity; None if it failed alone.

        Returns:
            The price, 0 if the incident was paid for already; None if the budget is empty.
        """
        if incident is not None and incident is self._incident:
            return 0.0
        self._accrue()
        if self._balance < 1.0:
            # No debts: a failing upstream gets a fixed share of the normal load, not a queue of
            # earlier retries.
            return None
        self._balance -= 1.0
        if incident is not None and self._updated_at >= self._next_incident_at:
            self._incident = incident
            self._next_incident_at = self._updated_at + self.policy.incident_seconds
        return 1.0

    def refund(self, paid: float = 1.0) -> None:
        """Give back the price of an attempt that was never sent."""
        self._accrue()
        self._balance = min(self.policy.maximum, self._balance + paid)

    def _accrue(self) -> None:
        now = self._clock()
        # Time fills the budget only up to the reserve. Deposits of calls may exceed it, up to the
        # maximum, so an idle client cannot save up a retry storm.
        if self._balance < self.policy.reserve:
            earned = (now - self._updated_at) * self.policy.floor_per_second
            self._balance = min(self.policy.reserve, self._balance + earned)
        self._updated_at = now


class RetryLayer(CallLayer):
    """Makes attempts until one is final.

    Args:
        policy: the waits; the number of retries is per call.
        budget: pays for retries.
        gate: the rate limit, applied to each retry.
        clock: returns the current time in seconds.
        random: returns a number from 0 to 1.
        counters: counts the budget's refusals.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        budget: RetryBudget,
        gate: RateGate,
        *,
        clock: Callable[[], float],
        random: Callable[[], float],
        counters: ClientCounters,
    ) -> None:
        self._policy = policy
        self._budget = budget
        self._gate = gate
        self._clock = clock
        self._random = random
        self._counters = counters

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Return the first final answer, or the last one.

        If the breaker refuses a retry, the result is still the call's last answer, which explains
        more. ``call.refusal`` then has the refusal.

        Raises:
            OutcomeUnknownError: a write may have been executed, and may not be repeated.
            ConnectionFailedError: the last attempt got no answer.
            CircuitOpenError: the breaker refused even the first attempt.
            DeadlineExceededError: the call's deadline has passed.

        Cancellation during a wait refunds the price of the next attempt.
        """
        failures = 0
        paid: float | None = None  # for the next attempt; the first one is free
        while True:
            # Compared below: only the count shows whether a hedge or the breaker's layer sent a
            # request.
            sent = call.attempts
            try:
                last: httpx.Response | ConnectionFailedError = await self.next.send(call, kind)
            except ConnectionFailedError as error:
                last = error
            except CircuitOpenError as refusal:
                if paid is None or call.last is None:
                    raise
                self._give_back(call, sent, paid)
                call.refusal, last = refusal, call.last
                break
            except BaseException:
                if paid is not None:
                    self._give_back(call, sent, paid)
                raise
            call.last = last
            failures += 1
            # In this order, because the budget charges when asked.
            if failures > call.max_retries or not _may_repeat(call, last):
                break
            paid = self._budget.withdraw(_incident_of(last))
            if paid is None:
                self._counters.budget_refusals += 1
                break
            if not await self._wait(call, failures, last, paid):
                break
            kind = AttemptKind.RETRY
        if isinstance(last, httpx.Response):
            return last
        # The write may have been executed. "Connection failed" would invite the caller to repeat
        # it.
        if last.kind is FailureKind.UNCONFIRMED and not call.idempotent:
            raise outcome_unknown(call) from last
        raise last

    def _give_back(self, call: Call, sent: int, paid: float) -> None:
        """Refund the price of an attempt that was refused or cancelled before it was sent."""
        if call.attempts == sent:
            self._budget.refund(paid)
            self._gate.give_back(call)

    async def _wait(
        self,
        call: Call,
        failures: int,
        last: httpx.Response | ConnectionFailedError,
        paid: float,
    ) -> bool:
        """Wait for the next attempt's time; refund it and return False if that is too late."""
        now = self._clock()
        wait = jittered_wait(
            failures,
            self._random(),
            base_seconds=self._policy.base_seconds,
            cap_seconds=self._policy.cap_seconds,
        )
        not_before = max(now + wait, call.not_before)
        logger.info(
            "client.retry",
            method=call.method,
            path=call.shown_path,
            attempts=call.attempts,
            reason=_reason(last),
            seconds=round(not_before - now, 3),
        )
        admitted = False
        try:
            leave = await self._gate.admit(call, not_before=not_before)
            admitted = not isinstance(leave, WaitTooLong)
        finally:
            if not admitted:
                self._budget.refund(paid)
        return admitted


def _may_repeat(call: Call, last: httpx.Response | ConnectionFailedError) -> bool:
    if isinstance(last, httpx.Response):
        return may_retry_status(last.status_code, idempotent=call.idempotent)
    return may_retry_failure(last.kind, idempotent=call.idempotent)


def _incident_of(last: httpx.Response | ConnectionFailedError) -> object | None:
    return None if isinstance(last, httpx.Response) else last.incident


def _reason(last: httpx.Response | ConnectionFailedError) -> str:
    return str(last.status_code) if isinstance(last, httpx.Response) else type(last).__name__


# The hedge: a second GET if the first one is slow or failed; the first answer wins. Only reads are
# hedged, because both requests may be executed. Hedges count towards the rate limit.


@attrs.define(eq=False)
class _Runner:
    """One of the two attempts of a race, and its result."""

    kind: AttemptKind
    has_ended: bool = False
    response: httpx.Response | None = None
    error: Exception | None = None

    @property
    def has_won(self) -> bool:
        return self.response is not None and self.response.status_code not in RETRYABLE_STATUSES

    def outcome(self) -> httpx.Response:
        if self.response is not None:
            return self.response
        assert self.error is not None
        raise self.error


@attrs.define(eq=False)
class _Race:
    """The attempts of one race. ``decided`` is set once one has won or all have ended."""

    runners: list[_Runner]
    winner: _Runner | None = None
    decided: trio.Event = attrs.field(factory=trio.Event)

    def note_end(self, runner: _Runner) -> None:
        runner.has_ended = True
        if self.winner is None and runner.has_won:
            self.winner = runner
        if self.winner is not None or all(each.has_ended for each in self.runners):
            self.decided.set()

    def admit(self, runner: _Runner) -> None:
        """Add a runner; if all earlier ones failed, the race is undecided again."""
        self.runners.append(runner)
        self.decided = trio.Event()


class HedgeLayer(CallLayer):
    """Races a second attempt against a slow one.

    The loser is cancelled and awaited, so no task outlives the call. If both fail, the first one's
    failure is raised.

    Args:
        budget: pays for hedges; no hedges if it is empty.
        gate: the rate limit; no hedge if it would have to wait.
        clock: returns the current time in seconds.
        counters: counts the races won by hedges.
    """

    def __init__(
        self,
        budget: RetryBudget,
        gate: RateGate,
        *,
        clock: Callable[[], float],
        counters: ClientCounters,
    ) -> None:
        self._budget = budget
        self._gate = gate
        self._clock = clock
        self._counters = counters

    def send(self, call: Call, kind: AttemptKind) -> Coroutine[Any, Any, httpx.Response]:
        """Make one attempt and, if the call allows it, its hedge.

        Raises:
            CallError: that of the first attempt, if there is no acceptable answer.

        Cancellation ends both attempts.
        """
        # No separate coroutine for calls without a hedge, the common case: each wait of a call
        # passes through all of its coroutines, twice.
        if call.hedge_after is None or not call.may_be_hedged:
            return self.next.send(call, kind)
        return self._race(call, kind, call.hedge_after)

    async def _race(self, call: Call, kind: AttemptKind, after: float) -> httpx.Response:
        first = _Runner(kind)
        race = _Race([first])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run, call, first, race)
            with trio.move_on_after(after):
                await race.decided.wait()
            if race.winner is None and self._may_hedge(call, first):
                hedge = _Runner(AttemptKind.HEDGE)
                race.admit(hedge)
                nursery.start_soon(self._run_paid, call, hedge, race)
            await race.decided.wait()
            nursery.cancel_scope.cancel()
        if race.winner not in (None, first):
            self._counters.hedges_won += 1
        # If both failed, raise the first one's error: a call without a hedge would get the same.
        return (race.winner or first).outcome()

    def _may_hedge(self, call: Call, first: _Runner) -> bool:
        """Decide whether to send a hedge now, and pay for it."""
        # A first attempt that failed early is hedged at once, unless a second one would fail the
        # same way (an invalid request, an open circuit).
        if first.error is not None and not (
            isinstance(first.error, ConnectionFailedError)
            and first.error.kind is not FailureKind.REFUSED
        ):
            return False
        # A hedge never waits for a rate slot: it would delay later calls, for a request that may
        # not be needed.
        if self._clock() >= call.deadline or not self._gate.admit_now(call):
            return False
        if self._budget.withdraw() is not None:
            return True
        self._counters.budget_refusals += 1
        self._gate.give_back(call)
        return False

    async def _run(self, call: Call, runner: _Runner, race: _Race) -> None:
        try:
            runner.response = await self.next.send(call, runner.kind)
        except Exception as error:  # the race decides whether it counts
            runner.error = error
        race.note_end(runner)

    async def _run_paid(self, call: Call, runner: _Runner, race: _Race) -> None:
        sent = call.attempts
        try:
            await self._run(call, runner, race)
        finally:
            # The breaker may have refused it: an unsent attempt costs nothing.
            if call.attempts == sent:
                self._budget.refund()
                self._gate.give_back(call)
