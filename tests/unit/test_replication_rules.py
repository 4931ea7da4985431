"""The findings of the validator about replication; none while it is off."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.config import Settings, unmet_needs
from sdk_trio.config.bind import bind
from sdk_trio.config.check import Findings, check
from sdk_trio.config.probe import is_encrypted_key
from sdk_trio.config.sources import read_section

REPLICATION = "MultiTenant:FileDb:Replication"
ON: dict[str, dict[str, Any]] = {
    "ObjectStore": {"Bucket": "b"},
    "BlobStore": {"AccountName": "a"},
    "CloudStorage": {"Bucket": "b", "CredentialsJsonPath": "/c.json"},
    "Sftp": {"Host": "h", "User": "u", "PrivateKeyPath": "/k", "HostKey": "ssh-ed25519 AAAA"},
    "LocalDisk": {},
}

#: Each value that is written into the replicator's file.
WRITTEN = [
    ("ObjectStore", "Bucket"),
    ("ObjectStore", "Region"),
    ("ObjectStore", "PathPrefix"),
    ("BlobStore", "AccountName"),
    ("BlobStore", "Container"),
    ("BlobStore", "PathPrefix"),
    ("CloudStorage", "Bucket"),
    ("CloudStorage", "PathPrefix"),
    ("Sftp", "Host"),
    ("Sftp", "User"),
    ("Sftp", "Path"),
    ("Sftp", "PrivateKeyPath"),
    ("Sftp", "HostKey"),
    ("LocalDisk", "Path"),
]


def found(target: str = "LocalDisk", on: bool = True, **changes: Any) -> Findings:
    """Return the findings about a target with valid options, except for the changes."""
    keys = {f"{REPLICATION}:{target}:{name}": value for name, value in ON[target].items()}
    keys |= {f"{REPLICATION}:UseReplication": on, f"{REPLICATION}:ReplicaTargetType": target}
    keys |= {name.replace("__", ":"): value for name, value in changes.items()}
    bound = bind([read_section(keys, None)])
    assert bound.problems == ()
    return check(bound.settings, standalone=True, receiver=False)


def key(*path: str) -> str:
    return "__".join((REPLICATION.replace(":", "__"), *path))


def keys(findings: Findings) -> tuple[list[str], list[str]]:
    return (
        [problem.key.removeprefix(f"Sdk:{REPLICATION}:") for problem in findings.problems],
        [warning.key.removeprefix(f"Sdk:{REPLICATION}:") for warning in findings.warnings],
    )


@pytest.mark.parametrize("target", ON)
def test_a_target_that_is_set_up_is_neither_wrong_nor_odd(target: str) -> None:
    assert found(target) == Findings()


@pytest.mark.parametrize(("target", "name"), WRITTEN)
@pytest.mark.parametrize("value", ["/a$b", "/${HOME}", "/a\nb", "/a\x7f", "/a\tb"])
def test_a_value_that_the_file_cannot_hold_is_a_problem(target: str, name: str, value: str) -> None:
    changes = {key(target, name): value}
    problems, _ = keys(found(target, **changes))
    assert f"{target}:{name}" in problems
    assert found(target, on=False, **changes) == Findings()


@given(st.text())
def test_no_text_makes_the_validator_fail(text: str) -> None:
    found("Sftp", **{key("Sftp", "Host"): text, key("Sftp", "Path"): text})
    found("ObjectStore", **{key("ObjectStore", "EndpointUrl"): text})


@pytest.mark.parametrize("path", ["data#1", "a?b", "50%", "$HOME/data", "a\nb"])
def test_a_directory_whose_databases_would_be_misread_is_a_problem(path: str) -> None:
    (problem,) = found(Storage__Path=path).problems
    assert problem.key == "Sdk:Storage:Path"
    assert found(on=False, Storage__Path=path) == Findings()
    elsewhere = found(Storage__Path=path, MultiTenant__FileDb__Directory="/fine")
    assert elsewhere.problems == ()
    (problem,) = found(MultiTenant__FileDb__Directory=path).problems
    assert problem.key == "Sdk:MultiTenant:FileDb:Directory"


@pytest.mark.parametrize(
    ("target", "changes", "problem"),
    [
        ("Sftp", {"Host": "h:2222"}, "Sftp:Host"),
        ("Sftp", {"Host": "u@h"}, "Sftp:Host"),
        ("Sftp", {"Host": "h/srv"}, "Sftp:Host"),
        ("ObjectStore", {"PathPrefix": "s3://b/p"}, "ObjectStore:PathPrefix"),
        ("LocalDisk", {"Path": "file:///srv"}, "LocalDisk:Path"),
    ],
)
def test_a_value_of_another_kind_is_a_problem(
    target: str, changes: dict[str, str], problem: str
) -> None:
    problems, _ = keys(found(target, **{key(target, n): v for n, v in changes.items()}))
    assert problems == [problem]


@pytest.mark.parametrize("host", ["::1", "[2001:db8::1]", "10.0.0.1", "sftp.example.com"])
def test_a_host_may_be_a_name_or_any_address(host: str) -> None:
    assert found("Sftp", **{key("Sftp", "Host"): host}) == Findings()


def test_the_two_files_are_needed_and_not_the_same() -> None:
    auto = {key("AutoRegenerateOnTenantChange"): True}
    config, pid = key("ConfigOutputPath"), key("ReplicatorPidFilePath")
    assert found(**auto) == Findings()
    assert keys(found(**auto, **{config: "", pid: " "}))[0] == [
        "ConfigOutputPath",
        "ReplicatorPidFilePath",
    ]
    assert keys(found(**auto, **{config: "/x", pid: "/x"}))[0] == ["ReplicatorPidFilePath"]
    assert found(**{config: "", pid: ""}) == Findings()
    supervised = found(**{key("Supervise"): True, config: "", pid: ""})
    assert keys(supervised)[0] == ["ConfigOutputPath"]


def test_the_port_of_the_metrics_is_not_one_of_ours() -> None:
    taken = {"Server__Bind": ["0.0.0.0:9090"]}
    assert keys(found(**taken))[0] == ["MetricsPort"]
    assert found(**taken, **{key("MetricsPort"): 9091}) == Findings()
    assert found(Server__Bind=["192.0.2.1:9090"]) == Findings()
    assert keys(found(Admin__Bind="127.0.0.1:9090"))[0] == ["MetricsPort"]
    assert found(Admin__Bind="127.0.0.1:9090", Admin__Enabled=False) == Findings()


@pytest.mark.parametrize(
    ("target", "changes", "warning"),
    [
        (
            "LocalDisk",
            {"SyncIntervalSeconds": 60, "HealthCheckMaxLagSeconds": 59},
            "HealthCheckMaxLagSeconds",
        ),
        (
            "LocalDisk",
            {"SnapshotIntervalMinutes": 60, "RetentionDays": 42},
            "SnapshotIntervalMinutes",
        ),
        (
            "ObjectStore",
            {"ObjectStore__EndpointUrl": "http://minio:9000"},
            "ObjectStore:ForcePathStyle",
        ),
        ("Sftp", {"Sftp__HostKey": None}, "Sftp:HostKey"),
    ],
)
def test_unusual_settings_that_work_are_a_warning(
    target: str, changes: dict[str, Any], warning: str
) -> None:
    changes = {key(name): value for name, value in changes.items()}
    assert keys(found(target, **changes)) == ([], [warning])
    assert found(target, on=False, **changes) == Findings()


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        ("LocalDisk", {"SyncIntervalSeconds": 60, "HealthCheckMaxLagSeconds": 60}),
        (
            "LocalDisk",
            {
                "SyncIntervalSeconds": 60,
                "HealthCheckMaxLagSeconds": 1,
                "HealthCheckEnabled": False,
            },
        ),
        ("LocalDisk", {"SnapshotIntervalMinutes": 60, "RetentionDays": 41}),
        ("ObjectStore", {"ObjectStore__EndpointUrl": "http://127.0.0.1:9000"}),
        ("ObjectStore", {"ObjectStore__EndpointUrl": "http://[::1]:9000"}),
        ("ObjectStore", {"ObjectStore__EndpointUrl": "https://s3.example.com"}),
        (
            "ObjectStore",
            {"ObjectStore__EndpointUrl": "http://minio:1", "ObjectStore__ForcePathStyle": True},
        ),
    ],
)
def test_usual_settings_cause_no_warning(target: str, changes: dict[str, Any]) -> None:
    assert found(target, **{key(name): value for name, value in changes.items()}) == Findings()


def test_replication_needs_tenants() -> None:
    on = {f"{REPLICATION}:UseReplication": True, f"{REPLICATION}:ReplicaTargetType": "LocalDisk"}
    settings = Settings.from_mapping({**on, "AccessToken": "t"}, receiver=False)
    (need,) = unmet_needs(settings)
    assert need.key == f"Sdk:{REPLICATION}:UseReplication"
    enabled = Settings.from_mapping(
        {**on, "AccessToken": "t", "MultiTenant:Enabled": True}, receiver=False
    )
    assert unmet_needs(enabled) == unmet_needs(Settings()) == []


@given(st.binary() | st.binary().map(lambda b: b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + b))
def test_any_file_has_a_form(content: bytes) -> None:
    assert is_encrypted_key(content) in (True, False, None)
