"""Connections to PostgreSQL: how one is made, what it promises, and the errors that people see.

Nothing is kept in a session that a transaction needs, except where the connection is known to be
our own. Behind a pooler that hands out another server connection for each transaction, every
transaction sets what it needs, and no statement is prepared.
"""

import math
import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import attrs
import psycopg
from psycopg import sql
from psycopg.adapt import Buffer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.string import StrDumper, TextLoader

from ...base.logs import Outage, get_logger
from ...errors import OptionsValidationError, Problem, StoreUnavailableError, StoreVersionError
from .schema import CONCURRENTLY, SchemaStep, plan_postgres_migration
from .session import FIXED, limits, set_all

#: The oldest server that has everything the statements use, and that its makers still mended when
#: this was written.
OLDEST_SERVER = 130_000

#: Time for a statement that reads, migrates or is a handler's, in seconds.
STATEMENT_SECONDS = 60

#: Time for a statement of the connection that commits for the whole process, in seconds. All of its
#: deliveries wait for that statement.
WRITE_SECONDS = 15

#: Time that this connection waits for a lock, in seconds. It is longer than a migration of another
#: host waits for one (:data:`LOCK_SECONDS`), and twice this is less than a sender waits.
LOCK_WAIT_SECONDS = 2.0

#: Time for which the server keeps a transaction of ours that sends nothing, in seconds. A host that
#: is frozen keeps others from the keys of its transaction for so long.
IDLE_SECONDS = 5

#: Time that a client waits for an answer beyond the time that the server has for it, in seconds.
SILENCE_SECONDS = 5.0

#: Time for the first statements on a new connection, in seconds.
GREETING_SECONDS = 8.0

#: Time for which a step of a migration waits for a lock before it lets others pass, in seconds.
LOCK_SECONDS = 1.0

#: Time after which a start gives up a migration that gets no lock, in seconds.
MIGRATION_SECONDS = 600.0

# Every statement is made for an index. The planner's figures of a table that fills and empties
# within minutes are always old, and for a batch of two hundred it would rather read all of
# `arrival`.
_PLANS = sql.SQL("SET enable_seqscan TO off; SET enable_mergejoin TO off; SET jit TO off")

# A plan for the values of each call costs the server more than the change of one event.
_PLANNED_ONCE = sql.SQL("SET plan_cache_mode TO force_generic_plan")

# The time that a dial may last, and the time without an answer after which a connection counts as
# dead. A sender gives up after 10 s, so a server that vanished has to be noticed before.
_DIAL: dict[str, Any] = {
    "connect_timeout": 4,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 8000,
    # Of several hosts, the primary; a standby would refuse every write.
    "target_session_attrs": "read-write",
}

#: SQLSTATEs after which a connection is of no use: shutdown, crash, and a standby that was a
#: primary or has yet to become one.
_DEAD = frozenset({"57P01", "57P02", "57P03", "57P05", "25006", "25P03", "08000", "08003", "08006"})

#: The SQLSTATE of a statement that a standby has refused, so that it surely changed nothing.
READ_ONLY = "25006"

#: SQLSTATEs of a transaction that only has to be run again: serialization failure and deadlock.
CONFLICTS = frozenset({"40001", "40P01"})

_log = get_logger("storage")


# PostgreSQL's text holds no NUL, which JSON and error messages may bring. It is written as SUB and
# "0", a SUB as SUB and "1".
class _PackedDumper(StrDumper):
    def dump(self, obj: str) -> Buffer | None:
        if "\0" in obj or "\x1a" in obj:
            obj = obj.replace("\x1a", "\x1a1").replace("\0", "\x1a0")
        return super().dump(obj)


class _PackedLoader(TextLoader):
    def load(self, data: Buffer) -> Any:
        text = super().load(data)
        if isinstance(text, str) and "\x1a" in text:
            return text.replace("\x1a0", "\0").replace("\x1a1", "\x1a")
        return text


