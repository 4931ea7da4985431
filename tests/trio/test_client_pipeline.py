"""The whole pipeline in virtual time, against a server whose behaviour is drawn by Hypothesis.

Each example is a few calls at drawn times against a drawn list of replies, one for each attempt
in order of arrival; after the last one the server is well. What the server saw is then compared
with what the client promises.
"""

import itertools
import random

import attrs
import httpx
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from sdk_trio.client.attempts import AttemptKind
from sdk_trio.client.breaker import BreakerPolicy, BreakerState
from sdk_trio.client.budget import BudgetPolicy
from sdk_trio.client.errors import (
    CallError,
    CircuitOpenError,
    DeadlineExceededError,
    OutcomeUnknownError,
    RateLimitedError,
    ServerError,
)
from sdk_trio.client.pipeline import Pipeline, Policies
from sdk_trio.client.request import Call
from sdk_trio.client.retry import IDEMPOTENT_METHODS, RetryPolicy

ORIGIN = "https://api.example:443"

#: A breaker that opens soon, a budget that runs dry soon.
TOUCHY = Policies(
    breaker=BreakerPolicy(failure_threshold=2, sampling_seconds=30, break_seconds=5),
    budget=BudgetPolicy(floor_per_second=0.2, floor_seconds=10),
)
#: A breaker that never opens, a budget that never runs dry.
CALM = Policies(
    breaker=BreakerPolicy(failure_threshold=10_000),
    budget=BudgetPolicy(floor_per_second=1000, floor_seconds=1, maximum=1000),
)


@attrs.frozen
class Reply:
    """What the server does with one attempt: an answer, or how it fails, and when."""

    what: int | type[httpx.TransportError] | str = 200
    delay: float = 0.0
    body_delay: float = 0.0
    retry_after: float | None = None

    @property
    def executes(self):
        """Whether a request that gets this reply has taken effect."""
        return self.what not in (429, httpx.ConnectError, httpx.PoolTimeout)


@attrs.define(eq=False)
class Visit:
    """One attempt as the server saw it; ``began`` and ``ended`` order all events of a story."""

    call: int
    reply: Reply
    began: int
    started_at: float
    circuit: BreakerState
    ended: int | None = None
    answered_at: float | None = None


class ScriptedServer(httpx.AsyncBaseTransport):
    def __init__(self, replies=()):
        self.replies = list(replies)
        self.visits = []
        self.pipeline = None
        self._events = itertools.count()

    @property
    def in_flight(self):
        return [visit for visit in self.visits if visit.ended is None]

    async def handle_async_request(self, request):
        reply = self.replies.pop(0) if self.replies else Reply()
        visit = Visit(
            call=int(request.headers["x-call"]),
            reply=reply,
            began=next(self._events),
            started_at=trio.current_time(),
            circuit=self.pipeline.breakers.of(ORIGIN).state,
        )
        self.visits.append(visit)
        try:
            await trio.sleep(reply.delay)
            if reply.what == "hang":
                await trio.sleep_forever()
            if not isinstance(reply.what, int | str):
                raise reply.what("scripted", request=request)
        except BaseException:
            visit.ended = next(self._events)
            raise
        status = 200 if reply.what == "break" else reply.what
        headers = {} if reply.retry_after is None else {"retry-after": f"{reply.retry_after:.3f}"}
        if reply.retry_after is not None:
            visit.answered_at = trio.current_time()
        return httpx.Response(status, headers=headers, stream=Body(visit, self._events))


class Body(httpx.AsyncByteStream):
    def __init__(self, visit, events):
        self.visit = visit
        self.events = events

    async def __aiter__(self):
        yield b"{"
        await trio.sleep(self.visit.reply.body_delay)
        if self.visit.reply.what == "break":
            raise httpx.ReadError("scripted")
        yield b"}"

    async def aclose(self):
        await trio.lowlevel.checkpoint()
        if self.visit.ended is None:
            self.visit.ended = next(self.events)


@attrs.frozen
class Asked:
    """One call of a story."""

    at: float = 0.0
    method: str = "GET"
    idempotent: bool | None = None
    total_timeout: float | None = None
    attempt_timeout: float = 3.0
    max_retries: int = 3
    hedge_after: float | None = None

    @property
    def may_be_executed_twice(self):
        if self.idempotent is None:
            return self.method in IDEMPOTENT_METHODS
        return self.idempotent


@attrs.define
class Ended:
    """How a call ended and when."""

    started_at: float
    ended_at: float
    result: httpx.Response | Exception


@attrs.define
class Story:
    """Everything that happened."""

    asked: list[Asked]
    server: ScriptedServer
    pipeline: Pipeline
    ended: dict[int, Ended] = attrs.field(factory=dict)
    records: list = attrs.field(factory=list)
    began_at: float = 0.0
    was_over_at: float = 0.0

    def visits(self, number):
        return [visit for visit in self.server.visits if visit.call == number]


def call_of(number, asked):
    return Call(
        method=asked.method,
        path="/things/",
        url="https://api.example/v1/things/",
        origin=ORIGIN,
        headers=[(b"Host", b"api.example"), (b"x-call", b"%d" % number)],
        token="token",
        idempotent=asked.may_be_executed_twice,
        total_timeout=asked.total_timeout,
        attempt_timeout=asked.attempt_timeout,
        max_retries=asked.max_retries,
        hedge_after=asked.hedge_after,
    )


