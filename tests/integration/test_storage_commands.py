"""``storage status``, ``check`` and ``migrate``: a store is looked at, and moved."""

import subprocess
import sys
from pathlib import Path

import apsw
import pytest
import trio
from support.command_line import CommandLine
from support.whole_store import (
    Database,
    audit,
    contents,
    contents_of,
    delivery,
    empty_database,
    fill,
    open_file,
    rows_of,
)

from sdk_trio.records.deliveries import Admission, DeliveryState, Done
from sdk_trio.records.tenants import AuditAction
from sdk_trio.storage.data_directory import lock_data_directory
from sdk_trio.storage.engines.postgres_address import PostgresAddress

ROUNDS = 90  # more deliveries than are added to SQLite's index at once
TO_POSTGRES = ("storage", "migrate", "--from", "sqlite", "--to", "postgres")
TO_SQLITE = ("storage", "migrate", "--from", "postgres", "--to", "sqlite")
ON_POSTGRES = ("--set", "Sdk:Storage:Backend=Postgres")


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    return empty_database(monkeypatch)


async def _fill_file(file: Path, rounds: int) -> None:
    inbox = await open_file(file)
    await fill(inbox, rounds)
    await inbox.close()


@pytest.fixture
def file(command_line: CommandLine) -> Path:
    """A store with everything in a file."""
    command_line.data.mkdir(mode=0o700)
    file = command_line.data / "inbox.db"
    trio.run(_fill_file, file, 2)
    return file


@pytest.fixture
def filled(database: Database) -> Database:
    """A store with everything in a database."""

    async def begin() -> None:
        inbox = await database.open("one")
        await fill(inbox, 2)
        await inbox.close()

    trio.run(begin)
    return database


async def _contents_of_database(database: Database) -> dict[str, object]:
    inbox = await database.open("look")
    found = await contents(inbox)
    await inbox.close()
    return found


async def _go_on(inbox, before: dict[str, object], rounds: int) -> None:
    """Everything is there, and the inbox works as it did."""
    after = await contents(inbox)
    for name, value in before.items():
        assert after[name] == value, name
    new = await inbox.accept(delivery("new", 6000.0), leased=False)
    assert new.admission is Admission.NEW
    record = await inbox.get("new")
    assert record.sequence == max(each.sequence for each in before["records"]) + 2
    for name in ("done-0", f"done-{rounds - 1}"):
        assert (await inbox.claim(delivery(name))).admission is Admission.DONE
    assert await inbox.replay(["dead-0"]) == ["dead-0"]
    assert (await inbox.get("dead-0")).state is DeliveryState.RECEIVED
    await inbox.tenants.add_audit(audit(AuditAction.REFUSED, 9.0))
    assert [row.sequence for row in await inbox.tenants.audit()] == [1, 2, 3]
    await inbox.recover()
    ran = []
    while records := (
        *(await inbox.claim_due(limit=100, now=9000.0)).records,
        *(await inbox.claim_suspects(limit=100, now=9000.0)).records,
    ):
        for each in records:
            await inbox.start(each.key, now=9000.0)
            await inbox.finish(each.key, Done(), now=9001.0)
            ran.append(each.webhook_id)
    # One after the other, as they are of one subject.
    assert ran.index("odd") < ran.index("odd too")
    counts = await inbox.counts()
    assert sum(counts.values()) == rows_of(rounds)["arrival"] + 1
    assert counts[DeliveryState.RECEIVED] == counts[DeliveryState.RUNNING] == 0


def _rows(document: list[dict[str, object]]) -> dict[str, object]:
    own = ("checkpoint", "lease", "purging")
    return {row["table"]: row["rows"] for row in document if row["table"] not in own}


