"""Listings of the store in SQLite find the same rows as a full scan, for every filter."""

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.sql_store import TERMS, add_done, new_store, plans, steps_of

from sdk_trio.records.deliveries import (
    Dead,
    DeliveryRecord,
    DeliveryState,
    Done,
    Lease,
    NewDelivery,
    Parked,
    Postponed,
    Released,
    Retry,
)
from sdk_trio.storage.engines.sqlite_connection import SqliteTransaction
from sdk_trio.storage.sql import (
    admission,
    alerts,
    arrivals,
    checkpoints,
    leases,
    notifications,
    reads,
    runs,
    tenants,
)
from sdk_trio.storage.sql.arrivals import INDEX_EVERY, INDEXED_CHARACTERS, SEGMENT_BITS
from sdk_trio.storage.sql.schema import OWN_TABLES

SEGMENT = 1 << SEGMENT_BITS
#: Two segments, of which the second is not full, and arrivals that are not indexed.
ROWS = SEGMENT + 5 * INDEX_EVERY // 2
LONG = "x" * INDEXED_CHARACTERS

FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["common", "rare", "newest", "never"]),
        "state": st.sampled_from(DeliveryState),
        "tenant_id": st.sampled_from(["acme", "bolt", "unknown"]),
        "subject": st.sampled_from(["s-7", LONG + "1", LONG + "2", "many", "never"]),
        "since": st.floats(990.0, 1000.0 + ROWS),
        "until": st.floats(990.0, 1000.0 + ROWS),
        "after_sequence": st.integers(0, ROWS),
        "before_sequence": st.integers(0, ROWS),
        "oldest_first": st.booleans(),
        "limit": st.integers(1, 40),
    },
)


OUTCOMES = (
    Done(),
    Done("200"),
    Retry(1.0, "E"),
    Dead("E"),
    Released(),
    Postponed(9.0, "paused"),
    Parked("held"),
)


def delivery(number: int) -> NewDelivery:
    subject = {7: "s-7", 8: "s-7", 2000: LONG + "1", 2001: LONG + "2"}.get(number)
    if number % 2:
        subject = subject or "many"
    kinds = {5: "rare", SEGMENT + 9: "rare", ROWS - 1: "newest"}
    return NewDelivery(
        f"m{number}",
        kinds.get(number, "common"),
        b"{}",
        1,
        # The clock is set back once.
        1000.0 + number - (300.0 if number > SEGMENT else 0.0),
        subject=subject,
        tenant_id={3: "acme", SEGMENT + 52: "acme", 4: "bolt", ROWS - 2: "bolt"}.get(number),
    )


@pytest.fixture(scope="module")
def tx() -> Iterator[SqliteTransaction]:
    """A store in which one of a hundred deliveries is in each state that is not done."""
    tx = new_store()
    for first in range(0, ROWS, 100):
        incoming = [delivery(number) for number in range(first, min(first + 100, ROWS))]
        admission.park(tx, TERMS, incoming[0], None)
        ((_, sequence),) = admission.accept_all(tx, TERMS, [admission.Arriving(incoming[1], 1)])
        assert sequence is not None
        lease = Lease("k", 1, sequence)
        runs.finish(tx, lease, Dead("E"), incoming[1].received_at)
        admission.accept_all(tx, TERMS, [admission.Arriving(incoming[2], None)])
        add_done(tx, incoming[3:])
    arrivals.remove(tx, range(40, 50))
    yield tx
    tx.connection.close()


@pytest.fixture(scope="module")
def records(tx: SqliteTransaction) -> list[DeliveryRecord]:
    rows = tx.all(
        f"SELECT {reads._RECORD.format(raw='NULL')} FROM arrival {reads._STATE} ORDER BY 1"
    )
    return [reads._record_of(row) for row in rows]


def meets(record: DeliveryRecord, filters: dict[str, object]) -> bool:
    same = all(
        getattr(record, name) == filters.get(name, getattr(record, name))
        for name in ("type", "state", "tenant_id", "subject")
    )
    return (
        same
        and filters.get("since", 0.0) <= record.received_at < filters.get("until", 1e9)  # type: ignore[operator] # numbers
        and filters.get("after_sequence", 0) < record.sequence < filters.get("before_sequence", 1e9)  # type: ignore[operator] # numbers
    )


@given(FILTERS)
@example({"type": "rare"})
@example({"type": "never"})
@example({"subject": LONG + "1", "oldest_first": True})
@example({"since": 1000.0 + SEGMENT, "until": 1010.0 + SEGMENT})
@example({"type": "rare", "state": DeliveryState.DONE, "limit": 1})
@example({"tenant_id": "acme", "before_sequence": SEGMENT})
@example({"tenant_id": "bolt", "oldest_first": True, "limit": 1})
def test_a_listing_finds_the_same_as_a_scan_of_every_row(
    tx: SqliteTransaction, records: list[DeliveryRecord], filters: dict[str, object]
) -> None:
    oldest_first = filters.get("oldest_first", "after_sequence" in filters)
    limit = filters.get("limit", 50)
    expected = [record for record in records if meets(record, filters)]
    if not oldest_first:
        expected.reverse()
    found = reads.find(tx, **filters)  # type: ignore[arg-type] # of each kind
    assert found == expected[: int(str(limit))]


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"type": "never"},
        {"type": "rare"},
        {"tenant_id": "acme"},
        {"tenant_id": "bolt"},
        {"subject": "s-7"},
        {"subject": "never"},
        {"subject": "many", "before_sequence": 30},
        {"subject": "many", "after_sequence": 2 * SEGMENT - 30},
        {"since": 1e9},
        {"until": 0.0},
        {"state": DeliveryState.DEAD},
        {"state": DeliveryState.DEAD, "type": "rare"},
        {"state": DeliveryState.RECEIVED, "tenant_id": "unknown"},
    ],
    ids=str,
)
def test_a_listing_reads_few_rows(tx: SqliteTransaction, filters: dict[str, object]) -> None:
    """Counted in steps of SQLite's machine: a full scan takes 15 for each row."""
    steps = steps_of(tx, lambda: reads.find(tx, limit=50, **filters))  # type: ignore[arg-type] # of each kind
    # The newest arrivals are in no index.
    assert steps < 15 * INDEX_EVERY


