"""The admin address of a running receiver: probes, API, who may do what, and its life."""

import itertools
import json
import os
import re
import socket
import stat
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
import trio
import trio.testing
from support.admin import TOKEN, administered
from support.deliveries import settings
from support.serving import RawWire, delivery_request, registry, running, signed, works
from support.waiting import until

from sdk_trio.admin.app import MOST_REPORTED
from sdk_trio.base.telemetry import Check, Sample
from sdk_trio.errors import StoreLockedError, StoreUnavailableError
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.runtime import BindError, Runtime


@pytest.fixture(autouse=True)
def token(monkeypatch, tmp_path):
    monkeypatch.setenv("SDK_TEST_ADMIN_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


async def breaks(event):
    raise ValueError("no such product")


async def is_ready(admin):
    return (await admin.get("/readyz")).status_code == 200


def checks_of(answer):
    return {check["name"]: check for check in answer.json()["checks"]}


# -- probes -----------------------------------------------------------------------------------


async def test_a_running_receiver_is_alive_ready_and_well(store):
    async with administered(registry(works), **store) as admin:
        alive = await admin.get("/livez")
        assert (alive.status_code, alive.json()) == (200, {"alive": True})
        # The first query of the store may take longer than a probe waits, on a busy disk.
        await until(partial(is_ready, admin))
        ready = await admin.get("/readyz")
        assert ready.status_code == 200
        assert ready.json()["ready"] is True
        assert {name: check["ok"] for name, check in checks_of(ready).items()} == {
            "store": True,
            "leases": True,
            "drain": True,
            "receiver": True,
            "pauses": True,
            "queue": True,
        }
        health = (await admin.get("/healthz")).json()
        assert (health["status"], health["state"]) == ("ok", "running")
        assert (await admin.ask("HEAD", "/readyz")).status_code == 200


@pytest.mark.parametrize(
    ("ok", "degraded", "ready", "health", "status"),
    [
        (True, False, 200, 200, "ok"),
        (True, True, 200, 200, "degraded"),
        (False, False, 503, 503, "failing"),
        (False, True, 503, 503, "failing"),
    ],
)
async def test_a_part_that_joins_is_named_with_its_reason(ok, degraded, ready, health, status):
    async with administered() as admin:
        sources = admin.runtime.administrator.sources
        sources.checks.append(lambda: Check("replication", ok, "tenant a lags 40 s", degraded))
        sources.samples.append(lambda: [Sample("sdk_replication_lag_seconds", (), 40.5)])
        answer = await admin.get("/readyz")
        assert answer.status_code == ready
        assert checks_of(answer)["replication"]["detail"] == "tenant a lags 40 s"
        answer = await admin.get("/healthz")
        assert (answer.status_code, answer.json()["status"]) == (health, status)
        metrics = await admin.metrics()
        assert metrics["sdk_replication_lag_seconds"] == 40.5
        assert metrics['sdk_check_ok{check="replication"}'] == ok
        assert (await admin.get("/livez")).status_code == 200


async def test_a_part_that_fails_hides_none_of_the_others(caplog):
    def broken():
        raise ValueError("no figures")

    def unknown():
        return [Sample("sdk_invented", (), 1), Sample("sdk_replication_lag_seconds", (), 2)]

    async with administered() as admin:
        sources = admin.runtime.administrator.sources
        sources.samples.extend((broken, unknown))
        for _ in range(3):
            metrics = await admin.metrics()
        assert metrics["sdk_replication_lag_seconds"] == 2
        assert metrics["sdk_queue_depth"] == 0
        assert "sdk_invented" not in metrics
        assert caplog.text.count("admin.source_failed") == 2
        sources.checks.append(broken)
        answer = await admin.get("/readyz")
        assert (answer.status_code, checks_of(answer)["broken"]["ok"]) == (503, False)


async def test_a_part_that_makes_up_names_does_not_fill_the_log(caplog):
    numbers = itertools.count()

    async with administered() as admin:
        admin.runtime.administrator.sources.samples.append(
            lambda: [Sample(f"sdk_{next(numbers)}", (), 1) for _ in range(1000)]
        )
        for _ in range(3):
            await admin.metrics()
    assert caplog.text.count("admin.source_failed") == MOST_REPORTED


async def test_a_full_queue_is_degraded_and_ready():
    """Senders get a Retry-After; a load balancer must not answer them for us."""

    release = trio.Event()

    async def waits(event):
        await release.wait()

    keys = {"Webhooks__Queue__Capacity": 1, "Webhooks__Queue__Workers": 1}
    async with administered(registry(waits, enqueue=True), **keys) as admin:
        await admin.app.deliver("order.paid", settle=False)
        await until(lambda: not (admin.runtime.receiver.queue_depth or admin.runtime.receiver.idle))
        assert (await admin.get("/readyz")).status_code == 200
        await admin.app.deliver("order.paid", settle=False)
        answer = await admin.get("/readyz")
        assert answer.status_code == 200
        assert checks_of(answer)["queue"] == {
            "name": "queue",
            "ok": True,
            "degraded": True,
            "detail": "1 of 1 slots are used",
        }
        metrics = await admin.metrics()
        assert (metrics["sdk_queue_depth"], metrics["sdk_queue_capacity"]) == (1, 1)
        release.set()
        await admin.app.settle()
        assert (await admin.get("/readyz")).status_code == 200


async def test_workers_that_long_runs_hold_are_named_and_the_process_stays_ready(monkeypatch):
    """Deliveries are still stored, and inline handlers run."""
    monkeypatch.setattr("sdk_trio.webhooks.run_watch.LONG_RUN_SECONDS", 0.0)
    release = trio.Event()

    async def waits(event):
        await release.wait()

    async with administered(registry(waits, enqueue=True), Webhooks__Queue__Workers=1) as admin:
        await admin.app.deliver("order.paid", webhook_id="held", settle=False)
        await until(lambda: admin.runtime.receiver.runs)
        answer = await admin.get("/readyz")
        assert answer.status_code == 200
        check = checks_of(answer)["queue"]
        assert check["degraded"]
        assert "long runs occupy all 1 workers" in check["detail"]
        assert "waits with held for " in check["detail"]
        release.set()
        await admin.app.settle()
        assert not checks_of(await admin.get("/readyz"))["queue"].get("degraded")


async def test_a_store_that_cannot_write_is_not_ready_until_it_can(monkeypatch):
    async with administered() as admin:
        inbox = admin.app.store
        fault = StoreUnavailableError("the disk is full")

        async def fails(name, value):
            raise fault

        # The store itself must be the faulty one: no disk can be filled here.
        monkeypatch.setattr(inbox, "write_checkpoint", fails)
        answer = await admin.get("/readyz")
        assert answer.status_code == 503
        assert checks_of(answer)["store"]["detail"] == "the disk is full"
        assert (await admin.get("/livez")).status_code == 200
        assert (await admin.get("/metrics")).status_code == 200
        monkeypatch.undo()
        while (await admin.get("/readyz")).status_code != 200:
            await trio.sleep(0.02)


async def test_a_store_that_hangs_holds_up_no_probe(monkeypatch):
    async with administered() as admin:

        async def hangs(name, value):
            await trio.sleep_forever()

        monkeypatch.setattr(admin.app.store, "write_checkpoint", hangs)
        with trio.fail_after(60):
            while True:
                answer = await admin.get("/readyz")
                assert answer.status_code == 503
                if "has not answered" in checks_of(answer)["store"]["detail"]:
                    break


async def test_probes_see_a_long_start_and_metrics_work_meanwhile(monkeypatch):
    opened = trio.Event()
    runtime = Runtime(settings(Admin__Enabled=True, Admin__TokenEnvVar="SDK_TEST_ADMIN_TOKEN"))
    open_store = runtime.receiver.opened

    @asynccontextmanager
    async def slowly():
        await opened.wait()
        async with open_store():
            yield

    monkeypatch.setattr(runtime.receiver, "opened", slowly)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.run)
            await until(lambda: runtime.administrator.status()["admin"])
            url = runtime.administrator.status()["admin"][0]
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                answer = await client.get("/readyz")
                assert answer.status_code == 503
                assert not checks_of(answer)["receiver"]["ok"]
                assert not checks_of(answer)["store"]["ok"]
                assert (await client.get("/livez")).status_code == 200
                assert (await client.get("/metrics")).status_code == 200
                opened.set()
                while (await client.get("/readyz")).status_code != 200:
                    await trio.sleep(0.02)
            runtime.shut_down("seen")


