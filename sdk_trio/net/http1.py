"""HTTP/1.1 on one connection: requests written by hand, answers parsed by httptools.

One exchange at a time, no pipelining. A connection is reused only if both request and answer ended
where their heads announced it. Every other end, including cancellation, closes it without waiting.
So bytes of one answer are never read as the start of the next.
"""

import re
from collections.abc import AsyncIterable, Callable

import httptools
import httpx
import trio

from ..base.http import breaks_value, is_token_bytes
from .messages import (
    AnswerBody,
    Headers,
    NetworkError,
    OurProtocolError,
    PeerProtocolError,
    ReadFailedError,
    ReadTimedOutError,
    Received,
    StaleConnectionError,
    WriteFailedError,
    WriteTimedOutError,
    body_of,
    chunks_of,
    content_length,
    headers_of,
    note_departure,
    target_of,
    timeouts_of,
)
from .socket import BufferedSocket

RECEIVE_BYTES = 64 * 1024
#: The largest head of an answer; servers commonly limit theirs to 8 to 64 KiB. The limit also
#: applies to trailers and to chunk extensions, which the parser would copy.
MAX_HEAD_BYTES = 128 * 1024
#: A body up to this size is sent together with the head, which saves a system call.
JOINED_BODY_BYTES = 16 * 1024

_BAD_TARGET = re.compile(rb"[\x00-\x20\x7f]")


class Http1Connection:
    """One connection that carries one exchange at a time.

    Args:
        wire: the connected socket, owned from now on.
        released: called without arguments and without waiting each time the connection is free for
            the next exchange, or closed.
        created: ``trio.current_time()`` at connecting.
    """

    __slots__ = ("_released", "_wire", "created", "idle_since", "is_closed", "served")

    def __init__(
        self, wire: BufferedSocket, *, released: "Callable[[Http1Connection], None]", created: float
    ) -> None:
        self._wire = wire
        self._released = released
        self.created: float = created
        self.idle_since: float = created
        self.is_closed: bool = False
        self.served: int = 0

    def is_quiet(self) -> bool:
        """Return whether the server has neither closed the idle connection nor sent anything."""
        return self._wire.is_quiet()

    def close(self) -> None:
        """Close at once; idempotent."""
        self.is_closed = True
        self._wire.close()

    def released(self) -> None:
        """Notify the pool that the assigned exchange did not take place."""
        self._released(self)

    async def exchange(self, request: httpx.Request) -> Received:
        """Send ``request`` and return the answer; see :class:`ClientConnection`."""
        timeouts = timeouts_of(request)
        try:
            # Both before ``before_send``: an invalid or already cancelled request certainly did not
            # reach the server.
            head = request_head(request)
            await trio.lowlevel.checkpoint_if_cancelled()
            parse = AnswerParser(is_head=request.method == "HEAD")
            note_departure(request)
            lost = await self._send(request, head, timeouts.write)
            if lost is not None:
                parse.keeps_alive = False
            try:
                while not parse.head_ended:
                    parse.feed(await self._wire.receive(RECEIVE_BYTES, timeouts.read))
            except PeerProtocolError as error:
                if not parse.head_ended:
                    raise
                # The status is valid; the broken body arrived in the same segment by chance.
                self.abandon()
                return parse.answer(request, _BrokenBody(request, error))
            except ReadFailedError as error:
                # After a byte of an answer, or after a wait, the server may have acted on the
                # request.
                if parse.received or isinstance(error, ReadTimedOutError):
                    raise
                # A kept connection that ends without a byte was most likely closed while idle (RFC
                # 9112, 9.3.1 requires clients to expect that).
                if self.served:
                    raise StaleConnectionError(str(lost or error)) from error
                if lost is not None:
                    raise lost from error
                raise
        except BaseException:
            self.close()
            self._released(self)
            raise
        body = _Body(request, self, parse, timeouts.read)
        if parse.ended:
            self.finish(parse)
        return parse.answer(request, body)

    async def _send(
        self, request: httpx.Request, head: bytes, limit: float | None
    ) -> NetworkError | None:
        """Send head and body; return a write error instead of raising it.

        A server that refuses a large body may answer and close before reading all of it: the write
        fails, but the answer can still be received.
        """
        body = body_of(request)
        try:
            if not isinstance(body, bytes):
                await self._wire.send_all(head, limit)
                await self._send_stream(body, content_length(request.headers.raw), limit)
            elif len(body) <= JOINED_BODY_BYTES:
                await self._wire.send_all(head + body, limit)
            else:
                await self._wire.send_all(head, limit)
                await self._wire.send_all(body, limit)
        except WriteTimedOutError:
            raise
        except WriteFailedError as error:
            return error
        return None

    async def _send_stream(
        self, stream: AsyncIterable[bytes], length: int | None, limit: float | None
    ) -> None:
        async with chunks_of(stream, length=length) as chunks:
            async for chunk in chunks:
                if length is None:
                    await self._wire.send_all(b"%x\r\n%b\r\n" % (len(chunk), chunk), limit)
                else:
                    await self._wire.send_all(chunk, limit)
        if length is None:
            await self._wire.send_all(b"0\r\n\r\n", limit)

    async def receive_body(self, parse: "AnswerParser", limit: float | None) -> None:
        """Receive until ``parse`` has part of the body, or its end."""
        try:
            while not parse.chunks and not parse.ended:
                parse.feed(await self._wire.receive(RECEIVE_BYTES, limit))
        except BaseException:
            self.abandon()
            raise
        if parse.ended:
            self.finish(parse)

    def finish(self, parse: "AnswerParser") -> None:
        """Handle the end of the answer: be free for the next exchange, or close."""
        self.served += 1
        if not parse.keeps_alive:
            self.close()
        self._released(self)

    def abandon(self) -> None:
        """Abandon the current exchange."""
        self.close()
        self._released(self)


