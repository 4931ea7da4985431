"""``replication verify`` on real replicas: what it finds, and what it lets pass."""

import shutil
import threading

import pytest
from support.replica_host import ReplicaHost
from support.replica_targets import local_disk, object_store

ROWS = 60


@pytest.fixture
def host(tmp_path):
    with local_disk(tmp_path / "target") as target:
        made = ReplicaHost(tmp_path / "host", target)
        made.add("acme", ROWS)
        yield made


def replica_files(host, name="acme"):
    """The files of a replica, by level."""
    base = host.target.directory / "replica" / host.tenants[name].id
    return sorted(base.rglob("*.ltx"))


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


def test_a_removed_file_is_found(host):
    with host.replicating():
        host.write("acme", 5)
        host.wait_synced()
        for file in replica_files(host):
            if not file.name.startswith("0000000000000001-"):
                file.unlink()
        ended = host.verify()
    assert ended.status == 1
    assert "has lost what it had" in only(ended)["problem"]


def test_an_emptied_target_is_found(host):
    with host.replicating():
        shutil.rmtree(host.target.directory / "replica")
        ended = host.verify()
    assert ended.status == 1, ended.out
    assert only(ended)["problem"]


def test_a_replica_that_lags_because_the_target_is_away_is_found(tmp_path):
    with object_store(tmp_path / "target") as target:
        target.wait_ready()
        section = "MultiTenant:FileDb:Replication:"
        host = ReplicaHost(tmp_path / "host", target, {f"{section}HealthCheckMaxLagSeconds": 1})
        host.add("acme", ROWS)
        with host.replicating():
            target.stop()
            host.write("acme", 5)
            ended = host.verify()
    assert ended.status == 1
    assert "lags" in only(ended)["problem"]
