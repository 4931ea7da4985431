"""A deadline that an application can set for itself, kept by its connection.

A cancel scope of its own costs each request more than its signature does. A connection has one
scope for all its requests instead, whose deadline is moved, and a new one only after it was used.
"""

from math import inf

import trio

from ..base.asgi import Whole


class Expiry:
    """The deadline of one connection's requests.

    Between :meth:`arm` and :meth:`disarm` it is cancelled at the time that it gave, up to and
    including the call of the application itself; the server then sends :attr:`answer`. Those who
    have to do something about that, do it while ``Cancelled`` passes them, in a shielded scope.

    ``sweep_seconds``: :meth:`sweep` is called at least that often.
    """

    __slots__ = ("_at", "_near", "answer", "scope", "spent")

    def __init__(self, sweep_seconds: float) -> None:
        # What is nearer than the sweep after the next one cannot wait for it.
        self._near = 2 * sweep_seconds
        self.renew()

    def renew(self) -> None:
        """Make a new scope: an old one that was cancelled cancels everything within it."""
        self._at = inf
        self.scope = trio.CancelScope()
        #: Whether the scope was cancelled: nothing can wait in it any more.
        self.spent = False
        #: Status, headers and body of what to send if the application is cancelled.
        self.answer: Whole | None = None

    def arm(self, seconds: float) -> None:
        """Cancel the application in ``seconds``, above 0, unless it disarms this first."""
        self.answer = None
        self._at = trio.current_time() + seconds
        if seconds < self._near:
            self.scope.deadline = self._at

    def disarm(self) -> bool:
        """Cancel nothing any more; return whether the time was over, and cancelling has begun."""
        self._at = inf
        if self.scope.deadline != inf:
            self.spent = self.scope.cancel_called
            self.scope.deadline = inf
        return self.spent

    def sweep(self, now: float) -> None:
        """Hand a time that is near over to Trio, which keeps it exactly."""
        if self._at - now < self._near:
            self.scope.deadline = self._at
