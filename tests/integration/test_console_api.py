"""The API behind the console: each view's document, each action's rights and its record."""

import json

import msgspec
import pytest
import trio
from support.admin import TOKEN, administered
from support.feed import listening
from support.serving import RawWire, registry, request, signed, works
from support.waiting import until

from sdk_trio import HandlerRegistry
from sdk_trio.admin import app as app_module
from sdk_trio.admin.api import KEPT_TRIALS
from sdk_trio.events import OrderCreatedEvent, OrderPaidEvent
from sdk_trio.webhooks import rejections as rejections_module


@pytest.fixture(autouse=True)
def token(monkeypatch, tmp_path):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


ONCE = {"Webhooks__Queue__MaxAttempts": 1}
TENANTS = {"MultiTenant__Enabled": True, "Storage__Backend": "Sqlite"}


def failing():
    handlers = HandlerRegistry()
    number = iter(range(100))

    async def breaks(event):
        raise ValueError(f"no product {next(number)} at 0xdeadbeef00")

    async def crashes(event):
        raise KeyError("amount")

    handlers.register(OrderPaidEvent, breaks, enqueue=True)
    handlers.register(OrderCreatedEvent, crashes, enqueue=True)
    return handlers


def reloaded(admin, **changes):
    settings = admin.runtime.settings
    options = msgspec.structs.replace(settings.admin, **changes)
    return admin.runtime.reload(msgspec.structs.replace(settings, admin=options))


async def post(admin, path, order, **headers):
    return await admin.ask("POST", path, TOKEN, headers, order)


# -- overview ------------------------------------------------------------------------------------


async def test_the_overview_has_what_the_first_page_shows(monkeypatch):
    monkeypatch.setattr(app_module, "STEP_SECONDS", 0.05)
    async with administered(registry(works)) as admin:
        for number in range(5):
            await admin.app.deliver("order.paid", webhook_id=f"msg_{number}")

        async def overview_is_complete():
            shown = await admin.api("/overview")
            return (
                shown if sum(point["handled"] for point in shown["series"]["points"]) >= 5 else None
            )

        shown = await until(overview_is_complete)
    assert shown["queue"] == {"depth": 0, "capacity": 1000, "oldest_seconds": 0.0}
    assert shown["features"] == ["trigger"]
    assert shown["circuit"] is None
    assert shown["development"] is True
    (point,) = [point for point in shown["series"]["points"] if point["handled"]][:1]
    assert point["runs"] == point["handled"]
    assert 0 < point["p50_seconds"] <= point["p95_seconds"]


# -- events --------------------------------------------------------------------------------------


async def test_an_event_knows_its_neighbours_of_the_same_subject():
    async with administered(registry(works), Storage__Backend="Sqlite") as admin:
        for number, subject in enumerate(("a", "b", "a", "a")):
            await admin.app.deliver("order.paid", {"id": subject}, webhook_id=f"msg_{number}")
        middle = await admin.api("/events/msg_2?body=1")
        assert (middle["previous_key"], middle["next_key"]) == ("msg_0", "msg_3")
        alone = await admin.api("/events/msg_1")
        assert (alone["previous_key"], alone["next_key"]) == (None, None)
        names = [name for name, _ in middle["headers"]]
        assert names == ["content-type", "webhook-id", "webhook-timestamp", "webhook-signature"]


# -- dead letters and replay ---------------------------------------------------------------------


async def test_dead_letters_are_grouped_by_type_and_error():
    async with administered(failing(), **ONCE) as admin:
        for number in range(3):
            await admin.app.deliver("order.paid", webhook_id=f"paid_{number}")
        await admin.app.deliver("order.created", webhook_id="created_0")
        shown = await admin.api("/dead")
        assert [(row["type"], row["error"], row["count"]) for row in shown["groups"]] == [
            ("order.paid", "ValueError: no product # at #", 3),
            ("order.created", "KeyError: 'amount'", 1),
        ]
        assert (shown["counted"], shown["more"]) == (4, False)
        assert shown["groups"][0]["sample_key"] == "paid_2"
        assert (await admin.api("/dead?type=order.created"))["counted"] == 1


