"""The states that a replica's files can restore, and the stored results of verifications."""

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.replication.replica import (
    ReplicaFile,
    RestorePoint,
    earliest_snapshot,
    find_gap,
    newest_time,
    newest_txid,
    parse_files,
    parse_plan,
    why_impossible,
)
from sdk_trio.replication.verification import Verification, VerificationState, state_from_text

ROW = {
    "level": 9,
    "min_txid": "0000000000000001",
    "max_txid": "000000000000000a",
    "size": 2048,
    "timestamp": "2026-11-21T14:47:49Z",
}


def file(first, last, at, level=0):
    return ReplicaFile(level, first, last, 100, float(at))


def test_a_listing_is_read():
    (found,) = parse_files(json.dumps([ROW]))
    assert found == ReplicaFile(9, 1, 10, 2048, 1_795_272_469.0)
    assert parse_files("") == parse_files("[]") == parse_files("null") == ()


def test_a_plan_is_read():
    later = {**ROW, "min_txid": "0b", "max_txid": "0c", "timestamp": "2026-11-21T14:47:50Z"}
    plan = parse_plan(json.dumps({"max_txid": "0c", "files": [ROW, later]}))
    assert plan == RestorePoint(12, 1_795_272_470.0, 4096)


@pytest.mark.parametrize(
    "text", ["{", "7", '[{"level": 1}]', '[{"level": "x"}]', "[[]]", '{"files": []}', "[1]"]
)
def test_another_answer_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever its words
        parse_files(text)
    with pytest.raises(ValueError):  # noqa: PT011
        parse_plan(text)


def test_why_nothing_can_be_restored():
    snapshot = file(1, 5, 1000, level=9)
    assert why_impossible([], None) is not None
    assert "no snapshot" in (why_impossible([file(4, 5, 1000)], None) or "")
    assert why_impossible([snapshot], None) is None
    assert why_impossible([snapshot, file(6, 6, 1001)], 1000.5) is None
    assert "begins at" in (why_impossible([snapshot], 1000.0) or "")


def test_a_file_that_the_plan_missed_before_the_point_in_time():
    files = [file(1, 5, 1000, level=9), file(7, 7, 1010)]
    missed = RestorePoint(5, 1000.0, 100)
    assert find_gap(files, missed, 1020.0) == files[1]
    assert find_gap(files, missed, None) == files[1]
    # It may be a fraction of a second later than it says.
    assert find_gap(files, missed, 1010.5) is None
    assert find_gap(files, RestorePoint(7, 1010.0, 100), None) is None


def test_the_newest_of_the_files():
    files = [file(1, 5, 1000, level=9), file(6, 9, 990)]
    assert (newest_txid(files), newest_time(files)) == (9, 1000.0)
    assert (newest_txid([]), newest_time([])) == (0, None)


def result(tenant_id, problem=None):
    return Verification(tenant_id=tenant_id, identifier=tenant_id, verified_at=1.0, problem=problem)


def test_a_run_counts_the_replicas_it_has_verified():
    skipped = attrs.evolve(result("c"), skipped="it has no database yet")
    state = VerificationState().after_run([result("a"), result("b", "it lags"), skipped], now=1.0)
    assert state.verified == 1
    assert state.after_run([skipped], now=2.0).verified == 0
    assert state.after_run([], now=2.0).verified == 0
    assert state_from_text('{"ran_at": 1.0}').verified is None
    # Its failure was put right, and shown to be: that is one replica, and not "nothing to verify".
    repaired = state.after_run([result("a", "it lags")], now=2.0).after_one(result("a"))
    assert (repaired.failed, repaired.verified) == ({}, 1)
    assert state.after_run([], now=2.0).after_one(result("new")).verified == 1
    assert state.after_run([], now=2.0).after_one(skipped).verified == 0


