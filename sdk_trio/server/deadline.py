"""The deadline of one request, which the application sets and the connection enforces.

A cancel scope for each request would cost more than the check of its signature. So a connection has
one scope for all its requests, whose deadline moves, and makes a new one only after the old one was
cancelled. The acceptor's sweep moves far deadlines; near ones are given to Trio at once.
"""

from math import inf
from types import TracebackType

import trio

from ..base.http import Whole


class RequestDeadline:
    """The deadline of one connection's requests.

    The application says ``with deadline.move_on_after(seconds):`` and finds
    :attr:`cancelled_caught` and :attr:`cancel_called` as those of a scope of Trio's. Other than
    there, the scope that was cancelled is the one around the whole application: whatever it awaits
    afterwards, without a shield, is cancelled as well. It may still answer; if it does not, the
    server sends :attr:`answer`.

    ``sweep_seconds``: the longest time between two calls of :meth:`sweep`.
    """

    __slots__ = ("_at", "_given", "_near", "answer", "cancelled_caught", "scope", "spent")

    def __init__(self, sweep_seconds: float) -> None:
        # A deadline that is nearer than two sweeps is given to Trio now: the next sweep may come
        # too late for it.
        self._near = 2 * sweep_seconds
        self.renew()

    def renew(self) -> None:
        """Make a new scope: an old one that was cancelled cancels everything within it."""
        self._at = inf
        self._given = False  # whether Trio has it
        self.scope: trio.CancelScope = trio.CancelScope()
        #: Whether the scope was cancelled: every further wait inside it would be cancelled, too.
        self.spent = False
        #: Whether the last block was cut short by its deadline.
        self.cancelled_caught = False
        #: Status, headers and body of what to send if the application is cancelled.
        self.answer: Whole | None = None

    @property
    def cancel_called(self) -> bool:
        """Whether the time of the last block was over before its end."""
        return self.spent

    def move_on_after(self, seconds: float, answer: Whole | None = None) -> "RequestDeadline":
        """Return itself as a context manager whose block is cancelled in ``seconds``, above 0.

        The server sends ``answer`` if the time passes and the application gives no answer.
        """
        self.answer = answer
        self.cancelled_caught = False
        self._at = trio.current_time() + seconds
        if seconds < self._near:
            self._give()
        return self

    def __enter__(self) -> "RequestDeadline":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Withdraw the deadline; absorb the cancellation that it has caused."""
        self._at = inf
        if self._given:
            self._given = False
            self.spent = self.scope.cancel_called
            self.scope.deadline = inf
        if error is None or not self.spent:
            return False
        self.cancelled_caught = _is_cancellation(error)
        return self.cancelled_caught

    def sweep(self, now: float) -> None:
        """Give a deadline that is near to Trio, which enforces it exactly."""
        if self._at - now < self._near:
            self._give()

    def _give(self) -> None:
        self._given = True
        self.scope.deadline = self._at


def _is_cancellation(error: BaseException) -> bool:
    """Say whether an exception is Cancelled, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)
