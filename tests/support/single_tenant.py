"""The data of a single-tenant host, and hosts that upgrade it, for tests."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import apsw
import attrs
import msgspec
import trio

from sdk_trio.config import Settings
from sdk_trio.records.deliveries import NewDelivery
from sdk_trio.storage.open import open_store
from sdk_trio.storage.ports import Store
from sdk_trio.tenants.service import TenantService
from sdk_trio.tenants.upgrade import HostUpgrade, Quiescence, StepBatch, UpgradeProgress
from sdk_trio.tenants.upgrade_run import Upgrader


def host_settings(data: Path, *, seconds: float | None = None, **keys: Any) -> Settings:
    """Return settings of a multi-tenant host; keys of the upgrade as ``DefaultTenantStrategy=...``.

    ``seconds`` is MaxRunDuration, and may be less than the second that the settings allow.
    """
    prefix = "MultiTenant:SingleTenantUpgrade:"
    mapping: dict[str, Any] = {"Storage:Path": str(data), "MultiTenant:Enabled": True}
    mapping |= {"Server:Bind": ["127.0.0.1:0"], "Admin:Bind": "127.0.0.1:0"}
    mapping |= {f"{prefix}{name}": value for name, value in keys.items()}
    settings = Settings.from_mapping(mapping, standalone=True, receiver=False)
    if seconds is None:
        return settings
    options = settings.multi_tenant.single_tenant_upgrade
    options = msgspec.structs.replace(options, max_run_duration=timedelta(seconds=seconds))
    return msgspec.structs.replace(
        settings,
        multi_tenant=msgspec.structs.replace(settings.multi_tenant, single_tenant_upgrade=options),
    )


def write_database(file: Path, rows: int = 50, *, journal: str = "wal") -> None:
    """Write a database with a table ``grants`` of ``rows`` rows, and an empty WAL."""
    file.parent.parent.mkdir(mode=0o700, exist_ok=True)
    file.parent.mkdir(mode=0o700, exist_ok=True)
    database = apsw.Connection(os.fspath(file))
    database.pragma("journal_mode", journal)
    database.execute("CREATE TABLE grants (id INTEGER PRIMARY KEY, body TEXT)")
    database.execute(
        "INSERT INTO grants (body) "
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
        "SELECT 'grant ' || i FROM n",
        (rows,),
    )
    database.close()


def grants_in(file: Path) -> list[str]:
    """The bodies of the table ``grants``."""
    database = apsw.Connection(os.fspath(file))
    try:
        return [body for (body,) in database.execute("SELECT body FROM grants ORDER BY id")]
    finally:
        database.close()


async def deliver(store: Store, count: int, *, first: int = 0) -> None:
    """Add deliveries without a tenant to the inbox."""
    async with trio.open_nursery() as nursery:
        for number in range(first, first + count):
            delivery = NewDelivery(f"w{number}", "order.paid", b"{}", number, 1.0)
            nursery.start_soon(lambda d=delivery: store.accept(d, leased=False))


@attrs.define
class CountingStep:
    """A host's step of ``total`` batches of one row; ``before`` is called before each of them."""

    total: int = 5
    name: str = "counting"
    before: Callable[[int], Any] | None = None
    ran: list[int] = attrs.Factory(list)

    async def count(self) -> int:
        await trio.lowlevel.checkpoint()
        return self.total - len(self.ran)

    async def run_batch(self, tenant: Any, position: str | None) -> StepBatch:
        number = int(position or 0)
        await trio.lowlevel.checkpoint()
        if self.before is not None:
            waiting = self.before(number)
            if waiting is not None:
                await waiting
        self.ran.append(number)
        return StepBatch(1, str(number + 1), last=number + 1 == self.total)


@attrs.define
class Host:
    """A multi-tenant host whose store is open."""

    settings: Settings
    store: Store
    tenants: TenantService
    quiescence: Quiescence

    def upgrader(
        self, *, steps: Any = (), resolver: Any = None, report: Any = lambda _progress: None
    ) -> Upgrader:
        return Upgrader(
            self.settings,
            self.store,
            self.tenants,
            quiescence=self.quiescence,
            host=HostUpgrade(resolver=resolver, steps=steps),
            report=report,
        )

    @property
    def directory(self) -> Path:
        return Path(self.settings.storage.path) / "tenants"

    async def traces(self) -> Any:
        """Return all data that an upgrade could have changed."""
        files = {}
        if self.directory.exists():
            files = {
                file.name: file.read_bytes()
                for file in self.directory.iterdir()
                if file.name != "upgrade.lock" and not file.is_dir()
            }
        return (
            await self.store.upgrade.marker(),
            list(await self.store.tenants.page()),
            list(await self.store.tenants.audit()),
            await self.store.upgrade.count_unassigned(),
            files,
        )


@asynccontextmanager
async def opened_host(settings: Settings, *, quiet: bool = True) -> AsyncIterator[Host]:
    """Open the store of a host, by default with the signal that nothing writes its data."""
    quiescence = Quiescence()
    if quiet:
        quiescence.signal("test")
    async with open_store(settings, owner="host") as store:
        yield Host(settings, store, TenantService(settings, store.tenants), quiescence)


@attrs.define
class Reports:
    """Records progress, and calls ``on_first[step]`` at the first report of that step."""

    on_first: dict[str, Callable[[], Any]] = attrs.Factory(dict)
    seen: list[UpgradeProgress] = attrs.Factory(list)

    def __call__(self, progress: UpgradeProgress) -> None:
        first = all(earlier.step != progress.step for earlier in self.seen)
        self.seen.append(progress)
        if first and progress.step in self.on_first:
            self.on_first[progress.step]()
