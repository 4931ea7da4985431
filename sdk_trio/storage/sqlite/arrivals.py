"""Arrivals in SQLite: how they are added, found by their key, given a row in ``open``, removed.

Plain functions of a connection, within a transaction of the caller's. ``storage.sqlite.schema`` has
the idea: what has just arrived is *fresh*, has no row in ``open`` yet, and most is done before it
ever needs one.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import apsw

from ...records.deliveries import NewDelivery
from . import known
from .schema import BUCKET_BITS, SETTLED

#: Arrivals between two times at which all that is fresh is given rows in ``open``: so many rows at
#: most are looked at to know what is fresh. A power of two.
SETTLE_EVERY = 1024

# -- finding -----------------------------------------------------------------------------------

# Most keys that are asked for came a moment ago. Scalar subqueries: SQLite takes 1.3 us for this
# and 4.5 us for the same as a join. Where two keys have one hash, it may find the other one.
_IN_NEWEST = """
SELECT sequence FROM arrival WHERE delivery_key = ?2 AND sequence = (
    SELECT sequence FROM key WHERE bucket = (SELECT max(bucket) FROM key) AND hash = ?1)
"""

# One bucket at a time, from the newest to the oldest: 1.2 us each, and 25 us for one statement that
# walks through them.
_IN_BUCKET = """
SELECT (SELECT max(bucket) FROM key WHERE bucket < ?1),
    (SELECT sequence FROM key WHERE bucket = ?1 AND hash = ?2)
"""

_NEWEST = "SELECT max(bucket) FROM key"

_OF_HASH = """
SELECT arrival.sequence, delivery_key, signer > ''
FROM key CROSS JOIN arrival ON arrival.sequence = key.sequence WHERE bucket = ? AND hash = ?
"""


def sequence_of(connection: apsw.Connection, key: str) -> int | None:
    """Return the sequence of the delivery with this key, or None."""
    hashed = known.key_hash(key)
    row = connection.execute(_IN_NEWEST, (hashed, key)).fetchone()
    if row is not None:
        return cast("int", row[0])
    of_hash = _of_hash(connection, hashed)
    return next((sequence for sequence, text, _ in of_hash if text == key), None)


def _of_hash(connection: apsw.Connection, hashed: int) -> Iterator[tuple[int, str, int]]:
    """Yield the sequence and the key of what has this hash, and whether a tenant signed it."""
    bucket = connection.execute(_NEWEST).get
    while bucket is not None:
        ((older, found),) = connection.execute(_IN_BUCKET, (bucket, hashed))
        if found is not None:
            yield from cast("Any", connection.execute(_OF_HASH, (bucket, hashed)).fetchall())
        bucket = older


def signed_by_tenants(connection: apsw.Connection, webhook_id: str, limit: int) -> list[int]:
    """Return the sequences of up to ``limit`` deliveries of one id that tenants signed, by key."""
    prefix = f"{webhook_id}."
    rows = _of_hash(connection, known.key_hash(prefix))
    found = sorted((key, row) for row, key, signed in rows if signed and key.startswith(prefix))
    return [sequence for _, sequence in found[:limit]]


def is_of_before(connection: apsw.Connection, delivery: NewDelivery) -> bool:
    """Whether the delivery's signer has a row of this id from before signers were kept."""
    unsigned = "SELECT number FROM tally WHERE name = 'unsigned'"
    if not connection.execute(unsigned).get:
        return False
    sequence = sequence_of(connection, delivery.webhook_id)
    found = connection.execute(
        "SELECT 1 FROM arrival WHERE sequence = ? AND signer IS NULL AND tenant_id = ?",
        (sequence, delivery.signer),
    )
    return found.fetchone() is not None


# -- adding ------------------------------------------------------------------------------------

