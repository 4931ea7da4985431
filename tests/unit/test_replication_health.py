"""The health of replication, judged by the replicator's reports."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sdk_trio.replication.control import ReplicatedDatabase
from sdk_trio.replication.health import (
    NAMED,
    DatabaseMetrics,
    HealthRules,
    HealthState,
    LagBook,
    ReplicaPosition,
    SyncHistory,
    disabled,
    judge,
    judge_by_replicas,
)
from sdk_trio.runtime.replication import sample_replication

RULES = HealthRules(sync_interval=1, max_lag=30)
PATHS = ("/t/a.db", "/t/b.db", "/t/c.db")
ORDER = [HealthState.HEALTHY, HealthState.DEGRADED, HealthState.UNHEALTHY]


def reported(path, at, status="replicating"):
    return ReplicatedDatabase(path, status, at)


def judged(listed, now=1000.0, wanted=PATHS[:1], **options):
    return judge(wanted, listed, SyncHistory(), RULES, now=now, **options)


@pytest.mark.parametrize(
    ("last", "state", "lag"),
    [
        (1000.0, HealthState.HEALTHY, 0.0),
        (1002.0, HealthState.HEALTHY, 0.0),  # the clock of another moment
        (969.0, HealthState.HEALTHY, 30.0),
        (968.9, HealthState.DEGRADED, 30.1),
        (None, HealthState.DEGRADED, None),
    ],
)
def test_the_lag_is_what_is_older_than_the_sync_interval(last, state, lag):
    health = judged([reported(PATHS[0], last)])
    assert health.state is state
    assert health.databases[0].lag_seconds == (None if lag is None else pytest.approx(lag))


def test_a_constant_count_of_syncs_is_lag_whatever_the_socket_reports():
    history = SyncHistory()

    def judged_at(now, syncs):
        metrics = {PATHS[0]: DatabaseMetrics(txid=1, syncs=syncs)}
        return judge(PATHS[:1], [reported(PATHS[0], now)], history, RULES, now=now, metrics=metrics)

    assert judged_at(1000.0, 5).state is HealthState.HEALTHY
    assert judged_at(1031.0, 5).state is HealthState.HEALTHY
    behind = judged_at(1032.0, 5)
    assert (behind.state, behind.lag_seconds) == (HealthState.DEGRADED, pytest.approx(31.0))
    # It grows while the database is idle, too, so one more sync is enough.
    assert judged_at(1033.0, 6).state is HealthState.HEALTHY
    # A restarted replicator counts from the beginning.
    assert judged_at(1070.0, 0).state is HealthState.HEALTHY


@pytest.mark.parametrize(
    ("listed", "reachable"),
    [(None, False), ([], True), ([reported(PATHS[0], 1000.0, "stopped")], True)],
)
def test_a_missing_process_is_unhealthy(listed, reachable):
    health = judged(listed)
    assert (health.state, health.reachable) == (HealthState.UNHEALTHY, reachable)
    assert health.databases[0].reason


def test_without_databases_only_the_process_counts():
    assert judged([], wanted=()).state is HealthState.HEALTHY
    assert judged(None, wanted=()).state is HealthState.UNHEALTHY
    assert judged([], wanted=(), problem="it fails").state is HealthState.DEGRADED


def test_a_summary_names_only_the_worst_few():
    wanted = [f"/t/{n:03}.db" for n in range(50)]
    health = judged([reported(p, 1000.0 - n) for n, p in enumerate(wanted)], wanted=wanted)
    assert [each.path for each in health.worst] == wanted[:-6:-1]
    assert len(health.worst) == NAMED
    assert wanted[-1] in health.reason
    assert wanted[0] not in health.reason
    assert health.counts == {
        HealthState.HEALTHY: 32,
        HealthState.DEGRADED: 18,
        HealthState.UNHEALTHY: 0,
    }


def test_a_restarted_replicator_s_silence_is_no_lag_from_nowhere():
    history = SyncHistory()
    judge(PATHS[:1], [reported(PATHS[0], 995.0)], history, RULES, now=1000.0)
    after = judge(PATHS[:1], [reported(PATHS[0], None)], history, RULES, now=1002.0)
    assert (after.state, after.lag_seconds) == (HealthState.HEALTHY, 6.0)
    judge((), [], history, RULES, now=1003.0)
    again = judge(PATHS[:1], [reported(PATHS[0], None)], history, RULES, now=1004.0)
    assert again.state is HealthState.DEGRADED, "a database that returned starts over"


def test_a_new_tenant_is_given_time_and_is_not_healthy():
    history = SyncHistory()
    judge((), [], history, RULES, now=1000.0)
    states = [judge(PATHS[:1], [], history, RULES, now=now).state for now in (1001, 1031, 1031.5)]
    assert states == [HealthState.DEGRADED, HealthState.DEGRADED, HealthState.UNHEALTHY]


def by_replicas(book, wanted=PATHS[:2], known=PATHS[:2], now=1000.0, **said):
    return judge_by_replicas(wanted, known, book, SyncHistory(), RULES, now=now, **said)


def test_metrics_alone_never_make_it_healthy():
    found = by_replicas(None, known=PATHS[:1], unanswered="no socket")
    assert [each.state for each in found.databases] == ORDER[:0:-1]
    assert found.state is HealthState.UNHEALTHY
    assert by_replicas(None, (), (), unanswered="no socket").state is HealthState.DEGRADED


def book_of(**positions):
    """A book of databases that were read up to transaction 5, and looked at at 1000."""
    book = LagBook()
    paths = {name: f"/t/{name}.db" for name in positions}
    for syncs, now in enumerate((999.0, 1000.0)):
        book.note({path: DatabaseMetrics(5, syncs) for path in paths.values()}, now)
    for name, (txid, at, since) in positions.items():
        book.found(paths[name], ReplicaPosition(txid, at), since, 1000.0)
    return book


@pytest.mark.parametrize(
    ("position", "state", "lag"),
    [
        ((5, 100.0, None), HealthState.HEALTHY, 0.0),
        ((4, 100.0, 969.0), HealthState.HEALTHY, 30.0),
        ((4, 100.0, 968.0), HealthState.DEGRADED, 31.0),
        ((4, 900.0, None), HealthState.DEGRADED, 99.0),
        ((0, None, 999.0), HealthState.DEGRADED, None),
    ],
)
def test_the_age_of_what_waits_is_the_lag(position, state, lag):
    found = by_replicas(book_of(a=position), PATHS[:1], PATHS[:1])
    assert (found.state, found.databases[0].lag_seconds) == (state, lag)
    assert found.reachable
    assert bool(found.databases[0].reason) == (state is not HealthState.HEALTHY)


def test_one_missed_answer_of_a_socket_is_ignored():
    history, book = SyncHistory(), LagBook()
    judge(PATHS[:1], [reported(PATHS[0], 995.0)], history, RULES, now=1000.0)
    book.note({PATHS[0]: DatabaseMetrics(5, 9)}, 1005.0)
    for now, state in ((1005.0, HealthState.HEALTHY), (1027.0, HealthState.DEGRADED)):
        found = judge_by_replicas(PATHS[:1], PATHS[:1], book, history, RULES, now=now)
        assert found.state is state
        assert found.databases[0].last_sync_at == 995.0


def test_a_target_that_does_not_answer_is_degraded_and_the_lag_of_what_waits_grows():
    book = book_of(a=(4, 100.0, 995.0), b=(5, 100.0, None))
    book.note({path: DatabaseMetrics(5, 1) for path in PATHS[:2]}, 1040.0)
    found = by_replicas(book, now=1040.0, unanswered="the target is unavailable")
    assert [(each.path, each.lag_seconds) for each in found.databases] == [
        (PATHS[0], 44.0),
        (PATHS[1], 39.0),  # nor is it known that the replicator goes on reading
    ]
    assert (found.state, found.reason) == (HealthState.DEGRADED, "the target is unavailable")
    book.note({path: DatabaseMetrics(5, 2) for path in PATHS[:2]}, 1040.0)
    found = by_replicas(book, now=1040.0, unanswered="the target is unavailable")
    assert [each.state for each in found.databases] == [HealthState.DEGRADED, HealthState.HEALTHY]
    assert found.state is HealthState.DEGRADED


def test_unchecked_and_missing_databases_are_distinguished():
    book = LagBook()
    book.note({PATHS[0]: DatabaseMetrics(5, 1)}, 1000.0)
    found = by_replicas(book, known=PATHS[:1])
    assert [each.state for each in found.databases] == [HealthState.UNHEALTHY, HealthState.DEGRADED]
    assert "not compared" in found.databases[1].reason
    assert "at the configured path" in by_replicas(book_of(a=(0, None, None))).databases[0].reason


def test_the_samples_of_a_check():
    health = judged([reported(PATHS[0], 960.0), reported(PATHS[1], 1000.0)], wanted=PATHS[:2])
    values = {(s.name, *s.labels): s.value for s in sample_replication(health)}
    assert values == {
        ("sdk_replication_lag_seconds",): 39.0,
        ("sdk_replication_databases", ("state", "Healthy")): 1,
        ("sdk_replication_databases", ("state", "Degraded")): 1,
        ("sdk_replication_databases", ("state", "Unhealthy")): 0,
    }
    assert sample_replication(judged([reported(PATHS[0], None)]))[0].value == float("inf")
    assert sample_replication(None) == sample_replication(disabled(1.0)) == ()


class Fleet(RuleBasedStateMachine):
    """A replicator that syncs, restarts and vanishes, against a model of the observations."""

    def __init__(self):
        super().__init__()
        self.now = 1_000_000.0
        self.wanted = set(PATHS)
        self.listed = dict.fromkeys(PATHS)
        self.up = True
        self.known = {}
        self.since = None
        self.history = SyncHistory()
        self.health = None

    @rule(seconds=st.floats(0, 60))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(path=st.sampled_from(PATHS))
    def it_syncs(self, path):
        if self.up and path in self.listed:
            self.listed[path] = self.now

    @rule()
    def it_restarts(self):
        self.listed = dict.fromkeys(self.wanted)
        self.up = True

    @rule()
    def it_vanishes(self):
        self.up = False

    @rule(path=st.sampled_from(PATHS))
    def it_loses(self, path):
        self.listed.pop(path, None)

    @rule(path=st.sampled_from(PATHS))
    def a_tenant_comes_or_goes(self, path):
        self.wanted ^= {path}

    @rule()
    def observe(self):
        listed = [reported(p, at) for p, at in self.listed.items()] if self.up else None
        self.health = judge(self.wanted, listed, self.history, RULES, now=self.now)
        self.known = {p: at for p, at in self.known.items() if p in self.wanted}
        new = float("-inf") if self.since is None else self.now
        self.since = {p: (self.since or {}).get(p, new) for p in self.wanted}
        if self.up:
            for path, at in self.listed.items():
                if at is not None and path in self.wanted:
                    self.known[path] = max(at, self.known.get(path, 0))
        self.check(self.health)

    def check(self, health):
        assert {each.path for each in health.databases} == self.wanted
        for each in health.databases:
            last = self.known.get(each.path)
            assert each.last_sync_at == last
            assert each.lag_seconds == (None if last is None else max(0, self.now - last - 1))
            there = self.up and each.path in self.listed
            fresh = last is not None and self.now - last - 1 <= 30
            if not there:
                new = self.up and self.now - self.since[each.path] <= 30
                assert each.state is (HealthState.DEGRADED if new else HealthState.UNHEALTHY)
            else:
                assert each.state is (HealthState.HEALTHY if fresh else HealthState.DEGRADED)
            assert bool(each.reason) == (each.state is not HealthState.HEALTHY)
        ranks = [ORDER.index(each.state) for each in health.databases]
        assert ranks == sorted(ranks, reverse=True)
        assert health.reachable == self.up
        worst = ORDER[max(ranks, default=0)]
        assert health.state is (worst if self.up else HealthState.UNHEALTHY)

    @invariant()
    def healthy_had_a_sample(self):
        if self.health and self.health.state is HealthState.HEALTHY:
            assert all(each.last_sync_at is not None for each in self.health.databases)


TestFleet = Fleet.TestCase
