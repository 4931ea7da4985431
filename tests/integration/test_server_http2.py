"""HTTP/2 over TLS, as real clients speak it and as hostile ones do."""

import logging
import os
from contextlib import contextmanager, suppress

import attrs
import httpx
import pytest
import trio
from h2.settings import Settings
from hypothesis import given, settings
from hypothesis import strategies as st
from support.http2_wire import (
    certificate_in,
    client_context,
    frame,
    http2_wire,
    open_tls,
)
from support.http_serving import QUICK, http_server
from support.serving import registry, signed

from sdk_trio.runtime import http2
from sdk_trio.testing import running_app, settings_for_tests

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, WINDOW, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
GET_HEAD = b"\x82\x87\x84\x41\x04test"  # GET, https, /, an authority, as HPACK has them

NO_ERROR, PROTOCOL_ERROR, FRAME_SIZE, REFUSED, CANCEL, CALM = 0, 1, 6, 7, 8, 11


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return certificate_in(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def serve(files):
    """A server that offers HTTP/2."""

    def make(**options):
        limits = attrs.evolve(QUICK, **options.pop("limits", {}))
        return http_server(
            True, certificate=files, http2=True, limits=limits, patience=60, **options
        )

    return make


async def still_serves(server):
    async with http2_wire(server.url) as wire:
        assert (await wire.ask()).status == 200


def task_count():
    tasks, count = [trio.lowlevel.current_root_task()], 0
    while tasks:
        count += 1
        for nursery in tasks.pop().child_nurseries:
            tasks.extend(nursery.child_tasks)
    return count


async def becomes(read, wanted):
    while read() != wanted:
        await trio.sleep(0.01)


# -- which protocol ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offered", "agreed"),
    [
        (("h2", "http/1.1"), "h2"),
        (("http/1.1", "h2"), "h2"),
        (("http/1.1",), "http/1.1"),
        (("h3", "spdy/3"), None),
        ((), None),
    ],
)
async def test_the_handshake_decides(serve, offered, agreed):
    async with serve() as server:
        stream = await open_tls(server.url, *offered)
        assert stream.selected_alpn_protocol() == agreed
        if agreed != "h2":
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize(("fast", "http2"), [(True, False), (False, True)])
async def test_where_it_is_not_offered_clients_fall_back(files, fast, http2):
    async with (
        http_server(fast, certificate=files, http2=http2) as server,
        httpx.AsyncClient(http2=True, verify=client_context(), timeout=60) as client,
    ):
        answer = await client.get(server.url)
    assert (answer.status_code, answer.http_version) == (200, "HTTP/1.1")


async def test_http_1_1_in_a_connection_of_http_2_is_refused(serve):
    async with serve() as server:
        stream = await open_tls(server.url, "h2")
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n")
        received = b""
        while chunk := await stream.receive_some():
            received += chunk
        assert b"HTTP/1.1" not in received
        await trio.aclose_forcefully(stream)
        await still_serves(server)
    assert len(server.observer.seen) == 1


# -- what an application is given --------------------------------------------------------------


async def test_the_scope_is_that_of_http_1_1_but_for_the_version(serve):
    async with serve() as server, http2_wire(server.url) as wire:
        answer = await wire.ask(
            b"/a%2Fb%20c?x=%20&y",
            (b"x-one", b"1"),
            (b"cookie", b"a=b"),
            (b"cookie", b"c=d"),
            method=b"PUT",
        )
        assert answer.status == 200
        peer = wire.stream.transport_stream.socket
        client, address = peer.getsockname(), peer.getpeername()
    assert server.observer.seen[0].scope == {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": "2",
        "method": "PUT",
        "scheme": "https",
        "path": "/a/b c",
        "raw_path": b"/a%2Fb%20c",
        "query_string": b"x=%20&y",
        "root_path": "",
        "headers": [(b"host", b"test"), (b"x-one", b"1"), (b"cookie", b"a=b; c=d")],
        "client": client,
        "server": address,
        "state": {},
        "extensions": {},
    }


@pytest.mark.parametrize("size", [0, 1, 16_384, 16_385, 300_000])
async def test_bodies_arrive_whole_and_many_at_a_time(serve, size):
    body = bytes(number % 251 for number in range(size))
    async with (
        serve() as server,
        httpx.AsyncClient(http2=True, verify=client_context(), timeout=60) as client,
    ):

        async def exchange():
            answer = await client.post(server.url, content=body)
            assert (answer.http_version, answer.content) == ("HTTP/2", body)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(exchange)
    assert [seen.body for seen in server.observer.seen] == [body] * 8


