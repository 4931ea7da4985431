"""Pauses of events by type, as rows: who paused and resumed them, why, and until when.

Functions of a transaction. ``webhooks/pauses.py`` reads the active ones, and makes a claim obey
them.
"""

from ...records.policies import EventPause
from .dialect import SqlTransaction

_LIST_PAUSES = """
SELECT glob, since, actor, reason, until, ended_at, ended_by FROM pause
WHERE ended_at IS NULL OR CAST(:ended AS boolean) ORDER BY since, id
"""

# One that is there keeps its beginning: a second pause changes why and how long.
_CHANGE_PAUSE = """
UPDATE pause SET until = :until, reason = :reason, actor = :actor
WHERE glob = :glob AND ended_at IS NULL AND (until IS NULL OR until > :now) RETURNING id
"""

_END_OVERDUE_PAUSES = """
UPDATE pause SET ended_at = until, ended_by = '' WHERE ended_at IS NULL AND until <= :now
"""

_ADD_PAUSE = """
INSERT INTO pause (glob, since, actor, reason, until)
VALUES (:glob, :now, :actor, :reason, :until)
"""

_END_PAUSES = """
UPDATE pause SET ended_at = :now, ended_by = :actor
WHERE ended_at IS NULL AND (glob = :glob OR CAST(:glob AS text) IS NULL) RETURNING glob
"""


def pauses(tx: SqlTransaction, *, ended: bool = False) -> list[EventPause]:
    """Return the pauses that were not resumed; with ``ended`` all of them."""
    return [
        EventPause(glob, since, actor, reason, until, ended_at, ended_by or None)
        for glob, since, actor, reason, until, ended_at, ended_by in tx.all(
            _LIST_PAUSES, ended=ended
        )
    ]


def pause(
    tx: SqlTransaction, glob: str, *, actor: str, reason: str, until: float | None, now: float
) -> None:
    """Pause the events whose type matches ``glob``."""
    tx.run(_END_OVERDUE_PAUSES, now=now)
    given = {"glob": glob, "actor": actor, "reason": reason, "until": until, "now": now}
    if tx.one(_CHANGE_PAUSE, **given) is None:
        tx.run(_ADD_PAUSE, **given)
    tx.note_change()


def resume(tx: SqlTransaction, glob: str | None, *, actor: str, now: float) -> list[str]:
    """End the pause of ``glob``, None: of all; return the globs of those that were in force."""
    tx.run(_END_OVERDUE_PAUSES, now=now)
    ended = [row[0] for row in tx.all(_END_PAUSES, glob=glob, actor=actor, now=now)]
    tx.note_change()
    return ended
