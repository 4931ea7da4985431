"""A running receiver, and requests to it byte for byte or as ASGI messages."""

import socket
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import trio

from sdk_trio.events import OrderPaidEvent
from sdk_trio.runtime import Runtime, Started
from sdk_trio.testing import AppUnderTest, running_app, sign_delivery
from sdk_trio.webhooks import HandlerRegistry
from sdk_trio.webhooks.signed_request import SignedDelivery

from .deliveries import SECRET, settings
from .waiting import PATIENCE_SECONDS
from .wire import Wire

PATH = "/hooks/sdk"


@asynccontextmanager
async def serving(
    handlers: HandlerRegistry | None = None, **keys: Any
) -> AsyncIterator[AppUnderTest]:
    """Run a receiver with settings as ``Webhooks__Queue__Capacity=2``; fail if anything hangs."""
    with trio.fail_after(PATIENCE_SECONDS):
        async with running_app(handlers, settings(**keys)) as app:
            yield app


@asynccontextmanager
async def running(runtime: Runtime, patience: float = PATIENCE_SECONDS) -> AsyncIterator[Started]:
    """Run a runtime for the length of the block; yield its addresses."""
    with trio.fail_after(patience):
        async with trio.open_nursery() as nursery:
            yield await nursery.start(runtime.run)
            runtime.shut_down("the test ended")


def registry(function: Any, event_class: Any = OrderPaidEvent, **options: Any) -> HandlerRegistry:
    """A registry with one handler."""
    handlers = HandlerRegistry()
    handlers.register(event_class, function, **options)
    return handlers


async def works(event: Any) -> None:
    """Handle an event without any effect."""


def signed(event: str | bytes = "order.paid", data: Any = None, **options: Any) -> SignedDelivery:
    """A delivery that the receivers of these tests accept."""
    return sign_delivery(event, data, **({"secret": SECRET} | options))


def request(
    body: bytes = b"",
    headers: Iterable[tuple[str, str]] = (),
    *,
    method: str = "POST",
    path: str = PATH,
    length: int | None = None,
    with_length: bool = True,
) -> bytes:
    """The bytes of a request; ``length`` is declared instead of the body's own."""
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    if with_length:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def delivery_request(delivery: SignedDelivery, *extra: tuple[str, str], **options: Any) -> bytes:
    """The bytes of a request that posts ``delivery``, with the ``extra`` headers."""
    return request(delivery.body, [*delivery.headers.items(), *extra], **options)


def chunked(body: bytes, size: int = 4096) -> bytes:
    """``body`` in the chunked transfer coding."""
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


class RawWire(Wire):
    """A :class:`Wire` that also sees how a connection ends."""

    async def rest(self) -> bytes:
        """Everything that arrives until the receiver closes."""
        received, self._received = self._received, b""
        with suppress(trio.BrokenResourceError):
            while chunk := await self._stream.receive_some(65536):
                received += chunk
        return received

    async def rest_of_head(self) -> bytes:
        """Return the head of the next response, which has no body."""
        while b"\r\n\r\n" not in self._received:
            await self._more()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        return head

    async def end_of_sending(self) -> None:
        with suppress(trio.BrokenResourceError):
            await self._stream.send_eof()

    def reset_at_close(self) -> None:
        """Make the close of the connection a reset."""
        self._stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def send_what_is_taken(self, data: bytes) -> None:
        """Send until everything is sent, or the receiver has closed."""
        with suppress(trio.BrokenResourceError):
            await self._stream.send_all(data)


def waiting_for_run_of(app: AppUnderTest, webhook_id: str) -> int:
    """Return the number of deliveries that wait for the inline run of the same id."""
    flight = app.runtime.receiver._running.runner.inline._in_flight.get(webhook_id)
    if flight is None or flight.ended is None:
        return 0
    return flight.ended.statistics().tasks_waiting


async def exchange(app: AppUnderTest, data: bytes) -> Any:
    """Send exact bytes on a new connection and return the first response."""
    with await RawWire.connect(app.url) as wire:
        await wire.send_what_is_taken(data)
        return await wire.answer()


@attrs.frozen
class AsgiAnswer:
    """The messages that an ASGI application sent."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


async def ask(
    application: Any,
    body: bytes | Sequence[bytes] = b"",
    headers: Iterable[tuple[bytes, bytes]] = (),
    *,
    method: str = "POST",
    path: str = PATH,
    scheme: str = "http",
    client: tuple[str, int] | None = ("127.0.0.1", 50_000),
    ending: str = "complete",
) -> AsgiAnswer | None:
    """Serve one request in process and return the response; None without one.

    ``ending`` is the event after the pieces of the body: ``complete``, ``disconnect``, ``silence``.
    """
    pieces = [body] if isinstance(body, bytes) else list(body)
    last = len(pieces) - 1 if ending == "complete" else None
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": number != last}
        for number, piece in enumerate(pieces)
    ]
    if ending == "disconnect":
        messages.append({"type": "http.disconnect"})
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        if not messages:
            await trio.sleep_forever()
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": scheme,
        "path": path,
        "raw_path": path.encode("utf-8", "surrogateescape"),
        "query_string": b"",
        "root_path": "",
        "headers": list(headers),
        "client": client,
        "server": ("127.0.0.1", 80),
    }
    await application(scope, receive, send)
    if not sent:
        return None
    start, *parts = sent
    assert start["type"] == "http.response.start"
    assert [part["type"] for part in parts] == ["http.response.body"]
    return AsgiAnswer(start["status"], start["headers"], parts[0]["body"])


def asgi_headers(delivery: SignedDelivery) -> list[tuple[bytes, bytes]]:
    """The headers of ``delivery`` as ASGI gives them."""
    return [(name.encode(), value.encode()) for name, value in delivery.headers.items()]
