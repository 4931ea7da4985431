"""Messages to site managers.

Functions of a transaction; :class:`NotificationStore` has them as methods. Only a ``retrying`` row
has ``next_attempt_at``.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from ...records.notifications import (
    CUT_OFF,
    POSITION,
    SILENT,
    SWITCHED_OFF,
    CreatedMessages,
    DueNotifications,
    NotificationId,
    NotificationRecord,
    NotificationState,
    OutboxPoll,
    Recovered,
    SendResult,
    too_old,
)
from ..admission import LeaseTerms
from .checkpoints import write_checkpoint
from .dialect import (
    Insert,
    SqlPart,
    SqlTransaction,
    committed,
    committed_by_owner,
    on_reader,
)
from .schema import sendable, types_of
from .tenants import TRANSITION_COLUMNS, settled, transition_of

#: Messages that one transaction of the retention removes.
PURGE_CHUNK = 500

_MESSAGE_COLUMNS = (
    "state",
    "repeatable",
    "attempts",
    "created_at",
    "next_attempt_at",
    "started_at",
    "finished_at",
    "provider_id",
    "reason",
)

_SELECT = f"""
SELECT notification.sequence, channel,
    {", ".join(f"notification.{name}" for name in _MESSAGE_COLUMNS)},
    {", ".join(f"outbox.{name}" for name in TRANSITION_COLUMNS)}
FROM notification JOIN outbox ON outbox.sequence = notification.sequence
"""

_IS_MESSAGE = "notification.sequence = :sequence AND notification.channel = :channel"

_IS_DUE = """
(lease_owner IS NULL AND (state = 'pending'
    OR (state = 'retrying' AND next_attempt_at <= clock()))
OR lease_owner IS NOT NULL AND lease_until <= clock())
"""

_HAS_DUE = f"""
SELECT EXISTS (SELECT 1 FROM notification
    WHERE {sendable()} AND channel = :channel AND {_IS_DUE})
"""


def position(tx: SqlTransaction, *, lock: bool = False) -> int | None:
    """Return the sequence of the last transition with messages; None: not set, or switched off."""
    query = "SELECT value FROM checkpoint WHERE name = :name"
    row = tx.one(f"{query} FOR UPDATE" if lock else query, name=POSITION)
    return None if row is None or row[0] == SILENT else int(row[0])


def _newest(tx: SqlTransaction) -> int:
    (newest,) = tx.one("SELECT max(sequence) FROM outbox") or (None,)
    return newest or 0


def poll(tx: SqlTransaction, channels: Mapping[str, bool], *, now: float) -> OutboxPoll:
    """Return whether ``create_messages`` or ``claim_due`` would find anything; only read."""
    reached = position(tx)
    due = [channel for channel in channels if tx.all(_HAS_DUE, channel=channel, now=now)[0][0]]
    return OutboxPoll(reached is None or _newest(tx) > reached, frozenset(due))


def get(tx: SqlTransaction, id: NotificationId) -> NotificationRecord | None:
    """Return one message with its transition."""
    row = tx.one(f"{_SELECT} WHERE {_IS_MESSAGE}", **_key(id))
    return None if row is None else _record_of(row)


def find(
    tx: SqlTransaction,
    *,
    state: NotificationState | None = None,
    channel: str | None = None,
    tenant_id: str | None = None,
    before: NotificationId | None = None,
    limit: int = 50,
) -> Sequence[NotificationRecord]:
    """List messages, the newest transition first; only older ones than ``before``."""
    conditions = {
        "state = :state": state,
        "channel = :channel": channel,
        "tenant_id = :tenant_id": tenant_id,
        "(notification.sequence, channel) < (:sequence, :last)": before,
    }
    chosen = [text for text, wanted in conditions.items() if wanted is not None]
    where = f"WHERE {' AND '.join(chosen)}" if chosen else ""
    rows = tx.all(
        f"{_SELECT} {where} ORDER BY notification.sequence DESC, channel DESC LIMIT :limit",
        state=state,
        channel=channel,
        tenant_id=tenant_id,
        sequence=before and before.sequence,
        last=before and before.channel,
        limit=limit,
    )
    return [_record_of(row) for row in rows]


def counts(tx: SqlTransaction) -> dict[NotificationState, int]:
    """Return how many messages are in each state; states without any are 0."""
    found = dict.fromkeys(NotificationState, 0)
    for state, number in tx.all("SELECT state, count(*) FROM notification GROUP BY state"):
        found[NotificationState(state)] = number
    return found


def _record_of(row: tuple[Any, ...]) -> NotificationRecord:
    end = 2 + len(_MESSAGE_COLUMNS)
    values = dict(zip(_MESSAGE_COLUMNS, row[2:end], strict=True))
    values["state"] = NotificationState(values["state"])
    values["repeatable"] = bool(values["repeatable"])
    return NotificationRecord(
        id=NotificationId(row[0], row[1]), outbox=transition_of(row[end:]), **values
    )


# -- new messages ------------------------------------------------------------------------------

_TRANSITIONS_TO_ENLIST = """
SELECT sequence, clock() - written_at, occurred_at FROM outbox
WHERE sequence > :after ORDER BY sequence LIMIT :limit
"""

_NEW_MESSAGE = (
    "sequence",
    "channel",
    "state",
    "repeatable",
    "attempts",
    "created_at",
    "finished_at",
    "reason",
)
_ADD_MESSAGES = Insert(
    "notification",
    types_of("notification", *_NEW_MESSAGE),
    "ON CONFLICT (sequence, channel) DO NOTHING",
)

_SWITCH_ON = "UPDATE checkpoint SET value = :newest WHERE name = :name AND value = :silent"

_SKIP_OTHERS = f"""
UPDATE notification SET state = 'skipped', reason = :reason, finished_at = :now,
    next_attempt_at = NULL
