"""The writes of the store in SQLite, one after the other in a transaction: what always holds.

What each of them means is tested of every store alike (``tests/integration/test_store_model.py``);
here are the promises that leases, lanes and the three tables of a delivery rest on.
"""

from typing import Any

import apsw
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.sql_store import add_done, new_store, steps_of, value

from sdk_trio.base import clock
from sdk_trio.records.deliveries import (
    Admission,
    Dead,
    DeliveryState,
    Done,
    Due,
    Lease,
    NewDelivery,
    Outcome,
    Parked,
    Postponed,
    Released,
    Retry,
)
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.engines.sqlite_connection import SqliteTransaction
from sdk_trio.storage.sql import admission, arrivals, leases, reads, runs
from sdk_trio.storage.sql.admission import Arriving
from sdk_trio.storage.sql.runs import Ran, RunEnd, RunStart

HERE, THERE = (
    LeaseTerms(owner=owner, lease_seconds=10.0, dedup_seconds=30.0, payload_seconds=60.0)
    for owner in ("here", "there")
)
KEYS = st.sampled_from(["a", "b", "c"])
OWNERS = st.sampled_from([HERE, THERE])
OUTCOMES: list[Outcome] = [
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

#: A delivery with its state, whichever table that is in.
ROWS = """
SELECT arrival.sequence AS sequence, delivery_key, coalesce(work.state, 'done') AS state,
    coalesce(work.attempts, ended.attempts) AS attempts, lease_owner, lease_token, lease_until,
    next_attempt_at, coalesce(work.finished_at, ended.finished_at) AS finished_at
FROM arrival LEFT JOIN work ON work.sequence = arrival.sequence
    LEFT JOIN ended ON ended.sequence = arrival.sequence
"""
COLUMNS = (
    "sequence",
    "key",
    "state",
    "attempts",
    "lease_owner",
    "lease_token",
    "lease_until",
    "next_attempt_at",
    "finished_at",
)


def delivery(key: str, now: float, raw: bytes = b"{}", tenant: str | None = None) -> NewDelivery:
    return NewDelivery(key, "order.paid", raw, int(now), now, tenant_id=tenant)


def accept(tx: SqliteTransaction, incoming: NewDelivery, token: int | None = None) -> Any:
    ((admitted, _),) = admission.accept_all(tx, HERE, [Arriving(incoming, token)])
    return admitted


class Writes(RuleBasedStateMachine):
    """Any writes of two owners in any order, while time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.tx = new_store()
        self.now = 1000.0
        self.tokens = 0
        self.known: dict[int, str] = {}
        # With so few keys, what is done for many arrivals at a time would never be done at all.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(arrivals, "INDEX_EVERY", 2)

    def teardown(self) -> None:
        self.patch.undo()
        self.tx.connection.close()

    def new_token(self) -> int:
        self.tokens += 1000
        return self.tokens

    @rule(seconds=st.sampled_from([0.5, 9.0, 11.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=KEYS, terms=OWNERS, how=st.sampled_from(["leased", "left", "claimed", "parked"]))
    def arrives(self, key: str, terms: LeaseTerms, how: str) -> None:
        new = delivery(key, self.now, tenant="acme")
        token = self.new_token()
        if how == "claimed":
            admission.claim_all(self.tx, terms, [Arriving(new, token)])
        elif how == "parked":
            admission.park(self.tx, terms, new, "no handler")
        else:
            arriving = Arriving(new, token if how == "leased" else None)
            admission.accept_all(self.tx, terms, [arriving])

    @rule(key=KEYS, terms=OWNERS, ours=st.booleans())
    def begins(self, key: str, terms: LeaseTerms, ours: bool) -> None:
        before = self.row(key)
        if before is None:
            return
        mine = ours and before["lease_owner"] == terms.owner
        token = (before["lease_token"] if mine else None) or self.new_token()
        start = RunStart(before["sequence"], token, self.now)
        (began,) = runs.start_all(self.tx, terms, [start])
        after = self.row(key)
        assert began == (after["lease_token"] == token and after["state"] == "running")
        if not began:
            assert after == before
            return
        free = before["lease_owner"] in (None, terms.owner)
        assert free or before["lease_until"] <= self.now
        # Begun with this lease already: the start is repeated, because its commit was not
        # confirmed.
        again = before["state"] == "running" and before["lease_token"] == token
        assert after["attempts"] == before["attempts"] + (not again)

    @rule(key=KEYS, terms=OWNERS, outcome=st.sampled_from(OUTCOMES), stale=st.booleans())
    def ends(self, key: str, terms: LeaseTerms, outcome: Any, stale: bool) -> None:
        before = self.row(key)
        if before is None:
            return
        if isinstance(outcome, Retry | Postponed) and outcome.at is not None:
            outcome = msgspec.structs.replace(outcome, at=self.now + outcome.at)
        token = before["lease_token"]
        named = self.new_token() if stale or token is None else token
        lease = Lease(key, named, before["sequence"])
        is_ended = runs.finish(self.tx, lease, outcome, self.now)
        assert is_ended == (lease.token == token)
        if lease.token != token:
            assert self.row(key) == before, "a run without a lease has written its outcome"
        else:
            assert self.row(key)["lease_token"] is None

    @rule(keys=st.lists(KEYS, unique=True), stale=st.booleans())
    def several_end(self, keys: list[str], stale: bool) -> None:
        rows = [row for key in keys if (row := self.row(key)) is not None]
        ends = [
            RunEnd(row["sequence"], row["lease_token"] or self.new_token(), self.now, self.now)
            for row in rows
        ]
        if stale and ends:
            ends[0] = msgspec.structs.replace(ends[0], token=self.new_token())
        ended = runs.end_all(self.tx, ends)
        for row, end, done in zip(rows, ends, ended, strict=True):
            assert done == (row["lease_token"] == end.token)
            assert self.row(row["key"])["state"] == "done" if done else self.row(row["key"]) == row

    @rule(key=KEYS, outcome=st.sampled_from(OUTCOMES))
    def runs_whole(self, key: str, outcome: Any) -> None:
        before = self.row(key)
        token = self.new_token()
        runs.record_run(self.tx, HERE, delivery(key, self.now), token, outcome, self.now)
        if before is not None and before["lease_owner"] == "there":
            held = before["lease_until"] > self.now
            assert not held or self.row(key) == before, "another owner runs it"

    @rule(terms=OWNERS, limit=st.integers(0, 2))
    def taken_as_due(self, terms: LeaseTerms, limit: int) -> None:
        due, _ = leases.claim_due(
            self.tx, terms, leases.PollCursor(), limit=limit, now=self.now, take_expired=True
        )
        for record in due.records:
            row = self.row(record.key)
            lease = due.leases[record.key]
            assert (row["lease_owner"], row["lease_token"]) == (terms.owner, lease.token)

    @rule(terms=OWNERS, kept=st.sets(KEYS))
    def renews(self, terms: LeaseTerms, kept: set[str]) -> None:
        rows = [row for row in self.rows() if row["lease_owner"] == terms.owner]
        held = {row["key"]: row for row in rows if row["key"] in kept}
        own = [Lease(key, row["lease_token"], row["sequence"]) for key, row in held.items()]
        renewed = leases.renew(self.tx, terms, own, (), now=self.now)
        assert (renewed.lost, renewed.given_up) == (frozenset(), len(rows) - len(held))
        for row in rows:
            after = self.row(row["key"])
            until = self.now + terms.lease_seconds if row["key"] in held else None
            assert after["lease_until"] == until

    @rule(terms=OWNERS)
    def takes_suspects(self, terms: LeaseTerms) -> None:
        leases.claim_suspects(self.tx, terms, limit=9, now=self.now)

    @rule(terms=OWNERS)
    def recovers(self, terms: LeaseTerms) -> None:
        leases.recover(self.tx, terms, dead=None)
        assert all(row["lease_owner"] in (None, terms.owner) for row in self.rows())

    @rule(what=st.sampled_from(["bodies", "done", "parked"]))
    def grows_old(self, what: str) -> None:
        before = self.rows()
        sequences, at = [row["sequence"] for row in before], self.now - 20.0
        if what == "bodies":
            arrivals.delete_bodies(self.tx, sequences, at)
            assert self.rows() == before
        elif what == "done":
            old = [r for r in before if r["state"] == "done" and r["finished_at"] < at]
            assert arrivals.delete_done(self.tx, sequences, at) == len(old)
            assert self.rows() == [row for row in before if row not in old]
        else:
            assert arrivals.delete_parked(self.tx, sequences, at) == sum(
                row["state"] == "parked" for row in before
            )

    @rule(key=KEYS)
    def is_erased(self, key: str) -> None:
        row = self.row(key)
        if row is not None:
            owned = "SELECT count(*) FROM arrival WHERE tenant_id = 'acme' AND sequence = "
            expected = value(self.tx, f"{owned}{row['sequence']}")
            assert arrivals.erase(self.tx, [row["sequence"]], "acme") == expected
            assert (self.row(key) is None) == bool(expected)

    @rule()
    def is_rolled_back(self) -> None:
        before = self.rows()
        self.tx.connection.execute("SAVEPOINT batch")
        lost = [Arriving(delivery(f"lost-{n}", self.now), None) for n in range(3)]
        admission.accept_all(self.tx, HERE, lost)
        self.tx.connection.execute("ROLLBACK TO batch; RELEASE batch")
        self.tx.note_other_writes()
        assert self.rows() == before
        assert arrivals.find_one(self.tx, "lost-0") is None

    @rule(key=KEYS)
    def is_replayed(self, key: str) -> None:
        row = self.row(key)
        replayable = ("dead", "parked", "retrying")
        may = (
            row is not None
            and row["state"] in replayable
            and row["lease_owner"] is None
            and value(self.tx, f"SELECT raw FROM arrival WHERE sequence = {row['sequence']}")
        )
        assert list(admission.replay(self.tx, [key])) == ([key] if may else [])

    def rows(self) -> list[dict[str, Any]]:
        found = self.tx.all(f"{ROWS} ORDER BY 1")
        return [dict(zip(COLUMNS, row, strict=True)) for row in found]

    def row(self, key: str) -> Any:
        return next((row for row in self.rows() if row["key"] == key), None)

    @invariant()
    def counts_are_what_counting_finds(self) -> None:
        expected = dict.fromkeys(DeliveryState, 0)
        for row in self.rows():
            expected[DeliveryState(row["state"])] += 1
        assert reads.counts(self.tx) == expected

    @invariant()
    def every_delivery_is_found_by_its_key_and_no_sequence_is_given_twice(self) -> None:
        numbers = {row["key"]: row["sequence"] for row in self.rows()}
        assert arrivals.find(self.tx, list(numbers)) == numbers
        for key, sequence in numbers.items():
            assert self.known.setdefault(sequence, key) == key

    @invariant()
    def a_delivery_is_either_done_or_not(self) -> None:
        both = "SELECT count(*) FROM work JOIN ended USING (sequence)"
        neither = """SELECT count(*) FROM arrival WHERE sequence NOT IN
            (SELECT sequence FROM work UNION SELECT sequence FROM ended)"""
        assert value(self.tx, both) == value(self.tx, neither) == 0

    @invariant()
    def only_retried_events_have_a_time(self) -> None:
        for row in self.rows():
            assert row["next_attempt_at"] is None or row["state"] == "retrying"

    @invariant()
    def only_what_is_leased_has_an_owner_and_what_is_over_is_not(self) -> None:
        for row in self.rows():
            assert (row["lease_owner"] is None) or row["lease_until"] is not None
            assert row["lease_owner"] is None or row["state"] not in ("done", "dead", "parked")

    @invariant()
    def what_is_over_says_when(self) -> None:
        for row in self.rows():
            assert (row["finished_at"] is not None) == (row["state"] in ("done", "dead"))

    @invariant()
    def all_that_is_kept_belongs_to_a_delivery(self) -> None:
        for table in ("attempt", "evidence", "work", "ended", "lookup"):
            strays = f"""SELECT count(*) FROM {table}
                WHERE sequence NOT IN (SELECT sequence FROM arrival)"""
            assert value(self.tx, strays) == 0, table


TestWrites = Writes.TestCase
TestWrites.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("again", [b"{}", b'{"other": 1}'])
def test_another_body_under_a_known_key_is_kept_once_as_evidence(again: bytes) -> None:
    tx = new_store()
    accept(tx, delivery("a", 1.0))
    for _ in range(2):
        admitted = accept(tx, delivery("a", 2.0, again))
        assert admitted.same_body == (again == b"{}")
    assert tx.all("SELECT raw FROM evidence") == ([] if again == b"{}" else [(again,)])
    assert tx.all("SELECT raw FROM arrival") == [(b"{}",)]


def test_only_the_deliveries_of_the_tenant_are_erased() -> None:
    tx = new_store()
    for key, tenant in (("a", "acme"), ("b", "bolt")):
        accept(tx, delivery(key, 1.0, tenant=tenant))
    assert arrivals.erase(tx, [1, 2], "acme") == 1
    assert arrivals.erase(tx, [1, 2], "acme") == 0
    assert tx.all("SELECT tenant_id FROM arrival") == [("bolt",)]


BEFORE = st.sampled_from(["leased", "left", "started", "failed", "theirs", "claimed", "done", "no"])
TABLES = ("arrival", "ended", "work", "attempt", "tally", "lookup", "segment")


def prepare(tx: SqliteTransaction, stories: list[str]) -> dict[int, Lease]:
    """Bring deliveries into these states; return the leases of those that have one."""
    held = {}
    for number, story in enumerate(stories):
        if story == "no":
            continue
        arriving = Arriving(delivery(f"k{number}", 1000.0), None if story == "left" else number + 1)
        terms = THERE if story == "theirs" else HERE
        kind = admission.claim_all if story == "claimed" else admission.accept_all
        ((_, sequence),) = kind(tx, terms, [arriving])
        assert sequence is not None
        held[number] = lease = Lease(f"k{number}", number + 1, sequence)
        start = RunStart(sequence, lease.token, 1001.0)
        if story in ("started", "failed"):
            runs.start_all(tx, HERE, [start])
        if story == "failed":
            runs.finish(tx, lease, Retry(1002.0, "E"), 1001.5)
            runs.start_all(tx, HERE, [start])
        if story == "done":
            runs.finish(tx, lease, Done(), 1001.0)
    return held


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(BEFORE, st.sampled_from([None, 1003.0, 1011.0])), max_size=70),
    st.integers(0, 70),
)
def test_writes_of_many_leave_what_those_of_each_leave(earlier, arriving):
    found = []
    for together in (True, False):
        tx = new_store()
        held = prepare(tx, [story for story, _ in earlier])
        ends = [
            RunEnd(lease.sequence, lease.token, 1012.0, earlier[number][1])
            for number, lease in held.items()
        ]
        new = [Ran(delivery(f"n{number}", 1004.0), 1, 1005.0) for number in range(arriving)]
        left = [Arriving(delivery(f"l{number}", 1004.0), None) for number in range(arriving)]
        for ended in [ends] if together else [[each] for each in ends]:
            runs.end_all(tx, ended)
        for done in [new] if together else [[each] for each in new]:
            runs.add_done(tx, HERE, done)
        for some in [left] if together else [[each] for each in left]:
            admission.accept_all(tx, HERE, some)
        found.append([sorted(tx.all(f"SELECT * FROM {table}"), key=str) for table in TABLES])
        tx.connection.close()
    assert found[0] == found[1]


# -- leases ----------------------------------------------------------------------------------------


def claim(tx: SqliteTransaction, terms: LeaseTerms, now: float) -> Due:
    return leases.claim_due(tx, terms, leases.PollCursor(), limit=9, now=now, take_expired=True)[0]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=str)
def test_an_outcome_with_a_stale_token_changes_nothing(outcome: Outcome) -> None:
    """The run was taken over by the same owner: only the token distinguishes the two."""
    tx = new_store()
    accept(tx, delivery("a", 1000.0))
    stale = claim(tx, HERE, 1001.0).leases["a"]
    leases.renew(tx, HERE, [], (), now=1002.0)
    current = claim(tx, HERE, 1003.0).leases["a"]
    assert current.token != stale.token
    before = [tx.all(f"SELECT * FROM {table}") for table in TABLES]
    assert not runs.finish(tx, stale, outcome, 1004.0)
    assert not runs.join(tx, stale)
    assert leases.release(tx, [stale]) == 0
    assert [tx.all(f"SELECT * FROM {table}") for table in TABLES] == before
    assert runs.finish(tx, current, outcome, 1004.0)
    assert [tx.all(f"SELECT * FROM {table}") for table in TABLES] != before


def test_an_expired_lease_is_claimed_again() -> None:
    tx = new_store()
    accept(tx, delivery("a", 1000.0))
    mine = claim(tx, HERE, 1001.0).leases["a"]
    assert not claim(tx, THERE, 1010.9).leases
    renewed = leases.renew(tx, HERE, [mine], (), now=1010.9)
    assert (renewed.lost, renewed.given_up) == (frozenset(), 0)
    assert not claim(tx, THERE, 1020.8).leases, "renewed for ten seconds"
    theirs = claim(tx, THERE, 1020.9).leases["a"]
    renewed = leases.renew(tx, HERE, [mine], (), now=1021.0)
    assert (renewed.lost, renewed.given_up) == (frozenset(["a"]), 0)
    runs.finish(tx, mine, Done(), 1021.0)
    assert reads.counts(tx)[DeliveryState.DONE] == 0
    runs.finish(tx, theirs, Done(), 1022.0)
    assert reads.counts(tx)[DeliveryState.DONE] == 1


def test_a_replayed_earlier_event_of_a_lane_waits_only_for_the_later_one() -> None:
    tx = new_store()
    for key in ("a", "b"):
        accept(tx, NewDelivery(key, "t", b"{}", 1, 1.0, "s", True))
    (first,) = claim(tx, HERE, 2.0).leases.values()
    runs.finish(tx, first, Dead("E"), 3.0)
    (later,) = claim(tx, HERE, 4.0).leases.values()
    assert admission.replay(tx, ["a"]) == ["a"]
    accept(tx, NewDelivery("c", "t", b"{}", 1, 1.0, "another", True))
    assert set(claim(tx, HERE, 5.0).leases) == {"c"}
    runs.finish(tx, later, Done(), 6.0)
    assert set(claim(tx, HERE, 7.0).leases) == {"a"}


def test_a_start_is_waited_for_once_a_process_that_may_have_begun_it_is_gone() -> None:
    tx = new_store()
    for key in ("waits", "expires", "fails"):
        accept(tx, delivery(key, 1000.0))
    admission.accept_all(tx, THERE, [Arriving(delivery("began", 1000.0), 7)])
    claimed = claim(tx, HERE, 1001.0)
    assert claimed.first_runs == {"waits", "expires", "fails"}
    leases.release(tx, [claimed.leases["waits"]])
    # It was never begun, as its owner says.
    assert claim(tx, HERE, 1001.0).first_runs == {"waits"}
    fails = claimed.leases["fails"]
    runs.start_all(tx, HERE, [RunStart(fails.sequence, fails.token, 1001.0)])
    runs.finish(tx, fails, Retry(1002.0, "E"), 1001.5)
    assert claim(tx, HERE, 1003.0).first_runs == set(), "a later run"
    # The other process ends: its events may have run without a trace.
    assert leases.recover(tx, HERE, dead=None) == 1
    claimed = claim(tx, HERE, 1004.0)
    assert (set(claimed.leases), claimed.first_runs) == ({"began"}, set())
    leases.release(tx, [claimed.leases["began"]])
    assert claim(tx, HERE, 1004.0).first_runs == set(), "it stays in doubt until it has run"
    # Ours hangs, and its leases expire.
    assert claim(tx, THERE, 1100.0).first_runs == set()


def test_a_shared_store_without_a_clock_takes_away_expired_leases_only() -> None:
    tx, now = new_store(), clock.wall()
    here, there = (msgspec.structs.replace(terms, shared_by_hosts=True) for terms in (HERE, THERE))
    admission.accept_all(tx, there, [Arriving(delivery("live", now), 7)])
    admission.accept_all(tx, there, [Arriving(delivery("expired", now - 60), 8)])
    assert leases.recover(tx, here, dead=None) == 1
    assert claim(tx, here, now).leases.keys() == {"expired"}


@pytest.mark.parametrize(("age", "is_sole"), [(0, True), (6, False), (60, False)])
def test_a_lease_shows_what_ended_its_owner_while_no_other_host_can_have_taken_another(
    age: float, is_sole: bool
) -> None:
    tx, now = new_store(), clock.wall()
    here, there = (msgspec.structs.replace(terms, shared_by_hosts=True) for terms in (HERE, THERE))
    admission.claim_all(tx, there, [Arriving(delivery("ran", now - age), 7)])
    assert leases.recover(tx, here, dead="there") == 1
    assert value(tx, "SELECT ran_alone FROM work") == is_sole


def test_an_expired_lease_does_not_show_that_its_run_ended_the_process() -> None:
    """Another run of its owner has a later lease."""
    tx, now = new_store(), clock.wall()
    here, there = (msgspec.structs.replace(terms, shared_by_hosts=True) for terms in (HERE, THERE))
    for token, (key, at) in enumerate((("expired", now - 60), ("beside", now))):
        admission.claim_all(tx, there, [Arriving(delivery(key, at), token)])
    assert leases.recover(tx, here) == 1
    assert value(tx, "SELECT ran_alone FROM work WHERE process_ends = 1") == 0


@pytest.mark.parametrize(("at", "is_sole"), [(1002.0, True), (1006.0, False), (1011.0, False)])
def test_a_take_over_shows_what_ended_the_process_while_no_lease_can_have_expired(
    at: float, is_sole: bool
) -> None:
    tx = new_store()
    admission.claim_all(tx, THERE, [Arriving(delivery("ran", 1000.0), 7)])
    assert leases.take_over(tx, HERE, "there", successor="next", now=at) == 1
    assert value(tx, "SELECT ran_alone FROM work") == is_sole


def steps_of_a_poll(blocked: int, kept: int) -> int:
    """Return the steps of a poll beside ``rows`` deliveries that wait in lanes, or are dead or
    done."""
    tx, now = new_store(), 1000.0
    add_done(tx, [delivery(f"done-{number}", 1.0) for number in range(kept)])
    for number in range(kept):
        admission.park(tx, HERE, delivery(f"parked-{number}", 1.0), None)
    incoming = [
        NewDelivery(f"k{number}", "order.paid", b"{}", 7, now, f"s{number % 4}", True)
        for number in range(blocked)
    ]
    admission.accept_all(tx, HERE, [Arriving(each, None) for each in incoming])
    held: dict[str, Lease] = {}
    while True:
        claimed, _ = leases.claim_due(
            tx, HERE, leases.PollCursor(), limit=100, now=now, take_expired=True
        )
        held |= claimed.leases
        if not claimed.more:
            break
    runs.finish(tx, held["k0"], Done(), now)
    found = []
    steps = steps_of(
        tx,
        lambda: found.append(
            leases.claim_due(tx, HERE, leases.PollCursor(), limit=100, now=now, take_expired=True)[
                0
            ].records
        ),
    )
    ((record,),) = found
    assert record.subject == "s0"
    return steps


def test_a_poll_for_the_next_of_a_lane_does_not_read_the_backlog() -> None:
    assert steps_of_a_poll(8000, 0) <= 1.5 * steps_of_a_poll(2000, 0)


def test_a_poll_compiles_no_statement_again() -> None:
    tx = new_store()
    compiled: list[str | None] = []

    def note(_operation: int, table: str | None, *_: str | None) -> int:
        compiled.append(table)
        return apsw.SQLITE_OK

    def poll(limit: int) -> None:
        leases.claim_due(
            tx, HERE, leases.PollCursor(), limit=limit, now=clock.wall(), take_expired=True
        )

    tx.connection.authorizer = note
    poll(1)
    assert "work" in compiled
    compiled.clear()
    poll(2)
    assert compiled == []


def test_polls_one_after_the_other_reach_the_first_of_every_lane() -> None:
    tx, now, number = new_store(), 1000.0, 2 * leases.LANES + 7
    incoming = [
        NewDelivery(f"k{place:04}", "order.paid", b"{}", 7, now, f"s{place % number}", True)
        for place in range(2 * number)
    ]
    incoming.insert(number, delivery("unordered", now))
    admission.accept_all(tx, HERE, [Arriving(each, None) for each in incoming])
    place, taken, polls = leases.PollCursor(), list[str](), 0
    while True:
        claimed, place = leases.claim_due(tx, HERE, place, limit=1000, now=now, take_expired=True)
        keys = [record.key for record in claimed.records]
        assert keys == sorted(keys), "oldest arrival first"
        taken, polls = taken + keys, polls + 1
        if not claimed.more:
            break
    assert sorted(taken) == [*(f"k{place:04}" for place in range(number)), "unordered"]
    assert (place, polls) == (leases.PollCursor(), 3), "the next poll begins with the first lane"


def test_a_poll_reads_no_done_or_parked_rows() -> None:
    assert steps_of_a_poll(8, 2000) <= steps_of_a_poll(8, 20) + 50


def test_a_known_delivery_is_admitted_by_the_rows_of_either_table() -> None:
    tx = new_store()
    add_done(tx, [delivery("done", 1000.0)])
    assert accept(tx, delivery("done", 1002.0)).admission is Admission.DONE
    assert accept(tx, delivery("done", 1100.0)).admission is Admission.NEW, "after 30 s"
