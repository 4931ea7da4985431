"""Every row of the table of answers, over real connections."""

import base64
import json
import time
from functools import partial

import pytest
import trio
import trio.testing
from support.deliveries import SECRET, settings
from support.postgres import on_every_store
from support.serving import (
    RawWire,
    chunked,
    delivery_request,
    exchange,
    registry,
    request,
    serving,
    signed,
    waiting_for_run_of,
    works,
)
from support.waiting import until

from sdk_trio.errors import RetryLater
from sdk_trio.events import OrderPaidEvent, OrderUpdatedEvent
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.testing import running_app, sign_delivery
from sdk_trio.webhooks import HandlerRegistry

OPAQUE = (
    b"HTTP/1.1 400 \r\ncontent-type: application/json\r\ncontent-length: 27",
    b'{"error":"invalid webhook"}',
)


async def nothing_is_kept(app):
    return sum((await app.store.counts()).values()) == 0


# -- before verification -----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/hooks", "/hooks/sdk/", "/hooks/sdk/x", "//hooks/sdk"])
async def test_another_path_is_404(path):
    async with serving() as app:
        answer = await exchange(app, delivery_request(signed(), path=path))
        assert (answer.status, answer.body) == (404, b'{"error":"not found"}')
        assert await nothing_is_kept(app)


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "post"])
async def test_another_method_is_405_and_names_the_one_that_is_allowed(method):
    async with serving() as app:
        # Method names count case, but hypercorn hands all of them on in capitals.
        expected = 200 if method == "post" else 405
        answer = await exchange(app, delivery_request(signed(), method=method))
        assert answer.status == expected
        assert answer.headers.get("allow") == ("POST" if expected == 405 else None)


async def test_head_is_405_without_a_body_and_the_connection_goes_on():
    async with serving() as app:
        with await RawWire.connect(app.url) as wire:
            await wire.send(request(method="HEAD") + delivery_request(signed()))
            head = (await wire.rest_of_head()).split(b"\r\n")
            assert head[0].startswith(b"HTTP/1.1 405")
            assert (await wire.answer()).status == 200


async def test_an_address_that_is_not_allowed_is_403_before_its_body_is_read():
    async with serving(Webhooks__AllowedSourceIpRanges=["192.0.2.0/24"]) as app:
        # A million bytes are promised and none are sent.
        answer = await exchange(app, request(length=1_000_000))
        assert (answer.status, answer.body) == (403, b'{"error":"source address not allowed"}')


async def test_an_allowed_address_delivers():
    async with serving(Webhooks__AllowedSourceIpRanges=["127.0.0.0/8"]) as app:
        assert (await exchange(app, delivery_request(signed()))).status == 200


async def test_over_the_rate_is_429_with_the_seconds_to_wait():
    async with serving(Webhooks__RateLimitPerMinute=3) as app:
        statuses = [(await exchange(app, delivery_request(signed()))).status for _ in range(3)]
        assert statuses == [200] * 3
        answer = await exchange(app, delivery_request(signed(webhook_id="late")))
        assert (answer.status, answer.body) == (429, b'{"error":"rate limit exceeded"}')
        assert 1 <= int(answer.headers["retry-after"]) <= 21
        assert await app.store.get("late") is None


@pytest.mark.parametrize(
    "header",
    [
        ("Content-Type", "text/plain"),
        ("Content-Type", "application/x-www-form-urlencoded"),
        ("Content-Type", "application/jsonx"),
        ("Content-Encoding", "gzip"),
        ("Content-Encoding", "identity, br"),
    ],
    ids=lambda header: header[1],
)
async def test_media_that_is_not_plain_json_is_415(header):
    delivery = signed()
    headers = [pair for pair in delivery.headers.items() if pair[0] != header[0].lower()]
    async with serving() as app:
        answer = await exchange(app, request(delivery.body, [*headers, header]))
        assert (answer.status, answer.body) == (415, b'{"error":"unsupported media type"}')
        assert await nothing_is_kept(app)


