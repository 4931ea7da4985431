"""Read-only examination of the store in PostgreSQL, for ``doctor`` and ``storage status|check``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import psycopg

from ...errors import StoreVersionError
from ..admission import TAKEN_OVER_SECONDS
from ..examine import CheckResult, StoreStatus
from .connect import PostgresAddress, StoreConnection
from .failover import TIMELINE, Timeline
from .reads import clock_offset, expired_leases, read_checkpoint
from .schema import VERSION, SchemaStep
from .writes import lane

_SERVER = """
SELECT current_setting('server_version'), current_setting('fsync') = 'on',
    pg_database_size(current_database()), pg_is_in_recovery(),
    current_setting('synchronous_standby_names') <> ''
"""

# Dead rows stay as long as something may still read them. `pg_prepared_xacts` and slots are the
# holders that nobody sees in a list of sessions. No vacuum waits for a session of another database,
# nor for another vacuum.
_HOLDERS = """
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

_TABLES = """
SELECT pg_class.relname, CASE WHEN reltuples < 0 THEN n_live_tup ELSE reltuples END::bigint,
    coalesce(n_dead_tup, 0), pg_total_relation_size(pg_class.oid)
FROM pg_class LEFT JOIN pg_stat_user_tables ON relid = pg_class.oid
WHERE relkind = 'r' AND relnamespace = to_regnamespace(quote_ident(%s))
ORDER BY pg_class.relname
"""


@attrs.frozen(kw_only=True)
class PostgresExamination:
    """The findings of a look at the database; ``size`` is that of all of it, in bytes.

    ``syncs``: its server syncs its log to disk. ``replicated``: commits wait for a standby.
    ``version``: that of the schema, None without one; ``is_current``: it is that of this program.
    ``rows``, ``dead`` and ``sizes`` are the server's estimates by table, the latter in bytes.
    ``holder`` is the oldest reader that keeps dead rows alive, with its age in seconds.
    ``blocked`` names a session that waits for a lock, the session that holds it, and the seconds
    since that one last did something. ``clock_offset`` is by how much this host's clock is ahead.
    ``standbys`` are connected to the server; ``timeline`` is what hosts have noticed of failovers.
    """

    server: str
    syncs: bool
    replicated: bool
    size: int
    version: int | None
    is_current: bool
    rows: dict[str, int] = attrs.field(factory=dict)
    dead: dict[str, int] = attrs.field(factory=dict)
    sizes: dict[str, int] = attrs.field(factory=dict)
    holder: tuple[str, float] | None = None
    blocked: tuple[str, str, float] | None = None
    clock_offset: float = 0.0
    standbys: int = 0
    timeline: Timeline | None = None
    expired_leases: int = 0


@contextmanager
def _looking(address: PostgresAddress) -> Iterator[StoreConnection]:
    """Dial, and read within one transaction."""
    connection = address.connect()
    try:
        with address.transaction(connection, reading=True):
            yield connection
    except psycopg.Error as error:
        raise address.describe(error) from error
    finally:
        connection.close()


def examine_postgres(address: PostgresAddress) -> PostgresExamination:
    """Look at the database and change nothing; blocks.

    Raises:
        StoreUnavailableError: no server answers, or it refuses.
        StoreVersionError: the server is too old, or the schema newer, or another program's.
    """
    with _looking(address) as connection:
        plan = address.plan(connection, f"the schema {address.schema} of {address.place}")
        return _examine(address, connection, is_current=not plan)


def _examine(
    address: PostgresAddress, connection: StoreConnection, *, is_current: bool
) -> PostgresExamination:
    server, syncs, size, _, replicated = connection.execute(_SERVER).fetchone() or ("",) * 5
    tables = connection.execute(_TABLES, (address.schema,)).fetchall()
    made = any(name == "checkpoint" for name, *_ in tables)
    return PostgresExamination(
        server=server,
        syncs=syncs,
        replicated=replicated,
        size=size,
        version=address.version(connection),
        is_current=is_current,
        rows={name: rows for name, rows, _, _ in tables},
        dead={name: dead for name, _, dead, _ in tables},
        sizes={name: bytes_ for name, _, _, bytes_ in tables},
        holder=connection.execute(_HOLDERS).fetchone(),
        blocked=connection.execute(_BLOCKED).fetchone(),
        clock_offset=clock_offset(connection),
        standbys=(connection.execute(_STANDBYS).fetchone() or (0,))[0],
        timeline=Timeline.read(read_checkpoint(connection, TIMELINE)) if made else None,
        expired_leases=expired_leases(connection, 0.0, TAKEN_OVER_SECONDS) if is_current else 0,
    )


