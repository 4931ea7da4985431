"""Listings of the store in SQLite find what a look at every row finds, by whatever is asked for."""

from collections.abc import Iterator
from typing import Any

import apsw
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sdk_trio.storage.sqlite.arrivals import NewArrival

from sdk_trio.records.deliveries import Dead, DeliveryRecord, DeliveryState, NewDelivery
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sql.schema import BLOCK_BITS, BUCKET_BITS, MIGRATIONS
from sdk_trio.storage.sqlite import arrivals, listing, reads, writes

TERMS = LeaseTerms(owner="o", lease_seconds=10.0, dedup_seconds=1e9, payload_seconds=1e9)
BLOCK = 1 << BLOCK_BITS
BUCKET = 1 << BUCKET_BITS
ROWS = 5 * BLOCK // 2

FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["common", "rare", "newest", "never"]),
        "state": st.sampled_from(DeliveryState),
        "tenant_id": st.sampled_from(["acme", "bolt", "nobody"]),
        "subject": st.sampled_from(["s-7", "twin-12345678", "other-12345678", "many", "never"]),
        "since": st.floats(990.0, 1000.0 + ROWS),
        "until": st.floats(990.0, 1000.0 + ROWS),
        "after_sequence": st.integers(0, ROWS),
        "before_sequence": st.integers(0, ROWS),
        "oldest_first": st.booleans(),
        "limit": st.integers(1, 40),
    },
)


def delivery(number: int) -> NewDelivery:
    subject = {7: "s-7", 8: "s-7", 2000: "twin-12345678", 2001: "other-12345678"}.get(number)
    if number % 2:
        subject = subject or "many"
    kinds = {5: "rare", BLOCK + 9: "rare", ROWS - 1: "newest"}
    return NewDelivery(
        f"m{number}",
        kinds.get(number, "common"),
        b"{}",
        1,
        # The clock is set back once.
        1000.0 + number - (300.0 if number > BLOCK else 0.0),
        subject=subject,
        tenant_id={3: "acme", 2100: "acme", 4: "bolt"}.get(number),
    )


@pytest.fixture(scope="module")
def connection() -> Iterator[apsw.Connection]:
    """A store with two blocks that are indexed, and half a one that is not."""
    connection = apsw.Connection(":memory:")
    for step in MIGRATIONS:
        for statement in step:
            connection.execute(statement)
    for number in range(ROWS):
        told = delivery(number)
        if number % 100 == 0:
            writes.park(connection, TERMS, told, None)
            continue
        writes.accept(connection, TERMS, told, True)
        if number % 100 == 1:
            writes.finish(connection, TERMS, told.key, Dead("E"), told.received_at)
        elif number % 50 != 2:
            ended = writes.RunEnd(told.key, told.received_at, told.received_at)
            writes.end_runs(connection, TERMS, [ended])
    arrivals.remove(connection, range(40, 50))
    yield connection
    connection.close()


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


_BY = ("type", "state", "since", "until", "after_sequence", "before_sequence", "subject")
NONE = dict.fromkeys((*_BY, "tenant_id", "oldest_first"))


def in_steps(connection: apsw.Connection, filters: dict[str, object]) -> list[DeliveryRecord]:
    """A whole listing, as :meth:`SqliteInbox.find` makes it."""
    found: list[DeliveryRecord] = []
    asked: dict[str, Any] = {**NONE, **filters}
    limit = asked["limit"]
    while True:
        some, behind = reads.find(connection, **{**asked, "limit": limit - len(found)})
        found += some
        if behind is None:
            return found
        asked["after_sequence" if asked["oldest_first"] else "before_sequence"] = behind


@given(FILTERS, st.sampled_from([1 << 15, 700, 100]))
@example({"type": "rare"}, 1 << 15)
@example({"type": "never"}, 100)
@example({"subject": "twin-12345678", "oldest_first": True}, 100)
@example({"since": 1000.0 + BLOCK, "until": 1010.0 + BLOCK}, 700)
def test_a_listing_finds_what_a_look_at_every_row_finds(
    connection: apsw.Connection, filters: dict[str, object], step: int
) -> None:
    every = f"SELECT {reads.COLUMNS}, NULL, {reads.LATER_COLUMNS} FROM inbox ORDER BY sequence"
    records = [reads.record_of(row) for row in connection.execute(every)]
    oldest_first = filters.get("oldest_first", "after_sequence" in filters)
    limit = filters.get("limit", 50)
    expected = [record for record in records if meets(record, filters)]
    if not oldest_first:
        expected.reverse()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "STEP_ROWS", step)
        found = in_steps(connection, {**filters, "oldest_first": oldest_first, "limit": limit})
    assert found == expected[: int(str(limit))]


