"""The interface of a store; every store passes the same contract suite.

Every ``async`` method is a checkpoint of Trio, except, in memory, ``claim`` and the ``finish`` of
an inline run. A method that writes returns when the change is durable (SQLite: synced to disk;
memory: kept by this process). On SQLite, ``claim`` and ``purge`` do not sync: their changes survive
the process, and a power cut only after a later sync. Cancellation does *not* undo a write that was
begun: ``Cancelled`` is raised when it is done, or after 2 s. After a cancellation, or after the
error that the store does not answer, a method may have taken leases that its caller does not know
of. The next ``renew`` gives them up, or they expire. Every ``async`` method raises
:class:`~sdk_trio.errors.StoreUnavailableError` while the store is unavailable. Half of a surrogate
pair in any text is stored, and looked up, as U+FFFD; a new delivery has none.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Protocol

from ..base.telemetry import Sample
from ..records.deliveries import (
    Admitted,
    AttemptRecord,
    DeliveryRecord,
    DeliveryState,
    Due,
    EvidenceRecord,
    Lease,
    NewDelivery,
    Outcome,
    Purged,
    Renewed,
)
from ..records.policies import ClaimLimits, EventPause

if TYPE_CHECKING:
    from .effects import Effects, T

    # Most receivers have no tenants, and start without these modules.
    from .sql.alerts import AlertStore
    from .sql.notifications import NotificationStore
    from .sql.tenants import TenantStore, UpgradeStore


class Inbox(Protocol):
    """The durable inbox: one record for each key of a delivery, from arrival to its end.

    The key is the signer and the webhook id, see :func:`key_of`: two senders may use the same id,
    and neither changes the records of the other.

    A different body under the same key changes no answer: it is stored as evidence, see
    :meth:`evidence`.

    An inbox acts for one *owner*, named when it is opened. Each run has a :class:`Lease`, which
    ``accept``, ``claim``, ``claim_due`` and ``claim_suspects`` return and the caller holds. A
    method that gets a lease changes nothing if it is *stale*: it has ended, or the delivery was
    claimed again: see its result. A run that goes on although its lease was lost may become that of
    a newer lease of the same delivery (:meth:`Lease.renew_as`), if it has returned to this process:
    then its outcome counts. ``renew`` extends the leases that it is given, and gives up all others
    of its owner: the call that took them was abandoned, or an outcome could not be recorded. Leases
    of other owners are taken over when they have expired (``claim_due``), or when their owners are
    known to be dead (``recover``).

    A delivery is *suspect* if processes have ended during its runs. It then runs alone, so that it
    ends no other run, and is dead after some such ends (docs/adr/0023-quarantine.md).
    """

    @property
    def lost(self) -> str | None:
        """The reason why every method fails until a restart: the store's files are gone or damaged.

        None while they are in order. Reading this property does not block.
        """
        ...

    @property
    def failing(self) -> bool:
        """Whether the last writes failed, or wait for a store that does not answer."""
        ...

    def samples(self) -> Iterable[Sample]:
        """Return the metrics of this process's queries and commits, without waiting."""
        ...

    def writing_process(self) -> int | None:
        """Return the id of the process that holds the write lock; None: no one, or unknown.

        It never blocks, even if the store does not answer.
        """
        ...

    @property
    def in_order(self) -> bool:
        """Whether sequences become visible in order, so none below a visible one appears later."""
        ...

    async def clock_offset(self) -> float | None:
        """Return the seconds by which this host's clock is ahead of the store's.

        None: the store uses the host's clock.
        """
        ...

    async def accept(
        self, delivery: NewDelivery, *, leased: bool, take_expired_until: float = inf
    ) -> Admitted:
        """Store ``delivery`` for our own workers, before the sender is answered 200.

        ``NEW`` if it was unknown, dead, parked, done longer ago than the dedup retention, or
        waiting for a redelivery after a failed inline run. It is then ``received`` and queued; its
        attempts are 0 if it was done, dead or parked. A dead delivery in whose runs a process ended
        is ``DONE``: only :meth:`replay` runs it again. With ``leased`` the caller runs a new
        delivery itself, unless it is ordered; otherwise the next ``claim_due`` claims it. Any other
        answer leaves its state unchanged: ``DONE``, ``QUEUED``, or ``RUNNING`` (inline, under the
        live lease of another owner). A different body is kept as evidence. The end of a process
        during a run is counted by any answer. ``take_expired_until``: as for :meth:`claim_due`.
        """
        ...

    async def claim(
        self, delivery: NewDelivery, *, take_expired_until: float = inf, token: int | None = None
    ) -> Admitted:
        """Claim ``delivery`` for an inline run: ``NEW`` means that it is ``running`` and ours.

        The attempt counts as started. ``RUNNING`` if another owner runs it inline under a live
        lease. An inline delivery is claimed if we have leased it (the caller knows that it does not
        run), if its lease has expired, or if it waits for a redelivery. So is a dead one, unless a
        process ended in one of its runs: that is ``DONE``. Attempts are not reset. A queued one
        stays ``QUEUED``, whatever its lease. A parked one becomes ``received`` for our own workers,
        and is ``QUEUED``: its sender was answered 200 and need not deliver it again.

        ``take_expired_until``: as for :meth:`claim_due`. ``token``: that of the caller's lease of
        an ended run, which is claimed again to record its outcome; None: a new one. A claim that is
        committed after its caller has given up belongs to that lease then.
        """
        ...

    def claim_unawaited(self, delivery: NewDelivery) -> Lease | None:
        """Claim ``delivery`` for an inline run without awaiting the commit, if its key is new.

        None changes nothing: call :meth:`claim`. Otherwise it is ``running`` and ours for every
        later call of this inbox, and :meth:`finish` ends it. This method returns at once and raises
        nothing; if the store fails, ``finish`` raises. A run in which the process ends is counted,
        from its first moment on, by the next ``claim`` or ``accept`` of its key
        (docs/adr/0047-unawaited-claims.md).
        """
        ...

    async def park(
        self, delivery: NewDelivery, reason: str | None = None, *, take_expired_until: float = inf
    ) -> Admitted:
        """Store ``delivery`` as ``parked``, and ``reason`` as its last error: nothing runs it.

        ``NEW`` if it was unknown, done longer ago than the dedup retention, or waiting for a
        redelivery after a failed inline run. Any other answer changes nothing: ``QUEUED``,
        ``RUNNING``, or ``DONE`` if it was done, dead or parked. ``take_expired_until``: as for
        :meth:`claim_due`.
        """
        ...

    async def start(self, lease: Lease, *, now: float, alone: bool = False) -> bool:
        """Start a run by a worker: ``running``, one more attempt, the lease is extended.

        False, and no change, if the lease is stale. A repeated start counts once; a start is
        repeated if its commit is unknown.
        ``alone``: no other run is in progress, so if the process ends, this run is the cause.
        """
        ...

    async def join(self, lease: Lease) -> bool:
        """Note that a run that began alone is now concurrent with others; False: it is stale."""
        ...

    def start_unawaited(self, lease: Lease, *, now: float) -> None:
        """Start a run without awaiting the commit; the commits of later calls follow it.

        For the first run of a delivery that this process has just accepted, or that ``claim_due``
        lists in ``first_runs``. It saves one sync of the disk (docs/adr/0047-unawaited-claims.md).
        It raises nothing. A failure of the store is logged, and the run may then not be counted.
        """
        ...

    def end_unawaited(self, lease: Lease, *, now: float) -> bool:
        """Record the success of a queued run with a later commit, without waiting for it.

        False changes nothing: call :meth:`finish`. After True the delivery is ``done`` for every
        later call of this inbox. It is committed with the next change, at most 25 ms later; if the
        process is killed before, the delivery runs again. After a failure of the store it is
        recorded again with the next renewal, and with :meth:`close`.
        """
        ...

    async def finish(self, lease: Lease, outcome: Outcome, *, now: float) -> bool:
        """Record the outcome of a run and give up the lease. A failure leaves an attempt record.

        False, and no change, if the lease is stale: the run was taken over, or an earlier call, the
        commit of which is unknown, has recorded its outcome.
        """
        ...

    async def conclude(
        self, lease: Lease, effects: "Effects[T]", *, attempt: int, now: float
    ) -> "T":
        """Apply ``effects`` and record the success of a run, in one transaction of the store.

        ``effects`` runs in another thread, with the context variables of the caller, and may run
        again after a rollback. If it raises, nothing has changed, and :meth:`finish` records the
        outcome. A cancelled call is finished first; its result shows whether the event is done.

        Args:
            lease: the run's.
            effects: writes with the connection of its transaction, and does nothing else.
            attempt: the number of the run, runs before a replay included.
            now: Unix seconds.

        Raises:
            EventTakenOverError: the lease is stale.
            NotSupportedError: the store has no transactions.
            Exception: raised by ``effects``.
        """
        ...

    async def release(self, leases: Collection[Lease]) -> int:
        """Give up leases of runs that never started; return how many were not stale."""
        ...

    async def claim_due(
        self,
        *,
        limit: int,
        now: float,
        take_expired_until: float = inf,
        limits: ClaimLimits | None = None,
    ) -> Due:
        """Lease up to ``limit`` queued deliveries without a lease, oldest arrival first.

        ``received`` deliveries are due, ``retrying`` ones whose time has come, and any unfinished
        queued one whose lease (of another owner) has expired. An *ordered* delivery is due only if
        no earlier unfinished ordered delivery of the same tenant has the same subject.

        Expired leases are taken over until ``take_expired_until``, a time of
        ``base.clock.monotonic``. Later, the caller's clock may have been set while it waited. -inf:
        it was set, or the process has started, a moment ago, so leases of others may only seem
        expired. A store with a clock of its own ignores this: by its clock they have expired.

        With ``limits``, paused deliveries stay in the store, and those of a group are leased only
        as its limits allow: no more of them than ``concurrency`` have a live lease of any owner,
        and no more are leased in a minute than ``rate_per_minute``, the tokens of which the store
        keeps. With ``coalesce``, a delivery is ended if a newer one of the same lane, type and
        group waits: as ``done``, "superseded by KEY".
        """
        ...

    async def recover(self, *, dead: str | None = None) -> int:
        """Take away the leases of all other owners, known to be dead; return how many.

        In a store that other hosts share, only expired leases are taken away, and those of the
        owner ``dead`` and of its processes, whose names begin with its own and a dot.

        Interrupted runs become ``received`` and queued, inline ones as well, so that our own
        workers finish them. Their attempts stay counted, leave an attempt record, and count in
        ``process_ends``. ``ran_alone`` is set if this takes a single lease and no other run was
        interrupted. In a store that other hosts share, the lease must also have been renewed within
        half of its duration: otherwise they may have taken others of its owner.
        """
        ...

    async def take_over(self, owner: str, *, successor: str, now: float) -> int:
        """Take away the leases of ``owner``, known to be dead, and return how many.

        Interrupted runs are counted and put back as :meth:`recover` does, with a lease of
        ``successor``: only its :meth:`claim_suspects` finds them until the lease ends. The same
        happens to deliveries that an earlier call left to ``owner`` and that it had not run yet.
        Deliveries that had not begun to run are due at once. An owner without leases is not an
        error.
        """
        ...

    async def claim_suspects(
        self, *, limit: int, now: float, limits: ClaimLimits | None = None
    ) -> Due:
        """Lease up to ``limit`` queued, ``received`` deliveries with ``process_ends``, by age.

        They are the deliveries of :meth:`claim_due` that ran when a process ended, and those that
        :meth:`take_over` has left to this owner. An owner calls this when it starts: deliveries
        that it has leased already are included. ``limits`` are obeyed as by :meth:`claim_due`. The
        result has no next time, and ``more`` is false.
        """
        ...

    async def ask_for_work(self, *, seconds: float, now: float) -> None:
        """Ask other owners to share their work, for so many seconds.

        Nothing changes if no other owner has leased a queued delivery that it has not begun.
        """
        ...

    async def is_work_wanted(self, *, now: float) -> bool:
        """Return whether an owner has asked for work and its request has not expired."""
        ...

    async def pause(
        self, glob: str, *, actor: str, reason: str, until: float | None, now: float
    ) -> None:
        """Pause the deliveries whose type matches ``glob``, until it is resumed or ``until``.

        A glob that is paused already gets the new reason and end. Those who claim deliveries obey
        it: see :meth:`pauses` and :meth:`claim_due`.
        """
        ...

    async def resume(self, glob: str | None, *, actor: str, now: float) -> Sequence[str]:
        """End the pause of ``glob``, None: all of them; return the globs that were paused."""
        ...

    async def pauses(self, *, now: float, ended: bool = False) -> Sequence[EventPause]:
        """Return the pauses that are in force, the oldest first; ``ended``: all others as well.

        A server decides by its own clock, and its times are that clock's.
        """
        ...

    async def reschedule(self, *, now: float) -> int:
        """Make every retry due that was decided later than ``now``; return their number.

        A decision in the future means that the clock has been set back since; the retry would wait
        until the clock catches up. Corrections of less than a minute change nothing. With ``now`` 0
        every retry is made due, also in a store with its own clock.
        """
        ...

    async def renew(self, leases: Collection[Lease], *, now: float) -> Renewed:
        """Extend ``leases``, and give up all other leases of this owner.

        Calls of ``accept`` and ``claim`` in progress keep theirs, and so do ends that are not
        awaited; no call of ``claim_due`` or ``claim_suspects`` may be in progress. An inbox writes
        in the order of its calls, so abandoned calls are done by then. A delivery that is given up
        is in the state after ``Released``: due for every owner, or, if it was inline, waiting for
        the sender's redelivery.
        """
        ...

    async def replay(self, keys: Sequence[str]) -> Sequence[str]:
        """Put dead, parked and retrying deliveries back to ``received``, queued, attempts at 0.

        Returns the keys that were put back; the others were in another state, have no body, or are
        retrying and about to run.
        """
        ...

    async def repeat(self, keys: Sequence[str]) -> Sequence[str]:
        """Put done deliveries back to ``received``, queued, each as its next generation.

        Returns the keys that were put back; the others were in another state, or have no body.
        Their effects are applied again, even if they are guarded against duplicates.
        """
        ...

    async def get(self, key: str) -> DeliveryRecord | None:
        """Return one delivery with its body, or None."""
        ...

    async def find_by_id(self, webhook_id: str, *, limit: int = 50) -> Sequence[DeliveryRecord]:
        """Return the deliveries with this id of all signers, with bodies; the host's first.

        For people, who read ids; a program that knows the signer uses the key.
        """
        ...

    async def keep_other(self, delivery: NewDelivery) -> None:
        """Store the body of ``delivery`` as evidence, if its key is known with a different body.

        ``accept``, ``claim`` and ``park`` do so themselves.
        """
        ...

    async def evidence(self, key: str) -> Sequence[EvidenceRecord]:
        """Return the other bodies that came under a key, oldest first, each once.

        At most the first :data:`MOST_EVIDENCE` are kept; they are removed with the first body.
        """
        ...

    async def known(self, keys: Sequence[str]) -> frozenset[str]:
        """Return those of ``keys`` that the inbox has a record of, in any state."""
        ...

    async def attempts(self, key: str) -> Sequence[AttemptRecord]:
        """Return the failed runs of one delivery, oldest first."""
        ...

    async def find(
        self,
        *,
        type: str | None = None,
        state: DeliveryState | None = None,
        since: float | None = None,
        until: float | None = None,
        after_sequence: int | None = None,
        before_sequence: int | None = None,
        subject: str | None = None,
        tenant_id: str | None = None,
        source: str | None = None,
        oldest_first: bool | None = None,
        limit: int = 50,
    ) -> Sequence[DeliveryRecord]:
        """List the deliveries that meet every given condition, without bodies.

        A source's deliveries have no tenant, so none meets both conditions.
        ``since`` and ``until`` are Unix seconds of arrival. ``until`` and both sequences are not
        included. ``oldest_first`` is by rising sequence; None: with ``after_sequence`` only.
        """
        ...

    async def sync(self) -> None:
        """Wait until everything that can be read now survives a power cut.

        On SQLite some commits are not synced, such as the claim of an inline run. After a power cut
        their sequences may be given again, to other deliveries.
        """
        ...

    async def last_sequence(self) -> int:
        """Return the highest sequence that was ever given, even if its record is removed.

        0 before the first one. Unless :attr:`in_order`, it may belong to a delivery that is not
        committed yet, or never was.
        """
        ...

    async def counts(self) -> dict[DeliveryState, int]:
        """Return how many deliveries are in each state; states without any are 0."""
        ...

    async def oldest_waiting(self) -> float | None:
        """Return the arrival time of the oldest queued delivery that waits or runs, or None.

        Deliveries that wait for the time of a retry, or are known to be paused, do not count: that
        wait is planned.
        """
        ...

    async def expired_leases(self, *, before: float) -> int:
        """Return how many queued deliveries have a lease that expired before that time.

        Inline deliveries do not count: no poll takes them over, because the sender redelivers
        them. ``before`` is a time of the caller's clock. A store with a clock of its own counts
        leases that expired, by that clock, as long ago as ``before`` is by the caller's.
        """
        ...

    async def changed_elsewhere(self) -> bool:
        """Return whether another process, or another inbox of this one, has changed the store.

        Only changes since the last call count. On PostgreSQL also whether a lease has expired.
        """
        ...

    async def read_checkpoint(self, name: str) -> str | None:
        """Return the value that was last written under ``name``, or None."""
        ...

    async def write_checkpoint(
        self, name: str, value: str | None, *, term: int | None = None, once: bool = False
    ) -> None:
        """Store ``value`` under ``name``; None removes it.

        With ``term``, raise StoreUnavailableError unless this owner leads in that term, see
        :meth:`lead`. With ``once`` an existing value stays, even one that another owner is just
        writing.
        """
        ...

    async def lead(self, *, seconds: float) -> int | None:
        """Lead all owners of the store for ``seconds`` from now on, by the store's own clock.

        Returns the number of the term, which grows with every new leader; None while another owner
        leads. A call during the term renews it; a call with 0 ``seconds`` ends it. On SQLite and
        in memory it is always 1: the lock of the data directory has one holder.
        """
        ...

    async def purge(self, *, now: float) -> Purged:
        """Apply the retention settings: see docs/reference/configuration.md.

        Bodies of done deliveries are removed after the payload retention, done deliveries when both
        the payload and the dedup retention have passed, and parked ones after the payload
        retention. Dead letters stay until they are replayed.
        """
        ...

    async def holdings(self, tenant_id: str) -> Mapping[str, int]:
        """Count the records of a tenant, except its own row.

        The names are ``deliveries``, ``bodies``, ``attempts``, ``evidence`` (what erasing the
        tenant removes of it), ``messages``, ``outbox``, ``audit``.
        """
        ...

    async def unowned(self) -> Sequence[str]:
        """Return the ids of tenants that deliveries or evidence name and that no tenant has."""
        ...

    async def other_tables(self) -> Sequence[str]:
        """Return the names of tables that handlers have created in the store's database.

        Only handlers read and change them; a purge leaves them alone.
        """
        ...

    async def erase(self, tenant_id: str) -> int:
        """Remove all deliveries of a tenant with bodies and attempts, whatever their state.

        The tenant's bodies that came under the keys of other deliveries are removed, too, and the
        checkpoints whose names end in a dot and the tenant's id. It uses many short transactions; a
        cancelled call stops between two of them. Returns how many deliveries were removed.
        """
        ...

    async def wipe(self) -> bool:
        """Overwrite deleted data in the store's own files.

        Call it after :meth:`purge` and other deletions. It may rewrite the store, which takes a
        while, and does not reach copies elsewhere (backups, replicas). False: a reader still needs
        the write-ahead log, so remnants stay in it.
        """
        ...

    async def close(self) -> None:
        """Finish the writes in progress and close; a second call does nothing.

        It is shielded from cancellation, within a time limit.
        """
        ...


class Store(Inbox, Protocol):
    """An open store: the inbox, and the stores of tenants, their upgrade, messages and alerts.

    One writer commits all of it.
    """

    @property
    def tenants(self) -> "TenantStore":
        """The tenants."""
        ...

    @property
    def upgrade(self) -> "UpgradeStore":
        """The upgrade from a single tenant."""
        ...

    @property
    def notifications(self) -> "NotificationStore":
        """The messages to site managers."""
        ...

    @property
    def alerts(self) -> "AlertStore":
        """The alerts."""
        ...
