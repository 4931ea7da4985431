"""The manifest follows the tenants and their files: a real store, real files, real time."""

import itertools
import os
import sqlite3
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.lowlevel
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.deliveries import settings as settings_of
from support.replicating import said
from support.waiting import PATIENCE_SECONDS, until

from sdk_trio.config.fields import ReplicaTargetType
from sdk_trio.config.options.tenants import LocalDiskOptions, ReplicationOptions
from sdk_trio.errors import IllegalTransitionError
from sdk_trio.replication import watch
from sdk_trio.replication.manifest import ManifestWriter, TenantDatabaseFile, render_manifest
from sdk_trio.replication.watch import (
    DirectoryScanner,
    Watcher,
    database_files,
    find_databases,
    read_identity,
)
from sdk_trio.storage.open import open_store
from sdk_trio.tenants import TenantService
from sdk_trio.tenants import service as service_module

OPTIONS = ReplicationOptions(
    replica_target_type=ReplicaTargetType.LOCAL_DISK, local_disk=LocalDiskOptions(path="/replica")
)

#: How many random interleavings run; the suite runs a sample.
EXAMPLES = int(os.environ.get("SDK_TEST_INTERLEAVINGS", "15"))


@attrs.define
class Replicator:
    """A reloader like the real ones: a changed text makes it reopen all files, the same text none.

    It waits for a file that is not there, and opens it when it comes. It outlives the watcher, as
    an operator's own replicator does.
    """

    config: Path
    refusals: int = 0
    text: str = ""
    paths: Sequence[str] = ()
    opened: dict[str, str] = attrs.Factory(dict)
    reloads: list[tuple[float, int]] = attrs.Factory(list)

    async def reload(self, databases: Sequence[TenantDatabaseFile]) -> bool:
        await trio.lowlevel.checkpoint()
        if self.refusals:
            self.refusals -= 1
            return False
        try:
            text = self.config.read_text()
        except FileNotFoundError:
            return False  # it was moved away since it was written
        paths = [database.path for database in databases]
        self.reloads.append((time.monotonic(), len(paths)))
        if text != self.text:
            self.text, self.paths, self.opened = text, paths, {}
            self.open_what_is_there()
        return True

    def open_what_is_there(self) -> None:
        self.opened = identities(self.paths) | self.opened


def identities(paths: Iterable[str]) -> dict[str, str]:
    """Which file each path is now, of those that are there."""
    found = {}
    for path in paths:
        with suppress(FileNotFoundError):
            found[path] = read_identity(path, os.stat(path).st_ino)
    return found


class World:
    """A store with tenants, a directory with their files, and a watcher that can be restarted."""

    def __init__(self, root: Path, tenants: TenantService, window: float) -> None:
        self.tenants = tenants
        self.window = window
        self.directory = root / "tenants"
        self.directory.mkdir(mode=0o700)
        self.output = root / "out" / "replicator.yml"
        self.output.parent.mkdir()
        self.replicator = Replicator(self.output)
        self.watchers: list[Watcher] = []
        self.scope: trio.CancelScope | None = None
        self.ended = trio.Event()
        self.nursery: trio.Nursery

    async def start(self) -> Watcher:
        watcher = Watcher(
            self.tenants,
            self.directory,
            render=partial(render_manifest, OPTIONS),
            writer=ManifestWriter(self.output),
            reloader=self.replicator,
            window=self.window,
            scan_seconds=min(0.2, self.window),
            retry_seconds=self.window,
            renotify_seconds=self.window,
        )
        self.watchers.append(watcher)
        self.scope = await self.nursery.start(self._run, watcher)
        return watcher

    async def _run(self, watcher: Watcher, *, task_status: Any) -> None:
        self.ended = ended = trio.Event()
        try:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(watcher.run)
                    task_status.started(scope)
        finally:
            ended.set()

    async def stop(self) -> None:
        """End the watcher as the end of its process would: nothing of it goes on."""
        assert self.scope is not None
        self.scope.cancel()
        await self.ended.wait()

    def file(self, tenant_id: str) -> Path:
        return self.directory / f"{tenant_id}.db"

    async def expected(self) -> list[str]:
        active = {tenant.id for tenant in await self.tenants.list(limit=1000) if tenant.is_active}
        there = {
            path for path in map(self.file, active) if path.is_file() and not path.is_symlink()
        }
        return sorted(map(str, there))

    def manifest(self) -> list[str]:
        try:
            text = self.output.read_text()
        except FileNotFoundError:
            return ["no manifest"]
        return sorted(entry["path"] for entry in yaml.safe_load(text)["dbs"])

    async def settle(self, *, still: float = 0.0) -> None:
        """Wait until the manifest and the replicator match the store and the files.

        ``still`` is how long they must match without a break, in seconds. The first match may be a
        coincidence: a poll that began before the last change is applied after it, and the next poll
        corrects that.
        """
        expected = await self.expected()
        deadline = trio.current_time() + PATIENCE_SECONDS
        since = None
        while since is None or trio.current_time() < since + still:
            if self.manifest() == expected and not self._wrongly_opened():
                since = trio.current_time() if since is None else since
                if not still:
                    return
            else:
                since = None
            assert trio.current_time() < deadline, (self.manifest(), expected)
            await trio.sleep(0.002)

    def _wrongly_opened(self) -> bool:
        self.replicator.open_what_is_there()
        return identities(self.manifest()) != self.replicator.opened


