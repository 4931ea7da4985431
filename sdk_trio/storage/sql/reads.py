"""Queries of the inbox: functions of a transaction that only reads."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from ...base import clock
from ...records.deliveries import (
    SOURCE_MARK,
    AttemptRecord,
    DeliveryRecord,
    DeliveryState,
    EvidenceRecord,
    signer_of,
)
from ...records.policies import AFTER_PAUSED, PAUSED
from . import arrivals
from .arrivals import HIGHEST, INDEXED, INDEXED_CHARACTERS, SEGMENT_BITS
from .dialect import Row, SqlTransaction
from .schema import OWN_TABLES, replayable, unfinished

# The columns of a record, with the body or without.
_RECORD = """
arrival.sequence, arrival.delivery_key, arrival.signer, arrival.type,
    coalesce(work.state, 'done'), coalesce(work.queued, ended.queued),
    coalesce(work.attempts, ended.attempts), arrival.received_at, arrival.signed_at,
    arrival.subject, arrival.ordered, work.next_attempt_at,
    coalesce(work.started_at, ended.started_at), coalesce(work.finished_at, ended.finished_at),
    coalesce(work.last_error, ended.last_error), {raw}, arrival.tenant_id,
    coalesce(work.process_ends, ended.process_ends), coalesce(work.ran_alone, ended.ran_alone),
    coalesce(work.earlier_attempts, ended.earlier_attempts),
    coalesce(work.generation, ended.generation)
"""

_STATE = """
LEFT JOIN work ON work.sequence = arrival.sequence
LEFT JOIN ended ON ended.sequence = arrival.sequence
"""

# By the first and the last, PostgreSQL skips the other partitions.
_BY_SEQUENCE = f"""
SELECT {_RECORD}
FROM arrival LEFT JOIN work ON work.sequence = arrival.sequence
    LEFT JOIN ended ON ended.sequence = arrival.sequence
        AND ended.sequence >= :first AND ended.sequence <= :last
WHERE arrival.sequence IN ints(:sequences)
    AND arrival.sequence >= :first AND arrival.sequence <= :last
ORDER BY arrival.sequence
"""


#: The position of ``tenant_id`` in a record. A source's deliveries have no tenant.
_TENANT = [field.name for field in attrs.fields(DeliveryRecord)].index("tenant_id")


def _record_of(row: Row) -> DeliveryRecord:
    sequence, key, signer, type_, state, queued, attempts, *middle = row
    received_at, signed_at, subject, ordered, *rest, generation = middle
    webhook_id = key[: -len(signer) - 1] if signer else key
    values: list[Any] = [sequence, webhook_id, type_, DeliveryState(state), bool(queued), attempts]
    values += [received_at, signed_at, subject, bool(ordered), *rest, signer, generation]
    if signer.startswith(SOURCE_MARK):
        values[_TENANT] = None
    return DeliveryRecord(*values)


def by_sequence(
    tx: SqlTransaction, sequences: Iterable[int], *, with_body: bool = True
) -> list[DeliveryRecord]:
    """Return the deliveries with these numbers, oldest first."""
    numbers = list(sequences)
    if not numbers:
        return []
    statement = _BY_SEQUENCE.format(raw="arrival.raw" if with_body else "NULL")
    rows = tx.all(statement, sequences=numbers, first=min(numbers), last=max(numbers))
    return [_record_of(row) for row in rows]


def get(tx: SqlTransaction, key: str) -> DeliveryRecord | None:
    """Return one delivery with its body, or None."""
    return next(iter(by_sequence(tx, arrivals.find(tx, (key,)).values())), None)


def find_by_id(tx: SqlTransaction, webhook_id: str, *, limit: int = 50) -> Sequence[DeliveryRecord]:
    """Return the deliveries of one id by all signers, the host's first."""
    records = by_sequence(tx, arrivals.of_id(tx, webhook_id))
    return sorted(records, key=lambda record: record.key)[:limit]


def known(tx: SqlTransaction, keys: Sequence[str]) -> frozenset[str]:
    """Return those of ``keys`` that have a record."""
    return frozenset(arrivals.find(tx, keys))


_ATTEMPTS = """
SELECT number, started_at, finished_at, error, place, traceback
FROM attempt WHERE sequence = :sequence ORDER BY id
"""

_EVIDENCE_OF_DELIVERY = """
SELECT received_at, address, raw, tenant_id FROM evidence WHERE sequence = :sequence ORDER BY id
"""


