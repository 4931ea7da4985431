"""The supervisor with the real replicator: starts, reloads, crashes, and ends."""

import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import attrs
import msgspec
import pytest
import trio
from support.ports import free_port
from support.programs import program
from support.replicating import is_running, local_fleet, replicators_of, rows, said, write
from support.waiting import PATIENCE_SECONDS, until

from sdk_trio.config.fields import ReplicaTargetType
from sdk_trio.config.options.tenants import ObjectStoreOptions
from sdk_trio.errors import ReplicatorError, StoreLockedError
from sdk_trio.replication.child import confirm, run_child
from sdk_trio.replication.health import HealthState
from sdk_trio.replication.health_check import HealthChecker
from sdk_trio.replication.plan import SupervisorTimeouts
from sdk_trio.replication.running_replicator import lock_databases
from sdk_trio.replication.supervisor import Supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

QUICK = SupervisorTimeouts(
    stop=5, reload_stop=5, start=10, start_each=0.02, lock=5, watch=0.3, silent_checks=2
)


@pytest.fixture
def fleet(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="sdk_trio")
    fleet = local_fleet(tmp_path)
    fleet.add(2)
    fleet.render()
    yield fleet
    assert replicators_of(tmp_path) == [], "a replicator was left behind"


@asynccontextmanager
async def supervised(supervisor, *, confirmed=True):
    """Run a supervisor for the length of the block, and stop it then.

    The block begins when its replicator is confirmed, unless that is what the test is about.
    """
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            if confirmed:
                await until(lambda: supervisor.confirmed)
            yield
            supervisor.stop()


def supervisor_of(fleet, patience=QUICK, **changes):
    options = msgspec.structs.replace(fleet.options, **changes)
    return Supervisor(options, fleet.directory, patience=patience, fraction=lambda: 0.1)


async def synced(supervisor, paths):
    listed = {d.path: d.last_sync_at for d in await supervisor.client.list_databases()}
    return all(listed.get(path) for path in paths)


async def all_synced(supervisor, fleet):
    return supervisor.confirmed and await synced(supervisor, [f.path for f in fleet.files])


async def test_it_replicates_and_its_end_brings_the_last_rows(fleet, caplog):
    supervisor = supervisor_of(fleet)
    async with supervised(supervisor):
        await until(lambda: all_synced(supervisor, fleet))
        write(fleet.files[0].path, 5)
    assert fleet.restored(fleet.files[0]) == rows(fleet.files[0].path)
    assert said(caplog, "replication.started")[0]["databases"] == 2
    assert said(caplog, "replication.stopped")
    assert supervisor.pid is None


async def test_the_child_gets_no_secret_of_ours(fleet, monkeypatch):
    """Its environment contains only the variables that the manifest names."""
    planted = {
        "SDK__WEBHOOKS__SECRET": "planted-webhook",
        "SDK__ACCESSTOKEN": "planted-token",
        "SDK_ADMIN_TOKEN": "planted-admin",
        "TENANT_A_SECRET": "planted-tenant",
        "EMAIL_API_KEY": "planted-email",
        "AWS_SECRET_ACCESS_KEY": "planted-aws",
    }
    for name, value in {**planted, "NO_PROXY": "example.com"}.items():
        monkeypatch.setenv(name, value)
    supervisor = supervisor_of(fleet)
    async with supervised(supervisor):
        environ = Path(f"/proc/{supervisor.pid}/environ").read_bytes()
    assert b"planted" not in environ
    assert b"NO_PROXY=example.com" in environ.split(b"\0")


async def test_a_cancelled_caller_stops_it_in_an_orderly_way(fleet, caplog):
    supervisor = supervisor_of(fleet)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            await until(lambda: all_synced(supervisor, fleet))
            write(fleet.files[1].path, 5)
            nursery.cancel_scope.cancel()
    assert fleet.restored(fleet.files[1]) == rows(fleet.files[1].path)
    assert not said(caplog, "replication.killed")


async def test_a_new_tenant_is_replicated_after_a_reload(fleet, caplog):
    supervisor = supervisor_of(fleet)
    async with supervised(supervisor):
        new = fleet.add()
        fleet.render()
        assert await supervisor.reload(fleet.files)
        await until(lambda: synced(supervisor, [new[0].path]))
        assert said(caplog, "replication.reloaded")[-1]["added"] == 1
    assert fleet.restored(new[0]) == [1]


async def test_a_removed_database_is_unregistered_without_a_restart(fleet, caplog):
    supervisor = supervisor_of(fleet)
    async with supervised(supervisor):
        await until(lambda: all_synced(supervisor, fleet))
        pid, gone = supervisor.pid, fleet.files.pop()
        fleet.render()
        assert await supervisor.reload(fleet.files)
        assert supervisor.pid == pid
        assert gone.path not in open_files(pid)
        assert fleet.files[0].path in open_files(pid)
        assert said(caplog, "replication.reloaded")[-1]["removed"] == 1


