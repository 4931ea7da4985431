"""Transitions, channels and stores for tests of notifications."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from sdk_trio.notifications.send import Outcome, Sent
from sdk_trio.records.notifications import NotificationRecord
from sdk_trio.records.tenants import (
    AuditAction,
    AuditRecord,
    OutboxRecord,
    Tenant,
    TenantStatus,
    Transition,
)
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory.inbox import MemoryInbox
from sdk_trio.storage.sqlite_inbox import SqliteInbox
from support.postgres import open_inbox

LEASE = 10.0
TERMS = {"lease_seconds": LEASE, "dedup_seconds": 100.0, "payload_seconds": 40.0}


@attrs.define
class Stores:
    """Several owners on one store, in memory, in a file or in a database."""

    kind: str
    file: Path
    opened: list[Any] = attrs.Factory(list)

    async def open(self, owner: str, **changes: float) -> Any:
        terms = TERMS | changes
        if self.kind == "memory":
            await trio.lowlevel.checkpoint()
            shares = self.opened[0] if self.opened else None
            self.opened.append(MemoryInbox(LeaseTerms(owner=owner, **terms), shares=shares))
        elif self.kind == "postgres":
            self.opened.append(await open_inbox(self.file, owner=owner, **terms))
        else:
            self.opened.append(await SqliteInbox.open(self.file, LeaseTerms(owner=owner, **terms)))
        return self.opened[-1]

    async def close(self) -> None:
        for store in self.opened:
            await store.close()


@asynccontextmanager
async def stores_of(kind: str, directory: Path) -> AsyncIterator[Stores]:
    stores = Stores(kind, directory / "inbox.db")
    try:
        yield stores
    finally:
        with trio.move_on_after(10, shield=True):
            await stores.close()


def tenant(identifier: str = "acme", **values: Any) -> Tenant:
    id = str(uuid.uuid5(uuid.NAMESPACE_DNS, identifier))
    return Tenant(id=id, identifier=identifier, name=identifier.title(), created_at=1.0, **values)


async def add_tenant(store: Any, identifier: str = "acme") -> Tenant:
    added = tenant(identifier)
    await store.tenants.add(added, audit(added, AuditAction.CREATED, 1.0))
    return added


def audit(of: Tenant, action: AuditAction, now: float) -> AuditRecord:
    return AuditRecord(
        tenant_id=of.id, tenant_identifier=of.identifier, action=action, actor="t", occurred_at=now
    )


async def transition(
    store: Any, identifier: str = "acme", *, now: float, announced: bool = False
) -> OutboxRecord:
    """Commit one transition of a tenant, as the tenants' service would."""
    before = await store.tenants.find(identifier) or await add_tenant(store, identifier)
    active = before.status is TenantStatus.ACTIVE
    status = TenantStatus.SUSPENDED if active else TenantStatus.ACTIVE
    after = attrs.evolve(before, status=status, version=before.version + 1)
    change = Transition.SUSPENDED if active else Transition.REACTIVATED
    record = OutboxRecord(
        delivery_id=str(uuid.uuid4()),
        tenant_id=after.id,
        tenant_identifier=identifier,
        tenant_name=after.name,
        transition=change,
        previous_status=before.status,
        new_status=status,
        reason=None,
        actor="t",
        occurred_at=now,
        site_manager_email="m@example.com",
        site_manager_email_verified=True,
        site_manager_phone="+15551234567",
    )
    row = audit(after, AuditAction(str(change)), now)
    await store.tenants.change(after, row, record, announced=announced)
    return record


@attrs.define
class FakeChannel:
    """Records the messages, and returns preset results; ``behave`` may wait or raise."""

    repeatable: bool = False
    behave: Callable[[int], Awaitable[Outcome]] | None = None
    begun: list[str] = attrs.Factory(list)
    finished: list[str] = attrs.Factory(list)
    at: list[float] = attrs.Factory(list)

    async def send(self, record: OutboxRecord) -> Outcome:
        number = len(self.begun)
        self.begun.append(record.delivery_id)
        self.at.append(trio.current_time())
        outcome: Outcome = Sent(f"id-{number}")
        if self.behave is None:
            await trio.lowlevel.checkpoint()
        else:
            outcome = await self.behave(number)
        self.finished.append(record.delivery_id)
        return outcome


def answering(*outcomes: Outcome) -> Callable[[int], Awaitable[Outcome]]:
    """Return these results in order, and then repeat the last one."""

    async def behave(number: int) -> Outcome:
        await trio.lowlevel.checkpoint()
        return outcomes[min(number, len(outcomes) - 1)]

    return behave


def states(records: Iterable[NotificationRecord]) -> dict[str, str]:
    return {str(record.id): str(record.state) for record in records}
