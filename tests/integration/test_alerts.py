"""Each condition opens an alert and closes it on the real thing; its messages arrive."""

import base64
import contextlib
import json
import os
import signal
import time
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import trio
import trustme
from support.alerts import alerted
from support.deliveries import SECRET, arrival
from support.notifications import VARIABLES
from support.ports import free_port
from support.postgres import PostgresServer, required_binaries
from support.programs import program
from support.scripted_upstream import full_stack, scripted_upstream
from support.serving import registry
from support.waiting import until
from support.wire import Wire

from sdk_trio.config.secret import Secret
from sdk_trio.errors import SdkError
from sdk_trio.records.synthetic import synthetic_id
from sdk_trio.testing import sign_delivery

DAY = 86_400.0
OTHER_SECRET = "whsec_" + base64.b64encode(b"the older secret of a rotation..").decode()


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Set the credentials, and let each check read the current state of the store."""
    monkeypatch.chdir(tmp_path)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sdk_trio.admin.status.FRESH_SECONDS", 0.1)
    monkeypatch.setattr("sdk_trio.admin.status.COUNTING_SHARE", 1.0)


async def deliver(world, webhook_id="evt_1", *, secret=SECRET, data=None):
    """Deliver one event with the time of the runtime's clock."""
    signed = sign_delivery(
        "order.paid",
        data,
        secret=secret,
        webhook_id=webhook_id,
        timestamp=int(world.clock()),
    )
    with await Wire.connect(world.target) as wire:
        return (await wire.post(signed)).status


async def test_new_dead_letters(tmp_path):
    broken = True

    async def handle(event):
        if broken:
            raise ValueError("no such product")

    keys = {
        "Webhooks__Queue__MaxAttempts": 1,
        "Storage__Backend": "Sqlite",
        "Storage__Path": str(tmp_path),
    }
    async with alerted(registry(handle, enqueue=True), **keys) as world:
        assert await deliver(world) == 200
        await world.has_sent("dead_letters opened")
        assert (await world.stored())["dead_letters"].is_open
        broken = False
        await world.runtime.receiver.store.replay(["evt_1"])
        world.runtime.wake()
        await world.has_sent("dead_letters opened", "dead_letters closed")
        assert not (await world.stored())["dead_letters"].is_open


async def test_dead_letters_are_new_for_one_interval():
    async def handle(event):
        raise ValueError("no such product")

    handlers = registry(handle, enqueue=True)
    async with alerted(handlers, Webhooks__Queue__MaxAttempts=1) as world:
        await deliver(world)
        await world.has_sent("dead_letters opened")
        world.clock.ahead += DAY + 1
        await world.has_sent("dead_letters opened", "dead_letters closed")


async def test_silence():
    async with alerted(registry(works), Alerts__SilenceMinutes=30) as world:
        # Nothing has ever arrived, which does not count as silence.
        world.clock.ahead += DAY
        await world.runtime.alerts.watch.check()
        assert await deliver(world) == 200
        await world.runtime.alerts.watch.check()
        world.clock.ahead += 1860
        await world.has_sent("silence opened")
        await deliver(world, "evt_2")
        await world.has_sent("silence opened", "silence closed")


async def test_events_that_catch_up_makes_do_not_end_the_silence():
    keys = {"Alerts__SilenceMinutes": 30, "Alerts__OldestWaitingMinutes": 1000}
    async with alerted(registry(works), **keys) as world:
        assert await deliver(world) == 200
        later = world.clock() + 1860
        made = arrival(webhook_id=synthetic_id("order.paid", "ord_1", "now"), now=later)
        await world.runtime.receiver.store.accept(made.delivery, leased=False)
        world.clock.ahead += 1860
        await world.has_sent("silence opened")
        for _ in range(2):
            await world.runtime.alerts.watch.check()
        assert world.kinds == ["silence opened"]


async def test_silence_after_the_clock_was_set_back():
    async with alerted(registry(works), Alerts__SilenceMinutes=30) as world:
        world.clock.ahead += DAY
        assert await deliver(world) == 200
        await world.runtime.alerts.watch.check()
        world.clock.ahead -= DAY
        await world.runtime.alerts.watch.check()
        assert world.messages == []
        world.clock.ahead += 1860
        await world.has_sent("silence opened")


