"""Connections to PostgreSQL: their settings, their limits, and the errors that people see.

A transaction relies on no state of its session, except where the connection is known to be direct.
Behind a pooler that gives each transaction another server connection, every transaction sets its
own parameters, and no statement is prepared.
"""

import math
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import attrs
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ...base.logs import Outage, get_logger
from ...errors import (
    OptionsValidationError,
    Problem,
    StoreLostError,
    StoreUnavailableError,
    StoreVersionError,
)
from ..sql.schema import VERSION
from ..sql.versions import StoreState
from . import CommitUnknownError
from .postgres_connection import SILENCE_SECONDS, STATEMENT_SECONDS, StoreConnection, adapt, watch

#: The oldest supported server; the statements need its features.
OLDEST_SERVER = 130_000

#: Time for a statement of the connection that commits for the whole process, in seconds. All
#: deliveries wait for that statement.
WRITE_SECONDS = 15

#: Time that this connection waits for a lock, in seconds. It is longer than another host's
#: migration waits for a lock, and twice this time is less than a sender waits.
LOCK_WAIT_SECONDS = 2.0

#: Time for which the server keeps an idle transaction of ours, in seconds. A frozen host blocks the
#: keys of its transaction for so long.
IDLE_SECONDS = 5

#: Time for each of the first statements on a new connection, in seconds.
GREETING_SECONDS = 8.0

#: Our values of settings that change the meaning of a statement or of a value. They are set for
#: each session, or behind a pooler for each transaction: PgBouncer refuses them as options of the
#: connection.
#:
#: default_transaction_read_only is left alone: failover managers and operators stop writes with it.
ENFORCED: Mapping[str, str] = {
    # A commit that no standby has confirmed is reported by a warning only.
    "client_min_messages": "warning",
    # Each statement must see what is committed when it begins, and no caller expects a conflict.
    "default_transaction_isolation": "read committed",
    # A time would lose its fraction.
    "extra_float_digits": "1",
    # With "off", a missing subject or tenant becomes the text "NULL".
    "array_nulls": "on",
    "standard_conforming_strings": "on",
}

# With "off", a crash loses the last commits, and with "local" a failover does, although they were
# answered 200. A stricter setting of the server (remote_apply) stays.
_DURABLE = (
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit') "
    "WHEN 'off' THEN 'on' WHEN 'local' THEN 'on' ELSE current_setting('synchronous_commit') "
    "END, {})"
)

# Every statement is written for an index. The planner's statistics of a table that fills and
# empties within minutes are always stale, and for a batch it would rather read all of `arrival`.
_PLANS = "SET enable_seqscan TO off; SET enable_mergejoin TO off; SET jit TO off"

# Planning a statement for the values of each call costs the server more than running it. A listing,
# however, is planned for its values: few deliveries are of one type, or nearly all.
_GENERIC_PLANS = "SET plan_cache_mode TO force_generic_plan"
_CUSTOM_PLANS = "SET plan_cache_mode TO force_custom_plan"

# The connect timeout, and the time without an answer after which a connection counts as dead. A
# sender gives up after 10 s, so an unreachable server must be detected earlier.
_DIAL: dict[str, Any] = {
    "connect_timeout": 4,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 8000,
    # Of several hosts, the primary; a standby would refuse every write.
    "target_session_attrs": "read-write",
}

# SQLSTATEs of a COMMIT that has certainly changed nothing: a standby has refused it, or the server
# had ended the transaction of a frozen host before.
_REFUSED = frozenset({"25006", "25P03"})

# Behind a pooler the settings follow BEGIN, and a changed default is too late for this transaction.
_COMMITTED: Final = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;"

_log = get_logger("storage")


ConnectionT = TypeVar("ConnectionT", bound=StoreConnection)


