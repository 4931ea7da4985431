"""The feed of the admin address: gapless, resumable, and safe against its listeners."""

import base64
import json
from functools import partial

import pytest
import trio
from support.admin import TOKEN, administered
from support.deliveries import SECRET
from support.feed import listening
from support.postgres import running_server
from support.serving import RawWire, registry, signed, works
from support.waiting import until
from trio_websocket import ConnectionClosed, ConnectionRejected

from sdk_trio import open_feed
from sdk_trio.admin import feed as feed_module
from sdk_trio.admin import follow as follow_module
from sdk_trio.admin.follow import FeedRefusedError, feed_url
from sdk_trio.base.http import Headers
from sdk_trio.config import KeyDerivation, Secret
from sdk_trio.errors import StoreUnavailableError
from sdk_trio.webhooks.rejections import KEPT, Rejection
from sdk_trio.webhooks.signature import Keyring, parse_signature_header

#: A test value: not that of the receiver.
OTHER_SECRET = "whsec_bm90LXRoZS1zZWNyZXQtb2YtdGhlLXJlY2VpdmVy"


@pytest.fixture(autouse=True)
def token(monkeypatch, tmp_path):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


async def breaks(event):
    raise ValueError("no such product")


STORED = {"Storage__Backend": "Sqlite"}


async def deliver(admin, first, last):
    for number in range(first, last):
        # Answered, and so kept: a listener may hear of it before its handler has ended.
        answer = await admin.app.deliver("order.paid", webhook_id=f"msg_{number}", settle=False)
        assert answer.status == 200


async def test_changes_are_sent_in_order_and_once():
    async with administered(registry(works, enqueue=True)) as admin, listening(admin) as listener:
        await deliver(admin, 0, 30)
        assert await listener.ids(30) == [f"msg_{number}" for number in range(30)]
        message = None
        await deliver(admin, 30, 31)
        message = await listener.next("delivery")
        assert message["seq"] == message["event"]["sequence"] == 31
        assert message["at"] == message["event"]["received_at"]
        assert "raw" not in message["event"]


async def test_a_listener_resumes_behind_what_it_has_seen():
    async with administered(registry(works)) as admin:
        await deliver(admin, 0, 230)
        async with listening(admin, "after=0") as listener:
            assert await listener.ids(3) == ["msg_0", "msg_1", "msg_2"]
        async with listening(admin, "after=3") as listener:
            assert await listener.ids(227) == [f"msg_{number}" for number in range(3, 230)]


async def test_without_a_position_only_later_changes_are_sent():
    async with administered(registry(works)) as admin:
        await deliver(admin, 0, 3)
        async with listening(admin) as listener:
            await deliver(admin, 3, 4)
            assert await listener.ids(1) == ["msg_3"]


async def test_the_store_has_a_name_and_a_position_of_another_store_starts_over():
    async with administered(registry(works), **STORED) as admin:
        await deliver(admin, 0, 3)
        url = admin.runtime.started.admin[0]
        hellos = []
        for given in ({}, {"after": 2}, {"after": 2, "store": "other"}, {"after": 4}):
            async with open_feed(url, token=TOKEN, **given) as feed:
                hellos.append(await anext(feed))
        for hello in hellos:
            assert hello["store"] == hellos[0]["store"] is not None
        reported = [(hello["seq"], hello["replaced"], hello["resumed"]) for hello in hellos]
        assert reported == [
            (3, False, []),
            (2, False, ["delivery"]),
            (0, True, ["delivery"]),
            (0, True, ["delivery"]),
        ]
        query = f"after=1&store={hellos[0]['store']}"
        async with listening(admin, query) as listener:
            assert await listener.ids(2) == ["msg_1", "msg_2"]


async def test_two_hosts_with_simultaneous_first_listeners_give_the_store_one_name(monkeypatch):
    server = running_server()
    dsn = server.fresh()
    import psycopg

    monkeypatch.setenv("SDK_POSTGRES_DSN", dsn)
    reported = []

    async def listen():
        async with open_feed(admin.runtime.started.admin[0], token=TOKEN) as feed:
            reported.append((await anext(feed))["store"])

    waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    async with administered(registry(works), Storage__Backend="Postgres") as admin:
        with psycopg.connect(dsn) as other:
            other.execute("INSERT INTO sdk_trio.checkpoint VALUES ('feed.store', 'by the other')")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                await until(lambda: server.execute(waits))
                other.commit()
    assert reported == ["by the other"]


