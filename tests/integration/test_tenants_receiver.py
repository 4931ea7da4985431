"""Deliveries of tenants over real sockets: whose they are, by whose keys, and who may run them."""

import json
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio
from support.waiting import until

from sdk_trio import (
    HandlerRegistry,
    KeyFile,
    NotSupportedError,
    Services,
    TenantCredentials,
    TenantNotActiveError,
    TenantStatus,
)
from sdk_trio.config import Secret, Settings
from sdk_trio.config.options.tenants import MultiTenantOptions
from sdk_trio.errors import StoreUnavailableError
from sdk_trio.events import OrderPaidEvent, plain_envelope
from sdk_trio.events.decoding import plain_outline
from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.storage.open import open_inbox
from sdk_trio.tenants import EnvironmentVariable, TenantService
from sdk_trio.testing import running_app, settings_for_tests, sign_delivery
from sdk_trio.testing.application import AppUnderTest
from sdk_trio.webhooks.signature import new_secret


def fresh_secret() -> str:
    return new_secret(secrets.token_bytes(32))


def settings_in(directory: Path, backend: str = "Sqlite", **keys: Any) -> Settings:
    return settings_for_tests(
        {
            "Storage:Backend": backend,
            "Storage:Path": str(directory / "data"),
            "MultiTenant:Enabled": True,
            **{name.replace("__", ":"): value for name, value in keys.items()},
        }
    )


def tenants_of(app: AppUnderTest) -> TenantService:
    return app.runtime.receiver.tenancy.service


def signed(secret: str, organization_id: str | None, **options: Any) -> Any:
    return sign_delivery(
        "order.paid",
        {"customer": {"organization_id": organization_id}},
        secret=Secret(secret),
        **options,
    )


@attrs.define
class Seen:
    """The arguments of a handler's call."""

    events: list[Any] = attrs.Factory(list)

    def registry(self, **options: Any) -> HandlerRegistry:
        handlers = HandlerRegistry()

        @handlers.on(OrderPaidEvent, **options)
        async def keep(event: OrderPaidEvent) -> None:
            self.events.append(event)

        return handlers

    @property
    def identifiers(self) -> list[str | None]:
        return [event.tenant and event.tenant.identifier for event in self.events]


@asynccontextmanager
async def app_with_two_tenants(
    directory: Path, handlers: HandlerRegistry, backend: str = "Sqlite"
) -> AsyncIterator[tuple[AppUnderTest, dict[str, str]]]:
    keys = {"a": fresh_secret(), "b": fresh_secret()}
    async with running_app(handlers, settings_in(directory, backend)) as app:
        for name, secret in keys.items():
            file = directory / f"{name}.key"
            file.write_text(secret)
            await tenants_of(app).add(
                f"tenant-{name}",
                name=name.upper(),
                site_manager_email=f"{name}@example.com",
                site_manager_email_verified=True,
                organization_id=f"org_{name}",
                credentials=TenantCredentials(webhook_secrets=(KeyFile(str(file)),)),
            )
        yield app, keys


async def test_the_first_start_assigns_earlier_deliveries_to_the_default_tenant(
    tmp_path: Path,
) -> None:
    alone = msgspec.structs.replace(settings_in(tmp_path), multi_tenant=MultiTenantOptions())
    async with running_app(None, alone) as app:
        before = await app.deliver("order.paid", {"customer": {"organization_id": "org_a"}})
        assert before.state is DeliveryState.PARKED
    seen = Seen()
    for _ in range(2):
        async with running_app(seen.registry(enqueue=True), settings_in(tmp_path)) as app:
            (default,) = await tenants_of(app).list()
            assert default.identifier == "default"
            async with open_inbox(app.settings, owner="a command") as elsewhere:
                await elsewhere.replay([before.webhook_id])
            await until(lambda: seen.events)
    assert seen.events[0].tenant == default


async def test_a_start_is_refused_while_the_upgrade_cannot_be_done(tmp_path: Path) -> None:
    strategy = {"MultiTenant__SingleTenantUpgrade__DefaultTenantStrategy": "FirstUserOrganization"}
    with pytest.raises(NotSupportedError):
        async with running_app(None, settings_in(tmp_path, **strategy)):
            raise AssertionError("started")


