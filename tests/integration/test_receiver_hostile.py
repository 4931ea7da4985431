"""HTTP as an attacker writes it: one connection may end, nothing else does."""

import os

import pytest
import trio
import trio.testing
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

from sdk_trio.records.deliveries import DeliveryState


async def still_serves(app):
    """A fresh connection is answered, and has ended when this returns."""
    assert (await exchange(app, delivery_request(signed()))).status == 200
    await trio.testing.wait_all_tasks_blocked(0.02)


def task_count():
    """Return the number of tasks of this run, except those of idle cells, which are reused."""
    count, tasks = 0, [trio.lowlevel.current_root_task()]
    while tasks:
        task = tasks.pop()
        count += not task.name.endswith("Cells._hold")
        for nursery in task.child_nurseries:
            tasks.extend(nursery.child_tasks)
    return count


async def becomes(reading, wanted):
    """Wait until ``reading()`` is at most ``wanted``; fail_after of the test bounds it."""
    with trio.move_on_after(30):
        while reading() > wanted:
            await trio.sleep(0.01)
    assert reading() <= wanted


#: Requests that no client library would send.
MALFORMED = {
    "two content lengths": b"POST /hooks/sdk HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
    b"Content-Length: 4\r\n\r\nabcd",
    "a list of content lengths": b"POST /hooks/sdk HTTP/1.1\r\nHost: x\r\n"
    b"Content-Length: 3, 4\r\n\r\nabcd",
    "negative content length": b"POST /hooks/sdk HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "signed content length": b"POST /hooks/sdk HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\na",
    "content length of 400 digits": b"POST /hooks/sdk HTTP/1.1\r\nHost: x\r\nContent-Length: "
    + b"9" * 400
    + b"\r\n\r\n",
    "two codings": b"POST /hooks/sdk HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a chunk size that is none": b"POST /hooks/sdk HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    "space before the colon": b"POST /hooks/sdk HTTP/1.1\r\nHost: x\r\nContent-Length : 0\r\n\r\n",
    "NUL in a header": b"POST /hooks/sdk HTTP/1.1\r\nHost: x\r\nWebhook-Id: a\0b\r\n\r\n",
    "no host": b"POST /hooks/sdk HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "a header of a megabyte": b"POST /hooks/sdk HTTP/1.1\r\nHost: x\r\nX: "
    + b"a" * 1_000_000
    + b"\r\n\r\n",
    "a million bytes of no request": b"\0" * 1_000_000,
    "TLS to a plain port": bytes.fromhex("16030100a5010000a10303") + os.urandom(160) + b"\r\n\r\n",
    "an HTTP/2 preface and noise": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000,
    "half an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\n",
    "every byte": bytes(range(256)) * 20 + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_bytes_that_are_no_request_are_refused_and_the_connection_closed(name):
    async with serving(registry(works)) as app:
        with await RawWire.connect(app.url) as wire:
            await wire.send_what_is_taken(MALFORMED[name])
            answer = await wire.rest()
        assert answer[:10] == b"HTTP/1.1 4" or answer[:12] in (b"HTTP/1.1 501", b"HTTP/1.1 505")
        assert answer.count(b"HTTP/1.1") == 1
        await still_serves(app)


_UPGRADE = b"GET /hooks/sdk HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n"
_SOCKET = (
    _UPGRADE + b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)

#: Other protocols on the port of the receiver.
UPGRADES = {
    "h2c with broken settings": _UPGRADE + b"Upgrade: h2c\r\nHTTP2-Settings: !!!\r\n\r\n",
    "h2c without settings": _UPGRADE + b"Upgrade: h2c\r\n\r\n" + b"\xff" * 100,
    "a websocket": _SOCKET + b"\r\n",
    "a websocket that speaks at once": _SOCKET + b"\r\n" + b"\xff" * 100,
    "a websocket with a broken extension": _SOCKET
    + b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits=z\r\n\r\n\xff\xff",
    "a websocket of no version": _UPGRADE + b"Upgrade: websocket\r\n\r\n",
}


@pytest.mark.parametrize("name", UPGRADES)
async def test_a_change_to_another_protocol_is_passed_over(name):
    """As RFC 9110, 7.8, allows: the request is answered in HTTP/1.1, the rest is not a request."""
    async with serving(registry(works)) as app:
        await still_serves(app)
        before = task_count()
        with await RawWire.connect(app.url) as wire:
            await wire.send_what_is_taken(UPGRADES[name])
            assert (await wire.answer()).status == 405
        await still_serves(app)
        await becomes(task_count, before)


async def test_a_fault_of_the_server_itself_ends_one_connection(monkeypatch, caplog):
    from sdk_trio.server import hypercorn

    async with serving(registry(works), Server__FastPath=False) as app:
        with monkeypatch.context() as patch, await RawWire.connect(app.url) as wire:
            patch.setattr(hypercorn._Http1, "_create_stream", lambda *_: 1 / 0)
            await wire.send(request())
            assert await wire.rest() == b""
        await still_serves(app)
        assert "server.connection_failed" in caplog.text


async def test_a_client_that_closes_its_side_is_still_answered_and_then_let_go():
    async with serving(registry(works)) as app:
        with await RawWire.connect(app.url) as wire:
            await wire.send(delivery_request(signed()))
            await wire.end_of_sending()
            assert (await wire.answer()).status == 200
            assert await wire.rest() == b""


@pytest.mark.parametrize("farewell", ["reset", "close"])
async def test_a_client_that_vanishes_mid_handler_leaves_no_connection_behind(farewell):
    started, gate = trio.Event(), trio.Event()

    async def handler(event):
        if event.webhook_id == "slow":
            started.set()
            await gate.wait()

    async with serving(registry(handler)) as app:
        await still_serves(app)
        before = task_count()
        with await RawWire.connect(app.url) as wire:
            await wire.send(delivery_request(signed(webhook_id="slow")))
            await started.wait()
            if farewell == "reset":
                wire.reset_at_close()
        await trio.testing.wait_all_tasks_blocked(0.05)  # the receiver has seen it leave
        gate.set()
        await app.settle()
        await becomes(task_count, before)
        assert (await app.store.get("slow")).state is DeliveryState.DONE


async def test_two_lengths_of_one_body_are_refused_and_the_connection_closed():
    """Content-Length beside Transfer-Encoding: a proxy may have seen another body than we do."""
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)

    delivery = signed(webhook_id="hidden")
    headers = [*delivery.headers.items(), ("Transfer-Encoding", "chunked")]
    async with serving(registry(handler)) as app:
        with await RawWire.connect(app.url) as wire:
            first = request(chunked(delivery.body), headers, length=len(delivery.body))
            await wire.send_what_is_taken(first)
            await wire.send_what_is_taken(delivery_request(signed(webhook_id="smuggled")))
            answer = await wire.rest()
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1
        await still_serves(app)
    assert {"hidden", "smuggled"} & set(runs) == set()


