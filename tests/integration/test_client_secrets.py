"""Error reports that include the variables of frames show no secret of a call.

The planted values are constants of this module, so that no frame of a test has them as locals.
"""

import io
import json
import re
import traceback

import httpx
import pytest
import rich.console
import rich.traceback
import trio
from support.upstreams import Authority, Upstream, http1_answer, http2_handler, serving

from sdk_trio import CallOptions, Client, Settings
from sdk_trio.net.transport import Transport

sentry_sdk = pytest.importorskip("sentry_sdk")

OWN_TOKEN = "polar_oat_PLANTED-own/token"
CALL_TOKEN = "polar_oat_PLANTED-call/token"
HEADER = "PLANTED-header"
QUERY = "PLANTED-query"
BODY = "PLANTED-body"
ANSWER = "PLANTED-answer"
PATH = "PLANTED-path"
AUTHORITY = Authority()

ARGUMENTS = {
    "params": {"email": QUERY},
    "json": {"email": BODY, "list": [BODY]},
    "access_token": CALL_TOKEN,
    "headers": {"X-Note": HEADER},
    "max_retries": 0,
}
VIEW = CallOptions(access_token=CALL_TOKEN, headers={"X-Note": HEADER}, max_retries=0)


def settings(port=443, **keys):
    mapping = {
        "Environment": "Development",
        "Mode": "Custom",
        "CustomBaseUrl": f"http://127.0.0.1:{port}",
        "AccessToken": OWN_TOKEN,
        "TimeoutMs": 1000,
    }
    return Settings.from_mapping(mapping | keys, receiver=False)


def reports(error):
    """The failure as the tools that people use would show or send it."""
    shown = traceback.TracebackException.from_exception(error, capture_locals=True)
    yield "".join(shown.format())


def reports_of_tools(error):
    """The same by rich and by sentry, with its default options: they look into containers."""
    console = rich.console.Console(file=io.StringIO(), width=200)
    console.print(
        rich.traceback.Traceback.from_exception(
            type(error),
            error,
            error.__traceback__,
            show_locals=True,
            locals_max_length=1000,
            locals_max_string=None,
            suppress=[],
        )
    )
    yield console.file.getvalue()
    events = []

    def keep(event, hint):
        events.append(json.dumps(event))

    with sentry_sdk.isolation_scope():
        client = sentry_sdk.Client(
            "http://x@127.0.0.1:9/1", before_send=keep, default_integrations=False
        )
        client.capture_event(*sentry_sdk.utils.event_from_exception(error, client.options))
        client.close(timeout=0)
    [event] = events
    yield event


def assert_hidden(error, reports=reports):
    assert error is not None
    for report in reports(error):
        assert "sdk_trio" in report  # its frames are there
        found = re.findall(r".{,300}PLANTED-\w+.{,40}", report)
        assert not found, found[0]


async def failure(function):
    """Return the exception of ``function``, without frames of the test that hold secrets."""
    try:
        with trio.fail_after(30):
            await function()
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            [error] = error.exceptions
        return error
    return None


async def assert_each_way_is_hidden(client):
    """Use every entrance of the client, and check the failing calls."""

    async def streamed():
        async with client.stream("POST", "/x", **ARGUMENTS) as response:
            # httpx's own iterators would be frames with the answer, as would a loop's variable.
            parts = aiter(response.stream)
            while await anext(parts, None) is not None:
                pass

    async def listed():
        async for _ in client.with_options(VIEW).orders.list(email=QUERY):
            pass

    async def exported():
        async with client.with_options(VIEW).orders.export(email=QUERY) as rows:
            async for _ in rows:
                pass

    failed = 0
    view = client.with_options(VIEW)
    for call in (
        lambda: client.request("POST", "/x", **ARGUMENTS),
        lambda: client.request("PUT", "/x", content=BODY.encode(), options=VIEW),
        streamed,
        lambda: view.customers.create(email=BODY),
        lambda: view.customers.create.raw(body={"email": BODY}),
        lambda: view.orders.get("o"),
        lambda: view.orders.generate_invoice("o"),
        lambda: view.checkouts.client_get(PATH),
        lambda: view.checkouts.client_get.raw(PATH),
        listed,
        lambda: view.orders.list(email=QUERY).first_page(),
        lambda: view.metrics.list_dashboards(),
        exported,
        lambda: view.orders.export(email=QUERY).text(),
    ):
        client.breaker.close()
        error = await failure(call)
        if error is not None:
            assert_hidden(error)
            if not failed:
                assert_hidden(error, reports_of_tools)
            failed += 1
    assert failed


