"""HTTP/3 on one connection: aioquic for the protocol, plus a UDP socket and one task.

As with HTTP/2, tasks of requests only change aioquic's state and pass its datagrams to the socket;
neither waits. Needs the extra ``http3``; ``http3_origins.py`` imports it on demand.
"""

import socket
import ssl
from collections.abc import AsyncIterable, Callable
from typing import Any

import httpx
import trio
from aioquic.h3.connection import H3_ALPN, ErrorCode, H3Connection
from aioquic.h3.events import DataReceived, H3Event, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    QuicEvent,
    StopSendingReceived,
    StreamReset,
)

from ..base.bell import Bell
from .http2_protocol import ClientStream, StreamBody, answer_head, request_headers
from .messages import (
    ABANDONED,
    ConnectFailedError,
    Headers,
    Incident,
    NetworkError,
    NotProcessedError,
    OurProtocolError,
    PeerProtocolError,
    ReadFailedError,
    Received,
    StaleConnectionError,
    WriteTimedOutError,
    body_of,
    chunks_of,
    content_length,
    note_departure,
    timeouts_of,
)

#: The most datagrams received in one go, so that a fast server does not starve other tasks.
DATAGRAMS_PER_TURN = 64
#: Uploads wait while more bytes than this of a stream are unsent or unacknowledged.
UNSENT_BYTES = 256 * 1024
#: A stream with more unread bytes than ``UNREAD_BYTES`` gets no larger window; with more than
#: ``MAX_UNREAD_BYTES`` it is ended. aioquic's windows grow with received bytes, not read bytes, so
#: a stalled reader of a long body could use any amount of memory.
UNREAD_BYTES = 1024 * 1024
MAX_UNREAD_BYTES = 64 * 1024 * 1024
#: A request abandoned after this many seconds of silence marks its connection as lost: no further
#: request is sent on it.
SILENCE_SECONDS = 0.5

#: aioquic's reason after ``idle_seconds``; its code also has other meanings.
_IDLE_TIMEOUT = "Idle timeout"


