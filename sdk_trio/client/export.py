"""Exports: CSV files of any length, read incrementally.

:class:`CsvParser` is pure: chunks of bytes in, rows out. RFC 4180: comma, double quotes, CR LF or
LF between rows; a quoted cell may contain all of these.
"""

import codecs
import re
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType

import attrs
import httpx
import trio

from .answers import unexpected
from .call import Call, CallOptions, OperationSender

#: The longest row in characters. Otherwise an unclosed quote would keep the whole file in memory as
#: one row.
LONGEST_ROW = 1_048_576

#: One cell, up to the next comma or the end of the row. The standard library's csv module is not
#: used, because its limit on a cell's length is global to the process.
_CELL = re.compile(r'(?:"((?:[^"]++|"")*+)"|([^,"][^,]*+)?)(,|\Z)')


class CsvParser:
    """Parses one UTF-8 CSV file incrementally; a byte order mark at its start is dropped.

    The first row names the columns; each later row becomes a dict. A repeated name gets a number,
    so that no column is lost: ``total``, ``total_2``, ``total_3``.
    """

    def __init__(self) -> None:
        # An incremental decoder, because a chunk may end inside a character; "utf-8-sig", because a
        # byte order mark would become part of the first name.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._unended = ""
        self._lines: list[str] = []
        self._length = 0
        self._quotes = 0
        self._header: list[str] | None = None
        self._count = 0

    def feed(self, data: bytes) -> list[dict[str, str]]:
        """Process ``data`` and return the completed rows.

        Raises:
            ValueError: the data are not UTF-8, or a row has more or fewer cells than columns.
        """
        lines = (self._unended + self._decoder.decode(data)).split("\n")
        self._unended = lines.pop()
        if len(self._unended) > LONGEST_ROW:
            raise ValueError(f"row {self._count + 1} is longer than {LONGEST_ROW} characters")
        return [row for line in lines if (row := self._take(line + "\n")) is not None]

    def finish(self) -> list[dict[str, str]]:
        """Return the last row if it has no line end.

        Raises:
            ValueError: the file ends inside a cell, or as for :meth:`feed`.
        """
        last = self._unended + self._decoder.decode(b"", final=True)
        self._unended = ""
        row = self._take(last)
        if self._lines:
            raise ValueError(f"the file ends inside a quoted cell of row {self._count + 1}")
        return [] if row is None else [row]

    def _take(self, line: str) -> dict[str, str] | None:
        self._lines.append(line)
        self._length += len(line)
        self._quotes += line.count('"')
        if self._length > LONGEST_ROW:
            raise ValueError(f"row {self._count + 1} is longer than {LONGEST_ROW} characters")
        if self._quotes % 2:
            return None  # an odd number of quotes: the row continues on the next line
        text = "".join(self._lines).removesuffix("\n").removesuffix("\r")
        self._lines, self._length, self._quotes = [], 0, 0
        if not text:
            return None
        self._count += 1
        cells = _split(text, self._count)
        if self._header is None:
            self._header = _distinct(cells)
            return None
        # Such a row is an error and is not padded: values in the wrong column are worse than none.
        if len(cells) != len(self._header):
            raise ValueError(
                f"row {self._count} has {len(cells)} cells for {len(self._header)} columns"
            )
        return dict(zip(self._header, cells, strict=True))


def _split(row: str, number: int) -> list[str]:
    """Return the cells of ``row``, which has no line end; ``number`` is for messages."""
    cells: list[str] = []
    place, mark = 0, ","
    while mark:
        cell = _CELL.match(row, place)
        if cell is None:
            raise ValueError(f"row {number}, cell {len(cells) + 1}: text after the closing quote")
        quoted, plain, mark = cell.groups()
        cells.append(plain or "" if quoted is None else quoted.replace('""', '"'))
        place = cell.end()
    return cells


def _distinct(names: list[str]) -> list[str]:
    """Return ``names`` with numbers added to repeated ones."""
    taken = set(names)
    counts = Counter[str]()
    distinct: list[str] = []
    for name in names:
        counts[name] += 1
        new = name
        # A column may already have that name: use the next free number.
        while counts[name] > 1 and (new := f"{name}_{counts[name]}") in taken:
            counts[name] += 1
        taken.add(new)
        distinct.append(new)
    return distinct


class CsvExport(AbstractAsyncContextManager["CsvRows"]):
    """A CSV file of the upstream, of any length: ``async with client.orders.export() as rows:``.

    In the context, ``async for row in rows`` yields a dict per row, keyed by column; repeated names
    are numbered (``total``, ``total_2``). The answer is read as fast as the loop runs; leaving
    early closes it. Its length is limited only by the option ``max_answer_bytes``.
    """

    def __init__(self, sender: OperationSender, call: Call) -> None:
        self._sender = sender
        # Rows are read from the raw stream, so it must not be compressed.
        plain = CallOptions(headers={"Accept": "text/csv", "Accept-Encoding": "identity"})
        self._call = attrs.evolve(call, options=plain.merged_with(call.options))
        self._opened: AsyncExitStack | None = None

    async def __aenter__(self) -> "CsvRows":
        if self._opened is not None:
            raise RuntimeError("this export is open already: call the operation again")
        # If the head is not CSV, close the stream before raising.
        async with AsyncExitStack() as opening:
            call = attrs.evolve(self._call)
            response = await opening.enter_async_context(self._sender.stream(call))
            rows = CsvRows(response, call)
            opening.push_async_callback(rows.close)
            self._opened = opening.pop_all()
        return rows

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Close the answer, read or not; the stream bounds the time that takes."""
        assert self._opened is not None
        opened, self._opened = self._opened, None
        return await opened.__aexit__(kind, error, traceback)  # noqa: ASYNC102 - it bounds it itself

    async def text(self) -> str:
        """Return the whole file as one text, of at most ``max_answer_bytes``."""
        response = await self._sender.send(attrs.evolve(self._call))
        return response.text

    def __repr__(self) -> str:
        return f"<export {self._call.name}>"


class CsvRows(AsyncIterator[dict[str, str]]):
    """The rows of an open export; ``response`` has the status and the headers."""

    def __init__(self, response: httpx.Response, call: Call) -> None:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            fault = f"the export has the content coding {encoding!r}, which was not requested"
            raise unexpected(call, fault, response, content=b"")
        self.response = response
        self._call = call
        # Iterates the raw stream: httpx's iterators are generators that are not closed if a loop
        # ends early, and Trio warns of these.
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._chunks = aiter(response.stream)
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
                fault = f"the export is not valid CSV: {error}"
            else:
                continue
            raise unexpected(self._call, fault, self.response, content=b"")
        return self._rows.popleft()

    async def batch(self) -> list[dict[str, str]]:
        """Return the next rows: all received so far, none at the end of the file.

        Errors and cancellation are as for the iteration.
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
        """Close the stream's iterator, which may be a generator that holds the connection."""
        self._is_over = True
        await trio.lowlevel.checkpoint()
        if isinstance(self._chunks, AsyncGenerator):
            await self._chunks.aclose()
