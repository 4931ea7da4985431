"""Makes ``docs/reference/events.md`` of the catalogue and the data classes."""

import inspect
import types
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from sdk_trio.events import DEFAULT_CATALOG, EventType, Payload
from sdk_trio.events.values import fields_of

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "events.md"

_INTRODUCTION = """\
<!-- Made by `make generate` (generate/event_page.py) of sdk_trio/events: change those. -->

# Events

Every verified delivery becomes one object of the event class of its type. All event classes have
the same members:

| member | type | meaning |
|---|---|---|
| `webhook_id` | `str` | the `webhook-id` header, the same for every copy and retry |
| `key` | `str` | signer and `webhook_id`: what makes work idempotent |
| `type` | `str` | the type as it was sent |
| `timestamp` | aware `datetime` | the document's own `timestamp`, else the header's |
| `data` | see below | what fits; `data.id` is always a `str`, if only `""` |
| `raw` | `bytes` | the exact bytes that were signed |
| `attempt` | `int` | which run of a handler this is, from 1; a replay goes on counting |
| `generation` | `int` | how often it was [replayed when done](../how-to/exactly-once.md) |
| `received_at` | aware `datetime` | when this copy arrived |
| `tenant` | | the tenant that the event belongs to, or `None` |
| `api_version` | `str` or `None` | the version of the sender's API that shaped `data` |
| `json` | `dict` | the full document as plain JSON values, decoded on first use |

Only `data.id` is certain. Every other field is `None` when it was left out or is of another kind
than expected (a number sent for an identifier is kept as text). Such *drift* is counted and logged
once for each type, and the event is dispatched all the same. Statuses and the like are `str`, so
new values pass. A time without an offset from UTC does not fit. A number beyond
the range of a float, such as `1e400`, is infinity in `extra`, `metadata` and `json`. When a name
stands twice in one object, the last one counts.

`data.total_amount` and `data["total_amount"]` are the same, as in
[records of the client](../how-to/call-the-upstream.md). A field that the data class does not name,
because the sender's API is newer, is read in both ways as well:
`data["new_field"]` is its plain JSON value, and `data.extra` has all of them. Without such a field
in the delivery, `data.new_field` raises `AttributeError` and `data["new_field"]` raises `KeyError`;
brackets also do that for a field of the class that was not sent, whose attribute is `None`.
`"total_amount" in event.data` and iteration are about the names that were sent. Embedded records,
as `data.customer`, take brackets for the fields of their class; what else they hold is in
`event.json`.

A body is an event when it is a JSON object in UTF-8 with a string `type` of 1 to 256 characters.
Anything else is answered like a failed verification. JSON that strict decoders refuse is drift:
half of a surrogate pair (an emoji that was cut in two) is read as U+FFFD; `NaN`, `Infinity`,
numbers of more than 4300 characters, and what nests deeper than 256, are read as null. `raw` has
the exact bytes.
"""

_OWN_EVENTS = """\
## Events of your own

```python
from sdk_trio.events import DEFAULT_CATALOG, Event, Payload


class InvoiceData(Payload, frozen=True):
    total: int | None = None


class InvoiceSentEvent(Event[InvoiceData]):
    wire_type = "acme.invoice_sent"


catalog = DEFAULT_CATALOG.with_event(InvoiceSentEvent)
```

The data class is an attrs class, a `msgspec.Struct`, a dataclass or `dict`. Each of its fields
needs a default. Derived from `Payload`, which is a `msgspec.Struct`, it has `id` and `extra` as
well.
"""


def files() -> dict[Path, str]:
    """Return the page and its text."""
    return {PAGE: render_page()}


def render_page() -> str:
    """Return the whole page as Markdown."""
    rows = tuple(DEFAULT_CATALOG)
    return "\n".join(
        [
            _INTRODUCTION,
            f"## The {len(DEFAULT_CATALOG.known)} known types\n",
            "The completeness check at start-up names those of them that have no handler.\n",
            *_table_of_types(DEFAULT_CATALOG.known),
            f"\n## {len(DEFAULT_CATALOG.additional)} additional types\n",
            "Sent by the upstream, typed and dispatched, not counted by the completeness check.\n",
            *_table_of_types(DEFAULT_CATALOG.additional),
            "\nAny other type becomes an `UnknownEvent`; its data is a `Payload`: `id`, `extra`.\n",
            "## Data classes\n",
            *_data_classes(row.data_class for row in rows),
            _OWN_EVENTS,
        ]
    )


def _table_of_types(rows: Iterable[EventType]) -> list[str]:
    return [
        "| type | event class | data class | meaning |",
        "|---|---|---|---|",
        *(
            f"| `{row.wire_type}` | `{row.event_class.__name__}` | `{row.data_class.__name__}` "
            f"| {inspect.getdoc(row.event_class)} |"
            for row in rows
        ),
    ]


def _data_classes(data_classes: Iterable[type[Any]]) -> list[str]:
    """Describe each class, each followed by the classes nested in it that are new by then."""
    lines: list[str] = []
    waiting = list(dict.fromkeys(data_classes))
    described: set[Any] = set()
    while waiting:
        record = waiting.pop(0)
        if record in described:
            continue
        described.add(record)
        fields = fields_of(record) or ()
        lines += [f"### {record.__name__}\n", f"{inspect.getdoc(record)}\n"]
        lines += ["| field | type |", "|---|---|"]
        lines += [f"| `{field.wire_name}` | {_describe(field.kind)} |" for field in fields]
        if issubclass(record, Payload):
            lines.append("| `extra` | mapping of the fields not named here |")
        lines.append("")
        waiting[:0] = [nested for field in fields for nested in _nested(field.kind)]
    return lines


def _members(kind: Any) -> list[Any]:
    union = get_origin(kind) in (Union, types.UnionType)
    members = get_args(kind) if union else (kind,)
    return [member for member in members if member is not type(None)]


def _nested(kind: Any) -> list[Any]:
    found = [get_args(m)[0] if get_origin(m) is tuple else m for m in _members(kind)]
    return [member for member in found if fields_of(member) is not None]


def _describe(kind: Any) -> str:
    (member,) = _members(kind)
    optional = " or `None`" if member is not kind else ""
    if get_origin(member) is Annotated and get_args(member)[0] is datetime:
        return f"aware `datetime`{optional}"
    if get_origin(member) is tuple:
        return f"tuple of `{get_args(member)[0].__name__}`{optional}"
    return f"`{getattr(member, '__name__', member)}`{optional}"
