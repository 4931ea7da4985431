# For: Client, CallOptions, Record, MockUpstream, MockedRoute, MockedCall
import trio

import sdk_trio
from sdk_trio.testing import MockUpstream


async def main() -> None:
    upstream = MockUpstream()
    upstream.on("orders.get", "ord_1").gives({"id": "ord_1", "status": "paid"})
    upstream.on("orders.list").gives_list([{"id": "ord_1"}, {"id": "ord_2"}])
    # In a program: `async with sdk_trio.Client(settings) as client`.
    async with upstream.client() as client:
        order = await client.orders.get("ord_1")
        print(order.id, order["status"])
        print([each.id async for each in client.orders.list(limit=1)])
        patient = client.with_options(sdk_trio.CallOptions(total_timeout=60))
        await patient.orders.get("ord_1")
    print(len(upstream.calls), upstream.calls[0].path)


trio.run(main)
# Output: ord_1 paid
# Output: ['ord_1', 'ord_2']
# Output: 4 /orders/ord_1
