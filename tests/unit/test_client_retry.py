"""Which calls may be retried, the waits before retries, and the meaning of Retry-After."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.base.retry_after import parse_retry_after
from sdk_trio.client.call import is_idempotent
from sdk_trio.client.errors import FailureKind
from sdk_trio.client.layers.retry import may_retry_failure, may_retry_status

NOON = datetime(2026, 4, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_these_methods_may_be_executed_twice(method):
    assert is_idempotent(method, declared=None)
    assert not is_idempotent(method, declared=False)


@pytest.mark.parametrize("method", ["POST", "PATCH", "CONNECT", "WHATEVER"])
def test_other_methods_may_not_unless_they_are_declared_to(method):
    assert not is_idempotent(method, declared=None)
    assert is_idempotent(method, declared=True)


@pytest.mark.parametrize(
    "status", [408, 429, 500, 502, 503, 504, 507, 520, 521, 522, 523, 524, 525, 529, 530, 599]
)
def test_retryable_answers(status):
    assert may_retry_status(status, idempotent=True)
    assert may_retry_status(status, idempotent=False) is (status == 429)


@given(
    st.integers(100, 499).filter(lambda status: status not in {408, 429})
    | st.sampled_from([501, 505, 506, 508, 510, 511])
)
def test_other_answers_are_final(status):
    assert not may_retry_status(status, idempotent=True)


@pytest.mark.parametrize(
    ("kind", "read", "write"),
    [
        (FailureKind.NOT_SENT, True, True),
        (FailureKind.NO_CONNECTION_FREE, True, True),
        (FailureKind.UNCONFIRMED, True, False),
        (FailureKind.REFUSED, False, False),
    ],
)
def test_failures_without_answer(kind, read, write):
    assert may_retry_failure(kind, idempotent=True) is read
    assert may_retry_failure(kind, idempotent=False) is write


def seconds(value, date=None, now=0.0):
    return parse_retry_after(value, date=date, now=now)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0", 0.0), ("7", 7.0), (" 120 ", 120.0), ("1.5", 1.5), ("1800", 1800.0)],
)
def test_a_number_is_seconds(value, expected):
    assert seconds(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "-1",
        "-0.5",
        "nan",
        "NaN",
        "inf",
        "1e3",
        "+5",
        "soon",
        "٣",
        "1_0",
        "0x1",
    ],
)
def test_an_invalid_wait_is_ignored(value):
    assert seconds(value) is None


@given(st.integers(9, 5000), st.sampled_from(["", ".5"]))
def test_a_number_of_any_length_is_a_wait_and_never_none(digits, fraction):
    assert seconds("9" * digits + fraction) == 999_999_999


@given(st.integers(0, 10**6), st.integers(-(10**8), 10**8))
def test_a_date_is_taken_against_the_date_of_the_same_answer(wait, our_clock_is_wrong_by):
    until = format_datetime(NOON + timedelta(seconds=wait), usegmt=True)
    date = format_datetime(NOON, usegmt=True)
    assert seconds(until, date, now=NOON.timestamp() + our_clock_is_wrong_by) == wait


def test_a_date_without_another_is_taken_against_our_clock():
    until = format_datetime(NOON, usegmt=True)
    assert seconds(until, None, now=NOON.timestamp() - 30) == 30
    assert seconds(until, "no date", now=NOON.timestamp() - 30) == 30
    assert seconds(until, None, now=NOON.timestamp() + 30) == 0


@pytest.mark.parametrize(
    "value",
    [
        "Wed, 01 Apr 2026 12:00:30 GMT",
        "Wednesday, 01-Apr-26 12:00:30 GMT",
        "Wed Apr  1 12:00:30 2026",
    ],
)
def test_all_three_forms_of_a_date(value):
    assert seconds(value, format_datetime(NOON, usegmt=True)) == 30


@given(st.text() | st.from_regex(r"\w{3}, \d+ \w{3} \d+ \d+:\d+:\d+ \S+"), st.text())
def test_any_text_is_seconds_or_nothing(value, date):
    found = seconds(value, date, now=1e9)
    assert found is None or 0 <= found < float("inf")