class _Body(AnswerBody):
    """Reads one answer's body; the connection is abandoned or released exactly once."""

    def __init__(
        self,
        request: httpx.Request,
        connection: Http1Connection,
        parse: "AnswerParser",
        limit: float | None,
    ) -> None:
        super().__init__(request)
        # None once the exchange is over: the connection may then serve another one, which must not
        # be abandoned.
        self._connection = None if parse.ended else connection
        self._parse = parse
        self._limit = limit

    async def receive(self) -> bytes:
        parse = self._parse
        if not parse.chunks and self._connection is not None:
            connection = self._connection
            try:
                await connection.receive_body(parse, self._limit)
            except BaseException:
                self._connection = None
                raise
            if parse.ended:
                self._connection = None
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        data = parse.chunks[0] if len(parse.chunks) == 1 else b"".join(parse.chunks)
        parse.chunks.clear()
        return data

    def abandon(self) -> None:
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None


class _BrokenBody(AnswerBody):
    """The body of an answer with a valid head and an invalid body."""

    def __init__(self, request: httpx.Request, error: PeerProtocolError) -> None:
        super().__init__(request)
        self._error = error

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        raise self._error

    def abandon(self) -> None:
        pass


class AnswerParser:
    """Parses one answer incrementally; httptools calls the ``on_`` methods.

    Args:
        is_head: the answer is to HEAD and has no body, regardless of its headers.
    """

    __slots__ = (
        "_coding",
        "_head_bytes",
        "_is_head",
        "_parser",
        "_until_close",
        "chunks",
        "ended",
        "head_ended",
        "headers",
        "keeps_alive",
        "reason",
        "received",
        "status",
        "version",
    )

    def __init__(self, *, is_head: bool) -> None:
        self._is_head = is_head
        self._coding: bytes | None = None
        self._head_bytes = 0
        self._until_close = False
        self._parser = httptools.HttpResponseParser(self)
        self.headers: Headers = []
        self.chunks: list[bytes] = []
        self.reason: bytes = b""
        self.status: int = 0
        self.version: bytes = b"HTTP/1.1"
        self.received: bool = False
        self.head_ended: bool = False
        self.ended: bool = False
        self.keeps_alive: bool = True

    def answer(self, request: httpx.Request, body: AnswerBody) -> Received:
        """Return the answer to ``request``; its head has been parsed."""
        extensions: dict[str, object] = {"http_version": self.version, "reason_phrase": self.reason}
        return Received(
            self.status,
            headers=self.headers,
            stream=body,
            extensions=extensions,
            request=request,
        )

    def feed(self, data: bytes) -> None:
        """Process received bytes, ``b""`` for the end of the connection; not after ``ended``.

        Raises:
            PeerProtocolError: the answer is not HTTP/1.1, too long, or ends prematurely.
            ReadFailedError: the connection ended without an answer.
        """
        if not data:
            self._feed_end()
            return
        self.received = True
        held = len(self.chunks)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise PeerProtocolError("the server switched protocols without being asked") from None
        except httptools.HttpParserError as error:
            if self.ended:
                self.keeps_alive = False  # garbage after a complete answer does not invalidate it
                return
            raise PeerProtocolError(f"the server's answer is not HTTP/1.1: {error}") from error
        # Refused: without decoding it, the end of the body is unknown (RFC 9112, 6.3).
        if self._coding is not None:
            raise PeerProtocolError(f"the answer has the transfer coding {self._coding!r}")
        if self.ended:
            del self._parser  # its reference to this object would be a cycle per answer
            return
        self._head_bytes = self._head_bytes + len(data) if len(self.chunks) == held else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            part = "trailer" if self.head_ended else "head"
            raise PeerProtocolError(f"the answer's {part} is longer than {MAX_HEAD_BYTES} bytes")

    def _feed_end(self) -> None:
        if not self.received:
            raise ReadFailedError("the server closed the connection without an answer")
        # Only a body without a length ends with the connection (RFC 9112, 6.3); any other answer
        # was truncated.
        if not (self.head_ended and self._until_close):
            raise PeerProtocolError("the server closed the connection before the answer's end")
        self.keeps_alive = False
        self.ended = True

    def on_message_begin(self) -> None:
        """Note another message after the answer: the connection is then not reused."""
        if self.ended:
            self.keeps_alive = False

    def on_status(self, status: bytes) -> None:
        """Keep the reason phrase, unless it belongs to a message after the answer."""
        if not self.head_ended:
            self.reason += status

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, not a trailer."""
        if not self.head_ended:
            # Trailers are dropped: a header after the body must not change the head (RFC 9110,
            # 6.5.1).
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Determine how the body ends, or forget an interim head (1xx)."""
        if self.ended:
            return
        status = self._parser.get_status_code()
        # Any number of interim answers may precede the final one (RFC 9110, 15.2).
        if 100 <= status < 200:
            self.headers = []
            self.reason = b""
            return
        self.status = status
        self.version = b"HTTP/" + self._parser.get_http_version().encode()
        self.head_ended = True
        self.keeps_alive = self.keeps_alive and self._parser.should_keep_alive()
        if self._is_head:
            self.ended = True
        else:
            self._until_close = True
            for name, value in self.headers:
                lower = name.lower()
                if lower == b"content-length":
                    self._until_close = False
                elif lower == b"transfer-encoding":
                    self._until_close = False
                    if value.strip().lower() != b"chunked":
                        self._coding = value  # requests allow only chunked (RFC 9112, 7.4)

    def on_body(self, body: bytes) -> None:
        """Keep part of the body."""
        if self.ended:
            self.keeps_alive = False
        else:
            self.chunks.append(body)

    def on_message_complete(self) -> None:
        """Note the end of the answer, unless the message was an interim one."""
        if self.head_ended:
            self.ended = True


