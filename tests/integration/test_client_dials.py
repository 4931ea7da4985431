"""Dials that hang, fail or are late: they are raced, bounded, and counted once each."""

import contextlib
import functools
import socket
import struct

import httpx
import pytest
import trio
import trio.testing
from support.network_events import TASKS, fronted, settings_of
from support.upstreams import (
    Authority,
    ConnectionOptions,
    Upstream,
    http1_handler,
    http2_handler,
    serving,
)
from support.waiting import PATIENCE_SECONDS, until

from sdk_trio.base.breaker import BreakerState
from sdk_trio.client.client import Client
from sdk_trio.client.errors import (
    AttemptTimeoutError,
    CallError,
    CircuitOpenError,
    ConnectionFailedError,
    FailureKind,
)
from sdk_trio.client.layers import AttemptKind
from sdk_trio.config.options.client import ResilienceOptions
from sdk_trio.net import http2, pool
from sdk_trio.net.transport import Transport

AUTHORITY = Authority()
PATIENT = ResilienceOptions(circuit_breaker_failure_threshold=1000)


@contextlib.contextmanager
def dropping():
    """A port of loopback where every SYN is lost: a listener whose queue is full."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(3):
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield port


@pytest.fixture
def lost():
    with dropping() as port:
        yield port


@pytest.fixture
def refusing():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield unused.getsockname()[1]


def dialling(*ports):
    """A dial that goes to each of ``ports`` in turn, and to the last one from then on."""
    left = list(ports)

    async def dial(host, port):
        chosen = left.pop(0) if len(left) > 1 else left[0]
        return await trio.open_tcp_stream("127.0.0.1", chosen or port)

    return dial


@contextlib.asynccontextmanager
async def upstream_of(protocol, **options):
    upstream = Upstream()
    handler = http2_handler(upstream) if protocol == "h2" else http1_handler(upstream)
    context = AUTHORITY.server_context("h2" if protocol == "h2" else "http/1.1")
    with trio.fail_after(PATIENCE_SECONDS):
        async with serving(upstream, handler, context=context):
            yield upstream


@contextlib.asynccontextmanager
async def client_of(port, protocol="h2", *, dial=None, connections=100, **fields):
    settings = settings_of(port, protocol, **fields)
    limits = ConnectionOptions(
        enable_http2=protocol == "h2", max_connections_per_server=connections
    )
    dials = {} if dial is None else {"dial": dial}
    transport = Transport(limits, verify=AUTHORITY.client_context(), **dials)
    with trio.fail_after(PATIENCE_SECONDS):
        async with Client(settings, transport) as client:
            client.transport = transport
            yield client


async def fail_for_good(client, path):
    """Call until another error comes than that of an attempt's time."""
    while True:
        with contextlib.suppress(AttemptTimeoutError):
            await client.request("GET", path, attempt_timeout=0.3, max_retries=0)


@pytest.mark.parametrize("protocol", ["h1", "h2"])
async def test_a_lost_syn_is_followed_by_another_dial(protocol, lost):
    async with (
        upstream_of(protocol) as upstream,
        client_of(upstream.port, protocol, dial=dialling(lost, None)) as client,
    ):
        await client.request("GET", "/")
        assert client.counters.attempts[AttemptKind.RETRY] == 0
        # The race is over: what still hangs is given up, and holds no slot.
        assert client.transport.statistics.connecting == 0


@pytest.mark.parametrize("protocol", ["h1", "h2"])
async def test_a_hanging_handshake_is_followed_by_another_dial(protocol):
    async with (
        upstream_of(protocol) as upstream,
        fronted(upstream.port, "silence") as front,
        client_of(front.port, protocol) as client,
    ):
        await client.request("GET", "/")
        assert client.counters.attempts[AttemptKind.RETRY] == 0
        assert front.connections >= 2


@pytest.mark.parametrize("protocol", ["h1", "h2"])
async def test_a_hung_dial_gives_its_slot_to_another_where_there_is_but_one(protocol, lost):
    most = 0

    async with (
        upstream_of(protocol) as upstream,
        client_of(upstream.port, protocol, dial=dialling(lost, None), connections=1) as client,
        trio.open_nursery() as nursery,
    ):

        async def watch():
            nonlocal most
            while True:
                now = client.transport.statistics
                most = max(most, now.connecting + now.connections)
                await trio.sleep(0.01)

        nursery.start_soon(watch)
        await client.request("GET", "/")
        assert client.counters.attempts[AttemptKind.RETRY] == 0
        nursery.cancel_scope.cancel()
    assert most == 1


