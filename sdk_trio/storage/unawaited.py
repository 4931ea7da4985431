"""Unawaited claims on SQLite: inline runs that begin before their claims are committed.

The claim of an inline run whose key is surely new is not awaited. So a lone inline delivery is one
transaction instead of two (docs/adr/0047-unawaited-claims.md).

1. :class:`~.known_keys.StoreKeys` finds that the key is surely new.
2. :class:`~.claims_file.ClaimsFile` gets the key, and the claim is posted to the commit thread.
3. The handler runs.
4. Most handlers end before the claim is handed over to the commit thread. Then the claim is
   withdrawn, and claim and outcome are one record. Otherwise the outcome is recorded after the
   claim (:meth:`UnawaitedLease.stored`).
"""

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import trio

from ..base.executor import run_in_thread
from ..base.logs import get_logger
from ..records.deliveries import Admission, Done, Lease, NewDelivery, Outcome
from .admission import LeaseTerms
from .claims_file import ClaimsFile, InterruptedRun, read_claims
from .commit import GroupCommit, GroupedWork, Unit
from .known_keys import StoreKeys
from .readers import ReaderPool
from .sql import arrivals, reads, runs
from .sql.admission import Arriving, new_token
from .sql.dialect import SqlTransaction
from .sql.runs import Ran, RunEnd

_log = get_logger("storage")


class UnawaitedLease(Lease, kw_only=True, eq=False, gc=False):
    """The lease of a run whose claim is not awaited."""

    arriving: Arriving
    claim: Unit
    slot: int

    def stored(self) -> Lease | None:
        """Return the lease as the store has it, None if it does not; in the commit thread.

        That thread does units in the order in which they were handed over, and the end of the run
        follows the claim. So the claim is over there:

        =========================================================  =========
        the claim                                                  the lease
        =========================================================  =========
        is committed, or is written by this very transaction       stored
        was withdrawn                                              None
        has failed                                                 None
        was refused: another process had just written the key      None
        =========================================================  =========

        On the event loop the claim may still be in the middle of its commit, and may yet fail.
        """
        if self.claim.error is not None or self.claim.value is None:
            return None
        admitted, sequence = self.claim.value
        if admitted.admission is not Admission.NEW or sequence is None:
            return None
        return Lease(self.key, self.token, sequence)