async def works(event):
    """Handle an event without any effect."""


async def test_an_event_that_waits_too_long():
    go_on = trio.Event()

    async def handle(event):
        await go_on.wait()

    async with alerted(registry(handle, enqueue=True)) as world:
        await deliver(world)
        world.clock.ahead += 901
        await world.has_sent("oldest_waiting opened")
        go_on.set()
        await world.has_sent("oldest_waiting opened", "oldest_waiting closed")


async def test_a_pause_that_was_forgotten():
    async with alerted() as world:
        store = world.runtime.receiver.store
        pause = {"actor": "ann", "reason": "for a secret project", "until": None}
        await store.pause("@stripe:invoice.*", now=world.clock(), **pause)
        await world.has_sent()
        world.clock.ahead += 901
        await world.has_sent("events_paused opened")
        assert "invoice.* of stripe since 20" in world.messages[0]["detail"]
        assert "secret project" not in str(world.messages)
        await store.resume("@stripe:invoice.*", actor="ann", now=world.clock())
        await world.has_sent("events_paused opened", "events_paused closed")


async def check_endpoint(world):
    """Read the endpoint at the upstream, as the runtime does each minute."""
    with contextlib.suppress(SdkError):
        await world.runtime.gap_watch.check(None)


async def test_a_disabled_endpoint_and_an_unavailable_upstream_open_alerts():
    async with scripted_upstream() as upstream:
        (endpoint,) = upstream.endpoints
        endpoint["enabled"] = False

        def make(**keys):
            return full_stack(upstream, **keys)

        keys = {
            "Webhooks__Reconciliation__Enabled": True,
            "Webhooks__Reconciliation__ByState": False,
            "MaxRetries": 0,
        }
        async with alerted(make=make, **keys) as world:
            # The first check is the runtime's own.
            await world.has_sent("endpoint_disabled opened")
            endpoint["enabled"] = True
            await check_endpoint(world)
            sent = ["endpoint_disabled opened", "endpoint_disabled closed"]
            await world.has_sent(*sent)
            upstream.fails = lambda method, path: 500
            await check_endpoint(world)
            sent.append("sender_unreachable opened")
            await world.has_sent(*sent)
            upstream.fails = lambda method, path: None
            world.runtime.client.breaker.close()
            await check_endpoint(world)
            await world.has_sent(*sent, "sender_unreachable closed")


async def test_a_certificate_that_is_about_to_expire(tmp_path):
    def issue(name, days):
        end = datetime.now(UTC) + timedelta(days=days)
        issued = trustme.CA().issue_cert("127.0.0.1", not_after=end)
        issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / name)
        return str(tmp_path / name)

    soon, renewed = issue("soon.pem", 13), issue("renewed.pem", 90)
    async with alerted(Server__CertFile=soon, Server__KeyFile=soon) as world:
        await world.has_sent("certificate_expiry opened")
        chosen = world.runtime.settings
        server = msgspec.structs.replace(chosen.server, cert_file=renewed, key_file=renewed)
        world.runtime.reload(msgspec.structs.replace(chosen, server=server))
        await world.has_sent("certificate_expiry opened", "certificate_expiry closed")


def web_token(end):
    parts = [json.dumps(part).encode() for part in ({"alg": "none"}, {"exp": end})]
    return ".".join([*(base64.urlsafe_b64encode(p).decode().rstrip("=") for p in parts), "c2ln"])


async def test_a_token_that_is_about_to_expire():
    async with scripted_upstream() as upstream:

        def make(**keys):
            return full_stack(upstream, **{"AccessToken": web_token(time.time() + DAY), **keys})

        async with alerted(make=make) as world:
            await world.has_sent("token_expiry opened")
            token = Secret(web_token(time.time() + 90 * DAY))
            world.runtime.reload(
                msgspec.structs.replace(world.runtime.settings, access_token=token)
            )
            await world.has_sent("token_expiry opened", "token_expiry closed")


