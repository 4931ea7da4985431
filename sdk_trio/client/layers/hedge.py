"""The hedge layer: a second GET when the first one is slow or has failed; the first answer wins.

Only reads are hedged, because both requests may be executed. A hedge is paid from the retry budget
and counts for the limiter, so a slow upstream does not get twice the load.
"""

from collections.abc import Callable

import attrs
import httpx
import trio

from ..answers import RETRYABLE_STATUSES
from ..call import Call
from ..errors import ConnectionFailedError, FailureKind
from . import AttemptKind, CallLayer, ClientCounters
from .admission import RateGate
from .retry import RetryBudget


@attrs.define(eq=False)
class _Runner:
    """One of the two attempts of a race, and how it ended."""

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
    """The attempts of one race. ``decided`` is set when one has won, or all have ended."""

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
        """Add a runner; a race in which all runners so far have failed is undecided again."""
        self.runners.append(runner)
        self.decided = trio.Event()


class HedgeLayer(CallLayer):
    """Races a second attempt against one that takes too long.

    The loser is cancelled and awaited, so no task outlives the call. When both fail, the first
    one's failure counts.

    Args:
        budget: pays for hedges; empty, there are none.
        gate: the limiter; when an attempt would have to wait for it, there is no hedge.
        clock: returns the current time in seconds.
        counters: counts the races that hedges have won.
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

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Make one attempt and, where the call allows it, its hedge.

        Raises:
            CallError: the first attempt's, when there is no acceptable answer.

        Cancelling ends both attempts.
        """
        if call.hedge_after is None or not call.may_be_hedged:
            return await self.next.send(call, kind)
        first = _Runner(kind)
        race = _Race([first])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run, call, first, race)
            with trio.move_on_after(call.hedge_after):
                await race.decided.wait()
            if race.winner is None and self._may_hedge(call, first):
                hedge = _Runner(AttemptKind.HEDGE)
                race.admit(hedge)
                nursery.start_soon(self._run_paid, call, hedge, race)
            await race.decided.wait()
            nursery.cancel_scope.cancel()
        if race.winner not in (None, first):
            self._counters.hedges_won += 1
        # When both have failed, the first one's error counts: it says what a call without hedge
        # would have met.
        return (race.winner or first).outcome()

    def _may_hedge(self, call: Call, first: _Runner) -> bool:
        """Decide whether a hedge leaves at once, and pay for it."""
        # A first attempt that failed early is hedged at once, unless a second one would fail in the
        # same way (an invalid request, an open circuit).
        if first.error is not None and not (
            isinstance(first.error, ConnectionFailedError)
            and first.error.kind is not FailureKind.REFUSED
        ):
            return False
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
        except Exception as error:
            runner.error = error
        race.note_end(runner)

    async def _run_paid(self, call: Call, runner: _Runner, race: _Race) -> None:
        sent = call.attempts
        try:
            await self._run(call, runner, race)
        finally:
            # The breaker may have refused it: what was not sent is not paid.
            if call.attempts == sent:
                self._budget.refund()
                self._gate.give_back(call)
