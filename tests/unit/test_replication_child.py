"""Decisions about the replicator's process: restarts, its log lines, answers of its socket."""

import json

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.config.fields import ReplicaTargetType
from sdk_trio.config.options.tenants import (
    BlobStoreOptions,
    CloudStorageOptions,
    LocalDiskOptions,
    ObjectStoreOptions,
    ReplicationOptions,
    SftpOptions,
)
from sdk_trio.errors import ReplicatorError
from sdk_trio.replication.child import (
    LINES_A_WINDOW,
    WINDOW_SECONDS,
    LineLimiter,
    find_replicator,
    read_line,
    secret_values,
)
from sdk_trio.replication.control import (
    LONGEST_SOCKET_PATH,
    control_socket_path,
    read_error,
    read_info,
    read_list,
    read_sync,
)
from sdk_trio.replication.manifest import TenantDatabaseFile, render_manifest
from sdk_trio.replication.plan import Plan, difference, live_change, with_control_socket

OPTIONS = ReplicationOptions(
    replica_target_type=ReplicaTargetType.LOCAL_DISK, local_disk=LocalDiskOptions(path="/replica")
)
FILES = [TenantDatabaseFile(name, f"/t/{name}.db") for name in "abc"]


def plan(files=FILES, options=OPTIONS):
    text = render_manifest(options, files, socket_path="/t/s")
    return Plan(with_control_socket(text, "/t/s"), frozenset(file.path for file in files))


def change(old, new, options=OPTIONS):
    return live_change(old, new, options, working_directory="/")


@given(st.sets(st.sampled_from(FILES)), st.sets(st.sampled_from(FILES)))
def test_databases_that_come_and_go_need_no_restart(old, new):
    found = change(plan(sorted(old)), plan(sorted(new)))
    assert found.gone == tuple(sorted(file.path for file in old - new))
    assert found.added == {
        file.path: f"file:///replica/{file.replica}" for file in sorted(new - old)
    }


def test_another_file_in_ones_place_needs_a_restart():
    old = [attrs.evolve(file, identity="1-a") for file in FILES]
    new = [attrs.evolve(old[0], identity="2-b"), old[1]]
    assert change(plan(old), plan(new)) is None
    assert change(plan(old), plan(old[:2])).gone == ("/t/c.db",)
    assert change(plan(old[:2]), plan(old)).added == {"/t/c.db": "file:///replica/c"}


def test_another_setting_or_target_needs_a_restart():
    other = msgspec.structs.replace(OPTIONS, local_disk=LocalDiskOptions(path="/elsewhere"))
    slower = msgspec.structs.replace(OPTIONS, sync_interval_seconds=9)
    for changed in (other, slower):
        assert change(plan(FILES[:1]), plan(FILES, changed), changed) is None
    # A registered database is synced each second, regardless of the configuration.
    assert change(plan(FILES[:1], slower), plan(FILES, slower), slower) is None
    assert change(plan(FILES, slower), plan(FILES[:1], slower), slower).added == {}


def test_an_entry_that_is_not_of_the_options_needs_a_restart():
    new = plan()
    own = attrs.evolve(new, text=new.text.replace('/t/c.db"', '/t/c.db"\n    meta-path: /m'))
    assert change(plan(FILES[:2]), own) is None
    assert change(plan(FILES[:2]), attrs.evolve(new, databases=frozenset({"/t/a.db"}))) is None


@pytest.mark.parametrize(
    ("kind", "keys", "url"),
    [
        (ReplicaTargetType.LOCAL_DISK, {"local_disk": LocalDiskOptions(path="/with space")}, None),
        (
            ReplicaTargetType.OBJECT_STORE,
            {"object_store": ObjectStoreOptions(bucket="b", endpoint_url="http://h:1/")},
            "s3://b/sdk/tenants/c?region=us-east-1&force-path-style=false"
            "&endpoint=http%3A%2F%2Fh%3A1%2F",
        ),
        (
            ReplicaTargetType.OBJECT_STORE,
            {"object_store": ObjectStoreOptions(bucket="b.s3.amazonaws.com")},
            None,
        ),
        (
            ReplicaTargetType.CLOUD_STORAGE,
            {"cloud_storage": CloudStorageOptions(bucket="b", path_prefix="p")},
            "gs://b/p/c",
        ),
        (ReplicaTargetType.SFTP, {"sftp": SftpOptions(host="h", user="u")}, None),
        (
            ReplicaTargetType.BLOB_STORE,
            {"blob_store": BlobStoreOptions(account_name="a")},
            "abs://a@sdk-tenants/c",
        ),
    ],
)
def test_settings_that_an_address_cannot_express_need_a_restart(kind, keys, url):
    options = ReplicationOptions(replica_target_type=kind, **keys)
    found = change(plan(FILES[:2], options), plan(FILES, options), options)
    assert (found.added if found else None) == ({"/t/c.db": url} if url else None)


