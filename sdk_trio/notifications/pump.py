"""The pump of notifications: each transition of the outbox, on each channel, to the site manager.

A transition is committed together with its outbox row. The pump creates a message for it on each
channel. Each channel's runner sends its own messages with its own workers, rate and retries, so a
failing or slow channel does not affect the others. Changes by other processes (``tenant suspend``,
``notify retry``) are found by polling the store.

An attempt has two marks in the store. A *claimed* message was certainly not sent, so any process
that finds it sends it. After the mark *sending*, a message whose receiver cannot detect repetitions
is not resent automatically, unless the channel reports that it was certainly not accepted.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import trio

from ..base.bell import Flag
from ..base.clock import wall
from ..base.logs import get_logger
from ..base.throttle import TokenBucket
from ..errors import StoreUnavailableError
from ..records.notifications import (
    NotificationId,
    NotificationRecord,
    NotificationState,
    Recovered,
    SendResult,
)
from .send import (
    Again,
    Ambiguous,
    Channel,
    Outcome,
    RetrySchedule,
    ending_of,
    interrupted,
    log_fault,
)

if TYPE_CHECKING:
    from ..storage.sql.notifications import NotificationStore

_log = get_logger("notifications")

#: Messages of one channel that are sent at the same time: enough for its rate, and few, because all
#: of them are ``unknown`` after a crash.
CONCURRENCY = 4

#: Time limit of one attempt, in seconds: a little above the longest timeout that can be configured
#: (300), for a channel without a timeout of its own.
ATTEMPT_SECONDS = 330.0

#: Pause after an error of the store, in seconds.
STORE_RETRY_SECONDS = 1.0

#: Time to record the end of an attempt after a cancellation, in seconds.
CLEANUP_SECONDS = 5.0

#: Polling interval of a runner that is not woken, in seconds; usually it is woken.
LOOK_SECONDS = 5.0

Count = Callable[[str, str], None]

#: Names of the results in log events and in ``sdk_notifications_total{channel,result}``.
RESULTS = {
    NotificationState.SENT: "sent",
    NotificationState.RETRYING: "retried",
    NotificationState.FAILED: "failed",
    NotificationState.SKIPPED: "skipped",
    NotificationState.UNKNOWN: "unknown",
}

_LEVELS = {"sent": _log.info, "skipped": _log.warning, "retried": _log.warning}

#: Polling interval for changes by other processes, in seconds; a poll reads a few pages.
POLL_SECONDS = 0.5

#: Interval between lease renewals, in seconds. Leases without an attempt are then given up.
RENEW_SECONDS = 5.0

#: An older transition, in seconds, is stale and its messages are skipped: after a week's downtime a
#: host must not send a week's messages.
NEWS_SECONDS = 86_400.0

#: Retention of finished messages, in seconds: as long as a deleted tenant is kept by default.
RETENTION_SECONDS = 90 * 86_400.0

#: Time between two passes of the retention, in seconds.
PURGE_INTERVAL_SECONDS = 3600.0


class Pace:
    """At most ``burst`` attempts at once and ``per_second`` of them in the long run.

    Args:
        per_second: above 0.
        burst: how many may follow each other without a pause; at least 1.
    """

    def __init__(self, *, per_second: float, burst: int) -> None:
        self._bucket = TokenBucket(per_second=per_second, burst=burst)
        self._paused_until = -inf

    def allowed(self, now: float) -> int:
        """Return how many attempts may start now."""
        return 0 if self.is_paused(now) else self._bucket.available(now)

    def take(self, count: int, now: float) -> None:
        """Count attempts that start now; at most as many as are allowed."""
        self._bucket.take(now, count)

    def pause(self, until: float) -> None:
        """Allow no attempt before that time, as the provider requested."""
        self._paused_until = max(self._paused_until, until)

    def is_paused(self, now: float) -> bool:
        """Return whether a provider's pause applies now."""

        return now < self._paused_until

    def wait(self, now: float) -> float:
        """Return the seconds until an attempt is allowed; 0: one is allowed now."""
        return max(self._bucket.wait(now), self._paused_until - now, 0.0)


@attrs.frozen(kw_only=True)
class ChannelLimits:
    """The limits of one channel: messages at once, and messages a second.

    ``longest_pause_seconds`` limits the pause of the whole channel; a longer pause requested by a
    provider applies only to its message.
    """

    concurrency: int = CONCURRENCY
    per_second: float = 10.0
    burst: int = 20
    longest_pause_seconds: float = 3600.0
    schedule: RetrySchedule = attrs.field(factory=RetrySchedule)


