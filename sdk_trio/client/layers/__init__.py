"""The layers of a call, from the outermost to the attempt: their common parts.

A layer is an object with one async method, :meth:`CallLayer.send`, wrapping the next one; its
policy is a separate pure object or function. :meth:`~sdk_trio.client.pipeline.Pipeline.layers`
lists them in order, with the reasons.
"""

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import attrs
import httpx
import trio

from ..answers import outcome_unknown, unread
from ..call import Call, deadline_of
from ..errors import CallError, ConnectionFailedError, DeadlineExceededError, FailureKind


class AttemptKind(enum.StrEnum):
    """The reason for an attempt."""

    FIRST = "first"
    RETRY = "retry"
    HEDGE = "hedge"


class AttemptResult(enum.StrEnum):
    """The end of an attempt."""

    ANSWERED = "answered"
    """With an answer of any status."""
    FAILED = "failed"
    """Without a complete answer."""
    CANCELLED = "cancelled"
    """Cancelled by us: another attempt won, the deadline passed, or the caller cancelled."""


@attrs.frozen(kw_only=True)
class CallAttempt:
    """One finished attempt, as hooks get it; it has no query, header or body.

    ``number`` counts the attempts of its call from 1. ``started_at`` is on the client's clock,
    ``duration`` in seconds. ``status`` is None if no head of an answer arrived; ``error`` is the
    exception's class name if no complete answer arrived.
    """

    method: str
    path: str
    origin: str
    number: int
    kind: AttemptKind
    result: AttemptResult
    started_at: float
    duration: float
    status: int | None = None
    http_version: str | None = None
    request_id: str | None = None
    error: str | None = None


@attrs.define
class ClientCounters:
    """Totals since the client was created.

    ``requests`` are finished calls by method and outcome: ``ok``, the error's class name in words
    (``not_found``, ``circuit_open``), or ``cancelled``. ``attempts_per_call`` is a histogram: how
    many calls took 0, 1, 2, ... attempts.
    """

    requests: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    attempts_per_call: Counter[int] = attrs.field(factory=Counter)
    attempts: Counter[AttemptKind] = attrs.field(factory=Counter)
    hedges_won: int = 0
    budget_refusals: int = 0
    circuits_opened: int = 0


#: A function called with the record of every attempt, in the task of the call.
AttemptHook = Callable[[CallAttempt], None]


class CallLayer:
    """One layer of a call; ``next`` is the inner one, set by :func:`chained`."""

    next: "CallLayer"

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Pass ``call`` on and return the answer; ``kind`` is the kind of the attempt."""
        return await self.next.send(call, kind)


def chained(layers: Sequence[CallLayer]) -> CallLayer:
    """Connect each layer to the next, and return the outermost."""
    # Layers come as a list and know only the next one: their order is in one place, and a test can
    # omit one.
    for outer, inner in pairwise(layers):
        outer.next = inner
    return layers[0]


# The deadline layer is here because every waiting layer uses it: no part of a call outlasts its
# deadline, or the client.


class CallCut(Exception):  # noqa: N818 - named after the event; it never leaves the pipeline
    """The call's deadline has passed, or the client is closed: its work is cancelled."""


class CallsInProgress:
    """The waits of a client's calls in progress, so that closing the client can end them.

    A call has one wait at a time, first for a rate slot and then for an answer; a hedged call has
    two. Each wait has one scope, which also enforces the deadline: a scope around the whole call
    would make each call a twelfth slower.
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
        # A wait that starts after closing ends at its first checkpoint.
        self._scopes.add(scope)
        return scope

    def end(self, scope: trio.CancelScope) -> None:
        """Remove the finished wait of ``scope``."""
        self._scopes.discard(scope)

    def close(self) -> None:
        """End every wait, and all later ones."""
        self.is_closed = True
        for scope in self._scopes:
            scope.cancel()


class DeadlineLayer(CallLayer):
    """The outermost layer: sets the call's deadline, and the error when it passes.

    Each inner wait enforces the deadline itself, since another scope here would make each call a
    twelfth slower; it raises ``CallCut`` if it has to stop.

    Args:
        in_progress: whether the client is closed.
        clock: returns the current time in seconds.
    """

    def __init__(self, in_progress: CallsInProgress, *, clock: Callable[[], float]) -> None:
        self._under_way = in_progress
        self._clock = clock

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Make the call, ending it at its deadline.

        Raises:
            DeadlineExceededError: the deadline came first.
            ConnectionFailedError: the client was closed first.
            OutcomeUnknownError: one of the two, after a write was sent and before it was answered.
        """
        call.deadline = deadline_of(call.total_timeout, now=self._clock())
        try:
            return await self.next.send(call, kind)
        except CallCut:
            pass
        # Outside the handler, so that the error has no context: the frames of the cancelled wait
        # hold the request.
        error: CallError
        if self._under_way.is_closed:
            said = "the client was closed"
            error = ConnectionFailedError(
                said, kind=FailureKind.REFUSED, method=call.method, path=call.shown_path
            )
        else:
            said = f"the total time of {call.total_timeout:g} s is over"
            error = DeadlineExceededError(said, method=call.method, path=call.shown_path)
        # The head of a success has arrived: the write was executed, and only its body is missing.
        if call.head is not None and call.head.is_success and not call.idempotent:
            raise unread(call.head, call, f"its body had not arrived when {said}")
        if call.is_unconfirmed:
            raise outcome_unknown(call) from error
        raise error