@attrs.frozen(kw_only=True)
class PostgresAddress:
    """The database and the schema of a store; its ``repr`` shows no credential.

    ``dsn`` is a connection string or URI of libpq, ``schema`` a name.
    """

    dsn: str = attrs.field(repr=False)
    schema: str = "sdk_trio"
    outage: Outage = attrs.field(factory=lambda: Outage(_log), init=False, eq=False, repr=False)

    @property
    def place(self) -> str:
        """The host and the database, without user and password."""
        known = _read_dsn(self.dsn)
        host = known.get("host") or known.get("hostaddr") or "the local socket"
        port = f":{known['port']}" if known.get("port") else ""
        return f"{known.get('dbname') or 'the default database'} on {host}{port}"

    @property
    def schema_place(self) -> str:
        """The schema and the database, in words."""
        return f"the schema {self.schema} of the database {self.place}"

    def connect(self, *, writer: bool = False, opened: bool = False) -> StoreConnection:
        """Connect, and set the parameters that every transaction needs; blocks.

        Args:
            writer: the connection repeats the same few statements, so each is planned once.
            opened: this process has opened the store, so it must not have been moved since.

        Raises:
            StoreUnavailableError: no server answers, or it refuses.
            StoreLostError: the store was moved since this process opened it.
            StoreVersionError: the server is too old.
            OptionsValidationError: the connection string cannot be read.
        """
        path = sql.Identifier(self.schema).as_string(None)  # it may be a keyword
        # pg_temp is last, so that no temporary table of a handler hides one of ours.
        settings = {"search_path": f"{path}, pg_temp", **ENFORCED}
        if writer:
            settings |= _limits(WRITE_SECONDS, IDLE_SECONDS, LOCK_WAIT_SECONDS)
        else:
            settings |= _limits(STATEMENT_SECONDS, STATEMENT_SECONDS, 0.0)
        plans = f"{_PLANS};{_GENERIC_PLANS if writer else _CUSTOM_PLANS}"
        connection = self._dial(StoreConnection, settings, plans, opened=opened)
        adapt(connection)
        return connection

    @contextmanager
    def connected(self, *, patient: bool = False) -> Iterator[StoreConnection]:
        """Connect for the block, and close the connection afterwards; blocks.

        Args:
            patient: statements may take any time, such as those of a copy.

        Raises:
            StoreUnavailableError: no server answers, or it failed in the block.
            StoreVersionError, OptionsValidationError: as :meth:`connect`.
        """
        connection = self.connect()
        if patient:
            connection.limit = math.inf
        try:
            yield connection
        except psycopg.Error as error:
            raise self.describe(error) from error
        finally:
            connection.close()

    def connect_for_handlers(self, kind: type[ConnectionT]) -> ConnectionT:
        """Connect for an application's code, with its own search path and types; blocks.

        Raises:
            StoreUnavailableError, StoreVersionError, OptionsValidationError: as :meth:`connect`.
            StoreLostError: the store was moved since this process opened it.
        """
        settings = _limits(STATEMENT_SECONDS, STATEMENT_SECONDS)
        settings["client_min_messages"] = "warning"
        return self._dial(kind, settings, "", opened=True)

    def _dial(
        self, kind: type[ConnectionT], settings: Mapping[str, str], plans: str, *, opened: bool
    ) -> ConnectionT:
        given = _read_dsn(self.dsn)
        options = {**_DIAL, "application_name": _name_of_process()}
        defaults = {name: value for name, value in options.items() if name not in given}
        connection: ConnectionT | None = None
        try:
            # Overrides the environment and the user's settings: other encodings cannot hold every
            # text.
            conninfo = make_conninfo(self.dsn, **defaults, client_encoding="UTF8")
            connection = kind.connect(conninfo, autocommit=True)
            connection.make_cuttable()
            connection.limit = GREETING_SECONDS - SILENCE_SECONDS
            connection.place = self.place
            watch(connection)
            self._prepare(connection, settings, plans)
            connection.limit = float(settings["statement_timeout"]) / 1000
            if opened:
                self._require_unmoved(connection)
        except (psycopg.Error, OSError, RuntimeError) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, psycopg.Error):
                raise self.describe(error) from error
            # The system has no further descriptor or thread.
            raise self.describe(psycopg.OperationalError(str(error))) from error
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        return connection

    def _prepare(
        self, connection: StoreConnection, settings: Mapping[str, str], plans: str
    ) -> None:
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
        # A pooler invents the process id that it reports to its client.
        connection.pooled = row is not None and row[0] != connection.info.backend_pid
        if connection.pooled:
            connection.prepare_threshold = None
            connection.settings = b";" + _set_all(settings, local=True).as_bytes(connection)
        else:
            connection.execute(_set_all(settings, local=False))
            if plans:
                connection.execute(plans.encode())

    def _require_unmoved(self, connection: StoreConnection) -> None:
        """Raise StoreLostError if no program may open the store now.

        'storage migrate' ends only without other connections, so a host meets a moved store when it
        connects again. A newer schema is no reason: the previous version works beside an upgrade.
        """
        query = sql.SQL("SELECT version FROM {}.store").format(sql.Identifier(self.schema))
        (version,) = connection.execute(query).fetchone() or (0,)
        state = StoreState(self.schema_place, "PostgreSQL", version)
        if (refusal := state.refusal(newest=max(version, VERSION))) is not None:
            raise StoreLostError(f"{refusal}; this process writes nothing more: restart it")

    @contextmanager
    def transaction(
        self, connection: StoreConnection, *, reading: bool = False, snapshot: bool = False
    ) -> Iterator[list[bytes]]:
        """Commit at the end of the block; roll back and raise if it raises.

        A connection that cannot be rolled back is closed, so that none is ever left in an open
        transaction. The block gets a list, and may add statements that are sent with the COMMIT.

        Args:
            reading: nothing is changed.
            snapshot: the same, and every statement sees the state at the beginning of the block.

        Raises:
            CommitUnknownError: the transaction may have been committed.
            psycopg.Error: the server failed, and has committed nothing.
        """
        reading = reading or snapshot
        begin, settings = b"BEGIN READ ONLY" if reading else b"BEGIN", connection.settings
        if snapshot:
            begin = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
            settings = settings.replace(_COMMITTED.encode(), b"")
        last: list[bytes] = []
        try:
            connection.execute(begin + settings)
            yield last
            commit = b";".join((*last, b"COMMIT"))
            if reading:
                connection.execute(commit)
            else:
                with self.committing(connection):
                    connection.execute(commit)
        except BaseException as error:
            connection.roll_back(error)
            raise

    @contextmanager
    def committing(self, connection: StoreConnection) -> Iterator[None]:
        """Distinguish an unknown commit from a failed one; the block runs the committing statement.

        Raises:
            CommitUnknownError: the statement may have been committed.
            psycopg.Error: the server failed, and has committed nothing.
        """
        connection.warned = False
        try:
            yield
        except psycopg.Error as error:
            connection.roll_back(error)
            if connection.useless and error.sqlstate not in _REFUSED:
                raise CommitUnknownError(
                    f"the connection to {self.place} broke during a commit; it continues "
                    "by itself when the server answers"
                ) from error
            raise
        if connection.warned:
            # The server warns when its wait for the standby is cancelled (by an operator, a time
            # limit, or its own shutdown). A failover would then lose deliveries that were answered
            # 200.
            raise CommitUnknownError(
                f"no standby has confirmed a commit of {self.place}: its wait was cut short; check "
                "the replication (pg_stat_replication)"
            )

    def describe(self, error: psycopg.Error) -> StoreUnavailableError:
        """Return the error that callers get for one of psycopg's."""
        reason = " ".join(str(error).split()) or type(error).__name__
        match error:
            case psycopg.errors.InsufficientPrivilege() if "must be owner" in reason:
                hint = "; start it once as the owner of the schema, who alone can upgrade it"
            case psycopg.errors.InsufficientPrivilege() if _OF_SCHEMA.search(reason):
                hint = self.grants()
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
                # The server refuses: a wrong password, no such database, pg_hba.conf.
                hint = "; check the connection string; a running receiver tries again by itself"
            case psycopg.OperationalError():
                hint = "; a running receiver continues by itself when the server answers"
            case _:
                hint = ""
        return StoreUnavailableError(f"the database {self.place}: {reason}{hint}")

    def describe_lock(self, connection: StoreConnection) -> StoreUnavailableError:
        """Return the error of a lock timeout, with the likely holder's name.

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

    def grants(self) -> str:
        """Return the statements that let the user work on a schema of another role."""
        given = _read_dsn(self.dsn).get("user")
        user = _quoted(given) if given else "USER"
        name = _quoted(self.schema)
        return (
            f"; as the owner of the schema: GRANT USAGE ON SCHEMA {name} TO {user}; "
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {name} TO "
            f"{user}; GRANT SELECT ON ALL SEQUENCES IN SCHEMA {name} TO {user}"
        )


def _limits(statement: float, idle: float, lock: float | None = None) -> dict[str, str]:
    """Return the settings of the server's time limits.

    All are in seconds; 0 means no limit. None leaves ``lock`` unchanged.
    """
    times = {"statement_timeout": statement, "idle_in_transaction_session_timeout": idle}
    if lock is not None:
        times["lock_timeout"] = lock
    return {name: f"{seconds * 1000:.0f}" for name, seconds in times.items()}


def _set_all(settings: Mapping[str, str], *, local: bool) -> sql.Composed:
    """Return statements that set all of ``settings``, for this transaction if ``local``."""
    calls = [
        sql.SQL("set_config({}, {}, {})").format(*map(sql.Literal, (name, value, local)))
        for name, value in settings.items()
    ]
    durable = sql.SQL(_DURABLE).format(sql.Literal(local))
    statements = sql.SQL("SELECT {}").format(sql.SQL(", ").join([*calls, durable]))
    if local and "default_transaction_isolation" in settings:
        statements = sql.SQL(_COMMITTED) + statements
    return statements


def _name_of_process() -> str:
    """Return the application name, which another host reports when it waits for our transaction.

    PostgreSQL keeps 63 bytes of it, and replaces what is not ASCII.
    """
    host = socket.gethostname().encode("ascii", "replace").decode()
    return f"sdk_trio {host[:40]}:{os.getpid()}"


def _note_warning(connection: StoreConnection, notice: psycopg.errors.Diagnostic) -> None:
    if notice.severity_nonlocalized == "WARNING":
        connection.warned = True


def _quoted(name: str) -> str:
    """Return an identifier as SQL, in quotes only where it needs them."""
    plain = re.fullmatch(r"[a-z_][a-z0-9_]*", name)
    return name if plain else sql.Identifier(name).as_string(None)


# Privileges that are missing for existing objects of the schema.
_OF_SCHEMA = re.compile(r"for (table|view|relation|sequence|function) ")

# The oldest transaction with a lock of our tables or their rows; after a wait, the server no longer
# shows the actual holder. Readers, VACUUM and CREATE INDEX CONCURRENTLY block no writer. Names of
# other roles' sessions are shown to pg_read_all_stats only.
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
    """Return whether a part of the password was read as the host or the database.

    libpq ends the password of a URI at its first @, and reads a password with a slash as the port.
    Messages show host and database.
    """
    host, database = str(known.get("host", "")), str(known.get("dbname", ""))
    # A name that begins with @ is an abstract socket's.
    if "@" in host[1:] or "://" in database:
        return True
    return "://" in dsn and "@" in database and "%40" not in dsn
