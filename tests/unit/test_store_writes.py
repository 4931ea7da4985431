"""The writes of the store in SQLite, one after the other on a connection: what always holds.

What each of them means is tested of every store alike (``tests/integration/test_store_model.py``);
here are the promises that the index of unfinished deliveries rests on.
"""

import apsw
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sdk_trio.storage.backlog import BacklogWalk

from sdk_trio.records.deliveries import (
    Dead,
    DeliveryState,
    Done,
    NewDelivery,
    Parked,
    Postponed,
    Released,
    Retry,
)
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.sql.schema import MIGRATIONS
from sdk_trio.storage.sqlite import arrivals, known, leases, reads, writes

HERE, THERE = (
    LeaseTerms(owner=owner, lease_seconds=10.0, dedup_seconds=30.0, payload_seconds=60.0)
    for owner in ("here", "there")
)
KEYS = st.sampled_from(["a", "b", "c"])
OWNERS = st.sampled_from([HERE, THERE])
OUTCOMES = st.sampled_from(
    [
        Done(),
        Done("answered 200"),
        Retry(None, "E"),
        Retry(7.0, "E"),
        Dead("E"),
        Released(),
        Postponed(9.0, "paused"),
        Parked(None),
        Parked("held"),
    ]
)


def opened() -> apsw.Connection:
    connection = apsw.Connection(":memory:")
    for step in MIGRATIONS:
        for statement in step:
            connection.execute(statement)
    return connection


def delivery(key: str, now: float, raw: bytes = b"{}", tenant: str | None = None) -> NewDelivery:
    return NewDelivery(key, "order.paid", raw, int(now), now, tenant_id=tenant)


