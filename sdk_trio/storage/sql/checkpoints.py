"""Checkpoints: values that parts of the runtime keep across restarts, by name.

Elsewhere the word has two more meanings: a checkpoint of Trio, where a task may be cancelled, and
one of SQLite, which copies its log into the database.
"""

from .dialect import SqlTransaction


def read_checkpoint(tx: SqlTransaction, name: str) -> str | None:
    """Return the value under ``name``, or None."""
    row = tx.one("SELECT value FROM checkpoint WHERE name = :name", name=name)
    return None if row is None else str(row[0])


_SET_CHECKPOINT = """
INSERT INTO checkpoint (name, value) VALUES (:name, :value)
ON CONFLICT (name) DO UPDATE SET value = excluded.value
"""

_SET_FIRST_CHECKPOINT = """
INSERT INTO checkpoint (name, value) VALUES (:name, :value) ON CONFLICT (name) DO NOTHING
"""

_FORGET_CHECKPOINT = "DELETE FROM checkpoint WHERE name = :name"

# Not LIKE: an id may have characters that it gives a meaning to.
_ERASE_CHECKPOINTS = """
DELETE FROM checkpoint WHERE substr(name, length(name) - length(:tenant_id)) = '.' || :tenant_id
"""


def write_checkpoint(
    tx: SqlTransaction, name: str, value: str | None, *, once: bool = False
) -> None:
    """Store ``value`` under ``name``, with ``once`` only if there is none; None removes it."""
    if value is None:
        tx.run(_FORGET_CHECKPOINT, name=name)
    else:
        tx.run(_SET_FIRST_CHECKPOINT if once else _SET_CHECKPOINT, name=name, value=value)


def erase_checkpoints(tx: SqlTransaction, tenant_id: str) -> None:
    """Delete the tenant's checkpoints, whose names end in a dot and its id."""
    tx.run(_ERASE_CHECKPOINTS, tenant_id=tenant_id)
