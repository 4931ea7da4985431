"""A mapping of bounded size that drops the least recently used value. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """At most ``capacity`` values by key (1 or more); reading or writing a value counts as use.

    Every operation takes constant time. ``in`` and ``len`` do not count.
    """

    __slots__ = ("_capacity", "_values")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("an LRU needs a capacity of 1 or more")
        self._capacity = capacity
        #: Least recently used first. An OrderedDict: finding a dict's first key means scanning the
        #: gaps that deleted keys leave.
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __getitem__(self, key: K) -> V:
        self._values.move_to_end(key)
        return self._values[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._capacity:
            self._values.popitem(last=False)

    def get(self, key: K) -> V | None:
        """Return the value of ``key``, or None."""
        return self[key] if key in self._values else None

    def discard(self, key: K) -> None:
        """Drop the value of ``key``, if any."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
