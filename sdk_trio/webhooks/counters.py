"""Counters of deliveries, refusals and handlers' time.

They need no locks, because only the event loop's thread writes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from ..base.telemetry import Histogram, Sample
from ..records.deliveries import source_of_signer
from .verdict import Cause

#: Every result that is counted. The set is closed: each label value is a permanent time series, and
#: senders must not be able to create new ones.
RESULTS: Final = (
    "accepted",
    "handled",
    "discarded",
    "superseded",
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
    "lease_given_up",
    "lease_lost",
)

#: Every cause of an answer other than 200, also a closed set. In the order of the lines: failed
#: verifications; requests that get the same answer as these; the receiver's screening; verified
#: deliveries that failed or were postponed; requests that the HTTP server itself refuses.
CAUSES: Final = (
    *(str(cause) for cause in Cause),
    *("not_https", "own_secrets"),
    *("path", "method", "source", "rate", "media", "size", "slow", "crowded"),
    *("handler", "later"),
    *("malformed", "slow_request", "long_line", "large_head"),
    *("no_answer", "not_implemented", "no_slot", "http_version"),
)

#: Upper ends, in seconds, of the histogram of handlers' time: from a lookup in memory to work for
#: which only an enqueued handler has time.
HANDLER_SECONDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

#: The label of every event type that is not in the catalogue: senders choose types, and each would
#: be another time series.
OTHER_TYPE: Final = "other"


class Counters:
    """Counters of deliveries by result (``sdk_webhook_deliveries_total{result}``), and by source.

    Args:
        types: the event types that are measured by their name; all others count as one.
        of_sources: the same for each source, by its name.
    """

    def __init__(
        self, types: Iterable[str] = (), of_sources: Mapping[str, Iterable[str]] | None = None
    ) -> None:
        # Of all senders, and the part of each source.
        self._counts: Counter[str] = Counter()
        self._counts_of_sources: Counter[tuple[str, str]] = Counter()
        self._refusals: Counter[str] = Counter()
        self._refusals_of_sources: Counter[tuple[str, str]] = Counter()
        self._types = frozenset(types)
        self._of_sources = {name: frozenset(own) for name, own in (of_sources or {}).items()}
        self._runs_of_sources: dict[tuple[str, str, bool], Histogram] = {}
        self._inline: dict[str, Histogram] = {}
        self._queued: dict[str, Histogram] = {}

    def count(self, result: str, number: int = 1, *, signer: str = "") -> None:
        """Count ``number`` more of ``result``; ``signer`` is that of the delivery, if known."""
        self._counts[result] += number
        if signer and (source := source_of_signer(signer)) is not None:
            self._counts_of_sources[source, result] += number

    def count_refusal(self, cause: str, source: str | None = None) -> None:
        """Count one more request that was not answered 200; ``cause`` is one of ``CAUSES``.

        ``source`` is the one at whose route it arrived, None for the upstream's.
        """
        if source is None:
            self._refusals[cause] += 1
        else:
            self._refusals_of_sources[source, cause] += 1

    def observe(
        self, event_type: str, seconds: float, queued: bool = False, source: str | None = None
    ) -> None:
        """Count one run of a handler and its duration; ``queued``: no sender waited for it.

        ``source`` is the event's source, None for the upstream.
        """
        if source is not None:
            # Only types that the application has named: senders choose the others.
            own = self._of_sources.get(source, ())
            place = source, event_type if event_type in own else OTHER_TYPE, queued
            self._runs_of_sources.setdefault(place, Histogram(HANDLER_SECONDS)).observe(seconds)
            return
        histograms = self._queued if queued else self._inline
        try:
            histograms[event_type].observe(seconds)
        except KeyError:
            label = event_type if event_type in self._types else OTHER_TYPE
            histograms.setdefault(label, Histogram(HANDLER_SECONDS)).observe(seconds)

    @property
    def values(self) -> Mapping[str, int]:
        """Return the counts of all senders so far as a live, read-only view."""
        return MappingProxyType(self._counts)

    def samples(self) -> Iterator[Sample]:
        """Return the metrics of deliveries, of refusals, and of the time that handlers take."""
        others = Counter(self._counts)
        for (_, result), number in self._counts_of_sources.items():
            others[result] -= number
        for result in RESULTS:
            labels = (("result", result),)
            yield Sample("sdk_webhook_deliveries_total", labels, others[result])
        # All results: the rule for rejections compares them with the handled ones.
        for source in sorted({source for source, _ in self._counts_of_sources}):
            for result in RESULTS:
                number = self._counts_of_sources[source, result]
                of_source = (("result", result), ("source", source))
                yield Sample("sdk_webhook_deliveries_total", of_source, number)
        for cause in CAUSES:
            labels = (("cause", cause),)
            yield Sample("sdk_webhook_refusals_total", labels, self._refusals[cause])
        for (source, cause), number in sorted(self._refusals_of_sources.items()):
            of_source = (("cause", cause), ("source", source))
            yield Sample("sdk_webhook_refusals_total", of_source, number)
        for mode, histograms in (("inline", self._inline), ("queued", self._queued)):
            for event_type, seconds in sorted(histograms.items()):
                yield from seconds.samples(
                    "sdk_webhook_handler_seconds", (("type", event_type), ("mode", mode))
                )
        for (source, event_type, queued), seconds in sorted(self._runs_of_sources.items()):
            mode = "queued" if queued else "inline"
            yield from seconds.samples(
                "sdk_webhook_handler_seconds",
                (("type", event_type), ("mode", mode), ("source", source)),
            )
