"""Unawaited claims and ends on SQLite: runs that begin or end before that is committed.

The claim of an inline run whose key is surely new is not awaited. So a lone inline delivery is one
transaction instead of two (docs/adr/0047-unawaited-claims.md).

1. :class:`~.known_keys.StoreKeys` finds that the key is surely new.
2. :class:`ClaimsFile` gets the key, and the claim is posted to the commit thread.
3. The handler runs.
4. Most handlers end before the claim is handed over to the commit thread. Then the claim is
   withdrawn, and claim and outcome are one record. Otherwise the outcome is recorded after the
   claim (:meth:`UnawaitedLease.stored`).

The claims file is there for a handler that ends the process at 3, before any commit knows of the
run: without a trace of it, each redelivery would end the process again. The file is written and not
synced: its content must survive the process, not the machine. It is not mapped into memory, because
another program that truncates a mapped file ends the process (SIGBUS).

At a start, a key in the file is a run during which the process ended, unless the store knows the
key: then the claim was committed, and the store counts the run itself. Such an *ended run* stays in
the file until the next claim of its key counts it.
"""

import errno
import os
import stat
import struct
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import msgspec
import trio

from ..base.executor import run_in_thread
from ..base.logs import get_logger
from ..base.opener import open_file
from ..errors import StoreLostError
from ..records.deliveries import Admission, Done, Lease, NewDelivery, Outcome
from .admission import LeaseTerms
from .commit import GroupCommit
from .known_keys import StoreKeys, Version
from .readers import ReaderPool
from .sql import arrivals, deliveries, reads
from .sql.deliveries import Answer, Arriving, Ran, RunEnd
from .sql.dialect import SqlTransaction
from .sql.leases import new_token
from .units import Kind, Unit

_log = get_logger("storage")

#: A delivery whose key was surely new, and the version of the store in which it was.
SurelyNew = tuple[Arriving, Version]


class UnawaitedLease(Lease, kw_only=True, eq=False, gc=False):
    """The lease of a run whose claim is not awaited: its delivery, claim, slot and version."""

    delivery: NewDelivery
    claim: Unit
    slot: int
    version: Version

    def stored(self) -> Lease:
        """Return the lease as the store has it; in the commit thread.

        Its sequence is 0 unless the claim is committed. That thread does units in the order in
        which they were handed over, and the end of the run is handed over after the claim. So there
        the claim is over: its row is committed, or is written by this very transaction; or it was
        withdrawn, has failed, or was refused, because another process had just written the key. On
        the event loop it may still be in the middle of its commit, and may yet fail.
        """
        if self.claim.error is None and self.claim.value is not None:
            admitted, sequence = self.claim.value
            if admitted.admission is Admission.NEW and sequence is not None:
                return Lease(self.key, self.token, sequence)
        return Lease(self.key, self.token)


