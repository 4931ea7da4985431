"""The layers of a call, from the outermost to the attempt: what all of them share.

A layer is an object with one async method, :meth:`CallLayer.send`, over the next one; its policy
stands beside it as a pure object or function. :meth:`~sdk_trio.client.pipeline.Pipeline.layers`
lists them in their order, with its reasons.
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
    """Without a whole answer."""
    CANCELLED = "cancelled"
    """Given up by us: another attempt won, the call's deadline passed, or the caller cancelled."""


@attrs.frozen(kw_only=True)
class CallAttempt:
    """One attempt that has ended, as hooks see it; it holds no query, header or body.

    ``number`` counts the attempts of its call from 1. ``started_at`` is on the client's clock,
    ``duration`` in seconds. ``status`` is None without the head of an answer, ``error`` the name of
    the exception's class without a whole one.
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
    """Totals since the client was made.

    ``requests`` are finished calls by method and outcome: ``ok``, the name of the error's class
    in words (``not_found``, ``circuit_open``), or ``cancelled``. ``attempts_per_call`` is a
    histogram: how many calls took 0, 1, 2, ... attempts.
    """

    requests: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    attempts_per_call: Counter[int] = attrs.field(factory=Counter)
    attempts: Counter[AttemptKind] = attrs.field(factory=Counter)
    hedges_won: int = 0
    budget_refusals: int = 0
    circuits_opened: int = 0


#: A function that is called with the record of every attempt, in the task of the call.
AttemptHook = Callable[[CallAttempt], None]


class CallLayer:
    """One layer of a call; ``next`` is the one inside, which :func:`chained` sets."""

    next: "CallLayer"

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Pass ``call`` on and return the answer; ``kind`` is that of the attempt to be made."""
        return await self.next.send(call, kind)


def chained(layers: Sequence[CallLayer]) -> CallLayer:
    """Put each layer over the one that follows it, and return the outermost."""
    # The layers are given as a list and know nobody but the next: their order stands in one place,
    # and a test can leave one out.
    for outer, inner in pairwise(layers):
        outer.next = inner
    return layers[0]


# The deadline layer stands here because every layer that waits takes part in it: nothing of a call
# lasts beyond its deadline, or the client itself.


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
        # A wait that begins after the closing ends at its first checkpoint, like all the others.
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
        # Outside of the handler, so that the error has no context: the frames of the cut wait hold
        # the request.
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
