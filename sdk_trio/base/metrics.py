"""Samples of metrics and health checks: each part of the program reports on itself. Pure.

Every part may offer both; the runtime hands them to the admin address, which shows them.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

Labels = tuple[tuple[str, str], ...]


@attrs.frozen
class Sample:
    """One value of a metric: its name, its labels in order, and the value now."""

    name: str
    labels: Labels
    value: float


@attrs.frozen
class Check:
    """The health of one part: ``ok`` False makes the process unready, ``degraded`` does not.

    ``detail`` is one line for people: the reason, or the figures. It holds no secret.
    """

    name: str
    ok: bool
    detail: str = ""
    degraded: bool = False


#: What a part registers. Both are called on the event loop for every request: they look at what
#: is known already, and wait for nothing.
SampleSource = Callable[[], Iterable[Sample]]
CheckSource = Callable[[], Check]


class Histogram:
    """A count for each bucket of a fixed list, and the sum of all values.

    ``bounds`` are the upper ends of the buckets, ascending; what is above the last one is counted
    as well.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, name: str, labels: Labels = ()) -> Iterator[Sample]:
        """Return the samples of the metric ``name``: ``_bucket{le}``, ``_sum`` and ``_count``."""
        total = 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield Sample(f"{name}_bucket", (*labels, ("le", bound)), total)
        yield Sample(f"{name}_sum", labels, self._sum)
        yield Sample(f"{name}_count", labels, total)
