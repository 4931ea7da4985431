"""Spreads requests over time, so that whoever floods the admin address waits, and nobody else."""

import trio

from ..base.throttle import TokenBucket


class Pacer:
    """Lets ``per_second`` pass, and ``burst`` at once after a quiet time; the others wait in turn.

    Nobody is refused: a connection that waits sends nothing more, which holds a flood back.
    ``waiting`` says how many do at this moment.
    """

    def __init__(self, *, per_second: float, burst: int) -> None:
        self._bucket = TokenBucket(per_second=per_second, burst=burst)
        self.waiting = 0

    async def turn(self) -> None:  # noqa: ASYNC910 - sending the answer is a checkpoint
        """Wait for a turn. Cancelled, the turn is lost."""
        now = trio.current_time()
        due = self._bucket.book(now)
        if due > now:
            self.waiting += 1
            try:
                await trio.sleep_until(due)
            finally:
                self.waiting -= 1
