"""Runs the upgrade many times, kills it with -9 at chosen times, and checks the remaining data.

It is a separate program: it imports everything once and forks a child for each run, so hundreds of
runs take seconds. ``python upgrade_killer.py DIRECTORY LINES TIMES SEED`` kills before LINES of
the lines of code that an upgrade executes (0: before every one), spread evenly, and at TIMES random
moments; it prints a JSON object with its actions, and ends with 1 at the first difference.
"""

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import apsw
import trio

from sdk_trio.config import Settings
from sdk_trio.records.deliveries import NewDelivery
from sdk_trio.records.upgrades import UpgradeState
from sdk_trio.storage.open import open_store
from sdk_trio.tenants import upgrade_run
from sdk_trio.tenants.service import TenantService
from sdk_trio.tenants.upgrade import HostUpgrade, Quiescence, SqliteTenantIds

DELIVERIES = 600
SOURCE_ROWS = 3000
ROWS_IN_LOG = 500
HOST_ROWS = 600
BATCH = 100

#: Each executed line in these is a position for a kill.
TRACED = (
    "tenants/upgrade_run.py",
    "tenants/database_copy.py",
    "tenants/upgrade.py",
    "tenants/service.py",
    "storage/sql/dialect.py",
    "storage/sql/tenants.py",
    "storage/commit.py",
)


def settings_of(data: Path) -> Settings:
    return Settings.from_mapping(
        {"Storage:Path": str(data), "MultiTenant:Enabled": True}, standalone=True, receiver=False
    )


def connect(file: Path) -> apsw.Connection:
    connection = apsw.Connection(os.fspath(file))
    connection.set_busy_timeout(2000)
    return connection


# -- the old host ----------------------------------------------------------------------------------


def make_template(data: Path) -> None:
    """Write the data of a killed single-tenant host: its last rows are only in the WAL."""
    data.mkdir(mode=0o700, parents=True)
    (data / "tenants").mkdir(mode=0o700)
    trio.run(fill_inbox, data)
    in_child(write_source, data / "tenants" / "default.db")
    host = connect(data / "host.db")
    host.pragma("journal_mode", "wal")
    host.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, body TEXT, tenant_id TEXT)")
    host.executemany(
        "INSERT INTO orders (body) VALUES (?)", [(f"order {i}",) for i in range(HOST_ROWS)]
    )
    host.close()
    assert (data / "tenants" / "default.db-wal").stat().st_size > 0


async def fill_inbox(data: Path) -> None:
    async with open_store(settings_of(data), owner="old") as store, trio.open_nursery() as nursery:
        for number in range(DELIVERIES):
            body = b'{"type":"order.paid","data":{"id":"o%d","organization_id":"org-1"}}' % number
            delivery = NewDelivery(f"w{number}", "order.paid", body, number, 1.0)
            nursery.start_soon(lambda d=delivery: store.accept(d, leased=False))


