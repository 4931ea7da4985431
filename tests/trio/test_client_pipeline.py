"""The pipeline's promises, against a server whose behaviour is drawn by Hypothesis."""

import itertools

import attrs
import httpx
from hypothesis import given
from hypothesis import strategies as st
from support.client_stories import (
    CALM,
    ORIGIN,
    TOUCHY,
    Asked,
    Reply,
    asked_calls,
    play,
    policies,
    replies,
    seeds,
)

from sdk_trio.base.breaker import BreakerState
from sdk_trio.client.errors import CallError, OutcomeUnknownError
from sdk_trio.client.layers import AttemptKind
from sdk_trio.client.layers.retry import BudgetPolicy

#: A budget that runs dry, and no breaker that would keep it from doing so.
TIGHT = attrs.evolve(CALM, budget=BudgetPolicy(floor_per_second=0.05, floor_seconds=30))

outages = st.lists(
    st.builds(Reply, what=st.sampled_from([503, 500, httpx.ConnectError, "break"])),
    min_size=20,
    max_size=30,
)
persistent_calls = st.lists(
    st.builds(
        Asked,
        at=st.floats(0, 5),
        max_retries=st.just(4),
        hedge_after=st.none() | st.just(0.5),
    ),
    min_size=4,
    max_size=6,
)


@given(replies, asked_calls, policies, seeds)
def test_writes_are_executed_at_most_once_unless_declared_idempotent(replies, asked, policy, seed):
    story = play(replies, asked, policy, seed=seed)
    for number, call in enumerate(asked):
        if not call.may_be_executed_twice:
            assert sum(visit.reply.executes for visit in story.visits(number)) <= 1


@given(replies, asked_calls, policies, seeds)
def test_no_attempt_is_made_and_nothing_lasts_after_the_deadline(replies, asked, policy, seed):
    story = play(replies, asked, policy, seed=seed)
    for number, call in enumerate(asked):
        if call.total_timeout is not None:
            ended = story.ended[number]
            deadline = ended.started_at + call.total_timeout
            assert all(visit.started_at < deadline for visit in story.visits(number))
            assert ended.ended_at <= deadline + 1e-9


@given(replies, asked_calls, policies, seeds)
def test_no_attempt_comes_before_the_upstream_has_asked_for(replies, asked, policy, seed):
    story = play(replies, asked, policy, seed=seed)
    for visit in story.server.visits:
        for earlier in story.server.visits:
            if earlier.answered_at is None or earlier.ended is None or earlier.ended > visit.began:
                continue
            of_the_call = earlier.call == visit.call and earlier.reply.what in (408, 429, 500, 503)
            if earlier.reply.what == 429 or of_the_call:
                # The body is read before an answer counts, so the wait can only be longer.
                assert visit.started_at >= earlier.answered_at + earlier.reply.retry_after - 1e-9


@given(replies, asked_calls, policies, seeds)
def test_the_number_of_attempts_is_bounded(replies, asked, policy, seed):
    story = play(replies, asked, policy, seed=seed)
    kinds = story.pipeline.counters.attempts
    assert kinds.total() == len(story.server.visits) == len(story.records)
    for number, call in enumerate(asked):
        made = len(story.visits(number))
        rounds = 1 + call.max_retries
        hedged = call.hedge_after is not None and call.method in ("GET", "HEAD")
        assert made <= rounds * (2 if hedged else 1)
        result = story.ended[number].result
        if isinstance(result, CallError):
            assert result.attempts == made
    assert kinds[AttemptKind.RETRY] <= sum(call.max_retries for call in asked)


@given(outages, persistent_calls, seeds)
def test_retries_and_hedges_together_stay_within_one_budget(replies, asked, seed):
    story = play(replies, asked, TIGHT, seed=seed)
    kinds = story.pipeline.counters.attempts
    budget = TIGHT.budget
    lasted = story.was_over_at - story.began_at
    assert kinds[AttemptKind.RETRY] + kinds[AttemptKind.HEDGE] <= (
        budget.reserve
        + budget.deposit_per_call * kinds[AttemptKind.FIRST]
        + budget.floor_per_second * lasted
        + 1e-6
    )


@given(replies, asked_calls, seeds)
def test_while_probing_only_one_attempt_is_out(replies, asked, seed):
    story = play(replies, asked, TOUCHY, seed=seed)
    probes = [v for v in story.server.visits if v.circuit is not BreakerState.CLOSED]
    assert all(probe.circuit is BreakerState.PROBING for probe in probes)
    for one, other in itertools.pairwise(probes):
        assert one.ended is not None
        assert one.ended < other.began


@given(replies, asked_calls, policies, seeds)
def test_afterwards_nothing_is_left_over(replies, asked, policy, seed):
    story = play(replies, asked, policy, seed=seed)
    assert story.server.in_flight == []
    assert not story.pipeline.breakers.of(ORIGIN).probe_is_out
    counters = story.pipeline.counters
    assert counters.requests.total() == len(asked) == counters.attempts_per_call.total()


@given(replies, asked_calls, policies, seeds)
def test_a_write_without_answer_is_distinguished_from_an_unsent_one(replies, asked, policy, seed):
    story = play(replies, asked, policy, seed=seed)
    for number, call in enumerate(asked):
        result = story.ended[number].result
        executed = any(visit.reply.executes for visit in story.visits(number))
        if isinstance(result, OutcomeUnknownError):
            assert not call.may_be_executed_twice
            assert story.visits(number)
        elif not call.may_be_executed_twice and isinstance(result, CallError):
            # It failed for sure: either it was never executed, or the upstream itself answered an
            # error.
            assert not executed or hasattr(result, "status")
