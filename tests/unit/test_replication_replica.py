"""What can be restored from a replica's files, and what is remembered of verifications."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.replication.replica import (
    ReplicaFile,
    RestorePoint,
    find_gap,
    newest_time,
    newest_txid,
    parse_files,
    parse_plan,
    why_impossible,
)
from sdk_trio.replication.verification import (
    Verification,
    VerificationState,
    state_from_text,
)

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


def test_only_a_run_without_failures_counts_as_good():
    state = VerificationState().after_run([result("a"), result("b")], now=100.0)
    assert (state.ran_at, state.verified_at, state.failed) == (100.0, 100.0, {})
    assert state.age(130.0) == 30.0
    state = state.after_run([result("a"), result("b", "it lags")], now=200.0)
    assert (state.ran_at, state.verified_at, state.failed) == (200.0, 100.0, {"b": "it lags"})
    # One tenant alone takes its failure back, but says nothing of the others.
    state = state.after_one(result("b"))
    assert (state.ran_at, state.verified_at, state.failed) == (200.0, 100.0, {})
    assert state.after_one(result("a", "damaged")).failed == {"a": "damaged"}
    # A tenant that has gone takes its failure along.
    assert state.after_one(result("a", "x")).after_run([result("b")], now=300.0).failed == {}


def test_never_verified_has_no_age_and_a_clock_set_back_gives_none_below_zero():
    assert VerificationState().age(5.0) is None
    assert VerificationState(10.0, 10.0, {}).age(5.0) == 0.0


@given(
    ran=st.none() | st.floats(0, 1e11),
    good=st.none() | st.floats(0, 1e11),
    failed=st.dictionaries(st.text(), st.text(), max_size=5),
)
def test_what_is_remembered_survives_the_store(ran, good, failed):
    state = VerificationState(ran, good, failed)
    assert state_from_text(state.to_text()) == state


@given(st.none() | st.text())
def test_what_cannot_be_read_counts_as_nothing(text):
    assert isinstance(state_from_text(text), VerificationState)


@pytest.mark.parametrize("text", [None, "", "[]", "7", '{"failed": 3}', '{"ran_at": "x"}'])
def test_such_memories_are_empty(text):
    assert state_from_text(text) == VerificationState()
