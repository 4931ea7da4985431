"""Verify replicas: restore each, and compare it with the live database.

For each tenant: the replicator syncs and reports the transaction up to which the target is
complete. The replica is restored into a separate directory and checked completely, and its content
is compared with the live database. Writers wait only for a moment at the start. The comparison
covers the schema, the number of rows of each table, and a checksum over all values; it excludes the
replicator's own tables.

The results are stored as a small JSON document in the store, so that verifications by a command
count for the daemon and vice versa.
"""

import enum
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import apsw
import attrs
import msgspec
import trio

from ..base.clock import wall
from ..base.executor import check_cancelled, run_in_thread
from ..base.private_files import create_data_directory
from ..base.times import readable
from ..config import Settings
from ..errors import ReplicationError, ReplicatorError
from ..records.tenants import Tenant
from ..tenants.databases import database_path, databases_directory
from . import replica
from .control import ControlClient, SyncResult, control_socket_path
from .live_database import Content, Snapshot, read_file
from .manifest import replica_name
from .replica import ReplicaReader, TenantReplica, scratch_directory, work_alone

#: The name of the store's checkpoint.
CHECKPOINT = "replication.verification"

#: Failures that are stored by name; if the target is down, all tenants fail alike.
_REMEMBERED_FAILURES = 100


#: Tolerance in seconds: the times of a replica's files are truncated to seconds.
_CUT_SECONDS = 2.0


class Comparison(enum.StrEnum):
    """The outcome of comparing the restored content with the live database."""

    IDENTICAL = "identical"
    #: Writes were constant, so no moment could be compared.
    BUSY = "not compared: busy"
    #: There is no live database to compare it with.
    ALONE = "not compared: no database"
    NONE = "-"


@attrs.frozen(kw_only=True)
class Verification:
    """The result for one tenant's replica; ``problem`` is None when it is good.

    ``skipped`` is the reason why there is nothing to verify, such as a tenant without a database.
    ``txid`` and ``as_of`` (Unix seconds) are those of the restored state. ``begins_at`` is the time
    of the first snapshot, and ``mark`` that of the first snapshot that must be kept for at least
    half of the retention.
    """

    tenant_id: str
    identifier: str
    verified_at: float
    problem: str | None = None
    skipped: str | None = None
    content: Comparison = Comparison.NONE
    txid: int | None = None
    as_of: float | None = None
    bytes: int | None = None
    seconds: float = 0.0
    begins_at: float | None = None
    mark: float | None = None

    @property
    def ok(self) -> bool:
        """Whether no problem of the replica is known."""
        return self.problem is None


