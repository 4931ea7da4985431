"""The SQLite store among processes: killed in the middle, changed from beside, locked."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import apsw
import msgspec
import pytest
import trio

from sdk_trio.base.private_files import create_data_directory
from sdk_trio.config import Settings
from sdk_trio.config.fields import StorageBackend
from sdk_trio.config.options.server import StorageOptions
from sdk_trio.errors import (
    OptionsValidationError,
    StoreLockedError,
    StoreUnavailableError,
)
from sdk_trio.records.deliveries import Admission, Dead, DeliveryState, NewDelivery
from sdk_trio.storage import data_directory
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.data_directory import lock_data_directory
from sdk_trio.storage.engines import sqlite_connection as connect
from sdk_trio.storage.engines.sqlite_connection import connect_writer
from sdk_trio.storage.open import open_inbox
from sdk_trio.storage.sql.versions import prepare_sqlite
from sdk_trio.storage.sqlite_inbox import SqliteInbox

TERMS = {"lease_seconds": 10, "dedup_seconds": 100, "payload_seconds": 40}

OPEN = """
import sys, trio
from sdk_trio.records.deliveries import NewDelivery
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sqlite_inbox import SqliteInbox

async def open_inbox():
    terms = LeaseTerms(owner="child", lease_seconds=10, dedup_seconds=100, payload_seconds=40)
    return await SqliteInbox.open(sys.argv[1], terms)
"""

ACCEPT_UNTIL_KILLED = (
    OPEN
    + """
async def main():
    inbox = await open_inbox()

    async def deliver(task):
        number = 0
        while True:
            number += 1
            name = f"m-{task}-{number}"
            await inbox.accept(NewDelivery(name, "t", b"x" * 500, 7, 1.0), leased=True)
            print(name, flush=True)

    async with trio.open_nursery() as nursery:
        for task in range(20):
            nursery.start_soon(deliver, task)

trio.run(main)
"""
)

REPLAY = (
    OPEN
    + """
async def main():
    inbox = await open_inbox()
    print(*await inbox.replay(["m1"]))
    await inbox.close()

trio.run(main)
"""
)

LEAVE_WITHOUT_CLOSING = (
    OPEN
    + """
async def main():
    inbox = await open_inbox()
    await inbox.accept(NewDelivery("m1", "t", b"x", 7, 1.0), leased=True)

