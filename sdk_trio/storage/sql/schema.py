"""The tables of the store, for both engines: version 1, and the steps to later versions.

A delivery has a row in ``arrival``, and one in either ``work`` or ``ended``:

===========  ======================================================================================
``arrival``  the delivery as it was received. Later changes: the retention removes the body, a
             redelivery can change ``ordered``, and the upgrade sets ``tenant_id``
``work``     the state of a delivery that is not done; the table is small
``ended``    the outcome of a done delivery
===========  ======================================================================================

On PostgreSQL, ``arrival`` and ``ended`` are partitioned by day
(:mod:`storage.engines.postgres_days`).

Columns have PostgreSQL's types; :func:`statements` gives those of SQLite.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import StoreVersionError
from .dialect import SERVER_TIME, Dialect

#: The version of the schema that this package reads and writes.
VERSION = 1

#: Versions that mark a store as moved to the other engine, or as being filled by a move or a
#: restore. No program opens such a store.
MOVED = -1
FILLING = -2

#: Marks a SQLite file as a store of this package: the bytes of "SdkT" (PRAGMA application_id).
APPLICATION_ID = 0x53646B54

#: The name of the database inside the data directory.
DATABASE_NAME = "inbox.db"

#: The checkpoint of a SQLite file without remnants: each deletion was overwritten.
#: ``secure_delete`` overwrites a deleted row at its last place. But when SQLite splits a page, the
#: old page may keep a copy of rows that moved (0 to 5 of 1200 deleted rows could still be read). A
#: purge of a tenant must leave nothing, so it removes the mark, and the next wipe rewrites the
#: database.
WIPED = "storage.wiped"
MARK_AS_WIPED = f"INSERT OR REPLACE INTO checkpoint VALUES ('{WIPED}', '1')"


def unfinished(work: str = "") -> str:
    """Return SQL that is true in the states from which the runtime continues by itself.

    Here and below, the argument is the table or its alias; empty: the statement has only one table.
    """
    return f"{_of(work)}state IN ('received', 'running', 'retrying')"


#: SQL that notes that a delivery may have run: the first start of a delivery is not awaited, so its
#: process may have ended in that run without a trace. The next start is then awaited and counted
#: (docs/adr/0047). Needed wherever a lease is taken from another process.
MAY_HAVE_RUN = "failed_at = coalesce(failed_at, 0)"

#: SQL that ends a lease.
NO_LEASE = "lease_owner = NULL, lease_token = NULL, lease_until = NULL"


def in_set_aside(work: str = "") -> str:
    """Return SQL that is true in the states in which no worker runs a delivery, or not yet."""
    return f"{_of(work)}state IN ('dead', 'parked', 'retrying')"


def sendable(notification: str = "") -> str:
    """Return SQL that is true in the states in which a message will still be sent."""
    return f"{_of(notification)}state IN ('pending', 'sending', 'retrying')"


def _of(table: str) -> str:
    return f"{table}." if table else ""


#: The sequences of a day, as a power of two. A day never needs that many, and all sequences of 89
#: years are below 2**53, the limit of exact integers in JSON.
DAY_BITS = 38

#: The tables that are partitioned by day on PostgreSQL.
PARTITIONED = ("arrival", "ended")


def make_day(number: int, until: int | None = None) -> Sequence[str]:
    """Return PostgreSQL's statements that make the partitions of the days up to ``until``.

    A table is created first and attached afterwards, so that no delivery waits.
    """
    return [
        statement
        for table in PARTITIONED
        for statement in (
            f"CREATE TABLE {table}_{number} (LIKE {table} INCLUDING ALL)",
            attach_day(table, number, number + 1 if until is None else until),
        )
    ]


def attach_day(table: str, number: int, until: int) -> str:
    """Return PostgreSQL's statement that attaches a partition that was made."""
    return (
        f"ALTER TABLE {table} ATTACH PARTITION {table}_{number} "
        f"FOR VALUES FROM ({number << DAY_BITS}) TO ({until << DAY_BITS})"
    )


