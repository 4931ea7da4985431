"""Counts of what happened to deliveries, without locks: only the event loop's thread writes."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType


class Counters:
    """Deliveries by result (``sdk_webhook_deliveries_total{result}`` of contracts 10).

    Results are ``accepted``, ``handled``, ``failed``, ``dead``, ``parked``, ``duplicate``,
    ``rejected``, ``refused``, ``full``, ``drift``: a closed set that no sender can make grow.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, result: str) -> None:
        """Count one more ``result``."""
        self._counts[result] += 1

    @property
    def values(self) -> Mapping[str, int]:
        """The counts so far; a live, read-only view."""
        return MappingProxyType(self._counts)
