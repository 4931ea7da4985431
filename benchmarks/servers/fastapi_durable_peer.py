"""A FastAPI peer that neither loses an event nor handles it twice. Argument: PORT.

It gives the guarantees of our enqueued deliveries: the event is in SQLite (WAL,
``synchronous=FULL``) before the response, an id is accepted once, workers handle accepted events,
mark them done or retry them later, and a start continues after a crash.

It is written in the common way: one connection behind a lock, writes in the thread pool, a commit
for each step. It has eight workers, like ours.
"""

import asyncio
import json
import mmap
import os
import sqlite3
import struct
import threading
import time
from contextlib import asynccontextmanager

import fastapi_peer
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from standardwebhooks import WebhookVerificationError

WORKERS = 8
MAX_ATTEMPTS = 8
RETRY_SECONDS = 1.0

lock = threading.Lock()
database = sqlite3.connect(f"{os.environ['BENCHMARK_DATA']}/events.db", check_same_thread=False)
database.execute("PRAGMA journal_mode = WAL")
database.execute("PRAGMA synchronous = FULL")
database.execute(
    "CREATE TABLE IF NOT EXISTS event (id TEXT PRIMARY KEY, type TEXT, body BLOB, state TEXT, "
    "attempts INTEGER, next_at REAL)"
)
database.execute("CREATE INDEX IF NOT EXISTS due ON event (next_at) WHERE state = 'received'")
queue: asyncio.Queue = asyncio.Queue()
handled = 0
with open(os.environ["BENCHMARK_HANDLED"], "r+b") as _file:
    shared = mmap.mmap(_file.fileno(), 8)


def keep(webhook_id: str, kind: str, body: bytes) -> bool:
    """Commit an event; return False if it is known."""
    with lock, database:
        row = (webhook_id, kind, body)
        added = database.execute(
            "INSERT OR IGNORE INTO event VALUES (?, ?, ?, 'received', 0, NULL)", row
        )
        return added.rowcount == 1


def unfinished() -> list[tuple[str, bytes, int]]:
    with lock:
        return database.execute(
            "SELECT id, body, attempts FROM event WHERE state = 'received' AND next_at IS NULL"
        ).fetchall()


def due() -> list[tuple[str, bytes, int]]:
    with lock, database:
        found = database.execute(
            "SELECT id, body, attempts FROM event WHERE state = 'received' AND next_at <= ?",
            (time.time(),),
        ).fetchall()
        database.executemany(
            "UPDATE event SET next_at = NULL WHERE id = ?", [(row[0],) for row in found]
        )
        return found


def mark_done(webhook_id: str) -> None:
    with lock, database:
        database.execute("UPDATE event SET state = 'done' WHERE id = ?", (webhook_id,))


def mark_failed(webhook_id: str, attempts: int) -> None:
    state = "dead" if attempts >= MAX_ATTEMPTS else "received"
    at = time.time() + RETRY_SECONDS * 2**attempts
    with lock, database:
        database.execute(
            "UPDATE event SET state = ?, attempts = ?, next_at = ? WHERE id = ?",
            (state, attempts, at, webhook_id),
        )


async def work() -> None:
    global handled
    while True:
        webhook_id, event, attempts = await queue.get()
        try:
            await fastapi_peer.HANDLERS[event["type"]](event)
        except Exception:
            await run_in_threadpool(mark_failed, webhook_id, attempts + 1)
        else:
            await run_in_threadpool(mark_done, webhook_id)
            handled += 1
            shared[:] = struct.pack("<Q", handled)


async def retry() -> None:
    while True:
        await asyncio.sleep(RETRY_SECONDS)
        for webhook_id, body, attempts in await run_in_threadpool(due):
            queue.put_nowait((webhook_id, json.loads(body), attempts))


@asynccontextmanager
async def lifespan(_: FastAPI):
    for webhook_id, body, attempts in unfinished():
        queue.put_nowait((webhook_id, json.loads(body), attempts))
    tasks = [asyncio.create_task(work()) for _ in range(WORKERS)]
    tasks.append(asyncio.create_task(retry()))
    yield
    for task in tasks:
        task.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/hooks/sdk")
async def receive(request: Request) -> dict:
    body = await request.body()
    try:
        event = fastapi_peer.webhook.verify(body, dict(request.headers))
    except WebhookVerificationError:
        raise HTTPException(status_code=400) from None
    webhook_id = request.headers["webhook-id"]
    if await run_in_threadpool(keep, webhook_id, event["type"], body):
        queue.put_nowait((webhook_id, event, 0))
    return {}


if __name__ == "__main__":
    fastapi_peer.serve(app)
