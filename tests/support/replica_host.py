"""A host with tenants and a target; commands restore and verify the replicas."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import attrs
import trio

from sdk_trio.config import Settings
from sdk_trio.errors import ReplicatorError
from sdk_trio.records.tenants import Tenant
from sdk_trio.replication.control import ControlClient, control_socket_path
from sdk_trio.replication.manifest import TenantDatabaseFile, child_environment, render_manifest
from sdk_trio.storage.open import open_store
from sdk_trio.tenants.service import TenantService

from .command_forker import run_command
from .ports import free_port
from .programs import program
from .replica_targets import Target
from .replicating import sooner
from .waiting import PATIENCE_SECONDS, wait_until


@attrs.define
class Ended:
    """The exit status of a command, and its output."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@attrs.define
class ReplicaHost:
    """A data directory, its settings in a file, and the target's variables."""

    root: Path
    target: Target
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    tenants: dict[str, Tenant] = attrs.field(factory=dict)
    #: The seconds for a replicator to end. With an unreachable target it retries for half a minute.
    ending_seconds: float = PATIENCE_SECONDS

    def __attrs_post_init__(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        prefix = "Sdk:MultiTenant:FileDb:Replication:"
        keys = {
            "Sdk:Storage:Path": str(self.root / "data"),
            "Sdk:MultiTenant:Enabled": True,
            "Sdk:MultiTenant:TenantStatus:RequireVerifiedEmailForSuspension": False,
            f"{prefix}UseReplication": True,
            f"{prefix}MetricsPort": free_port(),
            f"{prefix}ConfigOutputPath": str(self.root / "replicator.yml"),
            f"{prefix}ReplicatorPidFilePath": str(self.root / "replicator.pid"),
            f"{prefix}AutoRegenerateDebounceWindow": "00:00:00.1",
            **{f"{prefix}{key}": value for key, value in self.target.settings.items()},
            **{f"Sdk:{key}": value for key, value in self.extra.items()},
        }
        self.config.write_text(json.dumps(_nested(keys)))

    @property
    def config(self) -> Path:
        return self.root / "settings.json"

    @property
    def databases(self) -> Path:
        return self.root / "data" / "tenants"

    @property
    def settings(self) -> Settings:
        document = json.loads(self.config.read_text())
        return Settings.from_mapping(document["Sdk"], standalone=True, receiver=False)

    def database(self, name: str) -> Path:
        return self.databases / f"{self.tenants[name].id}.db"

    def replica(self, name: str) -> Path:
        """Return the directory of a tenant's replica, if the target is a directory."""
        return self.target.directory / "replica" / self.replica_name(name)

    def replica_name(self, name: str) -> str:
        return f"{name}.{self.tenants[name].id}"

    # -- tenants ---------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        rows: int = 50,
        *,
        bytes_each: int = 200,
        organization_id: str | None = None,
    ) -> None:
        """Add a tenant, and write its database."""

        async def create() -> Tenant:
            async with open_store(self.settings, owner=f"test-{uuid.uuid4()}") as store:
                tenants = TenantService(self.settings, store.tenants)
                return await tenants.add(name, name=name, organization_id=organization_id)

        self.tenants[name] = trio.run(create)
        self.databases.mkdir(exist_ok=True, mode=0o700)
        self.write(name, rows, bytes_each=bytes_each)

    def suspend(self, name: str) -> None:
        assert self.run("tenant", "suspend", name).status == 0

    def reactivate(self, name: str) -> None:
        assert self.run("tenant", "reactivate", name).status == 0

    def write(self, name: str, rows: int, *, bytes_each: int = 200) -> None:
        """Insert rows like an application, each with a different value."""
        write_rows(self.database(name), rows, bytes_each=bytes_each)

    def rows(self, name: str) -> list[Any]:
        return rows_of(self.database(name))

    # -- commands --------------------------------------------------------------------------------

    @property
    def environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.upper().startswith("SDK")}
        return kept | self.target.environ

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "sdk_trio", *words, "--config", str(self.config)]

    def run(self, *words: str, seconds: float = PATIENCE_SECONDS) -> Ended:
        ended = run_command(
            [*words, "--config", str(self.config)],
            environ=self.environ,
            directory=self.root,
            seconds=seconds,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def restore(self, name: str, *options: str, output: Path | None = None) -> list[Any]:
        """Restore a tenant into a new file, and return its rows."""
        output = output or self.root / f"restored-{uuid.uuid4()}.db"
        ended = self.run(
            "replication", "restore", "--tenant", name, "--output", str(output), *options
        )
        assert ended.status == 0, ended.err
        return rows_of(output)

    def verify(self, *words: str) -> Ended:
        return self.run("replication", "verify", *words, "--format", "json")

    # -- the replicator --------------------------------------------------------------------------

    @contextmanager
    def replicating(self, *names: str) -> Iterator[None]:
        """Run the replicator alone on the databases of these tenants, or of all.

        It neither merges files by itself nor repairs an emptied target, so changes that a test
        makes to the replica persist.
        """
        options = self.settings.multi_tenant.file_db.replication
        files = [
            TenantDatabaseFile(self.replica_name(name), str(self.database(name)))
            for name in names or self.tenants
        ]
        manifest = self.root / "by-hand.yml"
        text = render_manifest(options, files, socket_path=control_socket_path(str(self.databases)))
        assert "auto-recover: true\n" in text
        text = text.replace("auto-recover: true\n", "levels: [{interval: 12h}]\n")
        text = sooner(text)
        manifest.write_text(text)
        command = [program("litestream"), "replicate", "-config", str(manifest)]
        with self._child(command, child_environment(options, self.environ)):
            self.wait_synced(*names)
            if self.target.kind == "LocalDisk":
                # The first snapshot follows shortly after the first sync.
                for name in names or self.tenants:
                    replica = self.replica(name)
                    wait_until(lambda replica=replica: list(replica.glob("ltx/9/*.ltx")))
            yield

    @contextmanager
    def supervised(self) -> Iterator[None]:
        """Run ``replication run`` on the tenants that are active; see :meth:`apply_tenants`."""
        assert self.run("replication", "render", "--output", str(self.manifest)).status == 0
        with self._child(self.command("replication", "run"), self.environ):
            self.wait_synced(*self.tenants)
            yield

    def apply_tenants(self, *synced: str) -> None:
        """Write and reload the configuration of the current tenants; wait for their replicas."""
        assert self.run("replication", "render", "--output", str(self.manifest)).status == 0
        os.kill(int((self.root / "replicator.pid").read_text()), signal.SIGHUP)
        expected = {str(self.database(name)) for name in synced}

        async def wait() -> None:
            control = ControlClient(control_socket_path(str(self.databases)))
            with trio.fail_after(PATIENCE_SECONDS):
                while True:
                    with contextlib.suppress(ReplicatorError):
                        listed = {each.path for each in await control.list_databases()}
                        if listed == expected:
                            return
                    await trio.sleep(0.1)

        trio.run(wait)
        self.wait_synced(*synced)

    def replicator_pid(self) -> int:
        """Return the replicator's process id; wait while it is being restarted."""
        control = ControlClient(control_socket_path(str(self.databases)))

        def answered() -> int | None:
            with contextlib.suppress(ReplicatorError):
                return trio.run(control.info).pid
            return None

        found: int = wait_until(answered)
        return found

    @property
    def manifest(self) -> Path:
        return self.root / "replicator.yml"

    @contextmanager
    def _child(self, command: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
        with (self.root / "replicator.log").open("ab") as log:
            child = subprocess.Popen(
                command, env=dict(environ), cwd=self.root, stdout=log, stderr=log
            )
        try:
            yield
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(self.ending_seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def wait_synced(self, *names: str) -> None:
        """Wait until the target has all data of these tenants, or of all."""

        async def wait() -> None:
            control = ControlClient(control_socket_path(str(self.databases)))
            for name in names or self.tenants:
                path = str(self.database(name))
                await _until(lambda path=path: control.sync(path))

        trio.run(wait)

    def left_behind(self) -> list[str]:
        """Return the names of files that a restore or a verification should have removed."""
        return [
            path.name
            for path in self.root.rglob("*")
            if ("restor" in path.name and path.suffix != ".db") or ".verifying-" in path.name
        ]


async def _until(action: Callable[[], Any]) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        while True:
            try:
                await action()
            except ReplicatorError:
                await trio.sleep(0.1)
            else:
                return


def write_rows(file: Path, rows: int, *, bytes_each: int = 200) -> None:
    database = apsw.Connection(os.fspath(file))
    database.set_busy_timeout(20_000)
    try:
        database.pragma("journal_mode", "wal")
        # As the runtime's own connections: the log is the replicator's.
        database.pragma("wal_autocheckpoint", 0)
        database.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        database.execute(
            "CREATE TABLE IF NOT EXISTS grants (id INTEGER PRIMARY KEY, body TEXT, cost REAL);"
            "CREATE INDEX IF NOT EXISTS by_body ON grants (body)"
        )
        database.execute(
            "INSERT INTO grants (body, cost) WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL "
            "SELECT i + 1 FROM n WHERE i < ?) SELECT hex(randomblob(?)), i / 3.0 FROM n",
            (rows, bytes_each // 2),
        )
    finally:
        database.close()


def rows_of(file: Path) -> list[Any]:
    database = apsw.Connection(os.fspath(file))
    try:
        assert database.execute("PRAGMA integrity_check").get == "ok"
        return list(database.execute("SELECT * FROM grants ORDER BY id"))
    finally:
        database.close()


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, last = key.split(":")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return document
