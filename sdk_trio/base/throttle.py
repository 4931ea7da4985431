"""Rate limits and backoff: a token bucket for calls, and doubling waits. Pure."""

from math import floor, inf

#: This fraction of a token counts as a whole one: rounding must not refuse callers who waited as
#: long as they were asked to.
_ROUNDING = 1e-9


class TokenBucket:
    """At most ``burst`` calls at once, and ``per_second`` in the long run.

    The bucket stores how many tokens are missing and when it counted them, which is exact at any
    rate. If more tokens are missing than it can hold, it acts as a queue: each caller gets the time
    of its token.

    Args:
        per_second: above 0.
        burst: 1 or more.
        missing: how many tokens were missing at ``as_of``; 0 or more.
        as_of: the time of that count.

    Every ``now`` is in seconds, on any clock of the caller. If it goes back, no time has passed.
    """

    __slots__ = ("_as_of", "_burst", "_missing", "_per_second")

    def __init__(
        self, *, per_second: float, burst: float, missing: float = 0.0, as_of: float = 0.0
    ) -> None:
        self._per_second = per_second
        self._burst = burst
        self._missing = missing
        self._as_of = as_of

    def missing(self, now: float) -> float:
        """Return how many tokens are missing; more than ``burst`` if some are owed."""
        missing = self._missing
        if missing:
            if now > self._as_of:
                missing -= (now - self._as_of) * self._per_second
                self._missing = missing = missing if missing > 0.0 else 0.0
            self._as_of = now
        return missing

    def wait(self, now: float) -> float:
        """Return the seconds until a token is available; 0 if one is available now."""
        lacking = self.missing(now) + 1.0 - self._burst
        return lacking / self._per_second if lacking > _ROUNDING else 0.0

    def available(self, now: float) -> int:
        """Return how many tokens are available now."""
        return max(0, floor(self._burst - self.missing(now) + _ROUNDING))

    def admit(self, now: float) -> float:
        """Take a token and return 0; if none is available, return the seconds until one is."""
        lacking = self.missing(now) + 1.0 - self._burst
        if lacking > _ROUNDING:
            return lacking / self._per_second
        self._as_of = now
        self._missing += 1.0
        return 0.0

    def take(self, now: float, count: int = 1) -> None:
        """Take tokens, even if they are not available yet."""
        missing = self.missing(now)
        self._as_of = now
        self._missing = missing + count

    def book(self, now: float) -> float:
        """Take a token and return the time at which it is available: now, or later."""
        lacking = self.missing(now) + 1.0 - self._burst
        self._as_of = now
        self._missing += 1.0
        return now + lacking / self._per_second if lacking > 0.0 else now

    def give_back(self) -> None:
        """Return an unused token."""
        self._missing = max(0.0, self._missing - 1.0)

    def change(self, *, per_second: float, burst: float, now: float) -> None:
        """Change the rate; the number of missing tokens stays the same."""
        self.missing(now)
        self._per_second = per_second
        self._burst = burst


def longest_wait(failures: int, *, base_seconds: float, cap_seconds: float = inf) -> float:
    """Return the upper bound, in seconds, of the wait after ``failures`` (at least 1) in a row."""
    # 2**60 times any base is above any cap, and larger exponents overflow a float.
    return min(cap_seconds, base_seconds * 2.0 ** min(failures - 1, 60))


def jittered_wait(
    failures: int, fraction: float, *, base_seconds: float, cap_seconds: float
) -> float:
    """Return the wait in seconds after ``failures`` (at least 1) in a row.

    ``fraction`` is the caller's random number, from 0 to 1. Full jitter, ``U(0, longest)``, spreads
    clients that failed together over the whole interval.
    """
    return fraction * longest_wait(failures, base_seconds=base_seconds, cap_seconds=cap_seconds)
