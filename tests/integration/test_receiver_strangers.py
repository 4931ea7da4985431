"""The cost that strangers can cause before verification: bodies, connections, lines of the log."""

import gc
import json
import statistics
import time
from functools import partial

import pytest
import trio
import trio.testing
from support.deliveries import settings
from support.serving import (
    RawWire,
    chunked,
    delivery_request,
    exchange,
    registry,
    request,
    serving,
    signed,
    works,
)
from support.waiting import until

from sdk_trio.testing import running_app
from sdk_trio.webhooks import HandlerRegistry, body

MIB = 1024 * 1024


def lines_of(caplog, event):
    """The fields of every line of one event."""
    found = [getattr(record, "sdk", ("", {})) for record in caplog.records]
    return [fields for name, fields in found if name == event]


def forged(content):
    """A delivery that is signed with another secret."""
    return signed(content, secret="whsec_" + "QUJD" * 8)


# -- bodies in flight ----------------------------------------------------------------------------


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "hypercorn"])
async def test_unfinished_bodies_are_bounded_and_small_deliveries_continue(
    fast, caplog, monkeypatch
):
    monkeypatch.setattr(body, "BODY_SECONDS", 60.0)  # none of them is refused for its slowness
    keys = {
        "Server__FastPath": fast,
        "Server__MaxBodyBytesInFlight": 4 * MIB,
        "Server__MaxConnectionsPerAddress": 1000,
    }
    async with serving(registry(works), **keys) as app:
        assert (await exchange(app, delivery_request(signed()))).status == 200
        gc.collect()
        before = resident_bytes()
        wires = []
        try:
            for _ in range(100):
                wire = await RawWire.connect(app.url)
                wires.append(wire)
                await wire.send_what_is_taken(request(b"x" * (MIB - 1), length=MIB))
            # In two parts, as many clients send it: it is in flight, too, and has its place.
            delivery = delivery_request(signed())
            with await RawWire.connect(app.url) as wire:
                await wire.send(delivery[:-5])
                await trio.sleep(0.05)
                await wire.send(delivery[-5:])
                assert (await wire.answer()).status == 200
            refused = []

            async def wait_for_answer(wire):
                refused.append(await wire.answer())

            async with trio.open_nursery() as nursery:
                for wire in wires:
                    nursery.start_soon(wait_for_answer, wire)
                await until(lambda: len(refused) >= 95)
                nursery.cancel_scope.cancel()
            assert {answer.status for answer in refused} == {503}
            assert all("retry-after" in answer.headers for answer in refused)
            assert resident_bytes() - before < 50 * MIB
        finally:
            for wire in wires:
                wire.__exit__()
        assert app.runtime.receiver.counters.values["refused"] >= 95
    crowded = lines_of(caplog, "webhook.refused")
    assert "crowded" in {line["cause"] for line in crowded}


async def test_a_late_piece_of_an_evicted_body_does_not_reduce_the_budget():
    """Else strangers would use the budget up, and one day no body in parts would be taken."""
    bodies = body.Bodies(largest=100, together=100)

    async def read(*sizes, arrives):
        """Read a body whose pieces after the first arrive at one moment with those of others."""
        left = list(sizes)

        async def receive():
            if len(left) < len(sizes):
                await arrives.wait()
            piece = bytes(left.pop(0))
            return {"type": "http.request", "body": piece, "more_body": bool(left)}

        return await bodies.read(receive)

    for _ in range(40):  # who has its turn first is left to chance
        arrives = trio.Event()
        async with trio.open_nursery() as nursery:
            for sizes in ((60, 30, 1), (5, 50, 1)):
                nursery.start_soon(partial(read, *sizes, arrives=arrives))
            await trio.testing.wait_all_tasks_blocked()
            arrives.set()
    assert await read(50, 49, 1, arrives=arrives) == bytes(100)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "hypercorn"])
