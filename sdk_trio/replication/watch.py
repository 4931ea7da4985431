"""The watcher: writes the manifest of the active tenants' databases and notifies the replicator.

It keeps no history: each poll reads the current state of the store and the directory. So no event
can be missed, a restart needs no catch-up, and changes that cancel out within a window have no
effect.
"""

import ctypes
import math
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import trio

from ..base.clock import monotonic
from ..base.executor import run_in_thread
from ..base.logs import get_logger
from ..config import Settings
from ..errors import ReplicationError, SdkError
from ..records.tenants import Tenant, TenantStatus
from ..tenants.databases import databases_directory
from ..tenants.feed import TransitionFeed
from .control import control_socket_path
from .manifest import (
    ManifestWriter,
    TenantDatabaseFile,
    is_large_fleet,
    render_manifest,
    replica_name,
)

# linux/fcntl.h and linux/stat.h
_AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_STATX_BTIME: Final = 0x800
_STATX_BYTES: Final = 256
_BTIME_OFFSET: Final = 0x50

_SUFFIX = ".db"


# A replicator keeps its open file, even if another file takes the name. So each file has an
# identity: its inode and creation time. The inode is not enough, because file systems reuse free
# inodes at once. Writes, checkpoints and VACUUM change neither. Python reads the creation time only
# on macOS and Windows, so on Linux statx is called.


def read_identity(path: str, inode: int) -> str:
    """Return the identity of a file; blocks for some microseconds.

    Args:
        path: the file's; a link is not followed.
        inode: its number.

    Returns:
        Digits and one hyphen. If the file system keeps no creation time, only the inode number.

    Raises:
        OSError: the file no longer exists.
    """
    return f"{inode}-{_created(path) or 0:x}"


def _find_statx() -> Callable[..., Any] | None:
    try:
        return ctypes.CDLL(None, use_errno=True).statx
    except (OSError, TypeError, AttributeError):
        return None


_statx = _find_statx()


def _created(path: str) -> int | None:
    """Return the time of a file's creation in nanoseconds; None if the system does not keep it."""
    if _statx is None:
        found = os.stat(path, follow_symlinks=False)
        seconds = getattr(found, "st_birthtime", None)
        return None if seconds is None else int(seconds * 1_000_000_000)
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, answer):
        number = ctypes.get_errno()
        if os.path.lexists(path):
            return None  # a kernel without this call
        raise OSError(number, os.strerror(number), path)
    (mask,) = struct.unpack_from("=I", answer, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BTIME_OFFSET)
    return seconds * 1_000_000_000 + nanoseconds if mask & _STATX_BTIME else None


class TenantList(Protocol):
    """The part of the tenants' service that is used here."""

    async def all(self, *, status: TenantStatus | None = None) -> Sequence[Tenant]:
        """List every tenant of a status by identifier."""
        ...


def database_files(directory: Path) -> Mapping[str, str]:
    """Return the file ``NAME.db`` of each name in ``directory``, as its identity; blocks.

    Links are skipped: a database with two names would be replicated twice, which corrupts the
    replica. One scan of 5000 databases with their logs takes 50 ms.

    Raises:
        ReplicationError: the directory cannot be read. A missing directory counts as empty.
    """
    try:
        with os.scandir(directory) as entries:
            found = {}
            for entry in entries:
                if entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        identity = read_identity(entry.path, entry.inode())
                        found[entry.name.removesuffix(_SUFFIX)] = identity
            return found
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ReplicationError(
            f"the directory {directory} of the tenants' databases cannot be read "
            f"({error.strerror}); make it readable for this user"
        ) from error


async def find_databases(tenants: TenantList, directory: Path) -> list[TenantDatabaseFile]:
    """Return the databases to replicate now, by identifier.

    Args:
        tenants: lists the tenants.
        directory: of the tenants' databases.

    Raises:
        StoreUnavailableError: the store cannot be read now.
        ReplicationError: the directory cannot be read.
    """
    active = await tenants.all(status=TenantStatus.ACTIVE)
    files = await run_in_thread(database_files, directory)
    return databases_of(directory, files, active)


def databases_of(
    directory: Path, files: Mapping[str, str], active: Sequence[Tenant]
) -> list[TenantDatabaseFile]:
    """Return the entries of the active tenants' databases, in the order of the tenants.

    Args:
        directory: where they are.
        files: the identity of each file by the tenant's id.
        active: the active tenants; those without a file are skipped.
    """
    return [
        TenantDatabaseFile(
            replica_name(tenant.identifier, tenant.id),
            os.path.abspath(directory / f"{tenant.id}{_SUFFIX}"),
            files[tenant.id],
        )
        for tenant in active
        if tenant.id in files
    ]


