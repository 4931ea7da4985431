"""The receiver as an ASGI callable, in process: any input has an answer, and time is virtual."""

import json
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.deliveries import memory_inbox, settings
from support.serving import asgi_headers, ask, registry, signed, works

from sdk_trio.errors import NotRunningError, StoreUnavailableError
from sdk_trio.events import OrderCreatedEvent
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.webhooks import WebhookReceiver
from sdk_trio.webhooks.body import BODY_SECONDS


@asynccontextmanager
async def running(handlers, inbox=None, **keys):
    receiver = WebhookReceiver(settings(**keys), handlers, inbox=inbox)
    async with trio.open_nursery() as nursery:
        await nursery.start(receiver.run)
        yield receiver
        nursery.cancel_scope.cancel()


def run_virtually(main, *arguments):
    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(main, *arguments, clock=clock)


# -- any input --------------------------------------------------------------------------------

_NAMES = st.one_of(
    st.sampled_from(
        [
            b"webhook-id",
            b"webhook-timestamp",
            b"webhook-signature",
            b"Webhook-Id",
            b"content-type",
            b"content-length",
            b"content-encoding",
            b"transfer-encoding",
            b"x-forwarded-for",
            b"x-forwarded-proto",
            b"forwarded",
            b"",
        ]
    ),
    st.binary(max_size=20),
)
_VALUES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
            b"1614265330",
            b"https, http",
            b'for="[::1]:80";proto=https',
            b"application/json",
            b"99999999999999999999",
            b"-1",
            b"\xff" * 9000,
        ]
    ),
)
_HEADERS = st.lists(st.tuples(_NAMES, _VALUES), max_size=8)
_CLIENTS = st.one_of(
    st.none(),
    st.tuples(
        st.sampled_from(["127.0.0.1", "::1", "fe80::1%eth0", "::ffff:192.0.2.1", "", "no address"]),
        st.integers(0, 65535),
    ),
)


@given(
    body=st.one_of(st.binary(max_size=200), st.lists(st.binary(max_size=2000), max_size=4)),
    headers=_HEADERS,
    method=st.one_of(st.sampled_from(["POST", "GET", "HEAD", ""]), st.text(max_size=10)),
    path=st.one_of(st.just("/hooks/sdk"), st.text(max_size=20)),
    scheme=st.sampled_from(["http", "https", ""]),
    client=_CLIENTS,
    ending=st.sampled_from(["complete", "disconnect", "silence"]),
    keys=st.fixed_dictionaries(
        {},
        optional={
            "Webhooks__RequireHttps": st.booleans(),
            "Webhooks__AllowedSourceIpRanges": st.just(["127.0.0.0/8", "::1/128"]),
            "Server__TrustedProxies": st.just(["127.0.0.1", "::1", "unix"]),
            "Webhooks__RateLimitPerMinute": st.just(1),
            "Webhooks__MaxPayloadBytes": st.just(1024),
        },
    ),
)
@hypothesis_settings(max_examples=150)
def test_any_request_has_an_answer_and_none_is_a_5xx(
    body, headers, method, path, scheme, client, ending, keys
):
    async def main():
        async with running(registry(works), **keys) as receiver:
            answer = await ask(
                receiver,
                body,
                headers,
                method=method,
                path=path,
                scheme=scheme,
                client=client,
                ending=ending,
            )
            kept = sum((await receiver.store.counts()).values())
        return answer, kept

    answer, kept = run_virtually(main)
    assert kept == 0
    if answer is None:
        assert ending == "disconnect"
        return
    assert answer.status in {400, 403, 404, 405, 408, 413, 415}
    assert dict(answer.headers)[b"content-length"] == str(len(answer.body)).encode()
    assert json.loads(answer.body).keys() == {"error"}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=12,
)
_EVENTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["order.paid", "order.created", "x"]) | _JSON},
    optional={"data": _JSON, "timestamp": _JSON},
)