async def test_a_bulk_replay_does_what_its_dry_run_has_shown_and_no_more():
    async with administered(failing(), **ONCE) as admin:
        for number in range(3):
            await admin.app.deliver("order.paid", webhook_id=f"paid_{number}")
        await admin.app.deliver("order.created", webhook_id="created_0")
        chosen = {"state": "dead", "type": "order.paid", "error": "ValueError: no product # at #"}
        dry = (await admin.replay({**chosen, "dry_run": True})).json()
        assert (dry["count"], dry["replayed"], dry["more"]) == (3, 0, False)
        assert [row["key"] for row in dry["events"]] == ["paid_0", "paid_1", "paid_2"]
        assert (await admin.api("/events/paid_0"))["earlier_attempts"] == 0
        # One that has died since was not in the count.
        await admin.app.deliver("order.paid", webhook_id="paid_3")
        done = (await admin.replay({**chosen, "confirm": dry["confirm"], "actor": "ada"})).json()
        assert {row["key"] for row in done["events"]} == {"paid_0", "paid_1", "paid_2"}
        assert done["replayed"] == 3
        (action,) = await admin.api("/actions")
        assert (action["action"], action["actor"], action["count"]) == ("replay", "ada", 3)
        assert action["address"] == "127.0.0.1"
        # The confirmation token is valid only for that filter.
        wider = await admin.replay({"state": "dead", "confirm": dry["confirm"]})
        assert wider.status_code == 409
        forged = f"9{dry['confirm']}"
        assert (await admin.replay({**chosen, "confirm": forged})).status_code == 409


async def test_a_confirmed_replay_omits_events_that_died_since():
    handlers, repaired = HandlerRegistry(), trio.Event()

    async def breaks_late(event):
        if event.data.id == "slow":
            await repaired.wait()
        raise ValueError("no such product")

    handlers.register(OrderPaidEvent, breaks_late, enqueue=True)
    async with administered(handlers, **ONCE) as admin:
        await admin.app.deliver("order.paid", {"id": "slow"}, webhook_id="slow", settle=False)
        for name in ("first", "second"):
            await admin.app.deliver("order.paid", webhook_id=name, expect="dead")
        dry = (await admin.replay({"state": "dead", "dry_run": True})).json()
        assert dry["count"] == 2
        repaired.set()

        async def all_dead():
            return (await admin.api("/dead"))["counted"] == 3

        await until(all_dead)
        done = (await admin.replay({"state": "dead", "confirm": dry["confirm"]})).json()
        assert {row["key"] for row in done["events"]} == {"first", "second"}
        assert (await admin.api("/events/slow"))["earlier_attempts"] == 0


async def test_the_oldest_dry_runs_are_forgotten():
    async with administered(failing(), **ONCE) as admin:
        await admin.app.deliver("order.paid", webhook_id="paid_0", expect="dead")
        dry = [
            (await admin.replay({"state": "dead", "dry_run": True})).json()
            for _ in range(KEPT_TRIALS + 1)
        ]
        old = await admin.replay({"state": "dead", "confirm": dry[0]["confirm"]})
        assert old.status_code == 409
        assert "repeat the dry run" in old.json()["error"]
        kept = (await admin.replay({"state": "dead", "confirm": dry[1]["confirm"]})).json()
        assert kept["replayed"] == 1


async def test_a_dry_run_of_ids_lists_what_cannot_be_replayed():
    async with administered(failing(), **ONCE) as admin:
        await admin.app.deliver("order.paid", webhook_id="paid_0")
        dry = (await admin.replay({"ids": ["paid_0", "gone"], "dry_run": True})).json()
        assert (dry["count"], dry["confirm"]) == (1, None)
        assert [row["reason"] for row in dry["events"]] == [
            None,
            "there is no such event in the inbox",
        ]


async def test_a_long_replay_goes_on_behind_its_last_answer(monkeypatch):
    monkeypatch.setattr("sdk_trio.admin.api.LARGEST_REPLAY", 2)
    async with administered(HandlerRegistry()) as admin:
        for number in range(5):
            await admin.app.deliver("order.paid", webhook_id=f"msg_{number}")
        order = {"state": "parked"}
        seen = []
        while True:
            shown = (await admin.replay(order)).json()
            seen += [row["key"] for row in shown["events"]]
            if not shown["more"]:
                break
            order["after"] = shown["after"]
        assert seen == [f"msg_{number}" for number in range(5)]


# -- rejected requests ---------------------------------------------------------------------------


async def test_why_a_sender_gets_its_400_is_seen_without_the_log(monkeypatch):
    monkeypatch.setattr(rejections_module, "KEPT", 5)
    async with administered(registry(works)) as admin:
        other = "whsec_bm90LXRoZS1zZWNyZXQtb2YtdGhlLXJlY2VpdmVy"
        forged = signed("order.paid", secret=other, webhook_id="msg_x")
        await admin.app.deliver(forged, settle=False)
        with await RawWire.connect(admin.runtime.started.receiver[0]) as wire:
            await wire.send(request(b"", [("Content-Type", "text/plain")]))
            assert (await wire.answer()).status == 415
        shown = await admin.api("/rejections")
        newest, oldest = shown["rejections"]
        assert (newest["cause"], newest["status"], newest["size"]) == ("media", 415, 0)
        assert (oldest["cause"], oldest["type"]) == ("no_match", "order.paid")
        assert oldest["size"] == len(forged.body)
        # Nothing of the body but its type: it may hold anything.
        assert "data" not in json.dumps(oldest)
        assert shown["causes"] == {"no_match": 1, "media": 1}
        assert [row["seq"] for row in shown["rejections"]] == [2, 1]
        (only,) = (await admin.api("/rejections?cause=media"))["rejections"]
        assert only["seq"] == 2
        assert (await admin.api("/rejections?before=1"))["rejections"] == []


