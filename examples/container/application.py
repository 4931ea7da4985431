"""The handlers of the example image; replace this file with your own application."""

import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()
handlers.ignore()  # no warnings at the start about event types without a handler


@handlers.on(OrderPaidEvent, enqueue=True)
async def fulfil(event: OrderPaidEvent) -> None:
    print(f"order {event.data.id} is paid", flush=True)