class Writes(RuleBasedStateMachine):
    """Any writes of two owners in any order, while time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.connection = opened()
        self.now = 1000.0
        self.known: dict[int, str] = {}
        # With so few keys, all that is done a thousand at a time would never be done at all; and
        # keys must be told from each other where their hashes are the same.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(arrivals, "SETTLE_EVERY", 2)
        self.patch.setattr(arrivals, "_remembered", {})
        self.patch.setattr(known, "key_hash", lambda key: ord(key[0]) % 2)

    def teardown(self) -> None:
        self.patch.undo()
        self.connection.close()

    @rule(seconds=st.sampled_from([0.5, 9.0, 11.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=KEYS, terms=OWNERS, how=st.sampled_from(["leased", "left", "claimed", "parked"]))
    def arrives(self, key: str, terms: LeaseTerms, how: str) -> None:
        new = delivery(key, self.now, tenant="acme")
        if how == "claimed":
            writes.claim(self.connection, terms, new)
        elif how == "parked":
            writes.park(self.connection, terms, new, "no handler")
        else:
            writes.accept(self.connection, terms, new, how == "leased")

    @rule(key=KEYS, terms=OWNERS)
    def begins(self, key: str, terms: LeaseTerms) -> None:
        before = self.row(key)
        writes.start(self.connection, terms, key, self.now)
        after = self.row(key)
        if before is not None and after != before:
            free = before["lease_owner"] in (None, terms.owner)
            assert free or before["lease_until"] <= self.now
            # Begun by us already: the start is repeated, since its commit was not heard of.
            again = before["state"] == "running" and before["lease_owner"] == terms.owner
            assert after["attempts"] == before["attempts"] + (not again)

    @rule(key=KEYS, terms=OWNERS, outcome=OUTCOMES)
    def ends(self, key: str, terms: LeaseTerms, outcome: object) -> None:
        if isinstance(outcome, Retry) and outcome.at is not None:
            outcome = msgspec.structs.replace(outcome, at=self.now + outcome.at)
        before = self.row(key)
        writes.finish(self.connection, terms, key, outcome, self.now)  # type: ignore[arg-type] # one of them
        if before is not None and before["lease_owner"] != terms.owner:
            assert self.row(key) == before, "a run without a lease has written its outcome"

    @rule(key=KEYS, terms=OWNERS)
    def runs_whole(self, key: str, terms: LeaseTerms) -> None:
        writes.end_runs(self.connection, terms, [writes.RunEnd(key, self.now, self.now)])

    @rule(terms=OWNERS, limit=st.integers(0, 2))
    def taken_as_due(self, terms: LeaseTerms, limit: int) -> None:
        due = leases.take_due(self.connection, terms, BacklogWalk(), limit, self.now)
        assert all(self.row(record.key)["lease_owner"] == terms.owner for record in due.records)

    @rule(
        terms=OWNERS,
        what=st.sampled_from([leases.renew, leases.take_suspects]),
        held=st.sets(KEYS),
    )
    def leases_change(self, terms: LeaseTerms, what: object, held: set[str]) -> None:
        if what is leases.renew:
            leases.renew(self.connection, terms, frozenset(held), self.now)
        else:
            leases.take_suspects(self.connection, terms, 9, self.now)

    @rule(terms=OWNERS)
    def recovers(self, terms: LeaseTerms) -> None:
        leases.recover(self.connection, terms)
        assert self.none(f"lease_owner IS NOT NULL AND lease_owner <> '{terms.owner}'")

    @rule(what=st.sampled_from(["bodies", "done", "parked"]))
    def grows_old(self, what: str) -> None:
        every = "SELECT sequence FROM inbox"
        sequences = [sequence for (sequence,) in self.connection.execute(every).fetchall()]
        before = self.now - 20.0
        if what == "bodies":
            writes.delete_bodies(self.connection, sequences, DeliveryState.DONE, before)
        else:
            state = DeliveryState(what)
            writes.delete_deliveries(self.connection, sequences, state, before)

    @rule(key=KEYS)
    def is_erased(self, key: str) -> None:
        row = self.row(key)
        if row is not None:
            assert writes.erase(self.connection, "acme", [row["sequence"]]) == 1
            assert self.row(key) is None

    @rule()
    def is_rolled_back(self) -> None:
        before = self.connection.execute("SELECT * FROM inbox").fetchall()
        self.connection.execute("SAVEPOINT batch")
        for number in range(3):
            writes.accept(self.connection, HERE, delivery(f"lost-{number}", self.now), True)
        self.connection.execute("ROLLBACK TO batch; RELEASE batch")
        assert self.connection.execute("SELECT * FROM inbox").fetchall() == before

    @rule(key=KEYS)
    def is_replayed(self, key: str) -> None:
        row = self.row(key)
        replayable = (DeliveryState.DEAD, DeliveryState.PARKED, DeliveryState.RETRYING)
        may = row is not None and row["state"] in replayable and row["lease_owner"] is None
        assert list(writes.replay(self.connection, [key])) == ([key] if may else [])

    def row(self, key: str):  # type: ignore[no-untyped-def] # a row of columns of every kind
        cursor = self.connection.execute("SELECT * FROM inbox WHERE delivery_key = ?", (key,))
        for values in cursor:
            return dict(zip((name for name, _ in cursor.get_description()), values, strict=True))
        return None

    def none(self, condition: str) -> bool:
        return self.connection.execute(f"SELECT 1 FROM inbox WHERE {condition}").fetchone() is None

    @invariant()
    def what_is_kept_of_the_numbers_is_what_counting_finds(self) -> None:
        counted = "SELECT state, count(*) FROM inbox GROUP BY state"
        expected = dict.fromkeys(DeliveryState, 0)
        for state, number in self.connection.execute(counted).fetchall():
            expected[DeliveryState(state)] = number
        assert reads.counts(self.connection) == expected

    @invariant()
    def every_delivery_is_found_by_its_key_and_no_sequence_is_given_twice(self) -> None:
        rows = self.connection.execute("SELECT delivery_key, sequence FROM inbox").fetchall()
        assert {key: arrivals.sequence_of(self.connection, key) for key, _ in rows} == dict(rows)
        for key, sequence in rows:
            assert self.known.setdefault(sequence, key) == key

    @invariant()
    def what_was_rolled_back_is_not_found(self) -> None:
        assert arrivals.sequence_of(self.connection, "lost-0") is None

    @invariant()
    def few_arrivals_are_fresh(self) -> None:
        assert self.connection.execute("SELECT count(*) FROM fresh").get < arrivals.SETTLE_EVERY

    @invariant()
    def what_is_over_is_in_one_place(self) -> None:
        twice = "SELECT 1 FROM open JOIN outcome USING (sequence)"
        assert self.connection.execute(twice).fetchone() is None

    @invariant()
    def only_what_is_to_be_retried_has_a_time(self) -> None:
        assert self.none("next_attempt_at IS NOT NULL AND state <> 'retrying'")

    @invariant()
    def only_what_is_leased_has_an_owner_and_what_is_over_is_not(self) -> None:
        assert self.none("(lease_owner IS NULL) <> (lease_until IS NULL)")
        assert self.none("lease_owner IS NOT NULL AND state IN ('done', 'dead', 'parked')")

    @invariant()
    def what_is_over_says_when(self) -> None:
        assert self.none("(finished_at IS NOT NULL) <> (state IN ('done', 'dead'))")

    @invariant()
    def every_body_and_failure_belongs_to_a_delivery(self) -> None:
        for table in ("body", "attempt", "evidence", "open", "outcome", "subject_end"):
            strays = f"SELECT 1 FROM {table} WHERE sequence NOT IN (SELECT sequence FROM inbox)"
            assert self.connection.execute(strays).fetchone() is None


TestWrites = Writes.TestCase


@pytest.mark.parametrize("again", [b"{}", b'{"other": 1}'])
def test_another_body_under_a_known_key_is_kept_once_as_evidence(again: bytes) -> None:
    connection = opened()
    writes.accept(connection, HERE, delivery("a", 1.0), False)
    for _ in range(2):
        admitted = writes.accept(connection, HERE, delivery("a", 2.0, again), False)
        assert admitted.same_body == (again == b"{}")
    kept = connection.execute("SELECT raw FROM evidence").fetchall()
    assert kept == ([] if again == b"{}" else [(again,)])
    assert connection.execute("SELECT raw FROM body").fetchall() == [(b"{}",)]


def test_only_the_deliveries_of_the_tenant_are_erased() -> None:
    connection = opened()
    for key, tenant in (("a", "acme"), ("b", "bolt")):
        writes.accept(connection, HERE, delivery(key, 1.0, tenant=tenant), False)
    sequences = [sequence for (sequence,) in connection.execute("SELECT sequence FROM inbox")]
    assert writes.erase(connection, "acme", sequences) == 1
    assert writes.erase(connection, "acme", sequences) == 0
    assert connection.execute("SELECT tenant_id FROM inbox").fetchall() == [("bolt",)]
    assert connection.execute("SELECT count(*) FROM body").fetchall() == [(1,)]


BEFORE = st.sampled_from(
    ["fresh", "settled", "started", "failed", "theirs", "claimed", "done", "no"]
)


def prepare(connection: apsw.Connection, stories: list[str]) -> None:
    for number, story in enumerate(stories):
        new = delivery(f"k{number}", 1000.0)
        if story == "claimed":
            writes.claim(connection, HERE, new)
        elif story != "no":
            writes.accept(connection, THERE if story == "theirs" else HERE, new, True)
        if story == "settled":
            arrivals.settle_one(connection, number + 1 - stories[:number].count("no"))
        if story in ("started", "failed"):
            writes.start(connection, HERE, new.key, 1001.0)
        if story == "failed":
            writes.finish(connection, HERE, new.key, Retry(1002.0, "E"), 1001.5)
            writes.start(connection, HERE, new.key, 1002.0)
        if story == "done":
            writes.finish(connection, HERE, new.key, Done(), 1001.0)


def everything(connection: apsw.Connection) -> list[object]:
    tables = ("arrival", "body", "outcome", "open", "attempt", "tally", "key", "block")
    return [
        connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables
    ]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(BEFORE, st.sampled_from([None, 1003.0, 1011.0])), max_size=70),
    st.integers(0, 70),
)
def test_writes_of_many_leave_what_those_of_each_leave(runs, arriving):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "SETTLE_EVERY", 1 << 30)  # the one thing that may come later
        found = []
        for together in (True, False):
            patch.setattr(arrivals, "_remembered", {})
            connection = opened()
            prepare(connection, [story for story, _ in runs])
            ends = [
                writes.RunEnd(f"k{number}", 1012.0, begun) for number, (_, begun) in enumerate(runs)
            ]
            new = [
                writes.done_at_once(delivery(f"n{number}", 1004.0), 1005.0)
                for number in range(arriving)
            ]
            for ended in [ends] if together else [[each] for each in ends]:
                writes.end_runs(connection, HERE, ended)
            for piece in [new] if together else [[each] for each in new]:
                arrivals.add(connection, piece)
            found.append(everything(connection))
            connection.close()
    assert found[0] == found[1]


def unbegun(connection: apsw.Connection, terms: LeaseTerms, now: float) -> set[str]:
    return set(leases.take_due(connection, terms, BacklogWalk(), 9, now).unbegun)


def test_a_start_is_waited_for_once_a_process_that_may_have_begun_it_is_gone():
    connection = opened()
    for key in ("waits", "expires", "fails"):
        writes.accept(connection, HERE, delivery(key, 1000.0), False)
    writes.accept(connection, THERE, delivery("began", 1000.0), True)
    assert unbegun(connection, HERE, 1001.0) == {"waits", "expires", "fails"}
    leases.release(connection, HERE, ["waits"])
    # It was never begun, as its owner says.
    assert unbegun(connection, HERE, 1001.0) == {"waits"}
    writes.start(connection, HERE, "fails", 1001.0)
    writes.finish(connection, HERE, "fails", Retry(1002.0, "E"), 1001.5)
    assert unbegun(connection, HERE, 1003.0) == set(), "a later run"
    # The other process ends: what it held may have run without a trace.
    assert leases.recover(connection, HERE) == 1
    assert unbegun(connection, HERE, 1004.0) == set()
    leases.release(connection, HERE, ["began"])
    assert unbegun(connection, HERE, 1004.0) == set(), "it stays in doubt until it has run"
    # Ours hangs, and its leases expire.
    assert unbegun(connection, THERE, 1100.0) == set()
    connection.close()


def work_of_a_look(waiting: int) -> int:
    """The virtual machine's hundreds of steps of a look beside ``waiting`` blocked deliveries."""
    connection, walk, now = opened(), BacklogWalk(), 1000.0
    for number in range(waiting):
        told = NewDelivery(f"k{number}", "order.paid", b"{}", 7, now, f"s{number % 4}", True)
        writes.accept(connection, HERE, told, False)
    while leases.take_due(connection, HERE, walk, 100, now).more:
        pass
    steps = 0

    def step() -> bool:
        nonlocal steps
        steps += 1
        return False

    writes.start(connection, HERE, "k0", now)
    writes.finish(connection, HERE, "k0", Done(), now)
    connection.set_progress_handler(step, 100)
    (record,) = leases.take_due(connection, HERE, walk, 100, now).records
    assert record.subject == "s0"
    return steps


def test_a_look_for_the_next_of_a_lane_does_not_read_the_backlog() -> None:
    assert work_of_a_look(8000) <= 1.5 * work_of_a_look(2000)
