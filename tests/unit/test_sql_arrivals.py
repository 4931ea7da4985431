"""Arrivals in SQLite: found by key, id and tenant after any additions, assignments and removals."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.sql_store import new_store, steps_of, value

from sdk_trio.records.deliveries import NewDelivery
from sdk_trio.storage.sql import arrivals, reads, runs
from sdk_trio.storage.sql.arrivals import INDEX_EVERY, INDEXED_CHARACTERS, SEGMENT_BITS
from sdk_trio.storage.sql.dialect import SqlTransaction

SEGMENT = 1 << SEGMENT_BITS

#: The characters beside the dot, which separates an id from its signer.
IDS = ("a", "a-", "a/", "a0", "ab", "b")
SIGNERS = ("", "t1", "t2")
LONG = "x" * INDEXED_CHARACTERS

WEBHOOKS = st.lists(
    st.tuples(
        st.sampled_from(IDS),
        st.sampled_from(SIGNERS),
        st.sampled_from([None, "acme", "bolt"]),
        st.sampled_from([None, "s", LONG, LONG + "tail"]),
    ),
    unique_by=lambda each: each[:2],
    max_size=9,
)
NUMBERS = st.sets(st.integers(0, 30), max_size=6)


def delivery(
    webhook_id: str, signer: str, tenant: str | None, subject: str | None, at: float
) -> NewDelivery:
    return NewDelivery(
        webhook_id, "t" + LONG, b"{}", 1, at, subject, tenant_id=tenant, signer=signer
    )


def add(tx: SqlTransaction, new: list[NewDelivery], *, all_new: bool = False) -> list[int | None]:
    """Add deliveries that have ended at their first run."""
    ended = [(False, 1, each.received_at, each.received_at) for each in new]
    return arrivals.add(tx, new, runs._AS_DONE, ended, all_new=all_new)


class Arrivals(RuleBasedStateMachine):
    """Adds, assigns and removes a few at a time, on both sides of a segment's end."""

    def __init__(self) -> None:
        super().__init__()
        self.tx = new_store()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(arrivals, "INDEX_EVERY", 4)
        # As after many removed arrivals: the next ones are the last of their segment.
        self.last = SEGMENT - 6
        self.tx.run("UPDATE tally SET number = :n WHERE name <> 'indexed'", n=self.last)
        self.kept: dict[str, tuple[int, NewDelivery]] = {}
        self.clock = count(1000)

    def teardown(self) -> None:
        self.patch.undo()
        self.tx.connection.close()

    @rule(incoming=WEBHOOKS)
    def add(self, incoming: list[tuple[str, str, str | None, str | None]]) -> None:
        new = [delivery(*each, at=float(next(self.clock))) for each in incoming]
        fresh = [each for each in new if each.key not in self.kept]
        added = add(self.tx, new)
        assert [each for each, number in zip(new, added, strict=True) if number] == fresh
        for each, number in zip(new, added, strict=True):
            if number is not None:
                assert number > self.last, "a sequence was given twice"
                self.last = number
                self.kept[each.key] = (number, each)

    @rule(incoming=WEBHOOKS)
    def add_and_roll_back(self, incoming: list[tuple[str, str, str | None, str | None]]) -> None:
        self.tx.connection.execute("SAVEPOINT batch")
        add(self.tx, [delivery(*each, at=1.0) for each in incoming])
        self.tx.connection.execute("ROLLBACK TO batch; RELEASE batch")
        self.tx.note_other_writes()

    @rule(chosen=NUMBERS)
    def remove(self, chosen: set[int]) -> None:
        keys = [key for place, key in enumerate(self.kept) if place in chosen]
        sequences = [self.kept.pop(key)[0] for key in keys]
        assert arrivals.remove(self.tx, sequences) == len(sequences)
        assert arrivals.remove(self.tx, sequences) == 0

    @rule(chosen=NUMBERS, tenant=st.sampled_from(["acme", "cora"]))
    def assign(self, chosen: set[int], tenant: str) -> None:
        keys = [key for place, key in enumerate(self.kept) if place in chosen]
        without = [key for key in keys if self.kept[key][1].tenant_id is None]
        assigned = arrivals.assign(self.tx, [self.kept[key][0] for key in keys], tenant)
        assert assigned == len(without)
        for key in without:
            sequence, incoming = self.kept[key]
            self.kept[key] = (
                sequence,
                NewDelivery(
                    incoming.webhook_id,
                    incoming.type,
                    incoming.raw,
                    incoming.timestamp,
                    incoming.received_at,
                    incoming.subject,
                    tenant_id=tenant,
                    signer=incoming.signer,
                ),
            )

    @invariant()
    def each_key_is_found_and_no_other(self) -> None:
        asked = [f"{id_}.{signer}" if signer else id_ for id_ in IDS for signer in SIGNERS]
        expected = {key: sequence for key, (sequence, _) in self.kept.items()}
        assert arrivals.find(self.tx, asked) == expected
        for key in asked:
            assert arrivals.find_one(self.tx, key) == expected.get(key)

    @invariant()
    def each_id_is_found_with_all_its_signers(self) -> None:
        for id_ in IDS:
            expected = [
                number for number, incoming in self.kept.values() if incoming.webhook_id == id_
            ]
            assert sorted(arrivals.of_id(self.tx, id_)) == expected

    @invariant()
    def each_tenant_is_found_with_all_its_deliveries(self) -> None:
        for tenant in ("acme", "bolt", "cora"):
            expected = [
                number for number, incoming in self.kept.values() if incoming.tenant_id == tenant
            ]
            after, found = 0, []
            while some := reads.of_tenant(self.tx, tenant, after=after, limit=2):
                found += some
                after = some[-1]
            assert found == expected
            assert reads.holdings(self.tx, tenant)["deliveries"] == len(expected)
        named = {incoming.tenant_id for _, incoming in self.kept.values()} - {None}
        assert set(reads.unowned(self.tx)) == named

    @invariant()
    def the_last_sequence_and_the_number_of_arrivals_are_known_without_counting(self) -> None:
        assert arrivals.last_sequence(self.tx) == self.last
        assert sum(reads.counts(self.tx).values()) == len(self.kept)

    @invariant()
    def the_index_has_what_is_there_and_nothing_else(self) -> None:
        indexed = value(self.tx, "SELECT number FROM tally WHERE name = 'indexed'")
        entries = set()
        for number, incoming in self.kept.values():
            if number <= indexed:
                mine = {f"k{incoming.key}", f"t{incoming.type[:INDEXED_CHARACTERS]}"}
                mine |= {f"n{incoming.tenant_id}"} if incoming.tenant_id else set()
                mine |= {f"s{incoming.subject[:INDEXED_CHARACTERS]}"} if incoming.subject else set()
                entries |= {(number >> SEGMENT_BITS, entry, number) for entry in mine}
        assert set(self.tx.all("SELECT segment, entry, sequence FROM lookup")) == entries
        fresh = [number for number, _ in self.kept.values() if number > indexed]
        assert len(fresh) < arrivals.INDEX_EVERY

    @invariant()
    def a_segment_says_when_its_arrivals_came(self) -> None:
        spans = {
            n: (a, b) for n, a, b in self.tx.all("SELECT number, first_at, last_at FROM segment")
        }
        indexed = value(self.tx, "SELECT number FROM tally WHERE name = 'indexed'")
        for number, incoming in self.kept.values():
            if number <= indexed:
                first, last = spans[number >> SEGMENT_BITS]
                assert first <= incoming.received_at <= last


