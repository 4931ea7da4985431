"""The protocol through which resources send calls, and the reading of JSON answers."""

from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Protocol, TypeVar

import attrs
import httpx  # noqa: ASYNC127 - httpx is the public surface, nothing is sent here
import trio

from .attempter import facts_of
from .errors import UnexpectedAnswerError
from .json_text import PATIENT_BYTES, NotJsonError, read_fast, read_json
from .operation import PreparedCall
from .request import without_path_secrets

Result = TypeVar("Result")


class Sender(Protocol):
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

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.response: httpx.Response | None = None

    async def send(self, call: PreparedCall) -> httpx.Response:
        """Send ``call``; see :class:`Sender`."""
        self.response = await self._sender.send(call)
        return self.response

    def stream(self, call: PreparedCall) -> AbstractAsyncContextManager[httpx.Response]:
        """Stream ``call``; see :class:`Sender`."""
        return self._sender.stream(call)


async def decode_json(response: httpx.Response, call: PreparedCall) -> Any:  # noqa: ASYNC910 - the call before it waited
    """Return the answer's JSON.

    A large text that only the tolerant reader can tell of is read in a thread, so that nobody else
    waits for it; cancelling leaves that thread to its end.

    Raises:
        UnexpectedAnswerError: the answer is no JSON.
    """
    content = response.content
    value, is_read = read_fast(content)
    if is_read:
        return value  # noqa: ASYNC910 - as above
    try:
        if len(content) <= PATIENT_BYTES:
            return read_json(content)  # noqa: ASYNC910 - as above
        return await trio.to_thread.run_sync(read_json, content, abandon_on_cancel=True)
    except NotJsonError as error:
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
