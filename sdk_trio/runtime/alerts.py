"""Alerts in the runtime: the facts that other parts have measured, the senders, and the watch.

Nothing is measured only for alerts, except by two short queries: the number of new dead letters
and, with ``SilenceMinutes``, the time of the last delivery.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import trio

from ..admin.status import StoreObserver
from ..alerts.channels import AlertSender, make_senders
from ..alerts.conditions import Facts, token_end
from ..alerts.watch import STORE_SECONDS, AlertWatch
from ..base.clock import wall
from ..base.telemetry import Sample
from ..config import Settings
from ..config.options.alerts import AlertsOptions
from ..errors import NotRunningError, StoreUnavailableError
from ..net.poster import HttpPoster
from ..notifications.send import ReadVariable
from ..records.deliveries import DeliveryState
from ..records.synthetic import is_synthetic
from ..storage.ports import Inbox, Store
from .console import Overseen
from .notifications import sign_notification

if TYPE_CHECKING:
    from ..reconcile.gap_watch import GapWatch

#: States of the circuit breaker in which calls of the upstream fail at once.
_REFUSING = ("open", "isolated")


class Receiver(Protocol):
    """The part of the receiver that the facts come from."""

    @property
    def store(self) -> Inbox:
        """Return the open inbox; raise NotRunningError without one."""
        ...

    @property
    def whole_store(self) -> Store:
        """Return the open store; raise NotRunningError without one."""
        ...

    @property
    def unused_secrets(self) -> Sequence[int]:
        """Return the positions of secrets that have verified nothing for a day."""
        ...


class WatchedRuntime(Protocol):
    """The part of the runtime that the facts come from.

    ``gap_watch`` reads the endpoints; None: reconciliation is off, or another host has it.
    """

    settings: Settings
    gap_watch: "GapWatch | None"

    @property
    def receiver(self) -> Receiver:
        """Return the receiver."""
        ...

    @property
    def circuit(self) -> str | None:
        """Return the state of the client's circuit breaker; None without a client."""
        ...

    @property
    def replication(self) -> Overseen | None:
        """Return the state of replication; None without replication."""
        ...

    @property
    def observer(self) -> StoreObserver | None:
        """Return the observer of the admin address; None without one."""
        ...

    @property
    def leads(self) -> bool:
        """Return whether this host runs what only one of the hosts may run."""
        ...

    @property
    def term(self) -> int | None:
        """Return the number of the term in which this host leads; None: no host is elected."""
        ...

    def samples(self) -> Sequence[Sample]:
        """Return the metrics of every part."""
        ...

    async def refresh(self) -> None:
        """Ask other processes of this runtime for their metrics."""
        ...


def make_alert_senders(
    options: AlertsOptions,
    *,
    read_variable: ReadVariable = os.environ.get,
    clock: Callable[[], float] = wall,
) -> Mapping[str, AlertSender]:
    """Return the senders of the configured channels by name.

    Args:
        options: ``Sdk:Alerts``.
        read_variable: reads an environment variable, at each message.
        clock: returns Unix seconds.
    """
    return make_senders(
        options,
        HttpPoster(clock=clock),
        sign=sign_notification,
        read_variable=read_variable,
        clock=clock,
        host=platform.node() or "unknown host",
    )


