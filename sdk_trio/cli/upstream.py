"""``call`` and ``events reconcile``: requests to the upstream."""

from __future__ import annotations

import json
import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ..errors import EXIT_FAILURE
from .parse import (
    UsageError,
    add_format,
    add_moment,
    add_number,
    describing,
    moment_text,
)

if not describing():
    import trio

    from ..client.client import Client, UpstreamDeliveries
    from ..client.export import CsvExport
    from ..client.operation import Body, Operation, OperationAnswer, UnknownArgumentError
    from ..client.operations import OPERATIONS, UnknownOperationError, bound, find_operation
    from ..client.pages import Listing
    from ..client.records import Record
    from ..config import Settings
    from ..reconcile.plan import Sighting
    from ..reconcile.reconciler import Reconciler
    from .settings import read
    from .store import open_inbox
    from .terminal import Progress, print_json, print_list, print_text, printable_lines, say

#: Texts that are read as JSON. ``1e5`` and ``007`` stay texts, because they may be names.
_PLAIN = re.compile(r"true|false|null|-?(0|[1-9][0-9]{0,15})(\.[0-9]+)?|[\[{\"].*", re.DOTALL)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\[\]-]*")


@attrs.frozen
class Chosen:
    """An operation and the values of its path."""

    operation: Operation
    path: tuple[str, ...]


def choose(words: Sequence[str]) -> Chosen:
    """Split ``words`` into the longest possible name of an operation and the rest.

    Raises:
        UnknownOperationError: they do not start with an operation; the error lists similar ones.
    """
    # The longest name first: the rest are ids, and an id may be a word that starts another name.
    for count in range(len(words), 0, -1):
        try:
            return Chosen(find_operation(words[:count]), tuple(words[count:]))
        except UnknownOperationError:
            continue
    # A word with a digit is probably an id, and would distort the search for similar names.
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
        # People write options with hyphens, the upstream's fields have underscores.
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
    """Return one value: JSON if the text looks like it, otherwise the text."""
    # In a query everything is text: 5 and "5" are the same there.
    if not _PLAIN.fullmatch(text) or not (as_json or text[:1] in '[{"'):
        return text
    return read_json(text, f"--{name.replace('_', '-')}")


def read_json(text: str, where: str) -> Any:
    """Return the JSON value of ``text``; ``where`` names it in messages.

    Raises:
        UsageError: it is not JSON. The text is not quoted, because it may contain a secret.
    """
    try:
        # NaN and Infinity are not JSON, but Python accepts them.
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} takes JSON, and this is not JSON: {error}") from None


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
    # Fields of the operation stay arguments; the rest belongs into the body that --data began.
    outer = {name: value for name, value in fields.items() if name in operation.parameters}
    return {**outer, "body": {**data, **inner}}


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


#: The number of records of a list that are printed by default: a screenful.
SHOWN = 20

COLUMNS = ("operation", "arguments", "method", "path")


def call_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``call``."""
    parser.add_argument(
        "operation",
        metavar="WORD",
        nargs="*",
        help="resource, operation and the values of its path, such as: orders get ID; then "
        "--name value for each field",
    )
    parser.add_argument("--list", action="store_true", help="list the operations with these words")
    add_number(parser, "--limit", help=f"for a list: print this many records (default {SHOWN})")
    parser.add_argument("--all", action="store_true", help="for a list: print every record")
    parser.add_argument(
        "--data", metavar="JSON", help="the body, or the query of a GET; - reads standard input"
    )
    parser.add_argument("--raw", action="store_true", help="print the answer's bytes as they came")
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="of --list (default table)"
    )


def call(arguments: Namespace) -> int:
    """Call an operation and print its answer; with ``--list`` print the operations instead.

    Raises:
        UsageError: an argument is wrong; UnknownOperationError: the operation does not exist.
        CallError: the upstream answered with an error (status 1), or did not answer (69).
    """
    if arguments.list:
        return _list_operations(arguments)
    chosen = choose(arguments.operation)
    limit = _limit(arguments, is_list=_is_list(chosen.operation))
    fields = read_fields(arguments.fields, as_json=chosen.operation.body is Body.JSON)
    given = join(chosen.operation, _data(arguments.data), fields)
    settings = read(arguments, standalone=False).require()
    # All input has been checked by now: nothing was sent for a typing error.
    trio.run(_call, Client(settings), chosen, given, limit, arguments.raw)
    return 0


def _list_operations(arguments: Namespace) -> int:
    """Print the operations whose names or paths contain all of the words."""
    words: Sequence[str] = arguments.operation
    rows = [
        {
            "operation": row.full_name.replace(".", " "),
            "arguments": " ".join(name.upper() for name in row.parameters) or None,
            "method": row.method,
            "path": row.path,
            "is_list": _is_list(row),
        }
        for row in OPERATIONS.values()
        if all(word.casefold() in f"{row.full_name} {row.path}".casefold() for word in words)
    ]
    if not rows:
        find_operation(words)  # raises an error that names similar operations
    print_list(arguments, rows, COLUMNS)
    return 0


def _is_list(operation: Operation) -> bool:
    return operation.answer in (OperationAnswer.PAGE, OperationAnswer.CURSOR_PAGE)


def _limit(arguments: Namespace, *, is_list: bool) -> int | None:
    if arguments.limit is not None and arguments.all:
        raise UsageError("give --limit or --all, not both")
    if not is_list and (arguments.limit is not None or arguments.all):
        raise UsageError(
            "--limit and --all are for lists, and this operation does not return a list"
        )
    if arguments.all:
        return None
    return arguments.limit or SHOWN


def _data(text: str | None) -> Any:
    if text is None:
        return None
    # Standard input also keeps a body out of the list of processes.
    return read_json(sys.stdin.read() if text == "-" else text, "--data")


async def _call(
    client: Client, chosen: Chosen, given: dict[str, Any], limit: int | None, raw: bool
) -> None:
    method = bound(client, chosen.operation)
    try:
        # Prepared once to find wrong arguments before a connection is made.
        method.prepare(*chosen.path, **given)
    except UnknownArgumentError as error:
        raise UsageError(
            f"{error.reason} (--data '{{...}}' sends fields that are newer than this program)"
        ) from None
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    async with client:
        if raw:
            response = await method.raw(*chosen.path, **given)
            if sys.stdout.isatty():
                print_text(_for_terminal(response.content.decode("utf-8", "backslashreplace")))
                return
            sys.stdout.flush()
            # As bytes: an answer need not be text, and its digest may be compared.
            sys.stdout.buffer.write(response.content)
            return
        answer = method(*chosen.path, **given)
        if isinstance(answer, Listing):
            print_json(await _records(answer, limit))
        elif isinstance(answer, CsvExport):
            text = await answer.text()
            print_text(_for_terminal(text) if sys.stdout.isatty() else text.removesuffix("\n"))
        else:
            document = await answer
            if document is not None:
                print_json(_plain(document))


def _for_terminal(text: str) -> str:
    """Return the upstream's text without control characters: customers choose parts of it."""
    return printable_lines(text.replace("\r\n", "\n").removesuffix("\n"))


