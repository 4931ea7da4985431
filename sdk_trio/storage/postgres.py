"""The inbox in PostgreSQL, which several processes and hosts may have open at the same time."""

import uuid
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import trio

from ..base.executor import run_in_thread
from ..records.deliveries import Purged
from .admission import LeaseTerms
from .commit import ANSWER_SECONDS, CLOSE_SECONDS, GroupCommit
from .effects import Effects, taken_over
from .effects_postgres import EffectTransactions
from .engines.postgres import PostgresEngine, PostgresReader
from .engines.postgres_address import PostgresAddress
from .engines.postgres_migration import migrate_postgres
from .history import History
from .inbox import SqlInbox
from .readers import ReaderPool
from .sql import days, deliveries, reads
from .sql.dialect import Dialect, SqlTransaction
from .sql.schema import LATER_POSTGRESQL, statements

T = TypeVar("T")

#: The checkpoint with the Unix time up to which done deliveries have lost their bodies, where ids
#: are remembered for longer.
_BODIES_DELETED = "storage.bodies_deleted"

#: The most queries at once, each on a connection of its own.
READERS = 4

# The rows of stores that ended without closing; what they have counted stays.
_LEFT_LONG_AGO = """
WITH gone AS (
    DELETE FROM node WHERE id <> '' AND seen_at < now() - interval '1 day' RETURNING changes, done
), total AS (SELECT sum(changes) AS changes, sum(done) AS done FROM gone)
UPDATE node SET changes = node.changes + total.changes, done = node.done + total.done
FROM total WHERE id = '' AND total.done IS NOT NULL
"""


