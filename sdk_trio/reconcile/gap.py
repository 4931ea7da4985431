"""Gaps: the times in which the upstream may have skipped events, and the progress of catching up.

Pure. An *account* is the host, or a tenant with its own access token. Each account has a stored
:class:`AccountState`. The upstream disables an endpoint after ten failed events, skips what happens
until it is enabled again, and keeps no record of it.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from ..events.coalescing import SKEW_SECONDS

#: The shortest time that the upstream retries a failed event, in seconds. Ten attempts take
#: 13.5 minutes at least. After a shorter time without contact nothing is lost: its retries arrive.
LEAST_RETRIES_SECONDS: Final = 600.0

#: Time before the last contact that a catch-up reads again, in seconds. An event that was pending
#: when the endpoint was disabled may have been retried for 40 minutes.
OVERLAP_SECONDS: Final = 3600.0

#: The least time between two attempts to enable an endpoint, in seconds.
REENABLE_SECONDS: Final = 3600.0

#: The most times that a list is begun again because records disappeared from it meanwhile.
MOST_RESTARTS: Final = 3

#: The name of the stored state of the host; a tenant's has its id after a dot.
STATE_NAME: Final = "catch_up"

#: The name of the stored run of the command.
COMMAND_NAME: Final = "catch_up_command"


@attrs.frozen
class ListEnd:
    """The last record of a list when its reading began.

    New records come after it, so it stays at its ``position`` in its ``page`` unless a record
    before it disappears.
    """

    page: int
    position: int
    id: str


@attrs.frozen
class ListProgress:
    """The progress of one list.

    ``page`` is the next one, ``total`` the number of records in the list at the last page, and
    ``restarts`` how often the list was begun again. ``end`` is None if it is unknown.
    ``tied_since`` is the page on which records with the time of the last one begin.
    """

    name: str
    page: int = 1
    total: int = 0
    restarts: int = 0
    end: ListEnd | None = None
    tied_since: int | None = None

    def is_shifted(self, ids: Sequence[Any], total: int | None) -> bool:
        """Return whether records disappeared, so that another one may be on an earlier page.

        Args:
            ids: of the records of the next page.
            total: the number of records in the list; None: not counted.
        """
        end = self.end
        if end is not None and end.page == self.page and list(ids[end.position :][:1]) != [end.id]:
            return True
        return total is not None and total < self.total


@attrs.frozen
class CatchUpRun:
    """A catch-up and its progress; times are Unix seconds.

    ``types`` is a glob; None: all types. ``lists`` are still to read, the current one first; None:
    the run has not begun. ``listed``, ``changed`` and ``added`` count records and events so far.
    ``uncertain`` counts lifecycle events that may be older than the retention of ids.
    """

    since: float
    until: float
    types: str | None = None
    lists: tuple[ListProgress, ...] | None = None
    listed: int = 0
    changed: int = 0
    added: int = 0
    uncertain: int = 0

    @property
    def current(self) -> ListProgress | None:
        """The list that is read now; None: the run has not begun, or has ended."""
        return self.lists[0] if self.lists else None

    def begin(self, names: Iterable[str]) -> "CatchUpRun":
        """Return the run with those of its lists that are still wanted.

        A list continues where records with equal times begin, because the ids of those that were
        read are not stored.
        """
        names = tuple(names)
        if self.lists is None:
            return attrs.evolve(self, lists=tuple(ListProgress(name) for name in names))
        lists = (each for each in self.lists if each.name in names)
        return attrs.evolve(
            self,
            lists=tuple(attrs.evolve(each, page=each.tied_since or each.page) for each in lists),
        )

    def after_page(
        self, total: int | None, *, has_next: bool, tied_since: int | None = None
    ) -> "CatchUpRun":
        """Return the run after a page of the current list.

        Args:
            total: the number of records in the list; None: not counted.
            has_next: whether another page may follow.
            tied_since: the page on which records with the time of the last one begin.
        """
        current, *others = self.lists or ()
        if has_next:
            following = attrs.evolve(
                current, page=current.page + 1, total=total or 0, tied_since=tied_since
            )
            return attrs.evolve(self, lists=(following, *others))
        return attrs.evolve(self, lists=tuple(others))

    def with_end(self, end: ListEnd) -> "CatchUpRun":
        """Return the run with the end of the current list."""
        current, *others = self.lists or ()
        return attrs.evolve(self, lists=(attrs.evolve(current, end=end), *others))

    def restart_current(self) -> "CatchUpRun":
        """Return the run with the current list from its beginning."""
        current, *others = self.lists or ()
        again = ListProgress(current.name, restarts=current.restarts + 1)
        return attrs.evolve(self, lists=(again, *others))

    def without_current(self) -> "CatchUpRun":
        """Return the run without the current list, which is given up."""
        return attrs.evolve(self, lists=(self.lists or ())[1:])

    def postpone_current(self, *, from_start: bool) -> "CatchUpRun":
        """Return the run with the current list after the others."""
        current, *others = self.lists or ()
        later = ListProgress(current.name) if from_start else current
        return attrs.evolve(self, lists=(*others, later))


@attrs.frozen
class AccountState:
    """The stored state of an account; times are Unix seconds.

    ``contact`` is the last time at which the upstream answered that the endpoint is enabled; None:
    never. ``disabled_since`` is when it was first found disabled; None: it was not.
    ``reenabled_at`` is the last attempt to enable it. ``run`` is the unfinished catch-up.
    """

    contact: float | None = None
    disabled_since: float | None = None
    reenabled_at: float | None = None
    run: CatchUpRun | None = None

    def as_text(self) -> str:
        """Return the stored form."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "AccountState":
        """Return the state of :meth:`as_text`; raise ``ValueError`` for any other text."""
        try:
            document = json.loads(text)
            run = document.pop("run")
            read = cls(**document, run=None if run is None else _run_of(run))
            _check_times(read.contact, read.disabled_since, read.reenabled_at)
            if read.run is not None:
                _check_times(read.run.since, read.run.until)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"this is not a state of catch-up: {error!r}") from error
        return read


