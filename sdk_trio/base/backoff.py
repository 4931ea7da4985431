"""Waits between attempts that double with each failure, with full jitter. Pure."""

from math import inf


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
