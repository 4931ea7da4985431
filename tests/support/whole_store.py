"""A store with all kinds of data, and its content as its interface returns it."""

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

from sdk_trio.records.alerts import Alert, AlertMessage, AlertName, MessageKind
from sdk_trio.records.deliveries import Dead, Done, NewDelivery, Retry
from sdk_trio.records.tenants import (
    AuditAction,
    AuditRecord,
    EnvironmentVariable,
    OutboxRecord,
    Tenant,
    TenantCredentials,
    TenantStatus,
    Transition,
)
from sdk_trio.records.upgrades import UpgradeMarker, UpgradeState
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sql import arrivals
from sdk_trio.storage.sqlite_inbox import SqliteInbox

from .keyed import ByKey
from .loop import together
from .postgres import PostgresServer, running_server
from .stores import claim

TERMS = {"lease_seconds": 10.0, "dedup_seconds": 1e9, "payload_seconds": 1e9}

#: A text with all characters that PostgreSQL's text type cannot store.
ODD = "a\0b\x1ac \u2603"


@attrs.frozen
class Database:
    """A database; its connection string is in ``SDK_POSTGRES_DSN``."""

    server: PostgresServer
    dsn: str

    def execute(self, statement: str) -> list[tuple]:
        return self.server.execute(statement, self.dsn.rpartition("=")[2])

    @property
    def address(self):
        from sdk_trio.storage.engines.postgres_address import PostgresAddress

        return PostgresAddress(dsn=self.dsn)

    async def open(self, owner: str = "two"):
        from sdk_trio.storage.postgres_inbox import PostgresInbox

        return ByKey(
            await PostgresInbox.open(
                self.address, LeaseTerms(owner=owner, shared_by_hosts=True, **TERMS)
            )
        )


def empty_database(monkeypatch: pytest.MonkeyPatch) -> Database:
    server = running_server()
    dsn = server.empty()
    monkeypatch.setenv("SDK_POSTGRES_DSN", dsn)
    return Database(server, dsn)


async def open_file(file: Path, owner: str = "one") -> Any:
    return ByKey(await SqliteInbox.open(file, LeaseTerms(owner=owner, **TERMS)))


def audit(action: AuditAction, at: float) -> AuditRecord:
    return AuditRecord(
        tenant_id="t1", tenant_identifier="acme", action=action, actor="a", occurred_at=at
    )


def delivery(name: str, at: float = 5000.0, **fields) -> NewDelivery:
    return NewDelivery(name, fields.pop("type", "order.paid"), b"{}", 7, at, **fields)


async def fill(inbox, rounds: int = 1) -> None:
    """Add all kinds of data; each round has 7 deliveries in 6 states.

    The last delivery is removed again, and no other one gets its sequence.
    """
    await together(partial(_fill_round, inbox, number) for number in range(rounds))
    await inbox.keep_other(NewDelivery("done-0", "order.paid", b'{"other":1}', 7, 5003.0))
    for name, ordered in (("odd", True), ("odd too", True), ("plain", False)):
        incoming = NewDelivery(name, ODD, b"\0\xff{}", 7, 5000.5, ODD, ordered, tenant_id="t1")
        await inbox.accept(incoming, leased=name == "odd")
    await claim(inbox, "odd", now=5001.25)
    await inbox.start("odd", now=5001.25)
    await inbox.accept(delivery("gone"), leased=False)
    gone = await inbox.get("gone")
    await inbox._commits.submit(lambda tx: arrivals.remove(tx, [gone.sequence]))
    tenant = Tenant(
        id="t1",
        identifier="acme",
        name="Acme",
        status=TenantStatus.ACTIVE,
        created_at=1.5,
        organization_id="o1",
        credentials=TenantCredentials(webhook_secrets=(EnvironmentVariable("ACME"),)),
    )
    await inbox.tenants.add(tenant, audit(AuditAction.CREATED, 1.5))
    suspended = attrs.evolve(tenant, status=TenantStatus.SUSPENDED, version=tenant.version + 1)
    transition = OutboxRecord(
        delivery_id="d1",
        tenant_id="t1",
        tenant_identifier="acme",
        tenant_name="Acme",
        transition=Transition.SUSPENDED,
        previous_status=TenantStatus.ACTIVE,
        new_status=TenantStatus.SUSPENDED,
        reason=None,
        actor="a",
        occurred_at=2.5,
        site_manager_email="ada@acme.example",
    )
    await inbox.tenants.change(
        suspended, audit(AuditAction.SUSPENDED, 2.5), transition, announced=True
    )
    await inbox.notifications.create_messages({"email": False, "log": True}, now=3.0, oldest=0.0)
    alert = Alert(name=AlertName.SILENCE, detail="so", opened_at=1.5, sent=(1.5, 2.25))
    message = AlertMessage(
        id="m1",
        channel="chat",
        alert=AlertName.SILENCE,
        kind=MessageKind.OPENED,
        detail="so",
        opened_at=1.5,
        closed_at=None,
        created_at=1.5,
    )
    await inbox.alerts.save([alert], [message], now=3.0)
    await inbox.write_checkpoint("reconcile", "where it was")
    await inbox.upgrade.save(
        UpgradeMarker(
            state=UpgradeState.DONE, tenant_id="t1", step="rows", started_at=1.0, finished_at=2.0
        )
    )


