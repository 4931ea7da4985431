"""Messages on both stores against an independent model: any order of calls by two processes."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.loop import Loop
from support.notified import LEASE, Stores, audit, transition

from sdk_trio.records.notifications import CUT_OFF, NotificationId, NotificationState, SendResult
from sdk_trio.records.tenants import AuditAction

#: Sequences of calls that are tried on each store; a full-size run sets it to 40 or more.
EXAMPLES = int(os.environ.get("SDK_TEST_MODEL_EXAMPLES", "15"))

CHANNELS = {"email": False, "webhook": True}
OPEN = ("pending", "sending", "retrying")
WAITING = ("pending", "retrying")

who = st.sampled_from((0, 1))
channels = st.sampled_from(sorted(CHANNELS))
tenants = st.sampled_from(("a", "b"))
strays = st.integers(0, 3)
endings = st.sampled_from(("sent", "retrying", "failed", "skipped", "unknown", "pending"))


class NotificationMachine(RuleBasedStateMachine):
    """Two owners on one store; each call is made to the model as well."""

    backend = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()
        self.directory = tempfile.TemporaryDirectory()
        self.stores = Stores(self.backend, Path(self.directory.name) / "inbox.db")
        self.owners = ["a0", "b0"]
        self.open = [self.loop(lambda o=o: self.stores.open(o)) for o in self.owners]
        self.now = 1000.0
        self.outbox: dict[int, tuple[str, float]] = {}
        self.last = 0
        self.position: int | None = None
        self.silent = False
        self.rows: dict[NotificationId, SimpleNamespace] = {}

    def store(self, by: int) -> Any:
        return self.open[by].notifications

    def aim(self, by: int, stray: int) -> tuple[int, NotificationId]:
        """Mostly a message that is leased, and its owner."""
        leased = [id for id in sorted(self.rows) if self.rows[id].owner in self.owners]
        if leased and stray:
            id = leased[stray % len(leased)]
            return self.owners.index(self.rows[id].owner), id
        ids = sorted(self.rows)
        return by, ids[stray % len(ids)] if ids else NotificationId(99, "email")

    # What happens to messages is only interesting once there are some, whichever rules Hypothesis
    # leaves out of an example.
    @initialize(
        drawn=st.booleans(),
        happened=st.lists(tenants, min_size=1, max_size=3),
        begun=st.lists(st.tuples(who, channels, st.integers(0, 2)), max_size=4),
    )
    def begin(self, drawn: bool, happened: list[str], begun: list[tuple[int, str, int]]) -> None:
        if drawn:
            self.create_messages(by=0, only=None, limit=500)
        for tenant in happened:
            self.happen(by=0, tenant=tenant, announced=not drawn)
        self.create_messages(by=0, only=None, limit=500)
        for by, channel, steps in begun:
            self.claim_due(by=by, channel=channel, limit=1)
            if steps:
                self.start(by=by, stray=steps)

    @rule(seconds=st.sampled_from((1.0, 5.0, LEASE, 60.0)))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @rule(by=who, tenant=tenants, announced=st.booleans())
    def happen(self, by: int, tenant: str, announced: bool = False) -> None:
        if announced and self.position is None and not self.silent:
            self.position = max(self.outbox, default=0)
        self.loop(lambda: transition(self.open[by], tenant, now=self.now, announced=announced))
        self.last += 1
        self.outbox[self.last] = (tenant, self.now)

    @rule(by=who)
    def switch_off(self, by: int) -> None:
        self.loop(self.store(by).switch_off)
        self.position, self.silent = None, True

    @rule(by=who, only=st.sampled_from((None, None, "email")), limit=st.sampled_from((1, 500)))
    def create_messages(self, by: int, only: str | None, limit: int) -> None:
        chosen = {n: r for n, r in CHANNELS.items() if only in (None, n)}
        oldest = self.now - 50
        done = self.loop(
            lambda: self.store(by).create_messages(chosen, now=self.now, oldest=oldest, limit=limit)
        )
        pending = skipped = 0
        for id, row in self.rows.items():
            if row.state in WAITING and row.owner is None and id.channel not in chosen:
                row.state, row.due, row.finished = "skipped", None, self.now
                row.reason = "the channel is disabled"
                skipped += 1
        if self.position is None:
            self.position, self.silent = max(self.outbox, default=0), False
            more = False
        else:
            new = sorted(s for s in self.outbox if s > self.position)[:limit]
            for sequence in new:
                self.position = sequence
                fresh = self.outbox[sequence][1] >= oldest
                for name in chosen:
                    row = self.rows[NotificationId(sequence, name)] = SimpleNamespace(
                        state="pending" if fresh else "skipped",
                        attempts=0,
                        owner=None,
                        until=None,
                        due=None,
                        started=None,
                        finished=None if fresh else self.now,
                        reason=None if fresh else "old",
                        provider=None,
                    )
                    pending += row.state == "pending"
                    skipped += row.state == "skipped"
            more = len(new) == limit
        assert (done.pending, done.skipped, done.more) == (pending, skipped, more)

    def free(self, id: NotificationId) -> bool:
        """Take a lease away; True when the message is lost."""
        row = self.rows[id]
        lost = row.state == "sending" and not CHANNELS[id.channel]
        row.owner = row.until = row.due = None
        row.state = "unknown" if lost else "pending"
        if lost:
            row.finished, row.reason = self.now, CUT_OFF
        return lost

    @rule(by=who, channel=channels, limit=st.integers(1, 3))
    def claim_due(self, by: int, channel: str, limit: int) -> None:
        due = self.loop(lambda: self.store(by).claim_due(channel, limit=limit, now=self.now))
        mine = [id for id in sorted(self.rows) if id.channel == channel]
        others = [id for id in mine if self.rows[id].owner not in (None, self.owners[by])]
        lost = [id for id in others if self.rows[id].until <= self.now and self.free(id)]
        ready, later = [], []
        for id in mine:
            row = self.rows[id]
            if row.state in WAITING and row.owner is None:
                (later if row.due is not None and row.due > self.now else ready).append(id)
        for id in ready[:limit]:
            row = self.rows[id]
            row.owner, row.until, row.due = self.owners[by], self.now + LEASE, None
        assert [record.id for record in due.records] == ready[:limit]
        assert sorted(record.id for record in due.lost) == lost
        assert due.more == (len(ready) > limit)
        assert due.next_due_at == min((self.rows[id].due for id in later), default=None)

    @rule(by=who, stray=strays)
    def start(self, by: int, stray: int) -> None:
        by, id = self.aim(by, stray)
        begun = self.loop(lambda: self.store(by).start(id, now=self.now))
        row = self.rows.get(id)
        expected = row is not None and row.owner == self.owners[by] and row.state in WAITING
        assert begun == expected
        if row is not None and expected:
            row.state, row.started, row.due = "sending", self.now, None
            row.attempts += 1
            row.until = self.now + LEASE

    @rule(by=who, stray=strays, state=endings, wait=st.sampled_from((0.0, 5.0, 30.0)))
    def finish(self, by: int, stray: int, state: str, wait: float) -> None:
        by, id = self.aim(by, stray)
        at = self.now + wait if state == "retrying" else None
        provider = "p" if state == "sent" else None
        ending = SendResult(NotificationState(state), "why", provider, at)
        done = self.loop(lambda: self.store(by).finish(id, ending, now=self.now))
        row = self.rows.get(id)
        expected = row is not None and row.owner == self.owners[by] and row.state in OPEN
        assert done == expected
        if row is None or not expected:
            return
        row.owner = row.until = None
        if state == "pending":
            row.attempts -= row.state == "sending"
            row.state, row.due = "pending", None
            return
        row.state, row.due, row.reason, row.provider = state, at, "why", provider
        row.finished = None if state == "retrying" else self.now

    @rule(by=who)
    def release(self, by: int) -> None:
        self.loop(self.store(by).release)
        for row in self.rows.values():
            if row.owner == self.owners[by] and row.state in WAITING:
                row.owner = row.until = row.due = None
                row.state = "pending"

    @rule(by=who, keeps=st.integers(0, 7))
    def renew(self, by: int, keeps: int) -> None:
        """Renew some leases: the others were taken by calls whose callers gave up."""
        ours = [id for id in sorted(self.rows) if self.rows[id].owner == self.owners[by]]
        held = [id for number, id in enumerate(ours) if keeps >> number & 1]
        found = self.loop(lambda: self.store(by).renew(held, now=self.now))
        for id in held:
            self.rows[id].until = self.now + LEASE
        stray = [id for id in ours if id not in held]
        lost = [id for id in stray if self.free(id)]
        assert sorted(record.id for record in found.lost) == lost
        assert found.resumed == len(stray) - len(lost)

    @rule(by=who)
    def recover(self, by: int) -> None:
        found = self.loop(lambda: self.store(by).recover(now=self.now))
        foreign = [
            id for id in sorted(self.rows) if self.rows[id].owner not in (None, self.owners[by])
        ]
        lost = [id for id in foreign if self.free(id)]
        assert sorted(record.id for record in found.lost) == lost
        assert found.resumed == len(foreign) - len(lost)

    @rule(by=who, stray=strays)
    def retry(self, by: int, stray: int) -> None:
        ids = sorted(self.rows)[stray : stray + 3]
        put_back = self.loop(lambda: self.store(by).retry(ids))
        expected = [i for i in ids if self.rows[i].state in ("failed", "skipped", "unknown")]
        assert list(put_back) == expected
        for id in expected:
            row = self.rows[id]
            row.state, row.attempts = "pending", 0
            row.started = row.finished = row.reason = row.provider = None

    @rule(by=who)
    def purge(self, by: int) -> None:
        before = self.now - 100
        removed = self.loop(lambda: self.store(by).purge(before=before))
        old = [
            id
            for id, row in self.rows.items()
            if row.finished is not None and row.finished < before
        ]
        for id in old:
            del self.rows[id]
        assert removed == len(old)

    @precondition(lambda self: self.outbox)
    @rule(by=who, tenant=tenants)
    def purge_tenant(self, by: int, tenant: str) -> None:
        async def remove() -> None:
            store = self.open[by].tenants
            found = await store.find(tenant)
            if found is not None:
                await store.purge(found, audit(found, AuditAction.PURGED, self.now))

        self.loop(remove)
        gone = [s for s, (name, _) in self.outbox.items() if name == tenant]
        for sequence in gone:
            del self.outbox[sequence]
        self.rows = {id: row for id, row in self.rows.items() if id.sequence not in gone}

    @rule(by=who)
    def restart(self, by: int) -> None:
        """A process ends, and another one with another name replaces it."""
        self.owners[by] += "+"
        self.open[by] = self.loop(lambda: self.stores.open(self.owners[by]))

    @invariant()
    def the_same_is_stored(self) -> None:
        found = self.loop(lambda: self.store(0).find(limit=1000))
        assert [record.id for record in found] == sorted(self.rows, reverse=True)
        for record in found:
            row = self.rows[record.id]
            assert record.outbox.sequence == record.id.sequence
            assert (
                str(record.state),
                record.attempts,
                record.next_attempt_at,
                record.started_at,
                record.finished_at,
                record.provider_id,
            ) == (row.state, row.attempts, row.due, row.started, row.finished, row.provider)
            if row.reason != "old":
                assert record.reason == row.reason
        counts = self.loop(self.store(1).counts)
        states = [row.state for row in self.rows.values()]
        assert counts == {state: states.count(str(state)) for state in NotificationState}

    @invariant()
    def a_poll_finds_the_due_messages(self) -> None:
        look = self.loop(lambda: self.store(0).poll(CHANNELS, now=self.now))
        behind = self.position is None or max(self.outbox, default=0) > self.position
        assert look.new_transitions == behind
        due = {
            id.channel
            for id, row in self.rows.items()
            if row.state in OPEN
            and (row.until <= self.now if row.owner else (row.due or 0) <= self.now)
        }
        assert look.due == due

    def teardown(self) -> None:
        self.loop(self.stores.close)
        self.loop.stop()
        self.directory.cleanup()


class SqliteMachine(NotificationMachine):
    backend = "sqlite"


class MemoryMachine(NotificationMachine):
    backend = "memory"


class PostgresMachine(NotificationMachine):
    backend = "postgres"


@pytest.mark.parametrize("machine", [SqliteMachine, MemoryMachine, PostgresMachine])
def test_any_order_of_calls_gives_the_model_s_results(machine: Any) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            # Each step is a round trip to another process.
            max_examples=EXAMPLES // 3 if machine.backend == "postgres" else EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