class UnawaitedClaims:
    """The unawaited claims of one inbox.

    Args:
        terms: the owner and the periods.
        commits: commits the claims and the ends of their runs.
        readers: read the store's keys.
        claiming: claims deliveries.
    """

    def __init__(
        self, terms: LeaseTerms, commits: GroupCommit, readers: ReaderPool, claiming: GroupedWork
    ) -> None:
        self._terms = terms
        self._commits = commits
        self._readers = readers
        # Without the file every claim is awaited.
        self._file: ClaimsFile | None = None
        #: The runs during which an earlier process ended, and that are not counted yet, by key.
        self.interrupted: Mapping[str, InterruptedRun] = {}
        #: Those of runs that have not ended yet, by key.
        self.leases: dict[str, UnawaitedLease] = {}
        self.keys = StoreKeys(commits, readers, self.leases)
        self._claiming = claiming
        # Bound once: the commit thread recognizes the same work by having the same object.
        self._ending = self._end_all

    async def open(self, path: str | os.PathLike[str]) -> None:
        """Open the claims file, and let :class:`~.known_keys.StoreKeys` read the store's keys.

        Raises:
            StoreUnavailableError: the store cannot be read.
        """
        is_new = await self._readers.run(arrivals.last_sequence) == 0
        try:
            left = await run_in_thread(partial(read_claims, path, is_new=is_new))
            stored = await self._readers.run(lambda tx: reads.known(tx, [run.key for run in left]))
            interrupted = [run for run in left if run.key not in stored]
            self._file = await run_in_thread(ClaimsFile, path, interrupted)
            self.interrupted = self._file.interrupted
        except OSError as error:
            _log.warning(
                "store.claims_unused",
                file=os.fspath(path),
                error=str(error),
                hint="the start of each inline run is waited for, which costs it a commit",
            )
            await trio.lowlevel.checkpoint()
            return
        self.keys.enable()

    def close(self) -> None:
        """Close the file; what it holds stays."""
        if self._file is not None:
            self._file.close()

    def claim(self, delivery: NewDelivery) -> Lease | None:
        """See :meth:`Inbox.claim_unawaited`."""
        file = self._file
        if file is None or not self._commits.prompt:
            return None
        key = delivery.key
        new_in = self.keys.note_new(delivery)
        if new_in is None or key in self.interrupted:
            return None
        slot = file.take(key, delivery.received_at)
        if slot is None:
            return None
        token = new_token()
        arriving = Arriving(delivery, token, new_in)
        claim = self._commits.post(self._claiming, key, arriving)
        lease = self.leases[key] = UnawaitedLease(
            key, token, arriving=arriving, claim=claim, slot=slot
        )
        return lease

    def drop(self, lease: Lease) -> None:
        """Give up a lease, if it is one of :attr:`leases`: no :meth:`finish` follows.

        If its claim was stored, the next renewal gives that up, too.
        """
        found = self.leases.get(lease.key)
        if found is lease:
            del self.leases[lease.key]
            self._free_slot(found)

    def drop_others(self, held: Collection[Lease]) -> None:
        """Give up the leases that are not among those ``held``."""
        for lease in [lease for lease in self.leases.values() if lease not in held]:
            self.drop(lease)

    def _free_slot(self, lease: UnawaitedLease, *, is_recorded: bool = False) -> None:
        if self._file is not None:
            later = not is_recorded and not self._commits.prompt
            self._file.free(lease.slot, is_recorded=is_recorded, later=later)

    def clear_recorded(self) -> None:
        """Clear the slots of recorded runs, before the store may forget their keys."""
        if self._file is not None:
            self._file.clear_recorded()

    @property
    def are_committed(self) -> bool:
        """Whether no claim is on its way to the store."""
        return all(lease.claim.finished for lease in self.leases.values())

    def forget_interrupted(self, key: str) -> None:
        """Forget an interrupted run, which the store has counted."""
        if self._file is not None:
            self._file.forget_interrupted(key)

    # -- the end of a run --------------------------------------------------------------------------

    async def finish(self, lease: UnawaitedLease, outcome: Outcome, *, now: float) -> bool:
        """Record the end of the run of one of :attr:`leases`."""
        # Checked first: if it is cancelled here, the claim is not withdrawn.
        await trio.lowlevel.checkpoint_if_cancelled()
        del self.leases[lease.key]
        self._commits.withdraw(lease.claim)
        is_recorded = False
        is_ended: bool
        try:
            if isinstance(outcome, Done) and outcome.answer is None and outcome.reason is None:
                is_ended = await self._commits.gather(self._ending, lease.key, (lease, now))
            else:
                is_ended = await self._commits.submit(partial(self._end, lease, outcome, now))
            is_recorded = True
        finally:
            self._free_slot(lease, is_recorded=is_recorded)
        return is_ended

    def _end_all(
        self, tx: SqlTransaction, ends: Sequence[tuple[UnawaitedLease, float]]
    ) -> Sequence[bool]:
        """Record runs that ended well; in the commit thread.

        It relies on the receiver, which lets a delivery join the run of its key in flight: no other
        claim of the key comes between a withdrawn claim and the end of its run.
        """
        stored_ends: dict[UnawaitedLease, RunEnd] = {}
        new_runs: dict[UnawaitedLease, Ran] = {}
        is_ended: dict[UnawaitedLease, bool] = {}
        for lease, now in ends:
            if (stored := lease.stored()) is not None:
                stored_ends[lease] = RunEnd(stored.sequence, lease.token, now)
            elif lease.claim.withdrawn:
                arriving = lease.arriving
                new_runs[lease] = Ran(arriving.delivery, lease.token, now, arriving.new_in)
            else:
                is_ended[lease] = self._end(lease, Done(), now, tx)
        if stored_ends:
            ended = runs.end_all(tx, list(stored_ends.values()))
            is_ended.update(zip(stored_ends, ended, strict=True))
        if new_runs:
            ended = runs.add_done(tx, self._terms, list(new_runs.values()))
            is_ended.update(zip(new_runs, ended, strict=True))
        return [is_ended[lease] for lease, _ in ends]

    def _end(self, lease: UnawaitedLease, outcome: Outcome, now: float, tx: SqlTransaction) -> bool:
        """Record the end of one run, whatever its outcome; in the commit thread."""
        if (stored := lease.stored()) is not None:
            return runs.finish(tx, stored, outcome, now)
        # Claim and outcome together. The key is looked up: it may be known by now.
        delivery = lease.arriving.delivery
        return runs.record_run(tx, self._terms, delivery, lease.token, outcome, now)
