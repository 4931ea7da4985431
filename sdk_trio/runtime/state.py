"""The parts of a runtime and their state: construction, metrics, reload."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import msgspec
import trio

from ..base.clock import current as current_clock
from ..base.log_output import dropped_in_all
from ..base.telemetry import Sample, SampleSource
from ..config import Settings, StorageBackend, unmet_needs
from ..config.check import PROCESSES_NEED_COMMAND, RECONCILIATION_NEEDS_CLIENT
from ..errors import NotRunningError, OptionsValidationError
from ..webhooks import DrainReport, HandlerRegistry, WebhookReceiver
from ..webhooks.endpoint import LIVE_KEYS
from ..webhooks.receiver import WHOLE, Share
from ..webhooks.registration import FALLBACK
from .reload import Prepare, Reloaded, SettingsReload
from .watchdog import Watchdog
from .wiring import (
    CIRCUIT_STATES,
    make_administrator,
    make_alerts,
    make_client,
    make_companion,
    make_notifier,
    make_simulator_secret,
    sample_client,
    with_simulator_secret,
)

if TYPE_CHECKING:
    from ..admin.status import StoreObserver
    from ..base.term import Leadership
    from ..client.client import Client
    from ..reconcile.gap_watch import GapWatch
    from ..replication.verification_schedule import VerificationScheduler
    from ..tenants.tenancy import ClientFactory
    from ..tenants.upgrade import HostUpgrade, Quiescence
    from .admin import AdminServer
    from .alerts import Alerts
    from .notifications import ChannelFactory
    from .processes import Processes
    from .replication import ReplicationOverseer
    from .worker import WorkerAssignment

#: Settings that are read at each use, so that a reload has no part to notify.
_READ_AT_USE = ("Sdk:Server:ShutdownDelaySeconds", "Sdk:Server:KeyFilePollSeconds")
_TEMPLATE_KEYS = ("Sdk:MultiTenant:Notifications:Templates",)


class Started(msgspec.Struct, frozen=True):
    """The addresses of a running runtime, as URLs with the actual ports instead of 0."""

    receiver: tuple[str, ...]
    admin: tuple[str, ...] = ()

    @property
    def webhook_url(self) -> str:
        """The first address that deliveries can be sent to, without the path."""
        return self.receiver[0]


class RuntimeState:
    """The parts of a :class:`~sdk_trio.Runtime`, which runs them; see there for the arguments."""

    def __init__(
        self,
        settings: Settings,
        handlers: HandlerRegistry | None = None,
        *,
        client: "Client | None" = None,
        standalone: bool | None = None,
        clock: Callable[[], float] | None = None,
        client_factory: "ClientFactory | None" = None,
        host_upgrade: "HostUpgrade | None" = None,
        quiescence: "Quiescence | None" = None,
        channels: "ChannelFactory | None" = None,
        workers: "Callable[[WebhookReceiver], Processes] | None" = None,
        worker: "WorkerAssignment | None" = None,
        listens: bool = True,
    ) -> None:
        if unmet_needs(settings):
            raise OptionsValidationError(unmet_needs(settings))
        if settings.server.processes != 1 and workers is None and worker is None:
            raise OptionsValidationError([PROCESSES_NEED_COMMAND])
        self._simulator_secret = make_simulator_secret(settings)
        settings = with_simulator_secret(settings, self._simulator_secret)
        self.settings: Settings = settings
        self._worker = worker
        self._share = WHOLE if worker is None else worker.share
        if workers is not None:
            self._share = Share(deliveries=False)
        # A receiver only verifies, so it needs no token. Without token and client, run standalone.
        if standalone is None:
            standalone = client is None and not settings.has_access_token
        # Made before the receiver, whose services pass it on; opened when the runtime runs.
        self._client = None if standalone else client or make_client(settings)
        self._reconciles = settings.webhooks.reconciliation.enabled
        if self._reconciles and self._client is None:
            raise OptionsValidationError([RECONCILIATION_NEEDS_CLIENT])
        self._reconciles = self._reconciles and self._share.singletons
        # Tenants' clients are made as the host's, from settings with the tenant's token.
        if client_factory is None and not standalone:
            client_factory = make_client
        #: The clock of all parts, in Unix seconds.
        self.clock: Callable[[], float] = clock or current_clock().wall
        self._notifier = (
            make_notifier(settings, channels, self.clock) if self._share.singletons else None
        )
        self.receiver: WebhookReceiver = WebhookReceiver(
            settings,
            # Not "or": a registry that has only a fallback is empty, so its truth value is False.
            HandlerRegistry() if handlers is None else handlers,
            client=self._client,
            clock=self.clock,
            client_factory=client_factory,
            host_upgrade=host_upgrade,
            quiescence=quiescence,
            companion=(
                make_companion(settings, self._notifier) if self._share.singletons else None
            ),
            share=self._share,
        )
        #: The processes that receive and run deliveries; None: this process does.
        self.processes: Processes | None = None
        if workers is not None:
            self.processes = workers(self.receiver)
        self._listens = listens
        self._bind = settings.server.bind if worker is None else worker.bind
        if not listens:
            self._bind = ()
        self._reloader = SettingsReload(settings, standalone=not settings.has_access_token)
        self._reloader.subscribe(self.receiver.prepare_reload, LIVE_KEYS)
        if self._notifier is not None:
            self._reloader.subscribe(self._notifier.prepare_reload, _TEMPLATE_KEYS)
        # Registered anyway, because a reload reports a key without a part as waiting for a restart.
        self._reloader.subscribe(_no_op_prepare, _READ_AT_USE)
        if self._client is not None and (client is None or settings.multi_tenant.enabled):
            from ..client.client import LIVE_KEYS as CLIENT_KEYS  # loaded only if there is one

            # A client that the application passed in keeps its own settings. The receiver reloads
            # the clients of tenants, so the keys are live even then.
            prepare = self._client.prepare_reload if client is None else _no_op_prepare
            self._reloader.subscribe(prepare, CLIENT_KEYS)
        self.started: Started | None = None
        #: The state of replication and its metrics; None: it is disabled or has not started.
        self.replication: ReplicationOverseer | None = None
        #: The lease of the host that reconciles and replicates; None: hosts share no store.
        self.leadership: Leadership | None = None
        #: The scheduled verification of the replicas; None: replication is disabled or has not
        #: started.
        self.verification: VerificationScheduler | None = None
        self._stop_wanted = trio.Event()
        self._drain_begun = trio.Event()
        #: Watches the event loop while :meth:`run` does.
        self.watchdog: Watchdog = Watchdog()
        self._server_samples: SampleSource = tuple
        #: Reads the endpoints at the upstream; None: off, or another host does.
        self.gap_watch: GapWatch | None = None
        #: The alerts of this runtime; None: they are off, or another process has them.
        self.alerts: Alerts | None = None
        if settings.alerts.enabled and self._share.singletons:
            self.alerts = make_alerts(self, self.clock)
        self._administrator = None
        if settings.admin.enabled and self._share.singletons:
            self._administrator = make_administrator(self, self.clock)
        if self._administrator is not None:
            from .admin import LIVE_KEYS as ADMIN_KEYS  # loaded only if there is one

            self._reloader.subscribe(self._administrator.prepare_reload, ADMIN_KEYS)
            if self.processes is not None:
                self._administrator.sources.checks.append(self.processes.check)

    @property
    def report(self) -> DrainReport | None:
        """The counts of the shutdown; None until :meth:`run` has ended."""
        report = self.receiver.report
        if report is None or self.processes is None:
            return report
        return msgspec.structs.replace(report, drained=self.processes.drained)

    @property
    def ready(self) -> bool:
        """Whether senders should send deliveries here: false from the start of a shutdown.

        Deliveries are still accepted for ``Server:ShutdownDelaySeconds``, because a load balancer
        sends until its next probe.
        """
        serving = self.processes is None or self.processes.serving > 0
        return serving and self.receiver.ready and not self._stop_wanted.is_set()

    @property
    def draining(self) -> bool:
        """Whether a stop has begun.

        Deliveries are still accepted for ``Server:ShutdownDelaySeconds``.
        """
        return self._stop_wanted.is_set() or self._drain_begun.is_set()

    @property
    def has_client(self) -> bool:
        """Whether this runtime has a client. A standalone one has none."""
        return self._client is not None

    @property
    def administrator(self) -> "AdminServer":
        """The server of the admin address; parts add their checks and samples to it.

        Raises:
            NotRunningError: ``Admin:Enabled`` is false.
        """
        if self._administrator is None:
            raise NotRunningError("there is no admin address: Sdk:Admin:Enabled is false")
        return self._administrator

    @property
    def client(self) -> "Client":
        """The client of the upstream API: open while the runtime runs, readable afterwards.

        ``client.counters`` are its totals; ``client.breaker`` can be read and set.

        Raises:
            NotRunningError: the runtime is standalone.
        """
        if self._client is None:
            raise NotRunningError("this runtime is standalone: it has no client")
        return self._client

    @property
    def client_samples(self) -> tuple[Sample, ...]:
        """The client's metrics; none before the start, nor in standalone mode."""
        if self._client is None or self.started is None:
            return ()
        return sample_client(self._client.counters, self._client.breaker.state)

    @property
    def observer(self) -> "StoreObserver | None":
        """The observer of the store of the admin address; None before its start or without one."""
        return None if self._administrator is None else self._administrator.observer

    @property
    def leads(self) -> bool:
        """Whether this host runs what only one of the hosts with this store may run."""
        elects = self.settings.storage.backend is StorageBackend.POSTGRES
        return not elects or (self.leadership is not None and self.leadership.term is not None)

    @property
    def term(self) -> int | None:
        """The term in which this host leads; None: it does not, or no host is elected."""
        return None if self.leadership is None else self.leadership.term

    @property
    def replication_samples(self) -> tuple[Sample, ...]:
        """The metrics of replication and its verification; none without replication."""
        if self.replication is None:
            return ()
        from .replication import sample_verification  # loaded only with replication

        return (*self.replication.samples, *sample_verification(self.verification))

    @property
    def addresses(self) -> tuple[str, ...]:
        """The receiver's actual addresses; none before the start."""
        return () if self.started is None else self.started.receiver

    @property
    def queue_depth(self) -> int:
        """The number of events that wait in memory for a worker."""
        return self.receiver.queue_depth if self.processes is None else self.processes.queue_depth

    @property
    def queue_capacity(self) -> int:
        """The upper limit of :attr:`queue_depth`."""
        capacity = self.settings.webhooks.queue.capacity
        return capacity if self.processes is None else capacity * self.processes.count

    @property
    def held_workers(self) -> str | None:
        """A description of the long runs that occupy all workers; None while a worker is free."""
        return (self.processes or self.receiver).held_workers

    @property
    def deliveries(self) -> Mapping[str, int]:
        """The results of deliveries so far, with their numbers."""
        counted = self.receiver.counters.values
        return counted if self.processes is None else self.processes.deliveries

    @property
    def handled_types(self) -> Mapping[str, str]:
        """The event types that have a handler, each with its policies as text.

        A type of a source has ``@NAME:`` before it.
        """
        if self.processes is not None:
            return self.processes.handled_types
        registered = self.receiver.handlers.registrations
        return {each.group: str(each.policy) for each in registered if each.group != FALLBACK}

    @property
    def circuit(self) -> str | None:
        """The state of the client's circuit breaker, the worst one of several; None without one."""
        if self._client is None:
            return None
        state: str = self._client.breaker.state
        if self.processes is not None:
            names = {number: name for name, number in CIRCUIT_STATES.items()}
            state = names[max([CIRCUIT_STATES[state], *self.processes.circuits])]
        return state

    def wake(self) -> None:
        """Have the workers poll the store at once, for example after events were added to it."""
        self.receiver.wake()
        if self.processes is not None:
            self.processes.wake()

    async def refresh(self) -> None:
        """Request the metrics of the processes of ``Server:Processes``; wait at most half a
        second."""
        if self.processes is not None:
            await self.processes.refresh()
        await trio.lowlevel.checkpoint()

    @property
    def unfinished(self) -> int:
        """The number of events that wait in memory or run; a drain waits for these."""
        own = self.receiver.unfinished
        return own if self.processes is None else own + self.processes.unfinished

    def samples(self) -> tuple[Sample, ...]:
        """Return the metrics of every part, summed over several processes."""
        own = self.own_samples()
        return own if self.processes is None else self.processes.add_samples(own)

    def own_samples(self) -> tuple[Sample, ...]:
        """Return the metrics of every part of this process."""
        return (
            *self.receiver.samples(),
            *self.client_samples,
            *self.notification_samples,
            *self.replication_samples,
            *(() if self.alerts is None else self.alerts.watch.samples()),
            *self.watchdog.samples(),
            *self._server_samples(),
            *(
                Sample("sdk_log_dropped_total", (("level", level),), lines)
                for level, lines in dropped_in_all.items()
            ),
        )

    def on_reload(self, prepare: Prepare, keys: Collection[str]) -> None:
        """Register a part for every :meth:`reload`.

        Args:
            prepare: takes the settings that will be in force and returns a function that puts them
                into force; raises OptionsValidationError if they cannot be used. The function must
                neither fail nor wait.
            keys: full keys, or keys of sections, that the part can change while it runs.
        """
        self._reloader.subscribe(prepare, keys)

    @property
    def live_keys(self) -> tuple[str, ...]:
        """Full keys, or keys of sections, that :meth:`reload` can change now."""
        return self._reloader.live_keys

    def reload(self, settings: Settings) -> Reloaded:
        """Put new settings into force, as far as that can be done while running.

        Deliveries in progress continue with the old ones. The method is synchronous and cannot be
        cancelled: either all parts change or none does. ``runtime.settings`` are the settings in
        force.

        Args:
            settings: valid settings, such as :func:`sdk_trio.load_settings` returns.

        Returns:
            The keys that changed, and those that wait for the next start.

        Raises:
            OptionsValidationError: lists every problem; the old settings stay in force.
        """
        return self.prepare_reload(settings)()

    def prepare_reload(self, settings: Settings) -> Callable[[], Reloaded]:
        """Prepare every part for new settings, and return a function that puts them into force.

        Arguments, errors and result are those of :meth:`reload`. The function cannot fail.
        """
        settings = with_simulator_secret(settings, self._simulator_secret)
        prepared = self._reloader.prepare(settings)

        def put_into_force() -> Reloaded:
            done = prepared()
            self.settings = self._reloader.settings
            return done

        return put_into_force

    async def reload_everywhere(self, settings: Settings) -> Reloaded:
        """Put new settings into force in all processes of this runtime, or in none.

        Arguments, errors and result are those of :meth:`reload`. If it is cancelled before all
        processes have agreed, nothing changes. After that it does not wait.
        """
        if self.processes is None:
            await trio.lowlevel.checkpoint()
            return self.reload(settings)
        settings = with_simulator_secret(settings, self._simulator_secret)
        commit = self.prepare_reload(settings)
        async with self.processes.prepared(settings) as processes_commit:
            # No checkpoint between the two: a process that starts later starts with the new ones.
            done = commit()
            processes_commit(self.settings)
        return done

    @property
    def notification_samples(self) -> tuple[Sample, ...]:
        """The metrics of notifications; none if they are not enabled."""
        return () if self._notifier is None else self._notifier.samples


def _no_op_prepare(settings: Settings) -> Callable[[], None]:
    return lambda: None