async def test_frames_of_a_byte_padding_and_trailers_make_the_same_request(serve):
    async with serve() as server, http2_wire(server.url) as wire:
        stream = await wire.begin(method=b"POST", end=False)
        for byte in b"body":
            await wire.send(frame(DATA, stream, bytes([3, byte, 0, 0, 0]), 0x8))
        wire.h2.send_headers(stream, [(b"x-trailer", b"1")], end_stream=True)
        await wire.send()
        assert (await wire.answer(stream)).body == b"body"
        half = len(GET_HEAD) // 2
        stream += 2
        wire.answers[stream] = type(wire.answers[1])()
        wire.h2.get_next_available_stream_id()
        wire.h2.send_headers(stream, [(b":method", b"GET")], end_stream=True)
        wire.h2.clear_outbound_data_buffer()
        for byte in frame(HEADERS, stream, GET_HEAD[:half], 0x1) + frame(
            CONTINUATION, stream, GET_HEAD[half:], 0x4
        ):
            await wire.send(bytes([byte]))
        assert (await wire.answer(stream)).status == 200


async def test_the_body_is_asked_for_where_the_client_waits_for_that(serve):
    async with serve() as server, http2_wire(server.url) as wire:
        stream = await wire.begin(b"/", (b"expect", b"100-continue"), method=b"POST", end=False)
        while not wire.answers[stream].interim:
            await wire.receive()
        await wire.upload(stream, b"body")
        assert (await wire.answer(stream)).body == b"body"
        stream = await wire.begin(
            b"/early", (b"expect", b"100-continue"), method=b"POST", end=False
        )
        answer = await wire.answer(stream)
        assert (answer.status, answer.interim) == (403, [])


# -- answers -----------------------------------------------------------------------------------


async def test_answers_of_every_kind(serve):
    async with serve() as server, http2_wire(server.url) as wire:
        streamed = await wire.ask(b"/stream")
        assert (streamed.body, streamed.headers) == (b"onetwothree", {b"x-kind": b"stream"})
        head = await wire.ask(b"/early", method=b"HEAD")
        assert (head.status, head.headers, head.body) == (403, {b"content-length": b"2"}, b"")
        assert (await wire.ask(b"/no-content")).status == 204
        # What is about connections of HTTP/1.1 is not passed on.
        assert (await wire.ask(b"/close")).headers == {b"content-length": b"0"}
        assert (await wire.ask(b"/hints")).interim == [103]
        assert (await wire.ask(b"/after")).status == 200
        assert (await wire.ask(b"/both")).status == 200
        big = await wire.ask(b"/big")
        assert len(big.body) == 20_000_000
    assert server.observer.received[0]["type"] == "http.disconnect"


@pytest.mark.parametrize("path", [b"/fail", b"/nothing", b"/split-header"])
async def test_an_application_that_fails_gives_500_and_the_others_go_on(serve, path):
    async with serve() as server, http2_wire(server.url) as wire:
        beside = await wire.begin(b"/gate")
        await server.observer.began.wait()
        assert (await wire.ask(path)).status == 500
        server.observer.gate.set()
        assert (await wire.answer(beside)).status == 200


@pytest.mark.parametrize("path", [b"/fail-late", b"/too-much"])
async def test_an_answer_that_breaks_off_is_seen_to_do_so(serve, path):
    async with serve() as server, http2_wire(server.url) as wire:
        answer = await wire.ask(path)
        assert (answer.ended, answer.reset) == (False, 2)
        assert (await wire.ask()).status == 200


async def test_an_early_answer_is_read_by_a_client_that_goes_on_sending(serve):
    async with (
        serve(limits={"linger_seconds": 30}) as server,
        httpx.AsyncClient(http2=True, verify=client_context(), timeout=60) as client,
    ):
        for _ in range(3):
            answer = await client.post(f"{server.url}/early", content=b"x" * 400_000)
            assert (answer.status_code, answer.content) == (403, b"no")


async def test_one_that_sends_without_end_is_told_to_stop_and_others_go_on(serve):
    async with serve(limits={"linger_seconds": 0.1}) as server, http2_wire(server.url) as wire:
        stream = await wire.begin(b"/early", method=b"POST", end=False)
        assert (await wire.answer(stream)).status == 403
        while wire.answers[stream].reset is None:
            await wire.receive()
        assert wire.answers[stream].reset == NO_ERROR
        await wire.send(frame(DATA, stream, b"late" * 1000))
        assert (await wire.ask()).status == 200


async def test_a_client_that_leaves_is_noticed_and_what_runs_runs_to_its_end(serve):
    async with serve() as server:
        before = task_count()
        async with http2_wire(server.url) as wire:
            await wire.begin(b"/watch")
            await server.observer.began.wait()
        await becomes(task_count, before)
        async with http2_wire(server.url) as wire:
            stream = await wire.begin(b"/watch")
            wire.h2.reset_stream(stream, CANCEL)
            assert (await wire.ask()).status == 200
    assert [message["type"] for message in server.observer.received] == ["http.disconnect"] * 2


