"""The inbox in this process's memory.

Nothing survives the process, and the size is bounded. A done delivery loses its body at once and
shrinks to its id later, see :class:`Deliveries`. When deliveries that are not done take too much,
the oldest dead, parked and failed inline ones are dropped, and then new ones are refused. The first
time, a warning is logged.

Cancellation: a method that changes deliveries is one checkpoint of Trio, *before* it reads or
changes anything, so a cancelled call has changed nothing. Queries may have several. ``finish`` of
an inline run is not a checkpoint, and ``claim`` lets no other task run: such a run is part of a
request, which has its own checkpoints, and a further one would cost as much as all the work of this
store. ``close`` closes first, and is a checkpoint after it.

No other process has leases here, so ``take_expired_until`` changes no admission.
"""

import math
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import cached_property, wraps
from itertools import islice
from sys import intern
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import trio

from ...base import clock
from ...base.logs import get_logger
from ...base.telemetry import Sample
from ...base.text import storable
from ...errors import NotSupportedError, StoreUnavailableError
from ...events.coalescing import SUPERSEDED
from ...records.deliveries import (
    PROCESS_ENDED,
    REPLAYABLE,
    SOURCE_MARK,
    Admission,
    Admitted,
    AttemptRecord,
    Dead,
    DeliveryState,
    Done,
    Due,
    EvidenceRecord,
    Lease,
    NewDelivery,
    Outcome,
    Parked,
    Postponed,
    Purged,
    Released,
    Renewed,
    Retry,
)
from ...records.policies import NO_LIMITS, ClaimLimits
from ..admission import (
    ACCEPTING,
    CLAIMING,
    CLOCK_SLACK_SECONDS,
    PARKING,
    AdmissionRule,
    Change,
    ExistingState,
    Known,
    LeaseTerms,
    Readmission,
    existing_state,
    readmit,
)
from ..effects import Effects, T
from . import policies
from .policies import Allowance
from .rows import MOST_BYTES, REMEMBERED_IDS, ROW_BYTES, Deliveries, MemoryRow

if TYPE_CHECKING:
    from ..sql.notifications import NotificationStore
    from ..sql.tenants import TenantStore
    from .tables import MemoryAlerts, MemoryTables, MemoryUpgrade

P = ParamSpec("P")

_NEW = Admitted(Admission.NEW)
_DONE = Admitted(Admission.DONE)
_WELL = Done()

_log = get_logger("storage")


