"""The fast path beside stock hypercorn and h11: what both accept, both read alike.

The fast path may refuse more, never read differently: the requests that its application is given
are the first ones of those that stock hypercorn's is given, with the same method, path, headers and
body. One difference is wanted: an empty line before a request, which h11 refuses, is ignored.
``SDK_TEST_FUZZ_EXAMPLES`` makes the search longer than the normal suite's few seconds.
"""

import itertools
import os
import re

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile_requests import BAD_CHUNKS, REFUSED, STRICTER
from support.http_serving import http_server

#: Seconds for all of the corpus, on a machine that has other things to do.
PATIENCE_SECONDS = 600

#: A full-size run sets it, and reads every combination of the corpus as well.
FULL = "SDK_TEST_FUZZ_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("SDK_TEST_FUZZ_EXAMPLES", "300"))

#: Conversations that one pair of servers reads; starting them takes longer than reading.
TOGETHER = 10

HOST = b"Host: test\r\n"

METHODS = [b"GET", b"POST", b"post", b"HEAD", b"PRI", b"CONNECT", b"M-SEARCH", b"G@T", b"", b"G\0T"]
TARGETS = [
    b"/",
    b"/a%20b?c=%2F",
    b"*",
    b"http://h/p",
    b"h:80",
    b"/%zz",
    b"/\xc3",
    b"/a#b",
    b"",
    b"//",
]
VERSIONS = [b"HTTP/1.1"] * 6 + [
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"HTTP/1.2",
    b"http/1.1",
    b"HTTP/11",
]
SEPARATORS = [b" "] * 8 + [b"  ", b"\t", b"", b"\r"]
ENDS = [b"\r\n"] * 12 + [b"\n", b"\r", b"\r\r\n", b" \r\n", b"\r\n ", b"\r\n\t"]
NAMES = [
    *[b"Content-Length", b"Transfer-Encoding", b"Host", b"Connection", b"Expect", b"Upgrade"] * 2,
    *[
        b"content-length ",
        b"Content_Length",
        b" Transfer-Encoding",
        b"X",
        b"",
        b"X\0",
        b"\xe9",
        b"Te",
    ],
]
VALUES = [
    *[b"0", b"3", b"5", b"chunked"] * 3,
    *[b"+3", b"-1", b"3, 3", b"3,5", b"0x3", b"3 ", b"\t3", b"1_0", b"03", b"3;", b"\xb2", b"3\0"],
    *[
        b"Chunked",
        b"chunked, chunked",
        b"gzip, chunked",
        b"identity",
        b"\x0bchunked",
        b"chunked;q=1",
    ],
    *[b"close", b"keep-alive", b"Close, x", b"upgrade", b"100-continue", b"websocket", b"h2c", b""],
    *[b"test", b"a b", b"a/b", b"x" * 300, b"\xff", b"a\x01b", b"a:b"],
]
COLONS = [b": "] * 8 + [b":", b" : ", b":\t", b"", b"::"]
SIZES = [
    b"0",
    b"3",
    b"5",
    b"A",
    b"00003",
    b"3;a=b",
    b"3 ",
    b" 3",
    b"0x3",
    b"+3",
    b"",
    b"3\t;a",
    b"f" * 17,
]
BODIES = [
    b"",
    b"abc",
    b"abcde",
    b"abcdefghij",
    b"0\r\n\r\n",
    b"GET /inner HTTP/1.1\r\n" + HOST + b"\r\n",
]


def of(alternatives):
    return st.sampled_from(alternatives)


def joined(*parts):
    return st.tuples(*parts).map(b"".join)


