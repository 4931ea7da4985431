"""HTTP/1.1 connections, each served in one task that calls the ASGI application itself.

A request costs one wait for the socket and one send: no nursery, lock, timeout scope, thread or
task of its own. On hypercorn a delivery takes 21 steps of the event loop and 2 tasks, here 3 steps
and none, which is 93 us of CPU instead of 388 (docs/adr/0012-fast-path.md). Deadlines are fields
(``read_deadline``, ``write_deadline``): the acceptor's sweep looks at them twice a second and wakes
the connections whose time is over by ``notify_closing``, which ends a wait for the socket with
``ClosedResourceError`` and leaves the socket open.
"""

import socket
from collections.abc import Mapping
from math import inf
from typing import Any, Protocol
from urllib.parse import unquote

import trio

from ..base.cells import current_cell
from ..base.http import UPGRADE, App, DirectApp, Header, Whole
from ..base.logs import get_logger
from .deadline import RequestDeadline
from .head import (
    END_OF_HEAD,
    AnswerError,
    AnswerHead,
    ChunkedBody,
    Framing,
    HeadTemplate,
    RequestError,
    RequestHead,
    answer_head,
    check_beginning,
    chunk,
    encode_answer,
    informational,
    read_head,
    refusal,
)
from .limits import Expired, Limits, NoteRefusal
from .slots import Address, address_of
from .tls import TlsSocket
from .upgrade import UpgradedStream, head_bytes

_DISCONNECT = {"type": "http.disconnect"}

_log = get_logger("server")

#: The reason of a request that ends because another connection gets its slot.
_GAVE_WAY = "its connection slot went to another connection"


