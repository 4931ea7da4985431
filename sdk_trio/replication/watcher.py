"""Keeps the manifest at the active tenants' databases, and the replicator at the manifest.

Nothing is remembered of what happened: each look asks the store and the directory how things are.
So no event can be missed, a restart needs no catching up of its own, and changes that undo each
other within a window come to nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import trio

from ..base.logs import get_logger
from ..errors import SdkError
from ..tenants.feed import TransitionFeed
from .database_finder import TenantList, active_tenants, databases_of
from .debounce import Debounce
from .directory_scanner import DirectoryScanner
from .manifest import TenantDatabaseFile
from .manifest_writer import ManifestWriter
from .ports import Reloader

_log = get_logger("replication")

#: How often the directory is looked at, in seconds. 5000 databases cost nothing then while none
#: comes or goes, where inotify would need a library of its own and does not exist elsewhere.
SCAN_SECONDS = 1.0

#: When what failed is tried again, in seconds.
RETRY_SECONDS = 5.0

#: When a replicator that could not be told is told again, in seconds.
RETELL_SECONDS = 30.0


class WatchedTenants(TenantList, Protocol):
    """The part of the tenants' service that is used here."""

    def subscribe(self, *, after: int = 0) -> AbstractContextManager[TransitionFeed]:
        """Return a block with a feed that wakes at every change of a tenant."""
        ...


class Watcher:
    """Watches database files and tenants, and regenerates the manifest (spec 2.7).

    Args:
        tenants: the tenants' service, whose ``run`` looks for changes of other processes.
        directory: of the tenants' databases.
        render: makes the manifest of databases.
        writer: of the manifest.
        reloader: told after each change of the manifest, and once at the start: a process that
            was killed may have written a manifest without telling.
        window: ``AutoRegenerateDebounceWindow`` in seconds.
        scan_seconds: how often the directory is looked at.
        retry_seconds: when a failed write is tried again.
        retell_seconds: when a replicator that could not be told is told again.
    """

    def __init__(
        self,
        tenants: WatchedTenants,
        directory: Path,
        *,
        render: Callable[[Sequence[TenantDatabaseFile]], str],
        writer: ManifestWriter,
        reloader: Reloader,
        window: float,
        scan_seconds: float = SCAN_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        retell_seconds: float = RETELL_SECONDS,
    ) -> None:
        self._tenants = tenants
        self._directory = directory.absolute()
        self._scanner = DirectoryScanner(self._directory)
        self._render = render
        self._writer = writer
        self._reloader = reloader
        self._debounce = Debounce(window)
        self._scan_seconds = scan_seconds
        self._retry_seconds = retry_seconds
        self._retell_seconds = retell_seconds
        self._limiter = trio.CapacityLimiter(1)
        self._active: frozenset[str] | None = None
        self._seen: Mapping[str, str] | None = None
        self._applied: Mapping[str, str] | None = None
        self._told = False
        self._complaint = ""
        #: How often the manifest was written.
        self.regenerations: int = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled; started when the manifest was brought up to date, or could not be.

        Cancelled, a write that has begun is finished; the replicator may not have been told of it,
        which the next start makes good.
        """
        # Before the first look, so that no change falls between the two.
        with self._tenants.subscribe() as feed:
            self._debounce.postpone(trio.current_time(), 0)
            await self._look()
            task_status.started()
            looked = trio.current_time()
            while True:
                with trio.move_on_at(min(looked + self._scan_seconds, self._debounce.due_at)):
                    await feed.wait()
                    # Only noted: a burst of changes is not a burst of looks.
                    self._active = None
                    self._debounce.note(trio.current_time())
                    continue
                await self._look()
                looked = trio.current_time()

    async def _look(self) -> None:  # noqa: ASYNC910 - a failure was one of an await
        """See what is there, and apply it if that is due."""
        try:
            seen = await self._see()
            if seen != self._seen:
                self._seen = seen
                self._debounce.note(trio.current_time())
            if self._debounce.take(trio.current_time()):
                await self._apply(seen)
        except (SdkError, ValueError) as error:
            self._debounce.postpone(trio.current_time(), self._retry_seconds)
            self._complain(str(error))
        else:
            self._complaint = ""

    async def _see(self) -> Mapping[str, str]:
        """Return the active tenants whose file is there, with its identity."""
        if self._active is None:
            self._active = await active_tenants(self._tenants)
        files = await trio.to_thread.run_sync(self._scanner.scan, limiter=self._limiter)
        return {tenant_id: files[tenant_id] for tenant_id in files if tenant_id in self._active}

    async def _apply(self, seen: Mapping[str, str]) -> None:
        if self._told and seen == self._applied:
            await trio.lowlevel.checkpoint()
            return
        before = self._applied or {}
        databases = databases_of(self._directory, seen)
        self._told = False
        if await trio.to_thread.run_sync(self._write, databases, limiter=self._limiter):
            self.regenerations += 1
            _log.info(
                "replication.manifest_written",
                path=str(self._writer.path),
                databases=len(databases),
                added=len(seen.keys() - before.keys()),
                removed=len(before.keys() - seen.keys()),
                replaced=sum(before.get(name, seen[name]) != seen[name] for name in seen),
            )
        self._applied = seen
        self._told = await self._reloader.reload(databases)
        if not self._told:
            self._debounce.postpone(trio.current_time(), self._retell_seconds)

    def _write(self, databases: Sequence[TenantDatabaseFile]) -> bool:
        return self._writer.write(self._render(databases))

    def _complain(self, complaint: str) -> None:
        """Log what is wrong, once until it is something else or has passed."""
        if complaint != self._complaint:
            self._complaint = complaint
            _log.error(
                "replication.regeneration_failed", error=complaint, retry_in=self._retry_seconds
            )
