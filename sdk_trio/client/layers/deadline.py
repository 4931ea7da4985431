"""The early ends of a call's waits: its deadline, or the closing of the client."""

import trio


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
        self.is_closed = False

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
