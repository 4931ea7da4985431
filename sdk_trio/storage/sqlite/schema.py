"""The tables of the store in SQLite, and the migrations that bring an older file up to date.

A delivery costs as much after a million events as after none, because its way is appended and never
rewritten (docs/adr/0046-arrivals-and-outcomes-are-appended.md):

- ``arrival`` and ``body`` get a row when it comes. It is found by the hash of its key: among the
  newest arrivals by looking at each, among all others in ``key``, to which many hashes are moved
  at once (``arrivals.index_keys``);
- ``outcome`` gets a row when it is done. A run that is recorded together with its arrival stands in
  ``arrival`` alone;
- ``open`` has a row for what is not done *and* has a story of its own: a run that took its time, a
  failure, a lease that was renewed, a dead letter. What came a moment ago and has no such row yet
  is *fresh*: its row of ``arrival`` says all. From time to time all that is fresh is given rows
  (``arrivals.settle``), so that only arrivals above ``tally.settled`` have to be looked at.

The view ``inbox`` puts them together again: a row for each delivery.
"""

import re
from collections.abc import Sequence

from ...errors import StoreVersionError

#: Marks a SQLite file as an inbox of this package: the bytes of "SdkT" (PRAGMA application_id).
APPLICATION_ID = 0x53646B54

#: The name of the database inside the data directory.
DATABASE_NAME = "inbox.db"

#: SQL of the states in which the runtime itself will still do something.
UNFINISHED = "state IN ('received', 'running', 'retrying')"

_INBOX = """
CREATE TABLE inbox (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    webhook_id TEXT NOT NULL UNIQUE,
    type TEXT NOT NULL,
    state TEXT NOT NULL
        CHECK (state IN ('received', 'running', 'retrying', 'done', 'dead', 'parked')),
    queued INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    received_at REAL NOT NULL,
    timestamp INTEGER NOT NULL,
    subject TEXT,
    ordered INTEGER NOT NULL,
    next_attempt_at REAL,
    started_at REAL,
    finished_at REAL,
    last_error TEXT,
    lease_owner TEXT,
    lease_until REAL
) STRICT
"""

# A body never changes. In the row of its delivery it would be rewritten with each change of state.
_BODY = "CREATE TABLE body (sequence INTEGER PRIMARY KEY, raw BLOB NOT NULL) STRICT"

_ATTEMPT = """
CREATE TABLE attempt (
    id INTEGER PRIMARY KEY,
    sequence INTEGER NOT NULL,
    number INTEGER NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL NOT NULL,
    error TEXT NOT NULL
) STRICT
"""

# One index serves the queries for due and leased deliveries and the counts: its columns are
# compared for equality from the left, and with all four given, rows come in order of arrival.
_OPEN = """
CREATE INDEX inbox_open ON inbox (state, queued, lease_owner, next_attempt_at)
WHERE state <> 'done'
"""

_LINE = f"""
CREATE INDEX inbox_line ON inbox (subject, sequence)
WHERE ordered = 1 AND {UNFINISHED}
"""

_ATTEMPT_OF = "CREATE INDEX attempt_of ON attempt (sequence)"

# Values that parts of the runtime keep across restarts, by name.
_CHECKPOINT = "CREATE TABLE checkpoint (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT"
# The tenant that a delivery belongs to; empty on what came before there were tenants.
_INBOX_TENANT = "ALTER TABLE inbox ADD COLUMN tenant_id TEXT"

_TENANT = """
CREATE TABLE tenant (
    id TEXT PRIMARY KEY,
    identifier TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('Active', 'Suspended', 'Deactivated', 'Deleted')),
    site_manager_email TEXT,
    site_manager_email_verified INTEGER NOT NULL,
    site_manager_phone TEXT,
    organization_id TEXT UNIQUE,
    created_at REAL NOT NULL,
    deleted_at REAL,
    version INTEGER NOT NULL,
    credentials TEXT
) STRICT
"""

# Listings and counts of one status read nothing else.
_TENANT_STATUS = "CREATE INDEX tenant_status ON tenant (status, identifier)"

_AUDIT = """
CREATE TABLE audit (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant_id TEXT NOT NULL,
    tenant_identifier TEXT NOT NULL,
    action TEXT NOT NULL,
    previous_status TEXT,
    new_status TEXT,
    actor TEXT NOT NULL,
    reason TEXT,
    relaxation TEXT,
    details TEXT,
    occurred_at REAL NOT NULL
) STRICT
"""

