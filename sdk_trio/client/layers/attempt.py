"""The innermost layer: one HTTP request and its whole answer, within the attempt's timeout."""

import contextlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeVar

import attrs
import httpx
import trio

from ...net.messages import Incident, NetworkError
from ...net.transport import ABANDONED, BEFORE_SEND, NotProcessed, TransportClosed
from ..call import Call, parsed_url
from ..content_coding import TooLargeError, bound
from ..errors import (
    AttemptTimeoutError,
    CallError,
    ConnectionFailedError,
    UnexpectedAnswerError,
    mask,
    without_frames,
)
from ..retry import FailureKind
from .admission import AttemptKind, AttemptObserver, AttemptResult, CallAttempt
from .deadline import CallCut, CallsUnderWay

#: How long a connection that is given up may take to close, in seconds.
CLOSING_SECONDS = 1.0

#: Names of the header in which upstreams send the id of a request.
REQUEST_ID_HEADERS = ("x-request-id", "request-id")

#: The extension of a response that holds its call.
_CALL = "sdk_trio.call"

_OF_THE_BODY = frozenset({b"content-encoding", b"content-length"})

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

#: The words for what an attempt was waiting for when its time was over.
_WAITED_FOR = {
    FailureKind.NOT_SENT: "no connection",
    FailureKind.NO_CONNECTION_FREE: "none of our connections was free",
}

#: How many bytes of the body of an unsuccessful answer are kept: it holds an explanation, no data.
MAX_ERROR_BYTES = 1_048_576


class _Abandoned:
    """The transport's account of an attempt that was cancelled while it waited.

    It says whether the request may have reached the upstream, and which incident it waited for.
    """

    __slots__ = ("_call", "incident", "kind")

    def __init__(self, call: Call) -> None:
        self._call = call
        self.kind = FailureKind.UNCONFIRMED
        self.incident: Incident | None = None

    def note(self, incident: Incident | None, was_sent: bool) -> None:
        """Note the transport's account (the extension ``ABANDONED``)."""
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
    request is cancelled while it waits for a connection, with the incident that it waited for.

    Args:
        transport: sends it.
        under_way: keeps each attempt, so that closing the client ends it.
        clock: returns the current time in seconds.
        observer: called when an attempt starts and when it has ended.
        on_head: called with each answer before its body is read; must not raise.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        *,
        under_way: CallsUnderWay,
        clock: Callable[[], float],
        observer: AttemptObserver,
        on_head: Callable[[Call, httpx.Response], None],
    ) -> None:
        self._transport = transport
        self._under_way = under_way
        self._transport_tells = getattr(transport, "tells_before_send", False)
        self._clock = clock
        self._observer = observer
        self._on_head = on_head

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Make one attempt; return its answer, whatever the status, with the body read.

        The body of a success of a streamed call is left unread. The body of an answer of another
        status is empty if it breaks or takes too long, and cut if it is too large.

        Raises:
            CallCut: the call's deadline has come, or the client is closed.
            AttemptTimeoutError: there was no whole answer in time.
            ConnectionFailedError: there will be no whole answer.
            UnexpectedAnswerError: there is a success, and its body is too large; or, after a
                write, the body broke: the head has said already that the write was executed.

        Cancelling abandons the request.
        """
        started_at = self._clock()
        if started_at >= call.deadline:
            raise CallCut
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
        except ConnectionFailedError as error:
            failure = error
            # The upstream has not acted on this request, so the write's outcome is known: it has
            # none.
            if error.kind is not FailureKind.UNCONFIRMED:
                call.is_unconfirmed = False
            raise
        except CallCut:
            raise  # the attempt has not failed, it was given up
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
        """Arrange that the call notes the moment from which the upstream may execute a write.

        That is when the request leaves, if the transport reports it, and otherwise now.
        """
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
        failure: httpx.RequestError | None = None
        scope = self._under_way.begin(min(started_at + call.attempt_timeout, call.deadline))
        with scope:
            try:
                response = await self._transport.handle_async_request(request)
                response.request = request
                self._on_head(call, response)
                # A success in the head means that a write was executed, whatever happens to the
                # body: the call is no longer unconfirmed.
                call.head, call.is_unconfirmed = response, False
                await _take_body(response, call)
            except httpx.RequestError as error:
                failure = without_frames(error)
            except TooLargeError as error:
                assert response is not None
                if is_acceptable(response, call):
                    raise unread(response, call, str(error)) from None
                return _with_body(response, error.beginning)
            else:
                return response
            finally:
                self._under_way.end(scope)
        is_last = scope.deadline == call.deadline or self._under_way.is_closed
        if scope.cancelled_caught and is_last:
            raise CallCut
        if response is None:
            if failure is not None:
                raise failed(failure, call) from failure
            raise _unanswered(call, abandoned)
        if not response.is_success:
            # The status alone tells what happened, also to a write.
            return _with_body(response, b"")
        ending = broken_off(failure, response, call)
        if failure is None and isinstance(ending, ConnectionFailedError):
            ending.incident = abandoned.incident
        raise ending from failure


def _request(call: Call) -> httpx.Request:
    # With a stream, httpx adds no headers of its own. Ours are complete, and this way of making a
    # request costs a tenth of the usual one.
    request = _Request(
        call.method,
        parsed_url(call.url),
        headers=call.headers.parsed,
        stream=httpx.ByteStream(call.content),
    )
    request.read()
    return request


class _Request(httpx.Request):
    """A request whose repr has no query, which may hold personal data."""

    def __repr__(self) -> str:
        return f"<request {self.method}>"


def is_acceptable(response: httpx.Response, call: Call) -> bool:
    """Return whether the caller gets ``response`` itself and not an error made of it."""
    return response.is_success or call.accepts_any_status


async def _take_body(response: httpx.Response, call: Call) -> None:
    """Read the body within the call's bound; bound a body that the caller reads itself."""
    acceptable = is_acceptable(response, call)
    limit = call.max_answer_bytes if acceptable else MAX_ERROR_BYTES
    if not response.is_closed:
        bound(response, limit=limit, keeps_beginning=not acceptable)
    if not (call.is_stream and response.is_success):
        await _read(response)
        # A transport in memory hands over a body that was read before it could be bounded.
        if limit is not None and len(response.content) > limit:
            raise TooLargeError(limit, response.content[:limit])