trio.run(main)
"""
)


def delivery(webhook_id: str) -> NewDelivery:
    return NewDelivery(webhook_id, "t", b"x", 7, 1000.0)


def promises_of_a_killed_child(file: Path) -> set[str]:
    """Run a child that accepts and prints ids, kill it, and return the ids that it printed."""
    child = subprocess.Popen(
        [sys.executable, "-c", ACCEPT_UNTIL_KILLED, str(file)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    reported = [child.stdout.readline() for _ in range(400)]
    os.kill(child.pid, signal.SIGKILL)
    reported += child.stdout.readlines()
    child.stdout.close()
    child.wait(60)
    # The last line may have been cut off by the kill; every whole one was a promise.
    promised = {line.decode().strip() for line in reported if line.endswith(b"\n")}
    assert len(promised) >= 400
    return promised


async def test_accepted_events_survive_kill_9_in_the_middle_of_commits(tmp_path: Path) -> None:
    file = tmp_path / "inbox.db"
    for _ in range(3):
        promised = await trio.to_thread.run_sync(promises_of_a_killed_child, file)
        inbox = await SqliteInbox.open(file, LeaseTerms(owner="successor", **TERMS))
        kept = {record.webhook_id for record in await inbox.find(limit=1_000_000)}
        assert promised <= kept
        assert await inbox.recover() == (await inbox.counts())[DeliveryState.RECEIVED]
        await inbox.close()
        connection = apsw.Connection(str(file))
        assert connection.pragma("integrity_check") == "ok"
        assert (
            connection.execute(
                "SELECT count(*) FROM arrival LEFT JOIN work USING (sequence) "
                "WHERE raw IS NULL OR state IS NULL"
            ).get
            == 0
        ), "no delivery without its body and its state"
        connection.close()
        for name in tmp_path.glob("inbox.db*"):
            name.unlink()


async def test_a_command_beside_the_daemon_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "inbox.db"
    inbox = await SqliteInbox.open(file, LeaseTerms(owner="daemon", **TERMS))
    lease = (await inbox.accept(delivery("m1"), leased=True)).lease
    await inbox.finish(lease, Dead("boom"), now=1001)
    assert not await inbox.changed_elsewhere()

    numbers = itertools.count()
    accepted = set()

    async def keep_writing() -> None:
        while True:
            webhook_id = f"other-{next(numbers)}"
            await inbox.accept(delivery(webhook_id), leased=True)
            accepted.add(webhook_id)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(keep_writing)
        with trio.fail_after(60):
            result = await trio.run_process(
                [sys.executable, "-c", REPLAY, str(file)], capture_stdout=True
            )
        nursery.cancel_scope.cancel()
    assert result.stdout.decode().split() == ["m1"]
    assert await inbox.changed_elsewhere()
    assert not await inbox.changed_elsewhere()
    due = (await inbox.claim_due(limit=5, now=1002)).records
    ids = [record.webhook_id for record in due]
    assert ids[0] == "m1"
    assert not accepted.intersection(ids), "due are only those besides whose accept was cancelled"
    await inbox.close()


#: A process of several that writes in turns, and has had its turn for a long time.
WRITER = """
import fcntl, os, sys, time
import apsw
turn = os.open(sys.argv[1] + "/inbox.turn", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(turn, fcntl.LOCK_EX)
store = apsw.Connection(sys.argv[1] + "/inbox.db")
store.execute("BEGIN IMMEDIATE")
print("writes", flush=True)
sys.stdin.readline()
time.sleep(float(sys.argv[2]))
store.execute("COMMIT")
"""


async def test_a_command_beside_processes_that_alternate_writes_gets_the_write_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(storage=StorageOptions(path=str(tmp_path)))
    async with open_inbox(settings, owner="one"):
        pass
    monkeypatch.setattr(connect, "BUSY_SECONDS", 0.05)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writes\n"
        writer.stdin.write(b"go on\n")
        writer.stdin.flush()
        async with open_inbox(settings, owner="a command") as inbox:
            await inbox.accept(NewDelivery("m1", "order.paid", b"{}", 7, 1.0), leased=False)


async def test_a_store_that_is_never_closed_does_not_keep_the_process(tmp_path: Path) -> None:
    with trio.fail_after(60):
        result = await trio.run_process(
            [sys.executable, "-W", "error", "-c", LEAVE_WITHOUT_CLOSING, tmp_path / "inbox.db"],
            capture_stderr=True,
        )
    assert result.stderr == b""
    inbox = await SqliteInbox.open(tmp_path / "inbox.db", LeaseTerms(owner="next", **TERMS))
    assert (await inbox.accept(delivery("m1"), leased=True)).admission is Admission.QUEUED
    await inbox.close()


async def test_opening_a_new_file_at_once_from_several_sides(tmp_path: Path) -> None:
    opened: list[SqliteInbox] = []

    async def open_one(number: int) -> None:
        opened.append(
            await SqliteInbox.open(tmp_path / "inbox.db", LeaseTerms(owner=f"o{number}", **TERMS))
        )

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(open_one, number)
    assert (await opened[0].accept(delivery("m"), leased=True)).admission is Admission.NEW
    assert (await opened[4].accept(delivery("m"), leased=True)).admission is Admission.QUEUED
    for inbox in opened:
        await inbox.close()


def test_no_side_takes_the_others_half_made_file_for_a_stranger(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def open_one(file: Path, together: threading.Barrier) -> None:
        together.wait()
        try:
            connect_writer(str(file), partial(prepare_sqlite, file=str(file))).close()
        except BaseException as error:
            failures.append(error)

    for number in range(25):
        together = threading.Barrier(6)
        file = tmp_path / f"{number}.db"
        sides = [threading.Thread(target=open_one, args=(file, together)) for _ in range(6)]
        for side in sides:
            side.start()
        for side in sides:
            side.join()
    assert failures == []


# -- the data directory ------------------------------------------------------------------------


def test_the_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    directory = create_data_directory(tmp_path / "some" / "data")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert create_data_directory(directory) == directory


def test_a_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "data"):
        with pytest.raises(StoreUnavailableError, match="Sdk:Storage:Path") as caught:
            create_data_directory(path)
        assert str(path) in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no start knows who is dead")
def test_the_owner_before_is_dead_for_sure_in_the_same_directory_since_the_same_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    with lock_data_directory(data) as held:
        assert held.replace_owner("one") is None
    with lock_data_directory(data) as held:
        assert held.replace_owner("two") == "one"
        shutil.copytree(data, copy)
        with lock_data_directory(copy) as other:
            assert other.replace_owner("of the copy") is None, "the owner in the original may live"
    with monkeypatch.context() as patched:
        (tmp_path / "boot").write_text("another\n")
        patched.setattr(data_directory, "_BOOT_ID", tmp_path / "boot")
        with lock_data_directory(data) as held:
            assert held.replace_owner("three") is None, (
                "it may live on the machine that has it as well"
            )
        patched.setattr(data_directory, "_BOOT_ID", tmp_path / "none")
        with lock_data_directory(data) as held:
            assert held.replace_owner("four") is None
    (data / data_directory.OWNER_NAME).write_bytes(b"\xff")
    with lock_data_directory(data) as held:
        assert held.replace_owner("five") is None
    with lock_data_directory(data) as held:
        assert held._replace(descriptor=None).replace_owner("six") is None
        assert held.replace_owner("seven") == "five"


def test_a_locked_directory_names_itself_and_its_holder(tmp_path: Path) -> None:
    with lock_data_directory(tmp_path):
        with pytest.raises(StoreLockedError) as caught, lock_data_directory(tmp_path):
            pass
        assert str(tmp_path) in str(caught.value)
        assert str(os.getpid()) in str(caught.value)
    with lock_data_directory(tmp_path):
        pass


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from sdk_trio.storage.data_directory import lock_data_directory\n"
        "with lock_data_directory(sys.argv[1]):\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"locked\n"
    with (
        pytest.raises(StoreLockedError, match=f"process {child.pid}"),
        lock_data_directory(tmp_path),
    ):
        pass
    child.kill()
    child.wait(60)
    child.stdout.close()
    with lock_data_directory(tmp_path):
        pass


# -- open_inbox --------------------------------------------------------------------------------


def settings(backend: StorageBackend, path: Path) -> Settings:
    settings = Settings.from_mapping({"AccessToken": "none"}, receiver=False)
    return msgspec.structs.replace(
        settings, storage=StorageOptions(backend=backend, path=str(path))
    )


@pytest.mark.parametrize("backend", [StorageBackend.SQLITE, StorageBackend.MEMORY])
async def test_the_settings_choose_the_store(tmp_path: Path, backend: StorageBackend) -> None:
    path = tmp_path / "data"
    async with open_inbox(settings(backend, path), owner="one") as inbox:
        await inbox.accept(delivery("m1"), leased=True)
    assert await trio.Path(path / "inbox.db").exists() == (backend is StorageBackend.SQLITE)
    with pytest.raises(StoreUnavailableError, match="closed"):
        await inbox.get("m1")


async def test_a_database_whose_variable_is_not_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg", reason="the extra 'postgres' is not installed")
    monkeypatch.delenv("SDK_POSTGRES_DSN", raising=False)
    with pytest.raises(OptionsValidationError, match=r"PostgresDsnEnvVar.*SDK_POSTGRES_DSN"):
        async with open_inbox(settings(StorageBackend.POSTGRES, tmp_path), owner="one"):
            pass


def test_sqlite_is_not_loaded_where_memory_is_chosen() -> None:
    code = "import sys, sdk_trio.storage.memory.inbox as _; print('apsw' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert output.stdout.split() == [b"False"]
