"""A PostgreSQL server for tests, and a database for each test."""

import contextlib
import hashlib
import itertools
import os
import platform
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from . import reaper
from .ports import free_port
from .programs import node_package
from .waiting import wait_until

_NUMBERS = itertools.count()

#: For tests with the fixture ``store`` that also run on a server.
on_every_store = pytest.mark.parametrize("store", ["Memory", "Sqlite", "Postgres"], indirect=True)

#: Major versions beside the machine's own, on which the contracts of stores are tested too: the
#: oldest supported one, and the newest one. `make emulators` installs them.
FURTHER_VERSIONS = ("13", "18")

#: The names of a processor in packages of npm.
_NPM_PROCESSORS = {"x86_64": "x64", "aarch64": "arm64"}

#: Names a directory for all processes of a run, which keep new clusters there.
CLUSTERS = "CLUSTERS_OF_TESTS"

#: Databases with the schema that a program outside of pytest uses in turn; no test needs as many.
_KEPT = 8

# End all sessions of an earlier test, and empty what they have written, without the trigger that
# protects the audit trail. The result equals a new migration.
_EMPTY = """
DO $$
DECLARE each record;
BEGIN
    LOOP
        PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid();
        EXIT WHEN NOT FOUND;
        PERFORM pg_sleep(0.005);
        PERFORM pg_stat_clear_snapshot();
    END LOOP;
    SET LOCAL session_replication_role = replica;
    FOR each IN SELECT oid, relname, relkind FROM pg_class
        WHERE relnamespace = 'sdk_trio'::regnamespace AND relkind IN ('r', 'S')
    LOOP
        IF each.relkind = 'S' THEN
            PERFORM setval(each.oid, 1, false);
        ELSIF each.relname NOT IN ('store', 'node', 'day') AND pg_relation_size(each.oid) > 0 THEN
            EXECUTE format('DELETE FROM sdk_trio.%I', each.relname);
        END IF;
    END LOOP;
    DELETE FROM sdk_trio.node WHERE id <> '';
    UPDATE sdk_trio.node SET changes = 0, done = 0;
    UPDATE sdk_trio.day SET opened_at = extract(epoch FROM now()) WHERE number = 0;
END $$
"""

# Tests need committed data to be visible, not to survive a power cut.
_SETTINGS = {
    "listen_addresses": "",  # its socket is in its directory
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "100",
    "autovacuum_naptime": "60s",  # each round costs a process for each database
    "shared_preload_libraries": "pg_stat_statements",
}


def binaries(version: str = "") -> Path | None:
    """The directory of the server's programs; None if there is none on this machine.

    With a version those of `make emulators`, which can make no standby.
    """
    if version:
        processor = _NPM_PROCESSORS.get(platform.machine(), platform.machine())
        return node_package(f"postgresql-{version}-{processor}") / "native" / "bin"
    candidates = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    if found := shutil.which("initdb"):
        candidates.append(Path(found).parent)
    return next((each for each in candidates if (each / "initdb").exists()), None)


def required_binaries(version: str = "") -> Path:
    """As :func:`binaries`; without a server, the test is skipped."""
    pytest.importorskip("psycopg", reason="the extra 'postgres' is not installed")
    found = binaries(version)
    if found is None:
        pytest.skip("no PostgreSQL server is installed: apt-get install postgresql")
    return found


def server_user() -> str | None:
    """Return the user of servers, which refuse to run as root; None: that of this process."""
    return "postgres" if os.geteuid() == 0 else None


def give_to_server(directory: Path) -> None:
    """Make the user that servers run as the owner of a directory."""
    if (user := server_user()) is not None:
        known = pwd.getpwnam(user)
        os.chown(directory, known.pw_uid, known.pw_gid)


