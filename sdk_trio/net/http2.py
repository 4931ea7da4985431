"""HTTP/2 on one connection: h2 for the protocol, one reader task and one writer task.

Tasks of requests never wait for the socket. They change h2's state, which is synchronous, and wake
the writer. So a cancelled request never leaves half a frame on the connection, its RST_STREAM needs
no waiting, and frames of many requests go out in one write. The only request of a connection is
sent at once, as far as the socket accepts it.
"""

from collections.abc import Callable
from typing import Any

import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import httpx
import trio

from ..base.bell import Bell, Flag
from .http2_protocol import (
    ClientStream,
    CorrectedProtocol,
    StreamBody,
    answer_head,
    request_headers,
)
from .messages import (
    ABANDONED,
    ConnectFailedError,
    Incident,
    NetworkError,
    NotProcessedError,
    OurProtocolError,
    PeerProtocolError,
    ReadFailedError,
    Received,
    RenewedError,
    WriteTimedOutError,
    body_of,
    chunks_of,
    content_length,
    note_departure,
    timeouts_of,
)
from .socket import MAX_SEND_BYTES, BufferedSocket

RECEIVE_BYTES = 256 * 1024
#: Bytes that the server may send ahead of the reader, per stream and in total: enough for a fast
#: link (1 MiB at 100 ms is 80 Mbit/s), and a bound on the memory for slow readers.
STREAM_WINDOW_BYTES = 1024 * 1024
CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024
#: Uploads wait while more bytes than this are queued for the writer.
QUEUED_BYTES = 256 * 1024
#: A server that takes no bytes for this long is gone; everything on the connection fails.
WRITE_STALL_SECONDS = 30.0
#: After this long without an answer to a PING or any other frame, a connection is lost.
PING_SECONDS = 5.0
#: Seconds that the reader may take for data that has already arrived.
READER_SECONDS = 0.05


class _Stream(ClientStream):
    """A stream whose reader and upload are limited by windows.

    ``unacknowledged`` counts the bytes that the reader took without reopening the window.
    ``window`` rings when the server may take more; an upload that has to wait creates it.
    """

    unacknowledged: int = 0
    window: Bell | None = None

    def open_window(self) -> None:
        """Wake the upload, if one waits for the server's window."""
        if self.window is not None:
            self.window.ring()

    def fail(self, error: NetworkError) -> None:
        """End with ``error``, and wake the waiting upload."""
        super().fail(error)
        self.open_window()


