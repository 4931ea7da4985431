"""``call``: any operation of the upstream API, with JSON on standard output."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import trio

from ..client.client import Client
from ..client.export import CsvExport
from ..client.listing import Listing
from ..client.operation import Body, UnknownArgumentError
from ..client.operations import OPERATIONS, bound, find_operation
from ..client.records import Record
from .call_arguments import LISTS, Chosen, choose, join, read_fields, read_json
from .moments import parse_count
from .printer import print_json, print_rows, print_text, say
from .settings_reader import read
from .usage import UsageError

#: How many records of a list are printed by default.
SHOWN = 20

COLUMNS = ("operation", "arguments", "method", "path")


def call(arguments: Namespace) -> int:
    """Call an operation and print its answer; with ``--list`` print the operations instead.

    Raises:
        UsageError: an argument is wrong; UnknownOperationError: there is no such operation.
        CallError: the upstream's answer was no success (status 1), or there was none (69).
    """
    if arguments.list:
        return _list_operations(arguments.operation, as_json=arguments.format == "json")
    chosen = choose(arguments.operation)
    limit = _limit(arguments, is_list=chosen.operation.answer in LISTS)
    fields = read_fields(arguments.fields, as_json=chosen.operation.body is Body.JSON)
    given = join(chosen.operation, _data(arguments.data), fields)
    settings = read(arguments, standalone=False).require()
    trio.run(_call, Client(settings), chosen, given, limit, arguments.raw)
    return 0


def _list_operations(words: Sequence[str], *, as_json: bool) -> int:
    """Print the operations whose names or paths hold every one of ``words``."""
    rows = [
        {
            "operation": row.full_name.replace(".", " "),
            "arguments": " ".join(name.upper() for name in row.parameters) or None,
            "method": row.method,
            "path": row.path,
            "is_list": row.answer in LISTS,
        }
        for row in OPERATIONS.values()
        if all(word.casefold() in f"{row.full_name} {row.path}".casefold() for word in words)
    ]
    if not rows:
        find_operation(words)  # raises an error that names similar operations
    print_rows(rows, COLUMNS, as_json=as_json)
    return 0


def _limit(arguments: Namespace, *, is_list: bool) -> int | None:
    if arguments.limit is not None and arguments.all:
        raise UsageError("give --limit or --all, not both")
    if not is_list and (arguments.limit is not None or arguments.all):
        raise UsageError("--limit and --all are for lists, and this operation's answer is none")
    if arguments.all:
        return None
    return SHOWN if arguments.limit is None else parse_count(arguments.limit, option="--limit")


def _data(text: str | None) -> Any:
    if text is None:
        return None
    return read_json(sys.stdin.read() if text == "-" else text, "--data")


async def _call(
    client: Client, chosen: Chosen, given: dict[str, Any], limit: int | None, raw: bool
) -> None:
    method = bound(client, chosen.operation)
    try:
        method.prepare(*chosen.path, **given)
    except UnknownArgumentError as error:
        raise UsageError(
            f"{error.reason} (--data '{{...}}' sends what is newer than this program)"
        ) from None
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    async with client:
        if raw:
            response = await method.raw(*chosen.path, **given)
            sys.stdout.flush()
            sys.stdout.buffer.write(response.content)
            return
        answer = method(*chosen.path, **given)
        if isinstance(answer, Listing):
            print_json(await _records(answer, limit))
        elif isinstance(answer, CsvExport):
            print_text((await answer.text()).removesuffix("\n"))
        else:
            document = await answer
            if document is not None:
                print_json(_plain(document))


async def _records(listing: Listing[Record], limit: int | None) -> list[Any]:
    """Return the first records of a list, or all of them; tell the user when there are more."""
    records: list[Any] = []
    async for page in listing.pages():
        records += [record.raw for record in page.items]
        if limit is not None and len(records) >= limit:
            if len(records) > limit or page.has_next:
                total = "" if page.total_count is None else f" of {page.total_count}"
                say(f"the first {limit}{total}; --limit N or --all for more")
            return records[:limit]
    return records


def _plain(answer: Any) -> Any:
    if isinstance(answer, Record):
        return answer.raw
    return [_plain(item) for item in answer] if isinstance(answer, list) else answer
