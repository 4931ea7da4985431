"""``listen`` against a receiver: forwarded deliveries, waits, and data that it must not get."""

import argparse
import json
import time
from functools import partial

import pytest
import trio
from support.admin import TOKEN, administered
from support.deliveries import SECRET, settings
from support.ports import free_port
from support.serving import registry, running, signed, works
from support.waiting import until

from sdk_trio.admin import follow
from sdk_trio.cli import events as events_module
from sdk_trio.cli import listen as listen_module
from sdk_trio.cli.listen import (
    BROKEN_ATTEMPTS,
    Cursor,
    FeedSource,
    Relay,
    RelayError,
    call_api,
    cursor_file,
    feed_source,
)
from sdk_trio.cli.parse import UsageError
from sdk_trio.cli.run import configure_console
from sdk_trio.cli.settings import read
from sdk_trio.config import KeyDerivation, Secret, Settings
from sdk_trio.runtime import Runtime
from sdk_trio.testing import AppUnderTest
from sdk_trio.webhooks.signature import Keyring, parse_signature_header


@pytest.fixture(autouse=True)
def token(monkeypatch, tmp_path):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


STORED = {"Storage__Backend": "Sqlite"}
OTHER_SECRET = "whsec_bm90LXRoZS1zZWNyZXQtb2YtdGhlLXJlY2VpdmVy"


async def breaks(event):
    raise ValueError("no such product")


class LocalServer:
    """A server on this machine that keeps the headers and bodies that were posted to it."""

    def __init__(self):
        self.port = free_port()
        self.seen = []
        self.answers = True
        #: The id of a delivery on which it ends, as a server does that breaks on its handler.
        self.breaks_on = b""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/in"

    @property
    def ids(self):
        return [headers[b"webhook-id"].decode() for headers, _ in self.seen]

    async def run(self, *, task_status):
        await trio.serve_tcp(self._serve, self.port, host="127.0.0.1", task_status=task_status)

    async def _serve(self, stream):
        data = b""
        while b"\r\n\r\n" not in data:
            data += await stream.receive_some()
        head, _, body = data.partition(b"\r\n\r\n")
        headers = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        headers = {name.lower(): value for name, value in headers.items()}
        while len(body) < int(headers[b"content-length"]):
            body += await stream.receive_some()
        self.seen.append((headers, body))
        if headers[b"webhook-id"] == self.breaks_on:
            await stream.aclose()
        elif self.answers:
            await stream.send_all(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        else:
            await trio.sleep_forever()


class Listening:
    """The command's loop as a task."""

    def __init__(self, admin, local, tmp_path, *, secret=None, events="", give_up=None):
        self.cursor = Cursor(tmp_path / "cursor.json")
        self.cursor.open()
        self._source = (
            admin
            if isinstance(admin, FeedSource)
            else FeedSource(admin.runtime.started.admin[0], TOKEN)
        )
        self._relay = Relay(
            local.url,
            self.cursor,
            secret=secret,
            settings=Settings(),
            as_json=True,
            give_up=give_up,
        )
        self._arguments = argparse.Namespace(events=events, tenant=None, source=None)

    async def run(self):
        try:
            await listen_module._listen(self._source, self._relay, self._arguments)
        finally:
            self.cursor.close()


async def test_chosen_types_are_forwarded_and_an_unavailable_server_is_waited_for(tmp_path, capsys):
    local = LocalServer()
    async with administered(registry(works), **STORED) as admin, trio.open_nursery() as nursery:
        listening = Listening(admin, local, tmp_path, events="order.*, refund.created")
        listening.cursor.save(0)
        for name in ("customer.created", "order.paid", "refund.created", "order.created"):
            await admin.app.deliver(name, webhook_id=name.replace(".", "_"))
        nursery.start_soon(listening.run)
        reported = []
        await until(lambda: reported.append(capsys.readouterr()) or "is down" in reported[-1].err)
        await nursery.start(local.run)
        await until(lambda: listening.cursor.position == 4)
        nursery.cancel_scope.cancel()
    assert local.ids == ["order_paid", "refund_created", "order_created"]
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["webhook_id"], row["status"], row["error"]) for row in shown] == [
        (name, 204, None) for name in local.ids
    ]


