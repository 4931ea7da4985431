"""A tenant's database is restored while a daemon runs: all acknowledged data is in the file."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import attrs
import httpx
import pytest
import trio
from support.command_forker import Program, start_program
from support.deliveries import SECRET
from support.ports import free_port
from support.programs import program
from support.replica_host import ReplicaHost, rows_of
from support.replica_targets import local_disk
from support.waiting import wait_until

from sdk_trio.errors import ReplicatorError
from sdk_trio.replication.control import ControlClient, control_socket_path
from sdk_trio.testing import sign_delivery

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

APPLICATION = """
import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True)
async def handle(event, services):
    def insert(connection):
        connection.execute("INSERT INTO grants (body) VALUES (?)", (event.webhook_id,))

    async with services.tenant_db(event.tenant) as database:
        await database.run(insert)
"""


@attrs.define
class Live:
    """A host whose daemon runs, supervises the replicator, and writes for ``acme``."""

    host: ReplicaHost
    port: int = attrs.field(factory=free_port)
    process: Program | None = None

    def start(self) -> None:
        (self.host.root / "application.py").write_text(APPLICATION)
        words = ["run", "--standalone", "--app", "application:handlers"]
        words += ["--config", str(self.host.config)]
        for key, value in {
            "Server:Bind": f"127.0.0.1:{self.port}",
            "Webhooks:RequireHttps": "false",
            "MultiTenant:FileDb:Replication:Supervise": "true",
        }.items():
            words += ["--set", f"Sdk:{key}={value}"]
        with (self.host.root / "daemon.log").open("ab") as log:
            self.process = start_program(
                words,
                directory=self.host.root,
                environ={**self.host.environ, "SDK__WEBHOOKS__SECRET": SECRET},
                stdout=log,
                stderr=log,
            )
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log
        with contextlib.suppress(httpx.TransportError):
            return bool(httpx.get(f"http://127.0.0.1:{self.port}/").status_code)
        return False

    @property
    def log(self) -> str:
        return (self.host.root / "daemon.log").read_text()

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(60) == 0

    def deliver(self, *ids: str) -> None:
        """Deliver an event for each id, and wait until the store says that it is done."""
        self.send(*ids)
        wait_until(lambda: all(self.state(each) == "done" for each in ids))

    def send(self, *ids: str) -> None:
        """Deliver an event for each id; return when all of them are acknowledged."""
        for webhook_id in ids:
            body = json.dumps(
                {
                    "type": "order.paid",
                    "timestamp": "2026-01-01T00:00:00Z",
                    "data": {"id": webhook_id, "organization_id": "org-acme"},
                }
            ).encode()
            signed = sign_delivery(body, secret=SECRET, webhook_id=webhook_id)
            answer = httpx.post(
                f"http://127.0.0.1:{self.port}/hooks/sdk",
                content=body,
                headers=dict(signed.headers),
            )
            assert answer.status_code == 200, answer.text

    def state(self, webhook_id: str) -> str:
        shown = self.host.run("events", "show", webhook_id, "--format", "json")
        return shown.document["state"] if shown.status == 0 else ""

    def replicated(self) -> bool:
        client = ControlClient(control_socket_path(str(self.host.databases)))
        try:
            listed = trio.run(client.list_databases)
        except ReplicatorError:
            return False
        path = str(self.host.database("acme"))
        return any(each.path == path and each.last_sync_at for each in listed)

    def bodies(self) -> list[str]:
        """Return the rows that handlers have written into the current file."""
        return [body for _, body, _ in self.host.rows("acme") if body.startswith("msg_")]

    def deleted_files(self) -> list[str]:
        """The unlinked files that the daemon or its child still has open."""
        found = []
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in (self.process.pid, *map(int, children.read_text().split())):
            links = Path(f"/proc/{pid}/fd")
            with contextlib.suppress(FileNotFoundError):  # a replicator that is being replaced
                for each in links.iterdir():
                    with contextlib.suppress(OSError):  # it has been closed
                        found.append(os.readlink(each))
        return [
            target
            for target in found
            if target.endswith(" (deleted)") and str(self.host.databases) in target
        ]

    def sync(self) -> None:
        self.host.wait_synced("acme")


@contextlib.contextmanager
def made_host(root: Path) -> Iterator[ReplicaHost]:
    program("litestream")
    with local_disk(root / "target") as target:
        host = ReplicaHost(root / "host", target)
        host.add("acme", 20, organization_id="org-acme")
        yield host


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with made_host(tmp_path) as host:
        live = Live(host)
        live.start()
        wait_until(live.replicated)
        yield live
        if live.process.poll() is None:
            live.process.kill()
            live.process.wait()


def mark(live: Live) -> str:
    """Let the replica have all that is written, and return a time after that."""
    live.sync()
    # Restores are to whole seconds of the replica's files.
    time.sleep(1.5)
    moment = datetime.now(UTC).isoformat()
    time.sleep(1.5)
    return moment


def test_acknowledged_writes_after_a_manual_restore_are_in_the_file(live: Live) -> None:
    """Suspend, restore with --output --force, reactivate: the daemon has had the file open."""
    live.deliver("msg_before1", "msg_before2")
    live.sync()
    live.host.suspend("acme")
    wait_until(lambda: not live.replicated())
    restored = live.host.run(
        *("replication", "restore", "--tenant", "acme", "--force"),
        *("--output", str(live.host.database("acme"))),
    )
    assert restored.status == 0, restored.err
    live.host.reactivate("acme")
    live.deliver("msg_after1", "msg_after2")
    assert live.deleted_files() == []
    live.stop()
    assert live.bodies() == ["msg_before1", "msg_before2", "msg_after1", "msg_after2"]


def test_a_database_that_is_renamed_over_is_used_from_then_on(live: Live) -> None:
    """The tenant stays active, and an operator renames a new file over its database."""
    live.deliver("msg_before")
    other = live.host.root / "other.db"
    other.write_bytes(b"")
    subprocess.run(
        [sys.executable, "-c", _COPY, str(live.host.database("acme")), str(other)], check=True
    )
    for suffix in ("-wal", "-shm"):
        Path(f"{live.host.database('acme')}{suffix}").unlink(missing_ok=True)
    other.rename(live.host.database("acme"))
    live.deliver("msg_after")
    live.stop()
    assert live.bodies() == ["msg_before", "msg_after"]


_COPY = """
import apsw, sys
source, target = (apsw.Connection(name) for name in sys.argv[1:])
with target.backup("main", source, "main") as backup:
    backup.step()
