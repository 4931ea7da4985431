"""The handlers of benchmarks: they count events, inline or enqueued.

The number of handled events is in the eight bytes of the file in ``BENCHMARK_HANDLED``, so the
benchmark can wait until all are done.
"""

import mmap
import os
import struct

from sdk_trio import HandlerRegistry
from sdk_trio.events import OrderPaidEvent

paid = handled = 0
_pack = struct.Struct("<Q").pack_into

with open(os.environ["BENCHMARK_HANDLED"], "r+b") as _file:
    _shared = mmap.mmap(_file.fileno(), 8)


async def handle(event: OrderPaidEvent) -> None:
    global paid, handled
    paid += event.data.total_amount or 0
    handled += 1
    _pack(_shared, 0, handled)


inline, enqueued = HandlerRegistry(), HandlerRegistry()
inline.register(OrderPaidEvent, handle, enqueue=False)
enqueued.register(OrderPaidEvent, handle, enqueue=True)