# -- tenants, messages ---------------------------------------------------------------------------


async def test_a_tenant_is_suspended_with_its_actor_and_source_in_the_audit_trail():
    async with administered(registry(works), **TENANTS) as admin:
        service = admin.runtime.receiver.tenancy.service
        email = {"site_manager_email": "ada@acme.example", "site_manager_email_verified": True}
        await service.add("acme", name="Acme", **email)
        await service.add("beta", name="Beta")
        first = await admin.get("/api/tenants?limit=1", TOKEN)
        assert [row["identifier"] for row in first.json()] == ["acme"]
        assert "credentials" not in first.json()[0]
        link = first.headers["link"].partition(">")[0].removeprefix("<")
        assert [row["identifier"] for row in (await admin.get(link, TOKEN)).json()] == ["beta"]
        path = "/api/tenants/acme/transition"
        order = {"transition": "Suspended", "reason": "invoice overdue", "actor": "ada"}
        done = await post(admin, path, order)
        assert done.status_code == 200
        assert (done.json()["previous_status"], done.json()["new_status"]) == (
            "Active",
            "Suspended",
        )
        assert (await post(admin, path, order)).json()["no_op"] is True
        refused = await post(admin, "/api/tenants/beta/transition", order)
        assert refused.status_code == 409
        assert "email" in refused.json()["error"]
        audit = await admin.api("/tenants/acme/audit")
        assert [row["action"] for row in audit] == ["Created", "Suspended"]
        assert (audit[1]["actor"], audit[1]["reason"]) == ("ada (127.0.0.1)", "invoice overdue")
        assert (await admin.get("/api/tenants/gone", TOKEN)).status_code == 404
        assert (await post(admin, path, {"transition": "Deleted"})).status_code == 400
        events = await admin.api("/actions")
        assert events[0]["action"] == "tenant Suspended"


async def test_messages_are_listed_previewed_and_sent_again():
    keys = {"MultiTenant__Notifications__Enabled": False, **TENANTS}
    async with administered(registry(works), **keys) as admin:
        service = admin.runtime.receiver.tenancy.service
        await service.add("acme", name="Acme & Sons")
        await service.deactivate("acme", reason="contract ended")
        store = admin.runtime.receiver.whole_store.notifications
        await store.create_messages({"email": False}, now=1.0, oldest=0.0)
        await service.reactivate("acme")
        await store.create_messages({"email": False}, now=1.0, oldest=2.0**40)
        (row,) = await admin.api("/notifications?tenant=acme&state=skipped")
        assert row["channel"] == "email"
        shown = (
            await post(admin, "/api/notifications/retry", {"ids": [row["id"], "9-sms"]})
        ).json()
        assert shown == {"retried": [row["id"]], "left": ["9-sms"]}
        text = await admin.api("/notifications/preview?transition=Suspended&tenant=acme")
        assert "Acme & Sons" in text["email_text"]
        assert (await admin.get("/api/notifications/preview", TOKEN)).status_code == 400
        assert (await post(admin, "/api/notifications/retry", {"ids": ["x"]})).status_code == 400


# -- settings, types, samples --------------------------------------------------------------------


async def test_settings_are_shown_with_their_origins_and_without_secrets():
    async with administered(registry(works)) as admin:
        answer = await admin.get("/api/settings", TOKEN)
        rows = {row["key"]: row for row in answer.json()}
        assert rows["Sdk:Webhooks:RequireHttps"]["origin"] == "the program"
        assert rows["Sdk:Webhooks:Path"]["origin"] == "default"
        assert "whsec_" not in answer.text
        admin.runtime.administrator.console.origins = {"Sdk:Webhooks:RequireHttps": "a.json"}
        rows = {row["key"]: row["origin"] for row in await admin.api("/settings")}
        assert rows["Sdk:Webhooks:RequireHttps"] == "a.json"


