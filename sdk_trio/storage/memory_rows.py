"""The rows of the inbox in memory and what is looked up in them, without I/O."""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import msgspec

from .records import UNFINISHED, AttemptRecord, DeliveryRecord, DeliveryState


class Row(msgspec.Struct, eq=False):
    """A delivery, who holds its lease and until when, and its failed runs.

    It changes in place: records are made for those who read, not for every step of a delivery.
    """

    sequence: int
    webhook_id: str
    type: str
    state: DeliveryState
    queued: bool
    attempts: int
    received_at: float
    timestamp: int
    subject: str | None
    ordered: bool
    started_at: float | None
    raw: bytes | None
    tenant_id: str | None
    next_attempt_at: float | None = None
    finished_at: float | None = None
    last_error: str | None = None
    owner: str | None = None
    until: float = 0.0
    failures: tuple[AttemptRecord, ...] = ()

    def record(self, *, body: bool = True) -> DeliveryRecord:
        """Return the delivery as it is now, with or without its body."""
        return DeliveryRecord(
            sequence=self.sequence,
            webhook_id=self.webhook_id,
            type=self.type,
            state=self.state,
            queued=self.queued,
            attempts=self.attempts,
            received_at=self.received_at,
            timestamp=self.timestamp,
            subject=self.subject,
            ordered=self.ordered,
            next_attempt_at=self.next_attempt_at,
            started_at=self.started_at,
            finished_at=self.finished_at,
            last_error=self.last_error,
            raw=self.raw if body else None,
            tenant_id=self.tenant_id,
        )


@attrs.define(eq=False)
class Deliveries:
    """The rows of one store; inboxes of several owners may work on the same ones."""

    last_sequence: int = 0
    changes: int = 0
    by_id: dict[str, Row] = attrs.Factory(dict)
    by_sequence: dict[int, Row] = attrs.Factory(dict)
    unfinished: dict[int, Row] = attrs.Factory(dict)
    parked: dict[int, Row] = attrs.Factory(dict)
    checkpoints: dict[str, str] = attrs.Factory(dict)
    states: Counter[DeliveryState] = attrs.Factory(Counter)
    # Sequences of the unfinished ordered deliveries of each subject.
    _lines: dict[str, set[int]] = attrs.Factory(dict)
    # Done deliveries in the order of their end: those that still have a body, and all.
    _with_body: deque[Row] = attrs.Factory(deque)
    _done: deque[Row] = attrs.Factory(deque)

    def add(self, row: Row) -> None:
        """Take in a new row."""
        self.by_id[row.webhook_id] = row
        self.by_sequence[row.sequence] = row
        self._enlist(row)
        self.changes += 1

    def change(self, row: Row, state: DeliveryState, **values: Any) -> None:
        """Give ``row`` its new state, and what else changes with it, by the names of its fields."""
        before = row.state
        self.changes += 1
        self._strike(row)
        row.state = state
        for name, value in values.items():
            setattr(row, name, value)
        self._enlist(row)
        if state is DeliveryState.DONE and before is not DeliveryState.DONE:
            self._with_body.append(row)
            self._done.append(row)

    def finish(self, row: Row, now: float) -> None:
        """Let an unfinished ``row`` be done: what :meth:`change` would do, for every delivery."""
        self.changes += 1
        self._strike(row)
        row.state = DeliveryState.DONE
        row.finished_at = now
        row.next_attempt_at = row.owner = None
        row.until = 0.0
        self.states[DeliveryState.DONE] += 1
        self._with_body.append(row)
        self._done.append(row)

    def forget(self, row: Row) -> None:
        """Remove ``row``."""
        del self.by_id[row.webhook_id]
        del self.by_sequence[row.sequence]
        self._strike(row)
        self.changes += 1
        # Both queues are in the same order, so what was forgotten does not pile up in either.
        for waiting in (self._with_body, self._done):
            while waiting and not self._holds(waiting[0]):
                waiting.popleft()

    def is_first_in_line(self, row: Row) -> bool:
        """Return whether no earlier unfinished ordered delivery has the same subject."""
        if not row.ordered or row.subject is None:
            return True
        return min(self._lines[row.subject]) == row.sequence

    def matching(
        self,
        equal: Mapping[str, object],
        *,
        received: tuple[float | None, float | None],
        between: tuple[int | None, int | None],
        oldest_first: bool,
    ) -> Iterator[Row]:
        """Return the rows that meet every condition which is not None.

        Args:
            equal: what fields are to hold, by their names.
            received: received at or after the first, and before the second.
            between: whose sequence is above the first and below the second.
            oldest_first: by rising sequence, else by falling.
        """
        wanted = [(name, value) for name, value in equal.items() if value is not None]
        since, until = received
        after, before = between
        return (
            row
            for row in (
                self.by_sequence.values() if oldest_first else reversed(self.by_sequence.values())
            )
            if (since is None or row.received_at >= since)
            and row.received_at < (math.inf if until is None else until)
            and row.sequence > (after or 0)
            and row.sequence < (math.inf if before is None else before)
            and all(getattr(row, name) == value for name, value in wanted)
        )

    def oldest_waiting(self) -> float | None:
        """Return when the first queued delivery that waits or runs arrived, or None."""
        waiting = (
            (row.sequence, row.received_at)
            for row in self.unfinished.values()
            if row.queued and row.state is not DeliveryState.RETRYING
        )
        return min(waiting, default=(0, None))[1]

    def done_before(self, before: float) -> list[Row]:
        """Take off and return the deliveries that were done before that time."""
        return self._take(self._done, before)

    def done_with_body_before(self, before: float) -> list[Row]:
        """Take off and return those of them whose bodies have not been taken off yet."""
        return self._take(self._with_body, before)

    def _take(self, waiting: deque[Row], before: float) -> list[Row]:
        taken = []
        while waiting and (waiting[0].finished_at or 0.0) < before:
            row = waiting.popleft()
            if self._holds(row):
                taken.append(row)
        return taken

    def _holds(self, row: Row) -> bool:
        return self.by_sequence.get(row.sequence) is row

    def _enlist(self, row: Row) -> None:
        state = row.state
        self.states[state] += 1
        if state is DeliveryState.PARKED:
            self.parked[row.sequence] = row
        elif state in UNFINISHED:
            self.unfinished[row.sequence] = row
            if row.ordered and row.subject is not None:
                self._lines.setdefault(row.subject, set()).add(row.sequence)

    def _strike(self, row: Row) -> None:
        state = row.state
        self.states[state] -= 1
        if state is DeliveryState.PARKED:
            del self.parked[row.sequence]
        elif state in UNFINISHED:
            del self.unfinished[row.sequence]
            if row.ordered and row.subject is not None:
                line = self._lines[row.subject]
                line.discard(row.sequence)
                if not line:
                    del self._lines[row.subject]