@pytest.mark.parametrize(
    "media",
    ["application/json; charset=utf-8", "APPLICATION/JSON", "application/cloudevents+json", None],
)
async def test_json_by_any_of_its_names_is_taken(media):
    delivery = signed()
    headers = [pair for pair in delivery.headers.items() if pair[0] != "content-type"]
    if media:
        headers.append(("Content-Type", media))
    async with serving() as app:
        answer = await exchange(app, request(delivery.body, headers))
        assert answer.status == 200


async def test_a_declared_length_over_the_limit_is_413_before_any_of_it_is_sent():
    async with serving(Webhooks__MaxPayloadBytes=2048) as app:
        answer = await exchange(app, request(length=2049))
        assert (answer.status, answer.body) == (413, b'{"error":"payload too large"}')


async def test_chunks_over_the_limit_are_413_while_they_stream():
    async with serving(Webhooks__MaxPayloadBytes=2048) as app:
        with await RawWire.connect(app.url) as wire:
            await wire.send(request(headers=[("Transfer-Encoding", "chunked")], with_length=False))
            # The body never ends: an answer can only come while it streams.
            await wire.send(b"400\r\n" + b"x" * 1024 + b"\r\n")
            await wire.send(b"401\r\n" + b"x" * 1025 + b"\r\n")
            assert (await wire.answer()).status == 413
            assert await wire.rest() == b""


@pytest.mark.parametrize("size", [2048, 2049])
async def test_the_limit_itself_still_passes(size):
    delivery = signed(b'{"type":"order.paid","x":"%b"}' % (b"x" * (size - 28)))
    assert len(delivery.body) == size
    async with serving(Webhooks__MaxPayloadBytes=2048) as app:
        coding = [*delivery.headers.items(), ("Transfer-Encoding", "chunked")]
        streamed = request(headers=coding, with_length=False) + chunked(delivery.body, 500)
        expected = 200 if size == 2048 else 413
        assert (await exchange(app, delivery_request(delivery))).status == expected
        assert (await exchange(app, streamed)).status == expected


# -- verification -----------------------------------------------------------------------------


def _headers(delivery, **changes):
    """The headers of ``delivery``; None removes one, a list repeats it."""
    headers = dict(delivery.headers) | {
        name.replace("_", "-"): value for name, value in changes.items()
    }
    return [
        (name, text)
        for name, value in headers.items()
        for text in (value if isinstance(value, list) else [value])
        if text is not None
    ]


