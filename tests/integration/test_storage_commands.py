"""``storage status``, ``check`` and ``migrate``: a store is looked at, and moved to PostgreSQL."""

import subprocess
import sys
from pathlib import Path

import apsw
import attrs
import pytest
import trio
from support.command_line import CommandLine
from support.postgres import PostgresServer, running_server
from support.store_seven import make_store_seven

from sdk_trio.records.deliveries import Admission, DeliveryState, Done, NewDelivery
from sdk_trio.records.tenants import (
    AuditAction,
    AuditRecord,
    EnvironmentVariable,
    OutboxRecord,
    Tenant,
    TenantCredentials,
    TenantStatus,
    Transition,
)
from sdk_trio.records.upgrades import UpgradeMarker, UpgradeState
from sdk_trio.storage.data_directory import lock_data_directory
from sdk_trio.storage.sqlite import SqliteInbox

TERMS = {"lease_seconds": 10.0, "dedup_seconds": 1e9, "payload_seconds": 1e9}
MOVE = ("storage", "migrate", "--from", "sqlite", "--to", "postgres")
ON_POSTGRES = ("--set", "Sdk:Storage:Backend=Postgres")


@attrs.frozen
class Target:
    """A database that a store is moved to."""

    server: PostgresServer
    dsn: str

    def execute(self, statement: str) -> list[tuple]:
        return self.server.execute(statement, self.dsn.rpartition("=")[2])

    async def open(self, owner: str = "two", **terms: float):
        from sdk_trio.storage.engines.postgres_address import PostgresAddress
        from sdk_trio.storage.postgres import PostgresInbox

        address = PostgresAddress(dsn=self.dsn)
        return await PostgresInbox.open(address, owner=owner, **{**TERMS, **terms})


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    server = running_server()
    dsn = server.empty()
    monkeypatch.setenv("SDK_POSTGRES_DSN", dsn)
    return Target(server, dsn)


def audit(action: AuditAction, at: float) -> AuditRecord:
    return AuditRecord(
        tenant_id="t1", tenant_identifier="acme", action=action, actor="a", occurred_at=at
    )


async def fill(file: Path) -> None:
    """Add to a store something of everything that it can hold."""
    inbox = await SqliteInbox.open(file, owner="one", **TERMS)
    odd = "a\0b\x1ac \u2603"
    for name, ordered in (("odd", True), ("odd too", True), ("plain", False)):
        told = NewDelivery(name, odd, b"\0\xff{}", 7, 5000.5, odd, ordered, tenant_id="t1")
        await inbox.accept(told, leased=name == "odd")
    await inbox.start("odd", now=5001.25)
    tenant = Tenant(
        id="t1",
        identifier="acme",
        name="Acme",
        status=TenantStatus.ACTIVE,
        created_at=1.5,
        organization_id="o1",
        credentials=TenantCredentials(webhook_secrets=(EnvironmentVariable("ACME"),)),
    )
    await inbox.tenants.add(tenant, audit(AuditAction.CREATED, 1.5))
    suspended = attrs.evolve(tenant, status=TenantStatus.SUSPENDED, version=tenant.version + 1)
    transition = OutboxRecord(
        delivery_id="d1",
        tenant_id="t1",
        tenant_identifier="acme",
        tenant_name="Acme",
        transition=Transition.SUSPENDED,
        previous_status=TenantStatus.ACTIVE,
        new_status=TenantStatus.SUSPENDED,
        reason=None,
        actor="a",
        occurred_at=2.5,
        site_manager_email="ada@acme.example",
    )
    await inbox.tenants.change(
        suspended, audit(AuditAction.SUSPENDED, 2.5), transition, announced=True
    )
    await inbox.notifications.enlist({"email": False, "log": True}, now=3.0, oldest=0.0)
    await inbox.write_checkpoint("reconcile", "where it was")
    await inbox.upgrade.save(
        UpgradeMarker(
            state=UpgradeState.DONE, tenant_id="t1", step="rows", started_at=1.0, finished_at=2.0
        )
    )
    await inbox.close()


