"""Times as programs and people read them."""

from datetime import UTC, datetime, timedelta, timezone
from math import inf, nan

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdk_trio.base.times import readable, rfc3339, rfc3339_of

offsets = st.integers(-23 * 60, 23 * 60).map(lambda m: timezone(timedelta(minutes=m)))


@pytest.mark.parametrize(
    ("seconds", "timespec", "text"),
    [
        (0, "auto", "1970-01-01T00:00:00Z"),
        (1_800_000_000.25, "milliseconds", "2027-01-15T08:00:00.250Z"),
        (1_800_000_000.25, "seconds", "2027-01-15T08:00:00Z"),
        (1_800_000_000.25, "auto", "2027-01-15T08:00:00.250000Z"),
        (-1, "seconds", "1970-01-01T00:00:00Z"),
        (1e300, "seconds", "9999-12-31T23:59:59Z"),
        (inf, "seconds", "1970-01-01T00:00:00Z"),
        (nan, "seconds", "1970-01-01T00:00:00Z"),
    ],
)
def test_unix_seconds_become_utc_with_a_z(seconds, timespec, text):
    assert rfc3339(seconds, timespec=timespec) == text


@given(st.floats())
def test_every_number_is_a_time_that_can_be_read_again(seconds):
    again = datetime.fromisoformat(rfc3339(seconds)).timestamp()
    assert 0 <= again <= 253_402_300_799
    if 0 <= seconds <= 253_402_300_799:
        assert again == pytest.approx(seconds, abs=1e-6, rel=0)


# Far enough from the calendar's ends that any offset stays within.
@given(st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=offsets))
def test_a_time_of_any_zone_is_the_same_time_in_utc(moment):
    text = rfc3339_of(moment)
    assert text.endswith("Z")
    assert "+" not in text
    assert datetime.fromisoformat(text) == moment


def test_people_read_times_to_the_second():
    assert readable(1_800_000_000.9) == "2027-01-15 08:00:00Z"
    assert readable(0) == "1970-01-01 00:00:00Z"


@given(st.floats())
@example(1.9999999)
def test_any_number_is_readable(seconds):
    text = readable(seconds)
    if 0 <= seconds < 253_402_300_799:
        shown = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        # Less than a microsecond before a second, it is that second already.
        assert seconds - 1 < shown <= seconds + 1e-6


def test_a_number_beyond_the_calendar_stays_a_number():
    assert readable(1e15) == "1000000000000000"
    assert readable(nan) == "nan"
