"""The transport on real sockets, HTTP/2 over TLS: streams, cancellation, limits, goodbyes."""

import random
import socket
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.errors
import h2.events
import hpack
import httpx
import pytest
import trio
import trio.testing
from support.upstreams import (
    BODY,
    Authority,
    ConnectionOptions,
    Upstream,
    http1_handler,
    http2_handler,
    serving,
)
from support.waiting import PATIENCE_SECONDS, until

from sdk_trio.net import pool
from sdk_trio.net.http2 import Http2Connection
from sdk_trio.net.socket import BufferedSocket
from sdk_trio.net.transport import Transport

CANCEL = int(h2.errors.ErrorCodes.CANCEL)
AUTHORITY = Authority()


@pytest.fixture(autouse=True)
def _no_races(monkeypatch):
    """Connections are counted here: a machine under load must not make more of them."""
    monkeypatch.setattr(pool, "RACE_SECONDS", 60.0)
    monkeypatch.setattr(pool, "LONGEST_RACE_SECONDS", 60.0)


@asynccontextmanager
async def client_of(upstream, handler=None, protocols=("h2", "http/1.1"), **options):
    """An HTTP/2 server, and a client whose base address is it."""
    context = AUTHORITY.server_context(*protocols)
    async with serving(upstream, handler or http2_handler(upstream), context=context):
        transport = Transport(ConnectionOptions(**options), verify=AUTHORITY.client_context())
        # The storms of these tests take half a minute on a machine with much other work.
        with trio.fail_after(5 * PATIENCE_SECONDS):
            async with httpx.AsyncClient(
                transport=transport, base_url=f"https://localhost:{upstream.port}", timeout=None
            ) as client:
                client.pool = transport
                yield client


async def test_many_requests_share_one_connection():
    upstream = Upstream()
    async with client_of(upstream) as client:
        responses = []

        async def get():
            responses.append(await client.get("/after/0.01"))

        async with trio.open_nursery() as nursery:
            for _ in range(80):
                nursery.start_soon(get)
        assert {(r.http_version, r.status_code, r.content) for r in responses} == {
            ("HTTP/2", 200, BODY)
        }
        assert upstream.connections == 1


async def test_switched_off_it_is_not_offered():
    upstream = Upstream()
    handler = http1_handler(upstream)
    async with client_of(upstream, handler, enable_http2=False) as client:
        assert (await client.get("/")).http_version == "HTTP/1.1"


async def test_a_server_without_it_gets_as_many_connections_as_there_are_requests():
    upstream = Upstream()
    handler = http1_handler(upstream)
    async with client_of(upstream, handler, protocols=["http/1.1"]) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(client.get, "/together/8")
        assert upstream.most_connections == 8


async def test_a_full_connection_is_joined_by_others():
    upstream = Upstream()
    async with client_of(upstream, http2_handler(upstream, max_streams=20)) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(client.get, "/together/100")
        assert upstream.requests == 100
        assert upstream.connections == 5


async def test_a_full_connection_stays_alone_when_more_are_not_wanted():
    upstream = Upstream()
    handler = http2_handler(upstream, max_streams=20)
    async with client_of(upstream, handler, enable_multiple_http2_connections=False) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(client.get, "/after/0.02")
        assert upstream.requests == 100
        assert upstream.connections == 1


async def test_no_more_connections_than_the_cap():
    upstream = Upstream()
    handler = http2_handler(upstream, max_streams=5)
    async with client_of(upstream, handler, max_connections_per_server=2) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(client.get, "/after/0.02")
        assert upstream.requests == 50
        assert upstream.connections == 2


async def test_a_server_that_takes_no_requests_now_is_not_asked_over_more_connections():
    upstream = Upstream()
    async with client_of(upstream, http2_handler(upstream, max_streams=0)) as client:
        with pytest.raises(httpx.PoolTimeout):
            await client.get("/", timeout=httpx.Timeout(None, pool=0.5))
        assert upstream.connections == 1


async def test_connections_that_end_before_their_first_request_are_failed_dials():
    # The settings, then a reset of a stream that never was, which the protocol forbids.
    upstream = Upstream()

    async def break_off(stream):
        server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        server.initiate_connection()
        await stream.send_all(server.data_to_send())
        await stream.send_all(b"\x00\x00\x04\x03\x00\x00\x00\x03\xe9" + bytes(4))
        await stream.receive_some()
        await trio.sleep_forever()

    async with client_of(upstream, break_off) as client:
        for _ in range(5):
            # The reset may come after the request has left; it is never the caller's mistake.
            with pytest.raises((httpx.ConnectError, httpx.RemoteProtocolError)):
                await client.post("/")
        assert upstream.connections <= 5 * 3  # one by one, and not as fast as they can be made