def attempts(tx: SqlTransaction, key: str) -> Sequence[AttemptRecord]:
    """Return the failed runs of one delivery, oldest first."""
    rows = tx.all(_ATTEMPTS, sequence=arrivals.find_one(tx, key))
    return [AttemptRecord(*row) for row in rows]


def evidence(tx: SqlTransaction, key: str) -> Sequence[EvidenceRecord]:
    """Return the other bodies that came under a key, oldest first."""
    rows = tx.all(_EVIDENCE_OF_DELIVERY, sequence=arrivals.find_one(tx, key))
    return [EvidenceRecord(*row) for row in rows]


# -- listing -------------------------------------------------------------------------------------

#: The most by which the clocks of two hosts are expected to differ, in seconds. A listing by time
#: reads the sequences between two arrivals that are further outside than this.
_SKEW_SECONDS = 3600.0

_CONDITIONS = {
    "type": "arrival.type = :type",
    "subject": "arrival.subject = :subject",
    "tenant": "arrival.tenant_id = :tenant",
    "since": "arrival.received_at >= :since",
    "until": "arrival.received_at < :until",
}
_BETWEEN = ("arrival.sequence > :after", "arrival.sequence < :before")
# Further conditions, for which PostgreSQL has indexes.
_INDEXED_CONDITIONS = {
    name: f"left(arrival.{name}, {INDEXED_CHARACTERS}) = left(:{name}, {INDEXED_CHARACTERS})"
    for name in ("type", "subject")
}

# Without a condition on arrivals, the first rows of `work` are those of the page.
_IN_WORK = """
arrival.sequence IN (SELECT sequence FROM work
    WHERE {which} AND state = :state AND sequence > :after AND sequence < :before {page})
"""
_IN_ENDED = "ended.sequence IS NOT NULL"
_NOT_IN_WORK = "NOT EXISTS (SELECT 1 FROM work WHERE work.sequence = arrival.sequence)"

# Conditions by which an index finds the rows of a state. Received ones are usually most of the
# table.
_BY_INDEX: Mapping[DeliveryState | None, str] = {
    DeliveryState.RECEIVED: "true",
    DeliveryState.RUNNING: "lease_owner IS NOT NULL",
    DeliveryState.RETRYING: replayable("work"),
    DeliveryState.DEAD: replayable("work"),
    DeliveryState.PARKED: replayable("work"),
}

# The letter of each condition's entry in `lookup`, the most selective first.
_LETTERS = {"subject": "s", "tenant": "n", "type": "t"}

# On PostgreSQL, the rows of a page are read by their numbers: planning a join of all days takes
# longer than running it.
_NUMBERS = "SELECT arrival.sequence FROM arrival WHERE {conditions}"

_LISTED = f"SELECT {_RECORD.format(raw='NULL')} FROM {{source}} {_STATE} WHERE {{conditions}}"

# In the order of two primary keys: nothing is sorted, and only the rows of the page are read.
_BY_ENTRY = f"""
segment CROSS JOIN lookup ON lookup.segment = segment.number AND lookup.entry = :entry
    AND segment.number >= :after >> {SEGMENT_BITS} AND segment.number <= :before >> {SEGMENT_BITS}
    AND lookup.sequence > :after AND lookup.sequence < :before
CROSS JOIN arrival ON arrival.sequence = lookup.sequence
"""


class _Listing(NamedTuple):
    """A page of a listing: the wanted values by condition, the state, and where it begins and ends.

    ``wanted`` are parameters of the statements, too.
    """

    wanted: Mapping[str, Any]
    state: DeliveryState | None
    after: int
    before: int
    oldest_first: bool
    limit: int

    @property
    def direction(self) -> str:
        return "ASC" if self.oldest_first else "DESC"

    @property
    def times(self) -> tuple[float | None, float | None]:
        return self.wanted.get("since"), self.wanted.get("until")

    @property
    def is_by_work(self) -> bool:
        """Whether rows of ``work`` lead to the arrivals."""
        return self.state not in (None, DeliveryState.DONE)


class _Part(NamedTuple):
    """The deliveries between two sequences, both excluded, and how they are listed."""

    after: int
    before: int
    source: str = "arrival"
    order: Sequence[str] = ("arrival.sequence",)


