"""A daemon with misbehaving handlers, under a supervisor that restarts it."""

import os
import signal
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from sdk_trio.testing import sign_delivery

from .command_forker import Program, start_program
from .deliveries import SECRET
from .logs import entries_in
from .ports import free_port
from .tables import DELIVERIES
from .waiting import PATIENCE_SECONDS, wait_until

#: The beginning of a webhook id selects the action of its handler. ``order.paid`` is enqueued,
#: ``order.created`` is inline. The handlers of ``order.updated`` (enqueued) and ``order.refunded``
#: (inline) are plain functions, which wait in their threads. With an id that ends in ``-late``, the
#: start of the run is stored first; ``aside`` waits while there is a file "hold".
APPLICATION = """
import asyncio, ctypes, os, re, signal, sys, threading, time
import apsw, trio, sdk_trio
from sdk_trio.events import (
    OrderCreatedEvent, OrderPaidEvent, OrderRefundedEvent, OrderUpdatedEvent
)

handlers = sdk_trio.HandlerRegistry()
log = os.open(os.environ["RUNS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(what, event):
    os.write(log, f"{what} {event.webhook_id} {event.attempt}\\n".encode())


class Own(BaseException):
    pass


class BadText(Exception):
    def __str__(self):
        raise SystemExit(3)


class Undivided(ExceptionGroup):
    def derive(self, exceptions):
        raise SystemExit(3)


KEPT = []


async def end_own_task():
    trio.lowlevel.current_task().parent_nursery.cancel_scope.cancel()
    await trio.sleep_forever()


async def leak():
    if not KEPT:
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.sleep_forever()
            except trio.Cancelled as error:
                KEPT.append(error)
    raise KEPT[0]


def group():
    raise BaseExceptionGroup("both", [SystemExit(3), ValueError("beside")])


def give(error):
    raise error


async def swallow():
    while True:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            pass


async def shielded():
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()


async def complain():
    try:
        await trio.sleep_forever()
    finally:
        raise ValueError("while being cancelled")


async def thread_beside():
    threading.Thread(target=time.sleep, args=(600,), name="lingering").start()


def match():
    sys.setswitchinterval(600)  # or another thread runs if it is in luck
    os.write(log, b"inside match 0\\n")
    re.match("(a+)+$", "a" * 40 + "b")


async def aside():
    while os.path.exists("hold"):
        await trio.sleep(0.01)
    await trio.sleep(float(os.environ.get("ASIDE", "0")))


ENDS = {
    "exit": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "abort": os.abort,
    "sysexit": lambda: give(SystemExit(3)),
    "interrupt": lambda: give(KeyboardInterrupt()),
    "generator": lambda: give(GeneratorExit()),
    "asyncio": lambda: give(asyncio.CancelledError()),
    "own": lambda: give(Own("mine")),
    "group": group,
    "text": lambda: give(BadText()),
    "traceback": lambda: give(type("Odd", (Exception,), {"__traceback__": 5})()),
    "claims": lambda: give(type("Odd", (Exception,), {"__class__": BaseExceptionGroup})()),
    "derive": lambda: give(Undivided("g", [ValueError(), ValueError()])),
    "nursery": end_own_task,
    "leak": leak,
    "thread": lambda: trio.to_thread.run_sync(time.sleep, 600),
    "shield": shielded,
    "swallow": swallow,
    "complain": complain,
    "block": lambda: time.sleep(float(os.environ.get("BLOCK", "600"))),
    "match": match,
    "lingering": thread_beside,
    "aside": aside,
}


async def recorded(event):
    store = apsw.Connection("data/inbox.db", flags=apsw.SQLITE_OPEN_READONLY)
    state = "SELECT state FROM work JOIN arrival USING (sequence) WHERE delivery_key = ?"
    while store.execute(state, (event.webhook_id,)).get != "running":
        await trio.sleep(0.005)
    store.close()


async def handle(event):
    note("begun", event)
    kind, _, when = event.webhook_id.partition("-")
    if when.startswith("late"):
        await recorded(event)
    done = ENDS.get(kind, lambda: None)()
    if done is not None:
        await done
    note("ended", event)


@handlers.on(OrderPaidEvent, enqueue=True)
async def queued(event):
    await handle(event)


@handlers.on(OrderCreatedEvent)
async def inline(event):
    await handle(event)


@handlers.on(OrderUpdatedEvent, enqueue=True)
@handlers.on(OrderRefundedEvent)
def plain(event):
    note("begun", event)
    time.sleep(float(os.environ.get("PLAIN", "600")))
    note("ended", event)
"""


