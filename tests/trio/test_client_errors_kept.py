"""No answer is discarded: the error that ends a call carries the last answer."""

import copy
import gzip
import json
import pickle
import zlib

import httpx
import pytest
import trio
import trio.lowlevel

from sdk_trio import errors as all_errors
from sdk_trio.base.breaker import BreakerState
from sdk_trio.client import errors
from sdk_trio.client.call import CallOptions
from sdk_trio.client.client import Client
from sdk_trio.client.errors import (
    AttemptTimeoutError,
    CallError,
    CircuitOpenError,
    ConnectionFailedError,
    DeadlineExceededError,
    FailureKind,
    OutcomeUnknownError,
    RateLimitedError,
    ServerError,
    UnexpectedAnswerError,
)
from sdk_trio.client.pipeline import RequestSources
from sdk_trio.config import Settings

TOKEN = "polar_oat_not-a-real-token"
EXPLANATION = {"error": "Broken", "detail": "the disk is full"}


def settings(**keys):
    mapping = {"Mode": "Custom", "CustomBaseUrl": "https://api.example", "AccessToken": TOKEN}
    return Settings.from_mapping(mapping | keys, receiver=False)


class Upstream(httpx.AsyncBaseTransport):
    """Answers by a function of the number of the request, from 1."""

    def __init__(self, answer):
        self.answer = answer
        self.requests = []

    async def handle_async_request(self, request):
        await trio.lowlevel.checkpoint()
        self.requests.append(request)
        answer = self.answer(len(self.requests))
        if isinstance(answer, Exception):
            raise answer
        return answer


class Body(httpx.AsyncByteStream):
    """Gives its pieces; one that is an exception is raised, one that is a number waited for."""

    def __init__(self, *pieces):
        self.pieces = pieces
        self.is_closed = False

    async def __aiter__(self):
        for piece in self.pieces:
            await trio.lowlevel.checkpoint()
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, float):
                await trio.sleep(piece)
            else:
                yield piece

    async def aclose(self):
        self.is_closed = True


def client(answer, **keys):
    return Client(settings(**keys), Upstream(answer), sources=RequestSources(random=lambda: 1.0))


def explained(status, number, **headers):
    return httpx.Response(
        status, json=EXPLANATION, headers={"x-request-id": f"rq{number}", **headers}
    )


def streamed(status, *pieces, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, stream=Body(*pieces), headers={"x-request-id": "rq1"} | headers)


# --- a retry that is refused, a deadline ---------------------------------------------------------


async def test_a_call_whose_retry_the_breaker_refuses_ends_with_its_own_answer(autojump_clock):
    async with client(lambda n: explained(500, n)) as calls:
        with pytest.raises(ServerError):
            await calls.orders.get("o")  # four failures
        with pytest.raises(ServerError) as caught:
            await calls.orders.get("o")  # the fifth opens the circuit before a retry
        assert calls.breaker.state is BreakerState.OPEN
        error = caught.value
        assert (error.status, error.body, error.request_id, error.attempts) == (
            500, EXPLANATION, "rq5", 1,
        )  # fmt: skip
        assert isinstance(error.__cause__, CircuitOpenError)
        assert "no further attempt was made: not sent" in "".join(error.__notes__)
        assert error.retry_after == error.__cause__.retry_after > 0
        # A call of which nothing was sent has no answer of its own to end with.
        with pytest.raises(CircuitOpenError) as refused:
            await calls.orders.get("o")
        assert (refused.value.attempts, refused.value.status) == (0, None)
        assert calls.counters.requests["GET", "server"] == 2


async def test_a_call_whose_retry_the_breaker_refuses_ends_with_its_own_failure(autojump_clock):
    upstream = client(
        lambda n: httpx.ReadError("gone"), Resilience={"CircuitBreakerFailureThreshold": 1}
    )
    async with upstream as calls:
        with pytest.raises(ConnectionFailedError, match="gone") as caught:
            await calls.orders.get("o")
        assert caught.value.attempts == 1
        assert "no further attempt" in "".join(caught.value.__notes__)
        calls.breaker.close()
        with pytest.raises(OutcomeUnknownError):
            await calls.request("POST", "/x")