async def test_a_client_that_says_goodbye_gets_the_answers_that_it_waits_for(serve):
    async with serve() as server, http2_wire(server.url) as wire:
        stream = await wire.begin(b"/gate")
        await server.observer.began.wait()
        await wire.send(frame(7, 0, b"\0" * 8))
        await wire.send(frame(PING, 0, b"12345678"))
        while not wire.pings:
            await wire.receive()
        server.observer.gate.set()
        assert (await wire.answer(stream)).status == 200
        await wire.rest()


# -- what is refused ---------------------------------------------------------------------------

FIELDS = {b":method": b"GET", b":scheme": b"https", b":authority": b"test", b":path": b"/"}


def fields(*more, **changes):
    """Fields of a request; an argument replaces a pseudo-header, None leaves it out."""
    changed = FIELDS | {b":" + name.encode(): value for name, value in changes.items()}
    return [pair for pair in changed.items() if pair[1] is not None] + list(more)


#: name: (fields, status)
MALFORMED = {
    "no method": (fields(method=None), 400),
    "no path": (fields(path=None), 400),
    "an empty path": (fields(path=b""), 400),
    "a path that is none": (fields(path=b"elsewhere"), 400),
    "a path with a space": (fields(path=b"/a b"), 400),
    "a path that is not ASCII": (fields(path=b"/\xe9"), 400),
    "no scheme": (fields(scheme=None), 400),
    "another scheme": (fields(scheme=b"ftp"), 400),
    "no authority": (fields(authority=None), 400),
    "an authority with a space": (fields(authority=b"a b"), 400),
    "another host": (fields((b"host", b"other")), 400),
    "a method with a space": (fields(method=b"G T"), 400),
    "a pseudo-header twice": ([(b":method", b"GET"), *fields()], 400),
    "a pseudo-header after others": ([(b"x", b"y"), *fields()], 400),
    "an unknown pseudo-header": (fields(protocol=b"websocket"), 400),
    "a tunnel": (fields(method=b"CONNECT"), 501),
    "a tunnel in its own form": ([(b":method", b"CONNECT"), (b":authority", b"test:443")], 501),
    "a capital letter": (fields((b"X-One", b"y")), 400),
    "a name with a space": (fields((b"x one", b"y")), 400),
    "an empty name": (fields((b"", b"y")), 400),
    "a line break": (fields((b"x", b"a\r\nb: c")), 400),
    "NUL": (fields((b"x", b"a\0b")), 400),
    "a control character": (fields((b"x", b"a\x01b")), 400),
    "white space before a value": (fields((b"x", b" y")), 400),
    "white space after a value": (fields((b"x", b"y\t")), 400),
    "connection": (fields((b"connection", b"close")), 400),
    "an upgrade": (fields((b"upgrade", b"websocket")), 400),
    "a coding": (fields((b"transfer-encoding", b"chunked")), 400),
    "te": (fields((b"te", b"gzip")), 400),
    "two lengths": (fields(*[(b"content-length", b"0")] * 2), 400),
    "a long path": (fields(path=b"/" + b"a" * 9000), 414),
    "101 headers": (fields(*[(b"x", b"y")] * 101), 431),
    "17 kB of headers": (fields(*[(b"x", b"y" * 1000)] * 17), 431),
}


async def test_a_malformed_request_is_refused_and_the_others_go_on(serve):
    async with serve() as server, http2_wire(server.url) as wire:
        beside = await wire.begin(b"/gate")
        await server.observer.began.wait()
        statuses = {
            name: (await wire.answer(await wire.begin_with(malformed))).status
            for name, (malformed, _) in MALFORMED.items()
        }
        assert statuses == {name: status for name, (_, status) in MALFORMED.items()}
        server.observer.gate.set()
        assert (await wire.answer(beside)).status == 200
    assert len(server.observer.seen) == 1


