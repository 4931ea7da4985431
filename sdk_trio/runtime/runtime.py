"""The runtime: start, serve, drain.

:meth:`Runtime.run` has three layers:

1. Its body waits for the stop. Only the body gets the caller's cancellation.
2. When the body ends for any reason, a synchronous ``finally`` begins the drain.
3. The parts run in a shielded scope, so they drain even if the caller is cancelled. The ``finally``
    gives that scope its deadline, ``GracefulDrainTimeoutSeconds`` later. Without a deadline, a part
    that hangs could not be stopped.

A stop has this order:

1. The runtime is unready; for ``Server:ShutdownDelaySeconds`` it still accepts deliveries.
2. The drain begins: no new connections, and no new reconciliation pass.
3. Requests in progress end, and with them the inline runs.
4. The queue and its handlers end.
5. All other parts end, the admin address last, so that probes can watch the drain.
"""

import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import trio

from ..base.clock import monotonic
from ..base.executor import run_in_thread
from ..base.logs import get_logger
from ..config import Settings, StorageBackend
from ..errors import NotRunningError, only_member
from ..server.limits import Limits, share_descriptors
from ..server.listen import descriptor_limit
from ..server.serve import Server
from ..webhooks import HandlerRegistry, WebhookReceiver
from .forks import children_ended
from .leader import LeaderParts
from .preflight import require_startable
from .presence import Announcement
from .state import RuntimeState, Started
from .wiring import Routes

if TYPE_CHECKING:
    from ..client.client import Client
    from ..tenants.tenancy import ClientFactory
    from ..tenants.upgrade import HostUpgrade, Quiescence
    from .notifications import ChannelFactory
    from .processes import Processes
    from .worker import WorkerAssignment

_log = get_logger("runtime")

_TLS_KEYS = ("Sdk:Server:CertFile", "Sdk:Server:KeyFile")

#: The maximum number of handlers that are named when a drain begins.
MOST_REPORTED_RUNS = 20


