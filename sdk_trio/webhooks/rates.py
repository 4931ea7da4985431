"""The rate limit of each source address: a token bucket for each. Pure.

Memory is bounded, so sources have to be forgotten, and forgetting one gives it a full bucket again.
Therefore sources that have been refused are kept apart: a flood of fresh addresses pushes out other
fresh addresses only. To push out an offender, an attacker has to get other addresses refused, each
at the price of a whole minute's allowance.
"""

from collections import OrderedDict
from ipaddress import IPv6Address
from typing import Final

from ..base.throttle import TokenBucket

#: The most sources that are remembered: about 2.5 MB.
MAX_SOURCES: Final = 10_000
#: The number of these places that are reserved for sources that have been refused.
MAX_OFFENDERS: Final = 2_000

#: Added to a wait, so that rounding never refuses a caller that waits exactly as long as told.
_ROUNDING_SECONDS: Final = 0.001

# Not plain dictionaries: their first key is found by passing the holes that were left before it.
_Buckets = OrderedDict[str | int | None, TokenBucket]


class RateLimit:
    """Limits each source to ``per_minute`` deliveries a minute (``RateLimitPerMinute``).

    A source that was quiet for a minute may send ``per_minute`` at once. An IPv6 source is its /64,
    because one subscriber holds that many addresses. IPv4 written as IPv6 is IPv4.

    Raises:
        ValueError: ``per_minute`` is below 1.
    """

    __slots__ = ("_fresh", "_offenders", "_per_minute", "_per_second")

    def __init__(self, per_minute: int) -> None:
        if per_minute < 1:
            raise ValueError("a rate limit is at least 1 a minute; leave the key out for none")
        self._per_minute = float(per_minute)
        self._per_second = per_minute / 60.0
        # In the order of insertion: the first key was seen the longest ago.
        self._fresh: _Buckets = OrderedDict()
        self._offenders: _Buckets = OrderedDict()

    def __len__(self) -> int:
        """Return how many sources are remembered: at most ``MAX_SOURCES``."""
        return len(self._fresh) + len(self._offenders)

    def admit(self, address: str | None, now: float) -> float | None:
        """Count one delivery, unless its source has to wait.

        Args:
            address: the source; all senders of unknown address (None) are one source.
            now: seconds of a monotonic clock. If it goes back, no time has passed.

        Returns:
            None if it is admitted, else the seconds to wait, for ``Retry-After``: a caller that
            waits as long, and is the only one at its address, is admitted. A refused delivery
            does not prolong the wait.
        """
        source = source_of(address)
        bucket = self._offenders.pop(source, None)
        offender = bucket is not None
        if bucket is None:
            bucket = self._fresh.pop(source, None)
        if bucket is None:
            bucket = TokenBucket(per_second=self._per_second, burst=self._per_minute)
        if wait := bucket.admit(now):
            self._remember_offender(source, bucket)
            return wait + _ROUNDING_SECONDS
        # One whose bucket has filled up again behaves well now and gives its place back.
        if offender and bucket.missing(now) > 1.0:
            self._remember_offender(source, bucket)
        else:
            self._remember_fresh(source, bucket)
        return None

    def _remember_fresh(self, source: str | int | None, bucket: TokenBucket) -> None:
        self._fresh[source] = bucket
        if len(self._fresh) > MAX_SOURCES - MAX_OFFENDERS:
            self._fresh.popitem(last=False)

    def _remember_offender(self, source: str | int | None, bucket: TokenBucket) -> None:
        self._offenders[source] = bucket
        if len(self._offenders) > MAX_OFFENDERS:
            # The one that was seen the longest ago lines up with the fresh ones again.
            self._remember_fresh(*self._offenders.popitem(last=False))


def source_of(address: str | None) -> str | int | None:
    """Return the key that a source counts by: its IPv4 address, or the /64 of its IPv6 address."""
    if address is None or ":" not in address:
        return address
    try:
        parsed = IPv6Address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped is not None else int(parsed) >> 64