def are_sound(headers: Headers) -> bool:
    """Return whether no name or value contains bytes that an intermediary reads as its end.

    The next reader would see another header, or another message, after a line break in a value.
    """
    for name, value in headers:  # noqa: SIM110 - twice as fast as all(), on every request
        if not is_token_bytes(name) or breaks_value(value):
            return False
    return True


def check_request(method: bytes, target: bytes, headers: Headers) -> None:
    """Refuse a request that the server could read as a different one.

    Raises:
        OurProtocolError: such as a space in the target or a line break in a header.
    """
    if not is_token_bytes(method) or _BAD_TARGET.search(target):
        raise OurProtocolError(f"not a method and target: {method!r} {target!r}")
    if not are_sound(headers):
        # Only names: one of the values is the token.
        names = [name for name, value in headers if not are_sound([(name, value)])]
        raise OurProtocolError(f"invalid bytes in the headers {names!r}")


def request_head(request: httpx.Request) -> bytes:
    """Write the request line and headers; raises :class:`OurProtocolError`."""
    method, target = request.method.encode("ascii"), target_of(request)
    headers = headers_of(request)
    check_request(method, target, headers)
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    lines += [b"%b: %b" % header for header in headers]
    lines.append(b"\r\n")
    return b"\r\n".join(lines)
