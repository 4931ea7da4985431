"""The tenants' databases: transactions, cancellation, and how many are open at a time."""

import os
import shutil
import stat
import subprocess
import sys
import threading
import time
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import pytest
import trio
import trio.testing
from support.waiting import until

from sdk_trio.errors import InvalidTenantError, StoreUnavailableError, TenantNotActiveError
from sdk_trio.storage.open import open_store
from sdk_trio.tenants import TenantService
from sdk_trio.tenants import databases as database_opener
from sdk_trio.tenants.databases import FILES_PER_DATABASE, TenantDatabases
from sdk_trio.tenants.tenancy import TenantRuntime
from sdk_trio.testing import settings_for_tests

TENANT = "8c5c4c9e-6f0f-4a52-9c3b-0a8f4b7e2d11"
OTHER = "11111111-2222-4333-8444-555555555555"

#: How many tenants the test of the bound has; 10000 is the number that is promised.
TENANTS = "SDK_TEST_TENANTS"


@asynccontextmanager
async def opened(directory, **bounds):
    databases = TenantDatabases(directory, **bounds)
    try:
        yield databases
    finally:
        await databases.close()


def create(connection):
    connection.execute("CREATE TABLE IF NOT EXISTS grants (body TEXT UNIQUE)")


def add(body):
    def insert(connection):
        create(connection)
        connection.execute("INSERT INTO grants VALUES (?)", (body,))

    return insert


def bodies(connection):
    return [body for (body,) in connection.execute("SELECT body FROM grants ORDER BY rowid")]


async def give_up(databases, function):
    """Run a function, and cancel the call as soon as the function has begun."""
    begun = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(databases.run, TENANT, lambda c: (begun.set(), function(c)))
        await until(begun.is_set)
        nursery.cancel_scope.cancel()


