"""Read-only examination of the store in PostgreSQL; see ``storage.examine``."""

from collections.abc import Callable, Sequence

import attrs

from ..base import clock
from .admission import TAKEN_OVER_SECONDS
from .engines.postgres import POSTGRESQL, PostgresTransaction
from .engines.postgres_address import PostgresAddress
from .engines.postgres_connection import StoreConnection
from .engines.postgres_failover import TIMELINE, Timeline
from .engines.postgres_migration import read_state, state_of_schema
from .examine import CheckResult, Contents, StoreStatus, check_rules, contents_of
from .sql.checkpoints import read_checkpoint
from .sql.reads import clock_offset
from .sql.schema import VERSION, pending_statements
from .sql.versions import StoreState

_SERVER = """
SELECT current_setting('server_version'), current_setting('fsync') = 'on',
    pg_database_size(current_database()),
    current_setting('synchronous_standby_names') <> ''
"""

# Dead rows stay as long as a transaction may still read them. A prepared transaction holds them,
# too, without appearing in the list of sessions. No vacuum waits for a session of another database,
# nor for another vacuum.
_OLDEST_READER = """
SELECT holder, seconds FROM (
    SELECT 'session ' || pid || ' (' || coalesce(application_name, '') || ')' AS holder,
        extract(epoch FROM now() - xact_start)::float8 AS seconds
    FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
        AND datname = current_database() AND pid NOT IN (SELECT pid FROM pg_stat_progress_vacuum)
    UNION ALL SELECT 'prepared transaction ' || gid, extract(epoch FROM now() - prepared)::float8
    FROM pg_prepared_xacts WHERE database = current_database()
) AS held WHERE seconds IS NOT NULL ORDER BY seconds DESC LIMIT 1
"""

_STANDBYS = "SELECT count(*) FROM pg_stat_replication"

_BLOCKED = """
SELECT format('session %s (%s)', waiting.pid, waiting.application_name),
    format('session %s (%s)', holding.pid, holding.application_name),
    extract(epoch FROM clock_timestamp() - holding.state_change)::float8
FROM pg_stat_activity AS waiting CROSS JOIN LATERAL unnest(pg_blocking_pids(waiting.pid)) AS held
    JOIN pg_stat_activity AS holding ON holding.pid = held
WHERE waiting.datname = current_database() AND waiting.wait_event_type = 'Lock'
ORDER BY holding.state_change LIMIT 1
"""

# A partitioned table is the sum of its partitions.
_TABLE_SIZES = """
SELECT coalesce(parent.relname, pg_class.relname),
    sum(CASE WHEN pg_class.reltuples < 0 THEN n_live_tup ELSE pg_class.reltuples END)::bigint,
    sum(coalesce(n_dead_tup, 0))::bigint, sum(pg_total_relation_size(pg_class.oid))::bigint
FROM pg_class LEFT JOIN pg_stat_user_tables ON relid = pg_class.oid
    LEFT JOIN pg_inherits ON inhrelid = pg_class.oid
    LEFT JOIN pg_class AS parent ON parent.oid = inhparent
WHERE pg_class.relkind = 'r' AND pg_class.relnamespace = to_regnamespace(quote_ident(%s))
GROUP BY 1 ORDER BY 1
"""


@attrs.frozen(kw_only=True)
class PostgresExamination:
    """The findings in the database; ``size`` is that of all of it, in bytes.

    ``syncs``: its server syncs its log to disk. ``replicated``: commits wait for a standby.
    ``version``: that of the schema, None without one.
    ``rows``, ``dead`` and ``sizes`` are the server's estimates by table, the latter in bytes.
    ``holder`` is the oldest reader that keeps dead rows alive, with its age in seconds.
    ``blocked`` names a session that waits for a lock, the session that holds it, and the seconds
    since that one last did something. ``clock_offset`` is by how much this host's clock is ahead.
    ``standbys`` are connected to the server; ``timeline`` is what hosts have noticed of failovers.
    ``contents`` is None unless the schema is that of this version.
    """

    server: str
    syncs: bool
    replicated: bool
    size: int
    version: int | None
    rows: dict[str, int] = attrs.field(factory=dict)
    dead: dict[str, int] = attrs.field(factory=dict)
    sizes: dict[str, int] = attrs.field(factory=dict)
    holder: tuple[str, float] | None = None
    blocked: tuple[str, str, float] | None = None
    clock_offset: float = 0.0
    standbys: int = 0
    timeline: Timeline | None = None
    contents: Contents | None = None