def find(
    tx: SqlTransaction,
    *,
    type: str | None = None,
    state: DeliveryState | None = None,
    since: float | None = None,
    until: float | None = None,
    after_sequence: int | None = None,
    before_sequence: int | None = None,
    subject: str | None = None,
    tenant_id: str | None = None,
    source: str | None = None,
    oldest_first: bool | None = None,
    limit: int = 50,
) -> list[DeliveryRecord]:
    """List deliveries without bodies; see :meth:`Inbox.find`."""
    if tenant_id is not None and source is not None:
        return []
    if oldest_first is None:
        oldest_first = after_sequence is not None
    wanted: dict[str, Any] = {
        "type": type,
        "subject": subject,
        "tenant": tenant_id if source is None else signer_of(source),
        "since": since,
        "until": until,
    }
    listing = _Listing(
        {name: value for name, value in wanted.items() if value is not None},
        state,
        after_sequence or 0,
        _HIGHEST if before_sequence is None else before_sequence,
        oldest_first,
        limit,
    )
    on_engine = _find_on_sqlite if tx.dialect.is_sqlite else _find_on_postgresql
    return on_engine(tx, listing)


def _find_on_postgresql(tx: SqlTransaction, listing: _Listing) -> list[DeliveryRecord]:
    """Find the numbers of a page by the indexes, then read the rows."""
    conditions = _conditions(listing, is_done=_NOT_IN_WORK)
    conditions += [text for name, text in _INDEXED_CONDITIONS.items() if name in listing.wanted]
    part = _Part(*_sequences_between(tx, *listing.times))
    rows = _read_part(tx, _NUMBERS, conditions, listing, part, listing.limit)
    records = by_sequence(tx, [sequence for (sequence,) in rows], with_body=False)
    return records if listing.oldest_first else records[::-1]


def _find_on_sqlite(tx: SqlTransaction, listing: _Listing) -> list[DeliveryRecord]:
    """Read a page by way of ``work`` or ``lookup``, and of the arrivals that have no index yet."""
    conditions = _conditions(listing, is_done=_IN_ENDED)
    entry = _entry_of(listing.wanted)
    if listing.is_by_work:
        parts = [_Part(0, _HIGHEST)]
    else:
        parts = _parts_on_sqlite(tx, *listing.times, by_entry=entry is not None)
    rows: list[Row] = []
    for part in parts if listing.oldest_first else reversed(parts):
        missing = listing.limit - len(rows)
        rows += _read_part(tx, _LISTED, conditions, listing, part, missing, entry=entry)
        if len(rows) >= listing.limit:
            break
    return [_record_of(row) for row in rows]


def _conditions(listing: _Listing, *, is_done: str) -> list[str]:
    """Return the conditions of a page as SQL; ``is_done`` is that of a done delivery."""
    conditions = [*_BETWEEN, *(_CONDITIONS[name] for name in listing.wanted)]
    if listing.is_by_work:
        page = "" if listing.wanted else f"ORDER BY sequence {listing.direction} LIMIT :limit"
        conditions.append(_IN_WORK.format(which=_BY_INDEX[listing.state], page=page))
    elif listing.state is not None:
        conditions.append(is_done)
    return conditions


def _entry_of(wanted: Mapping[str, Any]) -> str | None:
    """Return the entry of ``lookup`` that finds the fewest arrivals, None if none helps."""
    name = next((name for name in _LETTERS if name in wanted), None)
    if name is None:
        return None
    text: str = wanted[name]
    if name != "tenant":
        # SQLite's substr() ends at a NUL.
        text = text[:INDEXED_CHARACTERS].partition("\0")[0]
    return _LETTERS[name] + text


def _read_part(
    tx: SqlTransaction,
    statement: str,
    conditions: Sequence[str],
    listing: _Listing,
    part: _Part,
    limit: int,
    **values: Any,
) -> list[Row]:
    """Return up to ``limit`` rows of a page that are in ``part``."""
    text = statement.format(source=part.source, conditions=" AND ".join(conditions))
    order = ", ".join(f"{column} {listing.direction}" for column in part.order)
    return tx.all(
        f"{text} ORDER BY {order} LIMIT :limit",
        **listing.wanted,
        **values,
        state=None if listing.state is None else listing.state.value,
        after=max(part.after, listing.after),
        before=min(part.before, listing.before),
        limit=limit,
    )


_FIRST_SEGMENT = "SELECT min(number) FROM segment WHERE last_at >= :since"
_LAST_SEGMENT = "SELECT max(number) FROM segment WHERE first_at < :until"
_LAST_INDEXED = f"SELECT {INDEXED}"

