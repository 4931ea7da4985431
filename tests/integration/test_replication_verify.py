"""``replication verify`` on real replicas: faults that it finds, and differences that it
accepts."""

import logging
import os
import shutil
import threading
import time
import uuid

import filelock
import httpx
import pytest
import trio
from support.replica_host import ReplicaHost
from support.replica_targets import local_disk, object_store
from support.replicating import said
from support.serving import running
from support.waiting import until

from sdk_trio import Runtime
from sdk_trio.replication import health_check, verification_schedule
from sdk_trio.replication.verification import CHECKPOINT, LOCK_NAME, state_from_text
from sdk_trio.runtime.replication import sample_verification
from sdk_trio.storage.open import open_store
from sdk_trio.tenants.databases import TenantDatabases

ROWS = 60


@pytest.fixture
def host(tmp_path):
    with local_disk(tmp_path / "target") as target:
        made = ReplicaHost(tmp_path / "host", target)
        made.add("acme", ROWS)
        yield made


def replica_files(host, name="acme"):
    """The files of a replica, by level."""
    return sorted(host.replica(name).rglob("*.ltx"))


def only(ended):
    (result,) = ended.document
    return result


def test_a_good_replica_is_identical(host):
    host.add("bolt", 10)
    with host.replicating():
        host.write("acme", 5)
        ended = host.verify("--all")
    assert ended.status == 0, ended.out + ended.err
    assert [(row["tenant"], row["ok"], row["content"]) for row in ended.document] == [
        ("acme", True, "identical"),
        ("bolt", True, "identical"),
    ]
    assert host.left_behind() == []


def test_a_good_replica_under_concurrent_writes(host):
    stop = threading.Event()

    def write():
        while not stop.is_set():
            host.write("acme", 1)
            time.sleep(0.002)

    writer = threading.Thread(target=write)
    with host.replicating():
        writer.start()
        try:
            results = [only(host.verify()) for _ in range(2)]
        finally:
            stop.set()
            writer.join()
        quiet = only(host.verify())
    assert all(result["ok"] for result in results), results
    assert {result["content"] for result in results} <= {"identical", "not compared: busy"}
    assert quiet["content"] == "identical", quiet
    assert quiet["txid"] > results[0]["txid"]


def test_a_flipped_byte_is_found(host):
    with host.replicating():
        for file in replica_files(host):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 0xFF
            file.write_bytes(content)
        ended = host.verify()
    assert ended.status == 1
    assert "damaged" in only(ended)["problem"]
    assert host.left_behind() == []


def test_a_whole_replica_of_something_else_is_found(host):
    """Position and integrity are correct: only the content differs."""
    host.add("bolt", ROWS)
    with host.replicating():
        base = host.target.directory / "replica"
        acme, bolt = host.replica("acme"), host.replica("bolt")
        acme.rename(base / "aside")
        bolt.rename(acme)
        (base / "aside").rename(bolt)
        ended = host.verify()
    assert ended.status == 1
    for row in ended.document:
        assert "differs from the live one in the content of table grants" in row["problem"]


def test_a_removed_file_is_found(host):
    with host.replicating():
        host.write("acme", 5)
        host.wait_synced()
        for file in replica_files(host):
            if not file.name.startswith("0000000000000001-"):
                file.unlink()
        ended = host.verify()
    assert ended.status == 1
    assert "has lost data" in only(ended)["problem"]


def test_an_emptied_target_is_found(host):
    with host.replicating():
        shutil.rmtree(host.target.directory / "replica")
        ended = host.verify()
    assert ended.status == 1, ended.out
    assert only(ended)["problem"]


def test_a_target_that_was_emptied_and_filled_again_is_found_until_that_is_accepted(host):
    with host.replicating():
        assert host.verify().status == 0
        # The replicator's reaction to an emptied target: a new snapshot, long after.
        for old in replica_files(host):
            os.utime(old, (old.stat().st_mtime + 60,) * 2)
        ended = host.verify()
        assert ended.status == 1, ended.out
        assert "points in time are lost" in only(ended)["problem"]
        assert host.verify("--accept-loss").status == 0
        assert host.verify().status == 0


def test_a_replica_that_lags_because_the_target_is_unavailable_is_found(tmp_path):
    with object_store(tmp_path / "target") as target:
        target.wait_ready()
        section = "MultiTenant:FileDb:Replication:"
        host = ReplicaHost(tmp_path / "host", target, {f"{section}HealthCheckMaxLagSeconds": 1})
        host.add("acme", ROWS)
        with host.replicating():
            target.stop()
            host.ending_seconds = 1
            host.write("acme", 5)
            ended = host.verify()
    assert ended.status == 1
    assert "lags" in only(ended)["problem"]


def test_without_a_replicator_the_content_decides_and_then_the_age(host):
    with host.replicating():
        pass
    assert only(host.verify())["content"] == "identical"
    host.write("acme", 1)
    # A moment ago: it may be on its way, by a replicator that cannot be asked.
    recent = only(host.verify())
    assert (recent["ok"], recent["content"]) == (True, "not compared: busy")
    log = host.database("acme").with_name(f"{host.database('acme').name}-wal")
    later = log.stat().st_mtime + 600
    os.utime(log, (later, later))
    lagging = host.verify()
    assert lagging.status == 1
    assert "lags" in only(lagging)["problem"]


