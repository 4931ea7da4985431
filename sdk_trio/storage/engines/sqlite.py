"""SQLite as an engine: one connection that writes, in the commit thread, and readers beside it.

Only apsw opens the store's file. A second copy of SQLite in the same process (the standard
library's ``sqlite3``) would drop the POSIX locks of the first when it closes the file, and a
committed write could vanish. Other processes are fine.

A sync that failed. Nothing is committed any more until :mod:`.rewrite` has written the log again,
with syncs that succeed: until then it may have a hole on the disk, and a commit behind the hole
would not survive a power cut. Callers get an error meanwhile.

A store that is lost. After each commit, and before its callers get their results, :mod:`.files`
checks that the commit stands in the files that a restart will open. If it does not, or if SQLite
finds damage, nothing is written any more, and every call is refused until the process restarts.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import apsw
import msgspec

try:
    import fcntl
except ImportError:  # Windows, where a single process receives
    fcntl = None  # type: ignore[assignment]

from ...base import clock
from ...base.file_locks import lock_holder
from ...base.logs import get_logger
from ...base.opener import open_database, open_file
from ...errors import StoreLostError, StoreUnavailableError
from ..readers import ReadAgainError
from ..sql.dialect import ROWS_AT_ONCE, Dialect, Insert, Row, SqlTransaction
from .files import DAMAGE, StoreFile, has_log, may_pass, report_cut_index
from .rewrite import rewrite_log, rewrite_pages

T = TypeVar("T")

#: Name of the file, beside the database, by whose lock several processes write one after the other.
TURN_NAME = "inbox.turn"

#: Time that a statement waits for another process's write to end, in seconds. Writes of this
#: package take milliseconds, so this outlasts a daemon under load; every delivery waits meanwhile.
BUSY_SECONDS = 3.0

#: Pause before a disk that refuses to read is asked again, in seconds.
LOOK_AGAIN_SECONDS = 0.05

#: Size of the write-ahead log, in bytes, from which on it is copied into the database. SQLite's
#: default is 1000 pages. Events come in bursts; a log of 16 MB copies each page of an index once
#: for many commits.
CHECKPOINT_BYTES = 16 << 20

#: Page size of a new database, in bytes; a database keeps the one that it was made with. A body of
#: 2 KB shares no page of 4 KB with another one, and three of them fit into 8 KB: a third less goes
#: through the log and into the database, and half as many writes. Larger pages gain no more, and a
#: lone delivery writes three whole pages (docs/adr/0070-one-store-core.md).
PAGE_BYTES = 8192

#: Content of the file :data:`TURN_NAME` while a failed sync may have left a hole in the log. The
#: next process that writes rewrites the log first, also when the one with the failure has died.
UNPROVEN = b"1"

#: Instructions of SQLite's virtual machine after which a query notices that it was interrupted.
_STEPS = 50_000

#: SQLite's statements. Its file may be used by other programs, so its name is not in them.
SQLITE = Dialect("sqlite")

_WRITER = (
    # macOS needs fullfsync for a sync that survives a power cut; it has no effect elsewhere.
    "PRAGMA synchronous = FULL",
    "PRAGMA fullfsync = ON",
    # A burst makes the log long once. Above this size it is cut at its next beginning, or it would
    # keep the disk's space for ever.
    "PRAGMA journal_size_limit = 67108864",
    "PRAGMA cache_size = -32768",
    # Deleted rows are overwritten, also where whole pages become free, which FAST leaves as they
    # are. Bodies are personal data. It costs an ordinary delivery no page; only the removal of
    # bodies writes more.
    "PRAGMA secure_delete = ON",
    # Each list that a statement gets, and the rows that it returns, are a temporary table. Made in
    # a file, they cost the end of a lone run 50 us.
    "PRAGMA temp_store = MEMORY",
)

_log = get_logger("storage")


class SqliteTransaction:
    """Statements on a connection whose transaction somebody else begins and ends.

    Args:
        connection: handlers and migrations may use it as well.
    """

    __slots__ = ("_inserts", "_version", "connection", "dialect", "number")

    def __init__(self, connection: apsw.Connection, number: int = 0) -> None:
        self.connection: apsw.Connection = connection
        self.dialect: Dialect = SQLITE
        #: The number of the connection among those that the engine has opened.
        self.number: int = number
        self._version: tuple[int, int] | None = None
        self._inserts: dict[tuple[Insert, int], str] = {}

    def begin(self) -> None:
        """Begin the next transaction on the same connection."""
        self._version = None

    @property
    def version(self) -> tuple[int, int]:
        """Two numbers of which one changes when another connection writes."""
        if self._version is None:
            # No one else writes within a transaction, so it is asked once.
            self._version = self.number, int(self.connection.pragma("data_version"))
        return self._version

    def _execute(self, statement: str, values: Mapping[str, Any]) -> apsw.Cursor:
        text, lists, _ = SQLITE.translate(statement)
        if lists:
            encoded = {name: msgspec.json.encode(values[name]).decode() for name in lists}
            values = {**values, **encoded}
        return self.connection.execute(text, values)

    def all(self, statement: str, /, **values: Any) -> list[Row]:
        """Run a statement and return all of its rows."""
        return self._execute(statement, values).fetchall()

    def one(self, statement: str, /, **values: Any) -> Row | None:
        """Run a statement and return its first row, or None."""
        return cast("Row | None", self._execute(statement, values).fetchone())

    def run(self, statement: str, /, **values: Any) -> int:
        """Run a statement and return the number of rows that it has changed."""
        self._execute(statement, values)
        return self.connection.changes()

    def each(self, statement: str, values: Iterable[Mapping[str, Any]], /) -> list[Row | None]:
        """Run a statement with ``RETURNING`` once for each of ``values``; return the first rows."""
        return [cast("Row | None", self._execute(statement, one).fetchone()) for one in values]

    complete = all

    def insert(
        self, insert: Insert, rows: Sequence[Sequence[Any]], /, *, complete: bool = False
    ) -> list[Row]:
        """Insert ``rows``, in their order; return what the statement's ``RETURNING`` names."""
        returned: list[Row] = []
        begin = 0
        for size in ROWS_AT_ONCE:
            while len(rows) - begin >= size:
                text = self._inserts.get((insert, size))
                if text is None:
                    text = self._inserts[insert, size] = SQLITE.insert_text(insert, size)
                values = [value for row in rows[begin : begin + size] for value in row]
                returned += self.connection.execute(text, values)
                begin += size
        return returned

    def note_change(self, *, done: int = 0) -> None:
        """Do nothing: other processes see by SQLite's ``data_version`` that something changed."""


