"""The upgrade from a single tenant on real files: what moves, what stops it, how it resumes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import apsw
import pytest
import trio
from support.single_tenant import (
    CountingStep,
    Reports,
    deliver,
    grants_in,
    host_settings,
    opened_host,
    write_database,
)

from sdk_trio.errors import (
    DefaultTenantError,
    NotQuiescentError,
    NotSupportedError,
    SourceDatabaseError,
    TenantConflictError,
    UpgradeError,
    UpgradeInProgressError,
    UpgradeTimedOutError,
)
from sdk_trio.records.upgrades import UpgradeState
from sdk_trio.tenants import upgrade_run as upgrader_module
from sdk_trio.tenants.database_copy import copy_database
from sdk_trio.tenants.upgrade import DefaultTenantFinder, SqliteTenantIds

HOST_SUPPLIED = {"DefaultTenantStrategy": "HostSupplied"}


async def test_everything_of_the_single_tenant_moves_into_the_default_tenant_once(tmp_path):
    write_database(tmp_path / "tenants" / "default.db", 200)
    step = CountingStep()
    async with opened_host(host_settings(tmp_path)) as host:
        await deliver(host.store, 30)
        result = await host.upgrader(steps=[step]).run()
        tenant = await host.tenants.get("default")
        assert result.tenant_id == tenant.id
        assert tenant.name == "Default Tenant"
        copied = grants_in(host.directory / f"{tenant.id}.db")
        assert copied == [f"grant {i + 1}" for i in range(200)]
        assert {record.tenant_id for record in await host.store.find()} == {tenant.id}
        assert step.ran == [0, 1, 2, 3, 4]
        assert result.done["deliveries"] == 30
        marker = await host.store.upgrade.marker()
        assert marker is not None
        assert marker.state is UpgradeState.DONE
        before = await host.traces()
        again = await host.upgrader(steps=[step]).run()
        assert again.already_done
        assert await host.traces() == before


async def test_the_organization_that_the_default_tenant_gets_counts_at_once(tmp_path):
    """Earlier callers know it, too, without querying the store again."""
    async with opened_host(host_settings(tmp_path)) as host:
        tenant = await host.tenants.add("default", name="Default")
        assert await host.tenants.find_by_organization("org-1") is None
        finder = DefaultTenantFinder(host.store.tenants, host.tenants)
        await finder.give_organization(tenant, "org-1")
        found = await host.tenants.find_by_organization("org-1")
        assert (found.id, found.version) == (tenant.id, tenant.version + 1)
        assert (await host.tenants.audit(tenant.id))[-1].details == "organization_id"
        with pytest.raises(TenantConflictError):
            await finder.give_organization(tenant, "org-2")


async def test_a_host_without_a_database_gets_a_default_tenant_without_one(tmp_path):
    async with opened_host(host_settings(tmp_path)) as host:
        await deliver(host.store, 3)
        result = await host.upgrader().run()
        assert "database" not in result.done
        assert (await host.tenants.get("default")).id == result.tenant_id
        assert [f.name for f in host.directory.iterdir()] == ["upgrade.lock"]


async def test_a_dry_run_counts_everything_and_changes_nothing(tmp_path):
    source = tmp_path / "old" / "app.db"
    write_database(source, 70)
    settings = host_settings(tmp_path / "data", SourceDatabase=str(source))
    async with opened_host(settings) as host:
        await deliver(host.store, 4)
        before, bytes_before = await host.traces(), source.read_bytes()
        plan = await host.upgrader(steps=[CountingStep(7)]).plan()
        assert {step.step: step.rows for step in plan.steps} == {
            "database": 70,
            "deliveries": 4,
            "organization": 0,
            "host:counting": 7,
        }
        assert plan.state is UpgradeState.PENDING
        assert "default" in plan.tenant
        assert (await host.traces(), source.read_bytes()) == (before, bytes_before)


WRITE_HALF_A_TRANSACTION = """
import os, signal, sys, apsw
database = apsw.Connection(sys.argv[1])
database.execute("PRAGMA cache_size = 2")
database.execute("BEGIN")
database.execute("UPDATE grants SET body = printf('%.500c', 'x')")
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_uncommitted_writes_of_a_killed_host_are_not_in_the_copy(tmp_path):
    source = tmp_path / "tenants" / "default.db"
    write_database(source, 500, journal="delete")
    script = [sys.executable, "-c", WRITE_HALF_A_TRANSACTION, str(source)]
    assert (await trio.run_process(script, check=False)).returncode == -signal.SIGKILL
    assert source.with_name("default.db-journal").exists(), "the test did not leave a journal"
    async with opened_host(host_settings(tmp_path)) as host:
        result = await host.upgrader().run()
        copied = grants_in(host.directory / f"{result.tenant_id}.db")
    assert copied == [f"grant {i + 1}" for i in range(500)]