@pytest.fixture(params=["Sqlite", "Memory"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("enqueue", [False, True])
async def test_an_event_carries_the_tenant_of_its_organization(
    tmp_path: Path, backend: str, enqueue: bool
) -> None:
    seen = Seen()
    async with app_with_two_tenants(tmp_path, seen.registry(enqueue=enqueue), backend) as (app, _):
        for organization_id in ("org_a", "org_b", "org_unknown", None):
            delivered = await app.deliver(
                "order.paid", {"customer": {"organization_id": organization_id}}
            )
            assert delivered.status == 200
            record = delivered.record
            assert record is not None
            assert record.state is DeliveryState.DONE
        tenant = await tenants_of(app).get("tenant-a")
        kept = await app.store.find(after_sequence=0)
    assert seen.identifiers == ["tenant-a", "tenant-b", None, None]
    assert seen.events[0].tenant == tenant
    assert [record.tenant_id is None for record in kept] == [False, False, True, True]


async def test_a_delivery_is_verified_by_its_own_tenant_or_the_host_only(
    tmp_path: Path, backend: str
) -> None:
    seen = Seen()
    async with app_with_two_tenants(tmp_path, seen.registry(), backend) as (app, keys):
        refused = [
            signed(keys["a"], "org_b"),
            signed(keys["b"], "org_a"),
            signed(keys["a"], "org_unknown"),
            signed(keys["a"], None),
            signed(fresh_secret(), "org_a"),
        ]
        bodies = set()
        for delivery in refused:
            answer = await app.deliver(delivery)
            bodies.add((answer.status, answer.body))
            assert await app.store.get(delivery.webhook_id) is None
        assert bodies == {(400, b'{"error":"invalid webhook"}')}
        assert seen.events == []
        for secret, claimed in ((keys["a"], "org_a"), (keys["b"], "org_b")):
            assert (await app.deliver(signed(secret, claimed))).status == 200
        # The host's own secret is tried for every delivery.
        assert (
            await app.deliver("order.paid", {"customer": {"organization_id": "org_b"}})
        ).status == 200
    assert seen.identifiers == ["tenant-a", "tenant-b", "tenant-b"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"type":"order.paid","data":{"customer":'
        b'{"organization_id":"org_a","organization_id":"org_b"}}}',
        b'{"type":"order.paid","data":{"customer":{"organization_id":"org_a"}},"data":'
        b'{"customer":{"organization_id":"org_b"}}}',
    ],
)
async def test_a_claim_that_is_made_twice_chooses_the_key_of_the_tenant_that_gets_the_event(
    tmp_path: Path, body: bytes
) -> None:
    seen = Seen()
    async with app_with_two_tenants(tmp_path, seen.registry()) as (app, keys):
        for name in ("a", "b"):
            await app.deliver(sign_delivery(body, secret=Secret(keys[name])))
    assert seen.identifiers == ["tenant-b"]
    assert seen.events[0].data.customer.organization_id == "org_b"
    assert seen.events[0].json["data"]["customer"]["organization_id"] == "org_b"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b'{"type":"order.paid","data":{"organization_id":"org_a"}',
        b'{"type":"order.paid","data":' + b"[" * 100_000,
        b'{"type":"order.paid","data":{"organization_id":' + b"9" * 100_000 + b"}}",
        b'{"type":"order.paid","data":{"organization_id":"' + b"o" * 100_000 + b'"}}',
        b'{"type":"order.paid","data":{"organization_id":["org_a"]}}',
        b'{"type":"order.paid","data":{"organization_id":"org_a\\u0000"}}',
        b'{"type":"order.paid","data":{"organization_id":"\\ud800"}}',
        b'{"type":1,"data":{"organization_id":"org_a"}}',
    ],
)
async def test_a_hostile_claim_is_rejected_like_any_other(tmp_path: Path, body: bytes) -> None:
    async with app_with_two_tenants(tmp_path, Seen().registry()) as (app, _):
        answer = await app.deliver(sign_delivery(body, secret=Secret(fresh_secret())))
        assert (answer.status, answer.body) == (400, b'{"error":"invalid webhook"}')


