"""Arrivals in SQLite: how they are added, found by their key, given a row in ``open``, removed.

Plain functions of a connection, within a transaction of the caller's. ``storage.sqlite.schema`` has
the idea: what has just arrived is *fresh*, has no row in ``open`` yet, and most is done before it
ever needs one.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import apsw
import msgspec

from ...records.deliveries import NewDelivery
from . import known, listing
from .schema import BUCKET_BITS, INDEXED, SETTLED

#: Arrivals between two times at which all that is fresh gets rows in ``open``, and the hashes are
#: moved to ``key``: so many of the newest rows at most are looked at one by one. At 1024 a look
#: takes up to 80 us, and the move 2 ms.
SETTLE_EVERY = 1024

#: The most sequences that are remembered by their keys.
_MOST_REMEMBERED = 8192

# Sequences of what this process has leased and not finished yet. They only save the look: whoever
# uses one compares the key of its row, so one that was rolled back, or is of another store, is no
# harm.
_remembered: dict[str, int] = {}

# -- many rows by one statement ----------------------------------------------------------------

_T = TypeVar("_T")

#: The numbers of rows that statements exist for, the largest first: SQLite compiles each once.
ROWS_AT_ONCE = (32, 16, 8, 4, 2, 1)


def values(columns: int, rows: int) -> str:
    """Return the placeholders of so many rows for ``VALUES``."""
    return ", ".join([placeholders(columns)] * rows)


def placeholders(number: int) -> str:
    """Return so many placeholders in brackets."""
    return f"({', '.join('?' * number)})"


def in_pieces(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield the items in pieces of :data:`ROWS_AT_ONCE`, in their order."""
    begin = 0
    for rows in ROWS_AT_ONCE:
        while len(items) - begin >= rows:
            yield items[begin : begin + rows]
            begin += rows


# -- finding -----------------------------------------------------------------------------------

_HAS_KEY = "SELECT sequence FROM arrival WHERE sequence = ? AND delivery_key = ?"

_AMONG_NEWEST = f"""
SELECT sequence FROM arrival WHERE sequence > {INDEXED} AND hash = ? AND delivery_key = ?
"""

# One look into each bucket, 1.1 us; a million arrivals have 61. It is spared where something else
# says that a key is new.
_IN_BUCKETS = """
SELECT sequence FROM key WHERE bucket IN (SELECT number FROM bucket) AND hash = ?
"""

_KEY_OF = "SELECT delivery_key, signer > '' FROM arrival WHERE sequence = ?"

_SIGNED_AMONG_NEWEST = f"""
SELECT sequence, delivery_key, 1 FROM arrival WHERE sequence > {INDEXED} AND id_hash = ?
"""


def remembered(key: str) -> int | None:
    """Return the sequence that a delivery with this key probably has, or None."""
    return _remembered.get(key)


def remember(key: str, sequence: int) -> None:
    """Remember the sequence of a delivery that is about to run."""
    _remembered[key] = sequence
    if len(_remembered) > _MOST_REMEMBERED:
        _remembered.pop(next(iter(_remembered)), None)


def forget(key: str) -> None:
    """Forget the sequence of a delivery that is done."""
    _remembered.pop(key, None)


def sequence_of(connection: apsw.Connection, key: str) -> int | None:
    """Return the sequence of the delivery with this key, or None."""
    probable = _remembered.get(key)
    if probable is not None and connection.execute(_HAS_KEY, (probable, key)).fetchone():
        return probable
    hashed = known.key_hash(key)
    row = connection.execute(_AMONG_NEWEST, (hashed, key)).fetchone()
    if row is not None:
        return cast("int", row[0])
    of_hash = _of_hash(connection, hashed)
    return next((sequence for sequence, text, _ in of_hash if text == key), None)


def _of_hash(connection: apsw.Connection, hashed: int) -> Iterator[tuple[int, str, int]]:
    """Yield the sequence and the key of what is in ``key``, and whether a tenant signed it."""
    for (sequence,) in cast("Any", connection.execute(_IN_BUCKETS, (hashed,)).fetchall()):
        for key, signed in cast("Any", connection.execute(_KEY_OF, (sequence,)).fetchall()):
            yield sequence, key, signed


def signed_by_tenants(connection: apsw.Connection, webhook_id: str, limit: int) -> list[int]:
    """Return the sequences of up to ``limit`` deliveries of one id that tenants signed, by key."""
    prefix = f"{webhook_id}."
    hashed = known.key_hash(prefix)
    newest: Any = connection.execute(_SIGNED_AMONG_NEWEST, (hashed,)).fetchall()
    rows = (*newest, *_of_hash(connection, hashed))
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

