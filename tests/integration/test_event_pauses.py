"""Pauses of events, by command line and by API, and the behavior of a receiver."""

import base64
import json
import os

import pytest
import trio
from support.admin import TOKEN, administered
from support.serving import delivery_request, exchange, registry, signed
from support.sources import settings_of
from support.waiting import until

from sdk_trio.errors import StoreUnavailableError
from sdk_trio.records.deliveries import DeliveryState


@pytest.fixture(autouse=True)
def token(monkeypatch, tmp_path):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


async def post(admin, path, **wanted):
    return await admin.ask("POST", f"/api/{path}", TOKEN, None, wanted)


@pytest.mark.parametrize("enqueue", [True, False])
@pytest.mark.parametrize("backend", ["Memory", "Sqlite"])
async def test_paused_events_are_answered_200_and_run_after_the_resume(enqueue, backend):
    handled = []

    async def handler(event):
        handled.append((event.webhook_id, event.attempt))

    keys = {"Storage__Backend": backend}
    async with administered(registry(handler, enqueue=enqueue), **keys) as admin:
        answer = await post(admin, "pause", type="order.*", reason="migration", actor="ann")
        assert answer.status_code == 200
        (pause,) = answer.json()
        assert (pause["type"], pause["reason"], pause["until"]) == ("order.*", "migration", None)
        assert pause["actor"].startswith("ann (")

        async def check():
            health = (await admin.get("/healthz", TOKEN)).json()
            return {each["name"]: each for each in health["checks"]}["pauses"]

        async def is_known():
            return (await check())["degraded"]

        await until(is_known)
        assert "order.* is paused since" in (await check())["detail"]
        assert (await admin.get("/readyz")).status_code == 200
        assert (await admin.metrics())["sdk_pauses"] == 1
        for number in range(5):
            sent = delivery_request(signed(webhook_id=f"m{number}"))
            assert (await exchange(admin.app, sent)).status == 200
        record = await admin.app.store.get("m0")
        assert (record.state, record.attempts) == (DeliveryState.RECEIVED, 0)
        assert handled == []
        assert (await post(admin, "resume", type="order.*")).json() == []

        async def all_ran():
            await trio.lowlevel.checkpoint()
            return len(handled) == 5

        await until(all_ran)
        assert sorted(handled) == [(f"m{number}", 1) for number in range(5)]
        actions = [each["action"] for each in await admin.api("/actions")]
        assert actions[:2] == ["resume", "pause"]


@pytest.mark.parametrize("backend", ["Memory", "Sqlite"])
async def test_a_pause_does_not_run_an_event_again_whose_success_was_not_recorded(
    backend, monkeypatch
):
    """Found by the simulator, seed 10005994: the disk was full when the inline run ended."""
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)

    async def fail(*_arguments, **_keywords):
        await trio.lowlevel.checkpoint()
        raise StoreUnavailableError("disk full")

    async with administered(registry(handler), Storage__Backend=backend) as admin:
        store, sent = admin.app.store, delivery_request(signed(webhook_id="m1"))
        with monkeypatch.context() as broken:
            broken.setattr(store, "finish", fail)
            assert (await exchange(admin.app, sent)).status == 503
        assert (await post(admin, "pause", type="order.*")).status_code == 200

        async def is_known():
            return (await admin.metrics())["sdk_pauses"] == 1

        await until(is_known)
        assert (await exchange(admin.app, sent)).status == 200
        record = await store.get("m1")
        assert (record.state, runs) == (DeliveryState.DONE, ["m1"])


async def is_paused(admin):
    return (await admin.metrics())["sdk_pauses"] == 1