_LAST_BEFORE = """
SELECT sequence FROM arrival WHERE received_at < :at ORDER BY received_at DESC LIMIT 1
"""
_FIRST_AFTER = """
SELECT sequence FROM arrival WHERE received_at > :at ORDER BY received_at LIMIT 1
"""

_HIGHEST = 2**62


def _parts_on_sqlite(
    tx: SqlTransaction, since: float | None, until: float | None, *, by_entry: bool
) -> list[_Part]:
    """Return the indexed arrivals whose times may match, and the newest ones."""
    ((indexed,),) = tx.all(_LAST_INDEXED)
    first, last = 0, indexed + 1
    if since is not None:
        ((segment,),) = tx.all(_FIRST_SEGMENT, since=since)
        first = indexed if segment is None else (segment << SEGMENT_BITS) - 1
    if until is not None:
        ((segment,),) = tx.all(_LAST_SEGMENT, until=until)
        last = 0 if segment is None else min(last, (segment + 1) << SEGMENT_BITS)
    old = _Part(first, last)
    if by_entry:
        old = _Part(first, last, _BY_ENTRY, ("segment.number", "lookup.sequence"))
    return [old, _Part(indexed, _HIGHEST)]


def _sequences_between(
    tx: SqlTransaction, since: float | None, until: float | None
) -> tuple[int, int]:
    """Return two sequences between which, both excluded, all arrivals of a time lie."""
    first, last = 0, _HIGHEST
    if since is not None and (row := tx.one(_LAST_BEFORE, at=since - _SKEW_SECONDS)):
        first = row[0]
    if until is not None and (row := tx.one(_FIRST_AFTER, at=until + _SKEW_SECONDS)):
        last = row[0]
    return first, last


# -- counts --------------------------------------------------------------------------------------

# The last row counts all of `work`, the others use indexes. The difference are the received ones.
_COUNTS = f"""
SELECT state, count(*) FROM work WHERE {replayable()} GROUP BY state
UNION ALL SELECT 'running', count(*) FROM work
    WHERE lease_owner IS NOT NULL AND state = 'running'
UNION ALL SELECT '', count(*) FROM work
"""

_DONE_ON_POSTGRESQL = "SELECT CAST(coalesce(sum(done), 0) AS bigint) FROM node"

# Sequences have no gaps but the removed ones.
_ALL_ON_SQLITE = f"SELECT {HIGHEST} - (SELECT number FROM tally WHERE name = 'removed')"


def counts(tx: SqlTransaction) -> dict[DeliveryState, int]:
    """Return how many deliveries are in each state."""
    found = dict.fromkeys(DeliveryState, 0)
    in_work = 0
    for state, number in tx.all(_COUNTS):
        if state:
            found[DeliveryState(state)] = int(number)
        else:
            in_work = int(number)
    found[DeliveryState.RECEIVED] = in_work - sum(found.values())
    ((number,),) = tx.all(_ALL_ON_SQLITE if tx.dialect.is_sqlite else _DONE_ON_POSTGRESQL)
    found[DeliveryState.DONE] = number - sum(found.values()) if tx.dialect.is_sqlite else number
    return found


# Each subquery uses an index. "+ 0" rules out the primary key, by which PostgreSQL would read all
# dead and parked rows; the index of waiting ones in lanes is read to its end instead. Paused
# deliveries do not count.
_OLDEST_WAITING = f"""
SELECT min(received_at) FROM arrival WHERE sequence IN (
    (SELECT sequence FROM work WHERE queued AND state = 'received' AND lease_owner IS NULL
        AND held_group IS NULL AND lane IS NULL ORDER BY lane, sequence LIMIT 1),
    (SELECT min(sequence + 0) FROM work WHERE queued AND state = 'received' AND lease_owner IS NULL
        AND held_group IS NULL AND lane IS NOT NULL),
    (SELECT min(sequence + 0) FROM work WHERE lease_owner IS NULL AND held_group < '{PAUSED}'),
    (SELECT min(sequence + 0) FROM work WHERE lease_owner IS NULL
        AND held_group >= '{AFTER_PAUSED}'),
    (SELECT min(sequence) FROM work
        WHERE queued AND state IN ('received', 'running') AND lease_owner IS NOT NULL))
"""


def oldest_waiting(tx: SqlTransaction) -> float | None:
    """Return the arrival time of the oldest queued delivery that waits or runs, or None."""
    row = tx.one(_OLDEST_WAITING)
    return None if row is None or row[0] is None else float(row[0])