def _failures():
    """Name, request: one for each way in which a delivery can be wrong."""
    now = int(time.time())
    good = signed(webhook_id="good", timestamp=now)
    signature = good.signature
    other = base64.b64encode(b"other secret of thirty-two bytes").decode()

    def changed(**changes):
        return request(good.body, _headers(good, **changes))

    yield "no headers", request(good.body)
    for name in ("webhook_id", "webhook_timestamp", "webhook_signature"):
        yield f"no {name}", changed(**{name: None})
        yield f"empty {name}", changed(**{name: ""})
    yield "repeated id", changed(webhook_id=["good", "good"])
    yield "repeated timestamp", changed(webhook_timestamp=[str(now)] * 2)
    yield "id with a dot", changed(webhook_id="go.od")
    yield "id of 10 kB", changed(webhook_id="x" * 10_000)
    yield "another id", changed(webhook_id="bad")
    yield "timestamp with a fraction", changed(webhook_timestamp=f"{now}.0")
    yield "timestamp in letters", changed(webhook_timestamp="nan")
    yield "timestamp of 400 digits", changed(webhook_timestamp="1" * 400)
    # The tolerance is 300 s: what is signed ahead must not come within it while others are sent.
    for age in (-600, 302, -(10**9)):
        late = signed(timestamp=max(1, now - age))
        yield f"signed {age} s ago", delivery_request(late)
    yield "changed body", request(good.body.replace(b"paid", b"Paid"), _headers(good))
    yield "empty body", request(b"", _headers(good))
    yield (
        "another secret",
        delivery_request(sign_delivery("order.paid", secret=f"whsec_{other}", timestamp=now)),
    )
    yield "signature without version", changed(webhook_signature=signature.removeprefix("v1,"))
    yield "empty entry", changed(webhook_signature="v1,")
    yield "only v2", changed(webhook_signature=signature.replace("v1,", "v2,"))
    yield "capital version", changed(webhook_signature=signature.replace("v1,", "V1,"))
    yield "not ASCII", changed(webhook_signature=f"\xa0{signature}")
    yield "too many entries", changed(webhook_signature=" ".join(["v1,AAAA"] * 1000))
    for title, body in {
        "no JSON": b"{",
        "array": b"[]",
        "string": b'"order.paid"',
        "null": b"null",
        "nothing": b"",
        "no type": b'{"data":{}}',
        "number as type": b'{"type":1}',
        "null as type": b'{"type":null}',
        "not UTF-8": b'{"type":"order.paid","data":{"id":"\xff"}}',
        "UTF-16": '{"type":"order.paid"}'.encode("utf-16"),
        "no type but an empty one": b'{"type":""}',
        "a long type": b'{"type":"%b"}' % (b"x" * 257),
        "deep": b'{"type":"order.paid","data":' + b"[" * 100_000,
    }.items():
        yield f"signed, but {title}", delivery_request(signed(body, timestamp=now))


async def test_all_failures_of_verification_are_the_same_bytes(caplog):
    answers = {}
    causes = set()
    # One secret as a public test vector, so that the deliveries can be signed beforehand.
    async with serving(registry(works), Webhooks__Secret=SECRET) as app:
        for name, data in _failures():
            caplog.clear()
            answer = await exchange(app, data)
            answers[name] = (answer.head, answer.body)
            causes |= {
                record.sdk[1]["cause"]
                for record in caplog.records
                if getattr(record, "sdk", ("",))[0] == "webhook.rejected"
            }
        assert {name: answer for name, answer in answers.items() if answer != OPAQUE} == {}
        assert await nothing_is_kept(app)
    # The log distinguishes causes that have the same answer.
    assert causes >= {
        "missing_header",
        "repeated_header",
        "bad_id",
        "bad_timestamp",
        "too_old",
        "too_new",
        "bad_signature_header",
        "no_match",
        "not_an_event",
    }


async def test_a_rejected_id_is_not_claimed():
    """An outsider who knows an id cannot keep its delivery from being handled."""
    handled = []

    async def handler(event):
        handled.append(event.webhook_id)

    good = signed(webhook_id="wanted")
    forged = [*dict(good.headers, **{"webhook-signature": "v1,AAAA"}).items()]
    async with serving(registry(handler)) as app:
        assert (await exchange(app, request(good.body, forged))).status == 400
        assert (await exchange(app, delivery_request(good))).status == 200
    assert handled == ["wanted"]


# -- handled ----------------------------------------------------------------------------------


@on_every_store
async def test_an_inline_handler_has_ended_before_the_200(store):
    handled = []

    async def handler(event):
        await trio.sleep(0.01)
        handled.append((event.webhook_id, event.data.customer.email, event.attempt))

    async with serving(registry(handler), **store) as app:
        delivery = signed(data={"customer": {"email": "x@example.com"}}, webhook_id="a")
        answer = await exchange(app, delivery_request(delivery))
        assert handled == [("a", "x@example.com", 1)]
        assert (answer.status, answer.body) == (200, b"{}")
        record = await app.store.get("a")
        assert record.state == DeliveryState.DONE
        # In memory, finished events keep no body.
        in_memory = store.get("Storage__Backend", "Memory") == "Memory"
        assert record.raw == (None if in_memory else delivery.body)