async def test_a_pause_runs_no_event_whose_failure_was_recorded_too_late(monkeypatch):
    """The operator has replayed it meanwhile, so the redelivery belongs to the queue."""
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)
        raise ValueError("no such product")

    keys = {"Webhooks__InlineMaxAttempts": 1, "Webhooks__Queue__MaxAttempts": 1}
    async with administered(registry(handler), Storage__Backend="Memory", **keys) as admin:
        store, sent = admin.app.store, delivery_request(signed(webhook_id="m1"))
        finish = store.finish

        async def confirm_too_late(*arguments, **keywords):
            assert await finish(*arguments, **keywords)
            raise StoreUnavailableError("no answer")

        with monkeypatch.context() as broken:
            broken.setattr(store, "finish", confirm_too_late)
            assert (await exchange(admin.app, sent)).status == 503
        assert (await admin.replay({"ids": ["m1"]})).json()["replayed"] == 1

        async def is_dead_again():
            await trio.lowlevel.checkpoint()
            return len(runs) == 2 and (await store.get("m1")).state is DeliveryState.DEAD

        await until(is_dead_again)
        assert (await post(admin, "pause", type="order.*")).status_code == 200
        await until(lambda: is_paused(admin))
        statuses = [(await exchange(admin.app, sent)).status for _ in range(2)]
        assert (statuses, len(runs)) == ([503, 200], 2)
        assert (await store.get("m1")).state is DeliveryState.RECEIVED


async def test_copies_of_a_failed_event_that_wait_for_a_thread_run_nothing_in_a_pause(monkeypatch):
    runs = []

    def handler(event):
        runs.append(event.webhook_id)
        raise ValueError("no such product")

    async def fail(*_arguments, **_keywords):
        await trio.lowlevel.checkpoint()
        raise StoreUnavailableError("disk full")

    keys = {"Webhooks__InlineMaxAttempts": 1, "Webhooks__Queue__Threads": 1}
    async with administered(registry(handler), Storage__Backend="Memory", **keys) as admin:
        sent = delivery_request(signed(webhook_id="m1"))
        with monkeypatch.context() as broken:
            broken.setattr(admin.app.store, "finish", fail)
            assert (await exchange(admin.app, sent)).status == 503
        assert (await post(admin, "pause", type="order.*")).status_code == 200
        await until(lambda: is_paused(admin))
        statuses = []

        async def redeliver():
            statuses.append((await exchange(admin.app, sent)).status)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(redeliver)
        assert (statuses, runs) == ([200] * 3, ["m1"])


async def test_impossible_pauses_and_resumes_are_refused():
    async with administered() as admin:
        assert (await post(admin, "pause", type="")).status_code == 400
        assert (await post(admin, "pause", type="a", until="2001-01-01T00:00Z")).status_code == 409
        assert (await post(admin, "resume", type="order.*")).status_code == 404
        assert (await admin.get("/api/pauses", TOKEN)).json() == []
        assert (await admin.get("/api/pause", TOKEN)).status_code == 405


async def test_a_source_that_is_not_configured_cannot_be_paused_but_can_be_resumed():
    async with administered(Sources=settings_of()) as admin:
        refused = await post(admin, "pause", type="*", source="strpie")
        assert refused.status_code == 404
        assert "Sdk:Sources has no such source; it has " in refused.text
        assert "stripe" in refused.text
        assert (await admin.get("/api/pauses", TOKEN)).json() == []
        assert (await post(admin, "pause", type="*", source="stripe")).status_code == 200
        # A source that was removed from the settings while it was paused.
        await admin.app.store.pause("@gone:*", actor="ann", reason="", until=None, now=1.0)
        left = (await post(admin, "resume", type="*", source="gone")).json()
        assert [each["source"] for each in left] == ["stripe"]


# -- command line ----------------------------------------------------------------------------------


def test_commands_pause_list_and_resume(command_line):
    command_line.seed(("msg_1", DeliveryState.DONE))
    words = ("events", "pause", "--type", "order.*", "--until", "2h", "--actor", "ann")
    assert command_line(*words, "--reason", "migration").status == 0
    (pause,) = command_line("events", "pauses", "--format", "json").document
    assert (pause["type"], pause["actor"], pause["reason"]) == ("order.*", "ann", "migration")
    assert pause["until"] - pause["since"] == 7200
    unknown = command_line("events", "resume", "--type", "orders.*")
    assert unknown.status == 2
    assert "name a paused glob: order.*" in unknown.err
    assert command_line("events", "resume", "--type", "order.*", "--actor", "bob").status == 0
    assert command_line("events", "pauses", "--format", "json").document == []
    (ended,) = command_line("events", "pauses", "--all", "--format", "json").document
    assert (ended["actor"], ended["ended_by"]) == ("ann", "bob")
    assert command_line("events", "resume", "--all").status == 0
    assert command_line("events", "pause", "--type", "a", "--until", "1h ago").status == 2


