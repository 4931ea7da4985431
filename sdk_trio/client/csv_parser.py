"""CSV that arrives in pieces: bytes in, rows out. Pure.

RFC 4180: comma, double quotes, CR LF or LF between rows; a quoted cell may hold all of these.
"""

import codecs
import re
from collections import Counter

#: The longest row in characters. A quote that is never closed would otherwise have the whole file
#: kept in memory as one row.
LONGEST_ROW = 1_048_576

#: One cell, up to the comma after it or the row's end. The csv module of the standard library is
#: not used, because its limit on a cell's length is one setting for the whole process.
_CELL = re.compile(r'(?:"((?:[^"]++|"")*+)"|([^,"][^,]*+)?)(,|\Z)')


class CsvParser:
    """Gathers the pieces of one UTF-8 CSV file; a byte order mark at its start is dropped.

    The first row names the columns; each later row becomes a dict. A name that comes again gets
    a number, so that no column is lost: ``total``, ``total_2``, ``total_3``.
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
        """Take ``data`` and return the rows that it completes.

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
        cells = _split(text, self._count)
        if self._header is None:
            self._header = _distinct(cells)
            return None
        if len(cells) != len(self._header):
            raise ValueError(
                f"row {self._count} has {len(cells)} cells for {len(self._header)} columns"
            )
        return dict(zip(self._header, cells, strict=True))


def _split(row: str, number: int) -> list[str]:
    """Return the cells of ``row``, which has no line end of its own; ``number`` is for messages."""
    cells: list[str] = []
    place, mark = 0, ","
    while mark:
        cell = _CELL.match(row, place)
        if cell is None:
            raise ValueError(f"row {number}, cell {len(cells) + 1}: a quote and something after it")
        quoted, plain, mark = cell.groups()
        cells.append(plain or "" if quoted is None else quoted.replace('""', '"'))
        place = cell.end()
    return cells


def _distinct(names: list[str]) -> list[str]:
    """Return ``names`` with a number at those that have come before."""
    taken = set(names)
    counts = Counter[str]()
    distinct: list[str] = []
    for name in names:
        counts[name] += 1
        new = name
        # A column may have that very name: the number is the next one that is free.
        while counts[name] > 1 and (new := f"{name}_{counts[name]}") in taken:
            counts[name] += 1
        taken.add(new)
        distinct.append(new)
    return distinct
