"""A store of version 7 is brought up to date: every delivery is as it was, and goes on."""

import collections
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import apsw
import attrs
import pytest
from support.store_seven import make_store_seven

from sdk_trio.errors import StoreUnavailableError
from sdk_trio.records.deliveries import Admission, DeliveryState, Done, NewDelivery
from sdk_trio.storage.sqlite import SqliteInbox, migration

TERMS = {"lease_seconds": 10.0, "dedup_seconds": 1e9, "payload_seconds": 1e9}
ROUNDS = 20


async def opened(file: Path) -> SqliteInbox:
    return await SqliteInbox.open(file, owner="new", **TERMS)


async def test_every_delivery_is_as_it_was(tmp_path: Path) -> None:
    store = make_store_seven(tmp_path / "inbox.db", ROUNDS)
    inbox = await opened(tmp_path / "inbox.db")
    for record in store.records:
        assert await inbox.get(record.key) == record
        assert list(await inbox.attempts(record.key)) == store.attempts.get(record.key, [])
        assert list(await inbox.evidence(record.key)) == store.evidence.get(record.key, [])
    listed = await inbox.find(limit=10_000, oldest_first=True)
    assert list(listed) == [attrs.evolve(record, raw=None) for record in store.records]
    expected = collections.Counter(record.state for record in store.records)
    assert await inbox.counts() == {state: expected[state] for state in DeliveryState}
    shared = await inbox.find_by_id("shared-3")
    assert [record.signer for record in shared] == ["t1", "t2"]
    assert await inbox.known([record.key for record in store.records]) == {
        record.key for record in store.records
    }
    await inbox.close()


async def test_what_was_open_goes_on_and_what_is_known_is_not_run_again(tmp_path: Path) -> None:
    store = make_store_seven(tmp_path / "inbox.db")
    inbox = await opened(tmp_path / "inbox.db")
    assert await inbox.recover() == 1
    suspects = await inbox.take_suspects(limit=9, now=3000.0)
    assert [record.webhook_id for record in suspects] == ["running-0"]
    due = await inbox.take_due(limit=9, now=3000.0)
    assert [record.webhook_id for record in due.records] == ["received-0", "retrying-0"]
    for record in (*due.records, *suspects):
        await inbox.start(record.key, now=3001.0)
        await inbox.finish(record.key, Done(), now=3002.0)
    assert list(await inbox.replay(["dead-0", "parked-0", "done-0"])) == ["dead-0", "parked-0"]
    again = NewDelivery("unsigned-0", "order.paid", b'{"of": "done"}', 1, 3003.0, signer="t1")
    assert (await inbox.claim(again)).admission is Admission.DONE
    new = NewDelivery("new", "order.paid", b"{}", 1, 3003.0)
    assert (await inbox.accept(new, leased=False)).admission is Admission.NEW
    record = await inbox.get("new")
    assert record is not None
    assert record.sequence > store.records[-1].sequence + 1, "that of a removed one is not reused"
    counts = await inbox.counts()
    assert (counts[DeliveryState.DONE], counts[DeliveryState.RECEIVED]) == (9, 3)
    await inbox.close()


OPEN = """
import sys
from sdk_trio.storage.sqlite import migration
from sdk_trio.storage.engines.sqlite import connect_writer
moved = 0
index_keys = migration.index_keys

def index_and_say(connection):
    index_keys(connection)
    print("moved", flush=True)
    sys.stdin.readline()

migration.index_keys = index_and_say
migration._RANGE = 50
connect_writer(sys.argv[1])
"""


async def test_a_migration_that_is_killed_half_way_begins_anew_and_loses_nothing(
    tmp_path: Path,
) -> None:
    """The process dies between two ranges, with pages of its transaction in the log already."""
    file = tmp_path / "inbox.db"
    store = make_store_seven(file, ROUNDS)
    child = subprocess.Popen(  # noqa: ASYNC220 - it answers at once
        [sys.executable, "-c", OPEN, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    for _ in range(2):
        assert child.stdout.readline() == b"moved\n"
        child.stdin.write(b"\n")
        child.stdin.flush()
    assert child.stdout.readline() == b"moved\n"
    child.send_signal(signal.SIGKILL)
    child.wait(30)  # noqa: ASYNC222 - it is dead
    child.stdin.close()
    child.stdout.close()
    looked = apsw.Connection(os.fspath(file))
    assert looked.pragma("user_version") == 7
    assert looked.execute("SELECT count(*) FROM inbox").get == len(store.records)
    looked.close()
    inbox = await opened(file)
    for record in store.records:
        assert await inbox.get(record.key) == record
    await inbox.close()
    checked = apsw.Connection(os.fspath(file))
    assert checked.pragma("integrity_check") == "ok"
    assert checked.pragma("user_version") == 9
    checked.close()


async def test_a_disk_with_too_little_room_is_said_before_anything_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "inbox.db"
    store = make_store_seven(file)
    full = shutil._ntuple_diskusage(10**9, 10**9 - 10, 10)  # type: ignore[attr-defined] # what the system reports
    with monkeypatch.context() as patch:
        patch.setattr(migration.shutil, "disk_usage", lambda _: full)
        with pytest.raises(StoreUnavailableError, match=r"MiB of free space.*nothing was changed"):
            await opened(file)
    looked = apsw.Connection(os.fspath(file))
    assert looked.pragma("user_version") == 7
    looked.close()
    inbox = await opened(file)
    assert len(await inbox.find(limit=100)) == len(store.records)
    await inbox.close()


async def test_what_the_old_table_held_is_in_no_file_once_it_is_removed(tmp_path: Path) -> None:
    """A subject stands in one place after the move, so that removing its delivery removes it."""
    file = tmp_path / "inbox.db"
    make_store_seven(file, ROUNDS)
    inbox = await SqliteInbox.open(
        file, owner="new", lease_seconds=1, dedup_seconds=1, payload_seconds=1
    )
    assert any(b"order-3" in path.read_bytes() for path in tmp_path.iterdir())
    await inbox.replay([f"{kind}-{n}" for kind in ("dead", "parked") for n in range(ROUNDS)])
    await inbox.recover()
    while due := (await inbox.take_due(limit=50, now=3000.0)).records:
        for record in due:
            await inbox.start(record.key, now=3000.0)
            await inbox.finish(record.key, Done(), now=3001.0)
    await inbox.purge(now=4000.0)
    assert sum((await inbox.counts()).values()) == 0
    await inbox.close()
    assert not any(b"order-3" in path.read_bytes() for path in tmp_path.iterdir())