@attrs.frozen
class VerificationState:
    """The stored state: the last successful run, and failures since.

    ``ran_at`` is the end of the last run over all active tenants, ``verified_at`` the end of the
    last one without a failure, both in Unix seconds. ``failed`` maps tenant ids to problems, and
    ``marks`` to the time the replica reached back to, in Unix seconds. ``verified`` counts the
    replicas that the last run verified, and its failures that were verified since; 0 if no active
    tenant has a database. None: there was no run.
    """

    ran_at: float | None = None
    verified_at: float | None = None
    failed: dict[str, str] = attrs.field(factory=dict)
    marks: dict[str, float] = attrs.field(factory=dict)
    verified: int | None = None

    def compared(self, result: Verification, *, retention: float) -> Verification:
        """Return ``result``, with a problem if the replica begins later than before.

        If the target is emptied, the replicator fills it again and the replica looks good; but the
        earlier points in time are lost.

        Args:
            result: the result for a tenant.
            retention: seconds for which points in time are kept.
        """
        mark = self.marks.get(result.tenant_id)
        if mark is None or result.begins_at is None or result.problem is not None:
            return result
        if result.begins_at <= mark + _CUT_SECONDS or mark < result.verified_at - retention:
            return result
        return attrs.evolve(
            result,
            problem=f"points in time are lost: it begins at {readable(result.begins_at)}, and "
            f"reached back to {readable(mark)}; find out who emptied the target, and accept the "
            "loss with 'replication verify --accept-loss'",
        )

    def after_run(
        self, results: Iterable[Verification], *, now: float, accept_loss: bool = False
    ) -> "VerificationState":
        """Return the state after a run over all active tenants.

        With ``accept_loss``, the times to which replicas reached back are forgotten.
        """
        results = list(results)
        failed = _problems(results)
        verified_at = self.verified_at if failed else now
        verified = sum(map(_is_good, results))
        state = VerificationState(now, verified_at, failed, self.marks, verified)
        known = {each.tenant_id for each in results}
        for result in results:
            state = state._marked(result, accept_loss=accept_loss)
        return attrs.evolve(state, marks={k: at for k, at in state.marks.items() if k in known})

    def after_one(self, result: Verification, *, accept_loss: bool = False) -> "VerificationState":
        """Return the state after the verification of one tenant; see :meth:`after_run`."""
        others = {key: text for key, text in self.failed.items() if key != result.tenant_id}
        verified = self.verified
        if verified is not None and _is_good(result):
            # At least 1: the last run may not have included this tenant.
            verified = max(1, verified + (result.tenant_id in self.failed))
        state = attrs.evolve(self, failed={**others, **_problems([result])}, verified=verified)
        return state._marked(result, accept_loss=accept_loss)

    def _marked(self, result: Verification, *, accept_loss: bool) -> "VerificationState":
        """Return the state with the expected content at the next verification of this tenant."""
        if not accept_loss and result.problem is not None:
            return self
        marks = dict(self.marks)
        if result.mark is not None:
            marks[result.tenant_id] = result.mark
        else:
            marks.pop(result.tenant_id, None)
        return attrs.evolve(self, marks=marks)

    def age(self, now: float) -> float | None:
        """Return how many seconds ago every active tenant was verified; None: never."""
        return None if self.verified_at is None else max(0.0, now - self.verified_at)

    def to_text(self) -> str:
        """Return the state as a checkpoint of the store."""
        return msgspec.json.encode(self).decode()


def _is_good(result: Verification) -> bool:
    """Return whether there was a replica without any problem."""
    return result.ok and result.skipped is None


def _problems(results: Iterable[Verification]) -> dict[str, str]:
    failures = [(each.tenant_id, each.problem) for each in results if each.problem is not None]
    return dict(failures[:_REMEMBERED_FAILURES])


def state_from_text(text: str | None) -> VerificationState:
    """Return the stored state; unreadable content counts as empty."""
    try:
        return msgspec.json.decode(text or "{}", type=VerificationState)
    except (msgspec.MsgspecError, UnicodeError):
        return VerificationState()


#: The number of tries to find a moment without writes, and to sync.
_ATTEMPTS = 3

#: Bytes kept free on the disk of the restored database, because deliveries are stored there.
_SPARE_BYTES = 64 * 1024 * 1024

LOCK_NAME = "verification.lock"


# Both sides must be compared at the same moment. A snapshot of the live database between two syncs
# that report the same transaction is exactly that transaction: nothing was written in between, and
# no commit was half done. During constant writes there is no such moment; then only position and
# integrity count, and the content is reported as not compared.


@attrs.define
class _Moment:
    """The live database at the moment when the target was complete up to ``txid``.

    ``txid`` is None if no replicator answered. If ``exact``, the snapshot is that transaction;
    otherwise it may be some writes ahead or behind.
    """

    snapshot: Snapshot
    txid: int | None
    exact: bool
    written_at: float