# -- what stops it before it begins ----------------------------------------------------------------


async def assert_refused(host, error, match, **upgrader):
    before = await host.traces()
    with pytest.raises(error, match=match):
        await host.upgrader(**upgrader).run()
    assert await host.traces() == before


async def test_first_user_organization_is_not_supported(tmp_path):
    write_database(tmp_path / "tenants" / "default.db")
    settings = host_settings(tmp_path, DefaultTenantStrategy="FirstUserOrganization")
    async with opened_host(settings) as host:
        await assert_refused(host, NotSupportedError, "FirstUserOrganization is not supported")


async def test_host_supplied_needs_a_resolver(tmp_path):
    async with opened_host(host_settings(tmp_path, **HOST_SUPPLIED)) as host:
        await assert_refused(host, DefaultTenantError, "no resolver is registered")


class Resolver:
    def __init__(self, answer):
        self.answer = answer

    async def resolve(self, tenants):
        await trio.lowlevel.checkpoint()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (KeyError("directory"), "KeyError"),
        ("unknown", "no tenant 'unknown'"),
        (None, "not a tenant"),
    ],
)
async def test_a_resolver_that_fails_stops_the_upgrade_before_it_begins(tmp_path, answer, match):
    write_database(tmp_path / "tenants" / "default.db")
    async with opened_host(host_settings(tmp_path, **HOST_SUPPLIED)) as host:
        await assert_refused(host, DefaultTenantError, match, resolver=Resolver(answer))


async def test_the_host_supplies_a_tenant_of_its_own(tmp_path):
    write_database(tmp_path / "tenants" / "default.db", 3)
    async with opened_host(host_settings(tmp_path, **HOST_SUPPLIED)) as host:
        acme = await host.tenants.add("acme", name="Acme")
        result = await host.upgrader(resolver=Resolver("acme")).run()
        assert result.tenant_id == acme.id
        assert len(grants_in(host.directory / f"{acme.id}.db")) == 3


async def test_a_default_tenant_that_is_not_active_is_refused(tmp_path):
    write_database(tmp_path / "tenants" / "default.db")
    async with opened_host(host_settings(tmp_path)) as host:
        await host.tenants.add("default", name="There already")
        await host.tenants.delete("default")
        await assert_refused(host, DefaultTenantError, "'default' is Deleted")


async def test_a_database_that_the_default_tenant_has_already_is_never_overwritten(tmp_path):
    write_database(tmp_path / "tenants" / "default.db")
    async with opened_host(host_settings(tmp_path)) as host:
        tenant = await host.tenants.add("default", name="There already")
        (host.directory / f"{tenant.id}.db-wal").write_bytes(b"a log without its database")
        await assert_refused(host, UpgradeError, f"{tenant.id}.db-wal exists")


def no_database(file: Path) -> None:
    file.write_bytes(b"this is a text file, and no database of any kind " * 100)