#: name: (bytes after the preface, the codes of GOAWAY that may answer them)
BROKEN = {
    "a frame of 16 MB": (b"\xff\xff\xff\0\0\0\0\0\1", {FRAME_SIZE}),
    "a frame of 16 KB and one": (b"\0\x40\x01\0\0\0\0\0\1", {FRAME_SIZE}),
    "a body without a head": (frame(DATA, 1, b"x"), {PROTOCOL_ERROR}),
    "a stream of the server": (frame(HEADERS, 2, GET_HEAD, 0x5), {PROTOCOL_ERROR}),
    "a head on stream 0": (frame(HEADERS, 0, GET_HEAD, 0x5), {PROTOCOL_ERROR}),
    "a continuation of nothing": (frame(CONTINUATION, 1, b"", 0x4), {PROTOCOL_ERROR}),
    "another frame in a head": (frame(HEADERS, 1, b"\x82") + frame(PING, 0, b"x" * 8), {1}),
    "a push": (frame(5, 1, b"\0\0\0\2" + GET_HEAD, 0x4), {PROTOCOL_ERROR}),
    "no HPACK": (frame(HEADERS, 1, b"\xff" * 20, 0x5), {9, PROTOCOL_ERROR}),
    "a ping of 7 bytes": (frame(PING, 0, b"x" * 7), {FRAME_SIZE, PROTOCOL_ERROR}),
    "settings of 5 bytes": (frame(SETTINGS, 0, b"x" * 5), {FRAME_SIZE, PROTOCOL_ERROR}),
    "a window of 4 GB": (frame(SETTINGS, 0, b"\0\4\xff\xff\xff\xff"), {3, PROTOCOL_ERROR}),
    "padding longer than its frame": (frame(DATA, 1, b"\xff", 0x8), {PROTOCOL_ERROR}),
    "a length that is not kept": (
        frame(HEADERS, 1, GET_HEAD + b"\x5c\x015", 0x4) + frame(DATA, 1, b"x", 0x1),
        {PROTOCOL_ERROR},
    ),
    "a million of zeros": (b"\0" * 1_000_000, {PROTOCOL_ERROR, CALM, FRAME_SIZE}),
    "a million of ones": (b"\xff" * 1_000_000, {FRAME_SIZE}),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_frames_that_break_the_protocol_end_one_connection(serve, name, caplog):
    data, codes = BROKEN[name]
    async with serve() as server:
        await still_serves(server)
        before = task_count()
        async with http2_wire(server.url) as wire:
            assert await wire.pour(data) in codes
        await still_serves(server)
        await becomes(task_count, before)
    assert "connection_failed" not in caplog.text


async def test_headers_that_unfold_to_megabytes_are_not_unfolded(serve):
    bomb = b"\x40\x01x\x7f\xc1\x1e" + b"y" * 4000  # one header of 4 kB, kept by the table ...
    async with serve() as server, http2_wire(server.url) as wire:
        # ... and named 12 000 times.
        assert await wire.pour(frame(HEADERS, 1, bomb + b"\xbe" * 12_000, 0x5)) == CALM
        await still_serves(server)


# -- floods ------------------------------------------------------------------------------------

#: What carries nothing, and costs a server something all the same.
FLOODS = {
    "pings (CVE-2019-9512)": frame(PING, 0, b"12345678"),
    "settings (CVE-2019-9515)": frame(SETTINGS),
    "settings that change windows": frame(SETTINGS, 0, b"\0\4\0\0\xff\xff"),
    "acknowledgements of nothing": frame(SETTINGS, 0, b"", 0x1),
    "priorities": frame(PRIORITY, 5, b"\0\0\0\0\1"),
    "windows": frame(WINDOW, 0, b"\0\0\0\1"),
    "unknown frames": frame(0xEE, 0, b"x"),
    "empty parts of a body (CVE-2019-9518)": frame(DATA, 1),
    "padding alone": frame(DATA, 1, b"\x01\0", 0x8),
    "parts of a byte": frame(DATA, 1, b"x"),
    "parts for a stream that is closed": frame(DATA, 3, b"x" * 300),
    "resets of an old stream": frame(RESET, 3, b"\0\0\0\x08"),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_ends_its_connection(serve, name):
    async with serve() as server, http2_wire(server.url) as wire:
        body = await wire.begin(method=b"POST", end=False)
        assert body == 1
        other = await wire.begin(b"/early")
        await wire.answer(other)
        assert await wire.pour(FLOODS[name] * 100, 100) == CALM
        await still_serves(server)


async def test_a_body_in_many_parts_is_no_flood(serve):
    async with serve() as server, http2_wire(server.url) as wire:
        stream = await wire.begin(method=b"POST", end=False)
        for _ in range(3000):
            await wire.upload(stream, b"x" * 256, end=False)
        await wire.upload(stream, b"end")
        assert len((await wire.answer(stream)).body) == 3000 * 256 + 3


async def test_many_requests_on_one_connection_are_no_flood(serve):
    async with serve() as server, http2_wire(server.url) as wire:
        for _ in range(50):
            streams = [await wire.begin(body=b"body") for _ in range(20)]
            for stream in streams:
                assert (await wire.answer(stream)).body == b"body"


async def test_refused_requests_without_end_are_a_flood(serve):
    async with serve() as server, http2_wire(server.url) as wire:
        many = GET_HEAD + b"\x90" * 300  # accept-encoding, 300 times: 431
        flood = [frame(HEADERS, number, many, 0x5) for number in range(1, 2001, 2)]
        assert await wire.pour(b"".join(flood)) == CALM
        await still_serves(server)


async def test_a_head_of_endless_continuations_is_cut_off(serve):
    """CVE-2024-27316 and its like."""
    async with serve() as server, http2_wire(server.url) as wire:
        await wire.send(frame(HEADERS, 1, GET_HEAD))
        assert await wire.pour(frame(CONTINUATION, 1, b"\0\1x\1y") * 10, 100) == PROTOCOL_ERROR
        async with http2_wire(server.url) as empty:
            await empty.send(frame(HEADERS, 1, GET_HEAD))
            code = await empty.pour(frame(CONTINUATION, 1) * 10, 1000)
            assert code in (PROTOCOL_ERROR, CALM)
        await still_serves(server)


@attrs.define
class Counting:
    """An application that counts how often it runs at one time, and waits for a gate."""

    gate: trio.Event = attrs.Factory(trio.Event)
    calls: int = 0
    running: int = 0
    peak: int = 0

    async def __call__(self, scope, receive, send):
        self.calls += 1
        self.running += 1
        self.peak = max(self.peak, self.running)
        if scope["path"] == "/gate":
            await self.gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        self.running -= 1


@pytest.mark.parametrize("path", [b"/gate", b"/"])
async def test_requests_that_are_reset_at_once_end_the_connection(serve, path):
    """CVE-2023-44487: what was reset counts for as long as it runs, and each has its price."""
    app = Counting()
    async with serve(app=app) as server, http2_wire(server.url) as wire:
        head = GET_HEAD.replace(b"\x84", b"\x04" + bytes([len(path)]) + path)
        streams = range(1, 20_001, 2)
        flood = [
            frame(HEADERS, number, head, 0x5) + frame(RESET, number, b"\0\0\0\x08")
            for number in streams
        ]
        assert await wire.pour(b"".join(flood)) == CALM
        assert app.calls <= 200
        assert app.peak <= http2.STREAMS
        app.gate.set()
        await still_serves(server)


@pytest.mark.parametrize("path", [b"/gate", b"/"])
async def test_requests_that_we_are_made_to_reset_end_the_connection(serve, path):
    """CVE-2025-8671: a window that overflows makes the server reset what it goes on to run."""
    app = Counting()
    async with serve(app=app) as server, http2_wire(server.url) as wire:
        head = GET_HEAD.replace(b"\x84", b"\x04" + bytes([len(path)]) + path)
        for number in range(1, 801, 2):
            with suppress(ConnectionError):
                overflow = frame(WINDOW, number, b"\x7f\xff\xff\xff")
                await wire.send(frame(HEADERS, number, head, 0x5) + overflow)
        assert await wire.pour(b"") == CALM
        assert app.calls <= 200
        assert app.peak <= http2.STREAMS
        app.gate.set()
        await still_serves(server)


async def test_slow_resets_do_not_run_more_than_the_limit_at_one_time(serve, monkeypatch):
    app = Counting()
    monkeypatch.setattr(http2, "STREAMS", 5)
    async with serve(app=app) as server, http2_wire(server.url) as wire:
        for _ in range(5):
            stream = await wire.begin(b"/gate")
            wire.h2.reset_stream(stream, CANCEL)
        assert (await wire.ask(b"/gate")).reset == REFUSED
        assert app.running == 5
        app.gate.set()
        while (await wire.ask()).status != 200:
            pass


async def test_more_streams_than_were_allowed_end_the_connection(serve, monkeypatch):
    monkeypatch.setattr(http2, "STREAMS", 5)
    async with serve() as server, http2_wire(server.url) as wire:
        for number in range(1, 13, 2):
            head = GET_HEAD.replace(b"\x84", b"\x04\x05/gate")
            await wire.send(frame(HEADERS, number, head, 0x5))
        assert await wire.pour(b"") == PROTOCOL_ERROR
        server.observer.gate.set()


async def test_streams_of_all_connections_are_bounded_like_connections(serve):
    async with (
        serve(limits={"connections": 3}) as server,
        http2_wire(server.url) as one,
        http2_wire(server.url) as two,
    ):
        first, second = await one.begin(b"/gate"), await one.begin(b"/gate")
        third = await two.begin(b"/gate")
        while len(server.observer.seen) < 3:
            await trio.sleep(0.01)
        assert (await two.ask()).reset == REFUSED
        server.observer.gate.set()
        for wire, stream in ((one, first), (one, second), (two, third)):
            assert (await wire.answer(stream)).status == 200
        assert (await two.ask()).status == 200


async def test_a_connection_counts_as_one(serve):
    async with serve(limits={"connections": 1}) as server, http2_wire(server.url) as wire:
        assert (await wire.ask()).status == 200
        with pytest.raises((trio.BrokenResourceError, OSError)):
            await open_tls(server.url, "h2")
        assert (await wire.ask()).status == 200


async def test_who_does_not_read_the_answers_to_its_pings_is_not_read_from(serve):
    """CVE-2019-9512, in the form that fills memory."""
    async with serve(limits={"write_seconds": 0.5}) as server:
        async with http2_wire(server.url) as wire:
            with pytest.raises(ConnectionError):
                # Slower than the allowance, so that it is the socket that fills.
                await fill(wire)
        await still_serves(server)


async def fill(wire):
    big = await wire.begin(b"/big")
    assert big == 1
    await wire.send(frame(SETTINGS, 0, b"\0\4\x7f\xff\xff\xff"))
    await wire.send(frame(WINDOW, 0, b"\x7f\xff\x00\x00"))
    while True:
        await wire.send(frame(PING, 0, b"12345678"))
        await trio.sleep(0.02)


# -- time --------------------------------------------------------------------------------------


async def test_an_idle_connection_is_told_and_ended_whatever_it_pings(serve):
    async with serve(limits={"keep_alive_seconds": 1.5}) as server:
        async with http2_wire(server.url, hello=False) as silent:
            await silent.rest()
        async with http2_wire(server.url) as wire:
            assert (await wire.ask()).status == 200

            async def ping():
                while not wire.closed:
                    await wire.send(frame(PING, 0, b"12345678"))
                    await trio.sleep(0.02)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ping_until_closed, ping)
                assert await wire.rest() == NO_ERROR
                nursery.cancel_scope.cancel()


async def ping_until_closed(ping):
    try:
        await ping()
    except ConnectionError:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    "begun",
    [
        b"\0",
        frame(HEADERS, 3, GET_HEAD, 0x5)[:-1],
        frame(HEADERS, 3, GET_HEAD),
        frame(HEADERS, 3, GET_HEAD) + frame(CONTINUATION, 3),
        frame(PING, 0, b"1234567x")[:-1],
    ],
    ids=["length", "head", "continued", "continued twice", "ping"],
)
async def test_a_frame_that_does_not_end_has_a_deadline_beside_what_runs(serve, begun):
    async with serve(limits={"head_seconds": 0.2}) as server, http2_wire(server.url) as wire:
        beside = await wire.begin(b"/gate")
        await server.observer.began.wait()
        await wire.send(begun)
        while wire.goaway is None:
            await wire.receive()
        server.observer.gate.set()
        # What had come before is answered.
        assert (await wire.answer(beside)).status == 200


