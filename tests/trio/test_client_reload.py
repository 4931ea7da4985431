"""New settings for a client that makes calls: its rate, token, timeouts and retries."""

import httpx
import msgspec
import pytest
import trio
import trio.testing

from sdk_trio.client.client import Client
from sdk_trio.client.errors import RateLimitedError
from sdk_trio.config import Secret, Settings

SETTINGS = Settings(access_token=Secret("not-a-real-token"))


def limited(per_minute, **changes):
    return msgspec.structs.replace(
        SETTINGS,
        upstream=msgspec.structs.replace(SETTINGS.upstream, requests_per_minute=per_minute),
        **changes,
    )


class Upstream(httpx.AsyncBaseTransport):
    """Answers with ``status``, and records the time and the content of each request."""

    def __init__(self, status=200):
        self.status = status
        self.came = []

    async def handle_async_request(self, request):
        await trio.lowlevel.checkpoint()
        self.came.append((trio.current_time(), request))
        return httpx.Response(self.status)

    def seconds_since(self, start):
        return pytest.approx([at - start for at, _ in self.came])


async def test_waiting_calls_continue_in_order_at_the_new_rate(autojump_clock):
    upstream = Upstream()
    async with Client(limited(60), upstream) as client:
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(16):
                # The first ten are the burst; then one a second.
                nursery.start_soon(client.request, "GET", f"/{number}")
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(1.5)
            client.prepare_reload(limited(240))()
        # Half of the wait for the twelfth is over; the other half, and the others, take a quarter.
        expected = [0] * 10 + [1.0, 1.625, 1.875, 2.125, 2.375, 2.625]
        assert upstream.seconds_since(start) == expected
        paths = [request.url.path for _, request in upstream.came]
        assert paths[10:] == [f"/v1/{number}" for number in range(10, 16)]
        assert client.plan.limit.per_minute == 240


async def test_without_a_rate_all_calls_leave_at_once_and_with_a_rate_they_wait(autojump_clock):
    upstream = Upstream()
    async with Client(limited(1), upstream) as client:
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(12):
                nursery.start_soon(client.request, "GET", "/x")
            await trio.testing.wait_all_tasks_blocked()
            assert len(upstream.came) == 10
            client.prepare_reload(limited(None))()
        assert upstream.seconds_since(start) == [0] * 12
        client.prepare_reload(limited(60))()
        for _ in range(12):
            await client.request("GET", "/x")
        assert upstream.seconds_since(start) == [0] * 22 + [1, 2]


async def test_a_call_that_would_wait_too_long_fails_at_once(autojump_clock):
    upstream = Upstream()
    async with Client(limited(60), upstream) as client:
        start = trio.current_time()
        refused = []

        async def call():
            try:
                await client.request("GET", "/x")
            except RateLimitedError as error:
                refused.append((trio.current_time() - start, error.retry_after))
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            for _ in range(14):
                nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            client.prepare_reload(limited(1))()
        # A minute each: the first two are due within the two minutes that anybody waits.
        assert sorted(refused) == [(0, 180), (0, 240)]
        assert upstream.seconds_since(start) == [0] * 10 + [60, 120]
        # Their places are free again.
        await client.request("GET", "/x")
        assert upstream.came[-1][0] - start == pytest.approx(180)


async def test_a_cancelled_earlier_waiter_frees_its_slot_after_a_reload(autojump_clock):
    upstream = Upstream()
    async with Client(limited(60), upstream) as client:
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(11):
                nursery.start_soon(client.request, "GET", "/x")
            await trio.testing.wait_all_tasks_blocked()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as cancelled:
                    cancelled.start_soon(client.request, "GET", "/x")
                    await trio.testing.wait_all_tasks_blocked()
                    client.prepare_reload(limited(30))()
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            nursery.start_soon(client.request, "GET", "/x")
        assert upstream.seconds_since(start) == [0] * 10 + [2, 4]


async def test_calls_from_then_on_carry_the_new_token_timeouts_and_retries(autojump_clock):
    upstream = Upstream(status=503)
    changed = limited(
        None,
        access_token=Secret("another-made-up-token"),
        max_retries=0,
        timeout_ms=2000,
        total_timeout_ms=5000,
        resilience=msgspec.structs.replace(SETTINGS.resilience, hedge_after_ms=50),
    )
    async with Client(SETTINGS, upstream) as client:
        with pytest.raises(Exception, match="503") as before:
            await client.request("GET", "/x")
        view = client.with_options(max_retries=1, hedge_after=None)
        commit = client.prepare_reload(changed)
        assert client.plan.retry.max_retries == 3, "nothing before it is put into force"
        commit()
        with pytest.raises(Exception, match="503") as after:
            await client.request("GET", "/x")
        assert (before.value.attempts, after.value.attempts) == (4, 1)
        tokens = [request.headers["authorization"] for _, request in upstream.came]
        assert tokens == ["Bearer not-a-real-token"] * 4 + ["Bearer another-made-up-token"]
        client.breaker.close()
        with pytest.raises(Exception, match="503") as own:
            await view.request("GET", "/x")
        assert own.value.attempts == 2, "what a view asks for itself stays"
        plan = client.plan
        assert (plan.attempt_timeout, plan.total_timeout, plan.hedge_after) == (2.0, 5.0, 0.05)
