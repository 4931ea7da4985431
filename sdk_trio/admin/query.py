"""The queries and request bodies of the admin API: their fields, valid values, and pages. Pure.

Anyone with the token may write them by hand, so unknown parameters are refused by name: a misspelt
one would otherwise select every event.

A page has the ``limit`` events nearest to the cursor, in either display order, so paging forth and
back keeps the order. Cursors are sequences, which never change: events that arrive meanwhile do not
shift a page.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode

import msgspec

from ..records.deliveries import DeliveryRecord, DeliveryState

#: The most events of one listing, and their number without ``limit``.
LARGEST_LIMIT = 500
USUAL_LIMIT = 50

#: The maximum number of events that one call replays; the answer shows whether there are more.
LARGEST_REPLAY = 1000

#: The maximum length of a name in the log, in characters.
LONGEST_ACTOR = 100

#: The longest reason of an action, in characters.
LONGEST_REASON = 500

#: One line of text: no control characters, line breaks or characters that reverse the direction.
LINE = r"^[^\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]+$"

#: The greatest sequence that a store has.
LARGEST_SEQUENCE = 2**63 - 1

#: The forms of a time: Unix seconds, or RFC 3339 with its offset from UTC. An unescaped plus sign
#: in a query arrives as a space, so both are accepted.
MOMENT = (
    r"^([0-9]{1,11}(\.[0-9]{1,6})?"
    r"|(?!0000)[0-9]{4}-(02-(0[1-9]|1[0-9]|2[0-9])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01]))"
    r"T([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9](\.[0-9]{1,6})?)?"
    r"(Z|[+ -]([01][0-9]|2[0-3]):[0-5][0-9]))$"
)

#: The latest time that can be written in seconds.
LATEST_MOMENT = 99_999_999_999.0

_MAX_PARAMETERS = 20


class BadQueryError(ValueError):
    """A query or body that is not understood; the message names the part and the valid values."""


class ListQuery(msgspec.Struct, frozen=True):
    """The filter and the order of ``GET /api/events``.

    ``tenant`` is an identifier or an id, ``source`` a name; ``since`` and ``until`` are Unix
    seconds, the latter not included; ``after`` and ``before`` are sequences that are not included
    either.
    """

    type: str | None = None
    state: DeliveryState | None = None
    tenant: str | None = None
    source: str | None = None
    subject: str | None = None
    since: float | None = None
    until: float | None = None
    limit: int = USUAL_LIMIT
    after: int | None = None
    before: int | None = None
    order: Literal["newest", "oldest"] = "newest"


class ReplayRequest(msgspec.Struct, frozen=True):
    """The body of ``POST /api/events/replay``: events by id, or those of a state.

    ``error`` is a group of ``replay.error_group``; ``after`` is where the last answer
    stopped; ``confirm`` is the token of a dry run of the same filter. ``actor`` is the person who
    requests it, for the log.
    """

    ids: list[str] | None = None
    state: Literal["dead", "parked", "retrying"] | None = None
    type: str | None = None
    tenant: str | None = None
    source: str | None = None
    error: str | None = None
    since: str | None = None
    until: str | None = None
    after: int | None = None
    confirm: str | None = None
    dry_run: bool | None = None
    actor: str | None = None


#: Fields that filter the events of a state; the token of a dry run covers all of them.
FILTER = ("state", "type", "tenant", "source", "error", "since", "until")


def parse_list(query: bytes) -> ListQuery:
    """Return the parameters of a listing.

    Raises:
        BadQueryError: a parameter is unknown, given twice, or has an invalid value.
    """
    given = parameters(query, ListQuery.__struct_fields__)
    state, order = given.get("state"), given.get("order")
    if state is not None and state not in set(DeliveryState):
        raise BadQueryError(f"state takes one of {', '.join(DeliveryState)}")
    if order not in (None, "newest", "oldest"):
        raise BadQueryError("order takes newest or oldest")
    after = parse_number(given, "after", None, 0, LARGEST_SEQUENCE)
    before = parse_number(given, "before", None, 0, LARGEST_SEQUENCE)
    # With ``after`` only, the caller follows the inbox, in order of arrival.
    usual = "newest" if after is None or before is not None else "oldest"
    return ListQuery(
        type=given.get("type"),
        state=None if state is None else DeliveryState(state),
        tenant=given.get("tenant"),
        source=given.get("source"),
        subject=given.get("subject"),
        since=parse_moment(given, "since"),
        until=parse_moment(given, "until"),
        limit=parse_number(given, "limit", USUAL_LIMIT, 1, LARGEST_LIMIT) or USUAL_LIMIT,
        after=after,
        before=before,
        order="oldest" if (order or usual) == "oldest" else "newest",
    )


def parse_show(query: bytes) -> bool:
    """Return whether the body of an event is requested.

    Raises:
        BadQueryError: a parameter is unknown or has an invalid value.
    """
    body = parameters(query, ("body",)).get("body", "0")
    if body not in ("0", "1"):
        raise BadQueryError("body takes 0 or 1")
    return body == "1"


def parse_replay(body: bytes) -> ReplayRequest:
    """Return the request of a replay.

    Raises:
        BadQueryError: it is not a JSON object of that form.
    """
    order: ReplayRequest = parse_request(body, ReplayRequest)
    given = {
        name: value for name, value in msgspec.structs.asdict(order).items() if value is not None
    }
    if (order.ids is None) == (order.state is None):
        raise BadQueryError("give ids, or a state (dead, parked or retrying); not both")
    chosen = [name for name in (*FILTER[1:], "after", "confirm") if name in given]
    if order.ids is not None and chosen:
        raise BadQueryError(
            f"{chosen[0]} filters the events of a state; remove it, or give a state instead of ids"
        )
    if order.ids is not None and not 1 <= len(order.ids) <= LARGEST_REPLAY:
        raise BadQueryError(f"ids must contain 1 to {LARGEST_REPLAY} ids")
    if order.after is not None and not 0 <= order.after <= LARGEST_SEQUENCE:
        raise BadQueryError(f"after takes a number from 0 to {LARGEST_SEQUENCE}")
    for name in ("since", "until"):
        parse_moment(given, name)
    return order


def check_line(name: str, text: str | None, longest: int) -> None:
    """Raise :class:`BadQueryError` for a given field that does not match :data:`LINE`."""
    if text is not None and not (len(text) <= longest and re.search(LINE, text)):
        raise BadQueryError(f"{name} takes 1 to {longest} characters without control characters")


def parse_request(body: bytes, kind: type[Any]) -> Any:
    """Return the body of a changing call: a JSON object with the fields of ``kind``.

    Raises:
        BadQueryError: it is not one, or has an unknown field.
    """
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
        names = kind.__struct_fields__
        # A misspelt field would otherwise choose every event of a state.
        if unknown := given.keys() - set(names):
            raise BadQueryError(f"the body takes {', '.join(names)}; not {min(unknown)}")
        if None in given.values():
            raise BadQueryError("the body takes no null: leave the field out")
        # A JSON Schema, and so the OpenAPI document, counts 5.0 as an integer.
        whole = {name: int(v) for name, v in given.items() if isinstance(v, float) and v % 1 == 0}
        order = msgspec.convert({**given, **whole}, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadQueryError(f"the body is not understood: {error}") from None
    check_line("actor", order.actor, LONGEST_ACTOR)
    return order


def parameters(query: bytes, known: tuple[str, ...]) -> Mapping[str, str]:
    """Return the parameters of a query, each known and given once.

    Raises:
        BadQueryError: a parameter is invalid or unknown, or the query cannot be parsed.
    """
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_PARAMETERS,
        )
    except ValueError:
        raise BadQueryError("the query is not understood") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            raise BadQueryError(f"the query takes {', '.join(known)}")
        if name in found:
            raise BadQueryError(f"{name} is given twice")
        found[name] = value
    return found


def parse_number(
    given: Mapping[str, str], name: str, usual: int | None, least: int, greatest: int
) -> int | None:
    """Return the number of a parameter, ``usual`` if it is not given.

    Raises:
        BadQueryError: it is not a number within the bounds.
    """
    text = given.get(name)
    if text is None:
        return usual
    if text.isascii() and text.isdigit() and len(text) <= len(str(greatest)):
        value = int(text)
        if least <= value <= greatest:
            return value
    raise BadQueryError(f"{name} takes a number from {least} to {greatest}")


def parse_moment(given: Mapping[str, str], name: str) -> float | None:
    """Return the time of a parameter in Unix seconds, None if it is not given.

    Raises:
        BadQueryError: it does not have the form of :data:`MOMENT`.
    """
    text = given.get(name)
    if text is None:
        return None
    if re.fullmatch(MOMENT, text):
        try:
            given_at = (
                datetime.fromisoformat(text.replace(" ", "+")).timestamp()
                if "T" in text
                else float(text)
            )
        except (ValueError, OverflowError):
            pass
        else:
            # No event arrived outside of these bounds, and links cannot express other moments.
            return min(max(given_at, 0.0), LATEST_MOMENT)
    raise BadQueryError(
        f"{name} takes Unix seconds or a time such as 2026-01-31T12:00:00Z, with Z or its offset"
    )


class PageOfEvents(msgspec.Struct, frozen=True):
    """Events in the requested order; ``links`` are queries by their relation."""

    records: Sequence[DeliveryRecord]
    links: dict[str, str]


def reads_oldest_first(query: ListQuery) -> bool:
    """Return whether to read the store by rising sequence for the page.

    It is read from the only cursor; with none or two, in display order.
    """
    if (query.after is None) == (query.before is None):
        return query.order == "oldest"
    return query.before is None


def page_of(query: ListQuery, found: Sequence[DeliveryRecord]) -> PageOfEvents:
    """Return the page of ``query``.

    Args:
        query: the parameters.
        found: the store's events, in the order of :func:`reads_oldest_first`; one event more than
            the limit, if there is one.
    """
    more = len(found) > query.limit
    records = list(found[: query.limit])
    reads_as_shown = reads_oldest_first(query) == (query.order == "oldest")
    if not reads_as_shown:
        records.reverse()
    if not records:
        return PageOfEvents(records, {})
    between = query.after is not None and query.before is not None
    # Sequences start at 1, so nothing precedes a cursor of 0.
    came_from_elsewhere = bool(query.after) if query.before is None else query.after is None
    has_next = more if reads_as_shown else True
    # With two cursors, events before the first page are outside of the requested range.
    has_previous = came_from_elsewhere if reads_as_shown else more
    first, last = records[0].sequence, records[-1].sequence
    below, above = ("before", "after") if query.order == "newest" else ("after", "before")
    links = {}
    if has_next:
        kept = {above: getattr(query, above)} if between else {}
        links["next"] = _query(query, {**kept, below: last})
    if has_previous:
        links["prev"] = _query(query, {above: first})
    return PageOfEvents(records, links)


def link_header(path: str, links: dict[str, str]) -> str:
    """Return the ``Link`` header (RFC 8288) for queries of ``path``; empty without any."""
    return ", ".join(f'<{path}?{query}>; rel="{relation}"' for relation, query in links.items())


def _query(query: ListQuery, cursors: dict[str, int]) -> str:
    given = msgspec.structs.asdict(query) | {"after": None, "before": None} | cursors
    return urlencode({name: _text(value) for name, value in given.items() if value is not None})


def _text(value: object) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