async def test_a_deadline_reports_the_last_response(autojump_clock):
    def answer(number):
        return explained(503, number) if number < 3 else streamed(200, 1000.0)

    async with client(answer, TotalTimeoutMs=20_000) as calls:
        with pytest.raises(DeadlineExceededError, match="the total time of 20 s") as caught:
            await calls.orders.get("o")
    error = caught.value
    assert (error.status, error.body, error.request_id) == (503, EXPLANATION, "rq2")
    assert error.attempts == 3
    assert isinstance(error.__cause__, ServerError)


async def test_a_deadline_after_a_failure_has_it_as_its_cause(autojump_clock):
    def answer(number):
        return httpx.ReadError("gone") if number == 1 else streamed(500, 1000.0)

    async with client(answer, TotalTimeoutMs=20_000) as calls:
        with pytest.raises(DeadlineExceededError) as caught:
            await calls.orders.get("o")
    assert isinstance(caught.value.__cause__, ConnectionFailedError)
    assert (caught.value.status, caught.value.request_id) == (500, "rq1")  # whose head had come


async def test_a_refusal_by_the_gate_and_a_wait_beyond_all_patience(autojump_clock):
    async with client(lambda n: explained(429, n, **{"retry-after": "9" * 40})) as calls:
        for attempts in (1, 0):
            with pytest.raises(RateLimitedError) as caught:
                await calls.orders.get("o")
            assert (caught.value.attempts, caught.value.status) == (attempts, 429)
            assert caught.value.retry_after > 80_000


# --- bodies of a success that cannot be had ------------------------------------------------------

TRUNCATED = gzip.compress(b'{"id": 1}')[:-3]


@pytest.mark.parametrize(
    ("pieces", "headers", "said"),
    [
        ([b'{"id"', httpx.ReadError("reset")], {}, "reset"),
        ([b'{"id"', 1000.0], {}, "did not come|took that long"),
        ([b"no gzip at all"], {"content_encoding": "gzip"}, "not compressed correctly"),
        ([TRUNCATED], {"content_encoding": "gzip"}, "ends before"),
        ([b"?"], {"content_encoding": "br"}, "'br'"),
        ([b"x" * 2000] * 3, {}, "more than 4096 bytes"),
    ],
)
async def test_a_write_that_was_executed_is_never_one_of_unknown_outcome(
    autojump_clock, pieces, headers, said
):
    bodies = []

    def answer(number):
        response = streamed(201, *pieces, **headers)
        bodies.append(response.stream)
        return response

    records = []
    async with client(answer, Connection={"MaxAnswerBytes": 4096}) as calls:
        calls.on_attempt(records.append)
        for _ in range(7):
            with pytest.raises(UnexpectedAnswerError, match=said) as caught:
                await calls.customers.create(email="a@b.example")
            error = caught.value
            assert (error.status, error.request_id, error.attempts) == (201, "rq1", 1)
        assert calls.breaker.state is BreakerState.CLOSED
    assert len(bodies) == 7
    assert all(body.is_closed for body in bodies)
    assert (records[0].status, records[0].request_id) == (201, "rq1")


async def test_a_deadline_in_the_body_of_an_executed_write(autojump_clock):
    async with client(lambda n: streamed(201, 1000.0), TotalTimeoutMs=2000) as calls:
        with pytest.raises(UnexpectedAnswerError, match="total time of 2 s") as caught:
            await calls.request("POST", "/x")
        assert (caught.value.status, caught.value.request_id) == (201, "rq1")


async def test_a_read_with_a_broken_body_is_retried_and_its_error_has_the_status(autojump_clock):
    async with client(lambda n: streamed(200, httpx.ReadError("reset"))) as calls:
        with pytest.raises(ConnectionFailedError, match="reset") as caught:
            await calls.orders.get("o")
    assert (caught.value.status, caught.value.request_id) == (200, "rq1")
    assert caught.value.attempts == 4


@pytest.mark.parametrize(
    "body", [b'{"id": "\xff"}', b"<html>", b'{"id": NaN}', b"[" * 200_000, b""]
)
async def test_a_success_without_json_keeps_all_of_it(autojump_clock, body):
    def answer(number):
        if number == 1:
            return httpx.Response(429)
        return httpx.Response(201, content=body, headers={"request-id": "rq2"})

    async with client(answer) as calls:
        with pytest.raises(UnexpectedAnswerError) as caught:
            await calls.customers.create(email="a@b.example")
    error = caught.value
    assert (error.status, error.request_id, error.attempts) == (201, "rq2", 2)
    assert error.content == body


