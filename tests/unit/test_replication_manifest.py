"""The replicator's configuration: its content for each target, for any values."""

import re
from typing import Any

import attrs
import msgspec
import pytest
import yaml
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
from sdk_trio.replication.manifest import (
    LARGE_FLEET,
    PASSED_ON,
    TenantDatabaseFile,
    child_environment,
    key_variables,
    render_manifest,
    replica_path,
    unset_variables,
)

TENANT = "8c5c4c9e-6f0f-4a52-9c3b-0a8f4b7e2d11"
OTHER = "0a5c4c9e-6f0f-4a52-9c3b-0a8f4b7e2d11"
DATABASES = [TenantDatabaseFile(TENANT, f"/data/{TENANT}.db")]

#: Values that the variables have while the file is expanded; none is a real key.
ENVIRONMENT = {"OBJECT_STORE_ACCESS_KEY_ID": "id", "BLOB_STORE_KEY": 'k # : " &*!|>%@`{}[],'}


def expanded(text: str, environ: dict[str, str] | None = None) -> str:
    """Put variables into a text as Go's os.Expand does, which the replicator uses."""
    values = ENVIRONMENT if environ is None else environ
    name = r"\$(?:\{([^}]*)\}|([A-Za-z_][A-Za-z0-9_]*)|([*#$@!?0-9-]))"
    return re.sub(name, lambda m: values.get(next(g for g in m.groups() if g), ""), text)


def rendered(options: ReplicationOptions, databases: Any = DATABASES, **arguments: Any) -> Any:
    return yaml.safe_load(expanded(render_manifest(options, databases, **arguments)))


def replica(target: ReplicaTargetType, **options: Any) -> dict[str, Any]:
    (entry,) = rendered(ReplicationOptions(replica_target_type=target, **options))["dbs"]
    assert entry["path"] == DATABASES[0].path
    found: dict[str, Any] = entry["replica"]
    return found


def test_the_settings_of_all_databases() -> None:
    options = ReplicationOptions(
        replica_target_type=ReplicaTargetType.LOCAL_DISK,
        sync_interval_seconds=7,
        snapshot_interval_minutes=90,
        retention_days=3,
        metrics_port=9191,
    )
    found = rendered(options, socket_path="/run/x.sock")
    del found["dbs"]
    assert found == {
        "addr": "127.0.0.1:9191",
        "socket": {"enabled": True, "path": "/run/x.sock", "permissions": 0o600},
        "logging": {"type": "json", "stderr": True},
        "sync-interval": "7s",
        "auto-recover": True,
        "snapshot": {"interval": "90m", "retention": "72h"},
    }
    assert "socket" not in rendered(options)


def test_another_file_in_ones_place_is_another_text_and_nothing_else() -> None:
    options = ReplicationOptions(replica_target_type=ReplicaTargetType.LOCAL_DISK)
    texts = [
        render_manifest(options, [attrs.evolve(DATABASES[0], identity=identity)])
        for identity in ("", "7-1a", "8-1a")
    ]
    assert len(set(texts)) == 3
    assert all(yaml.safe_load(text) == yaml.safe_load(texts[0]) for text in texts)


def test_an_object_store() -> None:
    store = ObjectStoreOptions(bucket="b", endpoint_url="http://h:1", force_path_style=True)
    assert replica(ReplicaTargetType.OBJECT_STORE, object_store=store) == {
        "type": "s3",
        "bucket": "b",
        "path": f"sdk/tenants/{TENANT}",
        "region": "us-east-1",
        "endpoint": "http://h:1",
        "force-path-style": True,
        "access-key-id": "id",
        "secret-access-key": "",
    }
    plain = replica(ReplicaTargetType.OBJECT_STORE, object_store=ObjectStoreOptions(bucket="b"))
    assert "endpoint" not in plain
    assert plain["force-path-style"] is False


def test_a_blob_store() -> None:
    blobs = BlobStoreOptions(account_name="a", endpoint_url="http://h:1/a")
    assert replica(ReplicaTargetType.BLOB_STORE, blob_store=blobs) == {
        "type": "abs",
        "account-name": "a",
        "account-key": ENVIRONMENT["BLOB_STORE_KEY"],
        "bucket": "sdk-tenants",
        "path": TENANT,
        "endpoint": "http://h:1/a",
    }