# Below, `identity` is a number that the database gives, and `number` one that it never reuses. Each
# column has a line of its own: `TABLES` is read from these statements.

# `subject` and `ordered` decide the lane: unfinished events of one lane run one after the other.
# A source's delivery has its signer in `tenant_id` as well, so that lanes, filters and indexes of
# tenants are those of sources, too.
_ARRIVAL = """
CREATE TABLE arrival (
    sequence identity,
    delivery_key text COLLATE "C" NOT NULL,
    signer text NOT NULL,
    type text NOT NULL,
    received_at float8 NOT NULL,
    signed_at bigint NOT NULL,
    subject text,
    ordered boolean NOT NULL,
    tenant_id text,
    raw bytea
)
"""

# lane              digest of tenant and subject of an ordered delivery
# earlier_attempts  runs before a replay
# process_ends      runs during which the process ended
# ran_alone         no other run was beside the last of these
# generation        how often the delivery was replayed after it had been done
# failed_at         when next_attempt_at was decided: shows that a clock was set back since; 0 where
#                   a run may have ended a process without a trace (`MAY_HAVE_RUN`)
# lease_token       the run that holds the lease (storage.sql.leases)
# held_group        the group whose limits or pause it waits for or runs under
#                   (storage.sql.policies)
_WORK = """
CREATE TABLE work (
    sequence bigint PRIMARY KEY,
    state text NOT NULL CHECK (state IN ('received', 'running', 'retrying', 'dead', 'parked')),
    queued boolean NOT NULL,
    lane bytea,
    attempts integer NOT NULL,
    earlier_attempts integer NOT NULL DEFAULT 0,
    process_ends integer NOT NULL DEFAULT 0,
    ran_alone boolean NOT NULL DEFAULT false,
    generation integer NOT NULL DEFAULT 0,
    next_attempt_at float8,
    failed_at float8,
    started_at float8,
    finished_at float8,
    last_error text,
    lease_owner text,
    lease_token bigint,
    lease_until float8,
    held_group text COLLATE "C"
)
"""

# Rows come and go within seconds. The free fifth of a page lets a renewed lease stay on its page
# (a HOT update), and the vacuum must not wait for a share of the table to die.
_WORK_STORAGE = """
ALTER TABLE work SET (fillfactor = 80, autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000, autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 5000)
"""

# The deadline of a lease, its token and the number of attempts are in no index, so that changing
# them leaves the indexes as they are.
_WORK_INDEXES = (
    """
CREATE INDEX work_waiting ON work (lane, sequence)
WHERE queued AND state = 'received' AND lease_owner IS NULL AND held_group IS NULL
""",
    """
CREATE INDEX work_retrying ON work (next_attempt_at)
WHERE queued AND state = 'retrying' AND lease_owner IS NULL AND held_group IS NULL
""",
    "CREATE INDEX work_leased ON work (lease_owner) WHERE lease_owner IS NOT NULL",
    f"CREATE INDEX work_lane ON work (lane, sequence) WHERE lane IS NOT NULL AND {unfinished()}",
    f"CREATE INDEX work_kept ON work (state, sequence) WHERE {in_set_aside()}",
    """
CREATE INDEX work_held ON work (held_group, sequence)
WHERE held_group IS NOT NULL AND lease_owner IS NULL
""",
    """
CREATE INDEX work_held_leased ON work (held_group)
WHERE held_group IS NOT NULL AND lease_owner IS NOT NULL
""",
    "CREATE INDEX work_suspect ON work (sequence) WHERE process_ends > 0 AND state = 'received'",
)

# Of each lane at most one queued delivery is leased, whatever two hosts decide at the same moment.
# On SQLite one process writes at a time, and sees what the others have claimed.
_ONE_OF_A_LANE = """
CREATE UNIQUE INDEX work_lane_leased ON work (lane)
WHERE lane IS NOT NULL AND queued AND lease_owner IS NOT NULL
"""

