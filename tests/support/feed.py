"""The feed of a receiver under test, over WebSocket and byte for byte."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio_websocket import WebSocketConnection, wrap_client_stream

from sdk_trio.errors import only_member

from .admin import TOKEN


class Listener:
    """One listener of the feed and its messages in order."""

    def __init__(self, socket: WebSocketConnection) -> None:
        self.socket = socket
        self._waiting: list[dict[str, Any]] = []

    async def next(self, *kinds: str) -> dict[str, Any]:
        """Return the next message, of these kinds if any are given."""
        while True:
            while not self._waiting:
                frame = await self.socket.get_message()
                self._waiting = [json.loads(line) for line in frame.splitlines()]
            message = self._waiting.pop(0)
            if not kinds or message["kind"] in kinds:
                return message

    async def ids(self, number: int) -> list[str]:
        """Return the ids of the next deliveries."""
        return [(await self.next("delivery"))["event"]["webhook_id"] for _ in range(number)]


@asynccontextmanager
async def listening(admin: Any, query: str = "", **options: Any) -> AsyncIterator[Listener]:
    """Return a listener of the receiver ``admin``, after its hello message."""
    host = admin.runtime.started.admin[0].partition("://")[2]
    options = {"extra_headers": [(b"authorization", f"Bearer {TOKEN}".encode())], **options}
    name, _, port = host.rpartition(":")
    # The library leaves the socket of a refused connection open.
    async with await trio.open_tcp_stream(name, int(port)) as stream:
        try:
            async with trio.open_nursery() as nursery:
                path = f"/feed?{query}"
                socket = await wrap_client_stream(nursery, stream, host, path, **options)
                listener = Listener(socket)
                assert (await listener.next())["kind"] == "hello"
                yield listener
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise only_member(group) from None
