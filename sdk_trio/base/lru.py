"""A mapping of bounded size that forgets what was not used for longest. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """At most ``capacity`` values by key (1 or more); reading and writing a value uses it.

    Every operation takes the same time, however many values there are. ``in`` and ``len`` use
    nothing.
    """

    __slots__ = ("_capacity", "_values")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("an LRU holds 1 value or more")
        self._capacity = capacity
        #: The least recently used first. Not a dict: its first key is found by passing all the
        #: holes that were left in front of it.
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
        """Return the value of ``key``, None if there is none."""
        return self[key] if key in self._values else None

    def discard(self, key: K) -> None:
        """Forget the value of ``key``, if there is one."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