async def test_half_a_preface_has_a_deadline(serve):
    async with serve(limits={"head_seconds": 0.2}) as server:
        async with http2_wire(server.url, hello=False) as wire:
            await wire.send(b"PRI * HTTP/2.0\r\n")
            await wire.rest()
        await still_serves(server)


@pytest.mark.parametrize("path", [b"/", b"/nothing"])
async def test_a_body_that_trickles_is_408(serve, path):
    async with serve(limits={"body_seconds": 0.3}) as server, http2_wire(server.url) as wire:
        stream = await wire.begin(path, method=b"POST", end=False)

        async def trickle():
            while not wire.answers[stream].ended:
                await wire.send(frame(DATA, stream, b"x"))
                await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trickle)
            assert (await wire.answer(stream)).status == 408
        assert (await wire.ask()).status == 200


async def test_an_application_has_all_its_time(serve):
    short = {"head_seconds": 0.5, "body_seconds": 0.5, "write_seconds": 0.5}
    async with serve(limits=short) as server, http2_wire(server.url) as wire:
        stream = await wire.begin(b"/gate")
        await server.observer.began.wait()
        await trio.sleep(1)
        server.observer.gate.set()
        assert (await wire.answer(stream)).status == 200


async def test_a_client_that_opens_no_window_loses_the_answer(serve):
    """CVE-2019-9511 and 9517."""
    async with serve(limits={"write_seconds": 0.3}) as server, http2_wire(server.url) as wire:
        wire.takes = False
        answer = await wire.ask(b"/big")
        assert answer.reset == CANCEL
        assert len(answer.body) < 100_000
        assert (await wire.ask()).status == 200


