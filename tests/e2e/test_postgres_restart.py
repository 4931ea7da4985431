"""Several receivers on one PostgreSQL server: events answered 200 are handled, whichever process
dies."""

import collections
import json
import os
import shutil
import signal
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise

import attrs
import pytest
import trio
from support.daemon import Daemon, Place
from support.deliveries import SECRET
from support.postgres import PostgresServer, binaries, running_server
from support.waiting import until, wait_until
from support.wire import Wire

from sdk_trio.testing import sign_delivery

APPLICATION = """
import os, trio, sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
log = os.open(os.environ["HANDLED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@handlers.on(OrderPaidEvent, enqueue=True)
async def handle(event):
    await trio.sleep(0.002)
    os.write(log, event.webhook_id.encode() + b"\\n")
"""


@pytest.fixture
def server():
    pytest.importorskip("psycopg", reason="the extra 'postgres' is not installed")
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed: apt-get install postgresql")
    server = PostgresServer(programs)
    server.start()
    yield server
    server.remove()


@attrs.define
class Hosts:
    """Hosts with a receiver each, that share a database and the file of what was handled."""

    server: PostgresServer
    dsn: str
    handled_file: object

    def handled(self) -> collections.Counter[str]:
        text = self.handled_file.read_text() if self.handled_file.exists() else ""
        return collections.Counter(text.split())

    def place(self, name: str) -> Place:
        directory = self.handled_file.parent / name
        directory.mkdir()
        (directory / "application.py").write_text(APPLICATION)
        place = Place(directory)
        place.environ.update(
            SDK_POSTGRES_DSN=self.dsn,
            SDK__STORAGE__BACKEND="Postgres",
            HANDLED=str(self.handled_file),
        )
        return place

    def execute(self, statement: str) -> list[tuple]:
        return self.server.execute(statement, self.dsn.rpartition("=")[2])

    def states(self) -> dict[str, int]:
        return dict(
            self.execute(
                "SELECT state, count(*) FROM (SELECT state FROM sdk_trio.work "
                "UNION ALL SELECT 'done' FROM sdk_trio.ended) AS delivery GROUP BY state"
            )
        )

    def leases(self) -> dict[str, int]:
        return dict(
            self.execute(
                "SELECT lease_owner, count(*) FROM sdk_trio.work WHERE lease_owner IS NOT NULL "
                "GROUP BY lease_owner"
            )
        )


@pytest.fixture
def hosts(server, tmp_path):
    return Hosts(server, server.empty(), tmp_path / "handled")


@pytest.fixture
def standby(server):
    """A standby without which the server acknowledges no commit."""
    standby = PostgresServer(server.programs, primary=server)
    standby.start()
    server.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
    server.execute("SELECT pg_reload_conf()")
    yield standby
    standby.remove()


@attrs.define
class Sender:
    """Delivers ids to one receiver, each again until it is answered 200, until all are."""

    daemon: Daemon
    pending: collections.deque
    acknowledged: set
    wanted: int
    refused: collections.Counter = attrs.Factory(collections.Counter)

    async def run(self) -> None:
        while len(self.acknowledged) < self.wanted:
            try:
                with await Wire.connect(self.daemon.receiver) as wire:
                    while self.pending:
                        await self._deliver(wire, self.pending.popleft())
                await trio.sleep(0.02)  # another host may die with one that it was given
            except (OSError, trio.BrokenResourceError):
                if self.daemon.process.poll() is not None:
                    return
                await trio.sleep(0.02)

    async def _deliver(self, wire: Wire, webhook_id: str) -> None:
        answered = False
        try:
            answer = await wire.post(
                sign_delivery("order.paid", secret=SECRET, webhook_id=webhook_id)
            )
            answered = answer.status == 200
            if not answered:
                self.refused[answer.status] += 1
        finally:
            (self.acknowledged.add if answered else self.pending.append)(webhook_id)
        if not answered:
            await trio.sleep(0.05)


