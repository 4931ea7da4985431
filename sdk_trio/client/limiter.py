"""How fast attempts may leave: a token bucket, and the gate that a 429 shuts. Pure.

Both answer with a time to wait; who waits, and for how long at most, is the pipeline's business.
"""

import math
from collections.abc import Callable

import attrs

SECONDS_PER_MINUTE = 60.0


@attrs.frozen
class LimitPolicy:
    """The client's own rate.

    ``per_minute`` attempts a minute are let through on average, ``burst`` at once; None: no limit
    but the gate. The upstream's own limit is the better judge, so none is the default.
    """

    per_minute: float | None = None
    burst: int = 10


class Place:
    """A place in the order of departure: the attempt leaves at ``due``, or when that has passed.

    ``due`` changes with the rate while the place is waited for.
    """

    __slots__ = ("due",)

    def __init__(self, due: float) -> None:
        self.due: float = due


class RateLimiter:
    """The limiter of one access token at one origin.

    The bucket is kept as the time at which it would be full again (the "generic cell rate
    algorithm"): one number, exact, and a place that is given back is one subtraction.

    Args:
        policy: the rate.
        clock: returns the current time in seconds; it must never go back.
    """

    def __init__(self, policy: LimitPolicy, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._full_at = -math.inf
        self._shut_until = -math.inf
        self._waited_for: set[Place] = set()
        self._take(policy)

    def _take(self, policy: LimitPolicy) -> None:
        rate = policy.per_minute
        self.policy = policy
        self._interval = 0.0 if rate is None else SECONDS_PER_MINUTE / rate
        self._tolerance = self._interval * max(policy.burst - 1, 0)

    @property
    def shut_until(self) -> float:
        """Return the time before which the upstream asked for silence; the past when it did not."""
        return self._shut_until

    @property
    def backlog(self) -> float:
        """Return how many attempts the bucket still has to make good for; 0 when it is full."""
        if not self._interval:
            return 0.0
        return max(0.0, self._full_at - self._clock()) / self._interval

    @property
    def is_idle(self) -> bool:
        """Return whether forgetting this limiter would change nothing."""
        now = self._clock()
        return self._shut_until <= now and self._full_at <= now

    def shut(self, seconds: float) -> None:
        """The upstream answered 429: no attempt leaves for ``seconds``. It never shortens."""
        self._shut_until = max(self._shut_until, self._clock() + seconds)

    def change(self, policy: LimitPolicy) -> None:
        """Go on at another rate.

        Nobody loses a place and none is given twice: the attempts that the bucket has to make good
        for stay as many, and who waits leaves in the same order, at the new pace from now on.
        """
        now = self._clock()
        interval, tolerance = self._interval, self._tolerance
        self._take(policy)
        if not interval:
            return  # nobody waited, and the bucket is full
        pace = self._interval / interval
        if self._full_at > now:
            self._full_at = now + (self._full_at - now) * pace
        for place in self._waited_for:
            ahead = place.due + tolerance - now
            place.due = max(now, now + ahead * pace - self._tolerance)

    def book(self) -> Place:
        """Take the next place in the order of departure; :meth:`leave` it when its time has come.

        One that is due at once need not be left.
        """
        now = self._clock()
        full_at = max(self._full_at, now)
        self._full_at = full_at + self._interval
        place = Place(max(now, full_at - self._tolerance))
        if place.due > now:
            self._waited_for.add(place)
        return place

    def leave(self, place: Place) -> None:
        """Wait for ``place`` no longer, whether the attempt departs or not."""
        self._waited_for.discard(place)

    def book_now(self) -> bool:
        """Take a place if an attempt may leave this instant; return whether it may."""
        now = self._clock()
        if self._shut_until > now or self._full_at - self._tolerance > now:
            return False
        self.book()
        return True

    def give_back(self) -> None:
        """Return a place that was booked and not used: all later ones move up."""
        self._full_at -= self._interval
