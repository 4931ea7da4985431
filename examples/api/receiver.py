# For: WebhookReceiver, DrainReport
import trio

import sdk_trio
from sdk_trio.testing import settings_for_tests


async def main() -> None:
    receiver = sdk_trio.WebhookReceiver(settings_for_tests(), sdk_trio.HandlerRegistry())
    async with trio.open_nursery() as nursery:
        await nursery.start(receiver.run)
        # `receiver` is an ASGI application; an ASGI server on Trio passes requests to it.
        await receiver.drain()
        nursery.cancel_scope.cancel()
    report: sdk_trio.DrainReport | None = receiver.report
    assert report is not None
    print(report.drained, report.lost)


trio.run(main)
# Output: 0 0
