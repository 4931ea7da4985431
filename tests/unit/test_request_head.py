"""The readers of the fast path beside h11, without sockets."""

import itertools
from contextlib import suppress

import h11
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.hostile_requests import BAD_CHUNKS

from sdk_trio.server.head import ChunkedBody, RequestError, check_beginning, parse_head
from sdk_trio.server.limits import Limits

LIMITS = Limits()

token = st.text("!#$%&'*+-.^_`|~09azAZ", min_size=1, max_size=8).map(str.encode)
value = st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=12).map(
    lambda text: text.encode("latin-1")
)
target = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1).map(str.encode)
space = st.sampled_from([b"", b" ", b"\t", b"  \t"])
field = st.tuples(token, space, value, space).map(lambda parts: b"%b:%b%b%b\r\n" % parts)
decisive = st.sampled_from(
    [
        b"Content-Length: 12\r\n",
        b"Transfer-Encoding: CHUNKED\r\n",
        b"Connection: a, close\r\n",
        b"Expect: 100-continue\r\n",
        b"upgrade: h2c\r\n",
    ]
)
head = st.tuples(
    token,
    target,
    st.sampled_from([b"1.0", b"1.1"]),
    st.lists(st.one_of(field, decisive), max_size=6).map(b"".join),
).map(lambda parts: b"%b %b HTTP/%b\r\nHost: test\r\n%b\r\n" % parts)
mutation = st.tuples(st.integers(0, 500), st.binary(max_size=2), st.integers(0, 2))


def h11_reading(data):
    """Method, target, version and headers as h11 gives them; None where it refuses."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    if event is h11.NEED_DATA:
        return None
    assert isinstance(event, h11.Request)
    # This server speaks no other protocol, so no application sees an offer to change to one.
    headers = [header for header in event.headers if header[0] != b"upgrade"]
    return event.method, event.target, event.http_version, headers


@given(head, st.lists(mutation, max_size=2))
def test_what_is_accepted_h11_reads_alike(data, mutations):
    for place, piece, removed in mutations:
        at = place % len(data)
        data = data[:at] + piece + data[at + removed :]
    end = data.find(b"\r\n\r\n")
    assume(end > 0)
    data = data[: end + 4]
    try:
        ours = parse_head(data, LIMITS, {})
    except RequestError:
        return
    theirs = h11_reading(data)
    assert theirs is not None
    method, *rest = theirs
    assert ours.method == method.decode().upper()
    assert [ours.target, ours.version.encode(), ours.headers] == rest


@pytest.mark.parametrize("target", [b"/", b"*", b"p", b"http://test/p"])
def test_no_application_is_offered_another_protocol(target):
    data = b"POST %b HTTP/1.1\r\nHost: test\r\nUpgrade: h2c\r\n\r\n" % target
    assert parse_head(data, LIMITS, {}).headers == [(b"host", b"test")]


@given(head)
def test_a_head_without_contradictions_is_accepted(data):
    assume(data.lower().count(b"\r\ncontent-length:") <= 1)
    codings = data.count(b"\r\nTransfer-Encoding:")
    assume(codings == 0 or (codings == 1 and b"\r\nContent-Length:" not in data))
    assume(not codings or b" HTTP/1.0\r\n" not in data)
    assume(not data.startswith(b"CONNECT "))
    ours = parse_head(data, LIMITS, {})
    assert (ours.length is None) == (b"CHUNKED" in data)
    assert ours.keep_alive == (b"HTTP/1.1\r\n" in data and b"a, close" not in data)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_or_a_refusal(data):
    for text in (data, data + b"\r\n\r\n"):
        with suppress(RequestError):
            check_beginning(text or b"G", LIMITS)
            parse_head(text, LIMITS, {})


def in_chunks(body, sizes, extension=b""):
    pieces, at = [], 0
    for size in sizes:
        piece = body[at : at + size]
        at += size
        if piece:
            pieces.append(b"%X%b\r\n%b\r\n" % (len(piece), extension, piece))
    return b"".join(pieces), body[:at]


@given(
    st.binary(max_size=200),
    st.lists(st.integers(1, 50), max_size=6),
    st.sampled_from([b"", b";a", b';a="b c"', b"; ", b";x\t"]),
    st.sampled_from([b"", b"X: y\r\n", b"X:\r\nA: b\r\n"]),
    st.binary(max_size=20),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_a_chunked_body_is_read_however_it_is_cut(body, sizes, extension, trailers, after, cuts):
    coded, expected = in_chunks(body, sizes, extension)
    data = coded + b"0\r\n" + trailers + b"\r\n" + after
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    decoder = ChunkedBody()
    got = b""
    left = b""
    for start, end in itertools.pairwise(places):
        if decoder.complete:
            left += data[start:end]
        else:
            got += decoder.feed(data[start:end])
    assert decoder.complete
    assert (got, decoder.rest + left) == (expected, after)


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_malformed_chunks_are_refused(name):
    with pytest.raises(RequestError):
        ChunkedBody().feed(BAD_CHUNKS[name])


@given(
    st.lists(
        st.sampled_from([b"0", b"3", b"a", b"\r\n", b"\n", b"abc", b";", b" ", b"X: y", b"\r"])
    )
)
def test_what_is_accepted_of_a_chunked_body_h11_reads_alike(parts):
    data = b"".join(parts)
    decoder = ChunkedBody()
    try:
        ours = decoder.feed(data)
    except RequestError:
        return
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(
        b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n" + data
    )
    connection.next_event()
    theirs = b""
    while isinstance(event := connection.next_event(), h11.Data):
        theirs += event.data
    assert ours == theirs
    assert decoder.complete == isinstance(event, h11.EndOfMessage)