@on_every_store
async def test_a_finished_id_is_200_and_not_run_again(store):
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)

    async with serving(registry(handler), **store) as app:
        for timestamp in (int(time.time()) - 5, int(time.time())):
            delivery = signed(webhook_id="a", timestamp=timestamp)
            answer = await exchange(app, delivery_request(delivery))
            assert (answer.status, answer.body) == (200, b"{}")
        other_body = signed(b'{"type":"order.paid","data":{"id":"z"}}', webhook_id="a")
        assert (await exchange(app, delivery_request(other_body))).status == 200
        assert (await app.store.get("a")).raw != other_body.body
    assert runs == ["a"]


@on_every_store
async def test_an_enqueued_event_is_200_before_its_handler_ends_and_is_in_the_store(store):
    gate = trio.Event()

    async def handler(event):
        await gate.wait()

    async with serving(registry(handler, enqueue=True), **store) as app:
        delivery = signed(webhook_id="a")
        answer = await exchange(app, delivery_request(delivery))
        assert (answer.status, answer.body) == (200, b"{}")
        record = await app.store.get("a")
        assert record.state in (DeliveryState.RECEIVED, DeliveryState.RUNNING)
        assert record.raw == delivery.body
        # The same id while it is queued or running: 200 at once.
        assert (await exchange(app, delivery_request(delivery))).status == 200
        gate.set()
        await app.settle()
        record = await app.store.get("a")
        assert (record.state, record.attempts) == (DeliveryState.DONE, 1)


@pytest.mark.parametrize("event_type", ["order.created", "never.heard_of", "x" * 256])
async def test_a_type_without_handler_is_kept_as_parked(store, event_type, caplog):
    body = json.dumps({"type": event_type, "data": {"id": "s"}}).encode()
    async with serving(registry(works), **store) as app:
        delivery = signed(body, webhook_id="a")
        for _ in range(2):
            assert (await exchange(app, delivery_request(delivery))).status == 200
        record = await app.store.get("a")
        assert (record.state, record.type) == (DeliveryState.PARKED, event_type)
    assert caplog.text.count("webhook.parked") == 1


async def test_a_parked_event_that_is_delivered_again_to_an_inline_handler_runs_once(tmp_path):
    """Its sender was answered 200, so workers run it, and the redelivery does not."""
    runs = []

    async def pays(event):
        runs.append(event.webhook_id)

    on_disk = {"Storage__Backend": "Sqlite", "Storage__Path": str(tmp_path / "data")}
    again = delivery_request(signed("order.paid", webhook_id="a"))
    async with serving(HandlerRegistry(), **on_disk) as app:
        assert (await exchange(app, again)).status == 200
        assert (await app.store.get("a")).state is DeliveryState.PARKED
    async with serving(registry(pays), **on_disk) as app:
        for _ in range(3):
            assert (await exchange(app, again)).status == 200
        await app.settle()
        record = await app.store.get("a")
    assert (record.state, record.attempts, runs) == (DeliveryState.DONE, 1, ["a"])


async def test_a_payload_that_does_not_fit_is_dispatched_all_the_same(store, caplog):
    seen = []

    async def handler(event):
        seen.append(event)

    body = (
        b'{"type":"order.paid","timestamp":"yesterday","data":{"id":"ord_1","due_amount":"much",'
        b'"currency":"eur","new_field":[1]}}'
    )
    async with serving(registry(handler), **store) as app:
        for number in range(2):
            delivery = signed(body, webhook_id=f"m{number}")
            assert (await exchange(app, delivery_request(delivery))).status == 200
        assert app.runtime.receiver.counters.values["drift"] == 2
    event = seen[0]
    assert (event.data.id, event.data.currency, event.raw) == ("ord_1", "eur", body)
    assert event.data.due_amount is None
    assert caplog.text.count("webhook.drifted") == 1


# -- not handled ------------------------------------------------------------------------------


