"""An event loop that synchronous code can call into."""

import queue
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import trio


class Loop:
    """A Trio event loop in a thread, so that Hypothesis's synchronous rules can call into it."""

    def __init__(self) -> None:
        started: queue.Queue[trio.lowlevel.TrioToken] = queue.Queue()

        async def main() -> None:
            self._stop = trio.Event()
            started.put(trio.lowlevel.current_trio_token())
            await self._stop.wait()

        self._thread = threading.Thread(target=trio.run, args=(main,))
        self._thread.start()
        self._token = started.get(timeout=60)

    def __call__(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            with trio.fail_after(60):
                return await call()

        return trio.from_thread.run(bounded, trio_token=self._token)

    def stop(self) -> None:
        trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
        self._thread.join(60)


async def together(calls: Iterable[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """Run all calls at once, and return their results in order.

    Concurrent calls of a store share trips to its thread.
    """
    results: dict[int, Any] = {}

    async def run(number: int, call: Callable[[], Awaitable[Any]]) -> None:
        results[number] = await call()

    async with trio.open_nursery() as nursery:
        for number, call in enumerate(calls):
            nursery.start_soon(run, number, call)
    return [results[number] for number in sorted(results)]
