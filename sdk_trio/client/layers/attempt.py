"""The innermost layer: one HTTP request and its complete answer, within the attempt timeout."""

import contextlib
from collections.abc import Callable, Sequence

import httpx
import trio

from ...base.logs import get_logger
from ...net.messages import ABANDONED, BEFORE_SEND, Incident
from ..answers import (
    CLOSING_SECONDS,
    TooLargeError,
    bound,
    broken_off,
    failed,
    is_acceptable,
    request_id_of,
    unread,
)
from ..call import Call, parsed_url
from ..errors import AttemptTimeoutError, ConnectionFailedError, FailureKind, without_frames
from . import (
    AttemptHook,
    AttemptKind,
    AttemptResult,
    CallAttempt,
    CallCut,
    CallLayer,
    CallsInProgress,
    ClientCounters,
)
from .admission import RateGate
from .retry import RetryBudget

logger = get_logger("client")

# They describe the compressed body, which is gone (RFC 9110, 8.4 and 8.6).
_OF_THE_BODY = frozenset({b"content-encoding", b"content-length"})

#: Words for the resource that an attempt was waiting for when it timed out.
_WAITED_FOR = {
    FailureKind.NOT_SENT: "no connection",
    FailureKind.NO_CONNECTION_FREE: "none of our connections was free",
}

#: Bytes that are kept of the body of an unsuccessful answer: it has an explanation, no data.
MAX_ERROR_BYTES = 1_048_576


class _Abandoned:
    """The transport's report about an attempt that was cancelled while it waited.

    It has whether the request may have reached the upstream, and its incident, if any.
    """

    __slots__ = ("_call", "incident", "kind")

    def __init__(self, call: Call) -> None:
        self._call = call
        self.kind = FailureKind.UNCONFIRMED
        self.incident: Incident | None = None

    def note(self, incident: Incident | None, was_sent: bool) -> None:
        """Record the transport's report (the extension ``ABANDONED``)."""
        self.incident = incident
        if not was_sent:
            waits = incident is not None
            self.kind = FailureKind.NOT_SENT if waits else FailureKind.NO_CONNECTION_FREE
            self._call.is_unconfirmed = False