def _unanswered(call: Call, abandoned: _Abandoned) -> AttemptTimeoutError:
    kind = abandoned.kind
    if kind is FailureKind.UNCONFIRMED and not (call.idempotent or call.is_unconfirmed):
        kind = FailureKind.NOT_SENT
    error = AttemptTimeoutError(
        f"{_WAITED_FOR.get(kind, 'no answer')} within {call.attempt_timeout:g} s",
        kind=kind,
        method=call.method,
        path=call.path,
    )
    error.incident = abandoned.incident
    return error


def unread(response: httpx.Response, call: Call, said: str) -> UnexpectedAnswerError:
    """Return the error for a success whose body cannot be read; ``said`` is the reason."""
    message = f"the upstream answered {response.status_code}, and {said}"
    return _of_answer(UnexpectedAnswerError, response, call, message)


def broken_off(
    failure: httpx.RequestError | None, response: httpx.Response, call: Call
) -> CallError:
    """Return the error for a success whose body broke, or came too late without a ``failure``.

    After the head of a success a write has been executed, so the error is not OutcomeUnknownError.
    """
    said = f"its body stopped for {call.attempt_timeout:g} s or took that long"
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
    """Return the error for a body that was still being read when the client was closed."""
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
        path=call.path,
        attempts=call.attempts,
        **context,
    )


def _with_body(response: httpx.Response, content: bytes) -> httpx.Response:
    """Return ``response`` with ``content``, which is not compressed, in place of its body."""
    headers = [pair for pair in response.headers.raw if pair[0].lower() not in _OF_THE_BODY]
    return httpx.Response(
        response.status_code,
        headers=headers,
        content=content,
        request=response.request,
        extensions=response.extensions,
    )


async def _read(response: httpx.Response) -> None:
    try:
        await response.aread()
    except BaseException:
        # The stream is closed, not the response: httpx counts a response as closed even if its
        # closing was cancelled, and would then leave the connection open.
        stream = response.stream
        if isinstance(stream, httpx.AsyncByteStream):
            with trio.move_on_after(CLOSING_SECONDS, shield=True):
                with contextlib.suppress(httpx.HTTPError):
                    await stream.aclose()
        raise


def failed(error: httpx.RequestError, call: Call) -> ConnectionFailedError:
    """Translate a transport's error; the token is masked in its message."""
    kind = _KINDS.get(type(error), FailureKind.UNCONFIRMED)
    text = mask(str(error), call.secrets) or type(error).__name__
    context: dict[str, Any] = {"kind": kind, "method": call.method, "path": call.path}
    timed_out = isinstance(error, httpx.TimeoutException)
    failure = (AttemptTimeoutError if timed_out else ConnectionFailedError)(text, **context)
    failure.incident = _incident_of(error)
    return failure


def _incident_of(error: httpx.RequestError) -> Incident | None:
    cause = error.__cause__
    return cause.incident if isinstance(cause, NetworkError) else None


def request_id_of(response: httpx.Response, call: Call) -> str | None:
    """Return the upstream's id of the request, None when it sent none."""
    for name in REQUEST_ID_HEADERS:
        value = response.headers.get(name)
        if value is not None:
            return mask(str(value), call.secrets)
    return None


@attrs.frozen
class CallFacts:
    """Facts about a call that its answer does not hold: the number of requests, and its id."""

    attempts: int = 1
    request_id: str | None = None


def note_facts(response: httpx.Response, call: Call) -> None:
    """Store the facts on ``response`` for :func:`facts_of`."""
    response.extensions[_CALL] = call


def facts_of(response: httpx.Response) -> CallFacts:
    """Return the facts about the call of ``response``."""
    call = response.extensions.get(_CALL)
    if not isinstance(call, Call):
        return CallFacts()
    return CallFacts(call.attempts, request_id_of(response, call))


def _record(
    call: Call,
    kind: AttemptKind,
    number: int,
    started_at: float,
    ended_at: float,
    response: httpx.Response | None,
    failure: Exception | None,
) -> CallAttempt:
    if response is not None:
        result = AttemptResult.ANSWERED
    else:
        result = AttemptResult.CANCELLED if failure is None else AttemptResult.FAILED
    return CallAttempt(
        method=call.method,
        path=call.path,
        origin=call.origin,
        number=number,
        kind=kind,
        result=result,
        started_at=started_at,
        duration=ended_at - started_at,
        status=getattr(failure, "status", None) if response is None else response.status_code,
        http_version=None if response is None else response.http_version,
        request_id=(
            getattr(failure, "request_id", None)
            if response is None
            else request_id_of(response, call)
        ),
        error=None if failure is None else type(failure).__name__,
    )
