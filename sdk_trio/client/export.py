"""CSV files of the upstream, read row by row while they arrive."""

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import cast

import attrs
import httpx
import trio

from .csv_parser import CsvParser
from .operation import PreparedCall
from .request import CallOptions
from .sender import Sender, unexpected


class CsvExport:
    """A CSV file of the upstream, of any length: ``async with client.orders.export() as rows:``.

    Inside, ``async for row in rows`` gives a dict per row, by the names of the columns; one that
    comes again is numbered (``total``, ``total_2``). The answer is read as fast as the loop runs;
    leaving early closes it. Its length is bounded only by the option ``max_answer_bytes``.
    """

    def __init__(self, sender: Sender, call: PreparedCall) -> None:
        self._sender = sender
        # The rows are read from the raw stream, so it must not be compressed.
        plain = CallOptions(headers={"Accept": "text/csv", "Accept-Encoding": "identity"})
        self._call = attrs.evolve(call, options=plain.merged_with(call.options))
        self._opened: AsyncExitStack | None = None

    async def __aenter__(self) -> "CsvRows":
        if self._opened is not None:
            raise RuntimeError("this export is open already: call the operation again")
        async with AsyncExitStack() as opening:
            response = await opening.enter_async_context(self._sender.stream(self._call))
            rows = CsvRows(response, self._call)
            opening.push_async_callback(rows.close)
            self._opened = opening.pop_all()
        return rows

    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Awaitable[bool | None]:
        """Close the answer, read or not; how long that may take is the stream's own matter."""
        assert self._opened is not None
        opened, self._opened = self._opened, None
        return opened.__aexit__(kind, error, traceback)

    async def text(self) -> str:
        """Return the whole file as one text, of at most ``max_answer_bytes``."""
        response = await self._sender.send(self._call)
        return response.text

    def __repr__(self) -> str:
        return f"<export {self._call.operation.full_name}>"


class CsvRows(AsyncIterator[dict[str, str]]):
    """The rows of an open export; ``response`` has the status and the headers."""

    def __init__(self, response: httpx.Response, call: PreparedCall) -> None:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            fault = f"the export came as {encoding!r} though that was not asked for"
            raise unexpected(call, fault, response, content=b"")
        self.response = response
        self._call = call
        # The raw stream is iterated, because httpx's own iterators are generators that nothing
        # closes when a loop ends early; Trio warns of these.
        self._chunks = aiter(cast("AsyncIterable[bytes]", response.stream))
        self._parser = CsvParser()
        self._rows: deque[dict[str, str]] = deque()
        self._is_over = False

    async def __anext__(self) -> dict[str, str]:
        await trio.lowlevel.checkpoint()
        while not self._rows:
            if self._is_over:
                raise StopAsyncIteration
            try:
                self._rows.extend(await self._parse_next_chunk())
            except ValueError as error:
                fault = f"the export is no good CSV: {error}"
            else:
                continue
            raise unexpected(self._call, fault, self.response, content=b"")
        return self._rows.popleft()

    async def batch(self) -> list[dict[str, str]]:
        """Return the next rows: all that have arrived, none at the end of the file.

        Errors and cancellation are those of the iteration.
        """
        async for row in self:
            rows = [row, *self._rows]
            self._rows.clear()
            return rows
        return []

    async def _parse_next_chunk(self) -> list[dict[str, str]]:
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            self._is_over = True
            await trio.lowlevel.checkpoint()
            return self._parser.finish()
        return self._parser.feed(chunk)

    async def close(self) -> None:
        """End the stream's iterator, which may be a generator that holds the connection."""
        self._is_over = True
        await trio.lowlevel.checkpoint()
        if isinstance(self._chunks, AsyncGenerator):
            await self._chunks.aclose()
