"""How fast one provider is asked: a token bucket that a provider can stop for a while. Pure."""

from math import floor


class Pace:
    """At most ``burst`` attempts at once and ``per_second`` of them in the long run.

    Args:
        per_second: above 0.
        burst: how many may follow each other without a pause; at least 1.
        now: the time on whichever clock the caller uses, in seconds.
    """

    def __init__(self, *, per_second: float, burst: int, now: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at = now
        self._paused_until = now

    def allowed(self, now: float) -> int:
        """Return how many attempts may begin now."""
        if self.is_paused(now):
            return 0
        return floor(self._fill(now) + 1e-9)

    def take(self, count: int, now: float) -> None:
        """Count attempts that begin now; at most as many as are allowed."""
        self._tokens = self._fill(now) - count

    def pause(self, until: float) -> None:
        """Allow none before that time: the provider has said so."""
        self._paused_until = max(self._paused_until, until)

    def is_paused(self, now: float) -> bool:
        """Return whether the provider is being left alone."""
        return now < self._paused_until

    def wait(self, now: float) -> float:
        """Return after how many seconds an attempt is allowed; 0 if one is now."""
        missing = (1.0 - 1e-9 - self._fill(now)) / self._per_second
        return max(0.0, missing, self._paused_until - now)

    def _fill(self, now: float) -> float:
        earned = max(0.0, now - self._filled_at) * self._per_second
        self._tokens = min(float(self._burst), self._tokens + earned)
        self._filled_at = max(self._filled_at, now)
        return self._tokens
