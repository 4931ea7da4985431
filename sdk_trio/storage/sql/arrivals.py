"""Arrivals: how a delivery is added, found by its key, and removed by age or with its tenant.

On PostgreSQL keys are unique and found in the table ``arrival_key``: ``arrival`` is partitioned
(:mod:`storage.engines.postgres_days`), and a unique index of keys would hold within a partition
only. On SQLite each page that a transaction changes is written whole, so an index of random keys
would cost every delivery a page. There the newest arrivals are searched row by row. After every
:data:`INDEX_EVERY` arrivals, these are added to ``lookup`` at once, ordered by segment and entry.
Only the newest segment is written to, so few pages change. In return, the search for an older key
takes one step in each segment.

An entry is a letter and a text: ``k`` the key, ``s`` the beginning of the subject, ``t`` the type,
``n`` the tenant. All functions run in a transaction, which on SQLite is the only one that writes.
"""

from collections.abc import Collection, Sequence
from typing import Any

from ...records.deliveries import NewDelivery
from .dialect import SERVER_TIME, Insert, SqlTransaction
from .schema import types_of

#: Arrivals of one segment, as a power of two.
SEGMENT_BITS = 14

#: The most arrivals that are not indexed; with bodies of 1 KB a search of them takes 0.1 ms.
INDEX_EVERY = 512

#: Characters of a subject or type that an index holds.
INDEXED_CHARACTERS = 60

_ADD_ON_SQLITE = Insert("arrival", types_of("arrival"))

_ARRIVAL_COLUMNS = types_of("arrival", *list(types_of("arrival"))[1:])

# Sequences are given in the order of the rows.
_ADD_ON_POSTGRESQL = f"""
new_key AS (
    INSERT INTO arrival_key (delivery_key) SELECT delivery_key FROM given ORDER BY number
    ON CONFLICT (delivery_key) DO NOTHING RETURNING delivery_key, sequence
), arrived AS (
    INSERT INTO arrival (sequence, {", ".join(_ARRIVAL_COLUMNS)})
    SELECT new_key.sequence, {", ".join(f"given.{name}" for name in _ARRIVAL_COLUMNS)}
    FROM new_key JOIN given ON given.delivery_key = new_key.delivery_key
), added AS (
    INSERT INTO {{table}} (sequence, {{names}}) SELECT new_key.sequence, {{values}}
    FROM new_key JOIN given ON given.delivery_key = new_key.delivery_key ORDER BY number
)
SELECT delivery_key, sequence FROM new_key
"""

#: SQL of the highest sequence that is in ``lookup``, on SQLite.
INDEXED = "(SELECT number FROM tally WHERE name = 'indexed')"


def _values_of(delivery: NewDelivery) -> tuple[Any, ...]:
    return (
        delivery.key,
        delivery.signer,
        delivery.type,
        float(delivery.received_at),
        delivery.timestamp,
        delivery.subject,
        delivery.ordered,
        # Nearly all have no signer, so that is checked without a call.
        delivery.tenant_or_signer if delivery.signer else delivery.tenant_id,
        delivery.raw,
    )


class StateTable:
    """The table that a delivery's state goes to when it is added: ``work`` or ``ended``.

    Args:
        table: its name.
        names: its columns that get a value, without ``sequence``. ``lease_until`` is in seconds
            from now in a store with its own clock, otherwise a Unix time.
    """

    __slots__ = ("by_callers", "by_server", "on_sqlite")

    def __init__(self, table: str, *names: str) -> None:
        self.on_sqlite: Insert = Insert(table, types_of(table, "sequence", *names))
        columns, values = types_of(table, *names), [f"given.{name}" for name in names]
        at = [f"{SERVER_TIME} + {name}" if "lease_until" in name else name for name in values]
        self.by_callers, self.by_server = (
            Insert(
                "arrival",
                {**_ARRIVAL_COLUMNS, **columns},
                instead=_ADD_ON_POSTGRESQL.format(
                    table=table, names=", ".join(names), values=", ".join(each)
                ),
            )
            for each in (values, at)
        )