def test_the_list_of_pauses_shows_times_as_people_read_them(command_line):
    command_line.seed(("msg_1", DeliveryState.DONE))
    until = "2199-01-31 12:00:00Z"
    assert command_line("events", "pause", "--type", "order.*", "--until", until).status == 0
    listed = command_line("events", "pauses").out.splitlines()
    assert listed[1].split()[0] == "order.*"
    assert until in listed[1]


def test_a_pause_of_no_known_type_is_pointed_out(command_line):
    command_line.seed(("msg_1", DeliveryState.DONE))
    assert "note" not in command_line("events", "pause", "--type", "order.*").err
    misspelt = command_line("events", "pause", "--type", "orders.*")
    assert misspelt.status == 0
    assert "note: orders.* matches no known type" in misspelt.err


@pytest.mark.parametrize(
    "words",
    [
        ("events", "pause", "--type", "a", "--reason", "two\nlines"),
        ("events", "pause", "--type", "a", "--reason", "r" * 501),
        ("events", "pause", "--type", "a", "--actor", "ann\x1b[2J"),
        ("events", "resume", "--type", "a", "--actor", "a" * 101),
        ("events", "resume", "--all", "--actor", ""),
        ("routes", "pause", "a", "--reason", "\u202egnp"),
    ],
)
def test_a_reason_and_an_actor_are_checked_as_by_the_api(command_line, words):
    command_line.seed(("msg_1", DeliveryState.DONE))
    refused = command_line(*words)
    assert refused.status == 2
    assert f"{words[-2]} takes 1 to" in refused.err
    assert command_line("events", "pauses", "--all", "--format", "json").document == []


def test_routes_list_shows_the_limits_of_each_route(command_line, monkeypatch):
    route = {
        "Name": "shop",
        "Url": "http://127.0.0.1:9",
        "TimeoutSeconds": 2.5,
        "Ordered": True,
        "Concurrency": 3,
        "RatePerMinute": 60,
        "MaxAttempts": 4,
    }
    monkeypatch.setenv("SDK__FORWARD__ROUTES", json.dumps([route]))
    monkeypatch.setenv("SDK_FORWARD_SECRET", "whsec_" + base64.b64encode(os.urandom(32)).decode())
    listed = command_line("routes", "list", "--format", "json")
    assert listed.status == 0, listed.err
    (row,) = listed.document
    assert (row["timeout_seconds"], row["ordered"], row["concurrency"]) == (2.5, True, 3)
    assert row["policies"] == "max_attempts=4, concurrency=3, rate_per_minute=60.0"
    table = command_line("routes", "list").out.splitlines()
    assert ("timeout seconds" in table[0], "2.5" in table[1]) == (True, True)


def test_events_types_shows_the_policies_of_an_application(command_line, monkeypatch):
    (command_line.directory / "policed.py").write_text(
        "import sdk_trio\n"
        "from sdk_trio.events import OrderPaidEvent\n"
        "handlers = sdk_trio.HandlerRegistry()\n"
        "@handlers.on(OrderPaidEvent, enqueue=True, concurrency=2, retry=sdk_trio.Backoff(1, 9))\n"
        "async def pay(event): ...\n"
    )
    monkeypatch.syspath_prepend(str(command_line.directory))
    answer = command_line("events", "types", "--app", "policed:handlers", "--format", "json")
    rows = {row["type"]: row for row in answer.document}
    assert rows["order.paid"]["policies"] == "concurrency=2, retry=1..9 s"
    assert rows["order.created"]["handler"] == ""
