"""The restore of a tenant's database from its replica: to a file, or replacing the database.

A restore uses a directory next to its destination, is checked there, and is renamed at the end, so
the destination is complete at any moment.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import trio

from ..base.executor import call_loop, check_cancelled, run_in_thread
from ..base.opener import sync_path
from ..base.times import readable
from ..errors import ReplicatorError, RestoreError, SdkError
from ..records.tenants import AuditAction, AuditRecord, Tenant, TenantStatus, Transition
from ..tenants.databases import SIDE_FILES
from ..tenants.service import TenantService
from . import replica
from .control import ControlClient, control_socket_path
from .live_database import LockedDatabase, name_holders, read_file, take_in_time
from .manifest import replica_name
from .replica import (
    ReplicaReader,
    RestorePoint,
    TenantReplica,
    scratch_directory,
    work_alone,
)

#: Polling interval for the size of the growing file, in seconds.
_LOOK_SECONDS = 0.2


@attrs.frozen
class RestoreProgress:
    """Progress: ``step`` in words, and the number of bytes restored so far."""

    step: str
    bytes: int = 0


Report = Callable[[RestoreProgress], None]

#: Moves a restored file to its destination, given the state it has; blocks, in a thread.
Install = Callable[[Path, RestorePoint], None]


@attrs.frozen(kw_only=True)
class Restored:
    """A restored database: its replica, its last transaction with its time, and its path.

    ``as_of`` is in Unix seconds, truncated; the file contains everything up to then.
    """

    replica: str
    output: str
    txid: int
    as_of: float
    bytes: int
    seconds: float


class Restorer:
    """Restores databases; ``reader`` reads the target, ``report`` gets the progress."""

    def __init__(self, reader: ReplicaReader, *, report: Report = lambda _progress: None) -> None:
        self._reader = reader
        self._report = report

    async def check(self, name: str, output: Path, *, at: float | None = None) -> None:
        """Raise the errors of :meth:`restore` that the target's list of files shows.

        Args:
            name: the name of the replica.
            output: the replicator's configuration is written next to it temporarily.
            at: Unix seconds of a point in time; None: the newest state of the replica.
        """
        with scratch_directory(output.parent, _scratch_prefix(output)) as scratch:
            await self._choose(self._reader.prepare(name, scratch), at)

    async def restore(
        self,
        name: str,
        output: Path,
        *,
        at: float | None = None,
        overwrite: bool = False,
        install: Install | None = None,
    ) -> Restored:
        """Restore a tenant's database into ``output``, regardless of the tenant's status.

        Args:
            name: the name of the replica; the tenant may have been purged since.
            output: the file to make, in a directory that exists.
            at: Unix seconds of a point in time; None: the newest state of the replica.
            overwrite: replace ``output`` if it exists, and remove its side files.
            install: renames the restored file, which is next to ``output``.

        Raises:
            RestoreError: ``output`` exists, is open in another process, cannot be written, or does
                not fit on the disk; the replica is missing, damaged, or does not reach back to
                ``at``.
            ReplicatorError: the binary cannot be run, or the target cannot be reached.

        On cancellation, it ends the binary and leaves ``output`` unchanged.
        """
        began = trio.current_time()
        output = _checked(output, overwrite=overwrite)
        install = install or partial(_install, output=output, overwrite=overwrite)
        try:
            with scratch_directory(output.parent, _scratch_prefix(output)) as scratch:
                source = self._reader.prepare(name, scratch)
                point = await self._choose(source, at)
                restored = scratch / "restored.db"
                await self._fetch(source, restored, at)
                size = restored.stat().st_size
                await run_in_thread(_settle, restored, point, install)
        except OSError as error:
            raise RestoreError(
                f"{output} cannot be written ({error.strerror}); make its directory writable for "
                "this user, or choose another --output"
            ) from error
        return Restored(
            replica=name,
            output=os.fspath(output),
            txid=point.txid,
            as_of=point.as_of,
            bytes=size,
            seconds=trio.current_time() - began,
        )

    async def _choose(self, source: TenantReplica, at: float | None) -> RestorePoint:
        """Return the state to restore, or raise why it is unavailable."""
        self._report(RestoreProgress("reading the list of the replica's files"))
        files = await source.list_files()
        # Checked before the restore: the binary's errors do not distinguish a missing replica from
        # a point in time that is too early.
        reason = replica.why_impossible(files, at)
        if reason is not None:
            raise RestoreError(f"nothing can be restored: {reason}; {_ADVICE}")
        point = await source.plan(at=at)
        missed = replica.find_gap(files, point, at)
        if missed is not None:
            raise RestoreError(
                f"the replica is damaged: after transaction {point.txid} a file is missing, so "
                "that point in time cannot be restored; choose an earlier or a later one"
            )
        return point

    async def _fetch(self, source: TenantReplica, restored: Path, at: float | None) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, restored)
            await source.restore(restored, at=at)
            nursery.cancel_scope.cancel()

    async def _watch(self, restored: Path) -> None:
        growing = restored.with_name(f"{restored.name}.tmp")
        while True:
            self._report(_progress(growing, restored))
            await trio.sleep(_LOOK_SECONDS)


def _progress(growing: Path, restored: Path) -> RestoreProgress:
    """Return the replicator's progress: it renames a file once it is complete."""
    for step, file in (("checking", restored), ("restoring", growing)):
        with suppress(OSError):
            return RestoreProgress(step, file.stat().st_size)
    return RestoreProgress("restoring")


