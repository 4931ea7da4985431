"""The rows of the inbox in memory and their indexes, without I/O.

The size is bounded. A done delivery loses its body at once and shrinks to its id later. When
the others take too much, those that wait for a person or a redelivery are dropped.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import attrs
import msgspec

from ...base.throttle import TokenBucket
from ...records.deliveries import (
    MOST_EVIDENCE,
    REPLAYABLE,
    SOURCE_MARK,
    UNFINISHED,
    AttemptRecord,
    DeliveryRecord,
    DeliveryState,
    EvidenceRecord,
    Lease,
    signer_of,
)
from ...records.policies import PAUSED, EventPause

#: Done deliveries that are kept as rows without their bodies, so that people can list them.
RECENT_ROWS = 1000

#: Further done deliveries whose ids are remembered, at up to 200 bytes each. Without a bound they
#: would grow for the whole dedup retention, a week by default.
REMEMBERED_IDS = 500_000

#: Memory for deliveries that are not done, bodies included, in bytes.
MOST_BYTES = 256 * 1024 * 1024

#: Memory for other bodies that came under known keys, in bytes; further ones are not kept.
EVIDENCE_BYTES = 16 * 1024 * 1024

#: Approximate memory of a row without its body, in bytes.
ROW_BYTES = 1000

#: Keys with more characters are remembered by their digest: a sender chooses the length of an id.
_LONGEST_KEY = 64


class MemoryRow(msgspec.Struct, eq=False):
    """A delivery with its lease and its failed runs.

    It changes in place; an immutable record is made only for a reader, and not for every step of a
    delivery. ``tenant_id`` is that of the tenant, or the signer of a source's delivery.
    """

    sequence: int
    key: str
    signer: str
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
    # Its share of MOST_BYTES until it is done.
    used_bytes: int
    next_attempt_at: float | None = None
    finished_at: float | None = None
    last_error: str | None = None
    owner: str | None = None
    until: float = 0.0
    # That of the lease; 0 without one.
    token: int = 0
    failures: tuple[AttemptRecord, ...] = ()
    process_ends: int = 0
    ran_alone: bool = False
    earlier_attempts: int = 0
    failed_at: float | None = None
    # Hash of a body that is no longer stored: a redelivery with other bytes is still noticed.
    body_hash: int | None = None
    evidence: tuple[EvidenceRecord, ...] = ()
    # The group under whose limits it is leased, or by whose pause it waits.
    held_group: str | None = None

    @property
    def lease(self) -> Lease | None:
        """Its lease; None also for the run of a dead owner, which has a successor and no token."""
        return Lease(self.key, self.token) if self.token else None

    def has_body(self, raw: bytes) -> bool:
        """Return whether ``raw`` is its body, by its hash where the body is gone."""
        return hash(raw) == self.body_hash if self.raw is None else raw == self.raw

    def record(self, *, body: bool = True) -> DeliveryRecord:
        """Return the delivery as it is now, with or without its body."""
        values = {name: getattr(self, name) for name in _RECORDED}
        if self.signer.startswith(SOURCE_MARK):
            values["tenant_id"] = None
        return DeliveryRecord(**values, raw=self.raw if body else None)


#: The fields of a record that a row has, too. ``generation`` is always 0: a done delivery has no
#: body here, and is never put back.
_RECORDED = frozenset(
    field.name for field in attrs.fields(DeliveryRecord) if field.name not in ("raw", "generation")
)


def _short(key: str) -> str | bytes:
    if len(key) <= _LONGEST_KEY and key.isascii():
        return key
    encoded = key.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=16).digest()


@attrs.define(eq=False)
class Deliveries:
    """The rows of one store; inboxes of several owners may work on the same ones.

    A done delivery loses its body at once, and its row when :data:`RECENT_ROWS` others are done.
    Then only its key is remembered, until the dedup retention ends or :data:`REMEMBERED_IDS` others
    have followed. Each of these steps takes constant time, so none of them holds up the event loop.
    """

    last_sequence: int = 0
    last_token: int = 0
    changes: int = 0
    by_key: dict[str, MemoryRow] = attrs.Factory(dict)
    by_sequence: dict[int, MemoryRow] = attrs.Factory(dict)
    unfinished: dict[int, MemoryRow] = attrs.Factory(dict)
    # Rows that wait for a person or for a redelivery, the longest first.
    set_aside: dict[int, MemoryRow] = attrs.Factory(dict)
    used_bytes: int = 0
    #: Whether ids or waiting deliveries were forgotten because of the bounds.
    overflowed: bool = False
    checkpoints: dict[str, str] = attrs.Factory(dict)
    states: Counter[DeliveryState] = attrs.Factory(Counter)
    #: Until when the last request for work counts.
    wanted_until: float = 0.0
    pauses: list[EventPause] = attrs.Factory(list)
    #: The token buckets of the groups that have a rate.
    buckets: dict[str, TokenBucket] = attrs.Factory(dict)
    evidence_bytes: int = 0
    # Sequences of the unfinished ordered deliveries of each tenant and subject.
    _lanes: dict[tuple[str | None, str], set[int]] = attrs.Factory(dict)
    # Done deliveries in the order of their end: the last ones as rows, the older ones as a key with
    # the time of the end.
    _done: deque[MemoryRow] = attrs.Factory(deque)
    remembered: dict[str | bytes, float] = attrs.Factory(dict)
    _remembered_order: deque[str | bytes] = attrs.Factory(deque)
    # The tenants of those remembered keys that have one.
    _tenants: dict[str | bytes, str] = attrs.Factory(dict)

    def add(self, row: MemoryRow) -> None:
        """Add a new row."""
        self.by_key[row.key] = row
        self.by_sequence[row.sequence] = row
        self.used_bytes += row.used_bytes
        self._add_to_indexes(row)
        self.changes += 1

    def reserve(self, wanted: int) -> bool:
        """Return whether so many bytes are free; drop rows that are set aside, to free them."""
        # The oldest is dropped first. A delivery in progress is never dropped: its sender has been
        # answered.
        while self.used_bytes + wanted > MOST_BYTES and self.set_aside:
            self.forget(next(iter(self.set_aside.values())))
            self.overflowed = True
        return self.used_bytes + wanted <= MOST_BYTES

    def change(self, row: MemoryRow, state: DeliveryState, **values: Any) -> None:
        """Set the state of ``row``, and other fields by name; :meth:`finish` makes it done."""
        self.changes += 1
        self._remove_from_indexes(row)
        row.state = state
        for name, value in values.items():
            setattr(row, name, value)
        self._add_to_indexes(row)

    def finish(self, row: MemoryRow, now: float) -> None:
        """Mark an unfinished ``row`` as done, and drop its body."""
        self.changes += 1
        self._remove_from_indexes(row)
        self.used_bytes -= row.used_bytes
        row.used_bytes = 0
        row.state = DeliveryState.DONE
        row.finished_at = now
        if row.attempts < 2:
            row.last_error = None  # the reason why it had waited, such as a paused route
        # Enough to see that a redelivery has another body, without keeping the first one.
        row.body_hash = hash(row.raw)
        row.raw = row.next_attempt_at = row.owner = None
        row.until, row.token = 0.0, 0
        self.states[DeliveryState.DONE] += 1
        self._done.append(row)
        if len(self._done) > RECENT_ROWS:
            self._remember(self._done.popleft())

    def _remember(self, row: MemoryRow) -> None:
        """Replace the row of a done delivery by its key and the time of its end."""
        self._drop(row)
        key = _short(row.key)
        self.remembered[key] = row.finished_at or 0.0
        self._remembered_order.append(key)
        if row.tenant_id is not None:
            self._tenants[key] = row.tenant_id
        if len(self._remembered_order) > REMEMBERED_IDS:
            self._forget_oldest_id()
            self.overflowed = True

    def _forget_oldest_id(self) -> None:
        key = self._remembered_order.popleft()
        del self.remembered[key]
        self._tenants.pop(key, None)
        self.states[DeliveryState.DONE] -= 1

    def finished_at(self, key: str) -> float | None:
        """Return the end time of a delivery whose key alone is remembered, or None."""
        return self.remembered.get(_short(key))

    def add_evidence(self, row: MemoryRow, other: EvidenceRecord) -> None:
        """Store another body of a row, within the bounds, unless it is stored already."""
        size = len(other.raw) + ROW_BYTES
        if len(row.evidence) >= MOST_EVIDENCE or self.evidence_bytes + size > EVIDENCE_BYTES:
            return
        if all(other.raw != kept.raw for kept in row.evidence):
            row.evidence = (*row.evidence, other)
            self.evidence_bytes += size
            self.changes += 1

    def _drop(self, row: MemoryRow) -> None:
        del self.by_key[row.key]
        del self.by_sequence[row.sequence]
        for kept in row.evidence:
            self.evidence_bytes -= len(kept.raw) + ROW_BYTES

    def forget(self, row: MemoryRow) -> None:
        """Remove ``row``, which is not done."""
        self._drop(row)
        self.used_bytes -= row.used_bytes
        self._remove_from_indexes(row)
        self.changes += 1

    def erase(self, tenant_id: str) -> int:
        """Forget all deliveries and checkpoints of a tenant; return the number of deliveries."""
        for name in [name for name in self.checkpoints if name.endswith(f".{tenant_id}")]:
            del self.checkpoints[name]
        rows = [row for row in self.by_sequence.values() if row.tenant_id == tenant_id]
        for row in rows:
            if row.state is not DeliveryState.DONE:
                self.forget(row)
                continue
            self._done.remove(row)
            self._drop(row)
            self.states[DeliveryState.DONE] -= 1
        for row in self.by_sequence.values():
            gone = [kept for kept in row.evidence if kept.tenant_id == tenant_id]
            row.evidence = tuple(kept for kept in row.evidence if kept not in gone)
            self.evidence_bytes -= sum(len(kept.raw) + ROW_BYTES for kept in gone)
        return len(rows) + self._forget_remembered(tenant_id)

    def _forget_remembered(self, tenant_id: str) -> int:
        keys = {key for key, tenant in self._tenants.items() if tenant == tenant_id}
        if keys:
            self._remembered_order = deque(key for key in self._remembered_order if key not in keys)
            for key in sorted(keys):
                del self.remembered[key], self._tenants[key]
            self.states[DeliveryState.DONE] -= len(keys)
        return len(keys)

    def forget_done(self, before: float) -> int:
        """Forget the deliveries that were done before that time; return their number."""
        forgotten = 0
        while self._remembered_order and self.remembered[self._remembered_order[0]] < before:
            self._forget_oldest_id()
            forgotten += 1
        while self._done and (self._done[0].finished_at or 0.0) < before:
            row = self._done.popleft()
            self._drop(row)
            self.states[DeliveryState.DONE] -= 1
            forgotten += 1
        return forgotten

    def may_run(self, row: MemoryRow) -> bool:
        """Return whether ``row`` is the first of its lane, and no later row of the lane is leased.

        A later row may be leased: its lease began before this row was put back. That does not
        matter for a row that has a lease itself, such as one that has expired.
        """
        if not row.ordered or row.subject is None:
            return True
        lane = self._lanes[row.tenant_id, row.subject]
        if min(lane) != row.sequence:
            return False
        return row.owner is not None or not any(
            self.unfinished[other].queued and self.unfinished[other].owner is not None
            for other in lane
        )

    def lane_after(self, row: MemoryRow) -> list[MemoryRow]:
        """Return the later unfinished rows of the lane of ``row``, oldest first."""
        if not row.ordered or row.subject is None:
            return []
        lane = self._lanes[row.tenant_id, row.subject]
        return [self.unfinished[number] for number in sorted(lane) if number > row.sequence]

    # -- reading ---------------------------------------------------------------------------------

    def get(self, key: str) -> DeliveryRecord | None:
        """Return one delivery, or None."""
        row = self.by_key.get(key)
        return None if row is None else row.record()

    def find_by_id(self, webhook_id: str, *, limit: int = 50) -> Sequence[DeliveryRecord]:
        """Return the deliveries with this id of all signers, the host's first."""
        found = [row for row in self.by_sequence.values() if row.webhook_id == webhook_id]
        return [row.record() for row in sorted(found, key=lambda row: row.key)[:limit]]

    def evidence(self, key: str) -> Sequence[EvidenceRecord]:
        """Return the other bodies that came under a key, oldest first."""
        row = self.by_key.get(key)
        return () if row is None else row.evidence

    def known(self, keys: Sequence[str]) -> frozenset[str]:
        """Return those of ``keys`` that are in any state or remembered."""
        return frozenset(i for i in keys if i in self.by_key or self.finished_at(i) is not None)

    def attempts(self, key: str) -> Sequence[AttemptRecord]:
        """Return the failed runs of one delivery, oldest first."""
        row = self.by_key.get(key)
        return () if row is None else row.failures

    def find(
        self,
        /,
        *,
        since: float | None = None,
        until: float | None = None,
        after_sequence: int | None = None,
        before_sequence: int | None = None,
        oldest_first: bool | None = None,
        limit: int = 50,
        source: str | None = None,
        **equal: Any,
    ) -> Sequence[DeliveryRecord]:
        """List deliveries; see :meth:`Inbox.find`. ``equal`` are wanted values of fields."""
        if oldest_first is None:
            oldest_first = after_sequence is not None
        rows = self.by_sequence.values() if oldest_first else reversed(self.by_sequence.values())
        if source is not None:
            if equal.get("tenant_id") is not None:
                return []
            equal["tenant_id"] = signer_of(source)
        wanted = [(name, value) for name, value in equal.items() if value is not None]
        matching = (
            row.record(body=False)
            for row in rows
            if (since is None or row.received_at >= since)
            and (until is None or row.received_at < until)
            and (after_sequence is None or row.sequence > after_sequence)
            and (before_sequence is None or row.sequence < before_sequence)
            and all(getattr(row, name) == value for name, value in wanted)
        )
        return list(islice(matching, limit))

    def counts(self) -> dict[DeliveryState, int]:
        """Return how many deliveries are in each state."""
        return {state: self.states[state] for state in DeliveryState}

    def oldest_waiting(self) -> float | None:
        """Return the arrival time of the oldest queued delivery that waits or runs, or None."""
        waiting = (
            (row.sequence, row.received_at)
            for row in self.unfinished.values()
            if row.queued and row.state is not DeliveryState.RETRYING
            if row.owner is not None or not (row.held_group or "").startswith(PAUSED)
        )
        return min(waiting, default=(0, None))[1]

    def expired_leases(self, *, before: float) -> int:
        """Return how many queued deliveries have a lease that expired before that time."""
        return sum(
            row.queued and row.owner is not None and row.until <= before
            for row in self.unfinished.values()
        )

    def read_checkpoint(self, name: str) -> str | None:
        """Return the value under ``name``, or None."""
        return self.checkpoints.get(name)

    def write_checkpoint(
        self, name: str, value: str | None, *, term: int | None = None, once: bool = False
    ) -> None:
        """Keep ``value`` under ``name``; None forgets it. No other owner leads, in any ``term``."""
        if value is None:
            self.checkpoints.pop(name, None)
        elif not once or name not in self.checkpoints:
            self.checkpoints[name] = value

    # -- indexes ---------------------------------------------------------------------------------

    def _add_to_indexes(self, row: MemoryRow) -> None:
        state = row.state
        self.states[state] += 1
        if state in REPLAYABLE and _is_set_aside(row):
            self.set_aside[row.sequence] = row
        if state in UNFINISHED:
            self.unfinished[row.sequence] = row
            if row.ordered and row.subject is not None:
                self._lanes.setdefault((row.tenant_id, row.subject), set()).add(row.sequence)

    def _remove_from_indexes(self, row: MemoryRow) -> None:
        state = row.state
        self.states[state] -= 1
        if row.sequence in self.set_aside:
            del self.set_aside[row.sequence]
        if state in UNFINISHED:
            del self.unfinished[row.sequence]
            if row.ordered and row.subject is not None:
                lane = self._lanes[row.tenant_id, row.subject]
                lane.discard(row.sequence)
                if not lane:
                    del self._lanes[row.tenant_id, row.subject]


def _is_set_aside(row: MemoryRow) -> bool:
    """Return whether no worker will run it: it waits for a person, or for a redelivery."""
    return row.state is not DeliveryState.RETRYING or not row.queued
