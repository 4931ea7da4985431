"""Commands, the API and the feed with several senders: filters, pauses, samples, signatures."""

import json
import time
from base64 import b64encode
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import attrs
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.admin import TOKEN, administered
from support.command_line import CommandLine
from support.deliveries import memory_inbox
from support.sources import BY_NAME, SENDERS, as_asgi, settings_of
from support.waiting import until

from sdk_trio import HandlerRegistry
from sdk_trio.admin.follow import open_feed
from sdk_trio.config import Settings
from sdk_trio.records.deliveries import Dead, NewDelivery
from sdk_trio.runtime.alerts import UpstreamArrivals
from sdk_trio.storage.open import open_inbox
from sdk_trio.webhooks.sources.schemes import Genuine, Keys, Scheme

EACH = pytest.mark.parametrize("sender", SENDERS, ids=lambda sender: sender.name)


@pytest.fixture
def sources(command_line: CommandLine) -> CommandLine:
    """Return the command line in a directory whose settings have all sources."""
    file = command_line.directory / "appsettings.json"
    file.write_text(json.dumps({"Sdk": {"Sources": settings_of()}}))
    return command_line


def seed(line: CommandLine, *events: tuple[str, str, str], dead: bool = False) -> None:
    """Add events: id, type, and the source or ""."""

    async def fill() -> None:
        settings = Settings.from_mapping(
            {"Storage:Path": str(line.data)}, standalone=True, receiver=False
        )
        async with open_inbox(settings, owner="seed") as inbox:
            now = time.time()
            for webhook_id, kind, source in events:
                sender = BY_NAME.get(source)
                raw = sender.body(webhook_id) if sender else b'{"type":"order.paid"}'
                delivery = NewDelivery(
                    webhook_id,
                    kind,
                    raw,
                    int(now),
                    now,
                    subject="same",
                    signer=f"@{source}" if source else "",
                )
                lease = (await inbox.accept(delivery, leased=dead)).lease
                if lease is not None:
                    await inbox.start(lease, now=now)
                    await inbox.finish(lease, Dead("ValueError: no"), now=now)

    trio.run(fill)


def test_events_are_listed_shown_and_replayed_by_source(sources: CommandLine) -> None:
    events = [
        ("evt_1", "invoice.paid", "stripe"),
        ("evt_1", "invoice.paid", "paddle"),
        ("evt_1", "order.paid", ""),
    ]
    seed(sources, *events, dead=True)

    listed = sources("events", "list", "--source", "stripe", "--format", "json").document
    assert [(row["key"], row["source"]) for row in listed] == [("evt_1.@stripe", "stripe")]
    table = sources("events", "list").out
    assert "source" in table.splitlines()[0]
    all_of_them = sources("events", "list", "--format", "json").document
    assert [row.get("source") for row in all_of_them] == [None, "paddle", "stripe"]

    several = sources("events", "show", "evt_1")
    assert several.status != 0
    assert "evt_1.@paddle" in several.err
    shown = sources("events", "show", "evt_1.@stripe")
    assert "source stripe" in shown.out

    both = sources("events", "list", "--source", "stripe", "--tenant", "acme")
    assert "no tenant" in both.err
    replayed = sources(
        "events", "replay", "--state", "dead", "--source", "paddle", "--yes", "--format", "json"
    ).document
    assert [row["key"] for row in replayed] == ["evt_1.@paddle"]


def test_without_sources_nothing_names_them(command_line: CommandLine) -> None:
    seed(command_line, ("evt_1", "order.paid", ""))

    assert "source" not in command_line("events", "list").out
    assert "source" not in command_line("events", "list", "--format", "json").out
    assert "source" not in command_line("events", "show", "evt_1").out


def test_a_pause_of_a_source_is_listed_and_resumed_by_its_name(sources: CommandLine) -> None:
    seed(sources, ("evt_1", "order.paid", ""))
    unknown = sources("events", "pause", "--source", "strpie", "--type", "*")
    assert "it has ai, mail, stripe" in unknown.err
    assert "does not begin with @" in sources("events", "pause", "--type", "@stripe:*").err

    paused = sources("events", "pause", "--source", "stripe", "--type", "invoice.*")
    assert "invoice.* of stripe is paused" in paused.err
    (row,) = sources("events", "pauses", "--format", "json").document
    assert (row["type"], row["source"]) == ("invoice.*", "stripe")
    wrong = sources("events", "resume", "--type", "invoice.*")
    assert "name a paused glob: invoice.* of stripe" in wrong.err
    hint = "run: events resume --source stripe --type 'invoice.*'"
    assert hint in sources("doctor", "--offline", "--dev").out

    resumed = sources("events", "resume", "--source", "stripe", "--type", "invoice.*")
    assert "resumed: invoice.* of stripe" in resumed.err
    assert sources("events", "pauses", "--format", "json").document == []