def damaged(file: Path) -> None:
    write_database(file, 2000)
    content = bytearray(file.read_bytes())
    content[4096 * 3 : 4096 * 6] = os.urandom(4096 * 3)
    file.write_bytes(content)


def index_lacks_a_row(file: Path) -> None:
    """Damage that no query meets: only a complete check of the database finds it."""
    write_database(file, 2000)
    database = apsw.Connection(str(file))
    database.execute("CREATE INDEX grants_body ON grants (body)")
    database.close()
    content = file.read_bytes()
    place = content.rindex(b"grant 777")
    file.write_bytes(content[:place] + b"grant 77x" + content[place + 9 :])


def truncated(file: Path) -> None:
    write_database(file, 2000)
    os.truncate(file, 4096 * 4 + 100)


def directory(file: Path) -> None:
    file.mkdir()


@pytest.mark.parametrize("stop_at", [1, 2, 5])
def test_a_copy_stops_between_any_two_turns_and_leaves_nothing(tmp_path, stop_at):
    write_database(tmp_path / "old.db", 100_000)
    calls = 0

    def pause():
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_database(tmp_path / "old.db", tmp_path / "copy", pause, lambda _done, _total: None)
    assert calls == stop_at, "it went on"
    assert [file.name for file in tmp_path.iterdir()] == ["old.db"]


@pytest.mark.parametrize("spoil", [no_database, damaged, index_lacks_a_row, truncated, directory])
async def test_an_old_database_that_cannot_be_read_is_one_clear_error_and_changes_nothing(
    tmp_path, spoil
):
    (tmp_path / "tenants").mkdir(mode=0o700)
    spoil(tmp_path / "tenants" / "default.db")
    async with opened_host(host_settings(tmp_path)) as host:
        await deliver(host.store, 3)
        await assert_refused(host, SourceDatabaseError, r"default\.db .*nothing was changed")


async def test_a_database_that_the_settings_name_must_exist(tmp_path):
    settings = host_settings(tmp_path, SourceDatabase=str(tmp_path / "gone.db"))
    async with opened_host(settings) as host:
        await assert_refused(host, SourceDatabaseError, r"there is no file .*gone\.db")


async def test_a_database_with_a_writer_is_not_copied(tmp_path):
    source = tmp_path / "tenants" / "default.db"
    write_database(source)
    writer = apsw.Connection(str(source))
    writer.execute("BEGIN IMMEDIATE")
    try:
        async with opened_host(host_settings(tmp_path)) as host:
            with pytest.raises(SourceDatabaseError, match="is being written by another process"):
                await host.upgrader().run()
            assert await host.store.upgrade.marker() is None
    finally:
        writer.close()


# -- quiescence ------------------------------------------------------------------------------------


async def test_a_host_that_is_not_quiet_is_refused(tmp_path):
    write_database(tmp_path / "tenants" / "default.db")
    async with opened_host(host_settings(tmp_path), quiet=False) as host:
        await assert_refused(host, NotQuiescentError, "has not signalled")


async def test_without_the_requirement_writers_may_continue(tmp_path):
    settings = host_settings(tmp_path, RequireGracefulQuiescence=False)
    async with opened_host(settings, quiet=False) as host:
        assert not (await host.upgrader().run()).already_done


async def test_a_host_that_withdraws_its_signal_stops_the_upgrade_between_two_batches(tmp_path):
    async with opened_host(host_settings(tmp_path)) as host:
        step = CountingStep(before=lambda n: host.quiescence.withdraw() if n == 2 else None)
        with pytest.raises(NotQuiescentError):
            await host.upgrader(steps=[step]).run()
        assert step.ran == [0, 1, 2]
        step.before = None
        host.quiescence.signal("quiet again")
        await host.upgrader(steps=[step]).run()
        assert step.ran == [0, 1, 2, 3, 4]


# -- cut short, and resumed ------------------------------------------------------------------------


