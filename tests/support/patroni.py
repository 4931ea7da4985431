"""A cluster of PostgreSQL servers under Patroni, which promotes a standby when the primary dies."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import attrs

from . import reaper
from .ports import free_port
from .postgres import give_to_server, required_binaries, server_user
from .programs import program
from .waiting import wait_until

#: The seconds that a cluster may take to be complete, on a machine with much other work.
PATIENCE_SECONDS = 180.0

#: Patroni's shortest times, in seconds: a lease of the leader, a round, a try of the lease's store.
LEASE_SECONDS, ROUND_SECONDS, RETRY_SECONDS = 20, 1, 3

_ACCESS = [
    "local all all trust",
    *(f"host {each} all 127.0.0.1/32 trust" for each in ("all", "replication")),
]


@attrs.define
class Node:
    """One server with its Patroni, in a separate directory."""

    name: str
    directory: Path
    port: int = attrs.Factory(free_port)
    api: int = attrs.Factory(free_port)
    patroni: "subprocess.Popen[bytes] | None" = None

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def start(self) -> None:
        """Start Patroni, which starts the server."""
        with (self.directory / "log").open("ab") as log:
            words = [program("patroni"), str(self.directory / "patroni.json")]
            self.patroni = _start(words, self.directory, log)

    def server_pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def kill_server(self) -> None:
        """Kill the server; its Patroni continues to run."""
        pid = self.server_pid()
        # A crash leaves the file behind, and another process may have the number since.
        if Path(f"/proc/{pid}/cwd").resolve() == self.data:
            os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """End Patroni and the server as the end of their host does."""
        assert self.patroni is not None
        self.patroni.kill()
        self.patroni.wait()
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            self.kill_server()


@attrs.define
class Cluster:
    """Nodes whose leader writes; with synchronous replication to one of the others."""

    nodes: list[Node]

    def dsn(self, database: str) -> str:
        """Return a connection string that names all nodes."""
        hosts = ",".join("127.0.0.1" for _ in self.nodes)
        ports = ",".join(str(node.port) for node in self.nodes)
        return f"host={hosts} port={ports} user=owner dbname={database}"

    def members(self) -> dict[str, str]:
        """Return the role of each member that runs, as the first Patroni that answers says it."""
        for node in self.nodes:
            with contextlib.suppress(OSError, ValueError):
                url = f"http://127.0.0.1:{node.api}/cluster"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    found = json.load(answer)["members"]
                running = ("running", "streaming")
                return {each["name"]: each["role"] for each in found if each["state"] in running}
        return {}

    def leader(self) -> Node | None:
        """Return the node that leads, None while none does."""
        roles = self.members()
        return next((node for node in self.nodes if roles.get(node.name) == "leader"), None)

    def is_complete(self) -> bool:
        """Whether every node runs, one of them leads, and another confirms its commits."""
        roles = sorted(self.members().values())
        found = len(roles) == len(self.nodes) and {"leader", "sync_standby"} <= set(roles)
        if found:
            for node in self.nodes:
                reaper.register(node.server_pid())  # Patroni makes daemons of them
        return found

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run a statement on the leader."""
        import psycopg

        dsn = f"{self.dsn(database)} target_session_attrs=read-write"
        with psycopg.connect(dsn, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def logs(self) -> str:
        return "\n".join((node.directory / "log").read_text()[-1500:] for node in self.nodes)

    def wait_until(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition of the cluster holds; call it in a thread."""
        return wait_until(condition, self.logs, seconds=PATIENCE_SECONDS)


@contextmanager
def patroni_cluster(count: int) -> Iterator[Cluster]:
    """Run a cluster of ``count`` nodes with etcd; yields it when it is complete.

    Without Patroni or etcd (Debian's ``patroni`` and ``etcd-server``) the test is skipped.
    """
    servers, etcd = required_binaries(), program("etcd")
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sdk-patroni-")))
        give_to_server(root)
        leases = f"http://127.0.0.1:{free_port()}"
        nodes = [Node(f"n{number}", root / f"n{number}") for number in range(count)]
        with (root / "etcd.log").open("ab") as log:
            words = [etcd, "--data-dir", str(root / "etcd"), "--listen-peer-urls"]
            words += [f"http://127.0.0.1:{free_port()}", "--listen-client-urls", leases]
            process = _start([*words, "--advertise-client-urls", leases], root, log)
        stack.callback(_end, process)
        for node in nodes:
            node.directory.mkdir()
            give_to_server(node.directory)
            settings = json.dumps(_settings(node, servers, leases))
            (node.directory / "patroni.json").write_text(settings)
            stack.callback(node.kill)
            node.start()
        cluster = Cluster(nodes)
        cluster.wait_until(cluster.is_complete)
        yield cluster


def _start(words: list[str], directory: Path, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(words, cwd=directory, user=server_user(), stdout=log, stderr=log)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def _settings(node: Node, servers: Path, leases: str) -> dict[str, Any]:
    """Return the configuration of one node's Patroni."""
    api, address = f"127.0.0.1:{node.api}", f"127.0.0.1:{node.port}"
    dynamic = {
        "ttl": LEASE_SECONDS,
        "loop_wait": ROUND_SECONDS,
        "retry_timeout": RETRY_SECONDS,
        "synchronous_mode": True,
        # A primary that crashes is not started again where it was: another one takes its place.
        "primary_start_timeout": 0,
        "postgresql": {"use_pg_rewind": True},
    }
    return {
        "scope": "proof",
        "name": node.name,
        "restapi": {"listen": api, "connect_address": api},
        "etcd3": {"url": leases},
        "bootstrap": {"dcs": dynamic, "initdb": [{"encoding": "UTF8"}, {"auth": "trust"}]},
        "postgresql": {
            "listen": address,
            "connect_address": address,
            "data_dir": str(node.data),
            "bin_dir": str(servers),
            "pgpass": str(node.directory / "pgpass"),
            "pg_hba": _ACCESS,
            "authentication": {
                "superuser": {"username": "owner"},
                "replication": {"username": "owner"},
            },
            "parameters": {"unix_socket_directories": str(node.directory), "wal_keep_size": "1GB"},
            "remove_data_directory_on_rewind_failure": True,
            "remove_data_directory_on_diverged_timelines": True,
        },
    }