@on_every_store
async def test_a_handler_that_raises_is_an_opaque_500_and_can_be_delivered_again(store):
    attempts = []

    async def handler(event):
        attempts.append(event.attempt)
        if len(attempts) == 1:
            raise RuntimeError("secret detail")

    async with serving(registry(handler), **store) as app:
        answer = await exchange(app, delivery_request(signed(webhook_id="a")))
        assert (answer.status, answer.body) == (500, b'{"error":"webhook handler failed"}')
        assert b"secret" not in answer.head + answer.body
        record = await app.store.get("a")
        assert (record.state, record.last_error) == (
            DeliveryState.RETRYING,
            "RuntimeError: secret detail",
        )
        assert (await exchange(app, delivery_request(signed(webhook_id="a")))).status == 200
        assert (await app.store.get("a")).state is DeliveryState.DONE
    assert attempts == [1, 2]


async def test_retry_later_is_503_with_the_seconds_asked_for(store):
    async def handler(event):
        raise RetryLater(16.2)

    async with serving(registry(handler), **store) as app:
        answer = await exchange(app, delivery_request(signed()))
        assert (answer.status, answer.headers["retry-after"]) == (503, "17")
        assert answer.body == b'{"error":"temporarily unavailable"}'


async def test_a_full_queue_is_503_and_the_event_is_not_in_the_store(store):
    gate = trio.Event()
    started = trio.Event()

    async def handler(event):
        started.set()
        await gate.wait()

    limits = {"Webhooks__Queue__Capacity": 2, "Webhooks__Queue__Workers": 1}
    async with serving(registry(handler, enqueue=True), **store, **limits) as app:
        assert (await exchange(app, delivery_request(signed(webhook_id="m0")))).status == 200
        await started.wait()
        statuses = {}
        for number in range(1, 5):
            answer = await exchange(app, delivery_request(signed(webhook_id=f"m{number}")))
            statuses[f"m{number}"] = answer.status
        assert statuses == {"m1": 200, "m2": 200, "m3": 503, "m4": 503}
        assert int(answer.headers["retry-after"]) >= 1
        for name, status in statuses.items():
            assert ((await app.store.get(name)) is not None) == (status == 200)
        gate.set()
        await app.settle()
        assert (await exchange(app, delivery_request(signed(webhook_id="m4")))).status == 200
        await app.settle()
        assert (await app.store.counts())[DeliveryState.DONE] == 4


@on_every_store
async def test_while_it_drains_the_answer_is_503_and_nothing_is_kept(store):
    gate = trio.Event()
    started = trio.Event()

    async def handler(event):
        started.set()
        await gate.wait()

    async with serving(registry(handler), **store) as app:
        delivery = signed(webhook_id="late")
        data = delivery_request(delivery)
        with await RawWire.connect(app.url) as first, await RawWire.connect(app.url) as second:
            await first.send(delivery_request(signed(webhook_id="early")))
            await started.wait()
            # Its request has begun before the drain, so that its connection stays.
            await second.send(data[:-10])
            await trio.testing.wait_all_tasks_blocked(0.05)
            app.runtime.shut_down("test")
            await trio.testing.wait_all_tasks_blocked(0.05)
            await second.send(data[-10:])
            answer = await second.answer()
            assert (answer.status, answer.body) == (503, b'{"error":"temporarily unavailable"}')
            assert int(answer.headers["retry-after"]) >= 1
            assert await app.store.get("late") is None
            # Requests in progress are finished.
            gate.set()
            assert (await first.answer()).status == 200


async def test_a_client_that_leaves_does_not_stop_its_handler(store):
    gate, started, ended = trio.Event(), trio.Event(), trio.Event()

    async def handler(event):
        started.set()
        await gate.wait()
        ended.set()

    async with serving(registry(handler), **store) as app:
        with await RawWire.connect(app.url) as wire:
            await wire.send(delivery_request(signed(webhook_id="a")))
            await started.wait()
        await trio.testing.wait_all_tasks_blocked(0.05)  # the receiver has seen it leave
        gate.set()
        await ended.wait()
        await app.settle()
        record = await app.store.get("a")
        assert (record.state, record.attempts) == (DeliveryState.DONE, 1)