@pytest.mark.parametrize(
    "filters",
    [
        {"type": "never"},
        {"tenant_id": "bolt"},
        {"subject": "s-7"},
        {"subject": "never"},
        {"subject": "many", "type": "never"},
        {"subject": "many", "before_sequence": 30},
        {"subject": "many", "after_sequence": 2 * BLOCK - 30},
        {"since": 1e9},
        {"until": 0.0},
        {"state": DeliveryState.DEAD, "type": "rare"},
    ],
    ids=str,
)
def test_a_listing_reads_few_blocks(
    connection: apsw.Connection, filters: dict[str, object]
) -> None:
    """Counted in steps of SQLite's machine: a look at every row takes 15 for each."""
    steps = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return False

    connection.set_progress_handler(count, 1)
    reads.find(connection, **{**NONE, "limit": 50, **filters})  # type: ignore[arg-type] # of each kind
    connection.set_progress_handler(None)
    assert steps < 15 * (BLOCK + BLOCK // 2)


def test_conditions_that_never_meet_are_looked_for_in_bounded_steps(
    connection: apsw.Connection,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "STEP_ROWS", 500)
        asked: dict[str, Any] = {**NONE, "limit": 9, "type": "common", "since": 1e9}
        asked |= {"since": 1000.0, "tenant_id": None, "state": DeliveryState.DONE}
        asked |= {"until": 1000.5, "oldest_first": False}
        calls = 0
        while True:
            seen: list[str] = []
            connection.set_progress_handler(lambda seen=seen: bool(seen.append("")), 1)
            _, behind = reads.find(connection, **asked)
            connection.set_progress_handler(None)
            calls += 1
            # What was arrived last is not indexed, and looked at as a whole.
            assert len(seen) < 40 * (500 + BLOCK)
            if behind is None:
                break
            asked["before_sequence"] = behind
    assert calls > 1


def test_what_is_removed_is_in_no_index_of_listings() -> None:
    connection = apsw.Connection(":memory:")
    for step in MIGRATIONS:
        for statement in step:
            connection.execute(statement)
    for number in range(2 * BLOCK):
        told = delivery(number)
        writes.accept(connection, TERMS, told, True)
    acme = "SELECT count(*) FROM block_with WHERE value = 'acme'"
    assert connection.execute(acme).get == 1
    assert writes.erase(connection, "acme", [4]) == 1
    assert connection.execute(acme).get == 0
    arrivals.remove(connection, range(1, 2 * BLOCK + 1))
    for table in ("block", "block_with", "subject_end", "key"):
        assert connection.execute(f"SELECT count(*) FROM {table}").get == 0, table
    connection.close()


def test_the_hashes_of_a_bucket_without_arrivals_go_a_few_at_a_time() -> None:
    connection = apsw.Connection(":memory:")
    for step in MIGRATIONS:
        for statement in step:
            connection.execute(statement)
    for number in range(BUCKET + BLOCK):
        arrivals.add(connection, [NewArrival(delivery(number), "done", finished_at=1.0)])
    hashes = "SELECT count(*) FROM key"
    before = connection.execute(hashes).get
    old = DeliveryState.DONE, 2.0
    assert writes.delete_deliveries(connection, range(1, BUCKET), *old) == BUCKET - 1
    assert connection.execute(hashes).get == before
    # The ends of their subjects do: they may be those of names.
    ends = "SELECT count(*) FROM subject_end WHERE sequence < ?"
    assert connection.execute(ends, (BUCKET,)).get == 0
    many = {**NONE, "limit": 1, "subject": "many", "oldest_first": True}
    (first,), _ = reads.find(connection, **many)  # type: ignore[arg-type] # of each kind
    assert first.sequence >= BUCKET
    assert arrivals.sequence_of(connection, "m7") is None
    assert arrivals.sequence_of(connection, f"m{BUCKET}") == BUCKET + 1
    steps = 0
    while connection.execute("SELECT count(*) FROM emptied").get:
        writes.delete_deliveries(connection, (), *old)
        steps += 1
    assert connection.execute(hashes).get == before - BUCKET + 1
    assert steps > BUCKET // 500
    connection.close()


def test_the_deliveries_of_a_tenant_are_found_without_a_look_at_all(
    connection: apsw.Connection,
) -> None:
    found = {}
    for tenant in ("acme", "bolt", "nobody"):
        after, found[tenant] = 0, []
        while some := reads.of_tenant(connection, tenant, after=after, limit=1):
            found[tenant] += some
            after = some[-1]
    every = "SELECT tenant_id, sequence FROM arrival WHERE tenant_id IS NOT NULL ORDER BY sequence"
    expected: dict[str, list[object]] = {"acme": [], "bolt": [], "nobody": []}
    for tenant_id, sequence in connection.execute(every).fetchall():
        expected[str(tenant_id)].append(sequence)
    assert found == expected
    assert [len(sequences) for sequences in expected.values()] == [2, 1, 0]
    holdings = reads.holdings(connection, "acme")
    assert (holdings["deliveries"], holdings["bodies"]) == (2, 2)
    assert set(reads.unowned(connection)) == {"acme", "bolt"}
    statements = (*reads._NEXT_OF_TENANT, reads._HOLDINGS, reads._UNOWNED)
    for statement in statements:
        bindings = {"id": "acme", "after": 0, "limit": 9}
        plan = [
            str(row[3]) for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", bindings)
        ]
        assert "SCAN arrival" not in plan
        if statement in reads._NEXT_OF_TENANT:
            assert not any("ORDER BY" in step for step in plan), "a million would be sorted"
