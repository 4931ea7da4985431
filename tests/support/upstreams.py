"""Small servers on loopback that tests of the client talk to, in the test's own event loop.

They speak HTTP/1.1 by hand, HTTP/2 by h2 and HTTP/3 by aioquic, and record what the client did:
connections, requests, resets. The path selects the behaviour: ``/`` responds at once, ``/hang``
never, ``/after/0.01`` after so many seconds, ``/together/9`` after so many requests in total,
``/size/1000`` with so many bytes, ``/upload`` after the whole body, ``/stuck`` reads nothing of the
body.
"""

import math
import socket
import ssl
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial

import attrs
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import trio
import trustme
from aioquic.buffer import Buffer
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, StopSendingReceived, StreamReset
from aioquic.quic.packet import pull_quic_header
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

from .waiting import until

BODY = b'{"items": []}'


@attrs.define
class ConnectionOptions:
    """The attributes of ``Sdk:Connection``, with fractions of minutes allowed."""

    max_connections_per_server: int = 100
    pooled_connection_lifetime_minutes: float = 15
    pooled_connection_idle_timeout_minutes: float = 2
    enable_http2: bool = True
    enable_http3: bool = False
    enable_multiple_http2_connections: bool = True
    proxy_url: str | None = None
    proxy_credentials_env_var: str = "SDK_PROXY_CREDENTIALS"
    ca_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None


class Authority:
    """A certificate authority of the test, and contexts of both sides."""

    def __init__(self):
        self.ca = trustme.CA()
        self.certificate = self.ca.issue_cert("127.0.0.1", "localhost")

    def client_context(self):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.ca.configure_trust(context)
        return context

    def server_context(self, *protocols):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.certificate.configure_cert(context)
        context.set_alpn_protocols(list(protocols))
        return context


class Upstream:
    """The counters of every server in this module."""

    def __init__(self):
        self.port = 0
        self.connections = 0
        self.open_connections = 0
        self.most_connections = 0
        self.requests = 0
        self.resets = Counter()

    def connected(self):
        self.connections += 1
        self.open_connections += 1
        self.most_connections = max(self.most_connections, self.open_connections)

    def disconnected(self):
        self.open_connections -= 1

    async def wait_as_asked(self, path):
        """Wait as long as the path says; return at once for others."""
        if path.startswith("/after/"):
            await trio.sleep(float(path[7:]))
        elif path.startswith("/together/"):
            await until(lambda: self.requests >= int(path[10:]))


@asynccontextmanager
async def serving(upstream, handler, *, context=None):
    """Serve ``handler`` on a free port of loopback for the length of the block."""
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, _guarded(upstream, handler, context), 0, host="127.0.0.1")
        listeners = await nursery.start(serve)
        upstream.port = listeners[0].socket.getsockname()[1]
        yield upstream
        nursery.cancel_scope.cancel()


def _guarded(upstream, handler, context):
    async def serve(stream):
        upstream.connected()
        try:
            if context is not None:
                stream = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
                await stream.do_handshake()
            await handler(stream)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # several tasks of a handler may notice that the client has left
        finally:
            upstream.disconnected()
            with trio.move_on_after(1, shield=True):
                await trio.aclose_forcefully(stream)

    return serve


def http1_answer(body=BODY, *, status=b"200 OK", extra=b""):
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), extra, body)


def http1_handler(upstream):
    """Return an HTTP/1.1 server with the behaviour in the module's description."""

    async def handle(stream):
        buffer = b""
        while True:
            while b"\r\n\r\n" not in buffer:
                data = await stream.receive_some(65_536)
                if not data:
                    return
                buffer += data
            head, _, buffer = buffer.partition(b"\r\n\r\n")
            upstream.requests += 1
            _, path, _ = head.split(b"\r\n")[0].split(b" ")
            length = 0
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line[15:])
            if path == b"/stuck":
                await trio.sleep_forever()
            while len(buffer) < length:
                data = await stream.receive_some(65_536)
                if not data:
                    return
                buffer += data
            buffer = buffer[length:]
            await upstream.wait_as_asked(path.decode())
            await stream.send_all(await _http1_body(path.decode(), length))

    return handle


