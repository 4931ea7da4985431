"""Rates and waits: a token bucket for calls, and waits that double between attempts. Pure."""

from math import floor, inf

#: So much of a token counts as a whole one, so that rounding refuses nobody who waits as told.
_ROUNDING = 1e-9


class TokenBucket:
    """At most ``burst`` at once, and ``per_second`` in the long run.

    The bucket holds ``burst`` tokens when it is full. It is kept as the number of tokens that are
    missing, and when that was so: counting is exact at any rate, and a bucket that owes more than
    it can hold is a queue, in which each token has its time.

    Args:
        per_second: above 0.
        burst: 1 or more.

    Every ``now`` is in seconds, on whichever clock the caller uses. If it goes back, no time has
    passed.
    """

    __slots__ = ("_as_of", "_burst", "_missing", "_per_second")

    def __init__(self, *, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._missing = 0.0
        self._as_of = 0.0

    def missing(self, now: float) -> float:
        """Return how many tokens the bucket needs to be full; more than ``burst``: it owes some."""
        missing = self._missing
        if missing:
            if now > self._as_of:
                missing -= (now - self._as_of) * self._per_second
                self._missing = missing = missing if missing > 0.0 else 0.0
            self._as_of = now
        return missing

    def wait(self, now: float) -> float:
        """Return after how many seconds there is a token; 0 if there is one now."""
        lacking = self.missing(now) + 1.0 - self._burst
        return lacking / self._per_second if lacking > _ROUNDING else 0.0

    def available(self, now: float) -> int:
        """Return how many tokens there are now."""
        return max(0, floor(self._burst - self.missing(now) + _ROUNDING))

    def admit(self, now: float) -> float:
        """Take a token and return 0; if there is none, return after how many seconds there is."""
        lacking = self.missing(now) + 1.0 - self._burst
        if lacking > _ROUNDING:
            return lacking / self._per_second
        self._as_of = now
        self._missing += 1.0
        return 0.0

    def take(self, now: float, count: int = 1) -> None:
        """Take tokens, whether they are there or will have to come first."""
        missing = self.missing(now)
        self._as_of = now
        self._missing = missing + count

    def book(self, now: float) -> float:
        """Take a token and return the time at which it is there: now, or later."""
        lacking = self.missing(now) + 1.0 - self._burst
        self._as_of = now
        self._missing += 1.0
        return now + lacking / self._per_second if lacking > 0.0 else now

    def give_back(self) -> None:
        """Return a token that was taken and not used."""
        self._missing = max(0.0, self._missing - 1.0)

    def change(self, *, per_second: float, burst: float, now: float) -> None:
        """Go on at another rate; as many tokens are missing as before."""
        self.missing(now)
        self._per_second = per_second
        self._burst = burst


def longest_wait(failures: int, *, base_seconds: float, cap_seconds: float = inf) -> float:
    """Return the upper end, in seconds, of the wait after ``failures`` (at least 1) in a row."""
    # 2**60 times any base is above any cap, and larger exponents overflow a float.
    return min(cap_seconds, base_seconds * 2.0 ** min(failures - 1, 60))


def jittered_wait(
    failures: int, fraction: float, *, base_seconds: float, cap_seconds: float
) -> float:
    """Return the wait in seconds after ``failures`` (at least 1) in a row.

    ``fraction`` is the caller's randomness, from 0 to 1: full jitter, ``U(0, longest)``, spreads
    those that failed together over the whole interval.
    """
    return fraction * longest_wait(failures, base_seconds=base_seconds, cap_seconds=cap_seconds)
