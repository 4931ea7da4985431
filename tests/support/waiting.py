"""Waiting for a condition: the one way in which tests wait for what another task or process does.

A machine may be slow, so nothing here measures how fast something was; the limit is a net that only
catches what hangs.
"""

import inspect
import time
from collections.abc import Callable
from typing import Any

import trio

#: No single step of a test takes as long, unless something hangs.
PATIENCE_SECONDS = 60.0


async def until(condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait until a condition holds, and return what it was; it may be asynchronous.

    Its answer may be awaitable. After ``seconds``, trio.TooSlowError.
    """
    with trio.fail_after(seconds):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await trio.sleep(0.01)


def wait_until(
    condition: Callable[[], Any],
    explain: Callable[[], object] = lambda: "it did not happen",
    seconds: float = PATIENCE_SECONDS,
) -> Any:
    """Wait outside of Trio until a condition holds, and return what it was.

    After ``seconds`` the test fails with the end of what ``explain`` says, such as a log.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, str(explain())[-3000:]
        time.sleep(0.02)
    return found
