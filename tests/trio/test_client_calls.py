"""The client as its users meet it, on a transport in memory and a mock clock."""

import itertools
import json
import logging

import httpx
import msgspec
import pytest
import trio

from sdk_trio.base.breaker import BreakerState
from sdk_trio.client.call import CallOptions
from sdk_trio.client.client import Client
from sdk_trio.client.errors import (
    AttemptTimeoutError,
    CircuitOpenError,
    ConnectionFailedError,
    NotFoundError,
    OutcomeUnknownError,
    UnprocessableEntityError,
)
from sdk_trio.config import Mode, Secret, Settings
from sdk_trio.errors import NotRunningError

TOKEN = "polar_oat_not-a-real-token"
SETTINGS = Settings(
    mode=Mode.CUSTOM, custom_base_url="https://api.example", access_token=Secret(TOKEN)
)


def upstream_options(**options):
    return msgspec.structs.replace(
        SETTINGS, upstream=msgspec.structs.replace(SETTINGS.upstream, **options)
    )


class Upstream(httpx.AsyncBaseTransport):
    """Answers from a list, then 200; keeps the requests and whether it is open."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.is_open = None

    async def __aenter__(self):
        self.is_open = True
        return self

    async def __aexit__(self, *_):
        self.is_open = False

    async def handle_async_request(self, request):
        await trio.lowlevel.checkpoint()
        self.requests.append(request)
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, int):
            answer = httpx.Response(answer, json={"status": answer})
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_request_is_complete(autojump_clock):
    upstream = Upstream()
    async with Client(SETTINGS, upstream) as client:
        assert upstream.is_open
        answer = await client.request(
            "post", "/customers/", params={"a": [1, 2]}, json={"name": "Zoë"}
        )
    assert not upstream.is_open
    assert answer.json() == {"status": 200}
    [request] = upstream.requests
    assert (request.method, str(request.url)) == (
        "POST",
        "https://api.example/v1/customers/?a=1&a=2",
    )
    headers = request.headers
    assert headers["host"] == "api.example"
    assert headers["authorization"] == f"Bearer {TOKEN}"
    assert headers["sdk-version"] == client.plan.api_version
    assert headers["user-agent"].startswith("sdk-trio/")
    assert headers["content-type"] == "application/json"
    assert headers["content-length"] == str(len(request.content))
    assert json.loads(request.content) == {"name": "Zoë"}


async def test_a_bare_write_has_a_length_and_a_read_has_none(autojump_clock):
    upstream = Upstream()
    async with Client(SETTINGS, upstream) as client:
        await client.request("POST", "/x")
        await client.request("GET", "/x")
    post, get = upstream.requests
    assert post.headers["content-length"] == "0"
    assert not {"content-length", "content-type", "idempotency-key"} & set(get.headers)


async def test_attempts_of_one_call_share_their_key_and_calls_do_not(autojump_clock):
    upstream = Upstream(429, 429)
    async with Client(SETTINGS, upstream) as client:
        await client.request("POST", "/x")
        await client.request("POST", "/x")
    keys = [request.headers["idempotency-key"] for request in upstream.requests]
    assert keys[0] == keys[1] == keys[2] != keys[3]


async def test_writes_are_repeated_where_the_upstream_honours_keys(autojump_clock):
    for honours, attempts in [(False, 1), (True, 2)]:
        upstream = Upstream(httpx.ReadError("gone"))
        chosen = upstream_options(honours_idempotency_keys=honours)
        async with Client(chosen, upstream) as client:
            if honours:
                await client.request("POST", "/x")
            else:
                with pytest.raises(OutcomeUnknownError) as caught:
                    await client.request("POST", "/x")
                assert isinstance(caught.value.__cause__, ConnectionFailedError)
        assert len(upstream.requests) == attempts


async def test_errors_carry_the_upstream_s_answer(autojump_clock):
    body = {
        "error": "RequestValidationError",
        "detail": [{"loc": ["body"], "msg": "no", "type": "t"}],
    }
    answer = httpx.Response(422, json=body, headers={"x-request-id": "r-1"})
    async with Client(SETTINGS, Upstream(answer)) as client:
        with pytest.raises(UnprocessableEntityError) as caught:
            await client.request("GET", "/orders/", params={"email": "secret@example.com"})
    error = caught.value
    assert (error.method, error.path, error.request_id) == ("GET", "/orders/", "r-1")
    assert (error.attempts, error.body) == (1, body)
    assert "secret" not in str(error)


async def test_every_status_is_an_answer_when_asked_for(autojump_clock):
    async with Client(SETTINGS, Upstream(404)) as client:
        answer = await client.request("GET", "/x", accepts_any_status=True)
    assert answer.status_code == 404


async def test_a_view_changes_options_and_shares_everything_else(autojump_clock):
    upstream = Upstream(503, 503)
    async with Client(SETTINGS, upstream) as client:
        view = client.with_options(max_retries=0, headers={"X-Tag": "1", "User-Agent": None})
        with pytest.raises(Exception, match="503"):
            await view.request("GET", "/x")
        deeper = view.with_options(CallOptions(max_retries=5), access_token="other-token")
        await deeper.request("GET", "/x")
        await client.request("GET", "/x")
        assert view.counters is client.counters
        assert view.breaker is client.breaker
    first, second, third, last = upstream.requests
    assert first.headers["x-tag"] == second.headers["x-tag"] == "1"
    assert "user-agent" not in first.headers
    assert third.headers["authorization"] == "Bearer other-token"
    assert last.headers["authorization"] == f"Bearer {TOKEN}"
    assert "x-tag" not in last.headers


async def test_resources_send_through_the_same_pipeline(autojump_clock):
    order = httpx.Response(200, json={"id": "o1"})
    upstream = Upstream(503, order)
    async with Client(SETTINGS, upstream) as client:
        assert (await client.orders.get("o1")).id == "o1"
    assert [str(request.url) for request in upstream.requests] == [
        "https://api.example/v1/orders/o1"
    ] * 2


async def test_hooks_see_each_attempt_and_cannot_break_a_call(autojump_clock):
    seen = []
    upstream = Upstream(503, httpx.ConnectError("no"), 200)
    async with Client(SETTINGS, upstream) as client:

        @client.on_attempt
        def broken(record):
            raise RuntimeError("a hook's own fault")

        client.on_attempt(seen.append)
        await client.request("GET", "/orders/", params={"q": "secret"})
    assert [(r.number, r.kind, r.result, r.status, r.error) for r in seen] == [
        (1, "first", "answered", 503, None),
        (2, "retry", "failed", None, "ConnectionFailedError"),
        (3, "retry", "answered", 200, None),
    ]
    assert "secret" not in repr(seen)


async def test_counters_distinguish_calls(autojump_clock):
    async with Client(SETTINGS, Upstream(200, 404, 503, 200)) as client:
        await client.request("GET", "/x")
        with pytest.raises(NotFoundError):
            await client.request("DELETE", "/x")
        await client.request("GET", "/x")
        with trio.CancelScope() as scope:
            scope.cancel()
            await client.request("GET", "/x")
        client.breaker.isolate()
        with pytest.raises(CircuitOpenError):
            await client.request("GET", "/x")
    assert client.counters.requests == {
        ("GET", "ok"): 2,
        ("DELETE", "not_found"): 1,
        ("GET", "cancelled"): 1,
        ("GET", "circuit_open"): 1,
    }
    assert client.counters.attempts_per_call == {1: 3, 2: 1, 0: 1}


async def test_the_breaker_can_be_set_by_hand(autojump_clock):
    upstream = Upstream()
    async with Client(SETTINGS, upstream) as client:
        client.breaker.isolate()
        with pytest.raises(CircuitOpenError) as caught:
            await client.request("GET", "/x")
        assert caught.value.retry_after is None
        assert upstream.requests == []
        client.breaker.close()
        await client.request("GET", "/x")
        assert client.breaker.state is BreakerState.CLOSED


async def test_a_client_is_open_only_inside_its_context(autojump_clock):
    client = Client(SETTINGS, Upstream())
    with pytest.raises(NotRunningError):
        await client.request("GET", "/x")
    async with client:
        await client.request("GET", "/x")
    with pytest.raises(NotRunningError):
        await client.request("GET", "/x")


async def test_paths_that_lead_elsewhere_are_refused_before_anything_is_sent(autojump_clock):
    upstream = Upstream()
    async with Client(SETTINGS, upstream) as client:
        for path in ("https://evil.example/", "/customers/../../x"):
            with pytest.raises(ValueError, match="path"):
                await client.request("GET", path)
    assert upstream.requests == []


async def test_the_token_shows_nowhere(autojump_clock, caplog):
    caplog.set_level(logging.DEBUG)
    echo = httpx.Response(401, json={"detail": f"no such token {TOKEN}"})
    failure = httpx.LocalProtocolError(f"Illegal header value b'Bearer {TOKEN}'")
    async with Client(SETTINGS, Upstream(503, echo, failure)) as client:
        shown = [repr(client), repr(client.plan), repr(client.with_options(access_token=TOKEN))]
        client.on_attempt(lambda record: shown.append(repr(record)))
        for _ in range(2):
            with pytest.raises(Exception, match=r"x") as caught:
                await client.request("GET", "/x")
            shown += [str(caught.value), repr(caught.value), repr(vars(caught.value))]
    assert "********" in "".join(shown)
    assert TOKEN not in "".join(shown) + caplog.text


async def test_opening_logs_the_settings_in_force(autojump_clock, caplog):
    caplog.set_level(logging.INFO)
    settings = Settings(access_token=Secret("sk_live_x"))
    async with Client(settings, Upstream()):
        pass
    started, doubted = caplog.records
    assert started.message.startswith("client.started")
    for words in ("base_url='https://sandbox-api.polar.sh/v1'", "max_connections_per_server=100"):
        assert words in started.message
    assert doubted.levelname == "WARNING"
    assert "production token" in doubted.message


async def test_the_rate_is_respected(autojump_clock):
    chosen = upstream_options(requests_per_minute=60)
    async with Client(chosen, Upstream()) as client:
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(15):
                nursery.start_soon(client.request, "GET", "/x")
    assert trio.current_time() - started == pytest.approx(5.0)


class Rows(httpx.AsyncByteStream):
    """A body in parts, each after a wait."""

    def __init__(self, *parts):
        self.parts = parts
        self.is_closed = False

    async def __aiter__(self):
        for wait, part in self.parts:
            await trio.sleep(wait)
            if isinstance(part, Exception):
                raise part
            yield part

    async def aclose(self):
        self.is_closed = True


async def test_a_stream_is_read_as_it_comes_and_may_last_longer_than_a_timeout(autojump_clock):
    rows = Rows(*((29.0, b"%d\n" % n) for n in range(4)))
    upstream = Upstream(503, httpx.Response(200, stream=rows))
    async with (
        Client(SETTINGS, upstream) as client,
        client.stream("GET", "/orders/export", total_timeout=35.0) as answer,
    ):
        assert b"".join([part async for part in answer.aiter_bytes()]) == b"0\n1\n2\n3\n"
    assert rows.is_closed
    assert len(upstream.requests) == 2


@pytest.mark.parametrize(
    ("part", "error"),
    [((31.0, b"late"), AttemptTimeoutError), ((0, httpx.ReadError("x")), ConnectionFailedError)],
)
async def test_a_stream_that_stalls_or_breaks_raises_an_error(autojump_clock, part, error):
    rows = Rows((0, b"a"), part)
    upstream = Upstream(httpx.Response(200, stream=rows))
    async with Client(SETTINGS, upstream) as client, client.stream("GET", "/x") as answer:
        parts = aiter(answer.stream)
        assert await anext(parts) == b"a"
        with pytest.raises(error):
            await anext(parts)
    assert rows.is_closed


async def test_leaving_a_stream_early_or_by_cancellation_closes_it(autojump_clock):
    for cancels in (False, True):
        rows = Rows(*((0.1, b"x") for _ in itertools.repeat(None, 100)))
        async with Client(SETTINGS, Upstream(httpx.Response(200, stream=rows))) as client:
            with trio.move_on_after(0.35):
                async with client.stream("GET", "/x") as answer:
                    async for _ in answer.stream:
                        if not cancels:
                            break
        assert rows.is_closed


async def test_a_stream_that_is_refused_is_an_error_with_its_body(autojump_clock):
    async with Client(SETTINGS, Upstream(404)) as client:
        with pytest.raises(NotFoundError) as caught:
            async with client.stream("GET", "/x"):
                pytest.fail("there is nothing to read")
    assert caught.value.body == {"status": 404}


@pytest.mark.parametrize("part", [(0, httpx.ReadError("x")), (31.0, b"")])
async def test_a_refused_write_is_refused_even_if_its_body_never_came(autojump_clock, part):
    answer = httpx.Response(409, stream=Rows(part), headers={"content-encoding": "gzip"})
    async with Client(SETTINGS, Upstream(answer)) as client:
        with pytest.raises(Exception, match="409"):
            await client.request("POST", "/x")