class PostgresServer:
    """A server in its own directory, as an unprivileged user, on its own port."""

    def __init__(self, programs: Path, primary: "PostgresServer | None" = None) -> None:
        """A new server, or with ``primary`` a standby that follows that one, which runs."""
        self.programs = programs
        self.primary = primary
        self.directory = Path(tempfile.mkdtemp(prefix="sdk-pg-"))
        self.user = server_user()
        give_to_server(self.directory)
        self.data = self.directory / "data"
        self._template: str | None = None
        self._free: list[str] = []
        self._used: list[str] = []
        self._places: dict[Path, str] = {}
        data = ("-D", str(self.data))
        if primary is None:
            self._make_cluster()
        else:
            place = ("-h", str(primary.directory), "-U", "owner")
            self._run("pg_basebackup", *data, *place, "-R", "-N", "-c", "fast")

    def _run(self, program: str, *arguments: str) -> None:
        finished = subprocess.run(
            [str(self.programs / program), *arguments],
            user=self.user,
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert finished.returncode == 0, f"{program}: {finished.stdout}{finished.stderr}"

    def _make_cluster(self) -> None:
        """Copy a cluster that a test process has made: to make one takes ten times as long."""
        options = ("-U", "owner", "-A", "trust", "-E", "UTF8", "-N")
        if CLUSTERS not in os.environ:
            self._run("initdb", "-D", str(self.data), *options)
            return
        version = hashlib.sha256(bytes(self.programs)).hexdigest()
        kept = Path(os.environ[CLUSTERS], version)
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                self._run("initdb", "-D", str(self.data), *options)
                shutil.move(self.data, kept)
        subprocess.run(["cp", "-a", kept, self.data], check=True)

    def start(self, **further: str) -> None:
        settings = {**_SETTINGS, "unix_socket_directories": self.directory, **further}
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        log = str(self.directory / "log")
        self._run("pg_ctl", "start", "-w", "-D", str(self.data), "-l", log, "-o", options)
        reaper.register(self.pid)  # pg_ctl has made a daemon of it

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "stop", "-w", "-D", str(self.data), "-m", mode)

    @property
    def pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    @property
    def runs(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> None:
        """Kill the server, and wait for the end of all its processes."""
        os.kill(self.pid, signal.SIGKILL)
        # Its children end by themselves; a new server waits for the last of them.
        deadline = time.monotonic() + 30
        while self.runs and time.monotonic() < deadline:
            time.sleep(0.02)

    def promote(self) -> None:
        """Promote a standby, and wait for it."""
        self._run("pg_ctl", "promote", "-w", "-D", str(self.data))

    def dsn(self, database: str = "postgres") -> str:
        return f"host={self.directory} user=owner dbname={database}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple]:
        import psycopg

        with psycopg.connect(self.dsn(database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def without_its_standby(self) -> Iterator[None]:
        """Make every commit wait for a standby that never answers."""
        self._set_standby("ALTER SYSTEM SET synchronous_standby_names = 'absent'")
        end = f"SELECT pg_terminate_backend(pid) {self.commits_that_wait('emit_message')}"
        commit: Future[Any] | None = None
        with ThreadPoolExecutor(1) as thread:
            try:
                # The server applies the setting with a delay; it has when a commit waits.
                while not self.execute(end):
                    if commit is None or commit.done():
                        commit = thread.submit(self._commit_something)
                    time.sleep(0.01)
                yield
            finally:
                self._set_standby("ALTER SYSTEM RESET synchronous_standby_names")
        self._commit_something()

    def _set_standby(self, statement: str) -> None:
        self.execute(statement)
        self.execute("SELECT pg_reload_conf()")

    def _commit_something(self) -> None:
        self.execute("SELECT pg_logical_emit_message(true, 'nothing', '')")

    def commits_that_wait(self, query: str = ".") -> str:
        """The end of a SELECT of the sessions whose commit waits for a standby."""
        return f"FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query ~ '{query}'"

    def empty(self) -> str:
        """The connection string of a new database without any table."""
        name = f"test_{next(_NUMBERS)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.dsn(name)

    def fresh(self) -> str:
        """The connection string of a new database that has the schema already."""
        if self._template is None:
            from sdk_trio.storage.engines.postgres_address import PostgresAddress
            from sdk_trio.storage.engines.postgres_migration import migrate_postgres

            address = PostgresAddress(dsn=self.empty())
            migrate_postgres(address)
            connection = address.connect()
            self._template = connection.info.dbname
            connection.close()
        if not self._free and len(self._used) < _KEPT:
            name = f"test_{next(_NUMBERS)}"
            self.execute(f"CREATE DATABASE {name} TEMPLATE {self._template}")
        else:
            # Emptied in a twentieth of the time in which a new one is made.
            name = (self._free or self._used).pop(0)
            self.execute(_EMPTY, name)
        self._used.append(name)
        return self.dsn(name)

    def release(self) -> None:
        """Let :meth:`fresh` return the databases of the test that has ended."""
        self._free += self._used
        self._used.clear()

    def end_sessions(self, database: str) -> None:
        """End all sessions in a database, and wait until there is none."""
        end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'"
        wait_until(lambda: not self.execute(end))

    def database_of(self, place: Path, *, new: bool = False) -> str:
        """Return the connection string of the database that is used instead of a file.

        With ``new`` it has no schema at first, and no other test gets it afterwards.
        """
        if place not in self._places:
            self._places[place] = self.empty() if new else self.fresh()
        return self._places[place]

    def remove(self) -> None:
        if self.runs:
            self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


#: The servers of this process, by their version.
_running: dict[str, PostgresServer] = {}


def running_server(version: str = "") -> PostgresServer:
    """The one server of a version in this process; it is started at the first call.

    Without a version it is that of ``SDK_TEST_POSTGRES``, and without that the machine's own.
    """
    version = version or os.environ.get("SDK_TEST_POSTGRES", "")
    if version not in _running:
        server = PostgresServer(required_binaries(version))
        server.start()
        _running[version] = server
    return _running[version]


def release_databases() -> None:
    """Let servers use the databases of the test that has ended again."""
    for server in _running.values():
        server.release()


def remove_server() -> None:
    """Remove what :func:`running_server` has started."""
    while _running:
        _running.popitem()[1].remove()


@contextmanager
def pooled(server: PostgresServer, dsn: str, *, connections: int) -> Iterator[str]:
    """Run PgBouncer in transaction mode; yield a connection string for ``dsn`` through it."""
    program = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
    if program is None:
        pytest.skip("no pgbouncer is installed: apt-get install pgbouncer")
    directory = Path(tempfile.mkdtemp(prefix="sdk-pooler-"))
    directory.chmod(0o755)
    port = free_port()
    settings = directory / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n* = host={server.directory} user=owner\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = transaction\ndefault_pool_size = {connections}\n"
    )
    settings.chmod(0o644)
    process = subprocess.Popen(
        [program, str(settings)], user=server.user, stderr=subprocess.PIPE, cwd=directory
    )
    try:
        wait_until(lambda: _listens(port))
        yield f"host=127.0.0.1 port={port} user=owner dbname={dsn.rpartition('=')[2]}"
    finally:
        process.terminate()
        process.communicate(timeout=30)
        shutil.rmtree(directory)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return True
    return False


async def open_inbox(place: Path, *, owner: str, version: str = "", **terms: float) -> Any:
    """Open the inbox of a database as the contract tests expect it: with the callers' clock, and as
    the only living owner.

    ``version``: that of the server, as in :func:`running_server`.
    """
    from sdk_trio.storage.admission import LeaseTerms
    from sdk_trio.storage.engines.postgres_address import PostgresAddress
    from sdk_trio.storage.postgres_inbox import PostgresInbox

    address = PostgresAddress(dsn=running_server(version).database_of(place))
    return await PostgresInbox.open(address, LeaseTerms(owner=owner, **terms), server_clock=False)
