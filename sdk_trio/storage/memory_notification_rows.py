"""The rows of the messages to site managers in memory. Pure."""

import attrs

from .notification_records import OPEN, NotificationId, NotificationRecord


@attrs.define(eq=False)
class NotificationRow:
    """One message, and who holds its lease until when."""

    record: NotificationRecord
    owner: str | None = None
    until: float = 0.0


@attrs.define(eq=False)
class NotificationRows:
    """The messages of one store, and the last transition that had its turn.

    ``open`` are those of ``by_id`` that are still sent by themselves, so that the look for work,
    twice a second, reads these few and not the finished ones of 90 days. ``silent``: nobody is
    told until the next look.
    """

    by_id: dict[NotificationId, NotificationRow] = attrs.Factory(dict)
    open: dict[NotificationId, NotificationRow] = attrs.Factory(dict)
    position: int | None = None
    silent: bool = False

    def keep(self, row: NotificationRow, record: NotificationRecord) -> None:
        """Store ``record`` in ``row``, which may be new."""
        row.record = record
        self.by_id[record.id] = row
        if record.state in OPEN:
            self.open[record.id] = row
        else:
            self.open.pop(record.id, None)

    def forget_tenant(self, tenant_id: str) -> None:
        """Remove the messages about one tenant."""
        for id, row in list(self.by_id.items()):
            if row.record.outbox.tenant_id == tenant_id:
                del self.by_id[id]
                self.open.pop(id, None)