def write_source(file: Path) -> None:
    source = connect(file)
    source.pragma("journal_mode", "wal")
    source.pragma("user_version", 7)
    source.execute("CREATE TABLE grants (id INTEGER PRIMARY KEY, body TEXT UNIQUE)")
    first = SOURCE_ROWS - ROWS_IN_LOG
    insert = "INSERT INTO grants (body) VALUES (?)"
    with source:
        source.executemany(insert, [(f"grant {i}",) for i in range(first)])
    source.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    source.wal_autocheckpoint(0)
    with source:
        source.executemany(insert, [(f"grant {i}",) for i in range(first, SOURCE_ROWS)])
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(function, *arguments) -> int:
    """Run ``function`` in a forked child; return its wait status."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    status = 1
    try:
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


# -- the upgrade -----------------------------------------------------------------------------------


def run_upgrade(data: Path) -> None:
    trio.run(upgrade, data)


async def upgrade(data: Path) -> None:
    upgrade_run.BATCH_DELIVERIES = BATCH
    settings = settings_of(data)
    quiescence = Quiescence()
    quiescence.signal("test")
    host = HostUpgrade(steps=[SqliteTenantIds(data / "host.db", "orders", batch_rows=BATCH)])
    async with open_store(settings, owner="new") as store:
        tenants = TenantService(settings, store.tenants)
        await upgrade_run.Upgrader(settings, store, tenants, quiescence=quiescence, host=host).run()


def run_killed_at_line(data: Path, line: int) -> None:
    count_lines(data, kill_at=line)


def count_lines(data: Path, kill_at: int | None = None, report: int | None = None) -> None:
    """Run the upgrade; kill the process before line ``kill_at``, or write the number of lines."""
    lock = threading.Lock()
    seen = 0

    def trace(frame, event, _argument):
        nonlocal seen
        if not frame.f_code.co_filename.endswith(TRACED):
            return None
        if event == "line":
            with lock:
                seen += 1
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    trio.run(upgrade, data)
    sys.settrace(None)
    if report is not None:
        os.write(report, str(seen).encode())


def run_killed_after(data: Path, seconds: float) -> None:
    def kill() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    trio.run(upgrade, data)


# -- what is left ----------------------------------------------------------------------------------


def check(data: Path, template: Path) -> None:
    tenants = data / "tenants"
    inbox = connect(data / "inbox.db")
    ((tenant_id, identifier, name, organization),) = inbox.execute(
        "SELECT id, identifier, name, organization_id FROM tenant"
    )
    assert (identifier, name, organization) == ("default", "Default Tenant", "org-1")
    assert list(inbox.execute("SELECT tenant_id, action FROM audit")) == [
        (tenant_id, "Created"),
        (tenant_id, "Changed"),
    ]
    assert list(inbox.execute("SELECT state, tenant_id, position FROM upgrade")) == [
        (UpgradeState.DONE, tenant_id, None)
    ]
    found = {entry.name for entry in tenants.iterdir()}
    expected = {entry.name for entry in (template / "tenants").iterdir()}
    assert found - expected == {f"{tenant_id}.db", "upgrade.lock"}, found
    for name in ("default.db", "default.db-wal"):
        same = (tenants / name).read_bytes() == (template / "tenants" / name).read_bytes()
        assert same, f"{name} was changed"
    copy = connect(tenants / f"{tenant_id}.db")
    assert copy.execute("PRAGMA integrity_check").get == "ok"
    assert copy.pragma("user_version") == 7
    assert list(copy.execute("SELECT id, body FROM grants ORDER BY id")) == [
        (number + 1, f"grant {number}") for number in range(SOURCE_ROWS)
    ]
    query = """
        SELECT sequence, delivery_key, type, received_at, signed_at, raw, work.state, work.queued,
            work.attempts, ended.queued, ended.attempts
        FROM arrival LEFT JOIN work USING (sequence) LEFT JOIN ended USING (sequence)
        ORDER BY sequence
    """
    before = list(connect(template / "inbox.db").execute(query))
    assert len(before) == DELIVERIES
    assert list(inbox.execute(query)) == before
    assert list(inbox.execute("SELECT DISTINCT tenant_id FROM arrival")) == [(tenant_id,)]
    host = connect(data / "host.db")
    assert list(host.execute("SELECT id, body, tenant_id FROM orders ORDER BY id")) == [
        (number + 1, f"order {number}", tenant_id) for number in range(HOST_ROWS)
    ]


# -- the program -----------------------------------------------------------------------------------


class Runner:
    def __init__(self, directory: Path) -> None:
        self.template = directory / "template"
        self.directory = directory
        self.runs = 0
        self.killed = 0
        self.places: dict[str, int] = {}
        make_template(self.template)

    def fresh(self) -> Path:
        data = self.directory / "data"
        shutil.rmtree(data, ignore_errors=True)
        shutil.copytree(self.template, data)
        return data

    def kill(self, function, data: Path, argument: float) -> None:
        status = in_child(function, data, argument)
        assert status in (0, signal.SIGKILL), f"the killed run failed by itself: {status}"
        self.runs += 1
        if status == signal.SIGKILL:
            self.killed += 1
            place = self.place_in(data)
            self.places[place] = self.places.get(place, 0) + 1

    def place_in(self, data: Path) -> str:
        # Checked in a copy: SQLite might do the recovery that the next run must do.
        look = self.directory / "look"
        shutil.rmtree(look, ignore_errors=True)
        look.mkdir(mode=0o700)
        for suffix in ("", "-wal"):
            file = data / f"inbox.db{suffix}"
            if file.exists():
                shutil.copy(file, look / file.name)
        with connect(look / "inbox.db") as inbox:
            row = inbox.execute("SELECT state, step FROM upgrade").fetchone()
        return "pending" if row is None else " ".join(row)

    def finish(self, data: Path, moment: object) -> None:
        for function, arguments in ((run_upgrade, (data,)), (check, (data, self.template))):
            status = in_child(function, *arguments)
            assert status == 0, f"{function.__name__} after a kill at {moment}: {status}"

    def count(self) -> tuple[int, float]:
        reading, writing = os.pipe()
        assert in_child(count_lines, self.fresh(), None, writing) == 0
        lines = int(os.read(reading, 100))
        data = self.fresh()
        started = time.monotonic()
        assert in_child(run_upgrade, data) == 0
        return lines, time.monotonic() - started


def main(directory: str, lines: str, times: str, seed: str) -> None:
    runner = Runner(Path(directory))
    executed, seconds = runner.count()
    step = executed / int(lines) if int(lines) else 1.0
    moments = sorted({round(1 + index * step) for index in range(round(executed / step))})
    for line in moments:
        data = runner.fresh()
        runner.kill(run_killed_at_line, data, line)
        runner.finish(data, f"line {line} of {executed}")
    chance = random.Random(int(seed))
    for _ in range(int(times)):
        data = runner.fresh()
        delays = [chance.uniform(0, seconds) for _ in range(chance.randint(1, 3))]
        for delay in delays:
            runner.kill(run_killed_after, data, delay)
        runner.finish(data, delays)
    counts = {"runs": runner.runs, "killed": runner.killed, "executed_lines": executed}
    json.dump(counts | {"places": runner.places}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
