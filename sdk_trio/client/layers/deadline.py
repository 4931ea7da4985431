"""The deadline layer: what ends the waits of a call early, and what the call ends with then.

Nothing of a call lasts beyond its deadline, or the client itself.
"""

from collections.abc import Callable

import httpx
import trio

from ..answers import outcome_unknown, unread
from ..call import Call, deadline_of
from ..errors import CallError, ConnectionFailedError, DeadlineExceededError, FailureKind
from . import AttemptKind, CallLayer


class CallCut(Exception):  # noqa: N818 - it says what happens, and never leaves the pipeline
    """The call's deadline has come, or the client is closed: what is under way is given up."""


class CallsUnderWay:
    """The waits of the calls that a client has under way, so that closing it can end them.

    A call waits in one place at a time, or in two when it is hedged: for leave to send, and for an
    answer. Each wait has one scope, which keeps the call's deadline too: a scope around the whole
    call would cost each of them a twelfth more.
    """

    __slots__ = ("_scopes", "is_closed")

    def __init__(self) -> None:
        self._scopes: set[trio.CancelScope] = set()
        self.is_closed: bool = False

    def begin(self, deadline: float) -> trio.CancelScope:
        """Return the scope for a wait until ``deadline``; :meth:`end` it in any case."""
        scope = trio.CancelScope(deadline=deadline)
        if self.is_closed:
            scope.cancel()
        self._scopes.add(scope)
        return scope

    def end(self, scope: trio.CancelScope) -> None:
        """The wait of ``scope`` is over."""
        self._scopes.discard(scope)

    def close(self) -> None:
        """End every wait, and those that begin from now on."""
        self.is_closed = True
        for scope in self._scopes:
            scope.cancel()


class DeadlineLayer(CallLayer):
    """The outermost layer: says when a call has to be over, and what it ends with when it is cut.

    Each wait inside keeps to the deadline by itself, since a scope here as well would cost each
    call a twelfth more; it raises ``CallCut`` when it cannot be waited to its end.

    Args:
        under_way: knows whether the client is closed.
        clock: returns the current time in seconds.
    """

    def __init__(self, under_way: CallsUnderWay, *, clock: Callable[[], float]) -> None:
        self._under_way = under_way
        self._clock = clock

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Make the call and end it at its deadline.

        Raises:
            DeadlineExceededError: the deadline came first.
            ConnectionFailedError: the client was closed first.
            OutcomeUnknownError: one of both came while a write had been sent and not answered.
        """
        call.deadline = deadline_of(call.total_timeout, now=self._clock())
        try:
            return await self.next.send(call, kind)
        except CallCut:
            pass
        error: CallError
        if self._under_way.is_closed:
            said = "the client was closed"
            error = ConnectionFailedError(
                said, kind=FailureKind.REFUSED, method=call.method, path=call.shown_path
            )
        else:
            said = f"the total time of {call.total_timeout:g} s is over"
            error = DeadlineExceededError(said, method=call.method, path=call.shown_path)
        # The head of a success has come: the write was executed, and only its body is missing.
        if call.head is not None and call.head.is_success and not call.idempotent:
            raise unread(call.head, call, f"its body had not come when {said}")
        if call.is_unconfirmed:
            raise outcome_unknown(call) from error
        raise error