class Http1Request:
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
        "expiry",
        "headers",
        "method",
        "template",
    )

    def __init__(self, connection: "Http1ServerConnection", head: RequestHead) -> None:
        self._connection = connection
        self._head = head
        # Plain attributes, as a property is a call: all of DirectRequest's are read by each
        # delivery.
        self.method: str = head.method
        self.headers: list[Header] = head.headers
        self.template: HeadTemplate | None = connection.template
        self.expiry: RequestDeadline = connection.expiry
        self._left = head.length
        self._chunked = ChunkedBody() if head.length is None else None
        self._waiting_for_continue = head.expects_continue
        self._patience = connection.limits.body_seconds
        self._body_ended = False  # the application has received all of it
        self._answer: AnswerHead | None = None
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
        """The protocol that the client offers to change to."""
        return self._head.upgrade

    def take_over(self) -> UpgradedStream:
        """Return the connection as a stream; see :class:`~sdk_trio.base.http.ProtocolUpgrade`."""
        # Begun and never answered: the connection ends with the application's return.
        self.begun = self._body_ended = True
        connection, head = self._connection, self._head
        beginning = head_bytes(head.target, head.headers, head.upgrade)
        return UpgradedStream(connection, beginning + connection.take(len(connection.buffer)))

    # -- the request -------------------------------------------------------------------------

    def take_body(self, largest: float = inf) -> bytes | None:
        """Return the whole body if all of it has arrived and none was received; else None.

        None as well if it has more than ``largest`` bytes.
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
            if connection.gives_way:
                raise RequestError(503, _GAVE_WAY) from None
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
        if self._answer is not None:
            raise AnswerError("an answer has begun")
        self._answer, data = encode_answer(self._head, answer, close=self._must_close())
        self.begun = self.answered = True
        await self._connection.send(data)

    def _must_close(self) -> bool:
        """Whether the connection ends after this answer.

        It does if parts of the request's body have not arrived: skipping them would mean to wait
        for as much as the client likes to send.
        """
        # A body that has been taken leaves 0: then there is nothing to look at.
        return (
            not self._head.keep_alive
            or self._connection.is_last
            or (self._left != 0 and self.unread)
        )

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
            body = chunk(body) if body else body
            if not more:
                body += chunk(b"")
        if not self.begun:
            self.begun = True
            body = answer.data + body
        return body

    # -- the end -----------------------------------------------------------------------------

    @property
    def closes(self) -> bool:
        """Whether the connection ends after this answer."""
        return self._answer is None or self._answer.closes

    @property
    def is_settled(self) -> bool:
        """Whether it was answered whole, its body is taken, and the connection goes on."""
        answer = self._answer
        return self.answered and not self._left and answer is not None and not answer.closes

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


class Surroundings(Protocol):
    """The state that the connections of one server share.

    ``direct`` is the application where it can be called without a scope, else None. ``now`` is the
    event loop's clock as of the last sweep, which saves a call of the clock for each wait;
    ``draining``: no further request begins. ``note_refusal`` is called for every request that the
    server itself refuses.
    """

    app: App
    direct: DirectApp | None
    limits: Limits
    now: float
    draining: bool
    note_refusal: NoteRefusal


class Http1ServerConnection:
    """One client's connection, from its first byte to its end.

    ``client`` is the peer's address; None for a unix socket. ``scheme`` is ``https`` over TLS.
    """

    __slots__ = (
        "_accepted_at",
        "_around",
        "_between_requests",
        "_cell",
        "_descriptor",
        "_exchange",
        "_idle",
        "_idle_since",
        "_interrupted",
        "_pending",
        "_requests",
        "_socket",
        "buffer",
        "client",
        "ended",
        "expiry",
        "gives_way",
        "limits",
        "read_deadline",
        "scheme",
        "template",
        "waiting",
        "write_deadline",
    )

    def __init__(
        self,
        around: Surroundings,
        sock: socket.socket | TlsSocket,
        client: Address,
    ) -> None:
        self._around = around
        self._socket = sock
        self._descriptor = sock.fileno()
        #: Bytes that were read and not taken yet. A plain attribute, as a property is a call.
        self.buffer: bytes | bytearray = b""
        #: That of the last head; see :func:`~sdk_trio.server.head.read_head`.
        self.template: HeadTemplate | None = None
        self._requests = 0
        self._accepted_at = around.now
        self._between_requests = False
        self._idle = True
        self._idle_since = around.now
        self._interrupted = False
        self._exchange: Http1Request | None = None
        self._cell = current_cell()
        self.limits: Limits = around.limits
        self.expiry: RequestDeadline = RequestDeadline(around.limits.sweep_seconds)
        self.client: Address = client
        self._pending = sock.pending if isinstance(sock, TlsSocket) else None
        self.scheme = "http" if self._pending is None else "https"
        self.read_deadline: float = around.now + self.limits.first_byte_seconds
        self.write_deadline: float = inf
        self.waiting: bool = False
        #: Another connection needs the slot: nothing waits for this client any more.
        self.gives_way: bool = False
        #: Nothing more is read or sent: the client has left, or the connection has to end.
        self.ended: bool = False

    # -- for the acceptor --------------------------------------------------------------------

    async def run(self) -> None:
        """Serve requests until the client leaves or the server ends the connection.

        Over TLS the handshake comes first. If it is cancelled, the application is cancelled, too,
        and the connection is closed at once.
        """
        try:
            if isinstance(self._socket, TlsSocket):
                await self._socket.handshake()
            await self._serve()
        except (OSError, trio.TooSlowError, trio.ClosedResourceError):
            # The client has left, speaks no TLS, or has not begun when the server ends.
            await trio.lowlevel.checkpoint()
        finally:
            self.ended = True
            # Breaks the reference cycle: without the garbage collector both are freed now.
            self._exchange = None
            trio.lowlevel.notify_closing(self._descriptor)
            self._socket.close()

    @property
    def idle_since(self) -> float | None:
        """The time at which the connection became idle; None while a request is in progress."""
        if not self._idle or self.buffer or self.gives_way:
            return None
        return self._idle_since

    @property
    def unfinished_since(self) -> float | None:
        """The time since which the client owes the rest of a request, or does not read an answer.

        Each of these waits has a deadline, from which the time follows. A client that pipelines
        requests counts from the beginning of its connection.
        """
        if self.gives_way:
            return None
        if self._between_requests:
            return self._accepted_at
        limits = self.limits
        if self.write_deadline < inf:
            return self.write_deadline - limits.write_seconds
        if not self.waiting or self.read_deadline == inf:
            return None
        return self.read_deadline - (limits.head_seconds if self._idle else limits.body_seconds)

    def give_way(self) -> None:
        """End the wait for the client with :class:`Expired`, so that the connection ends."""
        self.gives_way = True
        self.write_deadline = -inf
        self.stop_reading()

    def sweep(self, now: float) -> None:
        """Wake the connection if a deadline has passed, or if it idles while the server ends."""
        if (
            now >= self.read_deadline
            or now >= self.write_deadline
            or (self._idle and self._around.draining)
        ) and not self.ended:
            trio.lowlevel.notify_closing(self._descriptor)
        self.expiry.sweep(now)

    # -- requests ----------------------------------------------------------------------------

    @property
    def server(self) -> Address:
        """The address that the client has connected to; None for a unix socket."""
        return address_of(self._socket.getsockname())

    async def _serve(self) -> None:
        """Serve request after request, with a new scope after each deadline that has passed."""
        while True:
            with self.expiry.scope:
                await self._serve_requests()
                if not self.expiry.spent:
                    return
            # The scope was cancelled: the application's deadline has passed. It may have answered
            # before that, so the exchange decides whether the connection goes on.
            self.expiry.spent = True
            if self._exchange is None or not await self._conclude(self._exchange):
                return
            self.expiry.renew()

    async def _serve_requests(self) -> None:
        """Serve the requests of one scope: until the connection ends, or the scope is spent."""
        app, direct = self._around.app, self._around.direct
        while True:
            try:
                head = await self._read_head()
            except RequestError as error:
                await self._refuse(error)
                return
            if head is None:
                return
            self._requests += 1
            self._exchange = exchange = Http1Request(self, head)
            try:
                if direct is not None:
                    answer = await direct.respond(exchange)
                    if answer is not None:
                        await exchange.answer(answer)
                else:
                    await app(exchange.scope(), exchange.receive, exchange.send)
            except Exception:
                # ASGI leaves this to the server. The client gets a 500 in _conclude.
                _log.exception("server.application_failed", method=head.method)
            # Nearly always there is nothing left to do: a look is cheaper than a coroutine.
            if exchange.is_settled and not (self.waiting or self.ended or self.expiry.spent):
                continue
            if self.expiry.spent or not await self._conclude(exchange):
                return

    async def _conclude(self, exchange: Http1Request) -> bool:
        """Finish the answer; return False if the connection ends with it."""
        if self.expiry.spent and self.expiry.answer and not exchange.begun:
            await exchange.answer(self.expiry.answer)
        if self.waiting and exchange.answered:
            await self.interrupt_readers()
        exchange.finish()
        if self.ended:
            return False
        if exchange.error is not None:
            await self._refuse(exchange.error)
            return False
        if not exchange.closes:
            return True
        if exchange.unread:
            await self._linger()
        return False

    @property
    def is_last(self) -> bool:
        """Whether no request is accepted after the present one."""
        return (
            self._around.draining
            or self._requests >= self.limits.keep_alive_requests
            # A handler that has cancelled its cell has cancelled this connection.
            or (self._cell is not None and self._cell.cancel_scope.cancel_called)
        )

    async def _read_head(self) -> RequestHead | None:
        """Return the next head and leave the first bytes of its body in the buffer.

        Returns None if the connection ends before another request.
        """
        limits = self.limits
        buffer = self.buffer
        searched = 0
        skipped = False
        if buffer:
            # A pipelined request is in the buffer, so nothing below has to wait: other connections
            # run here, and one that needs the slot may take it. Without that, two sources that
            # pipeline would keep all slots for as long as they like.
            self._between_requests = True
            await trio.lowlevel.checkpoint()
            self._between_requests = False
            if self.gives_way:
                raise RequestError(503, _GAVE_WAY)
        while True:
            if buffer[:2] == b"\r\n" and not skipped:
                # One empty line before a request is ignored: old clients send it after a body
                # (RFC 9112, 2.2).
                self.buffer = buffer = bytes(buffer[2:])
                skipped = True
                searched = 0
            if buffer:
                end = buffer.find(END_OF_HEAD, searched)
                if end >= 0:
                    break
                check_beginning(buffer, limits, searched)
                searched = max(0, len(buffer) - 3)
                if not isinstance(buffer, bytearray):
                    # Nearly all heads arrive in one piece. Only a second piece is worth a
                    # bytearray, in which many small pieces cost linear time.
                    self.buffer = buffer = bytearray(buffer)
                    self.read_deadline = self._around.now + limits.head_seconds
            else:
                # A new connection gets less time than a kept one: its client opened it to send.
                patience = (
                    limits.keep_alive_seconds if self._requests else limits.first_byte_seconds
                )
                self._idle_since = self._around.now
                self.read_deadline = self._idle_since + patience
            try:
                chunk = await self.read(idle=True)
            except Expired:
                if buffer and self.gives_way:
                    raise RequestError(503, _GAVE_WAY) from None
                if buffer and not self._around.draining:
                    raise RequestError(408, "the headers took too long") from None
                return None
            if not chunk:
                if buffer:
                    raise RequestError(400, "the headers are not complete")
                return None
            if isinstance(buffer, bytearray):
                buffer += chunk
            else:
                self.buffer = buffer = chunk
        self.read_deadline = inf
        end += 4
        if end > limits.head_bytes:
            raise RequestError(431, "the headers are too large")
        head, self.template = read_head(bytes(buffer[:end]), limits, self.template)
        self.buffer = bytes(buffer[end:])
        return head

    # -- bytes -------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The event loop's clock as of the last sweep."""
        return self._around.now

    def take(self, size: int) -> bytes:
        """Remove at most ``size`` bytes from the buffer and return them."""
        buffer = self.buffer
        if len(buffer) <= size:
            self.buffer = b""
            return bytes(buffer)
        self.buffer = buffer[size:]
        return bytes(buffer[:size])

    def give_back(self, data: bytes) -> None:
        """Push surplus bytes back in front of the buffer."""
        self.buffer = data + self.buffer

    async def read_ahead(self) -> bool:
        """Append the client's next bytes to the buffer; return False at the end of its stream."""
        chunk = await self.read()
        self.buffer = bytes(self.buffer) + chunk
        return bool(chunk)

    async def read(self, *, idle: bool = False) -> bytes:
        """Wait for bytes and return them; empty at the end of the client's stream.

        ``idle``: no request is in progress, so that the connection ends when the server drains.

        Raises:
            Expired: :attr:`read_deadline` has passed, the slot is needed, the server drains and the
                connection is idle, or the answer has been sent while a task of the application
                still reads.
            OSError: the connection is broken.
        """
        while True:
            # Over TLS it may have to give way before it first waits here.
            if self.gives_way:
                raise Expired
            self._idle = idle
            self.waiting = True
            try:
                # Wait first and receive then: a client that has just got its answer has not sent
                # anything yet, so receiving first would cost one more system call a request.
                if not (idle and self._around.draining):
                    # OpenSSL may hold decrypted bytes that the descriptor does not show.
                    if self._pending is not None and self._pending():
                        await trio.lowlevel.checkpoint()
                    else:
                        await trio.lowlevel.wait_readable(self._descriptor)
            except trio.ClosedResourceError:
                if self._interrupted or self._around.now >= self.read_deadline:
                    raise Expired from None
            finally:
                self.waiting = False
                self._idle = False
            try:
                return self._socket.recv(self.limits.read_bytes)
            except BlockingIOError:
                # A request whose bytes arrived before the drain began is served, later ones not.
                if idle and self._around.draining:
                    raise Expired from None

    def stop_reading(self) -> None:
        """End the wait of a reader with :class:`Expired`, and every later one."""
        self.read_deadline = -inf
        trio.lowlevel.notify_closing(self._descriptor)

    async def send(self, data: bytes) -> None:
        """Send all of ``data``. If the client has left or is too slow, the connection ends."""
        if self.ended:
            return
        try:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data) and self.gives_way:
                self.ended = True
            elif sent < len(data):
                await self._send_rest(memoryview(data)[sent:])
        except (OSError, Expired):
            self.ended = True

    async def _send_rest(self, data: memoryview) -> None:
        self.write_deadline = self._around.now + self.limits.write_seconds
        try:
            while data:
                try:
                    await trio.lowlevel.wait_writable(self._descriptor)
                except trio.ClosedResourceError:
                    if self._around.now >= self.write_deadline:
                        raise Expired from None
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    continue
        except trio.Cancelled:
            # A part of the answer is out. Whatever followed would be taken for its rest.
            self.ended = True
            raise
        finally:
            self.write_deadline = inf

    async def interrupt_readers(self) -> None:
        """End the wait of a task of the application that still calls ``receive``.

        An application may wait for the client's leaving in a task of its own while it answers. That
        task must not read the bytes of the next request.
        """
        self._interrupted = True
        while self.waiting:
            trio.lowlevel.notify_closing(self._descriptor)
            await trio.lowlevel.checkpoint()
        self._interrupted = False

    async def _refuse(self, error: RequestError) -> None:
        peer = self.client[0] if self.client else None
        self._around.note_refusal(error.status, str(error), peer)
        await self.send(refusal(error.status))
        await self._linger()

    async def _linger(self) -> None:
        """Half-close, and throw away what the client still sends, within time and size limits.

        A close with unread bytes resets the connection, and the client might not see the answer
        (RFC 9112, 9.6).
        """
        if self.ended or self.gives_way:
            await trio.lowlevel.checkpoint()
            return
        self._socket.shutdown(socket.SHUT_WR)
        self.read_deadline = self._around.now + self.limits.linger_seconds
        left = self.limits.linger_bytes
        try:
            while left > 0:
                # The bytes themselves are not held on to, while more of them are waited for.
                size = len(await self.read(idle=True))
                if not size:
                    return
                left -= size
        except Expired:
            await trio.lowlevel.checkpoint()
