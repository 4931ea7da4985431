"""HTTP/1.1 connections, each served in one task that calls the application itself.

A request costs one wait for the socket and one send, and no nursery, lock, timeout scope, thread or
task of its own. A delivery takes 3 steps of the event loop and no task, with hypercorn 21 steps and
2 tasks: 93 us of CPU instead of 388 (docs/adr/0012-fast-path.md).
"""

import socket
from math import inf

import trio

from ..base.logs import get_logger
from .client_socket import ClientSocket, ServerState
from .deadline import RequestDeadline
from .head import (
    END_OF_HEAD,
    HeadTemplate,
    RequestError,
    RequestHead,
    check_beginning,
    read_head,
    refusal,
)
from .limits import Expired
from .request import EVICTED, Http1Request
from .slots import Address
from .tls import TlsSocket

_log = get_logger("server")


class Http1ServerConnection(ClientSocket):
    """One client's connection, from its first byte to its end."""

    __slots__ = (
        "_accepted_at",
        "_between_requests",
        "_deadline",
        "_exchange",
        "_idle_since",
        "_template",
    )

    def __init__(
        self, shared: ServerState, sock: socket.socket | TlsSocket, client: Address
    ) -> None:
        super().__init__(shared, sock, client)
        #: The template of the last head; see :func:`~sdk_trio.server.head.read_head`.
        self._template: HeadTemplate | None = shared.template
        #: The deadline that the application sets for a request; None during the first one.
        self._deadline: RequestDeadline | None = None
        self._accepted_at = shared.now
        self._between_requests = False
        self._idle_since = shared.now
        #: The current request and its response.
        self._exchange: Http1Request | None = None

    # -- for the acceptor --------------------------------------------------------------------

    async def run(self) -> None:
        """Serve requests until the client leaves or the server ends the connection.

        Over TLS the handshake comes first. Cancellation cancels the application too, and closes
        the connection at once.
        """
        try:
            if isinstance(self._socket, TlsSocket):
                await self._socket.handshake()
            await self._serve()
        except (OSError, trio.TooSlowError, trio.ClosedResourceError):
            # The client has left, speaks no TLS, or had sent no request when the server stopped.
            await trio.lowlevel.checkpoint()
        finally:
            self.ended = True
            # Breaks a reference cycle, so that both are freed now, without the garbage collector.
            self._exchange = None
            trio.lowlevel.notify_closing(self._descriptor)
            self._socket.close()

    @property
    def idle_since(self) -> float | None:
        """The time at which the connection became idle; None while a request is in progress."""
        if not self._idle or self.buffer or self.evicted:
            return None
        return self._idle_since

    @property
    def unfinished_since(self) -> float | None:
        """The time since which the server waits for the rest of a request, or to send a response.

        It follows from the deadline of that wait. For a client that pipelines requests, it is the
        time at which the connection was accepted.
        """
        if self.evicted:
            return None
        if self._between_requests:
            return self._accepted_at
        limits = self.limits
        if self.write_deadline < inf:
            return self.write_deadline - limits.write_seconds
        if not self.waiting or self.read_deadline == inf:
            return None
        return self.read_deadline - (limits.head_seconds if self._idle else limits.body_seconds)

    def evict(self) -> None:
        """End the wait for the client with :class:`Expired`, so that the connection ends."""
        self.evicted = True
        self.write_deadline = -inf
        self.stop_reading()

    def sweep(self, now: float) -> None:
        """Wake the connection if a deadline has passed, or it is idle while the server drains."""
        if (
            now >= self.read_deadline
            or now >= self.write_deadline
            or (self._idle and self._shared.draining)
        ) and not self.ended:
            trio.lowlevel.notify_closing(self._descriptor)
        if self._deadline is not None:
            self._deadline.sweep(now)

    # -- requests ----------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Serve one request after the other, with a new scope after each deadline that passed."""
        head = await self._next_head()
        if head is None or not await self._serve_requests(head, None):
            return
        while (head := await self._next_head()) is not None:
            self._deadline = deadline = RequestDeadline(self.limits.sweep_seconds)
            with deadline.scope:
                await self._serve_requests(head, deadline)
                if not deadline.spent:
                    return
            # The application's deadline has passed, and the scope was cancelled. The application
            # may have responded before, so the exchange decides whether the connection continues.
            deadline.spent = True
            if self._exchange is None or not await self._conclude(self._exchange):
                return

    async def _serve_requests(self, head: RequestHead, deadline: RequestDeadline | None) -> bool:
        """Serve this request, and all later ones within the scope of ``deadline``, if there is one.

        Returns:
            Whether the connection continues. It may also continue after a spent deadline.
        """
        app, direct = self._shared.app, self._shared.direct
        while True:
            self._requests += 1
            self._exchange = exchange = Http1Request(self, head, self._template, deadline)
            try:
                if direct is not None:
                    response = await direct.respond(exchange)
                    if response is not None:
                        await exchange.respond(response)
                else:
                    await app(exchange.scope(), exchange.receive, exchange.send)
            except Exception:
                # ASGI leaves errors of the application to the server. _conclude sends a 500.
                _log.exception("server.application_failed", method=head.method)
            if deadline is not None and deadline.spent:
                return False
            # Nearly always nothing is left to do, and this test is cheaper than a coroutine.
            settled = exchange.is_settled and not (self.waiting or self.ended)
            if not settled and not await self._conclude(exchange):
                return False
            if deadline is None:
                return True
            following = await self._next_head()
            if following is None:
                return False
            head = following

    async def _next_head(self) -> RequestHead | None:
        """Return the next head; None if the connection ends, after a refusal of a malformed one."""
        try:
            return await self._read_head()
        except RequestError as error:
            await self._refuse(error)
            return None

    async def _conclude(self, exchange: Http1Request) -> bool:
        """Finish the response; return False if the connection ends with it."""
        deadline = self._deadline
        if deadline is not None and deadline.spent and deadline.response and not exchange.begun:
            await exchange.respond(deadline.response)
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
            await self.linger()
        return False

    async def _read_head(self) -> RequestHead | None:
        """Return the next head and leave the first bytes of its body in the buffer.

        Returns None if the connection ends before another request.
        """
        limits = self.limits
        buffer = self.buffer
        searched = 0
        skipped = False
        if buffer:
            # A pipelined request is in the buffer, so nothing below has to wait. At this checkpoint
            # other connections run, and this one may be evicted. Without it, two sources that
            # pipeline could keep all slots.
            self._between_requests = True
            await trio.lowlevel.checkpoint()
            self._between_requests = False
            if self.evicted:
                raise RequestError(503, EVICTED)
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
                    # Nearly all heads arrive in one piece. From the second piece on, a bytearray
                    # keeps the cost of many small pieces linear.
                    self.buffer = buffer = bytearray(buffer)
                    self.read_deadline = self._shared.now + limits.head_seconds
            else:
                # A new connection gets less time than a reused one: its client opened it to send.
                patience = (
                    limits.keep_alive_seconds if self._requests else limits.first_byte_seconds
                )
                self._idle_since = self._shared.now
                self.read_deadline = self._idle_since + patience
            # The first request has usually arrived with its connection.
            chunk = None if self._requests or buffer or self.evicted else self.read_at_once()
            try:
                if chunk is None:
                    chunk = await self.read(idle=True)
            except Expired:
                if buffer and self.evicted:
                    raise RequestError(503, EVICTED) from None
                if buffer and not self._shared.draining:
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
        head, self._template = read_head(bytes(buffer[:end]), limits, self._template)
        if self._template is not None:
            self._shared.template = self._template
        self.buffer = bytes(buffer[end:])
        return head

    async def _refuse(self, error: RequestError) -> None:
        peer = self.client[0] if self.client else None
        self._shared.note_refusal(error.status, str(error), peer)
        await self.send(refusal(error.status))
        await self.linger()