async def test_a_store_that_takes_no_write_is_followed_without_its_name(monkeypatch):
    async def is_full(*_, **__):
        await trio.lowlevel.checkpoint()
        raise StoreUnavailableError("the disk is full")

    async with administered(registry(works)) as admin:
        await deliver(admin, 0, 1)
        monkeypatch.setattr(admin.runtime.receiver.store, "write_checkpoint", is_full)
        async with open_feed(admin.runtime.started.admin[0], token=TOKEN, after=0) as feed:
            assert (await anext(feed))["store"] is None
            assert (await anext(feed))["event"]["webhook_id"] == "msg_0"


async def test_a_change_of_state_is_sent_after_the_arrival():
    gate = trio.Event()

    async def waits(event):
        await gate.wait()
        raise ValueError("no such product")

    keys = {"Webhooks__Queue__MaxAttempts": 1}
    async with (
        administered(registry(waits, enqueue=True), **keys) as admin,
        listening(admin) as listener,
    ):
        await admin.app.deliver("order.paid", webhook_id="msg_0", settle=False)
        arrived = await listener.next("delivery")
        assert arrived["event"]["state"] in ("received", "running")
        gate.set()
        while (changed := await listener.next("changed"))["event"]["state"] != "dead":
            pass
        assert changed["seq"] == 1
        assert changed["event"]["last_error"] == "ValueError: no such product"
        await admin.replay({"ids": ["msg_0"]})
        while (await listener.next("changed"))["event"]["earlier_attempts"] != 1:
            pass


async def test_a_rejected_request_is_sent_with_its_cause():
    async with administered(registry(works)) as admin, listening(admin) as listener:
        forged = signed("order.paid", secret=OTHER_SECRET, webhook_id="msg_x")
        answer = await admin.app.deliver(forged, settle=False)
        assert answer.status == 400
        rejection = (await listener.next("rejected"))["rejection"]
        reported = {name: rejection[name] for name in ("cause", "status", "webhook_id", "type")}
        assert reported == {
            "cause": "no_match",
            "status": 400,
            "webhook_id": "msg_x",
            "type": "order.paid",
        }
        assert rejection["size"] > 100
        assert rejection["address"] == "127.0.0.1"


async def test_while_nothing_can_be_synced_only_deliveries_wait(monkeypatch):
    async def is_full(*_, **__):
        await trio.lowlevel.checkpoint()
        raise StoreUnavailableError("the disk is full")

    async with administered(registry(works)) as admin, listening(admin) as listener:
        with monkeypatch.context() as broken:
            broken.setattr(admin.runtime.receiver.store, "sync", is_full)
            await admin.app.deliver("order.paid", webhook_id="msg_0")
            forged = signed("order.paid", secret=OTHER_SECRET, webhook_id="msg_x")
            assert (await admin.app.deliver(forged, settle=False)).status == 400
            assert (await listener.next("rejected"))["rejection"]["webhook_id"] == "msg_x"
        assert (await listener.next("delivery"))["event"]["webhook_id"] == "msg_0"


async def test_rejections_that_are_not_kept_are_counted_as_lagged():
    """Changes between two polls that pushed each other out of the ring buffer."""
    async with (
        administered(registry(works)) as admin,
        listening(admin, "kinds=rejected") as listener,
        listening(admin, "kinds=delivery") as other,
    ):
        rejections = admin.runtime.receiver.rejected
        for number in range(1, KEPT + 8):
            rejections.add(Rejection("webhook.refused", "path", 404, f"192.0.2.{number}", None))
        reported = [await listener.next() for _ in range(KEPT + 1)]
        assert (reported[0]["kind"], reported[0]["dropped"]) == ("lagged", 7)
        numbers = [message["rejection"]["seq"] for message in reported[1:]]
        assert numbers == list(range(8, KEPT + 8))
        # A listener with another filter has missed nothing.
        await deliver(admin, 0, 1)
        assert (await other.next())["kind"] == "delivery"