async def contents(inbox) -> dict[str, object]:
    """Everything that the ports of a store say of it, but what only time tells."""
    records = await inbox.find(limit=10_000, oldest_first=True)
    keys = [record.key for record in records]
    return {
        "records": [await inbox.get(key) for key in keys],
        "attempts": [list(await inbox.attempts(key)) for key in keys],
        "evidence": [list(await inbox.evidence(key)) for key in keys],
        "counts": await inbox.counts(),
        "oldest": await inbox.oldest_waiting(),
        "tenants": list(await inbox.tenants.page()),
        "holders": await inbox.tenants.holders([EnvironmentVariable("ACME")], but=""),
        "audit": list(await inbox.tenants.audit()),
        "outbox": list(await inbox.tenants.outbox()),
        "messages": list(await inbox.notifications.find()),
        "marker": await inbox.upgrade.marker(),
        "checkpoint": await inbox.read_checkpoint("reconcile"),
        "revision": await inbox.tenants.revision(),
        "holdings": await inbox.holdings("t1"),
    }


@pytest.fixture
def source(command_line: CommandLine) -> Path:
    """A store with everything, which an earlier version has begun."""
    command_line.data.mkdir(mode=0o700)
    file = command_line.data / "inbox.db"
    make_store_seven(file, rounds=3)
    trio.run(fill, file)
    return file


async def contents_of(file: Path) -> dict[str, object]:
    inbox = await SqliteInbox.open(file, owner="look", **TERMS)
    found = await contents(inbox)
    await inbox.close()
    return found


def test_everything_is_moved_and_goes_on(
    command_line: CommandLine, source: Path, target: Target
) -> None:
    before = trio.run(contents_of, source)
    moved = command_line(*MOVE, "-f", "json")
    assert moved.status == 0, moved.err
    assert {row["table"]: row["rows"] for row in moved.document} == {
        "delivery": 36,
        "attempt": 9,
        "evidence": 3,
        "checkpoint": 2,
        "tenant": 1,
        "source": 1,
        "audit": 2,
        "outbox": 1,
        "upgrade": 1,
        "notification": 2,
    }

    async def go_on() -> None:
        inbox = await target.open()
        after = await contents(inbox)
        for name, value in before.items():
            assert after[name] == value, name
        # The leases are those of a process that is gone; they have expired long ago.
        assert await inbox.recover() == 4
        new = await inbox.accept(NewDelivery("new", "t", b"{}", 7, 6000.0), leased=False)
        assert new.admission is Admission.NEW
        record = await inbox.get("new")
        assert record is not None
        assert record.sequence > max(each.sequence for each in before["records"])  # type: ignore[attr-defined]
        known = NewDelivery("done-0", "order.paid", b"{}", 7, 6000.0)
        assert (await inbox.claim(known)).admission is Admission.DONE
        await inbox.tenants.note(audit(AuditAction.REFUSED, 9.0))
        assert [row.sequence for row in await inbox.tenants.audit()] == [1, 2, 3]
        ran = []
        while records := (
            *(await inbox.take_due(limit=100, now=9000.0)).records,
            *(await inbox.take_suspects(limit=100, now=9000.0)),
        ):
            for each in records:
                await inbox.start(each.key, now=9000.0)
                await inbox.finish(each.key, Done(), now=9001.0)
                ran.append(each.webhook_id)
        # One after the other, as they are of one subject.
        assert ran.index("odd") < ran.index("odd too")
        counts = await inbox.counts()
        assert sum(counts.values()) == 37
        assert counts[DeliveryState.RECEIVED] == counts[DeliveryState.RUNNING] == 0
        await inbox.close()

    trio.run(go_on)
    checked = command_line("storage", "check", *ON_POSTGRES, "-f", "json")
    assert (checked.status, [row for row in checked.document if not row["ok"]]) == (0, [])
    # A start that was not told of the move would take deliveries into the old file.
    refused = command_line("events", "list")
    assert (refused.status, "was moved to PostgreSQL" in refused.err) == (78, True)
    assert "was moved" in command_line("storage", "status").out
    again = command_line(*MOVE)
    assert (again.status, "moved already" in again.err) == (1, True)