async def test_every_cancelled_stream_is_reset_and_the_next_request_works():
    upstream = Upstream()
    async with client_of(upstream) as client:
        await client.get("/")
        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(client.get, "/hang")
            await until(lambda: upstream.requests == 201)
            nursery.cancel_scope.cancel()
        assert client.pool.statistics.exchanges == 0
        await until(lambda: upstream.resets[CANCEL] == 200)
        assert (await client.get("/")).status_code == 200
        assert upstream.connections == 2  # 100 streams each


async def test_cancelled_uploads_are_reset_while_others_go_on():
    upstream = Upstream()
    answers = []

    async def upload(client):
        response = await client.post("/upload", content=bytes(3_000_000))
        answers.append(response.text)

    async with client_of(upstream) as client, trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(upload, client)
        async with trio.open_nursery() as doomed:
            for _ in range(40):
                doomed.start_soon(lambda: client.post("/upload", content=bytes(3_000_000)))
            for _ in range(10):
                doomed.start_soon(lambda: client.post("/stuck", content=bytes(3_000_000)))
            await until(lambda: upstream.requests == 55)
            doomed.cancel_scope.cancel()
        await until(lambda: upstream.resets[CANCEL] == 50)
        assert (await client.get("/")).status_code == 200
        await until(lambda: len(answers) == 5)
        assert set(answers) == {"3000000"}
        assert upstream.connections == 1


async def test_a_storm_of_cancellations_leaves_nothing_in_use():
    upstream = Upstream()
    dice = random.Random(2)
    async with client_of(upstream) as client:

        async def give_up_soon():
            for _ in range(50):
                with trio.move_on_after(dice.uniform(0, 0.008)):
                    await client.post(
                        f"/after/{dice.uniform(0, 0.008):.4f}",
                        content=bytes(dice.choice([0, 100, 100_000])),
                    )

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(give_up_soon)
        assert client.pool.statistics.exchanges == 0
        assert (await client.get("/")).status_code == 200


async def test_cancelling_everything_at_once_still_resets_the_streams():
    upstream = Upstream()
    async with serving(upstream, http2_handler(upstream), context=AUTHORITY.server_context("h2")):
        with trio.CancelScope() as scope:
            async with (
                Transport(ConnectionOptions(), verify=AUTHORITY.client_context()) as transport,
                httpx.AsyncClient(transport=transport, timeout=None) as client,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(client.get, f"https://localhost:{upstream.port}/hang")
                await until(lambda: upstream.requests == 1)
                scope.cancel()
        with trio.fail_after(60):
            await until(lambda: upstream.open_connections == 0)


async def test_large_bodies_pass_the_windows_both_ways():
    upstream = Upstream()

    async def chunks():
        for _ in range(30):
            yield bytes(100_000)

    async with client_of(upstream) as client:
        assert (await client.post("/upload", content=chunks())).text == "3000000"
        assert len((await client.get("/size/20000000")).content) == 20_000_000
    assert not upstream.resets


async def test_a_reader_that_stalls_does_not_stop_the_others():
    upstream = Upstream()
    async with client_of(upstream) as client:
        async with client.stream("GET", "/size/20000000") as stalled:
            for _ in range(20):
                assert (await client.get("/")).content == BODY
            size = 0
            async for chunk in stalled.aiter_raw():
                size += len(chunk)
            assert size == 20_000_000
        assert upstream.connections == 1


async def test_the_answer_to_head_has_no_body_regardless_of_its_headers():
    async with client_of(Upstream()) as client:
        response = await client.head("/size/1000")
        assert (response.headers["content-length"], response.content) == ("1000", b"")


async def test_headers_that_belong_to_http1_are_left_out():
    async with client_of(Upstream()) as client:
        # h2, as the server, ends the connection at a header that HTTP/2 forbids.
        response = await client.get(
            "/",
            headers={"Connection": "keep-alive", "Transfer-Encoding": "chunked", "X-Mixed": "1"},
        )
        assert response.status_code == 200
        with pytest.raises(httpx.LocalProtocolError, match="x-note"):
            await client.get("/", headers={"x-note": "a\nb"})
        assert (await client.get("/")).status_code == 200


async def test_closing_a_response_early_resets_its_stream():
    upstream = Upstream()
    async with client_of(upstream) as client:
        async with client.stream("GET", "/size/20000000"):
            pass
        await until(lambda: upstream.resets[CANCEL] == 1)
        assert (await client.get("/")).content == BODY
        assert upstream.connections == 1


async def test_a_read_timeout_ends_its_stream_only():
    upstream = Upstream()
    async with client_of(upstream) as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.get, "/after/0.2")
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/hang", timeout=httpx.Timeout(None, read=0.05))
        await until(lambda: upstream.resets[CANCEL] == 1)


