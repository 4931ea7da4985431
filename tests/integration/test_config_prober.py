"""Things on the machine that settings refer to: files, directories, variables."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.programs import program

from sdk_trio.config import Loaded, read_settings

# A test value.
SECRET = "whsec_z6fMa4YWa088j5EP9gJ8LDaGxrBzHpIg"
REPLICATION = "Sdk:MultiTenant:FileDb:Replication"
NOTIFICATIONS = "Sdk:MultiTenant:Notifications"


def probed(tmp_path: Path, overrides: dict[str, Any], **environ: str) -> Loaded:
    return read_settings(
        overrides=overrides,
        environ={"SDK__ACCESSTOKEN": "token", "SDK__WEBHOOKS__SECRET": SECRET, **environ},
        directory=tmp_path,
        secrets_directory=tmp_path / "secrets",
    )


def problem_keys(loaded: Loaded) -> list[str]:
    return [problem.key for problem in loaded.problems]


def target(name: str, **options: str) -> dict[str, Any]:
    base = {f"{REPLICATION}:UseReplication": True, f"{REPLICATION}:ReplicaTargetType": name}
    return base | {f"{REPLICATION}:{name}:{key}": value for key, value in options.items()}


def test_certificates_must_exist(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    overrides = {"Sdk:Server:CertFile": str(certificate), "Sdk:Server:KeyFile": str(key)}
    both = ["Sdk:Server:CertFile", "Sdk:Server:KeyFile"]
    assert problem_keys(probed(tmp_path, overrides)) == both
    certificate.touch()
    key.touch()
    assert problem_keys(probed(tmp_path, overrides)) == []


@pytest.mark.parametrize(
    ("name", "key", "options"),
    [
        ("CloudStorage", "CredentialsJsonPath", {"Bucket": "b"}),
        ("Sftp", "PrivateKeyPath", {"Host": "h", "User": "u"}),
    ],
)
def test_credential_files_must_exist(
    tmp_path: Path, name: str, key: str, options: dict[str, str]
) -> None:
    path = tmp_path / "credential"
    overrides = target(name, **options, **{key: str(path)})
    assert problem_keys(probed(tmp_path, overrides)) == [f"{REPLICATION}:{name}:{key}"]
    path.touch()
    assert problem_keys(probed(tmp_path, overrides)) == []
    path.unlink()
    off = {**overrides, f"{REPLICATION}:UseReplication": False}
    assert problem_keys(probed(tmp_path, off)) == []


def test_the_replica_directory_is_created(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    assert problem_keys(probed(tmp_path, target("LocalDisk", Path=str(directory)))) == []
    assert directory.is_dir()


def test_a_replica_directory_that_cannot_be_created_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        overrides = target("LocalDisk", Path=str(path))
        assert problem_keys(probed(tmp_path, overrides)) == [f"{REPLICATION}:LocalDisk:Path"]


@pytest.mark.parametrize("switch", ["AutoRegenerateOnTenantChange", "Supervise"])
def test_the_configuration_of_the_replicator_must_be_writable(tmp_path: Path, switch: str) -> None:
    overrides = {
        **target("LocalDisk", Path=str(tmp_path / "replica")),
        f"{REPLICATION}:{switch}": True,
        f"{REPLICATION}:ConfigOutputPath": str(tmp_path / "none" / "replicator.yml"),
    }
    assert problem_keys(probed(tmp_path, overrides)) == [f"{REPLICATION}:ConfigOutputPath"]
    (tmp_path / "none").mkdir()
    assert problem_keys(probed(tmp_path, overrides)) == []


def test_unset_variables_are_warnings_where_they_are_used(tmp_path: Path) -> None:
    overrides = {
        **target("BlobStore", AccountName="a"),
        f"{NOTIFICATIONS}:Enabled": True,
        f"{NOTIFICATIONS}:Email:FromAddress": "a@example.com",
    }
    loaded = probed(tmp_path, overrides)
    assert loaded.problems == ()
    assert [warning.key for warning in loaded.warnings] == [
        f"{REPLICATION}:BlobStore:AccessKeyEnvVar",
        f"{NOTIFICATIONS}:Email:EmailProviderA:ApiKeyEnvVar",
    ]
    assert probed(tmp_path, overrides, BLOB_STORE_KEY="k", EMAIL_API_KEY="k").warnings == ()
    assert len(probed(tmp_path, overrides, BLOB_STORE_KEY="", EMAIL_API_KEY="k").warnings) == 1


def test_only_its_backend_needs_the_dsn(tmp_path: Path) -> None:
    assert probed(tmp_path, {}).warnings == ()
    (warning,) = probed(tmp_path, {"Sdk:Storage:Backend": "Postgres"}).warnings
    assert warning.key == "Sdk:Storage:PostgresDsnEnvVar"


def made_key(path: Path, kind: str, form: str, passphrase: str) -> Path:
    made = subprocess.run(
        [program("ssh-keygen"), "-q", "-t", kind, "-N", passphrase, "-f", path, *form.split()],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"this ssh-keygen makes no such key: {made.stderr}")
    return path


@pytest.mark.parametrize(
    ("kind", "form"),
    [("ed25519", ""), ("rsa", ""), ("rsa", "-m PEM"), ("ecdsa", "-m PEM"), ("rsa", "-m PKCS8")],
)
def test_a_private_key_with_a_passphrase_is_refused(tmp_path: Path, kind: str, form: str) -> None:
    host = {"Host": "h", "User": "u", "HostKey": "ssh-ed25519 AAAA"}
    plain = made_key(tmp_path / "plain", kind, form, "")
    loaded = probed(tmp_path, target("Sftp", **host, PrivateKeyPath=str(plain)))
    assert (loaded.problems, loaded.warnings) == ((), ())
    locked = made_key(tmp_path / "locked", kind, form, "a passphrase")
    overrides = target("Sftp", **host, PrivateKeyPath=str(locked))
    (problem,) = probed(tmp_path, overrides).problems
    assert problem.key == f"{REPLICATION}:Sftp:PrivateKeyPath"
    assert "passphrase" in problem.message
    off = {**overrides, f"{REPLICATION}:UseReplication": False}
    assert problem_keys(probed(tmp_path, off)) == []
    public = target("Sftp", **host, PrivateKeyPath=f"{plain}.pub")
    assert [w.key for w in probed(tmp_path, public).warnings] == [problem.key]


def test_the_configuration_of_the_replicator_is_a_file(tmp_path: Path) -> None:
    overrides = {
        **target("LocalDisk", Path=str(tmp_path / "replica")),
        f"{REPLICATION}:AutoRegenerateOnTenantChange": True,
        f"{REPLICATION}:ConfigOutputPath": str(tmp_path),
    }
    assert problem_keys(probed(tmp_path, overrides)) == [f"{REPLICATION}:ConfigOutputPath"]


@pytest.mark.parametrize("value", ["it's", "key\n", "two\nlines", "\u2028", "k\x00"])
def test_a_key_that_the_replicator_would_misread_is_a_warning(tmp_path: Path, value: str) -> None:
    overrides = target("BlobStore", AccountName="a")
    (warning,) = probed(tmp_path, overrides, BLOB_STORE_KEY=value).warnings
    assert warning.key == f"{REPLICATION}:BlobStore:AccessKeyEnvVar"
    assert value not in str(warning)
    assert probed(tmp_path, overrides, BLOB_STORE_KEY='a#b: "c"\\{}==').warnings == ()


def test_a_relative_directory_starts_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "odd#name"
    odd.mkdir()
    monkeypatch.chdir(odd)
    overrides = target("LocalDisk", Path=str(tmp_path / "replica"))
    assert problem_keys(probed(tmp_path, overrides)) == ["Sdk:Storage:Path"]
    absolute = {**overrides, "Sdk:Storage:Path": str(tmp_path / "data")}
    assert problem_keys(probed(tmp_path, absolute)) == []
