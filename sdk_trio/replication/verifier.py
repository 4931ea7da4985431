"""Proves that replicas can be restored: by restoring them, and comparing.

For each tenant: the replicator is told to sync and says up to which transaction the target has
everything; the replica is restored into a directory of its own and all of it is checked; the
content is compared with the live database. Writers wait for that only a moment, when it begins.

A moment can only be compared when it is the same on both sides. A snapshot of the live database
between two syncs that report the same transaction is exactly that transaction: nothing was written
in between, and no commit was half done. When writes come all the while there is no such moment;
then the position and the integrity count, and the content is reported as not compared.

Compared are the schema, the number of rows of each table, and a checksum over all of their values;
the replicator's own tables are left out. These are plain functions for a thread; ``pause`` is
called often and may raise to stop.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import apsw
import attrs
import filelock
import trio

from ..config import Settings
from ..errors import ReplicationError, ReplicatorError, StoreLockedError
from ..records.tenants import Tenant
from ..storage.data_directory import create_data_directory
from ..tenants.databases import database_path, databases_directory
from . import replica
from .control import ControlClient, SyncResult, control_socket_path
from .replica import ReplicaReader, TenantReplica
from .scratch import scratch_directory
from .verification import Comparison, Verification

#: Time to wait for a lock of another process, in seconds.
_BUSY_SECONDS = 5.0

#: Rows between two looks at cancellation: some milliseconds of work.
_ROWS_PER_TURN = 2000

#: Its tables are named so; it writes to them as it goes.
_REPLICATORS_TABLES = "_litestream_"

_SUM_BITS = 128

Pause = Callable[[], None]

#: Tries to find a moment without writes, and to sync.
_ATTEMPTS = 3

#: Bytes that stay free on the disk beside the restored database, because deliveries are kept there.
_SPARE_BYTES = 64 * 1024 * 1024

LOCK_NAME = "verification.lock"


@attrs.frozen
class TableContent:
    """The number of a table's rows and the sum of their checksums, whatever their order."""

    rows: int
    checksum: int


@attrs.frozen
class Content:
    """All that a database holds: the statements of its schema, and its tables."""

    schema: tuple[tuple[str, ...], ...]
    tables: dict[str, TableContent]

    def difference(self, other: "Content") -> str | None:
        """Return what differs in ``other``, None if both hold the same."""
        if self.schema != other.schema:
            return "the schema"
        for name, table in self.tables.items():
            found = other.tables[name]
            if table.rows != found.rows:
                return f"table {name} ({found.rows} rows instead of {table.rows})"
            if table.checksum != found.checksum:
                return f"the content of table {name}"
        return None


