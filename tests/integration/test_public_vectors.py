"""Data of public test suites against the parser, the server, the signatures and the decoder.

The data lies in ``../shared/vectors`` beside the repository: llhttp (MIT), Wycheproof (Apache-2.0)
and JSONTestSuite (MIT). Without it these tests are skipped. A table says where we differ, and why.
"""

import json
import re

import pytest
import trio
from support.http_serving import http_server
from support.serving import RawWire, delivery_request, registry, serving, signed, works
from support.shared import shared

from sdk_trio.server.head import ChunkedBody, RequestError, check_beginning, read_head
from sdk_trio.server.limits import Limits
from sdk_trio.webhooks.signature import _HmacKey, _in_pieces, _load_public_key

VECTORS = shared("vectors")

pytestmark = [
    pytest.mark.skipif(not VECTORS.is_dir(), reason=f"there are no vectors at {VECTORS}"),
    pytest.mark.may_skip,
]


# -- llhttp: requests -----------------------------------------------------------------------------

#: A heading, or a case: its type, its bytes, and the strict parser's result.
_BLOCK = re.compile(
    r"^#+ ([^\n]*)$|<!--\s*meta=(\{[^\n]*?\})\s*-->\s*"
    r"```http\n((?:(?!```).)*)```(?:(?!```).)*```log\n((?:(?!```).)*)```",
    re.DOTALL | re.MULTILINE,
)
#: The other types are those of parsers with a leniency switched on; with ``skipBody`` the parser's
#: user leaves bodies out.
_STRICT = ("request", "request-finish")
_HOSTLESS = re.compile(rb"(?m)^([^\r\n]+ HTTP/1\.1\r\n)")

UPGRADE = "an offer to change the protocol is passed over (RFC 9110, 7.8): what follows is HTTP"
METHODS = "any token is a method (RFC 9110, 9.1): the application refuses those that it has not"
NO_HTTP = "this server speaks no ICE, RTSP or HTTP/0.9"
CODINGS = "no transfer coding but chunked is supported: 501 (RFC 9112, 6.1)"
TUNNELS = "this server is no proxy: 501"
ASTERISK = "the asterisk is a target of OPTIONS alone (RFC 9112, 3.2.4)"
LAST = "nothing is read behind the last request of a connection"
USER = "a target that names a user is refused (RFC 9110, 4.2.4)"

#: (file, title): our statuses of a case that we judge otherwise, and the reason.
DEVIATIONS = {
    ("connection", "No restart when keep-alive is off (1.0)"): ([200], LAST),
    ("connection", "CRLF between requests, explicit `close`"): ([200], LAST),
    ("connection", "CRLF between requests, explicit `close` followed by tab"): ([200], LAST),
    ("connection", "Multiple tokens with folding and LWS"): ([200, 400], UPGRADE),
    ("connection", "Setting a flag and pausing"): ([200], UPGRADE),
    ("connection", "Emitting part of body and pausing"): ([200, 400], UPGRADE),
    ("connection", "Upgrade GET request"): ([200, 400], UPGRADE),
    ("connection", "Upgrade POST request"): ([200, 400], UPGRADE),
    ("invalid", "HTTP protocol and ANNOUNCE method"): ([200], METHODS),
    ("invalid", "Invalid method"): ([200], METHODS),
    ("method", "CONNECT request"): ([501], TUNNELS),
    ("method", "CONNECT request with CAPS"): ([501], TUNNELS),
    ("method", "CONNECT with body"): ([501], TUNNELS),
    ("uri", "Underscore in hostname"): ([501], TUNNELS),
    ("method", "M-SEARCH request"): ([400], ASTERISK),
    ("method", "SOURCE request with ICE"): ([400], NO_HTTP),
    ("method", "OPTIONS request with RTSP"): ([400], NO_HTTP),
    ("method", "ANNOUNCE request with RTSP"): ([400], NO_HTTP),
    ("sample", "No HTTP version"): ([400], NO_HTTP),
    ("transfer-encoding", "POST with `chunked` as last transfer-encoding"): ([501], CODINGS),
    (
        "transfer-encoding",
        "POST with `chunked` as last transfer-encoding (multiple headers)",
    ): ([501], CODINGS),
    ("uri", "`host:port` and basic auth"): ([400], USER),
}


def _unescaped(text):
    """The bytes that llhttp's own runner makes of a case."""
    text = re.sub(r"\n\Z", "", text)
    text = re.sub(r"\\\n", "", text).replace("\n", "\r\n")
    for written, meant in (("\\r", "\r"), ("\\n", "\n"), ("\\t", "\t"), ("\\f", "\f")):
        text = text.replace(written, meant)
    text = re.sub(r"\\x([0-9a-fA-F]+)", lambda found: chr(int(found[1], 16)), text)
    return text.encode()


def llhttp_cases():
    for file in sorted((VECTORS / "llhttp").glob("*.md")):
        title = ""
        for found in _BLOCK.finditer(file.read_text(encoding="utf-8")):
            if found[1]:
                title = found[1]
            elif (meta := json.loads(found[2]))["type"] in _STRICT and "skipBody" not in meta:
                data = _unescaped(found[3])
                # RFC 9112, 3.2 demands a Host, which most cases lack.
                if b"host:" not in data.lower():
                    data = _HOSTLESS.sub(rb"\1Host: localhost\r\n", data)
                yield pytest.param(file.stem, title, data, found[4], id=f"{file.stem}: {title}")


