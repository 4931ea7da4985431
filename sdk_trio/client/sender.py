"""What resources need of the client, and what they make of an answer that is not as promised."""

from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Protocol

import httpx
import msgspec

from .errors import CallError
from .operation import PreparedCall


class Sender(Protocol):
    """What resources need of the client: the pipeline, and nothing of what is inside it."""

    async def send(self, call: PreparedCall) -> httpx.Response:
        """Send ``call`` and return its successful answer, whole.

        Raises:
            CallError: anything but a successful answer.
        """
        ...

    def stream(self, call: PreparedCall) -> AbstractAsyncContextManager[httpx.Response]:
        """As :meth:`send`, with a body that is still to be read while the context is open."""
        ...


class UnexpectedAnswerError(CallError):
    """The upstream answered with success, and with a body that is not of the promised form.

    A write *has* been executed. ``body`` holds nothing; ``BoundOperation.raw`` gives the answer.
    """

    exit_code: ClassVar[int] = 1


def decode_json(response: httpx.Response, call: PreparedCall) -> Any:
    """Return the answer's JSON.

    Raises:
        UnexpectedAnswerError: it is none.
    """
    try:
        return msgspec.json.decode(response.content)
    except msgspec.DecodeError as error:
        raise unexpected(call, f"the answer ({response.status_code}) is no JSON") from error


def unexpected(call: PreparedCall, message: str) -> UnexpectedAnswerError:
    """Return the error that says what is wrong with the answer to ``call``."""
    return UnexpectedAnswerError(message, method=call.method, path=call.path)
