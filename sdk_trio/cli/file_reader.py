"""Reading of files that a command names; ``-`` is standard input."""

import sys
from pathlib import Path

from ..errors import SdkError
from .printer import say


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
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise UnreadableFileError(f"the file {file} cannot be read: {error.strerror}") from None
