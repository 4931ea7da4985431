"""Gaps: the times in which the upstream may have skipped events, and the progress of catching up.

Pure. An *account* is the host, or a tenant with its own access token. Each account has a stored
:class:`AccountState`. The upstream disables an endpoint after ten failed events, skips what happens
until it is enabled again, and keeps no record of it.
"""

import json
import math
from typing import Any, Final

import attrs

from ..events.lifecycle import KINDS

#: The shortest time that the upstream retries a failed event, in seconds. Ten attempts take
#: 13.5 minutes at least. After a shorter time without contact nothing is lost: its retries arrive.
LEAST_RETRIES_SECONDS: Final = 600.0

#: Time before the last contact that a catch-up reads again, in seconds. An event that was pending
#: when the endpoint was disabled may have been retried for 40 minutes.
OVERLAP_SECONDS: Final = 3600.0

#: The least time between two attempts to enable an endpoint, in seconds.
REENABLE_SECONDS: Final = 3600.0

#: The name of the stored state of the host; a tenant's has its id after a dot.
STATE_NAME: Final = "catch_up"

#: The name of the stored run of the command.
COMMAND_NAME: Final = "catch_up_command"


@attrs.frozen
class CatchUpRun:
    """A catch-up and its progress; times are Unix seconds.

    ``types`` is a glob; None: all types. ``kind`` is the list being read and ``page`` its next
    page; ``total`` the number of records in the list at the last page; ``restarts`` how often the
    list was begun again. ``listed``, ``changed`` and ``put`` count records and events so far.
    ``uncertain`` counts lifecycle events that may be older than the inbox's memory.
    """

    since: float
    until: float
    types: str | None = None
    kind: str = KINDS[0].name
    page: int = 1
    total: int = 0
    restarts: int = 0
    listed: int = 0
    changed: int = 0
    put: int = 0
    uncertain: int = 0

    def next_page(self, total: int | None) -> "CatchUpRun":
        """Return the run after a page of a list with ``total`` records."""
        return attrs.evolve(self, page=self.page + 1, total=total or 0)

    def begin_list(self, kind: str) -> "CatchUpRun":
        """Return the run at the beginning of the list ``kind``."""
        return attrs.evolve(self, kind=kind, page=1, total=0, restarts=0)


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
            read = cls(**document, run=None if run is None else CatchUpRun(**run))
            _check_times(read.contact, read.disabled_since, read.reenabled_at)
            if read.run is not None:
                _check_times(read.run.since, read.run.until)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"this is not a state of catch-up: {error!r}") from error
        return read


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
        run = CatchUpRun(since if run is None else min(since, run.since), now)
    # A clock that was set back must not make the last contact lie in the future.
    return attrs.evolve(state, contact=now, disabled_since=None, run=run)


def found_disabled(state: AccountState, now: float) -> AccountState:
    """Return the state after the endpoint was found disabled."""
    since = now if state.disabled_since is None else state.disabled_since
    return attrs.evolve(state, disabled_since=since)


def may_reenable(state: AccountState, now: float) -> bool:
    """Return whether the last attempt to enable the endpoint is long enough ago."""
    # Also a time shortly ahead of now counts: the last attempt was made by a host whose clock is
    # ahead of this one's.
    return state.reenabled_at is None or abs(now - state.reenabled_at) >= REENABLE_SECONDS


def state_name(tenant_id: str | None, prefix: str = STATE_NAME) -> str:
    """Return the name under which the state of an account is stored."""
    return prefix if tenant_id is None else f"{prefix}.{tenant_id}"