async def test_a_drain_is_seen_while_the_receiver_still_answers():
    begun, release = trio.Event(), trio.Event()

    async def waits(event):
        begun.set()
        await release.wait()

    async with administered(registry(waits)) as admin:
        with await RawWire.connect(admin.app.url) as wire:
            await wire.send(delivery_request(signed("order.paid")))
            await begun.wait()
            admin.runtime.shut_down("a drain")
            await trio.testing.wait_all_tasks_blocked()
            answer = await admin.get("/readyz")
            assert answer.status_code == 503
            drain = checks_of(answer)["drain"]
            assert (drain["ok"], drain["detail"]) == (False, "a graceful stop has begun")
            assert (await admin.get("/livez")).status_code == 200
            assert (await admin.get("/healthz")).json()["state"] == "draining"
            assert (await admin.metrics())["sdk_draining"] == 1
            release.set()
            assert (await wire.answer()).status == 200


async def test_from_the_beginning_of_a_stop_it_is_unready_although_deliveries_are_still_taken():
    async with administered(registry(works), Server__ShutdownDelaySeconds=60) as admin:
        admin.runtime.shut_down("a new version")
        assert (await admin.app.deliver("order.paid")).status == 200
        answer = await admin.get("/readyz")
        assert answer.status_code == 503
        checks = checks_of(answer)
        assert checks["drain"]["detail"] == "a graceful stop has begun"
        assert checks["receiver"]["detail"] == "still accepts deliveries for a moment"
        assert not checks["drain"]["ok"]
        assert not checks["receiver"]["ok"]
        assert (await admin.get("/healthz")).json()["state"] == "draining"
        assert (await admin.metrics())["sdk_draining"] == 1
        admin.runtime.force()