WHERE {sendable()} AND state IN ('pending', 'retrying') AND lease_owner IS NULL
    AND NOT (channel IN texts(:channels))
"""


def create_messages(
    tx: SqlTransaction,
    channels: Mapping[str, bool],
    *,
    now: float,
    oldest: float,
    limit: int = 500,
) -> CreatedMessages:
    """Give the next ``limit`` transitions a message on each of ``channels``.

    ``channels`` maps each channel to whether its messages are repeatable. The position is the last
    transition that has messages; the next ones follow it. The first call ever, and the first after
    :func:`switch_off`, only set the position to the newest transition, so older ones are not
    announced. An announced transition may have set it before (:func:`.tenants.change`). Transitions
    before ``oldest`` (Unix seconds) get messages that are ``skipped``. Messages that wait on any
    other channel become ``skipped``, too.
    """
    skipped = tx.run(_SKIP_OTHERS, reason=SWITCHED_OFF, now=now, channels=list(channels))
    # Locked, so that only one of two processes creates the messages, and the position only grows.
    reached = position(tx, lock=True)
    # First run: start at the newest transition; older ones are not announced (ADR 13).
    if reached is None:
        _set_first_position(tx)
        return CreatedMessages(0, skipped, more=False)
    found = tx.all(_TRANSITIONS_TO_ENLIST, after=reached, limit=limit, now=now)
    transitions = settled(tx, found, reached)
    rows: list[tuple[Any, ...]] = []
    pending = 0
    for sequence, _, occurred_at in transitions:
        reached = sequence
        is_recent = occurred_at >= oldest
        state, end = ("pending", None) if is_recent else ("skipped", now)
        reason = None if is_recent else too_old(now - occurred_at)
        for channel, repeatable in channels.items():
            rows.append((sequence, channel, state, repeatable, 0, now, end, reason))
            pending += is_recent
            skipped += not is_recent
    if rows:
        tx.insert(_ADD_MESSAGES, rows)
    if transitions:
        write_checkpoint(tx, POSITION, str(reached))
        tx.note_change()
    return CreatedMessages(pending, skipped, more=len(transitions) == limit)


def _set_first_position(tx: SqlTransaction) -> None:
    newest = str(_newest(tx))
    # If another process has set the position meanwhile, it is kept: transitions after it are
    # announced.
    write_checkpoint(tx, POSITION, newest, once=True)
    tx.run(_SWITCH_ON, name=POSITION, silent=SILENT, newest=newest)


def switch_off(tx: SqlTransaction) -> None:
    """Stop announcing; transitions before the next :func:`create_messages` are never announced.

    Waiting messages are unchanged.
    """
    write_checkpoint(tx, POSITION, SILENT)


# -- leases ------------------------------------------------------------------------------------

_FIND_DUE_MESSAGES = f"""
SELECT sequence FROM notification
WHERE {sendable()} AND channel = :channel AND lease_owner IS NULL
    AND (state = 'pending' OR (state = 'retrying' AND next_attempt_at <= clock()))
