"""Answers of the upstream: their meaning for the call, and the bounded reading of their bodies.

A success whose body breaks off, is too large or has an unexpected form has its own error: its head
shows that a write was executed, which no error may hide. Every text is masked before it is put into
a message.
"""

import contextlib
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

import httpx
import trio

from ..base.executor import run_in_thread
from ..base.retry_after import parse_retry_after
from ..net.messages import Incident, NetworkError, NotProcessed, TransportClosed
from .call import Call
from .errors import (
    ApiError,
    AttemptTimeoutError,
    CallError,
    ConnectionFailedError,
    FailureKind,
    OutcomeUnknownError,
    UnexpectedAnswerError,
    api_error,
    mask,
    without_frames,
)
from .json_text import PATIENT_BYTES, UnreadableJsonError, read_fast, read_json

# Bodies are decompressed within a limit (RFC 9110, 8.4). httpx's decoders return all output of a
# chunk, however much: 600 KiB of gzip can expand to 600 MiB.

#: The most bytes of one decompression step, so that the limit is checked in between.
_STEP = 65_536

#: The most nested codings. Servers use one; each further one multiplies the expansion.
_MOST_CODINGS = 3

_KNOWN = frozenset({"gzip", "x-gzip", "deflate"})
_GZIP_MAGIC = b"\x1f"
_ZLIB_HEAD_BYTES = 2


class TooLargeError(Exception):
    """A body exceeds its limit; ``beginning`` has the bytes up to it, if requested."""

    def __init__(self, limit: int, beginning: bytes) -> None:
        self.limit = limit
        self.beginning = beginning
        super().__init__(f"the body has more than {limit} bytes")