_COLUMNS = """
INSERT INTO arrival (sequence, hash, id_hash, delivery_key, signer, type, received_at, timestamp,
                     subject, ordered, tenant_id, state, started_at, finished_at, lease_owner,
                     lease_until)
VALUES"""

# One more than the last one ever, also where that has been removed: who lists deliveries goes on
# after a sequence, and must not miss one that has got it again.
_LAST = """
SELECT max(coalesce((SELECT max(sequence) FROM arrival), 0),
           (SELECT number FROM tally WHERE name = 'last'))
"""


def last_sequence(connection: apsw.Connection) -> int:
    """Return the highest sequence that was ever given, 0 before the first one."""
    return cast("int", connection.execute(_LAST).get)


_ADD = {rows: f"{_COLUMNS} {values(16, rows)}" for rows in ROWS_AT_ONCE}

_ADD_BODY = {
    rows: f"INSERT INTO body (sequence, raw) VALUES {values(2, rows)}" for rows in ROWS_AT_ONCE
}


class NewArrival(msgspec.Struct):
    """A delivery whose key is not known, and how it comes; ``storage.sqlite.schema`` has why.

    ``state`` is ``received``, ``running`` or ``done``.
    """

    delivery: NewDelivery
    state: str
    started_at: float | None = None
    finished_at: float | None = None
    lease_owner: str | None = None
    lease_until: float | None = None


def add(connection: apsw.Connection, new: Sequence[NewArrival]) -> int:
    """Add deliveries of different keys with their bodies; return the sequence of the last one."""
    before = last = last_sequence(connection)
    for piece in in_pieces(new):
        _add(connection, piece, last)
        last += len(piece)
    if last // SETTLE_EVERY > before // SETTLE_EVERY:
        settle(connection)
        index_keys(connection)
    return last


def _add(connection: apsw.Connection, new: Sequence[NewArrival], last: int) -> None:
    arrivals: list[Any] = []
    bodies: list[Any] = []
    for sequence, each in enumerate(new, last + 1):
        delivery = each.delivery
        key = delivery.key
        arrivals += (
            sequence,
            *_hashes_of(key, delivery),
            key,
            delivery.signer,
            delivery.type,
            delivery.received_at,
            delivery.timestamp,
            delivery.subject,
            delivery.ordered,
            delivery.tenant_id,
            each.state,
            each.started_at,
            each.finished_at,
            each.lease_owner,
            each.lease_until,
        )
        bodies += (sequence, delivery.raw)
        if each.lease_owner is not None:
            remember(key, sequence)
    connection.execute(_ADD[len(new)], arrivals)
    connection.execute(_ADD_BODY[len(new)], bodies)


def _hashes_of(key: str, delivery: NewDelivery) -> tuple[int, int | None]:
    """Return the hash of a delivery's key, and of its id and a dot if a tenant has signed it.

    By the second all deliveries of one id are found without knowing the signers. No key ends with a
    dot.
    """
    by_id = known.key_hash(f"{delivery.webhook_id}.") if delivery.signer else None
    return known.key_hash(key), by_id


# Sorted, so that each page is changed once.
_INDEX = f"""
INSERT INTO key (bucket, hash, sequence)
SELECT sequence >> {BUCKET_BITS} AS bucket, hash, sequence FROM arrival WHERE sequence > {INDEXED}
UNION ALL SELECT sequence >> {BUCKET_BITS}, id_hash, sequence FROM arrival
    WHERE sequence > {INDEXED} AND id_hash IS NOT NULL
ORDER BY 1, 2
"""

_ADD_BUCKETS = f"""
INSERT OR IGNORE INTO bucket (number)
SELECT DISTINCT sequence >> {BUCKET_BITS} FROM arrival WHERE sequence > {INDEXED}
"""

_INDEXED_NOW = """
UPDATE tally SET number = max(number, coalesce((SELECT max(sequence) FROM arrival), 0))
WHERE name = 'indexed'
"""


def index_keys(connection: apsw.Connection) -> None:
    """Add the newest arrivals to ``key`` and to the indexes of listings."""
    for statement in (_ADD_BUCKETS, _INDEX, *listing.INDEX):
        connection.execute(statement)
    connection.execute(_INDEXED_NOW)