_AUDIT_OF = "CREATE INDEX audit_of ON audit (tenant_id, sequence)"

# Holds the id of a tenant within the transaction that purges it, and nothing at other times.
_PURGING = "CREATE TABLE purging (tenant_id TEXT PRIMARY KEY) STRICT"

_AUDIT_UNCHANGED = """
CREATE TRIGGER audit_unchanged BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END
"""

# INSERT OR REPLACE removes a row without firing the DELETE trigger below.
_AUDIT_NOT_REPLACED = """
CREATE TRIGGER audit_not_replaced BEFORE INSERT ON audit
WHEN EXISTS (SELECT 1 FROM audit WHERE audit.sequence = NEW.sequence)
BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END
"""

_AUDIT_KEPT = """
CREATE TRIGGER audit_kept BEFORE DELETE ON audit
WHEN NOT EXISTS (SELECT 1 FROM purging WHERE purging.tenant_id = OLD.tenant_id)
BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END
"""

_OUTBOX = """
CREATE TABLE outbox (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    delivery_id TEXT NOT NULL UNIQUE,
    tenant_id TEXT NOT NULL,
    tenant_identifier TEXT NOT NULL,
    tenant_name TEXT NOT NULL,
    transition TEXT NOT NULL,
    previous_status TEXT NOT NULL,
    new_status TEXT NOT NULL,
    reason TEXT,
    actor TEXT NOT NULL,
    occurred_at REAL NOT NULL,
    site_manager_email TEXT,
    site_manager_email_verified INTEGER NOT NULL,
    site_manager_phone TEXT
) STRICT
"""

_OUTBOX_OF = "CREATE INDEX outbox_of ON outbox (tenant_id)"

# The marker of the upgrade from a single tenant: no row before it has begun, one row ever after.
_UPGRADE = """
CREATE TABLE upgrade (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    state TEXT NOT NULL CHECK (state IN ('running', 'done')),
    tenant_id TEXT NOT NULL,
    step TEXT NOT NULL,
    position TEXT,
    started_at REAL NOT NULL,
    finished_at REAL
) STRICT
"""

# One message of one transition on one channel. `sending` is written before the first byte leaves.
_NOTIFICATION = """
CREATE TABLE notification (
    sequence INTEGER NOT NULL,
    channel TEXT NOT NULL,
    state TEXT NOT NULL
        CHECK (state IN ('pending', 'sending', 'retrying', 'sent', 'failed', 'skipped', 'unknown')),
    repeatable INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    created_at REAL NOT NULL,
    next_attempt_at REAL,
    started_at REAL,
    finished_at REAL,
    provider_id TEXT,
    reason TEXT,
    lease_owner TEXT,
    lease_until REAL,
    PRIMARY KEY (sequence, channel)
) STRICT, WITHOUT ROWID
"""

#: SQL of the states in which a message will still be sent by itself.
NOTIFICATION_OPEN = "state IN ('pending', 'sending', 'retrying')"

# Partial like inbox_open: finished messages are not in it.
_NOTIFICATION_OPEN = f"""
CREATE INDEX notification_open
ON notification (channel, state, lease_owner, next_attempt_at, sequence)
WHERE {NOTIFICATION_OPEN}
"""

_NOTIFICATION_FINISHED = """
CREATE INDEX notification_finished ON notification (finished_at) WHERE finished_at IS NOT NULL
"""

# process_ends: runs during which the process ended. ran_alone: no other run was beside the last of
# these. earlier_attempts: runs before a replay. failed_at: the time at which next_attempt_at was
# decided, by which a clock that was set back is noticed.
_INBOX_ENDS = (
    "ALTER TABLE inbox ADD COLUMN process_ends INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE inbox ADD COLUMN ran_alone INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE inbox ADD COLUMN earlier_attempts INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE inbox ADD COLUMN failed_at REAL",
)

# The place in the user's code at which a run failed.
_ATTEMPT_PLACE = (
    "ALTER TABLE attempt ADD COLUMN place TEXT",
    "ALTER TABLE attempt ADD COLUMN traceback TEXT",
)