class Http2Connection:
    """One connection that carries many concurrent exchanges.

    Args:
        wire: the connected socket, owned from now on.
        released: called without arguments and without waiting whenever another exchange may fit,
            and once when the connection has ended.
        created: ``trio.current_time()`` at connecting.

    ``in_use`` counts exchanges: the pool increments it at assignment, the connection decrements it.
    Either side sets ``is_draining``: no new exchange, close after the last one.
    """

    def __init__(
        self, wire: BufferedSocket, *, released: "Callable[[Http2Connection], None]", created: float
    ) -> None:
        self._wire = wire
        self._released = released
        self.created = created
        self.idle_since: float = created
        self.in_use: int = 0
        self.is_closed: bool = False
        self.is_draining: bool = False
        self._streams: dict[int, _Stream] = {}
        self._h2 = CorrectedProtocol()
        self._settings_arrived = trio.Event()
        self._work = Flag()
        self._drained = Bell()
        self._queued = 0
        self._is_writing = False
        self._left = b""  # bytes that the socket did not accept at once, for the writer
        self._received_at = created
        self._pinged_at: float | None = None
        self._error: NetworkError | None = None
        self._incident = Incident()
        self._silence = Incident()
        self._unsent: list[_Stream] = []
        self._unsent_error: type[NotProcessedError] = NotProcessedError

    # -- used by the pool

    @property
    def has_free_stream(self) -> bool:
        """Return whether another exchange may start; includes the server's own limit."""
        return (
            not self.is_closed
            and not self.is_draining
            and self._settings_arrived.is_set()
            and self.in_use < self._h2.remote_settings.max_concurrent_streams
        )

    @property
    def takes_none(self) -> bool:
        """Return whether the server currently allows no exchange at all (RFC 9113, 5.1.2)."""
        return self._h2.remote_settings.max_concurrent_streams == 0

    def released(self) -> None:
        """Notify the pool that an exchange assigned here did not take place."""
        self._released(self)

    def is_suspect(self, now: float, grace: float = 0.0) -> bool:
        """Return whether a PING is unanswered, and the link silent, for over ``grace`` s."""
        return self._pinged_at is not None and now - self._pinged_at > grace

    def close(self) -> None:
        """Close at once, failing the exchanges in progress; idempotent."""
        self._send_goaway()
        self._fail(ReadFailedError("the connection was closed"))

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the connection until it ends; report ``started`` once the server's settings arrive.

        Cancellation sends GOAWAY if that is possible without waiting.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._h2.initiate_connection()
                self._h2.update_settings(
                    {
                        # A pushed answer would not belong to any request.
                        h2.settings.SettingCodes.ENABLE_PUSH: 0,
                        h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                    }
                )
                # The window starts at 65,535 bytes (RFC 9113, 6.9.2) and can only be raised by a
                # difference.
                self._h2.increment_flow_control_window(CONNECTION_WINDOW_BYTES - 65_535)
                self._work.set()
                nursery.start_soon(self._write, nursery.cancel_scope)
                nursery.start_soon(self._read, nursery.cancel_scope)
                nursery.start_soon(self._listen, nursery.cancel_scope)
                await self._settings_arrived.wait()
                task_status.started()
            if not self._settings_arrived.is_set():
                raise ConnectFailedError(f"no HTTP/2 from the server: {self._error}")
        finally:
            self._send_goaway()
            self._fail(self._error or ReadFailedError("the connection was closed"))

    # -- the tasks of the connection

    async def _read(self, scope: trio.CancelScope) -> None:
        try:
            while True:
                data = await self._wire.receive(RECEIVE_BYTES)
                if not data:
                    raise ReadFailedError("the server closed the connection")
                arrived = len(self._h2.incomplete) + len(data)
                events = self._h2.receive_data(data)
                was_suspect = False
                # Only a complete frame shows that the server is alive; a partial one may be its
                # last.
                if len(self._h2.incomplete) < arrived:
                    self._received_at = trio.current_time()
                    was_suspect, self._pinged_at = self._pinged_at is not None, None
                for event in events:
                    handle = _HANDLERS.get(type(event))
                    if handle is not None:
                        handle(self, event)
                if self.is_closed:
                    break
                self._h2.check_next_frame()
                self._wake_writer()
                if was_suspect:
                    self._silence = Incident()
                    self._released(self)
        except NetworkError as error:
            self._error = error
        except Exception as error:  # h2's own, or a fault in h2: only this connection ends
            self._error = PeerProtocolError(f"the server broke HTTP/2: {error!r}")
        self.is_draining = True  # no request may start before run() has closed everything
        scope.cancel()

    async def _listen(self, scope: trio.CancelScope) -> None:
        """Send a PING to a server that is silent while answers are due, and detect its loss.

        Otherwise each call on a lost route would have to time out by itself, and each would count
        against the upstream.
        """
        while True:
            await trio.sleep(PING_SECONDS)
            now = trio.current_time()
            if self.is_suspect(now, PING_SECONDS):
                # If the event loop was blocked for long, the PING's answer may have arrived without
                # being read yet.
                await trio.sleep(READER_SECONDS)
            if self.is_suspect(now, PING_SECONDS):
                self._error = ReadFailedError(f"the server has been silent for {PING_SECONDS:g} s")
                break
            if self._streams and now - self._received_at >= PING_SECONDS:
                self._ping()
        scope.cancel()

    async def _write(self, scope: trio.CancelScope) -> None:
        while True:
            await self._work.wait()
            self._queued = 0
            data, self._left = self._left + self._h2.data_to_send(), b""
            if data:
                self._is_writing = True
                try:
                    sent = self._wire.send_now(data[:MAX_SEND_BYTES])
                    self._unsent.clear()
                    if sent < len(data):
                        with trio.fail_after(WRITE_STALL_SECONDS):
                            await self._wire.send_all(data[sent:])
                except trio.TooSlowError:
                    self._error = WriteTimedOutError(
                        f"the server took no bytes for {WRITE_STALL_SECONDS:g} s"
                    )
                    break
                except NetworkError as error:
                    self._error = error
                    self.is_draining = True
                    self._fail_unsent()
                    # The reader continues for a while: the server may have sent answers before it
                    # closed.
                    await trio.sleep(PING_SECONDS)
                    break
                self._is_writing = False
            self._drained.ring()
        scope.cancel()

    def _wake_writer(self) -> None:
        if self._h2.has_data_to_send:
            self._work.set()

    def _send_at_once(self) -> None:
        """Send the queue without the writer, which gets what the socket does not accept."""
        if self._is_writing or self._left:
            self._work.set()
            return
        data, sent = self._h2.data_to_send(), 0
        try:
            sent = self._wire.send_now(data[:MAX_SEND_BYTES])
            self._unsent.clear()
        except NetworkError:
            pass  # the writer gets the same error and handles it
        self._left = data[sent:]
        if self._left:
            self._work.set()

    def _send_goaway(self) -> None:
        """Send the queue and GOAWAY as far as possible without waiting."""
        if self._is_writing or self._left or self.is_closed:
            return  # half a frame was sent, anything after it would be garbage
        try:
            self._h2.close_connection()
            if self._wire.send_now(self._h2.data_to_send()):
                self._unsent.clear()
        except (NetworkError, h2.exceptions.ProtocolError):
            return

    def _fail(self, error: NetworkError) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._wire.close()
        if error.incident is None:
            error.incident = self._incident
        self._fail_unsent()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
            self.in_use -= 1
        self._drained.ring()
        self._released(self)

    def _fail_unsent(self) -> None:
        """Fail the requests of which nothing was sent; any method may be resent elsewhere."""
        unsent, self._unsent = self._unsent, []
        for stream in unsent:
            if stream.id in self._streams:
                self._fail_stream(
                    stream, NotProcessedError("the connection ended before the request was sent")
                )

    # -- one exchange

    async def exchange(self, request: httpx.Request) -> Received:
        """Send ``request`` and return the answer; see :class:`ClientConnection`."""
        stream = None
        timeouts, body = timeouts_of(request), body_of(request)
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            stream = self._open(request, has_body=body != b"")
            if body:
                await self._upload(stream, request, body, timeouts.write)
            while stream.headers is None:
                await stream.wait(timeouts.read)
        except BaseException:
            if stream is None:
                self.in_use -= 1
                self._after_exchange()
            else:
                # Nothing was received since the request was sent: the connection is silent, which
                # is one incident for all of its requests.
                abandoned = request.extensions.get(ABANDONED)
                if abandoned is not None and self._received_at < stream.opened:
                    abandoned(self._silence, True)
                self.abandon(stream)
            raise
        status, headers = stream.headers
        return Received(
            status,
            headers=headers,
            stream=StreamBody(request, self, stream, timeouts.read),
            extensions={"http_version": b"HTTP/2"},
            request=request,
        )

    def _open(self, request: httpx.Request, *, has_body: bool) -> _Stream:
        if self.is_closed or self.is_draining:
            raise self._unsent_error("the connection ended before the request was sent")
        headers = request_headers(request)
        note_departure(request)
        try:
            stream_id = self._h2.get_next_available_stream_id()
            self._h2.send_headers(stream_id, headers, end_stream=not has_body)
        except h2.exceptions.NoAvailableStreamIDError as error:
            self.is_draining = True
            raise NotProcessedError("the connection has used all its stream ids") from error
        except h2.exceptions.TooManyStreamsError as error:
            raise NotProcessedError("the server lowered its limit of streams") from error
        except h2.exceptions.ProtocolError as error:
            raise OurProtocolError(f"HTTP/2 cannot carry this request: {error}") from error
        stream = _Stream(stream_id, opened=trio.current_time(), upload_ended=not has_body)
        self._streams[stream_id] = stream
        self._unsent.append(stream)
        if has_body or len(self._streams) > 1:
            self._work.set()
        else:
            self._send_at_once()
        return stream

    async def _upload(
        self,
        stream: _Stream,
        request: httpx.Request,
        body: bytes | httpx.AsyncByteStream,
        limit: float | None,
    ) -> None:
        if isinstance(body, bytes):
            if await self._send(stream, body, limit):
                self._end_upload(stream)
            return
        length = content_length(request.headers.raw)
        async with chunks_of(body, length=length) as chunks:
            async for chunk in chunks:
                if not await self._send(stream, chunk, limit):
                    return
        self._end_upload(stream)

    async def _send(self, stream: _Stream, body: bytes, limit: float | None) -> bool:
        """Queue ``body`` as the server's windows allow; return False if it wants no more."""
        view = memoryview(body)
        while view:
            if stream.ended or stream.error is not None:
                stream.check()
                return False
            # One frame at most. h2 includes the connection's window in the stream's.
            window = min(
                self._h2.local_flow_control_window(stream.id), self._h2.max_outbound_frame_size
            )
            # Queued frames use memory, and go out before every later request's.
            if window <= 0 or self._queued > QUEUED_BYTES:
                gate = self._drained
                if window <= 0:
                    gate = stream.window = stream.window or Bell()
                with trio.move_on_after(float("inf") if limit is None else limit) as scope:
                    await gate.wait()
                if scope.cancelled_caught:
                    raise WriteTimedOutError(f"the server took no bytes for {limit:g} s")
                continue
            chunk = view[:window]
            try:
                self._h2.send_data(stream.id, chunk.tobytes())
            except h2.exceptions.ProtocolError as error:
                raise ReadFailedError(f"the stream has ended: {error}") from error
            self._queued += len(chunk)
            view = view[window:]
            self._work.set()
        return True

    def _end_upload(self, stream: _Stream) -> None:
        if not stream.ended and stream.error is None:
            self._h2.end_stream(stream.id)
            stream.upload_ended = True
            self._work.set()

    def note_read(self, stream: _Stream) -> None:
        """Note that the request's task has taken the received bytes of ``stream``."""
        if stream.ended:
            self._close_stream(stream)
        self._acknowledge(stream)

    def _acknowledge(self, stream: _Stream) -> None:
        """Reopen the windows by the bytes that the reader has taken.

        Windows open when bytes are read, not when they arrive: a slow reader slows the server
        instead of filling the memory.
        """
        amount, stream.unacknowledged = stream.unacknowledged, 0
        if amount and not self.is_closed:
            self._h2.acknowledge_received_data(amount, stream.id)
            self._wake_writer()

    def abandon(self, stream: _Stream) -> None:
        """Abandon ``stream``: reset it unless the exchange is over."""
        if stream.id not in self._streams:
            return
        self._close_stream(stream)
        self._acknowledge(stream)
        # Nothing was received since this request was sent, so a PING checks whether the server is
        # alive before further requests rely on it.
        if self._received_at < stream.opened:
            self._ping()

    def _ping(self) -> None:
        # One unanswered PING is enough; a server may treat many as a flood (CVE-2019-9512).
        if self._pinged_at is None and not self.is_closed:
            self._pinged_at = trio.current_time()
            self._h2.ping(b"sdktrio?")
            self._work.set()

    def _reset(self, stream: _Stream) -> None:
        try:
            self._h2.reset_stream(stream.id, h2.errors.ErrorCodes.CANCEL)
        except h2.exceptions.ProtocolError:
            return  # it ended in the meantime
        self._work.set()

    def _close_stream(self, stream: _Stream) -> None:
        if self._streams.pop(stream.id, None) is None:
            return
        if stream.error is None and not (stream.ended and stream.upload_ended):
            self._reset(stream)
        self.in_use -= 1
        self._after_exchange()

    def _after_exchange(self) -> None:
        self.idle_since = trio.current_time()
        if not self.is_closed:
            self._released(self)

    # -- the server's frames

    def _on_settings(self, _event: h2.events.RemoteSettingsChanged) -> None:
        if not self._settings_arrived.is_set():
            self._settings_arrived.set()
            return
        for stream in self._streams.values():  # the initial window may have grown
            stream.open_window()
        self._released(self)

    def _on_headers(self, event: h2.events.ResponseReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None and stream.headers is None:
            try:
                stream.headers = answer_head(event.headers)
            except PeerProtocolError as error:
                self._reset(stream)
                self._fail_stream(stream, error)
            stream.arrival.set()

    def _on_data(self, event: h2.events.DataReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            # No one will read them, but the connection's window must reopen, or all other streams
            # would stall.
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            return
        stream.unacknowledged += event.flow_controlled_length
        if event.data:
            stream.chunks.append(event.data)
            stream.arrival.set()

    def _on_end(self, event: h2.events.StreamEnded) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            stream.ended = True
            stream.arrival.set()
            stream.open_window()

    def _on_reset(self, event: h2.events.StreamReset) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        code = event.error_code
        # It means that nothing was processed (RFC 9113, 8.7), so any method may be resent.
        if code == h2.errors.ErrorCodes.REFUSED_STREAM:
            self._fail_stream(stream, NotProcessedError("the server refused the stream"))
        elif code == h2.errors.ErrorCodes.NO_ERROR and stream.ended:
            stream.open_window()
            stream.upload_ended = True  # answered in full; it wants no more of the body (8.1)
        else:
            name = getattr(code, "name", code)
            self._fail_stream(stream, ReadFailedError(f"the server reset the stream: {name}"))

    def _on_window(self, event: h2.events.WindowUpdated) -> None:
        if event.stream_id:
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.open_window()
            return
        for stream in self._streams.values():
            stream.open_window()

    def _on_goaway(self, event: h2.events.ConnectionTerminated) -> None:
        # The server has not processed streams above the one it names (RFC 9113, 6.8), so these may
        # be resent elsewhere. Those up to it are still answered here.
        self.is_draining = True
        last = event.last_stream_id or 0
        # A connection that has served requests may end at any time. One that never served any may
        # be a broken server: such requests are tried three times only.
        if last and self._h2.highest_outbound_stream_id:
            self._unsent_error = RenewedError
        for stream in list(self._streams.values()):
            if stream.id > last:
                self._fail_stream(stream, self._unsent_error("the server is going away"))
        self._released(self)

    def _fail_stream(self, stream: _Stream, error: NetworkError) -> None:
        """End ``stream`` with ``error``, without notifying the server."""
        stream.fail(error)
        self._close_stream(stream)
        self._acknowledge(stream)


_HANDLERS: dict[type, Callable[[Http2Connection, Any], None]] = {
    h2.events.RemoteSettingsChanged: Http2Connection._on_settings,
    h2.events.ResponseReceived: Http2Connection._on_headers,
    h2.events.DataReceived: Http2Connection._on_data,
    h2.events.StreamEnded: Http2Connection._on_end,
    h2.events.StreamReset: Http2Connection._on_reset,
    h2.events.WindowUpdated: Http2Connection._on_window,
    h2.events.ConnectionTerminated: Http2Connection._on_goaway,
}
