"""Requests of any ASGI server, in the form that our own server uses."""

from typing import Any

import trio

from ..base.http import DirectApp, Headers, Receive, Scope, Send
from .answers import Answer


class AsgiRequest:
    """One ASGI ``http`` request; see :class:`~sdk_trio.base.http.DirectRequest`.

    Its server neither reports which requests have the same head nor keeps a deadline for them.
    """

    template = None
    expiry = None

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.scheme: str = scope["scheme"]
        self.headers: Headers = scope["headers"]
        self.client: tuple[str, int] | None = scope.get("client")
        self.server: tuple[str, int] | None = scope.get("server")
        self.version: str = scope.get("http_version", "1.1")
        #: Whether only ``http.disconnect`` will still be received.
        self.has_ended = False
        self._receive = receive

    def take_body(self, largest: int) -> bytes | None:
        """Return None: it is not known whether the body has arrived."""
        return None

    async def receive(self) -> Any:
        """Return the server's next message."""
        message = await self._receive()
        self.has_ended = not message.get("more_body")
        return message


async def serve(app: DirectApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Have ``app`` respond to one ASGI ``http`` request, and send its answer.

    If the body was not received completely, its rest is received and discarded meanwhile: otherwise
    a server that must pass it on first could neither finish nor close the connection.
    """
    request = AsgiRequest(scope, receive)
    answer = await app.respond(request)
    if answer is None:
        return
    if request.has_ended:
        await Answer(*answer).send(send)
        return

    async def discard() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(discard)
        await Answer(*answer).send(send)
        nursery.cancel_scope.cancel()