# --- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepts", [False, True])
async def test_an_error_answer_is_cut_at_a_megabyte(autojump_clock, accepts):
    def answer(number):
        return streamed(422, *[b"x" * 65_536] * 64)

    async with client(answer) as calls:
        if accepts:
            assert (
                len((await calls.request("GET", "/x", accepts_any_status=True)).content) == 4 << 20
            )
            return
        with pytest.raises(errors.UnprocessableEntityError) as caught:
            await calls.request("GET", "/x")
        assert caught.value.body == "x" * (1 << 20)
        assert (caught.value.status, caught.value.request_id) == (422, "rq1")
        assert calls.breaker.state is BreakerState.CLOSED


async def test_an_answer_beyond_the_bound_is_refused_once_and_read_no_further(autojump_clock):
    packer = zlib.compressobj(wbits=31)
    bomb = packer.compress(bytes(64 << 20)) + packer.flush()
    bodies = []

    def answer(number):
        response = streamed(200, bomb, *[bomb] * 2, content_encoding="gzip")
        bodies.append(response.stream)
        return response

    async with client(answer) as calls:
        with pytest.raises(UnexpectedAnswerError, match="33554432 bytes") as caught:
            await calls.orders.get("o")
        assert (caught.value.attempts, caught.value.status) == (1, 200)
        assert bodies[0].is_closed
        larger = await calls.request("GET", "/x", max_answer_bytes=200 << 20)
        assert len(larger.content) == 3 * (64 << 20)
        with pytest.raises(UnexpectedAnswerError, match="1000 bytes"):
            await calls.with_options(max_answer_bytes=1000).orders.get("o")


async def test_bodies_of_an_in_memory_transport_are_bounded_too(autojump_clock):
    async with client(lambda n: httpx.Response(200, content=b"x" * 2000)) as calls:
        with pytest.raises(UnexpectedAnswerError, match="1999 bytes"):
            await calls.request("GET", "/x", max_answer_bytes=1999)
        assert await calls.request("GET", "/x", max_answer_bytes=2000)
        assert await calls.request("GET", "/x", max_answer_bytes=None)


async def test_a_stream_is_bounded_by_choice_and_no_piece_of_it_is_a_bomb(autojump_clock):
    packed = zlib.compress(bytes(64 << 20))

    async with client(lambda n: streamed(200, packed, content_encoding="deflate")) as calls:
        async with calls.stream("GET", "/x") as response:
            sizes = [len(piece) async for piece in response.aiter_bytes()]
        assert sum(sizes) == 64 << 20
        assert max(sizes) < 8 << 20
        async with calls.stream("GET", "/x", max_answer_bytes=1 << 20) as response:
            with pytest.raises(UnexpectedAnswerError, match="1048576 bytes") as caught:
                await response.aread()
        assert (caught.value.status, caught.value.attempts) == (200, 1)


async def test_a_stream_that_breaks_or_lies_ends_with_an_error_of_the_call(autojump_clock):
    for pieces, headers, kind in [
        ([b"x", httpx.ReadError("reset")], {}, ConnectionFailedError),
        ([b"x", 1000.0], {}, AttemptTimeoutError),
        ([b"xxxxxxx"], {"content_encoding": "gzip"}, UnexpectedAnswerError),
        ([TRUNCATED], {"content_encoding": "gzip"}, UnexpectedAnswerError),
    ]:
        async with client(lambda n, p=pieces, h=headers: streamed(200, *p, **h)) as calls:
            async with calls.stream("GET", "/x") as response:
                with pytest.raises(kind) as caught:
                    await response.aread()
            assert (caught.value.status, caught.value.request_id) == (200, "rq1")


# --- time ----------------------------------------------------------------------------------------


async def test_a_call_without_a_deadline_takes_no_longer_than_its_attempts_need(
    autojump_clock,
):
    for status, most in [(429, 144), (503, 144)]:
        async with client(lambda n, s=status: explained(s, n, **{"retry-after": "119"})) as calls:
            started = trio.current_time()
            with pytest.raises(errors.ApiError) as caught:
                await calls.orders.get("o")
            assert trio.current_time() - started <= most
            assert (caught.value.status, caught.value.attempts) == (status, 2)

    async with client(lambda n: streamed(200, 1000.0)) as calls:
        started = trio.current_time()
        with pytest.raises(AttemptTimeoutError) as caught:  # every attempt had its whole time
            await calls.orders.get("o")
        assert caught.value.attempts == 4
        assert 120 <= trio.current_time() - started <= 144