@pytest.mark.parametrize("cut", [20, 200, -1])
async def test_a_client_that_leaves_before_the_end_of_its_request_leaves_nothing(store, cut):
    async with serving(registry(works), **store) as app:
        with await RawWire.connect(app.url) as wire:
            await wire.send(delivery_request(signed(webhook_id="a"))[:cut])
        with await RawWire.connect(app.url) as wire:
            await wire.send(delivery_request(signed(webhook_id="b"))[:cut])
            await wire.end_of_sending()
            assert (await wire.rest())[:12] in (b"", b"HTTP/1.1 400")
        assert await nothing_is_kept(app)


# -- the store --------------------------------------------------------------------------------


async def test_a_full_disk_is_503_until_there_is_space(tmp_path, caplog):
    async with serving(
        registry(works), Storage__Backend="Sqlite", Storage__Path=str(tmp_path / "data")
    ) as app:
        await app.deliver("order.paid")
        pages = await app.store._commits.submit(lambda tx: tx.connection.pragma("page_count"))
        await app.store._commits.submit(
            lambda tx: tx.connection.pragma("max_page_count", pages + 2)
        )
        big = signed("order.paid", {"metadata": {"filler": "x" * 200_000}}, webhook_id="big")
        parked = signed("order.created", {"metadata": {"filler": "x" * 200_000}}, webhook_id="p")
        for delivery in (big, parked):
            answer = await exchange(app, delivery_request(delivery))
            assert (answer.status, answer.body) == (503, b'{"error":"temporarily unavailable"}')
            assert int(answer.headers["retry-after"]) >= 1
            assert await app.store.get(delivery.webhook_id) is None
        assert "the disk or its quota is full" in caplog.text
        await app.store._commits.submit(lambda tx: tx.connection.pragma("max_page_count", 2**30))
        assert (await exchange(app, delivery_request(big))).status == 200


async def test_an_enqueued_event_is_not_answered_before_it_is_committed(tmp_path):
    import apsw

    async with serving(
        registry(works, enqueue=True),
        Storage__Backend="Sqlite",
        Storage__Path=str(tmp_path / "data"),
    ) as app:
        blocker = apsw.Connection(str(tmp_path / "data" / "inbox.db"))
        blocker.set_busy_timeout(60_000)
        blocker.execute("BEGIN IMMEDIATE")  # no other connection can commit now
        with await RawWire.connect(app.url) as wire:
            await wire.send(delivery_request(signed(webhook_id="a")))
            with trio.move_on_after(0.3) as scope:
                await wire.answer()
            assert scope.cancelled_caught
            blocker.execute("COMMIT")
            blocker.close()
            assert (await wire.answer()).status == 200
        assert await app.store.get("a") is not None


# -- the same id at the same time -------------------------------------------------------------


async def _deliver_fifty(app, delivery, started, gate):
    answers = []

    async def deliver():
        answers.append(await exchange(app, delivery_request(delivery)))

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(deliver)
        await started.wait()
        # One that arrives only after the run has ended would be a redelivery.
        await until(lambda: waiting_for_run_of(app, delivery.webhook_id) >= 49)
        gate.set()
    return answers


@on_every_store
async def test_fifty_deliveries_of_one_id_at_once_run_once(store):
    runs, started, gate = [], trio.Event(), trio.Event()

    async def handler(event):
        runs.append(event.webhook_id)
        started.set()
        await gate.wait()

    async with serving(registry(handler), Webhooks__InlineTimeoutSeconds=60, **store) as app:
        answers = await _deliver_fifty(app, signed(), started, gate)
        assert {(answer.status, answer.body) for answer in answers} == {(200, b"{}")}
    assert len(runs) == 1