async def test_a_transition_is_sent():
    keys = {"MultiTenant__Enabled": True, "Storage__Backend": "Sqlite"}
    async with administered(registry(works), **keys) as admin:
        tenants = admin.runtime.receiver.tenancy.service
        await tenants.add("before", name="Before")
        await tenants.deactivate("before")
        async with listening(admin, "kinds=tenant") as listener:
            await tenants.add("acme", name="Acme")
            await tenants.deactivate("acme", reason="contract ended")
            reported = (await listener.next("tenant"))["transition"]
        assert (reported["tenant_identifier"], reported["new_status"]) == ("acme", "Deactivated")
        assert reported["reason"] == "contract ended"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("types=order.paid", ["a", "d"]),
        ("types=order.*", ["a", "b", "d"]),
        ("types=refund.*,customer.created", ["c", "e"]),
        ("state=parked", ["b", "c", "e"]),
    ],
)
async def test_a_listener_gets_what_it_has_subscribed_to(query, expected):
    async with administered(registry(works)) as admin:
        types = ["order.paid", "order.created", "refund.created", "order.paid", "customer.created"]
        for name, wire_type in zip("abcde", types, strict=True):
            await admin.app.deliver(wire_type, webhook_id=name)
        async with listening(admin, f"after=0&{query}") as listener:
            assert await listener.ids(len(expected)) == expected
            # The position also advances past events that the filter omits.
            await admin.app.deliver("order.paid", webhook_id="f")
            await admin.app.deliver("order.created", webhook_id="g")
            await admin.app.deliver("customer.created", webhook_id="h")


async def test_relayed_deliveries_verify_byte_for_byte():
    body = b'{ "type":"order.paid","data":{"id":"\\u00e9","n":1.10} }'
    async with administered(registry(works), **STORED) as admin:
        sent = await admin.app.deliver(body, webhook_id="msg_1")
        assert sent.status == 200
        async with listening(admin, "after=0&relay=1") as listener:
            event = (await listener.next("delivery"))["event"]
    assert event["raw"].encode() == body
    headers: Headers = [(name.encode(), value.encode()) for name, value in event["headers"]]
    reported = dict(headers)
    keys = Keyring.from_secrets([Secret(SECRET)], KeyDerivation.STANDARD)
    entries = parse_signature_header(reported[b"webhook-signature"])
    assert keys.match(b"msg_1", reported[b"webhook-timestamp"], body, entries) is not None
    assert int(reported[b"webhook-timestamp"]) == event["timestamp"]


async def test_a_stale_delivery_is_signed_with_a_time_that_its_receiver_takes():
    async with administered(registry(works), **STORED) as admin:
        await admin.app.deliver("order.paid", webhook_id="msg_1")
        console = admin.runtime.administrator.console
        record = await admin.runtime.receiver.store.get("msg_1")
        console._clock = lambda: record.timestamp + 10_000
        headers = dict(await console.sign(record, True))
        assert headers["webhook-timestamp"] == str(record.timestamp + 10_000)
        assert headers["sdk-original-timestamp"] == str(record.timestamp)
        # Signatures stay on this machine, unless the relay is on.
        assert await console.sign(record, False) == []


async def test_a_slow_listener_gets_a_lag_notice_and_misses_no_delivery(monkeypatch):
    monkeypatch.setattr(feed_module, "BUFFERED", 5)
    async with administered(registry(works)) as admin, listening(admin) as listener:
        (inner,) = admin.runtime.administrator._app._feed._listeners
        for number in range(20):
            inner.offer({"kind": "changed", "at": 0.0, "event": {"sequence": 0, "n": number}})
        await deliver(admin, 0, 3)
        lagged = await listener.next("lagged")
        assert lagged["dropped"] == 15
        left = [(await listener.next("changed"))["event"]["n"] for _ in range(5)]
        assert left == [15, 16, 17, 18, 19]
        assert await listener.ids(3) == ["msg_0", "msg_1", "msg_2"]


# -- who may listen ------------------------------------------------------------------------------


def as_protocol(token):
    return "sdk-trio.token." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")


async def test_a_browser_sends_the_token_as_a_subprotocol():
    async with administered(registry(works)) as admin:
        host = admin.runtime.started.admin[0].partition("://")[2]
        protocols = ["sdk-trio.feed", as_protocol(TOKEN)]
        options = {
            "subprotocols": protocols,
            "extra_headers": [
                (b"origin", f"http://{host}".encode()),
                (b"sec-fetch-site", b"same-origin"),
            ],
        }
        async with listening(admin, **options) as listener:
            assert listener.socket.subprotocol == "sdk-trio.feed"


