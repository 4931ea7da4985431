"""CSV that arrives in pieces: bytes in, rows out. Pure.

RFC 4180: comma, double quotes, CR LF or LF between rows; a quoted cell may hold all of these.
"""

import codecs
import csv

#: Longest row in characters. A quote that is never closed would otherwise gather the whole file.
LONGEST_ROW = 1_048_576


class CsvParser:
    """Gathers the pieces of one UTF-8 CSV file; a byte order mark at its start is dropped.

    The first row names the columns; each later row becomes a dict.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._unended = ""
        self._lines: list[str] = []
        self._length = 0
        self._quotes = 0
        self._header: list[str] | None = None
        self._count = 0

    def feed(self, data: bytes) -> list[dict[str, str]]:
        """Return the rows that are complete with ``data``.

        Raises:
            ValueError: the data are no UTF-8, or a row has other cells than the columns.
        """
        lines = (self._unended + self._decoder.decode(data)).split("\n")
        self._unended = lines.pop()
        if len(self._unended) > LONGEST_ROW:
            raise ValueError(f"row {self._count + 1} is longer than {LONGEST_ROW} characters")
        return [row for line in lines if (row := self._take(line + "\n")) is not None]

    def finish(self) -> list[dict[str, str]]:
        """Return the last row if no line end followed it.

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
            return None  # an odd number of quotes: the row goes on in the next line
        text = "".join(self._lines).removesuffix("\n").removesuffix("\r")
        self._lines, self._length, self._quotes = [], 0, 0
        if not text:
            return None
        self._count += 1
        # As a list of one text, so that the reader takes the line ends within cells as they are.
        try:
            cells = next(csv.reader([text], strict=True))
        except csv.Error as error:
            raise ValueError(f"row {self._count}: {error}") from error
        if self._header is None:
            self._header = cells
            return None
        if len(cells) != len(self._header):
            raise ValueError(
                f"row {self._count} has {len(cells)} cells for {len(self._header)} columns"
            )
        return dict(zip(self._header, cells, strict=True))
