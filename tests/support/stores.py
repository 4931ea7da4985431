"""Inboxes of each engine on the same deliveries, for tests of the contract of a store."""

from pathlib import Path
from typing import Any

from sdk_trio.records.deliveries import NewDelivery
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory.inbox import MemoryInbox
from sdk_trio.storage.sqlite_inbox import SqliteInbox

from .keyed import ByKey
from .postgres import open_inbox


async def open_file(
    file: Path, *, owner: str, claims: Path | None = None, **terms: Any
) -> SqliteInbox:
    """Open the inbox of a SQLite file."""
    return await SqliteInbox.open(file, LeaseTerms(owner=owner, **terms), claims=claims)


class Stores:
    """Opens inboxes of one kind on the same deliveries; leases last 10 seconds.

    Args:
        kind: ``memory``, ``sqlite``, or ``postgres`` with a version of ``make emulators``.
        directory: where files are.
    """

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.file = directory / "inbox.db"
        self.opened: list[Any] = []

    async def open(self, owner: str = "one", **terms: Any) -> Any:
        """Open an inbox of ``owner``; further arguments are those of the engine."""
        terms = {"lease_seconds": 10, "dedup_seconds": 100, "payload_seconds": 40, **terms}
        if self.kind == "memory":
            shared = self.opened[0].raw if self.opened else None
            opened: Any = MemoryInbox(LeaseTerms(owner=owner, **terms), shares=shared)
        elif self.kind.startswith("postgres"):
            version = self.kind.removeprefix("postgres")
            opened = await open_inbox(self.file, owner=owner, version=version, **terms)
        else:
            opened = await open_file(self.file, owner=owner, **terms)
        self.opened.append(ByKey(opened))
        return self.opened[-1]

    async def close(self) -> None:
        """Close all of them."""
        for inbox in self.opened:
            await inbox.close()


async def claim(inbox: Any, *keys: str, now: float) -> None:
    """Claim the due deliveries with these keys, and no others."""
    due = await inbox.claim_due(limit=1000, now=now)
    await inbox.release([each.key for each in due.records if each.key not in keys])


def delivery(webhook_id: str = "m1", *, at: float = 1000.0, **fields: Any) -> NewDelivery:
    """A delivery that arrived at the time ``at``."""
    return NewDelivery(webhook_id, "order.paid", b'{"type":"order.paid"}', 7, at, **fields)