class ChannelRunner:
    """Claims the due messages of one channel, sends them, and records the results.

    Args:
        name: the channel's name, as in the store and in commands.
        channel: sends the messages.
        store: where the messages are.
        limits: the limits of this channel.
        clock: returns Unix seconds.
        count: called with the channel and the result of every attempt.
        claim_lock: held while messages are claimed, and while leases are renewed.
        fraction: returns a random number from 0 to 1.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        store: "NotificationStore",
        *,
        limits: ChannelLimits,
        clock: Callable[[], float],
        count: Count,
        claim_lock: trio.Lock,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        #: A reload replaces it; a message being sent continues with the old one.
        self.channel: Channel = channel
        self._store = store
        self._limits = limits
        self._clock = clock
        self._count = count
        self._fraction = fraction
        #: The messages whose leases this process holds: they are being sent.
        self.held: set[NotificationId] = set()
        # Leases are taken from the store and compared with it one at a time.
        self._claim_lock = claim_lock
        self._closed = False
        self._wanted = Flag()

    def wake(self) -> None:
        """Poll again: there may be something to send."""
        self._wanted.set()

    def close(self) -> None:
        """Claim nothing more; :meth:`run` returns when the attempts in progress have ended."""
        self._closed = True
        self._wanted.set()

    async def run(self) -> None:
        """Send until :meth:`close`; then finish the attempts in progress.

        On cancellation, an attempt that was sending is recorded as interrupted, within
        ``CLEANUP_SECONDS``; one that was only claimed is given back.
        """
        pace = Pace(per_second=self._limits.per_second, burst=self._limits.burst)
        async with trio.open_nursery() as attempts:
            while not self._closed:
                now = trio.current_time()
                # Claim only as many as can be sent at once: after a crash, claimed messages wait
                # until their lease expires.
                free = min(self._limits.concurrency - len(self.held), pace.allowed(now))
                pause = LOOK_SECONDS if free else max(pace.wait(now), 0.001)
                if free:
                    pause = await self._claim(free, pace, attempts)
                elif len(self.held) == self._limits.concurrency:
                    pause = LOOK_SECONDS
                with trio.move_on_after(pause):
                    await self._wanted.wait()

    async def _claim(self, free: int, pace: Pace, attempts: trio.Nursery) -> float:
        """Start up to ``free`` attempts; return the seconds until there may be more."""
        try:
            async with self._claim_lock:
                due = await self._store.claim_due(self.name, limit=free, now=self._clock())
                claimed = [record for record in due.records if record.id not in self.held]
                self.held.update(record.id for record in claimed)
        except StoreUnavailableError as error:
            _log.store_unavailable(error, retry_in=STORE_RETRY_SECONDS)
            return STORE_RETRY_SECONDS
        for record in due.lost:
            lost = SendResult(NotificationState.UNKNOWN, record.reason)
            self._report(record, lost, attempt=record.attempts)
        pace.take(len(claimed), trio.current_time())
        for record in claimed:
            attempts.start_soon(self._deliver, record, pace)
        if due.more or (due.records and len(due.records) == free):
            self._wanted.set()
        if due.next_due_at is None:
            return LOOK_SECONDS
        return min(LOOK_SECONDS, max(0.001, due.next_due_at - self._clock()))

    # -- one attempt -------------------------------------------------------------------------

    async def _deliver(self, record: NotificationRecord, pace: Pace) -> None:
        try:
            if await self._begin(record):
                await self._send(record, pace)
        finally:
            self.held.discard(record.id)
            self._wanted.set()

    async def _begin(self, record: NotificationRecord) -> bool:
        """Write the mark ``sending``; return False if the message must not be sent."""
        try:
            while not self._closed:
                try:
                    return await self._store.start(record.id, now=self._clock())
                except StoreUnavailableError as error:
                    _log.store_unavailable(error, id=str(record.id), retry_in=STORE_RETRY_SECONDS)
                    await trio.sleep(STORE_RETRY_SECONDS)
        except trio.Cancelled:
            # The mark may have been written although nothing was sent. If it is undone, the message
            # is sent later; otherwise it would become ``unknown``.
            with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                await self._record(record, SendResult(NotificationState.PENDING))
            raise
        return False

    async def _send(self, record: NotificationRecord, pace: Pace) -> None:
        ending: SendResult | None = None
        try:
            outcome = await self._attempt(record)
            if isinstance(outcome, Again) and outcome.after_seconds is not None:
                self._pause(pace, outcome.after_seconds)
            ending = ending_of(
                outcome,
                attempts=record.attempts + 1,
                repeatable=record.repeatable,
                schedule=self._limits.schedule,
                now=self._clock(),
                fraction=self._fraction(),
            )
            await self._record(record, ending)
        except BaseException:  # Cancelled, or a group of them from a nursery of the channel
            with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                await self._record(record, ending or self._interrupted(record))
            raise

    def _pause(self, pace: Pace, asked: float) -> None:
        """Pause the channel for the time requested by the provider, within the channel's limit.

        One answer, right or wrong, must not stop all messages for a day. The message that was
        answered waits for the whole time.
        """
        now = trio.current_time()
        seconds = min(asked, self._limits.longest_pause_seconds)
        if not pace.is_paused(now):
            _log.warning(
                "notification.channel_paused",
                channel=self.name,
                seconds=round(seconds, 1),
                asked=round(asked, 1),
            )
        pace.pause(now + seconds)

    async def _attempt(self, record: NotificationRecord) -> Outcome:
        # Each channel has its own timeout. This one is for a channel without a timeout: its
        # messages would block their workers forever.
        with trio.move_on_after(ATTEMPT_SECONDS):
            try:
                return await self.channel.send(record.outbox)
            except Exception as error:
                # A bug of ours during the sending: the message may have been sent or not.
                log_fault("notification.crashed", error, id=str(record.id))
                return Ambiguous(f"the channel failed: {type(error).__name__}")
        return Ambiguous(f"there was no answer within {ATTEMPT_SECONDS:g} s")

    def _interrupted(self, record: NotificationRecord) -> SendResult:
        return interrupted(
            repeatable=record.repeatable,
            reason="interrupted by a shutdown: it is unknown whether it arrived",
            now=self._clock(),
        )

    async def _record(self, record: NotificationRecord, ending: SendResult) -> None:
        """Record the end of an attempt, and try again until the store accepts it."""
        while True:
            # Shielded, because a cancelled write may have been committed: only its result shows.
            with trio.move_on_after(CLEANUP_SECONDS, shield=True):
                try:
                    if await self._store.finish(record.id, ending, now=self._clock()):
                        self._report(record, ending, attempt=record.attempts + 1)
                    elif ending.state in RESULTS:
                        # Another owner has the message and will report it. Only this log line shows
                        # that it was also sent here.
                        _log.warning(
                            "notification.not_recorded",
                            id=str(record.id),
                            result=RESULTS[ending.state],
                            provider_id=ending.provider_id,
                        )
                except StoreUnavailableError as error:
                    _log.store_unavailable(error, id=str(record.id), retry_in=STORE_RETRY_SECONDS)
                else:
                    return
            await trio.sleep(STORE_RETRY_SECONDS)

    def _report(self, record: NotificationRecord, ending: SendResult, *, attempt: int) -> None:
        result = RESULTS.get(ending.state)
        if result is None:
            return
        self._count(self.name, result)
        log_result(record, result, attempt=attempt, ending=ending, now=self._clock())


def log_result(
    record: NotificationRecord, result: str, *, attempt: int, ending: SendResult, now: float
) -> None:
    """Log the result of a message, without its address and its text."""
    log = _LEVELS.get(result, _log.error)
    due = ending.next_attempt_at
    later = {} if due is None else {"retry_in": round(max(0.0, due - now), 1)}
    log(
        f"notification.{result}",
        id=str(record.id),
        delivery_id=record.outbox.delivery_id,
        tenant=record.outbox.tenant_identifier,
        transition=str(record.outbox.transition),
        attempt=attempt,
        reason=ending.reason,
        provider_id=ending.provider_id,
        **later,
    )


class NotificationPump:
    """Sends the messages of all channels until closed.

    Args:
        channels: by their name in the store and in commands (``email``).
        store: where the messages are stored.
        limits: limits of single channels; the others have the defaults of :class:`ChannelLimits`.
        changed: set when there may be a new transition; None: the store is polled every
            :data:`POLL_SECONDS` only.
        clock: returns Unix seconds.
        fraction: returns a random number from 0 to 1.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        store: "NotificationStore",
        *,
        limits: Mapping[str, ChannelLimits] | None = None,
        changed: Flag | None = None,
        clock: Callable[[], float] = wall,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._clock = clock
        self._counts: Counter[tuple[str, str]] = Counter()
        self._claim_lock = trio.Lock()
        self._repeatable = {name: channel.repeatable for name, channel in channels.items()}
        self._runners = {
            name: ChannelRunner(
                name,
                channel,
                store,
                limits=(limits or {}).get(name, ChannelLimits()),
                clock=clock,
                count=self._count,
                claim_lock=self._claim_lock,
                fraction=fraction,
            )
            for name, channel in channels.items()
        }
        self._changed = Flag() if changed is None else changed
        self._closing = trio.Event()
        #: Set when :meth:`run` has finished all attempts.
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
        """Poll for new transitions now instead of half a second later."""
        self._changed.set()

    def replace(self, channels: Mapping[str, Channel]) -> None:
        """Send through these channels from the next message on; unknown names are ignored."""
        for name, runner in self._runners.items():
            runner.channel = channels.get(name, runner.channel)

    def close(self) -> None:
        """Start no more attempts; :meth:`run` returns when those in progress have ended."""
        self._closing.set()
        for runner in self._runners.values():
            runner.close()

    async def recover(self) -> None:
        """Recover the messages of earlier processes; the caller knows that none of them still runs.

        A message that one of them was sending becomes ``unknown`` if it cannot be repeated.

        Raises:
            StoreUnavailableError: the store is unavailable.
        """
        now = self._clock()
        recovered = await self._store.recover(now=now)
        self._report_lost(recovered, now)
        if recovered.resumed:
            _log.info("notification.recovered", messages=recovered.resumed)

    def _report_lost(self, recovered: Recovered, now: float) -> None:
        """Report messages for which it is unknown whether they were sent."""
        for record in recovered.lost:
            self._count(record.id.channel, RESULTS[NotificationState.UNKNOWN])
            ending = SendResult(NotificationState.UNKNOWN, record.reason)
            log_result(record, "unknown", attempt=record.attempts, ending=ending, now=now)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send until :meth:`close`, then finish the attempts in progress.

        If it is cancelled, an attempt that was being sent is recorded as ``unknown`` (a repeatable
        one is due again), and one that was only claimed is given back, within a few seconds.

        Raises:
            StoreUnavailableError: before it has started; later it is tried again.
        """
        try:
            # Before ``started``: the first poll sets the position, before which no transition is
            # announced, and skips messages of a disabled channel.
            await self._poll(first=True)
            async with trio.open_nursery() as background:
                background.start_soon(self._watch)
                background.start_soon(self._every, RENEW_SECONDS, self._renew)
                background.start_soon(self._every, PURGE_INTERVAL_SECONDS, self._purge)
                task_status.started()
                # The runners have their own nursery: on close they finish their attempts, while the
                # background task still renews leases.
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
        """Create messages for new transitions and wake the runners, now and after each change."""
        while True:
            pause = POLL_SECONDS
            try:
                if await self._poll():
                    continue
            except StoreUnavailableError as error:
                pause = STORE_RETRY_SECONDS
                _log.store_unavailable(error, retry_in=pause)
            with trio.move_on_after(pause):
                await self._changed.wait()

    async def _poll(self, *, first: bool = False) -> bool:
        """Poll once; return True if more transitions need messages."""
        now = self._clock()
        seen = await self._store.poll(self._repeatable, now=now)
        for name in seen.due:
            self._runners[name].wake()
        # A poll reads a few pages twice a second; it writes only if there is something new.
        if not (first or seen.new_transitions):
            return False
        done = await self._store.create_messages(
            self._repeatable, now=now, oldest=now - NEWS_SECONDS
        )
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
        now = self._clock()
        async with self._claim_lock:
            held = [id for runner in self._runners.values() for id in runner.held]
            given_up = await self._store.renew(held, now=now)
        self._report_lost(given_up, now)
        if given_up.resumed:
            for runner in self._runners.values():
                runner.wake()

    async def _purge(self) -> None:
        removed = await self._store.purge(before=self._clock() - RETENTION_SECONDS)
        if removed:
            _log.info("notification.purged", messages=removed)

    async def _release(self) -> None:
        try:
            await self._store.release()
        except StoreUnavailableError as error:
            # The next start recovers the messages, as our leases end with this process.
            _log.store_unavailable(error)