@pytest.mark.parametrize(
    ("status", "options"),
    [
        (401, {"extra_headers": []}),
        (401, {"extra_headers": [(b"authorization", b"Bearer wrong")]}),
        (401, {"extra_headers": [], "subprotocols": ["sdk-trio.feed", as_protocol("wrong")]}),
        (401, {"extra_headers": [], "subprotocols": ["sdk-trio.feed", "sdk-trio.token.***"]}),
        (
            403,
            {
                "extra_headers": [
                    (b"authorization", f"Bearer {TOKEN}".encode()),
                    (b"origin", b"https://evil.example"),
                ]
            },
        ),
        (
            403,
            {
                "extra_headers": [
                    (b"authorization", f"Bearer {TOKEN}".encode()),
                    (b"sec-fetch-site", b"cross-site"),
                ]
            },
        ),
    ],
)
async def test_strangers_do_not_listen(status, options):
    async with administered(registry(works)) as admin:
        with pytest.raises(ConnectionRejected) as refused:
            async with listening(admin, **options):
                pass
        assert refused.value.status_code == status
        assert (await admin.get("/livez")).status_code == 200


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (403, b"Host: evil.example\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"),
        (426, b"Host: localhost\r\n"),
        (426, b"Host: localhost\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n"),
        (426, b"Host: localhost\r\nUpgrade: websocket\r\nConnection: keep-alive\r\n"),
    ],
)
async def test_a_request_that_is_no_upgrade_of_ours_is_answered(status, head):
    async with administered(registry(works)) as admin:
        with await RawWire.connect(admin.runtime.started.admin[0]) as wire:
            await wire.send(
                b"GET /feed HTTP/1.1\r\n"
                + head
                + b"Authorization: Bearer "
                + TOKEN.encode()
                + b"\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            )
            assert (await wire.answer()).status == status


@pytest.mark.parametrize(
    "query", ["after=x", "after=-1", "kinds=all", "state=gone", "relay=2", "types=a&types=b", "x=1"]
)
async def test_a_query_that_is_not_understood_is_refused(query):
    async with administered(registry(works)) as admin:
        with pytest.raises(ConnectionRejected) as refused:
            async with listening(admin, query):
                pass
        assert refused.value.status_code == 400


def frame(opcode, payload, *, masked=True, length=None):
    """A frame of a client; ``length`` is announced in place of the payload's own."""
    size = len(payload) if length is None else length
    mask = 0x80 if masked else 0
    if size < 126:
        head = bytes([0x80 | opcode, mask | size])
    else:
        head = bytes([0x80 | opcode, mask | 127]) + size.to_bytes(8, "big")
    return head + (b"\0\0\0\0" if masked else b"") + payload


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(1, b"\xff\xfe"), 0),
        (frame(1, b"", length=2**40), None),
        (frame(1, b"x" * 70_000), 1009),
        (frame(1, b"hello", masked=False), 0),
        (frame(15, b"x"), 0),
        (frame(1, b"hello"), 1008),
        (frame(9, b"") * 2000, 0),
        (frame(10, b"") * 2000, 0),
    ],
    ids=["utf-8", "endless", "huge", "unmasked", "opcode", "talks", "pings", "pongs"],
)
async def test_a_hostile_listener_is_disconnected_and_no_other_notices(sent, code):
    async with administered(registry(works)) as admin, listening(admin) as other:
        with trio.fail_after(60), await RawWire.connect(admin.runtime.started.admin[0]) as wire:
            await wire.send(
                b"GET /feed HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
                b"Authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
            )
            await wire.rest_of_head()
            await wire.send_what_is_taken(sent)
            if code is not None:
                # The library ends some connections without saying why.
                received = await wire.rest()
                assert not code or code.to_bytes(2, "big") in received
        await deliver(admin, 0, 2)
        assert await other.ids(2) == ["msg_0", "msg_1"]


