"""The layers that repeat a request, alone: repeated attempts, their price, and refunds."""

import itertools
import math

import attrs
import httpx
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from support.client_stories import Asked, addressed_call

from sdk_trio.client.errors import (
    CircuitOpenError,
    ConnectionFailedError,
    FailureKind,
    OutcomeUnknownError,
)
from sdk_trio.client.layers import AttemptKind, CallLayer, CallsInProgress, ClientCounters, chained
from sdk_trio.client.layers.admission import Limiters, LimitPolicy, RateGate
from sdk_trio.client.layers.retry import (
    BudgetPolicy,
    HedgeLayer,
    RetryBudget,
    RetryLayer,
    RetryPolicy,
)

FIRST, RETRY, HEDGE = AttemptKind.FIRST, AttemptKind.RETRY, AttemptKind.HEDGE
SAVED = 50


@attrs.frozen
class Step:
    """The end of an attempt: a status or failure after ``delay``; if refused, it never left."""

    ends: int | FailureKind = 200
    delay: float = 0.0
    refused: bool = False


class Attempts(CallLayer):
    """The layer below: scripted outcomes of the attempts, in order."""

    def __init__(self, *steps):
        self.steps = list(steps)
        self.sent = []
        self.ends = []
        self.in_progress = 0

    async def send(self, call, kind):
        step = self.steps.pop(0) if self.steps else Step()
        if step.refused:
            await trio.lowlevel.checkpoint()
            raise CircuitOpenError("refused", method="GET", path="/")
        call.attempts += 1
        self.sent.append((kind, trio.current_time()))
        self.ends.append(step.ends)
        self.in_progress += 1
        try:
            await trio.sleep(step.delay)
        finally:
            self.in_progress -= 1
        if isinstance(step.ends, int):
            return httpx.Response(step.ends)
        raise ConnectionFailedError("failed", kind=step.ends, method="GET", path="/")


class Layers:
    """Both layers over scripted attempts, with a budget and a limiter that never fill up again."""

    def __init__(self, attempts, *, saved=SAVED, burst=SAVED):
        clock = trio.current_time
        self.attempts = attempts
        self.counters = ClientCounters()
        self.budget = RetryBudget(
            BudgetPolicy(deposit_per_call=1.0, floor_per_second=0.0), clock=clock
        )
        for _ in range(saved):
            self.budget.deposit()
        self.saved = saved
        self.limiters = Limiters(LimitPolicy(per_minute=1e-9, burst=burst), clock=clock)
        gate = RateGate(
            self.limiters,
            in_progress=CallsInProgress(),
            clock=clock,
            wall_clock=clock,
            longest_wait=120.0,
        )
        shared = {"clock": clock, "counters": self.counters}
        retry = RetryLayer(RetryPolicy(), self.budget, gate, **shared, random=lambda: 0.5)
        self.outermost = chained([retry, HedgeLayer(self.budget, gate, **shared), attempts])

    def spent(self):
        return self.saved - self.budget.balance

    def places_taken(self, call):
        return self.limiters.of(call).backlog


def play(asked, *steps, cancel_at=math.inf, **options):
    """Make one call; return the layers, the call, and how it ended."""

    async def main():
        layers, call = Layers(Attempts(*steps), **options), addressed_call(0, asked)
        ended = None
        with trio.move_on_after(cancel_at):
            try:
                ended = await layers.outermost.send(call, FIRST)
            except Exception as error:
                ended = error
        # Nothing of the call remains, and unsent attempts are not paid for.
        assert layers.attempts.in_progress == 0
        again = [kind for kind, _ in layers.attempts.sent if kind is not FIRST]
        assert layers.spent() == pytest.approx(len(again))
        assert layers.places_taken(call) == pytest.approx(len(again), abs=1e-6)
        return layers, call, ended

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def kinds(layers):
    return [kind for kind, _ in layers.attempts.sent]


ends = st.sampled_from([200, 404, 429, 503, *FailureKind])
delays = st.sampled_from([0.0, 0.3, 1.0, 4.0])
seldom = st.integers(0, 5).map(lambda number: number == 5)
steps = st.lists(st.builds(Step, ends, delays, seldom), max_size=8)
calls = st.builds(
    Asked,
    method=st.sampled_from(["GET", "POST"]),
    max_retries=st.integers(0, 4),
    hedge_after=st.sampled_from([None, 0.1, 0.5, 2.0]),
)