def make_story(replies, asked, policies, *, seed=0):
    server = ScriptedServer(replies)
    records = []
    pipeline = Pipeline(server, policies, random=random.Random(seed).random, hooks=[records.append])
    server.pipeline = pipeline
    story = Story(asked, server, pipeline, records=records)
    story.began_at = trio.current_time()
    return story


async def perform(story, number):
    asked = story.asked[number]
    await trio.sleep(asked.at)
    started_at = trio.current_time()
    try:
        result = await story.pipeline.send(call_of(number, asked))
    except CallError as error:
        result = error
    # Noted before anything else can run: nothing of the call may be left at this moment.
    assert not [visit for visit in story.visits(number) if visit.ended is None]
    story.ended[number] = Ended(started_at, trio.current_time(), result)


def play(replies, asked, policies=CALM, *, seed=0):
    async def main():
        story = make_story(replies, asked, policies, seed=seed)
        living = trio.lowlevel.current_statistics().tasks_living
        with trio.fail_after(100_000):
            async with trio.open_nursery() as nursery:
                for number in range(len(asked)):
                    nursery.start_soon(perform, story, number)
        assert trio.lowlevel.current_statistics().tasks_living == living
        story.was_over_at = trio.current_time()
        return story

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


KINDS_OF_REPLY = [
    *(200, 404, 429, 408, 500, 503, 503),
    *("hang", "break"),
    *(httpx.ConnectError, httpx.PoolTimeout),
    *(httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError),
]
delays = st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0, 2.0, 2.9, 3.1, 4.0])
replies = st.lists(
    st.builds(
        Reply,
        what=st.sampled_from(KINDS_OF_REPLY),
        delay=delays,
        body_delay=delays,
        retry_after=st.none() | st.sampled_from([0.0, 0.5, 1.0, 5.0, 30.0, 119.0, 121.0]),
    ),
    max_size=25,
)
asked_calls = st.lists(
    st.builds(
        Asked,
        at=st.floats(0, 20) | st.just(0.0),
        method=st.sampled_from(["GET", "GET", "HEAD", "POST", "PATCH", "DELETE"]),
        idempotent=st.sampled_from([None, None, None, True, False]),
        total_timeout=st.none() | st.sampled_from([0.2, 1.0, 3.0, 8.0, 40.0]),
        max_retries=st.integers(0, 4),
        hedge_after=st.none() | st.sampled_from([0.1, 0.5, 2.0]),
    ),
    min_size=1,
    max_size=6,
)
policies = st.sampled_from([TOUCHY, CALM])
seeds = st.integers(0, 10)


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


@given(replies, asked_calls, seeds)
def test_retries_and_hedges_together_stay_within_one_budget(replies, asked, seed):
    story = play(replies, asked, TOUCHY, seed=seed)
    kinds = story.pipeline.counters.attempts
    budget = TOUCHY.budget
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
def test_a_write_without_answer_is_told_apart_from_one_that_was_not_sent(
    replies, asked, policy, seed
):
    story = play(replies, asked, policy, seed=seed)
    for number, call in enumerate(asked):
        result = story.ended[number].result
        executed = any(visit.reply.executes for visit in story.visits(number))
        if isinstance(result, OutcomeUnknownError):
            assert not call.may_be_executed_twice
            assert story.visits(number)
        elif not call.may_be_executed_twice and isinstance(result, CallError):
            # It failed for sure, so either it was never executed or the upstream said so itself.
            assert not executed or hasattr(result, "status")


ok_or_not = st.sampled_from([200, 404, 503, 500, httpx.ReadError, httpx.ConnectError, "break"])
moments = st.integers(1, 60).map(lambda tenth: tenth / 10 + 0.013)


@given(ok_or_not, moments, ok_or_not, moments, st.integers(1, 50).map(lambda tenth: tenth / 10))
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


def test_a_transport_that_tells_makes_a_stuck_connect_retryable():
    class Telling(ScriptedServer):
        tells_before_send = True

        async def handle_async_request(self, request):
            if len(self.visits) == 1:
                request.extensions["sdk_trio.before_send"]()
            return await super().handle_async_request(request)

    async def main():
        story = make_story([], [Asked(method="POST")] * 2, CALM)
        server = Telling([Reply("hang"), Reply("hang")])
        story.pipeline = server.pipeline = Pipeline(server, CALM)
        story.server = server
        await perform(story, 0)
        return story

    story = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert isinstance(story.ended[0].result, OutcomeUnknownError)
    assert len(story.server.visits) == 2


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


async def _cancel_one(script, asked, policies, state, instrument):
    story = make_story([], [asked], policies)
    pipeline, server = story.pipeline, story.server
    breaker = pipeline.breakers.of(ORIGIN)
    if state in ("probing", "open"):
        for _ in range(2):
            server.replies.append(Reply(503))
            with pytest.raises(ServerError):
                await pipeline.send(call_of(0, Asked(max_retries=0)))
        await trio.sleep(5.0 if state == "probing" else 1.0)
    if state == "gated":
        pipeline.limiters.of(call_of(0, asked)).shut(1.0)
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
    backlog = pipeline.limiters.of(call_of(0, asked)).backlog
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
        story = make_story(replies, asked, attrs.evolve(EXACT, limit=limit), seed=seed)
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
        backlog = story.pipeline.limiters.of(call_of(0, asked[0])).backlog
        assert backlog == pytest.approx(len(story.server.visits), abs=1e-3)

    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(main, clock=clock, instruments=[instrument])
