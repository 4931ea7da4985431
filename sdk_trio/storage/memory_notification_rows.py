"""The rows of the messages to site managers in memory. Pure."""

import attrs

from .notification_records import NotificationId, NotificationRecord


@attrs.define(eq=False)
class NotificationRow:
    """One message, and who holds its lease until when."""

    record: NotificationRecord
    owner: str | None = None
    until: float = 0.0


@attrs.define(eq=False)
class NotificationRows:
    """The messages of one store, and the last transition that had its turn."""

    by_id: dict[NotificationId, NotificationRow] = attrs.Factory(dict)
    position: int | None = None

    def forget_tenant(self, tenant_id: str) -> None:
        """Remove the messages about one tenant."""
        self.by_id = {
            id: row for id, row in self.by_id.items() if row.record.outbox.tenant_id != tenant_id
        }