async def test_max_run_duration_in_a_step_keeps_the_position_for_the_next_run(tmp_path):
    async with opened_host(host_settings(tmp_path, seconds=2)) as host:
        await deliver(host.store, 5)
        step = CountingStep(before=lambda n: trio.Event().wait() if n == 3 else None)
        with pytest.raises(UpgradeTimedOutError, match="'host:counting', position 3") as caught:
            await host.upgrader(steps=[step]).run()
        assert caught.value.exit_code == 1
        marker = await host.store.upgrade.marker()
        assert marker is not None
        assert (marker.state, marker.position) == (UpgradeState.RUNNING, "3")
        step.before = None
        host.settings = host_settings(tmp_path)
        await host.upgrader(steps=[step]).run()
        assert step.ran == [0, 1, 2, 3, 4]


async def test_max_run_duration_among_the_deliveries_keeps_whole_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(upgrader_module, "BATCH_DELIVERIES", 10)
    async with opened_host(host_settings(tmp_path, seconds=2)) as host:
        await deliver(host.store, 95)
        reports = Reports({"deliveries": lambda: time.sleep(2.1)})
        with pytest.raises(UpgradeTimedOutError) as caught:
            await host.upgrader(report=reports).run()
        marker = await host.store.upgrade.marker()
        assert marker is not None
        assert marker.position in ("10", "20"), "it went on after its end"
        assert f"'deliveries', position {marker.position}." in str(caught.value)
        left = 95 - int(marker.position)
        assert await host.store.upgrade.count_unassigned() == left
        host.settings = host_settings(tmp_path)
        result = await host.upgrader().run()
        assert result.done["deliveries"] == left
        assert await host.store.upgrade.count_unassigned() == 0


async def test_max_run_duration_while_copying_leaves_no_trace(tmp_path):
    write_database(tmp_path / "tenants" / "default.db", 100_000)
    async with opened_host(host_settings(tmp_path, seconds=2)) as host:
        before = await host.traces()
        reports = Reports({"database": lambda: time.sleep(2.1)})
        with pytest.raises(UpgradeTimedOutError, match="while copying"):
            await host.upgrader(report=reports).run()
        assert len(reports.seen) == 1, "the copy went on after its end"
        assert await host.traces() == before


async def test_a_step_that_fails_keeps_the_position(tmp_path):
    def fail(number):
        if number == 2:
            raise ConnectionError("the directory is unavailable")

    async with opened_host(host_settings(tmp_path)) as host:
        step = CountingStep(before=fail)
        with pytest.raises(UpgradeError, match="'counting' failed: ConnectionError: the directory"):
            await host.upgrader(steps=[step]).run()
        step.before = None
        await host.upgrader(steps=[step]).run()
        assert step.ran == [0, 1, 2, 3, 4]


async def test_a_step_that_was_interrupted_has_to_be_there_again(tmp_path):
    async with opened_host(host_settings(tmp_path, seconds=2)) as host:
        step = CountingStep(before=lambda _n: trio.Event().wait())
        with pytest.raises(UpgradeTimedOutError):
            await host.upgrader(steps=[step]).run()
        with pytest.raises(UpgradeError, match="'host:counting', which is not registered"):
            await host.upgrader().run()


async def test_a_copy_that_was_removed_between_two_runs_is_made_again(tmp_path):
    write_database(tmp_path / "tenants" / "default.db", 10)
    async with opened_host(host_settings(tmp_path)) as host:
        tenant = await host.tenants.add("default", name="Default Tenant")
        marker = upgrader_module.upgrade.begin(tenant.id, step="database", now=1.0)
        await host.store.upgrade.save(marker)
        await host.upgrader().run()
        assert len(grants_in(host.directory / f"{tenant.id}.db")) == 10


