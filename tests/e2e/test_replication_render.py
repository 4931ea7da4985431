"""``replication render``, and a runtime that keeps the file current and signals the replicator."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml
from support.command_line import CommandLine
from support.deliveries import SECRET
from support.deliveries import settings as settings_of
from support.ports import free_port
from support.programs import program
from support.serving import running
from support.waiting import until

from sdk_trio import Runtime
from sdk_trio.errors import EXIT_CONFIGURATION, EXIT_UNAVAILABLE, OptionsValidationError
from sdk_trio.storage.open import open_store
from sdk_trio.tenants import TenantService

REPLICATION = "Sdk:MultiTenant:FileDb:Replication"

#: Writes a line for each SIGHUP to the file it is given, after it has written its pid file.
OBEDIENT = """
import os, signal, sys, time
out = open(sys.argv[1], "a", buffering=1)
signal.signal(signal.SIGHUP, lambda *_: out.write("reloaded\\n"))
open(sys.argv[2], "w").write(str(os.getpid()))
while True: time.sleep(0.02)
"""


@pytest.fixture
def shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    return CommandLine(tmp_path, capsys)


def keys(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "Storage__Backend": "Sqlite",
        "Storage__Path": str(tmp_path / "sdk-data"),
        "MultiTenant__Enabled": True,
        "MultiTenant__FileDb__Replication__UseReplication": True,
        "MultiTenant__FileDb__Replication__ReplicaTargetType": "LocalDisk",
        "MultiTenant__FileDb__Replication__LocalDisk__Path": str(tmp_path / "replica"),
        "MultiTenant__FileDb__Replication__AutoRegenerateOnTenantChange": True,
        "MultiTenant__FileDb__Replication__AutoRegenerateDebounceWindow": "00:00:00.1",
        "MultiTenant__FileDb__Replication__ConfigOutputPath": str(tmp_path / "replicator.yml"),
        "MultiTenant__FileDb__Replication__ReplicatorPidFilePath": str(tmp_path / "pid"),
        **changes,
    }


def words(tmp_path: Path, **changes: Any) -> list[str]:
    found: list[str] = []
    for name, value in keys(tmp_path, **changes).items():
        found += ["--set", f"Sdk:{name.replace('__', ':')}={value}"]
    return found


def add_tenants(tmp_path: Path, names: Sequence[str]) -> list[str]:
    async def add() -> list[str]:
        values = settings_of(**keys(tmp_path))
        async with open_store(values, owner="test") as store:
            tenants = TenantService(values, store.tenants)
            ids = [(await tenants.add(name, name=name)).id for name in names]
            await tenants.deactivate(ids[-1])
            return ids

    return trio.run(add)


def database(tmp_path: Path, tenant_id: str) -> Path:
    file = tmp_path / "sdk-data" / "tenants" / f"{tenant_id}.db"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.touch()
    return file


def paths(text: str) -> list[str]:
    return [entry["path"] for entry in yaml.safe_load(text)["dbs"]]


def test_render_prints_writes_and_checks(shell: CommandLine, tmp_path: Path) -> None:
    ids = add_tenants(tmp_path, ["a", "b", "left"])
    files = [database(tmp_path, tenant_id) for tenant_id in (ids[0], ids[2])]
    given = words(tmp_path)
    printed = shell("replication", "render", *given)
    assert printed.status == 0
    assert paths(printed.out) == [str(files[0])]
    output = tmp_path / "replicator.yml"
    missing = shell("replication", "render", "--check", *given)
    assert (missing.status, missing.out) == (1, "")
    assert "is not current" in missing.err
    written = shell("replication", "render", "--output", str(output), *given)
    assert (written.status, written.out) == (0, "")
    assert "written: 1 database\n" in written.err
    assert output.read_text() == printed.out
    assert output.stat().st_mode & 0o777 == 0o600
    assert shell("replication", "render", "--check", *given).status == 0
    again = shell("replication", "render", "--output", str(output), *given)
    assert "is current" in again.err
    database(tmp_path, ids[1])
    assert shell("replication", "render", "--check", *given).status == 1


def test_render_without_replication_tenants_or_a_store(shell: CommandLine, tmp_path: Path) -> None:
    key = "MultiTenant__FileDb__Replication__UseReplication"
    off = shell("replication", "render", *words(tmp_path, **{key: False}))
    assert off.status == EXIT_CONFIGURATION
    assert f"{REPLICATION}:UseReplication: is false" in off.err
    alone = shell("replication", "render", *words(tmp_path, MultiTenant__Enabled=False))
    assert alone.status == EXIT_CONFIGURATION
    nowhere = shell("replication", "render", *words(tmp_path))
    assert nowhere.status == EXIT_UNAVAILABLE
    place = str(tmp_path / "none" / "r.yml")
    add_tenants(tmp_path, ["a"])
    unwritable = shell("replication", "render", "--output", place, *words(tmp_path))
    assert unwritable.status == 1
    assert "cannot be written" in unwritable.err


def test_replication_needs_tenants(
    shell: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = settings_of(**keys(tmp_path, MultiTenant__Enabled=False))
    with pytest.raises(OptionsValidationError, match="MultiTenant:Enabled"):
        Runtime(values)
    monkeypatch.setenv("SDK__WEBHOOKS__SECRET", SECRET)
    found = shell("config", "check", "--standalone", *words(tmp_path, MultiTenant__Enabled=False))
    assert found.status == EXIT_CONFIGURATION
    assert f"{REPLICATION}:UseReplication: needs tenants" in found.out


async def test_a_runtime_keeps_the_file_current_and_signals_the_replicator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, output = tmp_path / "out", tmp_path / "replicator.yml"
    replicator = subprocess.Popen([sys.executable, "-c", OBEDIENT, str(out), str(tmp_path / "pid")])
    try:
        with trio.fail_after(60):
            await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
            runtime = Runtime(settings_of(**keys(tmp_path)))
            async with trio.open_nursery() as nursery:
                await nursery.start(runtime.run)
                assert paths(output.read_text()) == []
                # Two signals of which the first has not arrived would be one.
                await until(lambda: out.read_text().count("reloaded") == 1)
                tenancy = runtime.receiver.tenancy
                tenant = await tenancy.service.add("a", name="a")
                async with tenancy.tenant_db(tenant) as opened:
                    await opened.run(lambda connection: connection.execute("CREATE TABLE t (x)"))
                await until(lambda: len(paths(output.read_text())) == 1)
                await until(lambda: out.read_text().count("reloaded") == 2)
                await tenancy.service.deactivate(tenant)
                await until(lambda: paths(output.read_text()) == [])
                runtime.shut_down("test")
            assert runtime.report is not None
        assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []
        assert replicator.poll() is None
    finally:
        replicator.kill()
        replicator.wait()


async def test_a_new_tenant_is_replicated_by_a_replicator_of_another_process(
    tmp_path: Path,
) -> None:
    program("litestream")
    values = {"MultiTenant__FileDb__Replication__MetricsPort": free_port()}
    pid_file, replica = tmp_path / "pid", tmp_path / "replica"
    replicator: subprocess.Popen[bytes] | None = None
    runtime = Runtime(settings_of(**keys(tmp_path, **values)))
    try:
        async with running(runtime):
            command = [sys.executable, "-m", "sdk_trio", "replication", "run"]
            replicator = subprocess.Popen(
                [*command, "--pid-file", str(pid_file), *words(tmp_path, **values)],
                stderr=subprocess.DEVNULL,
            )
            await until(lambda: pid_file.exists() and pid_file.read_text().strip())
            tenancy = runtime.receiver.tenancy
            for name in ("a", "b"):
                tenant = await tenancy.service.add(name, name=name)
                async with tenancy.tenant_db(tenant) as opened:
                    await opened.run(lambda database: database.execute("CREATE TABLE t (x)"))
                copies = replica / f"{name}.{tenant.id}"
                await until(lambda copies=copies: list(copies.rglob("*.ltx")))
    finally:
        if replicator is not None:
            replicator.terminate()
            assert replicator.wait(60) == 0


async def test_without_the_switch_nothing_is_regenerated_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    key = "MultiTenant__FileDb__Replication__AutoRegenerateOnTenantChange"
    runtime = Runtime(settings_of(**keys(tmp_path, **{key: False})))
    async with running(runtime):
        pass
    assert not (tmp_path / "replicator.yml").exists()
    assert "replication.left_alone" in [r.sdk[0] for r in caplog.records if hasattr(r, "sdk")]


async def test_a_fleet_that_is_large_for_its_sync_interval_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = keys(
        tmp_path,
        MultiTenant__FileDb__Replication__ReplicaTargetType="ObjectStore",
        MultiTenant__FileDb__Replication__ObjectStore__Bucket="b",
    )
    ids = await trio.to_thread.run_sync(add_tenants, tmp_path, [f"t{i}" for i in range(24)])
    for tenant_id in ids:
        database(tmp_path, tenant_id)
    runtime = Runtime(settings_of(**values))
    async with running(runtime):
        await runtime.receiver.tenancy.service.deactivate(ids[0])
        await until(lambda: len(paths((tmp_path / "replicator.yml").read_text())) == 22)
    warned = [r.sdk for r in caplog.records if r.name.endswith("replication") and r.levelno == 30]
    large = [fields["databases"] for event, fields in warned if event.endswith("fleet_is_large")]
    assert large == [23]
