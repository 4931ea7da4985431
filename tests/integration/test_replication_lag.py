"""The lag of an operator's own replicator that has no control socket: the real one, measured.

Its configuration is handwritten, so it can reach its target by another route than ours. This allows
an outage of its uploads only.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio
from support.programs import program
from support.replica_host import ReplicaHost
from support.replica_targets import local_disk, object_store
from support.waiting import PATIENCE_SECONDS, until

from sdk_trio.config.options.tenants import ReplicationOptions
from sdk_trio.errors import ReplicatorError
from sdk_trio.replication import health_check
from sdk_trio.replication.health import DatabaseMetrics, HealthState
from sdk_trio.replication.health_check import HealthChecker, LagSurveyor
from sdk_trio.replication.manifest import TenantDatabaseFile, child_environment, render_manifest
from sdk_trio.replication.replica import ReplicaReader, TenantReplica

LAG_KEY = "MultiTenant:FileDb:Replication:HealthCheckMaxLagSeconds"


@contextmanager
def replicating(host: ReplicaHost, *changes: tuple[str, str]) -> Iterator[None]:
    """Run a bare replicator without a socket; its target's own way is made by ``changes``."""
    files = [
        TenantDatabaseFile(host.replica_name(name), str(host.database(name)))
        for name in host.tenants
    ]
    options = host.settings.multi_tenant.file_db.replication
    text = render_manifest(options, files)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    assert "socket" not in text
    config = host.root / "by-hand.yml"
    config.write_text(text)
    command = [program("litestream"), "replicate", "-config", str(config)]
    with host._child(command, child_environment(options, host.environ)):
        yield


def checker_of(host: ReplicaHost, **changes) -> HealthChecker:
    settings = host.settings

    async def wanted() -> dict[str, str]:
        await trio.lowlevel.checkpoint()
        return {str(host.database(name)): host.replica_name(name) for name in host.tenants}

    reader = ReplicaReader(settings, environ=host.environ | changes)
    return HealthChecker(
        settings.multi_tenant.file_db.replication,
        str(host.root / "no.sock"),
        wanted=wanted,
        surveyor=LagSurveyor(settings, reader, pause=0.0),
    )


@attrs.define
class Seen:
    checker: HealthChecker

    async def is_healthy(self) -> bool:
        return (await self.checker.check()).state is HealthState.HEALTHY

    async def is_behind(self, path: str) -> bool:
        health = await self.checker.check()
        behind = [each.path for each in health.databases if "s behind" in each.reason]
        return health.state is HealthState.DEGRADED and behind == [path]


async def test_uploads_that_fail_show_as_lag_and_it_recovers(tmp_path: Path) -> None:
    with local_disk(tmp_path / "target") as target:
        host = ReplicaHost(tmp_path / "host", target, {LAG_KEY: 1})
        await trio.to_thread.run_sync(host.add, "quiet")
        await trio.to_thread.run_sync(host.add, "busy")
        way = tmp_path / "way"
        base = Path(target.keys["Path"])
        base.mkdir(mode=0o700)
        way.symlink_to(base)
        with trio.fail_after(3 * PATIENCE_SECONDS), replicating(host, (str(base), str(way))):
            checker = checker_of(host)
            seen = Seen(checker)
            await until(seen.is_healthy, PATIENCE_SECONDS)
            health = checker.latest
            assert health is not None
            assert health.reachable
            assert health.lag_seconds is not None

            cut = trio.current_time()
            way.unlink()
            way.write_text("no directory")
            host.write("busy", 5)
            await until(partial(seen.is_behind, str(host.database("busy"))), PATIENCE_SECONDS)
            lag = checker.latest.lag_seconds
            assert 1 < lag <= trio.current_time() - cut + 1

            way.unlink()
            way.symlink_to(base)
            await until(seen.is_healthy, PATIENCE_SECONDS)
        assert host.restore("busy") == host.rows("busy")
        assert not list(host.root.rglob(".listing-*"))


async def test_an_object_store_that_does_not_answer_is_said_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_store(tmp_path / "target") as target:
        target.wait_ready()
        host = ReplicaHost(tmp_path / "host", target, {LAG_KEY: 1})
        await trio.to_thread.run_sync(host.add, "acme")
        with trio.fail_after(3 * PATIENCE_SECONDS), replicating(host):
            checker = checker_of(host)
            await until(Seen(checker).is_healthy, PATIENCE_SECONDS)
            monkeypatch.setattr(health_check, "SURVEY_SECONDS", 1.0)
            target.stop()
            host.ending_seconds = 1
            host.write("acme", 3)

            async def is_said() -> bool:
                health = await checker.check()
                return health.state is HealthState.DEGRADED and "target" in health.reason

            await until(is_said, PATIENCE_SECONDS)
            said = repr(checker.latest)
            assert not any(value in said for value in target.environ.values())
            # Waiting transactions get older although no server can be queried.
            await until(partial(_is_older, checker, 1.0), PATIENCE_SECONDS)


async def _is_older(checker: HealthChecker, seconds: float) -> bool:
    lag = (await checker.check()).lag_seconds
    assert lag is not None
    return lag > seconds