class _Quic(QuicConnection):
    """aioquic with the peer's limit of streams, and with windows that follow the reader."""

    unread: dict[int, int]

    @property
    def may_open_stream(self) -> bool:
        """Return whether the peer's limit allows another stream now."""
        # A client's bidirectional streams are numbered 0, 4, 8, ... (RFC 9000, 2.1).
        limit: int = self._remote_max_streams_bidi
        return self.get_next_available_stream_id() // 4 < limit

    def unsent(self, stream_id: int) -> int:
        """Return how many bytes of a stream are unsent or unacknowledged."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else len(stream.sender._buffer)

    def _write_stream_limits(self, builder: Any, space: Any, stream: Any) -> None:
        # No larger window until the reader catches up: aioquic would open it as data arrives.
        if self.unread.get(stream.stream_id, 0) <= UNREAD_BYTES:
            super()._write_stream_limits(builder=builder, space=space, stream=stream)


class _Stream(ClientStream):
    """A stream; the server may have asked to stop its upload."""

    upload_refused: bool = False


class Http3Connection:
    """One QUIC connection that carries many concurrent exchanges.

    Args:
        sock: a UDP socket connected to the server, non-blocking, owned from now on.
        host: the name that the server's certificate must be valid for.
        context: the TLS context whose authorities and verification mode are used.
        idle_seconds: after this long without a datagram the connection ends by itself.
        ended: called without waiting once the connection has ended.

    ``in_use`` counts exchanges; ``Http3Origins`` increments it, the connection decrements it.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        host: str,
        context: ssl.SSLContext,
        idle_seconds: float,
        ended: "Callable[[Http3Connection], None]",
    ) -> None:
        self._sock = sock
        self._peer = sock.getpeername()
        self._ended = ended
        self._quic = _Quic(configuration=_configuration(host, context, idle_seconds))
        self._quic.unread = {}
        self._h3 = H3Connection(self._quic)
        self._streams: dict[int, _Stream] = {}
        self._handshake = trio.Event()
        self._progress = Bell()
        self._timer = trio.CancelScope()
        self._received_at = trio.current_time()
        self._error: NetworkError | None = None
        self._incident = Incident()
        self.created: float = trio.current_time()
        self.idle_since: float = self.created
        self.in_use: int = 0
        self.is_closed: bool = False
        self.is_draining: bool = False

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the connection until it ends; report ``started`` once the handshake is complete.

        Cancellation sends CONNECTION_CLOSE if that is possible without waiting.
        """
        started = False
        try:
            self._quic.connect(self._peer, now=trio.current_time())
            self._transmit()
            while not self.is_closed:
                timer = self._quic.get_timer()
                with trio.CancelScope() as self._timer:
                    self._timer.deadline = float("inf") if timer is None else timer
                    await trio.lowlevel.wait_readable(self._sock)
                self._receive()
                if self._handshake.is_set() and not started and not self.is_closed:
                    started = True
                    task_status.started()
        except Exception as error:  # a fault in aioquic ends only this connection
            self._fail(PeerProtocolError(f"HTTP/3 failed: {error!r}"))
        finally:
            self.close()
        if not started:
            raise ConnectFailedError(f"no HTTP/3 from the server: {self._error}")

    def close(self) -> None:
        """Send CONNECTION_CLOSE and close at once, failing exchanges in progress; idempotent."""
        if not self.is_closed:
            self._quic.close(error_code=ErrorCode.H3_NO_ERROR)
            self._transmit()
            self._fail(ReadFailedError("the connection was closed"))

    # -- the socket

    def _receive(self) -> None:
        now = trio.current_time()
        # A fast sender must not keep the loop here; the rest makes the socket readable again.
        for _ in range(DATAGRAMS_PER_TURN):
            try:
                datagram = self._sock.recv(65_536)
            except BlockingIOError:
                break
            except (
                OSError
            ) as error:  # an ICMP error, usually because no server listens on that port
                self._fail(ReadFailedError(f"the server is gone: {error}"))
                return
            self._received_at = now
            self._quic.receive_datagram(datagram, self._peer, now=now)
        timer = self._quic.get_timer()
        if timer is not None and timer <= now:
            self._quic.handle_timer(now=now)
        while (event := self._quic.next_event()) is not None:
            self._on_quic(event)
            for h3_event in self._h3.handle_event(event):
                self._on_h3(h3_event)
        if not self.is_closed:
            self._transmit()
            self._progress.ring()

    def _transmit(self) -> None:
        """Send pending datagrams; those that the socket does not accept count as lost.

        QUIC resends lost datagrams by itself, so nothing has to wait here.
        """
        if self.is_closed:
            return
        for datagram, _ in self._quic.datagrams_to_send(now=trio.current_time()):
            try:
                self._sock.send(datagram)
            except BlockingIOError:
                break
            except OSError:
                break  # the next receive gets the error and its reason
        timer = self._quic.get_timer()
        self._timer.deadline = float("inf") if timer is None else timer

    def _fail(self, error: NetworkError) -> None:
        if self.is_closed:
            return
        self._error = self._error or error
        self._error.incident = self._incident
        self.is_closed = True
        trio.lowlevel.notify_closing(self._sock)
        self._sock.close()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(self._error)
            self.in_use -= 1
        self._progress.ring()
        self._ended(self)

    def _on_quic(self, event: QuicEvent) -> None:
        if isinstance(event, HandshakeCompleted):
            self._handshake.set()
        elif isinstance(event, ConnectionTerminated):
            said = f"the server ended it: {event.error_code:#x} {event.reason_phrase}"
            # Both sides drop an idle connection silently (RFC 9000, 10.1). A request sent at that
            # moment fails like one on a stale HTTP/1.1 connection.
            is_stale = event.reason_phrase == _IDLE_TIMEOUT
            self._fail(StaleConnectionError(said) if is_stale else ReadFailedError(said))
        elif isinstance(event, StreamReset):
            stream = self._streams.get(event.stream_id)
            if stream is None:
                return
            if event.error_code == ErrorCode.H3_REQUEST_REJECTED:
                stream.fail(NotProcessedError("the server refused the request"))
            else:
                stream.fail(ReadFailedError(f"the server reset the stream: {event.error_code:#x}"))
        elif isinstance(event, StopSendingReceived):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.upload_refused = True

    def _on_h3(self, event: H3Event) -> None:
        if not isinstance(event, HeadersReceived | DataReceived):
            return
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        if isinstance(event, HeadersReceived):
            if stream.headers is None:
                self._take_headers(stream, event.headers)
        elif event.data:
            stream.chunks.append(event.data)
            unread = self._quic.unread.get(stream.id, 0) + len(event.data)
            self._quic.unread[stream.id] = unread
            # Only this stream ends; the connection's other streams continue.
            if unread > MAX_UNREAD_BYTES:
                stream.fail(ReadFailedError(f"{unread} bytes of the answer wait to be read"))
        stream.ended = stream.ended or event.stream_ended
        stream.arrival.set()

    def _take_headers(self, stream: _Stream, headers: Headers) -> None:
        try:
            status, rest = answer_head(headers)
        except PeerProtocolError as error:
            stream.fail(error)
            return
        if status >= 200:  # interim answers (1xx) may precede it
            stream.headers = status, rest

    # -- one exchange

    async def exchange(self, request: httpx.Request) -> Received:
        """Send ``request`` and return the answer; see :class:`ClientConnection`."""
        stream = None
        timeouts, body = timeouts_of(request), body_of(request)
        try:
            headers = request_headers(request)
            await trio.lowlevel.checkpoint_if_cancelled()
            await self._wait_for_stream()
            note_departure(request)
            stream = self._open(headers, has_body=body != b"")
            if not isinstance(body, bytes):
                length = content_length(request.headers.raw)
                await self._upload(stream, body, length, timeouts.write)
            elif body:
                await self._send(stream, body, timeouts.write, end=True)
            while stream.headers is None:
                await stream.wait(timeouts.read)
        except BaseException:
            if stream is None:
                abandoned = request.extensions.get(ABANDONED)
                if abandoned is not None:
                    abandoned(None, False)
                self._after_exchange()
            else:
                self.abandon(stream)
            raise
        status, answer_headers = stream.headers
        return Received(
            status,
            headers=answer_headers,
            stream=StreamBody(request, self, stream, timeouts.read),
            extensions={"http_version": b"HTTP/3"},
            request=request,
        )

    async def _wait_for_stream(self) -> None:
        while not self.is_closed and not self._quic.may_open_stream:
            await self._progress.wait()
        if self.is_closed:
            raise NotProcessedError("the connection ended before the request was sent")

    def _open(self, headers: Headers, *, has_body: bool) -> _Stream:
        stream = _Stream(
            self._quic.get_next_available_stream_id(),
            opened=trio.current_time(),
            upload_ended=not has_body,
        )
        try:
            self._h3.send_headers(stream.id, headers, end_stream=not has_body)
        except Exception as error:
            # The errors of aioquic and its encoder have no common class; none is the server's
            # fault, as nothing was sent.
            raise OurProtocolError(f"HTTP/3 cannot carry this request: {error}") from error
        self._streams[stream.id] = stream
        self._transmit()
        return stream

    async def _upload(
        self,
        stream: _Stream,
        body: AsyncIterable[bytes],
        length: int | None,
        limit: float | None,
    ) -> None:
        async with chunks_of(body, length=length) as chunks:
            async for chunk in chunks:
                await self._send(stream, chunk, limit, end=False)
        await self._send(stream, b"", limit, end=True)

    async def _send(self, stream: _Stream, data: bytes, limit: float | None, *, end: bool) -> None:
        view = memoryview(data)
        while True:
            while self._quic.unsent(stream.id) > UNSENT_BYTES:
                stream.check()
                with trio.move_on_after(float("inf") if limit is None else limit) as scope:
                    await self._progress.wait()
                if scope.cancelled_caught:
                    raise WriteTimedOutError(f"the server took no bytes for {limit:g} s")
            if stream.ended or stream.upload_refused or stream.error is not None:
                stream.check()
                return
            chunk, view = view[:UNSENT_BYTES], view[UNSENT_BYTES:]
            self._h3.send_data(stream.id, chunk.tobytes(), end_stream=end and not view)
            self._transmit()
            if not view:
                stream.upload_ended = end
                return

    def note_read(self, stream: _Stream) -> None:
        """Note that the request's task has taken the received bytes of ``stream``."""
        held_back = self._quic.unread.pop(stream.id, 0) > UNREAD_BYTES
        if stream.ended:
            self._close_stream(stream)
        elif held_back:
            self._transmit()  # the larger window

    def abandon(self, stream: _Stream) -> None:
        """Abandon ``stream``, and reset it unless the exchange is over."""
        if stream.id not in self._streams:
            return
        silent_for = trio.current_time() - max(stream.opened, self._received_at)
        # Silence is the only sign of a path that has stopped passing UDP. Later requests get
        # another connection.
        if self._received_at < stream.opened and silent_for > SILENCE_SECONDS:
            self.is_draining = True
        self._close_stream(stream)

    def _close_stream(self, stream: _Stream) -> None:
        if self._streams.pop(stream.id, None) is None:
            return
        self._quic.unread.pop(stream.id, None)
        if not self.is_closed:
            if not stream.upload_ended:
                self._quic.reset_stream(stream.id, ErrorCode.H3_REQUEST_CANCELLED)
            if not stream.ended and stream.id in self._quic._streams:
                self._quic.stop_stream(stream.id, ErrorCode.H3_REQUEST_CANCELLED)
            self._transmit()
        self._after_exchange()

    def _after_exchange(self) -> None:
        self.in_use -= 1
        self.idle_since = trio.current_time()
        if self.is_draining and not self.in_use:
            self.close()


def _configuration(host: str, context: ssl.SSLContext, idle_seconds: float) -> QuicConfiguration:
    authorities = "".join(
        ssl.DER_cert_to_PEM_cert(der) for der in context.get_ca_certs(binary_form=True)
    )
    configuration = QuicConfiguration(
        alpn_protocols=H3_ALPN,
        is_client=True,
        server_name=host,
        idle_timeout=idle_seconds,
        max_data=16 * UNREAD_BYTES,
        max_stream_data=UNREAD_BYTES,
        verify_mode=context.verify_mode,
    )
    if authorities:
        configuration.load_verify_locations(cadata=authorities.encode())
    return configuration
