"""What the admin address answers. Pure."""

import json
from collections.abc import Sequence
from typing import Any

import attrs

from ..base.asgi import Send

#: On every answer: nothing here is to be kept, guessed at, or run by a browser.
_ALWAYS = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)


@attrs.frozen
class Reply:
    """One answer: its status, its body, and what it is."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    extra: Sequence[tuple[bytes, bytes]] = ()

    async def send(self, send: Send) -> None:
        """Send it as ASGI messages."""
        headers = [
            (b"content-type", self.content_type),
            (b"content-length", str(len(self.body)).encode()),
            *_ALWAYS,
            *self.extra,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def document(status: int, value: Any, *extra: tuple[bytes, bytes]) -> Reply:
    """Return a JSON answer."""
    return Reply(status, json.dumps(value).encode() + b"\n", extra=extra)


def problem(status: int, reason: str, *extra: tuple[bytes, bytes]) -> Reply:
    """Return a JSON answer that says what was wrong, and what to do."""
    return document(status, {"error": reason}, *extra)
