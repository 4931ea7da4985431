"""The last quarter of an hour in steps: rates, latency and the queue, for the charts. Pure.

Metrics are totals since the start. A step is the difference of two samples, so the charts need no
second count.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from ..base.telemetry import Sample

#: Seconds between two samples, and the number of steps kept: a quarter of an hour.
STEP_SECONDS = 5.0
STEPS = 180

#: The results of deliveries that have a line in the charts.
RESULTS = (
    "accepted",
    "handled",
    "failed",
    "dead",
    "parked",
    "duplicate",
    "rejected",
    "refused",
    "unavailable",
)

_DELIVERIES = "sdk_webhook_deliveries_total"
_SECONDS = "sdk_webhook_handler_seconds_bucket"
_DEPTH = "sdk_queue_depth"


class Totals(msgspec.Struct, frozen=True):
    """The totals at one time: deliveries by result, runs by the upper bound of their bucket."""

    results: Mapping[str, float]
    buckets: Mapping[float, float]
    depth: int


def totals_of(samples: Iterable[Sample]) -> Totals:
    """Return the totals of the metrics; the buckets of all event types are summed."""
    results: dict[str, float] = dict.fromkeys(RESULTS, 0)
    buckets: dict[float, float] = {}
    depth = 0
    for sample in samples:
        if sample.name == _DELIVERIES:
            result = sample.labels[0][1]
            if result in results:
                results[result] += sample.value  # of each source
        elif sample.name == _SECONDS:
            bound = float(dict(sample.labels)["le"])
            buckets[bound] = buckets.get(bound, 0) + sample.value
        elif sample.name == _DEPTH:
            depth = int(sample.value)
    return Totals(results, buckets, depth)


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Return the ``share`` quantile of a cumulative histogram; None if it is empty.

    Between the ends of a bucket it is interpolated, as Prometheus does. Above the last end nothing
    is known, so that end is returned.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= share * total:
            if bound == inf:
                return lower
            return round(lower + (bound - lower) * (share * total - below) / (count - below), 6)
        lower, below = bound, count
    return lower


def step_between(before: Totals, after: Totals, at: float) -> dict[str, Any]:
    """Return the changes between two moments, as one JSON object."""
    runs = {bound: n - before.buckets.get(bound, 0) for bound, n in after.buckets.items()}
    return {
        "at": at,
        **{name: int(after.results[name] - before.results[name]) for name in RESULTS},
        "runs": int(runs.get(inf, 0)),
        "p50_seconds": quantile(runs, 0.5),
        "p95_seconds": quantile(runs, 0.95),
        "queue_depth": after.depth,
    }


class Series:
    """The last :data:`STEPS` steps."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, Any]] = deque(maxlen=STEPS)
        self._last: Totals | None = None

    def note(self, samples: Iterable[Sample], at: float) -> None:
        """Add the step since the last call; the first call has nothing to compare with."""
        totals = totals_of(samples)
        if self._last is not None:
            self._steps.append(step_between(self._last, totals, at))
        self._last = totals

    @property
    def steps(self) -> Sequence[dict[str, Any]]:
        """Return the steps, the oldest first."""
        return tuple(self._steps)