async def test_a_sample_with_edited_data_is_sent_in_development_alone():
    seen = []

    async def sees(event):
        seen.append(event)

    async with administered(registry(sees)) as admin:
        rows = {row["type"]: row for row in await admin.api("/types")}
        assert rows["order.paid"]["handled"] is True
        assert rows["order.created"]["handled"] is False
        assert rows["order.paid"]["sample"]["total_amount"] > 0
        order = {"type": "order.paid", "data": {"total_amount": 2**53 + 1}}
        shown = (await post(admin, "/api/events/trigger", order)).json()
        assert shown["status"] == 200
        await until(lambda: seen)
        assert (seen[0].webhook_id, seen[0].data.total_amount) == (shown["webhook_id"], 2**53 + 1)
        unknown = await post(admin, "/api/events/trigger", {"type": "order.pade"})
        assert unknown.status_code == 404
        assert "order.paid" in unknown.json()["error"]
    async with administered(registry(sees), Environment="Production") as admin:
        assert (await post(admin, "/api/events/trigger", order)).status_code == 404
        assert "sample" not in (await admin.api("/types"))[0]


async def test_the_doctor_examines_where_the_command_line_has_brought_it():
    async with administered(registry(works)) as admin:
        assert (await admin.get("/api/doctor", TOKEN)).status_code == 404

        async def examine():
            return [{"level": "ok", "check": "a", "where": "b", "what": "c", "remedy": ""}]

        admin.runtime.administrator.console.examine = examine
        assert (await admin.api("/doctor"))[0]["check"] == "a"
        assert "doctor" in (await admin.api("/overview"))["features"]


# -- rights --------------------------------------------------------------------------------------

CHANGES = (
    "/api/events/replay",
    "/api/events/trigger",
    "/api/notifications/retry",
    "/api/relay/secret",
    "/api/tenants/acme/transition",
)


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (403, {"origin": "https://evil.example"}),
        (403, {"sec-fetch-site": "cross-site"}),
        (403, {"host": "evil.example"}),
        (415, {"content-type": "text/plain"}),
    ],
)
async def test_a_page_of_another_site_changes_nothing(status, headers):
    async with administered(registry(works)) as admin:
        for path in CHANGES:
            assert (await post(admin, path, {}, **headers)).status_code == status
            # Below the events, a name is also that of an event, and here there is none.
            read = 404 if path.startswith("/api/events/") else 405
            assert (await admin.ask("GET", path, TOKEN)).status_code == read
            assert (await admin.ask("POST", path, None, headers, {})).status_code in (401, 403)


async def test_read_only_gives_out_no_signature_with_which_an_event_would_run_again():
    keys = {"Webhooks__Queue__MaxAttempts": 1, "Admin__ReadOnly": True}
    async with administered(failing(), **keys) as admin:
        await admin.app.deliver("order.paid", webhook_id="msg_1")
        event = await admin.api("/events/msg_1?body=1")
        assert (event["state"], event["headers"]) == ("dead", [])
        assert json.loads(event["raw"])["type"] == "order.paid"
        assert (await admin.api("/relay"))["can_sign"] is False
        async with listening(admin, "after=0&relay=1") as listener:
            shown = await listener.next("delivery")
            assert shown["event"]["headers"] == []
            # A listener that began before is given none, either.
            reloaded(admin, read_only=False)
            assert (await admin.api("/events/msg_1"))["headers"] != []
            assert (await admin.api("/relay"))["can_sign"] is True
            reloaded(admin, read_only=True)
            await admin.app.deliver("order.paid", webhook_id="msg_2")
            shown = await listener.next("delivery")
            assert (shown["event"]["webhook_id"], shown["event"]["headers"]) == ("msg_2", [])
        assert (await admin.api("/events/msg_1"))["headers"] == []


async def test_read_only_shows_and_changes_nothing():
    async with administered(registry(works), Admin__ReadOnly=True) as admin:
        for path in CHANGES:
            answer = await post(admin, path, {"dry_run": True})
            assert (answer.status_code, "ReadOnly" in answer.text) == (403, True)
        assert (await admin.api("/overview"))["read_only"] is True


@pytest.mark.parametrize("name", ["replay", "trigger"])
async def test_an_event_with_the_name_of_an_action_is_shown(name):
    async with administered(registry(works), Storage__Backend="Sqlite") as admin:
        path = f"/api/events/{name}"
        assert (await admin.get(path, TOKEN)).status_code == 404
        await admin.app.deliver("order.paid", webhook_id=name)
        assert (await admin.api(f"/events/{name}?body=1"))["webhook_id"] == name
        assert (await admin.get(path)).status_code == 401
        assert (await admin.ask("PUT", path, TOKEN, order={})).status_code == 405
        # A page of another site changes nothing, and an order is one still.
        foreign = {"origin": "https://evil.example", "sec_fetch_site": "cross-site"}
        assert (await admin.ask("POST", path, TOKEN, foreign, {})).status_code == 403
        assert (await admin.ask("POST", path, TOKEN, order={"ids": []})).status_code == 400
