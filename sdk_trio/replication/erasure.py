"""The erasure of a purged tenant's replica.

The replicator's binary deletes nothing on request, and a purged tenant is not in its configuration,
so retention does not remove the replica either. A replica in a directory is removed here. For every
other target the remaining path is reported, to be removed with the target's own tools: a client for
each target would mean five libraries for a command that runs a few times a year.
"""

import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from ..base.executor import run_in_thread
from ..config import Settings
from ..config.fields import ReplicaTargetType
from ..errors import ReplicationError
from ..tenants.databases import databases_directory
from ..tenants.purge import ReplicaHoldings
from .listing import list_directory, replica_location
from .live_database import take_in_time
from .manifest import replica_name, split_replica_name
from .replica import ReplicaReader, scratch_directory

#: Time for other processes to close the database, in seconds: a daemon closes that of a tenant that
#: is not active within a second, a replicator after its debounce window and a last sync.
WAIT_SECONDS: Final = 60.0


class ReplicaErasure:
    """The replicas of these settings; see :class:`~sdk_trio.tenants.purge.Replicas`.

    Args:
        settings: validated settings.
        environ: where the credentials' variables are.
        wait_seconds: how long other processes may have a database open.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        environ: Mapping[str, str] = os.environ,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._settings = settings
        self._options = settings.multi_tenant.file_db.replication
        self._environ = environ
        self._wait_seconds = wait_seconds

    @property
    def _is_local(self) -> bool:
        return self._options.replica_target_type is ReplicaTargetType.LOCAL_DISK

    def holdings(self, tenant_id: str, identifier: str | None) -> ReplicaHoldings | None:
        """Return the location of the tenant's replica; None if it has none or replication is off.

        It does not query a remote target, so the location may turn out to be empty.
        """
        if not self._options.use_replication:
            return None
        if not self._is_local:
            name = replica_name(identifier or "*", tenant_id)
            return ReplicaHoldings(where=replica_location(self._options, name))
        # By id only: a purge may have forgotten the identifier.
        parent = Path(replica_location(self._options, ""))
        directory = next(parent.glob(replica_name("*", tenant_id)), None)
        if directory is None:
            return None
        where = os.fspath(directory)
        # An operator's link or file: it is reported, and not followed.
        if directory.is_symlink() or not directory.is_dir():
            return ReplicaHoldings(where=where, files=1, bytes=directory.lstat().st_size)
        files = [each for each in directory.rglob("*") if each.is_file()]
        size = sum(each.stat().st_size for each in files)
        return ReplicaHoldings(where=where, files=len(files), bytes=size)

    def ids(self) -> list[str]:
        """Return the ids of all tenants that have a replica in a directory of ours.

        Raises:
            ReplicatorError: the directory cannot be read.
        """
        if not self._options.use_replication or not self._is_local:
            return []
        found = map(split_replica_name, list_directory(replica_location(self._options, "")))
        return sorted(parts[1] for parts in found if parts is not None)

    @asynccontextmanager
    async def released(self, file: Path) -> AsyncIterator[str | None]:
        """Hold a database that no other process has open.

        It yields None, or the names of the processes that had it open all the time.
        """
        held = await take_in_time(file, self._wait_seconds)
        if isinstance(held, str):
            yield held
            return
        try:
            yield None
        finally:
            held.release()

    async def remove(self, tenant_id: str, identifier: str | None) -> str | None:
        """Remove the tenant's replica; return a description of what remains, or None."""
        found = await run_in_thread(self.holdings, tenant_id, identifier)
        if found is None:
            return None
        if self._is_local:
            try:
                return await run_in_thread(_remove_local, Path(found.where))
            except OSError as error:
                return f"the replica {found.where} cannot be removed ({error.strerror})"
        if identifier is None:
            return (
                f"the replica at {found.where}, if it exists: remove it with the target's own tools"
            )
        try:
            with scratch_directory(databases_directory(self._settings), ".purge-") as scratch:
                reader = ReplicaReader(self._settings, environ=self._environ)
                name = replica_name(identifier, tenant_id)
                files = await reader.prepare(name, scratch).list_files()
        except (ReplicationError, OSError) as error:
            return (
                f"the replica at {found.where}, if there is one: the target cannot be queried "
                f"({error}); remove this path with the target's own tools"
            )
        if not files:
            return None
        return (
            f"the replica at {found.where} ({len(files)} files, "
            f"{sum(each.bytes for each in files)} bytes): the replicator has no command that "
            "deletes; remove this path, all versions of it, with the target's own tools"
        )


def _remove_local(replica: Path) -> str | None:
    """Remove a directory, a file or a link; return a note about the target of a link."""
    if replica.is_symlink():
        # The target of a link was made by an operator for purposes that we do not know.
        target = replica.resolve()
        replica.unlink()
        if not target.exists():
            return None
        return (
            f"{target}, to which the replica {replica} was a link: only the link was "
            "removed; check whether its content must be removed"
        )
    if replica.is_dir():
        shutil.rmtree(replica)
    else:
        replica.unlink()
    return None
