"""The lower limit with a store: one SQLite commit in a thread, and one log line. Argument: PORT.

It is ``minimal_peer.py`` with the least work of a durable delivery: a thread commits all waiting
events in one transaction (WAL, ``synchronous=FULL``), and each event is one line of log. There is
no claim, duplicate check, retry, retention or recovery.
"""

import os
import signal
import sys
import threading
import time
from queue import SimpleQueue

import apsw
import minimal_peer
import trio

from sdk_trio.events import OrderPaidEvent

TABLE = "CREATE TABLE event (id TEXT PRIMARY KEY, type TEXT, body BLOB, at REAL)"
LINE = '{"time":%.3f,"level":"info","message":"handled","id":"%s"}\n'

Waiting = tuple[trio.lowlevel.Task, tuple[str, str, bytes, float]]


class Committer:
    """Commits all waiting events in one transaction, in a thread."""

    def __init__(self, path: str) -> None:
        self._database = apsw.Connection(path)
        self._database.execute(TABLE)
        self._database.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
        self._waiting: SimpleQueue[Waiting] = SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        threading.Thread(target=self._run, daemon=True).start()

    async def commit(self, webhook_id: str, event: OrderPaidEvent, raw: bytes) -> None:
        row = (webhook_id, "order.paid", raw, time.time())
        self._waiting.put((trio.lowlevel.current_task(), row))
        await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        await minimal_peer.handle(webhook_id, event, raw)
        os.write(2, (LINE % (time.time(), webhook_id)).encode())

    def _run(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            self._database.execute("BEGIN IMMEDIATE")
            for _, row in batch:
                self._database.execute("INSERT INTO event VALUES (?, ?, ?, ?)", row)
            self._database.execute("COMMIT")
            self._token.run_sync_soon(_wake, batch)


def _wake(batch: list[Waiting]) -> None:
    for task, _ in batch:
        trio.lowlevel.reschedule(task)


async def main(port: str) -> None:
    committer = Committer(os.environ["BENCHMARK_DATA"] + "/events.db")
    await minimal_peer.main(port, committer.commit)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    trio.run(main, sys.argv[1])