class UnreplicatedError(StoreUnavailableError):
    """The server has committed, and warns that no synchronous standby has got it.

    It says so when its wait for the standby is cancelled (by an operator, by a time limit, by its
    own shutdown). A failover would lose what was answered 200 then.
    """


class _Line:
    """A second descriptor of a connection's socket, by which another thread can end it.

    libpq may close its own descriptor at any moment, and the number then belongs to another file.
    """

    def __init__(self, descriptor: int) -> None:
        self._lock = threading.Lock()
        self._descriptor = -1
        # Windows duplicates no sockets this way.
        if hasattr(select, "poll"):
            self._descriptor = os.dup(descriptor)

    def cut(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                line = socket.socket(fileno=self._descriptor)
                with suppress(OSError):  # the other side has ended it
                    line.shutdown(socket.SHUT_RDWR)
                line.detach()

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close


class StoreConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that knows what the transaction in progress has changed."""

    #: The name of the open store in the table ``node``.
    node: str = ""
    #: Whether a statement of :meth:`write` has changed a row.
    changed: bool = False
    #: Deliveries that have become done, less those done ones that were removed.
    done: int = 0
    #: Whether a pooler stands between, so that a session lasts for a transaction only.
    pooled: bool = False
    #: Whether the server has warned since the transaction began.
    warned: bool = False
    #: The statements that a transaction begins with, as no session lasts: behind a pooler only.
    settings: bytes | None = None
    #: The longest time that the server may take for a statement, in seconds.
    limit: float = STATEMENT_SECONDS
    _line: _Line | None = None
    _asked_at: float | None = None

    def execute(self, *args: Any, **options: Any) -> "psycopg.Cursor[tuple[Any, ...]]":
        """Execute a statement; see psycopg. :meth:`waited` counts its time."""
        with self.asking():
            return super().execute(*args, **options)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Note that the server owes an answer."""
        if self._asked_at is not None:
            yield
            return
        self._asked_at = time.monotonic()
        try:
            yield
        finally:
            self._asked_at = None

    def waited(self) -> float:
        """Return for how long a statement has waited for its answer, in seconds."""
        asked = self._asked_at
        return 0.0 if asked is None else time.monotonic() - asked

    def hold_line(self) -> None:
        """Make :meth:`cut` possible; to be called once, by the thread that has dialled."""
        self._line = _Line(self.fileno())

    def cut(self) -> None:
        """End the connection from any thread; a statement that waits for an answer raises.

        Whether that statement was run is unknown, as after any broken connection.
        """
        if self._line is not None:
            self._line.cut()

    @contextmanager
    def answering_within(self, seconds: float) -> Iterator[None]:
        """Cut the connection if the block takes longer."""
        timer = threading.Timer(seconds, self.cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """Close it; see psycopg."""
        super().close()
        if self._line is not None:
            self._line.close()

    def write(self, statement: str, values: Any = None) -> "psycopg.Cursor[tuple[Any, ...]]":
        """Execute a statement that changes rows, and note whether it has."""
        cursor = self.execute(statement, values)
        if cursor.rowcount > 0:
            self.changed = True
        return cursor

    @property
    def useless(self) -> bool:
        """Whether nothing can be done with it any more."""
        return self.closed or self.broken

    def notice_end(self) -> None:
        """Close it if the server has ended it since it was last used; wait for nothing.

        A statement that is sent into an ended connection may have been run, for all that its
        sender learns; one that was not sent has not.
        """
        if not hasattr(select, "poll"):  # Windows
            return
        poll = select.poll()
        while not self.useless:
            poll.register(self.fileno(), select.POLLIN)
            if not poll.poll(0):
                return
            try:
                self.pgconn.consume_input()
            except psycopg.Error:
                self.close()


ConnectionT = TypeVar("ConnectionT", bound=StoreConnection)


@attrs.frozen(kw_only=True)
class PostgresAddress:
    """The database and the schema of a store; its ``repr`` shows no credential.

    ``dsn`` is a connection string or URI of libpq, ``schema`` a name.
    """

    dsn: str = attrs.field(repr=False)
    schema: str = "sdk_trio"
    outage: Outage = attrs.field(factory=lambda: Outage(_log), init=False, eq=False, repr=False)
    _dialled: set[StoreConnection] = attrs.field(factory=set, init=False, eq=False, repr=False)

    @property
    def place(self) -> str:
        """The host, the database and the schema, without user and password."""
        known = _read_dsn(self.dsn)
        host = known.get("host") or known.get("hostaddr") or "the local socket"
        port = f":{known['port']}" if known.get("port") else ""
        return f"{known.get('dbname') or 'the default database'} on {host}{port}"

    def connect(self, *, writer: bool = False) -> StoreConnection:
        """Dial, and set what every transaction relies on; blocks.

        Args:
            writer: it repeats the same few statements, so that each is planned once.

        Raises:
            StoreUnavailableError: no server answers, or it refuses.
            StoreVersionError: the server is too old.
            OptionsValidationError: the connection string cannot be read.
        """
        path = sql.Identifier(self.schema).as_string(None)  # it may be a keyword
        # A temporary table that a handler has left hides none of ours behind them.
        settings = {"search_path": f"{path}, pg_temp", **FIXED}
        if writer:
            settings |= limits(WRITE_SECONDS, IDLE_SECONDS, LOCK_WAIT_SECONDS)
        else:
            settings |= limits(STATEMENT_SECONDS, STATEMENT_SECONDS, 0.0)
        more = [_PLANS, _PLANNED_ONCE] if writer else [_PLANS]
        connection = self._dial(StoreConnection, settings, more)
        connection.adapters.register_dumper(str, _PackedDumper)
        connection.adapters.register_loader("text", _PackedLoader)
        return connection

    def connect_for_handlers(self, kind: type[ConnectionT]) -> ConnectionT:
        """Dial for code that is not ours: texts and the search path are as anywhere else; blocks.

        Raises:
            StoreUnavailableError, StoreVersionError, OptionsValidationError: as :meth:`connect`.
        """
        settings = limits(STATEMENT_SECONDS, STATEMENT_SECONDS)
        return self._dial(kind, {"client_min_messages": "warning", **settings}, [])

    def _dial(
        self, kind: type[ConnectionT], settings: Mapping[str, str], more: Sequence[sql.SQL]
    ) -> ConnectionT:
        given = _read_dsn(self.dsn)
        options = {**_DIAL, "application_name": _name_of_process()}
        defaults = {name: value for name, value in options.items() if name not in given}
        connection: ConnectionT | None = None
        try:
            # Whatever the environment or the user's settings say: others cannot hold every text.
            told = make_conninfo(self.dsn, **defaults, client_encoding="UTF8")
            connection = kind.connect(told, autocommit=True)
            connection.hold_line()
            connection.limit = float(settings["statement_timeout"]) / 1000
            self._dialled.add(connection)
            with connection.answering_within(GREETING_SECONDS):
                self._prepare(connection)
                if connection.pooled:
                    connection.settings = set_all(settings, local=True).as_bytes(connection)
                else:
                    connection.execute(set_all(settings, local=False))
                    for each in more:
                        connection.execute(each)
        except psycopg.Error as error:
            if connection is not None:
                connection.close()
            raise self.describe(error) from error
        except OSError as error:  # no descriptor is left for the second one
            if connection is not None:
                connection.close()
            raise self.describe(psycopg.OperationalError(str(error))) from error
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        return connection

    def cut_silent(self) -> None:
        """Cut each connection whose server has not answered within all limits.

        The server ends a statement by its own limit. Without an answer after that, the connection
        is half-open: something between acknowledges its packets, and passes nothing on.
        """
        for connection in tuple(self._dialled):
            if connection.useless:
                self._dialled.discard(connection)
            elif (seconds := connection.waited()) > connection.limit + SILENCE_SECONDS:
                _log.warning(
                    "store.connection_cut",
                    place=self.place,
                    seconds=round(seconds, 1),
                    hint="the server did not answer; a new connection is made",
                )
                connection.cut()

    def _prepare(self, connection: StoreConnection) -> None:
        version = connection.info.server_version
        if version < OLDEST_SERVER:
            raise StoreVersionError(
                f"{self.place} is PostgreSQL {version // 10_000}; the store needs "
                f"{OLDEST_SERVER // 10_000} or later"
            )
        encoding = connection.info.parameter_status("server_encoding")
        if encoding not in (None, "UTF8", "SQL_ASCII"):
            raise StoreVersionError(
                f"{self.place} is encoded in {encoding}, which cannot hold every event: make a "
                "database with ENCODING 'UTF8' TEMPLATE template0"
            )
        connection.add_notice_handler(partial(_note_warning, connection))
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        # A pooler makes up the number that it tells its client.
        connection.pooled = row is not None and row[0] != connection.info.backend_pid
        if connection.pooled:
            connection.prepare_threshold = None

    @contextmanager
    def statement(self, connection: StoreConnection) -> Iterator[None]:
        """Run one statement that commits itself; as :meth:`transaction`, without a round trip."""
        connection.warned = False
        try:
            with connection.asking():
                yield
        except psycopg.Error as error:
            if error.sqlstate in _DEAD:
                connection.close()
            raise
        if connection.warned:
            raise self._unreplicated()

    def _unreplicated(self) -> UnreplicatedError:
        return UnreplicatedError(
            f"no standby has confirmed a commit of {self.place}: its wait was cut short; look at "
            "the replication (pg_stat_replication)"
        )

    @contextmanager
    def transaction(self, connection: StoreConnection, *, reading: bool = False) -> Iterator[None]:
        """Commit at the end of the block; roll back and raise if it raises.

        A connection that cannot be rolled back is closed, so that none is ever left in an open
        transaction.
        """
        begin = _begin(connection, reading=reading)
        try:
            connection.execute(begin)
            yield
            connection.warned = False
            connection.execute("COMMIT")
            if connection.warned:
                raise self._unreplicated()
        except BaseException as error:
            if isinstance(error, psycopg.Error) and error.sqlstate in _DEAD:
                connection.close()
            if not connection.useless:
                try:
                    connection.execute("ROLLBACK")
                except psycopg.Error:
                    connection.close()
            raise

    def describe(self, error: psycopg.Error) -> StoreUnavailableError:
        """Return the error that callers get for one of psycopg's."""
        reason = " ".join(str(error).split()) or type(error).__name__
        match error:
            case psycopg.errors.InsufficientPrivilege() if "must be owner" in reason:
                hint = "; start it once as the owner of the schema, who alone can upgrade it"
            case psycopg.errors.InsufficientPrivilege() if _OF_SCHEMA.search(reason):
                hint = self._grants()
            case psycopg.errors.InsufficientPrivilege():
                hint = "; let the user create a schema, or create it and give it to the user"
            case psycopg.errors.DiskFull():
                hint = "; free space on the server's disk"
            case psycopg.OperationalError() if "session is read-only" in reason:
                hint = (
                    "; it is a standby, or default_transaction_read_only is on for the user, the "
                    "database or the server"
                )
            case psycopg.OperationalError() if "FATAL:" in reason:
                # It answers, and refuses: a wrong password, no such database, pg_hba.conf.
                hint = "; look at the connection string; a running receiver tries again by itself"
            case psycopg.OperationalError():
                hint = "; a running receiver goes on by itself when the server answers"
            case _:
                hint = ""
        return StoreUnavailableError(f"the database {self.place}: {reason}{hint}")

    def describe_lock(self, connection: StoreConnection) -> StoreUnavailableError:
        """Return the error for a lock that was waited for in vain, with the likely holder's name.

        Args:
            connection: one without a transaction in progress.
        """
        try:
            row = connection.execute(_OLDEST_HOLDER, (self.schema,)).fetchone()
        except psycopg.Error as error:
            return self.describe(error)
        who = "no session that still has a lock of the tables; it has ended meanwhile"
        if row is not None:
            pid, name, seconds, state = row
            who = f"the session {pid} ({name}), in a transaction for {seconds:.0f} s ({state})"
        return StoreUnavailableError(
            f"the database {self.place}: a lock was not free within {LOCK_WAIT_SECONDS:g} s; its "
            f"likely holder is {who}; a host of ours that is frozen is ended by the server after "
            f"{IDLE_SECONDS} s, another session is yours to end (pg_terminate_backend)"
        )

    def _grants(self) -> str:
        """Return the statements that let the user work on a schema of another role's."""
        given = _read_dsn(self.dsn).get("user")
        user = _quoted(given) if given else "USER"
        name = _quoted(self.schema)
        return (
            f"; as the owner of the schema: GRANT USAGE ON SCHEMA {name} TO {user}; "
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {name} TO "
            f"{user}; GRANT SELECT ON ALL SEQUENCES IN SCHEMA {name} TO {user}"
        )

    def migrate(self, connection: StoreConnection) -> None:
        """Create or migrate the tables, one process at a time; blocks.

        Raises:
            StoreVersionError: the schema is newer, or another program's.
            StoreUnavailableError: others have held its tables for :data:`MIGRATION_SECONDS`, or the
                server refuses.
        """
        connection.limit = math.inf  # an index of a large table takes its time
        try:
            self._migrate(connection)
        except psycopg.Error as error:
            raise self.describe(error) from error

    def _migrate(self, connection: StoreConnection) -> None:
        place = f"the schema {self.schema} of the database {self.place}"
        deadline = time.monotonic() + MIGRATION_SECONDS
        # Most starts find the schema as it is, and must not wait for anybody.
        while steps := self._steps(connection, place):
            (step, *_) = steps
            if step.before is not None:
                told = {"schema": self.schema, "before": step.before, "after": step.version}
                _log.info("store.migrating", **told)
            try:
                if step.online:
                    self._make_indexes(connection, step.statements)
                self._take(connection, step, place)
            except psycopg.errors.LockNotAvailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def _steps(self, connection: StoreConnection, place: str) -> Sequence[SchemaStep]:
        with self.transaction(connection):
            return self.plan(connection, place)

    def _take(self, connection: StoreConnection, step: SchemaStep, place: str) -> None:
        with self.transaction(connection):
            connection.execute("SET LOCAL statement_timeout TO 0")
            self._bound_locks(connection)
            name = f"sdk_trio.{self.schema}"
            connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (name,))
            schema = sql.Identifier(self.schema)
            found = connection.execute(
                "SELECT 1 FROM pg_namespace WHERE nspname = %s", (self.schema,)
            )
            # Asked first: a user who may only use the schema may not even ask for it to be created.
            if found.fetchone() is None:
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
            # Not if another host has taken it while this one waited.
            if step in self.plan(connection, place):
                for statement in () if step.online else step.statements:
                    connection.execute(statement)
                connection.execute("UPDATE store SET version = %s", (step.version,))

    def _make_indexes(self, connection: StoreConnection, statements: Sequence[str]) -> None:
        """Make indexes beside those who write, or wait for another host that makes them."""
        # Outside of a transaction, so behind a pooler no setting holds from one to the next.
        schema = sql.Identifier(self.schema).as_string(connection)
        if not connection.pooled:
            connection.execute("SET statement_timeout TO 0")
        for statement in statements:
            index, _, table, *_ = statement.removeprefix(CONCURRENTLY).split()
            qualified = statement.replace(" ON ", f" ON {schema}.", 1)
            made = False
            while not made:
                # Another host may begin in the same moment. The two then wait for each other, until
                # the server ends one of them as a deadlock, and maybe leaves its index half-made.
                with suppress(*_MADE_AT_ONCE):
                    made = self._is_made(connection, f"{schema}.{index}", f"{schema}.{table}")
                    if not made:
                        connection.execute(qualified)
        if not connection.pooled:
            connection.execute(f"SET statement_timeout TO '{STATEMENT_SECONDS}s'")

    def _is_made(self, connection: StoreConnection, index: str, table: str) -> bool:
        """Wait while another host makes the index; remove one that its maker has left half-made."""
        while True:
            valid, being_made = _look(connection, index)
            if valid is not False:
                return bool(valid)
            if being_made:
                time.sleep(0.2)
            else:
                self._drop_half_made(connection, index, table)

    def _drop_half_made(self, connection: StoreConnection, index: str, table: str) -> None:
        with self.transaction(connection):
            self._bound_locks(connection)
            # The maker of an index holds a lock of the table, and only the commit by which the
            # index is valid may come behind that. So from here on nobody begins to make it.
            connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            _, being_made = _look(connection, index)
            # Asked anew, because that commit may have come in the middle of the first answer.
            valid, _ = _look(connection, index)
            if valid is False and not being_made:
                connection.execute(f"DROP INDEX {index}")

    def _bound_locks(self, connection: StoreConnection) -> None:
        # Whoever waits for the lock of a table keeps all behind it waiting as well, so that a long
        # reader would stop every delivery.
        connection.execute(f"SET LOCAL lock_timeout TO {LOCK_SECONDS * 1000:.0f}")

    def plan(self, connection: StoreConnection, place: str) -> Sequence[SchemaStep]:
        """Return the steps that bring the schema up to date; see ``plan_postgres_migration``.

        Raises:
            StoreVersionError: the schema is newer, or another program's, or being filled.
            StoreUnavailableError: the user may not use the schema.
        """
        tables, usable = connection.execute(_TABLES, (self.schema, self.schema)).fetchone() or (
            0,
            True,
        )
        if usable is False:
            # Tables of a schema without USAGE are as good as absent.
            raise StoreUnavailableError(
                f"the database {self.place}: the user may not use the schema {self.schema}"
                f"{self._grants()}"
            )
        version = self.version(connection)
        return plan_postgres_migration(version=version, tables=tables, place=place)

    def version(self, connection: StoreConnection) -> int | None:
        """Return the version of the schema, below 0 while a move fills it; None without one."""
        (ours,) = connection.execute("SELECT to_regclass('store')").fetchone() or (None,)
        if ours is None:
            return None
        (version,) = connection.execute("SELECT version FROM store").fetchone() or (0,)
        return int(version)


def _name_of_process() -> str:
    """Return the name by which another host names a transaction of ours that it waits for.

    PostgreSQL keeps 63 bytes of it, and replaces what is not ASCII.
    """
    host = socket.gethostname().encode("ascii", "replace").decode()
    return f"sdk_trio {host[:40]}:{os.getpid()}"


def _begin(connection: StoreConnection, *, reading: bool) -> bytes:
    """Return SQL that begins a transaction, with all that it needs in one round trip."""
    begin = b"BEGIN READ ONLY" if reading else b"BEGIN"
    return begin if connection.settings is None else begin + b";" + connection.settings


def _quoted(name: str) -> str:
    """Return an identifier as SQL, in quotes only where it needs them."""
    plain = re.fullmatch(r"[a-z_][a-z0-9_]*", name)
    return name if plain else sql.Identifier(name).as_string(None)


# A missing privilege of something that exists in the schema.
_OF_SCHEMA = re.compile(r"for (table|view|relation|sequence|function) ")

_TABLES = """
SELECT (SELECT count(*) FROM pg_tables WHERE schemaname = %s),
    (SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = %s)
"""

# The oldest transaction that has a lock of our tables, or of rows in them: after a wait, the holder
# cannot be seen any more. Readers block no writer, nor do VACUUM and CREATE INDEX CONCURRENTLY.
# Names of other roles' sessions are shown to pg_read_all_stats only.
_OLDEST_HOLDER = """
SELECT pid, coalesce(nullif(application_name, ''), usename, 'unknown'),
    extract(epoch FROM clock_timestamp() - xact_start)::float8, coalesce(state, 'unknown')
FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND xact_start IS NOT NULL AND pid IN (
        SELECT pg_locks.pid FROM pg_locks JOIN pg_class ON pg_class.oid = relation
        WHERE granted AND mode NOT IN ('AccessShareLock', 'ShareUpdateExclusiveLock')
            AND relnamespace = to_regnamespace(quote_ident(%s)))
ORDER BY xact_start LIMIT 1
"""


# Somebody makes the index while a command does so for its table, and after that until the
# transaction that has made it valid has committed.
_INDEX = """
SELECT indisvalid,
    EXISTS (SELECT 1 FROM pg_stat_progress_create_index WHERE relid = indrelid)
    OR EXISTS (SELECT 1 FROM pg_locks WHERE transactionid = pg_index.xmax)
FROM pg_index WHERE indexrelid = to_regclass(%s)
"""


_MADE_AT_ONCE = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.DuplicateTable,
    psycopg.errors.UniqueViolation,
)


