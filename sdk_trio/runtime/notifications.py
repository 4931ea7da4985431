"""Notifications in the runtime: construction of the channels, their pump, and its metrics.

The pump reads committed transitions from the outbox. The feed of tenants only wakes it, so a lost
wake-up delays a message but never loses one.
"""

import os
from collections.abc import Callable, Iterable, Mapping

import trio

from ..base.clock import wall
from ..base.telemetry import Sample
from ..config import Settings
from ..config.fields import KeyDerivation
from ..config.options.notifications import NotificationsOptions, enabled_channels
from ..net.poster import HttpPoster
from ..notifications.channels.email import EmailSender
from ..notifications.channels.sms import SmsSender
from ..notifications.channels.webhook import WebhookSender
from ..notifications.pump import RESULTS, ChannelLimits, NotificationPump
from ..notifications.send import Channel, Poster, ReadVariable, RetrySchedule
from ..storage.ports import Store
from ..tenants.tenancy import TenantRuntime
from ..webhooks.signed_request import sign_body

#: Returns channels by name, such as ``email``. Channels that the settings do not enable are not
#: used.
ChannelFactory = Callable[[Settings], Mapping[str, Channel]]


def sample_notifications(
    counts: Mapping[tuple[str, str], int], channels: Iterable[str]
) -> tuple[Sample, ...]:
    """Return ``sdk_notifications_total{channel,result}`` of attempts by channel and result.

    Results that have not occurred are reported as 0. A counter that first appears with the value 1
    shows no increase, so the first failed message would raise no alert. Old messages of a channel
    that is now disabled are counted as well.
    """
    known = {(channel, result): 0 for channel in channels for result in RESULTS.values()}
    return tuple(
        Sample("sdk_notifications_total", (("channel", channel), ("result", result)), count)
        for (channel, result), count in sorted((known | dict(counts)).items())
    )


def make_channels(
    options: NotificationsOptions,
    *,
    poster: Poster | None = None,
    read_variable: ReadVariable = os.environ.get,
    clock: Callable[[], float] = wall,
) -> dict[str, Channel]:
    """Return every channel by name, in the order of ``records.channels.CHANNELS``.

    They include channels that are not enabled, which skip every message with that reason. Channels
    hold no open resources, so they need not be closed.

    Args:
        options: ``Sdk:MultiTenant:Notifications``.
        poster: sends requests; None: the project's own transport.
        read_variable: reads an environment variable, at each message.
        clock: returns Unix seconds.
    """
    poster = poster or HttpPoster(clock=clock)
    return {
        "email": EmailSender(options, poster, read_variable=read_variable, clock=clock),
        "sms": SmsSender(options, poster, read_variable=read_variable, clock=clock),
        "webhook": WebhookSender(
            options, poster, sign=_sign, read_variable=read_variable, clock=clock
        ),
    }


def _sign(body: bytes, *, secret: str, webhook_id: str, timestamp: int) -> Mapping[str, str]:
    # Auto: the decoded key if the secret has one, else its text. Receivers of both kinds exist.
    return sign_body(
        body,
        secret=secret,
        webhook_id=webhook_id,
        timestamp=timestamp,
        derivation=KeyDerivation.AUTO,
    ).headers


class Notifier:
    """Site-manager notifications of a runtime; a :class:`BackgroundTask`.

    Args:
        settings: validated settings with notifications enabled.
        channels: makes the channels; None: those of the settings.
        limits: limits of the channels by name; None: the defaults, with the settings' schedule.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        channels: ChannelFactory | None = None,
        limits: Mapping[str, ChannelLimits] | None = None,
        clock: Callable[[], float] = wall,
    ) -> None:
        self._settings = settings
        self._channels = channels
        self._limits = limits
        self._clock = clock
        self._pump: NotificationPump | None = None
        self._names: tuple[str, ...] = ()
        self._closed = False

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The metrics of notifications so far; none before the start."""
        if self._pump is None:
            return ()
        return sample_notifications(self._pump.counts, self._names)

    async def run(  # noqa: ASYNC128 - the pump calls it
        self,
        store: Store,
        tenancy: TenantRuntime,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Send until :meth:`close`, then finish the attempts in progress; see
        :class:`NotificationPump`.

        Raises:
            StoreUnavailableError: only at the start; later it is retried.
        """
        options = self._settings.multi_tenant.notifications
        channels = self._make_channels(self._settings)
        self._names = tuple(channels)
        schedule = RetrySchedule(
            options.max_attempts, options.retry_base_seconds, options.retry_cap_seconds
        )
        limits = self._limits or {name: ChannelLimits(schedule=schedule) for name in channels}
        with tenancy.service.subscribe() as feed:
            pump = NotificationPump(
                channels,
                store.notifications,
                limits=limits,
                changed=feed.changed,
                clock=self._clock,
            )
            # The data directory is locked, so every other lease holder is dead.
            await pump.recover()
            self._pump = pump
            if self._closed:
                pump.close()
            await pump.run(task_status=task_status)

    def prepare_reload(self, settings: Settings) -> Callable[[], None]:
        """Return a function that puts ``settings`` into force.

        A message that is being sent continues with the old settings.
        """
        made = self._make_channels(settings)

        def commit() -> None:
            self._settings = settings
            if self._pump is not None:
                self._pump.replace(made)

        return commit

    def _make_channels(self, settings: Settings) -> Mapping[str, Channel]:
        options = settings.multi_tenant.notifications
        if self._channels is None:
            made: Mapping[str, Channel] = make_channels(options, clock=self._clock)
        else:
            made = self._channels(settings)
        # In the order of the settings. The host's factory may make fewer channels than are
        # enabled.
        return {name: made[name] for name in enabled_channels(options) if name in made}

    def close(self) -> None:
        """Start no new attempt."""
        self._closed = True
        if self._pump is not None:
            self._pump.close()
