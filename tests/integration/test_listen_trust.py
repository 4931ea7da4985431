"""Servers that ``listen`` and the feed trust with the admin token, and their output about
strangers."""

import json
import os
import time
from contextlib import asynccontextmanager

import pytest
import trio
from support.admin import TOKEN, administered
from support.serving import registry, works

from sdk_trio import FeedRefusedError, open_feed
from sdk_trio.cli.listen import Cursor, FeedSource, Relay, RelayError, call_api
from sdk_trio.cli.parse import UsageError
from sdk_trio.config import Settings
from sdk_trio.net.poster import HttpPoster, dial_private
from sdk_trio.testing import sign_delivery
from sdk_trio.webhooks.signature import new_secret
from sdk_trio.webhooks.signed_request import post


@pytest.fixture(autouse=True)
def token(monkeypatch, tmp_path):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


STORED = {"Storage__Backend": "Sqlite"}


class Recorder:
    """A program that keeps what comes, and gives each head of a request the same answer."""

    def __init__(self, answer):
        self.answer = answer
        self.seen = b""
        self.url = ""

    async def serve(self, stream):
        async for data in stream:
            self.seen += data
            if b"\r\n\r\n" in data:
                await stream.send_all(self.answer)


def http(body, status="200 OK", *extra):
    head = (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *extra)
    return "\r\n".join((*head, "", body)).encode()


@asynccontextmanager
async def recording(answer):
    recorder = Recorder(answer)
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        recorder.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.start_soon(trio.serve_listeners, recorder.serve, [listener])
        yield recorder
        nursery.cancel_scope.cancel()


async def follow(url):
    async with open_feed(url, token=TOKEN, relay=True) as feed:
        await feed.__anext__()


async def test_a_proxy_of_the_environment_gets_neither_the_token_nor_a_delivery(
    monkeypatch, tmp_path
):
    answer = http("{}", "502 Bad Gateway")
    async with recording(answer) as proxy, administered(registry(works), **STORED) as admin:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        source = FeedSource(admin.runtime.started.admin[0], TOKEN)
        secret = await call_api(source, "POST", "/api/relay/secret", body={"actor": "listen"})
        assert secret["secret"].startswith("whsec_")
        async with open_feed(source.url, token=TOKEN) as feed:
            assert (await feed.__anext__())["kind"] == "hello"
        async with recording(http("")) as local:
            signed = sign_delivery("order.paid", secret=new_secret(bytes(range(32))))
            assert (await post(local.url, signed)).status == 200
            headers = {"x-signature": "of-a-poster"}
            poster = HttpPoster(clock=time.time, dial=dial_private)
            await poster.post(local.url, headers=headers, body=b"", timeout_seconds=30)
            assert b"of-a-poster" in local.seen
            relay = Relay(
                f"{local.url}/in",
                Cursor(tmp_path / "cursor"),
                secret=None,
                settings=Settings(),
                as_json=True,
            )
            event = {"sequence": 1, "raw": "", "headers": [["webhook-id", "msg_1"]]}
            assert (await relay.forward(event)).status == 200
            assert b"msg_1" in local.seen
            await relay.aclose()
        assert proxy.seen == b""


@pytest.mark.parametrize(
    "answer",
    [
        http("{}"),
        http('{"proof": "' + "0" * 64 + '"}'),
        http("{}", "101 Switching Protocols", "Upgrade: websocket", "Connection: upgrade"),
        b"hello\r\n\r\n",
    ],
    ids=["any", "guess", "websocket", "noise"],
)
async def test_a_program_that_has_taken_the_receivers_port_does_not_get_its_token(answer):
    async with recording(answer) as squatter:
        with pytest.raises(RelayError, match="token was not sent"):
            await call_api(FeedSource(squatter.url, TOKEN), "GET", "/api/relay")
        with pytest.raises(FeedRefusedError, match="token was not sent"):
            await follow(squatter.url)
        assert b"GET" in squatter.seen
        assert TOKEN.encode() not in squatter.seen


async def test_the_proof_of_one_who_asked_is_no_token_and_proves_nothing_to_another_one():
    """Data collected by a squatter on the port gives no access to the receiver, at once or
    later."""
    async with recording(http("{}")) as squatter, administered(registry(works), **STORED) as admin:
        with pytest.raises(RelayError):
            await call_api(FeedSource(squatter.url, TOKEN), "GET", "/api/relay")
        lines = squatter.seen.decode().split("\r\n")
        (given,) = (line.split(": ")[1] for line in lines if line.lower().startswith("authoriz"))
        for path in ("/api/relay", "/api/events", "/feed"):
            assert (await admin.get(path, None, authorization=given)).status_code == 401
        answer = await admin.get("/api/proof", None, authorization=given)
        assert answer.status_code == 200
        # The answer cannot be used as a question.
        nonce = given.split(" ")[1]
        other = f"{given.split(' ')[0]} {nonce} {answer.json()['proof']}"
        assert (await admin.get("/api/proof", None, authorization=other)).status_code == 401
        assert (await admin.get("/api/proof")).status_code == 401
        assert (await admin.get("/api/proof", TOKEN)).status_code == 401


async def test_wrong_proofs_are_counted_as_wrong_tokens():
    async with administered(registry(works), **STORED) as admin:
        name = 'sdk_admin_token_refusals_total{reason="wrong"}'
        before = (await admin.metrics())[name]
        for _ in range(3):
            answer = await admin.get("/api/proof", None, authorization="SDK-Proof nonce 00")
            assert answer.status_code == 401
        assert (await admin.metrics())[name] == before + 3


ESCAPES = "\x1b]0;owned\x07\x1b[2J\r\u202egpj.exe\x9b31m"


async def test_answers_of_a_remote_program_cannot_write_escapes_to_the_terminal():
    body = json.dumps({"error": ESCAPES})
    async with recording(http(body, "401 Unauthorized")) as remote:
        with pytest.raises(RelayError) as refused:
            await call_api(FeedSource(remote.url, TOKEN), "GET", "/api/relay")
        with pytest.raises(FeedRefusedError) as not_followed:
            await follow(remote.url)
    for error in (refused.value, not_followed.value):
        assert "owned" in str(error)
        assert str(error).isprintable()


@pytest.mark.skipif(os.name != "posix", reason="links are made by others there")
def test_a_position_is_not_written_through_a_planted_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    shared = tmp_path / "shared"
    shared.mkdir()
    file = shared / "cursor"
    for name in ("cursor.new", ".cursor.new"):
        (shared / name).symlink_to(victim)
    cursor = Cursor(file)
    cursor.open()
    cursor.save(1)
    cursor.close()
    assert victim.read_text() == "precious"
    file.unlink()
    file.symlink_to(victim)
    linked = Cursor(file)
    with pytest.raises(UsageError, match="symbolic link"):
        linked.open()
    linked.close()
    file.unlink()
    # The name of the lock can be guessed.
    (shared / "cursor.lock").unlink(missing_ok=True)
    (shared / "cursor.lock").symlink_to(tmp_path / "made")
    with pytest.raises(UsageError, match=r"cursor\.lock"):
        Cursor(file).open()
    assert not (tmp_path / "made").exists()
    assert victim.read_text() == "precious"
