"""Heads of HTTP/2: whatever the fields, they are a request of HTTP/1.1 too, or refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.runtime.answer_head import AnswerError
from sdk_trio.runtime.http2_messages import answer_fields, request_head
from sdk_trio.runtime.limits import Limits
from sdk_trio.runtime.request_head import RequestError, parse_head

LIMITS = Limits()
PSEUDO = [(b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"h"), (b":path", b"/p")]

names = st.one_of(
    st.sampled_from(
        [b"host", b"content-length", b"cookie", b"te", b"expect", b"connection", b":path", b"x-y"]
    ),
    st.binary(max_size=6),
)
values = st.one_of(st.sampled_from([b"h", b"3", b"trailers", b"a=b", b"/"]), st.binary(max_size=8))
fields = st.lists(st.tuples(names, values), max_size=8)


@given(st.one_of(fields, fields.map(lambda more: PSEUDO + more)))
def test_what_is_accepted_could_have_come_by_http_1_1_and_is_read_alike(fields):
    try:
        head = request_head(fields, LIMITS)
    except RequestError:
        return
    lines = b"".join(b"%b: %b\r\n" % pair for pair in head.headers)
    data = b"%b %b HTTP/1.1\r\n%b\r\n" % (head.method.encode(), head.target, lines)
    again = parse_head(data, LIMITS, {})
    assert (again.method, again.target, again.headers) == (head.method, head.target, head.headers)
    assert again.length == (head.length or 0)


def test_the_authority_becomes_the_host_and_comes_first():
    head = request_head([*PSEUDO, (b"x", b"y"), (b"host", b"h")], LIMITS)
    assert head.headers == [(b"host", b"h"), (b"x", b"y")]
    assert (head.method, head.target, head.version, head.length) == ("POST", b"/p", "2", None)


@given(st.lists(st.tuples(st.binary(max_size=8), st.binary(max_size=8)), max_size=5))
def test_no_answer_has_a_header_that_ends_early(headers):
    try:
        sent, _ = answer_fields(200, headers)
    except AnswerError:
        return
    for name, value in sent:
        assert re.fullmatch(rb":status|[^\x00-\x20:A-Z\x7f]+", name)
        assert not {0, 10, 13} & set(value)


def test_headers_of_connections_are_left_out_and_lengths_must_agree():
    headers = [(b"Connection", b"close"), (b"Transfer-Encoding", b"chunked"), (b"X", b" y ")]
    assert answer_fields(200, headers) == ([(b":status", b"200"), (b"x", b"y")], None)
    length = (b"Content-Length", b"2")
    assert answer_fields(200, [length, length])[1] == 2
    with pytest.raises(AnswerError):
        answer_fields(200, [length, (b"content-length", b"3")])