target.execute("PRAGMA journal_mode = WAL").fetchall()
target.close()
"""


def test_restored_in_place_under_a_daemon_and_written_on(live: Live, tmp_path: Path) -> None:
    live.deliver("msg_before1")
    moment = mark(live)
    live.deliver("msg_mistake")
    live.sync()
    kept = tmp_path / "kept.db"
    ended = live.host.run(
        *("replication", "restore", "--in-place", "acme", "--at", moment, "--keep", str(kept)),
        *("--reason", "a mistake", "--actor", "kim", "--format", "json"),
    )
    assert ended.status == 0, ended.err
    assert (ended.document["reactivated"], ended.document["kept"]) == (True, str(kept))
    live.deliver("msg_after1")
    assert live.bodies() == ["msg_before1", "msg_after1"]
    assert live.deleted_files() == []
    assert "msg_mistake" in [body for _, body, _ in rows_of(kept)]
    wait_until(live.replicated)
    live.sync()
    verified = live.host.verify("--tenant", "acme")
    assert verified.status == 0, verified.out + verified.err
    assert verified.document[0]["content"] == "identical"
    trail = live.host.run("tenant", "audit", "acme", "--format", "json").document
    assert [(row["action"], row["actor"]) for row in trail[-2:]] == [
        ("Suspended", "kim"),
        ("Reactivated", "kim"),
    ]
    assert "a mistake" in trail[-2]["reason"]
    live.stop()
    assert live.bodies() == ["msg_before1", "msg_after1"]
    live.start()
    live.deliver("msg_after2")
    live.stop()
    assert live.bodies() == ["msg_before1", "msg_after1", "msg_after2"]


def test_acknowledged_writes_right_after_an_activation_are_not_dropped(live: Live) -> None:
    """The replicator reads nothing in the first seconds after a tenant became active."""
    live.deliver("msg_0")
    live.sync()
    known = ["msg_0"]
    for attempt in range(1, 4):
        ended = live.host.run("replication", "restore", "--in-place", "acme")
        assert ended.status == 0 or "--discard-newer" in ended.err
        assert sorted(live.bodies()) == known, ended.err
        shown = live.host.run("tenant", "show", "acme", "--format", "json").document
        assert shown["status"] == "Active"
        known += (ids := [f"msg_{attempt}{number}" for number in range(1, 4)])
        live.send(*ids)
        # Not by a command, which takes as long as the replicator needs.
        wait_until(lambda known=known: sorted(live.bodies()) == known)
    live.stop()
    assert sorted(live.bodies()) == known


def test_a_process_with_the_database_open_is_named_and_waited_for(live: Live) -> None:
    live.deliver("msg_before")
    live.sync()
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(live.host.database("acme"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        holder.stdout.readline()
        ended = live.host.run("replication", "restore", "--in-place", "acme", "--wait", "1")
    finally:
        holder.communicate(b"\n")
    assert ended.status == 1
    assert f"process {holder.pid}" in ended.err
    assert "--wait" in ended.err
    live.deliver("msg_after")
    live.stop()
    assert live.bodies() == ["msg_before", "msg_after"]


_HOLD = """
import apsw, sys
connection = apsw.Connection(sys.argv[1])
connection.execute("PRAGMA wal_autocheckpoint = 0; SELECT count(*) FROM grants").fetchall()
print("open", flush=True)
sys.stdin.readline()
"""


# -- without a daemon: killed at each step --------------------------------------------------------

#: Runs the command in a process that kills itself before or after the call of a function.
_KILLED = """
import importlib, os, signal, sys

