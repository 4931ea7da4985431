# For: running_app, AppUnderTest, Delivered, settings_for_tests, UnexpectedStateError
import trio

import sdk_trio
from sdk_trio.events import OrderPaidEvent
from sdk_trio.testing import running_app, settings_for_tests

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True)
async def grant_access(event: OrderPaidEvent) -> None:
    if event.attempt == 1:
        raise ConnectionError("the database is unavailable")


async def main() -> None:
    settings = settings_for_tests({"Webhooks:Queue:MaxAttempts": 3})
    async with running_app(handlers, settings) as app:
        delivered = await app.deliver("order.paid", {"id": "ord_1"}, expect="retrying")
        print(delivered.status, "the database is unavailable" in (delivered.error or ""))
        await app.retry(expect="done")


trio.run(main)
# Output: 200 True