async def test_an_unused_secret_of_a_rotation_opens_an_alert():
    keys = {"Webhooks__Secrets": [OTHER_SECRET]}
    async with alerted(registry(works), **keys) as world:
        assert await deliver(world, "evt_1", secret=OTHER_SECRET) == 200
        world.clock.ahead += DAY + 60
        assert await deliver(world, "evt_2") == 200
        await world.has_sent("secret_unused opened")
        assert "position 1 " in world.messages[0]["detail"]
        await deliver(world, "evt_3", secret=OTHER_SECRET)
        await world.has_sent("secret_unused opened", "secret_unused closed")


@pytest.fixture
def server():
    server = PostgresServer(required_binaries())
    server.start()
    yield server
    if server.data.joinpath("postmaster.pid").exists():
        server.remove()


async def test_an_unavailable_store_and_the_messages_sent_meanwhile(server, monkeypatch):
    monkeypatch.setenv("SDK_POSTGRES_DSN", server.empty())
    for name, seconds in {"TERM": 4.0, "MARGIN": 1.0, "RENEW": 0.5, "ASK": 0.5}.items():
        monkeypatch.setattr(f"sdk_trio.base.term.{name}_SECONDS", seconds)
    async with alerted(Storage__Backend="Postgres") as world:
        await until(lambda: world.runtime.leads)
        await world.runtime.alerts.watch.check()
        await trio.to_thread.run_sync(server.stop)

        async def is_noticed():
            await world.runtime.alerts.watch.check()
            facts = await world.runtime.alerts.observe()
            return facts.store_writes is False

        await until(is_noticed)
        world.clock.ahead += 16
        await world.has_sent("store_unreachable opened")
        # Without the store no term can be renewed; the host that led continues.
        await until(lambda: not world.runtime.leads)
        await world.runtime.alerts.watch.check()
        await trio.to_thread.run_sync(server.start)
        await world.has_sent("store_unreachable opened", "store_unreachable closed")

        async def is_written():
            await world.runtime.alerts.watch.check()
            return "store_unreachable" in await world.stored()

        await until(is_written)
        alert = (await world.stored())["store_unreachable"]
        assert (alert.is_open, alert.announced_open, alert.openings) == (False, False, 1)


async def test_a_clock_that_differs_from_the_database(server, monkeypatch):
    monkeypatch.setenv("SDK_POSTGRES_DSN", server.empty())
    moved = 0.0
    wall = time.time
    async with alerted(Storage__Backend="Postgres") as world:
        monkeypatch.setattr("sdk_trio.storage.sql.reads.clock.wall", lambda: wall() + moved)
        await until(lambda: world.runtime.leads)
        moved = 90.0
        await world.has_sent("clock_offset opened")
        assert "by 90 s" in world.messages[0]["detail"]
        moved = 0.0
        await world.has_sent("clock_offset opened", "clock_offset closed")


async def test_replicas_that_are_behind(tmp_path, monkeypatch):
    program("litestream")
    monkeypatch.setattr("sdk_trio.replication.health_check.CHECK_SECONDS", 0.3)
    replication = "MultiTenant__FileDb__Replication"
    keys = {
        "Storage__Backend": "Sqlite",
        "Storage__Path": str(tmp_path / "data"),
        "MultiTenant__Enabled": True,
        f"{replication}__UseReplication": True,
        f"{replication}__Supervise": True,
        f"{replication}__ReplicaTargetType": "LocalDisk",
        f"{replication}__LocalDisk__Path": str(tmp_path / "replica"),
        f"{replication}__ConfigOutputPath": str(tmp_path / "replicator.yml"),
        f"{replication}__MetricsPort": free_port(),
        f"{replication}__HealthCheckMaxLagSeconds": 1,
    }
    async with alerted(**keys) as world:
        overseer = world.runtime.replication

        async def lags():
            return (await world.runtime.alerts.observe()).replication_lags

        async def works_again():
            return await lags() is False

        await until(works_again)
        os.kill(overseer.supervisor.pid, signal.SIGSTOP)
        try:
            await until(lags)
            world.clock.ahead += 61
            await world.has_sent("replication_lag opened")
        finally:
            os.kill(overseer.supervisor.pid, signal.SIGCONT)
        await until(works_again)
        await world.has_sent("replication_lag opened", "replication_lag closed")