def test_every_table_and_column_is_moved(
    command_line: CommandLine, source: Path, target: Target
) -> None:
    """Whoever gives a store a new table or column is reminded of the move here."""
    from sdk_trio.storage.transfer import TABLES

    assert command_line(*MOVE).status == 0
    found: dict[str, set[str]] = {}
    for table, column in target.execute(
        "SELECT table_name, column_name FROM information_schema.columns "
        "WHERE table_schema = 'sdk_trio' AND table_name <> 'delivery'"
    ):
        found.setdefault(table, set()).add(column)
    # Of this database alone: its version, the numbers of its nodes, and what its rows tell.
    for name in ("store", "node", "counter"):
        del found[name]
    deliveries = (found.pop(name) for name in ("arrival", "work", "ended"))
    found["delivery"] = set().union(*deliveries) - {"lane", "bare"}
    assert found == {table.name: set(table.columns) for table in TABLES}


def test_tables_of_the_application_are_left_and_named(
    command_line: CommandLine, source: Path, target: Target
) -> None:
    connection = apsw.Connection(str(source))
    connection.execute("CREATE TABLE access (name TEXT)")
    connection.close()
    planned = command_line(*MOVE, "--dry-run", "-f", "json")
    assert planned.document["left_behind"] == ["access"]
    moved = command_line(*MOVE)
    assert (moved.status, "the tables access" in moved.err) == (0, True)


def test_a_dry_run_changes_nothing(command_line: CommandLine, source: Path, target: Target) -> None:
    shown = command_line(*MOVE, "--dry-run", "-f", "json")
    assert shown.status == 0, shown.err
    assert shown.document["refusal"] is None
    assert {"table": "delivery", "rows": 36} in shown.document["rows"]
    assert target.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'sdk_trio'") == []
    assert command_line("events", "list").status == 0


KILLER = """
import os, signal, sys
from pathlib import Path
from sdk_trio.storage import transfer
from sdk_trio.storage.engines.postgres_address import PostgresAddress
from sdk_trio.storage.engines.postgres_connection import StoreConnection

transfer.BATCH = 5
execute = StoreConnection.execute
file, address = Path(sys.argv[1]), PostgresAddress(dsn=sys.argv[2])
left = 0

def counted(connection, *arguments, **options):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return execute(connection, *arguments, **options)

StoreConnection.execute = counted
for run in range(1, 200):
    pid = os.fork()
    if not pid:
        left = 25 + 3 * run
        try:
            transfer.transfer(file, address, anew=False, report=lambda *_: None)
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
    while execute(own, transfer._OTHERS).fetchone() != (0,):
        pass
    own.close()
"""


