"""Waits between attempts that grow, with full jitter: the one place that computes them. Pure."""


def longest_wait(failures: int, *, base_seconds: float, cap_seconds: float) -> float:
    """Return the upper end, in seconds, of the wait after ``failures`` (at least 1) attempts.

    It doubles with each failure. The wait itself is this times a random number from 0 to 1: full
    jitter spreads those that failed together over the whole interval.
    """
    # 2**60 times any base is above any cap, and larger exponents overflow a float.
    return min(cap_seconds, base_seconds * 2.0 ** min(failures - 1, 60))
