"""A JSON reader that accepts every legal text, of any depth and with any numbers. Pure.

msgspec reads nearly all texts, fast. Python's reader handles texts that msgspec refuses although
RFC 8259 allows them: numbers beyond a float or of thousands of digits, escaped lone surrogates
(half an emoji), a byte order mark. Only nesting beyond the interpreter's stack is left to the slow
reader below.
"""

import math
import re
from decimal import Decimal, InvalidOperation
from json import JSONDecodeError, JSONDecoder
from typing import Any

import msgspec

#: The deepest nesting that is accepted. RFC 8259 (9) allows readers a limit; this one bounds the
#: memory for a text of only brackets.
MAX_DEPTH = 100_000

#: Integers of more digits are read as decimals. Python refuses to convert them, because that takes
#: quadratic time.
_INT_DIGITS = 4000

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NAMES: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_read_text = JSONDecoder().raw_decode  # expects a string that starts at the position
_WORD = re.compile("|".join(_NAMES))


#: Above this many bytes, a text that msgspec refuses must not be read on the event loop: it can
#: take a second per MiB.
PATIENT_BYTES = 65_536


class UnreadableJsonError(ValueError):
    """A text is not JSON; the message gives the position of the fault and quotes nothing."""


def read_fast(content: bytes) -> tuple[Any, bool]:
    """Return the value of a JSON text and True; False if only :func:`read_json` can decide."""
    try:
        return msgspec.json.decode(content), True
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError):
        return None, False


def read_json(content: bytes | str, *, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of a JSON text.

    An integer of more than 4000 digits, or a number beyond the range of a float, becomes an exact
    ``decimal.Decimal``. A lone surrogate stays in the text.

    Args:
        content: UTF-8, with or without a byte order mark, or a text.
        max_depth: the deepest nesting of arrays and objects.

    Raises:
        UnreadableJsonError: it is not JSON, not UTF-8, or too deep.
    """
    value: Any = None
    try:
        value = msgspec.json.decode(content)
        is_read = True
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError):
        is_read = False
    fault = ""
    try:
        if not is_read:
            value = _read_otherwise(content, max_depth)
        # msgspec and Python limit the depth only by their stacks.
        if max_depth < MAX_DEPTH and _is_deeper(value, max_depth):
            fault = f"nested deeper than {max_depth}"
    except UnreadableJsonError as error:
        fault = str(error)
    except UnicodeDecodeError as error:
        fault = f"byte {error.start} is not UTF-8"
    except JSONDecodeError as error:
        fault = f"{error.msg}, character {error.pos}"
    if not fault:
        return value
    # Raised here and without a cause: the reader's frames hold the text, and error reporters with
    # variables would send it.
    raise UnreadableJsonError(fault)


def _read_otherwise(content: bytes | str, max_depth: int) -> Any:
    """Read a text that msgspec refuses, with Python's reader if possible."""
    text = content if isinstance(content, str) else content.decode("utf-8-sig")
    # A byte order mark is not JSON, but readers may ignore it (RFC 8259, 8.1), in bytes and in
    # text.
    text = text.removeprefix("\ufeff")
    try:
        return _decoder.decode(text)
    except RecursionError:
        # Character by character in Python, so only if the stack does not suffice.
        return _read_slowly(text, max_depth)


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether ``value`` has arrays and objects more than ``depth`` levels deep."""
    level = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, list):
                inner += each
            elif isinstance(each, dict):
                inner += each.values()
        # Level by level: recursion could exhaust the stack.
        level = inner
    return any(isinstance(each, list | dict) for each in level)


def _read_slowly(text: str, max_depth: int) -> Any:
    """Read without recursion; ``open_ones`` has the enclosing arrays and objects.

    ``names`` has the member name of each open object whose value is still to come.
    """
    open_ones: list[list[Any] | dict[str, Any]] = []
    names: list[str] = []
    position = _skip(text, 0)
    while True:
        if text[position : position + 1] in ("[", "{"):
            if len(open_ones) == max_depth:
                raise UnreadableJsonError(f"nested deeper than {max_depth}")
            opened: list[Any] | dict[str, Any] = [] if text[position] == "[" else {}
            position = _skip(text, position + 1)
            if text[position : position + 1] != ("]" if isinstance(opened, list) else "}"):
                open_ones.append(opened)
                if isinstance(opened, dict):
                    position = _read_name(text, position, names)
                continue
            value: Any = opened
            position += 1
        else:
            value, position = _read_scalar(text, position)
        # After a value, any number of arrays and objects may close.
        while open_ones:
            holder = open_ones[-1]
            if isinstance(holder, list):
                holder.append(value)
            else:
                holder[names.pop()] = value
            position = _skip(text, position)
            mark = text[position : position + 1]
            if mark == ",":
                position = _skip(text, position + 1)
                if isinstance(holder, dict):
                    position = _read_name(text, position, names)
                break
            if mark != ("]" if isinstance(holder, list) else "}"):
                raise UnreadableJsonError(f"a comma or bracket is missing at character {position}")
            value = open_ones.pop()
            position += 1
        else:
            position = _skip(text, position)
            if position != len(text):
                raise UnreadableJsonError(f"something follows the value at character {position}")
            return value


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


def _read_name(text: str, position: int, names: list[str]) -> int:
    """Read a member's name and its colon; return the position of its value."""
    if text[position : position + 1] != '"':
        raise UnreadableJsonError(f"a name is missing at character {position}")
    name, position = _read_text(text, position)
    position = _skip(text, position)
    if text[position : position + 1] != ":":
        raise UnreadableJsonError(f"a colon is missing at character {position}")
    names.append(name)
    return _skip(text, position + 1)


def _read_scalar(text: str, position: int) -> tuple[Any, int]:
    if text[position : position + 1] == '"':
        return _read_text(text, position)
    if word := _WORD.match(text, position):
        return _NAMES[word[0]], word.end()
    number = _NUMBER.match(text, position)
    if number is None:
        raise UnreadableJsonError(f"no value at character {position}")
    return _number(number), number.end()


def _number(match: re.Match[str]) -> int | float | Decimal:
    whole, fraction, exponent = match.groups()
    return _whole(whole) if fraction is None and exponent is None else _fraction(match[0])


def _whole(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= _INT_DIGITS else Decimal(digits)


def _fraction(number: str) -> float | Decimal:
    value = float(number)
    if math.isfinite(value):
        return value
    try:
        return Decimal(number)
    except InvalidOperation:  # an exponent of 19 digits
        return value


def _refused(name: str) -> None:
    raise UnreadableJsonError(f"{name} is not a value")


_decoder = JSONDecoder(parse_float=_fraction, parse_int=_whole, parse_constant=_refused)