async def test_a_server_that_is_slow_has_got_its_delivery(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(listen_module, "ANSWER_SECONDS", 0.2)
    local = LocalServer()
    local.answers = False
    async with administered(registry(works), **STORED) as admin, trio.open_nursery() as nursery:
        await nursery.start(local.run)
        listening = Listening(admin, local, tmp_path)
        listening.cursor.save(0)
        nursery.start_soon(listening.run)
        await admin.app.deliver("order.paid", webhook_id="slow")
        await until(lambda: listening.cursor.position == 1)
        local.answers = True
        await admin.app.deliver("order.paid", webhook_id="next")
        await until(lambda: listening.cursor.position == 2)
        nursery.cancel_scope.cancel()
    assert local.ids == ["slow", "next"]
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["status"] is None
    assert "no answer in" in first["error"]


async def test_a_delivery_on_which_the_server_breaks_is_left_out_after_some_attempts(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(listen_module, "AWAY_CAP_SECONDS", 0.01)
    local = LocalServer()
    local.breaks_on = b"broken"
    async with administered(registry(works), **STORED) as admin, trio.open_nursery() as nursery:
        await nursery.start(local.run)
        listening = Listening(admin, local, tmp_path)
        listening.cursor.save(0)
        for name in ("first", "broken", "next"):
            await admin.app.deliver("order.paid", webhook_id=name)
        nursery.start_soon(listening.run)
        await until(lambda: listening.cursor.position == 3)
        nursery.cancel_scope.cancel()
    assert local.ids == ["first", *["broken"] * BROKEN_ATTEMPTS, "next"]
    shown = capsys.readouterr()
    left_out = json.loads(shown.out.splitlines()[1])
    assert (left_out["webhook_id"], left_out["status"]) == ("broken", None)
    assert "skipped, 1 so far" in left_out["error"]
    assert "--after 1" in left_out["error"]
    assert "breaks the connection" in shown.err


async def test_an_unavailable_server_is_waited_for_only_as_long_as_requested(tmp_path, capsys):
    local = LocalServer()
    async with administered(registry(works), **STORED) as admin, trio.open_nursery() as nursery:
        listening = Listening(admin, local, tmp_path, give_up=0.05)
        listening.cursor.save(0)
        for name in ("first", "second"):
            await admin.app.deliver("order.paid", webhook_id=name)
        nursery.start_soon(listening.run)
        await until(lambda: listening.cursor.position == 2)
        nursery.cancel_scope.cancel()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["webhook_id"], row["status"]) for row in rows] == [
        ("first", None),
        ("second", None),
    ]
    assert "skipped, 2 so far" in rows[1]["error"]


async def test_the_feed_is_followed_over_a_unix_socket(tmp_path, monkeypatch, capsys):
    local = LocalServer()
    socket = tmp_path / "admin.sock"
    keys = {"Admin__Enabled": True, "Admin__TokenEnvVar": "SDK_TEST_ADMIN_TOKEN"}
    reported = settings(**keys, **STORED, Admin__Bind=f"unix:{socket}")
    runtime = Runtime(reported, registry(works))
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    words = argparse.Namespace(from_=None, token_env=None)
    assert feed_source(reported, words) == FeedSource(f"unix:{socket}", TOKEN)
    words.from_ = f"unix:{socket}"
    source = feed_source(reported, words)
    async with running(runtime), trio.open_nursery() as nursery:
        await nursery.start(local.run)
        app = AppUnderTest(runtime)
        await app.deliver("order.paid", webhook_id="msg_1")
        assert (await call_api(source, "GET", "/api/relay"))["newest"] == 1
        listening = Listening(source, local, tmp_path)
        listening.cursor.save(0)
        nursery.start_soon(listening.run)
        await app.deliver("order.paid", webhook_id="msg_2")
        await until(lambda: listening.cursor.position == 2)
        nursery.cancel_scope.cancel()
    assert local.ids == ["msg_1", "msg_2"]
    assert f"listening to unix:{socket}" in capsys.readouterr().err


