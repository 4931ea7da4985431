"""Streamed answers, whose body the caller reads as it arrives: for files of any length."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import cast

import httpx
import trio

from .attempter import CLOSING_SECONDS, broken_off, unread
from .content_coding import TooLargeError
from .errors import without_frames
from .request import Call


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
        with trio.move_on_after(CLOSING_SECONDS, shield=True):  # noqa: ASYNC912 - closing may wait
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