async def test_connections_are_replaced_at_their_lifetime_without_losing_a_request():
    upstream = Upstream()
    async with client_of(upstream, pooled_connection_lifetime_minutes=0.1 / 60) as client:
        began = trio.current_time()

        async def get():
            while upstream.connections < 4:
                assert (await client.get("/after/0.01")).status_code == 200

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(get)
        assert trio.current_time() - began >= 0.3
        await until(lambda: upstream.open_connections <= 1)


async def test_an_idle_connection_is_closed_without_another_request():
    upstream = Upstream()
    async with client_of(upstream, pooled_connection_idle_timeout_minutes=0.1 / 60) as client:
        await client.get("/")
        await until(lambda: upstream.open_connections == 0)
        assert client.pool.statistics.connections == 0


async def test_a_graceful_goodbye_loses_no_request():
    # Posts, which are not repeated: each must be answered on its own connection.
    upstream = Upstream()
    async with client_of(upstream, http2_handler(upstream, goaway_after=20)) as client:

        async def post():
            for number in range(20):
                content = b"x" * number
                assert (await client.post("/upload", content=content)).text == str(number)

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(post)
        assert upstream.connections > 5
        assert upstream.requests == 200
        assert client.pool.statistics.exchanges == 0


async def test_a_server_that_closes_fails_all_streams_at_once():
    upstream = Upstream()

    closing = trio.CancelScope()

    async def close_on_request(stream):
        with closing if upstream.connections == 1 else trio.CancelScope():
            await http2_handler(upstream)(stream)

    async with client_of(upstream, close_on_request) as client:
        outcomes = []

        async def get():
            try:
                await client.get("/hang")
            except httpx.TransportError as error:
                outcomes.append(type(error))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(get)
            await until(lambda: upstream.requests == 10)
            closing.cancel()
        assert outcomes == [httpx.ReadError] * 10
        assert client.pool.statistics.connections == 0
        assert (await client.get("/")).status_code == 200


async def test_a_silent_server_is_found_out_by_a_ping(monkeypatch):
    monkeypatch.setattr("sdk_trio.net.pool.SUSPECT_SECONDS", 0.05)
    monkeypatch.setattr("sdk_trio.net.pool.PING_SECONDS", 0.1)
    upstream = Upstream()
    silence, silent = trio.CancelScope(), trio.Event()

    async def fall_silent(stream):
        with silence if upstream.connections == 1 else trio.CancelScope():
            await http2_handler(upstream)(stream)
        silent.set()
        await trio.sleep_forever()

    async with client_of(upstream, fall_silent) as client:
        await client.get("/")
        silence.cancel()
        await silent.wait()
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/", timeout=httpx.Timeout(None, read=0.05))
        await trio.sleep(0.06)  # by then the connection is a suspect
        assert (await client.get("/")).status_code == 200
        assert upstream.connections == 2


def misbehaving(upstream, *pieces):
    """A server whose first connection answers once, and the second request with these bytes."""

    async def handle(stream):
        if upstream.connections > 1:
            await http2_handler(upstream)(stream)
            return
        with trio.CancelScope() as serving_it:

            async def break_off():
                await until(lambda: upstream.requests == 2)
                serving_it.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(break_off)
                await http2_handler(upstream)(stream)
        for piece in pieces:
            await stream.send_all(piece)
            await trio.sleep(0.02)
        await trio.sleep_forever()

    return handle


FIRST_LINE = b"HTTP/1.1 400 Bad"


@pytest.mark.parametrize(
    ("pieces", "size"),
    [
        pytest.param([b"\x01\x00\x00\x00\x00\x00\x00\x00\x01"], 65_536, id="64 KiB"),
        pytest.param([b"\xff\xff\xff"], 16_777_215, id="three bytes"),
        pytest.param([bytes([byte]) for byte in b"\xff\xff\xff\x00"], 16_777_215, id="one by one"),
        pytest.param([FIRST_LINE], 0x485454, id="text"),
        pytest.param([FIRST_LINE + b" Request\r\n\r\n" + b"x" * 900], 0x485454, id="long text"),
    ],
)
async def test_a_frame_announced_as_too_large_fails_the_call_at_once(pieces, size):
    upstream = Upstream()
    async with client_of(upstream, misbehaving(upstream, *pieces)) as client:
        assert (await client.get("/")).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError, match=f"an HTTP/2 frame of {size} bytes"):
            await client.get("/hang")
        for _ in range(3):
            assert (await client.get("/")).status_code == 200
        assert upstream.connections == 2