def _look(connection: StoreConnection, index: str) -> tuple[bool | None, bool]:
    """Return whether the index is valid, None without one, and whether somebody makes it."""
    valid, being_made = connection.execute(_INDEX, (index,)).fetchone() or (None, False)
    return valid, bool(being_made)


def _note_warning(connection: StoreConnection, notice: psycopg.errors.Diagnostic) -> None:
    if notice.severity_nonlocalized == "WARNING":
        connection.warned = True


def _read_dsn(dsn: str) -> dict[str, Any]:
    with suppress(psycopg.Error):
        known = conninfo_to_dict(dsn)
        if not _has_misread_password(dsn, known):
            return known
    # Not psycopg's own message, which quotes the text, and with it maybe a password.
    raise OptionsValidationError(
        [
            Problem(
                "Sdk:Storage:PostgresDsnEnvVar",
                "names a variable that holds no connection string of PostgreSQL: write "
                "postgresql://USER:PASSWORD@HOST/DATABASE or host=... dbname=...; in the first "
                "form @, : and / of a password are %40, %3A and %2F",
            )
        ]
    )


def _has_misread_password(dsn: str, known: dict[str, Any]) -> bool:
    """Say whether a part of the password was read as the host or the database.

    libpq ends the password of a URI at its first @, and takes one with a slash for a host's port.
    Messages name host and database.
    """
    host, database = str(known.get("host", "")), str(known.get("dbname", ""))
    # A name that begins with @ is an abstract socket's.
    if "@" in host[1:] or "://" in database:
        return True
    return "://" in dsn and "@" in database and "%40" not in dsn


