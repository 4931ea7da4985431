"""The transport on real sockets, HTTP/1.1: bounds, ages, cancellation, errors."""

import asyncio
import pickle
import random
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
    http1_answer,
    http1_handler,
    serving,
)
from support.waiting import PATIENCE_SECONDS, until

from sdk_trio.errors import NotRunningError
from sdk_trio.net import pool
from sdk_trio.net.messages import TransportClosed
from sdk_trio.net.transport import Transport

STORM_REQUESTS = 12_000

AUTHORITY = Authority()


@pytest.fixture(autouse=True)
def _no_races(monkeypatch):
    """Connections are counted here: a machine under load must not make more of them."""
    monkeypatch.setattr(pool, "RACE_SECONDS", 60.0)
    monkeypatch.setattr(pool, "LONGEST_RACE_SECONDS", 60.0)


@asynccontextmanager
async def client_of(upstream, handler=None, **options):
    """A plain HTTP server, and a client whose base address is it."""
    async with serving(upstream, handler or http1_handler(upstream)):
        transport = Transport(ConnectionOptions(**options))
        base_url = f"http://127.0.0.1:{upstream.port}"
        # The storms of these tests take half a minute on a machine with much other work.
        with trio.fail_after(5 * PATIENCE_SECONDS):
            async with httpx.AsyncClient(
                transport=transport, base_url=base_url, timeout=None
            ) as client:
                client.pool = transport
                yield client


def scripted(*answers):
    """Return a handler that reads a request for each answer, and sends the bytes of ``answers``
    unchanged."""

    async def handle(stream):
        for answer in answers:
            data = b""
            while b"\r\n\r\n" not in data:
                more = await stream.receive_some(65_536)
                if not more:
                    return
                data += more
            await stream.send_all(answer)

    return handle


async def test_a_connection_is_kept_and_used_again():
    upstream = Upstream()
    async with client_of(upstream) as client:
        for _ in range(3):
            response = await client.get("/")
            assert (response.status_code, response.content) == (200, BODY)
        assert response.http_version == "HTTP/1.1"
        assert response.reason_phrase == "OK"
        assert upstream.connections == 1
        assert client.pool.statistics.idle == 1


async def test_no_more_connections_than_the_cap_and_every_request_is_served():
    upstream = Upstream()
    async with client_of(upstream, max_connections_per_server=7) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(client.get, "/after/0.005")
        assert upstream.requests == 60
        assert upstream.most_connections == 7


async def test_the_cap_counts_per_host_and_an_idle_connection_gives_way():
    first, second = Upstream(), Upstream()
    async with (
        client_of(first, max_connections_per_server=1) as client,
        serving(second, http1_handler(second)),
    ):
        for upstream in (first, second, first):
            await client.get(f"http://127.0.0.1:{upstream.port}/")
            assert client.pool.statistics.connections == 1
        assert (first.connections, second.connections) == (2, 1)