def add(
    tx: SqlTransaction,
    deliveries: Sequence[NewDelivery],
    table: StateTable,
    states: Sequence[Sequence[Any]],
    *,
    all_new: bool = False,
    whole_unit: bool = False,
) -> list[int | None]:
    """Add the deliveries whose keys are new; return their sequences, None for the others.

    Args:
        tx: the transaction.
        deliveries: of different keys.
        table: that of their state.
        states: the values of its columns, for each delivery.
        all_new: the caller knows that all keys are new; they are not looked up.
        whole_unit: the caller changes nothing else if a row is added.
    """
    if not tx.dialect.is_sqlite:
        insert = table.by_server if tx.dialect.server_clock else table.by_callers
        given = zip(deliveries, states, strict=True)
        rows = [(*_values_of(each), *state) for each, state in given]
        added: dict[str, int] = dict(tx.insert(insert, rows, whole_unit=whole_unit))
        return [added.get(each.key) for each in deliveries]
    known = () if all_new else find(tx, [each.key for each in deliveries])
    # Without a query, if no one else has written since.
    before = last = last_sequence(tx) if tx.last_sequence is None else tx.last_sequence
    sequences: list[int | None] = []
    arrived, opened = [], []
    for each, state in zip(deliveries, states, strict=True):
        if known and each.key in known:
            sequences.append(None)
            continue
        last += 1
        sequences.append(last)
        arrived.append((last, *_values_of(each)))
        opened.append((last, *state))
    tx.insert(_ADD_ON_SQLITE, arrived)
    tx.insert(table.on_sqlite, opened)
    tx.last_sequence = last
    if last // INDEX_EVERY > before // INDEX_EVERY:
        index(tx, last)
    return sequences


# -- finding -----------------------------------------------------------------------------------

_FIND = "SELECT delivery_key, sequence FROM arrival_key WHERE delivery_key IN texts(:keys)"

_FIND_NEWEST = f"""
SELECT delivery_key, sequence FROM arrival
WHERE sequence > {INDEXED} AND delivery_key IN texts(:keys)
"""

# The order of the loops is the order of the tables: one step for each segment and each entry.
# A copy from PostgreSQL may have two rows with one key: the newer one comes last and wins.
_FIND_INDEXED = """
SELECT wanted.value, lookup.sequence
FROM segment CROSS JOIN json_each(:entries) AS wanted CROSS JOIN lookup
WHERE lookup.segment = segment.number AND lookup.entry = wanted.value
"""


def find(tx: SqlTransaction, keys: Collection[str]) -> dict[str, int]:
    """Return the sequences of those of ``keys`` that are known."""
    if not tx.dialect.is_sqlite:
        return dict(tx.all(_FIND, keys=list(keys)))
    found: dict[str, int] = dict(tx.all(_FIND_NEWEST, keys=list(keys)))
    older = [key for key in keys if key not in found]
    if older:
        rows = tx.all(_FIND_INDEXED, entries=entries_of("k", older))
        found.update((entry[1:], sequence) for entry, sequence in rows)
    return found


def find_one(tx: SqlTransaction, key: str) -> int | None:
    """Return the sequence of the delivery with this key, or None."""
    return find(tx, (key,)).get(key)


def entries_of(letter: str, texts: Collection[str]) -> str:
    """Return index entries as the JSON list that SQLite reads."""
    import msgspec

    return msgspec.json.encode([letter + text for text in texts]).decode()


# The keys of one id are the id itself and those that begin with the id and a dot; no id has a dot.
# "/" is the character after the dot.
_OF_ID = """
SELECT sequence FROM {source} (delivery_key = :id
    OR (delivery_key > :id || '.' AND delivery_key < :id || '/'))
"""
# One range and a filter: for two ranges SQLite would read each segment from end to end.
_OF_ID_INDEXED = """
SELECT lookup.sequence FROM segment CROSS JOIN lookup
WHERE lookup.segment = segment.number
    AND lookup.entry >= 'k' || :id AND lookup.entry < 'k' || :id || '/'
    AND (lookup.entry = 'k' || :id OR lookup.entry > 'k' || :id || '.')
"""


def of_id(tx: SqlTransaction, webhook_id: str) -> list[int]:
    """Return the sequences of the deliveries of one id, by all signers."""
    if not tx.dialect.is_sqlite:
        rows = tx.all(_OF_ID.format(source="arrival_key WHERE"), id=webhook_id)
    else:
        source = f"arrival WHERE sequence > {INDEXED} AND"
        rows = tx.all(_OF_ID.format(source=source), id=webhook_id)
        rows += tx.all(_OF_ID_INDEXED, id=webhook_id)
    return [sequence for (sequence,) in rows]


# Even if that delivery was removed: a listing continues after a sequence, and would miss a delivery
# that got the same sequence again.
#: SQL of the highest sequence that was ever given, on SQLite.
HIGHEST = """
max(coalesce((SELECT max(sequence) FROM arrival), 0),
    (SELECT number FROM tally WHERE name = 'last'))
"""

# The name is PostgreSQL's own, of the table and the column.
_LAST_SEQUENCE = (
    "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM arrival_key_sequence_seq"
)


def last_sequence(tx: SqlTransaction) -> int:
    """Return the highest sequence that was ever given, 0 before the first one."""
    row = tx.one(f"SELECT {HIGHEST}" if tx.dialect.is_sqlite else _LAST_SEQUENCE)
    return 0 if row is None else int(row[0])


