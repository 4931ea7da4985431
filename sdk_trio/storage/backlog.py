"""The way of the looks for due deliveries through a long backlog, decided without I/O.

An ordered delivery is due only when it is the first in its lane, those of one subject of one
tenant. With thousands that wait behind others, a look that asked each of them would take a second,
and each end of an ordered delivery is followed by a look. So a look goes through the next few that
wait, and a round of looks through all. Of those that were passed, the first of each lane is found
by an index of the lanes.
"""

from typing import Final

import msgspec

#: The waiting deliveries that one look goes through: more than it takes at once, and 2 ms of work.
WINDOW: Final = 1000

#: The lanes of which one look asks for the first delivery.
LANES: Final = 200

#: Seconds from the end of a round to the next, and those after which one that does not get on is
#: given up for the next. What becomes due among those that were passed and is in no lane (its lease
#: was given up, it was put back by hand) waits for it.
ROUND_SECONDS: Final = 5.0


class BacklogWalk(msgspec.Struct):
    """The place in a backlog at which the next look begins.

    With fewer than :data:`WINDOW` waiting deliveries each look goes through all.
    """

    #: Deliveries up to this sequence number were gone through in this round.
    passed: int = 0
    #: The last lane that was asked, in the order of the store's index; None: the next look begins
    #: with the first one.
    lane: tuple[str | bytes, ...] | None = None
    #: When the next round begins, in Unix seconds; None: this one goes on, or one look is a round.
    next_round_at: float | None = None
    #: Until when this round may stay where more is due than a look takes, in Unix seconds; None: it
    #: gets on.
    stays_until: float | None = None

    def begin(self, now: float) -> None:
        """Begin a look at ``now``, and a round with it if it is time for one."""
        for at in (self.next_round_at, self.stays_until):
            # A clock that was set back must not put the round off.
            if at is not None and not now < at <= now + ROUND_SECONDS:
                self.passed, self.next_round_at, self.stays_until = 0, None, None

    def stay(self, *, now: float) -> None:
        """End a look that has found more than it was to take: the next one begins there, too."""
        if self.passed and self.stays_until is None:
            self.stays_until = now + ROUND_SECONDS

    def end(self, last: int | None, *, now: float) -> None:
        """End a look that has not found as much as it was to take.

        Args:
            last: the last sequence number that it has gone through; None: nothing waits behind.
            now: the present, in Unix seconds.
        """
        self.stays_until = None
        if last is not None:
            self.passed = last
        elif self.passed and self.next_round_at is None:
            self.next_round_at = now + ROUND_SECONDS

    def more(self, last: int | None) -> bool:
        """Return whether the next look need not wait: this one has not gone through all."""
        return last is not None or (self.passed > 0 and self.lane is not None)

    def until(self, next_due_at: float | None) -> float | None:
        """Return when the next look is due at the latest, ``next_due_at`` aside."""
        times = [at for at in (next_due_at, self.next_round_at) if at is not None]
        return min(times, default=None)
