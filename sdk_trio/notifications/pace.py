"""How fast one provider is asked: a token bucket that a provider can stop for a while. Pure."""

from math import inf

from ..base.throttle import TokenBucket


class Pace:
    """At most ``burst`` attempts at once and ``per_second`` of them in the long run.

    Args:
        per_second: above 0.
        burst: how many may follow each other without a pause; at least 1.
    """

    def __init__(self, *, per_second: float, burst: int) -> None:
        self._bucket = TokenBucket(per_second=per_second, burst=burst)
        self._paused_until = -inf

    def allowed(self, now: float) -> int:
        """Return how many attempts may begin now."""
        return 0 if self.is_paused(now) else self._bucket.available(now)

    def take(self, count: int, now: float) -> None:
        """Count attempts that begin now; at most as many as are allowed."""
        self._bucket.take(now, count)

    def pause(self, until: float) -> None:
        """Allow none before that time: the provider has said so."""
        self._paused_until = max(self._paused_until, until)

    def is_paused(self, now: float) -> bool:
        """Return whether the provider is being left alone."""
        return now < self._paused_until

    def wait(self, now: float) -> float:
        """Return after how many seconds an attempt is allowed; 0 if one is now."""
        return max(self._bucket.wait(now), self._paused_until - now, 0.0)