async def test_the_total_time_of_a_call_is_its_own_if_it_has_one(autojump_clock):
    async with client(lambda n: streamed(200, 10_000.0)) as calls:
        for options, seconds in [
            ({"total_timeout": 2}, 2),
            ({"attempt_timeout": 300, "max_retries": 0}, 300),
            ({"attempt_timeout": 300, "max_retries": 0, "total_timeout": None}, 300),
        ]:
            started = trio.current_time()
            with pytest.raises(CallError):
                await calls.request("GET", "/x", **options)
            assert trio.current_time() - started == pytest.approx(seconds)


async def test_a_gateway_of_a_network_of_delivery_is_tried_again(autojump_clock):
    for status in (520, 524, 529, 530):
        async with client(
            lambda n, s=status: explained(s, n) if n == 1 else httpx.Response(200, json={"id": "o"})
        ) as calls:
            assert (await calls.orders.get("o")).id == "o"
            assert calls.counters.attempts_per_call[2] == 1


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"headers": {"X": "a\r\nb"}},
        {"headers": {"X": "\u2713"}},
        {"headers": {"X": "caf\xe9"}},
        {"headers": {"X": " a"}},
        {"headers": {"X": "a\x00"}},
        {"headers": {"X y": "a"}},
        {"headers": {"": "a"}},
        {"headers": {"X": 1}},
        {"headers": {1: "a"}},
        {"headers": [("X", "a")]},
        {"headers": {"Content-Length": "5"}},
        {"headers": {"content-length": None}},
        {"headers": {"Transfer-Encoding": "chunked"}},
        {"headers": {"Connection": "close"}},
        {"headers": {"Host": "evil.example"}},
        {"headers": {"TE": "gzip"}},
        {"idempotency_key": "a\nb"},
        {"idempotency_key": None},
        {"organization_id": "a\rb"},
        {"access_token": "a b"},
        {"max_retries": None},
        {"max_retries": "3"},
        {"max_retries": True},
        {"max_retries": -1},
        {"max_retires": 1},
        {"max_answer_bytes": 0},
        {"attempt_timeout": "5"},
        {"attempt_timeout": float("nan")},
        {"attempt_timeout": None},
        {"total_timeout": 0},
        {"hedge_after": -1},
        {"json": {"x": object}},
        {"json": 1, "content": b""},
        {"content": "text"},
        {"params": {"q": "\ud800"}},
        {"params": {"q": "x" * 70_000}},
    ],
    ids=lambda arguments: str(arguments)[:40],
)
async def test_an_unsendable_call_fails_before_anything_is_sent_or_counted(arguments):
    async with client(lambda n: httpx.Response(200)) as calls:
        with pytest.raises((TypeError, ValueError)) as caught:
            await calls.request("POST", "/x", **arguments)
        assert not isinstance(caught.value, all_errors.SdkError)
        with pytest.raises((TypeError, ValueError)):
            calls.stream("POST", "/x", **arguments)
        assert calls.counters.requests == {}
        assert calls._pipeline._transport.requests == []


@pytest.mark.parametrize("path", ["/a\nb", "/a\x00", "/a\x7f", "/a?b\r\n", "a", "/\ud800", "//a"])
async def test_a_bad_path_is_an_error_of_the_caller(path):
    async with client(lambda n: httpx.Response(200)) as calls:
        with pytest.raises(ValueError, match="the path"):
            await calls.request("GET", path)
        with pytest.raises(ValueError, match="HTTP method"):
            await calls.request("GE T", "/x")


async def test_a_body_that_holds_itself_is_an_error_of_the_caller():
    endless = []
    endless.append(endless)
    async with client(lambda n: httpx.Response(200)) as calls:
        with pytest.raises(ValueError, match="contains itself"):
            await calls.request("POST", "/x", json=endless)


async def test_the_organization_travels_in_its_header(autojump_clock):
    upstream = Upstream(lambda n: httpx.Response(200, json={"id": "o"}))
    async with Client(settings(), upstream) as calls:
        await calls.with_options(organization_id="org_1").orders.get("o")
        await calls.orders.get("o")
    first, second = upstream.requests
    assert first.headers["polar-organization"] == "org_1"
    assert "polar-organization" not in second.headers


# --- copies --------------------------------------------------------------------------------------