class UnawaitedClaims:
    """The unawaited claims of one inbox.

    Args:
        terms: the owner and the periods.
        commits: commits the claims and the ends of their runs.
        readers: read the store's keys.
    """

    def __init__(self, terms: LeaseTerms, commits: GroupCommit, readers: ReaderPool) -> None:
        self._terms = terms
        self._commits = commits
        self._readers = readers
        # Without the file every claim is awaited.
        self._file: ClaimsFile | None = None
        #: The leases of runs that have not ended yet, by key.
        self.runs: dict[str, UnawaitedLease] = {}
        self.keys = StoreKeys(commits, readers, self.runs)
        # Bound once: the commit thread recognizes work of one kind by having the same object.
        self._claiming = self._claim_all
        self._ending = self._end_all

    async def open(self, path: str | os.PathLike[str]) -> None:
        """Open the claims file, and let :class:`~.known_keys.StoreKeys` read the store's keys.

        Raises:
            StoreUnavailableError: the store cannot be read.
        """
        is_new = await self._readers.run(arrivals.last_sequence) == 0
        try:
            left = await run_in_thread(partial(read_claims, path, is_new=is_new))
            committed = await self._readers.run(
                lambda tx: reads.known(tx, [run.key for run in left])
            )
            lost = [run for run in left if run.key not in committed]
            self._file = await run_in_thread(ClaimsFile, path, lost)
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
        version = self.keys.note_new(delivery)
        if version is None or key in file.ended:
            return None
        slot = file.take(key, delivery.received_at)
        if slot is None:
            return None
        token = new_token()
        claim = self._commits.post(self._claiming, key, (Arriving(delivery, token), version))
        lease = self.runs[key] = UnawaitedLease(
            key, token, delivery=delivery, claim=claim, slot=slot, version=version
        )
        return lease

    def _claim_all(self, tx: SqlTransaction, items: Sequence[SurelyNew]) -> Sequence[Answer]:
        are_new = self.keys.are_new(tx, (version for _, version in items))
        arriving = [each for each, _ in items]
        return deliveries.claim_all(tx, self._terms, arriving, surely_new=are_new)

    def drop(self, lease: Lease) -> None:
        """Give up the run of a lease, if it is one of :attr:`runs`: no :meth:`finish` follows."""
        run = self.runs.get(lease.key)
        if run is lease:
            del self.runs[lease.key]
            self._give_back(run)

    def keep(self, held: Collection[Lease]) -> None:
        """Give up the runs whose leases are not among those ``held``."""
        for run in [run for run in self.runs.values() if run not in held]:
            self.drop(run)

    def _give_back(self, run: UnawaitedLease, *, is_recorded: bool = False) -> None:
        if self._file is not None and is_recorded:
            self._file.free(run.slot)
        elif self._file is not None:
            self._file.clear(run.slot, later=not self._commits.prompt)
        self.keys.catch_up()

    def clear_recorded(self) -> None:
        """Clear the slots of recorded runs, before the store may forget their keys."""
        if self._file is not None:
            self._file.clear_stale()

    @property
    def are_committed(self) -> bool:
        """Whether no claim is on its way to the store."""
        return all(run.claim.finished for run in self.runs.values())

    def ended_run(self, key: str) -> "EndedRun | None":
        """Return the run of the key that ended an earlier process and is not counted yet."""
        return None if self._file is None else self._file.ended.get(key)

    def counted(self, key: str) -> None:
        """Forget an ended run, which the store has counted."""
        if self._file is not None:
            self._file.counted(key)

    # -- the end of a run --------------------------------------------------------------------------

    async def finish(self, run: UnawaitedLease, outcome: Outcome, *, now: float) -> bool:
        """Record the end of a run of :attr:`runs`."""
        # Checked first: if it is cancelled here, the claim is not withdrawn.
        await trio.lowlevel.checkpoint_if_cancelled()
        del self.runs[run.key]
        self._commits.withdraw(run.claim)
        is_recorded = False
        is_ended: bool
        try:
            if isinstance(outcome, Done) and outcome.answer is None and outcome.reason is None:
                is_ended = await self._commits.gather(self._ending, run.key, (run, now))
            else:
                is_ended = await self._commits.submit(partial(self._end, run, outcome, now))
            is_recorded = True
        finally:
            self._give_back(run, is_recorded=is_recorded)
        return is_ended

    def _end_all(
        self, tx: SqlTransaction, ends: Sequence[tuple[UnawaitedLease, float]]
    ) -> Sequence[bool]:
        """Record runs that ended well; in the commit thread."""
        known: dict[UnawaitedLease, RunEnd] = {}
        new: dict[UnawaitedLease, Ran] = {}
        is_ended: dict[UnawaitedLease, bool] = {}
        for run, now in ends:
            stored = run.stored()
            if stored.sequence:
                known[run] = RunEnd(stored.sequence, run.token, now)
            elif run.claim.withdrawn:
                new[run] = Ran(run.delivery, run.token, now)
            else:
                is_ended[run] = self._end(run, Done(), now, tx)
        if known:
            ended = deliveries.end_all(tx, self._terms, list(known.values()))
            is_ended.update(zip(known, ended, strict=True))
        if new:
            are_new = self.keys.are_new(tx, (run.version for run in new))
            ended = deliveries.add_done(tx, self._terms, list(new.values()), surely_new=are_new)
            is_ended.update(zip(new, ended, strict=True))
        return [is_ended[run] for run, _ in ends]

    def _end(self, run: UnawaitedLease, outcome: Outcome, now: float, tx: SqlTransaction) -> bool:
        """Record the end of one run, whatever its outcome; in the commit thread."""
        self.keys.check(tx)
        stored = run.stored()
        if stored.sequence:
            return deliveries.finish(tx, self._terms, stored, outcome, now)
        # Claim and outcome together. The key is looked up: it may be known by now.
        return deliveries.record_run(tx, self._terms, run.delivery, run.token, outcome, now)


# -- ends -----------------------------------------------------------------------------------------

# A queued run acknowledges nothing, so its success need not be synced at once. It waits for the
# next commit, at most LINGER_SECONDS, and shares its sync. So an enqueued event costs one sync
# instead of two. A run whose end is not committed when the process is killed runs again.

