"""The nursery tree: every part of the runtime as a sibling task, and their orderly end.

``run`` has three layers. The caller's cancellation reaches only its body, which waits. When the
body ends, for whatever reason, a synchronous ``finally`` starts the drain. The parts live in a
shielded scope, so that a cancelled caller still drains; the same ``finally`` gives that scope its
deadline, so that no drain lasts longer than ``GracefulDrainTimeoutSeconds``. A shield without that
deadline would make a hanging part impossible to stop.

The order of the end: unready, no new connections, requests in progress, queue and handlers, then
the other parts; the admin address last, so that probes can watch the drain.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from ..base.clock import current as current_clock
from ..base.clock import monotonic
from ..base.executor import run_in_thread
from ..base.log_output import dropped_in_all
from ..base.logs import get_logger
from ..base.telemetry import Sample, SampleSource
from ..config import Settings, StorageBackend, unmet_needs
from ..config.check import PROCESSES_NEED_COMMAND, RECONCILIATION_NEEDS_CLIENT
from ..errors import NotRunningError, OptionsValidationError, only_member
from ..server.limits import Limits, share_descriptors
from ..server.listen import descriptor_limit
from ..server.serve import Server
from ..webhooks import DrainReport, HandlerRegistry, WebhookReceiver
from ..webhooks.companion import Part, keep
from ..webhooks.endpoint import LIVE_KEYS
from ..webhooks.receiver import WHOLE, Share
from ..webhooks.signed_request import own_url
from .forks import children_ended
from .preflight import require_startable
from .reload import Prepare, Reloaded, SettingsReload
from .watchdog import Watchdog
from .wiring import (
    CIRCUIT_STATES,
    Routes,
    make_administrator,
    make_client,
    make_companion,
    make_notifier,
    make_simulator_secret,
    sample_client,
    with_simulator_secret,
)

if TYPE_CHECKING:
    from ..client.client import Client
    from ..replication.verification_schedule import VerificationScheduler
    from ..storage.term import Leadership
    from ..tenants.tenancy import ClientFactory
    from ..tenants.upgrade import HostUpgrade, Quiescence
    from .admin import AdminServer
    from .notifications import ChannelFactory
    from .presence import Presence
    from .processes import Processes
    from .replication import ReplicationOverseer
    from .worker import WorkerPlace

_log = get_logger("runtime")

#: Settings that are read each time they are needed, so that a reload has nobody to tell.
_READ_AT_USE = ("Sdk:Server:ShutdownDelaySeconds", "Sdk:Server:KeyFilePollSeconds")
_TEMPLATE_KEYS = ("Sdk:MultiTenant:Notifications:Templates",)
_TLS_KEYS = ("Sdk:Server:CertFile", "Sdk:Server:KeyFile")

#: The most handlers that the beginning of a drain names.
MOST_REPORTED_RUNS = 20


class Started(msgspec.Struct, frozen=True):
    """The addresses of a running runtime: real URLs, with the picked ports in place of 0."""

    receiver: tuple[str, ...]
    admin: tuple[str, ...] = ()

    @property
    def webhook_url(self) -> str:
        """The first address that deliveries can be sent to, without the path."""
        return self.receiver[0]


class Runtime:
    """Everything in one nursery: client, receiver, inbox, queue and workers.

    Args:
        settings: validated settings of :func:`sdk_trio.load_settings`.
        handlers: the handlers by event type; None: every event is parked.
        client: a client to use, not open yet, such as one with a transport of your own; None: the
            runtime makes one from the settings. It opens and closes either.
        standalone: run without a client; None: do so when there is neither an access token nor a
            ``client``.
        clock: returns Unix seconds; None: the clock of :mod:`sdk_trio.base.clock`.
        client_factory: makes the client of a tenant out of settings with its access token.
        host_upgrade: the host's part of the upgrade from a single tenant: a resolver and steps.
        quiescence: the host's signal that nothing writes its data. With
            ``RequireGracefulQuiescence`` a host that has data to move does not start without it.
        channels: makes the channels of notifications; None: those of the settings.
        workers: makes what runs the processes of ``Server:Processes``; the command line has it.
        worker: makes this runtime one of these processes, with its share and its sockets.
        listens: False: deliveries come to ``runtime.receiver`` through a server that exists
            already, and ``Server:Bind`` is not looked at.

    Raises:
        OptionsValidationError: the settings ask for a part that needs a client, an extra or
            tenants, and these are missing.
        MissingHandlersError: ``FailOnMissingHandlers`` is true and a known type has no handler.
        NotSupportedError: ``DefaultTenantStrategy`` is FirstUserOrganization.
        DefaultTenantError: ``DefaultTenantStrategy`` is HostSupplied, and ``host_upgrade`` has no
            resolver.

    It runs once; make another one to run again. No signal handler is installed.
    """

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
        worker: "WorkerPlace | None" = None,
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
        # A receiver needs no token: it only verifies. Whoever gives neither token nor client wants
        # that.
        if standalone is None:
            standalone = client is None and not settings.has_access_token
        # Made before the receiver, whose services hand it out; opened when the runtime runs.
        self._client = None if standalone else client or make_client(settings)
        self._reconciles = settings.webhooks.reconciliation.enabled
        if self._reconciles and self._client is None:
            raise OptionsValidationError([RECONCILIATION_NEEDS_CLIENT])
        self._reconciles = self._reconciles and self._share.singletons
        # Tenants' clients are made as the host's is, out of settings with the tenant's token.
        if client_factory is None and not standalone:
            client_factory = make_client
        #: The clock of all parts, in Unix seconds.
        self.clock: Callable[[], float] = clock or current_clock().wall
        self._notifier = (
            make_notifier(settings, channels, self.clock) if self._share.singletons else None
        )
        self.receiver: WebhookReceiver = WebhookReceiver(
            settings,
            # Not "or": a registry with nothing but a fallback is empty, and so is false.
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
        #: The processes that receive and run deliveries; None: this one does.
        self.processes: Processes | None = None
        if workers is not None:
            self.processes = workers(self.receiver)
        self._listens = listens
        self._announced = False
        self._bind = settings.server.bind if worker is None else worker.bind
        if not listens:
            self._bind = ()
        self._reloader = SettingsReload(settings, standalone=not settings.has_access_token)
        self._reloader.subscribe(self.receiver.prepare_reload, LIVE_KEYS)
        if self._notifier is not None:
            self._reloader.subscribe(self._notifier.prepare_reload, _TEMPLATE_KEYS)
        # Registered all the same: a key that no part names is reported as waiting for a restart.
        self._reloader.subscribe(_nobody_is_told, _READ_AT_USE)
        if self._client is not None and (client is None or settings.multi_tenant.enabled):
            from ..client.client import LIVE_KEYS as CLIENT_KEYS  # loaded by those who have one

            # A client that the application passed in keeps its own settings. The clients of tenants
            # are told by the receiver, so the keys are live even then.
            prepare = self._client.prepare_reload if client is None else _nobody_is_told
            self._reloader.subscribe(prepare, CLIENT_KEYS)
        self.started: Started | None = None
        #: The state of replication and its metrics; None: it is off, or has not begun.
        self.replication: ReplicationOverseer | None = None
        #: The lease by which this host reconciles and replicates; None: no other host can.
        self.leadership: Leadership | None = None
        #: The scheduled verification of the replicas; None: replication is off, or has not begun.
        self.verification: VerificationScheduler | None = None
        self._reason = "the surrounding scope ended"
        self._stop_wanted = trio.Event()
        self._drain_begun = trio.Event()
        # Around all parts; it gets its shield once they serve, and its deadline when the drain
        # begins.
        self._scope = trio.CancelScope()
        # A second signal cuts the wait for load balancers short.
        self._leaving = trio.CancelScope()
        # Ends before the drain, not with the other parts.
        self._reconciling = trio.CancelScope()
        #: Watches the event loop while :meth:`run` does.
        self.watchdog: Watchdog = Watchdog()
        self._server_samples: SampleSource = tuple
        self._drain_ends_at: float | None = None
        self._used = False
        self._served = False
        self._administrator = None
        if settings.admin.enabled and self._share.singletons:
            self._administrator = make_administrator(self, self.clock)
        if self._administrator is not None:
            from .admin import LIVE_KEYS as ADMIN_KEYS  # loaded by those who have one

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
        """Whether senders should send here: false from the first moment of a shutdown on.

        Deliveries are still accepted for ``Server:ShutdownDelaySeconds`` then, because a load
        balancer learns of it by its next probe and until then sends on.
        """
        serving = self.processes is None or self.processes.serving > 0
        return serving and self.receiver.ready and not self._stop_wanted.is_set()

    @property
    def draining(self) -> bool:
        """Whether a stop has begun; True ever after.

        Deliveries are still accepted for ``Server:ShutdownDelaySeconds`` then.
        """
        return self._stop_wanted.is_set() or self._drain_begun.is_set()

    @property
    def has_client(self) -> bool:
        """Whether this runtime has a client, so that it is not standalone."""
        return self._client is not None

    @property
    def administrator(self) -> "AdminServer":
        """The admin address, with which parts register their checks and samples.

        Raises:
            NotRunningError: ``Admin:Enabled`` is false.
        """
        if self._administrator is None:
            raise NotRunningError("there is no admin address: Sdk:Admin:Enabled is false")
        return self._administrator

    @property
    def client(self) -> "Client":
        """The client of the upstream API: open while the runtime runs, readable afterwards.

        ``client.counters`` are its totals, ``client.breaker`` can be read and set by hand.

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
    def replication_samples(self) -> tuple[Sample, ...]:
        """The metrics of replication and its verification; none where there is none."""
        if self.replication is None:
            return ()
        from .replication import sample_verification  # loaded by those who replicate

        return (*self.replication.samples, *sample_verification(self.verification))

    @property
    def addresses(self) -> tuple[str, ...]:
        """The receiver's real addresses; none before the start."""
        return () if self.started is None else self.started.receiver

    @property
    def queue_depth(self) -> int:
        """The number of events that wait in memory for a worker."""
        return self.receiver.queue_depth if self.processes is None else self.processes.queue_depth

    @property
    def queue_capacity(self) -> int:
        """The most that :attr:`queue_depth` can be."""
        capacity = self.settings.webhooks.queue.capacity
        return capacity if self.processes is None else capacity * self.processes.count

    @property
    def held_workers(self) -> str | None:
        """The long runs that hold all workers of the queue, in words; None while one is free."""
        return (self.processes or self.receiver).held_workers

    @property
    def deliveries(self) -> Mapping[str, int]:
        """The results of deliveries so far, with their numbers."""
        counted = self.receiver.counters.values
        return counted if self.processes is None else self.processes.deliveries

    @property
    def handled_types(self) -> Collection[str]:
        """The event types that have a handler."""
        own = self.receiver.handlers
        return set(own) if self.processes is None else self.processes.handled_types

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
        """Have the workers look into the store at once, in which somebody has put events."""
        self.receiver.wake()
        if self.processes is not None:
            self.processes.wake()

    async def refresh(self) -> None:
        """Ask the processes of ``Server:Processes`` for their figures; wait a moment at most."""
        if self.processes is not None:
            await self.processes.refresh()
        await trio.lowlevel.checkpoint()

    @property
    def unfinished(self) -> int:
        """The number of events that wait in memory or run; a drain waits for these."""
        own = self.receiver.unfinished
        return own if self.processes is None else own + self.processes.unfinished

    def samples(self) -> tuple[Sample, ...]:
        """Return the metrics of every part, those of several processes added up."""
        own = self.own_samples()
        return own if self.processes is None else self.processes.add_samples(own)

    def own_samples(self) -> tuple[Sample, ...]:
        """Return the metrics of every part of this process."""
        return (
            *self.receiver.samples(),
            *self.client_samples,
            *self.notification_samples,
            *self.replication_samples,
            *self.watchdog.samples(),
            *self._server_samples(),
            *(
                Sample("sdk_log_dropped_total", (("level", level),), lines)
                for level, lines in dropped_in_all.items()
            ),
        )

    def on_reload(self, prepare: Prepare, keys: Collection[str]) -> None:
        """Let a part take part in every :meth:`reload`.

        Args:
            prepare: takes the settings that will be in force and returns the call that puts them
                into force; raises OptionsValidationError if they cannot be used. The call must
                neither fail nor wait.
            keys: full keys, or keys of sections, that the part can change while it runs.
        """
        self._reloader.subscribe(prepare, keys)

    @property
    def live_keys(self) -> tuple[str, ...]:
        """Full keys, or keys of sections, that :meth:`reload` can change at this moment."""
        return self._reloader.live_keys

    def reload(self, settings: Settings) -> Reloaded:
        """Put new settings into force, as far as that can be done while running.

        Deliveries in progress go on with the old ones. It is synchronous and cannot be cancelled:
        either everything changes that can, or nothing does. ``runtime.settings`` are those in
        force.

        Args:
            settings: valid ones, such as :func:`sdk_trio.load_settings` returns.

        Returns:
            the keys that changed, and those that wait for the next start.

        Raises:
            OptionsValidationError: with every problem; the old settings stay in force.
        """
        return self.prepare_reload(settings)()

    def prepare_reload(self, settings: Settings) -> Callable[[], Reloaded]:
        """Prepare every part for new settings, and return the call that puts them into force.

        Arguments, errors and result are those of :meth:`reload`. The call cannot fail.
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
        have agreed, nothing changes; from then on it does not wait.
        """
        if self.processes is None:
            await trio.lowlevel.checkpoint()
            return self.reload(settings)
        settings = with_simulator_secret(settings, self._simulator_secret)
        commit = self.prepare_reload(settings)
        async with self.processes.prepared(settings) as processes_commit:
            # No checkpoint between the two: a process that begins now begins with the new ones.
            done = commit()
            processes_commit(self.settings)
        return done

    @property
    def notification_samples(self) -> tuple[Sample, ...]:
        """The metrics of notifications; none where they are not enabled."""
        return () if self._notifier is None else self._notifier.samples

    def shut_down(self, reason: str) -> None:
        """Begin a graceful stop: accept nothing new, drain, end. A second call does nothing.

        With ``Server:ShutdownDelaySeconds``, :attr:`ready` is false for that long before.
        """
        if not self._stop_wanted.is_set():
            self._reason = reason
            self._stop_wanted.set()

    async def wait_stopping(self) -> str:
        """Wait until a shutdown has begun, and return its reason."""
        await self._stop_wanted.wait()
        return self._reason

    async def wait_draining(self) -> float:
        """Wait until the drain has begun; return when it ends (``clock.monotonic``)."""
        await self._drain_begun.wait()
        assert self._drain_ends_at is not None  # set before the event
        return self._drain_ends_at

    async def leave(self) -> None:
        """Release the events whose handlers no cancellation ends, and log the report.

        For a process that ends right after it, whatever still runs: a handler in a thread or behind
        a shield would hold the process for as long as it likes. See docs/explanation/delivery.md.
        """
        await self.receiver.leave()
        self._log_end()

    def force(self) -> None:
        """Cut the drain short: cancel the handlers now; their events stay in the store."""
        self._stop_wanted.set()
        self._leaving.cancel()
        if self.replication is not None:
            # The child has a shield of its own, which cancelling our scope does not open.
            self.replication.force()
        if self.processes is not None:
            self.processes.force()
        self._scope.cancel()

    async def run(  # noqa: ASYNC910 - opening the nursery is a checkpoint, or it raises
        self, *, task_status: trio.TaskStatus[Started] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run until :meth:`shut_down`; report the real addresses once it serves.

        If it is cancelled, it drains as well, within ``GracefulDrainTimeoutSeconds``, and then
        raises ``Cancelled``. If a part crashes, the others are cancelled and the part's own
        exception is raised, not a group of one.

        Raises:
            BindError: an address cannot be listened on.
            StoreLockedError: another process uses the data directory.
            StorageError: the store cannot be opened.
            NotRunningError: it was run before, or :meth:`force` came before it had started.
            NotQuiescentError: there is single-tenant data to move, and no ``quiescence`` signal.
        """
        if self._used:
            raise NotRunningError("this runtime has been run already; make another one")
        self._used = True
        # Before anything listens, also on the admin address.
        await run_in_thread(require_startable, self.settings)
        try:
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                try:
                    self.started = await nursery.start(self._serve)
                    task_status.started(self.started)
                    await self._stop_wanted.wait()
                    await self._let_senders_leave()
                finally:
                    self._begin_drain()
        except BaseExceptionGroup as group:
            error = only_member(group)
            # A user sees the part's own exception, with the cause that it had, and not our
            # nurseries.
            raise error from (None if error is group else error.__cause__)
        finally:
            self._log_end()

    async def _let_senders_leave(self) -> None:
        """Go on serving while load balancers notice that this receiver is not ready any more."""
        delay = self.settings.server.shutdown_delay_seconds
        if delay:
            _log.info("runtime.leaving", reason=self._reason, seconds=delay)
        with self._leaving:
            await trio.sleep(delay)

    def _begin_drain(self) -> None:
        """Start the drain; synchronous, as it runs in a ``finally`` that may be cancelled."""
        # force() may have set an earlier deadline.
        self._scope.deadline = min(
            self._scope.deadline,
            trio.current_time() + self.settings.webhooks.graceful_drain_timeout_seconds,
        )
        if self.replication is not None:
            self.replication.end_by(self._scope.deadline)
        left = self._scope.deadline - trio.current_time()
        # On the clock that threads can read: what ends a stuck event loop cannot ask Trio.
        self._drain_ends_at = monotonic() + left
        self._drain_begun.set()
        if self.started is not None:
            self.receiver.stop_accepting()
            event = "runtime.draining" if self._worker is None else "process.draining"
            now = monotonic()
            # The handlers that the drain waits for: one that hangs takes all of its time.
            runs = [run.described(now) for run in self.receiver.runs[:MOST_REPORTED_RUNS]]
            waits = {"runs": runs} if runs else {}
            _log.info(event, reason=self._reason, queued=self.queue_depth, **waits)

    async def _serve(  # noqa: ASYNC128 - _run_parts calls it
        self, *, task_status: trio.TaskStatus[Started]
    ) -> None:
        settings = self.settings
        routes = Routes(settings, self.receiver)
        shares = share_descriptors(descriptor_limit())
        limits = Limits(
            connections=min(Limits().connections, shares.receiver),
            connections_per_source=settings.server.max_connections_per_address,
            refusals=shares.refusals,
        )
        server = self.processes or Server(
            routes.application,
            self._bind,
            key="Sdk:Server:Bind",
            graceful_seconds=settings.webhooks.graceful_drain_timeout_seconds,
            cert_file=settings.server.cert_file,
            key_file=settings.server.key_file,
            fast_path=settings.server.fast_path,
            limits=limits,
            source_of=self.receiver.source_of,
            note_refusal=self.receiver.note_refusal,
        )
        if isinstance(server, Server):
            self._server_samples = server.samples
        self._reloader.subscribe(partial(_prepare_addresses, server, routes), _TLS_KEYS)
        with children_ended(), self.watchdog, self._scope:
            async with AsyncExitStack() as stack:
                if self._client is not None:
                    # Opened first and closed last, because handlers use it until the drain ends.
                    await stack.enter_async_context(self._client)
                await self._run_parts(server, routes, stack, task_status=task_status)
        # Everything ended well, and yet nobody was ever served: a caller who waits for the start
        # has to hear of it.
        if not self._served:
            raise NotRunningError("the runtime was stopped by force before it had started")

    async def _run_parts(
        self,
        server: "Server | Processes",
        routes: Routes,
        stack: AsyncExitStack,
        *,
        task_status: trio.TaskStatus[Started],
    ) -> None:
        # Before anything listens, because another process may have it.
        stack.enter_context(self.receiver.locked())
        async with trio.open_nursery() as parts:
            admin: tuple[str, ...] = ()
            start = partial(self._start, parts)
            if self._administrator is not None:
                # First, so that probes see a long start, and cancelled last, so that they see
                # the drain.
                admin = await start("the admin address", self._administrator.run)
            # The store is open before anything listens: the first delivery must not wait for a
            # migration.
            await stack.enter_async_context(self.receiver.opened())
            await self.receiver.start_services(parts)
            replicates = self.settings.multi_tenant.file_db.replication.use_replication
            replicates = replicates and self._share.singletons
            # Several hosts may share the store: one of them does what one alone may do.
            led = self.settings.storage.backend is StorageBackend.POSTGRES
            if replicates and not led:
                for name, part in self._make_replication():
                    await start(name, part)
            started = Started(receiver=await start("the server", server.run), admin=admin)
            if self._listens:
                routes.started(started.receiver[0])
            if self._worker is None:
                self._announce(started, stack)
                _log.info("runtime.started", receiver=started.receiver, admin=started.admin)
            else:
                _log.info("process.started", pid=os.getpid())
            # From here on, only the drain's deadline or force() ends the parts.
            self._scope.shield = self._served = True
            task_status.started(started)
            # After the start was reported: its first pass asks for redeliveries, which this server
            # has to take.
            if led and (replicates or self._reconciles):
                await start("leadership", partial(self._lead, replicates))
            elif self._reconciles:
                await start("reconciliation", self._reconcile)
            await self._drain_begun.wait()
            # A pass asks the upstream for deliveries that this process will not accept any more.
            self._reconciling.cancel()
            server.stop()
            # Requests in progress first: an inline run ends in its request, and may still put an
            # event into the queue.
            await server.ended.wait()
            await self.receiver.finish()
            parts.cancel_scope.cancel()

    def _announce(self, started: Started, stack: AsyncExitStack) -> None:
        """Let commands find this runtime, where it holds the lock of the data directory."""
        if self.settings.storage.backend is StorageBackend.MEMORY:
            return  # another program may have the directory
        from .presence import announced

        with self._reporting_no_announcement():
            presence = self._presence(started.receiver[0] if self._listens else "")
            stack.enter_context(announced(self.settings.storage.path, presence))
            self._announced = True

    def announce(self, address: str) -> None:
        """Let commands find this runtime at the ``address`` of the server that passes requests on.

        ``http://HOST:PORT`` or ``unix:PATH``; without it ``events trigger`` asks for ``--url``.
        """
        if self._announced:
            from .presence import announce

            with self._reporting_no_announcement():
                announce(self.settings.storage.path, self._presence(address))

    def _presence(self, address: str) -> "Presence":
        from .presence import SETTINGS_SECRET, Presence

        url = own_url(address, self.settings.webhooks.path) if address else ""
        return Presence(address, url, os.getpid(), SETTINGS_SECRET)

    @contextmanager
    def _reporting_no_announcement(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _log.warning("runtime.not_announced", error=str(error), hint="commands need --url")

    async def _start(self, parts: trio.Nursery, name: str, part: Part) -> Any:
        return await parts.start(partial(keep, name, part, may_end=self._drain_begun.is_set))

    async def _lead(  # noqa: ASYNC128 - the leadership calls it
        self, replicates: bool, *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Replicate and reconcile while this host leads those that share its store."""
        from ..storage.term import MARGIN_SECONDS, Leadership

        async def lead(term: int) -> None:
            self._reconciling = trio.CancelScope()
            async with trio.open_nursery() as parts:
                if replicates:
                    for name, part in self._make_replication(term):
                        await self._start(parts, name, part)
                if self._reconciles and not self.draining:
                    await parts.start(partial(self._reconcile, term))

        def hurry() -> None:
            # The last sync of a supervised replicator must be over before the term is.
            if self.replication is not None:
                self.replication.end_by(trio.current_time() + MARGIN_SECONDS / 2)

        self.leadership = Leadership(self.receiver.store, lead, hurry)
        await self.leadership.run(task_status=task_status)

    def _make_replication(self, term: int | None = None) -> list[tuple[str, Part]]:
        from .replication import ReplicationOverseer, make_scheduler

        self.replication = ReplicationOverseer(self.settings, self.receiver.tenancy.service)
        self.verification = make_scheduler(
            self.settings,
            self.receiver.tenancy.service,
            self.receiver.store,
            clock=self.clock,
            term=term,
        )
        return [
            *self.replication.parts(),
            ("the verification of replicas", self.verification.run),
        ]

    async def _reconcile(
        self, term: int | None = None, *, task_status: trio.TaskStatus[None]
    ) -> None:
        from ..client.client import UpstreamDeliveries  # loads the client, which is optional
        from ..reconcile.reconciler import Reconciler

        reconciler = Reconciler(
            UpstreamDeliveries(self.client),
            self.receiver.store,
            self.settings,
            clock=self.clock,
            term=term,
        )
        task_status.started()
        with self._reconciling:
            await reconciler.run()

    def _log_end(self) -> None:
        report = self.report
        if report is None:
            return
        if self._worker is not None:
            _log.info("process.stopped", drained=report.drained)
            return
        # Only a store in memory loses events, and somebody should be woken for that.
        log = _log.error if report.lost else _log.info
        log(
            "runtime.stopped",
            drained=report.drained,
            persisted=report.persisted,
            lost=report.lost,
            ids=report.ids,
        )


def _nobody_is_told(settings: Settings) -> Callable[[], None]:
    return lambda: None


def _prepare_addresses(
    server: "Server | Processes", routes: Routes, settings: Settings
) -> Callable[[], None]:
    cert_file, key_file = settings.server.cert_file, settings.server.key_file
    if cert_file is None or key_file is None:
        return partial(routes.reload, settings)
    use_certificate = server.prepare_certificate(cert_file, key_file)

    def commit() -> None:
        use_certificate()
        routes.reload(settings)

    return commit