async def test_a_client_that_opens_it_by_single_bytes_loses_it_too(serve):
    async with serve(limits={"write_seconds": 0.3}) as server, http2_wire(server.url) as wire:
        wire.takes = False
        stream = await wire.begin(b"/big")

        async def dribble():
            while wire.answers[stream].reset is None:
                wire.h2.increment_flow_control_window(1)
                wire.h2.increment_flow_control_window(1, stream)
                await wire.send()
                await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dribble)
            assert (await wire.answer(stream)).reset == CANCEL


# -- the end of the server ---------------------------------------------------------------------


async def test_the_end_tells_idle_clients_and_finishes_what_runs(serve):
    async with serve() as server:
        async with http2_wire(server.url) as idle, http2_wire(server.url) as busy:
            assert (await idle.ask()).status == 200
            stream = await busy.begin(b"/gate")
            upload = await busy.begin(method=b"POST", end=False)
            await server.observer.began.wait()
            server.server.stop()
            assert await idle.rest() == NO_ERROR
            while busy.goaway is None:
                await busy.receive()
            assert (busy.goaway, busy.last_stream) == (NO_ERROR, upload)
            # What the client sends without having heard is refused, and may be sent elsewhere.
            assert (await busy.ask()).reset == REFUSED
            assert not server.server.ended.is_set()
            await busy.upload(upload, b"body")
            assert (await busy.answer(upload)).body == b"body"
            server.observer.gate.set()
            assert (await busy.answer(stream)).status == 200
            await busy.rest()
        await server.server.ended.wait()