#: The longest time that the end of a run waits for other work, in seconds. At 100 events a second,
#: nine of ten ends share the commit of another event.
LINGER_SECONDS = 0.025


class UnawaitedEnd(NamedTuple):
    """The end of a run on its way to the store."""

    key: str
    run: RunEnd
    unit: Unit


class UnawaitedEnds:
    """The unawaited ends of one inbox. An end that the store has failed is posted again.

    Args:
        commits: commits the ends.
        ending: the kind of work that records ends of runs.
        pending: the inbox's tokens that a renewal must not give up.
    """

    def __init__(self, commits: GroupCommit, ending: Kind, pending: set[int]) -> None:
        self._commits = commits
        self._ending = ending
        self._pending = pending
        # By token, in the order in which they were posted.
        self._ends: dict[int, UnawaitedEnd] = {}

    def post(self, key: str, run: RunEnd) -> None:
        """Record the success of a run of ours, without waiting for the commit."""
        # Each call forgets two committed ends at most, so that none makes the event loop wait.
        for end in list(islice(self._ends.values(), 2)):
            if end.unit.finished and end.unit.error is None:
                self._forget(end)
        self._pending.add(run.token)
        unit = self._commits.post(self._ending, key, run, durable=True, linger=LINGER_SECONDS)
        self._ends[run.token] = UnawaitedEnd(key, run, unit)

    def _forget(self, end: UnawaitedEnd) -> None:
        # `post` may have forgotten it while `repeat_failed` was on its way through the ends.
        self._ends.pop(end.run.token, None)
        self._pending.discard(end.run.token)

    @property
    def are_committed(self) -> bool:
        """Whether no end is on its way to the store."""
        return all(end.unit.finished for end in self._ends.values())

    def repeat_failed(self) -> None:
        """Post again what the store has failed; the next commit of any caller takes it along."""
        for end in list(self._ends.values()):
            if end.unit.finished:
                self._forget(end)
                if end.unit.error is not None and not isinstance(end.unit.error, StoreLostError):
                    self.post(end.key, end.run)


# -- the claims file -------------------------------------------------------------------------------

#: Name of the file, beside the database.
CLAIMS_NAME = "inbox.claims"

#: Slots for runs; if all are taken, a claim is awaited.
SLOTS = 256

#: The most ended runs that are kept, the newest ones: their slots must not stay taken if their
#: senders never deliver again.
MOST_ENDED = SLOTS // 4

_MAGIC = b"sdk-trio claims 1\n"

# The head of a slot: checksum of the rest, number of ends of the process (0: no start has counted
# them yet), length of the key, start of the run in Unix seconds. A key has at most 293 bytes.
_HEAD = struct.Struct("<IHHd")
_SLOT = 320
_LARGEST_KEY = _SLOT - _HEAD.size
_SIZE = _SLOT * (SLOTS + 1)
_NOTHING = bytes(_SLOT)


class EndedRun(msgspec.Struct, frozen=True):
    """A run of ``key`` during which the process ended, ``ends`` times, before it was committed."""

    key: str
    ends: int
    begun: float
    slot: int


def read_claims(path: str | os.PathLike[str], *, is_new: bool) -> list[EndedRun]:
    """Return the runs that earlier processes have left in the file, the oldest first.

    A missing or damaged file is logged, unless ``is_new`` says that the store is new, too. A slot
    with a wrong checksum is skipped: its process ended before the handler began, or the machine
    lost its power.

    Raises:
        OSError: it cannot be read, or it is not a regular file.
    """
    content = _read(path)
    if not content.startswith(_MAGIC) or len(content) != _SIZE:
        if content or not is_new:
            _log.warning(
                "store.claims_lost",
                file=os.fspath(path),
                found="damaged" if content else "nothing",
                hint="whether the last process ended in the first moment of an inline run is not "
                "known; such a run is counted from its next one on",
            )
        return []
    runs = []
    for slot in range(1, SLOTS + 1):
        total, ends, length, begun = _HEAD.unpack_from(content, slot * _SLOT)
        used = content[slot * _SLOT :][: _HEAD.size + length]
        if 0 < length <= _LARGEST_KEY and zlib.crc32(used[4:]) == total:
            key = used[_HEAD.size :].decode("utf-8", "replace")
            runs.append(EndedRun(key, ends, begun, slot))
    return sorted(runs, key=lambda run: run.begun)


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        descriptor = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    with os.fdopen(descriptor, "rb") as opened:
        return opened.read(_SIZE + 1)