async def test_a_retry_relies_on_no_dial_that_its_predecessor_gave_up(lost):
    async with (
        upstream_of("h2") as upstream,
        client_of(upstream.port, dial=dialling(lost, lost, None), resilience=PATIENT) as client,
    ):
        # Two dials hang beyond the first attempt; the retry's own one arrives.
        await client.request("GET", "/", attempt_timeout=0.4, max_retries=10)


async def test_a_hedge_gets_through_while_the_first_dial_hangs(lost):
    async with (
        upstream_of("h2") as upstream,
        client_of(upstream.port, dial=dialling(lost, None)) as client,
    ):
        await client.request("GET", "/", hedge_after=0.1, max_retries=0)


async def test_a_failed_dial_that_a_hundred_wait_for_costs_none_of_them_an_attempt(refusing):
    async with (
        upstream_of("h2") as upstream,
        client_of(upstream.port, dial=dialling(refusing, None)) as client,
    ):
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(client.request, "POST", "/")
        assert client.counters.attempts[AttemptKind.RETRY] == 0
        assert upstream.requests == 100


async def test_if_every_dial_fails_all_waiting_requests_fail_as_one_failure(refusing):
    errors = []
    async with client_of(1, dial=dialling(refusing)) as client:

        async def call():
            with pytest.raises(ConnectionFailedError) as caught:
                await client.request("GET", "/", max_retries=0)
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(call)
        assert len({id(error.incident) for error in errors}) == 1
        assert len(errors) == TASKS
        assert client.breaker.state is BreakerState.CLOSED


async def test_a_refused_rival_takes_nothing_from_a_dial_that_is_under_way(lost, refusing):
    async with (
        upstream_of("h2") as upstream,
        client_of(upstream.port, dial=dialling(lost, refusing, refusing, None)) as client,
    ):
        await client.request("GET", "/", max_retries=0)


async def test_an_address_that_hangs_is_left_for_another_one_of_the_name():
    class Resolver(trio.abc.HostnameResolver):
        async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):
            await trio.lowlevel.checkpoint()
            addresses = ["127.0.0.1", "127.0.0.2"] if host == b"localhost" else [host.decode()]
            kind = socket.SOCK_STREAM
            return [(socket.AF_INET, kind, 6, "", (each, port)) for each in addresses]

        async def getnameinfo(self, sockaddr, flags):
            raise NotImplementedError

    async def silent(stream):
        await trio.sleep_forever()

    upstream = Upstream()
    async with trio.open_nursery() as nursery:
        serve = functools.partial(trio.serve_tcp, silent, 0, host="127.0.0.1")
        [listener] = await nursery.start(serve)
        port = listener.socket.getsockname()[1]

        async def works(stream):
            context = AUTHORITY.server_context("http/1.1")
            secure = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
            with contextlib.suppress(trio.BrokenResourceError):
                await http1_handler(upstream)(secure)

        await nursery.start(functools.partial(trio.serve_tcp, works, port, host="127.0.0.2"))
        previous = trio.socket.set_custom_hostname_resolver(Resolver())
        try:
            async with client_of(port, "h1") as client:
                await client.request("GET", "/", max_retries=0)
        finally:
            trio.socket.set_custom_hostname_resolver(previous)
        nursery.cancel_scope.cancel()
    assert upstream.requests == 1


@pytest.mark.parametrize("protocol", ["h1", "h2"])
async def test_if_every_dial_hangs_a_request_ends_at_the_connect_timeout(
    protocol, lost, monkeypatch
):
    monkeypatch.setattr(pool, "CONNECT_SECONDS", 2.5)
    limits = ConnectionOptions(enable_http2=protocol == "h2", max_connections_per_server=1)
    transport = Transport(limits, verify=AUTHORITY.client_context())
    with trio.fail_after(PATIENCE_SECONDS):
        async with httpx.AsyncClient(transport=transport, timeout=None) as client:
            with pytest.raises(httpx.ConnectTimeout):
                await client.get(f"https://localhost:{lost}/")
            statistics = transport.statistics
            assert (statistics.waiting, statistics.connecting) == (0, 0)


async def test_a_longer_time_to_connect_is_the_requests_to_choose(monkeypatch):
    monkeypatch.setattr(pool, "CONNECT_SECONDS", 0.2)
    connected = trio.Event()

    async def late(host, port):
        await connected.wait()
        return await trio.open_tcp_stream("127.0.0.1", port)

    upstream = Upstream()
    async with serving(upstream, http1_handler(upstream)), trio.open_nursery() as nursery:
        url = f"http://127.0.0.1:{upstream.port}/"
        with trio.fail_after(PATIENCE_SECONDS):
            transport = Transport(ConnectionOptions(), dial=late)
            async with httpx.AsyncClient(transport=transport) as client:
                with pytest.raises(httpx.ConnectTimeout):
                    await client.get(url, timeout=None)
                nursery.start_soon(_set_later, connected, 0.5)
                answer = await client.get(url, timeout=httpx.Timeout(None, connect=30))
    assert answer.status_code == 200