@given(body=st.one_of(st.binary(max_size=100), _EVENTS, _JSON), enqueue=st.booleans())
@example(body=b'{"type":"order.paid","data":' + b"[" * 100_000, enqueue=False)
@example(body=b'{"type":"order.paid","data":{"id":"\\ud800"}}', enqueue=True)
@example(body=b'{"type":"order.\\u0000paid","data":{"id":"\\u0000"}}', enqueue=True)
@example(body=b'{"type":"order.paid","type":"x"}', enqueue=False)
@example(body=b'{"type":"order.paid","data":{"amount":1e999}}', enqueue=False)
@hypothesis_settings(max_examples=150)
def test_any_signed_body_is_handled_kept_or_rejected(body, enqueue):
    if not isinstance(body, bytes):
        body = json.dumps(body).encode("utf-8", "surrogatepass")
    delivery = signed(body, webhook_id="a")

    async def main():
        async with running(registry(works, enqueue=enqueue)) as receiver:
            answer = await ask(receiver, body, asgi_headers(delivery))
            await trio.sleep(1)
            return answer, await receiver.store.get("a")

    answer, record = run_virtually(main)
    if answer.status == 400:
        assert (answer.body, record) == (b'{"error":"invalid webhook"}', None)
    else:
        assert (answer.status, answer.body) == (200, b"{}")
        assert record.state in (DeliveryState.DONE, DeliveryState.PARKED)
        assert record.raw == (None if record.state is DeliveryState.DONE else body)


# -- time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[], [b"{"], [b"{"] * 20])
async def test_a_body_that_does_not_end_is_408_after_ten_seconds(pieces, autojump_clock):
    async with running(registry(works)) as receiver:
        before = trio.current_time()
        answer = await ask(receiver, pieces, asgi_headers(signed()), ending="silence")
        assert trio.current_time() - before == pytest.approx(BODY_SECONDS)
    assert BODY_SECONDS == 10
    assert (answer.status, answer.body) == (408, b'{"error":"request too slow"}')


async def test_a_body_that_trickles_is_408_however_steady_it_is(autojump_clock):
    """The deadline is for the whole body: a byte now and then does not prolong it."""

    async def receive():
        await trio.sleep(1)
        return {"type": "http.request", "body": b"x", "more_body": True}

    sent = []

    async def send(message):
        await trio.lowlevel.checkpoint()
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/hooks/sdk",
        "scheme": "http",
        "headers": [],
        "client": ("127.0.0.1", 1),
    }
    async with running(registry(works)) as receiver:
        before = trio.current_time()
        await receiver(scope, receive, send)
        assert trio.current_time() - before == pytest.approx(10)
    assert sent[0]["status"] == 408


async def test_a_server_with_a_small_buffer_gets_rid_of_the_rest_of_a_refused_body(autojump_clock):
    """As hypercorn: the end of an answer goes through the channel that the body still fills."""
    to_application, from_server = trio.open_memory_channel(3)
    statuses = []

    async def read_socket():
        for _ in range(10):
            piece = {"type": "http.request", "body": b"x" * 600, "more_body": True}
            await to_application.send(piece)

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
            await trio.sleep(1)  # meanwhile the socket is read on
        else:
            await to_application.send({"type": "http.disconnect"})

    scope = {"method": "POST", "scheme": "http", "headers": [], "client": None, "type": "http"}
    for path, status in (("/elsewhere", 404), ("/hooks/sdk", 413)):
        receiver = WebhookReceiver(settings(Webhooks__MaxPayloadBytes=1024), registry(works))
        with trio.fail_after(60):
            async with trio.open_nursery() as connection:
                connection.start_soon(read_socket)
                await receiver({**scope, "path": path}, from_server.receive, send)
        assert statuses.pop() == status
    to_application.close()
    from_server.close()


# -- the store --------------------------------------------------------------------------------


