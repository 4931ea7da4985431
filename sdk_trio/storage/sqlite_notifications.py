"""Messages to site managers in the SQLite file of the inbox, committed by the inbox's writer."""

from collections.abc import Mapping, Sequence

from . import sqlite_notification_reader as reader
from . import sqlite_notification_writer as writer
from .admission import Terms
from .committer import Committer
from .notification_records import (
    DueNotifications,
    Ending,
    Enlisted,
    Lookout,
    NotificationId,
    NotificationRecord,
    NotificationState,
    Recovered,
)
from .query_runner import QueryRunner

#: How many messages one transaction of the retention removes.
PURGE_CHUNK = 500


class SqliteNotifications:
    """:class:`~.ports.NotificationStore` in SQLite; cancellation is as in the inbox."""

    def __init__(self, terms: Terms, committer: Committer, queries: QueryRunner) -> None:
        self._terms = terms
        self._committer = committer
        self._queries = queries

    async def enlist(
        self, channels: Mapping[str, bool], *, now: float, oldest: float, limit: int = 500
    ) -> Enlisted:
        """See :meth:`.ports.NotificationStore.enlist`."""
        chosen = dict(channels)
        return await self._committer.submit(lambda c: writer.enlist(c, chosen, now, oldest, limit))

    async def switch_off(self) -> None:
        """See :meth:`.ports.NotificationStore.switch_off`."""
        await self._committer.submit(writer.switch_off)

    async def look(self, channels: Mapping[str, bool], *, now: float) -> Lookout:
        """See :meth:`.ports.NotificationStore.look`."""
        return await self._queries.run(lambda c: reader.look(c, channels, now))

    async def take_due(self, channel: str, *, limit: int, now: float) -> DueNotifications:
        """See :meth:`.ports.NotificationStore.take_due`."""
        terms = self._terms
        return await self._committer.submit(
            lambda c: writer.take_due(c, terms, channel, limit, now)
        )

    async def start(self, id: NotificationId, *, now: float) -> bool:
        """See :meth:`.ports.NotificationStore.start`."""
        terms = self._terms
        return await self._committer.submit(lambda c: writer.start(c, terms, id, now))

    async def finish(self, id: NotificationId, ending: Ending, *, now: float) -> bool:
        """See :meth:`.ports.NotificationStore.finish`."""
        terms = self._terms
        return await self._committer.submit(lambda c: writer.finish(c, terms, id, ending, now))

    async def release(self) -> None:
        """See :meth:`.ports.NotificationStore.release`."""
        terms = self._terms
        await self._committer.submit(lambda c: writer.release(c, terms))

    async def recover(self, *, now: float) -> Recovered:
        """See :meth:`.ports.NotificationStore.recover`."""
        terms = self._terms
        return await self._committer.submit(lambda c: writer.recover(c, terms, now))

    async def renew(self, *, now: float) -> None:
        """See :meth:`.ports.NotificationStore.renew`."""
        terms = self._terms
        await self._committer.submit(lambda c: writer.renew(c, terms, now))

    async def retry(self, ids: Sequence[NotificationId]) -> Sequence[NotificationId]:
        """See :meth:`.ports.NotificationStore.retry`."""
        chosen = tuple(ids)
        return await self._committer.submit(lambda c: writer.retry(c, chosen))

    async def get(self, id: NotificationId) -> NotificationRecord | None:
        """See :meth:`.ports.NotificationStore.get`."""
        return await self._queries.run(lambda c: reader.get(c, id))

    async def find(
        self,
        *,
        state: NotificationState | None = None,
        channel: str | None = None,
        tenant_id: str | None = None,
        before: NotificationId | None = None,
        limit: int = 50,
    ) -> Sequence[NotificationRecord]:
        """See :meth:`.ports.NotificationStore.find`."""
        return await self._queries.run(
            lambda c: reader.find(
                c, state=state, channel=channel, tenant_id=tenant_id, before=before, limit=limit
            )
        )

    async def counts(self) -> dict[NotificationState, int]:
        """See :meth:`.ports.NotificationStore.counts`."""
        return await self._queries.run(reader.counts)

    async def purge(self, *, before: float) -> int:
        """See :meth:`.ports.NotificationStore.purge`. Cancelled, it stops between transactions."""
        removed = 0
        while True:
            chunk = await self._committer.submit(lambda c: writer.purge(c, before, PURGE_CHUNK))
            removed += chunk
            if chunk < PURGE_CHUNK:
                return removed
