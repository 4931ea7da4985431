"""The transport on real sockets, HTTP/3, with TCP beside it to fall back to."""

import sys
from contextlib import asynccontextmanager

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
    serving,
    serving_http3,
)
from support.waiting import until

from sdk_trio.errors import OptionsValidationError
from sdk_trio.net import http3_origins
from sdk_trio.net.transport import Transport

aioquic = pytest.importorskip("aioquic")

REQUEST_CANCELLED = 0x10C
AUTHORITY = Authority()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Keep requests from giving up HTTP/3 because this machine is slow."""
    monkeypatch.setattr(http3_origins, "ATTEMPT_SECONDS", 30)
    monkeypatch.setattr("sdk_trio.net.http3.SILENCE_SECONDS", 30)


@asynccontextmanager
async def client_of(port, *, trusts=AUTHORITY, **options):
    transport = Transport(
        ConnectionOptions(enable_http3=True, **options), verify=trusts.client_context()
    )
    with trio.fail_after(60):
        async with httpx.AsyncClient(
            transport=transport, base_url=f"https://localhost:{port}", timeout=None
        ) as client:
            client.pool = transport
            yield client


@asynccontextmanager
async def both(*, trusts=AUTHORITY, **options):
    """A server of HTTP/3 only, and a client of it."""
    upstream = Upstream()
    async with (
        serving_http3(upstream, AUTHORITY),
        client_of(upstream.port, trusts=trusts, **options) as client,
    ):
        yield upstream, client


async def test_four_hundred_concurrent_requests_lose_none():
    async with both() as (upstream, client):  # whose limit is 128 streams
        answers = []

        async def get():
            response = await client.get("/after/0.01")
            answers.append((response.http_version, response.status_code, response.content))

        async with trio.open_nursery() as nursery:
            for _ in range(400):
                nursery.start_soon(get)
        assert answers == [("HTTP/3", 200, BODY)] * 400
        assert upstream.connections == 1
        assert upstream.requests == 400


async def test_a_request_over_the_limit_of_streams_waits_and_may_be_given_up():
    upstream = Upstream()
    async with (
        serving_http3(upstream, AUTHORITY, max_streams=4),
        client_of(upstream.port) as client,
        trio.open_nursery() as nursery,
    ):
        for _ in range(4):
            nursery.start_soon(client.get, "/after/2")
        await until(lambda: upstream.requests == 4)
        left = []
        with trio.move_on_after(0.05):
            await client.post("/", extensions={"sdk_trio.before_send": lambda: left.append(True)})
        assert not left
        assert (await client.get("/")).status_code == 200
        assert upstream.requests == 5


async def test_large_bodies_both_ways():
    async def chunks():
        for _ in range(10):
            yield bytes(100_000)

    async with both() as (_, client):
        assert (await client.post("/upload", content=bytes(1_000_000))).text == "1000000"
        assert (await client.post("/upload", content=chunks())).text == "1000000"
        assert len((await client.get("/size/5000000")).content) == 5_000_000


async def test_a_stalled_reader_holds_little_and_gets_everything():
    async with both() as (_, client), client.stream("GET", "/size/8000000") as response:
        (connection,) = client.pool._http3._connections.values()
        unread, before = 0, -1
        while unread != before or not unread:
            before = unread
            await trio.sleep(0.1)  # more would have arrived by then, if more were taken
            (unread,) = connection._quic.unread.values()
        assert unread < 3_000_000
        size = 0
        async for chunk in response.aiter_raw():
            size += len(chunk)
        assert size == 8_000_000


async def test_every_cancelled_request_is_reset_and_the_next_works():
    async with both() as (upstream, client):
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(client.get, "/hang")
            await until(lambda: upstream.requests == 100)
            nursery.cancel_scope.cancel()
        await until(lambda: upstream.resets[REQUEST_CANCELLED] >= 100)
        assert (await client.get("/")).content == BODY
        assert upstream.connections == 1
        (connection,) = client.pool._http3._connections.values()
        assert connection.in_use == 0


async def test_a_read_timeout():
    async with both() as (_, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/hang", timeout=httpx.Timeout(None, read=0.05))
        assert (await client.get("/")).status_code == 200


async def test_connections_are_replaced_at_their_lifetime():
    async with both(pooled_connection_lifetime_minutes=0.1 / 60) as (upstream, client):
        started = trio.current_time()
        while upstream.connections < 4:
            assert (await client.get("/after/0.01")).http_version == "HTTP/3"
        assert trio.current_time() - started >= 0.3
        await until(lambda: upstream.open_connections <= 1)


async def test_an_idle_connection_is_closed_without_another_request():
    async with both(pooled_connection_idle_timeout_minutes=2 / 60) as (upstream, client):
        await client.get("/")
        await until(lambda: upstream.open_connections == 0)
        assert (await client.get("/")).http_version == "HTTP/3"


@asynccontextmanager
async def silent_udp(port):
    """Something at ``port`` that takes datagrams and never answers, as a firewall does."""
    sock = trio.socket.socket(type=trio.socket.SOCK_DGRAM)
    await sock.bind(("127.0.0.1", port))
    yield
    sock.close()


@asynccontextmanager
async def nothing(_port):
    yield


@pytest.mark.parametrize("udp", [silent_udp, nothing])
async def test_without_it_requests_go_over_tcp_and_the_failure_is_remembered(udp, monkeypatch):
    monkeypatch.setattr(http3_origins, "ATTEMPT_SECONDS", 0.2)
    upstream = Upstream()
    context = AUTHORITY.server_context("http/1.1")
    async with (
        serving(upstream, http1_handler(upstream), context=context),
        udp(upstream.port),
        client_of(upstream.port) as client,
    ):
        assert (await client.post("/upload", content=b"once")).text == "4"
        assert upstream.requests == 1
        # Another attempt over UDP would now take longer than this test may.
        monkeypatch.setattr(http3_origins, "ATTEMPT_SECONDS", 3600)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(client.get, "/")


async def test_a_failure_is_forgotten_after_a_while(monkeypatch):
    monkeypatch.setattr(http3_origins, "FAILURE_SECONDS", 0.0)
    upstream = Upstream()
    context = AUTHORITY.server_context("http/1.1")
    async with (
        serving(upstream, http1_handler(upstream), context=context),
        client_of(upstream.port) as client,
    ):
        assert (await client.get("/")).http_version == "HTTP/1.1"
        over_udp = Upstream()
        over_udp.port = upstream.port
        async with serving_http3(over_udp, AUTHORITY):
            assert (await client.get("/")).http_version == "HTTP/3"


async def test_an_untrusted_certificate_is_refused(monkeypatch):
    monkeypatch.setattr(http3_origins, "ATTEMPT_SECONDS", 0.5)
    async with both(trusts=Authority()) as (upstream, client):
        with pytest.raises(httpx.ConnectError):  # and no server listens at the TCP port
            await client.get("/")
        assert upstream.requests == 0


async def test_a_server_that_vanished_costs_one_request(monkeypatch):
    monkeypatch.setattr("sdk_trio.net.http3.SILENCE_SECONDS", 0.05)
    upstream = Upstream()
    async with serving_http3(upstream, AUTHORITY):
        pass
    async with client_of(upstream.port) as client:
        async with serving_http3(upstream, AUTHORITY):
            assert (await client.get("/")).http_version == "HTTP/3"
        async with serving_http3(upstream, AUTHORITY):  # which knows nothing of the connection
            with pytest.raises(httpx.ReadTimeout):
                await client.get("/", timeout=httpx.Timeout(None, read=0.1))
            assert (await client.get("/")).http_version == "HTTP/3"


def test_without_the_extra_it_names_the_package_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "sdk_trio.net.http3", raising=False)
    monkeypatch.delattr("sdk_trio.net.http3", raising=False)
    monkeypatch.setitem(sys.modules, "aioquic", None)
    monkeypatch.setitem(sys.modules, "aioquic.h3.connection", None)
    with pytest.raises(OptionsValidationError, match=r"Sdk:Connection:EnableHttp3.*\[http3\]"):
        Transport(ConnectionOptions(enable_http3=True))


def test_canary_of_what_is_used_inside_aioquic():
    """A new aioquic that no longer has these must be read before it is allowed."""
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.connection import QuicConnection

    quic = QuicConnection(configuration=QuicConfiguration(is_client=True))
    assert quic._remote_max_streams_bidi == 0
    assert quic._streams == {}
    assert callable(quic._write_stream_limits)
    quic.send_stream_data(quic.get_next_available_stream_id(), b"four")
    assert bytes(quic._streams[0].sender._buffer) == b"four"


async def test_a_connection_that_is_old_when_it_is_made_serves_who_waited_for_it():
    async with both(pooled_connection_lifetime_minutes=1e-9) as (upstream, client):
        for _ in range(3):
            assert (await client.get("/")).http_version == "HTTP/3"
        assert upstream.connections >= 3