async def test_a_slow_body_is_logged_with_its_received_size(fast, monkeypatch, caplog):
    monkeypatch.setattr(body, "BODY_SECONDS", 0.3)
    async with serving(registry(works), Server__FastPath=fast) as app:
        with await RawWire.connect(app.url) as wire:
            # All at once: the last of several pieces could be late on a busy machine.
            await wire.send(request(b"xxx", length=1000))
            assert (await wire.answer()).status == 408
        (line,) = lines_of(caplog, "webhook.refused")
        assert (line["cause"], line["received"], line["status"]) == ("slow", 3, 408)


# -- what a body costs before it is verified -----------------------------------------------------


def organization(number):
    return f"00000000-0000-4000-8000-{number:012d}"


def filled(unit):
    """A megabyte of JSON that claims an organization, made of ``unit``."""
    head = b'{"type":"order.paid","x":[' + unit * (MIB // len(unit) - 100) + b'0],"data":{'
    return head + b'"organization_id":"' + organization(1).encode() + b'"}}'


HOSTILE = {
    "numbers of 4299 digits": filled(b"1" * 4299 + b","),
    "numbers of 4300 signs": filled(b"-" * 4300 + b","),
    "empty arrays": filled(b"[],"),
    "open arrays": b'{"type":"t","data":' + b"[" * (MIB - 30),
    "names": filled(b'{"a":"b"},'),
    "quotes": b'{"type":"' + b'"' * (MIB - 20),
    "backslashes": b'{"type":"' + b"\\" * (MIB - 20),
    "half surrogates": filled(b'"\\ud83d",'),
    "claims": filled(b'{"organization_id":"x"},'),
    "no JSON": b"\xff" * (MIB - 10),
}


async def cpu_of(app, data):
    """The median of the CPU seconds that this process spends on a request, and our own with it."""
    spent = []
    for _ in range(5):
        with await RawWire.connect(app.url) as wire:
            before = time.process_time()
            await wire.send_what_is_taken(data)
            assert (await wire.answer()).status == 400
            spent.append(time.process_time() - before)
    return statistics.median(spent)


@pytest.mark.parametrize("tenants", [False, True], ids=["host", "tenants"])
async def test_no_body_of_a_stranger_costs_more_than_a_plain_one(tenants):
    """The factor allows for a busy machine: a regular expression with backtracking took 900."""
    async with serving(registry(works), MultiTenant__Enabled=tenants) as app:
        plain = json.dumps({"type": "order.paid", "data": {"text": "x" * (MIB - 100)}}).encode()
        usual = await cpu_of(app, delivery_request(forged(plain)))
        costs = {
            name: await cpu_of(app, delivery_request(forged(content[: MIB - 1]))) / usual
            for name, content in HOSTILE.items()
        }
    assert {name: cost for name, cost in costs.items() if cost > 8} == {}


async def test_a_body_in_tiny_chunks_is_refused_before_it_costs_much():
    async with serving(registry(works)) as app:
        coding = [("Transfer-Encoding", "chunked")]
        content = json.dumps({"type": "order.paid", "data": {"id": "x" * (MIB - 100)}}).encode()
        headers = [*signed(content).headers.items(), *coding]
        head = request(headers=headers, with_length=False)
        for size, status in ((1, 400), (5, 400), (16, 400), (64, 200)):
            with await RawWire.connect(app.url) as wire:
                await wire.send_what_is_taken(head + chunked(content, size))
                assert (await wire.answer()).status == status
        delivery = signed(json.dumps({"type": "order.paid", "data": {"id": "x" * 9000}}).encode())
        data = request(headers=[*delivery.headers.items(), *coding], with_length=False)
        assert (await exchange(app, data + chunked(delivery.body, 3))).status == 200


@pytest.mark.parametrize("name", ["Forwarded", "X-Forwarded-For", "X-Forwarded-Proto"])
async def test_a_proxy_that_passes_on_a_long_list_vouches_for_nothing(name):
    texts = {"Forwarded": 'for="', "X-Forwarded-For": "1.2.3.4,", "X-Forwarded-Proto": "https,"}
    keys = {"Server__TrustedProxies": ["127.0.0.1"], "Webhooks__RequireHttps": True}
    async with serving(registry(works), **keys) as app:
        good = ("X-Forwarded-Proto", "https")
        assert (await exchange(app, delivery_request(signed(), good))).status == 200
        long = (name, (texts[name] * 1000)[:4000])
        assert (await exchange(app, delivery_request(signed(), good, long))).status == 400


# -- places --------------------------------------------------------------------------------------


async def test_connections_of_one_address_leave_places_for_others():
    async with serving(registry(works), Server__MaxConnectionsPerAddress=5) as app:
        idle = [await RawWire.connect(app.url, "127.0.0.3") for _ in range(5)]
        try:
            with await RawWire.connect(app.url, "127.0.0.3") as wire:
                answer = await wire.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert (await exchange(app, delivery_request(signed()))).status == 200
        finally:
            for wire in idle:
                wire.__exit__()


async def test_connections_of_a_trusted_proxy_are_not_counted():
    keys = {"Server__MaxConnectionsPerAddress": 2, "Server__TrustedProxies": ["127.0.0.1"]}
    async with serving(registry(works), **keys) as app:
        wires = [await RawWire.connect(app.url) for _ in range(4)]
        try:
            for wire in wires:
                await wire.send(delivery_request(signed()))
                assert (await wire.answer()).status == 200
        finally:
            for wire in wires:
                wire.__exit__()


# -- what the log says ---------------------------------------------------------------------------


def refused_requests():
    """name: (request, status, cause, further fields of its line)."""
    typed = [("Content-Type", "text/plain")]
    named = [("webhook-id", "msg_claimed")]
    return {
        "path": (
            request(path="/hooks/sdk2", headers=named),
            404,
            "path",
            {"configured": "/hooks/sdk", "path": "/hooks/sdk2", "webhook_id": "msg_claimed"},
        ),
        "method": (request(method="PUT", headers=named), 405, "method", {"method": "PUT"}),
        "media": (request(headers=typed), 415, "media", {"webhook_id": None}),
        "size": (request(length=10**9), 413, "size", {"declared": 10**9}),
        "forged": (
            delivery_request(forged(b"{}")),
            400,
            "no_match",
            {},
        ),
        "no id": (request(headers=[("webhook-id", "a.b")]), 400, "missing_header", {}),
        "malformed": (b"GET /\r\n\r\n", 400, "malformed", {"webhook_id": None}),
        "version": (b"GET / HTTP/3.0\r\n\r\n", 505, "http_version", {}),
    }


@pytest.mark.parametrize("name", refused_requests())
async def test_every_refusal_is_counted_and_logged_with_its_source(name, caplog):
    data, status, cause, fields = refused_requests()[name]
    async with serving(registry(works)) as app:
        with await RawWire.connect(app.url, "127.0.0.9") as wire:
            await wire.send_what_is_taken(data)
            assert (await wire.answer()).status == status
        (line,) = lines_of(caplog, "webhook.refused") + lines_of(caplog, "webhook.rejected")
        assert (
            line.items()
            >= {
                "cause": cause,
                "status": status,
                "address": "127.0.0.9",
                **fields,
            }.items()
        )
        counted = {
            sample.labels: sample.value
            for sample in app.runtime.receiver.samples()
            if sample.name == "sdk_webhook_refusals_total"
        }
        assert counted[(("cause", cause),)] == 1
        assert sum(counted.values()) == 1


async def test_a_handler_that_fails_leaves_a_line_with_the_senders_address(caplog):
    async def fails(event):
        raise RuntimeError

    async with serving(registry(fails)) as app:
        assert (await exchange(app, delivery_request(signed(webhook_id="m")))).status == 500
    (line,) = lines_of(caplog, "webhook.refused")
    assert (line["cause"], line["webhook_id"], line["address"]) == ("handler", "m", "127.0.0.1")


async def test_a_flood_of_rejections_is_a_handful_of_lines_and_one_that_counts_them(caplog):
    flood = 3000
    async with running_app(HandlerRegistry(), settings()) as app:
        with await RawWire.connect(app.url) as wire:
            for _ in range(30):
                await wire.send(request(headers=[("webhook-id", "m")]) * (flood // 30))
                for _ in range(flood // 30):
                    assert (await wire.answer()).status == 400
        assert app.runtime.receiver.counters.values["rejected"] == flood
    lines = lines_of(caplog, "webhook.rejected")
    sums = lines_of(caplog, "webhook.rejections_suppressed")
    assert len(lines) + len(sums) < 100  # three in ten seconds, and one more
    reported = len(lines) + sum(line.get("suppressed", 0) for line in [*lines, *sums])
    assert reported == flood


async def test_deliveries_that_cannot_be_taken_are_a_handful_of_lines_however_many(caplog):
    gate = trio.Event()

    async def handler(event):
        await gate.wait()

    limits = {"Webhooks__Queue__Capacity": 1, "Webhooks__Queue__Workers": 1}
    began = trio.current_time()
    async with serving(registry(handler, enqueue=True), **limits) as app:
        statuses = [(await exchange(app, delivery_request(signed()))).status for _ in range(40)]
        assert statuses.count(503) >= 37
        app.runtime.receiver.stop_accepting()
        for _ in range(40):
            assert (await exchange(app, delivery_request(signed()))).status == 503
        gate.set()
    most = 3 * (1 + int((trio.current_time() - began) / 10))  # three in ten seconds
    assert 1 <= len(lines_of(caplog, "queue.full")) <= most
    refused = lines_of(caplog, "webhook.refused")
    assert 1 <= len([line for line in refused if line["cause"] == "draining"]) <= most


@pytest.mark.parametrize("enqueue", [False, True])
async def test_each_delivery_is_one_line_with_its_source_when_it_is_answered(caplog, enqueue):
    caplog.set_level("INFO", logger="sdk_trio")
    from_here = {"webhook_id": "m", "type": "order.paid", "address": "127.0.0.1"}
    async with serving(registry(works, enqueue=enqueue)) as app:
        request = delivery_request(signed(webhook_id="m"))
        for _ in range(2):
            await exchange(app, request)
    (handled,) = lines_of(caplog, "webhook.handled")
    assert (handled["handler"], handled["attempt"]) == ("works", 1)
    assert lines_of(caplog, "webhook.received") == ([from_here] if enqueue else [])
    assert enqueue or from_here.items() <= handled.items()
    assert lines_of(caplog, "webhook.duplicate") == [from_here]


async def test_an_event_that_is_parked_is_seen_in_the_log_with_its_source(caplog):
    async with serving(HandlerRegistry()) as app:
        await exchange(app, delivery_request(signed(webhook_id="m")))
    (parked,) = lines_of(caplog, "webhook.parked")
    assert parked["address"] == "127.0.0.1"
    assert not lines_of(caplog, "webhook.received")


# -- hypercorn -----------------------------------------------------------------------------------


async def test_bytes_of_strangers_make_no_error_on_hypercorn_either(caplog):
    """A response that has begun is completed, whatever its client sends meanwhile."""
    bad = b"ZZ\r\n"
    coding = [("Transfer-Encoding", "chunked")]
    head = request(headers=coding, with_length=False, path="/elsewhere")
    async with serving(registry(works), Server__FastPath=False) as app:
        for data in (head + bad, head + b"5\r\nhello\r\n" + bad, request(method="PUT") + b"\0"):
            for pause in (0, 1, 5) * 20:
                with await RawWire.connect(app.url) as wire:
                    await wire.send_what_is_taken(data[: -len(bad)])
                    for _ in range(pause):
                        await trio.lowlevel.checkpoint()
                    await wire.send_what_is_taken(data[-len(bad) :])
                    answer = await wire.answer()
                    assert len(answer.body) == int(answer.headers["content-length"])
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