async def test_a_key_file_is_rotated_without_a_restart(tmp_path: Path) -> None:
    seen = Seen()
    async with app_with_two_tenants(tmp_path, seen.registry()) as (app, keys):
        file, new = tmp_path / "a.key", fresh_secret()
        assert (await app.deliver(signed(keys["a"], "org_a"))).status == 200
        file.write_text(f"{new}\n{keys['a']}\n")
        assert (await app.deliver(signed(keys["a"], "org_a"))).status == 200
        assert (await app.deliver(signed(new, "org_a"))).status == 200
        file.write_text(f"not a secret\n{new}\n")
        assert (await app.deliver(signed(keys["a"], "org_a"))).status == 400
        assert (await app.deliver(signed(new, "org_a"))).status == 200
        file.unlink()
        assert (await app.deliver(signed(new, "org_a"))).status == 400
        file.write_text(new)
        assert (await app.deliver(signed(new, "org_a"))).status == 200


async def test_a_variable_counts_from_the_next_reload_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fresh_secret(), fresh_secret()
    monkeypatch.setenv("TENANT_C_SECRET", old)
    async with running_app(Seen().registry(), settings_in(tmp_path)) as app:
        source = EnvironmentVariable("TENANT_C_SECRET")
        await tenants_of(app).add(
            "c",
            name="C",
            organization_id="org_c",
            credentials=TenantCredentials(webhook_secrets=(source,)),
        )
        assert (await app.deliver(signed(old, "org_c"))).status == 200
        monkeypatch.setenv("TENANT_C_SECRET", new)
        assert (await app.deliver(signed(new, "org_c"))).status == 400
        app.runtime.receiver.tenancy.credentials.reload()
        assert (await app.deliver(signed(new, "org_c"))).status == 200
        assert (await app.deliver(signed(old, "org_c"))).status == 400


async def test_no_secret_of_the_host_is_needed_where_tenants_bring_theirs(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(
        settings_in(tmp_path),
        webhooks=msgspec.structs.replace(settings_in(tmp_path).webhooks, secret=None),
    )
    file = tmp_path / "key"
    file.write_text(fresh_secret())
    async with running_app(Seen().registry(), settings) as app:
        await tenants_of(app).add(
            "only",
            name="Only",
            organization_id="org",
            credentials=TenantCredentials(webhook_secrets=(KeyFile(str(file)),)),
        )
        assert (await app.deliver(signed(file.read_text(), "org"))).status == 200
        assert (await app.deliver(signed(fresh_secret(), "org"))).status == 400
        assert (await app.deliver(signed(fresh_secret(), "other"))).status == 400


@pytest.mark.parametrize("enqueue", [False, True])
async def test_events_of_a_suspended_tenant_run_unless_their_handler_asks_otherwise(
    tmp_path: Path, enqueue: bool
) -> None:
    runs, waits = Seen(), Seen()
    for seen, options in ((runs, {}), (waits, {"run_when_suspended": False})):
        handlers = seen.registry(enqueue=enqueue, **options)
        async with app_with_two_tenants(tmp_path / str(id(seen)), handlers) as (app, _):
            service = tenants_of(app)
            await service.suspend("tenant-a", reason="unpaid")
            held = await app.deliver("order.paid", {"customer": {"organization_id": "org_a"}})
            free = await app.deliver("order.paid", {"customer": {"organization_id": "org_b"}})
            assert (held.status, free.status, free.state) == (200, 200, DeliveryState.DONE)
            if seen is runs:
                assert held.state is DeliveryState.DONE
                continue
            assert held.state is DeliveryState.PARKED
            await service.reactivate("tenant-a")
            async with open_inbox(app.settings, owner="a command") as elsewhere:
                assert list(await elsewhere.replay([held.webhook_id])) == [held.webhook_id]
            await until(lambda: len(waits.events) >= 2)
    assert runs.identifiers == ["tenant-a", "tenant-b"]
    assert runs.events[0].tenant.status is TenantStatus.SUSPENDED
    assert waits.identifiers == ["tenant-b", "tenant-a"]


async def test_a_redelivery_of_a_tenant_suspended_during_its_inline_run_waits_for_that_run(
    tmp_path: Path,
) -> None:
    handlers = HandlerRegistry()
    begun, end = trio.Event(), trio.Event()

    @handlers.on(OrderPaidEvent, run_when_suspended=False)
    async def pay(event: OrderPaidEvent) -> None:
        begun.set()
        await end.wait()

    async with app_with_two_tenants(tmp_path, handlers) as (app, _):
        deliver = partial(
            app.deliver,
            "order.paid",
            {"customer": {"organization_id": "org_a"}},
            webhook_id="m1",
            expect="done",
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deliver)
            await begun.wait()
            await tenants_of(app).suspend("tenant-a", reason="unpaid")
            nursery.start_soon(deliver)
            with trio.move_on_after(0.2):
                await until(lambda: app.runtime.receiver.counters.values.get("parked"))
            end.set()


async def test_an_event_whose_success_was_not_recorded_is_not_parked_for_its_suspended_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_arguments: object, **_keywords: object) -> None:
        await trio.lowlevel.checkpoint()
        raise StoreUnavailableError("disk full")

    seen = Seen()
    async with app_with_two_tenants(tmp_path, seen.registry(run_when_suspended=False)) as (app, _):
        deliver = partial(
            app.deliver,
            "order.paid",
            {"customer": {"organization_id": "org_a"}},
            webhook_id="m1",
        )
        with monkeypatch.context() as broken:
            broken.setattr(app.runtime.receiver.store, "finish", fail)
            assert (await deliver(settle=False)).status == 503
        await tenants_of(app).suspend("tenant-a", reason="unpaid")
        delivered = await deliver()
    assert (delivered.status, delivered.state) == (200, DeliveryState.DONE)
    assert seen.identifiers == ["tenant-a"]


