"""Connections of HTTP/2 over TLS, on h2: a reader, a writer, and a task for each request.

What bounds one client: the frames that it may spend (:mod:`.http2_frames`), the streams whose tasks
run at one time, the window of the connection, which bounds what is kept of all its bodies, and the
deadlines of :class:`~.limits.Limits`. Hypercorn's HTTP/2 keeps none of these (ADR 21).
"""

from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Protocol

import attrs
import h2.config
import h2.events
import h2.settings
import trio
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError

from ..client.http2_protocol import CorrectedProtocol
from ..logs import get_logger
from .fast_path import Address, App
from .http2_frames import (
    ANSWER_FRAME_EARNS,
    CARRYING_BYTES,
    REFUSAL_COSTS,
    REQUEST_EARNS,
    RESET_COSTS,
    FrameError,
    FrameMeter,
)
from .http2_messages import request_head
from .http2_stream import Http2Stream
from .limits import Expired, Limits
from .request_head import Headers, RequestError

_log = get_logger("server")

#: Requests of one connection at one time: what clients assume before they have been told.
STREAMS = 100

#: Frames of an answer: the smallest that every client takes.
_FRAME_BYTES = 16_384

#: Headers are checked by us (:mod:`.http2_messages`), request by request.
_CONFIG = h2.config.H2Configuration(
    client_side=False,
    header_encoding=None,
    validate_inbound_headers=False,
    normalize_inbound_headers=False,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)


class Transport(Protocol):
    """A connection of the fast path, after its handshake; see there."""

    limits: Limits
    client: Address
    server: Address
    ended: bool
    read_deadline: float

    @property
    def now(self) -> float: ...  # noqa: D102
    async def read(self, *, idle: bool = False) -> bytes: ...  # noqa: D102
    async def send(self, data: bytes) -> None: ...  # noqa: D102
    async def interrupt_readers(self) -> None: ...  # noqa: D102


class _Protocol(CorrectedProtocol):
    """h2, which would remember 65 536 streams of each connection for as long as it lasts."""

    MAX_CLOSED_STREAMS = 10 * STREAMS


@attrs.define(kw_only=True, eq=False)
class Http2Service:
    """What the connections of one server share: ``draining`` tells whether the server ends.

    A stream is worth a connection of HTTP/1.1, so all of them together are bounded by
    ``limits.connections``.
    """

    app: App
    limits: Limits
    draining: Callable[[], bool]
    streams: int = 0

    async def serve(self, transport: Transport) -> None:
        """Serve a connection that has agreed on HTTP/2, to its end."""
        await Http2Connection(self, transport).run()


