"""A client of HTTP/2 over TLS that can send any frame, and TLS material for both ends."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import trio
import trustme

AUTHORITY = trustme.CA()


def certificate_in(directory: Any) -> tuple[str, str]:
    """Write a certificate for localhost and its key; return the two paths."""
    issued = AUTHORITY.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    issued.cert_chain_pems[0].write_to_path(directory / "certificate.pem")
    return str(directory / "certificate.pem"), str(directory / "key.pem")


def client_context(*protocols: str) -> ssl.SSLContext:
    """A context that trusts :data:`AUTHORITY` and offers the protocols."""
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


async def open_tls(url: str, *protocols: str) -> trio.SSLStream[trio.SocketStream]:
    """A connection to a server of https, with the handshake done."""
    port = int(url.removeprefix("https://").partition("/")[0].rpartition(":")[2])
    stream = trio.SSLStream(
        await trio.open_tcp_stream("127.0.0.1", port),
        client_context(*protocols),
        server_hostname="localhost",
        https_compatible=True,
    )
    try:
        await stream.do_handshake()
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


def frame(kind: int, stream_id: int = 0, payload: bytes = b"", flags: int = 0) -> bytes:
    """The bytes of one frame."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream_id.to_bytes(4, "big") + payload


@attrs.define
class Http2Answer:
    """What has come back for one stream; ``reset`` is the code that ended it, if one did."""

    status: int = 0
    headers: dict[bytes, bytes] = attrs.Factory(dict)
    interim: list[int] = attrs.Factory(list)
    body: bytearray = attrs.Factory(bytearray)
    ended: bool = False
    reset: int | None = None


@attrs.define
class Http2Wire:
    """A client's end; what it sends is not checked."""

    stream: trio.SSLStream[trio.SocketStream]
    h2: h2.connection.H2Connection
    answers: dict[int, Http2Answer] = attrs.Factory(dict)
    received: bytearray = attrs.Factory(bytearray)
    pings: int = 0
    goaway: int | None = None
    last_stream: int | None = None
    closed: bool = False
    lock: trio.Lock = attrs.Factory(trio.Lock)
    #: Give windows back as data arrives.
    takes: bool = True

    async def send(self, data: bytes = b"") -> None:
        """Send what h2 has queued, then ``data``; OSError when the server has left."""
        try:
            async with self.lock:
                await self.stream.send_all(self.h2.data_to_send() + data)
        except trio.BrokenResourceError as error:
            raise ConnectionError("the connection was reset") from error

    async def begin(
        self,
        path: bytes = b"/",
        *fields: tuple[bytes, bytes],
        method: bytes = b"GET",
        body: bytes | None = None,
        end: bool = True,
    ) -> int:
        """Send a request, with as much of the body as the windows take; return its stream."""
        return await self.begin_with(
            [
                (b":method", method if body is None else b"POST"),
                (b":scheme", b"https"),
                (b":authority", b"test"),
                (b":path", path),
                *fields,
            ],
            body,
            end=end,
        )

    async def begin_with(
        self, fields: list[tuple[bytes, bytes]], body: bytes | None = None, *, end: bool = True
    ) -> int:
        """As :meth:`begin`, with every field given."""
        stream_id = self.h2.get_next_available_stream_id()
        self.answers[stream_id] = Http2Answer()
        self.h2.send_headers(stream_id, fields, end_stream=end and not body)
        await self.send()
        if body:
            await self.upload(stream_id, body, end=end)
        return stream_id

    async def upload(self, stream_id: int, body: bytes, *, end: bool = True) -> None:
        """Send a body as the server takes it; stops when the stream is reset or answered."""
        answer = self.answers[stream_id]
        while body and answer.reset is None and not self.closed:
            window = min(self.h2.local_flow_control_window(stream_id), 16_384)
            if window:
                part, body = body[:window], body[window:]
                self.h2.send_data(stream_id, part, end_stream=end and not body)
                await self.send()
            else:
                await self.receive()

    async def receive(self) -> None:
        """Take in what arrives next."""
        try:
            data = await self.stream.receive_some(65_536)
        except trio.BrokenResourceError:
            data = b""
        if not data:
            self.closed = True
            return
        self.received += data
        self._look_for_goaway()
        # h2 knows nothing of frames that were sent beside it, and complains of their effects.
        with suppress(h2.exceptions.ProtocolError):
            for event in self.h2.receive_data(data):
                self._take(event)
        if not self.lock.locked():
            with suppress(ConnectionError):
                await self.send()

    def _look_for_goaway(self) -> None:
        received = self.received
        while len(received) >= 9 + (length := int.from_bytes(received[:3], "big")):
            if received[3] == 7:
                self.last_stream = int.from_bytes(received[9:13], "big")
                self.goaway = int.from_bytes(received[13:17], "big")
            del received[: 9 + length]

    def _take(self, event: Any) -> None:
        match event:
            case h2.events.InformationalResponseReceived():
                answer = self.answers[event.stream_id]
                answer.interim.append(int(dict(event.headers)[b":status"]))
            case h2.events.ResponseReceived():
                answer = self.answers[event.stream_id]
                answer.headers = dict(event.headers)
                answer.status = int(answer.headers.pop(b":status"))
            case h2.events.DataReceived():
                self.answers[event.stream_id].body += event.data
                if self.takes:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self.answers[event.stream_id].ended = True
            case h2.events.StreamReset():
                self.answers[event.stream_id].reset = int(event.error_code)
            case h2.events.PingAckReceived():
                self.pings += 1

    async def answer(self, stream_id: int) -> Http2Answer:
        """Wait for the end of a stream, proper or not, or of the connection."""
        answer = self.answers[stream_id]
        while not (answer.ended or answer.reset is not None or self.closed):
            await self.receive()
        return answer

    async def ask(self, path: bytes = b"/", *fields: Any, **options: Any) -> Http2Answer:
        """Send a request and wait for its answer."""
        return await self.answer(await self.begin(path, *fields, **options))

    async def rest(self) -> int | None:
        """Wait until the server ends the connection; return the code of its GOAWAY."""
        while not self.closed:
            await self.receive()
        return self.goaway

    async def pour(self, data: bytes, times: int = 1) -> int | None:
        """Send ``data`` again and again, reading meanwhile, until GOAWAY; return its code."""

        async def read() -> None:
            while self.goaway is None and not self.closed:
                await self.receive()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            with suppress(ConnectionError):
                for _ in range(times):
                    await self.send(data)
                await trio.sleep_forever()
        return self.goaway


class _Client(h2.connection.H2Connection):
    """h2, which goes on after GOAWAY: what had begun may still be answered."""

    def _receive_goaway_frame(self, frame: Any) -> Any:
        state = self.state_machine.state
        result = super()._receive_goaway_frame(frame)
        self.state_machine.state = state
        return result


@asynccontextmanager
async def http2_wire(url: str, *, hello: bool = True) -> AsyncIterator[Http2Wire]:
    """Connect; ``hello``: send the preface and settings, and take in the server's."""
    stream = await open_tls(url, "h2", "http/1.1")
    assert stream.selected_alpn_protocol() == "h2"
    wire = Http2Wire(
        stream,
        _Client(
            h2.config.H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        ),
    )
    try:
        if hello:
            wire.h2.initiate_connection()
            await wire.send()
            await wire.receive()
        yield wire
    finally:
        await trio.aclose_forcefully(stream)