async def _http1_body(path, length):
    if path == "/hang":
        await trio.sleep_forever()
    elif path.startswith("/size/"):
        return http1_answer(bytes(int(path[6:])))
    elif path == "/upload":
        return http1_answer(b"%d" % length)
    return http1_answer()


def http2_handler(upstream, *, max_streams=100, goaway_after=None, refusals=0):
    """Return an HTTP/2 server over TLS; it sends GOAWAY after ``goaway_after`` requests.

    The first ``refusals`` streams of all connections are refused unprocessed.
    """
    refused = iter(range(refusals))

    async def handle(stream):
        server = _Http2Server(upstream, stream, max_streams, goaway_after)
        server.refused = refused
        await server.run()

    return handle


class _Http2Server:
    def __init__(self, upstream, stream, max_streams, goaway_after):
        self.upstream = upstream
        self.stream = stream
        self.goaway_after = goaway_after
        self.served = 0
        self.last_stream_id = None
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding="ascii")
        )
        self.h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: max_streams},
        )
        self.sending = trio.Lock()
        self.paths = {}
        self.heads = set()
        self.received = Counter()
        self.held = Counter()
        self.windows = trio.Event()

    async def flush(self):
        async with self.sending:
            data = self.h2.data_to_send()
            if data:
                await self.stream.send_all(data)

    async def run(self):
        self.h2.initiate_connection()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.flush)
            while True:
                data = await self.stream.receive_some(65_536)
                if not data:
                    break
                for event in self.h2.receive_data(data):
                    self.on_event(event, nursery)
                nursery.start_soon(self.flush)
            nursery.cancel_scope.cancel()

    def on_event(self, event, nursery):
        match event:
            case h2.events.RequestReceived():
                if self.last_stream_id is not None:
                    return  # too late: GOAWAY had the id of an earlier one
                if next(self.refused, None) is not None:
                    self.h2.reset_stream(event.stream_id, h2.errors.ErrorCodes.REFUSED_STREAM)
                    return
                self.upstream.requests += 1
                headers = dict(event.headers)
                self.paths[event.stream_id] = headers[":path"]
                if headers[":method"] == "HEAD":
                    self.heads.add(event.stream_id)
            case h2.events.DataReceived():
                self.received[event.stream_id] += len(event.data)
                if self.paths.get(event.stream_id) == "/stuck":
                    self.held[event.stream_id] += event.flow_controlled_length
                else:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                nursery.start_soon(self.answer, event.stream_id)
            case h2.events.StreamReset():
                self.upstream.resets[int(event.error_code)] += 1
                self.paths.pop(event.stream_id, None)
                # Return the unread bytes of a stream to the connection's window.
                self.h2.acknowledge_received_data(
                    self.held.pop(event.stream_id, 0), event.stream_id
                )
            case h2.events.WindowUpdated():
                self.windows.set()
                self.windows = trio.Event()

    async def answer(self, stream_id):
        path = self.paths.get(stream_id, "/hang")
        body = BODY
        if path in ("/hang", "/stuck"):
            return
        await self.upstream.wait_as_asked(path)
        if path.startswith("/size/"):
            body = bytes(int(path[6:]))
        elif path == "/upload":
            body = b"%d" % self.received[stream_id]
        if stream_id not in self.paths:
            return
        self.served += 1
        if self.served == self.goaway_after:
            # Before the response, like nginx; not through h2, which would close the connection.
            async with self.sending:
                self.last_stream_id = max(self.paths)
                data = self.h2.data_to_send()
                await self.stream.send_all(data + _goaway(self.last_stream_id))
        self.h2.send_headers(stream_id, [(":status", "200"), ("content-length", str(len(body)))])
        view = memoryview(b"" if stream_id in self.heads else body)
        while view and stream_id in self.paths:
            window = min(
                self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size
            )
            if window <= 0:
                await self.windows.wait()
                continue
            self.h2.send_data(stream_id, view[:window].tobytes())
            view = view[window:]
            await self.flush()
        if stream_id in self.paths:
            self.h2.end_stream(stream_id)
        await self.flush()


def _goaway(last_stream_id):
    payload = last_stream_id.to_bytes(4, "big") + bytes(4)
    return len(payload).to_bytes(3, "big") + bytes([7, 0]) + bytes(4) + payload


