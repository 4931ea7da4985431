# For: NotFoundError, OutcomeUnknownError, CallError, ApiError, BudgetPolicy
import trio

import sdk_trio
from sdk_trio.testing import MockUpstream


async def main() -> None:
    upstream = MockUpstream()
    upstream.on("orders.get").gives({"detail": "no such order"}, status=404)
    async with upstream.client() as client:
        try:
            await client.orders.get("ord_1")
        except sdk_trio.NotFoundError as error:
            print("there is none:", error.status)
        except sdk_trio.OutcomeUnknownError:
            print("a write without an answer: read the record before you repeat it")
        except sdk_trio.CallError as error:
            print("failed after", error.attempts, "attempts; id of the request:", error.request_id)


trio.run(main)
# Output: there is none: 404