class Verifier:
    """Verifies replicas, one at a time; one verifier works in a data directory at a time.

    Args:
        settings: validated settings.
        reader: reads the target.
        clock: returns Unix seconds.
    """

    def __init__(
        self, settings: Settings, reader: ReplicaReader, *, clock: Callable[[], float] = wall
    ) -> None:
        self._reader = reader
        self._clock = clock
        self._options = settings.multi_tenant.file_db.replication
        self._directory = databases_directory(settings).absolute()
        # A sync that takes longer than the allowed lag counts as a lag.
        options = self._options
        self._sync_seconds = options.sync_interval_seconds + options.health_check_max_lag_seconds
        #: Retention of points in time, in seconds.
        self.retention: float = options.retention_days * 86_400.0
        self._data = Path(settings.storage.path).absolute()

    def alone(self) -> AbstractContextManager[None]:
        """Exclude other verifications of this data directory for a block.

        So the disk has at most one restored database, and the state has one writer.

        Raises:
            StoreLockedError: another one is running.
            StoreUnavailableError: the data directory cannot be created.
        """
        return work_alone(create_data_directory(self._data), LOCK_NAME, "verification")

    async def verify(self, tenant: Tenant) -> Verification:
        """Verify one tenant's replica; problems are in the result, not raised.

        A tenant that is not active is not replicated now: it is compared with the last state of its
        replica.

        On cancellation, it ends the binary and removes the restored database.
        """
        await trio.lowlevel.checkpoint()
        began = trio.current_time()
        live = database_path(self._directory, tenant.id)
        found = Verification(
            tenant_id=tenant.id, identifier=tenant.identifier, verified_at=self._clock()
        )
        try:
            with scratch_directory(self._data, ".verifying-") as scratch:
                name = replica_name(tenant.identifier, tenant.id)
                source = self._reader.prepare(name, scratch)
                if live.exists():
                    found = await self._compare(found, source, live, scratch, tenant.is_active)
                else:
                    found = await self._restore_alone(found, source, scratch)
        except _Unproven as reason:
            found = attrs.evolve(found, problem=str(reason))
        except ReplicationError as error:
            found = attrs.evolve(found, problem=str(error))
        except (OSError, apsw.Error) as error:
            words = getattr(error, "strerror", None) or str(error)
            found = attrs.evolve(found, problem=f"it could not be verified: {words}")
        return attrs.evolve(
            found, verified_at=self._clock(), seconds=round(trio.current_time() - began, 3)
        )

    # -- one tenant ------------------------------------------------------------------------------

    async def _restore_alone(
        self, found: Verification, source: TenantReplica, scratch: Path
    ) -> Verification:
        """Verify the replica of a tenant whose database is not on this machine."""
        files = await source.list_files()
        if not files:
            return attrs.evolve(found, skipped="it has no database yet")
        self._check_space(scratch, sum(file.bytes for file in files if file.is_snapshot))
        restored, found = await self._restore(found, source, scratch, txid=None)
        await _in_thread(partial(read_file, restored))
        return attrs.evolve(found, content=Comparison.ALONE)

    async def _compare(
        self,
        found: Verification,
        source: TenantReplica,
        live: Path,
        scratch: Path,
        active: bool,
    ) -> Verification:
        self._check_space(scratch, os.stat(live).st_size)
        moment = await self._choose_moment(live, active)
        try:
            txid = moment.txid if moment.exact else None
            restored, found = await self._restore(found, source, scratch, txid=txid)
            _check_position(found, moment)
            copy = await _in_thread(partial(read_file, restored))
            original = await _in_thread(moment.snapshot.read)
        finally:
            moment.snapshot.close()
        difference = original.difference(copy)
        if difference is None:
            return attrs.evolve(found, content=Comparison.IDENTICAL)
        if moment.exact:
            raise _Unproven(f"the restored database differs from the live one in {difference}")
        if moment.txid is None:
            self._check_age(found, moment, difference, active)
        return attrs.evolve(found, content=Comparison.BUSY)

    def _check_age(
        self, found: Verification, moment: _Moment, difference: str, active: bool
    ) -> None:
        """Raise unless the difference may be a recent write that is not synced yet."""
        behind = moment.written_at - (found.as_of or 0.0)
        # A younger difference may be a recent write.
        if behind > self._sync_seconds:
            who = (
                "and no replicator answers"
                if active
                else "which did not change after its suspension"
            )
            raise _Unproven(
                f"the replica lags {behind:.0f} s behind the live database, {who}: it differs in "
                f"{difference}"
            )

    async def _restore(
        self, found: Verification, source: TenantReplica, scratch: Path, *, txid: int | None
    ) -> tuple[Path, Verification]:
        files = await source.list_files()
        reason = replica.why_impossible(files, None)
        if reason is not None:
            raise _Unproven(f"nothing can be restored: {reason}")
        if txid is None:
            point = await source.plan()
            txid_found, as_of = point.txid, point.as_of
        else:
            # Reports an emptied target with a clear message; a restore without files would not.
            held = replica.newest_txid(files)
            if held < txid:
                raise _Unproven(_position_problem(held, txid))
            as_of = replica.newest_time(file for file in files if file.last_txid <= txid) or 0.0
            txid_found = txid
        restored = scratch / "restored.db"
        await source.restore(restored, txid=txid)
        return restored, attrs.evolve(
            found,
            txid=txid_found,
            as_of=as_of,
            bytes=restored.stat().st_size,
            begins_at=replica.earliest_snapshot(files),
            mark=replica.earliest_snapshot(files, self._clock() - self.retention / 2),
        )

    # -- the live database -----------------------------------------------------------------------

    async def _choose_moment(self, live: Path, active: bool) -> _Moment:
        """Open the live database at a moment that the target has, as exactly as possible."""
        control = await self._control() if active else None
        if control is None:
            return await self._open(live, None, exact=False)
        first = await _synced(control, live, self._sync_seconds)
        before = first
        for _ in range(_ATTEMPTS):
            moment = await self._open(live, first.txid, exact=False)
            try:
                after = await _synced(control, live, self._sync_seconds)
            except BaseException:
                moment.snapshot.close()
                raise
            # Nothing was written between the two syncs, so the snapshot between them is exactly
            # this transaction.
            if before.txid == after.txid and moment.snapshot.settled:
                return attrs.evolve(moment, txid=after.txid, exact=True)
            moment.snapshot.close()
            before = after
        return await self._open(live, first.txid, exact=False)

    async def _open(self, live: Path, txid: int | None, *, exact: bool) -> _Moment:
        snapshot = await run_in_thread(Snapshot, live)
        return _Moment(snapshot, txid, exact, _written_at(live))

    async def _control(self) -> ControlClient | None:
        """Return the control socket of a replicator that answers, None without one."""
        try:
            path = control_socket_path(os.fspath(self._directory))
            control = ControlClient(path)
            await control.info()
        except ReplicatorError:
            await trio.lowlevel.checkpoint()
            return None
        return control

    @staticmethod
    def _check_space(scratch: Path, size: int) -> None:
        """Raise if the restore would fill the disk, which also stores deliveries."""
        free = shutil.disk_usage(scratch).free
        if free < size * 1.2 + _SPARE_BYTES:
            raise _Unproven(
                f"there is not enough space to restore {size} bytes into {scratch.parent}, where "
                f"{free} "
                "are free: free some space"
            )