class Alerts:
    """The alerts of a runtime.

    Args:
        runtime: the running program.
        clock: returns Unix seconds.
    """

    def __init__(self, runtime: WatchedRuntime, *, clock: Callable[[], float] = wall) -> None:
        self._runtime = runtime
        self._clock = clock
        # Without an admin address, nothing else observes the store.
        self._own = StoreObserver(self._stores, clock=clock)
        self._arrivals = UpstreamArrivals()
        # When the store and the replication began to fail, by the names of their facts.
        self._since: dict[str, float] = {}
        #: Checks the conditions and sends the messages.
        self.watch: AlertWatch = AlertWatch(
            lambda: runtime.receiver.whole_store.alerts,
            self.observe,
            make_alert_senders(runtime.settings.alerts, clock=clock),
            runtime.settings.alerts,
            in_charge=lambda: runtime.leads,
            term=lambda: runtime.term,
            clock=clock,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled; see :class:`~sdk_trio.alerts.watch.AlertWatch`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._own.run)
            await nursery.start(self.watch.run)
            task_status.started()

    def _stores(self) -> tuple[Inbox, None]:
        return self._runtime.receiver.store, None

    # -- facts -------------------------------------------------------------------------------

    async def observe(self) -> Facts:
        """Return the current facts; unknown ones are None."""
        runtime, now = self._runtime, self._clock()
        observer = runtime.observer or self._own
        await runtime.refresh()
        await observer.wait_for_check()
        await observer.wait_for_figures()
        store_writes = observer.check().ok
        replication_lags = self._replication_lags()
        token = runtime.settings.access_token
        clock_check = observer.clock_check(runtime.settings.webhooks.tolerance_seconds)
        offsets = (s for s in observer.samples() if s.name == "sdk_clock_offset_seconds")
        offset = next(offsets, None)
        certificates = [
            sample.value
            for sample in runtime.samples()
            if sample.name == "sdk_certificate_end_time_seconds"
        ]
        # While the store fails, its figures are stale.
        stored = await self._read_store(observer, now) if store_writes else {}
        return Facts(
            store_writes=store_writes,
            store_failing_since=self._note("store", not store_writes, now),
            disabled_endpoints=self._disabled_endpoints(),
            sender_answers=self._sender_answers(),
            replication_lags=replication_lags,
            replication_lags_since=self._note("replication", bool(replication_lags), now),
            certificate_ends_at=min(certificates, default=inf),
            token_ends_at=token_end(None if token is None else token.reveal()),
            clock_differs=clock_check is not None and (clock_check.degraded or not clock_check.ok),
            clock_offset=0.0 if offset is None else offset.value,
            unused_secrets=tuple(runtime.receiver.unused_secrets),
            **stored,
        )

    def _note(self, name: str, fails: bool, now: float) -> float | None:
        """Note whether a part fails; return since when, or None while it works."""
        if not fails:
            self._since.pop(name, None)
            return None
        # A time in the future was written before the clock was set back.
        since = min(self._since.get(name, now), now)
        self._since[name] = since
        return since

    def _not_ahead(self, name: str, at: float, now: float) -> float:
        """Return ``at``; if it is in the future, the time at which this was first seen."""
        since = self._note(name, at > now, now)
        return at if since is None else since

    async def _read_store(self, observer: StoreObserver, now: float) -> dict[str, Any]:
        """Return the facts that the store has; none if it does not answer."""
        figures, options = observer.figures, self._runtime.settings.alerts
        found: dict[str, Any] = {}
        with trio.move_on_after(STORE_SECONDS) as scope:
            await trio.lowlevel.checkpoint()
            if figures is None:
                return {}
            oldest = figures.oldest_at
            found["oldest_waiting_at"] = (
                inf if oldest is None else self._not_ahead("oldest", oldest, now)
            )
            try:
                store = self._runtime.receiver.whole_store
                found["pauses"] = await store.pauses(now=now)
                since = now - options.repeat_hours * 3600.0
                found["new_dead_letters"] = (
                    await store.alerts.count_dead_letters(since=since)
                    if figures.events[DeliveryState.DEAD]
                    else 0
                )
                if options.silence_minutes is not None:
                    silent_since = now - options.silence_minutes * 60.0
                    last = await self._arrivals.last(store, silent_since, now)
                    found["last_delivery_at"] = (
                        self._not_ahead("newest", last, now) if last is not None else None
                    )
            except (StoreUnavailableError, NotRunningError):
                return {}
        return {} if scope.cancelled_caught else found

    def _disabled_endpoints(self) -> int | None:
        if not self._runtime.settings.webhooks.reconciliation.enabled:
            return 0
        watch = self._runtime.gap_watch
        return None if watch is None else watch.disabled

    def _sender_answers(self) -> bool | None:
        circuit, watch = self._runtime.circuit, self._runtime.gap_watch
        if circuit in _REFUSING or (watch is not None and watch.answers is False):
            return False
        return None if circuit == "probing" else True

    def _replication_lags(self) -> bool | None:
        replication = self._runtime.settings.multi_tenant.file_db.replication
        if not replication.use_replication:
            return False
        overseer = self._runtime.replication
        health = None if overseer is None else overseer.health
        return None if health is None else health.is_degraded


#: The deliveries that one query reads in search of the upstream's newest one, and the most queries.
_PAGE, _MOST_PAGES = 500, 10

#: From this age in seconds, deliveries with lower sequences no longer appear.
_SETTLED_SECONDS = 60.0


class UpstreamArrivals:
    """Finds when the upstream's newest delivery arrived.

    Deliveries of sources, and events that catch-up made, do not end the upstream's silence.
    """

    def __init__(self) -> None:
        # Up to this sequence, the upstream's newest delivery arrived at this time or before.
        self._known = 0
        self._last: float | None = None

    async def last(self, inbox: Inbox, silent_since: float, now: float) -> float | None:
        """Return when it arrived; None if there is none.

        If only others were read, more than one check reads, the result is the arrival of the oldest
        of them, and the upstream's came before. Later ones do not move it, so a busy source does
        not hide that the upstream is silent.
        """
        settled: int | None = None
        before: int | None = None
        last: float | None = None
        # Usually the newest one is the upstream's.
        for most in (1, *(_PAGE for _ in range(_MOST_PAGES))):
            page = await inbox.find(before_sequence=before, limit=most)
            for record in page:
                if settled is None and record.received_at < now - _SETTLED_SECONDS:
                    settled = record.sequence
                if record.sequence <= self._known:
                    return self._remember(settled, self._last)
                last = record.received_at
                if record.source is None and not is_synthetic(record.webhook_id):
                    return self._remember(settled, last)
            if not page:
                return self._remember(settled, self._last)
            if last is not None and last < silent_since:
                break
            before = page[-1].sequence
        return self._remember(settled, last)

    def _remember(self, settled: int | None, last: float | None) -> float | None:
        if settled is not None:
            self._known, self._last = settled, last
        return last
