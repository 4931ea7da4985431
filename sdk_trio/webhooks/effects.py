"""Let handlers end their event themselves, together with the effects that they apply.

``services.finish`` does that in the middle of a handler; a handler registered with
``transaction=True`` consists only of that. The rest of the handler cannot change the outcome: the
event is done.
"""

from collections.abc import Callable, Mapping
from inspect import iscoroutinefunction
from typing import Any, Protocol, TypeVar

import trio

from ..base.clock import wall
from ..errors import EffectError
from ..events import Event
from ..records.deliveries import Lease
from ..storage.effects import Effects
from ..storage.ports import Inbox
from .unawaited import require_awaited

T = TypeVar("T")


class RunOfHandler(Protocol):
    """A running handler."""

    @property
    def lease(self) -> Lease | None:
        """The lease of the run, if it is known."""
        ...


class Conclusions:
    """Ends events on behalf of their handlers, and records which ones.

    Args:
        inbox: the open store.
        clock: returns Unix seconds.
    """

    def __init__(self, inbox: Inbox, *, clock: Callable[[], float] = wall) -> None:
        self._inbox = inbox
        self._clock = clock
        self._begun: set[str] = set()
        #: The keys of events that are done while their handlers still run.
        self.ended: set[str] = set()
        #: The running handlers, by the key of their event; set by :class:`.invocation.Invocations`.
        self.runs: Mapping[str, RunOfHandler] = {}

    async def conclude(self, event: Event[Any], effects: Effects[T]) -> T:
        """Apply ``effects`` and record that ``event`` is done, in one transaction.

        See :meth:`Services.finish`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        key = event.key
        if iscoroutinefunction(effects):
            raise EffectError(
                "finish takes a plain function: write `def save(tx)`, and await everything else "
                "before calling finish"
            )
        # Checked before the event is done, because afterwards the run can no longer fail.
        require_awaited("the handler", None)
        run = self.runs.get(key)
        if run is None or run.lease is None:
            raise EffectError(
                f"the event {key} is not being handled: its handler calls finish before it returns"
            )
        if key in self._begun:
            raise EffectError(f"the event {key} is already finished: call finish once")
        self._begun.add(key)
        try:
            value = await self._inbox.conclude(
                run.lease, effects, attempt=event.attempt, now=self._clock()
            )
        except BaseException:
            self._begun.discard(key)
            raise
        self.ended.add(key)
        return value

    def is_concluding(self, key: str) -> bool:
        """Return whether the effects of an event are being written now."""
        return key in self._begun and key not in self.ended

    def forget(self, key: str) -> bool:
        """Forget the run of an event that has ended; return whether its handler ended the event."""
        if key not in self.ended:
            return False
        self.ended.discard(key)
        self._begun.discard(key)
        return True
