"""The rate limiter of the client: a token bucket, and a gate that a 429 shuts. Pure.

Both return a time to wait; the pipeline waits, and bounds how long.
"""

import math
from collections.abc import Callable

import attrs

from ..base.throttle import TokenBucket

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

    Args:
        policy: the rate.
        clock: returns the current time in seconds; it must never go back.
    """

    def __init__(self, policy: LimitPolicy, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shut_until = -math.inf
        self._waited_for: set[Place] = set()
        self.policy = policy
        self._bucket = _bucket_of(policy)

    @property
    def shut_until(self) -> float:
        """Return the time until which the gate is shut; a time in the past when it is open."""
        return self._shut_until

    @property
    def backlog(self) -> float:
        """Return how many attempts the bucket still has to make good for; 0 when it is full."""
        return 0.0 if self._bucket is None else self._bucket.missing(self._clock())

    @property
    def is_idle(self) -> bool:
        """Return whether forgetting this limiter would change nothing."""
        return self._shut_until <= self._clock() and not self.backlog

    def shut(self, seconds: float) -> None:
        """Let no attempt leave for ``seconds``, after a 429; this never shortens a longer wait."""
        self._shut_until = max(self._shut_until, self._clock() + seconds)

    def change(self, policy: LimitPolicy) -> None:
        """Go on at another rate.

        No place is lost and none is given twice: the bucket lacks as many attempts as before, and
        waiting calls leave in the same order, at the new rate from now on.
        """
        now = self._clock()
        before, bucket = self.policy, self._bucket
        self.policy = policy
        if bucket is None or policy.per_minute is None:
            # Nobody waited before, or nobody has to wait any more.
            self._bucket = _bucket_of(policy)
            for place in self._waited_for:
                place.due = now
            return
        bucket.change(per_second=_per_second(policy), burst=_burst(policy), now=now)
        for place in self._waited_for:
            ahead = (place.due - now) * _per_second(before) + _burst(before)
            place.due = max(now, now + (ahead - _burst(policy)) / _per_second(policy))

    def book(self) -> Place:
        """Take the next place in the order of departure; :meth:`leave` it when its time has come.

        A place that is due at once need not be left.
        """
        now = self._clock()
        place = Place(now if self._bucket is None else self._bucket.book(now))
        if place.due > now:
            self._waited_for.add(place)
        return place

    def leave(self, place: Place) -> None:
        """Stop waiting for ``place``, whether the attempt departs or not."""
        self._waited_for.discard(place)

    def book_now(self) -> bool:
        """Take a place if an attempt may leave at once; return whether it may."""
        now = self._clock()
        if self._shut_until > now:
            return False
        return self._bucket is None or not self._bucket.admit(now)

    def give_back(self) -> None:
        """Return a place that was booked and not used: all later ones move up."""
        if self._bucket is not None:
            self._bucket.give_back()


def _bucket_of(policy: LimitPolicy) -> TokenBucket | None:
    if policy.per_minute is None:
        return None
    return TokenBucket(per_second=_per_second(policy), burst=_burst(policy))


def _per_second(policy: LimitPolicy) -> float:
    return (policy.per_minute or 0.0) / SECONDS_PER_MINUTE


def _burst(policy: LimitPolicy) -> int:
    return max(policy.burst, 1)