async def test_a_configured_secret_signs_again(tmp_path):
    local = LocalServer()
    async with administered(registry(works), **STORED) as admin, trio.open_nursery() as nursery:
        await nursery.start(local.run)
        listening = Listening(admin, local, tmp_path, secret=Secret(OTHER_SECRET))
        listening.cursor.save(0)
        nursery.start_soon(listening.run)
        await admin.app.deliver("order.paid", webhook_id="msg_1")
        await until(lambda: local.seen)
        nursery.cancel_scope.cancel()
    ((headers, body),) = local.seen
    keys = Keyring.from_secrets([Secret(OTHER_SECRET)], KeyDerivation.STANDARD)
    entries = parse_signature_header(headers[b"webhook-signature"])
    assert keys.match(b"msg_1", headers[b"webhook-timestamp"], body, entries) is not None


async def test_a_store_that_was_replaced_is_begun_with_its_first_delivery(tmp_path, capsys):
    local = LocalServer()
    async with administered(registry(works), **STORED) as admin, trio.open_nursery() as nursery:
        await nursery.start(local.run)
        await admin.app.deliver("order.paid", webhook_id="msg_1")
        listening = Listening(admin, local, tmp_path)
        listening.cursor.save(500)
        nursery.start_soon(listening.run)
        await until(lambda: local.ids == ["msg_1"])
        nursery.cancel_scope.cancel()
    assert "a different store than before" in capsys.readouterr().err


async def test_a_store_that_is_replaced_during_a_listener_is_reported(
    tmp_path, capsys, monkeypatch
):
    """The position is below that of the new store, so only its name distinguishes them."""
    monkeypatch.setattr(follow, "RETRY_CAP_SECONDS", 0.2)
    local, port, err = LocalServer(), free_port(), []
    keys = {"Admin__Bind": f"127.0.0.1:{port}"}
    async with trio.open_nursery() as nursery:
        await nursery.start(local.run)
        async with administered(registry(works), **STORED, **keys) as admin:
            listening = Listening(admin, local, tmp_path)
            nursery.start_soon(listening.run)
            await until(lambda: listening.cursor.position == 0)
            await admin.app.deliver("order.paid", webhook_id="old_1")
            await until(lambda: listening.cursor.position == 1)
            words = argparse.Namespace(
                from_=admin.runtime.started.admin[0],
                token_env="SDK_TEST_ADMIN_TOKEN",
                body=False,
                format="table",
                type=None,
                state=None,
                tenant=None,
                source=None,
                since=None,
            )
            nursery.start_soon(events_module._tail_feed, Settings(), words)
            await until(lambda: err.append(capsys.readouterr().err) or "connected to" in err[-1])
        async with administered(registry(works), **STORED, **keys):
            await until(lambda: err.append(capsys.readouterr().err) or "not shown" in err[-1])
        other = {"Storage__Path": "other", **STORED}
        async with administered(registry(works), **other) as admin:
            for number in (1, 2, 3):
                await admin.app.deliver("order.paid", webhook_id=f"new_{number}")
        async with administered(registry(works), **other, **keys):
            await until(lambda: listening.cursor.position == 3)
            said = "a different store than before"
            await until(
                lambda: err.append(capsys.readouterr().err) or "".join(err).count(said) == 2
            )
            nursery.cancel_scope.cancel()
    assert local.ids == ["old_1", "new_1", "new_2", "new_3"]
    assert "not connected: the receiver is stopping; retrying" in "".join(err)