#: A directory's inode and its times: mtime, which ``rsync -a`` and ``tar`` set back to an old
#: value, and ctime, which no program can set.
_State = tuple[int, int, int]

#: A directory's time has steps of some milliseconds, so only an older time proves that nothing has
#: changed since.
_SETTLED_SECONDS = 1.0

#: A directory is read again after this time in any case: not every file system keeps its times.
_READ_AGAIN_SECONDS = 30.0

_log = get_logger("replication")

#: Polling interval for the directory, in seconds. While no database is added or removed, a poll is
#: one ``stat``, even with 5000 databases. inotify would need a library and exists on Linux only.
SCAN_SECONDS = 1.0

#: Time after which a failed write is retried, in seconds.
RETRY_SECONDS = 5.0

#: Seconds after which a replicator that did not reload is asked again.
RETELL_SECONDS = 30.0

#: Sync interval that the warning about a large fleet suggests, in seconds: each busy database makes
#: a request to the target every interval, and object stores bill them.
_FLEET_SYNC_SECONDS = 10


class ManifestRenderer:
    """Renders manifests, and warns once of a fleet that is large for its sync interval."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._warned = False

    def __call__(self, databases: Sequence[TenantDatabaseFile]) -> str:
        """Return the manifest of these databases; see :func:`render_for`."""
        options = self._settings.multi_tenant.file_db.replication
        sync = options.sync_interval_seconds
        costly = is_large_fleet(options, len(databases)) and sync < _FLEET_SYNC_SECONDS
        if costly and not self._warned:
            self._warned = True
            _log.warning(
                "replication.fleet_is_large",
                databases=len(databases),
                detail=f"each busy database makes a request every {sync} s: SyncIntervalSeconds of "
                f"{_FLEET_SYNC_SECONDS} or more costs less",
            )
        return render_for(self._settings, databases)


def render_for(settings: Settings, databases: Sequence[TenantDatabaseFile]) -> str:
    """Return the manifest of these databases, with the control socket that reports their lag.

    Args:
        settings: with ``UseReplication``; relative paths start in the current directory.
        databases: those of the active tenants.

    Raises:
        ReplicatorError: the socket's path would be too long.
        ValueError: as for :func:`~sdk_trio.replication.manifest.render_manifest`.
    """
    options = settings.multi_tenant.file_db.replication
    directory = str(databases_directory(settings).absolute())
    return render_manifest(
        options,
        databases,
        # The replicator may be started in another directory, where a relative path would differ.
        working_directory=os.getcwd(),
        socket_path=control_socket_path(directory),
    )


class Reloader(Protocol):
    """Makes a replicator use a new manifest: by a signal, or as its supervisor."""

    async def reload(self, databases: Sequence[TenantDatabaseFile]) -> bool:
        """Make the replicator replicate exactly these databases, which the manifest already has.

        Returns whether that succeeded. If not, the reason was logged, and the watcher retries later
        with the databases of that time. Repeating the same databases is not an error.

        Raises nothing but ``Cancelled``.
        """
        ...


class Debounce:
    """Collapses a burst of changes into one, which is due a window after the first of them.

    A window after the *last* change would never end while changes keep coming.

    Args:
        window: seconds from the first change of a burst until it is due; 0: at once.
    """

    def __init__(self, window: float) -> None:
        self.window = window
        self.due_at: float = math.inf

    def note(self, now: float) -> None:
        """Note a change: it is due with the first one since the last :meth:`take`.

        A postponed change then also becomes due within a window.
        """
        self.due_at = min(self.due_at, now + self.window)

    def postpone(self, now: float, seconds: float) -> None:
        """Make a failed change due again ``seconds`` after ``now``, or with the next change."""
        self.due_at = now + seconds

    def take(self, now: float) -> bool:
        """Return whether changes are due; they are then taken, and the next one opens a window."""
        if now < self.due_at:
            return False
        self.due_at = math.inf
        return True


class DirectoryScanner:
    """The databases in one directory, read again only when the directory has changed.

    Args:
        directory: of the tenants' databases.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found: Mapping[str, str] = {}
        self._state: _State | None = None
        self._read_at = float("-inf")

    def scan(self) -> Mapping[str, str]:
        """Return the result of :func:`database_files`; blocks.

        Raises:
            ReplicationError: the directory cannot be read.
        """
        state, now_ns = self._poll(), time.time_ns()
        fresh = monotonic() - self._read_at < _READ_AGAIN_SECONDS
        if fresh and state is not None and state == self._state:
            return self._found
        # The state is read first, so a change during the read is found by the next poll.
        self._read_at = monotonic()
        self._state = None
        self._found = database_files(self._directory)
        # A change within the resolution of the file system's clock leaves the time unchanged.
        if state is not None and now_ns - max(state[1:]) > _SETTLED_SECONDS * 1_000_000_000:
            self._state = state
        return self._found

    def _poll(self) -> _State | None:
        try:
            found = os.stat(self._directory)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