header = joined(of(NAMES), of(COLONS), of(VALUES), of(ENDS))
good_header = st.tuples(of(NAMES[:6]), of(VALUES[:12])).map(lambda pair: b"%b: %b\r\n" % pair)
request_line = joined(
    of(METHODS), of(SEPARATORS), of(TARGETS), of(SEPARATORS), of(VERSIONS), of(ENDS)
)
good_line = st.sampled_from(
    [b"GET / HTTP/1.1\r\n", b"POST /p HTTP/1.1\r\n", b"HEAD / HTTP/1.0\r\n"]
)
chunk = joined(of(SIZES), of(ENDS), of(BODIES), of(ENDS))
body = st.one_of(
    of(BODIES),
    st.lists(chunk, max_size=3).map(b"".join),
    of([b"3\r\nabc\r\n0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"5\r\nabcde\r\n3\r\nabc\r\n000\r\n\r\n"]),
)
request = joined(
    st.one_of(good_line, good_line, request_line),
    of([HOST, HOST, HOST, b"", HOST * 2]),
    st.lists(st.one_of(good_header, header), max_size=3).map(b"".join),
    of([b"\r\n"] * 8 + [b"\n", b"", b"\r\n\r\n", b" \r\n"]),
    body,
)
noise = st.lists(
    st.tuples(
        st.integers(0, 400), st.sampled_from([b"", b"\r", b"\n", b" ", b"\t", b"\0", b"\r\n", b":"])
    ),
    max_size=2,
)


@st.composite
def conversations(draw):
    """One to three requests, a few bytes of which are replaced, removed or added."""
    data = b"".join(draw(st.lists(request, min_size=1, max_size=3)))
    for place, piece in draw(noise):
        at = place % (len(data) + 1)
        data = data[:at] + piece + data[at + draw(st.integers(0, 1)) :]
    return data


async def reading(server, *pieces):
    """The requests that the application is given when ``pieces`` arrive one by one."""
    before = len(server.observer.seen)
    with trio.move_on_after(60) as scope:
        await server.exchange(*pieces)
    assert not scope.cancelled_caught, f"hangs after {pieces!r}"
    return [seen.reading for seen in server.observer.seen[before:]]


def beside_stock(compare, *arguments):
    """Run ``compare(fast, stock, ...)`` with both servers."""

    async def main():
        async with (
            http_server(True, patience=PATIENCE_SECONDS) as fast,
            http_server(False, patience=PATIENCE_SECONDS, graceful_seconds=0.1) as stock,
        ):
            await compare(fast, stock, *arguments)

    trio.run(main)


async def all_the_same(fast, stock, conversations):
    for data in conversations:
        await same_reading(fast, stock, data)


async def same_reading(fast, stock, data):
    ours = await reading(fast, data)
    theirs = await reading(stock, data)
    given = data
    while len(theirs) < len(ours):
        # It has stopped at an empty line before a request, if at anything that we read.
        for at in [found.start() for found in re.finditer(b"\r\n", given)]:
            without = given[:at] + given[at + 2 :]
            more = await reading(stock, without)
            if len(more) > len(theirs) and more[: len(ours)] == ours[: len(more)]:
                given, theirs = without, more
                break
        else:
            break
    assert ours == theirs[: len(ours)], f"read differently: {data!r}"


async def same_in_pieces(fast, stock, conversations, cuts):
    for data in conversations:
        await same_in_these_pieces(fast, data, cuts)


async def same_in_these_pieces(fast, data, cuts):
    whole = await reading(fast, data)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    pieces = [data[start:end] for start, end in itertools.pairwise(places)]
    assert await reading(fast, *pieces) == whole


several = st.lists(conversations(), min_size=1, max_size=TOGETHER)


@settings(max_examples=2 * EXAMPLES // TOGETHER)
@given(several)
def test_hypercorn_reads_requests_like_the_fast_path(conversations):
    beside_stock(all_the_same, conversations)


@settings(max_examples=EXAMPLES // TOGETHER)
@given(several, st.lists(st.integers(0, 1000), max_size=5))
def test_however_a_conversation_is_cut_it_is_read_alike(conversations, cuts):
    beside_stock(same_in_pieces, conversations, cuts)


#: Controls, delimiters of the grammar, and bytes of both halves beyond ASCII.
ODD_BYTES = (*range(33), *b'"(),/:;<=>?@[]{}', 0x7F, 0x80, 0x85, 0xA0, 0xC3, 0xFF)


def corpus():
    """Every hostile request of the conformance suite, and odd headers, lines and bytes.

    A full-size run combines all of them; other runs omit requests with three oddities.
    """
    yield from (data for data, _ in REFUSED.values())
    yield from (data for data, _ in STRICTER.values())
    for chunks in BAD_CHUNKS.values():
        yield b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    for name, colon, value in itertools.product(set(NAMES), set(COLONS), set(VALUES)):
        if FULL or colon == b": " or value in (b"3", b"chunked"):
            yield b"POST / HTTP/1.1\r\n" + HOST + name + colon + value + b"\r\n\r\n0\r\n\r\n"
    for method, target, version in itertools.product(set(METHODS), set(TARGETS), set(VERSIONS)):
        if FULL or method == b"GET" or target == b"/" or version == b"HTTP/1.1":
            yield b"%b %b %b\r\n" % (method, target, version) + HOST + b"\r\n"
    for byte in range(256) if FULL else ODD_BYTES:
        for template in (
            b"GET /%b HTTP/1.1\r\n" + HOST + b"\r\n",
            b"GET / HTTP/1.1\r\n" + HOST + b"X%b: y\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + HOST + b"X: a%bb\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + HOST + b"X: y%b\r\n\r\n",
            b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
            b"3%b\r\nabc\r\n0\r\n\r\n",
        ):
            yield template % bytes([byte])


async def read_corpus(fast, stock):
    differences = []
    for data in corpus():
        data += b"GET /after HTTP/1.1\r\n" + HOST + b"\r\n"
        try:
            await same_reading(fast, stock, data)
        except AssertionError as error:
            differences.append(error)
    assert differences == []


def test_hostile_requests_are_read_alike():
    beside_stock(read_corpus)