async def test_removal_by_retention_does_not_look_like_another_store(tmp_path, capsys):
    local = LocalServer()
    handlers = registry(breaks, enqueue=True)
    keys = {"Webhooks__Queue__MaxAttempts": 1, **STORED}
    async with administered(handlers, **keys) as admin, trio.open_nursery() as nursery:
        await nursery.start(local.run)
        # The dead letter stays, the parked one does not.
        await admin.app.deliver("order.paid", webhook_id="dead")
        await admin.app.deliver("customer.created", webhook_id="parked")
        listening = Listening(admin, local, tmp_path)
        listening.cursor.save(2)
        store = admin.runtime.receiver.store
        await store.purge(now=time.time() + 400 * 86400)
        assert [record.webhook_id for record in await store.find()] == ["dead"]
        nursery.start_soon(listening.run)
        await until(lambda: "listening to" in capsys.readouterr().err)
        await admin.app.deliver("order.paid", webhook_id="next")
        await until(lambda: local.ids)
        nursery.cancel_scope.cancel()
    assert local.ids == ["next"]


async def test_the_secret_is_for_those_with_the_token_on_this_machine_or_with_the_relay_on():
    async with administered(registry(works), **STORED) as admin:
        await admin.app.deliver("order.paid", webhook_id="msg_1")
        address = admin.runtime.started.admin[0]
        reported = await call_api(FeedSource(address, TOKEN), "POST", "/api/relay/secret", body={})
        assert reported == {"secret": SECRET}
        (action,) = await admin.api("/actions")
        assert (action["action"], action["address"]) == ("relay secret", "127.0.0.1")
        with pytest.raises(RelayError, match="401"):
            await call_api(FeedSource(address, "wrong"), "POST", "/api/relay/secret", body={})
        with pytest.raises(RelayError, match="does not answer"):
            await call_api(FeedSource("http://127.0.0.1:1", TOKEN), "GET", "/api/relay")
        # A proxy on this machine makes every request look local.
        for path in ("/api/relay", "/feed?relay=1"):
            answer = await admin.get(path, TOKEN, x_forwarded_for="192.0.2.1")
            assert (answer.status_code, "Relay:Enabled" in answer.text) == (403, True)
        shown = await admin.get("/api/events/msg_1", TOKEN, x_forwarded_for="192.0.2.1")
        assert shown.json()["headers"] == []
    # One that adds no header leaves the name that was asked for.
    hosts = {"Admin__AllowedHosts": ["hooks.example"]}
    async with administered(registry(works), **hosts) as admin:
        assert (await admin.get("/api/relay", TOKEN)).status_code == 200
        answer = await admin.get("/api/relay", TOKEN, host="hooks.example")
        assert (answer.status_code, "Relay:Enabled" in answer.text) == (403, True)
    async with administered(registry(works), Relay__Enabled=True) as admin:
        answer = await admin.get("/api/relay", TOKEN, x_forwarded_for="192.0.2.1")
        assert answer.status_code == 200
    async with administered(registry(works), Admin__ReadOnly=True) as admin:
        source = FeedSource(admin.runtime.started.admin[0], TOKEN)
        with pytest.raises(RelayError, match="ReadOnly"):
            await call_api(source, "POST", "/api/relay/secret", body={})


async def test_rejected_requests_are_listed_with_their_causes(command_line, monkeypatch):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)  # the fixture has removed it
    async with administered(registry(works), **STORED) as admin:
        command = ("events", "rejected", "--from", admin.runtime.started.admin[0])

        async def run(*words):
            words = (*command, "--token-env", "SDK_TEST_ADMIN_TOKEN", *words)
            return await trio.to_thread.run_sync(partial(command_line, *words))

        assert "nothing has been rejected" in (await run()).err
        for number in range(3):
            forged = signed("order.paid", webhook_id=f"msg_{number}", secret=OTHER_SECRET)
            await admin.app.deliver(forged, settle=False)
        answer = await run("--limit", "2", "--format", "json")
        assert [row["webhook_id"] for row in answer.document] == ["msg_2", "msg_1"]
        assert {row["cause"] for row in answer.document} == {"no_match"}
        assert "3 since the receiver started: no_match 3" in answer.err
        assert "signs with another secret" in answer.err
        assert (await run("--cause", "too_old", "--format", "json")).document == []
        assert "msg_2" in (await run()).out


