# For: first_time, forget_markers, MARKERS_SCHEMA
import sqlite3
import tempfile
from contextlib import closing
from datetime import UTC, datetime

import trio

import sdk_trio
from sdk_trio.events import OrderPaidEvent
from sdk_trio.testing import running_app

FILE = tempfile.mkdtemp() + "/app.db"
handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True)
def grant_access(event: OrderPaidEvent) -> None:
    with closing(sqlite3.connect(FILE)) as connection, connection:  # commits at its end
        connection.execute("BEGIN")
        if sdk_trio.first_time(connection, event):
            connection.execute("INSERT INTO access VALUES (?)", (event.data.id,))


async def main() -> None:
    with closing(sqlite3.connect(FILE)) as connection, connection:
        connection.execute("CREATE TABLE access (order_id text)")
        connection.execute(sdk_trio.MARKERS_SCHEMA)
    for _ in range(2):  # two inboxes: the second one knows nothing of the first
        async with running_app(handlers) as app:
            await app.deliver(app.sign(OrderPaidEvent, {"id": "ord_1"}, webhook_id="m_1"))
    with closing(sqlite3.connect(FILE)) as connection, connection:
        print(connection.execute("SELECT order_id FROM access").fetchall())
        # A marker is needed as long as the upstream may send its event again.
        connection.execute("BEGIN")
        print(sdk_trio.forget_markers(connection, before=datetime.now(UTC)))


trio.run(main)
# Output: [('ord_1',)]
# Output: 1
