# For: Transaction
from typing import Any

import trio

import sdk_trio
from sdk_trio.events import OrderPaidEvent
from sdk_trio.testing import running_app

handlers = sdk_trio.HandlerRegistry()


# The effects and the end of the event are one commit, in the store's own database.
@handlers.on(OrderPaidEvent, enqueue=True, transaction=True)
def grant_access(event: OrderPaidEvent, tx: sdk_trio.Transaction[Any]) -> None:
    tx.connection.execute("CREATE TABLE IF NOT EXISTS app_access (order_id text)")
    tx.connection.execute("INSERT INTO app_access VALUES (?)", (event.data.id,))


async def main() -> None:
    async with running_app(handlers) as app:
        delivered = await app.deliver("order.paid", {"id": "ord_1"})
        print(delivered.status, delivered.state)


trio.run(main)
# Output: 200 done
