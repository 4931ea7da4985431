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

from ..call import Call


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
    for outer, inner in pairwise(layers):
        outer.next = inner
    return layers[0]
