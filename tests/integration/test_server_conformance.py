"""HTTP/1.1 as both paths serve it: our own connections and hypercorn's, over real sockets."""

import gc
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from support.hostile_requests import BAD_CHUNKS, REFUSED, STRICTER, get, post, streamed
from support.http_serving import QUICK, Direct, http_server
from support.serving import RawWire, chunked, delivery_request, serving, signed
from support.waiting import until

from sdk_trio.server.connection import Http1ServerConnection
from sdk_trio.server.request import Http1Request

both = pytest.mark.parametrize("fast", [True, False], ids=["fast", "stock"])


def statuses(answers):
    """The statuses in a run of answers whose bodies contain no head."""
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]


# -- what an application is given --------------------------------------------------------------


@both
async def test_the_scope_is_the_same_on_both_paths(fast):
    async with http_server(fast) as server:
        with await server.connect() as wire:
            await wire.send(
                get(
                    b"/a%2Fb%20c/%C3%A9?x=%20&y",
                    b"X-One:  1\t ",
                    b"x-one: \xff2",
                    b"UPPER:",
                    method=b"PUT",
                )
            )
            assert (await wire.answer()).status == 200
            client = wire._stream.socket.getsockname()
            port = wire._stream.socket.getpeername()[1]
    scope = dict(server.observer.seen[0].scope)
    assert not scope.pop("extensions")
    assert scope == {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": "1.1",
        "method": "PUT",
        "scheme": "http",
        "path": "/a/b c/\xe9",
        "raw_path": b"/a%2Fb%20c/%C3%A9",
        "query_string": b"x=%20&y",
        "root_path": "",
        "headers": [(b"host", b"test"), (b"x-one", b"1"), (b"x-one", b"\xff2"), (b"upper", b"")],
        "client": client,
        "server": ("127.0.0.1", port),
        "state": {},
    }


@both
async def test_a_unix_socket_has_no_client_address(fast, tmp_path):
    path = tmp_path / "socket"
    async with http_server(fast, bind=f"unix:{path}") as server:
        stream = await trio.open_unix_socket(str(path))
        async with stream:
            await stream.send_all(get())
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
    scope = server.observer.seen[0].scope
    assert (scope["client"], scope["server"]) == (None, None)


@both
@pytest.mark.parametrize("size", [0, 1, 100, 65_536, 300_000])
async def test_bodies_arrive_whole_in_either_coding(fast, size):
    body = bytes(number % 251 for number in range(size))
    async with http_server(fast) as server:
        for data in (
            post(body),
            get(b"/", b"Transfer-Encoding: Chunked", method=b"POST") + chunked(body),
        ):
            answer = await server.exchange(data)
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"\r\n\r\n" + body)
    assert [seen.body for seen in server.observer.seen] == [body, body]


@both
async def test_a_request_in_single_bytes_is_the_same_request(fast):
    async with http_server(fast) as server:
        data = streamed(b"some body", b"/", b"X: y") + post(b"other") + get(b"/?z")
        whole = await server.exchange(data)
        pieces = await server.exchange(*(data[at : at + 1] for at in range(len(data))))
    assert whole == pieces
    seen = [one.reading for one in server.observer.seen]
    assert seen[:3] == seen[3:]
    assert [one.body for one in server.observer.seen[:3]] == [b"some body", b"other", b""]


@both
async def test_chunk_extensions_and_trailers_are_passed_over(fast):
    data = (
        get(b"/", b"Transfer-Encoding: chunked", method=b"POST")
        + b"3;name=value; other\r\nabc\r\n0A\r\n0123456789\r\n000;x\r\nX-Trailer: 1\r\nB:\r\n\r\n"
    )
    async with http_server(fast) as server:
        assert statuses(await server.exchange(data + get())) == [200, 200]
    first = server.observer.seen[0]
    assert first.body == b"abc0123456789"
    assert [name for name, _ in first.scope["headers"]] == [b"host", b"transfer-encoding"]


