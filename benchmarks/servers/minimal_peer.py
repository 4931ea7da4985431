"""The lower limit: the least work with trio and httptools. Argument: PORT.

Verification, envelope and typed event are our own functions. There are no limits, deadlines, store,
duplicate check or graceful stop. The difference to `inline` is the cost of all these.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httptools
import trio

from sdk_trio.config import Settings
from sdk_trio.events import OrderPaidEvent, decode_envelope, decode_event
from sdk_trio.webhooks.signature import Keyring
from sdk_trio.webhooks.verdict import Accepted, Delivery, verify_delivery

paid = 0
OK = b"HTTP/1.1 200 \r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
INVALID = OK.replace(b"200", b"400")
settings = Settings.from_mapping(
    {"Webhooks:Secret": os.environ["BENCHMARK_SECRET"]}, standalone=True, receiver=True
)
options = settings.webhooks
keyring = Keyring.from_secrets(options.all_secrets, options.key_derivation)


#: What answers a verified delivery: its id, its event, its body.
Deliver = Callable[[str, OrderPaidEvent, bytes], Awaitable[None]]


async def handle(webhook_id: str, event: OrderPaidEvent, raw: bytes) -> None:
    global paid
    paid += event.data.total_amount or 0


class Request:
    """Collects the results of the parser's callbacks."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: list[bytes] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


async def answer(request: Request, deliver: Deliver) -> bytes:
    raw = b"".join(request.body)
    now = time.time()
    verdict = verify_delivery(Delivery(request.headers, raw, now), keyring, tolerance_seconds=300)
    if not isinstance(verdict, Accepted):
        return INVALID
    event = decode_event(
        decode_envelope(raw),
        webhook_id=verdict.webhook_id,
        raw=raw,
        header_timestamp=verdict.timestamp,
        received_at=now,
    )
    await deliver(verdict.webhook_id, event, raw)
    return OK


async def serve(connection: socket.socket, deliver: Deliver) -> None:
    with connection, suppress(ConnectionError):
        request = Request()
        parser = httptools.HttpRequestParser(request)
        while True:
            await trio.lowlevel.wait_readable(connection)
            received = connection.recv(65536)
            if not received:
                return
            parser.feed_data(received)
            if request.complete:
                connection.send(await answer(request, deliver))
                request = Request()
                parser = httptools.HttpRequestParser(request)


async def main(port: str, deliver: Deliver) -> None:
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=1024)
    listener.setblocking(False)
    async with trio.open_nursery() as nursery:
        while True:
            await trio.lowlevel.wait_readable(listener)
            connection, _ = listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nursery.start_soon(serve, connection, deliver)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    trio.run(main, sys.argv[1], handle)