def fails(error):
    def answer(request):
        raise error

    return answer


def answers(status, content, **headers):
    return lambda request: httpx.Response(status, content=content, headers=headers)


def streams(status, *pieces, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda request: httpx.Response(status, stream=Body(*pieces), headers=headers)


class Body(httpx.AsyncByteStream):
    def __init__(self, *pieces):
        self.pieces = pieces

    async def __aiter__(self):
        for piece in self.pieces:
            await trio.lowlevel.checkpoint()
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, float):
                await trio.sleep(piece)
            else:
                yield piece


class InMemory(httpx.AsyncBaseTransport):
    def __init__(self, answer):
        self.answer = answer

    async def handle_async_request(self, request):
        await trio.lowlevel.checkpoint()
        return self.answer(request)


GARBAGE = f'{{"id": "{ANSWER}", '.encode()


@pytest.mark.parametrize(
    "answer",
    [
        fails(httpx.ConnectError("refused")),
        fails(httpx.ReadError("reset")),
        fails(httpx.LocalProtocolError("no")),
        fails(httpx.PoolTimeout("full")),
        answers(500, b"<html>"),
        answers(422, b'{"detail": "no"}'),
        answers(429, b"", retry_after="1"),
        answers(200, GARBAGE),
        answers(200, b"[1, {}]"),
        answers(200, b'{"items": ["' + ANSWER.encode() + b'"], "pagination": {}}'),
        answers(200, b'a\n"' + ANSWER.encode() + b'"x\n'),
        streams(200, GARBAGE, httpx.ReadError("reset")),
        streams(200, GARBAGE, 2000.0),
        streams(200, GARBAGE, content_encoding="gzip"),
        streams(200, GARBAGE, content_encoding="br"),
        streams(200, GARBAGE * 1000),
        streams(500, b"x" * (2 << 20)),
        streams(500, GARBAGE, httpx.ReadError("reset")),
    ],
)
async def test_no_failure_shows_what_was_sent_or_answered(answer, autojump_clock):
    bounded = settings(Connection={"MaxAnswerBytes": 4096})
    async with Client(bounded, InMemory(answer)) as client:
        await assert_each_way_is_hidden(client)


async def test_a_call_that_is_refused_or_out_of_time_shows_nothing(autojump_clock):
    async with Client(settings(), InMemory(answers(500, GARBAGE))) as client:
        client.breaker.isolate()
        error = await failure(lambda: client.request("POST", "/x", **ARGUMENTS))
        assert_hidden(error)
    async with Client(settings(), InMemory(streams(200, 100.0))) as client:
        for method in ("GET", "POST"):
            error = await failure(
                lambda m=method: client.request(m, "/x", **ARGUMENTS, total_timeout=0.5)
            )
            assert_hidden(error)


async def test_an_argument_that_cannot_be_sent_shows_nothing_of_the_others():
    async with Client(settings(), InMemory(answers(200, b""))) as client:
        for call in (
            lambda: client.request("POST", "/x", **ARGUMENTS, content=b""),
            lambda: client.request("POST", "/x", **ARGUMENTS, idempotency_key=f"{HEADER}\n"),
            lambda: client.request("POST", "/x", **ARGUMENTS | {"json": [BODY, object()]}),
            lambda: client.request("POST", "/x", **ARGUMENTS | {"headers": {"X": f"{HEADER}\n"}}),
            lambda: client.request("POST", "/x", **ARGUMENTS | {"access_token": f"{OWN_TOKEN} x"}),
            lambda: client.request("POST", "/x", **ARGUMENTS | {"max_retries": None}),
            lambda: client.request("POST", "/x", **ARGUMENTS | {"params": {"a": QUERY + "\ud800"}}),
            lambda: client.customers.create(email=BODY, bad=object()),
            lambda: client.customers.create.raw(email=BODY, bad=object()),
            lambda: client.orders.get(PATH, email=QUERY, bad=object()),
            lambda: client.orders.get(PATH, PATH),
        ):
            error = await failure(call)
            assert isinstance(error, (TypeError, ValueError))
            assert_hidden(error)