def test_cloud_storage() -> None:
    cloud = CloudStorageOptions(bucket="b", path_prefix="p", credentials_json_path="/c.json")
    found = replica(ReplicaTargetType.CLOUD_STORAGE, cloud_storage=cloud)
    assert found == {"type": "gs", "bucket": "b", "path": f"p/{TENANT}"}
    options = ReplicationOptions(
        replica_target_type=ReplicaTargetType.CLOUD_STORAGE, cloud_storage=cloud
    )
    environ = child_environment(options, {"TZ": "b", "AWS_CA_BUNDLE": "/python/bundle.pem"})
    assert environ == {
        "TZ": "b",
        "AWS_EC2_METADATA_DISABLED": "true",
        "GOOGLE_APPLICATION_CREDENTIALS": "/c.json",
    }


@given(st.sets(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)))
def test_the_replicator_gets_what_it_needs_and_nothing_else(names: set[str]) -> None:
    options = ReplicationOptions()
    keys = {"OBJECT_STORE_ACCESS_KEY_ID": "i", "OBJECT_STORE_SECRET_ACCESS_KEY": "k"}
    kept = {"PATH": "/bin", "HTTPS_PROXY": "http://p", "SSL_CERT_FILE": "/c.pem", **keys}
    environ = {**dict.fromkeys(names, "x"), "SDK__WEBHOOKS__SECRET": "s", **kept}
    found = child_environment(options, environ, render_manifest(options, DATABASES))
    again = {"LITESTREAM_ACCESS_KEY_ID", "LITESTREAM_SECRET_ACCESS_KEY"}
    assert set(found) - PASSED_ON == {*keys, *again}
    assert kept.items() <= found.items()
    # An operator's own configuration may refer to another variable.
    own = child_environment(options, {**environ, "MINE": "m", "ALSO": "a"}, "x: ${MINE}\ny: $ALSO")
    assert set(own) - PASSED_ON == {*keys, *again, "MINE", "ALSO"}


@pytest.mark.parametrize(
    ("kind", "role"),
    [
        (ReplicaTargetType.OBJECT_STORE, "AWS_ROLE_ARN"),
        (ReplicaTargetType.BLOB_STORE, "AZURE_CLIENT_ID"),
    ],
)
def test_a_role_of_the_machine_is_passed_on_where_no_key_is_set(
    kind: ReplicaTargetType, role: str
) -> None:
    options = ReplicationOptions(replica_target_type=kind)
    assert role in child_environment(options, {role: "r"})
    keys = {name: "k" for _, name in key_variables(options)}
    assert role not in child_environment(options, {role: "r", **keys})
    other = ReplicationOptions(replica_target_type=ReplicaTargetType.LOCAL_DISK)
    assert role not in child_environment(other, {role: "r"})
    [said, *_] = unset_variables(options, {})
    assert next(iter(keys)) in said
    assert unset_variables(options, keys) == ()


def test_an_instances_role_is_asked_for_where_no_keys_are_set() -> None:
    name = "AWS_EC2_METADATA_DISABLED"
    keys = {"OBJECT_STORE_ACCESS_KEY_ID": "i", "OBJECT_STORE_SECRET_ACCESS_KEY": "k"}
    options = ReplicationOptions()
    assert child_environment(options, keys)[name] == "true"
    assert child_environment(options, {**keys, name: "false"})[name] == "false"
    assert name not in child_environment(options, {"OBJECT_STORE_ACCESS_KEY_ID": "i"})


@pytest.mark.parametrize(
    ("host", "address"),
    [("h", "h:22"), ("2001:db8::1", "[2001:db8::1]:22"), ("[::1]", "[::1]:22")],
)
def test_sftp(host: str, address: str) -> None:
    sftp = SftpOptions(host=host, user="u", private_key_path="/k", host_key="ssh-ed25519 AAAA")
    assert replica(ReplicaTargetType.SFTP, sftp=sftp) == {
        "type": "sftp",
        "host": address,
        "user": "u",
        "path": f"/srv/sdk/tenants/{TENANT}",
        "key-path": "/k",
        "host-key": "ssh-ed25519 AAAA",
    }
    anyone = msgspec.structs.replace(sftp, host_key=None)
    assert "host-key" not in replica(ReplicaTargetType.SFTP, sftp=anyone)


def test_a_local_disk_may_be_relative_to_where_the_program_runs() -> None:
    options = ReplicationOptions(
        replica_target_type=ReplicaTargetType.LOCAL_DISK, local_disk=LocalDiskOptions(path="r")
    )
    assert replica_path(options, TENANT, working_directory="/here") == f"/here/r/{TENANT}"
    (entry,) = rendered(options, working_directory="/here")["dbs"]
    assert entry["replica"] == {"type": "file", "path": f"/here/r/{TENANT}"}


def test_no_tenant_is_an_empty_list() -> None:
    assert rendered(ReplicationOptions(), [])["dbs"] == []


