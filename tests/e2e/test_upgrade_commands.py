"""``upgrade`` and ``tenant purge`` as commands."""

import json
import logging
import os
import pty
import subprocess
import sys
import threading
import time
from contextlib import suppress

import apsw
import pytest
import trio
from support.single_tenant import (
    deliver,
    grants_in,
    host_settings,
    opened_host,
    write_database,
)

from sdk_trio.cli.main import main
from sdk_trio.storage.data_directory import lock_data_directory
from sdk_trio.tenants.databases import TenantDatabases

APPLICATION = """
import trio
from sdk_trio.tenants.upgrade import HostUpgrade, StepBatch

class Resolver:
    async def resolve(self, tenants):
        return await tenants.add("acme", name="Acme")

class Step:
    name = "orders"
    async def count(self):
        await trio.lowlevel.checkpoint()
        return 2
    async def run_batch(self, tenant, position):
        await trio.lowlevel.checkpoint()
        return StepBatch(1, "half", last=position == "half")

upgrade = HostUpgrade(resolver=Resolver(), steps=[Step()])
"""


@pytest.fixture(autouse=True)
def logging_as_before():
    """Commands configure the package's logging for their whole process."""
    logger = logging.getLogger("sdk_trio")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def data(tmp_path):
    """A data directory of a single-tenant host: 7 deliveries, and a database of 20 rows."""

    async def fill():
        async with opened_host(host_settings(tmp_path / "data")) as host:
            await deliver(host.store, 7)

    trio.run(fill)
    write_database(tmp_path / "data" / "tenants" / "default.db", 20)
    return tmp_path / "data"


def arguments(data, *words, **keys):
    settings = {"Storage:Path": data, "MultiTenant:Enabled": "true", **keys}
    return [*words, *(f"--set=Sdk:{key}={value}" for key, value in settings.items())]


def run(capsys, data, *words, **keys):
    status = main(arguments(data, *words, **keys))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def tenants_of(data):
    store = apsw.Connection(str(data / "inbox.db"))
    try:
        return list(store.execute("SELECT id, identifier FROM tenant"))
    finally:
        store.close()


def test_a_dry_run_then_the_upgrade_then_nothing_left_to_do(capsys, data):
    status, out, _ = run(capsys, data, "upgrade", "--dry-run", "--format", "json")
    plan = json.loads(out)
    assert status == 0
    assert plan["state"] == "pending"
    assert {s["step"]: s["rows"] for s in plan["steps"]} == {
        "database": 20,
        "deliveries": 7,
        "organization": 0,
    }
    assert tenants_of(data) == []
    status, out, err = run(capsys, data, "upgrade", "--format", "json")
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert tenants_of(data) == [(result["tenant_id"], "default")]
    assert len(grants_in(data / "tenants" / f"{result['tenant_id']}.db")) == 20
    status, _, err = run(capsys, data, "upgrade")
    assert status == 0
    assert "done already" in err


def test_it_refuses_while_a_runtime_works_on_the_data_directory(capsys, data):
    with lock_data_directory(data):
        status, _, err = run(capsys, data, "upgrade")
        assert status == 69
        assert "is in use by process" in err
        assert tenants_of(data) == []
        assert run(capsys, data, "upgrade", "--dry-run")[0] == 0


UPGRADE = "MultiTenant:SingleTenantUpgrade:"


@pytest.mark.parametrize(
    ("keys", "status", "message"),
    [
        ({"MultiTenant:Enabled": "false"}, 78, "MultiTenant:Enabled is false"),
        (
            {f"{UPGRADE}DefaultTenantStrategy": "FirstUserOrganization"},
            78,
            "FirstUserOrganization is not supported",
        ),
        (
            {f"{UPGRADE}DefaultTenantStrategy": "HostSupplied"},
            78,
            "no resolver is registered",
        ),
        ({f"{UPGRADE}SourceDatabase": "/nowhere/old.db"}, 1, "there is no file /nowhere/old.db"),
        ({"Storage:Path": "/nowhere"}, 69, "there is no store at /nowhere/inbox.db"),
        ({"Storage:Backend": "Memory"}, 69, "Sdk:Storage:Backend is Memory"),
    ],
)
def test_its_errors_are_one_line_and_an_exit_status(capsys, data, keys, status, message):
    found, out, err = run(capsys, data, "upgrade", **keys)
    assert (found, out) == (status, "")
    assert err.count("\n") == 1
    assert message in err
    assert tenants_of(data) == []


def test_the_application_brings_its_resolver_and_its_steps(capsys, data, monkeypatch, tmp_path):
    (tmp_path / "upgrading_application.py").write_text(APPLICATION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    keys = {f"{UPGRADE}DefaultTenantStrategy": "HostSupplied"}
    host = ("--host", "upgrading_application:upgrade")
    status, out, err = run(capsys, data, "upgrade", *host, "--format", "json", **keys)
    assert (status, err) == (0, "")
    steps = {s["step"]: s["done"] for s in json.loads(out)["steps"]}
    assert steps["host:orders"] == 2
    assert [identifier for _, identifier in tenants_of(data)] == ["acme"]


@pytest.mark.parametrize(
    ("reference", "status"), [("nothing", 2), ("no_such_module:x", 78), ("json:dumps", 78)]
)
def test_a_host_that_cannot_be_imported_is_named(capsys, data, reference, status):
    found, _, err = run(capsys, data, "upgrade", "--host", reference)
    assert found == status
    assert reference in err


def test_on_a_terminal_the_progress_is_shown(data):
    ours, theirs = pty.openpty()
    drawn = bytearray()

    def read():
        with suppress(OSError):  # EIO: no process has the other end open
            while text := os.read(ours, 100_000):
                drawn.extend(text)

    # An unread terminal buffers 4 KiB, and then the command would wait.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    command = [sys.executable, "-m", "sdk_trio", *arguments(data, "upgrade")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.run(command, stderr=theirs, env=environment, timeout=60, check=False)
    os.close(theirs)
    reader.join()
    os.close(ours)
    assert process.returncode == 0
    assert b"deliveries: 7 of 7 rows" in drawn


def make_deleted(data, *, days_ago):
    async def delete():
        async with opened_host(host_settings(data)) as host:
            tenant = await host.tenants.add("acme", name="Acme")
            databases = TenantDatabases(host.directory)
            await databases.run(tenant.id, lambda c: c.execute("CREATE TABLE grants (body)"))
            await databases.close()
            await host.tenants.delete("acme")
            return tenant.id

    tenant_id = trio.run(delete)
    store = apsw.Connection(str(data / "inbox.db"))
    store.execute("UPDATE tenant SET deleted_at = ?", (time.time() - days_ago * 86_400,))
    store.close()
    return tenant_id


def test_purge_shows_then_removes_and_leaves_tenants_within_their_retention(capsys, data):
    tenant_id = make_deleted(data, days_ago=91)
    file = data / "tenants" / f"{tenant_id}.db"
    status, out, err = run(capsys, data, "tenant", "purge", "--dry-run", "--format", "json")
    (row,) = json.loads(out)
    assert (status, row["identifier"], row["purged"]) == (0, "acme", False)
    assert "1 would be removed" in err
    assert file.exists()
    kept = {"MultiTenant:TenantStatus:DeletedTenantRetentionDays": "92"}
    status, _, err = run(capsys, data, "tenant", "purge", "--yes", **kept)
    assert (status, file.exists()) == (0, True)
    status, _, err = run(capsys, data, "tenant", "purge", "--yes", "--actor", "ada")
    assert (status, file.exists(), tenants_of(data)) == (0, False, [])
    assert "1 removed" in err