def _on_rows(
    query: Callable[Concatenate[Deliveries, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the method that runs ``query`` on the rows."""

    @wraps(query)
    async def method(self: "MemoryInbox", /, *args: P.args, **kwargs: P.kwargs) -> T:
        await self._begin()
        given: Any = storable([args, kwargs])  # as the other stores hold it
        return query(self._rows, *given[0], **given[1])

    return method


class MemoryInbox:
    """:class:`Store` in memory.

    Args:
        terms: the owner and the periods.
        shares: another inbox on whose deliveries this one works, as a second process on the same
            file would; for tests.
    """

    #: See :attr:`Inbox.in_order`: sequences are given and seen in one step.
    in_order = True
    #: Memory has no files that could be lost, and does not fail.
    lost: str | None = None
    failing = False

    def __init__(self, terms: LeaseTerms, *, shares: "MemoryInbox | None" = None) -> None:
        self._terms = terms
        self._shares = shares
        self._rows: Deliveries = Deliveries() if shares is None else shares._rows
        self._own_changes = 0
        self._foreign_changes = self._rows.changes
        self._closed = False
        self._warned = False

    # Made on first use: most receivers have no tenants, and start without SQLite.

    @cached_property
    def _tables(self) -> "MemoryTables":
        from .tables import MemoryTables

        return MemoryTables() if self._shares is None else self._shares._tables

    @cached_property
    def tenants(self) -> "TenantStore":
        """The tenants."""
        from ..sql.tenants import TenantStore

        return TenantStore(self._terms, self._tables, self._tables)

    @cached_property
    def upgrade(self) -> "MemoryUpgrade":
        """The upgrade from a single tenant."""
        from .tables import MemoryUpgrade

        return MemoryUpgrade(self._terms, self._tables, self._rows)

    @cached_property
    def notifications(self) -> "NotificationStore":
        """The messages to site managers."""
        from ..sql.notifications import NotificationStore

        return NotificationStore(self._terms, self._tables, self._tables)

    @cached_property
    def alerts(self) -> "MemoryAlerts":
        """The alerts."""
        from .tables import MemoryAlerts

        return MemoryAlerts(self._terms, self._tables, self._rows)

    async def _begin(self) -> None:
        await trio.lowlevel.checkpoint()
        self._require_open()

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("the store is closed")

    def samples(self) -> Sequence[Sample]:
        """See :meth:`Inbox.samples`: memory has no connections and no commits to measure."""
        return ()

    async def clock_offset(self) -> float | None:
        """See :meth:`Inbox.clock_offset`: the host's clock is the only one."""
        await trio.lowlevel.checkpoint()
        return None

    def writing_process(self) -> int | None:
        """See :meth:`Inbox.writing_process`: no other process writes."""
        return None

    # -- deliveries ------------------------------------------------------------------------------

    async def accept(
        self, delivery: NewDelivery, *, leased: bool, take_expired_until: float = math.inf
    ) -> Admitted:
        await self._begin()
        leased = leased and not delivery.ordered
        return self._admit(delivery, ACCEPTING, DeliveryState.RECEIVED, leased)

    async def claim(
        self,
        delivery: NewDelivery,
        *,
        take_expired_until: float = math.inf,
        token: int | None = None,
    ) -> Admitted:
        # Not a whole checkpoint: the request around this run has one already.
        await trio.lowlevel.checkpoint_if_cancelled()
        self._require_open()
        return self._admit(delivery, CLAIMING, DeliveryState.RUNNING, True)

    def claim_unawaited(self, delivery: NewDelivery) -> Lease | None:
        """See :meth:`Inbox.claim_unawaited`; here :meth:`claim` waits for nothing, either."""
        return None

    async def park(
        self,
        delivery: NewDelivery,
        reason: str | None = None,
        *,
        take_expired_until: float = math.inf,
    ) -> Admitted:
        await self._begin()
        admitted = self._admit(delivery, PARKING, DeliveryState.PARKED, False)
        if admitted.admission is Admission.NEW and reason is not None:
            self._rows.by_key[delivery.key].last_error = storable(reason)
        return admitted

    def _admit(
        self,
        delivery: NewDelivery,
        rules: Mapping[ExistingState, AdmissionRule],
        state: DeliveryState,
        leased: bool,
    ) -> Admitted:
        now = delivery.received_at
        self._rows.forget_done(now - self._terms.dedup_seconds)
        key = delivery.key if delivery.signer else delivery.webhook_id
        row = self._rows.by_key.get(key)
        if row is None:
            # Check `remembered` first: it avoids hashing the key.
            if self._rows.remembered and self._rows.finished_at(key) is not None:
                return _DONE
            lease = self._insert(delivery, key, state, leased)
            return _NEW if lease is None else Admitted(Admission.NEW, lease=lease)
        return self._admit_known(row, delivery, rules, state, leased)

    def _admit_known(
        self,
        row: MemoryRow,
        delivery: NewDelivery,
        rules: Mapping[ExistingState, AdmissionRule],
        state: DeliveryState,
        leased: bool,
    ) -> Admitted:
        known = self._known(row, delivery.received_at)
        # Rows older than the dedup retention are already forgotten, so nothing is ever replaced.
        existing = existing_state(known, now=delivery.received_at, dedup_seconds=math.inf)
        rule = rules[existing]
        same_body = row.has_body(delivery.raw)
        if not same_body:
            self._add_evidence(row, delivery)
        if rule.change is Change.NOTHING:
            return Admitted(rule.admission, known.attempts, same_body)
        again = readmit(
            rule.change, state, attempts=known.attempts, earlier_attempts=row.earlier_attempts
        )
        leased = leased and rule.change is not Change.QUEUE
        self._readmit(row, delivery, again, leased)
        lease = row.lease if leased else None
        return Admitted(
            rule.admission, again.attempts, same_body, again.earlier_attempts, lease=lease
        )

    def _known(self, row: MemoryRow, now: float) -> Known:
        attempts = row.attempts
        if row.state is DeliveryState.RUNNING and not row.queued:
            # An inline run of this owner that is claimed again was never begun, or its end could
            # not be recorded: it does not count.
            attempts -= row.owner == self._terms.owner
        until = self._foreign_lease_until(row, now)
        return Known(row.state, row.queued, attempts, row.finished_at, until, row.process_ends)

    def _readmit(
        self, row: MemoryRow, delivery: NewDelivery, again: Readmission, leased: bool
    ) -> None:
        """Put a known delivery back to an unfinished state."""
        now = delivery.received_at
        running = again.state is DeliveryState.RUNNING
        self._write(
            row,
            again.state,
            lease_from=now if leased else None,
            queued=again.state is DeliveryState.RECEIVED,
            attempts=again.attempts + running,
            earlier_attempts=again.earlier_attempts,
            process_ends=0 if again.restarts else row.process_ends,
            ran_alone=False,
            ordered=delivery.ordered,
            next_attempt_at=None,
            started_at=now if running else None,
            finished_at=None,
            last_error=None if again.restarts else row.last_error,
        )

    def _foreign_lease_until(self, row: MemoryRow, now: float) -> float | None:
        if row.owner in (None, self._terms.owner):
            return None
        return self._terms.live(row.until, now=now)

    async def keep_other(self, delivery: NewDelivery) -> None:
        await self._begin()
        row = self._rows.by_key.get(delivery.key)
        if row is not None and not row.has_body(delivery.raw):
            self._add_evidence(row, delivery)

    def _add_evidence(self, row: MemoryRow, delivery: NewDelivery) -> None:
        other = EvidenceRecord(
            delivery.received_at, delivery.address, delivery.raw, delivery.tenant_id
        )
        before = self._rows.changes
        self._rows.add_evidence(row, other)
        self._own_changes += self._rows.changes - before

    def _insert(
        self, delivery: NewDelivery, key: str, state: DeliveryState, leased: bool
    ) -> Lease | None:
        running = state is DeliveryState.RUNNING
        now = delivery.received_at
        size = len(delivery.raw) + ROW_BYTES
        if self._rows.used_bytes + size > MOST_BYTES and not self._rows.reserve(size):
            raise StoreUnavailableError(
                f"the store in memory is full: {len(self._rows.unfinished)} unfinished events take "
                f"{MOST_BYTES // 2**20} MiB; wait until they are handled, or use Storage:Backend "
                "Sqlite"
            )
        self._rows.last_sequence += 1
        row = MemoryRow(
            self._rows.last_sequence,
            key,
            delivery.signer,
            delivery.webhook_id,
            intern(delivery.type),  # one string for each type instead of one for each row
            state,
            state is DeliveryState.RECEIVED,  # queued
            int(running),  # attempts
            now,
            delivery.timestamp,
            delivery.subject,
            delivery.ordered,
            now if running else None,  # started_at
            delivery.raw,
            delivery.tenant_or_signer if delivery.signer else delivery.tenant_id,
            size,
        )
        lease = None
        if leased:  # as `_lease`, without its call
            self._rows.last_token += 1
            lease = Lease(key, self._rows.last_token)
            row.token, row.owner = lease.token, self._terms.owner
            row.until = now + self._terms.lease_seconds
        self._rows.add(row)
        self._own_changes += 1
        if self._rows.overflowed and not self._warned:
            self._warned = True
            _log.warning(
                "store.memory_full",
                remembered_ids=REMEMBERED_IDS,
                held_bytes=MOST_BYTES,
                hint="the oldest finished ids, or dead and parked events, are forgotten for want "
                "of space; Storage:Backend Sqlite keeps them",
            )
        return lease

    def _lease(self, row: MemoryRow, now: float) -> None:
        self._rows.last_token += 1
        row.token = self._rows.last_token
        row.owner, row.until = self._terms.owner, now + self._terms.lease_seconds

    def _current(self, lease: Lease) -> MemoryRow | None:
        """Return the row of a lease, None if the lease is stale."""
        row = self._rows.by_key.get(lease.key)
        return None if row is None or row.token != lease.token else row

    def _write(
        self,
        row: MemoryRow,
        state: DeliveryState,
        *,
        lease_from: float | None = None,
        **values: Any,
    ) -> None:
        """Change ``row``, and give it a lease of ours from that time on; None: no lease."""
        if lease_from is None:
            row.owner, row.until, row.token = None, 0.0, 0
        else:
            self._lease(row, lease_from)
        self._rows.change(row, state, **values)
        self._own_changes += 1

    def _forget(self, row: MemoryRow) -> None:
        self._rows.forget(row)
        self._own_changes += 1

    # -- runs ------------------------------------------------------------------------------------

    async def start(self, lease: Lease, *, now: float, alone: bool = False) -> bool:
        await self._begin()
        return self._start(lease, now, alone)

    def start_unawaited(self, lease: Lease, *, now: float) -> None:
        self._start(lease, now, False)

    def end_unawaited(self, lease: Lease, *, now: float) -> bool:
        """See :meth:`Inbox.end_unawaited`; here :meth:`finish` waits for nothing, either."""
        return False

    async def join(self, lease: Lease) -> bool:
        await self._begin()
        row = self._current(lease)
        if row is not None:
            self._rows.change(row, row.state, ran_alone=False)
            self._own_changes += 1
        return row is not None

    def _start(self, lease: Lease, now: float, alone: bool) -> bool:
        row = self._current(lease)
        if row is None:
            return False
        counted = row.state is DeliveryState.RUNNING
        row.until = now + self._terms.lease_seconds
        self._rows.change(
            row,
            DeliveryState.RUNNING,
            attempts=row.attempts + (not counted),
            started_at=now,
            ran_alone=alone,
            next_attempt_at=None,
        )
        self._own_changes += 1
        return True

    async def finish(self, lease: Lease, outcome: Outcome, *, now: float) -> bool:
        by_key = self._rows.by_key
        row = by_key.get(lease.key)
        # An inline run is part of a request, which has its own checkpoints; a worker's run has only
        # this one.
        if row is None or row.queued:
            await trio.lowlevel.checkpoint()
            row = by_key.get(lease.key)
        self._require_open()
        if row is None or row.token != lease.token:
            return False
        if outcome != _WELL:
            outcome = storable(outcome)
        if not isinstance(outcome, Done):
            self._finish_unhandled(row, outcome, now)
            return True
        if outcome.answer is not None:
            self._add_attempt(row, "", outcome.answer, None, now)
        self._rows.finish(row, now)
        if outcome.reason is not None:
            row.last_error = outcome.reason
        self._own_changes += 1
        return True

    def _finish_unhandled(self, row: MemoryRow, outcome: Outcome, now: float) -> None:
        """Record an outcome other than success."""
        begun = row.state is DeliveryState.RUNNING
        given_back = {"attempts": row.attempts - begun, "started_at": None}
        values: dict[str, Any] = {"next_attempt_at": None}
        match outcome:
            case Retry(at, error):
                state = DeliveryState.RETRYING
                values = {"queued": at is not None, "next_attempt_at": at, "failed_at": now}
                values |= {"last_error": error}
                self._add_failure(row, outcome, now)
            case Dead(error):
                state = DeliveryState.DEAD
                values |= {"queued": False, "finished_at": now, "last_error": error}
                if not outcome.recorded:
                    self._add_failure(row, outcome, now)
            case Released():
                state = DeliveryState.RECEIVED
                values |= given_back
            case Postponed(at, reason):
                state = DeliveryState.RETRYING
                values = {"queued": True, "next_attempt_at": at, "failed_at": now, **given_back}
                values |= {"last_error": reason}
            case Parked(reason):
                state = DeliveryState.PARKED
                values |= {"queued": False, "last_error": reason or row.last_error}
        self._write(row, state, **values)

    def _add_failure(self, row: MemoryRow, outcome: Retry | Dead, now: float) -> None:
        place = outcome.answer or outcome.place
        self._add_attempt(row, outcome.error, place, outcome.traceback, now)

    def _add_attempt(
        self, row: MemoryRow, error: str, place: str | None, traceback: str | None, now: float
    ) -> None:
        begun = now if row.started_at is None else row.started_at
        added = AttemptRecord(max(row.attempts, 1), begun, now, error, place, traceback)
        row.failures = (*row.failures, added)

    async def conclude(self, lease: Lease, effects: Effects[T], *, attempt: int, now: float) -> T:
        """See :meth:`Inbox.conclude`; memory has no transactions that effects could share."""
        await self._begin()
        raise NotSupportedError(
            "effects and the event's end cannot be one transaction with Storage:Backend Memory: "
            "use Sqlite or Postgres, or first_time in a database of your own"
        )

    async def replay(self, keys: Sequence[str]) -> Sequence[str]:
        await self._begin()
        put_back = []
        for key in storable(keys):
            row = self._rows.by_key.get(key)
            if row is None or row.state not in REPLAYABLE or row.owner is not None:
                continue
            self._write(
                row,
                DeliveryState.RECEIVED,
                queued=True,
                earlier_attempts=row.earlier_attempts + row.attempts,
                attempts=0,
                process_ends=0,
                ran_alone=False,
                next_attempt_at=None,
                started_at=None,
                finished_at=None,
                last_error=None,
            )
            put_back.append(key)
        return put_back

    async def repeat(self, keys: Sequence[str]) -> Sequence[str]:
        """See :meth:`Inbox.repeat`; a done delivery has no body here, so none is put back."""
        await self._begin()
        return []

    # -- leases ----------------------------------------------------------------------------------

    async def release(self, leases: Collection[Lease]) -> int:
        await self._begin()
        released = 0
        for row in map(self._current, leases):
            if row is not None and row.state is not DeliveryState.RUNNING:
                self._write(row, row.state)
                released += 1
        return released

    async def claim_due(
        self,
        *,
        limit: int,
        now: float,
        take_expired_until: float = math.inf,
        limits: ClaimLimits | None = None,
    ) -> Due:
        await self._begin()
        rows = self._rows
        take_expired = clock.monotonic() <= take_expired_until
        allowance = Allowance(rows, limits or NO_LIMITS, now)
        due: list[MemoryRow] = []
        blocking: list[MemoryRow] = []
        next_due_at: float | None = None
        for sequence in sorted(rows.unfinished):
            row = rows.unfinished[sequence]
            if not row.queued:
                continue
            at = row.next_attempt_at
            if row.owner is None and at is not None and at > now:
                next_due_at = at if next_due_at is None else min(at, next_due_at)
            elif self._is_free(row, now, take_expired):
                if rows.may_run(row) and (len(due) >= limit or allowance.try_take(row)):
                    due.append(row)
                elif row.owner is not None:
                    blocking.append(row)
        for row in (*due[:limit], *blocking):
            if row.state is DeliveryState.RUNNING:
                self._cut_short(row, sole=False)
        for row in due[:limit]:
            self._write(row, row.state, lease_from=now)
        for row in blocking:
            self._write(row, row.state)
        records = [row.record() for row in due[:limit]]
        superseded = self._end_superseded(allowance, now)
        times = [at for at in (next_due_at, allowance.next_at) if at is not None]
        return Due(
            records,
            # After a superseded one, the next one of its lane may be due now.
            more=len(due) > limit or bool(blocking or superseded),
            next_due_at=min(times, default=None),
            limited=allowance.limited,
            superseded=superseded,
            leases=_leases_of(due[:limit]),
        )

    def _end_superseded(self, allowance: Allowance, now: float) -> list[tuple[str, str]]:
        for row, newer in allowance.superseded:
            self._rows.finish(row, now)
            row.last_error = f"{SUPERSEDED}{newer}"
            self._own_changes += 1
        return [(row.key, newer) for row, newer in allowance.superseded]

    def _is_free(self, row: MemoryRow, now: float, take_expired: bool) -> bool:
        if row.owner is None:
            return True
        return (
            take_expired
            and row.owner != self._terms.owner
            and self._foreign_lease_until(row, now) is None
        )

    async def claim_suspects(
        self, *, limit: int, now: float, limits: ClaimLimits | None = None
    ) -> Due:
        await self._begin()
        rows = self._rows
        allowance = Allowance(rows, limits or NO_LIMITS, now)
        suspects = [
            row
            for _, row in sorted(rows.unfinished.items())
            if row.process_ends and row.queued and row.owner in (None, self._terms.owner)
            if row.state is DeliveryState.RECEIVED and rows.may_run(row)
        ]
        # One after the other: none beyond `limit` takes a slot or a token.
        found = list(islice(filter(allowance.try_take, suspects), limit))
        for row in found:
            self._write(row, row.state, lease_from=now)
        records = [row.record() for row in found]
        superseded = self._end_superseded(allowance, now)
        return Due(records, False, None, superseded=superseded, leases=_leases_of(found))

    async def reschedule(self, *, now: float) -> int:
        await self._begin()
        late = [
            row
            for row in self._rows.unfinished.values()
            if row.next_attempt_at is not None
            if row.next_attempt_at > now and (row.failed_at or 0.0) > now + CLOCK_SLACK_SECONDS
        ]
        for row in late:
            self._rows.change(row, row.state, next_attempt_at=now, failed_at=now)
            self._own_changes += 1
        return len(late)

    def _cut_short(self, row: MemoryRow, *, sole: bool) -> None:
        """Put a run of another owner back to ``received``, because its process has ended."""
        begun = row.received_at if row.started_at is None else row.started_at
        # The last renewal of its lease is the last time at which that process was known to live.
        ended = max(begun, row.until - self._terms.lease_seconds)
        failure = AttemptRecord(row.attempts, begun, ended, PROCESS_ENDED)
        row.failures = (*row.failures, failure)
        self._write(
            row,
            DeliveryState.RECEIVED,
            queued=True,
            process_ends=row.process_ends + 1,
            ran_alone=row.ran_alone or sole,
            last_error=PROCESS_ENDED,
        )

    async def recover(self, *, dead: str | None = None) -> int:
        await self._begin()
        taken = [
            row
            for row in self._rows.unfinished.values()
            if row.owner is not None and row.owner != self._terms.owner
        ]
        for row in taken:
            if row.state is DeliveryState.RUNNING:
                self._cut_short(row, sole=len(taken) == 1)
            else:
                self._write(row, row.state)
        return len(taken)

    async def take_over(self, owner: str, *, successor: str, now: float) -> int:
        await self._begin()
        taken = [row for row in self._rows.unfinished.values() if row.owner == owner]
        # As in sql/leases.py: if it is stale, others may have expired.
        sole = len(taken) == 1 and taken[0].until >= now + self._terms.lease_seconds / 2
        for row in taken:
            if row.state is DeliveryState.RUNNING:
                self._cut_short(row, sole=sole)
            # A suspect that the dead owner had inherited and not run yet passes to its successor.
            if row.process_ends:
                until = now + self._terms.lease_seconds
                row.owner, row.until, row.token = successor, until, 0
            else:
                self._write(row, row.state)
        return len(taken)

    async def renew(self, leases: Collection[Lease], *, now: float) -> Renewed:
        held = {lease.key: lease.token for lease in leases}
        last = self._rows.last_token  # a call in progress may take a later one
        await self._begin()
        given_up = 0
        lost = set()
        for row in [*self._rows.unfinished.values()]:
            if row.owner is None:
                continue
            if row.owner != self._terms.owner:
                if row.key in held:
                    lost.add(row.key)
            elif row.token and held.get(row.key) == row.token:
                row.until = now + self._terms.lease_seconds
            elif row.token <= last:
                self._give_up(row)
                given_up += 1
        return Renewed(frozenset(lost), given_up)

    def _give_up(self, row: MemoryRow) -> None:
        """Give up the lease of a run that never began, or whose end could not be recorded."""
        if row.state is DeliveryState.RUNNING:
            values = {"attempts": row.attempts - 1, "started_at": None}
            self._write(row, DeliveryState.RECEIVED, **values)
        else:
            self._write(row, row.state)

    # -- reading ---------------------------------------------------------------------------------

    get = _on_rows(Deliveries.get)
    find_by_id = _on_rows(Deliveries.find_by_id)
    evidence = _on_rows(Deliveries.evidence)
    known = _on_rows(Deliveries.known)
    attempts = _on_rows(Deliveries.attempts)
    find = _on_rows(Deliveries.find)
    counts = _on_rows(Deliveries.counts)
    oldest_waiting = _on_rows(Deliveries.oldest_waiting)
    expired_leases = _on_rows(Deliveries.expired_leases)
    read_checkpoint = _on_rows(Deliveries.read_checkpoint)
    write_checkpoint = _on_rows(Deliveries.write_checkpoint)
    erase = _on_rows(Deliveries.erase)
    pauses = _on_rows(policies.pauses)
    pause = _on_rows(policies.pause)
    resume = _on_rows(policies.resume)

    async def ask_for_work(self, *, seconds: float, now: float) -> None:
        await self._begin()
        if any(
            row.owner not in (None, self._terms.owner) and row.queued
            for row in self._rows.unfinished.values()
            if row.state is not DeliveryState.RUNNING
        ):
            self._rows.wanted_until = now + seconds

    async def is_work_wanted(self, *, now: float) -> bool:
        await self._begin()
        return self._rows.wanted_until > now

    async def sync(self) -> None:
        """See :meth:`Inbox.sync`: nothing here survives the process."""
        await self._begin()

    async def last_sequence(self) -> int:
        await self._begin()
        return self._rows.last_sequence

    async def changed_elsewhere(self) -> bool:
        await self._begin()
        before = self._foreign_changes
        self._foreign_changes = self._rows.changes - self._own_changes
        return self._foreign_changes != before

    async def lead(self, *, seconds: float) -> int | None:
        """See :meth:`Inbox.lead`; this process is the only one."""
        await self._begin()
        return 1

    # -- retention and end -----------------------------------------------------------------------

    async def purge(self, *, now: float) -> Purged:
        """See :meth:`Inbox.purge`; bodies are dropped when their delivery is done."""
        await self._begin()
        old = now - self._terms.payload_seconds
        parked = [
            row
            for row in self._rows.set_aside.values()
            if row.state is DeliveryState.PARKED and row.received_at < old
        ]
        for row in parked:
            self._forget(row)
        return Purged(0, self._rows.forget_done(now - self._terms.dedup_seconds), len(parked))

    async def holdings(self, tenant_id: str) -> Mapping[str, int]:
        from ..sql import reads

        await self._begin()
        in_tables = await self._tables.run(lambda tx: reads.holdings(tx, tenant_id))
        rows = [row for row in self._rows.by_sequence.values() if row.tenant_id == tenant_id]
        others = (row for row in self._rows.by_sequence.values() if row.tenant_id != tenant_id)
        elsewhere = sum(kept.tenant_id == tenant_id for row in others for kept in row.evidence)
        return {
            **in_tables,
            "deliveries": len(rows),
            "bodies": sum(row.raw is not None for row in rows),
            "attempts": sum(len(row.failures) for row in rows),
            "evidence": sum(len(row.evidence) for row in rows) + elsewhere,
        }

    async def unowned(self) -> Sequence[str]:
        await self._begin()
        rows = self._rows.by_sequence.values()
        named = {row.tenant_id for row in rows}
        named |= {kept.tenant_id for row in rows for kept in row.evidence}
        tenants = [name for name in named if name and not name.startswith(SOURCE_MARK)]
        return [name for name in tenants if await self.tenants.get(name) is None]

    async def other_tables(self) -> Sequence[str]:
        await self._begin()
        return []

    async def wipe(self) -> bool:
        """See :meth:`Inbox.wipe`: nothing to do in memory."""
        await self._begin()
        return True

    async def close(self) -> None:
        self._closed = True
        if "_tables" in vars(self) and self._shares is None:
            self._tables.close()
        await trio.lowlevel.checkpoint()


def _leases_of(rows: Sequence[MemoryRow]) -> dict[str, Lease]:
    return {row.key: row.lease for row in rows if row.lease is not None}
