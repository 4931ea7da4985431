"""The parsers of the fast path, compared with h11, without sockets."""

import itertools
from contextlib import suppress

import h11
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st
from support.hostile_requests import BAD_CHUNKS

from sdk_trio.server.head import (
    ChunkedBody,
    RequestError,
    check_beginning,
    parse_head,
    read_head,
)
from sdk_trio.server.limits import Limits

LIMITS = Limits()

token = st.text("!#$%&'*+-.^_`|~09azAZ", min_size=1, max_size=8).map(str.encode)
value = st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=12).map(
    lambda text: text.encode("latin-1")
)
path = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E)).map(
    lambda text: b"/" + text.encode()
)
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
    path,
    st.sampled_from([b"1.0", b"1.1"]),
    st.lists(st.one_of(field, decisive), max_size=6).map(b"".join),
).map(lambda parts: b"%b %b HTTP/%b\r\nHost: test\r\n%b\r\n" % parts)
mutation = st.tuples(st.integers(0, 500), st.binary(max_size=2), st.integers(0, 2))


def h11_reading(data):
    """Return method, target, version and headers as h11 reads them; None if it refuses."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    if event is h11.NEED_DATA:
        return None
    assert isinstance(event, h11.Request)
    # No application sees an offer to upgrade.
    headers = [header for header in event.headers if header[0] != b"upgrade"]
    return event.method, event.target, event.http_version, headers


@given(head, st.lists(mutation, max_size=2))
def test_accepted_heads_are_read_like_h11(data, mutations):
    for place, piece, removed in mutations:
        at = place % len(data)
        data = data[:at] + piece + data[at + removed :]
    end = data.find(b"\r\n\r\n")
    assume(end > 0)
    data = data[: end + 4]
    try:
        ours = parse_head(data, LIMITS)
    except RequestError:
        return
    theirs = h11_reading(data)
    assert theirs is not None
    method, *rest = theirs
    assert ours.method == method.decode().upper()
    assert [ours.target, ours.version.encode(), ours.headers] == rest


@pytest.mark.parametrize("line", [b"POST /", b"OPTIONS *", b"options *", b"POST http://test/p"])
def test_an_upgrade_is_hidden_from_the_application(line):
    data = b"%b HTTP/1.1\r\nHost: test\r\nUpgrade: h2c\r\n\r\n" % line
    assert parse_head(data, LIMITS).headers == [(b"host", b"test")]


@given(head)
def test_a_head_without_contradictions_is_accepted(data):
    assume(data.lower().count(b"\r\ncontent-length:") <= 1)
    codings = data.count(b"\r\nTransfer-Encoding:")
    assume(codings == 0 or (codings == 1 and b"\r\nContent-Length:" not in data))
    assume(not codings or b" HTTP/1.0\r\n" not in data)
    assume(not data.startswith(b"CONNECT "))
    ours = parse_head(data, LIMITS)
    assert (ours.length is None) == (b"CHUNKED" in data)
    assert ours.keep_alive == (b"HTTP/1.1\r\n" in data and b"a, close" not in data)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_or_a_refusal(data):
    for text in (data, data + b"\r\n\r\n"):
        with suppress(RequestError):
            check_beginning(text or b"G", LIMITS)
            parse_head(text, LIMITS)


#: Lines of one connection's requests: few names, so that heads repeat, and values that change the
#: request or make it invalid.
repeated_field = st.tuples(
    st.sampled_from(
        [b"Webhook-Id", b"webhook-id", b"X", b"Content-Length", b"Host", b"Connection"]
    ),
    st.sampled_from([b":", b": ", b":  ", b": \t", b" :"]),
    st.one_of(
        st.sampled_from(
            [b"", b"1", b"2", b"12", b"a b", b"close", b" 3", b"4 ", b"t", b"1\r\nX: 2", b"\t5"]
        ),
        st.binary(max_size=3),
        value,
    ),
).map(b"".join)
lines_of_a_head = st.lists(repeated_field, max_size=4)
request_line = st.sampled_from(
    [b"POST /p HTTP/1.1", b"post /p HTTP/1.1", b"POST /q HTTP/1.0", b"POST http://h/p HTTP/1.1"]
)


@st.composite
def heads_of_one_connection(draw):
    """Generate heads that differ from the previous one in few lines, or in more."""
    lines = [draw(request_line), b"Host: test", *draw(lines_of_a_head)]
    heads = []
    for _ in range(draw(st.integers(2, 6))):
        for place in draw(st.lists(st.integers(1, len(lines) - 1), max_size=2)):
            new = draw(repeated_field)
            if draw(st.integers(0, 5)):  # the same header with another value
                _, colon, value = new.partition(b":")
                new = lines[place].partition(b":")[0] + colon + value
            lines = [*lines[:place], new, *lines[place + 1 :]]
        heads.append(b"\r\n".join([*lines, b"", b""]))
        if draw(st.integers(0, 9)) == 0:
            lines = [draw(request_line), b"Host: test", *draw(lines_of_a_head)]
    return heads


def reading(data, template):
    """Return the next template and the head; or None and the refusal."""
    try:
        head, template = read_head(data, LIMITS, template)
    except RequestError as error:
        return None, (error.status, str(error))
    return template, head


def parsing(data):
    """Return the head that is parsed without a template, or the refusal."""
    try:
        return parse_head(data, LIMITS)
    except RequestError as error:
        return error.status, str(error)


@given(heads_of_one_connection())
def test_the_next_head_of_a_connection_is_read_as_if_it_were_the_first(heads):
    template = None
    for data in heads:
        found, with_others = reading(data, template)
        event("fitted" if found is not None and found is template else "parsed")
        # A connection ends with the first refusal; here it continues, to test more.
        template = found or template
        assert with_others == parsing(data)


ALIKE = b"POST /p HTTP/1.1\r\nHost: test\r\nWebhook-Id: %b\r\nContent-Length: %b\r\n\r\n"


def test_heads_that_differ_in_values_share_a_template():
    template, memo = None, object()
    for number, (identifier, length) in enumerate(
        [(b"a", b"1"), (b"b", b"1"), (b"c", b"22"), (b"d", b"333"), (b"e f", b"1"), (b"", b"0")]
    ):
        before = template
        head, template = read_head(ALIKE % (identifier, length), LIMITS, before)
        assert (b"webhook-id", identifier) in head.headers
        assert head.length == int(length)
        if number > 2:
            assert template is before
            assert template.memo is memo
        template.memo = memo
    assert template.varying == {b"webhook-id", b"content-length"}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(ALIKE.replace(b"/p", b"/q"), id="another target"),
        pytest.param(ALIKE.replace(b"test", b"tset"), id="another host"),
        pytest.param(ALIKE.replace(b"POST", b"PUT"), id="another method"),
        pytest.param(ALIKE.replace(b"/1.1", b"/1.0"), id="another version"),
        pytest.param(ALIKE.replace(b"Webhook-Id", b"Webhook-Ip"), id="another name"),
        pytest.param(ALIKE[:-2] + b"X: y\r\n\r\n", id="one more line"),
        pytest.param(ALIKE.replace(b"Host", b"Connection: close\r\nHost"), id="close"),
        pytest.param(ALIKE.replace(b"Id: %b", b"Id:  %b"), id="another space"),
        pytest.param(ALIKE.replace(b"Id: %b", b"Id: %b "), id="a space behind"),
    ],
)
def test_a_head_that_differs_otherwise_does_not_share_a_template(other):
    template = None
    for identifier in (b"a", b"b", b"c"):
        _, template = read_head(ALIKE % (identifier, b"1"), LIMITS, template)
    template.memo = object()
    head, its_own = read_head(other % (b"d", b"1"), LIMITS, template)
    assert head == parse_head(other % (b"d", b"1"), LIMITS)
    assert its_own is None or its_own.memo is None


@pytest.mark.parametrize(
    ("identifier", "length"),
    [
        (b"d\n", b"1"),
        (b"d\r", b"1"),
        (b"d\0", b"1"),
        (b"d\x7f", b"1"),
        (b"d\r\nX: y", b"x"),
        (b"d", b"+1"),
        (b"d", b"1_0"),
        (b"d", b""),
        (b"d", b"1" * 21),
        (b"d", "\u0661".encode()),
        (b"d", b"1\r\nContent-Length: 1"),
    ],
)
def test_a_template_accepts_nothing_that_the_pattern_refuses(identifier, length):
    template = None
    for number in range(3):
        data = ALIKE % (b"%d" % number, b"%d" % number)
        _, template = read_head(data, LIMITS, template)
    with pytest.raises(RequestError):
        read_head(ALIKE % (identifier, length), LIMITS, template)


@pytest.mark.parametrize("part", [b"POST", b"/p", b"1.1"])
def test_the_request_line_is_never_taken_for_a_value(part):
    template = None
    for other in (part, part + b"0", part + b"0", part, part + b"1", part + b"1"):
        data = (ALIKE[:-2] % (b"a", b"1") + b"X: y\r\n\r\n").replace(part, other, 1)
        found, with_others = reading(data, template)
        template = found or template
        assert with_others == parsing(data)


@pytest.mark.parametrize(
    ("line", "values"),
    [
        (b"Connection: %b", [b"keep-alive", b"x", b"close", b"keep-alive", b"close"]),
        (b"Expect: %b", [b"x", b"y", b"100-continue", b"x", b"100-continue"]),
        (b"Transfer-Encoding: %b", [b"chunked", b"CHUNKED", b"gzip", b"chunked", b"x"]),
        (b"Content-Length: %b", [b"1", b"2", b"x", b"33", b"-1"]),
        (b"Host: %b", [b"a", b"b", b"a/b", b"c", b"@"]),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else "",
)
def test_decisive_headers_are_read_in_each_head(line, values):
    template = None
    for text in values:
        host = b"" if line.startswith(b"Host") else b"Host: test\r\n"
        data = b"POST /p HTTP/1.1\r\n%bX: y\r\n%b\r\n\r\n" % (host, line % text)
        found, with_others = reading(data, template)
        template = found or template
        assert with_others == parsing(data)


@pytest.mark.parametrize(
    "line",
    [b"X: " + b"y" * 4096, b"Upgrade: h2c"],
    ids=["long", "with an upgrade"],
)
def test_a_long_or_changed_head_makes_no_template(line):
    data = ALIKE[:-2] % (b"a", b"1") + line + b"\r\n\r\n"
    assert read_head(data, LIMITS, None)[1] is None
    absolute = (ALIKE % (b"a", b"1")).replace(b"/p", b"http://other/p")
    assert read_head(absolute, LIMITS, None)[1] is None


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
    st.sampled_from([b"", b";a", b';a="b c"', b"; a = b;c", b';x="\\"\xff;\\\\"']),
    st.sampled_from([b"", b"X: y\r\n", b"X:\r\nA: b\r\n"]),
    st.binary(max_size=20),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_a_chunked_body_is_read_in_any_pieces(body, sizes, extension, trailers, after, cuts):
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


@pytest.mark.parametrize(
    "target",
    [b"!", b"p", b"?q", b"a:80", b"mailto:a@b", b"ftp://h/", b"*x", b"http:///p", b"http:/p"],
)
@pytest.mark.parametrize("method", [b"GET", b"POST", b"OPTIONS", b"PRI"])
def test_a_target_is_a_path_or_a_url(method, target):
    with pytest.raises(RequestError) as refusal:
        parse_head(b"%b %b HTTP/1.1\r\nHost: test\r\n\r\n" % (method, target), LIMITS)
    assert refusal.value.status == 400


@pytest.mark.parametrize("method", [b"GET", b"POST", b"PRI", b"HEAD"])
def test_only_options_has_the_whole_server_as_target(method):
    with pytest.raises(RequestError):
        parse_head(b"%b * HTTP/1.1\r\nHost: test\r\n\r\n" % method, LIMITS)
    assert parse_head(b"OPTIONS * HTTP/1.1\r\nHost: test\r\n\r\n", LIMITS).target == b"*"


@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(
            st.sampled_from(
                [b"0", b"3", b"f", b"\r\n", b"\r", b"\n", b";", b"=", b'"', b"\\", b"a"]
            )
        ).map(b"".join),
    ),
    st.lists(st.integers(0, 200), max_size=4),
)
def test_any_bytes_are_chunks_or_a_refusal(data, cuts):
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    decoder = ChunkedBody()
    with suppress(RequestError):
        for start, end in itertools.pairwise(places):
            if not decoder.complete:
                decoder.feed(data[start:end])


@given(
    st.lists(
        st.sampled_from([b"0", b"3", b"a", b"\r\n", b"\n", b"abc", b";", b" ", b"X: y", b"\r"])
    )
)
def test_accepted_chunked_bodies_are_read_like_h11(parts):
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


def test_changes_of_an_application_to_headers_do_not_reach_the_next_request():
    data = ALIKE % (b"a", b"1")
    first, template = read_head(data, LIMITS, None)
    expected = list(first.headers)
    first.headers.insert(0, (b"x-user", b"the first request's"))
    second, template = read_head(data, LIMITS, template)
    assert second.headers == expected
    second.headers.clear()
    assert read_head(data, LIMITS, template)[0].headers == expected