async def test_nothing_is_answered_200_before_the_store_has_it(autojump_clock):
    inbox = memory_inbox()
    committed = trio.Event()

    def gated(method):
        async def call(*arguments, **keywords):
            await committed.wait()
            return await method(*arguments, **keywords)

        return call

    for name in ("accept", "park", "finish"):
        setattr(inbox, name, gated(getattr(inbox, name)))
    handlers = registry(works)
    handlers.register(OrderCreatedEvent, works, enqueue=True)
    answers = []

    async def deliver(event_type):
        delivery = signed(event_type)
        answers.append(await ask(receiver, delivery.body, asgi_headers(delivery)))

    async with running(handlers, inbox) as receiver, trio.open_nursery() as nursery:
        for event_type in ("order.paid", "order.created", "order.refunded"):
            nursery.start_soon(deliver, event_type)
        await trio.sleep(60)
        assert answers == []
        committed.set()
    assert [answer.status for answer in answers] == [200] * 3


@pytest.mark.parametrize(
    ("method", "event_type"),
    [("claim", "order.paid"), ("accept", "order.created"), ("park", "order.refunded")],
)
async def test_a_store_that_fails_is_503_with_retry_after(method, event_type, autojump_clock):
    inbox = memory_inbox()
    real = getattr(inbox, method)

    async def fail(*arguments, **keywords):
        await trio.lowlevel.checkpoint()
        raise StoreUnavailableError("the disk is full")

    handlers = registry(works)
    handlers.register(OrderCreatedEvent, works, enqueue=True)
    delivery = signed(event_type, webhook_id="a")
    async with running(handlers, inbox) as receiver:
        setattr(inbox, method, fail)
        answer = await ask(receiver, delivery.body, asgi_headers(delivery))
        assert (answer.status, answer.body) == (503, b'{"error":"temporarily unavailable"}')
        assert int(dict(answer.headers)[b"retry-after"]) >= 1
        assert await inbox.get("a") is None
        setattr(inbox, method, real)
        answer = await ask(receiver, delivery.body, asgi_headers(delivery))
        assert answer.status == 200


async def test_the_outcome_that_could_not_be_kept_is_503_and_the_next_try_is_200(autojump_clock):
    inbox = memory_inbox()
    real, failures = inbox.finish, [1]

    async def finish(*arguments, **keywords):
        if failures:
            failures.pop()
            raise StoreUnavailableError("the disk is full")
        await real(*arguments, **keywords)

    inbox.finish = finish
    delivery = signed(webhook_id="a")
    statuses = []
    async with running(registry(works), inbox) as receiver:
        for _ in range(2):
            answer = await ask(receiver, delivery.body, asgi_headers(delivery))
            statuses.append(answer.status)
        record = await inbox.get("a")
    assert (statuses, record.state) == ([503, 200], DeliveryState.DONE)


# -- not running ------------------------------------------------------------------------------


async def test_before_its_start_and_after_its_end_deliveries_are_503(autojump_clock):
    receiver = WebhookReceiver(settings(), registry(works))
    delivery = signed()

    async def status():
        answer = await ask(receiver, delivery.body, asgi_headers(delivery))
        return answer.status, b"retry-after" in dict(answer.headers)

    assert not receiver.ready
    assert await status() == (503, True)
    async with trio.open_nursery() as nursery:
        await nursery.start(receiver.run)
        assert receiver.ready
        assert (await status())[0] == 200
        await receiver.drain()
        assert not receiver.ready
    assert await status() == (503, True)
    # An unauthentic sender learns nothing about the state.
    assert (await ask(receiver, b"{}")).status == 400
    with pytest.raises(NotRunningError):
        _ = receiver.store


async def test_it_serves_only_http():
    receiver = WebhookReceiver(settings(), registry(works))
    with pytest.raises(NotRunningError, match="websocket"):
        await receiver({"type": "websocket"}, None, None)


async def test_a_server_may_declare_that_it_has_no_extensions(autojump_clock):
    async with running(registry(works)) as receiver:

        async def without(scope, receive, send):
            await receiver({**scope, "extensions": None}, receive, send)

        delivery = signed(webhook_id="a")
        answer = await ask(without, delivery.body, asgi_headers(delivery))
        assert answer.status == 200