def test_a_suspended_tenant_is_verified_when_it_is_named(host):
    host.add("bolt", 10)
    with host.replicating():
        host.suspend("bolt")
        (active,) = host.verify("--all").document
        assert active["tenant"] == "acme"
        suspended = only(host.verify("--tenant", "bolt"))
    assert (suspended["ok"], suspended["content"]) == (True, "identical")


def test_a_tenant_without_a_database_is_skipped(host):
    host.add("bolt", 1)
    host.database("bolt").unlink()
    with host.replicating("acme"):
        ended = host.verify()
    assert ended.status == 0
    assert [(row["tenant"], row["skipped"] is not None) for row in ended.document] == [
        ("acme", False),
        ("bolt", True),
    ]


def test_a_lost_database_is_verified_by_its_replica_alone(host):
    with host.replicating():
        pass
    for suffix in ("", "-wal", "-shm"):
        host.database("acme").with_name(f"{host.database('acme').name}{suffix}").unlink(True)
    result = only(host.verify())
    assert (result["ok"], result["content"]) == (True, "not compared: no database")


def test_two_verifications_do_not_fill_the_disk_together(host):
    lock = filelock.FileLock(host.root / "data" / LOCK_NAME)
    with lock:
        ended = host.verify()
    assert ended.status == 69
    assert "another verification runs" in ended.err


def test_the_outcome_is_remembered_in_the_store(host):
    async def remembered():
        async with open_store(host.settings, owner="test") as store:
            return state_from_text(await store.read_checkpoint(CHECKPOINT))

    with host.replicating():
        assert host.verify().status == 0
        good = trio.run(remembered)
        shutil.rmtree(host.target.directory / "replica")
        assert host.verify().status == 1
    bad = trio.run(remembered)
    assert good.failed == {}
    assert good.ran_at == good.verified_at
    assert list(bad.failed) == [host.tenants["acme"].id]
    assert bad.verified_at == good.verified_at < bad.ran_at


@pytest.mark.parametrize("replicated", [True, False])
async def test_connections_leave_the_log_of_a_replicated_database_alone(tmp_path, replicated):
    """See docs/adr/0017: replicas of what SQLite checkpoints by itself were seen damaged."""
    tenant_id = str(uuid.uuid4())
    databases = TenantDatabases(tmp_path, replicated=replicated)
    log = tmp_path / f"{tenant_id}.db-wal"

    def create(connection):
        connection.execute("CREATE TABLE grants (body)")

    def insert(connection):
        # 100 pages: SQLite itself copies the log at 1000, and restarts it.
        connection.execute("INSERT INTO grants VALUES (zeroblob(400000))")

    with trio.fail_after(60):
        async with databases.open(tenant_id) as database:
            await database.run(create)
            for _ in range(25):
                await database.run(insert)
        size = log.stat().st_size
        await databases.close()
    if replicated:
        assert size > 10_000_000
        assert log.stat().st_size == size
    else:
        assert size < 6_000_000
        assert not log.exists()


async def _seen_at_the_admin_address(url):
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        # The check of the lag uses its own times.
        async def metrics_of_one_healthy():
            text = (await client.get("/metrics")).text
            return text if 'sdk_replication_databases{state="Healthy"} 1\n' in text else ""

        metrics = await until(metrics_of_one_healthy)
        assert "\nsdk_replication_lag_seconds " in metrics
        assert "\nsdk_replication_verified_age_seconds " in metrics
        checks = {check["name"]: check for check in (await client.get("/readyz")).json()["checks"]}
    assert (checks["replication"]["ok"], checks["replication"]["degraded"]) == (True, False)
    assert (checks["replicas"]["ok"], checks["replicas"]["degraded"]) == (True, False)


async def test_the_runtime_verifies_by_itself(tmp_path, monkeypatch, caplog):
    """Settings, tenants, watcher, supervised replicator, target, and the schedule: all of it."""
    monkeypatch.setattr(verification_schedule, "LOOK_SECONDS", 1.0)
    monkeypatch.setattr(health_check, "CHECK_SECONDS", 0.3)
    caplog.set_level(logging.INFO, "sdk_trio.replication")
    section = "MultiTenant:FileDb:Replication:"
    with local_disk(tmp_path / "target") as target:
        host = ReplicaHost(
            tmp_path / "host",
            target,
            {
                f"{section}AutoRegenerateOnTenantChange": True,
                f"{section}Supervise": True,
                f"{section}VerifyIntervalHours": 1,
                "Server:Bind": ["127.0.0.1:0"],
                "Admin:Bind": "127.0.0.1:0",
                "Webhooks:RequireHttps": False,
            },
        )
        runtime = Runtime(host.settings, standalone=True)
        async with running(runtime):
            tenants = runtime.receiver.tenancy.service
            host.tenants["acme"] = await tenants.add("acme", name="Acme")
            await trio.to_thread.run_sync(host.write, "acme", 10)
            await until(lambda: said(caplog, "replication.verified"))
            (verified, *_) = said(caplog, "replication.verified")
            assert verified["tenant"] == "acme"
            await until(lambda: runtime.verification.verified_age_seconds is not None)
            assert runtime.verification.state.failed == {}
            (sample,) = sample_verification(runtime.verification)
            assert sample.name == "sdk_replication_verified_age_seconds"
            assert 0 <= sample.value < 60
            await _seen_at_the_admin_address(runtime.started.admin[0])