async def _fill_round(inbox, number: int) -> None:
    for name, outcome in (
        ("done", Done()),
        ("dead", Dead("ValueError: no", "app.py:1", "Traceback")),
        ("again", Retry(9e9, "ValueError: not yet")),
    ):
        key = f"{name}-{number}"
        await inbox.accept(delivery(key, subject=f"order-{number}"), leased=True)
        await inbox.start(key, now=5001.0)
        await inbox.finish(key, outcome, now=5002.5)
    await inbox.park(delivery(f"parked-{number}", type="order.odd"), "no handler; register one")
    await inbox.accept(delivery(f"leased-{number}"), leased=True)
    await inbox.accept(delivery(f"waits-{number}"), leased=False)
    await inbox.claim(delivery(f"runs-{number}"))


#: The rows of the tables after ``fill(rounds)``, without the store's internal ones.
def rows_of(rounds: int) -> dict[str, int]:
    return {
        "arrival": 7 * rounds + 3,
        "work": 6 * rounds + 3,
        "ended": rounds,
        "attempt": 2 * rounds,
        "evidence": 1,
        "tenant": 1,
        "source": 1,
        "audit": 2,
        "outbox": 1,
        "upgrade": 1,
        "notification": 2,
        "alert": 1,
        "alert_message": 1,
        "pause": 0,
        "token_bucket": 0,
    }


async def contents(inbox) -> dict[str, object]:
    """Return the content of a store through its interface, without values that depend on time."""
    records = await inbox.find(limit=10_000, oldest_first=True)
    keys = [record.key for record in records]
    return {
        "records": await together(partial(inbox.get, key) for key in keys),
        "attempts": list(map(list, await together(partial(inbox.attempts, key) for key in keys))),
        "evidence": list(map(list, await together(partial(inbox.evidence, key) for key in keys))),
        "of a type": await inbox.find(type=ODD),
        "of a tenant": await inbox.find(tenant_id="t1"),
        "of a subject": await inbox.find(subject="order-0"),
        "counts": await inbox.counts(),
        "oldest": await inbox.oldest_waiting(),
        "tenants": list(await inbox.tenants.page()),
        "holders": await inbox.tenants.holders([EnvironmentVariable("ACME")], but=""),
        "audit": list(await inbox.tenants.audit()),
        "outbox": list(await inbox.tenants.outbox()),
        "messages": list(await inbox.notifications.find()),
        "alerts": await inbox.alerts.load(),
        "marker": await inbox.upgrade.marker(),
        "checkpoint": await inbox.read_checkpoint("reconcile"),
        "revision": await inbox.tenants.revision(),
        "holdings": await inbox.holdings("t1"),
    }


async def contents_of(file: Path) -> dict[str, object]:
    inbox = await open_file(file, "look")
    found = await contents(inbox)
    await inbox.close()
    return found
