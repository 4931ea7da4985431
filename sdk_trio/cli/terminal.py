"""The output of commands: data to standard output, everything else to standard error."""

import json
import os
import shlex
import shutil
import sys
import unicodedata
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.times import readable
from ..config.sources import printable
from ..errors import SdkError

Row = Mapping[str, Any]

#: A column of a table: a field of its rows, or a heading and a field.
Column = str | tuple[str, str]


def print_text(text: str) -> None:
    """Print one line of data."""
    sys.stdout.write(f"{text}\n")


def print_json(document: Any) -> None:
    """Print a JSON document: ASCII, indented, so that it survives any terminal and locale."""
    # Keys stay in the order in which the command created them: people read this as well.
    print_text(json.dumps(document, indent=2))


def print_json_line(document: Any) -> None:
    """Print a JSON document on a line of its own, at once: for streams."""
    print_text(json.dumps(document))
    sys.stdout.flush()


def print_list(
    arguments: Namespace,
    rows: Sequence[Row],
    columns: Sequence[Column],
    *,
    nothing: str = "",
    limit: int | None = None,
    more: str = "",
) -> None:
    """Print records as ``--format`` selects, and report the end of the list on standard error.

    Args:
        arguments: the parsed arguments; ``format`` is used.
        rows: the records; one more than ``limit`` if there are more.
        columns: see :func:`print_rows`.
        nothing: the message if there are no rows.
        limit: the most rows to print; None: all.
        more: the options that show further rows.
    """
    print_rows(rows[:limit], columns, as_json=arguments.format == "json")
    if not rows and nothing:
        say(nothing)
    if limit is not None and len(rows) > limit:
        say(f"stopped at {limit}; there are more: {more}")


def print_rows(rows: Sequence[Row], columns: Sequence[Column], *, as_json: bool) -> None:
    """Print rows as a table of ``columns``, or whole as a JSON array of objects.

    A column is the name of a field, or a pair of a heading and a field. The table shows
    times (``at``, ``since``, ``..._at``) as dates, seconds with one decimal, and the first line of
    a text.

    On a terminal, texts such as errors are shortened to fit; on a narrow one a row has several
    lines. Elsewhere every cell is printed in full, in aligned columns: a cell that is far longer
    than its neighbours shifts its own row.
    """
    if as_json:
        print_json([dict(row) for row in rows])
        return
    # An empty table prints nothing; the command reports that on standard error.
    if not rows:
        return
    named = [(column, column) if isinstance(column, str) else column for column in columns]
    names = [name for name, _ in named]
    headings = [name.removesuffix("_at").replace("_", " ") for name in names]
    cells = [[_cell_of(field, row.get(field)) for _, field in named] for row in rows]
    widths = [max(map(_width, column)) for column in zip(headings, *cells, strict=True)]
    # Cells are shortened for people only. A pipe gets them in full: a script that cuts an id out of
    # a table must not get half of it.
    if is_terminal():
        available = shutil.get_terminal_size().columns
        _draw(_lines_of(names, widths, available), headings, cells)
        return
    widths = [_padded_width(column) for column in zip(headings, *cells, strict=True)]
    for line in (headings, *cells):
        padded = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        print_text("  ".join(padded).rstrip())


def print_fields(fields: Row) -> None:
    """Print one record, a line for each field that has a value, as a table shows it.

    An underscore in a name is printed as a space, and ``_at`` is omitted.
    """
    shown = {
        name.removesuffix("_at").replace("_", " "): _cell_of(name, value)
        for name, value in fields.items()
        if value is not None
    }
    width = max(map(len, shown))
    for name, text in shown.items():
        print_text(f"{name.ljust(width)}  {text}")


#: Fields with Unix seconds, beside those whose name ends with ``_at``.
_TIMES = frozenset({"at", "as_of", "since", "until"})