_ADVICE = (
    "a replica is kept for Sdk:MultiTenant:FileDb:Replication:RetentionDays; check that the "
    "tenant and the target are the right ones"
)


def _checked(output: Path, *, overwrite: bool) -> Path:
    """Return the output as an absolute path, if it may be written."""
    output = output.absolute()
    _refuse_existing(output, overwrite=overwrite)
    return output


def _refuse_existing(output: Path, *, overwrite: bool) -> None:
    if not output.parent.is_dir():
        raise RestoreError(f"the directory {output.parent} does not exist: create it first")
    if output.is_dir():
        raise RestoreError(f"{output} is a directory: name a file")
    for suffix in ("", *SIDE_FILES):
        found = output.with_name(output.name + suffix)
        if os.path.lexists(found) and not overwrite:
            raise RestoreError(
                f"{found} exists and is not overwritten: choose another --output, or use --force"
            )


def _scratch_prefix(output: Path) -> str:
    return f".{output.name}.restoring-"


def _settle(restored: Path, point: RestorePoint, install: Install) -> None:
    # Readable by no one else, whatever mode the replicator has set.
    restored.chmod(0o600)
    # Before the rename: after a power cut, an incomplete file is worse than none.
    sync_path(restored)
    install(restored, point)


def _install(restored: Path, _: RestorePoint, *, output: Path, overwrite: bool) -> None:
    """Give the restored file its name; an older one goes with its side files."""
    if overwrite:
        with LockedDatabase.taken(output) as held:
            if held is None:
                raise RestoreError(
                    f"{output} is not replaced: {name_holders(output)} has it open; close it there"
                )
            held.replace_by(restored)
        return
    # Unlike a rename, a hard link never replaces a file that was created meanwhile.
    try:
        os.link(restored, output)
    except FileExistsError:
        _refuse_existing(output, overwrite=False)
    except OSError:  # a file system without links
        restored.rename(output)
    sync_path(output.parent)


# In place, next to a running daemon: suspend the tenant; lock its database once no process has it
# open; restore the replica next to it, check it, compare the two; rename; reactivate the tenant.
# Other processes notice by the tenant's status in the store, which a daemon sees within half a
# second, and by SQLite's lock.  If the process is killed at any of these steps, the tenant stays
# suspended, with the complete old or new database. The next attempt only needs to know whether the
# tenant was active before, and reads that from the audit trail: the suspension has the reason of
# this command.

#: The beginning of the reason of our suspensions in the audit trail.
REASON: Final = "replication restore --in-place"

#: Name of the lock file of a running restore, in the directory of the databases.
LOCK_NAME: Final = "in-place.lock"

#: Time for other processes to close the database after the suspension, in seconds: the daemon
#: closes it within a second, a replicator after its debounce window and a last sync.
DEFAULT_WAIT_SECONDS: Final = 60.0

#: Seconds between two attempts to sync the database to the target.
_SYNC_AGAIN_SECONDS = 0.2