@on_every_store
async def test_those_who_wait_for_a_run_that_fails_get_500_and_a_redelivery_runs_again(store):
    runs, started, gate = [], trio.Event(), trio.Event()

    async def handler(event):
        runs.append(event.attempt)
        started.set()
        await gate.wait()
        if len(runs) == 1:
            raise RuntimeError("the first run fails")

    async with serving(registry(handler), Webhooks__InlineTimeoutSeconds=60, **store) as app:
        delivery = signed(webhook_id="a")
        answers = await _deliver_fifty(app, delivery, started, gate)
        assert [answer.status for answer in answers] == [500] * 50
        assert (await exchange(app, delivery_request(delivery))).status == 200
        assert (await app.store.get("a")).state is DeliveryState.DONE
    assert runs == [1, 2]


class UnspeakableError(Exception):
    """Its text cannot be made."""

    def __str__(self):
        raise RuntimeError("no text")


class OddText(str):
    def encode(self, *_):
        raise RuntimeError("no bytes")


class OddTextError(Exception):
    def __str__(self):
        return OddText("odd")


class UnfathomableError(Exception):
    def __getattribute__(self, name):
        if name in ("__notes__", "__cause__"):
            raise RuntimeError(name)
        return super().__getattribute__(name)


class IndivisibleGroup(ExceptionGroup):
    def derive(self, parts):
        raise TypeError("derive")


def nested(depth):
    """The error of a task that has called itself in nurseries, so deep."""
    error = ValueError("at the bottom")
    for _ in range(depth):
        error = ExceptionGroup("nursery", [error])
    return error


@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(lambda: ValueError("file \udcff"), "ValueError", id="not UTF-8"),
        pytest.param(lambda: ValueError("\0"), "ValueError", id="NUL"),
        pytest.param(UnspeakableError, "UnspeakableError", id="no text"),
        pytest.param(OddTextError, "OddTextError: odd", id="a text of its own class"),
        pytest.param(UnfathomableError, "UnfathomableError", id="attributes that raise"),
        pytest.param(
            lambda: IndivisibleGroup("g", [ValueError("a")]), "ValueError: a", id="indivisible"
        ),
        pytest.param(lambda: nested(500), "ValueError: at the bottom", id="500 deep"),
        pytest.param(lambda: nested(3000), "ValueError: at the bottom", id="3000 deep"),
    ],
)
@pytest.mark.parametrize("enqueue", [False, True])
async def test_an_error_whose_text_cannot_be_kept_is_a_failure_like_any_other(
    store, make, name, enqueue
):
    async def handler(event):
        if event.webhook_id == "bad":
            raise make()

    handlers = registry(handler, enqueue=enqueue)
    async with serving(handlers, Webhooks__Queue__MaxAttempts=1, **store) as app:
        delivered = await app.deliver("order.paid", webhook_id="bad")
        assert delivered.status == (200 if enqueue else 500)
        assert delivered.state is (DeliveryState.DEAD if enqueue else DeliveryState.RETRYING)
        assert name in delivered.error
        assert (await app.deliver("order.paid")).state is DeliveryState.DONE


@pytest.mark.parametrize("other", ["order.updated", "order.created"], ids=["enqueued", "parked"])
async def test_another_type_under_the_key_of_an_inline_run_waits_for_that_run(other):
    runs, end = [], trio.Event()

    async def pays(event):
        runs.append(event.type)
        await end.wait()

    async def updates(event):
        runs.append(event.type)

    handlers = HandlerRegistry()
    handlers.register(OrderPaidEvent, pays)
    handlers.register(OrderUpdatedEvent, updates, enqueue=True)
    async with running_app(handlers, settings()) as app, trio.open_nursery() as nursery:
        nursery.start_soon(partial(app.deliver, "order.paid", webhook_id="m1", expect="done"))
        await until(lambda: runs)
        nursery.start_soon(partial(app.deliver, other, webhook_id="m1", expect="done"))
        with trio.move_on_after(0.2):
            await until(lambda: len(runs) > 1)
        end.set()
    assert runs == ["order.paid"]