_EXPIRED_LEASES = f"""
SELECT count(*) FROM work
WHERE lease_owner IS NOT NULL AND queued AND {unfinished()} AND lease_until <= due(:before)
"""


def expired_leases(tx: SqlTransaction, *, before: float) -> int:
    """Return how many leases expired before that time of the caller's clock."""
    row = tx.one(_EXPIRED_LEASES, before=before, now=clock.wall())
    return 0 if row is None else int(row[0])


def current_time(tx: SqlTransaction, *, now: float) -> float:
    """Return the time by the clock that measures leases: the server's, or the caller's ``now``."""
    ((seconds,),) = tx.all("SELECT CAST(clock() AS float8)", now=now)
    return float(seconds)


def clock_offset(tx: SqlTransaction) -> float:
    """Return the seconds by which this host's clock is ahead of the server's.

    Time that the question or the answer may have taken is not counted as an offset.
    """
    asked = clock.wall()
    row = tx.one("SELECT CAST(extract(epoch FROM clock_timestamp()) AS float8)")
    answered = clock.wall()
    server = asked if row is None else float(row[0])
    return max(0.0, asked - server) + min(0.0, answered - server)


_CHANGES = f"""
SELECT CAST(coalesce(sum(changes), 0) AS bigint), count(*),
    CAST(:shared_by_hosts AS boolean) AND EXISTS (SELECT 1 FROM work WHERE lease_owner IS NOT NULL
        AND lease_owner <> :owner AND queued AND {unfinished()} AND lease_until <= clock())
FROM node WHERE id <> :node
"""


def changes_of_others(
    tx: SqlTransaction, *, node: str, owner: str, shared_by_hosts: bool
) -> tuple[tuple[int, int], bool]:
    """Return two numbers, one of which changes with every transaction of another node.

    Return also whether a lease of another owner has expired, if the store is shared: a process that
    ended has not counted a change.
    """
    row = tx.one(
        _CHANGES, node=node, owner=owner, shared_by_hosts=shared_by_hosts, now=clock.wall()
    )
    changes, nodes, expired = row or (0, 0, False)
    return (changes, nodes), bool(expired)


# -- retention and tenants -----------------------------------------------------------------------

# On SQLite only (PostgreSQL: storage.engines.postgres_days). Rows are in order of arrival, and no
# delivery is done before it has arrived.
_OLD_DONE = """
SELECT ended.sequence FROM arrival JOIN ended ON ended.sequence = arrival.sequence
WHERE arrival.sequence > :after AND arrival.sequence < :last AND finished_at < :before {which}
ORDER BY arrival.sequence LIMIT :limit
"""

_OLD_PARKED = f"""
SELECT work.sequence FROM work JOIN arrival ON arrival.sequence = work.sequence
WHERE {replayable()} AND state = 'parked' AND work.sequence > :after
    AND received_at < :before
ORDER BY work.sequence LIMIT :limit
"""


def find_old_done(
    tx: SqlTransaction, after: Row | None, before: float, *, with_body: bool = False, limit: int
) -> list[Row]:
    """Return sequences of deliveries that were done before that time, behind the row ``after``."""
    ((segment,),) = tx.all(_LAST_SEGMENT, until=before)
    ((last,),) = tx.all("SELECT max(number) FROM segment")
    return tx.all(
        _OLD_DONE.format(which="AND arrival.raw IS NOT NULL" if with_body else ""),
        before=before,
        after=0 if after is None else after[0],
        # The newest arrivals, and those of a segment that is not full, are included.
        last=_HIGHEST if segment == last else ((segment or 0) + 1) << SEGMENT_BITS,
        limit=limit,
    )


def find_old_parked(
    tx: SqlTransaction, after: Row | None, before: float, *, limit: int
) -> list[Row]:
    """Return sequences of parked deliveries that came before that time, behind ``after``."""
    return tx.all(_OLD_PARKED, before=before, after=0 if after is None else after[0], limit=limit)


_OF_TENANT = """
SELECT sequence FROM arrival WHERE tenant_id = :tenant_id AND sequence > :after
ORDER BY sequence LIMIT :limit
"""

_OF_TENANT_INDEXED = f"""
SELECT lookup.sequence FROM segment CROSS JOIN lookup
WHERE lookup.segment = segment.number AND lookup.entry = 'n' || :tenant_id
    AND segment.number >= :after >> {SEGMENT_BITS} AND lookup.sequence > :after
ORDER BY segment.number, lookup.sequence LIMIT :limit
"""


