"""Restores one tenant's database from its replica into a file.

It reads the replica alone, asks no running program and touches no database in use. The file is made
and checked in a directory of its own beside the output and gets its name last, so that a reader of
the output sees all of it. If it is cancelled or fails, nothing of it is left.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import attrs
import trio

from ..errors import RestoreError
from ..tenants.databases import SIDE_FILES
from . import replica
from .held_database import HeldDatabase, name_holders
from .replica import ReplicaReader, RestorePoint, TenantReplica
from .scratch import scratch_directory, sync_to_disk

#: Time between two looks at the growing file, in seconds.
_LOOK_SECONDS = 0.2


@attrs.frozen
class RestoreProgress:
    """Progress: ``step`` for people, and how many bytes of the database are there."""

    step: str
    bytes: int = 0


Report = Callable[[RestoreProgress], None]

#: Gives a restored file its place, and is told which state it holds; blocks, in a thread.
Install = Callable[[Path, RestorePoint], None]


@attrs.frozen(kw_only=True)
class Restored:
    """A restored database: its last transaction, when that was, and where the file is.

    ``as_of`` are Unix seconds, cut to whole ones; up to then everything is in the file.
    """

    tenant_id: str
    output: str
    txid: int
    as_of: float
    bytes: int
    seconds: float


class Restorer:
    """Restores databases; ``reader`` knows the target, ``report`` is told of the progress."""

    def __init__(self, reader: ReplicaReader, *, report: Report = lambda _progress: None) -> None:
        self._reader = reader
        self._report = report

    async def check(self, tenant_id: str, output: Path, *, at: float | None = None) -> None:
        """Raise what :meth:`restore` would, as far as the target's list of files tells it.

        Args:
            tenant_id: the tenant's id.
            output: beside it the replicator's configuration is for a moment.
            at: Unix seconds of a point in time; None: the newest state of the replica.
        """
        with scratch_directory(output.parent, _scratch_prefix(output)) as scratch:
            await self._choose(self._reader.prepare(tenant_id, scratch), at)

    async def restore(
        self,
        tenant_id: str,
        output: Path,
        *,
        at: float | None = None,
        overwrite: bool = False,
        install: Install | None = None,
    ) -> Restored:
        """Restore a tenant's database into ``output``, whatever the tenant's status is.

        Args:
            tenant_id: the tenant's id; the tenant may have been purged since.
            output: the file to make, in a directory that exists.
            at: Unix seconds of a point in time; None: the newest state of the replica.
            overwrite: replace ``output`` if it exists, and remove its side files.
            install: gives the restored file, which lies beside ``output``, its name.

        Raises:
            RestoreError: ``output`` exists, somebody has it open, cannot be written, or does not
                fit the disk; the replica is missing, damaged, or does not reach back to ``at``.
            ReplicatorError: the binary cannot be run, or the target cannot be reached.

        Cancelled, it ends the binary and leaves ``output`` as it was.
        """
        began = trio.current_time()
        output = _checked(output, overwrite=overwrite)
        install = install or partial(_install, output=output, overwrite=overwrite)
        try:
            with scratch_directory(output.parent, _scratch_prefix(output)) as scratch:
                source = self._reader.prepare(tenant_id, scratch)
                point = await self._choose(source, at)
                restored = scratch / "restored.db"
                await self._fetch(source, restored, at)
                size = restored.stat().st_size
                await trio.to_thread.run_sync(_settle, restored, point, install)
        except OSError as error:
            raise RestoreError(
                f"{output} cannot be written ({error.strerror}); make its directory writable for "
                "this user, or choose another --output"
            ) from error
        return Restored(
            tenant_id=tenant_id,
            output=os.fspath(output),
            txid=point.txid,
            as_of=point.as_of,
            bytes=size,
            seconds=trio.current_time() - began,
        )

    async def _choose(self, source: TenantReplica, at: float | None) -> RestorePoint:
        """Return what will be restored, or raise why that cannot be had."""
        self._report(RestoreProgress("looking at the replica"))
        files = await source.list_files()
        # Asked before the restore: the binary's own errors do not tell a missing replica from a
        # point in time that is too early.
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
            self._report(_look(growing, restored))
            await trio.sleep(_LOOK_SECONDS)


def _look(growing: Path, restored: Path) -> RestoreProgress:
    """Say how far the replicator has come: it gives a file its name when it is whole."""
    for step, file in (("checking", restored), ("restoring", growing)):
        with suppress(OSError):
            return RestoreProgress(step, file.stat().st_size)
    return RestoreProgress("restoring")


_ADVICE = (
    "a replica keeps what Sdk:MultiTenant:FileDb:Replication:RetentionDays says; check that the "
    "tenant and the target are the right ones"
)


def _checked(output: Path, *, overwrite: bool) -> Path:
    """Return the output as an absolute path, if it may be written."""
    output = output.absolute()
    _refuse_existing(output, overwrite=overwrite)
    return output


def _refuse_existing(output: Path, *, overwrite: bool) -> None:
    if not output.parent.is_dir():
        raise RestoreError(f"the directory {output.parent} does not exist: make it first")
    if output.is_dir():
        raise RestoreError(f"{output} is a directory: name a file")
    for suffix in ("", *SIDE_FILES):
        found = output.with_name(output.name + suffix)
        if os.path.lexists(found) and not overwrite:
            raise RestoreError(
                f"{found} exists and is not overwritten: choose another --output, or say --force"
            )


def _scratch_prefix(output: Path) -> str:
    return f".{output.name}.restoring-"


def _settle(restored: Path, point: RestorePoint, install: Install) -> None:
    # For nobody else to read, whatever mode the replicator has given it.
    restored.chmod(0o600)
    # Before it gets its name: a name that leads to half a file after a loss of power is worse than
    # none.
    sync_to_disk(restored)
    install(restored, point)


def _install(restored: Path, _: RestorePoint, *, output: Path, overwrite: bool) -> None:
    """Give the restored file its name; an older one goes with its side files."""
    if overwrite:
        with HeldDatabase.taken(output) as held:
            if held is None:
                raise RestoreError(
                    f"{output} is not replaced: {name_holders(output)} has it open; close it there"
                )
            held.replace_by(restored)
        return
    # Unlike a rename, a hard link never replaces a file that has appeared meanwhile.
    try:
        os.link(restored, output)
    except FileExistsError:
        _refuse_existing(output, overwrite=False)
    except OSError:  # a file system without links
        restored.rename(output)
    sync_to_disk(output.parent)
