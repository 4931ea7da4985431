# For: simulate, World, SimulationFailedError
import sdk_trio
from sdk_trio.events import OrderPaidEvent
from sdk_trio.testing import World, simulate


def make_handlers() -> sdk_trio.HandlerRegistry:
    handlers = sdk_trio.HandlerRegistry()

    @handlers.on(OrderPaidEvent, enqueue=True)
    async def grant_access(event: OrderPaidEvent) -> None:
        assert event.data.id

    return handlers


report = simulate(make_handlers, seeds=1, world=World(events=3))
print(report.seeds)
# Output: 1
