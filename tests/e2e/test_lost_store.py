"""A daemon whose store is removed while it runs: a restart finds every event answered 200."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import apsw
import httpx
import pytest
import trio
from support.command_forker import run_command
from support.disk_faults import DiskFaults, broken
from support.senders import Senders
from support.service_manager import ServiceManager, service_manager
from support.waiting import PATIENCE_SECONDS, until

#: Run in another process where necessary: SQLite's locks are those of a process.
_ELSEWHERE = """
import sys, apsw
connection = apsw.Connection(sys.argv[1])
connection.set_busy_timeout(20000)
for statement in sys.argv[2:]:
    print(connection.execute(statement).fetchall())
"""


def files(data: Path) -> tuple[Path, Path, Path]:
    return data / "inbox.db", data / "inbox.db-wal", data / "inbox.db-shm"


def remove_all(data: Path) -> None:
    for file in files(data):
        file.unlink()


def replace_by_a_copy(file: Path) -> None:
    copy = file.with_name("copy")
    shutil.copyfile(file, copy)
    copy.replace(file)


def overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(os.urandom(file.stat().st_size))


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "all removed": remove_all,
    "directory renamed": lambda data: data.rename(data.with_name("moved")),
    "database removed": lambda data: files(data)[0].unlink(),
    "database replaced": lambda data: replace_by_a_copy(files(data)[0]),
    "database emptied": lambda data: os.truncate(files(data)[0], 0),
    "database cut": lambda data: halve(files(data)[0]),
    "database overwritten": lambda data: overwrite(files(data)[0]),
    "log removed": lambda data: files(data)[1].unlink(),
    "log replaced": lambda data: replace_by_a_copy(files(data)[1]),
    "log emptied": lambda data: os.truncate(files(data)[1], 0),
    "log cut": lambda data: halve(files(data)[1]),
    "log overwritten": lambda data: overwrite(files(data)[1]),
    "index removed": lambda data: files(data)[2].unlink(),
    "index replaced": lambda data: replace_by_a_copy(files(data)[2]),
}

#: After these a new process is started as well, which costs its time.
RESTARTED = ("all removed", "directory renamed", "log emptied", "index removed")

#: What doctor sees of by itself; of the others it says that the receiver has no store.
SEEN_BY_DOCTOR = ("all removed", "database replaced")


async def examine(manager: ServiceManager, where: str) -> list[dict[str, str]]:
    """The problems that ``doctor`` has with the file ``where``."""
    words = ["doctor", "--standalone", "--format", "json"]
    for key, value in manager.settings.items():
        words += ["--set", f"Sdk:{key}={value}"]
    environ = {**os.environ, **manager.environment}
    run = partial(
        run_command, environ=environ, directory=manager.directory, seconds=PATIENCE_SECONDS
    )
    ended = await trio.to_thread.run_sync(run, words)
    found = json.loads(ended.stdout)
    return [one for one in found if one["where"] == where and one["level"] == "problem"]


@contextlib.contextmanager
def manager_with_admin(directory: Path) -> Iterator[ServiceManager]:
    with service_manager(directory) as manager:
        manager.settings |= {
            "Admin:Enabled": "true",
            "Admin:Bind": "127.0.0.1:0",
            "Webhooks:GracefulDrainTimeoutSeconds": "5",
        }
        yield manager


@pytest.mark.parametrize("damage", DAMAGE)
async def test_nothing_is_acknowledged_into_a_store_that_a_restart_would_not_find(
    tmp_path: Path, damage: str
) -> None:
    data = tmp_path / "state"
    with manager_with_admin(tmp_path) as manager:
        daemon = manager.start()
        sender = Senders(await manager.url())
        for number in range(5):
            assert await sender._attempt(f"before-{number}") == 200
        await manager.wait_for("webhook.handled", 5)
        DAMAGE[damage](data)
        after = [f"after-{number}" for number in range(10)]
        answers = [await sender._attempt(webhook_id) for webhook_id in after]
        # One that was known before is in what a restart will not find, too.
        answers.append(await sender._attempt("before-0"))
        assert answers == [503] * 11, (tmp_path / "log").read_text()[-3000:]
        (lost,) = manager.logged("store.lost")
        assert lost["level"] == "error"
        assert str(data / "inbox.db") in lost["error"]
        assert "restart" in lost["error"]
        admin = manager.logged("admin.started")[0]["admin"][0]
        async with httpx.AsyncClient(base_url=admin, timeout=60) as client:
            answer = await client.get("/readyz")
            assert answer.status_code == 503
            assert lost["error"] in [check["detail"] for check in answer.json()["checks"]]
        if damage in SEEN_BY_DOCTOR:
            (finding,) = await examine(manager, str(data / "inbox.db"))
            assert f"process {daemon.pid}" in finding["what"]
            assert "restart" in finding["remedy"]
        assert await manager.stop(daemon) == 0
        if damage not in RESTARTED:
            return
        manager.start()
        sender.url = await manager.url()
        for webhook_id in after:
            assert await sender._attempt(webhook_id) == 200
        await until(lambda: set(after) <= set(manager.handled()))


@pytest.mark.parametrize("file", ["inbox.db", "inbox.db-wal"])
async def test_a_disk_that_refuses_to_read_for_a_while_is_no_loss(
    tmp_path: Path, file: str
) -> None:
    with manager_with_admin(tmp_path) as manager:
        faults = DiskFaults(tmp_path)
        manager.environment |= faults.environment
        daemon = manager.start()
        sender = Senders(await manager.url())
        assert await sender._attempt("before") == 200
        await manager.wait_for("webhook.handled")
        # The log's name begins as the database's does, so that the first one means both.
        faults.set(broken("read", tmp_path / "state" / file))
        answers: list[int | str] = []

        async def deliver(webhook_id: str) -> None:
            answers.append(await sender._attempt(webhook_id))

        async with trio.open_nursery() as nursery:
            for webhook_id in ("one", "two", "before"):
                nursery.start_soon(deliver, webhook_id)
        assert answers == [503] * 3
        faults.clear()
        await manager.wait_for("store.answers")
        for webhook_id in ("one", "two", "three"):
            assert await sender._attempt(webhook_id) == 200, (tmp_path / "log").read_text()[-2000:]
        await until(lambda: len(manager.handled()) >= 4)
        assert await manager.stop(daemon) == 0
        assert not manager.logged("store.lost")
        assert sorted(manager.handled()) == ["before", "one", "three", "two"]


async def elsewhere(file: Path, *statements: str) -> str:
    command = [sys.executable, "-c", _ELSEWHERE, str(file), *statements]
    ended = await trio.run_process(command, capture_stdout=True)
    return ended.stdout.decode()


async def test_allowed_uses_of_the_store_by_others_work_during_deliveries(tmp_path: Path) -> None:
    """Log reset and cut by this and by another process, VACUUM, a backup, commands."""
    file = tmp_path / "state" / "inbox.db"
    with manager_with_admin(tmp_path) as manager:
        daemon = manager.start()
        sender = Senders(await manager.url(), retry=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.run)
            await sender.wait_for(20)
            for statements in (
                ["PRAGMA wal_checkpoint(TRUNCATE)"],
                ["PRAGMA wal_checkpoint(RESTART)", "SELECT count(*) FROM arrival"],
                ["VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"],
                [f"VACUUM INTO '{tmp_path / 'backup.db'}'"],
                ["PRAGMA wal_checkpoint(TRUNCATE)", "PRAGMA wal_checkpoint(TRUNCATE)"],
            ):
                await elsewhere(file, *statements)
                await sender.wait_for(20)
            words = ["events", "list", "--format", "json"]
            words += ["--set", f"Sdk:Storage:Path={file.parent}"]
            run = partial(
                run_command, environ=os.environ, directory=tmp_path, seconds=PATIENCE_SECONDS
            )
            assert (await trio.to_thread.run_sync(run, words)).returncode == 0
            await sender.wait_for(20)
            sender.stop()
        assert set(sender.answers) == {200}
        assert not manager.logged("store.lost")
        # Quiet, and cut short by another process once more: the next delivery is kept as ever.
        await elsewhere(file, "PRAGMA wal_checkpoint(TRUNCATE)")
        await trio.sleep(1)
        assert await sender._attempt("last") == 200
        assert await manager.stop(daemon) == 0
        assert not manager.logged("store.lost")
        manager.start()
        await manager.url()
        await until(lambda: set(manager.handled()) == set(sender.accepted))
        assert len(manager.handled()) == len(sender.accepted)
    connection = apsw.Connection(str(tmp_path / "backup.db"))
    assert connection.execute("PRAGMA quick_check").get == "ok"
    connection.close()


@pytest.mark.parametrize("way", ["same path", "symlink"])
async def test_a_second_daemon_is_kept_out_although_the_lock_file_is_gone(
    tmp_path: Path, way: str
) -> None:
    with manager_with_admin(tmp_path) as manager:
        first = manager.start()
        await manager.url()
        data = tmp_path / "state"
        (data / "runtime.lock").unlink()
        if way == "symlink":
            (tmp_path / "other").symlink_to(data)
            manager.environment["STATE_DIRECTORY"] = str(tmp_path / "other")
        else:
            (data / "runtime.pid").unlink()
        second = manager.start()
        assert await manager.ended(second) == 69
        said = (tmp_path / "log").read_text()
        assert f"in use by process {first.pid}" in said
        assert await manager.stop(first) == 0