class BoundedBody:
    """Decompresses one body incrementally, and counts it.

    Args:
        codings: the values of ``Content-Encoding``, the outermost last. Only ``gzip`` and
            ``deflate`` are known; requests accept no others.
        limit: bytes of the body, compressed and decompressed; None for no limit.
        keeps_beginning: the error contains the bytes up to the limit.

    ``is_coded`` is whether there is anything to decompress.
    """

    def __init__(
        self, codings: Iterable[str], *, limit: int | None, keeps_beginning: bool = False
    ) -> None:
        names = [name for coding in codings if (name := coding.lower()) not in ("", "identity")]
        self._refusal = _refusal(names)
        self.is_coded: bool = bool(names)
        # In reverse: the header lists the codings in the order applied (RFC 9110, 8.4).
        self._layers = [_Zlib(is_gzip=name != "deflate") for name in reversed(names)]
        self._limit = limit
        self._received = 0
        self._decoded = 0
        self._kept: list[bytes] | None = [] if keeps_beginning else None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed ``data``, in chunks of up to 64 KiB if it is compressed.

        Raises:
            TooLargeError: the body exceeds the bound.
            httpx.DecodingError: it is not compressed as declared.
        """
        if self._refusal:
            raise httpx.DecodingError(self._refusal)
        self._received += len(data)
        # The compressed size is limited as well, because endless empty gzip members decompress to
        # nothing. Incompressible data grow slightly when compressed, so that limit is wider.
        if self._layers:
            self._check(self._received - self._received // 8 - 1024)
        pieces: Iterator[bytes] = iter((data,))
        for layer in self._layers:
            pieces = layer.inflate(pieces)
        fault = ""
        try:
            for piece in pieces:
                self.count(piece)
                yield piece
        except zlib.error as error:
            fault = str(error)
        if fault:
            raise httpx.DecodingError(f"the answer is not compressed correctly: {fault}")

    def count(self, piece: bytes) -> None:
        """Count a chunk of the uncompressed or decompressed body.

        Raises:
            TooLargeError: the body exceeds the bound.
        """
        self._decoded += len(piece)
        if self._kept is not None:
            self._kept.append(piece)
        self._check(self._decoded)

    def end(self) -> None:
        """Check the body's end.

        Raises:
            httpx.DecodingError: the body ended before the compressed data did.
        """
        # An empty body has no compressed data to end, whatever its head declares.
        if self._received and not all(layer.has_ended for layer in self._layers):
            raise httpx.DecodingError("the answer ends before its compressed data do")

    def _check(self, size: int) -> None:
        if self._limit is not None and size > self._limit:
            raise TooLargeError(self._limit, b"".join(self._kept or ())[: self._limit])


class BoundedStream(httpx.AsyncByteStream):
    """The stream of a body, decompressed by ``body``; its own iterator.

    Reading raises the errors of :class:`BoundedBody` and of the stream itself.
    """

    def __init__(self, stream: httpx.AsyncByteStream, body: BoundedBody) -> None:
        self._stream = stream
        self._parts = aiter(stream)
        self._body = body
        self._pieces: Iterator[bytes] = iter(())

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._body.is_coded:
            data = await anext(self._parts)
            self._body.count(data)
            return data
        piece = next(self._pieces, None)
        if piece is not None:
            # One chunk can decompress to a thousand; the checkpoint lets other tasks run.
            await trio.lowlevel.checkpoint()
            return piece
        while piece is None:
            try:
                data = await anext(self._parts)
            except StopAsyncIteration:
                self._body.end()
                raise
            self._pieces = self._body.feed(data)
            piece = next(self._pieces, None)
        return piece

    async def aclose(self) -> None:
        """Close the stream and its iterator, because a generator would hold the connection."""
        close = getattr(self._parts, "aclose", None)
        if close is not None:
            await close()
        await self._stream.aclose()


def bound(response: httpx.Response, *, limit: int | None, keeps_beginning: bool = False) -> None:
    """Decompress the unread body of ``response`` within a limit when it is read.

    The headers that describe a compressed body are removed, so that httpx does not decompress it
    again. An uncompressed body with a declared length within the limit passes unchanged: the
    connection checks its length.
    """
    codings: list[str] = []
    length: int | None = None
    for key, value in response.headers.raw:  # each answer passes here: two lookups take longer
        lower = key.lower()
        if lower == b"content-length" and value.isdigit():
            length = int(value)
        elif lower == b"content-encoding":
            codings = response.headers.get_list("content-encoding", split_commas=True)
    if not codings and (limit is None or (length is not None and length <= limit)):
        return
    body = BoundedBody(codings, limit=limit, keeps_beginning=keeps_beginning)
    stream = response.stream
    if isinstance(stream, httpx.AsyncByteStream):
        response.stream = BoundedStream(stream, body)
    if codings:
        for name in ("content-encoding", "content-length"):
            response.headers.pop(name, None)


def _refusal(codings: list[str]) -> str:
    unknown = [coding for coding in codings if coding not in _KNOWN]
    if unknown:
        return f"the answer has the coding {unknown[0]!r}, which was not requested"
    return f"the answer has {len(codings)} codings" if len(codings) > _MOST_CODINGS else ""


class _Zlib:
    """One coding. ``deflate`` is zlib's format; some senders omit zlib's header."""

    def __init__(self, *, is_gzip: bool) -> None:
        self._is_gzip = is_gzip
        self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 16 if is_gzip else zlib.MAX_WBITS)
        self._has_begun = is_gzip
        self._head = b""

    @property
    def has_ended(self) -> bool:
        return self._inflater.eof

    def inflate(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for data in pieces:
            yield from self._inflate(data)

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflater.eof:
                # A gzip file may have several members (RFC 1952, 2.2); other data after the end is
                # padding, which every reader ignores.
                if not (self._is_gzip and data.startswith(_GZIP_MAGIC)):
                    return
                self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)
            piece = self._begin(data) if not self._has_begun else self._step(data)
            yield piece
            # After a full step zlib may hold more output, although it has consumed all input.
            while not self._inflater.eof and (
                self._inflater.unconsumed_tail or len(piece) == _STEP
            ):
                piece = self._step(self._inflater.unconsumed_tail)
                yield piece
            data = self._inflater.unused_data

    def _begin(self, data: bytes) -> bytes:
        self._head += data
        if len(self._head) < _ZLIB_HEAD_BYTES:
            return b""  # too short to detect a header
        self._has_begun = True
        try:
            return self._step(self._head)
        except zlib.error:
            # Raw deflate. RFC 9110 (8.4.1.2) requires zlib's format and notes that some senders
            # omit its header.
            self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
            return self._step(self._head)
        finally:
            self._head = b""

    def _step(self, data: bytes) -> bytes:
        return self._inflater.decompress(data, _STEP)


#: The longest time that an abandoned connection may take to close, in seconds.
CLOSING_SECONDS = 1.0

#: Server errors that a second attempt would get again: not implemented, HTTP version not supported,
#: circular negotiation, endless loop, missing extension, and the login page of a network.
_LASTING = frozenset({501, 505, 506, 508, 510, 511})

#: Answers after which the same request may succeed. All other server errors are included, also
#: unregistered ones: proxies and CDNs answer 520 to 530 if the upstream is unavailable.
RETRYABLE_STATUSES = frozenset({408, 429, *range(500, 600)}) - _LASTING

TOO_MANY_REQUESTS = 429

#: Names of the header for the upstream's request id.
REQUEST_ID_HEADERS = ("x-request-id", "request-id")

#: The extension of a streamed response that has its call.
_CALL = "sdk_trio.call"

_KINDS: MappingProxyType[type[Exception], FailureKind] = MappingProxyType(
    {
        httpx.ConnectError: FailureKind.NOT_SENT,
        httpx.ConnectTimeout: FailureKind.NOT_SENT,
        httpx.PoolTimeout: FailureKind.NO_CONNECTION_FREE,
        NotProcessed: FailureKind.NOT_PROCESSED,
        TransportClosed: FailureKind.REFUSED,
        httpx.UnsupportedProtocol: FailureKind.REFUSED,
        httpx.LocalProtocolError: FailureKind.REFUSED,
    }
)


def is_acceptable(response: httpx.Response, call: Call) -> bool:
    """Return whether the caller gets ``response`` itself instead of an error."""
    return response.is_success or call.accepts_any_status


def retry_after_of(response: httpx.Response, *, now: float) -> float | None:
    """Return the wait in seconds that ``response`` requests, or None.

    ``now`` is Unix time, for a date in an answer without ``Date``.
    """
    headers = response.headers
    asked = headers.get("retry-after")
    return None if asked is None else parse_retry_after(asked, date=headers.get("date"), now=now)


def request_id_of(response: httpx.Response, call: Call) -> str | None:
    """Return the upstream's request id, or None."""
    for name in REQUEST_ID_HEADERS:
        value = response.headers.get(name)
        if value is not None:
            return mask(str(value), call.secrets)
    return None