def readiness(daemon: Daemon) -> int:
    try:
        with urllib.request.urlopen(f"{daemon.admin}/readyz", timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


async def until_ready(daemon, status):
    async def is_it():
        return await trio.to_thread.run_sync(readiness, daemon) == status

    await until(is_it)


async def test_a_server_that_is_killed_and_a_host_that_dies_lose_nothing_acknowledged(hosts):
    ids = [f"m{number}" for number in range(900)]
    pending, acknowledged = collections.deque(ids), set()
    with ExitStack() as stack:
        one = stack.enter_context(hosts.place("one").daemon("--app", "application:handlers"))
        two = stack.enter_context(hosts.place("two").daemon("--app", "application:handlers"))
        senders = [Sender(each, pending, acknowledged, len(ids)) for each in (one, two)]
        async with trio.open_nursery() as nursery:
            for sender in senders:
                for _ in range(4):
                    nursery.start_soon(sender.run)
            await until(lambda: len(acknowledged) > 200)
            hosts.server.kill()
            # While it is down, senders are asked to retry, and load balancers to use another host.
            await until(lambda: all(sender.refused[503] for sender in senders))
            await until_ready(one, 503)
            # Parts that retry each second, or each half second, log it only now and then.
            polls = [entry for entry in one.logged("store.unavailable") if "retry_in" in entry]
            assert polls
            await trio.sleep(2)
            await trio.to_thread.run_sync(hosts.server.start)
            await until(lambda: len(acknowledged) > 500)
            os.kill(two.process.pid, signal.SIGKILL)
        assert acknowledged == set(ids)
        assert {status for sender in senders for status in sender.refused} <= {503}
        await until_ready(one, 200)
        (answers,) = one.logged("store.answers")
        assert answers["seconds"] > 2
        assert answers["failed"] >= len(polls)
        # Until it was back: what comes behind that line would be the next outage's.
        lines = one.log.read_text().partition('"store.answers"')[0].splitlines()
        reported = [json.loads(line) for line in lines if '"store.unavailable"' in line]
        away = [entry for entry in reported if "retry_in" in entry]
        at = {name: [] for name in {entry["logger"] for entry in away}}
        for entry in away:
            at[entry["logger"]].append(datetime.fromisoformat(entry["timestamp"]).timestamp())
        pauses = [after - before for times in at.values() for before, after in pairwise(times)]
        assert all(pause > 9 for pause in pauses)
        # The other host's leases are left, which would end after 75 s.
        await until(lambda: len(hosts.leases()) <= 1)
        hosts.execute("UPDATE sdk_trio.work SET lease_until = 0")
        await until(lambda: set(hosts.handled()) >= acknowledged)
        await until(lambda: hosts.states() == {"done": len(ids)})
    handled = hosts.handled()
    repeated = {webhook_id for webhook_id, times in handled.items() if times > 1}
    # Run twice is only what ran when the server or its host went away, and had not been recorded.
    assert len(repeated) < 60


async def test_a_standby_that_is_promoted_has_everything_that_was_acknowledged(
    server, standby, tmp_path
):
    database = server.empty().rpartition("=")[2]
    both = f"host={server.directory},{standby.directory} user=owner dbname={database}"
    hosts = Hosts(server, both, tmp_path / "handled")
    ids = [f"m{number}" for number in range(600)]
    pending, acknowledged = collections.deque(ids), set()
    with ExitStack() as stack:
        daemons = [
            stack.enter_context(hosts.place(name).daemon("--app", "application:handlers"))
            for name in ("one", "two")
        ]
        senders = [Sender(each, pending, acknowledged, len(ids)) for each in daemons]
        async with trio.open_nursery() as nursery:
            for sender in senders:
                for _ in range(4):
                    nursery.start_soon(sender.run)
            await until(lambda: len(acknowledged) > 200)
            server.kill()
            for daemon in daemons:
                await until_ready(daemon, 503)
            at_the_failure = set(acknowledged)
            # A standby answers, but takes no write: it is not what they look for.
            await until(lambda: all(sender.refused[503] for sender in senders))
            assert acknowledged == at_the_failure
            await trio.to_thread.run_sync(standby.promote)
            for daemon in daemons:
                await until_ready(daemon, 200)
        assert acknowledged == set(ids)
        assert {status for sender in senders for status in sender.refused} <= {503}
        hosts.server = standby
        await until(lambda: set(hosts.handled()) >= acknowledged)
        await until(lambda: hosts.states() == {"done": len(ids)})
    repeated = [webhook_id for webhook_id, times in hosts.handled().items() if times > 1]
    assert len(repeated) < 60


#: Each run writes down its start, and waits while there is a file "hold" in the host's directory.
WAITING = APPLICATION.replace(
    "    await trio.sleep(0.002)\n",
    """    os.write(log, b"begun-" + event.webhook_id.encode() + b"\\n")
    while os.path.exists("hold"):
        await trio.sleep(0.01)
""",
)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no start knows who is dead")
def test_a_host_that_starts_again_takes_back_what_it_held_and_nothing_of_one_that_lives(tmp_path):
    hosts = Hosts(running_server(), running_server().fresh(), tmp_path / "handled")
    one, copy = hosts.place("one"), hosts.place("copy")
    for place in (one, copy):
        (place.directory / "application.py").write_text(WAITING)
        (place.directory / "hold").touch()
    one.environ["SDK__SERVER__PROCESSES"] = "2"
    with one.daemon("--app", "application:handlers") as daemon:
        signed = sign_delivery("order.paid", secret=SECRET, webhook_id="m1")
        request = urllib.request.Request(
            f"{daemon.receiver}/hooks/sdk", signed.body, dict(signed.headers)
        )
        assert urllib.request.urlopen(request, timeout=30).status == 200
        wait_until(lambda: hosts.handled()["begun-m1"] == 1, daemon.log.read_text)
        before = hosts.leases()
        assert list(before.values()) == [1]
        # A paused host is alive: a process with a copy of its directory takes nothing over.
        daemon.process.send_signal(signal.SIGSTOP)
        shutil.copytree(one.data, copy.data)
        with copy.daemon("--app", "application:handlers") as other:
            assert not other.logged("webhook.recovered")
            assert hosts.leases() == before
        daemon.process.kill()
        daemon.process.wait()
    with one.daemon("--app", "application:handlers") as daemon:
        # Sooner than the 75 s after which an unrenewed lease expires.
        (entry,) = daemon.logged("webhook.recovered")
        assert entry["events"] == 1
        (one.directory / "hold").unlink()
        wait_until(lambda: hosts.handled()["m1"] == 1, daemon.log.read_text)
    assert hosts.handled() == {"begun-m1": 2, "m1": 1}