@attrs.define
class Daemon:
    """``python -m sdk_trio run`` with :data:`APPLICATION`, in its own directory."""

    directory: Path
    settings: dict[str, str] = attrs.Factory(dict)
    environment: dict[str, str] = attrs.Factory(dict)
    application: str = "application:handlers"
    port: int = attrs.Factory(free_port)
    admin_port: int = attrs.Factory(free_port)
    process: Program | None = None
    starts: int = 0

    def begin(self) -> Program:
        """Start the process and return at once."""
        (self.directory / "application.py").write_text(APPLICATION)
        settings = {
            "Storage:Path": str(self.directory / "data"),
            "Server:Bind": f"127.0.0.1:{self.port}",
            "Admin:Bind": f"127.0.0.1:{self.admin_port}",
            "Webhooks:RequireHttps": "false",
            **self.settings,
        }
        words = ["run", "--standalone", "--app", self.application]
        for key, value in settings.items():
            words += ["--set", f"Sdk:{key}={value}"]
        environment = {
            **os.environ,
            "SDK__WEBHOOKS__SECRET": SECRET,
            "RUNS": str(self.directory / "runs"),
            **self.environment,
        }
        environment.pop("SDK__ADMIN__BIND", None)
        with (self.directory / "log").open("a") as log:
            self.process = start_program(
                words, directory=self.directory, environ=environment, stdout=log, stderr=log
            )
        self.starts += 1
        return self.process

    def start(self) -> bool:
        """Start it and wait until it serves; False if it ended before."""
        before = self.log().count('"runtime.started"')
        process = self.begin()
        wait_until(
            lambda: process.poll() is not None or self.log().count('"runtime.started"') > before,
            self.log,
        )
        return process.poll() is None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks/sdk"

    def deliver(
        self, webhook_id: str, *, inline: bool = False, event_type: str | None = None
    ) -> int | None:
        """Send a delivery; return the status, None if the process ended instead."""
        import httpx

        event_type = event_type or ("order.created" if inline else "order.paid")
        delivery = sign_delivery(event_type, secret=SECRET, webhook_id=webhook_id)
        try:
            answer = httpx.post(
                self.url, headers=delivery.headers, content=delivery.body, timeout=PATIENCE_SECONDS
            )
        except httpx.TransportError:
            return None
        return answer.status_code

    def log(self) -> str:
        file = self.directory / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    def logged(self, event: str) -> list[Mapping[str, Any]]:
        """Return the complete log lines of an event."""
        return entries_in(self.log(), event)

    def runs(self, webhook_id: str, what: str = "begun") -> int:
        """Return the number of started or ended runs of an event."""
        file = self.directory / "runs"
        lines = file.read_text().splitlines() if file.exists() else []
        return sum(line.startswith(f"{what} {webhook_id} ") for line in lines)

    def record(self, webhook_id: str) -> dict[str, object] | None:
        """Return the record of an event, read while the daemon runs."""
        file = self.directory / "data" / "inbox.db"
        if not file.exists():
            return None
        connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=30)
        connection.row_factory = sqlite3.Row
        try:
            row = connection.execute(
                f"{DELIVERIES} SELECT * FROM delivery WHERE webhook_id = ?", (webhook_id,)
            ).fetchone()
        except sqlite3.OperationalError:
            return None
        finally:
            connection.close()
        return None if row is None else dict(row)

    def change(self, statement: str, **values: object) -> None:
        """Change the store while no daemon runs."""
        connection = sqlite3.connect(self.directory / "data" / "inbox.db", isolation_level=None)
        try:
            connection.execute(statement, values)
        finally:
            connection.close()

    def state(self, webhook_id: str) -> object:
        return (self.record(webhook_id) or {}).get("state")

    def wait_for_state(self, webhook_id: str, state: str) -> dict[str, object]:
        """Wait until an event is in a state, and return its record."""

        def in_state() -> dict[str, object] | None:
            record = self.record(webhook_id) or {}
            return record if record.get("state") == state else None

        found: dict[str, object] = wait_until(in_state, self.log)
        return found

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def ended(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for the end of the process and return its status."""
        assert self.process is not None
        return self.process.wait(seconds)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def supervise(self, webhook_id: str, *, most: int = 12) -> None:
        """Restart it after each end, until the event no longer waits, at most ``most`` times."""
        while self.starts < most:
            process = self.process
            assert process is not None
            wait_until(
                lambda p=process: p.poll() is not None or self.state(webhook_id) in FINAL, self.log
            )
            if process.poll() is None:
                return
            self.start()

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


FINAL = ("done", "dead", "parked")


@contextmanager
def running(daemon: Daemon) -> Iterator[Daemon]:
    """Run a daemon for the length of the block."""
    with daemon:
        assert daemon.start(), daemon.log()
        yield daemon


SIGTERM, SIGINT, SIGHUP = signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", None)
SIGKILL = getattr(signal, "SIGKILL", None)
