"""The real replicator reads its configuration: it ignores unknown keys."""

import http.client
import json
import os
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from support.ports import free_port
from support.programs import program
from support.waiting import PATIENCE_SECONDS, wait_until

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
    TenantDatabaseFile,
    child_environment,
    render_manifest,
)

#: A directory with every awkward character; the validator refuses only the dollar.
HOSTILE = 'it\'s a $HOME ${HOME} "dir" é : - ☃ & [x]'


@pytest.fixture
def directory() -> Iterator[Path]:
    # Short, because a socket's path is.
    with tempfile.TemporaryDirectory(prefix="repl") as found:
        yield Path(found)


def database(directory: Path, name: str = "t1") -> TenantDatabaseFile:
    directory.mkdir(mode=0o700, exist_ok=True)
    file = directory / f"{name}.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (x)")
    return TenantDatabaseFile(name, str(file))


def options_for(target: ReplicaTargetType, directory: Path) -> ReplicationOptions:
    key = directory / "key"
    return ReplicationOptions(
        replica_target_type=target,
        metrics_port=free_port(),
        sync_interval_seconds=3,
        object_store=ObjectStoreOptions(bucket="buck", endpoint_url="http://127.0.0.1:9"),
        blob_store=BlobStoreOptions(account_name="acc", endpoint_url="http://127.0.0.1:9/acc"),
        cloud_storage=CloudStorageOptions(bucket="buck", credentials_json_path=str(key)),
        sftp=SftpOptions(host="::1", port=2222, user="u", private_key_path=str(key)),
        local_disk=LocalDiskOptions(path=str(directory / "replica")),
    )


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (ReplicaTargetType.OBJECT_STORE, "s3"),
        (ReplicaTargetType.BLOB_STORE, "abs"),
        (ReplicaTargetType.CLOUD_STORAGE, "gs"),
        (ReplicaTargetType.SFTP, "sftp"),
        (ReplicaTargetType.LOCAL_DISK, "file"),
    ],
)
def test_each_target_is_accepted(directory: Path, target: ReplicaTargetType, kind: str) -> None:
    databases = [database(directory / HOSTILE, name) for name in ("t1", "t2")]
    manifest = directory / "m.yml"
    manifest.write_text(render_manifest(options_for(target, directory), databases))
    done = subprocess.run(
        [program("litestream"), "databases", "-config", str(manifest)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    lines = done.stdout.splitlines()[1:]
    assert [line.rsplit(maxsplit=1) for line in lines] == [[db.path, kind] for db in databases]


@attrs.define
class Running:
    log: Path

    def messages(self) -> list[dict[str, Any]]:
        # The stores' own libraries write other lines; what follows the last is still being written.
        lines = self.log.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def message(self, text: str, **fields: Any) -> dict[str, Any]:
        """Wait for a line of its log with that message and these fields."""

        def found() -> dict[str, Any] | None:
            lines = (line for line in self.messages() if line["msg"] == text)
            return next((line for line in lines if fields.items() <= line.items()), None)

        line: dict[str, Any] = wait_until(found, self.log.read_text)
        return line


@contextmanager
def replicating(
    options: ReplicationOptions, directory: Path, databases: Any, **environ: str
) -> Iterator[Running]:
    manifest, log = directory / "m.yml", directory / "log"
    socket_path = str(directory / "s.sock")
    manifest.write_text(render_manifest(options, databases, socket_path=socket_path))
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [program("litestream"), "replicate", "-config", str(manifest)],
            stderr=stderr,
            env=child_environment(options, {**os.environ, **environ}),
        )
    try:
        yield Running(log)
    finally:
        process.kill()
        process.wait()


def listed(socket_path: Path) -> Any:
    connection = http.client.HTTPConnection("litestream")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(PATIENCE_SECONDS)
    connection.sock.connect(str(socket_path))
    with closing(connection):
        connection.request("GET", "/list")
        return json.loads(connection.getresponse().read())


def test_it_replicates_exactly_the_databases_of_the_file(directory: Path) -> None:
    options = options_for(ReplicaTargetType.LOCAL_DISK, directory)
    options = msgspec.structs.replace(
        options, local_disk=LocalDiskOptions(path=str(directory / "r $x 'y"))
    )
    wanted = [database(directory / HOSTILE, name) for name in ("t1", "t2")]
    database(directory / HOSTILE, "t3")
    with replicating(options, directory, wanted) as running:
        running.message("control socket listening")

        def all_synced() -> Any:
            found = listed(directory / "s.sock")["databases"]
            return found if all(entry.get("last_sync_at") for entry in found) else None

        found = wait_until(all_synced, running.log.read_text)
        assert sorted(entry["path"] for entry in found) == [db.path for db in wanted]
        assert {path.name for path in (directory / "r $x 'y").iterdir()} == {"t1", "t2"}
        line = running.message("replicating to", type="file")
        assert line["sync-interval"] == 3_000_000_000
        assert (directory / "s.sock").stat().st_mode & 0o777 == 0o600
        running.message(
            "serving metrics on", url=f"http://127.0.0.1:{options.metrics_port}/metrics"
        )
        # Level 9 is the snapshots'.
        hour = 3600 * 10**9
        running.message("starting compaction monitor", level=9, interval=hour)


def test_a_path_that_we_refuse_is_one_that_it_misreads(directory: Path) -> None:
    """The reason of the refusal: when this fails, the refusal can go."""
    options = options_for(ReplicaTargetType.LOCAL_DISK, directory)
    wanted = database(directory / "odd#name")
    plain = attrs.evolve(wanted, path=str(directory / "plain.db"))
    with pytest.raises(ValueError, match="another file"):
        render_manifest(options, [wanted])
    text = render_manifest(options, [plain]).replace("/plain.db", "/odd#name/t1.db")
    manifest = directory / "m.yml"
    manifest.write_text(text)
    process = subprocess.Popen(
        [program("litestream"), "replicate", "-config", str(manifest)], stderr=subprocess.DEVNULL
    )
    try:
        wait_until((directory / "odd").exists)
    finally:
        process.kill()
        process.wait()


def test_a_large_fleet_on_an_object_store_is_looked_at_less_often(directory: Path) -> None:
    options = options_for(ReplicaTargetType.OBJECT_STORE, directory)
    databases = [database(directory / "d", f"t{i:02}") for i in range(LARGE_FLEET + 1)]
    minute = 60 * 10**9
    with replicating(options, directory, databases, OBJECT_STORE_ACCESS_KEY_ID="k#") as running:
        running.message(
            "replicating to",
            bucket="buck",
            path="sdk/tenants/t00",
            region="us-east-1",
            endpoint="http://127.0.0.1:9",
        )
        running.message("starting compaction monitor", level=1, interval=5 * minute)
        running.message("starting compaction monitor", level=2, interval=60 * minute)
        running.message("starting L0 retention monitor", interval=10 * minute)
        assert "k#" not in running.log.read_text()