# --- over real connections -----------------------------------------------------------------------


def raw_answer(data):
    async def handle(stream):
        await stream.receive_some(65_536)
        if data is not None:
            await stream.send_all(data)

    return handle


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n" + GARBAGE,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + GARBAGE,
        b"SPDY " + GARBAGE,
        http1_answer(b"<html>", status=b"500 Broken"),
    ],
)
async def test_http1(data):
    upstream = Upstream()
    async with serving(upstream, raw_answer(data)), Client(settings(upstream.port)) as client:
        await assert_each_way_is_hidden(client)
    async with Client(settings(upstream.port)) as client:  # no server listens
        await assert_each_way_is_hidden(client)


@pytest.mark.parametrize("path", ["/hang", "/drop", "/garbage"])
async def test_http2(path):
    upstream = Upstream()
    serve = http2_handler(upstream)

    async def handle(stream):
        if path == "/drop":
            await stream.receive_some(65_536)
        elif path == "/garbage":
            await stream.receive_some(65_536)
            await stream.send_all(GARBAGE * 20)
        else:
            await serve(stream)

    async with serving(upstream, handle, context=AUTHORITY.server_context("h2")):
        chosen = settings(CustomBaseUrl=f"https://127.0.0.1:{upstream.port}", BasePath=path)
        transport = Transport(chosen.connection, verify=AUTHORITY.client_context())
        async with Client(chosen, transport) as client:
            for call in (
                lambda: client.request("POST", "", **ARGUMENTS),
                lambda: client.request("POST", "/x", **ARGUMENTS),
            ):
                client.breaker.close()
                error = await failure(call)
                if error is not None:
                    assert_hidden(error)


# --- what an upstream repeats --------------------------------------------------------------------


def escaped(text, step):
    return "".join(f"\\u{ord(c):04X}" if n % step == 0 else c for n, c in enumerate(text))


@pytest.mark.parametrize(
    "echo",
    [
        lambda token: json.dumps({"detail": f"bad token {token}"}),
        lambda token: '{"detail": "' + escaped(token, 1) + '"}',
        lambda token: '{"detail": "' + escaped(token, 7) + '"}',
        lambda token: '{"detail": "' + token.replace("/", "\\/") + '"}',
        lambda token: '{"' + escaped(token, 3) + '": [{"a": "' + escaped(token, 2) + '"}]}',
        lambda token: json.dumps({"detail": json.dumps({"token": token.replace("/", "\\/")})}),
        lambda token: '{"detail": "' + escaped(token, 4) + '", unfinished',
        lambda token: f"Bearer {token}",
        lambda token: f"https://x/?token={token.replace('/', '%2F')}",
    ],
)
@pytest.mark.parametrize("status", [400, 503])
async def test_a_token_that_the_upstream_repeats_is_masked(autojump_clock, echo, status):
    for token in (OWN_TOKEN, CALL_TOKEN):
        records = []

        def answer(request, token=token):
            content, headers = echo(token).encode(), {"x-request-id": f"for-{token}"}
            return httpx.Response(status, content=content, headers=headers)

        async with Client(settings(), InMemory(answer)) as client:
            client.on_attempt(records.append)
            with pytest.raises(Exception, match=str(status)) as caught:
                await client.request("GET", "/x", access_token=CALL_TOKEN, max_retries=1)
        error = caught.value
        for shown in (str(error), repr(error), repr(error.body), repr(records), error.request_id):
            assert token not in shown
            assert token.replace("/", "\\/") not in shown
            assert "PLANTED" not in shown
        assert "****" in error.request_id


async def test_a_header_that_stands_in_for_the_token_is_masked(autojump_clock):
    answer = answers(401, f"who is {HEADER}?".encode())
    async with Client(settings(), InMemory(answer)) as client:
        with pytest.raises(Exception, match="401") as caught:
            await client.request("GET", "/x", headers={"Authorization": f"Basic {HEADER}"})
    assert HEADER not in str(caught.value)
