"""The watch: observes the facts, opens and closes alerts, and sends their messages.

The rows of the store are the state of all alerts. While the store cannot be written, the state is
kept in memory and messages are sent nevertheless; the rows are written when the store works again.
If another host leads by then, it has no row of that outage, so this host announces its end.

Cancellation: a message that is being sent stays waiting in the store, so the next start sends it
again.
"""

import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import attrs
import trio

from ..base.bell import Flag
from ..base.clock import wall
from ..base.logs import get_logger
from ..base.telemetry import Sample
from ..base.term import TermEndedError
from ..config.options.alerts import AlertsOptions
from ..errors import NotRunningError, StoreUnavailableError
from ..notifications.send import Outcome, RetrySchedule, ending_of
from ..records.alerts import Alert, AlertBook, AlertMessage, AlertName
from ..records.notifications import NotificationState
from .conditions import AlertCondition, Facts, evaluate
from .lifecycle import MOST_MESSAGES, DueMessage, advance

if TYPE_CHECKING:
    from ..storage.sql.alerts import AlertStore

_log = get_logger("alerts")

#: Interval of the checks of all conditions, in seconds.
CHECK_SECONDS: Final = 5.0

#: Time for reading or writing the rows, in seconds. A store that hangs must not delay a message.
STORE_SECONDS: Final = 2.0

#: Names of results in ``sdk_alert_messages_total{channel,result}``.
RESULTS: Final = {
    NotificationState.SENT: "sent",
    NotificationState.RETRYING: "retried",
    NotificationState.FAILED: "failed",
    NotificationState.SKIPPED: "skipped",
}

#: The least time between two messages about one alert, in seconds, by which they are ordered.
LEAST_INTERVAL_SECONDS: Final = 0.001

#: The alert that a host can open while no host can write a row.
OUTAGE: Final = AlertName.STORE_UNREACHABLE

_Key = tuple[str, str]


class MessageSender(Protocol):
    """One channel of alerts."""

    async def send(self, message: AlertMessage) -> Outcome:
        """Try once to send a message; it raises nothing but ``Cancelled``."""
        ...


