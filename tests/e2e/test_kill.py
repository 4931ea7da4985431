"""The main promise: events answered 200 are handled, whatever happens to the process."""

import collections
import os
import signal
from pathlib import Path

import attrs
import pytest
import trio
from support.command_forker import Program, start_program
from support.deliveries import SECRET
from support.logs import entries_in
from support.ports import free_port
from support.wire import Wire

from sdk_trio.records.deliveries import DeliveryState
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sqlite_inbox import SqliteInbox
from sdk_trio.testing import sign_delivery

APPLICATION = """
import os, trio, sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
log = os.open(os.environ["HANDLED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@handlers.on(OrderPaidEvent, enqueue=True)
async def handle(event):
    await trio.sleep(float(os.environ.get("HANDLER_SECONDS", "0.002")))
    os.write(log, event.webhook_id.encode() + b"\\n")
"""


@attrs.define
class Daemon:
    """``python -m sdk_trio run`` in a directory of its own, on a port that stays the same."""

    directory: Path
    port: int
    process: Program | None = None
    extra: tuple[str, ...] = ()
    handler_seconds: str = "0.002"

    async def start(self) -> None:
        (self.directory / "application.py").write_text(APPLICATION)
        settings = {
            "Storage:Path": str(self.directory / "data"),
            "Server:Bind": f"127.0.0.1:{self.port}",
            "Admin:Bind": "127.0.0.1:0",
            "Webhooks:RequireHttps": "false",
        }
        words = ["run", "--standalone", "--app", "application:handlers", *self.extra]
        for key, value in settings.items():
            words += ["--set", f"Sdk:{key}={value}"]
        environment = {
            **os.environ,
            "SDK__WEBHOOKS__SECRET": SECRET,
            "HANDLED": str(self.handled_file),
            "HANDLER_SECONDS": self.handler_seconds,
        }
        with (self.directory / "log").open("a") as log:
            self.process = start_program(
                words, directory=self.directory, environ=environment, stdout=log, stderr=log
            )
        with trio.fail_after(60):
            while True:
                assert self.process.poll() is None, (self.directory / "log").read_text()
                try:
                    with await Wire.connect(self.url):
                        return
                except OSError:
                    await trio.sleep(0.02)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def handled_file(self) -> Path:
        return self.directory / "handled"

    def handled(self) -> list[str]:
        return self.handled_file.read_text().split() if self.handled_file.exists() else []

    def logged(self, event: str) -> list[dict]:
        return entries_in((self.directory / "log").read_text(), event)

    def kill(self, signal_number: int) -> None:
        os.kill(self.process.pid, signal_number)

    async def ended(self) -> int:
        with trio.fail_after(60):
            while self.process.poll() is None:
                await trio.sleep(0.01)
        return self.process.returncode

    async def finished_ids(self) -> set[str]:
        """The ids that the store calls done, read while no daemon runs."""
        inbox = await SqliteInbox.open(
            self.directory / "data" / "inbox.db",
            LeaseTerms(owner="test", lease_seconds=1, dedup_seconds=3600, payload_seconds=3600),
        )
        try:
            records = await inbox.find(state=DeliveryState.DONE, limit=100_000)
            return {record.webhook_id for record in records}
        finally:
            await inbox.close()

    async def counts(self) -> dict[str, int]:
        inbox = await SqliteInbox.open(
            self.directory / "data" / "inbox.db",
            LeaseTerms(owner="test", lease_seconds=1, dedup_seconds=3600, payload_seconds=3600),
        )
        try:
            return {str(state): n for state, n in (await inbox.counts()).items() if n}
        finally:
            await inbox.close()


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon(tmp_path, free_port())
    yield daemon
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.process.kill()
        daemon.process.wait()


