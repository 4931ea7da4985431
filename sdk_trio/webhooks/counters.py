"""Counts of what happened to deliveries, without locks: only the event loop's thread writes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from ..base.metrics import Histogram, Sample
from .verdict import Cause

#: Every result that is counted: a closed set that no sender can make grow.
RESULTS: Final = (
    "accepted",
    "handled",
    "failed",
    "dead",
    "parked",
    "duplicate",
    "different_body",
    "rejected",
    "refused",
    "full",
    "unavailable",
    "drift",
)

#: Why a request was not answered 200: what a verification says, what the receiver refuses, what
#: becomes of a verified delivery, and what the server itself refuses. A closed set as well.
CAUSES: Final = (
    *(str(cause) for cause in Cause),
    *("not_https", "not_an_event", "own_secrets"),
    *("path", "method", "source", "rate", "media", "size", "slow", "crowded"),
    *("handler", "later"),
    *("malformed", "slow_request", "long_line", "large_head"),
    *("no_answer", "not_implemented", "http_version"),
)

#: Upper ends of the buckets of a handler's seconds: from a look-up in memory to what only a queue
#: may take.
HANDLER_SECONDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

#: The type of every event that is not in the catalogue: senders choose types, and each would be
#: another time series.
OTHER_TYPE: Final = "other"


class Counters:
    """Deliveries by result (``sdk_webhook_deliveries_total{result}`` of contracts 10).

    Args:
        types: the event types that are measured by their name; all others count as one.
    """

    def __init__(self, types: Iterable[str] = ()) -> None:
        self._counts: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._types = frozenset(types)
        self._seconds: dict[str, Histogram] = {}

    def count(self, result: str) -> None:
        """Count one more ``result``."""
        self._counts[result] += 1

    def count_refusal(self, cause: str) -> None:
        """Count one more request that was not answered 200; ``cause`` is one of ``CAUSES``."""
        self._refusals[cause] += 1

    def observe(self, event_type: str, seconds: float) -> None:
        """Count one run of a handler, which took so long."""
        try:
            self._seconds[event_type].observe(seconds)
        except KeyError:
            label = event_type if event_type in self._types else OTHER_TYPE
            self._seconds.setdefault(label, Histogram(HANDLER_SECONDS)).observe(seconds)

    @property
    def values(self) -> Mapping[str, int]:
        """The counts so far; a live, read-only view."""
        return MappingProxyType(self._counts)

    def samples(self) -> Iterator[Sample]:
        """Return the metrics of deliveries, of refusals, and of the time that handlers take."""
        for result in RESULTS:
            labels = (("result", result),)
            yield Sample("sdk_webhook_deliveries_total", labels, self._counts[result])
        for cause in CAUSES:
            labels = (("cause", cause),)
            yield Sample("sdk_webhook_refusals_total", labels, self._refusals[cause])
        for event_type, seconds in sorted(self._seconds.items()):
            yield from seconds.samples("sdk_webhook_handler_seconds", (("type", event_type),))
