"""The handlers of benchmarks/tenants.py: one inline handler that does nothing."""

from sdk_trio import HandlerRegistry
from sdk_trio.events import OrderPaidEvent

handlers = HandlerRegistry()


@handlers.on(OrderPaidEvent)
async def paid(event: OrderPaidEvent) -> None:
    if event.tenant is None:
        raise LookupError("a delivery of the benchmark has found no tenant")