async def test_text_instead_of_the_settings_frame_is_a_failed_connection_with_the_reason():
    upstream = Upstream()

    async def handle(stream):
        if upstream.connections > 1:
            await http2_handler(upstream)(stream)
        else:
            await stream.send_all(FIRST_LINE)
            await trio.sleep_forever()

    async with client_of(upstream, handle) as client:
        with pytest.raises(httpx.ConnectError, match="it answers as HTTP/1 does"):
            await client.get("/")
        assert (await client.get("/")).status_code == 200


async def test_a_part_of_a_frame_does_not_answer_a_ping(monkeypatch):
    monkeypatch.setattr("sdk_trio.net.http2.PING_SECONDS", 0.1)
    upstream = Upstream()
    # Of a DATA frame of 16 KiB, a byte from time to time: the frame's end never comes.
    trickle = [b"\x00\x40\x00\x00\x00\x00\x00\x00\x03", *[b"x"] * 10_000]
    async with client_of(upstream, misbehaving(upstream, *trickle)) as client:
        assert (await client.get("/")).status_code == 200
        with pytest.raises(httpx.ReadError, match="has been silent"):
            await client.get("/hang")
        assert (await client.get("/")).status_code == 200
        assert upstream.connections == 2


async def test_an_untrusted_certificate_fails_every_waiting_request_at_once():
    upstream = Upstream()
    async with client_of(upstream) as client:
        client.pool._context = Authority().client_context()
        failures = []

        async def post():
            try:
                await client.post("/")
            except httpx.ConnectError as error:
                failures.append(str(error))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(post)
        assert len(failures) == 5
        assert "certificate verify failed" in failures[0]
        assert upstream.connections == 1


def test_canary_of_what_is_overridden_in_h2():
    """A new h2 that no longer has these must be read before it is allowed."""
    connection = h2.connection.H2Connection
    assert callable(connection._receive_goaway_frame)
    assert isinstance(connection.open_outbound_streams, property)
    assert connection()._data_to_send == bytearray()
    assert connection().state_machine.state is h2.connection.ConnectionState.IDLE
    assert connection().incoming_buffer._data == bytearray()
    assert connection().max_inbound_frame_size == 16_384
    assert isinstance(connection().encoder, hpack.Encoder)
    assert hpack.Encoder().table_size_changes == []
    assert hpack.Encoder().header_table.search(b":path", b"/own") == (4, b":path", None)


async def test_of_te_only_trailers_is_sent():
    """Anything else is a protocol error to the server (RFC 9113, 8.2.2)."""
    upstream = Upstream()
    async with client_of(upstream) as client:
        for value in ("gzip", "trailers", "Trailers"):
            response = await client.get("/", headers={"te": value})
            assert response.status_code == 200
    assert upstream.connections == 1


async def test_a_request_that_the_socket_does_not_take_at_once_arrives_whole():
    """The unsent rest of a single request is passed to the writer, with later frames after it."""
    ours, theirs = trio.socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4608)
    wire = BufferedSocket(socket.socket(fileno=ours.detach()))
    headers = [(b"x-%d" % number, b"\xff%d" % number * 400) for number in range(30)]
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    await theirs.send(server.data_to_send())
    arrived = []

    async def serve():
        while data := await theirs.recv(4096):
            for event in server.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    arrived.append(event.headers)
                    server.send_headers(event.stream_id, [(b":status", b"204")], end_stream=True)
            if answer := server.data_to_send():
                await theirs.send(answer)

    request = httpx.Request("GET", "https://localhost/", headers=headers)
    connection = Http2Connection(wire, released=lambda _: None, created=trio.current_time())
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await nursery.start(connection.run)
            for number in (1, 2):
                connection.in_use += 1
                answer = await connection.exchange(request)
                assert await answer.aread() == b""
                assert answer.status_code == 204
                assert [tuple(each) for each in arrived[-1]][4:] == headers
                assert len(arrived) == number
            connection.close()
            nursery.cancel_scope.cancel()
    theirs.close()