@pytest.mark.parametrize("path", [b"/gate", b"/big"])
async def test_the_end_has_a_deadline_whatever_the_client_reads(serve, path):
    async with serve(graceful_seconds=0.3) as server, http2_wire(server.url) as wire:
        await wire.send(frame(SETTINGS, 0, b"\0\4\x7f\xff\xff\xff"))
        await wire.send(frame(WINDOW, 0, b"\x7f\xff\x00\x00"))
        await wire.begin(path)
        while not server.observer.seen:
            await trio.sleep(0.01)
        server.server.stop()
        with trio.fail_after(60):
            await server.server.ended.wait()


async def test_after_many_requests_a_connection_ends_in_order(serve):
    async with serve(limits={"keep_alive_requests": 3}) as server, http2_wire(server.url) as wire:
        for _ in range(3):
            assert (await wire.ask()).status == 200
        assert await wire.rest() == NO_ERROR


def test_canary_of_what_is_replaced_in_h2():
    """One connection would remember 65 536 closed streams for as long as it lasts."""
    protocol = http2._Protocol(http2._CONFIG)
    assert protocol._closed_streams._size_limit == http2._Protocol.MAX_CLOSED_STREAMS == 1000
    assert isinstance(protocol.local_settings, Settings)
    assert protocol.decoder.max_header_list_size == protocol.DEFAULT_MAX_HEADER_LIST_SIZE


async def test_a_new_certificate_offers_the_same(serve, files):
    async with serve() as server:
        server.server.prepare_certificate(*files)()
        await still_serves(server)


# -- the receiver ------------------------------------------------------------------------------


async def works(event):
    """A handler without effect."""


def over_tls(files, **keys):
    named = {key.replace("__", ":"): value for key, value in keys.items()}
    tls = {"Server:CertFile": files[0], "Server:KeyFile": files[1], "Server:Http2": True}
    return settings_for_tests({**tls, **named})


async def test_deliveries_are_handled_as_over_http_1_1(files):
    with trio.fail_after(60):
        async with running_app(registry(works), over_tls(files)) as app:
            async with httpx.AsyncClient(http2=True, verify=client_context(), timeout=60) as client:

                async def deliver(number):
                    delivery = app.sign("order.paid", webhook_id=f"m{number}")
                    answer = await client.post(
                        app.url, content=delivery.body, headers=delivery.headers
                    )
                    assert (answer.status_code, answer.content) == (200, b"{}")
                    assert answer.http_version == "HTTP/2"

                async with trio.open_nursery() as nursery:
                    for number in range(50):
                        nursery.start_soon(deliver, number)
                forged = await client.post(
                    app.url, content=b"{}", headers=app.sign("order.paid").headers
                )
                assert (forged.status_code, forged.content) == (400, b'{"error":"invalid webhook"}')
                assert (await client.get(app.url)).headers["allow"] == "POST"
            assert (await app.store.get("m49")).state == "done"


async def test_the_address_of_the_peer_counts_over_http_2(files):
    limited = over_tls(files, Webhooks__RateLimitPerMinute=1)
    elsewhere = over_tls(files, Webhooks__AllowedSourceIpRanges=["198.51.100.0/24"])
    with trio.fail_after(60):
        for keys, statuses in ((limited, [200, 429]), (elsewhere, [403, 403])):
            async with (
                running_app(registry(works), keys) as app,
                httpx.AsyncClient(http2=True, verify=client_context(), timeout=60) as client,
            ):
                assert [await status_of(app, client) for _ in statuses] == statuses


async def status_of(app, client):
    delivery = app.sign("order.paid")
    answer = await client.post(app.url, content=delivery.body, headers=delivery.headers)
    assert answer.http_version == "HTTP/2"
    return answer.status_code


async def test_a_payload_over_the_limit_is_413_while_it_streams(files):
    keys = over_tls(files, Webhooks__MaxPayloadBytes=50_000)
    with trio.fail_after(60):
        async with running_app(registry(works), keys) as app, http2_wire(app.url) as wire:
            headers = [(k.lower().encode(), v.encode()) for k, v in signed().headers.items()]
            # With a length it is refused before the body; without, as soon as it is too long.
            length = (b"content-length", b"60000")
            path = b"/hooks/sdk"
            declared = await wire.begin(path, *headers, length, method=b"POST", end=False)
            assert (await wire.answer(declared)).status == 413
            stream = await wire.begin(path, *headers, method=b"POST", end=False)
            await wire.upload(stream, b"x" * 60_000, end=False)
            assert (await wire.answer(stream)).status == 413


