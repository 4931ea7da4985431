"""Waiting for a condition in another task or process; the only mechanism for that in tests.

A machine may be slow, so nothing here measures speed. The time limit only detects hangs.
"""

import inspect
import time
from collections.abc import Callable
from typing import Any

import trio

#: A single step of a test takes so long only if something hangs.
PATIENCE_SECONDS = 60.0


async def until(condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """Wait until a condition is true, and return its value; it may be asynchronous.

    Raises:
        trio.TooSlowError: after ``seconds``.
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
    """Wait outside of Trio until a condition is true, and return its value.

    After ``seconds`` the test fails with the end of the text of ``explain``, such as a log.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, str(explain())[-3000:]
        time.sleep(0.02)
    return found
