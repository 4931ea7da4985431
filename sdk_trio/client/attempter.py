"""The innermost layer: one HTTP request and its whole answer, within the attempt's timeout."""

import contextlib
from collections.abc import Callable
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import httpx  # noqa: ASYNC127 - httpx is the public surface, its pool is not used
import trio

from .attempts import AttemptKind, AttemptObserver, AttemptRecord, AttemptResult
from .errors import AttemptTimeoutError, ConnectionFailedError, DeadlineExceededError, mask
from .exchange import Incident, NetworkError
from .request import Call
from .retry import FailureKind
from .transport import ABANDONED, BEFORE_SEND, NotProcessed, TransportClosed

#: How long a connection that is given up may take to say goodbye, in seconds.
CLOSING_SECONDS = 1.0

#: Names under which upstreams send the id of a request.
REQUEST_ID_HEADERS = ("x-request-id", "request-id")

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

#: What an attempt was still without when its time was over.
_WAITED_FOR = {
    FailureKind.NOT_SENT: "no connection",
    FailureKind.NO_CONNECTION_FREE: "none of our connections was free",
}

_Failed = TypeVar("_Failed", bound=ConnectionFailedError)

#: Parsing an address costs more than the rest of a request object; calls repeat addresses.
_parse_url = lru_cache(maxsize=512)(httpx.URL)


class _Abandoned:
    """What is told of an attempt that is given up while it waits, by a transport that tells."""

    __slots__ = ("_call", "incident", "kind")

    def __init__(self, call: Call) -> None:
        self._call = call
        self.kind = FailureKind.UNCONFIRMED
        self.incident: Incident | None = None

    def note(self, incident: Incident | None, was_sent: bool) -> None:
        """Take what the transport knows (``ABANDONED``)."""
        self.incident = incident
        if not was_sent:
            waits = incident is not None
            self.kind = FailureKind.NOT_SENT if waits else FailureKind.NO_CONNECTION_FREE
            self._call.is_unconfirmed = False


class Attempter:
    """Sends one request and reads its answer.

    A transport whose attribute ``tells_before_send`` is true calls the extension ``BEFORE_SEND``
    of a request, without arguments, before anything of it can reach the upstream. So a write that
    never got a connection is known not to have been executed. It calls ``ABANDONED`` when the
    request is cancelled while it waits for a connection, so that it is known what for.

    Args:
        transport: sends it.
        clock: returns the current time in seconds.
        observer: is told when an attempt starts and how it has ended.
        on_head: called with each answer before its body is read; must not raise.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        *,
        clock: Callable[[], float],
        observer: AttemptObserver,
        on_head: Callable[[Call, httpx.Response], None],
    ) -> None:
        self._transport = transport
        self._transport_tells = getattr(transport, "tells_before_send", False)
        self._clock = clock
        self._observer = observer
        self._on_head = on_head

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Make one attempt; return its answer, whatever the status, with the body read.

        The body of a success of a streamed call is left unread. One of another status that breaks
        or takes too long is empty.

        Raises:
            DeadlineExceededError: the call's deadline has come; nothing is sent.
            AttemptTimeoutError: there was no whole answer in time.
            ConnectionFailedError: there will be no whole answer.

        Cancelling abandons the request.
        """
        started_at = self._clock()
        if started_at >= call.deadline:
            raise DeadlineExceededError(
                "the total time is over", method=call.method, path=call.path
            )
        call.attempts += 1
        number = call.attempts
        self._observer.attempt_started(kind)
        request = _request(call)
        response: httpx.Response | None = None
        failure: Exception | None = None
        abandoned = _Abandoned(call)
        self._expect_departure(call, request, abandoned)
        try:
            response = await self._exchange(call, request, started_at, abandoned)
            call.is_unconfirmed = False
        except ConnectionFailedError as error:
            failure = error
            if error.kind is not FailureKind.UNCONFIRMED:
                call.is_unconfirmed = False
            raise
        except Exception as error:
            failure = error
            raise
        finally:
            if self._observer.wants_records:
                self._observer.attempt_ended(
                    _record(call, kind, number, started_at, self._clock(), response, failure)
                )
        return response

    def _expect_departure(self, call: Call, request: httpx.Request, abandoned: _Abandoned) -> None:
        """Note from when on the upstream may execute a write: when it leaves, if we are told."""
        if self._transport_tells:
            request.extensions[ABANDONED] = abandoned.note
            if not call.idempotent:
                request.extensions[BEFORE_SEND] = call.note_departure
        elif not call.idempotent:
            call.note_departure()

    async def _exchange(
        self, call: Call, request: httpx.Request, started_at: float, abandoned: _Abandoned
    ) -> httpx.Response:
        response: httpx.Response | None = None
        limit = started_at + call.attempt_timeout
        with trio.CancelScope(deadline=limit):  # noqa: ASYNC912 - the transport's exchange waits
            try:
                response = await self._transport.handle_async_request(request)
                response.request = request
                self._on_head(call, response)
                if not (call.is_stream and response.is_success):
                    await _read(response)
            except httpx.RequestError as error:
                if response is None or response.is_success:
                    raise failed(error, call) from error
            else:
                return response  # noqa: ASYNC910 - as above
        if response is not None and not response.is_success:
            # The status is answer enough: of a write it tells what became of it.
            return _without_body(response, request)  # noqa: ASYNC910 - as above
        kind = abandoned.kind
        if kind is FailureKind.UNCONFIRMED and not (call.idempotent or call.is_unconfirmed):
            kind = FailureKind.NOT_SENT
        raise _with_incident(
            AttemptTimeoutError(
                f"{_WAITED_FOR.get(kind, 'no answer')} within {call.attempt_timeout:g} s",
                kind=kind,
                method=call.method,
                path=call.path,
            ),
            abandoned.incident,
        )


