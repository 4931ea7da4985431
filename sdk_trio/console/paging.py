"""The pages of a listing: which way the store is read, and the links to the next ones. Pure.

A page is the ``limit`` events nearest to the cursor that was given, whatever order they are shown
in, so that the same order can be kept while going forth and back. Cursors are sequences, which
never change: events that arrive meanwhile move nothing.
"""

from collections.abc import Sequence
from urllib.parse import urlencode

import attrs

from ..storage.records import DeliveryRecord
from .queries import ListQuery


@attrs.frozen
class Page:
    """Some events in the order that was asked for; ``links`` are queries by their relation."""

    records: Sequence[DeliveryRecord]
    links: dict[str, str]


def reads_oldest_first(query: ListQuery) -> bool:
    """Return whether the store is to be read by rising sequence to find the page.

    It is read from the only cursor there is; without one, and between two, as it is shown.
    """
    if (query.after is None) == (query.before is None):
        return query.order == "oldest"
    return query.before is None


def page_of(query: ListQuery, found: Sequence[DeliveryRecord]) -> Page:
    """Return the page of ``query``.

    Args:
        query: what was asked for.
        found: what the store holds of it, in the order of :func:`reads_oldest_first`; one event
            more than the limit, if there is one.
    """
    more = len(found) > query.limit
    records = list(found[: query.limit])
    reads_as_shown = reads_oldest_first(query) == (query.order == "oldest")
    if not reads_as_shown:
        records.reverse()
    if not records:
        return Page(records, {})
    between = query.after is not None and query.before is not None
    # Sequences begin at 1, so that nothing lies on the other side of 0.
    came_from_elsewhere = bool(query.after) if query.before is None else query.after is None
    has_next = more if reads_as_shown else True
    # Between two cursors, what lies before the first page is not a part of what was asked for.
    has_previous = came_from_elsewhere if reads_as_shown else more
    first, last = records[0].sequence, records[-1].sequence
    below, above = ("before", "after") if query.order == "newest" else ("after", "before")
    links = {}
    if has_next:
        kept = {above: getattr(query, above)} if between else {}
        links["next"] = _query(query, {**kept, below: last})
    if has_previous:
        links["prev"] = _query(query, {above: first})
    return Page(records, links)


def link_header(path: str, links: dict[str, str]) -> str:
    """Return the ``Link`` header (RFC 8288) for queries of ``path``; empty without any."""
    return ", ".join(f'<{path}?{query}>; rel="{relation}"' for relation, query in links.items())


def _query(query: ListQuery, cursors: dict[str, int]) -> str:
    given = attrs.asdict(query) | {"after": None, "before": None} | cursors
    return urlencode({name: _text(value) for name, value in given.items() if value is not None})


def _text(value: object) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