def test_everything_is_moved_to_postgresql_and_goes_on(
    command_line: CommandLine, database: Database
) -> None:
    command_line.data.mkdir(mode=0o700)
    file = command_line.data / "inbox.db"
    trio.run(_fill_file, file, ROUNDS)
    before = trio.run(contents_of, file)
    moved = command_line(*TO_POSTGRES, "-f", "json")
    assert moved.status == 0, moved.err
    assert _rows(moved.document) == rows_of(ROUNDS)

    async def go_on() -> None:
        inbox = await database.open()
        await _go_on(inbox, before, ROUNDS)
        await inbox.close()

    trio.run(go_on)
    checked = command_line("storage", "check", *ON_POSTGRES, "-f", "json")
    assert (checked.status, [row for row in checked.document if not row["ok"]]) == (0, [])
    # A start with the old settings would accept deliveries into the old file.
    refused = command_line("events", "list")
    assert (refused.status, "was moved to PostgreSQL" in refused.err) == (78, True)
    assert "was moved" in command_line("storage", "status").out
    again = command_line(*TO_POSTGRES)
    assert (again.status, "moved already" in again.err) == (1, True)


def test_pauses_are_moved_to_postgresql_and_go_on(
    command_line: CommandLine, database: Database
) -> None:
    command_line.data.mkdir(mode=0o700)

    async def begin() -> None:
        inbox = await open_file(command_line.data / "inbox.db")
        await inbox.pause("order.*", actor="ada", reason="why", until=None, now=5000.0)
        await inbox.close()

    trio.run(begin)
    moved = command_line(*TO_POSTGRES)
    assert moved.status == 0, moved.err

    async def go_on() -> list[str]:
        inbox = await database.open()
        await inbox.pause("user.*", actor="ada", reason="", until=None, now=5001.0)
        found = [each.glob for each in await inbox.pauses(now=5002.0)]
        await inbox.close()
        return found

    assert trio.run(go_on) == ["order.*", "user.*"]


def test_everything_is_moved_to_sqlite_and_goes_on(
    command_line: CommandLine, database: Database
) -> None:
    async def begin() -> None:
        inbox = await database.open("one")
        await fill(inbox, ROUNDS)
        await inbox.close()

    trio.run(begin)
    before = trio.run(_contents_of_database, database)
    moved = command_line(*TO_SQLITE, "-f", "json")
    assert moved.status == 0, moved.err
    assert _rows(moved.document) == rows_of(ROUNDS)
    file = command_line.data / "inbox.db"
    assert file.stat().st_mode & 0o777 == 0o600
    checked = command_line("storage", "check", "-f", "json")
    assert (checked.status, [row for row in checked.document if not row["ok"]]) == (0, [])

    async def go_on() -> None:
        inbox = await open_file(file, "two")
        await _go_on(inbox, before, ROUNDS)
        await inbox.close()

    trio.run(go_on)
    with pytest.raises(apsw.ConstraintError, match="append-only"):
        apsw.Connection(str(file)).execute("DELETE FROM audit")
    refused = command_line("events", "list", *ON_POSTGRES)
    assert (refused.status, "was moved to SQLite" in refused.err) == (78, True)
    again = command_line(*TO_SQLITE)
    assert (again.status, "moved already" in again.err) == (1, True)


def test_a_store_that_is_moved_there_and_back_is_the_same(
    command_line: CommandLine, file: Path, database: Database
) -> None:
    async def look(file: Path) -> tuple[int, dict[str, object]]:
        inbox = await open_file(file, "look")
        found = await inbox.last_sequence(), await contents(inbox)
        await inbox.close()
        return found

    before = trio.run(look, file)
    assert command_line(*TO_POSTGRES).status == 0
    stands = command_line(*TO_SQLITE)
    assert (stands.status, "move it away" in stands.err) == (1, True)
    file.rename(file.with_name("moved.db"))
    assert command_line(*TO_SQLITE).status == 0
    assert trio.run(look, file) == before
    checked = command_line("storage", "check", "-f", "json")
    assert (checked.status, [row for row in checked.document if not row["ok"]]) == (0, [])


def test_an_empty_store_is_moved_there_and_back(
    command_line: CommandLine, database: Database
) -> None:
    command_line.data.mkdir(mode=0o700)
    file = command_line.data / "inbox.db"

    async def begin() -> None:
        await (await open_file(file)).close()

    async def accept() -> int:
        inbox = await open_file(file)
        await inbox.accept(delivery("first"), leased=False)
        record = await inbox.get("first")
        await inbox.close()
        return record.sequence

    trio.run(begin)
    assert command_line(*TO_POSTGRES).status == 0
    file.unlink()
    assert command_line(*TO_SQLITE).status == 0
    assert trio.run(accept) == 1


