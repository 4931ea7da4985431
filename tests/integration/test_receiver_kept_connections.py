"""Requests on one kept connection are judged as each on a connection of its own.

A check that one request has passed is not repeated for later ones that differ from it only in
values, on the same connection or on another. These tests have every rule that this could skip.
"""

import random
from functools import partial
from urllib.parse import urlsplit

import msgspec
import pytest
import trio
from support.serving import (
    PATH,
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

from sdk_trio.webhooks.signed_request import simulation_mark

OTHER_SECRET = "whsec_" + "QUJD" * 8  # a test value


def plain(*extra, **options):
    """Return a delivery with a new id, as the bytes of a request."""
    return delivery_request(signed(), *extra, **options)


def with_header(name, value):
    """Return a delivery with another value of one header, regardless of the signature."""
    delivery = signed()
    headers = [(n, value if n.lower() == name else v) for n, v in delivery.headers.items()]
    return request(delivery.body, headers)


def repeated(name):
    """Return a delivery that has one header twice."""
    delivery = signed()
    value = {n.lower(): v for n, v in delivery.headers.items()}[name]
    return delivery_request(delivery, (name, value))


def in_chunks():
    delivery = signed()
    coding = ("Transfer-Encoding", "chunked")
    head = request(b"", [*delivery.headers.items(), coding], with_length=False)
    return head + chunked(delivery.body)


#: Requests that differ from each other in as little as possible, and their answers.
REQUESTS = {
    "plain": (plain, 200),
    "another length": (lambda: delivery_request(signed(data={"note": "x" * 500})), 200),
    "forged": (lambda: delivery_request(signed(secret=OTHER_SECRET)), 400),
    "too old": (lambda: delivery_request(signed(timestamp=1)), 400),
    "no id": (lambda: with_header("webhook-id", ""), 400),
    "a dot in the id": (lambda: with_header("webhook-id", "a.b"), 400),
    "no signature": (lambda: with_header("webhook-signature", "v2,x"), 400),
    "two ids": (lambda: repeated("webhook-id"), 400),
    "two signatures": (lambda: repeated("webhook-signature"), 200),
    "another media type": (lambda: with_header("content-type", "text/plain"), 415),
    "an encoded body": (lambda: plain(("Content-Encoding", "gzip")), 415),
    "a named encoding": (lambda: plain(("Content-Encoding", "identity")), 200),
    "another path": (lambda: plain(path="/other"), 404),
    "another method": (lambda: plain(method="PUT"), 405),
    "a query": (lambda: plain(path=f"{PATH}?a=b"), 200),
    "too large": (lambda: delivery_request(signed(data={"note": "x" * 20_000})), 413),
    "in chunks": (in_chunks, 200),
    "too large in chunks": (
        lambda: (
            request(b"", [("Transfer-Encoding", "chunked")], with_length=False)
            + chunked(b"x" * 20_000)
        ),
        413,
    ),
}


@pytest.fixture
def receiver():
    return partial(serving, registry(works), Webhooks__MaxPayloadBytes=16 * 1024)


async def test_each_answer_is_that_of_a_connection_of_its_own(receiver):
    async with receiver() as app:
        for name, (make, status) in REQUESTS.items():
            assert (await exchange(app, make())).status == status, name


@pytest.mark.parametrize("seed", range(4))
async def test_in_any_order_on_one_connection_the_answers_are_the_same(receiver, seed):
    names = list(REQUESTS) * 6
    random.Random(seed).shuffle(names)
    async with receiver() as app:
        wire = await RawWire.connect(app.url)
        for name in names:
            # Each of them is sent once alone, and once after a similar request.
            for _ in range(3):
                make, status = REQUESTS[name]
                await wire.send_what_is_taken(make())
                answer = await wire.answer()
                assert answer.status == status, name
                if answer.headers.get("connection") == "close":
                    wire.__exit__()
                    wire = await RawWire.connect(app.url)
        wire.__exit__()


@pytest.mark.parametrize("seed", range(2))
async def test_in_any_order_on_fresh_connections_the_answers_are_the_same(receiver, seed):
    names = list(REQUESTS) * 3
    random.Random(seed).shuffle(names)
    async with receiver() as app:
        for name in names:
            make, status = REQUESTS[name]
            for _ in range(3):
                assert (await exchange(app, make())).status == status, name


async def test_the_address_of_each_connection_counts(receiver):
    async with receiver(Webhooks__AllowedSourceIpRanges=["127.0.0.1/32"]) as app:
        host, port = urlsplit(app.url).hostname, urlsplit(app.url).port
        for address, status in [("127.0.0.1", 200)] * 4 + [("127.0.0.2", 403), ("127.0.0.1", 200)]:
            stream = await trio.open_tcp_stream(host, port, local_address=address)
            with RawWire(stream) as wire:
                await wire.send(plain())
                assert (await wire.answer()).status == status


async def test_senders_behind_one_proxy_are_distinguished(receiver):
    keys = {
        "Server__TrustedProxies": ["127.0.0.1"],
        "Webhooks__AllowedSourceIpRanges": ["10.1.0.0/16"],
    }
    async with receiver(**keys) as app:
        with await RawWire.connect(app.url) as wire:
            for address, status in [
                ("10.1.0.1", 200),
                ("10.1.0.2", 200),
                ("10.1.0.3", 200),
                ("10.2.0.1", 403),
            ] * 3:
                await wire.send(plain(("X-Forwarded-For", address)))
                assert (await wire.answer()).status == status, address
                if status == 403:
                    break


async def test_https_is_asked_of_each_request_behind_a_proxy(receiver):
    keys = {"Server__TrustedProxies": ["127.0.0.1"], "Webhooks__RequireHttps": True}
    async with receiver(**keys) as app:
        with await RawWire.connect(app.url) as wire:
            for scheme, status in [("https", 200), ("https", 200), ("https", 200), ("http", 400)]:
                await wire.send(plain(("X-Forwarded-Proto", scheme)))
                assert (await wire.answer()).status == status


async def test_the_rate_counts_the_requests_of_a_kept_connection(receiver):
    async with receiver(Webhooks__RateLimitPerMinute=5) as app:
        with await RawWire.connect(app.url) as wire:
            statuses = []
            for _ in range(8):
                await wire.send(plain())
                statuses.append((await wire.answer()).status)
    assert statuses == [200] * 5 + [429] * 3


async def test_new_rules_count_for_the_next_request_of_a_kept_connection(receiver):
    async with receiver() as app:
        with await RawWire.connect(app.url) as wire:
            for _ in range(3):
                await wire.send(plain())
                assert (await wire.answer()).status == 200
            webhooks = msgspec.structs.replace(
                app.settings.webhooks, allowed_source_ip_ranges=("192.0.2.0/24",)
            )
            app.runtime.reload(msgspec.structs.replace(app.settings, webhooks=webhooks))
            await wire.send(plain())
            assert (await wire.answer()).status == 403


async def test_a_refusal_is_logged_and_counted_alike(receiver, caplog):
    async with receiver() as app:
        with await RawWire.connect(app.url) as wire:
            for _ in range(3):
                await wire.send(plain())
                assert (await wire.answer()).status == 200
            forged = signed(secret=OTHER_SECRET, webhook_id="msg_forged")
            await wire.send(delivery_request(forged))
            assert (await wire.answer()).status == 400
            counted = app.runtime.receiver.counters.values["rejected"]
    (fields,) = [
        record.sdk[1]
        for record in caplog.records
        if getattr(record, "sdk", ("",))[0] == "webhook.rejected"
    ]
    assert counted == 1
    assert fields["webhook_id"] == "msg_forged"
    assert fields["address"] == "127.0.0.1"
    assert fields["cause"] == "no_match"


async def test_a_wrong_mark_of_the_simulator_says_nothing_about_the_next_one(receiver):
    async with receiver(Webhooks__RequireHttps=True) as app:
        mark = simulation_mark(app.settings).decode()
        with await RawWire.connect(app.url) as wire:
            for sent in ["x", "y", mark, "x", "y", mark, mark, "x"]:
                await wire.send(plain(("sdk-simulated", sent)))
                assert (await wire.answer()).status == (200 if sent == mark else 400)