class Runtime(RuntimeState):
    """Client, receiver, store, queue and workers as tasks of one nursery.

    Args:
        settings: validated settings of :func:`sdk_trio.load_settings`.
        handlers: the handlers by event type; None: every event is parked.
        client: a client to use, not open yet, for example one with your own transport; None: the
            runtime makes one from the settings. The runtime opens and closes it in both cases.
        standalone: run without a client; None: only if there is neither an access token nor a
            ``client``.
        clock: returns Unix seconds; None: the clock of :mod:`sdk_trio.base.clock`.
        client_factory: makes the client of a tenant from settings with its access token.
        host_upgrade: the host's part of the upgrade from a single tenant: a resolver and steps.
        quiescence: the host's signal that nothing writes its data. With
            ``RequireGracefulQuiescence``, a host that has data to move needs it to start.
        channels: makes the channels of notifications; None: those of the settings.
        workers: makes the supervisor of the processes of ``Server:Processes``. Only the command
            line passes it.
        worker: makes this runtime one of these processes, with its share of the work and its
            sockets.
        listens: False: another server passes deliveries to ``runtime.receiver``, and
            ``Server:Bind`` is not used.

    Raises:
        OptionsValidationError: the settings enable a part that needs a client, an extra or
            tenants, and these are missing.
        MissingHandlersError: ``FailOnMissingHandlers`` is true and a known type has no handler.
        NotSupportedError: ``DefaultTenantStrategy`` is FirstUserOrganization.
        DefaultTenantError: ``DefaultTenantStrategy`` is HostSupplied, and ``host_upgrade`` has no
            resolver.

    A runtime runs once; create another one to run again. It installs no signal handler.
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
        worker: "WorkerAssignment | None" = None,
        listens: bool = True,
    ) -> None:
        super().__init__(
            settings,
            handlers,
            client=client,
            standalone=standalone,
            clock=clock,
            client_factory=client_factory,
            host_upgrade=host_upgrade,
            quiescence=quiescence,
            channels=channels,
            workers=workers,
            worker=worker,
            listens=listens,
        )
        self._reason = "the surrounding scope ended"
        # Around all parts. It gets its shield once they serve, and its deadline when the drain
        # begins.
        self._scope = trio.CancelScope()
        # Around the wait of ShutdownDelaySeconds, which force() ends.
        self._delay = trio.CancelScope()
        self._drain_ends_at: float | None = None
        self._announcement: Announcement | None = None
        self._used = False
        self._served = False

    def shut_down(self, reason: str) -> None:
        """Begin a graceful stop: accept nothing new, drain, end. A second call does nothing.

        With ``Server:ShutdownDelaySeconds``, deliveries are still accepted for that long, while
        :attr:`ready` is already false.
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
        """Release the events whose handlers do not end when cancelled, and log the report.

        The process must end right after it. A handler in a thread or behind a shield would keep
        the process alive without limit. See docs/explanation/delivery.md.
        """
        await self.receiver.leave()
        self._log_end()

    def force(self) -> None:
        """End the drain early: cancel the handlers now; their events stay in the store."""
        self._stop_wanted.set()
        self._delay.cancel()
        if self.replication is not None:
            # The replicator runs behind its own shield, which this scope does not cancel.
            self.replication.force()
        if self.processes is not None:
            self.processes.force()
        self._scope.cancel()

    async def run(  # noqa: ASYNC910 - opening the nursery is a checkpoint, or it raises
        self, *, task_status: trio.TaskStatus[Started] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run until :meth:`shut_down`; report the actual addresses once it serves.

        Cancellation drains too, within ``GracefulDrainTimeoutSeconds``, and then raises
        ``Cancelled``. If a part crashes, the others are cancelled, and the part's own exception is
        raised instead of a group of one.

        Raises:
            BindError: an address cannot be listened on.
            StoreLockedError: another process uses the data directory.
            StorageError: the store cannot be opened.
            NotRunningError: it was run before, or :meth:`force` was called before it served.
            NotQuiescentError: there is single-tenant data to move, and no ``quiescence`` signal.
        """
        if self._used:
            raise NotRunningError("this runtime has already been run; create another one")
        self._used = True
        # Before anything listens, including the admin address.
        await run_in_thread(require_startable, self.settings)
        try:
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                try:
                    self.started: Started | None = await nursery.start(self._serve)
                    task_status.started(self.started)
                    await self._stop_wanted.wait()
                    await self._wait_for_load_balancers()
                finally:
                    self._begin_drain()
        except BaseExceptionGroup as group:
            error = only_member(group)
            # The user gets the part's own exception with its cause, without groups of our
            # nurseries.
            raise error from (None if error is group else error.__cause__)
        finally:
            self._log_end()

    async def _wait_for_load_balancers(self) -> None:
        """Continue to serve until load balancers have noticed that the receiver is not ready."""
        delay = self.settings.server.shutdown_delay_seconds
        if delay:
            _log.info("runtime.leaving", reason=self._reason, seconds=delay)
        with self._delay:
            await trio.sleep(delay)

    def _begin_drain(self) -> None:
        """Start the drain; synchronous, because it runs in a ``finally`` of a cancelled task."""
        # force() may have set an earlier deadline.
        self._scope.deadline = min(
            self._scope.deadline,
            trio.current_time() + self.settings.webhooks.graceful_drain_timeout_seconds,
        )
        if self.replication is not None:
            self.replication.end_by(self._scope.deadline)
        left = self._scope.deadline - trio.current_time()
        # On a clock that threads can read: a thread ends the process if the event loop is stuck.
        self._drain_ends_at = monotonic() + left
        self._drain_begun.set()
        if self.started is not None:
            self.receiver.stop_accepting()
            event = "runtime.draining" if self._worker is None else "process.draining"
            now = monotonic()
            # Name the handlers that the drain waits for, so that one that hangs can be found.
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
                    # Opened first and closed last: handlers use it until the end of the drain.
                    await stack.enter_async_context(self._client)
                await self._run_parts(server, routes, stack, task_status=task_status)
        # No error, but a caller that waits for the start must not wait forever.
        if not self._served:
            raise NotRunningError("the runtime was forced to stop before it had started")

    async def _run_parts(
        self,
        server: "Server | Processes",
        routes: Routes,
        stack: AsyncExitStack,
        *,
        task_status: trio.TaskStatus[Started],
    ) -> None:
        leader_parts = self._make_leader_parts()
        # Before anything listens: another process may hold the lock of the data directory.
        stack.enter_context(self.receiver.locked())
        async with trio.open_nursery() as parts:
            admin: tuple[str, ...] = ()
            start = partial(leader_parts.start, parts)
            if self._administrator is not None:
                # First, so that probes see a long start; cancelled last, so that they see the
                # drain.
                admin = await start("the admin address", self._administrator.run)
            # Before anything listens, because the first delivery must not wait for a migration.
            await stack.enter_async_context(self.receiver.opened())
            await self.receiver.start_services(parts)
            await leader_parts.start_before_serving(parts)
            started = Started(receiver=await start("the server", server.run), admin=admin)
            if self._listens:
                routes.started(started.receiver[0])
            self._report_start(started, stack)
            # From here on, only the drain's deadline or force() ends the parts.
            self._scope.shield = self._served = True
            task_status.started(started)
            await leader_parts.start_after_serving(parts)
            if self.alerts is not None:
                await start("the alerts", self.alerts.run)
            await self._drain_begun.wait()
            leader_parts.stop_reconciling()
            await self._drain(server)
            parts.cancel_scope.cancel()

    def _make_leader_parts(self) -> LeaderParts:
        replication = self.settings.multi_tenant.file_db.replication
        return LeaderParts(
            self,
            replicates=replication.use_replication and self._share.singletons,
            reconciles=self._reconciles,
            alerts=self.alerts is not None,
            may_end=self._drain_begun.is_set,
        )

    async def _drain(self, server: "Server | Processes") -> None:
        """End the requests in progress, then the queue and its handlers.

        The requests come first: an inline run belongs to its request, and may still put an event
        into the queue.
        """
        server.stop()
        await server.ended.wait()
        await self.receiver.finish()

    def _report_start(self, started: Started, stack: AsyncExitStack) -> None:
        if self._worker is not None:
            _log.info("process.started", pid=os.getpid())
            return
        # With a store in memory, another program may use the data directory.
        if self.settings.storage.backend is not StorageBackend.MEMORY:
            address = started.receiver[0] if self._listens else ""
            self._announcement = Announcement(self.settings)
            stack.enter_context(self._announcement.kept(address))
        _log.info("runtime.started", receiver=started.receiver, admin=started.admin)

    def announce(self, address: str) -> None:
        """Write the ``address`` of the server that passes requests on, for commands to find.

        The address is ``http://HOST:PORT`` or ``unix:PATH``. Without it, ``events trigger`` needs
        ``--url``.
        """
        if self._announcement is not None:
            self._announcement.write(address)

    def _log_end(self) -> None:
        report = self.report
        if report is None:
            return
        if self._worker is not None:
            _log.info("process.stopped", drained=report.drained)
            return
        # Only a store in memory loses events. An operator has to know about that.
        log = _log.error if report.lost else _log.info
        log(
            "runtime.stopped",
            drained=report.drained,
            persisted=report.persisted,
            lost=report.lost,
            ids=report.ids,
        )


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