class AttemptLayer(CallLayer):
    """Sends one request and reads its answer.

    A transport whose attribute ``calls_before_send`` is true calls the request extension
    ``BEFORE_SEND``, without arguments, before any of it can reach the upstream. So a write that
    never got a connection certainly was not executed. It calls ``ABANDONED`` if the request is
    cancelled while waiting for a connection, with the incident that it waited for.

    Args:
        transport: sends the request.
        in_progress: registers each attempt, so that closing the client ends it.
        clock: returns the current time in seconds.
        gate: gets each answer before its body is read, for its Retry-After.
        budget: gets the deposit of first attempts.
        counters: counts attempts.
        hooks: called with the record of each finished attempt.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        *,
        in_progress: CallsInProgress,
        clock: Callable[[], float],
        gate: RateGate,
        budget: RetryBudget,
        counters: ClientCounters,
        hooks: Sequence[AttemptHook],
    ) -> None:
        self._transport = transport
        self._under_way = in_progress
        self._transport_reports_send = getattr(transport, "calls_before_send", False)
        self._clock = clock
        self._gate = gate
        self._budget = budget
        self._counters = counters
        self._hooks = hooks

    async def send(self, call: Call, kind: AttemptKind) -> httpx.Response:
        """Make one attempt; return its answer of any status, with the body read.

        The body of a streamed call's success is left unread. The body of a failure is empty if it
        breaks off or times out, and truncated if it is too large.

        Raises:
            CallCut: the call's deadline has passed, or the client is closed.
            AttemptTimeoutError: there was no complete answer in time.
            ConnectionFailedError: the connection failed.
            UnexpectedAnswerError: a success with a too large body; or, for a write, one with a
                broken body: its head already shows that the write was executed.

        Cancellation abandons the request.
        """
        started_at = self._clock()
        if started_at >= call.deadline:
            raise CallCut
        call.attempts += 1
        number = call.attempts
        self._counters.attempts[kind] += 1
        # Retries add no deposit: a budget filled by its own spending never runs dry.
        if kind is AttemptKind.FIRST:
            self._budget.deposit()
        request = _request(call)
        response: httpx.Response | None = None
        failure: Exception | None = None
        abandoned = _Abandoned(call)
        self._expect_departure(call, request, abandoned)
        try:
            response = await self._exchange(call, request, started_at, abandoned)
        except ConnectionFailedError as error:
            failure = error
            # The upstream has not acted on this request, so the write's outcome is known.
            if error.kind is not FailureKind.UNCONFIRMED:
                call.is_unconfirmed = False
            raise
        except CallCut:
            raise  # the attempt did not fail, it was cancelled
        except Exception as error:
            failure = error
            raise
        finally:
            if self._hooks:
                self._call_hooks(
                    _record(call, kind, number, started_at, self._clock(), response, failure)
                )
        return response

    def _call_hooks(self, record: CallAttempt) -> None:
        for hook in self._hooks:
            try:
                hook(record)
            except Exception as error:  # it does not affect the call
                logger.warning("client.hook_failed", error=type(error).__name__, exc_info=error)

    def _expect_departure(self, call: Call, request: httpx.Request, abandoned: _Abandoned) -> None:
        """Record the moment from which the upstream may execute a write.

        That is when the request is sent, if the transport reports it, and otherwise now.
        """
        # A user's transport, such as a mock, may not report when a request is sent; a write then
        # counts as sent from the start, the safe assumption.
        if self._transport_reports_send:
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
                self._gate.note(call, response)
                # The head of a success means that a write was executed, whatever happens to the
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
        # One scope has two deadlines. The one that passed decides whether another attempt can
        # follow.
        is_last = scope.deadline == call.deadline or self._under_way.is_closed
        if scope.cancelled_caught and is_last:
            raise CallCut
        if response is None:
            if failure is not None:
                raise failed(failure, call) from failure
            raise _unanswered(call, abandoned)
        if not response.is_success:
            # The status is enough to know the outcome, even of a write.
            return _with_body(response, b"")
        ending = broken_off(failure, response, call)
        if failure is None and isinstance(ending, ConnectionFailedError):
            ending.incident = abandoned.incident
        raise ending from failure


def _request(call: Call) -> httpx.Request:
    # With a stream, httpx adds no headers. Ours are complete, and a request built this way costs a
    # tenth.
    request = _Request(
        call.method,
        parsed_url(call.url),
        headers=call.headers.parsed,
        stream=httpx.ByteStream(call.content or b""),
    )
    request.read()
    return request


class _Request(httpx.Request):
    """A request whose repr omits the query, which may contain personal data."""

    def __repr__(self) -> str:
        return f"<request {self.method}>"


async def _take_body(response: httpx.Response, call: Call) -> None:
    """Read the body within the call's limit; limit a body that the caller reads itself."""
    acceptable = is_acceptable(response, call)
    limit = call.max_answer_bytes if acceptable else MAX_ERROR_BYTES
    if not response.is_closed:
        bound(response, limit=limit, keeps_beginning=not acceptable)
    if not (call.is_stream and response.is_success):
        await _read(response)
        # An in-memory transport returns a body that was read before it could be limited.
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
        path=call.shown_path,
    )
    error.incident = abandoned.incident
    return error


def _with_body(response: httpx.Response, content: bytes) -> httpx.Response:
    """Return ``response`` with the uncompressed ``content`` as its body."""
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
        # Close the stream, not the response: httpx counts a response as closed even if its closing
        # was cancelled, and would leave the connection open.
        stream = response.stream
        if isinstance(stream, httpx.AsyncByteStream):
            with trio.move_on_after(CLOSING_SECONDS, shield=True):
                with contextlib.suppress(httpx.HTTPError):
                    await stream.aclose()
        raise


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
        path=call.shown_path,
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
