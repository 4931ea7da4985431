"""The reading of ``call``'s words and options as an operation and its arguments. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..client.operation import Answer, Body, Operation
from ..client.operations import UnknownOperationError, find_operation
from .usage import UsageError

#: Texts that are read as JSON. ``1e5`` and ``007`` stay texts, because they may be names.
_PLAIN = re.compile(r"true|false|null|-?(0|[1-9][0-9]{0,15})(\.[0-9]+)?|[\[{\"].*", re.DOTALL)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\[\]-]*")

LISTS = frozenset({Answer.PAGE, Answer.CURSOR_PAGE})


@attrs.frozen
class Chosen:
    """An operation and the values of its path."""

    operation: Operation
    path: tuple[str, ...]


def choose(words: Sequence[str]) -> Chosen:
    """Split ``words`` into the longest possible name of an operation and the rest.

    Raises:
        UnknownOperationError: they begin with no operation; the error names similar ones.
    """
    for count in range(len(words), 0, -1):
        try:
            return Chosen(find_operation(words[:count]), tuple(words[count:]))
        except UnknownOperationError:
            continue
    # A word with a digit is an id rather than a name, and would spoil the search for similar names.
    names = [word for word in words if not any(letter.isdigit() for letter in word)]
    return Chosen(find_operation(names), ())


def read_fields(texts: Sequence[str], *, as_json: bool) -> dict[str, Any]:
    """Return the fields of ``--name value`` pairs; one given twice is a list.

    Args:
        texts: the arguments that the parser did not know: ``--name value`` or ``--name=value``.
        as_json: they go into a JSON body, so ``5``, ``true`` and ``null`` are read as JSON; an
            object, a list or a quoted text is read as JSON in any case.

    Raises:
        UsageError: a value has no name or a name no value.
    """
    fields: dict[str, Any] = {}
    several: set[str] = set()
    rest = list(texts)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        name = option.removeprefix("--")
        if not option.startswith("--") or not _NAME.fullmatch(name):
            raise UsageError(
                f"{option!r} has no name: give fields as --name value, after the operation"
            )
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UsageError(f"--{name} takes a value, such as --{name} true")
            value = rest.pop(0)
        name = name.replace("-", "_")
        read = read_value(value, name, as_json=as_json)
        if name in several:
            fields[name].append(read)
        elif name in fields:
            fields[name] = [fields[name], read]
            several.add(name)
        else:
            fields[name] = read
    return fields


def read_value(text: str, name: str, *, as_json: bool) -> Any:
    """Return one value: JSON where the text looks like it, else the text."""
    if not _PLAIN.fullmatch(text) or not (as_json or text[:1] in '[{"'):
        return text
    return read_json(text, f"--{name.replace('_', '-')}")


def read_json(text: str, where: str) -> Any:
    """Return the JSON value of ``text``; ``where`` names it in messages.

    Raises:
        UsageError: it is no JSON. No part of it is quoted, because it may hold a secret.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} takes JSON, and this is none: {error}") from None


def join(operation: Operation, data: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of the operation's method: fields on top of ``--data``.

    ``data`` is None if it was not given; it is the body, or the query of operations without one.

    Raises:
        UsageError: they cannot be joined.
    """
    if data is None:
        return dict(fields)
    if not isinstance(data, dict):
        if fields or operation.body is Body.NONE:
            raise UsageError("--data takes a JSON object here, to which --name value adds")
        return {"body": data}
    if operation.body is Body.NONE:
        return {**fields, "query": data}
    inner = {name: value for name, value in fields.items() if name not in operation.parameters}
    outer = {name: value for name, value in fields.items() if name in operation.parameters}
    return {**outer, "body": {**data, **inner}}


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