class Redial:
    """The pause between attempts to reach a server that is away: it doubles, up to 5 s.

    Args:
        outage: that of the store, which has several of these; the one that was refused first
            knows its end. A server may take connections that read, and none that write.
    """

    def __init__(self, outage: Outage) -> None:
        self._outage = outage
        self._began = False
        self._failures = 0
        self._next_at = 0.0
        self._reason: str | None = None

    def require(self) -> None:
        """Raise what the last attempt has raised while its pause lasts, and the store is away."""
        if self._reason is None or self._outage.since is None:
            return
        if time.monotonic() < self._next_at:
            self._outage.refuse()
            raise StoreUnavailableError(self._reason)

    def failed(self, error: StoreUnavailableError) -> None:
        """Note an attempt that has failed."""
        pause = min(5.0, 0.1 * 2**self._failures)
        self._next_at = time.monotonic() + pause
        self._failures = min(self._failures + 1, 10)
        begins = self._outage.fail(1)
        self._began = self._began or begins
        # One that has not dialled since the outage before has its reason still.
        if begins or self._reason is None:
            _log.store_unavailable(error)
        self._reason = str(error)

    def succeeded(self) -> None:
        """Note that the server answers."""
        if self._began:
            self._began = False
            self._outage.end()
        self._failures, self._next_at, self._reason = 0, 0.0, None