@pytest.mark.parametrize("same_directory", [True, False])
async def test_an_address_in_use_is_named_unless_the_receiver_itself_runs_already(
    tmp_path, same_directory
):
    keys = {"Storage__Backend": "Sqlite", "Admin__Enabled": True}
    async with administered(Storage__Path=str(tmp_path / "a"), **keys) as admin:
        keys["Admin__Bind"] = admin.runtime.started.admin[0].partition("://")[2]
        path = tmp_path / ("a" if same_directory else "b")
        second = Runtime(settings(Storage__Path=str(path), **keys))
        error = StoreLockedError if same_directory else BindError
        message = f"in use by process {os.getpid()}" if same_directory else "Sdk:Admin:Bind"
        with pytest.raises(error, match=message):
            await second.run()
        await until(partial(is_ready, admin))


# -- the API ----------------------------------------------------------------------------------


async def test_the_status_lists_the_running_parts_and_their_counts(store):
    async with administered(registry(works), **store) as admin:
        await admin.app.deliver("order.paid")
        status = await admin.api("/status")
        started = admin.runtime.started
        assert status["receiver"] == list(started.receiver)
        assert status["admin"] == list(started.admin)
        assert (status["state"], status["status"]) == ("running", "ok")
        assert status["events"]["done"] == 1
        assert status["tenants"] is None
        assert status["deliveries"]["handled"] == 1
        assert status["uptime_seconds"] >= 0


