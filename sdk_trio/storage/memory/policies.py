"""Pauses and policies of the store in memory: the deliveries that a claim may take."""

from msgspec.structs import replace

from ...base.throttle import TokenBucket
from ...events.coalescing import WaitingEvent, coalesce, time_of_state
from ...records.policies import ClaimLimits, EventPause, GroupLimit, burst_of
from .rows import Deliveries, MemoryRow


def pauses(rows: Deliveries, *, now: float, ended: bool = False) -> list[EventPause]:
    """Return the pauses that are in force; with ``ended`` all of them."""
    return [pause for pause in rows.pauses if ended or pause.is_active(now)]


def pause(
    rows: Deliveries, glob: str, *, actor: str, reason: str, until: float | None, now: float
) -> None:
    """Pause the deliveries whose type matches ``glob``."""
    since = now
    for number, each in enumerate(rows.pauses):
        if each.glob == glob and each.is_active(now):
            since = each.since
            rows.pauses[number] = replace(each, ended_at=now, ended_by=actor)
            break
    rows.pauses.append(EventPause(glob, since, actor, reason, until))
    rows.changes += 1


def resume(rows: Deliveries, glob: str | None, *, actor: str, now: float) -> list[str]:
    """End the pause of ``glob``, None: of all; return the globs of those that were in force."""
    ended = []
    for number, each in enumerate(rows.pauses):
        if each.ended_at is None and glob in (None, each.glob):
            by = actor if each.is_active(now) else None
            at = now if by is not None else each.until
            rows.pauses[number] = replace(each, ended_at=at, ended_by=by)
            if by is not None:
                ended.append(each.glob)
    rows.changes += 1
    return ended


class Allowance:
    """Decides which due rows one claim may take.

    ``superseded`` are the rows that end instead, each with the key of the newer one. ``limited``:
    rows wait for a limit. ``next_at`` is when a rate allows the next run.
    """

    def __init__(self, rows: Deliveries, limits: ClaimLimits, now: float) -> None:
        self._rows = rows
        self._limits = limits
        self._now = now
        self._free_workers = limits.free_workers
        self._running: dict[str, int] = {}
        self.superseded: list[tuple[MemoryRow, str]] = []
        self.limited = False
        self.next_at: float | None = None
        for row in rows.unfinished.values():
            if row.held_group is not None and row.owner is not None and row.until > now:
                self._running[row.held_group] = self._running.get(row.held_group, 0) + 1

    def try_take(self, row: MemoryRow) -> bool:
        """Take a slot and a token for a due row; return whether it may be claimed now."""
        row.held_group = None
        group = self._limits.group_of(row.type, row.raw or b"", row.signer)
        if group is None:
            return True
        limit = self._limits.groups.get(group)
        if limit is None:  # it is paused
            row.held_group = group
            return False
        if limit.coalesce and self._is_superseded(row, group):
            return False
        if not self._try_take_slot(group, limit):
            self.limited = True
            return False
        self._free_workers -= 1
        self._running[group] = self._running.get(group, 0) + 1
        row.held_group = group
        return True

    def _try_take_slot(self, group: str, limit: GroupLimit) -> bool:
        if self._free_workers <= 0:
            return False
        running = self._running.get(group, 0)
        if limit.concurrency is not None and running >= limit.concurrency:
            return False
        if limit.rate_per_minute is None:
            return True
        bucket = self._rows.buckets.get(group)
        per_second, burst = limit.rate_per_minute / 60.0, burst_of(limit.rate_per_minute)
        if bucket is None:
            bucket = self._rows.buckets[group] = TokenBucket(per_second=per_second, burst=burst)
        wait = bucket.admit(self._now)
        if wait > 0.0:
            at = self._now + wait
            self.next_at = at if self.next_at is None else min(at, self.next_at)
        return wait == 0.0

    def _is_superseded(self, row: MemoryRow, group: str) -> bool:
        """Note the older states of the subject of a row; return whether its own is one of them."""
        rows = {
            each.sequence: each
            for each in (row, *self._rows.lane_after(row))
            if each.queued and (each is row or each.owner is None)
            if self._limits.group_of(each.type, each.raw or b"", each.signer) == group
        }
        lane = [
            WaitingEvent(number, each.key, each.type, time_of_state(each.raw, self._now))
            for number, each in rows.items()
        ]
        newest, others = coalesce(lane[0], lane)
        self.superseded += [(rows[each.sequence], newest.key) for each in others]
        return newest.sequence != row.sequence