def _cell_of(field: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ", ".join(value) or None
    if isinstance(value, str):
        value = value.partition("\n")[0]
    elif isinstance(value, int | float) and (field in _TIMES or field.endswith("_at")):
        value = readable(value)
    elif isinstance(value, float) and field.endswith("seconds"):
        value = f"{value:.1f}"
    return cell(value)


#: The minimum width of such a column in characters; all our ids fit.
_USUAL_WIDTH = 40


def _padded_width(column: Sequence[str]) -> int:
    """Return the width to which a pipe's column is padded: twice that of its median cell at most.

    One subject of 300 characters among 10 000 events would add 3 MB of blanks.
    """
    lengths = sorted(map(len, column))
    return min(lengths[-1], max(_USUAL_WIDTH, 2 * lengths[len(lengths) // 2]))


def cell(value: Any) -> str:
    """Return a value as one line of text, without terminal control characters.

    Senders choose ids and subjects; a control sequence in one could rewrite the operator's screen.
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return printable(str(value))


def printable_lines(text: str) -> str:
    """Return text without terminal control characters, except line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def is_terminal() -> bool:
    """Return whether standard output is a terminal with cursor control: not ``TERM=dumb``."""
    # Dumb terminals, such as those of editors, show box characters and colours as noise.
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def say(text: str) -> None:
    """Print a message for people, not data, to standard error.

    It may quote a file or a remote program, so control characters are escaped.
    """
    sys.stderr.write(f"{printable_lines(text)}\n")
    sys.stderr.flush()


def size_text(size: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def program_name(*, elsewhere: bool = False) -> str:
    """Return the name of this program in a shell, so that printed commands can be copied.

    ``elsewhere``: they must also work in another directory.
    """
    script = sys.argv[0]
    if not script.endswith("__main__.py"):
        # The bare name only if the shell would find this file: another installation of the program
        # may come first in PATH.
        name = os.path.basename(script)
        if shutil.which(name) == os.path.abspath(script):
            return name
        return shlex.quote(os.path.abspath(script) if elsewhere else script)
    # The same for the interpreter: outside of an active environment `python` is another one, or
    # none.
    python = shutil.which("python")
    if python is not None and os.path.dirname(python) == os.path.dirname(sys.executable):
        return "python -m sdk_trio"
    relative = os.path.relpath(sys.executable)
    interpreter = sys.executable if elsewhere or relative.startswith("..") else relative
    return f"{shlex.quote(interpreter)} -m sdk_trio"


class Progress:
    """Shows the progress of long work in one line on a terminal's standard error.

    ``total`` is how many steps there will be; below ``quiet_below`` nothing is shown.
    """

    def __init__(self, label: str, total: int, *, quiet_below: int = 20) -> None:
        self._label = label
        self._total = total
        self._done = 0
        # A bar for three steps is noise, and a log file would keep each of its states as a line.
        self._shown = total >= quiet_below and sys.stderr.isatty()

    def advance(self, steps: int = 1) -> None:
        """Count finished steps."""
        self._done += steps
        if self._shown:
            end = "\n" if self._done >= self._total else ""
            sys.stderr.write(f"\r{self._label}: {self._done} of {self._total}{end}")
            sys.stderr.flush()


class ByteProgress:
    """Shows the current step and the number of bytes, as :class:`Progress` does."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._width = 0

    def show(self, step: str, size: int) -> None:
        """Replace the line with this one."""
        if self._shown:
            text = f"{step}: {size / 1_000_000:.1f} MB" if size else step
            sys.stderr.write(f"\r{text.ljust(self._width)}")
            sys.stderr.flush()
            self._width = len(text)

    def end(self) -> None:
        """Remove the line."""
        if self._width:
            sys.stderr.write(f"\r{' ' * self._width}\r")
            sys.stderr.flush()


#: Columns of texts of any length, and the least number of characters of each that is shown.
_SHORTENED = frozenset(
    ("subject", "last_error", "error", "place", "reason", "problem", "value", "origin")
)
_LEAST_WIDTH = 12

#: The number of characters by which the further lines of a row are indented.
_INDENT = 2


def _lines_of(
    columns: Sequence[str], widths: Sequence[int], available: int
) -> list[dict[int, int]]:
    """Distribute columns over lines of ``available`` characters: for each its columns and widths.

    A column that may not be shortened, and is wider than a line, has a line of its own.
    """
    least = [
        min(width, _LEAST_WIDTH) if column in _SHORTENED else width
        for column, width in zip(columns, widths, strict=True)
    ]
    lines: list[dict[int, int]] = [{}]
    left = available
    for index, width in enumerate(least):
        gap = 2 if lines[-1] else 0
        if lines[-1] and width + gap > left:
            lines.append({})
            left, gap = available - _INDENT, 0
        lines[-1][index] = width
        left -= width + gap
    for number, line in enumerate(lines):
        left = available - sum(line.values()) - 2 * (len(line) - 1) - (_INDENT if number else 0)
        for index in reversed(line):  # the last columns have the errors
            more = max(0, min(left, widths[index] - line[index]))
            line[index] += more
            left -= more
    return lines


def _width(text: str) -> int:
    """Return the width of a text on a terminal: two columns for an East Asian character."""
    return len(text) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)


def _draw(
    lines: Sequence[Mapping[int, int]], headings: Sequence[str], cells: Sequence[Sequence[str]]
) -> None:
    """Print rows, each on its lines; states have their colours."""
    colors = not os.environ.get("NO_COLOR")

    def paint(style: str, text: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if colors and style else text

    for row in (headings, *cells):
        for number, line in enumerate(lines):
            shown = []
            for index, width in line.items():
                text = row[index]
                fitting = text if _width(text) <= width else f"{text[: width - 1]}…"
                style = "1" if row is headings else STATE_COLORS.get(text, "")
                padding = " " * (width - _width(fitting)) if index != max(line) else ""
                shown.append(paint(style, fitting) + padding)
            print_text((" " * _INDENT if number else "") + "  ".join(shown))


#: The colours of states; those that need attention stand out.
STATE_COLORS = {
    "dead": "1;31",
    "retrying": "33",
    "parked": "33",
    "done": "32",
    "rejected": "35",
}


def confirmed(question: str) -> bool:
    """Ask on standard error and return whether the answer was yes.

    If standard input is not a terminal, the answer is yes: a script cannot answer, and its author
    has chosen the command.
    """
    if not sys.stdin.isatty():
        return True
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    # Anything but a yes is a no, including the end of the input.
    try:
        return sys.stdin.readline().strip().casefold() in ("y", "yes")
    except KeyboardInterrupt:
        sys.stderr.write("\n")  # the shell's prompt gets a line of its own
        raise


class UnreadableFileError(SdkError):
    """A file that was named cannot be read."""


def read_bytes(file: str) -> bytes:
    """Return the bytes of a file, or of standard input for ``-``.

    Raises:
        UnreadableFileError: the message names the file.
    """
    if file == "-":
        if sys.stdin.isatty():
            say("reading from standard input; Ctrl-D ends")
        # Bytes, not text: a signature covers the exact bytes.
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UnreadableFileError(f"the file {file} cannot be read: {error.strerror}") from None