def test_a_move_that_is_killed_goes_on_where_it_was(
    command_line: CommandLine, source: Path, target: Target
) -> None:
    before = trio.run(contents_of, source)
    ran = subprocess.run(
        [sys.executable, "-c", KILLER, str(source), target.dsn],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert int(ran.stdout) > 3, "it was not killed"

    async def compare() -> None:
        inbox = await target.open()
        assert await contents(inbox) == before
        await inbox.close()

    trio.run(compare)


def test_half_a_move_is_no_store_and_a_changed_source_is_noticed(
    command_line: CommandLine, source: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk_trio.storage import transfer

    with monkeypatch.context() as patch:
        patch.setattr(transfer._Move, "_compare", lambda *_: 1 / 0)
        assert command_line(*MOVE).status == 1
    half = command_line("events", "list", *ON_POSTGRES)
    assert (half.status, "storage migrate" in half.err) == (78, True)
    assert "copy" in command_line(*MOVE, "--dry-run").err

    # The source is free again, and a command writes to it.
    assert command_line("events", "replay", "dead-0").status == 0
    differs = command_line(*MOVE)
    assert (differs.status, "--anew" in differs.err) == (1, True)
    moved = command_line(*MOVE, "--anew")
    assert moved.status == 0, moved.err
    (state,) = target.execute("SELECT state FROM sdk_trio.delivery WHERE webhook_id = 'dead-0'")
    assert state == ("received",)


def test_a_source_that_was_written_to_while_its_rows_were_compared_is_noticed(
    command_line: CommandLine, source: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk_trio.storage import transfer

    compare = transfer._Move._compare

    def until_the_end(move, table, *rows) -> None:
        assert table.name != "notification", "ended here"
        compare(move, table, *rows)

    with monkeypatch.context() as patch:
        patch.setattr(transfer._Move, "_compare", until_the_end)
        assert command_line(*MOVE).status == 1
    assert "compare of upgrade" in command_line(*MOVE, "--dry-run").err

    async def take_one_more() -> None:
        inbox = await SqliteInbox.open(source, owner="late", **TERMS)
        await inbox.accept(NewDelivery("late", "t", b"{}", 7, 6000.0), leased=False)
        await inbox.close()

    # Somebody starts the receiver again on the file, and it acknowledges a delivery.
    trio.run(take_one_more)
    differs = command_line(*MOVE)
    assert (differs.status, "--anew" in differs.err) == (1, True)
    assert command_line(*MOVE, "--anew").status == 0
    assert target.execute("SELECT state FROM sdk_trio.delivery WHERE webhook_id = 'late'")


def test_it_refuses_while_somebody_works_on_either_store(
    command_line: CommandLine, source: Path, target: Target
) -> None:
    with lock_data_directory(command_line.data):
        held = command_line(*MOVE)
    assert (held.status, "is in use by" in held.err) == (69, True)

    async def beside() -> None:
        inbox = await target.open()
        answer = await trio.to_thread.run_sync(command_line, *MOVE)
        assert (answer.status, "stop every host's receiver" in answer.err) == (69, True)
        await inbox.accept(NewDelivery("m1", "t", b"{}", 7, 1.0), leased=False)
        await inbox.close()
        with trio.fail_after(60):
            while target.execute(
                "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'sdk_trio %' "
                "AND datname = current_database()"
            ):
                await trio.sleep(0.02)

    trio.run(beside)
    used = command_line(*MOVE)
    assert (used.status, "is not empty" in used.err) == (1, True)
    assert command_line("events", "list").status == 0


def test_a_program_that_has_just_ended_is_not_in_the_way(
    command_line: CommandLine, source: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server lists its connection for a moment longer, as after a move that has failed."""
    from sdk_trio.storage import transfer
    from sdk_trio.storage.engines.postgres_address import PostgresAddress
    from sdk_trio.storage.engines.postgres_connection import StoreConnection

    ending = PostgresAddress(dsn=target.dsn).connect()
    execute = StoreConnection.execute

    def look_before_it_ends(connection, statement, *arguments):
        found = execute(connection, statement, *arguments)
        if statement is transfer._OTHERS:
            ending.close()
        return found

    monkeypatch.setattr(StoreConnection, "execute", look_before_it_ends)
    shown = command_line(*MOVE, "--dry-run", "-f", "json")
    assert (shown.status, shown.document["refusal"]) == (0, None)


def test_only_one_way_is_known(command_line: CommandLine) -> None:
    answer = command_line("storage", "migrate", "--from", "postgres", "--to", "sqlite")
    assert (answer.status, "no other way" in answer.err) == (2, True)


# -- status and check ----------------------------------------------------------------------------


def test_the_status_says_what_the_next_start_does(
    command_line: CommandLine, target: Target
) -> None:
    command_line.data.mkdir(mode=0o700)
    make_store_seven(command_line.data / "inbox.db", rounds=2)
    shown = command_line("storage", "status", "-f", "json").document
    assert (shown["version"], shown["rows"]["inbox"], shown["backend"]) == (7, 22, "Sqlite")
    assert "brings version 7 to version 9" in shown["next_start"]
    answer = command_line("storage", "status", "-f", "json", *ON_POSTGRES)
    assert answer.status == 0, answer.err
    shown = answer.document
    assert (shown["version"], shown["rows"]) == (None, {})
    assert "makes the schema" in shown["next_start"]

    async def begin() -> None:
        inbox = await target.open()
        await inbox.accept(NewDelivery("m1", "t", b"{}", 7, 1.0), leased=False)
        await inbox.close()

    trio.run(begin)
    target.execute("ANALYZE")
    shown = command_line("storage", "status", "-f", "json", *ON_POSTGRES).document
    assert (shown["next_start"], shown["rows"]["arrival"]) == ("changes nothing", 1)
    assert shown["size"] > 0
    target.execute("UPDATE sdk_trio.store SET version = 99")
    newer = command_line("storage", "status", *ON_POSTGRES)
    assert (newer.status, "knows up to" in newer.out) == (1, True)


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("DELETE FROM sdk_trio.work", "each delivery is open or ended, and not both"),
        ("DELETE FROM sdk_trio.arrival WHERE sequence = 1", "what is open has arrived"),
        (
            "UPDATE sdk_trio.node SET done = 7 WHERE id = ''",
            "the count of done deliveries is right",
        ),
        ("UPDATE sdk_trio.work SET lane = 'x'", "ordered deliveries stand in their lane"),
    ],
)
def test_a_broken_rule_on_postgresql_is_found(
    command_line: CommandLine, target: Target, statement: str, rule: str
) -> None:
    async def begin() -> None:
        inbox = await target.open()
        for name in ("m1", "m2"):
            await inbox.accept(NewDelivery(name, "t", b"{}", 7, 1.0), leased=False)
        await inbox.close()

    trio.run(begin)
    target.execute(statement)
    checked = command_line("storage", "check", *ON_POSTGRES, "-f", "json")
    assert checked.status == 1
    assert rule in [row["check"] for row in checked.document if not row["ok"]]


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("DELETE FROM arrival WHERE sequence = 1", "each body belongs to a delivery"),
        ("DELETE FROM key", "each delivery is found by its key"),
        ("UPDATE tally SET number = 9 WHERE name = 'dead'", "the counts of dead and parked"),
        ("UPDATE tally SET number = 9 WHERE name = 'removed'", "the count of deliveries is right"),
    ],
)
def test_a_broken_rule_in_the_file_is_found(
    command_line: CommandLine, source: Path, statement: str, rule: str
) -> None:
    sound = command_line("storage", "check", "-f", "json")
    assert (sound.status, [row for row in sound.document if not row["ok"]]) == (0, [])
    connection = apsw.Connection(str(source))
    connection.execute(statement)
    connection.close()
    checked = command_line("storage", "check", "-f", "json")
    assert checked.status == 1
    assert rule in " ".join(row["check"] for row in checked.document if not row["ok"])


def test_a_damaged_file_is_found(command_line: CommandLine, source: Path) -> None:
    content = bytearray(source.read_bytes())
    content[8192:8292] = b"\xff" * 100
    source.write_bytes(content)
    checked = command_line("storage", "check", "-f", "json")
    assert checked.status in (1, 69)
    assert "damaged" in checked.err or not checked.document[0]["ok"]


def test_large_bodies_are_moved_a_few_at_a_time(
    command_line: CommandLine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk_trio.storage import transfer
    from sdk_trio.storage.engines.postgres_address import PostgresAddress

    async def fill_with_large(file: Path) -> None:
        inbox = await SqliteInbox.open(file, owner="one", **TERMS)
        for number in range(9):
            large = NewDelivery(f"m{number}", "order.paid", b"x" * 4000, 7, 5000.0 + number)
            await inbox.accept(large, leased=False)
        await inbox.close()

    command_line.data.mkdir(mode=0o700)
    file = command_line.data / "inbox.db"
    trio.run(fill_with_large, file)
    monkeypatch.setattr(transfer, "BATCH_BYTES", 10_000)
    batches: list[tuple[str, int]] = []

    def report(step: str, table: str, done: int, _: int) -> None:
        if table == "delivery":
            batches.append((step, done))

    address = PostgresAddress(dsn=target.dsn)
    moved = transfer.transfer(file, address, anew=False, report=report)
    assert moved.rows["delivery"] == 9
    assert batches == [(step, n) for step in ("copy", "compare") for n in (3, 6, 9, 9)]