async def test_tenants_are_counted(tmp_path):
    keys = {"MultiTenant__Enabled": True, "Storage__Path": str(tmp_path / "data")}
    async with administered(**keys) as admin:
        await admin.runtime.receiver.tenancy.service.add("acme", name="Acme", actor="test")
        status = await admin.api("/status")
        assert status["tenants"]["Active"] == 1
        assert (await admin.metrics())['sdk_tenants{status="Active"}'] == 1


async def test_events_are_listed_and_shown_with_the_fields_of_the_command_line(store):
    async with administered(registry(breaks, enqueue=True), **store, **ONCE) as admin:
        for number in range(3):
            await admin.app.deliver("order.paid", webhook_id=f"msg_{number}")
        await admin.app.deliver("order.created", webhook_id="msg_parked")
        newest = await admin.api("/events?limit=2")
        assert [event["webhook_id"] for event in newest] == ["msg_parked", "msg_2"]
        dead = await admin.api("/events?state=dead&type=order.paid&after=0")
        assert [event["webhook_id"] for event in dead] == ["msg_0", "msg_1", "msg_2"]
        after = await admin.api(f"/events?after={dead[1]['sequence']}")
        assert [event["webhook_id"] for event in after] == ["msg_2", "msg_parked"]
        assert "raw" not in dead[0]
        event = await admin.api("/events/msg_0")
        assert "raw" not in event
        assert event["failed_attempts"][0]["error"] == "ValueError: no such product"
        with_body = await admin.api("/events/msg_0?body=1")
        assert json.loads(with_body["raw"])["type"] == "order.paid"


ONCE = {"Webhooks__Queue__MaxAttempts": 1}


async def test_replayed_events_run_at_once(store):
    fixed = False
    runs = []

    async def handler(event):
        runs.append(event.webhook_id)
        if not fixed:
            raise ValueError("no such product")

    async with administered(registry(handler, enqueue=True), **store, **ONCE) as admin:
        for number in range(3):
            await admin.app.deliver("order.paid", webhook_id=f"msg_{number}")
        fixed = True
        answer = (await admin.replay({"ids": ["msg_0", "nothing"]})).json()
        assert [event["replayed"] for event in answer["events"]] == [True, False]
        assert answer["events"][1]["reason"] == "there is no such event in the inbox"
        await admin.app.settle()
        assert (await admin.api("/events/msg_0"))["state"] == "done"
        answer = (await admin.replay({"state": "dead"})).json()
        assert (answer["replayed"], answer["more"]) == (2, False)
        await admin.app.settle()
        assert (await admin.app.store.counts())[DeliveryState.DONE] == 3


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/api/events?state=lost", "state takes one of received, running"),
        ("/api/events?limit=0", "limit takes a number from 1 to 500"),
        ("/api/events?limit=501", "limit takes"),
        ("/api/events?after=-1", "after takes"),
        ("/api/events?after=9223372036854775808", "after takes"),
        ("/api/events?after=%C3%A9", "after takes"),
        ("/api/events?limit=%FF", "the query is not understood"),
        (
            "/api/events?stat=dead",
            "the query takes type, state, tenant, source, subject, since, until",
        ),
        ("/api/events?before=x", "before takes a number from 0"),
        ("/api/events?order=up", "order takes newest or oldest"),
        ("/api/events?since=yesterday", "since takes Unix seconds or a time such as 2026-01"),
        ("/api/events?until=2026-01-31T12:00:00", "until takes Unix seconds or a time"),
        ("/api/events?until=2026-02-30T12:00:00Z", "until takes Unix seconds or a time"),
        ("/api/events?limit=1&limit=2", "limit is given twice"),
        ("/api/events/msg_1?body=yes", "body takes 0 or 1"),
    ],
)
async def test_an_invalid_query_is_answered_with_the_valid_parameters(path, reason):
    async with administered() as admin:
        answer = await admin.get(path, TOKEN)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(reason)


