"""One request over HTTP/2 and its answer, as ASGI messages, in a task of its own."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import trio
from h2.errors import ErrorCodes

from ..logs import get_logger
from .answer_head import AnswerError
from .http2_messages import answer_fields
from .request_head import Headers, RequestError, RequestHead

if TYPE_CHECKING:
    from .http2 import Http2Connection

_log = get_logger("server")

_DISCONNECT = {"type": "http.disconnect"}


class Http2Stream:
    """Gives the application its request and sends what it answers.

    ``head`` is None for a request that is refused with ``error``. The connection's reader calls
    :meth:`feed`, :meth:`end`, :meth:`abandon` and :meth:`silence`; all else is the task's.
    """

    __slots__ = (
        "_answered",
        "_body",
        "_connection",
        "_given",
        "_head",
        "_length",
        "_patience",
        "_sent",
        "_silent",
        "_started",
        "_unacknowledged",
        "_waiting_for_continue",
        "_woken",
        "complete",
        "error",
        "id",
        "reset",
    )

    def __init__(
        self,
        connection: "Http2Connection",
        stream_id: int,
        head: RequestHead | None,
        error: RequestError | None = None,
    ) -> None:
        self.id = stream_id
        self._connection = connection
        self._head = head
        self._body = bytearray()
        self._unacknowledged = 0
        self._given = False  # the application has been given all of the body
        self._started = False  # the head of the answer has been sent
        self._answered = False
        self._length: int | None = None
        self._sent = 0
        self._patience = connection.limits.body_seconds
        self._waiting_for_continue = head is not None and head.expects_continue
        self._silent = False  # the client sends nothing more
        self._woken = trio.Event()
        self.error = error
        #: The whole request has arrived.
        self.complete = False
        #: Nothing can be sent any more, or is worth it.
        self.reset = False

    # -- for the connection ------------------------------------------------------------------

    def feed(self, data: bytes, size: int) -> None:
        """Take a part of the body; ``size`` is what it took of the client's window."""
        self._unacknowledged += size
        if not self._answered and self.error is None:
            self._body += data
        self._wake()

    def end(self) -> None:
        """Note that the request is complete."""
        self.complete = True
        self._wake()

    def abandon(self) -> None:
        """Note that the client has given the stream up; what runs, runs to its end."""
        self.reset = True
        self._wake()

    def silence(self) -> None:
        """Note that nothing more arrives; what is complete is still answered."""
        self._silent = True
        self._wake()

    def open_window(self) -> None:
        """Note that the client takes more of the answer."""
        self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._woken = trio.Event()

    # -- the task ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Call the application and bring the stream to its end."""
        try:
            if self._head is not None:
                app = self._connection.app
                try:
                    await app(self._scope(self._head), self.receive, self.send)
                except Exception:
                    _log.exception("server.application_failed", method=self._head.method)
            await self._finish()
        finally:
            self._acknowledge()
            self._connection.forget(self)

    async def _finish(self) -> None:
        """Answer what the application has not, and end the client's side of the stream."""
        if self._gone or (self._silent and not (self.complete or self._started)):
            await trio.lowlevel.checkpoint()
            return
        if self._started and not self._answered:
            # The client has to see that the answer is not complete.
            self._connection.reset(self, ErrorCodes.INTERNAL_ERROR)
        elif not self._answered:
            error = self.error or RequestError(500, "the application gave no answer")
            _log.info("server.request_refused", status=error.status, reason=str(error))
            self.error = error
            fields, _ = answer_fields(error.status, [(b"content-length", b"0")])
            self._connection.send_head(self, fields, end=True)
            self._answered = True
        if self._answered and not self.complete:
            await self._linger()
            if not self.complete:
                self._connection.reset(self, ErrorCodes.NO_ERROR)
        await trio.lowlevel.checkpoint()

    async def _linger(self) -> None:  # noqa: ASYNC910 - the end of the stream has one
        """Take in what the client goes on sending, so that it reads its answer first."""
        limits = self._connection.limits
        left = limits.linger_bytes
        with trio.move_on_after(limits.linger_seconds):  # noqa: ASYNC912 - as above
            while left > 0 and not (self.complete or self._silent or self._gone):
                left -= self._unacknowledged
                self._acknowledge()
                await self._woken.wait()

    @property
    def _gone(self) -> bool:
        return self.reset or self._connection.ended

    def _scope(self, head: RequestHead) -> dict[str, Any]:
        path, _, query = head.target.partition(b"?")
        connection = self._connection
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "http_version": "2",
            "method": head.method,
            "scheme": "https",
            "path": unquote(path.decode("ascii")) if b"%" in path else path.decode("ascii"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": head.headers,
            "client": connection.client,
            "server": connection.server,
            "state": {},
            "extensions": {},
        }

    # -- the request -------------------------------------------------------------------------

    async def receive(self) -> Mapping[str, Any]:  # noqa: ASYNC910 - its task has one at its end
        """Return the next part of the body; then wait for the client's end, or the answer's."""
        while True:
            if not (self._given or self._answered or self.error) and (self._body or self.complete):
                return self._take()  # noqa: ASYNC910 - as above
            if self._answered or self.error or self._gone or self._silent:
                await trio.lowlevel.checkpoint()
                return _DISCONNECT
            await self._wait_for_more()

    def _take(self) -> Mapping[str, Any]:
        body = bytes(self._body)
        self._body.clear()
        self._acknowledge()
        self._given = self.complete
        return {"type": "http.request", "body": body, "more_body": not self._given}

    def _acknowledge(self) -> None:
        size, self._unacknowledged = self._unacknowledged, 0
        if size:
            self._connection.acknowledge(self, size)

    async def _wait_for_more(self) -> None:
        if self._given:
            await self._woken.wait()
            return
        if self._waiting_for_continue and not self._started:
            self._connection.send_head(self, [(b":status", b"100")])
        self._waiting_for_continue = False
        begun = trio.current_time()
        with trio.move_on_after(self._patience):
            await self._woken.wait()
        # Only the waits count, not what the application does.
        self._patience -= trio.current_time() - begun
        if self._patience <= 0 and not self.complete and not self._answered:
            self.error = RequestError(408, "the body took too long")

    # -- the answer --------------------------------------------------------------------------

    async def send(self, message: Mapping[str, Any]) -> None:  # noqa: ASYNC910 - as receive
        """Send one message; a client that does not take it in time loses the answer.

        Raises:
            AnswerError: the message does not fit here, or cannot be sent.
        """
        kind = message["type"]
        if kind == "http.response.start" and not self._started:
            self._send_start(int(message["status"]), message.get("headers", ()))
        elif kind == "http.response.body" and self._started and not self._answered:
            await self._send_body(bytes(message.get("body", b"")), bool(message.get("more_body")))
        elif not self._answered:
            raise AnswerError(f"{kind} does not fit here")

    def _send_start(self, status: int, headers: Headers) -> None:
        fields, length = answer_fields(status, headers)
        if 100 <= status < 200:
            if status == 101:
                raise AnswerError("HTTP/2 has no change of protocol")
            self._connection.send_head(self, fields)
            return
        self._started = True
        if status in (204, 304):  # these end with their head, whatever it says
            length = None
            self._sent = -1
        elif self._head is not None and self._head.method == "HEAD":
            self._sent = -1
        self._length = length
        self._connection.send_head(self, fields)

    async def _send_body(self, data: bytes, more: bool) -> None:  # noqa: ASYNC910 - as send
        if self._sent < 0:
            data = b""
        elif self._length is not None:
            self._sent += len(data)
            if self._sent > self._length or (self._sent < self._length and not more):
                raise AnswerError("the body is not as long as its content length says")
        if not data and more:
            return  # noqa: ASYNC910 - as above
        rest = memoryview(data)
        patience = self._connection.limits.write_seconds
        with trio.move_on_after(patience) as scope:  # noqa: ASYNC912 - what fits needs no wait
            while not self._gone:
                size = self._connection.send_part(self, rest, end=not more)
                if size == len(rest):
                    break
                rest = rest[size:]
                if size:
                    await self._connection.sent()
                else:
                    await self._woken.wait()
        if scope.cancelled_caught:
            self._connection.reset(self, ErrorCodes.CANCEL)
            self.reset = True
        self._answered = not more
        self._wake()