@pytest.mark.parametrize("target", list(ReplicaTargetType))
def test_a_large_fleet_is_compacted_less_often_where_each_listing_is_a_request(
    target: ReplicaTargetType,
) -> None:
    options = ReplicationOptions(replica_target_type=target)
    databases = [TenantDatabaseFile(str(i), f"/{i}.db") for i in range(LARGE_FLEET + 1)]
    assert "levels" not in rendered(options, databases[1:])
    large = rendered(options, databases)
    if target is ReplicaTargetType.LOCAL_DISK:
        assert "levels" not in large
    else:
        assert large["levels"] == [{"interval": "5m"}, {"interval": "1h"}]
        assert large["l0-retention-check-interval"] == "10m"


@given(st.permutations([TenantDatabaseFile(name, f"/d/{name}.db") for name in "cadb"] * 2))
def test_any_order_gives_the_same_bytes(databases: list[TenantDatabaseFile]) -> None:
    found = render_manifest(ReplicationOptions(), databases)
    assert found == render_manifest(ReplicationOptions(), sorted(set(databases)))
    assert [e["path"] for e in yaml.safe_load(found)["dbs"]] == [f"/d/{n}.db" for n in "abcd"]


#: Any text that UTF-8 has, and more often what breaks files.
TEXTS = st.text(
    st.one_of(
        st.sampled_from(list("$${}'\"\\#:&*!|>%@`-,[]~\n\r\t\0 \x7f\x85\u2028\ufeff😀")),
        st.characters(exclude_categories=["Cs"]),
    ),
    min_size=1,
)
VARIABLES = {"HOME": "/home/x'\n", "a": '"', "x": "y"}


#: The replicator misreads these in a database's path, so they are refused.
PATHS = TEXTS.map(lambda text: "".join(c for c in text if c not in "#?%"))


@given(path=PATHS, bucket=TEXTS, prefix=TEXTS, region=TEXTS, endpoint=TEXTS, socket=TEXTS)
def test_any_value_arrives_as_it_is(
    path: str, bucket: str, prefix: str, region: str, endpoint: str, socket: str
) -> None:
    store = ObjectStoreOptions(
        bucket=bucket, path_prefix=prefix, region=region, endpoint_url=endpoint
    )
    options = ReplicationOptions(object_store=store)
    text = render_manifest(options, [TenantDatabaseFile(TENANT, path)], socket_path=socket)
    found = yaml.safe_load(expanded(text, VARIABLES))
    (entry,) = found["dbs"]
    assert found["socket"]["path"] == socket
    assert entry["path"] == path
    replica = entry["replica"]
    assert (replica["bucket"], replica["region"]) == (bucket, region)
    assert replica["endpoint"] == endpoint
    assert replica["path"] == replica_path(options, TENANT)
    assert replica["path"].endswith(TENANT)
    assert prefix.strip("/") in replica["path"]


@given(host=TEXTS, user=TEXTS, path=TEXTS, key=TEXTS, host_key=TEXTS)
def test_any_value_of_sftp_arrives_as_it_is(
    host: str, user: str, path: str, key: str, host_key: str
) -> None:
    sftp = SftpOptions(host=host, user=user, path=path, private_key_path=key, host_key=host_key)
    options = ReplicationOptions(replica_target_type=ReplicaTargetType.SFTP, sftp=sftp)
    (entry,) = yaml.safe_load(expanded(render_manifest(options, DATABASES), VARIABLES))["dbs"]
    found = entry["replica"]
    assert host in found["host"]
    assert (found["user"], found["key-path"], found["host-key"]) == (user, key, host_key)
    assert found["path"].startswith(path)


@pytest.mark.parametrize("character", "#?%")
def test_a_path_that_would_be_taken_for_another_file_is_refused(character: str) -> None:
    with pytest.raises(ValueError, match="another file"):
        render_manifest(ReplicationOptions(), [TenantDatabaseFile(TENANT, f"/d{character}/t.db")])


def test_a_name_that_is_not_text_is_refused() -> None:
    with pytest.raises(ValueError, match="UTF-8"):
        render_manifest(ReplicationOptions(), [TenantDatabaseFile(TENANT, "/d/\udcff.db")])


@given(key=st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="'")))
def test_a_key_arrives_whole_and_only_at_the_replicator(key: str) -> None:
    text = render_manifest(ReplicationOptions(), DATABASES)
    environ = {"OBJECT_STORE_ACCESS_KEY_ID": key, "OBJECT_STORE_SECRET_ACCESS_KEY": key[::-1]}
    (entry,) = yaml.safe_load(expanded(text, environ))["dbs"]
    found = entry["replica"]
    assert (found["access-key-id"], found["secret-access-key"]) == (key, key[::-1])
    assert "'${OBJECT_STORE_ACCESS_KEY_ID}'" in text