@pytest.mark.parametrize(
    "order",
    [
        {},
        [],
        "msg_1",
        {"ids": []},
        {"ids": ["a"], "state": "dead"},
        {"ids": ["a"], "type": "order.paid"},
        {"ids": [1]},
        {"state": "done"},
        {"ids": ["x"] * 1001},
    ],
)
async def test_an_order_that_is_not_understood_changes_nothing(order):
    async with administered(registry(breaks, enqueue=True), **ONCE) as admin:
        await admin.app.deliver("order.paid")
        assert (await admin.replay(order)).status_code == 400
        assert (await admin.app.store.counts())[DeliveryState.DEAD] == 1


async def test_a_missing_resource_is_reported_plainly():
    async with administered() as admin:
        assert (await admin.get("/nothing")).status_code == 404
        assert (await admin.get("/api/nothing", TOKEN)).status_code == 404
        assert (await admin.get("/api/events/nothing", TOKEN)).status_code == 404
        answer = await admin.ask("DELETE", "/api/events", TOKEN)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


async def test_the_console_is_served_without_a_token():
    async with administered() as admin:
        page = await admin.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policies = page.headers.get_list("content-security-policy")
        assert len(policies) == 1
        assert "default-src 'none'; script-src 'self'" in policies[0]
        again = await admin.get("/", if_none_match=page.headers["etag"])
        assert (again.status_code, again.content) == (304, b"")
        for name in re.findall(r'(?:src|href)="([^":]+)"', page.text):
            assert (await admin.get(f"/{name}")).status_code == 200
        assert "preact" in (await admin.get("/licences.txt")).text
        assert (await admin.get("/", host="evil.example")).status_code == 403
        assert (await admin.ask("POST", "/")).status_code == 405


# -- who may do what --------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "", "wrong", TOKEN[:-1], f"{TOKEN}x", "é"])
async def test_the_api_needs_the_token(given):
    async with administered() as admin:
        headers = {} if given is None else {"authorization": f"Bearer {given}".strip().encode()}
        for method, path in (
            ("GET", "/api/status"),
            ("GET", "/api/events"),
            ("GET", "/api/events/msg_1"),
            ("GET", "/api/nothing"),
            ("POST", "/api/events/replay"),
        ):
            answer = await admin.ask(method, path, None, headers)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:8081", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
        ("admin.internal:80", 200),
        ("localhost:8081", 200),
        ("console.localhost", 200),
        ("10.1.2.3:8081", 200),
        ("[::1]:8081", 200),
    ],
)
async def test_a_foreign_name_that_resolves_to_this_host_reads_nothing(host, status):
    async with administered(Admin__AllowedHosts=["admin.internal"]) as admin:
        for path in ("/metrics", "/healthz", "/api/status"):
            assert (await admin.get(path, TOKEN, host=host)).status_code == status
        assert (await admin.get("/readyz", host=host)).status_code == 200
        details = "detail" in checks_of(await admin.get("/readyz", host=host))["queue"]
        assert details == (status == 200)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"sec_fetch_site": "same-origin"}, 200),
        ({}, 200),
    ],
)
async def test_a_page_of_another_site_changes_nothing(headers, status):
    async with administered(registry(breaks, enqueue=True), **ONCE) as admin:
        await admin.app.deliver("order.paid", webhook_id="msg_1")
        answer = await admin.replay({"ids": ["msg_1"]}, **headers)
        assert answer.status_code == status
        await admin.app.settle()
        attempts = (await admin.api("/events/msg_1"))["failed_attempts"]
        assert len(attempts) == (2 if status == 200 else 1)


async def test_a_console_that_only_shows_changes_nothing_and_says_why():
    async with administered(registry(breaks, enqueue=True), Admin__ReadOnly=True, **ONCE) as admin:
        await admin.app.deliver("order.paid", webhook_id="msg_1")
        answer = await admin.replay({"ids": ["msg_1"]})
        assert answer.status_code == 403
        assert "Sdk:Admin:ReadOnly is true" in answer.json()["error"]
        assert (await admin.api("/events/msg_1"))["state"] == "dead"
        assert (await admin.api("/status"))["read_only"] is True