async def test_a_function_is_a_transaction_of_its_own(tmp_path):
    def add_two_and_fail(connection):
        add("b")(connection)
        add("a")(connection)

    async with opened(tmp_path) as databases, databases.open(TENANT) as database:
        await database.run(add("a"))
        # The error of a statement is the caller's own: it arrives unchanged.
        with pytest.raises(apsw.ConstraintError):
            await database.run(add_two_and_fail)
        assert await database.run(bodies) == ["a"]
        with pytest.raises(ZeroDivisionError):
            await database.run(lambda connection: (add("c")(connection), 1 // 0))
        assert await database.run(bodies) == ["a"]
    assert stat.S_IMODE((tmp_path / f"{TENANT}.db").stat().st_mode) == 0o600


async def test_functions_of_one_tenant_run_one_at_a_time_in_order_and_tenants_side_by_side(
    tmp_path,
):
    both = threading.Barrier(2)

    async with opened(tmp_path) as databases, trio.open_nursery() as nursery:
        with trio.fail_after(60):
            # Two tenants meet in their functions; of one tenant they would wait forever.
            async with trio.open_nursery() as meeting:
                meeting.start_soon(databases.run, TENANT, lambda _c: both.wait(60))
                meeting.start_soon(databases.run, OTHER, lambda _c: both.wait(60))
        gate = threading.Event()
        nursery.start_soon(databases.run, TENANT, lambda _c: gate.wait(60))
        await trio.testing.wait_all_tasks_blocked()
        for number in range(20):
            nursery.start_soon(databases.run, TENANT, add(f"{number:02}"))
            await trio.testing.wait_all_tasks_blocked()
        gate.set()
        assert await databases.run(TENANT, bodies) == [f"{number:02}" for number in range(20)]


async def test_cancelled_before_it_began_nothing_happens_and_later_it_is_finished_first(tmp_path):
    async with opened(tmp_path) as databases:
        await databases.run(TENANT, create)
        began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        def slow(connection):
            began.set()
            assert go_on.wait(60)
            time.sleep(0.1)
            add("began")(connection)
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(databases.run, TENANT, slow)
            await trio.to_thread.run_sync(began.wait)
            nursery.start_soon(databases.run, TENANT, add("waited"))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            trio.lowlevel.current_trio_token().run_sync_soon(go_on.set)
        assert nursery.cancel_scope.cancelled_caught
        assert ended.is_set(), "its caller was let go before it had ended"
        assert await databases.run(TENANT, bodies) == ["began"]
        with trio.move_on_after(0) as scope:
            await databases.run(TENANT, add("never"))
        assert scope.cancelled_caught
        assert await databases.run(TENANT, bodies) == ["began"]


async def test_a_disk_that_hangs_lets_a_cancelled_caller_go_and_is_waited_for_by_the_next(
    tmp_path, monkeypatch
):
    disk = threading.Event()
    async with opened(tmp_path) as databases:
        with trio.fail_after(60):
            with monkeypatch.context() as hasty:  # the close at the end may take its time
                hasty.setattr(database_opener, "STALL_SECONDS", 0.05)
                await give_up(databases, lambda c: (disk.wait(60), add("late")(c)))
            with trio.move_on_after(0.1) as impatient:
                await databases.run(TENANT, create)
            assert impatient.cancelled_caught, "two functions ran on one connection"
            disk.set()
            assert await databases.run(TENANT, bodies) == ["late"]


async def test_after_the_block_and_after_the_end_calls_are_refused(tmp_path):
    databases = TenantDatabases(tmp_path)
    async with databases.open(TENANT) as database:
        await database.run(add("a"))
    with pytest.raises(StoreUnavailableError, match="has ended"):
        await database.run(bodies)
    await databases.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{TENANT}.db"]
    await databases.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        await databases.run(TENANT, bodies)


async def test_on_close_waiting_calls_are_refused_and_running_ones_finished(tmp_path):
    databases = TenantDatabases(tmp_path, max_open=1, max_threads=1)
    go_on = threading.Event()

    async def refused() -> None:
        with pytest.raises(StoreUnavailableError, match="closed"):
            await databases.run(OTHER, create)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(databases.run, TENANT, lambda c: (go_on.wait(60), add("ran")(c)))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(databases.close)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(refused)
            await trio.testing.wait_all_tasks_blocked()
            go_on.set()
    async with opened(tmp_path) as again:
        assert await again.run(TENANT, bodies) == ["ran"]


@pytest.mark.parametrize(
    "tenant_id",
    ["../default", "", "default", TENANT.upper(), f"../{TENANT}", f"{TENANT}\n", "a/" + TENANT],
)
async def test_only_a_tenant_id_becomes_a_file_name(tmp_path, tenant_id):
    async with opened(tmp_path / "tenants") as databases:
        with pytest.raises(InvalidTenantError):
            async with databases.open(tenant_id):
                raise AssertionError("the block was entered")
        with pytest.raises(InvalidTenantError):
            await databases.run(tenant_id, create)
    assert list(tmp_path.iterdir()) == []


async def test_a_link_out_of_the_directory_is_refused(tmp_path):
    (tmp_path / "tenants").mkdir(mode=0o700)
    (tmp_path / "tenants" / f"{TENANT}.db").symlink_to(tmp_path / "elsewhere.db")
    async with opened(tmp_path / "tenants") as databases:
        with pytest.raises(
            StoreUnavailableError, match="is a link to a file outside of the directory"
        ):
            await databases.run(TENANT, create)
    assert not (tmp_path / "elsewhere.db").exists()


async def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path):
    file = tmp_path / f"{TENANT}.db"
    file.write_bytes(b"no database " * 100)
    async with opened(tmp_path) as databases:
        with pytest.raises(StoreUnavailableError, match=f"{TENANT}.db failed: it is not a SQLite"):
            await databases.run(TENANT, create)
        await databases.run(OTHER, create)
    assert file.read_bytes() == b"no database " * 100


async def test_forgotten_databases_are_closed(tmp_path):
    async with opened(tmp_path) as databases:
        await databases.run(TENANT, add("a"))
        assert databases.open_count == 1
        await databases.forget(TENANT)
        await databases.forget(OTHER)
        assert databases.open_count == 0
        assert sorted(file.name for file in tmp_path.iterdir()) == [f"{TENANT}.db"]
        assert await databases.run(TENANT, bodies) == ["a"]


def files_open_in(directory: Path) -> int:
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(descriptor).startswith(str(directory))
        except OSError:
            continue
    return count


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the files in /proc")
async def test_open_files_are_bounded_however_many_tenants_there_are(tmp_path):
    tenants = [str(uuid.UUID(int=n, version=4)) for n in range(int(os.environ.get(TENANTS, 300)))]
    most_open = most_files = 0
    async with opened(tmp_path, max_open=16, max_threads=4) as databases:

        async def visit(waiting):
            nonlocal most_open, most_files
            for number, tenant_id in enumerate(waiting):
                await databases.run(tenant_id, add("a"))
                most_open = max(most_open, databases.open_count)
                if number % 20 == 0:
                    # A listing is not a snapshot: a file that a thread closes while it is read, and
                    # the one opened for it, may both be counted. The least of some is exact enough.
                    counts = [files_open_in(tmp_path) for _ in range(5)]
                    most_files = max(most_files, min(counts))

        async with trio.open_nursery() as nursery:
            for first in range(8):
                nursery.start_soon(visit, tenants[first::8])
        assert most_open == 16
        assert 16 <= most_files <= 16 * FILES_PER_DATABASE
        # Each has its own rows, whichever connection was closed for another in between.
        for tenant_id in tenants[:50]:
            assert await databases.run(tenant_id, bodies) == ["a"]
    assert files_open_in(tmp_path) == 0


async def test_the_least_recently_used_database_is_closed_for_another(tmp_path):
    third = "99999999-2222-4333-8444-555555555555"
    connections = {}

    def remember(connection):
        connections.setdefault(connection.filename, set()).add(id(connection))
        kept.append(connection)

    kept: list[apsw.Connection] = []
    async with opened(tmp_path, max_open=2, max_threads=1) as databases:
        for tenant_id in (TENANT, OTHER, TENANT, third, TENANT, OTHER):
            await databases.run(tenant_id, remember)
    opened_times = {Path(name).stem: len(ids) for name, ids in connections.items()}
    assert opened_times == {TENANT: 1, OTHER: 2, third: 1}


def replace_by_a_copy(directory: Path, *bodies_of_it: str) -> None:
    """Put another database at the path, as who renames one there does."""
    file = directory / f"{TENANT}.db"
    other = apsw.Connection(str(directory / "other"))
    create(other)
    for body in bodies_of_it:
        other.execute("INSERT INTO grants VALUES (?)", (body,))
    other.close()
    for suffix in ("-wal", "-shm"):
        file.with_name(file.name + suffix).unlink(missing_ok=True)
    (directory / "other").rename(file)


async def test_a_database_that_took_its_place_is_used(tmp_path):
    async with opened(tmp_path) as databases:
        await databases.run(TENANT, add("old"))
        replace_by_a_copy(tmp_path, "new")
        assert await databases.run(TENANT, bodies) == ["new"]
        await databases.run(TENANT, add("later"))
    async with opened(tmp_path) as again:
        assert await again.run(TENANT, bodies) == ["new", "later"]


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
async def test_an_unlinked_log_is_not_written_to(tmp_path, suffix):
    async with opened(tmp_path, replicated=True) as databases:
        await databases.run(TENANT, create)
        (tmp_path / f"{TENANT}.db{suffix}").unlink()
        await databases.run(TENANT, create)
        await databases.run(TENANT, add("kept"))
        assert (tmp_path / f"{TENANT}.db{suffix}").exists()
        # As after a crash: nothing is closed.
        shutil.copytree(tmp_path, tmp_path / "found")
    async with opened(tmp_path / "found") as again:
        assert await again.run(TENANT, bodies) == ["kept"]


async def test_a_write_while_the_file_is_replaced_is_no_success(tmp_path):
    def add_and_replace(connection):
        add("lost")(connection)
        replace_by_a_copy(tmp_path, "new")

    async with opened(tmp_path) as databases:
        await databases.run(TENANT, add("old"))
        with pytest.raises(StoreUnavailableError, match=r"is being replaced.*try again"):
            await databases.run(TENANT, add_and_replace)
        await databases.run(TENANT, add("again"))
        assert await databases.run(TENANT, bodies) == ["new", "again"]


async def test_a_commit_to_a_file_that_is_then_replaced_is_no_success(tmp_path, monkeypatch):
    """The file disappears between the last check and the commit, and is missed after it."""
    looked = database_opener._require_in_place
    looks = []

    def look_then_replace(file, call):
        looked(file, call)
        looks.append(file)
        if len(looks) == 1:
            replace_by_a_copy(tmp_path, "new")

    async with opened(tmp_path) as databases:
        await databases.run(TENANT, add("old"))
        monkeypatch.setattr(database_opener, "_require_in_place", look_then_replace)
        with pytest.raises(StoreUnavailableError, match="is being replaced"):
            await databases.run(TENANT, add("lost"))
        assert await databases.run(TENANT, bodies) == ["new"]


async def test_a_missing_database_is_not_created_again(tmp_path):
    file = tmp_path / f"{TENANT}.db"
    async with opened(tmp_path) as databases:
        await databases.run(TENANT, add("old"))
        file.rename(tmp_path / "aside")
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="restore the file"):
                await databases.run(TENANT, bodies)
        assert not file.exists()
        (tmp_path / "aside").rename(file)
        assert await databases.run(TENANT, bodies) == ["old"]