class PostgresInbox(SqlInbox):
    """:class:`Inbox` in PostgreSQL; open it with :meth:`open`, end with :meth:`close`."""

    #: See :attr:`Inbox.in_order`: a transaction takes its sequences before it commits.
    in_order = False

    def __init__(self, address: PostgresAddress, terms: LeaseTerms, *, server_clock: bool) -> None:
        dialect = Dialect("postgresql", server_clock=server_clock)
        self._node = str(uuid.uuid4())
        engine = PostgresEngine(address, dialect, self._node)
        commits = GroupCommit(engine, name="sdk_trio-inbox", outage=address.outage)
        connect = partial(PostgresReader, address, dialect)
        readers = ReaderPool(connect, place=address.place, limit=READERS)
        super().__init__(terms, commits, readers)
        self._effects = EffectTransactions(address, engine, terms)
        self._history = History(address, dialect)
        self._seen: tuple[int, int] | None = None

    @classmethod
    async def open(
        cls,
        address: PostgresAddress,
        *,
        owner: str,
        lease_seconds: float,
        dedup_seconds: float,
        payload_seconds: float,
        server_clock: bool = True,
        shared: bool = True,
    ) -> "PostgresInbox":
        """Open the store at ``address``, creating or migrating its schema.

        Args:
            address: the database and the schema.
            owner: the name that holds the leases taken here; not empty, unique among living
                processes of all hosts.
            lease_seconds: duration of a lease without renewal; above 0.
            dedup_seconds: time that a finished id is remembered; 0 or more.
            payload_seconds: time that bodies are kept; 0 or more.
            server_clock: tell leases by the database's clock; False: by that of each call.
            shared: others may be alive, so ``recover`` takes only expired leases away.

        Raises:
            StoreVersionError: the schema is of a newer version or of another program.
            StoreUnavailableError: no server answers, or it refuses.

        If it is cancelled, nothing stays open.
        """
        terms = LeaseTerms(
            owner=owner,
            lease_seconds=lease_seconds,
            dedup_seconds=dedup_seconds,
            payload_seconds=payload_seconds,
            shared=shared,
        )
        inbox = cls(address, terms, server_clock=server_clock)
        try:
            await run_in_thread(migrate, address)
            await inbox.changed_elsewhere()
        except BaseException:
            with trio.move_on_after(CLOSE_SECONDS, shield=True):
                await inbox.close()
            raise
        return inbox

    async def clock_offset(self) -> float | None:
        """See :meth:`Inbox.clock_offset`."""
        return await self._readers.run(reads.clock_offset, seconds=ANSWER_SECONDS)

    def writing_process(self) -> int | None:
        """See :meth:`Inbox.writing_process`: the server ends locks of clients that are gone."""
        return None

    async def conclude(self, key: str, effects: Effects[T], *, attempt: int, now: float) -> T:
        """See :meth:`Inbox.conclude`."""
        lease = self._leases.get(key)
        if lease is None:
            await trio.lowlevel.checkpoint()
            raise taken_over(key)
        if (begun := self._begun.get(key)) is not None:
            # The start may be on its way still, and the run counts as ours only after it.
            start = deliveries.RunStart(lease.sequence, lease.token, begun[1], brought=True)
            await self._commits.gather(self._starting, key, start)
            self._begun.pop(key, None)
        value = await self._effects.conclude(key, lease, effects, attempt=attempt, now=now)
        if self._leases.get(key) is lease:
            del self._leases[key]
        return value

    async def changed_elsewhere(self) -> bool:
        """See :meth:`Inbox.changed_elsewhere`."""
        terms = self._terms
        seen, expired = await self._readers.run(
            lambda tx: reads.changes_of_others(
                tx, node=self._node, owner=terms.owner, shared=terms.shared
            ),
            # Whoever asks fetches due events next, which another connection may well do.
            seconds=ANSWER_SECONDS,
        )
        before, self._seen = self._seen, seen
        return expired or (before is not None and seen != before)

    async def other_tables(self) -> Sequence[str]:
        """See :meth:`Inbox.other_tables`; the application's tables are in schemas of its own."""
        await trio.lowlevel.checkpoint()
        return []

    async def purge(self, *, now: float) -> Purged:
        """See :meth:`Inbox.purge`.

        A delivery that is done goes together with its day, so its row and its body may stay for a
        day longer than on SQLite. Only what closed days have left, and what an open day has for
        too long, goes one by one.
        """
        terms = self._terms
        await self._commits.submit(_forget_nodes)
        old_body = now - terms.payload_seconds
        forgotten = now - max(terms.payload_seconds, terms.dedup_seconds)
        found = await run_in_thread(self._history.keep, now, forgotten)
        bodies = await self._delete_bodies(old_body) if forgotten < old_body else None
        finished = found.dropped
        for day in found.by_rows:
            old = partial(days.find_old, days=[day], since=0.0)
            finished += await self._delete(old, deliveries.delete_done, forgotten)
        parked = await self._delete(reads.find_old_parked, deliveries.delete_parked, old_body)
        return Purged(finished if bodies is None else bodies, finished, parked)

    async def _delete_bodies(self, before: float) -> int:
        """Delete the bodies of what was done since the last pass looked; return how many."""
        looked = float(await self.read_checkpoint(_BODIES_DELETED) or 0.0)
        every = await self._read(days.read)
        old = partial(days.find_old, days=every, since=looked - days.SLACK_SECONDS)
        deleted = await self._delete(old, deliveries.delete_bodies, before)
        await self.write_checkpoint(_BODIES_DELETED, str(max(before, looked)))
        return deleted

    async def wipe(self) -> bool:
        """See :meth:`Inbox.wipe`: pages and log files are the server's, and no client's."""
        await trio.lowlevel.checkpoint()
        return True

    async def close(self) -> None:
        """See :meth:`Inbox.close`."""
        self._effects.close()
        await super().close()


def _forget_nodes(tx: SqlTransaction) -> None:
    tx.run(_LEFT_LONG_AGO)


def migrate(address: PostgresAddress) -> None:
    """Create the tables, or bring them up to date; blocks.

    Raises:
        StoreVersionError: the schema is of a newer version or of another program.
        StoreUnavailableError: no server answers, or it refuses.
    """
    connection = address.connect()
    try:
        migrate_postgres(
            address, connection, (statements(Dialect("postgresql")), *LATER_POSTGRESQL)
        )
    finally:
        connection.close()
