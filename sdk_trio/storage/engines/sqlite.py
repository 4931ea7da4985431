"""SQLite as an engine: one connection that writes, in the commit thread, and readers beside it.

After a failed sync, this process commits nothing until :mod:`.files` has written the log again and
synced it. Until then the log may have a hole on the disk, and a commit behind the hole would not
survive a power cut. Callers get an error meanwhile.

After each commit, and before its callers get their results, :mod:`.files` checks that the commit is
in the files that a restart will open. If it is not, or if SQLite finds damage, the store is *lost*:
nothing more is written, and every call is refused until the process restarts.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar, TypeVarTuple, cast

import apsw

try:
    import fcntl
except ImportError:  # Windows, where a single process receives
    fcntl = None  # type: ignore[assignment]

from ...base import clock
from ...base.file_locks import lock_holder
from ...base.logs import get_logger
from ...base.opener import lock_file, open_file
from ...errors import StoreLostError, StoreUnavailableError
from ..sql.dialect import SqlTransaction, Version
from . import ReadAgainError
from .files import (
    DAMAGE,
    StoreFile,
    has_log,
    may_pass,
    report_cut_index,
    rewrite_log,
    rewrite_pages,
)
from .sqlite_connection import (
    SqliteTransaction,
    connect_reader,
    connect_writer,
    describe_failure,
    sync_log,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Name of the file, beside the database, by whose lock several processes write one after the other.
WRITE_LOCK_NAME = "inbox.turn"

#: Pause before a failed read of the disk is tried again, in seconds.
LOOK_AGAIN_SECONDS = 0.05

#: Size of the write-ahead log, in bytes, from which on it is copied into the database. SQLite's
#: default is 1000 pages. Events come in bursts; a log of 16 MB copies each page of an index once
#: for many commits.
LOG_BYTES = 16 << 20

#: Content of the file :data:`WRITE_LOCK_NAME` while a failed sync may have left a hole in the log.
#: The next process that writes rewrites the log first, even if the process with the failure died.
UNPROVEN = b"1"

#: Instructions of SQLite's virtual machine after which a query notices that it was interrupted.
_INSTRUCTIONS = 50_000

_log = get_logger("storage")


class SqliteEngine:
    """The connection that writes; it makes its commits durable.

    Args:
        file: the database.
        prepare: creates or migrates the tables, on each new connection, outside of any transaction.
        write_lock: a file by whose lock several processes write one after the other; None: no other
            process writes.
        distrust_log: an existing log may have a hole, because its writer may have been killed after
            a failed sync. True for the process that holds the directory's lock.

    Raises:
        OSError: ``write_lock`` cannot be made, or is a link.
    """

    linger: float = 0.0
    stall_message: str = (
        "the store {place} has not answered for {seconds:.0f} s: its disk hangs, or another "
        "process keeps it busy; check the disk (dmesg, iostat); it continues by itself when the "
        "disk answers"
    )

    def __init__(
        self,
        file: str,
        prepare: Callable[[apsw.Connection], None],
        *,
        write_lock: str | None = None,
        distrust_log: bool = False,
    ) -> None:
        self.place: str = file
        self._prepare = prepare
        self._write_lock: int | None = None
        if write_lock is not None:
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            self._write_lock = open_file(write_lock, flags, 0o600)
        self._has_write_lock = False
        if distrust_log:
            report_cut_index(file)
        # Whether the whole log is on the disk, or will be after the next sync.
        self._log_proven = not (distrust_log and has_log(file))
        #: The reason why nothing can be written until a restart; None: the store is in order.
        self.lost: str | None = None
        self._connection: apsw.Connection | None = None
        self._transaction: SqliteTransaction | None = None
        self._files: StoreFile | None = None
        # Whether transactions are synced now.
        self._synced = True
        # Number of frames in the log after the commit in progress, 0 if it wrote nothing.
        self._frames_of_commit = 0
        # The same after the last commit that wrote, 0 after a checkpoint.
        self._frames_in_log = 0
        #: The size of the log, in bytes, above which it is copied after a commit.
        self.log_bytes: int = LOG_BYTES
        #: See :attr:`Engine.version`.
        self.version: Version | None = None
        #: The numbers of connections that it has opened, and of transactions that it has begun.
        self.connections: int = 0
        self.transactions: int = 0

    def lose(self, error: StoreLostError) -> None:
        """Refuse every call from now on; the first ``error`` counts. Callable from any thread."""
        if self.lost is None:
            self.lost = str(error)
            _log.error("store.lost", error=str(error))

    # -- the lock of the processes that write ------------------------------------------------------

    def acquire(self) -> None:
        """Wait until no other process writes.

        SQLite's own wait for its write lock sleeps and tries again. That is unfair, and no unit
        could join the batch meanwhile.
        """
        if self._write_lock is not None and not self._has_write_lock:
            lock_file(self._write_lock)
            self._has_write_lock = True
            try:
                self._log_proven &= os.pread(self._write_lock, 1, 0) != UNPROVEN
            except OSError:
                self._log_proven = False

    def release(self) -> bool:
        """See :meth:`Engine.release`; the upkeep is a checkpoint.

        If its sync fails, that must be known before another process commits.
        """
        if self._is_log_long():
            return False
        self._release_write_lock()
        return True

    def upkeep(self) -> None:
        """Copy a long log into the database, then let other processes write."""
        if self._is_log_long():
            self._frames_in_log = 0
            # As with SQLite's own checkpoints, a failed one is tried again after a later commit.
            try:
                cast("apsw.Connection", self._connection).wal_checkpoint(
                    mode=apsw.SQLITE_CHECKPOINT_PASSIVE
                )
            except apsw.Error as error:
                self._note_failed_sync(error)
        self._release_write_lock()

    def abandon(self) -> bool:
        """Return False: a write of a file cannot be interrupted while the disk does not answer."""
        return False

    def write_lock_holder(self) -> int | None:
        """Return the id of the process that holds the lock of ``write_lock``.

        None if there is no such file or holder, or if the system does not report it (Linux does).
        """
        return None if self._write_lock is None else lock_holder(os.fstat(self._write_lock).st_ino)

    def _release_write_lock(self) -> None:
        if self._write_lock is not None and self._has_write_lock:
            if not self._log_proven:
                self._mark(UNPROVEN)
            self._has_write_lock = False
            fcntl.flock(self._write_lock, fcntl.LOCK_UN)

    def _mark(self, content: bytes) -> None:
        """Write the mark into the lock file, until it succeeds: no process may write without it."""
        while self._write_lock is not None:
            try:
                if os.pread(self._write_lock, 1, 0) == content:
                    return
                os.ftruncate(self._write_lock, 0)
                os.pwrite(self._write_lock, content, 0)
            except OSError:
                clock.sleep(LOOK_AGAIN_SECONDS)

    # -- transactions ------------------------------------------------------------------------------

    def transact(
        self, work: Callable[[SqlTransaction], None], *, durable: bool, is_one_unit: bool = False
    ) -> bool:
        """See :meth:`Engine.transact`; ``is_one_unit`` saves nothing here.

        SQLite reports a read error of the disk as damage, too. So damage is believed only if it
        persists; until then ``work`` runs again, which callers see as a disk that hangs.

        A commit that is not ``durable`` is in the page cache, which survives this process, and the
        next sync is that of the whole log. After a power cut before that, SQLite reads the log up
        to the first frame whose checksum fails, so only the end of the log is lost
        (docs/adr/0071). This holds as long as no sync has failed; see :meth:`_prove_log`.
        """
        return self._until_damage_is_believed(self._transact, work, durable)

    def _until_damage_is_believed(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        begun: float | None = None
        while True:
            try:
                return work(*arguments)
            except DAMAGE as error:
                begun = clock.monotonic() if begun is None else begun
                if self._files is None or not may_pass(self.place, begun):
                    raise self._translate(error) from error
                clock.sleep(LOOK_AGAIN_SECONDS)
            except (apsw.Error, StoreLostError) as error:
                raise self._translate(error) from error

    def _transact(self, work: Callable[[SqlTransaction], None], durable: bool) -> bool:
        try:
            connection = self._connected()
            self._set_synced(connection, durable)
            transaction = self._begin(connection)
            self.transactions += 1
            work(transaction)
            wrote = self._commit(connection)
        except BaseException:
            self._roll_back()
            raise
        if connection.txn_state():
            # A handler has left a statement unfinished. It would keep the log from being cleared;
            # only a new connection is certainly without it.
            self._disconnect()
        return wrote

    def run_outside_transaction(self, work: Callable[[apsw.Connection], T]) -> T:
        """See :meth:`Engine.run_outside_transaction`; ``work`` may run again, as above."""

        def attempt() -> T:
            try:
                value = work(self._connected())
                self._check_files()
            except BaseException:
                self._roll_back()
                raise
            return value

        return self._until_damage_is_believed(attempt)

    def _translate(self, error: apsw.Error | StoreLostError) -> StoreUnavailableError:
        """Return the error that callers get; mark the store as lost if ``error`` means that."""
        if isinstance(error, StoreLostError):
            self.lose(error)
            return error
        self._note_failed_sync(error)
        described = describe_failure(error, self.place)
        if isinstance(error, DAMAGE) and self._files is not None:
            described = StoreLostError(str(described))
            self.lose(described)
        return described

    def _set_synced(self, connection: apsw.Connection, synced: bool) -> None:
        # SQLite changes it only between two transactions.
        if synced is not self._synced:
            connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            self._synced = synced

    def _begin(self, connection: apsw.Connection) -> SqliteTransaction:
        # The write lock is taken first: otherwise a transaction that has read can fail at its first
        # write, because another process has written in between.
        connection.execute("BEGIN IMMEDIATE")
        transaction = cast("SqliteTransaction", self._transaction)
        transaction.note_other_writes()
        self.version = transaction.version
        return transaction

    def _commit(self, connection: apsw.Connection) -> bool:
        """Commit; return whether that has written, once the files of a restart have the commit.

        As soon as SQLite's write lock is free, another process may checkpoint the log and restart
        it, which cannot be distinguished from a truncated log. SQLite restarts no log that a read
        transaction may still need. An unfinished query keeps ours open until after the check.
        """
        has_written: bool | None = None
        while True:
            reading = None
            # If it cannot read, the check finds the reason.
            with suppress(apsw.Error):
                # A read lasts until its statement has been stepped to the end, or is closed.
                reading = connection.execute("SELECT 1 FROM sqlite_schema")
            try:
                connection.execute("COMMIT")
                cast("SqliteTransaction", self._transaction).note_commit()
                if has_written is None:
                    has_written = self._frames_of_commit > 0
                if self._check_files():
                    return has_written
            finally:
                if reading is not None:
                    reading.close()
            # The log was restarted by a checkpoint, or was truncated. A write shows which.
            self._begin(connection)
            sync_log(connection)

    def _check_files(self) -> bool:
        """Check that all commits are in the files that a restart opens; False: write to find out.

        Raises:
            StoreLostError: they are not.
        """
        files = cast("StoreFile", self._files)
        frames, self._frames_of_commit = self._frames_of_commit, 0
        if not frames:
            return self._retry_reads(files.is_unchanged)
        self._retry_reads(partial(files.require_written, frames))
        return True

    def _retry_reads(self, check: Callable[[], T]) -> T:
        """Return the result of ``check``, retried while the disk cannot be read.

        A commit cannot be undone, and must not be acknowledged before it was checked. So the thread
        waits for the disk here, and callers get the error that the store is silent in time.
        """
        reported = False
        while True:
            try:
                return check()
            except StoreLostError:
                raise
            except (apsw.IOError, StoreUnavailableError) as error:
                if not reported:
                    reported = True
                    described = (
                        describe_failure(error, self.place)
                        if isinstance(error, apsw.Error)
                        else error
                    )
                    _log.store_unavailable(described)
                clock.sleep(LOOK_AGAIN_SECONDS)

    def _prove_log(self, connection: apsw.Connection) -> None:
        """Write the whole log to the disk again, after a failed sync.

        Raises:
            apsw.Error: the disk still fails.
            StoreUnavailableError: the same.
            StoreLostError: the log cannot be read back.
        """
        self._set_synced(connection, True)
        # A commit without content shows whether the disk syncs again, and how long the log is.
        connection.execute("BEGIN IMMEDIATE")
        sync_log(connection)
        connection.execute("COMMIT")
        frames, self._frames_of_commit = self._frames_of_commit, 0
        connection.execute("BEGIN IMMEDIATE")
        try:
            pages = rewrite_log(connection.filename_wal, frames)
        except OSError as error:
            raise StoreUnavailableError(
                f"the store {self.place} failed: its log cannot be written and synced "
                f"({error.strerror}); check the disk (dmesg)"
            ) from error
        rewrite_pages(self.place, pages, cast("StoreFile", self._files).page_size)
        connection.execute("ROLLBACK")
        self._log_proven = True
        self._mark(b"")
        _log.info("store.log_rewritten", file=self.place, frames=frames)

    def _note_failed_sync(self, error: Exception) -> None:
        """Distrust the log after an error of the disk, which may be a failed sync.

        The failed sync may have been of commits that were not synced before, here or in another
        process, or of pages that a checkpoint copied.
        """
        if isinstance(error, apsw.IOError) and self._log_proven:
            self._log_proven = False
            _log.error(
                "store.log_distrusted",
                error=str(error),
                hint="nothing is acknowledged before the log is written again and synced; it "
                "continues by itself; check the disk (dmesg)",
            )

    def _note_frames(self, _connection: apsw.Connection, _database: str, frames: int) -> int:
        """Remember the length of the log; SQLite calls it after each commit that has written."""
        self._frames_of_commit = self._frames_in_log = frames
        return apsw.SQLITE_OK

    def _is_log_long(self) -> bool:
        if self._connection is None or self._files is None or self.lost or not self._log_proven:
            return False
        return self._frames_in_log * self._files.page_size >= self.log_bytes

    # -- the connection ----------------------------------------------------------------------------

    def _connected(self) -> apsw.Connection:
        """Return the connection, opened if there is none, with a log that is proven."""
        if self.lost is not None:
            raise StoreLostError(self.lost)
        connection = self._connection
        if connection is None:
            connection = self._connect()
        if not self._log_proven:
            self._prove_log(connection)
        return connection

    def _connect(self) -> apsw.Connection:
        if self._files is not None:
            # SQLite would silently open, or create, another file of that name.
            self._files.require_same()
            self._files.close()
        connection = self._connection = connect_writer(self.place, self._prepare)
        try:
            self._files = StoreFile(self.place, connection)
            # This replaces SQLite's own hook, which checkpoints inside the commit, while senders
            # wait.
            connection.set_wal_hook(self._note_frames)
        except BaseException:
            self._disconnect()
            raise
        self.connections += 1
        self._transaction = SqliteTransaction(connection, self.connections)
        self._synced = True
        return connection

    def _roll_back(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            # After a full disk or an I/O error SQLite may have rolled back by itself.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._transaction = None
        if connection is not None:
            try:
                if self.lost is not None:
                    # Other files may have replaced ours: write nothing to them.
                    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                connection.close()
            except apsw.Error as error:
                _log.error("store.close_failed", error=str(error))

    def close(self) -> None:
        """Close the connection and the files; call nothing afterwards."""
        self._release_write_lock()
        self._disconnect()
        if self._files is not None:
            self._files.close()
        if self._write_lock is not None:
            os.close(self._write_lock)
            self._write_lock = None


class SqliteReader:
    """A read-only connection, for one thread at a time.

    Args:
        engine: has opened the file. Damage that the reader finds stops the engine, too, and a lost
            store is no longer read.
    """

    is_usable: bool = True

    def __init__(self, engine: SqliteEngine) -> None:
        self._engine = engine
        self._damaged_at: float | None = None
        if engine.lost is not None:
            raise StoreLostError(engine.lost)
        try:
            self._connection = connect_reader(engine.place)
        except apsw.Error as error:
            raise describe_failure(error, engine.place) from error
        self._interrupted = False
        self._connection.set_progress_handler(lambda: self._interrupted, _INSTRUCTIONS)

    @contextmanager
    def transaction(self) -> Iterator[SqlTransaction]:
        """See :meth:`Reader.transaction`; damage is read again as long as the disk may be why."""
        engine, connection = self._engine, self._connection
        if engine.lost is not None:
            raise StoreLostError(engine.lost)
        try:
            connection.execute("BEGIN")
            yield SqliteTransaction(connection)
        except DAMAGE as error:
            self._damaged_at = self._damaged_at or clock.monotonic()
            described = describe_failure(error, engine.place)
            if may_pass(engine.place, self._damaged_at):
                clock.sleep(LOOK_AGAIN_SECONDS)
                raise ReadAgainError(str(described)) from error
            lost = StoreLostError(str(described))
            engine.lose(lost)
            raise lost from error
        except apsw.Error as error:
            raise describe_failure(error, engine.place) from error
        else:
            self._damaged_at = None
        finally:
            self._end()

    def _end(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except apsw.Error:
            self.is_usable = False

    def interrupt(self) -> None:
        """See :meth:`Reader.interrupt`: SQLite's own has no effect on a query that begins later."""
        self._interrupted = True
        with suppress(apsw.ConnectionClosedError):
            self._connection.interrupt()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