async def test_an_address_for_other_machines_shows_strangers_no_more_than_probes():
    async with administered(Admin__Bind="0.0.0.0:0") as admin:
        port = admin.runtime.started.admin[0].rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert (await client.get("/livez")).status_code == 200
            answer = await client.get("/readyz")
            assert answer.status_code == 200
            assert all(
                set(check) == {"name", "ok", "degraded"} for check in answer.json()["checks"]
            )
            authorized = {"authorization": f"Bearer {TOKEN}"}
            for path in ("/metrics", "/healthz", "/api/status"):
                assert (await client.get(path)).status_code == 401
                assert (await client.get(path, headers=authorized)).status_code == 200
            assert "detail" in (await client.get("/readyz", headers=authorized)).text


async def test_a_large_body_is_refused():
    async with administered() as admin:
        answer = await admin.replay({"ids": ["x" * 300_000]})
        assert answer.status_code == 413


# -- the token --------------------------------------------------------------------------------


async def test_a_generated_token_is_readable_only_by_its_owner(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("SDK_TEST_ADMIN_TOKEN")
    caplog.set_level("DEBUG")
    path = tmp_path / "data" / "admin-token"
    for _ in range(2):
        async with administered(Storage__Path=str(path.parent)) as admin:
            found = path.read_text().strip()
            assert len(found) >= 43
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert (await admin.get("/api/status", found)).status_code == 200
            assert (await admin.get("/api/status", TOKEN)).status_code == 401
        kept, found = found, path.read_text().strip()
        assert kept == found
    assert str(path) in caplog.text
    assert found not in caplog.text
    assert os.listdir(path.parent) == ["admin-token"]


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
async def test_a_token_that_others_could_read_is_replaced(tmp_path, monkeypatch):
    monkeypatch.delenv("SDK_TEST_ADMIN_TOKEN")
    path = tmp_path / "data" / "admin-token"
    path.parent.mkdir(mode=0o700)
    path.write_text("readable-by-others\n")
    path.chmod(0o644)
    async with administered(Storage__Path=str(path.parent)) as admin:
        assert (await admin.get("/api/status", "readable-by-others")).status_code == 401
        assert (await admin.get("/api/status", path.read_text().strip())).status_code == 200
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_without_a_place_for_the_token_the_api_is_closed(tmp_path, monkeypatch):
    monkeypatch.delenv("SDK_TEST_ADMIN_TOKEN")
    (tmp_path / "file").write_text("")
    async with administered(Storage__Path=str(tmp_path / "file" / "data")) as admin:
        # The log and the guide of `dev` show it.
        place = admin.runtime.administrator.token.place
        assert place == "none: set the variable SDK_TEST_ADMIN_TOKEN"
        assert (await admin.get("/readyz")).status_code == 200
        assert (await admin.get("/api/status", "")).status_code == 401
        assert (await admin.get("/api/status", "None")).status_code == 401


# -- its life ---------------------------------------------------------------------------------


async def test_a_busy_admin_port_is_named_and_nothing_is_served():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with trio.fail_after(60), pytest.raises(BindError, match="Sdk:Admin:Bind") as caught:
            await Runtime(settings(Admin__Enabled=True, Admin__Bind=address)).run()
        assert address in str(caught.value)


async def test_it_serves_a_unix_socket(tmp_path):
    path = tmp_path / "admin.sock"
    runtime = Runtime(settings(Admin__Enabled=True, Admin__Bind=f"unix:{path}"))
    async with running(runtime) as started:
        assert started.admin == (f"unix:{path}",)
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/metrics")).status_code == 200


async def test_a_wish_for_another_protocol_is_answered_as_plain_http():
    async with administered() as admin:
        with await RawWire.connect(admin.runtime.started.admin[0]) as wire:
            await wire.send(
                b"GET /livez HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            answer = await wire.answer()
        assert answer.status == 200
        assert b"alive" in answer.body


async def test_switched_off_there_is_none():
    runtime = Runtime(settings())
    async with running(runtime) as started:
        assert started.admin == ()
