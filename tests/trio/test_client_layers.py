"""Layer by layer: hedge, budget, limiter, timeouts, circuit and deadline, by example."""

import itertools

import attrs
import httpx
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from support.client_stories import (
    CALM,
    ORIGIN,
    TOUCHY,
    Asked,
    Reply,
    ScriptedServer,
    Story,
    make_story,
    open_pipeline,
    perform,
    play,
)

from sdk_trio.base.breaker import BreakerPolicy, BreakerState
from sdk_trio.client.errors import (
    CallError,
    CircuitOpenError,
    DeadlineExceededError,
    OutcomeUnknownError,
    RateLimitedError,
    ServerError,
)
from sdk_trio.client.layers.retry import BudgetPolicy

ok_or_not = st.sampled_from([200, 404, 503, 500, httpx.ReadError, httpx.ConnectError, "break"])
tenths = st.integers(1, 60).map(lambda number: number / 10)
# Never at the same moment: two answers that come at once are equally early.
moments, hedge_moments = (tenths.map(lambda at, off=off: at + off) for off in (0.013, 0.029))


@given(ok_or_not, moments, ok_or_not, hedge_moments, tenths)
def test_the_earliest_answer_wins_a_hedge(what, delay, hedge_what, hedge_delay, hedge_after):
    replies = [Reply(what, delay), Reply(hedge_what, hedge_delay)]
    call = Asked(hedge_after=hedge_after, max_retries=0, attempt_timeout=100)
    story = play(replies, [call])
    ended = story.ended[0]
    good = (200, 404)
    hedged_at = min(hedge_after, delay)
    ends = [delay] if what in good else []
    is_hedged = hedged_at < delay or what not in good
    if is_hedged and hedge_what in good:
        ends.append(hedged_at + hedge_delay)
    assert len(story.server.visits) == 1 + is_hedged
    if ends:
        assert ended.ended_at == pytest.approx(min(ends))
        winner = what if ends[0] == delay and delay == min(ends) else hedge_what
        status = getattr(ended.result, "status", None) or ended.result.status_code
        assert status == winner
    else:
        assert ended.ended_at == pytest.approx(max(delay, hedged_at + hedge_delay))
        assert_failed_with(ended.result, what)
    assert story.pipeline.counters.hedges_won == (len(ends) > 0 and min(ends) != delay)


def assert_failed_with(result, what):
    if isinstance(what, int):
        assert result.status == what
    elif what == "break":
        assert isinstance(result.__cause__, httpx.ReadError)
    else:
        assert isinstance(result.__cause__, what)


def test_the_loser_of_a_hedge_counts_neither_for_nor_against_the_upstream():
    one_failure_opens = attrs.evolve(CALM, breaker=BreakerPolicy(failure_threshold=1))
    replies = [Reply("hang"), Reply(200, 0.2)]
    story = play(replies, [Asked(hedge_after=1.0)], one_failure_opens)
    assert story.pipeline.breakers.of(ORIGIN).state is BreakerState.CLOSED
    assert [record.result for record in story.records] == ["answered", "cancelled"]


def test_a_hedge_waits_for_no_gate():
    replies = [Reply(429, 0.5, retry_after=2.0), Reply(200)]
    story = play(replies, [Asked(hedge_after=1.0)])
    assert [visit.started_at for visit in story.server.visits] == [0.0, 2.5]


def test_an_empty_budget_returns_the_last_error():
    dry = attrs.evolve(CALM, budget=BudgetPolicy(floor_per_second=0, maximum=0.9))
    story = play([Reply(503), Reply(200)], [Asked()], dry)
    assert isinstance(story.ended[0].result, ServerError)
    assert story.pipeline.counters.budget_refusals == 1


def test_a_wait_above_two_minutes_or_beyond_the_deadline_is_not_waited():
    for retry_after, total in [(121.0, None), (9.0, 8.0)]:
        replies = [Reply(429, retry_after=retry_after)]
        story = play(replies, [Asked(total_timeout=total)])
        error = story.ended[0].result
        assert isinstance(error, RateLimitedError)
        assert error.retry_after == retry_after
        assert story.ended[0].ended_at == 0.0


def test_two_minutes_are_waited():
    story = play([Reply(429, retry_after=120.0)], [Asked()])
    assert story.ended[0].result.status_code == 200
    assert story.ended[0].ended_at == 120.0


def test_a_429_holds_back_every_call_of_the_token():
    calls = [Asked(max_retries=0), Asked(at=1.0), Asked(at=2.0, total_timeout=3.0)]
    story = play([Reply(429, retry_after=10.0)], calls)
    assert [visit.started_at for visit in story.server.visits] == [0.0, 10.0]
    refused = story.ended[2].result
    assert isinstance(refused, RateLimitedError)
    assert (refused.attempts, refused.retry_after) == (0, 8.0)


def test_the_timeout_is_of_each_attempt():
    replies = [Reply("hang"), Reply(200, 1.0, body_delay=2.5), Reply(200, 1.0, body_delay=1.5)]
    story = play(replies, [Asked(attempt_timeout=3.0)], seed=1)
    assert story.ended[0].result.status_code == 200
    starts = [visit.started_at for visit in story.server.visits]
    assert [3.0 <= later - before <= 4.0 for before, later in itertools.pairwise(starts)] == [
        True
    ] * 2


def test_an_open_circuit_refuses_and_says_for_how_long():
    calls = [Asked(max_retries=1), Asked(at=2.0)]
    story = play([Reply(503), Reply(503)], calls, TOUCHY)
    opened_at = story.ended[0].ended_at
    refused = story.ended[1].result
    assert isinstance(refused, CircuitOpenError)
    assert refused.retry_after == pytest.approx(opened_at + 5.0 - 2.0)
    assert len(story.server.visits) == 2


def test_a_deadline_that_cuts_a_write_leaves_its_outcome_unknown():
    story = play([Reply("hang")] * 2, [Asked(method="POST", total_timeout=1.0)])
    error = story.ended[0].result
    assert isinstance(error, OutcomeUnknownError)
    assert isinstance(error.__cause__, DeadlineExceededError)
    read = play([Reply("hang")] * 2, [Asked(total_timeout=1.0)])
    assert isinstance(read.ended[0].result, DeadlineExceededError)


def test_a_transport_that_reports_the_send_makes_a_stuck_connect_retryable():
    class ReportingServer(ScriptedServer):
        calls_before_send = True

        async def handle_async_request(self, request):
            if len(self.visits) == 1:
                request.extensions["sdk_trio.before_send"]()
            return await super().handle_async_request(request)

    async def main():
        story = await make_story([], [Asked(method="POST")] * 2, CALM)
        server = ReportingServer([Reply("hang"), Reply("hang")])
        story.pipeline = await open_pipeline(server, CALM)
        story.server = server
        await perform(story, 0)
        return story

    story = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert isinstance(story.ended[0].result, OutcomeUnknownError)
    assert len(story.server.visits) == 2


def test_an_attempt_that_comes_too_late_is_not_made():
    clock = trio.testing.MockClock(autojump_threshold=0)

    async def main():
        server = ScriptedServer([Reply(503)])
        # A hook that blocks: the deadline passes without a checkpoint at which it could be felt.
        hooks = [lambda record: clock.jump(10)]
        await open_pipeline(server, CALM, random=lambda: 0.0, hooks=hooks)
        story = Story([Asked(total_timeout=5.0)], server, server.pipeline)
        await perform(story, 0)
        return story

    story = trio.run(main, clock=clock)
    assert isinstance(story.ended[0].result, CallError)
    assert len(story.server.visits) == 1