async def test_a_length_that_is_too_small_cuts_the_body_and_the_rest_is_no_delivery():
    async with serving(registry(works)) as app:
        with await RawWire.connect(app.url) as wire:
            delivery = signed(webhook_id="a")
            await wire.send(delivery_request(delivery, length=len(delivery.body) - 5))
            assert (await wire.answer()).status == 400
            await wire.send(b"\r\n\r\n")
            assert (await wire.rest())[:12] == b"HTTP/1.1 400"
        assert await app.store.get("a") is None


async def test_the_second_request_after_a_413_is_not_read_out_of_the_first_ones_body():
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)

    async with serving(registry(handler), Webhooks__MaxPayloadBytes=2048) as app:
        inner = delivery_request(signed(b'{"type":"order.paid"}', webhook_id="inner"))
        coding = [("Transfer-Encoding", "chunked")]
        first = request(headers=coding, with_length=False) + chunked(b"x" * 4000 + inner)
        with await RawWire.connect(app.url) as wire:
            await wire.send_what_is_taken(first + inner)
            await wire.end_of_sending()
            answer = await wire.rest()
        assert answer.startswith(b"HTTP/1.1 413")
        # Either it was refused with its connection, or it was read where it really begins.
        assert runs in ([], ["inner"])
        assert answer.count(b"HTTP/1.1") == 1 + len(runs)
        with await RawWire.connect(app.url) as wire:
            await wire.send_what_is_taken(request(length=4096) + inner + inner)
            answer = await wire.rest()
        assert answer.startswith(b"HTTP/1.1 413")
        assert answer.count(b"HTTP/1.1") == 1