@attrs.define
class Target:
    """A server on this machine that keeps what is posted to it."""

    url: str
    requests: list[tuple[str, dict[str, str], bytes]]


@pytest.fixture
def target() -> Any:
    requests: list[tuple[str, dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            requests.append((self.path, dict(self.headers), body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield Target(f"http://127.0.0.1:{server.server_port}", requests)
        server.shutdown()


def verified(name: str, headers: dict[str, str], body: bytes) -> Genuine:
    options = BY_NAME[name].options
    verdict = Scheme.of(options).verify(
        as_asgi(headers), body, now=time.time(), keys=Keys.of(options), tolerance=300
    )
    assert isinstance(verdict, Genuine), verdict
    return verdict


@EACH
def test_trigger_signs_a_file_as_the_sender_does(
    sender: Any, sources: CommandLine, target: Target
) -> None:
    file = sources.directory / "body.json"
    file.write_bytes(sender.body("of the file", 7))

    answer = sources(
        *("events", "trigger", "--source", sender.name, "some.type", "--data", str(file)),
        *("--url", target.url, "--format", "json"),
    )

    (row,) = answer.document
    ((path, headers, body),) = target.requests
    found = verified(sender.name, headers, body)
    assert path == sender.options.route
    assert (found.webhook_id, found.type) == (row["webhook_id"], "some.type")
    assert found.webhook_id != "of the file"
    assert row["source"] == sender.name
    assert answer.status == 0


def test_trigger_needs_a_known_source_and_a_readable_body(
    sources: CommandLine, target: Target
) -> None:
    for words, message in (
        (("--source", "strpie"), "Sdk:Sources has no source 'strpie'"),
        (("--source", "stripe", "--data", "missing.json"), "cannot read 'missing.json'"),
        (("--source", "stripe", "--data", "{"), "not valid JSON"),
        (("--source", "stripe", "--tenant", "acme"), "no tenant"),
        (("--source", "stripe", "--url", "https://example.com"), "--secret-env"),
    ):
        url = () if "--url" in words else ("--url", target.url)
        assert message in sources("events", "trigger", "some.type", *words, *url).err
    assert target.requests == []


def test_resend_signs_as_the_source_that_sent_it(sources: CommandLine, target: Target) -> None:
    seed(sources, ("evt_1", "invoice.paid", "stripe"))

    answer = sources("events", "resend", "evt_1.@stripe", "--to", f"{target.url}/local")

    ((path, headers, body),) = target.requests
    assert answer.status == 0
    assert path == "/local"
    assert verified("stripe", headers, body).webhook_id == "evt_1"


# -- the API, the console's data, the feed -------------------------------------------------------


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


async def put(admin: Any, name: str, webhook_id: str) -> None:
    """Add an event of a source to the inbox, without the network."""
    sender = BY_NAME[name]
    now = time.time()
    body = sender.body(webhook_id)
    delivery = NewDelivery(webhook_id, sender.type, body, int(now), now, signer=f"@{name}")
    await admin.app.store.park(delivery, "no handler")


@pytest.mark.usefixtures("token")
async def test_the_api_lists_replays_pauses_and_signs_by_source() -> None:
    handlers = HandlerRegistry()
    handlers.source("stripe").on("invoice.paid", enqueue=True, max_attempts=2)(lambda event: None)
    async with administered(handlers, Sources=settings_of()) as admin:
        await put(admin, "stripe", "evt_1")
        await put(admin, "paddle", "evt_1")

        rows = await admin.api("/events?source=stripe")
        assert [(row["key"], row["source"]) for row in rows] == [("evt_1.@stripe", "stripe")]
        shown = await admin.api("/events/evt_1.@paddle?body=1")
        assert shown["source"] == "paddle"
        found = verified("paddle", dict(shown["headers"]), shown["raw"].encode())
        assert found.webhook_id == "evt_1"
        types = [row for row in await admin.api("/types") if row.get("source")]
        assert [(row["type"], row["policies"]) for row in types] == [
            ("invoice.paid", "max_attempts=2")
        ]

        order = {"type": "invoice.*", "source": "stripe"}
        (pause,) = (await admin.ask("POST", "/api/pause", TOKEN, None, order)).json()
        assert (pause["type"], pause["source"]) == ("invoice.*", "stripe")
        wrong = await admin.ask("POST", "/api/resume", TOKEN, None, {"type": "invoice.*"})
        assert wrong.status_code == 404
        assert (await admin.ask("POST", "/api/resume", TOKEN, None, order)).json() == []
        bad = await admin.ask("POST", "/api/pause", TOKEN, None, {**order, "source": "A b"})
        assert bad.status_code == 400

        replay = {"state": "parked", "source": "stripe", "dry_run": True}
        dry = (await admin.ask("POST", "/api/events/replay", TOKEN, None, replay)).json()
        assert [row["key"] for row in dry["events"]] == ["evt_1.@stripe"]


@pytest.mark.usefixtures("token")
async def test_the_feed_of_a_source_has_no_event_of_another() -> None:
    async with administered(Sources=settings_of()) as admin:
        keys: list[str] = []

        async def follow(task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
            options: Any = {"kinds": ("delivery",), "source": "paddle", "relay": True}
            async with open_feed(admin.url, token=TOKEN, after=0, **options) as feed:
                async for message in feed:
                    if message["kind"] == "hello":
                        task_status.started()
                    if message["kind"] == "delivery":
                        event = message["event"]
                        verified("paddle", dict(event["headers"]), event["raw"].encode())
                        keys.append(event["key"])

        async with trio.open_nursery() as nursery:
            await nursery.start(follow)
            for name in ("stripe", "paddle", "github", "paddle"):
                await put(admin, name, f"evt_{len(name)}_{time.time_ns()}")
            await until(lambda: len(keys) == 2)
            nursery.cancel_scope.cancel()

    assert all(key.endswith(".@paddle") for key in keys)


def public_key() -> str:
    return (
        f"whpk_{b64encode(Ed25519PrivateKey.generate().public_key().public_bytes_raw()).decode()}"
    )


@pytest.mark.usefixtures("token")
async def test_a_source_that_only_verifies_is_shown_and_relayed_without_a_signature() -> None:
    ai, *others = settings_of()
    async with administered(Sources=[{**ai, "Secrets": [public_key()]}, *others]) as admin:
        await put(admin, "ai", "evt_1")
        await put(admin, "mail", "evt_1")

        assert (await admin.api("/events/evt_1.@ai"))["headers"] == []
        relayed: dict[str, Any] = {}
        async with open_feed(
            admin.url, token=TOKEN, after=0, kinds=("delivery",), relay=True
        ) as feed:
            async for message in feed:
                if message["kind"] == "delivery":
                    relayed[message["event"]["source"]] = message["event"]["headers"]
                if len(relayed) == 2:
                    break

    assert relayed["ai"] == []
    assert relayed["mail"]


def test_a_source_signs_with_its_first_secret_that_can(
    command_line: CommandLine, target: Target
) -> None:
    ai, *_ = settings_of()
    sources = [{**ai, "Secrets": [public_key(), *ai["Secrets"]]}]
    file = command_line.directory / "appsettings.json"
    file.write_text(json.dumps({"Sdk": {"Sources": sources}}))

    answer = command_line("events", "trigger", "a", "--source", "ai", "--url", target.url)

    assert answer.status == 0
    ((_, headers, body),) = target.requests
    assert verified("ai", headers, body).type == "a"


@pytest.mark.parametrize(
    ("arrived", "silent_since", "expected"),
    [
        (["stripe", "stripe"], -1.0, None),
        (["", "stripe"], -1.0, 0.0),
        (["stripe", ""], -1.0, 1.0),
        (["", *["stripe"] * 600], -1.0, 0.0),
        # Silent for longer than anyone asks: the upstream's came before the oldest that was read.
        (["", *["stripe"] * 600], 150.0, 100.0),
    ],
)
async def test_deliveries_of_sources_do_not_end_the_upstreams_silence(
    arrived: list[str], silent_since: float, expected: float | None
) -> None:
    inbox = memory_inbox()
    await arrive(inbox, arrived)

    arrivals = UpstreamArrivals()
    found = [await arrivals.last(inbox, silent_since, 1000.0) for _ in range(2)]

    assert found == [expected, expected]


async def arrive(inbox: Any, senders: Sequence[str], begin: int = 0) -> None:
    """Add a delivery of each sender, one a second."""
    for number, source in enumerate(senders, begin):
        signer = f"@{source}" if source else ""
        await inbox.park(
            NewDelivery(f"evt_{number}", "a", b"{}", number, float(number), signer=signer)
        )


async def test_a_busy_source_does_not_hide_that_the_upstream_is_silent() -> None:
    inbox, arrivals = memory_inbox(), UpstreamArrivals()
    hour = 3600.0
    await arrive(inbox, ["", *["stripe"] * 6000])
    # More deliveries than one check reads: the upstream's may have come just before those.
    assert await arrivals.last(inbox, 6100 - 2 * hour, 6100.0) == 1000.0
    await arrive(inbox, ["stripe"] * 3000, begin=6001)

    assert await arrivals.last(inbox, 9100 - 2 * hour, 9100.0) == 1000.0
    await arrive(inbox, ["", "stripe"], begin=9100)
    assert await arrivals.last(inbox, 9200 - 2 * hour, 9200.0) == 9100.0