async def test_a_binary_that_is_missing_and_another_target_are_said(tmp_path: Path) -> None:
    with local_disk(tmp_path / "target") as target:
        host = ReplicaHost(tmp_path / "host", target)
        await trio.to_thread.run_sync(host.add, "acme")
        elsewhere = str(tmp_path / "elsewhere")
        changes = (str(target.keys["Path"]), elsewhere)
        with trio.fail_after(3 * PATIENCE_SECONDS), replicating(host, changes):
            checker = checker_of(host)

            async def is_said() -> bool:
                health = await checker.check()
                return "at the configured path" in health.reason

            await until(is_said, PATIENCE_SECONDS)
            assert checker.latest.state is HealthState.DEGRADED
            settings = host.settings
            broken = ReplicaReader(settings, binary=str(tmp_path / "none"))
            checker._surveyor = LagSurveyor(settings, broken, pause=0.0)
            health = await checker.check()
            assert health.state is HealthState.DEGRADED
            assert "ReplicatorPath" in health.reason


async def test_a_data_directory_that_is_gone_is_said_and_ends_nothing(tmp_path: Path) -> None:
    with local_disk(tmp_path / "target") as target:
        host = ReplicaHost(tmp_path / "host", target)
        await trio.to_thread.run_sync(host.add, "acme")
        surveyor = LagSurveyor(host.settings, ReplicaReader(host.settings), pause=0.0)
        gone = tmp_path / "file"
        gone.touch()
        surveyor._data = gone / "data"
        path = str(host.database("acme"))
        with trio.fail_after(PATIENCE_SECONDS):
            await surveyor.survey({path: "acme"}, {path: DatabaseMetrics(1, 1)})
        assert "cannot be created" in surveyor.problem


async def test_a_key_in_the_replicators_words_is_hidden_also_where_they_are_cut(
    tmp_path: Path,
) -> None:
    key = "a-test-value-that-is-no-key-of-anybody"
    binary = tmp_path / "binary"
    binary.write_text(f"#!/bin/sh\necho 'Error: {'x' * 390} {key}' >&2\nexit 1\n")
    binary.chmod(0o700)
    replica = TenantReplica(str(binary), tmp_path / "c.yml", "a.db", dict(os.environ), [key])
    with trio.fail_after(PATIENCE_SECONDS), pytest.raises(ReplicatorError) as caught:
        await replica.list_files()
    assert key[:5] not in str(caught.value)


async def test_a_survey_is_bounded_and_the_next_one_takes_what_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_disk(tmp_path / "target") as target:
        host = ReplicaHost(tmp_path / "host", target)
        for name in ("acme", "bolt", "cogs"):
            await trio.to_thread.run_sync(host.add, name)
        with trio.fail_after(3 * PATIENCE_SECONDS), replicating(host):
            await until(Seen(checker_of(host)).is_healthy, PATIENCE_SECONDS)
            monkeypatch.setattr(health_check, "SURVEYED", 1)
            checker = checker_of(host)
            left = []
            for _ in range(3):
                health = await checker.check()
                left.append(sum("not compared" in each.reason for each in health.databases))
            assert left == [2, 1, 0]
            await until(Seen(checker).is_healthy, PATIENCE_SECONDS)


async def test_metrics_of_many_databases_do_not_keep_the_event_loop(tmp_path, monkeypatch):
    threads = []

    async def answers(stream: trio.SocketStream) -> None:
        with stream.socket:
            await stream.receive_some()
            body = b'litestream_txid{db="a"} 1\n'
            await stream.send_all(b"HTTP/1.0 200 OK\r\n\r\n" + body)

    def read(text: str) -> dict[str, DatabaseMetrics]:
        threads.append(threading.current_thread())
        return {}

    monkeypatch.setattr(health_check, "read_metrics", read)
    with trio.fail_after(PATIENCE_SECONDS):
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio.serve_tcp, answers, 0, host="127.0.0.1"))
            options = ReplicationOptions(metrics_port=listener.socket.getsockname()[1])
            checker = HealthChecker(options, str(tmp_path / "no.sock"), wanted=_none)
            await checker.check()
            nursery.cancel_scope.cancel()
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def _none() -> list[str]:
    await trio.lowlevel.checkpoint()
    return []


def test_the_command_says_it_too(tmp_path: Path) -> None:
    with local_disk(tmp_path / "target") as target:
        host = ReplicaHost(tmp_path / "host", target)
        host.add("acme")
        with replicating(host):
            trio.run(_until_healthy, host)
            ended = host.run("replication", "status", "--format", "json")
            assert (ended.status, ended.document[0]["state"]) == (0, "Healthy"), ended.err
            assert ended.document[0]["lag_seconds"] == 0


def test_the_command_does_not_believe_a_replicator_that_reads_nothing(tmp_path: Path) -> None:
    with local_disk(tmp_path / "target") as target:
        host = ReplicaHost(tmp_path / "host", target)
        host.add("acme")
        with replicating(host):
            trio.run(_until_healthy, host)
        # The replicator's directory beside the database is a file now, so every read of it fails.
        database = host.database("acme")
        kept = database.with_name(f".{database.name}-litestream") / "ltx"
        shutil.rmtree(kept)
        kept.touch()
        host.write("acme", 3)
        with replicating(host):
            trio.run(_until_it_is_not_seen_to_read, host)
            ended = host.run("replication", "status", "--format", "json")
            assert (ended.status, ended.document[0]["state"]) == (1, "Degraded"), ended.err
            assert "not been seen to read it" in ended.document[0]["reason"]


async def _until_it_is_not_seen_to_read(host: ReplicaHost) -> None:
    checker = checker_of(host)

    async def is_said() -> bool:
        return "not been seen to read it" in (await checker.check()).reason

    await until(is_said, PATIENCE_SECONDS)


async def _until_healthy(host: ReplicaHost) -> None:
    await until(Seen(checker_of(host)).is_healthy, PATIENCE_SECONDS)
