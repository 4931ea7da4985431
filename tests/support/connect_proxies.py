"""A small HTTP proxy that opens tunnels (CONNECT), in the test's own event loop."""

import base64
from contextlib import asynccontextmanager
from functools import partial

import trio


class ConnectProxy:
    """A proxy; ``credentials`` (``user:password``) are required, ``answer`` is its response."""

    def __init__(self, credentials=None, answer=None):
        self.credentials = credentials
        self.answer = answer
        self.port = 0
        self.targets = []
        self.heads = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, stream):
        try:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                data = await stream.receive_some(1000)
                if not data:
                    return
                head += data
            self.heads.append(head)
            method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
            assert method == "CONNECT"
            self.targets.append(target)
            if self.answer is not None:
                await stream.send_all(self.answer)
            elif not self._knows(head):
                await stream.send_all(b"HTTP/1.1 407 Who are you\r\nContent-Length: 0\r\n\r\n")
            else:
                await self._tunnel(stream, int(target.rpartition(":")[2]))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            stream.socket.close()

    def _knows(self, head):
        if self.credentials is None:
            return True
        encoded = base64.b64encode(self.credentials.encode())
        return b"\r\nProxy-Authorization: Basic " + encoded + b"\r\n" in head

    async def _tunnel(self, stream, port):
        async with await trio.open_tcp_stream("127.0.0.1", port) as other:
            await stream.send_all(b"HTTP/1.1 200 Connection established\r\nVia: a test\r\n\r\n")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_pump, stream, other, nursery.cancel_scope)
                nursery.start_soon(_pump, other, stream, nursery.cancel_scope)


async def _pump(source, sink, scope):
    try:
        while data := await source.receive_some(65_536):
            await sink.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    scope.cancel()


@asynccontextmanager
async def proxying(**options):
    """Run a proxy for the length of the block."""
    proxy = ConnectProxy(**options)
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, proxy.serve, 0, host="127.0.0.1")
        [listener] = await nursery.start(serve)
        proxy.port = listener.socket.getsockname()[1]
        yield proxy
        nursery.cancel_scope.cancel()