_ENDED = """
CREATE TABLE ended (
    sequence bigint PRIMARY KEY,
    queued boolean NOT NULL,
    attempts integer NOT NULL,
    earlier_attempts integer NOT NULL DEFAULT 0,
    process_ends integer NOT NULL DEFAULT 0,
    ran_alone boolean NOT NULL DEFAULT false,
    generation integer NOT NULL DEFAULT 0,
    started_at float8,
    finished_at float8 NOT NULL,
    last_error text
)
"""

# place: where in the user's code a run failed, or what an application answered.
_ATTEMPT = (
    """
CREATE TABLE attempt (
    id identity,
    sequence bigint NOT NULL,
    number integer NOT NULL,
    started_at float8 NOT NULL,
    finished_at float8 NOT NULL,
    error text NOT NULL,
    place text,
    traceback text
)
""",
    "CREATE INDEX attempt_of ON attempt (sequence)",
)

# Other bodies than the first one that came under the key of a delivery. They go with the tenant
# that they name.
_EVIDENCE = (
    """
CREATE TABLE evidence (
    id identity,
    sequence bigint NOT NULL,
    digest bytea NOT NULL,
    received_at float8 NOT NULL,
    address text,
    raw bytea NOT NULL,
    tenant_id text,
    UNIQUE (sequence, digest)
)
""",
    "CREATE INDEX evidence_of ON evidence (tenant_id) WHERE tenant_id IS NOT NULL",
)

# Values that parts of the runtime keep across restarts, by name.
_CHECKPOINT = "CREATE TABLE checkpoint (name text PRIMARY KEY, value text NOT NULL)"

# Leases of what one process does for all: leading, upgrading. `until` is by the store's clock.
_LEASE = """
CREATE TABLE lease (
    name text PRIMARY KEY,
    owner text NOT NULL,
    term bigint NOT NULL,
    until float8 NOT NULL
)
"""

# The token bucket of a group, as storage.sql.policies counts it, by the store's clock.
_BUCKETS = """
CREATE TABLE token_bucket (
    held_group text COLLATE "C" PRIMARY KEY,
    missing float8 NOT NULL,
    as_of float8 NOT NULL
)
"""

# Pauses of events by type. A row stays when its pause has ended: who paused and resumed, and when.
_PAUSE = """
CREATE TABLE pause (
    id identity,
    glob text NOT NULL,
    since float8 NOT NULL,
    actor text NOT NULL,
    reason text NOT NULL,
    until float8,
    ended_at float8,
    ended_by text
)
"""

_TENANT = (
    """
CREATE TABLE tenant (
    id text PRIMARY KEY,
    identifier text COLLATE "C" NOT NULL UNIQUE,
    name text NOT NULL,
    status text NOT NULL CHECK (status IN ('Active', 'Suspended', 'Deactivated', 'Deleted')),
    site_manager_email text,
    site_manager_email_verified boolean NOT NULL,
    site_manager_phone text,
    organization_id text UNIQUE,
    created_at float8 NOT NULL,
    deleted_at float8,
    version bigint NOT NULL,
    credentials text
)
""",
    "CREATE INDEX tenant_status ON tenant (status, identifier)",
    # Which tenants name a source of credentials.
    """
CREATE TABLE source (
    tenant_id text NOT NULL,
    text text NOT NULL,
    PRIMARY KEY (tenant_id, text)
)
""",
    "CREATE INDEX source_text ON source (text)",
)

_AUDIT = (
    """
CREATE TABLE audit (
    sequence number,
    tenant_id text NOT NULL,
    tenant_identifier text NOT NULL,
    action text NOT NULL,
    previous_status text,
    new_status text,
    actor text NOT NULL,
    reason text,
    relaxation text,
    details text,
    occurred_at float8 NOT NULL
)
""",
    "CREATE INDEX audit_of ON audit (tenant_id, sequence)",
    # Holds the id of a tenant within the transaction that purges it, and nothing at other times.
    "CREATE TABLE purging (tenant_id text PRIMARY KEY)",
)

