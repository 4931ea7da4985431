"""The server side of ``benchmarks/client.py``: as little work per request as Python allows.

It sends the same JSON document for every request. It only counts the blank lines of HTTP/1.1
requests. Of HTTP/2 it reads only frame headers, and the response is a constant header block. So the
server is never the bottleneck. Do not use it for anything else.
"""

import argparse
import asyncio
import os
import ssl
import struct

BODY = b'{"items": [' + b",".join(b'{"id": "%032d", "paid": true}' % n for n in range(20)) + b"]}"
ANSWER_1 = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"x-request-id: 8f14e45fceea167a\r\ncache-control: no-store\r\n\r\n%s" % (len(BODY), BODY)
)
#: :status 200, then content-type and cache-control as literals without indexing.
HEADERS_2 = b"\x88\x0f\x10\x10application/json\x0f\x09\x08no-store"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">HBBBL", len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload
    )


class Answerer(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        secured = transport.get_extra_info("ssl_object")
        self.buffer = b""
        self.is_http2 = secured is not None and secured.selected_alpn_protocol() == "h2"
        if self.is_http2:
            # SETTINGS_MAX_CONCURRENT_STREAMS 100, as common servers send it.
            transport.write(frame(SETTINGS, 0, 0, struct.pack(">HL", 3, 100)))
            self.preface_left = len(PREFACE)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.is_http2:
            self.http2()
            return
        count = self.buffer.count(b"\r\n\r\n")
        if count:
            self.buffer = self.buffer[self.buffer.rindex(b"\r\n\r\n") + 4 :]
            self.transport.write(ANSWER_1 * count)

    def http2(self) -> None:
        if self.preface_left:
            if len(self.buffer) < self.preface_left:
                return
            self.buffer, self.preface_left = self.buffer[self.preface_left :], 0
        out, at, buffer = [], 0, self.buffer
        while at + 9 <= len(buffer):
            high, low, kind, flags, stream = struct.unpack_from(">HBBBL", buffer, at)
            end = at + 9 + (high << 8 | low)
            if end > len(buffer):
                break
            if kind == HEADERS:
                out.append(frame(HEADERS, END_HEADERS, stream, HEADERS_2))
                out.append(frame(DATA, END_STREAM, stream, BODY))
            elif kind == SETTINGS and not flags & ACK:
                out.append(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                out.append(frame(PING, ACK, 0, buffer[at + 9 : end]))
            at = end
        self.buffer = buffer[at:]
        if out:
            self.transport.write(b"".join(out))


async def main(certificate: str, cpu: int | None) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.set_alpn_protocols(["h2", "http/1.1"])
    loop = asyncio.get_running_loop()
    plain = await loop.create_server(Answerer, "127.0.0.1", 0)
    secure = await loop.create_server(Answerer, "127.0.0.1", 0, ssl=context)
    ports = [server.sockets[0].getsockname()[1] for server in (plain, secure)]
    print(*ports, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("certificate")
    parser.add_argument("--cpu", type=int)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.certificate, arguments.cpu))
