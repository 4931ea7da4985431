"""Failovers: hosts notice by the timeline that another server answers, which may lack commits."""

import json

import attrs

from ...base.logs import get_logger
from .postgres_address import PostgresAddress
from .postgres_connection import StoreConnection

#: Name of the checkpoint that holds the :class:`Timeline`.
TIMELINE = "storage.timeline"

#: The hint after a failover with asynchronous replication.
LOST_HINT = (
    "replication was asynchronous, so acknowledged deliveries of the last moments may be missing: "
    "have the sender deliver them again (sdk-trio events reconcile)"
)


@attrs.frozen
class Timeline:
    """The timeline of the database as a host last saw it.

    ``waits``: commits wait for a standby. ``before`` is the timeline before the last change,
    ``since`` the Unix time at which that was noticed. ``complete``: commits waited for a standby at
    the last connection before that.
    """

    number: int
    waits: bool
    before: int | None = None
    since: float | None = None
    complete: bool = True

    @classmethod
    def read(cls, text: str | None) -> "Timeline | None":
        """Return what :meth:`text` has written; None for None."""
        return None if text is None else cls(**json.loads(text))

    def text(self) -> str:
        """Return it as text."""
        return json.dumps(attrs.asdict(self))


# The first eight digits of the name of a log file are its timeline.
_KNOWN_TIMELINE = """
SELECT ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int,
    current_setting('synchronous_standby_names') <> '',
    extract(epoch FROM clock_timestamp())::float8,
    (SELECT value FROM checkpoint WHERE name = %s)
"""

_KEEP_TIMELINE = """
INSERT INTO checkpoint (name, value) VALUES (%s, %s)
ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE checkpoint.value = %s
"""

_log = get_logger("storage")


def note_timeline(address: PostgresAddress, connection: StoreConnection) -> None:
    """Log a changed timeline since the last connection, and store it for ``doctor``.

    A promoted standby and a restored database have a new timeline. Without synchronous replication,
    they may lack the last acknowledged deliveries.

    Raises:
        psycopg.Error: the server failed.
    """
    with address.transaction(connection):
        row = connection.execute(_KNOWN_TIMELINE, (TIMELINE,)).fetchone()
        timeline, waits, now, text = row or (0, False, 0.0, None)
        known = Timeline.read(text)
        if known is not None and (known.number, known.waits) == (timeline, waits):
            return
        made = Timeline(timeline, waits)
        if known is not None and known.number != timeline:
            made = attrs.evolve(made, before=known.number, since=now, complete=known.waits)
        elif known is not None:
            made = attrs.evolve(known, waits=waits)
        # No acknowledged delivery depends on it, and a standby may be unavailable.
        connection.execute("SET LOCAL synchronous_commit TO off")
        kept = connection.execute(_KEEP_TIMELINE, (TIMELINE, made.text(), text))
    # If several hosts connect at once, the first one logs it.
    if made.before is not None and made.since == now and kept.rowcount:
        _log.warning(
            "store.failed_over",
            place=address.place,
            timeline=timeline,
            before=made.before,
            hint="replication was synchronous when the old primary was last dialled: a promoted "
            "standby lacks nothing that was acknowledged while it was; a restored backup lacks "
            "what came after it"
            if made.complete
            else LOST_HINT,
        )