# The audit trail is append-only: only the rows of a tenant in `purging` may go. The table is that
# of the store, whatever search path a session has.
_AUDIT_ON_POSTGRESQL = (
    """
CREATE FUNCTION audit_unchanged() RETURNS trigger LANGUAGE plpgsql
SET search_path FROM CURRENT AS $$
BEGIN
    IF TG_OP = 'DELETE' AND EXISTS (
        SELECT 1 FROM purging WHERE purging.tenant_id = OLD.tenant_id
    ) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'the audit trail is append-only';
END $$
""",
    """
CREATE TRIGGER audit_unchanged BEFORE UPDATE OR DELETE ON audit
FOR EACH ROW EXECUTE FUNCTION audit_unchanged()
""",
    """
CREATE TRIGGER audit_not_emptied BEFORE TRUNCATE ON audit
FOR EACH STATEMENT EXECUTE FUNCTION audit_unchanged()
""",
)

# INSERT OR REPLACE removes a row without firing the DELETE trigger.
_AUDIT_ON_SQLITE = (
    """
CREATE TRIGGER audit_unchanged BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END
""",
    """
CREATE TRIGGER audit_not_replaced BEFORE INSERT ON audit
WHEN EXISTS (SELECT 1 FROM audit WHERE audit.sequence = NEW.sequence)
BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END
""",
    """
CREATE TRIGGER audit_kept BEFORE DELETE ON audit
WHEN NOT EXISTS (SELECT 1 FROM purging WHERE purging.tenant_id = OLD.tenant_id)
BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END
""",
)

# written_at: by the clock of the store. On PostgreSQL a number may appear after higher ones
# (storage.sql.tenants.settled).
_OUTBOX = (
    """
CREATE TABLE outbox (
    sequence number,
    written_at float8 NOT NULL,
    delivery_id text NOT NULL UNIQUE,
    tenant_id text NOT NULL,
    tenant_identifier text NOT NULL,
    tenant_name text NOT NULL,
    transition text NOT NULL,
    previous_status text NOT NULL,
    new_status text NOT NULL,
    reason text,
    actor text NOT NULL,
    occurred_at float8 NOT NULL,
    site_manager_email text,
    site_manager_email_verified boolean NOT NULL,
    site_manager_phone text
)
""",
    "CREATE INDEX outbox_of ON outbox (tenant_id)",
)

# The marker of the upgrade from a single tenant: no row before it has begun, one row ever after.
_UPGRADE = """
CREATE TABLE upgrade (
    id integer PRIMARY KEY CHECK (id = 1),
    state text NOT NULL CHECK (state IN ('running', 'done')),
    tenant_id text NOT NULL,
    step text NOT NULL,
    position text,
    started_at float8 NOT NULL,
    finished_at float8
)
"""

# One message of one transition on one channel. `sending` is written before the first byte leaves.
_NOTIFICATION = (
    """
CREATE TABLE notification (
    sequence bigint NOT NULL,
    channel text COLLATE "C" NOT NULL,
    state text NOT NULL CHECK (state IN
        ('pending', 'sending', 'retrying', 'sent', 'failed', 'skipped', 'unknown')),
    repeatable boolean NOT NULL,
    attempts integer NOT NULL,
    created_at float8 NOT NULL,
    next_attempt_at float8,
    started_at float8,
    finished_at float8,
    provider_id text,
    reason text,
    lease_owner text,
    lease_until float8,
    PRIMARY KEY (sequence, channel)
)
""",
    f"CREATE INDEX notification_open ON notification (channel, sequence) WHERE {sendable()}",
    """
CREATE INDEX notification_finished ON notification (finished_at) WHERE finished_at IS NOT NULL
""",
)

# One row for each condition that ever held, and one for each message about it on each channel.
# `sent` are the times of the last messages, separated by spaces.
_ALERT = (
    """
CREATE TABLE alert (
    name text PRIMARY KEY,
    detail text NOT NULL,
    opened_at float8 NOT NULL,
    closed_at float8,
    clear_since float8,
    openings integer NOT NULL,
    announced_open boolean NOT NULL,
    sent text NOT NULL
)
""",
    """
CREATE TABLE alert_message (
    id text NOT NULL,
    channel text NOT NULL,
    alert text NOT NULL,
    kind text NOT NULL,
    detail text NOT NULL,
    opened_at float8 NOT NULL,
    closed_at float8,
    created_at float8 NOT NULL,
    is_last boolean NOT NULL,
    state text NOT NULL,
    attempts integer NOT NULL,
    next_attempt_at float8,
    finished_at float8,
    reason text,
    PRIMARY KEY (id, channel)
)
""",
)

