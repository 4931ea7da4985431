"""Data deleted by ``tenant purge`` or retention is gone from every file, while daemons run."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import httpx
import pytest
from support.clock_steps import ClockSteps
from support.daemon import Daemon, Place
from support.deliveries import SECRET
from support.ports import free_port
from support.programs import program
from support.waiting import wait_until

from sdk_trio.testing import sign_delivery

#: Personal data of the tenant: in bodies, database, name, address, reasons, errors.
MARK = "Quillfeather-59131"

APPLICATION = f"""
import json
from sdk_trio.events import OrderPaidEvent
from sdk_trio.webhooks import HandlerRegistry

handlers = HandlerRegistry()

@handlers.on(OrderPaidEvent, enqueue=True, run_when_suspended=False)
async def note(event, services):
    with open("seen", "a") as seen:
        seen.write(json.dumps([event.webhook_id, event.tenant and event.tenant.identifier]) + "\\n")
    if event.webhook_id in ("v7", "v17", "v27", "v37", "v47", "v57"):
        raise ValueError("cannot grant to {MARK}")
    def keep(connection):
        connection.execute("CREATE TABLE IF NOT EXISTS grants (body)")
        connection.execute("INSERT INTO grants VALUES (?)", (event.raw.decode(),))
    if event.tenant:
        async with services.tenant_db(event.tenant) as database:
            await database.run(keep)