async def test_a_restore_waits_until_the_databases_are_closed_and_locks_them(tmp_path):
    file = tmp_path / f"{TENANT}.db"
    async with opened(tmp_path) as databases:
        await databases.run(TENANT, add("old"))
        assert await trio.to_thread.run_sync(take_elsewhere, file) == "in use"
        await databases.forget(TENANT)
        assert await trio.to_thread.run_sync(take_elsewhere, file) == "taken"


def take_elsewhere(file: Path) -> str:
    """Take the database in another process, as a command does; SQLite's locks are a process's."""
    script = (
        "import sys, pathlib; from sdk_trio.replication.live_database import LockedDatabase;"
        "held = LockedDatabase.take(pathlib.Path(sys.argv[1]));"
        "print('in use' if held is None else 'taken')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


async def test_an_inactive_tenant_has_no_open_database_regardless_of_who_suspended_it(tmp_path):
    """Another process makes the change: a separate service on the same store."""
    settings = settings_for_tests(
        {
            "Storage:Backend": "Sqlite",
            "Storage:Path": str(tmp_path / "data"),
            "MultiTenant:Enabled": True,
            "MultiTenant:TenantStatus:RequireVerifiedEmailForSuspension": False,
        }
    )
    with trio.fail_after(60):
        async with (
            open_store(settings, owner="a") as mine,
            open_store(settings, owner="b") as other,
            trio.open_nursery() as nursery,
        ):
            tenancy = TenantRuntime(settings, mine.tenants, clock=time.time)
            command = TenantService(settings, other.tenants)
            await nursery.start(tenancy.run)
            tenant = await tenancy.service.add("acme", name="Acme")
            async with tenancy.tenant_db(tenant) as database:
                await database.run(add("active"))
                await command.suspend(tenant, reason="test", actor="test")
                await until(lambda: not tenancy.databases.open_count)
                with pytest.raises(TenantNotActiveError):
                    await database.run(add("suspended"))
                assert tenancy.databases.open_count == 0
                await command.reactivate(tenant, actor="test")

                async def is_active():
                    return (await tenancy.service.recall(tenant.id)).is_active

                await until(is_active)
                assert await database.run(bodies) == ["active"]
            nursery.cancel_scope.cancel()


async def test_a_close_waits_once_for_what_has_stalled(tmp_path, monkeypatch):
    monkeypatch.setattr(database_opener, "STALL_SECONDS", 0.05)
    disk = threading.Event()
    databases = TenantDatabases(tmp_path)
    with trio.fail_after(60):
        await give_up(databases, lambda _c: disk.wait(100))
        # The cancelled task has waited for it already, so the close does not wait again.
        monkeypatch.setattr(database_opener, "STALL_SECONDS", 3600)
        with pytest.raises(StoreUnavailableError, match="did not close"):
            await databases.close()
        disk.set()
        await until(lambda: not databases._running)
    database_opener._close_all(list(databases._idle.values()))