async def test_of_two_hosts_that_start_at_once_one_runs_it_and_the_other_refuses(tmp_path):
    write_database(tmp_path / "tenants" / "default.db", 10)
    entered, go_on = trio.Event(), trio.Event()

    async def wait() -> None:
        entered.set()
        await go_on.wait()

    async with opened_host(host_settings(tmp_path)) as one, opened_host(one.settings) as other:
        step = CountingStep(before=lambda n: wait() if n == 1 else None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.upgrader(steps=[step]).run)
            await entered.wait()
            with pytest.raises(UpgradeInProgressError, match="another process runs the upgrade"):
                await other.upgrader(steps=[step]).run()
            go_on.set()
        assert (await other.upgrader(steps=[step]).run()).already_done
        assert step.ran == [0, 1, 2, 3, 4]


# -- at the start of a host ------------------------------------------------------------------------


async def test_at_the_start_it_runs_by_itself_unless_that_is_switched_off(tmp_path, caplog):
    async with opened_host(host_settings(tmp_path, EnableAutomaticUpgrade=False)) as host:
        assert await host.upgrader().run_at_start() is None
        assert await host.store.upgrade.marker() is None
        assert "upgrade.pending" in caplog.text
    async with opened_host(host_settings(tmp_path)) as host:
        result = await host.upgrader().run_at_start()
        assert result is not None
        assert not result.already_done


# -- a host's own table ----------------------------------------------------------------------------


async def test_the_ready_made_step_fills_empty_tenant_ids_only(tmp_path):
    file = tmp_path / "host.db"
    database = apsw.Connection(str(file))
    database.execute('CREATE TABLE "my ""orders" (id INTEGER PRIMARY KEY, tenant_id TEXT)')
    database.executemany(
        'INSERT INTO "my ""orders" VALUES (?, ?)',
        [(i, "other" if i % 10 == 0 else None) for i in range(-100, 900)],
    )
    async with opened_host(host_settings(tmp_path)) as host:
        step = SqliteTenantIds(file, 'my "orders', batch_rows=64)
        step.name = "orders"
        result = await host.upgrader(steps=[step]).run()
    assert result.done["host:orders"] == 900
    counts = dict(database.execute('SELECT tenant_id, count(*) FROM "my ""orders" GROUP BY 1'))
    assert counts == {"other": 100, result.tenant_id: 900}
    database.close()


async def test_the_ready_made_step_names_the_table_that_is_not_there(tmp_path):
    write_database(tmp_path / "host.db", 1)
    async with opened_host(host_settings(tmp_path)) as host:
        step = SqliteTenantIds(tmp_path / "host.db", "grants")
        with pytest.raises(UpgradeError, match=r"host\.db cannot be filled: .*tenant_id"):
            await host.upgrader(steps=[step]).run()


# -- size ------------------------------------------------------------------------------------------

#: ``all`` makes it a million rows.
SIZE = "SDK_TEST_UPGRADE_ROWS"

READ_UNTIL_KILLED = """
import sys, apsw
database = apsw.Connection(sys.argv[1], flags=apsw.SQLITE_OPEN_READONLY)
database.set_busy_timeout(5000)
print("reading", flush=True)
while True:
    count, _length = database.execute("SELECT count(*), sum(length(body)) FROM grants").get
    assert count == int(sys.argv[2])
"""


async def test_a_large_database_is_copied_while_others_read_it(tmp_path):
    rows = 1_000_000 if os.environ.get(SIZE) == "all" else 50_000
    source = tmp_path / "tenants" / "default.db"
    write_database(source, rows)
    script = [sys.executable, "-c", READ_UNTIL_KILLED, str(source), str(rows)]
    readers = [subprocess.Popen(script, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for reader in readers:
            assert reader.stdout.readline() == b"reading\n"
        async with opened_host(host_settings(tmp_path)) as host:
            result = await host.upgrader().run()
            copied = grants_in(host.directory / f"{result.tenant_id}.db")
        assert all(reader.poll() is None for reader in readers), "a reader was disturbed"
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    assert copied == [f"grant {i + 1}" for i in range(rows)]