_IS_INDEXED = f"""
SELECT hash, id_hash, sequence <= {INDEXED}, subject FROM arrival WHERE sequence = ?
"""

_REMOVE_KEY = "DELETE FROM key WHERE bucket = ? AND hash = ? AND sequence = ?"

_TAKE_UP = """
UPDATE arrival SET delivery_key = ?, signer = ?, ordered = ?, hash = ?, id_hash = ?
WHERE sequence = ?
"""


def take_up(connection: apsw.Connection, sequence: int, delivery: NewDelivery) -> None:
    """Make ``delivery`` the one that a known row stands for: its signer, and whether it is ordered.

    A row of before has no signer; its key becomes that of the delivery.
    """
    hashes = _hashes_of(delivery.key, delivery)
    if _remove_keys(connection, sequence):
        for each in hashes:
            if each is not None:
                bindings = (sequence >> BUCKET_BITS, each, sequence)
                connection.execute("INSERT INTO key VALUES (?, ?, ?)", bindings)
    values = (delivery.key, delivery.signer, delivery.ordered, *hashes, sequence)
    connection.execute(_TAKE_UP, values)


def _remove_keys(connection: apsw.Connection, sequence: int) -> bool:
    """Remove what finds this arrival in ``key``; False if nothing does yet."""
    ((hashed, id_hash, indexed, _),) = cast("Any", connection.execute(_IS_INDEXED, (sequence,)))
    if indexed:
        for each in (hashed, id_hash):
            connection.execute(_REMOVE_KEY, (sequence >> BUCKET_BITS, each, sequence))
    return bool(indexed)


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

# A bucket is given up when it is full and none of its arrivals is left.
_GIVE_UP_BUCKET = f"""
DELETE FROM bucket WHERE number = ?1 AND (?1 + 1) << {BUCKET_BITS} <= {INDEXED}
    AND NOT EXISTS (SELECT 1 FROM arrival
        WHERE sequence >= ?1 << {BUCKET_BITS} AND sequence < (?1 + 1) << {BUCKET_BITS})
"""

_EMPTY_BUCKET = """
DELETE FROM key WHERE (bucket, hash, sequence) IN (
    SELECT bucket, hash, sequence FROM key WHERE bucket = ? LIMIT ?)
"""

#: Hashes of a bucket that was given up, of which one step removes so many: half a millisecond.
_HASHES_AT_ONCE = 500

_COUNT_REMOVED = """
UPDATE tally SET number = CASE name WHEN 'last' THEN max(number, ?1) ELSE number + ?2 END
WHERE name IN ('last', 'removed')
"""


def remove(
    connection: apsw.Connection, sequences: Iterable[int], *, keep_hashes: bool = False
) -> int:
    """Remove these deliveries with all that belongs to them; count those that were there.

    With ``keep_hashes`` the hashes of their keys stay until their bucket is empty, and lead to
    nothing: to remove each would change a random page for each delivery. The ends of subjects go
    at once, because they may be those of names.
    """
    removed: list[int] = []
    for sequence in sequences:
        row = connection.execute(_IS_INDEXED, (sequence,)).fetchone()
        if row is None:
            continue
        _, _, indexed, subject = cast("Any", row)
        if indexed:
            listing.remove_subject(connection, sequence, subject)
        if not keep_hashes:
            _remove_keys(connection, sequence)
        for table in ("body", "evidence", "attempt", "open", "outcome", "arrival"):
            connection.execute(f"DELETE FROM {table} WHERE sequence = ?", (sequence,))
        removed.append(sequence)
    if removed:
        connection.execute(_COUNT_REMOVED, (max(removed), len(removed)))
        listing.remove_blocks(connection, removed)
        for bucket in {sequence >> BUCKET_BITS for sequence in removed}:
            connection.execute(_GIVE_UP_BUCKET, (bucket,))
            if connection.changes():
                connection.execute("INSERT OR IGNORE INTO emptied VALUES (?)", (bucket,))
    return len(removed)


def empty_buckets(connection: apsw.Connection) -> None:
    """Remove some of the hashes that a bucket without arrivals still has."""
    bucket = connection.execute("SELECT min(number) FROM emptied").get
    if bucket is None:
        return
    connection.execute(_EMPTY_BUCKET, (bucket, _HASHES_AT_ONCE))
    if connection.changes():
        return
    connection.execute("DELETE FROM emptied WHERE number = ?", (bucket,))