# The key of a delivery is its signer and its id: `ID` for the host's, `ID.TENANT` for a tenant's.
# SQLite cannot drop a UNIQUE of a table's definition, so a unique index over two columns would need
# a copy of the table. Instead the unique column holds the key from now on, and the id is computed
# from it. Rows from before have no signer.
_KEY = (
    "ALTER TABLE inbox RENAME COLUMN webhook_id TO delivery_key",
    "ALTER TABLE inbox ADD COLUMN signer TEXT",
    "ALTER TABLE inbox ADD COLUMN webhook_id TEXT GENERATED ALWAYS AS (CASE WHEN signer > '' "
    "THEN substr(delivery_key, 1, length(delivery_key) - length(signer) - 1) "
    "ELSE delivery_key END) VIRTUAL",
)

# Lines are those of one tenant: the record of another one may have the same id.
_TENANT_LINE = (
    "DROP INDEX inbox_line",
    f"""
CREATE INDEX inbox_line ON inbox (subject, tenant_id, sequence)
WHERE ordered = 1 AND {UNFINISHED}
""",
)

# Other bodies than the first one that came under the key of a delivery.
_EVIDENCE = """
CREATE TABLE evidence (
    id INTEGER PRIMARY KEY,
    sequence INTEGER NOT NULL,
    digest BLOB NOT NULL,
    received_at REAL NOT NULL,
    address TEXT,
    raw BLOB NOT NULL,
    UNIQUE (sequence, digest)
) STRICT
"""

_SUSPECT = """
CREATE INDEX inbox_suspect ON inbox (sequence) WHERE process_ends > 0 AND state = 'received'
"""

# The tenant of the other body, as far as its signature and what it names say: it goes with that
# tenant.
_EVIDENCE_TENANT = (
    "ALTER TABLE evidence ADD COLUMN tenant_id TEXT",
    "CREATE INDEX evidence_of ON evidence (tenant_id) WHERE tenant_id IS NOT NULL",
)

# Which tenants name a source of credentials: to know, nobody has to read all tenants.
_SOURCE = """
CREATE TABLE source (
    tenant_id TEXT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (tenant_id, text)
) STRICT, WITHOUT ROWID
"""

_SOURCE_TEXT = "CREATE INDEX source_text ON source (text)"


def _add_sources(tenants: str) -> str:
    """Return SQL that keeps what the credentials of ``tenants``, its table or a row, name."""
    return f"""
INSERT INTO source (tenant_id, text)
SELECT one.id, named.value
    FROM {tenants} AS one, json_each(one.credentials, '$.webhook_secrets') AS named
UNION SELECT one.id, one.credentials ->> 'access_token' FROM {tenants} AS one
    WHERE one.credentials ->> 'access_token' IS NOT NULL
"""


_NEW = _add_sources("(SELECT NEW.id AS id, NEW.credentials AS credentials)")
_SOURCE_GONE = "DELETE FROM source WHERE tenant_id = OLD.id"

_SOURCES = (
    _SOURCE,
    _SOURCE_TEXT,
    _add_sources("tenant"),
    f"CREATE TRIGGER source_added AFTER INSERT ON tenant BEGIN {_NEW}; END",
    f"""
CREATE TRIGGER source_changed AFTER UPDATE OF credentials ON tenant
WHEN OLD.credentials IS NOT NEW.credentials
BEGIN {_SOURCE_GONE}; {_NEW}; END
""",
    f"CREATE TRIGGER source_gone AFTER DELETE ON tenant BEGIN {_SOURCE_GONE}; END",
)

# The table that held everything until now. Its rows are moved, see ``storage.sqlite.migration``.
_OLD_INBOX = (
    "DROP INDEX inbox_open",
    "DROP INDEX inbox_line",
    "DROP INDEX inbox_suspect",
    "ALTER TABLE inbox RENAME TO inbox_before",
)

