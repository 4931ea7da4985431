"""The tenants' database files: one accessor for all of them, bounded and pooled.

Each tenant has one SQLite file, ``{tenant id}.db`` in the FileDb directory. A handler uses it with
``async with databases.open(tenant_id) as database`` and ``await database.run(function)``. The
function runs in a thread and in its own transaction, which is committed or rolled back as a whole.

Limits. At most ``max_open`` databases are open, each with three files; the least recently used one
is closed for another. At most ``max_threads`` functions run at a time. A block holds no connection
between its calls, so tasks that use several tenants cannot block each other.

Replaced files. A connection is used only while its open files are those at the tenant's path. The
thread compares them when a transaction starts and around its commit. So a database that was
restored, renamed or removed while open is reopened, and a commit to a removed file does not count
(docs/adr/0034-database-replacement.md).

Cancellation. A started function is never abandoned: it is committed, and its caller gets
``Cancelled`` only after that. If the disk hangs or the function keeps running, a cancelled caller
is released after :data:`STALL_SECONDS`; the connection stays busy until the function has ended.
"""

import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import apsw
import attrs
import outcome
import trio

from ..base.executor import run_in_thread, start_in_thread
from ..base.logs import get_logger
from ..base.opener import open_database, open_file
from ..base.private_files import create_data_directory
from ..config import Settings
from ..errors import InvalidTenantError, StoreUnavailableError
from ..storage.engines.sqlite_connection import BUSY_SECONDS, describe_failure
from .identity import is_tenant_id

T = TypeVar("T")

_log = get_logger("tenants")

#: The default maximum of tenants' databases that are open at a time.
MAX_OPEN = 64

#: The maximum number of functions that run at a time, each in a thread.
MAX_THREADS = 4

#: Seconds that a cancelled caller waits for its function, and a close for all functions. Longer
#: than the wait for another process's lock (``BUSY_SECONDS``), which is not a fault, and short
#: enough that a shutdown after its drain ends within five seconds.
STALL_SECONDS = BUSY_SECONDS + 1.0

#: Tries to start a transaction while its database is being replaced.
_BEGINNINGS = 3

#: Open files of one open database: the database, its write-ahead log, and the log's index.
FILES_PER_DATABASE = 3

#: The suffixes of the files that SQLite keeps next to a database; they are moved or removed with
#: it.
SIDE_FILES = ("-wal", "-shm", "-journal")

_SETTINGS = (
    "PRAGMA journal_mode = WAL",
    # The caller of run() relies on the commit, so each commit is synced; macOS needs fullfsync for
    # that.
    "PRAGMA synchronous = FULL",
    "PRAGMA fullfsync = ON",
    # Off by default in SQLite for compatibility; a host's own schema expects it.
    "PRAGMA foreign_keys = ON",
    # At most a megabyte for each open database, so that 64 of them take little memory.
    "PRAGMA cache_size = -1000",
)

# Errors of the file or the machine. Every other error comes from the caller's own statements and is
# raised unchanged.
_FAULTS = (
    apsw.FullError,
    apsw.NotADBError,
    apsw.CorruptError,
    apsw.BusyError,
    apsw.LockedError,
    apsw.ReadOnlyError,
    apsw.CantOpenError,
    apsw.PermissionsError,
    apsw.IOError,
    apsw.NoMemError,
)


def databases_directory(settings: Settings) -> Path:
    """Return ``MultiTenant:FileDb:Directory``, or ``tenants`` under the data directory."""
    directory = settings.multi_tenant.file_db.directory
    return Path(settings.storage.path) / "tenants" if directory is None else Path(directory)


