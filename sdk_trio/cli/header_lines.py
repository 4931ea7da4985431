"""Reading of a request's headers as people have copied them: lines or JSON. Pure."""

import json
import re
from typing import Any

from ..base.http_grammar import is_token
from .usage import UsageError

_REQUEST_LINE = re.compile(r"[A-Z]+ \S+( HTTP/[0-9.]+)?")


def parse_headers(content: bytes) -> list[tuple[bytes, bytes]]:
    """Return names and values in their order, repeated ones as they came.

    Args:
        content: ``Name: value`` lines, as a proxy or ``curl -v`` shows them (a request line and
            the marks ``>`` are skipped); or a JSON object of names and values; or a JSON list of
            pairs.

    Raises:
        UsageError: it is none of these; the message names the line.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError("--headers: the file is not UTF-8 text") from None
    pairs = _from_json(text) if text.lstrip()[:1] in ("{", "[") else _from_lines(text)
    try:
        return [(name.encode("ascii"), value.encode("latin-1")) for name, value in pairs]
    except UnicodeEncodeError:
        raise UsageError("--headers: a header holds characters that no header can have") from None


def _from_lines(text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.removeprefix(">").strip()
        if not stripped or (not pairs and _REQUEST_LINE.fullmatch(stripped)):
            continue
        name, colon, value = stripped.partition(":")
        if not colon or not is_token(name):
            raise UsageError(f"--headers: line {number} is not of the form 'Name: value'")
        pairs.append((name, value.strip()))
    return pairs


def _from_json(text: str) -> list[tuple[str, str]]:
    try:
        document: Any = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--headers: the file is not valid JSON: {error}") from None
    pairs: list[tuple[str, str]] = []
    for item in document:
        if not (isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise UsageError(
                "--headers takes a JSON object of names and values, or a list of [name, value]"
            )
        name, value = item
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, str | int) and not isinstance(v, bool) for v in values):
            raise UsageError(f"--headers: the value of {name!r} is no text")
        pairs += [(name, str(v)) for v in values]
    return pairs