# `state` to `finished_at` say how it arrived: `received` for our workers (or for an inline run that
# was cut short), `running` inline, or `done` at once. Only `tenant_id`, and the key of a row from
# before signers were kept, are changed later. `hash` is that of the key, and stands first, because
# the newest arrivals are compared with it; `id_hash` finds what tenants signed under one id.
_ARRIVAL = """
CREATE TABLE arrival (
    sequence INTEGER PRIMARY KEY,
    hash INTEGER NOT NULL,
    id_hash INTEGER,
    delivery_key TEXT NOT NULL,
    signer TEXT,
    type TEXT NOT NULL,
    received_at REAL NOT NULL,
    timestamp INTEGER NOT NULL,
    subject TEXT,
    ordered INTEGER NOT NULL,
    tenant_id TEXT,
    state TEXT NOT NULL CHECK (state IN ('received', 'running', 'done')),
    started_at REAL,
    finished_at REAL,
    lease_owner TEXT,
    lease_until REAL
) STRICT
"""

# Random hashes in one tree would change a page each, and each such page goes through the log. So
# they are added a thousand at a time, sorted, to the hundred pages of the newest bucket. The price
# is a look into each bucket for a key that nothing says is new.
_KEY_TABLE = """
CREATE TABLE key (
    bucket INTEGER NOT NULL,
    hash INTEGER NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (bucket, hash, sequence)
) STRICT, WITHOUT ROWID
"""

# The buckets that there are: one statement looks into all of them. In an emptied one there are only
# hashes that lead to nothing, which the retention removes a few at a time.
_BUCKETS = (
    "CREATE TABLE bucket (number INTEGER PRIMARY KEY) STRICT",
    "CREATE TABLE emptied (number INTEGER PRIMARY KEY) STRICT",
)

#: Arrivals whose keys share a bucket, as a power of two: 16 384 of them take half a megabyte.
BUCKET_BITS = 14

#: Arrivals of a block, as a power of two. Listings read whole blocks, 0.2 ms each.
BLOCK_BITS = 10

# Listings have indexes of blocks instead of rows, which are filled when the keys are: the time in
# which a block came, and the types and tenants that are in it. They may say too much, because a
# removed one stays until its block is empty, and never too little. A subject is found by its last
# eight characters, in which random ids differ, and compared whole.
_LISTING = (
    """
CREATE TABLE block (
    number INTEGER PRIMARY KEY, first_at REAL NOT NULL, last_at REAL NOT NULL
) STRICT
""",
    """
CREATE TABLE block_with (
    kind TEXT NOT NULL CHECK (kind IN ('type', 'tenant')),
    value TEXT NOT NULL,
    block INTEGER NOT NULL,
    PRIMARY KEY (kind, value, block)
) STRICT, WITHOUT ROWID
""",
    """
CREATE TABLE subject_end (
    bucket INTEGER NOT NULL,
    text TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (bucket, text, sequence)
) STRICT, WITHOUT ROWID
""",
)

_OUTCOME = """
CREATE TABLE outcome (
    sequence INTEGER PRIMARY KEY,
    finished_at REAL NOT NULL,
    started_at REAL,
    queued INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    earlier_attempts INTEGER NOT NULL DEFAULT 0,
    process_ends INTEGER NOT NULL DEFAULT 0,
    ran_alone INTEGER NOT NULL DEFAULT 0,
    last_error TEXT
) STRICT
"""

# `subject` is that of an ordered delivery alone, with its tenant: what it stands in line by.
# `process_ends`, `ran_alone`, `earlier_attempts` and `failed_at` are as they were in the old table.
_OPEN_TABLE = """
CREATE TABLE open (
    sequence INTEGER PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN ('received', 'running', 'retrying', 'dead', 'parked')),
    queued INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    started_at REAL,
    finished_at REAL,
    next_attempt_at REAL,
    failed_at REAL,
    last_error TEXT,
    lease_owner TEXT,
    lease_until REAL,
    earlier_attempts INTEGER NOT NULL DEFAULT 0,
    process_ends INTEGER NOT NULL DEFAULT 0,
    ran_alone INTEGER NOT NULL DEFAULT 0,
    subject TEXT,
    tenant_id TEXT
) STRICT
"""

# The first serves the queries for due and leased deliveries and their counts: its columns are
# compared for equality from the left, and with all four given, rows come in order of arrival.
# The second lists dead and parked ones, which may be many, in order of arrival.
_OPEN_INDEXES = (
    f"""
CREATE INDEX open_due ON open (state, queued, lease_owner, next_attempt_at) WHERE {UNFINISHED}
""",
    "CREATE INDEX open_aside ON open (state, sequence) WHERE state IN ('dead', 'parked')",
    f"""
CREATE INDEX open_line ON open (subject, tenant_id, sequence)
WHERE subject IS NOT NULL AND {UNFINISHED}
""",
    "CREATE INDEX open_suspect ON open (sequence) WHERE process_ends > 0 AND state = 'received'",
)