@given(calls, steps, st.sampled_from([0.0, 0.05, 0.4, 1.1, 3.0, math.inf]))
def test_every_repeated_attempt_was_paid_for_and_no_other(asked, scripted, cancel_at):
    layers, call, ended = play(asked, *scripted, cancel_at=cancel_at)
    sent = kinds(layers)
    assert sent.count(FIRST) <= 1
    assert sent.count(RETRY) <= asked.max_retries
    assert sent.count(HEDGE) <= (len(sent) - sent.count(HEDGE) if call.may_be_hedged else 0)
    if asked.method == "POST":  # may be executed once, so nothing follows what may have been
        assert not {FailureKind.UNCONFIRMED, 503} & set(layers.attempts.ends[:-1])
    assert (ended is None) <= (cancel_at < math.inf)


@given(calls, steps, st.integers(0, 2))
def test_an_empty_budget_repeats_nothing_and_is_counted(asked, scripted, saved):
    layers, _, _ = play(asked, *scripted, saved=saved)
    repeated = len(kinds(layers)) - kinds(layers).count(FIRST)
    assert repeated <= saved
    assert layers.counters.budget_refusals == 0 or repeated == saved


# -- hedges -------------------------------------------------------------------------------------


def test_a_quick_answer_is_not_hedged():
    layers, _, ended = play(Asked(hedge_after=0.5), Step(200, 0.4))
    assert (kinds(layers), ended.status_code) == ([FIRST], 200)


def test_a_slow_one_is_raced_and_the_loser_is_over_when_the_call_is():
    layers, _, ended = play(Asked(hedge_after=0.5), Step(404, 60.0), Step(200, 0.1))
    assert layers.attempts.sent == [(FIRST, 0.0), (HEDGE, 0.5)]
    assert ended.status_code == 200
    assert layers.counters.hedges_won == 1


def test_a_hedge_that_the_breaker_refuses_costs_nothing_and_the_first_one_counts():
    layers, _, ended = play(Asked(hedge_after=0.5), Step(404, 1.0), Step(refused=True))
    assert (kinds(layers), ended.status_code) == ([FIRST], 404)
    assert layers.counters.hedges_won == 0


def test_without_a_place_at_once_there_is_no_hedge():
    # The one place is the first hedge's, so the retry after it gets none.
    asked = Asked(hedge_after=0.5, max_retries=1)
    layers, _, ended = play(asked, Step(404, 9.0), Step(404, 0.1), burst=1)
    assert (kinds(layers), ended.status_code) == ([FIRST, HEDGE], 404)
    layers, _, ended = play(asked, *[Step(503, 1.0)] * 2, burst=1)
    assert (kinds(layers), ended.status_code) == ([FIRST, HEDGE], 503)


def test_a_write_is_never_raced():
    asked = Asked(method="POST", idempotent=True, hedge_after=0.1)
    layers, _, _ = play(asked, Step(200, 5.0))
    assert kinds(layers) == [FIRST]


# -- retries ------------------------------------------------------------------------------------


def test_waits_double_and_are_drawn_below_their_bound():
    layers, _, _ = play(Asked(max_retries=3), *[Step(503)] * 4)
    begun = [at for _, at in layers.attempts.sent]
    assert [b - a for a, b in itertools.pairwise(begun)] == pytest.approx([0.25, 0.5, 1])


def test_the_answer_before_the_breaker_refused_explains_more_than_the_refusal():
    layers, call, ended = play(Asked(), Step(503), Step(refused=True))
    assert (kinds(layers), ended.status_code) == ([FIRST], 503)
    assert isinstance(call.refusal, CircuitOpenError)


def test_a_breaker_that_refuses_the_first_attempt_is_said():
    assert isinstance(play(Asked(), Step(refused=True))[2], CircuitOpenError)


def test_a_write_without_an_answer_is_unknown_and_not_repeated():
    layers, _, ended = play(Asked(method="POST"), Step(FailureKind.UNCONFIRMED))
    assert kinds(layers) == [FIRST]
    assert isinstance(ended, OutcomeUnknownError)
    assert isinstance(ended.__cause__, ConnectionFailedError)


def test_a_write_that_never_left_is_repeated():
    layers, _, ended = play(Asked(method="POST"), Step(FailureKind.NOT_SENT))
    assert (kinds(layers), ended.status_code) == ([FIRST, RETRY], 200)