def _request(call: Call) -> httpx.Request:
    # With a stream, httpx adds no headers of its own: ours are complete, and this costs a tenth.
    request = httpx.Request(
        call.method,
        _parse_url(call.url),
        headers=call.headers,
        stream=httpx.ByteStream(call.content),
    )
    request.read()
    return request


def _without_body(response: httpx.Response, request: httpx.Request) -> httpx.Response:
    headers = [pair for pair in response.headers.raw if pair[0].lower() != b"content-encoding"]
    return httpx.Response(
        response.status_code, headers=headers, request=request, extensions=response.extensions
    )


async def _read(response: httpx.Response) -> None:
    try:
        await response.aread()
    except BaseException:
        # The stream's own method: a response whose closing was itself cancelled counts as closed.
        stream = response.stream
        if isinstance(stream, httpx.AsyncByteStream):
            with trio.move_on_after(CLOSING_SECONDS, shield=True):  # noqa: ASYNC912 - closing may wait
                with contextlib.suppress(httpx.HTTPError):
                    await stream.aclose()
        raise


def failed(error: httpx.RequestError, call: Call) -> ConnectionFailedError:
    """Translate what a transport raised; the token cannot show in the message."""
    kind = _KINDS.get(type(error), FailureKind.UNCONFIRMED)
    text = mask(str(error), call.token) or type(error).__name__
    context: dict[str, Any] = {"kind": kind, "method": call.method, "path": call.path}
    cause = error.__cause__
    incident = cause.incident if isinstance(cause, NetworkError) else None
    if isinstance(error, httpx.TimeoutException):
        return _with_incident(AttemptTimeoutError(text, **context), incident)
    return _with_incident(ConnectionFailedError(text, **context), incident)


def _with_incident(error: _Failed, incident: Incident | None) -> _Failed:
    error.incident = incident
    return error


def request_id_of(response: httpx.Response) -> str | None:
    """Return the upstream's name of the request, None when it gave none."""
    for name in REQUEST_ID_HEADERS:
        value = response.headers.get(name)
        if value is not None:
            return str(value)
    return None


def _record(
    call: Call,
    kind: AttemptKind,
    number: int,
    started_at: float,
    ended_at: float,
    response: httpx.Response | None,
    failure: Exception | None,
) -> AttemptRecord:
    if response is not None:
        result = AttemptResult.ANSWERED
    else:
        result = AttemptResult.CANCELLED if failure is None else AttemptResult.FAILED
    return AttemptRecord(
        method=call.method,
        path=call.path,
        origin=call.origin,
        number=number,
        kind=kind,
        result=result,
        started_at=started_at,
        duration=ended_at - started_at,
        status=None if response is None else response.status_code,
        http_version=None if response is None else response.http_version,
        request_id=None if response is None else request_id_of(response),
        error=None if failure is None else type(failure).__name__,
    )