# last, removed: the highest sequence among removed arrivals, and their number. Sequences have no
# other gaps, so the number of arrivals is known without counting, and none is given twice.
# settled: up to here nothing is fresh. indexed: up to here all are in `key`. unsigned: up to here
# rows may be from before signers were kept. dead, parked: how many there are.
_TALLY = (
    """
CREATE TABLE tally (name TEXT PRIMARY KEY, number INTEGER NOT NULL) STRICT, WITHOUT ROWID
""",
    """
INSERT INTO tally VALUES
    ('last', 0), ('removed', 0), ('settled', 0), ('indexed', 0), ('unsigned', 0), ('dead', 0),
    ('parked', 0)
""",
    """
CREATE TRIGGER open_added AFTER INSERT ON open WHEN NEW.state IN ('dead', 'parked')
BEGIN UPDATE tally SET number = number + 1 WHERE name = NEW.state; END
""",
    """
CREATE TRIGGER open_changed AFTER UPDATE OF state ON open
WHEN OLD.state <> NEW.state AND (OLD.state IN ('dead', 'parked') OR NEW.state IN ('dead', 'parked'))
BEGIN
    UPDATE tally SET number = number - 1 WHERE name = OLD.state;
    UPDATE tally SET number = number + 1 WHERE name = NEW.state;
END
""",
    """
CREATE TRIGGER open_removed AFTER DELETE ON open WHEN OLD.state IN ('dead', 'parked')
BEGIN UPDATE tally SET number = number - 1 WHERE name = OLD.state; END
""",
)

#: SQL of the highest sequence whose hash has been added to ``key``, as of all before.
INDEXED = "(SELECT number FROM tally WHERE name = 'indexed')"

#: SQL of the highest sequence up to which nothing is fresh.
SETTLED = "(SELECT number FROM tally WHERE name = 'settled')"

# Deliveries that are not done and have no row in `open` yet, in the columns of `open`.
_FRESH = f"""
CREATE VIEW fresh AS
SELECT sequence, state, state = 'received' AS queued, state = 'running' AS attempts, started_at,
    lease_owner, lease_until, CASE WHEN ordered THEN subject END AS subject, tenant_id, received_at
FROM arrival
WHERE sequence > {SETTLED} AND state <> 'done'
    AND NOT EXISTS (SELECT 1 FROM outcome WHERE outcome.sequence = arrival.sequence)
    AND NOT EXISTS (SELECT 1 FROM open WHERE open.sequence = arrival.sequence)
"""

#: SQL of the sequence and the state of all that is not done.
NOT_DONE = "SELECT sequence, state FROM open UNION ALL SELECT sequence, state FROM fresh"


def _told_by(column: str, *, fresh: str, done: str | None = None) -> str:
    """Return SQL of ``column``: of the row in ``open``, else in ``outcome``, else as it arrived."""
    done = f"outcome.{column}" if done is None else done
    return (
        f"CASE WHEN open.sequence IS NOT NULL THEN open.{column} "
        f"WHEN outcome.sequence IS NOT NULL THEN {done} ELSE {fresh} END AS {column}"
    )


# Every delivery with its present state. The id is computed from the key.
_WHOLE = f"""
CREATE VIEW inbox AS
SELECT arrival.sequence AS sequence, delivery_key, signer,
    CASE WHEN signer > '' THEN substr(delivery_key, 1, length(delivery_key) - length(signer) - 1)
        ELSE delivery_key END AS webhook_id,
    type, received_at, timestamp, arrival.subject AS subject, ordered,
    arrival.tenant_id AS tenant_id,
    {_told_by("state", fresh="arrival.state", done="'done'")},
    {_told_by("queued", fresh="arrival.state = 'received'")},
    {_told_by("attempts", fresh="arrival.state <> 'received'")},
    {_told_by("started_at", fresh="arrival.started_at")},
    {_told_by("finished_at", fresh="arrival.finished_at")},
    {_told_by("last_error", fresh="NULL")},
    {_told_by("lease_owner", fresh="arrival.lease_owner", done="NULL")},
    {_told_by("lease_until", fresh="arrival.lease_until", done="NULL")},
    {_told_by("process_ends", fresh="0")},
    {_told_by("ran_alone", fresh="0")},
    {_told_by("earlier_attempts", fresh="0")},
    open.next_attempt_at AS next_attempt_at, open.failed_at AS failed_at{{more}}
FROM arrival
LEFT JOIN open ON open.sequence = arrival.sequence
LEFT JOIN outcome ON outcome.sequence = arrival.sequence
"""

