"""Cancelling a call at any step leaves transport, breaker, budget and limiter at their baseline."""

import attrs
import httpx
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from support.client_stories import (
    ORIGIN,
    Asked,
    Policies,
    Reply,
    addressed_call,
    asked_calls,
    call_of,
    make_story,
    perform,
    replies,
    seeds,
)

from sdk_trio.base.breaker import BreakerPolicy, BreakerState
from sdk_trio.client.errors import ServerError
from sdk_trio.client.layers import AttemptKind
from sdk_trio.client.layers.retry import BudgetPolicy, RetryPolicy


class CancelAtStep(trio.abc.Instrument):
    """Cancels ``scope`` after the n-th step of any task since the scope was set."""

    def __init__(self, step):
        self.steps_left = step
        self.scope = None

    def after_task_step(self, task):
        if self.scope is not None:
            if self.steps_left == 0:
                self.scope.cancel()
            self.steps_left -= 1


#: A budget that time does not fill, and a bucket that time does not empty: both then say exactly
#: what was paid and not given back.
EXACT = Policies(
    retry=RetryPolicy(),
    budget=BudgetPolicy(floor_per_second=1e-12, floor_seconds=1e13),
    breaker=BreakerPolicy(failure_threshold=2, break_seconds=5),
)
CANCELLED_CALLS = {
    "plain": ([Reply(200, 0.1, 0.1)], Asked()),
    "retried": ([Reply(503, 0.1, 0.1), Reply(200, 0.1)], Asked(total_timeout=60.0)),
    "limited": ([Reply(429, retry_after=3.0), Reply(200)], Asked()),
    "not connected": ([Reply(httpx.ConnectError), Reply(200)], Asked(method="POST")),
    "hedged": ([Reply("hang"), Reply(200, 0.5, 0.5)], Asked(hedge_after=0.3)),
    "hedged and retried": (
        [Reply(500, 0.5), Reply("break", 0.5), Reply(200, 1.0), Reply(404, 0.1)],
        Asked(hedge_after=0.3),
    ),
    "timed out": ([Reply("hang"), Reply(200)], Asked(attempt_timeout=1.0)),
    "out of time": ([Reply(503, 0.5), Reply("hang")], Asked(total_timeout=2.0)),
    "opening": ([Reply(503), Reply(503), Reply(200)], Asked()),
    "write": ([Reply(200, 0.1, 0.1)], Asked(method="POST", total_timeout=2.0)),
}


@pytest.mark.parametrize("state", ["closed", "probing", "gated", "open"])
@pytest.mark.parametrize("name", CANCELLED_CALLS)
def test_cancelling_at_any_step_leaves_everything_at_its_baseline(name, state):
    script, asked = CANCELLED_CALLS[name]
    limit = attrs.evolve(EXACT.limit, per_minute=1e-9, burst=50)
    for step in range(400):
        instrument = CancelAtStep(step)
        finished = trio.run(
            _cancel_one,
            script,
            asked,
            attrs.evolve(EXACT, limit=limit),
            state,
            instrument,
            clock=trio.testing.MockClock(autojump_threshold=0),
            instruments=[instrument],
        )
        if finished:
            assert step > 0
            return
    pytest.fail("the call does not end")


def limiter_of(pipeline):
    """The limiter of the token that every call of a story has."""
    return pipeline.limiters.of(addressed_call(0, Asked()))


async def _cancel_one(script, asked, policies, state, instrument):
    story = await make_story([], [asked], policies)
    pipeline, server = story.pipeline, story.server
    breaker = pipeline.breakers.of(ORIGIN)
    if state in ("probing", "open"):
        for _ in range(2):
            server.replies.append(Reply(503))
            with pytest.raises(ServerError):
                await pipeline.send(call_of(0, Asked(max_retries=0)))
        await trio.sleep(5.0 if state == "probing" else 1.0)
    if state == "gated":
        limiter_of(pipeline).pause(1.0)
    server.replies = list(script)
    before = len(server.visits)
    with trio.CancelScope() as scope:
        instrument.scope = scope
        await perform(story, 0)
    instrument.scope = None
    assert server.in_flight == []
    assert not breaker.probe_is_out
    kinds = pipeline.counters.attempts
    extra = kinds[AttemptKind.RETRY] + kinds[AttemptKind.HEDGE]
    expected = policies.budget.reserve + 0.2 * kinds[AttemptKind.FIRST] - extra
    assert pipeline.budget.balance == pytest.approx(expected)
    backlog = limiter_of(pipeline).backlog
    assert backlog == pytest.approx(len(server.visits))
    assert len(server.visits) - before <= 8
    if breaker.state is BreakerState.CLOSED:
        server.replies = []
        answer = await pipeline.send(call_of(0, Asked()))
        assert answer.status_code == 200
    return not scope.cancelled_caught


@settings(max_examples=30)
@given(replies, asked_calls, seeds, st.integers(0, 200))
def test_cancelling_a_whole_story_leaves_everything_at_its_baseline(replies, asked, seed, step):
    instrument = CancelAtStep(step)
    limit = attrs.evolve(EXACT.limit, per_minute=1e-9, burst=500)

    async def main():
        story = await make_story(replies, asked, attrs.evolve(EXACT, limit=limit), seed=seed)
        with trio.CancelScope() as scope:
            instrument.scope = scope
            async with trio.open_nursery() as nursery:
                for number in range(len(asked)):
                    nursery.start_soon(perform, story, number)
        assert story.server.in_flight == []
        assert not story.pipeline.breakers.of(ORIGIN).probe_is_out
        kinds = story.pipeline.counters.attempts
        extra = kinds[AttemptKind.RETRY] + kinds[AttemptKind.HEDGE]
        expected = EXACT.budget.reserve + 0.2 * kinds[AttemptKind.FIRST] - extra
        assert story.pipeline.budget.balance == pytest.approx(expected)
        backlog = limiter_of(story.pipeline).backlog
        assert backlog == pytest.approx(len(story.server.visits), abs=1e-3)

    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(main, clock=clock, instruments=[instrument])
