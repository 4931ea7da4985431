"""The rows of the inbox in memory and what is looked up in them, without I/O."""

from collections import Counter, deque

import attrs

from .records import UNFINISHED, AttemptRecord, DeliveryRecord, DeliveryState


@attrs.define(eq=False)
class Row:
    """A delivery, who holds its lease and until when, and its failed runs."""

    record: DeliveryRecord
    owner: str | None = None
    until: float = 0.0
    failures: list[AttemptRecord] = attrs.Factory(list)


def done_at(record: DeliveryRecord, now: float) -> DeliveryRecord:
    """Return ``record`` as it is once its run has finished at ``now``."""
    return DeliveryRecord(
        record.sequence,
        record.webhook_id,
        record.type,
        DeliveryState.DONE,
        record.queued,
        record.attempts,
        record.received_at,
        record.timestamp,
        record.subject,
        record.ordered,
        None,  # next_attempt_at
        record.started_at,
        now,
        record.last_error,
        record.raw,
        record.tenant_id,
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
        self.by_id[row.record.webhook_id] = row
        self.by_sequence[row.record.sequence] = row
        self._enlist(row)
        self.changes += 1

    def change(self, row: Row, record: DeliveryRecord) -> None:
        """Give ``row`` another record of the same delivery."""
        before = row.record.state
        self.changes += 1
        self._strike(row)
        row.record = record
        self._enlist(row)
        if record.state is DeliveryState.DONE and before is not DeliveryState.DONE:
            self._with_body.append(row)
            self._done.append(row)

    def forget(self, row: Row) -> None:
        """Remove ``row``."""
        del self.by_id[row.record.webhook_id]
        del self.by_sequence[row.record.sequence]
        self._strike(row)
        self.changes += 1
        # Both queues are in the same order, so what was forgotten does not pile up in either.
        for waiting in (self._with_body, self._done):
            while waiting and not self._holds(waiting[0]):
                waiting.popleft()

    def is_first_in_line(self, record: DeliveryRecord) -> bool:
        """Return whether no earlier unfinished ordered delivery has the same subject."""
        if not record.ordered or record.subject is None:
            return True
        return min(self._lines[record.subject]) == record.sequence

    def oldest_waiting(self) -> float | None:
        """Return when the first queued delivery that waits or runs arrived, or None."""
        waiting = (
            (row.record.sequence, row.record.received_at)
            for row in self.unfinished.values()
            if row.record.queued and row.record.state is not DeliveryState.RETRYING
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
        while waiting and (waiting[0].record.finished_at or 0.0) < before:
            row = waiting.popleft()
            if self._holds(row):
                taken.append(row)
        return taken

    def _holds(self, row: Row) -> bool:
        return self.by_sequence.get(row.record.sequence) is row

    def _enlist(self, row: Row) -> None:
        record = row.record
        self.states[record.state] += 1
        if record.state is DeliveryState.PARKED:
            self.parked[record.sequence] = row
        if record.state in UNFINISHED:
            self.unfinished[record.sequence] = row
            if record.ordered and record.subject is not None:
                self._lines.setdefault(record.subject, set()).add(record.sequence)

    def _strike(self, row: Row) -> None:
        record = row.record
        self.states[record.state] -= 1
        self.parked.pop(record.sequence, None)
        self.unfinished.pop(record.sequence, None)
        line = self._lines.get(record.subject) if record.subject is not None else None
        if line is not None:
            line.discard(record.sequence)
            if not line and record.subject is not None:
                del self._lines[record.subject]