ORDER BY sequence LIMIT :limit FOR UPDATE SKIP LOCKED
"""

_NEXT_DUE = f"""
SELECT min(local(next_attempt_at)) FROM notification
WHERE {sendable()} AND channel = :channel AND state = 'retrying'
    AND lease_owner IS NULL AND next_attempt_at > clock()
"""

_EXPIRED_MESSAGES = "lease_owner IS NOT NULL AND lease_owner <> :owner AND lease_until <= clock()"

_MESSAGES_OF_OTHERS = """
lease_owner IS NOT NULL AND lease_owner <> :owner
    AND (NOT CAST(:shared_by_hosts AS boolean) OR lease_until <= clock())
"""

# A message that was being sent may have arrived. It is sent again only if its receiver can detect
# the repetition; otherwise people decide.
_FREE_MESSAGES = f"""
UPDATE notification SET lease_owner = NULL, lease_until = NULL, next_attempt_at = NULL,
    state = CASE WHEN state = 'sending' AND NOT repeatable THEN 'unknown' ELSE 'pending' END,
    finished_at = CASE WHEN state = 'sending' AND NOT repeatable THEN CAST(:now AS float8) END,
    reason = CASE WHEN state = 'sending' AND NOT repeatable THEN :reason ELSE reason END
WHERE (sequence, channel) IN (
    SELECT sequence, channel FROM notification WHERE {sendable()} AND {{which}}
    FOR UPDATE SKIP LOCKED)
RETURNING sequence, channel, state
"""

_LEASE_MESSAGE = f"""
UPDATE notification SET lease_owner = :owner, lease_until = clock() + :seconds,
    next_attempt_at = NULL