_COMMON = (
    _ARRIVAL,
    _WORK,
    *_WORK_INDEXES,
    _ENDED,
    *_ATTEMPT,
    *_EVIDENCE,
    _CHECKPOINT,
    _LEASE,
    _BUCKETS,
    _PAUSE,
    *_TENANT,
    *_AUDIT,
    *_OUTBOX,
    _UPGRADE,
    *_NOTIFICATION,
    *_ALERT,
)

# arrival_key: the keys that are known, which are unique across all partitions.
#
# day: a row for each partition of `arrival` and `ended`, which has the sequences of the days from
# `number` up to `until`, excluded. opened_at: when the first sequence of it may have been given.
# rest: it has the few rows that were left of the days that were dropped.
#
# node: a row for each open store: the number of its transactions that changed something, by which
# the others notice them, and how many deliveries it has ended more than removed. The sum is the
# count of done deliveries, which no query could count without reading them all.
#
# Types and subjects may be longer than an index takes in, so their beginnings are indexed.
_POSTGRESQL = (
    _WORK_STORAGE,
    _ONE_OF_A_LANE,
    """
CREATE TABLE arrival_key (
    delivery_key text COLLATE "C" PRIMARY KEY,
    sequence bigint NOT NULL GENERATED BY DEFAULT AS IDENTITY
)
""",
    """
CREATE TABLE day (
    number bigint PRIMARY KEY,
    until bigint NOT NULL,
    opened_at float8,
    rest boolean NOT NULL DEFAULT false
)
""",
    "CREATE INDEX arrival_at ON arrival (received_at)",
    "CREATE INDEX arrival_type ON arrival (left(type, 60), sequence)",
    "CREATE INDEX arrival_subject ON arrival (left(subject, 60), sequence) "
    "WHERE subject IS NOT NULL",
    "CREATE INDEX arrival_of ON arrival (tenant_id, sequence) WHERE tenant_id IS NOT NULL",
    "CREATE INDEX ended_at ON ended (finished_at)",
    *make_day(0),
    f"INSERT INTO day (number, until, opened_at) VALUES (0, 1, {SERVER_TIME})",
    """
CREATE TABLE node (
    id text PRIMARY KEY,
    changes bigint NOT NULL,
    done bigint NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200)
""",
    "INSERT INTO node (id, changes, done) VALUES ('', 0, 0)",
    *_AUDIT_ON_POSTGRESQL,
)

# An index of random keys costs each delivery a page of its own. So arrivals are indexed many at a
# time, and in segments, of which only the newest is written to (storage.sql.arrivals).
#
# tally: last: the highest sequence among removed arrivals; removed: how many there were; indexed:
# up to here all arrivals are in `lookup`. Sequences have no other gaps, so the number of arrivals
# is known without counting.
_SQLITE = (
    """
CREATE TABLE segment (
    number integer PRIMARY KEY, first_at float8 NOT NULL, last_at float8 NOT NULL
)
""",
    """
CREATE TABLE lookup (
    segment integer NOT NULL,
    term text NOT NULL,
    sequence integer NOT NULL,
    PRIMARY KEY (segment, term, sequence)
) WITHOUT ROWID
""",
    "CREATE TABLE tally (name text PRIMARY KEY, number integer NOT NULL)",
    "INSERT INTO tally (name, number) VALUES ('last', 0), ('removed', 0), ('indexed', 0)",
    *_AUDIT_ON_SQLITE,
)


class Table(NamedTuple):
    """A table that both engines have, the columns of its primary key, and its columns' types."""

    name: str
    keys: Sequence[str]
    columns: Mapping[str, str]


