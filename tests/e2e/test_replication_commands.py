"""``replication run`` and ``replication status`` as processes, with the real replicator."""

import base64
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import attrs
import pytest
import trio
from support.command_forker import Program, run_command, start_program
from support.ports import free_port
from support.programs import program
from support.replicating import is_running, replicators_of, write
from support.waiting import wait_until

from sdk_trio.errors import ReplicatorError
from sdk_trio.replication.control import ControlClient

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

REPLICATION = "Sdk:MultiTenant:FileDb:Replication"


@attrs.define
class Workplace:
    """A data directory with tenants, and the commands that work on it."""

    root: Path
    port: int = attrs.field(factory=free_port)
    started: list = attrs.field(factory=list)
    secret: str = "whsec_" + base64.b64encode(b"a fixed secret of these tests").decode()

    @property
    def pid_file(self) -> Path:
        return self.root / "replicator.pid"

    @property
    def config(self) -> Path:
        return self.root / "replicator.yml"

    @property
    def settings(self) -> list[str]:
        keys = {
            "Sdk:Storage:Path": self.root / "data",
            "Sdk:MultiTenant:Enabled": "true",
            f"{REPLICATION}:UseReplication": "true",
            f"{REPLICATION}:ReplicaTargetType": "LocalDisk",
            f"{REPLICATION}:LocalDisk:Path": self.root / "replica",
            f"{REPLICATION}:ConfigOutputPath": self.config,
            f"{REPLICATION}:ReplicatorPidFilePath": self.pid_file,
            f"{REPLICATION}:MetricsPort": self.port,
        }
        return [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]

    def start(self, *words: str) -> Program:
        with open(self.root / f"log-{len(self.started)}", "wb") as log:
            process = start_program(
                [*words, *self.settings],
                directory=self.root,
                environ={**os.environ, "SDK__WEBHOOKS__SECRET": self.secret},
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        return process

    def __call__(self, *words: str) -> subprocess.CompletedProcess:
        return run_command(
            [*words[:2], *self.settings, *words[2:]],
            environ=os.environ,
            directory=self.root,
            seconds=60,
        )

    def add_tenant(self, name: str) -> Path:
        """Add a tenant, whose database has a row, and write the configuration of all."""
        done = self("tenant", "add", name, "--name", name, "--format", "json")
        assert done.returncode == 0, done.stderr
        directory = self.root / "data" / "tenants"
        directory.mkdir(mode=0o700, exist_ok=True)
        file = directory / f"{json.loads(done.stdout)['id']}.db"
        write(str(file), 1)
        rendered = self("replication", "render", "--output", str(self.config))
        assert rendered.returncode == 0, rendered.stderr
        return file

    def status(self) -> tuple[int, dict[str, dict]]:
        done = self("replication", "status", "--format", "json")
        rows = json.loads(done.stdout) if done.stdout else []
        return done.returncode, {row["identifier"]: row for row in rows}

    def log(self, number: int = -1) -> str:
        return (self.root / f"log-{range(len(self.started))[number]}").read_text()

    def restored(self, file: Path) -> list[int]:
        out = self.root / f"restored-{time.monotonic_ns()}.db"
        subprocess.run(
            [program("litestream"), "restore", "-config", self.config, "-o", out, file],
            check=True,
            capture_output=True,
        )
        connection = sqlite3.connect(out)
        try:
            return [row[0] for row in connection.execute("SELECT x FROM t ORDER BY x")]
        finally:
            connection.close()


@pytest.fixture
def workplace(tmp_path):
    program("litestream")
    workplace = Workplace(tmp_path)
    yield workplace
    for process in workplace.started:
        if process.poll() is None:
            process.kill()
            process.wait()
    wait_until(lambda: replicators_of(tmp_path) == [])


def replicated(workplace: Workplace, count: int) -> bool:
    # Not by the command, which takes half a second of a processor.
    client = ControlClient(str(workplace.root / "data" / "tenants" / "replicator.sock"))
    try:
        listed = trio.run(client.list_databases)
    except ReplicatorError:
        return False
    return len(listed) == count and all(each.last_sync_at for each in listed)


def test_it_reloads_on_a_hangup_shows_its_status_and_ends_on_term(workplace):
    first = workplace.add_tenant("acme")
    assert workplace.status()[0] == 69
    assert "'replication run'" in workplace("replication", "status").stderr
    process = workplace.start("replication", "run", "--pid-file", str(workplace.pid_file))
    wait_until(workplace.pid_file.exists)
    assert int(workplace.pid_file.read_text()) == process.pid
    wait_until(lambda: replicated(workplace, 1))

    second = workplace.add_tenant("globex")
    status, rows = workplace.status()
    assert (status, rows["globex"]["state"], rows["acme"]["state"]) == (1, "Unhealthy", "Healthy")
    assert next(iter(rows)) == "globex", "the worst comes first"
    os.kill(process.pid, signal.SIGHUP)
    wait_until(lambda: replicated(workplace, 2))
    status, rows = workplace.status()
    assert (status, set(rows)) == (0, {"acme", "globex"})

    replicator = replicators_of(workplace.root)
    workplace.config.write_text("dbs: [")
    os.kill(process.pid, signal.SIGHUP)
    wait_until(lambda: "replication.failed" in workplace.log())
    assert replicators_of(workplace.root) == replicator
    assert replicated(workplace, 2)

    write(str(first), 4)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    assert not workplace.pid_file.exists()
    assert workplace.status()[0] == 69
    assert workplace("replication", "render", "--output", str(workplace.config)).returncode == 0
    assert workplace.restored(first) == [1, 2, 3, 4, 5]
    assert workplace.restored(second) == [1]


def test_a_replicator_with_unreadable_metrics_is_not_healthy(workplace):
    """The port is another program's: the replicator logs that once, and replicates."""
    workplace.add_tenant("acme")
    with HTTPServer(("127.0.0.1", workplace.port), SimpleHTTPRequestHandler) as other:
        serving = threading.Thread(target=other.serve_forever)
        serving.start()
        try:
            workplace.start("replication", "run")
            wait_until(lambda: replicated(workplace, 1))
            done = workplace("replication", "status")
        finally:
            other.shutdown()
            serving.join()
    assert done.returncode == 1
    assert "Unhealthy: the replicator does not serve its metrics" in done.stderr
    assert "MetricsPort" in done.stderr


def test_a_daemon_and_a_replicator_beside_it_need_no_operator(workplace):
    daemon = (
        "--standalone",
        "--set=Sdk:Server:Bind:0=127.0.0.1:0",
        "--set=Sdk:Admin:Bind=127.0.0.1:0",
        f"--set={REPLICATION}:AutoRegenerateOnTenantChange=true",
        f"--set={REPLICATION}:AutoRegenerateDebounceWindow=00:00:00.2",
        "--set=Sdk:Webhooks:RequireHttps=false",
    )
    replicator = workplace.start("replication", "run")
    wait_until(workplace.pid_file.exists)
    workplace.start("run", *daemon)
    wait_until(lambda: "runtime.started" in workplace.log())
    wait_until(lambda: replicated(workplace, 0))
    added = workplace("tenant", "add", "acme", "--name", "Acme", "--format", "json")
    (workplace.root / "data" / "tenants").mkdir(mode=0o700, exist_ok=True)
    write(str(workplace.root / "data" / "tenants" / f"{json.loads(added.stdout)['id']}.db"), 1)
    wait_until(lambda: replicated(workplace, 1))
    workplace("tenant", "deactivate", "acme")
    wait_until(lambda: replicated(workplace, 0))
    for process in reversed(workplace.started):
        process.terminate()
        assert process.wait(60) == 0
    assert "replication.reloaded" in workplace.log(0)
    assert replicator.returncode == 0


def test_killed_with_9_its_child_ends_too_and_the_next_start_runs_one(workplace):
    file = workplace.add_tenant("acme")
    process = workplace.start("replication", "run")
    wait_until(lambda: replicated(workplace, 1))
    [orphan] = replicators_of(workplace.root)
    # Longer than the idle time of a worker thread, whose end must not be that of the child.
    if os.environ.get("SDK_TEST_REPLICATION_FULL"):
        time.sleep(15)
        assert replicators_of(workplace.root) == [orphan]
    process.kill()
    process.wait()
    write(str(file), 2)
    workplace.start("replication", "run")
    wait_until(lambda: not is_running(orphan))
    wait_until(lambda: replicated(workplace, 1))
    [child] = replicators_of(workplace.root)
    assert child != orphan
    assert int(workplace.pid_file.read_text()) == workplace.started[-1].pid
    third = workplace.start("replication", "run")
    assert third.wait(60) == 69
    assert f"process {workplace.started[1].pid}" in workplace.log()
    assert replicators_of(workplace.root) == [child]
    workplace.started[1].terminate()
    assert workplace.started[1].wait(60) == 0
    assert workplace.restored(file) == [1, 2, 3]


def test_a_second_signal_ends_a_stop_that_hangs(workplace):
    workplace.add_tenant("acme")
    process = workplace.start("replication", "run")
    wait_until(lambda: replicated(workplace, 1))
    os.kill(replicators_of(workplace.root)[0], signal.SIGSTOP)
    process.terminate()
    wait_until(lambda: "replication.stopping" in workplace.log())
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert "replication.forced" in workplace.log()


def test_without_the_binary_the_command_names_the_remedy(workplace):
    workplace.add_tenant("acme")
    done = workplace(
        "replication", "run", "--set", f"{REPLICATION}:ReplicatorPath={workplace.root}/none"
    )
    assert done.returncode == 69
    assert "ReplicatorPath" in done.stderr
    off = workplace("replication", "status", "--set", f"{REPLICATION}:UseReplication=false")
    assert off.returncode == 78


def test_a_replicator_without_our_socket_has_its_lag_measured_at_the_target(workplace):
    workplace.add_tenant("acme")
    text = workplace.config.read_text()
    workplace.config.write_text(text.replace("enabled: true", "enabled: false"))
    process = subprocess.Popen(
        [program("litestream"), "replicate", "-config", str(workplace.config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    workplace.started.append(process)
    wait_until(lambda: workplace.status()[0] == 0)
    status, rows = workplace.status()
    assert (rows["acme"]["state"], rows["acme"]["lag_seconds"]) == ("Healthy", 0)
    workplace.add_tenant("globex")
    status, rows = workplace.status()
    assert status == 1
    assert rows["globex"]["state"] == "Unhealthy"
