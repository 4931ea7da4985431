"""The deadline of one request, which the application sets and the connection enforces.

A cancel scope for each request would cost more than the check of its signature. So a connection has
one scope for all its requests, whose deadline moves, and makes a new one only after the old one was
cancelled. The acceptor's sweep moves far deadlines; near ones are given to Trio at once.
"""

from math import inf

import trio

from ..base.asgi import Whole


class RequestDeadline:
    """The deadline of one connection's requests.

    The application calls :meth:`arm` and :meth:`disarm`. If the time passes in between, its call is
    cancelled as a whole, and the server sends :attr:`answer`. Code that has to clean up does so in
    a shielded scope while ``Cancelled`` propagates.

    ``sweep_seconds``: the longest time between two calls of :meth:`sweep`.
    """

    __slots__ = ("_at", "_near", "answer", "scope", "spent")

    def __init__(self, sweep_seconds: float) -> None:
        # A deadline that is nearer than two sweeps is given to Trio now: the next sweep may come
        # too late for it.
        self._near = 2 * sweep_seconds
        self.renew()

    def renew(self) -> None:
        """Make a new scope: an old one that was cancelled cancels everything within it."""
        self._at = inf
        self.scope = trio.CancelScope()
        #: Whether the scope was cancelled: every further wait inside it would be cancelled, too.
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
        """Withdraw the deadline; return whether it had passed and cancelling has begun."""
        self._at = inf
        if self.scope.deadline != inf:
            self.spent = self.scope.cancel_called
            self.scope.deadline = inf
        return self.spent

    def sweep(self, now: float) -> None:
        """Give a deadline that is near to Trio, which enforces it exactly."""
        if self._at - now < self._near:
            self.scope.deadline = self._at