def test_only_a_run_without_failures_counts_as_good():
    state = VerificationState().after_run([result("a"), result("b")], now=100.0)
    assert (state.ran_at, state.verified_at, state.failed) == (100.0, 100.0, {})
    assert state.age(130.0) == 30.0
    state = state.after_run([result("a"), result("b", "it lags")], now=200.0)
    assert (state.ran_at, state.verified_at, state.failed) == (200.0, 100.0, {"b": "it lags"})
    # Verifying one tenant clears its failure, and has no effect on the others.
    state = state.after_one(result("b"))
    assert (state.ran_at, state.verified_at, state.failed) == (200.0, 100.0, {})
    assert state.after_one(result("a", "damaged")).failed == {"a": "damaged"}
    # A tenant that has gone takes its failure along.
    assert state.after_one(result("a", "x")).after_run([result("b")], now=300.0).failed == {}


DAY = 86_400.0


def reaching(begins_at, mark, *, now, problem=None):
    found = result("a", problem)
    return attrs.evolve(found, verified_at=now, begins_at=begins_at, mark=mark)


def test_a_replica_that_begins_later_than_it_did_is_reported_until_that_is_accepted():
    state = VerificationState().after_one(reaching(1000.0, 1000.0, now=2000.0))
    refilled = reaching(5000.0, 5000.0, now=6000.0)
    found = state.compared(refilled, retention=DAY)
    assert "points in time are lost" in found.problem
    assert "1970-01-01 00:16:40Z" in found.problem
    # At each verification, and not hidden by another problem in between.
    state = state.after_run([found], now=6000.0).after_one(result("a", "it lags"))
    assert state.compared(refilled, retention=DAY).problem is not None
    assert state.verified_at is None
    state = state.after_run([refilled], now=7000.0, accept_loss=True)
    assert state.compared(refilled, retention=DAY).ok
    # Once it is older than the retention, it may be dropped.
    later = reaching(2 * DAY, 2 * DAY, now=2 * DAY)
    assert state.compared(later, retention=DAY).ok
    assert not state.compared(later, retention=3 * DAY).ok


@given(
    retention=st.integers(1, 40),
    interval=st.integers(1, 5),
    verified=st.lists(st.booleans(), min_size=1, max_size=120),
    written=st.lists(st.booleans(), min_size=120, max_size=120),
)
def test_retention_alone_is_never_reported(retention, interval, verified, written):
    """Snapshots of a database that is written at times; the last one always stays."""
    state, snapshots = VerificationState(), [0.0]
    for day, looked in enumerate(verified):
        now = float(day)
        if day % interval == 0 and written[day]:
            snapshots.append(now)
        kept = [at for at in snapshots if at >= now - retention]
        snapshots = kept or snapshots[-1:]
        if looked:
            files = [file(1, 5, at * DAY, level=9) for at in snapshots]
            mark = earliest_snapshot(files, (now - retention / 2) * DAY)
            found = reaching(earliest_snapshot(files), mark, now=now * DAY)
            assert state.compared(found, retention=retention * DAY).ok
            state = state.after_one(found)


def test_changes_that_begin_at_the_first_transaction_are_no_snapshot_to_hold_on_to():
    files = [file(1, 1, 10), file(1, 4, 20, level=2), file(1, 4, 30, level=9)]
    assert earliest_snapshot(files) == 30.0
    assert earliest_snapshot(files, 31.0) is None


def test_never_verified_has_no_age_and_a_clock_set_back_gives_none_below_zero():
    assert VerificationState().age(5.0) is None
    assert VerificationState(10.0, 10.0, {}).age(5.0) == 0.0


@given(
    ran=st.none() | st.floats(0, 1e11),
    good=st.none() | st.floats(0, 1e11),
    failed=st.dictionaries(st.text(), st.text(), max_size=5),
    marks=st.dictionaries(st.text(), st.floats(0, 1e11), max_size=5),
    verified=st.none() | st.integers(0, 10**6),
)
def test_the_stored_state_is_read_back_unchanged(ran, good, failed, marks, verified):
    state = VerificationState(ran, good, failed, marks, verified)
    assert state_from_text(state.to_text()) == state


@given(st.none() | st.text())
def test_unreadable_state_counts_as_empty(text):
    assert isinstance(state_from_text(text), VerificationState)


@pytest.mark.parametrize("text", [None, "", "[]", "7", '{"failed": 3}', '{"ran_at": "x"}'])
def test_such_memories_are_empty(text):
    assert state_from_text(text) == VerificationState()
