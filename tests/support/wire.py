"""A sender on a raw connection: one keep-alive socket and exact bytes."""

from collections.abc import Mapping
from typing import Self

import attrs
import trio

from sdk_trio.webhooks.signed_request import SignedDelivery


@attrs.frozen
class WireAnswer:
    """An HTTP/1.1 response as received; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    head: bytes


class Wire:
    """One connection to a receiver."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._received = b""

    @classmethod
    async def connect(cls, url: str, source: str | None = None) -> Self:
        host, _, port = url.removeprefix("http://").partition("/")[0].rpartition(":")
        return cls(await trio.open_tcp_stream(host, int(port), local_address=source))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.socket.close()

    async def send(self, data: bytes) -> None:
        """Send bytes; raise ConnectionError if the receiver has closed."""
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise ConnectionError("the connection was reset") from error

    async def answer(self) -> WireAnswer:
        """Read one response; raise ConnectionError if the receiver closes first."""
        while b"\r\n\r\n" not in self._received:
            await self._more()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        status_line, *lines = head.split(b"\r\n")
        pairs = [line.decode("latin-1").partition(":") for line in lines]
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        length = int(headers.get("content-length", "0"))
        while len(self._received) < length:
            await self._more()
        body, self._received = self._received[:length], self._received[length:]
        return WireAnswer(int(status_line.split()[1]), headers, body, head)

    async def post(self, delivery: SignedDelivery, path: str = "/hooks/sdk") -> WireAnswer:
        await self.send(request(delivery, path))
        return await self.answer()

    async def _more(self) -> None:
        try:
            chunk = await self._stream.receive_some(65536)
        except trio.BrokenResourceError as error:
            raise ConnectionError("the connection was reset") from error
        if not chunk:
            raise ConnectionError("the connection was closed")
        self._received += chunk


def request(delivery: SignedDelivery, path: str = "/hooks/sdk") -> bytes:
    """The bytes of a POST of ``delivery``."""
    head = "".join(f"{name}: {value}\r\n" for name, value in delivery.headers.items())
    length = len(delivery.body)
    return (
        f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {length}\r\n{head}\r\n".encode()
        + delivery.body
    )
