"""Connects tenants and notifications: channels, dispatcher, and the word that something changed."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

import trio

from ..config import Settings
from ..notifications.channel_runner import Limits
from ..notifications.dispatcher import Dispatcher
from ..notifications.ports import Channel
from ..notifications.schedule import RetrySchedule
from ..storage.ports import Store
from ..tenants.feed import TransitionFeed
from ..tenants.tenancy import Tenancy
from .client_samples import Sample
from .notification_samples import sample_notifications

#: Opens the enabled channels, by their names, for the length of a block.
ChannelFactory = Callable[[Settings], AbstractAsyncContextManager[Mapping[str, Channel]]]


class Notifier:
    """Site-manager notifications beside the receiver; a :class:`~..webhooks.companion.Companion`.

    Args:
        settings: validated settings with notifications enabled.
        channels: opens the enabled channels.
        limits: of single channels; the others are limited by default.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        channels: ChannelFactory,
        limits: Mapping[str, Limits] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._channels = channels
        self._limits = limits
        self._clock = clock
        self._dispatcher: Dispatcher | None = None
        self._closed = False

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The metrics of notifications so far; none before the start."""
        return () if self._dispatcher is None else sample_notifications(self._dispatcher.counts)

    async def run(
        self,
        store: Store,
        tenancy: Tenancy,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Send until :meth:`close`, then finish what was begun; see :class:`Dispatcher`.

        Raises:
            StoreUnavailableError: at the start alone; later it is retried.
        """
        async with self._channels(self._settings) as channels:
            schedule = RetrySchedule(self._settings.multi_tenant.notifications.max_attempts)
            limits = self._limits or {name: Limits(schedule=schedule) for name in channels}
            dispatcher = Dispatcher(channels, store.notifications, limits=limits, clock=self._clock)
            # The data directory is locked, so whoever else has held a lease is dead.
            await dispatcher.recover()
            self._dispatcher = dispatcher
            if self._closed:
                dispatcher.close()
            with tenancy.service.subscribe() as feed:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_forward, feed, dispatcher)
                    task_status.started()
                    await dispatcher.run()
                    nursery.cancel_scope.cancel()

    def close(self) -> None:
        """Begin nothing new."""
        self._closed = True
        if self._dispatcher is not None:
            self._dispatcher.close()


async def _forward(feed: TransitionFeed, dispatcher: Dispatcher) -> None:
    while True:
        await feed.wait()
        dispatcher.wake()
