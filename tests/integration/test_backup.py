"""``storage backup`` and ``storage restore``, on both engines and between them."""

import errno
import gzip
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import apsw
import pytest
import trio
from support.command_line import CommandLine
from support.keyed import ByKey
from support.waiting import wait_until
from support.whole_store import (
    Database,
    audit,
    contents,
    delivery,
    empty_database,
    fill,
    open_file,
    rows_of,
)

from sdk_trio.base import clock
from sdk_trio.cli.terminal import ByteProgress
from sdk_trio.records.deliveries import Admission, DeliveryState, Done
from sdk_trio.records.tenants import AuditAction
from sdk_trio.storage import backup
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.copying import TransferError
from sdk_trio.storage.data_directory import lock_data_directory
from sdk_trio.storage.open import LEASE_SECONDS
from sdk_trio.storage.sql.versions import prepare_sqlite

ON_POSTGRES = ("--set", "Sdk:Storage:Backend=Postgres")
ENGINES = ("sqlite", "postgres")
TERMS = {"lease_seconds": LEASE_SECONDS, "dedup_seconds": 1e9, "payload_seconds": 1e9}


@pytest.fixture
def saved(command_line: CommandLine) -> Path:
    return command_line.directory / "saved.backup"


class Place:
    """A store of one engine, for the command line and to be opened."""

    def __init__(self, engine: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.file = directory / "inbox.db"
        self.database: Database | None = None
        self.words = ("--set", f"Sdk:Storage:Path={directory}")
        if engine == "postgres":
            self.database = empty_database(monkeypatch)
            self.words = (*self.words, *ON_POSTGRES)
        else:
            directory.mkdir(mode=0o700)

    def choose(self, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
        """Return the command-line arguments for this store."""
        if self.database is not None:
            monkeypatch.setenv("SDK_POSTGRES_DSN", self.database.dsn)
        return self.words

    async def open(self, owner: str = "one"):
        if self.database is None:
            return await open_file(self.file, owner)
        from sdk_trio.storage.postgres_inbox import PostgresInbox

        address = self.database.address
        return ByKey(await PostgresInbox.open(address, LeaseTerms(owner=owner, **TERMS)))

    def run(self, use: Callable, owner: str = "one"):
        async def work():
            inbox = await self.open(owner)
            try:
                return await use(inbox)
            finally:
                await inbox.close()

        return trio.run(work)


async def _recovered_contents(inbox) -> dict[str, object]:
    await inbox.recover()
    return await contents(inbox)


def _rows(rows: dict[str, int]) -> dict[str, int]:
    own = ("checkpoint", "lease", "purging")
    return {name: count for name, count in rows.items() if name not in own}


def test_messages_that_were_claimed_are_claimed_at_once_after_a_restore(
    command_line: CommandLine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("postgres", command_line.directory / "first", monkeypatch)

    async def claim(inbox) -> list[int]:
        now = clock.wall()
        due = await inbox.notifications.claim_due("log", limit=9, now=now)
        return [record.id.sequence for record in due.records]

    async def fill_and_claim(inbox) -> list[int]:
        await fill(inbox, 1)
        return await claim(inbox)

    claimed = place.run(fill_and_claim)
    assert claimed
    assert place.run(claim, "two") == []
    assert command_line("storage", "backup", str(saved), *place.words).status == 0
    target = Place("postgres", command_line.directory / "second", monkeypatch)
    assert command_line("storage", "restore", str(saved), *target.choose(monkeypatch)).status == 0
    assert target.run(claim, "two") == claimed


@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("source", ENGINES)
def test_a_store_is_restored_as_after_a_crash_and_goes_on(
    command_line: CommandLine,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    target: str,
) -> None:
    monkeypatch.setattr("support.whole_store.TERMS", TERMS)
    first = Place(source, command_line.directory / "first", monkeypatch)
    first.run(lambda inbox: fill(inbox, 80))
    made = command_line("storage", "backup", str(saved), "-f", "json", *first.words)
    assert made.status == 0, made.err
    assert _rows(made.document["rows"]) == rows_of(80)
    assert saved.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in saved.parent.iterdir() if "partial" in each.name] == []

    second = Place(target, command_line.directory / "second", monkeypatch)
    words = second.choose(monkeypatch)
    restored = command_line("storage", "restore", str(saved), *words)
    assert restored.status == 0, restored.err
    checked = command_line("storage", "check", "-f", "json", *words)
    assert (checked.status, [row for row in checked.document if not row["ok"]]) == (0, [])

    # The same as if the receiver had ended at the moment of the backup.
    expected = first.run(_recovered_contents, "look")
    assert second.run(contents, "look") == expected

    async def go_on(inbox) -> None:
        assert await inbox.recover() == 0
        assert (await inbox.accept(delivery("new", 6000.0), leased=False)).admission is (
            Admission.NEW
        )
        assert (await inbox.get("new")).sequence == rows_of(80)["arrival"] + 2
        assert (await inbox.claim(delivery("done-0"))).admission is Admission.DONE
        assert (await inbox.claim(delivery("done-79"))).admission is Admission.DONE
        assert await inbox.replay(["dead-0"]) == ["dead-0"]
        await inbox.tenants.add_audit(audit(AuditAction.REFUSED, 9.0))
        assert [row.sequence for row in await inbox.tenants.audit()] == [1, 2, 3]

    second.run(go_on)
    remove = (
        "SET search_path TO sdk_trio; DELETE FROM audit" if second.database else "DELETE FROM audit"
    )
    execute = apsw.Connection(str(second.file)).execute if not second.database else None
    with pytest.raises(Exception, match="append-only"):
        (execute or second.database.execute)(remove)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_backup_under_load_has_all_that_was_acknowledged_before(
    command_line: CommandLine, saved: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    place = Place(engine, command_line.directory / "first", monkeypatch)
    acknowledged: list[str] = []

    async def deliver(inbox, number: int) -> None:
        for count in range(10_000):
            key = f"m{number}-{count}"
            await inbox.accept(delivery(key, subject=f"s{count % 7}"), leased=True)
            acknowledged.append(key)
            await inbox.start(key, now=5001.0)
            await inbox.finish(key, Done(), now=5002.0)

    def show(_: ByteProgress, *step: object) -> None:
        """Deliver events between any two steps of the backup."""
        wanted = len(acknowledged) + 20
        wait_until(lambda: len(acknowledged) >= wanted)

    async def work(inbox) -> int:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(deliver, inbox, number)
            while len(acknowledged) < 600:
                await trio.sleep(0.001)
            before = len(acknowledged)
            answer = await trio.to_thread.run_sync(
                command_line, "storage", "backup", str(saved), *place.words
            )
            assert answer.status == 0, answer.err
            nursery.cancel_scope.cancel()
        return before

    with monkeypatch.context() as patch:
        patch.setattr(ByteProgress, "show", show)
        before = place.run(work)
    second = Place("sqlite", command_line.directory / "second", monkeypatch)
    assert command_line("storage", "restore", str(saved), *second.words).status == 0
    checked = command_line("storage", "check", "-f", "json", *second.words)
    assert (checked.status, [row for row in checked.document if not row["ok"]]) == (0, [])

    async def look(inbox) -> None:
        assert await inbox.known(acknowledged[:before]) == frozenset(acknowledged[:before])

    second.run(look)


def test_tables_of_the_application_come_back_with_the_file(
    command_line: CommandLine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_line.seed(("msg_1", DeliveryState.DONE))
    connection = apsw.Connection(str(command_line.data / "inbox.db"))
    connection.execute("CREATE TABLE access (name TEXT)")
    connection.execute("INSERT INTO access VALUES ('ada')")
    connection.close()
    assert command_line("storage", "backup", str(saved)).status == 0
    command_line.data.rename(command_line.directory / "lost")
    assert command_line("storage", "restore", str(saved)).status == 0
    connection = apsw.Connection(str(command_line.data / "inbox.db"))
    assert connection.execute("SELECT name FROM access").get == "ada"
    connection.close()
    # PostgreSQL takes only the store, and the output mentions that.
    empty_database(monkeypatch)
    restored = command_line("storage", "restore", str(saved), *ON_POSTGRES)
    assert (restored.status, "the tables access" in restored.err) == (0, True)


# -- refusals ------------------------------------------------------------------------------------


def test_it_replaces_nothing(command_line: CommandLine, saved: Path) -> None:
    none = command_line("storage", "backup", str(saved))
    assert (none.status, "there is no store" in none.err) == (69, True)
    command_line.seed(("msg_1", DeliveryState.DONE))
    assert command_line("storage", "backup", str(saved)).status == 0
    again = command_line("storage", "backup", str(saved))
    assert (again.status, "exists" in again.err) == (1, True)
    used = command_line("storage", "restore", str(saved))
    assert (used.status, "is not empty" in used.err) == (1, True)
    (command_line.data / "inbox.db").rename(command_line.directory / "away.db")
    with lock_data_directory(command_line.data):
        held = command_line("storage", "restore", str(saved))
    assert (held.status, "is in use by" in held.err) == (69, True)
    missing = command_line("storage", "restore", "nothing.backup")
    assert (missing.status, "there is no backup at" in missing.err) == (1, True)
    memory = ("--set", "Sdk:Storage:Backend=Memory")
    for words in (("backup", "other"), ("restore", str(saved))):
        refused = command_line("storage", *words, *memory)
        assert (refused.status, "Memory" in refused.err) == (69, True)
    assert command_line("storage", "restore", str(saved)).status == 0
    assert "msg_1" in command_line("events", "list").out


def test_a_file_that_appears_during_a_backup_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "inbox.db"
    connection = apsw.Connection(str(file))
    prepare_sqlite(connection, str(file))
    saved = tmp_path / "saved.backup"

    def report(step: str, _done: int) -> None:
        if step == "verify":
            saved.write_text("another's")

    with pytest.raises(TransferError, match="exists"):
        backup.back_up(saved, partial(backup.copy_file, file), backend="Sqlite", report=report)
    assert saved.read_text() == "another's"
    assert not list(tmp_path.glob(".*.partial"))
    connection.close()


def test_a_log_that_was_left_behind_is_not_taken_for_that_of_the_restored_store(
    command_line: CommandLine, saved: Path
) -> None:
    command_line.seed(*((f"msg_{n}", DeliveryState.DONE) for n in range(5)))
    assert command_line("storage", "backup", str(saved)).status == 0
    file = command_line.data / "inbox.db"
    connection = apsw.Connection(str(file))
    connection.execute("UPDATE arrival SET type = 'later'")
    log = file.with_name("inbox.db-wal").read_bytes()
    connection.close()
    file.unlink()
    file.with_name("inbox.db-wal").write_bytes(log)
    assert command_line("storage", "restore", str(saved)).status == 0
    assert command_line("storage", "check").status == 0
    assert "later" not in command_line("events", "list").out


def test_a_database_that_is_used_is_not_restored_into(
    command_line: CommandLine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_line.seed(("msg_1", DeliveryState.DONE))
    assert command_line("storage", "backup", str(saved)).status == 0
    place = Place("postgres", command_line.directory / "second", monkeypatch)

    async def beside(inbox) -> None:
        answer = await trio.to_thread.run_sync(
            command_line, "storage", "restore", str(saved), *place.words
        )
        assert (answer.status, "stop every host's receiver" in answer.err) == (69, True)
        await inbox.accept(delivery("m1"), leased=False)

    place.run(beside)
    used = command_line("storage", "restore", str(saved), *place.words)
    assert (used.status, "is not empty" in used.err) == (1, True)


def test_a_damaged_backup_is_refused_and_nothing_is_made(
    command_line: CommandLine, saved: Path
) -> None:
    command_line.seed(*((f"msg_{n}", DeliveryState.DONE, os.urandom(300)) for n in range(20)))
    assert command_line("storage", "backup", str(saved)).status == 0
    command_line.data.rename(command_line.directory / "lost")
    content = saved.read_bytes()

    def refuse(damaged: bytes) -> None:
        saved.write_bytes(damaged)
        refused = command_line("storage", "restore", str(saved))
        assert (refused.status, "damaged" in refused.err) == (1, True), refused
        assert [each.name for each in command_line.data.glob("inbox.db*")] == []

    def accept(changed: bytes) -> None:
        saved.write_bytes(changed)
        restored = command_line("storage", "restore", str(saved))
        assert restored.status == 0, restored
        (command_line.data / "inbox.db").unlink()

    def means_the_same(damaged: bytes) -> bool:
        with suppress(OSError, EOFError, zlib.error):
            return gzip.decompress(damaged) == unpacked
        return False

    unpacked = gzip.decompress(content)
    # The fifth byte belongs to a time, which means nothing here; neither do some bits behind it,
    # such as those that fill the last byte of the compressed data.
    for at in (4, *range(10, len(content), len(content) // 40), len(content) - 1):
        damaged = content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]
        (accept if means_the_same(damaged) else refuse)(damaged)
    for length in (0, 5, 100, len(content) // 2, len(content) - 9, len(content) - 1):
        refuse(content[:length])
    refuse(b"SQLite format 3\0" * 600)
    refuse(content + b"more")
    saved.write_bytes(content)
    assert command_line("storage", "restore", str(saved)).status == 0


def _changed(saved: Path, **fields: object) -> None:
    """Write the backup again, with another manifest."""
    with tarfile.open(saved, "r:gz") as tar:
        manifest = json.loads(tar.extractfile("manifest.json").read())
        store = tar.extractfile("inbox.db").read()
    text = json.dumps({**manifest, **fields}).encode()
    with gzip.open(saved, "wb") as zipped, tarfile.open(fileobj=zipped, mode="w|") as tar:
        for name, body in (("manifest.json", text), ("inbox.db", store)):
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))


def test_a_backup_of_another_version_names_its_program(
    command_line: CommandLine, saved: Path
) -> None:
    command_line.seed(("msg_1", DeliveryState.DONE))
    assert command_line("storage", "backup", str(saved)).status == 0
    (command_line.data / "inbox.db").unlink()
    _changed(saved, schema=9, program="4.5.6")
    newer = command_line("storage", "restore", str(saved))
    assert (newer.status, "version 4.5.6 of sdk_trio" in newer.err) == (78, True)
    _changed(saved, schema=1, rows={"arrival": 2})
    wrong = command_line("storage", "restore", str(saved))
    assert (wrong.status, "other rows than its manifest" in wrong.err) == (1, True)
    assert not (command_line.data / "inbox.db").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
@pytest.mark.parametrize("kilobytes", [50, 400])
def test_a_full_disk_is_reported_and_leaves_no_file(
    command_line: CommandLine, saved: Path, kilobytes: int
) -> None:
    command_line.seed(*((f"msg_{n}", DeliveryState.DONE, os.urandom(5000)) for n in range(60)))
    ran = subprocess.run(
        [sys.executable, "-m", "sdk_trio", "storage", "backup", str(saved)],
        cwd=command_line.directory,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (kilobytes * 1000, kilobytes * 1000)
        ),
    )
    assert (ran.returncode, "free some space" in ran.stderr) == (1, True), ran.stderr
    assert [each.name for each in saved.parent.iterdir() if "saved" in each.name] == []


# -- kills ---------------------------------------------------------------------------------------

# Runs a command again and again, and kills it at a later step each time, until it is not killed or
# has made its file.
KILLER = """
import os, signal, sys
from sdk_trio.base import opener
from sdk_trio.cli.main import main
from sdk_trio.cli.terminal import ByteProgress
from sdk_trio.storage import copying

copying.REPORT_ROWS = 3
left = 0

def count(*_):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

class Counting(opener.Opener):
    def sync(self, descriptor):
        count()
        super().sync(descriptor)
        count()

    def file(self, *arguments):
        count()
        return super().file(*arguments)

ByteProgress.show = count
for run in range(1, 400):
    pid = os.fork()
    if not pid:
        left = int(sys.argv[1]) * run
        with opener.use(Counting()):
            os._exit(main(sys.argv[3:]))
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status) and os.path.exists(sys.argv[2]):
        status = 0
    if not os.WIFSIGNALED(status):
        print(f"killed {run - 1} times")
        sys.exit(os.waitstatus_to_exitcode(status))
"""


def _kill(command_line: CommandLine, made: Path, *words: str, step: int = 1) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLER, str(step), str(made), *words],
        cwd=command_line.directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    times = int(ran.stdout.rpartition("killed ")[2].split()[0])
    assert times > 5, "it was not killed"


def test_a_backup_that_is_killed_leaves_no_file_and_is_repeated(
    command_line: CommandLine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("sqlite", command_line.directory / "first", monkeypatch)
    place.run(lambda inbox: fill(inbox, 2))
    _kill(command_line, saved, "storage", "backup", str(saved), *place.words)
    second = Place("sqlite", command_line.directory / "second", monkeypatch)
    assert command_line("storage", "restore", str(saved), *second.words).status == 0


@pytest.mark.parametrize("target", ENGINES)
def test_a_restore_that_is_killed_is_repeated(
    command_line: CommandLine, saved: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr("support.whole_store.TERMS", TERMS)
    first = Place("sqlite", command_line.directory / "first", monkeypatch)
    first.run(lambda inbox: fill(inbox, 2))
    assert command_line("storage", "backup", str(saved), *first.words).status == 0
    second = Place(target, command_line.directory / "second", monkeypatch)
    step = 1 if target == "sqlite" else 4
    _kill(command_line, second.file, "storage", "restore", str(saved), *second.words, step=step)
    assert second.run(contents, "look") == first.run(_recovered_contents, "look")
    assert [each.name for each in second.directory.glob("*.filling*")] == []


def test_a_restore_that_has_not_come_to_its_end_is_no_store(
    command_line: CommandLine, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_line.seed(("msg_1", DeliveryState.DONE))
    assert command_line("storage", "backup", str(saved)).status == 0
    place = Place("postgres", command_line.directory / "second", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(backup.leases, "recover", lambda *_, **__: 1 / 0)
        assert command_line("storage", "restore", str(saved), *place.words).status == 1
    half = command_line("events", "list", *place.words)
    assert (half.status, "storage restore" in half.err) == (78, True)
    assert command_line("storage", "restore", str(saved), *place.words).status == 0
    assert command_line("events", "list", *place.words).status == 0


def test_a_backup_that_cannot_get_its_name_leaves_no_empty_file(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "refused")

    connection = apsw.Connection(str(tmp_path / "inbox.db"))
    prepare_sqlite(connection, file=str(tmp_path / "inbox.db"))
    connection.close()
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    make = partial(backup.copy_file, tmp_path / "inbox.db")
    with pytest.raises(TransferError, match="refused"):
        backup.back_up(saved, make, backend="sqlite", report=lambda *_: None)
    assert not saved.exists()
