"""A token bucket, against exact arithmetic and under any order of events."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.base.throttle import TokenBucket

rates = st.floats(0.1, 100)
bursts = st.integers(1, 50)
gaps = st.floats(0, 30)
operations = st.lists(
    st.tuples(gaps, st.sampled_from(["admit", "take", "book", "give_back", "look"]))
)


def test_a_full_bucket_gives_its_burst_at_once_and_then_one_at_a_time():
    bucket = TokenBucket(per_second=2, burst=3)
    assert bucket.available(10) == 3
    assert [bucket.book(10) for _ in range(5)] == pytest.approx([10, 10, 10, 10.5, 11])
    assert bucket.missing(10) == 5
    assert bucket.available(10) == 0
    assert bucket.wait(10) == pytest.approx(1.5)
    assert bucket.wait(11.5) == 0
    assert bucket.available(1000) == 3


def test_a_failed_attempt_takes_no_token():
    bucket = TokenBucket(per_second=1, burst=1)
    assert bucket.admit(0) == 0
    assert [bucket.admit(0.25), bucket.admit(0.25)] == [0.75, 0.75]
    assert bucket.admit(1) == 0


def test_a_returned_token_moves_later_ones_up_and_is_no_credit():
    bucket = TokenBucket(per_second=1, burst=1)
    assert [bucket.book(0), bucket.book(0)] == [0, 1]
    bucket.give_back()
    assert bucket.book(0) == 1
    for _ in range(5):
        bucket.give_back()
    assert bucket.available(0) == 1


def test_a_change_of_rate_leaves_what_is_missing():
    bucket = TokenBucket(per_second=1, burst=2)
    bucket.take(0, 5)
    bucket.change(per_second=10, burst=3, now=1)
    assert bucket.missing(1) == 4
    assert bucket.wait(1) == pytest.approx(0.2)


def test_while_the_clock_goes_back_no_time_passes():
    bucket = TokenBucket(per_second=1, burst=2)
    bucket.take(100, 2)
    assert bucket.wait(50) == 1
    assert bucket.wait(50.5) == 0.5
    assert bucket.admit(51) == 0


@given(rates, bursts, st.floats(0, 2e9), operations)
def test_it_counts_as_exact_arithmetic_does(per_second, burst, start, operations):
    bucket = TokenBucket(per_second=per_second, burst=burst)
    now, at, missing = start, Fraction(start), Fraction(0)
    for gap, operation in operations:
        now += gap
        if (
            operation != "give_back"
        ):  # has no clock: the tokens of the time before are counted later
            missing = max(Fraction(0), missing - (Fraction(now) - at) * Fraction(per_second))
            at = Fraction(now)
        lacking = max(Fraction(0), (missing + 1 - burst) / Fraction(per_second))
        if operation == "admit":
            wait = bucket.admit(now)
            assert wait == pytest.approx(float(lacking), abs=1e-6)
            missing += wait == 0
        elif operation == "book":
            assert bucket.book(now) - now == pytest.approx(float(lacking), abs=1e-6)
            missing += 1
        elif operation == "take":
            bucket.take(now)
            missing += 1
        elif operation == "give_back":
            bucket.give_back()
            missing = max(Fraction(0), missing - 1)
        else:
            assert bucket.wait(now) == pytest.approx(float(lacking), abs=1e-6)
            assert (bucket.wait(now) == 0) == (bucket.available(now) > 0)
            assert bucket.missing(now) == pytest.approx(float(missing), abs=1e-6)


@given(rates, bursts, st.lists(st.tuples(gaps, st.booleans()), max_size=60))
def test_no_window_holds_more_than_the_burst_and_its_share(per_second, burst, steps):
    bucket = TokenBucket(per_second=per_second, burst=burst)
    now, taken = 1000.0, []
    for gap, books in steps:
        now += gap
        if books:
            taken.append(bucket.book(now))
        else:
            taken += [now] * (bucket.admit(now) == 0)
    assert taken == sorted(taken)
    for i, first in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= burst + (taken[j] - first) * per_second + 1e-3
