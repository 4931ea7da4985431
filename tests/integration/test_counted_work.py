"""The cost of one delivery, in counted work: steps of Trio, tasks, threads, function calls.

Seconds depend on the machine, counts do not: a change that makes a delivery more expensive fails
here on any machine. Deliveries come one after the other, each when the one before is done: then the
loop turns as often for each of them, however long the disk takes, while a crowd would share commits
and turns as the disk allows. What a timer does meanwhile makes some of them dearer, and so does a
busy machine, on which a start may be handed over before its run has ended. So the cheapest tenth
counts. The limits are slightly above the current numbers, because versions of Python and of
libraries differ. When a number falls, lower its limit; when it has to rise, state the reason in the
commit.
"""

import gc
import logging
import sys
import threading
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from types import FrameType
from typing import Any

import apsw
import attrs
import pytest
import trio
from support.deliveries import settings
from support.keyed import ByKey
from support.postgres import running_server
from support.postgres_work import forget_blocks
from support.serving import PATH, signed

from sdk_trio.base import logs
from sdk_trio.events import OrderPaidEvent
from sdk_trio.records.deliveries import Done, NewDelivery, Retry
from sdk_trio.server.deadline import RequestDeadline
from sdk_trio.webhooks import HandlerRegistry, WebhookReceiver

DELIVERIES = 50
WARM_UP = 20

#: SQLite's number of the synchronous setting that syncs every commit.
FULL = 2


@attrs.define
class Work:
    """Counted work of one delivery; ``objects`` are those that it leaves behind.

    ``commits`` are those of the store in SQLite, ``syncs`` those of them that wait for the disk.
    """

    steps: float = 0
    tasks: float = 0
    calls: float = 0
    objects: float = 0
    commits: float = 0
    syncs: float = 0


class Commits:
    """Counts the commits of a connection, and those that it syncs."""

    def __init__(self, connection: apsw.Connection) -> None:
        self.commits = self.syncs = 0
        self._synced = connection.pragma("synchronous") == FULL
        connection.trace_v2(apsw.SQLITE_TRACE_STMT, self._note)

    def _note(self, event: dict[str, Any]) -> None:
        if event["sql"].startswith("PRAGMA synchronous ="):
            self._synced = event["sql"].endswith("FULL")
        elif event["sql"] == "COMMIT":
            self.commits += 1
            self.syncs += self._synced


class Counter(trio.abc.Instrument):
    """Counts the work of one delivery after the other, until the receiver is idle again."""

    def __init__(self, app: WebhookReceiver) -> None:
        self._app = app
        self._wanted = 0
        self._idle = trio.Event()
        self.handled = 0
        self.steps = self.tasks = self.calls = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        # After every step, because polling would be counted as well.
        if self.handled >= self._wanted and self._app.idle:
            self._idle.set()

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.tasks += 1

    async def count(self, deliver: Callable[[], Awaitable[None]]) -> None:
        """Deliver an event, wait until it is handled, and record the work."""
        self._wanted = self.handled + 1
        self._idle = trio.Event()
        self.steps = self.tasks = self.calls = 0
        sys.setprofile(self._count)
        try:
            await deliver()
            if self.handled < self._wanted or not self._app.idle:
                await self._idle.wait()
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, _argument: object) -> None:
        # Exclude the work of the measurement itself, and of the property that it reads.
        ours = frame.f_code.co_filename == __file__ or frame.f_code.co_name == "idle"
        if event in ("call", "c_call") and not ours:
            self.calls += 1


class Template:
    """The common part of the requests of one connection."""

    def __init__(self) -> None:
        self.varying = frozenset({b"webhook-id", b"webhook-signature"})
        self.memo: object = None


