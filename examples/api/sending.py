# For: SendingUpstream
import trio

from sdk_trio.testing import SendingUpstream


async def main() -> None:
    upstream = SendingUpstream(secret="whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", pace=0.001)
    created = "2026-01-01T00:00:00Z"
    order = {"id": "ord_1", "created_at": created, "modified_at": created}
    upstream.change("orders", order)
    async with upstream.client() as client:
        print([each.id async for each in client.orders.list()])


trio.run(main)
# Output: ['ord_1']