async def test_tail_follows_a_receiver_elsewhere(monkeypatch, capsys):
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    async with administered(registry(works), **STORED) as admin, trio.open_nursery() as nursery:
        await admin.app.deliver("order.paid", webhook_id="before")
        await admin.app.deliver("order.paid", webhook_id="msg_1")
        since = (await admin.runtime.receiver.store.get("msg_1")).received_at
        words = argparse.Namespace(
            from_=admin.runtime.started.admin[0],
            token_env="THE_TOKEN",
            body=True,
            format="json",
            type=None,
            state=None,
            tenant=None,
            source=None,
            since=since,
        )
        nursery.start_soon(events_module._tail_feed, Settings(), words)
        out = []
        await until(lambda: out.append(capsys.readouterr().out) or '"msg_1"' in "".join(out))
        await admin.app.deliver(signed("order.paid", secret=OTHER_SECRET), settle=False)
        await until(lambda: out.append(capsys.readouterr().out) or "no_match" in "".join(out))
        nursery.cancel_scope.cancel()
    rows = [json.loads(line) for line in "".join(out).splitlines()]
    first, rejected = rows[0], next(row for row in rows if "cause" in row)
    assert first["webhook_id"] == "msg_1"
    assert json.loads(first["raw"])["type"] == "order.paid"
    assert (rejected["cause"], rejected["status"]) == ("no_match", 400)


async def test_the_console_of_a_daemon_knows_origins_and_examines(monkeypatch):
    monkeypatch.setenv("SDK__WEBHOOKS__PATH", "/in")
    words = argparse.Namespace(config=[], set=[])
    loaded = read(words)
    async with administered(registry(works), **STORED) as admin:
        configure_console(admin.runtime, loaded, words)
        rows = {row["key"]: row["origin"] for row in await admin.api("/settings")}
        assert "SDK__WEBHOOKS__PATH" in rows["Sdk:Webhooks:Path"]
        found = await admin.api("/doctor")
        assert {"settings", "permissions", "clock"} <= {row["check"] for row in found}
        assert not {"receiver", "upstream"} & {row["check"] for row in found}


def test_a_position_is_kept_and_belongs_to_one_listener(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    source = FeedSource("wss://hooks.example", TOKEN)
    names = {
        cursor_file(
            argparse.Namespace(cursor=None, tenant=None, source=None, forward_to=to), source
        )
        for to in ("http://localhost:1", "http://localhost:2")
    }
    assert len(names) == 2
    file = names.pop()
    # A position beside it whose name differs in its ending alone.
    beside = file.with_suffix(".new")
    beside.parent.mkdir(parents=True)
    beside.write_text("of another listener")
    first, second = Cursor(file), Cursor(file)
    first.open()
    assert first.position is None
    first.save(7)
    with pytest.raises(UsageError, match="another listener"):
        second.open()
    first.close()
    second.open()
    assert second.position == 7
    second.close()
    assert beside.read_text() == "of another listener"
    file.write_text("seven")
    with pytest.raises(UsageError, match="has no position"):
        second.open()
    second.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["listen"], "--forward-to http://localhost:3000"),
        (["listen", "--forward-to", "localhost:3000"], "--forward-to takes http"),
        (
            ["listen", "--forward-to", "http://x", "--after", "x"],
            "--after takes a whole number from 0",
        ),
        (
            ["listen", "--forward-to", "http://x", "--give-up", "-1"],
            "--give-up takes a whole number from 0",
        ),
        (["listen", "--forward-to", "http://x", "--from", "wss://h"], "is not set"),
        (
            ["listen", "--forward-to", "http://x", "--from", "h:1", "--token-env", "T"],
            "not an address",
        ),
        (["events", "tail", "--from", "wss://hooks.example"], "is not set"),
    ],
)
def test_a_wrong_argument_is_reported(command_line, monkeypatch, words, message):
    monkeypatch.setenv("T", "a token")
    answer = command_line(*words)
    assert answer.status in (1, 2)
    assert message in answer.err
