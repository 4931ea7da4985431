"""Heads of responses: the same bytes as h11 sends for the same headers."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.server.head import (
    Framing,
    ResponseError,
    encode_response,
    informational,
    parse_head,
    refusal,
    response_head,
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
    """Return the bytes of h11 for a response to ``request``; None if it refuses."""
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
        made = response_head(parsed, status, pairs, close=not parsed.keep_alive)
    except ResponseError:
        assert expected is None
        return
    assert made.data == expected
    assert made.closes == (b"Connection: close" in made.data)
    body = bytes(made.length)
    whole = encode_response(parsed, (status, tuple(pairs), body), close=not parsed.keep_alive)
    assert whole[0] == made
    assert whole[1].startswith(made.data)


def test_the_framing_depends_on_the_request():
    pairs = ((b"x", b"y"),)
    made = {
        response_head(parse_head(request, Limits()), 200, pairs, close=close).framing
        for request in REQUESTS
        for close in (True, False)
    }
    assert made == {Framing.CHUNKED, Framing.CLOSE, Framing.NO_BODY}


def test_a_close_of_the_application_is_kept():
    request = parse_head(REQUESTS[2], Limits())
    made = response_head(
        request, 200, [(b"connection", b"Close"), (b"content-length", b"0")], close=False
    )
    assert made.closes
    assert made.data == b"HTTP/1.1 200 \r\ncontent-length: 0\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("body", [b"", b"body"])
def test_a_whole_response_is_framed_for_its_request(body):
    answers = [
        encode_response(parse_head(request, Limits()), (200, ((b"x", b"y"),), body), close=False)
        for request in REQUESTS
    ]
    chunked = (b"4\r\nbody\r\n" if body else b"") + b"0\r\n\r\n"
    bodies = {head.framing: data.removeprefix(head.data) for head, data in answers}
    assert bodies == {Framing.CHUNKED: chunked, Framing.CLOSE: body, Framing.NO_BODY: b""}


def test_a_mutable_response_is_not_cached():
    request = parse_head(REQUESTS[2], Limits())
    pair = [b"x", b"1"]
    _, first = encode_response(request, (200, (pair,), b""), close=False)
    pair[1] = b"2"
    _, second = encode_response(request, (200, (pair,), b""), close=False)
    assert first != second


def test_a_body_whose_length_differs_from_its_head_is_refused():
    request = parse_head(REQUESTS[2], Limits())
    with pytest.raises(ResponseError):
        encode_response(request, (200, ((b"content-length", b"1"),), b""), close=False)


def test_interim_responses_and_refusals():
    assert informational(103, [(b"link", b"</x>")]) == b"HTTP/1.1 103 \r\nlink: </x>\r\n\r\n"
    assert refusal(418) == b"HTTP/1.1 418 \r\ncontent-length: 0\r\nConnection: close\r\n\r\n"
    assert refusal(400) == (
        b"HTTP/1.1 400 \r\ncontent-type: application/json\r\ncontent-length: 23\r\n"
        b'Connection: close\r\n\r\n{"error":"bad request"}'
    )
    with pytest.raises(ResponseError):
        informational(103, [(b"link", b"a\nb")])