class Snapshot:
    """A database as it was at one moment, whatever is written to it meanwhile.

    ``settled``: it holds everything that was in the write-ahead log's file before. A commit is
    written into the file first, synced then, and visible to readers last, so for milliseconds the
    replicator can have a transaction that no reader sees yet.
    """

    def __init__(self, file: Path) -> None:
        """Open ``file`` and hold on to what it holds now.

        Raises:
            apsw.Error: it cannot be read.
        """
        # Not read-only: SQLite could then not make the index of a write-ahead log.
        self._connection = apsw.Connection(os.fspath(file), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            self._connection.set_busy_timeout(int(_BUSY_SECONDS * 1000))
            # Only the replicator may copy the log into the database. We might be the last
            # connection to close, which would checkpoint.
            self._connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            self.settled = self._let_commits_end()
            self._connection.execute("BEGIN")
            # SQLite's transaction begins with its first read.
            self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except BaseException:
            self._connection.close()
            raise

    def _let_commits_end(self) -> bool:
        """Wait for a commit that is under way; False if the lock cannot be had for that."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except (apsw.BusyError, apsw.ReadOnlyError):
            return False
        self._connection.execute("ROLLBACK")
        return True

    def close(self) -> None:
        """Close the snapshot; a second call does nothing."""
        self._connection.close()

    def read(self, pause: Pause) -> Content:
        """Return all that it holds, as :func:`read_content` does."""
        return read_content(self._connection, pause)


def read_content(connection: apsw.Connection, pause: Pause) -> Content:
    """Return all that a database holds, of which nothing is written meanwhile.

    Raises:
        apsw.Error: it cannot be read.
    """
    schema = tuple(
        sorted(
            tuple(str(part) for part in row)
            for row in connection.execute(
                "SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_schema"
            )
            if not str(row[2]).startswith(_REPLICATORS_TABLES)
        )
    )
    names = [
        name
        for kind, name, _, sql in schema
        # What a virtual table holds is in tables of its own.
        if kind == "table" and not sql.upper().startswith("CREATE VIRTUAL")
    ]
    return Content(schema, {name: _sum(connection, name, pause) for name in names})


def read_file(file: Path, pause: Pause) -> Content:
    """Return all that the database ``file`` holds, as :func:`read_content` does."""
    with opened_snapshot(file) as snapshot:
        return snapshot.read(pause)


def _sum(connection: apsw.Connection, name: str, pause: Pause) -> TableContent:
    quoted = _quoted(name)
    columns = [
        _quoted(str(column))
        for (column,) in connection.execute("SELECT name FROM pragma_table_info(?)", (name,))
    ]
    # Texts are compared as bytes: programs may have written other encodings than UTF-8.
    values = ", ".join(
        f"typeof({column}), iif(typeof({column}) = 'text', CAST({column} AS BLOB), {column})"
        for column in columns
    )
    rows = total = 0
    for row in connection.execute(f"SELECT {values} FROM {quoted}"):
        digest = hashlib.blake2b(repr(row).encode(), digest_size=_SUM_BITS // 8)
        # A sum, because the order of the rows is nobody's promise and sorting a large table would
        # cost memory.
        total += int.from_bytes(digest.digest(), "big")
        rows += 1
        if rows % _ROWS_PER_TURN == 0:
            pause()
    pause()
    return TableContent(rows, total % (1 << _SUM_BITS))


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


@contextmanager
def opened_snapshot(file: Path) -> Iterator[Snapshot]:
    """Open a :class:`Snapshot` for a block."""
    snapshot = Snapshot(file)
    try:
        yield snapshot
    finally:
        snapshot.close()


@attrs.define
class _Moment:
    """The live database as it was when the target had everything up to ``txid``.

    ``txid`` is None when no replicator could be asked. Only when ``exact`` is the snapshot that
    transaction itself; otherwise it may be some writes ahead of or behind it.
    """

    snapshot: Snapshot
    txid: int | None
    exact: bool
    written_at: float


class Verifier:
    """Verifies replicas, one at a time; one verifier works in a data directory at a time.

    Args:
        settings: validated settings.
        reader: knows the target.
        clock: returns Unix seconds.
    """

    def __init__(
        self, settings: Settings, reader: ReplicaReader, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._reader = reader
        self._clock = clock
        self._options = settings.multi_tenant.file_db.replication
        self._directory = databases_directory(settings).absolute()
        # A sync that takes longer than the allowed lag is a lag.
        options = self._options
        self._sync_seconds = options.sync_interval_seconds + options.health_check_max_lag_seconds
        #: Retention of points in time, in seconds.
        self.retention: float = options.retention_days * 86_400.0
        self._data = Path(settings.storage.path).absolute()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other verifications of this data directory away for a block.

        So the disk holds one restored database at most, and what is remembered has one writer.

        Raises:
            StoreLockedError: another one runs.
            StoreUnavailableError: the data directory cannot be made.
        """
        directory = create_data_directory(self._data)
        lock = filelock.FileLock(directory / LOCK_NAME, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise StoreLockedError(
                f"another verification runs in {directory}: wait for its end"
            ) from None
        try:
            yield
        finally:
            lock.release()

    async def verify(self, tenant: Tenant) -> Verification:
        """Verify one tenant's replica; what is wrong with it is in the result, not raised.

        A tenant that is not active is not replicated at present: it is compared with what its
        replica was left with.

        Cancelled, it ends the binary, and nothing of the restored database is left.
        """
        await trio.lowlevel.checkpoint()
        began = trio.current_time()
        live = database_path(self._directory, tenant.id)
        found = Verification(
            tenant_id=tenant.id, identifier=tenant.identifier, verified_at=self._clock()
        )
        try:
            with scratch_directory(self._data, ".verifying-") as scratch:
                source = self._reader.prepare(tenant.id, scratch)
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
        self._check_room(scratch, sum(file.bytes for file in files if file.is_snapshot))
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
        self._check_room(scratch, os.stat(live).st_size)
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
        """Raise if the difference cannot be what was written a moment ago."""
        behind = moment.written_at - (found.as_of or 0.0)
        # A difference that is younger may be what was written a moment ago and not synced yet.
        if behind > self._sync_seconds:
            who = "and no replicator answers" if active else "which was left so at its suspension"
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
            # Finds an emptied target with a clear message; a restore without files would not.
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
        """Open the live database at a moment that the target has, as exactly as can be had."""
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
        snapshot = await trio.to_thread.run_sync(Snapshot, live)
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
    def _check_room(scratch: Path, size: int) -> None:
        """Raise if the restore would fill the disk, on which deliveries are kept as well."""
        free = shutil.disk_usage(scratch).free
        if free < size * 1.2 + _SPARE_BYTES:
            raise _Unproven(
                f"there is no room to restore {size} bytes into {scratch.parent}, where {free} "
                "are free: free some space"
            )


class _Unproven(Exception):
    """The replica was not shown to be good, for this reason."""


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
        # While writes go on, its two numbers differ: the first may be newer than the sync.
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
        f"the target has lost what it had: it holds transactions up to {held}, the replicator has "
        f"brought {wanted} there"
    )


def _written_at(live: Path) -> float:
    times = [live.stat().st_mtime]
    log = live.with_name(f"{live.name}-wal")
    if log.exists():
        times.append(log.stat().st_mtime)
    return max(times)


async def _in_thread(read: Callable[[Callable[[], None]], Content]) -> Content:
    """Read a database in a thread; cancelled, the thread stops at the next pause."""
    return await trio.to_thread.run_sync(read, trio.from_thread.check_cancelled)