@asynccontextmanager
async def serving_http3(upstream, authority, *, max_streams=128):
    """Serve HTTP/3 on a free UDP port of loopback for the length of the block."""
    configuration = QuicConfiguration(alpn_protocols=H3_ALPN, is_client=False)
    certificate = authority.certificate
    configuration.certificate = load_pem_x509_certificate(certificate.cert_chain_pems[0].bytes())
    configuration.private_key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
    sock = trio.socket.socket(type=socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 1024 * 1024)
    with sock:
        await sock.bind(("127.0.0.1", upstream.port))
        upstream.port = sock.getsockname()[1]
        async with trio.open_nursery() as nursery:
            server = _Http3Server(upstream, sock, configuration, max_streams, nursery)
            nursery.start_soon(server.run)
            yield upstream
            nursery.cancel_scope.cancel()


class _Http3Server:
    def __init__(self, upstream, sock, configuration, max_streams, nursery):
        self.upstream = upstream
        self.sock = sock
        self.configuration = configuration
        self.max_streams = max_streams
        self.nursery = nursery
        self.by_id = {}
        self.sessions = []
        self.wakeup = trio.CancelScope()

    async def run(self):
        while True:
            timers = [timer for s in self.sessions if (timer := s.quic.get_timer()) is not None]
            data = None
            with trio.CancelScope(deadline=min(timers, default=math.inf)) as self.wakeup:
                data, address = await self.sock.recvfrom(65_536)
            now = trio.current_time()
            if data is not None:
                session = self.session_of(data, address)
                if session is not None:
                    session.quic.receive_datagram(data, address, now=now)
            for session in list(self.sessions):
                timer = session.quic.get_timer()
                if timer is not None and timer <= now:
                    session.quic.handle_timer(now=now)
                session.handle_events()
                self.transmit(session)

    def session_of(self, data, address):
        header = pull_quic_header(Buffer(data=data), host_cid_length=8)
        for session in self.sessions:
            if session.address == address:
                return session
        if header.packet_type is None or header.packet_type.name != "INITIAL":
            return None
        quic = QuicConnection(
            configuration=self.configuration,
            original_destination_connection_id=header.destination_cid,
        )
        quic._local_max_streams_bidi.value = self.max_streams
        quic._local_max_streams_bidi.sent = self.max_streams
        session = _Http3Session(self, quic, address)
        self.sessions.append(session)
        self.upstream.connected()
        return session

    def transmit(self, session):
        for datagram, address in session.quic.datagrams_to_send(now=trio.current_time()):
            try:
                self.sock._sock.sendto(datagram, address)
            except BlockingIOError:
                break
        timer = session.quic.get_timer()
        if timer is not None and timer < self.wakeup.deadline:
            self.wakeup.deadline = timer


class _Http3Session:
    def __init__(self, server, quic, address):
        self.server = server
        self.quic = quic
        self.address = address
        self.h3 = H3Connection(quic)
        self.paths = {}
        self.received = Counter()

    def handle_events(self):
        upstream = self.server.upstream
        while (event := self.quic.next_event()) is not None:
            if isinstance(event, ConnectionTerminated):
                if self in self.server.sessions:
                    self.server.sessions.remove(self)
                    upstream.disconnected()
                return
            if isinstance(event, StreamReset | StopSendingReceived):
                upstream.resets[event.error_code] += 1
                self.paths.pop(event.stream_id, None)
            for h3_event in self.h3.handle_event(event):
                if isinstance(h3_event, HeadersReceived):
                    upstream.requests += 1
                    self.paths[h3_event.stream_id] = dict(h3_event.headers)[b":path"].decode()
                elif isinstance(h3_event, DataReceived):
                    self.received[h3_event.stream_id] += len(h3_event.data)
                if getattr(h3_event, "stream_ended", False):
                    self.server.nursery.start_soon(self.answer, h3_event.stream_id)

    async def answer(self, stream_id):
        path = self.paths.get(stream_id, "/hang")
        body = BODY
        if path == "/hang":
            return
        await self.server.upstream.wait_as_asked(path)
        if path.startswith("/size/"):
            body = bytes(int(path[6:]))
        elif path == "/upload":
            body = b"%d" % self.received[stream_id]
        if stream_id in self.paths:
            self.h3.send_headers(stream_id, [(b":status", b"200")])
            self.h3.send_data(stream_id, body, end_stream=True)
            self.server.transmit(self)
