"""One request of a connection: the body for the application, and the response to the client."""

from collections.abc import Mapping
from math import inf
from typing import Any
from urllib.parse import unquote

import trio

from ..base.http import UPGRADE, Header, Whole
from .client_socket import ClientSocket
from .deadline import RequestDeadline
from .head import (
    ChunkedBody,
    Framing,
    HeadTemplate,
    RequestError,
    RequestHead,
    ResponseError,
    ResponseHead,
    chunk,
    encode_response,
    informational,
    response_head,
)
from .limits import Expired
from .slots import Address
from .upgrade import UpgradedStream, head_bytes

_DISCONNECT = {"type": "http.disconnect"}

#: The reason of a request that ends because another connection gets its slot.
EVICTED = "its connection slot went to another connection"


class Http1Request:
    """Gives the application its request and sends the response.

    ``begun``: the head of the response has been sent; ``answered``: all of it.

    After :meth:`finish`, ``closes`` is whether the connection ends, and ``unread`` whether parts of
    the body may still arrive. ``error`` is the refusal to send if the application gave no response.
    """

    __slots__ = (
        "_body_ended",
        "_chunked",
        "_connection",
        "_head",
        "_left",
        "_patience",
        "_response",
        "_to_send",
        "_waiting_for_continue",
        "answered",
        "begun",
        "error",
        "expiry",
        "headers",
        "method",
        "template",
    )

    def __init__(
        self,
        connection: ClientSocket,
        head: RequestHead,
        template: HeadTemplate | None,
        deadline: RequestDeadline | None,
    ) -> None:
        self._connection = connection
        self._head = head
        # Plain attributes, because a property is a call and every delivery reads all of them.
        self.method: str = head.method
        self.headers: list[Header] = head.headers
        self.template: HeadTemplate | None = template
        self.expiry: RequestDeadline | None = deadline
        self._left = head.length
        self._chunked = ChunkedBody() if head.length is None else None
        self._waiting_for_continue = head.expects_continue
        self._patience = connection.limits.body_seconds
        self._body_ended = False  # the application has received all of it
        self._response: ResponseHead | None = None
        self.begun: bool = False
        self.answered: bool = False
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
            "scheme": self.scheme,
            "path": self.path,
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": head.headers,
            "client": self.client,
            "server": self.server,
            "state": {},
            "extensions": {UPGRADE: self} if head.upgrade else {},
        }

    @property
    def path(self) -> str:
        """The path, decoded, as in the scope."""
        path = self._head.target.partition(b"?")[0].decode("ascii")
        return unquote(path) if "%" in path else path

    @property
    def scheme(self) -> str:
        """The scheme of the connection: ``https`` over TLS, else ``http``."""
        return self._connection.scheme

    @property
    def version(self) -> str:
        """The version of HTTP: ``1.0`` or ``1.1``."""
        return self._head.version

    @property
    def client(self) -> Address:
        """The address of the peer; None for a unix socket."""
        return self._connection.client

    @property
    def server(self) -> Address:
        """The address that the peer has connected to; None for a unix socket."""
        return self._connection.server

    @property
    def protocol(self) -> bytes:
        """The protocol that the client offers to upgrade to."""
        return self._head.upgrade

    def take_over(self) -> UpgradedStream:
        """Return the connection as a stream; see :class:`~sdk_trio.base.http.ProtocolUpgrade`."""
        # Begun and never answered: the connection ends when the application returns.
        self.begun = self._body_ended = True
        connection, head = self._connection, self._head
        beginning = head_bytes(head.target, head.headers, head.upgrade)
        return UpgradedStream(connection, beginning + connection.take(len(connection.buffer)))

    # -- the request -------------------------------------------------------------------------

    def take_body(self, largest: float = inf) -> bytes | None:
        """Return the whole body if all of it has arrived; else None.

        None as well if the application has received a part, or the body is over ``largest`` bytes.
        """
        left = self._left
        if self._body_ended or left is None or left > largest:
            return None
        if len(self._connection.buffer) < left:
            return None
        self._body_ended = True
        self._left = 0
        return self._connection.take(left) if left else b""

    async def receive(self) -> Mapping[str, Any]:
        """Return the next part of the body, as ASGI's ``receive``.

        After the body it waits until the client has left or the response has been sent, and then
        returns ``http.disconnect``.
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
        # 100 Continue is sent only when the application asks for the body. A request that is
        # refused because of its headers then saves the client from sending it (RFC 9110, 10.1.1).
        if self._waiting_for_continue and self._response is None and not connection.buffer:
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
        """Wait for more of the body, within one time limit for all these waits together.

        Time that the application spends between two waits does not count against the client.
        """
        connection = self._connection
        begun = connection.now
        connection.read_deadline = begun + self._patience
        try:
            return await connection.read_ahead()
        except Expired:
            if self.answered:
                return False
            if connection.evicted:
                raise RequestError(503, EVICTED) from None
            raise RequestError(408, "the body took too long") from None
        finally:
            connection.read_deadline = inf
            self._patience -= connection.now - begun

    def _decode(self) -> bytes:
        """Take the part of the body that is in the buffer."""
        connection = self._connection
        if self._chunked is None:
            assert self._left is not None  # the head of a body without chunks has its length
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
                # without bound, so its leaving goes unnoticed. Check again after the next sweep.
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

    # -- the response ------------------------------------------------------------------------

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send one message, as ASGI's ``send``.

        The head is buffered until the first part of the body, so that one system call sends both.

        Raises:
            ResponseError: the message is out of order, or cannot be sent.
        """
        kind = message["type"]
        if kind == "http.response.start" and self._response is None:
            status = int(message["status"])
            headers = message.get("headers", ())
            if 100 <= status < 200 and status != 101:
                if self._head.version == "1.1":
                    await self._connection.send(informational(status, headers))
                return
            self._waiting_for_continue = False
            self._response = response_head(self._head, status, headers, close=self._must_close())
            self._to_send = self._response.length
        elif kind == "http.response.body" and self._response is not None and not self.answered:
            more = bool(message.get("more_body"))
            data = self._frame(self._response, bytes(message.get("body", b"")), more)
            self.answered = not more
            if data:
                await self._connection.send(data)
        elif not self.answered:
            raise ResponseError(f"{kind} is out of order")

    async def respond(  # noqa: ASYNC910 - as receive
        self, response: Whole
    ) -> None:
        """Send status, headers and body, in a third of the time that two messages take.

        Raises:
            ResponseError: it cannot be sent, or a response has begun.
        """
        if self._response is not None:
            raise ResponseError("a response has begun")
        self._response, data = encode_response(self._head, response, close=self._must_close())
        self.begun = self.answered = True
        await self._connection.send(data)

    def _must_close(self) -> bool:
        """Whether the connection ends after this response.

        It does if parts of the request's body have not arrived: the server does not wait for bytes
        that it would only discard.
        """
        # Checked first because it is cheaper: a body that was read leaves 0.
        return (
            not self._head.keep_alive
            or self._connection.is_last
            or (self._left != 0 and self.unread)
        )

    @property
    def unread(self) -> bool:
        """Whether parts of the body have not arrived."""
        return self._left is None or len(self._connection.buffer) < self._left

    def _frame(self, response: ResponseHead, body: bytes, more: bool) -> bytes:
        """Return the bytes on the wire for a part of the body, with the head before the first."""
        framing = response.framing
        if framing is Framing.NO_BODY:
            body = b""
        elif framing is Framing.LENGTH:
            self._to_send -= len(body)
            if self._to_send < 0 or (self._to_send and not more):
                raise ResponseError("the body is not as long as its Content-Length")
        elif framing is Framing.CHUNKED:
            body = chunk(body) if body else body
            if not more:
                body += chunk(b"")
        if not self.begun:
            self.begun = True
            body = response.data + body
        return body

    # -- the end -----------------------------------------------------------------------------

    @property
    def closes(self) -> bool:
        """Whether the connection ends after this response."""
        return self._response is None or self._response.closes

    @property
    def is_settled(self) -> bool:
        """Whether the whole response was sent, the body taken, and the connection stays open."""
        response = self._response
        return self.answered and not self._left and response is not None and not response.closes

    def finish(self) -> None:
        """Prepare for the next request, or mark the connection as finished."""
        connection = self._connection
        if self.answered:
            self.error = None
            if self._left and not self.unread:
                connection.take(self._left)
                self._left = 0
        elif self.begun:
            # The head has been sent, so no error can be. Only the end of the connection shows the
            # client that the response is not complete.
            connection.ended = True
        elif self.error is None:
            self.error = RequestError(500, "the application gave no response")
