"""One request and its answer on an HTTP/1.1 connection, as ASGI messages."""

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import trio

from ..base.asgi import SHORTCUT, Whole
from .answer_head import AnswerError, AnswerHead, Framing, answer_head, informational
from .chunked import ChunkedBody
from .deadline_keeper import Expiry
from .limits import Expired
from .request_head import RequestError, RequestHead

if TYPE_CHECKING:
    from .fast_path import Connection

_DISCONNECT = {"type": "http.disconnect"}


class Exchange:
    """Gives the application its request and sends its answer.

    ``begun``: the head of the answer has been sent; ``answered``: all of it.
    After :meth:`finish`: ``closes`` says that the connection ends, ``unread`` that parts of the
    body may still arrive, ``error`` is the refusal to send if the application has not answered.
    """

    __slots__ = (
        "_answer",
        "_body_ended",
        "_chunked",
        "_connection",
        "_head",
        "_left",
        "_patience",
        "_to_send",
        "_waiting_for_continue",
        "answered",
        "begun",
        "error",
    )

    def __init__(self, connection: "Connection", head: RequestHead) -> None:
        self._connection = connection
        self._head = head
        self._left = head.length
        self._chunked = ChunkedBody() if head.length is None else None
        self._waiting_for_continue = head.expects_continue
        self._patience = connection.limits.body_seconds
        self._body_ended = False  # the application has received all of it
        self._answer: AnswerHead | None = None
        self.begun = False
        self.answered = False
        self._to_send = 0
        self.error: RequestError | None = None

    def scope(self) -> dict[str, Any]:
        """Return the ASGI scope, with the same values as hypercorn's."""
        head = self._head
        path, _, query = head.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "http_version": head.version,
            "method": head.method,
            "scheme": self._connection.scheme,
            "path": unquote(path.decode("ascii")) if b"%" in path else path.decode("ascii"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": head.headers,
            "client": self._connection.client,
            "server": self._connection.server,
            "state": {},
            "extensions": {SHORTCUT: self},
        }

    @property
    def expiry(self) -> Expiry:
        """The deadline that the application can set for itself."""
        return self._connection.expiry

    # -- the request -------------------------------------------------------------------------

    def take_body(self) -> bytes | None:
        """Return the whole body if all of it has arrived and none was received; else None."""
        left = self._left
        if self._body_ended or left is None or len(self._connection.buffer) < left:
            return None
        self._body_ended = True
        self._left = 0
        return self._connection.take(left) if left else b""

    async def receive(self) -> Mapping[str, Any]:
        """Return the next part of the body, as ASGI's ``receive``.

        After the body it waits until the client has left or the answer has been sent, and returns
        ``http.disconnect``.
        """
        body = self.take_body()
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        if self._gone:
            await trio.lowlevel.checkpoint()
            return _DISCONNECT
        if self._body_ended:
            return await self._wait_for_end()
        try:
            return await self._receive_part()
        except RequestError as error:
            self.error = error
        except OSError:
            self._connection.ended = True
        await trio.lowlevel.checkpoint()
        return _DISCONNECT

    @property
    def _gone(self) -> bool:
        return self.answered or self._connection.ended or self.error is not None

    async def _receive_part(self) -> Mapping[str, Any]:
        connection = self._connection
        # 100 Continue is sent when the application asks for the body, and not before: a refusal on
        # the headers alone then saves the client from sending it (RFC 9110, 10.1.1).
        if self._waiting_for_continue and self._answer is None and not connection.buffer:
            await connection.send(informational(100))
        self._waiting_for_continue = False
        while True:
            part = self._decode()
            if part or self._body_ended:
                return {"type": "http.request", "body": part, "more_body": not self._body_ended}
            more = await self._read_more()
            if self.answered:
                return _DISCONNECT
            if not more:
                raise RequestError(400, "the body is not complete")

    async def _read_more(self) -> bool:
        """Wait for more of the body, within the time that all waits for it may take together.

        The time that the application takes between two waits does not count against the client.
        """
        connection = self._connection
        begun = connection.now
        connection.read_deadline = begun + self._patience
        try:
            return await connection.read_ahead()
        except Expired:
            if self.answered:
                return False
            raise RequestError(408, "the body took too long") from None
        finally:
            connection.read_deadline = inf
            self._patience -= connection.now - begun

    def _decode(self) -> bytes:
        """Take the part of the body that is in the buffer."""
        connection = self._connection
        if self._chunked is None:
            assert self._left is not None  # without chunks the head has said the length
            part = connection.take(self._left)
            self._left -= len(part)
            self._body_ended = not self._left
            return part
        part = self._chunked.feed(connection.take(len(connection.buffer)))
        if self._chunked.complete:
            self._body_ended = True
            self._left = 0
            connection.give_back(self._chunked.rest)
        return part

    async def _wait_for_end(self) -> Mapping[str, Any]:
        connection = self._connection
        while not self._gone:
            if len(connection.buffer) >= connection.limits.read_bytes:
                # Pipelined requests fill the buffer. Reading on would let one client take memory
                # without bound, so its end cannot be seen; look again after the next sweep.
                await trio.sleep(connection.limits.sweep_seconds)
                continue
            try:
                if not await connection.read_ahead():
                    break
            except Expired:
                continue
            except OSError:
                connection.ended = True
        return _DISCONNECT

    # -- the answer --------------------------------------------------------------------------

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send one message, as ASGI's ``send``.

        The head is kept until the first part of the body, so that both are one system call.

        Raises:
            AnswerError: the message does not fit here, or cannot be sent.
        """
        kind = message["type"]
        if kind == "http.response.start" and self._answer is None:
            status = int(message["status"])
            headers = message.get("headers", ())
            if 100 <= status < 200 and status != 101:
                if self._head.version == "1.1":
                    await self._connection.send(informational(status, headers))
                return
            self._waiting_for_continue = False
            self._answer = answer_head(self._head, status, headers, close=self._must_close())
            self._to_send = self._answer.length
        elif kind == "http.response.body" and self._answer is not None and not self.answered:
            more = bool(message.get("more_body"))
            data = self._frame(self._answer, bytes(message.get("body", b"")), more)
            self.answered = not more
            if data:
                await self._connection.send(data)
        elif not self.answered:
            raise AnswerError(f"{kind} does not fit here")

    async def answer(  # noqa: ASYNC910 - as receive
        self, answer: Whole
    ) -> None:
        """Send status, headers and body: what two messages would do, in a third of the time.

        Raises:
            AnswerError: it cannot be sent, or an answer has begun.
        """
        status, headers, body = answer
        if self._answer is not None:
            raise AnswerError("an answer has begun")
        self._answer = head = answer_head(self._head, status, headers, close=self._must_close())
        self._to_send = head.length
        data = self._frame(head, body, more=False)
        self.answered = True
        await self._connection.send(data)

    def _must_close(self) -> bool:
        """Whether the connection ends after this answer.

        It does if parts of the request's body have not arrived: skipping them would mean to wait
        for as much as the client likes to send.
        """
        return self._connection.is_last or not self._head.keep_alive or self.unread

    @property
    def unread(self) -> bool:
        """Whether parts of the body have not arrived."""
        return self._left is None or len(self._connection.buffer) < self._left

    def _frame(self, answer: AnswerHead, body: bytes, more: bool) -> bytes:
        """Return the bytes on the wire for a part of the body; the first part has the head."""
        framing = answer.framing
        if framing is Framing.NO_BODY:
            body = b""
        elif framing is Framing.LENGTH:
            self._to_send -= len(body)
            if self._to_send < 0 or (self._to_send and not more):
                raise AnswerError("the body is not as long as its content length says")
        elif framing is Framing.CHUNKED:
            if body:
                body = b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                body += b"0\r\n\r\n"
        if not self.begun:
            self.begun = True
            body = answer.data + body
        return body

    # -- the end -----------------------------------------------------------------------------

    @property
    def closes(self) -> bool:
        """Whether the connection ends after this answer."""
        return self._answer is None or self._answer.closes

    def finish(self) -> None:
        """Prepare for the next request, or mark the connection as finished."""
        connection = self._connection
        if self.answered:
            self.error = None
            if self._left and not self.unread:
                connection.take(self._left)
                self._left = 0
        elif self.begun:
            # The head is out, so no error can be answered: only the end of the connection shows the
            # client that the answer is not complete.
            connection.ended = True
        elif self.error is None:
            self.error = RequestError(500, "the application gave no answer")
