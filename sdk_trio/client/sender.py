"""The protocol through which resources send calls, and the reading of JSON answers."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast

import attrs
import httpx
import trio

from .call import Call, without_path_secrets
from .content_coding import TooLargeError
from .errors import UnexpectedAnswerError, without_frames
from .json_text import PATIENT_BYTES, UnreadableJsonError, read_fast, read_json
from .layers.attempt import CLOSING_SECONDS, broken_off, facts_of, unread
from .operation import PreparedCall

Result = TypeVar("Result")


class OperationSender(Protocol):
    """The part of the client that resources use: it sends calls."""

    async def send(self, call: PreparedCall) -> httpx.Response:
        """Send ``call`` and return its successful answer, whole.

        Raises:
            CallError: anything but a successful answer.
        """
        ...

    def stream(self, call: PreparedCall) -> AbstractAsyncContextManager[httpx.Response]:
        """Send ``call`` as :meth:`send` does; the body is read while the context is open."""
        ...


@attrs.frozen
class WithResponse(Generic[Result]):
    """An operation's result, and the answer that it was read from, with status and headers."""

    result: Result
    response: httpx.Response


class Recording:
    """A sender that remembers the last answer.

    Args:
        sender: sends.
    """

    def __init__(self, sender: OperationSender) -> None:
        self._sender = sender
        self.response: httpx.Response | None = None

    async def send(self, call: PreparedCall) -> httpx.Response:
        """Send ``call``; see :class:`OperationSender`."""
        self.response = await self._sender.send(call)
        return self.response

    def stream(self, call: PreparedCall) -> AbstractAsyncContextManager[httpx.Response]:
        """Stream ``call``; see :class:`OperationSender`."""
        return self._sender.stream(call)


async def decode_json(response: httpx.Response, call: PreparedCall) -> Any:
    """Return the answer's JSON.

    A large text that only the tolerant reader can tell of is read in a thread, so that nobody else
    waits for it; cancelling leaves that thread to its end.

    Raises:
        UnexpectedAnswerError: the answer is no JSON.
    """
    content = response.content
    value, is_read = read_fast(content)
    if is_read:
        return value
    try:
        if len(content) <= PATIENT_BYTES:
            return read_json(content)
        return await trio.to_thread.run_sync(read_json, content, abandon_on_cancel=True)
    except UnreadableJsonError as error:
        fault = str(error)
    finally:
        del content  # reports of a failure show variables
    raise unexpected(call, f"the answer ({response.status_code}) is no JSON: {fault}", response)


def unexpected(
    call: PreparedCall, message: str, response: httpx.Response, *, content: bytes | None = None
) -> UnexpectedAnswerError:
    """Return the error for an answer to ``call`` that has not the promised form.

    It carries the answer, because a write cannot be repeated to get it again. ``content`` replaces
    a body that was read as a stream.
    """
    facts = facts_of(response)
    return UnexpectedAnswerError(
        message,
        method=call.method,
        path=without_path_secrets(call.path),
        status=response.status_code,
        attempts=facts.attempts,
        request_id=facts.request_id,
        content=response.content if content is None else content,
    )


class ResponseStream(AbstractAsyncContextManager[httpx.Response]):
    """``async with client.stream(...) as response``: the head is there, the body is to be read.

    Args:
        call: the call.
        send: sends it and returns once the head of a success is there.

    Entering raises what a call raises. While the body is read, each part has to come within the
    attempt's timeout: :class:`AttemptTimeoutError`, and a connection that breaks is a
    :class:`ConnectionFailedError`; neither is tried again. The total time ends with the head.
    Leaving closes the answer, read or not, and never waits for more than a second.
    """

    def __init__(self, call: Call, send: Callable[[Call], Awaitable[httpx.Response]]) -> None:
        self._call = call
        self._send = send
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> httpx.Response:
        response = await self._send(self._call)
        self._response = response
        if not response.is_closed:
            stream = cast("httpx.AsyncByteStream", response.stream)
            response.stream = _TimedBody(stream, response, self._call)
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
    """A body whose every part has to come within the timeout; it is its own iterator."""

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
        # The iterator of a stream is usually a generator, which holds the connection until it is
        # closed.
        close = getattr(self._parts, "aclose", None)
        if close is not None:
            await close()
        await self._stream.aclose()