"""

TENANTS = (
    "--set=Sdk:MultiTenant:Enabled=true",
    "--set=Sdk:MultiTenant:TenantStatus:RequireVerifiedEmailForSuspension=false",
)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "purging.py").write_text(APPLICATION)
    return Place(tmp_path)


def replication(place: Place) -> tuple[str, ...]:
    keys = {
        "UseReplication": "true",
        "Supervise": "true",
        "ReplicaTargetType": "LocalDisk",
        "LocalDisk:Path": str(place.data / "replica"),
        "ConfigOutputPath": str(place.directory / "replicator.yml"),
        "AutoRegenerateDebounceWindow": "00:00:00.1",
        "MetricsPort": str(free_port()),
    }
    prefix = "Sdk:MultiTenant:FileDb:Replication"
    return tuple(f"--set={prefix}:{key}={value}" for key, value in keys.items())


@contextmanager
def daemon(place: Place, *words: str) -> Iterator[Daemon]:
    with place.daemon("--app", "purging:handlers", *TENANTS, *words) as running:
        yield running


def checked(place: Place, *words: str) -> Any:
    ended = place.run(*words, *TENANTS, "--format", "json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def deliver(running: Daemon, webhook_id: str, organization: str, text: str) -> None:
    data = {"id": webhook_id, "organization_id": organization, "note": text}
    raw = json.dumps({"type": "order.paid", "timestamp": "2026-01-01T00:00:00Z", "data": data})
    signed = sign_delivery(raw.encode(), secret=SECRET, webhook_id=webhook_id)
    url = f"{running.receiver}/hooks/sdk"
    answer = httpx.post(url, content=signed.body, headers=dict(signed.headers), timeout=30)
    assert answer.status_code == 200, answer.text


def states(place: Place) -> dict[str, str]:
    listed = checked(place, "events", "list", "--limit", "500")
    return {each["webhook_id"]: each["state"] for each in listed}


def seen(place: Place) -> dict[str, str | None]:
    file = place.directory / "seen"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return dict(json.loads(line) for line in whole.splitlines())


def holding(place: Place, *texts: str) -> list[str]:
    """The files under the data directory whose name or content holds one of ``texts``."""
    wanted = [text.encode() for text in texts]
    found = []
    for path in place.data.rglob("*"):
        with suppress(FileNotFoundError):  # the replicator renames and removes files
            if path.is_file() and any(each in path.read_bytes() for each in wanted):
                found.append(str(path.relative_to(place.data)))
    return sorted(found)


def open_deleted(pid: int) -> list[str]:
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(each)
            if target.endswith(" (deleted)") and "/tenants/" in target:
                found.append(target)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_on_demand_everything_of_one_tenant_goes_while_a_daemon_runs(place):
    program("litestream")
    more = replication(place)
    with daemon(place, *more) as running:
        who = ("--email", f"{MARK}@example.com", "--organization-id", f"org-{MARK}")
        victim = checked(place, "tenant", "add", "victim", "--name", MARK, *who)["id"]
        checked(place, "tenant", "add", "other", "--name", "Other", "--organization-id", "org-2")
        for number in range(60):
            deliver(running, f"v{number}", f"org-{MARK}", f"{MARK} " * (1 + number % 40))
            deliver(running, f"o{number}", "org-2", "y" * (20 * number))
        replica = place.data / "replica" / f"victim.{victim}"
        wait_until(lambda: len(seen(place)) >= 120 and replica.is_dir())
        checked(place, "tenant", "suspend", "victim", "--reason", f"{MARK} asked")
        deliver(running, "held", f"org-{MARK}", MARK)
        wait_until(lambda: states(place)["held"] == "parked")
        refused = place.run("tenant", "purge", "victim", "--now", "--yes", *TENANTS, *more)
        assert refused.returncode != 0
        assert "is Suspended and is not purged" in refused.stderr
        checked(place, "tenant", "delete", "victim", "--reason", f"{MARK} demands it")
        early = place.run("tenant", "purge", "victim", "--yes", *TENANTS, *more)
        assert early.returncode != 0
        assert "--now" in early.stderr

        (row,) = checked(place, "tenant", "purge", "victim", "--now", "--dry-run", *more)
        assert (row["deliveries"], row["bodies"], row["purged"]) == (61, 61, False)
        assert row["outbox"] == 2
        assert row["attempts"] >= 6
        assert row["replica"] == str(replica)
        assert str(place.data / "tenants" / f"{victim}.db") in row["files"]
        assert any(name.startswith("inbox.db") for name in holding(place, MARK))

        purge = ("tenant", "purge", "victim", "--now", "--yes", "--actor", "dpo", *more)
        (row,) = checked(place, *purge)
        assert (row["purged"], row["unreached"]) == (True, [])
        assert holding(place, MARK, f"org-{MARK}") == []
        assert not replica.exists()
        assert not [path for path in place.data.rglob("*") if victim in path.name]
        wait_until(lambda: not open_deleted(running.process.pid))

        (record,) = checked(place, "tenant", "audit", victim)
        assert (record["action"], record["actor"]) == ("Purged", "dpo")
        assert "61 deliveries" in record["details"]
        assert {name[0] for name in states(place)} == {"o"}

        # The daemon continues; events of the purged tenant are parked and never run.
        deliver(running, "o-after", "org-2", "other")
        wait_until(lambda: "o-after" in seen(place))
        deliver(running, "held", f"org-{MARK}", "again")
        wait_until(lambda: states(place).get("held") == "parked")
        assert place.run("events", "replay", "held", *TENANTS).returncode == 0
        wait_until(lambda: states(place)["held"] == "dead")
        assert seen(place).get("held", "unknown") is not None, "it ran without a tenant"
        # Another purge removes that event as well.
        (row,) = checked(place, "tenant", "purge", "--yes", *more)
        assert (row["tenant_id"], row["deliveries"]) == (victim, 1)
    assert not any(name.startswith("held") for name in states(place))
    assert holding(place, MARK) == []


def test_a_body_whose_retention_is_over_is_in_no_file_of_a_daemon_that_runs(place):
    """PayloadRetentionDays is a promise about data, not about rows."""
    clock = ClockSteps(place.directory)
    place.environ.update(clock.environment)
    with place.daemon("--app", "purging:handlers") as running:
        for number in range(20):
            deliver(running, f"r{number}", "org-1", f"{MARK} " * (1 + 20 * number))
        wait_until(lambda: len(seen(place)) == 20)
    assert holding(place, MARK)
    clock.set(40 * 24 * 3600)
    with place.daemon("--app", "purging:handlers") as running:
        running.wait_for("inbox.purged")
        assert holding(place, MARK) == []
    assert holding(place, MARK) == []


def test_parked_events_of_a_purged_tenant_never_run_without_a_tenant(place):
    checked(place, "tenant", "add", "gone", "--name", "Gone", "--organization-id", "org-1")
    checked(place, "tenant", "suspend", "gone")
    with daemon(place) as running:
        deliver(running, "held", "org-1", "text")
        wait_until(lambda: states(place)["held"] == "parked")
    store = apsw.Connection(str(place.data / "inbox.db"))
    store.execute("DELETE FROM tenant")  # as the purge of an earlier version left it
    store.close()
    with daemon(place):
        assert place.run("events", "replay", "held", *TENANTS).returncode == 0
        wait_until(
            lambda: states(place)["held"] != "parked" and states(place)["held"] != "received"
        )
        shown = checked(place, "events", "show", "held")
    assert seen(place) == {}
    assert shown["state"] == "dead"
    assert "was purged" in shown["last_error"]


def test_an_interrupted_purge_by_name_is_not_reported_as_finished(place):
    with daemon(place) as running:
        checked(place, "tenant", "add", "victim", "--name", MARK, "--organization-id", "org-1")
        deliver(running, "v1", "org-1", MARK)
        wait_until(lambda: holding(place, MARK) and list(place.data.glob("tenants/*.db")))
        wait_until(lambda: states(place) == {"v1": "done"})
        checked(place, "tenant", "delete", "victim")
    (file,) = place.data.glob("tenants/*-*.db")
    # While a process has the database open, a purge waits: after the rows, before the files.
    reader = apsw.Connection(str(file))
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM grants").fetchall()
    words = ("tenant", "purge", "victim", "--now", "--yes", *TENANTS)
    purge = subprocess.Popen(
        [sys.executable, "-m", "sdk_trio", *words], cwd=place.directory, env=place.environ
    )
    try:
        wait_until(lambda: "Purged" in place.run("tenant", "audit", *TENANTS).stdout)
    finally:
        purge.kill()
        purge.wait()
    reader.close()
    assert holding(place, MARK) != []
    again = place.run(*words)
    assert again.returncode == 1
    assert file.stem in again.stderr
    assert "'tenant purge' without a name" in again.stderr
    assert place.run("tenant", "purge", "--yes", *TENANTS).returncode == 0
    assert holding(place, MARK) == []


def test_events_of_a_purged_tenant_are_parked_with_the_reason(place):
    gone = ("gone", "--name", "Gone", "--organization-id", "org-1")
    tenant_id = checked(place, "tenant", "add", *gone)["id"]
    with daemon(place) as running:
        deliver(running, "before", "org-1", "text")
        wait_until(lambda: states(place)["before"] == "done")
        checked(place, "tenant", "delete", "gone")
        checked(place, "tenant", "purge", "gone", "--now", "--yes")
        numbers = itertools.count()

        def is_noticed() -> bool:  # the daemon takes up to half a second to notice the purge
            deliver(running, (last := f"after{next(numbers)}"), "org-1", "text")
            text = place.run("events", "show", last, *TENANTS).stdout
            return f"parked because  its tenant {tenant_id} was purged" in text

        wait_until(is_noticed)
    assert f"after{next(numbers) - 1}" not in seen(place)
    assert place.run("tenant", "purge", "--yes", *TENANTS).returncode == 0
    # The tenant's body that was stored under another event's key is also found and removed.
    with daemon(place) as running:
        deliver(running, "unrelated", "org-3", "text")
        deliver(running, "unrelated", "org-1", MARK)
    (row,) = checked(place, "tenant", "purge", "--dry-run")
    assert (row["tenant_id"], row["deliveries"], row["evidence"]) == (tenant_id, 0, 1)
    checked(place, "tenant", "purge", "--yes")
    assert holding(place, MARK) == []
    assert set(states(place)) == {"unrelated"}, "only the other body was the tenant's"


def test_a_backup_and_a_reader_that_keeps_the_log_are_named(place):
    with daemon(place) as running:
        checked(place, "tenant", "add", "victim", "--name", MARK, "--organization-id", "org-1")
        deliver(running, "v1", "org-1", MARK)
        wait_until(lambda: states(place) == {"v1": "done"})
        backup = apsw.Connection(str(place.data / "backup.db"))
        source = apsw.Connection(str(place.data / "inbox.db"))
        with backup.backup("main", source, "main") as copying:
            copying.step()
        backup.close()
        checked(place, "tenant", "delete", "victim")
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM arrival").fetchall()
        purge = ("tenant", "purge", "victim", "--now", "--yes", *TENANTS)
        ended = place.run(*purge)
        assert ended.returncode == 1
        assert f"not reached: {place.data / 'backup.db'}" in ended.stderr
        assert "write-ahead log" in ended.stderr
        source.close()
        (place.data / "backup.db").unlink()
        assert place.run("tenant", "purge", "--yes", *TENANTS).returncode == 0
    assert holding(place, MARK) == []


def test_orphaned_replicas_on_a_local_disk_are_listed_and_removed_on_request(place):
    more = replication(place)
    with daemon(place):
        pass
    orphan = place.data / "replica" / "gone.11111111-2222-4333-8444-555555555555"
    orphan.mkdir(parents=True)
    (orphan / "file").write_bytes(b"old")
    assert checked(place, "tenant", "purge", "--dry-run", *more) == []
    (row,) = checked(place, "tenant", "purge", "--orphans", "--dry-run", *more)
    assert (row["replica"], row["replica_files"]) == (str(orphan), 1)
    assert orphan.exists()
    (row,) = checked(place, "tenant", "purge", "--orphans", "--yes", *more)
    assert row["purged"]
    assert not orphan.exists()


@pytest.mark.parametrize("target", ["elsewhere", "nowhere", "file"])
def test_a_link_or_file_in_place_of_a_replica_is_removed_and_its_target_named(place, target):
    more = replication(place)
    with daemon(place):
        pass
    orphan = place.data / "replica" / "gone.11111111-2222-4333-8444-555555555555"
    orphan.parent.mkdir()
    elsewhere = place.directory / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_bytes(b"old")
    if target == "file":
        orphan.write_bytes(b"old")
    else:
        orphan.symlink_to(place.directory / target)
    (row,) = checked(place, "tenant", "purge", "--orphans", "--dry-run", *more)
    assert (row["replica"], row["replica_files"]) == (str(orphan), 1)
    ended = place.run("tenant", "purge", "--orphans", "--yes", *TENANTS, *more)
    assert not orphan.is_symlink()
    assert not orphan.exists()
    assert (elsewhere / "file").read_bytes() == b"old"
    left = f"not reached: {elsewhere}, to which the replica {orphan} was a link"
    assert ended.returncode == (1 if target == "elsewhere" else 0)
    assert (left in ended.stderr) == (target == "elsewhere")
    assert checked(place, "tenant", "purge", "--orphans", "--dry-run", *more) == []


def test_a_replica_that_cannot_be_removed_is_named_with_its_path(place):
    victim = checked(place, "tenant", "add", "victim", "--name", "V")["id"]
    checked(place, "tenant", "delete", "victim")
    keys = {
        "UseReplication": "true",
        "ReplicaTargetType": "ObjectStore",
        "ObjectStore:Bucket": "backups",
        "ObjectStore:Region": "eu-west-1",
        "ObjectStore:PathPrefix": "shop",
        "ConfigOutputPath": str(place.directory / "replicator.yml"),
        "ReplicatorPidFilePath": str(place.directory / "replicator.pid"),
        "ReplicatorPath": "/nowhere/litestream",
    }
    prefix = "Sdk:MultiTenant:FileDb:Replication"
    more = tuple(f"--set={prefix}:{key}={value}" for key, value in keys.items())
    ended = place.run("tenant", "purge", "victim", "--now", "--yes", *TENANTS, *more)
    assert ended.returncode == 1
    assert f"not reached: the replica at s3://backups/shop/victim.{victim}" in ended.stderr
    assert checked(place, "tenant", "list") == []