#: Time for a replicator to sync the database to the target, in seconds.
_SYNC_SECONDS = 20.0

#: Time for a failed or cancelled restore to reactivate the tenant, in seconds.
_REACTIVATE_SECONDS = 10.0

_PAGE = 500

_TRANSITIONS = frozenset(AuditAction(each.value) for each in Transition)


@attrs.frozen(kw_only=True)
class Wish:
    """A request to restore: its content, actor and reason.

    Attributes:
        at: Unix seconds of a point in time; None: the newest state of the replica.
        discard_newer: replace the database even if the newest state of the replica lacks some of
            its data.
        keep: a new file for the replaced database; None: it is not kept.
        reason: for the audit trail and messages.
        actor: the person or program, for the audit trail.
        bypass_email_verification: as for :meth:`~sdk_trio.tenants.TenantService.suspend`.
        wait_seconds: how long others may have the database open after the suspension.
    """

    at: float | None = None
    discard_newer: bool = False
    keep: Path | None = None
    reason: str | None = None
    actor: str
    bypass_email_verification: bool = False
    wait_seconds: float = DEFAULT_WAIT_SECONDS

    @property
    def drops_nothing(self) -> bool:
        """Whether a database that has more data than the replica must be kept."""
        return self.at is None and not self.discard_newer

    @property
    def audit_reason(self) -> str:
        """The reason of both transitions."""
        return REASON if self.reason is None else f"{REASON}: {self.reason}"


@attrs.frozen
class RestoredInPlace:
    """The result: ``kept`` is whether the old database is in ``Wish.keep``."""

    restored: Restored
    reactivated: bool
    kept: bool