@pytest.mark.parametrize("suspended", [False, True])
async def test_a_type_without_a_handler_is_parked_for_that_and_not_for_its_tenant(
    tmp_path: Path, suspended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with app_with_two_tenants(tmp_path, HandlerRegistry()) as (app, _):
        if suspended:
            await tenants_of(app).suspend("tenant-a", reason="unpaid")
        delivered = await app.deliver("order.paid", {"customer": {"organization_id": "org_a"}})
        record = await app.runtime.receiver.store.get(delivered.webhook_id)
    assert (delivered.status, delivered.state) == (200, DeliveryState.PARKED)
    assert record is not None
    (parked,) = [line for line in caplog.messages if line.startswith("webhook.parked")]
    assert "no handler for this type" in parked
    assert "purged" not in parked


async def test_an_event_that_waits_in_the_queue_meets_the_tenant_as_it_is_then(
    tmp_path: Path,
) -> None:
    gate, seen = trio.Event(), Seen()
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True, run_when_suspended=False)
    async def wait_first(event: OrderPaidEvent) -> None:
        seen.events.append(event)
        await gate.wait()

    settings = settings_in(tmp_path, Webhooks__Queue__Workers=1)
    async with running_app(handlers, settings) as app:
        service = tenants_of(app)
        await service.add(
            "a", name="A", organization_id="org_a", site_manager_email="a@example.com",
            site_manager_email_verified=True,
        )  # fmt: skip
        first, second = [
            await app.deliver(
                "order.paid", {"customer": {"organization_id": "org_a"}}, settle=False
            )
            for _ in range(2)
        ]
        await until(lambda: seen.events)
        await service.suspend("a")
        gate.set()
        await app.settle()
        states = [(await app.store.get(d.webhook_id)).state for d in (first, second)]  # type: ignore[union-attr] # both are kept
    assert states == [DeliveryState.DONE, DeliveryState.PARKED]
    assert len(seen.events) == 1


async def test_a_handler_gets_no_database_and_no_client_of_a_tenant_that_is_not_active(
    tmp_path: Path,
) -> None:
    refused: list[str] = []
    handlers = HandlerRegistry()

    @handlers.on(OrderPaidEvent)
    async def work(event: OrderPaidEvent, services: Services) -> None:
        try:
            async with services.tenant_db(event.tenant) as database:
                await database.run(lambda c: c.execute("CREATE TABLE t (x)"))
        except TenantNotActiveError as error:
            refused.append(error.status)
        with pytest.raises(TenantNotActiveError if refused else Exception):
            async with services.client_for(event.tenant):
                raise AssertionError("given out")

    async with app_with_two_tenants(tmp_path, handlers) as (app, _):
        service = tenants_of(app)
        tenant = await service.get("tenant-a")
        assert (
            await app.deliver("order.paid", {"customer": {"organization_id": "org_a"}})
        ).status == 200
        file = tmp_path / "data" / "tenants" / f"{tenant.id}.db"
        assert file.exists()
        for change in (service.suspend, service.deactivate):
            await change("tenant-a")
            assert (
                await app.deliver("order.paid", {"customer": {"organization_id": "org_a"}})
            ).status == 200
        assert refused == ["Suspended", "Deactivated"]
    with sqlite3.connect(file) as database:
        assert database.execute("SELECT count(*) FROM t").fetchone() == (0,)
    database.close()


