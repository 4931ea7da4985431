"""The handlers that benchmarks register: one that adds up, before the answer or behind it.

The number of handled events is kept in the eight bytes of the file that ``BENCHMARK_HANDLED``
names, so that the benchmark sees when all of them are done.
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