class AlertWatch:
    """Checks the conditions at intervals, while this host is in charge.

    Args:
        store: returns the open store of alerts.
        observe: measures the facts; it raises nothing but ``Cancelled``.
        senders: the channels by name.
        options: ``Sdk:Alerts``.
        in_charge: whether this host is the one that sends alerts. A host that was in charge
            remains so while the store cannot be written, because no other one can be elected then.
        term: returns the number of the term in which it leads; no row is written without one;
            None: it is the only host.
        clock: returns Unix seconds.
        schedule: the attempts of one message on one channel.
        fraction: returns a random number from 0 to 1.
    """

    def __init__(
        self,
        store: Callable[[], "AlertStore"],
        observe: Callable[[], Awaitable[Facts]],
        senders: Mapping[str, MessageSender],
        options: AlertsOptions,
        *,
        in_charge: Callable[[], bool] = lambda: True,
        term: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = wall,
        schedule: RetrySchedule | None = None,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        self._store = store
        self._observe = observe
        self._senders = senders
        self._options = options
        self._in_charge = in_charge
        self._current_term = term
        self._clock = clock
        self._schedule = schedule or RetrySchedule()
        self._fraction = fraction
        self._was_in_charge = False
        # Whether the term in which rows may be written is over.
        self._is_over = False
        # The last term in which this host was in charge.
        self._term: int | None = None
        self._loaded = False
        self._rows = trio.Lock()
        self._alerts: dict[AlertName, Alert] = {}
        # Messages that wait or are not saved yet.
        self._messages: dict[_Key, AlertMessage] = {}
        # When they are due by Trio's clock, which is never set back.
        self._due: dict[_Key, float] = {}
        self._unsaved_alerts: set[AlertName] = set()
        self._unsaved_messages: set[_Key] = set()
        self._wanted = {name: Flag() for name in senders}
        #: Attempts by channel and result.
        self.counts: Counter[tuple[str, str]] = Counter()

    def samples(self) -> Iterable[Sample]:
        """Return the state of each alert while this host is in charge, and the attempts."""
        if self._was_in_charge:
            for name in AlertName:
                alert = self._alerts.get(name)
                is_open = alert is not None and alert.is_open
                yield Sample("sdk_alert_open", (("alert", str(name)),), int(is_open))
        for channel in self._senders:
            for result in RESULTS.values():
                labels = (("channel", channel), ("result", result))
                count = self.counts[channel, result]
                yield Sample("sdk_alert_messages_total", labels, count)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Check and send until cancelled."""
        async with trio.open_nursery() as nursery:
            for channel in self._senders:
                nursery.start_soon(self._send_on, channel)
            task_status.started()
            while True:
                await self.check()
                await trio.sleep(CHECK_SECONDS)

    async def check(self) -> None:
        """Check every condition once, and create the messages that are due."""
        facts = await self._observe()
        is_down = facts.store_writes is False
        if self._in_charge():
            term = self._current_term()
            if term != self._term:
                self._forget()  # another host may have changed the rows meanwhile
            self._was_in_charge, self._term, self._is_over = True, term, False
        elif not (is_down and self._was_in_charge):
            await self._resign()
            if self._was_in_charge:
                return
        if self._was_in_charge and not is_down and not await self._load():
            return
        now = self._clock()
        conditions = evaluate(facts, self._options, now)
        if not self._in_charge():
            # Another host may be in charge, and cannot know that this one has lost the store.
            conditions = tuple(each for each in conditions if each.name is OUTAGE)
        if not self._was_in_charge:
            # A later outage is announced by the host that leads then.
            conditions = (AlertCondition(OUTAGE, holds=False),)
        step = advance(self._alerts, conditions, self._options, now)
        for alert in step.changed:
            self._alerts[alert.name] = alert
            self._unsaved_alerts.add(alert.name)
        for announcement in step.announcements:
            self._enlist(announcement, now)
        await self._save()
        for wanted in self._wanted.values():
            wanted.set()

    def _enlist(self, announcement: DueMessage, now: float) -> None:
        alert, id = announcement.alert, str(uuid.uuid4())
        # After the earlier messages, even if the clock was set back meanwhile.
        before = [each.created_at for each in self._messages.values() if each.alert == alert.name]
        created_at = max([now, *(at + LEAST_INTERVAL_SECONDS for at in before)])
        log = _log.error if alert.is_open else _log.info
        log(f"alert.{announcement.kind}", alert=str(alert.name), detail=alert.detail)
        for channel in self._senders:
            self._note(
                AlertMessage(
                    id=id,
                    channel=channel,
                    alert=alert.name,
                    kind=announcement.kind,
                    detail=alert.detail,
                    opened_at=alert.opened_at,
                    closed_at=alert.closed_at,
                    created_at=created_at,
                    is_last=announcement.is_last,
                )
            )

    # -- rows --------------------------------------------------------------------------------

    def _note(self, message: AlertMessage) -> None:
        key = message.id, message.channel
        self._messages[key] = message
        self._due[key] = self._due_time(message)
        self._unsaved_messages.add(key)

    def _due_time(self, message: AlertMessage) -> float:
        """Return when a message is due, by Trio's clock."""
        at = message.next_attempt_at
        wait = 0.0 if at is None else min(at - self._clock(), self._schedule.cap_seconds)
        return trio.current_time() + max(0.0, wait)

    async def _load(self) -> bool:
        """Read the rows, except those that are newer in memory; return whether they are known.

        They are read once in a term, because only this host changes them.
        """
        if self._loaded:
            await trio.lowlevel.checkpoint()
            return True
        with trio.move_on_after(STORE_SECONDS):
            async with self._rows:
                try:
                    self._merge(await self._store().load(waiting_only=True))
                    self._loaded = True
                except StoreUnavailableError as error:
                    _log.store_unavailable(error, retry_in=CHECK_SECONDS)
                except NotRunningError:
                    pass  # the runtime ends; the next one reads the rows
        return self._loaded

    def _merge(self, book: AlertBook) -> None:
        for alert in book.alerts:
            if alert.name in self._unsaved_alerts:
                # Newer in memory, except for the messages that other hosts have sent.
                mine = self._alerts[alert.name]
                sent = sorted({*alert.sent, *mine.sent})[-MOST_MESSAGES:]
                alert = attrs.evolve(mine, sent=tuple(sent))
            self._alerts[alert.name] = alert
        for message in book.messages:
            # A channel that is no longer configured has no sender; its messages stay.
            key = message.id, message.channel
            if message.channel in self._senders and key not in self._messages:
                self._messages[key] = message
                self._due[key] = self._due_time(message)

    async def _save(self) -> None:
        """Write the rows that changed; if that fails, they are written by a later call."""
        with trio.move_on_after(STORE_SECONDS):
            # One at a time: rows that were read before a message was sent would repeat it.
            async with self._rows:
                await self._write()

    async def _write(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._is_over:
            for key in [key for key, each in self._messages.items() if not each.is_waiting]:
                self._drop(key)
            return
        alerts, messages = self._unsaved_alerts, self._unsaved_messages
        if not (alerts or messages):
            return
        self._unsaved_alerts, self._unsaved_messages = set(), set()
        saved = {key: self._messages[key] for key in messages}
        is_saved = False
        try:
            rows = [self._alerts[name] for name in alerts]
            await self._store().save(rows, list(saved.values()), now=self._clock(), term=self._term)
            is_saved = True
        except TermEndedError as error:
            self._is_over = True
            _log.warning("alert.rows_left", reason=str(error), hint="the host that leads has them")
        except StoreUnavailableError as error:
            _log.store_unavailable(error, retry_in=CHECK_SECONDS)
        except NotRunningError:
            pass  # the runtime ends
        finally:
            if not is_saved:
                self._unsaved_alerts |= alerts
                self._unsaved_messages |= messages
            if self._is_over:
                self._forget()
        for key, message in saved.items() if is_saved else ():
            if self._messages.get(key) is message and not message.is_waiting:
                self._drop(key)

    def _drop(self, key: _Key) -> None:
        del self._messages[key], self._due[key]
        self._unsaved_messages.discard(key)

    async def _resign(self) -> None:
        """Hand the state over to the host that is in charge now."""
        await self._save()
        if not (self._unsaved_alerts or self._unsaved_messages):
            self._forget()

    def _forget(self) -> None:
        """Forget the state, which another host has from now on, except an outage without a row."""
        self._was_in_charge = self._loaded = False
        self._unsaved_alerts &= {OUTAGE}
        self._alerts = {name: self._alerts[name] for name in sorted(self._unsaved_alerts)}
        for key, message in list(self._messages.items()):
            if message.alert not in self._alerts:
                self._drop(key)

    # -- sending -----------------------------------------------------------------------------

    async def _send_on(self, channel: str) -> None:
        """Send the messages of one channel, one after the other, until cancelled."""
        while True:
            message, wait = self._next(channel)
            if message is None:
                with trio.move_on_after(wait):
                    await self._wanted[channel].wait()
                continue
            await self._send(message)

    def _next(self, channel: str) -> tuple[AlertMessage | None, float]:
        """Return the message that is due, or None and the seconds until the next poll."""
        waiting = sorted(
            (each for each in self._messages.values() if each.is_waiting),
            key=lambda each: each.created_at,
        )
        now, wait = trio.current_time(), CHECK_SECONDS
        # One alert's messages arrive in order, so a newer one waits for an older one's retry.
        first = {each.alert: each for each in reversed(waiting) if each.channel == channel}
        for message in sorted(first.values(), key=lambda each: each.created_at):
            due = self._due[message.id, message.channel]
            if due <= now:
                return message, 0.0
            wait = min(wait, due - now)
        return None, wait

    async def _send(self, message: AlertMessage) -> None:
        now, schedule = self._clock(), self._schedule
        # Recorded before sending: otherwise a process that keeps crashing would repeat the message
        # at each start.
        begun = attrs.evolve(
            message,
            state=NotificationState.RETRYING,
            attempts=message.attempts + 1,
            next_attempt_at=now + schedule.base_seconds,
        )
        self._note(begun)
        await self._save()
        if (message.id, message.channel) not in self._messages:
            return  # another host leads, and sends it
        outcome = await self._senders[message.channel].send(begun)
        now = self._clock()
        result = ending_of(
            outcome,
            attempts=begun.attempts,
            repeatable=True,
            schedule=schedule,
            now=now,
            fraction=self._fraction(),
        )
        is_over = result.state is not NotificationState.RETRYING
        self._note(
            attrs.evolve(
                begun,
                state=result.state,
                reason=result.reason,
                next_attempt_at=result.next_attempt_at,
                finished_at=now if is_over else None,
            )
        )
        self._report(begun, result.state, result.reason)
        await self._save()

    def _report(self, message: AlertMessage, state: NotificationState, reason: str | None) -> None:
        result = RESULTS[state]
        self.counts[message.channel, result] += 1
        log = _log.info if state is NotificationState.SENT else _log.warning
        log(
            f"alert.message_{result}",
            alert=str(message.alert),
            kind=str(message.kind),
            channel=message.channel,
            id=message.id,
            attempt=message.attempts,
            reason=reason,
        )
