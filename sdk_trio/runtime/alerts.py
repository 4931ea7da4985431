"""Alerts in the runtime: the facts that other parts have measured, the senders, and the watch.

Nothing is measured only for alerts, except by two short queries: the number of new dead letters
and, with ``SilenceMinutes``, the time of the last delivery.
"""

import os
import platform
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

import trio

from ..admin.status import StoreObserver
from ..alerts.channels import AlertSender, make_senders
from ..alerts.conditions import Facts, token_end
from ..alerts.watch import STORE_SECONDS, AlertWatch
from ..base.clock import wall
from ..base.telemetry import Sample
from ..config import Settings
from ..config.options.alerts import AlertsOptions
from ..config.options.webhooks import WebhooksOptions
from ..errors import NotRunningError, SdkError, StoreUnavailableError
from ..net.poster import HttpPoster
from ..notifications.send import ReadVariable
from ..reconcile.plan import choose_endpoints
from ..reconcile.reconciler import Upstream
from ..records.deliveries import DeliveryState
from ..storage.ports import Inbox, Store
from .console import Overseen
from .notifications import sign_notification

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
    """The part of the runtime that the facts come from."""

    settings: Settings

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

    def samples(self) -> Sequence[Sample]:
        """Return the metrics of every part."""
        ...

    async def refresh(self) -> None:
        """Ask other processes of this runtime for their metrics."""
        ...


class UpstreamWatch:
    """The last result of listing the webhook endpoints.

    Args:
        options: ``Sdk:Webhooks``, which say which endpoints are this receiver's.
    """

    def __init__(self, options: WebhooksOptions) -> None:
        self._options = options
        #: The number of disabled endpoints of this receiver; None: not known.
        self.disabled: int | None = None
        #: Whether the last request was answered; None: there was none.
        self.answers: bool | None = None

    def watched(self, upstream: Upstream) -> Upstream:
        """Return ``upstream``, whose answers this watch notes."""
        return _WatchedUpstream(upstream, self)

    def note(self, listed: Sequence[Any] | None) -> None:
        """Note the endpoints that the upstream listed; None: the call failed."""
        self.answers = listed is not None
        if listed is None:
            return
        try:
            chosen = choose_endpoints(
                listed,
                configured=self._options.reconciliation.endpoint_ids,
                path=self._options.path,
            )
        except SdkError:  # none of them is this receiver's: the reconciler reports it
            self.disabled = None
        else:
            self.disabled = sum(not endpoint.enabled for endpoint in chosen)


class _WatchedUpstream:
    def __init__(self, upstream: Upstream, watch: UpstreamWatch) -> None:
        self._upstream = upstream
        self._watch = watch

    async def endpoints(self) -> list[Any]:
        try:
            listed = await self._upstream.endpoints()
        except SdkError:
            self._watch.note(None)
            raise
        self._watch.note(listed)
        return listed

    async def read(
        self,
        endpoint_ids: Sequence[str],
        query: Mapping[str, str],
        visit: Callable[[list[Any]], Awaitable[None]],
    ) -> None:
        await self._upstream.read(endpoint_ids, query, visit)

    async def redeliver(self, webhook_id: str) -> bool:
        return await self._upstream.redeliver(webhook_id)


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
        # When the store and the replication began to fail, by the names of their facts.
        self._since: dict[str, float] = {}
        #: Notes what reconciliation learns about the upstream.
        self.upstream: UpstreamWatch = UpstreamWatch(runtime.settings.webhooks)
        #: Checks the conditions and sends the messages.
        self.watch: AlertWatch = AlertWatch(
            lambda: runtime.receiver.whole_store.alerts,
            self.observe,
            make_alert_senders(runtime.settings.alerts, clock=clock),
            runtime.settings.alerts,
            in_charge=lambda: runtime.leads,
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
        """Return the facts of now; unknown ones are None."""
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
        # A time ahead of now is from before the clock was set back.
        since = min(self._since.get(name, now), now)
        self._since[name] = since
        return since

    async def _read_store(self, observer: StoreObserver, now: float) -> dict[str, Any]:
        """Return the facts that the store has; none if it does not answer."""
        figures, options = observer.figures, self._runtime.settings.alerts
        found: dict[str, Any] = {}
        with trio.move_on_after(STORE_SECONDS) as scope:
            await trio.lowlevel.checkpoint()
            if figures is None:
                return {}
            oldest = figures.oldest_at
            found["oldest_waiting_at"] = inf if oldest is None else oldest
            try:
                store = self._runtime.receiver.whole_store
                since = now - options.repeat_hours * 3600.0
                found["new_dead_letters"] = (
                    await store.alerts.count_dead_letters(since=since)
                    if figures.events[DeliveryState.DEAD]
                    else 0
                )
                if options.silence_minutes is not None:
                    newest = await store.inbox.find(limit=1)
                    found["last_delivery_at"] = newest[0].received_at if newest else None
            except (StoreUnavailableError, NotRunningError):
                return {}
        return {} if scope.cancelled_caught else found

    def _disabled_endpoints(self) -> int | None:
        if not self._runtime.settings.webhooks.reconciliation.enabled:
            return 0
        return self.upstream.disabled

    def _sender_answers(self) -> bool | None:
        circuit = self._runtime.circuit
        if circuit in _REFUSING or self.upstream.answers is False:
            return False
        return None if circuit == "probing" else True

    def _replication_lags(self) -> bool | None:
        replication = self._runtime.settings.multi_tenant.file_db.replication
        if not replication.use_replication:
            return False
        overseer = self._runtime.replication
        health = None if overseer is None else overseer.health
        return None if health is None else health.is_degraded