def database_path(directory: Path, tenant_id: str) -> Path:
    """Return the database file of a tenant: always a direct child of ``directory``.

    Raises:
        InvalidTenantError: ``tenant_id`` is not a UUID in canonical form, so it could name another
            file.
    """
    if not is_tenant_id(tenant_id):
        raise InvalidTenantError(
            f"{tenant_id!r} is not a tenant id: it must be a UUID such as "
            "8c5c4c9e-6f0f-4a52-9c3b-0a8f4b7e2d11, in lower case"
        )
    return directory / f"{tenant_id}.db"


@attrs.define(eq=False)
class _Waiting:
    """The calls of one tenant, which run one at a time; ``calls`` counts those in progress."""

    lock: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(1))
    calls: int = 0


#: Device and inode of a database's file, of its log and of its index; None for a missing file. An
#: inode number is not used again while the file is open, so equal numbers mean the same file.
_Files = tuple[tuple[int, int] | None, ...]


@attrs.define(eq=False)
class _Opened:
    """An open database: ``main`` is its file, ``files`` all three, None before a transaction."""

    connection: apsw.Connection
    main: tuple[int, int]
    files: _Files | None = None


@attrs.define(eq=False)
class _Call:
    """One call of a function in a thread: its database and its result.

    ``known``: this process has opened the database before. If its file is missing, it is being
    replaced, and must not be created.
    """

    tenant_id: str
    opened: _Opened | None
    known: bool = False
    evicted: _Opened | None = None
    ended: trio.Event = attrs.field(factory=trio.Event)
    result: outcome.Outcome[Any] | None = None


#: A function that raises if the tenant's database may no longer be used.
Admit = Callable[[], Awaitable[object]]


class TenantDatabase:
    """One tenant's database, during a block."""

    def __init__(
        self, databases: "TenantDatabases", tenant_id: str, admit: "Admit | None" = None
    ) -> None:
        self._databases = databases
        self._admit = admit
        self._ended = False
        self.tenant_id = tenant_id

    async def run(self, function: Callable[[apsw.Connection], T]) -> T:
        """Run ``function`` in a transaction of the tenant's database and return its result.

        It runs in a thread, once. It must neither begin nor end the transaction, nor keep the
        connection or a cursor. Functions of one tenant run one at a time, in the order of their
        calls.

        Raises:
            StoreUnavailableError: the file cannot be opened, read or written; it is being replaced
                or was replaced while the function ran (try again); or the block or the databases
                are closed.
            TenantNotActiveError: the tenant has left Active since the block began.
            Exception: any exception of ``function``, such as ``apsw.ConstraintError``; its changes
                are rolled back.

        If cancelled before the function starts, nothing happens; if cancelled later, the function
        is finished first.
        """
        if self._ended:
            await trio.lowlevel.checkpoint()
            raise StoreUnavailableError(
                f"the block of the database of tenant {self.tenant_id} has ended: call run inside"
            )
        return await self._databases.run(self.tenant_id, function, admit=self._admit)

    def end(self) -> None:
        """End the block: later calls of :meth:`run` are refused."""
        self._ended = True


