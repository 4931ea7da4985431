"""Pages of a list of the upstream: lists without an end, and records with equal times. Pure.

The upstream sorts by a time, and gives no order to records with equal times. It may sort these
differently for each page. One of them is then on two pages, and another one on none.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from ..errors import SdkError
from .gap import ListProgress

#: Records of a page: the upstream's maximum.
PAGE_RECORDS: Final = 100

#: The most pages of a list: ten million records, which take more than a day.
MOST_PAGES: Final = 100_000

#: The sizes of the pages in which records with equal times are read again. Other pages have other
#: records, also if the upstream sorts equally for equal pages.
OTHER_SIZES: Final = range(PAGE_RECORDS - 1, PAGE_RECORDS - 21, -1)

#: They are given up after so many sizes in a row with which no further record was found.
MOST_FRUITLESS: Final = 3

#: Records with equal times that are compared. Of more, each further one begins a new comparison.
MOST_TIED: Final = 10_000


class EndlessListError(SdkError):
    """The upstream repeats pages of a list, or the list has too many pages."""


class RepeatCheck:
    """Notices a list without an end.

    Each page is compared with one earlier page: the last whose number is a power of two. So a list
    that repeats its pages in a cycle of any length is noticed (Brent's algorithm).
    """

    def __init__(self) -> None:
        self._ids: list[Any] = []

    def check(self, current: ListProgress, records: Sequence[Any]) -> None:
        """Check one page; the pages of a list have to come in their order.

        Raises:
            EndlessListError: the list repeats itself, or has more than :data:`MOST_PAGES` pages.
        """
        ids, page = [record.get("id") for record in records], current.page
        if page > 1 and ids and ids == self._ids:
            raise EndlessListError(f"page {page} of {current.name} repeats an earlier page")
        if page > MOST_PAGES:
            raise EndlessListError(f"{current.name} has more than {MOST_PAGES} pages")
        if page & (page - 1) == 0:
            self._ids = ids


@attrs.define
class TiedRecords:
    """Records with equal times, which follow each other in a list.

    ``start`` is the position of the first one in the list, ``size`` their number, and ``ids`` those
    that were seen.
    """

    value: Any
    start: int
    size: int = 0
    ids: set[Any] = attrs.Factory(set)

    @property
    def hides_some(self) -> bool:
        """Whether some of them have been on no page."""
        return len(self.ids) < self.size

    def pages(self, size: int) -> range:
        """Return the pages that have them, if a page has ``size`` records."""
        return range(self.start // size + 1, (self.start + self.size - 1) // size + 2)

    def take_unseen(self, records: Sequence[Mapping[str, Any]], sorting: str) -> list[Any]:
        """Return those of a page that have not been seen, and note that they have."""
        unseen = [
            record
            for record in records
            if record.get(sorting) == self.value and record.get("id") not in self.ids
        ]
        self.ids.update(record.get("id") for record in unseen)
        return unseen


class TieCheck:
    """Notices that records with equal times were on two pages, so that others were on none."""

    def __init__(self) -> None:
        self._next: tuple[str, int] | None = None
        self._tied = TiedRecords(None, 0)

    @property
    def since(self) -> int:
        """The page on which records with the time of the last one begin."""
        return self._tied.start // PAGE_RECORDS + 1

    def check(
        self,
        current: ListProgress,
        records: Sequence[Mapping[str, Any]],
        sorting: str,
        *,
        total: int | None,
        has_next: bool,
    ) -> TiedRecords | None:
        """Note a page; return the records with equal times that end on it and hide some.

        Args:
            current: the page.
            records: of the page.
            sorting: the field of the list's order.
            total: the number of records in the list; None: not counted.
            has_next: whether another page may follow.
        """
        position = (current.page - 1) * PAGE_RECORDS
        if self._next != (current.name, current.page):
            self._tied = TiedRecords(object(), position)
        self._next = current.name, current.page + 1
        hiding = None
        for record in records:
            tied = self._tied
            if record.get(sorting) != tied.value or tied.size >= MOST_TIED:
                if tied.hides_some:
                    hiding = tied  # only the first ones of a page can have been on another one
                self._tied = tied = TiedRecords(record.get(sorting), position)
            tied.size += 1
            tied.ids.add(record.get("id"))
            position += 1
        if not has_next:
            tied = self._tied
            # A record that was created meanwhile may have moved one of them behind the last page.
            tied.size = max(tied.size, (total or 0) - tied.start)
            hiding = tied if tied.hides_some else hiding
        return hiding