def test_tables_of_the_application_are_left_and_named(
    command_line: CommandLine, file: Path, database: Database
) -> None:
    connection = apsw.Connection(str(file))
    connection.execute("CREATE TABLE access (name TEXT)")
    connection.close()
    planned = command_line(*TO_POSTGRES, "--dry-run", "-f", "json")
    assert planned.document["left_behind"] == ["access"]
    moved = command_line(*TO_POSTGRES)
    assert (moved.status, "the tables access" in moved.err) == (0, True)


def test_a_dry_run_changes_nothing(
    command_line: CommandLine, file: Path, database: Database
) -> None:
    shown = command_line(*TO_POSTGRES, "--dry-run", "-f", "json")
    assert shown.status == 0, shown.err
    assert shown.document["refusal"] is None
    assert {"table": "arrival", "rows": 17} in shown.document["rows"]
    assert database.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'sdk_trio'") == []
    assert command_line("events", "list").status == 0


def test_a_dry_run_of_the_way_back_changes_nothing(
    command_line: CommandLine, filled: Database
) -> None:
    shown = command_line(*TO_SQLITE, "--dry-run", "-f", "json")
    assert (shown.status, shown.document["refusal"]) == (0, None)
    assert {"table": "arrival", "rows": 17} in shown.document["rows"]
    assert not (command_line.data / "inbox.db").exists()
    assert command_line("events", "list", *ON_POSTGRES).status == 0


# Runs a move again and again, and kills it at a later report, statement or COPY each time.
KILLER = """
import os, signal, sys
from pathlib import Path
from sdk_trio.storage import copying, locations, transfer
from sdk_trio.storage.engines.postgres_address import PostgresAddress
from sdk_trio.storage.engines.postgres_connection import StoreConnection

copying.REPORT_ROWS = 3
execute = StoreConnection.execute
way, file, address = sys.argv[1], Path(sys.argv[2]), PostgresAddress(dsn=sys.argv[3])
left = 0

def count():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

def counted(connection, *arguments, **options):
    count()
    return execute(connection, *arguments, **options)

def placed(*arguments):
    count()
    put_in_place(*arguments)
    count()

StoreConnection.execute = counted
put_in_place, locations.put_in_place = locations.put_in_place, placed
for run in range(1, 400):
    pid = os.fork()
    if not pid:
        left = 4 * run
        try:
            report = lambda *_: count()
            with locations.PostgresLocation.connected(address) as database:
                ends = locations.SqliteLocation(file), database
                transfer.move(*(ends if way == "to_postgres" else reversed(ends)), report=report)
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"{error!r}\\n")
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    if not os.WIFSIGNALED(status):
        print(run - 1)
        sys.exit(os.waitstatus_to_exitcode(status))
    # The server notices in its own time.
    own = address.connect()
    while execute(own, locations._OTHERS).fetchone() != (0,):
        pass
    own.close()
"""


def _kill_moves(way: str, file: Path, database: Database) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLER, way, str(file), database.dsn],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert int(ran.stdout) > 10, "it was not killed"


def test_a_move_to_postgresql_that_is_killed_is_repeated(
    command_line: CommandLine, file: Path, database: Database
) -> None:
    before = trio.run(contents_of, file)
    _kill_moves("to_postgres", file, database)
    assert trio.run(_contents_of_database, database) == before


def test_a_move_to_sqlite_that_is_killed_is_repeated(
    command_line: CommandLine, filled: Database
) -> None:
    command_line.data.mkdir(mode=0o700)
    file = command_line.data / "inbox.db"
    before = trio.run(_contents_of_database, filled)
    _kill_moves("to_sqlite", file, filled)
    assert trio.run(contents_of, file) == before
    assert [each.name for each in command_line.data.glob("inbox.db.*")] == []


