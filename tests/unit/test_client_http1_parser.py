"""The parser of HTTP/1.1 answers: the same result for any split of the bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdk_trio.net.http1 import AnswerParser
from sdk_trio.net.messages import NetworkError, PeerProtocolError

NAMES = st.from_regex(rb"\A[A-Za-z][A-Za-z0-9-]{0,20}\Z").filter(
    lambda name: (
        name.lower()
        not in (b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"te")
    )
)
VALUES = st.from_regex(rb"\A([!-~]([ -~]{0,30}[!-~])?)?\Z")


@st.composite
def answers(draw):
    """Draw an answer's bytes, with its status, headers and body, and whether the connection is
    kept."""
    status = draw(st.integers(200, 599))
    headers = draw(st.lists(st.tuples(NAMES, VALUES), max_size=5))
    body = b"" if status in (204, 304) else draw(st.binary(max_size=200))
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    if status in (204, 304):
        framing, extra, wire = "none", [], b""
    elif framing == "length":
        extra, wire = [(b"Content-Length", b"%d" % len(body))], body
    elif framing == "chunked":
        size = draw(st.integers(1, 50))
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        extra = [(b"Transfer-Encoding", b"chunked")]
        wire = b"".join(b"%X\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        wire += b"0\r\nTrailer: x\r\n\r\n"
    else:
        extra, wire = [], body
    interim = draw(st.sampled_from([b"", b"HTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\n"]))
    lines = b"".join(b"%b: %b\r\n" % header for header in headers + extra)
    data = interim + b"HTTP/1.1 %d Fine\r\n%b\r\n" % (status, lines) + wire
    return data, (status, headers + extra, body, framing != "close")


def parsed(parser):
    assert parser.reason == b"Fine"
    return (
        parser.status,
        parser.headers,
        b"".join(parser.chunks),
        parser.keeps_alive,
    )


@given(answers(), st.lists(st.integers(1, 40), max_size=60))
def test_the_answer_is_the_same_however_it_is_cut(answer, cuts):
    data, expected = answer
    parser = AnswerParser(is_head=False)
    for cut in [*cuts, len(data)]:
        piece, data = data[:cut], data[cut:]
        if piece:
            parser.feed(piece)
    if not expected[3]:
        assert not parser.ended
        parser.feed(b"")
    assert parser.ended
    assert parsed(parser) == expected


@given(answers(), st.data())
def test_an_answer_that_is_cut_short_never_counts_as_whole(answer, data):
    wire, (_, _, _, kept) = answer
    if not kept:
        return  # its end is the connection's
    parser = AnswerParser(is_head=False)
    shorter = wire[: data.draw(st.integers(0, len(wire) - 1))]
    try:
        if shorter:
            parser.feed(shorter)
        parser.feed(b"")
    except NetworkError:
        return
    raise AssertionError("accepted")


@given(st.lists(st.binary(min_size=1, max_size=80), max_size=6), st.booleans())
def test_any_bytes_are_parsed_or_refused(pieces, is_head):
    parser = AnswerParser(is_head=is_head)
    try:
        for piece in [b"HTTP/1.1 200 OK\r\n", *pieces]:
            parser.feed(piece)
            if parser.ended:
                break
    except NetworkError:
        return


# Line breaks alone are allowed between messages (RFC 9112, 2.2).
SURPLUS = st.binary(min_size=1, max_size=50).filter(lambda data: data.strip(b"\r\n")) | st.just(
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
)


@given(answers(), SURPLUS)
def test_bytes_after_an_answer_end_the_connection_and_change_nothing(answer, surplus):
    data, expected = answer
    if not expected[3]:
        return
    parser = AnswerParser(is_head=False)
    parser.feed(data + surplus)
    assert parsed(parser) == (*expected[:3], False)


CHUNKED = b"2\r\nab\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "coding", [b"gzip, chunked", b"gzip", b"chunked, gzip", b"x\r\nTransfer-Encoding: chunked"]
)
def test_a_transfer_coding_that_was_not_asked_for_is_refused(coding):
    """Handed on undecoded, the body would be taken for something else (RFC 9112, 7.4)."""
    parser = AnswerParser(is_head=False)
    with pytest.raises(PeerProtocolError):
        parser.feed(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: " + coding + b"\r\n\r\n2\r\nab\r\n0\r\n\r\n"
        )


def test_chunked_is_read_in_any_spelling():
    parser = AnswerParser(is_head=False)
    parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding:  Chunked \r\n\r\n" + CHUNKED)
    assert (parser.chunks, parser.ended) == ([b"ab"], True)


@pytest.mark.parametrize("flood", [b"0\r\nX: ", b"0\r\nX: a\r\nX: ", b"1;", b"1\r\nb\r\n1;name="])
def test_chunk_extensions_and_trailers_are_bounded_like_a_head(flood):
    parse = AnswerParser(is_head=False)
    parse.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n" + flood)
    parse.feed(b"x" * 65_536)
    parse.feed(b"x" * 65_536)
    with pytest.raises(PeerProtocolError, match="trailer is longer"):
        parse.feed(b"x" * 65_536)


def test_a_long_body_in_small_pieces_is_not_taken_for_something_around_it():
    parse = AnswerParser(is_head=False)
    parse.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(50_000):
        parse.feed(b"1;a=b\r\n")
        parse.feed(b"x\r\n")
        assert parse.chunks.pop() == b"x"
    parse.feed(b"0\r\n\r\n")
    assert parse.ended