def _open(path: str | os.PathLike[str], flags: int) -> int:
    # A link in its place is refused: another file of ours would be overwritten. Not blocking: a
    # pipe in its place would never open.
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    descriptor = open_file(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{os.fspath(path)} is not a regular file: remove it")
    return descriptor


def _record(key: bytes, ends: int, begun: float) -> bytes:
    content = _HEAD.pack(0, ends, len(key), begun)[4:] + key
    return zlib.crc32(content).to_bytes(4, "little") + content


def _seek_and_write(descriptor: int, content: bytes, offset: int) -> None:
    os.lseek(descriptor, offset, os.SEEK_SET)
    os.write(descriptor, content)


# Windows has no pwrite. A write of a slot within the file is never short.
_write_at: Callable[[int, bytes, int], object] = getattr(os, "pwrite", _seek_and_write)


class ClaimsFile:
    """The open claims file; one process at a time may have it.

    Args:
        path: the file; it is replaced.
        left: the result of :func:`read_claims`, without the runs that the store knows.

    Raises:
        OSError: it cannot be opened or written, or it is not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str], left: Sequence[EndedRun]) -> None:
        self._free = list(range(SLOTS, 0, -1))
        self._spent: list[int] = []
        # Free slots that still have the key of a recorded run.
        self._stale: dict[int, None] = {}
        self.ended: dict[str, EndedRun] = {}
        content = bytearray(_MAGIC.ljust(_SIZE, b"\0"))
        for run in left[-MOST_ENDED:]:
            # An ended run that an earlier start has found has its number already: its key has not
            # run since, because its next claim is awaited and removes it from this file.
            slot, ends = self._free.pop(), run.ends or 1
            record = _record(run.key.encode(), ends, run.begun)
            content[slot * _SLOT : slot * _SLOT + len(record)] = record
            self.ended[run.key] = EndedRun(run.key, ends, run.begun, slot)
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            # Written as a whole, so that no later write needs more space on the disk.
            if os.write(descriptor, content) != _SIZE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(descriptor, _SIZE)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        for run in self.ended.values():
            _log.warning(
                "store.run_ended_process",
                key=run.key,
                process_ends=run.ends,
                hint="the process ended when the handler of this inline event had just begun; it "
                "is counted, and its next delivery waits for its claim",
            )

    def take(self, key: str, now: float) -> int | None:
        """Write the key of a run that is about to begin; None if that is impossible.

        Args:
            key: the delivery's.
            now: Unix seconds.

        Returns:
            the slot, for :meth:`clear`.
        """
        if self._spent:
            self._clear_spent()
        content = key.encode()
        if not self._free or len(content) > _LARGEST_KEY:
            return None
        slot = self._free.pop()
        record = _record(content, 0, now)
        try:
            _write_at(self._descriptor, record, slot * _SLOT)
        except OSError:
            self._free.append(slot)
            return None
        self._stale.pop(slot, None)
        return slot

    def free(self, slot: int) -> None:
        """Give up the slot of a run whose outcome is in the store.

        Its key may stay in the file: a start finds it in the store, too.
        """
        self._stale[slot] = None
        self._free.append(slot)

    def clear_stale(self) -> None:
        """Clear the free slots, before the store may forget the keys that they still have."""
        while self._stale:
            try:
                _write_at(self._descriptor, _NOTHING, self._stale.popitem()[0] * _SLOT)
            except OSError:
                return  # one key may be taken for that of a run that ended the process

    def clear(self, slot: int, *, later: bool = False) -> None:
        """Give up a slot: its run is over, or counted by the store.

        ``later``: at the next :meth:`take`, because the disk may make this thread wait at present.
        """
        if later:
            self._spent.append(slot)
            return
        try:
            _write_at(self._descriptor, _NOTHING, slot * _SLOT)
        except OSError:
            self._spent.append(slot)
        else:
            self._free.append(slot)

    def counted(self, key: str) -> None:
        """Forget an ended run, which the store has counted."""
        run = self.ended.pop(key, None)
        if run is not None:
            self.clear(run.slot)

    def close(self) -> None:
        """Close the file; what it holds stays."""
        descriptor = self._descriptor
        if descriptor >= 0:
            self._clear_spent()
            self.clear_stale()
            self._descriptor = -1
            os.close(descriptor)

    def _clear_spent(self) -> None:
        spent, self._spent = self._spent, []
        for slot in spent:
            self.clear(slot)