WHERE {_IS_MESSAGE}
"""

_RELEASE_MESSAGES = f"""
UPDATE notification SET lease_owner = NULL, lease_until = NULL, state = 'pending'
WHERE {sendable()} AND state IN ('pending', 'retrying') AND lease_owner = :owner
"""

# The key of a message in texts: its sequence and its channel.
_IS_HELD = "CAST(sequence AS text) || ' ' || channel IN texts(:held)"

_RENEW_MESSAGES = f"""
UPDATE notification SET lease_until = clock() + :seconds
WHERE {sendable()} AND lease_owner = :owner AND {_IS_HELD}
"""


def claim_due(
    tx: SqlTransaction, terms: LeaseTerms, channel: str, *, limit: int, now: float
) -> DueNotifications:
    """Lease up to ``limit`` messages of one channel without a lease, oldest first.

    ``pending`` messages are due, ``retrying`` ones whose time has come, and any whose lease (of
    another owner) has expired. If such a message was ``sending``, it is due if it is repeatable,
    and becomes ``unknown`` if not.
    """
    values: dict[str, Any] = {"channel": channel, "owner": terms.owner, "now": now}
    lost = _free(tx, f"channel = :channel AND {_EXPIRED_MESSAGES}", **values).lost
    found = [sequence for (sequence,) in tx.all(_FIND_DUE_MESSAGES, **values, limit=limit + 1)]
    records = []
    for sequence in found[:limit]:
        tx.run(_LEASE_MESSAGE, **values, sequence=sequence, seconds=terms.lease_seconds)
        records.append(_record(tx, NotificationId(sequence, channel)))
    (next_due_at,) = tx.one(_NEXT_DUE, **values) or (None,)
    return DueNotifications(records, lost, len(found) > limit, next_due_at)


def _free(tx: SqlTransaction, which: str, **values: Any) -> Recovered:
    rows = tx.all(_FREE_MESSAGES.format(which=which), **values, reason=CUT_OFF)
    lost = [
        _record(tx, NotificationId(sequence, channel))
        for sequence, channel, state in sorted(rows)
        if state == "unknown"
    ]
    if rows:
        tx.note_change()
    return Recovered(len(rows) - len(lost), lost)


def _record(tx: SqlTransaction, id: NotificationId) -> NotificationRecord:
    record = get(tx, id)
    if record is None:
        raise AssertionError("a message is removed together with its transition")
    return record


def release(tx: SqlTransaction, terms: LeaseTerms) -> None:
    """Give up all of our leases whose sending has not begun."""
    if tx.run(_RELEASE_MESSAGES, owner=terms.owner):
        tx.note_change()


def recover(tx: SqlTransaction, terms: LeaseTerms, *, now: float) -> Recovered:
    """Take away the leases of all other owners, known to be dead; in a shared store, expired ones.

    A message that was ``sending`` is due again if it is repeatable, else ``unknown``.
    """
    return _free(
        tx, _MESSAGES_OF_OTHERS, owner=terms.owner, shared_by_hosts=terms.shared_by_hosts, now=now
    )


_NOT_HELD = f"lease_owner = :owner AND NOT ({_IS_HELD})"


def renew(
    tx: SqlTransaction, terms: LeaseTerms, held: Collection[NotificationId], now: float
) -> Recovered:
    """Extend those of our leases that are ``held``, and give up all others, as :meth:`Inbox.renew`.

    A message that may have been sent is due again if it is repeatable, else ``unknown``.
    """
    names = [f"{id.sequence} {id.channel}" for id in held]
    tx.run(_RENEW_MESSAGES, owner=terms.owner, held=names, seconds=terms.lease_seconds, now=now)
    return _free(tx, _NOT_HELD, owner=terms.owner, held=names, now=now)


# -- attempts ----------------------------------------------------------------------------------

_START_SENDING = f"""
UPDATE notification SET state = 'sending', attempts = attempts + 1, started_at = :now,
    lease_until = clock() + :seconds, next_attempt_at = NULL
WHERE {_IS_MESSAGE} AND lease_owner = :owner AND state IN ('pending', 'retrying')
"""

_FINISH_SENDING = f"""
UPDATE notification SET state = :state, reason = :reason, provider_id = :provider_id,
    next_attempt_at = due(:next_attempt_at), finished_at = :finished_at,
    lease_owner = NULL, lease_until = NULL
WHERE {_IS_MESSAGE} AND lease_owner = :owner AND {sendable()}
"""

# The attempt was claimed and sent nothing, so it does not count.
_UNDO_SENDING = f"""
UPDATE notification SET attempts = attempts - CASE WHEN state = 'sending' THEN 1 ELSE 0 END,
    state = 'pending', next_attempt_at = NULL, lease_owner = NULL, lease_until = NULL
WHERE {_IS_MESSAGE} AND lease_owner = :owner AND {sendable()}
"""

_RETRY_MESSAGE = f"""
UPDATE notification SET state = 'pending', attempts = 0, started_at = NULL, finished_at = NULL,
    provider_id = NULL, reason = NULL