def refused(response: httpx.Response, call: Call, now: float) -> ApiError:
    """Return the error for an answer that is not a success; ``now`` is Unix time."""
    return api_error(
        status=response.status_code,
        content=response.content,
        method=call.method,
        path=call.shown_path,
        attempts=call.attempts,
        request_id=request_id_of(response, call),
        retry_after=retry_after_of(response, now=now),
        secrets=call.secrets,
    )


def outcome_unknown(call: Call) -> OutcomeUnknownError:
    """Return the error for a write that was sent and not answered."""
    return OutcomeUnknownError(
        "the request was sent, but no answer arrived: it is unknown whether it took effect",
        method=call.method,
        path=call.shown_path,
    )


def failed(error: httpx.RequestError, call: Call) -> ConnectionFailedError:
    """Translate a transport's error; the token is masked in its message."""
    kind = _KINDS.get(type(error), FailureKind.UNCONFIRMED)
    text = mask(str(error), call.secrets) or type(error).__name__
    context: dict[str, Any] = {"kind": kind, "method": call.method, "path": call.shown_path}
    timed_out = isinstance(error, httpx.TimeoutException)
    failure = (AttemptTimeoutError if timed_out else ConnectionFailedError)(text, **context)
    failure.incident = _incident_of(error)
    return failure


def unread(response: httpx.Response, call: Call, said: str) -> UnexpectedAnswerError:
    """Return the error for a success whose body cannot be read; ``said`` is the reason."""
    message = f"the upstream answered {response.status_code}, and {said}"
    return _of_answer(UnexpectedAnswerError, response, call, message)


def broken_off(
    failure: httpx.RequestError | None, response: httpx.Response, call: Call
) -> CallError:
    """Return the error for a success whose body broke off, or timed out without a ``failure``.

    The head of a success shows that a write was executed, so the error is not OutcomeUnknownError.
    """
    said = f"its body stalled for {call.attempt_timeout:g} s or took that long"
    if failure is not None:
        said = mask(str(failure), call.secrets) or type(failure).__name__
    if not call.idempotent:
        return unread(response, call, said)
    if failure is None:
        return _of_answer(AttemptTimeoutError, response, call, said, kind=FailureKind.UNCONFIRMED)
    kind = _KINDS.get(type(failure), FailureKind.UNCONFIRMED)
    error = _of_answer(ConnectionFailedError, response, call, said, kind=kind)
    error.incident = _incident_of(failure)
    return error