TestArrivals = Arrivals.TestCase
TestArrivals.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_thousands_are_found_on_both_sides_of_each_border() -> None:
    tx, kept = new_store(), dict[str, int]()
    tx.run("UPDATE tally SET number = :n WHERE name <> 'indexed'", n=SEGMENT - 3 * INDEX_EVERY)
    for first in range(0, 6 * INDEX_EVERY, 100):
        incoming = [
            delivery(f"m{n}", "", "acme" if n % 3 else None, None, float(n))
            for n in range(first, first + 100)
        ]
        added = add(tx, incoming)
        kept |= {each.key: number for each, number in zip(incoming, added, strict=True) if number}
        assert arrivals.find(tx, list(kept)) == kept
    gone = [key for place, key in enumerate(kept) if place % 7 < 5]
    for first in range(0, len(gone), 50):
        arrivals.remove(tx, [kept.pop(key) for key in gone[first : first + 50]])
    assert arrivals.find(tx, [*kept, *gone]) == kept
    assert value(tx, "SELECT count(DISTINCT number) FROM segment") == 2
    old = [number for number in kept.values() if number < SEGMENT]
    arrivals.remove(tx, old)
    assert value(tx, "SELECT count(*) FROM segment") == 1, "an empty one would cost each search"


def test_a_key_and_an_id_are_found_by_a_few_steps_of_each_segment() -> None:
    """Counted in steps of SQLite's machine; arrivals that no index has are read one by one."""
    found = {}
    for size in (2 * INDEX_EVERY, 20 * INDEX_EVERY):
        tx = new_store()
        for first in range(0, size, 128):
            incoming = [delivery(f"m{n}", "", None, None, 1.0) for n in range(first, first + 128)]
            add(tx, incoming, all_new=True)
        arrivals.find(tx, ["m7"])
        found[size] = steps_of(tx, lambda tx=tx: arrivals.find(tx, ["m7", "unknown"]))
        found[size] += steps_of(tx, lambda tx=tx: arrivals.of_id(tx, "m7"))
        gone = list(range(1, 51))
        found[-size] = steps_of(tx, lambda tx=tx, gone=gone: arrivals.remove(tx, gone))
    assert found[20 * INDEX_EVERY] <= found[2 * INDEX_EVERY] + 20
    assert found[-20 * INDEX_EVERY] <= found[-2 * INDEX_EVERY] + 200
