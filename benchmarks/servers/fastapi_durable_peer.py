"""The FastAPI peer for those who want to keep events: each is in SQLite before it is answered.

As it is commonly written: one connection, a lock, the write in a thread, a commit for each event.
The unique id keeps duplicates out, ``synchronous=FULL`` syncs every commit, as our inbox does.
Arguments: PORT and WORKERS.
"""

import os
import sqlite3
import sys
import tempfile
import threading

import fastapi_peer
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from standardwebhooks import WebhookVerificationError

app = FastAPI()
directory = tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_DIRECTORY"))
lock = threading.Lock()
database = sqlite3.connect(f"{directory.name}/events.db", check_same_thread=False)
database.execute("PRAGMA journal_mode = WAL")
database.execute("PRAGMA synchronous = FULL")
database.execute("CREATE TABLE event (id TEXT PRIMARY KEY, type TEXT, body BLOB, state TEXT)")


def keep(webhook_id: str, kind: str, body: bytes) -> bool:
    """Commit an event; False when it is known."""
    with lock, database:
        row = (webhook_id, kind, body)
        added = database.execute("INSERT OR IGNORE INTO event VALUES (?, ?, ?, 'received')", row)
        return added.rowcount == 1


@app.post("/hooks/sdk")
async def receive(request: Request) -> dict:
    body = await request.body()
    try:
        event = fastapi_peer.webhook.verify(body, dict(request.headers))
    except WebhookVerificationError:
        raise HTTPException(status_code=400) from None
    await run_in_threadpool(keep, request.headers["webhook-id"], event["type"], body)
    return {}


if __name__ == "__main__":
    uvicorn.run(
        "fastapi_durable_peer:app",
        host="127.0.0.1",
        port=int(sys.argv[1]),
        workers=int(sys.argv[2]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="error",
    )