def _tables() -> Iterator[Table]:
    for statement in _COMMON:
        if (found := _MAKES_TABLE.match(statement)) is None:
            continue
        columns = dict(_COLUMN.findall(statement))
        keys = _KEYS.search(statement)
        # Otherwise the key is the first column.
        yield Table(found[1], keys[1].split(", ") if keys else [next(iter(columns))], columns)


#: SQLite's types of columns, by those of the statements above.
_SQLITE_TYPES = {
    "identity": "INTEGER PRIMARY KEY",
    # No number is reused, even after the highest was removed.
    "number": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "bigint": "INTEGER",
    "integer": "INTEGER",
    "boolean": "INTEGER",
    "float8": "REAL",
    "bytea": "BLOB",
    "text": "TEXT",
}

_MAKES_TABLE = re.compile(r"\s*CREATE TABLE (\w+)")
_COLUMN = re.compile(rf"[(,]\s*(\w+) ({'|'.join(_SQLITE_TYPES)})\b")
_KEYS = re.compile(r"PRIMARY KEY \(([\w, ]+)\)")

#: The tables that both engines have.
TABLES: Sequence[Table] = tuple(_tables())

_TYPES_OF = {table.name: table.columns for table in TABLES}


def types_of(table: str, *columns: str) -> Mapping[str, str]:
    """Return PostgreSQL's types of some columns of a table by name, without ``columns`` of all."""
    types = _TYPES_OF[table]
    numbers = ("identity", "number")
    return {name: "bigint" if types[name] in numbers else types[name] for name in columns or types}


#: All tables of a SQLite store; any other one in the file is an application's.
OWN_TABLES = frozenset((*(table.name for table in TABLES), "segment", "lookup", "tally"))

_IDENTITY = "bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"

_TYPE = re.compile(rf"(?<=[\w\"] )({'|'.join(_SQLITE_TYPES)})\b(?! [(=])")


def statements(dialect: Dialect) -> Sequence[str]:
    """Return the statements that make version 1 of the schema in an empty database."""
    if dialect.is_sqlite:
        return [_for_sqlite(statement) for statement in (*_COMMON, *_SQLITE)]
    return [_for_postgresql(statement) for statement in (*_COMMON, *_POSTGRESQL)]


def _for_postgresql(statement: str) -> str:
    made = _MAKES_TABLE.match(statement)
    if made is not None and made[1] in PARTITIONED:
        # The identity is that of `arrival_key`.
        statement = statement.replace(" identity,", " bigint PRIMARY KEY,")
        return f"{statement.rstrip()} PARTITION BY RANGE (sequence)"
    return statement.replace(" identity,", f" {_IDENTITY},").replace(" number,", f" {_IDENTITY},")


def _for_sqlite(statement: str) -> str:
    if not statement.lstrip().startswith("CREATE TABLE"):
        return statement
    head, body = statement.strip().split("(", 1)
    body = _TYPE.sub(lambda found: _SQLITE_TYPES[found[1]], body.replace(' COLLATE "C"', ""))
    made = f"{head}({body}"
    return f"{made}, STRICT" if made.endswith("WITHOUT ROWID") else f"{made} STRICT"


#: Lists of statements that lead from version 1 to 2, from 2 to 3, and so on; for each engine.
LATER_SQLITE: Sequence[Sequence[str]] = ()
LATER_POSTGRESQL: Sequence[Sequence[str]] = ()


def pending_statements(dialect: Dialect, version: int | None) -> int:
    """Return how many statements bring a schema of ``version`` (None: none yet) up to date."""
    later = LATER_SQLITE if dialect.is_sqlite else LATER_POSTGRESQL
    made = len(statements(dialect)) if version is None else 0
    return made + sum(len(step) for step in later[(version or 1) - 1 :])


#: The engines' names: for people, and of the setting.
_BACKENDS = {"SQLite": "Sqlite", "PostgreSQL": "Postgres"}


