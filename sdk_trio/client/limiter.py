"""The rate limiter of the client: a token bucket, and a gate that a 429 shuts. Pure.

Both return a time to wait; the pipeline waits, and bounds how long.
"""

import math
from collections.abc import Callable

import attrs

SECONDS_PER_MINUTE = 60.0


@attrs.frozen
class LimitPolicy:
    """The client's own rate.

    ``per_minute`` attempts a minute are let through on average, ``burst`` at once; None: no limit
    but the gate. None is the default, because the upstream knows its own limit better.
    """

    per_minute: float | None = None
    burst: int = 10


class Place:
    """A place in the order of departure: the attempt leaves at ``due``, or when that has passed.

    ``due`` changes with the rate while a call waits for the place.
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
        """Return the time until which the gate is shut; a time in the past when it is open."""
        return self._shut_until

    @property
    def backlog(self) -> float:
        """Return how many attempts the bucket lacks; 0 when it is full."""
        if not self._interval:
            return 0.0
        return max(0.0, self._full_at - self._clock()) / self._interval

    @property
    def is_idle(self) -> bool:
        """Return whether forgetting this limiter would change nothing."""
        now = self._clock()
        return self._shut_until <= now and self._full_at <= now

    def shut(self, seconds: float) -> None:
        """Let no attempt leave for ``seconds``, after a 429; this never shortens a longer wait."""
        self._shut_until = max(self._shut_until, self._clock() + seconds)

    def change(self, policy: LimitPolicy) -> None:
        """Go on at another rate.

        No place is lost and none is given twice: the bucket lacks as many attempts as before, and
        waiting calls leave in the same order, at the new rate from now on.
        """
        now = self._clock()
        interval, tolerance = self._interval, self._tolerance
        self._take(policy)
        if not interval:
            return  # without a rate no call waited, and the bucket is full
        pace = self._interval / interval
        if self._full_at > now:
            self._full_at = now + (self._full_at - now) * pace
        for place in self._waited_for:
            ahead = place.due + tolerance - now
            place.due = max(now, now + ahead * pace - self._tolerance)

    def book(self) -> Place:
        """Take the next place in the order of departure; :meth:`leave` it when its time has come.

        A place that is due at once need not be left.
        """
        now = self._clock()
        # The bucket is full at ``_full_at``: each place moves that time by one interval, and a
        # place is due when no more than the burst is missing.
        full_at = max(self._full_at, now)
        self._full_at = full_at + self._interval
        place = Place(max(now, full_at - self._tolerance))
        if place.due > now:
            self._waited_for.add(place)
        return place

    def leave(self, place: Place) -> None:
        """Stop waiting for ``place``, whether the attempt departs or not."""
        self._waited_for.discard(place)

    def book_now(self) -> bool:
        """Take a place if an attempt may leave at once; return whether it may."""
        now = self._clock()
        if self._shut_until > now or self._full_at - self._tolerance > now:
            return False
        self.book()
        return True

    def give_back(self) -> None:
        """Return a place that was booked and not used: all later ones move up."""
        self._full_at -= self._interval