class TenantDatabases:
    """Opens the tenants' databases within the limits in the module's docstring.

    Args:
        directory: the FileDb directory; it is created at the first use, for this user only.
        max_open: the maximum number of open databases; at least ``max_threads``.
        max_threads: the maximum number of functions that run at a time; 1 or more.
        replicated: leave the write-ahead logs to a replicator, which copies them into the
            databases; while none runs, they grow.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_open: int = MAX_OPEN,
        max_threads: int = MAX_THREADS,
        replicated: bool = False,
    ) -> None:
        if not 1 <= max_threads <= max_open:
            raise ValueError("max_threads must be 1 or more, and max_open at least as many")
        self.directory: Path = Path(directory)
        self._max_open = max_open
        self._max_threads = max_threads
        self._replicated = replicated
        self._threads = trio.Semaphore(max_threads)
        self._turns: dict[str, _Waiting] = {}
        # Databases that are open and not in use, the least recently used first. Databases in use
        # are not in here, so with max_open >= max_threads there is always one to close when another
        # has to be opened.
        self._idle: OrderedDict[str, _Opened] = OrderedDict()
        # The tenants whose database was open once. If such a file is missing, it is being replaced,
        # and must not be created as at the first use.
        self._known: set[str] = set()
        self._running = 0
        self._stalled: set[_Call] = set()
        self._closed = False
        self._ended = trio.Event()

    @property
    def open_count(self) -> int:
        """Return how many databases are open now, never more than ``max_open``."""
        return len(self._idle) + self._running

    @property
    def in_use(self) -> frozenset[str]:
        """Return the ids of the tenants whose database is open or needed by a waiting call."""
        return frozenset(self._idle) | frozenset(self._turns)

    @asynccontextmanager
    async def open(
        self, tenant_id: str, *, admit: Admit | None = None
    ) -> AsyncIterator[TenantDatabase]:
        """Provide the database of a tenant for a block; its first use creates the file.

        Args:
            tenant_id: the tenant's id; its status is not checked here.
            admit: raises if the tenant is no longer active; called before each function of the
                block.

        Raises:
            InvalidTenantError: the id is not a UUID.
        """
        database_path(self.directory, tenant_id)
        database = TenantDatabase(self, tenant_id, admit)
        await trio.lowlevel.checkpoint()
        try:
            yield database
        finally:
            database.end()

    async def run(
        self,
        tenant_id: str,
        function: Callable[[apsw.Connection], T],
        *,
        admit: Admit | None = None,
    ) -> T:
        """Run ``function`` as :meth:`TenantDatabase.run` does, outside of any block."""
        file = database_path(self.directory, tenant_id)
        work = partial(_transact, file, function, replicated=self._replicated)
        return await self._run_in_order(tenant_id, work, opens=True, admit=admit)

    async def forget(self, tenant_id: str) -> None:
        """Close the database of a tenant if it is open, after the calls that wait already."""
        await self._run_in_order(tenant_id, _close, opens=False)

    async def close(self) -> None:
        """Refuse further calls, wait for those that run, and close every database.

        It is shielded from cancellation for at most :data:`STALL_SECONDS`, and not at all if a
        cancelled caller has waited that long in vain already. A second call waits for the first
        one's end.

        Raises:
            StoreUnavailableError: a disk did not respond, or a function did not end, in that time.
        """
        first, self._closed = not self._closed, True
        # A caller has already waited in vain; a second wait would only delay the shutdown.
        with trio.move_on_after(0 if self._stalled else STALL_SECONDS, shield=True):
            if first:
                await self._close_when_idle()
            await self._ended.wait()
        await trio.lowlevel.checkpoint()
        if not self._ended.is_set():
            raise StoreUnavailableError(
                f"the tenants' databases in {self.directory} did not close within "
                f"{STALL_SECONDS:g} s: the disk does not answer, or a function is still running"
            )

    async def _close_when_idle(self) -> None:
        held = 0
        try:
            # Holding every permit means that no function is running.
            for _ in range(self._max_threads):
                await self._threads.acquire()
                held += 1
            await run_in_thread(_close_all, list(self._idle.values()), abandon_on_cancel=True)
            self._idle.clear()
            self._ended.set()
        finally:
            # Waiting calls continue, and each finds that the databases are closed.
            for _ in range(held):
                self._threads.release()

    # -- one function at a time --------------------------------------------------------------------

    async def _run_in_order(
        self,
        tenant_id: str,
        job: Callable[["_Call"], T],
        *,
        opens: bool,
        admit: Admit | None = None,
    ) -> T:
        """Run ``job`` in a thread once the tenant's earlier jobs are done; return its result."""
        await trio.lowlevel.checkpoint_if_cancelled()
        # SQLite allows one writer at a time anyway. Queued here, calls keep their order and use no
        # thread while they wait.
        turns = self._turns.setdefault(tenant_id, _Waiting())
        turns.calls += 1
        held: list[trio.Semaphore] = []
        try:
            # The tenant's semaphore first: a call that holds a thread permit while waiting for its
            # tenant would delay other tenants for nothing.
            for semaphore in (turns.lock, self._threads):
                await semaphore.acquire()
                held.append(semaphore)
            # Called last, with all permits held: if the tenant leaves Active, the close of the
            # database either waits for this call, or this call is refused here.
            if admit is not None:
                await admit()
            call = self._begin(tenant_id, job, opens=opens)
        except BaseException:
            self._give_back(tenant_id, held)
            raise
        await self._wait_for(call)
        return cast("outcome.Outcome[T]", call.result).unwrap()

    def _begin(self, tenant_id: str, job: Callable[["_Call"], T], *, opens: bool) -> _Call:
        if self._closed:
            raise StoreUnavailableError("the tenants' databases are closed")
        call = _Call(tenant_id, self._idle.pop(tenant_id, None), tenant_id in self._known)
        self._running += 1
        if opens and call.opened is None and self.open_count > self._max_open:
            # Closed by the job's thread, because closing may copy the log and wait for the disk.
            _, call.evicted = self._idle.popitem(last=False)

        def deliver(result: outcome.Outcome[T]) -> None:
            call.result = result
            self._end(call)

        try:
            start_in_thread(lambda: job(call), deliver, name="sdk_trio-tenant")
        except BaseException:
            self._running -= 1
            raise
        return call

    def _end(self, call: _Call) -> None:
        """Release the permits in Trio's thread after the job, whether its caller waits or not."""
        self._running -= 1
        self._stalled.discard(call)
        if call.opened is not None:
            self._idle[call.tenant_id] = call.opened
            self._known.add(call.tenant_id)
        self._give_back(call.tenant_id, [self._turns[call.tenant_id].lock, self._threads])
        call.ended.set()

    def _give_back(self, tenant_id: str, held: Sequence[trio.Semaphore]) -> None:
        for semaphore in held:
            semaphore.release()
        turns = self._turns[tenant_id]
        turns.calls -= 1
        # Otherwise the table would grow with every tenant ever used.
        if not turns.calls:
            del self._turns[tenant_id]

    async def _wait_for(self, call: _Call) -> None:
        try:
            await call.ended.wait()
        except trio.Cancelled:
            with trio.move_on_after(STALL_SECONDS, shield=True):
                await call.ended.wait()
            if not call.ended.is_set():
                self._stalled.add(call)
                _log.error(
                    "tenant.database_stalled",
                    tenant_id=call.tenant_id,
                    waited_seconds=STALL_SECONDS,
                    hint="the disk does not answer, or the function still runs; the write "
                    "is finished with it",
                )
            raise


