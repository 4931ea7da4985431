"""The claims file: the runs that an ended process has left in it, even if it was damaged since."""

import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdk_trio.storage.claims_file import (
    MOST_INTERRUPTED,
    SLOTS,
    ClaimsFile,
    InterruptedRun,
    read_claims,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "inbox.claims"


def keys_in(path):
    return [run.key for run in read_claims(path, is_new=False)]


def test_a_run_is_found_until_its_slot_is_cleared(path):
    claims = ClaimsFile(path, [])
    slots = {key: claims.take(key, now) for now, key in enumerate(("a", "b.tenant", "c"))}
    # Read without the process that has it open, as after its end.
    assert keys_in(path) == ["a", "b.tenant", "c"]
    claims.free(slots["b.tenant"])
    assert keys_in(path) == ["a", "c"]
    assert b"b.tenant" not in path.read_bytes()
    claims.free(slots["a"], later=True)
    assert keys_in(path) == ["a", "c"]
    claims.take("d", 9)
    assert keys_in(path) == ["c", "d"]
    claims.close()
    assert keys_in(path) == ["c", "d"]


def test_the_slot_of_a_recorded_run_is_used_again_and_cleared_with_the_others(path):
    claims = ClaimsFile(path, [])
    slots = [claims.take(key, 1.0) for key in ("recorded", "also", "runs")]
    for slot in slots[:2]:
        claims.free(slot, is_recorded=True)
    assert claims.take("next", 2.0) == slots[1]
    claims.clear_recorded()
    assert keys_in(path) == ["runs", "next"]
    claims.free(slots[1], is_recorded=True)
    claims.close()
    assert keys_in(path) == ["runs"]
    assert b"next" not in path.read_bytes()


def test_the_file_holds_a_fixed_number_of_runs_and_the_next_one_waits(path):
    claims = ClaimsFile(path, [])
    slots = [claims.take(f"m{number}", 1.0) for number in range(SLOTS)]
    assert len(set(slots)) == SLOTS
    assert None not in slots
    assert claims.take("one more", 1.0) is None
    claims.free(slots[3])
    assert claims.take("one more", 1.0) == slots[3]
    claims.close()
    assert len(keys_in(path)) == SLOTS


def test_the_longest_key_fits_and_a_longer_one_waits(path):
    claims = ClaimsFile(path, [])
    longest = f"{'x' * 256}.{'0' * 36}"
    assert claims.take(longest, 1.0) is not None
    assert claims.take("x" * 320, 1.0) is None
    claims.close()
    assert keys_in(path) == [longest]


def test_runs_that_ended_a_process_stay_until_they_are_counted(path, caplog):
    claims = ClaimsFile(path, [InterruptedRun("a", 0, 5.0, 1), InterruptedRun("b", 0, 6.0, 2)])
    assert ["key='a'" in caplog.messages[0], "key='b'" in caplog.messages[1]] == [True, True]
    claims.take("running", 7.0)
    claims.close()
    found = read_claims(path, is_new=False)
    assert [(run.key, run.process_ends, run.begun) for run in found] == [
        ("a", 1, 5.0),
        ("b", 1, 6.0),
        ("running", 0, 7.0),
    ]
    claims = ClaimsFile(path, found)
    assert {key: run.process_ends for key, run in claims.interrupted.items()} == dict.fromkeys(
        ("a", "b", "running"), 1
    )
    claims.forget_interrupted("a")
    claims.forget_interrupted("unknown")
    claims.close()
    assert keys_in(path) == ["b", "running"]


def test_ended_runs_do_not_use_all_slots(path):
    left = [InterruptedRun(f"m{number}", 0, number, number + 1) for number in range(SLOTS)]
    claims = ClaimsFile(path, left)
    assert list(claims.interrupted) == [
        f"m{number}" for number in range(SLOTS - MOST_INTERRUPTED, SLOTS)
    ]
    assert claims.take("new", 1.0) is not None
    claims.close()


@given(cut=st.integers(0, 320), place=st.integers(0, 319), byte=st.integers(1, 255))
@example(cut=19, place=19, byte=ord("n"))
def test_a_torn_or_changed_slot_is_passed_over(tmp_path_factory, cut, place, byte):
    path = tmp_path_factory.mktemp("claims") / "inbox.claims"
    claims = ClaimsFile(path, [])
    claims.take("whole", 1.0)
    slot = claims.take("torn", 2.0)
    claims.close()
    content = bytearray(path.read_bytes())
    whole = bytes(content)
    begin = slot * 320
    content[begin + cut : begin + 320] = bytes(320 - cut)
    content[begin + place] ^= byte
    path.write_bytes(content)
    found = keys_in(path)
    assert "whole" in found
    # The bytes after the key have no meaning, and may be cut off.
    changed = (cut < 20 or place < 20) and bytes(content) != whole
    assert found == ["whole"] or (not changed and found == ["whole", "torn"])


@pytest.mark.parametrize(
    ("content", "found"),
    [(None, "nothing"), (b"", "nothing"), (b"sdk-trio claims 1\n", "damaged"), (b"x", "damaged")],
)
def test_a_missing_or_damaged_file_is_reported_and_replaced(path, caplog, content, found):
    caplog.set_level(logging.WARNING, "sdk_trio")
    if content is not None:
        path.write_bytes(content)
    assert read_claims(path, is_new=False) == []
    (said,) = caplog.messages
    assert f"found='{found}'" in said
    claims = ClaimsFile(path, [])
    claims.take("a", 1.0)
    claims.close()
    assert keys_in(path) == ["a"]


def test_a_new_store_causes_no_report(path, caplog):
    assert read_claims(path, is_new=True) == []
    assert caplog.records == []


def test_a_link_or_a_directory_in_its_place_is_refused(path):
    path.mkdir()
    with pytest.raises(OSError, match=r"inbox\.claims"):
        read_claims(path, is_new=False)
    path.rmdir()
    other = path.with_name("other")
    other.write_bytes(b"of another")
    path.symlink_to(other)
    with pytest.raises(OSError, match=r"inbox\.claims"):
        ClaimsFile(path, [])
    assert other.read_bytes() == b"of another"