@pytest.mark.parametrize("keys", [{}, {"Server:Http2": False}])
async def test_it_is_off_unless_it_is_asked_for(files, keys):
    tls = {"Server:CertFile": files[0], "Server:KeyFile": files[1]}
    with trio.fail_after(60):
        async with (
            running_app(registry(works), settings_for_tests({**tls, **keys})) as app,
            httpx.AsyncClient(http2=True, verify=client_context(), timeout=60) as client,
        ):
            delivery = app.sign("order.paid")
            answer = await client.post(app.url, content=delivery.body, headers=delivery.headers)
            assert (answer.status_code, answer.http_version) == (200, "HTTP/1.1")


# -- anything at all ---------------------------------------------------------------------------

streams = st.sampled_from([0, 1, 3, 5, 7, 2**31 - 1])
payloads = st.one_of(
    st.binary(max_size=30),
    st.sampled_from(
        [
            GET_HEAD,
            GET_HEAD[:3],
            GET_HEAD + b"\x5c\x013",
            b"\0\0\0\0\1" + GET_HEAD,
            b"\0\0\0\x08",
            b"\x7f\xff\xff\xff",
            b"12345678",
            b"\0\4\0\0\0\0",
            b"\0\4\x7f\xff\xff\xff",
            b"\0\1\xff\xff\xff\xff",
            b"\0\5\0\xff\xff\xff",
            b"\0" * 300,
        ]
    ),
)
anything = st.builds(
    frame,
    st.sampled_from([DATA, HEADERS, HEADERS, *range(12)]),
    streams,
    payloads,
    st.sampled_from([0, 1, 4, 5, 5, 8, 0x20, 0x2D, 0xFF]),
)
#: Frames that fit where they stand more often than not, so that what follows them is looked at.
good = st.one_of(
    st.builds(lambda end, path: ("begin", end, path), st.booleans(), st.integers(0, 3)),
    st.builds(lambda data: (DATA, data, False), st.binary(max_size=300)),
    st.builds(lambda data, end: (DATA, data, end), st.binary(max_size=300), st.booleans()),
    st.just((WINDOW, b"\0\0\1\0", False)),
    st.just((WINDOW, b"\x7f\xff\xff\xff", False)),
    st.just((RESET, b"\0\0\0\x08", False)),
    st.just((PRIORITY, b"\0\0\0\0\1", False)),
)
PATHS = [b"/", b"/early", b"/stream", b"/after"]


@st.composite
def conversations(draw):
    """Frames of one connection and how they are cut."""
    stream, out = 1, []
    pieces = draw(st.lists(st.one_of(good, good, good, good, anything), min_size=3, max_size=15))
    for piece in [("begin", False, draw(st.integers(0, 3))), *pieces]:
        if isinstance(piece, bytes):
            out.append(piece)
        elif piece[0] == "begin":
            path = PATHS[piece[2]]
            head = GET_HEAD.replace(b"\x84", b"\x04" + bytes([len(path)]) + path)
            stream += 2
            out.append(frame(HEADERS, stream, head, 0x5 if piece[1] else 0x4))
        else:
            older = draw(st.sampled_from([0, 0, 0, 0, 0, 2]))
            out.append(frame(piece[0], max(1, stream - older), piece[1], int(piece[2])))
    return out, draw(st.sampled_from([1, 7, 40, 10_000]))


@settings(max_examples=int(os.environ.get("SDK_TEST_FUZZ_EXAMPLES", "300")) // 30)
@given(st.lists(conversations(), min_size=4, max_size=8))
def test_whatever_a_client_sends_the_server_serves_on(files, conversations):
    """Each in a connection of its own; none may fail otherwise than by the protocol."""

    async def converse(server, frames, size):
        data = b"".join(frames)
        async with http2_wire(server.url) as wire:
            with trio.move_on_after(0.1), suppress(trio.BrokenResourceError):
                for at in range(0, len(data), size):
                    await wire.stream.send_all(data[at : at + size])
                while not wire.closed:
                    await wire.receive()

    async def main():
        async with http_server(True, certificate=files, http2=True, patience=60) as server:
            await still_serves(server)
            before = task_count()
            async with trio.open_nursery() as nursery:
                for conversation in conversations:
                    nursery.start_soon(converse, server, *conversation)
            await still_serves(server)
            await becomes(task_count, before)

    with warnings_of_the_server() as warnings:
        trio.run(main)
    assert warnings == []


@contextmanager
def warnings_of_the_server():
    """What it logs that is more than information."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.__dict__.get("sdk"))
    logger = logging.getLogger("sdk_trio.server")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