class InPlaceRestorer:
    """Restores databases in place.

    Args:
        restorer: restores the replicas.
        tenants: the tenants' service; it need not be running.
        notice: called with one line about each step and each wait.
    """

    def __init__(
        self, restorer: Restorer, tenants: TenantService, *, notice: Callable[[str], None]
    ) -> None:
        self._restorer = restorer
        self._tenants = tenants
        self._notice = notice

    async def restore(self, tenant: Tenant, file: Path, wish: Wish) -> RestoredInPlace:
        """Restore the database ``file`` of a tenant; reactivate it if it was active before.

        Raises:
            TenantError: the tenant is active and cannot be suspended; nothing was changed.
            StoreLockedError: another restore in place is running.
            RestoreError: the database stays open in another process; the replica lacks data of the
                database; or as for :meth:`Restorer.restore`. The old database is unchanged.
            ReplicatorError: as for :meth:`Restorer.restore`.

        If it is cancelled or fails before the new database is in place, the old one is unchanged,
        and the tenant is active again if it was.
        """
        if wish.keep is not None and wish.keep.exists():
            raise RestoreError(f"{wish.keep} exists and is not overwritten: choose another --keep")
        with work_alone(file.parent, LOCK_NAME, "restore in place"):
            # Detects most failures before anything is changed.
            await self._restorer.check(_name_of(tenant), file, at=wish.at)
            was_active = tenant.is_active or await self._is_suspended_by_us(tenant)
            try:
                if tenant.is_active:
                    if wish.drops_nothing and await run_in_thread(Path(file).exists):
                        await self._bring_up_to_date(file)
                    await self._suspend(tenant, wish)
                restored, kept = await self._replace(tenant, file, wish)
            except BaseException:
                if was_active:
                    # A previously active tenant must not stay suspended because of Ctrl-C.
                    with trio.move_on_after(_REACTIVATE_SECONDS, shield=True):
                        await self._try_to_reactivate(tenant, wish)
                raise
            if was_active:
                await self._reactivate(tenant, wish)
        return RestoredInPlace(restored, was_active, kept)

    async def _is_suspended_by_us(self, tenant: Tenant) -> bool:
        """Return whether a restore that was killed has suspended the tenant."""
        await trio.lowlevel.checkpoint()
        if tenant.status is not TenantStatus.SUSPENDED:
            return False
        last: AuditRecord | None = None
        position = 0
        while True:
            page = await self._tenants.audit(tenant.id, after_sequence=position, limit=_PAGE)
            for record in page:
                position = record.sequence
                if record.action in _TRANSITIONS:
                    last = record
            if len(page) < _PAGE:
                # The reason is the only trace that survives the death of the process that suspended
                # (ADR 34).
                return last is not None and (last.reason or "").startswith(REASON)

    async def _bring_up_to_date(self, file: Path) -> None:
        """Have a running replicator sync everything written so far.

        It may not know yet that the tenant is active. Later writes, until the suspension takes
        effect, are synced when it unregisters the database.
        """
        control = ControlClient(control_socket_path(os.fspath(file.parent)))
        if not await control.answers():
            return
        reported = False
        with trio.move_on_after(_SYNC_SECONDS):
            while True:
                try:
                    await control.sync(os.fspath(file))
                except ReplicatorError as error:
                    if not reported:
                        reported = True
                        self._notice(
                            f"waiting at most {_SYNC_SECONDS:g} s until the replica is up to date: "
                            f"{error}"
                        )
                    await trio.sleep(_SYNC_AGAIN_SECONDS)
                else:
                    return

    async def _suspend(self, tenant: Tenant, wish: Wish) -> None:
        await self._tenants.suspend(
            tenant,
            reason=wish.audit_reason,
            actor=wish.actor,
            bypass_email_verification=wish.bypass_email_verification,
        )
        self._notice(f"{tenant.identifier} is suspended")

    async def _reactivate(self, tenant: Tenant, wish: Wish) -> None:
        """Reactivate the tenant, unless its status was changed meanwhile."""
        now = await self._tenants.get(tenant)
        if now.status is TenantStatus.SUSPENDED:
            await self._tenants.reactivate(now, reason=wish.audit_reason, actor=wish.actor)
            self._notice(f"{tenant.identifier} is active again")

    async def _try_to_reactivate(self, tenant: Tenant, wish: Wish) -> None:
        await trio.lowlevel.checkpoint()
        try:
            await self._reactivate(tenant, wish)
        except SdkError as error:
            self._notice(
                f"{tenant.identifier} is still suspended ({error}): 'tenant reactivate' it"
            )

    async def _replace(self, tenant: Tenant, file: Path, wish: Wish) -> tuple[Restored, bool]:
        held = await self._take(file, wish.wait_seconds)
        kept = False

        def install(restored: Path, point: RestorePoint) -> None:
            nonlocal kept
            if wish.drops_nothing:
                unsure = _refuse_loss(held, restored, point)
                if unsure is not None:
                    call_loop(self._notice, unsure)
            kept = wish.keep is not None and held.copy_to(wish.keep)
            held.replace_by(restored)

        try:
            restored = await self._restorer.restore(
                _name_of(tenant), file, at=wish.at, overwrite=True, install=install
            )
        finally:
            held.release()
        return restored, kept

    async def _take(self, file: Path, seconds: float) -> LockedDatabase:
        """Take the database as soon as no other process has it open."""
        held = await take_in_time(
            file,
            seconds,
            lambda holders: self._notice(
                f"waiting at most {seconds:g} s: {holders} has {file} open"
            ),
        )
        if isinstance(held, str):
            raise RestoreError(
                f"{held} has {file} open, {seconds:g} s after the suspension, so it was not "
                "replaced; end that process, or wait longer (--wait)"
            )
        return held


def _name_of(tenant: Tenant) -> str:
    return replica_name(tenant.identifier, tenant.id)


def _refuse_loss(held: LockedDatabase, restored: Path, point: RestorePoint) -> str | None:
    """Refuse to drop data that the replica lacks; return why that is unknown, or None.

    Any difference counts: a row that was deleted, and is there in the replica, is a loss as well.

    Raises:
        RestoreError: the database is readable and has other content.
    """
    when = readable(point.as_of)
    present = held.read(check_cancelled)
    if present is None or not present.tables:
        return (
            f"{held.file} is damaged, missing or empty, so nothing was compared: what was written "
            f"after {when} may be missing"
        )
    difference = present.difference(read_file(restored, check_cancelled))
    if difference is None:
        return None
    raise RestoreError(
        f"{held.file} differs from the replica ({when}) in {difference}; it was "
        "not replaced, so that nothing is lost: with the tenant active, wait until 'replication "
        "status' says Healthy, and repeat; or name a moment with --at; or drop the difference with "
        "--discard-newer (--keep F copies the database before)"
    )