LISTED = (
    {},
    {"type": "rare"},
    {"subject": "s-7", "oldest_first": True},
    {"tenant_id": "acme", "since": 1.0, "until": 2.0},
    {"state": DeliveryState.DEAD},
    {"state": DeliveryState.RECEIVED},
    {"state": DeliveryState.DONE, "after_sequence": 5},
)

#: Reads of a whole table that are meant, by the table, and why they are few rows.
MEANT = {
    "segment": "a row for 16 384 deliveries",
    "work": "what is not done",
    "upgrade": "one row",
    "tenant": "to list or count the tenants",
    "sqlite_schema": "the tables themselves",
}


#: Other names of tables in statements.
TABLES_OF = {"this": "work", "other": "work", "held": "lease"}


def test_every_statement_finds_its_rows_by_an_index(tx: SqliteTransaction) -> None:
    incoming = [NewDelivery(f"p{n}", "t", b"{}", 1, 1.0, "s", True, "acme") for n in range(9)]
    tx.connection.execute("SAVEPOINT plans")
    with plans(tx) as found:
        arriving = [admission.Arriving(each, n) for n, each in enumerate(incoming)]
        answers = admission.accept_all(tx, TERMS, arriving)
        admission.accept_all(tx, TERMS, arriving)
        held = [Lease("k", n, sequence) for n, (_, sequence) in enumerate(answers) if sequence]
        admission.keep_other(tx, NewDelivery("p0", "t", b"other", 1, 1.0))
        runs.start_all(tx, TERMS, [runs.RunStart(each.sequence, each.token, 2.0) for each in held])
        for lease, outcome in zip(held, OUTCOMES, strict=False):
            runs.join(tx, lease)
            runs.finish(tx, lease, outcome, 3.0)
        admission.replay(tx, ["p0", "p1"])
        admission.repeat(tx, ["p0", "p1"])
        leases.claim_due(tx, TERMS, leases.PollCursor(), limit=9, now=1e9, take_expired=True)
        leases.claim_suspects(tx, TERMS, limit=9, now=1e9)
        leases.renew(tx, TERMS, [held[1]], (), now=4.0)
        leases.release(tx, held)
        leases.recover(tx, TERMS, dead=None)
        leases.take_over(tx, TERMS, "other", successor="here", now=4.0)
        leases.reschedule(tx, now=4.0)
        leases.lead(tx, "here", seconds=9, now=4.0)
        for filters in LISTED:
            reads.find(tx, **filters)  # type: ignore[arg-type] # of each kind
        reads.get(tx, "m7")
        reads.find_by_id(tx, "m7", limit=9)
        reads.evidence(tx, "p0")
        reads.attempts(tx, "p0")
        reads.counts(tx)
        alerts.count_dead_letters(tx, since=1.0)
        reads.oldest_waiting(tx)
        reads.expired_leases(tx, before=1.0)
        reads.holdings(tx, "acme")
        reads.unowned(tx)
        checkpoints.read_checkpoint(tx, "x")
        for with_body in (False, True):
            reads.find_old_done(tx, None, 1e9, with_body=with_body, limit=9)
        reads.find_old_parked(tx, None, 1e9, limit=9)
        arrivals.delete_bodies(tx, [1, 2], 1e9)
        arrivals.delete_parked(tx, [1], 1e9)
        arrivals.delete_done(tx, [1, 2], 1e9)
        arrivals.erase(tx, reads.of_tenant(tx, "acme", after=0, limit=9), "acme")
        arrivals.erase_evidence(tx, "acme", 9)
        tenants.page(tx, limit=9)
        tenants.get(tx, "identifier", "acme")
        tenants.counts(tx)
        tenants.audit_rows(tx, "acme", limit=9)
        tenants.transitions(tx, limit=9)
        notifications.poll(tx, {"email": False}, now=1.0)
    tx.connection.execute("ROLLBACK TO plans; RELEASE plans")
    assert len(found) > 60
    whole = {
        (TABLES_OF.get(name, name), statement)
        for statement, plan in found.items()
        for step in plan
        if step.startswith("SCAN ") and " USING " not in step and "VIRTUAL TABLE" not in step
        if TABLES_OF.get(name := step.split()[1], name) in OWN_TABLES
    }
    assert not [statement for table, statement in whole if table not in MEANT]
    assert len([statement for table, statement in whole if table == "work"]) == 2, (
        "to count the states, and after the clock was set back"
    )
    assert not [statement for statement, plan in found.items() if "AUTOMATIC" in str(plan)]