@attrs.define
class Sender:
    """Delivers ids until stopped; remembers which were answered 200."""

    url: str
    pending: collections.deque
    acknowledged: set = attrs.Factory(set)

    async def run(self, connections: int) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(connections):
                nursery.start_soon(self._connection)

    async def _connection(self) -> None:
        try:
            with await Wire.connect(self.url) as wire:
                while self.pending:
                    await self._deliver(wire, self.pending.popleft())
        except (OSError, trio.BrokenResourceError):
            return  # the receiver was killed or has stopped

    async def _deliver(self, wire: Wire, webhook_id: str) -> None:
        delivery = sign_delivery("order.paid", secret=SECRET, webhook_id=webhook_id)
        answered = False
        try:
            answer = await wire.post(delivery)
            answered = answer.status == 200
            assert answered or answer.status == 503, answer
        finally:
            (self.acknowledged.add if answered else self.pending.append)(webhook_id)
        if not answered:
            await trio.sleep(0.02)


async def wait_until_all_done(daemon: Daemon, expected: set[str], seconds: float = 60) -> None:
    with trio.fail_after(seconds):
        while not expected <= set(daemon.handled()):
            await trio.sleep(0.1)


async def test_kill_9_in_mid_load_loses_nothing_and_repeats_nothing_done(daemon):
    ids = [f"kill{number}" for number in range(800)]
    pending = collections.deque(ids)
    acknowledged: set[str] = set()
    repeated: set[str] = set()
    for kill_at in (150, 350, 600, None):
        await daemon.start()
        sender = Sender(daemon.url, pending, acknowledged)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.run, 16)
            if kill_at is None:
                continue
            with trio.fail_after(60):
                while len(acknowledged) < kill_at:
                    await trio.sleep(0.001)
            daemon.kill(signal.SIGKILL)
        await daemon.ended()
        before = len(daemon.handled())
        done = await daemon.finished_ids()
        assert done, "the kill came before anything was done: it proved nothing"
        await daemon.start()
        await wait_until_all_done(daemon, set(acknowledged))
        repeated |= done & set(daemon.handled()[before:])
        daemon.kill(signal.SIGTERM)
        assert await daemon.ended() == 0
    assert acknowledged == set(ids)
    await wait_until_all_done(daemon, acknowledged)
    assert not repeated
    daemon.kill(signal.SIGTERM)
    assert await daemon.ended() == 0
    assert await daemon.counts() == {"done": 800}


async def test_term_in_mid_load_drains_in_time_exits_0_and_runs_nothing_twice(daemon):
    daemon.extra = ("--set", "Sdk:Webhooks:GracefulDrainTimeoutSeconds=60")
    pending = collections.deque(f"term{number}" for number in range(800))
    acknowledged: set[str] = set()
    await daemon.start()
    sender = Sender(daemon.url, pending, acknowledged)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.run, 16)
        with trio.fail_after(60):
            while len(acknowledged) < 200:
                await trio.sleep(0.001)
        daemon.kill(signal.SIGTERM)
        assert await daemon.ended() == 0
    # It ended because its work was done, not because its time was over.
    assert [report["persisted"] for report in daemon.logged("runtime.stopped")] == [0]
    await daemon.start()
    await wait_until_all_done(daemon, set(acknowledged))
    daemon.kill(signal.SIGTERM)
    assert await daemon.ended() == 0
    handled = daemon.handled()
    assert len(handled) == len(set(handled)) == len(acknowledged)


async def test_a_drain_that_times_out_leaves_the_rest_in_the_store_for_the_next_start(daemon):
    daemon.extra = ("--set", "Sdk:Webhooks:GracefulDrainTimeoutSeconds=1")
    daemon.handler_seconds = "600"
    pending = collections.deque(f"slow{number}" for number in range(40))
    await daemon.start()
    sender = Sender(daemon.url, pending)
    await sender.run(4)
    assert len(sender.acknowledged) == 40
    daemon.kill(signal.SIGTERM)
    assert await daemon.ended() == 0
    assert (await daemon.counts()) == {"received": 40}
    assert [report["persisted"] for report in daemon.logged("runtime.stopped")] == [40]
    daemon.handler_seconds = "0"
    await daemon.start()
    await wait_until_all_done(daemon, sender.acknowledged)
    daemon.kill(signal.SIGTERM)
    assert await daemon.ended() == 0
    assert await daemon.counts() == {"done": 40}