def test_half_a_move_is_no_store(
    command_line: CommandLine, file: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk_trio.storage import locations

    with monkeypatch.context() as patch:
        patch.setattr(locations, "compare", lambda *_: 1 / 0)
        assert command_line(*TO_POSTGRES).status == 1
    half = command_line("events", "list", *ON_POSTGRES)
    assert (half.status, "storage migrate" in half.err) == (78, True)
    assert "was interrupted" in command_line(*TO_POSTGRES, "--dry-run").err

    # The source is free again, and a command writes to it.
    assert command_line("events", "replay", "dead-0").status == 0
    moved = command_line(*TO_POSTGRES)
    assert moved.status == 0, moved.err
    states = database.execute(
        "SELECT state FROM sdk_trio.work JOIN sdk_trio.arrival USING (sequence) "
        "WHERE delivery_key = 'dead-0'"
    )
    assert states == [("received",)]


def test_a_row_that_differs_is_noticed_before_the_source_is_marked(
    command_line: CommandLine, file: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk_trio.storage.locations import PostgresSide

    analyze = PostgresSide.analyze

    def spoil(side: PostgresSide) -> None:
        side.tx.run("UPDATE arrival SET type = 'other' WHERE sequence = 2")
        analyze(side)

    with monkeypatch.context() as patch:
        patch.setattr(PostgresSide, "analyze", spoil)
        differs = command_line(*TO_POSTGRES)
    assert (differs.status, "the table arrival" in differs.err) == (1, True)
    assert command_line("events", "list").status == 0
    assert command_line(*TO_POSTGRES).status == 0


def test_it_refuses_while_a_process_uses_either_store(
    command_line: CommandLine, file: Path, database: Database
) -> None:
    with lock_data_directory(command_line.data):
        held = command_line(*TO_POSTGRES)
    assert (held.status, "is in use by" in held.err) == (69, True)

    async def beside() -> None:
        inbox = await database.open()
        answer = await trio.to_thread.run_sync(command_line, *TO_POSTGRES)
        assert (answer.status, "stop every host's receiver" in answer.err) == (69, True)
        await inbox.accept(delivery("m1"), leased=False)
        file.rename(file.with_name("before.db"))
        back = await trio.to_thread.run_sync(command_line, *TO_SQLITE)
        assert (back.status, "stop every host's receiver" in back.err) == (69, True)
        assert not file.exists()
        file.with_name("before.db").rename(file)
        await inbox.close()
        with trio.fail_after(60):
            while database.execute(
                "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'sdk_trio %' "
                "AND datname = current_database()"
            ):
                await trio.sleep(0.02)

    trio.run(beside)
    for way in (TO_POSTGRES, TO_SQLITE):
        used = command_line(*way)
        assert (used.status, "is not empty" in used.err) == (1, True)
    assert command_line("events", "list").status == 0
    assert command_line("events", "list", *ON_POSTGRES).status == 0


def test_a_database_that_is_filled_before_the_lock_is_not_replaced(
    command_line: CommandLine, file: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process receives events between the first check of the target and its lock."""
    from sdk_trio.storage.engines import postgres_migration

    migrate = postgres_migration.migrate_postgres

    async def receive() -> None:
        inbox = await database.open()
        await inbox.accept(delivery("m1"), leased=False)
        await inbox.close()

    def migrate_and_fill(address: PostgresAddress) -> None:
        monkeypatch.setattr(postgres_migration, "migrate_postgres", migrate)  # the receiver's own
        migrate(address)
        trio.run(receive)

    monkeypatch.setattr(postgres_migration, "migrate_postgres", migrate_and_fill)
    refused = command_line(*TO_POSTGRES)
    assert (refused.status, "is not empty" in refused.err) == (1, True)
    found = trio.run(_contents_of_database, database)
    assert [each.webhook_id for each in found["records"]] == ["m1"]
    assert command_line("events", "list").status == 0, "the source is not marked as moved"


def test_a_program_that_has_just_ended_is_not_in_the_way(
    command_line: CommandLine, file: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server lists its connection for a moment longer, as after a move that has failed."""
    from sdk_trio.storage import locations
    from sdk_trio.storage.engines.postgres_connection import StoreConnection

    ending = database.address.connect()
    execute = StoreConnection.execute

    def look_before_it_ends(connection, statement, *arguments):
        found = execute(connection, statement, *arguments)
        if statement is locations._OTHERS:
            ending.close()
        return found

    monkeypatch.setattr(StoreConnection, "execute", look_before_it_ends)
    shown = command_line(*TO_POSTGRES, "--dry-run", "-f", "json")
    assert (shown.status, shown.document["refusal"]) == (0, None)


def test_both_engines_differ(command_line: CommandLine) -> None:
    answer = command_line("storage", "migrate", "--from", "sqlite", "--to", "sqlite")
    assert (answer.status, "or the reverse" in answer.err) == (2, True)


# -- status and check ----------------------------------------------------------------------------


def test_the_status_shows_the_steps_of_the_next_start(
    command_line: CommandLine, file: Path, database: Database
) -> None:
    shown = command_line("storage", "status", "-f", "json").document
    assert (shown["version"], shown["rows"]["arrival"], shown["backend"]) == (1, 17, "Sqlite")
    assert shown["next_start"] == "changes nothing"
    answer = command_line("storage", "status", "-f", "json", *ON_POSTGRES)
    assert answer.status == 0, answer.err
    shown = answer.document
    assert (shown["version"], shown["rows"]) == (None, {})
    assert "makes the schema" in shown["next_start"]

    async def begin() -> None:
        inbox = await database.open()
        await inbox.accept(delivery("m1"), leased=False)
        await inbox.close()

    trio.run(begin)
    database.execute("ANALYZE")
    shown = command_line("storage", "status", "-f", "json", *ON_POSTGRES).document
    assert (shown["next_start"], shown["rows"]["arrival"]) == ("changes nothing", 1)
    assert shown["size"] > 0
    database.execute("UPDATE sdk_trio.store SET version = 99")
    newer = command_line("storage", "status", *ON_POSTGRES)
    assert (newer.status, "knows up to" in newer.out) == (1, True)


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("DELETE FROM sdk_trio.work", "each delivery is open or ended, and not both"),
        ("DELETE FROM sdk_trio.arrival WHERE sequence = 1", "each open delivery has arrived"),
        (
            "UPDATE sdk_trio.node SET done = 7 WHERE id = ''",
            "the count of done deliveries is right",
        ),
        ("UPDATE sdk_trio.work SET lane = 'x'", "ordered deliveries are in their lane"),
    ],
)
def test_a_broken_rule_on_postgresql_is_found(
    command_line: CommandLine, database: Database, statement: str, rule: str
) -> None:
    async def begin() -> None:
        inbox = await database.open()
        for name in ("m1", "m2"):
            await inbox.accept(delivery(name), leased=False)
        await inbox.close()

    trio.run(begin)
    database.execute(statement)
    checked = command_line("storage", "check", *ON_POSTGRES, "-f", "json")
    assert checked.status == 1
    assert rule in [row["check"] for row in checked.document if not row["ok"]]


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("DELETE FROM arrival WHERE sequence = 1", "each ended delivery has arrived"),
        ("UPDATE tally SET number = 9 WHERE name = 'indexed'", "each delivery is found by its key"),
        ("UPDATE sqlite_sequence SET seq = 0", "numbers of audit and outbox lie ahead"),
        (
            "UPDATE work SET lane = x'00' WHERE sequence = 15",
            "ordered deliveries are in their lane",
        ),
        ("UPDATE tally SET number = 9 WHERE name = 'removed'", "the count of deliveries is right"),
    ],
)
def test_a_broken_rule_in_the_file_is_found(
    command_line: CommandLine, file: Path, statement: str, rule: str
) -> None:
    sound = command_line("storage", "check", "-f", "json")
    assert (sound.status, [row for row in sound.document if not row["ok"]]) == (0, [])
    connection = apsw.Connection(str(file))
    connection.execute(statement)
    connection.close()
    checked = command_line("storage", "check", "-f", "json")
    assert checked.status == 1
    assert rule in " ".join(row["check"] for row in checked.document if not row["ok"])


def test_a_damaged_file_is_found(command_line: CommandLine, file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8192:8292] = b"\xff" * 100
    file.write_bytes(content)
    checked = command_line("storage", "check", "-f", "json")
    assert checked.status in (1, 69)
    assert "damaged" in checked.err or not checked.document[0]["ok"]
