import contextlib
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.cli.parse import UsageError, moment_text, parse_count, parse_moment
from sdk_trio.cli.sign import parse_headers

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("3d", 3 * 86_400), ("0m", 0)]
)
def test_a_time_ago(text, seconds):
    assert parse_moment(text, now=NOW) == NOW - seconds


@given(st.datetimes(timezones=st.just(UTC), min_value=datetime(1971, 1, 1)))
def test_any_iso_time_is_understood(moment):
    assert parse_moment(moment.isoformat(), now=NOW) == moment.timestamp()


@given(st.text())
def test_any_other_text_is_a_usage_error_and_nothing_else(text):
    for parse in (
        lambda: parse_moment(text, now=NOW),
        lambda: parse_count(text, option="--count"),
    ):
        with contextlib.suppress(UsageError):
            assert isinstance(parse(), int | float)


@pytest.mark.parametrize("text", ["", "yesterday", "15", "1900-01-01", "-3d", "15 m", "1e3"])
def test_an_invalid_time_is_refused(text):
    with pytest.raises(UsageError, match="--since takes a time"):
        parse_moment(text, now=NOW)


def test_unix_seconds_and_iso_mean_the_same():
    assert parse_moment("1800000000", now=0) == 1_800_000_000
    assert parse_moment("2027-01-15T08:00:00Z", now=0) == 1_800_000_000
    assert moment_text(NOW) == "2027-01-15 08:00:00Z"


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "1000001", "\N{FULLWIDTH DIGIT NINE}"])
def test_a_count_is_a_whole_number_in_its_range(text):
    with pytest.raises(UsageError, match="--limit takes a whole number from 1 to 1000000"):
        parse_count(text, option="--limit")


PAIRS = [(b"Webhook-Id", b"msg_1"), (b"webhook-timestamp", b"17"), (b"webhook-signature", b"v1,x")]


@pytest.mark.parametrize(
    "content",
    [
        b"Webhook-Id: msg_1\nwebhook-timestamp: 17\nwebhook-signature: v1,x\n",
        b"POST /hooks/sdk HTTP/1.1\r\nWebhook-Id: msg_1\r\nwebhook-timestamp:17\r\n"
        b"webhook-signature: v1,x\r\n\r\n",
        b"> POST /hooks/sdk HTTP/1.1\n> Webhook-Id: msg_1\n> webhook-timestamp: 17\n"
        b"> webhook-signature: v1,x\n>\n",
        b'{"Webhook-Id": "msg_1", "webhook-timestamp": 17, "webhook-signature": ["v1,x"]}',
        b'[["Webhook-Id", "msg_1"], ["webhook-timestamp", "17"], ["webhook-signature", "v1,x"]]',
    ],
)
def test_headers_are_read_from_what_people_have(content):
    assert parse_headers(content) == PAIRS


def test_repeated_headers_stay_repeated():
    twice = [(b"a", b"1"), (b"a", b"2")]
    assert parse_headers(b"a: 1\na: 2") == twice
    assert parse_headers(b'{"a": ["1", "2"]}') == twice
    assert parse_headers(b'{"a": "1", "a": "2"}') == twice


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"webhook-id: msg_1\nnonsense", "line 2 is not of the form 'Name: value'"),
        (b"\xff\xfe", "not UTF-8"),
        (b"{", "not valid JSON"),
        (b"[1]", "JSON object of names and values"),
        (b'{"a": {"b": 1}}', "JSON|not text"),
        (b'{"a": null}', "the value of 'a' is not text"),
    ],
)
def test_headers_that_cannot_be_read(content, message):
    with pytest.raises(UsageError, match=message):
        parse_headers(content)


@given(st.binary())
def test_any_bytes_are_headers_or_a_usage_error(content):
    with contextlib.suppress(UsageError):
        parse_headers(content)


def test_a_time_ahead():
    assert parse_moment("2h", now=NOW, ahead=True) == NOW + 7200
    with pytest.raises(UsageError, match="15m, 2h, 3d from now; not '10'"):
        parse_moment("10", now=NOW, option="--until", ahead=True)
