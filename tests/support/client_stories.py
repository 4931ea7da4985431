"""Calls to a scripted server in virtual time, for the tests of the client's pipeline.

A *story* is a few calls at given times against a list of replies, one for each attempt in order of
arrival; after the last one the server is healthy. It records the attempts and the ends of calls.
"""

import itertools
import random

import attrs
import httpx
import trio
import trio.testing
from hypothesis import strategies as st

from sdk_trio.base.breaker import BreakerPolicy, BreakerState
from sdk_trio.base.http import IDEMPOTENT_METHODS
from sdk_trio.client.call import Call, CallOptions
from sdk_trio.client.errors import CallError
from sdk_trio.client.layers.admission import LimitPolicy
from sdk_trio.client.layers.retry import BudgetPolicy, RetryPolicy
from sdk_trio.client.pipeline import ClientConfig, Pipeline, RequestSources

ORIGIN = "https://api.example:443"


@attrs.frozen(kw_only=True)
class Policies:
    """The policies of a story's layers."""

    retry: RetryPolicy = attrs.field(factory=RetryPolicy)
    budget: BudgetPolicy = attrs.field(factory=BudgetPolicy)
    breaker: BreakerPolicy = attrs.field(factory=BreakerPolicy)
    limit: LimitPolicy = attrs.field(factory=LimitPolicy)


#: A breaker that opens soon, and a small budget.
TOUCHY = Policies(
    breaker=BreakerPolicy(failure_threshold=2, sampling_seconds=30, break_seconds=5),
    budget=BudgetPolicy(floor_per_second=0.2, floor_seconds=10),
)
#: A breaker that never opens, and an unlimited budget.
CALM = Policies(
    breaker=BreakerPolicy(failure_threshold=10_000),
    budget=BudgetPolicy(floor_per_second=1000, floor_seconds=1, maximum=1000),
)


@attrs.frozen
class Reply:
    """The server's reaction to one attempt: a response or a failure, and its time."""

    what: int | type[httpx.TransportError] | str = 200
    delay: float = 0.0
    body_delay: float = 0.0
    retry_after: float | None = None

    @property
    def executes(self):
        """Whether a request with this reply has taken effect."""
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
    """The record of a story."""

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
        options=CallOptions(
            headers={"x-call": str(number)},
            idempotent=asked.may_be_executed_twice,
            total_timeout=asked.total_timeout,
            attempt_timeout=asked.attempt_timeout,
            max_retries=asked.max_retries,
            hedge_after=asked.hedge_after,
        ),
    )


def addressed_call(number, asked):
    """Return a call in the form that the layers get."""
    call = call_of(number, asked)
    pipeline_over(ScriptedServer(), CALM).address(call)
    return call


def pipeline_over(server, policies, *, random=random.random, hooks=()):
    plan = ClientConfig(
        mode="Custom",
        base_url="https://api.example/v1",
        origin=ORIGIN,
        access_token="token",
        version_header="Version",
        api_version="1",
        attempt_timeout=3.0,
        total_timeout=None,
        hedge_after=None,
        retry=policies.retry,
        breaker=policies.breaker,
        limit=policies.limit,
    )
    sources = RequestSources(random=random)
    server.pipeline = Pipeline(plan, server, budget=policies.budget, sources=sources)
    server.pipeline.hooks.extend(hooks)
    return server.pipeline


async def open_pipeline(server, policies, **options):
    """Open a pipeline over ``server``; it has no resources to close."""
    return await pipeline_over(server, policies, **options).__aenter__()


async def make_story(replies, asked, policies, *, seed=0):
    server = ScriptedServer(replies)
    records = []
    draw = random.Random(seed).random
    pipeline = await open_pipeline(server, policies, random=draw, hooks=[records.append])
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
    # Record it before any other task runs: no part of the call may be left now.
    assert not [visit for visit in story.visits(number) if visit.ended is None]
    story.ended[number] = Ended(started_at, trio.current_time(), result)


def play(replies, asked, policies=CALM, *, seed=0):
    async def main():
        story = await make_story(replies, asked, policies, seed=seed)
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