async def _set_later(event, seconds):
    await trio.sleep(seconds)
    event.set()


async def test_calls_that_wait_on_one_hung_dial_are_few_failures(lost):
    """Twenty calls give up at once; what failed is the two dials that they waited for."""
    kinds = []
    async with client_of(lost) as client:

        async def call():
            with pytest.raises(AttemptTimeoutError) as caught:
                await client.request("POST", "/", attempt_timeout=0.2, max_retries=0)
            kinds.append(caught.value.kind)

        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(call)
        assert set(kinds) == {FailureKind.NOT_SENT}
        assert client.breaker.state is BreakerState.CLOSED
        # A server that stays unreachable opens the circuit all the same.
        with pytest.raises(CircuitOpenError):
            await fail_for_good(client, "/")


async def test_waiting_for_a_connection_of_ours_says_nothing_about_the_upstream():
    kinds = []
    async with (
        upstream_of("h1") as upstream,
        client_of(upstream.port, "h1", connections=2) as client,
        trio.open_nursery() as nursery,
    ):
        for _ in range(2):
            nursery.start_soon(client.request, "GET", "/hang")
        await until(lambda: upstream.requests == 2)

        async def call():
            with pytest.raises(AttemptTimeoutError) as caught:
                await client.request("GET", "/", attempt_timeout=0.1, max_retries=0)
            kinds.append(caught.value.kind)

        async with trio.open_nursery() as waiting:
            for _ in range(TASKS):
                waiting.start_soon(call)
        assert kinds == [FailureKind.NO_CONNECTION_FREE] * TASKS
        assert client.breaker.state is BreakerState.CLOSED
        nursery.cancel_scope.cancel()


async def test_a_connection_that_falls_silent_is_one_failure():
    """A network drops everything silently; every call notices by its own timeout."""
    errors = []
    async with (
        upstream_of("h2") as upstream,
        fronted(upstream.port, "mute") as front,
        client_of(front.port) as client,
        trio.open_nursery() as nursery,
    ):
        await client.request("GET", "/")
        front.drop.set()

        async def call():
            try:
                await client.request("GET", "/", attempt_timeout=0.5, max_retries=0)
            except CallError as error:
                errors.append(error)

        for _ in range(TASKS):
            nursery.start_soon(call)
        await until(lambda: len(errors) == TASKS)
        assert client.breaker.state is BreakerState.CLOSED


async def test_a_connection_that_falls_silent_is_found_out_before_the_calls_give_up(monkeypatch):
    for module in (http2, pool):
        monkeypatch.setattr(module, "PING_SECONDS", 1.0)
    ended = []
    async with (
        upstream_of("h2") as upstream,
        fronted(upstream.port, "mute") as front,
        client_of(front.port) as client,
    ):
        await client.request("GET", "/")
        front.drop.set()
        async with trio.open_nursery() as nursery:

            async def call():
                await client.request("GET", "/", attempt_timeout=PATIENCE_SECONDS)
                ended.append(True)

            for _ in range(TASKS):
                nursery.start_soon(call)
        assert len(ended) == TASKS
        assert client.counters.circuits_opened == 0


async def test_refused_streams_are_repeated_whatever_the_method_and_open_no_circuit():
    """More refusals than the transport bears with by itself, so that calls are retried too."""
    upstream = Upstream()
    handler = http2_handler(upstream, refusals=70)
    context = AUTHORITY.server_context("h2")
    async with serving(upstream, handler, context=context), client_of(upstream.port) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(client.request, "POST", "/")
        assert upstream.requests == TASKS
        assert client.counters.attempts[AttemptKind.RETRY] > 0
        assert client.counters.circuits_opened == 0


async def test_an_upstream_that_answers_pings_alone_still_opens_the_circuit():
    async with upstream_of("h2") as upstream, client_of(upstream.port) as client:
        with pytest.raises(CircuitOpenError):
            await fail_for_good(client, "/hang")


async def test_a_write_of_which_no_byte_left_goes_over_another_connection():
    """The server resets the connection in the very moment in which the request is written."""
    streams = []
    upstream = Upstream()

    async def handler(stream):
        streams.append(stream.transport_stream.socket)
        try:
            await http2_handler(upstream)(stream)
        except* (trio.ClosedResourceError, trio.BrokenResourceError):
            pass

    context = AUTHORITY.server_context("h2")
    async with serving(upstream, handler, context=context), client_of(upstream.port) as client:
        for _ in range(5):
            await client.request("POST", "/upload", content=b"{}")
            sock = streams[-1]
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        await client.request("POST", "/upload", content=b"{}")
    assert upstream.requests == 6
