"""Tells site managers of every transition, on every channel, from the outbox (contracts 6).

A transition is committed together with its outbox row. Here it gets a message on each channel,
and each channel's runner sends its own: a channel that is down, slow or hangs changes nothing for
the others. What other processes do (``tenant suspend``, ``notify retry``) is found by looking.
"""

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

import trio

from ..base.logs import get_logger
from ..errors import StoreUnavailableError
from ..storage.notification_records import Ending, NotificationState
from ..storage.ports import NotificationStore
from .channel_runner import (
    CLEANUP_SECONDS,
    RESULTS,
    STORE_RETRY_SECONDS,
    ChannelRunner,
    Limits,
    log_result,
)
from .ports import Channel

_log = get_logger("notifications")

#: How often changes of other processes are looked for, in seconds: a query that reads a few pages.
POLL_SECONDS = 0.5

#: How often leases are renewed, in seconds; storage.LEASE_SECONDS allows for two missed renewals.
RENEW_SECONDS = 20.0

#: A transition that nobody could be told of for so long, in seconds, is no news any more: its
#: messages are skipped, so that a host that comes back after a week does not send a week's.
NEWS_SECONDS = 86_400.0

#: How long a finished message is kept, in seconds: as long as a deleted tenant is by default.
RETENTION_SECONDS = 90 * 86_400.0

#: How often the retention is applied, in seconds.
PURGE_INTERVAL_SECONDS = 3600.0


class Dispatcher:
    """Sends the messages of all channels until told to stop.

    Args:
        channels: by the name that the store and people know them by (``email``).
        store: where the messages are kept.
        limits: of single channels; the others have the defaults of :class:`Limits`.
        clock: returns Unix seconds.
        fraction: returns a random number from 0 to 1.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        store: NotificationStore,
        *,
        limits: Mapping[str, Limits] | None = None,
        clock: Callable[[], float] = time.time,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._clock = clock
        self._counts: Counter[tuple[str, str]] = Counter()
        self._repeatable = {name: channel.repeatable for name, channel in channels.items()}
        self._runners = {
            name: ChannelRunner(
                name,
                channel,
                store,
                limits=(limits or {}).get(name, Limits()),
                clock=clock,
                count=self._count,
                fraction=fraction,
            )
            for name, channel in channels.items()
        }
        self._wanted = trio.Event()
        self._closing = trio.Event()
        #: Set when :meth:`run` has finished what was begun.
        self.ended: trio.Event = trio.Event()

    @property
    def counts(self) -> Mapping[tuple[str, str], int]:
        """Attempts by channel and result (``sdk_notifications_total``); a live view.

        Results are ``sent``, ``retried``, ``failed``, ``skipped``, ``unknown``.
        """
        return MappingProxyType(self._counts)

    def _count(self, channel: str, result: str, number: int = 1) -> None:
        self._counts[channel, result] += number

    def wake(self) -> None:
        """Look for new transitions now instead of half a second later."""
        self._wanted.set()

    def close(self) -> None:
        """Begin nothing more; :meth:`run` returns when what was begun is finished."""
        self._closing.set()
        for runner in self._runners.values():
            runner.close()

    async def recover(self) -> None:
        """Take over what earlier processes left: for who knows that there is no other one.

        What they were sending becomes ``unknown`` where it cannot be repeated.

        Raises:
            StoreUnavailableError: the store cannot do it at present.
        """
        now = self._clock()
        recovered = await self._store.recover(now=now)
        for record in recovered.lost:
            self._count(record.id.channel, RESULTS[NotificationState.UNKNOWN])
            ending = Ending(NotificationState.UNKNOWN, record.reason)
            log_result(record, "unknown", attempt=record.attempts, ending=ending, now=now)
        if recovered.resumed:
            _log.info("notification.recovered", messages=recovered.resumed)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send until :meth:`close`, then finish what was begun.

        Cancelled, an attempt that was being sent is recorded as ``unknown`` (a repeatable one is
        due again), and what was only claimed is given back; that takes a few seconds at most.

        Raises:
            StoreUnavailableError: before it has started; later it is tried again.
        """
        try:
            # Before anybody is told that we run: the very first look draws the line before which
            # no transition is told of, and skips what waits on a channel that was switched off.
            await self._look(first=True)
            async with trio.open_nursery() as background:
                background.start_soon(self._watch)
                background.start_soon(self._every, RENEW_SECONDS, self._renew)
                background.start_soon(self._every, PURGE_INTERVAL_SECONDS, self._purge)
                task_status.started()
                async with trio.open_nursery() as runners:
                    for runner in self._runners.values():
                        runners.start_soon(runner.run)
                    await self._closing.wait()
                background.cancel_scope.cancel()
        finally:
            with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                await self._release()
            self.ended.set()

    async def _watch(self) -> None:
        """Enlist new transitions and wake the runners, at once and whenever something changes."""
        while True:
            self._wanted = trio.Event()
            pause = POLL_SECONDS
            try:
                if await self._look():
                    continue
            except StoreUnavailableError as error:
                pause = STORE_RETRY_SECONDS
                _log.store_unavailable(error, retry_in=pause)
            with trio.move_on_after(pause):
                await self._wanted.wait()

    async def _look(self, *, first: bool = False) -> bool:
        """Look once; True when there is more to enlist."""
        now = self._clock()
        seen = await self._store.look(self._repeatable, now=now)
        for name in seen.due:
            self._runners[name].wake()
        if not (first or seen.new_transitions):
            return False
        done = await self._store.enlist(self._repeatable, now=now, oldest=now - NEWS_SECONDS)
        if done.skipped:
            _log.warning("notification.left_out", messages=done.skipped)
        if done.pending:
            for runner in self._runners.values():
                runner.wake()
        return done.more

    async def _every(self, seconds: float, do: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await do()
            except StoreUnavailableError as error:
                _log.store_unavailable(error, retry_in=seconds)
            await trio.sleep(seconds)

    async def _renew(self) -> None:
        await self._store.renew(now=self._clock())

    async def _purge(self) -> None:
        removed = await self._store.purge(before=self._clock() - RETENTION_SECONDS)
        if removed:
            _log.info("notification.purged", messages=removed)

    async def _release(self) -> None:
        try:
            await self._store.release()
        except StoreUnavailableError as error:
            # Our leases end with this process, and the next start takes the messages over.
            _log.store_unavailable(error)
            await trio.lowlevel.checkpoint()