def broken_by_closing(response: httpx.Response) -> ConnectionFailedError:
    """Return the error for a body that was being read when the client was closed."""
    said, call = (
        "the client was closed before the whole answer was read",
        response.extensions[_CALL],
    )
    return _of_answer(ConnectionFailedError, response, call, said, kind=FailureKind.REFUSED)


E = TypeVar("E", bound=CallError)


def _of_answer(
    error: type[E], response: httpx.Response, call: Call, message: str, **context: Any
) -> E:
    return error(
        message,
        status=response.status_code,
        request_id=request_id_of(response, call),
        method=call.method,
        path=call.shown_path,
        attempts=call.attempts,
        **context,
    )


def _incident_of(error: httpx.RequestError) -> Incident | None:
    cause = error.__cause__
    return cause.incident if isinstance(cause, NetworkError) else None


async def decode_json(response: httpx.Response, call: Call) -> Any:
    """Return the answer's JSON.

    A large text that only the tolerant reader can decide about is read in a thread, so that it
    blocks no task; cancellation abandons that thread.

    Raises:
        UnexpectedAnswerError: the answer is not JSON.
    """
    content = response.content
    value, is_read = read_fast(content)
    if is_read:
        return value
    try:
        if len(content) <= PATIENT_BYTES:
            return read_json(content)
        return await run_in_thread(read_json, content, abandon_on_cancel=True)
    except UnreadableJsonError as error:
        fault = str(error)
    finally:
        del content  # error reports include variables
    raise unexpected(call, f"the answer ({response.status_code}) is not JSON: {fault}", response)


def unexpected(
    call: Call, message: str, response: httpx.Response, *, content: bytes | None = None
) -> UnexpectedAnswerError:
    """Return the error for an answer to ``call`` of an unexpected form.

    It carries the answer, because a write cannot be repeated to get it again. ``content`` replaces
    a body that was read as a stream.
    """
    body = response.content if content is None else content
    return _of_answer(UnexpectedAnswerError, response, call, message, content=body)


class ResponseStream(AbstractAsyncContextManager[httpx.Response]):
    """``async with client.stream(...) as response``: the head has arrived, the body has not.

    Args:
        call: the call.
        send: sends it and returns once the head of a success has arrived.

    Entering raises the errors of a call. While the body is read, each chunk must arrive within the
    attempt timeout, or :class:`AttemptTimeoutError` is raised; a broken connection raises
    :class:`ConnectionFailedError`. Neither is retried. The total time ends with the head. Exiting
    closes the answer, read or not, and waits for at most a second.
    """

    def __init__(self, call: Call, send: Callable[[Call], Awaitable[httpx.Response]]) -> None:
        self._call = call
        self._send = send
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> httpx.Response:
        response = await self._send(self._call)
        response.extensions[_CALL] = self._call
        self._response = response
        if not response.is_closed:
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _TimedBody(response.stream, response, self._call)
        return response

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._response is not None
        with trio.move_on_after(CLOSING_SECONDS, shield=True):
            with contextlib.suppress(httpx.HTTPError):
                await self._response.aclose()


class _TimedBody(httpx.AsyncByteStream):
    """A body whose every chunk must arrive within the timeout; its own iterator."""

    def __init__(self, stream: httpx.AsyncByteStream, response: httpx.Response, call: Call) -> None:
        self._stream = stream
        self._parts = aiter(stream)
        self._response = response
        self._call = call

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        call = self._call
        fault = ""
        try:
            with trio.move_on_after(call.attempt_timeout):
                return await anext(self._parts)
        except (httpx.DecodingError, TooLargeError) as error:
            fault = str(error)
        except httpx.RequestError as error:
            raise broken_off(error, self._response, call) from without_frames(error)
        if fault:
            raise unread(self._response, call, fault)
        raise broken_off(None, self._response, call)

    async def aclose(self) -> None:
        # A stream's iterator is usually a generator, which holds the connection until it is closed.
        close = getattr(self._parts, "aclose", None)
        if close is not None:
            await close()
        await self._stream.aclose()
