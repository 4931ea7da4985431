"""Databases of tenants, and the real replicator on them."""

import os
import re
import sqlite3
import subprocess
import uuid
from collections.abc import Iterable
from pathlib import Path

import attrs

from sdk_trio.config.fields import ReplicaTargetType
from sdk_trio.config.options.tenants import LocalDiskOptions, ReplicationOptions
from sdk_trio.replication.control import control_socket_path
from sdk_trio.replication.manifest import TenantDatabaseFile, render_manifest

from .ports import free_port
from .programs import program


def sooner(manifest: str) -> str:
    """Return a configuration with shorter intervals of the replicator.

    The settings allow no less than a second, because each sync costs a request.
    """
    assert "\nsync-interval: 1s\n" in manifest
    quick = manifest.replace("\nsync-interval: 1s\n", "\nsync-interval: 100ms\n")
    return re.sub(r"(\n  - path: .*)", r"\1\n    monitor-interval: 100ms", quick)


@attrs.define
class Fleet:
    """Databases in a directory, and a configuration of them in a file."""

    root: Path
    options: ReplicationOptions
    files: list[TenantDatabaseFile] = attrs.field(factory=list)
    #: False: the configuration is exactly the one that the program writes.
    hurried: bool = True

    @property
    def directory(self) -> Path:
        return self.root / "db"

    @property
    def config(self) -> Path:
        return Path(self.options.config_output_path)

    def add(self, count: int = 1) -> list[TenantDatabaseFile]:
        """Make databases with one row each."""
        made = []
        for _ in range(count):
            tenant_id = str(uuid.uuid4())
            made.append(TenantDatabaseFile(tenant_id, str(self.directory / f"{tenant_id}.db")))
            write(made[-1].path, 1)
        self.files += made
        return made

    def render(self, files: Iterable[TenantDatabaseFile] | None = None) -> None:
        """Write the configuration of these databases, or of all."""
        text = render_manifest(
            self.options,
            self.files if files is None else files,
            socket_path=control_socket_path(str(self.directory)),
        )
        self.config.write_text(sooner(text) if self.hurried else text)

    def restored(self, file: TenantDatabaseFile) -> list[int]:
        """Restore a database from its replica with the binary, and return its rows."""
        out = self.root / f"restored-{uuid.uuid4()}.db"
        subprocess.run(
            [program("litestream"), "restore", "-config", self.config, "-o", out, file.path],
            check=True,
            capture_output=True,
            timeout=60,
        )
        return rows(str(out))


def local_fleet(root: Path, **changes: object) -> Fleet:
    """A fleet whose target is a directory."""
    program("litestream")
    (root / "db").mkdir(mode=0o700, parents=True)
    settings: dict[str, object] = {
        "use_replication": True,
        "replica_target_type": ReplicaTargetType.LOCAL_DISK,
        "local_disk": LocalDiskOptions(path=str(root / "replica")),
        "config_output_path": str(root / "replicator.yml"),
        "replicator_pid_file_path": str(root / "replicator.pid"),
        "metrics_port": free_port(),
        **changes,
    }
    return Fleet(root, ReplicationOptions(**settings))


def write(path: str, count: int) -> None:
    """Insert rows like an application."""
    connection = sqlite3.connect(path, timeout=20)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE IF NOT EXISTS t (x INTEGER PRIMARY KEY)")
        for _ in range(count):
            connection.execute("INSERT INTO t DEFAULT VALUES")
        connection.commit()
    finally:
        connection.close()


def rows(path: str) -> list[int]:
    connection = sqlite3.connect(path)
    try:
        return [row[0] for row in connection.execute("SELECT x FROM t ORDER BY x")]
    finally:
        connection.close()


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def replicators_of(directory: Path) -> list[int]:
    """Return the replicators that run with a configuration in ``directory``."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        of_ours = str(directory).encode()
        ours = b"replicate" in command and any(word.startswith(of_ours) for word in command)
        # For a moment it is still our launcher.
        if ours and b"-I" not in command and is_running(int(entry)):
            found.append(int(entry))
    return found


def said(caplog, event: str) -> list[dict]:
    """Return the fields of every log event with this name."""
    return [record.sdk[1] for record in caplog.records if getattr(record, "sdk", ("",))[0] == event]