def test_an_operator_s_configuration_gets_a_socket_and_json_logs():
    text = with_control_socket("dbs: []", '/t/"s"')
    assert 'socket: {enabled: true, path: "/t/\\x22s\\x22"' in text
    assert "logging: {type: json" in text
    assert with_control_socket(text, "/elsewhere") == text


@given(st.sets(st.text(min_size=1)), st.sets(st.text(min_size=1)))
def test_a_difference_counts_both_ways(wanted, found):
    said = difference(wanted, found)
    assert (f"{len(wanted - found)} missing" in said) == bool(wanted - found)
    assert (f"{len(found - wanted)} not wanted" in said) == bool(found - wanted)


@given(st.binary())
def test_any_output_of_the_replicator_is_one_line_without_secrets(raw):
    line = read_line(raw, ())
    assert line.level in {"debug", "warning", "error"}
    assert len(line.message) <= 500


@pytest.mark.parametrize("secret", ["test value/no+key=", 'qu"ote', "back\\slash", "ümläut"])
def test_no_secret_is_copied(secret):
    options = ReplicationOptions()
    secrets = secret_values(options, {"OBJECT_STORE_SECRET_ACCESS_KEY": secret})
    spoken = {"level": "ERROR", "msg": f"bad {secret}", "error": {"key": secret}}
    for raw in (json.dumps(spoken), json.dumps(spoken, ensure_ascii=False), f"Error: {secret}"):
        line = read_line(raw.encode(), secrets)
        assert secret not in json.dumps([line.message, line.fields], ensure_ascii=False)
        assert json.dumps(secret)[1:-1] not in json.dumps([line.message, line.fields])
        assert "***" in line.message


def test_a_level_of_compaction_is_not_a_log_level():
    raw = b'{"level":"INFO","msg":"starting compaction monitor","level":2,"interval":30}'
    assert read_line(raw, ()).level == "debug"
    assert read_line(b'{"level":"WARN","msg":"m"}', ()).level == "warning"
    last = read_line(b"Error: cannot open", ())
    library = read_line(b"SDK 2026/11/21 15:00:00 WARN Response has no supported checksum.", ())
    assert (last.plain, last.level, library.level) == (True, "error", "warning")


def test_repeated_lines_are_counted_instead():
    limiter = LineLimiter()
    line = read_line(b'{"level":"ERROR","msg":"sync error"}', ())
    admitted = [limiter.admit(line, 10.0)[0] for _ in range(10)]
    assert admitted.count(True) == LINES_A_WINDOW
    assert limiter.admit(line, 10.0 + WINDOW_SECONDS) == (True, {"sync error": 7})


def test_lines_of_libraries_that_differ_by_their_time_are_counted_together():
    limiter = LineLimiter()
    lines = [read_line(f"SDK 15:00:{n:02} WARN no checksum".encode(), ()) for n in range(50)]
    assert sum(limiter.admit(line, 1.0)[0] for line in lines) == LINES_A_WINDOW


def test_the_answers_of_the_socket_are_read_leniently():
    body = (
        b'{"databases":[{"path":"/a","status":"replicating","new":[1],'
        b'"last_sync_at":"2026-11-21T14:53:24.556681066Z"},{"path":"/b"}],"later":1}'
    )
    first, second = read_list(body)
    assert first.last_sync_at == pytest.approx(1795272804.556681)
    assert (second.status, second.last_sync_at) == ("", None)
    assert read_info(b'{"pid":7}').pid == 7
    assert read_sync(b'{"status":"synced","txid":3}').txid == 3
    assert read_error(b'{"error":"no"}') == "no"
    assert read_error(b"<html>") == "without a reason"


@given(
    st.binary()
    | st.builds(
        lambda d: json.dumps(d).encode(),
        st.recursive(st.none() | st.text() | st.integers(), st.lists),
    )
)
def test_an_answer_that_makes_no_sense_is_an_error_of_ours(body):
    for read in (read_list, read_info):
        with pytest.raises(ReplicatorError):
            read(body)


def test_the_socket_s_path_has_a_bound():
    name = "/" + "x" * (LONGEST_SOCKET_PATH - len("//replicator.sock"))
    assert len(control_socket_path(name)) == LONGEST_SOCKET_PATH
    with pytest.raises(ReplicatorError, match="shorter"):
        control_socket_path(name + "y")


def test_the_binary_is_looked_for_beside_the_interpreter_then_on_the_path(tmp_path):
    beside, on_path = tmp_path / "venv", tmp_path / "bin"
    beside.mkdir()
    on_path.mkdir()
    found = lambda **keys: find_replicator(  # noqa: E731
        ReplicationOptions(**keys),
        environ={"PATH": str(on_path)},
        interpreter=str(beside / "python"),
    )
    with pytest.raises(ReplicatorError, match=r"sdk-trio\[replication\]"):
        found()
    for directory in (on_path, beside):
        program = directory / "litestream"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        assert found() == str(program)
    (tmp_path / "none").touch()
    with pytest.raises(ReplicatorError, match="ReplicatorPath"):
        found(replicator_path=str(tmp_path / "none"))
