"""``replication restore`` with the real replicator: results, refusals, and remaining files."""

import os
import signal
import subprocess
import time
import uuid
from datetime import UTC, datetime

import pytest
import trio
from support.ports import free_port
from support.programs import program
from support.replica_host import ReplicaHost, rows_of, write_rows
from support.replica_targets import Target, local_disk, object_store, sftp
from support.waiting import wait_until

from sdk_trio.errors import ReplicatorError
from sdk_trio.replication import replica as replica_reader
from sdk_trio.replication.child import find_replicator
from sdk_trio.replication.replica import ReplicaReader
from sdk_trio.replication.restore import Restorer

SECTION = "Sdk:MultiTenant:FileDb:Replication"
NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A host whose tenant has a replica; nothing replicates it now."""
    root = tmp_path_factory.mktemp("restore")
    with local_disk(root / "target") as target:
        made = ReplicaHost(root / "host", target)
        made.add("acme", 3000, bytes_each=2000)
        made.add("bolt", 10)
        made.add("gone", 20)
        with made.replicating("acme", "gone"):
            made.write("acme", 5)
            made.wait_synced("acme")
        yield made


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out" / "acme.db"


def restore(host, output, *options, tenant="acme", at_set=()):
    output.parent.mkdir(exist_ok=True)
    words = ("replication", "restore", "--tenant", tenant, "--output", str(output), *options)
    return host.run(*words, *(word for key in at_set for word in ("--set", key)))


def test_the_result_and_the_output_of_a_restore(host, output):
    ended = restore(host, output, "--format", "json")
    assert ended.status == 0, ended.err
    assert rows_of(output) == host.rows("acme")
    assert ended.document["tenant_id"] == host.tenants["acme"].id
    assert ended.document["output"] == str(output)
    assert ended.document["bytes"] == output.stat().st_size
    assert abs(ended.document["as_of"] - datetime.now(UTC).timestamp()) < 300
    assert output.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in output.parent.iterdir()] == ["acme.db"]


def test_an_existing_file_is_only_replaced_when_that_is_said(host, output):
    output.parent.mkdir()
    write_rows(output, 3)
    log = output.with_name("acme.db-wal")
    assert log.exists()
    before = output.read_bytes()
    refused = restore(host, output)
    assert refused.status == 1
    assert "--force" in refused.err
    assert output.read_bytes() == before
    assert log.exists()
    # The log of the old database would be taken for the new one's.
    assert restore(host, output, "--force").status == 0
    assert not log.exists()
    assert rows_of(output) == host.rows("acme")


def test_a_stray_log_is_not_put_beside_the_restored_database(host, output):
    output.parent.mkdir()
    log = output.with_name("acme.db-wal")
    log.write_bytes(b"of another database")
    assert restore(host, output).status == 1
    assert log.exists()
    assert not output.exists()


def test_the_database_of_an_active_tenant_is_never_the_output(host):
    ended = restore(host, host.database("acme"), "--force")
    assert ended.status == 1
    assert "tenant suspend acme" in ended.err
    other = restore(host, host.databases / "restored.db")
    assert other.status == 1
    assert "among the tenants' databases" in other.err


def test_the_runtimes_own_files_are_never_the_output(host):
    inbox = host.root / "data" / "inbox.db"
    before = inbox.read_bytes()
    ended = restore(host, inbox, "--force")
    assert ended.status == 1
    assert "to another directory" in ended.err
    assert inbox.read_bytes() == before


def test_a_deleted_tenant_is_restored_until_it_is_purged(host, output):
    expected, its_id = host.rows("gone"), host.tenants["gone"].id
    assert host.run("tenant", "delete", "gone").status == 0
    ended = restore(host, output, tenant=its_id)
    assert ended.status == 0, ended.err
    assert rows_of(output) == expected
    output.unlink()
    at_once = "Sdk:MultiTenant:TenantStatus:DeletedTenantRetentionDays=0"
    purged = host.run("tenant", "purge", "--yes", "--set", at_once)
    assert purged.status == 0, purged.err
    assert not host.database("gone").exists()
    assert restore(host, output, tenant="gone").status == 1
    ended = restore(host, output, tenant=its_id)
    assert (ended.status, output.exists()) == (1, False)
    assert "has no replica of that name" in ended.err


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--at", "2020-01-01T00:00Z"), 1, "the replica begins at"),
        (("--at", "2990-01-01T00:00Z"), 2, "is in the future"),
        (("--at", "yesterday"), 2, "--at takes a time"),
        (("--set", f"{SECTION}:UseReplication=false"), 78, f"{SECTION}:UseReplication"),
        (("--set", f"{SECTION}:ReplicatorPath=/nowhere/litestream"), 69, "/nowhere/litestream"),
    ],
)
def test_impossible_requests_are_explained(host, output, options, status, words):
    ended = restore(host, output, *options)
    assert ended.status == status, ended.err
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("command", ["restore", "verify", "status"])
def test_a_variable_that_is_not_set_is_named_before_anything_else(
    host, output, command, monkeypatch
):
    monkeypatch.delenv("OBJECT_STORE_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("OBJECT_STORE_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    target = {
        "ReplicaTargetType": "ObjectStore",
        "ObjectStore:Bucket": "b",
        "ObjectStore:EndpointUrl": f"http://127.0.0.1:{free_port()}",
        "ObjectStore:ForcePathStyle": "true",
    }
    sets = [word for key, value in target.items() for word in ("--set", f"{SECTION}:{key}={value}")]
    output.parent.mkdir(exist_ok=True)
    words = {
        "restore": ("--tenant", "acme", "--output", str(output)),
        "verify": ("--tenant", "acme"),
    }
    ended = host.run("replication", command, *words.get(command, ()), *sets)
    assert ended.status != 0
    first = ended.err.splitlines()[0]
    assert "AccessKeyIdEnvVar names the variable OBJECT_STORE_ACCESS_KEY_ID" in first
    assert "OBJECT_STORE_SECRET_ACCESS_KEY, which is not set" in ended.err
    if command == "restore":
        # The reason too begins with it, not with the roles of machines.
        assert f"{SECTION}:ObjectStore:AccessKeyIdEnvVar" in ended.err.splitlines()[-1]


def test_a_tenant_without_a_replica(host, output):
    ended = restore(host, output, tenant="bolt")
    assert ended.status == 1
    assert "no replica" in ended.err


def test_an_unknown_tenant(host, output):
    assert restore(host, output, tenant="unknown").status == 1


@pytest.mark.parametrize("key", ["identifier", "id", "name of the replica"])
def test_the_target_knows_the_tenant_where_the_store_is_lost(host, output, tmp_path, key):
    tenant_id = host.tenants["acme"].id
    word = {"identifier": "acme", "id": tenant_id}.get(key, f"acme.{tenant_id}")
    lost = f"Sdk:Storage:Path={tmp_path / 'new'}"
    ended = restore(host, output, "--format", "json", tenant=word, at_set=[lost])
    assert ended.status == 0, ended.err
    assert (ended.document["tenant"], ended.document["tenant_id"]) == ("acme", tenant_id)
    assert rows_of(output) == host.rows("acme")


def test_a_name_that_two_replicas_have_is_refused_with_both(host, output, tmp_path):
    """Two tenants had it one after the other, or on two hosts that share the target."""
    other = host.target.directory / "replica" / f"acme.{uuid.uuid4()}"
    other.mkdir()
    lost = f"Sdk:Storage:Path={tmp_path / 'new'}"
    try:
        ended = restore(host, output, at_set=[lost])
        assert (ended.status, output.exists()) == (1, False)
        assert f"{other.name} (empty)" in ended.err
        assert f"{host.replica('acme').name} (newest state 2" in ended.err
        # A tenant that is known here takes precedence.
        assert restore(host, output).status == 0
    finally:
        other.rmdir()


def test_a_name_that_no_replica_has_is_refused_with_those_that_there_are(host, output, tmp_path):
    lost = f"Sdk:Storage:Path={tmp_path / 'new'}"
    ended = restore(host, output, tenant="acne", at_set=[lost])
    assert ended.status == 1
    assert f"has {host.replica('acme').name}" in ended.err


@pytest.mark.parametrize("damage", ["flipped", "emptied", "cut"])
def test_a_damaged_replica_gives_no_file(host, output, damage):
    """Two come from Litestream, replica_test.go, TestReplica_Restore_InvalidFileSize."""
    replica = host.replica("acme")
    files = {file: file.read_bytes() for file in replica.rglob("*.ltx")}
    try:
        for file, content in files.items():
            damaged = bytearray(content)
            damaged[len(damaged) // 2] ^= 0xFF
            changed = {"emptied": b"", "cut": content[: len(content) // 2]}
            file.write_bytes(changed.get(damage, damaged))
        ended = restore(host, output)
    finally:
        for file, content in files.items():
            file.write_bytes(content)
    assert ended.status == 1
    assert "damaged" in ended.err
    assert list(output.parent.iterdir()) == []


def test_cancelled_anywhere_nothing_is_left(host, output):
    output.parent.mkdir()
    reader = ReplicaReader(
        host.settings, binary=find_replicator(host.settings.multi_tenant.file_db.replication)
    )
    steps = []

    async def cut_short(after):
        """Cancel at a report; return whether it came to that."""
        with trio.CancelScope() as scope:
            left = after

            def report(progress):
                nonlocal left
                left -= 1
                if left == 0:
                    steps.append(progress.step)
                    scope.cancel()

            await Restorer(reader, report=report).restore(host.replica_name("acme"), output)
        return scope.cancelled_caught

    cut = 1
    while trio.run(cut_short, cut):
        assert list(output.parent.iterdir()) == []
        cut += 1
    assert rows_of(output) == host.rows("acme")
    assert {"reading the list of the replica's files", "restoring"} <= set(steps)


def test_a_signal_cleans_up_and_what_a_kill_leaves_is_removed_by_the_next(tmp_path):
    with object_store(tmp_path / "target") as target:
        target.wait_ready()
        host = ReplicaHost(tmp_path / "host", target)
        host.add("acme", 10)
        with host.replicating():
            pass
        out = tmp_path / "out"
        out.mkdir()
        words = ("replication", "restore", "--tenant", "acme", "--output", str(out / "acme.db"))
        for number, left in ((signal.SIGTERM, 0), (signal.SIGKILL, 1)):
            target.pause()
            try:
                process = subprocess.Popen(
                    host.command(*words),
                    env=host.environ,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                wait_until(lambda: list(out.glob(".acme.db.restoring-*/replicator.yml")))
                process.send_signal(number)
                assert process.wait(60) in (128 + number, -number)
            finally:
                target.resume()
            assert len(list(out.iterdir())) == left
        assert host.run(*words).status == 0
        assert [path.name for path in out.iterdir()] == ["acme.db"]
        assert rows_of(out / "acme.db") == host.rows("acme")


def test_an_unavailable_target_is_named(tmp_path):
    with sftp(tmp_path / "target") as target:
        host = ReplicaHost(tmp_path / "host", target)
        host.add("acme", 1)
        target.wait_ready()
        target.stop()
        ended = restore(host, tmp_path / "out" / "acme.db")
    assert ended.status == 69
    assert "the replication target cannot be read" in ended.err
    assert "connection refused" in ended.err
    assert list((tmp_path / "out").iterdir()) == []


async def test_the_wait_for_a_silent_target_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(replica_reader, "LIST_SECONDS", 0.5)
    silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = silent[0].socket.getsockname()[1]
    target = Target("ObjectStore", tmp_path / "target")
    target.keys = {"Bucket": "tenants", "EndpointUrl": f"http://127.0.0.1:{port}"}
    target.environ = {"OBJECT_STORE_ACCESS_KEY_ID": "a", "OBJECT_STORE_SECRET_ACCESS_KEY": "b"}
    host = ReplicaHost(tmp_path / "host", target)
    reader = ReplicaReader(
        host.settings, binary=program("litestream"), environ={**os.environ, **target.environ}
    )
    with trio.fail_after(60), pytest.raises(ReplicatorError, match="did not answer within"):
        await Restorer(reader).restore(str(uuid.uuid4()), tmp_path / "acme.db")
    assert not (tmp_path / "acme.db").exists()
    await silent[0].aclose()


def on_a_small_disk(host, small, words, *, before=":"):
    """Run a command in an empty, private file system of 2 MB."""
    small.mkdir()
    script = f'mount -t tmpfs -o size=2m,mode=0700 tmpfs "$0" || exit 99; cd "$0"; {before}; "$@"'
    script += '; echo "status $?"; ls -A'
    ended = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script, small, *host.command(*words)],
        env=host.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if ended.returncode == 99 or "unshare" in ended.stderr:
        pytest.skip(f"this machine does not allow mounts: {ended.stderr}")
    return ended


def test_a_full_disk_is_reported_and_left_as_it_was(host, tmp_path):
    words = ("replication", "restore", "--tenant", "acme", "--output", "acme.db")
    ended = on_a_small_disk(host, tmp_path / "small", words)
    assert "the disk is full" in ended.stderr
    assert ended.stdout == "status 1\n"


def test_a_verification_refuses_to_fill_the_disk_with_the_deliveries(host, tmp_path):
    small = tmp_path / "small"
    words = ("replication", "verify", "--tenant", "acme", "--set", f"Sdk:Storage:Path={small}")
    words += ("--set", f"Sdk:MultiTenant:FileDb:Directory={host.databases}", "--format", "json")
    inbox = host.root / "data" / "inbox.db"
    ended = on_a_small_disk(host, small, words, before=f"cp '{inbox}' .")
    assert "there is not enough space to restore" in ended.stdout
    assert "status 1\n" in ended.stdout
    assert "verifying" not in ended.stdout


def test_a_restored_database_in_its_place_is_replicated_again(tmp_path):
    """Check the steps of docs/how-to/restore.md for putting a database back."""
    with local_disk(tmp_path / "target") as target:
        host = ReplicaHost(tmp_path / "host", target)
        host.add("acme", 10)
        host.add("bolt", 1)
        with host.supervised():
            good = host.rows("acme")
            time.sleep(0.1)
            at = datetime.now(UTC).isoformat()
            time.sleep(0.1)
            host.write("acme", 7)
            host.wait_synced("acme")

            host.suspend("acme")
            place = host.database("acme")
            refused = restore(host, place, "--at", at, "--force")
            assert refused.status == 1
            assert "the replicator still uses" in refused.err
            host.apply_tenants("bolt")
            ended = restore(host, place, "--at", at, "--force")
            assert ended.status == 0, ended.err
            assert host.rows("acme") == good

            host.reactivate("acme")
            host.apply_tenants("acme", "bolt")
            host.write("acme", 3)
            host.wait_synced("acme")
            verified = host.verify("--tenant", "acme")
            assert verified.document[0]["content"] == "identical", verified.out
            assert host.restore("acme") == host.rows("acme")
            assert len(host.rows("acme")) == 13
            # The data of the bad moment is still there, until the retention ends.
            assert len(host.restore("acme", "--at", at)) == 10


def test_a_database_replaced_without_a_watcher_is_replicated(tmp_path):
    with local_disk(tmp_path / "target") as target:
        host = ReplicaHost(tmp_path / "host", target)
        host.add("acme", 10)
        place = host.database("acme")
        with host.supervised():
            for file in (place, place.with_name(f"{place.name}-wal")):
                file.unlink()
            place.with_name(f"{place.name}-shm").unlink()
            write_rows(place, 4)
            before = host.replicator_pid()
            host.apply_tenants("acme")
            # It holds a database by its connection and its log by its name: half of each else.
            wait_until(lambda: host.replicator_pid() != before)
            host.wait_synced("acme")
            assert len(host.restore("acme")) == 4
            host.write("acme", 2)
            host.wait_synced("acme")
            assert host.restore("acme") == host.rows("acme")


def test_a_moment_after_a_missing_file_is_refused_instead_of_an_older_one_given(tmp_path):
    with local_disk(tmp_path / "target") as target:
        host = ReplicaHost(tmp_path / "host", target)
        host.add("acme", 1)
        with host.replicating():
            for _ in range(2):
                host.write("acme", 1)
                host.wait_synced()
            time.sleep(1.1)
            at = datetime.now(UTC).isoformat()
        for file in target.directory.rglob("0000000000000002-*.ltx"):
            file.unlink()
        ended = restore(host, tmp_path / "out" / "acme.db", "--at", at)
    assert ended.status == 1
    assert "a file is missing" in ended.err
