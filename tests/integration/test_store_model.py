"""Both stores against an independent model: any order of calls gives the same records."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.keyed import ByKey
from support.loop import Loop
from support.postgres import open_inbox
from support.stores import open_file

from sdk_trio.records.deliveries import (
    Admission,
    Dead,
    DeliveryState,
    Done,
    NewDelivery,
    Outcome,
    Parked,
    Postponed,
    Released,
    Retry,
)
from sdk_trio.storage.admission import LeaseTerms
from sdk_trio.storage.memory.inbox import MemoryInbox

LEASE, DEDUP, PAYLOAD = 10.0, 100.0, 40.0
TERMS = {"lease_seconds": LEASE, "dedup_seconds": DEDUP, "payload_seconds": PAYLOAD}
IDS = ("m1", "m2", "m3", "m4")
OPEN = ("received", "running", "retrying")

ids = st.sampled_from(IDS)
who = st.sampled_from((0, 1))
verbs = st.sampled_from(("accept", "accept", "accept", "claim", "park"))
strays = st.integers(0, 4)
outcomes = st.one_of(
    st.just(("done",)),
    st.just(("released",)),
    st.just(("parked",)),
    st.just(("answered", "200")),
    st.tuples(st.just("postponed"), st.sampled_from((0, 5)), st.just("paused")),
    st.just(("dead", "broken")),
    st.tuples(st.just("retry"), st.sampled_from((None, 0, 5, 30)), st.sampled_from(("e1", "e2"))),
)

#: Sequences of calls that are tried on each store; a full-size run sets it to 80 or more.
EXAMPLES = int(os.environ.get("SDK_TEST_MODEL_EXAMPLES", "30"))


class Model:
    """The contract of ports.py as a simple model: a dictionary, and no optimization."""

    def __init__(self, forgets_early: bool) -> None:
        self.rows: dict[str, SimpleNamespace] = {}
        self.order = 0
        self.forgets_early = forgets_early

    def new(self, d: NewDelivery) -> SimpleNamespace:
        self.order += 1
        row = SimpleNamespace(
            order=self.order,
            raw=d.raw,
            subject=d.subject,
            ordered=d.ordered,
            attempts=0,
            failed=[],
            received_at=d.received_at,
            started=None,
            finished=None,
            due=None,
            error=None,
            owner=None,
            until=None,
            queued=False,
            state="",
            ends=0,
            alone=False,
            earlier=0,
            generation=0,
            decided=None,
        )
        self.rows[d.webhook_id] = row
        return row

    def admit(self, verb: str, d: NewDelivery, owner: str, leased: bool) -> tuple[Admission, int]:
        now = d.received_at
        if self.forgets_early:
            self.forget(now)
        row = self.rows.get(d.webhook_id)
        if row is not None and row.state == "done":
            if now - row.finished <= DEDUP:
                return Admission.DONE, row.attempts
            row = None
        admission = Admission.NEW
        if row is not None and row.state == "parked" and verb == "claim":
            # Its sender was answered 200, so workers run it.
            verb, leased, admission = "accept", False, Admission.QUEUED
        if row is None:
            row = self.new(d)
        elif row.state in OPEN and row.queued:
            return Admission.QUEUED, row.attempts
        elif row.state == "running" and row.owner != owner and row.until > now:
            return Admission.RUNNING, row.attempts
        elif (verb == "park" and row.state in ("dead", "parked")) or (
            row.state == "dead" and row.ends
        ):
            return Admission.DONE, row.attempts
        elif row.state == "parked" or (row.state == "dead" and verb == "accept"):
            row.earlier += row.attempts
            row.attempts, row.error, row.ends = 0, None, 0
        if row.state == "running" and row.owner == owner:
            row.attempts -= 1  # it was never begun, or its end could not be recorded
        row.alone = False
        before = row.attempts
        row.ordered = d.ordered
        row.started = row.finished = row.due = row.owner = row.until = None
        row.queued = verb == "accept"
        row.state = {"accept": "received", "claim": "running", "park": "parked"}[verb]
        if verb == "claim":
            row.attempts += 1
            row.started = now
        if verb == "claim" or leased:
            row.owner, row.until = owner, now + LEASE
        return admission, before

    def start(self, id_: str, owner: str, now: float, alone: bool) -> bool:
        row = self.rows.get(id_)
        if row is None or row.state not in OPEN or row.owner != owner:
            return False
        # A repeated start counts once: it was unknown whether the first one was committed.
        row.attempts += row.state != "running"
        row.state, row.started, row.due, row.alone = "running", now, None, alone
        row.until = now + LEASE
        return True

    def finish(self, id_: str, owner: str, outcome: tuple[Any, ...], now: float) -> None:
        row = self.rows.get(id_)
        if row is None or row.state not in OPEN or row.owner != owner:
            return
        row.owner = row.until = row.due = None
        begun = now if row.started is None else row.started
        if outcome[0] in ("done", "answered") and row.attempts < 2:
            row.error = None
        match outcome:
            case ("done",):
                row.state, row.finished = "done", now
                row.gone = row.raw if self.forgets_early else None
                row.raw = None if self.forgets_early else row.raw
            case ("released",):
                if row.state == "running":
                    row.attempts -= 1
                row.state, row.started = "received", None
            case ("answered", answer):
                row.failed.append((max(row.attempts, 1), begun, now, "", answer, None))
                row.state, row.finished = "done", now
                row.gone = row.raw if self.forgets_early else None
                row.raw = None if self.forgets_early else row.raw
            case ("postponed", wait, reason):
                row.attempts -= row.state == "running"
                row.state, row.error, row.queued = "retrying", reason, True
                row.decided, row.due, row.started = now, now + wait, None
            case ("parked",):
                row.state, row.queued = "parked", False
            case ("dead", error):
                row.failed.append((max(row.attempts, 1), begun, now, error, None, None))
                row.state, row.finished, row.queued, row.error = "dead", now, False, error
            case ("retry", wait, error):
                row.failed.append((max(row.attempts, 1), begun, now, error, "a.py:1", "T"))
                row.decided = now
                row.state, row.error, row.queued = "retrying", error, wait is not None
                row.due = None if wait is None else now + wait

    def take(self, owner: str, limit: int, now: float) -> tuple[list[str], bool, float | None]:
        by_age = sorted(self.rows.items(), key=lambda item: item[1].order)
        due, later, seen, blocking = [], [], set(), []
        leased = {
            row.subject
            for row in self.rows.values()
            if row.ordered and row.queued and row.owner is not None and row.state in OPEN
        }
        for id_, row in by_age:
            if row.state not in OPEN:
                continue
            first = row.subject is None or not row.ordered or row.subject not in seen
            waits = row.subject is not None and row.ordered and row.subject in leased
            if row.ordered:
                seen.add(row.subject)
            if not row.queued or row.owner == owner:
                continue
            if row.owner is None and row.due is not None and row.due > now:
                later.append(row.due)
            elif row.owner is None:
                due += [id_] if first and not waits else []
            elif row.until <= now:
                (due if first else blocking).append(id_)
        for id_ in (*due[:limit], *blocking):
            self.cut_short(self.rows[id_], False)
        for id_ in due[:limit]:
            self.rows[id_].owner, self.rows[id_].until = owner, now + LEASE
        for id_ in blocking:  # it is not renewed, and the first one of its lane waits for it
            self.rows[id_].owner = self.rows[id_].until = None
        return due[:limit], len(due) > limit or bool(blocking), min(later, default=None)

    def cut_short(self, row: SimpleNamespace, sole: bool) -> None:
        if row.state != "running":
            return
        ended = max(row.started, row.until - LEASE)
        error = "the process ended while it ran"
        row.failed.append((row.attempts, row.started, ended, error, None, None))
        row.state, row.queued, row.error = "received", True, error
        row.ends += 1
        row.alone = row.alone or sole

    def recover(self, owner: str) -> int:
        held = [r for r in self.rows.values() if r.state in OPEN and r.owner not in (None, owner)]
        for row in held:
            self.cut_short(row, len(held) == 1)
            row.owner = row.until = None
        return len(held)

    def suspects(self, owner: str, limit: int, now: float) -> list[str]:
        """Return the due events that ran when a process ended and have no other owner."""
        before = {id_: (r.owner, r.until) for id_, r in self.rows.items()}
        for row in self.rows.values():
            if row.owner == owner and row.ends and row.state == "received":
                row.owner = row.until = None
            elif row.owner is not None:
                row.owner, row.until = owner, now
        due, _, _ = self.take(owner, len(self.rows), now)
        for id_, row in self.rows.items():
            row.owner, row.until = before[id_]
        found = [i for i in due if self.rows[i].ends and self.rows[i].state == "received"][:limit]
        for id_ in found:
            self.rows[id_].owner, self.rows[id_].until = owner, now + LEASE
        return found

    def join(self, id_: str, owner: str) -> None:
        row = self.rows.get(id_)
        if row is not None and row.owner == owner and row.state in OPEN:
            row.alone = False

    def reschedule(self, now: float) -> int:
        late = [
            row
            for row in self.rows.values()
            if row.due is not None and row.due > now and row.decided > now + 60
        ]
        for row in late:
            row.due = row.decided = now
        return len(late)

    def release(self, id_: str, owner: str) -> None:
        row = self.rows.get(id_)
        if row is not None and row.owner == owner and row.state in ("received", "retrying"):
            row.owner = row.until = None

    def renew(self, owner: str, held: list[str], now: float) -> tuple[set[str], int]:
        given_up, lost = 0, set()
        for id_, row in self.rows.items():
            if row.owner not in (None, owner) and row.state in OPEN and id_ in held:
                lost.add(id_)
            if row.owner != owner:
                continue
            if id_ in held:
                row.until = now + LEASE
                continue
            given_up += 1
            row.owner = row.until = None
            if row.state == "running":
                row.state, row.started = "received", None
                row.attempts -= 1
        return lost, given_up

    def replay(self, id_: str) -> bool:
        row = self.rows.get(id_)
        if row is None or row.state not in ("dead", "parked", "retrying") or row.owner:
            return False
        row.earlier += row.attempts
        row.state, row.queued, row.attempts, row.ends = "received", True, 0, 0
        row.started = row.finished = row.error = row.due = None
        row.alone = False
        return True

    def repeat(self, id_: str) -> bool:
        row = self.rows.get(id_)
        if row is None or row.state != "done" or row.raw is None:
            return False
        row.generation += 1
        row.state = "parked"  # from where a replay does the rest
        return self.replay(id_)

    def forget(self, now: float) -> int:
        old = [i for i, r in self.rows.items() if r.state == "done" and now - r.finished > DEDUP]
        for id_ in old:
            del self.rows[id_]
        return len(old)

    def purge(self, now: float) -> tuple[int, int, int]:
        bodies = 0
        for row in self.rows.values():
            if row.state == "done" and row.raw is not None and now - row.finished > PAYLOAD:
                row.raw = None
                bodies += 1
        parked = [
            i for i, r in self.rows.items() if r.state == "parked" and now - r.received_at > PAYLOAD
        ]
        for id_ in parked:
            del self.rows[id_]
        return bodies, self.forget(now), len(parked)


class StoreMachine(RuleBasedStateMachine):
    """Two owners work on one store; each call is made to the model as well."""

    backend = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()
        self.directory = tempfile.TemporaryDirectory()
        self.model = Model(forgets_early=self.backend == "memory")
        self.now = 1000.0
        self.owners = ["a0", "b0"]
        self.inboxes: list[Any] = []
        # What each owner knows to be leased to it; a caller that gives up never learns of it.
        self.held: list[set[str]] = [set(), set()]
        for owner in self.owners:
            self.inboxes.append(self.open(owner))

    def open(self, owner: str) -> Any:
        if self.backend == "memory":
            shared = self.inboxes[0] if self.inboxes else None

            return ByKey(
                MemoryInbox(LeaseTerms(owner=owner, **TERMS), shares=shared and shared.raw)
            )
        file = Path(self.directory.name) / "inbox.db"
        opening = open_inbox if self.backend == "postgres" else open_file
        return ByKey(self.loop(lambda: opening(file, owner=owner, **TERMS)))

    def delivery(self, id_: str, body: int, ordered: bool) -> NewDelivery:
        subject = {"m1": "s1", "m2": "s1", "m3": "s1", "m4": None}[id_]
        raw = b'{"type":"t","n":%d}' % body
        return NewDelivery(id_, "t." + id_, raw, 7, self.now, subject, ordered)

    # What happens to deliveries is only interesting once there are some, whichever rules
    # Hypothesis leaves out of an example.
    @initialize(
        first=st.lists(st.tuples(who, verbs, ids, st.booleans(), st.booleans()), max_size=5)
    )
    def begin(self, first: list[tuple[int, str, str, bool, bool]]) -> None:
        for by, verb, id_, ordered, leased in first:
            self.admit(by, verb, id_, 1, ordered, leased)

    @rule(
        by=who,
        verb=verbs,
        id_=ids,
        body=st.sampled_from((1, 1, 2)),
        ordered=st.booleans(),
        leased=st.booleans(),
        gives_up=st.booleans(),
    )
    def admit_another(
        self,
        by: int,
        verb: str,
        id_: str,
        body: int,
        ordered: bool,
        leased: bool,
        gives_up: bool,
    ) -> None:
        self.admit(by, verb, id_, body, ordered, leased, gives_up)

    def admit(
        self,
        by: int,
        verb: str,
        id_: str,
        body: int,
        ordered: bool,
        leased: bool,
        gives_up: bool = False,
    ) -> None:
        delivery = self.delivery(id_, body, ordered)
        known = self.model.rows.get(id_)
        first = None if known is None else known.raw or getattr(known, "gone", None)
        options = {"leased": leased} if verb == "accept" else {}
        # An ordered one is claimed in its order.
        leased = leased and verb == "accept" and not ordered
        admitted = self.loop(lambda: getattr(self.inboxes[by], verb)(delivery, **options))
        expected = self.model.admit(verb, delivery, self.owners[by], leased)
        assert (admitted.admission, admitted.attempts) == expected
        if admitted.admission is Admission.NEW:
            self.held[by].discard(id_)
            if not gives_up and (leased or verb == "claim"):
                self.held[by].add(id_)
        if self.model.rows[id_] is known:
            assert admitted.same_body == (first is None or first == delivery.raw)
        else:
            assert admitted.same_body

    def aim(self, by: int, id_: str, stray: int) -> tuple[int, str]:
        """Mostly pick a delivery that is leased and its owner: strays alone find little."""
        leased = [i for i in IDS if (row := self.model.rows.get(i)) and row.owner in self.owners]
        if stray == 0 or not leased:
            return by, id_
        id_ = leased[stray % len(leased)]
        return self.owners.index(self.model.rows[id_].owner), id_

    @rule(by=who, id_=ids, stray=strays, alone=st.booleans())
    def start(self, by: int, id_: str, stray: int, alone: bool) -> None:
        by, id_ = self.aim(by, id_, stray)
        started = self.loop(lambda: self.inboxes[by].start(id_, now=self.now, alone=alone))
        assert started == self.model.start(id_, self.owners[by], self.now, alone)
        if started:
            self.held[by].add(id_)

    @rule(by=who, id_=ids, stray=strays)
    def join(self, by: int, id_: str, stray: int) -> None:
        by, id_ = self.aim(by, id_, stray)
        self.loop(lambda: self.inboxes[by].join(id_))
        self.model.join(id_, self.owners[by])

    @rule(by=who, limit=st.integers(1, 4))
    def claim_suspects(self, by: int, limit: int) -> None:
        found = self.loop(
            lambda: self.inboxes[by].claim_suspects(limit=limit, now=self.now)
        ).records
        expected = self.model.suspects(self.owners[by], limit, self.now)
        assert [record.webhook_id for record in found] == expected
        self.held[by] |= set(expected)

    @rule(by=who, back=st.sampled_from((0, 50, 70)))
    def reschedule(self, by: int, back: int) -> None:
        now = self.now - back
        done = self.loop(lambda: self.inboxes[by].reschedule(now=now))
        assert done == self.model.reschedule(now)

    @rule(by=who, id_=ids, outcome=outcomes, stray=strays)
    def finish(self, by: int, id_: str, outcome: tuple[Any, ...], stray: int) -> None:
        by, id_ = self.aim(by, id_, stray)
        ended_as: Outcome
        match outcome:
            case ("done",):
                ended_as = Done()
            case ("released",):
                ended_as = Released()
            case ("answered", answer):
                ended_as = Done(answer)
            case ("postponed", wait, reason):
                ended_as = Postponed(self.now + wait, reason)
            case ("parked",):
                ended_as = Parked()
            case ("dead", error):
                ended_as = Dead(error)
            case (_, wait, error):
                ended_as = Retry(None if wait is None else self.now + wait, error, "a.py:1", "T")
        self.loop(lambda: self.inboxes[by].finish(id_, ended_as, now=self.now))
        self.model.finish(id_, self.owners[by], outcome, self.now)
        self.held[by].discard(id_)

    @rule(by=who, limit=st.integers(1, 4), gives_up=st.booleans())
    def claim_due(self, by: int, limit: int, gives_up: bool) -> None:
        taken = self.take(by, limit)
        if gives_up:
            self.held[by] -= set(taken)

    def take(self, by: int, limit: int) -> list[str]:
        due = self.loop(lambda: self.inboxes[by].claim_due(limit=limit, now=self.now))
        expected = self.model.take(self.owners[by], limit, self.now)
        assert ([r.webhook_id for r in due.records], due.more, due.next_due_at) == expected
        for record in due.records:
            assert record.raw == self.model.rows[record.webhook_id].raw is not None
        self.held[by] |= set(expected[0])
        return expected[0]

    @rule(by=who, id_=ids, stray=strays)
    def release(self, by: int, id_: str, stray: int) -> None:
        by, id_ = self.aim(by, id_, stray)
        self.loop(lambda: self.inboxes[by].release([id_]))
        self.model.release(id_, self.owners[by])
        row = self.model.rows.get(id_)
        if row is None or row.owner != self.owners[by]:
            self.held[by].discard(id_)

    @rule(by=who)
    def recover(self, by: int) -> None:
        assert self.loop(self.inboxes[by].recover) == self.model.recover(self.owners[by])

    @rule(by=who)
    def renew(self, by: int) -> None:
        held = sorted(self.held[by])
        renewed = self.loop(lambda: self.inboxes[by].renew(held, now=self.now))
        expected = self.model.renew(self.owners[by], held, self.now)
        assert (set(renewed.lost), renewed.given_up) == expected
        self.held[by] -= renewed.lost
        for id_, row in self.model.rows.items():
            assert row.owner != self.owners[by] or id_ in held

    @rule(by=who, lasts=st.booleans())
    def nothing_stays_leased_without_a_run(self, by: int, lasts: bool) -> None:
        """Every event without a living owner is claimed after a lease, whichever process left it.

        ``lasts``: the other owner lives and renews; otherwise it is paused.
        """
        self.now += LEASE + 1
        self.renew(by)
        if lasts:
            self.renew(1 - by)
        else:
            self.held[1 - by].clear()
        while self.take(by, 4):
            pass
        lanes = set()
        for id_, row in sorted(self.model.rows.items(), key=lambda each: each[1].order):
            waits = row.ordered and row.subject in lanes  # for an earlier one, which is held
            if row.state in OPEN and row.queued and row.owner is not None and not waits:
                owner = self.owners.index(row.owner)
                assert id_ in self.held[owner], "leased to an owner that does not run it"
            if row.state in OPEN and row.ordered and row.subject is not None:
                lanes.add(row.subject)

    @rule(by=who, chosen=st.lists(ids, max_size=3))
    def replay(self, by: int, chosen: list[str]) -> None:
        put_back = self.loop(lambda: self.inboxes[by].replay(chosen))
        assert list(put_back) == [id_ for id_ in chosen if self.model.replay(id_)]

    @rule(by=who, chosen=st.lists(ids, max_size=3))
    def repeat(self, by: int, chosen: list[str]) -> None:
        put_back = self.loop(lambda: self.inboxes[by].repeat(chosen))
        assert list(put_back) == [id_ for id_ in chosen if self.model.repeat(id_)]

    @rule(by=who)
    def purge(self, by: int) -> None:
        purged = self.loop(lambda: self.inboxes[by].purge(now=self.now))
        assert (purged.bodies, purged.finished, purged.parked) == self.model.purge(self.now)

    @rule(seconds=st.sampled_from((1, 5, 10, 11, 41, 101)))
    def advance(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: len(self.model.rows) > 0)
    @rule(by=who)
    def reopen_with_another_owner(self, by: int) -> None:
        self.loop(self.inboxes[by].close)
        self.owners[by] += "'"
        self.held[by].clear()
        self.inboxes[by] = self.open(self.owners[by])

    @invariant()
    def records_are_those_of_the_model(self) -> None:
        found = self.loop(self.look)
        records, failures, listed, counts = found
        assert set(records) == set(self.model.rows)
        for id_, record in records.items():
            row = self.model.rows[id_]
            assert (
                record.state,
                record.queued,
                record.attempts,
                record.ordered,
                record.next_attempt_at,
                record.started_at,
                record.finished_at,
                record.last_error,
                record.raw,
                record.process_ends,
                record.ran_alone,
                record.earlier_attempts,
                record.generation,
            ) == (
                row.state,
                row.queued,
                row.attempts,
                row.ordered,
                row.due,
                row.started,
                row.finished,
                row.error,
                row.raw,
                row.ends,
                row.alone,
                row.earlier,
                row.generation,
            )
            assert failures[id_] == row.failed
        by_age = sorted(records, key=lambda id_: self.model.rows[id_].order)
        assert by_age == sorted(records, key=lambda id_: records[id_].sequence)
        assert [record.webhook_id for record in listed] == by_age[::-1]
        states = [row.state for row in self.model.rows.values()]
        assert counts == {state: states.count(state.value) for state in DeliveryState}

    async def look(self) -> Any:
        one, other = self.inboxes
        records = {id_: record for id_ in IDS if (record := await one.get(id_))}
        failures = {
            id_: [msgspec.structs.astuple(failure) for failure in await other.attempts(id_)]
            for id_ in records
        }
        return records, failures, await other.find(), await one.counts()

    def teardown(self) -> None:
        for inbox in self.inboxes:
            self.loop(inbox.close)
        self.loop.stop()
        self.directory.cleanup()


class SqliteMachine(StoreMachine):
    backend = "sqlite"


class MemoryMachine(StoreMachine):
    backend = "memory"


class PostgresMachine(StoreMachine):
    backend = "postgres"


@pytest.mark.parametrize("machine", [SqliteMachine, MemoryMachine, PostgresMachine])
def test_any_order_of_calls_gives_the_model_s_results(machine: type[StoreMachine]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            # Each step is a round trip to another process.
            max_examples=EXAMPLES // 3 if machine.backend == "postgres" else EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            # Without Phase.explain, which runs for minutes with a store on disk.
            phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