# One more than the last one ever, also where that has been removed: who lists deliveries goes on
# after a sequence, and must not miss one that has got it again.
_ADD = """
INSERT INTO arrival (sequence, delivery_key, signer, type, received_at, timestamp, subject, ordered,
                     tenant_id, state, started_at, finished_at, lease_owner, lease_until)
VALUES (1 + max(coalesce((SELECT max(sequence) FROM arrival), 0),
                (SELECT number FROM tally WHERE name = 'last')),
        ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

_ADD_BODY = "INSERT INTO body (sequence, raw) VALUES (?, ?)"

_ADD_KEY = "INSERT INTO key (bucket, hash, sequence) VALUES (?, ?, ?)"


def add(
    connection: apsw.Connection,
    delivery: NewDelivery,
    *,
    state: str,
    started_at: float | None = None,
    finished_at: float | None = None,
    lease_owner: str | None = None,
    lease_until: float | None = None,
) -> int:
    """Add a delivery with its body, whose key is not known, and return its sequence.

    ``state`` is ``received``, ``running`` or ``done``; ``storage.sqlite.schema`` says what for.
    """
    connection.execute(
        _ADD,
        (
            delivery.key,
            delivery.signer,
            delivery.type,
            delivery.received_at,
            delivery.timestamp,
            delivery.subject,
            delivery.ordered,
            delivery.tenant_id,
            state,
            started_at,
            finished_at,
            lease_owner,
            lease_until,
        ),
    )
    sequence = connection.last_insert_rowid()
    connection.execute(_ADD_BODY, (sequence, delivery.raw))
    _add_key(connection, sequence, delivery.key, delivery.webhook_id, delivery.signer)
    if not sequence % SETTLE_EVERY:
        settle(connection)
    return sequence


def hashes_of(key: str, webhook_id: str, signer: str | None) -> tuple[int, ...]:
    """Return the hashes that a delivery is found by.

    Beside its key it is that of its id and a dot for what a tenant has signed, so that all
    deliveries of one id are found without knowing the signers. No key ends with a dot.
    """
    own = known.key_hash(key)
    return (own, known.key_hash(f"{webhook_id}.")) if signer else (own,)


def _add_key(
    connection: apsw.Connection, sequence: int, key: str, webhook_id: str, signer: str | None
) -> None:
    for each in hashes_of(key, webhook_id, signer):
        connection.execute(_ADD_KEY, (sequence >> BUCKET_BITS, each, sequence))


_KEY_OF = "SELECT delivery_key, webhook_id, signer FROM inbox WHERE sequence = ?"


def take_up(connection: apsw.Connection, sequence: int, delivery: NewDelivery) -> None:
    """Make ``delivery`` the one that a known row stands for: its signer, and whether it is ordered.

    A row of before has no signer; its key becomes that of the delivery.
    """
    (row,) = connection.execute(_KEY_OF, (sequence,))
    if row[0] != delivery.key:
        _remove_key(connection, sequence, *cast("tuple[str, str, str | None]", row))
        _add_key(connection, sequence, delivery.key, delivery.webhook_id, delivery.signer)
    connection.execute(
        "UPDATE arrival SET delivery_key = ?, signer = ?, ordered = ? WHERE sequence = ?",
        (delivery.key, delivery.signer, delivery.ordered, sequence),
    )


# -- rows in `open` ----------------------------------------------------------------------------

_SETTLE = """
INSERT INTO open (sequence, state, queued, attempts, started_at, lease_owner, lease_until, subject,
                  tenant_id)
SELECT sequence, state, queued, attempts, started_at, lease_owner, lease_until, subject, tenant_id
FROM fresh
"""

_SETTLE_ONE = f"{_SETTLE} WHERE sequence = ?"

_SETTLED_NOW = f"""
UPDATE tally SET number = (SELECT max(sequence) FROM arrival)
WHERE name = 'settled' AND (SELECT max(sequence) FROM arrival) > {SETTLED}
"""


def settle(connection: apsw.Connection) -> None:
    """Give all that is fresh a row in ``open``; writes nothing if nothing has come since."""
    connection.execute(_SETTLE)
    connection.execute(_SETTLED_NOW)


def settle_one(connection: apsw.Connection, sequence: int) -> None:
    """Give this delivery a row in ``open``, if it is fresh."""
    connection.execute(_SETTLE_ONE, (sequence,))


# -- removing ----------------------------------------------------------------------------------

_REMOVE_KEY = "DELETE FROM key WHERE bucket = ? AND hash = ? AND sequence = ?"

_COUNT_REMOVED = """
UPDATE tally SET number = CASE name WHEN 'last' THEN max(number, ?1) ELSE number + ?2 END
WHERE name IN ('last', 'removed')
"""


def _remove_key(
    connection: apsw.Connection, sequence: int, key: str, webhook_id: str, signer: str | None
) -> None:
    for each in hashes_of(key, webhook_id, signer):
        connection.execute(_REMOVE_KEY, (sequence >> BUCKET_BITS, each, sequence))


def remove(connection: apsw.Connection, sequences: Iterable[int]) -> int:
    """Remove these deliveries with all that belongs to them; count those that were there."""
    removed = last = 0
    for sequence in sequences:
        row = connection.execute(_KEY_OF, (sequence,)).fetchone()
        if row is None:
            continue
        _remove_key(connection, sequence, *cast("tuple[str, str, str | None]", row))
        for table in ("body", "evidence", "attempt", "open", "outcome", "arrival"):
            connection.execute(f"DELETE FROM {table} WHERE sequence = ?", (sequence,))
        removed, last = removed + 1, max(last, sequence)
    if removed:
        connection.execute(_COUNT_REMOVED, (last, removed))
    return removed
