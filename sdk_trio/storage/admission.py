"""The inbox's answer to a delivery, decided without I/O.

:func:`existing_state` classifies the existing record of a key; the tables of rules map the class to
the answer of ``accept``, ``claim`` or ``park``, and to the write that the store makes.
"""

import enum

import msgspec

from ..records.deliveries import Admission, DeliveryState

#: A stored time may be this much later than possible, in seconds, before it counts as written by a
#: wrong clock. Small corrections of a clock must not make anything due early.
CLOCK_SLACK_SECONDS = 60.0

#: A lease that expired longer ago, in seconds, should have been taken over: workers ask the store
#: every 5 s.
TAKEN_OVER_SECONDS = 15.0


class LeaseTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The owner and the periods, in seconds, that an open inbox applies to every change.

    Args:
        owner: the name that holds the leases taken here; not empty, unique among living processes
            of all hosts.
        lease_seconds: duration of a lease without renewal.
        dedup_seconds: time that the key of a done delivery is remembered.
        payload_seconds: time that bodies are kept.
        shared_by_hosts: other hosts use the store and may be alive, so only leases that have
            expired are taken away. On SQLite it is False: the first process takes away the leases
            of all others before it starts them.
    """

    owner: str
    lease_seconds: float
    dedup_seconds: float
    payload_seconds: float
    shared_by_hosts: bool = False

    def live(self, until: float | None, *, now: float) -> float | None:
        """Return the deadline ``until`` if the lease is in force at ``now``; else None.

        A deadline further ahead than any lease lasts was written by a wrong clock. Believed, it
        would protect a dead process's claim for hours or years.
        """
        if until is None or not now < until <= now + self.lease_seconds + CLOCK_SLACK_SECONDS:
            return None
        return until


class Known(msgspec.Struct, frozen=True):
    """The columns of a known key's record that decide; times in Unix seconds.

    ``foreign_lease_until`` is the deadline of another owner's live lease, None if there is none.
    Our own lease does not count: the caller asks only for a key that does not run in its process.
    So our lease is a leftover of a cancelled commit or of an outcome that could not be written, and
    must not block the redelivery.
    """

    state: DeliveryState
    queued: bool
    attempts: int
    finished_at: float | None
    foreign_lease_until: float | None
    process_ends: int = 0


class ExistingState(enum.Enum):
    """The state of a key's record, as far as a further delivery of it is concerned."""

    FORGOTTEN = enum.auto()
    """Done longer ago than the dedup retention: treated as never seen."""
    FINISHED = enum.auto()
    """Done, and still remembered."""
    QUEUED = enum.auto()
    """Our own workers will run it or are running it."""
    RUNNING = enum.auto()
    """An inline handler runs it, under a live lease."""
    FAILED_INLINE = enum.auto()
    """It failed or was cut short inline, and waits for the sender's redelivery."""
    DEAD = enum.auto()
    """Its last allowed run failed; a redelivery runs it again."""
    PROCESS_ENDED = enum.auto()
    """Dead, and its process ended while it ran: only an operator's replay runs it again, because
    each redelivery could end the process again."""
    PARKED = enum.auto()
    """Nothing handles its type."""


class Change(enum.Enum):
    """The write that the store has to make."""

    NOTHING = enum.auto()
    REPLACE = enum.auto()
    """Forget the record with its body and its attempts, then insert the delivery as new."""
    UPDATE = enum.auto()
    """Keep the record, its first body and its attempts; set its new state."""
    RESTART = enum.auto()
    """As UPDATE, but with attempts at 0 and the last error cleared."""
    QUEUE = enum.auto()
    """As RESTART, and ``received``, for our own workers, instead of the caller's state."""


class AdmissionRule(msgspec.Struct, frozen=True):
    """The answer to the caller, and the write that goes with it."""

    admission: Admission
    change: Change = Change.NOTHING


_NEW_AGAIN = AdmissionRule(Admission.NEW, Change.REPLACE)
_RESTART = AdmissionRule(Admission.NEW, Change.RESTART)
_CONTINUE = AdmissionRule(Admission.NEW, Change.UPDATE)
_DONE = AdmissionRule(Admission.DONE)
_QUEUED = AdmissionRule(Admission.QUEUED)
_RUNNING = AdmissionRule(Admission.RUNNING)

#: The rules of ``accept``, after which the delivery is ``received``, for our own workers.
ACCEPTING = {
    ExistingState.FORGOTTEN: _NEW_AGAIN,
    ExistingState.FINISHED: _DONE,
    ExistingState.QUEUED: _QUEUED,
    ExistingState.RUNNING: _RUNNING,
    ExistingState.FAILED_INLINE: _CONTINUE,
    ExistingState.DEAD: _RESTART,
    ExistingState.PROCESS_ENDED: _DONE,
    ExistingState.PARKED: _RESTART,
}

#: The rules of ``claim``, after which the delivery is ``running``, inline. The attempts of a dead
#: one are not reset: otherwise the sender's redeliveries would run it without end. A parked one was
#: answered 200, so its sender need not deliver it again if an inline run fails: workers run it.
CLAIMING = {
    **ACCEPTING,
    ExistingState.DEAD: _CONTINUE,
    ExistingState.PARKED: AdmissionRule(Admission.QUEUED, Change.QUEUE),
}

#: The rules of ``park``. A delivery that waits for a redelivery gets its last one here: the
#: sender is answered 200 and does not send again, and only as ``parked`` can it be replayed.
PARKING = {**ACCEPTING, ExistingState.DEAD: _DONE, ExistingState.PARKED: _DONE}


def existing_state(known: Known, *, now: float, dedup_seconds: float) -> ExistingState:
    """Classify a known record at ``now``, the arrival time of the redelivery."""
    if known.state is DeliveryState.DONE:
        finished_at = known.finished_at if known.finished_at is not None else now
        return (
            ExistingState.FORGOTTEN if now - finished_at > dedup_seconds else ExistingState.FINISHED
        )
    if known.state is DeliveryState.DEAD:
        return ExistingState.PROCESS_ENDED if known.process_ends else ExistingState.DEAD
    if known.state is DeliveryState.PARKED:
        return ExistingState.PARKED
    if known.queued:
        return ExistingState.QUEUED
    if known.state is DeliveryState.RUNNING and known.foreign_lease_until is not None:
        return ExistingState.RUNNING
    return ExistingState.FAILED_INLINE


class Readmission(msgspec.Struct, frozen=True):
    """The new state of a delivery that is admitted again, and its counts.

    ``attempts`` are the runs before it that count, ``earlier_attempts`` those that no longer do.
    ``restarts``: the last error and the ends of processes are forgotten as well.
    """

    state: DeliveryState
    attempts: int
    earlier_attempts: int
    restarts: bool


def readmit(
    change: Change, state: DeliveryState, *, attempts: int, earlier_attempts: int
) -> Readmission:
    """Apply :attr:`Change.UPDATE`, ``RESTART`` or ``QUEUE``; ``state`` is the one asked for."""
    if change is Change.QUEUE:
        state = DeliveryState.RECEIVED
    if change is Change.UPDATE:
        return Readmission(state, attempts, earlier_attempts, restarts=False)
    return Readmission(state, 0, earlier_attempts + attempts, restarts=True)