class _Unproven(Exception):
    """The replica could not be verified; the message has the reason."""


async def _synced(control: ControlClient, live: Path, seconds: int) -> SyncResult:
    """Sync the database, so that everything written by now is at the target."""
    wanted = 0
    for _ in range(_ATTEMPTS):
        try:
            result = await control.sync(os.fspath(live), seconds=seconds)
        except ReplicatorError as error:
            raise _Unproven(
                f"the replica lags: the replicator cannot bring it up to date: {error}"
            ) from error
        wanted = wanted or result.txid or 0
        # During writes, its two numbers differ: the first may be newer than the sync.
        if (result.replicated_txid or 0) >= wanted > 0:
            return attrs.evolve(result, txid=result.replicated_txid)
    raise _Unproven(
        f"the replica lags: the target has transaction {result.replicated_txid or 0} of {wanted}"
    )


def _check_position(found: Verification, moment: _Moment) -> None:
    if moment.txid is not None and (found.txid or 0) < moment.txid:
        raise _Unproven(_position_problem(found.txid or 0, moment.txid))


def _position_problem(held: int, wanted: int) -> str:
    return (
        f"the target has lost data: it has transactions up to {held}, the replicator had "
        f"written {wanted} there"
    )


def _written_at(live: Path) -> float:
    times = [live.stat().st_mtime]
    log = live.with_name(f"{live.name}-wal")
    if log.exists():
        times.append(log.stat().st_mtime)
    return max(times)


async def _in_thread(read: Callable[[Callable[[], None]], Content]) -> Content:
    """Read a database in a thread; on cancellation, the thread stops at its next pause."""
    return await run_in_thread(read, check_cancelled)
