"""Whether a host may upgrade from a single tenant: only it knows that nothing writes."""

import os
import subprocess
import sys

import pytest
import trio
from support.daemon import Place
from support.single_tenant import (
    deliver,
    grants_in,
    host_settings,
    opened_host,
    write_database,
)

from sdk_trio import Quiescence, Runtime
from sdk_trio.errors import NotQuiescentError
from sdk_trio.records.upgrades import UpgradeState

TENANTS = "--set=Sdk:MultiTenant:Enabled=true"
SOURCE = "Sdk:MultiTenant:SingleTenantUpgrade:SourceDatabase"


async def marker_of(settings):
    async with opened_host(settings) as host:
        return await host.store.upgrade.marker()


async def run_once(runtime):
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.run)
            runtime.shut_down("the test is over")


async def refused(runtime):
    with trio.fail_after(60):
        await runtime.run()


def tenant_databases(settings):
    directory = os.path.join(settings.storage.path, "tenants")
    return [
        os.path.join(directory, name)
        for name in os.listdir(directory)
        if name.endswith(".db") and name != "default.db"
    ]


class WritingHost:
    """A host that writes its single-tenant database through another process, until ended."""

    def __init__(self, file):
        program = (
            "import sqlite3, sys\n"
            "database = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)\n"
            "for number in iter(int, 1):\n"
            "    database.execute(\"INSERT INTO grants (body) VALUES ('later')\")\n"
            "    print(flush=True)\n"
            "    if sys.stdin.readline() == '':\n"
            "        break\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process.stdout.readline()

    def write(self, rows):
        for _ in range(rows):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            self._process.stdout.readline()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


async def test_a_host_that_goes_on_writing_and_signals_nothing_is_not_upgraded(tmp_path):
    settings = host_settings(tmp_path)
    source = tmp_path / "tenants" / "default.db"
    write_database(source, 40)
    with WritingHost(source) as host:
        with pytest.raises(NotQuiescentError, match=r"Runtime\(quiescence"):
            await refused(Runtime(settings))
        host.write(49)
    assert await marker_of(settings) is None
    assert tenant_databases(settings) == []
    assert len(grants_in(source)) == 90
    quiet = Quiescence()
    quiet.signal("the host has stopped")
    await run_once(Runtime(settings, quiescence=quiet))
    (copy,) = tenant_databases(settings)
    assert len(grants_in(copy)) == 90


async def test_a_signal_that_was_not_given_or_was_withdrawn_does_not_count(tmp_path):
    settings = host_settings(tmp_path)
    async with opened_host(settings) as host:
        await deliver(host.store, 3)
    for withdrawn in (False, True):
        quiet = Quiescence()
        if withdrawn:
            quiet.signal("for a moment")
            quiet.withdraw()
        with pytest.raises(NotQuiescentError):
            await refused(Runtime(settings, quiescence=quiet))
    assert await marker_of(settings) is None


async def test_a_host_with_nothing_to_move_needs_no_signal(tmp_path):
    settings = host_settings(tmp_path)
    await run_once(Runtime(settings))
    marker = await marker_of(settings)
    assert marker is not None
    assert (marker.state, marker.tenant_id) == (UpgradeState.DONE, None)


async def test_without_required_quiescence_no_signal_is_needed(tmp_path):
    settings = host_settings(tmp_path, RequireGracefulQuiescence=False)
    write_database(tmp_path / "tenants" / "default.db", 7)
    await run_once(Runtime(settings))
    (copy,) = tenant_databases(settings)
    assert len(grants_in(copy)) == 7


def test_the_daemon_signals_for_itself_once_it_holds_the_lock(tmp_path):
    place = Place(tmp_path)
    write_database(place.data / "tenants" / "default.db", 5)
    with place.daemon(TENANTS):
        pass
    (copy,) = (f for f in (place.data / "tenants").glob("*.db") if f.name != "default.db")
    assert len(grants_in(copy)) == 5


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_the_daemon_does_not_signal_for_a_database_that_another_process_uses(tmp_path, journal):
    place = Place(tmp_path)
    source = place.data / "tenants" / "default.db"
    write_database(source, 5, journal=journal)
    program = (
        "import sqlite3, sys\n"
        "database = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "database.execute('SELECT count(*) FROM grants').fetchall()\n"
        "if sys.argv[2] == 'delete':\n"
        "    database.execute('BEGIN IMMEDIATE')\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(source), journal],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        ended = place.run("run", "--standalone", TENANTS)
        assert ended.returncode == 1, ended
        assert "another process has the single-tenant database" in ended.stderr
    finally:
        other.communicate(timeout=30)
    assert not [f for f in (place.data / "tenants").glob("*.db") if f.name != "default.db"]
    with place.daemon(TENANTS):
        pass
    (copy,) = (f for f in (place.data / "tenants").glob("*.db") if f.name != "default.db")
    assert len(grants_in(copy)) == 5


def test_the_daemon_does_not_signal_for_a_database_outside_of_its_data_directory(tmp_path):
    place = Place(tmp_path)
    source = tmp_path / "elsewhere" / "shop" / "shop.db"
    write_database(source, 5)
    words = (TENANTS, f"--set={SOURCE}={source}")
    ended = place.run("run", "--standalone", *words)
    assert ended.returncode == 1, ended
    assert "outside of the data directory" in ended.stderr
    assert "sdk-trio upgrade" in ended.stderr
    # In a maintenance window, the operator says it by running the command.
    done = place.run("upgrade", *words)
    assert done.returncode == 0, done
    with place.daemon(*words):
        pass
    (copy,) = (place.data / "tenants").glob("*.db")
    assert len(grants_in(copy)) == 5
