"""A daemon whose handlers write through Django or SQLAlchemy, with its connections counted.

The database is a PostgreSQL server. The connections are counted in the daemon, because the server
keeps each a moment longer than its client. From time to time all of them are closed by the server,
as by a restart or a proxy.
"""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import attrs
import httpx
import trio

from sdk_trio.testing import sign_delivery

from .deliveries import SECRET
from .postgres import PostgresServer
from .supervised import Daemon
from .tables import STATES

#: The number of threads; never more connections than that may be open.
THREADS = 8

#: The tasks that deliver.
SENDERS = 8

_DJANGO = """
import django
from django.conf import settings

settings.configure(
    USE_TZ=True,
    DATABASES={"default": {
        "ENGINE": "django.db.backends.postgresql", "NAME": NAME, "HOST": HOST, "USER": "owner",
        "OPTIONS": {"application_name": "shop"},
    }},
)
django.setup()

from django.db import models
from sdk_trio.contrib.django import database_connections


class Access(models.Model):
    order = models.TextField(unique=True)

    class Meta:
        app_label = "shop"
        db_table = "access"


handlers.around_threads(database_connections)


@handlers.on(OrderPaidEvent, enqueue=True)
def grant(event):
    Access.objects.get_or_create(order=event.webhook_id)
"""

_SQLALCHEMY = """
from sqlalchemy import create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

engine = create_engine(
    f"postgresql+psycopg://owner@/{NAME}?host={HOST}&application_name=shop",
    pool_size=8, max_overflow=0, pool_pre_ping=True,
)


class Base(DeclarativeBase):
    pass


class Access(Base):
    __tablename__ = "access"
    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[str] = mapped_column("order")


@handlers.on(OrderPaidEvent, enqueue=True)
def grant(event):
    with Session(engine) as session, session.begin():
        if session.scalar(select(Access).where(Access.order == event.webhook_id)) is None:
            session.add(Access(order=event.webhook_id))
"""

_HEAD = """
import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
HOST, NAME = {host!r}, {name!r}
"""

APPLICATIONS = {"django": _DJANGO, "sqlalchemy": _SQLALCHEMY}

_TABLE = 'CREATE TABLE access (id bigserial PRIMARY KEY, "order" text UNIQUE NOT NULL)'
_CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'shop'"


@attrs.define
class Figures:
    """The counts of a run: acknowledged events, written rows, connections at most and at the end.

    ``cuts``: how often all connections were closed.
    """

    acknowledged: int = 0
    rows: int = 0
    most: int = 0
    left: int = 0
    cuts: int = 0
    states: dict[str, int] = attrs.Factory(dict)


async def run_handlers(
    framework: str, server: PostgresServer, directory: Path, *, events: int, cut_each: float
) -> Figures:
    """Deliver ``events``; meanwhile close all connections every ``cut_each`` seconds."""
    database = server.empty()
    name = database.rpartition("=")[2]
    server.execute(_TABLE, name)
    head = _HEAD.format(host=str(server.directory), name=name)
    (directory / "shop.py").write_text(head + APPLICATIONS[framework])
    daemon = Daemon(
        directory,
        {
            "Webhooks:Queue:Threads": str(THREADS),
            "Webhooks:Queue:Workers": "16",
            "Webhooks:Queue:RetryBaseSeconds": "0.05",
            "Webhooks:Queue:Capacity": str(events + 1),
        },
        application="shop:handlers",
    )
    figures = Figures()
    with daemon:
        assert await trio.to_thread.run_sync(daemon.start), daemon.log()
        others = _sockets(daemon)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, daemon, figures, others)
            nursery.start_soon(_cut, server, figures, cut_each)
            await _send(daemon.url, events, figures)
            with trio.fail_after(600):
                while _states(daemon) != {"done": events}:
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        figures.rows = server.execute("SELECT count(*) FROM access", name)[0][0]
        figures.states = _states(daemon)
        figures.left = _sockets(daemon) - others
    return figures


def _states(daemon: Daemon) -> dict[str, int]:
    with closing(sqlite3.connect(daemon.directory / "data" / "inbox.db")) as store:
        return dict(store.execute(STATES))


async def _send(url: str, events: int, figures: Figures) -> None:
    """Deliver the events from some tasks, each until it is acknowledged."""
    numbers = iter(range(events))

    async def send() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            for number in numbers:
                signed = sign_delivery("order.paid", secret=SECRET, webhook_id=f"msg_{number}")
                while True:
                    answer = await client.post(url, headers=signed.headers, content=signed.body)
                    if answer.status_code == 200:
                        break
                    await trio.sleep(0.1)
                figures.acknowledged += 1

    async with trio.open_nursery() as nursery:
        for _ in range(SENDERS):
            nursery.start_soon(send)


def _sockets(daemon: Daemon) -> int:
    """Return the number of connected Unix sockets of the daemon, including those to the server."""
    assert daemon.process is not None
    found = []
    for descriptor in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed
            found.append(os.readlink(descriptor))
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    connected = {f"socket:[{line.split()[6]}]" for line in lines if line.split()[5] == "03"}
    return len(connected.intersection(found))


async def _watch(daemon: Daemon, figures: Figures, others: int) -> None:
    while True:
        figures.most = max(figures.most, _sockets(daemon) - others)
        await trio.sleep(0.03)


async def _cut(server: PostgresServer, figures: Figures, seconds: float) -> None:
    while True:
        await trio.sleep(seconds)
        if await trio.to_thread.run_sync(server.execute, _CUT):
            figures.cuts += 1