async def _records(listing: Listing[Record], limit: int | None) -> list[Any]:
    """Return the first records of a list, or all of them; report if there are more."""
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


# -- events reconcile ----------------------------------------------------------------------------

RECONCILED_COLUMNS = ("webhook_id", "type", "sent", "delivered", "action")


def reconcile_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``events reconcile``."""
    add_moment(parser, "--since", "events sent since", required=True)
    parser.add_argument("--dry-run", action="store_true", help="list the events, fetch none")
    add_format(parser)


def reconcile(arguments: Namespace) -> int:
    """Request every event since ``--since`` that the inbox lacks; print them.

    They arrive at the receiver as deliveries, so it must be running. With ``--dry-run`` none is
    requested. Returns 1 if the upstream can no longer deliver one of them, or has disabled the
    endpoint.

    Raises:
        UsageError: ``--since`` is not a time, or is further back than the inbox remembers.
        StoreUnavailableError: the inbox does not exist.
        CallError: a call of the upstream failed; events requested until then arrive.
    """
    since: float = arguments.since
    settings = read(arguments, standalone=False).require()
    # Before any call of the upstream, because the events would be sent after the first request.
    _check_reach(settings, since, time.time())
    actions, disabled = trio.run(_reconcile, settings, since, arguments.dry_run)
    rows = [
        {
            "webhook_id": sighting.webhook_id,
            "type": sighting.type,
            "sent": moment_text(sighting.at),
            "delivered": sighting.delivered,
            "action": action,
        }
        for sighting, action in actions
    ]
    print_list(arguments, rows, RECONCILED_COLUMNS)
    lost = sum(action == "lost" for _, action in actions)
    verb = "would be requested" if arguments.dry_run else "requested"
    for name in disabled:
        say(
            f"the upstream has disabled the webhook endpoint {name}: no event was requested for "
            "it. Enable it there"
        )
    say(
        "the upstream lists no event that it skipped while an endpoint was disabled: 'events "
        "catch-up' makes events from the records that changed"
    )
    say(f"{len(actions) - lost} {verb}, {lost} can no longer be delivered")
    return EXIT_FAILURE if lost or disabled else 0


def _check_reach(settings: Settings, since: float, now: float) -> None:
    """Refuse a time further back than the inbox remembers: events would be handled twice."""
    options = settings.webhooks
    hours = min(options.dedup_retention_hours, options.payload_retention_days * 24)
    if since < now - hours * 3600:
        raise UsageError(
            f"--since reaches back further than the inbox remembers ({hours} hours: "
            "Sdk:Webhooks:DedupRetentionHours and PayloadRetentionDays), so events that were "
            "handled would be requested again"
        )
    if since > now:
        raise UsageError("--since is in the future")


async def _reconcile(
    settings: Settings, since: float, dry_run: bool
) -> tuple[Sequence[tuple[Sighting, str]], Sequence[str]]:
    """Return each missing event with the action taken, and the ids of disabled endpoints."""
    actions: list[tuple[Sighting, str]] = []
    async with open_inbox(settings) as inbox, Client(settings) as client:
        reconciler = Reconciler(UpstreamDeliveries(client), inbox, settings)
        survey = await reconciler.survey(since)
        progress = Progress("requested", len(survey.missing), quiet_below=5)
        for sighting in survey.missing:
            # The upstream has removed the body: asking again would change nothing.
            if sighting.archived:
                actions.append((sighting, "lost"))
            elif dry_run:
                actions.append((sighting, "would ask"))
            else:
                agreed = await reconciler.request_redelivery(sighting)
                actions.append((sighting, "asked" if agreed else "lost"))
            progress.advance()
    return actions, survey.disabled