# -- the index on SQLite -------------------------------------------------------------------------

_ADD_SEGMENTS = f"""
INSERT INTO segment (number, first_at, last_at)
SELECT sequence >> {SEGMENT_BITS}, min(received_at), max(received_at)
FROM arrival WHERE sequence > {INDEXED} GROUP BY 1
ON CONFLICT (number) DO UPDATE SET first_at = min(first_at, excluded.first_at),
    last_at = max(last_at, excluded.last_at)
"""

_ENTRIES = f"""
SELECT sequence >> {SEGMENT_BITS} AS segment, 'k' || delivery_key AS entry, sequence
FROM arrival WHERE {{which}}
UNION ALL
SELECT sequence >> {SEGMENT_BITS}, 't' || substr(type, 1, {INDEXED_CHARACTERS}), sequence
FROM arrival WHERE {{which}}
UNION ALL
SELECT sequence >> {SEGMENT_BITS}, 's' || substr(subject, 1, {INDEXED_CHARACTERS}), sequence
FROM arrival WHERE subject IS NOT NULL AND {{which}}
UNION ALL SELECT sequence >> {SEGMENT_BITS}, 'n' || tenant_id, sequence
FROM arrival WHERE tenant_id IS NOT NULL AND {{which}}
"""

# In the order of the index, so that each page is changed once.
_ADD_ENTRIES = f"""
INSERT INTO lookup (segment, entry, sequence)
{_ENTRIES.format(which=f"sequence > {INDEXED}")} ORDER BY 1, 2, 3
"""

_INDEXED_NOW = "UPDATE tally SET number = :last WHERE name = 'indexed'"


def index(tx: SqlTransaction, last: int) -> None:
    """Add the newest arrivals, up to ``last``, to ``segment`` and ``lookup`` on SQLite."""
    tx.run(_ADD_SEGMENTS)
    tx.run(_ADD_ENTRIES)
    tx.run(_INDEXED_NOW, last=last)


_ASSIGN_ENTRY = f"""
INSERT INTO lookup (segment, entry, sequence)
SELECT sequence >> {SEGMENT_BITS}, 'n' || :tenant_id, sequence FROM arrival
WHERE sequence IN ints(:sequences) AND sequence <= {INDEXED} AND tenant_id IS NULL
ORDER BY 1, 2, 3
"""

_ASSIGN = """
UPDATE arrival SET tenant_id = :tenant_id WHERE sequence IN ints(:sequences) AND tenant_id IS NULL
"""


def assign(tx: SqlTransaction, sequences: Sequence[int], tenant_id: str) -> int:
    """Give a tenant to those of the deliveries that have none; return their number."""
    if tx.dialect.is_sqlite:
        tx.run(_ASSIGN_ENTRY, sequences=list(sequences), tenant_id=tenant_id)
    return tx.run(_ASSIGN, sequences=list(sequences), tenant_id=tenant_id)


# -- removing ----------------------------------------------------------------------------------

# The union is in a subquery of its own: directly after IN, SQLite would read all of `lookup`.
_REMOVE_ENTRIES = f"""
DELETE FROM lookup WHERE (segment, entry, sequence) IN (SELECT segment, entry, sequence FROM (
    {_ENTRIES.format(which="sequence IN ints(:sequences)")}))
"""

_COUNT_REMOVED = """
UPDATE tally SET number = CASE name WHEN 'last' THEN max(number, :last) ELSE number + :removed END
WHERE name IN ('last', 'removed')
"""

_REMOVE_SEGMENTS = f"""
DELETE FROM segment WHERE number IN ints(:segments)
    AND (number + 1) << {SEGMENT_BITS} <= {INDEXED}
    AND NOT EXISTS (SELECT 1 FROM arrival WHERE sequence >= segment.number << {SEGMENT_BITS}
        AND sequence < (segment.number + 1) << {SEGMENT_BITS})
"""


_REMOVE_KEYS = """
DELETE FROM arrival_key WHERE sequence IN ints(:sequences) AND delivery_key IN (
    SELECT delivery_key FROM arrival WHERE sequence IN ints(:sequences))
"""

_REMOVE_KEY = "DELETE FROM arrival_key WHERE delivery_key = :key AND sequence = :sequence"


def remove_keys(tx: SqlTransaction, sequences: Sequence[int]) -> None:
    """Remove the keys of these deliveries; on SQLite all of their index entries."""
    tx.run(_REMOVE_ENTRIES if tx.dialect.is_sqlite else _REMOVE_KEYS, sequences=list(sequences))


def remove_key(tx: SqlTransaction, key: str, sequence: int) -> None:
    """Remove a key whose delivery is gone; only PostgreSQL has a table of keys."""
    if not tx.dialect.is_sqlite:
        tx.run(_REMOVE_KEY, key=key, sequence=sequence)


