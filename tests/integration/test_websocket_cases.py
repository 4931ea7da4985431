"""The cases of Autobahn's fuzzing client against WebSocket over the server's upgrade.

Origin: crossbario/autobahn-testsuite, ``autobahntestsuite/autobahntestsuite/case/``; the number of
each case is that of its file. Their program needs Python 2, so its frames and expectations stand
here as a table, and this file encodes and decodes frames by itself. The peer is an echo behind the
server's upgrade, made of the same library and calls as the feed.

Left out: groups 9 (throughput), 12 and 13 (compression, which no one here offers), and 7.1.6, 7.13
(any behavior passes).
"""

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import trio
from support.http_serving import http_server
from support.serving import RawWire
from trio_websocket import ConnectionClosed, wrap_server_stream

from sdk_trio.base.http import UPGRADE

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
MASK = b"\x37\xfa\x21\x3d"
HELLO = b"Hello, world!"
UPGRADE_REQUEST = (
    b"GET /echo HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)

#: A marker in a case: wait until all requested replies have arrived.
WAIT = b""

Reply = tuple[int, bytes]


@attrs.frozen
class Case:
    """Frames to send, the replies to them, and the codes of the closing frame that may follow.

    A case that ``fails`` breaks the protocol: the connection may also be dropped, and replies to
    the frames before the bad one need not come. Every other case that does not send a closing frame
    itself (``closes``) ends with one.
    """

    number: str
    sent: Sequence[bytes]
    replies: Sequence[Reply] = ()
    codes: frozenset[int | None] = frozenset({1000})
    fails: bool = False
    closes: bool = False


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0) -> bytes:
    """Encode one masked frame (RFC 6455, 5.2)."""
    head = bytes([fin << 7 | rsv << 4 | opcode])
    size = len(payload)
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 2**16:
        head += struct.pack("!BH", 0x80 | 126, size)
    else:
        head += struct.pack("!BQ", 0x80 | 127, size)
    mask = (MASK * (size // 4 + 1))[:size]
    return head + MASK + bytes(a ^ b for a, b in zip(payload, mask, strict=True))


def close(code: int, reason: bytes = b"") -> bytes:
    return frame(CLOSE, struct.pack("!H", code) + reason)


def fragments(opcode: int, *payloads: bytes) -> list[bytes]:
    """Encode one message, each payload a fragment of it."""
    last = len(payloads) - 1
    return [
        frame(opcode if number == 0 else 0, payload, fin=number == last)
        for number, payload in enumerate(payloads)
    ]


def single(*frames: bytes) -> list[bytes]:
    """Cut frames into single bytes."""
    return [bytes([byte]) for byte in b"".join(frames)]


def broken(number: str, sent: Sequence[bytes], *replies: Reply, code: int = 1002) -> Case:
    return Case(number, sent, replies, frozenset({code}), fails=True)


def echoes() -> Iterator[Case]:
    """1: messages of each size at which the encoding of the length changes."""
    sizes = (0, 125, 126, 127, 128, 65535, 65536)
    for group, opcode, letter in ((1, TEXT, b"*"), (2, BINARY, b"\xfe")):
        for number, size in enumerate(sizes, 1):
            payload = letter * size
            yield Case(f"1.{group}.{number}", [frame(opcode, payload)], [(opcode, payload)])
        data = frame(opcode, letter * 65536)
        pieces = [data[at : at + 997] for at in range(0, len(data), 997)]
        yield Case(f"1.{group}.8", pieces, [(opcode, letter * 65536)])


def control_frames() -> Iterator[Case]:
    """2: pings and pongs."""
    odd = b"\x00\xff\xfe\xfd\xfc\xfb\x00\xff"
    for number, payload in ((1, b""), (2, HELLO), (3, odd), (4, b"\xfe" * 125)):
        yield Case(f"2.{number}", [frame(PING, payload)], [(PONG, payload)])
    yield broken("2.5", [frame(PING, b"\xfe" * 126)])
    yield Case("2.6", single(frame(PING, b"\xfe" * 125)), [(PONG, b"\xfe" * 125)])
    yield Case("2.7", [frame(PONG)])
    yield Case("2.8", [frame(PONG, b"unsolicited")])
    yield Case("2.9", [frame(PONG, b"unsolicited"), frame(PING, b"ping")], [(PONG, b"ping")])
    payloads = [b"payload-%d" % number for number in range(10)]
    pings, pongs = [frame(PING, each) for each in payloads], [(PONG, each) for each in payloads]
    yield Case("2.10", pings, pongs)
    yield Case("2.11", single(*pings), pongs)


def reserved() -> Iterator[Case]:
    """3, 4: reserved bits and opcodes; no reply may come to the ping behind them."""
    ping, hello, echo = frame(PING), frame(TEXT, HELLO), (TEXT, HELLO)
    yield broken("3.1", [frame(TEXT, HELLO, rsv=1)])
    yield broken("3.2", [hello + frame(TEXT, HELLO, rsv=2) + ping], echo)
    yield broken("3.3", [hello, WAIT, frame(TEXT, HELLO, rsv=3), ping], echo)
    yield broken("3.4", single(hello, frame(TEXT, HELLO, rsv=4), ping), echo)
    yield broken("3.5", [frame(BINARY, HELLO, rsv=5)])
    yield broken("3.6", [frame(BINARY, HELLO, rsv=6)])
    yield broken("3.7", [frame(CLOSE, rsv=7)])
    for group, first in ((1, 3), (2, 11)):
        yield broken(f"4.{group}.1", [frame(first)])
        yield broken(f"4.{group}.2", [frame(first + 1, b"reserved opcode payload")])
        yield broken(f"4.{group}.3", [hello, WAIT, frame(first + 2), ping], echo)
        yield broken(f"4.{group}.4", [hello, WAIT, frame(first + 3, HELLO), ping], echo)
        yield broken(f"4.{group}.5", single(hello, frame(first + 4, HELLO), ping), echo)


def fragmentation() -> Iterator[Case]:
    """5: messages in several frames, and control frames between them."""
    one, two = b"fragment1", b"fragment2"
    for number, opcode in ((1, PING), (2, PONG)):
        yield broken(f"5.{number}", [frame(opcode, one, fin=False), frame(0, two)])
    parts, echo = fragments(TEXT, one, two), (TEXT, one + two)
    yield Case("5.3", [b"".join(parts)], [echo])
    yield Case("5.4", parts, [echo])
    yield Case("5.5", single(*parts), [echo])
    parts = [parts[0], frame(PING, b"ping"), parts[1]]
    replies = [(PONG, b"ping"), echo]
    yield Case("5.6", [b"".join(parts)], replies)
    yield Case("5.7", parts, replies)
    yield Case("5.8", single(*parts), replies)
    for number, fin in ((9, True), (12, False)):
        stray = [frame(0, b"nothing to continue", fin=fin), frame(TEXT, HELLO)]
        yield broken(f"5.{number}", [b"".join(stray)])
        yield broken(f"5.{number + 1}", stray)
        yield broken(f"5.{number + 2}", single(*stray))
    again = [frame(0, b"fragment3", fin=False), frame(TEXT, b"fragment4")]
    yield broken("5.15", [*fragments(TEXT, one, two), *again], echo)
    for number, fin in ((16, False), (17, True)):
        stray = [frame(0, one, fin=fin), frame(TEXT, two, fin=False), frame(0, b"fragment3")]
        yield broken(f"5.{number}", stray * 2)
    yield broken("5.18", [frame(TEXT, one, fin=False), frame(TEXT, two)])
    five = fragments(TEXT, *[b"fragment%d" % number for number in range(1, 6)])
    late = [(PONG, b"1"), (PONG, b"2"), (TEXT, b"fragment1fragment2fragment3fragment4fragment5")]
    first, second = [*five[:2], frame(PING, b"1")], [*five[2:4], frame(PING, b"2"), five[4]]
    yield Case("5.19", [b"".join(first), WAIT, b"".join(second)], late)
    yield Case("5.20", [*first, WAIT, *second], late)


#: 6.6, 6.8, 6.10 to 6.21: no UTF-8 (RFC 3629): 5 and 6 bytes, too large, stray or missing
#: continuation, impossible, overlong, surrogates.
NO_UTF8 = """
    ce  cebae1  cebae1bd  cebae1bdb9cf  cebae1bdb9cf83ce  cebae1bdb9cf83cebcce
    f888808080 fc8480808080  f7bfbfbf fbbfbfbfbf fdbfbfbfbfbf  f4908080
    80 bf 80bf 80bf80 80bf80bf 80bf80bf80 80bf80bf80bf
    c020c120c220df20 e020e120ef20 f020f120f720 f820fb20 fc20fd20
    c0 e080 f08080 f8808080 fc80808080 df efbf f7bfbf fbbfbfbf fdbfbfbfbf
    c0e080f08080f8808080fc80808080dfefbff7bfbffbbfbfbffdbfbfbfbf
    fe ff fefeffff
    c0af e080af f08080af f8808080af fc80808080af
    c1bf e09fbf f08fbfbf f887bfbfbf fc83bfbfbfbf
    c080 e08080 f0808080 f880808080 fc8080808080
    eda080 edadbf edae80 edafbf edb080 edbe80 edbfbf
    eda080edb080 eda080edbfbf edadbfedb080 edadbfedbfbf edae80edb080 edae80edbfbf edafbfedb080
    edafbfedbfbf
"""

#: 6.5, 6.7, 6.9, 6.11, 6.22, 6.23: the first and last of each length, non-characters, specials.
UTF8 = """
    68656c6c6f24776f726c64 68656c6c6fc2a2776f726c64 68656c6c6fe282ac776f726c64
    68656c6c6ff0a4ada2776f726c64 cebae1bdb9cf83cebcceb5
    ceba cebae1bdb9 cebae1bdb9cf83 cebae1bdb9cf83cebc
    00 c280 e0a080 f0908080 7f dfbf efbfbf f48fbfbf ed9fbf ee8080 efbfbd
    efbfbe f09fbfbe f1afbfbf f2bfbfbe f3bfbfbf f48fbfbe efbfb9 efbfba efbfbb efbfbc
"""


def texts() -> Iterator[Case]:
    """6: only UTF-8 is a text, wherever it is cut."""
    middle = b"middle frame payload"
    yield Case("6.1.1", [frame(TEXT)], [(TEXT, b"")])
    yield Case("6.1.2", fragments(TEXT, b"", b"", b""), [(TEXT, b"")])
    yield Case("6.1.3", fragments(TEXT, b"", middle, b""), [(TEXT, middle)])
    text = "Hello-µ@ßöäüàá-UTF-8!!".encode()
    kosme = bytes.fromhex("cebae1bdb9cf83cebcceb5")
    yield Case("6.2.1", [frame(TEXT, text)], [(TEXT, text)])
    yield Case("6.2.2", fragments(TEXT, text[:15], text[15:]), [(TEXT, text)])
    for number, each in ((3, text), (4, kosme)):
        pieces = fragments(TEXT, *single(each))
        yield Case(f"6.2.{number}", pieces, [(TEXT, each)])
    bad = partial(broken, code=1007)
    wrong = kosme + b"\xed\xa0\x80edited"
    yield bad("6.3.1", [frame(TEXT, wrong)])
    yield bad("6.3.2", fragments(TEXT, *single(wrong)))
    large = kosme + b"\xf4\x90\x80\x80edited"
    yield bad("6.4.1", fragments(TEXT, kosme, b"\xf4\x90\x80\x80", b"edited"))
    yield bad("6.4.2", fragments(TEXT, large[:12], large[12:13], large[13:]))
    whole = frame(TEXT, large)
    yield bad("6.4.3", [whole[:17], whole[17:21], whole[21:]])
    yield bad("6.4.4", [whole[:18], whole[18:19], whole[19:]])
    for digits in NO_UTF8.split():
        yield bad(f"6.6-21 {digits}", [frame(TEXT, bytes.fromhex(digits))])
    for digits in UTF8.split():
        payload = bytes.fromhex(digits)
        yield Case(f"6.5-23 {digits}", [frame(TEXT, payload)], [(TEXT, payload)])


def closing() -> Iterator[Case]:
    """7: the closing handshake; nothing behind a closing frame is answered."""
    yield Case("7.1.1", [frame(TEXT, HELLO)], [(TEXT, HELLO)])
    for number, behind in ((2, frame(CLOSE)), (3, frame(PING)), (4, frame(TEXT, HELLO))):
        yield Case(f"7.1.{number}", [close(1000) + behind], closes=True)
    first, second = fragments(TEXT, b"fragment1", b"fragment2")
    yield Case("7.1.5", [first + close(1000) + second], closes=True)
    yield Case("7.3.1", [frame(CLOSE)], codes=frozenset({None, 1000}), closes=True)
    yield broken("7.3.2", [frame(CLOSE, b"a")])
    yield Case("7.3.3", [close(1000)], closes=True)
    yield Case("7.3.4", [close(1000, HELLO)], closes=True)
    yield Case("7.3.5", [close(1000, b"*" * 123)], closes=True)
    yield broken("7.3.6", [close(1000, b"*" * 124)])
    bad = bytes.fromhex("cebae1bdb9cf83cebcceb5eda080656469746564")
    yield Case("7.5.1", [close(1000, bad)], codes=frozenset({1002, 1007}), fails=True)
    allowed = (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999)
    for number, code in enumerate(allowed, 1):
        yield Case(f"7.7.{number}", [close(code)], codes=frozenset({1000, code}), closes=True)
    for number, code in enumerate((0, 999, 1004, 1005, 1006, 1016, 1100, 2000, 2999), 1):
        yield broken(f"7.9.{number}", [close(code)])


def automatic_fragmentation() -> Iterator[Case]:
    """10: a long message in frames of 1300 bytes."""
    payload = b"*" * 65536
    pieces = [payload[at : at + 1300] for at in range(0, len(payload), 1300)]
    yield Case("10.1.1", fragments(TEXT, *pieces), [(TEXT, payload)])


CASES = [
    *echoes(),
    *control_frames(),
    *reserved(),
    *fragmentation(),
    *texts(),
    *closing(),
    *automatic_fragmentation(),
]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Send each message back, over WebSocket, as the feed sends its own."""
    stream = scope["extensions"][UPGRADE].take_over()
    async with trio.open_nursery() as nursery:
        request = await wrap_server_stream(nursery, stream)
        socket = await request.accept()
        try:
            while True:
                await socket.send_message(await socket.get_message())
        except ConnectionClosed:
            pass
        nursery.cancel_scope.cancel()
    await stream.aclose()


class Conversation:
    """One connection after its upgrade: what came, whole messages and control frames."""

    def __init__(self, wire: RawWire) -> None:
        self._wire = wire
        self._message: Reply | None = None
        self.replies: list[Reply] = []
        self.code: int | None = None
        self.closed = False

    async def _exactly(self, size: int) -> bytes:
        while len(self._wire._received) < size:
            await self._wire._more()
        data = self._wire._received[:size]
        self._wire._received = self._wire._received[size:]
        return data

    async def read(self) -> None:
        """Read one frame; ConnectionError at the end of the stream."""
        first, size = await self._exactly(2)
        assert not first & 0x70, "a reserved bit"
        assert not size & 0x80, "a server masks nothing"
        if size >= 126:
            size = int.from_bytes(await self._exactly(2 if size == 126 else 8))
        payload, opcode = await self._exactly(size), first & 15
        if opcode == CLOSE:
            assert not self.closed, "a second closing frame"
            self.closed = True
            self.code = int.from_bytes(payload[:2]) if payload else None
        elif opcode >= CLOSE:
            self.replies.append((opcode, payload))
        else:
            kind, before = self._message or (opcode, b"")
            self._message = kind, before + payload
            if first & 0x80:
                self.replies.append(self._message)
                self._message = None


async def run(case: Case, url: str) -> str | None:
    """Return the complaint about the server's side of a case; None if it is right."""
    with await RawWire.connect(url) as wire:
        await wire.send(UPGRADE_REQUEST)
        assert (await wire.answer()).status == 101
        talk = Conversation(wire)
        try:
            for piece in case.sent:
                if piece == WAIT:
                    await talk.read()
                else:
                    await wire.send(piece)
            if not case.fails:
                while len(talk.replies) < len(case.replies):
                    await talk.read()
                if not case.closes:
                    await wire.send(close(1000))
            while True:
                await talk.read()
        except ConnectionError:
            pass  # the server has closed, as it must at the end of each case
        return judge(case, talk)


def judge(case: Case, talk: Conversation) -> str | None:
    said = f"{case.number}: {talk.replies!r:.200}, closed {talk.closed} with {talk.code}"
    expected = list(case.replies)
    if case.fails:
        right = talk.replies == expected[: len(talk.replies)]
        return None if right and (not talk.closed or talk.code in case.codes) else said
    return None if talk.replies == expected and talk.closed and talk.code in case.codes else said


async def test_websocket_cases_of_autobahn() -> None:
    """Origin: ``case1_*`` to ``case7_*`` and ``case10_*`` of the Autobahn test suite."""
    assert len({case.number for case in CASES}) == len(CASES)
    complaints: list[str | None] = []
    async with http_server(True, app=echo) as server:
        for case in CASES:
            with trio.fail_after(30):
                complaints.append(await run(case, server.url))
    assert [each for each in complaints if each] == []
