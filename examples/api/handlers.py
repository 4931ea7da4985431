# For: HandlerRegistry, Backoff
import sdk_trio
from sdk_trio.events import DEFAULT_CATALOG, OrderPaidEvent, SubscriptionActiveEvent, UnknownEvent

handlers = sdk_trio.HandlerRegistry(catalog=DEFAULT_CATALOG)
handlers.ignore()  # the other types are left out on purpose


@handlers.on(OrderPaidEvent, enqueue=True, ordered=True)
async def grant_access(event: OrderPaidEvent) -> None:
    print("paid:", event.data.id)


# A plain function runs in a thread.
@handlers.on(SubscriptionActiveEvent, enqueue=True, retry=sdk_trio.Backoff(base=5, cap=600))
def start_subscription(event: SubscriptionActiveEvent) -> None:
    print("active:", event.data.id)


@handlers.fallback
async def note(event: UnknownEvent) -> None:
    print("another type:", event.type)


print([registration.name for registration in handlers.registrations])