@pytest.mark.parametrize(
    "data",
    [
        {"customer": {"organization_id": "org_a"}},
        {"product": {"organization_id": "org_a"}},
        {"benefit": {"organization_id": "org_a"}},
        {"subscription": {"customer": {"organization_id": "org_a"}}},
        {"order": {"customer": {"organization_id": "org_a"}}},
    ],
    ids=lambda data: next(iter(data)),
)
async def test_a_tenant_is_found_where_its_records_name_the_organization(
    tmp_path: Path, data: Any
) -> None:
    """Orders, subscriptions and grants of the upstream have no organization of their own."""
    seen = Seen()
    body = json.dumps({"type": "order.paid", "data": {"id": "o", **data}}).encode()
    async with app_with_two_tenants(tmp_path, seen.registry()) as (app, keys):
        by_tenant = sign_delivery(body, secret=Secret(keys["a"]))
        assert (await app.deliver(by_tenant)).status == 200
        assert (await app.deliver(body)).status == 200
        forged = sign_delivery(body, secret=Secret(keys["b"]))
        assert (await app.deliver(forged)).status == 400
    assert seen.identifiers == ["tenant-a", "tenant-a"]


async def test_the_secrets_of_a_deleted_tenant_verify_nothing(tmp_path: Path) -> None:
    seen = Seen()
    async with app_with_two_tenants(tmp_path, seen.registry()) as (app, keys):
        assert (await app.deliver(signed(keys["a"], "org_a"))).status == 200
        await tenants_of(app).delete("tenant-a", reason="left", actor="test")
        assert (await app.deliver(signed(keys["a"], "org_a"))).status == 400
        assert (await app.deliver(signed(keys["b"], "org_b"))).status == 200
    assert seen.identifiers == ["tenant-a", "tenant-b"]


@pytest.mark.parametrize("enqueue", [False, True], ids=["inline", "enqueued"])
async def test_no_event_of_a_deleted_tenant_runs_until_it_is_active_again(
    tmp_path: Path, enqueue: bool
) -> None:
    """Also if the host signed it, and the handler runs for suspended tenants."""
    seen = Seen()
    handlers = seen.registry(enqueue=enqueue)
    body = json.dumps({"type": "order.paid", "data": {"id": "o", "organization_id": "org_a"}})
    async with app_with_two_tenants(tmp_path, handlers) as (app, _):
        await tenants_of(app).delete("tenant-a", reason="left", actor="test")
        delivered = await app.deliver(body.encode(), expect="parked")
        assert delivered.status == 200
        record = await app.store.get(delivered.webhook_id)
        assert record is not None
        assert record.last_error is not None
        assert "tenant-a is deleted" in record.last_error
        assert seen.identifiers == []
        await tenants_of(app).reactivate("tenant-a", reason="back", actor="test")
        assert await app.store.replay([delivered.webhook_id]) == [delivered.webhook_id]
        app.runtime.receiver.wake()
        await until(lambda: seen.identifiers == ["tenant-a"])


async def test_a_body_is_not_decoded_before_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []

    def counting(decode: Callable[..., Any]) -> Callable[..., Any]:
        def count(raw: bytes, *more: Any) -> Any:
            decoded.append(raw)
            return decode(raw, *more)

        return count

    for decode in (plain_envelope, plain_outline):
        monkeypatch.setattr(f"sdk_trio.webhooks.verify.{decode.__name__}", counting(decode))
    async with app_with_two_tenants(tmp_path, Seen().registry()) as (app, keys):
        assert (await app.deliver(signed(keys["b"], "org_a"))).status == 400
        assert decoded == []
        assert (await app.deliver(signed(keys["b"], "org_b"))).status == 200
    assert len(decoded) == 1