def examine_postgres(address: PostgresAddress) -> PostgresExamination:
    """Examine the database; blocks.

    Raises:
        StoreUnavailableError: no server answers, or it refuses.
        StoreVersionError: the server is too old, or the schema newer, or another program's.
    """
    with address.connected() as connection:
        state = read_state(address, connection)
        state.known_version()
        with address.transaction(connection, reading=True):
            return _examine(address, connection, state)


def _examine(
    address: PostgresAddress, connection: StoreConnection, state: StoreState
) -> PostgresExamination:
    tx = PostgresTransaction(connection, POSTGRESQL)
    server, syncs, size, replicated = connection.execute(_SERVER).fetchone() or ("",) * 4
    tables = connection.execute(_TABLE_SIZES, (address.schema,)).fetchall()
    found = PostgresExamination(
        server=server,
        syncs=syncs,
        replicated=replicated,
        size=size,
        version=state.version,
        rows={name: rows for name, rows, _, _ in tables},
        dead={name: dead for name, _, dead, _ in tables},
        sizes={name: bytes_ for name, _, _, bytes_ in tables},
        holder=connection.execute(_OLDEST_READER).fetchone(),
        blocked=connection.execute(_BLOCKED).fetchone(),
        clock_offset=clock_offset(tx),
        standbys=(connection.execute(_STANDBYS).fetchone() or (0,))[0],
    )
    if state.version != VERSION:
        return found
    return attrs.evolve(
        found,
        timeline=Timeline.read(read_checkpoint(tx, TIMELINE)),
        contents=contents_of(tx, before=clock.wall() - TAKEN_OVER_SECONDS),
    )


def status_of_database(address: PostgresAddress) -> StoreStatus:
    """Return the version and the sizes of the store; blocks. Rows are the server's estimates.

    Raises:
        StoreUnavailableError: no server answers, or it refuses.
        StoreVersionError: the server is too old.
    """
    with address.connected() as connection:
        state = read_state(address, connection)
        refusal = state.refusal()
        with address.transaction(connection, reading=True):
            found = _examine(address, connection, state)
    return StoreStatus(
        backend="Postgres",
        place=f"{address.place}, schema {address.schema}",
        engine=f"PostgreSQL {found.server}",
        version=found.version,
        statements=0 if refusal else pending_statements(POSTGRESQL, found.version),
        refusal=refusal,
        size=sum(found.sizes.values()),
        rows=found.rows,
        dead_rows=sum(found.dead.values()),
    )


def check_database(
    address: PostgresAddress, report: Callable[[str], None]
) -> Sequence[CheckResult]:
    """Check the rules that hold between the rows; blocks, and reads every row once or twice.

    The server's files are not checked for damage: use ``pg_amcheck``.

    Args:
        address: the store.
        report: called with the name of the next check.

    Raises:
        StoreUnavailableError: no server answers, or it refuses.
        StoreVersionError: there is no schema of this version.
    """
    with (
        address.connected(patient=True) as connection,
        address.transaction(connection, snapshot=True),
    ):
        state_of_schema(address, connection).require_current_or_moved()
        connection.execute("SET LOCAL statement_timeout TO 0")
        # Every row is read here, unlike anywhere else.
        for way in ("seqscan", "mergejoin"):
            connection.execute(f"SET LOCAL enable_{way} TO on".encode())
        return check_rules(PostgresTransaction(connection, POSTGRESQL), report)