def every_error():
    context = {"method": "GET", "path": "/x", "attempts": 2, "request_id": "r", "body": {"a": [1]}}
    special = {
        "ApiError": {"status": 400},
        "ConnectionFailedError": {"kind": FailureKind.NOT_SENT},
        "UnexpectedAnswerError": {"content": b"{", "status": 201},
    }

    def subclasses(kind):
        yield kind
        for each in kind.__subclasses__():
            yield from subclasses(each)

    for kind in subclasses(CallError):
        own = next(
            (special[base.__name__] for base in kind.__mro__ if base.__name__ in special), {}
        )
        yield kind("said", **context | own)


@pytest.mark.parametrize("error", list(every_error()), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
def test_every_error_of_a_call_can_be_copied_and_pickled(error, copied):
    error.add_note("a note")
    other = copied(error)
    assert type(other) is type(error)
    assert (str(other), vars(other)) == (str(error), vars(error))
    assert other.args == error.args
    assert other.outcome == error.outcome


async def test_an_error_of_a_real_call_can_be_pickled_and_holds_no_token(autojump_clock):
    for answer in (
        lambda n: explained(500, n),
        lambda n: httpx.ReadError("gone"),
        lambda n: httpx.Response(200, content=b"<"),
    ):
        async with client(answer) as calls:
            with pytest.raises(CallError) as caught:
                await calls.request("GET", "/x", max_retries=0) and await calls.orders.get("o")
        pickled = pickle.dumps(caught.value)
        assert TOKEN.encode() not in pickled
        assert str(pickle.loads(pickled)) == str(caught.value)


def test_options_are_checked_where_they_are_made():
    with pytest.raises(ValueError, match=r"Content-Length.*remove it"):
        CallOptions(headers={"Content-Length": "1"})
    with pytest.raises(TypeError, match="max_retries is None"):
        CallOptions(max_retries=None)
    assert json.dumps(str(CallOptions(access_token="s3cret"))).find("s3cret") < 0


async def test_a_slowly_parsed_answer_delays_no_other_task():
    """Nesting beyond the stack takes a second for each MiB: the others' turns come meanwhile."""
    # Python 3.14 bounds the nesting by the size of the stack: it reads tens of thousands of levels.
    deep = b"[" * 95_000 + b"]" * 95_000
    content = b'{"deep": [' + b",".join([deep] * 5) + b"]}"
    turns, is_read = 0, False

    async def others():
        nonlocal turns
        while not is_read:
            await trio.lowlevel.checkpoint()
            turns += 1

    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=content))
    async with Client(settings(), transport) as client, trio.open_nursery() as nursery:
        nursery.start_soon(others)
        with trio.fail_after(120):
            order = await client.orders.get("order_1")
        is_read = True
    assert len(order["deep"]) == 5
    assert turns > 20


class Endless(httpx.AsyncByteStream):
    """A body without an end."""

    async def __aiter__(self):
        while True:
            yield b"x"
            await trio.sleep(0.5)


async def hang(_request):
    await trio.sleep_forever()


async def endless(_request):
    return httpx.Response(200, stream=Endless())


@pytest.mark.parametrize("answer", [hang, endless])
@pytest.mark.parametrize("hedge_after", [None, 1.0])
async def test_the_total_time_ends_whatever_is_waited_for(answer, hedge_after, autojump_clock):
    async with Client(settings(), httpx.MockTransport(answer)) as client:
        began = trio.current_time()
        with pytest.raises(DeadlineExceededError, match="the total time of 5 s is over"):
            await client.request("GET", "/a", total_timeout=5.0, hedge_after=hedge_after)
        assert trio.current_time() - began == pytest.approx(5)
        # The caller's own scope is the caller's: nothing is made of it.
        with trio.move_on_after(3) as scope:
            await client.request("GET", "/a", total_timeout=5.0, hedge_after=hedge_after)
        assert scope.cancelled_caught
        assert client.counters.requests["GET", "cancelled"] == 1


async def test_closing_the_client_ends_the_wait_between_two_attempts(autojump_clock):
    upstream = Upstream(lambda _number: httpx.Response(503, headers={"Retry-After": "60"}))
    errors_met = []

    async def call(client):
        with pytest.raises(ConnectionFailedError, match="the client was closed") as caught:
            await client.request("GET", "/a")
        errors_met.append(caught.value)

    async with trio.open_nursery() as nursery:
        async with Client(settings(), upstream) as client:
            nursery.start_soon(call, client)
            await trio.sleep(30)
        began = trio.current_time()
    assert trio.current_time() == began
    assert (errors_met[0].status, errors_met[0].attempts) == (503, 1)
