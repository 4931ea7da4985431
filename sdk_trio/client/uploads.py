"""Streamed bodies of requests: their chunks, counted, and closed in every case."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager

import trio

from sdk_trio.client.exchange import Headers, OurProtocolError

#: How long a generator of chunks may take to clean up, in seconds, once it is not needed any more.
CLEANUP_SECONDS = 1.0


def content_length(headers: Headers) -> int | None:
    """Return the value of Content-Length, None when there is none (or no number)."""
    for name, value in headers:
        if name.lower() == b"content-length" and value.isdigit():
            return int(value)
    return None


@asynccontextmanager
async def chunks_of(
    stream: AsyncIterable[bytes], *, length: int | None
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Iterate over the chunks of ``stream`` that are not empty, and close it in the end.

    Args:
        stream: the body.
        length: what Content-Length announced, in bytes; None when the length is open.

    Raises:
        OurProtocolError: from the iteration, before the chunk that exceeds ``length`` or at an
            end that comes too early. The server would read the surplus as the next request.
    """
    source = aiter(stream)
    counted = _counted(source, length)
    try:
        yield counted
    finally:
        with trio.move_on_after(CLEANUP_SECONDS, shield=True):
            await counted.aclose()
            if isinstance(source, AsyncGenerator):
                await source.aclose()


async def _counted(source: AsyncIterator[bytes], length: int | None) -> AsyncGenerator[bytes, None]:  # noqa: ASYNC900 - no scope is open across the yield
    sent = 0
    async for chunk in source:
        sent += len(chunk)
        if length is not None and sent > length:
            raise OurProtocolError(f"the body is longer than its Content-Length of {length}")
        if chunk:
            yield chunk
    if length is not None and sent < length:
        raise OurProtocolError(f"the body has {sent} bytes, its Content-Length says {length}")
