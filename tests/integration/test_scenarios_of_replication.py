"""Scenarios of Litestream's own suite, with our supervisor and its binary.

Each docstring names the file and the test of benbjohnson/litestream that the scenario comes from.
One replicator has a database for each scenario, so that they cost one start and one stop; what the
replica gives back is compared after the stop.
"""

import logging
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import trio
from support.programs import program
from support.replicating import Fleet, local_fleet, replicators_of
from support.waiting import PATIENCE_SECONDS, until

from sdk_trio.replication.plan import SupervisorTimeouts
from sdk_trio.replication.supervisor import Supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PATIENCE = SupervisorTimeouts(
    stop=20, reload_stop=5, start=10, start_each=0.02, lock=5, watch=0.3, silent_checks=2
)

Scenario = Callable[[str], None]


def connected(path: str) -> closing[sqlite3.Connection]:
    """Connect as an application of a tenant does."""
    connection = sqlite3.connect(path, timeout=20, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    return closing(connection)


def insert(connection: sqlite3.Connection, count: int, size: int = 10) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS d (x INTEGER PRIMARY KEY, y BLOB)")
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO d (y) VALUES (randomblob(?))", [(size,)] * count)
    connection.execute("COMMIT")


def has_small_pages(path: str) -> None:
    """tests/integration/boundary_test.go, TestLockPageWithDifferentPageSizes."""
    with connected(path) as connection:
        assert connection.execute("PRAGMA page_size").fetchone() == (512,)
        insert(connection, 200, 900)


def has_large_pages(path: str) -> None:
    """tests/integration/boundary_test.go, TestLockPageWithDifferentPageSizes."""
    with connected(path) as connection:
        assert connection.execute("PRAGMA page_size").fetchone() == (65536,)
        insert(connection, 200, 900)


#: The size of pages can only be changed outside of WAL, before a replicator has it open.
PAGES: dict[Scenario, int] = {has_small_pages: 512, has_large_pages: 65536}


def change_pages(path: str, size: int) -> None:
    with connected(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute(f"PRAGMA page_size = {size}")
        connection.execute("VACUUM")
        connection.execute("PRAGMA journal_mode = WAL")


def checkpoints_itself(path: str) -> None:
    """tests/integration/concurrent_test.go, TestRapidCheckpoints.

    The replicator's own read keeps most of them from ending, so none waits for it.
    """
    with connected(path) as connection:
        for mode in ("PASSIVE", "FULL", "RESTART", "TRUNCATE") * 5:
            insert(connection, 5)
            connection.execute("PRAGMA busy_timeout = 10")
            connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            connection.execute("PRAGMA busy_timeout = 20000")
        insert(connection, 1)


def vacuums(path: str) -> None:
    """db_test.go, TestDB_SyncAfterVacuum."""
    with connected(path) as connection:
        insert(connection, 400, 2000)
        connection.execute("DELETE FROM d WHERE x % 4 <> 0")
        connection.execute("VACUUM")
        insert(connection, 3)


def grows_its_log(path: str) -> None:
    """tests/integration/concurrent_test.go, TestWALGrowth: one large transaction."""
    with connected(path) as connection:
        insert(connection, 1000, 4000)
        connection.execute("UPDATE d SET y = randomblob(500) WHERE x % 3 = 0")


def is_held_open(path: str) -> None:
    """tests/integration/directory_watcher_test.go, TestDirectoryWatcherActiveConnections.

    Also concurrent_test.go, TestBusyTimeout: readers and a second writer stay connected.
    """
    with connected(path) as reader, connected(path) as writer, connected(path) as second:
        insert(writer, 20)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM d").fetchone()
        insert(second, 20)
        insert(writer, 20)
        reader.execute("COMMIT")


def changes_its_schema(path: str) -> None:
    """replica_test.go, TestReplica_RestoreAndReplicateAfterDataLoss: the schema comes back, too."""
    with connected(path) as connection:
        insert(connection, 30)
        connection.execute("ALTER TABLE d ADD COLUMN z TEXT DEFAULT 'new'")
        connection.execute("CREATE INDEX by_z ON d (z, x)")
        connection.execute("CREATE TABLE other (a TEXT PRIMARY KEY) WITHOUT ROWID")
        connection.execute("INSERT INTO other VALUES ('b')")


def rolls_back(path: str) -> None:
    """db_test.go, TestDB_SnapshotExcludesUnsyncedWALFrames: what was not committed never comes."""
    with connected(path) as connection:
        insert(connection, 10)
        connection.execute("PRAGMA cache_size = 5")  # so that the pages reach the log
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO d (y) VALUES (randomblob(?))", [(4000,)] * 300)
        connection.execute("ROLLBACK")


SCENARIOS: list[Scenario] = [
    *(has_small_pages, has_large_pages, checkpoints_itself, vacuums, grows_its_log),
    *(is_held_open, changes_its_schema, rolls_back),
]


def content(path: str) -> list[str]:
    """Return the statements that make an equal database, and the size of its pages."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        return [f"pages of {size}", *connection.iterdump()]


@pytest.fixture
def fleet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Fleet]:
    caplog.set_level(logging.INFO, logger="sdk_trio")
    fleet = local_fleet(tmp_path)
    fleet.add(len(SCENARIOS))
    for scenario, file in zip(SCENARIOS, fleet.files, strict=True):
        if scenario in PAGES:
            change_pages(file.path, PAGES[scenario])
    fleet.render()
    yield fleet
    assert replicators_of(tmp_path) == [], "a replicator was left behind"


async def replicate(fleet: Fleet, *, meanwhile: bool) -> None:
    """Run a replicator; the scenarios are played before it starts, or while it runs."""
    options = msgspec.structs.replace(fleet.options)
    supervisor = Supervisor(options, fleet.directory, patience=PATIENCE, fraction=lambda: 0.1)

    async def play() -> None:
        for scenario, file in zip(SCENARIOS, fleet.files, strict=True):
            await trio.to_thread.run_sync(scenario, file.path)

    async def synced() -> bool:
        listed = {
            each.path for each in await supervisor.client.list_databases() if each.last_sync_at
        }
        return supervisor.confirmed and listed >= {file.path for file in fleet.files}

    with trio.fail_after(PATIENCE_SECONDS):
        if not meanwhile:
            await play()
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            await until(lambda: supervisor.confirmed)
            await until(synced)
            if meanwhile:
                await play()
            supervisor.stop()


def restored(fleet: Fleet, number: int) -> list[str]:
    out = fleet.root / f"restored-{number}.db"
    command = [program("litestream"), "restore", "-config", str(fleet.config), "-o", str(out)]
    command.append(fleet.files[number].path)
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return content(str(out))


@pytest.mark.parametrize("meanwhile", [False, True], ids=["before", "meanwhile"])
async def test_after_any_transition_the_replica_equals_the_database(
    fleet: Fleet, meanwhile: bool
) -> None:
    """The scenarios above; "before" is also tests/integration/scenario_test.go, TestFreshStart."""
    await replicate(fleet, meanwhile=meanwhile)
    differing = [
        scenario.__name__
        for number, scenario in enumerate(SCENARIOS)
        if await trio.to_thread.run_sync(restored, fleet, number)
        != content(fleet.files[number].path)
    ]
    assert differing == []
