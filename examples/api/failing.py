# For: RetryLater, Discard, DeadLetter
import sdk_trio
from sdk_trio.events import OrderPaidEvent

handlers = sdk_trio.HandlerRegistry()


@handlers.on(OrderPaidEvent, enqueue=True)
async def grant_access(event: OrderPaidEvent) -> None:
    order = event.data
    if order.customer_id is None:
        raise sdk_trio.Discard("an order without a customer grants nothing")
    if order.product_id is None:
        raise sdk_trio.DeadLetter("no product: someone has to look at this order")
    if not is_service_up():
        raise sdk_trio.RetryLater(60, "the service is under maintenance")


def is_service_up() -> bool:
    return False