class SqliteEngine:
    """The connection that writes, and what makes its commits durable.

    Args:
        file: the database.
        prepare: creates or migrates the tables, on each new connection, outside of any transaction.
        turn: a file by whose lock several processes write one after the other; None: there is no
            other one.
        distrust_log: a log that is there already may have a hole, because its writer may have been
            killed after a sync that failed. True for the process that holds the directory's lock.

    Raises:
        OSError: ``turn`` cannot be made, or is a link.
    """

    dialect: Dialect = SQLITE
    linger: float = 0.0

    def __init__(
        self,
        file: str,
        prepare: Callable[[apsw.Connection], None],
        *,
        turn: str | None = None,
        distrust_log: bool = False,
    ) -> None:
        self.place: str = file
        self._prepare = prepare
        self._turn = None if turn is None else open_turn(turn)
        self._has_turn = False
        if distrust_log:
            report_cut_index(file)
        # Whether all that the log has is on the disk, or will be with the next sync.
        self._log_proven = not (distrust_log and has_log(file))
        #: The reason for which nothing can be written until a restart; None: all is in order.
        self.lost: str | None = None
        self._connection: apsw.Connection | None = None
        self._transaction: SqliteTransaction | None = None
        # Holds a read transaction during each commit; see _commit.
        self._reader: apsw.Connection | None = None
        self._files: StoreFile | None = None
        # Whether transactions are synced now.
        self._synced = True
        # Number of frames in the log after the commit in progress, 0 if it has written nothing;
        # and after the last commit that has written, for the checkpoints.
        self._frames = self._log_frames = 0
        #: The size of the log, in bytes, from which on it is copied after a commit.
        self.checkpoint_bytes: int = CHECKPOINT_BYTES
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

        SQLite's own wait for its write lock sleeps and asks again, which is unfair and takes a
        batch that was chosen before.
        """
        if self._turn is not None and not self._has_turn:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
            self._has_turn = True
            try:
                self._log_proven &= os.pread(self._turn, 1, 0) != UNPROVEN
            except OSError:
                self._log_proven = False

    def release(self) -> bool:
        """Let other processes write; True: a checkpoint is due, and they wait for its end.

        A sync of the checkpoint that fails must be known before another process commits.
        """
        if self._is_log_long():
            return True
        self._end_turn()
        return False

    def upkeep(self) -> None:
        """Copy a long log into the database, then let other processes write."""
        if self._is_log_long():
            self._log_frames = 0
            # As SQLite's own checkpoints do: one that fails is tried again after a later commit.
            try:
                cast("apsw.Connection", self._connection).wal_checkpoint(
                    mode=apsw.SQLITE_CHECKPOINT_PASSIVE
                )
            except apsw.Error as error:
                self._note_failed_sync(error)
        self._end_turn()

    def abandon(self) -> bool:
        """Return False: no call ends a write of a file that the disk does not answer."""
        return False

    def turn_holder(self) -> int | None:
        """Return the id of the process that holds the lock of ``turn``.

        None if there is no such file or holder, or the system does not say (Linux does).
        """
        return None if self._turn is None else lock_holder(os.fstat(self._turn).st_ino)

    def _end_turn(self) -> None:
        if self._turn is not None and self._has_turn:
            if not self._log_proven:
                self._mark(UNPROVEN)
            self._has_turn = False
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _mark(self, content: bytes) -> None:
        """Write the mark of the turn, again and again: no process may write without it."""
        while self._turn is not None:
            try:
                if os.pread(self._turn, 1, 0) == content:
                    return
                os.ftruncate(self._turn, 0)
                os.pwrite(self._turn, content, 0)
            except OSError:
                clock.sleep(LOOK_AGAIN_SECONDS)

    # -- transactions ------------------------------------------------------------------------------

    def transact(
        self, work: Callable[[SqlTransaction], None], *, durable: bool, lone: bool = False
    ) -> bool:
        """Run ``work`` in one transaction and commit it; return whether it has written anything.

        SQLite reports a page that the disk refuses to read as damage. So damage is believed only if
        it stays; until then ``work`` runs again, which callers see as a disk that hangs.

        Args:
            durable: sync the commit. One that is not synced stands in the page cache, which
                survives this process, and the next sync is that of the whole log. After a power cut
                before that, SQLite reads the log up to the first frame whose checksum fails, so
                what is lost is the end of the log (docs/adr/0071). This holds as long as no sync
                has failed; see :meth:`_prove_log`.
            lone: of no consequence, as a transaction takes no round trip.

        Raises:
            StoreUnavailableError: SQLite or the disk failed; nothing was changed.
            StoreLostError: the same, until a restart.
            Exception: what ``work`` has raised; nothing was changed.
        """
        begun: float | None = None
        while True:
            try:
                return self._transact(work, durable)
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
            # The write lock is taken first: a transaction that reads and then asks for it can fail
            # in the middle, when another process has written in between.
            connection.execute("BEGIN IMMEDIATE")
            self.transactions += 1
            transaction = cast("SqliteTransaction", self._transaction)
            transaction.begin()
            work(transaction)
            wrote = self._commit(connection)
        except BaseException:
            self._roll_back()
            raise
        if connection.txn_state():
            # A handler has left a statement unfinished, and a reader that never ends keeps the log
            # from being cleared. Only a new connection is surely without it.
            self._disconnect()
        return wrote

    def run_alone(self, work: Callable[[apsw.Connection], T]) -> T:
        """Run ``work`` with the connection, outside of any transaction, as ``VACUUM`` needs it.

        Raises:
            StoreUnavailableError: SQLite or the disk failed.
            StoreLostError: the same, until a restart.
        """
        try:
            value = work(self._connected())
            self._check_files()
        except (apsw.Error, StoreLostError) as error:
            self._roll_back()
            raise self._translate(error) from error
        except BaseException:
            self._roll_back()
            raise
        return value

    def _translate(self, error: apsw.Error | StoreLostError) -> StoreUnavailableError:
        """Return the error that callers get, and note what ``error`` says about the store."""
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

    def _commit(self, connection: apsw.Connection) -> bool:
        """Commit, and require that the commit is in the files that a restart opens.

        As soon as our write lock is free, another process may checkpoint the log and begin it anew,
        which looks the same as a log that somebody has cut. SQLite's checkpoint waits for readers
        that began before the commit, so a reader of ours begins before and ends after the check.
        """
        reading = None
        # If it cannot read, the check finds out why.
        with suppress(apsw.Error):
            # A read lasts until its statement has been stepped to the end, or is closed.
            reading = cast("apsw.Connection", self._reader).execute("SELECT 1 FROM sqlite_schema")
        try:
            connection.execute("COMMIT")
            wrote = self._frames > 0
            if not self._check_files():
                # The log was begun anew: by a checkpoint, or by somebody who cut it. A write tells.
                write_proof(connection)
                self._check_files()
        finally:
            if reading is not None:
                reading.close()
        return wrote

    def _check_files(self) -> bool:
        """Require that all commits are in the files that a restart opens; False: a write tells.

        Raises:
            StoreLostError: they are not.
        """
        files = cast("StoreFile", self._files)
        frames, self._frames = self._frames, 0
        if not frames:
            return self._look(files.is_unchanged)
        self._look(partial(files.require_written, frames))
        return True

    def _look(self, look: Callable[[], T]) -> T:
        """Return the result of ``look``, retried while the disk refuses to read.

        A commit cannot be taken back, and must not be acknowledged before it was seen. So the
        thread waits for the disk here, and callers get the error of a silent store in time.
        """
        reported = False
        while True:
            try:
                return look()
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
        """Put everything that the log has on the disk again, after a sync that failed.

        Raises:
            apsw.Error: the disk still fails.
            StoreUnavailableError: the same.
            StoreLostError: the log cannot be read back.
        """
        self._set_synced(connection, True)
        # A commit of no meaning shows whether the disk syncs again, and how long the log is.
        write_proof(connection)
        frames, self._frames = self._frames, 0
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
        """Distrust the log after an error of the disk, which may be that of a sync.

        What a sync failed to write may be commits that were not synced before, here or in another
        process, or pages that a checkpoint copied.
        """
        if isinstance(error, apsw.IOError) and self._log_proven:
            self._log_proven = False
            _log.error(
                "store.log_distrusted",
                error=str(error),
                hint="nothing is acknowledged before the log is written again and synced; it "
                "goes on by itself; check the disk (dmesg)",
            )

    def _note_frames(self, _connection: apsw.Connection, _database: str, frames: int) -> int:
        """Remember the length of the log; SQLite calls it after each commit that has written."""
        self._frames = self._log_frames = frames
        return apsw.SQLITE_OK

    def _is_log_long(self) -> bool:
        if self._connection is None or self._files is None or self.lost or not self._log_proven:
            return False
        return self._log_frames * self._files.page_size >= self.checkpoint_bytes

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
            # SQLite would silently open, or create, the file that stands in its place by now.
            self._files.require_same()
            self._files.close()
        connection = self._connection = connect_writer(self.place, self._prepare)
        try:
            self._files = StoreFile(self.place, connection)
            self._reader = connect_reader(self.place)
            # It replaces SQLite's own hook, which checkpoints inside the commit, while senders
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
        reader, self._reader = self._reader, None
        self._transaction = None
        if reader is not None:
            # First, because the last connection to close copies the log into the database, which
            # a read-only one cannot do.
            reader.close()
        if connection is not None:
            try:
                if self.lost is not None:
                    # Other files may stand in the place of ours: write nothing to them.
                    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
                connection.close()
            except apsw.Error as error:
                _log.error("store.close_failed", error=str(error))

    def close(self) -> None:
        """Close the connection and the files; nothing is called afterwards."""
        self._end_turn()
        self._disconnect()
        if self._files is not None:
            self._files.close()
        if self._turn is not None:
            os.close(self._turn)
            self._turn = None


class SqliteReader:
    """A read-only connection, for one thread at a time.

    Args:
        engine: it has opened the file; damage that the reader finds stops it, too, and what it has
            lost is not read any more.
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
        self._connection.set_progress_handler(lambda: self._interrupted, _STEPS)

    @contextmanager
    def transaction(self) -> Iterator[SqlTransaction]:
        """Read in one transaction, which sees every change that was committed before it began.

        Raises:
            ReadAgainError: SQLite found damage that may be a disk that refuses to read.
            StoreLostError: the store's files are not there any more, or are damaged.
            StoreUnavailableError: the file cannot be read.
        """
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
        """End the query in progress, or else the next one, with an error.

        Callable from any thread. SQLite's own interrupt has no effect on a query that begins later.
        """
        self._interrupted = True
        with suppress(apsw.ConnectionClosedError):
            self._connection.interrupt()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