class WatchedTenants(TenantList, Protocol):
    """The part of the tenants' service that is used here."""

    def subscribe(self, *, after: int = 0) -> AbstractContextManager[TransitionFeed]:
        """Return a block with a feed that wakes at every change of a tenant."""
        ...


class Watcher:
    """Watches database files and tenants, and regenerates the manifest.

    Args:
        tenants: the tenants' service, whose ``run`` polls for changes by other processes.
        directory: of the tenants' databases.
        render: renders the manifest of databases.
        writer: writes the manifest.
        reloader: called after each change of the manifest, and once at the start, because a killed
            process may have written a manifest without a reload.
        window: ``AutoRegenerateDebounceWindow`` in seconds.
        scan_seconds: the polling interval of the directory.
        retry_seconds: seconds until a failed write is retried.
        renotify_seconds: seconds until a replicator is notified again after a failure.
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
        renotify_seconds: float = RETELL_SECONDS,
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
        self._renotify_seconds = renotify_seconds
        # Polls do not overlap, so a directory on a hanging disk blocks one thread only.
        self._limiter = trio.CapacityLimiter(1)
        self._active: Sequence[Tenant] | None = None
        self._files: Mapping[str, str] | None = None
        self._found: Sequence[TenantDatabaseFile] = ()
        self._seen: Sequence[TenantDatabaseFile] | None = None
        self._applied: Sequence[TenantDatabaseFile] | None = None
        self._notified = False
        self._complaint = ""
        #: Number of times that the manifest was written.
        self.regenerations: int = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled; started when the manifest was brought up to date, or could not be.

        On cancellation, a started write is finished; the replicator may not have been notified of
        it, which the next start does.
        """
        # Subscribed before the first poll, so that no change is missed in between.
        with self._tenants.subscribe() as feed:
            self._debounce.postpone(trio.current_time(), 0)
            await self._poll()
            task_status.started()
            looked = trio.current_time()
            while True:
                with trio.move_on_at(min(looked + self._scan_seconds, self._debounce.due_at)):
                    await feed.wait()
                    # Only noted here, so that a burst of changes does not cause a burst of polls.
                    self._active = None
                    self._debounce.note(trio.current_time())
                    continue
                await self._poll()
                looked = trio.current_time()

    async def _poll(self) -> None:
        """Compare the databases with the last poll, and apply a change that is due."""
        try:
            seen = await self._read_databases()
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

    async def _read_databases(self) -> Sequence[TenantDatabaseFile]:
        """Return the databases of the active tenants."""
        if self._active is None:
            self._active = await self._tenants.all(status=TenantStatus.ACTIVE)
            self._files = None
        files = await run_in_thread(self._scanner.scan, limiter=self._limiter)
        # The scanner returns the same object while the directory is unchanged.
        if files is not self._files:
            self._files = files
            self._found = databases_of(self._directory, files, self._active)
        return self._found

    async def _apply(self, seen: Sequence[TenantDatabaseFile]) -> None:
        if self._notified and seen == self._applied:
            return
        before = {file.path: file for file in self._applied or ()}
        now = {file.path: file for file in seen}
        self._notified = False
        if await run_in_thread(self._write, seen, limiter=self._limiter):
            self.regenerations += 1
            _log.info(
                "replication.manifest_written",
                path=str(self._writer.path),
                databases=len(seen),
                added=len(now.keys() - before.keys()),
                removed=len(before.keys() - now.keys()),
                replaced=sum(before.get(path, file) != file for path, file in now.items()),
            )
        self._applied = seen
        self._notified = await self._reloader.reload(seen)
        if not self._notified:
            self._debounce.postpone(trio.current_time(), self._renotify_seconds)

    def _write(self, databases: Sequence[TenantDatabaseFile]) -> bool:
        return self._writer.write(self._render(databases))

    def _complain(self, complaint: str) -> None:
        """Log a failure once, until it changes or passes."""
        if complaint != self._complaint:
            self._complaint = complaint
            _log.error(
                "replication.regeneration_failed", error=complaint, retry_in=self._retry_seconds
            )
