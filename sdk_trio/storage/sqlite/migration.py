"""The move of the deliveries of an older file into the tables of this version.

Everything happens within the transaction of the migration: killed at any point, the store is as it
was before, and the next start begins anew. Rows are moved in ranges of their sequence, so memory
stays bounded however many there are. Bodies, attempts and evidence stay where they are.
"""

import os
import shutil
import time

import apsw

from ...base.logs import get_logger
from ...errors import StoreUnavailableError
from . import known
from .arrivals import index_keys
from .schema import BUCKET_BITS

#: Sequences that are moved at once: whole buckets of keys, in less than a second.
_RANGE = 4 << BUCKET_BITS

#: Time between two lines of the log, in seconds.
_TELL_SECONDS = 5.0

# Arrivals as they were is not known any more; `received` for all of them, and whatever became of it
# is in `open` or `outcome`.
_ARRIVAL = """
INSERT INTO arrival (sequence, hash, id_hash, delivery_key, signer, type, received_at, timestamp,
                     subject, ordered, tenant_id, state)
SELECT sequence, key_hash(delivery_key),
    CASE WHEN signer > '' THEN key_hash(webhook_id || '.') END, delivery_key, signer, type,
    received_at, timestamp, subject, ordered, tenant_id, 'received'
FROM inbox_before WHERE sequence > ? AND sequence <= ? ORDER BY sequence
"""

_OUTCOME = """
INSERT INTO outcome (sequence, finished_at, started_at, queued, attempts, earlier_attempts,
                     process_ends, ran_alone, last_error)
SELECT sequence, coalesce(finished_at, received_at), started_at, queued, attempts, earlier_attempts,
    process_ends, ran_alone, last_error
FROM inbox_before WHERE sequence > ? AND sequence <= ? AND state = 'done' ORDER BY sequence
"""

_OPEN = """
INSERT INTO open (sequence, state, queued, attempts, started_at, finished_at, next_attempt_at,
                  failed_at, last_error, lease_owner, lease_until, earlier_attempts, process_ends,
                  ran_alone, subject, tenant_id)
SELECT sequence, state, queued, attempts, started_at, finished_at, next_attempt_at, failed_at,
    last_error, lease_owner, lease_until, earlier_attempts, process_ends, ran_alone,
    CASE WHEN ordered THEN subject END, tenant_id
FROM inbox_before WHERE sequence > ? AND sequence <= ? AND state <> 'done' ORDER BY sequence
"""

# The highest sequence ever, also where its row has been removed.
_LAST = """
SELECT max(coalesce((SELECT max(sequence) FROM inbox_before), 0),
           coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'inbox_before'), 0))
"""

_TALLY = """
UPDATE tally SET number = CASE name
    WHEN 'last' THEN :last
    WHEN 'settled' THEN :last
    WHEN 'removed' THEN :last - (SELECT count(*) FROM arrival)
    WHEN 'unsigned' THEN coalesce((SELECT max(sequence) FROM arrival WHERE signer IS NULL), 0)
    ELSE number END
"""

_log = get_logger("storage")


def _key_hash(*texts: object) -> int:
    return known.key_hash(str(texts[0]))


def move_deliveries(connection: apsw.Connection, file: str) -> None:
    """Move the rows of ``inbox_before`` and remove it; writes within the caller's transaction.

    Raises:
        StoreUnavailableError: the disk has too little room for it; nothing was moved.
    """
    last = int(connection.execute(_LAST).get)
    rows = int(connection.execute("SELECT count(*) FROM inbox_before").get)
    if rows:
        _require_room(connection, file)
    connection.create_scalar_function("key_hash", _key_hash, 1, deterministic=True)
    told = time.monotonic()
    for after in range(0, last, _RANGE):
        for statement in (_ARRIVAL, _OUTCOME, _OPEN):
            connection.execute(statement, (after, after + _RANGE))
        index_keys(connection)
        if time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            _log.info(
                "store.migrating", file=file, percent=round(100 * min(after + _RANGE, last) / last)
            )
    connection.execute(_TALLY, {"last": last})
    connection.execute("DROP TABLE inbox_before")
    connection.create_scalar_function("key_hash", None, 1)


_PAGES = """
SELECT sum(pgsize) FROM dbstat WHERE aggregate = TRUE AND name IN (
    SELECT name FROM sqlite_schema WHERE tbl_name = 'inbox_before')
"""

#: Room for each byte of the old table and its index. The move writes the new rows into the log and
#: into the database, and the old pages, overwritten, into the log: 3.2 bytes were measured.
_ROOM = 4


def _require_room(connection: apsw.Connection, file: str) -> None:
    needed = _ROOM * int(connection.execute(_PAGES).get or 0)
    free = shutil.disk_usage(os.path.dirname(os.path.abspath(file))).free
    if free < needed:
        raise StoreUnavailableError(
            f"the store {file} needs {needed / 2**20:.0f} MiB of free space to be brought up to "
            f"date, and its disk has {free / 2**20:.0f}; free some, then start again: nothing was "
            "changed"
        )