def remove_attached(tx: SqlTransaction, sequences: Sequence[int]) -> None:
    """Remove evidence and attempts of deliveries."""
    for table in ("evidence", "attempt"):
        tx.run(f"DELETE FROM {table} WHERE sequence IN ints(:sequences)", sequences=list(sequences))


def remove(tx: SqlTransaction, sequences: Sequence[int]) -> int:
    """Remove deliveries with all their rows; return how many there were."""
    if not sequences:
        return 0
    numbers = list(sequences)
    remove_keys(tx, numbers)
    # Another process adds evidence and attempts only while it has locked one of these rows, so the
    # statements after these see what it has added.
    tx.run("DELETE FROM work WHERE sequence IN ints(:sequences)", sequences=numbers)
    done = tx.run("DELETE FROM ended WHERE sequence IN ints(:sequences)", sequences=numbers)
    removed = tx.run("DELETE FROM arrival WHERE sequence IN ints(:sequences)", sequences=numbers)
    remove_attached(tx, numbers)
    if tx.dialect.is_sqlite and removed:
        tx.run(_COUNT_REMOVED, last=max(numbers), removed=removed)
        segments = sorted({sequence >> SEGMENT_BITS for sequence in numbers})
        tx.run(_REMOVE_SEGMENTS, segments=segments)
    tx.note_change(done=-done)
    return removed


# -- retention ---------------------------------------------------------------------------------

# Like redelivery and replay, the retention locks the row of `arrival` before any other. It skips
# rows that they have locked: those are no longer old, or the next pass finds them.
_LOCK_FREE_ARRIVALS = """
SELECT sequence FROM arrival WHERE sequence IN ints(:sequences) ORDER BY sequence
FOR UPDATE SKIP LOCKED
"""

_STILL_DONE = """
SELECT sequence FROM ended WHERE sequence IN ints(:sequences) AND finished_at < :before
FOR UPDATE SKIP LOCKED
"""

_STILL_PARKED = """
SELECT sequence FROM work WHERE sequence IN ints(:sequences) AND state = 'parked'
FOR UPDATE SKIP LOCKED
"""

_DROP_BODIES = """
UPDATE arrival SET raw = NULL WHERE sequence IN ints(:sequences) AND raw IS NOT NULL
"""


def delete_bodies(tx: SqlTransaction, sequences: Sequence[int], before: float) -> int:
    """Delete the bodies of deliveries that are still done and ended before that time; count them.

    A reader found them outside of this transaction, so some may have been put back meanwhile. Their
    evidence is deleted, too.
    """
    old = _lock_old(tx, sequences, _STILL_DONE, before=before)
    dropped = tx.run(_DROP_BODIES, sequences=old)
    tx.run("DELETE FROM evidence WHERE sequence IN ints(:sequences)", sequences=old)
    return dropped


def delete_done(tx: SqlTransaction, sequences: Sequence[int], before: float) -> int:
    """Delete deliveries that are still done and ended before that time; count them."""
    return remove(tx, _lock_old(tx, sequences, _STILL_DONE, before=before))


def delete_parked(tx: SqlTransaction, sequences: Sequence[int], before: float) -> int:
    """Delete deliveries that are still parked; count them. The reader has checked ``before``."""
    return remove(tx, _lock_old(tx, sequences, _STILL_PARKED))


def _lock_old(tx: SqlTransaction, sequences: Sequence[int], still: str, **values: Any) -> list[int]:
    numbers = list(sequences)
    if not tx.dialect.is_sqlite:
        numbers = [row[0] for row in tx.all(_LOCK_FREE_ARRIVALS, sequences=numbers)]
    # A separate statement: it sees changes that were committed before the locks were taken.
    return [row[0] for row in tx.all(still, sequences=numbers, **values)]


_STILL_OWNED = """
SELECT sequence FROM arrival WHERE sequence IN ints(:sequences) AND tenant_id = :tenant_id
ORDER BY sequence FOR UPDATE
"""

_EVIDENCE_OF = """
DELETE FROM evidence WHERE id IN (SELECT id FROM evidence WHERE tenant_id = :tenant_id LIMIT :limit)
"""


def erase(tx: SqlTransaction, sequences: Sequence[int], tenant_id: str) -> int:
    """Delete those deliveries that are the tenant's, in any state; count them."""
    rows = tx.all(_STILL_OWNED, sequences=list(sequences), tenant_id=tenant_id)
    return remove(tx, [sequence for (sequence,) in rows])


def erase_evidence(tx: SqlTransaction, tenant_id: str, limit: int) -> int:
    """Delete up to ``limit`` of the tenant's bodies under keys of other deliveries; count them."""
    return tx.run(_EVIDENCE_OF, tenant_id=tenant_id, limit=limit)