def _run_of(document: dict[str, Any]) -> CatchUpRun:
    lists = document.pop("lists")
    read = None if lists is None else tuple(map(_list_of, lists))
    return CatchUpRun(**document, lists=read)


def _list_of(document: dict[str, Any]) -> ListProgress:
    end = document.pop("end")
    return ListProgress(**document, end=None if end is None else ListEnd(**end))


def _check_times(*times: Any) -> None:
    if not all(time is None or math.isfinite(time) for time in times):
        raise ValueError("a time is not finite")


def found_enabled(state: AccountState, now: float, *, lookback_seconds: float) -> AccountState:
    """Return the state after the endpoint was found enabled; a gap adds a run.

    There is a gap if the endpoint was disabled before, or if there was no contact for longer than
    the upstream's retries last.

    Args:
        state: the state before.
        now: Unix seconds.
        lookback_seconds: the length of the gap if it is unknown: there was no contact before, or
            the clock was set back.
    """
    contact = state.contact
    if contact is None:
        # First contact: whatever came before belongs to the predecessor of this receiver.
        is_gap = state.disabled_since is not None
        since = now - lookback_seconds
    else:
        is_gap = state.disabled_since is not None or now - contact > LEAST_RETRIES_SECONDS
        # If the clock was set back meanwhile, the length of the gap is unknown.
        since = contact - OVERLAP_SECONDS if contact <= now else now - lookback_seconds
    run = state.run
    if is_gap:
        # An unfinished run may have read its first pages before this gap, so it begins again.
        run = CatchUpRun(since if run is None else min(since, run.since), until_now(now))
    # A clock that was set back must not make the last contact lie in the future.
    return attrs.evolve(state, contact=now, disabled_since=None, run=run)


def until_now(now: float) -> float:
    """Return the end of a range that reaches to ``now``.

    The upstream's clock may be ahead: what it has just changed has a later time there.
    """
    return now + SKEW_SECONDS


def found_disabled(state: AccountState, now: float) -> AccountState:
    """Return the state after the endpoint was found disabled."""
    since = now if state.disabled_since is None else state.disabled_since
    return attrs.evolve(state, disabled_since=since)


def may_reenable(state: AccountState, now: float) -> bool:
    """Return whether the last attempt to enable the endpoint is long enough ago."""
    # A time in the near future also counts: the last attempt was made by a host whose clock is
    # ahead of this one's.
    return state.reenabled_at is None or abs(now - state.reenabled_at) >= REENABLE_SECONDS


def state_name(tenant_id: str | None, prefix: str = STATE_NAME) -> str:
    """Return the name under which the state of an account is stored."""
    return prefix if tenant_id is None else f"{prefix}.{tenant_id}"