def expected_statuses(file, title, log):
    """The statuses, with a refusal where llhttp reports an error or an unfinished request."""
    if (file, title) in DEVIATIONS:
        return DEVIATIONS[file, title][0]
    complete = log.count("message complete")
    unfinished = "error code" in log or log.count("message begin") > complete
    return [200] * complete + [400] * unfinished


def parsed_statuses(data, limits):
    """Return the result of the parsers of heads and chunks for a connection's bytes; 400 for an
    early end."""
    statuses = []
    try:
        while data:
            data = data.removeprefix(b"\r\n")
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if data:
                    check_beginning(data, limits)
                    raise RequestError(400, "the headers are not complete")
                break
            head, _ = read_head(data[:end], limits, None)
            data = data[end:]
            if head.length is None:
                chunks = ChunkedBody()
                chunks.feed(data)
                data = chunks.rest
                complete = chunks.complete
            else:
                complete = len(data) >= head.length
                data = data[head.length :]
            if not complete:
                raise RequestError(400, "the body is not complete")
            statuses.append(200)
            if not head.keep_alive:
                break
    except RequestError as error:
        statuses.append(error.status)
    return statuses


def alike(ours, expected):
    """Any refusal of a request is as good as another one."""
    kinds = [[status // 100 if status < 400 else 4 for status in each] for each in (ours, expected)]
    return kinds[0] == kinds[1]


@pytest.mark.parametrize(("file", "title", "data", "log"), [*llhttp_cases()])
def test_llhttp_by_the_parsers(file, title, data, log):
    ours, expected = parsed_statuses(data, Limits()), expected_statuses(file, title, log)
    assert alike(ours, expected), (ours, expected, data)


async def _accepting(scope, receive, send):
    while (message := await receive())["type"] == "http.request":
        if not message["more_body"]:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return


async def test_llhttp_by_the_server():
    differing = []
    async with http_server(True, app=_accepting) as server:
        for case in llhttp_cases():
            file, title, data, log = case.values
            found = re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", await server.exchange(data))
            ours = [int(status) for status in found if not status.startswith(b"1")]
            expected = expected_statuses(file, title, log)
            if not alike(ours, expected):
                differing.append((file, title, ours, expected))
    assert not differing, "\n".join(map(str, differing))


def test_every_deviation_is_one():
    """A case that llhttp judges as we do, or that is gone, has no place in the table."""
    cases = {case.values[:2]: case.values[3] for case in llhttp_cases()}
    for key, (statuses, _) in DEVIATIONS.items():
        log = cases[key]
        refused = any(status >= 400 for status in statuses)
        paused = 'reason="Pause' in log
        assert paused or refused != ("error code" in log), key


# -- Wycheproof: signatures -----------------------------------------------------------------------


def _wycheproof(name):
    document = json.loads((VECTORS / "wycheproof" / f"{name}_test.json").read_text())
    for group in document["testGroups"]:
        for test in group["tests"]:
            yield group, test


def test_wycheproof_hmac():
    count = 0
    for group, test in _wycheproof("hmac_sha256"):
        key, message, tag = (bytes.fromhex(test[name]) for name in ("key", "msg", "tag"))
        # A tag of half the length is compared with as much of ours: the scheme has whole ones only.
        ours = _HmacKey.of(key).digest(b"", _in_pieces(message))[: group["tagSize"] // 8]
        assert (ours == tag) == (test["result"] == "valid"), test
        count += 1
    assert count == 174


def test_wycheproof_ed25519():
    count = 0
    for group, test in _wycheproof("ed25519"):
        key = _load_public_key(bytes.fromhex(group["publicKey"]["pk"]))
        made = key.made(bytes.fromhex(test["sig"]), bytes.fromhex(test["msg"]))
        assert made == (test["result"] == "valid"), test
        count += 1
    assert count == 151


# -- JSONTestSuite: the data of an event ----------------------------------------------------------

#: Refused by strict parsers, and read as null with drift here (docs/reference/events.md): senders
#: in Python write them.
DRIFT = ("n_number_NaN.json", "n_number_infinity.json", "n_number_minus_infinity.json")


def _json_cases(kind):
    return sorted((VECTORS / "json").glob(f"{kind}_*.json"))


async def _statuses(files):
    statuses = {}
    async with serving(registry(works)) as app:
        for number, file in enumerate(files):
            body = b'{"type":"order.paid","data":{"id":"o","x":%b}}' % file.read_bytes()
            delivery = signed(body, webhook_id=f"v{number}")
            with await RawWire.connect(app.url) as wire:
                await wire.send(delivery_request(delivery))
                statuses[file.name] = (await wire.answer()).status
        # The receiver continues to work.
        with await RawWire.connect(app.url) as wire:
            await wire.send(delivery_request(signed()))
            assert (await wire.answer()).status == 200
    await trio.lowlevel.checkpoint()
    return statuses


async def test_json_that_is_valid_is_accepted():
    statuses = await _statuses(_json_cases("y"))
    assert len(statuses) == 95
    assert {name for name, status in statuses.items() if status != 200} == set()


async def test_json_that_is_invalid_is_refused_or_a_documented_drift():
    statuses = await _statuses(_json_cases("n"))
    assert len(statuses) == 188
    accepted = {name for name, status in statuses.items() if status == 200}
    assert accepted == set(DRIFT)
    assert set(statuses.values()) == {200, 400}


async def test_json_that_parsers_may_judge_as_they_like_gets_a_verdict():
    statuses = await _statuses(_json_cases("i"))
    assert len(statuses) == 35
    assert set(statuses.values()) <= {200, 400}
