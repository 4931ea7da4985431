"""The records and counters that hooks and metrics get: one record for each attempt. Pure."""

import enum
from collections import Counter
from typing import Protocol

import attrs


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
class AttemptRecord:
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


class AttemptObserver(Protocol):
    """The receiver of the innermost layer's notes about attempts; no method may raise or wait."""

    @property
    def wants_records(self) -> bool:
        """Return whether records are wanted; otherwise none are made."""
        ...

    def attempt_started(self, kind: AttemptKind) -> None:
        """Note that a request is being handed to the transport."""
        ...

    def attempt_ended(self, record: AttemptRecord) -> None:
        """Note that an attempt has ended, in whichever way."""
        ...