class Direct:
    """A request of our own server, without the server."""

    def __init__(self, number: int, template: Template) -> None:
        delivery = signed("order.paid", webhook_id=f"msg_{number}")
        self._body = delivery.body
        self.template = template
        self.expiry = RequestDeadline(sweep_seconds=0.5)
        self.method, self.path, self.scheme = "POST", PATH, "http"
        self.client = ("127.0.0.1", 1)
        self.headers = [
            (name.lower().encode(), value.encode())
            for name, value in {
                "host": "test",
                "content-type": "application/json",
                "content-length": str(len(delivery.body)),
                "webhook-id": delivery.webhook_id,
                "webhook-timestamp": str(delivery.timestamp),
                "webhook-signature": delivery.signature,
            }.items()
        ]

    def take_body(self, largest: int) -> bytes:
        return self._body

    async def deliver(self, app: WebhookReceiver) -> None:
        """Have it answered; the server would send the answer."""
        answer = await app.respond(self)
        assert answer is not None
        assert answer.status == 200


async def measure(backend: str, *, enqueue: bool, path: Any) -> tuple[Work, int]:
    """Deliver one after the other; return the work and how many threads it made."""
    handlers = HandlerRegistry()
    app = WebhookReceiver(
        settings(Storage__Backend=backend, Storage__Path=str(path / "data")), handlers
    )
    counter = Counter(app)

    @handlers.on(OrderPaidEvent, enqueue=enqueue)
    async def handle(event: OrderPaidEvent) -> None:
        counter.handled += 1

    template = Template()
    requests = [Direct(number, template) for number in range(WARM_UP + DELIVERIES)]
    # No lists, whose numbers would be objects that a delivery leaves behind.
    steps, tasks, calls = (array("q") for _ in range(3))
    async with trio.open_nursery() as nursery:
        await nursery.start(app.run)
        trio.lowlevel.add_instrument(counter)
        for request in requests[:WARM_UP]:
            await counter.count(partial(request.deliver, app))
        store = app._last.inbox
        tracing = Commits if backend == "Sqlite" else None
        counted = await store._commits.run_outside_transaction(tracing) if tracing else Work()
        threads = set(threading.enumerate())
        gc.collect()
        gc.disable()
        before = sys.getallocatedblocks()
        try:
            for request in requests[WARM_UP:]:
                await counter.count(partial(request.deliver, app))
                for figures, figure in (
                    (steps, counter.steps),
                    (tasks, counter.tasks),
                    (calls, counter.calls),
                ):
                    figures.append(figure)
        finally:
            trio.lowlevel.remove_instrument(counter)
            objects = sys.getallocatedblocks() - before
            gc.enable()
            if tracing:
                await store._commits.run_outside_transaction(
                    lambda connection: connection.trace_v2(0)
                )
        made = len(set(threading.enumerate()) - threads)
        nursery.cancel_scope.cancel()
    cheap = (sorted(figures)[DELIVERIES // 10] for figures in (steps, tasks, calls))
    per_delivery = (objects, counted.commits, counted.syncs)
    return Work(*cheap, *(each / DELIVERIES for each in per_delivery)), made


async def measure_with_log(path: Any) -> Work:
    """Measure an inline delivery whose line is written at Info, as the command line does."""
    with (path / "log").open("w") as stream:
        logs.configure(stream=stream)
        logs.begin_batching()
        work, _ = await measure("Memory", enqueue=False, path=path)
        logs.end_batching()
    lines = (path / "log").read_text().splitlines()
    assert sum("webhook.handled" in line for line in lines) == WARM_UP + DELIVERIES
    return work


async def test_the_line_of_a_delivery_costs_no_more_than_it_did(tmp_path, caplog):
    with_log = await measure_with_log(tmp_path)
    logging.getLogger(logs.ROOT).setLevel("WARNING")
    without, _ = await measure("Memory", enqueue=False, path=tmp_path)
    # By way of the standard library's records they were six times as many.
    assert with_log.calls - without.calls <= 17


@pytest.mark.parametrize(
    ("backend", "enqueue", "most"),
    [
        pytest.param("Memory", False, Work(0, 0, 127, 10), id="inline"),
        pytest.param("Sqlite", False, Work(1, 0, 232, 8, 1.2, 1.2), id="inline-on-sqlite"),
        pytest.param("Sqlite", True, Work(4, 0, 392, 6, 1.2, 1.2), id="enqueued"),
    ],
)
async def test_a_delivery_costs_no_more_than_it_did(backend, enqueue, most, tmp_path, caplog):
    # Log lines captured by pytest would be counted with their delivery.
    caplog.set_level("WARNING", "sdk_trio")
    work, threads = await measure(backend, enqueue=enqueue, path=tmp_path)
    assert threads == 0, "a delivery needs no thread of its own"
    assert work.tasks == 0, "a delivery needs no task of its own"
    dearer = {
        name: value for name, value in attrs.asdict(work).items() if value > getattr(most, name)
    }
    assert dearer == {}, f"{work}, at most {most}"


#: Round trips, and statements beside BEGIN and COMMIT, of each step of a lone delivery.
ON_POSTGRESQL = {
    "accept": (1, 1),
    "claim": (1, 1),
    "start": (1, 1),
    "finish": (1, 1),
    "finish what was begun": (1, 1),
    "finish with a retry": (4, 3),
    "renew": (4, 2),
    "poll": (4, 2),
}


async def test_a_lone_delivery_costs_no_more_round_trips_on_postgresql_than_it_did(monkeypatch):
    from sdk_trio.storage.admission import LeaseTerms
    from sdk_trio.storage.engines.postgres_address import PostgresAddress
    from sdk_trio.storage.engines.postgres_connection import StoreConnection
    from sdk_trio.storage.postgres_inbox import PostgresInbox

    server = running_server()
    dsn = server.fresh()
    waits = 0
    wait = StoreConnection.wait

    def counting(connection: StoreConnection, *arguments: Any, **options: Any) -> Any:
        nonlocal waits
        waits += 1
        return wait(connection, *arguments, **options)

    async def count(step: Callable[[], Awaitable[Any]]) -> tuple[int, int]:
        nonlocal waits
        forget_blocks(server)
        waits = 0
        await step()
        ((statements,),) = server.execute(
            "SELECT sum(calls)::int FROM pg_stat_statements JOIN pg_database ON oid = dbid "
            f"WHERE datname = '{dsn.rpartition('=')[2]}' AND query !~ '^(BEGIN|COMMIT)'"
        )
        return waits, statements

    async def measure(inbox: ByKey, number: int) -> dict[str, tuple[int, int]]:
        def delivery(name: str) -> NewDelivery:
            return NewDelivery(f"{name}-{number}", "order.paid", b"{}", 7, 1000.0)

        accepted, claimed, failed = map(delivery, ("accepted", "claimed", "failed"))
        counted = {
            "accept": await count(partial(inbox.accept, accepted, leased=True)),
            "claim": await count(partial(inbox.claim, claimed)),
        }
        finish = partial(inbox.finish, claimed.key, Done(), now=1002)
        counted["finish"] = await count(finish)
        inbox.start_unawaited(accepted.key, now=1001)
        finish = partial(inbox.finish, accepted.key, Done(), now=1002)
        counted["finish what was begun"] = await count(finish)
        await inbox.accept(failed, leased=True)
        counted |= {
            "start": await count(partial(inbox.start, failed.key, now=1001)),
            "renew": await count(partial(inbox.renew, [failed.key], now=1001)),
            "finish with a retry": await count(
                partial(inbox.finish, failed.key, Retry(1e9, "no"), now=1002)
            ),
            "poll": await count(partial(inbox.claim_due, limit=9, now=1003)),
        }
        return counted

    inbox = await PostgresInbox.open(
        PostgresAddress(dsn=dsn),
        LeaseTerms(
            owner="one", shared_by_hosts=True, lease_seconds=75, dedup_seconds=9, payload_seconds=9
        ),
    )
    monkeypatch.setattr(StoreConnection, "wait", counting)
    monkeypatch.setattr("sdk_trio.storage.engines.postgres.PostgresEngine.linger", 30.0)
    try:
        # psycopg prepares a statement after five executions.
        for number in range(8):
            counted = await measure(ByKey(inbox), number)
    finally:
        with trio.move_on_after(30, shield=True):
            await inbox.close()
    assert counted == ON_POSTGRESQL