def open_files(pid):
    """The paths of a process's open files, but of those that it closes meanwhile."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found


async def test_databases_come_and_go_and_the_others_are_replicated_all_the_while(fleet, caplog):
    fleet.hurried = False
    fleet.render()
    supervisor = supervisor_of(fleet)
    others = [file.path for file in fleet.files]
    async with supervised(supervisor):
        await until(lambda: all_synced(supervisor, fleet))
        pid = supervisor.pid
        for round_ in range(3):
            [new] = fleet.add()
            fleet.render()
            assert await supervisor.reload(fleet.files)
            await until(lambda path=new.path: synced(supervisor, [path]))
            assert (supervisor.pid, supervisor.confirmed) == (pid, True)
            write(new.path, round_)
        gone = fleet.files.pop(0)
        fleet.render()
        assert await supervisor.reload(fleet.files)
        assert supervisor.pid == pid
        # A removed database returns, like that of a tenant that is suspended and reactivated.
        write(gone.path, 2)
        fleet.files.append(gone)
        fleet.render()
        assert await supervisor.reload(fleet.files)
        await until(lambda: synced(supervisor, [gone.path]))
        assert supervisor.pid == pid
        assert await synced(supervisor, others)
        for file in fleet.files:
            await supervisor.client.sync(file.path)
        # After a crash it has all of them again, from the configuration.
        os.kill(pid, signal.SIGKILL)
        await until(lambda: supervisor.confirmed and supervisor.pid not in (pid, None))
        assert supervisor.databases == {file.path for file in fleet.files}
    for file in fleet.files:
        assert fleet.restored(file) == rows(file.path)
    reloads = said(caplog, "replication.reloaded")
    assert [(each["added"], each["removed"]) for each in reloads] == [
        *[(1, 0)] * 3,
        (0, 1),
        (1, 0),
    ]


async def test_a_replicator_that_refuses_a_new_database_is_restarted_with_it(fleet, caplog):
    fleet.hurried = False
    fleet.render()
    supervisor = supervisor_of(fleet)

    async def refuse(path, url):
        await trio.lowlevel.checkpoint()
        raise ReplicatorError("refused")

    supervisor.client.register = refuse
    async with supervised(supervisor):
        pid, [new] = supervisor.pid, fleet.add()
        fleet.render()
        assert await supervisor.reload(fleet.files)
        assert supervisor.pid != pid
        await until(lambda: synced(supervisor, [new.path]))
        assert said(caplog, "replication.change_failed")[0]["error"] == "refused"


async def test_a_broken_configuration_keeps_the_old_one_running(fleet, caplog):
    supervisor = supervisor_of(fleet)
    async with supervised(supervisor):
        pid = supervisor.pid
        fleet.config.write_text("dbs: [oops")
        assert not await supervisor.reload(fleet.files)
        assert supervisor.pid == pid
        assert said(caplog, "replication.failed")[-1]["kept"] == 2
        # After a crash it uses the working configuration, not the broken file.
        os.kill(pid, signal.SIGKILL)
        await until(lambda: supervisor.confirmed and supervisor.pid != pid)
        assert len(supervisor.databases) == 2


async def test_a_killed_child_is_started_again_and_no_row_is_lost(fleet, caplog):
    supervisor = supervisor_of(fleet)
    async with supervised(supervisor):
        pid = supervisor.pid
        write(fleet.files[0].path, 3)
        os.kill(pid, signal.SIGKILL)
        write(fleet.files[0].path, 3)
        await until(lambda: supervisor.pid not in (pid, None))
        await until(lambda: all_synced(supervisor, fleet))
        assert replicators_of(fleet.root) == [supervisor.pid]
        assert "SIGKILL" in said(caplog, "replication.restarted")[0]["reason"]
    assert fleet.restored(fleet.files[0]) == rows(fleet.files[0].path)


async def test_a_child_that_hangs_is_replaced(fleet, caplog):
    supervisor = supervisor_of(fleet, attrs.evolve(QUICK, reload_stop=0.3))
    supervisor.client._seconds = 0.3
    async with supervised(supervisor):
        pid = supervisor.pid
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: supervisor.confirmed and supervisor.pid not in (pid, None))
        assert not is_running(pid)
        assert "hangs" in said(caplog, "replication.failed")[0]["error"]


async def test_a_target_unavailable_from_the_start_is_not_a_hanging_replicator(fleet, monkeypatch):
    # It lists nothing then, and still answers who it is.
    monkeypatch.setenv("OBJECT_STORE_ACCESS_KEY_ID", "test-value-no-key")
    monkeypatch.setenv("OBJECT_STORE_SECRET_ACCESS_KEY", "test-value-no-secret")
    away = ObjectStoreOptions(
        bucket="b", endpoint_url=f"http://127.0.0.1:{free_port()}", force_path_style=True
    )
    fleet.options = msgspec.structs.replace(
        fleet.options,
        replica_target_type=ReplicaTargetType.OBJECT_STORE,
        object_store=away,
        health_check_max_lag_seconds=1,
    )
    fleet.render()
    # Enough looks in two seconds if it were silent, and too many for a busy machine to miss them.
    patience = attrs.evolve(QUICK, stop=0.5, watch=0.1, silent_checks=4)
    supervisor = supervisor_of(fleet, patience)

    async def wanted():
        await trio.lowlevel.checkpoint()
        return {file.path: file.replica for file in fleet.files}

    async def lists_nothing():
        try:
            await supervisor.client.list_databases()
        except ReplicatorError:
            return True
        return False

    checker = HealthChecker(fleet.options, supervisor.socket_path, wanted=wanted)
    async with supervised(supervisor):
        pid, supervisor.client._seconds = supervisor.pid, 0.3
        checker._client = supervisor.client
        await until(lists_nothing)
        began = trio.current_time()
        while trio.current_time() - began < 2:
            await trio.sleep(0.2)
            assert (supervisor.pid, supervisor.failure) == (pid, None)

        async def is_reachable():
            health = await checker.check()
            return health if health.reachable else None

        health = await until(is_reachable)
        assert health.state is HealthState.DEGRADED
        assert "check the target" in health.reason


async def test_a_hanging_stop_is_cut_short_and_logged(fleet, caplog):
    supervisor = supervisor_of(fleet, attrs.evolve(QUICK, stop=0.5, watch=60))
    async with supervised(supervisor):
        os.kill(supervisor.pid, signal.SIGSTOP)
    assert said(caplog, "replication.killed")[0]["after"] == 0.5


async def test_a_stop_takes_no_longer_than_what_is_left_of_the_drain(fleet, caplog):
    supervisor = supervisor_of(fleet, attrs.evolve(QUICK, stop=60, last_sync=0.2, watch=60))
    async with supervised(supervisor):
        os.kill(supervisor.pid, signal.SIGSTOP)
        supervisor.end_by(trio.current_time() + 2)
    assert 0.2 < said(caplog, "replication.killed")[0]["after"] <= 2


async def test_a_stop_after_the_end_of_the_drain_still_has_a_moment(fleet, caplog):
    supervisor = supervisor_of(fleet, attrs.evolve(QUICK, stop=60, last_sync=0.3, watch=60))
    async with supervised(supervisor):
        os.kill(supervisor.pid, signal.SIGSTOP)
        supervisor.end_by(trio.current_time() - 1)
    assert said(caplog, "replication.killed")[0]["after"] == 0.3


async def test_a_stop_does_not_wait_for_a_binary_that_hangs_as_it_reads(fleet, tmp_path):
    binary = tmp_path / "hangs"
    binary.write_text('#!/bin/sh\ntouch "$0.began"\nexec sleep 60\n')
    binary.chmod(0o755)
    supervisor = supervisor_of(fleet, replicator_path=str(binary))
    async with supervised(supervisor, confirmed=False):
        await until(tmp_path.joinpath("hangs.began").exists)


async def test_force_ends_it_at_once(fleet):
    supervisor = supervisor_of(fleet, attrs.evolve(QUICK, stop=60, watch=60))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            await until(lambda: supervisor.confirmed)
            os.kill(supervisor.pid, signal.SIGSTOP)
            supervisor.stop()
            await trio.sleep(0.1)
            supervisor.force()


async def test_a_missing_binary_is_reported_until_it_is_there(fleet, caplog, tmp_path):
    path = tmp_path / "later"
    supervisor = supervisor_of(fleet, replicator_path=str(path))
    async with supervised(supervisor, confirmed=False):
        assert not await supervisor.reload([])
        assert "ReplicatorPath" in said(caplog, "replication.failed")[0]["error"]
        path.symlink_to(program("litestream"))
        await until(lambda: supervisor.confirmed)


async def test_a_target_that_ends_it_at_the_start_is_reported_with_its_last_words(
    fleet, caplog, tmp_path
):
    bad = fleet.config.read_text().replace("type: file", "type: sftp\n      host: 127.0.0.1:1")
    fleet.config.write_text(
        bad.replace("type: sftp", "type: sftp\n      user: u\n      key-path: /no/key")
    )
    supervisor = supervisor_of(fleet)
    async with supervised(supervisor, confirmed=False):
        await until(lambda: len(said(caplog, "replication.failed")) >= 2)
        failed = said(caplog, "replication.failed")
        assert "/no/key" in str(failed[0]["last_lines"])
        assert failed[1]["failures"] == 2
        assert "status 1" in supervisor.failure
        fleet.render()
        supervisor.request_reload()
        await until(lambda: supervisor.confirmed)
        assert supervisor.failure is None


async def test_a_busy_metrics_port_is_reported_and_stops_no_replication(fleet, caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", fleet.options.metrics_port))
        taken.listen()
        supervisor = supervisor_of(fleet)
        async with supervised(supervisor):
            await until(lambda: all_synced(supervisor, fleet))
            await until(lambda: "metrics" in str(said(caplog, "replication.replicator_said")))


async def test_a_second_supervisor_of_the_same_databases_is_refused(fleet):
    first = supervisor_of(fleet)
    async with supervised(first):
        with pytest.raises(StoreLockedError, match=f"process {os.getpid()}"):
            await supervisor_of(fleet, attrs.evolve(QUICK, lock=0.2)).run()
        assert replicators_of(fleet.root) == [first.pid]
    second = supervisor_of(fleet)
    async with supervised(second):
        pass


async def test_a_foreign_replicator_keeps_ours_from_starting_until_it_ends(fleet, caplog):
    theirs = subprocess.Popen(
        [program("litestream"), "replicate", "-config", fleet.config],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    supervisor = supervisor_of(fleet)
    try:
        with trio.fail_after(60):
            await until((fleet.directory / "replicator.sock").exists)
            async with trio.open_nursery() as nursery:
                await nursery.start(supervisor.run)
                await until(lambda: said(caplog, "replication.failed"))
                assert f"process {theirs.pid}" in supervisor.failure
                assert replicators_of(fleet.root) == [theirs.pid]
                theirs.terminate()
                await until(lambda: supervisor.confirmed)
                assert theirs.poll() is not None
                supervisor.stop()
    finally:
        theirs.kill()
        theirs.wait()


def test_a_directory_whose_socket_would_have_too_long_a_path_is_refused(fleet):
    with pytest.raises(ReplicatorError, match="FileDb:Directory"):
        Supervisor(fleet.options, Path("/" + "x" * 120))


async def test_a_configuration_that_ends_the_replicator_gives_way_to_the_one_before(fleet, caplog):
    supervisor = supervisor_of(fleet)
    async with supervised(supervisor):
        good = set(supervisor.databases)
        new = fleet.add()
        fleet.render()
        text = fleet.config.read_text()
        bad = "type: sftp\n      host: 127.0.0.1:1\n      user: u\n      key-path: /no/key"
        fleet.config.write_text(text.replace("type: file", bad))
        assert not await supervisor.reload(fleet.files)
        await until(lambda: supervisor.confirmed)
        assert supervisor.databases == good
        assert "/no/key" in str(said(caplog, "replication.failed")[0]["last_lines"])
        fleet.render()
        assert await supervisor.reload(fleet.files)
        assert new[0].path in supervisor.databases


async def test_a_database_that_the_replicator_lost_comes_back(fleet, caplog):
    supervisor = supervisor_of(fleet)
    async with supervised(supervisor):
        await until(lambda: all_synced(supervisor, fleet))
        await supervisor.client.unregister(fleet.files[0].path)
        await until(lambda: said(caplog, "replication.failed"))
        assert fleet.files[0].path in supervisor.failure
        await until(lambda: all_synced(supervisor, fleet))


async def test_only_the_right_databases_of_the_right_process_are_a_confirmation(fleet):
    supervisor = supervisor_of(fleet)
    async with supervised(supervisor):
        client, pid, paths = supervisor.client, supervisor.pid, supervisor.databases
        await confirm(client, pid, paths, seconds=5)

        async def is_none(pid, wanted, why):
            with pytest.raises(ReplicatorError, match=why):
                await confirm(client, pid, wanted, seconds=2)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(is_none, pid, {*paths, "/none"}, "1 missing, such as /none")
            nursery.start_soon(is_none, pid, list(paths)[:1], "not wanted")
            nursery.start_soon(is_none, pid + 1, paths, "not answered")


async def test_the_lock_lasts_as_long_as_the_child(tmp_path):
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            with lock_databases(tmp_path) as lock:
                run = partial(run_child, ["/bin/sleep", "60"], environment={}, inherited=(lock,))
                child = await nursery.start(run)
                # It is a launcher at first, which a signal ends all the same.
                nursery.start_soon(drain, child.output)
            with pytest.raises(StoreLockedError, match="or its child"), lock_databases(tmp_path):
                pass
            child.send(signal.SIGKILL)
            await child.ended.wait()
            with lock_databases(tmp_path):
                pass
    assert child.ending == "signal SIGKILL"


async def drain(output):
    async with output:
        async for _ in output:
            pass


async def test_a_program_that_cannot_be_started_is_an_error_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(ReplicatorError, match="cannot be started"):
        await run_child(["/bin/true"], environment={})