class StoreState(NamedTuple):
    """The store, or the other content, that is found in a file or a schema.

    ``place`` is its name for people, ``engine`` is SQLite or PostgreSQL. ``version`` is that of the
    schema, :data:`MOVED` or :data:`FILLING`; None without one. ``foreign``: what another program
    has there, and the remedy; None: nothing.
    """

    place: str
    engine: str
    version: int | None
    foreign: tuple[str, str] | None = None

    @property
    def backend(self) -> str:
        """The name of the engine in the settings."""
        return _BACKENDS[self.engine]

    @property
    def other_engine(self) -> str:
        """The engine that a move leads to."""
        return next(name for name in _BACKENDS if name != self.engine)

    def problem(self, newest: int = VERSION) -> tuple[str, str] | None:
        """Return why no program opens it, and the remedy; None: a start opens or migrates it.

        Args:
            newest: the newest version that this package knows.
        """
        if self.foreign is not None:
            return self.foreign
        if self.version == FILLING:
            return (
                "is being filled by 'storage migrate' or 'storage restore', which has not ended",
                "repeat that command, and start when it is done",
            )
        if self.version is not None and self.version < 0:
            return (
                f"was moved to {self.other_engine} by 'storage migrate'",
                f"set Sdk:Storage:Backend to {_BACKENDS[self.other_engine]}; events that the new "
                "store has received since are missing here",
            )
        if self.version is not None and self.version > newest:
            return (
                f"has schema version {self.version}, and this version of sdk_trio knows up to "
                f"{newest}",
                "install the version that wrote it, or restore a backup from before the upgrade",
            )
        return None

    def refusal(self, newest: int = VERSION) -> str | None:
        """Return :meth:`problem` as one text that names the store."""
        found = self.problem(newest)
        return None if found is None else f"{self.place} {found[0]}: {found[1]}"

    def known_version(self, newest: int = VERSION) -> int | None:
        """Return the version that a start finds; None: there is no schema yet.

        Raises:
            StoreVersionError: no program opens the store, see :meth:`refusal`.
        """
        if (reason := self.refusal(newest)) is not None:
            raise StoreVersionError(reason)
        return self.version

    def require_current(self) -> None:
        """Raise StoreVersionError unless a start opens the store as it is."""
        if self.known_version() != VERSION:
            raise StoreVersionError(
                f"{self.place} does not have the schema of version {VERSION}: start this version "
                "once"
            )

    def require_current_or_moved(self) -> None:
        """Raise StoreVersionError unless it is a store of this version, moved or not."""
        if self.version not in (VERSION, MOVED):
            raise StoreVersionError(
                f"{self.place} is not a store of version {VERSION}: 'storage status' shows what it "
                "is"
            )


# One statement reads all three at one moment: another process may be creating the tables.
_STATE_OF_FILE = """
SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)
FROM pragma_application_id, pragma_user_version
"""


def state_of_file(connection: Any, file: str) -> StoreState:
    """Return what is in a SQLite file.

    Args:
        connection: one of apsw.
        file: its path, for messages.
    """
    application_id, version, tables = connection.execute(_STATE_OF_FILE).fetchone()
    if application_id == APPLICATION_ID or not (application_id or version or tables):
        return StoreState(file, "SQLite", version or None)
    foreign = (
        f"is a SQLite database of another program (application id {application_id:#x})",
        "set Sdk:Storage:Path to a directory of its own, or move the file away",
    )
    return StoreState(file, "SQLite", None, foreign)


def prepare_sqlite(connection: Any, file: str) -> None:
    """Create the tables in a new SQLite file, or bring them up to date, one step at a time.

    Args:
        connection: one of apsw, outside of any transaction.
        file: its path, for messages.

    Raises:
        StoreVersionError: the file is of another program or of another version.
        apsw.Error: it cannot be read or written.
    """
    while (version := state_of_file(connection, file).known_version()) != VERSION:
        # Two processes may open a file at once: the second waits, and checks again.
        connection.execute("BEGIN IMMEDIATE")
        try:
            if state_of_file(connection, file).version == version:
                new = statements(Dialect("sqlite"))
                for statement in new if version is None else LATER_SQLITE[version - 1]:
                    connection.execute(statement)
                if version is None:
                    # Nothing was deleted yet, so no remnant has to be overwritten.
                    connection.execute(MARK_AS_WIPED)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {(version or 0) + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