# generation: how often the delivery was put back after it had been done.
_GENERATION = (
    "ALTER TABLE open ADD COLUMN generation INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE outcome ADD COLUMN generation INTEGER NOT NULL DEFAULT 0",
    "DROP VIEW inbox",
    _WHOLE.format(more=f",\n    {_told_by('generation', fresh='0')}"),
)

#: Statements that lead from version N to N + 1; ``PRAGMA user_version`` counts those applied.
MIGRATIONS: Sequence[Sequence[str]] = (
    (_INBOX, _BODY, _ATTEMPT, _OPEN, _LINE, _ATTEMPT_OF),
    (_CHECKPOINT,),
    (
        _INBOX_TENANT,
        _TENANT,
        _TENANT_STATUS,
        _AUDIT,
        _AUDIT_OF,
        _PURGING,
        _AUDIT_UNCHANGED,
        _AUDIT_NOT_REPLACED,
        _AUDIT_KEPT,
        _OUTBOX,
        _OUTBOX_OF,
        _UPGRADE,
    ),
    (_NOTIFICATION, _NOTIFICATION_OPEN, _NOTIFICATION_FINISHED),
    (*_INBOX_ENDS, *_ATTEMPT_PLACE, _SUSPECT),
    (*_KEY, *_TENANT_LINE, _EVIDENCE),
    (*_EVIDENCE_TENANT, *_SOURCES),
    (
        *_OLD_INBOX,
        _ARRIVAL,
        _KEY_TABLE,
        *_BUCKETS,
        *_LISTING,
        _OUTCOME,
        _OPEN_TABLE,
        *_OPEN_INDEXES,
        *_TALLY,
        _FRESH,
        _WHOLE.format(more=""),
    ),
    _GENERATION,
)

#: The version since which ``arrival``, ``open`` and ``outcome`` hold the deliveries.
DELIVERIES_MOVED = 8

#: The version of the schema that this package reads and writes.
VERSION = len(MIGRATIONS)

#: The tables of all versions; any other one in the file is an application's.
OWN_TABLES = frozenset(
    name
    for step in MIGRATIONS
    for statement in step
    for name in re.findall(r"^\s*CREATE TABLE (\w+)", statement)
)


def plan_migration(
    *, application_id: int, user_version: int, empty: bool, file: str
) -> Sequence[str]:
    """Return the statements that make an opened database a current inbox; none if it is one.

    Args:
        application_id: the database's ``PRAGMA application_id``.
        user_version: its ``PRAGMA user_version``; below 0 it was moved to another store.
        empty: whether it has no tables at all, as a new file.
        file: its path, for the message.

    Raises:
        StoreVersionError: it belongs to another program or to a newer version of this one.
    """
    if empty and application_id == 0 and user_version == 0:
        application_id = APPLICATION_ID
    if application_id != APPLICATION_ID:
        raise StoreVersionError(
            f"{file} is a SQLite database of another program (application id "
            f"{application_id:#x}); set Sdk:Storage:Path to a directory of its own, or move the "
            "file away"
        )
    if user_version < 0:
        raise StoreVersionError(
            f"{file} was moved to PostgreSQL by 'storage migrate': set Sdk:Storage:Backend to "
            "Postgres; what the database there has got since would be missing here"
        )
    if user_version > VERSION:
        raise StoreVersionError(
            f"{file} has schema version {user_version}, this version of sdk_trio knows up to "
            f"{VERSION}; install the version that wrote it, or restore a backup from before the "
            "upgrade"
        )
    if user_version == VERSION:
        return ()
    statements = [statement for step in MIGRATIONS[user_version:] for statement in step]
    return (
        *statements,
        f"PRAGMA application_id = {APPLICATION_ID}",
        f"PRAGMA user_version = {VERSION}",
    )
