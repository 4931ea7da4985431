"""Spreads requests over time, so that whoever floods the admin address waits, and nobody else."""

from math import inf

import trio


class Pacer:
    """Lets ``per_second`` pass, and ``burst`` at once after a quiet time; the others wait in turn.

    Nobody is refused: a connection that waits sends nothing more, which holds a flood back.
    ``waiting`` says how many do at this moment.
    """

    def __init__(self, *, per_second: float, burst: int) -> None:
        self._interval = 1.0 / per_second
        self._tolerance = burst * self._interval
        self._next = -inf
        self.waiting = 0

    async def turn(self) -> None:  # noqa: ASYNC910 - sending the answer is a checkpoint
        """Wait for a turn. Cancelled, the turn is lost."""
        now = trio.current_time()
        self._next = max(self._next, now - self._tolerance) + self._interval
        if self._next > now:
            self.waiting += 1
            try:
                await trio.sleep(self._next - now)
            finally:
                self.waiting -= 1