# -- connecting ------------------------------------------------------------------------------------


def connect_writer(file: str, prepare: Callable[[apsw.Connection], None]) -> apsw.Connection:
    """Open ``file`` for writing, create it if need be, and return the connection.

    Raises:
        apsw.Error: SQLite could not open it.
        Exception: what ``prepare`` raises.
    """
    # Bodies are personal data, so a new file is private; SQLite gives its other files the same
    # mode. If this fails, SQLite's own open reports why. O_EXCL: a file that exists must not be
    # opened, as closing it would drop the locks that other connections of this process hold.
    with suppress(OSError):
        os.close(open_file(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    connection = open_database(file, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
    try:
        connection.set_busy_timeout(int(BUSY_SECONDS * 1000))
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        prepare(connection)
        _use_log(connection)
        for statement in _WRITER:
            connection.execute(statement)
        # Fails here, at the start, and not at the first delivery, if nothing can be written.
        connection.execute("BEGIN IMMEDIATE; COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reader(file: str) -> apsw.Connection:
    """Open the existing ``file`` for reading only and return the connection.

    Raises:
        apsw.Error: SQLite could not open it.
    """
    connection = open_database(file, flags=apsw.SQLITE_OPEN_READONLY)
    connection.set_busy_timeout(int(BUSY_SECONDS * 1000))
    return connection


def open_turn(file: str) -> int:
    """Open the file whose lock says which process writes; it is empty, and stays.

    Raises:
        OSError: it cannot be made, or is a link.
    """
    return open_file(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)


def _use_log(connection: apsw.Connection) -> None:
    """Switch to the write-ahead log, in which readers do not block the writer.

    The busy timeout does not apply to this statement, so it is retried here.
    """
    deadline = clock.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except apsw.BusyError:
            if clock.monotonic() >= deadline:
                raise
            clock.sleep(0.01)
        else:
            return


def write_proof(connection: apsw.Connection) -> None:
    """Commit a write that changes nothing: if it is found in the log, writes still arrive there."""
    connection.execute("BEGIN IMMEDIATE")
    sync_log(connection)
    connection.execute("COMMIT")


def sync_log(connection: apsw.Connection) -> None:
    """Write what changes nothing: with its commit all is synced that was not synced before it.

    SQLite writes the page of this value also when it stays the same.
    """
    connection.execute(f"PRAGMA user_version = {connection.pragma('user_version')}")


def clear_log(connection: apsw.Connection, seconds: float) -> bool:
    """Copy the write-ahead log into the database and cut it; False while a reader needs it."""
    connection.set_busy_timeout(int(seconds * 1000))
    try:
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.BusyError:
        return False
    finally:
        connection.set_busy_timeout(int(BUSY_SECONDS * 1000))
    return True


#: Marks a store in which nothing was ever deleted without being overwritten.
MARK_AS_WIPED = "INSERT OR REPLACE INTO checkpoint VALUES ('storage.wiped', '1')"

#: Makes the next wipe rewrite the database. ``secure_delete`` overwrites a deleted row where it was
#: last, but when SQLite splits a page, the old page may keep a copy of rows that moved (0 to 5 of
#: 1200 deleted rows could still be read). A purge must leave nothing, so it removes the mark.
MARK_AS_UNWIPED = "DELETE FROM checkpoint WHERE name = 'storage.wiped'"

_IS_WIPED = "SELECT count(*) FROM checkpoint WHERE name = 'storage.wiped'"


def overwrite_remnants(connection: apsw.Connection) -> None:
    """Remove data from the database that was deleted without being overwritten.

    Rewrites the database, which holds up every other write, after the purge of a tenant.
    """
    if not connection.execute(_IS_WIPED).get:
        # It copies the whole database, which must not be in memory.
        connection.execute("PRAGMA temp_store = FILE")
        try:
            connection.execute("VACUUM")
        finally:
            connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(MARK_AS_WIPED)


# -- errors ----------------------------------------------------------------------------------------

_FULL = "the disk or its quota is full; free some space, it continues by itself"
_DAMAGED = "it is damaged; stop, and restore a backup ('storage restore')"
_READ_ONLY = "it or its directory is read-only; make both writable for this user"

#: Remedies by SQLite's extended result code, where that says more than the class of the error.
_REMEDIES_BY_CODE: dict[int, str] = {
    # SQLite extends the index by writing its last byte, and does not report why that failed.
    apsw.SQLITE_IOERR_SHMSIZE: "the disk or its quota is full: its index (-shm) cannot become "
    "larger; free some space, then restart",
    apsw.SQLITE_IOERR_SHMMAP: "its index (-shm) cannot be mapped; give the process more memory, "
    "and keep the store off network disks",
    apsw.SQLITE_IOERR_SHMOPEN: "its index (-shm) cannot be opened or made: the disk or its "
    "quota is full, or another user owns it; free some space, or check owner and mode",
    apsw.SQLITE_IOERR_NOMEM: "memory is exhausted; give the process more",
    apsw.SQLITE_IOERR_LOCK: "its file system does not lock; move it to a local disk",
    apsw.SQLITE_IOERR_SHORT_READ: _DAMAGED,
    apsw.SQLITE_IOERR_DATA: _DAMAGED,
    apsw.SQLITE_IOERR_CORRUPTFS: "its file system is damaged; check it (fsck), restore a backup",
    apsw.SQLITE_READONLY_DBMOVED: "it was moved or replaced while it was open; restart",
    apsw.SQLITE_READONLY_DIRECTORY: "its directory is read-only; make it writable for this user",
    apsw.SQLITE_CANTOPEN_ISDIR: "it is a directory; move that away",
    apsw.SQLITE_CANTOPEN_SYMLINK: "it is a symbolic link, which is refused; name the file itself",
    apsw.SQLITE_BUSY_RECOVERY: "another process recovers it after a crash; try again in a moment",
}

_REMEDIES: tuple[tuple[type[apsw.Error], str], ...] = (
    (apsw.FullError, _FULL),
    (apsw.NotADBError, "it is no SQLite database; restore a backup or move it away"),
    (apsw.CorruptError, _DAMAGED),
    (apsw.BusyError, "another process holds its write lock; end that process or try again"),
    (apsw.LockedError, "another connection holds its lock; try again"),
    (apsw.ReadOnlyError, _READ_ONLY),
    (apsw.CantOpenError, "it cannot be opened; check that the directory exists and is writable"),
    (apsw.PermissionsError, "access was refused; check its owner and mode"),
    (apsw.IOError, "the disk reported an error; check it (dmesg) and free space, then restart"),
    (apsw.NoMemError, "memory is exhausted; give the process more"),
)

#: With less free space than this, in bytes, an I/O error is reported as a full disk.
_NO_ROOM = 65_536


def describe_failure(error: apsw.Error, file: str) -> StoreUnavailableError:
    """Return the exception that callers get for ``error``: it names the file and the remedy."""
    unavailable = StoreUnavailableError(
        f"the store {file} failed: {_remedy(error, file)} ({error})"
    )
    unavailable.__cause__ = error
    return unavailable


def _remedy(error: apsw.Error, file: str) -> str:
    # SQLite has several codes for a full disk, some of which name an unrelated cause; the file
    # system itself knows.
    if isinstance(error, apsw.IOError | apsw.CantOpenError) and _is_full(file):
        return _FULL
    code = getattr(error, "extendedresult", None)
    if code in _REMEDIES_BY_CODE:
        return _REMEDIES_BY_CODE[code]
    return next((text for kind, text in _REMEDIES if isinstance(error, kind)), "this is unexpected")


def _is_full(file: str) -> bool:
    if sys.platform == "win32":
        return False
    try:
        found = os.statvfs(os.path.dirname(os.path.abspath(file)))
    except OSError:
        return False
    # Some file systems have no fixed number of inodes and report 0 of 0.
    no_inodes = found.f_files > 0 and found.f_favail == 0
    return found.f_bavail * found.f_frsize < _NO_ROOM or no_inodes