async def test_a_listener_that_answers_no_ping_is_put_out(monkeypatch):
    monkeypatch.setattr(feed_module, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(feed_module, "PONG_SECONDS", 0.2)
    async with administered(registry(works)) as admin:
        with trio.fail_after(60), await RawWire.connect(admin.runtime.started.admin[0]) as wire:
            await wire.send(
                b"GET /feed HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
                b"Authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
            )
            received = await wire.rest()
        assert b'"heartbeat"' in received


async def test_there_is_a_bound_of_listeners(monkeypatch):
    monkeypatch.setattr(feed_module, "MOST_LISTENERS", 1)
    async with administered(registry(works)) as admin, listening(admin):
        with pytest.raises(ConnectionRejected) as refused:
            async with listening(admin):
                pass
        assert refused.value.status_code == 503


async def test_the_bound_holds_for_listeners_that_come_at_once(monkeypatch):
    monkeypatch.setattr(feed_module, "MOST_LISTENERS", 1)
    entered, refused = [], []
    all_answered = trio.Event()

    async def listen(admin):
        try:
            async with listening(admin) as listener:
                entered.append(listener)
                answered()
                await all_answered.wait()
        except ConnectionRejected as error:
            refused.append(error.status_code)
            answered()

    def answered():
        if len(entered) + len(refused) == 5:
            all_answered.set()

    async with administered(registry(works), **STORED) as admin, trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(listen, admin)
    assert (len(entered), refused) == (1, [503] * 4)


async def test_the_end_of_the_receiver_ends_the_feed():
    async with administered(registry(works)) as admin, listening(admin) as listener:
        admin.runtime.shut_down("the test wants it")
        with pytest.raises(ConnectionClosed):
            await listener.next("never")


# -- the iterator --------------------------------------------------------------------------------


async def test_an_application_follows_the_feed():
    async with administered(registry(works), **STORED) as admin:
        await deliver(admin, 0, 2)
        address = admin.runtime.started.admin[0]
        async with open_feed(address, token=TOKEN, after=1, kinds=["delivery"], body=True) as feed:
            async for message in feed:
                if message["kind"] == "delivery":
                    break
            assert message["event"]["webhook_id"] == "msg_1"
            assert json.loads(message["event"]["raw"])["type"] == "order.paid"
            assert feed.position == 2


async def test_a_connection_that_ends_in_place_of_an_answer_is_noticed_at_once():
    troubles = []

    async def end(stream):
        await stream.receive_some()  # unread, it would make the end a reset
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, end, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        async with open_feed(f"http://127.0.0.1:{port}", token=TOKEN) as feed:
            feed.on_trouble = troubles.append
            await until(lambda: troubles)
        nursery.cancel_scope.cancel()
    assert troubles == ["the connection ended before it was answered"]


async def test_line_separators_within_a_body_do_not_end_a_message():
    name = "L\u2028M\u2029N\u0085O"
    plain = json.loads(signed().body)
    plain["data"]["name"] = name
    # As senders write it that do not escape: U+2028 ends no line of JSON.
    body = json.dumps(plain, ensure_ascii=False).encode()
    async with administered(registry(works), **STORED) as admin:
        assert (await admin.app.deliver(signed(body), settle=False)).status == 200
        address = admin.runtime.started.admin[0]
        async with open_feed(address, token=TOKEN, after=0, kinds=["delivery"], body=True) as feed:
            async for message in feed:
                if message["kind"] == "delivery":
                    break
            assert message["event"]["raw"].encode() == body


async def test_a_wrong_token_ends_the_iterator_with_the_reason_at_once(monkeypatch):
    monkeypatch.setattr(follow_module, "RETRY_BASE_SECONDS", 1e6)
    monkeypatch.setattr(follow_module, "RETRY_CAP_SECONDS", 1e6)
    async with (
        administered(registry(works)) as admin,
        open_feed(admin.runtime.started.admin[0], token="wrong") as feed,
    ):
        with trio.fail_after(60), pytest.raises(FeedRefusedError, match="401"):
            await anext(feed)
    with pytest.raises(FeedRefusedError, match="is not an address"):
        feed_url("localhost:8081")
    with pytest.raises(FeedRefusedError, match="unix:PATH"):
        feed_url("unix:")
    assert feed_url("unix:/run/a?b.sock?mode=0660") == "unix:/run/a?b.sock"


async def test_arrivals_while_a_page_is_read_are_not_skipped():
    async with administered(registry(works)) as admin, listening(admin) as listener:
        feed = admin.runtime.administrator._app._feed
        (inner,) = feed._listeners
        read = feed._next_of

        async def read_late(*arguments):
            page = await read(*arguments)
            if len(page) == 1:
                # The next event arrives, and a poll notices it, before the page is sent.
                feed._next_of = read
                await deliver(admin, 1, 2)
                await feed._poll()
                assert feed._position == 2 > inner.position
            return page

        feed._next_of = read_late
        await deliver(admin, 0, 1)
        assert await listener.ids(2) == ["msg_0", "msg_1"]