async def test_a_slot_that_becomes_free_goes_to_another_origin_of_the_host(monkeypatch):
    monkeypatch.setattr(pool, "REAP_SECONDS", (3600, 3600))  # the reaper would notice it, too
    first, second = Upstream(), Upstream()
    async with (
        client_of(first, max_connections_per_server=1) as client,
        serving(second, http1_handler(second)),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(client.get, "/after/0.05")
        await trio.testing.wait_all_tasks_blocked(0.01)
        with trio.fail_after(PATIENCE_SECONDS):
            response = await client.get(f"http://127.0.0.1:{second.port}/")
        assert response.status_code == 200


async def test_a_connection_is_replaced_at_its_lifetime():
    upstream = Upstream()
    async with client_of(upstream, pooled_connection_lifetime_minutes=0.1 / 60) as client:
        started = trio.current_time()
        while upstream.connections < 4:
            await client.get("/after/0.005")
        # Three lived as long as they may, one after the other.
        assert trio.current_time() - started >= 0.3
        assert upstream.most_connections == 1


async def test_an_idle_connection_is_closed_without_another_request():
    upstream = Upstream()
    async with client_of(upstream, pooled_connection_idle_timeout_minutes=0.1 / 60) as client:
        await client.get("/")
        assert upstream.open_connections == 1
        await until(lambda: upstream.open_connections == 0)
        assert client.pool.statistics.connections == 0


@pytest.mark.parametrize("begun", [0, 7, 14])
async def test_an_idle_connection_is_closed_within_a_second_of_its_time(begun, mock_clock):
    """The specification gives minutes; the reaper's rounds once added up to 15 seconds."""
    upstream = Upstream()
    async with client_of(upstream, pooled_connection_idle_timeout_minutes=2) as client:
        await _pass_seconds(mock_clock, begun)
        await client.get("/")
        await _pass_seconds(mock_clock, 119)
        assert client.pool.statistics.connections == 1
        rounds = _Rounds()
        trio.lowlevel.add_instrument(rounds)
        await _pass_seconds(mock_clock, 2)
        trio.lowlevel.remove_instrument(rounds)
        assert client.pool.statistics.connections == 0
        assert rounds.seen <= 3


class _Rounds(trio.abc.Instrument):
    seen = 0

    def before_task_step(self, task):
        self.seen += "reap" in task.name


async def _pass_seconds(clock, seconds):
    for _ in range(seconds):
        clock.jump(1)
        await trio.testing.wait_all_tasks_blocked()


async def test_a_storm_of_cancelled_requests_leaves_no_slot_taken():
    upstream = Upstream()
    dice = random.Random(12_000)
    most = []
    async with client_of(upstream, max_connections_per_server=10) as client:

        async def give_up_soon(requests):
            for _ in range(requests):
                with trio.move_on_after(dice.uniform(0, 0.008)):
                    await client.get(f"/after/{dice.uniform(0, 0.008):.4f}")
                now = client.pool.statistics
                most.append(now.connections + now.connecting)

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(give_up_soon, STORM_REQUESTS // 40)
        assert max(most) == 10
        assert client.pool.statistics.exchanges == 0
        assert client.pool.statistics.waiting == 0
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(client.get, "/after/0.01")
        assert (await client.get("/")).status_code == 200
        assert client.pool.statistics.exchanges == 0


async def test_cancelling_while_the_body_is_read_frees_the_slot():
    upstream = Upstream()
    async with client_of(upstream, max_connections_per_server=1) as client:
        with trio.CancelScope() as scope:
            async with client.stream("GET", "/size/10000000") as response:
                async for _ in response.aiter_raw():
                    scope.cancel()
        assert client.pool.statistics.connections == 0
        assert (await client.get("/")).status_code == 200


async def test_closing_a_response_early_frees_the_slot():
    upstream = Upstream()
    async with client_of(upstream, max_connections_per_server=1) as client:
        async with client.stream("GET", "/size/10000000"):
            pass
        assert (await client.get("/")).status_code == 200


async def test_a_large_body_is_streamed_both_ways():
    upstream = Upstream()

    async def chunks():
        for _ in range(50):
            yield bytes(40_000)

    async with client_of(upstream) as client:
        response = await client.post(
            "/upload", content=chunks(), headers={"content-length": "2000000"}
        )
        assert response.text == "2000000"
        response = await client.get("/size/3000000")
        assert len(response.content) == 3_000_000
        assert upstream.connections == 1


async def test_a_chunked_upload_ends_with_the_last_chunk():
    upstream = Upstream()
    seen = bytearray()

    async def handle(stream):
        while not seen.endswith(b"0\r\n\r\n"):
            seen.extend(await stream.receive_some(65_536))
        await stream.send_all(http1_answer())

    async def chunks():
        yield b"one"
        yield b""
        yield b"twenty-one characters"

    async with client_of(upstream, handle) as client:
        await client.post("/", content=chunks())
    assert seen.partition(b"\r\n\r\n")[2] == b"3\r\none\r\n15\r\ntwenty-one characters\r\n0\r\n\r\n"


@pytest.mark.parametrize("content", [b"12345", b"1234567"])
async def test_a_body_of_another_length_than_announced_is_not_sent(content):
    class Chunks:
        def __aiter__(self):
            self.left = [content]
            return self

        async def __anext__(self):
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop()

    async with client_of(Upstream()) as client:
        with pytest.raises(httpx.LocalProtocolError, match="Content-Length"):
            await client.post("/upload", content=Chunks(), headers={"content-length": "6"})
        assert client.pool.statistics.exchanges == 0


async def test_a_line_break_in_a_header_is_refused_before_anything_is_sent():
    upstream = Upstream()
    async with client_of(upstream) as client:
        with pytest.raises(httpx.LocalProtocolError, match="X-Note"):
            await client.get("/", headers={"X-Note": "a\r\nInjected: yes"})
        assert upstream.requests == 0


async def test_a_dead_port_is_a_connect_error_for_each_request():
    upstream = Upstream()
    async with client_of(upstream) as client:
        unused = trio.socket.socket()
        await unused.bind(("127.0.0.1", 0))  # bound, not listening
        failures = []

        async def fail():
            try:
                await client.post(f"http://127.0.0.1:{unused.getsockname()[1]}/")
            except httpx.ConnectError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(fail)
        unused.close()
        assert len(failures) == 5
        assert failures[0].request.method == "POST"
        assert client.pool.statistics.connecting == 0


@pytest.mark.parametrize(
    ("limits", "path", "error"),
    [
        (httpx.Timeout(None, read=0.05), "/hang", httpx.ReadTimeout),
        (httpx.Timeout(None, write=0.05), "/stuck", httpx.WriteTimeout),
    ],
)
async def test_httpx_timeouts_of_one_read_and_one_write(limits, path, error):
    async with client_of(Upstream()) as client:
        content = bytes(20_000_000 if path == "/stuck" else 0)
        with pytest.raises(error):
            await client.post(path, content=content, timeout=limits)
        assert client.pool.statistics.exchanges == 0


async def test_waiting_for_a_connection_has_its_own_limit():
    async with (
        client_of(Upstream(), max_connections_per_server=1) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(client.get, "/hang")
        await trio.testing.wait_all_tasks_blocked(0.02)
        with pytest.raises(httpx.PoolTimeout):
            await client.post("/", timeout=httpx.Timeout(None, pool=0.05))
        assert client.pool.statistics.waiting == 0
        nursery.cancel_scope.cancel()


async def _answer_once_then_close_when_asked(upstream, *, answers):
    """A handler whose first ``answers`` connections close on their second request, unanswered."""

    async def handle(stream):
        upstream_number = upstream.connections
        await scripted(http1_answer())(stream)
        if upstream_number > answers:
            await http1_handler(upstream)(stream)
        await stream.receive_some(1)

    return handle


async def test_a_kept_connection_that_dies_is_replaced_for_a_get():
    upstream = Upstream()
    handler = await _answer_once_then_close_when_asked(upstream, answers=1)
    async with client_of(upstream, handler) as client:
        await client.get("/")
        assert (await client.get("/")).status_code == 200
        assert upstream.connections == 2


async def test_a_kept_connection_that_dies_is_reported_for_a_post():
    upstream = Upstream()
    handler = await _answer_once_then_close_when_asked(upstream, answers=1)
    async with client_of(upstream, handler) as client:
        await client.get("/")
        with pytest.raises(httpx.ReadError):
            await client.post("/", json={})
        assert upstream.connections == 1
        assert (await client.post("/", json={})).status_code == 200


async def test_a_get_is_tried_again_only_once():
    upstream = Upstream()
    handler = await _answer_once_then_close_when_asked(upstream, answers=99)
    async with client_of(upstream, handler) as client:
        await client.get("/")
        await client.get("/")  # the second connection's first answer
        assert upstream.connections == 2


async def test_a_connection_that_the_server_closed_is_not_used_for_a_post():
    upstream = Upstream()
    async with client_of(upstream, scripted(http1_answer())) as client:
        for _ in range(3):
            assert (await client.post("/", json={})).status_code == 200
            await until(lambda: upstream.open_connections == 0)
        assert upstream.connections == 3


@pytest.mark.parametrize(
    ("answer", "body", "kept"),
    [
        (http1_answer(extra=b"connection: close\r\n"), BODY, False),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
            b"abcde",
            True,
        ),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + http1_answer(), BODY, True),
        (http1_answer() + b"HTTP/1.1 200 OK\r\n", BODY, False),
    ],
    ids=["close", "until-close", "no-content", "chunked", "interim", "surplus"],
)
async def test_answers_end_where_they_say(answer, body, kept):
    upstream = Upstream()
    async with client_of(upstream, scripted(answer)) as client:
        response = await client.get("/")
        assert response.content == body
        assert "link" not in response.headers
        assert client.pool.statistics.connections == int(kept)


async def test_the_answer_to_head_has_no_body_regardless_of_its_headers():
    upstream = Upstream()
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n"
    async with client_of(upstream, scripted(answer, answer)) as client:
        for _ in range(2):
            response = await client.head("/")
            assert response.headers["content-length"] == "500"
        assert upstream.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc",
        b"SMTP ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + bytes([97]) * 300_000,
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
    ids=["short", "short-chunk", "no-http", "endless-head", "unasked-upgrade"],
)
async def test_a_broken_answer_is_an_error_and_its_connection_is_not_used_again(answer):
    upstream = Upstream()
    async with client_of(upstream, scripted(answer)) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/")
        assert client.pool.statistics.connections == 0