async def test_pipelined_deliveries_are_answered_in_their_order():
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)
        if event.webhook_id == "m1":
            raise RuntimeError

    names = [f"m{number}" for number in range(5)]
    async with serving(registry(handler)) as app:
        with await RawWire.connect(app.url) as wire:
            await wire.send(b"".join(delivery_request(signed(webhook_id=name)) for name in names))
            statuses = [(await wire.answer()).status for _ in names]
    assert runs == names
    assert statuses == [200, 500, 200, 200, 200]


async def test_expect_100_continue_is_answered_before_the_body():
    async with serving(registry(works)) as app:
        delivery = signed()
        with await RawWire.connect(app.url) as wire:
            data = delivery_request(delivery, ("Expect", "100-continue"))
            await wire.send(data.removesuffix(delivery.body))
            assert (await wire.rest_of_head()).startswith(b"HTTP/1.1 100")
            await wire.send(delivery.body)
            assert (await wire.answer()).status == 200


async def test_expect_100_continue_with_too_large_a_body_ends_in_413():
    async with serving(registry(works)) as app:
        with await RawWire.connect(app.url) as wire:
            await wire.send(request(headers=[("Expect", "100-continue")], length=10**9))
            answer = await wire.rest()
            assert b"HTTP/1.1 413" in answer


@pytest.mark.parametrize(
    ("path", "status"),
    [("/hooks/sdk", 413), ("/elsewhere", 404), ("/test/webhook/simulate/order.paid", 403)],
)
async def test_a_client_that_streams_on_after_its_refusal_is_cut_off(path, status):
    async with serving(registry(works), Webhooks__MaxPayloadBytes=20_000) as app:
        await still_serves(app)
        before = task_count()
        with await RawWire.connect(app.url) as wire:
            coding = [("Transfer-Encoding", "chunked")]
            await wire.send(request(headers=coding, path=path, with_length=False))
            piece = chunked(b"x" * 65_536, 64).removesuffix(b"0\r\n\r\n")
            with pytest.raises(ConnectionError):
                await wire.send(piece * 200)
            assert (await wire.answer()).status == status
        await becomes(task_count, before)
        await still_serves(app)


async def test_connections_that_have_ended_hold_no_task_and_no_descriptor():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    async with serving(registry(works)) as app:
        await still_serves(app)
        tasks, files = task_count(), descriptors()
        for data in (b"", b"POST ", b"garbage\r\n\r\n", request(length=5), request(method="GET")):
            for _ in range(5):
                with await RawWire.connect(app.url) as wire:
                    await wire.send(data)
                    with trio.move_on_after(0.01):
                        await wire.rest()
        await becomes(task_count, tasks)
        await becomes(descriptors, files)


async def test_repeated_headers_of_any_other_name_change_nothing():
    async with serving(registry(works)) as app:
        noise = [("X-Noise", str(number)) for number in range(50)]
        lookalikes = [("Webhook_Id", "x"), ("svix-id", "y"), ("X-Webhook-Id", "z")]
        answer = await exchange(app, delivery_request(signed(), *noise, *lookalikes))
        assert answer.status == 200


async def test_signatures_in_several_lines_count_together():
    delivery = signed()
    async with serving(registry(works)) as app:
        answer = await exchange(
            app, delivery_request(delivery, ("Webhook-Signature", "v1,AAAA"), ("Via", "1.1 x"))
        )
        assert answer.status == 200


async def test_noise_on_a_connection_never_harms_the_next_one():
    """A thousand small pieces of valid and invalid requests, cut at random places."""
    import random

    chance = random.Random(7)
    parts = [*UPGRADES.values(), *MALFORMED.values(), delivery_request(signed())]
    parts = [part for part in parts if len(part) < 10_000]
    async with serving(registry(works)) as app:
        await still_serves(app)
        before = task_count()
        for _ in range(60):
            one, two = chance.choice(parts), chance.choice(parts)
            data = one[: chance.randrange(len(one))] + two[chance.randrange(len(two)) :]
            with await RawWire.connect(app.url) as wire:
                await wire.send_what_is_taken(data)
                with trio.move_on_after(0.005):
                    await wire.rest()
        await still_serves(app)
        await becomes(task_count, before)
