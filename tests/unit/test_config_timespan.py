from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.config.bind import MAXIMUM_DAYS, format_timespan, parse_timespan

SPANS = st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=MAXIMUM_DAYS))


@given(SPANS)
def test_written_values_are_read_back_unchanged(span: timedelta) -> None:
    assert parse_timespan(format_timespan(span)) == span


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("00:30:00", timedelta(minutes=30)),
        ("00:00:02", timedelta(seconds=2)),
        ("90s", timedelta(seconds=90)),
        ("30m", timedelta(minutes=30)),
        ("2h", timedelta(hours=2)),
        ("10675199d", timedelta(days=MAXIMUM_DAYS)),
        ("1.06:00:00", timedelta(days=1, hours=6)),
        ("00:00:00.5", timedelta(milliseconds=500)),
        ("00:00:00.0000019", timedelta(microseconds=1)),
        ("23:59:59.9999999", timedelta(hours=24) - timedelta(microseconds=1)),
    ],
)
def test_forms(text: str, span: timedelta) -> None:
    assert parse_timespan(text) == span


@pytest.mark.parametrize(
    "text",
    [
        "",
        "30",
        "30:00",
        "30 m",
        "1.5h",
        "-1h",
        "10675200d",
        "0:30:00",
        "24:00:00",
        "00:60:00",
        "00:00:60",
        "-00:00:01",
        " 00:00:01",
        "00:00:01.",
        "00:00:01.12345678",
        "00:00:01\n",
        "\u0660\u0660:\u0660\u0660:\u0660\u0661",
        "10675200.00:00:00",
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"time span|has more than"):
        parse_timespan(text)


def test_a_negative_span_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="negative"):
        format_timespan(timedelta(microseconds=-1))