# -- in the thread -------------------------------------------------------------------------------


def _transact(
    file: Path, function: Callable[[apsw.Connection], T], call: _Call, *, replicated: bool
) -> T:
    if call.evicted is not None:
        _close_quietly(call.evicted)
    try:
        opened = _begin_transaction(file, call, replicated=replicated)
        try:
            result = function(opened.connection)
            _require_in_place(file, call)
            opened.connection.execute("COMMIT")
        except BaseException:
            _roll_back(call)
            raise
        # If the file was replaced between the check and the commit, the changes are lost with the
        # old file, and the caller must not get a success.
        _require_in_place(file, call)
    except _FAULTS as error:
        raise describe_failure(error, os.fspath(file)) from error
    return result


def _begin_transaction(file: Path, call: _Call, *, replicated: bool) -> _Opened:
    """Begin a transaction on the database that is now at ``file``, opening it if necessary.

    Beginning may wait for a lock, and a restore holds that lock while it replaces the file. So the
    files are compared after the lock is acquired.
    """
    for _ in range(_BEGINNINGS):
        opened = call.opened
        if opened is not None and opened.files != _files_of(file):
            _close(call)
            opened = None
        if opened is None:
            opened = call.opened = _connect(file, create=not call.known, replicated=replicated)
            call.known = True
        try:
            # The write lock at once. A transaction that reads first and writes later can fail in
            # the middle, when another process has written in between.
            opened.connection.execute("BEGIN IMMEDIATE")
        except _FAULTS:
            if _files_of(file)[0] == opened.main:
                raise
            _close(call)
            continue
        found = _files_of(file)
        if found[0] == opened.main and opened.files in (None, found):
            opened.files = found
            return opened
        _roll_back(call)
        _close(call)
    raise _replaced(file)


