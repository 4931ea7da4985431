"""The lag of a replica, by the replicator's reads and the content of the target."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sdk_trio.replication.health import DatabaseMetrics, LagBook, ReplicaPosition, read_metrics
from sdk_trio.replication.replica import ReplicaFile, newest_position

A, B, C = "/t/a.db", "/t/b.db", "/t/c.db"


def test_the_databases_that_metrics_name():
    text = (
        "# TYPE litestream_txid gauge\n"
        'litestream_txid{db="/t/a.db"} 7\n'
        'litestream_sync_count{db="/t/a.db"} 12\n'
        'litestream_sync_error_count{db="/t/a.db"} 2\n'
        'litestream_txid{db="/t/q\\"u\\\\n.db"} 1.234567e+06\n'
        'litestream_sync_count{db="/t/other.db"} 3\n'
        'litestream_db_size{db="/t/c.db"} 1\n'
        'litestream_txid{db="/t/odd.db"} many\n'
        'litestream_txid{db="cut'
    )
    assert read_metrics(text) == {
        "/t/a.db": DatabaseMetrics(7, 10),
        '/t/q"u\\n.db': DatabaseMetrics(1_234_567, 0),
    }


@given(st.text())
def test_any_metrics_can_be_read(text):
    read_metrics(text)
    read_metrics(f'litestream_txid{{db="a"}} {text}')


def test_a_snapshot_is_as_old_as_what_it_holds():
    fresh, snapshot = ReplicaFile(0, 3, 3, 10, 50.0), ReplicaFile(9, 1, 3, 10, 70.0)
    assert newest_position([fresh, snapshot]) == ReplicaPosition(3, 50.0)
    assert newest_position([]) == ReplicaPosition(0, None)


def test_databases_in_step_and_unwritten_are_not_queried_again():
    book = LagBook()
    metrics = {path: DatabaseMetrics(5, 1) for path in (A, B, C)}
    book.note(metrics, 10.0)
    assert book.due([C, A, B], 2) == [A, B]
    book.tried(A, 10.0)
    book.found(A, ReplicaPosition(5, 9.0), None, 10.0)
    book.tried(B, 10.0)
    assert book.due([A, B, C], 9) == [C, B], "who got no answer comes after the others"
    book.note(metrics | {A: DatabaseMetrics(6, 2)}, 20.0)
    assert book.due([A, B], 9) == [A, B]
    book.note({B: DatabaseMetrics(5, 2)}, 30.0)
    assert book.due([A, B, C], 9) == [B], "what the replicator lost is forgotten"


def test_a_replicator_that_has_stopped_reading_falls_behind():
    book = LagBook()
    book.note({A: DatabaseMetrics(5, 1)}, 10.0)
    book.found(A, ReplicaPosition(5, 9.0), None, 10.0)
    book.note({A: DatabaseMetrics(5, 2)}, 20.0)
    assert book.delay(A, 20.0, unanswered=False) == 0
    book.note({A: DatabaseMetrics(5, 2)}, 70.0)
    assert book.delay(A, 70.0, unanswered=False) == 50


def test_one_observation_does_not_show_that_the_replicator_keeps_reading():
    book = LagBook()
    stuck = {A: DatabaseMetrics(5, 7)}
    book.note(stuck, 10.0)
    book.found(A, ReplicaPosition(5, 9.0), None, 10.0)
    assert book.delay(A, 10.0, unanswered=False) is None
    book.note(stuck, 20.0)
    assert book.waits_for_reading()
    assert book.delay(A, 20.0, unanswered=False) is None
    book.note({A: DatabaseMetrics(5, 8)}, 30.0)
    assert not book.waits_for_reading()
    assert book.delay(A, 30.0, unanswered=False) == 0


def test_a_replicator_that_was_restarted_and_reads_nothing_is_not_in_step():
    book = LagBook()
    book.note({A: DatabaseMetrics(5, 7)}, 10.0)
    book.found(A, ReplicaPosition(5, 9.0), None, 10.0)
    book.note({A: DatabaseMetrics(5, 8)}, 20.0)
    book.note({A: DatabaseMetrics(0, 0)}, 50.0)
    assert book.delay(A, 50.0, unanswered=False) == 30


def test_databases_that_no_survey_reaches_get_older():
    book = LagBook(fresh_seconds=60.0)
    book.note({A: DatabaseMetrics(4, 6)}, 9.0)
    book.note({A: DatabaseMetrics(5, 7)}, 10.0)
    book.found(A, ReplicaPosition(4, 9.0), 9.5, 10.0)
    assert book.delay(A, 70.0, unanswered=False) == 0.5
    assert book.delay(A, 71.0, unanswered=False) == 61.5


class Replicating(RuleBasedStateMachine):
    """One database that is written, read and uploaded, against the reported lag."""

    def __init__(self):
        super().__init__()
        self.now = 1_000.0
        self.written: list[float] = []
        self.read: list[float] = []  # when each transaction was read
        self.held = 0
        self.syncs = 0
        self.book = LagBook()
        self.looked = False

    @rule(seconds=st.floats(0.1, 30))
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def it_is_written(self):
        self.written.append(self.now)

    @rule()
    def it_is_read(self):
        self.syncs += 1
        if len(self.read) < len(self.written):
            self.read.append(self.now)

    @rule()
    def some_is_uploaded(self):
        self.held = min(self.held + 1, len(self.read))

    @rule(keeps_what_waits=st.booleans())
    def observe(self, keeps_what_waits):
        self.book.note({A: DatabaseMetrics(len(self.read), self.syncs)}, self.now)
        if self.book.due([A], 1):
            waiting = self.read[self.held : self.held + 1]
            position = ReplicaPosition(self.held, self.read[self.held - 1] if self.held else None)
            self.book.found(
                A, position, waiting[0] if waiting and keeps_what_waits else None, self.now
            )
        self.looked = True
        delay = self.book.delay(A, self.now, unanswered=False)
        if not self.held:
            assert delay is None
        elif self.held == len(self.read):
            assert delay is not None or self.book.waits_for_reading()
        elif delay is None:
            assert self.book.waits_for_reading()
        else:
            oldest = self.read[self.held]
            assert delay >= self.now - oldest - 1e-6, "no lag is made smaller than it is"
            if keeps_what_waits:
                assert delay <= self.now - oldest + 1e-6

    @invariant()
    def nothing_is_called_in_step_that_is_not_at_the_target(self):
        if not self.looked:
            return
        at = self.book.in_step_at(A)
        if at is not None:
            assert all(read >= at for read in self.read[self.held :])


TestReplicating = Replicating.TestCase