@both
async def test_pipelined_requests_are_answered_in_their_order(fast):
    async with http_server(fast) as server:
        paths = [b"/%d" % number for number in range(50)]
        answers = await server.exchange(b"".join(post(path, path) for path in paths))
    assert [part.rpartition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 ")[1:]] == paths
    assert [seen.scope["raw_path"] for seen in server.observer.seen] == paths


async def test_a_client_that_pipelines_does_not_delay_others():
    async with http_server(True) as server:
        with await server.connect() as eager, await server.connect() as other:
            for wire in (eager, other):
                await wire.send(get())
                await wire.answer()
            await eager.send(get(b"/eager") * 1000)
            await other.send(get(b"/other"))
            assert (await other.answer()).status == 200
            assert len(server.observer.seen) < 500


@both
async def test_pipelined_bytes_are_bounded(fast):
    """A client that sends requests while none is answered meets a full socket, not our memory."""
    async with http_server(fast) as server:
        with await server.connect() as wire:
            await wire.send(get(b"/gate"))
            await server.observer.began.wait()
            with trio.move_on_after(0.3) as scope:
                await wire.send(get(b"/ahead") * 1_000_000)
            assert scope.cancelled_caught
            assert server.observer.seen[-1].scope["path"] == "/gate"
            server.nursery.cancel_scope.cancel()


# -- answers -----------------------------------------------------------------------------------


@both
async def test_an_answer_of_unknown_length_is_chunked(fast):
    async with http_server(fast) as server:
        answer = await server.exchange(get(b"/stream"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head == b"HTTP/1.1 200 \r\nx-kind: stream\r\nTransfer-Encoding: chunked"
    assert body == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"


@both
async def test_http_1_0_gets_its_answer_until_the_close(fast):
    async with http_server(fast) as server:
        for path, body in ((b"/stream", b"onetwothree"), (b"/", b"")):
            answer = await server.exchange(
                get(path, b"Connection: keep-alive", version=b"1.0", host=b""), half_close=False
            )
            head, _, rest = answer.partition(b"\r\n\r\n")
            assert b"Connection: close" in head
            assert b"chunked" not in head
            assert rest == body
    assert {seen.scope["http_version"] for seen in server.observer.seen} == {"1.0"}


@both
async def test_head_has_the_headers_of_get_and_no_body(fast):
    async with http_server(fast) as server:
        answer = await server.exchange(
            get(b"/stream", method=b"HEAD") + get(b"/early", method=b"HEAD") + get(b"/early")
        )
    first, second, third, body = answer.split(b"\r\n\r\n")
    assert first == b"HTTP/1.1 200 \r\nx-kind: stream\r\nTransfer-Encoding: chunked"
    assert (second, third) == (b"HTTP/1.1 403 \r\ncontent-length: 2",) * 2
    assert body == b"no"


async def test_an_answer_that_is_given_again_is_that_of_its_own_request():
    constant = (200, ((b"content-length", b"2"),), b"ok")
    changing = (200, [(b"content-length", b"1"), (b"x", b"0")], b"o")

    async def respond(request):
        if request.path != "/changing":
            return constant
        changing[1][1] = (b"x", str(int(changing[1][1][1]) + 1).encode())
        return changing

    ok = b"HTTP/1.1 200 \r\ncontent-length: 2"
    async with http_server(True, app=Direct(respond)) as server:
        with await server.connect() as wire:
            for method, number in [
                *[(b"GET", 0)] * 3,
                *[(b"HEAD", 0)] * 3,
                *[(b"GET", 0)] * 2,
                (b"GET", 1),
                (b"GET", 2),
                (b"GET", 3),
                (b"GET", 0),
            ]:
                await wire.send(get(b"/changing" if number else b"/", method=method))
                if method == b"HEAD":
                    assert await wire.rest_of_head() == ok
                    continue
                answer = await wire.answer()
                assert answer.body == (b"o" if number else b"ok")
                assert answer.headers.get("x") == (str(number) if number else None)
                assert number or answer.head == ok
            await wire.send(get(b"/", b"Connection: close"))
            assert (await wire.answer()).headers["connection"] == "close"


@both
async def test_204_has_no_body(fast):
    async with http_server(fast) as server:
        assert statuses(await server.exchange(get(b"/no-content") + get())) == [204, 200]


@both
@pytest.mark.parametrize("path", [b"/fail", b"/nothing", b"/split-header"])
async def test_an_application_that_fails_is_an_empty_500_and_the_end(fast, path):
    async with http_server(fast) as server:
        # Hypercorn may reset a connection on which more was sent, so that its answer is lost.
        answer = await server.exchange(get(path) + get() * fast, half_close=False)
        assert statuses(answer) == [500]
        assert answer.endswith(b"\r\n\r\n")
        assert b"set-cookie" not in answer
        assert statuses(await server.exchange(get())) == [200]


@both
@pytest.mark.parametrize("path", [b"/fail-late", b"/too-much"])
async def test_an_answer_that_breaks_off_is_seen_as_incomplete(fast, path):
    # Hypercorn keeps the connection after such an answer until the server's end.
    async with http_server(fast, graceful_seconds=0.2) as server:
        answer = await server.exchange(get(path) + get(), half_close=False)
        body = answer.partition(b"\r\n\r\n")[2]
        assert b"HTTP/1.1" not in body
        assert body in (b"", b"half")
        assert statuses(await server.exchange(get())) == [200]


@both
@pytest.mark.parametrize("asks", ["client", "application"])
async def test_connection_close_ends_the_connection_after_the_answer(fast, asks):
    async with http_server(fast) as server:
        first = get(b"/close") if asks == "application" else get(b"/", b"Connection: x, Close")
        answer = await server.exchange(first, half_close=False)
    assert statuses(answer) == [200]
    assert b"connection: close" in answer.lower()


async def test_bytes_after_the_last_request_are_not_read():
    async with http_server(True) as server:
        for last in (get(b"/", b"Connection: close"), get(version=b"1.0"), get(b"/close")):
            answer = await server.exchange(last + get(b"/next"), half_close=False)
            assert statuses(answer) == [200]
    assert "/next" not in [seen.scope["path"] for seen in server.observer.seen]


@both
async def test_the_connection_ends_after_its_last_request(fast):
    async with http_server(
        fast, limits=msgspec.structs.replace(QUICK, keep_alive_requests=3)
    ) as server:
        answer = await server.exchange(get() * 10, half_close=False)
    assert len(statuses(answer)) in (3, 4)  # hypercorn announces it one request later
    assert b"connection: close" in answer.lower()


async def test_an_answer_that_was_given_before_announces_the_end_as_well():
    constant = (200, ((b"content-length", b"0"),), b"")

    async def respond(request):
        return constant

    limits = msgspec.structs.replace(QUICK, keep_alive_requests=5)
    async with http_server(True, app=Direct(respond), limits=limits) as server:
        answers = await server.exchange(get() * 7, half_close=False)
    assert statuses(answers) == [200] * 5
    assert answers.lower().count(b"connection: close") == 1


@both
async def test_a_client_that_reads_slowly_gets_all_of_a_long_answer(fast):
    async with http_server(fast) as server:
        answer = await server.exchange(get(b"/big"))
    assert len(answer.partition(b"\r\n\r\n")[2]) == 20_000_000


# -- Expect: 100-continue ----------------------------------------------------------------------


@both
async def test_100_continue_is_sent_before_the_body_is_waited_for(fast):
    async with http_server(fast) as server:
        with await server.connect() as wire:
            await wire.send(post(b"", b"/", b"Expect: 100-Continue", length=4))
            assert (await wire.rest_of_head()).startswith(b"HTTP/1.1 100")
            await wire.send(b"body")
            assert (await wire.answer()).status == 200


async def test_100_continue_is_not_sent_when_the_application_does_not_ask_for_the_body():
    async with http_server(True) as server:
        with await server.connect() as wire:
            await wire.send(post(b"", b"/early", b"Expect: 100-continue", length=4))
            answer = await wire.rest()
    assert statuses(answer) == [403]
    assert b"Connection: close" in answer


@both
async def test_no_100_is_sent_to_http_1_0(fast):
    async with http_server(fast) as server:
        head = b"POST / HTTP/1.0\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
        assert statuses(await server.exchange(head + b"body")) == [200]


async def test_an_interim_answer_comes_before_the_answer():
    async with http_server(True) as server:
        answer = await server.exchange(get(b"/hints"))
        assert statuses(answer) == [103, 200]
        assert b"link: </style.css>" in answer
        assert statuses(await server.exchange(get(b"/hints", version=b"1.0"))) == [200]


# -- the client leaves -------------------------------------------------------------------------


@both
async def test_a_client_that_stops_sending_still_gets_its_answer(fast):
    async with http_server(fast) as server:
        assert statuses(await server.exchange(get(b"/watch"))) == [200]
    assert server.observer.received == [{"type": "http.disconnect"}]


@both
@pytest.mark.parametrize("reset", [True, False])
async def test_a_client_that_leaves_is_seen_by_who_asks(fast, reset):
    async with http_server(fast) as server:
        with await server.connect() as wire:
            await wire.send(get(b"/watch"))
            await server.observer.began.wait()
            if reset:
                linger = b"\1\0\0\0\0\0\0\0"
                wire._stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        await until(lambda: server.observer.received)
        assert server.observer.received == [{"type": "http.disconnect"}]
        assert statuses(await server.exchange(get())) == [200]


@both
@pytest.mark.parametrize("data", [post(b"abc", length=4), streamed(b"abcdef")[:-4], b"GET / HT"])
async def test_a_request_that_breaks_off_is_no_request(fast, data):
    async with http_server(fast) as server:
        answer = await server.exchange(data)
        assert statuses(answer) in ([], [400])
    assert server.observer.seen == []


@both
async def test_after_its_answer_an_application_receives_the_end(fast):
    async with http_server(fast) as server:
        with await server.connect() as wire:
            for _ in range(2):
                await wire.send(get(b"/after"))
                assert (await wire.answer()).status == 200
    assert server.observer.received == [{"type": "http.disconnect"}] * 2


@both
async def test_receiving_while_answering_leaves_the_connection_in_order(fast):
    async with http_server(fast) as server:
        with await server.connect() as wire:
            for _ in range(3):
                await wire.send(get(b"/both"))
                assert (await wire.answer()).status == 200


async def test_a_task_that_is_left_behind_does_not_take_the_next_request():
    left = []

    async def app(scope, receive, send):
        async def waits():
            left.append((scope["path"], await receive()))

        while (await receive())["more_body"]:
            pass
        trio.lowlevel.spawn_system_task(waits)
        await trio.sleep(0.01)  # the sweep never lets all tasks be blocked
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    async with http_server(True, app=app) as server:
        with await server.connect() as wire:
            for path in (b"/1", b"/2"):
                await wire.send(get(path))
                assert (await wire.answer()).status == 204
        await until(lambda: len(left) >= 2)
        assert [path for path, _ in left] == ["/1", "/2"]
        assert {message["type"] for _, message in left} == {"http.disconnect"}


# -- refusals ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", REFUSED)
async def test_ambiguous_requests_are_refused(fast, name):
    data, expected = REFUSED[name]
    async with http_server(fast) as server:
        answer = await server.exchange(data + get(b"/smuggled"), half_close=False)
        (status,) = statuses(answer)
    assert status == expected or status in (expected if isinstance(expected, tuple) else ())
    assert b"connection: close" in answer.lower()
    assert server.observer.seen == []


@both
@pytest.mark.parametrize("name", BAD_CHUNKS)
async def test_a_body_whose_chunks_are_malformed_is_refused(fast, name):
    head = get(b"/", b"Transfer-Encoding: chunked", method=b"POST")
    async with http_server(fast) as server:
        answer = await server.exchange(head + BAD_CHUNKS[name] + get(b"/smuggled"))
    assert statuses(answer) in ([], [400])
    assert server.observer.seen == []


@both
async def test_an_answer_before_the_end_of_the_body_does_not_make_a_request_of_it(fast):
    async with http_server(fast) as server:
        inner = get(b"/smuggled")
        for data in (
            post(inner, b"/early", length=1000),
            streamed(b"x" * 100_000, b"/early")[:-5] + inner,
        ):
            answer = await server.exchange(data, half_close=False)
            assert statuses(answer) == [403]
        skipped = await server.exchange(post(inner, b"/early") + get(b"/next"))
        assert statuses(skipped) in ([403], [403, 200])
    assert [seen.scope["path"] for seen in server.observer.seen] in ([], ["/next"])


@pytest.mark.parametrize("name", STRICTER)
async def test_the_fast_path_is_stricter(name):
    data, status = STRICTER[name]
    async with http_server(True) as server:
        answer = await server.exchange(data + get(b"/smuggled"), half_close=False)
    assert statuses(answer) == [status]
    assert server.observer.seen == []


@pytest.mark.parametrize(
    ("endless", "status"),
    [
        (get()[:-2] + (b"X: " + b"y" * 100 + b"\r\n") * 1000, 431),
        (b"GET /" + b"a" * 100_000, 414),
        (streamed(b"")[:-2] + b"X: yyyyyyyyyyyyyyy\r\n" * 1000, 431),
    ],
    ids=["headers", "line", "trailers"],
)
async def test_endless_requests_are_refused_at_their_limit(endless, status):
    async with http_server(True) as server:
        assert statuses(await server.exchange(endless, half_close=False)) == [status]


async def test_a_body_that_trickles_is_408_however_steadily():
    async with http_server(True, limits=msgspec.structs.replace(QUICK, body_seconds=0.2)) as server:
        with await server.connect() as wire:
            await wire.send(post(b"", length=1000))
            for _ in range(200):
                await trio.sleep(0.01)
                await wire.send_what_is_taken(b"x")
                if wire._stream.socket.is_readable():
                    break
            assert statuses(await wire.rest()) == [408]


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\n\n", b"GET / HTTP/1.1\r\nHost: test\n"])
async def test_a_line_feed_alone_is_refused_at_once_and_not_waited_upon(line):
    async with http_server(True) as server:
        assert statuses(await server.exchange(line, half_close=False)) == [400]


@pytest.mark.parametrize(
    "body",
    [
        b"3;a\x01b\r\nabc\r\n0\r\n\r\n",
        b"0" * 16 + b"3\r\nabc\r\n0\r\n\r\n",
        b"3;" + b"x" * 300 + b"\r\nabc\r\n0\r\n\r\n",
        b"3;" + b"x" * 100_000,
        b"3\r\nabc\r\n0\r\nX: a\r\n b\r\n\r\n",
        b"0\r\n" + b"X: yyyyyyyyyyyyyy\r\n" * 1000,
        b"0\r\n\n",
        b"3 \r\nabc\r\n0\r\n\r\n",
        b"3 ;a\r\nabc\r\n0\r\n\r\n",
        b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n",
        b"10\r\n0123456789abcdef\r\n" * 20_000 + b"0\r\n\r\n",
        b"a;%b\r\n0123456789\r\n" % (b"x" * 250) * 1000 + b"0\r\n\r\n",
    ],
    ids=[
        *["control", "digits", "extension", "endless", "folded", "trailers", "line feed"],
        *[
            "white space after the size",
            "white space before an extension",
            "bytes one by one",
            "tiny chunks",
            "extensions",
        ],
    ],
)
async def test_the_fast_path_is_stricter_about_chunks(body):
    head = get(b"/", b"Transfer-Encoding: chunked", method=b"POST")
    async with http_server(True) as server:
        answer = await server.exchange(head + body + get(b"/smuggled"), half_close=False)
    assert statuses(answer) in ([400], [431])
    assert server.observer.seen == []


# -- time --------------------------------------------------------------------------------------


@both
async def test_an_idle_connection_is_closed_without_an_answer(fast):
    limits = msgspec.structs.replace(QUICK, keep_alive_seconds=0.5, first_byte_seconds=0.5)
    async with http_server(fast, limits=limits) as server:
        with await server.connect() as wire:
            assert await wire.rest() == b""
        with await server.connect() as wire:
            await wire.send(get())
            assert (await wire.answer()).status == 200
            assert await wire.rest() == b""


@pytest.mark.parametrize("sent", [b"GET", get()[:-1], get() + b"G"], ids=["line", "head", "second"])
async def test_slow_headers_are_408_however_they_trickle(sent):
    async with http_server(True, limits=msgspec.structs.replace(QUICK, head_seconds=0.2)) as server:
        with await server.connect() as wire:
            await wire.send(sent)
            for _ in range(100):
                await trio.sleep(0.01)
                await wire.send_what_is_taken(b"" if sent.endswith(b"\r") else b"x")
                if wire._stream.socket.is_readable():
                    break
            assert statuses(await wire.rest())[-1] == 408


@pytest.mark.parametrize("path", [b"/", b"/nothing"])
async def test_a_slow_body_is_408_when_the_application_has_no_answer(path):
    async with http_server(True, limits=msgspec.structs.replace(QUICK, body_seconds=0.1)) as server:
        with await server.connect() as wire:
            await wire.send(post(b"a", path, length=10))
            assert statuses(await wire.rest()) == [408]
    assert server.observer.received == [{"type": "http.disconnect"}]


async def test_an_application_has_all_its_time():
    quick = msgspec.structs.replace(
        QUICK, head_seconds=0.5, body_seconds=0.5, keep_alive_seconds=0.5, write_seconds=0.5
    )
    async with http_server(True, limits=quick) as server:
        with await server.connect() as wire:
            await wire.send(get(b"/gate"))
            await server.observer.began.wait()
            await trio.sleep(1)
            server.observer.gate.set()
            assert (await wire.answer()).status == 200


async def test_a_client_that_does_not_read_is_cut_off():
    async with http_server(
        True, limits=msgspec.structs.replace(QUICK, write_seconds=0.1)
    ) as server:
        with await server.connect() as wire:
            await wire.send(get(b"/big"))
            await trio.sleep(0.4)
            assert len(await wire.rest()) < 20_000_000


async def cancels_its_own_scope(scope, receive, send):
    with trio.move_on_after(0.1):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 20_000_000})


async def lets_its_deadline_pass(request):
    with request.expiry.move_on_after(0.01) as expiry, trio.CancelScope(shield=True):
        await trio.sleep(0.1)
    assert expiry.cancel_called
    return 200, [(b"content-length", b"20000000")], b"x" * 20_000_000


@pytest.mark.parametrize("app", [cancels_its_own_scope, Direct(lets_its_deadline_pass)])
async def test_an_answer_that_is_cancelled_halfway_is_the_last_one(app):
    async with http_server(True, app=app) as server:
        with await server.connect() as wire:
            last = b"GET /last HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
            await wire.send(get(b"/big") + last)
            await trio.sleep(0.3)  # reading meanwhile would take all of the answer
            received = await wire.rest()
    assert 0 < len(received) < 20_000_000
    assert received.count(b"HTTP/1.1 ") == 1


async def test_a_client_answered_early_may_continue_to_send_for_a_moment():
    """A reset would reach the client before it has read its answer."""
    async with http_server(True, limits=msgspec.structs.replace(QUICK, linger_seconds=2)) as server:
        with await server.connect() as wire:
            await wire.send(post(b"", b"/early", length=100_000))
            assert (await wire.answer()).status == 403
            for _ in range(20):
                await wire.send(b"x" * 1000)
                await trio.sleep(0.002)
            assert await wire.rest() == b""


async def trickle(wire):
    while True:
        await wire.send(b"x" * 1000)
        await trio.sleep(0.01)


async def test_a_refused_client_that_keeps_sending_is_disconnected():
    limits = msgspec.structs.replace(QUICK, linger_seconds=0.2)
    async with http_server(True, limits=limits) as server:
        with await server.connect() as wire:
            await wire.send(b"garbage\r\n\r\n")
            with pytest.raises(ConnectionError):
                await trickle(wire)


# -- the server --------------------------------------------------------------------------------


@both
async def test_connections_over_the_limit_get_503(fast):
    async with http_server(fast, limits=msgspec.structs.replace(QUICK, connections=2)) as server:
        with await server.connect() as one, await server.connect() as two:
            for wire in (one, two):
                await wire.send(get(b"/gate"))
                await server.observer.began.wait()
                server.observer.began = trio.Event()
            with await server.connect() as three:
                await three.send_what_is_taken(get())
                answer = await three.rest()
                assert statuses(answer) == [503]
                assert b"retry-after: 1" in answer
                assert answer.endswith(b'{"error":"temporarily unavailable"}')
            server.observer.gate.set()
            assert (await one.answer()).status == 200
        # Ended connections free their slots.
        while statuses(await server.exchange(get())) != [200]:
            await trio.sleep(0.01)


@both
async def test_the_end_closes_idle_connections_and_finishes_what_runs(fast):
    async with http_server(fast) as server:
        with await server.connect() as idle, await server.connect() as busy:
            await idle.send(get())
            assert (await idle.answer()).status == 200
            await busy.send(get(b"/gate"))
            await server.observer.began.wait()
            server.server.stop()
            assert await idle.rest() == b""
            with pytest.raises(OSError, match=r"all attempts to connect"):
                await server.connect()
            assert not server.server.ended.is_set()
            server.observer.gate.set()
            assert statuses(await busy.rest()) == [200]
        await server.server.ended.wait()


@both
async def test_the_end_has_a_deadline(fast):
    async with http_server(fast, graceful_seconds=0.2) as server:
        with await server.connect() as busy:
            await busy.send(get(b"/gate"))
            await server.observer.began.wait()
            begun = trio.current_time()
            server.server.stop()
            assert await busy.rest() == b""
            await server.server.ended.wait()
            assert trio.current_time() - begun > 0.15


@both
async def test_a_request_behind_the_last_answer_does_not_hold_up_the_end(fast):
    async with http_server(fast, graceful_seconds=3600) as server:
        with await server.connect() as busy:
            await busy.send(get(b"/gate") + get())
            await server.observer.began.wait()
            server.server.stop()
            await trio.testing.wait_all_tasks_blocked()
            server.observer.gate.set()
            # Whether the second one is begun depends on whether it had been read.
            assert statuses(await busy.rest()) in ([200], [200, 200])
            await server.server.ended.wait()


async def test_the_last_answer_announces_the_end():
    async with http_server(True) as server:
        with await server.connect() as busy:
            await busy.send(get(b"/gate") + get())
            await server.observer.began.wait()
            server.server.stop()
            await trio.testing.wait_all_tasks_blocked()
            server.observer.gate.set()
            answer = await busy.rest()
    assert statuses(answer) == [200]
    assert b"Connection: close" in answer


@both
@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
async def test_a_change_to_another_protocol_is_passed_over(fast, protocol):
    """RFC 9110, 7.8: answered in HTTP/1.1, as if the header were not there."""
    async with http_server(fast) as server:
        upgrade = post(b"body", b"/upgrade", b"Connection: upgrade", b"Upgrade: " + protocol)
        assert statuses(await server.exchange(get(b"/first") + upgrade + post(b"x"))) == [200] * 3
    seen = server.observer.seen
    assert [one.scope["path"] for one in seen] == ["/first", "/upgrade", "/"]
    assert [one.body for one in seen] == [b"", b"body", b"x"]
    assert b"upgrade" not in dict(seen[1].scope["headers"])


async def test_hypercorn_is_not_loaded_where_it_does_not_serve():
    """For any first bytes: an Upgrade, the preface of HTTP/2, noise."""
    program = (
        "import sys, trio\n"
        "from support.hostile_requests import get\n"
        "from support.http_serving import http_server\n"
        "async def main():\n"
        "    async with http_server(True) as server:\n"
        "        await server.exchange(get(b'/', b'Connection: upgrade', b'Upgrade: h2c'))\n"
        "        await server.exchange(b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n')\n"
        "    assert 'hypercorn' not in sys.modules\n"
        "trio.run(main)\n"
    )
    await trio.run_process([sys.executable, "-c", program], cwd=Path(__file__).parent.parent)


@both
async def test_an_absolute_target_is_read_as_its_path_and_names_the_host(fast):
    """RFC 9112, 3.2.2: a server must accept it, and must ignore the Host header then."""
    async with http_server(fast) as server:
        for target in (b"http://other:80/a?b", b"HTTPS://other", b"http://other?b"):
            assert statuses(await server.exchange(get(target))) == [200]
    seen = [(one.scope["path"], one.scope["query_string"]) for one in server.observer.seen]
    assert seen == [("/a", b"b"), ("/", b""), ("/", b"b")]
    hosts = [dict(one.scope["headers"])[b"host"] for one in server.observer.seen]
    assert hosts == [b"other:80", b"other", b"other"]


@both
async def test_a_later_minor_version_is_read_as_1_1(fast):
    async with http_server(fast) as server:
        data = get(b"/", version=b"1.2") + post(b"body", b"/close").replace(b"1.1", b"1.9")
        assert statuses(await server.exchange(data, half_close=False)) == [200, 200]
        assert statuses(await server.exchange(get(version=b"1.2", host=b""))) == [400]
    assert {one.scope["http_version"] for one in server.observer.seen} == {"1.1"}


@pytest.mark.parametrize("pieces", [1, 1000])
async def test_one_empty_line_before_a_request_is_ignored(pieces):
    data = b"\r\n" + post(b"one") + b"\r\n" + get(b"/two") + b"\r\n"
    size = len(data) // pieces + 1
    async with http_server(True) as server:
        answer = await server.exchange(*(data[at : at + size] for at in range(0, len(data), size)))
        assert statuses(answer) == [200, 200]
    assert [one.scope["path"] for one in server.observer.seen] == ["/", "/two"]


async def test_an_empty_line_gives_no_more_time_for_what_follows():
    async with http_server(True, limits=msgspec.structs.replace(QUICK, head_seconds=0.2)) as server:
        with await server.connect() as wire:
            await wire.send(b"\r\nGET / HT")
            assert statuses(await wire.rest()) == [408]


@pytest.mark.parametrize(
    ("data", "status", "body"),
    [
        (b"no request\r\n\r\n", 400, b'{"error":"bad request"}'),
        (get(version=b"2.0"), 505, b'{"error":"HTTP version not supported"}'),
        (get(b"/" + b"a" * 9000), 414, b'{"error":"request line too long"}'),
    ],
)
async def test_a_refusal_has_a_body_of_a_known_form(data, status, body):
    async with http_server(True) as server:
        answer = await server.exchange(data, half_close=False)
    head, _, content = answer.partition(b"\r\n\r\n")
    assert (statuses(answer), content) == ([status], body)
    assert b"content-length: %d\r\n" % len(body) in head
    assert b"content-type: application/json\r\n" in head


# -- places ------------------------------------------------------------------------------------


@both
async def test_a_new_connection_that_sends_nothing_is_closed_soon(fast):
    limits = msgspec.structs.replace(QUICK, first_byte_seconds=0.2, keep_alive_seconds=3600)
    async with http_server(fast, limits=limits) as server:
        with await server.connect() as used, await server.connect() as silent:
            await used.send(get())
            assert (await used.answer()).status == 200
            assert await silent.rest() == b""
            await trio.sleep(0.4)
            await used.send(get())
            assert (await used.answer()).status == 200


@both
@pytest.mark.parametrize("ahead", [True, False], ids=["sent-ahead", "afterwards"])
async def test_a_second_head_of_which_nothing_more_comes_has_its_time_and_no_more(fast, ahead):
    limits = msgspec.structs.replace(QUICK, head_seconds=0.3, keep_alive_seconds=3600)
    async with http_server(fast, limits=limits) as server:
        with await server.connect() as wire:
            begun = b"GET / HT"
            await wire.send(get() + (begun if ahead else b""))
            assert (await wire.answer()).status == 200
            if not ahead:
                await wire.send(begun)
            await wire.rest()  # for an hour, if it were taken for an idle connection


@both
async def test_the_head_of_a_second_request_has_its_time_as_well(fast):
    limits = msgspec.structs.replace(QUICK, head_seconds=0.3, keep_alive_seconds=3600)
    async with http_server(fast, limits=limits) as server:
        with await server.connect() as wire:
            await wire.send(get())
            assert (await wire.answer()).status == 200
            rest = []

            async def read():
                rest.append(await wire.rest())
                nursery.cancel_scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                for letter in get()[:-2] + b"X: " + b"y" * 10_000:
                    await wire.send_what_is_taken(bytes([letter]))
                    await trio.sleep(0.01)
            assert statuses(rest[0]) == ([408] if fast else [])


@both
async def test_connections_of_one_source_are_bounded(fast):
    limits = msgspec.structs.replace(QUICK, connections_per_source=2)
    async with http_server(fast, limits=limits, source_of=lambda host: host) as server:
        with await server.connect() as one, await server.connect() as two:
            for wire in (one, two):
                await wire.send(get())
                assert (await wire.answer()).status == 200
            with await server.connect() as three:
                assert statuses(await three.rest()) == [503]
            with await server.connect(source="127.0.0.2") as other:
                await other.send(get())
                assert (await other.answer()).status == 200
        # Ended connections free their slots.
        while statuses(await server.exchange(get())) != [200]:
            await trio.sleep(0.01)


async def test_a_new_connection_evicts_an_idle_one():
    async with http_server(True, limits=msgspec.structs.replace(QUICK, connections=3)) as server:
        with (
            await server.connect() as busy,
            await server.connect() as first,
            await server.connect() as second,
        ):
            await busy.send(get(b"/gate"))
            await server.observer.began.wait()
            for wire in (first, second):
                await wire.send(get())
                assert (await wire.answer()).status == 200
                await trio.sleep(0.05)
            for _ in range(2):  # the first replaces the connection that has been idle longest
                with await server.connect() as wire:
                    await wire.send(get())
                    assert (await wire.answer()).status == 200
                    assert await first.rest() == b""
                # Until its end is noticed, another one would have to give way.
                await until(lambda: not server.server._slots.is_full)
            server.observer.gate.set()
            assert (await busy.answer()).status == 200
            await second.send(get())
            assert (await second.answer()).status == 200


#: Beginnings of requests that a client leaves unfinished.
UNFINISHED = {
    "nothing": b"",
    "one byte": b"G",
    "a head": get()[:-2],
    "a second head": get() + get()[:-2],
    "a body": post(b"x" * 91, length=100),
    "chunks": get(b"/", b"Transfer-Encoding: chunked", method=b"POST") + b"5\r\nab",
}


async def hold(stack, server, source, data, count):
    """Open connections that send ``data``, and return them once the server waits for the rest."""
    wires = []
    for _ in range(count):
        wires.append(stack.enter_context(await server.connect(source)))
        await wires[-1].send_what_is_taken(data)
        if data.startswith(get()):
            assert (await wires[-1].answer()).status == 200
    await reached(server, source, waits_for(data), count)
    return wires


def waits_for(data):
    if data == get(b"/gate"):
        return "the application"
    return "a request" if not data else "the client"


async def reached(server, source, what, count):
    counted = None if source == PROXY else source

    def waits():
        slots = server.server._slots
        phases = [
            "a request"
            if connection.idle_since is not None
            else "the application"
            if connection.unfinished_since is None
            else "the client"
            for connection, owner in slots._open.items()
            if owner == counted
        ]
        return phases.count(what) >= count

    await until(waits)


PROXY = "127.0.0.9"


def counting(**limits):
    return {
        "limits": msgspec.structs.replace(QUICK, **limits),
        "source_of": lambda host: None if host == PROXY else host,
    }


@both
@pytest.mark.parametrize("kind", UNFINISHED)
async def test_the_oldest_unfinished_request_of_the_largest_source_is_evicted(fast, kind):
    async with http_server(fast, **counting(connections=7)) as server:
        with ExitStack() as stack:
            many = await hold(stack, server, "127.0.0.2", UNFINISHED[kind], 3)
            few = await hold(stack, server, "127.0.0.3", UNFINISHED["a head"], 2)
            busy = await hold(stack, server, "127.0.0.4", get(b"/gate"), 2)
            for wire in many[:2]:
                with await server.connect("127.0.0.5") as other:
                    await other.send(get())
                    assert (await other.answer()).status == 200
                    ended = statuses(await wire.rest())
                    assert ended == ([] if kind == "nothing" or not fast else [503])
                await until(lambda: not server.server._slots.is_full)
                await hold(stack, server, "127.0.0.6", b"G", 1)
            server.observer.gate.set()
            for wire in busy:
                assert (await wire.answer()).status == 200
            for wire in few:
                await wire.send(b"\r\n")
                assert (await wire.answer()).status == 200


@both
async def test_one_source_gets_at_most_half_of_the_slots(fast):
    async with http_server(fast, **counting(connections=6)) as server:
        with ExitStack() as stack:
            held = await hold(stack, server, "127.0.0.2", b"G", 3)
            with await server.connect("127.0.0.2") as one_more:
                assert statuses(await one_more.rest()) == [503]
            with await server.connect("127.0.0.3") as other:
                await other.send(get())
                assert (await other.answer()).status == 200
            await held[0].send(get()[1:])
            assert (await held[0].answer()).status == 200


@both
async def test_a_source_pushes_out_no_request_of_a_smaller_one_nor_of_a_proxy(fast):
    async with http_server(fast, **counting(connections=6)) as server:
        with ExitStack() as stack:
            await hold(stack, server, "127.0.0.2", get(b"/gate"), 2)
            smaller = await hold(stack, server, "127.0.0.3", b"G", 1)
            of_a_proxy = await hold(stack, server, PROXY, b"G", 3)
            with await server.connect("127.0.0.2") as wire:
                assert statuses(await wire.rest()) == [503]
            for wire in (*smaller, *of_a_proxy):
                await wire.send(get()[1:])
                assert (await wire.answer()).status == 200
            # Those of the proxy give way to others of it.
            for wire in (*smaller, *of_a_proxy):
                await wire.send(b"G")
            await reached(server, PROXY, "the client", 3)
            # Those that may end are listed once in a sweep.
            await trio.sleep(2 * QUICK.sweep_seconds)
            with await server.connect(PROXY) as wire:
                await wire.send(get())
                assert (await wire.answer()).status == 200
            server.observer.gate.set()


async def test_a_client_that_reads_no_response_is_evicted():
    async with http_server(True, **counting(connections=2)) as server:
        with ExitStack() as stack:
            slow = await hold(stack, server, "127.0.0.2", get(b"/big"), 1)
            await hold(stack, server, "127.0.0.3", get(b"/gate"), 1)
            with await server.connect("127.0.0.4") as other:
                await other.send(get())
                assert (await other.answer()).status == 200
            assert len(await slow[0].rest()) < 20_000_000
            server.observer.gate.set()


async def pipeline_without_end(wire):
    async def read():
        while await wire._stream.receive_some():
            pass

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            while True:
                await wire.send(get(b"/missing") * 2000)
    except* (ConnectionError, trio.BrokenResourceError):
        pass  # it gave way


async def test_sources_that_pipeline_endlessly_are_evicted():
    async def respond(request):
        return 404, ((b"content-length", b"0"),), b""

    app = Direct(respond)
    async with http_server(True, app=app, **counting(connections=6)) as server:
        with ExitStack() as stack:
            async with trio.open_nursery() as nursery:
                for source in ["127.0.0.2", "127.0.0.3"] * 3:
                    wire = stack.enter_context(await server.connect(source))
                    nursery.start_soon(pipeline_without_end, wire)
                await until(lambda: server.server._slots.is_full)
                await until(lambda: all(it.buffer for it in server.server._slots._open))
                with await server.connect("127.0.0.4") as other:
                    await other.send(get())
                    assert (await other.answer()).status == 404
                nursery.cancel_scope.cancel()


@both
async def test_a_source_may_evict_its_own_connections(fast):
    options = counting(connections=6, source_evicts_own=True)
    async with http_server(fast, **options) as server:
        with ExitStack() as stack:
            await hold(stack, server, "127.0.0.2", b"G", 2)
            await hold(stack, server, "127.0.0.2", get(b"/gate"), 1)
            for _ in range(8):
                with await server.connect("127.0.0.2") as wire:
                    await wire.send(get())
                    assert (await wire.answer()).status == 200
            server.observer.gate.set()


def names_of_tasks():
    tasks, names = [trio.lowlevel.current_root_task()], []
    while tasks:
        task = tasks.pop()
        names.append(task.name)
        for nursery in task.child_nurseries:
            tasks.extend(nursery.child_tasks)
    return " ".join(names)


@both
async def test_the_setting_chooses_the_path(fast):
    async with serving(Server__FastPath=fast) as app:
        with await RawWire.connect(app.url) as wire:
            await wire.send(delivery_request(signed()))
            assert (await wire.answer()).status == 200
            assert ("hypercorn" in names_of_tasks()) == (not fast)
            assert ("Acceptor._serve" in names_of_tasks()) == fast


async def test_a_connection_costs_one_task_and_a_request_none():
    async with http_server(True) as server:
        with await server.connect() as wire:
            await wire.send(get())
            await wire.answer()

            class Counter(trio.abc.Instrument):
                spawned = steps = 0

                def task_spawned(self, task):
                    self.spawned += 1

                def before_task_step(self, task):
                    if "Acceptor._serve" in task.name:
                        self.steps += 1

            counter = Counter()
            trio.lowlevel.add_instrument(counter)
            for _ in range(20):
                await wire.send(post(b"x" * 2000))
                assert (await wire.answer()).status == 200
            trio.lowlevel.remove_instrument(counter)
    assert counter.spawned == 0
    assert counter.steps == 20


async def test_a_connection_that_has_ended_leaves_nothing_to_the_garbage_collector():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    def left():
        return sum(
            issubclass(type(found), Http1ServerConnection | Http1Request)
            for found in gc.get_objects()
        )

    async with http_server(True, app=app) as server:
        gc.collect()
        gc.disable()
        try:
            before = left()  # what an earlier test of this process still holds
            assert b" 204 " in await server.exchange(get(b"/"))
            await until(lambda: left() <= before)
        finally:
            gc.enable()