class Http2Connection:
    """One client's connection."""

    def __init__(self, service: Http2Service, transport: Transport) -> None:
        self._service = service
        self._transport = transport
        self.app = service.app
        self.limits = service.limits
        self.client = transport.client
        self.server = transport.server
        self._meter = FrameMeter(transport.now)
        # Those whose tasks have not ended, whatever has become of the client's side of them.
        self._streams: dict[int, Http2Stream] = {}
        self._requests = 0
        self._leaving = False
        self._idle_since = transport.now
        self._outgoing = bytearray()
        self._writing = False
        self._wanted = trio.Event()
        self._drained = trio.Event()
        self._h2 = _Protocol(_CONFIG)
        self._h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: self.limits.head_bytes,
            },
        )
        # What h2 unfolds before it gives up: enough to be answered 431, too little to be costly.
        self._h2.decoder.max_header_list_size = self.limits.head_bytes + 40 * self.limits.headers

    @property
    def ended(self) -> bool:
        """Whether nothing more can be sent or read."""
        return self._transport.ended

    async def run(self) -> None:
        """Serve until the client or the server is done with the connection.

        Requests that are in progress when the client leaves run to their end. Cancelled, they are
        cancelled.
        """
        self._h2.initiate_connection()
        self._want_to_write()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            async with trio.open_nursery() as tasks:
                await self._read(tasks)
                for stream in tuple(self._streams.values()):
                    stream.silence()
            await self.sent()
            nursery.cancel_scope.cancel()

    # -- what arrives ------------------------------------------------------------------------

    async def _read(self, tasks: trio.Nursery) -> None:
        transport = self._transport
        while not transport.ended:
            if self._service.draining():
                self._leave()
            if self._leaving and not self._streams:
                break
            transport.read_deadline = self._deadline()
            try:
                data = await transport.read(idle=not self._leaving)
            except OSError:
                transport.ended = True
                break
            except Expired:
                if self._deadline() > transport.now:
                    continue  # woken for something else
                self._say_goodbye(
                    ErrorCodes.NO_ERROR if self._meter.begun is None else ErrorCodes.CANCEL,
                    None if self._meter.begun is None else "a frame took too long",
                )
                break
            if not data:
                break
            try:
                self._meter.feed(data, transport.now)
                self._take(self._h2.receive_data(data), tasks)
            except FrameError as error:
                self._say_goodbye(error.code, str(error))
                break
            except ProtocolError as error:  # h2 has said goodbye
                self._log_end(str(error))
                self._want_to_write()
                break
            self._want_to_write()
            # A client that does not read what it causes is not read from, either.
            await self.sent()
        await trio.lowlevel.checkpoint()

    def _deadline(self) -> float:
        limits = self.limits
        idle = inf if self._streams else self._idle_since + limits.keep_alive_seconds
        if self._meter.begun is None:
            return idle
        patience = limits.body_seconds if self._meter.in_body else limits.head_seconds
        return min(idle, self._meter.begun + patience)

    def _take(self, events: list[h2.events.Event], tasks: trio.Nursery) -> None:
        for event in events:
            match event:
                case h2.events.RequestReceived():
                    self._begin(event, tasks)
                case h2.events.DataReceived():
                    stream = self._streams.get(event.stream_id or 0)
                    size = event.flow_controlled_length or 0
                    if stream is not None:
                        stream.feed(event.data or b"", size)
                        if len(event.data or b"") >= CARRYING_BYTES:
                            self._meter.earn(1.0)
                    elif event.stream_id is not None:
                        self._h2.acknowledge_received_data(size, event.stream_id)
                case h2.events.StreamEnded():
                    stream = self._streams.get(event.stream_id or 0)
                    if stream is not None:
                        stream.end()
                case h2.events.StreamReset():
                    if not event.remote_reset:  # a frame that made h2 do it
                        self._meter.spend(RESET_COSTS)
                    stream = self._streams.get(event.stream_id or 0)
                    if stream is not None:
                        stream.abandon()
                case h2.events.WindowUpdated(stream_id=stream_id) if stream_id:
                    if stream_id in self._streams:
                        self._streams[stream_id].open_window()
                case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                    for stream in self._streams.values():
                        stream.open_window()
                case h2.events.ConnectionTerminated():
                    # The client begins no request any more; those that it has begun are answered.
                    self._leaving = True

    def _begin(self, event: h2.events.RequestReceived, tasks: trio.Nursery) -> None:
        stream_id = event.stream_id or 0
        if (
            self._leaving
            or len(self._streams) >= STREAMS
            or self._service.streams >= self.limits.connections
        ):
            with suppress(ProtocolError):  # the client has reset it in the same breath
                self._h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        try:
            stream = Http2Stream(self, stream_id, request_head(event.headers or (), self.limits))
        except RequestError as error:
            self._meter.spend(REFUSAL_COSTS)
            stream = Http2Stream(self, stream_id, None, error)
        self._streams[stream_id] = stream
        self._service.streams += 1
        self._requests += 1
        tasks.start_soon(stream.run)
        if self._requests >= self.limits.keep_alive_requests:
            self._leave()

    # -- for the streams ---------------------------------------------------------------------

    def forget(self, stream: Http2Stream) -> None:
        """Count a stream no longer: its task is at its end."""
        del self._streams[stream.id]
        self._service.streams -= 1
        if not stream.reset and stream.error is None:
            self._meter.earn(REQUEST_EARNS)
        self._want_to_write()
        if not self._streams:
            self._idle_since = self._transport.now
            self._transport.read_deadline = self._deadline()
            if self._leaving:
                self._wanted.set()  # the writer ends the wait of the reader

    def acknowledge(self, stream: Http2Stream, size: int) -> None:
        """Give the client back what a part of a body took of its window."""
        if not self.ended:
            self._h2.acknowledge_received_data(size, stream.id)
            self._want_to_write()

    def send_head(self, stream: Http2Stream, fields: Headers, *, end: bool = False) -> None:
        """Queue the head of an answer."""
        if stream.reset or self.ended:
            return
        try:
            self._h2.send_headers(stream.id, fields, end_stream=end)
        except ProtocolError:
            stream.abandon()
        self._want_to_write()

    def send_part(self, stream: Http2Stream, data: memoryview, *, end: bool) -> int:
        """Queue what fits of a part of the answer, one frame at most, and return its size.

        ``end``: the answer ends with this part.
        """
        if stream.reset or self.ended:
            return len(data)
        try:
            window = self._h2.local_flow_control_window(stream.id)
            size = max(0, min(window, len(data), _FRAME_BYTES))
            if size or not data:
                last = end and size == len(data)
                self._h2.send_data(stream.id, bytes(data[:size]), end_stream=last)
        except ProtocolError:
            stream.abandon()
            return len(data)
        if size == _FRAME_BYTES:
            self._meter.earn(ANSWER_FRAME_EARNS)
        self._want_to_write()
        return size

    def reset(self, stream: Http2Stream, code: ErrorCodes) -> None:
        """Queue the end of a stream that is not its proper one."""
        if not stream.reset and not self.ended:
            try:
                self._h2.reset_stream(stream.id, code)
            except ProtocolError:
                stream.abandon()
            self._want_to_write()

    # -- what is sent ------------------------------------------------------------------------

    def _want_to_write(self) -> None:
        """Queue what h2 has to say, if anything, and wake the writer for it."""
        self._outgoing += self._h2.data_to_send()
        if self._outgoing:
            self._writing = True
            self._wanted.set()

    async def _write(self) -> None:
        """Send what is queued, as much as there is at a time; nothing else sends."""
        transport = self._transport
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            data, self._outgoing = self._outgoing, bytearray()
            if data:
                await transport.send(bytes(data))
            if transport.ended:
                for stream in self._streams.values():
                    stream.abandon()
            if not self._outgoing or transport.ended:
                self._writing = False
                self._drained.set()
                self._drained = trio.Event()
            if transport.ended or (self._leaving and not self._streams):
                await transport.interrupt_readers()

    async def sent(self) -> None:  # noqa: ASYNC910 - what calls it waits for the client as well
        """Wait until all that was queued has been sent, or cannot be."""
        while self._writing and not self.ended:
            await self._drained.wait()

    # -- the end -----------------------------------------------------------------------------

    def _leave(self) -> None:
        """Announce that no further request is begun; those that came are answered."""
        if not self._leaving:
            self._leaving = True
            self._say_goodbye(ErrorCodes.NO_ERROR, None)

    def _say_goodbye(self, code: ErrorCodes, reason: str | None) -> None:
        """Queue GOAWAY, which h2 takes for the end of everything: it is not told."""
        if reason is not None:
            self._log_end(reason)
        last = self._h2.highest_inbound_stream_id
        self._outgoing += self._h2.data_to_send()
        self._outgoing += b"\0\0\x08\x07\0\0\0\0\0" + last.to_bytes(4, "big")
        self._outgoing += int(code).to_bytes(4, "big")
        self._want_to_write()

    def _log_end(self, reason: str) -> None:
        _log.info("server.connection_refused", protocol="HTTP/2", reason=reason)