def of_tenant(tx: SqlTransaction, tenant_id: str, *, after: int, limit: int) -> list[int]:
    """Return the next sequences above ``after`` of a tenant's deliveries."""
    rows: list[Row] = []
    if tx.dialect.is_sqlite:
        rows = tx.all(_OF_TENANT_INDEXED, tenant_id=tenant_id, after=after, limit=limit)
        ((indexed,),) = tx.all(_LAST_INDEXED)
        after = max(after, indexed)
    rows += tx.all(_OF_TENANT, tenant_id=tenant_id, after=after, limit=limit - len(rows))
    return [sequence for (sequence,) in rows]


_ALL_OF_TENANT = "SELECT sequence FROM arrival WHERE tenant_id = :id"
_ALL_OF_TENANT_ON_SQLITE = f"""
SELECT lookup.sequence AS sequence FROM segment CROSS JOIN lookup
WHERE lookup.segment = segment.number AND lookup.entry = 'n' || :id
UNION ALL SELECT sequence FROM arrival WHERE sequence > {INDEXED} AND tenant_id = :id
"""

_HOLDINGS = """
SELECT (SELECT count(*) FROM ({of_tenant}) AS own),
    (SELECT count(*) FROM arrival WHERE sequence IN ({of_tenant}) AND raw IS NOT NULL),
    (SELECT count(*) FROM attempt WHERE sequence IN ({of_tenant})),
    (SELECT count(*) FROM evidence WHERE tenant_id = :id OR sequence IN ({of_tenant})),
    (SELECT count(*) FROM notification JOIN outbox ON outbox.sequence = notification.sequence
        WHERE tenant_id = :id),
    (SELECT count(*) FROM outbox WHERE tenant_id = :id),
    (SELECT count(*) FROM audit WHERE tenant_id = :id)
"""


def holdings(tx: SqlTransaction, tenant_id: str) -> Mapping[str, int]:
    """Count the records of a tenant, except its own row."""
    names = ("deliveries", "bodies", "attempts", "evidence", "messages", "outbox", "audit")
    own = _ALL_OF_TENANT_ON_SQLITE if tx.dialect.is_sqlite else _ALL_OF_TENANT
    row = tx.one(_HOLDINGS.format(of_tenant=own), id=tenant_id) or ()
    return dict(zip(names, row, strict=True))


# One step in the index for each tenant, however many deliveries name it.
_NAMED = """
WITH RECURSIVE named (id) AS (
    SELECT min(tenant_id) FROM arrival
    UNION ALL SELECT (SELECT min(tenant_id) FROM arrival WHERE tenant_id > named.id)
    FROM named WHERE named.id IS NOT NULL
) SELECT id FROM named WHERE id IS NOT NULL
"""

_NAMED_ON_SQLITE = f"""
WITH RECURSIVE step (segment, entry) AS (
    SELECT number, (SELECT min(entry) FROM lookup
        WHERE lookup.segment = number AND entry >= 'n' AND entry < 'o') FROM segment
    UNION ALL SELECT segment, (SELECT min(entry) FROM lookup
        WHERE lookup.segment = step.segment AND entry > step.entry AND entry < 'o')
    FROM step WHERE step.entry IS NOT NULL
) SELECT substr(entry, 2) AS id FROM step WHERE entry IS NOT NULL
UNION SELECT tenant_id FROM arrival WHERE sequence > {INDEXED} AND tenant_id IS NOT NULL
"""

_UNOWNED = f"""
SELECT id FROM ({{named}}) AS named
WHERE id NOT IN (SELECT id FROM tenant) AND id NOT LIKE '{SOURCE_MARK}%'
UNION SELECT tenant_id FROM evidence
WHERE tenant_id IS NOT NULL AND tenant_id NOT IN (SELECT id FROM tenant)
"""


def unowned(tx: SqlTransaction) -> Sequence[str]:
    """Return the ids of tenants that deliveries or evidence name and that no tenant has."""
    named = _NAMED_ON_SQLITE if tx.dialect.is_sqlite else _NAMED
    return [tenant_id for (tenant_id,) in tx.all(_UNOWNED.format(named=named))]


#: The tables of a SQLite file.
TABLES_ON_SQLITE = """
SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name
"""


def other_tables(tx: SqlTransaction) -> Sequence[str]:
    """Return the names of the tables in a SQLite file that are not the store's."""
    return [name for (name,) in tx.all(TABLES_ON_SQLITE) if name not in OWN_TABLES]
