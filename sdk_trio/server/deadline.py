"""The deadline of one request, which the application sets and the connection enforces.

A cancel scope for each request would cost more than the check of its signature. So a connection
uses one scope for all its requests but the first, and replaces it only after it was cancelled. The
first request has no deadline here: the application uses a scope of its own, if it needs one. Many
connections have one request, and most of those need none. A deadline that is near becomes the
deadline of the scope at once; the acceptor's sweep does the same for others as they come near.
"""

from math import inf
from types import TracebackType

import trio

from ..base.http import Whole


class RequestDeadline:
    """The deadline of one connection's requests.

    The application uses ``with deadline.move_on_after(seconds):``, and then
    :attr:`cancelled_caught` and :attr:`cancel_called` as of a Trio scope. There is one difference:
    the cancelled scope surrounds the whole application, so later waits without a shield are
    cancelled too. The application may still respond; otherwise the server sends :attr:`response`.

    Args:
        sweep_seconds: the longest time between two calls of :meth:`sweep`.
    """

    __slots__ = ("_armed", "_at", "_near", "cancelled_caught", "response", "scope", "spent")

    def __init__(self, sweep_seconds: float) -> None:
        # The next sweep may come too late for a deadline that is nearer than two sweeps.
        self._near = 2 * sweep_seconds
        self._at = inf
        self._armed = False  # whether the scope has the deadline
        self.scope: trio.CancelScope = trio.CancelScope()
        #: Whether the scope was cancelled, so that every further wait inside it is cancelled too.
        self.spent = False
        #: Whether the deadline has cancelled the last block.
        self.cancelled_caught = False
        #: The response that the server sends if the application is cancelled and sends none.
        self.response: Whole | None = None

    @property
    def cancel_called(self) -> bool:
        """Whether the deadline of the last block passed before its end."""
        return self.spent

    def move_on_after(self, seconds: float, response: Whole | None = None) -> "RequestDeadline":
        """Return itself as a context manager whose block is cancelled in ``seconds``, above 0.

        The server sends ``response`` if the deadline passes and the application sends none.
        """
        self.response = response
        self.cancelled_caught = False
        self._at = trio.current_time() + seconds
        if seconds < self._near:
            self._arm()
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
        if self._armed:
            self._armed = False
            self.spent = self.scope.cancel_called
            self.scope.deadline = inf
        if error is None or not self.spent:
            return False
        self.cancelled_caught = _is_cancellation(error)
        return self.cancelled_caught

    def sweep(self, now: float) -> None:
        """Arm a deadline that is near: from then on Trio enforces it exactly."""
        if self._at - now < self._near:
            self._arm()

    def _arm(self) -> None:
        self._armed = True
        self.scope.deadline = self._at


def _is_cancellation(error: BaseException) -> bool:
    """Return whether an exception is Cancelled, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)
