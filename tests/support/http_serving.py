"""A server of the runtime with an application that records its requests."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import trio

from sdk_trio.server.limits import Limits
from sdk_trio.server.serve import Server

from .serving import RawWire

#: The sweep of the fast path is frequent in tests, so that short limits are exact enough.
QUICK = Limits(sweep_seconds=0.01)


@attrs.frozen
class Seen:
    """One request as the application got it, with its whole body."""

    scope: dict[str, Any]
    body: bytes

    @property
    def reading(self) -> tuple[Any, ...]:
        """The part that the client determines."""
        scope = self.scope
        names = ("method", "http_version", "raw_path", "path", "query_string", "headers")
        return (*(scope[name] for name in names), self.body)


@attrs.frozen
class Direct:
    """An application that our own server calls without ASGI."""

    respond: Callable[[Any], Awaitable[Any]]


@attrs.define
class Observer:
    """An ASGI application that records requests and responds as the path says."""

    seen: list[Seen] = attrs.Factory(list)
    received: list[dict[str, Any]] = attrs.Factory(list)
    began: trio.Event = attrs.Factory(trio.Event)
    gate: trio.Event = attrs.Factory(trio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = _ANSWERS.get(scope["path"])
        if answer is not None:
            await answer(self, scope, receive, send)
        elif await self.read(scope, receive) is not None:
            body = self.seen[-1].body
            await start(send, 200, (b"content-length", b"%d" % len(body)))
            await finish(send, body)

    async def read(self, scope: Any, receive: Any) -> bytes | None:
        """The body; None if the client left before its end."""
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                self.received.append(message)
                return None
            body += message["body"]
            if not message["more_body"]:
                self.seen.append(Seen(scope, body))
                return body


async def start(send: Any, status: int, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})


async def finish(send: Any, body: bytes = b"", *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _stream(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await observer.read(scope, receive)
    await start(send, 200, (b"x-kind", b"stream"))
    for piece in (b"one", b"", b"two", b"three"):
        await finish(send, piece, more=True)
    await finish(send)


async def _early(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await start(send, 403, (b"content-length", b"2"))
    await finish(send, b"no")


async def _fail(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await observer.read(scope, receive)
    raise RuntimeError("as the test wants it")


async def _fail_late(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await observer.read(scope, receive)
    await start(send, 200, (b"content-length", b"10"))
    await finish(send, b"half", more=True)
    raise RuntimeError("as the test wants it")


async def _nothing(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await observer.read(scope, receive)


async def _split_header(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await start(send, 200, (b"x", b"a\r\nset-cookie: b"), (b"content-length", b"0"))
    await finish(send)


async def _too_much(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await start(send, 200, (b"content-length", b"2"))
    await finish(send, b"three", more=True)


async def _no_content(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await observer.read(scope, receive)
    await start(send, 204)
    await finish(send)


async def _close(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await observer.read(scope, receive)
    await start(send, 200, (b"content-length", b"0"), (b"connection", b"close"))
    await finish(send)


async def _gate(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await observer.read(scope, receive)
    observer.began.set()
    await observer.gate.wait()
    await start(send, 200, (b"content-length", b"0"))
    await finish(send)


async def _watch(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    """Wait for the client to leave, then respond anyway."""
    await observer.read(scope, receive)
    observer.began.set()
    observer.received.append(await receive())
    await start(send, 200, (b"content-length", b"4"))
    await finish(send, b"bye!")


async def _after(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    """Respond, then call receive."""
    await observer.read(scope, receive)
    await start(send, 200, (b"content-length", b"0"))
    await finish(send)
    observer.received.append(await receive())


async def _both(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    """Wait for the client to leave in one task, and respond in another."""
    await observer.read(scope, receive)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await trio.sleep(0.01)
        await start(send, 200, (b"content-length", b"0"))
        await finish(send)
        nursery.cancel_scope.cancel()


async def _big(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await observer.read(scope, receive)
    await start(send, 200, (b"content-length", b"20000000"))
    await finish(send, b"x" * 20_000_000)


async def _hints(observer: Observer, scope: Any, receive: Any, send: Any) -> None:
    await observer.read(scope, receive)
    await start(send, 103, (b"link", b"</style.css>"))
    await start(send, 200, (b"content-length", b"0"))
    await finish(send)


_ANSWERS = {
    "/stream": _stream,
    "/early": _early,
    "/fail": _fail,
    "/fail-late": _fail_late,
    "/nothing": _nothing,
    "/split-header": _split_header,
    "/too-much": _too_much,
    "/no-content": _no_content,
    "/close": _close,
    "/gate": _gate,
    "/watch": _watch,
    "/after": _after,
    "/both": _both,
    "/big": _big,
    "/hints": _hints,
}


@attrs.define
class ServerUnderTest:
    """A running server on the loopback address."""

    url: str
    server: Server
    observer: Observer
    nursery: trio.Nursery

    async def connect(self, source: str | None = None) -> RawWire:
        """Connect, from another address of this machine if one is given."""
        return await RawWire.connect(self.url, source)

    async def exchange(self, *pieces: bytes, half_close: bool = True) -> bytes:
        """Send the pieces, each after the previous one was read, and return all received bytes."""
        with await self.connect() as wire:
            for piece in pieces:
                await wire.send_what_is_taken(piece)
                for _ in range(3 if len(pieces) > 1 else 0):
                    await trio.lowlevel.checkpoint()
            if half_close:
                with suppress(OSError):
                    await wire.end_of_sending()
            return await wire.rest()


@asynccontextmanager
async def http_server(
    fast: bool,
    *,
    limits: Limits = QUICK,
    graceful_seconds: float = 5.0,
    bind: str = "127.0.0.1:0",
    patience: float = 60.0,
    app: Any = None,
    certificate: tuple[str | None, str | None] = (None, None),
    **options: Any,
) -> AsyncIterator[ServerUnderTest]:
    """Run a server with an :class:`Observer`; fail if anything hangs."""
    observer = Observer()
    server = Server(
        app or observer,
        [bind],
        key="Sdk:Server:Bind",
        graceful_seconds=graceful_seconds,
        cert_file=certificate[0],
        key_file=certificate[1],
        fast_path=fast,
        **options,
        limits=limits,
    )
    with trio.fail_after(patience):
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(server.run)
            try:
                yield ServerUnderTest(url, server, observer, nursery)
            except BaseException:
                nursery.cancel_scope.cancel()
                raise
            server.stop()