WHERE {_IS_MESSAGE} AND state IN ('failed', 'skipped', 'unknown')
"""

_PURGE_MESSAGES = """
DELETE FROM notification WHERE (sequence, channel) IN (
    SELECT sequence, channel FROM notification
    WHERE finished_at IS NOT NULL AND finished_at < :before ORDER BY finished_at LIMIT :limit)
"""


def _key(id: NotificationId) -> dict[str, object]:
    return {"sequence": id.sequence, "channel": id.channel}


def start(tx: SqlTransaction, terms: LeaseTerms, id: NotificationId, *, now: float) -> bool:
    """Mark a message as ``sending``, one more attempt; False: do not send it.

    True only if we hold its lease and it waits.
    """
    values = {"owner": terms.owner, "seconds": terms.lease_seconds, "now": now}
    return tx.run(_START_SENDING, **values, **_key(id)) == 1


def finish(
    tx: SqlTransaction, terms: LeaseTerms, id: NotificationId, ending: SendResult, *, now: float
) -> bool:
    """Record the end of an attempt and give up the lease.

    Returns False, and changes nothing, if we no longer hold the lease.
    """
    if ending.state is NotificationState.PENDING:
        changed = tx.run(_UNDO_SENDING, owner=terms.owner, **_key(id))
    else:
        changed = tx.run(
            _FINISH_SENDING,
            owner=terms.owner,
            now=now,
            state=ending.state,
            reason=ending.reason,
            provider_id=ending.provider_id,
            next_attempt_at=ending.next_attempt_at,
            finished_at=None if ending.state is NotificationState.RETRYING else now,
            **_key(id),
        )
    if changed:
        tx.note_change()
    return changed == 1


def retry(tx: SqlTransaction, ids: Sequence[NotificationId]) -> Sequence[NotificationId]:
    """Put ``failed``, ``skipped`` and ``unknown`` messages back to ``pending``, attempts at 0.

    Returns those that were put back.
    """
    changed = [id for id in ids if tx.run(_RETRY_MESSAGE, **_key(id))]
    if changed:
        tx.note_change()
    return changed


def purge(tx: SqlTransaction, before: float, limit: int) -> int:
    """Remove up to ``limit`` messages that were finished before that time."""
    return tx.run(_PURGE_MESSAGES, before=before, limit=limit)


class NotificationStore(SqlPart):
    """Messages to site managers: one record for each transition and channel.

    A lease has an owner and a deadline, and no token: the owner is that of the inbox. A leased
    message is claimed; after :meth:`start` it may have been sent. A message that may have been sent
    is sent again if it is repeatable, and is ``unknown`` otherwise, so an old claim guards nothing.
    """

    create_messages: Final = committed(create_messages)
    switch_off: Final = committed(switch_off)
    poll: Final = on_reader(poll)
    claim_due: Final = committed_by_owner(claim_due)
    start: Final = committed_by_owner(start)
    finish: Final = committed_by_owner(finish)
    release: Final = committed_by_owner(release)
    recover: Final = committed_by_owner(recover)
    get: Final = on_reader(get)
    find: Final = on_reader(find)
    counts: Final = on_reader(counts)

    async def renew(self, ids: Collection[NotificationId], *, now: float) -> Recovered:
        terms, held = self._terms, tuple(ids)
        return await self._commits.submit(lambda tx: renew(tx, terms, held, now))

    async def retry(self, ids: Sequence[NotificationId]) -> Sequence[NotificationId]:
        chosen = tuple(ids)
        return await self._commits.submit(lambda tx: retry(tx, chosen))

    async def purge(self, *, before: float) -> int:
        """Remove the messages that were finished before that time; return their number.

        A cancelled call stops between two of its transactions.
        """
        removed = 0
        while True:
            chunk = await self._commits.submit(lambda tx: purge(tx, before, PURGE_CHUNK))
            removed += chunk
            if chunk < PURGE_CHUNK:
                return removed