@asynccontextmanager
async def world(root: Path, *, window: float = 0.05) -> AsyncIterator[World]:
    values = settings_of(
        MultiTenant__Enabled=True,
        MultiTenant__TenantStatus__RequireVerifiedEmailForSuspension=False,
        Storage__Backend="Sqlite",
        Storage__Path=str(root / "data"),
    )
    async with open_store(values, owner=str(uuid.uuid4())) as store:
        tenants = TenantService(values, store.tenants)
        found = World(root, tenants, window)
        with trio.fail_after(2 * PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                found.nursery = nursery
                await nursery.start(tenants.run)
                yield found
                nursery.cancel_scope.cancel()


async def test_it_follows_files_and_transitions_and_takes_nothing_else(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        a, b = [await here.tenants.add(name, name=name) for name in ("a", "b")]
        for name in (
            "default.db",
            "upgrade.lock",
            "single-tenant.partial",
            f"{a.id}.db-wal",
            f"{a.id}.db-shm",
            f"{uuid.uuid4()}.db",
        ):
            (here.directory / name).touch()
        (here.directory / f"{b.id}.db").symlink_to(here.directory / "default.db")
        await here.start()
        assert here.manifest() == []
        here.file(a.id).touch()
        await here.settle()
        assert here.manifest() == [str(here.file(a.id))]
        here.file(b.id).unlink()
        here.file(b.id).touch()
        await here.settle()
        assert len(here.manifest()) == 2
        await here.tenants.deactivate(a.id)
        await here.settle()
        assert here.manifest() == [str(here.file(b.id))]
        await here.tenants.reactivate(a.id)
        here.file(b.id).rename(here.directory / "moved")
        await here.settle()
        assert here.manifest() == [str(here.file(a.id))]


async def test_a_restart_catches_up_and_notifies_once_more(tmp_path: Path) -> None:
    async with world(tmp_path, window=30) as here:
        tenant = await here.tenants.add("a", name="a")
        first = await here.start()
        await here.stop()
        here.file(tenant.id).touch()
        second = await here.start()
        assert here.manifest() == [str(here.file(tenant.id))]
        assert (first.regenerations, second.regenerations) == (1, 1)
        await here.stop()
        third = await here.start()
        assert third.regenerations == 0
        assert [count for _, count in here.replicator.reloads] == [0, 1, 1]


async def test_changes_that_undo_each_other_in_a_window_are_none(tmp_path: Path) -> None:
    async with world(tmp_path, window=2) as here:
        tenant = await here.tenants.add("a", name="a")
        here.file(tenant.id).touch()
        watcher = await here.start()
        began = trio.current_time()
        await here.tenants.deactivate(tenant.id)
        await here.tenants.reactivate(tenant.id)
        here.file(tenant.id).rename(here.directory / "away")
        await trio.sleep(0.4)  # a scan has seen that it is not there
        (here.directory / "away").rename(here.file(tenant.id))
        took = trio.current_time() - began
        await trio.sleep(2.5)
        # Unless this machine was so slow that the window was over.
        if took < 1.5:
            assert watcher.regenerations == 1
            assert len(here.replicator.reloads) == 1


async def test_a_replicator_that_could_not_be_notified_is_notified_later(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.replicator.refusals = 3
        tenant = await here.tenants.add("a", name="a")
        here.file(tenant.id).touch()
        watcher = await here.start()
        await here.settle()
        assert watcher.regenerations == 1
        assert [count for _, count in here.replicator.reloads] == [1]


async def test_a_failed_write_is_logged_once_and_retried_until_it_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as here:
        tenant = await here.tenants.add("a", name="a")
        here.file(tenant.id).touch()
        here.output.parent.rmdir()
        await here.start()
        await until(lambda: said(caplog, "replication.regeneration_failed"))
        await trio.sleep(0.3)  # it is tried again in this time, and not said again
        here.output.parent.mkdir()
        await here.settle()
    failures = [r.sdk for r in caplog.records if r.levelname == "ERROR"]
    assert [name for name, _ in failures] == ["replication.regeneration_failed"]
    assert "ConfigOutputPath" in failures[0][1]["error"]


async def test_a_file_in_another_ones_place_is_a_change(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        tenant = await here.tenants.add("a", name="a")
        here.file(tenant.id).touch()
        await here.start()
        (here.directory / "new").write_bytes(b"another")
        (here.directory / "new").rename(here.file(tenant.id))
        await here.settle()
        assert [count for _, count in here.replicator.reloads] == [1, 1]


async def test_a_file_replaced_without_a_watcher_is_noticed(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        tenant = await here.tenants.add("a", name="a")
        here.file(tenant.id).touch()
        await here.start()
        await here.stop()
        # The file system gives the number of the old file to the new one, or does not.
        require_creation_times(here.file(tenant.id))
        here.file(tenant.id).unlink()
        here.file(tenant.id).touch()
        watcher = await here.start()
        await here.settle()
        assert watcher.regenerations == 1


async def test_a_file_keeps_its_identity_when_its_content_changes(tmp_path: Path) -> None:
    file = tmp_path / "a.db"
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (x)")
        before = database_files(tmp_path)
        connection.executemany("INSERT INTO t VALUES (?)", [("x" * 2000,)] * 200)
        connection.execute("DELETE FROM t WHERE rowid > 5")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("VACUUM")
        assert database_files(tmp_path) == before
    os.utime(file, (1, 1))
    file.chmod(0o600)
    assert database_files(tmp_path) == before
    require_creation_times(file)
    file.unlink()
    file.touch()
    assert database_files(tmp_path) != before


def require_creation_times(file: Path) -> None:
    if read_identity(str(file), file.stat().st_ino).endswith("-0"):
        pytest.skip("this file system keeps no time of creation")


async def test_an_unchanged_directory_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def counted(directory: Path) -> Any:
        reads.append(directory)
        return database_files(directory)

    monkeypatch.setattr(watch, "database_files", counted)
    # However slow the machine is, what was just made has just been made.
    monkeypatch.setattr(watch, "_SETTLED_SECONDS", 1e6)
    monkeypatch.setattr(watch, "_READ_AGAIN_SECONDS", 1e6)
    scanner = DirectoryScanner(tmp_path)
    (tmp_path / "a.db").touch()
    assert scanner.scan().keys() == {"a"}
    assert scanner.scan().keys() == {"a"}
    assert len(reads) == 2, "what changed a moment ago may change again within the same step"
    monkeypatch.setattr(watch, "_SETTLED_SECONDS", -1e6)
    for _ in range(3):
        assert scanner.scan().keys() == {"a"}
    assert len(reads) == 3
    await _next_step(tmp_path)
    (tmp_path / "b.db").touch()
    assert scanner.scan().keys() == {"a", "b"}
    assert scanner.scan().keys() == {"a", "b"}
    assert len(reads) == 4
    monkeypatch.setattr(watch, "_READ_AGAIN_SECONDS", 0.0)
    scanner.scan()
    scanner.scan()
    assert len(reads) == 6


async def test_a_directory_whose_time_is_set_back_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``rsync -a`` and ``tar`` put files in place, and then set the directory's time."""
    monkeypatch.setattr(watch, "_SETTLED_SECONDS", -1e6)
    monkeypatch.setattr(watch, "_READ_AGAIN_SECONDS", 1e6)
    (tmp_path / "a.db").touch()
    before = tmp_path.stat().st_mtime_ns
    scanner = DirectoryScanner(tmp_path)
    first = scanner.scan()
    await _next_step(tmp_path)
    (tmp_path / "new").touch()
    (tmp_path / "new").rename(tmp_path / "a.db")
    os.utime(tmp_path, ns=(before, before))
    assert scanner.scan() != first


async def _next_step(directory: Path) -> None:
    """Wait until the file system's time is later than that of the directory's last change."""
    changed = directory.stat().st_ctime_ns
    probe = directory.parent / f"{directory.name}-probe"
    with trio.fail_after(60):
        while True:
            probe.touch()
            if probe.stat().st_ctime_ns > changed:
                return
            await trio.sleep(0.001)


async def test_a_burst_of_databases_is_one_regeneration_a_window(tmp_path: Path) -> None:
    count = 500
    async with world(tmp_path, window=2.0) as here:
        ids = [(await here.tenants.add(f"t{i}", name="t")).id for i in range(count)]
        watcher = await here.start()
        before, descriptors = watcher.regenerations, len(os.listdir("/proc/self/fd"))
        began = time.monotonic()
        for tenant_id in ids:
            here.file(tenant_id).touch()
            await trio.lowlevel.checkpoint()
        created = time.monotonic() - began
        await here.settle()
        last, known = here.replicator.reloads[-1]
        windows = 1 + int(created / 2.0)
        assert known == count
        assert watcher.regenerations - before <= windows + (created > 0.1)
        # The window from the first of them, the scan that saw it, and a machine that is busy.
        assert last - began < created + 2.0 + 50.0
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 3


async def test_changes_without_end_are_regenerated_all_the_same(tmp_path: Path) -> None:
    async with world(tmp_path, window=0.3) as here:
        ids = [(await here.tenants.add(f"t{i}", name="t")).id for i in range(60)]
        began = trio.current_time()
        watcher = await here.start()
        changed = itertools.cycle(ids)
        while watcher.regenerations < 4:
            tenant_id = next(changed)
            if here.file(tenant_id).exists():
                here.file(tenant_id).unlink()
            else:
                here.file(tenant_id).touch()
            await trio.sleep(0.02)
        await here.settle()
        # One at its start, and then no more than one a window.
        assert watcher.regenerations <= 2 + (trio.current_time() - began) / 0.3


async def test_the_command_and_the_watcher_find_the_same(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        ids = [(await here.tenants.add(f"t{i}", name="t")).id for i in range(3)]
        for tenant_id in ids[:2]:
            here.file(tenant_id).touch()
        await here.start()
        found = await find_databases(here.tenants, here.directory)
        assert sorted(database.path for database in found) == here.manifest()
        assert database_files(here.directory / "none") == {}


#: One step of an interleaving: what is done, to which tenant.
STEPS = st.tuples(
    st.sampled_from(
        [
            "create",
            "create",
            "remove",
            "replace",
            "move away",
            "move back",
            "suspend",
            "reactivate",
            "deactivate",
            "delete",
            "add",
            "restart",
            "break output",
            "repair output",
            "refuse",
            "pause",
            "pause",
        ]
    ),
    st.integers(0, 3),
)


async def take_step(here: World, ids: list[str], step: str, number: int) -> None:
    tenant_id = ids[number % len(ids)]
    file = here.file(tenant_id)
    away = file.with_suffix(".away")
    broken = here.output.parent.with_name("broken")
    match step:
        case "create":
            file.touch()
        case "remove":
            file.unlink(missing_ok=True)
        case "replace":
            (here.directory / "new").touch()
            (here.directory / "new").rename(file)
        case "move away" if file.exists():
            file.rename(away)
        case "move back" if away.exists():
            away.rename(file)
        case "suspend" | "reactivate" | "deactivate" | "delete":
            with suppress(IllegalTransitionError):
                await getattr(here.tenants, step)(tenant_id)
        case "add":
            ids.append((await here.tenants.add(f"x{len(ids)}", name="x")).id)
            here.file(ids[-1]).touch()
        case "restart":
            await here.stop()
            await here.start()
        case "break output" if not broken.exists():
            here.output.parent.rename(broken)
        case "repair output" if broken.exists():
            broken.rename(here.output.parent)
        case "refuse":
            here.replicator.refusals += number
        case "pause":
            await trio.sleep(here.window * number / 2)


async def interleave(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        async with world(Path(root), window=0.01) as here:
            ids = [(await here.tenants.add(name, name=name)).id for name in "abc"]
            await here.start()
            for step, number in steps:
                await take_step(here, ids, step, number)
            await take_step(here, ids, "repair output", 0)
            await here.settle(still=here.window * 3)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(STEPS, min_size=5, max_size=40))
def test_any_interleaving_ends_with_exactly_the_active_tenants_that_have_a_file(
    steps: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "POLL_SECONDS", 0.02)
    trio.run(interleave, steps)