where, moment = sys.argv[1:3]
module_name, _, rest = where.partition(":")
holder = importlib.import_module(module_name)
*parents, name = rest.split(".")
for parent in parents:
    holder = getattr(holder, parent)
original = getattr(holder, name)


def end():
    os.kill(os.getpid(), signal.SIGKILL)


if sys.argv[3] == "async":
    async def replacement(*args, **kwargs):
        if moment == "before":
            end()
        await original(*args, **kwargs)
        end()
else:
    def replacement(*args, **kwargs):
        if moment == "before":
            end()
        original(*args, **kwargs)
        end()
setattr(holder, name, replacement)

from sdk_trio.cli.main import main
sys.exit(main(sys.argv[4:]))
"""

_SERVICE = "sdk_trio.tenants.service:TenantService"
_HELD = "sdk_trio.replication.live_database"
_RESTORE = "sdk_trio.replication.restore:Restorer.restore"
_FETCH = "sdk_trio.replication.replica:TenantReplica.restore"

#: Where it is killed, and whether the old database is there then.
STEPS = {
    "before the suspension": (f"{_SERVICE}.suspend", "before", "async", True),
    "after the suspension": (f"{_SERVICE}.suspend", "after", "async", True),
    "when the database is taken": (_RESTORE, "before", "async", True),
    "when it is restored beside": (_FETCH, "after", "async", True),
    "before it is replaced": (f"{_HELD}:LockedDatabase.replace_by", "before", "sync", True),
    "while it is replaced": ("pathlib:Path.replace", "before", "sync", True),
    "when it is replaced": ("pathlib:Path.replace", "after", "sync", False),
    "before the reactivation": (f"{_SERVICE}.reactivate", "before", "async", False),
    "after the reactivation": (f"{_SERVICE}.reactivate", "after", "async", False),
}


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaHost]:
    """A host on which nothing runs; the replica lacks the last row of the database."""
    with made_host(tmp_path_factory.mktemp("still")) as host:
        with host.replicating("acme"):
            host.wait_synced("acme")
        yield host


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_the_old_database_is_whole_or_the_new_one_and_a_rerun_ends_it(
    still: ReplicaHost, step: str
) -> None:
    where, moment, kind, old_is_there = STEPS[step]
    restored = still.rows("acme")[:20]
    still.write("acme", 1)
    old = [body for _, body, _ in still.rows("acme")]
    words = (*("replication", "restore", "--in-place", "acme"), "--discard-newer")
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, where, moment, kind, *words, "--config", str(still.config)],
        cwd=still.root,
        env=still.environ,
        capture_output=True,
        timeout=60,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = [body for _, body, _ in still.rows("acme")]
    assert left == (old if old_is_there else [body for _, body, _ in restored])
    ended = still.run(*words, "--format", "json")
    assert ended.status == 0, ended.err
    assert ended.document["reactivated"]
    assert still.rows("acme") == restored
    shown = still.run("tenant", "show", "acme", "--format", "json").document
    assert shown["status"] == "Active"
    assert still.left_behind() == []


def test_data_that_the_replica_lacks_is_dropped_only_on_request(
    still: ReplicaHost, tmp_path: Path
) -> None:
    """The replicator was down while rows were written."""
    old = still.rows("acme")
    still.write("acme", 3)
    written = still.rows("acme")
    refused = still.run("replication", "restore", "--in-place", "acme")
    assert refused.status == 1
    assert f"table grants ({len(old)} rows instead of {len(written)})" in refused.err
    assert "--discard-newer" in refused.err
    assert still.rows("acme") == written
    assert still.run("tenant", "show", "acme", "--format", "json").document["status"] == "Active"
    assert still.left_behind() == []
    with still.replicating("acme"):
        still.wait_synced("acme")
    ended = still.run("replication", "restore", "--in-place", "acme")
    assert ended.status == 0, ended.err
    assert still.rows("acme") == written
    still.write("acme", 2)
    kept = tmp_path / "kept.db"
    ended = still.run(
        *("replication", "restore", "--in-place", "acme", "--discard-newer", "--keep", str(kept))
    )
    assert ended.status == 0, ended.err
    assert still.rows("acme") == written
    assert len(rows_of(kept)) == len(written) + 2


def test_only_a_tenant_that_was_active_is_reactivated(still: ReplicaHost) -> None:
    still.suspend("acme")
    ended = still.run("replication", "restore", "--in-place", "acme")
    assert ended.status == 0, ended.err
    assert "was not active before" in ended.err
    assert still.run("tenant", "show", "acme", "--format", "json").document["status"] == "Suspended"
    still.reactivate("acme")


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--at", "2020-01-01T00:00Z"), 1, "the replica begins at"),
        (("--output", "x.db"), 2, "--output cannot be used with --in-place"),
        (("--discard-newer", "--at", "1m"), 2, "--discard-newer cannot be used with --at"),
        (("--wait", "soon"), 2, "--wait takes a whole number"),
    ],
)
def test_an_impossible_restore_changes_nothing(
    still: ReplicaHost, options: tuple[str, ...], status: int, words: str
) -> None:
    before = still.run("tenant", "audit", "acme", "--format", "json").out
    ended = still.run("replication", "restore", "--in-place", "acme", *options)
    assert (ended.status, words in ended.err) == (status, True), ended.err
    assert still.run("tenant", "audit", "acme", "--format", "json").out == before


@pytest.mark.parametrize("whole_bytes", [None, 0, 2 * 4096])
def test_a_damaged_or_missing_database_is_replaced_too(
    still: ReplicaHost, whole_bytes: int | None
) -> None:
    expected = still.rows("acme")
    database = still.database("acme")
    content = database.read_bytes()
    if whole_bytes is None:
        database.unlink()
    else:
        whole = content[:whole_bytes]
        database.write_bytes(whole + os.urandom(len(content) - len(whole)))
    ended = still.run("replication", "restore", "--in-place", "acme")
    assert ended.status == 0, ended.err
    assert "may be missing" in ended.err
    assert still.rows("acme") == expected
