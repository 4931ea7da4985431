"""Heads of answers: the same bytes as h11 makes of the same headers."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.server.head import (
    AnswerError,
    Framing,
    answer_head,
    informational,
    parse_head,
    refusal,
)
from sdk_trio.server.limits import Limits

REQUESTS = [
    b"%b / HTTP/%b\r\nHost: test\r\n%b\r\n" % (method, version, connection)
    for method in (b"GET", b"HEAD", b"POST")
    for version in (b"1.0", b"1.1")
    for connection in (b"", b"Connection: close\r\n")
]
headers = st.lists(
    st.sampled_from(
        [
            (b"content-type", b"application/json"),
            (b"Content-Length", b"5"),
            (b"content-length", b"7"),
            (b"transfer-encoding", b"chunked"),
            (b"Transfer-Encoding", b"gzip"),
            (b"X-Thing", b" padded\t"),
            (b"x-latin", b"\xe9"),
            (b"empty", b""),
            (b"bad", b"a\r\nb: c"),
            (b"bad name", b""),
            (b"", b"no name"),
            (b"content-length", b"-1"),
        ]
    ),
    max_size=4,
)


def h11_bytes(request, status, pairs):
    """What h11 sends for an answer to ``request``; None where it refuses."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(request)
    connection.next_event()
    try:
        stripped = [(name.strip(), value.strip()) for name, value in pairs]
        return connection.send(h11.Response(status_code=status, headers=stripped))
    except h11.LocalProtocolError:
        return None


@given(st.sampled_from(REQUESTS), st.sampled_from([200, 204, 304, 404, 503]), headers)
def test_the_bytes_are_those_of_h11(request, status, pairs):
    parsed = parse_head(request, Limits())
    expected = h11_bytes(request, status, pairs)
    try:
        made = answer_head(parsed, status, pairs, close=not parsed.keep_alive)
    except AnswerError:
        assert expected is None
        return
    assert made.data == expected
    assert made.closes == (b"Connection: close" in made.data)
    cached = answer_head(parsed, status, tuple(pairs), close=not parsed.keep_alive)
    assert cached == made
    assert answer_head(parsed, status, tuple(pairs), close=not parsed.keep_alive) is cached


def test_the_same_headers_for_another_request_are_another_head():
    pairs = ((b"x", b"y"),)
    made = {
        answer_head(parse_head(request, Limits()), 200, pairs, close=close).framing
        for request in REQUESTS
        for close in (True, False)
    }
    assert made == {Framing.CHUNKED, Framing.CLOSE, Framing.NO_BODY}


def test_a_close_of_the_application_is_kept():
    request = parse_head(REQUESTS[2], Limits())
    made = answer_head(
        request, 200, [(b"connection", b"Close"), (b"content-length", b"0")], close=False
    )
    assert made.closes
    assert made.data == b"HTTP/1.1 200 \r\ncontent-length: 0\r\nConnection: close\r\n\r\n"


def test_many_different_heads_are_not_all_kept():
    from sdk_trio.server import head as module

    request = parse_head(REQUESTS[2], Limits())
    for number in range(1000):
        answer_head(request, 200, ((b"x", b"%d" % number),), close=False)
    assert len(module._encoded) <= 256


def test_headers_that_change_are_not_kept():
    request = parse_head(REQUESTS[2], Limits())
    pair = [b"x", b"1"]
    first = answer_head(request, 200, (pair,), close=False)
    pair[1] = b"2"
    assert answer_head(request, 200, (pair,), close=False).data != first.data


def test_interim_answers_and_refusals():
    assert informational(103, [(b"link", b"</x>")]) == b"HTTP/1.1 103 \r\nlink: </x>\r\n\r\n"
    assert refusal(418) == b"HTTP/1.1 418 \r\ncontent-length: 0\r\nConnection: close\r\n\r\n"
    assert refusal(400) == (
        b"HTTP/1.1 400 \r\ncontent-type: application/json\r\ncontent-length: 23\r\n"
        b'Connection: close\r\n\r\n{"error":"bad request"}'
    )
    with pytest.raises(AnswerError):
        informational(103, [(b"link", b"a\nb")])