def postgres_status(address: PostgresAddress) -> StoreStatus:
    """Return the version and the sizes of the store; blocks. Rows are the server's estimates.

    Raises:
        StoreUnavailableError: no server answers, or it refuses.
        StoreVersionError: the server is too old.
    """
    with _looking(address) as connection:
        try:
            place = f"the schema {address.schema} of {address.place}"
            plan: Sequence[SchemaStep] = address.plan(connection, place)
            refusal = None
        except StoreVersionError as error:
            plan, refusal = (), str(error)
        found = _examine(address, connection, is_current=not plan and refusal is None)
    return StoreStatus(
        backend="Postgres",
        place=f"{address.place}, schema {address.schema}",
        engine=f"PostgreSQL {found.server}",
        version=found.version,
        known_version=VERSION,
        statements=sum(len(step.statements) for step in plan),
        refusal=refusal,
        size=sum(found.sizes.values()),
        rows=found.rows,
        dead_rows=sum(found.dead.values()),
    )


# Each counts rows that break a rule of the schema. One statement sees one moment, so a daemon that
# works meanwhile breaks none.
_RULES = {
    "each delivery is open or ended, and not both": """
SELECT count(*) FROM arrival LEFT JOIN work USING (sequence) LEFT JOIN ended USING (sequence)
WHERE (work.sequence IS NULL) = (ended.sequence IS NULL)
""",
    "what is open has arrived": """
SELECT count(*) FROM work LEFT JOIN arrival USING (sequence) WHERE arrival.sequence IS NULL
""",
    "what has ended has arrived": """
SELECT count(*) FROM ended LEFT JOIN arrival USING (sequence) WHERE arrival.sequence IS NULL
""",
    "the count of done deliveries is right": """
SELECT abs((SELECT count(*) FROM ended) - (SELECT sum(done) FROM node))
""",
    "each attempt belongs to a delivery": """
SELECT count(*) FROM attempt LEFT JOIN arrival USING (sequence) WHERE arrival.sequence IS NULL
""",
    "each other body belongs to a delivery": """
SELECT count(*) FROM evidence LEFT JOIN arrival USING (sequence) WHERE arrival.sequence IS NULL
""",
    "ordered deliveries stand in their lane": f"""
SELECT count(*) FROM work JOIN arrival USING (sequence)
WHERE lane IS DISTINCT FROM {lane("work.ordered", "arrival.tenant_id", "arrival.subject")}
""",
    "numbers of audit and outbox lie ahead": """
SELECT count(*) FROM counter WHERE value < CASE name
    WHEN 'audit' THEN (SELECT coalesce(max(sequence), 0) FROM audit)
    WHEN 'outbox' THEN (SELECT coalesce(max(sequence), 0) FROM outbox) END
""",
    "each message belongs to a transition": """
SELECT count(*) FROM notification LEFT JOIN outbox USING (sequence) WHERE outbox.sequence IS NULL
""",
    "every index is valid": """
SELECT count(*) FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
WHERE relnamespace = to_regnamespace(current_schema()::text) AND NOT indisvalid
""",
}


def check_postgres(address: PostgresAddress, tell: Callable[[str], None]) -> list[CheckResult]:
    """Check the rules that hold between the rows; blocks, and reads every row once or twice.

    Damage of the server's files is not looked for: that is the server's own (``pg_amcheck``).

    Args:
        address: the store.
        tell: called with what is looked at next.

    Raises:
        StoreUnavailableError: no server answers, or it refuses.
        StoreVersionError: there is no schema of this version.
    """
    results = []
    with _looking(address) as connection:
        if address.plan(connection, f"the schema {address.schema} of {address.place}"):
            raise StoreVersionError(
                f"{address.place} has no schema {address.schema} of this version: 'storage status' "
                "shows what there is"
            )
        connection.execute("SET LOCAL statement_timeout TO 0")
        # Every row is read here, other than anywhere else.
        for way in ("seqscan", "mergejoin"):
            connection.execute(f"SET LOCAL enable_{way} TO on")
        for rule, statement in _RULES.items():
            tell(rule)
            (count,) = connection.execute(statement).fetchone() or (0,)
            results.append(CheckResult(rule, f"{count} rows break it" if count else None))
    return results