async def test_tls_with_an_authority_of_its_own_and_without():
    upstream = Upstream()
    context = AUTHORITY.server_context("http/1.1")
    async with serving(upstream, http1_handler(upstream), context=context):
        url = f"https://localhost:{upstream.port}/"
        trusting = Transport(ConnectionOptions(), verify=AUTHORITY.client_context())
        async with httpx.AsyncClient(transport=trusting, timeout=60) as client:
            assert (await client.get(url)).content == BODY
            assert len((await client.get(f"{url}size/2000000")).content) == 2_000_000
            response = await client.post(f"{url}upload", content=bytes(2_000_000))
            assert response.text == "2000000"
            assert trusting.statistics.connections == 1
        async with httpx.AsyncClient(transport=Transport(ConnectionOptions())) as client:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await client.post(url)


async def test_an_exception_inside_leaves_unchanged():
    with pytest.raises(ZeroDivisionError):
        async with Transport(ConnectionOptions()):
            _ = 1 / 0


async def test_outside_its_context_the_transport_raises_an_error():
    transport = Transport(ConnectionOptions())
    with pytest.raises(RuntimeError, match="async with"):
        await transport.handle_async_request(httpx.Request("GET", "http://127.0.0.1/"))


async def test_closing_fails_waiting_and_running_requests():
    outcomes = []
    async with client_of(Upstream(), max_connections_per_server=1) as client:

        async def get():
            try:
                await client.get("/hang")
            except httpx.TransportError as error:
                outcomes.append(type(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(get)
            await trio.testing.wait_all_tasks_blocked(0.02)
            nursery.start_soon(get)
            await trio.testing.wait_all_tasks_blocked(0.02)
            await client.pool.aclose()
        assert sorted(outcomes, key=str) == [httpx.ReadError, TransportClosed]


async def test_the_caller_is_notified_before_a_request_is_sent():
    upstream = Upstream()
    async with client_of(upstream) as client:
        seen = []
        await client.get(
            "/", extensions={"sdk_trio.before_send": lambda: seen.append(upstream.requests)}
        )
        assert seen == [0]


async def test_the_caller_is_not_notified_of_a_request_that_was_never_sent():
    async with (
        client_of(Upstream(), max_connections_per_server=1) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(client.get, "/hang")
        await trio.testing.wait_all_tasks_blocked(0.02)
        left = []
        with trio.move_on_after(0.03):
            await client.post("/", extensions={"sdk_trio.before_send": lambda: left.append(True)})
        assert not left
        nursery.cancel_scope.cancel()


async def test_port_zero_is_the_port_that_was_asked_for():
    dialled = []

    async def dial(host, port):
        dialled.append(port)
        return await trio.open_tcp_stream(host, port)

    async with Transport(ConnectionOptions(), dial=dial) as transport:
        with pytest.raises(httpx.ConnectError):
            await transport.handle_async_request(httpx.Request("GET", "http://127.0.0.1:0/"))
    assert dialled == [0]


async def test_the_zone_of_an_address_is_dialled_and_not_sent():
    heads, dialled = [], []

    async def handle(stream):
        heads.append(await stream.receive_some(65_536))
        await stream.send_all(http1_answer())

    upstream = Upstream()

    async def dial(host, port):
        dialled.append((host, port))
        return await trio.open_tcp_stream("127.0.0.1", upstream.port)

    async with serving(upstream, handle), Transport(ConnectionOptions(), dial=dial) as transport:
        request = httpx.Request("GET", "http://[fe80::1%25lo]:8080/")
        await (await transport.handle_async_request(request)).aread()
    assert dialled == [("fe80::1%lo", 8080)]
    assert b"\r\nHost: [fe80::1]:8080\r\n" in heads[0]


async def test_under_asyncio_it_explains_that_it_needs_trio():
    async def main():
        async with Transport(ConnectionOptions()):
            raise AssertionError("it opened")

    with pytest.raises(NotRunningError, match=r"trio\.run"):
        await trio.to_thread.run_sync(asyncio.run, main())


async def test_a_body_is_read_in_each_of_the_ways_that_httpx_has():
    """The transport's own reading of a body differs from httpx's only in its time."""
    upstream = Upstream()
    async with client_of(upstream) as client:
        async with client.stream("GET", "/") as response:
            parts = response.aiter_bytes()
            first = await anext(parts)
            await parts.aclose()
            assert response.is_closed
        async with client.stream("GET", "/") as response:
            body = b"".join([part async for part in response.aiter_bytes()])
            assert response.is_closed
            assert response.is_stream_consumed
            assert response.num_bytes_downloaded == len(body)
            with pytest.raises(httpx.StreamConsumed):
                await response.aread()
        assert body.startswith(first)
        async with client.stream("GET", "/") as response:
            assert b"".join([part async for part in response.aiter_bytes(chunk_size=1)]) == body
        async with client.stream("GET", "/") as response:
            assert await response.aread() == body
            assert [part async for part in response.aiter_bytes()] == [body]
        whole = await client.get("/")
        assert (whole.content, whole.num_bytes_downloaded) == (body, len(body))
        assert pickle.loads(pickle.dumps(whole)).content == body