def _require_in_place(file: Path, call: _Call) -> None:
    """Close the database and raise if its open files are no longer those at the path."""
    opened = call.opened
    if opened is not None and opened.files != _files_of(file):
        _roll_back(call)
        _close(call)
        raise _replaced(file)


def _replaced(file: Path) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"the database {file} is being replaced or was removed, so the writes of this call are not "
        "kept; try again, or restore the file if it stays away"
    )


def _files_of(file: Path) -> _Files:
    return tuple(_number_of(f"{file}{suffix}") for suffix in ("", "-wal", "-shm"))


def _number_of(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreUnavailableError(
            f"{path} cannot be checked ({error.strerror}); make its directory readable for this "
            "user"
        ) from error
    return found.st_dev, found.st_ino


def _connect(file: Path, *, create: bool, replicated: bool) -> _Opened:
    directory = create_data_directory(file.parent)
    # A link could lead to another tenant's file, or to a file that is not replicated.
    if file.resolve().parent != directory.resolve():
        raise StoreUnavailableError(
            f"{file} is a link to a file outside of the directory of the tenants' databases; "
            "replace the link with the file itself"
        )
    main = _number_of(os.fspath(file))
    if main is None:
        if not create:
            raise _replaced(file)
        main = _create(file)
    # Without SQLITE_OPEN_CREATE: a file that has just vanished is being replaced, and an empty one
    # would be mistaken for the database.
    connection = open_database(file, flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.set_busy_timeout(int(BUSY_SECONDS * 1000))
        for statement in _SETTINGS:
            connection.execute(statement)
        if replicated:
            # Only the replicator may checkpoint the log. When another process did that meanwhile,
            # the replica was permanently damaged (docs/adr/0017-replicated-logs.md).
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    except apsw.Error as error:
        connection.close()
        if _number_of(os.fspath(file)) != main:
            raise _replaced(file) from error
        raise
    return _Opened(connection, main)


def _create(file: Path) -> tuple[int, int]:
    """Create an empty file and return its inode.

    SQLite would give a new file the mode of the umask; log and index then get the mode of the file.
    An existing file is never opened here, because closing it would drop SQLite's POSIX locks on it.
    """
    try:
        descriptor = open_file(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise _replaced(file) from error
    except OSError as error:
        raise StoreUnavailableError(
            f"the database {file} cannot be opened ({error.strerror}); make it and its directory "
            "writable for this user"
        ) from error
    try:
        found = os.fstat(descriptor)
        return found.st_dev, found.st_ino
    finally:
        os.close(descriptor)


def _roll_back(call: _Call) -> None:
    if call.opened is None:
        return
    try:
        # After a full disk or an I/O error SQLite may have rolled back already.
        if call.opened.connection.in_transaction:
            call.opened.connection.execute("ROLLBACK")
    except apsw.Error:
        _close(call)


def _close(call: _Call) -> None:
    opened, call.opened = call.opened, None
    if opened is not None:
        _close_quietly(opened)


def _close_all(databases: Sequence[_Opened]) -> None:
    for opened in databases:
        _close_quietly(opened)


def _close_quietly(opened: _Opened) -> None:
    try:
        opened.connection.close()
    except apsw.Error as error:
        _log.error("tenant.database_close_failed", error=str(error))
